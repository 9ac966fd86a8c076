"""Atomic writes: nothing half-written is ever left under its final name."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes) -> None:
    """Write through a temporary file in the same folder; readable by others as a plain write would be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def json_text(value: Any) -> str:
    """JSON as every file and every `--json` of this package has it."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
