"""A run that was stopped goes on as if it had not been; a damaged or foreign checkpoint is never believed."""

from __future__ import annotations

import hashlib
import math
import pickle
import re
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import train_gpt
from tests.support.clock import FORWARD_SECONDS, counted_clock, in_phase, signal_at_step
from tests.support.processes import SCRIPT, Ended, Lab

# Its steps would count as well, and the signal come in one of them.
NO_WARMUP = {"WARMUP_STEPS": 0}


def stop_at(lab: Lab, step: int, number: int = signal.SIGTERM, **changes: Any) -> Ended:
    """A run that gets a signal in the middle of a step; the process must save and leave soon."""
    ended = lab.start(fault=signal_at_step(step, number), **NO_WARMUP, **changes).wait()
    assert ended.status == 128 + number, ended.err
    assert f"stopped by signal {number}; continue with RESUME={ended.directory}\n" in ended.out
    assert f"signal {number}: ends after the step under way, with a checkpoint; a second signal" in ended.err
    assert re.findall(r"^checkpoint:\S+checkpoint.pt step:(\d)$", ended.out, re.M)[-1] == str(step)
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
    return stop_at(lab, 3, CHECKPOINT_EVERY_SECONDS=0.001)


@pytest.fixture
def copy(stopped: Ended, lab: Lab) -> Path:
    """A run directory of this test's own, to resume and to damage."""
    return Path(shutil.copytree(stopped.directory, lab.folder / "runs" / "run"))


@pytest.mark.parametrize(("step", "number"), [(1, signal.SIGTERM), (4, signal.SIGINT)])
def test_a_resumed_run_equals_one_never_stopped(step: int, number: int, lab: Lab, finished: Ended) -> None:
    stop_at(lab, step, number)
    ended = lab.succeed(RESUME=lab.folder / "runs" / "run", WARMUP_STEPS=step, TRAIN_PREFETCH=step % 2)
    assert_same_result(ended, finished)
    assert train_losses(ended) == train_losses(finished)
    log = (ended.directory / "log.txt").read_text("utf-8")
    assert log.index("stopped by signal") < log.index("resumed:") < log.index("done: ")


def test_a_run_stopped_twice_on_other_numbers_of_ranks(lab: Lab, finished: Ended) -> None:
    # One rank catches it: all save and leave.
    ranks = lab.ranks(2, each={1: {"fault": signal_at_step(1)}}, **NO_WARMUP)
    ended = [rank.wait() for rank in ranks]
    assert all(one.status == 128 + signal.SIGTERM for one in ended) and "stopped by signal" in ended[0].out
    directory = ended[0].directory
    stop_at(lab, 4, RESUME=directory)
    ranks = lab.ranks(2, RESUME=directory)
    last, _ = (rank.wait() for rank in ranks)
    assert last.status == 0, last.err
    assert last.summary["stream_hash"] == finished.summary["stream_hash"]
    for name, loss in last.summary["losses"].items():
        assert math.isclose(loss["nats"], finished.summary["losses"][name]["nats"], rel_tol=2e-3), name
    assert train_losses(last) == pytest.approx(train_losses(finished), rel=1e-4)


def test_the_clock_goes_on_where_it_stopped(lab: Lab) -> None:
    """A step is four micro-batches of a hundredth of a second each, by a clock that counts them."""
    changes: dict[str, Any] = {
        "MAX_WALLCLOCK_SECONDS": 2,
        "GPTQ_RESERVE_SECONDS": 0.5,
        "ITERATIONS": 100000,
        "EVAL_STRIDE": 0,
        "TTT_ENABLED": 0,
        "TRAIN_LOG_EVERY": 5,
    }
    started = lab.start(fault=counted_clock(signal_at=10), **changes)
    ended = started.wait()
    assert ended.status == 128 + signal.SIGTERM, ended.err
    last = lab.succeed(fault=counted_clock(), RESUME=ended.directory, **changes)
    whole = lab.elsewhere("straight").succeed(fault=counted_clock(), **changes)
    (resumed_ms,) = re.findall(r"^resumed:\S+ step:10 train_time:(\d+)ms", last.out, re.M)
    assert int(resumed_ms) == 400
    # 37 steps fit into 1.5 s, and one is kept free.
    assert last.summary["steps"] == whole.summary["steps"] == 36
    for ended in (last, whole):
        limit = ended.summary["limits"]["train_seconds"]
        assert limit["ok"] and limit["value"] == pytest.approx(1.44 + 4 * FORWARD_SECONDS)
    times_ms = [event["train_time_ms"] for event in last.events if event["event"] == "train"]
    assert times_ms == pytest.approx([40.0 * step for step in range(1, 37)])
    shown = [int(step) for step in re.findall(r"^step:(\d+)/\d+ train_loss:", last.out, re.M)]
    assert shown == [15, 20, 25, 30, 35]  # the console keeps its interval
    again = lab.run(RESUME=last.directory, **changes)  # it is finished: nothing may touch it
    assert again.status == 1 and "RESUME" in again.err and last.summary == again.summary


def test_lengths_under_a_clock_go_on_where_they_stopped_and_can_be_replayed(lab: Lab) -> None:
    """Stopped when the second length is announced and has not begun; then whole; then in fixed steps."""
    changes: dict[str, Any] = {
        "MAX_WALLCLOCK_SECONDS": 1.7,
        "GPTQ_RESERVE_SECONDS": 0.5,
        "ITERATIONS": 100000,
        "TRAIN_SEQ_LENS": "8:0.3 16:0.6 32",
        "GPTQ_CALIBRATION_BATCHES": 2,
        "EVAL_STRIDE": 0,
        "TTT_ENABLED": 0,
    }
    started = lab.start(fault=counted_clock(signal_at=8), **changes)
    ended = started.wait()
    assert ended.status == 128 + signal.SIGTERM, ended.err
    last = lab.succeed(fault=counted_clock(), RESUME=ended.directory, **changes)
    whole = lab.elsewhere("straight").succeed(fault=counted_clock(), **changes)
    # A step takes 0.04 of 1.2 seconds: three tenths are over after the ninth.
    for one in (last, whole):
        assert one.summary["train_seq_lens"] == "8:9 16:18 32"
        assert re.findall(r"^(train_seq_len:\d+ from step:\d+)$", one.out, re.M) == [
            "train_seq_len:16 from step:10", "train_seq_len:32 from step:19"
        ]  # fmt: skip
    assert last.summary["stream_hash"] == whole.summary["stream_hash"]
    assert last.summary["losses"] == whole.summary["losses"]
    assert last.summary["artifact"]["sha256"] == whole.summary["artifact"]["sha256"]
    again = lab.elsewhere("replayed").succeed(
        MAX_WALLCLOCK_SECONDS=0, ITERATIONS=whole.summary["steps"], TRAIN_PREFETCH_QUEUE=5,
        TRAIN_SEQ_LENS=whole.summary["train_seq_lens"],
    )  # fmt: skip
    assert again.summary["stream_hash"] == whole.summary["stream_hash"]


def test_a_signal_in_evaluation_leaves_the_artifact_and_says_how_to_go_on(lab: Lab, finished: Ended) -> None:
    fault = in_phase("eval_sliding_window", "os.kill(os.getpid(), signal.SIGTERM)")
    ended = lab.run(fault=fault, CHECKPOINT_EVERY_SECONDS=1000, TTT_ENABLED=0)
    assert ended.status == 128 + signal.SIGTERM and "Traceback" not in ended.err
    assert (
        f"RESUME={ended.directory}" in ended.err and f"EVAL_ONLY={ended.directory / 'model.bin'}" in ended.err
    )
    assert "phase eval_sliding_window" in ended.err
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
    ended = lab.succeed(fault=FULL_DISK.replace("NAME", "checkpoint.pt"), CHECKPOINT_EVERY_SECONDS=0.001)
    assert "warning: no checkpoint of step" in ended.out and "No space left" in ended.out
    assert_same_result(ended, finished)
    assert not [*ended.directory.glob("*checkpoint*")]


def test_a_slow_disk_costs_a_checkpoint_and_no_time_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not the last is left out while another is written; the last one waits for it, alone."""
    written: list[int] = []
    disk_is_free = threading.Event()

    def write(run: Any, state: dict[str, Any], former: threading.Thread | None = None) -> None:
        if former is not None:
            former.join()
        disk_is_free.wait()
        written.append(state["step"])

    monkeypatch.setattr(train_gpt, "write_checkpoint", write)
    said: list[str] = []
    run = SimpleNamespace(machine=train_gpt.Machine(), writer=None, log=said.append)
    training = SimpleNamespace(run=run, step=1, state=lambda: {"step": training.step})
    train_gpt.Training.save(training)  # type: ignore[arg-type]
    first = run.writer
    training.step = 2
    train_gpt.Training.save(training)  # type: ignore[arg-type]
    assert run.writer is first and "no checkpoint of step 2" in said[0]
    training.step = 3
    train_gpt.Training.save(training, last=True)  # type: ignore[arg-type]
    assert run.writer is not first and not written
    train_gpt.Training.finish_saving(training, 0.01)  # type: ignore[arg-type]
    assert run.writer.is_alive(), "who waits for so long only, leaves it"
    disk_is_free.set()
    train_gpt.Training.finish_saving(training)  # type: ignore[arg-type]
    assert written == [1, 3]


def test_a_checkpoint_is_written_after_the_one_before(tmp_path: Path) -> None:
    """Or the older one would stand in the place of the newer."""
    run = train_gpt.Run(train_gpt.Machine())
    run.directory = tmp_path
    seen: list[bool] = []
    former = threading.Thread(target=lambda: seen.append((tmp_path / "checkpoint.pt").exists()))
    timer = threading.Timer(0.2, former.start)
    former.join = lambda timeout=None: (timer.join(), threading.Thread.join(former, timeout))  # type: ignore
    timer.start()
    state = {"step": 1, "optimizer": {"weights": []}}
    train_gpt.write_checkpoint(run, state, former)
    assert seen == [False] and (tmp_path / "checkpoint.pt").exists()


def test_advice_for_a_loss_that_is_not_finite_names_what_the_run_uses() -> None:
    tied = train_gpt.ways_to_converge(train_gpt.Config())
    assert "TIED_EMBED_LR" in tied and "lower GRAD_CLIP_NORM" in tied
    untied = train_gpt.ways_to_converge(train_gpt.Config(tie_embeddings=False, grad_clip_norm=0.0))
    assert "TIED_EMBED_LR" not in untied and "HEAD_LR" in untied and "set GRAD_CLIP_NORM=1" in untied


NO_MEMORY = """
import torch
def no_memory(*given, **more):
    raise ERROR
torch.save = no_memory
"""


@pytest.mark.parametrize("error", ["MemoryError()", "torch.cuda.OutOfMemoryError('none is left')"])
def test_no_memory_for_a_checkpoint_costs_no_run_and_is_told(error: str, lab: Lab, finished: Ended) -> None:
    fault = NO_MEMORY.replace("ERROR", error)
    ended = lab.succeed(fault=fault, CHECKPOINT_EVERY_SECONDS=1000, EVAL_STRIDE=0, TTT_ENABLED=0)
    reason = "MemoryError()" if error == "MemoryError()" else "none is left"
    step = finished.summary["steps"]
    assert f"warning: no checkpoint of step {step}, none is replaced: {reason}" in ended.out


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


# -- what a run finds in its own files -----------------------------------------------------------------------

ONLY = ("PATH", "OMP_NUM_THREADS", "GOMP_SPINCOUNT")


def nothing_but(lab: Lab, **settings: object) -> dict[str, object]:
    """Settings that leave out all that a run was started with."""
    return {**{name: None for name in lab.settings() if name not in ONLY}, **settings}


def test_resume_alone_goes_on_with_the_run_as_it_was(copy: Path, lab: Lab, finished: Ended) -> None:
    ended = lab.succeed(**nothing_but(lab, RESUME=copy))
    assert_same_result(ended, finished)
    log = (copy / "log.txt").read_text("utf-8")
    as_stopped = {**finished.summary["overrides"], **NO_WARMUP}
    for name, value in as_stopped.items():
        if name not in ("RUN_ID", "RUNS_DIR", "CHECKPOINT_EVERY_SECONDS"):
            assert log.count(f"\nfound:{name}={value}\n") == 1, name
    assert ended.summary["code"]["former"] == []


def test_a_given_setting_is_stronger_than_one_that_is_found(copy: Path, lab: Lab) -> None:
    ended = lab.run(**nothing_but(lab, RESUME=copy, EVAL_STRIDE=8, TTT_ENABLED=0, TRAIN_LOG_EVERY=1))
    assert ended.status == 0, ended.err
    assert ended.summary["config"]["EVAL_STRIDE"] == "8" and set(ended.summary["losses"]) == {
        "roundtrip",
        "sliding_window",
    }
    assert "found:EVAL_STRIDE" not in ended.out and "found:VOCAB_SIZE=320\n" in ended.out


def test_other_code_goes_on_only_when_asked_for_and_all_records_tell(copy: Path, lab: Lab) -> None:
    former = (copy / "train_gpt.py").read_bytes() + b"# as it was\n"
    (copy / "train_gpt.py").write_bytes(former)
    assert "RESUME_OTHER_CODE=1" in lab.run(RESUME=copy).err
    assert (copy / "train_gpt.py").read_bytes() == former
    ended = lab.succeed(RESUME=copy, RESUME_OTHER_CODE=1)
    (step,) = re.findall(r"^resumed:\S+ step:(\d+) ", ended.out, re.M)
    name, digest = f"train_gpt.until_step{step}.py", hashlib.sha256(former).hexdigest()
    assert (copy / name).read_bytes() == former
    assert (copy / "train_gpt.py").read_bytes() == SCRIPT.read_bytes()
    assert ended.summary["code"]["former"] == [{"file": name, "sha256": digest}]
    now = ended.summary["code"]["sha256"]
    warning = f"warning: other code from step {step} on: sha256 {now}, before it {digest}, kept as {name}"
    assert warning in (copy / "log.txt").read_text("utf-8").splitlines()


# -- whatever fails after training ---------------------------------------------------------------------------


def fails_in(phase: str) -> str:
    """Python that makes a run fail when this phase begins; trainings of any length are saved."""
    return (
        """
import threading
start = threading.Thread.start
def begin(thread):
    start(thread)
    if thread.name == "checkpoint":
        thread.join()  # on disk, before anything else happens
threading.Thread.start = begin
"""
        + in_phase(phase, 'raise RuntimeError("injected")')
    )


@pytest.mark.parametrize("phase", ["hessians", "quantize", "reload", "eval_roundtrip", "eval_legal_ttt"])
def test_what_fails_after_training_ends_with_the_line_that_goes_on(
    phase: str, lab: Lab, finished: Ended
) -> None:
    ended = lab.run(fault=fails_in(phase), CHECKPOINT_EVERY_SECONDS=1000)
    assert ended.status == 1 and "injected" in ended.err
    ways = f"continue with RESUME={ended.directory}"
    if phase not in ("hessians", "quantize"):
        ways += f" or EVAL_ONLY={ended.directory / 'model.bin'}"
    assert ended.err.splitlines()[-1] == ways
    assert_same_result(lab.succeed(**nothing_but(lab, RESUME=ended.directory)), finished)


LONG_TRAINING = counted_clock(forward_seconds=5.0)


def test_a_training_of_more_than_a_minute_is_saved_before_calibration(lab: Lab, finished: Ended) -> None:
    """Nobody asked for a checkpoint: six steps of four forward passes, five seconds each, are two minutes."""
    ended = lab.run(fault=LONG_TRAINING + fails_in("hessians"))
    assert ended.status == 1 and re.search(r"^checkpoint:\S+ step:6$", ended.out, re.M)
    assert ended.err.splitlines()[-1] == f"continue with RESUME={ended.directory}"
    assert_same_result(lab.succeed(**nothing_but(lab, RESUME=ended.directory)), finished)
    assert not (ended.directory / "checkpoint.pt").exists()  # it has served, and nobody asked for it


def test_a_short_training_is_not_saved_unless_asked_for(lab: Lab) -> None:
    ended = lab.run(fault=counted_clock() + fails_in("quantize"))
    assert ended.status == 1 and not (ended.directory / "checkpoint.pt").exists()
    assert ended.err.splitlines()[-1] == "nothing is saved to continue with"


# -- signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_the_second_signal_ends_at_once(count: int, lab: Lab) -> None:
    """Both are sent in the middle of a step: after one the step is done and saved, after two nothing is."""
    fault = counted_clock(signal_at=3)
    if count == 2:
        fault = fault.replace("os.getpid(), 15)", "os.getpid(), 15); os.kill(os.getpid(), 2)")
    ended = lab.run(fault=fault)
    assert ended.status == 128 + (signal.SIGTERM if count == 1 else signal.SIGINT)
    assert "signal 15: ends after the step under way, with a checkpoint" in ended.err
    assert (ended.directory / "checkpoint.pt").exists() == (count == 1)
    if count == 2:
        assert ended.err.splitlines()[-1].endswith("in phase train; nothing is saved to continue with")


def test_a_signal_while_the_last_weights_are_written_waits_for_them(lab: Lab, finished: Ended) -> None:
    """It comes in the phase after training, when the checkpoint is not yet in its place."""
    fault = """
import os, signal, threading
replace, main = os.replace, os.getpid()
def late(source, target):
    if str(target).endswith("checkpoint.pt"):
        os.kill(main, signal.SIGTERM)
        threading.Event().wait(1.0)
    return replace(source, target)
os.replace = late
"""
    ended = lab.run(fault=LONG_TRAINING + fault, VAL_LOSS_EVERY=0)  # no validation comes between the two
    assert ended.status == 128 + signal.SIGTERM
    assert "ends once the checkpoint under way is on disk" in ended.err
    assert ended.err.splitlines()[-1].endswith(f"continue with RESUME={ended.directory}")
    assert_same_result(lab.succeed(**nothing_but(lab, RESUME=ended.directory)), finished)


def test_a_run_directory_that_is_removed_under_way_is_made_again(lab: Lab, finished: Ended) -> None:
    fault = """
import shutil, torch
step = torch.optim.AdamW.step
def remove(self, *given):
    shutil.rmtree("runs", ignore_errors=True)
    return step(self, *given)
torch.optim.AdamW.step = remove
"""
    ended = lab.succeed(fault=fault)
    assert (
        f"warning: {ended.directory} was removed while the run was under way: it is made again" in ended.err
    )
    assert ended.summary["artifact"] == finished.summary["artifact"]
    assert ended.summary["losses"] == finished.summary["losses"]
