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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece as spm

from data.files import DataError, atomic_file, explain_os_error, sha256_file, write_bytes

SHARD_MAGIC = 20240520
SHARD_VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
TOKEN_DTYPE = np.dtype("<u2")
MAX_VOCAB_SIZE = 1 << 16
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
SPACE_PIECE = "\u2581"

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
FILE_FIELDS = {"split", "tokens", "bytes", "sha256", "documents"}
SHARD_NAME = re.compile(r"(?P<prefix>.+)_(?P<kind>train|val|val_bytes)_(?P<index>\d{6})\.bin")


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
            header = np.frombuffer(file.read(HEADER_BYTES), dtype="<i4")
            size_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise explain_os_error(error, path) from error
    if size_bytes < HEADER_BYTES:
        raise DataError(f"{path}: {size_bytes} bytes, too short for a shard header of {HEADER_BYTES} bytes; "
                        "it is truncated, fetch or make it again")
    magic, version, token_count = (int(value) for value in header[:3])
    if (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
        raise DataError(f"{path}: magic {magic} version {version}, expected {SHARD_MAGIC} version "
                        f"{SHARD_VERSION}; this is not a token shard")
    expected_bytes = HEADER_BYTES + token_count * TOKEN_DTYPE.itemsize
    if size_bytes != expected_bytes:
        raise DataError(f"{path}: {size_bytes} bytes, expected {expected_bytes} for the {token_count} tokens "
                        "its header announces; it is truncated or damaged, fetch or make it again")
    return token_count


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
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    write_bytes(directory / MANIFEST_NAME, text.encode())


def read_manifest(directory: Path) -> dict[str, Any]:
    """Manifest of a dataset directory. Raises DataError where it is absent, damaged or of another version."""
    path = directory / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: not found; the data is unfinished, run the tool that makes it") from None
    except OSError as error:
        raise explain_os_error(error, path) from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); delete it and make the data again") from error
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if version != MANIFEST_VERSION:
        raise DataError(f"{path}: manifest version {version!r}, expected {MANIFEST_VERSION}; "
                        "make the data again")
    missing = missing_fields(manifest)
    if missing:
        raise DataError(f"{path}: no {', '.join(missing)} in it; delete it and make the data again")
    return manifest


def missing_fields(manifest: dict[str, Any]) -> list[str]:
    """Fields that every manifest needs and this one lacks, as paths like `files.NAME.sha256`."""
    needed: dict[str, dict[str, Any]] = {"tokenizer": dict.fromkeys(("file", "sha256", "vocab_size"))}
    needed["splits"] = {split: {"documents"} for split in ("train", "val")}
    files = manifest.get("files")
    needed["files"] = {name: FILE_FIELDS for name in files} if isinstance(files, dict) else {}
    missing = []
    for section, fields in needed.items():
        found = manifest.get(section)
        if not isinstance(found, dict):
            missing.append(section)
            continue
        for name, subfields in fields.items():
            if name not in found:
                missing.append(f"{section}.{name}")
            elif subfields and not (isinstance(found[name], dict) and subfields <= found[name].keys()):
                missing.append(f"{section}.{name}.({', '.join(sorted(subfields))})")
    return missing


def verify_file(path: Path, entry: dict[str, Any],
                on_bytes: Callable[[int], None] | None = None) -> str | None:
    """The fault of one shard against its manifest entry (size, header, sha256), or None."""
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        return f"{path}: missing"
    if size_bytes != entry["bytes"]:
        return f"{path}: {size_bytes} bytes, the manifest says {entry['bytes']}"
    try:
        tokens = read_shard_header(path)
    except DataError as error:
        return str(error)
    if tokens != entry["tokens"]:
        return f"{path}: {tokens} tokens, the manifest says {entry['tokens']}"
    digest = sha256_file(path, on_bytes)
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
        problems = overlaps(directory, manifest["files"])
    except DataError as error:
        return [str(error)]
    except (TypeError, ValueError) as error:
        return [f"{directory / MANIFEST_NAME}: not a manifest ({error}); delete it and make the data again"]
    for name, entry in manifest["files"].items():
        if problem := verify_file(directory / name, entry, on_bytes):
            problems.append(problem)
    tokenizer = manifest["tokenizer"]
    path = (directory / tokenizer["file"]).resolve()
    if not path.is_file():
        problems.append(f"{path}: missing")
    elif (digest := sha256_file(path)) != tokenizer["sha256"]:
        problems.append(f"{path}: sha256 {digest}, the manifest says {tokenizer['sha256']}")
    return problems


# ======================================================================================================
# BYTES PER TOKEN
# ======================================================================================================


@dataclass(frozen=True)
class ByteTable:
    """UTF-8 bytes that each token stands for, the challenge's accounting. Arrays have shape (vocabulary,).

    A piece counts the bytes of its surface; the one space that a leading U+2581 stands for counts only after
    a token that is text itself (`is_text`), since a decoder drops the space at the start of a document.
    """

    piece_bytes: np.ndarray
    leading_space: np.ndarray
    is_text: np.ndarray

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
        return cls(piece_bytes, leading_space, is_text)

    def count(self, previous: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Bytes of each `target` token given the token before it; both of shape (tokens,)."""
        return self.piece_bytes[target] + (self.leading_space[target] & self.is_text[previous])

    def total(self, tokens: np.ndarray) -> int:
        """Bytes of all `tokens` but the first, which only gives the context (normally BOS)."""
        return int(self.count(tokens[:-1], tokens[1:]).sum())


def load_tokenizer(path: Path) -> spm.SentencePieceProcessor:
    """Load a SentencePiece model. Raises DataError where the file is absent or is no model."""
    if not path.is_file():
        raise DataError(f"{path}: tokenizer not found")
    try:
        tokenizer = spm.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise DataError(f"{path}: not a SentencePiece model ({error})") from error
    if tokenizer.vocab_size() > MAX_VOCAB_SIZE:
        raise DataError(f"{path}: {tokenizer.vocab_size()} pieces, shards hold at most {MAX_VOCAB_SIZE}")
    return tokenizer
