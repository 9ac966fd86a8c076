"""A5, A6, C10: distinct runs of one program under one configuration, each complete."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.runs.folder import Folder, SeedRun
from tools.runs.logs import LOG_BYTES_MAX, RunLog
from tools.runs.source import Script, same_program
from tools.submit.check.findings import Finding, fail, info, warn

PER_SEED_SETTINGS = {"seed", "run_id", "pid", "rank", "local_rank", "logfile", "artifact_dir"}
COPIED_POINTS_MIN = 8
COPIED_SHARE = (
    0.6  # of the steps two logs have in common; two runs of eight GPUs reach a third by their clocks
)
MEASURED = re.compile(r"(?:^|_)(?:norm|loss|ms|mean|std|rms|elapsed)$")  # words for what a run measures
FRACTION = re.compile(r"-?[0-9]+(?:\.[0-9]{2,}(?:e-?[0-9]+)?|ms)")  # no setting has such a value
PATH_SETTINGS = ("path", "dir", "file", "logs")


def check_distinct(folder: Folder) -> Iterator[Finding]:
    """A5: no log twice under two seeds; the seed in a file's name is the seed in the log."""
    digests: dict[str, SeedRun] = {}
    for run in folder.seed_runs:
        path = run.log.path
        if run.named_seed is not None and run.log.seed is not None and run.log.seed != run.named_seed:
            yield fail(
                "A5",
                f"{path.name} stands for seed {run.named_seed}, but says seed {run.log.seed}",
                run.log.where(run.log.settings["seed"].line),
                f"ship the log of seed {run.named_seed}, or make the script read SEED",
            )
        digest = _digest(path)
        if digest in digests:
            other = digests[digest].log.path.name
            yield fail("A5", f"{path.name} is identical to {other}", path.name, "ship one log per run")
        digests[digest] = run
    yield from _check_declared_seeds(folder)


def _digest(path: Path) -> str:
    """SHA-256 of what of a log is read, and its size."""
    with path.open("rb") as file:
        return f"{hashlib.sha256(file.read(LOG_BYTES_MAX)).hexdigest()} {path.stat().st_size}"


def _check_declared_seeds(folder: Folder) -> Iterator[Finding]:
    declared = folder.submission.get("seeds")
    if not isinstance(declared, list):
        return
    seeds = {run.seed for run in folder.seed_runs} | {log.seed for log in folder.logs}
    if seeds <= {None}:  # no log says its seed
        return
    for seed in declared:
        if not isinstance(seed, int) or (seed not in seeds and seed not in folder.submitted_seeds()):
            yield warn("A5", f"seed {seed} is declared, no log is of that seed", folder.name, "add its log")


def check_same_code(folder: Folder) -> Iterator[Finding]:
    """A6: every seed ran the same bytes, and those are the bytes shipped."""
    sizes = {}  # of the code as a log prints it: a run that does
    for run in folder.seed_runs:
        if run.log.code_bytes:
            sizes[run.log.code_bytes.bytes] = run
    if len(sizes) > 1:
        text = ", ".join(f"{size:,} bytes in {run.log.path.name}" for size, run in sorted(sizes.items()))
        yield fail(
            "A6", f"the seeds ran different code: {text}", folder.name, "rerun all seeds with one script"
        )
    scripts = folder.training_scripts
    embedded = [run for run in folder.seed_runs if run.log.source is not None]
    for run in embedded:
        yield from _check_embedded(run, scripts)
    if embedded or len(sizes) != 1 or folder.script is None:
        return
    shipped = set()  # as it is, unwrapped, and with the ends of lines of another system
    for script in scripts:
        shipped |= {script.bytes, len(script.text.encode()), len(script.raw.replace(b"\r\n", b"\n"))}
    ((size, run),) = sizes.items()
    count = run.log.code_bytes
    if size not in shipped and count:
        yield fail(
            "A6",
            f"the logs' code has {size:,} bytes, the shipped {folder.script.path.name}"
            f" {folder.script.bytes:,}",
            run.log.where(count.line),
            "ship the file that ran",
        )


def _check_embedded(run: SeedRun, scripts: list[Script]) -> Iterator[Finding]:
    """Compare the source at the head of a log with the shipped scripts; layout and comments do not count."""
    ran = run.log.source or ""
    if not scripts or any(_same_lines(ran, script.text) for script in scripts):
        return
    nearest = max(scripts, key=lambda script: len(set(ran.splitlines()) & set(script.text.splitlines())))
    lines, shipped = _stripped(ran), _stripped(nearest.text)
    pairs = enumerate(itertools.zip_longest(lines, shipped), 1)
    first = next((number for number, (old, new) in pairs if old != new), 1)
    where = nearest.where(first)
    if any(same_program(ran, script.text) for script in scripts):
        yield info("A6", f"{run.log.path.name} holds a source that differs in layout or comments only", where)
        return
    only_ran, only_shipped = Counter(lines), Counter(shipped)
    changed = (only_ran - only_shipped).total() + (only_shipped - only_ran).total()
    yield fail(
        "A6",
        f"{run.log.path.name} holds a source that differs from {nearest.path.name} in {changed} lines",
        where,
        "ship the file that ran",
    )


def _same_lines(first: str, second: str) -> bool:
    return _stripped(first) == _stripped(second)


def _stripped(text: str) -> list[str]:
    """The lines of a text without spaces at their ends."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def check_same_config(folder: Folder) -> Iterator[Finding]:
    """A6: the settings that the logs print are equal but for the seed and paths."""
    runs = folder.seed_runs
    if len(runs) < 2:
        return
    reference = runs[0]
    for run in runs[1:]:
        for key, located in run.log.settings.items():
            first = reference.log.settings.get(key)
            if first is None or first.value == located.value or _may_differ(key, first.value, located.value):
                continue
            if MEASURED.search(key) and FRACTION.fullmatch(first.value) and FRACTION.fullmatch(located.value):
                continue
            yield fail(
                "A6",
                f"`{key}` is {first.value} in {reference.log.path.name},"
                f" {located.value} in {run.log.path.name}",
                run.log.where(located.line),
                "a record is several seeds of one configuration (#2124)",
            )


def _may_differ(key: str, first: str, second: str) -> bool:
    """Names of places and per-process values; not options."""
    return key in PER_SEED_SETTINGS or key.endswith(PATH_SETTINGS) or "/" in first + second


def check_complete(folder: Folder) -> Iterator[Finding]:
    """C10: every seed's log reaches a final metric."""
    for run in folder.seed_runs:
        if run.log.headline is None:
            yield fail(
                "C10",
                f"{run.log.path.name} ends before a final metric",
                run.log.where(run.log.lines),
                "ship the complete log, or leave the run out",
            )


def check_curves(folder: Folder) -> Iterator[Finding]:
    """A5: training losses and clock of one seed are not those of another, also not moved by a constant."""
    for first, second in itertools.combinations(folder.seed_runs, 2):
        for name, of_first, of_second in (
            ("training losses", _losses(first.log), _losses(second.log)),
            ("clock", _clock(first.log), _clock(second.log)),
        ):
            same, common = _copied(of_first, of_second)
            if same >= COPIED_POINTS_MIN and same >= COPIED_SHARE * common:
                yield fail(
                    "A5",
                    f"the {name} of {second.log.path.name} and {first.log.path.name} agree at {same} of"
                    f" {common} steps but for a constant: one run, not two",
                    second.log.path.name,
                    "ship one log per run",
                )


def _losses(log: RunLog) -> dict[int, float]:
    return {point.step: point.loss for point in log.train}


def _clock(log: RunLog) -> dict[int, float]:
    """Milliseconds of training by step, where the log prints more than whole seconds."""
    times = {point.step: point.time_ms for point in log.train if point.time_ms is not None}
    return {step: time for step, time in times.items() if time % 1000}


def _copied(first: dict[int, float], second: dict[int, float]) -> tuple[int, int]:
    """How many common steps have the commonest difference, to four decimals, and how many are common."""
    common = [step for step in first if step in second]
    differences = Counter(round(first[step] - second[step], 4) for step in common)
    return max(differences.values(), default=0), len(common)


CHECKS = (check_distinct, check_curves, check_same_code, check_same_config, check_complete)
