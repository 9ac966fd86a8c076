"""`timeline RUN`: draw what `trace` wrote, one row per lane, or merge the files of all ranks."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tools.runs.errors import RecordError
from tools.runs.writing import json_text

COLOURS = {
    "disk_load": "tab:red", "stage": "tab:orange", "gpu_transfer": "tab:purple", "gpu_queue_wait": "black",
    "train": "lightsteelblue", "forward": "tab:blue", "backward": "tab:cyan", "optimizer": "tab:green",
    "val": "tab:olive",
}  # fmt: skip
ENCLOSING = ("train",)  # drawn first, in full height, with what they hold on top


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory with trace_rank<r>.json files")
    parser.add_argument("--out", type=Path, default=Path("timeline.png"), help="default: %(default)s")
    parser.add_argument("--merge", type=Path, metavar="JSON", help="also write the ranks' files as one trace")
    parser.add_argument("--seconds", type=float, nargs=2, metavar=("FROM", "TO"), help="part to draw")
    parser.add_argument("--json", action="store_true", help="print the time of each lane and span as JSON")


def run(args: argparse.Namespace) -> int:
    events = [event for path in trace_files(args.run) for event in read_trace(path)]
    if args.merge:
        args.merge.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    spans = lane_spans(events, tuple(args.seconds) if args.seconds else None)
    draw(spans, args.out, args.seconds)
    totals = {lane: span_totals(found) for lane, found in spans.items()}
    if args.json:
        print(json_text({"file": str(args.out), "seconds": totals}), end="")
        return 0
    print(args.out)
    for lane, seconds in totals.items():
        print(f"  {lane}: " + ", ".join(f"{name} {total:.3f} s" for name, total in seconds.items()))
    return 0


def trace_files(directory: Path) -> list[Path]:
    """Traces of all ranks of a run. Raises RecordError when there is none."""
    files = sorted(directory.glob("trace_rank*.json"))
    if not files:
        raise RecordError(f"{directory}: no trace_rank*.json; run it by `python -m tools trace`")
    return files


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Events of a Chrome trace. Raises RecordError when the file is not one."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: not a trace ({error!r}), expected one of `tools trace`") from error
    return [event for event in events if isinstance(event, dict)]


Spans = dict[str, list[tuple[str, float, float]]]  # per lane: name, start and length in seconds


def lane_spans(events: list[dict[str, Any]], window: tuple[float, float] | None = None) -> Spans:
    """Spans of each lane, seconds from the first one, inside the window."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    complete = [e for e in events if e.get("ph") == "X"]
    if not complete:
        raise RecordError("the trace holds no span: its --steps were never run")
    origin, ranks = min(e["ts"] for e in complete), {e["pid"] for e in complete}
    low, high = window or (0.0, float("inf"))
    spans: Spans = defaultdict(list)
    for event in sorted(complete, key=lambda e: e["ts"]):
        start, length = (event["ts"] - origin) / 1e6, event["dur"] / 1e6
        lane = names.get((event["pid"], event["tid"]), str(event["tid"]))
        if start + length >= low and start <= high:
            name = lane if len(ranks) == 1 else f"rank {event['pid']} {lane}"
            spans[name].append((event["name"], start, length))
    return dict(spans)


def span_totals(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """Seconds per name of span."""
    totals: dict[str, float] = defaultdict(float)
    for name, _, length in spans:
        totals[name] += length
    return dict(totals)


def draw(spans: Spans, path: Path, window: list[float] | None = None) -> None:
    """One row per lane, a bar per span, coloured by name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 0.9 + 0.55 * len(spans)), layout="constrained")
    seen: dict[str, Any] = {}
    for row, found in enumerate(spans.values()):
        for name, start, length in sorted(found, key=lambda span: span[0] not in ENCLOSING):
            height = 0.8 if name in ENCLOSING else 0.5
            colour = COLOURS.get(name, "tab:gray")
            edge = "white" if name in ENCLOSING else colour  # its own, so that a short one is seen
            bars = axes.barh(row, length, height, start, color=colour, edgecolor=edge, linewidth=0.3)
            seen.setdefault(name, bars)
    axes.set_yticks(range(len(spans)), list(spans))
    axes.invert_yaxis()
    if window:
        axes.set_xlim(*window)
    axes.set_xlabel("seconds")
    figure.legend(seen.values(), seen, loc="outside lower center", ncols=8, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
