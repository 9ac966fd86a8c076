"""Scorers that are wrong or illegal on purpose: the proofs must kill every one, or they are blind (B16).

Each is a context that yields the subject with one thing broken. Most score in chunks of non-overlapping rows,
the honest part, and differ from a legal scorer in what they learn, when, or what they put in the ledger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tools.prove.probes import Subject

Mutant = Callable[[Subject], "contextlib.AbstractContextManager[Subject]"]
# Takes the subject, a model and tokens; returns a ledger.
MutantScorer = Callable[[Subject, Any, np.ndarray], Any]
# Takes nats and the tokens they are of; returns other nats.
ChangeOfNats = Callable[[np.ndarray, np.ndarray], np.ndarray]


def nats_of(subject: Subject, model: Any, tokens: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Honest nats of targets start .. stop in rows of the context length."""
    length = subject.config.eval_length
    found = []
    for begin in range(start, stop, length):
        end = min(begin + length, stop)
        row_T = torch.from_numpy(tokens[begin : end + 1].astype(np.int64))
        with torch.no_grad():
            hidden_TD = model(row_T[None, :-1])[0]
            found.append(model.loss_per_token(hidden_TD, row_T[1:]).double().numpy())
    return np.concatenate(found)


def train(subject: Subject, model: Any, tokens: np.ndarray) -> None:
    """Plain SGD on a stretch of tokens, a step per row of the context length."""
    length = subject.config.eval_length
    parameters = list(model.parameters())
    for begin in range(0, len(tokens) - 1, length):
        row_BT = torch.from_numpy(tokens[begin : begin + length + 1].astype(np.int64))[None]
        with torch.enable_grad():
            loss = model.loss(row_BT[:, :-1], row_BT[:, 1:])
            gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= subject.config.ttt_lr * gradient


def chunks(subject: Subject, tokens: np.ndarray) -> Iterator[tuple[int, int]]:
    """Targets (first, after last) of each chunk."""
    size = subject.config.ttt_chunk_tokens
    targets = len(tokens) - 1
    for start in range(0, targets, size):
        yield start, min(start + size, targets)


def full_ledger(subject: Subject, tokens: np.ndarray, nats: np.ndarray) -> Any:
    """A ledger of `tokens` with one record: all nats at once."""
    ledger = subject.script.Ledger(tokens)
    ledger.record(0, nats)
    return ledger


def all_nats(subject: Subject, model: Any, tokens: np.ndarray) -> np.ndarray:
    """Honest nats of every target."""
    return nats_of(subject, model, tokens, 0, len(tokens) - 1)


# ======================================================================================================
# KINDS OF MUTANTS
# ======================================================================================================


def with_scorer(function: MutantScorer) -> Mutant:
    """A mutant whose scorer `score_ttt` is `function`; the weights that it found are put back."""

    @contextlib.contextmanager
    def mutant(subject: Subject) -> Iterator[Subject]:
        def scorer(model: Any, tokens: np.ndarray, config: Any) -> Any:
            found = {name: value.clone() for name, value in model.state_dict().items()}
            try:
                return function(subject, model, tokens)
            finally:
                model.load_state_dict(found)

        yield dataclasses.replace(subject, scorers={"score_ttt": scorer})

    return mutant


def with_nats(change: ChangeOfNats) -> Mutant:
    """A mutant that puts `change(nats, tokens)` into the ledger, of honest nats."""

    def scorer(subject: Subject, model: Any, tokens: np.ndarray) -> Any:
        return full_ledger(subject, tokens, change(all_nats(subject, model, tokens), tokens))

    return with_scorer(scorer)


def with_patch(name: str, make: Callable[[Subject], Any]) -> Mutant:
    """A mutant of the script: the function `name` replaced by what `make` returns."""

    @contextlib.contextmanager
    def mutant(subject: Subject) -> Iterator[Subject]:
        with mock.patch.object(subject.script, name, make(subject)):
            yield subject

    return mutant


# ======================================================================================================
# SCORERS: what they learn, when, and which targets they score
# ======================================================================================================


def honest(subject: Subject, model: Any, tokens: np.ndarray) -> Any:
    """Score a chunk, then train on it: the mould of the mutants, and legal."""
    ledger = subject.script.Ledger(tokens)
    for start, stop in chunks(subject, tokens):
        ledger.record(start, nats_of(subject, model, tokens, start, stop))
        if stop < len(ledger.nats):
            train(subject, model, ledger.scored_tokens(start, stop + 1))
    return ledger


def adapt_then_score(subject: Subject, model: Any, tokens: np.ndarray) -> Any:
    """Train on a chunk, then score it."""
    ledger = subject.script.Ledger(tokens)
    for start, stop in chunks(subject, tokens):
        train(subject, model, tokens[start : stop + 1])
        ledger.record(start, nats_of(subject, model, tokens, start, stop))
    return ledger


def one_token_past(subject: Subject, model: Any, tokens: np.ndarray) -> Any:
    """Score a chunk, then train on it and on the first target of the next."""
    ledger = subject.script.Ledger(tokens)
    for start, stop in chunks(subject, tokens):
        ledger.record(start, nats_of(subject, model, tokens, start, stop))
        train(subject, model, tokens[start : stop + 2])
    return ledger


def pre_quantization_ttt(subject: Subject, model: Any, tokens: np.ndarray) -> Any:
    """Train on the whole stream, then score it."""
    for start, stop in chunks(subject, tokens):
        train(subject, model, tokens[start : stop + 1])
    return full_ledger(subject, tokens, all_nats(subject, model, tokens))


def rescore(subject: Subject, model: Any, tokens: np.ndarray) -> Any:
    """Report a second pass, after the first has learned."""
    honest(subject, model, tokens)
    return full_ledger(subject, tokens, all_nats(subject, model, tokens))


def min_over_passes(subject: Subject, model: Any, tokens: np.ndarray) -> Any:
    """Report the better of two passes for every target."""
    first = honest(subject, model, tokens).nats
    second = all_nats(subject, model, tokens)
    return full_ledger(subject, tokens, np.minimum(first, second))


def dropped_tail(subject: Subject, model: Any, tokens: np.ndarray) -> Any:
    """Score whole rows alone."""
    length = subject.config.eval_length
    whole = (len(tokens) - 1) // length * length
    return honest(subject, model, tokens[: whole + 1])


def double_tail(subject: Subject, model: Any, tokens: np.ndarray) -> Any:
    """Score the last targets twice."""
    tail = subject.config.eval_stride
    nats = all_nats(subject, model, tokens)
    return full_ledger(
        subject, np.concatenate([tokens, tokens[-tail:]]), np.concatenate([nats, nats[-tail:]])
    )


# ======================================================================================================
# NATS: what is put in the ledger instead of the model's
# ======================================================================================================


def target_in_key(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Mix with a cache keyed by (token, target), whose mass over all targets is not one."""
    seen: set[tuple[int, int]] = set()
    mixed = nats.copy()
    for i, pair in enumerate(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True)):
        if pair in seen:
            mixed[i] = -np.log(0.5 * np.exp(-nats[i]) + 0.5 * 0.9)
        seen.add(pair)
    return mixed


def gate_on_target(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Trust the model where the target is even, an even guess elsewhere."""
    return np.where(tokens[1:] % 2 == 0, nats, 2.0)


def unnormalised_mixture(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """0.7 p + 0.5 / 12: the weights sum to 1.2."""
    return -np.log(0.7 * np.exp(-nats) + 0.5 / 12)


def noisy(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Scores that depend on a random draw."""
    return nats + 1e-3 * np.random.default_rng().random()


# ======================================================================================================
# SCRIPT: one of its functions replaced
# ======================================================================================================


@contextlib.contextmanager
def weights_not_restored(subject: Subject) -> Iterator[Subject]:
    """Legal scores, but the model that comes back is not the one that was given."""

    def scorer(model: Any, tokens: np.ndarray, config: Any) -> Any:
        return honest(subject, model, tokens)

    yield dataclasses.replace(subject, scorers={"score_ttt": scorer})


def warm_up_on_validation(subject: Subject) -> Any:
    """An `evaluate` whose warm-up, before the timer, reads the validation text."""
    evaluate = subject.script.evaluate

    def warmed(model: Any, config: Any, run: Any, validation: Any, weights: str) -> Any:
        with run.phase("eval_warmup"):
            subject.script.score_roundtrip(model, validation.tokens, config)
        return evaluate(model, config, run, validation, weights)

    return warmed


@contextlib.contextmanager
def smear_across_documents(subject: Subject) -> Iterator[Subject]:
    """A shift of the hidden states by one position that does not stop at BOS."""
    model_class = type(subject.model())
    forward = model_class.forward

    def smeared(model: Any, inputs_BT: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        hidden_BTD = forward(model, inputs_BT, *rest, **named)
        return hidden_BTD + 0.1 * torch.nn.functional.pad(hidden_BTD, (0, 0, 1, 0))[:, :-1]

    with mock.patch.object(model_class, "forward", smeared):
        yield subject


def double_space_bytes(subject: Subject) -> Any:
    """A table of bytes in which every token of more than one byte has one too many."""
    original = subject.script.token_bytes

    def table(tokens: np.ndarray, config: Any) -> np.ndarray:
        counted = original(tokens, config)
        return counted + (counted > 1)

    return table


def calibration_on_validation(subject: Subject) -> Any:
    """A `collect_hessians` that gets validation text in the place of its batches."""
    collect = subject.script.collect_hessians

    def collect_from_validation(model: Any, batches: Any, *rest: Any) -> Any:
        folder = Path(os.environ["DATA_PATH"])  # of the run under way
        shards = subject.script.open_shards(str(folder / "fineweb_val_[0-9]*.bin"))
        stolen = torch.from_numpy(subject.script.read_tokens(shards[0]).astype(np.int64))

        def replaced() -> Iterator[Any]:
            for batch in batches:
                inputs_BT = stolen[: batch.inputs_BT.numel()].view_as(batch.inputs_BT)
                yield batch._replace(inputs_BT=inputs_BT)

        return collect(model, replaced(), *rest)

    return collect_from_validation


MUTANTS: dict[str, Mutant] = {
    "adapt-then-score": with_scorer(adapt_then_score),
    "one-token-past-the-chunk": with_scorer(one_token_past),
    "pre-quantization-ttt": with_scorer(pre_quantization_ttt),
    "rescore": with_scorer(rescore),
    "min-over-passes": with_scorer(min_over_passes),
    "target-in-key-cache": with_nats(target_in_key),
    "gate-on-the-realised-token": with_nats(gate_on_target),
    "unnormalised-mixture": with_nats(unnormalised_mixture),
    "random-scores": with_nats(noisy),
    "dropped-tail": with_scorer(dropped_tail),
    "double-tail": with_scorer(double_tail),
    "weights-not-restored": weights_not_restored,
    "warm-up-on-validation": with_patch("evaluate", warm_up_on_validation),
    "cross-document-smear": smear_across_documents,
    "wrong-byte-table": with_patch("token_bytes", double_space_bytes),
    "calibration-on-validation": with_patch("collect_hessians", calibration_on_validation),
}
