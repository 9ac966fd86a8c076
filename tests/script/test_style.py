"""The limits that train_gpt.py sets itself, read from its source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SECTIONS = (
    "CONFIG RUNTIME TRACE DATA KERNELS MODEL OPTIMIZER SCHEDULE EVALUATION ARTIFACT CHECKPOINT TRAIN main"
).split()
MAX_LINES, MAX_COLUMNS, MAX_FUNCTION_LINES, MAX_NESTING = 2000, 110, 60, 3
BANNER = re.compile(r"^# ={108}\n# (\S+) — (.+)\n# ={108}$", re.MULTILINE)


@pytest.fixture(scope="module")
def source(repo: Path) -> str:
    return (repo / "train_gpt.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tree(source: str) -> ast.Module:
    return ast.parse(source, feature_version=(3, 10))


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_no_line_is_too_long(source: str) -> None:
    long = [number for number, line in enumerate(source.splitlines(), 1) if len(line) > MAX_COLUMNS]
    assert not long


def test_the_file_stays_below_its_ceiling(source: str) -> None:
    assert len(source.splitlines()) <= MAX_LINES, "leave out, never pack"


def test_no_function_is_too_long(tree: ast.Module) -> None:
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(tree) if f.end_lineno is not None}
    assert {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES} == {}


def depth(node: ast.AST) -> int:
    """Deepest stack of blocks inside a function body; `elif` is no deeper than its `if`."""
    blocks = (ast.If, ast.For, ast.While, ast.With, ast.Try)
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        if not isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            deepest = max(deepest, depth(child) + (isinstance(child, blocks) and not is_elif))
    return deepest


def test_nothing_is_nested_too_deep(tree: ast.Module) -> None:
    deep = {f.name: depth(f) for f in functions(tree)}
    assert {name: found for name, found in deep.items() if found > MAX_NESTING} == {}


def test_sections_stand_in_order_and_say_what_they_guarantee(source: str) -> None:
    banners = BANNER.findall(source)
    assert [name for name, _ in banners] == list(SECTIONS)
    assert all(guarantee.endswith(".") for _, guarantee in banners)


def test_public_names_have_docstrings(tree: ast.Module) -> None:
    public = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]
    nested = {inner for f in functions(tree) for inner in ast.walk(f) if inner is not f}
    kernels = {f for f in functions(tree) if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)}
    bare = [n.name for n in public if n not in nested and n not in kernels and not ast.get_docstring(n)]
    methods_of_autograd = {"forward", "backward"}
    assert [name for name in bare if name not in methods_of_autograd] == []


def test_private_and_autograd_names_apart_every_signature_is_annotated(tree: ast.Module) -> None:
    kernels = {f for f in functions(tree) if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)}
    bare = [f.name for f in functions(tree) if f not in kernels and f.returns is None]
    assert bare == []


def test_no_bare_except_and_no_unfinished_mark(tree: ast.Module, source: str) -> None:
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    assert all(handler.type is not None for handler in handlers)
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", source)


def test_statements_are_not_packed(tree: ast.Module) -> None:
    starts = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    one_line_bodies = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, (ast.If, ast.For, ast.While, ast.With)) and node.body[0].lineno == node.lineno
    ]
    assert len(starts) == len(set(starts))
    assert one_line_bodies == []


def test_every_setting_has_a_meaning_and_is_used(source: str) -> None:
    import dataclasses

    import train_gpt

    for field in dataclasses.fields(train_gpt.Config):
        assert field.metadata["meaning"], field.name
        by_role = field.name.endswith("_clip_sigmas") and "{role}_clip_sigmas" in source
        accepted = field.metadata["among"] == ["1"]  # the one value there is, so that another is refused
        read = len(re.findall(rf"\b{field.name}\b", source)) >= 2 or by_role or accepted
        assert read, f"{field.name} is never read"


def test_the_environment_is_read_in_main_alone(tree: ast.Module) -> None:
    inside_main = {
        node
        for f in functions(tree)
        if f.name in ("main", "score_artifact", "whole_run")
        for node in ast.walk(f)
    }
    guards = {node for top in tree.body if isinstance(top, ast.If) for node in ast.walk(top)}
    reads = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("os.environ", "os.getenv")
        and node not in inside_main
        and node not in guards
    ]
    assert reads == []


def test_import_has_no_side_effects(repo: Path) -> None:
    program = (
        "import os, threading, sys; before = dict(os.environ); import train_gpt; "
        "import torch.distributed as dist; assert dict(os.environ) == before; "
        "assert threading.active_count() == 1; assert not dist.is_initialized(); "
        "assert 'sentencepiece' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program], cwd=repo, check=True, env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    )


def test_no_file_speaks_of_where_it_was_made(repo: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=repo, capture_output=True, text=True, check=False
    ).stdout.split("\n")
    if not tracked[0]:
        pytest.skip("not a git checkout")
    texts = {
        name: repo / name for name in tracked if Path(name).suffix in {".py", ".md", ".toml", ".env", ".json"}
    }
    foreign = re.compile(r"/(?:work|root|tmp/parts)/|this " + r"session|sub" + r"agent", re.IGNORECASE)
    assert [
        n for n, p in texts.items() if p.exists() and foreign.search(p.read_text("utf-8", "replace"))
    ] == []
