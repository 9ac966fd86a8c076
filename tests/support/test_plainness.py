"""Weight and plainness, on sources so small that one can count by hand."""

import ast
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import plainness

DRESSED = '''"""What this module does,
in two lines."""

# a comment
def double(x):
    """Twice x."""
    # another one
    return 2 \\
        * x  # and a third
'''
NESTED = """
def f(x):
    if x:
        pass
    elif x > 1:
        for y in x:
            with y:
                pass
    def inner():
        while x:
            while x:
                while x:
                    while x:
                        pass
"""
BANNER = "# ====\n# {} — a guarantee.\n# ====\n"
UPPER, LOWER = BANNER.format("UPPER"), BANNER.format("LOWER") + "LIMIT = 3\ndef helper():\n    return 1\n"
READS = "UPPER, statement of line 4: {}, of LOWER"
# A source, and what is counted or found in it: lines, or a sentence for each name.
CASES: list[tuple[Callable[[str], Any], str, Any]] = [
    (plainness.tokens_of_code, DRESSED, 6 + 4),
    (plainness.tokens_of_code, "a = 1\nb, c = 1, 2\nif a:\n    c = f'{a} and {b}'\n", 3 + 7 + 3 + 3),
    (lambda source: plainness.nesting(ast.parse(source).body[0]), NESTED, 3),  # an elif is no deeper
    (plainness.packed_assignments, "a, b = 1, 2\na, b = shape\nself.a, self.b = x, y\na = 1, 2", [1, 3]),
    (plainness.truth_values_as_numbers, "x * (a > b)\nx if a > b else y\n(not a) * x", [1, 3]),
    (plainness.truth_values_as_numbers, "sum(a > b for a in x)\n(x, y)[a > b]\nids[ids == 1]", [2]),
    (plainness.reads_from_below, "def f():\n    return [helper() for _ in range(3)]\n", ["helper"]),
    (plainness.reads_from_below, "def f(x: LIMIT) -> None:\n    pass\n", ["LIMIT"]),
    (plainness.reads_from_below, "class A:\n    def f(self):\n        return LIMIT\n", ["LIMIT"]),
    (plainness.reads_from_below, "def f(helper, x):\n    return helper(x.LIMIT, 'LIMIT')\n", []),
    (plainness.reads_from_below, "LIMIT = 1\ndef f():\n    return LIMIT\n", []),  # given again below
]


@pytest.mark.parametrize(("finder", "source", "found"), CASES)
def test_code_alone_weighs_and_what_has_to_be_decoded_is_found(
    finder: Callable[[str], Any], source: str, found: Any
) -> None:
    if finder is plainness.reads_from_below:
        source, found = UPPER + source + LOWER, [READS.format(name) for name in found]
    assert finder(source) == found
