"""Dynamic proofs that a score is legal: a tiny model, a tiny stream, and what holds for any flip of a token.

Each probe takes a `Subject` and yields findings; one that fails names positions and numbers. B1-B15 are the
checks that `tools prove` reports. Flips and Kraft sums treat a scorer as a black box from tokens to nats.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from data.shards import BOS_ID
from tools.check.findings import Finding, fail, info, warn
from tools.prove import tiny

SCORERS = ("score_roundtrip", "score_sliding", "score_ttt")
ENTRY_POINT = ("Config", "build_model", "Ledger", *SCORERS)
STREAM_TOKENS = 150
DOCUMENT_STARTS = [0, 11, 40, 41, 96, 131]  # 40 and 41: an empty document
KRAFT_TOLERANCE = 1e-4
REPACKING_TOLERANCE = 1e-6  # where a flip makes or unmakes a BOS, rows differ, and with them the rounding
KNOWN_TOKENS = 8  # so many in a row are recognised as validation text

# Takes a model, tokens and a config; returns a ledger.
Scorer = Callable[[Any, np.ndarray, Any], Any]


@dataclass(frozen=True)
class Subject:
    """A script under audit, its settings, and the scorers to probe.

    machine: the rank that models compute on, a `Machine` of the script. None: the only rank, or, of a script
    that has no `Machine` yet, that of the process group.
    """

    script: ModuleType
    config: Any
    scorers: Mapping[str, Scorer]
    seed: int = 0
    machine: Any = None

    def model(self) -> Any:
        """The tiny model: every parameter away from its initial value, so that every path counts."""
        model = self.script.build_model(self.config)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        if self.machine is not None:
            model.machine = self.machine
        return model

    def tokens(self) -> np.ndarray:
        """The stream: BOS first, an empty document, some longer than a window, a tail."""
        random = np.random.default_rng(self.seed)
        tokens = random.integers(2, self.config.vocab_size, STREAM_TOKENS).astype(np.uint16)
        tokens[DOCUMENT_STARTS] = BOS_ID
        return tokens

    def nats(self, name: str, tokens: np.ndarray, model: Any = None) -> np.ndarray:
        """The nats that a scorer puts in its ledger."""
        ledger = self.scorers[name](model or self.model(), tokens, self.config)
        return np.array(ledger.nats, dtype=np.float64)


def make_subject(script: ModuleType, seed: int = 0, **settings: str) -> Subject:
    """A subject of the script's own config and scorers."""
    config = script.Config.from_env({**tiny.SCORER, **settings})
    return Subject(script, config, {name: getattr(script, name) for name in SCORERS}, seed)


def where(subject: Subject, name: str, target: int) -> str:
    """A target in words."""
    return f"{name}, target {target}, chunk {target // subject.config.ttt_chunk_tokens}"


def other_token(token: int, config: Any) -> int:
    """Another token that is no BOS."""
    return 2 + (int(token) - 1) % (config.vocab_size - 2)


# ======================================================================================================
# BLACK BOX: flips, Kraft sums, documents, repetition
# ======================================================================================================


def future_flip(subject: Subject, name: str, positions: Iterable[int] | None = None) -> Iterator[Finding]:
    """B1: change token j; no loss of a target before j may move."""
    tokens = subject.tokens()
    model = subject.model()
    before = subject.nats(name, tokens, model)
    if positions is None:
        positions = range(1, len(tokens))
    flips = 0
    worst = 0.0
    for j in positions:
        earlier = before[: j - 1]
        for new in _replacements(tokens, j, subject.config):
            flipped = tokens.copy()
            flipped[j] = new
            moved = np.abs(subject.nats(name, flipped, model)[: j - 1] - earlier)
            repacks = BOS_ID in (new, tokens[j])
            limit = REPACKING_TOLERANCE * np.maximum(1, earlier) if repacks else np.zeros_like(earlier)
            too_far = ~(moved <= limit)  # so that a NaN is too far
            flips += 1
            if too_far.any():
                yield _moved_loss(subject, name, f"changing token {j} to {new}", moved, too_far)
                return
            worst = max(worst, float(moved.max(initial=0.0)))
    text = f"none of {flips} flips moved an earlier loss (most: {worst:.1e}, where a BOS repacks)"
    yield info("B1", text, name)


def _replacements(tokens: np.ndarray, j: int, config: Any) -> list[int]:
    """What token j is changed to: another token, and at every fourth place a BOS too."""
    new_tokens = [other_token(tokens[j], config)]
    if j % 4 == 0 and tokens[j] != BOS_ID:
        new_tokens.append(BOS_ID)
    return new_tokens


def _moved_loss(
    subject: Subject, name: str, change: str, moved: np.ndarray, too_far: np.ndarray
) -> Finding:
    first = int(np.argmax(too_far))
    text = f"C1: {change} moved the loss of target {first} by {moved[first]:.1e}"
    return fail("B1", text, where(subject, name, first), "score a chunk before anything learns from it")


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
    return sorted(position for position in positions if 0 <= position < targets)


def kraft_sums(subject: Subject, name: str, positions: Iterable[int] | None = None) -> Iterator[Finding]:
    """B2: with the rest fixed, the probabilities of all tokens at one target sum to one."""
    tokens = subject.tokens()
    model = subject.model()
    candidates = subject.config.vocab_size
    chosen = kraft_positions(subject) if positions is None else list(positions)
    worst = 0.0
    for target in chosen:
        total = 0.0
        for candidate in range(candidates):
            changed = tokens.copy()
            changed[target + 1] = candidate
            total += math.exp(-subject.nats(name, changed, model)[target])
        error = abs(total - 1)
        if not error <= KRAFT_TOLERANCE:  # so that a NaN fails
            text = f"C2/C3: probabilities of {candidates} candidates at target {target} sum to {total:.4f}"
            remedy = "score with one normalised distribution, fixed before the target is known"
            yield fail("B2", text, where(subject, name, target), remedy)
            return
        worst = max(worst, error)
    yield info("B2", f"Kraft sums at {len(chosen)} targets are 1 to {worst:.1e}", name)


def document_isolation(subject: Subject, name: str) -> Iterator[Finding]:
    """B9: with DOC_MASK, no token of a document has a say in the next (scorers that learn are not asked)."""
    tokens = subject.tokens()
    model = subject.model()
    before = subject.nats(name, tokens, model)
    starts = DOCUMENT_STARTS[1:]
    for start in starts:
        if tokens[start - 1] == BOS_ID:  # the document before is empty
            continue
        changed = tokens.copy()
        changed[start - 1] = other_token(tokens[start - 1], subject.config)
        moved = np.abs(subject.nats(name, changed, model)[start:] - before[start:])
        if moved.max() > 0:
            first = start + int(moved.argmax())
            text = f"token {start - 1} moves target {first} of the next document by {moved.max():.1e}"
            report = fail if subject.config.doc_mask else warn
            yield report("B9", text, name, "mask attention and every shift at BOS (#1797, #1851)")
            return
    yield info("B9", f"{len(starts)} documents: none depends on the one before", name)


def determinism(subject: Subject, name: str) -> Iterator[Finding]:
    """B14: the same call gives the same ledger, bit for bit."""
    tokens = subject.tokens()
    first = subject.nats(name, tokens)
    second = subject.nats(name, tokens)
    if np.array_equal(first, second):
        yield info("B14", "a second run gives the same ledger, bit for bit", name)
        return
    target = int(np.argmax(first != second))
    text = f"a second run gives target {target} other nats"
    yield fail("B14", text, name, "draw no random numbers in scoring")


# ======================================================================================================
# EVENTS: what a scorer does, in order
# ======================================================================================================


@dataclass
class Events:
    """What a scorer did, in order.

    log: pairs of a kind and its value. "record": (first target, how many). "step": None, an optimizer step.
    "score" and "learn", a forward pass without and with gradients: (rows of inputs, sum of all weights).
    """

    log: list[tuple[str, Any]] = field(default_factory=list)


def weight_sum(model: Any) -> float:
    """A number that changes when a weight does."""
    return float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


@contextlib.contextmanager
def watched(subject: Subject, events: Events) -> Iterator[None]:
    """Log each ledger entry, optimizer step and forward pass."""
    model_class = type(subject.model())
    ledger_class = subject.script.Ledger
    forward = model_class.forward
    record = ledger_class.record

    def watched_forward(model: Any, inputs: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        kind = "learn" if torch.is_grad_enabled() else "score"
        events.log.append((kind, (inputs.tolist(), weight_sum(model))))
        return forward(model, inputs, *rest, **named)

    def watched_record(ledger: Any, start: int, nats: np.ndarray) -> None:
        record(ledger, start, nats)
        events.log.append(("record", (start, len(nats))))

    hook = register_optimizer_step_post_hook(lambda *_: events.log.append(("step", None)))
    with mock.patch.object(model_class, "forward", watched_forward), \
            mock.patch.object(ledger_class, "record", watched_record):  # fmt: skip
        try:
            yield
        finally:
            hook.remove()


def ledger_order(subject: Subject, name: str) -> Iterator[Finding]:
    """B3-B6: coverage, write-once, update order and weights, from the events of one run of a scorer."""
    tokens = subject.tokens()
    model = subject.model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    sum_before = weight_sum(model)
    events = Events()
    with watched(subject, events):
        ledger = subject.scorers[name](model, tokens, subject.config)
    yield from _coverage(ledger, events, name)
    yield from _write_once(subject, ledger, name)
    yield from _update_order(tokens, events, name)
    unchanged = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    yield _weights(events, sum_before, unchanged, name)


def _coverage(ledger: Any, events: Events, name: str) -> Iterator[Finding]:
    """B3: every target has one finite score, in the order of the stream."""
    nats = np.asarray(ledger.nats)
    targets = STREAM_TOKENS - 1
    spans = [value for kind, value in events.log if kind == "record"]
    counts = np.zeros(max(targets, len(nats)), int)
    for start, length in spans:
        counts[start : start + length] += 1
    missing = np.flatnonzero(counts[:targets] == 0)
    twice = np.flatnonzero(counts > 1)
    if len(nats) != targets or not np.isfinite(nats).all() or len(missing):
        text = f"{targets} targets, {len(nats)} in the ledger, {len(missing)} never recorded {missing[:1]}"
        yield fail("B3", text, name, "score every target, the tail included")
    elif len(twice):
        text = f"{len(twice)} targets recorded more than once, the first is {twice[0]}"
        yield fail("B3", text, name, "score every target once: no second pass, no choice among passes (C4)")
    elif spans != sorted(spans):
        text = f"scoring order is not increasing: {spans[:4]} … (0hq in #402 against merged #1530)"
        yield warn("B3", text, name, "score in stream order")
    else:
        yield info("B3", f"all {targets} targets scored once, in order, the tail included", name)


def refusal(script: ModuleType) -> type[Exception]:
    """What a ledger raises; scripts that were packed before have an exception of their own for it."""
    return getattr(script, "ScoringError", ValueError)


def _write_once(subject: Subject, ledger: Any, name: str) -> Iterator[Finding]:
    """B4: a ledger refuses a second score of a target, and its headline is its own sum."""
    script = subject.script
    nats = np.array(ledger.nats)
    with contextlib.suppress(refusal(script)):
        ledger.record(12, np.zeros(1))
        yield fail("B4", "target 12 took a second score", name, "let the ledger refuse a second write")
        return
    text_bytes = 1000  # any number
    if hasattr(ledger, "score"):
        score = ledger.score(text_bytes)
    else:  # a script that was packed before ledgers had one
        score = script.Validation(subject.tokens(), text_bytes, False).score(ledger)
    total = math.fsum(nats)
    bits_per_byte = total / math.log(2) / text_bytes
    same_bits = math.isclose(score.bits_per_byte, bits_per_byte, rel_tol=1e-9)
    same_total = math.isclose(score.nats * len(nats), total, rel_tol=1e-9)
    if not (same_bits and same_total):
        text = f"headline {score.bits_per_byte} bits per byte, the ledger says {bits_per_byte}"
        yield fail("B4", text, name, "sum the ledger")
    else:
        yield info("B4", "a second write is refused; the headline is the sum of the ledger", name)


def _update_order(tokens: np.ndarray, events: Events, name: str) -> Iterator[Finding]:
    """B5: an update comes after the first score, and learns from rows that end where scoring has been."""
    stream = tokens.tolist()
    scored = 0
    steps = 0
    for kind, value in events.log:
        if kind == "record":
            scored += value[1]
        elif kind == "step":
            steps += 1
            if not scored:
                text = f"optimizer step {steps} came before the first score"
                yield fail("B5", text, name, "score first (C3)")
                return
        elif kind == "learn":
            rows, _ = value
            ends = [_first_end(stream, row) for row in rows]
            late = [end for end in ends if end < 0 or end > scored]
            if late:
                text = f"learns from a row that ends at target {late[0]}, {scored} are scored"
                yield fail("B5", text, name, "train on `ledger.scored_tokens` alone")
                return
    yield info("B5", f"each of {steps} updates came after the scores of what it learned from", name)


def _first_end(stream: Sequence[int], row: Sequence[int]) -> int:
    """Where in the stream the first copy of a row ends; -1 where there is none."""
    for start in range(len(stream) - len(row) + 1):
        if stream[start : start + len(row)] == row:
            return start + len(row)
    return -1


def _weights(events: Events, sum_before: float, unchanged: bool, name: str) -> Finding:
    """B6: scoring begins with the weights it was given, and leaves them as they were."""
    sums = [value[1] for kind, value in events.log if kind == "score"]
    remedy = "restore the weights, and begin with those of the artifact"
    if not unchanged:
        return fail("B6", "weights differ after scoring", name, remedy)
    if sums and sums[0] != sum_before:
        return fail("B6", "the first score did not use the weights it was given", name, remedy)
    if name != "score_ttt" and len(set(sums)) > 1:
        text = "parameters changed during an evaluation without training"
        return fail("B6", text, name, "score with fixed weights")
    return info("B6", "scoring began with the weights it was given and left them as they were", name)


# ======================================================================================================
# EVALUATION: its warm-up, and the table of bytes
# ======================================================================================================


class RecordingRun:
    """Stands in for a script's Run while its `evaluate` is watched."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
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
        """Keep a log line."""
        self.lines.append(line)

    def event(self, *_: Any, **__: Any) -> None:
        """Accept and forget."""

    def alive(self) -> None:
        """Accept and forget."""


def evaluation_warmup(subject: Subject) -> Iterator[Finding]:
    """B7: what `evaluate` does before its timers reads no validation token and leaves the weights alone."""
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

    with mock.patch.object(torch, "compile", lambda function, **_: function), \
            mock.patch.object(type(model), "forward", forward):  # fmt: skip
        subject.script.evaluate(model, config, run, validation, "int6")
    stream = tokens.tolist()
    known = {tuple(stream[i : i + KNOWN_TOKENS]) for i in range(len(stream) - KNOWN_TOKENS + 1)}
    for phase, rows in seen:
        timed = phase.startswith("eval_") and phase != "eval_warmup"
        if not timed and any(tuple(row[:KNOWN_TOKENS]) in known for row in rows):
            text = f"validation tokens are read in phase {phase!r}, before the timer of evaluation (#1530)"
            yield fail("B7", text, "evaluate", "warm up on random tokens")
            return
    warm_ups = sum(phase == "eval_warmup" for phase, _ in seen)
    yield info("B7", f"{warm_ups} warm-up passes of evaluation read no validation token", "evaluate")


def byte_table(subject: Subject, tokenizer: str, texts: list[str], pieces: Any) -> Iterator[Finding]:
    """B10 and B11: each target's bytes, by the script's table, against the bytes of the decoded documents."""
    config = replace(
        subject.config, tokenizer_path=tokenizer, vocab_size=pieces.vocab_size(), data_path="/absent"
    )

    def count(ids: list[int]) -> int:
        return int(subject.script.token_bytes(np.array(ids, np.uint16), config).sum())

    packed: list[int] = []
    decoded_bytes = 0
    exact = 0
    for text in texts:
        ids = pieces.encode(text)
        decoded = pieces.decode(ids)
        expected = len(decoded.encode())
        counted = count([BOS_ID, *ids, BOS_ID])
        if counted != expected:
            ratio = counted / max(expected, 1)
            got = f"{text!r} counts {counted} bytes, it decodes to {expected} (x{ratio:.4f})"
            remedy = "count pieces, byte fallbacks and leading spaces once (#1719)"
            yield fail("B10", got, "token_bytes", remedy)
            return
        packed += [BOS_ID, *ids]
        decoded_bytes += expected
        exact += decoded == text
    counted = count(packed)
    if counted != decoded_bytes:
        got = f"packed documents count {counted} bytes, expected {decoded_bytes}"
        yield fail("B10", got, "token_bytes", "reset at BOS")
        return
    got = f"{len(texts)} texts, alone and packed: {counted} bytes counted, as decoded"
    yield info("B10", got, "token_bytes")
    yield info("B11", f"tokenizer round trip exact for {exact} of {len(texts)} texts", "tokenizer")
