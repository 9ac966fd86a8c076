"""Check that the ids, the tokenizer and the byte counts of a dataset belong together. No hash shows that.

With another tokenizer of the same size, or with the byte counts of another text, the scores are meaningless.
So the first documents are decoded and encoded again, and all counts are compared with the pieces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece as spm
from numpy.lib.stride_tricks import sliding_window_view

from data import caseops, fuse, shards
from data.shards import BOS_ID, ByteTable

CHECKED_DOCUMENTS = 1000
CHECKED_TOKENS = 2_000_000  # at most, which takes about a second
CUT_TOKENS = 4  # ignored at each end of a document: where it was cut, ids need not come back
NEIGHBORS = 4  # on each side: with the wrong tokenizer many single ids come back, but hardly any in a row
LEAST_SHARE = 0.95  # of the ids must come back; with the right tokenizer nearly all do
LEAST_SPELLED = 0.5  # of the pieces must have as many bytes in the sidecar as they spell


def content_problems(directory: Path, manifest: dict[str, Any]) -> list[str]:
    """What is wrong with a dataset whose files match its manifest; empty if nothing is."""
    path = shards.tokenizer_path(directory, manifest)
    tokenizer = shards.load_tokenizer(path)
    files = manifest["files"]
    problems = [f"{path}: {fault}" for fault in [shards.unfit(tokenizer)] if fault]
    for name in files:
        if "_val_bytes_" not in name and (problem := foreign_id(directory / name, tokenizer.vocab_size())):
            problems.append(problem)
    val = [directory / name for name in shards.names_of_kind(files, "val")]
    if problems or not val:
        return problems

    # Undo fused pairs, to compare with the tokenizer's own output.
    pairs = fuse.pairs_of(manifest)
    fused_tokens = np.concatenate([shards.read_shard(shard) for shard in val])
    if not len(fused_tokens) or fused_tokens[0] != BOS_ID:
        return [f"{val[0]}: does not begin with BOS ({BOS_ID}), as validation must; export it again"]
    (tokens,) = fuse.separate(fused_tokens, pairs)
    share = share_that_comes_back(tokenizer, tokens)
    if share < LEAST_SHARE:
        problems.append(f"{path}: only {share:.1%} of validation tokens come back when they are decoded and "
                        f"encoded, expected {LEAST_SHARE:.0%}; it is not the tokenizer that made the shards "
                        f"of {directory}")
    sidecars = [directory / name for name in shards.names_of_kind(files, "val_bytes")]
    if sidecars:
        counts = np.concatenate([shards.read_shard(sidecar) for sidecar in sidecars])
        # The tool that wrote them had the text itself, and recorded the number of bytes it counted.
        noted = manifest["splits"]["val"].get("audit", {}).get("sidecar_bytes")
        total = int(counts.sum(dtype=np.int64))
        if total != noted:
            problems.append(f"{directory}: fineweb_val_bytes_*.bin sum to {total} bytes of text, "
                            f"the manifest says {noted}")
        if pairs and len(counts) == len(fused_tokens):
            _, counts = fuse.separate(fused_tokens, pairs, counts)
        problems += sidecar_problems(directory, tokens, counts, tokenizer)
    elif caseops.form_of(tokenizer) is not None:
        problems.append(f"{directory}: the tokenizer has CaseOps marks, which are not text, but "
                        "there is no fineweb_val_bytes_*.bin to count bytes")
    else:
        problems += text_problems(directory, manifest, tokens, tokenizer)
    return problems


def text_problems(
    directory: Path, manifest: dict[str, Any], tokens: np.ndarray, tokenizer: spm.SentencePieceProcessor
) -> list[str]:
    """Why the bytes of validation data without a sidecar are not those of its pieces; empty if they are."""
    unknown = np.flatnonzero(tokens == tokenizer.unk_id())
    if len(unknown):
        return [f"{directory}: validation token {unknown[0]} is a character that the tokenizer has no piece "
                "for, so its bytes are unknown; export with a tokenizer that has byte fallback"]
    total = ByteTable.from_sentencepiece(tokenizer).total(tokens)
    noted = manifest["splits"]["val"].get("audit", {}).get("decoded_bytes", total)
    if total != noted:
        return [f"{directory}: validation has {total} bytes of text by its pieces, the manifest says {noted}"]
    if not total:
        return [f"{directory}: validation has no bytes to score; export other documents"]
    return []


def foreign_id(path: Path, vocab_size: int) -> str:
    """The first id of a shard that the tokenizer does not have; empty if there is none."""
    tokens = shards.read_shard(path)
    if not len(tokens) or int(tokens.max()) < vocab_size:
        return ""
    at = int(np.argmax(tokens >= vocab_size))
    return f"{path}: token {at} has id {tokens[at]}, the tokenizer has {vocab_size} pieces"


def share_that_comes_back(tokenizer: spm.SentencePieceProcessor, tokens: np.ndarray) -> float:
    """Share of the ids of the first documents that are the same when decoded and encoded again.

    An id comes back if it and its neighbors have the same byte offset in their document, counted from the
    start or from the end, so one odd spot does not make the whole document differ.
    """
    table = ByteTable.from_sentencepiece(tokenizer)
    begins = np.flatnonzero(tokens == BOS_ID)[: CHECKED_DOCUMENTS + 1]
    end = begins[-1] if len(begins) > CHECKED_DOCUMENTS else len(tokens)
    split = np.split(tokens[: min(end, CHECKED_TOKENS)], begins)[1:]
    documents = [without_cut_ends(ids[1:], tokenizer) for ids in split]
    texts = tokenizer.decode([ids.tolist() for ids in documents])
    same = 0
    asked = 0
    for ids, again in zip(documents, tokenizer.encode(texts), strict=True):
        from_begin, from_end = places(ids, table)
        begin_again, end_again = places(np.array(again, dtype=shards.TOKEN_DTYPE), table)
        comes_back = np.isin(from_begin, begin_again) | np.isin(from_end, end_again)
        inner = comes_back[CUT_TOKENS:-CUT_TOKENS]
        if len(inner) > 2 * NEIGHBORS:
            in_a_row = np.asarray(sliding_window_view(inner, 2 * NEIGHBORS + 1).all(axis=1))
            same += int(in_a_row.sum())
            asked += len(in_a_row)
    return same / asked if asked else 1.0


def without_cut_ends(ids: np.ndarray, tokenizer: spm.SentencePieceProcessor) -> np.ndarray:
    """The ids without incomplete characters at either end, and without a final space, which encoders drop."""
    space = tokenizer.piece_to_id(shards.SPACE_PIECE)
    first = 0
    # The bytes <0x80> to <0xBF> never start a UTF-8 character.
    while (first < len(ids) and tokenizer.is_byte(int(ids[first]))
           and tokenizer.id_to_piece(int(ids[first]))[3] in "89AB"):
        first += 1
    stop = len(ids)
    while stop > first and (ids[stop - 1] == space or tokenizer.is_byte(int(ids[stop - 1]))):
        stop -= 1
    return ids[first:stop]


def places(ids: np.ndarray, table: ByteTable) -> tuple[np.ndarray, np.ndarray]:
    """Each id that is text and its byte offset as one number; counted from the start, and from the end."""
    ids = ids[table.is_text[ids]].astype(np.int64)
    lengths = table.piece_bytes[ids] + table.leading_space[ids]
    begins = np.cumsum(lengths) - lengths
    return begins << 16 | ids, begins - lengths.sum() << 16 | ids


def sidecar_problems(
    directory: Path, tokens: np.ndarray, counts: np.ndarray, tokenizer: spm.SentencePieceProcessor
) -> list[str]:
    """Why these byte counts cannot belong to these tokens, both (tokens,); empty if they can."""
    here = f"{directory}: by fineweb_val_bytes_*.bin"
    if len(counts) != len(tokens):
        return [f"{here} there are {len(counts)} counts for {len(tokens)} validation tokens"]

    # BOS and marks are not text, so they have no bytes. An escaped mark is text.
    is_mark = np.zeros(tokenizer.vocab_size(), bool)
    fused = caseops.form_of(tokenizer)
    no_text = tokens == BOS_ID
    if fused is not None:
        marks = caseops.marks_of(fused)
        is_mark[caseops.FIRST_MARK_ID : caseops.FIRST_MARK_ID + len(marks)] = True
        escaped = np.zeros(len(tokens), bool)
        escaped[1:] = tokens[:-1] == caseops.FIRST_MARK_ID + marks.index(caseops.ESCAPE)
        no_text |= is_mark[tokens] & ~escaped
    problems = []
    wrong = np.flatnonzero(no_text & (counts > 0))
    if len(wrong):
        at = int(wrong[0])
        problems.append(f"{here} validation token {at}, id {tokens[at]}, has {counts[at]} bytes, "
                        "expected 0: BOS and the marks of CaseOps are not text")

    # A document with text has bytes. The last one may be cut anywhere.
    begins = np.flatnonzero(tokens == BOS_ID)
    if len(begins) > 1:
        bytes_of_documents = np.add.reduceat(counts.astype(np.int64), begins)[:-1]
        lengths = np.diff(begins)
        empty = np.flatnonzero((bytes_of_documents == 0) & (lengths > 2))
        if len(empty):
            number = int(empty[0])
            problems.append(f"{here} validation document {number} has {lengths[number]} tokens and no bytes")

    # Normalization changes some characters, but most pieces have exactly the bytes they spell. Pieces of one
    # byte are left out: several of them may make up a character, which counts at the last one.
    table = ByteTable.from_sentencepiece(tokenizer)
    expected = table.piece_bytes + table.leading_space
    is_asked = ((expected > 1) & ~is_mark)[tokens]
    share = float(np.mean((counts == expected[tokens])[is_asked])) if is_asked.any() else 1.0
    if share < LEAST_SPELLED:
        problems.append(f"{here} only {share:.0%} of the validation tokens have the bytes that their pieces "
                        "spell")
    return problems
