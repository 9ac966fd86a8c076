"""CaseOps: a lossless case transform, so that a tokenizer sees one spelling of each word (PR #1729).

A run of ASCII letters that holds capitals is written in lower case behind a mark: TITLE for "Word", CAPS for
"WORD"; any other gets TITLE if it begins with a capital and NEXT before each later one ("iPhone", "McGraw").
A mark that occurs in the text itself is written behind ESCAPE. Every string has exactly one code, and
`decode` refuses what `encode` cannot have written.

Bytes are counted in the original text: marks count nothing, an escaped character its own UTF-8 length.
"""

from __future__ import annotations

import re

import numpy as np

TITLE, CAPS, NEXT, ESCAPE = "\ue001", "\ue002", "\ue003", "\ue004"
MARKS = (TITLE, CAPS, NEXT, ESCAPE)

NEEDS_CODE = re.compile("(?<![A-Za-z])[a-z]*[A-Z][A-Za-z]*|[\ue001-\ue004]")
CAPITAL = re.compile("[A-Z]")
CODED = re.compile("\ue004(?P<literal>[\ue001-\ue004])|\ue004|"
                   "(?P<run>(?<![A-Za-z])[a-z]*[A-Z\ue001-\ue003][A-Za-z\ue001-\ue003]*)")


class CaseOpsError(ValueError):
    """Text that `encode` cannot have written."""


def encode(text: str) -> str:
    """Code of `text`; `decode` gives the same text back."""
    return NEEDS_CODE.sub(encode_run, text)


def encode_run(match: re.Match[str]) -> str:
    """Code of one run of letters that holds a capital, or of one mark found in the text."""
    run = match[0]
    if run in MARKS:
        return ESCAPE + run
    if len(run) > 1 and run.isupper():
        return CAPS + run.lower()
    head = run[0]
    rest = run[1:]
    coded_rest = CAPITAL.sub(lambda letter: NEXT + letter[0].lower(), rest)
    return (TITLE + head.lower() if head.isupper() else head) + coded_rest


def decode(coded: str) -> str:
    """Text whose code is `coded`. Raises CaseOpsError where there is none."""
    return CODED.sub(decode_run, coded)


def decode_run(match: re.Match[str]) -> str:
    """Text of one escaped mark or of one run of letters and marks."""
    if match["literal"]:
        return match["literal"]
    run = match["run"]
    if run is None:
        raise CaseOpsError(f"an escape without a mark behind it at character {match.start()}")
    if run[0] == CAPS:
        text = run[1:].upper()
    else:
        text = re.sub(f"(?:(?<!.){TITLE}|{NEXT})([a-z])", lambda letter: letter[1].upper(), run)
    if encode(text) != run:  # one code per text: whatever does not come back was not written by `encode`
        raise CaseOpsError(f"{run!r} at character {match.start()} is no code of any text")
    return text


def byte_counts(coded: str) -> np.ndarray:
    """UTF-8 bytes of the original behind each character of `coded`: int64 of shape (characters,)."""
    code_points = np.frombuffer(coded.encode("utf-32-le"), dtype="<u4")
    counts = 1 + (code_points > 0x7F) + (code_points > 0x7FF).astype(np.int64) + (code_points > 0xFFFF)
    is_mark = (code_points >= ord(TITLE)) & (code_points <= ord(ESCAPE))
    counts[is_mark] = 0
    for match in re.finditer(f"{ESCAPE}(.)", coded, re.DOTALL):
        counts[match.start(1)] = len(match[1].encode())
    return counts
