"""Mutants that were written after the laws, to try them. Two were not refuted, and changed the laws.

A temperature that is made of the length of the text made `endings` ask shorter texts, and steps during a
validation made `many-steps` do without any.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.audit.mutants.documents import begun
from tests.audit.mutants.running import text_of_the_run


def scored_with_its_neighbor(original: Any, scorer: Any, *rest: Any) -> Any:
    """A document's scores have a little of those of the one beside it in the batch."""
    nats_BC = original(scorer, *rest)
    return nats_BC + 1e-4 * nats_BC.detach().roll(1, 0).mean(1, keepdim=True)


def first_of_a_batch_flattered(original: Any, scorer: Any, *rest: Any) -> Any:
    """The longest document of a batch costs a thousandth less."""
    nats_BC = original(scorer, *rest)
    return torch.cat([0.999 * nats_BC[:1], nats_BC[1:]])


def adapters_by_hindsight(script: Any, scorer: Any, batch: np.ndarray) -> None:
    """Two sets of adapters; each chunk is scored by that which does better on it."""
    sets = [begun(script, scorer, batch) for _ in range(2)]
    for chunk in scorer.chunks(batch):
        with torch.enable_grad():
            hidden = [scorer.read(chunk, adapters) for adapters in sets]
        targets = scorer.tokens[scorer.begins[chunk.documents, None] + np.arange(chunk.start, chunk.stop) + 1]
        with torch.no_grad():
            losses = [float(scorer.nats(h, targets, a).sum()) for h, a in zip(hidden, sets, strict=True)]
        best = int(np.argmin(losses))
        scorer.record(chunk, hidden[best], sets[best])
        if chunk.learning:
            for steps, adapters in enumerate(sets, 1):
                for _ in range(steps):
                    with torch.enable_grad():
                        hidden_BCD = scorer.read(chunk, adapters)
                    scorer.learn(chunk, hidden_BCD, adapters)


def bytes_of_the_document_before(original: Any, tokens: np.ndarray, config: Any) -> Any:
    """A document has as many bytes as the one before it, if these are more."""
    counted = original(tokens, config).copy()
    begins = np.flatnonzero(tokens[:-1] == 1)
    totals = np.add.reduceat(counted, begins)
    more = np.maximum(0, np.append(0, totals[:-1]) - totals)
    counted[begins] += more
    return counted


def slow_clock_everywhere(script: Any) -> None:
    """All that the script times runs a tenth slow."""
    real = script.time
    slow = SimpleNamespace(**{name: getattr(real, name) for name in dir(real) if not name.startswith("_")})
    slow.perf_counter = lambda: 0.9 * real.perf_counter()
    slow.monotonic = lambda: 0.9 * real.monotonic()
    slow.time = lambda: 0.9 * real.time()
    script.time = slow


def slow_clock_of_learning(script: Any) -> None:
    """What decides on learning runs at half speed; what is reported does not."""
    seconds = script.ScoreClock.seconds
    script.ScoreClock.seconds = lambda clock: 0.5 * seconds(clock)


def warmed_by_the_length(original: Any, scorer: Any, hidden: Any, targets: Any, adapters: Any) -> Any:
    """The temperature of all probabilities is made of the number of tokens in the text."""
    length = len(scorer.ledger.nats)
    return original(scorer, hidden * (1 + 1e-3 * (length % 7)), targets, adapters)


def knows_where_documents_end(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The end of a document is sure where it is, and impossible where it is not."""
    ends = tokens[1:] == 1
    return np.where(ends, 0.01, nats)


def warmed_by_a_later_token(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The weight of an even guess is made of the token five places later."""
    later = np.append(tokens[6:], np.zeros(5, int))
    weight = np.where(later % 2 == 0, 0.05, 0.1)
    return -np.log((1 - weight) * np.exp(-nats) + weight / 12)


def second_rank_calibrates(original: Any, model: Any, batches: Any) -> Any:
    """The second rank's share of the Hessians is of validation text."""
    script = sys.modules["audited_script"]

    def stolen() -> Any:
        for batch in batches:
            if model.machine.rank == 1:
                text = text_of_the_run(script, "val")
                batch = batch._replace(inputs_BT=text[: batch.inputs_BT.numel()].view_as(batch.inputs_BT))
            yield batch

    return original(model, stolen())


def steps_while_validating(script: Any) -> None:
    """A validation on the way takes a step of training that no clock and no count sees."""
    validate = script.validate

    def changed(training: Any, *rest: Any, **named: Any) -> Any:
        batch = training.loader.next_batch()
        loss = training.model.loss(batch.inputs_BT, batch.targets_BT, batch.starts)
        weights = [p for p in training.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    weight -= 0.1 * gradient
        return validate(training, *rest, **named)

    script.validate = changed
