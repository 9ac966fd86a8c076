"""A9, C2-C5: artifact bytes, the training and evaluation clocks, hardware, why training stopped."""

from __future__ import annotations

from collections.abc import Iterator

from tools.check.findings import Finding, contested, fail, info
from tools.runs.folder import Folder, SeedRun
from tools.runs.logs import EXACT
from tools.runs.rules import (
    ARTIFACT_BYTES_MAX,
    ARTIFACT_SLACK_BYTES,
    EVAL_SECONDS_MAX,
    RECORD_GPU,
    RECORD_TRACK,
    RECORD_WORLD_SIZE,
    TRAIN_OVERSHOOT_SECONDS,
    TRAIN_SECONDS_MAX,
)


def is_record(folder: Folder) -> bool:
    """Whether the ten-minute rules bind this folder."""
    return folder.track == RECORD_TRACK or "10min" in str(folder.submission.get("track", ""))


def shipped_code_bytes(folder: Folder) -> int:
    """Bytes of the script as shipped and of every file it runs."""
    if folder.script is None:
        return 0
    return folder.script.bytes + sum(path.stat().st_size for path in folder.closure)


def check_artifact(folder: Folder) -> Iterator[Finding]:
    """A9: model plus code, counted as shipped and as the log counts it."""
    counted = [run for run in folder.seed_runs if run.log.model_bytes]
    if not counted:
        if folder.seed_runs:
            yield info("A9", "no log states the compressed model's bytes", folder.name, "print them")
        return
    run = max(counted, key=lambda r: r.log.model_bytes.bytes if r.log.model_bytes else 0)
    model = run.log.model_bytes
    total = max((_logged_total(r) for r in counted), default=0)
    assert model is not None
    code = shipped_code_bytes(folder)
    shipped = model.bytes + code
    where = run.log.where(model.line)
    if min(total or shipped, shipped) > ARTIFACT_BYTES_MAX:
        over = min(total or shipped, shipped) - ARTIFACT_BYTES_MAX
        yield fail(
            "A9",
            f"total {min(total or shipped, shipped):,} > {ARTIFACT_BYTES_MAX:,} by {over:,}",
            where,
            "shrink it",
        )
    elif shipped > ARTIFACT_BYTES_MAX:
        yield contested(
            "A9",
            f"as shipped {shipped:,} > {ARTIFACT_BYTES_MAX:,} (model {model.bytes:,} + code {code:,});"
            f" the log counts {total:,} with code in a form that is not in the folder (#1835)",
            where,
            "ship the script in the form that is counted",
        )
    elif total > ARTIFACT_BYTES_MAX:
        yield contested(
            "A9",
            f"the log's total is {total:,}, as shipped {shipped:,} (#1835)",
            where,
            "log what is shipped",
        )
    elif ARTIFACT_BYTES_MAX - shipped < ARTIFACT_SLACK_BYTES:
        yield info(
            "A9", f"{ARTIFACT_BYTES_MAX - shipped:,} bytes below the cap; reruns move by some KB", where
        )


def _logged_total(run: SeedRun) -> int:
    return run.log.total_bytes.bytes if run.log.total_bytes else 0


def check_train_clock(folder: Folder) -> Iterator[Finding]:
    """C2: the training loop, and the loop plus Hessian collection, inside ten minutes."""
    if not is_record(folder):
        return
    for run in folder.seed_runs:
        seconds = run.log.train_seconds
        if seconds is None:
            continue
        where = run.log.where(run.log.stop.line if run.log.stop else run.log.lines)
        late = seconds - TRAIN_SECONDS_MAX
        if late > TRAIN_OVERSHOOT_SECONDS:
            yield fail(
                "C2", f"training took {seconds:.3f} s > {TRAIN_SECONDS_MAX:.0f} s", where, "stop earlier"
            )
        elif late > 0:
            yield contested(
                "C2",
                f"training ended {late * 1e3:.0f} ms late, as rows merged in March 2026 did",
                where,
                "leave a margin below the cap",
            )
        if run.log.hessian_seconds and late <= TRAIN_OVERSHOOT_SECONDS:
            yield from _check_hessians(run, seconds, float(run.log.hessian_seconds.value))


def _check_hessians(run: SeedRun, seconds: float, hessians: float) -> Iterator[Finding]:
    total = seconds + hessians
    if total > TRAIN_SECONDS_MAX + TRAIN_OVERSHOOT_SECONDS and run.log.hessian_seconds:
        yield contested(
            "C2",
            f"loop {seconds:.2f} s + Hessians {hessians:.1f} s = {total:.1f} s > {TRAIN_SECONDS_MAX:.0f} s"
            " (#677, #1868)",
            run.log.where(run.log.hessian_seconds.line),
            "reserve the time of the Hessians inside the training budget",
        )


def check_eval_clock(folder: Folder) -> Iterator[Finding]:
    """C3: the scored evaluation, and all evaluations together, inside ten minutes."""
    if not is_record(folder):
        return
    for run in folder.seed_runs:
        score = folder.score(run.log)
        timed = [final for final in run.log.finals if final.eval_seconds and not final.label.endswith(EXACT)]
        if not timed:
            continue
        total = sum(final.eval_seconds or 0.0 for final in timed)
        scored = (score.eval_seconds if score else None) or max(final.eval_seconds or 0.0 for final in timed)
        where = run.log.where(timed[-1].line)
        parts = " + ".join(f"{final.eval_seconds:.1f}" for final in timed)
        if scored > EVAL_SECONDS_MAX:
            yield fail(
                "C3",
                f"the scored evaluation took {scored:.1f} s > {EVAL_SECONDS_MAX:.0f} s",
                where,
                "speed it up",
            )
        elif total > EVAL_SECONDS_MAX:
            yield contested(
                "C3",
                f"all evaluations {parts} = {total:.1f} s > {EVAL_SECONDS_MAX:.0f} s (#1972)",
                where,
                "skip diagnostic evaluations in a record run",
            )


def check_hardware(folder: Folder) -> Iterator[Finding]:
    """C4: eight H100."""
    if not is_record(folder):
        return
    for run in folder.seed_runs:
        world = run.log.settings.get("world_size")
        if world and world.value.isdecimal() and int(world.value) != RECORD_WORLD_SIZE:
            yield fail(
                "C4",
                f"world_size {world.value}, the record track needs {RECORD_WORLD_SIZE} x {RECORD_GPU}",
                run.log.where(world.line),
                "file it as a non-record submission",
            )
        foreign = sorted({gpu for gpu in run.log.gpus if RECORD_GPU not in gpu})
        if foreign:
            yield fail(
                "C4",
                f"ran on {', '.join(foreign)}, not {RECORD_GPU}",
                run.log.path.name,
                "file it as non-record",
            )


def check_stop(folder: Folder) -> Iterator[Finding]:
    """C5: whether the clock or a step limit ended training."""
    if not is_record(folder):
        return
    for run in folder.seed_runs:
        log = run.log
        limit = log.settings.get("iterations")
        if log.stop is None and limit and limit.value.isdecimal() and log.steps == int(limit.value):
            yield info("C5", f"stopped by the step limit {limit.value}, not by the clock", log.path.name)


CHECKS = (check_artifact, check_train_clock, check_eval_clock, check_hardware, check_stop)
