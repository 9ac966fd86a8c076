"""The default and the systems it descends from, each as a record at equal cost, at a width for a CPU.

    python benchmarks/stacks.py --data data/datasets/fineweb_sample_sp1024 --limit 260000
        --tokenizer data/tokenizers/fineweb_1024_bpe.model --track track_cpu_small_sp1024 [--steps 600]
        [--seeds 42 1337 2025] [--only DefaultStack] [--round-trip]

Each is a whole run of train_gpt.py on one core: its own model, optimizer, artifact and evaluation, the
geometry of ablation.py, the same tokens in the same order, and the same limit on code and weights. Each gets
as many steps as cost what `--steps` of the default do: that is measured first, by the CPU clock of short runs
in turns, so that a machine which is now slower, now faster meets all alike, and kept; runs that are finished
are not run again. Layers are scaled from each
system's own depth, schedules that count steps from the length of its own 8-GPU run; the learning rates are
the baseline's for all. What ends is packed under records/ as it is, the best and the worst. Two processes,
each with some of the stacks, share two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
import train_gpt  # noqa: E402
from benchmarks.ablation import BASELINE_SCHEDULE, DEFAULT_SMALL, SMALL, kept_steps  # noqa: E402
from benchmarks.turns import Turns  # noqa: E402

CONFIGS = "configs"
PR549_STEPS, PR1493_STEPS = 7191, 4553  # of their runs on 8 GPUs
# A schedule in shares of the run: each 0 with its share beside it; alone it would mean none.
IN_SHARES = {"WARMDOWN_ITERS": "0", "MUON_MOMENTUM_WARMUP_STEPS": "0"}
STACKS = {
    "DefaultStack": DEFAULT_SMALL,
    "UpstreamBaseline": {"CONFIG": f"{CONFIGS}/upstream_baseline.env", **BASELINE_SCHEDULE},
    "PR549": {
        "CONFIG": f"{CONFIGS}/pr549.env", **DEFAULT_SMALL, **IN_SHARES, "XSA_LAST_N": "1",
        "PARALLEL_START_LAYER": "-1", "ROPE_TRAIN_SEQ_LEN": "0", "WARMDOWN_FRAC": str(3500 / PR549_STEPS),
        "MUON_MOMENTUM_WARMUP_FRAC": str(1500 / PR549_STEPS), "RATE_CONTROL": "1",
        "BIGRAM_DIM": "16", "VE_DIM": "16", "VE_LAYERS": "3",
    },
    "PR1493": {
        "CONFIG": f"{CONFIGS}/pr1493.env", **DEFAULT_SMALL, **IN_SHARES, "WARMDOWN_FRAC": "0.72",
        "MUON_MOMENTUM_WARMUP_FRAC": str(1500 / PR1493_STEPS),
    },
}  # fmt: skip
# The ancestors learn by SGD, the default by adapters, at the rate of the demo; in chunks of half the context,
# as shorter ones would pass the limit of the evaluation's clock on one core.
BY_SGD = {"EVAL_STRIDE": "96", "TTT_ENABLED": "1", "TTT_CHUNK_TOKENS": "9216", "TTT_EPOCHS": "1"}
BY_ADAPTERS = {"EVAL_STRIDE": "96", "TTT_ENABLED": "1", "TTT_LORA_LR": "0.003", "TTT_CHUNK_SIZE": "64"}
WITHOUT_OVERLAP = {"EVAL_STRIDE": "0", "TTT_ENABLED": "0"}
EVALUATION = {
    "DefaultStack": BY_ADAPTERS, "UpstreamBaseline": WITHOUT_OVERLAP, "PR549": BY_SGD, "PR1493": BY_SGD,
}  # fmt: skip
COMMON = {
    **SMALL, "CPU_THREADS": "1", "TRAIN_PREFETCH": "1", "WARMUP_STEPS": "2", "VAL_LOSS_EVERY": "0",
    "MAX_WALLCLOCK_SECONDS": "0", "GPTQ_CALIBRATION_BATCHES": "16", "GPTQ_DAMPING": "0.05",
}  # fmt: skip
PRICE_STEPS = 60  # of a short run, whose schedule is a whole one's, in turns of
PRICE_TURN_STEPS = 10
PRICE_SERIES = 3  # of such runs, whose median counts: one was a third off, on a machine that others share


def environments(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The variables of each stack; the baseline is scored as it was, without overlap and without training."""
    import sentencepiece

    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(arguments.tokenizer)).vocab_size()
    given = {
        "VOCAB_SIZE": str(vocabulary), "DATA_PATH": str(arguments.data),
        "TOKENIZER_PATH": str(arguments.tokenizer), "ARTIFACT_BYTES_MAX": str(arguments.limit),
    }  # fmt: skip
    found = {}
    for stack, settings in STACKS.items():
        evaluation = WITHOUT_OVERLAP if arguments.round_trip else EVALUATION[stack]
        found[stack] = {**COMMON, **settings, **evaluation, **given}
    return found


def times_the_first(stacks: dict[str, dict[str, str]]) -> dict[str, float]:
    """What a step of each stack costs, in steps of the first, by the CPU clock of short runs in turns."""
    cpu_ms = dict.fromkeys(stacks, 0.0)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        turns = {}
        for name, settings in stacks.items():
            # One step more than is asked for, so that no run goes on to its evaluation.
            short = {
                "ITERATIONS": str(PRICE_STEPS + 1), "RUNS_DIR": folder, "RUN_ID": name,
                "ARTIFACT_BYTES_MAX": "16000000",
            }  # fmt: skip
            turns[name] = ends.enter_context(Turns(REPO / "train_gpt.py", {**settings, **short}))
        for _ in range(PRICE_STEPS // PRICE_TURN_STEPS):
            for name, running in turns.items():
                cpu_ms[name] += sum(running.steps(PRICE_TURN_STEPS).cpu_ms)
    first = next(iter(cpu_ms.values()))
    return {name: cost / first for name, cost in cpu_ms.items()}


def steps_of_equal_cost(stacks: dict[str, dict[str, str]], steps: int) -> dict[str, int]:
    """Steps of each stack that cost what `steps` of the first do."""
    series = [times_the_first(stacks) for _ in range(PRICE_SERIES)]
    found = {}
    for name in stacks:
        times = statistics.median(one[name] for one in series)
        found[name] = round(steps / times)
    return found


def main() -> None:
    """Run each stack on each seed, then pack them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of shards, relative to the project")
    parser.add_argument("--tokenizer", type=Path, required=True, help="SentencePiece model of these shards")
    parser.add_argument("--track", required=True, help="folder under records/")
    parser.add_argument("--limit", type=int, required=True, help="bytes of code and artifact together")
    parser.add_argument("--steps", type=int, default=600, help="of the default; others: what costs that")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2025])
    parser.add_argument("--round-trip", action="store_true", help="score all without overlap or training")
    parser.add_argument("--only", nargs="+", choices=list(STACKS), default=list(STACKS))
    arguments = parser.parse_args()
    os.chdir(REPO)
    stacks = environments(arguments)
    # Another number of --steps is measured anew, and has runs of other names.
    label = f"{arguments.track}-{arguments.steps}steps"
    steps = kept_steps(REPO / "runs" / label, stacks, arguments.steps, steps_of_equal_cost)
    runs: dict[str, list[str]] = {stack: [] for stack in arguments.only}
    # Seeds are the outer loop: who ends it early has whole rows.
    for seed in arguments.seeds:
        for stack in arguments.only:
            name = f"{label}-{stack}-seed{seed}"
            of_run = {"SEED": str(seed), "RUN_ID": name, "ITERATIONS": str(steps[stack])}
            environ = os.environ | stacks[stack] | of_run
            # What a run that was ended early has finished is not run again.
            if not (REPO / "runs" / name / train_gpt.SUMMARY).exists():
                subprocess.run([sys.executable, "train_gpt.py"], env=environ, check=True)
            runs[stack].append(f"runs/{name}")
    for stack in arguments.only:
        pack = [sys.executable, "-m", "tools", "pack", *runs[stack]]
        cost = f"as many steps as cost {arguments.steps} of DefaultStack"
        blurb = f"{stack} at 4 layers × 64 on {arguments.data.name}: {cost}, on one core."
        date = f"{datetime.now(timezone.utc):%Y-%m-%d}"
        place = ["--name", stack, "--track", arguments.track]
        about = ["--date", date, "--author", "the project", "--blurb", blurb]
        subprocess.run([*pack, *place, *about], check=True)


if __name__ == "__main__":
    main()
