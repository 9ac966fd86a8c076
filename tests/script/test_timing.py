"""Where the milliseconds go: lines and traces say what happened, change nothing, and no other step pays."""

import contextlib
import itertools
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import train_gpt
from data.shards import write_shard
from tests.support.fake_gpu import COPY_US, DEVICE_US, HOST_US, STAGE_MS, FakeGpu
from tests.support.planted import in_phase, signal_at_step
from tests.support.processes import SHORT_END, Ended, Lab, results
from tests.support.tiny import tokens_of
from tools.trace.timeline import lane_spans
from train_gpt import LANES, StepTimer, Trace

Event = dict[str, Any]
# All that a step is made of, for a loader that reads and stages in threads.
STEP_SPANS = ("chunk", "gpu_queue_wait", "forward", "backward", "grad_clip", "optimizer")


def fields(line: str) -> dict[str, float]:
    """The numbers of a log line."""
    return {name: float(value) for name, value in re.findall(r"(\w+):([-\d.]+)", line)}


def host_step(timer: StepTimer, step: int) -> str:
    """A step of two micro-batches."""
    timer.begin(step)
    for lap in ("batch", "forward", "backward") * 2 + ("optimizer", "grad_clip", "optimizer"):
        timer.lap(lap)
    return timer.end(1.25, 2)


def test_reported_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means over the micro-steps up to backward, sums of what comes once a step."""
    timer = StepTimer(every=8, on_gpu=False)
    reported = [step for step in range(1, 33) if host_step(timer, step)]
    assert reported == [*range(1, 11), 16, 24, 32]
    clock = iter([ms / 1000 for ms in (100, 101, 105, 111, 114, 118, 128, 140, 145, 152)])
    timer = StepTimer(every=2, on_gpu=False)
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: next(clock))
    assert host_step(timer, 14) == (
        "timing_breakdown step:14 micro_steps:2 batch_cpu_ms:1.25 batch_h2d_ms:0.00 forward_ms:4.00 "
        "backward_ms:8.00 grad_clip_ms:5.00 optimizer_ms:19.00 batch_wait_ms:2.00"
    )


@pytest.mark.parametrize(("every", "step"), [(2, 13), (0, 2), (0, 16), (2, 0), (1, 0)])
def test_other_steps_are_not_timed(every: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those between, all of them without TRAINING_TIMING_BREAKDOWN, and those of the warm-up."""
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: pytest.fail("the clock was read"))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: pytest.fail("an event was made"))
    assert host_step(StepTimer(every, on_gpu=True), step) == ""


def test_the_gpu_tells_its_own_times_and_no_other_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a batch was made ahead: its milliseconds are told, and are no part of the step."""
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    timer = StepTimer(every=4, on_gpu=True)
    for step in range(11, 18):
        waits = gpu.waits
        line = gpu.step(timer, step, micro_steps=2)
        assert gpu.waits - waits == (step % 4 == 0)
        if step == 16:
            told = fields(line)
    assert told.pop("step") == 16 and told.pop("micro_steps") == 2
    assert told == pytest.approx(
        {
            "batch_cpu_ms": STAGE_MS, "batch_wait_ms": HOST_US["batch"] / 1e3, "batch_h2d_ms": COPY_US / 1e3,
            "forward_ms": DEVICE_US["forward"] / 1e3, "backward_ms": DEVICE_US["backward"] / 1e3,
            "grad_clip_ms": DEVICE_US["grad_clip"] / 1e3, "optimizer_ms": 2 * DEVICE_US["optimizer"] / 1e3,
        },
        abs=0.0051,
    )


def read(path: Path) -> list[Event]:
    """The events of a file, each checked for what the viewers need."""
    events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "M") and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
    return events


def spans(events: list[Event], name: str, lane: str = "") -> list[Event]:
    """Those of one name; of all lanes or of one."""
    found = [event for event in events if event["ph"] == "X" and event["name"] == name]
    return [event for event in found if not lane or LANES[event["tid"] - 1] == lane]


def steps(events: list[Event], name: str = "chunk", lane: str = "main") -> list[int]:
    """The steps that the spans of one name belong to."""
    return [span["args"]["step"] for span in spans(events, name, lane)]


def inside(event: Event, span: Event) -> bool:
    """Whether a moment or a span lies in a span of the same lane; to a nanosecond, as times are rounded."""
    end = event["ts"] + event.get("dur", 0)
    same_lane = event["tid"] == span["tid"]
    return same_lane and span["ts"] - 1e-3 <= event["ts"] and end <= span["ts"] + span["dur"] + 1e-3


def make_trace(folder: Path, first: int = 1, after: int = 1000, rank: int = 0) -> Trace:
    """A trace of some steps whose file lies in a folder; it tells the log nothing."""
    return Trace(range(first, after), folder, rank, log=lambda line: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace_rank0.json"


def test_the_file_is_written_once_by_lane_and_rank(tmp_path: Path, path: Path) -> None:
    trace = make_trace(tmp_path, rank=3)
    for number in range(1, 6):
        trace.begin(number)
        with contextlib.suppress(KeyError), trace.span("work", "disk", step=number):
            raise KeyError  # a span is written all the same
    trace.finish()
    events = read(tmp_path / "trace_rank3.json")
    assert steps(events, "work", "disk") == [*range(1, 6)]
    assert {event["pid"] for event in events} == {3}
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == list(LANES)
    # Before that a killed run has no file; after that nothing is kept, and nothing written anew.
    trace = make_trace(tmp_path, 2, 4)
    for number in range(1, 6):
        trace.begin(number)
        if trace.recording:
            trace.add_step(number, host_laps())
        assert path.exists() == (number >= 3)
    content = path.read_bytes()
    with trace.span("late", "main"):
        pass
    trace.finish()
    assert path.read_bytes() == content and not trace.recording
    assert steps(read(path)) == [2, 3]


def host_laps() -> list[train_gpt.Lap]:
    """A step without a GPU."""
    return [train_gpt.Lap(name, time.perf_counter(), None, None) for name in ("begin", "batch", "optimizer")]


def test_a_full_disk_costs_no_run_off_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(train_gpt.os, "replace", full)
    trace = make_trace(tmp_path)
    trace.begin(1)
    trace.finish()
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: pytest.fail("the clock was read"))
    trace = Trace(directory=tmp_path)
    trace.begin(1)
    with trace.span("work", "main"):
        assert not trace.spans
    trace.finish()
    assert not trace.recording and [*tmp_path.iterdir()] == []
    never = make_trace(tmp_path, 100, 110)  # its steps never came
    never.begin(1)
    never.finish()
    assert [*tmp_path.iterdir()] == []


def traced(lab: Lab, **changes: Any) -> tuple[Ended, list[Event]]:
    """A run with a trace that must succeed, and its file."""
    ended = lab.succeed(**{"TRACE_STEPS": "1:1000", **changes})
    return ended, read(ended.directory / "trace_rank0.json")


# The trace has been written when the next phase begins.
END_OF_TRAINING = in_phase("hessians", "os._exit(0)")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> tuple[Ended, list[Event]]:
    """A traced run, with a warm-up and a validation between steps; to be read only."""
    return traced(
        Lab(tmp_path_factory.mktemp("whole"), dataset), VAL_LOSS_EVERY=3, WARMUP_STEPS=1, **SHORT_END
    )


def test_a_traced_run_has_the_same_bits(whole: tuple[Ended, list[Event]], short: Ended) -> None:
    """And without TRACE_STEPS there is no file."""
    ended, events = whole
    assert results(ended) == results(short)
    assert ended.err == "" and f"trace:{ended.directory / 'trace_rank0.json'}" in ended.out
    assert set(lane_spans(events)) == {"main", "disk", "stage", "copy"}, "the drawing of it shows them"
    files = [{path.name for path in run.directory.iterdir()} for run in (ended, short)]
    assert files[0] - files[1] == {"trace_rank0.json"} and files[1] <= files[0]


def test_every_step_and_its_parts_are_there_and_spans_nest(whole: tuple[Ended, list[Event]]) -> None:
    """Six steps of two micro-batches, none of the warm-up, the validations between two of them and last."""
    _, events = whole
    six = [*range(1, 7)]
    assert steps(events) == six
    for name, count in (("forward", 2), ("backward", 2), ("gpu_queue_wait", 2)):
        assert steps(events, name) == sorted(count * six), name
    assert steps(events, "grad_clip") == six and steps(events, "optimizer") == sorted(2 * six)
    chunks = spans(events, "chunk")
    middle, last = spans(events, "val")
    assert [middle["args"]["step"], last["args"]["step"]] == [3, 6] and middle["dur"] > 0
    assert chunks[2]["ts"] + chunks[2]["dur"] <= middle["ts"]
    assert middle["ts"] + middle["dur"] <= chunks[3]["ts"]
    assert len(spans(events, "stage", "stage")) == len(spans(events, "stage")) > 0
    assert spans(events, "compute_stream") == []  # no GPU
    assert len(spans(events, "gpu_transfer", "copy")) == len(spans(events, "gpu_transfer")) == 12
    # Two of a lane are apart, or one is in the other: what a viewer can stack.
    for name in STEP_SPANS:
        assert all(any(inside(span, chunk) for chunk in chunks) for span in spans(events, name)), name
    for chunk in chunks:
        parts = [part for name in STEP_SPANS[1:] for part in spans(events, name) if inside(part, chunk)]
        assert sum(part["dur"] for part in parts) == pytest.approx(chunk["dur"])
    all_spans = [event for event in events if event["ph"] == "X"]
    for one, other in itertools.combinations(all_spans, 2):
        if one["tid"] == other["tid"] and not inside(one, other) and not inside(other, one):
            first, second = sorted((one, other), key=lambda span: span["ts"])
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-3, (first, second)


def test_only_the_steps_asked_for_are_written_and_shards_read_in_a_step(lab: Lab) -> None:
    """With a reader and a stage that read and gather in the step itself, and every shard read again."""
    _, events = traced(lab, TRACE_STEPS="3:5", TRAIN_PREFETCH=0, VAL_LOSS_EVERY=1, fault=END_OF_TRAINING)
    assert steps(events) == [3, 4]
    # No shard is read in these steps: the lane says which one lies ready.
    assert {event["name"] for event in events if event["ph"] == "X" and event["tid"] == 2} == {"disk_idle"}
    assert steps(events, "forward") == sorted(2 * [3, 4])
    assert [span["args"]["step"] for span in spans(events, "val")] == [3]  # between the two
    assert [span["args"]["batch"] for span in spans(events, "stage")] == [*range(4, 8)]
    first, last = spans(events, "chunk")
    begin, after = first["ts"], last["ts"] + last["dur"]
    inner = [event for event in events if event["ph"] == "X"]
    assert all(begin - 1e3 <= event["ts"] <= event["ts"] + event["dur"] <= after + 1e3 for event in inner)
    # Shards that are so small that each is read in a step, and the data more than once.
    small = lab.copy_dataset().elsewhere("small")
    (small.dataset / "manifest.json").unlink()
    for shard in small.dataset.glob("fineweb_train_*.bin"):
        write_shard(shard, tokens_of(shard)[:200])
    _, events = traced(small, TRAIN_PREFETCH=0, VAL_LOSS_EVERY=0, fault=END_OF_TRAINING)
    loads = spans(events, "disk_load", "disk")
    assert len(loads) == len(spans(events, "disk_load"))
    assert {span["args"]["shard"] for span in loads} == {f"fineweb_train_00000{n}.bin" for n in range(2)}


def gpu_trace(
    gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch, trained: int = 6, window: Any = (1, 10_000)
) -> list[Event]:
    """The events of a trace that watched `trained` steps on a fake GPU, and its last wait for it."""
    gpu.install(monkeypatch)
    trace = make_trace(folder, *window)
    timer = StepTimer(every=0, on_gpu=True, trace=trace)
    for step in range(1, trained + 1):
        gpu.step(timer, step)
    gpu.host_ns = max(gpu.host_ns, gpu.free_ns)  # as at the end of training
    trace.finish()
    return [event for event in read(folder / "trace_rank0.json") if event["ph"] == "X"]


PARTS = ("forward", "backward", "optimizer", "grad_clip", "optimizer")


def test_the_compute_stream_shows_what_the_gpu_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    # Also what the GPU does of these steps when the host is already further, and nothing else.
    cut = gpu_trace(FakeGpu(), tmp_path, monkeypatch, window=(2, 4))
    assert steps(cut, "backward", "compute_stream") == steps(cut, "backward") == [2, 3]
    events = gpu_trace(gpu, tmp_path, monkeypatch)
    assert gpu.waits == 1  # when the file is written
    found = [event for event in events if LANES[event["tid"] - 1] == "compute_stream"]
    assert [span["name"] for span in found] == [*PARTS] * 6
    assert [span["args"]["step"] for span in found] == sorted(len(PARTS) * [*range(1, 7)])
    did = [(start, end) for name, start, end in gpu.did if name != "batch"]
    # The first piece also has the moment in which the idle GPU was not asked yet.
    for span, (start, end) in zip(found[1:], did[1:], strict=True):
        assert span["ts"] == pytest.approx(start / 1e3, rel=0, abs=1e-3)
        assert span["dur"] == pytest.approx((end - start) / 1e3)
    hosts = [span["dur"] for span in spans(events, "optimizer", "main")]
    assert hosts == pytest.approx(12 * [HOST_US["optimizer"]])  # what the host did is beside it


@pytest.mark.gpu
def test_a_run_on_a_gpu_has_all_lanes_and_the_same_stream(lab: Lab) -> None:
    changes = {"DEVICE": "cuda", "COMPILE": 0, "EVAL_STRIDE": 0, "TTT_ENABLED": 0}
    ended, events = traced(lab, TRAINING_TIMING_BREAKDOWN=1, **changes)
    lines = re.findall(r"^timing_breakdown .*$", ended.out, re.M)
    assert len(lines) == 6 and all(0 < fields(line)["batch_h2d_ms"] < 50 for line in lines)
    alone = lab.elsewhere("alone").succeed(RUNS_DIR=lab.folder / "alone" / "runs", **changes)
    assert ended.summary["stream_hash"] == alone.summary["stream_hash"]
    lanes = {LANES[event["tid"] - 1] for event in events if event["ph"] == "X"}
    assert lanes >= {"main", "stage", "copy", "compute_stream"}
    chunks = spans(events, "chunk")
    begin, end = chunks[0]["ts"], chunks[-1]["ts"] + chunks[-1]["dur"] + 1e6
    device = [e for e in events if e["ph"] == "X" and LANES[e["tid"] - 1] == "compute_stream"]
    assert len(device) == 6 * (2 + 2 + 3) and all(begin <= span["ts"] <= end for span in device)
    assert len(spans(events, "gpu_transfer", "copy")) >= 10


def test_a_profile_holds_its_steps_alone_and_the_same_bits(lab: Lab, short: Ended) -> None:
    """Two of six steps, their operators beside their spans, and no others; a signal ends it with a file."""
    ended = lab.succeed(PROFILE_STEPS="3:5", WARMUP_STEPS=1, **SHORT_END)
    assert results(ended) == results(short)
    profile = json.loads((ended.directory / "profile_rank0.json").read_text())["traceEvents"]
    adds = [event for event in profile if event.get("name") == "aten::embedding_dense_backward"]
    assert steps(read(ended.directory / "trace_rank0.json")) == [3, 4]
    assert len(adds) == 2 * 2, "two micro-batches a step"
    ended = lab.elsewhere("stopped").run(fault=signal_at_step(2), PROFILE_STEPS="1:1000", VAL_LOSS_EVERY=0)
    assert ended.status == 128 + signal.SIGTERM and "stopped by signal 15" in ended.out
    assert steps(read(ended.directory / "trace_rank0.json")) == [1, 2]
    assert json.loads((ended.directory / "profile_rank0.json").read_text())["traceEvents"]
