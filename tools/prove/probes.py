"""Dynamic proofs that a score is legal: a tiny model, a tiny stream, and the script's own `evaluate`.

What is watched is the run of the script: its ledgers, its scorers' calls, its forward passes and its log.
Each probe takes a `Subject` and yields findings; one that fails names positions and numbers. B1-B17 are the
checks that `tools prove` reports; `questions` has those that need no look inside.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from data.shards import BOS_ID, write_shard
from tools.check.findings import Finding, fail, info, warn
from tools.prove import questions, tiny
from tools.prove.cell import in_cell, offers, record

SCORERS = ("score_roundtrip", "score_sliding", "score_ttt")
ENTRY_POINT = ("Config", "build_model", "Ledger", "Validation", "evaluate", "token_bytes")
STREAM_TOKENS = 150
DOCUMENT_STARTS = [0, 11, 40, 41, 96, 131]  # 40 and 41: an empty document
LONG_TOKENS = 700
LONG_DOCUMENT = 340  # tokens of the first document of a long text; the others have about 20 each
LATE_TARGETS = [301, 690]  # beyond the tenth chunk of its long document; in the last one, alone in its batch
TEXT_BYTES = 1000  # of the stream; any number that `evaluate` must divide by
CLOCK_TOLERANCE = 1e-6  # nats: a document is learned from or not, but for rounding
MANY = 30_000  # ids of a text that no model scores
KNOWN_TOKENS = 8  # so many in a row are recognised as validation text
REPORTED = re.compile(r"(val_loss|val_bpb|scored_tokens|val_bytes):([\d.]+)")

# Takes a model, tokens and a config; returns a ledger.
Scorer = Callable[[Any, np.ndarray, Any], Any]


# ======================================================================================================
# SUBJECT
# ======================================================================================================


@record
@dataclass(frozen=True)
class Subject:
    """A script under audit and its settings.

    scorers: functions of the script that score, for those who ask them one by one. name: of the settings, in
    findings. machine: the rank that models compute on, a `Machine` of the script; None: the only one, or, of
    a script that has no `Machine` yet, that of the process group.
    """

    script: ModuleType
    config: Any
    scorers: Mapping[str, Scorer]
    seed: int = 0
    machine: Any = None
    name: str = "tiny"

    def to_cell(self) -> list[Any]:
        """What crosses to the script's process; the scorers are found there."""
        return [self.script, self.config, self.seed, self.name]

    @staticmethod
    def from_cell(script: Any, config: Any, seed: int, name: str) -> Subject:
        """The subject again."""
        return Subject(script, config, scorers_of(script), seed, name=name)

    def model(self) -> Any:
        """The tiny model: every parameter away from its initial value, so that every path counts."""
        return model_of(self, 0.3)

    def tokens(self) -> np.ndarray:
        """The stream: BOS first, an empty document, some longer than a window, a tail."""
        random = np.random.default_rng(self.seed)
        tokens = random.integers(2, self.config.vocab_size, STREAM_TOKENS).astype(np.uint16)
        tokens[DOCUMENT_STARTS] = BOS_ID
        return tokens

    def nats(self, name: str, tokens: np.ndarray, model: Any = None) -> np.ndarray:
        """The nats that one scorer puts in its ledger."""
        ledger = self.scorers[name](model or self.model(), tokens, self.config)
        return np.array(ledger.nats, dtype=np.float64)

    def case(self, only: str = "", tokens: np.ndarray | None = None) -> questions.Case:
        """The script as a box: all labels as `evaluate` scores them, or one scorer alone."""
        model = self.model()
        stream = self.tokens() if tokens is None else tokens

        def ask(asked: np.ndarray) -> dict[str, np.ndarray]:
            return nats_by_label(self, asked, model, only)

        def continued(asked: np.ndarray, first: int, unlikely: bool) -> np.ndarray:
            return continuation(self, model, asked, first, unlikely)

        return questions.Case(ask, stream, self.config.vocab_size, self.place, continued)

    @property
    def by_documents(self) -> bool:
        """Whether test-time training is of each document by itself; older scripts know one way only."""
        return getattr(self.config, "ttt_mode", "sgd") == "lora"

    def place(self, label: str, target: int) -> str:
        """A target in words."""
        if self.by_documents:
            return f"{self.name}: {label}, target {target}"
        return f"{self.name}: {label}, target {target}, chunk {target // self.config.ttt_chunk_tokens}"


@in_cell
def model_of(subject: Subject, deviation: float) -> Any:
    """A model of the subject's settings, every parameter moved by random numbers of this deviation."""
    model = subject.script.build_model(subject.config)
    generator = torch.Generator().manual_seed(subject.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += deviation * torch.randn(parameter.shape, generator=generator)
    if subject.machine is not None:
        model.machine = subject.machine
    return model


def long_tokens(subject: Subject) -> np.ndarray:
    """One long document and many short ones, one more than whole batches of them."""
    random = np.random.default_rng(subject.seed)
    tokens = random.integers(2, subject.config.vocab_size, LONG_TOKENS).astype(np.uint16)
    tokens[0] = BOS_ID
    tokens[LONG_DOCUMENT::20] = BOS_ID
    return tokens


@in_cell
def make_subject(script: ModuleType, seed: int = 0, name: str = "tiny", **settings: str) -> Subject:
    """A subject of the script's own config and scorers, with the smallest settings and what is given."""
    return subject_of(script, {**tiny.scorer(script), **settings}, seed, name)


@in_cell
def subject_of(script: ModuleType, settings: Mapping[str, str], seed: int, name: str = "tiny") -> Subject:
    """A subject with just these settings."""
    return Subject(script, config_of(script, settings), scorers_of(script), seed, name=name)


def scorers_of(script: Any) -> dict[str, Scorer]:
    """The scorers that a script has."""
    return {name: getattr(script, name) for name in SCORERS if hasattr(script, name)}


@in_cell
def config_of(script: ModuleType, settings: Mapping[str, str]) -> Any:
    """The config that a script makes of these settings."""
    return script.Config.from_env(dict(settings))


@in_cell
def with_settings(subject: Subject, **changes: Any) -> Subject:
    """The subject with some settings changed, past all checks of them."""
    return replace(subject, config=replace(subject.config, **changes))


@in_cell
def continuation(subject: Subject, model: Any, tokens: np.ndarray, first: int, unlikely: bool) -> np.ndarray:
    """The stream with every token from `first` on replaced by what the model holds likeliest, or unlikeliest.

    Documents begin where they did. It is the model's forward pass that is asked, in rows of the context.
    """
    length = subject.config.eval_length
    continued = tokens.copy()
    candidates_V = torch.arange(subject.config.vocab_size)
    for i in range(first, len(tokens)):
        if tokens[i] == BOS_ID:
            continue
        row_1T = torch.from_numpy(continued[max(0, i - length) : i].astype(np.int64))[None]
        with torch.no_grad():
            hidden_VD = model(row_1T)[0, -1:].expand(len(candidates_V), -1)
            nats_V = model.loss_per_token(hidden_VD, candidates_V)
        nats_V[BOS_ID] = -math.inf if unlikely else math.inf
        continued[i] = int(nats_V.argmax() if unlikely else nats_V.argmin())
    return continued


# ======================================================================================================
# EVALUATION, WATCHED: what `evaluate` does and says, label by label
# ======================================================================================================


class RecordingRun:
    """Stands in for a script's Run while its `evaluate` is watched."""

    def __init__(self, machine: Any = None) -> None:
        self.machine = machine
        self.device = torch.device("cpu")
        self.directory = None
        self.phase_name = "setup"
        self.phases: dict[str, float] = {}
        self.lines: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Remember the name of the phase."""
        self.phase_name = name
        yield
        self.phase_name = "between phases"
        self.phases[name] = 1.0

    def log(self, line: str, *_: Any, **__: Any) -> None:
        """Keep the lines of a log entry."""
        self.lines += line.splitlines()

    def record(self, *_: Any, **__: Any) -> None:
        """Accept and forget."""

    def alive(self) -> None:
        """Accept and forget."""


@record
@dataclass
class Events:
    """What a run did, in order, each with the phase it was in.

    log: a phase, a kind and its value. "ledger" and "call": a new ledger, a call of a scorer (its name).
    "record": (number of the ledger, first target, nats). "step": None, an optimizer step. "score" and
    "pass", a forward pass without and with gradients, and "learn", that the gradients of such a pass are
    taken: (rows of inputs, sum of all weights).
    """

    log: list[tuple[str, str, Any]] = field(default_factory=list)


@record
@dataclass
class LabelRun:
    """What `evaluate` did for one label: nats by target as they were recorded, and what it says of them."""

    nats: np.ndarray
    ledgers: int
    calls: list[str]
    spans: list[tuple[int, int]]  # first target and how many, in the order of recording
    score: Any = None
    ledger: Any = None
    twice: int = 0  # targets recorded more than once

    def total(self) -> float:
        """Nats of all targets, summed exactly."""
        return math.fsum(self.nats)


@record
@dataclass
class Evaluation:
    """All labels in the order of the run, its log, and how many ledgers belong to none of them."""

    labels: dict[str, LabelRun]
    lines: list[str]
    stray_ledgers: int
    events: Events


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """A copy of the weights of a model."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@in_cell
def weight_sum(model: Any) -> float:
    """A number that changes when a weight does."""
    return float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


@in_cell
def weights_hash(model: Any) -> str:
    """The SHA-256 of all weights of a model."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


@in_cell
def nats_by_label(subject: Subject, tokens: np.ndarray, model: Any, only: str = "") -> dict[str, np.ndarray]:
    """The nats of every target by label, as `evaluation` finds them."""
    return {label: run.nats for label, run in evaluation(subject, tokens, model, only).labels.items()}


@in_cell
def evaluation(
    subject: Subject, tokens: np.ndarray, model: Any, only: str = "", passes: bool = False
) -> Evaluation:
    """Let the script evaluate a model, and note what its ledgers are given.

    only: a scorer to call instead of `evaluate`; it is the label then. passes: note forward passes and
    optimizer steps as well.
    """
    script = subject.script
    run = RecordingRun(subject.machine or getattr(model, "machine", None))
    events = Events()
    ledgers: list[tuple[str, Any]] = []
    with watched(subject, run, events, ledgers, model if passes else None):
        if only:
            with run.phase(f"eval_{only}"):
                subject.scorers[only](model, tokens, subject.config)
            scores: Mapping[str, Any] = {only: None}
        else:
            validation = script.Validation(tokens, TEXT_BYTES, "")
            scores = script.evaluate(model, subject.config, run, validation, "int6")
    labels = {}
    for label, score in scores.items():
        labels[label] = label_run(label, score, events, ledgers, len(tokens) - 1)
    stray = sum(phase not in [f"eval_{label}" for label in labels] for phase, _ in ledgers)
    return Evaluation(labels, run.lines, stray, events)


def label_run(
    label: str, score: Any, events: Events, ledgers: list[tuple[str, Any]], targets: int
) -> LabelRun:
    """What the events say of one label; a target without a score is NaN."""
    phase = f"eval_{label}"
    own = [ledger for at, ledger in ledgers if at == phase]
    run = LabelRun(np.full(targets, math.nan), len(own), [], [], score, own[-1] if own else None)
    for at, kind, value in events.log:
        if at != phase:
            continue
        if kind == "call":
            run.calls.append(value)
        if kind == "record":
            start, nats = value
            run.spans.append((start, len(nats)))
            stop = start + len(nats)
            run.twice += int(np.isfinite(run.nats[start:stop]).sum())
            if stop > targets:  # more targets than the text has: kept, so that it shows
                run.nats = np.concatenate([run.nats, np.full(stop - targets, math.nan)])
            run.nats[start:stop] = nats
    return run


@contextlib.contextmanager
def watched(
    subject: Subject, run: RecordingRun, events: Events, ledgers: list[tuple[str, Any]], model: Any
) -> Iterator[None]:
    """Note each ledger, ledger entry and scorer's call and, with a model, optimizer steps and its passes."""
    script = subject.script
    ledger_class = script.Ledger
    begin = ledger_class.__init__
    record = ledger_class.record

    def note(kind: str, value: Any) -> None:
        events.log.append((run.phase_name, kind, value))

    def watched_begin(ledger: Any, *args: Any, **named: Any) -> None:
        begin(ledger, *args, **named)
        ledgers.append((run.phase_name, ledger))
        note("ledger", None)

    def watched_record(ledger: Any, start: int, nats: Any, *rest: Any) -> None:
        record(ledger, start, nats, *rest)
        note("record", (int(start), np.array(nats, dtype=np.float64)))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ledger_class, "__init__", watched_begin))
        stack.enter_context(mock.patch.object(ledger_class, "record", watched_record))
        depth = [0]
        for name, function in list(vars(script).items()):
            if name.startswith("score_") and callable(function):
                call = counted_call(name, function, depth, note)
                stack.enter_context(mock.patch.object(script, name, call))
        if model is not None:
            stack.enter_context(watched_learning(type(model), note))
        yield


@contextlib.contextmanager
def watched_learning(model_class: Any, note: Callable[[str, Any], None]) -> Iterator[None]:
    """Note forward passes, gradients and optimizer steps.

    A pass with gradients teaches nothing by itself: a scorer may record its losses, and learn of it then.
    It is learned from when gradients are taken, or, should they come in another way, at the next step.
    """
    forward = model_class.forward
    passes: list[Any] = []  # with gradients that nobody has taken

    def learned() -> None:
        for seen in passes:
            note("learn", seen)
        passes.clear()

    def watched_forward(self: Any, inputs: torch.Tensor, *rest: Any, **named: Any) -> Any:
        seen = (inputs.tolist(), weight_sum(self))
        if torch.is_grad_enabled():
            note("pass", seen)
            passes.append(seen)
        else:
            note("score", seen)
        return forward(self, inputs, *rest, **named)

    def watched_step(*_: Any) -> None:
        learned()
        note("step", None)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*args: Any, **named: Any) -> Any:
            learned()
            return function(*args, **named)

        return taken

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(model_class, "forward", watched_forward))
        for name in ("backward", "grad"):
            taken = before(getattr(torch.autograd, name))
            stack.enter_context(mock.patch.object(torch.autograd, name, taken))
        hook = register_optimizer_step_post_hook(watched_step)
        stack.callback(hook.remove)
        yield


def counted_call(
    name: str, function: Callable[..., Any], depth: list[int], note: Callable[[str, Any], None]
) -> Callable[..., Any]:
    """The function, with a note of each call that comes from no other scorer."""

    def call(*args: Any, **named: Any) -> Any:
        if depth[0] == 0:
            note("call", name)
        depth[0] += 1
        try:
            return function(*args, **named)
        finally:
            depth[0] -= 1

    return call


# ======================================================================================================
# QUESTIONS, asked of a subject
# ======================================================================================================


def kraft_positions(subject: Subject) -> list[int]:
    """First targets of stream, chunks, windows and documents, the last of each, and one in the middle."""
    config = subject.config
    targets = STREAM_TOKENS - 1
    positions = {0, 1, targets // 2, targets - 1}
    for chunk in range(0, targets, config.ttt_chunk_tokens):
        positions |= {chunk - 1, chunk}
    positions |= {config.eval_length - 1, config.eval_length, config.eval_length + config.eval_stride}
    for start in DOCUMENT_STARTS:
        positions |= {start - 2, start - 1, start}
        if subject.by_documents:
            positions |= {start + config.ttt_chunk_size - 1, start + config.ttt_chunk_size}
    return sorted(position for position in positions if 0 <= position < targets)


def kraft_sums(subject: Subject, name: str = "", positions: Iterable[int] | None = None) -> Iterator[Finding]:
    """B2; name: of one scorer, empty: all labels of `evaluate`."""
    return questions.kraft(subject.case(name), kraft_positions(subject) if positions is None else positions)


def determinism(subject: Subject, name: str = "") -> Iterator[Finding]:
    """B14; name: of one scorer, empty: all labels of `evaluate`."""
    return questions.repetition(subject.case(name))


def document_isolation(subject: Subject, name: str = "") -> Iterator[Finding]:
    """B9, asked of labels that learn nothing, that learn by documents, or do not score in the text's order.

    Of the last it is the proof that their order is of no account. name: of one scorer, empty: all labels of
    `evaluate`.
    """
    watched_run = evaluation(subject, subject.tokens(), subject.model(), name, passes=True)
    fixed = []
    alone = []
    for label, run in watched_run.labels.items():
        learning = learns(watched_run.events, label)
        if run.spans != sorted(run.spans) or (learning and subject.by_documents):
            alone.append(label)
        elif not learning:
            fixed.append(label)
    case = subject.case(name)
    yield from questions.isolation(case, fixed, subject.config.doc_mask)
    if alone:
        yield from questions.isolation(case, alone, True)


# ======================================================================================================
# CLOCK: what a limit of time may decide
# ======================================================================================================


class WorkedTime:
    """Stands in for a script's module `time`: in a phase, a pass takes a second, with gradients three."""

    def __init__(self, run: RecordingRun, phase: str) -> None:
        self.run = run
        self.phase = phase
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.seconds

    def passing(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward pass that takes its time."""

        def timed(*args: Any, **named: Any) -> Any:
            if self.run.phase_name == self.phase:
                self.seconds += 3 if torch.is_grad_enabled() else 1
            return forward(*args, **named)

        return timed


@in_cell
def under_a_limit(subject: Subject, tokens: np.ndarray, limit: float = 0.0) -> tuple[np.ndarray, float]:
    """The nats of legal_ttt with MAX_EVAL_SECONDS=limit by a clock that counts work, and its seconds."""
    run = RecordingRun(subject.machine)
    events = Events()
    ledgers: list[tuple[str, Any]] = []
    clock = WorkedTime(run, "eval_legal_ttt")
    model = subject.model()
    validation = subject.script.Validation(tokens, TEXT_BYTES, "")
    with watched(subject, run, events, ledgers, None), \
            mock.patch.object(subject.script, "time", clock), \
            mock.patch.object(type(model), "forward", clock.passing(type(model).forward)):  # fmt: skip
        config = replace(subject.config, max_eval_seconds=limit)
        subject.script.evaluate(model, config, run, validation, "int6")
    return label_run("legal_ttt", None, events, ledgers, len(tokens) - 1).nats, clock.seconds


@in_cell
def labels_in_time(subject: Subject, limit: float) -> list[str]:
    """The labels that are scored where each phase lasts a second and MAX_EVAL_SECONDS is `limit`."""
    config = replace(subject.config, max_eval_seconds=limit)
    text = subject.script.Validation(subject.tokens(), TEXT_BYTES, "")
    return list(subject.script.evaluate(subject.model(), config, RecordingRun(), text, "int6"))


def clock_alone(subject: Subject) -> Iterator[Finding]:
    """B1 and B5 of a limit of time: it may leave whole documents without learning, by the clock alone.

    Each document has the scores of one that learns or of one that never does, and which it is stays the same
    when all documents are rewritten in their lengths.
    """
    if not offers(subject.script, "ScoreClock"):  # older scripts have no such limit
        return
    where = f"{subject.name}: legal_ttt"
    whole = set(evaluation(subject, subject.tokens(), subject.model()).labels)
    in_time = labels_in_time(subject, 0.5)
    if set(in_time) != {"legal_ttt"} and len(whole) > 1:
        said = f"{sorted(in_time)} are scored, and the limit of time is over after the first"
        yield fail("B3", said, where, "leave out what would end after MAX_EVAL_SECONDS")
    one_by_one = with_settings(subject, ttt_batch_size=1)
    idle = with_settings(subject, ttt_lora_lr=0.0)
    borders = [*DOCUMENT_STARTS, STREAM_TOKENS - 1]
    tokens = subject.tokens()
    rewritten = np.where(tokens == BOS_ID, tokens, 2 + (tokens - 1) % (subject.config.vocab_size - 2))
    modes: list[list[bool]] = []  # of each text: whether a document was learned from
    for text in (tokens, rewritten):
        learned, seconds = under_a_limit(one_by_one, text)
        plain, _ = under_a_limit(idle, text)
        modes.append([])
        nats, _ = under_a_limit(one_by_one, text, 0.7 * seconds)
        for begin, end in itertools.pairwise(borders):
            from_learned = np.abs(nats - learned)[begin:end].max()
            from_plain = np.abs(nats - plain)[begin:end].max()
            if min(from_learned, from_plain) > CLOCK_TOLERANCE:
                what = f"a limit of time ends learning inside targets {begin} to {end - 1}"
                yield fail("B5", what, where, "read the clock before a document, never inside")
                return
            modes[-1].append(bool(from_learned <= CLOCK_TOLERANCE))
    if modes[0] != modes[1]:
        documents = sum(a != b for a, b in zip(*modes, strict=True))
        what = f"other tokens decide of {documents} documents whether they are learned from under a limit"
        yield fail("B1", what, where, "let the clock alone decide")
        return
    what = f"a limit of time leaves {modes[0].count(False)} documents wholly without learning"
    yield info("B1", what, where)
    yield info("B5", what, where)


def learns(events: Events, label: str) -> bool:
    """Whether a label made a forward pass with gradients, or an optimizer step."""
    return any(at == f"eval_{label}" and kind in ("learn", "step") for at, kind, _ in events.log)


# ======================================================================================================
# EVENTS: coverage, headline, order of updates, weights
# ======================================================================================================


def ledger_order(subject: Subject, name: str = "") -> Iterator[Finding]:
    """B3-B6 from the events of one run; name: of one scorer, empty: all labels of `evaluate`."""
    tokens = subject.tokens()
    model = subject.model()
    before = weights_hash(model)
    sum_before = weight_sum(model)
    watched_run = evaluation(subject, tokens, model, name, passes=True)
    if watched_run.stray_ledgers:
        text = f"{watched_run.stray_ledgers} ledgers are filled outside the phases of all labels"
        yield fail("B3", text, subject.name, "score a label once, in its own phase (C4)")
    unchanged = weights_hash(model) == before
    for label, run in watched_run.labels.items():
        yield from _coverage(subject, run, label, len(tokens) - 1)
        yield from _headline(subject, run, label, watched_run.lines)
        yield from _write_once(subject, run, label)
        yield from _update_order(tokens, watched_run.events, label)
        yield _weights(watched_run.events, sum_before, unchanged, label)
        yield from _what_it_says(subject, watched_run.events, label)


def _what_it_says(subject: Subject, events: Events, label: str) -> Iterator[Finding]:
    """B6: a label that names no learning learns nothing, and the round trip reads windows without overlap."""
    if label not in ("roundtrip", "sliding_window"):
        return
    if learns(events, label):
        text = f"{label} learns from the text"
        yield fail("B6", text, f"{subject.name}: {label}", "score each label as its name says")
    rows = sum(len(value[0]) for at, kind, value in events.log if at == f"eval_{label}" and kind == "score")
    most = math.ceil((len(subject.tokens()) - 1) / subject.config.eval_length)
    if label == "roundtrip" and rows > most:
        text = f"{label} reads {rows} windows, without overlap there are {most}"
        yield fail("B6", text, f"{subject.name}: {label}", "score each label as its name says")


def _coverage(subject: Subject, run: LabelRun, label: str, targets: int) -> Iterator[Finding]:
    """B3: one scorer's call and one ledger; every target has one finite score, in the order of the stream."""
    missing = np.flatnonzero(~np.isfinite(run.nats[:targets]))
    where = f"{subject.name}: {label}"
    if run.ledgers != 1 or len(run.calls) > 1:
        calls = " ".join(run.calls)
        text = f"{run.ledgers} ledgers and {len(run.calls)} calls of scorers ({calls}), expected one of each"
        yield fail("B3", text, where, "score once: no second pass, no choice among passes (C4)")
    elif len(run.nats) != targets or len(missing):
        text = (
            f"{targets} targets, {len(run.nats)} in the ledger, {len(missing)} never recorded {missing[:1]}"
        )
        yield fail("B3", text, where, "score every target, the tail included")
    elif run.twice:
        text = f"{run.twice} targets recorded more than once"
        yield fail("B3", text, where, "score every target once: no second pass, no choice among passes (C4)")
    elif run.spans != sorted(run.spans) and in_order_within_documents(subject.tokens(), run.spans):
        text = (
            f"all {targets} targets scored once, the tail included, those of a document in order, the "
            "documents not: 0hq in #402 against it, #1530 and later records merged with it; B9 asks "
            "whether their order is of no account"
        )
        yield info("B3", text, where)
    elif run.spans != sorted(run.spans):
        text = f"scoring order is not increasing: {run.spans[:4]} … (0hq in #402 against merged #1530)"
        yield warn("B3", text, where, "score in stream order")
    else:
        yield info("B3", f"all {targets} targets scored once, in order, the tail included", where)


def in_order_within_documents(tokens: np.ndarray, spans: list[tuple[int, int]]) -> bool:
    """Whether no target was recorded before an earlier one of its document."""
    recorded = np.zeros(len(tokens) - 1, int)
    for number, (start, count) in enumerate(spans):
        recorded[start : start + count] = number
    falls = np.flatnonzero(np.diff(recorded) < 0) + 1
    return bool((tokens[falls] == BOS_ID).all())


def _headline(subject: Subject, run: LabelRun, label: str, lines: list[str]) -> Iterator[Finding]:
    """B4: what is returned and logged of a label is the sum of what its ledger was given."""
    if run.score is None:
        return
    expected = {
        "val_loss": run.total() / len(run.nats),
        "val_bpb": run.total() / math.log(2) / TEXT_BYTES,
        "scored_tokens": float(len(run.nats)),
        "val_bytes": float(TEXT_BYTES),
    }
    score = run.score
    got = {
        "val_loss": score.nats,
        "val_bpb": score.bits_per_byte,
        "scored_tokens": score.scored_tokens,
        "val_bytes": score.bytes,
    }
    said = [("returned", name, float(value), 1e-9 * abs(expected[name])) for name, value in got.items()]
    printed = 0
    for line in lines:
        words = line.split()
        if not words or not re.fullmatch(rf"(final_\w+_)?{label}(_exact)?", words[0]):
            continue
        for name, value in REPORTED.findall(line):
            digits = len(value.partition(".")[2])
            said.append((f"logged as {words[0]}", name, float(value), 0.51 * 10.0**-digits))
            printed += 1
    where = f"{subject.name}: {label}"
    for how, name, value, tolerance in said:
        if not abs(value - expected[name]) <= tolerance:
            text = f"{how} {name} {value:.10g}, ledger and text give {expected[name]:.10g}"
            yield fail("B4", text, where, "report the sum of the one ledger")
            return
    if not printed:
        yield warn("B4", "not checked: no log line of this label has val_loss", where, "log the result")
        return
    text = f"{printed} logged figures and what is returned are those of the ledger and of the text"
    yield info("B4", text, where)


def refusal(script: ModuleType) -> type[Exception]:
    """What a ledger raises; scripts that were packed before have an exception of their own for it."""
    return getattr(script, "ScoringError", ValueError)


@in_cell
def held_by(ledger: Any) -> np.ndarray:
    """The nats that a ledger holds."""
    return np.array(ledger.nats, dtype=np.float64)


@in_cell
def takes_again(script: ModuleType, ledger: Any) -> bool:
    """Whether a full ledger takes another score of a target."""
    with contextlib.suppress(refusal(script)):
        ledger.record(12, np.zeros(1))
        return True
    return False


def _write_once(subject: Subject, run: LabelRun, label: str) -> Iterator[Finding]:
    """B4: a ledger holds what was recorded, and refuses a second score of a target."""
    where = f"{subject.name}: {label}"
    held = held_by(run.ledger) if run.ledger is not None else np.zeros(0)
    if not np.array_equal(held, run.nats):
        yield fail("B4", "the ledger holds other nats than it was given", where, "write with `record` alone")
        return
    if takes_again(subject.script, run.ledger):
        yield fail("B4", "target 12 took a second score", where, "let the ledger refuse a second write")
        return
    yield info("B4", "the ledger holds what was recorded, and refuses a second write", where)


def _update_order(tokens: np.ndarray, events: Events, label: str) -> Iterator[Finding]:
    """B5: an update comes after the first score, and learns from rows all of whose targets are scored."""
    stream = tokens.tolist()
    scored = np.zeros(len(stream), bool)
    steps = 0
    unknown = 0
    for at, kind, value in events.log:
        if at != f"eval_{label}":
            continue
        if kind == "record":
            start, nats = value
            scored[start : start + len(nats)] = True
        elif kind == "step":
            steps += 1
            if not scored.any():
                text = f"optimizer step {steps} came before the first score"
                yield fail("B5", text, label, "score first (C3)")
                return
        elif kind == "learn":
            for row in value[0]:
                places = without_padding(stream, row)
                unknown += not places
                if places and not any(scored[place].all() for place in places):
                    late = places[0].start + int(scored[places[0]].argmin())
                    text = f"learns from a row with target {late}, which is not scored; {scored.sum()} are"
                    yield fail("B5", text, label, "train on `ledger.scored_tokens` alone")
                    return
    if unknown:
        text = f"not checked: {unknown} rows that it learns from are no part of the text, padded perhaps"
        yield warn("B5", text, label, "the flips and sums of B1 and B2 decide")
        return
    yield info("B5", f"each of {steps} updates came after the scores of what it learned from", label)


def without_padding(stream: Sequence[int], row: Sequence[int]) -> list[slice]:
    """The targets of each copy of a row in the stream, and of the row with fewer BOS at its end.

    Those may be padding, and an empty document before another looks like one with padding.
    """
    places = []
    while row:
        for start in range(len(stream) - len(row) + 1):
            if stream[start : start + len(row)] == row:
                places.append(slice(start, start + len(row)))
        if row[-1] != BOS_ID:
            break
        row = row[:-1]
    return places


def _weights(events: Events, sum_before: float, unchanged: bool, label: str) -> Finding:
    """B6: scoring begins with the weights it was given, and leaves them as they were."""
    phase = f"eval_{label}"
    sums = [value[1] for at, kind, value in events.log if at == phase and kind in ("score", "pass")]
    remedy = "restore the weights, and begin with those of the artifact"
    if not unchanged:
        return fail("B6", "weights differ after scoring", label, remedy)
    if sums and sums[0] != sum_before:
        return fail("B6", "the first score did not use the weights it was given", label, remedy)
    if not learns(events, label) and len(set(sums)) > 1:
        text = "parameters changed during an evaluation without training"
        return fail("B6", text, label, "score with fixed weights")
    return info("B6", "scoring began with the weights it was given and left them as they were", label)


# ======================================================================================================
# EVALUATION: its warm-up, and the table of bytes
# ======================================================================================================


@in_cell
def rehearsed(
    subject: Subject,
) -> tuple[bool, list[tuple[str, list[list[int]]]], list[dict[str, np.ndarray]]]:
    """What a run does around its scores where code is compiled, but for the compiler.

    Whether its rehearsal changes weights; phase and inputs of all its passes; the nats by label in the form
    that is compiled, and in the plain one.
    """
    run = RecordingRun()
    model = subject.model()
    config = replace(subject.config, compile="1")
    if hasattr(model, "machine"):  # in older scripts the setting alone decides
        model.machine = replace(model.machine, compiled=True)
    tokens = subject.tokens()
    validation = subject.script.Validation(tokens, 1000, "")
    seen: list[tuple[str, list[list[int]]]] = []
    original = type(model).forward

    def forward(model: Any, inputs: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        seen.append((run.phase_name, inputs.tolist()))
        return original(model, inputs, *rest, **named)

    before = weights_hash(model)
    with mock.patch.object(torch, "compile", lambda function, **_: function):
        with mock.patch.object(type(model), "forward", forward):
            if hasattr(subject.script, "rehearse_evaluation"):  # what a run does before `evaluate`
                subject.script.rehearse_evaluation(model, config, run)
            changed = weights_hash(model) != before
            subject.script.evaluate(model, config, run, validation, "int6")
        compiled = nats_by_label(subject, tokens, model)
    return changed, seen, [compiled, nats_by_label(subject, tokens, subject.model())]


def evaluation_warmup(subject: Subject) -> Iterator[Finding]:
    """B7: what `evaluate` does before its timers reads no validation token and leaves the weights alone."""
    changed, seen, (compiled, plain) = rehearsed(subject)
    if changed:
        yield fail("B7", "the rehearsal of evaluation changes the weights", "evaluate", "try a copy")
        return
    worst = 0.0
    for label, nats in compiled.items():
        moved = np.abs(nats - plain[label]).max()
        worst = max(worst, float(moved))
        if not moved <= questions.REPACKING_TOLERANCE:
            text = f"code that is compiled moves losses by {moved:.1e}, without a compiler"
            yield fail("B7", text, f"{subject.name}: {label}", "score the same in both forms")
            return
    stream = subject.tokens().tolist()
    known = {tuple(stream[i : i + KNOWN_TOKENS]) for i in range(len(stream) - KNOWN_TOKENS + 1)}
    for phase, rows in seen:
        timed = phase.startswith("eval_") and phase != "eval_warmup"
        if not timed and any(tuple(row[:KNOWN_TOKENS]) in known for row in rows):
            text = f"validation tokens are read in phase {phase!r}, before the timer of evaluation (#1530)"
            yield fail("B7", text, "evaluate", "warm up on random tokens")
            return
    warm_ups = sum(not phase.startswith("eval_") or phase == "eval_warmup" for phase, _ in seen)
    text = (
        f"{warm_ups} passes before the timers of evaluation read no validation token, and change no weight; "
        f"code that is compiled and plain code are apart by {worst:.1e}"
    )
    yield info("B7", text, "evaluate")


def byte_table(subject: Subject, tokenizer: str, texts: list[str], pieces: Any) -> Iterator[Finding]:
    """B10 and B11: each target's bytes, by the script's table, against the bytes of the decoded documents.

    pieces: the same tokenizer, read by the audit itself.
    """
    config = with_tokenizer(subject.config, tokenizer, pieces.vocab_size())

    def count(ids: list[int]) -> int:
        return int(bytes_of(subject, config, np.array(ids, np.uint16)).sum())

    packed: list[int] = []
    decoded_bytes = 0
    for text in texts:
        ids = pieces.encode(text)
        expected = len(pieces.decode(ids).encode())
        counted = count([BOS_ID, *ids, BOS_ID])
        if counted != expected:
            ratio = counted / max(expected, 1)
            got = f"{text!r} counts {counted} bytes, it decodes to {expected} (x{ratio:.4f})"
            remedy = "count pieces, byte fallbacks and leading spaces once (#1719)"
            yield fail("B10", got, "token_bytes", remedy)
            return
        packed += [BOS_ID, *ids]
        decoded_bytes += expected
    counted = count(packed)
    if counted != decoded_bytes:
        got = f"packed documents count {counted} bytes, expected {decoded_bytes}"
        yield fail("B10", got, "token_bytes", "reset at BOS")
        return
    got = f"{len(texts)} texts, alone and packed: {counted} bytes counted, as decoded"
    yield info("B10", got, "token_bytes")


@in_cell
def bytes_of(subject: Subject, config: Any, tokens: np.ndarray) -> np.ndarray:
    """The bytes of each target by the script's table."""
    return np.asarray(subject.script.token_bytes(tokens, config))


@in_cell
def with_tokenizer(config: Any, tokenizer: str, size: int) -> Any:
    """The config with another tokenizer of `size` pieces, and without data."""
    return replace(config, tokenizer_path=tokenizer, vocab_size=size, data_path="/absent")


class ManyPieces:
    """Stands in for a tokenizer of as many pieces as records have.

    A third of them begin with a space; others hold one, or end with one, as tokenizers of code may have them.
    """

    size = 8192
    first = 259  # after three controls and all bytes

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.texts = [""] * self.first
        for number in range(self.first, self.size):
            letters = random.choice(list("abcé東"), random.integers(1, 17))
            inner = "▁".join(letters) if number % 7 == 1 else "".join(letters)
            self.texts.append("▁" * (number % 3 == 0) + inner + "▁" * (number % 5 == 2))
        self.texts[self.first] = "▁"

    def vocab_size(self) -> int:
        return self.size

    def is_control(self, number: int) -> bool:
        return number in (BOS_ID, 2)

    def is_unknown(self, number: int) -> bool:
        return number == 0

    def is_unused(self, number: int) -> bool:
        return False

    def is_byte(self, number: int) -> bool:
        return 3 <= number < self.first

    def id_to_piece(self, number: int) -> str:
        return f"<0x{number - 3:02X}>" if self.is_byte(number) else self.texts[number]

    def piece_to_id(self, piece: str) -> int:
        return self.first if piece == "▁" else 0

    def unk_id(self) -> int:
        return 0

    def decode(self, ids: list[int]) -> str:
        """As most tokenizers: without the space that begins a text."""
        parts = [bytes([i - 3]) if self.is_byte(i) else self.texts[i].encode() for i in ids]
        return b"".join(parts).decode("utf-8", "replace").replace("▁", " ").removeprefix(" ")

    def expected(self, tokens: np.ndarray) -> np.ndarray:
        """Bytes of each target, by this class's own rule."""
        counts = []
        for before, token in itertools.pairwise(tokens.tolist()):
            text = self.texts[token]
            begins_text = before in (0, BOS_ID, 2)
            spelled = text.removeprefix("▁") if begins_text else text
            counts.append(1 if self.is_byte(token) else len(spelled.replace("▁", " ").encode()))
        return np.array(counts)


@in_cell
def counted_many(subject: Subject, folder: Path, tokens: np.ndarray) -> tuple[np.ndarray, int, np.ndarray]:
    """Of a text with the ids of ManyPieces, as a run reads it: bytes of each target, of all; its tokens."""
    script = subject.script
    config = replace(with_tokenizer(subject.config, "", ManyPieces.size), data_path=str(folder))
    with mock.patch.object(script, "load_tokenizer", lambda _: ManyPieces()):
        counted = np.asarray(script.token_bytes(tokens, config))
        validation = script.read_validation(script.open_shards(str(folder / "fineweb_val_*.bin")), config)
    return counted, int(validation.bytes_total), np.asarray(validation.tokens)


@in_cell
def summed_many(
    script: ModuleType, tokens: np.ndarray, nats: np.ndarray, text_bytes: int
) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Mean and bits per byte of these nats by a ledger, those that it holds, and the tokens it gives."""
    ledger = script.Ledger(tokens)
    for start in range(0, len(nats), 4096):
        ledger.record(start, nats[start : start + 4096])
    score = ledger.score(text_bytes)
    return (
        float(score.nats),
        float(score.bits_per_byte),
        held_by(ledger),
        ledger.scored_tokens(0, len(tokens)),
    )


def many_ids(subject: Subject, folder: Path) -> Iterator[Finding]:
    """B10 and B4 of a long text of many ids, without a model: its bytes, and the sum of its nats."""
    if not offers(subject.script, "load_tokenizer", "read_validation"):
        return
    pieces = ManyPieces()
    random = np.random.default_rng(subject.seed)
    tokens = random.integers(3, pieces.size, MANY).astype(np.uint16)
    tokens[::397] = BOS_ID
    write_shard(folder / "fineweb_val_000000.bin", tokens)
    expected = pieces.expected(tokens)
    counted, bytes_total, read = counted_many(subject, folder, tokens)
    wrong = np.flatnonzero(counted != expected)
    if len(wrong) or bytes_total != expected.sum() or not np.array_equal(read, tokens):
        text = (f"{len(wrong)} of {MANY - 1} targets of {pieces.size} pieces count other bytes, the first is"
                f" {wrong[:1]}; {bytes_total} in all, expected {expected.sum()}")  # fmt: skip
        yield fail("B10", text, "token_bytes", "count pieces, byte fallbacks and leading spaces once (#1719)")
        return
    nats = random.exponential(2.0, MANY - 1)
    mean = math.fsum(nats) / len(nats)
    said, bits_said, held, given = summed_many(subject.script, tokens, nats, int(expected.sum()))
    bits = mean * len(nats) / math.log(2) / expected.sum()
    same = np.array_equal(held, nats) and np.array_equal(given, tokens)
    if not same or not math.isclose(said, mean) or not math.isclose(bits_said, bits):
        text = f"a ledger of {len(nats)} targets gives {said} nats, they are {mean}"
        yield fail("B4", text, "Ledger", "sum every score once")
        return
    yield info("B10", f"{MANY} ids of {pieces.size} pieces: bytes, tokens and sums are right", "token_bytes")


@in_cell
def returned(subject: Subject, config: Any, texts: list[str]) -> list[str]:
    """What becomes of texts in the tokenizer as the script reads it."""
    loaded = subject.script.load_tokenizer(config)
    return [loaded.decode(loaded.encode(text)) for text in texts]


def round_trip(subject: Subject, config: Any, texts: list[str], pieces: Any) -> Finding:
    """B11: the tokenizer as the script reads it gives every text back that the tokenizer itself does."""
    if not offers(subject.script, "load_tokenizer"):
        return warn("B11", "not checked: the script has no load_tokenizer", "tokenizer", "offer one")
    lossy = 0
    for text, got in zip(texts, returned(subject, config, texts), strict=True):
        expected = pieces.decode(pieces.encode(text))
        if got != expected:
            found = f"{text!r} comes back as {got!r}, by the tokenizer itself as {expected!r}"
            return fail("B11", found, "load_tokenizer", "score the text as it is (#1604)")
        lossy += expected != text
    if lossy:
        text = f"{lossy} of {len(texts)} texts do not come back from this tokenizer as they were"
        return warn("B11", text, "tokenizer", "say so: what is dropped is not scored (#1604)")
    return info("B11", f"{len(texts)} of {len(texts)} texts come back as they were", "load_tokenizer")
