"""Tiny CaseOps data sets, made by the exporter itself from documents with every kind of capital."""

import functools
import json
import random
import shutil
import tempfile
from pathlib import Path

from data import export, fuse, shards
from tests.support import tiny

VAL_DOCUMENTS = 12
ODD = ["McGraw", "iPhone", "NASA's", "café", "日本", "I", "A", "x²", "(The", "U.S.A.", "\ue001", "🙂"]


def texts() -> list[str]:
    """The sentences of the tiny data set with capitals and odd words; NFKC changes nothing in them but x²."""
    source = random.Random(3)
    found = []
    for sentence in tiny.documents():
        words = [source.choice([word, word.capitalize(), word.upper()]) for word in sentence.split()]
        for _ in range(3):
            words.insert(source.randrange(len(words)), source.choice(ODD))
        found.append(" ".join(words))
    return found


def make_dataset(out: Path, variant: str) -> dict[str, str]:
    """Export `texts` to OUT/datasets/NAME with a tokenizer of its own; the settings that name both."""
    shutil.copytree(exported(variant).name, out, dirs_exist_ok=True)
    tokenizer = out / "tokenizers" / f"{variant}.model"
    return tiny.environment(VOCAB_SIZE=400, DATA_PATH=out / "datasets" / variant, TOKENIZER_PATH=tokenizer)


@functools.cache  # many tests take a copy; the cache also keeps the folder until Python ends
def exported(variant: str) -> tempfile.TemporaryDirectory[str]:
    """What the exporter makes of `texts`."""
    folder = tempfile.TemporaryDirectory()
    out = Path(folder.name)
    docs = out / "docs.jsonl"
    docs.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()), encoding="utf-8")
    status = export.main([
        "--docs", str(docs), "--name", variant, "--out", str(out), "--variant", variant, "--workers", "1",
        "--train-tokenizer", "400", "--val-docs", str(VAL_DOCUMENTS), "--shard-tokens", "1000",
    ])
    assert status == 0
    return folder


def fuse_dataset(folder: Path, out: Path) -> None:
    """Write at `out` the dataset of `folder` with fused case marks, as the download makes it."""
    manifest = shards.read_manifest(folder)
    tokenizer = shards.tokenizer_path(folder, manifest)
    pairs = fuse.choose_pairs(tokenizer)
    shutil.copytree(folder, out)
    for name in shards.names_of_kind(manifest["files"], "train"):
        fuse.fuse_files([out / name], pairs)
    for name in shards.names_of_kind(manifest["files"], "val"):
        fuse.fuse_files([out / name, out / name.replace("_val_", "_val_bytes_")], pairs)
    for name, entry in manifest["files"].items():
        manifest["files"][name] = shards.file_entry(out / name, entry["split"], tuple(entry["documents"]))
    manifest["tokenizer"]["file"] = str(tokenizer)
    manifest["fused"] = {str(new): list(pair) for new, pair in pairs.items()}
    shards.write_manifest(out, manifest)
