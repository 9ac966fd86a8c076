"""What can be asked of the settings at their full size, within a budget of seconds (B17)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from data.shards import BOS_ID
from tools.check.findings import Finding, fail, info, warn
from tools.prove import probes, questions
from tools.prove.cell import in_cell

POSITIONS = 16
POSITIONS_OF_TINY = 4  # in a model so small that its sums cost more than its passes
TOLERANCE = 1e-4  # of a sum over thousands of tokens in fp32
BLOCK = 512  # candidates at a time
SECONDS_MAX = 900.0
ON_CPU = {"DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "COMPILE": "0"}


def full_size(
    script: ModuleType, settings: Mapping[str, str], seed: int, seconds_max: float = SECONDS_MAX
) -> Iterator[Finding]:
    """A forward pass, Kraft sums, and a suffix replaced for every label; "not checked" beyond the budget."""
    started = time.monotonic()
    subject = probes.subject_of(script, {**settings, **ON_CPU}, seed, "full size")
    subject = probes.with_settings(subject, val_batch_size=1, val_tokens_limit=0)  # one row at a time
    config = subject.config
    model = probes.model_of(subject, 0.02)

    row_seconds, found = kraft_at_full_size(subject, model)
    yield found

    # Without learning a stream a little longer than the context has several windows; with it, it must be
    # longer than a chunk.
    fixed = probes.with_settings(subject, ttt_enabled=False)
    short = config.eval_length + 3 * max(config.eval_stride, 1)
    plans = [(fixed, short, 8.0)]
    if config.ttt_enabled:
        long = config.ttt_chunk_tokens + 2 * config.eval_stride
        learning_rows = 3.0 * config.ttt_epochs * config.ttt_chunk_tokens / config.eval_length
        plans.append((subject, long, long / config.eval_length + long / config.eval_stride + learning_rows))
    for planned, tokens, rows in plans:
        what = "all labels" if planned.config.ttt_enabled else "labels that learn nothing"
        needed = 2 * rows * row_seconds
        left = seconds_max - (time.monotonic() - started)
        if needed > left:
            late = f"{needed:.0f} s, {max(left, 0):.0f} s are left"
            text = f"not checked: a suffix replaced, for {what}: {late}"
            yield warn("B17", text, "full size", "give it more seconds")
            continue
        yield from suffix_replaced(planned, model, tokens)


def kraft_at_full_size(
    subject: probes.Subject, model: Any, positions: int = POSITIONS
) -> tuple[float, Finding]:
    """Seconds of a forward pass over a row, and the sums over the whole vocabulary at some targets."""
    length = subject.config.eval_length
    size = subject.config.vocab_size
    row_seconds, totals = totals_at_full_size(subject, model, positions)
    worst = 0.0
    for target, total in totals:
        worst = max(worst, abs(total - 1))
        if not abs(total - 1) <= TOLERANCE:
            text = f"probabilities of {size} tokens at target {target} sum to {total:.4f}"
            return row_seconds, fail("B17", text, "full size", questions.REMEDY_SUM)
    text = (
        f"a row of {length} tokens in {row_seconds:.1f} s; Kraft sums over {size} tokens at {positions} "
        f"targets are 1 to {worst:.1e}"
    )
    return row_seconds, info("B17", text, "full size")


@in_cell
def totals_at_full_size(
    subject: probes.Subject, model: Any, positions: int
) -> tuple[float, list[tuple[int, float]]]:
    """Seconds of a forward pass over a row, and at some of its targets the sum over the vocabulary."""
    length = subject.config.eval_length
    row_1T = torch.from_numpy(stream(subject, length).astype(np.int64))[None]
    totals = []
    with torch.no_grad():
        before = time.monotonic()
        hidden_TD = model(row_1T)[0]
        row_seconds = time.monotonic() - before
        for target in np.linspace(0, length - 1, positions).astype(int).tolist():
            total = 0.0
            for block_N in torch.arange(subject.config.vocab_size).split(BLOCK):
                nats_N = model.loss_per_token(hidden_TD[target].expand(len(block_N), -1), block_N)
                total += float(torch.exp(-nats_N.double()).sum())
            totals.append((target, total))
    return row_seconds, totals


def stream(subject: probes.Subject, tokens: int) -> np.ndarray:
    """Random tokens of the whole vocabulary in documents of about 400 tokens."""
    random = np.random.default_rng(subject.seed)
    found = random.integers(2, subject.config.vocab_size, tokens).astype(np.uint16)
    found[::397] = BOS_ID
    return found


def suffix_replaced(subject: probes.Subject, model: Any, tokens: int) -> Iterator[Finding]:
    """The labels of `evaluate` on a stream, and on one with another suffix: no earlier loss may move."""
    asked = stream(subject, tokens + 1)
    changed = asked.copy()
    first = tokens - max(subject.config.eval_stride, 1) - 1
    changed[first:] = np.where(asked[first:] == BOS_ID, BOS_ID, 2)
    before = probes.evaluation(subject, asked, model).labels
    after = probes.evaluation(subject, changed, model).labels
    for label, run in before.items():
        moved = np.abs(after[label].nats[: first - 1] - run.nats[: first - 1])
        text = f"{tokens} targets: the suffix from token {first} on moved earlier losses by {moved.max():.1e}"
        if math.isfinite(moved.max()) and moved.max() == 0:
            yield info("B17", text, f"full size: {label}")
        else:
            yield fail("B17", text, f"full size: {label}", questions.REMEDY_ORDER)
