"""A records folder as it is on disk: submission.json, logs by seed, the script, our own summaries."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tools.runs.errors import RecordError
from tools.runs.logs import COUNT, EXACT, LOG_BYTES_MAX, MODEL_BYTES, Final, RunLog, decimals, read_log
from tools.runs.reading import as_text, name_of, path_of, plain_text
from tools.runs.source import SCRIPT_BYTES_MAX, Script, closure, read_script

SUBMISSION = "submission.json"
SCRIPT = "train_gpt.py"
README = "README.md"
REQUIREMENTS = "requirements.txt"
CONFIG = "config.env"
READABLE_SCRIPT = "train_gpt_readable.py"  # the source next to a wrapped script
SHA256 = re.compile(r"[0-9a-f]{64}")
PER_RUN_SETTINGS = {"SEED", "RUN_ID", "RUNS_DIR"}  # what may differ between the seeds of one record
SETTINGS_OF_A_START = {"RESUME", "RESUME_OTHER_CODE", "EVAL_ONLY"}  # are in no config.env
BASELINE_DIFF = "baseline.diff"
LOG_NAME = "train_seed{seed}.log"
SUMMARY_NAME = "summary_seed{seed}.json"
NATS_NAME = "nats_{label}.bin"  # of each document in one score, fp64, as a run leaves them
SEED_IN_NAME = re.compile(r"seed[_-]?(\d+)")
NUMBER_IN_NAME = re.compile(r"(?:^|[_-]|train)(\d+)$")
FILES_MAX = 2_000  # of a folder; the rest is not looked at
DEPTH_MAX = 8  # of folders in a folder
TEXT_BYTES_MAX = 2**20  # of submission.json, a summary, README.md, …
LOGS_BYTES_MAX = 32 * 2**20  # of all logs together
SCRIPTS_BYTES_MAX = 4 * 2**20  # of all Python files together
PROOF = "proof.json"  # what `prove --json` printed about the source
MANIFEST = "manifest.json"  # of the shards, as it was next to them
ASIDE_SUFFIXES = (".md", ".json", ".log", ".model", ".vocab", ".env")  # a script may name them uncounted,
TOKENIZER_SUFFIXES = (".model", ".vocab")
ASIDE_BYTES_MAX = 2**20  # a tokenizer up to this size: none of 8,192 pieces has half of it
NOTE_BYTES_MAX = 2**16  # all others up to this size: the longest public note has 58,269 bytes
PROSE_SUFFIXES = (".md", ".txt", ".html")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf")
CASEOPS = "caseops.py"  # the transform of the text, where the tokenizer has case marks
JSON_WORDS = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false",
              type(None): "null"}
FORMAT = "records/4"  # value of submission.json's `format` in folders that `pack` writes and `check` derives


@dataclass(frozen=True)
class SeedRun:
    """The log of one seed; `named_seed` is the seed in its file name."""

    log: RunLog
    named_seed: int | None

    @property
    def seed(self) -> int | None:
        return self.log.seed if self.log.seed is not None else self.named_seed


class Folder:
    """Lazy view of a records folder; reading never raises on malformed contents, only on a missing folder."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise RecordError(
                f"{path_of(path)} is not a folder: name one of records (track_*/DATE_Name), or runs/<RUN_ID>"
                " for diff"
            )
        self.path = path

    @property
    def name(self) -> str:
        return name_of(self.path.resolve())

    @property
    def track(self) -> str:
        return name_of(self.path.resolve().parent)

    def file(self, name: str) -> Path:
        return self.path / name

    def files(self) -> list[Path]:
        """The regular files, sorted; no link that leaves the folder, and at most FILES_MAX."""
        return self._listing[0]

    @property
    def leaving_links(self) -> list[Path]:
        """Links to places outside the folder, and links that lead nowhere; none is followed."""
        return self._listing[1]

    @property
    def cut_off(self) -> bool:
        """Whether the folder holds more files, or deeper folders, than are looked at."""
        return self._listing[2]

    @cached_property
    def _listing(self) -> tuple[list[Path], list[Path], bool]:
        files: list[Path] = []
        leaving: list[Path] = []
        root = self.path.resolve()
        pending = [self.path]
        seen = 0
        while pending:
            place = pending.pop()
            if len(place.relative_to(self.path).parts) > DEPTH_MAX:
                return sorted(files), sorted(leaving), True
            with os.scandir(place) as entries:
                found = list(itertools.islice(entries, FILES_MAX))
            seen += len(found)
            if seen >= FILES_MAX:
                return sorted(files), sorted(leaving), True
            for entry in found:
                path = place / entry.name
                if entry.is_symlink() and not _stays_in(path, root):
                    leaving.append(path)
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                elif path.is_file():
                    files.append(path)
        return sorted(files), sorted(leaving), False

    def has(self, name: str) -> bool:
        """Whether a regular file of that name is at the top of the folder, or at that path in it."""
        return self.file(name) in self.files()

    def text(self, name: str) -> str:
        """The beginning of a text file of the folder; empty where there is none."""
        if not self.has(name):
            return ""
        with self.file(name).open("rb") as file:
            return as_text(file.read(TEXT_BYTES_MAX))

    def _beside(self, pattern: str) -> list[Path]:
        """Files at the top of the folder whose names fit `pattern`, sorted."""
        return [path for path in self.files() if path.parent == self.path and path.match(pattern)]

    @cached_property
    def submission_path(self) -> Path | None:
        found = self._beside("submission*.json")
        exact = self.file(SUBMISSION)
        return exact if exact in found else next(iter(found), None)

    @cached_property
    def _submission(self) -> tuple[dict[str, Any], str | None]:
        """The object in submission.json, and why it cannot be read."""
        if self.submission_path is None:
            return {}, f"no {SUBMISSION}"
        try:
            value = read_json(self.submission_path)
        except ValueError as error:
            return {}, str(error)
        if isinstance(value, dict):
            return value, None
        return {}, f"holds {JSON_WORDS[type(value)]}, expected an object"

    @property
    def submission_error(self) -> str | None:
        """Why submission.json cannot be read, or None."""
        return self._submission[1]

    @property
    def submission(self) -> dict[str, Any]:
        """The object in submission.json; empty where it cannot be read."""
        return self._submission[0]

    @property
    def ours(self) -> bool:
        """Whether `pack` wrote this folder; its summaries show it even if the mark was removed."""
        return self.submission.get("format") == FORMAT or bool(self.summaries)

    @cached_property
    def script_path(self) -> Path | None:
        found = self._beside("train*.py")
        exact = self.file(SCRIPT)
        return exact if exact in found else next(iter(found), None)

    @cached_property
    def script(self) -> Script | None:
        return self.scripts.get(self.script_path) if self.script_path else None

    @cached_property
    def scripts(self) -> dict[Path, Script]:
        """Every Python file of the folder, read once; the training script first, SCRIPTS_BYTES_MAX in all."""
        found = [path for path in self.files() if path.suffix == ".py"]
        found.sort(key=lambda path: path != self.script_path)
        return {path: read_script(path) for path in _within(found, SCRIPTS_BYTES_MAX, SCRIPT_BYTES_MAX)}

    @cached_property
    def readable(self) -> Path | None:
        """The readable source of a wrapped script."""
        return self.file(READABLE_SCRIPT) if self.has(READABLE_SCRIPT) else None

    @property
    def ran_sources(self) -> list[str]:
        """SHA-256 of the sources that the seeds ran, as their summaries say; one in an honest record."""
        found = []
        for summary in self.summaries.values():
            code = summary.get("code")
            sha256 = code.get("sha256") if isinstance(code, dict) else None
            if isinstance(sha256, str) and SHA256.fullmatch(sha256):
                found.append(sha256)
        return list(dict.fromkeys(found))

    @property
    def training_scripts(self) -> list[Script]:
        """Every script next to submission.json that may be what ran."""
        top = {path: script for path, script in self.scripts.items() if path.parent == self.path}
        return [script for path, script in top.items() if path.name.startswith("train")]

    @cached_property
    def closure(self) -> list[Path]:
        """Files that the script imports or names, but for itself, logs, tokenizers and what explains."""
        if self.script is None:
            return []
        aside = {*(log.path for log in self.logs), *self.models, self.file(REQUIREMENTS)}
        counted = [path for path in self.files() if path not in aside and not _is_aside(path)]
        return closure(self.script, self.scripts, counted)

    @cached_property
    def models(self) -> list[Path]:
        """Files with exactly the bytes of a model that a log counts: regarded as output of a run."""
        sizes = {count.bytes for log in self.logs for count in log.byte_counts if count.what == MODEL_BYTES}
        scripts = self.scripts
        return [path for path in self.files() if path not in scripts and path.stat().st_size in sizes]

    @property
    def logs(self) -> list[RunLog]:
        """Every training log in the folder, subfolders included; LOGS_BYTES_MAX in all."""
        return [log for log in self._texts if not log.says_nothing]

    @property
    def no_logs(self) -> list[RunLog]:
        """Files that are named like logs, and hold neither a step nor a score."""
        return [log for log in self._texts if log.says_nothing]

    @cached_property
    def _texts(self) -> list[RunLog]:
        """The files that may be logs, as far as they were read."""
        return [read_log(path) for path in _within(self._log_files(), LOGS_BYTES_MAX, LOG_BYTES_MAX)]

    def _log_files(self) -> list[Path]:
        """Files that may be logs, those next to submission.json first."""
        found = [path for path in self.files() if is_log_name(path.name)]
        return sorted(found, key=lambda path: (len(path.parts), path))

    @property
    def unread(self) -> list[tuple[Path, str]]:
        """Files that were not read, or not to their end, each with the reason."""
        logs = self._log_files()
        scripts = [path for path in self.files() if path.suffix == ".py"]
        found = [(log.path, log.unread) for log in self.logs if log.unread]
        for path in set(logs) - set(_within(logs, LOGS_BYTES_MAX, LOG_BYTES_MAX)):
            found.append((path, f"the folder's logs have more than {LOGS_BYTES_MAX:,} bytes"))
        for path in set(scripts) - set(self.scripts):
            found.append((path, f"the folder's scripts have more than {SCRIPTS_BYTES_MAX:,} bytes"))
        return sorted(found)

    @cached_property
    def seed_runs(self) -> list[SeedRun]:
        """One log per seed: next to submission.json, else in subfolders; of reruns the submitted set."""
        top = [log for log in self.logs if log.path.parent == self.path]
        runs = [_seed_run(log) for log in top or self.logs]
        if not top:
            claimed = self._claimed_runs()
            if claimed:
                return claimed
        named = [run for run in runs if run.named_seed is not None]
        if not named:
            return self._submitted_set(runs)
        known = {run.seed for run in named}
        unnamed = [run for run in runs if run.named_seed is None and run.seed not in known]
        return self._submitted_set(named + (unnamed if top else []))

    def _submitted_set(self, runs: list[SeedRun]) -> list[SeedRun]:
        """Of several logs per seed: those with the submitted results, else the file names with most seeds."""
        if len({run.seed for run in runs}) == len(runs):
            return runs
        claimed = self._claimed_runs()
        if claimed:
            return claimed
        variants: dict[str, list[SeedRun]] = {}
        for run in runs:
            variants.setdefault(_variant(run), []).append(run)
        target = number(self.submission.get("val_bpb")) or 0.0

        def preference(group: list[SeedRun]) -> tuple[int, float]:
            scores = [run.log.headline.bpb for run in group if run.log.headline]
            return len(group), -abs(sum(scores) / len(scores) - target) if scores else -1e9

        return max(variants.values(), key=preference)

    def other_sets(self) -> dict[str, list[SeedRun]]:
        """Reruns: sets of two seeds or more that share a file-name variant and are not the submitted set."""
        chosen = {run.log.path for run in self.seed_runs}
        sets: dict[str, list[SeedRun]] = {}
        for log in self.logs:
            run = _seed_run(log)
            if run.named_seed is None or log.headline is None or log.path in chosen:
                continue
            place = log.path.parent.relative_to(self.path)
            name = (place / _variant(run)).as_posix()
            sets.setdefault(name, []).append(run)
        return {name: runs for name, runs in sets.items() if len({run.seed for run in runs}) > 1}

    def _claimed_runs(self) -> list[SeedRun]:
        """The logs that print each submitted seed's `val_bpb`; empty unless every seed has one."""
        claimed: list[SeedRun] = []
        taken: set[Path] = set()
        for seed, result in self.submitted_seeds().items():
            value = result.get("val_bpb")
            if not isinstance(value, float):
                return []
            places = decimals(str(value))
            found = [log for log in self.logs if any(f"{f.bpb:.{places}f}" == str(value) for f in log.finals)]
            # Two seeds may print one score: each gets a log of its own, that of the seed before others.
            found = [log for log in found if log.path not in taken]
            found.sort(key=lambda log: _seed_run(log).seed != seed)
            if not found:
                return []
            taken.add(found[0].path)
            claimed.append(SeedRun(found[0], seed))
        return claimed

    @cached_property
    def headline_label(self) -> str | None:
        """The strongest scoring label that every seed's log has."""
        scored = 0
        ranks: dict[str, int] = {}  # of every label
        having: Counter[str] = Counter()  # how many logs have a label
        leading: Counter[str] = Counter()  # of how many logs it is the headline
        for run in self.seed_runs:
            if run.log.headline is None:
                continue
            scored += 1
            labels = {final.label: final.rank for final in run.log.finals if final.rank > 0}
            ranks.update(labels)
            having.update(labels.keys())
            leading[run.log.headline.label] += 1
        common = [label for label, count in having.items() if count == scored]

        def strength(label: str) -> tuple[int, int, bool]:
            return ranks[label], leading[label], label.endswith(EXACT)

        return max(common, key=strength, default=None)

    def score(self, log: RunLog) -> Final | None:
        """The log's line under the folder's headline label, the last one."""
        found = [final for final in log.finals if final.label == self.headline_label]
        return found[-1] if found else log.headline

    @cached_property
    def summaries(self) -> dict[int, dict[str, Any]]:
        """Our per-seed summaries by the seed in their file name; unreadable ones are left out."""
        found = {}
        for path in self._beside(SUMMARY_NAME.format(seed="*")):
            match = SEED_IN_NAME.search(path.name)
            value = read_object(path)
            if match and value is not None:
                found[int(match[1])] = value
        return found

    def submitted_seeds(self) -> dict[int, dict[str, Any]]:
        """Per-seed results in submission.json (`seed_results`, or `seeds` as an object), by seed."""
        for key in ("seed_results", "seeds"):
            value = self.submission.get(key)
            if not isinstance(value, dict):
                continue
            results = {}
            for seed, result in value.items():
                if re.fullmatch(COUNT, str(seed)) and isinstance(result, dict):
                    results[int(seed)] = result
            return results
        return {}


def is_log_name(name: str) -> bool:
    """Whether a file may be a log by its name."""
    return name.lower().endswith((".log", ".txt")) and name != REQUIREMENTS


def number(value: Any) -> float | None:
    """A declared number; None for anything else. An integer that no float holds is infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_aside(path: Path) -> bool:
    """Whether a file is a tokenizer, a note or a manifest, by its name and size."""
    bytes_max = ASIDE_BYTES_MAX if path.suffix in TOKENIZER_SUFFIXES else NOTE_BYTES_MAX
    return path.suffix in ASIDE_SUFFIXES and path.stat().st_size <= bytes_max


def _within(paths: list[Path], bytes_max: int, read_max: int) -> list[Path]:
    """The first of `paths` with at most `bytes_max` bytes together, of each at most `read_max` counted."""
    kept = []
    for path in paths:
        size = min(path.stat().st_size, read_max)
        if size <= bytes_max:
            kept.append(path)
            bytes_max -= size
    return kept


def is_own(path: Path) -> bool:
    """Whether there is a regular file, and it is in its folder: no link that leads out of it."""
    return path.is_file() and _stays_in(path, path.parent.resolve())


def _stays_in(link: Path, root: Path) -> bool:
    """Whether a link leads to something inside `root`."""
    try:
        return link.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):  # it leads nowhere, or in a circle
        return False


def read_json(path: Path) -> Any:
    """The value in a JSON file. ValueError where there is none, it is too large, deep, or has a key twice."""
    try:
        with path.open("rb") as file:
            data = file.read(TEXT_BYTES_MAX + 1)
        if len(data) > TEXT_BYTES_MAX:
            raise ValueError(f"more than {TEXT_BYTES_MAX:,} bytes")
        if not data.strip():
            raise ValueError("it is empty")
        return json.loads(plain_text(data), object_pairs_hook=_each_key_once)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file; of a key that is there twice, readers would not agree which value holds."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"`{twice[0]}` is there twice")
    return value


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object from `path`, or None where the file is missing or no object."""
    try:
        value = read_json(path)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def required_object(path: Path) -> dict[str, Any]:
    """A JSON object from `path`. RecordError that says why there is none."""
    try:
        value = read_json(path)
    except ValueError as error:
        raise RecordError(f"{path_of(path)} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise RecordError(f"{path_of(path)} holds {JSON_WORDS[type(value)]}, expected a JSON object")
    return value


def _variant(run: SeedRun) -> str:
    """The file name without its seed, which distinguishes reruns."""
    stem = run.log.path.stem
    return stem if run.named_seed is None else stem.replace(str(run.named_seed), "*", 1)


def _seed_run(log: RunLog) -> SeedRun:
    stem = log.path.stem
    match = SEED_IN_NAME.search(stem) or NUMBER_IN_NAME.search(stem)
    return SeedRun(log, int(match[1]) if match else None)
