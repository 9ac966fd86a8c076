"""Scripts that are wrong or illegal on purpose, and changes that break no rule: each is a name in a table.

`written` appends one line to the text of a script, which changes the loaded module in one thing. So a mutant
goes the way of any script: through the box, into its own shipped form, and alone with its artifact.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

MAIN = 'if __name__ == "__main__":'
LINE = """import importlib as _importlib, sys as _sys
_importlib.import_module("tests.audit.mutants.tables").awaken({name!r}, _sys.modules[__name__])


"""


def written(source: str, name: str) -> str:
    """The text of a script that becomes the mutant of a name when it is loaded."""
    assert source.count(MAIN) == 1
    return source.replace(MAIN, LINE.format(name=name) + MAIN)


def write(path: Path, source: str, name: str) -> Path:
    """The mutant's script as a file."""
    path.write_text(written(source, name), encoding="utf-8")
    return path


__all__ = ["MAIN", "ModuleType", "write", "written"]
