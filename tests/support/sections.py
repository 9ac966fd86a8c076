"""The sections of a script, and what each of them reads."""

import ast
import bisect
import re
import symtable
from typing import NamedTuple

BANNER = re.compile(r"^# =+\n# (\S+) — (.+)\n# =+$", re.MULTILINE)


class Section(NamedTuple):
    """A part of a script under its banner."""

    name: str
    guarantee: str
    line: int  # the first one of its banner


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
    lines = source.splitlines()
    tables = [table_of(statement, lines) for statement in statements]
    first_at: dict[str, int] = {}  # the first section that defines a name; 0: above all sections
    for statement, table in zip(statements, tables, strict=True):
        at = bisect.bisect(starts, statement.lineno)
        for name in names_defined(table):
            first_at.setdefault(name, at)
    found = []
    for statement, table in zip(statements, tables, strict=True):
        at = bisect.bisect(starts, statement.lineno)
        for name in sorted(names_read(table)):
            if first_at.get(name, 0) > at:
                reader = parts[at - 1].name if at > 0 else "the head"
                owner = parts[first_at[name] - 1].name
                found.append(f"{reader}, statement of line {statement.lineno}: {name}, of {owner}")
    return found


def table_of(statement: ast.stmt, lines: list[str]) -> symtable.SymbolTable:
    """The names of a top-level statement, which has its lines for itself."""
    first = min(node.lineno for node in (statement, *getattr(statement, "decorator_list", [])))
    text = "\n".join(lines[first - 1 : statement.end_lineno])
    return symtable.symtable(text, "statement", "exec")


def names_defined(table: symtable.SymbolTable) -> set[str]:
    """The module's names that a top-level statement defines or imports."""
    return {name.get_name() for name in table.get_symbols() if name.is_assigned() or name.is_imported()}


def names_read(table: symtable.SymbolTable) -> set[str]:
    """The names from outside that a top-level statement reads, in bodies and annotations of functions too."""
    names = {name.get_name() for name in table.get_symbols() if name.is_referenced()}
    inner = list(table.get_children())
    while inner:
        scope = inner.pop()
        inner += scope.get_children()
        for name in scope.get_symbols():
            if name.is_global() and name.is_referenced():
                names.add(name.get_name())
    return names
