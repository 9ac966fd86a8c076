"""Changes of a script that break no rule: no audit may refute one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.audit.mutants.documents import begun
from tests.audit.mutants.trial import Trial, honest, report, scorer


def scorers_renamed(script: ModuleType) -> None:
    """Other names for the scorers, known to `evaluate` alone."""
    sliding = script.score_sliding
    learning = script.score_ttt
    roundtrip = script.score_roundtrip

    def evaluate(model: Any, config: Any, run: Any, validation: Any, form: str) -> dict[str, Any]:
        scores = {}
        functions = {"roundtrip": roundtrip, "sliding_window": sliding, "legal_ttt": learning}
        for label, function in functions.items():
            with run.phase(f"eval_{label}"):
                ledger = function(model, validation.tokens, config)
            scores[label] = report(script, run, label, ledger, validation)
        return scores

    script.evaluate = evaluate  # type: ignore[attr-defined]
    script.rehearse_evaluation = lambda *_: None  # type: ignore[attr-defined]  # it knows the old name
    del script.score_ttt


def labels_in_another_order(script: ModuleType) -> None:
    """The label with training first."""
    functions = {"legal_ttt": "score_ttt", "sliding_window": "score_sliding", "roundtrip": "score_roundtrip"}

    def evaluate(model: Any, config: Any, run: Any, validation: Any, form: str) -> dict[str, Any]:
        scores = {}
        for label, name in functions.items():
            with run.phase(f"eval_{label}"):
                ledger = getattr(script, name)(model, validation.tokens, config)
            scores[label] = report(script, run, label, ledger, validation)
        return scores

    script.evaluate = evaluate  # type: ignore[attr-defined]


def one_row_a_batch(script: ModuleType) -> None:
    """Every window is a batch of its own."""
    begin = script.WindowScorer.__init__

    def alone(window_scorer: Any, *args: Any, **named: Any) -> None:
        begin(window_scorer, *args, **named)
        window_scorer.batch_rows = 1

    script.WindowScorer.__init__ = alone


def windows_in_reverse(script: ModuleType) -> None:
    """The windows of a chunk are computed from the last to the first; the ledger gets them in order."""

    def score(window_scorer: Any, chunk: np.ndarray) -> np.ndarray:
        found = []
        for row in chunk[::-1]:
            found.append(window_scorer._score_batch(row[None]))
        return torch.cat(found[::-1]).double().numpy()

    script.WindowScorer.score = score


def rows_in_reverse(script: ModuleType) -> None:
    """An epoch takes the rows of a chunk from the last to the first."""
    original = script.learn

    def backwards(model: Any, sgd: Any, tokens: np.ndarray, config: Any) -> None:
        length = config.eval_length
        rows = (len(tokens) - 1) // length
        for row in reversed(range(rows)):
            original(model, sgd, tokens[row * length : (row + 1) * length + 1], config)

    script.learn = backwards  # type: ignore[attr-defined]


def recorded_in_pieces(script: ModuleType) -> None:
    """The ledger is given seven targets at a time."""
    record = script.Ledger.record

    def in_pieces(ledger: Any, start: int, nats: np.ndarray) -> None:
        for at in range(0, len(nats), 7):
            record(ledger, start + at, nats[at : at + 7])

    script.Ledger.record = in_pieces


def learns_in_place(script: ModuleType) -> None:
    """The model itself learns, and gets its weights back."""
    scorer(honest)(script)


def learner_built_anew(script: ModuleType) -> None:
    """The copy that learns is made of settings and weights, not by copying the object."""
    score_ttt = script.score_ttt

    def score(model: Any, tokens: Any, config: Any, progress: Any = None) -> Any:
        learner = script.GPT(model.settings, seed=None)
        learner.load_state_dict(copy.deepcopy(model.state_dict()))
        learner.machine = model.machine
        return score_ttt(learner, tokens, config, progress)

    script.score_ttt = score  # type: ignore[attr-defined]


def cache_of_scored_tokens(script: ModuleType) -> None:
    """A normalized mixture with the frequencies of the tokens that were scored before."""

    def score(trial: Trial, tokens: np.ndarray) -> Any:
        nats = trial.all_nats(tokens)
        counts = np.ones(trial.config.vocab_size)
        mixed = np.zeros_like(nats)
        for i, target in enumerate(tokens[1:].tolist()):
            mixed[i] = -np.log(0.8 * np.exp(-nats[i]) + 0.2 * counts[target] / counts.sum())
            counts[target] += 1
        return trial.ledger(tokens, mixed)

    scorer(score)(script)


def split_by_blocks(script: ModuleType) -> None:
    """Ranks take neighboring windows instead of batches in turn."""

    def score(window_scorer: Any, chunk: np.ndarray) -> np.ndarray:
        machine = window_scorer.machine
        begin = int(chunk[0, 1])
        nats = torch.zeros(int(chunk[-1, 2]) - begin, dtype=torch.float64)
        mine = np.array_split(chunk, machine.world_size)[machine.rank]
        for at in range(0, len(mine), window_scorer.batch_rows):
            rows = mine[at : at + window_scorer.batch_rows]
            nats[rows[0, 1] - begin : rows[-1, 2] - begin] = window_scorer._score_batch(rows)
        machine.all_reduce(nats)
        return nats.numpy()

    script.WindowScorer.score = score


def batches_by_ranks(script: ModuleType) -> None:
    """Several ranks share a batch: each takes smaller ones."""
    begin = script.WindowScorer.__init__

    def smaller(window_scorer: Any, *args: Any, **named: Any) -> None:
        begin(window_scorer, *args, **named)
        window_scorer.batch_rows = max(1, window_scorer.batch_rows // window_scorer.machine.world_size)

    script.WindowScorer.__init__ = smaller


def other_batches_of_learning(script: ModuleType) -> None:
    """Three rows in a step of test-time training."""
    original = script.learn

    def three(model: Any, sgd: Any, tokens: np.ndarray, config: Any) -> None:
        original(model, sgd, tokens, replace(config, ttt_batch_seqs=3))

    script.learn = three  # type: ignore[attr-defined]


def one_document_a_batch(script: ModuleType) -> None:
    """No document has another one beside it."""

    def alone(scorer: Any) -> list[np.ndarray]:
        return [np.array([document]) for document in range(len(scorer.begins))]

    script.DocumentScorer.batches = alone


def batches_in_reverse(script: ModuleType) -> None:
    """The shortest documents first."""
    batches = script.DocumentScorer.batches
    script.DocumentScorer.batches = lambda scorer: batches(scorer)[::-1]


def padded_by_the_text(script: ModuleType) -> None:
    """Rows are filled up with the text that follows, which no token of the row sees."""

    def read(scorer: Any, chunk: Any, adapters: Any) -> Any:
        length = -(-(chunk.stop - chunk.first) // 16) * 16
        places_BT = scorer.begins[chunk.documents, None] + np.arange(chunk.first, chunk.first + length)
        ids_BT = scorer.tokens[places_BT].astype(np.int64)
        row_starts = np.arange(0, ids_BT.size + 1, length, dtype=np.int32)
        starts = script.starts_to_device(row_starts, scorer.device)
        numbers_BP = adapters.use(len(chunk.documents))
        inputs_BT = script.to_device(ids_BT, scorer.device)
        hidden_BTD = scorer.forward(scorer.model, inputs_BT, starts, numbers_BP, scorer.config)
        return hidden_BTD[:, chunk.start - chunk.first : chunk.stop - chunk.first]

    script.DocumentScorer.read = read


def two_passes(script: ModuleType) -> None:
    """A pass without gradients scores a chunk, a second one learns from it."""

    def score(scorer: Any, batch: np.ndarray, *_: Any) -> None:
        adapters = begun(script, scorer, batch)
        for chunk in scorer.chunks(batch):
            with torch.no_grad():
                hidden_BCD = scorer.read(chunk, adapters)
            scorer.record(chunk, hidden_BCD, adapters)
            if chunk.learning:
                learning = chunk._replace(documents=chunk.documents[: chunk.learning])
                scorer.learn(learning, scorer.read(learning, adapters), adapters)

    script.DocumentScorer.score = score


LEGAL: dict[str, Callable[[ModuleType], None]] = {
    "scorers-renamed": scorers_renamed,
    "labels-in-another-order": labels_in_another_order,
    "one-row-a-batch": one_row_a_batch,
    "windows-in-reverse": windows_in_reverse,
    "rows-of-an-epoch-in-reverse": rows_in_reverse,
    "recorded-in-pieces": recorded_in_pieces,
    "learns-in-place": learns_in_place,
    "learner-built-anew": learner_built_anew,
    "cache-of-scored-tokens": cache_of_scored_tokens,
    "ranks-split-by-blocks": split_by_blocks,
    "batches-by-ranks": batches_by_ranks,
    "other-batches-of-learning": other_batches_of_learning,
}
# Those that change the scorer of documents: they are to be tried with its settings.
LEGAL_OF_DOCUMENTS: dict[str, Callable[[ModuleType], None]] = {
    "one-document-a-batch": one_document_a_batch,
    "batches-in-reverse": batches_in_reverse,
    "padded-by-the-text": padded_by_the_text,
    "two-passes-a-chunk": two_passes,
}
