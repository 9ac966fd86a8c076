"""A run that was stopped goes on as if it had not been; a damaged or foreign checkpoint is never believed."""

from __future__ import annotations

import math
import pickle
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import Ended, Lab, Started

LEAVE_SECONDS = 10.0  # from a signal to the end of the process
# Long enough steps that a signal finds the one that it is meant for.
SLOW_STEPS = """
import time, torch
step = torch.optim.AdamW.step
def slow(self, *given):
    time.sleep(0.1)
    return step(self, *given)
torch.optim.AdamW.step = slow
"""


def stop_at(started: Started, step: int, number: int = signal.SIGTERM) -> Ended:
    """Send a signal once a step has been logged; the process must save and leave soon."""
    started.wait_for(f"step:{step}/6 ")
    started.send(number)
    ended = started.wait(LEAVE_SECONDS)
    assert ended.status == 128 + number, ended.err
    assert f"stopped by signal {number}" in ended.out and f"RESUME={ended.directory}" in ended.out
    assert re.search(r"^checkpoint:\S+checkpoint.pt step:[1-6]$", ended.out, re.M)
    assert not (ended.directory / "summary.json").exists()
    return ended


def assert_same_result(ended: Ended, finished: Ended) -> None:
    """The same weights, data and scores, to the last bit."""
    assert ended.summary["artifact"]["sha256"] == finished.summary["artifact"]["sha256"]
    assert ended.summary["stream_hash"] == finished.summary["stream_hash"]
    assert ended.summary["losses"] == finished.summary["losses"]
    assert (ended.summary["steps"], ended.summary["tokens"]) == (6, 6 * 256)


def train_losses(ended: Ended) -> dict[int, float]:
    return {event["step"]: event["train_loss"] for event in ended.events if event["event"] == "train"}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Ended:
    """A run with a checkpoint, stopped by a signal; to be copied, not used."""
    lab = Lab(tmp_path_factory.mktemp("stopped"), dataset)
    return stop_at(lab.start(fault=SLOW_STEPS, CHECKPOINT_EVERY_SECONDS=0.05), 3)


@pytest.fixture
def copy(stopped: Ended, lab: Lab) -> Path:
    """A run directory of this test's own, to resume and to damage."""
    return Path(shutil.copytree(stopped.directory, lab.folder / "runs" / "run"))


@pytest.mark.parametrize(("step", "number"), [(1, signal.SIGTERM), (4, signal.SIGINT)])
def test_a_resumed_run_equals_one_never_stopped(step: int, number: int, lab: Lab, finished: Ended) -> None:
    stop_at(lab.start(fault=SLOW_STEPS), step, number)
    ended = lab.succeed(RESUME=lab.folder / "runs" / "run", WARMUP_STEPS=step, TRAIN_PREFETCH=step % 2)
    assert_same_result(ended, finished)
    assert train_losses(ended) == train_losses(finished)
    log = (ended.directory / "log.txt").read_text("utf-8")
    assert log.index("stopped by signal") < log.index("resumed:") < log.index("done: ")


def test_a_run_stopped_twice_on_other_numbers_of_ranks(lab: Lab, finished: Ended) -> None:
    ranks = lab.ranks(2, fault=SLOW_STEPS)
    ranks[0].wait_for("step:1/6 ")
    ranks[1].send(signal.SIGTERM)  # one rank caught it: all save and leave
    ended = [rank.wait(LEAVE_SECONDS) for rank in ranks]
    assert all(one.status == 128 + signal.SIGTERM for one in ended) and "stopped by signal" in ended[0].out
    directory = ended[0].directory
    stop_at(lab.start(fault=SLOW_STEPS, RESUME=directory), 4)
    ranks = lab.ranks(2, RESUME=directory)
    last, _ = (rank.wait() for rank in ranks)
    assert last.status == 0, last.err
    assert last.summary["stream_hash"] == finished.summary["stream_hash"]
    for name, loss in last.summary["losses"].items():
        assert math.isclose(loss["nats"], finished.summary["losses"][name]["nats"], rel_tol=2e-3), name
    assert train_losses(last) == pytest.approx(train_losses(finished), rel=1e-4)


def test_the_clock_goes_on_where_it_stopped(lab: Lab) -> None:
    changes: dict[str, Any] = {
        "MAX_WALLCLOCK_SECONDS": 4,
        "GPTQ_RESERVE_SECONDS": 1,
        "ITERATIONS": 100000,
        "EVAL_STRIDE": 0,
        "TTT_ENABLED": 0,
        "TRAIN_LOG_EVERY": 5,
    }
    started = lab.start(**changes)
    started.wait_for("step:10/")
    started.send(signal.SIGTERM)
    ended = started.wait(LEAVE_SECONDS)
    before_ms = [e["train_time_ms"] for e in ended.events if e["event"] == "train"][-1]
    last = lab.succeed(RESUME=ended.directory, **changes)
    limit = last.summary["limits"]["train_seconds"]
    assert limit["ok"] and 2.0 < limit["value"] <= 4.0
    (resumed_ms,) = re.findall(r"^resumed:\S+ step:\d+ train_time:(\d+)ms", last.out, re.M)
    assert before_ms <= float(resumed_ms) + 1 < limit["value"] * 1e3
    times_ms = [event["train_time_ms"] for event in last.events if event["event"] == "train"]
    assert times_ms == sorted(times_ms) and times_ms[-1] > float(resumed_ms)
    again = lab.run(RESUME=ended.directory, **changes)  # it is finished: nothing may touch it
    assert again.status == 1 and "RESUME" in again.err and last.summary == again.summary


def test_a_signal_in_evaluation_leaves_the_artifact_and_says_how_to_go_on(lab: Lab, finished: Ended) -> None:
    started = lab.start(CHECKPOINT_EVERY_SECONDS=1000, EVAL_STRIDE=1, VAL_BATCH_SIZE=256, TTT_ENABLED=0)
    started.wait_for("final_int6_roundtrip_exact")
    started.send(signal.SIGTERM)
    ended = started.wait(LEAVE_SECONDS)
    assert ended.status == 128 + signal.SIGTERM and "Traceback" not in ended.err
    assert (
        f"RESUME={ended.directory}" in ended.err and f"EVAL_ONLY={ended.directory / 'model.bin'}" in ended.err
    )
    assert "phase eval_" in ended.err
    assert_same_result(lab.succeed(RESUME=ended.directory), finished)


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "pickle"])
def test_a_damaged_checkpoint_is_refused(damage: str, copy: Path, lab: Lab) -> None:
    path = copy / "checkpoint.pt"
    canary = lab.folder / "canary"
    content = path.read_bytes()
    damaged = {"cut": content[: len(content) // 2], "empty": b"", "garbage": b"\x80\x02garbage" * 99}
    path.write_bytes(damaged.get(damage, pickle.dumps(Touch(str(canary)))))
    ended = lab.run(RESUME=copy)
    assert ended.status == 1 and "Traceback" not in ended.err
    assert f"RESUME: {path} cannot be read" in ended.err
    assert not canary.exists()


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_nothing_in_a_checkpoint_is_executed(copy: Path, lab: Lab) -> None:
    canary = lab.folder / "canary"
    torch.save(Touch(str(canary)), copy / "checkpoint.pt")
    ended = lab.run(RESUME=copy)
    assert not canary.exists()
    assert ended.status == 1 and "cannot be read" in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize(
    "changes",
    [{"SEED": 1}, {"MODEL_DIM": 64}, {"TRAIN_BATCH_TOKENS": 512}, {"ITERATIONS": 7}, {"EMA_DECAY": 0},
     {"MATRIX_LR": 0.5}, {"SHUFFLE": 0}, {"NUM_LOOPS": 0}],
    ids=str,
)  # fmt: skip
def test_other_settings_are_refused_by_name(changes: dict[str, object], copy: Path, lab: Lab) -> None:
    before = (copy / "checkpoint.pt").read_bytes()
    ended = lab.run(RESUME=copy, **changes)
    (name,) = changes
    assert ended.status == 1 and "Traceback" not in ended.err
    assert name in ended.err or name.lower() in ended.err
    assert (copy / "checkpoint.pt").read_bytes() == before and not (copy / "summary.json").exists()


def test_other_data_is_refused(copy: Path, lab: Lab) -> None:
    other = lab.copy_dataset()
    shard = other.dataset / "fineweb_train_000001.bin"
    shard.rename(shard.with_name("fineweb_train_000007.bin"))
    ended = other.run(RESUME=copy)
    assert ended.status == 1 and "Traceback" not in ended.err and "shards_sha256" in ended.err


FULL_DISK = """
import builtins, errno
real = builtins.open
def full(path, mode="r", *rest, **more):
    if "w" in mode and str(path).endswith("NAME.tmp"):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return real(path, mode, *rest, **more)
builtins.open = full
"""


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(lab: Lab, finished: Ended) -> None:
    ended = lab.succeed(fault=FULL_DISK.replace("NAME", "checkpoint.pt"), CHECKPOINT_EVERY_SECONDS=0.05)
    assert "warning: no checkpoint of step" in ended.out and "No space left" in ended.out
    assert_same_result(ended, finished)
    assert not [*ended.directory.glob("*checkpoint*")]


@pytest.mark.parametrize("name", ["model.bin", "summary.json"])
def test_a_full_disk_at_the_end_is_told_by_name_and_the_end_can_be_repeated(
    name: str, lab: Lab, finished: Ended
) -> None:
    ended = lab.run(fault=FULL_DISK.replace("NAME", name), CHECKPOINT_EVERY_SECONDS=1000)
    assert ended.status == 1 and "Traceback" not in ended.err
    assert name in ended.err and "No space left" in ended.err and not (ended.directory / name).exists()
    assert not [*ended.directory.glob(".*")]
    assert_same_result(lab.succeed(RESUME=ended.directory), finished)


DIVERGES = """
import torch
step = torch.optim.AdamW.step
def diverge(self, *given):
    step(self, *given)
    if max(float(state["step"]) for state in self.state.values()) == 3.0:
        self.param_groups[0]["params"][0].data[0] = float("nan")
torch.optim.AdamW.step = diverge
"""


def test_a_loss_that_is_not_finite_stops_with_all_that_one_needs_to_go_on(lab: Lab, finished: Ended) -> None:
    ended = lab.run(fault=DIVERGES, WARMUP_STEPS=0, CHECKPOINT_EVERY_SECONDS=0.001)
    assert ended.status == 1 and "Traceback" not in ended.err
    checkpoint = ended.directory / "checkpoint.pt"
    told = rf"step 4, batch at token {3 * 256}: train_loss nan, grad_norm nan, "
    assert re.search(told + f"last good checkpoint: {checkpoint}; lower", ended.err)
    assert "no checkpoint of step 3, none is replaced: its weights are not finite" in ended.out
    assert set(train_losses(ended)) == {1, 2, 3}
    assert_same_result(lab.succeed(RESUME=ended.directory), finished)
