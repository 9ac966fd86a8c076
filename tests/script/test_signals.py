"""Whoever asks a run to end, by whatever signal and however often, gets a checkpoint."""

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

import pytest

import train_gpt
from tests.support import processes
from tests.support.here import main_here
from tests.support.planted import signal_at_step
from tests.support.processes import SCRIPT, SHORT_END, Ended, Lab, free_port
from tests.support.waiting import is_running, wait_until

WARNINGS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
            signal.SIGXCPU]
STOPPED: dict[str, object] = {**SHORT_END, "VAL_LOSS_EVERY": 0}
# Three seconds pass between any two looks at the clock.
SLOW_CLOCK = """
import time, itertools
ticks = itertools.count()
time.perf_counter = lambda: 3.0 * next(ticks)
"""


def heard(number: int) -> str:
    """Python that undoes what the test's own parent may ignore."""
    return f"import signal; signal.signal({int(number)}, signal.SIG_DFL)\n"


def assert_saved(ended: Ended, number: int, step: int) -> None:
    assert ended.status == 128 + number, ended.err
    assert f"stopped by signal {number}; continue with RESUME={ended.directory}\n" in ended.out
    assert re.findall(r"^checkpoint:\S+ step:(\d+)$", ended.out, re.M)[-1] == str(step)


@pytest.mark.parametrize("number", WARNINGS, ids=lambda number: number.name)
def test_each_signal_that_ends_a_job_asks_for_a_checkpoint(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows is the same for all: whole runs below, and in test_resume, are stopped by some of them."""
    asked: list[int] = []

    def whole_run(_config: train_gpt.Config, run: train_gpt.Run, _notes: list[str]) -> None:
        assert signal.getsignal(number) == run.on_signal  # else it would end this process
        run.training = True
        os.kill(os.getpid(), number)
        asked.append(run.stop_signal)

    signal.signal(number, signal.SIG_DFL)  # the test's own parent may ignore it
    monkeypatch.setattr(train_gpt, "whole_run", whole_run)
    assert main_here({"DEVICE": "cpu"}) == 0 and asked == [number]


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_signal_that_ends_a_job_saves_first(number: signal.Signals, lab: Lab) -> None:
    ended = lab.run(fault=heard(number) + signal_at_step(3, number), **STOPPED)
    assert_saved(ended, number, 3)


def test_signals_that_come_at_once_are_one_request(lab: Lab) -> None:
    """Slurm signals torchrun and its ranks, and torchrun passes on what it got."""
    numbers = signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
    fault = "".join(map(heard, numbers)) + signal_at_step(3, *numbers)
    assert_saved(lab.run(fault=fault, **STOPPED), signal.SIGTERM, 3)


def test_what_a_scheduler_sends_later_does_not_cost_the_checkpoint(lab: Lab) -> None:
    """The system repeats SIGXCPU every second; Slurm follows its warning with SIGTERM."""
    numbers = signal.SIGXCPU, signal.SIGXCPU, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP
    fault = SLOW_CLOCK + "".join(map(heard, numbers)) + signal_at_step(3, *numbers)
    assert_saved(lab.run(fault=fault, **STOPPED), signal.SIGXCPU, 3)


def test_signals_that_the_parent_ignores_and_others_stay_what_they_are(lab: Lab) -> None:
    ignored = signal.SIGUSR1, signal.SIGXCPU, signal.SIGQUIT
    harmless = signal.SIGCONT, signal.SIGWINCH, signal.SIGURG, signal.SIGCHLD
    ignore = "import signal\n" + "".join(f"signal.signal({int(one)}, signal.SIG_IGN)\n" for one in ignored)
    ended = lab.succeed(fault=ignore + signal_at_step(3, *ignored, *harmless), **STOPPED)
    assert ended.err == "" and ended.summary["steps"] == 6


def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(lab: Lab) -> None:
    number = signal.SIGUSR1
    each = {1: {"fault": heard(number) + signal_at_step(3, number)}}
    ended = [rank.wait() for rank in lab.ranks(2, each=each, **STOPPED)]
    assert [one.status for one in ended] == [128 + number] * 2, [one.err for one in ended]
    assert_saved(ended[0], number, 3)


TORCHRUN = "from torch.distributed.run import main\nmain()\n"


def under_torchrun(lab: Lab, number: int, *options: str) -> tuple[Ended, str]:
    """Two endless ranks whose torchrun gets a signal. How it ended, and what its ranks printed to the end."""
    (lab.folder / "torchrun.py").write_text(TORCHRUN)
    arguments = "--standalone", "--nproc_per_node=2", *options, str(SCRIPT)
    endless = {**SHORT_END, "ITERATIONS": 10**6, "TRAIN_LOG_EVERY": 1}
    started = lab.start(*arguments, script=lab.folder / "torchrun.py", **endless)
    wait_until(lambda: "step:5/" in started.out or not started.process.is_alive())
    started.send(number)
    ended = started.wait()
    wait_until(lambda: "stopped by signal" in started.out)
    return ended, started.out


def ranks_of(folder: Path) -> list[int]:
    """The processes that still run our script in this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if str(SCRIPT).encode() in words and os.readlink(process / "cwd") == str(folder):
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_what_torchrun_passes_on_saves_on_every_rank(lab: Lab) -> None:
    _, out = under_torchrun(lab, signal.SIGTERM)
    assert re.search(r"^checkpoint:\S+ step:\d+$", out, re.M) and "continue with RESUME=" in out
    assert (lab.folder / "runs" / "run" / "checkpoint.pt").exists()
    wait_until(lambda: not ranks_of(lab.folder))


@pytest.mark.slow
def test_ranks_save_and_end_when_torchrun_is_gone(lab: Lab) -> None:
    """USR1 ends torchrun, which does not handle it: its ranks must not run on alone."""
    ended, out = under_torchrun(lab, signal.SIGUSR1)
    assert ended.status != 0 and "continue with RESUME=" in out
    assert (lab.folder / "runs" / "run" / "checkpoint.pt").exists()
    wait_until(lambda: not ranks_of(lab.folder))


# Starts two ranks as torchrun does, but forks them: they need not load torch once more.
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends this signal")
@pytest.mark.parametrize("environ, expected", [({}, 0), ({"TORCHELASTIC_RUN_ID": "x"}, signal.SIGTERM)])
def test_a_run_ends_with_torchrun_but_not_with_a_shell(environ: dict[str, str], expected: int) -> None:
    """A run that was started in the background goes on when its shell is gone."""
    set_signal, get_signal = 1, 2  # PR_SET_PDEATHSIG and PR_GET_PDEATHSIG of <sys/prctl.h>
    prctl = ctypes.CDLL(None).prctl
    try:
        prctl(set_signal, 0)
        train_gpt.end_with_launcher(environ)
        found = ctypes.c_int()
        prctl(get_signal, ctypes.byref(found))
    finally:
        prctl(set_signal, 0)
    assert found.value == expected


LAUNCHER = """
import os, sys
from pathlib import Path
from tests.support.processes import run_as_main
_, script, kept = sys.argv
sys.argv = [script]
for rank in range(2):
    if os.fork() == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        run_as_main(script, Path(kept))
os.wait()
"""


def test_ranks_save_and_end_when_their_launcher_is_gone(lab: Lab) -> None:
    (lab.folder / "launcher.py").write_text(LAUNCHER)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    endless = {**STOPPED, "ITERATIONS": 10**6, "TRAIN_LOG_EVERY": 1, "TORCHELASTIC_RUN_ID": "any"}
    arguments = str(SCRIPT), str(processes.KEPT)
    started = lab.start(*arguments, script=lab.folder / "launcher.py", **group, **endless)
    wait_until(lambda: "step:2/" in started.out or not started.process.is_alive())
    ranks = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children").read_text().split()
    assert len(ranks) == 2, started.out
    try:
        started.send(signal.SIGKILL)
        started.wait()
        wait_until(lambda: "stopped by signal" in started.out)
        wait_until(lambda: not any(map(is_running, ranks)))
    finally:
        for rank in filter(is_running, ranks):
            os.kill(int(rank), signal.SIGKILL)
    assert (lab.folder / "runs" / "run" / "checkpoint.pt").exists()
