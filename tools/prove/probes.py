"""Dynamic proofs that a score is legal: a tiny model, a tiny stream, and what holds for any flip of a token.

Each probe takes a `Subject` and yields findings; one that fails names positions and numbers. B1-B15 are the
checks that `tools prove` reports. Flips and Kraft sums treat a scorer as a black box from tokens to nats.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tools.check.findings import Finding, fail, info, warn

BOS_ID = 1
SCORERS = ("score_roundtrip", "score_sliding", "score_ttt")
ENTRY_POINT = ("Config", "build_model", "Ledger", *SCORERS)
TINY = {
    "DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "COMPILE": "0", "VOCAB_SIZE": "12", "NUM_LAYERS": "2",
    "MODEL_DIM": "16", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "MLP_MULT": "2", "XSA_LAST_N": "2",
    "ROPE_DIMS": "0",
    "NUM_LOOPS": "0", "PARALLEL_START_LAYER": "-1", "GATE_WINDOW": "4", "TRAIN_SEQ_LEN": "16",
    "TRAIN_BATCH_TOKENS": "64", "MICRO_BATCH_TOKENS": "64", "VAL_BATCH_SIZE": "128", "EVAL_STRIDE": "8",
    "TTT_CHUNK_TOKENS": "32", "TTT_EPOCHS": "1", "TTT_BATCH_SEQS": "2", "TTT_LR": "0.3",
}  # fmt: skip
STREAM_TOKENS = 150
KRAFT_TOLERANCE = 1e-4
REPACKING_TOLERANCE = 1e-6  # where a flip makes or unmakes a BOS, rows differ, and with them the rounding

Scorer = Callable[[Any, np.ndarray, Any], Any]


@dataclass(frozen=True)
class Subject:
    """A script under audit, its settings, and the scorers to probe."""

    script: ModuleType
    config: Any
    scorers: Mapping[str, Scorer]
    seed: int = 0

    def model(self) -> Any:
        """The tiny model: every parameter away from its initial value, so that every path counts."""
        model = self.script.build_model(self.config)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        return model

    def tokens(self) -> np.ndarray:
        """The stream: BOS first, an empty document, some longer than a window, a tail."""
        random = np.random.default_rng(self.seed)
        tokens = random.integers(2, self.config.vocab_size, STREAM_TOKENS).astype(np.uint16)
        tokens[[0, 11, 40, 41, 96, 131]] = BOS_ID
        return tokens

    def nats(self, name: str, tokens: np.ndarray, model: Any = None) -> np.ndarray:
        """The nats that a scorer puts in its ledger."""
        ledger = self.scorers[name](model or self.model(), tokens, self.config)
        return np.array(ledger.nats, dtype=np.float64)


def make_subject(script: ModuleType, seed: int = 0, **settings: str) -> Subject:
    """A subject of the script's own config and scorers."""
    config = script.Config.from_env({**TINY, **settings})
    return Subject(script, config, {name: getattr(script, name) for name in SCORERS}, seed)


def where(subject: Subject, name: str, target: int) -> str:
    return f"{name}, target {target}, chunk {target // subject.config.ttt_chunk_tokens}"


def other_token(token: int, config: Any) -> int:
    """Another token that is no BOS."""
    return 2 + (int(token) - 1) % (config.vocab_size - 2)


def future_flip(subject: Subject, name: str, positions: Iterable[int] | None = None) -> Iterator[Finding]:
    """B1: change token j; no loss of a target before j may move."""
    tokens, model = subject.tokens(), subject.model()
    before, flips, worst = subject.nats(name, tokens, model), 0, 0.0
    for j in range(1, len(tokens)) if positions is None else positions:
        for new in [
            other_token(tokens[j], subject.config),
            *([BOS_ID] if j % 4 == 0 and tokens[j] != BOS_ID else []),
        ]:
            flipped = tokens.copy()
            flipped[j] = new
            moved = np.abs(subject.nats(name, flipped, model)[: j - 1] - before[: j - 1])
            limit = REPACKING_TOLERANCE * np.maximum(1, before[: j - 1]) * (BOS_ID in (new, tokens[j]))
            flips += 1
            if not (moved <= limit).all():
                first = int(np.argmax(~(moved <= limit)))
                text = (
                    f"C1: changing token {j} to {new} moved the loss of target {first} by {moved[first]:.1e}"
                )
                yield fail(
                    "B1", text, where(subject, name, first), "score a chunk before anything learns from it"
                )
                return
            worst = max(worst, float(moved.max(initial=0.0)))
    yield info(
        "B1", f"none of {flips} flips moved an earlier loss (most: {worst:.1e}, where a BOS repacks)", name
    )


def kraft_positions(subject: Subject) -> list[int]:
    """First targets of stream, chunks, windows and documents, the last of each, and one in the middle."""
    config, targets = subject.config, STREAM_TOKENS - 1
    chunks = {i for c in range(0, targets, config.ttt_chunk_tokens) for i in (c, c - 1) if i >= 0}
    windows = {config.eval_length, config.eval_length - 1, config.eval_length + config.eval_stride}
    documents = {int(i) + d for i in np.flatnonzero(subject.tokens() == BOS_ID) for d in (-2, -1, 0)}
    return sorted(
        i for i in {*chunks, *windows, *documents, 1, targets // 2, targets - 1} if 0 <= i < targets
    )


def kraft_sums(subject: Subject, name: str, positions: Iterable[int] | None = None) -> Iterator[Finding]:
    """B2: with the rest fixed, the probabilities of all tokens at one target sum to one."""
    tokens, model, worst = subject.tokens(), subject.model(), 0.0
    chosen = kraft_positions(subject) if positions is None else list(positions)
    for target in chosen:
        total = 0.0
        for candidate in range(subject.config.vocab_size):
            changed = tokens.copy()
            changed[target + 1] = candidate
            total += math.exp(-subject.nats(name, changed, model)[target])
        worst = max(worst, abs(total - 1))
        if not abs(total - 1) <= KRAFT_TOLERANCE:
            text = (
                f"C2/C3: the probabilities of {subject.config.vocab_size} candidates at target {target} "
                f"sum to {total:.4f}"
            )
            remedy = "score with one normalised distribution, fixed before the target is known"
            yield fail("B2", text, where(subject, name, target), remedy)
            return
    yield info("B2", f"Kraft sums at {len(chosen)} targets are 1 to {worst:.1e}", name)


@dataclass
class Events:
    """What a scorer did, in order: records of targets, forward passes and optimizer steps."""

    log: list[tuple[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def watched(subject: Subject, events: Events) -> Iterator[None]:
    """Log each ledger entry, SGD step and forward pass: inputs, whether it learns, a sum of the weights."""
    model_class, ledger_class = type(subject.model()), subject.script.Ledger
    forward, record = model_class.forward, ledger_class.record

    def watched_forward(model: Any, inputs: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        print_ = float(sum(p.detach().double().sum() for p in model.parameters()))
        events.log.append(("learn" if torch.is_grad_enabled() else "score", (inputs.tolist(), print_)))
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
    tokens, model, events = subject.tokens(), subject.model(), Events()
    before = [p.detach().clone() for p in model.parameters()]
    with watched(subject, events):
        ledger = subject.scorers[name](model, tokens, subject.config)
    yield from _coverage(ledger, events, name)
    yield from _write_once(subject, ledger, name)
    yield from _update_order(tokens, events, name)
    prints = [value[1] for kind, value in events.log if kind == "score"]
    start = float(sum(p.double().sum() for p in before))
    same = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    if not same or (prints and prints[0] != start):
        text = (
            "weights differ after scoring"
            if not same
            else "the first score did not use the weights it was given"
        )
        yield fail("B6", text, name, "restore the weights, and begin with those of the artifact")
    elif name != "score_ttt" and len(set(prints)) > 1:
        yield fail(
            "B6", "parameters changed during an evaluation without training", name, "score with fixed weights"
        )
    else:
        yield info("B6", "scoring began with the weights it was given and left them as they were", name)


def _coverage(ledger: Any, events: Events, name: str) -> Iterator[Finding]:
    nats, targets = np.asarray(ledger.nats), STREAM_TOKENS - 1
    counts = np.zeros(max(targets, len(nats)), int)
    spans = [value for kind, value in events.log if kind == "record"]
    for start, length in spans:
        counts[start : start + length] += 1
    gaps, twice = np.flatnonzero(counts[:targets] == 0), np.flatnonzero(counts > 1)
    if len(nats) != targets or not np.isfinite(nats).all() or len(gaps):
        text = f"{targets} targets, but {len(nats)} in the ledger, {len(gaps)} never recorded {gaps[:1]}"
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
    nats, script = np.array(ledger.nats), subject.script
    with contextlib.suppress(refusal(script)):
        ledger.record(12, np.zeros(1))
        yield fail("B4", "target 12 took a second score", name, "let the ledger refuse a second write")
        return
    if hasattr(ledger, "score"):
        score = ledger.score(1000)
    else:  # a script that was packed before ledgers had one
        score = script.Validation(subject.tokens(), 1000, False).score(ledger)
    bits, total = score.bits_per_byte, score.nats * len(nats)
    expected = math.fsum(nats) / math.log(2) / 1000
    if not math.isclose(bits, expected, rel_tol=1e-9) or not math.isclose(
        total, math.fsum(nats), rel_tol=1e-9
    ):
        yield fail("B4", f"headline {bits} bits per byte, the ledger says {expected}", name, "sum the ledger")
    else:
        yield info("B4", "a second write is refused; the headline is the sum of the ledger", name)


def _update_order(tokens: np.ndarray, events: Events, name: str) -> Iterator[Finding]:
    scored, steps, stream = 0, 0, tokens.tolist()
    for kind, value in events.log:
        if kind == "record":
            scored += value[1]
        elif kind == "step":
            steps += 1
            if not scored:
                yield fail(
                    "B5", f"optimizer step {steps} came before the first score", name, "score first (C3)"
                )
                return
        elif kind == "learn":
            for row in value[0]:
                ends = [
                    i + len(row) for i in range(len(stream) - len(row) + 1) if stream[i : i + len(row)] == row
                ]
                if not ends or min(ends) > scored:
                    text = (
                        f"learns from a row that ends at target {min(ends, default=-1)}, {scored} are scored"
                    )
                    yield fail("B5", text, name, "train on `ledger.scored_tokens` alone")
                    return
    yield info("B5", f"each of {steps} updates came after the scores of what it learned from", name)


def document_isolation(subject: Subject, name: str) -> Iterator[Finding]:
    """B9: with DOC_MASK, no token of a document has a say in the next (scorers that learn are not asked)."""
    tokens, model = subject.tokens(), subject.model()
    before, starts = subject.nats(name, tokens, model), np.flatnonzero(tokens == BOS_ID)[1:]
    for start in (int(s) for s in starts if tokens[s - 1] != BOS_ID):
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
    first, second = subject.nats(name, tokens), subject.nats(name, tokens)
    if np.array_equal(first, second):
        yield info("B14", "a second run gives the same ledger, bit for bit", name)
        return
    target = int(np.argmax(first != second))
    yield fail(
        "B14", f"a second run gives target {target} other nats", name, "draw no random numbers in scoring"
    )


class RecordingRun:
    """Stands in for a script's Run while its `evaluate` is watched."""

    def __init__(self) -> None:
        self.device, self.phase_name = torch.device("cpu"), "setup"
        self.phases: dict[str, float] = {}
        self.lines: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Remember the name of the phase."""
        self.phase_name = name
        yield
        self.phase_name, self.phases[name] = "between phases", 1.0

    def log(self, line: str, *_: Any, **__: Any) -> None:
        """Keep a log line."""
        self.lines.append(line)

    def event(self, *_: Any, **__: Any) -> None:
        """Accept and forget."""

    def alive(self) -> None:
        """Accept and forget."""


def evaluation_warmup(subject: Subject) -> Iterator[Finding]:
    """B7: what `evaluate` does before its timers reads no validation token and leaves the weights alone."""
    run, seen = RecordingRun(), list[tuple[str, list[list[int]]]]()
    config, model, tokens = replace(subject.config, compile="1"), subject.model(), subject.tokens()
    validation = subject.script.Validation(tokens, 1000, "")
    original = type(model).forward

    def forward(model: Any, inputs: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append((run.phase_name, inputs.tolist()))
        return original(model, inputs, *rest)

    with mock.patch.object(torch, "compile", lambda function, **_: function), \
            mock.patch.object(type(model), "forward", forward):  # fmt: skip
        subject.script.evaluate(model, config, run, validation, "int6")
    stream = tokens.tolist()
    known = {tuple(stream[i : i + 8]) for i in range(len(stream) - 7)}
    for phase, rows in seen:
        if phase.startswith("eval_") and phase != "eval_warmup":
            continue
        if any(tuple(row[:8]) in known for row in rows):
            text = f"validation tokens are read in phase {phase!r}, before the timer of evaluation (#1530)"
            yield fail("B7", text, "evaluate", "warm up on random tokens")
            return
    warm = sum(phase == "eval_warmup" for phase, _ in seen)
    yield info("B7", f"{warm} warm-up passes of evaluation read no validation token", "evaluate")


def byte_table(subject: Subject, tokenizer: str, texts: list[str], pieces: Any) -> Iterator[Finding]:
    """B10 and B11: each target's bytes, by the script's table, against the bytes of the decoded documents."""
    config = replace(
        subject.config, tokenizer_path=tokenizer, vocab_size=pieces.vocab_size(), data_path="/absent"
    )
    for text in texts:
        ids = pieces.encode(text)
        decoded = len(pieces.decode(ids).encode())
        counted = int(subject.script.token_bytes(np.array([BOS_ID, *ids, BOS_ID], np.uint16), config).sum())
        if counted != decoded:
            got = (
                f"{text!r} counts {counted} bytes, it decodes to {decoded} (x{counted / max(decoded, 1):.4f})"
            )
            yield fail(
                "B10", got, "token_bytes", "count pieces, byte fallbacks and leading spaces once (#1719)"
            )
            return
    stream = [i for text in texts for i in (BOS_ID, *pieces.encode(text))]
    counted = int(subject.script.token_bytes(np.array(stream, np.uint16), config).sum())
    expected = sum(len(pieces.decode(pieces.encode(text)).encode()) for text in texts)
    if counted != expected:
        yield fail(
            "B10",
            f"packed documents count {counted} bytes, expected {expected}",
            "token_bytes",
            "reset at BOS",
        )
        return
    yield info(
        "B10", f"{len(texts)} texts, alone and packed: {counted} bytes counted, as decoded", "token_bytes"
    )
    lossy = [text for text in texts if pieces.decode(pieces.encode(text)) != text]
    yield info(
        "B11", f"tokenizer round trip exact for {len(texts) - len(lossy)} of {len(texts)} texts", "tokenizer"
    )
