"""What train_gpt.py promises of itself: every setting is used, and no section uses anything below it."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import train_gpt
from tests.support import sections


@pytest.fixture(scope="module")
def source(repo: Path) -> str:
    return (repo / "train_gpt.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tree(source: str) -> ast.Module:
    return ast.parse(source, feature_version=(3, 10))


def test_no_section_uses_what_is_defined_below_it(source: str) -> None:
    """With one exception, which says so: `Config.from_env`, so that the model stands near the top."""
    found = sections.reads_from_below(source)
    assert [reader for reader in found if not reader.endswith(": read_settings, of ENVIRONMENT")] == []


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
    _, below, *_ = sections.sections(source)
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
    main = sections.sections(source)[-1]
    where_it_is_run = "__name__ == '__main__'"  # what must be set before torch is imported
    above = [top for top in tree.body if top.lineno < main.line]
    above = [top for top in above if ast.unparse(getattr(top, "test", top)) != where_it_is_run]
    for node in (node for top in above for node in ast.walk(top)):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in ("os.environ", "os.getenv"), node.lineno
