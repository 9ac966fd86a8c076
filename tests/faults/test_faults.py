"""A fault matrix with real processes: whatever kills a run, what follows ends with the same result."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.faults import KINDS, MARKS, SLOW, assert_whole, matrix, reached
from tests.faults.soak import soak
from tests.support.processes import SCRIPT, Ended, Lab, Started
from tests.support.waiting import DEADLINE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
KILLS = 30
SEED = 20240520


def killed(started: Started, mark: str, seconds: float) -> bool:
    """Kill a process some seconds after it printed a mark; False when it has ended before."""
    if not reached(started, mark, seconds):
        assert started.wait().status == 0, started.wait().err
        return False
    started.send(signal.SIGKILL)
    started.wait()
    return True


def test_kills_at_random_times_in_every_phase(lab: Lab, finished: Ended) -> None:
    source = random.Random(SEED)
    kills: Counter[str] = Counter()
    runs = 0
    while kills.total() < KILLS:
        runs += 1
        here = lab.elsewhere(f"run{runs}")
        for attempt in range(4):  # three kills, and then to the end
            saved = [*here.folder.glob("runs/*/checkpoint.pt")]
            resume = {"RUN_ID": None, "RESUME": saved[0].parent} if saved else {"RUN_ID": f"attempt{attempt}"}
            started = here.start(fault=SLOW, CHECKPOINT_EVERY_SECONDS=0.02, **resume)
            phase = min(MARKS, key=lambda name: (kills[name], source.random()))
            if attempt == 3:
                assert started.wait().status == 0, started.wait().err
            elif killed(started, MARKS[phase], source.uniform(0.0, 0.2)):
                kills[phase] += 1
            if [*here.folder.glob("runs/*/summary.json")]:
                break
        (directory,) = [path.parent for path in here.folder.glob("runs/*/summary.json")]
        for other in here.folder.glob("runs/*"):  # killed before there was anything to go on from
            if other != directory:
                assert not [*other.glob("checkpoint.pt")]
                other.rename(here.folder / other.name)
        assert_whole(Ended(0, "", "", here.folder / "runs"), finished)
    print(f"\n{kills.total()} kills in {runs} runs, none lost, corrupted or hung: {dict(kills)}")


@pytest.mark.parametrize("count", [2])
def test_kills_of_one_rank_under_torchrun(count: int, lab: Lab) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    settings = lab.settings(ITERATIONS=100000, CHECKPOINT_EVERY_SECONDS=0.2)
    log = lab.folder / "runs" / "run" / "log.txt"
    process = subprocess.Popen([*command, str(SCRIPT)], env=settings, cwd=lab.folder,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
    end = time.monotonic() + DEADLINE_SECONDS
    while not (log.exists() and "step:8/" in log.read_text("utf-8")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    subprocess.run(["kill", "-KILL", children[-1]], check=True)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode != 0 and "SIGKILL" in err
    assert not Path(f"/proc/{children[0]}").exists()
    resumed = lab.start(RESUME=log.parent, ITERATIONS=100000)
    resumed.wait_for("resumed:")
    resumed.send(signal.SIGTERM)
    resumed.wait()


def test_the_fault_matrix(tmp_path: Path) -> None:
    """FAULT_RUNS: how many runs, else two of each kind."""
    line, wrong = matrix(tmp_path, int(os.environ.get("FAULT_RUNS", 2 * len(KINDS))), SEED)
    print("\n" + line)
    assert not wrong, line


@pytest.mark.parametrize(
    "name", ["log.txt", "metrics.jsonl", "config.env", "train_gpt.py", "train_gpt.shipped.py", "model.bin"]
)
def test_a_disk_that_is_full_at_one_file(name: str, lab: Lab, finished: Ended) -> None:
    fault = "import builtins, errno\nreal = builtins.open\ndef full(path, mode='r', *rest, **more):\n"
    fault += f"    if mode[0] in 'wa' and str(path).strip('.').endswith(({name!r}, {name + '.tmp'!r})):\n"
    fault += "        raise OSError(errno.ENOSPC, 'No space left on device', str(path))\n"
    ended = lab.run(fault=fault + "    return real(path, mode, *rest, **more)\nbuiltins.open = full\n")
    if name in ("log.txt", "metrics.jsonl"):  # a line lost, never a run
        assert ended.status == 0 and ended.summary["losses"] == finished.summary["losses"]
    else:
        assert ended.status == 1 and name in ended.err and "Traceback" not in ended.err


def test_a_short_soak(tmp_path: Path) -> None:
    line, wrong = soak(tmp_path, seconds=20.0, seed=SEED)
    print("\n" + line)
    assert not wrong, line
