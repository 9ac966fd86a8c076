"""The one tiny model, tokenizer and dataset of the tests: a test states only what it changes."""

import io
import random
from pathlib import Path

import numpy as np
import sentencepiece

from data import shards

VOCAB_SIZE = 320
# Every feature of the default model on two layers: the first is looped, the second has two lanes.
# Nothing is scored beyond the round trip.
MODEL: dict[str, object] = {
    "VOCAB_SIZE": VOCAB_SIZE, "NUM_LAYERS": 2, "MODEL_DIM": 32, "NUM_HEADS": 2, "NUM_KV_HEADS": 1,
    "MLP_MULT": 3, "XSA_LAST_N": 2, "NUM_LOOPS": 1, "LOOP_START": 0, "LOOP_END": 0,
    "PARALLEL_START_LAYER": 1, "TRAIN_SEQ_LEN": 32, "TRAIN_BATCH_TOKENS": 256, "MICRO_BATCH_TOKENS": 64,
    "EVAL_SEQ_LEN": 0, "ROPE_TRAIN_SEQ_LEN": 0, "EVAL_STRIDE": 0, "TTT_ENABLED": 0, "TTT_MODE": "sgd",
}


def environment(**changes: object) -> dict[str, str]:
    """The environment that describes the tiny model, with some settings changed."""
    return {name: str(value) for name, value in {**MODEL, **changes}.items()}


def documents() -> list[str]:
    """Sentences of words that one seed made up; the same on every machine."""
    source = random.Random(7)
    syllables = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    words = ["".join(source.choices(syllables, k=source.randint(1, 3))) for _ in range(150)]
    sentences = [" ".join(source.choices(words, k=source.randint(20, 120))) for _ in range(120)]
    return [sentence.capitalize() + "." for sentence in sentences]


def train_tokenizer(texts: list[str]) -> bytes:
    """A SentencePiece model of VOCAB_SIZE pieces, bytes among them, as the bytes of its file."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type="bpe", vocab_size=VOCAB_SIZE,
        byte_fallback=True, pad_id=shards.PAD_ID, bos_id=shards.BOS_ID, eos_id=shards.EOS_ID,
        unk_id=shards.UNK_ID, num_threads=1, minloglevel=2,
    )
    return model.getvalue()


def make_dataset(folder: Path) -> None:
    """Two training shards, a validation shard, their tokenizer and manifest."""
    texts = documents()
    model = train_tokenizer(texts)
    (folder / "tokenizer.model").write_bytes(model)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model)
    ranges = {"val_000000": (0, 20), "train_000000": (20, 80), "train_000001": (80, 120)}
    files = {}
    for name, (start, stop) in ranges.items():
        path = folder / f"fineweb_{name}.bin"
        tokens: list[int] = []
        for text in texts[start:stop]:
            tokens += [shards.BOS_ID, *tokenizer.encode(text)]
        shards.write_shard(path, np.array(tokens))
        files[path.name] = shards.file_entry(path, name.split("_")[0], (start, stop))
    shards.write_manifest(folder, {"version": shards.MANIFEST_VERSION, "files": files})


def tokens_of(path: Path) -> np.ndarray:
    """The tokens of a shard, to be changed at will."""
    return np.array(shards.read_shard(path))


def joined(folder: Path, kind: str) -> np.ndarray:
    """The numbers of all shards of a kind, in their order."""
    return np.concatenate([shards.read_shard(path) for path in sorted(folder.glob(f"fineweb_{kind}*.bin"))])


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their places in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def assert_documents_are_counted(directory: Path) -> None:
    """The manifest's ranges, of all files and both splits, are those that the BOS tokens give."""
    manifest = shards.read_manifest(directory)
    document = 0
    for split in ("val", "train"):
        first = document
        for path in sorted(directory.glob(f"fineweb_{split}_0*.bin")):
            tokens = shards.read_shard(path)
            start = document - int(tokens[0] != shards.BOS_ID)
            document += int((tokens == shards.BOS_ID).sum())
            assert manifest["files"][path.name]["documents"] == [start, document]
        assert manifest["splits"][split]["documents"] == [first, document] and first < document
