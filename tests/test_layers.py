"""Imports point down, without a circle: script ← data ← tools.runs ← the other tools ← benchmarks ← tests."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

# From the bottom up; a module belongs to the row of its longest prefix.
LAYERS = [
    ["train_gpt"], ["data"], ["tools", "tools.runs"], ["tools."], ["tools.__main__"], ["benchmarks"],
    ["tests"],
]


def modules(repo: Path) -> dict[str, Path]:
    """Every module of the repository that can be imported, by its name."""
    found = {"train_gpt": repo / "train_gpt.py"}
    for folder in ("data", "tools", "benchmarks", "tests"):
        for path in (repo / folder).rglob("*.py"):
            parts = path.relative_to(repo).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the repository that a file imports, inside functions too."""
    found = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name in known}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements in the body of a node, and in theirs."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for statement in getattr(node, field, []):
            yield statement
            yield from statements(statement)


def layer(name: str) -> int:
    """The number of the row in LAYERS."""
    fitting = []
    for number, prefixes in enumerate(LAYERS):
        for prefix in prefixes:
            if name == prefix or name.startswith(prefix.rstrip(".") + "."):
                fitting.append((len(prefix), number))
    return max(fitting)[1]


def test_imports_point_down_and_never_in_a_circle(repo: Path) -> None:
    known = modules(repo)
    graph = {name: imports(path, known) - {name} for name, path in known.items()}
    pairs = [(name, used) for name, uses in graph.items() for used in uses]
    assert [pair for pair in pairs if layer(pair[1]) > layer(pair[0])] == []
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle
    # To change one tool nobody has to open another: they share tools.runs. Only pack asks for a replay.
    for name, used in pairs:
        if layer(name) == layer(used) == 3 and (name, used) != ("tools.submit.pack", "tools.audit.replay"):
            assert name.split(".")[:2] == used.split(".")[:2], f"{name} imports {used}"
