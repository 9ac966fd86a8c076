"""Race a public training script against this one: bits per byte after equal seconds on one CPU core.

    python benchmarks/beside.py ~/parameter-golf/train_gpt.py --seconds 60
        [--seeds 42 1337 2025] [--only theirs ours ...] [--runs DIR]
        [--config configs/cpu_demo.env] [--set NAME=VALUE ...]
        [--theirs NAME=VALUE ...] [--as-theirs configs/pr549.env]
        [--data data/datasets/fineweb_sample_sp1024 --tokenizer data/tokenizers/fineweb_1024_bpe.model]

PATH is your own copy of a script that `benchmarks/upstream.py` can run. Unless it is the challenge's own
baseline, name the copy something other than `train_gpt.py`, such as `pr549_train_gpt.py`. The sides:

    theirs             PATH with its own defaults, reading the shards as it does; --theirs changes settings
    theirs-shuffled    the same on the sequences that ours trains on
    as-theirs          this script with their model and their optimizer settings, reading the shards in order
    as-theirs-shuffled the same on shuffled sequences
    ours-in-order      this script with the settings of --config and --set, reading the shards in order
    ours               the same on shuffled sequences

`as-theirs` minus `theirs` is what the implementation gains, and `ours` minus `as-theirs` what the recipe
gains. All sides share the config's width, depth, heads, MLP, vocabulary, sequence length and tokens per step,
and get the same CPU seconds of training. Each is then scored in windows that don't overlap, on the same first
part of the validation text: after quantization, or before it if PATH doesn't quantize like the baseline. If
PATH keeps an average of its weights, both the average and the last weights are scored, and the better counts.

Run it again to continue: finished runs in DIR are kept.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

# One thread on every side, before torch is imported: waiting threads would burn CPU seconds.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["GOMP_SPINCOUNT"] = "0"

import numpy as np
import torch
from torch import Tensor

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks.conditions import conditions, described  # noqa: E402
from benchmarks.upstream import TrainingClock, Upstream, UpstreamError, batches, in_our_names  # noqa: E402
from data import sample  # noqa: E402
from data.files import DataError, escape_unprintable, sha256_file  # noqa: E402
from tools.compare.driver import directory_of, locked, run_once  # noqa: E402
from tools.compare.overview import read_row  # noqa: E402
from tools.compare.rows import Row  # noqa: E402
from tools.compare.sweep import table_of  # noqa: E402
from tools.runs.errors import RecordError  # noqa: E402
from tools.runs.folder import required_object  # noqa: E402
from tools.runs.logs import STAGES  # noqa: E402
from tools.runs.runs import SUMMARY  # noqa: E402
from tools.runs.settings import UNSET  # noqa: E402
from tools.runs.writing import columns, write_text  # noqa: E402
from train_gpt import Config, ConfigError, Machine  # noqa: E402

SAMPLE = REPO / "data" / "datasets" / sample.NAME
TOKENIZER = REPO / "data" / "tokenizers" / sample.TOKENIZER_FILE
OUR_SCRIPT = REPO / "train_gpt.py"
BY_THE_CPU_CLOCK = [sys.executable, str(REPO / "benchmarks" / "cpu_clock.py"), str(OUR_SCRIPT)]
BASELINE = REPO / "configs" / "upstream_baseline.env"
SIDES = ["theirs", "theirs-shuffled", "as-theirs", "as-theirs-shuffled", "ours-in-order", "ours"]
# Whose order of the text is not that of its settings.
SHUFFLE = {"as-theirs-shuffled": "1", "ours-in-order": "0"}
BEFORE, AFTER = STAGES[:2]  # quantization
HESSIAN_SECONDS = 600.0  # more than any run here takes for them
SCORED_ROWS = 64  # sequences per batch
# What must not change while a folder of runs grows.
ALIKE = ("processor", "threads", "python", "torch", "numpy", "script")

# Of a run: parameters, steps, ms per step by the CPU clock, bytes of its weights, scores by stage.
Figures = dict[str, Any]


class BesideError(RuntimeError):
    """A run failed, or does not belong beside the others; the message says what to do."""


class Race:
    """What all sides have in common, and how each is run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.path: Path = arguments.path
        self.folder: Path = arguments.runs
        self.data: Path = arguments.data
        self.seconds: float = arguments.seconds
        self.their_settings: dict[str, str] = arguments.theirs
        everywhere = {
            "DATA_PATH": str(arguments.data), "TOKENIZER_PATH": str(arguments.tokenizer),
            "DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "CPU_THREADS": "1", "EVAL_STRIDE": "0",
            "TTT_ENABLED": "0", "VAL_LOSS_EVERY": "0", "WARMUP_STEPS": "0", "MAX_EVAL_SECONDS": "0",
            **arguments.set,
        }
        ours = {"CONFIG": str(arguments.config), **everywhere}
        # Whole sequences, so that all score the same targets with the same context.
        length = Config.from_env(ours).train_seq_len
        ours["VAL_TOKENS_LIMIT"] = str(arguments.val_tokens // length * length)
        self.ours = {**ours, **self.budget(ours)}
        self.config = Config.from_env(self.ours)
        self.as_theirs: dict[str, str] = {}
        if any(side.startswith("as-theirs") for side in arguments.only):
            shared = {name: ours[name] for name in (*everywhere, "VAL_TOKENS_LIMIT")}
            self.as_theirs = self.in_our_settings(arguments.as_theirs, shared)
            Config.from_env(self.as_theirs)  # a ConfigError now, not after an hour
        fixed = sorted(self.their_settings.keys() & {*self.geometry(), "SEED"})
        if fixed:
            raise BesideError(
                f"--theirs {' '.join(fixed)}: is equal on all sides; give it to --set or --seeds")

    def in_our_settings(self, config: Path, shared: dict[str, str]) -> dict[str, str]:
        """Their model and optimizer as settings of ours: a config with what they are given."""
        settings = {
            **shared, **in_our_names({**self.geometry(), **self.their_settings}, config),
            "CONFIG": str(config), "VAL_BATCH_SIZE": "65536",
            "MICRO_BATCH_TOKENS": str(self.config.train_batch_tokens),
        }
        return {**settings, **self.budget(settings)}

    def budget(self, settings: dict[str, str]) -> dict[str, str]:
        """The settings that end training after the seconds; the Hessians come after them."""
        reserve = HESSIAN_SECONDS if Config.from_env(settings).gptq else 0.0
        return {"ITERATIONS": "1000000", "MAX_WALLCLOCK_SECONDS": f"{self.seconds + reserve:g}",
                "GPTQ_RESERVE_SECONDS": f"{reserve:g}"}

    def geometry(self) -> dict[str, str]:
        """What must be equal, by the names that both scripts have."""
        c = self.config
        return {
            "VOCAB_SIZE": str(c.vocab_size), "NUM_LAYERS": str(c.num_layers), "MODEL_DIM": str(c.model_dim),
            "NUM_HEADS": str(c.num_heads), "NUM_KV_HEADS": str(c.num_kv_heads),
            "MLP_MULT": f"{c.mlp_mult:g}", "TRAIN_SEQ_LEN": str(c.train_seq_len),
            "TRAIN_BATCH_TOKENS": str(c.train_batch_tokens),
        }

    def run(self, side: str, seed: str) -> Figures:
        """The figures of a side with a seed, which is run unless it has been."""
        if not side.startswith("theirs"):
            return self.run_ours(side, seed)
        path = self.folder / f"{side}-seed{seed}.json"
        if not path.is_file():
            write_text(path, json.dumps(self.run_theirs(seed, side == "theirs-shuffled")) + "\n")
        return required_object(path)

    # --- this script, as a process of its own ---

    def run_ours(self, side: str, seed: str) -> Figures:
        settings = self.settings_of(side)
        failed = run_once(Row(side, settings, BY_THE_CPU_CLOCK, OUR_SCRIPT), seed, self.folder, quiet=True)
        if failed:
            raise BesideError(failed)
        directory = directory_of(self.folder, side, seed)
        row = read_row(directory)
        weights = required_object(directory / SUMMARY)["artifact"]["bytes"]
        parameters = train_gpt.count_parameters(Config.from_env(settings))
        return {"parameters": parameters, "steps": row.steps, "ms": row.ms, "bytes": weights, **row.scores}

    def settings_of(self, side: str) -> dict[str, str]:
        settings = self.as_theirs if side.startswith("as-theirs") else self.ours
        return {**settings, "SHUFFLE": SHUFFLE[side]} if side in SHUFFLE else settings

    # --- their script, in this process ---

    def run_theirs(self, seed: str, shuffled: bool) -> Figures:
        """Train it by the clock; score its weights as they are, and as it would ship them.

        Without a score after quantization for a script that nothing here quantizes.
        """
        clock = TrainingClock(time.process_time, self.seconds)
        settings = {**self.geometry(), **self.their_settings, "SEED": seed}
        with Upstream(self.path, settings, clock) as upstream:
            if shuffled and upstream.shuffles:
                raise BesideError(f"{self.path}: shuffles by itself; leave theirs-shuffled out of --only")
            feed = self.shuffled_batches(int(seed)) if shuffled or upstream.shuffles else self.batches()
            while not clock.is_over:
                upstream.step(*next(feed))
            found: Figures = {"parameters": upstream.parameters_count, "steps": upstream.steps,
                              "ms": 1e3 * clock.seconds / upstream.steps}
            found.update(self.take_better_weights(upstream))
            if upstream.ships:
                found["bytes"] = upstream.ship()
                found[AFTER] = self.score(upstream)
        return found

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Endlessly: the shards in their order, again after the last one."""
        c = self.config
        while True:
            yield from batches(self.data, c.train_batch_tokens // c.train_seq_len, c.train_seq_len)

    def shuffled_batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endlessly: what ours trains on with this seed, each step in one batch."""
        c = dataclasses.replace(
            self.config, seed=seed, shuffle=True, train_prefetch=False,
            micro_batch_tokens=self.config.train_batch_tokens,
        )
        shards = train_gpt.open_shards(f"{self.data}/fineweb_train_*.bin")
        with contextlib.closing(train_gpt.Loader(c, shards, Machine())) as loader:
            while True:
                batch = loader.next_batch()
                yield batch.inputs_BT, batch.targets_BT

    def take_better_weights(self, upstream: Upstream) -> Figures:
        """Leave the model with its last weights or their average, whichever scores better; the scores."""
        last_bpb = self.score(upstream)
        average = upstream.average()
        if average is None:
            return {BEFORE: last_bpb}
        last = {name: tensor.clone() for name, tensor in upstream.model.state_dict().items()}
        upstream.model.load_state_dict(average)
        average_bpb = self.score(upstream)
        if last_bpb < average_bpb:
            upstream.model.load_state_dict(last)
        return {BEFORE: min(last_bpb, average_bpb), "last weights": last_bpb, "average": average_bpb}

    def score(self, upstream: Upstream) -> float:
        """Bits per byte of their model on the first part of the validation text, without overlap."""
        c = self.config
        shards = train_gpt.open_shards(f"{self.data}/fineweb_val_[0-9]*.bin")
        validation = train_gpt.read_validation(shards, c)
        tokens = torch.from_numpy(validation.tokens.astype(np.int64))
        inputs_NT = tokens[:-1].view(-1, c.train_seq_len)
        targets_NT = tokens[1:].view(-1, c.train_seq_len)
        nats = 0.0
        for start in range(0, len(inputs_NT), SCORED_ROWS):
            rows = slice(start, start + SCORED_ROWS)
            nats += upstream.loss(inputs_NT[rows], targets_NT[rows]) * targets_NT[rows].numel()
        return nats / math.log(2) / validation.bytes_total


def tables(found: dict[str, dict[str, Figures]]) -> str:
    """What each side has made of its seconds; then the scores, against theirs and against `as-theirs`.

    found: figures by side and seed.
    """
    runs = [run for by_seed in found.values() for run in by_seed.values()]
    stage = AFTER if all(AFTER in run for run in runs) else BEFORE
    sizes = []
    for side, by_seed in found.items():
        parameters = f"{next(iter(by_seed.values()))['parameters']:,}"
        steps = fmean(run["steps"] for run in by_seed.values())
        ms = fmean(run["ms"] for run in by_seed.values())
        weights = [run["bytes"] for run in by_seed.values() if "bytes" in run]
        shipped = f"{fmean(weights):,.0f}" if weights else UNSET
        sizes.append([side, parameters, f"{steps:,.0f}", f"{ms:.1f}", shipped])
    parts = [columns(["side", "parameters", "steps", "CPU ms/step", "weights, bytes"], sizes)]
    if stage == BEFORE:
        parts.append("Not all sides are quantized here, so the weights before quantization are compared.")
    scores = {side: {seed: run[stage] for seed, run in by_seed.items()} for side, by_seed in found.items()}
    for base in ("theirs", "as-theirs", "as-theirs-shuffled"):
        if base in scores:
            parts.append(table_of(stage, {base: scores[base], **scores}))
    return "\n\n".join(parts)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, complete and checked."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("path", type=Path, help="your copy of a public train_gpt.py")
    parser.add_argument("--seconds", type=float, required=True, help="CPU seconds of training")
    parser.add_argument("--seeds", nargs="+", default=["42", "1337", "2025"])
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE")
    parser.add_argument("--runs", type=Path, help="folder for the runs (default: one in runs/)")
    parser.add_argument("--config", type=Path, default=REPO / "configs/cpu_demo.env", help="our settings")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings on top of it")
    parser.add_argument("--theirs", nargs="*", default=[], metavar="NAME=VALUE", help="settings of PATH")
    parser.add_argument("--as-theirs", type=Path, metavar="CONFIG", help="our config that matches PATH")
    parser.add_argument("--data", type=Path, default=SAMPLE, help="folder of shards (default: the sample)")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="SentencePiece model of the shards")
    parser.add_argument("--val-tokens", type=int, default=200_000, help="number of targets to score")
    arguments = parser.parse_args(argv)
    for item in (*arguments.set, *arguments.theirs):
        if "=" not in item:
            parser.error(f"{item}: expected NAME=VALUE")
    arguments.set = dict(item.split("=", 1) for item in arguments.set)
    arguments.theirs = dict(item.split("=", 1) for item in arguments.theirs)
    if (arguments.data == SAMPLE) != (arguments.tokenizer == TOKENIZER):
        parser.error("--data and --tokenizer belong together: give both, or none for the sample")
    if arguments.as_theirs is None:
        arguments.as_theirs = BASELINE
        if arguments.path.name != "train_gpt.py" and any(side.startswith("as-") for side in arguments.only):
            parser.error(f"{arguments.path}: which config is this script in ours? Name it with --as-theirs, "
                         "like configs/pr549.env, or leave as-theirs and as-theirs-shuffled out of --only")
    if arguments.runs is None:
        name = f"beside-{arguments.path.stem}-{arguments.data.name}-{arguments.seconds:g}s"
        arguments.runs = REPO / "runs" / name
    return arguments


def check_shell() -> None:
    """BesideError for a setting in the environment: it would reach one script alone."""
    given = sorted(os.environ.keys() & {"CONFIG", *Config().as_env()})
    if given:
        raise BesideError(f"{' '.join(given)}: set in your shell, which only one of the scripts would read; "
                          "unset it, and give it to --set")


def keep_alike(race: Race, now: dict[str, Any]) -> None:
    """BesideError if the folder's runs were made under other conditions: no table may mix them."""
    alike = {
        **{name: now[name] for name in ALIKE}, "their script": sha256_file(race.path),
        "--theirs": race.their_settings, "settings of ours": race.ours,
    }
    path = race.folder / "conditions.json"
    if not path.is_file():
        write_text(path, json.dumps(alike, indent=1) + "\n")
    before = required_object(path)
    changed = [name for name in alike if alike[name] != before.get(name)]
    if changed:
        raise BesideError(f"{race.folder}: its runs differ in {', '.join(changed)}; name another --runs")


def measure(arguments: argparse.Namespace) -> str:
    """Run what the folder of runs lacks; the tables of what it then has."""
    torch.set_num_threads(1)
    check_shell()
    if arguments.data == SAMPLE and sample.main([]) != 0:
        raise BesideError(f"{SAMPLE}: the sample is not there; `python data/sample.py` makes it")
    race = Race(arguments)
    now = conditions()
    found: dict[str, dict[str, Figures]] = {side: {} for side in SIDES if side in arguments.only}
    with locked(race.folder, "beside"):
        keep_alike(race, now)
        for seed in arguments.seeds:
            for side in found:
                found[side][seed] = race.run(side, seed)
                print(f"{side}, seed {seed}: done", file=sys.stderr, flush=True)
    return "\n\n".join([described(now), tables(found)])


def main() -> None:
    """Print the tables."""
    escape_unprintable()
    try:
        print(measure(parse(None)))
    except (BesideError, UpstreamError, ConfigError, RecordError, DataError, train_gpt.DataError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
