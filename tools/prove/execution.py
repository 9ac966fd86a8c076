"""B18: what of a script a proof has run. A branch that never ran is not proven.

The script is compiled with a mark before every function, branch, conditional expression, operand and handler,
and each mark notes that it was passed. What counts lies on the path of a score: functions that can be reached
from ROOTS by the names in their text. A branch that only raises ends a run, and so counts for nothing.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from tools import REPO
from tools.check.findings import Finding, info, warn
from tools.runs.writing import json_text, write_text

MARKS = "__ran__"  # the name of the marks in the script
ROOTS = ("evaluate", "rehearse_evaluation", "collect_hessians", "write_artifact", "load_artifact",
         "read_validation", "token_bytes", "Ledger")  # fmt: skip
# Functions whose own branches count, and not all that they call.
ALONE = ("whole_run", "train_and_ship", "train_step", "validate", "calibration_batches", "ready_model")
EXCUSES = Path(__file__).with_name("not_run.json")
EXCUSES_MAX = 15
# What a branch reads that a small proof has otherwise than a run: by words in the text of its condition.
READS = {
    "sizes": r"\blen\(|\.shape\b|\.size\b|\.numel\b|\.ndim\b",
    "counts": r"\b\w*(?:count|number|targets|scored|documents|rows|steps|tokens|length)s?\b",
    "device": r"\b(?:device|cuda|on_gpu|compiled|machine|rank|world_size)\b",
    "module tables": r"\b(?:modules|globals|vars|hasattr|getattr|__name__|__main__|__file__)\b",
    "paths": r"\b(?:path|Path|exists|is_file|is_dir|glob|open)\b",
    "environment": r"\b(?:environ|getenv|argv|platform)\b",
    "time": r"\b(?:time|clock|perf_counter|monotonic|\w*seconds)\b",
}


@dataclass(frozen=True)
class Mark:
    """A place that can be passed. kind: in words. function: its name, with the class. source: its line.

    code: what was not run then. test: what decides on it; None where an error or a call does.
    """

    function: str
    line: int
    kind: str
    source: str
    code: str
    test: ast.expr | None = None

    @property
    def key(self) -> str:
        """What tells it from all others, without the number of its line."""
        return f"{self.function}: {self.kind}: {self.source}"

    @property
    def digest(self) -> str:
        """A number that changes with the code that was not run."""
        return hashlib.sha256(self.code.encode()).hexdigest()[:12]


Marked = ast.expr | ast.stmt | ast.excepthandler
Node = TypeVar("Node", bound=ast.AST)


class _Marker(ast.NodeTransformer):
    """Puts marks into the functions of a syntax tree, and keeps a list of them."""

    def __init__(self, source: str) -> None:
        self.lines = source.splitlines()
        self.marks: list[Mark] = []
        self.scopes: list[str] = []
        self.inside = 0  # functions

    def note(self, node: Marked, kind: str, code: str, test: ast.expr | None = None) -> ast.expr:
        """The call that notes a new mark."""
        source = self.lines[node.lineno - 1].strip()
        self.marks.append(Mark(".".join(self.scopes), node.lineno, kind, source, code, test))
        return ast.parse(f"{MARKS}.__setitem__({len(self.marks) - 1}, 1)", mode="eval").body

    def expression(self, node: ast.expr, kind: str, code: str, test: ast.expr | None = None) -> ast.expr:
        """`node`, with a mark that is passed before it is evaluated."""
        return _placed(ast.BoolOp(ast.Or(), [self.note(node, kind, code, test), node]), node)

    def block(self, node: Marked, body: list[ast.stmt], kind: str, test: ast.expr | None = None) -> None:
        """Put a mark at the beginning of some statements, unless they only raise."""
        if self.inside and not _only_raises(body):
            code = "\n".join(map(ast.unparse, body))
            body.insert(0, _placed(ast.Expr(self.note(node, kind, code, test)), node))

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
        self.block(node, body, "never true", node.test)
        self.block(node, orelse, "never false", node.test)
        self.generic_visit(node)
        node.body = [*body[: len(body) - len(node.body)], *node.body]
        node.orelse = [*orelse[: len(orelse) - len(node.orelse)], *node.orelse]
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._loop(node, node.test)

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._loop(node, node.iter)

    def _loop(self, node: ast.For | ast.While, test: ast.expr) -> ast.AST:
        self.block(node, node.body, "loop never entered", test)
        return self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.block(node, node.body, "error never caught")
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        test = copy.deepcopy(node.test)
        texts = [ast.unparse(part) for part in (node.body, node.orelse)]
        self.generic_visit(node)
        if self.inside:
            node.body = self.expression(node.body, f"never chosen: {texts[0][:60]}", texts[0], test)
            node.orelse = self.expression(node.orelse, f"never chosen: {texts[1][:60]}", texts[1], test)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        whole = copy.deepcopy(node)
        texts = [ast.unparse(value) for value in node.values]
        self.generic_visit(node)
        if self.inside:
            for number, text in enumerate(texts[1:], 1):
                kind = f"never asked: {text[:60]}"
                node.values[number] = self.expression(node.values[number], kind, text, whole)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        if self.inside:
            for number, test in enumerate(node.ifs):
                text = ast.unparse(test)
                kept = self.expression(_placed(ast.Constant(True), test), "never true", text, test)
                left = self.expression(_placed(ast.Constant(False), test), "never false", text, test)
                node.ifs[number] = _placed(ast.IfExp(test, kept, left), test)
        return node


def _placed(node: Node, at: ast.AST) -> Node:
    """A new node at the place of another."""
    return ast.fix_missing_locations(ast.copy_location(node, at))


def _only_raises(body: list[ast.stmt]) -> bool:
    """Whether a branch does nothing but raise an error."""
    return len(body) == 1 and isinstance(body[0], ast.Raise)


class Execution:
    """A script's marks, and which of them were passed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        source = path.read_text(encoding="utf-8")
        self.tree = ast.parse(source)
        self.on_path = reachable(self.tree)
        marker = _Marker(source)
        self.marked: ast.Module = ast.fix_missing_locations(marker.visit(ast.parse(source)))
        self.marks = marker.marks
        self.ran = bytearray(len(self.marks))

    @staticmethod
    def marks_of(path: Path) -> list[Mark]:
        """The marks of a script, which is not run."""
        source = path.read_text(encoding="utf-8")
        marker = _Marker(source)
        marker.visit(ast.parse(source))
        return marker.marks

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

    def add(self, ran: bytes) -> None:
        """Add what a process has passed. ValueError for that of another script."""
        self.ran[:] = bytes(a | b for a, b in zip(self.ran, ran, strict=True))

    def not_run(self) -> list[Mark]:
        """Marks on the path that were not passed; of a function that was never called its own alone."""
        missing = []
        uncalled: set[str] = set()
        for mark, ran in zip(self.marks, self.ran, strict=True):
            if ran or mark.function not in self.on_path:
                continue
            if mark.kind == "never called":
                uncalled.add(mark.function)
            elif mark.function in uncalled or any(mark.function.startswith(f"{f}.") for f in uncalled):
                continue
            missing.append(mark)
        return missing


def branches_that_read(path: Path) -> list[tuple[int, str, str]]:
    """(line, what it reads, condition) of each branch and comparison on the path that reads something."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    on_path = reachable(tree)
    found = {}
    for name, function in functions(tree).items():
        for node in ast.walk(function) if name in on_path else ():
            test = node.test if isinstance(node, ast.If | ast.IfExp | ast.While) else node
            if not isinstance(test, ast.expr) or (test is node and not isinstance(test, ast.Compare)):
                continue
            text = ast.unparse(test)
            reads = [what for what, words in READS.items() if re.search(words, text)]
            if reads:
                found[test.lineno, text] = (test.lineno, ", ".join(reads), text)
    return sorted(found.values())


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
            if in_use and (made or last in known):
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


SETTINGS = re.compile(r"(?:\w+\.)*(?:c|config|settings)")  # what has settings for attributes, in words


def by_settings(mark: Mark, same: set[str]) -> bool:
    """Whether settings alone decide on a mark, and only those that a proof leaves as a run has them.

    same: names of these. Their branches cannot be taken in a run either.
    """
    if mark.test is None:
        return False
    pending: list[ast.AST] = [mark.test]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            own = owner == "self" and mark.function.partition(".")[0] in (
                "Config",
                "TrainingSettings",
                "ModelSettings",
            )
            if node.attr not in same or not (own or SETTINGS.fullmatch(owner)):
                return False
        elif isinstance(node, ast.Name | ast.Call):
            return False
        else:
            pending += ast.iter_child_nodes(node)
    return True


def read_excuses() -> list[dict[str, Any]]:
    """Reasons why some code is not run, each with the code by `Mark.key` and its digest."""
    excuses: list[dict[str, Any]] = json.loads(EXCUSES.read_text(encoding="utf-8"))
    return excuses


def renewed(path: Path, excuses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The excuses with the digests of the script at `path`, without code that it has no more."""
    digests = {mark.key: mark.digest for mark in Execution.marks_of(path)}
    found = []
    for entry in excuses:
        code = {key: digests[key] for key in sorted(entry["code"]) if key in digests}
        if code:
            found.append({"reason": entry["reason"], "code": code})
    return found


def findings(execution: Execution, same: set[str]) -> Iterator[Finding]:
    """B18: what did not run and no excuse explains, then the excuses. same: as in `by_settings`."""
    excuses = read_excuses()[:EXCUSES_MAX]
    known = {key: (entry["reason"], digest) for entry in excuses for key, digest in entry["code"].items()}
    used: dict[str, int] = {}
    off = 0
    for mark in execution.not_run():
        if by_settings(mark, same):
            off += 1
            continue
        reason, digest = known.get(mark.key, ("", ""))
        if digest == mark.digest:
            used[reason] = used.get(reason, 0) + 1
            continue
        changed = "; it was read in another form" if digest else ""
        text = f"not checked: {mark.kind}: {mark.source}{changed}"
        yield warn("B18", text, f"{mark.function}, {execution.path.name}:{mark.line}", "let a proof reach it")
    for reason, count in used.items():
        yield info("B18", f"not run, and excused: {count} branches: {reason}", execution.path.name)
    on_path = [
        ran
        for mark, ran in zip(execution.marks, execution.ran, strict=True)
        if mark.function in execution.on_path
    ]
    text = f"{sum(on_path)} of {len(on_path)} branches on the path ran; {off} are off by settings alone"
    yield info("B18", text, execution.path.name)
    read = len(branches_that_read(execution.path))
    yield info(
        "B18",
        f"{read} conditions on it read what a run has otherwise: --branches lists them",
        execution.path.name,
    )


def main() -> None:
    """Renew the digests of the excuses, once a person has read what `git diff train_gpt.py` shows of them."""
    excuses = renewed(REPO / "train_gpt.py", read_excuses())
    write_text(EXCUSES, json_text(excuses))


if __name__ == "__main__":
    main()
