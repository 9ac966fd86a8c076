"""The timing lines: where the milliseconds of a step go, and that no other step pays for it."""

from __future__ import annotations

import pytest
import torch

import train_gpt

LAPS = ("batch", "forward", "backward", "batch", "forward", "backward", "optimizer")


def timed_step(timer: train_gpt.StepTimer, step: int | None, val_ms: float = 0.0) -> str:
    """A step of two micro-batches."""
    timer.begin(step, val_ms)
    for lap in LAPS:
        timer.lap(lap)
    return timer.line()


def test_a_reported_step_says_where_its_time_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the micro-steps, and the validation before the step, which no later step reports again."""
    clock = iter([ms / 1000 for ms in (100, 101, 105, 111, 114, 118, 128, 140, 150)])
    timer = train_gpt.StepTimer(every=2, on_gpu=False)
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: next(clock))
    assert timed_step(timer, 4, val_ms=7.0) == (
        "timing_breakdown step:4 batch_cpu_ms:4.00 batch_h2d_ms:0.00 forward_ms:8.00 backward_ms:16.00 "
        "optimizer_ms:12.00 val_ms:7.00"
    )
    timer.begin(6)
    assert timer.line().endswith(" optimizer_ms:0.00 val_ms:0.00")


def test_a_validation_is_of_the_step_after_it_alone() -> None:
    """Also where that one is not reported: the line after it says nothing of a validation long ago."""
    timer = train_gpt.StepTimer(every=2, on_gpu=False)
    assert timed_step(timer, 3, val_ms=7.0) == ""
    assert timed_step(timer, 4).endswith(" val_ms:0.00")


@pytest.mark.parametrize(("every", "step"), [(2, 3), (0, 2), (0, 0), (2, None), (1, None)])
def test_other_steps_are_not_timed_at_all(
    every: int, step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those between, all of them without TRAINING_TIMING_BREAKDOWN, and those of the warm-up."""
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: pytest.fail("the clock was read"))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: pytest.fail("an event was made"))
    assert timed_step(train_gpt.StepTimer(every, on_gpu=True), step) == ""


class FakeEvent:
    """A CUDA event of a GPU that takes 3 ms for each of the host's, and is behind it by 100 ms at least."""

    host_ms = 1000.0
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.host_ms += 1
        self.ms = 100 + 3 * FakeEvent.host_ms

    def synchronize(self) -> None:
        FakeEvent.host_ms = self.ms
        FakeEvent.waits += 1

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.ms - self.ms


def test_the_gpu_tells_its_own_times_and_no_other_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: FakeEvent.host_ms / 1000)
    timer = train_gpt.StepTimer(every=4, on_gpu=True)
    lines = []
    for step in range(1, 6):
        waits = FakeEvent.waits
        lines.append(timed_step(timer, step))
        assert FakeEvent.waits - waits == (step == 4)
    reported = (
        "timing_breakdown step:4 batch_cpu_ms:2.00 batch_h2d_ms:6.00 forward_ms:6.00 backward_ms:6.00 "
        "optimizer_ms:3.00 val_ms:0.00"
    )
    assert lines == ["", "", "", reported, ""]


@pytest.mark.gpu
def test_gpu_time_is_right_and_only_a_reported_step_is_waited_for() -> None:
    """A kernel of known length is found in `forward`."""
    timer = train_gpt.StepTimer(every=2, on_gpu=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    for step in (1, 2):
        timer.begin(step)
        timer.lap("batch")
        start.record()
        torch.cuda._sleep(200_000_000)
        end.record()
        timer.lap("forward")
        line = timer.line()
        assert end.query() == (step == 2) and (line == "") == (step == 1)
        torch.cuda.synchronize()
    forward_ms = float(line.split("forward_ms:")[1].split()[0])
    assert forward_ms == pytest.approx(start.elapsed_time(end), rel=0.05)
