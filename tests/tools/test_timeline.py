"""`tools timeline`: reads what the tracer writes, sums it, draws it, merges ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.__main__ import main
from tools.trace.trace import Timeline


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    for rank in range(2):
        timeline = Timeline()
        start_ns = 7_000_000_000
        timeline.open(tmp_path / f"trace_rank{rank}.json", rank)
        timeline.span("train", "main", start_ns, start_ns + 4_000_000, step=0)
        timeline.span("forward", "main", start_ns, start_ns + 1_500_000, step=0)
        timeline.span("stage", "stage", start_ns - 500_000, start_ns, batch=0)
        timeline.flush()
    return tmp_path


def test_lanes_and_seconds(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_directory / "t.png"
    merged = run_directory / "merged.json"
    assert main(["timeline", str(run_directory), "--out", str(out), "--merge", str(merged), "--json"]) == 0
    seconds = json.loads(capsys.readouterr().out)["seconds"]
    assert seconds["rank 0 main"] == pytest.approx({"train": 0.004, "forward": 0.0015})
    assert seconds["rank 1 stage"] == pytest.approx({"stage": 0.0005})
    assert out.read_bytes()[:4] == b"\x89PNG"
    assert {event["pid"] for event in json.loads(merged.read_text())["traceEvents"]} == {0, 1}


def test_a_drawing_without_a_name_goes_into_the_run(run_directory: Path) -> None:
    assert main(["timeline", str(run_directory)]) == 0
    assert (run_directory / "timeline.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "`python -m tools trace`"), ("[1", "not a trace"), ('{"traceEvents": []}', "no span")],
)
def test_what_is_no_trace_is_refused(
    tmp_path: Path, content: str | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "trace_rank0.json").write_text(content)
    assert main(["timeline", str(tmp_path), "--out", str(tmp_path / "t.png")]) == 2
    assert told in capsys.readouterr().err
