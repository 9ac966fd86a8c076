"""The branches of a script that no run of an audit has taken: an audit says nothing about them.

The script is compiled with a mark before every function, branch, conditional expression, operand and handler,
and each mark notes that it was passed. What counts is on the path of a score: functions that can be reached
from ROOTS by the names in their text. A branch that ends in an error leaves no score, and counts for nothing.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

MARKS = "__ran__"  # the name of the marks in the script
ROOTS = ("evaluate", "rehearse_evaluation", "collect_hessians", "write_artifact", "load_artifact",
         "read_validation", "token_bytes", "Ledger")
# Functions whose own branches count, and not all that they call: what they do besides scoring is checks.
# So do the order of the training data, and the clocks and limits of a run.
ALONE = ("whole_run", "train_and_ship", "train", "train_step", "end_training", "validate",
         "calibration_batches", "ready_model", "Loader.next_batch", "Loader._stage", "Loader._sequences",
         "Loader._stage_batch", "Loader._read", "shard_visits", "permutation", "Training.seconds",
         "run_progress", "log_limit", "summarize")


@dataclass(frozen=True)
class Mark:
    """A place that can be passed. kind: in words. function: its name, with the class. source: its line."""

    function: str
    line: int
    kind: str
    source: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.function}: {self.kind}: {self.source[:90]}"


Marked = ast.expr | ast.stmt | ast.excepthandler
Node = TypeVar("Node", bound=ast.AST)


class _Marker(ast.NodeTransformer):
    """Puts marks into the functions of a syntax tree, and keeps a list of them."""

    def __init__(self, source: str) -> None:
        self.lines = source.splitlines()
        self.marks: list[Mark] = []
        self.scopes: list[str] = []
        self.inside = 0  # functions
        self.errors: set[ast.stmt] = set()  # statements of which none leads on to a score

    def note(self, node: Marked, kind: str) -> ast.expr:
        """The call that notes a new mark."""
        source = self.lines[node.lineno - 1].strip()
        self.marks.append(Mark(".".join(self.scopes), node.lineno, kind, source))
        return ast.parse(f"{MARKS}.__setitem__({len(self.marks) - 1}, 1)", mode="eval").body

    def expression(self, node: ast.expr, kind: str) -> ast.expr:
        """`node`, with a mark that is passed before it is evaluated."""
        return _placed(ast.BoolOp(ast.Or(), [self.note(node, kind), node]), node)

    def block(self, node: Marked, body: list[ast.stmt], kind: str) -> None:
        """Put a mark at the beginning of some statements, unless they raise at their end."""
        if _raises(body) and not _leaves(body):
            self.errors.update(body)
        if self.inside and not _raises(body):
            body.insert(0, _placed(ast.Expr(self.note(node, kind)), node))

    def visit(self, node: ast.AST) -> Any:
        return node if node in self.errors else super().visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.scopes.append(node.name)
        self.generic_visit(node)
        self.scopes.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.scopes.append(node.name)
        self.inside += 1
        whole = [*node.body]
        self.block(node, whole, "never called")
        for statement in node.body:
            self.visit(statement)
        node.body.insert(0 if ast.get_docstring(node) is None else 1, whole[0])
        self.inside -= 1
        self.scopes.pop()
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        body, orelse = [*node.body], [*node.orelse]
        self.block(node, body, "never true")
        self.block(node, orelse, "never false")
        self.generic_visit(node)
        node.body = [*body[: len(body) - len(node.body)], *node.body]
        node.orelse = [*orelse[: len(orelse) - len(node.orelse)], *node.orelse]
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._loop(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._loop(node)

    def _loop(self, node: ast.For | ast.While) -> ast.AST:
        self.block(node, node.body, "loop never entered")
        return self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.block(node, node.body, "error never caught")
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        texts = [ast.unparse(part) for part in (node.body, node.orelse)]
        self.generic_visit(node)
        if self.inside:
            node.body = self.expression(node.body, f"never chosen: {texts[0][:60]}")
            node.orelse = self.expression(node.orelse, f"never chosen: {texts[1][:60]}")
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        texts = [ast.unparse(value) for value in node.values]
        self.generic_visit(node)
        if self.inside:
            for number, text in enumerate(texts[1:], 1):
                kind = f"never asked: {text[:60]}"
                node.values[number] = self.expression(node.values[number], kind)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        if self.inside:
            for number, test in enumerate(node.ifs):
                kept = self.expression(_placed(ast.Constant(True), test), "never true")
                left = self.expression(_placed(ast.Constant(False), test), "never false")
                node.ifs[number] = _placed(ast.IfExp(test, kept, left), test)
        return node


def _placed(node: Node, at: ast.AST) -> Node:
    """A new node at the place of another."""
    return ast.fix_missing_locations(ast.copy_location(node, at))


def _raises(body: list[ast.stmt]) -> bool:
    """Whether a branch ends in an error, and so in no score."""
    return isinstance(body[-1], ast.Raise) if body else False


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether a part of it can go elsewhere than to its end."""
    ways = ast.Return | ast.Break | ast.Continue | ast.Yield | ast.YieldFrom
    return any(isinstance(inner, ways) for statement in body for inner in ast.walk(statement))


class Execution:
    """A script's marks, and which of them were passed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = path.read_text(encoding="utf-8")
        marker = _Marker(self.source)
        self.marked: ast.Module = ast.fix_missing_locations(marker.visit(ast.parse(self.source)))
        self.marks = marker.marks
        self.ran = bytearray(len(self.marks))

    @functools.cached_property
    def on_path(self) -> set[str]:
        """Functions on the path of a score."""
        return reachable(ast.parse(self.source))

    def load(self) -> ModuleType:
        """The script as a module that notes the marks it passes."""
        spec = importlib.util.spec_from_file_location("audited_script", self.path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        vars(module)[MARKS] = self.ran
        sys.modules[spec.name] = module
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(self.marked, str(self.path), "exec"), vars(module))
        return module

    def not_run(self, passed: bytes) -> list[Mark]:
        """Marks on the path that were not passed; of a function that was never called its own alone."""
        missing = []
        uncalled: set[str] = set()
        for mark, ran in zip(self.marks, passed, strict=True):
            if ran or mark.function not in self.on_path:
                continue
            if mark.kind == "never called":
                uncalled.add(mark.function)
            elif mark.function in uncalled or any(mark.function.startswith(f"{f}.") for f in uncalled):
                continue
            missing.append(mark)
        return missing


def functions(tree: ast.AST, scope: str = "") -> dict[str, ast.FunctionDef]:
    """All functions by their name, that of a method with its class."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{scope}{node.name}"
            if isinstance(node, ast.FunctionDef):
                found[name] = node
            found |= functions(node, f"{name}.")
        else:
            found |= functions(node, scope)
    return found


def reachable(tree: ast.Module) -> set[str]:
    """Functions that ROOTS can reach by names, and the ALONE ones.

    A name stands for every function of that name, and for every method of it whose class is in use: where a
    function that is reached makes one, or takes one.
    """
    every = functions(tree)
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    tables = _tables(tree)
    known = set(ROOTS)
    found: set[str] = set()
    while True:
        before = len(found) + len(known)
        for name in tables.keys() & known:
            known |= tables[name]
        for name, function in every.items():
            owner, _, last = name.rpartition(".")
            of_class = owner.rpartition(".")[2] in classes
            in_use = not owner or owner in found or (of_class and owner.rpartition(".")[2] in known)
            made = of_class and last in ("__init__", "__post_init__")
            if name not in found and in_use and (made or last in known):
                found.add(name)
                known |= _words(function)
        if len(found) + len(known) == before:
            return found | (set(ALONE) & every.keys())


def _tables(tree: ast.Module) -> dict[str, set[str]]:
    """What classes and variables of a module name, apart from functions."""
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            parts = [part for part in node.body if not isinstance(part, ast.FunctionDef)]
            found[node.name] = set().union(*map(_words, [*parts, *node.bases]))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found[target.id] = _words(node)
    return found


def _words(node: ast.AST) -> set[str]:
    """Names and attributes in a part of a tree, those of types too."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            found.add(inner.id)
        elif isinstance(inner, ast.Attribute):
            found.add(inner.attr)
    return found
