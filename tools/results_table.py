"""The tables of results in README.md, made from the summaries of the records: `make docs` writes them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results:begin (make docs) -->", "<!-- results:end -->"
SCORES = {"roundtrip": "round-trip", "sliding_window": "sliding window", "legal_ttt": "legal TTT"}
HEAD = f"| record | seeds | parameters | steps | {' | '.join(SCORES.values())} | code and weights |"


def summaries(folder: Path) -> list[dict[str, Any]]:
    """What the runs of a record left."""
    paths = sorted(folder.glob("summary_seed*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def parameters(folder: Path) -> int:
    """The count that the first log tells."""
    log = min(folder.glob("train_seed*.log")).read_text(encoding="utf-8")
    return int(log.split("model_params:")[1].split()[0])


def row(folder: Path) -> str:
    """One record: means over its seeds, and the most bytes."""
    runs = summaries(folder)
    link = f"[{folder.name}](records/{folder.parent.name}/{folder.name}/)"
    cells = [link, str(len(runs)), f"{parameters(folder):,}"]
    cells.append(f"{statistics.mean(run['steps'] for run in runs):.0f}")
    for name in SCORES:
        found = [run["losses"][name]["bits_per_byte"] for run in runs if name in run["losses"]]
        cells.append(f"{statistics.mean(found):.4f}" if found else "-")
    cells.append(f"{max(run['limits']['artifact_bytes']['value'] for run in runs):,}")
    return f"| {' | '.join(cells)} |"


def tables(records: Path) -> str:
    """A table per track, the best record first."""
    parts = []
    for track in sorted(records.glob("track_*")):
        folders = [path for path in track.iterdir() if (path / "submission.json").is_file()]
        folders.sort(key=lambda path: json.loads((path / "submission.json").read_text("utf-8"))["val_bpb"])
        limits = {summaries(folder)[0]["config"]["MAX_WALLCLOCK_SECONDS"] for folder in folders}
        seconds = " or ".join(f"{float(limit):g}" for limit in sorted(limits))
        title = f"`{track.name}`, {seconds} s of training, bits per byte:"
        lines = [title, "", HEAD, "|" + "---|" * (HEAD.count("|") - 1), *map(row, folders), ""]
        parts.append("\n".join(lines))
    return "\n".join(parts)


def with_tables(readme: str) -> str:
    """README.md with its tables of results made anew."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{tables(REPO / 'records')}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    path = REPO / "README.md"
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
