"""What each way of scoring costs: tokens that pass through the model for each scored target.

    python benchmarks/ttt.py cost --data DIR [--config FILE] [--census FILE.json] [--set NAME=VALUE ...]

The program counts at the lengths that the documents of the validation text have, with the settings of a
configuration. With a census of `python -m benchmarks.gpu_model --what train_loop` it gives the seconds of 8
GPUs: modelled, not measured. A token backward then costs what it does in training. Adapters need no gradients
of weights, which saves about as much as their own products add; what their optimizer reads and writes counts
by itself. What each way brings is a table of `experiments.py ttt`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks.gpu_model.document_rows import OFFICIAL_DOCUMENTS, OFFICIAL_TARGETS  # noqa: E402
from benchmarks.gpu_model.roofline import BANDWIDTH_SHARE, CARDS  # noqa: E402
from train_gpt import BOS_ID, GPT, Config  # noqa: E402

GPUS = 8
# How often a step reads or writes as much as the adapters are, in fp32: AdamW reads four numbers for each and
# writes three; its gradient is filled with zeros and written; casts read and write twice, half as much.
ADAPTER_PASSES = 7 + 2 + 3


class TokenTime(NamedTuple):
    """Modelled microseconds of one GPU for a token forward and for one backward."""

    forward_microseconds: float
    backward_microseconds: float

    @classmethod
    def of(cls, census: dict[str, Any]) -> TokenTime:
        """From a traced training step."""
        microseconds = {False: 0.0, True: 0.0}
        for graph in census["graphs"]:
            for launch in graph["launches"]:
                microseconds[graph["backward"]] += launch["microseconds"]
        return cls(microseconds[False] / census["tokens"], microseconds[True] / census["tokens"])


class Cost(NamedTuple):
    """What a score asks for, per target that is scored."""

    forward: float  # tokens that pass through the model
    backward: float
    adapter_bytes: float = 0.0  # read and written by steps of adapters
    passes: float = 0.0  # of a batch through the model, where they are counted

    def seconds(self, token: TokenTime, targets: int) -> float:
        """Of 8 GPUs: modelled, their host not counted."""
        microseconds = self.forward * token.forward_microseconds + self.backward * token.backward_microseconds
        moving = self.adapter_bytes / (BANDWIDTH_SHARE * CARDS["h100"].bytes_per_second)
        return (1e-6 * microseconds + moving) * targets / GPUS


def cost_of_windows(tokens: np.ndarray, config: Config, stride: int, chunk_tokens: int) -> Cost:
    """Of windows that learn nothing."""
    begins = train_gpt.document_start_of_targets(tokens, config)
    rows = train_gpt.window_rows(len(tokens) - 1, config.eval_length, stride, begins, chunk_tokens)
    return Cost(sum(map(len, rows)) * config.eval_length / (len(tokens) - 1), 0.0)


def cost_of_chunks(tokens: np.ndarray, config: Config) -> Cost:
    """Of SGD on chunks of the text: windows, and epochs over each chunk but the last."""
    windows = cost_of_windows(tokens, config, config.eval_stride, config.ttt_chunk_tokens)
    learned = (len(tokens) - 1) // config.ttt_chunk_tokens * config.ttt_chunk_tokens
    learning = config.ttt_epochs * learned / (len(tokens) - 1)
    return Cost(windows.forward + learning, learning)


def documents_of_a_rank(tokens: np.ndarray) -> np.ndarray:
    """These documents, again and again until they are as many as one of 8 ranks has of the official text.

    The more documents there are, the more alike are the lengths of a batch.
    """
    documents = int((tokens == BOS_ID).sum())
    return np.tile(tokens, max(round(OFFICIAL_DOCUMENTS / GPUS / documents), 1))


def cost_of_documents(tokens: np.ndarray, config: Config) -> Cost:
    """Of adapters: the windows of all chunks, as they are filled up to rows of one length."""
    model = GPT(config, seed=None)  # nothing is scored
    scorer = train_gpt.DocumentScorer(model, tokens, config, train_gpt.Ledger(tokens))
    adapters = train_gpt.DocumentAdapters(model, config, scorer.first_a, 1)
    document_bytes = 4 * sum(weights.numel() for weights in [*adapters.a.values(), *adapters.b.values()])
    forward = 0
    backward = 0
    adapter_bytes = 0
    passes = 0
    for batch in scorer.batches():
        for chunk in scorer.chunks(batch):
            passed = chunk.rows * (chunk.stop - chunk.first)
            forward += passed
            passes += 1
            if chunk.learning:
                backward += passed
                adapter_bytes += ADAPTER_PASSES * document_bytes * len(batch)
    targets = len(tokens) - 1
    return Cost(forward / targets, backward / targets, adapter_bytes / targets, passes / targets)


def cost(arguments: argparse.Namespace) -> None:
    """Print the cost of each way of scoring."""
    environ = {"DATA_PATH": str(arguments.data), **dict(pair.split("=", 1) for pair in arguments.set)}
    if arguments.config:
        environ["CONFIG"] = str(arguments.config)
    config = Config.from_env(environ)
    shards = train_gpt.open_shards(f"{config.data_path}/fineweb_val_[0-9]*.bin")
    tokens = np.concatenate([train_gpt.read_tokens(shard) for shard in shards])
    costs = {
        "round trip": cost_of_windows(tokens, config, config.eval_length, len(tokens)),
        "sliding window": cost_of_windows(tokens, config, config.eval_stride, len(tokens)),
        "SGD": cost_of_chunks(tokens, config),
        "LoRA": cost_of_documents(documents_of_a_rank(tokens), config),
    }
    token = None
    if arguments.census:
        token = TokenTime.of(json.loads(arguments.census.read_text(encoding="utf-8")))
    print(f"{arguments.data.name}: {len(tokens) - 1:,} targets; context {config.eval_length}, stride "
          f"{config.eval_stride}, SGD chunks of {config.ttt_chunk_tokens}, LoRA chunks of "
          f"{config.ttt_chunk_size}, batches of {config.documents_at_once}")
    print("| score | forward tokens per target | backward | modelled seconds on 8 GPUs |\n|---|---|---|---|")
    for name, found in costs.items():
        seconds = f"{found.seconds(token, OFFICIAL_TARGETS):.0f}" if token else "-"
        print(f"| {name} | {found.forward:.2f} | {found.backward:.2f} | {seconds} |")


def main() -> None:
    """Count, and print a line for each way of scoring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=["cost"])
    parser.add_argument("--data", type=Path, required=True, help="folder of fineweb_val_*.bin")
    parser.add_argument("--config", type=Path, help="settings; the script's defaults without it")
    parser.add_argument("--census", type=Path, help="LABEL.json of benchmarks.gpu_model, with recurrence")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings over it")
    cost(parser.parse_args())


if __name__ == "__main__":
    main()
