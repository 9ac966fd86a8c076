"""What each setting of a small run brings to its artifact's score, at equal time on an idle machine.

    python benchmarks/tune.py --runs DIR [--config configs/cpu_demo.env] [--steps 400] [--seeds 1337 42 2025]
        [--only "as it is" "512 tokens a step"] [--table] [--keep]

Each row is the config with some settings changed. How long its steps are beside those of the config is
measured first, in turns by the clock of the CPU; it then gets as many steps as take the time of `--steps` of
the config. So a machine that others share gives the same table as an idle one. It is trained as the script
does it, with the same kernels; its artifact is made as large as the config allows with the script beside it,
read back and scored without overlap. Rows that differ in quantization alone share the trained weights. Runs
are kept in DIR: several processes share the work, and what is there is not measured again. The data set must
be there: `python data/sample.py` makes that of the demo.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # for torch: waiting threads would burn CPU seconds

import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks import ablation, budget, paired, results, speed  # noqa: E402
from benchmarks.turns import Turns  # noqa: E402
from train_gpt import Config  # noqa: E402

TITLE = "The settings of a small run, at equal time"
BASE = "as it is"
HEADER = (
    "| row | parameters | times the step | steps | float bpb | bytes | written s | read s | "
    + paired.HEADER.format(BASE)
)  # fmt: skip
VARIANTS: dict[str, dict[str, str]] = {
    BASE: {},
    # How much a step sees.
    "512 tokens a step": {"TRAIN_BATCH_TOKENS": "512", "MICRO_BATCH_TOKENS": "512"},
    "2,048 tokens a step": {"TRAIN_BATCH_TOKENS": "2048", "MICRO_BATCH_TOKENS": "2048"},
    "sequences of 64": {"TRAIN_SEQ_LEN": "64"},
    "sequences of 256": {"TRAIN_SEQ_LEN": "256"},
    # Size.
    "one layer": {"NUM_LAYERS": "1"},
    "three layers": {"NUM_LAYERS": "3"},
    "width 192": {"MODEL_DIM": "192", "NUM_HEADS": "3"},
    "width 256": {"MODEL_DIM": "256", "NUM_HEADS": "4"},
    "MLP 2x": {"MLP_MULT": "2"},
    "MLP 4x": {"MLP_MULT": "4"},
    "bigrams": {"BIGRAM_VOCAB_SIZE": "2048", "BIGRAM_DIM": "32"},
    # Step sizes and their schedule.
    "matrix LR 0.02": {"MATRIX_LR": "0.02"},
    "matrix LR 0.045": {"MATRIX_LR": "0.045"},
    "embedding LR 0.015": {"TIED_EMBED_LR": "0.015"},
    "embedding LR 0.06": {"TIED_EMBED_LR": "0.06"},
    "scalar LR 0.06": {"SCALAR_LR": "0.06"},
    "warm-down 0.85": {"WARMDOWN_FRAC": "0.85"},
    "rates fall to zero": {"MIN_LR": "0"},
    "clip at 1": {"GRAD_CLIP_NORM": "1"},
    "average of weights": {"EMA_DECAY": "0.97"},
    "Adam betas 0.8 0.95": {"BETA1": "0.8", "BETA2": "0.95"},
    "Adam betas 0.9 0.95": {"BETA2": "0.95"},
    "two Newton-Schulz steps": {"MUON_BACKEND_STEPS": "2"},
    # Quantization: the weights are those of the base.
    "COLUMN_STEPS": {"COLUMN_STEPS": "0.5"},
    "TRELLIS": {"TRELLIS": "1"},
    "COLUMN_STEPS and TRELLIS": {"COLUMN_STEPS": "0.5", "TRELLIS": "1"},
    # Several at once.
    "bigrams and COLUMN_STEPS": {
        "BIGRAM_VOCAB_SIZE": "2048", "BIGRAM_DIM": "32", "COLUMN_STEPS": "0.5"},
    "bigrams and MLP 2x": {"BIGRAM_VOCAB_SIZE": "2048", "BIGRAM_DIM": "32", "MLP_MULT": "2"},
    "bigrams, MLP 2x and COLUMN_STEPS": {
        "BIGRAM_VOCAB_SIZE": "2048", "BIGRAM_DIM": "32", "MLP_MULT": "2", "COLUMN_STEPS": "0.5"},
}
QUANTIZATION = ("COLUMN_STEPS", "TRELLIS")  # settings that no training step reads
RATES = (  # that it reads, and takes no longer for
    "MATRIX_LR", "TIED_EMBED_LR", "SCALAR_LR", "WARMDOWN_FRAC", "MIN_LR", "GRAD_CLIP_NORM", "BETA1", "BETA2",
)  # fmt: skip
PRICE_TURNS = 8


def stacks(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Settings of every row by its name."""
    source = (REPO / "train_gpt.py").read_bytes()
    config = Config.from_env({"CONFIG": str(arguments.config)})
    code_bytes = len(train_gpt.shipped_code(source, config.code_bytes))
    common = {
        "CONFIG": str(arguments.config), "DEVICE": "cpu", "ITERATIONS": str(arguments.steps),
        "MAX_WALLCLOCK_SECONDS": "0",
        # Of the weights alone: the script is of the same length beside all of them.
        "ARTIFACT_BYTES_MAX": str(config.artifact_bytes_max - code_bytes),
    }  # fmt: skip
    return {name: {**common, **VARIANTS[name], "ROW": name} for name in arguments.only}


@functools.cache
def times_the_step(row: str, config: Path) -> float:
    """CPU time of a row's step over that of the config's: the median of pairs of turns."""
    changes = VARIANTS[row]
    if changes.keys() <= {*QUANTIZATION, *RATES}:
        return 1.0
    unpaced = {"ARTIFACT_BYTES_MAX": "16000000", "RATE_CONTROL": "0", "WARMUP_STEPS": "0", "DEVICE": "cpu"}
    ratios = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        settings = {**speed.settings(config, Path(folder), []), **unpaced}
        script = REPO / "train_gpt.py"
        base = ends.enter_context(Turns(script, {**settings, "RUN_ID": "base"}))
        changed = ends.enter_context(Turns(script, {**settings, **changes, "RUN_ID": "changed"}))
        for turn in range(PRICE_TURNS + 1):
            theirs = statistics.mean(base.steps(speed.TURN_STEPS).cpu_ms)
            ours = statistics.mean(changed.steps(speed.TURN_STEPS).cpu_ms)
            if turn:  # the first steps allocate
                ratios.append(ours / theirs)
    return statistics.median(ratios)


@functools.lru_cache(maxsize=1)
def trained(values: tuple[tuple[str, str], ...], kind: str) -> budget.Trained:
    """The model of these settings, trained by this clock of ablation.py with the kernels of this machine."""
    config = Config.from_env(dict(values))
    machine = train_gpt.this_machine(config, {})
    kernels = train_gpt.choose_kernels(config, machine)
    model = train_gpt.ready_model(train_gpt.build_model(config), machine, kernels)
    return budget.trained(config, model, kind)


def measure(settings: dict[str, str], seed: int, kind: str) -> dict[str, Any]:
    """Train a row, ship it into the budget, score it before and after."""
    values = {**settings, "SEED": str(seed)}
    for_training = tuple((name, value) for name, value in values.items() if name not in QUANTIZATION)
    return budget.figures(trained(for_training, kind), Config.from_env(values), seed)


def measure_row(settings: dict[str, str], seed: int, kind: str) -> dict[str, Any]:
    """A row with as many steps as its time allows; settings: with its name as ROW."""
    name = settings["ROW"]
    times = times_the_step(name, Path(settings["CONFIG"]))
    steps = round(int(settings["ITERATIONS"]) / times)
    of_row = {setting: value for setting, value in settings.items() if setting != "ROW"}
    found = measure({**of_row, "ITERATIONS": str(steps)}, seed, kind)
    return {**found, "times_the_step": times, "changes": VARIANTS[name]}


def row(name: str, runs: paired.Runs, base: paired.Runs) -> str:
    """A line of the table; the difference is taken seed by seed."""
    times, steps, float_bpb, size_bytes, write_seconds, read_seconds = (
        statistics.mean(run[figure] for run in runs)
        for figure in ("times_the_step", "steps", "float_bpb", "bytes", "write_seconds", "read_seconds")
    )
    return (
        f"| {name} | {runs[0]['parameters']:,} | {times:.2f} | {steps:.0f} | {float_bpb:.4f} | "
        f"{size_bytes:,.0f} | {write_seconds:.1f} | {read_seconds:.1f} | {paired.cells(runs, base)}"
    )


def tables(measured: dict[str, Any]) -> list[str]:
    """What was held equal, and a line per row, the best one first."""
    rows: dict[str, paired.Runs] = measured["rows"]
    base = rows.get(BASE, [])
    best_first = sorted(rows, key=lambda name: statistics.mean(run["val_bpb"] for run in rows[name]))
    changes = []
    for name in best_first:
        changed = " ".join(f"{setting}={value}" for setting, value in rows[name][0]["changes"].items())
        if changed:
            changes.append(f"{name}: {changed}")
    return [
        f"`{measured['config']}`, {measured['steps']} of its steps, or as many as take the same time on one "
        f"thread; artifacts of at most {measured['artifact_bytes']:,} bytes (weights alone). Bits per byte "
        "without overlap, of the weights before quantization and of the artifact; CPU seconds that writing "
        "and reading it takes.",
        "", *paired.table(HEADER, [row(name, rows[name], base) for name in best_first]),
        "", f"The rows change: {'; '.join(changes)}.",
    ]  # fmt: skip


def main() -> None:
    """Measure what is not measured yet, print the table, and with --keep store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=REPO / "configs/cpu_demo.env")
    parser.add_argument("--steps", type=int, default=400, help="of the config as it is")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs, one file each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 42, 2025])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="ROW")
    parser.add_argument("--table", action="store_true", help="measure nothing more")
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    arguments = parser.parse_args()
    if arguments.table:
        arguments.seeds = []
    torch.set_num_threads(1)
    before = results.conditions()
    stack = stacks(arguments)
    measured: dict[str, Any] = {
        "config": arguments.config.name, "steps": arguments.steps,
        "artifact_bytes": int(next(iter(stack.values()))["ARTIFACT_BYTES_MAX"]),
    }  # fmt: skip
    name = f"tune-{arguments.config.stem}-{arguments.steps}steps"
    ablation.finish_shared(name, arguments, arguments.runs, stack, "cpu", before, measured, measure_row)


if __name__ == "__main__":
    main()
