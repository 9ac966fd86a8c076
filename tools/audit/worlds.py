"""Texts, tokenizers and data sets so small that a whole run takes a tenth of a second.

The auditor counts bytes itself, by decoding; a sidecar is one that it has made.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece

from data import shards
from data.shards import BOS_ID

PIECES = 8  # so few that all of them can be tried at a target
UNKNOWN, NEVER_SEEN = 0, 2  # pieces that no training text has
FIRST_LETTER = 3  # the pieces before it are controls
STARTS = [0, 11, 40, 41, 96, 131]  # of documents in a short text; 40 and 41: an empty one
ODD_TEXTS = ["a", "two  spaces", "café 東京 🙂 nul\x00byte", "tab\tand\nnewline", "ﬁ ½ Große", "  before"]
CASE_MARK = "\ue001"  # of CaseOps data: the next letter is a capital, and the mark itself no text
VALIDATION, TRAINING = "fineweb_val_000000.bin", "fineweb_train_{:06}.bin"
SIDECAR = "fineweb_val_bytes_000000.bin"


class World(NamedTuple):
    """A data set: its folder, its validation text with its bytes, and how many pieces its tokenizer has."""

    folder: Path
    tokens: np.ndarray
    text_bytes: int = 0
    pieces: int = PIECES


def write(
    folder: Path, val: np.ndarray, tokenizer: bytes = b"", train: Sequence[np.ndarray] = (),
    counts: np.ndarray | None = None,
) -> World:
    """A data set in a folder. train: a shard each. counts: bytes of each token, if a sidecar says them."""
    folder.mkdir(parents=True, exist_ok=True)
    val = val.astype(np.uint16)
    shards.write_shard(folder / VALIDATION, val)
    for number, ids in enumerate(train):
        shards.write_shard(folder / TRAINING.format(number), ids.astype(np.uint16))
    if not tokenizer:
        return World(folder, val)
    (folder / "tokenizer.model").write_bytes(tokenizer)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    if counts is None:
        return World(folder, val, decoded_bytes(pieces, val), pieces.vocab_size())
    shards.write_shard(folder / SIDECAR, counts.astype(np.uint16))
    audit = {"splits": {"val": {"audit": {"sidecar_bytes": int(counts.sum())}}}}
    (folder / "manifest.json").write_text(json.dumps(audit))
    return World(folder, val, int(counts.sum()), pieces.vocab_size())


def decoded_bytes(pieces: sentencepiece.SentencePieceProcessor, tokens: np.ndarray) -> int:
    """Bytes of the documents as they decode."""
    documents = np.split(tokens, np.flatnonzero(tokens == BOS_ID))
    texts = pieces.decode([[int(i) for i in ids if i != BOS_ID] for ids in documents])
    return sum(len(text.encode()) for text in texts)


def tokenizer(texts: Sequence[str], kind: str, size: int, **named: Any) -> bytes:
    """A SentencePiece model in the challenge's manner."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type=kind, vocab_size=size, unk_id=UNKNOWN,
        bos_id=BOS_ID, eos_id=NEVER_SEEN, num_threads=1, minloglevel=2, **named,
    )
    return model.getvalue()


def letters() -> bytes:
    """PIECES pieces: three controls, a space, three letters of one byte and one of two."""
    same = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return tokenizer(["abc é" * 3, "é cba"] * 20, "char", PIECES, character_coverage=1.0, **same)


def random_text(seed: int, count: int = 150, starts: Sequence[int] = STARTS) -> np.ndarray:
    """Random letters in documents."""
    ids = np.random.default_rng(seed).integers(FIRST_LETTER, PIECES, count)
    ids[[start for start in starts if start < count]] = BOS_ID
    return ids.astype(np.uint16)


def training_text(seed: int = 5, count: int = 3000) -> np.ndarray:
    """Something to learn: half of the letters repeat those two before."""
    ids = random_text(seed, count, range(0, count, 37))
    repeats = np.random.default_rng(seed + 1).random(count) < 0.5
    for i in range(2, count):
        if repeats[i] and BOS_ID not in (ids[i], ids[i - 2]):
            ids[i] = ids[i - 2]
    return ids


def repeating(ids: np.ndarray, phrase: int = 9) -> np.ndarray:
    """The text as a phrase that comes again and again, one letter in ten another: what a cache feeds on."""
    repeated = ids.copy()
    for i in range(phrase + 1, len(ids)):
        if ids[i] != BOS_ID and i % 10:
            repeated[i] = repeated[i - phrase] if repeated[i - phrase] != BOS_ID else FIRST_LETTER
    return repeated


class Worlds:
    """All data sets of an audit, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self.letters, self.train = folder, letters(), training_text()
        self.asked = 0
        self.made: dict[str, World] = {}

    def _once(self, name: str, ids: np.ndarray, train: Sequence[np.ndarray] = ()) -> World:
        """A data set of letters."""
        if name not in self.made:
            self.made[name] = write(self.folder / name, ids, self.letters, train or [self.train])
        return self.made[name]

    def short(self) -> World:
        """A short random text."""
        return self._once("short", random_text(1))

    def easy(self) -> World:
        """A part of the training text: validation gets better as training goes on."""
        return self._once("easy", self.train[:400])

    def hard(self) -> World:
        """Mostly a piece that no training text has: validation gets worse."""
        return self._once("hard", hard_text())

    def several(self, name: str, ids: np.ndarray) -> World:
        """Three small shards of unequal length: in a hundred steps all of them come again and again."""
        parts = [training_text(seed, count) for seed, count in ((7, 700), (8, 500), (9, 901))]
        return self._once(f"several-{name}", ids, parts)

    def long(self, count: int = 430) -> World:
        """One long document and many short ones, of which the last is alone in its batch."""
        return self._once(f"long{count}", random_text(3, count, [0, *range(340, count, 10)]))

    def asks(self, ids: np.ndarray) -> World:
        """Another text by the same tokenizer, nothing to train on."""
        self.asked += 1
        counts = None
        if np.isin([UNKNOWN, NEVER_SEEN], ids).any():  # no text that decodes and encodes again
            counts = spelled_bytes(sentencepiece.SentencePieceProcessor(model_proto=self.letters))[ids]
        return write(self.folder / "asked" / f"q{self.asked}", ids, self.letters, (), counts)

    def of_texts(self, name: str, texts: Sequence[str], size: int, more: Sequence[str] = ()) -> World:
        """Texts by a tokenizer with a space before each, and byte pieces."""
        model = tokenizer([*texts, *more], "bpe", size, byte_fallback=True)
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        ids = [np.array([BOS_ID, *pieces.encode(text)]) for text in (*texts, "".join(ODD_TEXTS), *ODD_TEXTS)]
        return write(self.folder / name, np.concatenate(ids), model, [np.concatenate(ids * 3)])

    def with_sidecar(self, name: str, ids: np.ndarray, like: World, more: int = 0) -> World:
        """A text of another world's pieces that says itself what its tokens stand for: what they spell.

        more: bytes at each document's end.
        """
        model = (like.folder / "tokenizer.model").read_bytes()
        counts = spelled_bytes(sentencepiece.SentencePieceProcessor(model_proto=model))[ids]
        counts[np.append(ids[1:] == BOS_ID, True) & (ids != BOS_ID)] += more
        return write(self.folder / name, ids, model, [self.train], counts)

    def cased(self, with_sidecar: bool) -> World:
        """Words whose capitals are written as a mark and a small letter; the marks are not text."""
        texts = [f" {CASE_MARK}".join(text.split()) for text in words(6, 4, 60)]
        model = tokenizer(texts, "bpe", 320, byte_fallback=True, user_defined_symbols=[CASE_MARK])
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        ids = [np.array([BOS_ID, *pieces.encode(text)]) for text in texts]
        bare = write(self.folder / "cased-bare", np.concatenate(ids[:20]), model, [np.concatenate(ids)])
        if with_sidecar:
            return self.with_sidecar("cased", bare.tokens, bare)
        marks = int((bare.tokens == pieces[CASE_MARK]).sum())
        return bare._replace(text_bytes=bare.text_bytes - marks * len(CASE_MARK.encode()))


def spelled_bytes(pieces: sentencepiece.SentencePieceProcessor) -> np.ndarray:
    """Bytes that each piece spells; those of controls and case marks are none."""
    found = np.zeros(pieces.vocab_size(), int)
    for i in range(FIRST_LETTER, pieces.vocab_size()):
        spelled = pieces.id_to_piece(i).replace("▁", " ").encode()
        found[i] = 1 if pieces.is_byte(i) else len(spelled) * (spelled != CASE_MARK.encode())
    return found


def hard_text(count: int = 400) -> np.ndarray:
    """Mostly a piece that no training text has."""
    ids = np.full(count, NEVER_SEEN, np.uint16)
    ids[::9], ids[::37] = 5, BOS_ID
    return ids


def words(seed: int, length: int, documents: int) -> list[str]:
    """Documents of random words of one length."""
    random = np.random.default_rng(seed)
    known = ["".join(random.choice(list("abcdefghijklmnop"), length)) for _ in range(120)]
    return [" ".join(random.choice(known, 20)) for _ in range(documents)]
