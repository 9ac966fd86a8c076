"""Small models over arms × seeds: train_gpt.py trains, quantizes and scores each arm; then a table.

    python benchmarks/experiments.py TABLE (--steps N | --seconds S | --tflop F)
        [--data DIR --tokenizer FILE] [--size 4x64] [--seeds 42 1337 2025] [--only ARM ...]
        [--scores NAME ...] [--bytes N] [--set NAME=VALUE ...] [--runs FOLDER] [--table]

TABLE is a file of benchmarks/arms/: its arms are settings over those of the table and the size. An arm may
name an arm (`of`) whose artifact it scores in another way.
The budget of a run is steps, CPU seconds of training, or 10^12 floating-point operations of training: those
of the products with weights in both passes, without attention and optimizer. --bytes bounds the weights of an
artifact, without the code. Without --data the built-in sample is made where it is missing, and is the data.

Each run is the script as a user starts it, on one thread, by a clock of CPU seconds (cpu_clock.py). Its run
directory stays, so `tools pack` can make records of it. What the folder of runs holds is not measured again.
Several processes share the work: each run is claimed by one. Runs of another script, program, machine or
other settings are refused. Seeds are the outer loop, so an early end leaves whole rows.
"""

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sentencepiece import SentencePieceProcessor
from torch.utils.flop_counter import FlopCounterMode

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks import conditions as where  # noqa: E402
from benchmarks import paired  # noqa: E402
from data import sample  # noqa: E402
from data.files import escape_unprintable  # noqa: E402
from tools.runs.writing import write_text  # noqa: E402
from train_gpt import Config, ConfigError  # noqa: E402

ARMS = REPO / "benchmarks" / "arms"
SIZES = "sizes"  # the file there that holds no arms
SAMPLE = REPO / "data" / "datasets" / sample.NAME
TOKENIZER = REPO / "data" / "tokenizers" / sample.TOKENIZER_FILE
CLOCK = REPO / "benchmarks" / "cpu_clock.py"
PROGRAM = (Path(__file__), CLOCK)
SCORES = ("float", "roundtrip", "sliding_window", "legal_ttt")
# What all runs of a table must have in common, as conditions have it.
ALIKE = ("script", "program", "processor", "torch", "dtype", "threads")
HESSIAN_SECONDS = 600.0  # more than any run here needs for them
# Of every run, beneath the table, the size and the arm.
COMMON = {
    "DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "CPU_THREADS": "1", "TRAIN_PREFETCH": "0", "SHUFFLE": "1",
    "VAL_BATCH_SIZE": "65536", "WARMUP_STEPS": "0", "VAL_LOSS_EVERY": "0", "MAX_EVAL_SECONDS": "0",
    "GPTQ_DAMPING": "0.05", "GPTQ_CALIBRATION_BATCHES": "16", "EVAL_STRIDE": "0", "TTT_ENABLED": "0",
    "EVAL_SEQ_LEN": "0",
}  # fmt: skip


class ExperimentError(RuntimeError):
    """A table, a folder of runs or a run is not what it should be; the message says what to do."""


class Arm(NamedTuple):
    """One row of a table."""

    settings: dict[str, str]
    of: str = ""  # the arm whose artifact is scored; "": it trains its own


class Budget(NamedTuple):
    """How long each run trains: by exactly one of these."""

    steps: int = 0
    seconds: float = 0.0
    tflop: float = 0.0

    def settings(self, values: dict[str, str]) -> dict[str, str]:
        """The settings that end a run of these values after the budget."""
        if self.seconds:
            return {"ITERATIONS": "1000000", **seconds_of_training(self.seconds, values)}
        steps = self.steps or steps_of(1e12 * self.tflop, Config.from_env(values))
        return {"MAX_WALLCLOCK_SECONDS": "0", "ITERATIONS": str(steps)}

    def __str__(self) -> str:
        if self.tflop:
            return f"{self.tflop:g}tflop"
        return f"{self.seconds:g}s" if self.seconds else f"{self.steps}steps"


@functools.cache  # the settings of an arm are asked for with every run that is looked for
def flop_of_step(config: Config, looping: bool) -> int:
    """Floating-point operations of the products with weights in both passes of one step.

    looping: with the extra passes. On a CPU torch counts no attention, as the usual 6 a weight and token.
    """
    ids_BT = torch.zeros(1, config.train_seq_len, dtype=torch.int64)
    starts = torch.tensor([0, config.train_seq_len], dtype=torch.int32)
    model = train_gpt.build_model(config)
    with FlopCounterMode(display=False) as counter:
        model.loss(ids_BT, ids_BT, starts, looping).backward()
    return counter.get_total_flops() * (config.train_batch_tokens // config.train_seq_len)


def steps_of(flop: float, config: Config) -> int:
    """The steps of a run that trains with so many operations; layers are looped as its schedule says."""
    plain = flop_of_step(config, looping=False)
    looped = flop_of_step(config, looping=True)
    share = sum(train_gpt.loop_is_on(at / 1000, config) for at in range(1000)) / 1000
    return round(flop / (plain + share * (looped - plain)))


def seconds_of_training(seconds: float, values: dict[str, str]) -> dict[str, str]:
    """The settings that end training after so many seconds; Hessians of all batches come after them."""
    reserve = HESSIAN_SECONDS if Config.from_env(values).gptq else 0.0
    return {"MAX_WALLCLOCK_SECONDS": f"{seconds + reserve:g}", "GPTQ_RESERVE_SECONDS": f"{reserve:g}"}


def as_settings(values: dict[str, Any]) -> dict[str, str]:
    """Settings as the environment has them."""
    return {name: str(value) for name, value in values.items()}


def read_json(name: str) -> dict[str, Any]:
    """A file of benchmarks/arms/. ExperimentError if there is none."""
    path = ARMS / f"{name}.json"
    if not path.is_file():
        names = ", ".join(sorted(path.stem for path in ARMS.glob("*.json")))
        raise ExperimentError(f"{path}: no such table; there are {names}")
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def read_arms(table: dict[str, Any], size: str) -> dict[str, Arm]:
    """The arms of a table at a size, the first one the base of all comparisons. ExperimentError.

    An arm that has a CONFIG gets the geometry of the size; all others its choices for the default as well.
    """
    sizes = read_json(SIZES)
    fitting = table.get("sizes", list(sizes))  # a table that names layers is of one depth
    if size not in fitting:
        raise ExperimentError(f"--size {size}: expected one of {', '.join(fitting)}")
    own = sizes[size]
    like = sizes[own.get("as", size)]
    geometry = as_settings({**like["geometry"], **own["geometry"]})
    of_default = as_settings({**like["default"], **own.get("default", {})})
    arms: dict[str, Arm] = {}
    for name, row in table["arms"].items():
        own = as_settings({key: value for key, value in row.items() if key.isupper()})
        of = row.get("of", "")
        if of and of not in arms:
            raise ExperimentError(f"arm {name!r}: is of {of!r}, which is no arm above it")
        below = arms[of].settings if of else {}
        if not of:
            has_config = "CONFIG" in {**table["settings"], **own}
            below = {**COMMON, **geometry, **({} if has_config else of_default)}
            below.update(as_settings(table["settings"]))
        arms[name] = Arm({**below, **own}, of)
    return arms


def conditions(dtype: str, program: Sequence[Path] = PROGRAM) -> dict[str, Any]:
    """Where and when a run is measured, and by which files of a program."""
    sha256 = hashlib.sha256(b"".join(path.read_bytes() for path in program)).hexdigest()[:12]
    return {**where.conditions(), "threads": 1, "program": sha256, "dtype": dtype}


def check_alike(found: list[dict[str, Any]], folder: Path) -> None:
    """ExperimentError where runs of one table have unlike conditions."""
    for key in ALIKE:
        values = sorted({str(one[key]) for one in found})
        if len(values) > 1:
            raise ExperimentError(
                f"{folder}: {key} is {' here and '.join(values)} there; no table has both, so remove some "
                "runs, or name another --runs"
            )


def run_script(script: Path, settings: dict[str, str], directory: Path) -> dict[str, Any]:
    """Start the script with these settings on one thread, by the CPU's clock; the figures of its run.

    A half-finished run in the directory is removed first. ExperimentError with the end of what it printed.
    """
    if directory.exists():
        shutil.rmtree(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Settings that the shell has would reach every arm.
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
        raise ExperimentError(f"{directory}: the script ended with {ended.returncode}:\n{printed}")
    return figures(directory)


def figures(directory: Path) -> dict[str, Any]:
    """What a finished run says of itself: size, steps, seconds, and bits per byte of each score."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    log = (directory / "log.txt").read_text(encoding="utf-8")
    scores = {name: loss["bits_per_byte"] for name, loss in summary["losses"].items()}
    seconds = 0.0
    for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        # The weights that are shipped, before they are quantized.
        if event["event"] == "val" and event["label"].startswith("DIAGNOSTIC"):
            scores["float"] = event["val_bpb"]
        if event["event"] == "train":
            seconds = event["train_time_ms"] / 1e3
    return {
        "seed": summary["seed"], "parameters": int(re.findall(r"^model_params:(\d+)", log, re.MULTILINE)[0]),
        "dtype": re.findall(r" dtype:(\S+)", log)[0].removeprefix("torch."),
        "steps": summary["steps"], "seconds": seconds, "stream_hash": summary["stream_hash"],
        "eval_seconds": summary["limits"]["eval_seconds"]["value"],
        "bytes": summary["artifact"]["bytes"], "code_bytes": summary["code"]["bytes_wrapped"],
        "val_targets": summary["data"]["val_tokens"], "scores": scores,
    }  # fmt: skip


def place_of(path: Path) -> str:
    """From the repository's folder if it lies there: a run that is packed names no folder of a machine."""
    place = path.resolve()
    return str(place.relative_to(REPO) if place.is_relative_to(REPO) else place)


def without_places(settings: dict[str, str]) -> dict[str, str]:
    """Settings for a record, with the names of data and tokenizer instead of their places on this machine."""
    return {name: Path(value).name if name.endswith("_PATH") else value for name, value in settings.items()}


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


class Experiment:
    """The runs of a table in a folder."""

    def __init__(self, folder: Path, arms: dict[str, Arm], budget: Budget, shared: dict[str, str],
                 weight_bytes: int = 0) -> None:  # fmt: skip
        """shared: settings of all arms, as data and tokenizer. weight_bytes: of an artifact; 0: no bound."""
        self.folder = folder
        self.arms = arms
        self.budget = budget
        self.shared = shared
        self.weight_bytes = weight_bytes
        self.failed: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def directory(self, name: str, seed: int) -> Path:
        """Of the script's run; the record stands beside it, with .json at the end."""
        plain = re.sub(r"[^\w.-]+", "-", name).strip("-.")
        return self.folder / f"{plain}-seed{seed}"

    def record_path(self, name: str, seed: int) -> Path:
        """Of what is kept of a run."""
        directory = self.directory(name, seed)
        return directory.with_name(f"{directory.name}.json")

    def settings(self, name: str) -> dict[str, str]:
        """All settings of an arm but its seed and its place."""
        values = {**self.arms[name].settings, **self.shared}
        return {**values, **self.budget.settings(values)}

    def kept(self, name: str, seed: int) -> dict[str, Any] | None:
        """The record of a run that is there. ExperimentError where it was measured with other settings."""
        path = self.record_path(name, seed)
        if not path.exists():
            return None
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        mine = {"arm": name, "settings": without_places(self.settings(name))}
        for key, value in mine.items():
            if record[key] != value:
                raise ExperimentError(
                    f"{path}: has {key} {record[key]}, expected {value}; name another --runs"
                )
        return record

    def measure(self, name: str, seed: int) -> None:
        """Run an arm with a seed, and keep its record."""
        arm = self.arms[name]
        script = REPO / "train_gpt.py"
        settings = self.settings(name)
        given = {**settings, "SEED": str(seed)}
        if self.weight_bytes:
            # The shipped script holds the settings of its run, this one too: here a number as long.
            given["ARTIFACT_BYTES_MAX"] = str(self.weight_bytes + 50_000)
            shipped = train_gpt.shipped_code(script.read_bytes())
            code_bytes = len(train_gpt.with_settings(shipped, Config.from_env(given)))
            given["ARTIFACT_BYTES_MAX"] = str(self.weight_bytes + code_bytes)
        if arm.of:
            given["EVAL_ONLY"] = str(self.directory(arm.of, seed).resolve() / "model.bin")
        before = conditions(settings["COMPUTE_DTYPE"])
        found = run_script(script, given, self.directory(name, seed))
        before["dtype"] = found.pop("dtype")
        if arm.of:  # the artifact is the other arm's, and so is its training
            trained = json.loads(self.record_path(arm.of, seed).read_text(encoding="utf-8"))
            found.update({key: trained[key] for key in ("steps", "seconds", "stream_hash")})
            found["scores"] = {**trained["scores"], **found["scores"]}
        source = hashlib.sha256(script.read_bytes()).hexdigest()[:12]
        record = {"arm": name, "settings": without_places(settings), "source": source,
                  **found, "seed": seed, "conditions": before}  # fmt: skip
        write_text(self.record_path(name, seed), json.dumps(record, indent=1) + "\n")
        told = " ".join(f"{score}={value:.4f}" for score, value in found["scores"].items())
        print(f"{name}, seed {seed}: {found['steps']} steps, {told}", file=sys.stderr, flush=True)

    def try_once(self, name: str, seed: int) -> bool:
        """Measure a run that nobody has and nobody is at; whether this process did."""
        if self.kept(name, seed) is not None or f"{name}, seed {seed}" in self.failed:
            return False
        of = self.arms[name].of
        if of and self.kept(of, seed) is None:
            return False
        with claimed(self.record_path(name, seed)) as mine:
            if not mine:
                return False
            try:
                self.measure(name, seed)
            except ExperimentError as error:
                # One arm that fails costs the others nothing.
                print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
                self.failed.append(f"{name}, seed {seed}")
        return True

    def share(self, names: list[str], seeds: list[int]) -> None:
        """Measure what is missing, until all is there or in the hands of others."""
        order = [(name, seed) for seed in seeds for name in names]
        while any([self.try_once(name, seed) for name, seed in order]):
            pass

    def rows(self) -> dict[str, paired.Runs]:
        """All records that the folder holds, by arm. ExperimentError where they are of unlike conditions."""
        found: dict[str, paired.Runs] = {}
        for name in self.arms:
            for path in sorted(self.folder.glob(f"{self.directory(name, 0).name[:-1]}*.json")):
                record = self.kept(name, int(path.stem.rpartition("seed")[2]))
                assert record is not None
                found.setdefault(name, []).append(record)
        check_alike([run["conditions"] for runs in found.values() for run in runs], self.folder)
        return found


def mean_of(runs: paired.Runs, figure: str) -> float:
    """Over the runs."""
    return statistics.mean(run[figure] for run in runs)


def score_table(rows: dict[str, paired.Runs], score: str) -> list[str]:
    """A line per arm: its mean, and its difference from the first arm over the seeds that both have."""
    scored: dict[str, paired.Runs] = {}
    for name, runs in rows.items():
        having = [{**run, score: run["scores"][score]} for run in runs if score in run["scores"]]
        if having:
            scored[name] = having
    if not scored:
        return []
    base, *others = scored
    found = {name: paired.difference(scored[name], scored[base], score) for name in others}
    looks = {name: one.p for name, one in found.items() if one is not None}
    corrected = dict(zip(looks, paired.holm(list(looks.values())), strict=True))
    lines = []
    for name, runs in scored.items():
        one = found.get(name)
        told = "- | - | - | -"
        if one is not None:
            holm = paired.told_p(corrected[name])
            told = f"{one.mean:+.4f} | {one.error:.4f} | {paired.told_p(one.p)} | {holm}"
        values = [run[score] for run in runs]
        spread = f"{statistics.stdev(values):.4f}" if len(values) > 1 else "-"
        lines.append(f"| {name} | {statistics.mean(values):.4f} | {spread} | {told} | {len(runs)} |")
    header = f"| arm | {score} | std | {score} minus {base} | its error | p | p, Holm | seeds |"
    return ["", *paired.table(header, lines)]


def learning_table(rows: dict[str, paired.Runs]) -> list[str]:
    """A line per arm: its score of test-time training less that of its sliding window."""
    lines = []
    for name, runs in rows.items():
        having = [run for run in runs if {"sliding_window", "legal_ttt"} <= run["scores"].keys()]
        after = [{"seed": run["seed"], "val_bpb": run["scores"]["legal_ttt"]} for run in having]
        before = [{"seed": run["seed"], "val_bpb": run["scores"]["sliding_window"]} for run in having]
        found = paired.difference(after, before)
        if found:
            told = f"{found.mean:+.4f} | {found.error:.5f} | {paired.told_p(found.p)} | {found.seeds}"
            lines.append(f"| {name} | {told} |")
    if not lines:
        return []
    return ["", *paired.table("| arm | legal_ttt minus sliding_window | its error | p | seeds |", lines)]


def cost_table(rows: dict[str, paired.Runs]) -> list[str]:
    """A line per arm: its size and its training."""
    lines = []
    for name, runs in rows.items():
        steps, seconds, size = (mean_of(runs, figure) for figure in ("steps", "seconds", "bytes"))
        lines.append(f"| {name} | {runs[0]['parameters']:,} | {steps:.0f} | {seconds:.0f} | {size:,.0f} |")
    return ["", *paired.table("| arm | parameters | steps | CPU s | weights, bytes |", lines)]


def tables(measured: dict[str, Any]) -> list[str]:
    """What was held equal, and a table for each score. `changes` of the raw file has what the arms change."""
    rows: dict[str, paired.Runs] = measured["rows"]
    seeds = sorted({run["seed"] for runs in rows.values() for run in runs})
    targets = next(iter(rows.values()))[0]["val_targets"]
    bound = f"; artifacts of {measured['bytes']:,} bytes at most, without code" if measured["bytes"] else ""
    loads = [run["conditions"]["load"] for runs in rows.values() for run in runs]
    lines = [
        f"{measured['title']}: {measured['about']} `{measured['data']}`, size {measured['size']}, "
        f"{measured['budget']} of training{bound}; seeds {' '.join(map(str, seeds))}; {targets:,} validation "
        f"targets; load average {min(loads):g} to {max(loads):g}.",
        *cost_table(rows),
    ]  # fmt: skip
    for score in measured["scores"]:
        lines += score_table(rows, score)
    if "legal_ttt" in measured["scores"]:
        lines += learning_table(rows)
    return lines


def told_changes(table: dict[str, Any], arms: list[str]) -> dict[str, str]:
    """What each of these arms changes, in words of settings."""
    found = {}
    for name in arms:
        row = table["arms"][name]
        words = [f"{key}={value}" for key, value in row.items() if key.isupper()]
        found[name] = " ".join(words)
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every program that starts runs."""
    parser.add_argument("--data", type=Path, default=SAMPLE, help="folder of shards (the sample)")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="SentencePiece model of the shards")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, default=0)
    budget.add_argument("--seconds", type=float, default=0.0, help="of the CPU, of training alone")
    budget.add_argument("--tflop", type=float, default=0.0, help="10^12 operations of training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2025])
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings on top")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: below runs/)")


def prepare(arguments: argparse.Namespace) -> None:
    """Make the built-in sample if it is the data. ExperimentError where not all of it is."""
    on_sample = arguments.data == SAMPLE
    if on_sample != (arguments.tokenizer == TOKENIZER):
        raise ExperimentError("--data and --tokenizer belong together: give both, or none for the sample")
    if on_sample and sample.main([]) != 0:
        raise ExperimentError(f"{SAMPLE}: the sample is not there; `python data/sample.py` makes it")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", help="a file of benchmarks/arms/, without .json")
    add_options(parser)
    parser.add_argument("--size", default="4x64", help="an entry of benchmarks/arms/sizes.json")
    parser.add_argument("--only", nargs="+", metavar="ARM", help="arms to measure; all by default")
    parser.add_argument("--scores", nargs="+", choices=SCORES, help="to print; the table's own by default")
    parser.add_argument("--bytes", type=int, default=0, help="of an artifact's weights at most; 0: no bound")
    parser.add_argument("--table", dest="print_only", action="store_true", help="measure nothing more")
    return parser.parse_args(argv)


def experiment(arguments: argparse.Namespace) -> int:
    """Measure what is missing and print the table. Exit status 1 where a run failed."""
    table = read_json(arguments.table)
    arms = read_arms(table, arguments.size)
    names = arguments.only or list(arms)
    if unknown := set(names) - arms.keys():
        raise ExperimentError(f"--only {sorted(unknown)}: expected names among {list(arms)}")
    prepare(arguments)
    shared = {
        "DATA_PATH": place_of(arguments.data),
        "TOKENIZER_PATH": place_of(arguments.tokenizer),
        "VOCAB_SIZE": str(SentencePieceProcessor(model_file=str(arguments.tokenizer)).vocab_size()),
        **dict(one.split("=", 1) for one in arguments.set),
    }
    budget = Budget(arguments.steps, arguments.seconds, arguments.tflop)
    name = "-".join(["experiments", arguments.table, arguments.data.name, arguments.size, str(budget)])
    folder = arguments.runs or REPO / "runs" / "experiments" / name.partition("-")[2]
    mine = Experiment(folder, arms, budget, shared, arguments.bytes)
    if not arguments.print_only:
        mine.share(names, arguments.seeds)
    rows = mine.rows()
    if not rows:
        raise ExperimentError(f"{folder}: no run is finished")
    measured = {
        "title": table["title"], "about": table["about"], "data": arguments.data.name, "size": arguments.size,
        "budget": str(budget), "bytes": arguments.bytes, "scores": arguments.scores or table["scores"],
        "changes": told_changes(table, list(rows)), "rows": rows,
    }  # fmt: skip
    of_first = next(iter(rows.values()))[0]["conditions"]
    print("\n".join([where.described(of_first), "", *tables(measured)]))
    return 1 if mine.failed else 0


def main(argv: list[str] | None = None) -> int:
    """Run an experiment; an error is one message."""
    escape_unprintable()
    try:
        return experiment(parse(argv))
    except (ExperimentError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
