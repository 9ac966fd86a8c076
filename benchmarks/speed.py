"""What a training step and a scored token cost: the real `Training` and the real scorers, interleaved.

    python benchmarks/speed.py [--config configs/cpu_demo.env] [--steps 60] [--targets 20000] [--keep]

Training runs twice in the same process, with and without prefetch, in turns of a few steps, so that a busy
machine meets both alike; the two must see the same tokens (stream hash) and print the same losses, or the
program fails.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks import paired, results  # noqa: E402
from train_gpt import Config, Training  # noqa: E402

TITLE = "Step time and scoring speed"
TURN_STEPS = 5
PROGRESS = 0.5  # of the steps: after the loop has been switched on
STEP_HEADER = "| config | prefetch | step ms | p20 | p80 | tokens/s | wait ms p50, p99 | n |"
SCORE_HEADER = "| config | scorer | targets | seconds | targets/s |"
def settings(config: Path, runs: Path, overrides: list[str], **more: str) -> dict[str, str]:
    """The environment of a run that stops by hand, not by a clock."""
    given = dict(item.split("=", 1) for item in overrides)
    return {
        "CONFIG": str(config), "RUNS_DIR": str(runs), "MAX_WALLCLOCK_SECONDS": "0", "VAL_LOSS_EVERY": "0",
        "ITERATIONS": "1000000", "WARMDOWN_ITERS": "0", **given, **more,
    }  # fmt: skip


class Steps(NamedTuple):
    """What some steps took and learnt, each by step."""

    ms: list[float]  # device work included
    wait_ms: list[float]  # of the host, for batches
    losses: list[float]


def timed_steps(training: Training, count: int) -> Steps:
    """Take `count` steps."""
    taken = Steps([], [], [])
    for _ in range(count):
        training.run.machine.wait()
        start = time.perf_counter()
        loss, _ = train_gpt.train_step(training, PROGRESS).tolist()
        taken.ms.append(1e3 * (time.perf_counter() - start))
        taken.wait_ms.append(training.loader.wait_ms)
        training.loader.wait_ms = 0.0
        taken.losses.append(loss)
        training.step += 1
    return taken


def scoring(training: Training, targets: int) -> list[dict[str, Any]]:
    """Targets and seconds of each scorer; each is warmed on a short stretch first."""
    config = training.config
    model = training.model
    tokens = training.validation.tokens
    found = []
    scorers = {"round-trip": train_gpt.score_roundtrip}
    if config.eval_stride:
        scorers["sliding window"] = train_gpt.score_sliding
    if config.ttt_enabled:
        scorers["legal TTT"] = train_gpt.score_ttt
    for label, scorer in scorers.items():
        scorer(model, tokens[: 2 * config.ttt_chunk_tokens + 1], config)
        training.run.machine.wait()
        start = time.perf_counter()
        ledger = scorer(model, tokens[: targets + 1], config)
        training.run.machine.wait()
        seconds = time.perf_counter() - start
        found.append({"scorer": label, "targets": ledger.scored, "seconds": seconds})
    return found


def measure(arguments: argparse.Namespace, runs: Path) -> dict[str, Any]:
    """Steps with and without prefetch, in turns, and all scorers."""
    trainings = []
    for prefetch in ("1", "0"):
        env = settings(arguments.config, runs, arguments.set, TRAIN_PREFETCH=prefetch, RUN_ID=f"p{prefetch}")
        config = Config.from_env(env)
        run = train_gpt.Run(train_gpt.this_machine(config, {}))
        run.log = lambda *line, **event: None  # type: ignore[method-assign]
        inputs = train_gpt.preflight(config, run, "")
        train_gpt.open_run(config, run, inputs, [])
        training = Training(
            config, run, inputs.train_shards, inputs.validation, inputs.chosen.ops, inputs.hashes
        )
        train_gpt.warm_up(training)
        trainings.append(training)
    taken = [Steps([], [], []), Steps([], [], [])]
    for _ in range(math.ceil(arguments.steps / TURN_STEPS)):
        for all_steps, training in zip(taken, trainings, strict=True):
            for figures, new in zip(all_steps, timed_steps(training, TURN_STEPS), strict=True):
                figures.extend(new)
    hashes = {training.loader.stream_hash for training in trainings}
    if len(hashes) > 1 or taken[0].losses != taken[1].losses:
        losses = [one.losses for one in taken]
        raise SystemExit(f"prefetch changes the run: stream hashes {hashes}, losses {losses}")
    first = trainings[0]
    measured = {
        "config": arguments.config.stem, "stream_hash": f"{hashes.pop():016x}",
        "steps": [{"prefetch": training.config.train_prefetch, "ms": one.ms, "wait_ms": one.wait_ms}
                  for training, one in zip(trainings, taken, strict=True)],
        "tokens_per_step": first.config.train_batch_tokens,
        "scoring": scoring(first, arguments.targets),
    }  # fmt: skip
    for training in trainings:
        training.loader.close()
    return measured


def means_of_turns(times_ms: list[float]) -> list[float]:
    """Mean milliseconds of a step in each turn."""
    starts = range(0, len(times_ms), TURN_STEPS)
    return [statistics.mean(times_ms[start : start + TURN_STEPS]) for start in starts]


def tables(measured: dict[str, Any]) -> list[str]:
    """Both tables of one config."""
    name = measured["config"]
    tokens = measured["tokens_per_step"]
    lines = paired.table(STEP_HEADER, [])
    for step in measured["steps"]:
        low, *_, high = statistics.quantiles(step["ms"], n=5)
        median_ms = statistics.median(step["ms"])
        waits = statistics.quantiles(step["wait_ms"], n=100)
        per_second = tokens / median_ms * 1e3
        lines.append(
            f"| {name} | {step['prefetch']:d} | {median_ms:.2f} | {low:.2f} | {high:.2f} | {per_second:,.0f} "
            f"| {statistics.median(step['wait_ms']):.2f}, {waits[98]:.2f} | {len(step['ms'])} |"
        )
    lines += [
        "",
        f"Both ran the same tokens (stream hash {measured['stream_hash']}) to the same losses, bit for bit.",
        "",
    ]
    lines += paired.table(SCORE_HEADER, [])
    for s in measured["scoring"]:
        speed = s["targets"] / s["seconds"]
        lines.append(f"| {name} | {s['scorer']} | {s['targets']:,} | {s['seconds']:.2f} | {speed:,.0f} |")
    return lines


def main() -> None:
    """Measure, print, and with --keep store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=REPO / "configs/cpu_demo.env")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings on top of it")
    parser.add_argument("--steps", type=int, default=60, help="steps with and as many without prefetch")
    parser.add_argument("--targets", type=int, default=20_000, help="validation targets per scorer")
    parser.add_argument("--keep", action="store_true", help="store them in results/ and RESULTS.md")
    arguments = parser.parse_args()
    before = results.conditions()
    with tempfile.TemporaryDirectory() as runs:
        measured = measure(arguments, Path(runs))
    results.finish(f"speed-{arguments.config.stem}", before, measured, arguments.keep)


if __name__ == "__main__":
    main()
