"""What a step and an evaluation would take on 8 H100, modelled on a machine without one (gpu_model/).

    PEER=CLONE python benchmarks/modelled.py --data FOLDER [--out FOLDER] [--reuse] [--keep]

Runs the censuses of COMMANDS, half an hour on two cores, and puts their sums together. CLONE is a work tree
of github.com/openai/parameter-golf, FOLDER of --data holds real validation documents in SP8192. --reuse takes
the censuses that --out already has. No time in it was measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks import ttt  # noqa: E402
from benchmarks.gpu_model import document_rows, roofline  # noqa: E402
from benchmarks.gpu_model.public_models import LOGGED_MS  # noqa: E402

TITLE = "Modelled, not measured"

OWN = "-m benchmarks.gpu_model --mlp kernel"
PUBLIC = "-m benchmarks.gpu_model.public_models --keys 1024.5"
# Each a program of benchmarks/gpu_model, and the files that it writes.
COMMANDS = {
    f"{OWN} --tag default --keys 517 --what train train_loop score ttt": [
        "default_train_kernel", "default_train_loop_kernel", "default_score_kernel", "default_ttt_kernel",
    ],
    f"{OWN} --config configs/pr1493.env --tag pr1493 --keys 1024.5 --what train train_loop": [
        "pr1493_train_kernel", "pr1493_train_loop_kernel",
    ],
    f"{PUBLIC} --model pr1493": ["pr1493"],
    f"{PUBLIC} --model pr1493_loop": ["pr1493_loop"],
    "-m benchmarks.gpu_model.eager_parts --mlp kernel": ["eager_parts"],
}  # fmt: skip


class Step(NamedTuple):
    """A traced step: what it is called, the file of its census, and its time in a public log."""

    name: str
    recurrence: bool
    file: str
    logged_ms: float | None = None


STEPS = [
    Step("the default", False, "default_train_kernel"),
    Step("the default", True, "default_train_loop_kernel"),
    Step("configs/pr1493.env, no document mask", False, "pr1493_train_kernel"),
    Step("configs/pr1493.env, no document mask", True, "pr1493_train_loop_kernel"),
    Step("PR #1493, its own script", False, "pr1493", LOGGED_MS["pr1493"]),
    Step("PR #1493, its own script", True, "pr1493_loop", LOGGED_MS["pr1493_loop"]),
]

FUSED_MLP = "train_gpt.linear_leaky_square"
# Shares of the card's peak that the Triton product of the MLP may reach; cuBLAS is taken to reach the first.
MLP_SHARES = (roofline.MATRIX_PRODUCT_SHARE, 0.45, 0.31)
CARD = roofline.CARDS["h100"]

# Logged over modelled milliseconds of PR #1493's six extra visits. What its steps take besides, 6 ms of
# optimizer, collectives and host, is not in a pass of an evaluation.
CALIBRATION = 1.139
# Of the host for each launch of compiled code, estimated: below it a step of few tokens cannot go.
HOST_LAUNCH_SECONDS = 13e-6
BY_SGD = "test-time training by SGD"
ADAPTERS = "test-time training by adapters (the default)"


# ======================================================================================================
# RAW FIGURES
# ======================================================================================================


def step_sums(census: dict[str, Any]) -> dict[str, Any]:
    """Sums over the launches of a census; those of the fused MLP apart, by their bytes and FLOP."""
    launches = [launch for graph in census["graphs"] for launch in graph["launches"]]
    fused: dict[tuple[float, float], int] = {}
    other_microseconds = 0.0
    for launch in launches:
        if launch["name"].startswith(FUSED_MLP):
            key = (launch["moved_bytes"], launch["flop"])
            fused[key] = fused.get(key, 0) + 1
        else:
            other_microseconds += launch["microseconds"]
    return {
        "tokens": census["tokens"],
        "launches": len(launches),
        "moved_bytes": sum(launch["moved_bytes"] for launch in launches),
        "flop": sum(launch["flop"] for launch in launches),
        "peak_bytes": max(graph["peak_bytes"] for graph in census["graphs"]),
        "other_microseconds": other_microseconds,
        "fused_mlp": [{"moved_bytes": size, "flop": flop, "launches": count}
                      for (size, flop), count in sorted(fused.items())],
    }  # fmt: skip


def scoring_rounds(tokens: Any, config: Any) -> dict[str, dict[str, float]]:
    """Batches that one of eight ranks passes through the model in each score, scaled to the official set."""
    from benchmarks.gpu_model import subject

    begins = subject.document_starts(tokens, config)
    targets = len(tokens) - 1
    scale = document_rows.OFFICIAL_TARGETS / targets
    most_rows = config.val_pass_tokens // config.eval_length
    ways = {
        "round trip": (config.eval_length, 32 * config.val_pass_tokens),
        "sliding window": (config.eval_stride, 32 * config.val_pass_tokens),
        f"{BY_SGD}, scoring": (config.eval_stride, config.ttt_chunk_tokens),
    }
    found = {}
    for name, (stride, chunk_tokens) in ways.items():
        chunks = subject.window_rows(targets, config.eval_length, stride, begins, chunk_tokens)
        rows = [len(chunk) for chunk in chunks]
        batch_rows = subject.even_batch_rows(rows, most_rows)
        rounds = sum(math.ceil(count / (ttt.GPUS * batch_rows)) for count in rows)
        found[name] = {
            "rows": scale * sum(rows), "batch_rows": batch_rows, "batches": scale * rounds,
            "targets": document_rows.OFFICIAL_TARGETS / ttt.GPUS / (scale * rounds),
        }  # fmt: skip
    return found


def learning_steps(config: Any) -> int:
    """Steps of test-time training on the official set: of every chunk but the last."""
    chunks = math.ceil(document_rows.OFFICIAL_TARGETS / config.ttt_chunk_tokens)
    rows = config.ttt_chunk_tokens // config.eval_length
    return (chunks - 1) * config.ttt_epochs * math.ceil(rows / config.ttt_batch_seqs)


def measure(folder: Path, data: Path) -> dict[str, Any]:
    """All raw figures, from the censuses in `folder` and the documents in `data`."""
    import numpy as np

    from benchmarks.gpu_model import eager_parts, subject
    from data import shards

    def read(name: str) -> Any:
        return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))

    config = subject.config()
    tokens = shards.read_shard(sorted(data.glob("*_val_*.bin"))[0]).astype(np.int64)
    eager = read("eager_parts")
    adapters_cost = ttt.cost_of_documents(ttt.documents_of_a_rank(tokens), config)
    token = ttt.TokenTime.of(read("default_train_loop_kernel"))
    sums = ("launches", "moved_bytes", "microseconds")
    return {
        "steps": [{**step._asdict(), **step_sums(read(step.file))} for step in STEPS],
        "scoring_pass": step_sums(read("default_score_kernel")),
        "learning_pass": step_sums(read("default_ttt_kernel")),
        "learning_rest": {name: eager["test_time_step"][name] for name in sums},
        "head": {"targets": eager_parts.SCORED_TARGETS, **{name: eager["head"][name] for name in sums}},
        "scores": scoring_rounds(tokens, config),
        "learning_steps": learning_steps(config),
        "adapters": {**adapters_cost._asdict(), **token._asdict()},
        "row_tokens": config.eval_length,
        "documents": int((tokens == shards.BOS_ID).sum()),
    }


# ======================================================================================================
# TABLES
# ======================================================================================================


def milliseconds(step: dict[str, Any], mlp_share: float) -> float:
    """Modelled time of a traced step whose fused MLP reaches this share of the card's peak."""
    total = step["other_microseconds"] / 1e3
    rate = mlp_share * CARD.bf16_flop_per_second
    for kind in step["fused_mlp"]:
        seconds = roofline.launch_seconds(CARD, kind["moved_bytes"], kind["flop"], rate)
        total += 1e3 * kind["launches"] * seconds
    return total


def step_rows(steps: list[dict[str, Any]]) -> list[str]:
    """A line for each step."""
    rows = []
    for step in steps:
        cells = [
            step["name"],
            "yes" if step["recurrence"] else "no",
            str(step["launches"]),
            f"{step['moved_bytes'] / 1e9:.1f}",
            f"{step['flop'] / 1e12:.2f}",
            f"{step['peak_bytes'] / 2**30:.1f}",
        ]
        for share in MLP_SHARES:
            same_for_all = not step["fused_mlp"] and share != MLP_SHARES[0]
            cells.append("-" if same_for_all else f"{milliseconds(step, share):.1f}")
        cells.append(f"{step['logged_ms']:.1f}" if step["logged_ms"] else "-")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


class Phase(NamedTuple):
    """A part of the evaluation: so many passes of one rank, each of so many seconds."""

    name: str
    passes: float
    seconds_each: float

    @property
    def seconds(self) -> float:
        """Of all its passes."""
        return self.passes * self.seconds_each


def pass_seconds(step: dict[str, Any], rows_share: float, rest: dict[str, Any], rest_share: float) -> float:
    """A pass over a share of the traced rows, and what is done beside it.

    Launches take their time whatever the rows; the host may need longer than the device.
    """
    launching = roofline.LAUNCH_SECONDS * step["launches"]
    moving = 1e-3 * milliseconds(step, MLP_SHARES[0]) - launching
    device = CALIBRATION * (launching + rows_share * moving) + 1e-6 * rest_share * rest["microseconds"]
    host = HOST_LAUNCH_SECONDS * (step["launches"] + rest["launches"])
    return max(device, host)


def adapters(measured: dict[str, Any]) -> Phase:
    """Test-time training by adapters: what its tokens take in a training step, and what its optimizer moves.

    The launches of its own products are not in the traced step: for the host a lower bound.
    """
    found = measured["adapters"]
    token = ttt.TokenTime(found["forward_microseconds"], found["backward_microseconds"])
    cost = ttt.Cost(found["forward"], found["backward"], found["adapter_bytes"], found["passes"])
    device_seconds = CALIBRATION * cost.seconds(token, document_rows.OFFICIAL_TARGETS)
    passes = cost.passes * document_rows.OFFICIAL_TARGETS / ttt.GPUS
    looped = next(step for step in measured["steps"] if step["recurrence"])
    host_seconds = passes * HOST_LAUNCH_SECONDS * looped["launches"]
    return Phase(ADAPTERS, passes, max(device_seconds, host_seconds) / passes)


def evaluation(measured: dict[str, Any]) -> list[Phase]:
    """The parts of an evaluation, without compilation; of test-time training both ways."""
    scoring = measured["scoring_pass"]
    traced_rows = scoring["tokens"] / measured["row_tokens"]
    head = measured["head"]
    phases = []
    for name, found in measured["scores"].items():
        rows_share = found["batch_rows"] / traced_rows
        each = pass_seconds(scoring, rows_share, head, found["targets"] / head["targets"])
        phases.append(Phase(name, found["batches"], each))
    each = pass_seconds(measured["learning_pass"], 1.0, measured["learning_rest"], 1.0)
    phases.append(Phase(f"{BY_SGD}, learning", measured["learning_steps"], each))
    return [*phases, adapters(measured)]


def tables(measured: dict[str, Any]) -> list[str]:
    """Steps of training, then the evaluation."""
    shares = [f"{100 * share:.0f} %" for share in MLP_SHARES]
    times = [f"ms, MLP {share}" for share in shares]
    header = ["stack", "recurrence", "launches", "GB", "TFLOP", "peak GiB", *times, "logged ms"]
    phases = evaluation(measured)
    default_seconds = sum(phase.seconds for phase in phases if not phase.name.startswith(BY_SGD))
    tokens = measured["steps"][0]["tokens"]
    logged = [
        f"{step['logged_ms'] / milliseconds(step, MLP_SHARES[0]):.2f}"
        for step in measured["steps"] if step["logged_ms"]
    ]  # fmt: skip
    return [
        "**Nothing here was measured on a GPU.** Launches, bytes, FLOP and peak memory are traced by torch's "
        "own compiler for an H100; milliseconds are a roofline over them, without optimizer, collectives and "
        "host ([gpu_model/README.md](gpu_model/README.md)). The logged steps of PR #1493, which hold those, "
        f"are {' and '.join(logged)} times as long as the modelled ones.",
        "",
        f"Forward and backward pass over {tokens:,} tokens, one GPU's share of a step, with the kernels that "
        "`auto` takes. MLP: its Triton product at so much of the card's peak, where all other products reach "
        f"{shares[0]}.",
        "",
        f"| {' | '.join(header)} |", "|" + "---|" * len(header), *step_rows(measured["steps"]),
        "",
        "Evaluation by the default on 8 GPUs: passes of one rank over the official validation set, scaled "
        f"from its first {measured['documents']} documents. A pass takes its modelled time × {CALIBRATION} "
        "(what recurrence adds to a logged step of PR #1493 over what it adds to the modelled one), or "
        f"{1e6 * HOST_LAUNCH_SECONDS:.0f} µs of the host for each launch where that is longer (estimated). "
        "Adapters: the tokens of a training step, without the launches of their own products. Others' "
        "*logged* runs with adapters took 313 to 509 s (PRs #1530, #1855).",
        "",
        "| phase | passes | ms each | seconds |", "|---|---|---|---|",
        *(f"| {one.name} | {one.passes:.0f} | {1e3 * one.seconds_each:.1f} | {one.seconds:.0f} |"
          for one in phases),
        "| all of the default, without SGD and without compilation, which comes before the clock: expect "
        f"several times it | | | {default_seconds:.0f} |",
    ]  # fmt: skip


# ======================================================================================================
# THE PROGRAM
# ======================================================================================================


def run_censuses(folder: Path, reuse: bool) -> None:
    """Run the programs of COMMANDS, with `reuse` those alone whose files are missing."""
    for command, names in COMMANDS.items():
        if reuse and all((folder / f"{name}.json").exists() for name in names):
            continue
        subprocess.run(
            [sys.executable, *command.split(), "--out", str(folder)], cwd=REPO, check=True, stdout=sys.stderr
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with a *_val_*.bin shard in SP8192")
    parser.add_argument("--out", default="~/.cache/gpu_model/modelled", help="folder of the censuses")
    parser.add_argument("--reuse", action="store_true", help="take the censuses that the folder has")
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    options = parser.parse_args()
    folder = Path(options.out).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = Path(options.data).expanduser()
    if not list(data.glob("*_val_*.bin")):
        print(f"{data}: no *_val_*.bin shard; give a folder of SP8192 documents", file=sys.stderr)
        return 1
    if not os.environ.get("PEER") and not (options.reuse and (folder / "pr1493_loop.json").exists()):
        print("PEER: expected a work tree of github.com/openai/parameter-golf", file=sys.stderr)
        return 1
    from benchmarks import results

    before = results.conditions()
    run_censuses(folder, options.reuse)
    results.finish("modelled", before, measure(folder, data), options.keep)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
