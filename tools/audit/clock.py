"""The auditor's clock: a script reads it in place of its machine's, and its lines are stamped by it.

It moves when it is read, and when something is learned. So what a script says of seconds can be compared
with what they were, to the read, and a limit of time ends the same work on every machine.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

READ = ("perf_counter", "monotonic", "time", "process_time", "thread_time")
REAL: dict[str, Callable[..., Any]] = {}  # the functions of `time` before `install`


@dataclass(frozen=True)
class Clock:
    """A read takes a tick, a backward pass `learning` of them, read number `jump_at` `jump` seconds more."""

    tick: float = 1.0  # seconds
    learning: int = 50  # ticks
    jump_at: int = 0
    jump: float = 0.0

    def at(self, reads: int, passes: int) -> float:
        """Seconds after that many reads and backward passes."""
        return self.tick * (reads + self.learning * passes) + self.jump * (0 < self.jump_at <= reads)


class Reader:
    """A clock that is read in this process."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.counter = itertools.count(1)  # threads may read together
        self.reads = self.passes = 0
        self.slept = 0.0

    def read(self) -> float:
        """The time, a tick later than before."""
        self.reads = next(self.counter)
        return self.now()

    def now(self) -> float:
        """The time, unread."""
        return self.clock.at(self.reads, self.passes) + self.slept

    def sleep(self, seconds: float) -> None:
        """Sleep without waiting."""
        self.slept += seconds


reader: Reader | None = None  # of this process; None: the machine's clocks


def install() -> None:
    """Let all functions of `time` ask `reader`, if there is one. Before the script imports them by name."""
    for name in (*READ, *(f"{name}_ns" for name in READ), "clock_gettime", "sleep"):
        REAL[name] = getattr(time, name)
    for name in READ:
        setattr(time, name, lambda name=name: reader.read() if reader else REAL[name]())
        in_ns = f"{name}_ns"
        setattr(time, in_ns, lambda in_ns=in_ns: int(1e9 * reader.read()) if reader else REAL[in_ns]())
    time.clock_gettime = lambda which: reader.read() if reader else REAL["clock_gettime"](which)
    time.sleep = lambda seconds: reader.sleep(float(seconds)) if reader else REAL["sleep"](seconds)


def start(text: str) -> None:
    """From now on this process reads the clock that `as_text` wrote."""
    import torch

    global reader
    reader = started = Reader(Clock(**json.loads(text)))

    def counted(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        started.passes += 1
        return function(*args, **named)

    for name in ("backward", "grad"):  # Tensor.backward calls the first
        setattr(torch.autograd, name, functools.partial(counted, getattr(torch.autograd, name)))


def as_text(clock: Clock) -> str:
    """A clock for another process."""
    return json.dumps(asdict(clock))


class Stamped(io.TextIOBase):
    """Standard output of which each line is noted with the time at which it came."""

    def __init__(self, stream: TextIO, path: Path) -> None:
        self.stream, self.path = stream, path

    def write(self, text: str) -> int:
        lines = text.strip("\n")
        if lines and reader:
            with open(self.path, "a", encoding="utf-8") as file:
                for line in lines.split("\n"):
                    file.write(f"{json.dumps([reader.reads, reader.now(), line])}\n")
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"
