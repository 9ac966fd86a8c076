"""`timeline RUN`: draw the trace that TRACE_STEPS recorded, one row per lane, or merge the ranks' files."""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from tools.runs.errors import RecordError
from tools.runs.folder import number
from tools.runs.reading import exact_text
from tools.runs.writing import figure_path, print_json, pyplot_without_display, write_figure, write_text

COLORS = {
    "disk_load": "tab:red", "disk_idle": "mistyrose", "stage": "tab:orange", "gpu_transfer": "tab:purple",
    "gpu_queue_wait": "black",
    "chunk": "lightgray", "forward": "tab:blue", "backward": "tab:cyan", "grad_clip": "tab:pink",
    "optimizer": "tab:green", "val": "tab:olive",
}
ENCLOSING = "chunk"  # a step: drawn in full height, with its parts on top
DARK = ("disk_load", "gpu_queue_wait", "forward", "optimizer", "gpu_transfer")  # bars with white labels
ABOVE, INSIDE, BELOW = -0.33, 0.0, 0.33  # heights of a label, from the middle of its row
LETTER_SHARE = 0.0053  # width of a letter, as a share of the drawing
SHORT_SPANS_LABELED = 20  # in a lane that has more, none of them gets a label


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory with trace_rank<r>.json files")
    parser.add_argument("--out", type=Path, help="PNG or SVG file (default: RUN/timeline.png)")
    parser.add_argument("--merge", type=Path, metavar="JSON", help="also write the ranks' files as one trace")
    parser.add_argument("--seconds", type=float, nargs=2, metavar=("FROM", "TO"), help="the part to draw")
    parser.add_argument("--json", action="store_true", help="print the times of all lanes and spans as JSON")


def run(args: argparse.Namespace) -> int:
    out = figure_path(args.out or args.run / "timeline.png")
    events: list[dict[str, Any]] = []
    for path in trace_files(args.run):
        events += read_trace(path)
    if args.merge:
        write_text(args.merge, json.dumps({"traceEvents": events}))
    window = Window(*args.seconds) if args.seconds else None
    spans = lane_spans(events, window)
    draw(spans, out, window)
    totals = {lane: span_totals(found) for lane, found in spans.items()}
    if args.json:
        print_json({"file": str(out), "seconds": totals, "table": span_table(spans)})
        return 0
    print(out)
    for row in span_table(spans):
        print("  {lane}/{name} count:{count} mean_ms:{mean_ms:.3f} min_ms:{min_ms:.3f} max_ms:{max_ms:.3f} "
              "seconds:{seconds:.3f}".format_map(row))
    return 0


def trace_files(directory: Path) -> list[Path]:
    """Traces of all ranks of a run. Raises RecordError when there is none."""
    files = sorted(directory.glob("trace_rank*.json"))
    if not files:
        raise RecordError(f"{directory}: no trace_rank*.json; run it with TRACE_STEPS=1:11, say")
    return files


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Well-formed events of a Chrome trace. Raises RecordError when the file is not one."""
    try:
        events = json.loads(exact_text(path.read_bytes()))["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"{path}: not a trace ({error!r}), expected one that TRACE_STEPS wrote") from error
    if not isinstance(events, list):
        raise RecordError(f"{path}: `traceEvents` is not a list; expected a trace that TRACE_STEPS wrote")
    return [event for event in events if isinstance(event, dict) and _is_whole(event)]


def _is_whole(event: dict[str, Any]) -> bool:
    """Whether an event that is drawn has all its parts, each of the kind that TRACE_STEPS writes."""
    if event.get("name") == "thread_name":
        args = event.get("args")
        named = isinstance(args, dict) and isinstance(args.get("name"), str)
        return named and all(isinstance(event.get(key), int) for key in ("pid", "tid"))
    if event.get("ph") != "X":
        return True
    times = [number(event.get(key)) for key in ("pid", "tid", "ts", "dur")]
    return isinstance(event.get("name"), str) and all(t is not None and math.isfinite(t) for t in times)


class Window(NamedTuple):
    """The part of a trace to draw, in seconds from its first span."""

    start: float
    end: float


class Span(NamedTuple):
    """Something that went on; in seconds from the first span of the trace."""

    name: str
    start: float
    length: float
    label: str  # with the number of the step or the batch


def lane_spans(events: list[dict[str, Any]], window: Window | None = None) -> dict[str, list[Span]]:
    """The spans of each lane that overlap the window, by their beginning; lanes in the order of the file."""
    lanes: dict[tuple[int, int], str] = {}  # by process and thread
    complete = []
    for event in events:
        if event.get("name") == "thread_name":
            lanes[event["pid"], event["tid"]] = event["args"]["name"]
        elif event.get("ph") == "X":
            complete.append(event)
    if not complete:
        raise RecordError("the trace has no spans: its steps never ran")
    complete.sort(key=lambda event: event["ts"])
    origin = complete[0]["ts"]
    several_ranks = len({event["pid"] for event in complete}) > 1
    found: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for event in complete:
        span = Span(event["name"], (event["ts"] - origin) / 1e6, event["dur"] / 1e6, span_label(event))
        if window is None or overlaps(span, window):
            found[event["pid"], event["tid"]].append(span)
    spans = {}
    for rank, thread in sorted(found):
        lane = lanes.get((rank, thread), str(thread))
        if several_ranks:
            lane = f"rank {rank} {lane}"
        spans[lane] = found[rank, thread]
    return spans


def span_label(event: dict[str, Any]) -> str:
    """The label of a span: its name, and which step or batch it is."""
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    if event["name"] == ENCLOSING:
        return f"step {args.get('step', '')}"
    return f"{event['name']} {args['batch']}" if "batch" in args else event["name"]


def overlaps(span: Span, window: Window) -> bool:
    """Whether a part of the span is in the window."""
    return span.start <= window.end and span.start + span.length >= window.start


def span_totals(spans: list[Span]) -> dict[str, float]:
    """Seconds per name of span."""
    totals: dict[str, float] = defaultdict(float)
    for span in spans:
        totals[span.name] += span.length
    return dict(totals)


def span_table(spans: dict[str, list[Span]]) -> list[dict[str, Any]]:
    """For each lane and each name of span on it: how many there are, and how long they are."""
    table = []
    for lane, found in spans.items():
        lengths: dict[str, list[float]] = defaultdict(list)
        for span in found:
            lengths[span.name].append(1e3 * span.length)
        for name, ms in sorted(lengths.items()):
            row = {"lane": lane, "name": name, "count": len(ms), "mean_ms": sum(ms) / len(ms)}
            table.append({**row, "min_ms": min(ms), "max_ms": max(ms), "seconds": sum(ms) / 1e3})
    return table


def draw(spans: dict[str, list[Span]], path: Path, window: Window | None = None) -> None:
    """One row per lane, a bar per span, colored by name and labeled where there is room."""
    pyplot = pyplot_without_display()
    figure, axes = pyplot.subplots(figsize=(11, 0.9 + 0.75 * len(spans)), layout="constrained")
    every = [span for found in spans.values() for span in found]
    shown = window or Window(min(s.start for s in every), max(s.start + s.length for s in every))
    length = shown.end - shown.start
    unit, per_second = ("seconds", 1.0) if length > 1 else ("milliseconds", 1e3)
    legend: dict[str, Any] = {}  # per name without a label: its first bar
    for row, found in enumerate(spans.values()):
        labels = place_labels(found, shown)
        for span in sorted(found, key=lambda span: -span.length):  # short ones on top
            color = COLORS.get(span.name, "tab:gray")
            # The edge has the color of the bar, so that a short span is seen.
            height, edge = (0.9, "white") if span.name == ENCLOSING else (0.4, color)
            bars = axes.barh(row, per_second * span.length, height, per_second * span.start, color=color,
                             edgecolor=edge, linewidth=0.8)
            if span.name not in {labeled.name for labeled, _, _ in labels}:
                legend.setdefault(span.name, bars)
        for span, begin, height in labels:
            color = "white" if span.name in DARK and height == INSIDE else "black"
            axes.text(per_second * begin, row + height, span.label, fontsize=7, va="center", color=color)
    axes.set_yticks(range(len(spans)), list(spans))
    axes.set_ylim(len(spans) - 0.5, -0.5)
    axes.set_xlim(per_second * (shown.start - 0.01 * length), per_second * (shown.end + 0.01 * length))
    axes.set_xlabel(unit)
    if legend:
        figure.legend(legend.values(), legend, loc="outside lower center", ncols=5, frameon=False)
    write_figure(path, figure, dpi=120)
    pyplot.close(figure)


def place_labels(spans: list[Span], shown: Window) -> list[tuple[Span, float, float]]:
    """The spans of a lane that get a label, where it begins in seconds, and its height in the row.

    A label is in its bar if that is long enough, else below it, unless its name is in another bar or
    another label is in the way.
    """
    letter = (shown.end - shown.start) * LETTER_SHARE
    labels = []
    short = []
    for span in spans:
        begin = max(span.start, shown.start)
        room = min(span.start + span.length, shown.end) - begin
        needed = letter * len(span.label)
        if needed > room:
            short.append((span, min(begin, shown.end - needed), needed))
        elif span.name == ENCLOSING:
            labels.append((span, begin + letter / 2, ABOVE))
        else:
            labels.append((span, begin + (room - needed) / 2, INSIDE))
    in_bars = {span.name for span, _, _ in labels} | {ENCLOSING}
    free_from = shown.start
    short = [one for one in short if one[0].name not in in_bars]
    for span, begin, needed in short if len(short) <= SHORT_SPANS_LABELED else []:
        if begin >= free_from:
            labels.append((span, begin, BELOW))
            free_from = begin + needed
    return labels
