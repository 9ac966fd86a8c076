"""Records of unfinished work, damaged in any form, are one sentence and not a traceback; nothing is lost."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data import documents, export, fineweb, shards
from data.files import DataError
from tests.support import case, tiny

RAW = [b"", b"{", b"[]", b"null", b"3", b'"text"', b"\xff\xfe\x00", b"[" * 100_000, b"9" * 100_000, b"NaN"]


def in_every_form(contents: list[bytes]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("content", contents, ids=range(len(contents)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a CaseOps dataset; to be read only."""
    return Path(case.make_dataset(tmp_path_factory.mktemp("case"), "caseops")["DATA_PATH"])


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    """A copy of it and its tokenizer."""
    shutil.copytree(made.parents[1], tmp_path / "copy")
    return tmp_path / "copy" / "datasets" / made.name


def assert_one_sentence(said: str, path: Path) -> None:
    lines = said.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: {path}: "), said


def state(split: str, **changes: Any) -> dict[str, Any]:
    return {"split": split, "finished": {}, "open_tokens": 0, "open_documents": [0, 0], **changes}


START = {"file": 0, "offset": 0, "document": 0}
STREAMS = {"val": state("val"), "train": state("train")}
SOUND = {"settings": {}, "next": START, "audit": {}, "streams": STREAMS}
JOURNALS: list[Any] = [
    {"settings": {}}, {**SOUND, "settings": []}, {**SOUND, "next": []}, {**SOUND, "next": {"file": 0}},
    {**SOUND, "next": {**START, "offset": -1}}, {**SOUND, "next": {**START, "file": "0"}},
    {**SOUND, "audit": 3}, {**SOUND, "audit": {"a": "b"}}, {**SOUND, "streams": 3},
    *({**SOUND, "streams": {"val": found}} for found in (
        None, {}, {**state("val"), "more": 1}, state("other"), state("val", open_tokens="1"),
        state("val", open_documents=[1]), state("val", finished=[]), state("val", finished={"a": 3}),
        state("val", finished={"a": {}}))),
]


@in_every_form([*RAW, *(json.dumps(journal).encode() for journal in JOURNALS)])
def test_a_damaged_journal_of_an_export(
    content: bytes, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(json.dumps({"text": text}) + "\n" for text in case.texts()), encoding="utf-8")
    folder = tmp_path / "datasets" / "set"
    folder.mkdir(parents=True)
    journal = folder / export.JOURNAL_NAME
    journal.write_bytes(content)
    model = made.parents[1] / "tokenizers" / "caseops.model"
    command = ["--docs", str(docs), "--name", "set", "--out", str(tmp_path), "--workers", "1",
               "--tokenizer", str(model), "--variant", "caseops", "--val-docs", "5"]
    capsys.readouterr()
    assert export.main(command) == 1
    assert_one_sentence(capsys.readouterr().err, journal)
    assert journal.read_bytes() == content


@in_every_form(RAW)
def test_a_damaged_record_of_a_tokenizer(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(json.dumps({"text": text}) + "\n" for text in tiny.documents()), encoding="utf-8")
    model = tmp_path / "tokenizers" / "set.model"
    model.parent.mkdir()
    model.write_bytes(b"mine")
    record = model.with_suffix(".json")
    record.write_bytes(content)
    command = ["--docs", str(docs), "--name", "set", "--out", str(tmp_path), "--train-tokenizer", "300"]
    assert export.main([*command, "--val-docs", "5"]) == 1
    assert_one_sentence(capsys.readouterr().err, record)
    assert model.read_bytes() == b"mine" and record.read_bytes() == content


def test_a_field_that_is_too_deep_to_be_written_again(tmp_path: Path) -> None:
    """Further fields of a manifest are kept; JSON is read a little deeper than it is written."""
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(DataError, match="nested too deeply"):
        shards.write_manifest(tmp_path, {"more": deep})
    assert not list(tmp_path.iterdir())


RECEIPT = {"bytes": 1, "modified_ns": 1, "hub_hash": "0", "sha256": "0"}
FACTS = {"tokens": 1, "largest": 1, "documents": 1, "begins_document": True}
NAME = "fineweb_val_000000.bin"
FILES = {NAME: {**RECEIPT, **FACTS}, "x.model": RECEIPT}
SOUND_RECEIPTS: dict[str, Any] = {"repo": "a/b", "revision": "0", "files": FILES}
RECEIPTS: list[Any] = [
    {}, {"repo": "a"}, {**SOUND_RECEIPTS, "files": []}, {**SOUND_RECEIPTS, "files": {NAME: 3}},
    {**SOUND_RECEIPTS, "files": {NAME: RECEIPT}}, {**SOUND_RECEIPTS, "revision": None},
    {**SOUND_RECEIPTS, "files": {"x.model": {**RECEIPT, "bytes": "1"}}},
    {**SOUND_RECEIPTS, "files": {NAME: {**RECEIPT, **FACTS, "begins_document": 1}}},
]


@in_every_form([*RAW, *(json.dumps(receipts).encode() for receipts in RECEIPTS)])
def test_damaged_receipts_of_a_download(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / fineweb.RECEIPTS_NAME
    path.write_text(json.dumps(SOUND_RECEIPTS), encoding="utf-8")
    sound = fineweb.Receipts.load(path)
    assert sound and (sound.repo, sound.revision, sound.files) == ("a/b", "0", SOUND_RECEIPTS["files"])
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        fineweb.Receipts.load(path)
    assert_one_sentence(f"error: {error.value}", path)


MANIFESTS = [*RAW, b'{"files": []}', b'{"files": {"a": {}}}', b'{"tokenizer": []}', b'{"version": 1}']


@in_every_form(MANIFESTS)
def test_a_damaged_manifest_of_a_dataset(
    content: bytes, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = source / shards.MANIFEST_NAME
    path.write_bytes(content)
    out = str(source.parents[1])
    monkeypatch.setattr(documents, "CHUNK_BYTES", 1000)
    verify = ["--verify", "--variant", "x", "--dataset", source.name, "--out", out]
    assert fineweb.main(verify) == 1
    assert_one_sentence(capsys.readouterr().err, path)
