"""Two sets of scores, seed by seed: their difference, how sure it is, and how likely it is by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Paired:
    """New minus base over the seeds that both have; negative is better where lower is better.

    With a single seed there is a difference and nothing else. Differences that are all alike have no p.
    """

    seeds: int
    difference: float
    error: float | None = None  # the standard error of the difference
    interval: tuple[float, float] | None = None  # of 95 %
    p: float | None = None  # two-sided


def paired(new: Mapping[str, float], base: Mapping[str, float]) -> Paired | None:
    """The paired t-test of the scores by seed; None without a seed that both have."""
    differences = [new[seed] - base[seed] for seed in new if seed in base]
    if not differences:
        return None
    mean = fmean(differences)
    if len(differences) == 1:
        return Paired(1, mean)
    error = stdev(differences) / math.sqrt(len(differences))
    if error == 0.0:
        return Paired(len(differences), mean, error, (mean, mean))
    from scipy import stats  # half a second to import

    student = stats.t(len(differences) - 1)
    half_width = float(student.ppf((1 + CONFIDENCE) / 2)) * error
    p = 2 * float(student.sf(abs(mean) / error))
    return Paired(len(differences), mean, error, (mean - half_width, mean + half_width), p)
