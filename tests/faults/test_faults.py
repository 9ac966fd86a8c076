"""A fault matrix with real processes: whatever kills a run, what follows ends with the same result."""

import os
from pathlib import Path

import pytest

from tests.faults.faults import KINDS, matrix
from tests.support.planted import full_disk
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
    ended = lab.run(fault=full_disk(name, f"{name}.tmp"))
    if name in ("log.txt", "metrics.jsonl"):  # a line lost, never a run
        assert ended.status == 0 and ended.summary["losses"] == finished.summary["losses"]
    else:
        assert ended.status == 1 and name in ended.err and "Traceback" not in ended.err
