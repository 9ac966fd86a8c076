"""What a checkpoint every 30 s costs: steps lost, by interleaved stretches of training with and without one.

    CONFIG=records/configs/cpu_demo.env python benchmarks/checkpoint.py [--rounds 40] [--seconds 1]

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

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
import train_gpt  # noqa: E402

EVERY_SECONDS = 30.0


def stretch(training: train_gpt.Training, seconds: float, saving: bool) -> tuple[float, float, float]:
    """Train for some seconds. Returns seconds of a step, by clock and by CPU time, and those of the save."""
    run, steps = training.run, 0
    run.sync()
    start, cpu = time.perf_counter(), time.process_time()
    if saving:
        train_gpt.save_checkpoint(training)
    blocked = time.perf_counter() - start
    while time.perf_counter() < start + seconds:
        train_gpt.train_step(training, 0.5)
        steps += 1
    training.writer.join()
    run.sync()
    return (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps, blocked


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one stretch")
    given = parser.parse_args()
    config = train_gpt.Config.from_env(os.environ)
    run = train_gpt.Run(config, os.environ)
    inputs = train_gpt.preflight(config, run)
    train_gpt.open_run(config, run, inputs)
    training = train_gpt.Training(config, run, inputs)
    train_gpt.warm_up(training)
    stretch(training, 1.0, True)
    lost, lost_cpu, blocked_ms = list[float](), list[float](), list[float]()
    for _ in range(given.rounds):
        order = random.sample([False, True], 2)
        by = {saving: stretch(training, given.seconds, saving) for saving in order}
        share = given.seconds / EVERY_SECONDS
        lost.append(100 * share * (1 - by[False][0] / by[True][0]))
        lost_cpu.append(100 * share * (1 - by[False][1] / by[True][1]))
        blocked_ms.append(1e3 * by[True][2])
    size_mb = run.path(train_gpt.CHECKPOINT_NAMES[0]).stat().st_size / 1e6
    print(f"{size_mb:.1f} MB every {EVERY_SECONDS:.0f} s cost {statistics.median(lost):.2f} % of the steps "
          f"by the clock ({min(lost):.2f} to {max(lost):.2f} in {given.rounds} rounds), "
          f"{statistics.median(lost_cpu):.2f} % by CPU time ({min(lost_cpu):.2f} to {max(lost_cpu):.2f}); "
          f"training stood for {statistics.median(blocked_ms):.1f} ms")  # fmt: skip
    training.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
