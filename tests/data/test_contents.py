"""What --verify sees in sound files: a foreign tokenizer, ids that it lacks, byte counts of other tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import contents, fineweb, shards
from data.encoding import Encoder
from tests.data.test_shards import train
from tests.support import case, tiny
from tests.support.real import real_texts

FORMS = ("caseops", "caseops_fused")


@pytest.fixture(scope="module", params=FORMS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a data set of each form; to be read only."""
    return Path(case.make_dataset(tmp_path_factory.mktemp("case"), request.param)["DATA_PATH"])


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the data set and its tokenizer, to be damaged."""
    shutil.copytree(made.parents[1], tmp_path / "copy")
    return tmp_path / "copy" / "datasets" / made.name


def write_counts(folder: Path, counts: np.ndarray) -> None:
    """Replace the byte counts, with a manifest that agrees: what is wrong must be seen in the numbers."""
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    begin = 0
    for path in sorted(folder.glob("fineweb_val_bytes_*.bin")):
        size = len(shards.read_shard(path))
        shards.write_shard(path, counts[begin : begin + size])
        documents = tuple(manifest["files"][path.name]["documents"])
        manifest["files"][path.name] = shards.file_entry(path, "val", documents)
        begin += size
    manifest["splits"]["val"]["audit"]["sidecar_bytes"] = int(counts.sum())
    shards.write_manifest(folder, manifest)


def problems(folder: Path) -> list[str]:
    return contents.content_problems(folder, shards.read_manifest(folder))


def plain_problems(folder: Path, tokenizer: str = "tokenizer.model") -> list[str]:
    """Of a data set without CaseOps."""
    files: dict[str, Any] = {path.name: {} for path in folder.glob("fineweb_*.bin")}
    manifest = {"tokenizer": {"file": tokenizer}, "splits": {"val": {}}, "files": files}
    return contents.content_problems(folder, manifest)


def test_what_the_exporter_makes_belongs_together(made: Path, dataset: Path) -> None:
    assert problems(made) == [] == plain_problems(dataset)


def test_a_wrong_sidecar_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(folder.parents[1])
    verify = ["--verify", "--variant", "any", "--dataset", folder.name, "--out", out]
    assert fineweb.main(verify) == 0
    tokens, counts = tiny.joined(folder, "val_[0-9]"), tiny.joined(folder, "val_bytes_")
    starts = tokens == shards.BOS_ID
    marks = (tokens >= 4) & (tokens < 8)
    fourth_document = np.cumsum(starts) == 4
    for wrong, told in (
        (np.where(marks, 3, counts), "has 3 bytes, expected 0: BOS and the marks"),
        (np.where(starts, 1, counts), "validation token 0, id 1, has 1 bytes, expected 0"),
        (np.roll(counts, 1), "expected 0: BOS and the marks"),
        (2 * counts, "of the validation tokens have the bytes that their pieces spell"),
        (np.where(fourth_document, 0, counts), "validation document 3 has"),
    ):
        write_counts(folder, wrong)
        capsys.readouterr()
        assert fineweb.main(verify) == 1
        assert told in capsys.readouterr().err


def test_a_sum_that_differs_from_the_manifests_and_marks_without_a_sidecar_are_told(folder: Path) -> None:
    manifest = shards.read_manifest(folder)
    manifest["splits"]["val"]["audit"]["sidecar_bytes"] += 1
    shards.write_manifest(folder, manifest)
    (problem,) = problems(folder)
    assert "bytes of text, the manifest says" in problem
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if "_bytes_" not in name}
    (problem,) = contents.content_problems(folder, manifest)
    assert "CaseOps marks, which are not text" in problem


def test_text_that_is_mostly_odd_is_no_wrong_sidecar(made: Path) -> None:
    """Byte fallbacks count at their last, escaped marks three bytes, white space in runs: all is well."""
    model = made / shards.read_manifest(made)["tokenizer"]["file"]
    encoder = Encoder(str(model), made.name)
    odd = ["東京都🙂" * 40, "\ue004\ue001\ue002 " * 30, "Wide   \n\n  and\t\tTabs " * 20, "ﬁ ½ ㌔ " * 30]
    tokens: list[int] = []
    counts: list[int] = []
    for text in [*odd, " ".join(case.texts()[:5])]:
        coded = encoder.transform(text)
        ids = np.array([shards.BOS_ID, *encoder.tokenizer.encode(coded)])
        tokens += ids.tolist()
        counts += encoder.token_bytes(coded, ids).tolist()
    tokenizer = shards.load_tokenizer(model)
    assert contents.sidecar_problems(made, np.array(tokens), np.array(counts), tokenizer) == []


def test_a_foreign_tokenizer_or_id_is_told(dataset: Path, tmp_path: Path) -> None:
    """It has as many pieces, so that every id is one of its own."""
    texts = [text[::-1] for text in tiny.documents()]
    (tmp_path / "other.model").write_bytes(tiny.train_tokenizer(texts))
    (problem,) = plain_problems(dataset, str(tmp_path / "other.model"))
    assert "come back when they are decoded and encoded" in problem
    folder = Path(shutil.copytree(dataset, tmp_path / "data"))
    tokens = tiny.tokens_of(folder / "fineweb_train_000001.bin")
    tokens[77] = tiny.VOCAB_SIZE
    shards.write_shard(folder / "fineweb_train_000001.bin", tokens)
    (problem,) = plain_problems(folder)
    assert "fineweb_train_000001.bin: token 77 has id 320, the tokenizer has 320 pieces" in problem


@pytest.mark.parametrize("options", [
    {}, {"model_type": "unigram", "seed_sentencepiece_size": 3000}, {"add_dummy_prefix": True},
], ids=str)
def test_real_ids_come_back_from_their_own_tokenizer_alone(
    options: dict[str, Any], tmp_path: Path, shared_data: Path
) -> None:
    """Of two tokenizers of the same size each writes ids that the other does not write."""
    texts = real_texts(shared_data, 0, 30)
    given = {"vocab_size": 1024, "hard_vocab_limit": True, "max_sentence_length": 100_000, **options}
    _, other = train(texts[10:], **given)
    official = shards.load_tokenizer(shared_data / "tokenizers/fineweb_1024_bpe.model")
    tokens = {}
    for tokenizer in (official, other):
        ids = [[shards.BOS_ID, *tokenizer.encode(text)] for text in texts[:10]]
        tokens[tokenizer] = np.concatenate([np.array(row, np.uint16) for row in ids])
    for writer, reader in ((official, other), (other, official)):
        assert contents.share_that_comes_back(writer, tokens[writer]) == 1.0
        assert contents.share_that_comes_back(reader, tokens[writer]) < contents.LEAST_SHARE


def write_val(folder: Path, model: bytes, tokens: list[int]) -> Path:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model)
    shards.write_shard(folder / "fineweb_val_000000.bin", np.array(tokens))
    return folder


def test_whatever_an_export_refuses_is_told(tmp_path: Path) -> None:
    model, tokenizer = train(tiny.documents())
    text = [shards.BOS_ID, *tokenizer.encode(tiny.documents()[0])]
    without, lacking = train(tiny.documents(), byte_fallback=False)
    foreign, _ = train(tiny.documents(), bos_id=2, eos_id=1)
    cases: list[tuple[bytes, list[int], str]] = [
        (model, text, ""), (model, [], "does not begin with BOS"), (model, text[1:], "not begin with BOS"),
        (model, [shards.BOS_ID] * 3, "no bytes to score"), (foreign, text, "BOS id 2"),
        (without, [1, *lacking.encode("a 日")], "is a character that the tokenizer has no piece for"),
    ]
    for number, (file, tokens, told) in enumerate(cases):
        found = plain_problems(write_val(tmp_path / str(number), file, tokens))
        assert bool(found) == bool(told) and all(told in problem for problem in found), found


def test_decoded_bytes_that_differ_from_the_manifests_are_told(tmp_path: Path) -> None:
    model, tokenizer = train(tiny.documents())
    text = tiny.documents()[0]
    folder = write_val(tmp_path / "data", model, [shards.BOS_ID, *tokenizer.encode(text)])
    files: dict[str, Any] = {"fineweb_val_000000.bin": {}}
    for noted, sound in ((len(text), True), (len(text) + 1, False)):
        splits = {"val": {"audit": {"decoded_bytes": noted}}}
        manifest = {"tokenizer": {"file": "tokenizer.model"}, "splits": splits, "files": files}
        assert (contents.content_problems(folder, manifest) == []) is sound


def test_a_piece_that_counts_other_bytes_is_named(tmp_path: Path) -> None:
    """By the exporter's audit, wherever it is in a document."""
    model, tokenizer = train(tiny.documents())
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model)
    encoder = Encoder(str(path), "plain")
    texts = ["a 🙂 b", tiny.documents()[0], f"🙂 {tiny.documents()[1]} 日本", "x"]
    for text in texts:
        tokens = np.array([shards.BOS_ID, *tokenizer.encode(text)])
        encoder.audit(text, text, tokens)
        for wrong in set(tokens[1:].tolist()):
            if tokenizer.is_byte(wrong):
                continue
            first = int(np.flatnonzero(tokens == wrong)[0])
            encoder.table.piece_bytes[wrong] += 1
            with pytest.raises(shards.DataError) as error:
                encoder.audit(text, text, tokens)
            encoder.table.piece_bytes[wrong] -= 1
            assert f"token {first}, piece {tokenizer.id_to_piece(wrong)!r}" in str(error.value)
