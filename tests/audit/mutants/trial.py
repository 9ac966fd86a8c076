"""What mutants are made of: honest scoring and learning in a few lines, to be changed in one thing each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

# Changes a freshly loaded script, for good.
Change = Callable[[ModuleType], None]


class Mutant(NamedTuple):
    """A change, and the lab in which it is refuted. settings: beside those of the lab."""

    change: Change
    lab: str = "sgd"
    settings: Mapping[str, str] = {}


@dataclass(frozen=True)
class Trial:
    """A script, the settings and the model of one call of a scorer."""

    script: ModuleType
    config: Any
    model: Any

    def nats(self, tokens: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Honest nats of targets start .. stop in rows of the context length."""
        length = self.config.eval_length
        found = []
        for begin in range(start, stop, length):
            end = min(begin + length, stop)
            row_T = torch.from_numpy(tokens[begin : end + 1].astype(np.int64))
            with torch.no_grad():
                hidden_TD = self.model(row_T[None, :-1])[0]
                found.append(self.model.loss_per_token(hidden_TD, row_T[1:]).double().numpy())
        return np.concatenate(found)

    def all_nats(self, tokens: np.ndarray) -> np.ndarray:
        """Honest nats of every target."""
        return self.nats(tokens, 0, len(tokens) - 1)

    def learn(self, tokens: np.ndarray, rate: float | None = None) -> None:
        """Plain SGD on a stretch of tokens, a step per row of the context length."""
        length = self.config.eval_length
        parameters = list(self.model.parameters())
        for begin in range(0, len(tokens) - 1, length):
            row_BT = torch.from_numpy(tokens[begin : begin + length + 1].astype(np.int64))[None]
            with torch.enable_grad():
                loss = self.model.loss(row_BT[:, :-1], row_BT[:, 1:])
                gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= (self.config.ttt_lr if rate is None else rate) * gradient

    def chunks(self, tokens: np.ndarray) -> Iterator[tuple[int, int]]:
        """Targets (first, after last) of each chunk."""
        size = self.config.ttt_chunk_tokens
        targets = len(tokens) - 1
        for start in range(0, targets, size):
            yield start, min(start + size, targets)

    def ledger(self, tokens: np.ndarray, nats: np.ndarray) -> Any:
        """A ledger of `tokens` with one record: all nats at once."""
        ledger = self.script.Ledger(tokens)
        ledger.record(0, nats)
        return ledger

    def saved(self) -> dict[str, torch.Tensor]:
        """A copy of the weights."""
        return weights_of(self.model)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """A copy of the weights."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# Takes a trial and tokens; returns a ledger.
TrialScorer = Callable[[Trial, np.ndarray], Any]
# Takes nats and the tokens they are of; returns other nats.
ChangeOfNats = Callable[[np.ndarray, np.ndarray], np.ndarray]


def honest(trial: Trial, tokens: np.ndarray) -> Any:
    """Score a chunk, then learn from it: the mould of the mutants, and legal."""
    ledger = trial.script.Ledger(tokens)
    for start, stop in trial.chunks(tokens):
        ledger.record(start, trial.nats(tokens, start, stop))
        if stop < len(ledger.nats):
            trial.learn(ledger.scored_tokens(start, stop + 1))
    return ledger


def scorer(function: TrialScorer, name: str = "score_ttt", restore: bool = True) -> Change:
    """A change that makes `function` a scorer of the script; the weights that it found are put back."""

    def change(script: ModuleType) -> None:
        def score(model: Any, tokens: Any, config: Any, progress: Any = None, **_: Any) -> Any:
            trial = Trial(script, config, model)
            found = trial.saved()
            try:
                return function(trial, np.asarray(tokens))
            finally:
                if restore:
                    model.load_state_dict(found)

        setattr(script, name, score)

    return change


def other_nats(change_of_nats: ChangeOfNats) -> Change:
    """A change that puts other nats than the honest ones into the ledger."""

    def score(trial: Trial, tokens: np.ndarray) -> Any:
        return trial.ledger(tokens, change_of_nats(trial.all_nats(tokens), tokens))

    return scorer(score)


def own_evaluate(labels: dict[str, TrialScorer]) -> Change:
    """A change to an `evaluate` of these labels, in their order, with the log lines that are expected."""

    def change(script: ModuleType) -> None:
        def evaluate(model: Any, config: Any, run: Any, validation: Any, form: str) -> dict[str, Any]:
            trial = Trial(script, config, model)
            found = trial.saved()
            scores = {}
            for label, function in labels.items():
                with run.phase(f"eval_{label}"):
                    ledger = function(trial, np.asarray(validation.tokens))
                scores[label] = report(script, run, label, ledger, validation)
            model.load_state_dict(found)
            return scores

        script.evaluate = evaluate  # type: ignore[attr-defined]

    return change


def report(script: ModuleType, run: Any, label: str, ledger: Any, validation: Any) -> Any:
    """The score of a ledger, logged as the script logs it, and the nats of its documents in their file."""
    score = ledger.score(validation.bytes_total)
    run.log(
        f"{label}_exact val_loss:{score.nats:.8f} val_bpb:{score.bits_per_byte:.8f} "
        f"scored_tokens:{score.scored_tokens} val_bytes:{score.bytes}"
    )
    begins = np.flatnonzero(validation.tokens[:-1] == 1)
    if run.machine.rank == 0:
        np.add.reduceat(ledger.nats, begins).tofile(run.directory / f"nats_{label}.bin")
    return score
