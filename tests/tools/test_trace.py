"""`tools trace`: a file that is valid whatever happens, says what happened, and changes nothing."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import train_gpt
from tests.support.fake_gpu import COPY_US, DEVICE_US, HOST_US, FakeGpu, fake_script
from tests.support.processes import REPO, SCRIPT, Ended, Lab, Started, results
from tests.support.waiting import wait_until
from tools.__main__ import main
from tools.trace import trace
from tools.trace.timeline import lane_spans

TOOL = REPO / "tools" / "__main__.py"
Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    """The events of a file, each checked for what the viewers need."""
    events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "C", "M", "s", "f") and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
    return events


def spans(events: list[Event], name: str) -> list[Event]:
    """Those of one name."""
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def steps(events: list[Event], name: str = "train") -> list[int]:
    """The steps that the spans of one name belong to."""
    return [span["args"]["step"] for span in spans(events, name)]


def inside(event: Event, span: Event) -> bool:
    """Whether a moment or a span lies in a span of the same lane; to a nanosecond, as times are rounded."""
    end = event["ts"] + event.get("dur", 0)
    same_lane = event["tid"] == span["tid"]
    return same_lane and span["ts"] - 1e-3 <= event["ts"] and end <= span["ts"] + span["dur"] + 1e-3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace_rank0.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> tuple[Ended, list[Event]]:
    """A traced run, with a warm-up and a validation between steps; to be read only."""
    return traced(Lab(tmp_path_factory.mktemp("whole"), dataset), VAL_LOSS_EVERY=3)


def opened(path: Path, first: float = 0, after: float = math.inf, rank: int = 0) -> trace.Timeline:
    """A timeline of some steps that writes into `path`."""
    timeline = trace.Timeline(first, after)
    timeline.open(path, rank)
    return timeline


def start(lab: Lab, *arguments: str, **changes: Any) -> Started:
    """A run with the tool, under way."""
    return lab.start("trace", *arguments, script=TOOL, **changes)


def traced(lab: Lab, *arguments: str, **changes: Any) -> tuple[Ended, list[Event]]:
    """A run with the tool that must succeed, and its file."""
    ended = start(lab, *arguments, **changes).wait()
    assert ended.status == 0, ended.out + ended.err
    return ended, read(ended.directory / "trace_rank0.json")


def device_spans(events: list[Event]) -> list[Event]:
    """The spans of the compute stream."""
    return [e for e in events if e["ph"] == "X" and e["tid"] == 1 + trace.LANES.index("compute stream")]


def fake_run(
    gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch, trained: int = 6, window: Any = (0, math.inf)
) -> list[Event]:
    """The events of a tracer that watched a script in miniature: a step of warm-up, then `trained` steps."""
    monkeypatch.setattr(trace.time, "perf_counter_ns", lambda: gpu.host_ns)
    script = fake_script(gpu, trained)
    timeline = trace.Timeline(*window)
    before = (script.torch.Tensor.backward, script.torch.cuda.stream)
    trace.wrap_script(script, timeline)
    run = SimpleNamespace(machine=SimpleNamespace(rank=0, on_gpu=True), path=folder.joinpath)
    optimizer = SimpleNamespace(step=lambda: gpu.run("optimizer"))
    training = SimpleNamespace(
        run=run, loader=script.Loader(), optimizer=optimizer, step=0, loss=lambda: gpu.run("forward")
    )
    run.phase_name = "warmup"
    script.train_step(training, 0.0)
    assert not timeline.recording and not timeline.events
    training.loader.seek(0)
    gpu.did.clear()
    gpu.streams.clear()
    run.phase_name = "train"
    script.train(training)
    assert (script.torch.Tensor.backward, script.torch.cuda.stream) == before  # evaluation finds its own
    timeline.flush()
    return read(folder / "trace_rank0.json")


# -- the file ------------------------------------------------------------------------------------------------


def test_valid_after_every_step(path: Path) -> None:
    timeline = opened(path, rank=3)
    assert [event["name"] for event in read(path)] == ["process_name"] + 3 * ["thread_name"]
    for number in range(5):
        timeline.begin(number)
        with timeline.during("work", "main", step=number):
            timeline.count("ready", number)
        timeline.flush()
        timeline.flush()
        assert steps(read(path), "work") == [*range(number + 1)]
    assert {event["pid"] for event in read(path)} == {3}


def test_a_span_is_written_when_its_block_raises(path: Path) -> None:
    timeline = opened(path)
    timeline.begin(0)
    with pytest.raises(KeyError), timeline.during("work", "main"):
        raise KeyError
    timeline.flush()
    assert len(spans(read(path), "work")) == 1


def test_a_resumed_run_continues_its_file(path: Path) -> None:
    for name in ("first", "second"):
        timeline = opened(path)
        timeline.begin(0)
        with timeline.during(name, "main"):
            pass
        timeline.flush()
    assert len(spans(read(path), "first")) == len(spans(read(path), "second")) == 1


def test_a_full_disk_costs_no_run(tmp_path: Path) -> None:
    timeline = opened(tmp_path / "no such folder" / "trace_rank0.json")
    timeline.begin(0)
    timeline.count("ready", 1)
    timeline.flush()
    assert not timeline.events  # nor does what cannot be written gather in memory


def test_the_window_keeps_what_overlaps_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step k lasts from k to k + 1 by this clock: of the window 2:4, what overlaps 2 … 4, with both ends."""
    now = 0.0
    monkeypatch.setattr(trace.time, "perf_counter_ns", lambda: now)
    timeline = opened(path, 2, 4)
    edges = (0.5, 1.5, 2.5, 3.5, 4.5, 5.5)
    every = [(start, end) for start, end in itertools.product(edges, edges) if start <= end]
    for moment in (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5):
        now = moment
        if moment == int(moment):
            timeline.begin(int(moment))
        for start, end in every:
            if end == moment and timeline.holds(start, end):
                timeline.span("work", "disk", start, end, span=(start, end))
        timeline.count("ready", int(10 * moment))
    timeline.flush()
    expected = [(start, end) for start, end in every if end > 2 and start < 4]
    kept = [tuple(span["args"]["span"]) for span in spans(read(path), "work")]
    assert sorted(kept) == sorted(expected) and len(kept) < len(every)
    counts = [event["args"]["ready"] for event in read(path) if event["ph"] == "C"]
    assert counts == [20, 25, 30, 35]


def test_what_began_before_the_last_seek_is_left_out(path: Path) -> None:
    """A thread of the warm-up may end its last batch when step 0 has begun."""
    timeline = opened(path)
    with timeline.during("stage", "stage", batch=9):
        timeline.since_ns = trace.time.perf_counter_ns()
        timeline.begin(0)
    with timeline.during("stage", "stage", batch=0):
        pass
    timeline.flush()
    assert [span["args"]["batch"] for span in spans(read(path), "stage")] == [0]


def test_many_threads_write_whole_events(path: Path) -> None:
    """What threads add while steps are written is written once, and not between the letters of another."""
    timeline = opened(path)
    timeline.begin(0)

    def work(thread: int) -> None:
        for number in range(200):
            with timeline.during("work", "stage", number=(thread, number)):
                pass

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        timeline.flush()
    timeline.flush()
    numbers = {tuple(span["args"]["number"]) for span in spans(read(path), "work")}
    assert numbers == set(itertools.product(range(6), range(200)))
    assert len(spans(read(path), "work")) == 1200


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {repo!r})
from tools.trace.trace import Timeline
timeline, number = Timeline(), 0
timeline.open(Path({path!r}))
timeline.begin(0)
while True:
    if number % 10 == 0:
        timeline.flush()
    with timeline.during("work", "main", step=number):
        number += 1
"""


def test_valid_after_sigkill(path: Path) -> None:
    """Killed in the middle of its work, a process leaves everything up to its last step."""
    process = subprocess.Popen([sys.executable, "-c", KILLED.format(repo=str(REPO), path=str(path))])
    try:
        wait_until(lambda: path.exists() and path.stat().st_size > 100_000)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(5)
    numbers = steps(read(path), "work")
    assert numbers == [*range(len(numbers))] and len(numbers) > 100


# -- a run of the script -------------------------------------------------------------------------------------


def test_a_traced_run_has_the_same_bits(whole: tuple[Ended, list[Event]], finished: Ended) -> None:
    """And without the tool there is no file."""
    ended, _ = whole
    assert results(ended) == results(finished)
    assert ended.summary["code"] == finished.summary["code"] and ended.err == ""
    files = [{path.name for path in run.directory.iterdir()} for run in (ended, finished)]
    assert files[0] - files[1] == {"trace_rank0.json"} and files[1] <= files[0]


def test_every_step_and_its_parts_are_there(whole: tuple[Ended, list[Event]]) -> None:
    """Six steps of four micro-batches, none of the warm-up, the validation between two of them."""
    _, events = whole
    assert steps(events) == [*range(6)]
    for name, count in (("forward", 4), ("backward", 4), ("optimizer", 1)):
        assert steps(events, name) == sorted(count * [*range(6)]), name
    waits = spans(events, "gpu_queue_wait")
    assert [span["args"]["batch"] for span in waits] == [*range(24)]
    trains = spans(events, "train")
    (validation,) = spans(events, "val")
    assert validation["args"] == {"step": 3} and validation["dur"] > 0
    assert trains[2]["ts"] + trains[2]["dur"] <= validation["ts"]
    assert validation["ts"] + validation["dur"] <= trains[3]["ts"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(lanes.values()) == ["disk", "main", "stage"]  # no GPU
    assert {lanes[span["tid"]] for span in spans(events, "stage")} == {"stage"}


def test_spans_nest(whole: tuple[Ended, list[Event]]) -> None:
    """Two of a lane are apart, or one is in the other: what a viewer can stack."""
    _, events = whole
    trains = spans(events, "train")
    for name in ("gpu_queue_wait", "forward", "backward", "optimizer"):
        assert all(any(inside(span, train) for train in trains) for span in spans(events, name)), name
    whole_spans = [event for event in events if event["ph"] == "X"]
    for one, other in itertools.combinations(whole_spans, 2):
        if one["tid"] == other["tid"] and not inside(one, other) and not inside(other, one):
            first, second = sorted((one, other), key=lambda span: span["ts"])
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-3, (first, second)


def test_arrows_lead_from_a_batch_to_the_step_that_took_it(whole: tuple[Ended, list[Event]]) -> None:
    """Of every batch that was staged while steps ran: all but those that stood ready when they began."""
    _, events = whole
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    staged = {span["args"]["batch"]: span for span in spans(events, "stage")}
    taken = {span["args"]["batch"]: span for span in spans(events, "gpu_queue_wait")}
    assert set(starts) == set(ends) == set(staged) & set(taken) and len(starts) >= 20
    for batch, moment in starts.items():
        assert inside(moment, staged[batch]) and inside(ends[batch], taken[batch])
        assert moment["ts"] <= ends[batch]["ts"]


def test_the_counter_is_how_many_batches_stand_ready(whole: tuple[Ended, list[Event]]) -> None:
    """Up by one where a batch is staged, down by one where it is taken; never more than the queue holds."""
    ended, events = whole
    counts = [event["args"]["batches ready"] for event in events if event["ph"] == "C"]
    queue = int(ended.summary["config"]["TRAIN_PREFETCH_QUEUE"])
    assert len(counts) >= 40 and 0 <= min(counts) < max(counts) <= queue + 1
    changes = [after - before for before, after in itertools.pairwise(counts)]
    assert {1, -1} <= set(changes) and all(abs(change) <= 2 for change in changes)  # two threads write it


def test_only_the_steps_asked_for_are_written(lab: Lab, finished: Ended) -> None:
    """With a reader and a stage that read and gather in the step itself, and every shard read again."""
    changes = {"TRAIN_PREFETCH": 0, "VAL_LOSS_EVERY": 1}
    ended, events = traced(lab, "--steps", "2:4", **changes)
    assert results(ended) == results(finished)
    first, last = spans(events, "train")
    assert steps(events) == [2, 3]
    assert steps(events, "forward") == sorted(4 * [2, 3]) and steps(events, "val") == [3, 4]
    batches = [span["args"]["batch"] for span in spans(events, "gpu_queue_wait")]
    assert batches == [span["args"]["batch"] for span in spans(events, "stage")] == [*range(8, 16)]
    begin, after = first["ts"], last["ts"] + last["dur"]
    inner = [event for event in events if event["ph"] in "XC" and event["name"] != "val"]
    assert all(begin - 1e3 <= event["ts"] <= after for event in inner)


def test_a_shard_that_is_read_in_a_step_is_on_the_lane_disk(lab: Lab) -> None:
    """Steps that are so large that each shard is read in one."""
    _, events = traced(lab, TRAIN_BATCH_TOKENS=4096, MICRO_BATCH_TOKENS=4096, TRAIN_PREFETCH=0)
    loads = spans(events, "disk_load")
    assert {span["args"]["shard"] for span in loads} == {f"fineweb_train_00000{n}.bin" for n in range(2)}
    assert {span["tid"] for span in loads} == {1 + trace.LANES.index("disk")}


def test_valid_when_the_run_is_killed(lab: Lab) -> None:
    """With all steps up to the last; the drawing of it shows them."""
    run = start(lab, ITERATIONS=100000)
    run.wait_for("step:40/100000")
    run.send(signal.SIGKILL)
    ended = run.wait()
    assert ended.status == -signal.SIGKILL
    events = read(ended.directory / "trace_rank0.json")
    assert len(steps(events)) >= 40 and steps(events) == [*range(len(steps(events)))]
    assert set(lane_spans(events)) >= {"main", "stage"}


def test_a_signal_and_an_error_end_the_run_as_without_it(lab: Lab) -> None:
    run = start(lab, ITERATIONS=400, CHECKPOINT_EVERY_SECONDS=1000)
    run.wait_for("step:10/400")
    run.send(signal.SIGTERM)
    ended = run.wait()
    assert ended.status == 128 + signal.SIGTERM and "stopped by signal 15" in ended.out
    recorded = steps(read(ended.directory / "trace_rank0.json"))
    assert 10 <= len(recorded) < 400 and recorded == [*range(len(recorded))]
    again, events = traced(lab, RESUME=ended.directory, ITERATIONS=400, CHECKPOINT_EVERY_SECONDS=1000)
    assert again.directory == ended.directory and steps(events) == [*range(400)]
    refused = [start(lab, ITERATIONS=0).wait(), lab.run(ITERATIONS=0)]
    assert [one.status for one in refused] == [1, 1]
    assert refused[0].err == refused[1].err != ""


def test_torchrun_starts_it_and_every_rank_has_its_file(lab: Lab, finished: Ended) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "-m", "tools", "trace", "--steps", "1:3"]  # fmt: skip
    settings = lab.settings() | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=settings, cwd=lab.folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = Ended(0, done.stdout, done.stderr, lab.folder / "runs")
    assert ended.summary["hardware"]["world_size"] == 2
    assert ended.summary["stream_hash"] == finished.summary["stream_hash"]
    files = sorted(ended.directory.glob("trace_*"))
    assert [file.name for file in files] == ["trace_rank0.json", "trace_rank1.json"]
    for rank, file in enumerate(files):
        events = read(file)
        assert steps(events) == [1, 2] and {event["pid"] for event in events} == {rank}
        assert len(spans(events, "forward")) == 4  # two of the four micro-batches of each step
    numbers = [{event["id"] for event in read(file) if event["ph"] == "s"} for file in files]
    assert numbers[0] and numbers[1] and not numbers[0] & numbers[1]


# -- what cannot be traced -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "5", "3:", ":3", "3:3", "4:2", "-1:2", "a:b", "1:2:3"])
def test_steps_that_are_no_window_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trace", f"--steps={text}"])
    assert ended.value.code == 2
    assert f"{text!r}, expected A:B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"), [(None, "expected a Python file"), ("def main(): pass", "it has no read_tokens")]
)
def test_a_script_that_cannot_be_traced_is_refused(
    content: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "train_gpt", train_gpt)  # and back again
    monkeypatch.setattr(os, "environ", {**os.environ})
    path = tmp_path / "train_other.py"
    if content is not None:
        path.write_text(content)
    assert main(["trace", "--script", str(path)]) == 2
    assert told in capsys.readouterr().err


def test_another_script_can_be_named(lab: Lab, finished: Ended) -> None:
    """As shipped: the wrapped form of this repository's."""
    shipped = lab.folder / "train_gpt.py"
    shipped.write_bytes(train_gpt.shipped_code(SCRIPT.read_bytes(), "wrapped"))
    ended, events = traced(lab, "--script", str(shipped))
    assert ended.summary["losses"] == finished.summary["losses"] and steps(events) == [*range(6)]


# -- a GPU, as far as can be told without one ----------------------------------------------------------------


def test_the_compute_stream_shows_what_the_gpu_did_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    events = fake_run(gpu, tmp_path, monkeypatch)
    assert gpu.waits == 1  # before the first step
    found = device_spans(events)
    durations = 6 * [*DEVICE_US.values()]
    assert [span["name"] for span in found] == 6 * [*DEVICE_US]
    assert [span["args"]["step"] for span in found] == sorted(3 * [*range(6)])
    starts = [start / 1e3 for start, _ in gpu.did]
    early_us = HOST_US["forward"]  # the GPU, which had nothing to do, was where it was asked before the host
    starts[0] -= early_us
    assert [span["ts"] for span in found] == pytest.approx(starts, rel=0, abs=1e-3)
    assert [span["dur"] for span in found] == pytest.approx([early_us + durations[0], *durations[1:]])
    hosts = [span["dur"] for span in spans(events, "optimizer") if span not in found]
    assert hosts == pytest.approx(6 * [HOST_US["optimizer"]])  # what the host did is beside it


@pytest.mark.parametrize("rate", [0.99, 1.01])
def test_a_gpu_whose_clock_drifts_stays_in_step_with_the_host(
    rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundredth of 2,000 steps is twenty; it is never more than what the host cannot tell, three steps."""
    gpu = FakeGpu(rate)
    found = device_spans(fake_run(gpu, tmp_path, monkeypatch, trained=2000))
    assert len(found) == 6000
    off = [abs(span["ts"] - start / 1e3) for span, (start, _) in zip(found, gpu.did, strict=True)]
    assert max(off) < 3 * sum(DEVICE_US.values())
    durations = 2000 * [*DEVICE_US.values()]
    assert [span["dur"] for span in found[1:]] == pytest.approx(durations[1:], rel=0.02)


def test_the_device_lane_holds_the_work_of_the_steps_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the GPU does of them when the host is already further."""
    found = device_spans(fake_run(FakeGpu(), tmp_path, monkeypatch, window=(2, 4)))
    assert [span["args"]["step"] for span in found] == sorted(3 * [2, 3])


def test_copies_of_the_loader_have_their_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another stream do not."""
    gpu = FakeGpu()
    events = fake_run(gpu, tmp_path, monkeypatch)
    copies = spans(events, "gpu_transfer")
    assert len(copies) == 6 and {span["dur"] for span in copies} == {COPY_US}
    assert {span["tid"] for span in copies} == {1 + trace.LANES.index("copy stream")}
    assert gpu.streams == 6 * ["copies"]
    tracer = trace.Tracer(SimpleNamespace(cuda=gpu), timeline := trace.Timeline())
    tracer.stream = "copies"
    timeline.begin(0)
    for stream, count in (("other", 0), (None, 0), ("copies", 1)):
        with tracer.stream_context(gpu.stream, stream):
            gpu.host_ns += 1
        assert len(timeline.events) == count


@pytest.mark.gpu
def test_a_run_on_a_gpu_has_all_lanes_and_the_same_bits(lab: Lab) -> None:
    changes = {"DEVICE": "cuda", "COMPILE": 0, "EVAL_STRIDE": 0, "TTT_ENABLED": 0}
    ended, events = traced(lab, **changes)
    alone = lab.elsewhere("alone").succeed(RUNS_DIR=lab.folder / "alone" / "runs", **changes)
    assert ended.summary["stream_hash"] == alone.summary["stream_hash"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {lanes[event["tid"]] for event in events if event["ph"] == "X"} >= {"main", "stage", "copy stream"}
    assert len(device_spans(events)) == 6 * (4 + 4 + 1)
    trains = spans(events, "train")
    begin, end = trains[0]["ts"], trains[-1]["ts"] + trains[-1]["dur"] + 1e6
    assert all(begin <= span["ts"] <= end for span in device_spans(events))
