"""What a checkpoint every 30 s costs: steps lost, by interleaved stretches of training with and without one.

    CONFIG=configs/cpu_demo.env python benchmarks/checkpoint.py [--rounds 40] [--seconds 1] [--keep]

All variables of train_gpt.py apply. Of each pair of stretches, in random order, one saves a checkpoint at its
start and waits for it at its end. Steps are counted per second of the clock and per second of CPU time, which
a busy machine disturbs less; the loss of a stretch is scaled to one checkpoint every 30 s.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
import train_gpt  # noqa: E402
from benchmarks import results  # noqa: E402

TITLE = "Checkpoints"

EVERY_SECONDS = 30.0


def stretch(training: train_gpt.Training, seconds: float, saving: bool) -> tuple[float, float, float]:
    """Train for some seconds. Returns seconds of a step, by clock and by CPU time, and those of the save."""
    machine = training.run.machine
    steps = 0
    machine.wait()
    start = time.perf_counter()
    cpu = time.process_time()
    if saving:
        training.save()
    blocked = time.perf_counter() - start
    while time.perf_counter() < start + seconds:
        train_gpt.train_step(training, 0.5)
        steps += 1
    training.finish_saving()
    machine.wait()
    return (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps, blocked


def tables(measured: dict[str, Any]) -> list[str]:
    """One sentence."""
    share = measured["seconds"] / EVERY_SECONDS
    lost = {
        clock: [100 * share * (1 - without / saving) for without, saving in measured[clock]]
        for clock in ("wall_s", "cpu_s")
    }
    told = {
        clock: f"{statistics.median(values):.2f} % ({min(values):.2f} to {max(values):.2f})"
        for clock, values in lost.items()
    }
    stood_ms = 1e3 * statistics.median(measured["blocked_s"])
    return [
        f"{measured['bytes'] / 1e6:.1f} MB every {EVERY_SECONDS:.0f} s cost {told['wall_s']} of the steps by "
        f"the clock, {told['cpu_s']} by CPU time; training stood still for {stood_ms:.1f} ms of the "
        f"{EVERY_SECONDS:.0f} s. Medians of {len(measured['blocked_s'])} pairs of stretches.",
    ]


def main() -> None:
    """Measure, print, and with --keep store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one stretch")
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    given = parser.parse_args()
    before = results.conditions()
    config = train_gpt.Config.from_env(os.environ)
    run = train_gpt.Run(train_gpt.this_machine(config, os.environ))
    inputs = train_gpt.preflight(config, run)
    train_gpt.open_run(config, run, inputs)
    training = train_gpt.Training(config, run, inputs.train_shards, inputs.validation, inputs.kernels)
    train_gpt.warm_up(training)
    stretch(training, 1.0, True)
    measured: dict[str, Any] = {"seconds": given.seconds, "wall_s": [], "cpu_s": [], "blocked_s": []}
    for _ in range(given.rounds):
        order = random.sample([False, True], 2)
        by = {saving: stretch(training, given.seconds, saving) for saving in order}
        measured["wall_s"].append([by[False][0], by[True][0]])
        measured["cpu_s"].append([by[False][1], by[True][1]])
        measured["blocked_s"].append(by[True][2])
    measured["bytes"] = run.path(train_gpt.CHECKPOINT).stat().st_size
    results.finish("checkpoint", before, measured, given.keep)
    training.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
