"""Mutants of the scorer of documents: what adapters learn and when, and what they keep of other documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

# Takes a script, one of its scorers of documents and a batch; scores it.
ScoreBatch = Callable[[Any, Any, np.ndarray], None]


def scored_by(function: ScoreBatch) -> Callable[[ModuleType], None]:
    """A change that lets `function` score a batch of documents."""

    def change(script: Any) -> None:
        script.DocumentScorer.score = lambda scorer, batch, *_: function(script, scorer, batch)

    return change


def begun(script: Any, scorer: Any, batch: np.ndarray) -> Any:
    """The adapters of a batch, as the script begins them."""
    return script.DocumentAdapters(scorer.model, scorer.config, scorer.initial_P, len(batch))


def targets_of(scorer: Any, chunk: Any) -> np.ndarray:
    """The targets (B, C) of a chunk, read past the ledger; those beyond the text are its last token."""
    places_BC = scorer.begins[chunk.documents, None] + np.arange(chunk.start, chunk.stop) + 1
    return np.asarray(scorer.tokens[np.minimum(places_BC, len(scorer.tokens) - 1)])


def learn_in_private(
    scorer: Any, batch: np.ndarray, chunk: Any, adapters: Any, rows: int, beyond: int = 0
) -> None:
    """A step on a chunk of the first `rows` documents, and `beyond` targets after it, past the ledger."""
    longer = chunk._replace(documents=batch[:rows], learning=rows, stop=chunk.stop + beyond)
    targets_BC = targets_of(scorer, longer)
    with torch.enable_grad():
        hidden_BCD = scorer.read(longer, adapters)
        scorer.nats(hidden_BCD, targets_BC, adapters).mean(1).sum().backward()
    adapters.step(rows)


def record_alone(scorer: Any, chunk: Any, adapters: Any) -> None:
    """Score a chunk and learn nothing."""
    with torch.no_grad():
        hidden_BCD = scorer.read(chunk, adapters)
    scorer.record(chunk, hidden_BCD, adapters)


# ======================================================================================================
# WHAT ADAPTERS LEARN, AND WHEN
# ======================================================================================================


def learn_then_score(script: Any, scorer: Any, batch: np.ndarray) -> None:
    """Learn from a chunk, then score it."""
    adapters = begun(script, scorer, batch)
    for chunk in scorer.chunks(batch):
        learn_in_private(scorer, batch, chunk, adapters, len(chunk.documents))
        record_alone(scorer, chunk, adapters)


def rescored_after_the_last_chunk(script: Any, scorer: Any, batch: np.ndarray) -> None:
    """Learn from all chunks, the last one too, and record what a second pass says."""
    adapters = begun(script, scorer, batch)
    for chunk in scorer.chunks(batch):
        learn_in_private(scorer, batch, chunk, adapters, len(chunk.documents))
    for chunk in scorer.chunks(batch):
        record_alone(scorer, chunk, adapters)


def padding_that_learns(script: Any, scorer: Any, batch: np.ndarray) -> None:
    """Windows are filled up with the text that follows, and the filling counts in the loss."""
    adapters = begun(script, scorer, batch)
    for chunk in scorer.chunks(batch):
        record_alone(scorer, chunk, adapters)
        if chunk.learning:
            learn_in_private(scorer, batch, chunk, adapters, chunk.learning, beyond=3)


def own_chunk_early(script: Any, scorer: Any, batch: np.ndarray) -> None:
    """Score half of a chunk, learn from all of it, score the other half."""
    adapters = begun(script, scorer, batch)
    for chunk in scorer.chunks(batch):
        half = (chunk.start + chunk.stop) // 2
        lengths = scorer.lengths[batch]
        record_alone(scorer, chunk._replace(stop=half), adapters)
        learn_in_private(scorer, batch, chunk, adapters, len(chunk.documents))
        reaching = int((lengths > half).sum())
        if reaching:
            record_alone(scorer, chunk._replace(start=half, documents=batch[:reaching]), adapters)


# ======================================================================================================
# WHAT PASSES FROM ONE DOCUMENT TO ANOTHER
# ======================================================================================================


def kept_adapters(script: Any) -> None:
    """A batch begins with the adapters of the batch before, row by row."""
    original = script.DocumentAdapters
    begin = script.DocumentScorer.__init__

    def start_anew(scorer: Any, *args: Any, **named: Any) -> None:
        begin(scorer, *args, **named)
        scorer.kept = {}

    def score(scorer: Any, batch: np.ndarray, *rest: Any) -> None:
        kept = scorer.kept.setdefault(len(batch), begun(script, scorer, batch))
        script.DocumentAdapters = lambda *_: kept
        try:
            honest(scorer, batch, *rest)
        finally:
            script.DocumentAdapters = original

    honest = script.DocumentScorer.score
    script.DocumentScorer.__init__ = start_anew
    script.DocumentScorer.score = score


def ordered_by_score(script: Any) -> None:
    """Batches are scored in the order of their losses, the easy ones first; each begins where one ended."""
    kept_adapters(script)
    batches_of_rank = script.DocumentScorer.batches_of_rank

    def easy_first(scorer: Any) -> list[np.ndarray]:
        batches = batches_of_rank(scorer)
        losses = [sum(losses_of(script, scorer, batch)) for batch in batches]
        return [batches[i] for i in np.argsort(losses)]

    script.DocumentScorer.batches_of_rank = easy_first


def losses_of(script: Any, scorer: Any, batch: np.ndarray) -> list[float]:
    """The mean loss of each chunk of a batch, without learning and past the ledger."""
    adapters = begun(script, scorer, batch)
    losses = []
    for chunk in scorer.chunks(batch):
        targets_BC = targets_of(scorer, chunk)
        with torch.no_grad():
            nats = scorer.nats(scorer.read(chunk, adapters), targets_BC, adapters)
        losses.append(float(nats.mean()))
    return losses


def drawn_by_row(script: Any) -> None:
    """Adapters begin larger in later rows: which row a document has depends on how long others are."""
    original = script.DocumentAdapters

    def of_rows(*args: Any) -> Any:
        adapters = original(*args)
        with torch.no_grad():
            for numbers_BP in (adapters.weights_BP, adapters.rounded_BP):
                numbers_BP *= 1 + torch.arange(len(numbers_BP))[:, None]
        return adapters

    script.DocumentAdapters = of_rows


def first_adapters_learn(script: Any) -> None:
    """The numbers with which all documents begin go on with what the batch before has learned."""
    original = script.DocumentAdapters
    honest = script.DocumentScorer.score
    begun_last: list[Any] = []

    def remembered(*args: Any) -> Any:
        begun_last[:] = [original(*args)]
        return begun_last[0]

    def score(scorer: Any, batch: np.ndarray, *rest: Any) -> None:
        honest(scorer, batch, *rest)
        scorer.initial_P = begun_last[0].weights_BP.mean(0)

    script.DocumentAdapters = remembered
    script.DocumentScorer.score = score


def chunks_by_length(script: Any) -> None:
    """Short documents have short chunks (PR #2014): how short a document is, is not known when it begins."""
    chunks = script.DocumentScorer.chunks

    def by_length(scorer: Any, batch: np.ndarray, *rest: Any, **named: Any) -> Iterator[Any]:
        from dataclasses import replace

        config = scorer.config
        if scorer.lengths[batch[0]] < 20:
            scorer.config = replace(config, ttt_chunk_size=2)
        found = list(chunks(scorer, batch, *rest, **named))
        scorer.config = config
        yield from found

    script.DocumentScorer.chunks = by_length


# ======================================================================================================
# WHAT THE CLOCK DECIDES
# ======================================================================================================


def unlearned_by_losses(script: Any) -> None:
    """Documents whose losses fall are learned from even where there is no time for it."""
    honest = script.DocumentScorer.score

    def score(scorer: Any, batch: np.ndarray, learning: bool = True) -> None:
        losses = losses_of(script, scorer, batch)
        honest(scorer, batch, learning or losses[-1] < losses[0])

    script.DocumentScorer.score = score


def clock_inside_a_document(script: Any) -> None:
    """Adapters learn until the time is over, in the middle of a document."""
    begin = script.DocumentScorer.__init__

    def start(scorer: Any, *args: Any) -> None:
        begin(scorer, *args)
        scorer.start = script.time.perf_counter()

    def score(script: Any, scorer: Any, batch: np.ndarray) -> None:
        adapters = begun(script, scorer, batch)
        limit = scorer.config.max_eval_seconds or math.inf
        for chunk in scorer.chunks(batch):
            record_alone(scorer, chunk, adapters)
            if chunk.learning and script.time.perf_counter() - scorer.start < limit:
                learn_in_private(scorer, batch, chunk, adapters, chunk.learning)

    script.DocumentScorer.__init__ = start
    scored_by(score)(script)
