"""What tries leave behind: the spread of pairs on this machine, and the verdicts of a day."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median, stdev
from typing import Any, BinaryIO

from data.files import exclusive, explain_os_error
from tools.compare.sequential import DROP, KEEP, resolution
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
        self._conditions = dict(here)

    def _entries(self) -> list[dict[str, Any]]:
        """What the file holds, by conditions. RecordError where it was edited into something else."""
        if not self._path.is_file():
            return []
        advice = "move it away, and the next try measures the spread again"
        try:
            found: Any = required_object(self._path).get("conditions")
        except RecordError as error:
            raise RecordError(f"{error}; {advice}") from error
        entries = found if isinstance(found, list) else [found]
        if not all(isinstance(entry, dict) and isinstance(entry.get("tries"), dict) for entry in entries):
            raise RecordError(f"{self._path}: not what a try has written; {advice}")
        return entries

    def _is_here(self, entry: Mapping[str, Any]) -> bool:
        return all(entry.get(name) == value for name, value in self._conditions.items())

    def typical(self) -> tuple[float, int] | None:
        """The standard deviation of differences in a typical try, and of how many pairs; None without any.

        It is the median over tries. A change that trains badly scatters a hundred times as much as others do,
        and would dominate a mean forever. A deviation of few pairs is more often too small than too large, so
        each is first divided by the median that it would have if the true one were 1. Tries that changed no
        score are left out: they would say that nothing scatters.
        """
        from scipy import special  # here, because it is slow to import

        deviations = []
        pairs = 0
        for entry in filter(self._is_here, self._entries()):
            for differences in entry["tries"].values():
                if len(differences) > 1 and stdev(differences) > 0:
                    freedom = len(differences) - 1
                    squares_of_one = 2 * float(special.gammaincinv(freedom / 2, 0.5))  # the median of χ²
                    deviations.append(stdev(differences) * (freedom / squares_of_one) ** 0.5)
                    pairs += len(differences)
        return (median(deviations), pairs) if deviations else None

    def in_words(self) -> str:
        """The smallest difference that N pairs can show; or that the first pairs will measure it."""
        known = self.typical()
        if known is None:
            return ("how small a difference this budget can show on this machine is not known yet: the first "
                    "pairs will measure it")
        spread, pairs = known
        sizes = ", ".join(f"{count} pairs {size:.4f}" for count, size in resolution(spread).items())
        here = f"{spread:.4f} here ({pairs} earlier pairs, median over tries)"
        return (f"differences have a standard deviation of {here}, so the smallest mean difference that a "
                f"try can show is, with {sizes}")

    def add(self, name: str, differences: Sequence[float]) -> None:
        """Keep the differences of a try, and replace those that it had; others may be adding theirs."""
        with exclusive(self._path.with_name(f".{SPREAD}.lock"), wait=True):
            entries = self._entries()
            entry = next(filter(self._is_here, entries), None)
            if entry is None:
                entry = {**self._conditions, "tries": {}}
                entries.append(entry)
            entry["tries"][name] = list(differences)
            write_text(self._path, json_text({"conditions": entries}))


def append(runs: Path, **entry: Any) -> None:
    """One line for a verdict. DataError where it cannot be written."""
    line = json.dumps({"time": datetime.now().isoformat(timespec="seconds"), **entry})
    path = runs / VERDICTS
    try:
        with path.open("ab+") as file:
            is_torn = file.tell() > 0 and last_byte(file) != b"\n"
            file.write(f"{chr(10) if is_torn else ''}{line}\n".encode())
    except OSError as error:
        raise explain_os_error(error, path) from error


def last_byte(file: BinaryIO) -> bytes:
    """That of a file that is not empty."""
    file.seek(-1, os.SEEK_END)
    return file.read()


def entries(runs: Path) -> list[dict[str, Any]]:
    """The verdicts so far. A line that a kill has torn is skipped."""
    found = []
    path = runs / VERDICTS
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def last_keep(runs: Path) -> dict[str, Any] | None:
    """The last verdict that kept something. RecordError where its line was edited, or its folder is gone."""
    decided: dict[str, dict[str, Any]] = {}  # by try, in the order of their last verdicts
    for entry in entries(runs):
        if entry.get("verdict") in (KEEP, DROP):  # asked again with fewer seeds, a try may be undecided
            decided.pop(str(entry.get("name")), None)
            decided[str(entry.get("name"))] = entry
    kept = [entry for entry in decided.values() if entry["verdict"] == KEEP]
    if not kept:
        return None
    entry = kept[-1]
    if not isinstance(entry.get("settings"), dict) or not (runs / str(entry.get("name"))).is_dir():
        raise RecordError(f"{runs / VERDICTS}: the last try kept is {entry.get('name')}, whose folder or "
                          "settings are gone; name another --base")
    return entry


def tries_of_today(runs: Path) -> int:
    """How many different tries got a verdict today."""
    today = datetime.now().date().isoformat()
    return len({entry.get("name") for entry in entries(runs) if str(entry.get("time")).startswith(today)})
