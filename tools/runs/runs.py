"""A run directory `runs/<RUN_ID>/`, and one view on runs and folders for diff and plot."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tools.runs.errors import RecordError
from tools.runs.folder import (
    CONFIG,
    FILES_MAX,
    PER_RUN_SETTINGS,
    SCRIPT,
    SETTINGS_OF_A_START,
    SUBMISSION,
    TEXT_BYTES_MAX,
    Folder,
    SeedRun,
    is_log_name,
    is_own,
    required_object,
)
from tools.runs.logs import Final, RunLog, read_log
from tools.runs.reading import as_text, name_of, path_of
from tools.runs.source import Script, read_script

LOG = "log.txt"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
ARTIFACT = "model.bin"
CHECKPOINT = "checkpoint.pt"
SHIPPED = "train_gpt.shipped.py"  # the form of the script that the run counted
FINISHED = "finished"
PLACES = {"DATA_PATH", "TOKENIZER_PATH", "CONFIG", "FOREIGN_NAMES"}  # where a run reads, not what it does
METRICS_BYTES_MAX = 64 * 2**20  # of a metrics.jsonl; no run writes a fifth of it
LOGS_NAMED_MAX = 3  # of files that are not logs, in a message
LOGS_MAX = 20  # that are read to decide whether a folder is a record


@dataclass(frozen=True)
class Event:
    """One line of metrics.jsonl; `values` keeps whatever the script wrote."""

    kind: str
    values: dict[str, Any]

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def step(self) -> int | None:
        step = self.number("step")
        return int(step) if step is not None else None


class RunDirectory:
    """Lazy view of a run directory. Raises RecordError where log or summary is missing."""

    def __init__(self, path: Path) -> None:
        if not is_own(path / LOG):
            raise RecordError(f"{path_of(path)} is not a run directory: it has no {LOG}; give runs/<RUN_ID>")
        self.path = path

    @cached_property
    def log(self) -> RunLog:
        return read_log(self.path / LOG)

    @cached_property
    def summary(self) -> dict[str, Any]:
        path = self.path / SUMMARY
        if not is_own(path):
            raise RecordError(f"{path_of(path)} is missing or is a link; resume the run, or run it again")
        return required_object(path)

    @property
    def run_id(self) -> str:
        return str(self.summary.get("run_id", self.path.name))

    @property
    def seed(self) -> int | None:
        seed = self.summary.get("seed", self.log.seed)
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else None

    @cached_property
    def config_lines(self) -> list[str]:
        """KEY=VALUE lines of config.env, comments and blank lines left out."""
        path = self.path / CONFIG
        if not is_own(path):
            raise RecordError(f"{path_of(path)} is missing: the run directory is not complete")
        return settings_lines(path)

    @cached_property
    def config(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.config_lines)

    @cached_property
    def script(self) -> Script:
        path = self.path / SCRIPT
        if not is_own(path):
            raise RecordError(f"{path_of(path)} is missing: the run directory lacks the script that ran")
        return read_script(path)

    @cached_property
    def events(self) -> list[Event]:
        return read_events(self.path / METRICS)


def settings_lines(path: Path) -> list[str]:
    """KEY=VALUE lines of a config.env, comments and blank lines left out."""
    with path.open("rb") as file:
        return settings_in(as_text(file.read(TEXT_BYTES_MAX)))


def settings_of(path: Path) -> dict[str, str]:
    """The settings of a config.env, by name."""
    return dict(line.split("=", 1) for line in settings_lines(path))


def settings_in(text: str) -> list[str]:
    """KEY=VALUE lines of the text of a config.env."""
    return [line.strip() for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#")]


def settings_that_differ(written: Mapping[str, Any], ran: Mapping[str, Any]) -> list[str]:
    """Names of the settings in which a config.env and the configuration of a run differ.

    Apart from what may differ between the seeds of a record, and what is in no config.env.
    """
    names = written.keys() | ran.keys()
    apart = PER_RUN_SETTINGS | SETTINGS_OF_A_START
    return [name for name in sorted(names - apart) if written.get(name) != ran.get(name)]


def settings_sha256(settings: Mapping[str, str]) -> str:
    """SHA-256 of the settings that a proof is about: without those of one run, of one start, and places."""
    apart = PER_RUN_SETTINGS | SETTINGS_OF_A_START | PLACES
    kept = {name: value for name, value in sorted(settings.items()) if name not in apart}
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()


def read_events(path: Path) -> list[Event]:
    """Events of a metrics.jsonl; a torn last line, as a killed run leaves it, is skipped."""
    if not is_own(path):
        return []
    events = []
    with path.open("rb") as file:
        lines = as_text(file.read(METRICS_BYTES_MAX)).splitlines()
    for line in lines:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            events.append(Event(str(values.get("event", "")), values))
    return events


@dataclass
class Run:
    """One run, from a run directory or one seed of a records folder."""

    name: str
    log: RunLog
    score: Final | None
    events: list[Event]
    summary: dict[str, Any]


@dataclass
class Group:
    """The runs that one argument of diff or plot names: the seeds of a folder, or a single run."""

    name: str
    runs: list[Run]
    config: dict[str, str]
    script: Script | None
    other_sets: dict[str, list[Run]]  # reruns of the same seeds that the folder also holds, by file name

    def scores(self, attribute: str) -> list[float]:
        return scores(self.runs, attribute)


def shown_stem(path: Path) -> str:
    """The name of a file without its ending, to be shown."""
    return name_of(path.with_suffix(""))


def scores(runs: Sequence[Run], attribute: str) -> list[float]:
    """`bpb` or `loss` of every run that has a score."""
    return [getattr(run.score, attribute) for run in runs if run.score]


def seeds_of(runs: Sequence[Run]) -> list[int]:
    """The seeds of the runs that have a score; none where one is not known, or occurs twice."""
    seeds = [run.log.seed for run in runs if run.score]
    known = [seed for seed in seeds if seed is not None]
    return known if len(set(known)) == len(seeds) else []


def output_path(path: Path, name: str) -> Path:
    """Where a tool writes NAME by default, made from `path`: into a run directory.

    The files of a records folder are evidence and stay as they are: there it is FOLDER_NAME, in the working
    directory.
    """
    if (path / LOG).is_file():
        return path / name
    return Path(f"{path.resolve().name}_{name}")


def load_group(path: Path) -> Group:
    """A run directory, a records folder or a log, ours or public."""
    if path.is_file():
        log = read_log(path)
        if log.says_nothing:
            raise RecordError(log.nothing)
        run = Run(shown_stem(path), log, log.headline, [], {})
        script = Script(path, log.source.encode(), log.source, wrapped=False) if log.source else None
        return Group(f"{name_of(path.parent)}/{name_of(path)}", [run], _settings(Path(), log), script, {})
    if is_own(path / LOG):
        return _group_of_run(RunDirectory(path))
    folder = Folder(path)
    _require_record(path)
    runs = [_seed_of_folder(folder, seed) for seed in folder.seed_runs]
    if not runs:
        read = "; ".join(log.nothing for log in folder.no_logs[:LOGS_NAMED_MAX])
        raise RecordError(f"{path_of(path)} holds no log with a step or a score{f': {read}' if read else ''}")
    others = {
        name: [_seed_of_folder(folder, seed) for seed in found] for name, found in folder.other_sets().items()
    }
    return Group(
        folder.name, runs, _settings(folder.file(CONFIG), folder.seed_runs[0].log), _readable(folder), others
    )


def _require_record(path: Path) -> None:
    """RecordError for a folder that is not a record, by what is at its top; inner folders are not read."""
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in itertools.islice(entries, FILES_MAX))
    if any(name.startswith("submission") and name.endswith(".json") for name in names):
        return
    texts = [path / name for name in names if is_log_name(name) and (path / name).is_file()]
    logs = [read_log(text) for text in texts[:LOGS_MAX]]
    if not all(log.says_nothing for log in logs):
        return
    told = "".join(f"; {log.nothing}" for log in logs[:LOGS_NAMED_MAX])
    raise RecordError(
        f"{path_of(path)} is neither a run nor a record: it has no {LOG}, no {SUBMISSION}, and no log with a"
        f" step or a score{told}; give runs/<RUN_ID> or records/track_*/DATE_Name"
    )


def _seed_of_folder(folder: Folder, seed: SeedRun) -> Run:
    return Run(
        name=f"{folder.name} seed {seed.seed}" if seed.seed is not None else shown_stem(seed.log.path),
        log=seed.log,
        score=folder.score(seed.log),
        events=[],
        summary=folder.summaries.get(seed.seed, {}) if seed.seed is not None else {},
    )


def _group_of_run(directory: RunDirectory) -> Group:
    summary = directory.summary if is_own(directory.path / SUMMARY) else {}
    name = name_of(directory.path.resolve())
    run = Run(name, directory.log, directory.log.headline, directory.events, summary)
    config = _settings(directory.path / CONFIG, directory.log)
    script = directory.script if is_own(directory.path / SCRIPT) else None
    return Group(name, [run], config, script, {})


def _readable(folder: Folder) -> Script | None:
    return read_script(folder.readable) if folder.readable else folder.script


def _settings(path: Path, log: RunLog) -> dict[str, str]:
    """Settings of config.env, or those that the log prints, without what differs between seeds."""
    found = settings_of(path) if is_own(path) else _printed_config(log)
    return {name: value for name, value in found.items() if name not in PER_RUN_SETTINGS}


def _printed_config(log: RunLog) -> dict[str, str]:
    """The settings that a log prints, under the names that the environment gives them."""
    return {key.upper(): located.value for key, located in log.settings.items()}
