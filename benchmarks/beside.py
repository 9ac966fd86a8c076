"""A public training script beside this one on a CPU: tokens per second, and bits per byte at equal seconds.

    python benchmarks/beside.py ~/parameter-golf/train_gpt.py --data data/datasets/fineweb_sample_sp1024
        --tokenizer data/tokenizers/fineweb_1024_bpe.model --runs DIR [--config configs/cpu_demo.env]
        [--set NAME=VALUE ...] [--seconds 180] [--clock cpu] [--seeds 1337 42 2025]
        [--only speed theirs ours] [--keep]

PATH is your own copy of a script in the manner of the challenge's baseline; `benchmarks/upstream.py` runs it,
with its own defaults but for what must be equal: the config's width, depth, heads, MLP, vocabulary, sequence
length and tokens a step. Ours has the settings of the config and of --set. Both get the same seconds of one
thread, by the wall or by the CPU, which other programs on the machine spoil less; each then quantizes, and is
scored without overlap on the same first part of the validation text. `speed` takes turns of a few steps:
theirs, ours with the model and the optimizer settings of theirs (`upstream_baseline.env`), ours.

Runs are kept in DIR, and several processes started alike share the work: two of them run theirs and ours
side by side, each on a core of its own, swapped from seed to seed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # for torch: waiting threads would burn CPU seconds
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also in the thread that a public script runs in

import numpy as np
import torch
from torch import Tensor

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks import ablation, paired, results, speed, tune  # noqa: E402
from benchmarks.turns import Turns  # noqa: E402
from benchmarks.upstream import TrainingClock, Upstream, UpstreamError, batches  # noqa: E402
from train_gpt import Config  # noqa: E402

TITLE = "The challenge's own script beside this one"
SIDES = ["speed", "theirs", "ours"]
SPEED_HEADER = "| script | CPU ms a step | p20 | p80 | tokens/s | times theirs | n |"
SCORE_HEADER = (
    "| script | parameters | steps | float bpb | weights, bytes | code, bytes | "
    + paired.HEADER.format("theirs")
)  # fmt: skip
SPEED_TURNS = 8
SCORED_ROWS = 64  # sequences of a batch


class Race:
    """What both sides have in common."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.path: Path = arguments.path
        self.clock: str = arguments.clock
        self.seeds: list[int] = arguments.seeds
        self.ours = {
            "CONFIG": str(arguments.config), "DATA_PATH": str(arguments.data), "DEVICE": "cpu",
            "TOKENIZER_PATH": str(arguments.tokenizer), "MAX_WALLCLOCK_SECONDS": str(arguments.seconds),
            "ITERATIONS": "1000000", "GPTQ_RESERVE_SECONDS": "0", "VAL_TOKENS_LIMIT": "0",
            **dict(item.split("=", 1) for item in arguments.set),
        }  # fmt: skip
        config = Config.from_env(self.ours)
        source = (REPO / "train_gpt.py").read_bytes()
        self.code_bytes = len(train_gpt.shipped_code(source, config.code_bytes))
        # Whole sequences, so that both score the same targets with the same context.
        targets = arguments.val_tokens // config.train_seq_len * config.train_seq_len
        self.ours["VAL_TOKENS_LIMIT"] = str(targets)
        self.ours["ARTIFACT_BYTES_MAX"] = str(config.artifact_bytes_max - self.code_bytes)
        self.config = Config.from_env(self.ours)

    def geometry(self) -> dict[str, str]:
        """What must be equal, by the names that both sides have."""
        c = self.config
        return {
            "VOCAB_SIZE": str(c.vocab_size), "NUM_LAYERS": str(c.num_layers), "MODEL_DIM": str(c.model_dim),
            "NUM_HEADS": str(c.num_heads), "NUM_KV_HEADS": str(c.num_kv_heads),
            "MLP_MULT": f"{c.mlp_mult:g}", "TRAIN_SEQ_LEN": str(c.train_seq_len),
            "TRAIN_BATCH_TOKENS": str(c.train_batch_tokens),
        }  # fmt: skip

    def as_theirs(self) -> dict[str, str]:
        """Our settings for their model and optimizer."""
        given = {name: self.ours[name] for name in ("DATA_PATH", "TOKENIZER_PATH", "DEVICE")}
        return {
            **given, **self.geometry(), "CONFIG": str(REPO / "configs/upstream_baseline.env"),
            "MICRO_BATCH_TOKENS": str(self.config.train_batch_tokens), "VAL_BATCH_SIZE": "65536",
        }  # fmt: skip

    def batches(self) -> Any:
        """What theirs trains on, endlessly: it reads shards in their order, again after the last one."""
        c = self.config
        while True:
            yield from batches(
                Path(c.data_path), c.train_batch_tokens // c.train_seq_len, c.train_seq_len)

    def use_core(self, side: str, seed: int) -> None:
        """One of two cores for each side, the other one for the next seed."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(cores) > 1:
            place = (self.seeds.index(seed) + SIDES.index(side)) % 2
            os.sched_setaffinity(0, {cores[place]})

    def measure(self, settings: dict[str, str], seed: int, clock: str) -> dict[str, Any]:
        """One side with one seed."""
        side = settings["SIDE"]
        if side == "speed":
            return {"seed": seed, **self.speeds(seed)}
        all_cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        self.use_core(side, seed)
        try:
            return self.theirs(seed) if side == "theirs" else tune.measure(self.ours, seed, clock)
        finally:
            if all_cores is not None:
                os.sched_setaffinity(0, all_cores)

    def theirs(self, seed: int) -> dict[str, Any]:
        """Train their script by the clock; score its weights as they are, and as it would ship them."""
        clock = TrainingClock(ablation.clock(self.clock), self.config.max_wallclock_seconds)
        with Upstream(self.path, {**self.geometry(), "SEED": str(seed)}, clock) as upstream:
            feed = self.batches()
            while not clock.is_over:
                upstream.step(*next(feed))
            seconds = clock.seconds
            float_bpb = self.score(upstream)
            size_bytes = upstream.ship()
            return {
                "seed": seed, "parameters": upstream.parameters_count, "steps": upstream.steps,
                "seconds": seconds, "float_bpb": float_bpb, "bytes": size_bytes,
                "val_bpb": self.score(upstream),
            }  # fmt: skip

    def score(self, upstream: Upstream) -> float:
        """Bits per byte of their model on the first part of the validation text, without overlap."""
        c = self.config
        shards = train_gpt.open_shards(f"{c.data_path}/fineweb_val_[0-9]*.bin")
        validation = train_gpt.read_validation(shards, c)
        tokens = torch.from_numpy(validation.tokens.astype(np.int64))
        inputs_NT = tokens[:-1].view(-1, c.train_seq_len)
        targets_NT = tokens[1:].view(-1, c.train_seq_len)
        nats = 0.0
        for start in range(0, len(inputs_NT), SCORED_ROWS):
            rows = slice(start, start + SCORED_ROWS)
            nats += upstream.loss(inputs_NT[rows], targets_NT[rows]) * targets_NT[rows].numel()
        return nats / math.log(2) / validation.bytes_total

    def speeds(self, seed: int) -> dict[str, Any]:
        """CPU milliseconds of the steps of theirs, ours as theirs, and ours, in turns."""
        taken: dict[str, list[float]] = {"theirs": [], "ours as theirs": [], "ours": []}
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
            upstream = ends.enter_context(Upstream(self.path, {**self.geometry(), "SEED": str(seed)}))
            feed = self.batches()
            turns = {}
            for name, given in (("ours as theirs", self.as_theirs()), ("ours", self.ours)):
                unpaced = {"ARTIFACT_BYTES_MAX": "16000000", "RATE_CONTROL": "0", "WARMUP_STEPS": "0"}
                settings = speed.settings(Path(given["CONFIG"]), Path(folder), [])
                settings = {**given, **settings, **unpaced, "RUN_ID": name.replace(" ", "-")}
                turns[name] = ends.enter_context(Turns(REPO / "train_gpt.py", settings))
            for turn in range(SPEED_TURNS + 1):
                new = {name: ours.steps(speed.TURN_STEPS).cpu_ms for name, ours in turns.items()}
                new["theirs"] = self.cpu_ms(upstream, [next(feed) for _ in range(speed.TURN_STEPS)])
                for name, cpu_ms in new.items():
                    taken[name] += cpu_ms if turn else []  # the first steps allocate
        return taken

    def cpu_ms(self, upstream: Upstream, steps: list[tuple[Tensor, Tensor]]) -> list[float]:
        """CPU milliseconds of these steps."""
        found = []
        for inputs_BT, targets_BT in steps:
            start = time.process_time()
            upstream.step(inputs_BT, targets_BT)
            found.append(1e3 * (time.process_time() - start))
        return found


def speed_lines(runs: paired.Runs, step_tokens: int) -> list[str]:
    """The table of step times."""
    lines = []
    for name in ("theirs", "ours as theirs", "ours"):
        all_ms = [ms for run in runs for ms in run[name]]
        theirs_ms = [ms for run in runs for ms in run["theirs"]]
        low, *_, high = statistics.quantiles(all_ms, n=5)
        median_ms = statistics.median(all_ms)
        pairs = zip(speed.means_of_turns(all_ms), speed.means_of_turns(theirs_ms), strict=True)
        times = statistics.median(theirs / ours for ours, theirs in pairs)
        per_second = step_tokens / median_ms * 1e3
        lines.append(
            f"| {name} | {median_ms:.1f} | {low:.1f} | {high:.1f} | {per_second:,.0f} | {times:.2f} | "
            f"{len(all_ms)} |"
        )
    return ["", *paired.table(SPEED_HEADER, lines)]


def score_lines(rows: dict[str, paired.Runs], code_bytes: dict[str, int]) -> list[str]:
    """The table of scores, and the differences seed by seed."""
    lines = []
    theirs = rows.get("theirs", [])
    for name in ("theirs", "ours"):
        runs = rows.get(name, [])
        if runs:
            steps, float_bpb, size_bytes = (
                statistics.mean(run[figure] for run in runs) for figure in ("steps", "float_bpb", "bytes")
            )
            lines.append(
                f"| {name} | {runs[0]['parameters']:,} | {steps:.0f} | {float_bpb:.4f} | {size_bytes:,.0f} | "
                f"{code_bytes[name]:,} | {paired.cells(runs, theirs)}"
            )
    reference = {run["seed"]: run["val_bpb"] for run in theirs}
    gains = [
        f"{run['seed']}: {run['val_bpb'] - reference[run['seed']]:+.4f}"
        for run in rows.get("ours", []) if run["seed"] in reference
    ]  # fmt: skip
    told = ["", f"Ours minus theirs, seed by seed: {', '.join(gains)}."] if gains else []
    return ["", *paired.table(SCORE_HEADER, lines), *told]


def tables(measured: dict[str, Any]) -> list[str]:
    """What was equal, the speeds, the scores."""
    rows: dict[str, paired.Runs] = measured["rows"]
    geometry = " ".join(f"{name}={value}" for name, value in measured["geometry"].items())
    told = " ".join([measured["config"], *measured["set"]])
    lines = [
        f"`{measured['data']}`, {geometry}. Theirs: `{measured['public']}` of {measured['sha256']}, with its "
        "own defaults for everything else, in fp32 and without a compiler; ours as theirs: "
        f"`upstream_baseline.env` at this geometry; ours: `{told}`. One thread each; scores "
        f"after {measured['seconds']:g} s of training by the {measured['clock']} clock, without overlap, on "
        f"the first {measured['val_targets']:,} targets of the validation text: float, of the weights before "
        "quantization; val_bpb, of what is shipped. Code: theirs plain, ours wrapped, as each counts it.",
    ]  # fmt: skip
    if "speed" in rows:
        lines += speed_lines(rows["speed"], int(measured["geometry"]["TRAIN_BATCH_TOKENS"]))
    if "theirs" in rows or "ours" in rows:
        lines += score_lines(rows, measured["code_bytes"])
    return lines


def main() -> None:
    """Measure what is not measured yet, print the tables, and with --keep store them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="your copy of a public train_gpt.py")
    parser.add_argument("--data", type=Path, required=True, help="folder of fineweb_{train,val}_*.bin")
    parser.add_argument("--tokenizer", type=Path, required=True, help="SentencePiece model of these shards")
    parser.add_argument("--config", type=Path, default=REPO / "configs/cpu_demo.env")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings on top of it")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs, one file each")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="cpu")
    parser.add_argument("--val-tokens", type=int, default=200_000, help="targets to score")
    paired.add_options(parser, SIDES)
    parser.set_defaults(seconds=180.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = results.conditions()
    race = Race(arguments)
    theirs = arguments.path.read_bytes()
    measured: dict[str, Any] = {
        "data": arguments.data.name, "config": arguments.config.name, "set": arguments.set,
        "geometry": race.geometry(),
        "public": arguments.path.name, "sha256": train_gpt.hashlib.sha256(theirs).hexdigest()[:12],
        "seconds": arguments.seconds, "clock": arguments.clock,
        "val_targets": race.config.val_tokens_limit,
        "code_bytes": {"theirs": len(theirs), "ours": race.code_bytes},
    }  # fmt: skip
    stack = {side: {"SIDE": side} for side in arguments.only}
    name = f"beside-{arguments.data.name}-{arguments.seconds:g}s"
    try:
        ablation.finish_shared(
            name, arguments, arguments.runs, stack, arguments.clock, before, measured, race.measure)
    except UpstreamError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
