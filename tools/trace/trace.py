"""`trace`: run the training script in this process, and write a timeline of its steps for ui.perfetto.dev.

The script knows nothing of it: its functions are wrapped from outside, and compute what they always do.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import operator
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tools import REPO
from tools.runs.errors import RecordError
from tools.runs.load import load_script

SCRIPT = REPO / "train_gpt.py"
TAIL = b"\n]}\n"
HOST_LANES = ("main", "disk", "stage")
LANES = (*HOST_LANES, "copy stream", "compute stream")
WRAPPED = ("main", "read_tokens", "train_step", "train", "validate", "Loader.seek", "Loader._stage",
           "Loader.next_batch")  # fmt: skip
NEEDED = (*WRAPPED, "Machine")  # which a run has, and which tells the rank and the device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Settings come from the environment, as without it. Writes trace_rank<r>.json into the run directory."
    )
    steps = "only what overlaps the steps A <= step < B of training (default: all)"
    parser.add_argument("--steps", type=step_window, default=(0, math.inf), metavar="A:B", help=steps)
    parser.add_argument("--script", type=Path, default=SCRIPT, metavar="PATH", help="default: train_gpt.py")


def step_window(text: str) -> tuple[int, int]:
    """The two numbers of A:B. Raises ArgumentTypeError."""
    first, _, after = text.partition(":")
    if not (first.isdecimal() and after.isdecimal() and int(first) < int(after)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected A:B with whole numbers A < B")
    return int(first), int(after)


def run(args: argparse.Namespace) -> int:
    """Ends this process with the exit status of the script, at once, as the script itself does."""
    script = load_traceable(args.script)
    timeline = Timeline(*args.steps)
    wrap_script(script, timeline)
    status = script.main()
    timeline.flush()  # what threads still told
    os._exit(status)  # peers may wait in a collective that this rank never joins


def load_traceable(path: Path) -> ModuleType:
    """The script as a module that has all that is needed. Raises RecordError."""
    if path.suffix != ".py" or not path.is_file():
        raise RecordError(f"{path}: expected a Python file; name the training script with --script")
    script = load_script(path)
    for name in NEEDED:
        try:
            operator.attrgetter(name)(script)
        except AttributeError as error:
            raise RecordError(
                f"{path}: it has no {name}, so its steps cannot be traced; expected one with"
                f" {', '.join(NEEDED)}, as this repository's has them"
            ) from error
    return script


class Timeline:
    """Events of one rank, from any thread, in a file that is valid JSON after every step.

    first, after: it holds what overlaps first <= step < after; a step lasts until the next one begins, the
    last until training ends. Times are nanoseconds of `time.perf_counter_ns`, one clock for all ranks of a
    machine.
    """

    def __init__(self, first: float = 0, after: float = math.inf) -> None:
        self.first = first
        self.after = after
        self.since_ns = 0.0  # the last seek of the loader: what began before it is not shown
        self.opened_ns = math.inf  # when the first step asked for began
        self.closed_ns = math.inf  # when the first step behind them began
        self.events: deque[str] = deque()  # as text, not written yet
        self.path: Path | None = None
        self.rank = 0

    def open(self, path: Path, rank: int = 0, cuda: bool = False) -> None:
        """Begin the file; that of a resumed run is continued."""
        self.path = path
        self.rank = rank
        name = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        with contextlib.suppress(OSError):  # a full disk costs no run
            if not path.exists():
                path.write_bytes(b'{"traceEvents": [\n' + json.dumps(name).encode() + TAIL)
        lanes = LANES if cuda else HOST_LANES
        for lane in lanes:
            self.emit("M", "thread_name", lane, 0, args={"name": lane})
        self.flush()

    def begin(self, step: float) -> None:
        """Start of a step, or with math.inf the end of training."""
        if self.first <= step < self.after:
            self.opened_ns = min(self.opened_ns, time.perf_counter_ns())
        elif self.recording:
            self.closed_ns = time.perf_counter_ns()

    @property
    def recording(self) -> bool:
        """Whether the step under way is one of those asked for."""
        return self.opened_ns < math.inf and self.closed_ns == math.inf

    def flush(self) -> None:
        """Write what has gathered, in one call: over the closing brackets, and them again."""
        # Threads may add events meanwhile: those that are there now are taken, one by one.
        text = "".join(self.events.popleft() for _ in range(len(self.events)))
        if not text or self.path is None:
            return
        with contextlib.suppress(OSError), open(self.path, "r+b", buffering=0) as file:
            file.seek(-len(TAIL), os.SEEK_END)
            file.write(text.encode() + TAIL)

    def holds(self, start_ns: float, end_ns: float) -> bool:
        """Whether this overlaps the steps asked for, and is no remainder from before the last seek."""
        is_of_this_seek = start_ns >= self.since_ns
        overlaps = start_ns < self.closed_ns and end_ns >= self.opened_ns
        return is_of_this_seek and overlaps

    def emit(self, ph: str, name: str, lane: str | int, start_ns: float, **more: Any) -> None:
        """A span ("X" with dur), a counter ("C"), an end of an arrow ("s", "f") or a name ("M")."""
        tid = LANES.index(lane) + 1 if isinstance(lane, str) else lane
        event = {"ph": ph, "name": name, "pid": self.rank, "tid": tid, "ts": start_ns / 1e3} | more
        self.events.append(f",\n{json.dumps(event)}")

    def span(self, name: str, lane: str, start_ns: float, end_ns: float, **args: Any) -> None:
        """Something that went on from start to end."""
        self.emit("X", name, lane, start_ns, dur=(end_ns - start_ns) / 1e3, args=args)

    @contextlib.contextmanager
    def during(self, name: str, lane: str, **args: Any) -> Iterator[None]:
        """A span of what the calling thread does inside the `with` block, also when that raises."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            end_ns = time.perf_counter_ns()
            if self.holds(start_ns, end_ns):
                self.span(name, lane, start_ns, end_ns, **args)

    def count(self, name: str, value: int) -> None:
        """A counter that from now on has this value."""
        now_ns = time.perf_counter_ns()
        if self.holds(now_ns, now_ns):
            self.emit("C", name, 0, now_ns, args={name: value})

    def arrow(self, number: int, start: tuple[str, float], end: tuple[str, float]) -> None:
        """An arrow between two moments, each inside a span of its lane; no two of a rank have one number."""
        identity = self.rank << 40 | number  # apart from the arrows of other ranks, when files are merged
        for ph, (lane, moment_ns) in (("s", start), ("f", end)):
            self.emit(ph, "batch", lane, moment_ns, id=identity, cat="batch", bp="e")


class Mark(NamedTuple):
    """A CUDA event in the compute stream, and when the host put it there."""

    event: Any
    asked_ns: int


class DeviceSpan(NamedTuple):
    """Work of a step that was given to the device."""

    name: str
    step: int
    start: Mark
    end: Mark


class DeviceSpans:
    """What ran when on the compute stream, by CUDA events that later steps ask for, and none waits for.

    Each is placed on the host's clock by its distance from the one before, and then, as the two clocks drift
    apart, moved to where it neither begins before the host asked for it nor ends after it was found over.
    """

    def __init__(self, timeline: Timeline, cuda: Any) -> None:
        self.timeline = timeline
        self.cuda = cuda
        self.pending: deque[DeviceSpan] = deque()
        event = self._mark().event
        event.synchronize()  # before the first step
        self.anchor = event  # an event that is over, and its time on the host's clock
        self.anchor_ns = float(time.perf_counter_ns())

    def _mark(self) -> Mark:
        event = self.cuda.Event(enable_timing=True)
        now_ns = time.perf_counter_ns()
        event.record()
        return Mark(event, now_ns)

    @contextlib.contextmanager
    def during(self, name: str, step: int) -> Iterator[None]:
        """A span of what the `with` block gives the device to do."""
        if not self.timeline.recording:
            yield
            return
        start = self._mark()
        yield
        self.pending.append(DeviceSpan(name, step, start, self._mark()))

    def resolve(self) -> None:
        """Write those that are over."""
        while self.pending and self.pending[0].end.event.query():
            name, step, start, end = self.pending.popleft()
            length_ns = 1e6 * start.event.elapsed_time(end.event)
            start_ns = self.anchor_ns + 1e6 * self.anchor.elapsed_time(start.event)
            end_ns = max(start_ns, start.asked_ns) + length_ns
            end_ns = min(end_ns, time.perf_counter_ns())
            self.anchor = end.event
            self.anchor_ns = end_ns
            self.timeline.span(name, "compute stream", end_ns - length_ns, end_ns, step=step)


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a function by `around`, which gets it and then its arguments. Returns what puts it back."""
    inner = getattr(owner, name)

    def outer(*given: Any, **more: Any) -> Any:
        return around(inner, *given, **more)

    setattr(owner, name, outer)
    return lambda: setattr(owner, name, inner)


def wrap_script(script: Any, timeline: Timeline) -> None:
    """Have a script write what its loader and its steps do to a timeline."""
    tracer = Tracer(script.torch, timeline)
    for name in ("read_tokens", "train", "train_step", "validate"):
        wrapped(script, name, getattr(tracer, name))
    for name in ("seek", "_stage", "next_batch"):
        wrapped(script.Loader, name, getattr(tracer, name.strip("_")))


class Staged(NamedTuple):
    """When the staging of a batch began and ended."""

    start_ns: int
    end_ns: int


class Tracer:
    """What goes around the functions of the script, each named as the one that it gets as `inner`."""

    def __init__(self, torch: Any, timeline: Timeline) -> None:
        self.torch = torch
        self.timeline = timeline
        self.step = -1
        self.stream: Any = None  # the loader's, for copies
        self.device: DeviceSpans | None = None
        self.ready: dict[int, Staged] = {}  # by number, the batches that stand ready

    def seek(self, inner: Any, loader: Any, *given: Any) -> None:
        """The threads of before may still finish what they have begun; that is not shown."""
        self.ready = {}
        self.stream = loader.stream
        self.timeline.since_ns = time.perf_counter_ns()
        inner(loader, *given)

    def read_tokens(self, inner: Any, shard: Any, *given: Any, **more: Any) -> Any:
        """By whom else than the loader it is called is before or after training."""
        with self.timeline.during("disk_load", "disk", shard=shard.path.name):
            return inner(shard, *given, **more)

    def stage(self, inner: Any, loader: Any, visits: Any, first: int) -> Iterator[Any]:
        """Here, not in the thread, is decided whose batches stand ready: those of the last seek."""
        return self._staged(inner(loader, visits, first), first, self.ready)

    def _staged(self, batches: Iterator[Any], first: int, ready: dict[int, Staged]) -> Iterator[Any]:
        for index in itertools.count(first):
            start_ns = time.perf_counter_ns()
            with self.timeline.during("stage", "stage", batch=index):
                batch = next(batches)
                ready[index] = Staged(start_ns, time.perf_counter_ns())
            self.timeline.count("batches ready", len(ready))
            yield batch

    def next_batch(self, inner: Any, loader: Any) -> Any:
        """With the arrow from where the batch was staged, if that is shown."""
        index = loader.index
        start_ns = time.perf_counter_ns()
        with self.timeline.during("gpu_queue_wait", "main", batch=index):
            batch = inner(loader)
            taken_ns = time.perf_counter_ns()
        staged = self.ready.pop(index)
        self.timeline.count("batches ready", len(self.ready))
        if self.timeline.holds(*staged) and self.timeline.holds(start_ns, taken_ns):
            self.timeline.arrow(index, ("stage", staged.end_ns), ("main", taken_ns))
        return batch

    @contextlib.contextmanager
    def stream_context(self, inner: Any, stream: Any) -> Iterator[None]:
        """`torch.cuda.stream`, with a span if it is the loader's."""
        with contextlib.ExitStack() as block:
            if stream is not None and stream is self.stream:
                block.enter_context(self.timeline.during("gpu_transfer", "copy stream"))
            block.enter_context(inner(stream))
            yield

    def train(self, inner: Any, training: Any) -> None:
        """The file and the parts of a step, for as long as training goes on."""
        run = training.run
        rank = run.machine.rank
        cuda = run.machine.on_gpu
        parts = (
            (training, "loss", "forward"),
            (self.torch.Tensor, "backward", "backward"),
            (training.optimizer, "step", "optimizer"),
        )
        self.timeline.open(run.path(f"trace_rank{rank}.json"), rank, cuda)
        with contextlib.ExitStack() as until_its_end:
            until_its_end.callback(self.timeline.flush)  # last, after what the device still tells
            for owner, attribute, name in parts:
                until_its_end.callback(wrapped(owner, attribute, functools.partial(self.part, name)))
            if cuda:
                self.device = DeviceSpans(self.timeline, self.torch.cuda)
                until_its_end.callback(wrapped(self.torch.cuda, "stream", self.stream_context))
            until_its_end.callback(self._between_steps, math.inf)
            inner(training)

    def _between_steps(self, step: float) -> None:
        if self.device is not None:
            self.device.resolve()
        self.timeline.begin(step)

    def train_step(self, inner: Any, training: Any, *given: Any) -> Any:
        """Those of the warm-up are not shown."""
        if training.run.phase_name != "train":
            return inner(training, *given)
        self.step = training.step
        self._between_steps(self.step)
        with self.timeline.during("train", "main", step=self.step):
            results = inner(training, *given)
        self.timeline.flush()
        return results

    def part(self, name: str, inner: Any, *given: Any, **more: Any) -> Any:
        """A forward, a backward or an optimizer, on the host and on the device."""
        with contextlib.ExitStack() as block:
            block.enter_context(self.timeline.during(name, "main", step=self.step))
            if self.device is not None:
                block.enter_context(self.device.during(name, self.step))
            return inner(*given, **more)

    def validate(self, inner: Any, training: Any, *given: Any) -> Any:
        """One between two steps."""
        with self.timeline.during("val", "main", step=training.step):
            return inner(training, *given)
