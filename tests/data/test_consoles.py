"""A console that cannot print a character gets it escaped: no tool of data/ ends for it, or drops a line."""

import contextlib
import fcntl
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import pytest

from data import export, fineweb, sample
from tests.support import case, tiny

# One that has none of these letters, one that has some; the others go the same way.
OTHERS = ["latin-1", "cp1252", "gbk"]
NARROW = ["ascii", "cp932", *(pytest.param(encoding, marks=pytest.mark.slow) for encoding in OTHERS)]
STRANGE = "Übung-数据-🙂"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a strange name with a CaseOps dataset in it; to be read only."""
    folder = tmp_path_factory.mktemp("made") / STRANGE
    folder.mkdir()
    case.make_dataset(folder, "caseops")
    return folder


def run(repo: Path, tool: str, encoding: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(repo / "data" / tool), *arguments]
    done = subprocess.run(command, capture_output=True, env=environment)
    done.stdout.decode(encoding)
    done.stderr.decode(encoding)
    assert b"Traceback" not in done.stderr
    return done


def run_here(tool: ModuleType, encoding: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The same in this process, on streams that refuse what they cannot print."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, write_through=True) for _ in range(2))
    status = status_of(tool, out, err, *arguments)
    printed = [stream.buffer.getvalue() for stream in (out, err)]
    return subprocess.CompletedProcess(arguments, status, *printed)


def status_of(tool: ModuleType, out: TextIO | None, err: TextIO | None, *arguments: str) -> Any:
    """How a tool ends in this process, on these streams; a closed one is None."""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            return tool.main(list(arguments))
        except SystemExit as error:
            return error.code


def seen(name: str, encoding: str) -> bytes:
    return name.encode(encoding, "backslashreplace")


@pytest.mark.parametrize("encoding", NARROW)
def test_names_of_any_letters_are_printed(encoding: str, made: Path, tmp_path: Path) -> None:
    name = seen(STRANGE, encoding)
    verify = ["--verify", "--variant", "x", "--dataset", "caseops", "--out", str(made)]
    done = run_here(fineweb, encoding, *verify)
    assert done.returncode == 0 and name in done.stdout and b"belong together" in done.stdout
    shutil.copytree(made, tmp_path / STRANGE)
    (tmp_path / STRANGE / "datasets" / "caseops" / "manifest.json").write_bytes(b"{")
    done = run_here(fineweb, encoding, *verify[:-1], str(tmp_path / STRANGE))
    assert done.returncode == 1 and done.stderr.startswith(b"error: ") and name in done.stderr


@pytest.mark.parametrize("encoding", NARROW[:1])
def test_documents_of_any_letters_are_exported(encoding: str, made: Path, tmp_path: Path, repo: Path) -> None:
    docs = tmp_path / f"{STRANGE}.jsonl"
    rows = [{"text": text} for text in tiny.documents()]
    docs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    model = str(made / "tokenizers" / "caseops.model")
    command = ["--docs", str(docs), "--name", STRANGE, "--out", str(tmp_path), "--workers", "1",
               "--val-docs", "9", "--variant", "caseops", "--tokenizer", model]
    done = run(repo, "export.py", encoding, *command)
    assert done.returncode == 0 and seen(STRANGE, encoding) in done.stdout and b"audit of 9" in done.stdout
    manifest = json.loads((tmp_path / "datasets" / STRANGE / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["source"] == docs.name
    docs.write_text(json.dumps({"other": STRANGE}, ensure_ascii=False), encoding="utf-8")
    shutil.rmtree(tmp_path / "datasets")
    done = run_here(export, encoding, *command)
    assert done.returncode == 1 and seen(STRANGE, encoding) in done.stderr


@pytest.mark.parametrize("tool", [export, fineweb, sample], ids=lambda tool: tool.__name__)
def test_errors_and_help_are_printed(tool: ModuleType, tmp_path: Path) -> None:
    missing = str(tmp_path / STRANGE)
    arguments = {
        export: ["--docs", missing, "--name", "x", "--train-tokenizer", "300", "--out", missing],
        fineweb: ["--verify", "--variant", "x", "--out", missing],
        sample: ["--check", "--out", missing],
    }
    done = run_here(tool, "ascii", *arguments[tool])
    assert done.returncode == 1 and seen(STRANGE, "ascii") in done.stderr
    done = run_here(tool, "ascii", "--help")
    assert done.returncode == 0 and b"usage: " in done.stdout
    done = run_here(tool, "ascii", "--variant", STRANGE, f"--{STRANGE}")
    assert done.returncode in (1, 2) and done.stderr


def test_a_file_name_that_is_not_utf8(made: Path, tmp_path: Path) -> None:
    docs = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.jsonl"))
    docs.write_text("".join(json.dumps({"text": text}) + "\n" for text in tiny.documents()), encoding="utf-8")
    model = str(made / "tokenizers" / "caseops.model")
    command = ["--docs", str(docs), "--name", "set", "--out", str(tmp_path), "--workers", "1",
               "--val-docs", "9", "--variant", "caseops", "--tokenizer", model]
    for _ in range(2):  # made, then confirmed
        assert run_here(export, "utf-8", *command).returncode == 0
    manifest = json.loads((tmp_path / "datasets" / "set" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["source"] == docs.name


def test_progress_is_for_terminals_and_leaves_no_trace_in_a_log(made: Path) -> None:
    verify = ["--verify", "--variant", "x", "--dataset", "caseops", "--out", str(made)]
    assert run_here(fineweb, "ascii", *verify).stderr == b""
    assert status_of(fineweb, io.StringIO(), None, *verify) == 0
    terminal, console = os.openpty()
    fcntl.ioctl(console, termios.TIOCSWINSZ, struct.pack("4H", 25, 100, 0, 0))  # rows and columns
    with open(console, "w", encoding="ascii") as err:
        status = status_of(fineweb, io.StringIO(), err, *verify)
    shown = os.read(terminal, 1 << 16)
    os.close(terminal)
    assert status == 0 and b"verify: 100%" in shown and shown.isascii()
