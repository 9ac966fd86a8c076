"""The offline sample: complete, exact to the byte, reproducible, and nothing of validation in training."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import sample, shards
from data.files import DataError
from tests.support.tiny import assert_documents_are_counted, contents, joined

# Of every twentieth module of the library, of every eighth topic, and of modules that share paragraphs: by
# the hashes of their names one is validation and others are not. `make demo` in test_first_hour.py makes
# the whole sample.
COMMAND = """
from data import sample
sources, topics = sample.stdlib_sources, sample.help_topics
sharing = "concurrent/futures/"
sample.stdlib_sources = lambda: [
    source for number, source in enumerate(sources()) if number % 20 == 0 or source[0].startswith(sharing)]
sample.help_topics = lambda tree: dict([*topics(tree).items()][::8])
sample.VAL_DOCUMENTS = 10
raise SystemExit(sample.main())
"""


def make(root: Path, repo: Path, **environment: str) -> str:
    """The command in a fresh process; what it prints."""
    command = [sys.executable, "-c", COMMAND, "--out", str(root)]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=repo)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> Path:
    """In a folder whose name the console cannot print."""
    root = tmp_path_factory.mktemp("sample") / "Übung-数据-🙂"
    printed = make(root, repo, PYTHONIOENCODING="ascii")
    assert str(root).encode("ascii", "backslashreplace").decode() in printed
    return root


def test_an_interrupt_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "build", interrupted)
    assert sample.main(["--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted: run the same command again\n"


def dataset(root: Path) -> Path:
    return root / "datasets" / sample.NAME


def stream(root: Path, split: str) -> np.ndarray:
    return joined(dataset(root), f"{split}_")


def decoded_documents(root: Path, split: str) -> list[str]:
    tokenizer = shards.load_tokenizer(root / "tokenizers" / sample.TOKENIZER_FILE)
    tokens = stream(root, split)
    parts = np.split(tokens, np.flatnonzero(tokens == shards.BOS_ID))[1:]
    return [tokenizer.decode(part.tolist()) for part in parts]


def test_manifest_and_byte_table_describe_the_files(built: Path) -> None:
    tokenizer = shards.load_tokenizer(built / "tokenizers" / sample.TOKENIZER_FILE)
    table = shards.ByteTable.from_sentencepiece(tokenizer)
    text = "".join(decoded_documents(built, "val"))
    manifest = shards.read_manifest(dataset(built))
    assert table.total(stream(built, "val")) == len(text.encode()) == manifest["splits"]["val"]["bytes"]
    assert shards.verify_dataset(dataset(built)) == []
    assert manifest["tokenizer"]["vocab_size"] == 1024
    assert len([name for name in manifest["files"] if "train" in name]) > 1
    assert_documents_are_counted(dataset(built))


def test_paragraphs_are_in_one_split_and_come_once(built: Path) -> None:
    def paragraphs(split: str) -> set[str]:
        texts = decoded_documents(built, split)
        keys = {" ".join(paragraph.split()) for text in texts for paragraph in text.split("\n\n")}
        return {key for key in keys if len(key) >= sample.MIN_SHARED_CHARACTERS}

    assert paragraphs("val")
    assert not paragraphs("val") & paragraphs("train")
    long = "the same words, said more than once in a row"
    wrapped = "  the same words, said\n   more than once in a row"
    documents = [f"{long}\n\nmore", f"{wrapped}\n\n{long}!", long, "more"]
    assert sample.drop_repeats(documents) == [f"{long}\n\nmore", f"{long}!", "more"]


def test_a_finished_sample_is_left_alone(built: Path, tmp_path: Path, repo: Path) -> None:
    written = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    assert sample.main(["--out", str(built)]) == 0
    assert written == {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    command = [sys.executable, str(repo / "data" / "sample.py"), "--check", "--out", str(built)]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0


def test_a_damaged_sample_is_reported_and_a_fresh_process_mends_it_with_the_same_bytes(
        built: Path, repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(built)
    shard = next(dataset(built).glob("fineweb_train_*.bin"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert sample.main(["--out", str(built), "--check"]) == 1
    error = capsys.readouterr().err
    assert str(shard) in error and "sha256" in error and "sample.py" in error
    make(built, repo, PYTHONHASHSEED="7", LC_ALL="C")
    assert contents(built) == before


def test_a_build_that_cannot_end_says_why_and_leaves_no_manifest(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    documents = [f"{'words and more ' * 40}{index}" for index in range(60)]
    monkeypatch.setattr(sample, "stdlib_documents", lambda: documents)
    assert sample.main(["--out", str(tmp_path)]) == 1
    assert "too few for 1024 pieces" in capsys.readouterr().err
    monkeypatch.setattr(sample, "VOCAB_SIZE", 290)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full_disk)
        assert sample.main(["--out", str(tmp_path)]) == 1
    assert "disk is full" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    mine = tmp_path / "mine" / "tokenizers"  # a file in the way
    mine.parent.mkdir()
    mine.write_text("mine")
    assert sample.main(["--out", str(mine.parent)]) == 1
    assert str(mine) in capsys.readouterr().err and mine.read_text() == "mine"


def test_bad_shards_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "fineweb_val_000000.bin"
    shards.write_shard(path, np.arange(1, 10, dtype=np.uint16))
    assert shards.read_shard(path).tolist() == list(range(1, 10))
    sound = path.read_bytes()
    for damaged, expected in ((sound[:-2], "truncated"), (sound[:100], "too short"), (b"", "too short"),
                              (b"\0" * 4 + sound[4:], "magic")):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=expected) as caught:
            shards.read_shard(path)
        assert str(path) in str(caught.value)


SOUND_MANIFEST = {"version": 1, "tokenizer": {"file": "x", "sha256": "", "vocab_size": 1},
                  "splits": {"train": {"documents": [1, 2]}, "val": {"documents": [0, 1]}}, "files": {}}


@pytest.mark.parametrize("content", [
    "", "[]", "{}", json.dumps({"version": 2}), json.dumps({"version": 1}),
    json.dumps({**SOUND_MANIFEST, "tokenizer": {"file": "x"}}),
    json.dumps({**SOUND_MANIFEST, "splits": {"train": {}, "val": {"documents": [0, 1]}}}),
    json.dumps({**SOUND_MANIFEST, "files": {"fineweb_val_000000.bin": {"tokens": 5}}}),
])
def test_bad_manifests_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / shards.MANIFEST_NAME).write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        shards.read_manifest(tmp_path)
    (tmp_path / shards.MANIFEST_NAME).write_text(json.dumps(SOUND_MANIFEST))
    assert shards.read_manifest(tmp_path) == SOUND_MANIFEST


TRAIN, VAL = "fineweb_train_000000.bin", "fineweb_val_000000.bin"


def test_training_on_validation_text(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path(shutil.copytree(built, tmp_path, dirs_exist_ok=True)) / "datasets" / sample.NAME
    sound = (directory / shards.MANIFEST_NAME).read_bytes()

    def problems(**changes: Any) -> list[str]:
        """What is told where the manifest says something else of the first training shard."""
        manifest = json.loads(sound)
        manifest["files"][TRAIN].update(changes)
        shards.write_manifest(directory, manifest)
        return shards.verify_dataset(directory)

    validation = json.loads(sound)["files"][VAL]
    start, stop = validation["documents"]
    assert not problems(documents=[stop, stop + 60])
    (problem,) = problems(documents=[stop - 1, stop + 60])
    assert problem.startswith(f"{directory / TRAIN}: ")
    assert f"[{stop - 1}, {stop + 60})" in problem and f"[{start}, {stop}) of {VAL}" in problem
    assert sample.main(["--out", str(tmp_path), "--check"]) == 1 and problem in capsys.readouterr().err
    problem, *_ = problems(sha256=validation["sha256"])
    assert TRAIN in problem and VAL in problem and "overlap" in problem
    for documents in (5, [1], ["a", "b"], None):
        (problem,) = problems(documents=documents)
        assert "manifest.json" in problem, documents


def test_document_ranges_touch_every_shard() -> None:
    starts = np.array([0, 5, 10, 11])
    assert shards.document_ranges(starts, [0, 5, 6, 10, 12], 3) == [(3, 4), (4, 5), (4, 5), (5, 7)]
