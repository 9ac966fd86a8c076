"""RESULTS.md follows from the raw figures; a benchmark that stores some makes the page from them."""

import contextlib
import copy
import hashlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train_gpt
from benchmarks import answers, beside, divergence, experiments, paired, picture, results, ttt
from benchmarks.turns import Turns, TurnsError
from benchmarks.upstream import TrainingClock
from tests.support.models import tiny_config, trained_like
from tests.support.subject import LORA, subject
from tests.support.tiny import environment
from tests.tools.test_upstream import KEEPS_AN_AVERAGE
from tools.markdown import refresh

KEPT = results.stored(results.FOLDER)
TABLES = [name for name in KEPT if results.ON_SAMPLE not in name]  # the others: of the built-in sample


def test_the_page_follows_from_the_raw_figures_and_says_where_and_when() -> None:
    assert not refresh(results.block(), check=True), "run `make docs`"
    sections = re.findall(r"^## .+\n\n(.+)$", results.page(), re.MULTILINE)
    assert sections == [results.described(KEPT[name]["conditions"]) for name in TABLES]
    for one in KEPT.values():
        assert one["measured"] and re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", one["conditions"]["commit"])
    titles = re.findall(r"^##? .+$", results.page(), re.MULTILINE)
    assert len(titles) == len(set(titles)) and len(titles) > 3


def test_under_each_table_stands_a_row_that_a_clone_alone_measures_again() -> None:
    """With the settings of the kept run; those of experiments.py are compared in test_experiments.py."""
    samples = {name.partition(results.ON_SAMPLE)[0]: KEPT[name] for name in KEPT.keys() - {*TABLES}}
    for name, section in zip(TABLES, results.page().split("\n## ")[1:], strict=True):
        (kept,) = [one for of, one in samples.items() if name.startswith(f"{of}-")]
        assert kept["measured"].get("rows", {}).keys() <= KEPT[name]["measured"].get("rows", {}).keys()
        assert results.of_clone(name, KEPT) in section and kept["conditions"]["sample"] in section
    raced, model = samples["beside"]["measured"], samples["experiments-quantizers"]["measured"]
    given = beside.parse(shlex.split(beside.command(raced))[2:])
    again = {**beside.equal_in_all(given, beside.Race(given)), "code_bytes": raced["code_bytes"]}
    assert raced == {**again, "rows": {side: raced["rows"][side] for side in given.only}}
    assert given.seeds == [run["seed"] for runs in raced["rows"].values() for run in runs]
    # Of quantizers: the model, and what is measured of it.
    assert shlex.split(experiments.command(model))[2:] == divergence.TRAINING.split()
    (run,), given = samples["divergence"]["measured"]["runs"], divergence.parse([])
    assert [(row["bits"], row["arm"]) for row in run["rows"]] == given.wanted


def test_the_release_is_that_of_every_figure(repo: Path) -> None:
    frozen = (results.FOLDER / "0.5.md").read_text(encoding="utf-8")
    assert f"## {results.release()['version']}" in (repo / "CHANGELOG.md").read_text(encoding="utf-8")
    assert not {*re.findall(r"^## .+$", frozen, re.M)} & {*re.findall(r"^## .+$", results.page(), re.M)}
    # A file that a page still shows: its table is the frozen one.
    scores = results.latest(picture.SCORING)["measured"]["scores"]
    for way in picture.WAYS:
        found = [one["bits_per_byte"] for one in scores if one["row"] == way and one["documents"] == 0]
        assert f"| {way} | {sum(found) / len(found):.4f} |" in frozen
    # Of the script that the release names, whatever the working file is by now.
    release = results.release()
    scripts = [release["script"], *release["same_bits"].values()]
    assert all(re.fullmatch("[0-9a-f]{64}", script) for script in scripts)
    alike = {script[:12] for script in scripts}
    of = {name: one["conditions"]["script"] for name, one in KEPT.items()}
    told = re.findall(r"Other scripts, which the tables name, made (.*)\.", results.page())
    assert told == [", ".join(name for name, ran in of.items() if ran not in alike)]
    of_records = []
    for path in repo.glob("records/track_*/*/submission.json"):
        if json.loads(path.read_text(encoding="utf-8"))["author"] == "the project":
            of_records += [*path.parent.glob("summary_seed*.json")]
    assert of_records
    for summary in of_records:
        ran = json.loads(summary.read_text(encoding="utf-8"))["code"]["sha256"]
        source = repo / f"records/scripts/{ran[:8]}.py"
        assert hashlib.sha256(source.read_bytes()).hexdigest() == ran, f"{summary} has no source"
        assert ran in scripts, f"{summary} is of another script"


def test_the_commit_of_the_release_holds_its_script(repo: Path) -> None:
    """Where the history is there; an unpacked archive has none."""
    release = results.release()
    show = ["git", "show", f"{release['commit']}:train_gpt.py"]
    shown = subprocess.run(show, cwd=repo, capture_output=True, check=False)
    if shown.returncode != 0:
        pytest.skip("the commit of the release is not in this copy's history")
    assert hashlib.sha256(shown.stdout).hexdigest() == release["script"]


@pytest.mark.slow
@pytest.mark.parametrize("script", results.release()["same_bits"].values())
def test_a_script_whose_figures_stay_has_the_same_bits(repo: Path, script: str) -> None:
    command = [sys.executable, "tests/same_bits.py", f"records/scripts/{script[:8]}.py", "train_gpt.py"]
    assert subprocess.run(command, cwd=repo, check=False).returncode == 0


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(results, "PAGE", tmp_path / "RESULTS.md")
    results.PAGE.write_text(f"{results.BEGIN}\n{results.END}\n")
    (tmp_path / "results").mkdir()
    release = {"version": "0", "commit": "0000000", "script": "0" * 64, "same_bits": {}}
    monkeypatch.setattr(results, "commit", lambda: "0000000")  # whatever the working tree is
    (tmp_path / "results" / results.RELEASE).write_text(json.dumps(release))
    return tmp_path


def test_a_kept_measurement_is_on_the_page_and_a_changed_figure_changes_it(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = {"0": [[9.0, 8.0, 1.0], [9.5, 8.5, 1.0]], "1": [[8.0, 7.0, 0.0], [9.0, 8.0, 0.0]]}
    measured = {"turns": turns, "ranks": 2, "steps": 5, "disk_ms": 50.0, "hash": 15, "config": "small.env",
                "set": [], "device": "cpu"}  # fmt: skip
    results.finish("loader", results.conditions(), measured, keep=False)
    assert "## Loader" in capsys.readouterr().out
    with monkeypatch.context() as tree:
        tree.setattr(results, "commit", lambda: "0000000-dirty")
        with pytest.raises(SystemExit, match="commit the programs, then measure"):
            results.finish("loader-small", results.conditions(), measured, keep=True)
        with pytest.raises(SystemExit, match="commit them first"):
            results.refuse_dirty()
    assert [path.name for path in (empty / "results").iterdir()] == [results.RELEASE]
    assert "Loader" not in (empty / "RESULTS.md").read_text()

    results.finish("loader-small", results.conditions(), measured, keep=True)
    page = (empty / "RESULTS.md").read_text(encoding="utf-8")
    assert "| 0 | 9.25 | 8.25 | 1.00 |" in page and results.page() in page
    stored = empty / "results" / "loader-small.json"
    stored.write_text(stored.read_text().replace("9.5", "9.7"))
    assert results.page() not in page and "| 0 | 9.35 | 8.25 | 1.00 |" in results.page()


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


def test_costs_of_test_time_training_are_those_of_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that really pass through the model, with gradients and without, against the counted ones."""
    passed = {True: 0, False: 0}
    forward = train_gpt.GPT.forward

    def counted(model: Any, ids_BT: Any, *rest: Any) -> Any:
        passed[torch.is_grad_enabled()] += ids_BT.numel()
        return forward(model, ids_BT, *rest)

    stepped = []  # numbers of adapters
    adamw_step = train_gpt.adamw_step

    def counted_step(weights_N: Any, *rest: Any) -> None:
        stepped.append(weights_N.numel())
        adamw_step(weights_N, *rest)

    monkeypatch.setattr(train_gpt.GPT, "forward", counted)
    monkeypatch.setattr(train_gpt, "adamw_step", counted_step)
    for settings in (LORA, {"TTT_EPOCHS": "3"}):
        lab = subject(**settings)
        tokens = lab.tokens()
        count = ttt.passes_of_documents if settings is LORA else ttt.passes_of_chunks
        passes = list(count(tokens, lab.config))
        passed.update({True: 0, False: 0})
        stepped.clear()
        lab.nats("score_ttt", tokens)
        assert sum(one.tokens for one in passes) == passed[True] + passed[False]
        assert sum(one.tokens for one in passes if one.learning) == passed[True]
        assert sum(one.adapter_numbers for one in passes) == sum(stepped)


def test_lengths_of_documents_are_those_of_public_logs() -> None:
    """#2067 logs 45,739 documents below 2,048 tokens, whose chunks have 16, and 2,196,862 steps in all."""
    tokens = ttt.official_text()
    lengths = np.diff(np.flatnonzero(np.append(tokens[:-1], train_gpt.BOS_ID) == train_gpt.BOS_ID))
    assert len(lengths) == 50_000 and lengths.max() == pytest.approx(97_113, rel=0.01)
    assert lengths.sum() == pytest.approx(47_853_343, rel=1e-3)
    short = lengths < 2047
    assert short.sum() == pytest.approx(45_739, rel=2e-3)
    steps = np.ceil(lengths / np.where(short, 16, 48)) - 1
    assert steps.sum() == pytest.approx(2_196_862, rel=5e-3)
    # Seconds grow with rank and context; a GPU that is slow, and no host, decides them.
    slow = ttt.Speed(1e-3, 1e-3, 2e-3)
    one_pass = [ttt.Pass(1000, learning=True, adapter_numbers=10**9)]
    small, large = (train_gpt.Config(ttt_lora_rank=rank) for rank in (80, 224))
    assert 2.0 < slow.of_adapters(small, 26, one_pass) < slow.of_adapters(large, 26, one_pass) < 2.1
    assert ttt.Speed(0, 0, 0).of_adapters(small, 0, [ttt.Pass(0, learning=True)]) == pytest.approx(0.0235)


def tuned(seed: int, score: float) -> dict[str, Any]:
    return {
        "seed": seed, "parameters": 1000, "steps": 200, "seconds": 1.0, "float_bpb": score - 0.01,
        "bytes": 900, "val_bpb": score,
    }  # fmt: skip


def beside_measured(rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "data": "text", "geometry": {"TRAIN_BATCH_TOKENS": "300"}, "public": "theirs.py", "sha256": "0",
        "config": "small.env", "set": [], "seconds": 180, "clock": "cpu", "val_targets": 1000, "rows": rows,
        "code_bytes": {"theirs": 50, "ours": 60}, **more,
    }  # fmt: skip


def test_the_gain_is_told_in_two_parts_where_ours_was_trained_as_theirs() -> None:
    rows = {
        "theirs": [tuned(1, 2.4), tuned(2, 2.5)], "ours as theirs": [tuned(1, 2.3), tuned(2, 2.35)],
        "ours": [tuned(1, 2.2), tuned(2, 2.25)],
    }  # fmt: skip
    lines = beside.tables(beside_measured(rows))
    (of_side,) = [line for line in lines if line.startswith("| ours as theirs |")]
    assert "| 900 | 60 | 2.3250 |" in of_side and "| -0.1250 | 0.0250 |" in of_side
    assert [line for line in lines[-6:] if line] == [
        "Ours as theirs minus theirs, seed by seed: 1: -0.1000, 2: -0.1500.",
        "Ours minus ours as theirs, seed by seed: 1: -0.1000, 2: -0.1000.",
        "Ours minus theirs, seed by seed: 1: -0.2000, 2: -0.2500.",
    ]


def test_a_result_is_never_lost_to_another_script_and_one_of_the_sample_is_told_beside_the_kept_one(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = beside.parse("pr549_train_gpt.py --data datasets/sample_sp1024 --seconds 180".split())
    name = beside.result_name(given)
    assert name == "beside-pr549-sample_sp1024-180s"
    beside.check_nothing_is_lost(name, "1")
    for score, sample in ((2.0, "a"), (2.5, "b")):
        monkeypatch.setattr(results, "sample_hash", lambda sample=sample: sample)
        measured = beside_measured({"ours": [tuned(1, score)]})
        results.finish(name, results.conditions(), measured, keep=score == 2.0)
    told = re.findall("^(kept|here|sample): .*(2.000000|2.500000|other)", capsys.readouterr().out, re.M)
    assert told == [("kept", "2.000000"), ("here", "2.500000"), ("sample", "other")]
    beside.check_nothing_is_lost(name, "0")  # the same script again
    with pytest.raises(SystemExit, match="holds a script of 0, this one is of 1; give your copy another"):
        beside.check_nothing_is_lost(name, "1")


RACED = KEEPS_AN_AVERAGE.replace('"VOCABULARY"', '"VOCAB_SIZE"').replace(
    "    width =",
    """    [os.environ.get(name) for name in (
        "NUM_LAYERS", "MODEL_DIM", "NUM_HEADS", "NUM_KV_HEADS", "MLP_MULT", "TRAIN_SEQ_LEN",
        "TRAIN_BATCH_TOKENS", "SEED", "MATRIX_LR",
    )]
    width =""",
)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file with the settings of the tiny model."""
    config = tmp_path / "small.env"
    config.write_text("".join(f"{name}={value}\n" for name, value in environment().items()))
    return config


Race = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def race(tmp_path: Path, small: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> Race:
    """Runs the command on a script; what each side measured. Every look at theirs' clock is a second.

    Runs of ours are not started: what is told of them is made of their settings.
    """
    folders = (tmp_path / f"runs{number}" for number in itertools.count())

    def ours(script: Path, settings: dict[str, str], directory: Path) -> dict[str, Any]:
        made = train_gpt.Config.from_env(settings)
        size = {"parameters": train_gpt.count_parameters(made), "steps": 5, "bytes": 900}
        scores = {"float": 2.5, "roundtrip": 2.6}
        return {"seed": made.seed, **size, "shuffle": made.shuffle, "scores": scores}

    def run(script: str, *options: str, file: str = "train_gpt.py") -> dict[str, dict[str, Any]]:
        path = tmp_path / file
        path.write_text(script, encoding="utf-8")
        folder = next(folders)
        monkeypatch.setattr(experiments, "run_script", ours)
        seconds = itertools.count(0.0)

        def clock(_now: object, limit: float) -> TrainingClock:
            return TrainingClock(lambda: next(seconds), limit)

        monkeypatch.setattr(beside, "TrainingClock", clock)
        command = ["beside.py", path, "--data", dataset, "--tokenizer", dataset / "tokenizer.model"]
        command += ["--config", small, "--runs", folder, "--seconds", 6, "--val-tokens", 256, "--seeds", 7]
        monkeypatch.setattr("sys.argv", [*map(str, command), *options])
        beside.main()
        files = folder.glob("*.json")
        return {path.stem.removesuffix("-seed7"): json.loads(path.read_text()) for path in files}

    return run


def test_each_side_is_trained_and_scored(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [side for side in beside.SIDES if side != "speed"]
    found = race(RACED, "--theirs", "MATRIX_LR=0.04", "--only", *sides)
    assert found.keys() == {side.replace(", ", "-").replace(" ", "-") for side in sides}
    theirs = found["theirs"]
    assert theirs["steps"] > 2 and "val_bpb" not in theirs
    assert theirs["float_bpb"] == min(theirs["last_bpb"], theirs["average_bpb"])
    assert theirs["last_bpb"] != theirs["average_bpb"] != found["theirs-shuffled"]["average_bpb"]
    ours, as_theirs = found["ours"], found["ours-as-theirs"]
    assert ours["parameters"] != as_theirs["parameters"]  # the gates of the default are not the baseline's
    # The order of the text: that of the settings, or the other one where the side says so.
    assert ours["shuffle"] and not found["ours-in-order"]["shuffle"]
    assert not as_theirs["shuffle"] and found["ours-as-theirs-shuffled"]["shuffle"]
    printed = capsys.readouterr().out
    assert "| ours as theirs |" in printed and "Nothing of theirs is shipped" in printed
    # So all are compared before quantization: by the better ones of theirs' weights.
    (row,) = [line for line in printed.splitlines() if line.startswith("| theirs |")]
    assert f"| {theirs['last_bpb']:.4f} | {theirs['average_bpb']:.4f} | {theirs['float_bpb']:.4f} |" in row
    assert f"Ours minus theirs, seed by seed: 7: {2.5 - theirs['float_bpb']:+.4f}." in printed


def test_what_does_not_fit_a_race_is_told(race: Race) -> None:
    for setting, only, told in (
        ("NUM_LAYERS=3", beside.SIDES, "--theirs NUM_LAYERS: is equal on all sides"),
        ("WARMDOWN=3", ["theirs"], "never reads WARMDOWN"),
        ("WIDTH=4", beside.SIDES, "WIDTH=4: no setting here"),
        ("MATRIX_LR=much", ["ours as theirs"], "MATRIX_LR='much'"),
    ):
        with pytest.raises(SystemExit, match=told):
            race(RACED, "--theirs", setting, "--only", *only)
    with pytest.raises(SystemExit, match="which config is this script in ours"):
        race(RACED, file="pr549_train_gpt.py")
    shuffling = RACED.replace("DistributedTokenLoader", "ShuffledSequenceLoader")
    with pytest.raises(SystemExit, match="shuffles by itself"):
        race(shuffling, "--only", "theirs shuffled")
    assert race(RACED, "--only", "theirs shuffled")["theirs-shuffled"]["last_bpb"] == pytest.approx(
        race(shuffling, "--only", "theirs")["theirs"]["last_bpb"], abs=1e-9
    )


def test_shuffled_batches_are_those_of_ours(tmp_path: Path, small: Path, dataset: Path) -> None:
    command = ["train_gpt.py", "--config", small, "--data", dataset, "--seconds", 6, "--val-tokens", 256]
    race = beside.Race(beside.parse([*map(str, command), "--only", "theirs shuffled"]))
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


def test_the_pictures_show_what_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = results.latest(picture.BESIDE)["measured"]["rows"]
    pictures = picture.draw()
    left, _ = pictures["results.png"].axes
    # Of each row its seeds, then their mean.
    shown = [sorted(line.get_xdata()) for line in left.lines[::2]]
    assert shown == [sorted(run["val_bpb"] for run in rows[side]) for side in picture.SIDES if side in rows]
    # The ladder: from the first rung its bars lead to the estimate, which stands in no bar.
    (ladder,) = pictures["ladder.png"].axes
    start, *_, (_, total, _) = picture.rungs()
    assert start[1] / 1000 + sum(bar.get_width() for bar in ladder.patches) == pytest.approx(total, abs=1e-4)
    assert len(ladder.patches) == len(picture.rungs()) - 2  # all but the first rung and the sum
    monkeypatch.setattr("sys.argv", ["picture", "--out", str(tmp_path)])
    picture.main()
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_an_answer_is_read_from_its_table_with_a_corrected_p() -> None:
    text = """## Other
| row | minus base | its error | n |
|---|---|---|---|
| a | +1.0 | 0.1 | 3 |

## Asked: here-2
3.5 bits a weight:

| row | seconds | minus base | its error | its error | n |
|---|---|---|---|---|---|
| base | 1 | - | - | - | 5 |
| a | 2 | -0.0222 | 0.0035 | 9 | 5 |
| b | 3 | +0.0010 | 0.0014 | 9 | 5 |
"""
    asked = answers.Asked("Why?", "Asked: here-2", "minus base", ("b", "a"), "more")
    question, answer, sure, limit = answers.answer(asked, "page.md", answers.sections(text)[asked.section])
    assert question == "[Why?](page.md#asked-here-2)" and limit == "more"
    assert answer.split("<br>")[1] == "a, 3.5 bits a weight: -0.0222 ± 0.0035"
    p = paired.p_of(-0.0222, 0.0035, 5)
    assert 0.003 < p < 0.0035 and sure.split("<br>")[1] == f"5 seeds, p **{p:.2g}** ({2 * p:.2g})"


def test_quantizers_are_compared_at_equal_bytes(dataset: Path, tmp_path: Path) -> None:
    config = tiny_config(DATA_PATH=dataset, TOKENIZER_PATH=dataset / "tokenizer.model", MODEL_DIM=64)
    lines = [f"{name}={value}" for name, value in config.as_env().items()]
    (tmp_path / train_gpt.SETTINGS_FILE).write_text("\n".join(lines))
    model = trained_like(config)
    torch.save(model.state_dict(), tmp_path / "final_model.pt")
    targets = 8 * config.eval_length
    arms = list(experiments.read_json("quantizers")["arms"])
    measured = divergence.measure(tmp_path, [(5.0, arm) for arm in arms], targets, batches=2)
    rows = {row["arm"]: row for row in measured["rows"]}
    limit = measured["parameters"] * 5 / 8
    assert all(0.9 * limit < row["bytes"] <= limit and row["passes"] >= 1 for row in rows.values())
    # Each arm is a quantizer of its own, whatever the run had.
    lost = {arm: row["divergence"] for arm, row in rows.items()}
    assert len(set(lost.values())) == len(lost) == 5 and 0 < lost["trellis"] < lost["GPTQ"]
    assert 0 < lost["steps of columns, trellis"] < lost["steps of columns"]
    # The loss of the weights before is the model's own on that text.
    shard = train_gpt.open_shards(f"{dataset}/fineweb_val_[0-9]*.bin")[0]
    tokens = torch.from_numpy(train_gpt.read_tokens(shard)[: targets + 1].astype(np.int64))
    inputs_BT, targets_BT = (part.view(-1, config.eval_length) for part in (tokens[:-1], tokens[1:]))
    assert measured["nats_before"] == pytest.approx(model.loss(inputs_BT, targets_BT).item(), abs=1e-5)
    # Two models: means, and the difference to the first arm pair by pair.
    other = copy.deepcopy(measured)
    other["seed"] += 1
    for row in other["rows"]:
        row["bpb_lost"] += 0.5
    page = divergence.tables({"runs": [measured, other]})
    gain = rows["trellis"]["bpb_lost"] - rows["GPTQ"]["bpb_lost"]
    (line,) = [line for line in page if line.startswith("| trellis |")]
    assert f"| {rows['trellis']['bpb_lost'] + 0.25:+.4f} | {gain:+.4f} | 0.0000 |" in line
