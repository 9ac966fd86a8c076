"""benchmarks/pod.py on a CPU: what it measures, alone and with two ranks, and that it sees a foreign rank."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import REPO, Ended, Lab

POD = REPO / "benchmarks" / "pod.py"
TINY = ("--read-mb", "0.02", "--write-mb", "0.1", "--copy-mb", "0.1", "--matmul", "64")
NUMBER = r"\d[\d.e+-]*"


def measured(ended: Ended) -> dict[str, list[str]]:
    """The cells behind each name of the table."""
    rows = [line.strip("| ").split(" | ") for line in ended.out.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in rows[1:]}


@pytest.mark.parametrize("count", [1, 2])
def test_it_measures_what_there_is_and_says_what_there_is_not(count: int, lab: Lab) -> None:
    ended = [rank.wait() for rank in lab.ranks(count, arguments=TINY, script=POD)]
    assert [one.status for one in ended] == [0] * count, ended[0].err
    rows = measured(ended[0])
    assert len(rows) == 5 and all(one.out == "" for one in ended[1:])
    for name in ("data read MB/s", "matmul TFLOP/s", "all-reduce GB/s")[: 1 + count]:
        assert re.fullmatch(" ".join([NUMBER] * count), rows[name][1]), rows
    assert re.search("a shard of 200 MB.*(ok|slow)", " ".join(rows["data read MB/s"]))
    assert re.fullmatch(NUMBER, rows["runs write MB/s"][1])
    for name in ("pinned copy GB/s", "all-reduce GB/s")[: 3 - count]:
        assert "skipped" in " ".join(rows[name])
    assert not [*lab.folder.glob("runs/*")] and not [*lab.folder.glob("runs/.*")]


def test_ranks_on_different_machines_are_an_error(lab: Lab) -> None:
    fault = "import platform\nif os.environ['RANK'] == '1':\n    platform.machine = lambda: 'other'\n"
    ended = [rank.wait() for rank in lab.ranks(2, arguments=TINY, script=POD, fault=fault)]
    assert [one.status for one in ended] == [1, 1]
    assert "error: device differs between ranks" in ended[0].err and "other CPU" in ended[0].err


def test_no_data_is_no_failure(lab: Lab) -> None:
    ended = lab.succeed(*TINY, script=POD, DATA_PATH=lab.folder / "none")
    assert "no shards in" in " ".join(measured(ended)["data read MB/s"])
