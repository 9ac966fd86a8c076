"""A4, A9, C2-C5, C9: artifact bytes, clocks of training and evaluation, hardware, why learning stopped."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from tools.runs.folder import SUBMISSION, Folder, SeedRun
from tools.runs.hardware import GPU_MODEL, compact
from tools.runs.logs import EXACT, Final, Point
from tools.runs.reading import name_of
from tools.runs.rules import (
    ARTIFACT_BYTES_MAX,
    ARTIFACT_SLACK_BYTES,
    EVAL_SECONDS_MAX,
    RECORD_GPU,
    RECORD_TRACK,
    RECORD_WORLD_SIZE,
    TRAIN_OVERSHOOT_SECONDS,
    TRAIN_SECONDS_MAX,
    is_record_gpu,
)
from tools.submit.findings import Finding, contested, fail, info, warn

LOG_REMEDY = "ship the log as the script wrote it"
PACE_MIN = 0.6  # of the mean step time: the last stretch of no public log is that fast
BITS_PER_PARAMETER_MIN = 1.0  # fewer hold no model: the public binary ones have more
LEARNING_SECONDS_LEFT = 0.1  # of the limit: an estimate of what the rest takes may be off by that
HARDWARE_FIELDS = ("hardware", "gpu", "gpus", "platform")
HARDWARE_CHARACTERS_MAX = 200


def is_record(folder: Folder) -> bool:
    """Whether the ten-minute rules bind this folder."""
    declared = re.sub(r"\W+", "_", str(folder.submission.get("track", "")).lower())
    return RECORD_TRACK in (folder.track, declared, f"track_{declared}")


def shipped_code_bytes(folder: Folder) -> int:
    """Bytes of the script as shipped and of every file it runs or reads."""
    if folder.script is None:
        return 0
    return folder.script.bytes + _helper_bytes(folder)


def _helper_bytes(folder: Folder) -> int:
    """Bytes of the files that the script runs or reads."""
    return sum(path.stat().st_size for path in folder.closure)


class Sizes(NamedTuple):
    """Bytes of one run: what its log counts in all, and the model with all code as shipped.

    `certain` holds in either reading. Where the log counts the very script that is shipped, the files that it
    runs or reads come on top.
    """

    model: int
    logged: int
    shipped: int
    certain: int
    line: int
    run: SeedRun


def _sizes(folder: Folder) -> list[Sizes]:
    """The sizes of every run whose log states the model's."""
    found = []
    script = folder.script.bytes if folder.script else 0
    for run in folder.seed_runs:
        model = run.log.model_bytes
        if model is None:
            continue
        logged = run.log.total_bytes.bytes if run.log.total_bytes else 0
        shipped = model.bytes + shipped_code_bytes(folder)
        certain = min(logged, shipped) if logged else shipped
        counted = [count.bytes for count in run.log.byte_counts if count.what == "Code size"]
        plain = {script, run.log.code_bytes.bytes if run.log.code_bytes else script}
        if logged - model.bytes in plain or (counted and logged - model.bytes not in counted):
            # Both count the code as plain bytes, or the log contradicts itself: the larger one holds.
            certain = max(logged, shipped)
        found.append(Sizes(model.bytes, logged, shipped, certain, model.line, run))
    return found


def check_artifact(folder: Folder) -> Iterator[Finding]:
    """A9: model plus code, counted as shipped and as the log counts it."""
    found = _sizes(folder)
    if not found:
        if folder.seed_runs:
            yield info("A9", "no log states the compressed model's bytes", folder.name, "print them")
        return
    worst = max(found, key=lambda sizes: (sizes.certain, sizes.shipped, sizes.logged))
    where = worst.run.log.where(worst.line)
    logged = max(sizes.logged for sizes in found)
    largest = max(found, key=lambda sizes: sizes.shipped)
    shipped = largest.shipped
    if worst.certain > ARTIFACT_BYTES_MAX:
        total = max(worst.logged, worst.shipped)
        yield fail(
            "A9",
            f"total {total:,} > {ARTIFACT_BYTES_MAX:,} by {total - ARTIFACT_BYTES_MAX:,}"
            f" ({_parts(folder, worst)})",
            where,
            "shrink it",
        )
    elif shipped > ARTIFACT_BYTES_MAX:
        yield contested(
            "A9",
            f"as shipped {shipped:,} > {ARTIFACT_BYTES_MAX:,} (model {largest.model:,} + code"
            f" {shipped - largest.model:,}); the log counts {logged:,} with code in a form that is not in the"
            " folder (#1835)",
            largest.run.log.where(largest.line),
            "ship the script in the form that was counted",
        )
    elif logged > ARTIFACT_BYTES_MAX:
        yield contested(
            "A9",
            f"the log's total is {logged:,}, but {shipped:,} as shipped (#1835)",
            where,
            "log what is shipped",
        )
    elif ARTIFACT_BYTES_MAX - shipped < ARTIFACT_SLACK_BYTES:
        yield info(
            "A9", f"{ARTIFACT_BYTES_MAX - shipped:,} bytes below the cap; reruns vary by a few KB", where
        )


def _parts(folder: Folder, sizes: Sizes) -> str:
    """What a total consists of, and the other total where the log gives one."""
    script = folder.script.bytes if folder.script else 0
    helpers = f" + files it runs or reads {_helper_bytes(folder):,}" if folder.closure else ""
    text = f"model {sizes.model:,} + script {script:,}{helpers} = {sizes.shipped:,}"
    return text + (f"; the log's total is {sizes.logged:,}" if sizes.logged else "")


def check_totals(folder: Folder) -> Iterator[Finding]:
    """A9: a log's total is its model plus its code."""
    for run in folder.seed_runs:
        log = run.log
        if log.total_bytes is None or log.model_bytes is None:
            continue
        code = [count.bytes for count in log.byte_counts if count.what == "Code size"]
        if not code or log.total_bytes.bytes - log.model_bytes.bytes in code:
            continue
        sums = " or ".join(f"{log.model_bytes.bytes + size:,}" for size in sorted(set(code)))
        larger = max(log.total_bytes.bytes, log.model_bytes.bytes + min(code))
        yield warn(
            "A9",
            f"the log's total is {log.total_bytes.bytes:,}, but its model and code add up to {sums}:"
            f" the larger number counts, {larger:,}",
            log.where(log.total_bytes.line),
            "ship the log as the script wrote it",
        )


def check_train_clock(folder: Folder) -> Iterator[Finding]:
    """C2: the training loop, and the loop plus Hessian collection, inside ten minutes."""
    if not is_record(folder):
        return
    for run in folder.seed_runs:
        seconds = run.log.train_seconds
        if seconds is None or not run.log.clock_is_whole:
            yield warn(
                "C2",
                "no training time at the last step: cannot decide whether training kept to its limit",
                run.log.where(run.log.lines),
                "ship the log as the script wrote it, with train_time",
            )
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
            "reserve time for the Hessians inside the training budget",
        )


def check_steps(folder: Folder) -> Iterator[Finding]:
    """A4: no step is beyond the limit, and steps times their mean time are the training clock."""
    for run in folder.seed_runs:
        points = sorted((*run.log.train, *run.log.validation), key=lambda point: point.line)
        beyond = next((point for point in points if point.limit and point.step > point.limit), None)
        if beyond is not None:
            yield fail(
                "A4",
                f"step {beyond.step:,} of at most {beyond.limit:,}",
                run.log.where(beyond.line),
                "ship the log as the script wrote it",
            )
        wrong = _wrong_pace(points)
        if wrong is not None and wrong.pace is not None:
            yield fail(
                "A4",
                f"step {wrong.step:,} at {wrong.pace.average_ms:.2f} ms per step makes"
                f" {wrong.step * wrong.pace.average_ms / 1e3:.1f} s, but train_time says"
                f" {wrong.pace.time_ms / 1e3:.1f} s",
                run.log.where(wrong.line),
                "ship the log as the script wrote it",
            )


def _wrong_pace(points: list[Point]) -> Point | None:
    """The first line whose mean time of a step contradicts its step and clock; None where there is none.

    The mean may be that of all steps, of those since the line before, or, in a run that went on with a new
    clock, of those since then.
    """
    start = 0  # step at which the clock began
    before: Point | None = None
    for point in points:
        pace = point.pace
        if pace is None:
            continue
        if point.step == 0:  # there is no mean yet
            before = point
            continue
        earlier = before.pace if before is not None else None
        of_all = pace.fits(point.step, pace.time_ms) or pace.fits(point.step - start, pace.time_ms)
        of_last = False
        if before is not None and earlier is not None:
            of_last = pace.fits(point.step - before.step, pace.time_ms - earlier.time_ms)
        new_clock = earlier is None or pace.time_ms < earlier.time_ms
        if not (of_all or of_last):
            if not new_clock or pace.average_ms <= 0:
                return point
            start = point.step - round(pace.time_ms / pace.average_ms)
            if start < 0:
                return point
        before = point
    return None


def check_eval_clock(folder: Folder) -> Iterator[Finding]:
    """C3: the scored evaluation, and all evaluations together, inside ten minutes.

    Accepted records time the scoring alone. Whether reading the artifact and compilation count is contested.
    """
    if not is_record(folder):
        return
    for run in folder.seed_runs:
        yield from _check_eval_clocks(run)
        score = folder.score(run.log)
        timed = [final for final in run.log.finals if final.eval_seconds and not final.label.endswith(EXACT)]
        printed = run.log.total_eval_seconds
        if score is not None and score.eval_seconds is None and printed is None:
            yield warn(
                "C3",
                f"no evaluation time for `{score.label}`: cannot decide whether it kept to the limit",
                run.log.where(score.line),
                "ship the log as the script wrote it, with eval_time",
            )
        if not timed:
            continue
        parts_seconds = sum(final.eval_seconds or 0.0 for final in timed)
        total = max(parts_seconds, float(printed.value) if printed else 0.0)
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
                f"all evaluations ({parts}) took {total:.1f} s > {EVAL_SECONDS_MAX:.0f} s (#1972)",
                where,
                "skip diagnostic evaluations in a record run",
            )


def _check_eval_clocks(run: SeedRun) -> Iterator[Finding]:
    """C3: the two clocks of an evaluation, as our script prints them: the accepted and the contested one."""
    clocks = run.log.eval_clocks
    if clocks is None:
        return
    where = run.log.where(clocks.line)
    if clocks.scoring_seconds > EVAL_SECONDS_MAX:
        text = f"scoring took {clocks.scoring_seconds:.1f} s > {EVAL_SECONDS_MAX:.0f} s"
        yield fail("C3", text, where, "speed it up")
    elif clocks.from_artifact_seconds > EVAL_SECONDS_MAX:
        yield contested(
            "C3",
            f"scoring took {clocks.scoring_seconds:.1f} s, but counted from reading the artifact it is"
            f" {clocks.from_artifact_seconds:.1f} s > {EVAL_SECONDS_MAX:.0f} s: accepted records time"
            " scoring alone, and whether the rest counts is contested",
            where,
            "leave room for reading the artifact and for compilation",
        )


def check_hardware(folder: Folder) -> Iterator[Finding]:
    """C4: eight H100."""
    if not is_record(folder):
        return
    for run in folder.seed_runs:
        world = run.log.settings.get("world_size")
        if world and world.integer not in (None, RECORD_WORLD_SIZE):
            yield fail(
                "C4",
                f"world_size {world.value}, but the record track needs {RECORD_WORLD_SIZE} x {RECORD_GPU}",
                run.log.where(world.line),
                "file it as a non-record submission",
            )
        foreign = sorted({gpu for gpu in run.log.gpus if not is_record_gpu(gpu)})
        if foreign:
            yield fail(
                "C4",
                f"ran on {', '.join(foreign)}, not {RECORD_GPU} (SXM)",
                name_of(run.log.path),
                "file it as non-record",
            )
    declared = _declared_hardware(folder)
    name = folder.submission_path.name if folder.submission_path else ""
    if declared is None:
        if not any(run.log.gpus for run in folder.seed_runs):
            yield warn(
                "C4",
                f"neither a log nor {SUBMISSION} names a GPU: cannot decide whether it ran on"
                f" {RECORD_WORLD_SIZE} x {RECORD_GPU}",
                folder.name,
                f"print `nvidia-smi` into the log, or add `{HARDWARE_FIELDS[0]}`",
            )
        return
    if declared.gpu != RECORD_GPU or declared.number not in (None, RECORD_WORLD_SIZE):
        yield fail(
            "C4",
            f"declares `{declared.text}`, but the record track needs {RECORD_WORLD_SIZE} x {RECORD_GPU}",
            name,
            "file it as a non-record submission",
        )


class Hardware(NamedTuple):
    """GPUs that submission.json declares: its words, the model such as H100, and their number if given."""

    text: str
    gpu: str
    number: int | None


def _declared_hardware(folder: Folder) -> Hardware | None:
    """What submission.json says of the GPUs; None where it names no model that is known."""
    for key in HARDWARE_FIELDS:
        value = folder.submission.get(key)
        text = value[:HARDWARE_CHARACTERS_MAX] if isinstance(value, str) else ""
        found = GPU_MODEL.search(text)
        if found:
            return Hardware(text, compact(found[2]), int(found[1]) if found[1] else None)
    return None


def check_declared_hardware(folder: Folder) -> Iterator[Finding]:
    """A4: the hardware that submission.json declares is the one that the logs print."""
    declared = _declared_hardware(folder)
    if declared is None:
        return
    for run in folder.seed_runs:
        printed = {compact(gpu) for gpu in run.log.gpus}
        if printed and not any(declared.gpu in gpu for gpu in printed):
            yield fail(
                "A4",
                f"declares `{declared.text}`, but ran on {', '.join(sorted(set(run.log.gpus)))}",
                name_of(run.log.path),
                "declare the hardware that ran",
            )
        world = run.log.settings.get("world_size")
        count = world.integer if world else None
        if count is not None and declared.number not in (None, count):
            yield fail(
                "A4",
                f"declares `{declared.text}`, but world_size is {count}",
                run.log.where(world.line if world else 1),
                "declare the hardware that ran",
            )


def check_stop(folder: Folder) -> Iterator[Finding]:
    """C5: whether the clock or a step limit ended training."""
    if not is_record(folder):
        return
    for run in folder.seed_runs:
        log = run.log
        limit = log.settings.get("iterations")
        if log.stop is None and limit and log.steps is not None and log.steps == limit.integer:
            yield info("C5", f"stopped by the step limit {limit.value}, not by the clock", name_of(log.path))


def check_clock(folder: Folder) -> Iterator[Finding]:
    """C2: the training clock of a log runs forward, and its last steps are not much faster than all."""
    for run in folder.seed_runs:
        yield from _check_backwards(run)
        timed = [point for point in run.log.train if point.time_ms is not None and point.step > 0]
        stop = run.log.stop
        if stop is None or not timed or stop.step <= timed[-1].step:
            continue
        last = timed[-1]
        assert last.time_ms is not None
        mean_ms = last.time_ms / last.step
        pace_ms = (stop.train_seconds * 1e3 - last.time_ms) / (stop.step - last.step)
        if pace_ms < PACE_MIN * mean_ms:
            text = (f"{stop.step - last.step:,} steps after step {last.step:,} at {pace_ms:.1f} ms each, all"
                    f" before at {mean_ms:.1f} ms")
            yield warn("C2", text, run.log.where(stop.line), LOG_REMEDY)


def _check_backwards(run: SeedRun) -> Iterator[Finding]:
    """A training clock never runs backwards while steps go on, but for a run that began a new one."""
    points = sorted((*run.log.train, *run.log.validation), key=lambda point: point.line)
    timed = [(point, point.printed_ms) for point in points if point.printed_ms is not None]
    backwards = []
    for (before, earlier), (point, time) in itertools.pairwise(timed):
        if time < earlier - 1.0:
            backwards.append((before, earlier, point, time))
    if not backwards:
        return
    going_on = [found for found in backwards if found[2].step > found[0].step]
    before, earlier, point, time = (going_on or backwards)[0]
    text = (f"the training clock runs backwards: {earlier:,.0f} ms at step {before.step:,}, then"
            f" {time:,.0f} ms at step {point.step:,}; expected it to go forward")
    report = warn
    if len(going_on) > 1:  # a run that was resumed with a new clock has one such place
        text += f"; this happens {len(going_on)} times"
        report = fail
    yield report("C2", text, run.log.where(point.line), "one log for each run, from its start")


def check_learned_tokens(folder: Folder) -> Iterator[Finding]:
    """C3: from one text all seeds learn alike, but for those that say that their time was up."""
    most: dict[str, Final] = {}
    finals = [(run, final) for run in folder.seed_runs for final in run.log.finals]
    for _, final in finals:
        if final.learned_tokens is not None:
            most[final.label] = max(
                most.get(final.label, final), final, key=lambda one: one.learned_tokens or 0
            )
    for run, final in finals:
        learned, expected = final.learned_tokens, most.get(final.label)
        if learned is None or expected is None or run.log.unlearned is not None:
            continue
        if learned != expected.learned_tokens:
            yield warn(
                "C3",
                f"`{final.label}` learned from {learned:,} targets, but in another seed from"
                f" {expected.learned_tokens:,}, and no line says that its time was up",
                run.log.where(final.line),
                "say why documents were scored without learning",
            )


def check_learning(folder: Folder) -> Iterator[Finding]:
    """C3: a score that went on without learning had no time left for it, by the numbers that it printed."""
    for run in folder.seed_runs:
        stopped = run.log.unlearned
        if stopped is None:
            continue
        score = next((final for final in run.log.finals if final.label == stopped.name), None)
        took = score.eval_seconds if score is not None else None
        text = f"`{stopped.name}` stopped learning at {stopped.used_seconds:.1f} s"
        where = run.log.where(stopped.line)
        needed = stopped.used_seconds + stopped.needed_seconds
        if needed <= stopped.limit_seconds:
            text += f"; with the time for the rest, that is {needed:.1f} s of {stopped.limit_seconds:.1f} s"
            yield warn("C3", text, where, LOG_REMEDY)
        elif took is not None and took < stopped.limit_seconds * (1 - LEARNING_SECONDS_LEFT):
            left = stopped.limit_seconds - took
            text += f" and ended at {took:.1f} s: {left:.1f} s of {stopped.limit_seconds:.1f} s were left"
            remedy = "say why documents were scored without learning although time was left"
            yield warn("C3", text, where, remedy)


def check_parameters(folder: Folder) -> Iterator[Finding]:
    """C9: the parameters that a log counts fit into its model's bytes."""
    for run in folder.seed_runs:
        counted = run.log.settings.get("model_params")
        model = run.log.model_bytes
        if counted is None or not counted.integer or model is None:
            continue
        bits = 8 * model.bytes / counted.integer
        if bits < BITS_PER_PARAMETER_MIN:
            text = f"{counted.integer:,} parameters in {model.bytes:,} bytes are {bits:.2f} bits each"
            yield warn("C9", text, run.log.where(counted.line), LOG_REMEDY)


RULES = (
    check_artifact,
    check_totals,
    check_train_clock,
    check_clock,
    check_learning,
    check_learned_tokens,
    check_steps,
    check_eval_clock,
    check_hardware,
    check_declared_hardware,
    check_stop,
    check_parameters,
)
