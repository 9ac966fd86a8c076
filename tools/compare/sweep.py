"""`sweep FILE`: run settings × seeds from one small file, and print a table with paired differences.

    # learning rates of the matrices
    seeds: 1337 42 2025
    all: CONFIG=configs/cpu_demo.env MAX_WALLCLOCK_SECONDS=0 ITERATIONS=400
    base:
    low: MATRIX_LR=0.02
    fork: script=../my_fork/train_gpt.py MY_SETTING=1
    slow_adapters: of=base TTT_LORA_LR=0.0001

A line is a name and its settings; a backslash at its end continues it on the next line. The first row is the
base of the comparison. `seeds` and `all` apply to every row. `start: torchrun --standalone --nproc_per_node=8
train_gpt.py` sets the command that starts a run (default: `python train_gpt.py`). `script=PATH` replaces the
last word of that command with another version of train_gpt.py. `of=ROW` trains nothing: it scores the
artifacts of that row again, with that row's settings and the ones given here. Settings in the shell apply to
every row, unless the row has its own.

The runs are in runs/FILE/ROW-seedS. If you start a sweep again, it skips what is finished and resumes what
has a checkpoint. A run without one starts over, and its old directory moves to runs/FILE/stopped. If you have
edited the script since a run finished, the sweep stops there. A run that fails or exceeds a limit ends the
sweep.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from tools.compare import overview
from tools.compare.driver import directory_of, is_finished, locked, run_once, scores_of, version_of
from tools.compare.rows import Row, Sweep, read_sweep
from tools.runs.conditions import unlike_conditions, unlike_data
from tools.runs.logs import STAGES
from tools.runs.runs import LOG
from tools.runs.settings import UNSET
from tools.runs.stats import PAIRED, p_text, paired
from tools.runs.writing import columns

Scores = dict[str, dict[str, float]]  # of a row: by stage, then by seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="lines of NAME: SETTING=VALUE …")
    runs = os.environ.get("RUNS_DIR") or "runs"
    parser.add_argument("--runs", type=Path, default=Path(runs), help=f"folder for sweeps (default: {runs})")
    parser.add_argument("--folder", type=Path, help="folder for the runs of this sweep (default: RUNS/FILE)")
    parser.add_argument(
        "--table", action="store_true", help="print the table of existing runs; start nothing"
    )


def run(args: argparse.Namespace) -> int:
    sweep = read_sweep(args.file)
    folder = args.folder or args.runs / sweep.name
    if not args.table:
        with locked(folder, sweep.name):
            failed = run_all(sweep, folder)
        if failed:
            print(f"tools sweep: {failed}; the runs after it were not started", file=sys.stderr)
            return 1
    directories = [directory_of(folder, row, seed) for row in sweep.rows for seed in sweep.seeds]
    begun = [overview.read_row(path) for path in directories if (path / LOG).is_file()]
    if begun:
        print(overview.table(begun))
        print()
    print(differences(sweep, folder))
    texts = overview.different_texts(begun)
    for warnings in (texts, mixed_versions(sweep, folder), mixed_places(sweep, folder)):
        for warning in warnings:
            print(warning)
    return 0


def run_all(sweep: Sweep, folder: Path) -> str:
    """Run the rows in turns, seed by seed. Returns why it ended early; empty text if all is well."""
    for seed in sweep.seeds:
        for row in sweep.rows.values():
            failed = run_once(row, seed, folder)
            if failed:
                return failed
    return ""


def differences(sweep: Sweep, folder: Path) -> str:
    """A table for each stage that two rows have reached: means, and differences from the first of them.

    A stage in which all rows are alike, as they are of one artifact, has none.
    """
    scores = {name: scores_by_stage(row, sweep.seeds, folder) for name, row in sweep.rows.items()}
    tables = []
    for stage in STAGES:
        reached = {name: found[stage] for name, found in scores.items() if stage in found}
        first = next(iter(reached.values()), {})
        if any(found != first for found in reached.values()) or (reached and len(scores) == 1):
            tables.append(table_of(overview.STAGE_HEADS[stage], reached))
    return "\n\n".join(tables) or "no two rows have different scores of the same kind yet"


def scores_by_stage(row: Row, seeds: list[str], folder: Path) -> Scores:
    """Bits per byte of the finished runs of a row."""
    found: Scores = {}
    for seed in seeds:
        for stage, score in scores_of(directory_of(folder, row.name, seed)).items():
            found.setdefault(stage, {})[seed] = score
    return found


def table_of(head: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """Per row the mean score; against the first row the paired difference, its 95% interval and p.

    A difference is new − base: negative is better.
    """
    base, *others = rows
    cells = []
    for name, scores in rows.items():
        shown = [UNSET] * 3
        found = paired(scores, rows[base]) if name != base else None
        if found is not None:
            shown[0] = f"{found.difference:+.5f}"
            if found.interval is not None:
                shown[1] = "{:+.5f} to {:+.5f}".format(*found.interval)
            if found.p is not None:
                shown[2] = p_text(found.p)
        cells.append([name, str(len(scores)), f"{fmean(scores.values()):.5f}", *shown])
    heads = [head, "seeds", "bits per byte"]
    if others:
        heads += [f"minus {base}", "95% interval", f"two-sided {PAIRED}"]
    return columns(heads, [row[: len(heads)] for row in cells])


def mixed_versions(sweep: Sweep, folder: Path) -> list[str]:
    """A warning for each script of which runs have kept more than one version."""
    versions: dict[str, set[str]] = {}
    for row in sweep.rows.values():
        kept = versions.setdefault(row.start[-1], set())
        for seed in sweep.seeds:
            kept.add(version_of(directory_of(folder, row.name, seed)))
    warnings = []
    for script, kept in versions.items():
        found = sorted(kept - {""})
        if len(found) > 1:
            warnings.append(f"warning: {script} changed between these runs: versions {', '.join(found)}")
    return warnings


def mixed_places(sweep: Sweep, folder: Path) -> list[str]:
    """A warning if the runs ran under different conditions, and for each row whose runs read other data."""
    warnings = []
    everywhere = []
    for row in sweep.rows.values():
        directories = [directory_of(folder, row.name, seed) for seed in sweep.seeds]
        finished = [directory for directory in directories if is_finished(directory)]
        everywhere += finished
        if finished and (read := unlike_data(finished)):
            warnings.append(f"warning: the runs of {row.name} did not read the same {read}")
    if everywhere and (unlike := unlike_conditions(everywhere)):
        warnings.append(f"warning: these runs ran under different conditions: {unlike}")
    return warnings
