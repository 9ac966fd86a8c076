"""What pack writes, proves and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs import CONFIG, SOURCE, make_run, make_runs, pack, wrap
from tools.__main__ import main
from tools.runs.folder import Folder
from tools.runs.source import read_script, same_program


def refusal(capsys: pytest.CaptureFixture[str], records: Path, runs: list[Path], *options: str) -> str:
    """The message of a refused pack; nothing may be left behind."""
    arguments = ["pack", *map(str, runs), "--name", "Refused", "--records", str(records), *options]
    assert main(arguments) == 2
    assert not [path for path in records.rglob("*") if path.is_file()]
    return capsys.readouterr().err


def test_every_number_is_from_the_logs(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "runs", 42, 1337, 7)
    folder = Folder(pack(tmp_path / "records", runs))
    submission = folder.submission
    scores = [run.log.headline.bpb for run in folder.seed_runs if run.log.headline]
    assert submission["val_bpb"] == pytest.approx(sum(scores) / 3, abs=1e-8)
    assert submission["seeds"] == [7, 42, 1337] and len(submission["all_runs"]) == 3
    assert submission["seed_results"]["42"]["steps"] == 400
    assert submission["bytes_total"] == 300_000 + len(SOURCE.encode())
    assert (folder.path / "train_gpt.py").read_text() == SOURCE
    assert (folder.path / "requirements.txt").read_text() == "torch==2.13.0\nnumpy==2.4.6\n"
    config = (folder.path / "config.env").read_text()
    assert "MATRIX_LR=0.02" in config and "SEED" not in config and "RUN_ID" not in config
    readme = (folder.path / "README.md").read_text()
    assert f"{submission['val_bpb']:.8f}" in readme and "SEED=1337 python train_gpt.py" in readme


def test_baseline_gives_diff_and_comparison(tmp_path: Path) -> None:
    base = pack(tmp_path / "records", make_runs(tmp_path / "base", 1, 2, 3), name="Base")
    changed = SOURCE.replace("LEARNING_RATE = 0.02", "LEARNING_RATE = 0.03")
    runs = make_runs(tmp_path / "new", 4, 5, 6, source=changed, gain=0.05)
    folder = pack(tmp_path / "records", runs, "--baseline", str(base), name="New")
    assert "+LEARNING_RATE = 0.03" in (folder / "baseline.diff").read_text()
    comparison = Folder(folder).submission["comparison"]
    assert comparison["gain_bpb"] > 0 and comparison["meets_margin"] and comparison["frontier"]["p"] < 0.01


def test_a_run_to_its_step_limit_has_all_its_steps_whatever_line_is_the_last(tmp_path: Path) -> None:
    (run,) = make_runs(tmp_path / "runs", 1)
    lines = [line for line in (run / "log.txt").read_text().splitlines() if "step:400/400" not in line]
    (run / "log.txt").write_text("\n".join(lines) + "\n")
    folder = pack(tmp_path / "records", [run])
    assert Folder(folder).submission["seed_results"]["1"]["steps"] == 400
    assert main(["check", str(folder)]) == 0


def test_wrapped_script_is_the_same_program_with_the_source_beside_it(tmp_path: Path) -> None:
    folder = pack(tmp_path / "records", make_runs(tmp_path / "runs", 1), "--wrap")
    shipped = read_script(folder / "train_gpt.py")
    assert shipped.wrapped and shipped.raw == wrap(SOURCE) and same_program(shipped.text, SOURCE)
    assert (folder / "train_gpt_readable.py").read_text() == SOURCE
    assert Folder(folder).submission["bytes_code"] == shipped.bytes < len(SOURCE)


def test_form_that_the_run_counted_is_shipped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a", 1)
    (run / "train_gpt.shipped.py").write_bytes(wrap(SOURCE))
    folder = pack(tmp_path / "records", [run])
    assert (folder / "train_gpt.py").read_bytes() == wrap(SOURCE)


def test_foreign_shipped_form_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "runs" / "a", 1)
    (run / "train_gpt.shipped.py").write_bytes(wrap(SOURCE.replace("0.02", "0.03")))
    assert "is not the program in train_gpt.py" in refusal(capsys, tmp_path / "records", [run])


REFUSED = {
    "did not finish": {"exit": "signal"},
    "marked not comparable": {"comparable": False},
    "is not the code that ran": {"code": {"sha256": "0" * 64}},
    "summary.json says 43": {"seed": 43},
}


@pytest.mark.parametrize(("message", "change"), REFUSED.items(), ids=REFUSED.keys())
def test_unfit_run_is_refused(
    message: str, change: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs" / "a", 42, summary_changes=change)
    assert message in refusal(capsys, tmp_path / "records", [run])


def test_mixed_runs_are_refused_with_every_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        make_run(tmp_path / "runs" / "a", 1),
        make_run(tmp_path / "runs" / "b", 1, source=SOURCE + "\n"),
        make_run(tmp_path / "runs" / "c", 2, config={"MATRIX_LR": "0.03"}),
    ]
    message = refusal(capsys, tmp_path / "records", runs)
    assert "seed 1 comes more than once" in message
    assert "ran other code" in message
    assert "MATRIX_LR is 0.02" in message and "0.03 in" in message


def test_total_over_the_cap_is_refused_with_the_excess(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"ARTIFACT_BYTES_MAX": "301000"}
    run = make_run(tmp_path / "runs" / "a", 1, config=config)
    excess = 300_000 + len(SOURCE.encode()) - 301_000
    message = refusal(capsys, tmp_path / "records", [run], "--track", "track_demo")
    assert f"{excess:,} over the cap of 301,000" in message
    assert CONFIG["ARTIFACT_BYTES_MAX"] != config["ARTIFACT_BYTES_MAX"]


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = make_runs(tmp_path / "runs", 1)
    folder = pack(tmp_path / "records", runs)
    before = (folder / "submission.json").read_bytes()
    arguments = ["--name", "Test", "--date", "2026-05-01", "--track", "track_demo"]
    assert main(["pack", str(runs[0]), "--records", str(tmp_path / "records"), *arguments]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert (folder / "submission.json").read_bytes() == before


def test_json_output_is_the_submission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pack(tmp_path / "records", make_runs(tmp_path / "runs", 1), "--json")
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("folder") == str(folder)
    assert printed == json.loads((folder / "submission.json").read_text())


@pytest.mark.parametrize(
    "track", ["../outside", "/tmp/outside", "track_a/../../x", "..", "track_", "demo", ""]
)
def test_a_track_cannot_leave_the_records(
    track: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records").mkdir()
    run = make_run(tmp_path / "runs" / "a", 1)
    before = sorted(tmp_path.rglob("*"))
    assert "--track" in refusal(capsys, tmp_path / "records", [run], "--track", track)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_track_that_is_a_link_cannot_leave_the_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs" / "a", 1)
    (tmp_path / "records").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "records" / "track_link").symlink_to(tmp_path / "outside")
    assert "leaves" in refusal(capsys, tmp_path / "records", [run], "--track", "track_link")
    assert not list((tmp_path / "outside").iterdir())


H100S = {"hardware": {"gpus": ["NVIDIA H100 80GB HBM3"] * 8, "world_size": 8}}
TEN_MINUTES = {"MAX_WALLCLOCK_SECONDS": "600.0", "ARTIFACT_BYTES_MAX": "16000000"}


@pytest.mark.parametrize(
    ("config", "summary", "track"),
    [
        (TEN_MINUTES, H100S, "track_10min_16mb"),
        ({"MAX_WALLCLOCK_SECONDS": "60.0", "ARTIFACT_BYTES_MAX": "450000"}, {}, "track_cpu_60s_450kb"),
        ({**TEN_MINUTES, "MAX_WALLCLOCK_SECONDS": "1200"}, H100S, "track_8xh100_20min_16mb"),
        (
            TEN_MINUTES,
            {"hardware": {"gpus": ["NVIDIA H200"], "world_size": 1}},
            "track_1xh200_10min_16mb",
        ),
    ],
)
def test_the_track_is_that_of_the_runs_configuration(
    config: dict, summary: dict, track: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "runs" / "a", 1, config=config, summary_changes=summary)
    assert (
        main(["pack", str(run), "--name", "Own", "--date", "2026-05-01", "--records", str(tmp_path / "r")])
        == 0
    )
    folder = Folder(tmp_path / "r" / track / "2026-05-01_Own")
    assert folder.submission["track"] == track


def test_a_demo_is_no_ten_minute_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "runs" / "a", 1, config={"MAX_WALLCLOCK_SECONDS": "60.0"})
    message = refusal(capsys, tmp_path / "records", [run], "--track", "track_10min_16mb")
    assert "it ran on x86_64 CPU, 2 cores, not on 8 x H100" in message and "track_cpu_60s" in message


def test_a_baseline_that_is_no_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "runs" / "a", 1)
    message = refusal(capsys, tmp_path / "records", [run], "--baseline", str(tmp_path))
    assert "is no run and no record" in message


def test_what_nobody_has_proved_is_told_with_the_command_that_proves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pack(tmp_path / "records", make_runs(tmp_path / "runs", 1), "--wrap")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("not proved legal by experiment yet: ")
    command = last.partition(": ")[2].split()
    assert command[:4] == ["python", "-m", "tools", "prove"]
    assert command[4:] == [str(folder / "train_gpt_readable.py"), "--config", str(folder / "config.env")]
    assert all(Path(name).is_file() for name in command[4::2])
