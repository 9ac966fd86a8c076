"""What a black box from tokens to nats is asked: flips, suffixes, Kraft sums, repetition, documents.

A box scores a stream under one or more labels, in its own order, and gives the nats of every target of each.
Nothing of its inside is used. Each question yields findings, one a label; one that fails names the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from data.shards import BOS_ID
from tools.check.findings import Finding, fail, info, warn

KRAFT_TOLERANCE = 1e-5
# Where a change makes or unmakes a BOS, rows differ, and with them the rounding: ten times the most that an
# honest script was seen to move, 1.9e-6 nats on AVX2.
REPACKING_TOLERANCE = 2e-5
REMEDY_ORDER = "score a chunk before anything learns from it"
REMEDY_SUM = "score with one normalised distribution, fixed before the target is known"

Nats = Mapping[str, np.ndarray]  # by label, of every target
# Takes tokens; returns the nats of all labels.
Box = Callable[[np.ndarray], Nats]
# Takes tokens, the first token that may differ, and whether to be unlikely; returns other tokens.
Continue = Callable[[np.ndarray, int, bool], np.ndarray]


@dataclass(frozen=True)
class Case:
    """A box and the stream that it is asked about.

    place: a label and a target in words. continued: rewrites a suffix with what the model holds likeliest, or
    unlikeliest; None where that cannot be had. exact: whether equal contexts must give equal bits, which
    holds where the rows of a pass do not depend on the tokens.
    """

    ask: Box
    tokens: np.ndarray
    vocab_size: int
    place: Callable[[str, int], str]
    continued: Continue | None = None
    exact: bool = True

    def other_token(self, token: int) -> int:
        """Another token that is no BOS."""
        return 2 + (int(token) - 1) % (self.vocab_size - 2)


class Moves:
    """What changes of later tokens did to earlier targets: the evidence for or against B1."""

    def __init__(self, case: Case, before: Nats) -> None:
        self.case = case
        self.before = before
        self.changes = 0
        self.worst = dict.fromkeys(before, 0.0)

    def refuted(self, changed: np.ndarray, first: int, what: str, after: Nats) -> Finding | None:
        """Whether `changed`, which differs from token `first` on, moved a target before that."""
        self.changes += 1
        tokens = self.case.tokens
        repacks = not np.array_equal(changed == BOS_ID, tokens == BOS_ID)
        for label, nats in after.items():
            earlier = self.before[label][: first - 1]
            limit = np.zeros_like(earlier)
            if repacks or not self.case.exact:
                limit = REPACKING_TOLERANCE * np.maximum(1, earlier)
            if len(nats) != len(self.before[label]):
                text = f"C1: {what} changed the number of scores, {len(earlier)} to {len(nats)}"
                return fail("B1", text, self.case.place(label, first), REMEDY_ORDER)
            moved = np.abs(nats[: first - 1] - earlier)
            too_far = ~(moved <= limit)  # so that a NaN is too far
            if too_far.any():
                target = int(np.argmax(too_far))
                text = f"C1: {what} moved the loss of target {target} by {moved[target]:.1e}"
                return fail("B1", text, self.case.place(label, target), REMEDY_ORDER)
            self.worst[label] = max(self.worst[label], float(moved.max(initial=0.0)))
        return None

    def summary(self) -> Iterator[Finding]:
        """One line a label, after all changes."""
        for label, worst in self.worst.items():
            most = f" (most: {worst:.1e}, where a BOS repacks)" if worst else ""
            yield info("B1", f"none of {self.changes} changes of later tokens moved a loss{most}", label)


def future(
    case: Case, positions: Iterable[int] | None = None, suffixes: Iterable[int] = ()
) -> Iterator[Finding]:
    """B1: change token j, or all from j on; no loss of a target before j may move.

    positions: of single flips, at every fourth one to a BOS too; None: all. suffixes: where whole suffixes
    begin, rewritten as the likeliest and unlikeliest continuation and as one token repeated: what a choice by
    the total of the score needs, which a single flip does not move enough.
    """
    moves = Moves(case, case.ask(case.tokens))
    for first in suffixes:
        for what, changed in suffix_changes(case, first):
            found = moves.refuted(changed, first, f"{what} from token {first} on", case.ask(changed))
            if found:
                yield found
                return
    for j in range(1, len(case.tokens)) if positions is None else positions:
        for new in _replacements(case, j):
            changed = case.tokens.copy()
            changed[j] = new
            found = moves.refuted(changed, j, f"changing token {j} to {new}", case.ask(changed))
            if found:
                yield found
                return
    yield from moves.summary()


def suffix_changes(case: Case, first: int) -> Iterator[tuple[str, np.ndarray]]:
    """Whole suffixes from token `first` on, in words and as tokens."""
    if case.continued is not None:
        yield "the likeliest tokens", case.continued(case.tokens, first, False)
        yield "the unlikeliest tokens", case.continued(case.tokens, first, True)
    for token in (2, case.vocab_size - 1):
        changed = case.tokens.copy()
        changed[first:] = token
        yield f"token {token}, repeated,", changed


def _replacements(case: Case, j: int) -> list[int]:
    """What token j is changed to: another token, and at every fourth place a BOS too."""
    new_tokens = [case.other_token(case.tokens[j])]
    if j % 4 == 0 and case.tokens[j] != BOS_ID:
        new_tokens.append(BOS_ID)
    return new_tokens


def kraft(case: Case, positions: Iterable[int], and_changes: bool = True) -> Iterator[Finding]:
    """B2: with the rest fixed, the probabilities of all tokens at one target sum to one, under every label.

    Each candidate is a change of a later token as well, so the same answers serve B1; and_changes: whether to
    ask that too.
    """
    before = case.ask(case.tokens)
    moves = Moves(case, before)
    chosen = list(positions)
    worst = dict.fromkeys(before, 0.0)
    for target in chosen:
        totals = {label: math.exp(-nats[target]) for label, nats in before.items()}
        for candidate in range(case.vocab_size):
            if candidate == case.tokens[target + 1]:
                continue
            changed = case.tokens.copy()
            changed[target + 1] = candidate
            after = case.ask(changed)
            for label in totals:
                totals[label] += math.exp(-after[label][target])
            found = moves.refuted(changed, target + 1, f"changing token {target + 1} to {candidate}", after)
            if found and and_changes:
                yield found
                return
        for label, total in totals.items():
            error = abs(total - 1)
            if not error <= KRAFT_TOLERANCE:  # so that a NaN fails
                text = (f"C2/C3: probabilities of {case.vocab_size} candidates at target {target} "
                        f"sum to {total:.4f}")
                yield fail("B2", text, case.place(label, target), REMEDY_SUM)
                return
            worst[label] = max(worst[label], error)
    for label, error in worst.items():
        yield info("B2", f"Kraft sums at {len(chosen)} targets are 1 to {error:.1e}", label)


def repetition(case: Case) -> Iterator[Finding]:
    """B14: the same stream gives the same nats, bit for bit, also after another one was scored."""
    first = case.ask(case.tokens)
    changed = case.tokens.copy()
    changed[1:] = np.roll(changed[1:], 7)
    case.ask(changed)
    second = case.ask(case.tokens)
    for label, nats in first.items():
        if np.array_equal(nats, second[label]):
            yield info("B14", "a second run gives the same nats, bit for bit", label)
        else:
            target = int(np.argmax(nats != second[label]))
            text = f"a second run gives target {target} other nats"
            yield fail("B14", text, label, "draw no random numbers in scoring, and keep nothing between runs")


def isolation(case: Case, labels: Iterable[str], masked: bool) -> Iterator[Finding]:
    """B9: no token of a document has a say in a later one. Each document is rewritten whole.

    labels: those of which it is asked. masked: whether the settings promise it (DOC_MASK); else a dependence
    is allowed, and no more than a warning.
    """
    tokens = case.tokens
    before = case.ask(tokens)
    starts = []
    for start in np.flatnonzero(tokens == BOS_ID):
        if start > 0 and tokens[start - 1] != BOS_ID:  # else the document before is empty
            starts.append(start)
    moved = dict.fromkeys(labels, "")
    for start in starts:
        changed = tokens.copy()
        before_it = np.flatnonzero(tokens[:start] == BOS_ID)
        begin = before_it[-1] + 1 if len(before_it) else 0
        for i in range(begin, start):
            changed[i] = case.other_token(tokens[i])
        after = case.ask(changed)
        for label in moved:
            difference = np.abs(after[label][start:] - before[label][start:])
            if not moved[label] and difference.max(initial=0.0) > 0:
                target = start + int(difference.argmax())
                moved[label] = (f"tokens {begin} to {start - 1} move target {target} of a later document "
                                f"by {difference.max():.1e}")
    for label, text in moved.items():
        if not text:
            yield info("B9", f"{len(starts)} documents: none depends on one before", label)
        else:
            report = fail if masked else warn
            yield report("B9", text, label, "mask attention and every shift at BOS (#1797, #1851)")


def repeating(tokens: np.ndarray, phrase: int = 9) -> np.ndarray:
    """The same stream made of a few phrases that come again and again: what a cache feeds on.

    Documents begin where they did. Between copies one token in ten is another, so that a cache also errs.
    """
    repeated = tokens.copy()
    for i in range(phrase + 1, len(tokens)):
        if tokens[i] != BOS_ID and i % 10 != 0:
            repeated[i] = repeated[i - phrase]
        if tokens[i] != BOS_ID and repeated[i] == BOS_ID:
            repeated[i] = 2
    return repeated
