"""`try`: verdicts on planted changes, kills, refusals, and what it remembers from one try to the next."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import train_gpt
from tests.support.processes import Started
from tests.support.tiny import environment
from tests.support.trainers import SUBPROCESS
from tools import REPO
from tools.__main__ import main
from tools.compare import driver, history, judge, sides, trial
from tools.compare.sequential import DROP, KEEP, UNDECIDED
from tools.runs.errors import RecordError

# It trains nothing: a score is a function of MATRIX_LR, SEED and GAIN, with noise of the first two.
SCRIPT = '''
"""A version of train_gpt.py."""
GAIN = 0.0
COUNTED = 9
# ============
# EVALUATION — every target is scored once.
# ============


def evaluate(bpb):
    """The score."""
    return bpb


# ============
# QUANTIZE — the end.
# ============
if __name__ == "__main__":
    import json, os, pathlib, random, sys, time
    env = os.environ
    run = pathlib.Path(env.get("RESUME") or pathlib.Path(env["RUNS_DIR"], env["RUN_ID"]))
    with open("starts", "a") as starts:
        starts.write(run.name + " ")
    run.mkdir(parents=True, exist_ok=True)
    rate = float(env["MATRIX_LR"])
    (run / "config.env").write_text("".join(f"{name}={env[name]}\\n" for name in ("MATRIX_LR", "SEED")))
    if run.name == env.get("TEST_SLEEPS") and not pathlib.Path("slept").exists():
        pathlib.Path("slept").touch()
        time.sleep(60)
    if run.name == env.get("TEST_FAILS"):
        sys.exit(3)
    noise = 0 if rate == 0.025 else random.Random(f"{rate} {env['SEED']}").gauss(0, 0.001)
    bpb = evaluate(1.5 + (0.025 - rate) + 0.01 * int(env["SEED"]) + noise - GAIN)
    (run / "train_gpt.py").write_bytes(pathlib.Path(sys.argv[0]).read_bytes())
    log = ["step:10/400 train_loss:3.0000 train_time:500ms step_avg:50.00ms",
           f"final_int6_roundtrip_exact val_loss:{2 * bpb:.8f} val_bpb:{bpb:.8f} scored_tokens:9 val_bytes:"
           f"{COUNTED}"]
    if env["SEED"] in env.get("TEST_SLOW", ""):
        log += ["warning: legal_ttt continues without training: 9.0s of 9.0s are used, the rest needs 9s"]
    if "TEST_TRAINED" in env:
        trained = eval(env["TEST_TRAINED"], {"bpb": bpb})
        log += [f"DIAGNOSTIC final val_loss:{2 * trained:.4f} val_bpb:{trained:.4f} train_time:500ms"]
    if env["SEED"] in env.get("TEST_LEARNS", ""):
        log += [log[1].replace("final_int6_roundtrip", "legal_ttt")]
    (run / "log.txt").write_text("\\n".join(log))
    hardware = {"device": env.get("TEST_DEVICE", "CPU"), "threads": 2}
    ok = "TEST_OVER" not in env
    limits = {"artifact_bytes": {"value": 200000, "limit": 300000, "ok": ok}}
    summary = {"exit": "finished", "limits": limits, "hardware": hardware, "stream_hash": env["SEED"]}
    (run / "summary.json").write_text(json.dumps(summary))
    sys.exit()

from dataclasses import dataclass
import train_gpt

@dataclass(frozen=True)
class Config(train_gpt.Config):
    new_thing: float = train_gpt.setting(0.0, "a technique")
'''
BUDGET = """ITERATIONS=10
MATRIX_LR=0.025
TTT_ENABLED=0
EVAL_STRIDE=0
DATA_PATH=data
TOKENIZER_PATH=pieces
"""

Try = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script, which is its own base, a budget, and something to be scored on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.py").write_text(SCRIPT)
    (tmp_path / "budget.env").write_text(BUDGET)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/fineweb_val_000000.bin").write_bytes(b"text")
    (tmp_path / "pieces").write_bytes(b"tokenizer")
    return tmp_path


def command(*words: str) -> list[str]:
    return ["try", "--base", "base.py", "--script", "base.py", "--config", "budget.env", *words]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script starts no process of its own."""
    monkeypatch.setattr(driver, "subprocess", SUBPROCESS)


@pytest.fixture
def try_it(place: Path, capfd: pytest.CaptureFixture[str]) -> Try:
    """Runs the verb. Returns its exit status and what it prints, errors last."""

    def run(*words: str) -> tuple[int, list[str]]:
        status = main(command(*words))
        printed = capfd.readouterr()
        return status, (printed.out if status != 2 else printed.err).splitlines()

    return run


@pytest.mark.parametrize(("rate", "word", "status", "why"), [
    ("0.05", KEEP, 0, "it gains; new − base -0.02"), ("0.015", DROP, 1, "it hurts; new − base +0.01"),
    ("0.0251", UNDECIDED, 3, "about "),
])
@pytest.mark.usefixtures("fast")
def test_a_planted_change_gets_its_verdict(
    rate: str, word: str, status: int, why: str, try_it: Try, place: Path
) -> None:
    ended, lines = try_it(f"MATRIX_LR={rate}", "--seeds", "6", "--useful", "0")
    assert ended == status and lines[-1].startswith(f"{word}: {why}")
    pairs = 6 if word == UNDECIDED else 4
    assert f"two-sided paired t-test, {pairs} seeds" in lines[-1] and "50.0 → 50.0 ms/step" in lines[-1]
    starts = (place / "starts").read_text().split()
    assert starts[:4] == ["base-seed1337", "new-seed1337", "new-seed1338", "base-seed1338"]  # in turns
    assert len(starts) == 2 * pairs
    # Asked again, it only looks; with more seeds it goes on.
    assert try_it(f"MATRIX_LR={rate}", "--seeds", "6", "--useful", "0")[1][-1] == lines[-1]
    try_it(f"MATRIX_LR={rate}", "--seeds", "7", "--useful", "0")
    assert len((place / "starts").read_text().split()) == (14 if word == UNDECIDED else 2 * pairs)
    assert history.tries_of_today(place / "runs/try") == 1


@pytest.mark.usefixtures("fast")
def test_a_comment_changes_nothing_and_it_says_so_early(try_it: Try, place: Path) -> None:
    (place / "edited.py").write_text(SCRIPT.replace("GAIN = 0.0", "GAIN = 0.0  # a comment"))
    status, lines = try_it("--script", "edited.py")
    assert status == 3 and lines[-1].startswith("undecided: both sides score the same to the last digit")
    assert len((place / "starts").read_text().split()) == 8


@pytest.mark.usefixtures("fast")
def test_what_the_shell_sets_is_for_both_sides_and_named(
    try_it: Try, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATRIX_LR", "0.02")
    _, lines = try_it("NEW_THING=1", "--seeds", "1")
    assert "from the shell, for both sides: MATRIX_LR=0.02" in lines
    status, lines = try_it()
    assert status == 2 and "MATRIX_LR=0.02 of the shell is for both sides: write it after try" in lines[-1]
    # And a base that does not know it is no reason to guess another name.
    monkeypatch.setattr(trial, "config_class", lambda _: lambda: SimpleNamespace(as_env=dict))
    with pytest.raises(RecordError, match="set both sides, so write it after try: MATRIX_LR=VALUE"):
        trial.refuse_unknown({"MATRIX_LR": "0.02"}, Path("base.py"), "main")


def test_at_equal_time_no_number_of_steps_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = tmp_path / "budget.env"
    budget.write_text("ITERATIONS=300\nMAX_WALLCLOCK_SECONDS=60\n")
    by_seconds = sides.budget_of(budget, "seconds")
    assert by_seconds.settings["MAX_WALLCLOCK_SECONDS"] == "60" and not by_seconds.unused
    assert int(by_seconds.settings["ITERATIONS"]) > 10_000
    by_steps = sides.budget_of(budget, "steps")
    assert by_steps.settings == {"ITERATIONS": "300", "MAX_WALLCLOCK_SECONDS": "0"}
    assert by_steps.unused == ["MAX_WALLCLOCK_SECONDS=60 is not used: at equal steps, runs have no limit"]
    # That of the shell neither.
    monkeypatch.setenv("ITERATIONS", "7")
    by_seconds = sides.budget_of(budget, "seconds")
    assert int(by_seconds.settings["ITERATIONS"]) > 10_000
    assert "ITERATIONS=7 is not used" in by_seconds.unused[0]
    # Then the tokens of a step are one's own choice.
    configs = [train_gpt.Config(train_batch_tokens=2**n, max_wallclock_seconds=60) for n in (18, 19)]
    assert judge.setting_changes(*configs) == []


@pytest.mark.usefixtures("fast")
def test_a_setting_of_the_shell_reaches_both_sides_or_none(
    try_it: Try, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that only the edited script knows."""
    (place / "edited.py").write_text(SCRIPT.replace("    new_thing: float", "    newer: float"))
    monkeypatch.setenv("NEWER", "1")
    status, lines = try_it("--script", "edited.py")
    assert status == 2 and "NEWER=1 of the shell is a setting that only edited.py has" in lines[-1]
    assert not (place / "starts").exists()


@pytest.mark.usefixtures("fast")
def test_what_a_try_sets_itself_is_not_taken_from_elsewhere_in_silence(
    try_it: Try, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEED", "7")
    (place / "budget.env").write_text(BUDGET + "RUN_ID=mine\n")
    _, lines = try_it("MATRIX_LR=0.05", "--seeds", "1")
    notes = [line for line in lines if line.startswith("note: ")]
    assert "RUN_ID=mine of budget.env is not used" in notes[0]
    assert "SEED=7 of the shell is not used" in notes[1]


@pytest.mark.usefixtures("fast")
def test_a_clock_that_changes_scores_is_told(
    try_it: Try, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_SLOW", "1338")
    _, lines = try_it("MATRIX_LR=0.05", "--seeds", "2")
    (note,) = [line for line in lines if line.startswith("note: ")]
    assert note.startswith("note: the clock ended test-time training early in base-seed1338, new-seed1338: ")
    slow = next(place.glob("runs/try/*/new-seed1338"))
    assert main(["diff", str(slow.with_name("new-seed1337")), str(slow)]) == 0
    assert "training early in new-seed1338: the score depends on" in capfd.readouterr().out
    # The folder of all runs is where the environment says.
    monkeypatch.setenv("RUNS_DIR", str(slow.parent))
    assert main(["runs"]) == 0
    assert capfd.readouterr().out.count(" finished, learning stopped early") == 2


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(("trained", "told"), [("1.5", True), ("bpb", False)])
def test_a_change_that_training_did_not_feel_is_told(
    trained: str, told: bool, try_it: Try, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As cautious weight decay where the decay is 0: only the bytes that its code takes move the score."""
    monkeypatch.setenv("TEST_TRAINED", trained)
    _, lines = try_it("MATRIX_LR=0.05", "--seeds", "2")
    notes = [line for line in lines if line.startswith("note: with each seed both sides score the same")]
    assert len(notes) == told


@pytest.mark.usefixtures("fast")
def test_pairs_of_two_kinds_of_score_are_no_series(try_it: Try, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_LEARNS", "1337 1338")
    status, lines = try_it("MATRIX_LR=0.05", "--seeds", "3")
    assert status == 2
    assert "is after test-time training with seed 1337, and after quantized with seed 1339" in lines[-1]


@pytest.mark.usefixtures("fast")
def test_a_change_that_counts_more_bytes_is_no_gain(try_it: Try, place: Path) -> None:
    """Though it left the scoring code alone."""
    (place / "edited.py").write_text(SCRIPT.replace("COUNTED = 9", "COUNTED = 10"))
    status, lines = try_it("--script", "edited.py")
    assert status == 2
    assert "did not score the same text (9 tokens of 9 bytes against 9 tokens of 10 bytes)" in lines[-1]


def test_a_sample_that_was_interrupted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(trial.sample, "main", lambda _: made.append(1) or len(made) - 1)
    monkeypatch.setattr(trial, "find_path", Path)
    folder = tmp_path / "sample_sp1024"
    folder.mkdir()
    (folder / "fineweb_train_000000.bin").touch()
    trial.make_sample({"DATA_PATH": str(folder)})
    with pytest.raises(RecordError, match="could not be made"):
        trial.make_sample({"DATA_PATH": str(folder)})
    (folder / "manifest.json").touch()
    trial.make_sample({"DATA_PATH": str(folder)})
    assert len(made) == 2


@pytest.mark.usefixtures("fast")
def test_other_data_are_another_try(try_it: Try, place: Path) -> None:
    """Whatever of it is scored, read or counted: pairs of both would be mixed."""
    (place / "data/fineweb_train_000000.bin").write_bytes(b"train")
    names = set()
    for path in (None, "data/fineweb_train_000001.bin", "data/fineweb_val_000000.bin", "pieces"):
        if path:
            (place / path).write_bytes(b"anew")
        try_it("MATRIX_LR=0.05", "--seeds", "1")
        names.add(json.loads((place / "runs/try/log.jsonl").read_text().splitlines()[-1])["name"])
    assert len(names) == 4 and len((place / "starts").read_text().split()) == 8


@pytest.mark.slow
def test_a_killed_try_ends_with_the_same_table(try_it: Try, place: Path) -> None:
    """Killed for good while a run is under way, which ends with it; nothing of it counts."""
    ended, straight = try_it("MATRIX_LR=0.0251", "--seeds", "4", "--runs", "straight")
    environ = {**os.environ, "TEST_SLEEPS": "new-seed1338", "PYTHONPATH": str(REPO)}
    words = [sys.executable, "-m", "tools", *command("MATRIX_LR=0.0251", "--seeds", "4")]
    process = subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL)
    while not (place / "slept").exists():
        assert process.poll() is None
        time.sleep(0.05)
    status, lines = try_it("MATRIX_LR=0.0251", "--seeds", "4")
    assert status == 2 and "wait for it" in lines[-1]
    process.send_signal(signal.SIGKILL)
    process.wait()
    while status == 2:  # until the run that it left has got the signal
        status, lines = try_it("MATRIX_LR=0.0251", "--seeds", "4")
    assert status == ended
    assert lines[3:] == straight[3:]
    assert [path.name for path in (place / "runs/try").glob("*/stopped/*")] == ["new-seed1338.1"]


@pytest.mark.usefixtures("fast")
def test_the_next_try_knows_what_pairs_can_show_and_what_was_kept(try_it: Try, place: Path) -> None:
    assert "not known yet" in try_it("MATRIX_LR=0.05")[1][2]
    shown = re.search(r"deviation of (0\.00\d+) here \(4 earlier pairs, .* 4 pairs (\S+), 6 pairs (\S+),",
                      try_it("MATRIX_LR=0.06", "--seeds", "1")[1][2])
    assert shown is not None and float(shown[3]) < float(shown[2]) < 10 * float(shown[1])
    # Another budget scatters otherwise.
    (place / "longer.env").write_text(BUDGET.replace("ITERATIONS=10", "ITERATIONS=11"))
    assert "not known yet" in try_it("MATRIX_LR=0.05", "--config", "longer.env", "--seeds", "1")[1][2]
    # What was kept is the next base, with its settings; the others of the day do not matter.
    status, lines = try_it("NEW_THING=1", "--base", "keep", "--seeds", "1")
    assert status == 3 and "the last one kept" in lines[0] and "MATRIX_LR" not in lines[0]
    (row,) = [line for line in lines if line.startswith("1337 ")]
    assert row.split()[1] == row.split()[2]  # both have its learning rate
    assert "tries with a verdict today: 4" in "\n".join(lines)


@pytest.mark.usefixtures("fast")
def test_a_verdict_is_printed_even_if_it_cannot_be_kept(try_it: Try, place: Path) -> None:
    (place / "runs/try/log.jsonl").mkdir(parents=True)
    status, lines = try_it("MATRIX_LR=0.05")
    assert status == 0 and lines[-1].startswith("keep: ")
    assert "this verdict is not in the history of tries: runs/try/log.jsonl: Is a directory" in lines[-3]


def test_one_wild_try_does_not_hide_what_the_others_can_show(tmp_path: Path) -> None:
    """And tries that are under way at once all leave their pairs."""
    def spread() -> history.Spread:
        return history.Spread(tmp_path, {"budget": "a"})

    noise = np.random.default_rng(0).normal(0, 0.001, (9, 4))
    at_once = [spread() for _ in noise]
    for number, (one, differences) in enumerate(zip(at_once, noise.tolist(), strict=True)):
        one.add(f"try {number}", differences)
    before = spread().typical()
    assert before is not None and before[1] == 36 and 0.0007 < before[0] < 0.0014
    spread().add("diverged", [0.0, 1.0, 2.0, 0.0])
    after = spread().typical()
    assert after is not None and after[1] == 40 and after[0] < 1.3 * before[0]
    # A deviation of few pairs is as often too large as too small.
    many = np.random.default_rng(1).normal(0, 1, (4001, 4))
    entry = {"budget": "a", "tries": dict(enumerate(many.tolist()))}
    (tmp_path / history.SPREAD).write_text(json.dumps({"conditions": [entry]}))
    typical = spread().typical()
    assert typical is not None and typical[0] == pytest.approx(1, rel=0.03)
    for damage in ('{"conditions": [{"budget": "a"}]}', '{"conditions": ', "[]"):
        (tmp_path / history.SPREAD).write_text(damage)
        with pytest.raises(RecordError, match=r"spread.json.*; move it away"):
            spread().typical()


def test_a_torn_line_of_the_history_takes_no_other_with_it(tmp_path: Path) -> None:
    (tmp_path / history.VERDICTS).write_bytes(b'\xff\n{"name": "torn", "ver')
    history.append(tmp_path, name="whole", verdict=KEEP)
    history.append(tmp_path, name="next", verdict=DROP)
    assert [entry["name"] for entry in history.entries(tmp_path)] == ["whole", "next"]


def test_what_was_dropped_later_is_not_the_last_one_kept(tmp_path: Path) -> None:
    """As when it is judged again with a larger --useful; fewer seeds decide nothing."""
    for name, word in (("a", KEEP), ("b", KEEP), ("b", DROP), ("a", UNDECIDED)):
        (tmp_path / name).mkdir(exist_ok=True)
        history.append(tmp_path, name=name, verdict=word, settings={})
    kept = history.last_keep(tmp_path)
    assert kept is not None and kept["name"] == "a"


@pytest.mark.parametrize(("words", "message"), [
    ((), "both sides are the same: base.py is the script of base.py, and no setting differs"),
    (("MATRIX_LR=x",), "MATRIX_LR='x'"), (("MATRIX_LR",), "is not SETTING=VALUE"),
    (("MATRIX_LR=0.02", "MATRIX_LR=0.03"), "MATRIX_LR is given twice, as '0.02' and '0.03'"),
    (("SEED=2",), "is set automatically for each run"), (("MATRIX_LRR=1",), "MATRIX_LRR is not a setting"),
    (("ITERATIONS=20",), "ITERATIONS=10 → 20: budget and scoring must be the same"),
    (("EVAL_STRIDE=16",), "EVAL_STRIDE > 0=False → True"), (("CPU_THREADS=1",), "CPU_THREADS=0 → 1"),
    (("DATA_PATH=elsewhere",), "fineweb_val_000000.bin differ"),
    (("MATRIX_LR=0.02", "--seeds", "25"), "--seeds 25: expected 1 to 24"),
    (("MATRIX_LR=0.02", "--base", "nowhere"), "--base nowhere: expected a script"),
    (("MATRIX_LR=0.02", "--base", "keep"), "has been kept yet"),
    (("MATRIX_LR=0.02", "--config", "none.env"), "none.env"),
    (("MATRX_LR=0.02",), "did you mean MATRIX_LR?"), (("matrix_lr=0.02",), "did you mean MATRIX_LR?"),
    (("MATRIX_LR=0.02", "--start", "nowhere -x"), "--start 'nowhere -x': no such program"),
    (("MATRIX_LR=0.02", "--start", "'"), "--start ': No closing quotation"),
    (("MATRIX_LR=0.02", "--runs", "base.py"), "base.py/matrix_lr-0.02"),
    (("TRAIN_BATCH_TOKENS=1024",), "or compare at equal time, with --equal seconds"),
    (("MATRIX_LR=0.02", "--equal", "seconds"), "set MAX_WALLCLOCK_SECONDS=60, and pass the copy"),
])
def test_what_cannot_be_compared_is_refused_and_leaves_nothing(
    words: Sequence[str], message: str, try_it: Try, place: Path
) -> None:
    status, lines = try_it(*words)
    assert status == 2 and message in "\n".join(lines)
    assert not (place / "starts").exists() and not list(place.glob("runs/try/*"))


def test_the_judge_sees_code_that_scores_and_no_comments(try_it: Try, place: Path) -> None:
    def edited(before: str, after: str) -> list[str]:
        assert before in SCRIPT
        (place / "edited.py").write_text(SCRIPT.replace(before, after))
        return judge.scoring_changes(place / "base.py", place / "edited.py")

    assert edited('"""The score."""', "# The score, in bits per byte.") == []
    assert edited("GAIN = 0.0", "GAIN = 0.1") == []  # of training
    assert edited("    return bpb", "    return bpb - 0.1") == ["evaluate"]
    status, lines = try_it("--script", "edited.py")
    assert status == 2 and "the scoring code differs between the sides: evaluate" in lines[-1]
    assert edited("def evaluate", "CLIP = 1\n\n\ndef evaluate") == ["CLIP"]
    # All that the script calls its evaluation, and what reads the text and reports the score.
    scoring = judge.scoring_code(REPO / "train_gpt.py")
    assert {"Ledger", "evaluate", "read_tokens", "summarize"} <= scoring.keys()


def test_a_run_that_fails_and_other_conditions_end_a_try(
    try_it: Try, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_FAILS", "new-seed1337")
    status, lines = try_it("MATRIX_LR=0.05")
    assert status == 2 and "new-seed1337 ended with exit status 3" in lines[-1]
    assert "log.txt" not in lines[-1]  # it ended before it had one
    assert "Start the try again" in lines[-1]
    monkeypatch.setenv("TEST_OVER", "1")
    status, lines = try_it("MATRIX_LR=0.051", "--useful", "0")
    assert status == 2 and "exceeded its limits: artifact_bytes; raise that limit" in lines[-1]
    assert "again" not in lines[-1]  # it would fail again
    monkeypatch.delenv("TEST_OVER")
    monkeypatch.delenv("TEST_FAILS")
    assert try_it("MATRIX_LR=0.05", "--seeds", "1")[0] == 3
    monkeypatch.setenv("TEST_DEVICE", "another CPU")
    status, lines = try_it("MATRIX_LR=0.05", "--seeds", "2")
    assert status == 2 and "different conditions (device CPU and another CPU)" in lines[-1]


def git_in(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_the_base_is_where_the_branch_left_main_or_what_was_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        git_in(place, *words)

    monkeypatch.setattr(sides, "REPO", place)
    monkeypatch.setattr(sides, "SCRIPT", place / "train_gpt.py")
    script = place / "train_gpt.py"
    script.write_text("first\n")
    assert sides.base_side(None, place).origin == "train_gpt.py without the change"  # no repository yet
    git("init", "-b", "main")
    git("add", "train_gpt.py")
    git("commit", "-m", "one")
    git("checkout", "-b", "idea")
    script.write_text("second\n")
    git("commit", "-am", "two")
    assert sides.base_side(None, place).script == b"first\n"
    assert sides.base_side("HEAD", place).script == b"second\n"
    assert sides.base_side("train_gpt.py", place).script == b"second\n"
    # A main that nobody has updated since does not count the work of others as one's own.
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    script.write_text("third\n")
    git("commit", "-am", "three")
    side = sides.base_side(None, place)
    assert side.script == b"second\n" and side.origin.endswith("where this branch left origin/main")
    # Of a fork, main is what it calls so; where nothing says what that is, one has to.
    git("branch", "-m", "main", "trunk")
    git("update-ref", "refs/remotes/origin/trunk", "trunk")
    git("update-ref", "-d", "refs/remotes/origin/main")
    git("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/trunk")
    side = sides.base_side(None, place)
    assert side.script == b"first\n" and side.origin.endswith("where this branch left trunk")
    git("symbolic-ref", "-d", "refs/remotes/origin/HEAD")
    with pytest.raises(RecordError, match=r"called main or master.* --base HEAD is the last commit"):
        sides.base_side(None, place)


def test_the_repository_may_be_a_folder_of_a_larger_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose main has a script of that name at its top; or knows nothing of ours."""
    ours = place / "ours"
    ours.mkdir()
    monkeypatch.setattr(sides, "REPO", ours)
    monkeypatch.setattr(sides, "SCRIPT", ours / "train_gpt.py")
    for path, text in ((place / "train_gpt.py", "theirs\n"), (ours / "train_gpt.py", "committed\n")):
        path.write_text(text)
    for words in (["init", "-b", "main"], ["add", "train_gpt.py"], ["commit", "-m", "one"]):
        git_in(place, *words)
    assert sides.base_side(None, place).origin == "train_gpt.py without the change"
    git_in(place, "add", "ours")
    git_in(place, "commit", "-m", "two")
    (ours / "train_gpt.py").write_text("edited\n")
    assert sides.base_side(None, place).script == sides.base_side("HEAD", place).script == b"committed\n"


@pytest.mark.parametrize("reason", ["it is not installed", "not a git repository"])
def test_a_repository_that_git_cannot_read_has_no_silent_base(
    reason: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without git, or of another user."""
    git_in(place, "init")
    if reason == "it is not installed":
        monkeypatch.setenv("PATH", str(place))
    else:
        (place / ".git/HEAD").unlink()
    monkeypatch.setattr(sides, "REPO", place)
    monkeypatch.setattr(sides, "SCRIPT", place / "base.py")
    for named in (None, "HEAD"):
        with pytest.raises(RecordError, match=f"{reason}.*--base train_gpt.py to try a setting alone"):
            sides.base_side(named, place)
    assert sides.base_side("base.py", place).script == SCRIPT.encode()


@pytest.mark.slow  # 24 runs of the script
def test_the_script_itself_is_judged(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A first learning rate that trains nothing against one that does, the reverse, and an edited comment."""

    def forked(command: Sequence[str], variables: dict[str, str], _quiet: bool = False) -> int:
        return Started({**os.environ, **variables}, (), tmp_path, "", Path(command[-1])).wait().status

    monkeypatch.setattr(driver, "start", forked)
    monkeypatch.chdir(tmp_path)
    places = {"DATA_PATH": dataset, "TOKENIZER_PATH": dataset / "tokenizer.model", "VAL_TOKENS_LIMIT": 300}
    budget = environment(**places, ITERATIONS=12, WARMUP_STEPS=0, MAX_EVAL_SECONDS=0, DEVICE="cpu")
    (tmp_path / "budget.env").write_text("".join(f"{name}={value}\n" for name, value in budget.items()))
    source = (REPO / "train_gpt.py").read_text(encoding="utf-8")
    (tmp_path / "edited.py").write_text(source + "# a comment\n", encoding="utf-8")
    idle = source.replace('tied_embed_lr: float = setting(0.03', 'tied_embed_lr: float = setting(1e-6')
    assert idle != source
    (tmp_path / "idle.py").write_text(idle, encoding="utf-8")
    ours = str(REPO / "train_gpt.py")
    for base, new, status in (("idle.py", ours, 0), (ours, "edited.py", 3), (ours, "idle.py", 1)):
        words = ["try", "--base", base, "--script", new, "--config", "budget.env", "--seeds", "4"]
        assert main(words) == status, capfd.readouterr().out
        entry = json.loads((tmp_path / "runs/try/log.jsonl").read_text().splitlines()[-1])
        assert entry["pairs"] == 4
