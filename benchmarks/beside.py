"""A public training script beside this one on a CPU: tokens per second, and bits per byte at equal seconds.

    python benchmarks/beside.py ~/parameter-golf/train_gpt.py --seconds 180 [--runs DIR]
        [--data data/datasets/fineweb_sample_sp1024 --tokenizer data/tokenizers/fineweb_1024_bpe.model]
        [--config configs/cpu_demo.env] [--set NAME=VALUE ...] [--theirs NAME=VALUE ...]
        [--as-theirs configs/pr549.env] [--seeds 42 1337 2025] [--only speed theirs ours ...]
    python benchmarks/beside.py --steps 300 --only ours

PATH is your own copy of a script that `benchmarks/upstream.py` can run. It keeps its own defaults, except for
the config's width, depth, heads, MLP, vocabulary, sequence length and tokens a step, which all sides share,
and for --theirs: layers that this depth lacks, and what counts steps, as its own run has far more of them.
`ours as theirs` is this script with the model, the optimizer settings and the order of the data of theirs,
which --as-theirs and --theirs name. `ours` has the settings of --config and --set. All get the same CPU
seconds of one thread. Each then quantizes, and is scored without overlap on the same first part of the
validation text. `speed` times steps in turns. Sides of ours alone need no PATH, and may have --steps.

A script is fed as its own loader reads: shards in their order, or shuffled sequences. The sides whose names
say so get the other order; `theirs shuffled` trains on what ours trains on. Where a script keeps an average
of its weights, the average and the last weights are scored, and the better ones count. One that does not
quantize like the baseline is not shipped: then the scores before quantization are compared.

Runs are kept in DIR, and several processes started alike share the work. The name of your copy says whose
script it is: `pr549_train_gpt.py`, say; `train_gpt.py` is the challenge's.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # for torch: waiting threads would burn CPU seconds
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also in the thread that a public script runs in

import numpy as np
import torch
from torch import Tensor

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks.conditions import conditions, described  # noqa: E402
from benchmarks.turns import Turns, endless  # noqa: E402
from benchmarks.upstream import TrainingClock, Upstream, UpstreamError, batches, in_our_names  # noqa: E402
from data import sample  # noqa: E402
from data.files import escape_unprintable  # noqa: E402
from tools.runs.stats import paired  # noqa: E402
from tools.runs.writing import write_text  # noqa: E402
from train_gpt import Config, ConfigError, Machine  # noqa: E402

SAMPLE = REPO / "data" / "datasets" / sample.NAME
TOKENIZER = REPO / "data" / "tokenizers" / sample.TOKENIZER_FILE
CLOCK = REPO / "benchmarks" / "cpu_clock.py"
BASELINE = REPO / "configs" / "upstream_baseline.env"
SHUFFLED = "theirs shuffled"
AS_THEIRS = "ours as theirs"
AS_THEIRS_SHUFFLED = "ours as theirs, shuffled"
IN_ORDER = "ours in order"
SIDES = ["speed", "theirs", SHUFFLED, AS_THEIRS, AS_THEIRS_SHUFFLED, IN_ORDER, "ours"]
OF_THEIRS = ("theirs", SHUFFLED)
# Sides of ours whose order of the text is not that of their settings.
ORDERS = {AS_THEIRS_SHUFFLED: {"SHUFFLE": "1"}, IN_ORDER: {"SHUFFLE": "0"}}
SPEED_HEADER = "| script | CPU ms a step | p20 | p80 | tokens/s | times theirs | n |"
MINUS_THEIRS = "val_bpb | std | minus theirs | its error | p | n |"
SCORE_HEADER = f"| script | parameters | steps | float bpb | weights, bytes | code, bytes | {MINUS_THEIRS}"
FLOAT_HEADER = (
    "| script | parameters | steps | last weights | their average | "
    + MINUS_THEIRS.replace("val_bpb", "float bpb")
)  # fmt: skip
AVERAGED = (
    "Theirs keeps an average of its weights, which it evaluates in the end; over so few steps the last "
    "weights may be better, so both are scored, and the better ones of each seed count as theirs."
)
SHIPPED = (
    "float, of the weights before quantization; val_bpb, of what is shipped. Code: theirs plain, ours "
    "wrapped, as each counts it."
)
UNSHIPPED = (
    "Nothing of theirs is shipped, as its quantization is not of the kind that this benchmark runs: the "
    "weights of all are compared before quantization."
)
# Ours as theirs minus theirs is the implementation, ours minus ours as theirs the recipe.
COMPARED = [
    (SHUFFLED, "theirs"), (AS_THEIRS, "theirs"), (AS_THEIRS_SHUFFLED, SHUFFLED), (IN_ORDER, AS_THEIRS),
    ("ours", AS_THEIRS_SHUFFLED), ("ours", AS_THEIRS), ("ours", "theirs"),
]  # fmt: skip
SPEED_TURNS = 8
TURN_STEPS = 5
PROGRAM = (Path(__file__), REPO / "benchmarks/upstream.py", CLOCK)
# What all runs of a table must have in common, as their conditions have it.
ALIKE = ("script", "program", "processor", "torch", "threads")
HESSIAN_SECONDS = 600.0  # more than any run here takes for them
SCORED_ROWS = 64  # sequences of a batch


Runs = list[dict[str, Any]]


class BesideError(RuntimeError):
    """A run failed, or runs do not belong into one table; the message says what to do."""


class Budget(NamedTuple):
    """How long each side trains: by exactly one of these."""

    steps: int = 0
    seconds: float = 0.0  # of the CPU

    def settings(self, values: dict[str, str]) -> dict[str, str]:
        """The settings that end a run of these values after the budget; its Hessians come after it."""
        if self.steps:
            return {"MAX_WALLCLOCK_SECONDS": "0", "ITERATIONS": str(self.steps)}
        reserve = HESSIAN_SECONDS if Config.from_env(values).gptq else 0.0
        return {"ITERATIONS": "1000000", "MAX_WALLCLOCK_SECONDS": f"{self.seconds + reserve:g}",
                "GPTQ_RESERVE_SECONDS": f"{reserve:g}"}  # fmt: skip

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.seconds else f"{self.steps}steps"


def place_of(path: Path) -> str:
    """From the repository's folder if it lies there: a run that is packed names no folder of a machine."""
    place = path.resolve()
    return str(place.relative_to(REPO) if place.is_relative_to(REPO) else place)


def run_script(script: Path, settings: dict[str, str], directory: Path) -> dict[str, Any]:
    """Start the script with these settings on one thread, by the CPU's clock; the figures of its run.

    A half-finished run in the directory is removed first. BesideError with the end of what it printed.
    """
    if directory.exists():
        shutil.rmtree(directory)
    # Settings that the shell has would reach one side alone.
    kept = {name: value for name, value in os.environ.items() if name not in Config().as_env()}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
    place = {"RUNS_DIR": place_of(directory.parent), "RUN_ID": directory.name}
    environ = {**kept, **threads, **settings, **place}
    command = [sys.executable, str(CLOCK), str(script)]
    ended = subprocess.run(
        command, cwd=REPO, env=environ, capture_output=True, encoding="utf-8", errors="replace"
    )
    if ended.returncode != 0:
        printed = (ended.stdout + ended.stderr).strip()[-2000:]
        raise BesideError(f"{directory}: the script ended with {ended.returncode}:\n{printed}")
    return figures(directory)


def figures(directory: Path) -> dict[str, Any]:
    """What a finished run of ours says of itself: size, steps, seconds, bits per byte."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    log = (directory / "log.txt").read_text(encoding="utf-8")
    found = {
        "seed": summary["seed"], "parameters": int(re.findall(r"^model_params:(\d+)", log, re.MULTILINE)[0]),
        "steps": summary["steps"], "bytes": summary["artifact"]["bytes"],
        "val_bpb": summary["losses"]["roundtrip"]["bits_per_byte"],
    }  # fmt: skip
    for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        # The weights that are shipped, before they are quantized.
        if event["event"] == "val" and event["label"].startswith("DIAGNOSTIC"):
            found["float_bpb"] = event["val_bpb"]
        if event["event"] == "train":
            found["seconds"] = event["train_time_ms"] / 1e3
    return found


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether this process alone may write the file; a process that dies gives its claim back."""
    with open(f"{path}.lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield not path.exists()


class Race:
    """What both sides have in common."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.path: Path = arguments.path  # Path() where no side needs it
        self.runs: Path = arguments.runs
        self.folder: Path = arguments.data
        self.as_theirs_config: Path = arguments.as_theirs or BASELINE
        self.settings_of_theirs = dict(item.split("=", 1) for item in arguments.theirs)
        common = {
            "DATA_PATH": place_of(arguments.data), "TOKENIZER_PATH": place_of(arguments.tokenizer),
            "DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "CPU_THREADS": "1", "EVAL_STRIDE": "0",
            "TTT_ENABLED": "0", "VAL_LOSS_EVERY": "0", "WARMUP_STEPS": "0", "MAX_EVAL_SECONDS": "0",
        }  # fmt: skip
        given = dict(item.split("=", 1) for item in arguments.set)
        self.ours = {"CONFIG": str(arguments.config), **common, **given}
        self.shared = [*common, "VAL_TOKENS_LIMIT"]
        source = (REPO / "train_gpt.py").read_bytes()
        shipped = train_gpt.shipped_code(source)
        # Whole sequences, so that both score the same targets with the same context.
        length = Config.from_env(self.ours).train_seq_len
        self.ours["VAL_TOKENS_LIMIT"] = str(arguments.val_tokens // length * length)
        self.budget = Budget(arguments.steps, arguments.seconds)
        self.ours.update(self.budget.settings(self.ours))
        self.config = Config.from_env(self.ours)
        self.code_bytes = len(train_gpt.with_settings(shipped, self.config))
        fixed = sorted(self.settings_of_theirs.keys() & {*self.geometry(), "SEED"})
        if fixed:
            raise UpstreamError(
                f"--theirs {' '.join(fixed)}: is equal on all sides; give it to --set or --seeds")
        if {"speed", AS_THEIRS, AS_THEIRS_SHUFFLED} & set(arguments.only):
            self.check_as_theirs(arguments)

    def geometry(self) -> dict[str, str]:
        """What must be equal, by the names that both sides have."""
        c = self.config
        return {
            "VOCAB_SIZE": str(c.vocab_size), "NUM_LAYERS": str(c.num_layers), "MODEL_DIM": str(c.model_dim),
            "NUM_HEADS": str(c.num_heads), "NUM_KV_HEADS": str(c.num_kv_heads),
            "MLP_MULT": f"{c.mlp_mult:g}", "TRAIN_SEQ_LEN": str(c.train_seq_len),
            "TRAIN_BATCH_TOKENS": str(c.train_batch_tokens),
        }  # fmt: skip

    def check_as_theirs(self, arguments: argparse.Namespace) -> None:
        """UpstreamError where it is not told, or not in settings of ours, how ours is as theirs."""
        if arguments.as_theirs is None and name_of_script(self.path):
            raise UpstreamError(
                f"{self.path}: which config is this script in ours? Name it with --as-theirs, like "
                f"configs/pr549.env, or leave speed and '{AS_THEIRS}' out of --only")
        Config.from_env(self.as_theirs())

    def as_theirs(self) -> dict[str, str]:
        """Our settings for their model and optimizer."""
        found = {
            **{name: self.ours[name] for name in self.shared},
            **in_our_names({**self.geometry(), **self.settings_of_theirs}, self.as_theirs_config),
            "CONFIG": str(self.as_theirs_config),
            "MICRO_BATCH_TOKENS": str(self.config.train_batch_tokens), "VAL_BATCH_SIZE": "65536",
        }  # fmt: skip
        return {**found, **self.budget.settings(found)}

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Endlessly: the shards in their order, again after the last one."""
        c = self.config
        while True:
            yield from batches(self.folder, c.train_batch_tokens // c.train_seq_len, c.train_seq_len)

    def shuffled_batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endlessly: what ours trains on with this seed, each step in one batch."""
        c = dataclasses.replace(
            self.config, seed=seed, shuffle=True, train_prefetch=False,
            micro_batch_tokens=self.config.train_batch_tokens,
        )  # fmt: skip
        shards = train_gpt.open_shards(f"{self.folder}/fineweb_train_*.bin")
        with contextlib.closing(train_gpt.Loader(c, shards, Machine())) as loader:
            while True:
                batch = loader.next_batch()
                yield batch.inputs_BT, batch.targets_BT

    def measure(self, side: str, seed: int) -> dict[str, Any]:
        """One side with one seed, and the conditions it was measured under."""
        program = hashlib.sha256(b"".join(path.read_bytes() for path in PROGRAM)).hexdigest()[:12]
        before = {**conditions(), "threads": 1, "program": program}
        if side == "speed":
            found = {"seed": seed, **self.speeds(seed)}
        elif side in OF_THEIRS:
            found = self.theirs(seed, shuffled=side == SHUFFLED)
        else:
            found = self.ours_of(side, seed)
        return {**found, "conditions": before}

    def ours_of(self, side: str, seed: int) -> dict[str, Any]:
        """A run of this script."""
        settings = self.as_theirs() if side.startswith(AS_THEIRS) else self.ours
        settings = {**settings, **ORDERS.get(side, {}), "SEED": str(seed)}
        return run_script(REPO / "train_gpt.py", settings, run_path(self.runs, side, seed))

    def upstream(self, seed: int, clock: TrainingClock | None = None) -> Upstream:
        """Their script, waiting for its first batch."""
        settings = {**self.geometry(), **self.settings_of_theirs, "SEED": str(seed)}
        return Upstream(self.path, settings, clock)

    def theirs(self, seed: int, shuffled: bool) -> dict[str, Any]:
        """Train their script by the clock; score its weights as they are, and as it would ship them.

        Without val_bpb and bytes for a script that nothing here ships.
        """
        clock = TrainingClock(time.process_time, self.budget.seconds)
        with self.upstream(seed, clock) as upstream:
            if shuffled and upstream.shuffles:
                raise UpstreamError(f"{self.path}: shuffles by itself; leave '{SHUFFLED}' out of --only")
            feed = self.shuffled_batches(seed) if shuffled or upstream.shuffles else self.batches()
            while not clock.is_over:
                upstream.step(*next(feed))
            found: dict[str, Any] = {
                "seed": seed, "parameters": upstream.parameters_count, "steps": upstream.steps,
                "seconds": clock.seconds,
            }  # fmt: skip
            found.update(self.take_better_weights(upstream))
            if upstream.ships:
                found["bytes"] = upstream.ship()
                found["val_bpb"] = self.score(upstream)
        return found

    def take_better_weights(self, upstream: Upstream) -> dict[str, float]:
        """Leave the model with its last weights or their average, whichever scores better; the scores."""
        last_bpb = self.score(upstream)
        average = upstream.average()
        if average is None:
            return {"float_bpb": last_bpb}
        last = {name: tensor.clone() for name, tensor in upstream.model.state_dict().items()}
        upstream.model.load_state_dict(average)
        average_bpb = self.score(upstream)
        if last_bpb < average_bpb:
            upstream.model.load_state_dict(last)
        return {
            "float_bpb": min(last_bpb, average_bpb), "last_bpb": last_bpb, "average_bpb": average_bpb,
        }  # fmt: skip

    def score(self, upstream: Upstream) -> float:
        """Bits per byte of their model on the first part of the validation text, without overlap."""
        c = self.config
        shards = train_gpt.open_shards(f"{self.folder}/fineweb_val_[0-9]*.bin")
        validation = train_gpt.read_validation(shards, c)
        tokens = torch.from_numpy(validation.tokens.astype(np.int64))
        inputs_NT = tokens[:-1].view(-1, c.train_seq_len)
        targets_NT = tokens[1:].view(-1, c.train_seq_len)
        nats = 0.0
        for start in range(0, len(inputs_NT), SCORED_ROWS):
            rows = slice(start, start + SCORED_ROWS)
            nats += upstream.loss(inputs_NT[rows], targets_NT[rows]) * targets_NT[rows].numel()
        return nats / math.log(2) / validation.bytes_total

    def speeds(self, seed: int) -> dict[str, Any]:
        """CPU milliseconds of the steps of theirs, ours as theirs, and ours, in turns."""
        taken: dict[str, list[float]] = {"theirs": [], AS_THEIRS: [], "ours": []}
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
            upstream = ends.enter_context(self.upstream(seed))
            feed = self.batches()
            turns = {}
            for name, given in ((AS_THEIRS, self.as_theirs()), ("ours", self.ours)):
                unpaced = {"ARTIFACT_BYTES_MAX": "16000000", "RATE_CONTROL": "0", "WARMUP_STEPS": "0"}
                settings = endless(Path(given["CONFIG"]), Path(folder), [])
                settings = {**given, **settings, **unpaced, "RUN_ID": name.replace(" ", "-")}
                turns[name] = ends.enter_context(Turns(REPO / "train_gpt.py", settings))
            for turn in range(SPEED_TURNS + 1):
                new = {name: ours.steps(TURN_STEPS).cpu_ms for name, ours in turns.items()}
                new["theirs"] = []
                for inputs_BT, targets_BT in itertools.islice(feed, TURN_STEPS):
                    start = time.process_time()
                    upstream.step(inputs_BT, targets_BT)
                    new["theirs"].append(1e3 * (time.process_time() - start))
                for name, cpu_ms in new.items():
                    taken[name] += cpu_ms if turn else []  # the first steps allocate
        return taken


def mean_of(runs: Runs, figure: str) -> float:
    """Over the runs."""
    return statistics.mean(run[figure] for run in runs)


def table(header: str, lines: list[str]) -> list[str]:
    """A table of Markdown."""
    return [header, "|" + "---|" * (header.count("|") - 1), *lines]


def cells(runs: Runs, theirs: Runs) -> str:
    """The cells under MINUS_THEIRS; without a difference where the runs are theirs, or seeds are missing."""
    own, others = ({str(run["seed"]): run["val_bpb"] for run in side} for side in (runs, theirs))
    spread = f"{statistics.stdev(own.values()):.4f}" if len(own) > 1 else "-"
    found = None if runs is theirs else paired(own, others)
    told = "- | - | -"
    if found is not None and found.error is not None:
        p = "-" if found.p is None else f"{found.p:.2g}"
        told = f"{found.difference:+.4f} | {found.error:.4f} | {p}"
    return f"{statistics.mean(own.values()):.4f} | {spread} | {told} | {len(own)} |"


def means_of_turns(times_ms: list[float]) -> list[float]:
    """Mean milliseconds of a step in each turn."""
    starts = range(0, len(times_ms), TURN_STEPS)
    return [statistics.mean(times_ms[start : start + TURN_STEPS]) for start in starts]


def speed_lines(runs: Runs, step_tokens: int) -> list[str]:
    """The table of step times."""
    lines = []
    for name in ("theirs", AS_THEIRS, "ours"):
        all_ms = [ms for run in runs for ms in run[name]]
        theirs_ms = [ms for run in runs for ms in run["theirs"]]
        low, *_, high = statistics.quantiles(all_ms, n=5)
        median_ms = statistics.median(all_ms)
        pairs = zip(means_of_turns(all_ms), means_of_turns(theirs_ms), strict=True)
        times = statistics.median(theirs / ours for ours, theirs in pairs)
        per_second = step_tokens / median_ms * 1e3
        lines.append(
            f"| {name} | {median_ms:.1f} | {low:.1f} | {high:.1f} | {per_second:,.0f} | {times:.2f} | "
            f"{len(all_ms)} |"
        )
    return ["", *table(SPEED_HEADER, lines)]


def score_line(name: str, runs: Runs, theirs: Runs, code_bytes: int) -> str:
    """A line of the table; code_bytes: 0 where weights are compared before quantization."""
    size = f"{runs[0]['parameters']:,} | {mean_of(runs, 'steps'):.0f}"
    if code_bytes:
        told = f"{mean_of(runs, 'float_bpb'):.4f} | {mean_of(runs, 'bytes'):,.0f} | {code_bytes:,}"
    elif "average_bpb" in runs[0]:
        told = f"{mean_of(runs, 'last_bpb'):.4f} | {mean_of(runs, 'average_bpb'):.4f}"
    else:
        told = "- | -"
    return f"| {name} | {size} | {told} | {cells(runs, theirs)}"


def seed_by_seed(rows: dict[str, Runs], name: str, other: str) -> list[str]:
    """A sentence with the differences of one side's scores from another's; none without seeds of both."""
    reference = {run["seed"]: run["val_bpb"] for run in rows.get(other, [])}
    gains = [
        f"{run['seed']}: {run['val_bpb'] - reference[run['seed']]:+.4f}"
        for run in rows.get(name, []) if run["seed"] in reference
    ]  # fmt: skip
    if not gains:
        return []
    return ["", f"{name.capitalize()} minus {other}, seed by seed: {', '.join(gains)}."]


def is_shipped(rows: dict[str, Runs]) -> bool:
    """Whether all that was scored was shipped: not of public scripts that quantize in ways of their own."""
    return all("val_bpb" in run for name, runs in rows.items() if name != "speed" for run in runs)


def score_lines(rows: dict[str, Runs], code_bytes: dict[str, int]) -> list[str]:
    """The table of scores, and the differences seed by seed."""
    scored = {name: rows[name] for name in SIDES if name in rows and name != "speed"}
    shipped = is_shipped(rows)
    if not shipped:
        for name, runs in scored.items():
            scored[name] = [{**run, "val_bpb": run["float_bpb"]} for run in runs]
    theirs = scored.get("theirs", [])
    lines = []
    for name, runs in scored.items():
        code = code_bytes["theirs" if name in OF_THEIRS else "ours"] if shipped else 0
        lines.append(score_line(name, runs, theirs, code))
    told = []
    if not shipped:
        told += ["", UNSHIPPED]
        if "ours" in rows:
            size_bytes, val_bpb = mean_of(rows["ours"], "bytes"), mean_of(rows["ours"], "val_bpb")
            told[-1] += f" Ours ships {size_bytes:,.0f} bytes of weights, which score {val_bpb:.4f}."
    if any("average_bpb" in run for name in OF_THEIRS for run in rows.get(name, [])):
        told += ["", AVERAGED]
    for name, other in COMPARED:
        told += seed_by_seed(scored, name, other)
    return ["", *table(SCORE_HEADER if shipped else FLOAT_HEADER, lines), *told]


def told_sides(measured: dict[str, Any]) -> str:
    """What each side is, in a line."""
    rows = measured["rows"]
    given = " ".join(measured.get("theirs", []))
    own = f"with {f'`{given}` and ' if given else ''}its own defaults for everything else"
    told = []
    if measured["public"]:
        theirs = f"`{measured['public']}` of {measured['sha256']}, {own}"
        told.append(f"Theirs: {theirs}, in fp32 and without a compiler")
    if SHUFFLED in rows:
        told.append(f"{SHUFFLED}: on the sequences that ours trains on")
    if {"speed", AS_THEIRS, AS_THEIRS_SHUFFLED} & rows.keys():
        config = measured.get("as_theirs", "upstream_baseline.env")
        same = " with the same settings" if given else ""
        told.append(f"{AS_THEIRS}: `{config}` at this geometry{same}")
    told.append(f"ours: `{' '.join([measured['config'], *measured['set']])}`")
    return "; ".join(told)


def tables(measured: dict[str, Any]) -> list[str]:
    """What was equal, the speeds, the scores."""
    rows: dict[str, Runs] = measured["rows"]
    geometry = " ".join(f"{name}={value}" for name, value in measured["geometry"].items())
    scores = SHIPPED if is_shipped(rows) else "of the weights before quantization."
    by_clock = f"{measured['seconds']:g} s of training by the {measured['clock']} clock"
    length = by_clock if measured["seconds"] else f"{measured['budget']} of training"
    lines = [
        f"`{measured['data']}`, {geometry}. {told_sides(measured)}. One thread each; scores "
        f"after {length}, without overlap, on the first {measured['val_targets']:,} targets of the "
        f"validation text: {scores} Batches that ours reads for its Hessians come after these seconds.",
    ]  # fmt: skip
    if "speed" in rows:
        lines += speed_lines(rows["speed"], int(measured["geometry"]["TRAIN_BATCH_TOKENS"]))
    if rows.keys() - {"speed"}:
        lines += score_lines(rows, measured["code_bytes"])
    return lines


def name_of_script(path: Path) -> str:
    """Which public script a copy is by its name: `pr549` of pr549_train_gpt.py, and "" of train_gpt.py."""
    return path.stem.removesuffix("train_gpt").strip("_-")


def result_name(arguments: argparse.Namespace) -> str:
    """Of the folder of runs: which script, unless it is the challenge's, the data, the budget."""
    script = name_of_script(arguments.path)
    length = Budget(arguments.steps, arguments.seconds)
    return "-".join(["beside", *([script] if script else []), arguments.data.name, str(length)])


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?", default=Path(), help="copy of a public train_gpt.py")
    parser.add_argument("--data", type=Path, default=SAMPLE, help="folder of shards (the built-in sample)")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="SentencePiece model of the shards")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, default=0)
    budget.add_argument("--seconds", type=float, default=0.0, help="of the CPU, of training alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2025])
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings on top")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: below runs/)")
    parser.add_argument("--config", type=Path, default=REPO / "configs/cpu_demo.env")
    parser.add_argument(
        "--theirs", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the public script"
    )
    parser.add_argument(
        "--as-theirs", type=Path, metavar="CONFIG",
        help="the config that is the public script in ours; of train_gpt.py configs/upstream_baseline.env",
    )  # fmt: skip
    parser.add_argument("--val-tokens", type=int, default=200_000, help="targets to score")
    parser.add_argument(
        "--only", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE", help=", ".join(SIDES))
    arguments = parser.parse_args(argv)
    for item in (*arguments.set, *arguments.theirs):
        if "=" not in item:
            parser.error(f"{item}: expected NAME=VALUE")
    needed = {"speed", *OF_THEIRS} & set(arguments.only)
    if needed and not (arguments.path.name and arguments.seconds):
        parser.error(f"--only {' '.join(sorted(needed))}: expected the PATH of a script, and --seconds")
    return arguments


def main() -> None:
    """Measure what is not measured yet, and print the tables."""
    escape_unprintable()
    try:
        measure(parse(None))
    except (UpstreamError, ConfigError, BesideError) as error:
        raise SystemExit(str(error)) from error


def run_path(runs: Path, side: str, seed: int) -> Path:
    """Where a run of ours writes; what is kept of any run stands beside it, with .json at the end."""
    return runs / f"{side.replace(', ', '-').replace(' ', '-')}-seed{seed}"


def prepare(arguments: argparse.Namespace) -> None:
    """Make the built-in sample if it is the data. BesideError where not all of it is."""
    on_sample = arguments.data == SAMPLE
    if on_sample != (arguments.tokenizer == TOKENIZER):
        raise BesideError("--data and --tokenizer belong together: give both, or none for the sample")
    if on_sample and sample.main([]) != 0:
        raise BesideError(f"{SAMPLE}: the sample is not there; `python data/sample.py` makes it")


def check_alike(found: list[dict[str, Any]], folder: Path) -> None:
    """BesideError where runs of one table have unlike conditions."""
    for key in ALIKE:
        values = sorted({str(one[key]) for one in found})
        if len(values) > 1:
            raise BesideError(
                f"{folder}: {key} is {' here and '.join(values)} there; no table has both, so remove some "
                "runs, or name another --runs"
            )


def equal_in_all(arguments: argparse.Namespace, race: Race) -> dict[str, Any]:
    """What all runs of a table have in common."""
    theirs = arguments.path.read_bytes() if arguments.path.name else b""
    return {
        "data": arguments.data.name, "config": arguments.config.name, "set": arguments.set,
        "geometry": race.geometry(),
        "public": arguments.path.name, "sha256": hashlib.sha256(theirs).hexdigest()[:12],
        "seconds": arguments.seconds, "budget": str(race.budget), "clock": "cpu",
        "val_targets": race.config.val_tokens_limit,
        "theirs": arguments.theirs, "as_theirs": race.as_theirs_config.name,
        "code_bytes": {"theirs": len(theirs), "ours": race.code_bytes},
    }  # fmt: skip


def measure(arguments: argparse.Namespace) -> None:
    """Measure what the folder of runs lacks; print the tables of what it then has."""
    torch.set_num_threads(1)
    prepare(arguments)
    name = result_name(arguments)
    arguments.runs = arguments.runs or REPO / "runs" / name
    race = Race(arguments)
    measured = equal_in_all(arguments, race)
    arguments.runs.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for side in arguments.only:
            path = run_path(arguments.runs, side, seed).with_suffix(".json")
            with claimed(path) as mine:
                if mine:
                    found = {"measured": measured, **race.measure(side, seed)}
                    write_text(path, json.dumps(found) + "\n")
                    print(f"{side}, seed {seed}: {path}", file=sys.stderr, flush=True)
    rows: dict[str, Runs] = {}
    for side in SIDES:
        for path in sorted(arguments.runs.glob(f"{run_path(arguments.runs, side, 0).name[:-1]}*.json")):
            run = json.loads(path.read_text(encoding="utf-8"))
            if run.pop("measured") != measured:
                raise UpstreamError(f"{path}: was measured with other settings; name another --runs")
            rows.setdefault(side, []).append(run)
    runs = [run for of_side in rows.values() for run in of_side]
    if not runs:
        raise UpstreamError(f"{arguments.runs}: no run is finished")
    check_alike([run["conditions"] for run in runs], arguments.runs)
    print("\n".join([described(runs[0]["conditions"]), "", *tables({**measured, "rows": rows})]))


if __name__ == "__main__":
    main()
