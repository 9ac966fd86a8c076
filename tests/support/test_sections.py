"""What a section reads from below, on sources so small that one can see it."""

import pytest

from tests.support import sections

BANNER = "# ====\n# {} — a guarantee.\n# ====\n"
UPPER, LOWER = BANNER.format("UPPER"), BANNER.format("LOWER") + "LIMIT = 3\ndef helper():\n    return 1\n"
# What stands in the upper section, and the names of the lower one that it reads.
CASES = [
    ("def f():\n    return [helper() for _ in range(3)]\n", ["helper"]),
    ("def f(x: LIMIT) -> None:\n    pass\n", ["LIMIT"]),
    ("class A:\n    def f(self):\n        return LIMIT\n", ["LIMIT"]),
    ("def f(helper, x):\n    return helper(x.LIMIT, 'LIMIT')\n", []),
    ("LIMIT = 1\ndef f():\n    return LIMIT\n", []),  # given again below
]


@pytest.mark.parametrize(("source", "found"), CASES)
def test_what_is_read_from_below_is_found(source: str, found: list[str]) -> None:
    sentences = [f"UPPER, statement of line 4: {name}, of LOWER" for name in found]
    assert sections.reads_from_below(UPPER + source + LOWER) == sentences
