"""Runs compared seed by seed: mean difference, its error, the p of a paired t-test, and Holm's correction."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

Runs = list[dict[str, Any]]
HEADER = "val_bpb | std | minus {} | its error | p | n |"
SMALL_P = 0.01  # below it a p is printed bold


@dataclass(frozen=True)
class Difference:
    """Scores of some runs less those of others with the same seeds."""

    mean: float
    error: float  # standard error of the mean
    p: float  # two-sided, of a paired t-test that the mean is zero
    seeds: int


def difference(runs: Runs, reference: Runs, score: str = "val_bpb") -> Difference | None:
    """The difference over the seeds that both have; None where there are fewer than two."""
    theirs = {run["seed"]: run[score] for run in reference}
    gains = [run[score] - theirs[run["seed"]] for run in runs if run["seed"] in theirs]
    if len(gains) < 2:
        return None
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    mean = statistics.mean(gains)
    return Difference(mean, error, p_of(mean, error, len(gains)), len(gains))


def p_of(mean: float, error: float, seeds: int) -> float:
    """Two-sided p of a t-test with `seeds` - 1 degrees of freedom."""
    if error == 0:  # differences that are all alike are no chance
        return 1.0 if mean == 0 else 0.0
    from scipy import stats  # half a second to import

    return float(2 * stats.t.sf(abs(mean) / error, seeds - 1))


def holm(p_values: list[float]) -> list[float]:
    """Each p corrected for all of them (Holm 1979): the smallest times n, the next times n - 1, and so on."""
    corrected = [0.0] * len(p_values)
    highest = 0.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected


def told_p(p: float) -> str:
    """A p with two digits, bold where it is small."""
    text = f"{p:.2g}" if p >= 1e-4 else "< 0.0001"
    return f"**{text}**" if p < SMALL_P else text


def cells(runs: Runs, reference: Runs) -> str:
    """The cells under HEADER; without a difference where the runs are the reference themselves."""
    scores = [run["val_bpb"] for run in runs]
    spread = f"{statistics.stdev(scores):.4f}" if len(scores) > 1 else "-"
    found = None if runs is reference else difference(runs, reference)
    told = f"{found.mean:+.4f} | {found.error:.4f} | {told_p(found.p)}" if found else "- | - | -"
    return f"{statistics.mean(scores):.4f} | {spread} | {told} | {len(scores)} |"


def table(header: str, lines: list[str]) -> list[str]:
    """A table of Markdown."""
    return [header, "|" + "---|" * (header.count("|") - 1), *lines]
