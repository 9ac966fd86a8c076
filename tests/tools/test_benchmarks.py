"""RESULTS.md follows from the raw figures; a benchmark that stores some makes the page from them."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import train_gpt
from benchmarks import (
    ablation,
    beside,
    budget,
    candidates,
    caseops,
    coder,
    loader,
    paired,
    picture,
    proofs,
    public,
    readout,
    results,
    speed,
    stacks,
    threads,
    ttt,
    tune,
)  # fmt: skip
from benchmarks.turns import Turn, Turns, TurnsError
from data.shards import write_shard
from tests.support.tiny import environment
from tests.tools.test_upstream import KEEPS_AN_AVERAGE
from tools.markdown import refresh
from tools.prove import tiny
from tools.prove.probes import make_subject


def test_the_page_follows_from_the_raw_figures() -> None:
    assert not refresh(results.block(), check=True), "run `make docs`"


def test_every_section_says_where_and_when_and_has_raw_figures() -> None:
    folders = (results.FOLDER, results.FOLDER / results.EARLIER)
    stored = [one for folder in folders for one in results.stored(folder).values()]
    sections = re.findall(r"^## .+\n\n(.+)$", results.page(), re.MULTILINE)
    assert stored and sorted(sections) == sorted(results.described(one["conditions"]) for one in stored)
    for one in stored:
        assert one["measured"] and re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", one["conditions"]["commit"])


def test_no_two_sections_have_one_title() -> None:
    titles = re.findall(r"^##? .+$", results.page(), re.MULTILINE)
    assert len(titles) == len(set(titles)) and "Modelled" in " ".join(titles)


def own_records(repo: Path) -> list[Path]:
    """The records of the project; what others submit has scripts of its own."""
    found = []
    for path in (repo / "records").glob("track_*/*/submission.json"):
        if json.loads(path.read_text(encoding="utf-8"))["author"] == "the project":
            found.append(path.parent)
    assert found
    return found


def test_every_figure_is_of_the_release(repo: Path) -> None:
    """Of the script that the release names, whatever the working file is by now."""
    script = results.release()["script"]
    assert re.fullmatch("[0-9a-f]{64}", script)
    of = {name: one["conditions"]["script"] for name, one in results.stored(results.FOLDER).items()}
    assert of and set(of.values()) == {script[:12]}, of
    for record in own_records(repo):
        for summary in record.glob("summary_seed*.json"):
            ran = json.loads(summary.read_text(encoding="utf-8"))["code"]["sha256"]
            assert ran == script, f"{summary} is of another script"
    for name, one in results.stored(results.FOLDER / results.EARLIER).items():
        assert one["conditions"]["script"] != script[:12], name


def test_the_commit_of_the_release_holds_its_script(repo: Path) -> None:
    """Where the history is there; an unpacked archive has none."""
    release = results.release()
    show = ["git", "show", f"{release['commit']}:train_gpt.py"]
    shown = subprocess.run(show, cwd=repo, capture_output=True, check=False)
    if shown.returncode != 0:
        pytest.skip("the commit of the release is not in this copy's history")
    assert hashlib.sha256(shown.stdout).hexdigest() == release["script"]


@pytest.mark.parametrize("data", ["fineweb_sample_sp1024", "mixed_text_sp8192"])
def test_the_default_beats_the_baseline_as_the_readme_says(data: str) -> None:
    rows = results.latest(f"ablation-{data}-240s")["measured"]["rows"]
    scores = {name: {run["seed"]: run["val_bpb"] for run in runs} for name, runs in rows.items()}
    default, baseline = scores["default stack"], scores["upstream_baseline"]
    assert len(default) == 3 and default.keys() == baseline.keys()
    assert all(baseline[seed] - default[seed] >= 0.01 for seed in default)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(results, "PAGE", tmp_path / "RESULTS.md")
    results.PAGE.write_text(f"{results.BEGIN}\n{results.END}\n")
    (tmp_path / "results").mkdir()
    release = {"version": "0", "commit": "0000000", "script": "0" * 64}
    (tmp_path / "results" / results.RELEASE).write_text(json.dumps(release))
    return tmp_path


def test_every_scorer_of_a_config_is_timed() -> None:
    subject = make_subject(train_gpt)
    training: Any = SimpleNamespace(
        config=subject.config,
        model=subject.model(),
        validation=SimpleNamespace(tokens=subject.tokens()),
        run=SimpleNamespace(machine=train_gpt.Machine()),
    )
    found = speed.scoring(training, 100)
    assert [one["scorer"] for one in found] == ["round-trip", "sliding window", "legal TTT"]
    assert all(one["targets"] == 100 and one["seconds"] > 0 for one in found)


def measured_coder() -> dict[str, Any]:
    return {"codes": [coder.measure("small", coder.gaussian_codes(51_200))]}


def test_a_kept_measurement_is_on_the_page_and_a_changed_figure_changes_it(empty: Path) -> None:
    measured = measured_coder()
    results.finish("coder-small", results.conditions(), measured, keep=True)
    page = (empty / "RESULTS.md").read_text(encoding="utf-8")
    size = measured["codes"][0]["coders"][0]["bytes"]
    assert f"| small, 0.05 M | rANS, train_gpt.py | {size:,} |" in page and results.page() in page
    stored = empty / "results" / "coder-small.json"
    stored.write_text(stored.read_text().replace(f'"bytes": {size},', f'"bytes": {size + 1},'))
    assert results.page() not in page and f"{size + 1:,}" in results.page()


def test_what_is_not_kept_is_only_printed(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.finish("coder", results.conditions(), measured_coder(), keep=False)
    assert "## Entropy coder" in capsys.readouterr().out
    assert [path.name for path in (empty / "results").iterdir()] == [results.RELEASE]
    assert "Entropy coder" not in (empty / "RESULTS.md").read_text()


def test_runs_that_a_folder_holds_are_not_measured_again_and_a_claim_is_for_one(tmp_path: Path) -> None:
    measured: list[tuple[str, int]] = []

    def measure(settings: dict[str, str], seed: int, _kind: str) -> dict[str, Any]:
        measured.append((settings["NAME"], seed))
        return {"seed": seed}

    stack = {"one row": {"NAME": "one"}, "other": {"NAME": "two"}}
    order = [(seed, name) for seed in (1, 2) for name in stack]
    with ablation.claimed(tmp_path / "other-seed1.json") as mine:  # as another process that is at it
        assert mine
        rows = ablation.share_runs(tmp_path, stack, order, "cpu", "alike", measure)
    assert measured == [("one", 1), ("one", 2), ("two", 2)]
    assert rows == {"one row": [{"seed": 1}, {"seed": 2}], "other": [{"seed": 2}]}
    rows = ablation.share_runs(tmp_path, stack, order, "cpu", "alike", measure)
    assert measured[3:] == [("two", 1)]
    assert rows["other"] == [{"seed": 1}, {"seed": 2}]
    with pytest.raises(SystemExit, match="runs of other conditions"):
        ablation.share_runs(tmp_path, stack, order, "cpu", "another script", measure)
    # A table has all that is there, whatever seeds a call names.
    assert ablation.kept_rows(tmp_path, {**stack, "never run": {}}) == rows
    assert ablation.kept_rows(tmp_path, {"other": {}}) == {"other": rows["other"]}


def test_lengths_are_compared_on_the_same_tokens_and_steps() -> None:
    geometry = {**ablation.SMALL, **ablation.DEFAULT_SMALL, **ablation.LENGTHS_GEOMETRY, "VOCAB_SIZE": "320"}
    configs = {}
    for name, changes in ablation.LENGTHS.items():
        configs[name] = train_gpt.Config.from_env({**geometry, **changes})
    growing = configs["three lengths"]
    assert [part.length for part in growing.length_parts] == [64, 128, 192]
    assert growing.eval_length == 192
    # What is compared is shuffled alike and scored with the same context.
    for name, partner in ablation.LENGTHS_PARTNER.items():
        assert configs[name].segment_tokens == configs[partner].segment_tokens
        assert configs[name].eval_length == configs[partner].eval_length
    for config in configs.values():
        assert config.train_batch_tokens == growing.train_batch_tokens
        assert train_gpt.micro_steps_per_step(config, 1) == 1


SCRIPT_OF_SEVEN_STEPS = """
import os
import numpy as np

def train_step(training, progress):
    print("a line of the log")
    training.append(progress)
    return np.array([len(training), 0.0])

def main():
    training = []
    for _ in range(7):
        train_step(training, 0.5)
    return "a message of " + os.environ["WHO"]
"""


def test_a_script_takes_the_steps_of_its_turn_and_no_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT_OF_SEVEN_STEPS, encoding="utf-8")
    with Turns(script, {"WHO": "mine"}) as mine, Turns(script, {"WHO": "theirs"}) as theirs:
        assert mine.steps(3).losses == [1.0, 2.0, 3.0]
        assert theirs.steps(1).losses == [1.0]
        turn = mine.steps(4)
        assert turn.losses == [4.0, 5.0, 6.0, 7.0]
        assert len(turn.ms) == len(turn.cpu_ms) == 4 and min(turn.ms) > 0
        with pytest.raises(TurnsError, match=r"(?s)ended instead of taking 1 steps:.*a message of mine"):
            mine.steps(1)


def test_a_comparison_says_how_many_times_the_speed() -> None:
    """Pairs of turns: what slows the machine for a while slows both."""
    ours_ms = [10.0] * 5 + [30.0] * 5
    theirs_ms = [1.5 * time_ms for time_ms in ours_ms]
    ours = Turn(ours_ms, [8.0] * 10, [3.0] * 10)
    theirs = Turn(theirs_ms, [10.0] * 10, [4.0] * 10)
    measured = {
        "config": "demo", "against": "old.py", "cores": 2, "tokens_per_step": 1024,
        "taken": [ours._asdict(), theirs._asdict()],
    }  # fmt: skip
    text = "\n".join(speed.tables(measured))
    assert "2 cores: 1.500 times the tokens per second (1.500 to 1.500" in text
    assert "2 pairs of turns" in text and "by the CPU clock 1.250 times" in text
    assert "| demo | old.py | 30.00 | 15.00 | 45.00 | 10.00 | 34,133 | 4.0000 | 10 |" in text


# --- test-time training ---


def test_the_costs_of_a_text_are_a_table(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = "TRAIN_SEQ_LEN=64 EVAL_STRIDE=16 TTT_CHUNK_TOKENS=256 TTT_CHUNK_SIZE=16"
    monkeypatch.setattr("sys.argv", ["ttt.py", "cost", "--data", str(dataset), "--set", *settings.split()])
    ttt.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    sliding, sgd, adapters = ([float(cell) for cell in row.split("|")[2:4]] for row in rows[-3:])
    # Sliding windows take no gradients; adapters take them for nearly all that they read.
    assert sliding[1] == 0.0 < sgd[1] < adapters[1] <= adapters[0] and sliding[0] < sgd[0]


def test_costs_of_test_time_training_are_those_of_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that really pass through the model, with gradients and without, against the counted ones."""
    passed = {True: 0, False: 0}
    forward = train_gpt.GPT.forward

    def counted(model: Any, ids_BT: Any, *rest: Any) -> Any:
        passed[torch.is_grad_enabled()] += ids_BT.numel()
        return forward(model, ids_BT, *rest)

    stepped = []  # numbers of adapters
    step = torch.optim.AdamW.step

    def counted_step(adamw: Any, *rest: Any) -> Any:
        stepped.append(sum(weights.numel() for weights in adamw.param_groups[0]["params"]))
        return step(adamw, *rest)

    monkeypatch.setattr(train_gpt.GPT, "forward", counted)
    monkeypatch.setattr(torch.optim.AdamW, "step", counted_step)
    for settings in (tiny.LORA, {"TTT_EPOCHS": "3"}):
        subject = make_subject(train_gpt, **settings)
        tokens = subject.tokens()
        count = ttt.cost_of_documents if settings is tiny.LORA else ttt.cost_of_chunks
        cost = count(tokens, subject.config)
        passed.update({True: 0, False: 0})
        stepped.clear()
        subject.nats("score_ttt", tokens)
        assert cost.forward * 149 == pytest.approx(passed[True] + passed[False])
        assert cost.backward * 149 == pytest.approx(passed[True])
        assert cost.adapter_bytes * 149 == pytest.approx(4 * ttt.ADAPTER_PASSES * sum(stepped))


def test_documents_are_repeated_until_a_rank_has_its_share() -> None:
    document = np.array([train_gpt.BOS_ID, 5, 6])
    repeated = ttt.documents_of_a_rank(np.tile(document, 100))
    assert (repeated == train_gpt.BOS_ID).sum() == 6_200  # 50,000 on 8 ranks are 6,250 each
    assert (repeated.reshape(-1, 3) == document).all()


def test_a_table_of_test_time_training_has_a_line_for_each_row(tmp_path: Path) -> None:
    score = {"row": "SGD", "seed": 1, "documents": 3, "data": "x", "bits_per_byte": 2.5, "seconds": 7.0,
             "scored_tokens": 99, "parameters": 5, "settings": {**ttt.SMALL, "ITERATIONS": "4"}}  # fmt: skip
    (tmp_path / "score-1.json").write_text(json.dumps(score))
    other = {**score, "row": "sliding window", "bits_per_byte": 2.6}
    (tmp_path / "score-2.json").write_text(json.dumps(other))
    lines = ttt.tables({"scores": ttt.stored(tmp_path)})
    assert "| SGD | 2.5000 | - | -0.1000 | 7 | 1 |" in lines
    assert "| sliding window | 2.6000 | - | - | 7 | 1 |" in lines


# --- runs that are shared, and tables of them ---


def test_runs_are_kept_one_by_one_and_measured_once(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    def measured(settings: dict[str, str], seed: int, kind: str) -> dict[str, Any]:
        asked.append((settings["NAME"], seed))
        if asked.count(("b", 2)) == 1 and asked[-1] == ("b", 2):
            raise KeyboardInterrupt
        return {"seed": seed, "name": settings["NAME"], "kind": kind}

    stack = {name: {"NAME": name} for name in "ab"}
    order = [(seed, name) for seed in (1, 2) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        ablation.share_runs(tmp_path, stack, order, "cpu", "alike", measured)
    rows = ablation.share_runs(tmp_path, stack, order, "cpu", "alike", measured)
    assert asked == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("b", 2)]
    assert {name: [run["seed"] for run in runs] for name, runs in rows.items()} == {"a": [1, 2], "b": [1, 2]}
    with pytest.raises(SystemExit, match="other conditions"):
        ablation.share_runs(tmp_path, stack, order, "cpu", "other", measured)


def test_every_shape_is_a_model_and_changes_one_thing(shared_data: Path) -> None:
    arguments = SimpleNamespace(
        data=shared_data / "datasets/fineweb_sample_sp1024", seconds=1.0, bytes=108_000, width=64, layers=4,
        tokenizer=shared_data / "tokenizers/fineweb_1024_bpe.model", val_tokens=100,
    )  # fmt: skip
    stack: dict[str, Any] = budget.stacks(arguments)  # type: ignore[arg-type]
    configs = {name: train_gpt.Config.from_env(settings) for name, settings in stack.items()}
    sizes = {name: train_gpt.count_parameters(config) for name, config in configs.items()}
    assert sizes["width 0.75"] < sizes["base"] == sizes["coarser MLP"]
    assert sizes["base"] < sizes["width 1.25"] < sizes["width 1.5"]
    assert sizes["one layer less"] < sizes["base"] < sizes["one layer more"] < sizes["two layers more"]
    for config in configs.values():
        assert config.artifact_bytes_max == 108_000 and config.rate_control and config.gptq
        train_gpt.estimate_artifact(config, 108_000)  # raises where nothing fits


def test_differences_are_taken_seed_by_seed() -> None:
    plain = [{"seed": seed, "steps": 10, "val_bpb": 2.0 + seed} for seed in (1, 2, 3)]
    fused = [{"seed": seed, "steps": 10, "val_bpb": 1.9 + seed} for seed in (3, 2, 1)]
    found = paired.difference(fused, plain)
    assert found and found.mean == pytest.approx(-0.1) and found.error == pytest.approx(0, abs=1e-9)
    assert paired.difference(fused[:1], plain) is None
    assert paired.difference(fused, [{**run, "seed": run["seed"] + 9} for run in plain]) is None
    measured = {
        "docs": "docs.jsonl", "vocabulary": 1024, "seconds": 1.0, "steps": 0, "geometry": ablation.SMALL,
        "texts": {name: {"targets": 100, "bytes": 250} for name in caseops.VARIANTS},
        "rows": {"plain": plain, "caseops_fused": fused},
    }  # fmt: skip
    lines = caseops.tables(measured)
    assert lines[-1].startswith("| caseops_fused | 2.5000 | 10 |")
    assert "| -0.1000 | 0.0000 | 2 | 3 |" in lines[-1]


def test_runs_are_wanted_until_the_error_is_a_third_of_the_difference() -> None:
    wanted = paired.Difference(mean=-0.1, deviation=0.2, seeds=3).runs_wanted
    assert wanted == "36"
    assert paired.Difference(-0.1, 0.2, int(wanted)).error <= 0.1 / 3 + 1e-12
    assert paired.Difference(-0.1, 0.2, int(wanted) - 1).error > 0.1 / 3
    assert paired.Difference(0.0, 0.2, 3).runs_wanted == "> 999"


def test_steps_cost_what_those_of_the_first_row_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[str, int]] = []

    def measured(settings: dict[str, str], seed: int, kind: str) -> dict[str, Any]:
        turns.append((settings["NAME"], seed))
        busy = 1.0 + seed  # the machine is slower in later turns, for all
        return {"seconds": busy * {"base": 1.0, "wide": 2.0}[settings["NAME"]]}

    monkeypatch.setattr(ablation, "measure", measured)
    stack = {name: {"NAME": name, "MAX_WALLCLOCK_SECONDS": "60"} for name in ("base", "wide")}
    found = ablation.of_equal_cost(tmp_path, stack, 100)
    assert {name: settings["ITERATIONS"] for name, settings in found.items()} == {"base": "100", "wide": "50"}
    assert {settings["MAX_WALLCLOCK_SECONDS"] for settings in found.values()} == {"0"}
    assert [name for name, _ in turns] == ["base", "wide"] * ablation.TURNS
    # Another process with the same folder has the same steps, without measuring.
    assert ablation.kept_steps(tmp_path, stack, 100) == {"base": 100, "wide": 50}
    assert len(turns) == 2 * ablation.TURNS
    with pytest.raises(SystemExit, match="no steps of"):
        ablation.kept_steps(tmp_path, {**stack, "deep": {}}, 100)


def test_a_stack_of_slower_steps_gets_fewer_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Running:
        """A run whose later steps cost more, as recurrence makes them; it has one step more than is taken."""

        def __init__(self, script: Path, settings: dict[str, str]) -> None:
            self.step_ms = float(settings["STEP_MS"])
            self.late = float(settings["TIMES_LATER"])
            self.left = int(settings["ITERATIONS"])

        def __enter__(self) -> Running:
            return self

        def __exit__(self, *error: object) -> None:
            assert self.left == 1

        def steps(self, count: int) -> Turn:
            late = self.late if self.left <= stacks.PRICE_STEPS // 2 + 1 else 1.0
            self.left -= count
            return Turn([0.0] * count, [late * self.step_ms] * count, [0.0] * count)

    monkeypatch.setattr(stacks, "Turns", Running)
    settings = {
        "DefaultStack": {"STEP_MS": "20", "TIMES_LATER": "2"},
        "UpstreamBaseline": {"STEP_MS": "20", "TIMES_LATER": "1"},
    }
    assert stacks.steps_of_equal_cost(settings, 600) == {"DefaultStack": 600, "UpstreamBaseline": 900}


def test_a_price_that_the_machine_disturbed_once_is_not_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([{"first": 1.0, "other": 0.5}, {"first": 1.0, "other": 2.0}, {"first": 1.0, "other": 0.48}])
    monkeypatch.setattr(stacks, "times_the_first", lambda settings: next(found))
    assert stacks.steps_of_equal_cost({"first": {}, "other": {}}, 100) == {"first": 100, "other": 200}


def test_a_stack_that_has_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A series that was ended early goes on where it ended."""
    commands: list[list[str]] = []

    def run(command: list[str], env: dict[str, str] | None = None, **_: Any) -> None:
        commands.append(command)
        if env is not None:
            folder = tmp_path / "runs" / env["RUN_ID"]
            folder.mkdir(parents=True)
            (folder / "summary.json").touch()

    monkeypatch.setattr(stacks, "REPO", tmp_path)
    monkeypatch.setattr(stacks, "environments", lambda arguments: {name: {} for name in stacks.STACKS})
    monkeypatch.setattr(stacks, "steps_of_equal_cost", lambda settings, steps: dict.fromkeys(settings, steps))
    monkeypatch.setattr(stacks.subprocess, "run", run)
    given = ["stacks.py", "--data", "d", "--tokenizer", "t", "--track", "track_mine", "--limit", "9"]
    for seeds, trained in ((["1"], 1), (["1", "2"], 1)):
        commands.clear()
        monkeypatch.setattr(sys, "argv", [*given, "--only", "PR549", "--seeds", *seeds])
        monkeypatch.chdir(tmp_path)
        stacks.main()
        assert sum("train_gpt.py" in command for command in commands) == trained
        assert commands[-1][4:][: len(seeds)] == [
            f"runs/track_mine-600steps-PR549-seed{seed}" for seed in seeds
        ]


def test_a_part_at_equal_steps_is_told_with_what_its_seconds_are(tmp_path: Path) -> None:
    """The median of the ratios of a seed, over the seeds that both have."""

    def runs(*seconds: float) -> list[dict[str, Any]]:
        return [{"seed": seed, "parameters": 10, "steps": 200, "seconds": took, "val_bpb": 2.0 + seed / 10}
                for seed, took in enumerate(seconds)]  # fmt: skip

    rows = {ablation.DEFAULT: runs(10.0, 20.0, 40.0), "no XSA": runs(9.0, 16.0, 32.0), "MLP 2x": runs(5.0)}
    measured = {
        "data": "sample", "seconds": 1.0, "clock": "cpu", "val_tokens": 0, "geometry": ablation.SMALL,
        "default": {}, "rows": rows, "steps": 200,
    }  # fmt: skip
    lines = ablation.tables(measured)
    last_cells = [line.split("|")[-2].strip() for line in lines if line.startswith("| ")]
    assert last_cells == ["times the seconds", "1.00", "0.80", "0.50"]
    for other in ({"steps": 0}, {"equal_cost": True}):  # there it is told by the steps
        assert not any("times the seconds" in line for line in ablation.tables({**measured, **other}))


def test_lengths_are_told_beside_their_partners() -> None:
    def runs(bpb: float) -> list[dict[str, Any]]:
        return [{"seed": seed, "parameters": 10, "steps": 10, "val_bpb": bpb + seed} for seed in (1, 2)]

    rows = {"one length, the last": runs(2.0), "three lengths": runs(1.9)}
    assert ablation.pairs(rows) == []  # its partner was not measured
    rows["one length, the last, in segments"] = runs(2.2)
    lines = ablation.pairs(rows)
    expected = "| three lengths | one length, the last, in segments | -0.3000 | 0.0000 | 2 | 2 | - | - |"
    assert expected in lines


def test_a_clock_that_gave_a_row_fewer_steps_is_told_from_what_the_row_is_worth() -> None:
    def run(row_bpb: float, seed: int, steps: int) -> dict[str, Any]:
        return {"seed": seed, "steps": steps, "val_bpb": row_bpb + seed / 100 - 0.2 * math.log(steps)}

    rows = {"base": [run(3.0, 1, 100), run(3.0, 2, 130), run(3.0, 3, 110)],
            "better": [run(2.9, 1, 90), run(2.9, 2, 80), run(2.9, 3, 120)]}  # fmt: skip
    raw = paired.difference(rows["better"], rows["base"])
    assert raw and raw.mean > -0.08
    rows["other"] = [run(3.1, seed, 100 + seed) for seed in (1, 2, 3)]
    mean, error = paired.AtEqualSteps(rows).difference("better", "base")
    assert mean == pytest.approx(-0.1) and error == pytest.approx(0.0, abs=1e-9)
    assert not paired.AtEqualSteps({"base": rows["base"]}).fits  # nothing is left to tell an error


def test_the_frontier_goes_from_small_to_large_and_names_the_best() -> None:
    def runs(parameters: int, bpb: float) -> list[dict[str, Any]]:
        common = {"parameters": parameters, "steps": 10, "float_bpb": 2.0, "bytes": 1000}
        return [{**common, "seed": seed, "val_bpb": bpb + seed} for seed in (1, 2)]

    measured = {
        "data": "d", "bytes": 1000, "seconds": 1.0, "layers": 4, "width": 64, "val_tokens": 10,
        "rows": {"base": runs(2000, 2.0), "width 2": runs(8000, 2.3), "width 0.75": runs(1000, 1.9)},
    }  # fmt: skip
    lines = budget.tables(measured)
    assert "Best: width 0.75, 8.00 bits a weight" in lines[0]
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| width 0.75", "| base", "| width 2"]
    assert "| 4.00 |" in lines[5] and "| +0.3000 | 0.0000 | 2 | 2 |" in lines[6]


def tuned(seed: int, score: float) -> dict[str, Any]:
    return {
        "seed": seed, "parameters": 1000, "steps": 200, "seconds": 1.0, "float_bpb": score - 0.01,
        "bytes": 900, "write_seconds": 1.0, "read_seconds": 0.5, "times_the_step": 2.0, "val_bpb": score,
    }  # fmt: skip


def test_a_row_of_longer_steps_gets_fewer_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def measure(settings: dict[str, str], seed: int, kind: str) -> dict[str, Any]:
        taken.append(settings["ITERATIONS"])
        return tuned(seed, 2.0)

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "times_the_step", lambda row, config: 1.6)
    found = tune.measure_row({"CONFIG": "x", "ITERATIONS": "400", "ROW": "width 256"}, 1, "cpu")
    assert taken == ["250"] and found["times_the_step"] == 1.6


def test_rows_whose_steps_do_the_same_work_have_as_many() -> None:
    rows = [tune.BASE, "COLUMN_STEPS and TRELLIS", "matrix LR 0.02", "warm-down 0.85", "rates fall to zero"]
    assert all(tune.times_the_step(row, Path("no-file-is-read")) == 1.0 for row in rows)


def test_the_table_of_settings_begins_with_the_best() -> None:
    changes = {"BIGRAM_DIM": "32", "MLP_MULT": "2"}
    rows = {
        tune.BASE: [{**tuned(seed, score), "changes": {}} for seed, score in ((1, 2.0), (2, 2.1))],
        "bigrams": [{**tuned(seed, score), "changes": changes} for seed, score in ((1, 1.9), (2, 2.04))],
    }
    lines = tune.tables({"config": "small.env", "steps": 400, "artifact_bytes": 900, "rows": rows})
    first, second = [line for line in lines if line.startswith("| ")][1:]
    assert first.startswith("| bigrams | 1,000 | 2.00 | 200 | 1.9600 | 900 | 1.0 | 0.5 | 1.9700 |")
    assert "| -0.0800 | 0.0200 |" in first and second.startswith(f"| {tune.BASE} |")
    assert lines[-1] == "The rows change: bigrams: BIGRAM_DIM=32 MLP_MULT=2."


def beside_measured(rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "data": "text", "geometry": {"TRAIN_BATCH_TOKENS": "300"}, "public": "theirs.py", "sha256": "0",
        "config": "small.env", "set": [], "seconds": 180, "clock": "cpu", "val_targets": 1000, "rows": rows,
        "code_bytes": {"theirs": 50, "ours": 60}, **more,
    }  # fmt: skip


def test_the_tables_of_two_scripts_have_the_ratio_of_steps_and_the_difference_of_each_seed() -> None:
    steps = {"theirs": [30.0] * 10, "ours as theirs": [20.0] * 10, "ours": [15.0] * 10}
    rows = {
        "speed": [{"seed": 1, **steps}],
        "theirs": [tuned(1, 2.4), tuned(2, 2.5)], "ours": [tuned(1, 2.2), tuned(2, 2.25)],
    }  # fmt: skip
    lines = beside.tables(beside_measured(rows))
    assert "| ours as theirs | 20.0 | 20.0 | 20.0 | 15,000 | 1.50 | 10 |" in lines
    assert "| ours | 15.0 | 15.0 | 15.0 | 20,000 | 2.00 | 10 |" in lines
    (ours,) = [line for line in lines if line.startswith("| ours | 1,000")]
    assert "| 900 | 60 | 2.2250 |" in ours and "| -0.2250 | 0.0250 |" in ours
    assert lines[-1] == "Ours minus theirs, seed by seed: 1: -0.2000, 2: -0.2500."


def test_the_gain_is_told_in_two_parts_where_ours_was_trained_as_theirs() -> None:
    rows = {
        "theirs": [tuned(1, 2.4), tuned(2, 2.5)], "theirs shuffled": [tuned(1, 2.375), tuned(2, 2.5)],
        "ours as theirs": [tuned(1, 2.3), tuned(2, 2.35)], "ours": [tuned(1, 2.2), tuned(2, 2.25)],
    }  # fmt: skip
    given = {"theirs": ["MATRIX_LR=0.04", "VE_LAYERS=1"], "as_theirs": "their_stack.env"}
    lines = beside.tables(beside_measured(rows, **given))
    assert "with `MATRIX_LR=0.04 VE_LAYERS=1` and its own defaults" in lines[0]
    assert "; ours as theirs: `their_stack.env` at this geometry with the same settings;" in lines[0]
    of_side = {line.split(" | ")[0]: line for line in lines}
    assert "| 900 | 50 | 2.4375 |" in of_side["| theirs shuffled"]
    assert "| 900 | 60 | 2.3250 |" in of_side["| ours as theirs"]
    assert "| -0.1250 | 0.0250 |" in of_side["| ours as theirs"]
    assert [line for line in lines[-8:] if line] == [
        "Theirs shuffled minus theirs, seed by seed: 1: -0.0250, 2: +0.0000.",
        "Ours as theirs minus theirs, seed by seed: 1: -0.1000, 2: -0.1500.",
        "Ours minus ours as theirs, seed by seed: 1: -0.1000, 2: -0.1000.",
        "Ours minus theirs, seed by seed: 1: -0.2000, 2: -0.2500.",
    ]


def test_a_script_that_is_not_shipped_is_compared_before_quantization() -> None:
    theirs = []
    for seed, last, average in ((1, 2.4, 2.5), (2, 2.6, 2.5)):
        scores = {"float_bpb": min(last, average), "last_bpb": last, "average_bpb": average}
        theirs.append({"seed": seed, "parameters": 500, "steps": 100, "seconds": 1.0, **scores})
    rows = {"theirs": theirs, "ours": [tuned(1, 2.21), tuned(2, 2.26)]}
    lines = beside.tables(beside_measured(rows))
    assert "of the validation text: of the weights before quantization." in lines[0]
    assert "ours as theirs" not in lines[0] and "float bpb" in lines[2] and "val_bpb" not in lines[2]
    assert lines[4].startswith("| theirs | 500 | 100 | 2.5000 | 2.5000 | 2.4500 |")
    assert lines[5].startswith("| ours | 1,000 | 200 | - | - | 2.2250 |") and "| -0.2250 |" in lines[5]
    told = "\n".join(lines[6:])
    assert "Nothing of theirs is shipped" in told
    assert "Ours ships 900 bytes of weights, which score 2.2350." in told
    assert "average of its weights" in told and "the better ones of each seed count as theirs" in told
    assert lines[-1] == "Ours minus theirs, seed by seed: 1: -0.2000, 2: -0.2500."


@pytest.mark.parametrize(("file", "name"), [
    ("train_gpt.py", "beside-text-180s"),
    ("pr549_train_gpt.py", "beside-pr549-text-180s"),
    ("other.py", "beside-other-text-180s"),
])  # fmt: skip
def test_a_result_has_the_name_of_its_script_and_is_never_lost_to_another(
    empty: Path, file: str, name: str
) -> None:
    arguments = argparse.Namespace(path=Path("folder", file), data=Path("datasets/text"), seconds=180.0)
    assert beside.result_name(arguments) == name
    beside.check_nothing_is_lost(name, "1")
    results.finish(name, results.conditions(), beside_measured({"ours": [tuned(1, 2.0)]}), keep=True)
    beside.check_nothing_is_lost(name, "0")  # the same script again
    with pytest.raises(SystemExit, match="holds a script of 0, this one is of 1; give your copy another"):
        beside.check_nothing_is_lost(name, "1")


# A script with an average of its weights that reads what the benchmark sets.
RACED = KEEPS_AN_AVERAGE.replace('"VOCABULARY"', '"VOCAB_SIZE"').replace(
    "    width =",
    """    [os.environ.get(name) for name in (
        "NUM_LAYERS", "MODEL_DIM", "NUM_HEADS", "NUM_KV_HEADS", "MLP_MULT", "TRAIN_SEQ_LEN",
        "TRAIN_BATCH_TOKENS", "SEED", "MATRIX_LR",
    )]
    width =""",
)


@pytest.fixture
def race(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, dict[str, Any]]]:
    """Runs the command on a script; what each side measured. Every look at the clock is a second."""
    config = tmp_path / "small.env"
    config.write_text("".join(f"{name}={value}\n" for name, value in environment().items()))
    folders = (tmp_path / f"runs{number}" for number in itertools.count())

    def run(script: str, *options: str, file: str = "train_gpt.py") -> dict[str, dict[str, Any]]:
        path = tmp_path / file
        path.write_text(script, encoding="utf-8")
        folder = next(folders)
        monkeypatch.setattr(ablation, "clock", lambda kind: functools.partial(next, itertools.count(0.0)))
        places = {"--data": dataset, "--tokenizer": dataset / "tokenizer.model", "--config": config}
        command = ["beside.py", str(path), *(str(word) for place in places.items() for word in place)]
        counts = ["--runs", str(folder), "--seconds", "6", "--val-tokens", "256", "--seeds", "7"]
        monkeypatch.setattr("sys.argv", [*command, *counts, *options])
        beside.main()
        files = folder.glob("*.json")
        return {path.stem.removesuffix("-seed7"): json.loads(path.read_text()) for path in files}

    return run


def test_each_side_is_trained_and_scored(race: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sides = ["theirs", "theirs shuffled", "ours as theirs", "ours"]
    found = race(RACED, "--theirs", "MATRIX_LR=0.04", "--only", *sides)
    assert found.keys() == {side.replace(" ", "_") for side in sides}
    theirs = found["theirs"]
    assert theirs["steps"] > 2 and "val_bpb" not in theirs
    assert theirs["float_bpb"] == min(theirs["last_bpb"], theirs["average_bpb"])
    assert theirs["last_bpb"] != theirs["average_bpb"] != found["theirs_shuffled"]["average_bpb"]
    ours, as_theirs = found["ours"], found["ours_as_theirs"]
    assert ours["parameters"] != as_theirs["parameters"]  # the gates of the default are not the baseline's
    assert as_theirs["val_bpb"] != ours["val_bpb"] and min(ours["bytes"], as_theirs["bytes"]) > 0
    printed = capsys.readouterr().out
    assert "| ours as theirs |" in printed and "Nothing of theirs is shipped" in printed


def test_what_is_equal_on_all_sides_is_no_setting_of_theirs(race: Any) -> None:
    with pytest.raises(SystemExit, match="--theirs NUM_LAYERS: is equal on all sides"):
        race(RACED, "--theirs", "NUM_LAYERS=3")
    with pytest.raises(SystemExit, match="never reads WARMDOWN"):
        race(RACED, "--theirs", "WARMDOWN=3", "--only", "theirs")


def test_how_ours_is_as_theirs_is_told_before_anything_is_measured(race: Any) -> None:
    with pytest.raises(SystemExit, match="--theirs WIDTH=4: no setting here"):
        race(RACED, "--theirs", "WIDTH=4")
    with pytest.raises(SystemExit, match="MATRIX_LR='much'"):
        race(RACED, "--theirs", "MATRIX_LR=much", "--only", "ours as theirs")
    with pytest.raises(SystemExit, match="which config is this script in ours"):
        race(RACED, file="pr549_train_gpt.py")


def test_shuffled_batches_are_those_of_ours(tmp_path: Path, dataset: Path) -> None:
    config = tmp_path / "small.env"
    config.write_text("".join(f"{name}={value}\n" for name, value in environment().items()))
    arguments = argparse.Namespace(
        path=Path("train_gpt.py"), config=config, data=dataset, tokenizer=dataset / "tokenizer.model",
        seconds=6.0, val_tokens=256, set=[], theirs=[], as_theirs=None, only=["theirs shuffled"], seeds=[7],
        clock="cpu",
    )  # fmt: skip
    race = beside.Race(arguments)
    ours = train_gpt.Config.from_env({**race.ours, "SEED": "7"})
    shards = train_gpt.open_shards(f"{dataset}/fineweb_train_*.bin")
    feed = race.shuffled_batches(7)
    with contextlib.closing(train_gpt.Loader(ours, shards, train_gpt.Machine())) as loader:
        for _ in range(2):
            batches = [loader.next_batch() for _ in range(loader.micro_steps)]
            inputs_BT, targets_BT = next(feed)
            assert torch.equal(inputs_BT, torch.cat([batch.inputs_BT for batch in batches]))
            assert torch.equal(targets_BT, torch.cat([batch.targets_BT for batch in batches]))
    assert not torch.equal(inputs_BT, next(race.batches())[0])


def test_a_script_that_shuffles_is_not_shuffled_once_more(race: Any) -> None:
    shuffling = RACED.replace("DistributedTokenLoader", "ShuffledSequenceLoader")
    with pytest.raises(SystemExit, match="shuffles by itself"):
        race(shuffling, "--only", "theirs shuffled")
    assert race(RACED, "--only", "theirs shuffled")["theirs_shuffled"]["last_bpb"] == pytest.approx(
        race(shuffling, "--only", "theirs")["theirs"]["last_bpb"], abs=1e-9
    )


# --- candidates, and what is read out of a run ---


def few_steps(dataset: Path, candidate: str, **changes: object) -> dict[str, str]:
    """Settings of a run of six steps that every candidate can be tried on."""
    geometry = {**candidates.COMMON, **candidates.SIZES["small"]}
    small = {
        "NUM_LAYERS": 2, "XSA_LAST_N": 2, "PARALLEL_START_LAYER": 1, "TRAIN_SEQ_LEN": 32, "VOCAB_SIZE": 320,
        "TRAIN_BATCH_TOKENS": 64, "MICRO_BATCH_TOKENS": 64, "ITERATIONS": 6, "VAL_TOKENS_LIMIT": 256,
        "DATA_PATH": dataset, "TOKENIZER_PATH": dataset / "tokenizer.model", "MATRIX_LR": 0.05, **changes,
    }  # fmt: skip
    settings = {**geometry, **{name: str(value) for name, value in small.items()}}
    settings.update(candidates.CANDIDATES[candidate].settings)
    if "TRAIN_SEQ_LENS" in settings:
        settings["TRAIN_SEQ_LENS"] = "16:0.3333333 32"  # the candidate's are of longer sequences
    return {**settings, "CANDIDATE": candidate}


@pytest.mark.slow
def test_every_candidate_is_another_training(dataset: Path) -> None:
    trained = {}
    for name in candidates.CANDIDATES:
        trial = candidates.made(few_steps(dataset, name), 7)
        candidates.train(trial)
        trained[name] = torch.nn.utils.parameters_to_vector(trial.model.parameters()).detach()
        assert trained[name].isfinite().all(), name
    base = trained.pop(candidates.BASE)
    for name, weights in trained.items():
        # What a candidate adds to the model stands behind it.
        assert not torch.equal(weights[: len(base)], base), name


def test_connections_that_each_token_chooses_begin_as_if_they_were_not_there(dataset: Path) -> None:
    ids_BT = torch.randint(4, 320, (2, 33), generator=torch.Generator().manual_seed(0))
    losses = []
    for name in (candidates.BASE, "MUDD at the output and the last layer"):
        trial = candidates.made(few_steps(dataset, name), 7)
        losses.append(trial.model.loss(ids_BT[:, :-1], ids_BT[:, 1:]))
    assert losses[0].item() == losses[1].item()
    # And yet they learn: only the weights before a zero have no gradient at first.
    losses[1].backward()
    for site in ("mudd_output", "mudd_last_layer"):
        gradient = trial.model.get_parameter(f"{site}_out_3H").grad
        assert gradient is not None and gradient.abs().sum() > 0


def test_a_single_head_of_keys_is_paired_with_no_other(dataset: Path) -> None:
    settings = few_steps(dataset, "Q, K by head pairs", NUM_KV_HEADS=1)
    assert math.isfinite(candidates.measure(settings, 7, "cpu")["val_bpb"])


def test_a_candidate_is_compared_with_the_base_of_its_seeds_and_rates() -> None:
    def runs(*scores: float) -> list[dict[str, Any]]:
        found = []
        for seed, score in enumerate(scores):
            found.append({"seed": seed, "val_bpb": score, "seconds_per_step": 2.0, "coded_bits": 3.0})
        return found

    rows = {
        "base": runs(2.5, 2.6, 2.7), "prefix 0.25": runs(2.4, 2.5), "backout 0.5": runs(2.6, 2.7, 2.8),
        "base, rates × 0.8": runs(3.5), "prefix 0.25, rates × 0.8": runs(3.3),
    }  # fmt: skip
    geometry = {**candidates.COMMON, **candidates.SIZES["tiny"]}
    measured = {"data": "d", "steps": 3, "val_tokens": 9, "geometry": geometry, "rates": {}, "rows": rows}
    lines = candidates.tables(measured)[4:]
    assert lines[0].startswith("| prefix 0.25, rates × 0.8 | 3.3000 | -0.2000 | - |")
    assert lines[1] == "| prefix 0.25 | 2.4500 | -0.1000 | 0.0000 | +0.0000 | 1.00 | 2 |"
    assert lines[-1] == "| backout 0.5 | 2.7000 | +0.1000 | 0.0000 | +0.0000 | 1.00 | 3 |"
    # At equal seconds the table says how many steps they were, and how sure that is.
    prices = {
        "counts": {"base": 3, "prefix 0.25": 2},
        "ratios": {"base": [1.0] * 4, "prefix 0.25": [1.4, 1.5] * 2},
    }
    text = candidates.tables({**measured, **prices})[0]
    assert "by 4 short turns (prefix 0.25: 2, a step takes 1.450 ± 0.036 of the base's)" in text


def test_a_candidate_whose_steps_take_longer_gets_fewer_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    turns: list[str] = []

    def made(settings: dict[str, str], _seed: int) -> SimpleNamespace:
        assert settings["ITERATIONS"] == str(candidates.TURN_STEPS)
        return SimpleNamespace(config=settings["CANDIDATE"], model=None)

    def train(name: str, *_rest: object) -> None:
        turns.append(name)
        # The machine is slower from turn to turn, and once disturbed.
        slowness = 1 + len(turns) / 1000
        clock[0] += slowness * (1.25 if name == "dear" else 1.0) + (50 if len(turns) == 7 else 0)

    monkeypatch.setattr(candidates, "made", made)
    monkeypatch.setattr(candidates.ablation, "train", train)
    monkeypatch.setattr(candidates.time, "process_time", lambda: clock[0])
    stack = {name: {"CANDIDATE": name} for name in ("base", "dear", "alike")}
    counts = candidates.price(stack, 300, tmp_path / "ratios.json")
    assert turns == ["base", "dear", "alike"] * candidates.TURNS
    assert counts["base"] == 300
    assert counts["dear"] == pytest.approx(240, abs=4) and counts["alike"] == pytest.approx(300, abs=4)
    ratios = json.loads((tmp_path / "ratios.json").read_text())
    assert ratios.keys() == stack.keys() and len(ratios["dear"]) == candidates.TURNS


def test_the_default_read_out_is_that_of_the_optimizer(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readout, "DECAYS", (0.95,))
    monkeypatch.setattr(readout, "SHARES", (1.0,))
    settings = few_steps(dataset, candidates.BASE, GPTQ=1, RATE_CONTROL=1, BYTES=200_000)
    scores = readout.measure(settings, 7, "cpu")["scores"]
    del settings["BYTES"]
    expected = candidates.measure({**settings, "GPTQ": "0"}, 7, "cpu")["val_bpb"]
    assert scores["1 of decay 0.95"][0] == expected
    names = {"last weights", "1 of decay 0.95", *(f"decay 0.95, {kind} last" for kind in readout.KINDS)}
    assert scores.keys() == names and len({score[0] for score in scores.values()}) == len(names)
    geometry = {**candidates.COMMON, **candidates.SIZES["tiny"]}
    measured = {"data": "d", "steps": 6, "val_tokens": 256, "geometry": geometry, "bytes": 200_000,
                "default_decay": 0.95, "runs": [{"seed": 7, "scores": scores}]}  # fmt: skip
    lines = readout.tables(measured)
    assert f"| 1 of decay 0.95 | {expected:.4f} | - |" in "\n".join(lines)


def test_the_loader_is_timed_by_its_own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "STEP_TOKENS", loader.RANKS * loader.SEQ_LEN)
    monkeypatch.setattr(loader, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(loader, "START_STEPS", 1)
    monkeypatch.setattr(train_gpt, "read_tokens", train_gpt.read_tokens)  # `simulate` replaces it
    for number in range(2):
        ids = np.random.default_rng(number).integers(2, 1024, 64 * loader.SEQ_LEN, np.uint16)
        write_shard(tmp_path / f"shard_{number}.bin", ids)
    shards = train_gpt.open_shards(str(tmp_path / "*.bin"))
    staged = loader.staging(shards, rounds=2)
    assert {loader.MEMCPY, loader.OURS, loader.DRAWN} < staged.keys()
    assert all(len(times_ms) == 2 for times_ms in staged.values())
    assert len(loader.whole_ms(shards, True, rounds=2)) == 2
    assert len(loader.handover_ms(shards, batches=5)) == 5
    for design in loader.DESIGNS:
        assert len(loader.simulate(design, str(tmp_path), 0.0, steps=4)) == 3, design


def test_the_picture_shows_the_raw_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [{"seed": 1, "val_bpb": 2.5}, {"seed": 2, "val_bpb": 2.6}]
    ours = [{"seed": 2, "val_bpb": 2.25}, {"seed": 1, "val_bpb": 2.0}]
    scores: list[dict[str, Any]] = []
    for place, row in enumerate(ttt.ROWS):
        scores.append({"row": row, "documents": 0, "bits_per_byte": 2.0 + place})
    scores.append({"row": "SGD", "documents": 100, "bits_per_byte": 9.0})  # of a part of the text: not shown
    rows = {"theirs": theirs, "ours as theirs": [{"seed": 1, "val_bpb": 2.4}], "ours": ours}
    stored = {
        picture.BESIDE: {"measured": {"seconds": 180.0, "rows": rows}},
        picture.SCORING: {"measured": {"scores": scores}},
    }
    monkeypatch.setattr(results, "latest", stored.__getitem__)
    left, right = picture.draw().axes
    assert sorted(list(line.get_ydata()) for line in left.lines) == [[2.5, 2.4, 2.0], [2.6, 2.25]]
    assert [float(y) for line in right.lines for y in line.get_ydata()] == [2.0, 3.0, 4.0, 5.0]
    monkeypatch.setattr("sys.argv", ["picture", "--out", str(tmp_path / "results.png")])
    picture.main()
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_scores_of_two_scripts_are_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "score-1.json").write_text('{"script": "of another"}')
    monkeypatch.setattr("sys.argv", ["ttt.py", "table", "--store", str(tmp_path)])
    with pytest.raises(SystemExit, match="of another"):
        ttt.main()


# --- the checker on public folders, and the proofs ---


def test_every_public_folder_is_counted_once_for_a_check_however_often_it_fails() -> None:
    contested = {"check": "C2", "agreed": "WARN", "strict": "FAIL", "convention": "INFO"}
    broken = {"check": "A4", "agreed": "FAIL", "strict": "FAIL", "convention": "FAIL"}
    lines = public.tables({
        "commit": "0000000", "seconds": 1.0, "folders": [[contested, broken, broken], [contested], []],
    })  # fmt: skip
    assert lines[0].startswith("3 folders ") and "2 FAIL in 1 of them, 2 WARN, 0 INFO" in lines[0]
    assert lines[-2:] == ["| A4 | 1 | 1 | 1 | 0 | 2 |", "| C2 | 0 | 2 | 0 | 2 | 2 |"]


def test_public_folders_are_audited_as_they_are_and_none_is_named(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: Path
) -> None:
    """Of one folder that is complete and one without anything: what `check` says of each."""
    records = tmp_path / "golf/records/track_somewhere"
    shutil.copytree(own_records(repo)[0], records / "complete")
    (records / "nothing").mkdir()
    monkeypatch.setattr(sys, "argv", ["public.py", str(tmp_path / "golf"), "--keep"])
    public.main()
    stored = json.loads((empty / "results/public.json").read_text())["measured"]
    complete, nothing = stored["folders"]
    assert "FAIL" not in {finding["strict"] for finding in complete}
    assert "FAIL" in {finding["agreed"] for finding in nothing}
    assert "nothing" not in json.dumps(stored)
    monkeypatch.setattr(sys, "argv", ["public.py", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit):
        public.main()


def test_every_record_is_proved_by_its_own_script_and_settings(repo: Path) -> None:
    subjects = proofs.subjects()
    configs = {subject.config for subject in subjects.values() if subject.config}
    assert {folder / "config.env" for folder in own_records(repo)} < configs
    for subject in subjects.values():
        assert subject.script.is_file()
        if subject.config and subject.config.name == "config.env":
            assert subject.script.parent == subject.config.parent


def test_a_proof_is_asked_once_and_its_results_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    findings = [{"check": check, "level": level} for check, level in
                (("B0", "INFO"), ("B1", "INFO"), ("B1", "INFO"), ("B12", "WARN"))]  # fmt: skip
    report = json.dumps({"status": 2, "verdict": "not proven: B12", "findings": findings})

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout=report, stderr="", returncode=2)

    monkeypatch.setattr(proofs.subprocess, "run", run)
    chosen = {"mine": proofs.Subject(tmp_path / "train_gpt.py", tmp_path / "my.env")}
    proofs.share(tmp_path / "runs", chosen, "this script")
    answers = proofs.share(tmp_path / "runs", chosen, "this script")
    assert len(asked) == 1 and asked[0][-2:] == ["--config", str(tmp_path / "my.env")]
    assert proofs.tables({"answers": answers})[-1].startswith("| mine | not proven: B12 | 2 | 3 | 1 | ")
    report = ""
    with pytest.raises(RuntimeError, match="ended with 2"):
        proofs.share(tmp_path / "other", chosen, "this script")
    with pytest.raises(SystemExit, match="runs of other conditions"):
        proofs.share(tmp_path / "runs", chosen, "another script")


# --- threads ---


def test_each_number_of_threads_is_measured_alone_and_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a single thread there is one row: it waits for no other."""
    started: list[dict[str, str]] = []
    busy: list[bool] = []

    class Running:
        def __init__(self, script: Path, settings: dict[str, str]) -> None:
            started.append(settings)
            self.ms = 10.0 * len(started) + int(settings["GOMP_SPINCOUNT"])

        def __enter__(self) -> Running:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def steps(self, count: int) -> Turn:
            return Turn([self.ms + 0.5 * len(busy)] * count, [0.0] * count, [0.0] * count)

    @contextlib.contextmanager
    def busy_core() -> Any:
        busy.append(True)
        yield
        busy.clear()

    monkeypatch.setattr(threads, "Turns", Running)
    monkeypatch.setattr(threads, "busy_core", busy_core)
    arguments = argparse.Namespace(
        config=tmp_path / "small.env", threads=[1, 2], spins=[100, 200], turns=2, steps=3
    )
    rows = threads.measure(arguments, tmp_path)
    given = [(env["OMP_NUM_THREADS"], env["GOMP_SPINCOUNT"]) for env in started]
    assert given == [pair for pair in (("1", "100"), ("2", "100"), ("2", "200")) for _ in range(2)]
    assert len({env["RUN_ID"] for env in started}) == 6
    one_thread = rows[0]
    assert one_thread["alone"] == [110.0] * 6  # the first of the two processes, two turns of three steps
    assert sorted(one_thread["two at once"]) == [110.0] * 6 + [120.0] * 6
    assert one_thread["beside a busy core"] == [110.5] * 6
    lines = threads.tables({"config": "small", "turns": 2, "steps": 3, "rows": rows})
    assert lines[-3] == "| 1 | - | 110.0 | 110.0 | 110.0 | 115.0 | 110.5 |"
    assert lines[-1].startswith("| 2 | 200 | 250.0 | ")
