"""What a user gets wrong ends before the first step: one message with cause and remedy, and nothing left.

Most cases call `main` in this process, with a tiny dataset of their own.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import sentencepiece
import torch

import train_gpt
from data.shards import BOS_ID, write_shard
from tests.support import tiny
from tests.support.processes import ONE_THREAD, SCRIPT, TINY_RUN, Ended, Lab
from tests.support.tiny import VOCAB_SIZE, tokens_of
from tests.support.waiting import DEADLINE_SECONDS

TRAIN, VAL = "fineweb_train_000000.bin", "fineweb_val_000000.bin"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 200001024\n"
PAGE = b"<!DOCTYPE html><html><body>404</body></html>"


class Desk:
    """A folder with a dataset of its own, to damage, and the settings of a tiny run on it."""

    def __init__(self, folder: Path, dataset: Path, finished: Ended) -> None:
        self.folder = folder
        self.data = Path(shutil.copytree(dataset, folder / "data"))
        self.runs = folder / "runs"
        self.finished = finished
        self.patches: list[Any] = []  # of what cannot be made to fail by a file
        self.arguments: list[str] = []

    def file(self, name: str, content: bytes | str) -> Path:
        """A file of this folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def artifact(self, change: Callable[[bytes], bytes]) -> dict[str, object]:
        """EVAL_ONLY of a changed copy of a good artifact."""
        content = (self.finished.directory / "model.bin").read_bytes()
        return {"EVAL_ONLY": self.file("model.bin", change(content))}

    def unfinished(self, **files: bytes) -> Path:
        """A run directory with a checkpoint, as far as one is read before data are."""
        config = train_gpt.Config.from_env({name: str(value) for name, value in self.settings().items()})
        directory = self.runs / "run"
        directory.mkdir(parents=True)
        torch.save({"config": config.as_env(), "step": 3}, directory / "checkpoint.pt")
        (directory / "train_gpt.py").write_bytes(SCRIPT.read_bytes())
        for name, content in files.items():
            (directory / name.replace("__", ".")).write_bytes(content)
        return directory

    def settings(self, **changes: object) -> dict[str, object]:
        """The environment of a run."""
        data = {
            "DATA_PATH": self.data,
            "TOKENIZER_PATH": self.data / "tokenizer.model",
            "RUNS_DIR": self.runs,
        }
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


def config_file(name: str, content: bytes | str, cause: str, remedy: str) -> Case:
    """A file named by CONFIG."""

    def make(desk: Desk) -> dict[str, object]:
        return {"CONFIG": desk.file("my.env", content)}

    return case(name, make, f"CONFIG=|my.env|{cause}", remedy)


def data_file(file: str, content: bytes | None, cause: str, remedy: str) -> Case:
    """A file of the dataset with another content; None: there is none."""

    def make(desk: Desk) -> None:
        path = desk.data / file
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)

    shown = "none" if content is None else content[:12]
    return case(f"{file}: {shown!r}", make, cause, remedy)


# -- what is done to shards ----------------------------------------------------------------------------------


def without_training_shards(desk: Desk) -> None:
    for path in desk.data.glob("fineweb_train_*"):
        path.unlink()


def truncated(desk: Desk) -> None:
    os.truncate(desk.data / "fineweb_train_000001.bin", 3000)


def too_long(desk: Desk) -> None:
    with open(desk.data / VAL, "ab") as file:
        file.write(b"\0\0")


def other_version(desk: Desk) -> None:
    content = bytearray((desk.data / TRAIN).read_bytes())
    content[4] = 2
    (desk.data / TRAIN).write_bytes(content)


def shard_is_a_folder(desk: Desk) -> None:
    (desk.data / TRAIN).unlink()
    (desk.data / TRAIN).mkdir()


def no_tokens(desk: Desk, name: str = TRAIN) -> None:
    write_shard(desk.data / name, np.array([], np.uint16))


def id_beyond_the_vocabulary(desk: Desk, name: str = TRAIN) -> None:
    tokens = tokens_of(desk.data / name)
    tokens[500] = VOCAB_SIZE
    write_shard(desk.data / name, tokens)


def no_document_begins(desk: Desk) -> None:
    write_shard(desk.data / TRAIN, tokens_of(desk.data / TRAIN)[1:])


def validation_without_text(desk: Desk) -> None:
    write_shard(desk.data / VAL, np.full(2000, BOS_ID))


def shorter_than_a_sequence(desk: Desk) -> None:
    for path in desk.data.glob("fineweb_train_*"):
        write_shard(path, tokens_of(path)[:20])


def without_tokenizer_but_with_byte_counts(desk: Desk) -> None:
    (desk.data / "tokenizer.model").unlink()
    write_shard(desk.data / "fineweb_val_bytes_000000.bin", np.ones_like(tokens_of(desk.data / VAL)))


def too_few_byte_counts(desk: Desk) -> None:
    write_shard(desk.data / "fineweb_val_bytes_000000.bin", np.ones(10))


def another_tokenizer(desk: Desk) -> None:
    """As many pieces, of other words."""
    turned = [text[::-1].swapcase() for text in tiny.documents()]
    (desk.data / "tokenizer.model").write_bytes(tiny.train_tokenizer(turned))


def manifest(desk: Desk, content: bytes) -> None:
    (desk.data / "manifest.json").write_bytes(content)


def manifest_of_another_tokenizer(desk: Desk) -> None:
    manifest(desk, json.dumps({"tokenizer": {"sha256": "0" * 64}}).encode())


def without_lone_space(desk: Desk) -> None:
    """A tokenizer without the piece ▁ (issue #897)."""
    import io

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny.documents()), model_writer=model, model_type="bpe", vocab_size=VOCAB_SIZE,
        byte_fallback=True, pad_id=0, bos_id=1, eos_id=2, unk_id=3, num_threads=1, minloglevel=2,
        treat_whitespace_as_suffix=True, add_dummy_prefix=False, split_by_whitespace=False,
    )  # fmt: skip
    content = model.getvalue().replace(b"\n\x03\xe2\x96\x81\x15", b"\n\x03\xe2\x96\x82\x15")
    (desk.data / "tokenizer.model").write_bytes(content)


# -- what is done to run directories and the machine ---------------------------------------------------------


def directory_with(desk: Desk, *files: str) -> None:
    (desk.runs / "run").mkdir(parents=True)
    for name in files:
        (desk.runs / "run" / name).write_bytes(b"")


def in_its_place_a_file(desk: Desk) -> None:
    desk.file("runs/run", "not a folder")


def runs_dir_is_a_file(desk: Desk) -> dict[str, object]:
    return {"RUNS_DIR": desk.file("a file", "")}


def resume_finished(desk: Desk) -> dict[str, object]:
    return {"RESUME": desk.unfinished(summary__json=b"{}")}


def resume_without_checkpoint(desk: Desk) -> dict[str, object]:
    directory = desk.unfinished()
    (directory / "checkpoint.pt").unlink()
    return {"RESUME": directory}


def resume_other_code(desk: Desk) -> dict[str, object]:
    return {"RESUME": desk.unfinished(train_gpt__py=SCRIPT.read_bytes() + b"# changed\n")}


def resume_under_another_name(desk: Desk) -> dict[str, object]:
    return {"RESUME": desk.unfinished(), "RUN_ID": "another"}


def resume_damaged(desk: Desk) -> dict[str, object]:
    return {"RESUME": desk.unfinished(checkpoint__pt=b"\x80\x02garbage" * 99)}


def resume_cut(desk: Desk) -> dict[str, object]:
    directory = desk.unfinished()
    os.truncate(directory / "checkpoint.pt", 1000)
    return {"RESUME": directory}


def resume_file(desk: Desk) -> dict[str, object]:
    return {"RESUME": desk.file("checkpoint.pt", "")}


def both_resume_and_eval_only(desk: Desk) -> dict[str, object]:
    return {"RESUME": desk.unfinished(), **desk.artifact(lambda content: content)}


Usage = namedtuple("Usage", "total used free")


def disk_with_no_room(desk: Desk) -> None:
    desk.patches.append(mock.patch("shutil.disk_usage", lambda path: Usage(9, 9, 0)))


def disk_that_is_gone(desk: Desk) -> None:
    error = OSError(errno.EIO, "Input/output error")
    desk.patches.append(mock.patch("shutil.disk_usage", mock.Mock(side_effect=error)))


def no_right_to_write(desk: Desk) -> None:
    desk.patches.append(mock.patch("os.access", lambda path, mode: False))


def mkdir_fails(number: int, words: str) -> Callable[[Desk], None]:
    """Making a directory ends with this error."""

    def make(desk: Desk) -> None:
        def fail(path: Path, *given: object, **more: object) -> None:
            raise OSError(number, words, str(path))

        desk.patches.append(mock.patch.object(Path, "mkdir", fail))

    return make


def argument(*words: str) -> Callable[[Desk], None]:
    """Words on the command line."""

    def make(desk: Desk) -> None:
        desk.arguments = list(words)

    return make


def artifact_of_another_tokenizer(desk: Desk) -> dict[str, object]:
    (desk.data / "manifest.json").unlink()
    content = (desk.data / "tokenizer.model").read_bytes()
    (desk.data / "tokenizer.model").write_bytes(content.replace(b"\xe2\x96\x81", b"\xe2\x96\x82", 5))
    return desk.artifact(lambda content: content)


def flipped(content: bytes) -> bytes:
    """One bit of the weights is another one."""
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


def older(content: bytes) -> bytes:
    """The artifact of another version."""
    return content[:7] + b"\1" + content[8:]


BATCH = "TRAIN_BATCH_TOKENS|MICRO_BATCH_TOKENS"
FETCH = "fetch it again"
NAME = "set another RUN_ID"

CASES = [
    # settings
    setting("ITERATIONS='abc'", "expected int, 0 or more", ITERATIONS="abc"),
    setting("ITERATIONS='-1'", "expected int, 0 or more", ITERATIONS=-1),
    setting("SEED='1.5'", "expected int", SEED=1.5),
    setting("SEED='-1'", "expected int from 0", SEED=-1),
    setting("MATRIX_LR='nan'", "expected float, 0 or more", MATRIX_LR="nan"),
    setting("MATRIX_LR='inf'", "expected float, 0 or more", MATRIX_LR="inf"),
    setting("MATRIX_LR='-1'", "expected float, 0 or more", MATRIX_LR=-1),
    setting("MATRIX_LR=''", "expected float, 0 or more", MATRIX_LR=""),
    setting("EMA_DECAY='1.5'", "expected float from 0 to 0.99999", EMA_DECAY=1.5),
    setting("TTT_ENABLED='yes'", "expected 0 or 1", TTT_ENABLED="yes"),
    setting("TIE_EMBEDDINGS='2'", "expected 0 or 1", TIE_EMBEDDINGS=2),
    setting("DEVICE='gpu'", "expected auto or cpu or cuda", DEVICE="gpu"),
    setting("MATRX_LR", "did you mean MATRIX_LR", MATRX_LR=1),
    setting("MATRX_LR|WARMDWN_FRAC", "MATRIX_LR|WARMDOWN_FRAC", MATRX_LR=1, WARMDWN_FRAC=1),
    setting("got MODEL_DIM=33", "expected MODEL_DIM as a multiple of NUM_HEADS", MODEL_DIM=33),
    setting("NUM_KV_HEADS=3", "expected NUM_HEADS as a multiple of NUM_KV_HEADS", NUM_KV_HEADS=3),
    setting("ROPE_DIMS=3", "even", ROPE_DIMS=3),
    setting("LOOP_END=5|NUM_LAYERS=2", "expected LOOP_START <= LOOP_END < NUM_LAYERS", LOOP_END=5),
    setting("EVAL_STRIDE=64", "expected EVAL_STRIDE <= EVAL_SEQ_LEN", EVAL_STRIDE=64, TTT_ENABLED=0),
    setting("TTT_CHUNK_TOKENS=250", "TTT_CHUNK_TOKENS as a multiple of EVAL_STRIDE", TTT_MODE="sgd",
            TTT_CHUNK_TOKENS=250),
    setting("TTT_CHUNK_SIZE=33", "<= EVAL_SEQ_LEN", TTT_CHUNK_SIZE=33),
    setting(
        "GPTQ_RESERVE_SECONDS=5.0", "< MAX_WALLCLOCK_SECONDS", GPTQ_RESERVE_SECONDS=5, MAX_WALLCLOCK_SECONDS=4
    ),
    setting(BATCH, "expected a multiple of", TRAIN_BATCH_TOKENS=224, MICRO_BATCH_TOKENS=64),
    setting(BATCH, "expected a multiple of", MICRO_BATCH_TOKENS=16),
    setting("above ARTIFACT_BYTES_MAX", "raise it", ARTIFACT_BYTES_MAX=20_000, CODE_BYTES="wrapped"),
    setting(
        "above ARTIFACT_BYTES_MAX",
        "set RATE_CONTROL=1",
        RATE_CONTROL=0,
        MODEL_DIM=256,
        CODE_BYTES="wrapped",
        ARTIFACT_BYTES_MAX=300_000,
    ),
    setting("TOKENIZER_PATH|320 pieces", "expected VOCAB_SIZE=1024", VOCAB_SIZE=1024),
    setting("ATTENTION=fa3", "set auto", ATTENTION="fa3"),
    setting("RUN_ID=a/b", "expected RUN_ID as a plain name", RUN_ID="a/b"),
    setting("RUN_ID=.hidden", "expected RUN_ID as a plain name", RUN_ID=".hidden"),
    setting("RUN_ID=xxx", "expected RUN_ID of at most 200 bytes", RUN_ID="x" * 300),
    setting(r"RUN_ID='a\nb'", "expected printable text", RUN_ID="a\nb"),
    case(
        "RESUME and EVAL_ONLY", both_resume_and_eval_only, "RESUME=|EVAL_ONLY=", "either RESUME or EVAL_ONLY"
    ),
    case("--seed 3", argument("--seed", "3"), "got '--seed 3' on the command line", "SEED=42 python"),
    case("SEED=3", argument("SEED=3"), "got 'SEED=3' on the command line", "variables of the environment"),
    # config files
    setting("CONFIG=no/file.env|No such file", "name a file of KEY=VALUE lines", CONFIG="no/file.env"),
    setting("CONFIG=/|Is a directory", "name a file of KEY=VALUE lines", CONFIG="/"),
    config_file("a word", "SEED 5\n", "got 'SEED 5'", "not KEY=VALUE"),
    config_file("no name", "=5\n", "got '=5'", "not KEY=VALUE"),
    config_file("JSON", '{"SEED": 5}\n', "got '{", "not KEY=VALUE"),
    config_file(
        "byte order mark", b"\xef\xbb\xbfSEED=5\n", "byte order mark", "save it as UTF-8 without one"
    ),
    config_file("UTF-16", "SEED=5\n".encode("utf-16"), "can't decode", "name a file of KEY=VALUE lines"),
    config_file("export", "export SEED=5\n", "got 'export SEED=5'", "write 'SEED=5'"),
    config_file("quotes", 'DATA_PATH="/data"\n', "which is for a shell", "write 'DATA_PATH=/data'"),
    config_file(
        "twice", "SEED=5\nMATRIX_LR=1\nSEED=6\n", "SEED stands there twice, '5' and '6'", "remove one"
    ),
    Case(
        "unknown in it",
        lambda desk: {"CONFIG": desk.file("my.env", "NO_SUCH_THING=1\n")},
        ("unknown variable NO_SUCH_THING",),
        ("--help",),
    ),
    Case(
        "wrong in it",
        lambda desk: {"CONFIG": desk.file("my.env", "SEED=five\n")},
        ("SEED='five'",),
        ("expected int",),
    ),
    # shards
    setting("no/such folder/", "set DATA_PATH|make demo", DATA_PATH="no/such folder"),
    setting("fineweb_train_", "set DATA_PATH", DATA_PATH="/dev/null"),
    setting("no token shard", "set DATA_PATH", DATA_PATH="x" * 5000),
    # Public data that are not there: the message has the command that fetches them.
    setting(
        "no/fineweb10B_sp8192_lossless_caps_caseops_v1_reserved/fineweb_train_|no token shard",
        "python data/fineweb.py --variant caseops|set DATA_PATH",
        DATA_PATH=f"no/{Path(train_gpt.Config.data_path).name}",
    ),
    setting(
        "no/fineweb10B_sp8192/|no token shard", "--variant sp8192`", DATA_PATH="no/fineweb10B_sp8192"
    ),
    case("no training shards", without_training_shards, "fineweb_train_|no token shard", "set DATA_PATH"),
    data_file(VAL, None, "fineweb_val_|no token shard", "set DATA_PATH"),
    data_file(TRAIN, b"", f"{TRAIN}|the file is empty", FETCH),
    data_file(TRAIN, LFS, f"{TRAIN}|Git LFS pointer", "git lfs pull"),
    data_file(VAL, PAGE, f"{VAL}|a web page", FETCH),
    data_file(VAL, b"\0" * 100, f"{VAL}|100 bytes are less than the header", FETCH),
    data_file(TRAIN, b"not a shard " * 1000, f"{TRAIN}|magic|20240520", FETCH),
    case("truncated", truncated, "fineweb_train_000001.bin|3000|size", FETCH),
    case("too long", too_long, f"{VAL}|size", FETCH),
    case("other version", other_version, f"{TRAIN}|version|(20240520, 2,", FETCH),
    case("a folder", shard_is_a_folder, f"{TRAIN}|Is a directory", "check DATA_PATH"),
    case("no tokens", no_tokens, f"{TRAIN}|a shard of 0 tokens", "export it again"),
    case("no validation tokens", lambda desk: no_tokens(desk, VAL), f"{VAL}|a shard of 0 tokens", "export"),
    case("id beyond", id_beyond_the_vocabulary, f"{TRAIN}|token 500|id 320", "expected below VOCAB_SIZE=320"),
    case(
        "id beyond in val", lambda desk: id_beyond_the_vocabulary(desk, VAL), f"{VAL}|token 500", "VOCAB_SIZE"
    ),
    case("no BOS", no_document_begins, f"{TRAIN}|begins with id", "expected BOS=1|export it again"),
    case("no text", validation_without_text, "stand for no text", "nothing to score"),
    case("short", shorter_than_a_sequence, "no training shard holds TRAIN_SEQ_LEN + 1 = 33", "fetch more"),
    case("byte counts", too_few_byte_counts, "byte sidecars|fineweb_val_000000.bin', 10)", "export again"),
    # tokenizers
    setting(
        "TOKENIZER_PATH=/no/such.model|no SentencePiece model", "see data/", TOKENIZER_PATH="/no/such.model"
    ),
    data_file("tokenizer.model", None, "TOKENIZER_PATH=|tokenizer.model|no SentencePiece model", "see data/"),
    data_file("tokenizer.model", b"", "TOKENIZER_PATH=|the file is empty", FETCH),
    data_file("tokenizer.model", LFS, "TOKENIZER_PATH=|Git LFS pointer", "git lfs pull"),
    data_file(
        "tokenizer.model", b"a tokenizer, it says", "TOKENIZER_PATH=|no SentencePiece model", "see data/"
    ),
    Case("a folder", lambda desk: {"TOKENIZER_PATH": desk.data}, ("TOKENIZER_PATH=",), ("see data/",)),
    case("gone, with byte counts", without_tokenizer_but_with_byte_counts, "TOKENIZER_PATH=", "see data/"),
    case("another one", another_tokenizer, "TOKENIZER_PATH=|come back", "name the one that made the shards"),
    case(
        "by the manifest", manifest_of_another_tokenizer, "TOKENIZER_PATH=|" + "0" * 64, "name that tokenizer"
    ),
    case(
        "bad manifest",
        lambda desk: manifest(desk, b"{"),
        "manifest.json|expected JSON",
        "export the data again",
    ),
    case("no lone space", without_lone_space, "TOKENIZER_PATH=", "expected a lone space"),
    # artifacts
    setting("no/model.bin|No such file", "name the model.bin of a run", EVAL_ONLY="no/model.bin"),
    setting(f"{SCRIPT}: section head|not an artifact", "expected the model.bin of a run", EVAL_ONLY=SCRIPT),
    Case("a folder", lambda desk: {"EVAL_ONLY": desk.data}, ("Is a directory",), ("name the model.bin",)),
    Case("empty", lambda desk: desk.artifact(lambda content: b""), ("the file is empty",), (FETCH,)),
    Case("pointer", lambda desk: desk.artifact(lambda content: LFS), ("Git LFS pointer",), ("git lfs pull",)),
    Case(
        "cut",
        lambda desk: desk.artifact(lambda content: content[:-1]),
        ("section weights", "truncated"),
        ("copy the file again",),
    ),
    Case(
        "cut in its head",
        lambda desk: desk.artifact(lambda content: content[:10]),
        ("10 bytes",),
        ("copy the file again",),
    ),
    Case(
        "one bit",
        lambda desk: desk.artifact(flipped),
        ("section weights", "damaged"),
        ("copy the file again",),
    ),
    Case("older", lambda desk: desk.artifact(older), ("of another version",), ("expected the model.bin",)),
    case(
        "of another tokenizer",
        artifact_of_another_tokenizer,
        "TOKENIZER_PATH=|sha256",
        "expected EVAL_ONLY's",
    ),
    # run directories
    case(
        "finished", lambda desk: directory_with(desk, "summary.json"), "RUN_ID=run|holds a finished run", NAME
    ),
    case(
        "unfinished",
        lambda desk: directory_with(desk, "checkpoint.pt"),
        "an unfinished run",
        f"RESUME=|{NAME}",
    ),
    case("under way", lambda desk: directory_with(desk, "log.txt"), "under way, or that ended without", NAME),
    case("a folder", directory_with, "is there already, and holds no run", NAME),
    case("a file", in_its_place_a_file, "runs/run is a file", NAME),
    case("runs is a file", runs_dir_is_a_file, "RUNS_DIR=|a file is a file", "set another RUNS_DIR"),
    setting("RUNS_DIR=|/dev/null is a file", "set another RUNS_DIR", RUNS_DIR="/dev/null/runs"),
    setting("RUNS_DIR", "set another RUNS_DIR", RUNS_DIR="/proc"),
    case("no right", no_right_to_write, "RUNS_DIR=|not allowed to write", "give yourself the right"),
    setting("RESUME=no/run|no such directory", "expected an unfinished run", RESUME="no/run"),
    case("resume a file", resume_file, "RESUME=|no such directory", "expected an unfinished run"),
    case("resume finished", resume_finished, "RESUME=|is finished", "EVAL_ONLY="),
    case("resume nothing", resume_without_checkpoint, "it holds no checkpoint.pt", "start a new run"),
    case(
        "resume other code", resume_other_code, "not the one that the run began with", "RESUME_OTHER_CODE=1"
    ),
    case("resume as another", resume_under_another_name, "RUN_ID=another: RESUME goes on with", "unset one"),
    case("resume damaged", resume_damaged, "checkpoint.pt cannot be read", "start a new run"),
    case("resume cut", resume_cut, "checkpoint.pt cannot be read", "start a new run"),
    # launch
    setting(
        "WORLD_SIZE=8 without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
        "start with torchrun|unset WORLD_SIZE",
        WORLD_SIZE=8,
    ),
    setting(
        "WORLD_SIZE=2 without MASTER_ADDR, MASTER_PORT",
        "start with torchrun",
        WORLD_SIZE=2,
        RANK=0,
        LOCAL_RANK=0,
    ),
    setting("RANK=3: expected below WORLD_SIZE=1", "start with torchrun", RANK=3),
    setting("RANK='first'", "expected a whole number", RANK="first"),
    setting("WORLD_SIZE='-1'", "expected a whole number", WORLD_SIZE=-1),
    setting(
        "MASTER_PORT=port|have not met",
        "start all of them, with torchrun",
        WORLD_SIZE=2,
        RANK=0,
        LOCAL_RANK=0,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="port",
    ),
    # the disk
    case("too small", disk_with_no_room, "RUNS_DIR=|0 MiB free", "make room on that disk"),
    case("gone", disk_that_is_gone, "RUNS_DIR=|Input/output error", "set another RUNS_DIR"),
    case(
        "full",
        mkdir_fails(errno.ENOSPC, "No space left on device"),
        "No space left",
        "make room on that disk",
    ),
    case("read-only", mkdir_fails(errno.EROFS, "Read-only file system"), "Read-only", "set another RUNS_DIR"),
]


def test_the_table_has_eighty_rows() -> None:
    assert len(CASES) >= 80


@pytest.fixture
def handlers() -> Iterator[None]:
    """`main` catches signals, which is its process's matter."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_one_message_with_cause_and_remedy(
    bad: Case,
    tmp_path: Path,
    dataset: Path,
    finished: Ended,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    handlers: None,
) -> None:
    desk = Desk(tmp_path, dataset, finished)
    environ = {name: str(value) for name, value in desk.settings(**bad.make(desk)).items()}
    before = desk.contents()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *desk.arguments])
    with mock.patch.dict(os.environ, environ, clear=True):
        for patch in desk.patches:
            patch.start()
        try:
            status = train_gpt.main()
        finally:
            for patch in desk.patches:
                patch.stop()
    printed = capfd.readouterr()
    assert status == 1 and "Traceback" not in printed.err + printed.out, printed
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed.err
    missing = [words for words in (*bad.cause, *bad.remedy) if words not in printed.err]
    assert not missing, printed.err
    left = {path: content for path, content in desk.contents().items() if before.get(path, 0) != content}
    assert not left, left.keys()


def refused(ended: Ended, *named: str) -> None:
    """The process ended as it must when the user got something wrong."""
    assert ended.status == 1
    assert "Traceback" not in ended.err + ended.out
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1, ended.err
    assert all(name in ended.err for name in named), ended.err
    assert not ended.runs_dir.exists() or not any(ended.runs_dir.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(lab: Lab) -> None:
    refused(lab.run(DEVICE="cuda"), "DEVICE=cuda", "try DEVICE=cpu")


def test_a_run_directory_is_never_overwritten(finished: Ended, lab: Lab) -> None:
    before = {path: path.read_bytes() for path in finished.directory.iterdir()}
    for changes in ({"RUNS_DIR": finished.runs_dir}, {"RESUME": finished.directory}):
        ended = lab.run(**changes)
        assert ended.status == 1 and "Traceback" not in ended.err
        assert str(finished.directory) in ended.err and "finished" in ended.err
    assert {path: path.read_bytes() for path in finished.directory.iterdir()} == before


# -- mistakes in the script itself: a technique that its author has not carried through ----------------------


def test_a_parameter_that_no_artifact_would_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(train_gpt.GPT):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.register_parameter("forgotten_D", torch.nn.Parameter(torch.ones(4)))

    monkeypatch.setattr(train_gpt, "GPT", Model)
    with pytest.raises(train_gpt.ArtifactError, match=r"forgotten_D .* add it to parameter_table"):
        train_gpt.check_artifact(train_gpt.Config.from_env(tiny.environment()))


def test_a_setting_that_no_artifact_would_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(train_gpt.GPT):
        def loss(self, *given: Any, **more: Any) -> torch.Tensor:
            return super().loss(*given, **more) * self.settings.ttt_lr  # the artifact has no such setting

    monkeypatch.setattr(train_gpt, "GPT", Model)
    with pytest.raises(train_gpt.ArtifactError, match=r"ttt_lr.* make it a field of ModelSettings"):
        train_gpt.check_artifact(train_gpt.Config.from_env(tiny.environment()))


def test_a_setting_that_has_its_default_after_reloading(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(train_gpt.GPT):
        def loss(self, *given: Any, **more: Any) -> torch.Tensor:
            return super().loss(*given, **more) * getattr(self.settings, "ttt_lr", 1.0)

    monkeypatch.setattr(train_gpt, "GPT", Model)
    with pytest.raises(train_gpt.ArtifactError, match=r"is no field of ModelSettings"):
        train_gpt.check_artifact(train_gpt.Config.from_env(tiny.environment()))


def test_a_model_larger_than_any_artifact_that_is_read_back() -> None:
    config = train_gpt.Config.from_env(tiny.environment(MODEL_DIM=16384, ARTIFACT_BYTES_MAX=10**9))
    with pytest.raises(train_gpt.ArtifactError, match=r"could not be read back: .* more than such a file"):
        train_gpt.check_artifact(config)


# -- odd consoles, names and locales -------------------------------------------------------------------------


NOBODY_READS = """
for number in (1, 2):
    reader, writer = os.pipe()
    os.dup2(writer, number)
    os.close(reader)
"""


def test_a_closed_console_does_not_end_a_run(lab: Lab) -> None:
    assert lab.run(fault=NOBODY_READS, EVAL_STRIDE=0, TTT_ENABLED=0).status == 0
    summary = json.loads((lab.folder / "runs" / "run" / "summary.json").read_text())
    log = (lab.folder / "runs" / "run" / "log.txt").read_text("utf-8")
    assert summary["exit"] == "finished" and "step:6/6" in log and "done: " in log


def test_odd_paths(lab: Lab) -> None:
    folder = lab.folder / "two words, ümlaut 中 # end"
    folder.mkdir()
    lab = Lab(folder, lab.copy_dataset("中 data [1]*").dataset)
    ended = lab.succeed(EVAL_STRIDE=0, TTT_ENABLED=0)
    log = (ended.directory / "log.txt").read_text("utf-8")
    assert str(folder) in log and "done: " in log
    again = {
        "CONFIG": ended.directory / "config.env",
        "DATA_PATH": None,
        "TOKENIZER_PATH": None,
        "RUN_ID": "b",
    }
    lab.succeed(EVAL_ONLY=ended.directory / "model.bin", **again)


ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": 0, "PYTHONUTF8": 0}
# How text is written is decided when Python starts: each turn is a fork of one fresh interpreter.
IN_TURN = """
import os, runpy, sys, torch
turns = [([], {}), (["--help"], {}), ([], {b"DATA_PATH": "/d\\xe4t\\xe4".encode("utf-8")})]
for number, (arguments, changes) in enumerate(turns):
    child = os.fork()
    if child == 0:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}{number}", os.O_WRONLY | os.O_CREAT), descriptor)
        os.environb.update(changes)
        sys.argv = [sys.argv[1], *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_locale_that_is_not_utf_8(lab: Lab) -> None:
    settings = lab.settings(EVAL_STRIDE=0, TTT_ENABLED=0, **ASCII)
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN, str(SCRIPT)], env=settings, cwd=lab.folder, stdin=subprocess.DEVNULL,
        capture_output=True, timeout=DEADLINE_SECONDS,
    )  # fmt: skip
    assert done.stdout == b"0\n0\n1\n", (done.stdout, done.stderr)
    outs = [(lab.folder / f"out{turn}").read_bytes() for turn in range(3)]
    errs = [(lab.folder / f"err{turn}").read_bytes() for turn in range(3)]
    assert b"final_int" in outs[0] and b"done: " in outs[0] and b"MATRIX_LR" in outs[1]
    # Python itself cannot read the name of the last one there.
    assert errs[0] == errs[1] == b"" and errs[2].startswith(b"error: DATA_PATH=")
