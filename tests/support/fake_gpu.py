"""A GPU in miniature, on a clock that only it and its host move: what timing and traces see of a device."""

from __future__ import annotations

import pytest

import train_gpt

US = 1000  # nanoseconds
# What the host needs to ask for each part of a step, and the device to do it.
HOST_US = {"batch": 5, "forward": 10, "backward": 20, "grad_clip": 2, "optimizer": 8}
DEVICE_US = {"batch": 0, "forward": 30, "backward": 60, "grad_clip": 20, "optimizer": 70}
COPY_US = 5
STEPS_AHEAD = 2  # that the host may be ahead of the device


class FakeGpu:
    """Work that the host gives it at once and it does later, in order; its own clock may run differently."""

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate  # of its clock beside the host's
        self.host_ns = 10**9  # now
        self.free_ns = 0  # when all work that it has been given is done
        self.waits = 0  # how often the host waited for it
        self.did: list[tuple[str, int, int]] = []  # begin and end of each piece of work, with its name
        self.ends_of_steps: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let train_gpt take it for torch's GPU and for its clock."""
        monkeypatch.setattr(train_gpt.torch.cuda, "Event", self.Event)
        monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: self.host_ns / 1e9)

    def Event(self, enable_timing: bool) -> FakeEvent:
        """A torch.cuda.Event of this GPU."""
        assert enable_timing
        return FakeEvent(self)

    def launch(self, name: str, host_us: int, device_us: int) -> None:
        """So long for the host to ask for it, and so long for the device to do."""
        self.host_ns += host_us * US
        start = max(self.free_ns, self.host_ns)
        self.free_ns = start + device_us * US
        self.did.append((name, start, self.free_ns))

    def step(self, timer: train_gpt.StepTimer, number: int, micro_steps: int = 1) -> str:
        """What the script does in a step, as far as time goes; its line."""
        timer.trace.begin(number)
        timer.begin(number)
        for _ in range(micro_steps):
            for part in ("batch", "forward", "backward"):
                self._part(timer, part)
        for part in ("optimizer", "grad_clip", "optimizer"):
            self._part(timer, part)
        line = timer.end()
        # The host is a few steps ahead of the device, and no more.
        self.ends_of_steps.append(self.free_ns)
        if len(self.ends_of_steps) > STEPS_AHEAD:
            self.host_ns = max(self.host_ns, self.ends_of_steps[-1 - STEPS_AHEAD])
        return line

    def _part(self, timer: train_gpt.StepTimer, part: str) -> None:
        """One part of a step, and its lap; a batch comes with the marks of its copy."""
        copy = None
        if part == "batch":
            copy = train_gpt.CopyMarks(self.Event(True), self.Event(True))
            copy.begin.ns = self.host_ns - 2 * COPY_US * US
            copy.end.ns = self.host_ns - COPY_US * US
        self.launch(part, HOST_US[part], DEVICE_US[part])
        timer.lap(part, copy)


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
