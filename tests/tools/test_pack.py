"""What pack writes, proves and refuses."""

import base64
import json
import lzma
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.files import sha256_file
from tests.support import case
from tests.support.processes import SHORT_END, Lab, results
from tests.support.runs import CONFIG, SOURCE, TEXT_BYTES, make_run, make_runs, pack, wrap
from tests.tools.conftest import Tool
from tools.__main__ import main
from tools.audit.verdict import Verdict
from tools.runs.folder import Folder
from tools.runs.source import read_script, same_program
from tools.submit import readme
from tools.submit.check import audit
from tools.submit.findings import Level
from tools.submit.packed import check_config


@pytest.fixture
def refusal(tmp_path: Path, tool: Tool) -> Tool:
    """Packs runs, which must be refused; the message. Nothing may be left behind."""
    records = tmp_path / "refused"

    def refused(*arguments: object) -> str:
        told = tool("pack", *arguments, "--name", "Refused", "--records", records, status=2)
        assert not [path for path in records.rglob("*") if path.is_file()]
        return told

    return refused


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
    assert submission["hardware"] == "x86_64 CPU, 2 cores"
    config = (folder.path / "config.env").read_text()
    assert "MATRIX_LR=0.02" in config and "SEED" not in config and "RUN_ID" not in config
    page = (folder.path / "README.md").read_text()
    assert f"{submission['val_bpb']:.8f}" in page and "SEED=1337 python train_gpt.py" in page
    assert "| legal_ttt s |" in page
    # Each seed has its stages, and reviewers their means.
    stages = submission["seed_results"]["42"]["stages"]
    assert list(stages) == ["quantized", "sliding window", "test-time training"]
    gain = stages["sliding window"] - stages["test-time training"]
    assert submission["ttt_gain_bpb"] == pytest.approx(gain, abs=1e-6)
    assert submission["pre_ttt_val_bpb"] - submission["val_bpb"] == pytest.approx(gain, abs=1e-6)
    assert submission["pre_quant_val_bpb"] is None
    (row,) = re.findall(rf"^\| 42 \| {stages['quantized']:.6f}.*$", page, re.MULTILINE)
    assert row.endswith(f"{-gain:+.6f} |")


def requirements(tmp_path: Path, versions: dict[str, str | None], attention: str = "sdpa") -> list[str]:
    """Lines of the requirements.txt of a run with these versions, and this kernel of attention."""
    run = make_run(tmp_path / "runs" / "a", 1, summary_changes={"versions": versions})
    with (run / "log.txt").open("a") as log:
        log.write(f"attention:{attention} tried: {attention} error:6.0e-07\n")
    return (pack(tmp_path / "records", [run]) / "requirements.txt").read_text().splitlines()


def test_what_the_script_imports_is_required_in_the_build_that_ran(tmp_path: Path) -> None:
    versions = {"python": "3.12.3", "torch": "2.13.0+cu128", "numpy": "2.4.6", "triton": "3.9"}
    assert requirements(tmp_path, versions, "fa3") == [
        "--extra-index-url https://download.pytorch.org/whl/cu128",
        "torch==2.13.0+cu128",
        "numpy==2.4.6",
        "sentencepiece",  # always imported; runs do not record its version
        "triton==3.9",
        "--find-links https://windreamer.github.io/flash-attention3-wheels/cu128_torch2130/",
        "flash_attn_3",
    ]

    versions = {"torch": "2.13.0+git1a2b3c", "numpy": "2.4.6", "triton": None}  # an own build
    assert requirements(tmp_path / "own", versions) == ["torch==2.13.0", "numpy==2.4.6", "sentencepiece"]


def run_on(folder: Path, environment: dict[str, str], **data: int) -> Path:
    """A run on an exported data set, with the hashes that it records of its data."""
    shards, tokenizer = Path(environment["DATA_PATH"]), Path(environment["TOKENIZER_PATH"])
    hashes = {"tokenizer": sha256_file(tokenizer), "manifest": sha256_file(shards / "manifest.json")}
    paths = {"DATA_PATH": str(shards), "TOKENIZER_PATH": str(tokenizer)}
    settings = {**CONFIG, **paths}
    changes = {"data": {"hashes": hashes, **data}, "config": settings}
    return make_run(folder / "a", 1, config=paths, summary_changes=changes)


def test_a_record_on_case_marks_proves_its_bytes(tmp_path: Path, refusal: Tool) -> None:
    environment = case.make_dataset(tmp_path, "caseops")
    noted = Path(environment["DATA_PATH"]) / "manifest.json"
    manifest = json.loads(noted.read_text())
    for more in (1, 0):  # byte in the sidecar than the manifest notes
        manifest["splits"]["val"]["audit"]["sidecar_bytes"] = TEXT_BYTES - more
        noted.write_text(json.dumps(manifest))
        run = run_on(tmp_path / f"runs{more}", environment, val_tokens=1234, val_bytes=TEXT_BYTES)
        folder = pack(tmp_path / f"records{more}", [run])
        found = [f"{finding.check} {finding.text}" for finding in audit(folder)]
        said = f"C1 {TEXT_BYTES} bytes of text are counted, manifest.json has {TEXT_BYTES - 1}"
        assert (said in found, main(["check", str(folder)])) == (more == 1, more)
    files = {path.name for path in folder.iterdir()}
    assert {"caseops.model", "caseops.py", "manifest.json"} <= files
    section = (folder / "README.md").read_text().split("## Data\n")[1].split("\n## ")[0]
    for fact in (manifest["source"], manifest["revision"], manifest["tokenizer"]["sha256"], "1,234 tokens",
                 "97,512 bytes", "151,080,891", "97,512 in all"):
        assert fact in section, fact
    tokenizer = folder / "caseops.model"
    tokenizer.write_bytes(tokenizer.read_bytes() + b"x")
    found = [finding.text for finding in audit(folder)]
    assert "`caseops.model` is not the tokenizer of seed 1: its sha256 differs" in found
    Path(environment["TOKENIZER_PATH"]).unlink()
    assert "a record on CaseOps data holds its tokenizer" in refusal(run)


PUBLISHED = {"source": "romeerp/parameter-golf-caseops-v1", "revision": "abc", "train_shards": 80,
             "dataset": "fineweb10B_sp8192_lossless_caps_caseops_v1_reserved"}


def test_the_command_that_gets_the_data() -> None:
    mine = {"dataset": "mine", "source": "a.jsonl", "revision": "sha256:0", "tokenizer": "t.model"}
    for data, command in (
        (PUBLISHED, "python data/fineweb.py --variant caseops_published --train-shards 80 --revision abc"),
        ({**PUBLISHED, "dataset": f"{PUBLISHED['dataset']}_fused"},
         "python data/fineweb.py --variant caseops --train-shards 80 --revision abc"),
        ({**PUBLISHED, "source": "somebody/else"}, ""),
        ({"dataset": "sample_sp1024", "source": "docstrings"}, "python data/sample.py"),
        (mine, "python data/export.py --docs a.jsonl --name mine --tokenizer t.model"),
    ):
        assert readme.fetch_command(data) == command


def test_more_files_join_the_record_replace_none(tmp_path: Path, refusal: Tool) -> None:
    run = make_run(tmp_path / "runs" / "a", 1)
    maker = tmp_path / "prepare_data.py"
    maker.write_text("print('tokens')\n")
    folder = pack(tmp_path / "records", [run], "--with", str(maker))
    assert (folder / "prepare_data.py").read_bytes() == maker.read_bytes()
    assert "prepare_data.py" in Folder(folder).submission["files"]
    for name in ("train_gpt.py", "README.md"):
        (tmp_path / name).write_text("other\n")
        assert f"the record has a {name} of its own" in refusal(run, "--with", tmp_path / name)
    assert "no such file" in refusal(run, "--with", tmp_path / "nothing.py")


def test_a_record_of_the_challenge_has_an_author(tmp_path: Path, refusal: Tool, tool: Tool) -> None:
    run = make_run(tmp_path / "runs" / "a", 1, config=TEN_MINUTES, summary_changes=H100S)
    assert "needs --github-id --blurb" in refusal(run, "--author", "A")
    other = make_run(tmp_path / "runs" / "b", 1)
    told = tool("pack", other, "--author", "A", "--records", tmp_path / "records", "--name", "Own")
    assert "note: --github-id, --blurb not given" in told


def test_a_new_setting_without_a_source_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = tmp_path / "design.md"
    sources.write_text("| `Z_LOSS=0.0` | PaLM, arXiv 2204.02311 | none |\n")
    monkeypatch.setattr("tools.runs.techniques.SOURCES", sources)
    before, after = {"Z_LOSS": "0.0", "GAIN": "0"}, {"Z_LOSS": "0.1", "GAIN": "1"}
    base = pack(tmp_path / "records", make_runs(tmp_path / "base", 1, config=before), name="Base")
    assert "names no source" not in capsys.readouterr().out
    runs = make_runs(tmp_path / "new", 1, config=after)
    pack(tmp_path / "records", runs, "--baseline", str(base), name="New")
    assert "names no source for GAIN;" in capsys.readouterr().out


def test_baseline_gives_diff_and_comparison(tmp_path: Path) -> None:
    base = pack(tmp_path / "records", make_runs(tmp_path / "base", 1, 2, 3), name="Base")
    changed = SOURCE.replace("LEARNING_RATE = 0.02", "LEARNING_RATE = 0.03")
    runs = make_runs(tmp_path / "new", 4, 5, 6, source=changed, gain=0.05)
    folder = pack(tmp_path / "records", runs, "--baseline", str(base), name="New")
    assert "+LEARNING_RATE = 0.03" in (folder / "baseline.diff").read_text()
    comparison = Folder(folder).submission["comparison"]
    assert comparison["difference_bpb"] < 0 and comparison["meets_margin"]
    assert comparison["frontier"]["p"] < 0.01


def base_with_sources(
    place: Path, monkeypatch: pytest.MonkeyPatch, sources: str, config: dict[str, str]
) -> Path:
    """A record to compare with, where docs/design.md has only these rows."""
    table = place / "design.md"
    table.write_text(sources)
    monkeypatch.setattr("tools.runs.techniques.SOURCES", table)
    return pack(place / "records", make_runs(place / "base", 1, 2, config=config), name="Base")


def test_the_first_paragraph_says_what_is_new_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A technique from a paper, off in the baseline; settings of both sides, code of both, or nothing."""
    sources = "| `Z_LOSS=0.0` | PaLM, arXiv 2204.02311 | none |\n| `GAIN=1` | #1493 | none |\n"
    base = base_with_sources(tmp_path, monkeypatch, sources, {"Z_LOSS": "0.0"})
    assert "New over" not in (base / "README.md").read_text()
    paper = "[arXiv 2204.02311](https://arxiv.org/abs/2204.02311)"
    changed = SOURCE + "# changed\n"
    for name, source, config, news in (
        ("Setting", SOURCE, {"Z_LOSS": "0.1"}, f"New over {base.name}: `Z_LOSS=0.1` (PaLM, {paper})."),
        ("Code", changed, {"Z_LOSS": "0.0"},
         f"New over {base.name}: a change of the source (`baseline.diff`, +1 −0 lines)."),
        ("Both", changed, {"Z_LOSS": "0.1"},
         f"New over {base.name}: `Z_LOSS=0.1` (PaLM, {paper}), a change of the source (`baseline.diff`, +1 −0"
         " lines)."),
        ("Neither", SOURCE, {"Z_LOSS": "0.0"}, f"Nothing but the seeds differs from {base.name}."),
    ):
        runs = make_runs(tmp_path / name, 2, 3, source=source, config=config)
        folder = pack(tmp_path / "records", runs, "--baseline", str(base), "--blurb", "My idea.", name=name)
        page = (folder / "README.md").read_text()
        assert page.split("\n\n")[2] == f"My idea. {news}"
        is_changed = source == changed
        assert (folder / "baseline.diff").exists() == is_changed, "there is a diff if the source changed"
        if config["Z_LOSS"] == "0.1":
            assert f"\n| `Z_LOSS` | 0.0 | 0.1 | PaLM, {paper} |\n" in page
            assert f"\n| `Z_LOSS=0.1` | `Z_LOSS=0.0` | PaLM, {paper} |\n" in page
        # Of the seeds, both sides have one.
        scores = [Folder(one).submission["seed_results"]["2"]["val_bpb"] for one in (base, folder)]
        difference = f"{scores[1] - scores[0]:+.8f}"
        assert f"\n| 2 | {scores[0]:.8f} | {scores[1]:.8f} | {difference} |\n" in page
        assert "\n| 3 | " not in page.split("## Against")[1].split("\n## ")[0]
        assert [f.text for f in audit(folder) if f.level == Level.FAIL] == []


def test_a_value_of_the_authors_own_is_not_credited_to_the_source_of_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_with_sources(tmp_path, monkeypatch, "| `GAIN=1.5` | #1493 | none |\n", {"GAIN": "0"})
    link = "[#1493](https://github.com/openai/parameter-golf/pull/1493)"
    for name, gain, source in (("Published", "1.5", link), ("Own", "2.0", f"default 1.5: {link}")):
        runs = make_runs(tmp_path / name, 1, 2, config={"GAIN": gain})
        folder = pack(tmp_path / "records", runs, "--baseline", str(base), name=name)
        page = (folder / "README.md").read_text()
        assert f"New over {base.name}: `GAIN={gain}` ({source})." in page
        assert f"\n| `GAIN` | 0 | {gain} | {source} |\n" in page


def test_the_author_is_named_or_not_invented(tmp_path: Path, tool: Tool) -> None:
    (run,) = make_runs(tmp_path / "runs", 1)
    for number, (options, line) in enumerate((
        ((), "Author: not given."),
        (("--author", "A. Person"), "Author: A. Person."),
        (("--author", "A. Person", "--github-id", "ap"), "Author: A. Person [@ap](https://github.com/ap)."),
    )):
        place = ["--records", tmp_path / str(number), "--name", "Own", "--track", "track_own"]
        tool("pack", run, *place, *options)
        (page,) = (tmp_path / str(number)).rglob("README.md")
        assert f"\n\n{line}\n\n" in page.read_text()


def test_a_limit_has_a_row_with_the_seeds_that_broke_it(tmp_path: Path) -> None:
    limits = {"eval_seconds": {"value": 601.5, "limit": 600.0, "ok": False}}
    runs = [make_run(tmp_path / "a", 1, summary_changes={"limits": limits}), *make_runs(tmp_path, 2)]
    page = (pack(tmp_path / "records", runs) / "README.md").read_text()
    (row,) = re.findall(r"^\| evaluation, s .*$", page, re.MULTILINE)
    assert row.startswith("| evaluation, s | 600.00") and "| 601.50 |" in row
    assert row.endswith("| **no: seed 1** |")


def test_a_run_to_its_step_limit_has_all_its_steps_whatever_line_is_the_last(tmp_path: Path) -> None:
    (run,) = make_runs(tmp_path / "runs", 1)
    lines = [line for line in (run / "log.txt").read_text().splitlines() if "step:400/400" not in line]
    (run / "log.txt").write_text("\n".join(lines) + "\n")
    folder = pack(tmp_path / "records", [run])
    result = Folder(folder).submission["seed_results"]["1"]
    assert result["steps"] == 400 and result["train_time_s"] < 300  # of the last line that there is
    assert main(["check", str(folder)]) == 0

    # With the line that tells the clock at the end, time and pace are of the whole training.
    (run / "log.txt").write_text("\n".join([*lines, "limit:train_seconds 300.5 of 600 ok"]) + "\n")
    result = Folder(pack(tmp_path / "told", [run])).submission["seed_results"]["1"]
    assert result["train_time_s"] == 300.5 and result["step_avg_ms"] == 751.25


def test_wrapped_script_is_the_same_program_with_the_source_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pack(tmp_path / "records", make_runs(tmp_path / "runs", 1), "--wrap")
    told, _, command = capsys.readouterr().out.splitlines()[-1].partition(": python -m tools prove ")
    source, option, config = command.split()
    assert told == "not yet proven legal by experiment" and option == "--config"
    assert (Path(source), Path(config)) == (folder / "train_gpt_readable.py", folder / "config.env")
    shipped = read_script(folder / "train_gpt.py")
    assert shipped.wrapped and shipped.raw == wrap(SOURCE) and same_program(shipped.text, SOURCE)
    assert (folder / "train_gpt_readable.py").read_text() == SOURCE
    first_of_run = (folder / "README.md").read_text().split("## Run\n\n")[1].splitlines()[0]
    assert "`train_gpt_readable.py` is its source" in first_of_run
    assert Folder(folder).submission["bytes_code"] == shipped.bytes < len(SOURCE)


def test_the_form_that_the_run_counted_is_shipped(tmp_path: Path, refusal: Tool) -> None:
    run = make_run(tmp_path / "runs" / "a", 1)
    shipped = run / "train_gpt.shipped.py"
    shipped.write_bytes(wrap(SOURCE))
    assert (pack(tmp_path / "records", [run]) / "train_gpt.py").read_bytes() == wrap(SOURCE)
    shipped.write_bytes(wrap(SOURCE.replace("0.02", "0.03")))
    assert "is not the program in train_gpt.py" in refusal(run)
    newer = lzma.compress(b"type of another = Python\n")  # no Python reads it, as 3.10 not all of 3.12
    wrapper = f"import lzma,base64;exec(lzma.decompress(base64.b85decode({base64.b85encode(newer)!r})))"
    shipped.write_text(wrapper)
    message = refusal(run)
    assert "is not a program for Python" in message and "(3.11.7)" in message


def test_unfit_and_mixed_runs_are_refused(tmp_path: Path, refusal: Tool) -> None:
    changes: dict[str, dict[str, Any]] = {
        "did not finish": {"exit": "signal"},
        "marked not comparable": {"comparable": False},
        "is not the code that ran": {"code": {"sha256": "0" * 64}},
        "was continued with different code": {"code": {"sha256": f"{'1' * 64} after {'0' * 64}"}},
        "summary.json says 43": {"seed": 43},
        "says MATRIX_LR=0.02, but the run ended with 0.03": {"config": {**CONFIG, "MATRIX_LR": "0.03"}},
    }
    for number, (message, change) in enumerate(changes.items()):
        run = make_run(tmp_path / "runs" / str(number), 42, summary_changes=change)
        assert message in refusal(run)
    runs = [
        make_run(tmp_path / "runs" / "a", 1),
        make_run(tmp_path / "runs" / "b", 1, source=SOURCE + "\n"),
        make_run(tmp_path / "runs" / "c", 2, config={"MATRIX_LR": "0.03"}),
        make_run(tmp_path / "runs" / "scored", 3, summary_changes={"config": {**CONFIG, "EVAL_ONLY": "x"}}),
        make_run(tmp_path / "runs" / "under way", 4),
    ]
    (runs[-1] / "summary.json").unlink()
    message = refusal(*runs)
    assert "scored an artifact" in message and "under way" in message and message.count("MATRIX_LR") == 1
    assert "seed 1 comes more than once" in message
    assert "ran different code" in message
    assert "MATRIX_LR is 0.02" in message and "0.03 in" in message


def test_a_record_has_one_hardware_and_one_set_of_data(tmp_path: Path, refusal: Tool, tool: Tool) -> None:
    """A run that does not say is not refused for it; threads of the host change nothing on GPUs."""
    machine = {"gpus": [], "cores": 2, "world_size": 1, "device": "CPU", "threads": 2}
    first = make_run(tmp_path / "a", 1, summary_changes={"hardware": machine})
    changes: dict[str, dict[str, Any]] = {
        f"world_size is 1 in {first}; 2 in": {"hardware": {**machine, "world_size": 2}},
        f"device is CPU in {first}; GPU in": {"hardware": {**machine, "device": "GPU"}},
        "the hash of the shards is ": {"data": {"hashes": {"shards": "other"}}},
    }
    named = {"data": {"hashes": {"shards": "one"}}, "hardware": machine}
    first_data = make_run(tmp_path / "data", 1, summary_changes=named)
    for number, (message, change) in enumerate(changes.items()):
        other = make_run(tmp_path / str(number), 2, summary_changes=change)
        assert message in refusal(first_data if "data" in change else first, other)
    other = make_run(tmp_path / "threads", 2, summary_changes={"hardware": {**machine, "threads": 4}})
    options = ["--name", "Threads", "--track", "track_x", "--records", tmp_path / "records"]
    tool("pack", first, other, *options)
    # Nor is a folder that another tool has packed from such runs.
    (folder,) = (tmp_path / "records/track_x").iterdir()
    assert not [finding for finding in audit(folder) if "with seed" in finding.text]
    path = folder / "summary_seed2.json"
    path.write_text(path.read_text().replace('"device": "CPU"', '"device": "GPU"'))
    assert "`device` is CPU with seed 1, and GPU with seed 2" in [finding.text for finding in audit(folder)]


def test_the_submission_and_the_excess_are_told(tmp_path: Path, refusal: Tool, tool: Tool) -> None:
    run = make_run(tmp_path / "runs" / "a", 1, config={"ARTIFACT_BYTES_MAX": "301000"})
    excess = 300_000 + len(SOURCE.encode()) - 301_000
    assert f"{excess:,} over the cap of 301,000" in refusal(run, "--track", "track_demo")
    (run,) = make_runs(tmp_path / "runs", 1)
    command = ["pack", run, "--records", tmp_path / "records", "--name", "Test", "--date", "2026-05-01"]
    told = json.loads(tool(*command, "--track", "track_demo", "--author", "A", "--json"))
    folder = Path(told.pop("folder"))
    before = (folder / "submission.json").read_bytes()
    assert told == json.loads(before)
    assert "never overwritten" in tool(*command, "--track", "track_demo", status=2)
    assert (folder / "submission.json").read_bytes() == before


def test_a_track_cannot_leave_the_records(tmp_path: Path, refusal: Tool) -> None:
    (tmp_path / "refused").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "refused" / "track_link").symlink_to(tmp_path / "outside")
    run = make_run(tmp_path / "runs" / "a", 1)
    before = sorted(tmp_path.rglob("*"))
    for track in ("../outside", "/tmp/outside", "track_a/../../x", "..", "track_", "demo", ""):
        assert "--track" in refusal(run, "--track", track)
    assert "leaves" in refusal(run, "--track", "track_link")
    assert sorted(tmp_path.rglob("*")) == before


H100S = {"hardware": {"gpus": ["NVIDIA H100 80GB HBM3"] * 8, "world_size": 8}}
TEN_MINUTES = {"MAX_WALLCLOCK_SECONDS": "600.0", "ARTIFACT_BYTES_MAX": "16000000"}


def test_the_track_is_that_of_the_runs_configuration(tmp_path: Path) -> None:
    one_h200 = {"hardware": {"gpus": ["NVIDIA H200"], "world_size": 1}}
    minute = {"MAX_WALLCLOCK_SECONDS": "60.0", "ARTIFACT_BYTES_MAX": "450000"}
    who = ["--author", "A", "--github-id", "a", "--blurb", "B.", "--no-replay"]
    place = ["--name", "Own", "--date", "2026-05-01", "--records", str(tmp_path / "r")]
    for config, summary, track in (
        (TEN_MINUTES, H100S, "track_10min_16mb"),
        (minute, {}, "track_cpu_60s_450kb"),
        ({**TEN_MINUTES, "MAX_WALLCLOCK_SECONDS": "1200"}, H100S, "track_8xh100_20min_16mb"),
        (TEN_MINUTES, one_h200, "track_1xh200_10min_16mb"),
    ):
        run = make_run(tmp_path / "runs" / track, 1, config=config, summary_changes=summary)
        assert main(["pack", str(run), *place, *who]) == 0
        folder = Folder(tmp_path / "r" / track / "2026-05-01_Own")
        assert folder.submission["track"] == track.removeprefix("track_")


def test_the_runs_of_a_record_are_replayed(
    tmp_path: Path, refusal: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = ("--author", "A", "--github-id", "a", "--blurb", "B.")
    run = make_run(tmp_path / "runs" / "a", 1, config=TEN_MINUTES, summary_changes=H100S)
    assert "of its own; --replay takes a whole run directory" in refusal(run, *who)
    verdict = Verdict({"artifact_sha256": "a" * 64, "seed": 5}, refuted="replay: too cheap")
    monkeypatch.setattr("tools.audit.replay.replayed", lambda *_: verdict)
    assert "refuted: replay: too cheap; --no-replay" in refusal(run, *who)
    verdict.refuted = ""
    verdict.passed.append({"law": "replay", "text": "8 documents"})
    place = ["--name", "Own", "--date", "2026-05-01", "--records", str(tmp_path / "r")]
    assert main(["pack", str(run), *place, *who]) == 0
    folder = tmp_path / "r/track_10min_16mb/2026-05-01_Own"
    (replay,) = json.loads((folder / "proof.json").read_text())["replays"]
    assert replay["status"] == 0 and replay["artifact_sha256"] == "a" * 64
    assert Folder(folder).submission["proof"] == {
        "verdict": "not asked", "score_first": "not asked", "no_network": "not asked", "replayed_runs": 1}
    assert "(`prove --replay`): 1 run\n" in (folder / "README.md").read_text()
    assert main(["check", str(folder)]) in (0, 1)


@pytest.mark.parametrize(("config", "summary", "reasons"), [
    ({}, {"phases": {"train": 600.0, "eval_roundtrip": 41.0, "eval_legal_ttt": 601.0}}, ["for 601.00 s"]),
    ({}, {"train_seconds": 601.5}, ["it trained for 601.50 s", "track_8xh100_10min_16mb"]),
    # A demo, and the same name on a board with less memory bandwidth and power.
    ({"MAX_WALLCLOCK_SECONDS": "60.0"}, {"hardware": {"gpus": [], "cores": 2, "world_size": 1}},
     ["it ran on x86_64 CPU, 2 cores, not on 8 x H100", "track_cpu_60s"]),
    ({}, {"hardware": {"gpus": ["NVIDIA H100 PCIe"] * 8, "world_size": 8}}, ["not on 8 x H100"]),
])
def test_what_is_no_record_whatever_its_own_limits(
    config: dict, summary: dict, reasons: list[str], tmp_path: Path, refusal: Tool
) -> None:
    settings = {**TEN_MINUTES, "MAX_EVAL_SECONDS": "4800", **config}
    run = make_run(tmp_path / "runs" / "a", 1, config=settings, summary_changes={**H100S, **summary})
    message = refusal(run, "--track", "track_10min_16mb")
    assert all(reason in message for reason in reasons), message


def test_the_packed_script_alone_is_the_record(lab: Lab) -> None:
    """In a clone of the challenge, with nothing set; a run of it with other settings ships those."""
    clone = lab.elsewhere("challenge")
    data = shutil.copytree(lab.dataset, clone.folder / "data/datasets/tiny").relative_to(clone.folder)
    settings = {"DATA_PATH": data, "TOKENIZER_PATH": data / "tokenizer.model", "VAL_TOKENS_LIMIT": 0,
                "ITERATIONS": 2}
    run = clone.succeed(**settings, **SHORT_END)
    folder = pack(clone.folder / "records", [run.directory])
    assert main(["check", str(folder)]) == 0
    counted = [finding.text for finding in audit(folder) if finding.check == "A10"]
    assert counted == [], "the files of a record are not read by its script"
    assert "\nSEED=1337 python train_gpt.py\n" in (folder / "README.md").read_text()
    shipped = folder / "train_gpt.py"
    inside = Lab(folder, lab.dataset)
    again = inside.succeed(script=shipped, **inside.nothing_but())
    assert results(again) == results(run)
    assert again.summary["config"] == {**run.summary["config"], "RUN_ID": "", "RUNS_DIR": "runs"}
    assert (again.directory / "train_gpt.shipped.py").read_bytes() == shipped.read_bytes()

    shorter = inside.elsewhere("shorter")
    other = shorter.succeed(script=shipped, **inside.nothing_but(ITERATIONS=1))
    assert other.summary["steps"] == 1
    changed = (other.directory / "train_gpt.shipped.py").read_bytes()
    assert changed == shipped.read_bytes().replace(b"'ITERATIONS': '2'", b"'ITERATIONS': '1'")
    shipped.write_bytes(changed)
    assert any("train_gpt.py starts with {" in finding.text for finding in check_config(Folder(folder)))


HUB = """
import fnmatch, pathlib
def snapshot_download(repo, repo_type, revision, local_dir, allow_patterns):
    assert (repo, repo_type, revision) == ("kevclark/parameter-golf", "dataset", "abc")
    shards = [*(f"fineweb_train_{n:06d}.bin" for n in range(9)), "fineweb_val_000000.bin"]
    names = [f"datasets/{folder}/{name}" for folder in ("fineweb10B_sp8192", "other") for name in shards]
    for name in [*names, "tokenizers/fineweb_8192_bpe.model"]:
        path = pathlib.Path(local_dir, "datasets", name)
        if any(fnmatch.fnmatch(f"datasets/{name}", pattern) for pattern in allow_patterns):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
"""


def test_the_data_command_needs_nothing_of_ours(tmp_path: Path) -> None:
    """In a clone of the challenge, with its hub's client, it fetches the shards of the run and no more."""
    (tmp_path / "data").mkdir()
    (tmp_path / "huggingface_hub.py").write_text(HUB)
    data = {"source": "kevclark/parameter-golf", "dataset": "fineweb10B_sp8192", "revision": "abc",
            "train_shards": 2, "tokenizer": "fineweb_8192_bpe.model"}
    command = readme.hub_command(data).replace("python3", shlex.quote(sys.executable))
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, check=True)
    fetched = {path.name for path in tmp_path.glob("data/datasets/fineweb10B_sp8192/*")}
    assert fetched == {f"fineweb_{name}.bin" for name in ("train_000000", "train_000001", "val_000000")}
    assert (tmp_path / "data/tokenizers/fineweb_8192_bpe.model").is_file()
    assert not (tmp_path / "data/datasets/other").exists()
    assert readme.hub_command({**data, "source": "somebody/else"}) == ""


def test_what_reviewers_ask_for_is_measured_proved_or_named_with_its_source(
    tmp_path: Path, refusal: Tool
) -> None:
    config = {"NUM_LOOPS": "2", "LOOP_START": "3", "LOOP_END": "5", "MUON_WD": "0.5"}
    config |= {"EMBED_WD": "0.085", "ADAM_WD": "0.02"}
    run = make_run(tmp_path / "runs" / "a", 1, config=config)
    report = {"sha256": sha256_file(run / "train_gpt.py"), "status": 0, "verdict": "proven",
              "walls": "WITHOUT WALLS", "passed": [{"law": "endings"}, {"law": "sums"}]}
    proof = tmp_path / "proof.json"
    proof.write_text(json.dumps({**report, "sha256": "0" * 64}))
    assert "the proof is for a script" in refusal(run, "--proof", proof)
    proof.write_text(json.dumps({**report, "status": 1, "verdict": "refuted: kraft"}))
    assert "refuted: kraft; only a whole proof" in refusal(run, "--proof", proof)
    proof.write_text(json.dumps(report))
    other = pack(tmp_path / "records", make_runs(tmp_path / "base", 1, source="x = 1\n" * 9), name="Base")
    folder = pack(tmp_path / "records", [run], "--proof", str(proof), "--baseline", str(other))
    submission = Folder(folder).submission
    assert submission["proof"] == {
        "verdict": "proven", "score_first": "proven", "no_network": "not proven", "replayed_runs": 0}
    assert submission["technique_summary"] == "layers 3 to 5 run 2 more times"
    origins = submission["attribution"]
    assert origins["MUON_WD EMBED_WD ADAM_WD"] == {"default": "MUON_WD=0.095", "source": "#1218, #1331"}
    assert not any("](" in origin["source"] for origin in origins.values()), "links lead nowhere"
    assert ["MUON_WD", "–", "0.5"] in submission["comparison"]["settings"]
    page = (folder / "README.md").read_text()
    pulls = "https://github.com/openai/parameter-golf/pull"
    for told in ("## Compliance", "no network: not proven",
                 f"| `MUON_WD` | – | 0.5 | default 0.095: [#1218]({pulls}/1218), ",
                 f"| `NUM_LOOPS=2` `LOOP_START=3` `LOOP_END=5` |  | [#1204]({pulls}/1204), "):
        assert told in page, told
    assert not (folder / "baseline.diff").exists() and main(["check", str(folder)]) == 0
    (folder / "proof.json").write_text(json.dumps({**report, "passed": []}))
    assert any("`proof.score_first` is 'proven'" in finding.text for finding in audit(folder))
