"""How much code a Python source holds, what a reader has to decode, what a section reads.

Comments, docstrings and blank lines are free. Weight is counted in tokens, so packing a line lowers nothing.
"""

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
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Section(NamedTuple):
    """A part of a script under its banner."""

    name: str
    guarantee: str
    line: int  # the first one of its banner


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
    """Comparisons, `and`, `or` and `not` that a product multiplies, or that choose a part of a literal."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        operands: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            operands = [node.left, node.right]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, (ast.Tuple, ast.List)):
            operands = [node.slice]
        if any(isinstance(operand, (ast.Compare, ast.BoolOp)) or is_not(operand) for operand in operands):
            lines.append(node.lineno)
    return lines


def is_not(node: ast.expr) -> bool:
    """Whether an expression is `not …`."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


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
