"""Runs compared seed by seed: their differences, the cells of their tables, the options they share."""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

Runs = list[dict[str, Any]]
HEADER = "val_bpb | std | minus {} | its error | seeds to decide | n |"
WANTED_SHARE = 1 / 3  # of a difference: with a smaller standard error its sign is hardly chance
MANY_RUNS = 999


@dataclass(frozen=True)
class Difference:
    """Bits per byte of some runs less those of others with the same seeds."""

    mean: float
    deviation: float  # from seed to seed
    seeds: int

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.deviation / math.sqrt(self.seeds)

    @property
    def runs_wanted(self) -> str:
        """Seeds after which the error would be a third of the mean, if both stay as these seeds have them."""
        if abs(self.mean) * math.sqrt(MANY_RUNS) <= self.deviation / WANTED_SHARE:
            return f"> {MANY_RUNS}"
        return str(max(2, math.ceil((self.deviation / (WANTED_SHARE * self.mean)) ** 2)))


def difference(runs: Runs, reference: Runs) -> Difference | None:
    """The difference over the seeds that both have; None where there are fewer than two."""
    theirs = {run["seed"]: run["val_bpb"] for run in reference}
    gains = [run["val_bpb"] - theirs[run["seed"]] for run in runs if run["seed"] in theirs]
    if len(gains) < 2:
        return None
    return Difference(statistics.mean(gains), statistics.stdev(gains), len(gains))


def cells(runs: Runs, reference: Runs) -> str:
    """The cells under HEADER; without a difference where the runs are the reference themselves."""
    scores = [run["val_bpb"] for run in runs]
    spread = f"{statistics.stdev(scores):.4f}" if len(scores) > 1 else "-"
    told = told_difference(None if runs is reference else difference(runs, reference))
    return f"{statistics.mean(scores):.4f} | {spread} | {told} | {len(scores)} |"


def told_difference(found: Difference | None) -> str:
    """Three cells: the mean, its standard error, the runs wanted."""
    if found is None:
        return "- | - | -"
    return f"{found.mean:+.4f} | {found.error:.4f} | {found.runs_wanted}"


class AtEqualSteps:
    """Rows of runs as they would be at the same steps: for a clock that gives now more of them, now less.

    Least squares over all runs: a constant for each row and for each seed, and one slope in the logarithm of
    the steps. `fits` is False where steps are all alike, or too few runs are left to tell the errors.
    """

    def __init__(self, rows: dict[str, Runs]) -> None:
        runs = [(name, run) for name, of_row in rows.items() for run in of_row]
        seeds = sorted({run["seed"] for _, run in runs})
        self.names = list(rows)
        logarithms = np.log([run["steps"] for _, run in runs])
        design = np.column_stack([
            *([float(name == other) for name, _ in runs] for other in self.names),
            *([float(run["seed"] == seed) for _, run in runs] for seed in seeds[1:]),
            logarithms - logarithms.mean(),
        ])  # fmt: skip
        scores = np.array([run["val_bpb"] for _, run in runs])
        freedom = len(runs) - design.shape[1]
        self.fits = freedom >= 3 and bool(np.linalg.matrix_rank(design) == design.shape[1])
        if self.fits:
            self.found = np.linalg.lstsq(design, scores, rcond=None)[0]
            left = scores - design @ self.found
            self.covariance = np.linalg.inv(design.T @ design) * (left @ left / freedom)

    def difference(self, name: str, other: str) -> tuple[float, float]:
        """Bits per byte of one row less those of another, and the standard error."""
        contrast = np.zeros(len(self.found))
        contrast[self.names.index(name)] = 1.0
        contrast[self.names.index(other)] = -1.0
        return float(contrast @ self.found), math.sqrt(contrast @ self.covariance @ contrast)


def table(header: str, lines: list[str]) -> list[str]:
    """A table of Markdown."""
    return [header, "|" + "---|" * (header.count("|") - 1), *lines]


def add_options(parser: argparse.ArgumentParser, rows: list[str], threads: int | None = 1) -> None:
    """--seconds, --seeds, --only, --threads and --keep; rows: the names that --only may have."""
    parser.add_argument("--seconds", type=float, default=120.0, help="of training of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 42, 2025])
    parser.add_argument(
        "--only", nargs="+", choices=rows, default=rows, metavar="ROW", help=f"of: {', '.join(rows)}"
    )
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
