"""Rewrite CaseOps shards so that a space and the case mark after it are one token.

A capitalized word after a space has three tokens in the published form: the lone space, the mark, the word.
PR #2109 makes the first two one token; PR #2158 reports -1.1 mBPB for it on #2135. The new tokens have the
ids of pieces that the data never uses, the first byte pieces. The tokenizer stays, and the manifest says
which id stands for which two. Byte counts are summed, so bits per byte count the same bytes.

`python data/fineweb.py --variant caseops` does it to each shard that it fetches. `separate` gives the old
tokens back exactly. A pair split between two shards stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data import caseops, shards
from data.files import DataError

SUFFIX = "_fused"  # of the name of a dataset
FUSED_MARKS = (caseops.TITLE, caseops.CAPS)  # those that can follow a space

Pairs = dict[int, tuple[int, int]]  # the new id of each pair


def choose_pairs(path: Path) -> Pairs:
    """The pairs of a tokenizer and the ids that stand for them. DataError for a tokenizer without them."""
    tokenizer = shards.load_tokenizer(path)
    if caseops.form_of(tokenizer) is not False:
        raise DataError(f"{path}: its marks are fused already, or it has none; expected the tokenizer of "
                        "published CaseOps data")
    space = tokenizer.piece_to_id(shards.SPACE_PIECE)
    pairs = {}
    for number, mark in enumerate(FUSED_MARKS):
        unused = tokenizer.piece_to_id(f"<0x{number:02X}>")
        if tokenizer.unk_id() in (space, unused):
            raise DataError(f"{path}: no piece for a space alone, or no byte pieces; fuse needs both")
        pairs[unused] = (space, tokenizer.piece_to_id(mark))
    return pairs


def fuse(
    tokens: np.ndarray, pairs: Mapping[int, tuple[int, int]], counts: np.ndarray | None = None
) -> list[np.ndarray]:
    """Tokens with each pair as one and, where there are byte counts, their sums; all uint16, (tokens,).

    ValueError if the id that is to stand for a pair is in use.
    """
    new = np.array(tokens)
    sums = None if counts is None else np.array(counts)
    is_kept = np.ones(len(new), bool)
    for unused, (first, second) in pairs.items():
        in_use = np.flatnonzero(tokens == unused)
        if len(in_use):
            raise ValueError(f"token {in_use[0]} has id {unused}, which is to stand for a pair")
        begins = np.flatnonzero((tokens[:-1] == first) & (tokens[1:] == second))
        new[begins] = unused
        is_kept[begins + 1] = False
        if sums is not None:
            sums[begins] += sums[begins + 1]
    return [new[is_kept]] if sums is None else [new[is_kept], sums[is_kept]]


def separate(
    tokens: np.ndarray, pairs: Mapping[int, tuple[int, int]], counts: np.ndarray | None = None
) -> list[np.ndarray]:
    """The inverse of `fuse`. All bytes of a pair are its first half's: a mark has none."""
    first = np.arange(shards.MAX_VOCAB_SIZE, dtype=shards.TOKEN_DTYPE)
    second = first.copy()
    for unused, pair in pairs.items():
        first[unused], second[unused] = pair
    at = np.flatnonzero(np.isin(tokens, list(pairs)))
    old = np.insert(first[tokens], at + 1, second[tokens[at]])
    return [old] if counts is None else [old, np.insert(counts, at + 1, 0)]


def pairs_of(manifest: Mapping[str, Any]) -> Pairs:
    """The pairs that a manifest says are fused; none for other data."""
    fused = manifest.get("fused", {})
    return {int(unused): (int(first), int(second)) for unused, (first, second) in fused.items()}


def fuse_files(paths: Sequence[Path], pairs: Pairs) -> None:
    """Rewrite a shard and, if it is given, the byte sidecar behind it. Each file is old or new as a whole."""
    old = [shards.read_shard(path) for path in paths]
    if len(old[-1]) != len(old[0]):
        raise DataError(f"{paths[-1]}: {len(old[-1])} byte counts, not one for each of {len(old[0])} tokens; "
                        "the repository is not in the challenge's format")
    try:
        new = fuse(old[0], pairs, *old[1:])
    except ValueError as error:
        raise DataError(f"{paths[0]}: {error}; this data cannot be fused") from error
    back = separate(new[0], pairs, *new[1:])
    if not all(np.array_equal(one, other) for one, other in zip(back, old, strict=True)):
        raise DataError(f"{paths[-1]}: its fused form does not give it back, since a mark counts bytes; this "
                        "data cannot be fused")
    for path, values in zip(paths, new, strict=True):
        shards.write_shard(path, values)
