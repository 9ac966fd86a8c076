"""Markdown that tools write: tables, and text between two marks of a file, which nobody edits by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.runs.errors import RecordError
from tools.runs.reading import exact_text
from tools.runs.writing import write_text


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; None is shown as a dash."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        cells = ["–" if cell is None else str(cell) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


class Parts(NamedTuple):
    """A text cut at two marks; the three joined are the text."""

    before: str  # up to the begin mark, which is its end
    between: str
    after: str  # from the end mark on


def split_at_marks(text: str, begin: str, end: str) -> Parts | None:
    """The text cut at the first begin mark and the first end mark behind it; None where one is missing."""
    begin_at = text.find(begin)
    if begin_at < 0:
        return None
    start = begin_at + len(begin)
    stop = text.find(end, start)
    if stop < 0:
        return None
    return Parts(text[:start], text[start:stop], text[stop:])


@dataclass(frozen=True)
class Block:
    """A generated part of a file: its place, and the function that makes its text."""

    path: Path
    begin: str
    end: str
    render: Callable[[], str]


def refresh(block: Block, check: bool = False) -> bool:
    """Bring a block up to date, with `check` only compare. Returns whether it was stale.

    Raises RecordError where the file or one of the marks is missing.
    """
    if not block.path.is_file():
        raise RecordError(f"{block.path} is missing: write one with the lines {block.begin} and {block.end}")
    try:
        old = exact_text(block.path.read_bytes()).replace("\r\n", "\n")
    except ValueError as error:
        raise RecordError(f"{block.path}: {error}") from error
    parts = split_at_marks(old, block.begin, block.end)
    if parts is None:
        raise RecordError(
            f"{block.path} lacks the marks {block.begin} and {block.end}: put them where the text belongs"
        )
    new = f"{parts.before}\n{block.render().strip()}\n{parts.after}"
    if new != old and not check:
        write_text(block.path, new)
    return new != old
