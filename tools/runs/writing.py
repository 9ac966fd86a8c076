"""Text and JSON as every file and every `--json` of these tools has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data.files import write_bytes


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to `path` atomically. Raises DataError where the disk refuses."""
    write_bytes(path, text.encode())


def json_text(value: Any) -> str:
    """Indented JSON with a newline at its end."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
