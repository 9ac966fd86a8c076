"""The two sides of a try: which script and settings each has, and the budget that they share."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools import REPO
from tools.compare.history import last_keep
from tools.compare.rows import SET_BY_THE_DRIVER, pairs, settings_of_shell
from tools.runs.errors import RecordError
from tools.runs.folder import Folder
from tools.runs.runs import LOG
from tools.runs.script import ConfigError, read_config_file

SCRIPT = REPO / "train_gpt.py"
BUDGET = REPO / "configs" / "cpu_try.env"
MAIN_BRANCHES = ("main", "origin/main", "master", "origin/master")
LAST_KEEP = "keep"  # what --base calls the last try that was kept
BASE, NEW = "base", "new"
NAME_LENGTH_MAX = 60


@dataclass(frozen=True)
class Side:
    """A script, and the settings that it has on top of the budget."""

    script: bytes
    settings: dict[str, str]
    origin: str  # in words


def base_side(named: str | None, runs: Path) -> Side:
    """What --base names; else the script where the branch left main, the last one kept, or no change."""
    if named == LAST_KEEP:
        kept = kept_side(runs)
        if kept is None:
            raise RecordError(f"--base {LAST_KEEP}: no try in {runs} has been kept yet; name a commit")
        return kept
    if named is not None and Path(named).is_file():
        return Side(script_bytes(Path(named)), {}, named)
    if named is not None and Path(named).is_dir():
        return folder_side(Path(named))
    if named is not None:
        return commit_side(named, f"commit {named}")
    for branch in MAIN_BRANCHES:
        commit = git("merge-base", "HEAD", branch)
        if commit is not None:
            short = commit.decode().strip()[:9]
            return commit_side(short, f"{short}, where this branch left {branch}")
    return kept_side(runs) or Side(script_bytes(SCRIPT), {}, f"{SCRIPT.name} without the change")


def git(*arguments: str) -> bytes | None:
    """What git prints in this repository; None where it fails, or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=REPO, capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def commit_side(ref: str, origin: str) -> Side:
    """The script of a commit. RecordError where there is none."""
    source = git("show", f"{ref}:{SCRIPT.name}")
    if source is None:
        raise RecordError(f"--base {ref}: expected a script, the folder of a record or run, or a commit "
                          f"with a {SCRIPT.name}")  # fmt: skip
    return Side(source, {}, origin)


def folder_side(path: Path) -> Side:
    """The script of a run, or the readable one of a record. Their settings are a budget, for --config."""
    readable = path / SCRIPT.name if (path / LOG).is_file() else Folder(path).readable
    if readable is None:
        raise RecordError(f"--base {path}: no readable script there; name a script, or a commit")
    return Side(script_bytes(readable), {}, str(path))


def kept_side(runs: Path) -> Side | None:
    """What the last try with the verdict `keep` tried; None without one."""
    entry = last_keep(runs)
    if entry is None:
        return None
    script = runs / entry["name"] / f"{NEW}.py"
    return Side(script_bytes(script), dict(entry["settings"]), f"{entry['name']}, the last one kept")


def script_bytes(path: Path) -> bytes:
    """A script's bytes. RecordError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}; expected a version of {SCRIPT.name}") from error


def changes_of(words: list[str]) -> dict[str, str]:
    """The settings of one's own side alone, from the command line."""
    return pairs("try", words)


def budget_settings(path: Path, equal: str) -> dict[str, str]:
    """The settings of both sides: those of a file, and over them those of the shell."""
    try:
        settings = read_config_file(str(path))
    except ConfigError as error:
        raise RecordError(f"--config {path}: {error}") from error
    settings |= settings_of_shell(os.environ)
    for name in ("CONFIG", *SET_BY_THE_DRIVER):
        settings.pop(name, None)
    if equal == "steps":
        if "ITERATIONS" not in settings:
            raise RecordError(f"{path} has no ITERATIONS: add the number of steps, or use --equal seconds")
        settings["MAX_WALLCLOCK_SECONDS"] = "0"
    else:
        if settings.get("MAX_WALLCLOCK_SECONDS", "0") in ("0", "0.0"):
            raise RecordError(f"--equal seconds gives both sides a time limit, and {path} has none: copy it, "
                              "set MAX_WALLCLOCK_SECONDS=60, and pass the copy with --config")  # fmt: skip
        # Where runs end after so many steps, a change that makes steps longer would lose nothing by it.
        settings.pop("ITERATIONS", None)
    return settings


def folder_name(changes: Mapping[str, str], base: Side, new: Side, budget: Mapping[str, str]) -> str:
    """A name for these two sides at this budget: other scripts or settings have another."""
    settings = json.dumps([base.settings, new.settings, dict(budget)], sort_keys=True).encode()
    digest = hashlib.sha256(b"\0".join([base.script, new.script, settings])).hexdigest()[:8]
    words = "-".join(f"{name.lower()}-{value.lower()}" for name, value in changes.items()) or "code"
    return f"{re.sub(r'[^a-z0-9.+-]+', '_', words)[:NAME_LENGTH_MAX]}-{digest}"
