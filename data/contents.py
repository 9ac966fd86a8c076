"""Whether ids, tokenizer and byte counts of a dataset belong together, which no hash shows.

Two tokenizers may well have as many pieces, and a byte sidecar may be of other tokens. A score of such data
means nothing. So some text is decoded and encoded again, and all counts are held against the pieces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece as spm

from data import caseops, fuse, shards
from data.shards import BOS_ID, ByteTable

SAMPLE_TOKENS = 20_000  # tens of documents, a few milliseconds
LEAST_SHARE = 0.5  # of a sound dataset nearly all comes back or is equal, of another one hardly any


def content_problems(directory: Path, manifest: dict[str, Any]) -> list[str]:
    """The faults of a dataset whose files are those of its manifest; empty when sound."""
    path = (directory / manifest["tokenizer"]["file"]).resolve()
    tokenizer = shards.load_tokenizer(path)
    files = manifest["files"]
    problems = []
    for name in files:
        if "_val_bytes_" not in name and (problem := foreign_id(directory / name, tokenizer.vocab_size())):
            problems.append(problem)
    val = [directory / name for name in files if "fineweb_val_" in name and "_val_bytes_" not in name]
    if problems or not val:
        return problems

    # What the tokenizer would write has no fused pairs.
    pairs = fuse.pairs_of(manifest)
    fused_tokens = np.concatenate([shards.read_shard(shard) for shard in val])
    (tokens,) = fuse.separate(fused_tokens, pairs)
    share = share_that_comes_back(tokenizer, tokens[:SAMPLE_TOKENS])
    if share < LEAST_SHARE:
        problems.append(f"{path}: only {share:.0%} of validation tokens come back when they are decoded and "
                        f"encoded; it is not the tokenizer that made the shards of {directory}")
    sidecars = [directory / name for name in files if "_val_bytes_" in name]
    if sidecars:
        counts = np.concatenate([shards.read_shard(sidecar) for sidecar in sidecars])
        # The tool that made them had the text itself, and noted how many bytes of it are counted.
        noted = manifest["splits"]["val"].get("audit", {}).get("sidecar_bytes")
        total = int(counts.sum(dtype=np.int64))
        if total != noted:
            problems.append(f"{directory}: fineweb_val_bytes_*.bin sum to {total} bytes of text, "
                            f"the manifest says {noted}")
        if pairs and len(counts) == len(fused_tokens):
            _, counts = fuse.separate(fused_tokens, pairs, counts)
        problems += sidecar_problems(directory, tokens, counts, tokenizer)
    elif caseops.form_of(tokenizer) is not None:
        problems.append(f"{directory}: the tokenizer has CaseOps marks, which are no text, and no "
                        "fineweb_val_bytes_*.bin counts without them")
    return problems


def foreign_id(path: Path, vocab_size: int) -> str:
    """The first id of a shard that the tokenizer does not have; empty when there is none."""
    tokens = shards.read_shard(path)
    if not len(tokens) or int(tokens.max()) < vocab_size:
        return ""
    at = int(np.argmax(tokens >= vocab_size))
    return f"{path}: token {at} has id {tokens[at]}, the tokenizer has {vocab_size} pieces"


def share_that_comes_back(tokenizer: spm.SentencePieceProcessor, tokens: np.ndarray) -> float:
    """Share of ids that are the same, from either end of their document, when decoded and encoded again."""
    documents = np.split(tokens, np.flatnonzero(tokens == BOS_ID))[1:]
    if len(documents) > 1:
        documents = documents[:-1]  # the last one may be cut anywhere
    same = 0
    total = 0
    for document in documents:
        ids = document[1:].tolist()
        again = tokenizer.encode(tokenizer.decode(ids))
        # One odd place in a long text must not count as a whole text that differs: both ends are compared.
        ahead = equal_from_the_start(ids, again)
        behind = equal_from_the_start(ids[ahead:][::-1], again[ahead:][::-1])
        same += ahead + behind
        total += len(ids)
    return same / total if total else 1.0


def equal_from_the_start(one: list[int], other: list[int]) -> int:
    """How many items of two lists are equal before the first that differs."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def sidecar_problems(
    directory: Path, tokens: np.ndarray, counts: np.ndarray, tokenizer: spm.SentencePieceProcessor
) -> list[str]:
    """Why byte counts cannot be those of these tokens; both of shape (tokens,). Empty when they can be."""
    here = f"{directory}: by fineweb_val_bytes_*.bin"
    if len(counts) != len(tokens):
        return [f"{here} there are {len(counts)} counts for {len(tokens)} validation tokens"]

    # Each byte counts once: none where there is no text. An escaped mark is text.
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
        problems.append(f"{here} validation token {at}, id {tokens[at]}, stands for {counts[at]} bytes, "
                        "expected 0: BOS and the marks of CaseOps are no text")

    # No document with text is without bytes; the last one may be cut anywhere.
    begins = np.flatnonzero(tokens == BOS_ID)
    if len(begins) > 1:
        bytes_of_documents = np.add.reduceat(counts.astype(np.int64), begins)[:-1]
        lengths = np.diff(begins)
        empty = np.flatnonzero((bytes_of_documents == 0) & (lengths > 2))
        if len(empty):
            number = int(empty[0])
            problems.append(f"{here} validation document {number} has {lengths[number]} tokens and no bytes")

    # Normalising changes characters here and there; most pieces stand for as many bytes as they have. Pieces
    # of one byte are left out: several of them may make a character, which counts at the last.
    table = ByteTable.from_sentencepiece(tokenizer)
    expected = table.piece_bytes + table.leading_space
    is_asked = ((expected > 1) & ~is_mark)[tokens]
    share = float(np.mean((counts == expected[tokens])[is_asked])) if is_asked.any() else 1.0
    if share < LEAST_SHARE:
        problems.append(f"{here} only {share:.0%} of validation tokens stand for as many bytes as their "
                        "pieces have")
    return problems
