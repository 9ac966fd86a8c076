"""results.png, the picture of README: drawn from the raw figures of results/, like the tables of RESULTS.md.

    python -m benchmarks.picture [--out benchmarks/results/results.png]

Left: a public script and this one after the same seconds of one thread, a line for each seed. Right: the ways
of scoring the same weights, a point for each seed. The lower, the better.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import results

BESIDE = "beside-fineweb_sample_sp1024-180s"
SCORING = "0.5/ttt-fineweb_sample_sp1024"  # frozen: the table of these figures is in results/0.5.md
WAYS = ("round trip", "sliding window", "SGD", "LoRA")
OUT = results.FOLDER / "results.png"
SIZE_INCHES = (10.0, 3.6)
SIDES = {
    "theirs": "challenge's\nown script",
    "ours as theirs": "its settings\nin this file",
    "theirs shuffled": "own script,\nshuffled",
    "ours": "this one",
}


def draw_beside(axes: Axes, measured: dict[str, Any]) -> None:
    """Bits per byte of all sides, joined seed by seed."""
    rows = measured["rows"]
    sides = [side for side in SIDES if side in rows]
    by_seed: dict[int, dict[str, float]] = {}
    for side in sides:
        for run in rows[side]:
            by_seed.setdefault(run["seed"], {})[side] = run["val_bpb"]
    for seed, scores in by_seed.items():
        places = [sides.index(side) for side in scores]
        axes.plot(places, list(scores.values()), "o-", label=f"seed {seed}")
    axes.set_xticks(range(len(sides)), [SIDES[side] for side in sides])
    axes.set_xlim(-0.4, len(sides) - 0.6)
    axes.set_title(f"after {measured['seconds']:g} s of training on one core", fontsize=10)
    axes.legend(fontsize=8)


def draw_scoring(axes: Axes, scores: list[dict[str, Any]]) -> None:
    """Bits per byte of the same weights, by each way of scoring all documents."""
    of_all: dict[str, list[float]] = {}
    for row in WAYS:
        found = [s["bits_per_byte"] for s in scores if s["row"] == row and s["documents"] == 0]
        if found:
            of_all[row] = found
    for place, found in enumerate(of_all.values()):
        axes.plot([place] * len(found), found, "o", color="tab:blue", alpha=0.7)
        axes.annotate(f"{sum(found) / len(found):.3f}", (place, min(found)), (0, -12),
                      textcoords="offset points", ha="center", fontsize=8)  # fmt: skip
    axes.set_xticks(range(len(of_all)), [row.replace(" ", "\n", 1) for row in of_all])
    axes.margins(x=0.15, y=0.25)
    axes.set_title("the same weights, scored in four ways", fontsize=10)


def draw() -> Figure:
    """The picture, from what is stored."""
    figure = Figure(SIZE_INCHES, layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_beside(left, results.latest(BESIDE)["measured"])
    draw_scoring(right, results.latest(SCORING)["measured"]["scores"])
    for axes in (left, right):
        axes.set_ylabel("bits per byte")
        axes.grid(axis="y", alpha=0.3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    draw().savefig(arguments.out, dpi=110)
    print(arguments.out)


if __name__ == "__main__":
    main()
