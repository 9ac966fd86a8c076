"""What a user gets wrong ends before the first step: one message with cause and remedy, and nothing left.

Most cases call `main` in this process, with a tiny dataset of their own.
"""

import contextlib
import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

import train_gpt
from data.shards import BOS_ID, write_shard
from tests.support.here import main_here
from tests.support.planted import in_phase
from tests.support.processes import ONE_THREAD, SCRIPT, SHORT_END, TINY_RUN, Ended, Lab
from tests.support.shipped import the_wrapped_form_is_made_once
from tests.support.tiny import VOCAB_SIZE, documents, tokens_of, train_tokenizer
from tests.support.waiting import DEADLINE_SECONDS

__all__ = ["the_wrapped_form_is_made_once"]
TRAIN, VAL = "fineweb_train_000000.bin", "fineweb_val_000000.bin"


class Desk:
    """A folder with a dataset of its own, to damage, and the settings of a tiny run on it."""

    def __init__(self, folder: Path, dataset: Path, finished: Ended) -> None:
        self.folder = folder
        self.data = Path(shutil.copytree(dataset, folder / "data"))
        self.runs = folder / "runs"
        self.finished = finished
        self.patches: list[Any] = []  # of what cannot be made to fail by a file
        self.arguments: list[str] = []

    def artifact(self) -> dict[str, object]:
        """EVAL_ONLY of a good artifact."""
        return {"EVAL_ONLY": self.finished.directory / "model.bin"}

    def unfinished(self) -> Path:
        """A run directory with a checkpoint, as far as one is read before data are."""
        config = train_gpt.Config.from_env({name: str(value) for name, value in self.settings().items()})
        directory = self.runs / "run"
        directory.mkdir(parents=True)
        settings = config.as_env(train_gpt.TrainingSettings)
        torch.save({"config": settings, "hashes": {"code": "0" * 64}}, directory / "checkpoint.pt")
        return directory

    def settings(self, **changes: object) -> dict[str, object]:
        """The environment of a run."""
        tokenizer = self.data / "tokenizer.model"
        data = {"DATA_PATH": self.data, "TOKENIZER_PATH": tokenizer, "RUNS_DIR": self.runs}
        wanted = {**TINY_RUN, **ONE_THREAD, **data, **changes}
        return {name: value for name, value in wanted.items() if value is not None}

    def contents(self) -> dict[str, bytes | None]:
        """All files and folders, to see whether something was left behind."""
        return {str(path): path.read_bytes() if path.is_file() else None for path in self.folder.rglob("*")}


class Case(NamedTuple):
    """A mistake, and what its message must say: cause and remedy."""

    name: str
    make: Callable[[Desk], dict[str, object]]  # does it, and gives the settings that differ
    cause: tuple[str, ...]
    remedy: tuple[str, ...]


def setting(cause: str, remedy: str, **changes: object) -> Case:
    """Settings that are wrong. Several phrases are separated by |."""
    name = " ".join(f"{name}={str(value)[:20]}" for name, value in changes.items())
    return Case(name, lambda desk: changes, tuple(cause.split("|")), tuple(remedy.split("|")))


def case(name: str, make: Callable[[Desk], dict[str, object] | None], cause: str, remedy: str) -> Case:
    """A mistake that needs more than settings."""
    return Case(name, lambda desk: make(desk) or {}, tuple(cause.split("|")), tuple(remedy.split("|")))


def data_file(file: str, content: bytes, cause: str, remedy: str) -> Case:
    """A file of the dataset with another content."""
    return case(f"{file}: {content[:12]!r}", lambda desk: write(desk.data / file, content), cause, remedy)


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def without_training_shards(desk: Desk) -> None:
    for path in desk.data.glob("fineweb_train_*"):
        path.unlink()


def truncated(desk: Desk) -> None:
    os.truncate(desk.data / "fineweb_train_000001.bin", 3000)


def tokens_are(name: str, changed: Callable[[np.ndarray], np.ndarray]) -> Callable[[Desk], None]:
    """A shard with changed tokens, or a new one."""

    def make(desk: Desk) -> None:
        path = desk.data / name
        (desk.data / "manifest.json").unlink()  # it would notice the number of tokens
        write_shard(path, changed(tokens_of(path) if path.exists() else np.ones(1)))

    return make


def id_beyond_the_vocabulary(desk: Desk, name: str = TRAIN) -> None:
    tokens = tokens_of(desk.data / name)
    tokens[500] = VOCAB_SIZE
    write_shard(desk.data / name, tokens)


def shorter_than_a_sequence(desk: Desk) -> None:
    (desk.data / "manifest.json").unlink()
    for path in desk.data.glob("fineweb_train_*"):
        write_shard(path, tokens_of(path)[:20])


def shards_with_a_gap(desk: Desk) -> None:
    (desk.data / "manifest.json").unlink()
    (desk.data / "fineweb_train_000001.bin").rename(desk.data / "fineweb_train_000007.bin")


def renamed(*names: str) -> Callable[[Desk], None]:
    """The training shards under these names."""

    def make(desk: Desk) -> None:
        (desk.data / "manifest.json").unlink()
        found = sorted(desk.data.glob("fineweb_train_*"))
        for path in found[len(names) :]:
            path.unlink()
        # The last one first: a name may be that of the next.
        for path, name in reversed(list(zip(found, names, strict=False))):
            path.rename(path.with_name(name))

    return make


def in_form(magic: int, version: int, dtype: str, tokens: int = 2000) -> Callable[[Desk], None]:
    """A training shard as another program writes it."""

    def make(desk: Desk) -> None:
        (desk.data / "manifest.json").unlink()
        header = np.zeros(256, dtype[0] + "i4")
        header[:3] = magic, version, tokens
        (desk.data / TRAIN).write_bytes(header.tobytes() + np.ones(2000, dtype).tobytes())

    return make


def tokenizer_of_other_text(desk: Desk) -> None:
    (desk.data / "manifest.json").unlink()
    turned = [text[::-1].swapcase() for text in documents()]
    (desk.data / "tokenizer.model").write_bytes(train_tokenizer(turned))


def manifest_with(**changed: int | None) -> Callable[[Desk], None]:
    """A manifest of all shards but for the tokens of some: other ones, or none at all."""

    def make(desk: Desk) -> None:
        tokens = {path.name: len(tokens_of(path)) for path in desk.data.glob("fineweb_*_0*.bin")}
        tokens.update({f"fineweb_train_{name[1:]}.bin": count for name, count in changed.items()})
        files = {name: {"tokens": count} for name, count in tokens.items() if count is not None}
        (desk.data / "manifest.json").write_text(json.dumps({"files": files}))

    return make


def directory_with(desk: Desk, *files: str) -> None:
    (desk.runs / "run").mkdir(parents=True)
    for name in files:
        (desk.runs / "run" / name).write_bytes(b"")


def disk_with_little_room(desk: Desk) -> dict[str, object]:
    """Enough to score; a training needs room for checkpoints."""
    desk.patches.append(mock.patch("shutil.disk_usage", lambda path: SimpleNamespace(free=2 << 20)))
    return {"ARTIFACT_BYTES_MAX": 3_000_000}


def mkdir_fails(desk: Desk) -> None:
    def fail(path: Path, *given: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    desk.patches.append(mock.patch.object(Path, "mkdir", fail))


def a_world_of_one(desk: Desk) -> dict[str, object]:
    desk.patches.append(mock.patch("threading.Thread"))  # which would go on to say that it waits
    return {"WORLD_SIZE": 2}


def argument(*words: str) -> Callable[[Desk], None]:
    """Words on the command line."""

    def make(desk: Desk) -> None:
        desk.arguments = list(words)

    return make


def artifact_of_another_tokenizer(desk: Desk) -> dict[str, object]:
    (desk.data / "manifest.json").unlink()
    content = (desk.data / "tokenizer.model").read_bytes()
    (desk.data / "tokenizer.model").write_bytes(content.replace(b"\xe2\x96\x81", b"\xe2\x96\x82", 5))
    return desk.artifact()


OTHERS = json.dumps({"tokenizer": {"sha256": "0" * 64}}).encode()  # a manifest of another tokenizer
FETCH = "fetch it again"
NAME = "set another RUN_ID"

CASES = [
    # settings
    setting("bytes too many", "raise ARTIFACT_BYTES_MAX", ARTIFACT_BYTES_MAX=20_000),
    case("RESUME and EVAL_ONLY", lambda desk: {"RESUME": desk.unfinished(), **desk.artifact()},
         "RESUME=|EVAL_ONLY=", "only one of RESUME and EVAL_ONLY"),
    case("--seed 3", argument("--seed", "3"), "'--seed', '3'", "SEED=42 python"),
    *([] if torch.cuda.is_available() else [setting("DEVICE=cuda", "DEVICE=cpu", DEVICE="cuda")]),
    # config files
    setting("CONFIG=no/file.env: No such file", "file of KEY=VALUE lines", CONFIG="no/file.env"),
    # shards
    setting("no/such folder/", "set DATA_PATH|make demo|data/fineweb.py", DATA_PATH="no/such folder"),
    case("no training shards", without_training_shards, "fineweb_train_|no token shard", "set DATA_PATH"),
    data_file(VAL, b"<!DOCTYPE html><html><body>404</body></html>", VAL, FETCH),
    case("truncated", truncated, "fineweb_train_000001.bin", FETCH),
    case("id beyond", id_beyond_the_vocabulary, f"{TRAIN}|token 500|id 320", "VOCAB_SIZE=320|TOKENIZER_PATH"),
    case("in validation", lambda desk: id_beyond_the_vocabulary(desk, VAL), f"{VAL}|token 500", "VOCAB_SIZE"),
    case("cut at its beginning", tokens_are(TRAIN, lambda tokens: tokens[1:]),
         f"{TRAIN}|begins inside a document", "expected BOS=1|numbered from 000000|drop the"),
    case("no BOS", tokens_are(TRAIN, lambda tokens: np.where(tokens == BOS_ID, 5, tokens)),
         f"{TRAIN}|begins with id 5 and has no BOS=1", "export it again"),
    case("no text", tokens_are(VAL, lambda _: np.full(2000, BOS_ID)), "validation tokens have no bytes", ""),
    case("short", shorter_than_a_sequence, "no training shard holds", "fetch more"),
    case("byte counts", tokens_are("fineweb_val_bytes_000000.bin", lambda _: np.ones(10)),
         "fineweb_val_bytes_*.bin", "get the data again"),
    case("a gap", shards_with_a_gap, "fineweb_train_000007.bin: expected number 000001", "fetch"),
    case("numbered from 1", renamed("fineweb_train_000001.bin", "fineweb_train_000002.bin"),
         "fineweb_train_000001.bin: expected number 000000", "fetch it if it is missing, or rename"),
    case("five digits", renamed("fineweb_train_00000.bin"), "fineweb_train_00000.bin|5 digits", "rename"),
    case("other names", renamed("train.bin"), "no token shard|train.bin", "set DATA_PATH"),
    case("uint32", in_form(20240520, 1, "<u4"), f"{TRAIN}: uint32 ids", "convert them"),
    case("Llama 3", in_form(20240801, 7, "<u4"), f"{TRAIN}: a shard of llm.c for Llama 3", "data/export.py"),
    case("version 2", in_form(20240520, 2, "<u2"), f"{TRAIN}: version 2", "expected 1"),
    case("big-endian", in_form(20240520, 1, ">u2"), f"{TRAIN}: big-endian", "export it again"),
    case("no tokens", in_form(20240520, 1, "<u2", 0), f"{TRAIN}: its header says 0 tokens", "export it"),
    data_file(TRAIN, b"version https://git-lfs.github.com/spec/v1", f"{TRAIN}: |Git LFS",
              "git lfs pull"),
    data_file(TRAIN, np.ones(3000, "<u2").tobytes(), f"{TRAIN}: begins with", "data/README.md"),
    data_file(TRAIN, b"", f"{TRAIN}: begins with b''", FETCH),
    case("missing shard", manifest_with(_000007=5), "manifest: fineweb_train_000007.bin", "Fetch the data"),
    case("foreign shard", manifest_with(_000001=None), "manifest: fineweb_train_000001", "remove foreign"),
    case("other shard", manifest_with(_000000=5), "manifest: fineweb_train_000000.bin", "Fetch the data"),
    data_file("manifest.json", b"{", "manifest.json|Expecting", "fetch or export"),
    # tokenizers
    setting("TOKENIZER_PATH=/no/such.model: no such file|DATA_PATH=", "manifest.json|see data/",
            TOKENIZER_PATH="/no/such.model"),
    setting("TOKENIZER_PATH|320 pieces", "expected VOCAB_SIZE=1024|manifest.json", VOCAB_SIZE=1024),
    data_file("tokenizer.model", b"a tokenizer, it says", "TOKENIZER_PATH=", "see data/"),
    case("of other text", tokenizer_of_other_text, "TOKENIZER_PATH=|% of the ids", "the tokenizer that"),
    data_file("manifest.json", OTHERS, "TOKENIZER_PATH=|" + "0" * 64, "that tokenizer"),
    # artifacts
    setting("no/model.bin|No such file", "", EVAL_ONLY="no/model.bin"),
    case("a folder", lambda desk: {"EVAL_ONLY": desk.data}, "data: expected the model.bin of a run", "run"),
    # peers
    case("no launcher", a_world_of_one, "WORLD_SIZE=2|RANK expected", "use torchrun"),
    setting(str(SCRIPT), "of its run", EVAL_ONLY=SCRIPT),
    case("other tokenizer", artifact_of_another_tokenizer, "TOKENIZER_PATH=|EVAL_ONLY's", "that tokenizer"),
    # run directories
    case("finished", lambda desk: directory_with(desk, "summary.json"), "RUN_ID=run|runs/run exists", NAME),
    case("unfinished", lambda desk: directory_with(desk, "checkpoint.pt"), "exists", f"RESUME=|{NAME}"),
    case("runs is a file", lambda desk: {"RUNS_DIR": desk.data / TRAIN}, f"{TRAIN}|folder",
         "set RUNS_DIR"),
    case("other code", lambda desk: {"RESUME": desk.unfinished()}, "code is ", "RESUME_OTHER_CODE=1"),
    # the disk
    case("too small", disk_with_little_room, "2 MiB are free", "set RUNS_DIR"),
    case("full", mkdir_fails, "No space left", ""),
    # memory
    setting("TRAIN_SEQ_LEN=1048576| MiB", "lower MICRO_BATCH_TOKENS", TRAIN_SEQ_LEN=1 << 20,
            TRAIN_BATCH_TOKENS=1 << 20, MICRO_BATCH_TOKENS=1 << 20),
]


@pytest.fixture
def desk(tmp_path: Path, dataset: Path, finished: Ended, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path, dataset, finished)


def refused(desk: Desk, changes: dict[str, object], capfd: pytest.CaptureFixture[str]) -> str:
    """The one message that `main` prints."""
    environ = {name: str(value) for name, value in desk.settings(**changes).items()}
    with contextlib.ExitStack() as patches:
        for patch in desk.patches:
            patches.enter_context(patch)
        status = main_here(environ, *desk.arguments)
    printed = capfd.readouterr()
    assert status == 1 and "Traceback" not in printed.err + printed.out, printed
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed.err
    return printed.err


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_one_message_with_cause_and_remedy(
    bad: Case, desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = bad.make(desk)
    before = desk.contents()
    error = refused(desk, changes, capfd)
    missing = [words for words in (*bad.cause, *bad.remedy) if words not in error]
    assert not missing, error
    left = {path: content for path, content in desk.contents().items() if before.get(path, 0) != content}
    assert not left, left.keys()


def test_a_run_directory_is_never_overwritten(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    directory = desk.finished.directory
    before = {path: path.read_bytes() for path in directory.iterdir()}
    for changes in ({"RUNS_DIR": directory.parent}, {"RESUME": directory}):
        assert str(directory) in refused(desk, dict(changes), capfd)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_an_artifact_from_anybody_does_not_say_where_we_write(short: Ended, lab: Lab) -> None:
    """EVAL_ONLY takes the settings beside it, but for those of a place; what the user sets counts."""
    folder = Path(shutil.copytree(short.directory, lab.folder / "downloaded"))
    given = (folder / "config.env").read_text("utf-8")
    deep = lab.folder / "anywhere" / "deep"
    for name, value in (("RUNS_DIR", deep), ("RUN_ID", "chosen"), ("RESUME_OTHER_CODE", 1)):
        given += f"{name}={value}\n"
    (folder / "config.env").write_text(given)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    ended = lab.succeed(**lab.nothing_but(EVAL_ONLY=folder / "model.bin"))
    (written,) = (lab.folder / "runs").iterdir()
    assert written.name != "chosen" and not deep.exists() and not deep.parent.exists()
    summary = json.loads((written / "summary.json").read_text("utf-8"))
    assert summary["losses"] == short.summary["losses"], ended.out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    mine = {"RUNS_DIR": lab.folder / "mine", "RUN_ID": "own", "DATA_PATH": ""}
    ended = lab.succeed(**lab.nothing_but(EVAL_ONLY=folder / "model.bin", **mine))
    assert ended.directory.name == "own"


def test_a_disk_with_little_room_to_score_is_enough(finished: Ended, lab: Lab) -> None:
    """As much as is too little to train, among the cases above: a score writes logs alone."""
    little = "import shutil, types\nshutil.disk_usage = lambda path: types.SimpleNamespace(free=2 << 20)\n"
    changes = {"ARTIFACT_BYTES_MAX": 3_000_000, **SHORT_END}
    lab.succeed(fault=little, EVAL_ONLY=finished.directory / "model.bin", **changes)


def test_an_empty_folder_of_runs_is_the_default(lab: Lab) -> None:
    ended = lab.succeed(RUNS_DIR="", RUN_ID="", fault=in_phase("build_model", "os._exit(0)"))
    (written,) = (lab.folder / "runs").iterdir()
    assert f"run:runs/{written.name}\n" in ended.out


NOBODY_READS = """
for number in (1, 2):
    reader, writer = os.pipe()
    os.dup2(writer, number)
    os.close(reader)
"""


def test_a_closed_console_and_odd_paths_end_no_run(lab: Lab) -> None:
    folder = lab.folder / "two words, ümlaut 中 # end"
    folder.mkdir()
    lab = Lab(folder, lab.copy_dataset("中 data [1]*").dataset)
    ended = lab.succeed(fault=NOBODY_READS, ITERATIONS=1, **SHORT_END)
    log = (ended.directory / "log.txt").read_text("utf-8")
    assert ended.summary["exit"] == "finished"
    assert all(words in log for words in ("step:1/1", str(folder), "done: "))
    run = train_gpt.Run(train_gpt.Machine(), ended.directory)
    assert run.how_to_continue() == f"continue with EVAL_ONLY={shlex.quote(str(ended.directory))}/model.bin"
    found = {"DATA_PATH": None, "TOKENIZER_PATH": None, "CONFIG": None}  # in its config.env
    lab.succeed(EVAL_ONLY=ended.directory / "model.bin", RUN_ID="b", **found)


ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": 0, "PYTHONUTF8": 0}
# How text is written is decided when Python starts: each turn is a fork of one fresh interpreter.
IN_TURN = """
import os, runpy, sys, torch
for number, changes in enumerate([{}, {b"DATA_PATH": "/d\\xe4t\\xe4".encode("utf-8")}]):
    child = os.fork()
    if child == 0:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}{number}", os.O_WRONLY | os.O_CREAT), descriptor)
        os.environb.update(changes)
        del sys.argv[0]
        runpy.run_path(sys.argv[0], run_name="__main__")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_locale_that_is_not_utf_8(lab: Lab) -> None:
    settings = lab.settings(ITERATIONS=1, **SHORT_END, **ASCII)
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN, str(SCRIPT)], env=settings, cwd=lab.folder, stdin=subprocess.DEVNULL,
        capture_output=True, timeout=DEADLINE_SECONDS,
    )
    assert done.stdout == b"0\n1\n", (done.stdout, done.stderr)
    outs = [(lab.folder / f"out{turn}").read_bytes() for turn in range(2)]
    errs = [(lab.folder / f"err{turn}").read_bytes() for turn in range(2)]
    assert b"final_int" in outs[0] and b"done: " in outs[0]
    # Python itself cannot read the name of the last one there.
    assert errs[0] == b"" and errs[1].startswith(b"error: DATA_PATH=")


def test_a_gpu_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = train_gpt.Machine(0, 8, torch.device("cuda"), torch.bfloat16)
    refusal = pytest.raises(train_gpt.ConfigError, match="98304 tokens")
    for free_bytes, outcome in ((80 << 30, contextlib.nullcontext()), (5 << 30, refusal)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free_bytes: (free, 80 << 30))
        with outcome:
            train_gpt.check_memory(train_gpt.Config(), gpu)
