"""What each part of the default stack brings at equal seconds, at a width that two CPU cores can train.

    python benchmarks/ablation.py --data DIR --tokenizer FILE [--seconds 120] [--seeds 1337 42 2025]
        [--only "default stack" upstream_baseline] [--clock cpu] [--steps 200] [--keep]
        [--equal-cost] [--arm lengths] [--runs FOLDER] [--table]

Rows of `--arm parts`: the default stack, `upstream_baseline.env` at the same width, depth, batch and sequence
length, that baseline under the default's schedule, and the default stack with one part off at a time. The
baseline's schedule, which counts steps, is taken in shares of its own 13,780-step run. Rows of `--arm
lengths`: the default stack with sequences of one length, and with TRAIN_SEQ_LENS growing in the proportions
of PR #2014; each is scored with the context that its training ended with.

All runs of a seed see the same tokens in the same order and are scored on the same validation targets,
without overlap, by their averaged weights, before any quantization. `--clock wall` counts seconds. `--clock
cpu` counts the CPU seconds of the process over its threads, which is what the wall would show on an idle
machine: the choice where others share the cores. `--steps` counts steps instead, and with `--equal-cost` as
many of each row as cost what these cost the first row: on a busy machine a CPU second is worth now more, now
less, so costs are compared in turns, before the runs. Seeds are the outer loop, so that drift of the machine
meets every row alike.

With `--keep`, runs join those stored from the same script and machine, so that a process on each core may
share a table. With `--runs FOLDER` each run is kept there as a file: what is there is not measured again, and
several processes share the work, one run each at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # for torch: waiting threads would burn what --clock cpu counts

import numpy as np
import torch
from torch import Tensor

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks import paired, results  # noqa: E402
from train_gpt import GPT, Config, Machine  # noqa: E402

Rows = dict[str, paired.Runs]
TITLE = "What each part brings"
DEFAULT = "default stack"
HEADER = "| stack | parameters | steps | " + paired.HEADER
COST_HEADER = " times the seconds |"
TURNS = 3  # of every row, to compare what their steps cost
TURN_STEPS = 10  # of a turn; the lengths of TRAIN_SEQ_LENS have their shares of ten steps
PAIRS_HEADER = (
    "| row | minus row | difference | its error | seeds to decide | n | at equal steps | its error |"
)
EQUAL_STEPS = (
    "At equal steps: least squares over all runs, a constant for each row and each seed and one slope in the "
    "logarithm of the steps, of which a busy machine's CPU second holds now more, now less."
)
# Geometry, the same for every row; the vocabulary is the tokenizer's.
SMALL = {
    "DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "TRAIN_PREFETCH": "0", "SHUFFLE": "1",
    "NUM_LAYERS": "4", "MODEL_DIM": "64", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "TRAIN_SEQ_LEN": "128",
    "TRAIN_BATCH_TOKENS": "4096", "MICRO_BATCH_TOKENS": "4096", "VAL_BATCH_SIZE": "65536",
    "EVAL_STRIDE": "0", "TTT_ENABLED": "0",
}  # fmt: skip
# The default's choice of layers, scaled from 11 layers to 4 (3 of 11 looped: 1 of 4), and the baseline's
# learning rates: the default's own are tuned for steps of 786,432 tokens.
DEFAULT_SMALL = {
    "XSA_LAST_N": "4", "LOOP_START": "1", "LOOP_END": "1", "PARALLEL_START_LAYER": "3",
    "MATRIX_LR": "0.04", "SCALAR_LR": "0.04", "TIED_EMBED_LR": "0.05",
}  # fmt: skip
# Half as deep, for comparisons that need more steps or longer ones than a model of four layers has time for.
SMALLER_MODEL = {
    "NUM_LAYERS": "2", "MODEL_DIM": "48", "XSA_LAST_N": "2", "LOOP_START": "0", "LOOP_END": "0",
    "PARALLEL_START_LAYER": "1",
}  # fmt: skip
SHORT_AVERAGE = {"EMA_DECAY": "0.97"}  # of weights, over runs of some hundred steps
BASELINE_SCHEDULE = {
    "WARMDOWN_ITERS": "0", "WARMDOWN_FRAC": str(1200 / 13_780),
    "MUON_MOMENTUM_WARMUP_STEPS": "0", "MUON_MOMENTUM_WARMUP_FRAC": str(500 / 13_780),
}  # fmt: skip
ONE_OFF = {
    "no recurrence": {"NUM_LOOPS": "0"},
    "no parallel layers": {"PARALLEL_START_LAYER": "-1"},
    "one parallel lane (GPT-J)": {"PARALLEL_MODE": "gptj"},
    "no XSA": {"XSA_LAST_N": "0"},
    "no head gate": {"SPARSE_ATTN_GATE_ENABLED": "0"},
    "no smear gate": {"SMEAR_GATE_ENABLED": "0"},
    "skips that add": {"SKIP_GATES_ENABLED": "0"},
    "no layer scale": {"LN_SCALE": "0"},
    "all head dimensions rotated": {"ROPE_DIMS": "0"},
    "relu²": {"LEAKY_SLOPE": "0"},
    "QK gain 1.5": {"QK_GAIN_INIT": "1.5"},
    "MLP 2x": {"MLP_MULT": "2"},
    "documents not told apart": {"DOC_MASK": "0"},
    "no softcap": {"LOGIT_SOFTCAP": "0"},
    "uniform initial weights": {"MATRIX_INIT": "uniform"},
    "one fixed quintic": {"MUON_POLAR_EXPRESS": "0"},
    "three Newton-Schulz steps": {"MUON_BACKEND_STEPS": "3"},
    "no row normalisation": {"MUON_ROW_NORMALIZE": "0"},
    "no weight decay": {"MUON_WD": "0", "EMBED_WD": "0", "ADAM_WD": "0"},
    "no gradient clipping": {"GRAD_CLIP_NORM": "0"},
    "no weight average": {"EMA_DECAY": "0"},
}
# Sequence lengths in the proportions of PR #2014, which has 1,024, 2,048 and 3,072 tokens: the last or the
# middle one for all of the run, or growing. Each is scored with the context that its training ended with.
# Three lengths are shuffled in segments of 384 tokens, of which a step has 16: fewer independent pieces of
# text than 32 sequences of 192, which costs by itself. So each growing row has a partner of one length that
# is shuffled as it is, in the same segments: of those two, nothing but the lengths differs. A step of many
# tokens wants a smaller model than the rows of `parts` have.
LENGTHS_GEOMETRY = {
    **SMALLER_MODEL, **SHORT_AVERAGE,
    "TRAIN_BATCH_TOKENS": "6144", "MICRO_BATCH_TOKENS": "6144", "VAL_BATCH_SIZE": "49152",
}  # fmt: skip
LAST_LENGTH = {"TRAIN_SEQ_LEN": "192", "EVAL_SEQ_LEN": "192"}
ONE_LENGTH = "one length, the last"
ONE_LENGTH_IN_SEGMENTS = "one length, the last, in segments"
LENGTHS = {
    ONE_LENGTH: {**LAST_LENGTH},
    # All but the first two steps have the last length.
    ONE_LENGTH_IN_SEGMENTS: {**LAST_LENGTH, "TRAIN_SEQ_LENS": "64:1 128:2 192"},
    "one length, the middle one": {"TRAIN_SEQ_LEN": "128", "EVAL_SEQ_LEN": "128"},
    "three lengths": {**LAST_LENGTH, "TRAIN_SEQ_LENS": "64:0.1 128:0.7 192"},
    "three lengths, doubling": {**LAST_LENGTH, "TRAIN_SEQ_LENS": "48:0.1 96:0.7 192"},
}
LENGTHS_PARTNER = {"three lengths": ONE_LENGTH_IN_SEGMENTS, "three lengths, doubling": ONE_LENGTH}
LENGTHS_PAIRS = [
    *LENGTHS_PARTNER.items(), (ONE_LENGTH_IN_SEGMENTS, ONE_LENGTH),
    ("three lengths", "one length, the middle one"),
]  # fmt: skip


def default_schedule() -> dict[str, str]:
    """The settings of the default's schedule."""
    values = Config().as_env()
    return {name: values[name] for name in ("WARMDOWN_FRAC", "MIN_LR", "MUON_MOMENTUM_WARMUP_FRAC")}


def stacks(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Settings of every row by its name."""
    import sentencepiece

    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(arguments.tokenizer)).vocab_size()
    common = {
        **SMALL, "GPTQ": "0", "VOCAB_SIZE": str(vocabulary), "MAX_WALLCLOCK_SECONDS": str(arguments.seconds),
        "DATA_PATH": str(arguments.data), "TOKENIZER_PATH": str(arguments.tokenizer),
        "VAL_TOKENS_LIMIT": str(arguments.val_tokens), "ITERATIONS": "1000000",
    }  # fmt: skip
    if arguments.steps:
        common.update({"MAX_WALLCLOCK_SECONDS": "0", "ITERATIONS": str(arguments.steps)})
    baseline = {"CONFIG": str(REPO / "configs/upstream_baseline.env"), **common, **BASELINE_SCHEDULE}
    default = {**common, **DEFAULT_SMALL}
    if arguments.arm == "lengths":
        return {name: {**default, **LENGTHS_GEOMETRY, **changes} for name, changes in LENGTHS.items()}
    return {
        DEFAULT: default,
        "upstream_baseline": baseline,
        "upstream_baseline, default schedule": {**baseline, **default_schedule()},
        **{name: {**default, **changes} for name, changes in ONE_OFF.items()},
    }


def clock(kind: str) -> Callable[[], float]:
    """A stopwatch in seconds: of the wall, or of the process's CPU time shared among its threads."""
    if kind == "wall":
        return time.perf_counter
    threads = torch.get_num_threads()
    return lambda: time.process_time() / threads


class Hooks:
    """What `train` calls around a step; a subclass may patch the loss and the optimizer too."""

    def __init__(self, config: Config, model: GPT) -> None:
        self.optimizer = train_gpt.Optimizer(model, config, Machine())
        self.loss_of: Callable[..., Tensor] = GPT.loss

    def begin_step(self, progress: float) -> None:
        """Before each step."""

    def end_step(self) -> None:
        """After each step."""


def train(config: Config, model: GPT, now: Callable[[], float], hooks: Hooks | None = None) -> int:
    """Train on the schedule of a whole run until the seconds are over; leaves the average. Returns steps."""
    shards = train_gpt.open_shards(f"{config.data_path}/fineweb_train_*.bin")
    hooks = hooks or Hooks(config, model)
    loader = train_gpt.Loader(config, shards, Machine())
    step = 0
    with contextlib.closing(loader):
        start = now()
        while True:
            seconds = now() - start
            progress = train_gpt.run_progress(seconds, step, config)
            if progress >= 1.0:
                break
            length = train_gpt.train_length(progress, config)
            looping = train_gpt.loop_is_on(progress, config)
            hooks.begin_step(progress)
            for _ in range(loader.micro_steps):
                batch = loader.next_batch(length)
                loss = hooks.loss_of(model, batch.inputs_BT, batch.targets_BT, batch.starts, looping)
                (loss / loader.micro_steps).backward()
            scale = train_gpt.learning_rate_scale(progress, step, config)
            momentum = train_gpt.muon_momentum(progress, step, config)
            hooks.optimizer.step(scale, momentum, step, lambda _name: None)
            hooks.end_step()
            step += 1
    hooks.optimizer.use_average()
    return step


def measure(settings: dict[str, str], seed: int, kind: str) -> dict[str, Any]:
    """Train and score one stack: its parameters, optimizer steps, bits per byte of the averaged weights."""
    config = Config.from_env({**settings, "SEED": str(seed)})
    model = train_gpt.build_model(config)
    now = clock(kind)
    start = now()
    steps = train(config, model, now)
    seconds = now() - start
    shards = train_gpt.open_shards(f"{config.data_path}/fineweb_val_[0-9]*.bin")  # no byte sidecar
    tokens = np.concatenate([train_gpt.read_tokens(shard) for shard in shards])
    if config.val_tokens_limit:
        tokens = tokens[: config.val_tokens_limit + 1]
    looping = train_gpt.loop_is_on(1.0, config)
    text_bytes = int(train_gpt.token_bytes(tokens, config).sum())
    score = train_gpt.score_roundtrip(model, tokens, config, looping=looping).score(text_bytes)
    count = sum(parameter.numel() for parameter in model.parameters())
    return {
        "seed": seed, "parameters": count, "steps": steps, "seconds": seconds, "val_bpb": score.bits_per_byte
    }  # fmt: skip


MeasureOne = Callable[[dict[str, str], int, str], dict[str, Any]]


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether this process alone may write the file; a process that dies gives its claim back."""
    with open(path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield not path.exists()


def hold_common(folder: Path, about: str) -> None:
    """Make the folder, or see that its runs have `about` in common; SystemExit where they have not."""
    folder.mkdir(parents=True, exist_ok=True)
    common = folder / "common.txt"
    if not common.exists():
        common.write_text(about, encoding="utf-8")
    if common.read_text(encoding="utf-8") != about:
        raise SystemExit(f"{folder}: runs of other conditions, see {common}; name another folder for --runs")


def measure_once(path: Path, name: str, measure_it: Callable[[], dict[str, Any]]) -> None:
    """Keep there what is measured, unless it is there or another process measures it; tell it by its name."""
    with claimed(path) as mine:
        if mine:
            found = measure_it()
            print(f"{name}: {found}", file=sys.stderr, flush=True)
            train_gpt.write_atomically(path, json.dumps(found).encode())


def kept_rows(folder: Path, stack: dict[str, dict[str, str]]) -> Rows:
    """All runs of these rows that the folder holds."""
    rows: Rows = {}
    for name in stack:
        for path in sorted(folder.glob(f"{name.replace(' ', '_')}-seed*.json")):
            rows.setdefault(name, []).append(json.loads(path.read_text(encoding="utf-8")))
    return rows


def share_runs(
    folder: Path, stack: dict[str, dict[str, str]], order: list[tuple[int, str]], kind: str, about: str,
    measure_one: MeasureOne = measure,
) -> Rows:  # fmt: skip
    """Measure what no file of the folder holds and no other process measures; `kept_rows` of it then.

    about: what all its runs must have in common; SystemExit where the folder holds others. measure_one: of
    settings, seed and clock.
    """
    hold_common(folder, about)
    for seed, name in order:
        path = folder / f"{name.replace(' ', '_')}-seed{seed}.json"
        measure_once(path, name, functools.partial(measure_one, stack[name], seed, kind))
    return kept_rows(folder, stack)


def steps_of_equal_cost(stack: dict[str, dict[str, str]], steps: int) -> dict[str, int]:
    """Steps of each row that cost what `steps` of the first one do, by CPU seconds of short runs in turns."""
    turn = {"MAX_WALLCLOCK_SECONDS": "0", "ITERATIONS": str(TURN_STEPS), "VAL_TOKENS_LIMIT": "2000"}
    costs: dict[str, list[float]] = {name: [] for name in stack}
    for number in range(TURNS):
        for name, settings in stack.items():
            costs[name].append(measure({**settings, **turn}, number, "cpu")["seconds"])
    first = next(iter(costs.values()))
    found = {}
    for name, seconds in costs.items():
        ratios = [own / other for own, other in zip(seconds, first, strict=True)]
        found[name] = round(steps / statistics.median(ratios))
    return found


Price = Callable[[dict[str, dict[str, str]], int], dict[str, int]]


def kept_steps(
    folder: Path, stack: dict[str, dict[str, str]], steps: int, price: Price = steps_of_equal_cost
) -> dict[str, int]:
    """The same, or what `price` says, kept in the folder: processes that share it have the same steps."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "steps.json"
    with open(folder / "steps.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            train_gpt.write_atomically(path, json.dumps(price(stack, steps)).encode())
    counts: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    if unknown := stack.keys() - counts.keys():
        raise SystemExit(f"{path}: has no steps of {sorted(unknown)}; name another folder for --runs")
    return counts


def of_equal_cost(folder: Path, stack: dict[str, dict[str, str]], steps: int) -> dict[str, dict[str, str]]:
    """The rows, each with the steps that cost what `steps` of the first do."""
    counts = kept_steps(folder, stack, steps)
    clock_off = {"MAX_WALLCLOCK_SECONDS": "0"}
    return {
        name: {**settings, **clock_off, "ITERATIONS": str(counts[name])} for name, settings in stack.items()
    }


def finish_shared(
    name: str, arguments: argparse.Namespace, folder: Path, stack: dict[str, dict[str, str]], kind: str,
    before: dict[str, Any], measured: dict[str, Any], measure_one: MeasureOne = measure,
) -> None:  # fmt: skip
    """Measure what the folder lacks, print the table of what it then has, and with --keep store it.

    measured: all that its runs have in common. Seeds are the outer loop; without one nothing is measured.
    """
    alike = {key: before[key] for key in ("processor", "threads", "torch", "script")}
    about = json.dumps({**alike, **measured}, indent=1)
    order = list(itertools.product(arguments.seeds, stack))
    measured["rows"] = share_runs(folder, stack, order, kind, about, measure_one)
    results.finish(name, before, measured, arguments.keep)


def row(name: str, runs: paired.Runs, default: paired.Runs) -> str:
    """A line of the table; the difference is taken seed by seed."""
    steps = statistics.mean(run["steps"] for run in runs)
    return f"| {name} | {runs[0]['parameters']:,} | {steps:.0f} | {paired.cells(runs, default)}"


def cost(runs: paired.Runs, default: paired.Runs) -> str:
    """The seconds of training over those of the same seeds of another row, where both took as many steps."""
    theirs = {run["seed"]: run["seconds"] for run in default}
    ratios = [run["seconds"] / theirs[run["seed"]] for run in runs if run["seed"] in theirs]
    return f" {statistics.median(ratios):.2f} |" if ratios else " - |"


def pairs(rows: Rows) -> list[str]:
    """A table of the differences between rows of `--arm lengths`; no lines for other rows."""
    adjusted = paired.AtEqualSteps(rows)
    lines = []
    for name, other in LENGTHS_PAIRS:
        if name in rows and other in rows:
            found = paired.difference(rows[name], rows[other])
            count = found.seeds if found else 0
            told = "- | -"
            if adjusted.fits:
                told = "{:+.4f} | {:.4f}".format(*adjusted.difference(name, other))
            lines.append(f"| {name} | {other} | {paired.told_difference(found)} | {count} | {told} |")
    if not lines:
        return []
    return ["", *paired.table(PAIRS_HEADER, lines), *(["", EQUAL_STEPS] if adjusted.fits else [])]


def tables(measured: dict[str, Any]) -> list[str]:
    """What was held equal, and a line per stack."""
    rows = measured["rows"]
    geometry = measured["geometry"]
    reference = DEFAULT if DEFAULT in rows else next(iter(rows))
    header = HEADER.format(reference)
    lines = [row(name, runs, rows[reference]) for name, runs in rows.items()]
    told_cost = ""
    if measured.get("steps") and not measured.get("equal_cost"):
        header += COST_HEADER
        costs = [cost(runs, rows[reference]) for runs in rows.values()]
        lines = [line + ratio for line, ratio in zip(lines, costs, strict=True)]
        told_cost = (
            f" Times the seconds: of training, by the {measured['clock']} clock, the median of the seeds."
        )
    budget = f"{measured['seconds']:g} s of training by the {measured['clock']} clock"
    if measured.get("steps"):
        budget = f"{measured['steps']} steps"
    if measured.get("equal_cost"):
        budget += f" of the first row and as many of the others as cost the same ({TURNS} turns compared)"
    choices = " ".join(f"{name}={value}" for name, value in measured["default"].items())
    size = "{NUM_LAYERS} layers × {MODEL_DIM}, {TRAIN_BATCH_TOKENS} tokens a step, {TRAIN_SEQ_LEN} a sequence"
    seeds = sorted({run["seed"] for runs in rows.values() for run in runs})
    scored = f"{measured['val_tokens']:,}" if measured["val_tokens"] else "all"
    return [
        f"`{measured['data']}`, {budget}; {size.format(**geometry)}; seeds {' '.join(map(str, seeds))}; "
        f"{scored} validation targets. The default's choices at this depth: {choices}.{told_cost}",
        "", *paired.table(header, lines),
        *pairs(rows),
    ]  # fmt: skip


def stored_rows(name: str, before: dict[str, Any], measured: dict[str, Any]) -> Rows:
    """Rows stored under this name, if they were measured alike."""
    path = results.FOLDER / f"{name}.json"
    if not path.exists():
        return {}
    old = json.loads(path.read_text(encoding="utf-8"))
    same = all(old["conditions"][key] == before[key] for key in ("processor", "threads", "torch", "script"))
    alike = {**old["measured"], "rows": {}} == {**measured, "rows": {}}
    return old["measured"]["rows"] if same and alike else {}


def main() -> None:
    """Measure, print the table, and with --keep store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of fineweb_{train,val}_*.bin")
    parser.add_argument("--tokenizer", type=Path, required=True, help="SentencePiece model of these shards")
    parser.add_argument("--seconds", type=float, default=120.0, help="training time of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 42, 2025])
    parser.add_argument("--steps", type=int, default=0, help="training steps of each run, instead of seconds")
    parser.add_argument("--equal-cost", action="store_true", help="--steps are of the first row; with --runs")
    parser.add_argument("--arm", choices=["parts", "lengths"], default="parts", help="which rows")
    parser.add_argument("--runs", type=Path, help="keep each run there; go on with what is there")
    parser.add_argument("--only", nargs="+", help="names of the rows to measure; all by default")
    parser.add_argument("--table", action="store_true", help="measure nothing more; with --runs")
    parser.add_argument("--val-tokens", type=int, default=200_000, help="targets to score; 0: all")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    before = results.conditions()
    stack = stacks(arguments)
    if unknown := set(arguments.only or []) - stack.keys():
        parser.error(f"--only {sorted(unknown)}: expected names among {list(stack)}")
    if arguments.table and not arguments.runs:
        parser.error("--table: expected --runs as well")
    if arguments.table:
        arguments.seeds = []
    if arguments.equal_cost and not (arguments.steps and arguments.runs):
        parser.error("--equal-cost: expected --steps and --runs as well")
    chosen = [name for name in stack if not arguments.only or name in arguments.only]
    name = f"ablation-{arguments.data.name}-{arguments.seconds:g}s"
    geometry = SMALL
    if arguments.arm == "lengths":
        name = f"ablation-lengths-{arguments.data.name}-{arguments.seconds:g}s"
        geometry = {**SMALL, **LENGTHS_GEOMETRY, "TRAIN_SEQ_LEN": "48 to 192"}
    if arguments.steps:
        name = f"{name.rpartition('-')[0]}-{arguments.steps}steps"
    measured = {
        "data": arguments.data.name, "seconds": arguments.seconds, "clock": arguments.clock,
        "val_tokens": arguments.val_tokens, "geometry": geometry,
        "default": {name: geometry.get(name, value) for name, value in DEFAULT_SMALL.items()}, "rows": {},
    }  # fmt: skip
    if arguments.steps:
        measured["steps"] = arguments.steps
    if arguments.equal_cost:
        measured["equal_cost"] = True
        name += "-equal_cost"
    order = list(itertools.product(arguments.seeds, chosen))
    first = {**stack[chosen[0]], "MAX_WALLCLOCK_SECONDS": "1", "VAL_TOKENS_LIMIT": "10000"}
    measure(first, 0, arguments.clock)  # thread pools and caches
    if arguments.runs:
        rows_chosen = {row_name: stack[row_name] for row_name in chosen}
        if arguments.equal_cost:
            rows_chosen = of_equal_cost(arguments.runs, rows_chosen, arguments.steps)
        finish_shared(name, arguments, arguments.runs, rows_chosen, arguments.clock, before, measured)
        return
    for seed, row_name in order:
        run = measure(stack[row_name], seed, arguments.clock)
        print(f"{row_name}: {run}", file=sys.stderr, flush=True)
        rows = stored_rows(name, before, measured) if arguments.keep else measured["rows"]
        measured["rows"] = {**rows, row_name: [*rows.get(row_name, []), run]}
        results.finish(name, before, measured, arguments.keep)


if __name__ == "__main__":
    main()
