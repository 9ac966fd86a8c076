"""What tries leave behind: the spread of pairs on this machine, and the verdicts of a day."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.compare.sequential import KEEP, resolution
from tools.runs.errors import RecordError
from tools.runs.folder import required_object
from tools.runs.writing import json_text, write_text

VERDICTS = "log.jsonl"
SPREAD = "spread.json"


def conditions(budget: Mapping[str, str]) -> dict[str, Any]:
    """What the scatter of pairs depends on: the budget and the machine."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    machine = f"{platform.node()}, {device}, {os.cpu_count()} cores, torch {version('torch')}"
    return {"machine": machine, "budget": dict(sorted(budget.items()))}


class Spread:
    """The differences of all pairs so far under the same conditions, by try, kept in a file."""

    def __init__(self, runs: Path, here: Mapping[str, Any]) -> None:
        self._path = runs / SPREAD
        self._entries: list[dict[str, Any]] = []
        if self._path.is_file():
            self._entries = required_object(self._path).get("conditions", [])
        self._here: dict[str, Any] = {**here, "tries": {}}
        for entry in self._entries:
            if all(entry.get(name) == value for name, value in here.items()):
                self._here = entry

    def pooled(self) -> tuple[float, int] | None:
        """The standard deviation of differences within a try, and of how many pairs; None without any.

        Tries that changed no score are left out: they would say that nothing scatters.
        """
        squares, pairs, tries = 0.0, 0, 0
        for differences in self._here["tries"].values():
            if any(differences) and len(differences) > 1:
                center = fmean(differences)
                squares += sum((value - center) ** 2 for value in differences)
                pairs += len(differences)
                tries += 1
        return ((squares / (pairs - tries)) ** 0.5, pairs) if squares else None

    def in_words(self) -> str:
        """The smallest difference that N pairs can show; or that the first pairs will measure it."""
        known = self.pooled()
        if known is None:
            return ("how small a difference this budget can show on this machine is not known yet: the first "
                    "pairs will measure it")  # fmt: skip
        spread, pairs = known
        sizes = ", ".join(f"{count} pairs {size:.4f}" for count, size in resolution(spread).items())
        return (f"differences have a standard deviation of {spread:.4f} here ({pairs} earlier pairs), so the "
                f"smallest mean difference that a try can show is, with {sizes}")  # fmt: skip

    def add(self, name: str, differences: Sequence[float]) -> None:
        """Keep the differences of a try, and replace those that it had."""
        self._here["tries"][name] = list(differences)
        if self._here not in self._entries:
            self._entries.append(self._here)
        write_text(self._path, json_text({"conditions": self._entries}))


def append(runs: Path, **entry: Any) -> None:
    """One line for a verdict."""
    line = json.dumps({"time": datetime.now().isoformat(timespec="seconds"), **entry})
    with (runs / VERDICTS).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def entries(runs: Path) -> list[dict[str, Any]]:
    """The verdicts so far. A line that a kill has torn is skipped."""
    found = []
    path = runs / VERDICTS
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def last_keep(runs: Path) -> dict[str, Any] | None:
    """The last verdict that kept something. RecordError where its line was edited, or its folder is gone."""
    kept = [entry for entry in entries(runs) if entry.get("verdict") == KEEP]
    if not kept:
        return None
    entry = kept[-1]
    if not isinstance(entry.get("settings"), dict) or not (runs / str(entry.get("name"))).is_dir():
        raise RecordError(f"{runs / VERDICTS}: the last try kept is {entry.get('name')}, whose folder or "
                          "settings are gone; name another --base")  # fmt: skip
    return entry


def tries_of_today(runs: Path) -> int:
    """How many different tries got a verdict today."""
    today = datetime.now().date().isoformat()
    return len({entry.get("name") for entry in entries(runs) if str(entry.get("time")).startswith(today)})
