"""Does this machine run train_gpt.py as it should? About ten minutes on one GPU, one page, PASS or FAIL.

    make gpu-check      or      python benchmarks/gpu_check.py [--out FOLDER] [--only kernels run ranks]
    CONFIG=configs/h100_1gpu.env MICRO_BATCH_TOKENS=32768 python benchmarks/gpu_check.py --memory 1

The second command uses a formula to print the memory that a run on that many GPUs takes on each. It works
without a GPU.

Settings come from the environment, as they do for the script. Each stage is a process with a time limit of
its own, which leaves room for cold compilation:

    kernels  which implementations the script chooses at the shapes of a micro-batch, and the time of each
    run      40 steps as one of eight ranks with all graphs, the end of a run, and 50 documents with
             adapters; nothing may be compiled during training or evaluation
    ranks    with several GPUs: the whole program on all of them, with 30 s of training

A stage that fails does not stop the others. An interrupted check prints what it has. Exit status: 0 if all
stages passed, 1 if not, 2 without a GPU.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

import train_gpt
from benchmarks import kernels, ttt
from benchmarks.conditions import script_hash
from benchmarks.ttt import GPUS
from data.files import escape_unprintable
from data.shards import write_shard
from train_gpt import Config

REPO = Path(__file__).resolve().parents[1]
STAGES = {"kernels": 400, "run": 1200, "ranks": 900}  # in order, each with its limit in seconds
STEPS = 40
SETTLED = 5  # steps after which the loader is ahead
DOCUMENTS = 50
CLOCK_SECONDS = 30  # of training on several GPUs
RESERVE_SHARE = 0.9  # of GPTQ_RESERVE_SECONDS: calibration keeps the rest to spare
CHOICE_TOLERANCE = 1.1  # how much slower than the fastest the chosen implementation may be, because of noise
# A kernel may take so many times the least time of its work. On an H100 the MLP's takes 1.5.
MAX_OVER_FLOOR = 2.8
TOLD = r"attention:|fused_|rehears|gptq:collected|peak memory|warning:"  # lines of a log for the page
REASON = r"error: |[\w.]*(Error|Exception|Unsupported)\b"  # lines that say why a program ended
# Milliseconds of a step of the default without and with recurrence, on an H100 with the work of one of eight
# ranks and the optimizer's of all eight (results/h100/README.md).
STEP_MS = {False: 78.6, True: 117.5}
# So much longer may it take elsewhere: for their work, steps in the logs of #1493, #1855 and the baseline
# take up to 9 % longer than this script's on that H100.
SLOWER_ELSEWHERE = 1.09
# What a visit of a layer keeps for the backward pass besides its MLP, queries, keys and values, in widths of
# the model: lane, mixed lane, its norm, output of attention, the same behind XSA, input of the MLP, and what
# is under way.
SAVED_WIDTHS = 8
# fp32: weights, gradients, average, momenta or Adam's two moments, and what an update works in.
BYTES_A_PARAMETER = 28
SAMPLE = {"DATA_PATH": "data/datasets/sample_sp1024", "VOCAB_SIZE": "1024",
          "TOKENIZER_PATH": "data/tokenizers/sample_1024_bpe.model"}


class Found(NamedTuple):
    """What came of a stage, or of a part of it."""

    faults: list[str]  # it passed if there are none
    lines: list[str]  # for the page


# --- The programs of the stages: they run on the GPU, and write a file of what they found. ---


def measure_implementations() -> dict[str, Any]:
    """The implementations that the script chooses, and how many ms both passes of each one take."""
    from triton.testing import do_bench

    config = Config.from_env(os.environ)
    machine = train_gpt.this_machine(config, os.environ)
    tokens = config.micro_batch_tokens
    shape = (tokens, config.model_dim, config.mlp_dim)
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    roof = kernels.measure_roof()
    floors_ms = {
        "fused_mlp": roof.floor_ms(kernels.mlp_costs(*shape)["both"]),
        "fused_heads": roof.floor_ms(kernels.heads_costs(tokens, *heads)["both"]),
    }
    report = train_gpt.fast_ops(config, machine).report
    torch._dynamo.reset()  # it gives up after a few graphs of one function
    model = train_gpt.GPT(config, seed=None)
    rows = []
    for setting in train_gpt.IMPLEMENTATIONS:
        run, inputs = train_gpt.trial_of(setting, config, machine)
        run = machine.compile(run)
        for name in train_gpt.implementations_to_try(setting, config, machine):
            row: dict[str, Any] = {"setting": setting, "name": name, "floor_ms": floors_ms.get(setting)}
            try:
                model.ops = train_gpt.with_implementation(train_gpt.Ops(), setting, name)
                both = functools.partial(train_gpt.both_passes, run, model, inputs)
                row["ms"] = do_bench(both, return_mode="median")
            except Exception as failure:  # it is not installed, or does not run here
                row["failure"] = f"{type(failure).__name__}: {failure}".splitlines()[0]
            rows.append(row)
    has_fa3 = importlib.util.find_spec("flash_attn_interface") is not None
    return {"report": report, "rows": rows, "has_fa3": has_fa3, **vars(roof)}


def kernel_variants() -> int:
    """Variants of the script's own Triton kernels that were compiled in this process so far."""
    count = 0
    for kernel in vars(train_gpt).values():
        # The first thing that a kernel keeps for a device is its compiled variants.
        for cache in getattr(kernel, "device_caches", {}).values():
            count += len(cache[0])
    return count


def watch_run() -> dict[str, Any]:
    """The script's own `main`: what it compiled inside its two clocks, and when adapters began each pass."""
    compiled: dict[str, int] = {}
    passes: list[tuple[float, int]] = []  # moment, tokens
    graphs: list[Any] = []  # forward and backward ones, as Dynamo begins to compile them
    torch._dynamo.callback.on_compile_start(graphs.append)
    read = train_gpt.DocumentScorer.read

    def noted(scorer: Any, chunk: Any, *more: Any) -> Any:
        length = -(-(chunk.stop - chunk.first) // 16) * 16
        passes.append((time.perf_counter(), len(chunk.documents) * length))
        return read(scorer, chunk, *more)

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            before = len(graphs) + kernel_variants()
            passes.clear()
            try:
                return work(*given)
            finally:
                compiled[name] = len(graphs) + kernel_variants() - before

        return counted

    train_gpt.DocumentScorer.read = noted  # type: ignore[method-assign, assignment]
    for name in ("train", "evaluate"):
        setattr(train_gpt, name, watched(name, getattr(train_gpt, name)))
    return {"status": train_gpt.main(), "compiled": compiled, "passes": passes}


def run_program(name: str, out: str) -> int:
    """The program of a stage, which writes what it finds to OUT.RANK.json. Returns its exit status."""
    del sys.argv[1:]  # the script reads no arguments
    found = measure_implementations() if name == "kernels" else watch_run()
    path = Path(f"{out}.{os.environ.get('RANK') or '0'}.json")
    path.write_text(json.dumps(found), encoding="utf-8")
    return int(found.get("status", 0))


# --- What they found, judged ---


def judge_implementations(found: dict[str, Any]) -> Found:
    """The times of all implementations, and whether the fastest ones were chosen."""
    # An implementation that is installed but rejected costs steps, and only logs a warning.
    faults = [line for line in found["report"] if line.startswith("warning:") and "rejected" in line]
    lines = [f"Matrix products reach {found['tflops']:.0f} TFLOP/s, copies {found['gb_per_s']:.0f} GB/s.", "",
             "| setting | implementation | ms, both passes | × the least possible |",
             "|---|---|---|---|"]
    chosen = dict(line.split()[0].split(":") for line in found["report"] if not line.startswith("warning:"))
    tried = {row["name"] for row in found["rows"]}
    if found["has_fa3"] and "fa3" in tried and chosen["attention"] != "fa3":
        faults.append(f"attention: FlashAttention-3 is installed, and {chosen['attention']} was chosen")
    for setting, chosen_name in chosen.items():
        times_ms = {}
        floor_ms = None
        for row in found["rows"]:
            if row["setting"] != setting:
                continue
            label = row["name"] + (" (chosen)" if row["name"] == chosen_name else "")
            told = f"{row.get('failure', '')[:60]} | -"
            if "ms" in row:
                times_ms[row["name"]] = row["ms"]
                floor_ms = row["floor_ms"]
                over = f"{row['ms'] / floor_ms:.1f}" if floor_ms else "-"
                told = f"{row['ms']:.3f} | {over}"
            lines.append(f"| {setting} | {label} | {told} |")
        faults += slow_implementations(setting, chosen_name, times_ms, floor_ms)
    return Found(faults, lines)


def slow_implementations(
    setting: str, chosen: str, times_ms: Mapping[str, float], floor_ms: float | None
) -> list[str]:
    """Faults: an implementation much slower than another one, or than the least time for its work."""
    faults = []
    fastest = min(times_ms, key=times_ms.__getitem__)
    if times_ms[chosen] > CHOICE_TOLERANCE * times_ms[fastest]:
        faults.append(f"{setting}: {chosen} was chosen and takes {times_ms[chosen]:.3f} ms; {fastest} takes "
                      f"{times_ms[fastest]:.3f} ms")
    kernels_ms = [ms for name, ms in times_ms.items() if name != "plain"]
    if kernels_ms and floor_ms and min(kernels_ms) > MAX_OVER_FLOOR * floor_ms:
        faults.append(f"{setting}: the kernel takes {min(kernels_ms):.3f} ms, expected at most "
                      f"{MAX_OVER_FLOOR} times the least for its work, {floor_ms:.3f} ms")
    return faults


def judge_compiled(paths: Sequence[Path]) -> list[str]:
    """A fault for each clock of each rank in which something was compiled."""
    faults = []
    for rank, path in enumerate(paths):
        for name, count in json.loads(path.read_text(encoding="utf-8"))["compiled"].items():
            if count:
                faults.append(f"rank {rank}: {count} graphs or kernels were compiled inside the clock of "
                              f"`{name}`, expected none")
    return faults


def step_times_ms(events: list[dict[str, Any]], config: Config) -> dict[bool, float]:
    """Median milliseconds of a step without and with the loop, from the training events of metrics.jsonl."""
    durations: dict[bool, list[float]] = {}
    for before, now in itertools.pairwise(events):
        looping = train_gpt.loop_is_on(now["progress"], config)
        if train_gpt.loop_is_on(before["progress"], config) == looping:
            durations.setdefault(looping, []).append(now["train_time_ms"] - before["train_time_ms"])
    return {looping: statistics.median(times) for looping, times in durations.items()}


def steps_in_time(times_ms: Mapping[bool, float], config: Config) -> float:
    """Steps that the clock of training has room for. A graph that was not timed counts as the slowest one."""
    clock_ms = 1e3 * (config.max_wallclock_seconds - config.gptq_reserve_seconds)
    slowest_ms = max(times_ms.values())
    shares = {0.0, 1.0, config.enable_looping_at}
    steps = 0.0
    for begin, end in itertools.pairwise(sorted(share for share in shares if share <= 1.0)):
        steps += (end - begin) * clock_ms / times_ms.get(train_gpt.loop_is_on(begin, config), slowest_ms)
    return steps


def judge_steps(events: list[dict[str, Any]], ran: Config, meant: Config, card: str) -> Found:
    """The times of steps, and how many the clock has room for.

    ran, meant: settings of this run, and of the run on eight GPUs that it stands for.
    """
    faults = []
    times_ms = step_times_ms(events, ran)
    # What is expected is the default model on one kind of card.
    part = train_gpt.TrainingSettings
    known = "H100" in card and meant.as_env(part) == Config().as_env(part)
    lines = ["| step | measured ms | expected ms |", "|---|---|---|"]
    for looping, ms in times_ms.items():
        name = "with recurrence" if looping else "without recurrence"
        most_ms = SLOWER_ELSEWHERE * STEP_MS[looping]
        expected = f"{STEP_MS[looping]:.0f} ms, at most {most_ms:.0f}"
        lines.append(f"| {name} | {ms:.1f} | {expected if known else '-'} |")
        if known and ms > most_ms:
            faults.append(f"a step {name} takes {ms:.1f} ms, expected {expected}")
    waits_ms = [event["data_wait_max_ms"] for event in events[SETTLED:]]
    steps = steps_in_time(times_ms, meant)
    lines += ["", f"Projected for eight GPUs: {steps:.0f} steps in {meant.max_wallclock_seconds:g} s. A step "
                  f"waits for data for {max(waits_ms):.1f} ms at most."]
    return Found(faults, lines)


def judge_reserve(events: list[dict[str, Any]], log: str, config: Config) -> Found:
    """Whether the Hessians of one of eight ranks fit in the time that is kept for them."""
    collected = re.search(r"gptq:collected .* ([0-9.]+)s", log)
    if collected is None:
        return Found([], [])
    seconds = float(collected[1]) - events[-1]["train_time_ms"] / 1e3
    line = f"Hessians take {seconds:.2f} s, GPTQ_RESERVE_SECONDS={config.gptq_reserve_seconds:g}."
    # Where the clock ends them, the log has a warning.
    ended = re.search(r"warning: .* calibration batches", log)
    too_small = ended is not None or seconds > RESERVE_SHARE * config.gptq_reserve_seconds
    return Found([f"the reserve is too small: {line}"] if too_small else [], [line])


def judge_evaluation(
    phases: Mapping[str, float], passes: list[tuple[float, int]], scored: np.ndarray,
    ran: Config, meant: Config,
) -> Found:
    """Seconds of evaluation of the official text on eight GPUs, from those of a few documents on one.

    passes: of adapters, by their moment and tokens. scored: these documents.
    """
    text = ttt.official_text()
    each = {}
    for name, seconds in phases.items():
        if not name.startswith("eval_"):
            continue
        if name == "eval_legal_ttt" and len(passes) > 1:
            # A pass needs so long, and so much longer with each token.
            moments, counts = np.array(passes).T
            longer, least = np.polyfit(counts[:-1], np.diff(moments), 1)
            seconds = sum(least + longer * one.tokens for one in ttt.passes_of_documents(text, ran))
        else:
            stride = ran.eval_stride if name == "eval_sliding_window" else ran.eval_length
            both = [ttt.passes_of_windows(tokens, ran, stride, len(tokens)) for tokens in (text, scored)]
            seconds *= both[0][0].tokens / both[1][0].tokens
        each[name.removeprefix("eval_")] = seconds / GPUS
    # The limit counts the score that ranks, the first one.
    total = next(iter(each.values()))
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in each.items())
    limit = meant.max_eval_seconds
    line = f"Projected for eight GPUs: evaluation in {total:.0f} s ({parts}), MAX_EVAL_SECONDS={limit:g}."
    return Found([line] if 0 < limit < total else [], [line])


def predicted_bytes(config: Config, world_size: int, bytes_a_value: int = 2) -> int:
    """Peak bytes of one of `world_size` ranks in training with recurrence, averages and optimizer included.

    bytes_a_value: of activations: 2 for bf16, with the Triton kernels; 4 for fp32, without them. For the
    default run it is 8% above the peak measured on an H100 (results/h100/README.md).
    """
    tokens = min(config.micro_batch_tokens, config.train_batch_tokens // world_size)
    rows = tokens // config.train_seq_len
    visits = len(train_gpt.visit_order(config, config.num_loops > 0))
    heads = config.model_dim + 2 * config.num_kv_heads * config.head_dim
    hidden = config.mlp_dim  # the MLP kernel keeps one number per hidden value
    # The plain MLP also keeps its normalized input, and its hidden values before and inside the activation.
    if bytes_a_value == 4:
        hidden += 2 * config.mlp_dim + config.model_dim
    a_visit = hidden + 2 * heads + SAVED_WIDTHS * config.model_dim
    # The logits, and their gradient.
    a_token = visits * a_visit + 2 * config.vocab_size
    parameters = sum(math.prod(one.shape) for one in train_gpt.parameter_table(config).values())
    return rows * config.train_seq_len * a_token * bytes_a_value + parameters * BYTES_A_PARAMETER


def print_memory(gpus: int) -> int:
    """Print what a run of the environment's settings takes on each of so many GPUs."""
    try:
        config = Config.from_env(os.environ)
        train_gpt.micro_steps_per_step(config, gpus)  # it refuses tokens that do not divide
    except train_gpt.ConfigError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    for name, bytes_a_value in (("bf16", 2), ("fp32", 4)):
        gigabytes = predicted_bytes(config, gpus, bytes_a_value) / 1e9
        print(f"{gigabytes:.1f} GB in {name} per GPU, by a formula")
    return 0


def last_words(log: Path) -> str:
    """The first line of a log that says why the program ended, else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    # What follows is of other ranks, or of torchrun.
    reasons = [line for line in lines if re.match(REASON, line)][:1]
    return (reasons or [line for line in lines if line] or ["nothing"])[-1][:300]


# --- The check ---


def text_of(folder: Path) -> np.ndarray:
    """All tokens of validation in a folder of shards."""
    shards = train_gpt.open_shards(f"{folder}/fineweb_val_[0-9]*.bin")
    return np.concatenate([train_gpt.read_tokens(shard) for shard in shards])


def some_documents(tokens: np.ndarray, length: int) -> np.ndarray:
    """DOCUMENTS of a text, and a token that ends them: two that are short, all others about this long.

    So the windows of a batch grow to their full length with all of its rows, as they do in a whole text.
    """
    begins = np.append(np.flatnonzero(tokens == train_gpt.BOS_ID), len(tokens))
    lengths = np.diff(begins)
    long = np.argsort(np.abs(lengths - length), kind="stable")[: DOCUMENTS - 2]
    short = np.argsort(lengths, kind="stable")[:2]
    picked = [tokens[begins[one] : begins[one + 1]] for one in (*long, *short)]
    return np.concatenate([*picked, [train_gpt.BOS_ID]])


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, with all that it has started; torchrun needs time to end its ranks."""
    for number, seconds in ((signal.SIGTERM, 45), (signal.SIGKILL, 15)):
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                os.killpg(process.pid, number)
                process.wait(seconds)


class Check:
    """The stages, by name."""

    def __init__(self, folder: Path, program: Sequence[str]) -> None:
        """folder: of all files. program: see `main`."""
        self.folder = folder
        self.program = program
        self.card = torch.cuda.get_device_name()
        self.gpus = torch.cuda.device_count()
        self.meant = Config.from_env(os.environ)
        self.data: dict[str, str] = {}
        if not list(train_gpt.find_path(self.meant.data_path).glob("fineweb_val_*.bin")):
            self.data = SAMPLE
            self.meant = Config.from_values({**self.meant.as_env(), **SAMPLE})
        self.data_folder = train_gpt.find_path(self.meant.data_path)

    def start(self, name: str, ranks: int, limit_seconds: float, **changes: str) -> list[str]:
        """Run the program of a stage, each rank with the work of one of eight. Returns its fault, if any."""
        tokens = min(self.meant.micro_batch_tokens, self.meant.train_batch_tokens // GPUS)
        batches = -(-self.meant.gptq_calibration_batches // GPUS)
        variables = {
            "DEVICE": "cuda", "WARMUP_STEPS": "3", "VAL_LOSS_EVERY": "0", "RUN_ID": name,
            "RUNS_DIR": str(self.folder), "MICRO_BATCH_TOKENS": str(tokens),
            "TRAIN_BATCH_TOKENS": str(ranks * tokens), "GPTQ_CALIBRATION_BATCHES": str(ranks * batches),
            **self.data, **changes,
        }
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [*self.program, "kernels" if name == "kernels" else "run", str(self.folder / name)]
        log = self.folder / f"{name}.log"
        with open(log, "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, cwd=REPO, env={**os.environ, **variables}, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )
            try:
                status = process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                return [f"it takes longer than {limit_seconds:g} s; the end of its log: {last_words(log)}"]
            finally:
                end(process)
        return [f"it ended with status {status}: {last_words(log)}"] if status else []

    def kernels(self, limit_seconds: float) -> Found:
        """The implementations of each setting."""
        faults = self.start("kernels", 1, limit_seconds)
        if faults:
            return Found(faults, [])
        return judge_implementations(json.loads((self.folder / "kernels.0.json").read_text(encoding="utf-8")))

    def run(self, limit_seconds: float) -> Found:
        """A short run on one GPU, from the first step to the last score."""
        folder = self.folder / "data"
        folder.mkdir()
        for shard in self.data_folder.glob("fineweb_train_*.bin"):
            (folder / shard.name).symlink_to(shard.resolve())
        picked = some_documents(text_of(self.data_folder), self.meant.eval_length)
        write_shard(folder / "fineweb_val_000000.bin", picked)
        return self.whole_run("run", 1, limit_seconds, ITERATIONS=str(STEPS), MAX_WALLCLOCK_SECONDS="0",
                              DATA_PATH=str(folder), VAL_TOKENS_LIMIT="0")

    def ranks(self, limit_seconds: float) -> Found:
        """The whole program on all GPUs of this machine."""
        if self.gpus == 1:
            return Found([], ["One GPU: nothing to do."])
        return self.whole_run("ranks", self.gpus, limit_seconds, MAX_WALLCLOCK_SECONDS=str(CLOCK_SECONDS),
                              VAL_TOKENS_LIMIT="1000000")

    def whole_run(self, name: str, ranks: int, limit_seconds: float, **changes: str) -> Found:
        """A run of the script's `main`, judged as far as it came."""
        faults = self.start(name, ranks, limit_seconds, **changes)
        has_ended = not faults
        faults += judge_compiled(sorted(self.folder.glob(f"{name}.*.json")))
        log = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        quoted = ["```", *(line for line in log.splitlines() if re.match(TOLD, line)), "```"]
        if not has_ended:
            return Found(faults, quoted)
        directory = self.folder / name
        events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text("utf-8").splitlines()]
        steps = [event for event in events if event["event"] == "train"]
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        ran = Config.from_values(summary["config"])
        parts = [judge_steps(steps, ran, self.meant, self.card), judge_reserve(steps, log, self.meant)]
        faults += [f"limit of {limit}: {told}" for limit, told in summary["limits"].items() if not told["ok"]]
        if ranks == 1:
            passes = json.loads((self.folder / "run.0.json").read_text(encoding="utf-8"))["passes"]
            scored = text_of(self.folder / "data")
            parts.append(judge_evaluation(summary["phases"], passes, scored, ran, self.meant))
        lines = []
        for part in parts:
            faults += part.faults
            lines += part.lines
        phases = ", ".join(f"{phase} {seconds:.0f}" for phase, seconds in summary["phases"].items())
        lines.append(f"Seconds by phase: {phases}.")
        lines.append(f"Memory by the formula: {predicted_bytes(ran, ranks) / 2**20:.0f} MiB.")
        return Found(faults, [*lines, "", *quoted])


def page(found: Mapping[str, tuple[Found, float]], wanted: Sequence[str], about: str) -> str:
    """The page to paste into an issue: the verdict, all faults, then each stage. found: with its seconds."""
    faults = [f"- {name}: {fault}" for name, (stage, _) in found.items() for fault in stage.faults]
    faults += [f"- {name}: did not end" for name in wanted if name not in found]
    lines = [f"# gpu-check: {'FAIL' if faults else 'PASS'}", "", about, "", *faults]
    for name, (stage, seconds) in found.items():
        lines += ["", f"## {name}: {'FAIL' if stage.faults else 'PASS'}, {seconds:.0f} s", "", *stage.lines]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None, program: Sequence[str] = (__file__,)) -> int:
    """The check. program: the file, and arguments of it, that the stages run."""
    escape_unprintable()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    folder = REPO / "runs" / time.strftime("gpu-check-%Y%m%d-%H%M%S")
    parser.add_argument("--out", type=Path, default=folder, help="new folder")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE")
    parser.add_argument("--memory", type=int, metavar="GPUS", help="print a run's memory, check nothing")
    given = parser.parse_args(arguments)
    if given.memory is not None:
        if given.memory < 1:
            parser.error(f"--memory {given.memory}: expected a number of GPUs")
        return print_memory(given.memory)
    if not torch.cuda.is_available():
        print("gpu-check: torch finds no GPU here; nothing checked, nothing written", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C
    given.out.mkdir(parents=True)  # a new one: nothing is overwritten
    check = Check(given.out.resolve(), program)
    settings = " ".join(f"{name}={value}" for name, value in check.meant.overrides().items())
    about = (f"{check.gpus} x {check.card}; torch {torch.__version__}, CUDA {torch.version.cuda}, triton "
             f"{getattr(train_gpt.triton, '__version__', None)}, train_gpt.py {script_hash()}; "
             f"settings: {settings or 'the defaults'}.")
    if check.data:
        about += " The data is the sample, with a smaller vocabulary: projections are not those of the run."
    found: dict[str, tuple[Found, float]] = {}
    path = check.folder / "page.md"
    try:
        for name in given.only:
            # A machine that is lost leaves what was found so far.
            path.write_text(page(found, given.only, about), encoding="utf-8")
            print(f"gpu-check: {name}, at most {STAGES[name]} s", flush=True)
            begin = time.perf_counter()
            try:
                stage = getattr(check, name)(STAGES[name])
            except Exception as error:  # of this program: the stages after it still run
                stage = Found([f"{type(error).__name__}: {error}"], [])
            found[name] = (stage, time.perf_counter() - begin)
    except KeyboardInterrupt:
        print("gpu-check: interrupted", file=sys.stderr)
    path.write_text(page(found, given.only, about), encoding="utf-8")
    print(f"\n{path.read_text('utf-8')}\nPaste this page into an issue: {path}")
    return int(len(found) < len(given.only) or any(stage.faults for stage, _ in found.values()))


if __name__ == "__main__":
    if sys.argv[1:2] in (["kernels"], ["run"]):
        sys.exit(run_program(*sys.argv[1:]))
    sys.exit(main())
