"""Steps of the real `Training`, timed in turns, for programs that compare ways to train."""

import statistics
import time
from pathlib import Path
from typing import NamedTuple

import train_gpt
from train_gpt import Training

TURN_STEPS = 5
PROGRESS = 0.5  # of the steps: after the loop has been switched on


def settings(config: Path, runs: Path, overrides: list[str], **more: str) -> dict[str, str]:
    """The environment of a run that stops by hand, not by a clock."""
    given = dict(item.split("=", 1) for item in overrides)
    return {
        "CONFIG": str(config), "RUNS_DIR": str(runs), "MAX_WALLCLOCK_SECONDS": "0", "VAL_LOSS_EVERY": "0",
        "ITERATIONS": "1000000", "WARMDOWN_ITERS": "0", **given, **more,
    }  # fmt: skip


class Steps(NamedTuple):
    """What some steps took and learnt, each by step."""

    ms: list[float]  # device work included
    wait_ms: list[float]  # of the host, for batches
    losses: list[float]


def timed_steps(training: Training, count: int) -> Steps:
    """Take `count` steps."""
    taken = Steps([], [], [])
    for _ in range(count):
        training.run.machine.wait()
        start = time.perf_counter()
        loss, _ = train_gpt.train_step(training, PROGRESS).tolist()
        taken.ms.append(1e3 * (time.perf_counter() - start))
        taken.wait_ms.append(training.loader.wait_ms)
        training.loader.wait_ms = 0.0
        taken.losses.append(loss)
        training.step += 1
    return taken


def means_of_turns(times_ms: list[float]) -> list[float]:
    """Mean milliseconds of a step in each turn."""
    starts = range(0, len(times_ms), TURN_STEPS)
    return [statistics.mean(times_ms[start : start + TURN_STEPS]) for start in starts]
