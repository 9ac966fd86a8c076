"""Loss, bits per byte and step times of a run as series: from metrics.jsonl where it exists, else the log."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from records.derive import nested
from records.runs import Event, Run

AXES = ("steps", "tokens", "seconds")
SLOW_FACTOR = 1.25  # a step this much longer than the median is slow
COMPILE_STEPS = 10  # slow steps up to here are compilation and autotuning, whatever else happens in them
DATA_SHARE = 0.5  # of a slow step's excess, from which waiting for data is its cause


@dataclass(frozen=True)
class Sample:
    """One logged step: where it stands on the three axes, and its value."""

    step: int
    tokens: float | None
    seconds: float | None
    value: float

    def at(self, axis: str) -> float | None:
        return {"steps": float(self.step), "tokens": self.tokens, "seconds": self.seconds}[axis]


@dataclass(frozen=True)
class StepTime:
    """Mean duration of the steps after the previous sample; `cause` is set on slow ones."""

    step: int
    ms: float
    cause: str | None


def batch_tokens(run: Run) -> int | None:
    """Tokens of one optimizer step."""
    configured = nested(run.summary, "config", "train_batch_tokens") or nested(
        run.summary, "config", "TRAIN_BATCH_TOKENS"
    )
    if isinstance(configured, int):
        return configured
    located = run.log.settings.get("train_batch_tokens")
    return int(located.value) if located and located.value.isdigit() else None


def train_loss(run: Run) -> list[Sample]:
    """Training loss in nats per token."""
    events = _samples(run, "train", "train_loss")
    return events or _from_points(run, [(p.step, p.time_ms, p.loss) for p in run.log.train])


def validation_loss(run: Run) -> list[Sample]:
    """Validation loss in nats per token during training."""
    events = _samples(run, "val", "val_loss")
    return events or _from_points(run, [(p.step, p.time_ms, p.loss) for p in run.log.validation])


def validation_bpb(run: Run) -> list[Sample]:
    """Bits per byte during training."""
    events = _samples(run, "val", "val_bpb")
    points = [(p.step, p.time_ms, p.bpb) for p in run.log.validation if p.bpb is not None]
    return events or _from_points(run, points)


def _samples(run: Run, kind: str, key: str) -> list[Sample]:
    batch = batch_tokens(run)
    found = []
    for event in run.events:
        step, value = event.step, event.number(key)
        if event.kind != kind or step is None or value is None:
            continue
        tokens = event.number("tokens")
        milliseconds = event.number("train_time_ms")
        seconds = milliseconds / 1e3 if milliseconds is not None else None
        found.append(Sample(step, tokens if tokens is not None else _product(step, batch), seconds, value))
    return found


def _from_points(run: Run, points: Sequence[tuple[int, float | None, float]]) -> list[Sample]:
    batch = batch_tokens(run)
    return [
        Sample(step, _product(step, batch), time_ms / 1e3 if time_ms is not None else None, value)
        for step, time_ms, value in points
    ]


def _product(step: int, batch: int | None) -> float | None:
    return float(step * batch) if batch else None


def step_times(run: Run) -> list[StepTime]:
    """Step durations in order, the slow ones with their likely cause.

    `step_ms` of metrics.jsonl is the duration of that very step; a log gives the mean since its last line.
    """
    measured = [(e.step, e.number("step_ms"), e) for e in run.events if e.kind == "train"]
    pairs = [(step, ms, event) for step, ms, event in measured if step is not None and ms is not None]
    if not pairs:
        return _mark([(step, ms, None) for step, ms in _intervals(run)], run)
    return _mark(list(pairs), run)


def _intervals(run: Run) -> list[tuple[int, float]]:
    """Mean step duration between consecutive lines of the log that carry the clock."""
    points = sorted(
        {(p.step, p.time_ms) for p in (*run.log.train, *run.log.validation) if p.time_ms is not None}
    )
    intervals = []
    for (step, time_ms), (next_step, next_ms) in pairwise(points):
        if next_step > step and next_ms > time_ms:
            intervals.append((next_step, (next_ms - time_ms) / (next_step - step)))
    return intervals


def _mark(times: Sequence[tuple[int, float, Event | None]], run: Run) -> list[StepTime]:
    if not times:
        return []
    median = statistics.median(ms for _, ms, _ in times)
    validated = sorted(
        {p.step for p in run.log.validation} | {e.step for e in run.events if e.kind == "val" and e.step}
    )
    marked, previous = [], 0
    for step, ms, event in times:
        cause = None
        if ms > SLOW_FACTOR * median:
            cause = _cause(previous, step, ms - median, event, validated, run)
        marked.append(StepTime(step, ms, cause))
        previous = step
    return marked


def _cause(
    previous: int, step: int, excess_ms: float, event: Event | None, validated: Sequence[int], run: Run
) -> str:
    """Likely cause of a slow step in (`previous`, `step`]: compile, shard, validation or other."""
    if step <= COMPILE_STEPS or (event is not None and event.values.get("compiled")):
        return "compile"
    waited = (
        max((event.number(key) or 0.0 for key in ("data_wait_ms", "data_wait_max_ms")), default=0.0)
        if event
        else 0.0
    )
    if waited >= DATA_SHARE * excess_ms:
        return "shard"
    if any(previous <= at < step for at in validated if at):
        return "validation"
    return "shard" if _crosses_shard(previous, step, run) else "other"


def _crosses_shard(previous: int, step: int, run: Run) -> bool:
    """Whether the steps after `previous` reach into another training shard."""
    batch, shard = batch_tokens(run), shard_tokens(run)
    return bool(batch and shard and previous * batch // shard != step * batch // shard)


PUBLISHED_SHARD_TOKENS = 100_000_000  # every full shard of the published exports


def shard_tokens(run: Run) -> int | None:
    """Tokens of a training shard: the summary's where all are equal, the published size for public logs."""
    files: Any = nested(run.summary, "data", "train_files")
    if isinstance(files, list) and files:
        sizes = {f.get("tokens") for f in files[:-1] or files if isinstance(f, dict)}
        return sizes.pop() if len(sizes) == 1 else None
    return None if run.summary else PUBLISHED_SHARD_TOKENS
