"""The two sides of a try: which script and settings each has, and the budget that they share."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import REPO
from tools.compare.history import last_keep
from tools.compare.rows import SET_BY_THE_DRIVER, pairs, settings_of_shell
from tools.runs.errors import RecordError
from tools.runs.folder import Folder
from tools.runs.runs import LOG
from tools.runs.script import Config, ConfigError, read_config_file

SCRIPT = REPO / "train_gpt.py"
BUDGET = REPO / "configs" / "cpu_try.env"
MAIN_BRANCHES = ("main", "master")  # and what a remote calls its default
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
    if git("show", f"HEAD:./{SCRIPT.name}") is not None:
        commit, branch = left_main()
        return commit_side(commit[:9], f"{commit[:9]}, where this branch left {branch}")
    refuse_unread_repository()
    # No repository, or one that knows nothing of the script.
    return kept_side(runs) or Side(script_bytes(SCRIPT), {}, f"{SCRIPT.name} without the change")


def left_main() -> tuple[str, str]:
    """The commit where this branch left main, and the name of main. RecordError where none is known.

    There may be several, such as a local main that nobody has updated since the branch began at origin's. The
    one with the fewest commits up to here is the branch's own beginning.
    """
    heads = lines_of_git("for-each-ref", "--format=%(symref)", "refs/remotes/*/HEAD")
    names = [*MAIN_BRANCHES, *(head.split("/", 3)[-1] for head in heads if head)]
    patterns = [f"refs/{place}/{name}" for name in dict.fromkeys(names) for place in ("heads", "remotes/*")]
    found = []
    for branch in lines_of_git("for-each-ref", "--format=%(refname)", *patterns):
        for commit in lines_of_git("merge-base", "HEAD", branch):
            (since,) = lines_of_git("rev-list", "--count", f"{commit}..HEAD")
            is_remote = branch.startswith("refs/remotes/")
            found.append((int(since), is_remote, commit, branch.split("/", 2)[-1]))
    if not found:
        names_of_main = " or ".join(MAIN_BRANCHES)
        raise RecordError(
            f"no branch that this one left is called {names_of_main}, or is a remote's default; name what to "
            "compare with: --base HEAD is the last commit"
        )
    *_, commit, branch = min(found)
    return commit, branch


def git(*arguments: str) -> bytes | None:
    """What git prints in this repository; None where it fails, or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=REPO, capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def refuse_unread_repository() -> None:
    """RecordError where there is a repository that git cannot read, as in many containers.

    Without it, the edited script would silently become its own base.
    """
    if not any((folder / ".git").exists() for folder in (REPO, *REPO.parents)):
        return
    reason = "it is not installed"
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "rev-parse"], cwd=REPO, capture_output=True, check=False)
        if done.returncode == 0:
            return
        reason = " ".join(done.stderr.decode("utf-8", "replace").split())
    raise RecordError(f"git does not read the repository {REPO}: {reason}. Without git, name what to compare "
                      "with: --base old.py, or --base train_gpt.py to try a setting alone")


def lines_of_git(*arguments: str) -> list[str]:
    """The lines that git prints; none where it fails."""
    return (git(*arguments) or b"").decode("utf-8", "surrogateescape").split("\n")[:-1]


def commit_side(ref: str, origin: str) -> Side:
    """The script of a commit. RecordError where there is none."""
    source = git("show", f"{ref}:./{SCRIPT.name}")  # the repository may be a folder of a larger one
    if source is None:
        refuse_unread_repository()
        raise RecordError(f"--base {ref}: expected a script, the folder of a record or run, or a commit "
                          f"with a {SCRIPT.name}")
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
    return pairs("command line", words)


@dataclass(frozen=True)
class Budget:
    """The settings of both sides, and in words what was set that a try has no use for."""

    settings: dict[str, str]
    unused: list[str]


def budget_of(path: Path, equal: str) -> Budget:
    """What a file sets, and over it the shell."""
    try:
        of_file = read_config_file(str(path))
    except ConfigError as error:
        raise RecordError(f"--config {path}: {error}") from error
    settings = {**of_file, **settings_of_shell(os.environ)}
    unused = []
    for place, given in ((str(path), of_file), ("the shell", os.environ)):
        for name in SET_BY_THE_DRIVER:
            if given.get(name) and (name, place) != ("RUNS_DIR", "the shell"):  # that one holds the tries
                unused.append(f"{name}={given[name]} of {place} is not used: try sets it for each run")
    for name in ("CONFIG", *SET_BY_THE_DRIVER):
        settings.pop(name, None)
    limit = settings.get("MAX_WALLCLOCK_SECONDS", "0")
    if equal == "steps":
        if "ITERATIONS" not in settings:
            raise RecordError(f"{path} has no ITERATIONS: add the number of steps, or use --equal seconds")
        settings["MAX_WALLCLOCK_SECONDS"] = "0"
        if limit not in ("0", "0.0"):
            unused.append(f"MAX_WALLCLOCK_SECONDS={limit} is not used: at equal steps, runs have no limit")
        return Budget(settings, unused)
    if limit in ("0", "0.0"):
        raise RecordError(f"--equal seconds gives both sides a time limit, and {path} has none: copy it, "
                          "set MAX_WALLCLOCK_SECONDS=60, and pass the copy with --config")
    # Where runs end after so many steps, a change that makes steps longer would lose nothing by it.
    settings["ITERATIONS"] = Config().as_env()["ITERATIONS"]  # over that of the shell
    steps = os.environ.get("ITERATIONS")
    if steps:
        unused.append(f"ITERATIONS={steps} is not used: at equal seconds, the clock ends a run")
    return Budget(settings, unused)


def folder_name(
    changes: Mapping[str, str],
    base: Side,
    new: Side,
    budget: Mapping[str, str],
    data: Sequence[Mapping[str, str]],
) -> str:
    """A name for these two sides at this budget: other scripts, settings or data have another."""
    parts = [base.settings, new.settings, dict(budget), *map(dict, data)]
    settings = json.dumps(parts, sort_keys=True).encode()
    digest = hashlib.sha256(b"\0".join([base.script, new.script, settings])).hexdigest()[:8]
    words = "-".join(f"{name.lower()}-{value.lower()}" for name, value in changes.items()) or "code"
    return f"{re.sub(r'[^a-z0-9.+-]+', '_', words)[:NAME_LENGTH_MAX]}-{digest}"
