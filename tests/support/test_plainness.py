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


@pytest.mark.parametrize(
    ("source", "packed"),
    [
        ("a, b = 1, 2", True),
        ("self.a, self.b = x, y", True),
        ("(a, b), c = f(x), 2", True),
        ("a, b = shape", False),
        ("for a, b in pairs: pass", False),
        ("a = 1, 2", False),
    ],
)
def test_packed_assignments(source: str, packed: bool) -> None:
    assert plainness.packed_assignments(source) == ([1] if packed else [])


SETTINGS = "class Config:\n    gptq: bool = True\n    seconds: float = 1.0\n"


@pytest.mark.parametrize(
    "expression",
    [
        "x * (a > b)",
        "(not a) * x",
        "x * (a and b)",
        "config.gptq * config.seconds",
        "[x] * (name in names)",
        "x * flag",
        "x * int(a == b)",
        "x * isinstance(a, int)",
        "x * True",
        "(x, y)[a > b]",
        "names[not a]",
        "names[flag]",
        "names[config.gptq]",
    ],
)
def test_a_truth_value_is_no_number(expression: str) -> None:
    source = f"{SETTINGS}def f(x, a, b, names, config, flag: bool):\n    return {expression}\n"
    assert plainness.truth_values_as_numbers(source) == [5]


def test_a_truth_value_scales_nothing_in_place_either() -> None:
    assert plainness.truth_values_as_numbers("x *= a > b\n") == [1]


def test_an_argument_is_a_truth_value_in_its_own_function_alone() -> None:
    source = dedent("""
        def f(x, flag: bool):
            return x if flag else 0
        def g(x, flag):
            return x * flag
    """)
    assert plainness.truth_values_as_numbers(source) == []


@pytest.mark.parametrize(
    "expression",
    [
        "x * config.seconds",
        "ids[ids == 1]",
        "x * y",
        "x * len(a)",
        "x if a > b else y",
        "sum(a > b for a in x)",
    ],
)
def test_numbers_arrays_and_conditions_are_left_in_peace(expression: str) -> None:
    source = f"{SETTINGS}def f(x, y, a, b, ids, config):\n    return {expression}\n"
    assert plainness.truth_values_as_numbers(source) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("for x in (a if b else c):\n    pass\n", [1]),
        ("y = [x for x in (a if b else c)]\n", [1]),
        ("for x in a:\n    y = a if b else c\n", []),
        ("y = [x if b else c for x in a if b]\n", []),
    ],
)
def test_loops_over_a_conditional(source: str, found: list[int]) -> None:
    assert plainness.loops_over_a_conditional(source) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = list[int]()", [1]),
        ("x = collections.deque[str](y)", [1]),
        ("x = defaultdict[str, float](float)", [1]),
        ("x: list[int] = []", []),
        ("x = handlers[name]()", []),
        ("x = table[0].list()", []),
    ],
)
def test_called_aliases(source: str, found: list[int]) -> None:
    assert plainness.called_aliases(source) == found


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


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("def f():\n    return helper()\n", "helper"),
        ("def f():\n    def g():\n        return [LIMIT for _ in range(3)]\n    return g\n", "LIMIT"),
        ("def f(x: Helper) -> None:\n    pass\n", "Helper"),
        ("def f() -> list[Helper]:\n    return []\n", "Helper"),
        ("class A:\n    part: Helper\n", "Helper"),
        ("class A:\n    def f(self):\n        return LIMIT\n", "LIMIT"),
        ("f = lambda: helper()\n", "helper"),
        ("def f(x=None):\n    if x:\n        global LIMIT\n    return LIMIT\n", "LIMIT"),
    ],
)
def test_what_is_read_from_a_later_section_is_named(code: str, name: str) -> None:
    (found,) = plainness.reads_from_below(script(("UPPER", code), LOWER))
    assert found == f"UPPER, statement of line 7: {name}, of LOWER"


@pytest.mark.parametrize(
    "code",
    [
        "def f(helper, LIMIT):\n    return helper(LIMIT)\n",
        "def f():\n    helper = len\n    return helper([])\n",
        "def f():\n    return [LIMIT for LIMIT in range(3)]\n",
        "def f(x):\n    return x.helper, math.pi, len(x)\n",
        "def f():\n    return g()\ndef g():\n    return f\n",
        "class A:\n    LIMIT = 3\n    other = LIMIT\n",
        "def f():\n    return 'helper'\n",
    ],
)
def test_names_of_its_own_are_free(code: str) -> None:
    assert plainness.reads_from_below(script(("UPPER", code), LOWER)) == []


def test_what_stands_above_is_free() -> None:
    code = "def f(x: Helper):\n    return helper(LIMIT)\n"
    assert plainness.reads_from_below(script(LOWER, ("BELOW", code))) == []


def test_the_head_may_not_read_a_section() -> None:
    (found,) = plainness.reads_from_below("def f():\n    return LIMIT\n\n" + script(LOWER))
    assert found == "the head, statement of line 1: LIMIT, of LOWER"


def test_a_name_that_is_given_again_below_is_the_one_above() -> None:
    parts = ("UPPER", "LIMIT = 1\ndef f():\n    return LIMIT\n"), LOWER
    assert plainness.reads_from_below(script(*parts)) == []
