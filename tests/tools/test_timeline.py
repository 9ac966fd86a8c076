"""`tools timeline`: reads what TRACE_STEPS writes, sums it, draws it, merges ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.conftest import Tool
from train_gpt import Trace


def traced(folder: Path, rank: int, *spans: list[Any]) -> None:
    """What a rank writes that has these spans."""
    trace = Trace(range(1, 2), folder, rank)
    trace.recording = True
    trace.spans += spans
    trace.finish()


def test_lanes_and_seconds(tmp_path: Path, tool: Tool) -> None:
    for rank in range(2):
        chunk = ["chunk", "main", 7.0, 7.004, {"step": 1}]
        forward = ["forward", "main", 7.0, 7.0015, {}]
        traced(tmp_path, rank, chunk, forward, ["stage", "stage", 6.9995, 7.0, {"batch": 7}])
    out, merged = tmp_path / "t.svg", tmp_path / "merged.json"
    told = tool("timeline", tmp_path, "--out", out, "--merge", merged, "--json")
    seconds = json.loads(told)["seconds"]
    assert seconds["rank 0 main"] == pytest.approx({"chunk": 0.004, "forward": 0.0015})
    assert seconds["rank 1 stage"] == pytest.approx({"stage": 0.0005})
    assert out.read_text().count("<!-- forward -->") == 2, "one of each rank"
    assert {event["pid"] for event in json.loads(merged.read_text())["traceEvents"]} == {0, 1}


def test_a_table_of_all_spans(tmp_path: Path, tool: Tool) -> None:
    forwards = [["forward", "main", begin, end, {}] for begin, end in ((7.0, 7.002), (7.003, 7.007))]
    traced(tmp_path, 0, *forwards, ["stage", "stage", 7.001, 7.0025, {}])
    forward, stage = json.loads(tool("timeline", tmp_path, "--json"))["table"]
    assert (forward.pop("lane"), forward.pop("name")) == ("main", "forward")
    lengths = {"count": 2, "mean_ms": 3.0, "min_ms": 2.0, "max_ms": 4.0, "seconds": 0.006}
    assert forward == pytest.approx(lengths)
    assert (stage["lane"], stage["name"], stage["count"]) == ("stage", "stage", 1)
    told = tool("timeline", tmp_path)  # without a name the drawing goes into the run
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    assert "main/forward count:2 mean_ms:3.000 min_ms:2.000 max_ms:4.000" in told


@pytest.mark.parametrize(("content", "told"), [
    (None, "TRACE_STEPS"),
    ("[1", "not a trace"),
    ('{"traceEvents": 3}', "not a list"),
    ('{"traceEvents": [{"ph": "X", "name": "a", "pid": [1], "tid": 1, "ts": 1, "dur": 1}]}', "no span"),
])
def test_no_trace(tmp_path: Path, content: str | None, told: str, tool: Tool) -> None:
    if content is not None:
        (tmp_path / "trace_rank0.json").write_text(content)
    assert told in tool("timeline", tmp_path, "--out", tmp_path / "t.png", status=2)
