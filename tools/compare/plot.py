"""`plot RUN…`: loss and bits per byte by steps, tokens and seconds; step times, the slow ones by cause.

A panel of which the runs say nothing is left out. `--follow` draws again while the runs are under way.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.compare import curves
from tools.runs.errors import RecordError
from tools.runs.logs import EXACT
from tools.runs.reading import path_of
from tools.runs.runs import LOG, SUMMARY, Run, load_group, output_path
from tools.runs.writing import figure_path, print_json, pyplot_without_display, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAUSE_COLOURS = {"start": "tab:purple", "shard": "tab:red", "validation": "tab:green", "other": "tab:gray"}
# How a slow step's cause is printed.
CAUSES = {"start": "at the start", "shard": "waiting for data", "validation": "after a validation",
          "other": "cause unknown"}  # fmt: skip
BINS = 40
TITLED_MAX = 6  # runs that the title names
RANKS = {1: "round trip", 2: "sliding window", 3: "test-time training"}  # of `Final.rank`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directories or records folders"
    )
    parser.add_argument(
        "--out", type=Path, help="PNG or SVG file (default: plot.png in the first run directory)"
    )
    parser.add_argument("--json", action="store_true", help="print step-time statistics as JSON")
    parser.add_argument("--follow", action="store_true", help="draw again until all runs have finished")
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS",
                        help="between drawings of --follow (default: 10)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    name = "plot.png" if len(args.runs) == 1 else f"plot_of_{len(args.runs)}.png"
    out = figure_path(args.out or output_path(args.runs[0], name))
    if args.follow:
        follow(args.runs, out, args.every)
    runs = load_runs(args.runs)
    draw(runs, out)
    statistics_of_runs = [step_statistics(found) for found in runs]
    if args.json:
        print_json({"file": str(out), "runs": statistics_of_runs})
        return 0
    print(path_of(out))
    for found in statistics_of_runs:
        slow = [f"{count} slow step{'s' if count > 1 else ''}, {CAUSES[cause]}"
                for cause, count in found["slow"].items()]  # fmt: skip
        print(f"  {found['run']}: median {found['median_ms']} ms/step; {'; '.join(slow) or 'no slow steps'}")
    return 0


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs that these paths name."""
    return [found for path in paths for found in load_group(path).runs]


def follow(paths: Sequence[Path], out: Path, seconds: float) -> None:
    """Draw again and again while a run has no summary; Ctrl-C ends it, and leaves the last drawing."""
    while not all((path / SUMMARY).is_file() for path in paths if (path / LOG).is_file()):
        try:
            runs = load_runs(paths)
            draw(runs, out)
            results = "; ".join(f"{found.name}: {result_of(found)}" for found in runs)
            print(f"{path_of(out)}: {results}", flush=True)
        except RecordError as error:
            print(f"nothing to draw yet: {error}", flush=True)
        time.sleep(seconds)


def step_statistics(found: Run) -> dict[str, Any]:
    """Median step time, the number of slow intervals with their causes, and their cost."""
    times = curves.step_times(found)
    median = statistics.median(t.ms for t in times) if times else None
    return {
        "run": found.name,
        "intervals": len(times),
        "median_ms": round(median, 3) if median is not None else None,
        "slow": dict(Counter(t.cause for t in times if t.cause)),
        "slow_steps": [{"step": t.step, "ms": round(t.ms, 3), "cause": t.cause} for t in times if t.cause],
    }


Panel = Callable[["Axes"], None]


def draw(runs: Sequence[Run], out: Path) -> None:
    """Write the figure atomically; no display is needed."""
    pyplot = pyplot_without_display()
    rows = [row for row in panels(runs) if row]
    columns = math.lcm(*map(len, rows))
    figure = pyplot.figure(figsize=(15, 3.7 * len(rows)), constrained_layout=True)
    figure.suptitle(title_of(runs))
    try:
        grid = figure.add_gridspec(len(rows), columns)
        for number, row in enumerate(rows):
            width = columns // len(row)
            for place, panel in enumerate(row):
                panel(figure.add_subplot(grid[number, place * width : (place + 1) * width]))
        write_figure(out, figure, dpi=110)
    finally:
        pyplot.close(figure)


def title_of(runs: Sequence[Run]) -> str:
    """The runs by name and result."""
    return "\n".join(f"{found.name}: {result_of(found)}" for found in runs[:TITLED_MAX])


def result_of(found: Run) -> str:
    """All scores of a run in bits per byte, or how far it came."""
    scores = [final for final in found.log.finals if final.rank > 0 and final.label.endswith(EXACT)]
    if not scores and found.score:
        scores = [found.score]
    if scores:
        # A run may have been scored more than once: the last score of each kind counts.
        last = {final.rank: f"{final.bpb:.4f} {RANKS[final.rank]}" for final in scores}
        return ", ".join(last[rank] for rank in sorted(last)) + ", bits per byte"
    steps = curves.train_loss(found)
    return f"no score; {steps[-1].step} steps" if steps else "no score"


def panels(runs: Sequence[Run]) -> list[list[Panel]]:
    """What is drawn, row by row: nothing of which the runs say nothing."""
    shown = [axis for axis in curves.AXES if any(curves.points(curves.train_loss(r), axis) for r in runs)]
    rows: list[list[Panel]] = [
        [partial(_draw_loss, runs=runs, axis=axis, late=False) for axis in shown],
        [partial(_draw_loss, runs=runs, axis=axis, late=True) for axis in shown],
    ]
    if any(curves.validation_bpb(found) for found in runs):
        rows.append([partial(_draw_bits, runs=runs, axis=axis) for axis in shown or ["steps"]])
    times = [time for found in runs for time in curves.step_times(found)]
    if times:
        rows.append([partial(_draw_times, runs=runs), partial(_draw_histogram, runs=runs)])
    if any(time.cause for time in times):
        rows[-1].append(partial(_draw_causes, runs=runs))
    if not any(rows):
        raise RecordError(f"{runs[0].name}: the log has no losses and no scores of training: nothing to draw")
    return rows


def _line(axes: Axes, samples: Sequence[curves.Sample], axis: str, style: str, **look: Any) -> None:
    points = curves.points(samples, axis)
    if points:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, style, **look)


def _label(axes: Axes, axis: str, unit: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 400k tokens, not 400000
    axes.set_xlabel(axis)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)


def _draw_loss(axes: Axes, runs: Sequence[Run], axis: str, late: bool) -> None:
    """Training loss smoothed, each step behind it, and validation; late: the second half alone."""
    validated = False
    for index, found in enumerate(runs):
        loss = curves.train_loss(found)
        smooth = curves.smoothed(loss)
        validation = curves.validation_loss(found)
        if late:
            middle = max((sample.step for sample in loss), default=0) / 2
            loss = [sample for sample in loss if sample.step >= middle]
            smooth = [sample for sample in smooth if sample.step >= middle]
            validation = [sample for sample in validation if sample.step >= middle]
        colour = f"C{index % 10}"
        validated = validated or bool(validation)
        _line(axes, loss, axis, ".", color=colour, markersize=4, alpha=0.35)
        _line(axes, smooth, axis, "-", color=colour, linewidth=1.5, label=found.name)
        _line(axes, validation, axis, "o", color=colour, markersize=5, markeredgecolor="black")
    unit = "nats per token" + (", second half" if late else "")
    _label(axes, axis, unit + (" (o: validation)" if validated else ""))
    if not late:
        axes.legend(fontsize=7)


def _draw_bits(axes: Axes, runs: Sequence[Run], axis: str) -> None:
    """Bits per byte of validations during training."""
    for index, found in enumerate(runs):
        scores = curves.validation_bpb(found)
        _line(axes, scores, axis, "o-", color=f"C{index % 10}", linewidth=1, markersize=4)
    _label(axes, axis, "bits per byte, validation")


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
    """Distribution of step times without slow first ones, which would stretch the axis."""
    for index, found in enumerate(runs):
        times = [t.ms for t in curves.step_times(found) if t.cause != "start"]
        if times:
            axes.hist(times, bins=BINS, histtype="step", color=f"C{index % 10}")
    axes.set_xlabel("ms per step")
    axes.set_ylabel("logged steps")
    axes.grid(alpha=0.3)


def _draw_causes(axes: Axes, runs: Sequence[Run]) -> None:
    """How many slow intervals each cause has."""
    from matplotlib.ticker import MaxNLocator

    counts = Counter(t.cause for found in runs for t in curves.step_times(found) if t.cause)
    causes = [cause for cause in CAUSE_COLOURS if counts[cause]]
    axes.bar(causes, [counts[cause] for cause in causes], color=[CAUSE_COLOURS[cause] for cause in causes])
    axes.set_ylabel("slow steps")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
