"""The first hour on a GPU: what was predicted without one, beside what is measured, in one report.

    make gpu-check      or      python benchmarks/gpu_check.py --out runs/gpu-check

In order, on one card and in at most 25 minutes: the tests that need a GPU; 30 steps of the default run,
half of them with recurrence, with the Triton kernels and without; the memory they took against the formula of
gpu_model/memory.py; one artifact, scored in a fresh process. A part that fails is reported, and the others
still run. Exit status: 0 if all went well, 1 if a part failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import train_gpt
from benchmarks import results
from benchmarks.gpu_model import memory

REPO = Path(__file__).resolve().parents[1]
STEPS = 30
LOOP_FROM = 0.5  # of them on the recurrence is on
# One micro-batch of the 8-GPU run is one step here. Milliseconds as gpu_model models them for an H100,
# without recurrence and with it, and what public logs add to such a model (README.md there).
MODELLED_MS = {"1": (62.4, 92.1), "0": (78.3, 116.7)}
LOGGED_OVER_MODELLED = 1.14
LOGGED_BESIDE_MS = 6.4
LIMIT_SECONDS = {"tests": 300, "steps": 400, "score": 300}

# Runs a command with these variables added, at most so many seconds: exit status and output.
Runner = Callable[[Sequence[str], Mapping[str, str], float], tuple[int, str]]


class Part(NamedTuple):
    """One part of the report."""

    title: str
    passed: bool
    seconds: float
    lines: list[str]


def run_command(command: Sequence[str], variables: Mapping[str, str], seconds: float) -> tuple[int, str]:
    """Run a command in the repository; status 124 where it took too long."""
    environ = {**os.environ, **variables}
    try:
        done = subprocess.run(
            command, cwd=REPO, env=environ, timeout=seconds, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        return 124, said.decode(errors="replace") if isinstance(said, bytes) else said
    return done.returncode, done.stdout


def data_settings(repo: Path) -> dict[str, str]:
    """The default data where they are, else the sample that `data/sample.py` writes."""
    default = train_gpt.Config()
    if list((repo / default.data_path).glob("fineweb_train_*.bin")):
        return {}
    return {
        "DATA_PATH": "data/datasets/sample_sp1024",
        "TOKENIZER_PATH": "data/tokenizers/sample_1024_bpe.model",
        "VOCAB_SIZE": "1024",
    }


def step_settings(name: str, fused: str, folder: Path) -> dict[str, str]:
    """Variables of the 30 steps: those of one rank of the 8-GPU run, and timing lines."""
    tokens = str(train_gpt.Config().micro_batch_tokens)
    return {
        **data_settings(REPO),
        "RUN_ID": name, "RUNS_DIR": str(folder), "DEVICE": "cuda",
        "ITERATIONS": str(STEPS), "MAX_WALLCLOCK_SECONDS": "0", "WARMUP_STEPS": "3",
        "TRAIN_BATCH_TOKENS": tokens, "MICRO_BATCH_TOKENS": tokens, "ENABLE_LOOPING_AT": str(LOOP_FROM),
        "TRAINING_TIMING_BREAKDOWN": "1", "TRAINING_TIMING_EVERY": "1", "GPTQ_CALIBRATION_BATCHES": "2",
        "FUSED_MLP": fused, "FUSED_HEADS": fused,
        "VAL_TOKENS_LIMIT": "100000", "TTT_ENABLED": "0",
    }  # fmt: skip


def step_times_ms(log: str) -> tuple[float, float]:
    """Median milliseconds of a step, without recurrence and with it. ValueError where lines are missing."""
    totals: dict[int, float] = {}
    for line in re.findall(r"timing_breakdown step:\d+ .*", log):
        step = int(line.split("step:")[1].split()[0])
        parts = re.findall(r"(?:forward|backward|optimizer)_ms:([0-9.]+)", line)
        totals[step] = sum(float(part) for part in parts)
    border = LOOP_FROM * STEPS
    # The first steps of each half still settle.
    before = sorted(ms for step, ms in totals.items() if 2 <= step < border)
    after = sorted(ms for step, ms in totals.items() if step > border + 2)
    if not before or not after:
        raise ValueError("the run has no timing lines of both halves")
    return before[len(before) // 2], after[len(after) // 2]


def expected_ms(modelled: float) -> float:
    """What a log would say by the line through public ones; good to 10 % at best."""
    return LOGGED_OVER_MODELLED * modelled + LOGGED_BESIDE_MS


def tests_part(run: Runner) -> Part:
    """The tests that need a GPU."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
    status, output = run(command, {}, LIMIT_SECONDS["tests"])
    return Part("Tests marked gpu", status == 0, time.perf_counter() - start, output.splitlines()[-15:])


def steps_part(run: Runner, folder: Path, fused: str) -> Part:
    """30 steps with the kernels required, or without them."""
    start = time.perf_counter()
    name = "kernels" if fused == "1" else "plain"
    variables = step_settings(name, fused, folder)
    status, output = run([sys.executable, "train_gpt.py"], variables, LIMIT_SECONDS["steps"])
    passed = status == 0
    lines = [line for line in output.splitlines() if re.match(r"attention:|fused_|warning:", line)]
    try:
        measured = step_times_ms(output)
        lines += ["", "| ms a step | modelled | expected | measured |", "|---|---|---|---|"]
        halves = ("without recurrence", "with recurrence")
        for half, modelled, ms in zip(halves, MODELLED_MS[fused], measured, strict=True):
            lines.append(f"| {half} | {modelled:.1f} | {expected_ms(modelled):.1f} | {ms:.1f} |")
        lines += ["", memory_line(output, variables)]
    except ValueError as error:
        passed = False
        lines.append(str(error))
    if status != 0:
        lines += output.splitlines()[-15:]
    title = f"{STEPS} steps, kernels {'on' if fused == '1' else 'off'}"
    return Part(title, passed, time.perf_counter() - start, lines)


def memory_line(log: str, variables: Mapping[str, str]) -> str:
    """Peak memory beside the formula's. ValueError where the log does not tell it."""
    found = re.search(r"peak memory allocated: (\d+) MiB", log)
    if found is None:
        raise ValueError("the run tells no peak of memory")
    measured = int(found[1]) * 2**20 / 1e9
    known = {name: value for name, value in variables.items() if name not in ("RUN_ID", "RUNS_DIR")}
    predicted = memory.predicted_bytes(train_gpt.Config.from_values(known), 1) / 1e9
    share = measured / predicted
    by_formula = f"{predicted:.1f} GB by the formula with kernels"
    return f"Peak memory: {measured:.1f} GB, {by_formula} ({share:.2f} of it)."


def score_part(run: Runner, folder: Path) -> Part:
    """The artifact of the steps with kernels, scored in a fresh process with test-time training."""
    start = time.perf_counter()
    variables = {
        **data_settings(REPO),
        "EVAL_ONLY": str(folder / "kernels" / "model.bin"), "RUN_ID": "score", "RUNS_DIR": str(folder),
        "DEVICE": "cuda", "VAL_TOKENS_LIMIT": "100000",
    }  # fmt: skip
    status, output = run([sys.executable, "train_gpt.py"], variables, LIMIT_SECONDS["score"])
    words = r"final_.*_exact|legal_ttt_exact|limit:|.* eval_time:"
    lines = [line for line in output.splitlines() if re.match(words, line)]
    passed = status == 0 and any(line.startswith("legal_ttt_exact") for line in lines)
    seconds = time.perf_counter() - start
    return Part("One artifact, scored", passed, seconds, lines or output.splitlines()[-15:])


def report(parts: list[Part], card: str) -> str:
    """The report, as Markdown."""
    lines = [
        "# First hour on a GPU", "",
        f"{card}; torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"triton {getattr(train_gpt.triton, '__version__', None)}, script {results.script_hash()}.",
        "Modelled: for an H100, see benchmarks/gpu_model/README.md. Expected: with what logs add to it.", "",
        "| part | outcome | seconds |", "|---|---|---|",
    ]  # fmt: skip
    for part in parts:
        lines.append(f"| {part.title} | {'ok' if part.passed else 'FAILED'} | {part.seconds:.0f} |")
    for part in parts:
        lines += ["", f"## {part.title}", "", *part.lines]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None, run: Runner = run_command) -> int:
    """The program. run: how commands are run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    name = time.strftime("gpu-check-%Y%m%d-%H%M%S")
    parser.add_argument("--out", type=Path, default=REPO / "runs" / name, help="new folder")
    folder = parser.parse_args(arguments).out
    if not torch.cuda.is_available():
        print("gpu-check: torch finds no GPU here; nothing checked, nothing written", file=sys.stderr)
        return 2
    folder.mkdir(parents=True)  # a new one: nothing is overwritten
    card = torch.cuda.get_device_name()
    parts: list[Part] = []
    works: list[Callable[[], Part]] = [
        lambda: tests_part(run),
        lambda: steps_part(run, folder, "1"),
        lambda: steps_part(run, folder, "0"),
        lambda: score_part(run, folder),
    ]
    for work in works:
        parts.append(work())
        print(f"{parts[-1].title}: {'ok' if parts[-1].passed else 'FAILED'}", flush=True)
        # After each part, so that a machine that is lost leaves what it found.
        (folder / "report.md").write_text(report(parts, card), encoding="utf-8")
    print(f"report: {folder / 'report.md'}; attach it to an issue")
    return 0 if all(part.passed for part in parts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
