"""Mutants and legal changes under trial: one box, in which each run is another mutant of the script.

`python -m tests.audit.trial FILE [NAME …]` asks its law of each, then the others of its lab, and appends
what refuted it to FILE; names that FILE has already are left out.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.audit import mutants
from tests.audit.mutants import tables
from tools import REPO
from tools.audit import box
from tools.audit.audit import configurations
from tools.audit.broken import Broken, NotChecked
from tools.audit.laws import LAWS, Lab
from tools.audit.worlds import Worlds

LAW_OF = {law.name: law for law in LAWS}


class Court:
    """A box with the script of all mutants."""

    def __init__(self, opened: box.Box, worlds: Worlds) -> None:
        self.opened, self.worlds = opened, worlds
        self.whole = opened.settings({})

    def lab(self, name: str, mutant: str, more: Mapping[str, str]) -> Lab:
        """A lab in which every run is a mutant's."""
        settings = {**configurations(self.whole)[name], **more}
        lab = Lab(self.opened, self.worlds, name, settings, set(self.whole))
        lab.settings[mutants.MUTANT] = mutant
        return lab

    def refuted(self, lab: Lab, law: str) -> str:
        """What a law says against a mutant; empty: nothing."""
        self.opened.tried.clear()
        try:
            for _ in LAW_OF[law].test(lab):
                pass
        except (Broken, NotChecked) as error:
            return str(error)
        return f"walls: {self.opened.tried[0]}" if self.opened.tried else ""


@contextlib.contextmanager
def court() -> Iterator[Court]:
    """For a time."""
    with tempfile.TemporaryDirectory(prefix="court_") as name:
        folder = Path(name).resolve()
        script = folder / "train_gpt.py"
        script.write_text(mutants.script_of_all((REPO / "train_gpt.py").read_text(encoding="utf-8")))
        worlds = Worlds(folder / "worlds")
        with box.opened(script, folder / "runs", [worlds.folder]) as opened:
            yield Court(opened, worlds)


def all_laws(court: Court, name: str) -> dict[str, Any]:
    """Which law refutes a mutant first, the one that its table names before all others."""
    mutant = tables.MUTANTS[name]
    of_its_lab = [law.name for law in LAWS if mutant.lab in law.labs]
    order = dict.fromkeys([*filter(None, [tables.LAW_OF.get(name)]), *of_its_lab])
    began, used = time.monotonic(), court.opened.cpu_seconds
    labs: dict[str, Lab] = {}
    found = {"name": name, "lab": "", "law": "", "text": "survives"}
    for law in order:
        where = mutant.lab if mutant.lab in LAW_OF[law].labs else LAW_OF[law].labs[0]
        if where not in labs:
            labs[where] = court.lab(where, name, mutant.settings)
        text = court.refuted(labs[where], law)
        if text:
            found = {"name": name, "lab": where, "law": law, "text": text}
            break
    seconds = {"seconds": time.monotonic() - began, "cpu_seconds": court.opened.cpu_seconds - used}
    return {**found, **{key: round(value, 1) for key, value in seconds.items()}}


def main(arguments: list[str]) -> None:
    file = Path(arguments[0])
    done = {json.loads(line)["name"] for line in file.read_text().splitlines()} if file.exists() else set()
    names = arguments[1:] or [*tables.MUTANTS]
    unknown = [name for name in names if name not in tables.MUTANTS]
    if unknown:
        sys.exit(f"no mutant is named {', '.join(unknown)}; the names are in tests/audit/mutants/tables.py")
    with court() as opened:
        for name in names:
            if name in done:
                continue
            row = all_laws(opened, name)
            with file.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
