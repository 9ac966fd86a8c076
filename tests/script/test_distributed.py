"""Several ranks, started as torchrun does: the results of one, and an end for all when one fails."""

import dataclasses
import json
import math
import re
import signal
import textwrap
import threading
import time
from typing import Any

import pytest
import torch

import train_gpt
from tests.support.here import main_here
from tests.support.planted import after_step, in_phase, send, signal_at_step
from tests.support.processes import ROUNDED, SCRIPT, Ended, Lab, train_losses

PEER_IS_GONE = "rank 0: stopped: another rank has ended or does not respond\n"


def finish(lab: Lab, count: int, **changes: Any) -> Ended:
    """Rank 0 of `count` ranks that must all succeed."""
    ended = [started.wait() for started in lab.ranks(count, **changes)]
    assert [one.status for one in ended] == [0] * count, [one.err for one in ended]
    assert all(one.out == "" for one in ended[1:])
    return ended[0]


# A node whose disk is another one.
ON_ANOTHER_DISK = "os.mkdir('node2'); os.chdir('node2')"


def test_ranks_give_the_losses_and_scores_of_one_and_need_no_common_disk(finished: Ended, lab: Lab) -> None:
    """Only rank 0 can read what it wrote; traces of the others are on their own node.

    Sliding windows and test-time training are scored in a second job, on the artifact of one rank.
    """
    ended = finish(lab, 2, each={1: {"fault": ON_ANOTHER_DISK}}, RUNS_DIR="runs", TRACE_STEPS="1:3",
                   WARMUP_STEPS=1, EVAL_STRIDE=0)
    first, second = lab.folder / "runs" / "run", lab.folder / "node2" / "runs" / "run"
    ended = dataclasses.replace(ended, runs_dir=first.parent)
    hardware = ended.summary["hardware"]
    assert (hardware["world_size"], hardware["dtype"], hardware["threads"]) == (2, "torch.float32", 1)
    assert hardware["device"].endswith(" CPU") and hardware["gpus"] == []
    assert "world_size:2 grad_accum_steps:1" in ended.out
    assert ended.summary["stream_hash"] == finished.summary["stream_hash"]
    assert train_losses(ended) == pytest.approx(train_losses(finished), rel=1e-4)
    assert set(ended.summary) == set(finished.summary)
    assert ended.summary["losses"].keys() == {"roundtrip", "legal_ttt"}
    for name, loss in ended.summary["losses"].items():
        assert loss["scored_tokens"] == finished.summary["losses"][name]["scored_tokens"]
        assert math.isclose(loss["nats"], finished.summary["losses"][name]["nats"], rel_tol=2e-3), name
    assert (first / "model.bin").exists()
    assert [path.name for path in second.iterdir()] == ["trace_rank1.json"]
    for rank, directory in enumerate((first, second)):
        events = json.loads((directory / f"trace_rank{rank}.json").read_text())["traceEvents"]
        forward = [event["args"]["step"] for event in events if event["name"] == "forward"]
        assert forward == [1, 2] and {event["pid"] for event in events} == {rank}
    # Several batches of windows, for both ranks to have some.
    model = finished.directory / "model.bin"
    ended = finish(lab.elsewhere("scored"), 2, EVAL_ONLY=model, VAL_BATCH_SIZE=4096)
    for name, loss in finished.summary["losses"].items():
        assert math.isclose(ended.summary["losses"][name]["nats"], loss["nats"], rel_tol=1e-5), name


def test_ranks_with_other_settings_do_not_start(lab: Lab) -> None:
    """If they only lost patience, they would hang here."""
    ended = [started.wait() for started in lab.ranks(2, each={1: {"SEED": 5}})]
    assert all(one.status != 0 for one in ended), [one.out for one in ended]
    assert any(all(name in one.err for name in ("SEED", "5", "1337", "rank 1", "rank 0")) for one in ended)
    assert not lab.folder.joinpath("runs").exists()


# Python that each rank runs when it starts.
RAISE_ON_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
""" + textwrap.indent(after_step(4, 'raise RuntimeError("an injected fault")'), "    ")


def test_the_error_of_one_rank_is_printed_once_and_kept(lab: Lab) -> None:
    fault = after_step(4, 'raise RuntimeError("an injected fault")')
    first, second = (rank.wait() for rank in lab.ranks(2, each={1: {"fault": fault}}, **ROUNDED))
    assert (first.status, second.status) == (1, 1)
    printed = first.out + first.err + second.out + second.err
    assert printed.count("RuntimeError: an injected fault") == 1 and PEER_IS_GONE in first.err
    assert "Traceback" in second.err and "Traceback" not in first.err
    assert "RuntimeError: an injected fault" in (first.directory / "log.txt").read_text("utf-8").splitlines()
    assert not (first.directory / "summary.json").exists()


@pytest.mark.slow
def test_torchrun_starts_it_and_shows_the_error_of_one_rank(lab: Lab) -> None:
    (lab.folder / "sitecustomize.py").write_text(RAISE_ON_RANK_1)
    torchrun = lab.folder / "torchrun.py"
    torchrun.write_text("from torch.distributed.run import main\nmain()\n")
    arguments = "--standalone", "--nproc_per_node=2", str(SCRIPT)
    ended = lab.run(*arguments, script=torchrun, PYTHONPATH=lab.folder, EVAL_STRIDE=0, TTT_ENABLED=0)
    assert ended.status != 0
    ranks = ended.out + ended.err.split("ChildFailedError")[0]
    assert "world_size:2 grad_accum_steps:1" in ranks and "step:2/" in ranks
    assert ranks.count("RuntimeError: an injected fault") == 1 and PEER_IS_GONE in ranks
    assert ranks.count("Traceback (most recent call last)") == 2, ranks  # of rank 1, and then torchrun's own
    log = (lab.folder / "runs" / "run" / "log.txt").read_text("utf-8")
    assert "RuntimeError: an injected fault" in log.splitlines()
    assert not (lab.folder / "runs" / "run" / "summary.json").exists()


def test_a_rank_that_is_killed_ends_all(lab: Lab) -> None:
    kill = {1: {"fault": signal_at_step(2, signal.SIGKILL)}}
    ended = [rank.wait() for rank in lab.ranks(2, each=kill, ITERATIONS=100000)]
    assert ended[0].status == 1 and ended[1].status == -signal.SIGKILL
    assert "Traceback" not in ended[0].err and "Connection" not in ended[0].err, ended[0].err
    assert PEER_IS_GONE in ended[0].err


# A rank has waited for its peers as long as it may: the next one that does not answer at once ends it.
LOSE_PATIENCE = """import datetime, torch.distributed.distributed_c10d as c10d
            c10d._set_pg_timeout(datetime.timedelta(seconds=0.1), c10d._get_default_group())"""


@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_a_rank_that_stalls_ends_its_peers(where: str, lab: Lab) -> None:
    """From the moment at which a peer stops itself, a rank waits for a tenth of a second."""
    def at(action: str) -> str:
        in_training = where == "training"
        return after_step(3, action) if in_training else in_phase("eval_roundtrip", action)

    stalls = {1: {"fault": at(send(signal.SIGSTOP))}}
    iterations = 6 if where == "training" else 1
    ranks = lab.ranks(2, stalls, fault=at(LOSE_PATIENCE), **ROUNDED, TTT_ENABLED=0, ITERATIONS=iterations)
    try:
        ended = ranks[0].wait()
    finally:
        ranks[1].send(signal.SIGKILL)
        ranks[1].wait()
    assert ended.status == 1 and PEER_IS_GONE in ended.err
    if where == "evaluation":
        assert "sliding_window_exact" in ended.out
        assert ended.err.splitlines()[-1].endswith(f"EVAL_ONLY={ended.directory / 'model.bin'}")


def test_a_rank_that_waits_for_another_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def connect(*_given: object, **_more: object) -> None:
        while len(lines) < 2:
            time.sleep(0.01)

    wait = threading.Event.wait
    monkeypatch.setattr(threading.Event, "wait", lambda event, seconds=None: wait(event, seconds and 0.01))
    monkeypatch.setattr(train_gpt, "print_line", lambda line, stream: lines.append(line))
    monkeypatch.setattr(train_gpt.Machine, "gather", lambda machine, value: [value] * machine.world_size)
    monkeypatch.setattr(torch.distributed, "init_process_group", connect)
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}
    assert train_gpt.this_machine(train_gpt.Config(device="cpu"), environ).rank == 1
    assert all(re.search("rank 1: .*all 2 ranks.*MASTER_ADDR=node1", line) for line in lines)


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, {}, NCCL version 2.27.5\n{}: {}\nLast error:\n{}"
NO_SHARED_MEMORY = NCCL.format(
    "unhandled system error", "ncclSystemError", "System call or external library call failed",
    "Error while creating shared memory segment /dev/shm/nccl-aB3 (size 9637888)")
GONE = NCCL.format(
    "remote process exited or there was a network error", "ncclRemoteError",
    "A call failed possibly due to a network error or a remote process exiting prematurely.", "")


@pytest.mark.parametrize(("text", "shown"), [(NO_SHARED_MEMORY, True), (GONE, False)])
def test_what_nccl_says_of_this_rank_is_shown(
    text: str, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a rank that is gone, that rank itself gives the reason."""

    def broken(*_given: object) -> None:
        raise torch.distributed.DistBackendError(text)

    monkeypatch.setattr(train_gpt, "whole_run", broken)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(train_gpt, "end_with_launcher", lambda _: None)
    assert main_here({"DEVICE": "cpu", "CONFIG": "none"}) == 1
    printed = capsys.readouterr().err
    assert ("stopped: another rank" in printed) is not shown
    assert ("/dev/shm" in printed and "Traceback" in printed) is shown
