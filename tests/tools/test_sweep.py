"""Many runs: their table, and sweeps that are killed, resumed, refused and stopped by a limit."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.runs import make_run
from tests.tools.conftest import Tool
from tools.__main__ import main

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
names = ("MATRIX_LR", "SEED", "ARTIFACT_BYTES_MAX")
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
log += [f"legal_ttt_exact val_loss:{2 * bpb:.8f} val_bpb:{bpb:.8f} scored_tokens:10 val_bytes:20"]
(run / "log.txt").write_text("\\n".join(log))
limit = int(env.get("ARTIFACT_BYTES_MAX", 300000))
limits = {"artifact_bytes": {"value": 200000, "limit": limit, "ok": limit >= 200000}}
(run / "summary.json").write_text(json.dumps({"exit": "finished", "limits": limits}))
"""
SWEEP = """# a comment
seeds: 1 2 3
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


def sweep(capfd: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Exit status, and what is printed after the last run."""
    status = main(["sweep", "rates.txt", *options])
    return status, capfd.readouterr().out


def test_a_sweep_killed_twice_ends_as_any_other(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert sweep(capfd, "--runs", "straight")[0] == 0
    straight = sweep(capfd, "--runs", "straight", "--table")[1]
    assert re.search(r"^low +3 +1\.52025 +\+0\.00025", straight, re.MULTILINE)
    assert re.search(r"^high +3 +1\.52100 +\+0\.00100", straight, re.MULTILINE)
    assert straight.count(" finished") == 9

    (place / "starts").unlink()
    (place / "die").write_text(json.dumps({"low-seed1": "checkpoint", "high-seed2": "nothing"}))
    assert sweep(capfd)[0] == 1
    assert "step 10, checkpoint" in sweep(capfd, "--table")[1]
    assert sweep(capfd)[0] == 1
    assert sweep(capfd)[0] == 0
    assert sweep(capfd, "--table")[1] == straight
    starts = (place / "starts").read_text().splitlines()
    assert sorted(starts) == sorted(
        [f"{row}-seed{seed} begun" for row in ("base", "low", "high") for seed in (1, 2, 3)]
        + ["low-seed1 resumed", "high-seed2 begun"]
    )
    assert [path.name for path in (place / "runs/rates/stopped").iterdir()] == ["high-seed2.1"]
    # A row that was changed since its runs is refused.
    text = (place / "rates.txt").read_text()
    (place / "rates.txt").write_text(text.replace("low: MATRIX_LR=0.02", "low: MATRIX_LR=0.021"))
    assert main(["sweep", "rates.txt"]) == 2
    assert "MATRIX_LR=0.02, not 0.021" in capfd.readouterr().err


def test_a_limit_that_is_not_kept_stops_the_rest(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = (place / "rates.txt").read_text()
    (place / "rates.txt").write_text(text.replace("low: ", "low: ARTIFACT_BYTES_MAX=100000 "))
    for _ in range(2):
        assert main(["sweep", "rates.txt"]) == 1
        assert "low-seed1 did not keep its limits: artifact_bytes" in capfd.readouterr().err
    assert (place / "starts").read_text().split() == ["base-seed1", "begun", "low-seed1", "begun"]


@pytest.mark.parametrize(("before", "after", "message"), [
    ("low: ", "low: MATRIX_LRR=1 ", "did you mean MATRIX_LR?"),
    ("low: MATRIX_LR=0.02", "low: MATRIX_LR=x", "row low: MATRIX_LR='x'"),
    ("low: ", "low: SEED=4 ", "the sweep sets it"),
    ("low: ", "base: ", "a name that is there already"),
    ("low: ", "low ", "is no NAME: SETTING=VALUE"),
])  # fmt: skip
def test_a_file_with_a_mistake_starts_nothing(
    place: Path, capfd: pytest.CaptureFixture[str], before: str, after: str, message: str
) -> None:
    text = (place / "rates.txt").read_text()
    (place / "rates.txt").write_text(text.replace(before, after, 1))
    assert main(["sweep", "rates.txt"]) == 2
    assert message in capfd.readouterr().err
    assert not (place / "starts").exists()


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
    assert head.split() == ["run", "MATRIX_LR", "seed", "steps", "ms", "quantized", "windows", "ttt", "bytes",
                            "status"]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["run2", "run1", "stopped"]
    assert rows[0].endswith("finished") and rows[2].endswith("step 40")
    (row,) = json.loads(tool("runs", tmp_path, "--where", "MATRIX_LR=0.03", "--json"))
    assert row["seed"] == "2" and row["steps"] == 400 and row["scores"]["ttt"] == row["val_bpb"]
    tool("runs", tmp_path, "--where", "MATRIX_LR=7", status=2)
    make_run(tmp_path / "rates/low-seed1", 1)
    make_run(tmp_path / "rates/stopped/low-seed1.1", 1)
    rows = tool("runs", tmp_path).splitlines()[1:]  # runs of sweeps too, but none that began anew
    assert [row.split()[0] for row in rows] == ["rates/low-seed1", "run1", "run2", "stopped"]
