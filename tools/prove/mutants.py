"""Scorers that are wrong or illegal on purpose: the proofs must kill every one, or they are blind (B16).

Each is a context that yields the subject with one thing broken. Most score in chunks of non-overlapping rows,
the honest part, and differ from a legal scorer in what they learn, when, or what they put in the ledger.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from tools.prove.probes import Scorer, Subject

Mutant = Callable[[Subject], "contextlib.AbstractContextManager[Subject]"]


def nats_of(subject: Subject, model: Any, tokens: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Honest nats of targets start .. stop in rows of the context length."""
    found = []
    for begin in range(start, stop, subject.config.eval_length):
        end = min(begin + subject.config.eval_length, stop)
        row = torch.from_numpy(tokens[begin : end + 1].astype(np.int64))
        with torch.no_grad():
            found.append(model.loss_per_token(model(row[None, :-1])[0], row[1:]).double().numpy())
    return np.concatenate(found)


def train(subject: Subject, model: Any, tokens: np.ndarray) -> None:
    """Plain SGD on a stretch of tokens, a step per row of the context length."""
    for begin in range(0, len(tokens) - 1, subject.config.eval_length):
        row = torch.from_numpy(tokens[begin : begin + subject.config.eval_length + 1].astype(np.int64))[None]
        with torch.enable_grad():
            gradients = torch.autograd.grad(model.loss(row[:, :-1], row[:, 1:]), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= subject.config.ttt_lr * gradient


def chunks(subject: Subject, tokens: np.ndarray) -> Iterator[tuple[int, int]]:
    """Targets (first, after last) of each chunk."""
    size, targets = subject.config.ttt_chunk_tokens, len(tokens) - 1
    return ((start, min(start + size, targets)) for start in range(0, targets, size))


def restored(scorer: Scorer) -> Scorer:
    """The scorer, with the weights it found put back."""

    def wrapped(model: Any, tokens: np.ndarray, config: Any) -> Any:
        found = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            return scorer(model, tokens, config)
        finally:
            model.load_state_dict(found)

    return wrapped


def with_scorer(make: Callable[[Subject], Scorer]) -> Mutant:
    """A mutant whose scorer `score_ttt` is the one that `make` builds."""

    @contextlib.contextmanager
    def mutant(subject: Subject) -> Iterator[Subject]:
        yield dataclasses.replace(subject, scorers={"score_ttt": restored(make(subject))})

    return mutant


def with_patch(name: str, make: Callable[[Subject], Any]) -> Mutant:
    """A mutant of the script: the function `name` replaced."""

    @contextlib.contextmanager
    def mutant(subject: Subject) -> Iterator[Subject]:
        with mock.patch.object(subject.script, name, make(subject)):
            yield subject

    return mutant


def honest(subject: Subject) -> Scorer:
    """Score a chunk, then train on it: the mould of the mutants, and legal."""

    def scorer(model: Any, tokens: np.ndarray, config: Any) -> Any:
        ledger = subject.script.Ledger(tokens)
        for start, stop in chunks(subject, tokens):
            ledger.record(start, nats_of(subject, model, tokens, start, stop))
            if stop < len(ledger.nats):
                train(subject, model, ledger.scored_tokens(start, stop + 1))
        return ledger

    return scorer


def adapt_then_score(subject: Subject) -> Scorer:
    def scorer(model: Any, tokens: np.ndarray, config: Any) -> Any:
        ledger = subject.script.Ledger(tokens)
        for start, stop in chunks(subject, tokens):
            train(subject, model, tokens[start : stop + 1])
            ledger.record(start, nats_of(subject, model, tokens, start, stop))
        return ledger

    return scorer


def one_token_past(subject: Subject) -> Scorer:
    def scorer(model: Any, tokens: np.ndarray, config: Any) -> Any:
        ledger = subject.script.Ledger(tokens)
        for start, stop in chunks(subject, tokens):
            ledger.record(start, nats_of(subject, model, tokens, start, stop))
            train(subject, model, tokens[start : stop + 2])
        return ledger

    return scorer


def pre_quantization_ttt(subject: Subject) -> Scorer:
    def scorer(model: Any, tokens: np.ndarray, config: Any) -> Any:
        for start, stop in chunks(subject, tokens):
            train(subject, model, tokens[start : stop + 1])
        ledger = subject.script.Ledger(tokens)
        ledger.record(0, nats_of(subject, model, tokens, 0, len(ledger.nats)))
        return ledger

    return scorer


def rescore(subject: Subject) -> Scorer:
    def scorer(model: Any, tokens: np.ndarray, config: Any) -> Any:
        honest(subject)(model, tokens, config)
        ledger = subject.script.Ledger(tokens)
        ledger.record(0, nats_of(subject, model, tokens, 0, len(ledger.nats)))
        return ledger

    return scorer


def min_over_passes(subject: Subject) -> Scorer:
    def scorer(model: Any, tokens: np.ndarray, config: Any) -> Any:
        first = honest(subject)(model, tokens, config).nats
        ledger = subject.script.Ledger(tokens)
        ledger.record(0, np.minimum(first, nats_of(subject, model, tokens, 0, len(ledger.nats))))
        return ledger

    return scorer


def changed_nats(change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Subject], Scorer]:
    """A scorer that puts `change(nats, tokens)` into the ledger."""

    def make(subject: Subject) -> Scorer:
        def scorer(model: Any, tokens: np.ndarray, config: Any) -> Any:
            ledger = subject.script.Ledger(tokens)
            ledger.record(0, change(nats_of(subject, model, tokens, 0, len(ledger.nats)), tokens))
            return ledger

        return scorer

    return make


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


def dropped_tail(subject: Subject) -> Scorer:
    def scorer(model: Any, tokens: np.ndarray, config: Any) -> Any:
        whole = (len(tokens) - 1) // config.eval_length * config.eval_length
        return honest(subject)(model, tokens[: whole + 1], config)

    return scorer


def double_tail(subject: Subject) -> Scorer:
    def scorer(model: Any, tokens: np.ndarray, config: Any) -> Any:
        ledger = subject.script.Ledger(np.concatenate([tokens, tokens[-config.eval_stride :]]))
        nats = nats_of(subject, model, tokens, 0, len(tokens) - 1)
        ledger.record(0, np.concatenate([nats, nats[-config.eval_stride :]]))
        return ledger

    return scorer


@contextlib.contextmanager
def weights_not_restored(subject: Subject) -> Iterator[Subject]:
    """Legal scores, but the model that comes back is not the one that was given."""
    yield dataclasses.replace(subject, scorers={"score_ttt": honest(subject)})


def warm_up_on_validation(subject: Subject) -> Any:
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

    def smeared(model: Any, inputs_BT: torch.Tensor, *rest: Any) -> torch.Tensor:
        hidden_BTD = forward(model, inputs_BT, *rest)
        return hidden_BTD + 0.1 * torch.nn.functional.pad(hidden_BTD, (0, 0, 1, 0))[:, :-1]

    with mock.patch.object(model_class, "forward", smeared):
        yield subject


def double_space_bytes(subject: Subject) -> Any:
    original = subject.script.token_bytes

    def table(tokens: np.ndarray, config: Any) -> np.ndarray:
        return original(tokens, config) + (original(tokens, config) > 1)

    return table


def calibration_on_validation(subject: Subject) -> Any:
    collect = subject.script.collect_hessians

    def collect_from_validation(model: Any, batches: Any, *rest: Any) -> Any:
        folder = subject.script.find_path(model.config.data_path)
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
    "target-in-key-cache": with_scorer(changed_nats(target_in_key)),
    "gate-on-the-realised-token": with_scorer(changed_nats(gate_on_target)),
    "unnormalised-mixture": with_scorer(changed_nats(unnormalised_mixture)),
    "random-scores": with_scorer(changed_nats(noisy)),
    "dropped-tail": with_scorer(dropped_tail),
    "double-tail": with_scorer(double_tail),
    "weights-not-restored": weights_not_restored,
    "warm-up-on-validation": with_patch("evaluate", warm_up_on_validation),
    "cross-document-smear": smear_across_documents,
    "wrong-byte-table": with_patch("token_bytes", double_space_bytes),
    "calibration-on-validation": with_patch("collect_hessians", calibration_on_validation),
}
