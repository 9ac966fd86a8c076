"""Export: official ids, the same bytes however it was run or interrupted, and an audit that finds faults."""

import contextlib
import errno
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece as spm

from data import caseops, documents, encoding, export, shards
from data.files import exclusive, sha256_file
from tests.support.real import real_texts
from tests.support.tiny import assert_documents_are_counted, contents, joined
from tests.support.waiting import is_running, wait_until

DOCUMENTS, VAL_DOCUMENTS = 160, 20
WORDS = ["the", "Model", "reads", "TOKENS", "and", "writes", "weights", "McGraw", "iPhone", "NASA's", "",
         "42", "x²", "été", "日本", "\n", "\t", "ﬁne", "a\u0301", "🙂", "\ue001", "\ue004", "line"]


def random_text(generator: random.Random) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randrange(1, 120)))


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSON lines with awkward documents: empty, blank at the ends, controls; no line break at the end."""
    generator = random.Random(1)
    texts = [random_text(generator) for _ in range(DOCUMENTS)]
    texts[3] = ""
    texts[5] = "  ends in blanks \n"
    texts[7] = "zero\0width\u200b\ufeff"
    path = tmp_path_factory.mktemp("docs") / "docs.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=index % 2 == 0) for index, text in enumerate(texts)]
    path.write_text("\n".join([*lines[:100], "", *lines[100:]]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def models(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer for each variant, trained by the command."""
    out = tmp_path_factory.mktemp("models")
    made = {}
    for variant in encoding.VARIANTS:
        arguments = ["--docs", str(docs), "--name", variant, "--out", str(out), "--train-tokenizer", "330",
                     "--val-docs", str(VAL_DOCUMENTS), "--variant", variant, "--tokenizer-only"]
        assert export.main(arguments) == 0
        made[variant] = out / "tokenizers" / f"{variant}.model"
    return made


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks in little text; a journal after each second one."""
    monkeypatch.setattr(documents, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(export, "CHUNKS_PER_JOURNAL", 2)


def arguments(docs: Path, model: Path, out: Path, *more: str) -> list[str]:
    return ["--docs", str(docs), "--name", "set", "--out", str(out), "--tokenizer", str(model),
            "--workers", "1", "--val-docs", str(VAL_DOCUMENTS), "--shard-tokens", "2000", *more]


def read_stream(out: Path, kind: str) -> np.ndarray:
    return joined(out / "datasets" / "set", f"{kind}_0")


def lines_of(docs: Path) -> list[str]:
    return [line for line in docs.read_text(encoding="utf-8").split("\n") if line]


def texts_of(docs: Path) -> list[str]:
    return [json.loads(line)["text"] for line in lines_of(docs)]


def expected_stream(docs: Path, model: Path, variant: str) -> list[list[int]]:
    """Tokens per document straight from SentencePiece."""
    tokenizer = spm.SentencePieceProcessor(model_file=str(model))
    texts = texts_of(docs)
    if variant != "plain":
        texts = [caseops.encode(text, variant == "caseops_fused") for text in texts]
    return [[shards.BOS_ID, *tokenizer.encode(text)] for text in texts]


def flat(rows: list[list[int]]) -> list[int]:
    return [token for row in rows for token in row]


@pytest.mark.parametrize("variant", encoding.VARIANTS)
def test_tokens_splits_manifest(docs: Path, models: dict[str, Path], tmp_path: Path, variant: str) -> None:
    assert export.main(arguments(docs, models[variant], tmp_path, "--variant", variant)) == 0
    rows = expected_stream(docs, models[variant], variant)
    assert read_stream(tmp_path, "val").tolist() == flat(rows[:VAL_DOCUMENTS])
    assert read_stream(tmp_path, "train").tolist() == flat(rows[VAL_DOCUMENTS:])
    directory = tmp_path / "datasets" / "set"
    manifest = shards.read_manifest(directory)
    assert shards.verify_dataset(directory) == []
    assert manifest["splits"]["train"]["documents"] == [VAL_DOCUMENTS, len(rows)]
    assert manifest["tokenizer"]["sha256"] == sha256_file(models[variant])
    assert manifest["tokenizer"]["vocab_size"] == 330
    assert manifest["revision"] == f"sha256:{sha256_file(docs)}"
    assert_documents_are_counted(directory)
    if variant != "plain":
        check_sidecar(tmp_path, texts_of(docs)[:VAL_DOCUMENTS], manifest["splits"]["val"]["audit"])


def test_documents_that_were_edited_in_place_are_another_export(
    docs: Path, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names and sizes alone would not tell."""
    copy = tmp_path / "docs.jsonl"
    copy.write_bytes(docs.read_bytes())
    for _ in range(2):
        assert export.main(arguments(copy, models["plain"], tmp_path)) == 0
    capsys.readouterr()
    copy.write_bytes(docs.read_bytes().replace(b"weights", b"heights"))
    assert export.main(arguments(copy, models["plain"], tmp_path)) == 1
    told = capsys.readouterr().err
    assert f"was made of other documents: {copy} changed since; give another --name" in told
    # A manifest of before, or a damaged one, says nothing of it.
    path = tmp_path / "datasets/set/manifest.json"
    manifest = json.loads(path.read_text())
    for said in (None, {"end": 3}, {"end": {"file": -1}}):
        manifest["export"]["input"] = said
        path.write_text(json.dumps(manifest))
        assert export.main(arguments(copy, models["plain"], tmp_path)) == 0


def check_sidecar(out: Path, texts: list[str], audit: dict[str, int]) -> None:
    """It counts every byte of the original."""
    counts, tokens = read_stream(out, "val_bytes"), read_stream(out, "val")
    assert len(counts) == len(tokens)
    assert (counts[tokens == shards.BOS_ID] == 0).all()
    per_document = [int(part.sum()) for part in np.split(counts, np.flatnonzero(tokens == shards.BOS_ID))[1:]]
    # SentencePiece drops white space, and what it normalizes to it, at the two ends of a document
    edges = " \t\n\0\ufeff\u200b"
    assert per_document == [len(text.strip(edges).encode()) for text in texts]
    assert audit["sidecar_bytes"] + audit["dropped_bytes"] == audit["text_bytes"]
    assert audit["text_bytes"] == sum(len(text.encode()) for text in texts)


def test_bytes_stand_on_the_token_that_completes_them(models: dict[str, Path]) -> None:
    encoder = encoding.Encoder(str(models["caseops"]), "caseops")
    coded = caseops.encode("NASA 🚀\ue001")
    tokens = np.array([shards.BOS_ID, *encoder.tokenizer.encode(coded)])
    counts = encoder.token_bytes(coded, tokens)
    pieces = [encoder.tokenizer.id_to_piece(int(token)) for token in tokens]
    assert counts[pieces.index(caseops.CAPS)] == counts[pieces.index(caseops.ESCAPE)] == 0
    first = pieces.index("<0xF0>")
    assert counts[first:first + 4].tolist() == [0, 0, 0, 4]
    assert counts[-1] == 3 and counts.sum() == len("NASA 🚀\ue001".encode())
    encoder = encoding.Encoder(str(models["caseops_fused"]), "caseops_fused")
    coded = encoder.transform("the Model\n\nThe model")
    tokens = np.array([shards.BOS_ID, *encoder.tokenizer.encode(coded)])
    pieces = [encoder.tokenizer.id_to_piece(int(token)) for token in tokens[1:]]
    texts = ("the", "a the", "a model")
    first, then, model = (encoder.tokenizer.encode(text, out_type=str) for text in texts)
    title = caseops.SPACE_TITLE
    assert pieces == [*first, title, *model[1:], title, *then[1:], *model[1:]]
    counts = encoder.token_bytes(coded, tokens)
    assert counts.sum() == len("the Model\n\nThe model")
    assert [count for piece, count in zip(pieces, counts[1:], strict=True)
            if piece == caseops.SPACE_TITLE] == [0, 0]


def test_a_tokenizer_of_another_variant_is_refused(models: dict[str, Path]) -> None:
    for (name, model), variant in itertools.product(models.items(), encoding.VARIANTS):
        if name == variant:
            assert encoding.Encoder(str(model), variant).variant == variant
            continue
        with pytest.raises(encoding.DataError, match=f"of --variant {name}, asked for {variant}; give"):
            encoding.Encoder(str(model), variant)


def test_workers_and_limits(docs: Path, models: dict[str, Path], tmp_path: Path) -> None:
    assert export.main(arguments(docs, models["plain"], tmp_path, "--max-train-shards", "2")) == 0
    rows = expected_stream(docs, models["plain"], "plain")
    train = read_stream(tmp_path, "train")
    assert train.tolist() == flat(rows[VAL_DOCUMENTS:])[:4_000]
    manifest = shards.read_manifest(tmp_path / "datasets" / "set")
    touched = VAL_DOCUMENTS + int((train == shards.BOS_ID).sum())
    assert manifest["splits"]["train"]["documents"] == [VAL_DOCUMENTS, touched]
    for workers in ("1", "2"):
        more = ("--variant", "caseops", "--workers", workers)
        assert export.main(arguments(docs, models["caseops"], tmp_path / workers, *more)) == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_documents_are_cut_and_surrogates_replaced(models: dict[str, Path], tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_bytes(b"\xef\xbb\xbfone\ntwo\n<|endoftext|>\r\n"
                      b"say <|endoftext|> here\n<|endoftext|>\n\n<|endoftext|>")
    second.write_text("last\n")
    source = documents.DocumentSource((str(first), str(second)))
    assert [text for chunk in source.chunks() for text in source.read(chunk)] == [
        "one\ntwo", "say <|endoftext|> here", "last"]
    assert documents.replace_lone_surrogates("a\ud800b\U0001f600") == "a\ufffdb\U0001f600"


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_chunks_agree_where_one_resumes(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(2)
    texts = ["x" * generator.randrange(1, 300) + str(index) for index in range(200)]
    path = tmp_path / f"docs.{suffix}"
    lines = [json.dumps({"text": text}) if suffix == "jsonl" else f"{text}\n<|endoftext|>" for text in texts]
    path.write_text("\n".join(lines) + "\n")
    source = documents.DocumentSource((str(path),))
    for chunk_bytes in (7, 64, 1000, 10**6):
        monkeypatch.setattr(documents, "CHUNK_BYTES", chunk_bytes)
        chunks = list(source.chunks())
        assert [text for chunk in chunks for text in source.read(chunk)] == texts
        for index, chunk in enumerate(chunks):
            assert chunk.document == sum(before.document_count for before in chunks[:index])
        middle = chunks[len(chunks) // 2]
        assert list(source.chunks(0, middle.offset, middle.document)) == chunks[len(chunks) // 2:]


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def test_resumed_from_a_kill_at_any_operation_gives_the_same_bytes(
        docs: Path, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes, renames and journals are in turn the last thing that happens before a kill."""
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(lines_of(docs)[:80]), encoding="utf-8")

    def run(name: str) -> None:
        more = ("--variant", "caseops", "--shard-tokens", "1000")
        assert export.main(arguments(few, models["caseops"], tmp_path / name, *more)) == 0

    run("whole")
    operations = 0
    allowed = 10**9

    def counted(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal operations
            operations += 1
            if operations > allowed:
                raise Killed
            return function(*args, **kwargs)
        return wrapper

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(export.ShardStream, "write", counted(export.ShardStream.write))
    run("count")
    total = operations
    assert total > 50
    generator = random.Random(3)
    for stop in sorted(generator.sample(range(2, total), 8)):
        operations, allowed = 0, stop
        with pytest.raises(Killed):
            run(f"killed{stop}")
        operations, allowed = 0, generator.randrange(2, total)
        with contextlib.suppress(Killed):  # perhaps once more, while resuming
            run(f"killed{stop}")
        allowed = 10**9
        run(f"killed{stop}")
        assert contents(tmp_path / f"killed{stop}") == contents(tmp_path / "whole"), f"{stop} of {total}"


def test_workers_end_with_parent(repo: Path, models: dict[str, Path], docs: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.jsonl"
    big.write_text("\n".join(lines_of(docs) * 300), encoding="utf-8")
    command = arguments(big, models["plain"], tmp_path / "out", "--workers", "2")
    process = subprocess.Popen([sys.executable, str(repo / "data" / "export.py"), *command],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        process.wait()
        pytest.skip("the system does not list child processes")
    wait_until(lambda: len(children.read_text().split()) >= 3)  # two workers and the resource tracker
    pids = children.read_text().split()
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_running, pids)))


Fails = Callable[[list[str]], str]


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Fails:
    """What a command says that must fail."""
    def error(command: list[str]) -> str:
        capsys.readouterr()
        assert export.main(command) == 1
        return capsys.readouterr().err

    return error


def test_a_finished_export_is_confirmed_and_other_settings_are_refused(
        docs: Path, models: dict[str, Path], tmp_path: Path, error_of: Fails) -> None:
    command = arguments(docs, models["plain"], tmp_path)
    assert export.main(command) == 0
    before = contents(tmp_path)
    assert export.main(command) == 0
    assert "val_documents: 20 there, 21 now" in error_of([*command, "--val-docs", "21"])
    assert contents(tmp_path) == before
    shard = tmp_path / "datasets" / "set" / "fineweb_train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert str(shard) in error_of(command)


def test_files_are_kept_locked(docs: Path, models: dict[str, Path], tmp_path: Path, error_of: Fails) -> None:
    shard = tmp_path / "a" / "datasets" / "set" / "fineweb_train_000000.bin"
    model = tmp_path / "b" / "tokenizers" / models["plain"].name
    for mine in (shard, model):
        mine.parent.mkdir(parents=True)
        mine.write_text("mine")
    assert shard.name in error_of(arguments(docs, models["plain"], tmp_path / "a"))
    assert str(model) in error_of(arguments(docs, models["plain"], tmp_path / "b"))
    assert shard.read_text() == model.read_text() == "mine"
    directory = tmp_path / "datasets" / "set"
    directory.mkdir(parents=True)
    with exclusive(directory / export.LOCK_NAME):
        assert "another command is writing" in error_of(arguments(docs, models["plain"], tmp_path))


def test_a_full_disk_is_said_and_survived(docs: Path, models: dict[str, Path], tmp_path: Path,
                                          error_of: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    assert export.main(arguments(docs, models["plain"], tmp_path / "whole")) == 0
    left = [40]
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert "the disk is full" in error_of(arguments(docs, models["plain"], tmp_path / "full"))
    left[0] = 10**9
    assert export.main(arguments(docs, models["plain"], tmp_path / "full")) == 0
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


def test_bad_documents_are_named(models: dict[str, Path], tmp_path: Path, error_of: Fails) -> None:
    for number, (line, expected) in enumerate([
        (b'{"text": "cut', "expected a JSON object"), (b'{"body": "x"}', "--text-key"),
        (b"[1]", "expected a JSON object"), (b"7", "expected a JSON object"),
        (b'{"text": 5}', "holds int, expected a string"), (b'{"text": "\xff"}', "not UTF-8"),
    ]):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b'{"text": "good"}\n' * 30 + line + b"\n")
        workers = "2" if line == b"7" else "1"  # one of them across processes
        error = error_of(arguments(path, models["plain"], tmp_path / f"{number}", "--workers", workers))
        assert f"{path}: document 30" in error and expected in error, line


def test_unfit_input_is_refused(docs: Path, models: dict[str, Path], tmp_path: Path, error_of: Fails) -> None:
    again = docs.parent / "." / "sub" / ".." / docs.name
    (docs.parent / "sub").mkdir()
    command = arguments(docs, models["plain"], tmp_path)
    assert "given twice" in error_of([*command, "--docs", str(docs), str(again)])
    assert f"{DOCUMENTS} documents" in error_of([*command, "--val-docs", "50000"])
    assert not (tmp_path / "datasets" / "set" / shards.MANIFEST_NAME).exists()
    def train(name: str, **overrides: Any) -> Path:
        settings: dict[str, Any] = {"vocab_size": 330, "model_type": "bpe", "byte_fallback": True,
                                    "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "minloglevel": 2}
        settings |= overrides
        texts = ["plain words of the alphabet without anything else"] * 20  # so that others are unknown
        if settings["byte_fallback"]:
            texts = [random_text(random.Random(index)) for index in range(100)]
        spm.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=str(tmp_path / name),
                                       hard_vocab_limit=False, **settings)
        return tmp_path / f"{name}.model"

    cases = [(train("ids", bos_id=2, eos_id=1), "BOS id 2"),
             (train("nofallback", byte_fallback=False, vocab_size=60), "no piece for '"),
             (tmp_path / "ids.vocab", "not a SentencePiece model"), (tmp_path / "none.model", "not found")]
    for model, expected in cases:
        assert expected in error_of(arguments(docs, model, tmp_path / "out"))


def test_tokenizer_training_reads_behind_validation_and_keeps_long_documents(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    generator = random.Random(5)
    rows = [{"text": "validation zzz " * 3}] * 4 + [{"text": random_text(generator)} for _ in range(50)]
    rows += [{"text": "longest " * 2000}, {"text": "\0"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = documents.DocumentSource((str(path),))

    def trained_on(official: bool, first: int, count: int) -> tuple[list[str], dict[str, int]]:
        counts: Any = export.collections.Counter()
        recipe = export.TokenizerRecipe(source, 300, "plain", official, first, count)
        return list(recipe.texts(counts)), dict(counts)

    texts, counts = trained_on(False, 4, 10**6)
    assert len(texts) == 51 and not any("zzz" in text for text in texts)
    assert counts == {"documents": 51, "too_long": 0}
    texts, counts = trained_on(True, 0, 10**6)
    assert len(texts) == 55 and counts == {"documents": 55, "too_long": 1}
    assert len(trained_on(False, 4, 7)[0]) == 7


def test_trained_tokenizers_are_kept_and_sound(models: dict[str, Path], docs: Path, tmp_path: Path,
                                               error_of: Fails) -> None:
    tokenizer = spm.SentencePieceProcessor(model_file=str(models["caseops"]))
    assert [tokenizer.id_to_piece(index) for index in range(4, 8)] == list(caseops.MARKS)
    pieces = [tokenizer.id_to_piece(index) for index in range(264, tokenizer.vocab_size())]
    assert not any("A" <= character <= "Z" for piece in pieces for character in piece)
    out = models["plain"].parents[1]
    before = contents(out)
    command = ["--docs", str(docs), "--name", "plain", "--out", str(out), "--val-docs", str(VAL_DOCUMENTS),
               "--tokenizer-only", "--train-tokenizer"]
    assert export.main([*command, "330"]) == 0
    assert "was not made by this command" in error_of([*command, "331"])
    assert contents(out) == before
    assert "pieces, not 60000" in error_of([*command, "60000", "--out", str(tmp_path)])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_official_validation_ids(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 300
    monkeypatch.setattr(documents, "CHUNK_BYTES", 1 << 19)
    command = ["--docs", str(shared_data / "docs_selected.jsonl"), "--name", "set", "--out", str(tmp_path),
               "--tokenizer", str(shared_data / "tokenizers" / "fineweb_1024_bpe.model"), "--workers", "1",
               "--val-docs", str(count), "--max-train-shards", "0"]
    assert export.main(command) == 0
    val = read_stream(tmp_path, "val")
    folder = shared_data / "datasets" / "fineweb_sample_sp1024"
    official = shards.read_shard(folder / "fineweb_val_000000.bin")
    assert official[len(val)] == shards.BOS_ID and (val == shards.BOS_ID).sum() == count
    assert np.array_equal(val, official[:len(val)])
    audit = shards.read_manifest(tmp_path / "datasets" / "set")["splits"]["val"]["audit"]
    texts = real_texts(shared_data, 0, count)
    assert audit["text_bytes"] == audit["decoded_bytes"] == sum(len(text.encode()) for text in texts)
