"""Curves, the causes of slow steps, and the figure."""

import json
import math
import random
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import Ended
from tests.support.runs import make_run, make_runs, pack
from tests.tools.conftest import Tool, without_drawing
from tools.__main__ import main
from tools.compare import curves, plot
from tools.compare.curves import (
    Sample,
    StepTime,
    median_ms,
    shard_crossings,
    smoothed,
    step_times,
    train_loss,
    validation_bpb,
)
from tools.runs.runs import load_group
from tools.runs.script import load_artifact


def test_series_come_from_metrics_and_the_log_alike_and_the_last_step_counts(tmp_path: Path) -> None:
    run = load_group(make_run(tmp_path / "a", 1)).runs[0]
    exact = [sample.value for sample in train_loss(run)]
    assert [s.tokens for s in train_loss(run)][:2] == [20 * 2048, 40 * 2048]
    run.events = []
    assert [sample.value for sample in train_loss(run)] == pytest.approx(exact, abs=1e-4)
    assert [sample.step for sample in validation_bpb(run)] == [200, 400]
    # A resumed run does the steps after its checkpoint again.
    run = load_group(make_run(tmp_path / "b", 1)).runs[0]
    before = train_loss(run)
    again = [event for event in run.events if event.kind == "train" and event.number("step") == 100]
    run.events.append(replace(again[0], values={**again[0].values, "train_loss": 9.0}))
    after = train_loss(run)
    assert [s.step for s in after] == [s.step for s in before]
    assert [s.value for s in after if s.step == 100] == [9.0]


def test_causes_of_slow_steps(tmp_path: Path) -> None:
    run = load_group(make_run(tmp_path / "a", 1, slow_step=300)).runs[0]
    assert [(t.step, t.cause) for t in step_times(run) if t.cause] == [(300, "shard")]
    for event in run.events:
        event.values["data_wait_max_ms"] = 0.02
    assert [(t.step, t.cause) for t in step_times(run) if t.cause] == [(300, "other")]
    assert [shard_crossings(step, step + 50, 524_288) for step in (100, 150, 200, 350)] == [0, 1, 0, 1]


def test_a_step_is_slow_compared_to_its_neighbors(tmp_path: Path) -> None:
    """Recurrence makes all later steps longer: none of them is slow, but one that stalls is."""
    run = load_group(make_run(tmp_path / "a", 1)).runs[0]
    (event, *_) = (event for event in run.events if event.kind == "train")
    run.events = []
    clock_ms = 0.0
    noise = random.Random(1)
    for step in range(1, 301):
        clock_ms += (117.0 if step > 180 else 79.0) + noise.uniform(-0.5, 0.5) + 60.0 * (step in (100, 250))
        values = {"step": step, "train_time_ms": clock_ms, "train_loss": 3.0, "data_wait_max_ms": 0.0}
        run.events.append(replace(event, values=values))
    assert [(t.step, t.cause) for t in step_times(run) if t.cause] == [(100, "other"), (250, "other")]


def test_the_median_is_over_steps_not_over_lines_of_the_log(tmp_path: Path) -> None:
    """The first ten steps have a line each; then a line is of twenty."""
    run = load_group(make_run(tmp_path / "a", 1)).runs[0]
    (event, *_) = (event for event in run.events if event.kind == "train")
    clock_ms = [*((step, 10.0 * step) for step in range(1, 11)), (30, 2100.0), (50, 4100.0)]
    run.events = [replace(event, values={"step": step, "train_time_ms": ms, "train_loss": 3.0})
                  for step, ms in clock_ms]
    assert plot.step_statistics(run)["median_ms"] == 100.0
    noise = random.Random(1)
    for lines in range(1, 30):
        times = [StepTime(0, noise.random(), noise.randrange(1, 5), None) for _ in range(lines)]
        every_step = [time.ms for time in times for _ in range(time.count)]
        assert median_ms(times) == pytest.approx(statistics.median(every_step), rel=1e-12)
    # A log may claim any number of steps.
    assert median_ms([*times, StepTime(0, 7.0, 10**15, None)]) == 7.0


@pytest.mark.filterwarnings("ignore:Glyph")
def test_figure_is_written(tmp_path: Path, tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names are drawn as they are, a dollar sign begins no formula, and printed on one line."""
    run = make_run(tmp_path / "a$_{$b\nFAKED  finished\u202e", 1, slow_step=300)
    told = json.loads(tool("plot", run, "--out", tmp_path / "plot.svg", "--json"))
    figure = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert figure.startswith("<?xml") and "<!-- a$_{$b" in figure
    assert told["runs"][0]["slow"] == {"shard": 1}
    without_drawing(monkeypatch)
    shown = tool("plot", run, "--out", tmp_path / "plot.svg")
    assert "a$_{$b\\nFAKED  finished\\u202e: median 5" in shown
    assert "slow steps: 1 waiting for data" in shown
    assert ".png or .svg" in tool("plot", run, "--out", tmp_path / "a.gif", status=2)


def test_a_run_under_way_is_drawn_until_it_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: Tool
) -> None:
    run = make_run(tmp_path / "a", 1)
    finished = {name: (run / name).read_text() for name in ("summary.json", "metrics.jsonl", "log.txt")}
    first_steps = "".join(finished["metrics.jsonl"].splitlines(keepends=True)[:3])
    stages = iter([{"metrics.jsonl": first_steps}, finished])
    for name in finished:
        (run / name).unlink()
    (run / "log.txt").write_text("")
    results = []

    def next_stage(_seconds: float) -> None:
        for name, text in next(stages).items():
            (run / name).write_text(text)

    monkeypatch.setattr(plot.time, "sleep", next_stage)

    def draw(groups: list[Any], out: Path, everything: bool) -> None:
        plot.panels(groups)
        results.append(plot.result_of(groups[0].runs[0]))

    monkeypatch.setattr(plot, "draw", draw)
    assert "nothing to draw yet" in tool("plot", "--follow", run)
    assert results[0] == "no score; 60 steps" and "bits per byte" in results[1] and len(results) == 2


def test_a_figure_goes_into_its_run_never_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plot, "write_figure", lambda path, figure, dpi: path.touch())
    one, two = make_runs(tmp_path / "runs", 1, 2)
    record = pack(tmp_path / "records", [one])
    files = sorted(record.iterdir())
    for arguments, written in (
        ([one], one / "plot.png"),
        ([one, two], one / "plot_of_2.png"),
        ([record], tmp_path / f"{record.name}_plot.png"),
    ):
        assert main(["plot", *map(str, arguments)]) == 0
        assert written.exists()
    assert sorted(record.iterdir()) == files


def drawn_panels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: object
) -> list[tuple[str, dict[str, list[tuple[float, float]]]]]:
    """The title of each panel, and the points of its lines that have a label."""
    found: list[tuple[str, dict[str, list[tuple[float, float]]]]] = []

    def look(path: Path, figure: Any, dpi: int) -> None:
        for axes in figure.axes:
            lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}
            found.append((axes.get_title(loc="left"), lines))

    monkeypatch.setattr(plot, "write_figure", look)
    assert main(["plot", *map(str, arguments), "--out", str(tmp_path / "a.png")]) == 0
    return found


def test_one_run_has_two_panels_two_have_their_difference_and_all_has_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make_run(tmp_path / "one", 1), make_run(tmp_path / "two", 1, gain=0.05)
    assert [title for title, _ in drawn_panels(monkeypatch, tmp_path, one)] == ["Loss", "Step time"]
    assert len(drawn_panels(monkeypatch, tmp_path, one, "--all")) > 4
    panels = dict(drawn_panels(monkeypatch, tmp_path, one, two))
    assert list(panels) == ["Loss", "two − one", "Step time"]
    mean = panels["two − one"]["mean of neighboring steps"]
    assert [x for x, _ in mean] == [20 * 2048 * (i + 1) for i in range(20)]
    assert [y for _, y in mean] == pytest.approx([-0.05] * 20)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_no_text_covers_a_step_time_or_leaves_the_figure(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several runs, all of which have long names and slow steps of two causes."""
    runs = [make_run(tmp_path / f"a_run_with_a_name_that_says_what_its_author_tried_in_it_{seed}", seed,
                     slow_step=300) for seed in range(count)]

    def look(path: Path, figure: Any, dpi: int) -> None:
        figure.canvas.draw()
        (axes,) = (axes for axes in figure.axes if axes.get_title(loc="left") == "Step time")
        legend = axes.get_legend().get_window_extent()
        heights = [height for line in axes.get_lines() for height in line.get_ydata()]
        assert axes.transData.transform((0, max(heights)))[1] < legend.y0
        assert legend.x0 > axes.get_window_extent().x0
        assert figure._suptitle.get_window_extent().x1 < figure.bbox.width
        assert figure._suptitle.get_window_extent().y0 > axes.get_window_extent().y1

    monkeypatch.setattr(plot, "write_figure", look)
    assert main(["plot", *map(str, runs), "--out", str(tmp_path / "a.png")]) == 0


def test_seeds_of_a_group_share_a_line_of_the_legend_that_tells_all_their_medians() -> None:
    seeds: list[Any] = [plot.Colored(None, "blue", label) for label in ("one", None, "two")]
    assert plot.median_labels(seeds, [46.0, 126.3, 50.0]) == [
        "one: medians 46 to 126.3 ms", None, "two: median 50 ms"]
    assert plot.median_labels(seeds[:1], [46.0]) == ["median 46 ms"]


def test_the_band_of_a_difference_narrows_with_seeds_and_holds_the_truth() -> None:
    noise = random.Random(1)
    inside = {}
    for seeds in (1, 4):
        differences = [[noise.gauss(0.1, 1.0) for _ in range(seeds)] for _ in range(400)]
        means, halves = curves.band(differences)
        pairs = list(zip(means, halves, strict=True))[20:380]
        inside[seeds] = sum(abs(mean - 0.1) < half for mean, half in pairs) / len(pairs)
        expected = 1.96 / (25 * seeds) ** 0.5
        assert statistics.fmean(half for _, half in pairs) == pytest.approx(expected, rel=0.15)
    assert all(share > 0.85 for share in inside.values())


@pytest.mark.parametrize("missing", [None, r"^step:\d+/\d+ val_loss.*\n", r" train_time:.*$"])
def test_no_panel_lacks_a_point(missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole run, of a log without validations, and of one without clocks; but for the steep start."""
    run = make_run(tmp_path / "a", 1)
    if missing is not None:
        (run / "metrics.jsonl").unlink()
        log = run / "log.txt"
        log.write_text(re.sub(missing, "", log.read_text(), flags=re.M))
    drawn: list[bool] = []

    def look(path: Path, figure: Any, dpi: int) -> None:
        for axes in figure.axes:
            drawn.append(axes.has_data())
            low, high = axes.get_ylim()
            for line in axes.get_lines():
                heights = line.get_ydata()
                assert all(low <= float(y) <= high for y in heights[len(heights) // 10 :])

    monkeypatch.setattr(plot, "write_figure", look)
    assert main(["plot", "--all", str(run), "--out", str(tmp_path / "a.png")]) == 0
    assert drawn and all(drawn)


def test_smoothing_keeps_a_line_and_takes_the_noise() -> None:
    line = [Sample(step, None, None, 10.0 - step / 100) for step in range(500)]
    noisy = [replace(sample, value=sample.value + (-1) ** sample.step) for sample in line]
    assert [s.value for s in smoothed(line)][:480] == pytest.approx([s.value for s in line][:480])
    wide = [abs(s.value - exact.value) for s, exact in zip(smoothed(noisy), line, strict=True)]
    assert wide[0] == 1 and max(wide[20:480]) < 0.1
    damaged = [replace(line[0], value=math.nan), *line]
    assert [s.value for s in smoothed(damaged)] == [s.value for s in smoothed(line)]


class Recorder:
    """Stands for the package of TensorBoard or wandb, and keeps what it is given."""

    def __init__(self, **attributes: Any) -> None:
        self.given: list[Any] = []
        self.__dict__ |= attributes

    def __getattr__(self, name: str) -> Any:
        return lambda *values, **named: self.given.append((name, *values, named))


def test_steps_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: Tool) -> None:
    run = make_run(tmp_path / "a", 1)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install wandb" in tool("export", run, "--to", "wandb", status=2)
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"event": "val", "label": "DIAGNOSTIC final", "step": 400, "val_bpb": 1.6}\n')
        file.write('{"event": "final", "name": "legal_ttt_exact", "bits_per_byte": 1.5}\n{"event": "tr')
    board_writer, wandb_run = Recorder(), Recorder()
    board_package = Recorder(SummaryWriter=lambda folder: board_writer)
    wandb_package = Recorder(init=lambda **named: wandb_run.start(**named) or wandb_run)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board_package)
    monkeypatch.setitem(sys.modules, "wandb", wandb_package)
    for program in ("tensorboard", "wandb"):
        tool("export", run, "--to", program)
    scalars = {(name, step): value for kind, name, value, step, _ in board_writer.given[:-2]}
    assert len([name for name, _ in scalars if name == "train/train_loss"]) == 20
    assert scalars["val/val_bpb", 200] > scalars["final/legal_ttt_exact/bits_per_byte", 400] == 1.5
    assert scalars["val/diagnostic_final/val_bpb", 400] == 1.6
    assert not [name for name, _ in scalars if re.search(r"[^a-z0-9_./-]", name)]
    assert scalars["speed/ms_per_step", 200] == pytest.approx(50, abs=1)
    assert scalars["speed/tokens_per_second", 200] == pytest.approx(2048 / 0.05, rel=0.02)
    rates = [value for (name, _), value in scalars.items() if name == "learning_rate/matrices"]
    assert rates[0] > rates[-1] > 0 and max(rates) <= 0.02
    seconds = [named["walltime"] for *_, named in board_writer.given[:-2]]
    assert seconds == sorted(seconds) and seconds[-1] == pytest.approx(20, abs=1)
    assert board_writer.given[-2][:2] == ("add_text", "config") and board_writer.given[-1][0] == "close"
    _, settings = wandb_run.given[0]
    assert settings["mode"] == "offline" and settings["config"]["MATRIX_LR"] == "0.02"
    logged = {named["step"]: values for _, values, named in wandb_run.given[1:-1]}
    assert list(logged) == sorted(logged) and logged[200].keys() >= {"train/train_loss", "val/val_loss"}


def test_the_weights_of_an_artifact_are_exported_as_they_are_scored(
    finished: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: Tool
) -> None:
    artifact = finished.directory / "model.bin"
    run = tmp_path / "run"
    run.mkdir()
    (run / "model.bin").write_bytes(artifact.read_bytes())
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert "pip install safetensors" in tool("export", run, "--weights", status=2)
    given: dict[str, Any] = {}

    def save(tensors: dict[str, Any], metadata: dict[str, str]) -> bytes:
        given.update(tensors=tensors, metadata=metadata)
        return b"weights"

    monkeypatch.setitem(sys.modules, "safetensors.torch", Recorder(save=save))
    assert str(run / "model.safetensors") in tool("export", run, "--weights")
    assert (run / "model.safetensors").read_bytes() == b"weights"
    model, about = load_artifact(artifact)
    assert given["tensors"].keys() == model.state_dict().keys() and given["metadata"] == about.config
    assert all(torch.equal(given["tensors"][name], value) for name, value in model.state_dict().items())
    assert "remove it" in tool("export", run, "--weights", status=2)  # nothing is overwritten
    (run / "model.bin").write_bytes(b"damaged")
    tool("export", run, "--weights", "--out", tmp_path / "elsewhere", status=2)
