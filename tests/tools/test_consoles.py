"""Consoles that cannot print every character, and files in other encodings: no line is lost."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.runs import make_run, pack
from tests.tools.conftest import Tool, without_drawing
from tools.__main__ import VERBS, main
from tools.compare.sweep import read_sweep
from tools.runs.folder import Folder
from tools.runs.logs import read_log
from tools.runs.runs import RunDirectory, read_events
from tools.runs.source import read_script

NARROW = ("cp932", "gbk", "latin-1", "cp1252")
UTF_16 = ("utf-8-sig", "utf-16", "utf-16-le with mark", "utf-16-be with mark")


def encoded(text: str, encoding: str) -> bytes:
    """A text as an editor saves it."""
    if encoding.endswith("with mark"):
        return ("\ufeff" + text).encode(encoding.split()[0])
    return text.encode(encoding)


class Printed(NamedTuple):
    """What a command left: status, standard output, standard error."""

    status: object
    out: str
    err: str


@contextlib.contextmanager
def consoles(encoding: str) -> Iterator[tuple[io.TextIOWrapper, io.TextIOWrapper]]:
    """Both streams on consoles of this encoding, which refuse what they cannot print."""
    streams = (io.TextIOWrapper(io.BytesIO(), encoding, write_through=True),
               io.TextIOWrapper(io.BytesIO(), encoding, write_through=True))
    kept = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = streams
    try:
        yield streams
    finally:
        sys.stdout, sys.stderr = kept


def printed(encoding: str, arguments: tuple[object, ...]) -> Printed:
    with consoles(encoding) as (out, err):
        try:
            status: object = main([str(word) for word in arguments])
        except SystemExit as error:
            status = error.code
    texts = []
    for stream in (out, err):
        assert isinstance(stream.buffer, io.BytesIO)
        texts.append(stream.buffer.getvalue().decode(encoding))
    return Printed(status, *texts)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs and a record, in names and words that no narrow console has."""
    base = tmp_path_factory.mktemp("Übung-数据")
    settings = {"NOTE": "Größe 数据 ▁"}
    run = make_run(base / "runs" / "数据…", 1, config=settings)
    make_run(base / "runs" / "b", 1, gain=0.1)
    with contextlib.redirect_stdout(io.StringIO()):
        pack(base / "records", [run], "--blurb", "größer – 数")
    (base / "mine.sweep").write_text("# größer\nbase: MATRIX_LR=0.02\n", encoding="utf-8")
    return base


def commands(place: Path) -> list[tuple[object, ...]]:
    """Commands of every verb that ends in seconds, with good and bad endings."""
    run, other = place / "runs" / "数据…", place / "runs" / "b"
    record = place / "records" / "track_demo" / "2026-05-01_Test"
    return [
        ("--help",), *((verb, "--help") for verb in VERBS), ("größer",),
        ("check", record, place / "größer"), ("check", record, "--json"), ("diff", other, run),
        ("diff", other, run, "--json"),
        ("runs", place / "runs"), ("runs", place / "runs", "--json"), ("plot", run, "--out", place / "ü.svg"),
        ("export", place / "größer", "--to", "tensorboard"), ("timeline", run), ("summary", run),
        ("generate", place / "größer.bin", "é"),
        ("sweep", place / "mine.sweep", "--table", "--runs", place / "runs"), ("prove", place / "größer.py"),
        ("pack", run, "--name", "größer"), ("docs", "größer"),
    ]


@pytest.fixture(scope="module")
def wide(place: Path) -> dict[tuple[object, ...], Printed]:
    """What the commands print on a console of UTF-8."""
    with pytest.MonkeyPatch.context() as patch:
        without_drawing(patch)
        return {arguments: printed("utf-8", arguments) for arguments in commands(place)}


def test_what_a_console_cannot_print_is_escaped(
    place: Path, wide: dict[tuple[object, ...], Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status and lines are those of UTF-8, and JSON stays JSON. Encodings take turns, but for ASCII."""
    without_drawing(monkeypatch)
    for number, (arguments, whole) in enumerate(wide.items()):
        for encoding in ("ascii", NARROW[number % len(NARROW)]):
            narrow = printed(encoding, arguments)
            assert narrow.status == whole.status, (encoding, arguments, narrow.err)
            for got, wanted in ((narrow.out, whole.out), (narrow.err, whole.err)):
                shown = wanted.encode(encoding, "backslashreplace").decode(encoding)
                assert got == shown, (encoding, arguments)
        if "--json" in arguments:
            assert whole.out.isascii() and json.loads(whole.out)
    assert "数" in printed("utf-8", ("runs", place / "runs")).out


# Another locale, in which names are bytes and every file opened without an encoding would be ASCII.
POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ALL = """
import sys
from tools.__main__ import main
for line in sys.stdin.buffer.read().decode("utf-8", "surrogateescape").split("\\0"):
    try:
        status = main([word.encode("utf-8", "surrogateescape").decode(sys.getfilesystemencoding(),
                       "surrogateescape") for word in line.split("\\x1f")])
    except SystemExit as error:
        status = error.code
    print(f"status {status}", flush=True)
"""


LOAD_TORCH = ("diff", "sweep", "summary", "export", "generate")  # a process of these begins after seconds


def test_processes_in_a_narrow_locale_end_as_others(
    wide: dict[tuple[object, ...], Printed], repo: Path
) -> None:
    wanted = {
        arguments: whole
        for arguments, whole in wide.items()
        if "--help" not in arguments and arguments[0] not in LOAD_TORCH
    }
    lines = "\0".join("\x1f".join(map(str, arguments)) for arguments in wanted)
    base = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "PYTHONIO"))}
    ended = subprocess.run(
        [sys.executable, "-c", ALL], cwd=repo, env={**base, **POSIX}, input=lines.encode(),
        capture_output=True, timeout=300,
    )
    assert ended.returncode == 0 and b"Traceback" not in ended.stderr, ended.stderr[-2000:]
    narrow = ended.stdout.decode().splitlines()
    statuses = [line for line in narrow if line.startswith("status ")]
    assert statuses == [f"status {whole.status}" for whole in wanted.values()]
    # Names that are escaped are wider: a table may go on below, and never ends early.
    lines_before = sum(whole.out.count("\n") for whole in wanted.values())
    assert len(narrow) - len(statuses) >= lines_before


def test_verbs_that_load_torch_end_as_others_in_a_narrow_locale(
    wide: dict[tuple[object, ...], Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: a file opened without an encoding is ASCII, and names are bytes."""
    opened = io.open

    def narrow(
        file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, *more: Any, **named: Any
    ) -> Any:
        if "b" not in mode and encoding in (None, "locale"):
            encoding = "ascii"
        return opened(file, mode, buffering, encoding, *more, **named)

    for arguments, whole in wide.items():
        if "--help" in arguments or arguments[0] not in LOAD_TORCH:
            continue
        words = [os.fsencode(str(word)).decode("ascii", "surrogateescape") for word in arguments]
        with monkeypatch.context() as patch:
            patch.setattr("builtins.open", narrow)
            patch.setattr("io.open", narrow)
            found = printed("ascii", tuple(words))
        assert found.status == whole.status, (arguments, found.err)
        assert found.out.count("\n") >= whole.out.count("\n")


def test_benchmarks_escape_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_check

    monkeypatch.setattr(gpu_check, "__doc__", "rows \u00d7 seeds")
    with consoles("ascii") as (out, _), pytest.raises(SystemExit) as ended:
        gpu_check.main(["--help"])
    assert isinstance(out.buffer, io.BytesIO)
    assert ended.value.code == 0 and b"\\xd7" in out.buffer.getvalue()


def test_a_closed_console_ends_no_verb(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert (main(["runs", str(place / "runs")]), main(["check", str(place / "no")])) == (0, 2)


@pytest.mark.parametrize("encoding", UTF_16)
def test_texts_of_a_user_are_read_in_the_encodings_of_editors(
    encoding: str, tmp_path: Path, tool: Tool
) -> None:
    """A byte order mark says which; lines may end as those of Windows."""
    path = tmp_path / "größer.sweep"
    path.write_bytes(encoded("# größer\r\nseeds: 1 2\r\nbase: MATRIX_LR=0.02\r\n", encoding))
    sweep = read_sweep(path)
    assert sweep.seeds == ["1", "2"] and sweep.rows["base"].settings["MATRIX_LR"] == "0.02"
    run = make_run(tmp_path / "runs" / "a", 1)
    whole = {name: (run / name).read_text("utf-8") for name in ("log.txt", "config.env", "metrics.jsonl")}
    before = read_log(run / "log.txt"), RunDirectory(run).config, read_events(run / "metrics.jsonl")
    for name, text in whole.items():
        (run / name).write_bytes(encoded(text.replace("\n", "\r\n"), encoding))
    assert (read_log(run / "log.txt"), RunDirectory(run).config, read_events(run / "metrics.jsonl")) == before
    # What other programs read as plain UTF-8 is refused in words.
    (run / "summary.json").write_bytes(encoded((run / "summary.json").read_text("utf-8"), encoding))
    assert "byte order mark of UTF-" in tool("summary", run, status=2)


def test_what_is_no_text_is_said_to_be_none(tmp_path: Path, tool: Tool) -> None:
    path = tmp_path / "a.sweep"
    for data, said in ((b"base: \xff\n", "byte 6 is not UTF-8"), ("base:\n".encode("utf-16-le"), "NUL bytes"),
                       (b"base: X='open\n", "No closing quotation"), (b"", "no row")):
        path.write_bytes(data)
        assert said in tool("sweep", path, "--table", status=2)
    assert "Is a directory" in tool("sweep", tmp_path, "--table", status=2)


def test_a_script_and_a_record_with_byte_order_marks_are_read(tmp_path: Path, tool: Tool) -> None:
    path = tmp_path / "train_gpt.py"
    path.write_bytes(encoded("x = 1\n", "utf-8-sig"))
    assert read_script(path).text == "x = 1\n"
    folder = pack(tmp_path / "records", [make_run(tmp_path / "runs" / "a", 1)])
    for encoding, name in (("utf-8-sig", "UTF-8"), ("utf-16", "UTF-16")):
        text = json.dumps(Folder(folder).submission or {"val_bpb": 1.0})
        (folder / "submission.json").write_bytes(encoded(text, encoding))
        error = str(Folder(folder).submission_error)
        assert f"byte order mark of {name}; save it as UTF-8 without one" in error
