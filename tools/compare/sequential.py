"""When a series of pairs may stop: a look after every pair, at a level that allows all the looks.

A look is a two-sided t-test of the paired differences at the level LOOK_P, after pair FIRST_LOOK and each
later one up to MOST_PAIRS. That is a Pocock boundary (Biometrika 64, 1977), applied to t-tests by their
levels (Jennison and Turnbull, Group Sequential Methods, 2000, section 3.8). Where the change does nothing,
the chance that any of these looks shows a difference is at most 5%. So whoever stops at the first one that
does, or adds seeds up to MOST_PAIRS, gets no more false verdicts than that. The interval of a look is a
repeated confidence interval (chapter 9 there): with 95% confidence all of them hold at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import numpy as np

FIRST_LOOK = 4  # t-tests of fewer pairs depend on the shape of the distribution
MOST_PAIRS = 24
LOOK_P = 0.0075  # of one look; simulated for all of them in tests/tools/test_sequential.py
SHOWN_PAIRS = (4, 6, 8, 12, 16, 24)  # of a table of what can be resolved
LOOKED_AHEAD = 999  # pairs, to say how far away a verdict is

KEEP, DROP, UNDECIDED = "keep", "drop", "undecided"


@dataclass(frozen=True)
class Verdict:
    """One of KEEP, DROP and UNDECIDED, and why."""

    word: str
    why: str
    interval: tuple[float, float] | None = None  # that holds at every look; None before FIRST_LOOK


def half_widths(spread: float, pairs: Sequence[int]) -> np.ndarray:
    """Half of a look's interval after that many pairs; spread: the standard deviation of the differences."""
    return spread * half_widths_of_one()[np.asarray(pairs) - 2]


@cache
def half_widths_of_one() -> np.ndarray:
    """Those at a spread of one, after 2, 3, ... LOOKED_AHEAD pairs."""
    from scipy import special  # here, as it is slow to import

    counts = np.arange(2, LOOKED_AHEAD + 1)
    return special.stdtrit(counts - 1, 1 - LOOK_P / 2) / np.sqrt(counts)


def verdict(differences: Sequence[float], useful: float) -> Verdict:
    """What the pairs show so far. differences: new − base, negative is better.

    useful: the smallest gain that is worth keeping; an interval without it is a reason to drop.
    """
    pairs = len(differences)
    if pairs < FIRST_LOOK:
        why = f"the first look comes after {FIRST_LOOK} pairs; --seeds {FIRST_LOOK} continues up to it"
        return Verdict(UNDECIDED, why)
    if not any(differences):
        same = "both sides score the same to the last digit in every pair, which more seeds will not change"
        return Verdict(UNDECIDED, same, (0.0, 0.0))
    center, spread = fmean(differences), stdev(differences)
    width = float(half_widths(spread, [pairs])[0])
    interval = (center - width, center + width)
    if interval[0] > 0:
        return Verdict(DROP, "it hurts", interval)
    if interval[0] > -useful:
        return Verdict(DROP, f"a gain of {useful:g}, the smallest useful one, is excluded", interval)
    if interval[1] < 0:
        return Verdict(KEEP, "it gains", interval)
    count = pairs_to_decide(center, spread, pairs, useful)
    about = "more than" if count > LOOKED_AHEAD else "about"
    seeds = "seed" if count - pairs == 1 else "seeds"
    why = f"{about} {count - pairs} more {seeds}, if they go on like these"
    if count > MOST_PAIRS:
        why += f", but the rule allows {MOST_PAIRS} in all: train longer, or look for a larger effect"
    else:
        why += f" (--seeds {count} continues)"
    return Verdict(UNDECIDED, why, interval)


def pairs_to_decide(center: float, spread: float, pairs: int, useful: float) -> int:
    """After how many pairs a look would decide, if mean and spread stayed; LOOKED_AHEAD + 1: none so far."""
    distance = max(-center, center + useful)  # to an interval below zero, or to one above -useful
    counts = range(pairs + 1, LOOKED_AHEAD + 1)
    decided = np.flatnonzero(half_widths(spread, counts) < distance)
    return counts[int(decided[0])] if len(decided) else LOOKED_AHEAD + 1


def resolution(spread: float) -> dict[int, float]:
    """By number of pairs, the smallest mean difference that a look would show, at this spread."""
    return dict(zip(SHOWN_PAIRS, half_widths(spread, SHOWN_PAIRS).tolist(), strict=True))
