"""CaseOps: one code per text, nothing lost, every byte counted."""


import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import caseops

TITLE, CAPS, NEXT, ESCAPE, SPACE_TITLE, SPACE_CAPS = caseops.FUSED_MARKS
ALPHABET = "aabzAABZ  éÉßǅıİſK ’1_\n\t" + "".join(caseops.FUSED_MARKS) + "\ue000\ue007\u00a0日\U0001f600\0"


# Texts and their codes, by whether the form is the fused one.
CODES = {False: [
    ("", ""), ("word", "word"), ("Word", f"{TITLE}word"), ("WORD", f"{CAPS}word"), ("I", f"{TITLE}i"),
    ("iPhone", f"i{NEXT}phone"), ("McGraw", f"{TITLE}mc{NEXT}graw"), ("ABc", f"{TITLE}a{NEXT}bc"),
    ("NASA's Élan", f"{CAPS}nasa's É" + "lan"), ("éA", f"é{TITLE}a"), ("X1Y", f"{TITLE}x1{TITLE}y"),
    (f"a{TITLE}B", f"a{ESCAPE}{TITLE}{TITLE}b"), (ESCAPE * 2, ESCAPE * 4),
], True: [
    ("the Word", f"the{SPACE_TITLE} word"), ("the\n\nWORD", f"the{SPACE_CAPS}\n\nword"),
    ("Word", f"{TITLE}word"), (" Word", f" {TITLE}word"),
    ("an iPhone", f"an i{NEXT}phone"), ("of McGraw", f"of{SPACE_TITLE} mc{NEXT}graw"),
    (". I", f".{SPACE_TITLE} i"), ("a\u00a0Word", f"a\u00a0{TITLE}word"), ("(Word", f"({TITLE}word"),
    (f"{SPACE_CAPS} A", f"{ESCAPE}{SPACE_CAPS}{SPACE_TITLE} a"), (" \t", " \t"), (" É", " É"),
]}
# What no text is coded as.
NO_CODES = {False: [
    "A", "aB", TITLE, f"{TITLE}1", f"{CAPS}a", f"{CAPS}aB", f"a{TITLE}b", f"{NEXT}a", f"a{NEXT}", ESCAPE,
    f"{ESCAPE}a", f"{TITLE}{NEXT}a", f"{CAPS}a{NEXT}b", f"{TITLE}{TITLE}a", f"a{NEXT}{NEXT}b", f"{TITLE}\né",
], True: [
    f"a {TITLE}b", f"{SPACE_TITLE}b", f"{SPACE_TITLE} ", f" {SPACE_TITLE} b", f"{SPACE_CAPS} a", SPACE_CAPS,
    f"{SPACE_TITLE} {TITLE}b", f"{ESCAPE}b", f"{SPACE_TITLE}{SPACE_TITLE} b", f"{SPACE_TITLE} 1",
]}


@pytest.mark.parametrize("fused", [False, True])
def test_golden_codes_and_what_is_none(fused: bool) -> None:
    for text, coded in CODES[fused]:
        assert caseops.encode(text, fused) == coded
        assert caseops.decode(coded, fused) == text
    for coded in NO_CODES[fused]:
        with pytest.raises(caseops.CaseOpsError, match="at character"):
            caseops.decode(coded, fused)


@pytest.mark.parametrize("fused", [False, True])
@settings(deadline=None)
@given(text=st.one_of(st.text(st.sampled_from(ALPHABET)), st.text()))
def test_round_trip_and_bytes(fused: bool, text: str) -> None:
    coded = caseops.encode(text, fused)
    assert caseops.decode(coded, fused) == text
    assert not any("A" <= character <= "Z" for character in coded)
    counts = caseops.byte_counts(coded, fused)
    assert len(counts) == len(coded)
    assert counts.sum() == len(text.encode())


@pytest.mark.parametrize("fused", [False, True])
@settings(deadline=None)
@given(coded=st.text(st.sampled_from(ALPHABET)))
def test_every_code_is_the_code_of_its_text(fused: bool, coded: str) -> None:
    try:
        text = caseops.decode(coded, fused)
    except caseops.CaseOpsError:
        return
    assert caseops.encode(text, fused) == coded


@pytest.mark.parametrize("fused", [False, True])
@settings(deadline=None)
@given(coded=st.text(st.sampled_from(ALPHABET)))
def test_what_a_model_writes_can_be_read_without_marks(fused: bool, coded: str) -> None:
    """Whatever it is, and wherever it breaks off: marks remain only where they were escaped."""
    text = caseops.read(coded, fused)
    assert sum(text.count(mark) for mark in caseops.MARKS) <= coded.count(ESCAPE)
    assert len(text) <= len(coded)


def test_marks_count_nothing_and_escaped_marks_their_own_bytes() -> None:
    coded = f"{ESCAPE}{ESCAPE}{TITLE}é{NEXT}日\U0001f600"
    assert caseops.byte_counts(coded).tolist() == [0, 3, 0, 2, 0, 3, 4]
