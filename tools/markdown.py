"""Text between two marks of a file, which nobody edits by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.runs.errors import RecordError
from tools.runs.reading import exact_text
from tools.runs.writing import write_text
from tools.submit.readme import split_at_marks
from tools.submit.readme import table as table


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
