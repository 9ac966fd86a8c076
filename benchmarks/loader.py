"""What a step pays for its batches, with TRAIN_PREFETCH and without: steps of a run, in turns.

    python benchmarks/loader.py --turns 12
    torchrun --standalone --nproc_per_node=2 benchmarks/loader.py --turns 12 --disk-ms 50

The turns are of --config, with --set on top, on whatever device it finds; --disk-ms delays each read of a
shard. Both ways must give the same losses and the same stream hash.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
import train_gpt  # noqa: E402
from benchmarks.conditions import conditions, described  # noqa: E402
from data.files import escape_unprintable  # noqa: E402

PROGRESS = 0.5  # of the steps: after the loop has been switched on
UNWRITTEN = Path(tempfile.gettempdir()) / "turns"  # the same on all ranks


def endless(arguments: argparse.Namespace, **more: str) -> dict[str, str]:
    """The settings of a run that nothing ends but the last turn."""
    given = dict(item.split("=", 1) for item in arguments.set)
    return {
        "CONFIG": str(arguments.config), "RUNS_DIR": str(UNWRITTEN), "MAX_WALLCLOCK_SECONDS": "0",
        "VAL_LOSS_EVERY": "0", "ITERATIONS": "1000000", "WARMDOWN_ITERS": "0", **given, **more,
    }  # fmt: skip


def prepared(arguments: argparse.Namespace, prefetch: int, machine: Any) -> Any:
    """A training that is ready for its first step, and writes nothing."""
    more = {"TRAIN_PREFETCH": str(prefetch), "RUN_ID": f"prefetch{prefetch}", "WARMUP_STEPS": "0"}
    config = train_gpt.Config.from_env(endless(arguments, **more))
    run = train_gpt.Run(machine or train_gpt.this_machine(config, os.environ))
    run.log = lambda *line, **event: None  # type: ignore[method-assign]
    inputs = train_gpt.preflight(config, run, "")
    training = train_gpt.Training(
        config, run, inputs.train_shards, inputs.validation, inputs.chosen.ops, inputs.hashes)  # fmt: skip
    train_gpt.warm_up(training)
    return training


def turn(training: Any, steps: int) -> tuple[float, float, float, list[float]]:
    """Milliseconds a step by the clock, by the CPU clock of all threads, and waited for; the losses."""
    losses = []
    training.loader.wait_ms = 0.0
    training.run.machine.wait()
    begun = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loss, _ = train_gpt.train_step(training, PROGRESS).tolist()
        losses.append(loss)
        training.step += 1
    training.run.machine.wait()
    wall_ms = 1e3 * (time.perf_counter() - begun[0]) / steps
    # The batches made ahead belong to this turn: as many as it has taken.
    for pool in training.loader.pools:
        pool.submit(int).result()
    cpu_ms = 1e3 * (time.process_time() - begun[1]) / steps
    return wall_ms, cpu_ms, training.loader.wait_ms / steps, losses


def in_turns(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of the turns of both ways, as many of each; who begins alternates. Empty but on rank 0."""
    steps = arguments.turn_steps
    real = train_gpt.read_tokens

    def slow(*args: Any, **options: Any) -> np.ndarray:
        time.sleep(arguments.disk_ms / 1e3)
        return real(*args, **options)

    train_gpt.read_tokens = slow
    without = prepared(arguments, 0, None)
    machine = without.run.machine
    ways = {0: without, 1: prepared(arguments, 1, machine)}
    taken: dict[int, list[Any]] = {0: [], 1: []}
    for number in range(arguments.turns + 1):
        for way in (0, 1) if number % 2 else (1, 0):
            taken[way].append(turn(ways[way], steps))
    hashes = [training.stream_hash() for training in ways.values()]
    if len(set(hashes)) > 1 or [t[3] for t in taken[0]] != [t[3] for t in taken[1]]:
        raise SystemExit(f"TRAIN_PREFETCH changes the run: stream hashes {hashes}")
    # Of all ranks the mean; the first turn allocates.
    ranks = machine.gather({way: [one[:3] for one in turns[1:]] for way, turns in taken.items()})
    mean = {str(way): np.mean([rank[way] for rank in ranks], axis=0).tolist() for way in taken}
    measured = {
        "turns": mean, "ranks": len(ranks), "steps": steps, "disk_ms": arguments.disk_ms, "hash": hashes[0],
        "config": arguments.config.name, "set": arguments.set, "device": machine.device_name,
    }  # fmt: skip
    return measured if machine.rank == 0 else {}


def tables(measured: dict[str, Any]) -> list[str]:
    """A row for each way; then how much longer a step is with prefetch, and its 95 % interval."""
    turns = {way: np.array(by_turn) for way, by_turn in measured["turns"].items()}
    lines = ["| TRAIN_PREFETCH | ms a step | CPU ms a step | ms waited for batches |", "|---|---|---|---|"]
    for way, by_turn in turns.items():
        cells = " | ".join(f"{value:.2f}" for value in by_turn.mean(axis=0))
        lines.append(f"| {way} | {cells} |")
    told = []
    for column, name in enumerate(("wall", "CPU")):
        ratios = np.log(turns["1"][:, column] / turns["0"][:, column])
        half = stats.t.ppf(0.975, len(ratios) - 1) * ratios.std(ddof=1) / math.sqrt(len(ratios))
        low, middle, high = (100 * math.expm1(ratios.mean() + by) for by in (-half, 0, half))
        told.append(f"{name} ms with prefetch {middle:+.1f} % (95 % interval {low:+.1f} to {high:+.1f} %)")
    where = " ".join([measured["config"], *measured["set"]])
    return [
        *lines, "",
        f"{'; '.join(told)}. {where}, {measured['ranks']} ranks of {measured['device']}, "
        f"{len(turns['0'])} turns of {measured['steps']} steps each, {measured['disk_ms']:g} ms a shard; "
        f"stream hash {measured['hash']:016x} and losses equal.",
    ]  # fmt: skip


def main() -> None:
    """Print the table, and where it was measured."""
    escape_unprintable()
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--turns", type=int, default=12, help="turns with and as many without prefetch")
    parser.add_argument("--turn-steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--config", type=Path, default=REPO / "configs/cpu_demo.env", help="of the run")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings on top of it")
    parser.add_argument("--disk-ms", type=float, default=0.0, help="added to each read of a shard")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = conditions()
    found = in_turns(arguments)
    if found:
        print("\n".join([described(before), "", *tables(found)]))


if __name__ == "__main__":
    main()
