"""The forward passes of an evaluation, and the document lengths of the official validation text.

`gpu_check` projects the seconds of an evaluation from them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from train_gpt import BOS_ID, GPT, Config  # noqa: E402

GPUS = 8
# Documents of the CaseOps validation text by length in tokens, the longest first. Public logs print the
# shortest and the longest of 64 ("dl:"); between these places logarithms are on a line. By that their targets
# are 47.68 million; by the logs' `val_tokens` 47.85, to which lengths are scaled.
PLACES = (1, 17, 81, 145, 305, 689, 1393, 2545, 4261, 7473, 12017, 17009, 23025, 30001, 37009, 42001, 46001,
          48017, 49009, 49681, 49937, 50000)
LENGTHS = (97114, 30330, 17244, 13079, 8826, 5633, 3865, 2746, 2048, 1503, 1108, 842, 625, 441, 300, 222, 166,
           134, 117, 99, 83, 27)
PUBLISHED_TARGETS = 47_853_343  # of the published CaseOps text, as public logs print it
FUSED_TARGETS = 43_767_808  # of the same text with fused case marks, the default's, as #2109 logs it


class Pass(NamedTuple):
    """Tokens that pass through the model together."""

    tokens: int
    learning: bool


def official_text(targets: int = FUSED_TARGETS) -> np.ndarray:
    """A text of BOS and filling, with 50,000 documents of the official lengths, for this many targets."""
    places = np.arange(1, PLACES[-1] + 1)
    lengths = np.exp(np.interp(np.log(places), np.log(PLACES), np.log(LENGTHS))) - 1
    lengths = np.rint(lengths * (targets / lengths.sum())).astype(int)
    return text_of(lengths)


def text_of(lengths: np.ndarray) -> np.ndarray:
    """Documents with these numbers of targets."""
    tokens = np.full(lengths.sum() + 1, BOS_ID + 1, np.uint16)
    tokens[np.cumsum(lengths) - lengths] = BOS_ID
    return tokens


def passes_of_windows(tokens: np.ndarray, config: Config, stride: int, chunk_tokens: int) -> list[Pass]:
    """Of windows that learn nothing."""
    starts = train_gpt.document_starts(tokens[None, :-1], config)
    begins = np.repeat(starts[:-1], np.diff(starts))
    rows = train_gpt.window_rows(len(tokens) - 1, config.eval_length, stride, begins, chunk_tokens)
    return [Pass(sum(map(len, rows)) * config.eval_length, learning=False)]


def passes_of_documents(tokens: np.ndarray, config: Config) -> Iterator[Pass]:
    """Of adapters: the windows of all chunks, as they are filled up to rows of one length."""
    model = GPT(config, seed=None)  # nothing is scored
    scorer = train_gpt.DocumentScorer(model, tokens, config, train_gpt.Ledger(tokens))
    for batch in scorer.batches():
        for chunk in scorer.chunks(batch):
            # Rows are padded to a multiple of 16, as the script does it for its kernels.
            length = math.ceil((chunk.stop - chunk.first) / 16) * 16
            yield Pass(len(chunk.documents) * length, learning=chunk.learning > 0)
