"""Bits per byte divide by the bytes of the text, whatever the tokenizer; another tokenizer is refused."""

import functools
import hashlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

import train_gpt
from data import shards
from tests.support import case, tiny
from tests.support.real import real_texts
from train_gpt import BOS_ID, Config, DataError

CODE = [
    "def f(x):\n    if x:\n        return  x * 2\n\n    return None\n",
    "for i in range(10):\n\tprint(i)  # tabs, and two blanks\n",
    "class A:\n    def g(self):\n        while True:\n            pass\n",
    "    indented from the start\n",
    "ends with blanks   ",
]
WORDS = tiny.documents()
TEXTS = [*WORDS[:40], " begins with a space", "  with two", "ends with one ", "naïve 日本 🙂", "x", "a  b"]

SAME = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "as the challenge's": {"add_dummy_prefix": False},
    "with a dummy prefix": {},
    "unigram": {"model_type": "unigram", "add_dummy_prefix": False},
    "spaces behind words": {"treat_whitespace_as_suffix": True, "add_dummy_prefix": False},
    "spaces behind words, and a dummy": {"treat_whitespace_as_suffix": True},
    "spaces kept": {**SAME, "add_dummy_prefix": False},
    "spaces kept, and a dummy": SAME,
    "spaces kept behind words": {**SAME, "treat_whitespace_as_suffix": True, "add_dummy_prefix": False},
    "pieces of spaces": {**SAME, "add_dummy_prefix": False, "allow_whitespace_only_pieces": True},
    "across words": {**SAME, "add_dummy_prefix": False, "split_by_whitespace": False},
    "symbols with spaces": {**SAME, "add_dummy_prefix": False, "user_defined_symbols": ["    ", "▁x▁", "ab"]},
}


def train(texts: list[str], **options: Any) -> tuple[bytes, Any]:
    """A SentencePiece model of 400 pieces, as the bytes of its file and as it is used."""
    usual = {"model_type": "bpe", "vocab_size": 400, "byte_fallback": True, "hard_vocab_limit": False}
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    given = {**usual, **ids, "num_threads": 1, "minloglevel": 2, **options}
    return trained(tuple(texts), json.dumps(given))


@functools.cache  # many tests take the same tokenizer
def trained(texts: tuple[str, ...], options: str) -> tuple[bytes, Any]:
    model = io.BytesIO()
    train = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=iter(texts), model_writer=model, **json.loads(options))
    return model.getvalue(), sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def stream(pieces: Any, texts: list[str]) -> np.ndarray:
    """BOS and the ids of each text."""
    return np.array([token for text in texts for token in [BOS_ID, *pieces.encode(text)]], np.uint16)


class Dataset:
    """A folder with one validation shard and its tokenizer."""

    def __init__(
        self, folder: Path, model: bytes, tokens: np.ndarray, manifest: Mapping[str, Any] | None = None
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        (folder / "tokenizer.model").write_bytes(model)
        shards.write_shard(folder / "fineweb_val_000000.bin", tokens)
        if manifest is not None:
            (folder / "manifest.json").write_text(json.dumps(manifest))
        self.size = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()

    def config(self, **changes: object) -> Config:
        """The settings of a run on it."""
        data = {"DATA_PATH": self.folder, "TOKENIZER_PATH": self.folder / "tokenizer.model"}
        return Config.from_env(tiny.environment(VOCAB_SIZE=self.size, **data, **changes))

    def read(self, **changes: object) -> train_gpt.Validation:
        """What a run does with it before it starts."""
        config = self.config(**changes)
        shard = train_gpt.open_shards(f"{self.folder}/fineweb_val_[0-9]*.bin")
        validation = train_gpt.read_validation(shard, config)
        train_gpt.check_text(validation.tokens, config, train_gpt.read_manifest(self.folder))
        return validation


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_are_those_of_the_decoded_text(name: str, tmp_path: Path) -> None:
    """Of each document, for texts with spaces wherever they may be, of words and of code."""
    texts = [*TEXTS, *CODE * 3]
    model, pieces = train(WORDS + CODE * 20, **TOKENIZERS[name])
    tokens = stream(pieces, texts)
    data = Dataset(tmp_path / "data", model, tokens)
    counts = np.append(0, train_gpt.token_bytes(tokens, data.config()))
    found = np.add.reduceat(counts, np.flatnonzero(tokens == BOS_ID)).tolist()
    decoded = [len(pieces.decode(pieces.encode(text)).encode()) for text in texts]
    assert found == decoded
    assert data.read().bytes_total == sum(decoded)
    if "remove_extra_whitespaces" in TOKENIZERS[name] and "add_dummy_prefix" in TOKENIZERS[name]:
        assert decoded == [len(text.encode()) for text in texts]  # nothing of the text is lost
    # The tools of data/ count the same.
    table = shards.ByteTable.from_sentencepiece(pieces)
    assert table.total(tokens) == sum(decoded)


def test_a_piece_that_counts_other_bytes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pieces = train(WORDS, add_dummy_prefix=False)
    data = Dataset(tmp_path / "data", model, stream(pieces, TEXTS))
    counted = train_gpt.piece_bytes
    (wrong,) = pieces.encode(TEXTS[0])[5:6]

    def one_more(*given: Any) -> tuple[np.ndarray, ...]:
        lengths, *rest = counted(*given)
        lengths[wrong] += 1
        return lengths, *rest

    monkeypatch.setattr(train_gpt, "piece_bytes", one_more)
    with pytest.raises(DataError) as error:
        data.read()
    named = f"piece {pieces.id_to_piece(wrong)!r}"
    for words in ("TOKENIZER_PATH=", "validation document at token 0", named, "sidecar"):
        assert words in str(error.value)


def test_a_difference_is_found_in_the_last_document_too_and_none_where_a_character_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pieces = train(WORDS, add_dummy_prefix=False)
    tokens = stream(pieces, [*TEXTS, "the end is a face: 🙂"])
    assert pieces.is_byte(int(tokens[-1])) and pieces.is_byte(int(tokens[-3]))
    for cut in range(5):
        Dataset(tmp_path / "data", model, tokens[: len(tokens) - cut]).read()
    data = Dataset(tmp_path / "data", model, stream(pieces, [*TEXTS, "x quite another word: jazz"]))
    counted = train_gpt.piece_bytes
    letter = pieces.piece_to_id("<0x6A>")
    assert letter in pieces.encode("jazz")

    def one_less(*given: Any) -> tuple[np.ndarray, ...]:
        lengths, *rest = counted(*given)
        lengths[letter] = 0
        return lengths, *rest

    monkeypatch.setattr(train_gpt, "piece_bytes", one_less)
    begin = len(stream(pieces, TEXTS))
    with pytest.raises(DataError, match=rf"validation document at token {begin} .*piece '<0x6A>'"):
        data.read()


def test_the_piece_before_a_character_of_bytes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pieces = train(WORDS, add_dummy_prefix=False)
    data = Dataset(tmp_path / "data", model, stream(pieces, ["mine 🙂 and 日本 so"]))
    counted = train_gpt.piece_bytes
    space = pieces.piece_to_id("▁")

    def none_for_a_space(*given: Any) -> tuple[np.ndarray, ...]:
        lengths, spaced, is_text = counted(*given)
        spaced[space] = False
        return lengths, spaced, is_text

    assert pieces.encode("mine 🙂")[-5] == space
    monkeypatch.setattr(train_gpt, "piece_bytes", none_for_a_space)
    with pytest.raises(DataError, match=r"its token \d+, piece '▁', counted as 0"):
        data.read()


def test_an_unknown_character_has_no_bytes_and_is_refused(tmp_path: Path) -> None:
    model, pieces = train(WORDS, byte_fallback=False, add_dummy_prefix=False)
    texts = [*WORDS[:1200:2], "then 日本"]
    with pytest.raises(DataError, match=r"has no piece for.*byte fallback"):
        Dataset(tmp_path / "data", model, stream(pieces, texts)).read()


LONE_SPACE = b"\x0a\x03" + "▁".encode()  # in the file of a model: a piece of these three bytes


@pytest.mark.parametrize(("options", "words"), [
    ({"bos_id": 0, "pad_id": 1}, "BOS has id 0, expected 1"),
    ({"bos_id": -1, "pad_id": 1}, "BOS has id -1, expected 1"),
    ({}, "lone space"),
])
def test_tokenizers_that_the_exporter_refuses_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model, pieces = train(WORDS, **options)
    if not options:
        assert model.count(LONE_SPACE) == 1
        model = model.replace(LONE_SPACE, b"\x0a\x03" + "▂".encode())
    with pytest.raises(DataError, match=rf"TOKENIZER_PATH.*{words}"):
        Dataset(tmp_path / "data", model, stream(pieces, WORDS[:20])).read()


# --- another tokenizer than the one that made the shards ---


def turned(texts: list[str]) -> list[str]:
    return [text[::-1].swapcase() for text in texts]


ELSE: dict[str, tuple[list[str], dict[str, Any]]] = {
    "of other texts": (turned(WORDS), {"add_dummy_prefix": False}),
    "of half the texts": (WORDS[::2], {"add_dummy_prefix": False}),
    "other symbols before them": (WORDS, {"add_dummy_prefix": False, "user_defined_symbols": ["\ue010"]}),
}


@pytest.mark.parametrize("with_manifest", [False, True])
@pytest.mark.parametrize("other", ELSE)
def test_a_tokenizer_that_did_not_make_the_shards_is_refused(
    other: str, with_manifest: bool, tmp_path: Path
) -> None:
    model, pieces = train(WORDS, add_dummy_prefix=False)
    tokens = stream(pieces, WORDS[:40])
    texts, options = ELSE[other]
    wrong, _ = train(texts, **options)
    # A manifest may be silent about the tokenizer.
    manifest = {"files": {"fineweb_val_000000.bin": {"tokens": len(tokens)}}} if with_manifest else None
    assert Dataset(tmp_path / "right", model, tokens, manifest).read().bytes_total > 0
    data = Dataset(tmp_path / "wrong", wrong, tokens, manifest)
    with pytest.raises(DataError, match=r"TOKENIZER_PATH=.*(only \d+\.\d% of the ids|are counted)"):
        data.read()


@pytest.mark.parametrize("options", [{"model_type": "unigram"}, {}, {"add_dummy_prefix": True}], ids=str)
def test_real_text_with_another_tokenizer_of_the_same_size(
    options: dict[str, Any], tmp_path: Path, shared_data: Path
) -> None:
    """The official shards, which have no manifest, and a tokenizer of other documents."""
    texts = real_texts(shared_data, 1000, 1010)
    given = {"vocab_size": 1024, "hard_vocab_limit": True, "add_dummy_prefix": False, **options}
    wrong, _ = train(texts, character_coverage=0.999, max_sentence_length=100_000, **given)
    tokens = shards.read_shard(shared_data / "datasets/fineweb_sample_sp1024/fineweb_val_000000.bin")
    data = Dataset(tmp_path / "data", wrong, tokens[:40_000])
    with pytest.raises(DataError, match=r"TOKENIZER_PATH=.*only \d+\.\d% of the ids"):
        data.read()
    official = (shared_data / "tokenizers/fineweb_1024_bpe.model").read_bytes()
    assert Dataset(tmp_path / "data", official, tokens[:40_000]).read().bytes_total > 0


def cut_at_random(tokens: np.ndarray, length: int) -> np.ndarray:
    """Pieces of documents, each behind a BOS of its own, as somebody cuts them to one length."""
    text = tokens[tokens != BOS_ID]
    cut = text[: len(text) // length * length].reshape(-1, length)
    return np.insert(cut, 0, BOS_ID, axis=1).flatten()


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 15, 32, 500])
def test_the_right_tokenizer_passes_however_documents_are_cut(
    length: int, dummy: bool, tmp_path: Path
) -> None:
    model, pieces = train(WORDS, add_dummy_prefix=dummy)
    Dataset(tmp_path / "data", model, cut_at_random(stream(pieces, WORDS[:30]), length)).read()


@pytest.mark.parametrize("length", [10, 32, 1000])
@pytest.mark.parametrize("size", [1024, 8192])
def test_real_text_passes_however_it_is_cut(
    size: int, length: int, tmp_path: Path, shared_data: Path
) -> None:
    tokens = shards.read_shard(shared_data / f"datasets/fineweb_sample_sp{size}/fineweb_val_000000.bin")
    model = (shared_data / f"tokenizers/fineweb_{size}_bpe.model").read_bytes()
    Dataset(tmp_path / "data", model, cut_at_random(tokens[:10_000], length)).read()


FAR = "東京は日本の首都であり、世界最大の都市である。 한국어 문장도 있다. 人々は毎日そこで働く。 "
ROWS = [FAR, "def f(x):\n    return [x  for x in  range(10)]  # 注\n", "naïve café 🙂 and 日本 so "]


@pytest.mark.parametrize("text", ROWS, ids=["far", "code", "mixed"])
@pytest.mark.parametrize("length", [20, 64, 200])
def test_text_of_bytes_passes_however_it_is_cut(
    text: str, length: int, tmp_path: Path, shared_data: Path
) -> None:
    """Rows begin inside characters and end behind spaces that an encoder drops."""
    model = (shared_data / "tokenizers/fineweb_1024_bpe.model").read_bytes()
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokens = stream(pieces, [text * 30])
    Dataset(tmp_path / "data", model, cut_at_random(tokens, length)).read()


def test_another_tokenizer_on_short_documents_is_refused(tmp_path: Path) -> None:
    """Empty ones before them say nothing."""
    model, pieces = train(WORDS, add_dummy_prefix=False)
    wrong, _ = train(turned(WORDS), add_dummy_prefix=False)
    words = [word for text in WORDS for word in text.split()]
    short = [" ".join(words[place : place + 2]) for place in range(0, 2000, 2)]
    tokens = np.append(np.full(1500, BOS_ID, np.uint16), stream(pieces, short))
    assert Dataset(tmp_path / "right", model, tokens).read().bytes_total > 0
    with pytest.raises(DataError, match=r"% of the ids of 1000 .*expected 97%"):
        Dataset(tmp_path / "wrong", wrong, tokens).read()


@pytest.mark.parametrize("variant", ["caseops", "caseops_fused"])
def test_marks_of_case_come_back(variant: str, tmp_path: Path) -> None:
    config = Config.from_env(case.make_dataset(tmp_path, variant))
    shard = train_gpt.open_shards(f"{config.data_path}/fineweb_val_[0-9]*.bin")
    validation = train_gpt.read_validation(shard, config)
    manifest = train_gpt.read_manifest(Path(config.data_path))
    train_gpt.check_text(validation.tokens, config, manifest)
    assert validation.audited_bytes == validation.bytes_total


def test_pairs_that_were_fused_are_separated_before_they_are_compared(tmp_path: Path) -> None:
    settings = case.make_dataset(tmp_path, "caseops")
    whole = Path(settings["DATA_PATH"])
    case.fuse_dataset(whole, tmp_path / "fused")
    config = Config.from_env({**settings, "DATA_PATH": str(tmp_path / "fused")})
    shard = train_gpt.open_shards(f"{config.data_path}/fineweb_val_[0-9]*.bin")
    validation = train_gpt.read_validation(shard, config)
    manifest = train_gpt.read_manifest(tmp_path / "fused")
    train_gpt.check_text(validation.tokens, config, manifest)
    separated = train_gpt.separate_pairs(validation.tokens, manifest.fused)
    assert np.array_equal(separated, tiny.joined(whole, "val_0")) and len(separated) > len(validation.tokens)
    (tmp_path / "fused" / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"only \d+\.\d% of the ids .*keep the manifest\.json"):
        train_gpt.check_text(validation.tokens, config, train_gpt.read_manifest(tmp_path / "fused"))


# --- what the manifest and the sidecar say ---


@pytest.mark.parametrize("key", ["decoded_bytes", "sidecar_bytes"])
def test_the_bytes_that_the_manifest_has_audited_are_compared(key: str, tmp_path: Path) -> None:
    model, pieces = train(WORDS, add_dummy_prefix=False)
    tokens = stream(pieces, TEXTS)
    right = sum(len(pieces.decode(pieces.encode(text)).encode()) for text in TEXTS)
    for audited, passes in ((right, True), (right + 1, False)):
        manifest = {"splits": {"val": {"audit": {key: audited}}}}
        data = Dataset(tmp_path / f"data{audited}", model, tokens, manifest)
        if passes:
            assert data.read().audited_bytes == right
            assert data.read(VAL_TOKENS_LIMIT=50).bytes_total < right
            continue
        for changes in ({}, {"VAL_TOKENS_LIMIT": 50}):  # all of it is compared, however much is scored
            with pytest.raises(DataError, match=f" {right} bytes.* audited {audited}"):
                data.read(**changes)


def damaged(counts: np.ndarray, tokens: np.ndarray) -> dict[str, Callable[[], np.ndarray]]:
    return {
        "BOS counts": lambda: np.where(tokens == BOS_ID, 1, counts),
        "of other tokens": lambda: np.roll(counts, 1) * (tokens != BOS_ID),
        "half of each": lambda: counts // 2,
    }


@pytest.mark.parametrize("damage", ["BOS counts", "of other tokens", "half of each"])
def test_a_sidecar_of_other_tokens_is_refused_without_a_manifest(damage: str, tmp_path: Path) -> None:
    settings = case.make_dataset(tmp_path, "caseops")
    folder = Path(settings["DATA_PATH"])
    (folder / "manifest.json").unlink()
    paths = sorted(folder.glob("fineweb_val_bytes_*.bin"))
    for path in paths:
        counts = tiny.tokens_of(path)
        tokens = tiny.tokens_of(folder / path.name.replace("_bytes", ""))
        shards.write_shard(path, damaged(counts, tokens)[damage]())
    config = Config.from_env(settings)
    shard = train_gpt.open_shards(f"{folder}/fineweb_val_[0-9]*.bin")
    validation = train_gpt.read_validation(shard, config)
    with pytest.raises(DataError, match=r"fineweb_val_bytes.*get the data again"):
        train_gpt.check_text(validation.tokens, config, train_gpt.read_manifest(folder))


DEEP = "[" * 200_000 + "]" * 200_000
MANIFESTS = [
    "", "{", "[]", "null", "3", '"text"', "\x00\xff", DEEP, '{"files": []}', '{"files": {"a": {}}}',
    '{"files": {"a": 3}}', '{"files": {"a": {"tokens": "x"}}}', '{"files": {"a": {"tokens": 1e999}}}',
    '{"files": {"a": {"tokens": null}}}', '{"tokenizer": []}', '{"tokenizer": "x"}', '{"splits": []}',
    '{"splits": {"val": []}}', '{"splits": {"val": {"audit": 3}}}', f'{{"splits": {"9" * 5000}}}',
    '{"splits": {"val": {"audit": {"decoded_bytes": "x"}}}}', '{"fused": [1]}', '{"fused": {"a": [1, 2]}}',
    '{"fused": {"9": [1]}}', '{"fused": {"9": [1, 70000]}}', '{"fused": {"-1": [1, 2]}}',
]


@pytest.mark.parametrize("content", MANIFESTS, ids=lambda content: content[:30])
def test_a_manifest_in_any_damaged_form_is_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"manifest\.json: not the manifest.*fetch or export") as error:
        train_gpt.read_manifest(tmp_path)
    assert "\n" not in str(error.value)


def test_a_manifest_that_is_a_folder_or_absent(tmp_path: Path) -> None:
    assert train_gpt.read_manifest(tmp_path) == train_gpt.Manifest({}, "", None, {})
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(DataError, match="not the manifest"):
        train_gpt.read_manifest(tmp_path)


# --- the challenge's own validation set ---


def test_the_official_text_is_known_by_all_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pieces = train(WORDS, add_dummy_prefix=False)
    texts = WORDS[:10]
    tokens = stream(pieces, texts)
    data = Dataset(tmp_path / "data", model, tokens)
    assert data.read().official == ""
    monkeypatch.setattr(train_gpt, "FINGERPRINT_TOKENS", 500)
    sha256 = hashlib.sha256(tokens[:500].tobytes()).hexdigest()
    text = train_gpt.OfficialText(data.size, len(texts), data.read().bytes_total, len(tokens) - 1, sha256)
    for field in text._fields:
        table = {"other": text._replace(**{field: 1})}
        monkeypatch.setattr(train_gpt, "OFFICIAL_VALIDATION", table)
        assert data.read().official == "", field
        monkeypatch.setattr(train_gpt, "OFFICIAL_VALIDATION", {**table, "mine": text})
        assert data.read().official == "mine"
    for unknown in ("sha256", "targets"):
        table = {"mine": text._replace(**{unknown: None})}
        monkeypatch.setattr(train_gpt, "OFFICIAL_VALIDATION", table)
        assert data.read().official == "mine"
    monkeypatch.setattr(train_gpt, "OFFICIAL_VALIDATION", {"mine": text})
    assert data.read(VAL_TOKENS_LIMIT=50).official == "mine"  # of which a part is scored
    swapped = tokens.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    for changed in (tokens[:-1], swapped, np.append(tokens, 7)):
        other = Dataset(tmp_path / "other", model, changed)
        found = train_gpt.open_shards(f"{other.folder}/fineweb_val_[0-9]*.bin")
        assert train_gpt.read_validation(found, other.config()).official == ""


@pytest.mark.parametrize("name", ["sp1024", "sp8192"])
def test_fingerprints_are_those_of_the_official_tokens(name: str, shared_data: Path) -> None:
    """A prefix of the set, with its tokenizer: not official, though it begins like it."""
    folder = shared_data / f"datasets/fineweb_sample_{name}"
    (path,) = folder.glob("fineweb_val_*.bin")
    tokens = shards.read_shard(path)
    prefix = tokens[: train_gpt.FINGERPRINT_TOKENS]
    assert hashlib.sha256(prefix.tobytes()).hexdigest() == train_gpt.OFFICIAL_VALIDATION[name].sha256
    tokenizer = shared_data / f"tokenizers/fineweb_{name.removeprefix('sp')}_bpe.model"
    size = int(name.removeprefix("sp"))
    config = Config(data_path=str(folder), tokenizer_path=str(tokenizer), vocab_size=size)
    found = train_gpt.open_shards(f"{folder}/fineweb_val_[0-9]*.bin")
    validation = train_gpt.read_validation(found, config)
    assert validation.official == ""
    train_gpt.check_text(validation.tokens[:40_000], config, train_gpt.read_manifest(folder))


def test_one_odd_place_is_not_a_text_that_differs() -> None:
    """Ids come back by their byte, from either end: what differs in the middle costs its place alone."""
    _, pieces = train(WORDS, add_dummy_prefix=False)
    ids = np.array(pieces.encode(" ".join(WORDS[:20])), np.int64)
    for place in (100, len(ids) // 2, len(ids) - 100):
        for instead in ([], [ids[5]], [ids[5], ids[6], ids[7]]):
            again = [*ids[:place].tolist(), *instead, *ids[place + 1 :].tolist()]
            share, least = train_gpt.share_that_comes_back([ids], [again], pieces)
            assert 0.97 < share < 1.0 and least == 0.95
    assert train_gpt.share_that_comes_back([ids], [ids.tolist()], pieces) == (1.0, 0.95)


@pytest.mark.parametrize("size", [1024, 8192])
def test_ids_of_another_tokenizer_hardly_come_back_in_a_row(size: int, shared_data: Path) -> None:
    """Single ids do, up to 94%: pieces of a large vocabulary are whole words, and whole words come back."""
    texts = real_texts(shared_data, 0, 50)
    _, own = train(texts, vocab_size=1024, add_dummy_prefix=False, max_sentence_length=100_000)
    official = sentencepiece.SentencePieceProcessor(
        model_file=str(shared_data / f"tokenizers/fineweb_{size}_bpe.model"))
    lists = own.encode(texts[:20])
    documents = [np.array(ids, np.int64) for ids in lists]
    shares = []
    for pieces in (own, official):
        again = pieces.encode(pieces.decode(lists))
        shares.append(train_gpt.share_that_comes_back(documents, again, pieces)[0])
    assert shares[0] == 1.0 and shares[1] < 0.8
