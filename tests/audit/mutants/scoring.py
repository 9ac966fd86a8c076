"""Mutants of scoring: what scorers learn and when, what they record, what `evaluate` makes of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.audit.mutants.trial import (
    Change,
    Mutant,
    Trial,
    TrialScorer,
    honest,
    own_evaluate,
    scorer,
)

RATES = (0.0, 0.1, 0.3)


# ======================================================================================================
# WHAT A SCORER LEARNS, AND WHEN
# ======================================================================================================


def adapt_then_score(trial: Trial, tokens: np.ndarray) -> Any:
    """Learn from a chunk, then score it."""
    ledger = trial.script.Ledger(tokens)
    for start, stop in trial.chunks(tokens):
        trial.learn(tokens[start : stop + 1])
        ledger.record(start, trial.nats(tokens, start, stop))
    return ledger


def one_token_past(trial: Trial, tokens: np.ndarray) -> Any:
    """Score a chunk, then learn from it and from the first target of the next."""
    ledger = trial.script.Ledger(tokens)
    for start, stop in trial.chunks(tokens):
        ledger.record(start, trial.nats(tokens, start, stop))
        trial.learn(tokens[start : stop + 2])
    return ledger


def next_chunk_in_second_epoch(trial: Trial, tokens: np.ndarray) -> Any:
    """An honest first epoch; the second one goes on into the next chunk."""
    ledger = trial.script.Ledger(tokens)
    for start, stop in trial.chunks(tokens):
        ledger.record(start, trial.nats(tokens, start, stop))
        trial.learn(tokens[start : stop + 1])
        trial.learn(tokens[start : stop + 1 + (stop - start)])
    return ledger


def pre_quantization_ttt(trial: Trial, tokens: np.ndarray) -> Any:
    """Learn from the whole stream, then score it."""
    for start, stop in trial.chunks(tokens):
        trial.learn(tokens[start : stop + 1])
    return trial.ledger(tokens, trial.all_nats(tokens))


def last_chunk_first(trial: Trial, tokens: np.ndarray) -> Any:
    """Begin with weights that have learned from the end of the text."""
    trial.learn(tokens[-2 * trial.config.eval_length :])
    return honest(trial, tokens)


def rescore(trial: Trial, tokens: np.ndarray) -> Any:
    """Report a second pass, after the first has learned."""
    honest(trial, tokens)
    return trial.ledger(tokens, trial.all_nats(tokens))


def min_over_passes(trial: Trial, tokens: np.ndarray) -> Any:
    """Report the better of two passes for every target."""
    first = honest(trial, tokens).nats
    return trial.ledger(tokens, np.minimum(first, trial.all_nats(tokens)))


def rate_picked_in_private(trial: Trial, tokens: np.ndarray) -> Any:
    """Try learning rates without a ledger, and score with the one that did best on this very text."""
    begin = trial.saved()
    totals = []
    for rate in RATES:
        total = 0.0
        for start, stop in trial.chunks(tokens):
            total += float(trial.nats(tokens, start, stop).sum())
            trial.learn(tokens[start : stop + 1], rate)
        totals.append(total)
        trial.model.load_state_dict(begin)
    best = RATES[int(np.argmin(totals))]
    ledger = trial.script.Ledger(tokens)
    for start, stop in trial.chunks(tokens):
        ledger.record(start, trial.nats(tokens, start, stop))
        if stop < len(ledger.nats):
            trial.learn(ledger.scored_tokens(start, stop + 1), best)
    return ledger


def better_of_two_per_chunk(trial: Trial, tokens: np.ndarray) -> Any:
    """Of the frozen and the learning model, report for each chunk the one that did better on it."""
    frozen = trial.all_nats(tokens)
    ledger = trial.script.Ledger(tokens)
    for start, stop in trial.chunks(tokens):
        nats = trial.nats(tokens, start, stop)
        if frozen[start:stop].sum() < nats.sum():
            nats = frozen[start:stop]
        ledger.record(start, nats)
        trial.learn(tokens[start : stop + 1])
    return ledger


def shift_on_scored_targets(trial: Trial, tokens: np.ndarray) -> Any:
    """SLOT: a shift of the hidden states, fitted to the targets of a chunk, before the chunk is scored."""
    found = []
    for start, stop in trial.chunks(tokens):
        row_T = torch.from_numpy(tokens[start : stop + 1].astype(np.int64))
        with torch.no_grad():
            hidden_TD = trial.model(row_T[None, :-1])[0]
        shift_D = torch.zeros(hidden_TD.size(1), requires_grad=True)
        with torch.enable_grad():
            loss = trial.model.loss_per_token(hidden_TD + shift_D, row_T[1:]).mean()
            (gradient_D,) = torch.autograd.grad(loss, [shift_D])
        with torch.no_grad():
            shifted_TD = hidden_TD - 0.5 * gradient_D
            found.append(trial.model.loss_per_token(shifted_TD, row_T[1:]).double().numpy())
    return trial.ledger(tokens, np.concatenate(found))


# ======================================================================================================
# WHICH TARGETS, AND WHAT IS RECORDED OF THEM
# ======================================================================================================


def dropped_tail(trial: Trial, tokens: np.ndarray) -> Any:
    """Score whole rows alone."""
    length = trial.config.eval_length
    whole = (len(tokens) - 1) // length * length
    return honest(trial, tokens[: whole + 1])


def double_tail(trial: Trial, tokens: np.ndarray) -> Any:
    """Score the last targets twice."""
    tail = trial.config.eval_stride
    nats = trial.all_nats(tokens)
    return trial.ledger(np.concatenate([tokens, tokens[-tail:]]), np.concatenate([nats, nats[-tail:]]))


def target_in_key(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Mix with a cache keyed by (token, target), whose mass over all targets is not one."""
    seen: set[tuple[int, int]] = set()
    mixed = nats.copy()
    for i, pair in enumerate(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True)):
        if pair in seen:
            mixed[i] = -np.log(0.5 * np.exp(-nats[i]) + 0.5 * 0.9)
        seen.add(pair)
    return mixed


def long_match_cache(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Trust a match of eight tokens, target included, that was seen before: only phrases that repeat tell."""
    seen: set[tuple[int, ...]] = set()
    mixed = nats.copy()
    for i in range(8, len(tokens)):
        key = tuple(tokens[i - 7 : i + 1].tolist())
        if key in seen:
            mixed[i - 1] = -np.log(0.5 * np.exp(-nats[i - 1]) + 0.5)
        seen.add(key)
    return mixed


def gate_on_target(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Trust the model where the target is even, an even guess elsewhere."""
    return np.where(tokens[1:] % 2 == 0, nats, 2.0)


def expert_by_hindsight(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The better of the model and an even guess, chosen for each target when it is known."""
    return np.minimum(nats, np.log(12))


def unnormalized_mixture(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """0.7 p + 0.5 / 12: the weights sum to 1.2."""
    return -np.log(0.7 * np.exp(-nats) + 0.5 / 12)


def clipped(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """No loss above a bound."""
    return np.minimum(nats, 2.0)


def free_document_starts(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Document starts cost nothing: the text is known to have them."""
    return np.where(tokens[1:] == 1, 0.0, nats)


def counts_with_target(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Mix with the frequency of the target so far, the target itself counted already."""
    counts = np.zeros(int(tokens.max()) + 1)
    mixed = nats.copy()
    for i, target in enumerate(tokens[1:].tolist()):
        counts[target] += 1
        mixed[i] = -np.log(0.8 * np.exp(-nats[i]) + 0.2 * counts[target] / counts.sum())
    return mixed


def counts_of_whole_text(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Mix with the frequency of the target in all of the text."""
    share = np.bincount(tokens, minlength=12) / len(tokens)
    return -np.log(0.8 * np.exp(-nats) + 0.2 * share[tokens[1:]])


def constant_fitted_to_text(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Mix with an even guess, by the weight that does best on the whole text."""
    even = 1 / 12
    best = nats
    for weight in (0.0, 0.2, 0.5):
        mixed = -np.log((1 - weight) * np.exp(-nats) + weight * even)
        if mixed.sum() < best.sum():
            best = mixed
    return best


def noisy(nats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Scores that depend on a random draw."""
    return nats + 1e-3 * np.random.default_rng().random()


def better_on_second_sight(script: ModuleType) -> None:
    """A cache that outlives a call: a text that was scored before costs less."""
    known: set[bytes] = set()

    def score(trial: Trial, tokens: np.ndarray) -> Any:
        nats = trial.all_nats(tokens)
        if tokens.tobytes() in known:
            nats = 0.9 * nats
        known.add(tokens.tobytes())
        return trial.ledger(tokens, nats)

    scorer(score)(script)


# ======================================================================================================
# STATE CARRIED FROM ONE LABEL TO THE NEXT, in every order of the labels
# ======================================================================================================


def plain_scorer(trial: Trial, tokens: np.ndarray) -> Any:
    """Score without learning."""
    return trial.ledger(tokens, trial.all_nats(tokens))


def honest_and_back(trial: Trial, tokens: np.ndarray) -> Any:
    """Learn honestly, and put the weights back."""
    found = trial.saved()
    ledger = honest(trial, tokens)
    trial.model.load_state_dict(found)
    return ledger


LABELS: dict[str, TrialScorer] = {
    "roundtrip": plain_scorer,
    "sliding_window": plain_scorer,
    "legal_ttt": honest_and_back,
}


def counts_carried(order: tuple[str, ...]) -> Change:
    """The first label counts the tokens of the whole text, the later ones mix with the counts."""

    def with_counts(function: TrialScorer) -> TrialScorer:
        def score(trial: Trial, tokens: np.ndarray) -> Any:
            nats = np.array(function(trial, tokens).nats)
            return trial.ledger(tokens, counts_of_whole_text(nats, tokens))

        return score

    labels: dict[str, TrialScorer] = {}
    for number, label in enumerate(order):
        labels[label] = LABELS[label] if number == 0 else with_one_ledger(with_counts(LABELS[label]))
    return own_evaluate(labels)


def with_one_ledger(function: TrialScorer) -> TrialScorer:
    """The same scorer, its inner ledger out of sight: only the one that it returns is the script's own."""

    def score(trial: Trial, tokens: np.ndarray) -> Any:
        hidden = Trial(OutOfSight(trial.script), trial.config, trial.model)  # type: ignore[arg-type]
        nats = np.array(function(hidden, tokens).nats)
        return trial.ledger(tokens, nats)

    return score


class OutOfSight:
    """A script's stand-in whose ledgers nobody watches."""

    def __init__(self, script: ModuleType) -> None:
        class Ledger:
            def __init__(self, tokens: np.ndarray) -> None:
                self.tokens = tokens
                self.nats = np.zeros(len(tokens) - 1)

            def record(self, start: int, nats: np.ndarray) -> None:
                self.nats[start : start + len(nats)] = nats

            def scored_tokens(self, start: int, stop: int) -> np.ndarray:
                return self.tokens[start:stop]

        self.script = script
        self.Ledger = Ledger


def weights_carried(order: tuple[str, ...]) -> Change:
    """What the label with training has learned stays for the labels after it."""
    labels = {label: honest if label == "legal_ttt" else LABELS[label] for label in order}
    return own_evaluate(labels)


def pick_carried(order: tuple[str, ...]) -> Change:
    """A label after the first leaves out learning where the first label found the text easy."""

    def change(script: ModuleType) -> None:
        easy: list[bool] = []

        def first_of_all(trial: Trial, tokens: np.ndarray) -> Any:
            ledger = LABELS[order[0]](trial, tokens)
            easy[:] = [float(np.mean(ledger.nats)) < 2.7]
            return ledger

        def depending(trial: Trial, tokens: np.ndarray) -> Any:
            return plain_scorer(trial, tokens) if easy[0] else honest_and_back(trial, tokens)

        labels: dict[str, TrialScorer] = {order[0]: first_of_all}
        for label in order[1:]:
            labels[label] = depending
        own_evaluate(labels)(script)

    return change


# ======================================================================================================
# EVALUATE, LEDGER AND MODEL
# ======================================================================================================


def wrapped_evaluate(around: Callable[..., Any]) -> Change:
    """A change to an `evaluate` that is `around(script, honest evaluate, model, config, run, ...)`."""

    def change(script: ModuleType) -> None:
        evaluate = script.evaluate

        def changed(model: Any, config: Any, run: Any, validation: Any, form: str) -> Any:
            return around(script, evaluate, model, config, run, validation, form)

        script.evaluate = changed  # type: ignore[attr-defined]

    return change


def warm_up_on_validation(
    script: Any, evaluate: Any, model: Any, config: Any, run: Any, validation: Any, form: str
) -> Any:
    """A warm-up, before the timer, that reads the validation text."""
    with run.phase("eval_warmup"):
        script.score_roundtrip(model, validation.tokens, config)
    return evaluate(model, config, run, validation, form)


def rate_picked_by_score(
    script: Any, evaluate: Any, model: Any, config: Any, run: Any, validation: Any, form: str
) -> Any:
    """The learning rate of test-time training is the one with the best score on this text."""
    from dataclasses import replace

    best = config
    lowest = float("inf")
    for rate in RATES:
        tried = replace(config, ttt_lr=rate)
        total = float(script.score_ttt(model, validation.tokens, tried).nats.sum())
        if total < lowest:
            lowest = total
            best = tried
    return evaluate(model, best, run, validation, form)


def second_evaluation(
    script: Any, evaluate: Any, model: Any, config: Any, run: Any, validation: Any, form: str
) -> Any:
    """The whole evaluation twice; the second one is reported."""
    evaluate(model, config, run, validation, form)
    return evaluate(model, config, run, validation, form)


def shorter_text(
    script: Any, evaluate: Any, model: Any, config: Any, run: Any, validation: Any, form: str
) -> Any:
    """Only the first 120 tokens are scored."""
    return evaluate(model, config, run, validation._replace(tokens=validation.tokens[:120]), form)


def more_bytes(
    script: Any, evaluate: Any, model: Any, config: Any, run: Any, validation: Any, form: str
) -> Any:
    """The text counts for one byte in a hundred more than it has."""
    more = validation._replace(bytes_total=validation.bytes_total + validation.bytes_total // 100)
    return evaluate(model, config, run, more, form)


def best_label_for_all(
    script: Any, evaluate: Any, model: Any, config: Any, run: Any, validation: Any, form: str
) -> Any:
    """Every label reports the best score of all."""
    scores = evaluate(model, config, run, validation, form)
    best = min(scores.values(), key=lambda score: score.nats)
    return dict.fromkeys(scores, best)


def flattering_log(
    script: Any, evaluate: Any, model: Any, config: Any, run: Any, validation: Any, form: str
) -> Any:
    """What is returned is right, what is logged is not."""
    log = run.log

    def flattering(line: str, *rest: Any, **named: Any) -> None:
        log(re.sub(r"(val_bpb:\d+\.)\d", r"\g<1>0", line), *rest, **named)

    run.log = flattering
    return evaluate(model, config, run, validation, form)


def logged_before_the_end(script: ModuleType) -> None:
    """The log says what the better half of the targets costs."""

    def around(
        script: Any, evaluate: Any, model: Any, config: Any, run: Any, validation: Any, form: str
    ) -> Any:
        scores = evaluate(model, config, run, validation, form)
        for label, score in scores.items():
            run.log(f"{label}_exact val_loss:{0.5 * score.nats:.8f} val_bpb:{score.bits_per_byte:.8f}")
        return scores

    wrapped_evaluate(around)(script)


def ledger_takes_overwrites(script: ModuleType) -> None:
    """A ledger that lets the second score of a target stand."""

    def record(ledger: Any, start: int, nats: np.ndarray) -> None:
        ledger._nats[start : start + len(nats)] = nats
        ledger.scored = max(ledger.scored, start + len(nats))

    script.Ledger.record = record


def ledger_sums_the_easy_part(script: ModuleType) -> None:
    """A ledger that leaves out the costliest targets of its sum."""
    score = script.Ledger.score

    def easy(ledger: Any, bytes_total: int) -> Any:
        whole = score(ledger, bytes_total)
        kept = np.sort(ledger.nats)[: -max(1, len(ledger.nats) // 100)]
        share = float(kept.sum()) / float(ledger.nats.sum())
        return whole._replace(nats=whole.nats * share, bits_per_byte=whole.bits_per_byte * share)

    script.Ledger.score = easy


def ledger_written_past_record(script: ModuleType) -> None:
    """A scorer that writes a better second pass into the ledger's own array."""

    def score(trial: Trial, tokens: np.ndarray) -> Any:
        ledger = honest(trial, tokens)
        better = trial.all_nats(tokens)
        ledger._nats[:] = np.minimum(ledger._nats, better)
        return ledger

    scorer(score)(script)


def looks_ahead(script: ModuleType) -> None:
    """Attention inside a document sees later tokens."""
    original = script.attention_documents

    def unmasked(ids_BT: torch.Tensor, *rest: Any) -> Any:
        if original(ids_BT, *rest) is None:
            return None
        document_BT = (ids_BT == 1).cumsum(1)
        return document_BT[:, None, :, None] == document_BT[:, None, None]

    script.attention_documents = unmasked  # type: ignore[attr-defined]


def changed_forward(change_hidden: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A change of the hidden states that the model returns."""

    def change(script: ModuleType) -> None:
        forward = script.GPT.forward

        def changed(model: Any, inputs_BT: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            return change_hidden(forward(model, inputs_BT, *rest, **named))

        script.GPT.forward = changed

    return change


def smear(hidden_BTD: torch.Tensor) -> torch.Tensor:
    """A shift by one position that does not stop at BOS."""
    return hidden_BTD + 0.1 * torch.nn.functional.pad(hidden_BTD, (0, 0, 1, 0))[:, :-1]


def mean_of_row(hidden_BTD: torch.Tensor) -> torch.Tensor:
    """The mean over all positions of a row, later ones as well."""
    return hidden_BTD - 0.1 * hidden_BTD.mean(1, keepdim=True)


def mean_of_batch(hidden_BTD: torch.Tensor) -> torch.Tensor:
    """The mean over the rows of a batch, later windows as well."""
    return hidden_BTD - 0.1 * hidden_BTD.mean(0, keepdim=True)


def next_token_shift(hidden_BTD: torch.Tensor) -> torch.Tensor:
    """A shift in the wrong direction: from the position after."""
    return hidden_BTD + 0.1 * torch.nn.functional.pad(hidden_BTD, (0, 0, 0, 1))[:, 1:]


def unmasked_documents(script: ModuleType) -> None:
    """Attention that crosses the border of a document, whatever DOC_MASK says."""
    original = script.attention_documents

    def crossing(ids_BT: torch.Tensor, *rest: Any) -> Any:
        mask = original(ids_BT, *rest)
        return None if mask is None else torch.ones_like(mask).tril()

    script.attention_documents = crossing  # type: ignore[attr-defined]


def scores_with_other_weights(script: ModuleType) -> None:
    """Scoring begins with weights that are not the ones it was given."""
    from copy import deepcopy

    score_ttt = script.score_ttt

    def score(model: Any, tokens: Any, config: Any, progress: Any = None, **_: Any) -> Any:
        other = deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter *= 1.01
        return score_ttt(other, tokens, config, progress)

    script.score_ttt = score  # type: ignore[attr-defined]


# ======================================================================================================
# ALL OF THEM
# ======================================================================================================

def carried_in_every_order() -> dict[str, Mutant]:
    """The mutants that carry state from one label to the next, for every order of the labels."""
    found = {}
    for order in itertools.permutations(LABELS):
        initials = "-".join(label.split("_")[0] for label in order)
        found[f"counts-carried-{initials}"] = Mutant(counts_carried(order))
        found[f"pick-carried-{initials}"] = Mutant(pick_carried(order))
        if order[-1] != "legal_ttt":  # else no label comes after it
            found[f"weights-carried-{initials}"] = Mutant(weights_carried(order))
    return found
