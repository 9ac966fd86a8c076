"""The fault matrix: runs as real processes, something happens to each, and all must end with one result.

    FAULT_RUNS=200 pytest -m slow tests/faults  # so many runs; kinds in random order, each equally often

lost: a run could not be brought to its end. corrupted: at its end a number differs from that of a run which
nothing happened to, or half a file is left. hung: a process did not end when it should.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data import shards
from tests.support import tiny
from tests.support.planted import before
from tests.support.processes import Ended, Hung, Lab, Started, keep_what_scripts_give

Kind = Callable[[Lab, Ended, random.Random], None]
SHARD_TOKENS = 400  # so that a step needs one or two
SAVING: dict[str, Any] = {"CHECKPOINT_EVERY_SECONDS": 0.02, "WARMUP_STEPS": 1}
SLOW = "import time\n" + before("torch.optim.AdamW.step", "time.sleep(0.05)")
MARKS = {  # what a run has printed when a phase begins, of a run that begins at the first step
    "setup": "", "warm-up": "seed:", "train": "step:1/", "late in training": "step:5/", "hessians": "step:6/",
    "quantize": "peak memory", "test-time training": "artifact_bytes", "sliding window": "legal_ttt_exact",
    "round trip": "sliding_window_exact", "summary": "roundtrip_exact",
}
FULL_DISK = """
import builtins, errno, io
real, left = builtins.open, [WRITES]
class Full(io.FileIO):
    def write(self, data):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", self.name)
        return super().write(data)
def full(path, mode="r", *given, **more):
    if mode[0] not in "wax" or "runs" not in str(path):
        return real(path, mode, *given, **more)
    file = io.BufferedWriter(Full(path, mode[0], opener=more.get("opener")))
    return file if "b" in mode else io.TextIOWrapper(file, encoding="utf-8")
builtins.open = full
"""
READ_ONLY = before("builtins.open", """
    if [*given, "r"][1] not in ("r", "rb") and str(given[0]).startswith(os.environ["DATA_PATH"]):
        raise OSError(30, "Read-only file system", str(given[0]))
""")
SLOW_SHARDS = before("builtins.open", """
    if str(given[0]).endswith(".bin"):
        import time
        time.sleep(SECONDS)
""")
JUMPS = "import time, itertools\njumps = itertools.cycle([0.0, 2e9, 5.0])\ntime.time = lambda: next(jumps)\n"


class Corrupted(AssertionError):
    """A run has ended with another result than one that nothing happened to."""


def assert_whole(ended: Ended, reference: Ended, every_line: bool = True) -> None:
    """The result of a run that nothing had happened to, and nothing half-written beside it."""
    for key in ("stream_hash", "losses", "steps", "tokens"):
        if ended.summary[key] != reference.summary[key]:
            raise Corrupted(f"{key}: {ended.summary[key]} instead of {reference.summary[key]}")
    if ended.summary["artifact"]["sha256"] != reference.summary["artifact"]["sha256"]:
        raise Corrupted("the artifact differs")
    if left := [*ended.directory.glob(".*.tmp")]:
        raise Corrupted(f"left behind: {left}")
    steps = {event["step"] for event in ended.events if event["event"] == "train"} if every_line else set()
    if every_line and steps != {1, 2, 3, 4, 5, 6}:
        raise Corrupted(f"metrics.jsonl has steps {steps}")


def reached(started: Started, mark: str, seconds: float) -> bool:
    """Wait until some seconds after a process printed a mark; False when it has ended before."""
    while mark not in started.out and started.process.is_alive():
        time.sleep(0.005)
    started.process.join(seconds)
    return started.process.is_alive()


def go_on(lab: Lab, ended: Ended) -> Ended:
    """The run brought to its end: as it stands, taken up again, or from the start where nothing was saved."""
    if [*lab.folder.glob("runs/*/summary.json")]:
        by_signal = [128 + number for number in ENDING]
        assert ended.status in (0, -signal.SIGKILL, *by_signal), ended.err
        return ended
    saved = [*lab.folder.glob("runs/*/checkpoint.pt")]
    if not saved:
        shutil.rmtree(lab.folder / "runs", ignore_errors=True)
    return lab.succeed(**SAVING, **({"RESUME": saved[0].parent} if saved else {}))


def told(ended: Ended, *named: str) -> None:
    """A process that ended with an error says it in one message, with these words."""
    assert ended.status == 1 and "Traceback" not in ended.err, ended.err
    assert any(name in ended.err for name in named), (named, ended.err)


def end_by(number: int, lab: Lab, reference: Ended, source: random.Random) -> None:
    started = lab.start(fault=SLOW, **SAVING)
    if reached(started, source.choice([*MARKS.values()]), source.uniform(0.0, 0.2)):
        started.send(number)
    assert_whole(go_on(lab, started.wait()), reference)


def checkpoint_flipped(lab: Lab, reference: Ended, source: random.Random) -> None:
    """A bit of a checkpoint turns: it is refused when it is read, or it was one that nothing depends on."""
    started = lab.start(fault=SLOW, **SAVING)
    if reached(started, source.choice(["step:1/", "step:3/", "step:5/"]), source.uniform(0.0, 0.1)):
        started.send(signal.SIGKILL)
    ended = started.wait()
    saved = [*lab.folder.glob("runs/*/checkpoint.pt")]
    if not saved:
        assert_whole(go_on(lab, ended), reference)
        return
    content = bytearray(saved[0].read_bytes())
    content[source.randrange(len(content))] ^= 1 << source.randrange(8)
    saved[0].write_bytes(content)
    resumed = lab.run(**SAVING, RESUME=saved[0].parent)
    if resumed.status != 0:
        told(resumed, "cannot be read")
        shutil.rmtree(lab.folder / "runs")
        resumed = lab.succeed(**SAVING)
    assert_whole(resumed, reference)


def killed_after_training(lab: Lab, reference: Ended, source: random.Random) -> None:
    """Between training and artifact: nobody asked to save."""
    started = lab.start()
    if reached(started, "checkpoint:", source.uniform(0.0, 0.1)):
        started.send(signal.SIGKILL)
    ended = started.wait()
    assert [*lab.folder.glob("runs/*/summary.json"), *lab.folder.glob("runs/*/checkpoint.pt")], "lost"
    assert_whole(go_on(lab, ended), reference)


def paused(lab: Lab, reference: Ended, source: random.Random) -> None:
    started = lab.start(fault=SLOW, **SAVING)
    if reached(started, source.choice([*MARKS.values()]), source.uniform(0.0, 0.2)):
        started.send(signal.SIGSTOP)
        time.sleep(source.uniform(0.0, 1.0))
        started.send(signal.SIGCONT)
    ended = started.wait()
    assert ended.status == 0, ended.err
    assert_whole(ended, reference)


def disk_full(lab: Lab, reference: Ended, source: random.Random) -> None:
    fault = FULL_DISK.replace("WRITES", str(source.randrange(120)))
    ended = lab.run(fault=fault, **SAVING)
    if ended.status != 0:
        told(ended, "No space left")
    assert_whole(go_on(lab, ended), reference, every_line=False)


def damage(how: Callable[..., object], lab: Lab, reference: Ended, source: random.Random) -> None:
    """Do something to a shard after the checks, and undo it once the run has ended."""
    lab = lab.copy_dataset()
    path = source.choice(sorted(lab.dataset.glob("fineweb_train_*.bin"))[:6])
    before = path.read_bytes()
    started = lab.start(fault=SLOW, **SAVING)
    if reached(started, source.choice(["seed:", "step:1/", "step:3/"]), source.uniform(0.0, 0.1)):
        how(path, source)
    ended = started.wait()
    if ended.status != 0:
        told(ended, path.name)
    path.write_bytes(before)
    assert_whole(go_on(lab, ended), reference)


def overwrite_tokens(path: Path, _: random.Random) -> None:
    """Put ids beyond the vocabulary into a shard in place, as damage comes."""
    with open(path, "r+b") as file:
        file.seek(shards.HEADER_BYTES)
        file.write(np.full(SHARD_TOKENS, 60_000, shards.TOKEN_DTYPE).tobytes())


def slow_shards(lab: Lab, reference: Ended, source: random.Random) -> None:
    fault = SLOW_SHARDS.replace("SECONDS", str(source.uniform(0.0, 0.5)))
    assert_whole(lab.succeed(fault=fault), reference)


def despite(fault: str, lab: Lab, reference: Ended, _: random.Random) -> None:
    """A fault that costs nothing."""
    assert_whole(lab.succeed(fault=fault, **SAVING), reference)


def same_run_id(lab: Lab, reference: Ended, source: random.Random) -> None:
    first = lab.start(fault=SLOW)
    if reached(first, source.choice([*MARKS.values()][1:]), source.uniform(0.0, 0.2)):
        told(lab.run(), "RUN_ID=run")
    ended = first.wait()
    assert ended.status == 0, ended.err
    assert_whole(ended, reference)


def rank_killed(lab: Lab, reference: Ended, source: random.Random) -> None:
    # One that only waited until it lost patience, after a quarter of an hour, would hang.
    ranks = lab.ranks(2, fault=SLOW, **SAVING)
    victim = source.randrange(2)
    mark = source.choice([*MARKS.values()][1:])
    if reached(ranks[0], mark, source.uniform(0.0, 0.2)):
        ranks[victim].send(signal.SIGKILL)
    ended = [rank.wait() for rank in ranks]
    if not [*lab.folder.glob("runs/*/summary.json")]:
        assert any(one.status != 0 for one in ended)  # the other one may just have done its part
        whole = go_on(lab, ended[0])  # on one rank: the same data, and the same numbers to rounding
        if whole.summary["stream_hash"] != reference.summary["stream_hash"]:
            raise Corrupted("stream_hash differs")


ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
KINDS: dict[str, Kind] = {
    "killed": partial(end_by, signal.SIGKILL), **{one.name: partial(end_by, one) for one in ENDING},
    "checkpoint_flipped": checkpoint_flipped,
    "killed_after_training": killed_after_training, "paused": paused, "disk_full": disk_full,
    "shard_corrupted": partial(damage, overwrite_tokens),
    "shard_truncated": partial(damage, lambda path, rng: os.truncate(path, rng.randrange(2 * SHARD_TOKENS))),
    "shard_deleted": partial(damage, lambda path, _: path.unlink()), "shards_slow": slow_shards,
    "clock_jumps": partial(despite, JUMPS), "same_run_id": same_run_id,
    "data_read_only": partial(despite, READ_ONLY), "rank_killed": rank_killed,
}
OUTCOMES: dict[type, str] = {Hung: "hung", subprocess.TimeoutExpired: "hung", Corrupted: "corrupted"}


def make_small_shards(folder: Path) -> None:
    """The tiny dataset cut into many shards."""
    tiny.make_dataset(folder)
    paths = sorted(folder.glob("fineweb_train_*.bin"))
    tokens = np.concatenate([tiny.tokens_of(path) for path in paths])
    for path in (*paths, folder / "manifest.json"):
        path.unlink()
    for number, start in enumerate(range(0, len(tokens) - SHARD_TOKENS, SHARD_TOKENS)):
        shard = tokens[start : start + SHARD_TOKENS]
        shards.write_shard(folder / f"fineweb_train_{number:06d}.bin", shard)


def in_turn(source: random.Random) -> Iterator[str]:
    """Kinds without end, each as often as the others, in random order."""
    while True:
        yield from source.sample([*KINDS], len(KINDS))


def matrix(folder: Path, runs: int, seed: int) -> tuple[str, int]:
    """Do so many runs. Returns the line to print, and how many went wrong; these are told on stderr."""
    source = random.Random(seed)
    done: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    start = time.monotonic()
    data = folder / "data"
    data.mkdir()
    make_small_shards(data)
    keep_what_scripts_give(folder / "kept")
    lab = Lab(folder, data)
    reference = lab.elsewhere("reference").succeed()
    for number, kind in zip(range(runs), in_turn(source), strict=False):
        here = lab.elsewhere(f"run{number}")
        mine = random.Random(source.random())
        try:
            KINDS[kind](here, reference, mine)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            name = OUTCOMES.get(type(error), "lost")
            wrong[name] += 1
            print(f"run {number}, {kind}: {name}", file=sys.stderr)
            traceback.print_exc()
        done[kind] += 1
        shutil.rmtree(here.folder)
    counts = ", ".join(f"{wrong[name]} {name}" for name in ("lost", "corrupted", "hung"))
    line = f"faults: {done.total()} runs in {time.monotonic() - start:.0f} s, {counts}; {dict(done)}"
    return line, wrong.total()
