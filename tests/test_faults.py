"""A fault matrix with real processes: whatever kills a run, what follows ends with the same result."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from processes import DEADLINE_SECONDS, SCRIPT, Ended, Lab, Started
from soak import soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
KILLS, SEED = 30, 20240520
SLOW = "import time, torch\nstep = torch.optim.AdamW.step\n"
SLOW += "def slow(*given):\n    time.sleep(0.05); return step(*given)\ntorch.optim.AdamW.step = slow\n"
MARKS = {  # what a run has printed when a phase begins, of a run that begins at the first step
    "setup": "", "warm-up": "seed:", "train": "step:1/", "late in training": "step:5/", "hessians": "step:6/",
    "quantize": "peak memory", "round trip": "artifact_bytes", "sliding window": "roundtrip_exact",
    "test-time training": "sliding_window_exact", "summary": "legal_ttt_exact",
}  # fmt: skip


def killed(started: Started, mark: str, seconds: float) -> bool:
    """Kill a process some seconds after it printed a mark; False when it has ended before."""
    while mark not in started.out and started.process.is_alive():
        time.sleep(0.005)
    started.process.join(seconds)
    if not started.process.is_alive():
        assert started.wait().status == 0, started.wait().err
        return False
    started.send(signal.SIGKILL)
    started.wait()
    return True


def assert_whole(ended: Ended, finished: Ended) -> None:
    """The result of a run that nothing had happened to, and nothing half-written beside it."""
    for key in ("stream_hash", "losses", "steps", "tokens"):
        assert ended.summary[key] == finished.summary[key], key
    assert ended.summary["artifact"]["sha256"] == finished.summary["artifact"]["sha256"]
    assert not [*ended.directory.glob(".*")]
    assert {event["step"] for event in ended.events if event["event"] == "train"} == {1, 2, 3, 4, 5, 6}


def test_kills_at_random_times_in_every_phase(lab: Lab, finished: Ended) -> None:
    source, kills, runs = random.Random(SEED), Counter[str](), 0
    while kills.total() < KILLS:
        runs += 1
        here = lab.elsewhere(f"run{runs}")
        for attempt in range(4):  # three kills, and then to the end
            saved = [*here.folder.glob("runs/*/checkpoint*.pt")]
            resume = {"RESUME": "auto"} if saved else {"RUN_ID": f"attempt{attempt}"}
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
                assert not [*other.glob("checkpoint*.pt")]
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
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and "SIGKILL" in err
    assert not Path(f"/proc/{children[0]}").exists()
    resumed = lab.start(RESUME="auto", ITERATIONS=100000)
    resumed.wait_for("resumed:")
    resumed.send(signal.SIGTERM)
    resumed.wait(20)


def test_a_clock_that_jumps_changes_nothing(lab: Lab, finished: Ended) -> None:
    fault = (
        "import time, itertools\njumps = itertools.cycle([0.0, 2e9, 5.0])\ntime.time = lambda: next(jumps)\n"
    )
    assert_whole(lab.succeed(fault=fault), finished)


def test_a_second_process_on_the_same_run_is_refused_and_the_first_goes_on(lab: Lab, finished: Ended) -> None:
    first = lab.start(fault=SLOW)
    first.wait_for("step:1/6")
    second = lab.run()
    assert second.status == 1 and "RUN_ID=run" in second.err
    assert first.wait().status == 0
    assert_whole(Ended(0, "", "", lab.folder / "runs"), finished)


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl", "config.env", "train_gpt.py", "model.bin"])
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
