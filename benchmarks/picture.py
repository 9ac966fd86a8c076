"""The pictures of README.md and RESULTS.md, drawn from raw figures and from the table of docs/estimate.md.

    python -m benchmarks.picture [--out benchmarks/results]

ladder.png: the estimate for 8 GPUs, part by part, beside public records. results.png, left: a public script
and this one after the same seconds of one thread. Right: ways to score the same model. A dot is a seed, a
bar is a mean. sizes.png, left: what two systems bring over the baseline's settings at three sizes. Right:
what two quantizers lose over the bits of a weight. Lower is better.
"""

import argparse
import re
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import answers, paired, results
from data.files import escape_unprintable
from tools import REPO

BESIDE = "beside-fineweb_sample_sp1024-60s"
SCORING = "0.5/ttt-fineweb_sample_sp1024"  # frozen: the table of these figures is in results/0.5.md
WAYS = ("round trip", "sliding window", "SGD", "LoRA")
STACKS = "experiments-stacks-fineweb_sample_sp1024-"
STACK_RUNS = {equal: [run for _, run in runs] for equal, runs in answers.STACKS.items() if runs[1:]}
QUANTIZERS = "divergence-35.9M"
ESTIMATE = REPO / "docs" / "estimate.md"
OF_THE_DEFAULT = 2  # column of its table
PUBLIC = {"#1855": 1.0611, "#2135": 1.0565}  # as docs/estimate.md has them
BESIDE_THE_AXES = ("axes fraction", "data")
RUNGS = {  # the beginning of a row: its name in the picture
    "before quantization": "#1855 before quantization", "MATRIX_LR": "higher learning rate",
    "quantization": "quantization by GPTQ", "trellis": "trellis, column steps",
    "less left": "less left to repair", "adapters": "test-time adapters", "step speed": "faster steps",
    "a reserve": "longer reserve", "estimate": "sum",
}  # fmt: skip
SIDES = {
    "theirs": "the challenge's script", "ours as theirs": "its settings in this file",
    "ours in order": "this file's demo recipe,\nunshuffled",
    "theirs shuffled": "the challenge's script,\non shuffled data",
    "ours as theirs, shuffled": "its settings in this file,\nshuffled",
    "ours": "this file's demo recipe",
}  # fmt: skip


def rungs() -> list[tuple[str, float, float]]:
    """Name, mBPB (of the estimate: bits per byte) and half-width of each row that moves the estimate."""
    text = ESTIMATE.read_text(encoding="utf-8").split("## The estimate")[1].split("\n## ")[0]
    found = []
    for line in re.findall(r"^\|.*\|$", text, re.MULTILINE):
        cells = [cell.strip(" *`") for cell in line.split("|")[1:-1]]
        name, of_default = cells[0], cells[OF_THE_DEFAULT]
        figures = re.findall(r"[+-]?\d+\.\d+", of_default)
        for key, label in RUNGS.items():
            if figures and name.startswith(key):
                found.append((label, float(figures[0]), float(figures[1]) if figures[1:] else 0.0))
    return found


def headline() -> tuple[float, float]:
    """What the page prints, rounded from its table and two other routes: bits per byte and half-width."""
    text = ESTIMATE.read_text(encoding="utf-8")
    found = re.search(r"^\*\*(\d\.\d+) ± (\d\.\d+) bits per byte", text, re.MULTILINE)
    assert found, f"{ESTIMATE} does not begin with its estimate"
    return float(found[1]), float(found[2])


def with_half_width(value: str, half: float) -> str:
    """A value with its half-width, if it has one."""
    return f"{value} ± {half:.4f}" if half else value


def draw_ladder(axes: Axes) -> None:
    """Each part as a bar from the sum before it to the sum after it, then the sum, then the estimate."""
    rows = rungs()
    at = rows[0][1] / 1000  # bits per byte
    axes.plot([at], [0], "o", color="black")
    texts = [f"{at:.4f}"]
    for place, (_, value, half) in list(enumerate(rows))[1:-1]:
        color = "tab:red" if value > 0 else "tab:green"
        axes.barh(place, value / 1000, left=at, height=0.5, color=color, alpha=0.8)
        texts.append(with_half_width(f"{value / 1000:+.4f}", half / 1000))
        at += value / 1000
    last = len(rows) - 1
    names = [name for name, _, _ in rows]
    names.append("estimate, by three routes")
    for place, (total, half) in enumerate((rows[last][1:], headline()), start=last):
        axes.errorbar([total], [place], xerr=[half], fmt="o", color="black", capsize=4)
        texts.append(with_half_width(f"{total:.4f}", half))
    for place, text in enumerate(texts):
        axes.annotate(text, (1.01, place), xycoords=BESIDE_THE_AXES, va="center", fontsize=9)
    for name, score in PUBLIC.items():
        axes.axvline(score, color="tab:blue", linestyle=":")
        label = f"{name}\n{score:.4f}"
        axes.annotate(label, (score, 1.02), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(1.052, 1.075)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("bits per byte, lower is better. An estimate: not run on eight GPUs")


def draw_rows(axes: Axes, rows: dict[str, list[float]], told: dict[str, str]) -> None:
    """A row for each name: a dot for each seed, a bar at their mean, and a text at the right."""
    for place, (name, scores) in enumerate(rows.items()):
        axes.plot(scores, [place] * len(scores), "o", color="tab:blue", alpha=0.6)
        axes.plot([statistics.mean(scores)], [place], "|", color="black", markersize=18)
        axes.annotate(told[name], (1.02, place), xycoords=BESIDE_THE_AXES, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("bits per byte, lower is better")


def draw_beside(axes: Axes, measured: dict[str, Any]) -> None:
    """All sides after the same seconds; difference to the first, and the bytes of the weights."""
    runs = {SIDES[side]: measured["rows"][side] for side in SIDES if side in measured["rows"]}
    scores = {name: [run["val_bpb"] for run in of] for name, of in runs.items()}
    first = statistics.mean(scores[SIDES["theirs"]])
    told: dict[str, str] = {}
    for name, of in runs.items():
        mean, size = statistics.mean(scores[name]), statistics.mean(run["bytes"] for run in of)
        minus = f" ({mean - first:+.3f})" if told else ""
        told[name] = f"{mean:.3f}{minus}\n{size / 1000:.0f} kB"
    draw_rows(axes, scores, told)
    axes.set_title(f"after {measured['seconds']:g} s of training on one core", fontsize=10)


def draw_scoring(axes: Axes, scores: list[dict[str, Any]]) -> None:
    """The same model, by each way of scoring all documents, with the seconds that it needs."""
    of_all, told = {}, {}
    for row in WAYS:
        found = [s for s in scores if s["row"] == row and s["documents"] == 0]
        if found:
            of_all[row] = [one["bits_per_byte"] for one in found]
            seconds = statistics.mean(one["seconds"] for one in found)
            told[row] = f"{statistics.mean(of_all[row]):.3f}\n{seconds:.0f} s"
    draw_rows(axes, of_all, told)
    axes.set_title("one model, scored in four ways; SGD and LoRA learn while scoring", fontsize=10)


def draw_sizes(axes: Axes, tables: list[dict[str, Any]], equal: str, style: str) -> None:
    """Scores before quantization less the baseline's, with their standard errors, over the weights.

    equal: what the runs of a size have in common. style: of the lines.
    """
    for arm, color in (("pr1493", "tab:blue"), ("default", "tab:orange")):
        sizes, means, errors = [], [], []
        for measured in tables:
            runs = {
                name: [{"seed": run["seed"], "val_bpb": run["scores"]["float"]} for run in of]
                for name, of in measured["rows"].items()
            }
            found = paired.difference(runs[arm], runs["upstream_baseline"])
            if found:
                sizes.append(measured["rows"][arm][0]["parameters"] / 1e6)
                means.append(found.mean)
                errors.append(found.error)
        axes.errorbar(sizes, means, yerr=errors, marker="o", capsize=4, label=f"{arm}, {equal}",
                      color=color, linestyle=style)  # fmt: skip
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:.2f}" for size in sizes], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("million weights; three seeds")
    axes.set_ylabel("bits per byte minus the baseline's")
    axes.grid(alpha=0.3)
    axes.legend()


def draw_bits(axes: Axes, measured: dict[str, Any]) -> None:
    """Bits per byte lost over bits a weight: a dot for each model, a line through the means."""
    rows = [row for run in measured["runs"] for row in run["rows"]]
    for arm, color in (("GPTQ", "tab:blue"), ("steps of columns, trellis", "tab:orange")):
        by_size: dict[float, list[float]] = {}
        for row in rows:
            if row["arm"] == arm:
                by_size.setdefault(row["bits"], []).append(row["bpb_lost"])
        for size, lost in by_size.items():
            axes.plot([size] * len(lost), lost, "o", color=color, alpha=0.5)
        sizes = sorted(by_size)
        axes.plot(sizes, [statistics.mean(by_size[size]) for size in sizes], color=color, label=arm)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel("bits a weight, of the whole artifact")
    axes.set_ylabel("bits per byte lost")
    axes.grid(alpha=0.3)
    axes.legend()


def draw() -> dict[str, Figure]:
    """The pictures by the names of their files, from what is stored."""
    ladder = Figure((9.0, 3.8), layout="constrained")
    draw_ladder(ladder.subplots())
    figure = Figure((12.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_beside(left, results.latest(BESIDE)["measured"])
    draw_scoring(right, results.latest(SCORING)["measured"]["scores"])
    sizes = Figure((12.0, 3.6), layout="constrained")
    left, right = sizes.subplots(1, 2)
    for (equal, runs), style in zip(STACK_RUNS.items(), ("-", "--"), strict=True):
        draw_sizes(left, [results.latest(STACKS + run)["measured"] for run in runs], equal, style)
    draw_bits(right, results.latest(QUANTIZERS)["measured"])
    return {"ladder.png": ladder, "results.png": figure, "sizes.png": sizes}


def main() -> None:
    escape_unprintable()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    arguments = parser.parse_args()
    for name, figure in draw().items():
        figure.savefig(arguments.out / name, dpi=110)
        print(arguments.out / name)


if __name__ == "__main__":
    main()
