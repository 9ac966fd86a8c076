"""Many runs: their table, and sweeps that are killed, resumed, refused and stopped by a limit."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.processes import ROUNDED, Started
from tests.support.runs import make_run
from tests.support.tiny import environment
from tests.support.trainers import SUBPROCESS
from tests.tools.conftest import Tool
from tools.__main__ import main
from tools.compare import driver
from tools.compare.driver import scores_of
from tools.compare.rows import read_sweep
from tools.runs.runs import settings_of
from tools.runs.stats import paired

SWEEPS = Path(__file__).parents[2] / "benchmarks/sweeps"
# It trains nothing: a score is a function of MATRIX_LR and SEED. A run that the file `die` names ends early.
TRAINER = """
import json, os, pathlib, sys
env = os.environ
run = pathlib.Path(env.get("RESUME") or pathlib.Path(env["RUNS_DIR"], env["RUN_ID"]))
resumed = bool(env.get("RESUME"))
with open("starts", "a") as starts:
    starts.write(f"{run.name} {'resumed' if resumed else 'begun'}\\n")
if not resumed:
    run.mkdir(parents=True)
names = ("MATRIX_LR", "SEED", "ARTIFACT_BYTES_MAX", "TTT_LORA_LR", "NEW_THING")
(run / "config.env").write_text("".join(f"{name}={env[name]}\\n" for name in names if name in env))
log = ["step:10/400 train_loss:3.0000 train_time:500ms step_avg:50.00ms"]
die = pathlib.Path("die")
fate = json.loads(die.read_text()) if die.exists() else {}
if run.name in fate and not resumed:
    if fate.pop(run.name) == "checkpoint":
        (run / "checkpoint.pt").touch()
    die.write_text(json.dumps(fate))
    (run / "log.txt").write_text(log[0])
    sys.exit(137)
bpb = 1.5 + 10 * (float(env["MATRIX_LR"]) - 0.025) ** 2 + 0.01 * int(env["SEED"])
if env.get("EVAL_ONLY"):
    bpb = float(pathlib.Path(env["EVAL_ONLY"]).read_text()) - float(env["TTT_LORA_LR"])
bpb -= float(env.get("NEW_THING", 0))
(run / "model.bin").write_text(repr(bpb))
(run / "train_gpt.py").write_bytes(pathlib.Path(sys.argv[0]).read_bytes())
log += [f"legal_ttt_exact val_loss:{2 * bpb:.8f} val_bpb:{bpb:.8f} scored_tokens:10 val_bytes:20"]
(run / "log.txt").write_text("\\n".join(log))
limit = int(env.get("ARTIFACT_BYTES_MAX", 300000))
limits = {"artifact_bytes": {"value": 200000, "limit": limit, "ok": limit >= 200000}}
(run / "summary.json").write_text(json.dumps({"exit": "finished", "limits": limits}))
"""
SWEEP = """# a comment
seeds: 1 \\
    2 3
all: MATRIX_LR=0.025
base:
low: MATRIX_LR=0.02
high: MATRIX_LR=0.035
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a trainer and a sweep."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "rates.txt").write_text(f"start: {shlex.quote(sys.executable)} trainer.py\n{SWEEP}")
    return tmp_path


@pytest.fixture
def fast(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, where the trainer starts no process of its own."""
    monkeypatch.setattr(driver, "subprocess", SUBPROCESS)
    return place


def sweep(capfd: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Exit status, and what is printed after the last run."""
    status = main(["sweep", "rates.txt", *options])
    return status, capfd.readouterr().out


def test_a_sweep_killed_twice_ends_as_any_other(fast: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert sweep(capfd, "--runs", "straight")[0] == 0
    straight = sweep(capfd, "--runs", "straight", "--table")[1]
    assert re.search(r"^low +3 +1\.52025 +\+0\.00025", straight, re.MULTILINE)
    assert re.search(r"^high +3 +1\.52100 +\+0\.00100", straight, re.MULTILINE)
    assert straight.count(" finished") == 9

    (fast / "starts").unlink()
    (fast / "die").write_text(json.dumps({"low-seed1": "checkpoint", "high-seed2": "nothing"}))
    assert sweep(capfd)[0] == 1
    assert "step 10, checkpoint" in sweep(capfd, "--table")[1]
    assert sweep(capfd)[0] == 1
    assert sweep(capfd)[0] == 0
    assert sweep(capfd, "--table")[1] == straight
    starts = (fast / "starts").read_text().splitlines()
    assert sorted(starts) == sorted(
        [f"{row}-seed{seed} begun" for row in ("base", "low", "high") for seed in (1, 2, 3)]
        + ["low-seed1 resumed", "high-seed2 begun"]
    )
    assert [path.name for path in (fast / "runs/rates/stopped").iterdir()] == ["high-seed2.1"]
    # A row that was changed since its runs is refused.
    text = (fast / "rates.txt").read_text()
    (fast / "rates.txt").write_text(text.replace("low: MATRIX_LR=0.02", "low: MATRIX_LR=0.021"))
    assert main(["sweep", "rates.txt"]) == 2
    assert "MATRIX_LR=0.02, not 0.021" in capfd.readouterr().err


def test_a_folder_is_in_use_until_the_last_run_in_it_has_ended(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where the driver that started it was killed."""
    with driver.locked(place / "runs/rates", "rates"):
        run = subprocess.Popen(["sleep", "60"], close_fds=False)  # as `driver.start` does
    try:
        assert main(["sweep", "rates.txt"]) == 2 and "wait for it" in capfd.readouterr().err
    finally:
        run.kill()
        run.wait()
    with driver.locked(place / "runs/rates", "rates"):
        pass


def test_a_limit_that_is_not_kept_stops_the_rest(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = (place / "rates.txt").read_text()
    (place / "rates.txt").write_text(text.replace("low: ", "low: ARTIFACT_BYTES_MAX=100000 "))
    for _ in range(2):
        assert main(["sweep", "rates.txt"]) == 1
        assert "low-seed1 exceeded its limits: artifact_bytes" in capfd.readouterr().err
    assert (place / "starts").read_text().split() == ["base-seed1", "begun", "low-seed1", "begun"]


def add_rows(place: Path, lines: str) -> None:
    """More lines at the end of the sweep."""
    with (place / "rates.txt").open("a") as file:
        file.write(lines)


# A fork of the script: it has a setting that ours lacks.
FORK = """
from dataclasses import dataclass
import train_gpt

@dataclass(frozen=True)
class Config(train_gpt.Config):
    new_thing: float = train_gpt.setting(0.0, "a technique")
"""


def test_a_row_may_have_a_script_and_another_may_score_its_artifacts_again(
    fast: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trains = "".join(f"    {line}\n" for line in TRAINER.splitlines())
    (fast / "fork.py").write_text(f"if __name__ == '__main__':\n{trains}    sys.exit()\n{FORK}")
    add_rows(fast, "fork: script=fork.py NEW_THING=0.1\nadapters: of=fork TTT_LORA_LR=0.002\n")
    status, printed = sweep(capfd)
    assert status == 0
    # The fork gains 0.1 over the base; the other row scores the fork's artifacts, which it does not train.
    assert re.search(r"^fork +3 +1\.42000 +-0\.10000 +-0\.10000 to -0\.10000", printed, re.MULTILINE)
    assert re.search(r"^adapters +3 +1\.31800 +-0\.20200 ", printed, re.MULTILINE)
    assert "warning" not in printed
    folder = fast / "runs/rates"
    base, fork = ((folder / f"{row}-seed1/train_gpt.py").read_text() for row in ("base", "fork"))
    assert "class Config" in fork and "class Config" not in base
    assert settings_of(folder / "adapters-seed2/config.env")["NEW_THING"] == "0.1"
    # Finished rows of all kinds are skipped; a script that has changed between two seeds is said.
    (fast / "starts").unlink()
    (fast / "fork.py").write_text((fast / "fork.py").read_text() + "# changed\n")
    add_rows(fast, "slower: of=fork TTT_LORA_LR=0.001\n")
    printed = sweep(capfd)[1]
    begun = (fast / "starts").read_text().splitlines()
    assert begun == [f"slower-seed{seed} begun" for seed in (1, 2, 3)]
    assert re.search(r"^warning: fork\.py changed between these runs: versions \w+, \w+$", printed, re.M)
    # An artifact that was made again since is not the one that was scored.
    summary = folder / "slower-seed1/summary.json"
    written = json.loads(summary.read_text())
    summary.write_text(json.dumps({**written, "artifact": {"sha256": "0" * 64}}))
    assert main(["sweep", "rates.txt"]) == 2
    told = capfd.readouterr().err
    assert "slower-seed1 has scored another model.bin than runs/rates/fork-seed1 has now" in told


def test_what_an_edited_script_would_score_is_not_taken_from_before(
    fast: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A comment is no edit, and a row may keep the version that it had."""
    trains = "".join(f"    {line}\n" for line in TRAINER.splitlines())
    (fast / "fork.py").write_text(f"if __name__ == '__main__':\n{trains}    sys.exit()\n{FORK}")
    text = (fast / "rates.txt").read_text()
    (fast / "rates.txt").write_text(text.replace("trainer.py", "fork.py"))
    assert sweep(capfd)[0] == 0
    begun = (fast / "starts").read_text()
    (fast / "fork.py").write_text((fast / "fork.py").read_text() + "# a comment\n")
    assert sweep(capfd)[0] == 0
    (fast / "fork.py").write_text((fast / "fork.py").read_text().replace("bpb = 1.5 +", "bpb = 1.4 +"))
    assert main(["sweep", "rates.txt"]) == 2
    told = capfd.readouterr().err
    assert "runs/rates/base-seed1 is a run of another version of fork.py" in told
    assert (fast / "starts").read_text() == begun
    pinned = re.search(r"script=\S+", told)
    assert pinned is not None
    for row in ("base", "low", "high"):
        text = (fast / "rates.txt").read_text()
        (fast / "rates.txt").write_text(text.replace(f"{row}:", f"{row}: {pinned[0]}"))
    add_rows(fast, "edited: MATRIX_LR=0.025\n")
    status, printed = sweep(capfd)
    assert status == 0 and re.search(r"^edited +3 +1\.42000 +-0\.10000", printed, re.MULTILINE)


def test_runs_of_another_machine_or_other_data_are_named(
    fast: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "warning" not in sweep(capfd)[1]
    for seed in (1, 2):
        for row in ("base", "low"):
            other_data = {"data": {"hashes": {"shards": seed}}}
            said = {"hardware": {"device": f"CPU {seed}"}} if row == "base" else other_data
            path = fast / f"runs/rates/{row}-seed{seed}/summary.json"
            path.write_text(json.dumps({"exit": "finished", **said}))
            with path.with_name("log.txt").open("a") as log:
                log.write(f"\nval_loader:x tokens:4 bytes:{seed}\nvalidation: your own\n")
    printed = sweep(capfd, "--table")[1]
    assert "validation sets cannot be compared: your own (1 bytes), your own (2 bytes)" in printed
    assert "warning: the runs of low did not read the same shards" in printed
    assert "warning: these runs ran under different conditions: device CPU 1 and CPU 2" in printed


def test_settings_of_the_shell_reach_every_row_and_are_compared(
    fast: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would make each run another one, as RESUME, does not."""
    monkeypatch.setenv("ARTIFACT_BYTES_MAX", "250000")
    monkeypatch.setenv("MATRIX_LR", "1")
    monkeypatch.setenv("RESUME", "elsewhere")
    assert sweep(capfd)[0] == 0
    written = settings_of(fast / "runs/rates/low-seed3/config.env")
    assert (written["ARTIFACT_BYTES_MAX"], written["MATRIX_LR"]) == ("250000", "0.02")
    monkeypatch.setenv("ARTIFACT_BYTES_MAX", "260000")
    assert main(["sweep", "rates.txt"]) == 2
    assert "ARTIFACT_BYTES_MAX=250000, not 260000" in capfd.readouterr().err


def test_a_folder_that_is_named_holds_the_runs_beside_others(
    fast: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `make seeds` wants it: runs of other names are no part of its table."""
    make_run(fast / "runs/other", 1)
    status, printed = sweep(capfd, "--folder", "runs")
    assert status == 0 and (fast / "runs/base-seed3/summary.json").is_file()
    assert printed.count(" finished") == 9 and not re.search(r"^other ", printed, re.MULTILINE)


@pytest.mark.parametrize(("before", "after", "message"), [
    ("low: ", "low: MATRIX_LRR=1 ", "did you mean MATRIX_LR?"),
    ("low: MATRIX_LR=0.02", "low: MATRIX_LR=x", "row low: MATRIX_LR='x'"),
    ("low: ", "low: SEED=4 ", "is set automatically for each run"),
    ("low: ", "base: ", "a name that is already taken"),
    ("low: ", "low ", "is not NAME: SETTING=VALUE"),
    ("low: ", "low: of=high ", "expected the name of a row above it: base"),
    ("high: ", "again: of=base\nhigh: of=again ", "that row trains nothing; name base"),
    ("low: ", "low: script=none.py ", "none.py: no such script"),
    ("low: ", "low: script=trainer.py ", "trainer.py has no class Config"),
    ("low: ", "low: NEW_THING=1 ", "NEW_THING is not a setting"),
    ("    2 3", "    2 1", "expected each seed once"),
    ("0.035\n", "0.035 \\\n", "its last line ends with a backslash"),
])
def test_a_file_with_a_mistake_starts_nothing(
    place: Path, capfd: pytest.CaptureFixture[str], before: str, after: str, message: str
) -> None:
    text = (place / "rates.txt").read_text()
    (place / "rates.txt").write_text(text.replace(before, after, 1))
    assert main(["sweep", "rates.txt"]) == 2
    assert message in capfd.readouterr().err
    assert not (place / "starts").exists()


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.sweep")), ids=lambda path: path.stem)
def test_the_rows_of_a_sweep_of_ours_differ(path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo)
    rows = read_sweep(path, {}).rows
    assert len(rows) > 1
    configurations = {str(row.config("1").as_env()) for row in rows.values()}
    assert len(configurations) == len(rows)


def test_an_artifact_of_the_script_is_scored_again(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real script, where torch is loaded already."""

    def forked(command: Sequence[str], variables: dict[str, str], _quiet: bool = False) -> int:
        return Started({**os.environ, **variables}, (), tmp_path, "", Path(command[-1])).wait().status

    monkeypatch.setattr(driver, "start", forked)
    places = {"DATA_PATH": dataset, "TOKENIZER_PATH": dataset / "tokenizer.model", "VAL_TOKENS_LIMIT": 300}
    length = {"MAX_WALLCLOCK_SECONDS": 0, "ITERATIONS": 2, "WARMUP_STEPS": 0}
    settings = environment(**places, **length, **ROUNDED)
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    (tmp_path / "two.sweep").write_text(f"seeds: 1\nall: {words}\nbase:\nwindows: of=base EVAL_STRIDE=16\n")
    sweep = read_sweep(tmp_path / "two.sweep", {})
    for _ in range(2):  # the second time both are there
        for row in sweep.rows.values():
            assert driver.run_once(row, "1", tmp_path / "runs") == ""
    trained, scored = (scores_of(tmp_path / f"runs/{name}-seed1") for name in ("base", "windows"))
    assert trained.keys() == {"before quantization", "quantized"}
    assert scored.keys() == {"quantized", "sliding window"}
    assert scored["quantized"] == pytest.approx(trained["quantized"], abs=1e-9)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["base-seed1", "windows-seed1"]


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.floats(0.5, 3.0)] * 2), min_size=2, max_size=8))
def test_a_paired_comparison_is_the_paired_t_test_of_scipy(scores: list[tuple[float, float]]) -> None:
    new = {str(seed): pair[0] for seed, pair in enumerate(scores)}
    base = {str(seed): pair[1] for seed, pair in reversed([*enumerate(scores)])}
    found = paired({**new, "only here": 9.0}, {**base, "only there": 0.0})
    gaps = np.subtract(*np.transpose(scores))
    assert found is not None and found.seeds_new == len(scores)
    assert found.difference == pytest.approx(gaps.mean(), abs=1e-12)
    assert found.error == pytest.approx(scipy.stats.sem(gaps), rel=1e-6, abs=1e-12)
    assert found.error is not None and found.interval is not None
    if found.error < 1e-9:  # all alike but for rounding
        assert found.interval == pytest.approx((found.difference, found.difference))
        return
    assert found.p is not None
    assert found.p == pytest.approx(scipy.stats.ttest_rel(*np.transpose(scores)).pvalue, rel=1e-6)
    half = scipy.stats.t.ppf(0.975, len(scores) - 1) * found.error
    assert found.interval == pytest.approx((found.difference - half, found.difference + half))
    # The interval is without zero where p is below 0.05.
    assert (found.p < 0.05) == (found.interval[0] > 0 or found.interval[1] < 0)


def test_one_pair_has_a_difference_and_no_test() -> None:
    assert paired({"1": 2.0}, {"2": 1.0}) is None
    found = paired({"1": 2.0, "3": 1.0}, {"1": 1.5})
    assert found is not None and (found.seeds_new, found.difference) == (1, 0.5)
    assert found.error is found.interval is found.p is None


def test_runs_is_one_table(tmp_path: Path, tool: Tool) -> None:
    for seed, rate in ((1, "0.02"), (2, "0.03")):
        make_run(tmp_path / f"run{seed}", seed, config={"MATRIX_LR": rate}, gain=0.01 * seed)
    stopped = make_run(tmp_path / "stopped", 3)
    (stopped / "summary.json").unlink()
    (stopped / "model.bin").unlink()
    lines = (stopped / "log.txt").read_text().splitlines()
    until = next(number for number, line in enumerate(lines) if line.startswith("step:40/"))
    (stopped / "log.txt").write_text("\n".join(lines[: until + 1]))
    head, *rows = tool("runs", tmp_path, "--sort", "val_bpb").splitlines()
    heads = ["run", "bpb", "quantized", "windows", "seed", "steps", "ms/step", "bytes", "status", "settings"]
    assert head.split() == heads
    assert [row.split()[0] for row in rows] == ["run2", "run1", "stopped"]
    assert [row.split()[-1] for row in rows] == ["MATRIX_LR=0.03", "MATRIX_LR=0.02", "MATRIX_LR=0.02"]
    assert " finished " in rows[0] and " step 40 " in rows[2]
    (row,) = json.loads(tool("runs", tmp_path, "--where", "MATRIX_LR=0.03", "--json"))
    assert row["seed"] == "2" and row["steps"] == 400 and row["scores"]["ttt"] == row["val_bpb"]
    tool("runs", tmp_path, "--where", "MATRIX_LR=7", status=2)
    make_run(tmp_path / "rates/low-seed1", 1)
    make_run(tmp_path / "rates/stopped/low-seed1.1", 1)
    rows = tool("runs", tmp_path).splitlines()[1:]  # runs of sweeps too, but none that began anew
    assert [row.split()[0] for row in rows] == ["rates/low-seed1", "run1", "run2", "stopped"]


def test_a_table_of_runs_fits_a_terminal_and_loses_no_setting(tmp_path: Path, tool: Tool) -> None:
    for seed in (1, 2):
        config = {f"A_LONG_NAME_{number}": str(seed * number) for number in range(1, 12)}
        make_run(tmp_path / f"a_run_whose_name_is_longer_than_the_table_can_show_{seed}", seed, config=config)
    changes = {"summary_changes": {"config": {"EVAL_ONLY": "runs/first/model.bin"}}}
    make_run(tmp_path / "scored", 3, **changes)
    text = tool("runs", tmp_path)
    assert max(map(len, text.splitlines())) <= 120
    assert all(f"A_LONG_NAME_{number}={2 * number}" in text for number in range(1, 12))
    assert " scored first again" in text


def test_a_stopped_run_is_kept_whatever_was_removed_before(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / "run").mkdir()
        (tmp_path / f"run/{number}").touch()
        driver.keep_aside(tmp_path / "run")
        if number == 2:
            shutil.rmtree(tmp_path / "stopped/run.1")
    assert sorted(path.name for path in tmp_path.glob("stopped/*/*")) == ["2", "3"]
