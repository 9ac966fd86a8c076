"""What a step of a small model takes on one thread and on more, by how long a thread that waits spins.

    python benchmarks/threads.py [--config configs/cpu_demo.env] [--threads 1 2] [--spins 0 1000 3000 10000]
        [--turns 6] [--steps 20] [--keep]

Each number of threads and of spins (GOMP_SPINCOUNT, which is read when torch is loaded) is a process of its
own. They take turns: alone on the machine, then beside another run of the same kind, then beside a program
that keeps one core busy. Nothing else may run meanwhile: --turns has to be enough for what does so anyhow.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks import paired, results, speed  # noqa: E402
from benchmarks.turns import Turns  # noqa: E402

TITLE = "Threads of a small model"
SETTINGS = ["alone", "two at once", "beside a busy core"]
HEADER = "| threads | spins | alone | p20 | p80 | two at once | beside a busy core |"


class Row(NamedTuple):
    """How a process waits: its threads, and the times one of them looks before it sleeps."""

    threads: int
    spins: int


def rows_of(threads: list[int], spins: list[int]) -> list[Row]:
    """All pairs; a single thread waits for no other, so that it has one row."""
    found = []
    for number in threads:
        of_number = spins if number > 1 else spins[:1]
        found += [Row(number, count) for count in of_number]
    return found


def keep_busy(begun: Any) -> None:
    """Do nothing, with all of one core; begun: the event that says so."""
    begun.set()
    for _ in itertools.count():
        pass


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """While this lasts another program wants one core."""
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=keep_busy, args=(begun,), daemon=True)
    process.start()
    begun.wait()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def at_once(runs: list[Turns], steps: int) -> list[float]:
    """Milliseconds of the steps of all of these, taken at the same time."""
    with ThreadPoolExecutor(len(runs)) as pool:
        turns = list(pool.map(lambda run: run.steps(steps), runs))
    return [ms for turn in turns for ms in turn.ms]


def measure(arguments: argparse.Namespace, runs: Path) -> list[dict[str, Any]]:
    """Milliseconds of every step of each row, by what else ran."""
    rows = rows_of(arguments.threads, arguments.spins)
    env = speed.settings(arguments.config, runs, [], WARMUP_STEPS="0")
    measured = [{**row._asdict(), **{setting: [] for setting in SETTINGS}} for row in rows]
    with contextlib.ExitStack() as ends:
        pairs = []
        for number, row in enumerate(rows):
            own = {"OMP_NUM_THREADS": str(row.threads), "MKL_NUM_THREADS": str(row.threads),
                   "GOMP_SPINCOUNT": str(row.spins)}  # fmt: skip
            pairs.append([
                ends.enter_context(Turns(REPO / "train_gpt.py", {**env, **own, "RUN_ID": f"{number}{side}"}))
                for side in "ab"
            ])  # fmt: skip
        for run in itertools.chain(*pairs):  # untimed: first steps allocate
            run.steps(arguments.steps)
        for _ in range(arguments.turns):
            for row_measured, pair in zip(measured, pairs, strict=True):
                row_measured["alone"] += at_once(pair[:1], arguments.steps)
            for row_measured, pair in zip(measured, pairs, strict=True):
                row_measured["two at once"] += at_once(pair, arguments.steps)
            with busy_core():
                for row_measured, pair in zip(measured, pairs, strict=True):
                    row_measured["beside a busy core"] += at_once(pair[:1], arguments.steps)
    return measured


def line(row: dict[str, Any]) -> str:
    """A line of the table: medians, and where a fifth of the steps lies below and above."""
    fifths = statistics.quantiles(row["alone"], n=5)
    middle = [f"{statistics.median(row[setting]):.1f}" for setting in SETTINGS]
    spins = row["spins"] if row["threads"] > 1 else "-"
    return (f"| {row['threads']} | {spins} | {middle[0]} | {fifths[0]:.1f} | {fifths[3]:.1f} | {middle[1]} | "
            f"{middle[2]} |")  # fmt: skip


def tables(measured: dict[str, Any]) -> list[str]:
    """A line for each number of threads and of spins."""
    return [
        f"`{measured['config']}.env`, milliseconds of a step by the clock, medians of {measured['turns']} "
        f"turns of {measured['steps']} steps. Two at once: two such runs, each with as many threads.",
        "", *paired.table(HEADER, [line(row) for row in measured["rows"]]),
    ]  # fmt: skip


def main() -> None:
    """Measure, print the table, and with --keep store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=REPO / "configs/cpu_demo.env")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--spins", type=int, nargs="+", default=[0, 1000, 3000, 10000])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    arguments = parser.parse_args()
    before = results.conditions()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments, Path(folder))
    measured = {
        "config": arguments.config.stem, "turns": arguments.turns, "steps": arguments.steps, "rows": rows
    }  # fmt: skip
    results.finish("threads", before, measured, arguments.keep)


if __name__ == "__main__":
    main()
