"""A4, C7: every number that submission.json claims, against what the logs say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.runs.folder import Folder, SeedRun, number
from tools.runs.logs import ByteCount, Final, RunLog, decimals
from tools.runs.stats import deviation, mean
from tools.submit.check.budget import shipped_code_bytes
from tools.submit.check.findings import Finding, fail, info, warn

SCORE_FIELDS = {"val_bpb": "bpb", "val_loss": "loss"}
DECLARED_TOLERANCE = 1e-4  # the last digit that every log prints; fewer declared digits excuse nothing more
TOTAL_FIELDS = ("bytes_total", "artifact_bytes", "artifact_bytes_max", "artifact_size_bytes")
CODE_FIELDS = ("bytes_code", "code_bytes")


def last_digit(value: float) -> float:
    """One unit of the last decimal of `value`; 1e-8 at the finest, the logs' own precision."""
    return float(10.0 ** -min(decimals(repr(value)), 8))


def matches(declared: float, measured: float) -> bool:
    """Equal to the digits declared, and never further apart than DECLARED_TOLERANCE; truncation counts as
    rounding."""
    return abs(declared - measured) < min(last_digit(declared), DECLARED_TOLERANCE) * 1.0001


def check_scores(folder: Folder) -> Iterator[Finding]:
    """A4, C7: `val_bpb` and `val_loss` are the mean of the final metric over the seeds."""
    runs = [run for run in folder.seed_runs if run.log.headline]
    for key, attribute in SCORE_FIELDS.items():
        declared = number(folder.submission.get(key))
        if declared is not None and runs:
            yield from _check_score(folder, runs, key, attribute, declared)


def _check_score(
    folder: Folder, runs: list[SeedRun], key: str, attribute: str, declared: float
) -> Iterator[Finding]:
    name = folder.submission_path.name if folder.submission_path else ""
    scores = [score for run in runs if (score := folder.score(run.log))]
    measured = mean([getattr(score, attribute) for score in scores])
    if matches(declared, measured):
        return
    if key == "val_loss" and matches(declared, mean([score.bpb for score in scores])):
        yield fail(
            "A3",
            f"`val_loss` {declared} is the logs' val_bpb: bits stored as loss",
            name,
            "nats per token go here",
        )
        return
    where = ", ".join(run.log.where(score.line) for run, score in zip(runs, scores, strict=True))
    remedy = "use the mean over all seeds of the final metric"
    single = _printed(folder, attribute, declared)
    other = _mean_of_others(folder, attribute, declared)
    if other:
        report = warn if other.score else fail
        why = "" if other.score else ": no score of the artifact"
        yield report(
            "C7",
            f"`{key}` {declared} is the mean of {other.name}, not of `{folder.headline_label}`{why}",
            where,
            remedy,
        )
    elif single is None:
        yield fail("A4", f"`{key}` {declared}, but the logs give {measured:.8g}", f"{name}, {where}", remedy)
    elif single[1].rank == 0:
        yield fail(
            "C7", f"`{key}` {declared} is `{single[1].label}`, no score of the artifact", where, remedy
        )
    elif len(runs) > 1:
        log, final = single
        yield warn(
            "A4",
            f"`{key}` {declared} is one log's `{final.label}`; the mean over {len(runs)} seeds is"
            f" {measured:.8g}",
            log.where(final.line),
            remedy,
        )


def _printed(folder: Folder, attribute: str, declared: float) -> tuple[RunLog, Final] | None:
    """The strongest final line of any log in the folder that prints `declared`."""
    found = [
        (log, final)
        for log in folder.logs
        for final in log.finals
        if matches(declared, getattr(final, attribute))
    ]
    return max(found, key=lambda pair: pair[1].rank, default=None)


class OtherScore(NamedTuple):
    """Lines of several logs under one label; `score`: whether they score the artifact."""

    name: str
    score: bool


def _mean_of_others(folder: Folder, attribute: str, declared: float) -> OtherScore | None:
    """The label, and the subfolder, whose mean over several logs is `declared`; one that is a score first."""
    groups: dict[tuple[str, str, bool], list[float]] = {}
    for log in folder.logs:
        place = log.path.parent.relative_to(folder.path).as_posix()
        for final in log.finals:
            key = (place, final.label, final.rank > 0)
            groups.setdefault(key, []).append(getattr(final, attribute))
    found = []
    for (place, label, score), values in groups.items():
        if len(values) > 1 and matches(declared, mean(values)):
            found.append(OtherScore(f"`{label}`" if place == "." else f"`{label}` in {place}/", score))
    return max(found, key=lambda other: other.score, default=None)


def check_spread(folder: Folder) -> Iterator[Finding]:
    """A4: the declared standard deviation is that of the seeds."""
    declared = number(folder.submission.get("val_bpb_std"))
    scores = [score.bpb for run in folder.seed_runs if (score := folder.score(run.log))]
    spread = deviation(scores)
    if declared is None or spread is None:
        return
    population = spread * ((len(scores) - 1) / len(scores)) ** 0.5
    if not (matches(declared, spread) or matches(declared, population)):
        yield warn(
            "A4",
            f"`val_bpb_std` {declared}, but {len(scores)} logs give {spread:.6g} (n - 1)",
            folder.submission_path.name if folder.submission_path else "",
            "recompute it from the logs listed",
        )


def check_seed_results(folder: Folder) -> Iterator[Finding]:
    """A4: each seed's declared numbers against its log."""
    logs = {run.seed: run for run in folder.seed_runs}
    name = folder.submission_path.name if folder.submission_path else ""
    for seed, declared in folder.submitted_seeds().items():
        run = logs.get(seed)
        if run is None:
            yield warn("A4", f"seed {seed} is declared, no log is of that seed", name, "add its log")
            continue
        for key, attribute in SCORE_FIELDS.items():
            value = number(declared.get(key))
            printed = [getattr(f, attribute) for f in run.log.finals if f.rank > 0]
            if value is None or not printed or any(matches(value, p) for p in printed):
                continue
            elsewhere = _printed(folder, attribute, value)
            if elsewhere:
                log, final = elsewhere
                yield warn(
                    "C10",
                    f"seed {seed}: `{key}` {value} is from another run's log than {run.log.path.name}",
                    log.where(final.line),
                    "train and score in one run, or say why not",
                )
            else:
                score = folder.score(run.log)
                shown = getattr(score, attribute) if score else printed[-1]
                yield fail(
                    "A4",
                    f"seed {seed}: `{key}` {value}, but its log says {shown}",
                    f"{name}, {run.log.where(score.line if score else 1)}",
                    "copy it from the log",
                )
        yield from _check_seed_counts(run, declared, name, folder.script.bytes if folder.script else 0)


def _check_seed_counts(
    run: SeedRun, declared: dict[str, Any], name: str, code_bytes: int
) -> Iterator[Finding]:
    log = run.log
    sizes = {count.bytes for count in (log.model_bytes, log.total_bytes) if count}
    if log.model_bytes:
        sizes.add(log.model_bytes.bytes + code_bytes)  # as shipped: the log may count another form
    claimed = number(declared.get("artifact_bytes"))
    if claimed is not None and sizes and claimed not in sizes:
        place = log.total_bytes or log.model_bytes
        yield fail(
            "A4",
            f"seed {run.seed}: `artifact_bytes` {claimed:,.0f}, but its log says"
            f" {place.bytes if place else 0:,}",
            f"{name}, {log.where(place.line if place else 1)}",
            "copy it from the log",
        )
    steps = number(declared.get("steps"))
    if steps is not None and log.steps is not None and steps not in (log.steps, log.steps_done):
        line = log.stop.line if log.stop else log.lines
        yield fail(
            "A4",
            f"seed {run.seed}: `steps` {steps:.0f}, but its log says {log.steps}",
            f"{name}, {log.where(line)}",
            "copy it from the log",
        )


def check_bytes(folder: Folder) -> Iterator[Finding]:
    """A4: declared totals are ones that a log prints; the largest, where seeds differ."""
    totals = {run.log.total_bytes.bytes: run for run in folder.seed_runs if run.log.total_bytes}
    for key in TOTAL_FIELDS:
        declared = number(folder.submission.get(key))
        if declared is not None and totals:
            yield from _check_total(folder, key, declared, totals)


def _check_total(folder: Folder, key: str, declared: float, totals: dict[int, SeedRun]) -> Iterator[Finding]:
    largest, run = max(totals.items())
    line = run.log.total_bytes.line if run.log.total_bytes else 1
    code = folder.script.bytes if folder.script else 0
    derived = {r.log.model_bytes.bytes + code for r in folder.seed_runs if r.log.model_bytes}
    derived.add(round(mean([float(t.log.total_bytes.bytes) for t in folder.seed_runs if t.log.total_bytes])))
    if declared not in {*totals, *derived} and declared < largest:
        yield fail(
            "A4",
            f"`{key}` {declared:,.0f} is in no log; the largest is {largest:,}",
            run.log.where(line),
            "use the maximum over the seeds",
        )
    elif declared < largest:
        yield info(
            "A4", f"`{key}` {declared:,.0f} is not the largest seed's {largest:,}", run.log.where(line)
        )


def check_code_bytes(folder: Folder) -> Iterator[Finding]:
    """A4: the declared bytes of code are those of the shipped script, or those that a log counts."""
    if folder.script is None or folder.script.bytes == 0 or folder.submission_path is None:
        return
    counted = {
        count.bytes for run in folder.seed_runs for count in run.log.byte_counts if _counts_code(count)
    }
    shipped = folder.script.bytes
    known = counted | {
        shipped,
        shipped_code_bytes(folder),
        len(folder.script.text.encode("utf-8", "replace")),
    }
    for key in CODE_FIELDS:
        declared = number(folder.submission.get(key))
        if declared is None or declared in known:
            continue
        logged = f", the logs count {', '.join(f'{size:,}' for size in sorted(counted))}" if counted else ""
        text = f"`{key}` {declared:,.0f}, but {folder.script.path.name} has {shipped:,} bytes{logged}"
        report = fail if declared < min(known) and not _is_rounded(declared, known) else warn
        yield report("A4", text, folder.submission_path.name, "declare the bytes of the code as shipped")


def _counts_code(count: ByteCount) -> bool:
    return count.what == "Code size"


def _is_rounded(declared: float, known: set[int]) -> bool:
    """Whether a round number, such as 77,000, stands for one of `known`."""
    unit = 1
    while unit < 10_000 and declared % (unit * 10) == 0:
        unit *= 10
    return any(abs(declared - size) <= unit / 2 for size in known)


CHECKS = (check_scores, check_spread, check_seed_results, check_bytes, check_code_bytes)
