"""Loss, bits per byte and step times of a run as series: from metrics.jsonl where it exists, else the log."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from tools.runs.runs import Run

NOT_A_STEP = "DIAGNOSTIC"  # label of validations of averaged weights, off the curve of training
AXES = ("steps", "tokens", "seconds")
NEIGHBORS = 20  # intervals on either side, whose median says what a step takes around here
SLOW_DEVIATIONS = 6.0  # median absolute deviations above that median from which an interval is slow ...
SLOW_SHARE = 0.1  # ... and at least this part above it
FIRST_STEPS = 10  # slow ones up to here are compilation, autotuning or first allocations, whatever else is
PUBLISHED_SHARD_TOKENS = 100_000_000  # every full shard of the published exports
SMOOTHED_SHARE = 0.03  # of all samples: how many on either side a smoothed one is the mean of
DATA_SHARE = 0.5  # of a slow step's excess, from which waiting for data is its cause


@dataclass(frozen=True)
class Sample:
    """One logged step: its place on the three axes, and its value."""

    step: int
    tokens: float | None
    seconds: float | None
    value: float

    def at(self, axis: str) -> float | None:
        """Its place on one of AXES; None where the log lacks it."""
        return {"steps": float(self.step), "tokens": self.tokens, "seconds": self.seconds}[axis]


@dataclass(frozen=True)
class StepTime:
    """Mean duration of the steps after the previous sample; `cause` is set on slow ones."""

    step: int
    ms: float
    count: int  # of these steps
    cause: str | None


def points(samples: Sequence[Sample], axis: str) -> list[tuple[float, float]]:
    """(place on the axis, value) of the samples whose place is known."""
    found = []
    for sample in samples:
        x = sample.at(axis)
        if x is not None:
            found.append((x, sample.value))
    return found


def smoothed(samples: Sequence[Sample]) -> list[Sample]:
    """Each sample as the mean of itself and its neighbors, as many before as after.

    At the beginning, where losses fall steeply, it is of fewer; at the end those after it are missing. A loss
    that is not finite is left out.
    """
    samples = [sample for sample in samples if math.isfinite(sample.value)]
    sums = [0.0]
    for sample in samples:
        sums.append(sums[-1] + sample.value)
    found = []
    for i, sample in enumerate(samples):
        reach = min(round(SMOOTHED_SHARE * len(samples)), i)
        stop = min(i + reach + 1, len(samples))
        mean = (sums[stop] - sums[i - reach]) / (stop - (i - reach))
        found.append(replace(sample, value=mean))
    return found


def band(differences: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """The mean of each place and its neighbors, as `smoothed` has them, and half of its 95% interval.

    differences: at each place one value per pair of runs. Neighbors count as if they were independent, which
    noise of the batches is and a slow drift is not.
    """
    from scipy import special

    means, halves = [], []
    for i in range(len(differences)):
        reach = min(round(SMOOTHED_SHARE * len(differences)), i)
        near = [value for place in differences[i - reach : i + reach + 1] for value in place]
        means.append(statistics.fmean(near))
        error = statistics.stdev(near) / math.sqrt(len(near)) if len(near) > 1 else 0.0
        halves.append(float(special.stdtrit(max(len(near) - 1, 1), 0.975)) * error)
    return means, halves


def batch_tokens(run: Run) -> int | None:
    """Tokens of one optimizer step, as the log prints it."""
    located = run.log.settings.get("train_batch_tokens")
    return located.integer if located else None


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
    # A resumed run repeats the steps after its checkpoint: the later ones count.
    found: dict[int, Sample] = {}
    for event in run.events:
        if event.kind != kind or str(event.values.get("label")).startswith(NOT_A_STEP):
            continue
        step = event.step
        value = event.number(key)
        if step is None or value is None:
            continue
        tokens = event.number("tokens")
        if tokens is None:
            tokens = _product(step, batch)
        found[step] = Sample(step, tokens, _seconds(event.number("train_time_ms")), value)
    return [found[step] for step in sorted(found)]


def _from_points(run: Run, points: Sequence[tuple[int, float | None, float]]) -> list[Sample]:
    batch = batch_tokens(run)
    return [Sample(step, _product(step, batch), _seconds(time_ms), value) for step, time_ms, value in points]


def _seconds(milliseconds: float | None) -> float | None:
    return milliseconds / 1e3 if milliseconds is not None else None


def _product(step: int, batch: int | None) -> float | None:
    return float(step * batch) if batch else None


def step_times(run: Run) -> list[StepTime]:
    """Mean step duration between consecutive lines with the clock, the slow ones with their likely cause.

    An interval is slow compared to its neighbors, not to the whole run: steps get slower for good when depth
    recurrence turns on, and for a while when the machine is busy.
    """
    times = []  # (step before, last step, milliseconds of one step between)
    for (start, start_ms), (stop, stop_ms) in pairwise([(0, 0.0), *_clock(run)]):
        if stop > start and stop_ms > start_ms:
            times.append((start, stop, (stop_ms - start_ms) / (stop - start)))
    if not times:
        return []
    medians = local_medians([ms for _, _, ms in times])
    spread = statistics.median(abs(ms - median) for (_, _, ms), median in zip(times, medians, strict=True))
    marked = []
    waits = {e.step: e.number("data_wait_max_ms") or 0.0 for e in run.events if e.kind == "train"}
    for (start, stop, ms), median in zip(times, medians, strict=True):
        cause = None
        if ms > median + max(SLOW_DEVIATIONS * spread, SLOW_SHARE * median):
            cause = _cause(start, stop, (ms - median) * (stop - start), run, waits.get(stop))
        marked.append(StepTime(stop, ms, stop - start, cause))
    return marked


def median_ms(times: Sequence[StepTime]) -> float:
    """The median over steps, not lines: the first ten steps have a line each, and later lines are of many."""
    ordered = sorted(times, key=lambda time: time.ms)
    ends = list(accumulate(time.count for time in ordered))  # steps up to and including each line's
    # The one in the middle, or the two there. Steps are not listed: a log may claim any number of them.
    middle = ((ends[-1] - 1) // 2, ends[-1] // 2)
    return statistics.fmean(ordered[bisect_right(ends, step)].ms for step in middle)


def local_medians(values: Sequence[float]) -> list[float]:
    """For each value, the median of itself and up to NEIGHBORS values on either side.

    It follows a step from one level to another without delay, because the new level fills half of the window
    from its first value on.
    """
    return [statistics.median(values[max(0, i - NEIGHBORS) : i + NEIGHBORS + 1]) for i in range(len(values))]


def _clock(run: Run) -> list[tuple[int, float]]:
    """(step, milliseconds of training) of every training line; metrics.jsonl has them to more digits."""
    exact = [(s.step, 1e3 * s.seconds) for s in _samples(run, "train", "train_loss") if s.seconds is not None]
    return exact or [(point.step, point.time_ms) for point in run.log.train if point.time_ms is not None]


def _cause(start: int, stop: int, excess_ms: float, run: Run, waited_ms: float | None) -> str:
    """Likely cause of `excess_ms` after step `start` up to `stop`: start, shard, validation or other.

    waited_ms: the longest wait for data; None: not logged.
    """
    if stop <= FIRST_STEPS:
        return "start"
    if waited_ms is not None and waited_ms >= DATA_SHARE * excess_ms:
        return "shard"
    if waited_ms is None and shard_crossings(start, stop, batch_tokens(run) or 0):
        return "shard"
    return "validation" if any(start <= point.step < stop for point in run.log.validation) else "other"


def shard_crossings(start: int, stop: int, batch: int) -> int:
    """How many shards of the published exports end in the steps after `start` up to `stop`."""
    return stop * batch // PUBLISHED_SHARD_TOKENS - start * batch // PUBLISHED_SHARD_TOKENS
