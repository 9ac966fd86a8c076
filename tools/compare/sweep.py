"""`sweep FILE`: settings × seeds from one small file, then their table, with paired differences.

    # learning rates of the matrices
    seeds: 1337 42 2025
    all: CONFIG=configs/cpu_demo.env MAX_WALLCLOCK_SECONDS=0 ITERATIONS=400
    base:
    low: MATRIX_LR=0.02
    high: MATRIX_LR=0.03

A line is a name and settings. `seeds` and `all` hold for every row; `start: torchrun --standalone
--nproc_per_node=8 train_gpt.py` is how a run starts, by default `python train_gpt.py`. The runs stand in
runs/FILE/NAME-seedS. Started again, the sweep skips what is finished and resumes what has a checkpoint. A run
that has none begins anew; its old directory moves to runs/FILE/stopped. A run that fails, or that does not
keep a limit, ends the sweep.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import REPO
from tools.compare import overview
from tools.compare.diff import columns
from tools.runs.errors import RecordError
from tools.runs.folder import CONFIG, required_object
from tools.runs.reading import exact_text
from tools.runs.runs import FINISHED, SUMMARY, settings_of
from tools.runs.script import LAUNCHERS, Config, ConfigError, similar_setting
from tools.runs.settings import UNSET, plain_values
from tools.runs.stats import deviation, mean, p_text

LINE = re.compile(r"([A-Za-z0-9][\w.+-]*):(.*)")
RESERVED = ("seeds", "all", "start")
SET_BY_THE_SWEEP = ("SEED", "RUN_ID", "RUNS_DIR", "RESUME", "EVAL_ONLY")


@dataclass(frozen=True)
class Sweep:
    """The rows of settings of a file, the first of which is the base, and the seeds of each."""

    name: str
    rows: dict[str, dict[str, str]]
    seeds: list[str]
    start: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="lines of NAME: SETTING=VALUE …")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for the folder of this sweep")
    parser.add_argument(
        "--table", action="store_true", help="print the table of existing runs; start nothing"
    )


def run(args: argparse.Namespace) -> int:
    sweep = read_sweep(args.file)
    folder = args.runs / sweep.name
    if not args.table:
        for seed in sweep.seeds:
            for row in sweep.rows:
                failed = run_one(sweep, row, seed, folder)
                if failed:
                    print(f"tools sweep: {failed}; the runs behind it were not started", file=sys.stderr)
                    return 1
    directories = overview.run_directories([folder]) if folder.is_dir() else []
    if directories:
        print(overview.table([overview.read_row(path) for path in directories]))
        print()
    print(differences(sweep, folder))
    return 0


def read_sweep(path: Path) -> Sweep:
    """The sweep that a file describes. RecordError with the line that cannot be read."""
    try:
        lines = exact_text(path.read_bytes()).splitlines()
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: {error}; expected lines of NAME: SETTING=VALUE …") from error
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None or match[1] in found:
            what = "a name that is there already" if match else "no NAME: SETTING=VALUE …"
            raise RecordError(f"{path} line {number}: {line.strip()!r} is {what}")
        try:
            found[match[1]] = shlex.split(match[2])
        except ValueError as error:
            raise RecordError(f"{path} line {number}: {line.strip()!r}: {error}") from error
    everywhere = assignments(path, "all", found.get("all", []))
    rows = {name: {**everywhere, **assignments(path, name, words)}
            for name, words in found.items() if name not in RESERVED}  # fmt: skip
    seeds = found.get("seeds") or [everywhere.get("SEED", Config().as_env()["SEED"])]
    if not rows:
        raise RecordError(
            f"{path}: no row; expected a line NAME: SETTING=VALUE … next to {', '.join(RESERVED)}"
        )
    for name, settings in rows.items():
        for seed in seeds:
            try:
                Config.from_env({**settings, "SEED": seed})
            except ConfigError as error:
                raise RecordError(f"{path}, row {name}: {error}") from error
    return Sweep(path.stem, rows, seeds, found.get("start") or [sys.executable, str(REPO / "train_gpt.py")])


def assignments(path: Path, name: str, words: Sequence[str]) -> dict[str, str]:
    """The words NAME=VALUE of a line. RecordError for another word, or a variable that the sweep sets."""
    settings = {}
    for word in words:
        variable, equals, value = word.partition("=")
        if not equals or variable in SET_BY_THE_SWEEP:
            raise RecordError(f"{path}, row {name}: {word!r} is no SETTING=VALUE, or the sweep sets it; "
                              "seeds stand in the line `seeds:`")  # fmt: skip
        known = variable == "CONFIG" or variable in Config().as_env() or variable.startswith(LAUNCHERS)
        if not known:
            near = similar_setting(variable) or "a name that train_gpt.py --help lists"
            raise RecordError(f"{path}, row {name}: {variable} is no setting; did you mean {near}?")
        settings[variable] = value
    return settings


def run_one(sweep: Sweep, row: str, seed: str, folder: Path) -> str:
    """Start, resume or skip one run. Returns why the sweep ends; empty text if it goes on."""
    directory = folder / f"{row}-seed{seed}"
    settings = {**sweep.rows[row], "SEED": seed}
    if (directory / CONFIG).is_file():
        refuse_other_settings(directory, settings)
    if not is_finished(directory):
        variables = {**settings, "RUNS_DIR": str(folder), "RUN_ID": directory.name}
        if (directory / "checkpoint.pt").is_file():
            variables = {**settings, "RESUME": str(directory)}
        elif directory.exists():
            keep_aside(directory)
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        print(f"sweep {row}, seed {seed}: {' '.join(words)} {shlex.join(sweep.start)}", flush=True)
        exit_status = start(sweep.start, variables)
        if exit_status != 0 or not is_finished(directory):
            return f"{directory} ended with exit status {exit_status}"
    over = overview.failed_limits(required_object(directory / SUMMARY))
    return f"{directory} did not keep its limits: {', '.join(over)}" if over else ""


def start(command: Sequence[str], variables: dict[str, str]) -> int:
    """The exit status of a run. An interrupt reaches the run too: it gets the time for its checkpoint."""
    process = subprocess.Popen(command, env={**os.environ, **variables})
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def is_finished(directory: Path) -> bool:
    """Whether the run wrote its summary. RecordError for a damaged one, or the run would be made again."""
    path = directory / SUMMARY
    return path.is_file() and required_object(path).get("exit") == FINISHED


def refuse_other_settings(directory: Path, settings: dict[str, str]) -> None:
    """RecordError if the existing run was started with other settings than the file has now."""
    wanted = plain_values(Config.from_env(settings).as_env())
    written = plain_values(settings_of(directory / CONFIG))
    differs = [name for name in sorted(wanted.keys() & written.keys()) if wanted[name] != written[name]]
    differs = [name for name in differs if name not in SET_BY_THE_SWEEP]
    if differs:
        got = ", ".join(f"{name}={written[name]}, not {wanted[name]}" for name in differs)
        raise RecordError(f"{directory} was started with other settings ({got}); give the row another name, "
                          "or move that directory away")  # fmt: skip


def keep_aside(directory: Path) -> None:
    """Rename the directory of a run that cannot be resumed: nothing is overwritten."""
    stopped = directory.parent / "stopped"
    stopped.mkdir(exist_ok=True)
    number = len(list(stopped.iterdir())) + 1
    aside = stopped / f"{directory.name}.{number}"
    directory.rename(aside)
    print(f"sweep: {directory.name} had no checkpoint: it is kept as {aside}, and begins anew")


def differences(sweep: Sweep, folder: Path) -> str:
    """Per row the mean score; against the first row the paired difference, its standard error and p."""
    base = next(iter(sweep.rows))
    cells = []
    scores: dict[str, dict[str, float]] = {}
    for row in sweep.rows:
        scores[row] = {}
        for seed in sweep.seeds:
            directory = folder / f"{row}-seed{seed}"
            score = overview.read_row(directory).val_bpb if is_finished(directory) else None
            if score is not None:
                scores[row][seed] = score
        pairs = [(scores[row][seed], scores[base][seed]) for seed in scores[row] if seed in scores[base]]
        own = list(scores[row].values())
        cells.append([row, str(len(own)), f"{mean(own):.5f}" if own else UNSET,
                      *(paired(pairs) if row != base else [UNSET] * 3)])  # fmt: skip
    return columns(["row", "seeds", "val_bpb", f"less {base}", "standard error", "paired t-test"], cells)


def paired(pairs: Sequence[tuple[float, float]]) -> list[str]:
    """Mean difference, its standard error, and p of the two-sided paired t-test."""
    if not pairs:
        return [UNSET] * 3
    gaps = [new - base for new, base in pairs]
    spread = deviation(gaps)
    if not spread:
        return [f"{mean(gaps):+.5f}", UNSET, UNSET]
    from scipy import stats

    p = float(stats.ttest_1samp(gaps, 0.0).pvalue)
    return [f"{mean(gaps):+.5f}", f"{spread / len(gaps) ** 0.5:.5f}", p_text(p)]
