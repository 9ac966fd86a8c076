"""Tiny CaseOps data sets, made by the exporter itself from documents with every kind of capital."""

import json
import random
from pathlib import Path

from data import export
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
    docs = out / "docs.jsonl"
    docs.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()), encoding="utf-8")
    status = export.main([
        "--docs", str(docs), "--name", variant, "--out", str(out), "--variant", variant, "--workers", "1",
        "--train-tokenizer", "400", "--val-docs", str(VAL_DOCUMENTS), "--shard-tokens", "1000",
    ])  # fmt: skip
    assert status == 0
    tokenizer = out / "tokenizers" / f"{variant}.model"
    return tiny.environment(VOCAB_SIZE=400, DATA_PATH=out / "datasets" / variant, TOKENIZER_PATH=tokenizer)
