"""Text files as people save them: UTF-8, with a byte order mark or without, or UTF-16 with its mark.

Some editors write such marks, and Windows PowerShell writes UTF-16 behind `>`.
"""

from __future__ import annotations

import codecs
import io
import os
from pathlib import Path

# UTF-32 first: its mark begins as that of UTF-16 does.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
SAVE_IT = "save it as UTF-8"


def name_of(path: Path) -> str:
    """The name of a file or folder, to be shown: UTF-8 whatever the locale says, other bytes as escapes."""
    return os.fsencode(path.name).decode("utf-8", "backslashreplace")


def encoding_of(data: bytes) -> str:
    """The encoding that the byte order mark of a file names; without one UTF-8."""
    return next((name for mark, name in MARKS if data.startswith(mark)), "utf-8")


def as_text(data: bytes) -> str:
    """The text of a file, its lines ended by newlines; bytes that are none are replaced."""
    return io.TextIOWrapper(io.BytesIO(data), encoding=encoding_of(data), errors="replace").read()


def exact_text(data: bytes) -> str:
    """The text of a file. ValueError, in words, where it holds bytes that are no text."""
    encoding = encoding_of(data)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.removesuffix("-sig").upper()
        raise ValueError(f"byte {error.start} is not {name} text; {SAVE_IT}") from error
    if "\0" in text:
        raise ValueError(f"it holds NUL bytes, as UTF-16 without a byte order mark does; {SAVE_IT}")
    return text


def plain_text(data: bytes) -> str:
    """The text of a file that other programs read as UTF-8. ValueError where it has a byte order mark."""
    encoding = encoding_of(data)
    if encoding != "utf-8":
        name = encoding.removesuffix("-sig").upper()
        raise ValueError(f"it begins with the byte order mark of {name}; {SAVE_IT} without one")
    return exact_text(data)
