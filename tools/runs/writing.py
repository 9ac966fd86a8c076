"""Text, JSON and figures as every file and every `--json` of these tools has them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files import write_bytes
from tools.runs.errors import RecordError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_FORMATS = (".png", ".svg")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to `path` atomically. Raises DataError if it cannot."""
    write_bytes(path, text.encode())


def json_text(value: Any) -> str:
    """Indented JSON with a newline at its end."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_figure(path: Path, figure: Figure, dpi: int) -> None:
    """Write a figure in the format that the name ends in, atomically. Raises DataError if it cannot."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.removeprefix("."), dpi=dpi)
    write_bytes(path, buffer.getvalue())


def figure_path(path: Path) -> Path:
    """`path`, if its name ends in a format that figures have. Raises RecordError."""
    if path.suffix not in FIGURE_FORMATS:
        raise RecordError(f"--out {path}: expected a name that ends in {' or '.join(FIGURE_FORMATS)}")
    return path
