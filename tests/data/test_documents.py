"""Documents that are packed or not UTF-8 are named with the way out; validation without text is refused."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data import documents, export
from tests.support import case, tiny

LINES = "".join(json.dumps({"text": text}) + "\n" for text in tiny.documents()).encode()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("docs.jsonl", LINES)
    return file.getvalue()


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("docs.jsonl")
        member.size = len(LINES)
        archive.addfile(member, io.BytesIO(LINES))
    return file.getvalue()


TEXT = LINES.decode()
PACKED: dict[str, tuple[bytes, str, str]] = {
    "docs.jsonl.gz": (gzip.compress(LINES), "gzip", "gunzip -k "),
    "docs.jsonl": (gzip.compress(LINES), "gzip", "gunzip -k "),  # whatever its name says
    "docs.jsonl.bz2": (bz2.compress(LINES), "bzip2", "bunzip2 -k "),
    "docs.jsonl.xz": (lzma.compress(LINES), "xz", "xz -dk "),
    "docs.jsonl.lzma": (lzma.compress(LINES, lzma.FORMAT_ALONE), "LZMA", "--format=lzma"),
    "docs.jsonl.zst": (b"\x28\xb5\x2f\xfd" + bytes(20), "Zstandard", "zstd -d "),
    "docs.zip": (zipped(), "zip", "unzip "),
    "docs.tar": (tarred(), "tar", "tar -xf "),
    "docs.parquet": (b"PAR1" + bytes(20) + b"PAR1", "Parquet", "to_json"),
    "docs.arrow": (b"ARROW1\0\0" + bytes(20), "Arrow", "to_json"),
    "le.jsonl": (b"\xff\xfe" + TEXT.encode("utf-16-le"), "UTF-16", "iconv -f UTF-16 -t UTF-8 "),
    "be.jsonl": (b"\xfe\xff" + TEXT.encode("utf-16-be"), "UTF-16", "iconv -f UTF-16 -t UTF-8 "),
    "le_without.jsonl": (TEXT.encode("utf-16-le"), "UTF-16", "iconv -f UTF-16LE "),
    "be_without.jsonl": (TEXT.encode("utf-16-be"), "UTF-16", "iconv -f UTF-16BE "),
    "32.jsonl": (TEXT.encode("utf-32"), "UTF-32", "iconv -f UTF-32 "),
    "fineweb_val_000000.bin": (b"\x88\xd8\x34\x01" + bytes(2000), "token ids", "text that they were made of"),
    "pointer.jsonl": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS", "lfs pull"),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_file_that_is_not_text_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, kind, advice = PACKED[name]
    path = tmp_path / name
    path.write_bytes(content)
    out = ["--out", str(tmp_path / "out"), "--workers", "1", "--name", "set"]
    assert export.main(["--docs", str(path), "--train-tokenizer", "300", "--val-docs", "9", *out]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: {kind}, expected UTF-8 text; ") and advice in said
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()


TEXTS = [LINES, b"\xef\xbb\xbf" + LINES, b"", b"x", "é日".encode(), b"a\0", b"PK", b"{\0}"]


@pytest.mark.parametrize("content", TEXTS, ids=range(len(TEXTS)))
def test_text_is_taken(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "docs.txt"
    path.write_bytes(content)
    documents.DocumentSource((str(path),)).require_text()


def test_what_is_not_a_file_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = Path(os.devnull)  # for which the same holds as for a pipe, and which no test waits for
    for path, told in ((device, "cannot be read twice"), (tmp_path / "none.jsonl", "check the path"),
                       (tmp_path, "there is a folder where a file is needed")):
        command = ["--docs", str(path), "--name", "set", "--out", str(tmp_path / "out")]
        assert export.main([*command, "--train-tokenizer", "300"]) == 1
        assert told in capsys.readouterr().err


NO_TEXTS: dict[str, Callable[[int], str]] = {
    "empty": lambda _: "", "blank": lambda number: " \n\t"[: number % 4], "zero width": lambda _: "\u200b",
}


@pytest.fixture(scope="module", params=["plain", "caseops"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of each variant, which names its file."""
    return Path(case.make_dataset(tmp_path_factory.mktemp("case"), request.param)["TOKENIZER_PATH"])


@pytest.mark.parametrize("kind", NO_TEXTS)
def test_validation_without_bytes_is_refused(
    kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As soon as validation is complete: training documents may take hours."""
    rows = [*map(NO_TEXTS[kind], range(5)), *tiny.documents()]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows), encoding="utf-8")
    monkeypatch.setattr(documents, "CHUNK_BYTES", 1000)
    command = ["--docs", str(path), "--name", "set", "--out", str(tmp_path), "--workers", "1", "--tokenizer",
               str(model), "--variant", model.stem]
    reached = []
    add = export.Export.add

    def counted(self: export.Export, *chunk: Any) -> None:
        add(self, *chunk)
        reached.append(self.next["document"])

    monkeypatch.setattr(export.Export, "add", counted)
    capsys.readouterr()
    assert export.main([*command, "--val-docs", "5"]) == 1
    said = capsys.readouterr().err
    assert f"{path}: no bytes to score: the first 5 documents are validation" in said
    assert 5 <= reached[-1] < len(rows)
    folder = tmp_path / "datasets" / "set"
    assert str(folder) in said and not (folder / "manifest.json").exists()
    assert export.main([*command, "--val-docs", "6", "--name", "more"]) == 0  # the sixth holds text
