"""The measuring programs: a public script beside ours, and the passes of an evaluation."""

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train_gpt
from benchmarks import beside, cpu_clock, ttt
from benchmarks.upstream import TrainingClock
from tests.support.models import tiny_config
from tests.support.tiny import environment
from tests.tools.test_upstream import KEEPS_AN_AVERAGE


def test_the_clock_counts_what_the_process_computes(tmp_path: Path) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text(
        "import time\n"
        "def main():\n"
        "    before = time.perf_counter()\n"
        "    time.sleep(0.2)\n"
        "    assert time.perf_counter() - before < 0.15, 'it slept'\n"
        "    return 3\n"
    )
    assert subprocess.run([sys.executable, cpu_clock.__file__, str(script)], check=False).returncode == 3


def test_passes_of_documents_are_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that really pass through the model, with gradients and without, against the counted ones."""
    passed = {True: 0, False: 0}
    forward = train_gpt.GPT.forward

    def counted(model: Any, ids_BT: Any, *rest: Any, **named: Any) -> Any:
        passed[torch.is_grad_enabled()] += ids_BT.numel()
        return forward(model, ids_BT, *rest, **named)

    monkeypatch.setattr(train_gpt.GPT, "forward", counted)
    random = np.random.default_rng(0)
    tokens = random.integers(2, 320, 120).astype(np.uint16)
    tokens[[0, 1, 30, 72, 110]] = train_gpt.BOS_ID  # an empty document, and some longer than a window
    config = tiny_config(TTT_ENABLED=1, EVAL_STRIDE=16, TTT_MODE="lora", TTT_CHUNK_SIZE=8, TTT_BATCH_SIZE=3)
    passes = list(ttt.passes_of_documents(tokens, config))
    passed.update({True: 0, False: 0})
    train_gpt.score_ttt(train_gpt.build_model(config), tokens, config)
    assert sum(one.tokens for one in passes) == passed[True] + passed[False]
    assert sum(one.tokens for one in passes if one.learning) == passed[True] > 0


def test_lengths_of_documents_are_those_of_public_logs() -> None:
    """#2067 logs 45,739 documents below 2,048 tokens, whose chunks have 16, and 2,196,862 steps in all."""
    tokens = ttt.official_text(ttt.PUBLISHED_TARGETS)
    begins = np.flatnonzero(tokens[:-1] == train_gpt.BOS_ID)
    lengths = np.diff(np.append(begins, len(tokens) - 1))
    assert len(lengths) == 50_000 and lengths.max() == pytest.approx(97_113, rel=0.01)
    assert lengths.sum() == pytest.approx(ttt.PUBLISHED_TARGETS, rel=1e-3)
    short = lengths < 2047
    assert short.sum() == pytest.approx(45_739, rel=2e-3)
    steps = np.ceil(lengths / np.where(short, 16, 48)) - 1
    assert steps.sum() == pytest.approx(2_196_862, rel=5e-3)


def test_scores_are_compared_with_theirs_and_with_ours_as_theirs() -> None:
    def scored(*by_seed: float) -> dict[str, dict[str, Any]]:
        sizes = {"parameters": 1000, "steps": 200, "ms": 5.0, "bytes": 900, beside.BEFORE: 1.0}
        return {str(seed): {**sizes, beside.AFTER: score} for seed, score in enumerate(by_seed)}

    found = {"theirs": scored(2.4, 2.5), "as-theirs": scored(2.3, 2.35), "ours": scored(2.2, 2.25)}
    *_, against_theirs, against_as_theirs = beside.tables(found).split("\n\n")
    assert [line.split()[:4] for line in against_theirs.splitlines()[1:]] == [
        ["theirs", "2", "2.45000", "–"], ["as-theirs", "2", "2.32500", "-0.12500"],
        ["ours", "2", "2.22500", "-0.22500"],
    ]
    *_, ours = against_as_theirs.splitlines()
    assert ours.split()[:4] == ["ours", "2", "2.22500", "-0.10000"]


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

    Runs of ours are not started: their figures follow from their settings.
    """
    folders = (tmp_path / f"runs{number}" for number in itertools.count())
    found: dict[str, dict[str, Any]] = {}

    def ours(self: beside.Race, side: str, seed: str) -> dict[str, Any]:
        settings = self.settings_of(side)
        made = train_gpt.Config.from_env({**settings, "SEED": seed})
        size = {"parameters": train_gpt.count_parameters(made), "steps": 5, "ms": 7.0, "bytes": 900}
        return {"shuffle": made.shuffle, **size, beside.BEFORE: 2.5, beside.AFTER: 2.6}

    def kept(by_side: dict[str, dict[str, dict[str, Any]]]) -> str:
        found.update({side: by_seed["7"] for side, by_seed in by_side.items()})
        return tables(by_side)

    tables = beside.tables
    monkeypatch.setattr(beside.Race, "run_ours", ours)
    monkeypatch.setattr(beside, "tables", kept)

    def run(script: str, *options: str, file: str = "train_gpt.py") -> dict[str, dict[str, Any]]:
        path = tmp_path / file
        path.write_text(script, encoding="utf-8")
        seconds = itertools.count(0.0)

        def clock(_now: object, limit: float) -> TrainingClock:
            return TrainingClock(lambda: next(seconds), limit)

        monkeypatch.setattr(beside, "TrainingClock", clock)
        command = ["beside.py", path, "--data", dataset, "--tokenizer", dataset / "tokenizer.model"]
        command += ["--config", small, "--runs", next(folders), "--val-tokens", 256, "--seeds", 7]
        command += ["--seconds", 6]
        monkeypatch.setattr("sys.argv", [*map(str, command), *options])
        found.clear()
        beside.main()
        return dict(found)

    return run


def test_each_side_is_trained_and_scored(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    found = race(RACED, "--theirs", "MATRIX_LR=0.04")
    assert [*found] == beside.SIDES
    theirs = found["theirs"]
    assert theirs["steps"] > 2 and beside.AFTER not in theirs
    assert theirs[beside.BEFORE] == min(theirs["last weights"], theirs["average"])
    assert theirs["last weights"] != theirs["average"] != found["theirs-shuffled"]["average"]
    ours, as_theirs = found["ours"], found["as-theirs"]
    assert ours["parameters"] != as_theirs["parameters"]  # the gates of the default are not the baseline's
    # The order of the text: that of the settings, or the other one where the side says so.
    assert ours["shuffle"] and not found["ours-in-order"]["shuffle"]
    assert not as_theirs["shuffle"] and found["as-theirs-shuffled"]["shuffle"]
    # Theirs is not quantized, so all are compared before that.
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert ["ours", "1", "2.50000", f"{2.5 - theirs[beside.BEFORE]:+.5f}"] in rows


def test_what_does_not_fit_a_race_is_told(
    race: Race, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for setting, only, told in (
        ("NUM_LAYERS=3", beside.SIDES, "--theirs NUM_LAYERS: is equal on all sides"),
        ("WARMDOWN=3", ["theirs"], "never reads WARMDOWN"),
        ("WIDTH=4", beside.SIDES, "WIDTH=4: no setting here"),
        ("MATRIX_LR=much", ["as-theirs"], "MATRIX_LR='much'"),
    ):
        with pytest.raises(SystemExit, match=told):
            race(RACED, "--theirs", setting, "--only", *only)
    with pytest.raises(SystemExit):
        race(RACED, file="pr549_train_gpt.py")
    assert "which config is this script in ours" in capsys.readouterr().err
    shuffling = RACED.replace("DistributedTokenLoader", "ShuffledSequenceLoader")
    with pytest.raises(SystemExit, match="shuffles by itself"):
        race(shuffling, "--only", "theirs-shuffled")
    assert race(RACED, "--only", "theirs-shuffled")["theirs-shuffled"]["last weights"] == pytest.approx(
        race(shuffling, "--only", "theirs")["theirs"]["last weights"], abs=1e-9
    )
    monkeypatch.setenv("MATRIX_LR", "0.5")
    with pytest.raises(SystemExit, match="MATRIX_LR: set in your shell"):
        race(RACED)


def test_runs_of_other_conditions_do_not_share_a_table(race: Race, tmp_path: Path) -> None:
    folder = ["--runs", str(tmp_path / "kept")]
    first = race(RACED, *folder, "--only", "theirs")
    assert race(RACED, *folder) | first == race(RACED, *folder)  # what is finished is kept
    with pytest.raises(SystemExit, match="its runs differ in their script; name another --runs"):
        race(RACED + "\n# changed\n", *folder)


@pytest.mark.slow
def test_all_sides_run_and_continue(tmp_path: Path, small: Path, dataset: Path) -> None:
    """The command itself, with processes of this script under the CPU's clock."""
    endless = RACED.replace('"ITERATIONS", 10)', '"ITERATIONS", 10**6)')
    (tmp_path / "train_gpt.py").write_text(endless, encoding="utf-8")
    command = [sys.executable, beside.__file__, "train_gpt.py", "--data", dataset, "--runs", "runs",
               "--tokenizer", dataset / "tokenizer.model", "--config", small, "--seconds", "1",
               "--val-tokens", "256", "--seeds", "7"]
    for _ in range(2):
        ended = subprocess.run(
            [*map(str, command)], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False
        )
        assert ended.returncode == 0, ended.stderr
    sizes = {line.split()[0]: line.split()[1:] for line in ended.stdout.split("\n\n")[1].splitlines()[1:]}
    assert [*sizes] == beside.SIDES
    for side in ("ours", "as-theirs"):
        steps, ms = (float(cell.replace(",", "")) for cell in sizes[side][1:3])
        assert 0.5 < steps * ms / 1e3 < 2  # the seconds are those of training alone


def test_shuffled_batches_are_those_of_ours(tmp_path: Path, small: Path, dataset: Path) -> None:
    places = ["--config", small, "--data", dataset, "--tokenizer", dataset / "tokenizer.model"]
    race = beside.Race(beside.parse(["train_gpt.py", *map(str, places), "--seconds", "6"]))
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
