"""CaseOps: a lossless case transform, so that a tokenizer sees one spelling of each word (PR #1729).

A run of ASCII letters that holds capitals is written in lower case after a mark: TITLE for "Word", CAPS for
"WORD"; any other gets TITLE if it begins with a capital and NEXT before each later one ("iPhone", "McGraw").
A mark that occurs in the text itself is written after ESCAPE. Every string has exactly one code, and
`decode` refuses what `encode` cannot have written.

The fused form has two marks more, SPACE_TITLE and SPACE_CAPS, for a word after white space: they come
before that white space, unless the text begins with it. A tokenizer then cuts "the Word" into "the", mark
and the same piece "▁word" that it has for the small word, where the published form needs "▁", mark and
"word" (PR #2109 joins the first two).

Bytes are counted in the original text: marks count nothing, an escaped character its own UTF-8 length.
"""

from __future__ import annotations

import re
from typing import Protocol

import numpy as np

TITLE, CAPS, NEXT, ESCAPE = "\ue001", "\ue002", "\ue003", "\ue004"
SPACE_TITLE, SPACE_CAPS = "\ue005", "\ue006"
MARKS = (TITLE, CAPS, NEXT, ESCAPE)
FUSED_MARKS = (*MARKS, SPACE_TITLE, SPACE_CAPS)
FIRST_MARK_ID = 4  # of a tokenizer's pieces: the marks come after pad, bos, eos and unk, in their order

SPACE, NO_SPACE = "[ \t\n\r]", "[^ \t\n\r]"
NEEDS_CODE = re.compile("(?P<run>(?<![A-Za-z])[a-z]*[A-Z][A-Za-z]*)|[\ue001-\ue004]")
NEEDS_FUSED_CODE = re.compile(f"(?P<space>(?<={NO_SPACE}){SPACE}+)(?P<behind_space>[A-Z][A-Za-z]*)|"
                              "(?P<run>(?<![A-Za-z])[a-z]*[A-Z][A-Za-z]*)|[\ue001-\ue006]")
CAPITAL = re.compile("[A-Z]")
CODED_RUN = "(?P<run>(?<![A-Za-z])[A-Za-z]*[\ue001-\ue003][A-Za-z\ue001-\ue003]*)"
CODED = re.compile(f"{ESCAPE}(?P<literal>[\ue001-\ue004])|{CODED_RUN}|{ESCAPE}")
FUSED_CODED = re.compile(f"{ESCAPE}(?P<literal>[\ue001-\ue006])|"
                         f"(?P<mark>[{SPACE_TITLE}{SPACE_CAPS}])(?P<space>{SPACE}*)"
                         f"(?P<behind_space>[a-z][A-Za-z\ue001-\ue003]*)?|{CODED_RUN}|{ESCAPE}")
CAPITALIZED = re.compile(f"[{TITLE}{CAPS}{NEXT}]+([A-Za-z]?)")


class CaseOpsError(ValueError):
    """Text that `encode` cannot have written."""


class Pieces(Protocol):
    """The part of a SentencePiece model that is used here."""

    def vocab_size(self) -> int: ...

    def id_to_piece(self, token: int) -> str: ...


def marks_of(fused: bool) -> tuple[str, ...]:
    """The marks of a form, in the order in which a tokenizer has them as pieces."""
    return FUSED_MARKS if fused else MARKS


def form_of(pieces: Pieces) -> bool | None:
    """The form that a tokenizer was trained on: True fused, False not, None where it has no marks."""
    for fused in (True, False):
        marks = marks_of(fused)
        stop = FIRST_MARK_ID + len(marks)
        if stop <= pieces.vocab_size():
            found = [pieces.id_to_piece(token) for token in range(FIRST_MARK_ID, stop)]
            if found == list(marks):
                return fused
    return None


def encode(text: str, fused: bool = False) -> str:
    """Code of `text`; `decode` gives the same text back."""
    if fused:
        return NEEDS_FUSED_CODE.sub(encode_match, text)
    return NEEDS_CODE.sub(encode_match, text)


def encode_match(match: re.Match[str]) -> str:
    """Code of a run of letters that holds a capital, with the space before it or not, or of a lone mark."""
    groups = match.groupdict()
    if groups["run"]:
        return encode_run(groups["run"])
    if groups.get("behind_space"):
        coded = encode_run(groups["behind_space"])
        mark = SPACE_TITLE if coded[0] == TITLE else SPACE_CAPS
        return mark + groups["space"] + coded[1:]
    return ESCAPE + match[0]


def encode_run(run: str) -> str:
    """Code of one run of letters that holds a capital."""
    if len(run) > 1 and run.isupper():
        return CAPS + run.lower()
    head = run[0]
    rest = run[1:]
    coded_rest = CAPITAL.sub(lambda letter: NEXT + letter[0].lower(), rest)
    return (TITLE + head.lower() if head.isupper() else head) + coded_rest


def decode(coded: str, fused: bool = False) -> str:
    """Text whose code is `coded`. Raises CaseOpsError where there is none."""
    text = read(coded, fused)
    again = encode(text, fused)
    if again != coded:  # one code per text: whatever does not come back was not written by `encode`
        at = 0
        while at < min(len(coded), len(again)) and coded[at] == again[at]:
            at += 1
        raise CaseOpsError(f"{coded[at:at + 20]!r} at character {at} is not the CaseOps code of any text")
    return text


def read(coded: str, fused: bool = False) -> str:
    """Text of `coded`, where it is a code; of anything else, as a model may write it, what comes nearest.

    A mark without a letter to apply to is left out, so the result is readable wherever the code breaks off.
    """
    if fused:
        return FUSED_CODED.sub(read_match, coded)
    return CODED.sub(read_match, coded)


def read_match(match: re.Match[str]) -> str:
    """Text of one escaped mark, or of one run of letters and marks; nothing for an escape alone."""
    groups = match.groupdict()
    if groups["literal"]:
        return groups["literal"]
    if groups["run"]:
        return read_run(groups["run"])
    if groups.get("mark"):
        mark = TITLE if groups["mark"] == SPACE_TITLE else CAPS
        return groups["space"] + read_run(mark + (groups["behind_space"] or ""))
    return ""


def read_run(run: str) -> str:
    """Text of one run of letters and marks."""
    text = CAPITALIZED.sub(lambda letter: letter[1].upper(), run)
    return text.upper() if run[0] == CAPS else text


def byte_counts(coded: str, fused: bool = False) -> np.ndarray:
    """UTF-8 bytes of the original behind each character of `coded`: int64 of shape (characters,)."""
    code_points = np.frombuffer(coded.encode("utf-32-le"), dtype="<u4")
    counts = 1 + (code_points > 0x7F) + (code_points > 0x7FF).astype(np.int64) + (code_points > 0xFFFF)
    is_mark = (code_points >= ord(TITLE)) & (code_points <= ord(marks_of(fused)[-1]))
    counts[is_mark] = 0
    for match in re.finditer(f"{ESCAPE}(.)", coded, re.DOTALL):
        counts[match.start(1)] = len(match[1].encode())
    return counts
