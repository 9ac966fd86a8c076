"""The comparison of two groups of seeds at the challenge's standards; the tests themselves are scipy's.

The figures may come from anybody's log: NaN and infinity pass through, and statistics.stdev raises at them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean as mean
from typing import Any

from tools.runs.rules import FRONTIER_P, MARGIN_NATS, MARGIN_P


def deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1); None for a single value."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def mean_and_deviation(values: Sequence[float], form: str) -> str:
    """The mean in this format, and of several values their standard deviation: `2.2648 ± 0.0048`."""
    spread = deviation(values)
    return f"{mean(values):{form}}" + ("" if spread is None else f" ± {spread:{form}}")


@dataclass(frozen=True)
class Welch:
    """A t-test that the first group is lower: statistic, degrees of freedom, one-sided p."""

    t: float
    df: float
    p: float

    @classmethod
    def of(cls, result: Any) -> Welch:
        """From what scipy returns."""
        return cls(float(result.statistic), float(result.df), float(result.pvalue))


def welch_lower(new: Sequence[float], base: Sequence[float], margin: float = 0.0) -> Welch | None:
    """Test mean(new) < mean(base) - margin with unequal variances; None with fewer than two values a side.

    This is the test behind the leaderboard's published p-values (#1902), there without a margin.
    """
    if min(len(new), len(base)) < 2:
        return None
    if not (deviation(new) or deviation(base)):
        return None  # no spread at all: the test is undefined
    from scipy import stats  # half a second to import, needed by two verbs only

    shifted = [value - margin for value in base]
    return Welch.of(stats.ttest_ind(new, shifted, equal_var=False, alternative="less"))


def paired_lower(pairs: Sequence[tuple[float, float]]) -> Welch | None:
    """The paired t-test that the first of each pair is lower; None with fewer than two pairs or no spread."""
    differences = [new - base for new, base in pairs]
    if not deviation(differences):
        return None
    from scipy import stats

    return Welch.of(stats.ttest_1samp(differences, 0.0, alternative="less"))


def p_text(p: float) -> str:
    """A p-value with four digits; a smaller one as a bound."""
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.4f}"


@dataclass(frozen=True)
class Comparison:
    """New against base at both standards; gains are positive when the new runs are better.

    `gain_nats_per_byte` is `gain_bpb` times ln 2. `gain_nats_per_token` and the margin test need losses over
    the same tokenizer; where bytes per token differ between the groups both are None. `paired` is the test by
    seeds, None where the groups do not have the same ones.
    """

    seeds_new: int
    seeds_base: int
    bpb_new: float
    bpb_base: float
    gain_bpb: float
    gain_nats_per_byte: float
    gain_nats_per_token: float | None
    frontier: Welch | None
    margin: Welch | None
    paired: Welch | None
    meets_frontier: bool
    meets_margin: bool

    def as_json(self) -> dict[str, object]:
        """Its fields; without `paired` where there is no such test."""
        fields = asdict(self)
        if self.paired is None:
            del fields["paired"]
        return fields


SAME_TOKENIZER = 1e-3  # relative difference of bytes per token below which losses per token compare


def compare(
    new_bpb: Sequence[float],
    base_bpb: Sequence[float],
    new_nats: Sequence[float],
    base_nats: Sequence[float],
    pairs: Sequence[tuple[float, float]] = (),
) -> Comparison:
    """Compare two groups of seeds; `*_nats` are nats per token, seed by seed, or empty where unknown.

    pairs: new and base bits per byte of each seed, where all seeds of the groups are the same.
    """
    gain = mean(base_bpb) - mean(new_bpb)
    frontier = welch_lower(new_bpb, base_bpb)
    comparable = bool(new_nats and base_nats)
    if comparable:
        ratio = (mean(new_nats) / mean(new_bpb)) / (mean(base_nats) / mean(base_bpb))
        comparable = abs(ratio - 1) < SAME_TOKENIZER
    margin = welch_lower(new_nats, base_nats, MARGIN_NATS) if comparable else None
    return Comparison(
        seeds_new=len(new_bpb),
        seeds_base=len(base_bpb),
        bpb_new=mean(new_bpb),
        bpb_base=mean(base_bpb),
        gain_bpb=gain,
        gain_nats_per_byte=gain * math.log(2.0),
        gain_nats_per_token=mean(base_nats) - mean(new_nats) if comparable else None,
        frontier=frontier,
        margin=margin,
        paired=paired_lower(pairs),
        meets_frontier=bool(frontier and frontier.p < FRONTIER_P),
        meets_margin=bool(margin and margin.p < MARGIN_P),
    )
