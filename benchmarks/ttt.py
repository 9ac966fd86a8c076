"""What each way of scoring costs, at the document lengths of the official validation text.

    python -m benchmarks.ttt cost [--config FILE] [--census FILE.json] [--set NAME=VALUE ...]
    python -m benchmarks.ttt logged --census FILE.json

`cost` counts the tokens that pass through the model for each scored target. With a census of `python -m
benchmarks.gpu_model --what train_loop --mlp kernel --keys 517` it gives the seconds of 8 GPUs: modelled, not
measured. `logged` models the test-time training of public runs in the same way, beside the seconds in their
logs. What each way brings is a table of `experiments.py ttt`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks.gpu_model.roofline import BANDWIDTH_SHARE, CARDS, matrix_product_rate  # noqa: E402
from data.files import escape_unprintable  # noqa: E402
from train_gpt import BOS_ID, GPT, Config  # noqa: E402

GPUS = 8
CARD = CARDS["h100"]
BYTES_PER_SECOND = BANDWIDTH_SHARE * CARD.bytes_per_second
# Documents of the CaseOps validation text by length in tokens, the longest first. Public logs print the
# shortest and the longest of 64 ("dl:"); between these places logarithms are on a line. By that their targets
# are 47.68 million; by the logs' `val_tokens` 47.85, to which lengths are scaled.
PLACES = (1, 17, 81, 145, 305, 689, 1393, 2545, 4261, 7473, 12017, 17009, 23025, 30001, 37009, 42001, 46001,
          48017, 49009, 49681, 49937, 50000)  # fmt: skip
LENGTHS = (97114, 30330, 17244, 13079, 8826, 5633, 3865, 2746, 2048, 1503, 1108, 842, 625, 441, 300, 222, 166,
           134, 117, 99, 83, 27)  # fmt: skip
# Bytes that a step of adapters moves for each number. Ours: AdamW reads weight and mean square (fp32)
# and gradient (bf16), and writes weight, mean square and bf16 weight. Both passes read that one, a gradient
# is written and copied. Others': a first moment, fp32 gradients, casts from fp32.
ADAPTER_BYTES = (4 + 4 + 2) + (4 + 4 + 2) + 2 * 2 + 3 * 2
ADAPTER_BYTES_OF_OTHERS = 4 * (7 + 2 + 3)
HOST_SECONDS = 0.02  # for the launches of a chunk, forward and backward; not measured
IDLE_SECONDS = 0.0035  # of the GPU, while a chunk's scores travel; not measured


class Logged(NamedTuple):
    """Test-time training in public logs: seconds of each seed, without pauses for SGD on the whole model."""

    name: str
    settings: str
    short_chunk: int  # for documents shorter than 2,048 tokens
    targets: int
    seconds: tuple[float, ...]


LOGGED = (
    Logged("#1530", "TTT_LORA_RANK=96 TTT_CHUNK_SIZE=32 EVAL_SEQ_LEN=2048", 32, 40_540_160,
           (338.2, 343.3, 313.0)),
    Logged("#1855", "TTT_LORA_RANK=80 TTT_CHUNK_SIZE=48 EVAL_SEQ_LEN=2048", 48, 47_853_343,
           (424.4, 379.6, 395.5)),
    Logged("#2067", "TTT_LORA_RANK=224 TTT_CHUNK_SIZE=48 EVAL_SEQ_LEN=2560", 16, 47_853_343,
           (590.9, 526.4, 559.5)),
)  # fmt: skip


class Pass(NamedTuple):
    """Tokens that pass through the model together."""

    tokens: int
    learning: bool
    adapter_numbers: int = 0  # of the documents that learn


class Speed(NamedTuple):
    """Modelled seconds of one GPU for a token, without adapters."""

    forward: float
    backward: float  # without gradients of the model's weights
    whole_backward: float  # with them

    @classmethod
    def of(cls, census: dict[str, Any]) -> Speed:
        """From a traced training step."""
        seconds = {False: 0.0, True: 0.0}
        flop = 0.0
        for graph in census["graphs"]:
            for launch in graph["launches"]:
                seconds[graph["backward"]] += 1e-6 * launch["microseconds"]
                if launch["kind"] in ("product", "custom") and not graph["backward"]:
                    flop += launch["flop"]
        # Gradients of weights are as many products as a forward pass has.
        weights_seconds = flop / matrix_product_rate(CARD, "bfloat16")
        whole_backward = seconds[True] / census["tokens"]
        forward = seconds[False] / census["tokens"]
        return cls(forward, whole_backward - weights_seconds / census["tokens"], whole_backward)

    def of_adapters(self, config: Config, adapter_bytes: int, passes: list[Pass]) -> float:
        """Seconds of passes with adapters: of the GPU or of its host, whichever is slower."""
        names = [name for name in config.lora_targets if name != "head"]
        layout = train_gpt.adapter_layout(config)[:-1]
        outputs = sum(sum(of_visit.values()) for of_visit in layout)
        inputs = len(layout) * len(names) * config.model_dim
        # In bf16: an input is read, the R numbers between A and B and the output are written and read.
        between = 2 * len(layout) * len(names) * config.ttt_lora_rank
        adapter_seconds = 2 * (inputs + between + 2 * outputs) / BYTES_PER_SECOND
        seconds = 0.0
        for one in passes:
            times = 3 if one.learning else 1  # backward: two products for each one
            gpu = one.tokens * (self.forward + times * adapter_seconds)
            if one.learning:
                gpu += one.tokens * self.backward + adapter_bytes * one.adapter_numbers / BYTES_PER_SECOND
            seconds += max(gpu, HOST_SECONDS * (1 if one.learning else 0.4)) + IDLE_SECONDS
        return seconds


def official_text(targets: int = LOGGED[-1].targets) -> np.ndarray:
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


def passes_of_documents(tokens: np.ndarray, config: Config, kept: bool = False) -> Iterator[Pass]:
    """Of adapters: the windows of all chunks, as they are filled up to rows of one length.

    kept: documents that have ended keep their rows to the end of their batch, as in public scripts.
    """
    model = GPT(config, seed=None)  # nothing is scored
    scorer = train_gpt.DocumentScorer(model, tokens, config, train_gpt.Ledger(tokens))
    for batch in scorer.batches():
        for chunk in scorer.chunks(batch):
            # Rows are padded to a multiple of 16, as the script does it for its kernels.
            length = math.ceil((chunk.stop - chunk.first) / 16) * 16
            numbers = chunk.learning * len(scorer.first_P)
            rows = len(batch) if kept else len(chunk.documents)
            if kept and numbers:
                numbers = len(batch) * len(scorer.first_P)
            yield Pass(rows * length, learning=numbers > 0, adapter_numbers=numbers)


def seconds_of_logged(run: Logged, speed: Speed) -> float:
    """Modelled, on 8 GPUs."""
    names = [*run.settings.split(), "TTT_BATCH_SIZE=64", "TTT_LORA_TARGETS=q,k,v,o,mlp,head"]
    config = Config.from_env(dict(pair.split("=", 1) for pair in names))
    tokens = official_text(run.targets)
    lengths = np.diff(np.flatnonzero(np.append(tokens[:-1], BOS_ID) == BOS_ID))
    seconds = 0.0
    for group, chunk in ((lengths >= 2048, config.ttt_chunk_size), (lengths < 2048, run.short_chunk)):
        config = replace(config, ttt_chunk_size=chunk)
        passes = list(passes_of_documents(text_of(lengths[group]), config, kept=True))
        seconds += speed.of_adapters(config, ADAPTER_BYTES_OF_OTHERS, passes) / GPUS
    return seconds


def logged(speed: Speed) -> None:
    """Print the modelled seconds of public runs beside those of their logs."""
    print("| run | settings | logged seconds | modelled | logged / modelled |\n|---|---|---|---|---|")
    factors = []
    for run in LOGGED:
        modelled = seconds_of_logged(run, speed)
        ratios = [seconds / modelled for seconds in run.seconds]
        factors += ratios
        said = " ".join(f"{seconds:.0f}" for seconds in run.seconds)
        print(f"| {run.name} | `{run.settings}` | {said} | {modelled:.0f} | "
              f"{min(ratios):.2f} to {max(ratios):.2f} |")
    print(f"all: {np.mean(factors):.2f}, {min(factors):.2f} to {max(factors):.2f}")


def cost(config: Config, speed: Speed | None) -> None:
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
          f"batches of {config.documents_at_once}")
    print("| score | forward tokens per target | backward | modelled seconds on 8 GPUs |\n|---|---|---|---|")
    for name, (passes, text) in found.items():
        forward = sum(one.tokens for one in passes) / (len(text) - 1)
        backward = sum(one.tokens for one in passes if one.learning) / (len(text) - 1)
        seconds = "-"
        if speed and name == "LoRA":
            seconds = f"{speed.of_adapters(config, ADAPTER_BYTES, passes) / GPUS:.0f}"
        elif speed:
            seconds = f"{(forward * speed.forward + backward * speed.whole_backward) * targets / GPUS:.0f}"
        print(f"| {name} | {forward:.2f} | {backward:.2f} | {seconds} |")


def main() -> None:
    """Count, and print a line for each way of scoring or for each logged run."""
    escape_unprintable()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=["cost", "logged"])
    parser.add_argument("--config", type=Path, help="settings; the script's defaults without it")
    parser.add_argument("--census", type=Path, help="LABEL.json of benchmarks.gpu_model, with recurrence")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings over it")
    given = parser.parse_args()
    speed = Speed.of(json.loads(given.census.read_text(encoding="utf-8"))) if given.census else None
    if given.verb == "logged":
        if speed is None:
            parser.error("logged models seconds: give it a --census")
        logged(speed)
        return
    environ = dict(pair.split("=", 1) for pair in given.set)
    if given.config:
        environ["CONFIG"] = str(given.config)
    cost(Config.from_env(environ), speed)


if __name__ == "__main__":
    main()
