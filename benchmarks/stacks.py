"""The default and the systems it descends from, each as a record at equal seconds, at a width for a CPU.

    python benchmarks/stacks.py --data data/datasets/fineweb_sample_sp1024 --limit 230000
        --tokenizer data/tokenizers/fineweb_1024_bpe.model --track track_cpu_small_sp1024 [--seconds 180]
        [--seeds 1337] [--only DefaultStack] [--round-trip]

Each is a whole run of train_gpt.py on one core: its own model, optimizer, artifact and evaluation, the
geometry of ablation.py, the same tokens in the same order, and the same limit on code and weights. Layers
are scaled from each system's own depth, schedules that count steps from the length of its own 8-GPU run; the
learning rates are the baseline's for all. What ends is packed under records/ as it is, the best and the
worst. Two processes, each with some of the stacks, share two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from benchmarks.ablation import BASELINE_SCHEDULE, DEFAULT_SMALL, SMALL  # noqa: E402

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
    **SMALL, "CPU_THREADS": "1", "TRAIN_PREFETCH": "1", "WARMUP_STEPS": "2", "ITERATIONS": "1000000",
    "VAL_LOSS_EVERY": "0", "GPTQ_CALIBRATION_BATCHES": "16", "GPTQ_RESERVE_SECONDS": "2",
    "GPTQ_DAMPING": "0.05",
}  # fmt: skip


def environment(stack: str, seed: int, arguments: argparse.Namespace) -> dict[str, str]:
    """The variables of one run; the baseline is scored as it was, without overlap and without training."""
    import sentencepiece

    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(arguments.tokenizer)).vocab_size()
    evaluation = WITHOUT_OVERLAP if arguments.round_trip else EVALUATION[stack]
    return {
        **COMMON, **STACKS[stack], **evaluation, "SEED": str(seed), "VOCAB_SIZE": str(vocabulary),
        "DATA_PATH": str(arguments.data), "TOKENIZER_PATH": str(arguments.tokenizer),
        "MAX_WALLCLOCK_SECONDS": str(arguments.seconds), "ARTIFACT_BYTES_MAX": str(arguments.limit),
        "RUN_ID": f"{arguments.track}-{stack}-seed{seed}",
    }  # fmt: skip


def main() -> None:
    """Run each stack on each seed, then pack them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of shards, relative to the project")
    parser.add_argument("--tokenizer", type=Path, required=True, help="SentencePiece model of these shards")
    parser.add_argument("--track", required=True, help="folder under records/")
    parser.add_argument("--limit", type=int, required=True, help="bytes of code and artifact together")
    parser.add_argument("--seconds", type=int, default=180, help="training time of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337])
    parser.add_argument("--round-trip", action="store_true", help="score all without overlap or training")
    parser.add_argument("--only", nargs="+", choices=list(STACKS), default=list(STACKS))
    arguments = parser.parse_args()
    runs: dict[str, list[str]] = {stack: [] for stack in arguments.only}
    # Seeds are the outer loop, so that drift of the machine meets every stack alike.
    for seed in arguments.seeds:
        for stack in arguments.only:
            settings = environment(stack, seed, arguments)
            subprocess.run([sys.executable, "train_gpt.py"], cwd=REPO, env=os.environ | settings, check=True)
            runs[stack].append(f"runs/{settings['RUN_ID']}")
    for stack in arguments.only:
        pack = [sys.executable, "-m", "tools", "pack", *runs[stack]]
        blurb = f"{stack} at 4 layers × 64, {arguments.seconds} s of one core on {arguments.data.name}."
        date = f"{datetime.now(timezone.utc):%Y-%m-%d}"
        place = ["--name", stack, "--track", arguments.track]
        about = ["--date", date, "--author", "the project", "--blurb", blurb]
        subprocess.run([*pack, *place, *about], cwd=REPO, check=True)


if __name__ == "__main__":
    main()
