"""The audit: a packed folder passes, each alteration is named, public layouts get no false FAIL."""

from __future__ import annotations

import base64
import itertools
import json
import lzma
import random
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.files import sha256_file
from tests.support.dialects import DIALECT_A, DIALECT_B
from tests.support.runs import SOURCE, make_runs, pack, wrap
from tests.support.waiting import wait_until
from tests.tools import damage
from tools.__main__ import main
from tools.check import checks
from tools.check.apart import Auditor
from tools.check.checks import audit
from tools.check.execute import network_can_be_cut
from tools.check.findings import Finding, Level, Mode
from tools.pack import readme
from tools.runs.derive import compare_with
from tools.runs.folder import Folder
from tools.runs.runs import load_group
from tools.runs.source import UNWRAPPED_BYTES_MAX, read_script


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    return pack(folder / "records", make_runs(folder / "runs", 42, 1337, 2025))


@pytest.fixture
def packed(pristine: Path, tmp_path: Path) -> Path:
    """A packed folder of three seeds that the test may alter."""
    return Path(shutil.copytree(pristine, tmp_path / "records" / "track_demo" / pristine.name))


def fails(folder: Path, mode: Mode = Mode.AGREED) -> list[Finding]:
    return [finding for finding in audit(Folder(folder)) if finding.level(mode) is Level.FAIL]


def test_packed_folder_passes_under_every_reading(packed: Path) -> None:
    for mode in Mode:
        assert fails(packed, mode) == []
    assert main(["check", "--strict", str(packed)]) == 0


def test_packed_wrapped_folder_passes(tmp_path: Path) -> None:
    base = pack(tmp_path / "records", make_runs(tmp_path / "base", 1, 2, 3), name="Base")
    runs = make_runs(tmp_path / "new", 4, 5, 6, gain=0.02)
    assert (
        fails(pack(tmp_path / "records", runs, "--wrap", "--baseline", str(base), name="New"), Mode.STRICT)
        == []
    )


def _edit(folder: Path, name: str, old: str, new: str) -> None:
    path = folder / name
    text = path.read_text()
    assert text.count(old) >= 1, f"{name} does not hold {old!r}"
    path.write_text(text.replace(old, new, 1))


def _digit_in_json(folder: Path) -> None:
    score = f"{json.loads((folder / 'submission.json').read_text())['val_bpb']}"
    _edit(
        folder,
        "submission.json",
        f'"val_bpb": {score}',
        f'"val_bpb": {score[:-1]}{(int(score[-1]) + 1) % 10}',
    )


def _digit_of_a_seed(folder: Path) -> None:
    _edit(folder, "submission.json", '"steps": 400', '"steps": 401')


def _digit_in_log(folder: Path) -> None:
    _edit(folder, "train_seed42.log", "legal_ttt_exact val_loss:2.9", "legal_ttt_exact val_loss:2.8")


def _digit_in_readme(folder: Path) -> None:
    _edit(folder, "README.md", "| 400 |", "| 399 |")


def _byte_of_code(folder: Path) -> None:
    _edit(folder, "train_gpt.py", "LEARNING_RATE = 0.02", "LEARNING_RATE = 0.03")


def _swapped_logs(folder: Path) -> None:
    first, second, spare = folder / "train_seed42.log", folder / "train_seed1337.log", folder / "spare"
    first.rename(spare), second.rename(first), spare.rename(second)


def _log_of_another_run(folder: Path) -> None:
    _edit(folder, "train_seed42.log", "step:400/400", "step:380/400")


def _wrong_seed(folder: Path) -> None:
    text = (folder / "submission.json").read_text()
    (folder / "submission.json").write_text(text.replace('"42"', '"43"').replace("    42,", "    43,"))


def _missing_log(folder: Path) -> None:
    (folder / "train_seed42.log").unlink()


def _code_of_seed_42(folder: Path, **changes: object) -> None:
    path = folder / "summary_seed42.json"
    summary = json.loads(path.read_text("utf-8"))
    summary["code"].update(changes)
    path.write_text(json.dumps(summary), "utf-8")


def _mixed_code(folder: Path) -> None:
    _code_of_seed_42(folder, sha256=f"{'1' * 64} after {'0' * 64}")


def _mixed_code_of_0_5(folder: Path) -> None:
    _code_of_seed_42(folder, former=[{"file": "train_gpt.until_step120.py", "sha256": "0" * 64}])


def _setting(folder: Path) -> None:
    _edit(folder, "config.env", "MATRIX_LR=0.02", "MATRIX_LR=0.03")


ALTERATIONS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "one digit in submission.json": (_digit_in_json, "A4", "`val_bpb` is"),
    "one digit of a seed's result": (_digit_of_a_seed, "A4", "`seed_results.42.steps` is 401"),
    "one digit in a log": (_digit_in_log, "A2", "`train_seed42.log` is not the file that was packed"),
    "one digit in a log, by arithmetic": (_digit_in_log, "C1", "is not val_loss"),
    "one digit in a log, by summary": (_digit_in_log, "A4", "in the summary"),
    "one digit in README.md": (_digit_in_readme, "A4", "README.md says"),
    "one byte of code": (_byte_of_code, "A6", "the shipped source is not what seed 42 ran"),
    "swapped logs": (_swapped_logs, "A5", "train_seed42.log stands for seed 42, but says seed 1337"),
    "log of another run": (_log_of_another_run, "A2", "`train_seed42.log` is not the file"),
    "wrong seed": (_wrong_seed, "A5", "seed 43 is declared, its log or summary is missing"),
    "missing log": (_missing_log, "A2", "`train_seed42.log` was packed and is missing"),
    "mixed code": (_mixed_code, "A6", "seed 42 is of mixed code: it began with another script"),
    "mixed code of 0.5": (_mixed_code_of_0_5, "A6", "seed 42 is of mixed code: it began with another script"),
    "changed setting": (_setting, "A2", "`config.env` is not the file that was packed"),
}


@pytest.mark.parametrize(("alter", "check", "text"), ALTERATIONS.values(), ids=ALTERATIONS.keys())
def test_alteration_is_named(packed: Path, alter: Callable[[Path], None], check: str, text: str) -> None:
    alter(packed)
    found = fails(packed)
    assert any(f.check == check and text in f.text for f in found), [f"{f.check} {f.text}" for f in found]


def _hash_again(folder: Path) -> None:
    """What somebody does who changed a packed file."""
    path = folder / "submission.json"
    value = json.loads(path.read_text())
    value["files"] = {name: sha256_file(folder / name) for name in value["files"] if (folder / name).exists()}
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("MATRIX_LR=0.02", "MATRIX_LR=0.5", "config.env says MATRIX_LR=0.5, seed 42 ran with 0.02"),
        ("MATRIX_LR=0.02\n", "", "config.env says MATRIX_LR=nothing, seed 42 ran with 0.02"),
        ("MATRIX_LR=0.02", "MATRIX_LR=0.02\nXSA_LAST_N=4", "XSA_LAST_N=4, seed 42 ran with no such setting"),
    ],
    ids=["changed", "removed", "added"],
)
def test_settings_are_those_that_ran(old: str, new: str, text: str, packed: Path) -> None:
    _edit(packed, "config.env", old, new)
    _hash_again(packed)
    found = fails(packed)
    assert {f.check for f in found} == {"A4"} and any(text in f.text for f in found)


def test_settings_that_are_taken_away_are_missed(packed: Path) -> None:
    (packed / "config.env").unlink()
    _hash_again(packed)
    assert ["`config.env` is missing" in f.text for f in fails(packed)] == [True]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed folder with a baseline beside it."""
    place = tmp_path_factory.mktemp("compared")
    base = pack(place / "records", make_runs(place / "base", 1, 2, 3), name="Base")
    runs = make_runs(place / "new", 4, 5, 6, gain=0.02)
    return pack(place / "records", runs, "--baseline", str(base), name="New")


def test_the_scores_of_a_baseline_are_those_of_its_folder(compared: Path, tmp_path: Path) -> None:
    records = Path(shutil.copytree(compared.parents[1], tmp_path / "records"))
    folder = records / "track_demo" / compared.name
    claim = [f for f in audit(Folder(folder)) if "baseline" in f.text]
    assert claim == []
    value = json.loads((folder / "submission.json").read_text())
    bpbs = [score + 0.1 for score in value["comparison"]["baseline_val_bpb"]]
    value["comparison"] = compare_with(
        value["comparison"]["baseline"], value["seed_results"], bpbs, value["comparison"]["baseline_val_loss"]
    )
    (folder / "submission.json").write_text(json.dumps(value))
    summaries = Folder(folder).summaries
    (folder / "README.md").write_text(readme.render(value, summaries, ""))
    (found,) = fails(folder)
    assert found.check == "A4" and "`comparison.baseline_val_bpb` is" in found.text
    (records / "track_other").mkdir()  # a baseline of another track is found as well
    (folder.parent / "2026-05-01_Base").rename(records / "track_other" / "2026-05-01_Base")
    assert fails(folder) == [found]


def test_the_scores_of_a_baseline_that_is_not_there_are_only_claimed(compared: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(compared, tmp_path / "records" / "track_demo" / compared.name))
    (found,) = [f for f in audit(Folder(folder)) if "only claimed" in f.text]
    assert found.level(Mode.STRICT) is Level.WARN and fails(folder) == []


def test_files_that_were_not_packed_are_named(packed: Path) -> None:
    for name in ("extra.bin", "notes.md", "linked.md", "curve.png", "more.py"):
        (packed / name).write_text("x")
    with (packed / "README.md").open("a") as file:
        file.write('\n[more](linked.md) <img src="curve.png"> [code](more.py)\n')
    found = {f.where for f in audit(Folder(packed)) if "was not packed" in f.text}
    assert found == {"extra.bin", "notes.md", "more.py"} and fails(packed, Mode.STRICT) == []


@pytest.mark.parametrize("key", ["author", "github_id", "blurb"])
def test_a_record_of_ours_names_its_author(key: str, packed: Path) -> None:
    value = json.loads((packed / "submission.json").read_text())
    (packed / "submission.json").write_text(json.dumps({**value, key: ""}))
    missing = f"`{key}` is absent"
    assert not [f.text for f in fails(packed) if missing in f.text]
    record = packed.parent.rename(packed.parent.with_name("track_10min_16mb")) / packed.name
    assert [f.check for f in fails(record) if missing in f.text] == ["A3"]


def test_wrapped_script_with_another_program_is_named(tmp_path: Path) -> None:
    folder = pack(tmp_path / "records", make_runs(tmp_path / "runs", 1), "--wrap")
    (folder / "train_gpt.py").write_bytes(wrap(SOURCE.replace("0.02", "0.03")))
    assert any("is not the program in train_gpt_readable.py" in finding.text for finding in fails(folder))


def test_the_source_that_tracks_share_is_audited_like_one_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    folder = pack(tmp_path, make_runs(tmp_path / "runs", 1), "--wrap")
    (shared,) = (tmp_path / "scripts").iterdir()
    assert not fails(folder) and load_group(folder).script == read_script(shared)
    shared.write_text(SOURCE.replace("0.02", "0.03"))
    texts = [finding.text for finding in fails(folder)]
    assert len(texts) == 2 and f"is not the program in ../../scripts/{shared.name}" in texts[0]
    assert "the shipped source is not what seed 1 ran" in texts[1]
    shared.unlink()
    assert any("is neither in the folder nor in ../../scripts/" in finding.text for finding in fails(folder))


def test_a_folder_of_another_format_is_named_with_what_to_do(packed: Path) -> None:
    submission = json.loads((packed / "submission.json").read_text("utf-8"))
    (packed / "submission.json").write_text(json.dumps({**submission, "format": "records/1"}), "utf-8")
    (finding,) = fails(packed)
    assert "'records/1'" in finding.text and "pack the runs again" in finding.remedy


def test_the_line_of_readme_that_differs_is_shown(packed: Path) -> None:
    path = packed / "README.md"
    path.write_text("Prose above.\n" + path.read_text())
    assert fails(packed) == []
    _digit_in_readme(packed)
    (finding,) = fails(packed)
    changed = path.read_text().splitlines()[int(finding.where.split(":")[1]) - 1]
    assert finding.check == "A4" and f"README.md says `{changed}`" in finding.text


def test_prose_below_the_generated_part_is_free(packed: Path) -> None:
    with (packed / "README.md").open("a") as file:
        file.write("\nWhat I learned.\n")
    assert fails(packed) == []


def public(tmp_path: Path, logs: dict[str, str], script: str = SOURCE, **submission: Any) -> Path:
    """A folder as other people submit it."""
    folder = tmp_path / "track_10min_16mb" / "2026-04-01_Public"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("text\n")
    (folder / "train_gpt.py").write_text(script)
    value = {"author": "a", "github_id": "a", "name": "n", "date": "2026-04-01", **submission}
    (folder / "submission.json").write_text(json.dumps(value))
    for name, text in logs.items():
        (folder / name).write_text(text)
    return folder


A_SCORE = {"val_bpb": 1.21972502, "val_loss": 2.0594546}
CODE = SOURCE + "#" * (47642 - len(SOURCE))  # as many bytes as the log of dialect A says
PLAIN_A = DIALECT_A.split("=" * 100 + "\n")[1]  # without the source at its head


def _codes(folder: Path, mode: Mode = Mode.AGREED) -> set[tuple[str, str]]:
    return {(f.check, f.level(mode).name) for f in audit(Folder(folder))}


def test_public_folder_without_a_defect_has_no_fail(tmp_path: Path) -> None:
    assert fails(public(tmp_path, {"train.log": PLAIN_A}, CODE, **A_SCORE)) == []


def test_score_that_no_log_gives(tmp_path: Path) -> None:
    folder = public(tmp_path, {"train.log": PLAIN_A}, CODE, val_bpb=1.2152, val_loss=2.0594546)
    assert [f.check for f in fails(folder)] == ["A4"]
    assert "train.log" in fails(folder)[0].where


def test_bits_stored_as_loss(tmp_path: Path) -> None:
    assert ("A3", "FAIL") in _codes(
        public(tmp_path, {"train.log": PLAIN_A}, CODE, val_bpb=1.21972502, val_loss=1.21972502)
    )


def test_seed_in_the_name_is_the_seed_in_the_log(tmp_path: Path) -> None:
    folder = public(tmp_path, {"train_seed7.log": PLAIN_A}, CODE, **A_SCORE)
    assert any("stands for seed 7, but says seed 1337" in finding.text for finding in fails(folder))


def test_one_log_under_two_names(tmp_path: Path) -> None:
    text = PLAIN_A.replace("seed:1337\n", "")
    folder = public(tmp_path, {"train_seed1.log": text, "train_seed2.log": text}, CODE, **A_SCORE)
    assert any("is identical to" in finding.text for finding in fails(folder))


def test_shipped_code_of_another_size(tmp_path: Path) -> None:
    assert ("A6", "FAIL") in _codes(public(tmp_path, {"train.log": PLAIN_A}, CODE + "\n", **A_SCORE))


def test_seeds_of_two_configurations(tmp_path: Path) -> None:
    second = PLAIN_A.replace("seed:1337", "seed:7").replace("train_seq_len:1024", "train_seq_len:2048")
    folder = public(tmp_path, {"train_seed1337.log": PLAIN_A, "train_seed7.log": second}, CODE, **A_SCORE)
    assert any(
        "`train_seq_len` is 1024" in f.text or "`train_seq_len` is 2048" in f.text for f in fails(folder)
    )


def test_double_counted_spaces_show_in_the_implied_bytes(tmp_path: Path) -> None:
    score = f"{1.21972502 * 151_080_891 / 176_332_748:.8f}"
    text = PLAIN_A.replace("1.21972502", score).replace("val_bpb:1.2197 ", f"val_bpb:{score} ")
    folder = public(tmp_path, {"train.log": text}, CODE, val_bpb=float(score), val_loss=2.0594546)
    assert any(f.check == "C1" and "#1719" in f.text for f in fails(folder))


def test_contested_points_follow_the_reading(tmp_path: Path) -> None:
    script = SOURCE + "#" * (157868 - len(SOURCE))
    folder = public(
        tmp_path, {"train_seed42.log": DIALECT_B}, script, val_bpb=1.05989454, val_loss=2.31944212
    )
    for check in ("A9", "C2"):  # over the cap as shipped; Hessians after the clock
        assert (check, "WARN") in _codes(folder)
        assert (check, "FAIL") in _codes(folder, Mode.STRICT)
        assert (check, "INFO") in _codes(folder, Mode.CONVENTION)
    assert fails(folder) == []


def test_unreadable_contents_are_findings_not_crashes(tmp_path: Path) -> None:
    folder = public(tmp_path, {"train.log": "\0\xff garbage"}, "def broken(:\n")
    (folder / "submission.json").write_text("[1, 2")
    assert {("A2", "FAIL"), ("A3", "FAIL")} <= _codes(folder)
    shutil.rmtree(folder)
    assert main(["check", str(folder)]) == 2


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers() | st.dictionaries(st.text(max_size=2), st.none(), max_size=1)),
)
KEYS = (
    "val_bpb",
    "val_loss",
    "val_bpb_std",
    "seeds",
    "seed_results",
    "bytes_total",
    "date",
    "track",
    "format",
    "files",
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES | st.dictionaries(st.sampled_from(["1337", "x"]), VALUES))
)
def test_any_submission_is_judged_without_a_crash(tmp_path: Path, submission: dict[str, Any]) -> None:
    shutil.rmtree(tmp_path / "track_10min_16mb", ignore_errors=True)
    folder = public(tmp_path, {"train_seed1337.log": PLAIN_A}, CODE)
    (folder / "submission.json").write_text(json.dumps(submission))
    assert not [f.text for f in audit(Folder(folder)) if f.check == checks.UNFINISHED]


DERIVED = (
    "val_bpb",
    "val_loss_std",
    "seeds",
    "seed_results",
    "bytes_total",
    "bytes_code",
    "hardware",
    "compliance",
)


@pytest.mark.parametrize("key", [*DERIVED, "all_runs", "files", "metric", "pytorch_version"])
@pytest.mark.parametrize("value", [None, 3, "text", [1, None], {"a": {}}], ids=str)
def test_any_change_of_a_derived_value_is_caught(packed: Path, key: str, value: object) -> None:
    submission = json.loads((packed / "submission.json").read_text())
    submission[key] = value
    (packed / "submission.json").write_text(json.dumps(submission))
    assert fails(packed)


def test_packed_folder_without_its_mark_is_still_audited_as_packed(packed: Path) -> None:
    _edit(packed, "submission.json", '"format"', '"form"')
    _byte_of_code(packed)
    assert any("the shipped source is not what seed" in finding.text for finding in fails(packed))


def test_payload_too_large_to_unwrap_is_a_finding(tmp_path: Path) -> None:
    bomb = base64.b85encode(lzma.compress(b" " * (UNWRAPPED_BYTES_MAX + 1))).decode()
    script = f"import lzma,base64\nexec(lzma.decompress(base64.b85decode({bomb!r})))"
    folder = public(tmp_path, {"train.log": PLAIN_A}, script, **A_SCORE)
    assert any("packed code was not unwrapped" in finding.text for finding in audit(Folder(folder)))


def test_json_report_and_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = public(tmp_path, {"train.log": PLAIN_A}, CODE, val_bpb=1.2152)
    assert main(["check", "--json", str(folder)]) == 1
    findings = json.loads(capsys.readouterr().out)[str(folder)]
    assert {"check", "level", "text", "where", "remedy"} == set(findings[0])


def test_audited_code_runs_only_when_asked(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    folder = public(tmp_path, {"train.log": PLAIN_A}, f"open({str(marker)!r}, 'w')\n", **A_SCORE)
    main(["check", str(folder)])
    assert not marker.exists()
    if not network_can_be_cut():
        pytest.skip("this machine cannot start a process without network")
    main(["check", "--run", str(folder)])
    assert marker.exists()


def test_code_that_is_run_has_no_network(tmp_path: Path) -> None:
    if not network_can_be_cut():
        pytest.skip("this machine cannot start a process without network")
    script = "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=5)\n"
    folder = public(tmp_path, {"train.log": PLAIN_A}, script, **A_SCORE)
    from tools.check.execute import check_starts

    assert any("unreachable" in finding.text for finding in check_starts(Folder(folder)))


def test_code_that_is_run_cannot_fill_the_disk_or_stay(tmp_path: Path) -> None:
    if not network_can_be_cut():
        pytest.skip("this machine cannot start a process without network")
    from tools.check.execute import check_starts

    script = "import sys\nwhile True: sys.stderr.write('x' * 2**20 + '\\n')\n"
    folder = public(tmp_path, {"train.log": PLAIN_A}, script, **A_SCORE)
    assert all("does not start" in finding.text for finding in check_starts(Folder(folder)))
    number = tmp_path / "number"
    stays = (
        f"import subprocess\nopen({str(number)!r}, 'w').write(str(subprocess.Popen(['sleep', '987']).pid))\n"
    )
    (folder / "train_gpt.py").write_text(stays)
    assert all("starts from" in finding.text for finding in check_starts(Folder(folder)))
    wait_until(lambda: not _runs(int(number.read_text())))


def _runs(process: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# ---- what somebody may try


@pytest.mark.parametrize("declared", [1.0, 1.2, 1.22, 1.21, 1.2195, 1.219, 1.21974])
def test_few_declared_digits_excuse_nothing(declared: float, tmp_path: Path) -> None:
    folder = public(tmp_path, {"train.log": PLAIN_A}, CODE, val_bpb=declared, val_loss=2.0594546)
    assert any(f.check == "A4" and f"`val_bpb` {declared}, but" in f.text for f in fails(folder))


@pytest.mark.parametrize("declared", [1.2197, 1.21972, 1.21972502])
def test_a_score_may_be_declared_with_fewer_digits(declared: float, tmp_path: Path) -> None:
    assert fails(public(tmp_path, {"train.log": PLAIN_A}, CODE, val_bpb=declared, val_loss=2.0594546)) == []


HELPER_BYTES = 136_512  # with them, the log's total of 15,863,489 bytes is one over the cap
AFTER_A_COLON = "if True:from helper import work;work()\n"
DOES_NOT_PARSE = "x = (\nif True:import json,helper as h\n"


@pytest.mark.parametrize(
    "name", ["prior.pt", "more/prior.npz", "prior.bin", "prior.safetensors", "prior.model"]
)
@pytest.mark.parametrize(
    "line", ["torch.load(Path(__file__).parent / {!r})", "x = ({!r}"], ids=["", "no parse"]
)
def test_weights_that_the_script_names_count(line: str, name: str, tmp_path: Path) -> None:
    script = line.format(name) + "\n"
    script += "#" * (47642 - len(script))
    folder = public(tmp_path, {"train.log": PLAIN_A}, script, **A_SCORE)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(bytes(12_000_000))
    (found,) = fails(folder)
    assert found.check == "A9" and "+ files it runs or reads 12,000,000 = 27,863,489" in found.text
    assert any(f.check == "A10" and f"also reads {name}" in f.text for f in audit(Folder(folder)))


@pytest.mark.parametrize(
    "line",
    [
        "train_files = os.path.join(data_path, 'fineweb_val_*.bin')",
        "class A:\n    train_files: str = f'{path}/fineweb_val_*.bin'",
        "args.train_files = sorted(folder.glob('fineweb_*.bin'))",
        "val, train = 'fineweb_val_*.bin', 'fineweb_[tv]*.bin'",
        "loader = Loader(train_files='fineweb_val_000000.bin', val_files='fineweb_val_*.bin')",
        "files = {'train': 'fineweb_val_*.bin', 'val': 'fineweb_val_*.bin'}",
        "for train_shard in glob('fineweb_val_*.bin'): pass",
        "train_loader = Loader(args.val_files, rank, device)",
        "def load(path, train_files='fineweb_val_*.bin', *, val='fineweb_val_*.bin'): pass",
    ],
)
@pytest.mark.parametrize("split", ["val", "train"])
def test_training_on_validation_files_is_named(line: str, split: str, tmp_path: Path) -> None:
    if split == "train":  # the same as it should be
        head, _, tail = line.partition("train")
        for pattern in ("fineweb_val_", "fineweb_*", "fineweb_[tv]*"):
            tail = tail.replace(pattern, "fineweb_train_*", 1)
        line = head + "train" + tail.replace("args.val_files", "args.train_files")
    folder = public(tmp_path, {"train.log": PLAIN_A}, line + "\n" + SOURCE, **A_SCORE)
    found = [f for f in fails(folder) if f.check == "C6"]
    assert len(found) == (split == "val")
    assert all("training on validation text" in f.text and "train_gpt.py:" in f.where for f in found)


def test_training_on_validation_files_is_named_where_nothing_parses(tmp_path: Path) -> None:
    script = "x = (\nA,B=1,2;train_files=join(A,'fineweb_val_*.bin');val_files='fineweb_val_*.bin'\n"
    folder = public(tmp_path, {"train.log": PLAIN_A}, script, **A_SCORE)
    assert ("C6", "FAIL") in _codes(folder)
    (folder / "train_gpt.py").write_text(script.replace("val", "train", 1))
    assert not any(check == "C6" for check, _ in _codes(folder))


def test_one_value_for_both_splits_is_not_decided(tmp_path: Path) -> None:
    script = "train_data = load('fineweb_train_*.bin', 'fineweb_val_*.bin')\n" + SOURCE
    folder = public(tmp_path, {"train.log": PLAIN_A}, script, **A_SCORE)
    assert ("C6", "WARN") in _codes(folder) and ("C6", "FAIL") not in _codes(folder)


@pytest.mark.parametrize(
    "line", ["train_loader:shards pattern={}", "train_loader:x train_shards:1 pattern={}"]
)
def test_a_log_that_trains_on_validation_files_is_named(line: str, tmp_path: Path) -> None:
    text = PLAIN_A.replace("seed:1337", line.format("./data/fineweb_val_*.bin") + "\nseed:1337")
    folder = public(tmp_path, {"train.log": text}, CODE, **A_SCORE)
    assert [f.check for f in fails(folder)] == ["C6"] and "`train_files` takes" in fails(folder)[0].text
    (folder / "train.log").write_text(text.replace("fineweb_val_", "fineweb_train_"))
    assert fails(folder) == []
    block = DIALECT_B.replace("  seed: 42", "  seed: 42\n  train_files: /data/fineweb_val_*.bin")
    (folder / "train.log").write_text(block)
    assert ("C6", "FAIL") in _codes(folder)


@pytest.mark.parametrize(
    ("evidence", "check"),
    [
        (r"(?m)^stopping_early.*\n| ?(train_time|step_avg):[\d.]+ms", "C2"),
        (r"(?m)^stopping_early.*\n| ?(train_time|step_avg):(600038|43.54)ms", "C2"),
        (r" eval_time:\d+ms", "C3"),
        (r"(?m)^\|.*\n", "C4"),
    ],
    ids=["training clock", "end of the clock", "evaluation clock", "GPU"],
)
@pytest.mark.parametrize("track", ["track_10min_16mb", "track_demo"])
def test_missing_evidence_is_not_decided(evidence: str, check: str, track: str, tmp_path: Path) -> None:
    folder = public(tmp_path, {"train.log": PLAIN_A}, CODE, **A_SCORE)
    folder = folder.parent.rename(tmp_path / track) / folder.name
    assert not [f.text for f in audit(Folder(folder)) if "not decidable" in f.text]
    (folder / "train.log").write_text(re.sub(evidence, "", PLAIN_A))
    found = [f for f in audit(Folder(folder)) if "not decidable" in f.text]
    assert [(f.check, f.level(Mode.STRICT)) for f in found] == [(check, Level.WARN)] * (track != "track_demo")


def _byte_count_off(factor: float) -> str:
    """PLAIN_A without its number of tokens, and with every score divided by `factor`."""
    text = re.sub(r"(?m)^val_loader.*\n", "", PLAIN_A)
    return re.sub(r"val_bpb:([\d.]+)", lambda m: f"val_bpb:{float(m[1]) / factor:.{len(m[1]) - 2}f}", text)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.0413])
def test_bytes_per_token_are_a_tokenizers_where_no_tokens_are_counted(
    factor: float, named: bool, tmp_path: Path
) -> None:
    text = _byte_count_off(factor)
    if not named:
        text = text.replace("fineweb10B_sp1024", "own")
    score = float(re.findall(r"_exact .*val_bpb:([\d.]+)", text)[0])
    folder = public(tmp_path, {"train.log": text}, CODE, val_bpb=score)
    found = [(f.level(Mode.AGREED), f.text) for f in audit(Folder(folder)) if f.check == "C1"]
    if factor == 1.0:
        assert found == []
    elif named:
        ((level, said),) = found
        assert level is Level.FAIL and "implied validation bytes 157," in said and "#1289" in said
    else:
        ((level, said),) = found
        assert level is Level.WARN and "2.5365 bytes per token are no known tokenizer's: not decid" in said


def test_a_count_of_tokens_that_no_tokenizer_gives_is_named(tmp_path: Path) -> None:
    tokens = f"val_loader:x tokens:{62021632 / 1.0413:.0f}"
    text = _byte_count_off(1.0413).replace("world_size", f"{tokens}\nworld_size")
    score = float(re.findall(r"_exact .*val_bpb:([\d.]+)", text)[0])
    found = fails(public(tmp_path, {"train.log": text}, CODE, val_bpb=score))
    assert [f.check for f in found] == ["C1"]


def test_a_score_that_implies_no_bytes_is_not_decided(tmp_path: Path) -> None:
    text = PLAIN_A.replace("val_loss:2.05945460", "val_loss:nan").replace("val_loss:2.0595", "val_loss:nan")
    folder = public(tmp_path, {"train.log": text}, CODE, val_bpb=1.21972502)
    assert any(f.check == "C1" and "imply no number of bytes" in f.text for f in audit(Folder(folder)))


def _paced(steps: list[int], clock: list[float], averages: list[float]) -> str:
    """PLAIN_A with training lines of these steps, milliseconds and mean times of a step."""
    lines = [
        f"step:{step}/20000 train_loss:3.0000 train_time:{time:.0f}ms step_avg:{average:.2f}ms\n"
        for step, time, average in zip(steps, clock, averages, strict=True)
    ]
    marker = "step:1/20000 train_loss"
    before, _, after = PLAIN_A.partition(marker)
    return before + "".join(lines) + "step:13780/20000" + after.partition("step:13780/20000")[2]


STEPS = list(range(500, 13_501, 500))
CLOCK = [step * 43.5 + 300 * (step % 1000 > 0) for step in STEPS]


def test_steps_are_those_that_the_clock_allows(tmp_path: Path) -> None:
    averages = [time / step for step, time in zip(STEPS, CLOCK, strict=True)]
    folder = public(tmp_path, {"train.log": _paced(STEPS, CLOCK, averages)}, CODE, **A_SCORE)
    assert fails(folder) == []
    (folder / "train.log").write_text(_paced([2 * step for step in STEPS], CLOCK, averages))
    found = {f.text.split(" of ")[0].split(" at ")[0] for f in fails(folder)}
    assert found == {"step 21,000", "step 1,000"}  # beyond the limit; more than the clock allows
    text = _paced(STEPS, CLOCK, averages).replace("step:13780/20000 val", "step:14000/20000 val")
    (folder / "train.log").write_text(text)
    (found_last,) = fails(folder)
    assert "step 14,000 at 43.54 ms per step makes 609.6 s, train_time says 600.0 s" in found_last.text


def test_mean_times_of_a_window_and_of_a_resumed_run_are_no_contradiction(tmp_path: Path) -> None:
    windows = [(time - before) / 500 for time, before in zip(CLOCK, [0.0, *CLOCK], strict=False)]
    folder = public(tmp_path, {"train.log": _paced(STEPS, CLOCK, windows)}, CODE, **A_SCORE)
    assert fails(folder) == []
    since = [step - 6_250 * (step > 6_250) for step in STEPS]
    clock = [step * 43.5 for step in since]
    (folder / "train.log").write_text(_paced(STEPS, clock, [43.5] * len(STEPS)))
    assert fails(folder) == []


def test_what_explains_a_run_is_no_weights(tmp_path: Path) -> None:
    names = ["train.log", "README.md", "submission.json", "sp1024.model", "requirements.txt", "log.txt"]
    script = f"NAMES = {names}\n"
    script += "#" * (47642 - len(script))
    folder = public(tmp_path, {"train.log": PLAIN_A}, script, **A_SCORE)
    for name in names:
        if not (folder / name).exists():
            (folder / name).write_text(PLAIN_A if name == "log.txt" else "x")
    assert not [f.text for f in audit(Folder(folder)) if f.check == "A10"]


@pytest.mark.parametrize(
    ("count", "text"), [(15_815_847, "of a model in a log"), (9_999_999, "named nowhere")]
)
def test_large_files_of_no_known_purpose_are_named(count: int, text: str, tmp_path: Path) -> None:
    script = "open('final_model.ptz', 'wb')\n" if count == 15_815_847 else ""
    script += "#" * (47642 - len(script))
    folder = public(tmp_path, {"train.log": PLAIN_A}, script, **A_SCORE)
    (folder / "final_model.ptz").write_bytes(bytes(count))
    (found,) = [f for f in audit(Folder(folder)) if f.check in ("A9", "A10")]
    assert found.level(Mode.STRICT) is Level.WARN and text in found.text


@pytest.mark.parametrize("start", [AFTER_A_COLON, DOES_NOT_PARSE], ids=["after a colon", "does not parse"])
@pytest.mark.parametrize("over", [0, 1])
def test_bytes_of_imported_files_count(start: str, over: int, tmp_path: Path) -> None:
    script = start + "#" * (47642 - len(start))
    folder = public(tmp_path, {"train.log": PLAIN_A}, script, **A_SCORE)
    (folder / "helper.py").write_text("#" * (HELPER_BYTES - 1 + over))
    found = [f for f in fails(folder) if f.check == "A9"]
    assert len(found) == over
    if over:
        assert "total 16,000,001 > 16,000,000 by 1 " in found[0].text


def test_the_larger_of_two_contradicting_totals_is_reported(tmp_path: Path) -> None:
    text = PLAIN_A.replace("int8+zlib: 15815847 bytes", "int8+zlib: 15960000 bytes")
    found = fails(public(tmp_path, {"train.log": text}, CODE, **A_SCORE))
    assert len(found) == 1 and "total 16,007,642 > 16,000,000" in found[0].text


def test_a_total_that_is_no_sum_is_named(tmp_path: Path) -> None:
    text = PLAIN_A.replace("int8+zlib: 15815847 bytes", "int8+zlib: 15900000 bytes")
    folder = public(tmp_path, {"train.log": text}, CODE, **A_SCORE)
    found = [f for f in audit(Folder(folder)) if "the larger counts, 15,947,642" in f.text]
    assert [f.level(Mode.AGREED) for f in found] == [Level.WARN] and fails(folder) == []


def test_one_log_has_one_ratio_of_loss_to_bits_per_byte(tmp_path: Path) -> None:
    text = PLAIN_A.replace("val_bpb:1.21972502", "val_bpb:1.21942502")
    folder = public(tmp_path, {"train.log": text}, CODE, val_bpb=1.21942502, val_loss=2.0594546)
    assert any(
        f.check == "C1" and "the line `final_int8_zlib_roundtrip` before it" in f.text for f in fails(folder)
    )
    text = PLAIN_A.replace("val_bpb:1.2197", "val_bpb:1.2187")
    text += "final_int6_sliding_window val_loss:2.0400 val_bpb:1.2082\n"
    (folder / "train.log").write_text(text)
    assert any(f.check == "C1" and "one text has one ratio" in f.text for f in fails(folder))


def _steps(losses: list[float], clock: list[float]) -> str:
    """PLAIN_A with training lines of these losses and milliseconds."""
    lines = [
        f"step:{step}/20000 train_loss:{loss:.4f} train_time:{time:.0f}ms step_avg:{time / step:.2f}ms\n"
        for step, loss, time in zip(itertools.count(50, 50), losses, clock, strict=False)
    ]
    marker = "step:13780/20000 val_loss"
    return PLAIN_A.replace(marker, "".join(lines) + marker)


@pytest.mark.parametrize("moved", [0.0, 0.0123])
@pytest.mark.parametrize("copied", ["training losses", "clock"])
def test_one_run_under_two_seeds(copied: str, moved: float, tmp_path: Path) -> None:
    noise = random.Random(3)
    losses = [3.0 + noise.uniform(-0.1, 0.1) for _ in range(20)]
    clock = [2177.0 * (index + 1) + noise.uniform(-20, 20) for index in range(20)]
    other_losses = [loss + moved if copied == "training losses" else loss + noise.random() for loss in losses]
    other_clock = [
        time + 1e3 * moved if copied == "clock" else time + noise.uniform(-40, 40) for time in clock
    ]
    logs = {
        "train_seed1.log": _steps(losses, clock).replace("seed:1337", "seed:1"),
        "train_seed2.log": _steps(other_losses, other_clock).replace("seed:1337", "seed:2"),
    }
    found = [f for f in fails(public(tmp_path, logs, CODE, **A_SCORE)) if f.check == "A5"]
    assert len(found) == 1 and f"the {copied} of train_seed2.log" in found[0].text


def test_two_runs_are_two(tmp_path: Path) -> None:
    logs = {}
    for seed in (1, 2):
        noise = random.Random(seed)
        losses = [3.0 + noise.uniform(-0.01, 0.01) for _ in range(20)]
        clock = [2177.0 * (index + 1) + noise.uniform(-20, 20) for index in range(20)]
        logs[f"train_seed{seed}.log"] = _steps(losses, clock).replace("seed:1337", f"seed:{seed}")
    assert fails(public(tmp_path, logs, CODE, **A_SCORE)) == []


@pytest.mark.parametrize(
    ("declared", "level"), [(47_642, None), (40_000, "FAIL"), (60_000, "WARN"), (47_600, "WARN")]
)
def test_declared_bytes_of_code(declared: int, level: str | None, tmp_path: Path) -> None:
    folder = public(tmp_path, {"train.log": PLAIN_A}, CODE, **A_SCORE, bytes_code=declared)
    found = {f.level(Mode.AGREED).name for f in audit(Folder(folder)) if "`bytes_code`" in f.text}
    assert found == ({level} if level else set())


@pytest.mark.parametrize("hardware", ["8xA100 80GB", "4 x NVIDIA H100", "8xH200 SXM", "1xRTX5090"])
def test_declared_hardware_is_that_of_the_track_and_the_logs(hardware: str, tmp_path: Path) -> None:
    folder = public(tmp_path, {"train.log": PLAIN_A}, CODE, **A_SCORE, hardware=hardware)
    found = {f.check for f in fails(folder) if f"declares `{hardware}`" in f.text}
    assert found == {"A4", "C4"}
    (folder / "submission.json").write_text(
        (folder / "submission.json").read_text().replace(hardware, "8xH100 80GB SXM")
    )
    assert fails(folder) == []


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL"])
def test_another_form_of_the_gpu_in_a_log_is_not_that_of_the_track(name: str, tmp_path: Path) -> None:
    assert "NVIDIA H100 80GB HBM3" in PLAIN_A
    log = PLAIN_A.replace("NVIDIA H100 80GB HBM3", name)
    folder = public(tmp_path, {"train.log": log}, CODE, **A_SCORE)
    assert "C4" in {finding.check for finding in fails(folder) if name in finding.text}


def test_links_that_leave_the_folder_are_named_and_not_followed(tmp_path: Path) -> None:
    folder = public(tmp_path, {"train.log": PLAIN_A}, CODE, **A_SCORE)
    outside = tmp_path / "outside.log"
    outside.write_text("not JSON")
    for name in ("submission.json", "train_seed3.log", "more"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside if "." in name else tmp_path)
    (folder / "inside.md").symlink_to(folder / "README.md")
    found = {f.where for f in fails(folder) if "is a link that leaves the folder" in f.text}
    assert found == {"submission.json", "train_seed3.log", "more"}
    assert ("A2", "FAIL") in _codes(folder) and not any("cannot be read" in f.text for f in fails(folder))


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("exec(open('/opt/model.py').read())", "FAIL"),
        ("import runpy; runpy.run_path('../../shared/model.py')", "FAIL"),
        ("import ctypes; ctypes.CDLL('/opt/fast.so')", "FAIL"),
        ("import sys; sys.path.insert(0, '../shared')", "WARN"),
        ("exec(open(name + kind).read())", "WARN"),
    ],
)
def test_code_from_outside_the_folder_is_named(line: str, level: str, tmp_path: Path) -> None:
    folder = public(tmp_path, {"train.log": PLAIN_A}, line + "\n" + SOURCE, **A_SCORE)
    assert ("A10", level) in _codes(folder)


def test_a_program_wrapped_several_times_is_read(tmp_path: Path) -> None:
    program = "import requests\n" + SOURCE
    for _ in range(4):
        payload = base64.b85encode(lzma.compress(program.encode())).decode()
        program = f"import lzma,base64\nexec(lzma.decompress(base64.b85decode({payload!r})))"
    found = audit(Folder(public(tmp_path, {"train.log": PLAIN_A}, program, **A_SCORE)))
    assert any(f.check == "A11" and "imports requests" in f.text for f in found)


# ---- what a folder may do to the audit


def test_one_folder_that_fails_loses_no_other_report(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = public(tmp_path, {"train.log": PLAIN_A}, CODE)
    (broken / "submission.json").write_text("[" * 100_000)
    assert main(["check", str(tmp_path / "absent"), str(broken), str(packed)]) == 1
    shown = capsys.readouterr()
    assert "absent is not a folder" in shown.err
    assert "nested too deeply" in shown.out and "0 FAIL, 1 WARN" not in shown.out.split(str(packed))[0]
    assert "0 FAIL" in shown.out.split(str(packed))[1]
    assert main(["check", str(tmp_path / "absent"), str(packed)]) == 2


def test_a_check_that_ends_in_an_error_is_a_finding(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Folder) -> Iterator[Finding]:
        yield from ()
        raise KeyError("unheard of")

    expected = audit(Folder(packed))
    monkeypatch.setattr(checks, "CHECKS", (broken, *checks.CHECKS))
    found = audit(Folder(packed))
    assert [f.text for f in found[1:]] == [f.text for f in expected]
    assert found[0].level(Mode.CONVENTION) is Level.FAIL and "KeyError: 'unheard of'" in found[0].text


def test_an_audit_that_is_stopped_is_a_finding_and_the_next_one_runs(packed: Path) -> None:
    with Auditor() as auditor:
        before = auditor.report(packed)
        worker = auditor._worker
        assert worker is not None
        worker.kill()
        worker.join()
        (stopped,) = auditor.report(packed).findings
        assert stopped.level(Mode.CONVENTION) is Level.FAIL and "the audit was stopped" in stopped.text
        assert auditor.report(packed).findings == before.findings


def test_a_log_without_an_end_is_read_in_part(tmp_path: Path) -> None:
    folder = public(tmp_path, {"train.log": PLAIN_A}, CODE, **A_SCORE)
    with (folder / "train.log").open("ab") as file:
        file.truncate(200_000_000)
    tracemalloc.start()
    found = audit(Folder(folder))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert any("`train.log` was not read to its end" in f.text for f in found) and peak < 150e6


def test_what_a_folder_holds_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = public(tmp_path, {"train.log": PLAIN_A}, CODE, **A_SCORE)
    value = json.loads((folder / "submission.json").read_text()) | {"date": "\x1b[2J\ud800\n  0 FAIL"}
    (folder / "submission.json").write_text(json.dumps(value))
    main(["check", str(folder)])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\\x1b[2J\\ud800\\n" in shown
    main(["check", "--json", str(folder)])
    assert json.loads(capsys.readouterr().out)


def test_damaged_folders_are_judged() -> None:
    outcome = damage.run_cases(20, seed=1)
    assert outcome.cases == 20 and outcome.errors == [] and outcome.ok()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_damaged_folders_are_judged() -> None:
    outcome = damage.run_cases(2_000, seed=0)
    assert outcome.cases == 2_000 and outcome.errors == [] and outcome.ok()
