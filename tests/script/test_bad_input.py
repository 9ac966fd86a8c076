"""Bad input ends before the first step: one message naming file or variable, status 1, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.shards import BOS_ID, write_shard
from tests.support.processes import SCRIPT, Ended, Lab
from tests.support.tiny import VOCAB_SIZE, tokens_of

TRAIN, VAL = "fineweb_train_000000.bin", "fineweb_val_000000.bin"


def refused(ended: Ended, *named: str) -> None:
    """The process ended as it must when the user got something wrong."""
    assert ended.status == 1
    assert "Traceback" not in ended.err + ended.out
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1, ended.err
    assert all(name in ended.err for name in named), ended.err
    assert not ended.runs_dir.exists() or not any(ended.runs_dir.iterdir())


def without_training_shards(data: Path) -> None:
    for path in data.glob("fineweb_train_*"):
        path.unlink()


def without_validation(data: Path) -> None:
    (data / VAL).unlink()


def truncated(data: Path) -> None:
    os.truncate(data / "fineweb_train_000001.bin", 3000)


def shorter_than_a_header(data: Path) -> None:
    os.truncate(data / VAL, 100)


def empty_file(data: Path) -> None:
    (data / TRAIN).write_bytes(b"")


def foreign_file(data: Path) -> None:
    (data / TRAIN).write_bytes(b"not a shard " * 1000)


def no_tokens(data: Path) -> None:
    write_shard(data / VAL, np.array([], np.uint16))


def id_beyond_the_vocabulary(data: Path, name: str = TRAIN) -> None:
    tokens = tokens_of(data / name)
    tokens[500] = VOCAB_SIZE
    write_shard(data / name, tokens)


def id_beyond_it_in_validation(data: Path) -> None:
    id_beyond_the_vocabulary(data, VAL)


def no_document_begins(data: Path) -> None:
    write_shard(data / TRAIN, tokens_of(data / TRAIN)[1:])


def validation_without_text(data: Path) -> None:
    write_shard(data / VAL, np.full(2000, BOS_ID))


def shorter_than_a_sequence(data: Path) -> None:
    for path in data.glob("fineweb_train_*"):
        write_shard(path, tokens_of(path)[:20])


def tokenizer_is_text(data: Path) -> None:
    (data / "tokenizer.model").write_text("a tokenizer, it says")


def without_tokenizer(data: Path) -> None:
    (data / "tokenizer.model").unlink()


def without_tokenizer_but_with_byte_counts(data: Path) -> None:
    without_tokenizer(data)
    write_shard(data / "fineweb_val_bytes_000000.bin", np.ones_like(tokens_of(data / VAL)))


def too_few_byte_counts(data: Path) -> None:
    write_shard(data / "fineweb_val_bytes_000000.bin", np.ones(10))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (without_training_shards, ["fineweb_train_", "DATA_PATH"]),
        (without_validation, ["fineweb_val_", "DATA_PATH"]),
        (truncated, ["fineweb_train_000001.bin", "3000", "size"]),
        (shorter_than_a_header, [VAL]),
        (empty_file, [TRAIN]),
        (foreign_file, [TRAIN, "magic", "20240520"]),
        (no_tokens, [VAL]),
        (id_beyond_the_vocabulary, [TRAIN, "500", "320", "VOCAB_SIZE"]),
        (id_beyond_it_in_validation, [VAL, "500", "320", "VOCAB_SIZE"]),
        (no_document_begins, [TRAIN, "BOS"]),
        (validation_without_text, ["no text"]),
        (shorter_than_a_sequence, ["TRAIN_SEQ_LEN", "33"]),
        (tokenizer_is_text, ["TOKENIZER_PATH", "tokenizer.model"]),
        (without_tokenizer, ["TOKENIZER_PATH", "tokenizer.model"]),
        (without_tokenizer_but_with_byte_counts, ["TOKENIZER_PATH", "tokenizer.model"]),
        (too_few_byte_counts, ["fineweb_val_bytes_", "10"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damaged_data(damage: Callable[[Path], None], named: list[str], lab: Lab) -> None:
    lab = lab.copy_dataset()
    damage(lab.dataset)
    refused(lab.run(), *named)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"DATA_PATH": "no/such folder"}, ["DATA_PATH", "no/such folder/", "make demo"]),
        ({"TOKENIZER_PATH": "/no/such.model"}, ["TOKENIZER_PATH=/no/such.model"]),
        ({"VOCAB_SIZE": 1024}, ["TOKENIZER_PATH", "VOCAB_SIZE=1024", "320"]),
        ({"TRAIN_BATCH_TOKENS": 224, "MICRO_BATCH_TOKENS": 64}, ["TRAIN_BATCH_TOKENS", "MICRO_BATCH_TOKENS"]),
        ({"ARTIFACT_BYTES_MAX": 20000, "CODE_BYTES": "wrapped"}, ["ARTIFACT_BYTES_MAX"]),
        ({"RUNS_DIR": "/dev/null/runs"}, ["RUNS_DIR", "/dev/null/runs"]),
        ({"RUNS_DIR": "/proc"}, ["RUNS_DIR", "/proc"]),
        ({"RUN_ID": "x" * 300}, ["RUN_ID"]),
        ({"DEVICE": "cuda"}, ["DEVICE=cuda"]),
        ({"EVAL_ONLY": "no/model.bin"}, ["no/model.bin"]),
        ({"EVAL_ONLY": SCRIPT}, [str(SCRIPT), "not an artifact"]),
        ({"RESUME": "no/run"}, ["RESUME=no/run"]),
        ({"MATRX_LR": 1}, ["MATRX_LR", "MATRIX_LR"]),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_machine_or_the_data(
    changes: dict[str, object], named: list[str], lab: Lab
) -> None:
    ended = lab.run(**changes)
    refused(Ended(ended.status, ended.out, ended.err, lab.folder / "runs"), *named)


def test_a_run_directory_is_never_overwritten(finished: Ended, lab: Lab) -> None:
    before = {path: path.read_bytes() for path in finished.directory.iterdir()}
    for changes in ({"RUNS_DIR": finished.runs_dir}, {"RESUME": finished.directory}):
        ended = lab.run(**changes)
        assert ended.status == 1 and "Traceback" not in ended.err
        assert str(finished.directory) in ended.err and "RESUME" in ended.err
    assert {path: path.read_bytes() for path in finished.directory.iterdir()} == before


def test_a_disk_too_small_for_the_run(lab: Lab) -> None:
    fault = "import shutil, collections; U = collections.namedtuple('U', 'total used free')\n"
    fault += "shutil.disk_usage = lambda path: U(9, 9, 0)"
    ended = lab.run(fault=fault)
    refused(ended, "RUN_ID", "MiB free")
    assert not [*ended.runs_dir.iterdir()]


@pytest.mark.parametrize("kernel", ["fa3", "varlen"])
def test_an_attention_kernel_that_does_not_work_here(kernel: str, lab: Lab) -> None:
    refused(lab.run(ATTENTION=kernel), f"ATTENTION={kernel}")


def test_byte_counts_do_not_excuse_another_vocabulary(lab: Lab) -> None:
    lab = lab.copy_dataset()
    write_shard(lab.dataset / "fineweb_val_bytes_000000.bin", np.ones_like(tokens_of(lab.dataset / VAL)))
    refused(lab.run(VOCAB_SIZE=324), "TOKENIZER_PATH", "VOCAB_SIZE=324", "320")


def test_an_artifact_of_another_tokenizer_is_not_scored(finished: Ended, lab: Lab) -> None:
    lab = lab.copy_dataset()
    path = lab.dataset / "tokenizer.model"
    path.write_bytes(path.read_bytes().replace(b"\xe2\x96\x81", b"\xe2\x96\x82", 5))
    ended = lab.run(EVAL_ONLY=finished.directory / "model.bin")
    refused(ended, "TOKENIZER_PATH")


def python(lab: Lab, *arguments: str, **settings: object) -> subprocess.Popen[bytes]:
    """A fresh interpreter rather than a fork, for what is decided when Python starts."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments], env=lab.settings(**settings), cwd=lab.folder,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_closed_console_does_not_end_a_run(lab: Lab) -> None:
    process = python(lab, EVAL_STRIDE=0, TTT_ENABLED=0)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    assert process.wait(120) == 0
    summary = json.loads((lab.folder / "runs" / "run" / "summary.json").read_text())
    log = (lab.folder / "runs" / "run" / "log.txt").read_text("utf-8")
    assert summary["exit"] == "finished" and "step:6/6" in log and "done: " in log


def test_odd_paths(lab: Lab) -> None:
    folder = lab.folder / "two words, ümlaut 中 # end"
    folder.mkdir()
    lab = Lab(folder, lab.copy_dataset("中 data").dataset)
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


def test_a_locale_that_is_not_utf_8(lab: Lab) -> None:
    process = python(lab, EVAL_STRIDE=0, TTT_ENABLED=0, **ASCII)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err == b"" and b"final_int" in out and b"done: " in out
    process = python(lab, "--help", **ASCII)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == b"" and b"MATRIX_LR" in out
    process = python(lab, DATA_PATH="/dätä", **ASCII)  # Python itself cannot read such a name there
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.startswith(b"error: DATA_PATH=")
