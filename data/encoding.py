"""Documents to tokens, in as many processes as there are cores, with an audit of every validation byte.

Results come back in document order and do not depend on the number of processes. A chunk is dropped once it
has been written, so memory depends only on the chunk size and the number of processes.
"""

from __future__ import annotations

import bisect
import collections
import functools
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import sentencepiece as spm

from data import caseops, shards
from data.documents import Chunk, DocumentSource
from data.files import DataError
from data.shards import ByteTable

PLAIN, CASEOPS, CASEOPS_FUSED = VARIANTS = ("plain", "caseops", "caseops_fused")
CHUNKS_AHEAD = 2  # per process, finished or under way, beyond the one being written
BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
MAX_TOKEN_BYTES = np.iinfo(shards.TOKEN_DTYPE).max


@dataclass(frozen=True)
class EncodingSettings:
    """All that decides the tokens: documents, tokenizer, transform, number of validation documents."""

    source: DocumentSource
    tokenizer_path: str
    variant: str
    val_documents: int


@dataclass
class EncodedChunk:
    """Tokens of one chunk (uint16, BOS first in each document) and tokens per document (int64).

    `val_token_bytes`: CaseOps byte counts of the chunk's validation tokens, uint16; `audit`: sums over its
    validation documents.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    val_token_bytes: np.ndarray
    audit: collections.Counter[str] = field(default_factory=collections.Counter)


class Encoder:
    """A tokenizer with its byte table. Raises DataError for one that cannot mark documents or count bytes."""

    def __init__(self, tokenizer_path: str, variant: str) -> None:
        path = Path(tokenizer_path)
        self.path = path
        self.variant = variant
        self.use_caseops = variant != PLAIN
        self.fused = variant == CASEOPS_FUSED
        self.tokenizer = shards.load_tokenizer(path)
        # numpy ids skip a Python object per token; older SentencePiece versions have lists alone
        self.token_ids = getattr(self.tokenizer, "EncodeAsNumpy", self.tokenizer.EncodeAsIds)
        self.table = ByteTable.from_sentencepiece(self.tokenizer)
        if fault := shards.unfit(self.tokenizer):
            raise DataError(f"{path}: {fault}")
        self.require_marks()
        self.byte_values = np.full(self.tokenizer.vocab_size(), -1, dtype=np.int64)
        self.piece_characters = np.zeros(self.tokenizer.vocab_size(), dtype=np.int64)
        for token in np.flatnonzero(self.table.is_text):
            piece = self.tokenizer.id_to_piece(int(token))
            if self.tokenizer.is_byte(int(token)):
                self.byte_values[token] = int(BYTE_PIECE.fullmatch(piece)[1], 16)  # type: ignore[index]
            else:
                self.piece_characters[token] = len(piece)

    def require_marks(self) -> None:
        """Raise DataError where the tokenizer's marks are not those of the variant that it is used for."""
        found = variant_of(self.tokenizer)
        if found != self.variant:
            raise DataError(f"{self.path}: by its pieces from {caseops.FIRST_MARK_ID} on a tokenizer of "
                            f"--variant {found}, asked for {self.variant}; give --variant {found}, or train "
                            "another tokenizer with --train-tokenizer")

    def transform(self, text: str) -> str:
        """The text that the tokenizer sees."""
        return caseops.encode(text, self.fused) if self.use_caseops else text

    def audit(self, text: str, coded: str, tokens: np.ndarray) -> tuple[collections.Counter[str], np.ndarray]:
        """Byte sums of one document (`tokens`: BOS first) and, for CaseOps, bytes per token (else empty).

        Raises DataError where a character has no piece, where the table's sum is not the length of the
        decoded text, or where CaseOps loses text.
        """
        ids = tokens[1:].tolist()
        if self.tokenizer.unk_id() in ids:
            raise DataError(f"{self.path}: no piece for {self.unknown_text(coded)!r}, so its bytes are "
                            f"unknown; use a tokenizer with byte fallback. The document begins {text[:60]!r}")
        table_bytes = self.table.total(tokens)
        decoded_bytes = len(self.tokenizer.decode(ids).encode())
        sums = collections.Counter(
            documents=1, tokens=len(tokens), text_bytes=len(text.encode()), decoded_bytes=decoded_bytes,
            byte_tokens=int((self.byte_values[tokens] >= 0).sum()))
        if table_bytes != decoded_bytes:
            at = self.first_miscounted(tokens)
            piece = self.tokenizer.id_to_piece(int(tokens[at]))
            counted = self.table.total(tokens[at - 1 : at + 1])
            raise DataError(f"{self.path}: a document decodes to {decoded_bytes} bytes, but its pieces "
                            f"count {table_bytes}; the first difference is at its token {at}, piece "
                            f"{piece!r}, counted as {counted}. Bits per byte would be wrong: use another "
                            f"tokenizer. The document begins {text[:60]!r}")
        if not self.use_caseops:
            return sums, np.zeros(0, dtype=shards.TOKEN_DTYPE)
        if caseops.decode(coded, self.fused) != text:
            raise DataError(f"CaseOps does not give back the document that begins {text[:60]!r}; report it")
        token_bytes = self.token_bytes(coded, tokens)
        sums["sidecar_bytes"] = int(token_bytes.sum())
        sums["dropped_bytes"] = sums["text_bytes"] - sums["sidecar_bytes"]
        return sums, token_bytes.astype(shards.TOKEN_DTYPE)

    def unknown_text(self, coded: str) -> str:
        """The first part of a text that the tokenizer has no piece for."""
        known = {self.tokenizer.id_to_piece(token) for token in range(self.tokenizer.vocab_size())}
        return next((part for part in self.tokenizer.encode(coded, out_type=str) if part not in known), "")

    def first_miscounted(self, tokens: np.ndarray) -> int:
        """The first token of a document (BOS first) where the decoded and the counted bytes differ."""
        ids = tokens.tolist()

        def differs(stop: int) -> bool:
            """Whether they differ for the tokens before `stop`."""
            decoded = self.tokenizer.decode(ids[1:stop])
            return len(decoded.encode()) != self.table.total(tokens[:stop])

        # Cut only between characters: for an incomplete one the decoder would put a mark of three bytes.
        values = self.byte_values[tokens[1:]]
        continues = (values >= 0) & ((values & 0xC0) == 0x80)
        stops = (np.flatnonzero(np.append(~continues, True)) + 1).tolist()
        return stops[bisect.bisect_left(stops[:-1], True, key=differs)] - 1

    def token_bytes(self, coded: str, tokens: np.ndarray) -> np.ndarray:
        """Bytes of the original text behind each of `tokens` (BOS first, it counts 0), int64.

        Normalization is followed back through SentencePiece's own offsets; only what it drops at the two ends
        of a document (white space) is counted nowhere. A character in byte pieces counts at its last piece.
        """
        normalized, offsets = self.tokenizer.normalize(coded, with_offsets=True)
        characters = self.piece_characters[tokens]
        values = self.byte_values[tokens]
        leads = np.flatnonzero((values >= 0) & ((values & 0xC0) != 0x80))
        lead_values = values[leads]
        width = 1 + (lead_values >= 0xC0).astype(np.int64) + (lead_values >= 0xE0) + (lead_values >= 0xF0)
        characters[leads + width - 1] = 1
        ends = np.cumsum(characters)
        if ends[-1] != len(normalized):
            raise DataError(f"{self.path}: pieces hold {ends[-1]} characters of a normalized text of "
                            f"{len(normalized)}; this kind of model cannot have a byte sidecar")
        bytes_before = np.concatenate(([0], np.cumsum(caseops.byte_counts(coded, self.fused))))
        counts = np.diff(bytes_before[np.asarray(offsets)[ends]], prepend=bytes_before[offsets[0]])
        if counts.max(initial=0) > MAX_TOKEN_BYTES:
            raise DataError(f"a token has {counts.max()} bytes, but a sidecar holds at most "
                            f"{MAX_TOKEN_BYTES}; shorten the white space in the document that begins "
                            f"{coded[:60]!r}")
        return counts


def variant_of(tokenizer: spm.SentencePieceProcessor) -> str:
    """The variant that a tokenizer was trained for, by its marks."""
    fused = caseops.form_of(tokenizer)
    if fused is None:
        return PLAIN
    return CASEOPS_FUSED if fused else CASEOPS


@functools.lru_cache(maxsize=1)
def cached_encoder(tokenizer_path: str, variant: str) -> Encoder:
    """The encoder of this process; loading one is slower than encoding a chunk."""
    return Encoder(tokenizer_path, variant)


def encode_chunk(settings: EncodingSettings, chunk: Chunk) -> EncodedChunk:
    """Read, encode and, as far as they are validation, audit the documents of one chunk."""
    encoder = cached_encoder(settings.tokenizer_path, settings.variant)
    val_count = settings.val_documents - chunk.document
    audit: collections.Counter[str] = collections.Counter()
    nothing = np.zeros(0, dtype=shards.TOKEN_DTYPE)
    rows, val_rows = [nothing], [nothing]
    for index, text in enumerate(settings.source.read(chunk)):
        coded = encoder.transform(text)
        ids = encoder.token_ids(coded)
        row = np.empty(1 + len(ids), dtype=shards.TOKEN_DTYPE)
        row[0] = shards.BOS_ID
        row[1:] = ids
        rows.append(row)
        if index < val_count:
            sums, token_bytes = encoder.audit(text, coded, row)
            audit.update(sums)
            val_rows.append(token_bytes)
    lengths = np.array([len(row) for row in rows[1:]], dtype=np.int64)
    return EncodedChunk(np.concatenate(rows), lengths, np.concatenate(val_rows), audit)


# ======================================================================================================
# PROCESSES
# ======================================================================================================


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def encoded_chunks(settings: EncodingSettings, chunks: Iterable[Chunk],
                   workers: int) -> Generator[tuple[Chunk, EncodedChunk], None, None]:
    """Each chunk with its tokens, in order, whatever the number of processes. Raises DataError."""
    if workers == 1:
        for chunk in chunks:
            yield chunk, encode_chunk(settings, chunk)
        return
    # spawn: a forked child would inherit locks of threads that do not exist in it
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=start_worker)
    pending: collections.deque[tuple[Chunk, Future[EncodedChunk]]] = collections.deque()
    try:
        for chunk in chunks:
            pending.append((chunk, pool.submit(encode_chunk, settings, chunk)))
            if len(pending) > workers * CHUNKS_AHEAD:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise DataError("a worker process died, perhaps for lack of memory. Finished work is kept: "
                        "run the same command again, with fewer --workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def start_worker() -> None:
    """Leave interrupts to the parent, and do not outlive it: a killed parent could not end its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Wait until the parent process is gone, then leave at once."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
