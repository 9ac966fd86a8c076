"""train_gpt.py is small and plain: its weight, what a reader has to decode, what a section may use."""

import ast
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import train_gpt
from tests.support import plainness

SECTIONS = """SETTINGS MACHINE MODEL KERNELS OPTIMIZER SCHEDULE RUN TIMING DATA EVALUATION QUANTIZE CODER
ARTIFACT TRAIN main""".split()
# The script's weight. Here it may only fall. A fork sets its own.
MAX_TOKENS_OF_CODE = 35_500
MAX_FUNCTION_LINES = 60
MAX_NESTING = 3


@pytest.fixture(scope="module")
def source(repo: Path) -> str:
    return (repo / "train_gpt.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tree(source: str) -> ast.Module:
    return ast.parse(source, feature_version=(3, 10))


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_the_script_stays_below_its_ceiling(source: str) -> None:
    """Comments, docstrings and line breaks are free: only code weighs."""
    tokens = plainness.tokens_of_code(source)
    assert tokens <= MAX_TOKENS_OF_CODE, (
        f"{tokens} tokens of code: a part that comes in pays with a part that leaves. A fork raises "
        "MAX_TOKENS_OF_CODE in tests/script/test_style.py"
    )


def test_no_function_is_too_long_or_nested_too_deep(tree: ast.Module) -> None:
    lines = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions(tree)}
    assert {name: number for name, number in lines.items() if number > MAX_FUNCTION_LINES} == {}
    deep = {f.name: plainness.nesting(f) for f in functions(tree)}
    assert {name: found for name, found in deep.items() if found > MAX_NESTING} == {}


FINDERS = [plainness.packed_assignments, plainness.truth_values_as_numbers, plainness.reads_from_below]


@pytest.mark.parametrize("finds", FINDERS, ids=lambda finds: finds.__name__)
def test_nothing_has_to_be_decoded_or_looked_up_below(finds: Callable[[str], list[Any]], source: str) -> None:
    assert finds(source) == []


def test_sections_signatures_and_marks(source: str, tree: ast.Module) -> None:
    sections = plainness.sections(source)
    assert [section.name for section in sections] == SECTIONS
    assert all(section.guarantee.endswith(".") for section in sections)
    kernels = {f for f in functions(tree) if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)}
    bare = [f.name for f in functions(tree) if f not in kernels and f.returns is None]
    assert bare == []
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", source)


def names_that_are_read(nodes: list[ast.AST]) -> tuple[set[str], list[str]]:
    """Attributes that are read, names in strings, and patterns of names that are put together."""
    attributes = set()
    patterns = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            attributes.add(node.attr)
        # A table may name settings, which are read by these names.
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            attributes.add(node.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            name = node.args[1]
            if isinstance(name, ast.JoinedStr):
                parts = [re.escape(p.value) if isinstance(p, ast.Constant) else r"\w+" for p in name.values]
                patterns.append("".join(parts))
    return attributes, patterns


def reads_for_others(node: ast.AST) -> bool:
    """Whether this is a property or method: of the settings, the rest of the script reads it instead."""
    return isinstance(node, ast.FunctionDef) and bool(node.args.args) and node.args.args[0].arg == "self"


def test_every_setting_is_used(tree: ast.Module, source: str) -> None:
    """Each is read as an attribute by what stands below the settings: to check a value is not to use it."""
    _, below, *_ = plainness.sections(source)
    nodes = [node for top in tree.body if top.lineno > below.line for node in ast.walk(top)]
    for node in ast.walk(tree):
        if reads_for_others(node) and getattr(node, "name", "") != "rules":
            nodes += ast.walk(node)
    attributes, patterns = names_that_are_read(nodes)
    unused = []
    for field in dataclasses.fields(train_gpt.Config):
        assert field.metadata["meaning"], field.name
        by_pattern = any(re.fullmatch(pattern, field.name) for pattern in patterns)
        has_one_value = len(field.metadata["among"]) == 1  # accepted, so that another value is refused
        if field.name not in attributes and not by_pattern and not has_one_value:
            unused.append(field.name)
    assert unused == []


def test_the_environment_is_read_in_the_section_main_alone(tree: ast.Module, source: str) -> None:
    main = plainness.sections(source)[-1]
    where_it_is_run = "__name__ == '__main__'"  # what must be set before torch is imported
    above = [top for top in tree.body if top.lineno < main.line]
    above = [top for top in above if ast.unparse(getattr(top, "test", top)) != where_it_is_run]
    for node in (node for top in above for node in ast.walk(top)):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in ("os.environ", "os.getenv"), node.lineno
