"""Weight and plainness, on sources so small that one can count by hand."""

from __future__ import annotations

import ast
import textwrap

import pytest

from tests.support import plainness

RULE = "# " + "=" * 20


def dedent(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


def test_comments_docstrings_blank_lines_and_wrapping_are_free() -> None:
    bare = "def double(x):\n    return 2 * x\n"
    dressed = dedent('''
        """What this module does,
        in two lines."""

        # a comment
        def double(x):
            """Twice x."""
            # another one
            return 2 * x  # and a third
    ''')
    assert plainness.tokens_of_code(bare) == 6 + 4
    assert plainness.tokens_of_code(dressed) == plainness.tokens_of_code(bare)
    wrapped = "def double(x):\n    return 2 \\\n        * x\n"
    assert plainness.tokens_of_code(wrapped) == plainness.tokens_of_code(bare)


def test_an_f_string_is_one_token_on_every_python() -> None:
    assert plainness.tokens_of_code("a = 1\nb, c = 1, 2\nif a:\n    c = f'{a} and {b}'\n") == 3 + 7 + 3 + 3


def test_packed_assignments() -> None:
    for packed in ("a, b = 1, 2", "self.a, self.b = x, y", "(a, b), c = f(x), 2"):
        assert plainness.packed_assignments(packed) == [1]
    for plain in ("a, b = shape", "for a, b in pairs: pass", "a = 1, 2"):
        assert plainness.packed_assignments(plain) == []


SETTINGS = "class Config:\n    gptq: bool = True\n    seconds: float = 1.0\n"


@pytest.mark.parametrize("expression", [
    "x * (a > b)", "(not a) * x", "config.gptq * config.seconds", "[x] * (name in names)", "x * flag",
    "x * int(a == b)", "x * isinstance(a, int)", "x * True", "(x, y)[a > b]", "names[flag]",
])  # fmt: skip
def test_a_truth_value_is_no_number(expression: str) -> None:
    source = f"{SETTINGS}def f(x, a, b, names, config, flag: bool):\n    return {expression}\n"
    assert plainness.truth_values_as_numbers(source) == [5]
    assert plainness.truth_values_as_numbers("x *= a > b\n") == [1]


@pytest.mark.parametrize("expression", [
    "x * config.seconds", "ids[ids == 1]", "x * len(a)", "x if a > b else y", "sum(a > b for a in x)",
])  # fmt: skip
def test_numbers_arrays_and_conditions_are_left_in_peace(expression: str) -> None:
    source = f"{SETTINGS}def f(x, y, a, b, ids, config):\n    return {expression}\n"
    # An argument is a truth value in its own function alone.
    source += "def g(x, a: bool):\n    return x if a else 0\ndef h(x, a):\n    return x * a\n"
    assert plainness.truth_values_as_numbers(source) == []


def test_loops_over_a_conditional() -> None:
    for bad in ("for x in (a if b else c):\n    pass\n", "y = [x for x in (a if b else c)]\n"):
        assert plainness.loops_over_a_conditional(bad) == [1]
    for good in ("for x in a:\n    y = a if b else c\n", "y = [x if b else c for x in a if b]\n"):
        assert plainness.loops_over_a_conditional(good) == []


def test_called_aliases() -> None:
    for bad in ("x = list[int]()", "x = collections.deque[str](y)", "x = defaultdict[str, float](float)"):
        assert plainness.called_aliases(bad) == [1]
    for good in ("x: list[int] = []", "x = handlers[name]()", "x = table[0].list()"):
        assert plainness.called_aliases(good) == []


def test_nesting_counts_blocks_and_an_elif_is_no_deeper_than_its_if() -> None:
    source = dedent("""
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
    """)
    (function,) = ast.parse(source).body
    assert plainness.nesting(function) == 3


def script(*parts: tuple[str, str]) -> str:
    """A script of sections, each with its code."""
    banners = [f"{RULE}\n# {name} — a guarantee.\n{RULE}\n\n{dedent(code)}" for name, code in parts]
    return "import math\n\n" + "\n".join(banners)


LOWER = ("LOWER", "class Helper:\n    pass\nLIMIT = 3\ndef helper():\n    return math.pi\n")


def test_sections_are_found_in_order_with_their_guarantee() -> None:
    found = plainness.sections(script(("DATA", "a = 1\n"), ("main", "b = a\n")))
    assert [(part.name, part.guarantee) for part in found] == [
        ("DATA", "a guarantee."),
        ("main", "a guarantee."),
    ]
    assert found[0].line == 3


@pytest.mark.parametrize(("code", "name"), [
    ("def f():\n    return helper()\n", "helper"),
    ("def f():\n    def g():\n        return [LIMIT for _ in range(3)]\n    return g\n", "LIMIT"),
    ("def f(x: Helper) -> None:\n    pass\n", "Helper"),
    ("class A:\n    part: list[Helper]\n", "Helper"),
    ("class A:\n    def f(self):\n        return LIMIT\n", "LIMIT"),
    ("f = lambda: helper()\n", "helper"),
    ("def f(x=None):\n    if x:\n        global LIMIT\n    return LIMIT\n", "LIMIT"),
])  # fmt: skip
def test_what_is_read_from_a_later_section_is_named(code: str, name: str) -> None:
    (found,) = plainness.reads_from_below(script(("UPPER", code), LOWER))
    assert found == f"UPPER, statement of line 7: {name}, of LOWER"


@pytest.mark.parametrize("code", [
    "def f(helper, LIMIT):\n    return helper(LIMIT)\n",
    "def f():\n    helper = len\n    return helper([])\n",
    "def f():\n    return [LIMIT for LIMIT in range(3)]\n",
    "def f(x):\n    return x.helper, math.pi, len(x), 'helper'\n",
    "class A:\n    LIMIT = 3\n    other = LIMIT\n",
    "LIMIT = 1\ndef f():\n    return LIMIT\n",  # given again below
])  # fmt: skip
def test_names_of_its_own_and_what_stands_above_are_free(code: str) -> None:
    below = "def f(x: Helper):\n    return helper(LIMIT)\n"
    assert plainness.reads_from_below(script(("UPPER", code), LOWER, ("BELOW", below))) == []
