"""Text files as people save them: UTF-8, with a byte order mark or without, or UTF-16 with its mark.

Some editors write such marks, and Windows PowerShell writes UTF-16 after `>`.
"""

from __future__ import annotations

import codecs
import io
import os
import re
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
# What steers a terminal, or shows other characters than there are: controls but for tabs and the ends of
# lines, the marks that change the direction of writing, and the ends of lines that only Unicode knows.
CONTROL_CHARACTER = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """`text` for a terminal: what a folder holds may be no valid Unicode, or steer the terminal."""
    shown = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return CONTROL_CHARACTER.sub(lambda match: match[0].encode("unicode_escape").decode(), shown)


def one_line(text: str) -> str:
    """`text` as one printable line: a name with a newline may not pass for two lines."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def name_of(path: Path) -> str:
    """The name of a file or folder, to be shown on one line: UTF-8 whatever the locale, the rest escaped."""
    return one_line(os.fsencode(path.name).decode("utf-8", "backslashreplace"))


def path_of(path: Path) -> str:
    """A whole path, to be shown as `name_of` shows a name."""
    return one_line(os.fsencode(path).decode("utf-8", "backslashreplace"))


def encoding_of(data: bytes) -> str:
    """The encoding that the byte order mark of a file names; without one UTF-8."""
    return next((name for mark, name in MARKS if data.startswith(mark)), "utf-8")


def as_text(data: bytes) -> str:
    """The text of a file, its lines ended by newlines; bytes that are none are replaced."""
    return io.TextIOWrapper(io.BytesIO(data), encoding=encoding_of(data), errors="replace").read()


def exact_text(data: bytes) -> str:
    """The text of a file. ValueError, in words, where it holds bytes that are not text."""
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
