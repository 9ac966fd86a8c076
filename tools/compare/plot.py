"""`plot RUN…`: loss and bits per byte by steps, tokens and seconds; step times, the slow ones by cause."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.compare import curves
from tools.runs.runs import Run, load_group, output_path
from tools.runs.writing import figure_path, json_text, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAUSE_COLOURS = {"compile": "tab:purple", "shard": "tab:red", "validation": "tab:green", "other": "tab:gray"}
BINS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directories or records folders"
    )
    parser.add_argument(
        "--out", type=Path, help="PNG or SVG file (default: plot.png in the first run directory)"
    )
    parser.add_argument("--json", action="store_true", help="print step-time statistics as JSON")


def run(args: argparse.Namespace) -> int:
    name = "plot.png" if len(args.runs) == 1 else f"plot_of_{len(args.runs)}.png"
    out = figure_path(args.out or output_path(args.runs[0], name))
    runs: list[Run] = []
    for path in args.runs:
        runs += load_group(path).runs
    draw(runs, out)
    statistics_of_runs = [step_statistics(found) for found in runs]
    if args.json:
        print(json_text({"file": str(out), "runs": statistics_of_runs}), end="")
        return 0
    print(out)
    for found in statistics_of_runs:
        slow = ", ".join(f"{count} by {cause}" for cause, count in found["slow"].items()) or "none"
        print(f"  {found['run']}: median {found['median_ms']} ms per step; slow intervals: {slow}")
    return 0


def step_statistics(found: Run) -> dict[str, Any]:
    """Median step time, how many logged intervals are slow and why, and what they cost."""
    times = curves.step_times(found)
    median = statistics.median(t.ms for t in times) if times else None
    return {
        "run": found.name,
        "intervals": len(times),
        "median_ms": round(median, 3) if median is not None else None,
        "slow": dict(Counter(t.cause for t in times if t.cause)),
        "slow_steps": [{"step": t.step, "ms": round(t.ms, 3), "cause": t.cause} for t in times if t.cause],
    }


def draw(runs: Sequence[Run], out: Path) -> None:
    """Write the figure atomically; no display is needed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    validated = any(curves.validation_bpb(found) for found in runs)
    rows = 4 if validated else 3
    figure, axes = pyplot.subplots(rows, 3, figsize=(15, 3.7 * rows), constrained_layout=True)
    try:
        for column, axis in enumerate(curves.AXES):
            _draw_loss(axes[0][column], runs, axis)
            _draw_series(axes[1][column], runs, axis, _late_loss, "nats per token, second half", "-")
            if validated:
                _draw_series(axes[2][column], runs, axis, curves.validation_bpb, "bits per byte", "o-")
        _draw_times(axes[-1][0], runs)
        _draw_histogram(axes[-1][1], runs)
        _draw_causes(axes[-1][2], runs)
        _draw_legend(axes[0][0], runs)
        write_figure(out, figure, dpi=110)
    finally:
        pyplot.close(figure)


Series = Callable[[Run], list[curves.Sample]]


def _draw_series(axes: Axes, runs: Sequence[Run], axis: str, series: Series, unit: str, style: str) -> None:
    from matplotlib.ticker import EngFormatter

    for index, found in enumerate(runs):
        points = curves.points(series(found), axis)
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, style, color=f"C{index % 10}", linewidth=1, markersize=3, label=found.name)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 400k tokens, not 400000
    axes.set_xlabel(axis)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)


def _draw_loss(axes: Axes, runs: Sequence[Run], axis: str) -> None:
    _draw_series(axes, runs, axis, curves.validation_loss, "", "o")
    _draw_series(axes, runs, axis, curves.train_loss, "nats per token (o: validation)", "-")


def _late_loss(found: Run) -> list[curves.Sample]:
    """Training loss of the second half of the steps, where it falls slowly."""
    samples = curves.train_loss(found)
    middle = max((sample.step for sample in samples), default=0) / 2
    return [sample for sample in samples if sample.step >= middle]


def _draw_legend(axes: Axes, runs: Sequence[Run]) -> None:
    for index, found in enumerate(runs):
        axes.plot([], [], color=f"C{index % 10}", label=found.name)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[-len(runs) :], labels[-len(runs) :], fontsize=7)


def _draw_times(axes: Axes, runs: Sequence[Run]) -> None:
    """Step time by step; slow intervals marked in the colour of their cause."""
    shown: set[str] = set()
    for index, found in enumerate(runs):
        times = curves.step_times(found)
        axes.plot([t.step for t in times], [t.ms for t in times], color=f"C{index % 10}", linewidth=0.8)
        for cause, colour in CAUSE_COLOURS.items():
            slow = [t for t in times if t.cause == cause]
            if slow:
                label = cause if cause not in shown else None
                axes.scatter(
                    [t.step for t in slow], [t.ms for t in slow], s=18, color=colour, label=label, zorder=3
                )
                shown.add(cause)
    axes.set_xlabel("steps")
    axes.set_ylabel("ms per step")
    axes.grid(alpha=0.3)
    if shown:
        axes.legend(title="slow by", fontsize=7)


def _draw_histogram(axes: Axes, runs: Sequence[Run]) -> None:
    """Distribution of step times without compilation, which would stretch the axis."""
    for index, found in enumerate(runs):
        times = [t.ms for t in curves.step_times(found) if t.cause != "compile"]
        if times:
            axes.hist(times, bins=BINS, histtype="step", color=f"C{index % 10}")
    axes.set_xlabel("ms per step")
    axes.set_ylabel("logged intervals")
    axes.grid(alpha=0.3)


def _draw_causes(axes: Axes, runs: Sequence[Run]) -> None:
    """How many slow intervals each cause has."""
    from matplotlib.ticker import MaxNLocator

    counts = Counter(t.cause for found in runs for t in curves.step_times(found) if t.cause)
    causes = list(CAUSE_COLOURS)
    axes.bar(causes, [counts.get(cause, 0) for cause in causes], color=list(CAUSE_COLOURS.values()))
    axes.set_ylabel("slow intervals")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
