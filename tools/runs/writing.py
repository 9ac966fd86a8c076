"""Text, tables, JSON and figures as every file and every `--json` of these tools has them."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from data.files import write_bytes
from tools.runs.errors import RecordError
from tools.runs.reading import one_line, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_FORMATS = (".png", ".svg")


class Terminal(io.TextIOBase):
    """A stream that prints what is written to it without steering the terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(text))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to `path` atomically. Raises DataError if it cannot.

    Names of files may hold bytes that are not UTF-8: those are written as backslash escapes.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def json_text(value: Any) -> str:
    """Indented JSON with a newline at its end, for a file."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def print_json(value: Any) -> None:
    """Print indented JSON in ASCII: a console that escapes what it cannot print would spoil any other."""
    print(json.dumps(value, indent=2))


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, each row on one line; empty text without rows."""
    if not rows:
        return ""
    lines = [[one_line(cell) for cell in line] for line in (header, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    padded = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        padded.append("  ".join(cells).rstrip())
    return "\n".join(padded)


def pyplot_without_display() -> ModuleType:
    """matplotlib's pyplot, for files; names show as they are: a dollar sign begins no formula."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False
    return importlib.import_module("matplotlib.pyplot")


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
