"""Scripts that are wrong or illegal on purpose, and changes that break no rule: each is a name in a table.

`script_of_all` adds a few lines to the text of a script: its `main` first makes the change that the variable
MUTANT names. So one text goes the way of any script, through the box, into its own shipped form, and alone
with its artifact, and each of its runs is another mutant.
"""

from __future__ import annotations

MUTANT = "MUTANT"
MAIN = 'if __name__ == "__main__":'
LINES = """_unchanged_main = main


def main() -> int:
    if "MUTANT" in os.environ:
        from tests.audit.mutants import tables
        tables.awaken(os.environ["MUTANT"], sys.modules[__name__])
    return _unchanged_main()


"""


def script_of_all(source: str) -> str:
    """The text of a script that becomes any mutant."""
    assert source.count(MAIN) == 1
    return source.replace(MAIN, LINES + MAIN)
