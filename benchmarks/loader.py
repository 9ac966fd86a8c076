"""What the loader costs, and what a step loses to it: one table from one run, on the host's CPU.

    python benchmarks/loader.py                    # about 3 minutes and 0.6 GB of temporary disk
    python benchmarks/loader.py --keep             # the same, kept in benchmarks/results/ and RESULTS.md
    python benchmarks/loader.py --turns 12         # steps of a run with and without TRAIN_PREFETCH, in turns
    torchrun --standalone --nproc_per_node=2 benchmarks/loader.py --turns 12 --disk-ms 50

The turns are of --config, with --set on top, on whatever device it finds; --disk-ms delays each read of a
shard. Both ways must give the same losses and the same stream hash.

Beside ours stand plain re-implementations, from their descriptions, of what public loaders do per batch: the
baseline (contiguous span to int64, next shard read in the step), PR #591 (the same in a thread, two batches
ahead) and PR #1532 (a shard drawn by weight for every sequence, rows to int64, a thread 100 batches ahead).
Pinning and the bus are left out: they need a GPU.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
import train_gpt  # noqa: E402
from benchmarks import results, stepping  # noqa: E402
from data.shards import HEADER_BYTES, TOKEN_DTYPE, read_shard, write_shard  # noqa: E402

TITLE = "Loader"
SEQ_LEN = 2048
STEP_TOKENS = 786_432
RANKS = 8
SHARD_STEPS = 127  # a shard of 100 M tokens lasts so long
STEP_SECONDS = 0.083
START_STEPS = 20  # start-up, not counted
APART_SECONDS = 2.0  # so that no two designs read a shard at once
LATENCIES_SECONDS = (0.0, 0.1, 4.0)
MEMCPY, OURS, DRAWN = "memcpy of the same bytes", "ours: staging", "#1532: weighted draws, int64 rows"
HASH, STARTS = "ours: stream hash", "ours: document starts"
DOCUMENT_TOKENS = 1000  # about the mean of FineWeb
DESIGNS = ("baseline", "#591", "#1532", "ours, TRAIN_PREFETCH=0", "ours")
ALONE = train_gpt.Machine()
UNWRITTEN = Path(tempfile.gettempdir()) / "turns"  # the same on all ranks


def load_shard(shard: Any, latency_seconds: float) -> np.ndarray:
    """A whole shard into memory, as the baseline does it."""
    time.sleep(latency_seconds)
    return np.fromfile(shard.path, TOKEN_DTYPE, offset=HEADER_BYTES)


class Contiguous:
    """Baseline: a rank takes its one of the next `ranks` spans; a shard is read when the last is used up."""

    def __init__(self, shards: list[Any], tokens: int, ranks: int, latency_seconds: float = 0.0) -> None:
        self.shards = shards
        self.tokens = tokens
        self.ranks = ranks
        self.latency_seconds = latency_seconds
        self.number = 0
        self.position = 0
        self.data = load_shard(shards[0], 0.0)

    def span(self) -> np.ndarray:
        need = self.ranks * (self.tokens + 1)
        if self.position + need > len(self.data):
            self.number = (self.number + 1) % len(self.shards)
            self.position = 0
            self.data = load_shard(self.shards[self.number], self.latency_seconds)
        span = self.data[self.position : self.position + self.tokens + 1]
        self.position += need
        return span

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        wide = self.span().astype(np.int64)
        return wide[:-1].reshape(-1, SEQ_LEN), wide[1:].reshape(-1, SEQ_LEN)


class ContiguousPairs(Contiguous):
    """PR #591's producer: inputs and targets as two int64 arrays of their own."""

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        span = self.span()
        return span[:-1].astype(np.int64).reshape(-1, SEQ_LEN), span[1:].astype(np.int64).reshape(-1, SEQ_LEN)


class WeightedDraw:
    """PR #1532's producer: for every sequence a shard, drawn by what it has left, and its next start."""

    def __init__(self, shards: list[Any], tokens: int) -> None:
        self.rng = np.random.default_rng(0)
        self.rows = tokens // SEQ_LEN
        self.maps = [read_shard(shard.path) for shard in shards]
        self.starts = [SEQ_LEN * self.rng.permutation((len(m) - 1) // SEQ_LEN) for m in self.maps]
        self.left = [list(starts) for starts in self.starts]

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        inputs = np.empty((self.rows, SEQ_LEN), np.int64)
        targets = np.empty((self.rows, SEQ_LEN), np.int64)
        for row in range(self.rows):
            weights = np.array([len(left) for left in self.left], np.float64)
            if not weights.any():
                self.left = [list(starts) for starts in self.starts]
                weights = np.array([len(left) for left in self.left], np.float64)
            shard = int(self.rng.choice(len(self.left), p=weights / weights.sum()))
            start = int(self.left[shard].pop())
            window = self.maps[shard][start : start + SEQ_LEN + 1]
            inputs[row] = window[:-1]
            targets[row] = window[1:]
        return inputs, targets


class Ahead:
    """A producer in a daemon thread behind a bounded queue."""

    def __init__(self, producer: Any, depth: int) -> None:
        self.queue: queue.Queue[Any] = queue.Queue(depth)
        self.producer = producer
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            self.queue.put(self.producer.next())

    def next(self) -> Any:
        return self.queue.get()


def make_config(**changes: Any) -> Any:
    values = {"train_seq_len": SEQ_LEN, "train_batch_tokens": STEP_TOKENS, "micro_batch_tokens": STEP_TOKENS}
    return dataclasses.replace(train_gpt.Config.from_env({}), **(values | changes))


def times_ms(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CPU time of this thread in ms, over interleaved rounds, so that all meet the same machine."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 3):
        for name, function in functions.items():
            start = time.thread_time()
            function()
            times[name].append(1e3 * (time.thread_time() - start))
    return {name: values[3:] for name, values in times.items()}


def staging(shards: list[Any], rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds of the thread that builds one step of 786,432 tokens, by design."""
    rows = STEP_TOKENS // SEQ_LEN
    at = 0
    slot = np.zeros(rows * (SEQ_LEN + 1), np.uint16)
    ids_BT = slot.reshape(rows, SEQ_LEN + 1)
    data = load_shard(shards[0], 0.0)
    loader = train_gpt.Loader(make_config(train_prefetch=False), shards, ALONE)
    segments = (segments_NM[number] for segments_NM, order in loader._read(0) for number in order)

    def memcpy() -> None:
        nonlocal at
        at = (at + len(slot)) % (len(data) - len(slot))
        np.copyto(slot, data[at : at + len(slot)])

    def gather() -> None:
        np.concatenate(list(itertools.islice(segments, rows)), out=slot)

    gather()
    functions: dict[str, Callable[[], Any]] = {
        MEMCPY: memcpy,
        OURS: gather,
        HASH: lambda: train_gpt.hash_sequences(0, ids_BT),
        STARTS: lambda: train_gpt.document_starts(ids_BT[:, :-1], make_config()),
        "baseline: contiguous, one int64 array": Contiguous(shards, STEP_TOKENS, 1).next,
        "#591: contiguous, two int64 arrays": ContiguousPairs(shards, STEP_TOKENS, 1).next,
        DRAWN: WeightedDraw(shards, STEP_TOKENS).next,
    }
    return times_ms(functions, rounds)


def whole_ms(shards: list[Any], prefetch: bool, rounds: int) -> list[float]:
    """Wall times of `next_batch()` in ms, the consumer idle between the calls."""
    config = make_config(train_prefetch=prefetch)
    times = []
    with contextlib.closing(train_gpt.Loader(config, shards, ALONE)) as loader:
        for _ in range(rounds + 3):
            start = time.perf_counter()
            loader.next_batch()
            times.append(1e3 * (time.perf_counter() - start))
            time.sleep(0.01)
    return times[3:]


def handover_ms(shards: list[Any], batches: int = 2000) -> list[float]:
    """Times of `next_batch()` for one sequence: queue, bookkeeping and the smallest tensors."""
    config = make_config(train_batch_tokens=SEQ_LEN, micro_batch_tokens=SEQ_LEN)
    times = []
    with contextlib.closing(train_gpt.Loader(config, shards, ALONE)) as loader:
        for _ in range(batches):
            time.sleep(0.0003)
            start = time.perf_counter()
            loader.next_batch()
            times.append(round(1e3 * (time.perf_counter() - start), 4))
    return times


def simulate(design: str, folder: str, latency_seconds: float, steps: int) -> list[float]:
    """Rank 0 of 8 with steps of 83 ms: the ms that each waits for its batch, every shard's read delayed."""
    shards = train_gpt.open_shards(f"{folder}/*.bin")
    tokens = STEP_TOKENS // RANKS
    real = train_gpt.read_tokens

    def slow(*args: Any, **options: Any) -> np.ndarray:
        time.sleep(latency_seconds)
        return real(*args, **options)

    train_gpt.read_tokens = slow
    if design.startswith("ours"):
        config = make_config(train_prefetch=design == "ours")
        one_of_many = train_gpt.Machine(rank=0, world_size=RANKS)
        loader = train_gpt.Loader(config, shards, one_of_many)

        def wait() -> float:
            loader.wait_ms = 0.0
            loader.next_batch()
            return loader.wait_ms / 1e3  # without the widening, which is the GPU's work

    else:
        following = {
            "baseline": lambda: Contiguous(shards, tokens, RANKS, latency_seconds).next,
            "#591": lambda: Ahead(ContiguousPairs(shards, tokens, RANKS, latency_seconds), 2).next,
            "#1532": lambda: Ahead(WeightedDraw(shards, tokens), 100).next,
        }[design]()

        def wait() -> float:
            start = time.perf_counter()
            following()
            return time.perf_counter() - start

    waits = []
    for _ in range(steps):
        waits.append(wait())
        time.sleep(STEP_SECONDS)
    return [round(1e3 * seconds, 3) for seconds in waits[START_STEPS:]]


def end_to_end(folder: Path, steps: int) -> dict[str, dict[str, list[float]]]:
    """Waits in ms by design and latency, in processes of their own; at one latency they start apart."""
    waits: dict[str, dict[str, list[float]]] = {design: {} for design in DESIGNS}
    for latency in LATENCIES_SECONDS:
        processes = {}
        for design in DESIGNS:
            command = [sys.executable, __file__, "--simulate", design, str(folder), str(latency), str(steps)]
            processes[design] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            time.sleep(APART_SECONDS)
        for design, process in processes.items():
            output = process.communicate()[0]
            if process.returncode:
                raise SystemExit(f"{design} failed")
            waits[design][f"{latency:g}"] = json.loads(output)
    return waits


# -- steps of a run, in turns --------------------------------------------------------------------------------


def prepared(arguments: argparse.Namespace, prefetch: int, machine: Any) -> Any:
    """A training that is ready for its first step, and writes nothing."""
    more = {"TRAIN_PREFETCH": str(prefetch), "RUN_ID": f"prefetch{prefetch}", "WARMUP_STEPS": "0"}
    config = train_gpt.Config.from_env(stepping.settings(arguments.config, UNWRITTEN, arguments.set, **more))
    run = train_gpt.Run(machine or train_gpt.this_machine(config, os.environ))
    run.log = lambda *line, **event: None  # type: ignore[method-assign]
    inputs = train_gpt.preflight(config, run, "")
    training = train_gpt.Training(
        config, run, inputs.train_shards, inputs.validation, inputs.chosen.ops, inputs.hashes)  # fmt: skip
    train_gpt.warm_up(training)
    return training


def turn(training: Any, steps: int) -> tuple[float, float, float, list[float]]:
    """Milliseconds a step by the clock, by the CPU clock of all threads, and waited for; the losses."""
    begun = time.perf_counter(), time.process_time()
    taken = stepping.timed_steps(training, steps)
    wall_ms = 1e3 * (time.perf_counter() - begun[0]) / steps
    # The batches made ahead belong to this turn: as many as it has taken.
    for pool in training.loader.pools:
        pool.submit(int).result()
    cpu_ms = 1e3 * (time.process_time() - begun[1]) / steps
    return wall_ms, cpu_ms, float(np.mean(taken.wait_ms)), taken.losses


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


def turns_table(measured: dict[str, Any]) -> list[str]:
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


def tables(measured: dict[str, Any]) -> list[str]:
    """The tables of RESULTS.md from the raw times: the turns, or both of the designs."""
    if "turns" in measured:
        return turns_table(measured)
    median = {name: float(np.median(ms)) for name, ms in measured["staging_ms"].items()}
    lines = ["| per step of 786,432 tokens | CPU ms | Mtok/s | × memcpy |", "|---|---|---|---|"]
    for name, ms in median.items():
        lines.append(f"| {name} | {ms:.3f} | {STEP_TOKENS / ms / 1e3:.0f} | {ms / median[MEMCPY]:.1f} |")
    for label, whole in measured["next_batch_ms"].items():
        lines.append(f"| {label} `next_batch()` on the CPU | {np.median(whole):.3f} | | |")
    all_of_ours = median[OURS] + median[HASH] + median[STARTS]
    handover_us = 1e3 * float(np.median(measured["handover_ms"]))
    lines += [
        "",
        f"Medians of {len(measured['staging_ms'][OURS])} interleaved rounds. Staging, hash and starts take "
        f"{all_of_ours / median[DRAWN]:.2f} of what #1532's rows do, which have neither and are int64; "
        f"handing a batch over costs the main thread {handover_us:.0f} µs. "
        "The `next_batch()` rows are wall time in the caller's thread and include the widening to int64, "
        "which a GPU does itself.",
        "",
    ]
    latencies = next(iter(measured["waits_ms"].values()))
    head = " | ".join(f"{latency} s: lost s/100 steps, p99 ms, longest ms" for latency in latencies)
    lines += [f"| injected per shard | {head} |", "|---|" + "---|" * len(latencies)]
    for design, by_latency in measured["waits_ms"].items():
        cells = [
            f"{np.mean(waits) / 10:.3f}, {np.percentile(waits, 99):.1f}, {max(waits):.1f}"
            for waits in by_latency.values()
        ]
        lines.append(f"| {design} | {' | '.join(cells)} |")
    counted = len(next(iter(by_latency.values())))
    lines += [
        "",
        f"Rank 0 of {RANKS}, steps of {1e3 * STEP_SECONDS:.0f} ms of which {counted} are counted, after the "
        f"first {START_STEPS}; a shard every {SHARD_STEPS}. #1532 maps all shards at the start: no boundary "
        "comes later.",
    ]
    return lines


def main() -> None:
    """Print the tables; with --keep store them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31, help="interleaved rounds per staging measurement")
    parser.add_argument("--steps", type=int, default=2 * SHARD_STEPS + 30, help="steps per end-to-end run")
    parser.add_argument("--keep", action="store_true", help="store them in results/, turns not in RESULTS.md")
    parser.add_argument("--name", default="turns", help="of the kept turns, in results/loader/")
    parser.add_argument("--turns", type=int, default=0, help="turns with and as many without prefetch")
    parser.add_argument("--turn-steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--config", type=Path, default=REPO / "configs/cpu_demo.env", help="of these turns")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings on top of it")
    parser.add_argument("--disk-ms", type=float, default=0.0, help="added to each read of a shard, in turns")
    parser.add_argument("--simulate", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.simulate:
        design, place, latency, steps = arguments.simulate
        print(json.dumps(simulate(design, place, float(latency), int(steps))))
        return
    before = results.conditions()
    if arguments.turns:
        found = in_turns(arguments)
        if found:
            results.finish("loader-turns", before, found, keep=False)
            if arguments.keep:
                kept = {"benchmark": "loader", "conditions": before, "measured": found}
                path = results.FOLDER / "loader" / f"{arguments.name}.json"
                results.write_text(path, json.dumps(kept, indent=1) + "\n")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shard_tokens = SHARD_STEPS * (STEP_TOKENS + RANKS)
        for number in range(3):
            random = np.random.default_rng(number)
            ids = random.integers(2, 1024, shard_tokens, np.uint16)
            ids[random.integers(0, shard_tokens, shard_tokens // DOCUMENT_TOKENS)] = train_gpt.BOS_ID
            write_shard(folder / f"shard_{number}.bin", ids)
        shards = train_gpt.open_shards(str(folder / "*.bin"))
        rounds = arguments.rounds
        ways = {"synchronous": False, "prefetching": True}
        measured = {
            "staging_ms": staging(shards, rounds),
            "next_batch_ms": {name: whole_ms(shards, ahead, rounds) for name, ahead in ways.items()},
            "handover_ms": handover_ms(shards),
            "waits_ms": end_to_end(folder, arguments.steps),
        }
    results.finish("loader", before, measured, arguments.keep)


if __name__ == "__main__":
    main()
