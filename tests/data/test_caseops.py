"""CaseOps: one code per text, nothing lost, every byte counted."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import caseops

TITLE, CAPS, NEXT, ESCAPE = caseops.MARKS
ALPHABET = "aabzAABZ éÉßǅıİſK ’1_\n\t" + "".join(caseops.MARKS) + "\ue000\ue005日\U0001f600\0"


@pytest.mark.parametrize(("text", "coded"), [
    ("", ""), ("word", "word"), ("Word", f"{TITLE}word"), ("WORD", f"{CAPS}word"), ("I", f"{TITLE}i"),
    ("iPhone", f"i{NEXT}phone"), ("McGraw", f"{TITLE}mc{NEXT}graw"), ("ABc", f"{TITLE}a{NEXT}bc"),
    ("NASA's Élan", f"{CAPS}nasa's É" + "lan"), ("éA", f"é{TITLE}a"), ("X1Y", f"{TITLE}x1{TITLE}y"),
    (f"a{TITLE}B", f"a{ESCAPE}{TITLE}{TITLE}b"), (ESCAPE * 2, ESCAPE * 4),
])
def test_golden_codes(text: str, coded: str) -> None:
    assert caseops.encode(text) == coded
    assert caseops.decode(coded) == text


@pytest.mark.parametrize("coded", [
    "A", "aB", TITLE, f"{TITLE}1", f"{CAPS}a", f"{CAPS}aB", f"a{TITLE}b", f"{NEXT}a", f"a{NEXT}", ESCAPE,
    f"{ESCAPE}a", f"{TITLE}{NEXT}a", f"{CAPS}a{NEXT}b", f"{TITLE}{TITLE}a", f"a{NEXT}{NEXT}b", f"{TITLE}\né",
])
def test_what_encode_cannot_write_is_refused(coded: str) -> None:
    with pytest.raises(caseops.CaseOpsError):
        caseops.decode(coded)


@given(st.text(st.sampled_from(ALPHABET)))
def test_round_trip_and_bytes(text: str) -> None:
    coded = caseops.encode(text)
    assert caseops.decode(coded) == text
    assert not any("A" <= character <= "Z" for character in coded)
    counts = caseops.byte_counts(coded)
    assert len(counts) == len(coded)
    assert counts.sum() == len(text.encode())


@given(st.text(st.sampled_from(ALPHABET)))
def test_every_code_is_the_code_of_its_text(coded: str) -> None:
    try:
        text = caseops.decode(coded)
    except caseops.CaseOpsError:
        return
    assert caseops.encode(text) == coded


def test_marks_count_nothing_and_escaped_marks_their_own_bytes() -> None:
    coded = f"{ESCAPE}{ESCAPE}{TITLE}é{NEXT}日\U0001f600"
    assert caseops.byte_counts(coded).tolist() == [0, 3, 0, 2, 0, 3, 4]


@pytest.mark.slow
def test_round_trip_of_300000_random_strings() -> None:
    generator = random.Random(0)
    for _ in range(300_000):
        text = "".join(generator.choices(ALPHABET, k=generator.randrange(24)))
        coded = caseops.encode(text)
        assert caseops.decode(coded) == text
        assert caseops.byte_counts(coded).sum() == len(text.encode())


@pytest.mark.parametrize("stride", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_round_trip_of_real_documents(shared_data: Path, stride: int) -> None:
    with open(shared_data / "docs_selected.jsonl", encoding="utf-8") as file:
        for line in itertools.islice(file, 0, None, stride):
            text = json.loads(line)["text"]
            coded = caseops.encode(text)
            assert caseops.decode(coded) == text
            assert caseops.byte_counts(coded).sum() == len(text.encode())
