"""benchmarks/experiments.py: arms are models, runs are measured once, and a table says what was compared."""

import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

import train_gpt
from benchmarks import cpu_clock, experiments, paired
from benchmarks.experiments import Arm, Budget, Experiment, ExperimentError
from tests.support.processes import Started
from tests.support.tiny import environment

TABLES = sorted(path.stem for path in experiments.ARMS.glob("*.json") if path.stem != experiments.SIZES)
SIZES = list(experiments.read_json(experiments.SIZES))


@pytest.mark.parametrize("table", TABLES)
def test_every_arm_is_a_configuration_that_differs_from_the_others(table: str, repo: Path) -> None:
    read = experiments.read_json(table)
    known = train_gpt.Config().as_env().keys() | {"CONFIG"}
    for size in read.get("sizes", SIZES):
        seen: list[dict[str, str]] = []
        for name, arm in experiments.read_arms(read, size).items():
            assert arm.settings.keys() <= known, f"{name}: {arm.settings.keys() - known}"
            settings = dict(arm.settings)
            if "CONFIG" in settings:
                settings["CONFIG"] = str(repo / settings["CONFIG"])
            config = train_gpt.Config.from_env({**settings, "VOCAB_SIZE": "1024"})
            train_gpt.micro_steps_per_step(config, 1)
            seen.append(config.as_env())
        assert all(one not in seen[:at] for at, one in enumerate(seen)), f"two arms of {size} are alike"


def test_budgets_are_of_training_and_arms_have_the_geometry(repo: Path) -> None:
    arms = experiments.read_arms(experiments.read_json("ablation"), "4x64")
    default, baseline = arms["default stack"].settings, arms["upstream_baseline"].settings
    assert default["XSA_LAST_N"] == "4" and "XSA_LAST_N" not in baseline
    assert default["MODEL_DIM"] == baseline["MODEL_DIM"] == "64"
    with pytest.raises(ExperimentError, match="--size 9x9: expected one of 4x64"):
        experiments.read_arms(experiments.read_json("ablation"), "9x9")
    values = environment()
    assert Budget(steps=7).settings(values)["ITERATIONS"] == "7"
    for given in (values, {**values, "GPTQ": "0"}):
        by_clock = train_gpt.Config.from_env({**given, **Budget(seconds=5).settings(given)})
        assert train_gpt.run_progress(2.5, 10, by_clock) == pytest.approx(0.5)


def test_equal_operations_are_more_steps_of_a_smaller_model() -> None:
    """Six operations for each weight of a matrix and token: two forward, four backward."""
    values = environment(NUM_LOOPS="1", LOOP_START="0", LOOP_END="0", ENABLE_LOOPING_AT="0.25")
    config = train_gpt.Config.from_env(values)
    plain = experiments.flop_of_step(config, looping=False)
    looped = experiments.flop_of_step(config, looping=True)
    table = train_gpt.parameter_table(config)
    gates = config.num_layers * config.num_heads * config.gate_window
    products = gates + sum(math.prod(one.shape) for one in table.values() if one.quantize_as)
    assert plain == 6 * products * config.train_batch_tokens
    assert plain < looped < 2 * plain
    # A quarter of the steps has no extra pass.
    assert experiments.steps_of(100 * (plain + 3 * looped) / 4, config) == 100
    budget = Budget(tflop=1e-12 * 7 * plain)
    assert budget.settings({**values, "NUM_LOOPS": "0"})["ITERATIONS"] == "7"


class Fake:
    """In the place of the script: says what it was started with, and fails where it is told to."""

    def __init__(self) -> None:
        self.started: list[tuple[str, str]] = []
        self.settings: dict[tuple[str, str], dict[str, str]] = {}
        self.fails: set[str] = set()

    def __call__(self, script: Path, settings: dict[str, str], directory: Path) -> dict[str, Any]:
        key = (settings["NAME"], settings["SEED"])
        self.started.append(key)
        self.settings[key] = settings
        if settings["NAME"] in self.fails:
            raise ExperimentError("it broke")
        score = 2.0 + 0.1 * len(settings["NAME"]) + 0.01 * int(settings["SEED"])
        return {
            "seed": int(settings["SEED"]), "parameters": 1000, "dtype": "float32", "steps": 5, "seconds": 1.0,
            "stream_hash": "0", "eval_seconds": 0.0, "bytes": 900, "code_bytes": 60, "val_targets": 99,
            "scores": {"roundtrip": score},
        }  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(experiments, "run_script", made)
    return made


def arm(name: str, **more: str) -> Arm:
    return Arm({"NAME": name, "COMPUTE_DTYPE": "float32"}, **more)


def test_runs_are_measured_once_seeds_first_and_a_claimed_one_by_another(fake: Fake, tmp_path: Path) -> None:
    arms = {"a row": arm("a"), "other": arm("bb")}
    mine = Experiment(tmp_path, arms, Budget(steps=5), {})
    with experiments.claimed(mine.record_path("other", 1)) as claim:  # as another process that is at it
        assert claim
        mine.share(list(arms), [1, 2])
    assert fake.started == [("a", "1"), ("a", "2"), ("bb", "2")]
    mine.share(list(arms), [1, 2])
    assert fake.started[3:] == [("bb", "1")]
    rows = mine.rows()
    assert [run["seed"] for run in rows["a row"]] == [1, 2] == [run["seed"] for run in rows["other"]]
    kept = json.loads((tmp_path / "a-row-seed1.json").read_text())
    named = {"commit", "script", "program", "processor", "dtype", "threads", "load"}
    assert named <= kept["conditions"].keys()


def test_what_fails_or_differs_costs_the_others_nothing(fake: Fake, tmp_path: Path) -> None:
    fake.fails.add("a")
    arms = {"one": arm("a"), "two": arm("bb"), "of it": arm("a", of="one")}
    mine = Experiment(tmp_path, arms, Budget(5), {})
    mine.share(["one", "two", "of it"], [1])
    assert mine.failed == ["one, seed 1"] and list(mine.rows()) == ["two"]
    fake.fails.clear()
    again = tmp_path / "again"
    Experiment(again, {"a": arm("a"), "b": arm("b")}, Budget(5), {}).share(["a", "b"], [1])
    other = Experiment(again, {"a": arm("a"), "b": arm("b")}, Budget(6), {})
    with pytest.raises(ExperimentError, match=r"has settings .*name another --runs"):
        other.share(["a"], [1])
    path = again / "b-seed1.json"
    path.write_text(path.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    with pytest.raises(ExperimentError, match="dtype is bfloat16 here and float32 there"):
        Experiment(again, {"a": arm("a"), "b": arm("b")}, Budget(5), {}).rows()


def test_an_artifact_has_as_many_bytes_for_weights_whatever_the_script(fake: Fake, tmp_path: Path) -> None:
    Experiment(tmp_path, {"plain": arm("a")}, Budget(5), {}, weight_bytes=100_000).share(["plain"], [1])
    for name, script in {"a": experiments.REPO / "train_gpt.py"}.items():
        config = train_gpt.Config.from_env(fake.settings[name, "1"])
        shipped = train_gpt.with_settings(train_gpt.shipped_code(script.read_bytes()), config)
        assert config.artifact_bytes_max - len(shipped) == 100_000


def test_the_tables_have_paired_differences_and_what_learning_gains(fake: Fake, tmp_path: Path) -> None:
    def record(seed: int, score: float) -> dict[str, Any]:
        about = {"parameters": 1000, "steps": 5, "seconds": 2.0, "bytes": 900, "val_targets": 99}
        scores = {"float": score, "sliding_window": score, "legal_ttt": score / 2}
        return {"seed": seed, **about, "scores": scores, "conditions": {"load": 1.0}}

    rows = {
        "base": [record(seed, 2.0 + seed) for seed in (1, 2, 3)],
        "better": [record(seed, 1.9 + seed + 0.001 * seed) for seed in (3, 2, 1)],
        "one": [record(1, 2.5)],
    }
    lines = experiments.score_table(rows, "float") + experiments.learning_table(rows)
    p = stats.ttest_rel([2.901, 3.902, 4.903], [3.0, 4.0, 5.0]).pvalue
    told = paired.told_p(p)
    assert p < 0.01 and f"| -0.0980 | 0.0006 | {told} | {told} | 3 |" in "\n".join(lines)
    assert "| one | 2.5000 | - | - | - | - | - | 1 |" in lines
    # The score of test-time training less that of the window: half of it here.
    assert lines[-2].startswith("| base | -2.0000 | 0.28868 | ")
    assert lines[-1].startswith("| better | -1.9510 |")

    assert paired.holm([0.01, 0.04, 0.02]) == pytest.approx([0.03, 0.04, 0.04])
    assert paired.holm([0.6, 0.5]) == [1.0, 1.0] and paired.holm([]) == []


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


def test_a_run_is_scored_once_more(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forked(command: list[str], env: dict[str, str], **_: Any) -> Any:
        ended = Started(env, tuple(command[2:]), tmp_path, "", Path(command[1])).wait()
        return types.SimpleNamespace(returncode=ended.status, stdout=ended.out, stderr=ended.err)

    # Where torch is loaded already.
    monkeypatch.setattr(experiments, "subprocess", types.SimpleNamespace(run=forked))
    monkeypatch.setenv("TTT_ENABLED", "1")  # what the shell has set reaches no arm
    base = {**environment(), **experiments.COMMON, "WARMUP_STEPS": "0"}
    arms = {"base": Arm(base), "windows": Arm({**base, "EVAL_STRIDE": "16"}, of="base")}
    places = {"DATA_PATH": str(dataset), "TOKENIZER_PATH": str(dataset / "tokenizer.model")}
    shared = {**places, "VAL_TOKENS_LIMIT": "300"}
    mine = Experiment(tmp_path, arms, Budget(steps=3), shared)
    mine.share(["base", "windows"], [1])
    rows = mine.rows()
    assert not mine.failed
    (trained,), (scored,) = rows["base"], rows["windows"]
    assert trained["scores"].keys() == {"float", "roundtrip"} and trained["steps"] == 3 == scored["steps"]
    assert scored["scores"].keys() == {"float", "roundtrip", "sliding_window"}
    assert scored["scores"]["float"] == trained["scores"]["float"]
    assert scored["scores"]["roundtrip"] == pytest.approx(trained["scores"]["roundtrip"], abs=1e-9)
    assert all(math.isfinite(score) for score in scored["scores"].values())
    assert trained["settings"]["DATA_PATH"] == dataset.name  # a record names no place of this machine
    assert trained["bytes"] == (tmp_path / "base-seed1" / "model.bin").stat().st_size
