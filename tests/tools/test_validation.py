"""Which text a run was scored on, its bytes, and the clocks of its evaluation, in every verb."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import DOCUMENTS, TEXT_BYTES, TOKENS, make_run, pack
from tests.tools.conftest import Tool
from tools.runs.folder import Folder
from tools.runs.logs import parse_log
from tools.submit import scores
from tools.submit.check import audit
from tools.submit.findings import Level, Mode

H100S = {"hardware": {"gpus": ["NVIDIA H100 80GB HBM3"] * 8, "world_size": 8}}
TEN_MINUTES = {"MAX_WALLCLOCK_SECONDS": "600.0", "ARTIFACT_BYTES_MAX": "16000000"}
OFFICIAL = ("official", "sp8192")
OWN = ("your own", "")


def scored_run(
    path: Path, seed: int = 1, scored_on: tuple[str, str] = OWN, clocks: tuple[float, float] = (12.3, 15.12),
    *, counted: int = TEXT_BYTES, audited: int | None = None, **options: Any,
) -> Path:
    """A run that says what it was scored on, as the script does. counted, audited: bytes of the text."""
    kind, name = scored_on
    data = {"val_tokens": TOKENS, "val_bytes": counted, "audited_bytes": audited, "validation": kind,
            "validation_name": name}
    spent = dict(zip(("scoring_seconds", "from_artifact_seconds"), clocks, strict=True))
    changes = {"data": data, "eval_clocks": spent, **options.pop("summary_changes", {})}
    run = make_run(path, seed, summary_changes=changes, **options)
    log = run / "log.txt"
    text = log.read_text("utf-8")
    log.write_text(
        f"validation: {kind}{f' ({name})' if name else ''}\n{text}limit:train_seconds 20, no limit\n"
        f"eval_clock: scoring {clocks[0]:.2f} s, from reading the artifact {clocks[1]:.2f} s (reload 0.10 s, "
        "compilation 2.72 s)\n", encoding="utf-8"
    )
    return run


def findings(folder: Path, level: Level = Level.FAIL) -> list[str]:
    found = [finding for finding in audit(folder) if finding.level(Mode.AGREED) is level]
    return [f"{finding.check} {finding.text}" for finding in found]


def as_record(folder: Path) -> Path:
    """The folder in the challenge's own track."""
    track = folder.parent.parent / "track_10min_16mb"
    track.mkdir()
    return folder.rename(track / folder.name)


def set_official(monkeypatch: pytest.MonkeyPatch, **sets: dict[str, int | None]) -> None:
    """Put a table of official sets in the place of the script's."""
    monkeypatch.setattr(scores, "official_table", lambda: (sets, 0))


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of `make_run` stands for the official one."""
    set_official(monkeypatch, sp8192={"targets": TOKENS, "bytes": TEXT_BYTES})


def test_a_log_says_it_all() -> None:
    clocks = "scoring 12.30 s, from reading the artifact 15.12 s (reload 0.10 s, compilation 2.72 s)"
    lines = ["val_loader:shards pattern=x tokens:40 bytes:97", "validation: official (sp8192)",
             "limit:train_seconds 21.56, no limit", f"eval_clock: {clocks}"]
    log = parse_log("\n".join(lines), Path("log.txt"))
    assert log.validation_bytes is not None and log.validation_set is not None
    assert (log.validation_bytes.integer, log.validation_set.value) == (97, "official (sp8192)")
    assert log.clock_seconds is not None and log.clock_seconds.value == "21.56" and not log.is_limited
    assert log.eval_clocks is not None
    assert (log.eval_clocks.scoring_seconds, log.eval_clocks.from_artifact_seconds) == (12.3, 15.12)
    limited = "limit:train_seconds 21.56 of 60 ok\nval_loader:x tokens:4 bytes:9 comparable:0"
    log = parse_log(limited, Path("log.txt"))
    assert log.clock_seconds is not None and log.clock_seconds.value == "21.56" and log.is_limited
    assert log.eval_clocks is None and log.validation_set is None


def test_a_run_without_a_limit_of_time_has_the_clock_of_its_end(tmp_path: Path) -> None:
    """Where its last line of training is not that of its last step."""
    run = scored_run(tmp_path / "a")
    lines = [line for line in (run / "log.txt").read_text().splitlines() if "step:400/400" not in line]
    log = parse_log("\n".join(lines).replace("train_seconds 20,", "train_seconds 20.5,"), run / "log.txt")
    assert log.train_seconds == 20.5 and log.steps_done == 400


@pytest.mark.usefixtures("official")
def test_the_bytes_of_a_run_are_those_that_were_audited(tmp_path: Path) -> None:
    folder = pack(tmp_path / "a", [scored_run(tmp_path / "sound", scored_on=OFFICIAL, audited=TEXT_BYTES)])
    assert not findings(folder)
    manifest = {"splits": {"val": {"audit": {"decoded_bytes": TEXT_BYTES - 1}}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    wrong = f"C1 {TEXT_BYTES} bytes of text are counted, manifest.json has {TEXT_BYTES - 1}"
    assert wrong in findings(folder)
    # A sidecar counts the text itself; limited runs score a part.
    manifest["splits"]["val"]["audit"]["sidecar_bytes"] = TEXT_BYTES
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert not [found for found in findings(folder) if found.startswith("C1")]
    summary = json.loads((folder / "summary_seed1.json").read_text())
    summary["data"]["audited_bytes"] = 5
    (folder / "summary_seed1.json").write_text(json.dumps(summary))
    wrong = f"C1 {TEXT_BYTES} bytes of text are counted, the run's own audit has 5"
    assert wrong in findings(folder)
    summary["config"]["VAL_TOKENS_LIMIT"] = "40"
    (folder / "summary_seed1.json").write_text(json.dumps(summary))
    assert wrong not in findings(folder)


@pytest.mark.parametrize("damage", [[], None, "x", {"splits": []}, {"splits": {"val": {"audit": 3}}}])
def test_a_damaged_manifest_is_no_audit(damage: Any, tmp_path: Path) -> None:
    folder = pack(tmp_path / "a", [scored_run(tmp_path / "run")])
    (folder / "manifest.json").write_text(json.dumps(damage))
    assert not [found for found in findings(folder) if found.startswith(("C1", "A0"))]


def test_a_part_of_a_text_is_another_text(tmp_path: Path, tool: Tool) -> None:
    """However small the rest of it."""
    whole = scored_run(tmp_path / "whole", scored_on=OFFICIAL)
    part = scored_run(tmp_path / "part", scored_on=OFFICIAL, counted=TEXT_BYTES - 9, gain=0.1)
    summary = json.loads((part / "summary.json").read_text())
    summary["config"]["VAL_TOKENS_LIMIT"] = str(TOKENS - 3)
    (part / "summary.json").write_text(json.dumps(summary))
    told = tool("diff", whole, part)
    assert told.startswith("part cannot be compared with whole: they scored different texts (official ag")
    assert " than whole" not in told
    table = tool("runs", tmp_path)
    assert f"cannot be compared: official, official ({TEXT_BYTES - 9:,} bytes)" in table


def test_one_run_counts_one_number_of_bytes(tmp_path: Path) -> None:
    folder = pack(tmp_path / "a", [scored_run(tmp_path / "run", counted=TEXT_BYTES + 7)])
    assert any("one run counts one number" in found for found in findings(folder))


def test_pack_refuses_bytes_that_nobody_audited(tmp_path: Path, tool: Tool) -> None:
    run = scored_run(tmp_path / "run", audited=TEXT_BYTES - 1)
    told = tool("pack", run, "--name", "N", "--records", tmp_path / "r", status=2)
    assert f"counted {TEXT_BYTES} bytes of text, but its data holds {TEXT_BYTES - 1}" in told


@pytest.mark.usefixtures("official")
def test_a_claim_to_the_official_set_has_its_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pack(tmp_path / "a", [scored_run(tmp_path / "run", scored_on=OFFICIAL)])
    assert not findings(folder)
    for tokens, text_bytes, said in ((TOKENS + 1, TEXT_BYTES, f"{TOKENS} targets, that set has 40,001"),
                                     (TOKENS, TEXT_BYTES + 1, f"{TEXT_BYTES} bytes at")):
        set_official(monkeypatch, sp8192={"targets": tokens, "bytes": text_bytes})
        (found,) = findings(folder)
        assert found.startswith("C1 official (sp8192): ") and said in found
    set_official(monkeypatch, sp8192={"targets": None, "bytes": TEXT_BYTES})  # a count that is not known
    assert not findings(folder)
    set_official(monkeypatch, sp8192={"targets": None, "bytes": None, "documents": DOCUMENTS + 1})
    told = "C1 nats_roundtrip_seed1.bin has 50 documents, but that validation set has 51"
    assert findings(folder)[0] == told
    set_official(monkeypatch)
    assert any("do not know a validation set of that name" in found for found in findings(folder, Level.WARN))
    # Log and summary say the same.
    log = folder / "train_seed1.log"
    log.write_text(log.read_text().replace("validation: official (sp8192)", "validation: your own"))
    assert any(found.startswith("A4 validation: your own in the log") for found in findings(folder))


@pytest.mark.usefixtures("official")
def test_a_record_of_the_challenge_is_scored_on_its_text(tmp_path: Path, tool: Tool) -> None:
    options: dict[str, Any] = {"config": TEN_MINUTES, "summary_changes": H100S}
    who = ["--author", "A", "--github-id", "a", "--blurb", "B."]
    run = scored_run(tmp_path / "own", **options)
    told = tool("pack", run, *who, "--name", "N", "--records", tmp_path / "r", "--track", "track_10min_16mb",
                status=2)
    assert "scored on your own validation set" in told
    assert "track_8xh100_10min_16mb" in tool("pack", run, *who, "--name", "N", "--records", tmp_path / "r")
    own = "C1 it was scored on your own validation set, not on the challenge's"
    folder = as_record(pack(tmp_path / "a", [scored_run(tmp_path / "own2", **options)]))
    assert own in findings(folder)
    folder = as_record(pack(tmp_path / "b", [scored_run(tmp_path / "theirs", scored_on=OFFICIAL, **options)]))
    assert own not in findings(folder)


@pytest.mark.parametrize(("clocks", "level"), [((12.0, 599.0), None), ((580.0, 640.5), Level.WARN),
                                               ((601.0, 640.5), Level.FAIL)])
def test_the_accepted_clock_is_judged_and_the_contested_one_told(
    clocks: tuple[float, float], level: Level | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"config": TEN_MINUTES, "summary_changes": H100S, "clocks": clocks}
    folder = as_record(pack(tmp_path / "a", [scored_run(tmp_path / "run", **options)]))
    told = {one: [found for found in findings(folder, one) if found.startswith("C3")] for one in Level}
    assert [one for one in Level if told[one]] == ([] if level is None else [level])
    if level is Level.WARN:
        assert "580.0 s" in told[level][0] and "640.5 s" in told[level][0]


@pytest.mark.usefixtures("official")
def test_pages_and_tables_name_the_set_and_both_clocks(tmp_path: Path, tool: Tool) -> None:
    one = scored_run(tmp_path / "runs" / "a", scored_on=OFFICIAL)
    other = scored_run(tmp_path / "runs" / "b", gain=0.1, clocks=(10.0, 11.5))
    older = make_run(tmp_path / "runs" / "c", 1)
    folder = pack(tmp_path / "records", [one])
    page = (folder / "README.md").read_text("utf-8")
    assert "the official set in sp8192" in page and "12.30 and 15.12 s (seed 1)" in page
    assert Folder(folder).submission["data"]["validation_name"] == "sp8192"
    told = tool("diff", one, other)
    assert "scored on different validation sets, official against your own (97,512 bytes)" in told
    assert "15.1 (n=1)" in told and "11.5 (n=1)" in told
    assert "cannot be compared" in told.splitlines()[0] and "difference" not in told
    options = ["--name", "Mixed", "--records", tmp_path / "refused"]
    refused = tool("pack", one, "--baseline", other, *options, status=2)
    assert "scored another text than these runs (your own (97,512 bytes) against official)" in refused
    assert not (tmp_path / "refused").exists()
    assert "Validation set of both: official." in tool("diff", one, one)
    assert "different validation sets" in json.loads(tool("diff", one, other, "--json"))["validation"]
    assert "alidation set" not in tool("diff", older, one)
    table = tool("runs", tmp_path / "runs")
    assert "cannot be compared" in table
    assert "cannot be compared" not in tool("runs", one, older)
    assert "validation" not in tool("runs", older)
    assert [row["validation"] for row in json.loads(tool("runs", tmp_path / "runs", "--json"))] == [
        "official (sp8192)", "your own", None
    ]


def test_a_folder_of_older_runs_stays_as_it_is(tmp_path: Path) -> None:
    folder = pack(tmp_path / "records", [make_run(tmp_path / "a", 1)])
    assert "validation" not in Folder(folder).submission["data"] and not findings(folder)
    assert "Scoring alone" not in (folder / "README.md").read_text("utf-8")
