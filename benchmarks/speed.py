"""What a training step and a scored token cost: the real `Training` and the real scorers, interleaved.

    python benchmarks/speed.py [--config records/configs/cpu_demo.env] [--steps 60] [--targets 20000]
        [--out benchmarks/RESULTS.md]

Training runs twice in the same process, with and without prefetch, in turns of a few steps, so that a busy
machine meets both alike; the two must see the same tokens (stream hash) and print the same losses, or the
program fails. On a GPU it adds model FLOPs utilization (6 P per token for every visit of a layer and the
head, plus 6 T D per token and visit for causal attention, over the dense bf16 peak) and, from a profile,
how the time of the GPU splits into matrix products, attention and everything else.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from train_gpt import Config, Training  # noqa: E402

TURN_STEPS = 5
PEAK_TFLOPS = 989.0  # dense bf16 of one H100 or H200
STEP_HEADER = "| config | prefetch | step ms | p20 | p80 | tokens/s | wait ms p50, p99 | MFU | MiB | n |"
SCORE_HEADER = "| config | scorer | targets | seconds | targets/s |"
KINDS = {
    "matrix products": ("gemm", "cutlass", "nvjet", "xmma", "linear_leaky"),
    "attention": ("flash", "fmha", "attention"),
}


def settings(config: Path, runs: Path, overrides: list[str], **more: str) -> dict[str, str]:
    """The environment of a run that stops by hand, not by a clock."""
    given = dict(item.split("=", 1) for item in overrides)
    return {
        "CONFIG": str(config), "RUNS_DIR": str(runs), "MAX_WALLCLOCK_SECONDS": "0", "VAL_LOSS_EVERY": "0",
        "ITERATIONS": "1000000", "WARMDOWN_ITERS": "0", **given, **more,
    }  # fmt: skip


def flops_per_token(config: Config, looping: bool) -> float:
    """Forward and backward, of one token: products with weights, and causal attention."""
    visits = sum(map(len, train_gpt.visit_order(config, looping)))
    width, kv = config.model_dim, config.num_kv_heads * config.head_dim
    layer = 2 * width * width + 2 * kv * width + 2 * width * config.mlp_dim
    head = config.vocab_size * width
    return 6.0 * (visits * layer + head) + 6.0 * visits * config.train_seq_len * width


def timed_steps(training: Training, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of `count` steps, device work included, and their losses."""
    times_ms, losses = [], []
    for _ in range(count):
        training.run.sync()
        start = time.perf_counter()
        loss, _ = train_gpt.train_step(training, progress=0.5).tolist()
        times_ms.append(1e3 * (time.perf_counter() - start))
        losses.append(loss)
        training.step += 1
    return times_ms, losses


def step_row(name: str, training: Training, times_ms: list[float], waits_ms: list[float]) -> str:
    """One line of the first table."""
    config, cuda = training.config, training.run.device.type == "cuda"
    low, *_, high = statistics.quantiles(times_ms, n=5)
    median_ms = statistics.median(times_ms)
    per_second = config.train_batch_tokens / median_ms * 1e3
    mfu = flops_per_token(config, training.model.looping) * per_second / PEAK_TFLOPS / 1e12
    waits = statistics.quantiles(waits_ms, n=100)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, on macOS bytes
    resident_mib = resident >> (20 if sys.platform == "darwin" else 10)
    peak_mib = torch.cuda.max_memory_allocated() >> 20 if cuda else resident_mib
    return (
        f"| {name} | {config.train_prefetch:d} | {median_ms:.2f} | {low:.2f} | {high:.2f} "
        f"| {per_second:,.0f} | {statistics.median(waits_ms):.2f}, {waits[98]:.2f} "
        f"| {f'{mfu:.1%}' if cuda else '-'} | {peak_mib} "
        f"| {len(times_ms)} |"
    )


def split_of_gpu_time(training: Training) -> str:
    """Shares of the GPU time of three steps by kind of kernel."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        timed_steps(training, 3)
    spent = dict.fromkeys([*KINDS, "everything else"], 0.0)
    for event in profile.key_averages():
        kind = next((k for k, words in KINDS.items() if any(w in event.key.lower() for w in words)), None)
        spent[kind or "everything else"] += event.self_device_time_total
    total = sum(spent.values()) or 1.0
    return "GPU time: " + ", ".join(f"{kind} {share / total:.0%}" for kind, share in spent.items())


def score_rows(name: str, training: Training, targets: int) -> list[str]:
    """One line per scorer; each is warmed on a short stretch first."""
    config, model, tokens, rows = training.config, training.model, training.validation.tokens, []
    scorers = {"round-trip": train_gpt.score_roundtrip}
    if config.eval_stride:
        scorers["sliding window"] = train_gpt.score_sliding
    if config.ttt_enabled:
        scorers["legal TTT"] = train_gpt.score_ttt
    for label, scorer in scorers.items():
        scorer(model, tokens[: 2 * config.ttt_chunk_tokens + 1], config)
        training.run.sync()
        start = time.perf_counter()
        scored = len(scorer(model, tokens[: targets + 1], config))
        training.run.sync()
        seconds = time.perf_counter() - start
        rows.append(f"| {name} | {label} | {scored:,} | {seconds:.2f} | {scored / seconds:,.0f} |")
    return rows


def title() -> str:
    """Machine, versions and commit."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPO, capture_output=True, text=True, check=False
    ).stdout.strip()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return (
        f"\n## Step time and scoring speed\n\n{datetime.now(timezone.utc):%Y-%m-%d}, {gpu}, {os.cpu_count()} "
        f"cores, load average {os.getloadavg()[0]:.1f} before, Python {platform.python_version()}, torch "
        f"{torch.__version__}, commit {commit or 'unknown'}\n"
    )


def measure(arguments: argparse.Namespace, runs: Path) -> list[str]:
    """Both tables of one config."""
    name, trainings = arguments.config.stem, []
    for prefetch in "10":
        env = settings(arguments.config, runs, arguments.set, TRAIN_PREFETCH=prefetch, RUN_ID=f"p{prefetch}")
        config = Config.from_env(env)
        run = train_gpt.Run(config, {})
        run.log = lambda line, console=False: None  # type: ignore[method-assign]
        inputs = train_gpt.preflight(config, run)
        train_gpt.open_run(config, run, inputs)
        trainings.append(Training(config, run, inputs))
        train_gpt.warm_up(trainings[-1])
    times_ms: list[list[float]] = [[], []]
    losses: list[list[float]] = [[], []]
    for _ in range(-(-arguments.steps // TURN_STEPS)):
        for number, training in enumerate(trainings):
            for kept, new in zip((times_ms, losses), timed_steps(training, TURN_STEPS), strict=True):
                kept[number] += new
    hashes = {training.loader.stream_hash for training in trainings}
    if len(hashes) > 1 or losses[0] != losses[1]:
        raise SystemExit(f"prefetch changes the run: stream hashes {hashes}, losses {losses}")
    rows = [
        step_row(name, training, times, training.loader.take_waits_ms())
        for training, times in zip(trainings, times_ms, strict=True)
    ]
    same = f"\nThe two ran the same tokens (stream hash {hashes.pop():016x}) to the same losses, bit for bit."
    if trainings[0].run.device.type == "cuda":
        same += f"\n{split_of_gpu_time(trainings[0])}."
    scores = score_rows(name, trainings[0], arguments.targets)
    for training in trainings:
        training.close()
    tables = [(STEP_HEADER, rows), (SCORE_HEADER, scores)]
    first, second = ([head, "|" + "---|" * (head.count("|") - 1), *body] for head, body in tables)
    return [*first, same, "", *second]


def main() -> None:
    """Measure, print, and with --out append."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=REPO / "records/configs/cpu_demo.env")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings on top of it")
    parser.add_argument("--steps", type=int, default=60, help="steps with and as many without prefetch")
    parser.add_argument("--targets", type=int, default=20_000, help="validation targets per scorer")
    parser.add_argument("--out", type=Path, help="append the tables to this file")
    arguments = parser.parse_args()
    head = title()
    with tempfile.TemporaryDirectory() as runs:
        text = "\n".join([head, *measure(arguments, Path(runs)), ""])
    print(text)
    if arguments.out:
        with open(arguments.out, "a", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
