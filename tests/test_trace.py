"""The trace: a file that is valid whatever happens, says what happened, and costs nothing when off."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loader import open_loader, wait_until, write_shards

import train_gpt

CPU = torch.device("cpu")


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, each checked for what the viewers need."""
    events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "C", "M", "s", "f") and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
    return events


def spans(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def lanes(events: list[dict[str, Any]]) -> set[str]:
    return {event["tid"] for event in events if event["ph"] != "M"}


def test_off_writes_and_keeps_nothing(tmp_path: Path) -> None:
    """Off, every span is one shared object and no event is ever kept."""
    trace = train_gpt.Trace(None)
    assert trace.span("a", "main") is trace.span("b", "main", x=1)
    with trace.span("a", "main"):
        trace.add("C", "depth", "main", args={"ready": 1})
        trace.add("X", "x", "main", 1, 2)
        trace.begin(1)
    with open_loader(write_shards(tmp_path / "data"), trace=trace) as loader:
        loader.next_batch()
    assert not trace.events
    trace.begin(math.inf)


def test_valid_after_every_step(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = train_gpt.Trace(path, rank=3)
    assert [event["name"] for event in read(path)] == ["process_name"]
    for number in range(5):
        with trace.span("work", "main", number=number):
            trace.add("C", "depth", "main", args={"ready": number})
        trace.begin(number)
        trace.begin(number)
        events = read(path)
        assert [span["args"]["number"] for span in spans(events, "work")] == [*range(number + 1)]
    trace.begin(math.inf)
    trace.begin(math.inf)
    assert {event["pid"] for event in read(path)} == {3}


def test_a_span_is_written_when_its_block_raises(tmp_path: Path) -> None:
    trace = train_gpt.Trace(tmp_path / "trace.json")
    with pytest.raises(KeyError), trace.span("work", "main"):
        raise KeyError
    trace.begin(math.inf)
    assert len(spans(read(tmp_path / "trace.json"), "work")) == 1


def test_a_resumed_run_continues_its_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for name in ("first", "second"):
        trace = train_gpt.Trace(path)
        with trace.span(name, "main"):
            pass
        trace.begin(math.inf)
    assert len(spans(read(path), "first")) == len(spans(read(path), "second")) == 1


def test_the_window_keeps_what_ends_in_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = train_gpt.Trace(path, steps="2:4")
    begin = train_gpt.time.perf_counter_ns()
    for step in range(6):
        trace.begin(step)
        with trace.span("train", "main", step=step):
            trace.add("C", "depth", "main", args={"step": step})
        trace.add("X", "epoch", "epochs", begin, args={"ended": step})  # each from before it
    trace.begin(math.inf)
    with trace.span("late", "main"):
        trace.add("C", "depth", "main", args={"step": 9})
    events = read(path)
    assert [span["args"]["step"] for span in spans(events, "train")] == [2, 3]
    assert [event["args"]["step"] for event in events if event["ph"] == "C"] == [2, 3]
    assert [span["args"]["ended"] for span in spans(events, "epoch")] == [2, 3]


def test_many_threads_write_whole_events(tmp_path: Path) -> None:
    """What threads add while steps are written is written once, and not between the letters of another."""
    path = tmp_path / "trace.json"
    trace = train_gpt.Trace(path)

    def work(lane: str) -> None:
        for number in range(200):
            with trace.span("work", lane, number=number):
                pass

    threads = [threading.Thread(target=work, args=(f"lane {i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        trace.begin(1)
    trace.begin(math.inf)
    events = read(path)
    assert len(spans(events, "work")) == 1200
    assert len(lanes(events)) == 6


def traced_run(folder: Path, steps: int = 12) -> list[dict[str, Any]]:
    """A training loop's use of loader and trace, on one rank."""
    path = folder / "trace.json"
    trace = train_gpt.Trace(path, every=5)
    with open_loader(write_shards(folder / "data"), trace=trace) as loader:
        for step in range(steps):
            trace.begin(step)
            for _ in range(loader.micro_steps):
                loader.next_batch()
                for lap in ("batch", "forward", "backward"):
                    trace.lap(lap)
            trace.lap("optimizer")
            trace.end()
    trace.begin(math.inf)
    return read(path)


def test_a_run_has_every_lane_span_and_flow(tmp_path: Path) -> None:
    """An arrow leads from the staging of each batch to the step that used it; spans nest on the main lane."""
    events = traced_run(tmp_path)
    for name in (
        "epoch",
        "disk_load",
        "stage",
        "gpu_queue_wait",
        "train",
        "forward",
        "backward",
        "optimizer",
    ):
        assert spans(events, name), name
    assert lanes(events) == {"main", "epochs", "disk", "stage"}
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(ends) == 12 * 4 and set(ends) <= set(starts)
    for flow, end in ends.items():
        assert starts[flow]["ts"] <= end["ts"]
        for event in (starts[flow], end):
            assert any(
                span["tid"] == event["tid"] and span["ts"] <= event["ts"] <= span["ts"] + span["dur"]
                for span in events
                if span["ph"] == "X"
            )
    assert {"disk", "stage"} == {
        name for event in events if event["ph"] == "C" for name in event["args"]
    }
    trains = spans(events, "train")
    for inner in spans(events, "forward"):
        assert any(
            t["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= t["ts"] + t["dur"] + 1e-3 for t in trains
        )


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import train_gpt
trace = train_gpt.Trace(Path({path!r}))
number = 0
while True:
    with trace.span("work", "main", number=number):
        pass
    number += 1
    if number % 10 == 0:
        trace.begin(number)
"""


def test_valid_after_sigkill(tmp_path: Path) -> None:
    """Killed in the middle of its work, a process leaves everything up to its last step."""
    path = tmp_path / "trace.json"
    script = KILLED.format(tests=str(Path(train_gpt.__file__).parent), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        wait_until(lambda: path.exists() and path.stat().st_size > 100_000)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(5)
    numbers = [span["args"]["number"] for span in spans(read(path), "work")]
    assert numbers == [*range(len(numbers))] and len(numbers) > 100


# -- timing lines --------------------------------------------------------------------------------------------


def test_a_reported_step_says_where_its_time_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the micro-steps, and the validation before the step, which no later step reports again."""
    clock = iter([ms * 1_000_000 for ms in (100, 101, 105, 111, 114, 118, 128, 140, 150)])
    trace = train_gpt.Trace(None, every=2)
    trace.val_ms = 7.0
    monkeypatch.setattr(train_gpt.time, "perf_counter_ns", lambda: next(clock))
    trace.begin(4)
    for lap in ("batch", "forward", "backward", "batch", "forward", "backward", "optimizer"):
        trace.lap(lap)
    assert trace.end() == (
        "timing_breakdown step:4 batch_cpu_ms:4.00 batch_h2d_ms:0.00 forward_ms:8.00 backward_ms:16.00 "
        "optimizer_ms:12.00 val_ms:7.00"
    )
    trace.begin(6)
    assert trace.end().endswith(" optimizer_ms:0.00 val_ms:0.00")


def test_other_steps_are_not_timed_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_gpt.time, "perf_counter_ns", lambda: pytest.fail("the clock was read"))
    for every, step in ((2, 3), (0, 2)):
        trace = train_gpt.Trace(None, every=every)
        trace.begin(step)
        trace.lap("batch")
        assert trace.end() is None


class FakeEvent:
    """A CUDA event of a GPU that takes 3 ms for each of the host's, and is behind it by 100 ms at least."""

    host_ms, waits = 1000.0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.host_ms += 1
        self.ms = 100 + 3 * FakeEvent.host_ms

    def synchronize(self) -> None:
        FakeEvent.host_ms, FakeEvent.waits = self.ms, FakeEvent.waits + 1

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.ms - self.ms


def test_the_gpu_tells_its_own_times_and_no_other_step_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(train_gpt.time, "perf_counter_ns", lambda: round(1e6 * FakeEvent.host_ms))
    trace, lines = train_gpt.Trace(tmp_path / "t.json", steps="2:3", every=4, cuda=True), []
    for step in range(1, 5):
        FakeEvent.host_ms, waits = FakeEvent.host_ms + 1, FakeEvent.waits
        trace.begin(step)
        for lap in ("batch", "forward", "backward", "batch", "forward", "backward", "optimizer"):
            trace.lap(lap)
        lines.append(trace.end())
        assert FakeEvent.waits - waits == (step in (2, 4))  # the one that is traced, the one reported
        if step == 2:
            waited_until_us = 1e3 * FakeEvent.host_ms
    trace.begin(math.inf)
    assert lines == [None] * 3 + [
        "timing_breakdown step:4 batch_cpu_ms:2.00 batch_h2d_ms:6.00 forward_ms:6.00 backward_ms:6.00 "
        "optimizer_ms:3.00 val_ms:0.00"
    ]
    events = read(tmp_path / "t.json")
    assert {span["args"]["step"] for span in spans(events, "train")} == {2}
    for lane, microseconds in (("main", 1000), ("compute stream", 3000)):
        durations = [span["dur"] for span in spans(events, "forward") if span["tid"] == lane]
        assert durations == [microseconds] * 2
    ends_us = [span["ts"] + span["dur"] for span in spans(events, "optimizer")]
    assert max(ends_us) == waited_until_us  # the GPU was over when the wait for it was


@pytest.mark.gpu
def test_gpu_time_is_right_and_only_a_reported_step_is_waited_for(tmp_path: Path) -> None:
    """A kernel of known length is found in `forward`, and in the trace where it ran."""
    trace = train_gpt.Trace(tmp_path / "t.json", steps="2:3", every=2, cuda=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    for step in (1, 2):
        begin_ns = train_gpt.time.perf_counter_ns()
        trace.begin(step)
        trace.lap("batch")
        start.record()
        torch.cuda._sleep(200_000_000)
        end.record()
        trace.lap("forward")
        line = trace.end()
        assert end.query() == (step == 2) and (line is None) == (step == 1)
        torch.cuda.synchronize()
    end_ns = train_gpt.time.perf_counter_ns()
    forward_ms = float(line.split("forward_ms:")[1].split()[0])
    assert forward_ms == pytest.approx(start.elapsed_time(end), rel=0.05)
    trace.begin(math.inf)
    (span,) = (s for s in spans(read(tmp_path / "t.json"), "forward") if s["tid"] == "compute stream")
    assert begin_ns <= 1e3 * span["ts"] and 1e3 * (span["ts"] + span["dur"]) <= end_ns
