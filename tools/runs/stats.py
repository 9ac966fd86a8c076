"""The one way in which two sets of scores are compared here, and the challenge's own rule for records.

A difference is new − base: negative is better. Its p is two-sided, from a paired t-test over equal seeds, or
from Welch's t-test where the seeds differ. The tests themselves are scipy's.

The scores may come from anybody's log: NaN and infinity pass through, and statistics.stdev raises at them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean as mean
from typing import Any, TypeVar

from tools.runs.rules import FRONTIER_P, MARGIN_NATS, MARGIN_P

CONFIDENCE = 0.95
PAIRED = "paired t-test"
WELCH = "Welch's t-test"

Seed = TypeVar("Seed", bound=Hashable)


def deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1); None for a single value."""
    if len(values) < 2:
        return None
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1))


def mean_and_deviation(values: Sequence[float], form: str) -> str:
    """The mean in this format, and of several values their standard deviation: `2.2648 ± 0.0048`."""
    spread = deviation(values)
    return f"{mean(values):{form}}" + ("" if spread is None else f" ± {spread:{form}}")


@dataclass(frozen=True)
class Difference:
    """New − base, negative is better where lower is better; how sure it is, and how likely by chance.

    One pair has a difference and nothing else. Differences that are all alike have an interval without width
    and no p.
    """

    test: str  # PAIRED or WELCH
    seeds_new: int
    seeds_base: int
    difference: float
    error: float | None = None  # the standard error of the difference
    interval: tuple[float, float] | None = None  # of 95%
    p: float | None = None  # two-sided

    @property
    def seeds_in_words(self) -> str:
        """How many seeds it is of, in words."""
        counted = f"{self.seeds_new} seed{'s' if self.seeds_new > 1 else ''}"
        return counted if self.test == PAIRED else f"{counted} against {self.seeds_base}"

    @property
    def test_in_words(self) -> str:
        """The test with its sides and seeds."""
        return f"two-sided {self.test}, {self.seeds_in_words}"

    def in_words(self) -> str:
        """Interval, p, the test and its seeds, in words."""
        if self.interval is None:
            return f"cannot be tested: {self.seeds_in_words}"
        low, high = self.interval
        p = "no p, because all differences are equal" if self.p is None else p_text(self.p)
        return f"95% interval {low:+.6f} to {high:+.6f}, {p} ({self.test_in_words})"


def paired(new: Mapping[Seed, float], base: Mapping[Seed, float]) -> Difference | None:
    """The paired t-test of the scores by seed, over the seeds that both have; None without one."""
    differences = [new[seed] - base[seed] for seed in new if seed in base]
    if not differences:
        return None
    return of_pairs(differences)


def of_pairs(differences: Sequence[float]) -> Difference:
    """The paired t-test of differences new − base, of a seed each."""
    count = len(differences)
    center = mean(differences)
    if count == 1:
        return Difference(PAIRED, 1, 1, center)
    spread = deviation(differences)
    assert spread is not None
    return _with_t(PAIRED, count, count, center, spread / math.sqrt(count), count - 1)


def welch(new: Sequence[float], base: Sequence[float]) -> Difference:
    """Welch's two-sided t-test of two groups of scores, whose variances may differ."""
    center = mean(new) - mean(base)
    if min(len(new), len(base)) < 2:
        return Difference(WELCH, len(new), len(base), center)
    squares = [(deviation(group) or 0.0) ** 2 / len(group) for group in (new, base)]
    error = math.sqrt(sum(squares))
    freedom = math.nan
    if error:
        parts = [square**2 / (len(group) - 1) for square, group in zip(squares, (new, base), strict=True)]
        freedom = error**4 / sum(parts)
    return _with_t(WELCH, len(new), len(base), center, error, freedom)


def _with_t(
    test: str, seeds_new: int, seeds_base: int, center: float, error: float, freedom: float
) -> Difference:
    """A difference with the interval and the p of Student's t."""
    if error == 0.0:
        return Difference(test, seeds_new, seeds_base, center, error, (center, center))
    from scipy import special  # what scipy.stats takes them from, and far sooner imported

    half_width = float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    interval = (center - half_width, center + half_width)
    p = 2 * float(special.stdtr(freedom, -abs(center) / error))
    return Difference(test, seeds_new, seeds_base, center, error, interval, p)


def difference(new: Mapping[Seed, float], base: Mapping[Seed, float]) -> Difference:
    """The paired t-test where both sides have the same seeds, else Welch's."""
    if new.keys() == base.keys():
        return of_pairs([new[seed] - base[seed] for seed in new])
    return welch(list(new.values()), list(base.values()))


def p_text(p: float) -> str:
    """A p-value with four digits; a smaller one as a bound."""
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.4f}"


# --- the challenge's rule for records: one-sided, and by Welch's test whatever the seeds are ---


@dataclass(frozen=True)
class RecordTest:
    """A t-test that the first group is lower: statistic, degrees of freedom, one-sided p."""

    t: float
    df: float
    p: float


def welch_lower(new: Sequence[float], base: Sequence[float], margin: float = 0.0) -> RecordTest | None:
    """Test mean(new) < mean(base) - margin with unequal variances; None with fewer than two values per side.

    This is the test behind the leaderboard's published p-values (#1902), there without a margin.
    """
    if min(len(new), len(base)) < 2:
        return None
    if not (deviation(new) or deviation(base)):
        return None  # no spread at all: the test is undefined
    from scipy import stats  # half a second to import

    shifted = [value - margin for value in base]
    result: Any = stats.ttest_ind(new, shifted, equal_var=False, alternative="less")
    return RecordTest(float(result.statistic), float(result.df), float(result.pvalue))


@dataclass(frozen=True)
class Comparison:
    """New against base: the difference of their scores, and the outcome at the challenge's two standards.

    A difference in nats per token and the test beyond the margin need losses over the same tokenizer; where
    bytes per token differ between the groups both are None.
    """

    bpb_new: float
    bpb_base: float
    difference: Difference  # in bits per byte
    nats_per_token: float | None  # the difference of the losses
    frontier: RecordTest | None
    margin: RecordTest | None
    meets_frontier: bool
    meets_margin: bool

    @property
    def nats_per_byte(self) -> float:
        return self.difference.difference * math.log(2.0)

    def as_json(self) -> dict[str, object]:
        """Its numbers, flat. The interval is two numbers, as a list would be compared digit by digit."""
        found = self.difference
        low, high = found.interval or (None, None)
        tests = {name: asdict(test) if test else None
                 for name, test in (("frontier", self.frontier), ("margin", self.margin))}
        return {
            "seeds_new": found.seeds_new, "seeds_base": found.seeds_base,
            "bpb_new": self.bpb_new, "bpb_base": self.bpb_base,
            "difference_bpb": found.difference, "difference_nats_per_token": self.nats_per_token,
            "test": found.test, "interval_low": low, "interval_high": high, "p_two_sided": found.p,
            **tests, "meets_frontier": self.meets_frontier, "meets_margin": self.meets_margin,
        }


SAME_TOKENIZER = 1e-3  # relative difference of bytes per token below which losses per token compare


def compare(
    new_bpb: Sequence[float],
    base_bpb: Sequence[float],
    new_nats: Sequence[float],
    base_nats: Sequence[float],
    new_seeds: Sequence[int] = (),
    base_seeds: Sequence[int] = (),
) -> Comparison:
    """Compare two groups of runs; `*_nats` are nats per token, run by run, or empty where unknown.

    new_seeds, base_seeds: of each run, in the same order; empty where one is not known, or occurs twice.
    """
    found = welch(new_bpb, base_bpb)
    if new_seeds and base_seeds:
        new = dict(zip(new_seeds, new_bpb, strict=True))
        found = difference(new, dict(zip(base_seeds, base_bpb, strict=True)))
    frontier = welch_lower(new_bpb, base_bpb)
    comparable = bool(new_nats and base_nats)
    if comparable:
        ratio = (mean(new_nats) / mean(new_bpb)) / (mean(base_nats) / mean(base_bpb))
        comparable = abs(ratio - 1) < SAME_TOKENIZER
    margin = welch_lower(new_nats, base_nats, MARGIN_NATS) if comparable else None
    return Comparison(
        bpb_new=mean(new_bpb),
        bpb_base=mean(base_bpb),
        difference=found,
        nats_per_token=mean(new_nats) - mean(base_nats) if comparable else None,
        frontier=frontier,
        margin=margin,
        meets_frontier=bool(frontier and frontier.p < FRONTIER_P),
        meets_margin=bool(margin and margin.p < MARGIN_P),
    )
