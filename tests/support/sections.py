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
