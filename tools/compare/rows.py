"""Rows of settings × seeds: read from a small file, and checked before anything is run."""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import REPO
from tools.runs.errors import RecordError
from tools.runs.load import load_script
from tools.runs.reading import exact_text
from tools.runs.script import LAUNCHERS, Config, similar_setting

LINE = re.compile(r"([A-Za-z0-9][\w.+-]*):(.*)")
RESERVED = ("seeds", "all", "start")
WORDS_OF_A_ROW = ("of", "script")  # in small letters, as no setting is
SET_BY_THE_DRIVER = ("SEED", "RUN_ID", "RUNS_DIR", "RESUME", "EVAL_ONLY")


@dataclass(frozen=True)
class Row:
    """Settings that are trained with each seed; or another way to score the artifacts of such a row."""

    name: str
    settings: dict[str, str]  # those of the shell too, which the row's own override
    start: list[str]  # the command, whose last word is the script
    script: Path | None = None  # a version of train_gpt.py that is not this repository's
    of: str = ""  # the row whose artifacts it scores; empty: it trains its own

    def config(self, seed: str) -> Any:
        """The settings of a run, as its script reads them. ValueError, as a ConfigError of that script is."""
        return config_class(self.script).from_env({**self.settings, "SEED": seed})


@dataclass(frozen=True)
class Sweep:
    """The rows of a file, the first of which is the base, and the seeds of each."""

    name: str
    rows: dict[str, Row]
    seeds: list[str]


@functools.cache
def config_class(script: Path | None) -> Any:
    """The class of settings of a script; None: this repository's. RecordError for a script without one."""
    if script is None:
        return Config
    if not script.is_file():
        raise RecordError(f"{script}: no such script; give script=PATH of a version of train_gpt.py")
    # One that is not ours is not executed.
    if "\nclass Config(" not in script.read_text(encoding="utf-8", errors="replace"):
        raise RecordError(f"{script} has no class Config, so it is not a version of this repository's "
                          "train_gpt.py; benchmarks/beside.py runs other people's scripts")
    try:
        return load_script(script).Config
    except Exception as error:  # whatever that version raises
        raise RecordError(f"{script} does not load: {type(error).__name__}: {error}") from error


def read_sweep(path: Path, environ: Mapping[str, str] = os.environ) -> Sweep:
    """The sweep that a file describes. RecordError with the line that cannot be read.

    environ: the shell, whose settings reach every row where the row has none of its own.
    """
    found = read_lines(path)
    everywhere = pairs(f"{path}, row all", found.get("all", []))
    start = found.get("start") or [sys.executable, str(REPO / "train_gpt.py")]
    rows: dict[str, Row] = {}
    for name, words in found.items():
        if name not in RESERVED:
            given = {**everywhere, **pairs(f"{path}, row {name}", words)}
            rows[name] = read_row(path, name, given, start, rows, environ)
    if not rows:
        raise RecordError(
            f"{path}: no row; expected a line NAME: SETTING=VALUE … in addition to {', '.join(RESERVED)}"
        )
    seeds = found.get("seeds") or [environ.get("SEED") or Config().as_env()["SEED"]]
    if len(set(seeds)) < len(seeds):
        raise RecordError(f"{path}: seeds: {' '.join(seeds)}: expected each seed once")
    for row in rows.values():
        for seed in seeds:
            try:
                row.config(seed)
            except ValueError as error:  # a ConfigError, of whichever script
                raise RecordError(f"{path}, row {row.name}: {error}") from error
    return Sweep(path.stem, rows, seeds)


def read_lines(path: Path) -> dict[str, list[str]]:
    """The words after each name of the file, in its order."""
    try:
        lines = exact_text(path.read_bytes()).splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordError(f"{path}: {reason}; expected lines of NAME: SETTING=VALUE …") from error
    found: dict[str, list[str]] = {}
    begun = ""  # of a line that goes on
    for number, line in enumerate(lines, 1):
        line = begun + line
        begun = line.removesuffix("\\") if line.endswith("\\") else ""
        if begun or not line.strip() or line.lstrip().startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None or match[1] in found:
            what = "a name that is already taken" if match else "not NAME: SETTING=VALUE …"
            raise RecordError(f"{path} line {number}: {line.strip()!r} is {what}")
        try:
            found[match[1]] = shlex.split(match[2])
        except ValueError as error:
            raise RecordError(f"{path} line {number}: {line.strip()!r}: {error}") from error
    if begun:
        raise RecordError(f"{path}: its last line ends with a backslash: {begun.strip()!r}")
    return found


def settings_of_shell(environ: Mapping[str, str], script: Path | None = None) -> dict[str, str]:
    """The variables of the shell that are settings of a script, and no driver's own."""
    reaches = {"CONFIG", *config_class(script)().as_env()}.difference(SET_BY_THE_DRIVER)
    return {variable: value for variable, value in environ.items() if variable in reaches}


def pairs(place: str, words: Sequence[str]) -> dict[str, str]:
    """The words NAME=VALUE of a line. RecordError for another word, or a variable that the driver sets.

    place: where they are, for the message.
    """
    found: dict[str, str] = {}
    for word in words:
        variable, equals, value = word.partition("=")
        if not equals:
            raise RecordError(f"{place}: {word!r} is not SETTING=VALUE")
        if variable in SET_BY_THE_DRIVER:
            raise RecordError(f"{place}: {variable} is set automatically for each run; for seeds, try has "
                              "--seeds, and a sweep its line `seeds:`")
        if variable in found:
            raise RecordError(f"{place}: {variable} is given twice, as {found[variable]!r} and {value!r}")
        found[variable] = value
    return found


def read_row(
    path: Path, name: str, given: Mapping[str, str], start: list[str], above: Mapping[str, Row],
    environ: Mapping[str, str],
) -> Row:
    """One row of the file; above: the rows before it. RecordError for a name that is not a setting."""
    of = given.get("of", "")
    if of and of not in above:
        known = ", ".join(above) or "none"
        raise RecordError(f"{path}, row {name}: of={of}: expected the name of a row above it: {known}")
    if of and above[of].of:
        raise RecordError(f"{path}, row {name}: of={of}: that row trains nothing; name {above[of].of}")
    script = Path(given["script"]) if "script" in given else above[of].script if of else None
    known_settings = config_class(script)().as_env()
    settings = {variable: value for variable, value in given.items() if variable not in WORDS_OF_A_ROW}
    for variable in settings:
        if variable != "CONFIG" and variable not in known_settings and not variable.startswith(LAUNCHERS):
            near = similar_setting(variable) or "a name that train_gpt.py --help lists"
            raise RecordError(f"{path}, row {name}: {variable} is not a setting; did you mean {near}?")
    beneath = above[of].settings if of else settings_of_shell(environ, script)
    return Row(name, {**beneath, **settings}, [*start[:-1], str(script)] if script else start, script, of)
