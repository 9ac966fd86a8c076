"""Files of a run that are damaged, and links in a folder that came from somebody else: one sentence each."""

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Ended
from tests.support.runs import make_run, pack
from tests.tools.conftest import Tool, without_drawing
from tools.__main__ import main
from tools.runs.folder import Folder
from tools.submit.check import audit
from tools.submit.findings import Level, Mode

FORMS: dict[str, bytes | None] = {  # None: a folder stands in the place of the file
    "empty": b"", "a list": b"[]", "null": b"null", "a number": b"1", "a text": b'"x"', "true": b"true",
    "deep lists": b"[" * 100_000, "deep objects": b'{"a":' * 100_000, "no UTF-8": b"\x80\x81\xff{}",
    "UTF-16": "{}".encode("utf-16"), "torn": b'{"losses": {', "twice": b'{"a": 1, "a": 2}', "NUL": b"\0" * 99,
    "an empty object": b"{}", "not finite": b'{"seed": 1e999, "losses": NaN, "limits": -Infinity}',
    "folder": None,
}


def put(path: Path, data: bytes | None) -> None:
    """Put a form in the place of a file."""
    path.unlink(missing_ok=True)
    if data is None:
        path.mkdir()
    else:
        path.write_bytes(data)


@pytest.fixture
def run(finished: Ended, tmp_path: Path) -> Path:
    """A copy of a finished run, under the name that a sweep gives."""
    return Path(shutil.copytree(finished.directory, tmp_path / "runs" / "s" / "row-seed1337"))


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_summary_is_one_sentence(form: str, run: Path, tmp_path: Path, tool: Tool) -> None:
    put(run / "summary.json", FORMS[form])
    for verb in ("summary", "pack"):
        options = ["--name", "N", "--records", tmp_path / "records"] if verb == "pack" else []
        assert tool(verb, run, *options, status=2).startswith(f"tools {verb}: ")
    other = make_run(tmp_path / "other", 1)
    reads_as_unfinished = form in ("an empty object", "not finite", "folder")
    told = tool("diff", other, run, status=0 if reads_as_unfinished else 2)
    assert reads_as_unfinished or f"{run / 'summary.json'} " in told
    assert "row-seed1337" in tool("runs", tmp_path / "runs")
    # A sweep would make the run once more; damaged figures are for a person to judge.
    sweep = tmp_path / "s.sweep"
    sweep.write_text("row:\n")
    tool("sweep", sweep, "--table", "--runs", tmp_path / "runs", status=0 if reads_as_unfinished else 2)


KINDS = (None, "x", [])


@pytest.mark.parametrize("kinds", [KINDS, *(pytest.param((kind,), marks=pytest.mark.slow) for kind in KINDS)])
def test_a_value_of_another_kind_is_one_sentence(kinds: tuple[Any, ...], run: Path, tmp_path: Path) -> None:
    """At each place of the summary. The kinds take turns; slow ones are everywhere."""
    packed = make_run(tmp_path / "packed", 1)  # of the other one, pack refuses the limit of its text
    records = tmp_path / "records"
    options = ["--name", "N", "--records", str(records)]
    for directory, command in ((run, ["summary"]), (packed, ["pack", *options])):
        whole = json.loads((directory / "summary.json").read_bytes())
        places: list[tuple[str, ...]] = [(key,) for key in whole]
        for key, section in whole.items():
            if isinstance(section, dict):
                places += [(key, inner) for inner in list(section)[:2]]
        for number, place in enumerate(places):
            summary = json.loads(json.dumps(whole))
            holder = summary if len(place) == 1 else summary[place[0]]
            holder[place[-1]] = kinds[number % len(kinds)]
            (directory / "summary.json").write_text(json.dumps(summary))
            assert main([command[0], str(directory), *command[1:]]) in (0, 2), place
            shutil.rmtree(records, ignore_errors=True)


@pytest.mark.parametrize("form", FORMS)
def test_other_damaged_files_are_one_sentence(form: str, run: Path, tmp_path: Path, tool: Tool) -> None:
    base = make_run(tmp_path / "base", 1)
    data = FORMS[form]
    if data is not None:
        report = tmp_path / "proof.json"
        report.write_bytes(data)
        told = tool("pack", base, "--name", "N", "--proof", report, "--records", tmp_path / "r", status=2)
        assert told.splitlines()[-1].startswith("tools pack: ")
        (run / "trace_rank0.json").write_bytes(data)
        assert "tools timeline: " in tool("timeline", run, status=2)
    folder = pack(tmp_path / "records", [base])
    for name in ("manifest.json", "proof.json", "submission.json", "summary_seed1.json"):
        kept = folder / f"{name}.kept"
        if (folder / name).exists():
            shutil.copy(folder / name, kept)
        put(folder / name, data)
        levels = {found.check: found.level(Mode.AGREED) for found in audit(folder)}
        assert "A0" not in levels, name
        assert Level.FAIL in levels.values() or name in ("manifest.json", "proof.json")  # none was packed
        shutil.rmtree(folder / name) if data is None else (folder / name).unlink()
        if kept.exists():
            kept.rename(folder / name)
    assert not Folder(folder).submission_error


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file of the user's that nothing may reach."""
    path = tmp_path / "mine.txt"
    path.write_text("KEY=secret\n")
    return path


def test_no_verb_writes_through_a_link_of_a_run(
    tmp_path: Path, outside: Path, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "theirs", 1)
    folder = tmp_path / "my folder"
    folder.mkdir()
    (run / "plot.png").symlink_to(outside)
    without_drawing(monkeypatch)
    tool("plot", run)
    assert not (run / "plot.png").is_symlink()
    written: list[str] = []
    package = types.SimpleNamespace(SummaryWriter=written.append, init=lambda **named: written.append("w"))
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("tensorboard", "wandb"):
        for target in (folder, tmp_path / "leads nowhere"):
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(target)
            assert "is a link" in tool("export", run, "--to", name, status=2)
    (run / "wandb").unlink()
    (run / "wandb").mkdir()
    (run / "wandb" / "wandb").symlink_to(folder)
    assert "is a link" in tool("export", run, "--to", "wandb", status=2)
    assert outside.read_text() == "KEY=secret\n" and not written and not list(folder.iterdir())


def test_pack_takes_no_file_from_outside(tmp_path: Path, outside: Path, tool: Tool) -> None:
    run = make_run(tmp_path / "theirs", 1)
    (run / "nats_legal_ttt.bin").unlink()
    (run / "nats_legal_ttt.bin").symlink_to(outside)
    told = tool("pack", run, "--name", "N", "--records", tmp_path / "records", status=2)
    assert "nats_legal_ttt.bin is a link that leaves the run directory" in told
    assert not [path for path in (tmp_path / "records").rglob("*") if path.is_file()]
