"""A1-A4, A10: the folder and its files, and every number that submission.json claims, against the logs."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.runs.folder import (
    ASIDE_BYTES_MAX,
    DEPTH_MAX,
    FILES_MAX,
    PICTURE_SUFFIXES,
    README,
    REQUIREMENTS,
    SCRIPT,
    SUBMISSION,
    Folder,
    SeedRun,
    number,
)
from tools.runs.logs import ByteCount, Final, RunLog, decimals
from tools.runs.reading import name_of
from tools.runs.rules import RECORD_TEXT, TOKENIZER_TOLERANCE, TOKENIZERS, bytes_per_token
from tools.runs.stats import deviation, mean
from tools.submit.findings import Finding, contested, fail, info, warn
from tools.submit.limits import is_record, shipped_code_bytes
from tools.submit.pack import requirements

FOLDER_NAME = re.compile(r"^\d{4}-\d\d-\d\d_[A-Za-z0-9._+-]+$")
TRACK_NAME = re.compile(r"^track_\w+$")
REQUIRED_TEXT = ("author", "github_id", "name", "date")
PACKED_LOGS = (".log.gz", ".log.xz", ".log.bz2", ".log.zst", ".txt.gz", ".log.zip")
COMMENT = re.compile(r"(?:^|\s)#.*$")
HASH = re.compile(r"--(?:hash=|require-hashes)")  # of a package that is named
ELSEWHERE = re.compile(r"^-|://| @ |^[./~]|\.(?:whl|zip|tar\.gz)\b")
LINE_CHARACTERS_MAX = 120  # of a line of requirements.txt that is shown
SCORE_ALIASES = ("mean_val_bpb", "mean_bpb", "bpb", "score")
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?![0-9])")
SCORE_FIELDS = {"val_bpb": "bpb", "val_loss": "loss"}
DECLARED_TOLERANCE = 1e-4  # the last digit that every log prints; fewer declared digits excuse nothing more
TOTAL_FIELDS = ("bytes_total", "artifact_bytes", "artifact_bytes_max", "artifact_size_bytes")
CODE_FIELDS = ("bytes_code", "code_bytes")


def check_name(folder: Folder) -> Iterator[Finding]:
    if not FOLDER_NAME.match(folder.name) or not _is_past_day(folder.name):
        yield warn(
            "A1",
            f"folder `{folder.name}` is not YYYY-MM-DD_Description with a date up to today",
            folder.name,
            "rename it (asked for in #1851)",
        )
    if not TRACK_NAME.match(folder.track):
        yield info(
            "A1", f"parent `{folder.track}` is not a track_* folder", folder.name, "move it under its track"
        )


def check_files(folder: Folder) -> Iterator[Finding]:
    required = {README: folder.file(README), SUBMISSION: folder.submission_path, SCRIPT: folder.script_path}
    for name, path in required.items():
        if path is None or path not in folder.files():
            yield fail(
                "A2", f"missing `{name}`", folder.name, "add it; folders without it were not listed (#561)"
            )
        elif path.stat().st_size == 0:
            yield fail("A2", f"`{name_of(path)}` is empty", folder.name, "ship the file that ran")
        elif path.name != name:
            yield contested(
                "A2",
                f"`{name_of(path)}` is used in place of `{name}` (#561)",
                folder.name,
                f"rename it to `{name}`",
            )
    yield from _check_logs(folder)


def _check_logs(folder: Folder) -> Iterator[Finding]:
    """A2: there is a log that can be read; a file that looks like one and gives nothing is named."""
    remedy = "add one log per seed, as the script wrote it"
    if not folder.logs and not folder.no_logs:
        yield fail("A2", "it has no log: no file ends in .log or .txt", folder.name, remedy)
    for log in folder.no_logs:
        name = log.path.relative_to(folder.path).as_posix()
        if not folder.logs:
            yield fail("A2", log.nothing, name, remedy)
        elif log.path.suffix.lower() == ".log":
            yield info("A2", log.nothing, name)
    for path in folder.files():
        if path.name.lower().endswith(PACKED_LOGS):
            name = path.relative_to(folder.path).as_posix()
            yield warn("A2", f"`{name}` is compressed and was not read", name, "unpack it")


def check_requirements(folder: Folder) -> Iterator[Finding]:
    """A2: requirements.txt names packages, and no place to get them from but what `pack` wrote."""
    packed = {
        requirements(folder.summaries.get(run.seed or 0, {}), run.log.attention) for run in folder.seed_runs
    }
    text = folder.text(REQUIREMENTS)
    if text in packed:
        return
    for line, words in enumerate(text.splitlines(), 1):
        words = COMMENT.sub("", words).strip()
        if not HASH.match(words) and ELSEWHERE.search(words):
            told = f"`{words[:LINE_CHARACTERS_MAX]}`: pip would read options or a place that is not its index"
            yield warn("A2", told, f"{REQUIREMENTS}:{line}", "read it before you install; name packages only")


def check_submission(folder: Folder) -> Iterator[Finding]:
    if folder.submission_path is None:
        return
    name = folder.submission_path.name
    if folder.submission_error:
        yield fail(
            "A3", f"{name} cannot be read: {folder.submission_error}", name, "write valid JSON, one object"
        )
        return
    submission = folder.submission
    # What `pack` refuses to leave out of a record for the challenge is not missing from one by chance.
    needed = RECORD_TEXT if folder.ours and is_record(folder) else ()
    for key in dict.fromkeys((*REQUIRED_TEXT, *needed)):
        if not isinstance(submission.get(key), str) or not submission[key]:
            report = fail if key in needed else warn
            yield report("A3", f"`{key}` is missing or not text", name, f"add `{key}`")
    if isinstance(submission.get("date"), str) and not _is_past_day(submission["date"]):
        text = f"date `{submission['date']}` is not a YYYY-MM-DD date up to today"
        yield warn("A3", text, name, "write an ISO date")
    for key in (*TOTAL_FIELDS, *CODE_FIELDS, "val_loss", "val_bpb_std"):
        if isinstance(submission.get(key), str):
            text = f"`{key}` is the text {submission[key]!r}, so there is no number to compare with the logs"
            yield warn("A3", text, name, "write a number")
    yield from _check_declared_score(folder, name)


def _is_past_day(text: str) -> bool:
    """Whether a text begins with the ISO date of a day that has come."""
    found = DATE.match(text)
    try:
        return found is not None and datetime.date.fromisoformat(found[0]) <= datetime.date.today()
    except ValueError:  # no such day, as 31 February
        return False


def _check_declared_score(folder: Folder, name: str) -> Iterator[Finding]:
    loss = number(folder.submission.get("val_loss"))
    bpb = number(folder.submission.get("val_bpb"))
    if bpb is None:
        alias = next((key for key in SCORE_ALIASES if key in folder.submission), None)
        found = f", found `{alias}`" if alias else ""
        yield fail("A3", f"`val_bpb` is missing or not a number{found}", name, "add the mean over the seeds")
        return
    if bpb <= 0 or not math.isfinite(bpb):
        yield fail("A3", f"`val_bpb` {bpb} cannot be bits per byte", name, "write the mean over the seeds")
        return
    if loss is None:
        return
    if loss == bpb:
        yield fail(
            "A3", f"`val_loss` equals `val_bpb` ({bpb}): bits stored as loss", name, "put nats per token here"
        )
        return
    implied = bytes_per_token(loss, bpb)
    if (
        not any(abs(implied / t.bytes_per_token - 1) < TOKENIZER_TOLERANCE for t in TOKENIZERS)
        and not folder.ours
    ):
        yield warn(
            "A3",
            f"`val_loss` {loss} and `val_bpb` {bpb} imply {implied:.3f} bytes/token, no known tokenizer's",
            name,
            "check that both are from the same run and that `val_loss` is nats per token",
        )


def check_links(folder: Folder) -> Iterator[Finding]:
    """A2: everything is in the folder, and was read."""
    for path in folder.leaving_links:
        where = path.relative_to(folder.path).as_posix()
        yield fail(
            "A2",
            f"`{where}` is a link that leaves the folder, or leads nowhere",
            where,
            "add the file itself",
        )
    for path, reason in folder.unread:
        where = path.relative_to(folder.path).as_posix()
        yield fail(
            "A2", f"`{where}` was not read to its end: {reason}", where, "leave out all but logs and scripts"
        )
    if folder.cut_off:
        yield fail(
            "A2",
            f"more than {FILES_MAX:,} files, or folders more than {DEPTH_MAX} deep: not everything was read",
            folder.name,
            "leave out what does not belong to the record",
        )


def check_closure(folder: Folder) -> Iterator[Finding]:
    """A10: files next to the counted script that it names: they count (A9)."""
    script = folder.script
    if script is None:
        return
    for path in folder.closure:
        name = path.relative_to(folder.path).as_posix()
        yield contested(
            "A10",
            f"{name_of(script.path)} also reads {name} ({path.stat().st_size:,} bytes)",
            name_of(script.path),
            "all counted code lives in train_gpt.py; put it there, because its bytes count",
        )


def check_large_files(folder: Folder) -> Iterator[Finding]:
    """A10: large files that a run may or may not read, which the script's text does not show."""
    known = {*folder.closure, *folder.scripts, *(log.path for log in folder.logs)}
    for path in folder.files():
        size = path.stat().st_size
        name = path.relative_to(folder.path).as_posix()
        if path in folder.models:
            text = f"`{name}` has the size of a model in a log: taken for that model, and not counted twice"
        elif size > ASIDE_BYTES_MAX and path not in known and path.suffix.lower() not in PICTURE_SUFFIXES:
            text = (
                f"`{name}` ({size:,} bytes) is not mentioned anywhere: cannot decide whether a run reads it"
            )
        else:
            continue
        yield warn("A10", text, name, "leave out what no run reads")


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
        why = "" if other.score else ", which is not a score of the artifact"
        yield report(
            "C7",
            f"`{key}` {declared} is the mean of {other.name}, not of `{folder.headline_label}`{why}",
            where,
            remedy,
        )
    elif single is None:
        yield fail("A4", f"`{key}` {declared}, but the logs give {measured:.8g}", f"{name}, {where}", remedy)
    elif single[1].rank == 0:
        text = f"`{key}` {declared} is `{single[1].label}`, which is not a score of the artifact"
        yield fail("C7", text, where, remedy)
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
            yield warn("A4", f"seed {seed} is declared, but there is no log for it", name, "add its log")
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
                    f"seed {seed}: `{key}` {value} is from another run's log than {name_of(run.log.path)}",
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
            f"`{key}` {declared:,.0f} is not in any log; the largest there is {largest:,}",
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
        text = f"`{key}` {declared:,.0f}, but {name_of(folder.script.path)} has {shipped:,} bytes{logged}"
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


RULES = (
    check_name,
    check_files,
    check_links,
    check_requirements,
    check_submission,
    check_scores,
    check_spread,
    check_seed_results,
    check_bytes,
    check_code_bytes,
    check_closure,
    check_large_files,
)
