"""Several ranks, started as torchrun does: the results of one, and an end for all when one fails."""

import json
import math
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import train_gpt
from tests.support.clock import in_phase
from tests.support.processes import SCRIPT, Ended, Lab, train_losses
from tests.support.waiting import DEADLINE_SECONDS, TIME_SCALE

PEER_IS_GONE = "rank 0: ends: another rank has ended or does not answer\n"


def patience(seconds: float) -> str:
    """Python that lets a rank wait for others only so long."""
    return f"""
import datetime, torch.distributed
join = torch.distributed.init_process_group
def join_with_less(*given, **more):
    return join(*given, **{{**more, "timeout": datetime.timedelta(seconds={seconds})}})
torch.distributed.init_process_group = join_with_less
"""


def finish(lab: Lab, count: int, **changes: object) -> Ended:
    """Rank 0 of `count` ranks that must all succeed."""
    ended = [started.wait() for started in lab.ranks(count, **changes)]
    assert [one.status for one in ended] == [0] * count, [one.err for one in ended]
    assert all(one.out == "" for one in ended[1:])
    return ended[0]


def test_ranks_give_the_losses_and_scores_of_one(finished: Ended, lab: Lab) -> None:
    ended = finish(lab, 4)
    hardware = ended.summary["hardware"]
    assert (hardware["world_size"], hardware["dtype"], hardware["threads"]) == (4, "torch.float32", 1)
    assert hardware["device"].endswith(" CPU")
    assert "world_size:4 grad_accum_steps:1" in ended.out
    assert ended.summary["stream_hash"] == finished.summary["stream_hash"]
    assert train_losses(ended) == pytest.approx(train_losses(finished), rel=1e-4)
    assert set(ended.summary) == set(finished.summary)
    assert ended.summary["losses"].keys() == finished.summary["losses"].keys()
    for name, loss in ended.summary["losses"].items():
        assert loss["scored_tokens"] == finished.summary["losses"][name]["scored_tokens"]
        assert math.isclose(loss["nats"], finished.summary["losses"][name]["nats"], rel_tol=2e-3), name
    ended = finish(lab.elsewhere("scored"), 2, EVAL_ONLY=finished.directory / "model.bin")
    for name, loss in finished.summary["losses"].items():
        assert math.isclose(ended.summary["losses"][name]["nats"], loss["nats"], rel_tol=1e-5), name


def all_end(lab: Lab, count: int = 2, fault: str = "", **changes: object) -> list[Ended]:
    """All ranks, in a run that must fail together: if they only lost patience, they would hang here."""
    ended = [started.wait() for started in lab.ranks(count, fault=fault, **changes)]
    assert all(one.status != 0 for one in ended), [one.out for one in ended]
    return ended


def test_ranks_with_other_settings_do_not_start(lab: Lab) -> None:
    ended = all_end(lab, each={1: {"SEED": 5}})
    assert any(all(name in one.err for name in ("SEED", "5", "1337", "rank 1", "rank 0")) for one in ended)
    assert not lab.folder.joinpath("runs").exists()


RAISE_ON_RANK_1 = """
import torch
step = torch.optim.AdamW.step
def fail(self, *given):
    if os.environ["RANK"] == "1" and self.state and max(s["step"] for s in self.state.values()) >= 4:
        raise RuntimeError("an injected fault")
    return step(self, *given)
torch.optim.AdamW.step = fail
"""


def torchrun_ends(lab: Lab, fault: str, **changes: object) -> str:
    """What two ranks that must fail and torchrun print together; `fault` is Python that each rank runs."""
    (lab.folder / "sitecustomize.py").write_text(
        "import os, sys, threading, time\n"
        "def wait():\n"  # until the script has been read to its end
        "    while not hasattr(sys.modules['__main__'], 'whole_run'):\n        time.sleep(0.1)\n"
        f"    exec({fault!r}, globals())\n"
        "if os.environ.get('RANK'):\n"
        "    threading.Thread(target=wait, daemon=True).start()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = subprocess.run(
        [*command, str(SCRIPT)],
        env=lab.settings(ITERATIONS=100000, PYTHONPATH=lab.folder, **changes),
        cwd=lab.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=DEADLINE_SECONDS,
    )  # fmt: skip
    assert process.returncode != 0
    return process.stdout


def test_torchrun_starts_it_and_shows_the_error_of_one_rank(lab: Lab) -> None:
    ranks = torchrun_ends(lab, RAISE_ON_RANK_1).split("ChildFailedError")[0]
    assert "world_size:2 grad_accum_steps:2" in ranks and "step:2/" in ranks
    assert ranks.count("RuntimeError: an injected fault") == 1 and PEER_IS_GONE in ranks
    assert ranks.count("Traceback (most recent call last)") == 2, ranks  # of rank 1, and then torchrun's own
    log = (lab.folder / "runs" / "run" / "log.txt").read_text("utf-8")
    assert "RuntimeError: an injected fault" in log.splitlines()
    assert not (lab.folder / "runs" / "run" / "summary.json").exists()


def test_a_rank_that_is_killed_ends_all(lab: Lab) -> None:
    ranks = lab.ranks(2, ITERATIONS=100000)
    ranks[0].wait_for("step:2/")
    ranks[1].send(signal.SIGKILL)
    ended = [rank.wait() for rank in ranks]
    assert ended[0].status == 1 and ended[1].status == -signal.SIGKILL
    assert "Traceback" not in ended[0].err and "Connection" not in ended[0].err, ended[0].err
    assert PEER_IS_GONE in ended[0].err


def test_a_rank_that_stalls_ends_its_peers(lab: Lab) -> None:
    """In training and in evaluation, side by side: each waits out its timeout."""
    timeout_s = 15 * TIME_SCALE
    fault = patience(timeout_s)
    stops = {1: {"fault": fault + in_phase("eval_sliding_window", "os.kill(os.getpid(), signal.SIGSTOP)")}}
    training = lab.elsewhere("training").ranks(2, fault=fault, ITERATIONS=100000)
    scoring = lab.elsewhere("scoring").ranks(2, stops, fault=fault, ITERATIONS=3)
    training[0].wait_for("step:2/")
    training[1].send(signal.SIGSTOP)
    begin_s = time.monotonic()
    for ranks in (training, scoring):
        try:
            ended = ranks[0].wait()
        finally:
            ranks[1].send(signal.SIGKILL)
            ranks[1].wait()
        assert ended.status == 1
        assert PEER_IS_GONE in ended.err
        assert time.monotonic() - begin_s > timeout_s / 2  # it did not give up at once
    assert "legal_ttt_exact" in ended.out
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
    assert all("rank 1: waits for all 2 ranks" in line and "node1" in line for line in lines)


# A node whose disk is another one.
ON_ANOTHER_DISK = "os.mkdir('node2'); os.chdir('node2')"


def test_nodes_need_no_common_disk(lab: Lab, finished: Ended) -> None:
    """Only rank 0 can read what it wrote; traces of the others are on their own node."""
    ranks = lab.ranks(2, each={1: {"fault": ON_ANOTHER_DISK}}, RUNS_DIR="runs", TRACE_STEPS="1:3")
    ended = [rank.wait() for rank in ranks]
    assert [one.status for one in ended] == [0, 0], ended[1].err
    (first,) = (lab.folder / "runs").iterdir()
    (second,) = (lab.folder / "node2" / "runs").iterdir()
    assert (first / "model.bin").exists()
    assert [path.name for path in second.iterdir()] == ["trace_rank1.json"]
    for rank, directory in enumerate((first, second)):
        events = json.loads((directory / f"trace_rank{rank}.json").read_text())["traceEvents"]
        forward = [event["args"]["step"] for event in events if event["name"] == "forward"]
        assert forward == [1, 1, 2, 2] and {event["pid"] for event in events} == {rank}
    summary = json.loads((first / "summary.json").read_text("utf-8"))
    for name, loss in summary["losses"].items():
        assert math.isclose(loss["nats"], finished.summary["losses"][name]["nats"], rel_tol=2e-3), name
