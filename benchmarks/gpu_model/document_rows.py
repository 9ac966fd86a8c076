"""Rows that scoring needs and keys that a token attends to, on real documents.

    python -m benchmarks.gpu_model.document_rows --data data/datasets/fineweb10B_sp8192

The script's own windows over a validation shard, scaled to the official one, with and without document masks;
and the mean number of keys a token sees in rows of 2,048: the `--keys` of the census.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_model import fake_gpu
from data import shards

OFFICIAL_TARGETS = 40_540_160  # of the sp8192 validation shard
OFFICIAL_DOCUMENTS = 50_000
CONTEXT = 2048  # tokens of a row
TRAINING_SHARDS = 2  # that the keys are averaged over


class Scoring(NamedTuple):
    """One way to score."""

    name: str
    chunk: int  # targets whose rows are scored together
    stride: int  # targets scored per row
    masked: bool  # attention stays inside a document


SCORINGS = (
    Scoring("sliding", 32 * 65_536, 64, True),
    Scoring("ttt", 32_768, 64, True),
    Scoring("roundtrip", 32 * 65_536, CONTEXT, True),
    Scoring("sliding, no mask", 32 * 65_536, 64, False),
    Scoring("ttt, no mask", 32_768, 64, False),
)


def document_lengths(tokens: np.ndarray) -> dict[str, float]:
    """How long the documents are."""
    starts = np.flatnonzero(tokens == shards.BOS_ID)
    lengths = np.diff(np.append(starts, len(tokens)))
    long = lengths > CONTEXT
    return {
        "documents": len(starts),
        "mean_tokens": float(lengths.mean()),
        "median_tokens": float(np.median(lengths)),
        "share_longer_than_a_row": float(long.mean()),
        "share_of_tokens_in_longer_ones": float(lengths[long].sum() / lengths.sum()),
    }


def scoring_rows(tokens: np.ndarray, scoring: Scoring) -> dict[str, float]:
    """How many rows a way to score takes."""
    from benchmarks.gpu_model import subject

    targets = len(tokens) - 1
    begins = np.zeros(targets, np.int64)
    if scoring.masked:
        positions = np.arange(targets)
        begins = np.maximum.accumulate(np.where(tokens[:-1] == shards.BOS_ID, positions, 0))
    chunks = subject.window_rows(targets, CONTEXT, scoring.stride, begins, scoring.chunk)
    per_chunk = [len(rows) for rows in chunks]
    rows = sum(per_chunk)
    scale = OFFICIAL_TARGETS / targets
    return {
        "rows": rows,
        "targets_per_row": targets / rows,
        "rows_of_official_set": rows * scale,
        "forward_tokens_of_official_set": rows * scale * CONTEXT,
        "chunks": len(per_chunk),
        "fewest_rows_of_a_chunk": min(per_chunk),
        "mean_rows_of_a_chunk": float(np.mean(per_chunk)),
        "most_rows_of_a_chunk": max(per_chunk),
    }


def keys_per_token(tokens: np.ndarray) -> dict[str, float]:
    """Keys that a token attends to, itself included, where rows are cut from the stream one after another."""
    rows_NT = tokens[: len(tokens) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
    begins_NT = rows_NT == shards.BOS_ID
    begins_NT[:, 0] = True
    positions_T = np.arange(CONTEXT)
    starts_NT = np.maximum.accumulate(np.where(begins_NT, positions_T, 0), axis=1)
    return {
        "mean_keys": float((positions_T - starts_NT + 1).mean()),
        "mean_keys_without_mask": (CONTEXT + 1) / 2,
        "documents_per_row": float(begins_NT.sum(axis=1).mean()),
    }


def training_keys(folder: Path) -> list[dict[str, float]]:
    """`keys_per_token` of the first training shards."""
    paths = sorted(folder.glob("*_train_*.bin"))[:TRAINING_SHARDS]
    return [keys_per_token(shards.read_shard(path)) for path in paths]


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of *_train_*.bin and *_val_*.bin shards")
    fake_gpu.add_arguments(parser)
    options = parser.parse_args(arguments)
    data = Path(options.data).expanduser()
    validation = sorted(data.glob("*_val_*.bin"))
    if not validation:
        print(f"{data}: no *_val_*.bin shard; give the folder that DATA_PATH names", file=sys.stderr)
        return 1
    tokens = shards.read_shard(validation[0]).astype(np.int64)
    result: dict[str, Any] = {"lengths": document_lengths(tokens)}
    for scoring in SCORINGS:
        result[scoring.name] = scoring_rows(tokens, scoring)
    result["validation_keys"] = keys_per_token(tokens)
    result["training_keys"] = training_keys(data)
    text = json.dumps(result, indent=1)
    (fake_gpu.prepare_folder(options.out) / "document_rows.json").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
