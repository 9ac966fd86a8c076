"""`plot RUN…`: plot training and validation loss by tokens, the final scores, and milliseconds per step.

With two arguments, runs or records, it also plots new − base with a 95% band, seed by seed if they have the
same seeds. `--all` adds loss by seconds, the second half of the loss, bits per byte, and the distribution of
step times. `--follow` redraws the plot while the runs go on.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.compare import curves
from tools.runs.errors import RecordError
from tools.runs.logs import EXACT, Final
from tools.runs.reading import path_of
from tools.runs.runs import LOG, SUMMARY, Group, Run, load_group, output_path
from tools.runs.stats import mean_and_deviation
from tools.runs.writing import figure_path, print_json, pyplot_without_display, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#4b5563")
CAUSE_COLORS = {"start": "#9333ea", "shard": "#dc2626", "validation": "#059669", "other": "#6b7280"}
CAUSE_NAMES = {"start": "at the start", "shard": "waiting for data", "validation": "after a validation",
               "other": "cause unknown"}
LOOK = {
    "font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#9ca3af", "axes.grid": True,
    "grid.color": "#e5e7eb", "axes.axisbelow": True, "legend.framealpha": 0.85, "legend.edgecolor": "white",
    "xtick.color": "#374151", "ytick.color": "#374151", "figure.facecolor": "white",
}
BINS = 40
TITLED_MAX = 6  # runs that the title names
NAME_MAX = 36  # characters of a run's name in a figure
SCORE_NAMES = {1: "round trip", 2: "sliding window", 3: "test-time training"}  # of `Final.rank`
STEEP_SHARE = 0.04  # of the run: its first losses are so high that the rest would look flat
TALL_STEPS = 2.5  # times the median, above which a step time is drawn at the edge
TEXT_SHARE = 0.055  # of a panel's height, that a line of text takes
INCHES = (7.0, 4.6)  # of a panel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN",
                        help="run directories or records folders; of two, the first is the base")
    parser.add_argument(
        "--out", type=Path, help="PNG or SVG file (default: plot.png in the first run directory)"
    )
    parser.add_argument("--all", action="store_true", help="more panels")
    parser.add_argument("--json", action="store_true", help="print step-time statistics as JSON")
    parser.add_argument("--follow", action="store_true", help="redraw until all runs have finished")
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS",
                        help="how often --follow redraws (default: 10)")


def run(args: argparse.Namespace) -> int:
    name = "plot.png" if len(args.runs) == 1 else f"plot_of_{len(args.runs)}.png"
    out = figure_path(args.out or output_path(args.runs[0], name))
    if args.follow:
        follow(args.runs, out, args.every, args.all)
    groups = [load_group(path) for path in args.runs]
    draw(groups, out, args.all)
    statistics_of_runs = [step_statistics(found) for group in groups for found in group.runs]
    if args.json:
        print_json({"file": str(out), "runs": statistics_of_runs})
        return 0
    print(path_of(out))
    for found in statistics_of_runs:
        slow = ", ".join(f"{count} {CAUSE_NAMES[cause]}" for cause, count in found["slow"].items())
        print(f"  {found['run']}: median {found['median_ms']} ms/step; slow steps: {slow or 'none'}")
    return 0


def follow(paths: Sequence[Path], out: Path, seconds: float, everything: bool) -> None:
    """Draw again and again while a run has no summary; Ctrl-C ends it, and leaves the last drawing."""
    while not all((path / SUMMARY).is_file() for path in paths if (path / LOG).is_file()):
        try:
            groups = [load_group(path) for path in paths]
            draw(groups, out, everything)
            runs = [found for group in groups for found in group.runs]
            results = "; ".join(f"{found.name}: {result_of(found)}" for found in runs)
            print(f"{path_of(out)}: {results}", flush=True)
        except RecordError as error:
            print(f"nothing to draw yet: {error}", flush=True)
        time.sleep(seconds)


def step_statistics(found: Run) -> dict[str, Any]:
    """Median step time, the number of slow intervals with their causes, and their cost."""
    times = curves.step_times(found)
    median = curves.median_ms(times) if times else None
    return {
        "run": found.name,
        "intervals": len(times),
        "median_ms": round(median, 3) if median is not None else None,
        "slow": dict(Counter(t.cause for t in times if t.cause)),
        "slow_steps": [{"step": t.step, "ms": round(t.ms, 3), "cause": t.cause} for t in times if t.cause],
    }


Panel = Callable[["Axes"], None]


def draw(groups: Sequence[Group], out: Path, everything: bool = False) -> None:
    """Write the figure atomically; no display is needed."""
    pyplot = pyplot_without_display()
    rows = panels(groups, everything)
    with pyplot.rc_context(LOOK):
        text = title_of(groups)
        inches = INCHES[0] * max(map(len, rows)), INCHES[1] * len(rows) + 0.4 + 0.2 * len(text.splitlines())
        figure = pyplot.figure(figsize=inches, constrained_layout=True)
        title = figure.suptitle(text, x=0.01, ha="left", fontsize=13)
        too_wide = title.get_window_extent().width / (0.98 * figure.bbox.width)
        title.set_fontsize(13 / max(1.0, too_wide))
        try:
            columns = math.lcm(*map(len, rows))
            grid = figure.add_gridspec(len(rows), columns)
            for number, row in enumerate(rows):
                span = columns // len(row)
                for place, panel in enumerate(row):
                    panel(figure.add_subplot(grid[number, place * span : (place + 1) * span]))
            write_figure(out, figure, dpi=130)
        finally:
            pyplot.close(figure)


def title_of(groups: Sequence[Group]) -> str:
    """The groups by name and result."""
    lines = []
    for group in groups[:TITLED_MAX]:
        result = result_of(group.runs[0]) if len(group.runs) == 1 else mean_result(group)
        lines.append(f"{shown(group.name)}: {result}")
    if len(groups) > TITLED_MAX:
        lines.append(f"and {len(groups) - TITLED_MAX} more")
    return "\n".join(lines)


def mean_result(group: Group) -> str:
    """The mean score of several seeds."""
    scores = group.scores("bpb")
    kinds = {SCORE_NAMES[found.score.rank] for found in group.runs if found.score}
    if not scores:
        return f"no score; {len(group.runs)} seeds"
    kind = ", ".join(sorted(kinds))
    return f"{mean_and_deviation(scores, '.4f')} bits per byte ({kind}), {len(scores)} seeds"


def result_of(found: Run) -> str:
    """The score of a run in bits per byte, and what it took, or how far it came."""
    log = found.log
    if found.score is None:
        steps = curves.train_loss(found)
        return f"no score; {steps[-1].step} steps" if steps else "no score"
    parts = [f"{found.score.bpb:.4f} bits per byte ({SCORE_NAMES[found.score.rank]})"]
    if log.steps_done is not None:
        parts.append(f"{log.steps_done:,} steps")
    if log.train_seconds is not None:
        parts.append(f"{log.train_seconds:.0f} s")
    if log.total_bytes is not None:
        parts.append(f"{log.total_bytes.bytes:,} bytes")
    if device := log.conditions.get("device"):
        parts.append(device)
    return ", ".join(parts)


def final_scores(found: Run) -> list[Final]:
    """The last score of each kind, in the order of the stages."""
    exact = [final for final in found.log.finals if final.rank > 0 and final.label.endswith(EXACT)]
    if not exact and found.score:
        exact = [found.score]
    last = {final.rank: final for final in exact}
    return [last[rank] for rank in sorted(last)]


def panels(groups: Sequence[Group], everything: bool = False) -> list[list[Panel]]:
    """What is drawn, row by row: nothing of which the runs say nothing."""
    runs = colored(groups)
    has_tokens = any(sample.tokens for found, _, _ in runs for sample in curves.train_loss(found))
    axis = "tokens" if has_tokens else "steps"
    has_loss = any(curves.train_loss(found) or curves.validation_loss(found) for found, _, _ in runs)
    has_times = any(curves.step_times(found) for found, _, _ in runs)
    first: list[Panel] = []
    if has_loss:
        first.append(partial(_draw_loss, runs=runs, axis=axis))
    if len(groups) == 2 and paired_losses(*groups):
        first.append(partial(_draw_difference, base=groups[0], new=groups[1], axis=axis))
    if has_times:
        first.append(partial(_draw_times, runs=runs))
    rows = [first]
    if everything:
        rows += more_panels(runs, axis, has_times)
    rows = [row for row in rows if row]
    if not rows:
        name = runs[0].run.name
        raise RecordError(f"{name}: the log has neither losses nor scores of training: nothing to draw")
    return rows


def more_panels(runs: Sequence[Colored], axis: str, has_times: bool) -> list[list[Panel]]:
    """The rows of --all."""
    losses: list[Panel] = []
    if any(curves.train_loss(found) for found, _, _ in runs):
        losses.append(partial(_draw_loss, runs=runs, axis=axis, late=True))
    if any(sample.seconds for found, _, _ in runs for sample in curves.train_loss(found)):
        losses.append(partial(_draw_loss, runs=runs, axis="seconds"))
    others: list[Panel] = []
    if any(curves.validation_bpb(found) for found, _, _ in runs):
        others.append(partial(_draw_bits, runs=runs, axis=axis))
    if has_times:
        others.append(partial(_draw_histogram, runs=runs))
    return [losses, others]


class Colored(NamedTuple):
    """A run as it is drawn: of several groups in the color of its group, else in one of its own."""

    run: Run
    color: str
    label: str | None  # in a legend; None: the run before it has named their group


def shown(name: str) -> str:
    """A name in a figure: of one that is too long, the beginning and the end, which often has the seed."""
    half = NAME_MAX // 2
    return name if len(name) <= NAME_MAX else f"{name[:half]}…{name[-half:]}"


def colored(groups: Sequence[Group]) -> list[Colored]:
    """Every run with its color and its label."""
    colors = itertools.cycle(COLORS)
    if len(groups) == 1:
        return [Colored(found, next(colors), shown(found.name)) for found in groups[0].runs]
    drawn = []
    for group in groups:
        color = next(colors)
        for number, found in enumerate(group.runs):
            drawn.append(Colored(found, color, shown(group.name) if number == 0 else None))
    return drawn


def _line(axes: Axes, samples: Sequence[curves.Sample], axis: str, style: str, **look: Any) -> None:
    points = curves.points(samples, axis)
    if points:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, style, **look)


def _label(axes: Axes, title: str, axis: str, unit: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 400k tokens, not 400000
    axes.set_title(title)
    axes.set_xlabel({"tokens": "training tokens", "seconds": "seconds of training"}.get(axis, axis))
    axes.set_ylabel(unit)


def _draw_loss(axes: Axes, runs: Sequence[Colored], axis: str, late: bool = False) -> None:
    """Smoothed training loss over its logged steps, validations, and the final scores."""
    validated = False
    is_single = len(runs) == 1
    heights: list[float] = []  # of all that must be seen
    for found, color, label in runs:
        loss, validation = curves.train_loss(found), curves.validation_loss(found)
        end = max((sample.step for sample in (*loss, *validation)), default=0)
        since = end / 2 if late else 0
        loss = [sample for sample in loss if sample.step >= since]
        smooth = [sample for sample in curves.smoothed(curves.train_loss(found)) if sample.step >= since]
        validation = [sample for sample in validation if sample.step >= since]
        points = curves.points(loss, axis)
        if points:
            xs, ys = zip(*points, strict=True)
            axes.scatter(xs, ys, s=9, color=color, alpha=0.25, linewidths=0)
        _line(axes, smooth, axis, "-", color=color, linewidth=1.8, label="training" if is_single else label)
        name = "validation" if is_single else None
        look = {"color": color, "markersize": 5.5, "markerfacecolor": "white", "linewidth": 1.0}
        _line(axes, validation, axis, "o--", label=name, **look)
        validated = validated or bool(validation)
        late_enough = [sample for sample in (*smooth, *validation) if sample.step >= STEEP_SHARE * end]
        heights += [sample.value for sample in late_enough if math.isfinite(sample.value)]
        if not late and len(runs) <= TITLED_MAX:
            heights += _draw_scores(axes, found, color, axis)
    if heights:
        low, high = min(heights), max(heights)
        room = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - room, high + room)
    if not late:
        ends = [place for found, _, _ in runs for place in _places(found, axis)]
        axes.set_xlim(-0.02 * max(ends, default=1.0), 1.06 * max(ends, default=1.0))
    if is_single and not late:
        _name_scores(axes, final_scores(runs[0].run))
    title = "Loss in the second half" if late else "Loss"
    marks = " (o: validation)" if validated and not is_single else ""
    _label(axes, title, axis, f"nats per token{marks}")
    axes.legend(loc="upper right")


def _draw_scores(axes: Axes, found: Run, color: str, axis: str) -> list[float]:
    """The final scores as ticks after the end of the curve, at their nats per token. Returns these."""
    end = max(_places(found, axis), default=0.0)
    heights = []
    for final in final_scores(found):
        heights.append(final.loss)
        axes.plot([1.01 * end, 1.05 * end], [final.loss] * 2, "-", color=color, linewidth=3)
    return heights


def _places(found: Run, axis: str) -> list[float]:
    """Where the losses of a run are on this axis."""
    samples = (*curves.train_loss(found), *curves.validation_loss(found))
    return [place for sample in samples if (place := sample.at(axis)) is not None]


def _name_scores(axes: Axes, finals: Sequence[Final]) -> None:
    """The final scores in words, right of the edge at their heights; moved apart where two are close."""
    low, high = axes.get_ylim()
    apart = TEXT_SHARE * (high - low)
    in_order = sorted(finals, key=lambda final: -final.loss)
    texts = [f"{final.bpb:.4f}  {SCORE_NAMES[final.rank]}" for final in in_order]
    heights: list[float] = []
    for final in in_order:
        heights.append(min(final.loss, heights[-1] - apart) if heights else final.loss)
    if texts:
        texts.append("bits per byte:")
        heights.append(heights[0] + apart)
    for text, height in zip(texts, heights, strict=True):
        axes.annotate(text, (1.01, height), xycoords=("axes fraction", "data"), va="center", fontsize=10,
                      annotation_clip=False)


def _draw_bits(axes: Axes, runs: Sequence[Colored], axis: str) -> None:
    """Bits per byte of validations during training."""
    for found, color, label in runs:
        scores = curves.validation_bpb(found)
        _line(axes, scores, axis, "o-", color=color, linewidth=1.2, markersize=4, label=label)
    _label(axes, "Validation", axis, "bits per byte")
    axes.legend(loc="upper right")


Differences = dict[int, list[float]]  # by step: new − base of each pair of runs that have it


def paired_losses(base: Group, new: Group) -> Differences:
    """Differences of the training loss at the steps that both runs of a pair have logged.

    Pairs are the same seeds; two single runs are one, whatever their seeds.
    """
    before = {found.log.seed: found for found in base.runs}
    after = {found.log.seed: found for found in new.runs}
    pairs = [(before[seed], after[seed]) for seed in after if seed in before]
    if not pairs and len(base.runs) == len(new.runs) == 1:
        pairs = [(base.runs[0], new.runs[0])]
    found: Differences = {}
    for one, other in pairs:
        values = {sample.step: sample.value for sample in curves.train_loss(one)}
        for sample in curves.train_loss(other):
            if sample.step in values:
                found.setdefault(sample.step, []).append(sample.value - values[sample.step])
    return {step: values for step, values in sorted(found.items()) if all(map(math.isfinite, values))}


def _draw_difference(axes: Axes, base: Group, new: Group, axis: str) -> None:
    """New − base: each step, the mean over its neighbors, and the 95% band of that mean."""
    differences = paired_losses(base, new)
    places = {sample.step: sample.at(axis) for found in new.runs for sample in curves.train_loss(found)}
    known = {step: x for step in differences if (x := places[step]) is not None}
    steps, xs = list(known), list(known.values())
    means, halves = curves.band([differences[step] for step in steps])
    for step, x in known.items():
        here = differences[step]
        axes.scatter([x] * len(here), here, s=9, color="#6b7280", alpha=0.35, linewidths=0)
    lower = [mean - half for mean, half in zip(means, halves, strict=True)]
    upper = [mean + half for mean, half in zip(means, halves, strict=True)]
    band = "95% band of the mean"
    axes.fill_between(xs, lower, upper, color=COLORS[1], alpha=0.18, linewidth=0, label=band)
    axes.plot(xs, means, "-", color=COLORS[1], linewidth=1.8, label="mean of neighboring steps")
    axes.axhline(0.0, color="#111827", linewidth=1.0)
    settled = [i for i, step in enumerate(steps) if step >= STEEP_SHARE * steps[-1]]
    height = 1.2 * max(max(abs(lower[i]), abs(upper[i])) for i in settled) or 0.1
    axes.set_ylim(-height, height)
    count = max(map(len, differences.values()))
    seeds = f", {count} seeds" if count > 1 else ""
    title = f"{shown(new.name)} − {shown(base.name)}{seeds}"
    _label(axes, title, axis, "training loss; below 0: new is better")
    axes.legend(loc="upper right")


def _draw_times(axes: Axes, runs: Sequence[Colored]) -> None:
    """Step time by step with its median; slow intervals marked in the color of their cause."""
    drawn = [(found, curves.step_times(found.run)) for found in runs]
    drawn = [(found, times) for found, times in drawn if times]
    median_of = [curves.median_ms(times) for _, times in drawn]
    longest = max(t.ms for _, times in drawn for t in times)
    top = min(TALL_STEPS * max(median_of), longest)
    labels = median_labels([found for found, _ in drawn], median_of)
    beyond = 0
    for (found, times), median, label in zip(drawn, median_of, labels, strict=True):
        xs, heights = [t.step for t in times], [min(t.ms, top) for t in times]
        beyond += sum(t.ms > top for t in times)
        axes.plot(xs, heights, color=found.color, linewidth=1.2, alpha=0.8)
        axes.axhline(median, color=found.color, linewidth=1.0, linestyle="--", label=label)
    for cause, color in CAUSE_COLORS.items():
        slow = [t for _, times in drawn for t in times if t.cause == cause]
        if slow:
            xs, heights = [t.step for t in slow], [min(t.ms, top) for t in slow]
            axes.scatter(xs, heights, s=22, color=color, label=f"slow: {CAUSE_NAMES[cause]}", zorder=3)
    edge = f" ({beyond} beyond the edge)" if beyond else ""
    _label(axes, "Step time", "steps", f"milliseconds per step{edge}")
    # The legend lies above the curves. One of many lines has a smaller font.
    lines = len(axes.get_legend_handles_labels()[1])
    points, line_share = (8.5, 0.055) if lines > 3 else (LOOK["font.size"], 0.07)
    axes.set_ylim(0, top / (1 - min(0.04 + line_share * lines, 0.6)))
    axes.legend(loc="upper right", fontsize=points)


def median_labels(runs: Sequence[Colored], medians: Sequence[float]) -> list[str | None]:
    """What a legend says of each run's median; the first of a group says it for all of them."""
    starts = [i for i, found in enumerate(runs) if i == 0 or found.label]
    labels: list[str | None] = [None] * len(runs)
    for start, stop in zip(starts, [*starts[1:], len(runs)], strict=True):
        low, high = min(medians[start:stop]), max(medians[start:stop])
        median = f"median {low:.4g} ms" if low == high else f"medians {low:.4g} to {high:.4g} ms"
        labels[start] = median if len(runs) == 1 else f"{runs[start].label}: {median}"
    return labels


def _draw_histogram(axes: Axes, runs: Sequence[Colored]) -> None:
    """Distribution of step times without slow first ones, which would stretch the axis."""
    for found, color, label in runs:
        times = [t.ms for t in curves.step_times(found) if t.cause != "start"]
        if times:
            axes.hist(times, bins=BINS, histtype="step", linewidth=1.4, color=color, label=label)
    _label(axes, "Distribution of step times", "milliseconds per step", "logged steps")
    axes.legend(loc="upper right")
