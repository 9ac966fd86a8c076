"""Formats that the data tools share: token shards, the manifest of a dataset directory, bytes per token.

A shard is 256 little-endian int32 (magic, version, token count, zeros), then that many little-endian uint16.
A dataset directory holds shards `<prefix>_{train,val}_%06d.bin`, for CaseOps also byte sidecars
`<prefix>_val_bytes_%06d.bin`, and `manifest.json`, written last: a directory with a manifest is finished.
`data/README.md` describes both for people who write them with other tools.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece as spm

from data.files import (
    DataError,
    atomic_file,
    explain_os_error,
    is_count,
    is_range,
    is_string,
    read_json,
    sha256_file,
    write_bytes,
)

SHARD_MAGIC = 20240520
SHARD_VERSION = 1
LLAMA3_MAGIC = 20240801  # of llm.c's shards for that tokenizer, which have ids of 32 bits
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
TOKEN_DTYPE = np.dtype("<u2")
MAX_VOCAB_SIZE = 1 << 16
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
SPACE_PIECE = "\u2581"
TOKENS_AT_ONCE = 1 << 22  # whose bytes are counted together: memory does not grow with the text

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
SHARD_NAME = re.compile(r"(?P<prefix>[A-Za-z0-9_.-]+?)_(?P<kind>train|val_bytes|val)_"
                        r"(?P<index>[0-9]{6})\.bin")


# ======================================================================================================
# SHARDS
# ======================================================================================================


def shard_header(token_count: int) -> bytes:
    """The 1,024 bytes in front of `token_count` tokens."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, token_count
    return header.tobytes()


def read_shard_header(path: Path) -> int:
    """Token count of a shard, after checking magic, version and that the file's size is 1024 + 2 * tokens."""
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
            size_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise explain_os_error(error, path) from error
    if fault := header_fault(header, size_bytes):
        raise DataError(f"{path}: {fault}")
    return int.from_bytes(header[8:12], "little", signed=True)


def header_fault(header: bytes, size_bytes: int) -> str:
    """What is wrong with a shard of this size that begins so, and what to do; empty if it is sound."""
    if header.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, not the shard itself; run `git lfs pull` where it came from"
    if size_bytes < HEADER_BYTES:
        return (f"{size_bytes} bytes, too short for a shard header of {HEADER_BYTES} bytes; it is truncated, "
                "fetch or make it again")
    magic, version, token_count = (int(value) for value in np.frombuffer(header, dtype="<i4", count=3))
    if magic == LLAMA3_MAGIC:
        return ("a shard of llm.c for Llama 3, with ids of 32 bits; expected uint16 ids of at most 65,536 "
                "pieces: make shards of the text with data/export.py")
    if header[:4] == SHARD_MAGIC.to_bytes(4, "big"):
        return "big-endian numbers, expected little-endian ones; make it again"
    if (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
        return (f"magic {magic} version {version}, expected {SHARD_MAGIC} version {SHARD_VERSION}; this is "
                "not a token shard, or it holds ids without a header (data/README.md, Formats)")
    ids_bytes = size_bytes - HEADER_BYTES
    if ids_bytes == token_count * TOKEN_DTYPE.itemsize:
        return ""
    if ids_bytes == token_count * 4:
        return (f"{token_count} ids of 4 bytes each, expected uint16; convert them, if the vocabulary has at "
                "most 65,536 pieces")
    return (f"{size_bytes} bytes, expected {HEADER_BYTES + token_count * TOKEN_DTYPE.itemsize} for the "
            f"{token_count} tokens its header announces; it is truncated or damaged, fetch or make it again")


def read_shard(path: Path) -> np.ndarray:
    """Tokens of a shard, memory-mapped read-only, uint16 of shape (tokens,). Raises DataError."""
    token_count = read_shard_header(path)
    if token_count == 0:
        return np.zeros(0, dtype=TOKEN_DTYPE)
    return np.memmap(path, dtype=TOKEN_DTYPE, mode="r", offset=HEADER_BYTES, shape=(token_count,))


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write uint16 `tokens` of shape (tokens,) as a shard, atomically."""
    with atomic_file(path) as file:
        file.write(shard_header(len(tokens)))
        file.write(np.ascontiguousarray(tokens, dtype=TOKEN_DTYPE).tobytes())


def names_of_kind(names: Iterable[str], kind: str) -> list[str]:
    """The names of shards of one kind (train, val or val_bytes), in order."""
    found = []
    for name in sorted(names):
        match = SHARD_NAME.fullmatch(name)
        if match and match["kind"] == kind:
            found.append(name)
    return found


def file_entry(path: Path, split: str, documents: tuple[int, int]) -> dict[str, Any]:
    """The manifest's record of a shard; `documents`: the global range [start, stop) that it touches."""
    return {
        "split": split,
        "tokens": read_shard_header(path),
        "bytes": path.stat().st_size,
        "sha256": sha256_file(path),
        "documents": list(documents),
    }


def document_ranges(document_starts: np.ndarray, shard_edges: list[int],
                    first_document: int) -> list[tuple[int, int]]:
    """Global document range [start, stop) that each shard of one split touches.

    `document_starts`: ascending token offset of each document of the split; `shard_edges`: token offsets at
    which shards begin, and the total; `first_document`: global index of the split's first document.
    """
    ranges = []
    for begin, end in itertools.pairwise(shard_edges):
        first = int(np.searchsorted(document_starts, begin, side="right")) - 1
        stop = int(np.searchsorted(document_starts, end, side="left"))
        ranges.append((first_document + first, first_document + stop))
    return ranges


# ======================================================================================================
# MANIFEST
# ======================================================================================================


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest.json` of a dataset directory, last of all: its presence says that the rest is there."""
    path = directory / MANIFEST_NAME
    try:
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    except RecursionError as error:  # a further field, of the manifest that this one continues
        raise DataError(f"{path}: a field of the source's manifest is nested too deeply") from error
    # The name of a file need not be UTF-8. JSON reads the escape of such a byte as Python reads the name.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def read_manifest(directory: Path) -> dict[str, Any]:
    """Manifest of a dataset directory. Raises DataError where it is absent, damaged or of another version."""
    path = directory / MANIFEST_NAME
    manifest = read_json(path)
    if manifest is None:
        raise DataError(f"{path}: not found; the data is unfinished, run the tool that makes it")
    version = manifest.get("version")
    if version != MANIFEST_VERSION:
        shown = repr(version) if isinstance(version, (int, float, str)) else type(version).__name__
        raise DataError(f"{path}: manifest version {shown[:40]}, expected {MANIFEST_VERSION}; "
                        "make the data again")
    if wrong := wrong_fields(manifest):
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise DataError(f"{path}: missing, or not as data/README.md describes: {', '.join(wrong[:5])}{more}; "
                        "delete it and make the data again")
    return manifest


def is_file_reference(value: Any) -> bool:
    """Whether a value of a manifest can be the path of a file."""
    if not isinstance(value, str) or not 0 < len(value) < 4096 or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


def is_audit(value: Any) -> bool:
    """Whether a value of a manifest can be the sums of an audit."""
    return isinstance(value, dict) and all(map(is_count, value.values()))


def is_table_of_pairs(value: Any) -> bool:
    """Whether a value of a manifest can be the pairs that data/fuse.py made one token each."""
    if not isinstance(value, dict):
        return False
    ids: list[Any] = []
    for name, pair in value.items():
        if not re.fullmatch("[0-9]{1,5}", name, re.ASCII) or not isinstance(pair, list) or len(pair) != 2:
            return False
        ids += [int(name), *pair]
    return all(is_count(token) and token < MAX_VOCAB_SIZE for token in ids)


Fields = dict[str, Callable[[Any], bool]]
TOKENIZER_FIELDS: Fields = {"file": is_file_reference, "sha256": is_string, "vocab_size": is_count}
SPLIT_FIELDS: Fields = {"documents": is_range}
FILE_FIELDS: Fields = {"split": lambda split: split in ("train", "val"), "tokens": is_count,
                       "bytes": is_count, "sha256": is_string, "documents": is_range}
OPTIONAL_FIELDS: Fields = {"name": is_string, "source": is_string, "revision": is_string,
                           "fused": is_table_of_pairs, "export": lambda settings: isinstance(settings, dict)}


def wrong_fields(manifest: dict[str, Any]) -> list[str]:
    """Fields that a manifest lacks, or that hold what they cannot hold, as paths like `files.NAME.sha256`."""
    wrong = [name for name, fits in OPTIONAL_FIELDS.items() if name in manifest and not fits(manifest[name])]
    wrong += wrong_in(manifest, "tokenizer", TOKENIZER_FIELDS)
    splits = manifest.get("splits")
    files = manifest.get("files")
    if not isinstance(splits, dict):
        wrong.append("splits")
    else:
        for split in ("train", "val"):
            wrong += [f"splits.{name}" for name in wrong_in(splits, split, SPLIT_FIELDS)]
            if isinstance(splits.get(split), dict) and not is_audit(splits[split].get("audit", {})):
                wrong.append(f"splits.{split}.audit")
    if not isinstance(files, dict):
        wrong.append("files")
    else:
        for name in files:
            # Other names would lead out of the folder, or to files that no run reads.
            named = [] if SHARD_NAME.fullmatch(name) else [name[:80]]
            wrong += [f"files.{field}" for field in named or wrong_in(files, name, FILE_FIELDS)]
    return wrong


def wrong_in(holder: dict[str, Any], section: str, fields: Fields) -> list[str]:
    """The same for one section of a manifest."""
    found = holder.get(section)
    if not isinstance(found, dict):
        return [section]
    return [f"{section}.{name}" for name, fits in fields.items()
            if name not in found or not fits(found[name])]


def verify_file(path: Path, entry: dict[str, Any],
                on_bytes: Callable[[int], None] | None = None) -> str | None:
    """The fault of one shard against its manifest entry (size, header, sha256), or None."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes != entry["bytes"]:
            return f"{path}: {size_bytes} bytes, the manifest says {entry['bytes']}"
        tokens = read_shard_header(path)
        if tokens != entry["tokens"]:
            return f"{path}: {tokens} tokens, the manifest says {entry['tokens']}"
        digest = sha256_file(path, on_bytes)
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return str(explain_os_error(error, path))
    except DataError as error:
        return str(error)
    if digest != entry["sha256"]:
        return f"{path}: sha256 {digest}, the manifest says {entry['sha256']}"
    return None


def overlaps(directory: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """Training files of a manifest that hold validation documents, with their ranges; empty when sound.

    A model trained on them is scored on text it has seen (issue #2127 upstream).
    """
    problems = []
    of = {split: [(name, entry["sha256"], *entry["documents"]) for name, entry in files.items()
                  if entry["split"] == split] for split in ("train", "val")}
    for (name, digest, start, stop), (other, twin, first, last) in itertools.product(of["train"], of["val"]):
        if digest == twin or max(start, first) < min(stop, last):
            problems.append(f"{directory / name}: training documents [{start}, {stop}) overlap the validation"
                            f" documents [{first}, {last}) of {other}; get or export other training data")
    return problems


def verify_dataset(directory: Path, on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """The faults of a dataset directory: files and tokenizer that differ from its manifest, training
    documents that are validation documents too; empty when sound."""
    try:
        manifest = read_manifest(directory)
    except DataError as error:
        return [str(error)]
    problems = overlaps(directory, manifest["files"])
    for name, entry in manifest["files"].items():
        if problem := verify_file(directory / name, entry, on_bytes):
            problems.append(problem)
    tokenizer = manifest["tokenizer"]
    path = tokenizer_path(directory, manifest)
    try:
        if not path.is_file():
            problems.append(f"{path}: missing")
        elif (digest := sha256_file(path)) != tokenizer["sha256"]:
            problems.append(f"{path}: sha256 {digest}, the manifest says {tokenizer['sha256']}")
    except (DataError, OSError) as error:
        problems.append(str(error))
    return problems


def tokenizer_path(directory: Path, manifest: Mapping[str, Any]) -> Path:
    """Where the manifest of a dataset directory says that the tokenizer is."""
    path = directory / manifest["tokenizer"]["file"]
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return path


# ======================================================================================================
# BYTES PER TOKEN
# ======================================================================================================


@dataclass(frozen=True)
class ByteTable:
    """UTF-8 bytes that each token stands for: those that SentencePiece decodes. Arrays: (vocabulary,).

    U+2581 stands for one space wherever it is in a piece. The one before the piece counts after a token that
    is text itself (`is_text`). At the beginning of a document most decoders drop it, as the challenge's do;
    one that leaves white space as it is keeps it (`keeps_first_space`).
    """

    piece_bytes: np.ndarray
    leading_space: np.ndarray
    is_text: np.ndarray
    keeps_first_space: bool

    @classmethod
    def from_sentencepiece(cls, tokenizer: spm.SentencePieceProcessor) -> ByteTable:
        """Table of a SentencePiece model; control, unknown and unused pieces count nothing."""
        vocab_size = tokenizer.vocab_size()
        piece_bytes = np.zeros(vocab_size, dtype=np.int64)
        leading_space = np.zeros(vocab_size, dtype=bool)
        is_text = np.zeros(vocab_size, dtype=bool)
        for token in range(vocab_size):
            if tokenizer.is_control(token) or tokenizer.is_unknown(token) or tokenizer.is_unused(token):
                continue
            is_text[token] = True
            if tokenizer.is_byte(token):
                piece_bytes[token] = 1
                continue
            piece = tokenizer.id_to_piece(token)
            leading_space[token] = piece.startswith(SPACE_PIECE)
            surface = piece.removeprefix(SPACE_PIECE).replace(SPACE_PIECE, " ")
            piece_bytes[token] = len(surface.encode())
        keeps_first_space = tokenizer.decode([tokenizer.piece_to_id(SPACE_PIECE)]) == " "
        return cls(piece_bytes, leading_space, is_text, keeps_first_space)

    def count(self, previous: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Bytes of each `target` token given the token before it; both of shape (tokens,)."""
        counts_space = self.is_text[previous] | self.keeps_first_space
        return self.piece_bytes[target] + (self.leading_space[target] & counts_space)

    def total(self, tokens: np.ndarray) -> int:
        """Bytes of all `tokens` but the first, which only gives the context (normally BOS)."""
        total = 0
        for begin in range(0, len(tokens) - 1, TOKENS_AT_ONCE):
            part = tokens[begin : begin + TOKENS_AT_ONCE + 1]
            total += int(self.count(part[:-1], part[1:]).sum())
        return total


def load_tokenizer(path: Path) -> spm.SentencePieceProcessor:
    """Load a SentencePiece model. Raises DataError if the file is absent or not a model."""
    if not path.is_file():
        raise DataError(f"{path}: tokenizer not found")
    try:
        tokenizer = spm.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise DataError(f"{path}: not a SentencePiece model ({error})") from error
    if tokenizer.vocab_size() > MAX_VOCAB_SIZE:
        raise DataError(f"{path}: {tokenizer.vocab_size()} pieces, shards hold at most {MAX_VOCAB_SIZE}")
    return tokenizer


def unfit(tokenizer: spm.SentencePieceProcessor) -> str:
    """Why a tokenizer cannot mark documents, or its bytes cannot be counted; empty where it can."""
    bos = tokenizer.bos_id()
    if bos != BOS_ID:
        made = ", as a symbol of the text" if tokenizer.piece_to_id("<s>") == BOS_ID else ""
        return (f"BOS id {bos}{made}, the format needs {BOS_ID}; train it with pad, bos, eos, unk = 0, 1, 2, "
                "3 as control symbols")
    if tokenizer.piece_to_id(SPACE_PIECE) == tokenizer.unk_id():
        return "no piece for a space alone, so bytes cannot be counted; train another"
    return ""
