"""Bytes per token are those that SentencePiece decodes; foreign shards and damaged manifests are named."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece as spm

from data import contents, shards
from data.files import DataError
from tests.support import tiny

CODE = ["def f(x):\n    if x:\n        return  x * 2\n", "    indented\n\tby a tab", "ends in blanks   ", "",
        " ", "  ", " a", "a ", "\ta", "日本 🙂", "▁start", "a ▁ b", "▁▁", "x"]
SAME = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "as the challenge's": {},
    "dummy prefix": {"add_dummy_prefix": True},
    "unigram": {"model_type": "unigram"},
    "suffix": {"treat_whitespace_as_suffix": True},
    "suffix, dummy": {"treat_whitespace_as_suffix": True, "add_dummy_prefix": True},
    "suffix, spaces kept": {"treat_whitespace_as_suffix": True, **SAME},
    "spaces kept": SAME,
    "spaces kept, dummy": {**SAME, "add_dummy_prefix": True},
    "only extra spaces kept": {"remove_extra_whitespaces": False},
    "pieces of spaces": {**SAME, "allow_whitespace_only_pieces": True},
    "across words": {**SAME, "split_by_whitespace": False},
    "across words, unigram, dummy": {"split_by_whitespace": False, "model_type": "unigram",
                                     "add_dummy_prefix": True},
    "symbols with spaces": {**SAME, "user_defined_symbols": ["    ", " x ", "▁q▁", "\n", "ab", "def "]},
    "symbols, dummy": {"add_dummy_prefix": True, "user_defined_symbols": ["def ", ".▁", "\ue001"]},
}


def train(texts: list[str], **options: Any) -> tuple[bytes, spm.SentencePieceProcessor]:
    """A SentencePiece model as the bytes of its file, and loaded."""
    usual = {"model_type": "bpe", "vocab_size": 400, "byte_fallback": True, "hard_vocab_limit": False,
             "add_dummy_prefix": False, "num_threads": 1, "minloglevel": 2}
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model,
                                   **{**usual, **ids, **options})
    return model.getvalue(), spm.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("name", OPTIONS)
def test_bytes_are_those_of_the_decoded_document(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tiny.documents()[:40]
    _, tokenizer = train([*words, *CODE * 20], **OPTIONS[name])
    table = shards.ByteTable.from_sentencepiece(tokenizer)
    tokens = []
    total = 0
    for text in [*CODE, *words[:20], *(f"{code}{word}" for code, word in zip(CODE, words, strict=False))]:
        ids = [shards.BOS_ID, *tokenizer.encode(text)]
        decoded = len(tokenizer.decode(ids[1:]).encode())
        assert table.total(np.array(ids)) == decoded, text
        tokens += ids
        total += decoded
    assert table.total(np.array(tokens)) == total
    monkeypatch.setattr(shards, "TOKENS_AT_ONCE", 7)
    assert table.total(np.array(tokens)) == total


def test_the_official_tables_count_as_ever(shared_data: Path) -> None:
    for name, bytes_total in {"1024": 2_504_867, "8192": 2_504_310}.items():
        tokenizer = shards.load_tokenizer(shared_data / f"tokenizers/fineweb_{name}_bpe.model")
        table = shards.ByteTable.from_sentencepiece(tokenizer)
        path = shared_data / f"datasets/fineweb_sample_sp{name}/fineweb_val_000000.bin"
        assert table.total(shards.read_shard(path)) == bytes_total
        for token in range(tokenizer.vocab_size()):
            spaces = tokenizer.id_to_piece(token).count("▁")
            assert spaces == table.leading_space[token], "no official piece has a space elsewhere"


@pytest.mark.parametrize(("options", "told"), [
    ({"bos_id": 2, "eos_id": 1}, "BOS id 2, the format needs 1"),
    ({"bos_id": -1, "eos_id": 1}, "BOS id -1, the format needs 1"),
    ({"user_defined_symbols": ["<s>"]}, "BOS id -1, as a symbol of the text"),
    ({"model_type": "word", "byte_fallback": False}, "no piece for a space alone"),
    ({}, ""),
])
def test_unfit_tokenizers(options: dict[str, Any], told: str) -> None:
    _, tokenizer = train(tiny.documents(), **options)
    found = shards.unfit(tokenizer)
    assert found.startswith(told) and bool(found) == bool(told)


# --- shards of other programs ---


def header(magic: int, version: int, count: int, order: str = "<i4") -> bytes:
    values = np.zeros(shards.HEADER_INTS, dtype=order)
    values[:3] = magic, version, count
    return values.tobytes()


FOREIGN = {
    "uint32 ids": (header(shards.SHARD_MAGIC, 1, 9) + bytes(36), "9 ids of 4 bytes each, expected uint16"),
    "llm.c for Llama 3": (header(20240801, 7, 9) + bytes(36), "llm.c for Llama 3, with ids of 32 bits"),
    "big-endian": (header(shards.SHARD_MAGIC, 1, 9, ">i4") + bytes(18), "big-endian"),
    "version 2": (header(shards.SHARD_MAGIC, 2, 9) + bytes(18), "magic 20240520 version 2, expected"),
    "no header": (bytes(range(256)) * 8, "ids without a header"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
    "cut": (header(shards.SHARD_MAGIC, 1, 9) + bytes(17), "1041 bytes, expected 1042 for the 9 tokens"),
    "negative": (header(shards.SHARD_MAGIC, 1, -9) + bytes(18), "expected 1006 for the -9 tokens"),
    "empty": (b"", "too short"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_shard_is_named(kind: str, tmp_path: Path) -> None:
    content, told = FOREIGN[kind]
    path = tmp_path / "fineweb_val_000000.bin"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        shards.read_shard(path)
    assert str(error.value).startswith(f"{path}: ") and told in str(error.value)


# --- manifests ---

VAL, TRAIN = "fineweb_val_000000.bin", "fineweb_train_000000.bin"
ENTRY = {"split": "val", "tokens": 5, "bytes": 1034, "sha256": "0", "documents": [0, 1]}
SOUND = {"version": 1, "name": "x", "tokenizer": {"file": "x", "sha256": "0", "vocab_size": 9},
         "splits": {"train": {"documents": [1, 1]}, "val": {"documents": [0, 1], "audit": {"tokens": 5}}},
         "files": {VAL: ENTRY}, "fused": {"8": [9, 4]}}
DAMAGED_FILES: list[Any] = [
    [], None, 3, {"a": {}}, {VAL: []}, {VAL: {}}, {VAL: None}, {f"../{VAL}": ENTRY}, {f"/x/{VAL}": ENTRY},
    {VAL: {**ENTRY, "tokens": "5"}}, {VAL: {**ENTRY, "tokens": -1}}, {VAL: {**ENTRY, "tokens": True}},
    {VAL: {**ENTRY, "tokens": 1e999}}, {VAL: {**ENTRY, "tokens": 10**3000}}, {VAL: {**ENTRY, "split": 3}},
    {VAL: {**ENTRY, "documents": 5}}, {VAL: {**ENTRY, "documents": [1]}}, {VAL: {**ENTRY, "bytes": None}},
    {VAL: {**ENTRY, "documents": ["a", "b"]}}, {VAL: {**ENTRY, "documents": [3, 1]}},
    {VAL: {**ENTRY, "sha256": 3}}, {"\0": ENTRY}, {"\ud800_val_000000.bin": ENTRY},
]
DAMAGED: list[Any] = [
    [], None, 3, "text", {}, {"version": []}, {"version": 10**3000}, {"files": []}, {"files": {"a": {}}},
    {"tokenizer": []}, {"version": 1}, *({**SOUND, "files": files} for files in DAMAGED_FILES),
    *({**SOUND, "tokenizer": {**SOUND["tokenizer"], "file": file}}  # type: ignore[dict-item]
      for file in (3, "", "\0", "\ud800", "x" * 5000, None)),
    {**SOUND, "tokenizer": "x"}, {**SOUND, "splits": []}, {**SOUND, "splits": {"val": []}},
    {**SOUND, "splits": {"train": 3, "val": {"documents": [0, 1]}}}, {**SOUND, "name": 3},
    {**SOUND, "splits": {"train": {"documents": [1, 1]}, "val": {"documents": [0, 1], "audit": 3}}},
    {**SOUND, "splits": {"train": {"documents": [1, 1]},
                         "val": {"documents": [0, 1], "audit": {"sidecar_bytes": "x"}}}},
    {**SOUND, "fused": [1]}, {**SOUND, "fused": {"a": [1, 2]}}, {**SOUND, "fused": {"9": [1]}},
    {**SOUND, "fused": {"9": [1, 70000]}}, {**SOUND, "fused": {"9": None}}, {**SOUND, "revision": []},
]
RAW = [b"", b"{", b"\xff\xfe", b"\xef\xbb\xbf", b"[" * 100_000, b"{\"a\":" * 100_000, b"9" * 100_000, b"NaN",
       b"{\"version\": " + b"9" * 100_000 + b"}", bytes(100)]
CONTENTS = [*RAW, *(json.dumps(value).encode() for value in DAMAGED)]


def test_a_sound_manifest_is_read(tmp_path: Path) -> None:
    for sound in (SOUND, {**SOUND, "more": [[1]], "files": {}}):
        (tmp_path / shards.MANIFEST_NAME).write_text(json.dumps(sound), encoding="utf-8")
        assert shards.read_manifest(tmp_path) == sound


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_a_damaged_manifest_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / shards.MANIFEST_NAME).write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json: ") as error:
        shards.read_manifest(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert shards.verify_dataset(tmp_path) == [str(error.value)]


def test_a_manifest_that_is_a_folder_or_missing(tmp_path: Path) -> None:
    assert "not found" in shards.verify_dataset(tmp_path)[0]
    (tmp_path / shards.MANIFEST_NAME).mkdir()
    (problem,) = shards.verify_dataset(tmp_path)
    assert problem.startswith(f"{tmp_path / shards.MANIFEST_NAME}: ") and "folder" in problem


def test_whatever_stands_in_the_place_of_a_file_is_a_fault_of_that_file(tmp_path: Path) -> None:
    shards.write_manifest(tmp_path, SOUND)
    path = tmp_path / VAL
    size = len(shards.shard_header(5)) + 10

    def problem() -> str:
        found = shards.verify_dataset(tmp_path)
        return next(text for text in found if text.startswith(f"{path}: "))

    assert "missing" in problem()
    path.symlink_to(path)
    assert "symbolic links" in problem()
    path.unlink()
    path.mkdir()
    assert problem()
    path.rmdir()
    path.write_bytes(bytes(size))
    assert "magic 0" in problem()
    (tmp_path / "x").symlink_to(tmp_path / "x")
    assert any(text.startswith(f"{tmp_path / 'x'}") for text in shards.verify_dataset(tmp_path))


def test_a_name_that_is_not_utf8_survives_the_manifest(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.jsonl")
    shards.write_manifest(tmp_path, {**SOUND, "source": f"é {name}"})
    assert shards.read_manifest(tmp_path)["source"] == f"é {name}"
    assert "é".encode() in (tmp_path / shards.MANIFEST_NAME).read_bytes()


def test_names_of_a_kind_are_in_order_and_of_no_other() -> None:
    names = ["fineweb_val_000001.bin", "fineweb_val_bytes_000000.bin", "fineweb_val_000000.bin", "a.bin",
             "fineweb_train_000000.bin", "fineweb_val_00000.bin", "fineweb_val_0000001.bin"]
    assert shards.names_of_kind(names, "val") == ["fineweb_val_000000.bin", "fineweb_val_000001.bin"]
    assert shards.names_of_kind(names, "val_bytes") == ["fineweb_val_bytes_000000.bin"]


def test_the_share_of_ids_is_of_the_text(tmp_path: Path) -> None:
    """One odd place costs its own ids; a document that was cut costs none."""
    texts = tiny.documents()[:40]
    _, tokenizer = train(texts)
    tokens = np.array([id for text in texts for id in [shards.BOS_ID, *tokenizer.encode(text)]], np.uint16)
    assert contents.share_that_comes_back(tokenizer, tokens) == 1.0
    odd = tokens.copy()
    at = np.flatnonzero(tokens == shards.BOS_ID) + 20
    odd[at], odd[at + 1] = tokens[at + 1], tokens[at]
    lost = len(texts) * (2 * contents.NEIGHBORS + 3) / len(tokens)
    assert 1 - 1.3 * lost < contents.share_that_comes_back(tokenizer, odd) < 1.0
    for length in (1, 2, 9, 30):
        text = tokens[tokens != shards.BOS_ID]
        rows = text[: 60 * length].reshape(60, length)
        cut = np.insert(rows, 0, shards.BOS_ID, axis=1).flatten()
        assert contents.share_that_comes_back(tokenizer, cut) > contents.LEAST_SHARE
