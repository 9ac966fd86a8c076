"""`prove PATH --adapter FILE`: the questions that need no knowledge of a script, asked through an adapter.

An adapter is a Python file with one class `Adapter`. It says how to make a tiny model of the script, how to
score tokens with the script's own evaluation, and which labels learn. What it records while the script scores
is judged: by flips, suffixes, Kraft sums, coverage, order and sums. All else is "not checked".
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.optim.optimizer import register_optimizer_step_post_hook

from data.shards import BOS_ID
from tools.check.findings import Finding, contested, fail, info, warn
from tools.prove import cell, questions
from tools.prove.probes import weights_of
from tools.runs.errors import RecordError

TOKENS = 150
DOCUMENT_STARTS = [0, 11, 40, 41, 96, 131]
TAIL = 16  # targets; the longest context of an adapter
ROUNDING = 1e-5  # of a mean, between the script's sum and ours


@cell.record
@dataclass
class Record:
    """What a script says of one label while it scores: `add` is called where it scores, in its own order."""

    spans: list[tuple[int, np.ndarray]] = field(default_factory=list)
    steps_before_scores: int = 0
    steps: int = 0

    def add(self, start: int, nats: Any) -> None:
        """Nats of the targets from `start` on (target i is token i + 1); a tensor or an array."""
        values = nats.detach().cpu().double().numpy() if hasattr(nats, "detach") else np.asarray(nats)
        self.spans.append((int(start), values.reshape(-1).copy()))

    def step(self) -> None:
        """An optimizer step: counted by the audit itself."""
        self.steps += 1
        self.steps_before_scores += not self.spans

    def nats(self, targets: int) -> np.ndarray:
        """Nats by target; NaN where there is none."""
        found = np.full(targets, math.nan)
        for start, values in self.spans:
            found[start : start + len(values)] = values
        return found


class Adapter(Protocol):
    """What the author of a script fills in.

    vocabulary: tokens of the tiny model; id 1 begins a document. learns: the labels, and whether each learns
    from what it has scored. edges: targets right before and after what an update separates, and at the ends
    of windows.
    """

    vocabulary: int
    learns: Mapping[str, bool]
    edges: Sequence[int]

    def __init__(self, path: Path) -> None:
        """Load the script."""

    def model(self, seed: int) -> Any:
        """A tiny model, every parameter away from zero; `torch.nn.Module`."""

    def score(self, label: str, model: Any, tokens: np.ndarray, record: Record) -> float:
        """Score tokens with the script's evaluation under a label; its mean loss. Calls `record.add`."""


class Opened(NamedTuple):
    """An adapter in the script's process, and what it says of itself."""

    adapter: Any
    vocabulary: int
    learns: dict[str, bool]
    edges: list[int]


cell.record(Opened)


@cell.in_cell
def opened(file: Path, script: Path) -> Opened:
    """The adapter of a file for a script."""
    adapter = load_adapter(file, script)
    return Opened(adapter, adapter.vocabulary, dict(adapter.learns), list(adapter.edges))


class Started:
    """An adapter's model in the script's process, and its weights before any score."""

    def __init__(self, adapter: Adapter, seed: int) -> None:
        self.adapter = adapter
        self.model = adapter.model(seed)
        self.weights = weights_of(self.model)


@cell.in_cell
def started(adapter: Adapter, seed: int) -> Started:
    """What `scored` needs."""
    return Started(adapter, seed)


@cell.in_cell
def scored(start: Started, label: str, tokens: np.ndarray) -> tuple[Record, float, bool]:
    """What a score of tokens records, its mean, and whether it leaves the weights as they were."""
    start.model.load_state_dict(start.weights)
    record = Record()
    hook = register_optimizer_step_post_hook(lambda *_: record.step())
    try:
        mean = start.adapter.score(label, start.model, tokens, record)
    finally:
        hook.remove()
    after = start.model.state_dict()
    return (
        record,
        float(mean),
        all(bool((value == start.weights[name]).all()) for name, value in after.items()),
    )


def load_adapter(file: Path, script: Path) -> Adapter:
    """The adapter of a file for a script. RecordError where it has none."""
    spec = importlib.util.spec_from_file_location("adapter_of_a_script", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "Adapter"):
        raise RecordError(f"{file}: has no class Adapter; see tools/prove/adapters/")
    made: Adapter = module.Adapter(script)
    return made


def proofs(path: Path, file: Path, seed: int) -> Iterator[Finding]:
    """What can be found out through an adapter, label by label, and what cannot."""
    adapter = opened(file, path)
    done: set[str] = set()
    for label in adapter.learns:
        for finding in of_label(adapter, label, seed):
            done.add(finding.check)
            yield replace(finding, where=f"{path.name}: {label}")
    from tools.prove.prove import PROOFS

    for check, what in PROOFS.items():
        if check not in done and check not in ("B15", "B19"):
            text = f"not checked ({what}): an adapter does not show it"
            yield warn(check, text, path.name, "nothing: it is asked of scripts with our entry points alone")


def of_label(adapter: Opened, label: str, seed: int) -> Iterator[Finding]:
    """B1-B6 and B14 of one label."""
    tokens = stream(adapter.vocabulary, seed)
    targets = len(tokens) - 1
    start = started(adapter.adapter, seed)

    def ask(asked: np.ndarray) -> dict[str, np.ndarray]:
        record, _, _ = scored(start, label, asked)
        return {label: record.nats(targets)[:whole]}

    record, mean, unchanged = scored(start, label, tokens)
    missing = np.flatnonzero(np.isnan(record.nats(targets)))
    whole = int(missing[0]) if len(missing) else targets
    yield from coverage(record, targets, missing, TAIL)
    yield headline(record, mean)
    yield order_of_updates(record, adapter.learns[label])
    if not adapter.learns[label]:
        yield weights(unchanged)
    # Rows of a fixed length need not be the same kernel for every length, but here they are: equal contexts
    # give equal bits, with the padding of the last window as the only exception.
    case = questions.Case(ask, tokens, adapter.vocabulary, lambda _, target: f"target {target}", exact=True)
    edges = sorted({edge for edge in adapter.edges if 0 <= edge < whole})
    yield from questions.repetition(case)
    yield from questions.kraft(case, edges)
    yield from questions.future(case, [20, 60, 100, whole], [35, 64])
    repeats = replace(case, tokens=questions.repeating(tokens))
    yield from questions.kraft(repeats, [77])


def stream(vocabulary: int, seed: int) -> np.ndarray:
    """Random documents, one of them empty, in a tiny vocabulary."""
    tokens = np.random.default_rng(seed).integers(2, vocabulary, TOKENS).astype(np.uint16)
    tokens[DOCUMENT_STARTS] = BOS_ID
    return tokens


def coverage(record: Record, targets: int, missing: np.ndarray, tail: int) -> Iterator[Finding]:
    """B3: every target once.

    The baseline leaves a tail without scores, and merged records score the last windows' targets again: both
    are warnings. tail: how many targets from the end on that may be; more is a second pass.
    """
    counts = np.zeros(targets + 1, int)
    for start, values in record.spans:
        counts[start : start + len(values)] += 1
    twice = np.flatnonzero(counts > 1)
    outside = [start for start, values in record.spans if start < 0 or start + len(values) > targets]
    if len(twice) and not outside and twice[0] >= targets - tail:
        text = f"{len(twice)} of the last targets are scored more than once: windows that the end cuts (#174)"
        remedy = "let a window score only what none before it has reached"
        yield contested("B3", text, "", remedy)
    elif len(twice) or outside:
        text = f"{len(twice)} targets scored more than once, {len(outside)} spans beyond the text"
        yield fail("B3", text, "", "score every target once: no second pass, no choice among passes (C4)")
    elif len(missing) and not np.array_equal(missing, np.arange(missing[0], targets)):
        text = f"{len(missing)} targets never scored, the first is {missing[0]}, and others after it are"
        yield fail("B3", text, "", "score every target")
    elif len(missing):
        text = f"the last {len(missing)} of {targets} targets are never scored (the baseline does so, too)"
        yield warn("B3", text, "", "score the tail")
    else:
        yield info("B3", f"all {targets} targets scored once, the tail included", "")


def headline(record: Record, mean: float) -> Finding:
    """B4: the mean loss that the script reports is that of what it recorded."""
    every = np.concatenate([values for _, values in record.spans])
    expected = float(every.mean())
    text = f"reported mean {mean:.8g}, recorded {expected:.8g}"
    if not abs(mean - expected) <= ROUNDING * abs(expected):
        return fail("B4", text, "", "report the mean of the scores")
    return info("B4", text, "")


def order_of_updates(record: Record, learns: bool) -> Finding:
    """B5: no optimizer step before the first score, and none at all where a label claims not to learn."""
    if record.steps_before_scores:
        text = f"{record.steps_before_scores} optimizer steps came before the first score"
        return fail("B5", text, "", "score first (C3)")
    if record.steps and not learns:
        return fail("B5", f"{record.steps} optimizer steps in a label that learns nothing", "", "say so")
    if learns and not record.steps:
        return warn("B5", "not checked: it never learned from so short a text", "", "a smaller chunk")
    return info("B5", f"{record.steps} optimizer steps, none before the first score", "")


def weights(unchanged: bool) -> Finding:
    """B6: a label that learns nothing leaves the weights as they were."""
    if unchanged:
        return info("B6", "the weights are as they were", "")
    return fail("B6", "weights differ after scoring", "", "score with fixed weights")
