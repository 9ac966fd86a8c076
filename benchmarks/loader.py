"""What a step pays for its batches: with TRAIN_PREFETCH, without it, and on a GPU without TRAIN_COPY_STREAM.

    python benchmarks/loader.py --turns 12
    torchrun --standalone --nproc_per_node=2 benchmarks/loader.py --turns 12 --disk-ms 50

The steps of --config, with --set on top, are timed in turns on the device that a run would use; --disk-ms
delays each read of a shard. All three must read the same stream, and on a CPU their losses must be equal,
too. (On a GPU, attention adds up its gradients in any order.)
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
# The settings of each way to read batches, by its name in the table.
WAYS = {
    "off": {"TRAIN_PREFETCH": "0"},
    "on": {"TRAIN_PREFETCH": "1"},
    "on, TRAIN_COPY_STREAM=0": {"TRAIN_PREFETCH": "1", "TRAIN_COPY_STREAM": "0"},
}


def endless(arguments: argparse.Namespace, **more: str) -> dict[str, str]:
    """The settings of a run that nothing ends but the last turn."""
    given = dict(item.split("=", 1) for item in arguments.set)
    return {
        "CONFIG": str(arguments.config), "RUNS_DIR": str(UNWRITTEN), "MAX_WALLCLOCK_SECONDS": "0",
        "VAL_LOSS_EVERY": "0", "ITERATIONS": "1000000", "WARMDOWN_ITERS": "0", **given, **more,
    }


def prepared(arguments: argparse.Namespace, way: str, machine: Any) -> Any:
    """A training that is ready for its first step, and writes nothing."""
    more = {"RUN_ID": f"way{list(WAYS).index(way)}", "WARMUP_STEPS": "0"}
    config = train_gpt.Config.from_env(endless(arguments, **WAYS[way], **more))
    run = train_gpt.Run(machine or train_gpt.this_machine(config, os.environ))
    run.log = lambda *line, **event: None  # type: ignore[method-assign]
    inputs = train_gpt.preflight(config, run, "")
    training = train_gpt.Training(
        config, run, inputs.train_shards, inputs.validation, inputs.chosen.ops, inputs.hashes)
    train_gpt.warm_up(training)
    return training


def turn(training: Any, steps: int) -> tuple[float, float, float, list[float]]:
    """Milliseconds per step: wall time, CPU time of all threads, and wait for batches; then the losses."""
    losses = []
    training.loader.wait_ms = 0.0
    training.run.machine.wait()
    begun = time.perf_counter(), time.process_time()
    for _ in range(steps):
        losses.append(train_gpt.train_step(training, PROGRESS)[0])  # on the device: the host runs ahead
        training.step += 1
    training.run.machine.wait()
    wall_ms = 1e3 * (time.perf_counter() - begun[0]) / steps
    # The batches made ahead belong to this turn: as many as it has taken.
    for pool in training.loader.pools:
        pool.submit(int).result()
    cpu_ms = 1e3 * (time.process_time() - begun[1]) / steps
    return wall_ms, cpu_ms, training.loader.wait_ms / steps, torch.stack(losses).tolist()


def in_turns(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times of the turns of all ways, the same number for each; the order rotates. Empty except on rank 0."""
    steps = arguments.turn_steps
    real = train_gpt.read_tokens

    def slow(*args: Any, **options: Any) -> np.ndarray:
        time.sleep(arguments.disk_ms / 1e3)
        return real(*args, **options)

    train_gpt.read_tokens = slow
    trainings = {"off": prepared(arguments, "off", None)}
    machine = trainings["off"].run.machine
    for way in list(WAYS)[1:] if machine.on_gpu else ["on"]:
        trainings[way] = prepared(arguments, way, machine)
    taken: dict[str, list[Any]] = {way: [] for way in trainings}
    order = list(trainings)
    for _ in range(arguments.turns + 1):
        for way in order:
            taken[way].append(turn(trainings[way], steps))
        order.append(order.pop(0))

    hashes = {training.stream_hash() for training in trainings.values()}
    losses = [[one[3] for one in turns] for turns in taken.values()]
    same_losses = all(theirs == losses[0] for theirs in losses)
    if len(hashes) > 1 or not (same_losses or machine.on_gpu):
        raise SystemExit(f"the loader's settings change the run: stream hashes {sorted(hashes)}, losses "
                         f"{'equal' if same_losses else 'differ'}")
    # The mean over ranks; the first turn of each way allocates memory and is left out.
    ranks = machine.gather({way: [one[:3] for one in turns[1:]] for way, turns in taken.items()})
    mean = {way: np.mean([rank[way] for rank in ranks], axis=0).tolist() for way in taken}
    measured = {
        "turns": mean, "ranks": len(ranks), "steps": steps, "disk_ms": arguments.disk_ms,
        "hash": hashes.pop(), "config": arguments.config.name, "set": arguments.set,
        "device": machine.device_name,
    }
    return measured if machine.rank == 0 else {}


def tables(measured: dict[str, Any]) -> list[str]:
    """A row for each way; then how much longer its step takes than without prefetch, with 95% interval."""
    turns = {way: np.array(by_turn) for way, by_turn in measured["turns"].items()}
    lines = [
        "| TRAIN_PREFETCH | ms per step | CPU ms per step | ms waited for batches |",
        "|---|---|---|---|",
    ]
    for way, by_turn in turns.items():
        cells = " | ".join(f"{value:.2f}" for value in by_turn.mean(axis=0))
        lines.append(f"| {way} | {cells} |")
    lines.append("")
    for way in list(turns)[1:]:
        changes = []
        for column, name in enumerate(("wall", "CPU")):
            ratios = np.log(turns[way][:, column] / turns["off"][:, column])
            half = stats.t.ppf(0.975, len(ratios) - 1) * ratios.std(ddof=1) / math.sqrt(len(ratios))
            low, middle, high = (100 * math.expm1(ratios.mean() + by) for by in (-half, 0, half))
            changes.append(f"{name} time {middle:+.1f}% (95% interval {low:+.1f} to {high:+.1f}%)")
        lines.append(f"Prefetch {way} against off: {', '.join(changes)}.")
    settings = " ".join([measured["config"], *measured["set"]])
    lines.append(
        f"{settings}, {measured['ranks']} ranks of {measured['device']}, {len(turns['off'])} turns of "
        f"{measured['steps']} steps each, {measured['disk_ms']:g} ms per shard; same stream: "
        f"{measured['hash']:016x}."
    )
    return lines


def main() -> None:
    """Print the table, and where it was measured."""
    escape_unprintable()
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--turns", type=int, default=12, help="number of turns of each")
    parser.add_argument("--turn-steps", type=int, default=10, help="steps per turn")
    parser.add_argument("--config", type=Path, default=REPO / "configs/cpu_demo.env", help="settings")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings on top of it")
    parser.add_argument("--disk-ms", type=float, default=0.0, help="delay of each read of a shard")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = conditions()
    found = in_turns(arguments)
    if found:
        print("\n".join([described(before), "", *tables(found)]))


if __name__ == "__main__":
    main()
