"""How much code a Python source holds, what a reader has to decode, what a section reads.

Comments, docstrings and blank lines are free. Weight is counted in tokens, so packing a line lowers nothing.
"""

from __future__ import annotations

import ast
import bisect
import io
import re
import symtable
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
# Since Python 3.12 an f-string is many tokens; here it counts as one, as any other string.
FSTRING_START = getattr(tokenize, "FSTRING_START", None)
FSTRING_END = getattr(tokenize, "FSTRING_END", None)
BANNER = re.compile(r"^# =+\n# (\S+) — (.+)\n# =+$", re.MULTILINE)
TYPES = {"list", "dict", "set", "frozenset", "tuple", "deque", "defaultdict", "Counter", "OrderedDict"}
TRUTH_FUNCTIONS = {"bool", "any", "all", "isinstance", "issubclass", "hasattr", "callable"}
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Section(NamedTuple):
    """A part of a script under its banner."""

    name: str
    guarantee: str
    line: int  # the first one of its banner


# -- weight --------------------------------------------------------------------------------------------------


def tokens_of_code(source: str) -> int:
    """The tokens of a source without its comments, docstrings and layout."""
    free = docstring_lines(ast.parse(source))
    tokens = 0
    for token in plain_tokens(source):
        if token.type not in LAYOUT and token.start[0] not in free:
            tokens += 1
    return tokens


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *Function)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def plain_tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a source, an f-string as one of them on every version of Python."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == FSTRING_END:
            depth -= 1
        elif depth == 0:
            yield token
        if token.type == FSTRING_START:
            depth += 1


# -- what a reader has to decode: the lines where it stands --------------------------------------------------


def packed_assignments(source: str) -> list[int]:
    """Several values assigned to as many names in one statement."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign):
            continue
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            lines.append(node.lineno)
    return lines


def truth_values_as_numbers(source: str) -> list[int]:
    """Products with a truth value and truth values as an index: comparisons, `not`, what is annotated bool.

    A comparison as an index is let pass where it may be an array, which selects.
    """
    tree = ast.parse(source)
    fields = bool_fields(tree)
    lines = set()
    for scope in ast.walk(tree):
        if not isinstance(scope, (ast.Module, *Function)):
            continue
        known = fields | bool_arguments(scope)
        for node in ast.walk(scope):
            operands = factors_and_indices(node)
            if any(is_truth(operand, known) for operand in operands):
                lines.add(operands[0].lineno)
    return sorted(lines)


def factors_and_indices(node: ast.AST) -> list[ast.expr]:
    """What a product multiplies, or what a subscript is."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [node.left, node.right]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        return [node.value]
    if isinstance(node, ast.Subscript):
        of_a_literal = isinstance(node.value, (ast.Tuple, ast.List))
        if of_a_literal or not isinstance(node.slice, ast.Compare):
            return [node.slice]
    return []


def bool_fields(tree: ast.Module) -> set[str]:
    """Fields of classes that are annotated as bool, each with a dot before its name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and is_bool(node.annotation):
            target = node.target
            name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
            names.add(f".{name}")
    return names


def bool_arguments(scope: ast.AST) -> set[str]:
    """Arguments of a function that are annotated as bool."""
    if not isinstance(scope, Function):
        return set()
    arguments = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
    return {argument.arg for argument in arguments if is_bool(argument.annotation)}


def is_bool(annotation: ast.expr | None) -> bool:
    """Whether an annotation is `bool`."""
    return isinstance(annotation, ast.Name) and annotation.id == "bool"


def is_truth(node: ast.expr, known: set[str]) -> bool:
    """Whether an expression is surely a truth value, or a number made from one; `known`: names of some."""
    if isinstance(node, (ast.Compare, ast.BoolOp)):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Name):
        return node.id in known
    if isinstance(node, ast.Attribute):
        return f".{node.attr}" in known
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("int", "float") and len(node.args) == 1:
            return is_truth(node.args[0], known)
        return node.func.id in TRUTH_FUNCTIONS
    return False


def loops_over_a_conditional(source: str) -> list[int]:
    """`for … in (… if … else …)`, in comprehensions too."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)) and isinstance(node.iter, ast.IfExp):
            lines.append(node.iter.lineno)
    return lines


def called_aliases(source: str) -> list[int]:
    """`list[int]()` and the like: a type with its parameters, called."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
            continue
        called = node.func.value
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
        if name in TYPES:
            lines.append(node.lineno)
    return lines


def nesting(node: ast.AST) -> int:
    """Deepest stack of blocks inside a function body; `elif` is no deeper than its `if`."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, *Function)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        own = 1 if isinstance(child, BLOCKS) and not is_elif else 0
        deepest = max(deepest, own + nesting(child))
    return deepest


# -- what a section reads ------------------------------------------------------------------------------------


def sections(source: str) -> list[Section]:
    """The sections of a script, by their banners, in order."""
    found = []
    for match in BANNER.finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        found.append(Section(match[1], match[2], line))
    return found


def reads_from_below(source: str) -> list[str]:
    """What a section reads, also inside its functions, that is defined in a later section alone."""
    statements = ast.parse(source).body
    parts = sections(source)
    starts = [part.line for part in parts]
    first_at: dict[str, int] = {}  # the first section that defines a name; 0: above all sections
    for statement in statements:
        at = bisect.bisect(starts, statement.lineno)
        for name in names_defined(statement):
            first_at.setdefault(name, at)
    found = []
    for statement in statements:
        at = bisect.bisect(starts, statement.lineno)
        for name in sorted(names_read(statement)):
            if first_at.get(name, 0) > at:
                reader = parts[at - 1].name if at > 0 else "the head"
                owner = parts[first_at[name] - 1].name
                found.append(f"{reader}, statement of line {statement.lineno}: {name}, of {owner}")
    return found


def names_defined(statement: ast.stmt) -> set[str]:
    """The module's names that a top-level statement defines or imports."""
    table = symtable.symtable(ast.unparse(statement), "statement", "exec")
    return {name.get_name() for name in table.get_symbols() if name.is_assigned() or name.is_imported()}


def names_read(statement: ast.stmt) -> set[str]:
    """The names from outside that a top-level statement reads, in bodies and annotations of functions too."""
    table = symtable.symtable(ast.unparse(statement), "statement", "exec")
    names = {name.get_name() for name in table.get_symbols() if name.is_referenced()}
    inner = list(table.get_children())
    while inner:
        scope = inner.pop()
        inner += scope.get_children()
        for name in scope.get_symbols():
            if name.is_global() and name.is_referenced():
                names.add(name.get_name())
    return names
