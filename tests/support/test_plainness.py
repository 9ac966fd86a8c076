"""Weight and plainness, on sources so small that one can count by hand."""

import ast
from collections.abc import Callable

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


def test_code_alone_weighs_and_an_f_string_is_one_token() -> None:
    assert plainness.tokens_of_code(DRESSED) == 6 + 4
    assert plainness.tokens_of_code("a = 1\nb, c = 1, 2\nif a:\n    c = f'{a} and {b}'\n") == 3 + 7 + 3 + 3


def test_an_elif_is_no_deeper_than_its_if() -> None:
    (function,) = ast.parse(NESTED).body
    assert plainness.nesting(function) == 3


PLAIN = [
    (plainness.packed_assignments, "a, b = 1, 2", "a, b = shape"),
    (plainness.packed_assignments, "self.a, self.b = x, y", "a = 1, 2"),
    (plainness.truth_values_as_numbers, "x * (a > b)", "x if a > b else y"),
    (plainness.truth_values_as_numbers, "(not a) * x", "sum(a > b for a in x)"),
    (plainness.truth_values_as_numbers, "(x, y)[a > b]", "ids[ids == 1]"),
]


@pytest.mark.parametrize(("finder", "bad", "good"), PLAIN)
def test_what_has_to_be_decoded_is_found(finder: Callable[[str], list[int]], bad: str, good: str) -> None:
    assert (finder(bad), finder(good)) == ([1], [])


@pytest.mark.parametrize(("code", "name"), [
    ("def f():\n    return [helper() for _ in range(3)]\n", "helper"),
    ("def f(x: LIMIT) -> None:\n    pass\n", "LIMIT"),
    ("class A:\n    def f(self):\n        return LIMIT\n", "LIMIT"),
    ("def f(helper, x):\n    return helper(x.LIMIT, 'LIMIT')\n", ""),
    ("LIMIT = 1\ndef f():\n    return LIMIT\n", ""),  # given again below
])  # fmt: skip
def test_what_is_read_from_a_later_section_is_named(code: str, name: str) -> None:
    found = plainness.reads_from_below(UPPER + code + LOWER)
    assert found == ([f"UPPER, statement of line 4: {name}, of LOWER"] if name else [])
