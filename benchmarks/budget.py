"""Which shape fills a byte budget best: few weights of many bits, or many of few, at equal seconds.

    python benchmarks/budget.py --data DIR --tokenizer FILE --runs DIR [--seconds 120] [--steps 200]
        [--bytes 108000] [--width 64] [--layers 4] [--seeds 1337 42 2025] [--only base "width 1.25"]
        [--threads 1] [--keep]

Shapes vary one thing at a time from a base, and two that trade width for depth; the rest is the default stack
with the geometry of ablation.py. Each is trained for the same CPU seconds, or with --steps for as many steps
as cost what these cost the base (see ablation.py), calibrated, quantized by rate control into an artifact of
at most --bytes, read back and scored without overlap. So bits per weight follow from the shape: the table is
the frontier of the two. The default of --bytes is to 247,291 weights what 16,000,000 are to the default's
35,945,623. Runs are kept in DIR: several processes share the work, and what is there is not measured again.
Seconds count on this machine: a GPU gives wider layers for less.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # for torch: waiting threads would burn CPU seconds

import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks import ablation, paired, results  # noqa: E402
from train_gpt import GPT, Config, Hessians, Machine  # noqa: E402

TITLE = "Shapes that fill a budget of bytes"
BASE = "base"
HEADER = "| shape | weights | bits a weight | steps | float bpb | " + paired.HEADER.format(BASE)
CALIBRATION_BATCHES = 16


class Shape:
    """A model's width, depth and MLP ratio, and settings of its quantization."""

    def __init__(self, width: float = 1.0, layers: int = 0, mlp: float = 4.0, **settings: str) -> None:
        self.width = width  # times the base's
        self.layers = layers  # more than the base's
        self.mlp = mlp
        self.settings = settings

    def environment(self, width: int, layers: int) -> dict[str, str]:
        """The variables that make a model of this shape from a base of so many channels and layers."""
        channels = 16 * round(width * self.width / 16)  # two heads of an even size
        depth = layers + self.layers
        looped = max(0, min(1, depth - 2))
        return {
            "MODEL_DIM": str(channels), "NUM_LAYERS": str(depth), "MLP_MULT": str(self.mlp),
            "XSA_LAST_N": str(depth), "PARALLEL_START_LAYER": str(depth - 1),
            "LOOP_START": str(looped), "LOOP_END": str(looped), **self.settings,
        }  # fmt: skip


SHAPES = {
    BASE: Shape(),
    "width 0.75": Shape(width=0.75),
    "width 1.25": Shape(width=1.25),
    "width 1.5": Shape(width=1.5),
    "one layer less": Shape(layers=-1),
    "one layer more": Shape(layers=1),
    "two layers more": Shape(layers=2),
    "MLP 3x": Shape(mlp=3.0),
    "MLP 5x": Shape(mlp=5.0),
    "MLP 6x": Shape(mlp=6.0),
    "wider, one layer less": Shape(width=1.25, layers=-1),
    "narrower, two layers more": Shape(width=0.75, layers=2),
    # How the same bytes are divided: embeddings and MLP finer or coarser than the default has them.
    "finer embeddings": Shape(EMBED_CLIP_SIGMAS="10"),
    "coarser embeddings": Shape(EMBED_CLIP_SIGMAS="20"),
    "coarser MLP": Shape(MLP_CLIP_SIGMAS="15"),
}


def stacks(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Settings of every shape by its name."""
    asked = argparse.Namespace(
        data=arguments.data, tokenizer=arguments.tokenizer, seconds=arguments.seconds, steps=0,
        val_tokens=arguments.val_tokens, arm="parts",
    )  # fmt: skip
    default = ablation.stacks(asked)[ablation.DEFAULT]
    quantization = {
        **ablation.SHORT_AVERAGE, "GPTQ": "1", "GPTQ_DAMPING": "0.05", "GPTQ_RESERVE_SECONDS": "0",
        "RATE_CONTROL": "1", "ARTIFACT_BYTES_MAX": str(arguments.bytes),
    }  # fmt: skip
    return {
        name: {**default, **quantization, **shape.environment(arguments.width, arguments.layers)}
        for name, shape in SHAPES.items()
    }


class Trained(NamedTuple):
    """A model, and what its artifact is made from."""

    model: GPT
    hessians: Hessians
    steps: int
    seconds: float


@torch.no_grad()
def calibrated(model: GPT, config: Config, count: int = CALIBRATION_BATCHES) -> Hessians:
    """Hessians over the first batches of training."""
    shards = train_gpt.open_shards(f"{config.data_path}/fineweb_train_*.bin")
    with contextlib.closing(train_gpt.Loader(config, shards, Machine())) as loader:
        batches = [loader.next_batch() for _ in range(count)]
    return train_gpt.collect_hessians(model, batches, Machine())


def trained(config: Config, model: GPT, kind: str, batches: int = CALIBRATION_BATCHES) -> Trained:
    """A model after training by this clock of ablation.py, and calibrated with so many batches."""
    now = ablation.clock(kind)
    start = now()
    steps = ablation.train(config, model, now)
    seconds = now() - start
    return Trained(model, calibrated(model, config, batches), steps, seconds)


class Shipped(NamedTuple):
    """A model as its artifact gives it back, and what the artifact took."""

    model: GPT
    bytes: int
    line: str  # what writing it says for the log
    write_seconds: float  # of the CPU
    read_seconds: float


def ship(found: Trained, config: Config) -> Shipped:
    """Write the artifact of a model within ARTIFACT_BYTES_MAX, and read it."""
    start = time.process_time()
    data, line = train_gpt.write_artifact(
        found.model, config, found.hessians, "0" * 64, config.artifact_bytes_max)
    written = time.process_time()
    model, _ = train_gpt.load_artifact(Path("model.bin"), data)
    read = time.process_time()
    return Shipped(model, len(data), line, written - start, read - written)


def figures(found: Trained, config: Config, seed: int) -> dict[str, Any]:
    """Ship a model into the budget of a config, and score it before and after."""
    shards = train_gpt.open_shards(f"{config.data_path}/fineweb_val_[0-9]*.bin")
    validation = train_gpt.read_validation(shards, config)
    looping = train_gpt.loop_is_on(1.0, config)

    def score(model: GPT) -> float:
        ledger = train_gpt.score_roundtrip(model, validation.tokens, config, looping=looping)
        return ledger.score(validation.bytes_total).bits_per_byte

    shipped = ship(found, config)
    return {
        "seed": seed, "parameters": sum(parameter.numel() for parameter in found.model.parameters()),
        "steps": found.steps, "seconds": found.seconds, "float_bpb": score(found.model),
        "bytes": shipped.bytes, "write_seconds": shipped.write_seconds, "read_seconds": shipped.read_seconds,
        "val_bpb": score(shipped.model),
    }  # fmt: skip


def measure(settings: dict[str, str], seed: int, kind: str) -> dict[str, Any]:
    """Train a shape, ship it into the budget, score it before and after."""
    config = Config.from_env({**settings, "SEED": str(seed)})
    return figures(trained(config, train_gpt.build_model(config), kind), config, seed)


def bits_per_weight(runs: paired.Runs) -> float:
    """Bits that a weight has in the artifact, head and scales included."""
    return 8 * statistics.mean(run["bytes"] for run in runs) / float(runs[0]["parameters"])


def row(name: str, runs: paired.Runs, base: paired.Runs) -> str:
    """A line of the table; the difference is taken seed by seed."""
    before = statistics.mean(run["float_bpb"] for run in runs)
    steps = statistics.mean(run["steps"] for run in runs)
    weights = f"{runs[0]['parameters']:,} | {bits_per_weight(runs):.2f}"
    return f"| {name} | {weights} | {steps:.0f} | {before:.4f} | {paired.cells(runs, base)}"


def tables(measured: dict[str, Any]) -> list[str]:
    """What was held equal, a line per shape from the smallest to the largest, and the best of them."""
    rows: dict[str, paired.Runs] = measured["rows"]
    base = rows.get(BASE, [])
    by_size = sorted(rows, key=lambda name: (rows[name][0]["parameters"], name))
    best = min(rows, key=lambda name: statistics.mean(run["val_bpb"] for run in rows[name]))
    seeds = sorted({run["seed"] for runs in rows.values() for run in runs})
    length = f"{measured['seconds']:g} CPU seconds of training"
    if measured.get("steps"):
        length = f"{measured['steps']} steps of training of the base, as many of the others as cost the same"
    return [
        f"`{measured['data']}`, artifacts of at most {measured['bytes']:,} bytes (weights alone); "
        f"{length}; base {measured['layers']} layers × "
        f"{measured['width']}, MLP 4x; seeds {' '.join(map(str, seeds))}; {measured['val_tokens']:,} "
        "validation targets, bits per byte before quantizing and of the artifact. Best: "
        f"{best}, {bits_per_weight(rows[best]):.2f} bits a weight.",
        "", *paired.table(HEADER, [row(name, rows[name], base) for name in by_size]),
    ]  # fmt: skip


def main() -> None:
    """Measure what is not measured yet, print the table, and with --keep store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of fineweb_{train,val}_*.bin")
    parser.add_argument("--tokenizer", type=Path, required=True, help="SentencePiece model of these shards")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs, one file each")
    parser.add_argument("--steps", type=int, default=0, help="of the base's training, instead of seconds")
    parser.add_argument("--bytes", type=int, default=108_000, help="limit of the artifact, without code")
    parser.add_argument("--width", type=int, default=64, help="channels of the base")
    parser.add_argument("--layers", type=int, default=4, help="layers of the base")
    parser.add_argument("--val-tokens", type=int, default=200_000, help="targets to score; 0: all")
    paired.add_options(parser, list(SHAPES))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    before = results.conditions()
    every = stacks(arguments)
    stack = {name: every[name] for name in arguments.only}
    measured: dict[str, Any] = {
        "data": arguments.data.name, "seconds": arguments.seconds, "bytes": arguments.bytes,
        "width": arguments.width, "layers": arguments.layers, "val_tokens": arguments.val_tokens,
    }  # fmt: skip
    if arguments.steps:
        measured["steps"] = arguments.steps
    warm = {**every[BASE], "MAX_WALLCLOCK_SECONDS": "1", "VAL_TOKENS_LIMIT": "2000"}
    ablation.measure(warm, 0, "cpu")  # thread pools and caches
    length = f"{arguments.seconds:g}s"
    if arguments.steps:
        stack = ablation.of_equal_cost(arguments.runs, stack, arguments.steps)
        length = f"{arguments.steps}steps"
    name = f"budget-{arguments.data.name}-{arguments.bytes}-{length}"
    ablation.finish_shared(name, arguments, arguments.runs, stack, "cpu", before, measured, measure)


if __name__ == "__main__":
    main()
