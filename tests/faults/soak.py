"""A long run under random faults, against the same run left alone: nothing lost, nothing that grows.

    make soak                       # 20 minutes of faults, and the runs to compare with
    SECONDS=60 SEED=2 python tests/faults/soak.py

One run trains on the CPU while its process is stopped and continued, ended by SIGTERM or SIGKILL and resumed,
and while its shards cannot be read for a while. Then the same steps run without any of that: stream hash,
artifact and scores must be equal to the last bit. In both, from the second to the last quarter of a process's
training, memory, threads and file handles must not have grown. Prints one line; exit status 1 if that fails.
"""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support import tiny
from tests.support.processes import PRELOAD, SERVER, Ended, Lab, Started, keep_what_scripts_give
from tests.support.waiting import DEADLINE_SECONDS

SAMPLE_SECONDS = 0.2
ENOUGH_SAMPLES = 20
TRAINING_SHARE = 0.5  # of the seconds under faults; the rest goes into pauses and new starts
MOST_MIB = 16.0  # what the allocator may keep
WATCHED = {"TTT_ENABLED": 0, "TRAIN_LOG_EVERY": 100, "VAL_LOSS_EVERY": 500}
# Where a file named `stall` lies in the working directory, no shard can be opened: the reader waits.
STALLS = """
import builtins, time
real = builtins.open
def late(path, *given, **more):
    while str(path).endswith(".bin") and os.path.exists("stall"):
        time.sleep(0.01)
    return real(path, *given, **more)
builtins.open = late
"""


@dataclass
class Life:
    """One process: what it used while it trained, as (MiB, threads, files)."""

    started: Started
    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def watch(self, seconds: float) -> None:
        """Sample for so long, or until it ends."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self.started.process.is_alive():
            self.sample()
            time.sleep(min(left, SAMPLE_SECONDS))

    def sample(self) -> None:
        """Note what it uses now, if it is training."""
        out = self.started.out
        pid = self.started.process.pid
        if not re.search(r"^step:\d", out, re.M) or "DIAGNOSTIC" in out or "stopped by" in out:
            return
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            files = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:  # it has just ended
            return
        if "VmRSS" in status:
            used = int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), files
            self.samples.append(used)

    def growth(self) -> tuple[float, int, int] | None:
        """MiB, threads and files more in the last than in the second quarter; None for a short life."""
        if len(self.samples) < ENOUGH_SAMPLES:
            return None
        quarter = len(self.samples) // 4
        mib, threads, files = zip(*self.samples[quarter : 2 * quarter], strict=True)
        mib_late, threads_late, files_late = zip(*self.samples[-quarter:], strict=True)
        grown_mib = statistics.median(mib_late) - statistics.median(mib)
        return grown_mib, min(threads_late) - min(threads), min(files_late) - min(files)


def left_alone(lab: Lab, **changes: Any) -> tuple[Ended, Life]:
    """A run that nothing happens to, watched."""
    life = Life(lab.start(**changes))
    life.watch(math.inf)
    return life.started.wait(), life


def disturb(life: Life, source: random.Random, counts: Counter[str], until: float) -> None:
    """Faults in random order until one of them ends the process, or it ends by itself, or time is up."""
    stall = life.started.runs_dir.parent / "stall"
    death = time.monotonic() + source.uniform(1.0, 12.0) * source.choice([1, 1, 1, 4])
    while life.started.process.is_alive() and time.monotonic() < until:
        fault = source.choice(["pause", "stall", "none"])
        if time.monotonic() > death:
            fault = source.choice(["SIGTERM", "SIGKILL"])
            life.started.send(signal.Signals[fault])
            life.started.process.join(DEADLINE_SECONDS)
        elif fault == "pause":
            life.started.send(signal.SIGSTOP)
            time.sleep(source.uniform(0.0, 0.5))
            life.started.send(signal.SIGCONT)
        elif fault == "stall":
            stall.touch()
            life.watch(source.uniform(0.0, 1.0))
            stall.unlink()
        counts[fault] += 1
        life.watch(source.uniform(0.0, 1.0))


def disturbed(
    lab: Lab, seconds: float, source: random.Random, counts: Counter[str], **changes: Any
) -> tuple[Ended, list[Life]]:
    """A run under faults for so many seconds, taken up again each time; then to its end."""
    lives: list[Life] = []
    until = time.monotonic() + seconds
    while True:
        for directory in lab.folder.glob("runs/*"):  # ended before there was anything to go on from
            if not [*directory.glob("checkpoint.pt")]:
                shutil.rmtree(directory)
        left = [*lab.folder.glob("runs/*")]
        resume: dict[str, Any] = {"RESUME": left[0]} if left else {}
        lives.append(Life(lab.start(fault=STALLS, **{**changes, **resume})))
        disturb(lives[-1], source, counts, until)
        lives[-1].watch(math.inf if time.monotonic() > until else 0.0)
        ended = lives[-1].started.wait()
        if [*lab.folder.glob("runs/*/summary.json")]:
            return ended, lives
        if ended.status not in (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM):
            raise AssertionError(f"ended by itself with status {ended.status}: {ended.out}{ended.err}")


def step_seconds(ended: Ended) -> float:
    """Seconds that a step took, over a whole run."""
    last = [event for event in ended.events if event["event"] == "train"][-1]
    return last["train_time_ms"] / 1e3 / last["step"]


def soak(folder: Path, seconds: float, seed: int) -> tuple[str, list[str]]:
    """Runs under faults for so many seconds, each against its twin. Returns the line, and what was wrong."""
    source = random.Random(seed)
    counts: Counter[str] = Counter()
    start = time.monotonic()
    data = folder / "data"
    data.mkdir()
    tiny.make_dataset(data)
    SERVER.set_forkserver_preload(PRELOAD.split())
    keep_what_scripts_give(folder / "kept")
    lab = Lab(folder, data)
    lives: list[Life] = []
    wrong: list[str] = []
    left = seconds
    total = 0
    alone, _ = left_alone(lab.elsewhere("try"), **WATCHED, ITERATIONS=100)
    while left > seconds / 10:  # a run may end before its time, when the machine has become faster
        steps = max(100, int(TRAINING_SHARE * left / step_seconds(alone)))
        changes: dict[str, Any] = {**WATCHED, "ITERATIONS": steps}
        saving = {"CHECKPOINT_EVERY_SECONDS": max(0.2, seconds / 200)}
        begun = time.monotonic()
        ended, several = disturbed(lab.elsewhere(f"faults{total}"), left, source, counts, **saving, **changes)
        left -= time.monotonic() - begun
        alone, one = left_alone(lab.elsewhere(f"alone{total}"), **changes)
        compared = ("stream_hash", "losses", "steps", "tokens", "artifact")
        wrong += [f"{key} differs" for key in compared if ended.summary[key] != alone.summary[key]]
        lives += [*several, one]
        total += steps
    growths = [growth for one in lives if (growth := one.growth())]
    mib, threads, files = (max(values) for values in zip(*growths, strict=True)) if growths else (0.0, 0, 0)
    if mib > MOST_MIB or threads > 0 or files > 0:
        wrong.append("something grows")
    faults = ", ".join(f"{counts[name]} {name}" for name in ("SIGTERM", "SIGKILL", "pause", "stall"))
    verdict = "; ".join(wrong) or "stream hash, artifact and scores equal those of runs left alone"
    line = (f"soak: {seconds - left:.0f} s of faults in {time.monotonic() - start:.0f} s, {total} steps, "
            f"{len(lives)} processes, {faults}; in {len(growths)} of their lives memory {mib:+.1f} MiB, "
            f"threads {threads:+d}, files {files:+d} at most; {verdict}")  # fmt: skip
    return line, wrong


def main() -> int:
    """Soak for SECONDS (1200) from SEED (1). Exit status 1 where something was wrong."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        seconds = float(os.environ.get("SECONDS", 1200))
        seed = int(os.environ.get("SEED", 1))
        line, wrong = soak(Path(folder), seconds, seed)
    print(line, flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
