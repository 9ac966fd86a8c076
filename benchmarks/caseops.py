"""Plain text against CaseOps and its fused form: length of the stream, bits per byte of the original text.

    python benchmarks/caseops.py --docs FILE.jsonl --work DIR [--vocabulary 1024] [--seconds 120]
        [--steps 200] [--seeds 1337 42 2025] [--only plain caseops_fused] [--threads 1] [--keep]

Each variant has a tokenizer trained alike, on the same documents behind the validation ones, and is exported
by data/export.py. The model, smaller than that of ablation.py, and the CPU seconds of training are the same
for all; the order of sequences follows the seed. All are scored without overlap, by averaged weights, on the
same validation documents, and divide by the bytes of their text. As model and vocabulary are alike, so is the
cost of a step: where others share the cores, `--steps` compares the same without their noise. Runs are kept
in DIR: several processes share the work, and what is there is not measured again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # for torch: waiting threads would burn CPU seconds

import numpy as np
import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks import ablation, paired, results  # noqa: E402
from data import export, shards  # noqa: E402
from data.encoding import PLAIN, VARIANTS  # noqa: E402

TITLE = "CaseOps against plain text"
HEADER = "| variant | bytes a token | steps | text trained on | " + paired.HEADER.format(PLAIN)
MODEL = {**ablation.SMALLER_MODEL, **ablation.SHORT_AVERAGE}


def prepared(variant: str, arguments: argparse.Namespace) -> Path:
    """The data set of a variant, exported if it is not there yet."""
    name = f"{variant}_{arguments.vocabulary}"
    status = export.main([
        "--docs", str(arguments.docs), "--name", name, "--out", str(arguments.work), "--variant", variant,
        "--train-tokenizer", str(arguments.vocabulary), "--val-docs", str(arguments.val_docs),
        "--workers", str(arguments.threads),
    ])  # fmt: skip
    if status != 0:
        raise SystemExit(f"no data for {variant}")
    return Path(arguments.work / "datasets" / name)


def targets_of(tokens: np.ndarray, documents: int) -> int:
    """Targets in the first `documents` documents of a stream."""
    starts = np.append(np.flatnonzero(tokens == shards.BOS_ID), len(tokens))
    return int(starts[min(documents, len(starts) - 1)]) - 1


def settings_of(variant: str, data: Path, arguments: argparse.Namespace) -> dict[str, str]:
    """The variables of a run on a variant."""
    tokenizer = arguments.work / "tokenizers" / f"{data.name}.model"
    paths = argparse.Namespace(
        tokenizer=tokenizer, data=data, seconds=arguments.seconds, steps=arguments.steps, val_tokens=0,
        arm="parts",
    )  # fmt: skip
    tokens = shards.read_shard(data / "fineweb_val_000000.bin")
    limit = targets_of(tokens, arguments.documents)
    default = ablation.stacks(paths)[ablation.DEFAULT]
    return {**default, **MODEL, "VAL_TOKENS_LIMIT": str(limit)}


def facts_of(settings: dict[str, str]) -> dict[str, int]:
    """Tokens and bytes of the validation text that is scored."""
    config = train_gpt.Config.from_env(settings)
    validation = train_gpt.read_validation(
        train_gpt.open_shards(f"{config.data_path}/fineweb_val_[0-9]*.bin"), config
    )
    return {"targets": len(validation.tokens) - 1, "bytes": validation.bytes_total}


def row(variant: str, runs: paired.Runs, plain: paired.Runs, text: dict[str, int], step_tokens: int) -> str:
    """A line of the table; text: its validation text in targets and bytes."""
    steps = statistics.mean(run["steps"] for run in runs)
    bytes_per_token = text["bytes"] / text["targets"]
    megabytes = steps * step_tokens * bytes_per_token / 1e6
    what = f"| {variant} | {bytes_per_token:.4f} | {steps:.0f} | {megabytes:.2f} MB | "
    return what + paired.cells(runs, plain)


def tables(measured: dict[str, Any]) -> list[str]:
    """What was held equal, and a line per variant."""
    rows = measured["rows"]
    geometry = measured["geometry"]
    size = "{NUM_LAYERS} layers × {MODEL_DIM}, {TRAIN_BATCH_TOKENS} tokens a step, {TRAIN_SEQ_LEN} a sequence"
    texts = measured["texts"]
    scored = " or ".join(f"{count:,}" for count in sorted({text["bytes"] for text in texts.values()}))
    seeds = sorted({run["seed"] for runs in rows.values() for run in runs})
    step_tokens = int(geometry["TRAIN_BATCH_TOKENS"])
    length = f"{measured['steps']} steps" if measured["steps"] else f"{measured['seconds']:g} CPU seconds"
    return [
        f"`{measured['docs']}`, tokenizers of {measured['vocabulary']} pieces trained alike; "
        f"{length} of training; {size.format(**geometry)}; seeds "
        f"{' '.join(map(str, seeds))}; {scored} bytes of validation text, the same documents for all. Text "
        "trained on: steps × tokens × bytes a token of the validation text.",
        "", *paired.table(HEADER, [
            row(name, runs, rows.get(PLAIN, []), texts[name], step_tokens) for name, runs in rows.items()
        ]),
    ]  # fmt: skip


def main() -> None:
    """Measure what is not measured yet, print the table, and with --keep store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--docs", type=Path, required=True, help="*.jsonl, validation documents first")
    parser.add_argument("--work", type=Path, required=True, help="folder for tokenizers, shards and runs")
    parser.add_argument("--vocabulary", type=int, default=1024, help="pieces of each tokenizer")
    parser.add_argument("--val-docs", type=int, default=901, help="documents that are never trained on")
    parser.add_argument("--documents", type=int, default=300, help="of these, how many are scored")
    parser.add_argument("--steps", type=int, default=0, help="of training, instead of seconds")
    parser.add_argument("--prepare", action="store_true", help="export the data sets and end")
    paired.add_options(parser, list(VARIANTS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    before = results.conditions()
    data = {variant: prepared(variant, arguments) for variant in arguments.only}
    if arguments.prepare:
        return
    stacks = {variant: settings_of(variant, data[variant], arguments) for variant in arguments.only}
    warm = {**stacks[arguments.only[0]], "ITERATIONS": "2", "VAL_TOKENS_LIMIT": "2000"}
    ablation.measure(warm, 0, "cpu")  # thread pools and caches
    measured: dict[str, Any] = {
        "docs": arguments.docs.name, "vocabulary": arguments.vocabulary,
        "geometry": {**ablation.SMALL, **MODEL},
        "seconds": arguments.seconds, "steps": arguments.steps,
        "texts": {variant: facts_of(stacks[variant]) for variant in stacks},
    }  # fmt: skip
    length = f"{arguments.steps}steps" if arguments.steps else f"{arguments.seconds:g}s"
    name = f"caseops-{arguments.docs.stem}-{arguments.vocabulary}-{length}"
    folder = arguments.work / "runs"
    ablation.finish_shared(name, arguments, folder, stacks, "cpu", before, measured)


if __name__ == "__main__":
    main()
