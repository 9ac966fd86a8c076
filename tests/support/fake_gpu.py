"""A GPU, a script and a run in miniature, on a clock that only they move: what a tracer sees of a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

US = 1000  # nanoseconds
# What the host needs to ask for each part of a step, and the device to do it.
HOST_US = {"forward": 10, "backward": 20, "optimizer": 10}
DEVICE_US = {"forward": 30, "backward": 60, "optimizer": 90}
COPY_US = 5
STEPS_AHEAD = 2  # that the host may be ahead of the device


class FakeGpu:
    """Work that the host gives it at once and it does later, in order; its own clock may run differently.

    It stands for torch.cuda: `Event` and `stream`.
    """

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate  # of its clock beside the host's
        self.host_ns = 10**9  # now
        self.free_ns = 0  # when all work that it has been given is done
        self.waits = 0  # how often the host waited for it
        self.did: list[tuple[int, int]] = []  # begin and end of each piece of work
        self.streams: list[Any] = []  # that were entered

    def Event(self, enable_timing: bool) -> FakeEvent:
        """A torch.cuda.Event of this GPU."""
        assert enable_timing
        return FakeEvent(self)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """A torch.cuda.stream, which remembers what was entered."""
        self.streams.append(stream)
        yield

    def launch(self, host_ns: int, device_ns: int) -> None:
        """So long for the host to ask for it, and so long for the device to do."""
        self.host_ns += host_ns
        start = max(self.free_ns, self.host_ns)
        self.free_ns = start + device_ns
        self.did.append((start, self.free_ns))

    def run(self, part: str) -> None:
        """Launch one part of a step."""
        self.launch(HOST_US[part] * US, DEVICE_US[part] * US)


class FakeEvent:
    """A moment in the work of a GPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.ns = 0

    def record(self) -> None:
        """It is when all that was asked for before is done."""
        self.ns = max(self.gpu.free_ns, self.gpu.host_ns)

    def query(self) -> bool:
        """Whether it is over."""
        return self.ns <= self.gpu.host_ns

    def synchronize(self) -> None:
        """Wait for it."""
        self.gpu.waits += 1
        self.gpu.host_ns = max(self.gpu.host_ns, self.ns)

    def elapsed_time(self, later: FakeEvent) -> float:
        """Milliseconds by the GPU's clock."""
        assert self.query() and later.query(), "an event was asked that is not over"
        return self.gpu.rate * (later.ns - self.ns) / 1e6


def fake_script(gpu: FakeGpu, trained: int) -> Any:
    """A script in miniature: `trained` steps of a host that runs ahead of its GPU by two of them, at most."""

    class Loader:
        """Batches that are copied on a stream of their own."""

        def __init__(self) -> None:
            self.stream: Any = "copies"
            self.seek(0)

        def seek(self, step: int) -> None:
            self.index = step
            self.batches = self._stage(None, step)

        def _stage(self, visits: Any, first: int) -> Any:
            while True:
                with script.torch.cuda.stream(self.stream):
                    gpu.host_ns += COPY_US * US
                yield "batch"

        def next_batch(self) -> str:
            batch = next(self.batches)
            self.index += 1
            return batch

    class Tensor:
        """A loss."""

        def backward(self) -> None:
            gpu.run("backward")

    def train_step(training: Any, progress: float) -> None:
        training.loader.next_batch()
        training.loss()
        Tensor().backward()
        training.optimizer.step()

    def train(training: Any) -> None:
        ends: list[int] = []
        for training.step in range(trained):
            script.train_step(training, 0.0)
            ends.append(gpu.free_ns)
            if len(ends) > STEPS_AHEAD:
                gpu.host_ns = max(gpu.host_ns, ends[-1 - STEPS_AHEAD])
        gpu.host_ns = max(gpu.host_ns, gpu.free_ns)

    torch = SimpleNamespace(cuda=gpu, Tensor=Tensor)
    script = SimpleNamespace(
        torch=torch, Loader=Loader, train=train, train_step=train_step, read_tokens=None, validate=None
    )
    return script
