"""Waiting without a guess at the machine's speed: deadlines are for hangs alone.

TEST_TIME_SCALE (1) of the environment multiplies all of them, for a run on a machine that is very busy.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIME_SCALE = float(os.environ.get("TEST_TIME_SCALE", "1"))
DEADLINE_SECONDS = 240.0 * TIME_SCALE  # for hangs: a loaded machine is slow


def no_disk_is_waited_for() -> None:
    """No test cuts the power of its machine, and a run would wait for a slow disk twenty times."""
    os.fsync = lambda _: None  # type: ignore[assignment]


def wait_until(condition: Callable[[], bool], seconds: float = DEADLINE_SECONDS) -> None:
    """Return as soon as a condition holds; fails where it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "deadline"
        time.sleep(0.002)


def is_running(process: int | str) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Run in a thread, so that a hang is a failure and not the end of the suite."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append((function(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert result, f"hung for {seconds} s"
    value, error = result[0]
    if error is not None:
        raise error
    return value
