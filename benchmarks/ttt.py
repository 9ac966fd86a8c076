"""What each way of scoring costs, at the document lengths of the official validation text.

    python -m benchmarks.ttt cost [--config FILE] [--set NAME=VALUE ...]

It counts the tokens that pass through the model for each scored target.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from data.files import escape_unprintable  # noqa: E402
from train_gpt import BOS_ID, GPT, Config  # noqa: E402

GPUS = 8
# Documents of the CaseOps validation text by length in tokens, the longest first. Public logs print the
# shortest and the longest of 64 ("dl:"); between these places logarithms are on a line. By that their targets
# are 47.68 million; by the logs' `val_tokens` 47.85, to which lengths are scaled.
PLACES = (1, 17, 81, 145, 305, 689, 1393, 2545, 4261, 7473, 12017, 17009, 23025, 30001, 37009, 42001, 46001,
          48017, 49009, 49681, 49937, 50000)  # fmt: skip
LENGTHS = (97114, 30330, 17244, 13079, 8826, 5633, 3865, 2746, 2048, 1503, 1108, 842, 625, 441, 300, 222, 166,
           134, 117, 99, 83, 27)  # fmt: skip
OFFICIAL_TARGETS = 47_853_343  # of the CaseOps text, as public logs print it


class Pass(NamedTuple):
    """Tokens that pass through the model together."""

    tokens: int
    learning: bool
    adapter_numbers: int = 0  # of the documents that learn


def official_text(targets: int = OFFICIAL_TARGETS) -> np.ndarray:
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


def passes_of_chunks(tokens: np.ndarray, config: Config) -> list[Pass]:
    """Of SGD on chunks of the text: windows, and epochs over each chunk but the last."""
    learned = (len(tokens) - 1) // config.ttt_chunk_tokens * config.ttt_chunk_tokens
    windows = passes_of_windows(tokens, config, config.eval_stride, config.ttt_chunk_tokens)
    return [*windows, Pass(config.ttt_epochs * learned, learning=True)]


def passes_of_documents(tokens: np.ndarray, config: Config) -> Iterator[Pass]:
    """Of adapters: the windows of all chunks, as they are filled up to rows of one length."""
    model = GPT(config, seed=None)  # nothing is scored
    scorer = train_gpt.DocumentScorer(model, tokens, config, train_gpt.Ledger(tokens))
    for batch in scorer.batches():
        for chunk in scorer.chunks(batch):
            # Rows are padded to a multiple of 16, as the script does it for its kernels.
            length = math.ceil((chunk.stop - chunk.first) / 16) * 16
            numbers = chunk.learning * len(scorer.initial_P)
            yield Pass(len(chunk.documents) * length, learning=numbers > 0, adapter_numbers=numbers)


def cost(config: Config) -> None:
    """Print the cost of each way of scoring."""
    tokens = official_text()
    targets = len(tokens) - 1
    share = text_of(np.diff(np.flatnonzero(np.append(tokens[:-1], BOS_ID) == BOS_ID))[::GPUS])
    found = {
        "round trip": (passes_of_windows(share, config, config.eval_length, len(share)), share),
        "sliding window": (passes_of_windows(share, config, config.eval_stride, len(share)), share),
        "SGD": (passes_of_chunks(share, config), share),
        "LoRA": (list(passes_of_documents(tokens, config)), tokens),
    }
    print(f"{targets:,} targets; context {config.eval_length}, stride {config.eval_stride}, SGD chunks of "
          f"{config.ttt_chunk_tokens}, LoRA rank {config.ttt_lora_rank}, chunks of {config.ttt_chunk_size}, "
          f"batches of {config.documents_at_once(config.eval_length)}")
    print("| score | forward tokens per target | backward |\n|---|---|---|")
    for name, (passes, text) in found.items():
        forward = sum(one.tokens for one in passes) / (len(text) - 1)
        backward = sum(one.tokens for one in passes if one.learning) / (len(text) - 1)
        print(f"| {name} | {forward:.2f} | {backward:.2f} |")


def main() -> None:
    """Count, and print a line for each way of scoring."""
    escape_unprintable()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=["cost"])
    parser.add_argument("--config", type=Path, help="settings; the script's defaults without it")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings over it")
    given = parser.parse_args()
    environ = dict(pair.split("=", 1) for pair in given.set)
    if given.config:
        environ["CONFIG"] = str(given.config)
    cost(Config.from_env(environ))


if __name__ == "__main__":
    main()
