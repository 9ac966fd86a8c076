"""results.png, the picture of README: drawn from the raw figures of results/, like the tables of RESULTS.md.

Left: a public script and this one after the same seconds of one thread, a line for each seed. Right: the ways
of scoring the same weights, a point for each seed. The lower, the better. `python -m benchmarks.picture`
"""

from matplotlib.figure import Figure

from benchmarks import results

BESIDE = "beside-fineweb_sample_sp1024-180s"
SCORING = "0.5/ttt-fineweb_sample_sp1024"  # frozen: the table of these figures is in results/0.5.md
WAYS = ("round trip", "sliding window", "SGD", "LoRA")
SIDES = {"theirs": "challenge's\nown script", "ours as theirs": "its settings\nin this file",
         "theirs shuffled": "own script,\nshuffled", "ours": "this one"}  # fmt: skip


def draw() -> Figure:
    """The picture, from what is stored."""
    figure = Figure((10.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    measured = results.latest(BESIDE)["measured"]
    rows = {side: measured["rows"][side] for side in SIDES if side in measured["rows"]}
    for seed in dict.fromkeys(run["seed"] for runs in rows.values() for run in runs):
        places = []
        scores = []
        for place, runs in enumerate(rows.values()):
            of_seed = [run["val_bpb"] for run in runs if run["seed"] == seed]
            places += [place] * len(of_seed)
            scores += of_seed
        left.plot(places, scores, "o-", label=f"seed {seed}")
    left.set_xticks(range(len(rows)), [SIDES[side] for side in rows])
    left.set_title(f"after {measured['seconds']:g} s of training on one core", fontsize=10)
    left.legend(fontsize=8)
    scored = results.latest(SCORING)["measured"]["scores"]
    for place, way in enumerate(WAYS):
        found = [one["bits_per_byte"] for one in scored if one["row"] == way and one["documents"] == 0]
        right.plot([place] * len(found), found, "o", color="tab:blue", alpha=0.7)
        right.annotate(f"{sum(found) / len(found):.3f}", (place, min(found)), (0, -12),
                       textcoords="offset points", ha="center", fontsize=8)  # fmt: skip
    right.set_xticks(range(len(WAYS)), [way.replace(" ", "\n", 1) for way in WAYS])
    right.margins(x=0.15, y=0.25)
    right.set_title("the same weights, scored in four ways", fontsize=10)
    for axes in (left, right):
        axes.set_ylabel("bits per byte")
        axes.grid(axis="y", alpha=0.3)
    return figure


if __name__ == "__main__":
    draw().savefig(results.FOLDER / "results.png", dpi=110)
