"""A fault matrix with real processes: whatever kills a run, what follows ends with the same result."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.faults import KINDS, matrix
from tests.support.processes import SCRIPT, Ended, Lab
from tests.support.waiting import DEADLINE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SEED = 20240520


def test_kills_of_one_rank_under_torchrun(lab: Lab) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
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
