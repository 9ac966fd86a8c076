"""A fault matrix with real processes: whatever kills a run, what follows ends with the same result."""

import os
from pathlib import Path

import pytest

from tests.faults.faults import KINDS, matrix
from tests.support.processes import Ended, Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SEED = 20240520


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
