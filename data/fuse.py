"""Rewrite a CaseOps dataset with a space and a case mark behind it as one token; nothing is downloaded.

    python data/fuse.py data/datasets/NAME        # writes data/datasets/NAME_fused

A capital word behind a space has three tokens in the published form: the lone space, the mark, the word.
PR #2109 makes the first two one token; PR #2158 reports -1.1 mBPB for it on #2135. The new tokens have the
ids of pieces that the data never hold, the first byte pieces. The tokenizer stays, and the manifest says
which id stands for which two. Byte counts are summed, so bits per byte count the same bytes.

`separate` gives the old tokens back exactly. A pair whose halves lie in two shards stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data import caseops, shards
from data.files import (
    DataError,
    bytes_bar,
    escape_unprintable,
    exclusive,
    read_json,
    sha256_file,
    write_bytes,
)

SUFFIX = "_fused"
LOCK_NAME = ".fuse.lock"
JOURNAL_NAME = "fuse.json"  # of which dataset the shards are that stand there; removed when all are
FUSED_MARKS = (caseops.TITLE, caseops.CAPS)  # those that can follow a space

Pairs = dict[int, tuple[int, int]]  # the new id of each pair


def choose_pairs(directory: Path, manifest: Mapping[str, Any]) -> Pairs:
    """The pairs of a dataset and the ids that stand for them. DataError for a tokenizer without them."""
    path = shards.tokenizer_path(directory, manifest)
    tokenizer = shards.load_tokenizer(path)
    if caseops.form_of(tokenizer) is not False or manifest.get("fused"):
        raise DataError(f"{directory}: its marks are fused already, or it has none; expected CaseOps data as "
                        "`data/fineweb.py --variant caseops` fetches")
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


# ======================================================================================================
# A DATASET
# ======================================================================================================


def fuse_dataset(
    source: Path, out: Path, on_bytes: Callable[[int], object] | None = None
) -> dict[str, Any]:
    """Write the dataset `out` from `source`, or its missing part; returns its manifest. DataError.

    on_bytes gets the size of each shard that is done.
    """
    manifest = shards.read_manifest(source)
    pairs = choose_pairs(source, manifest)
    origin = {"name": manifest.get("name", source.name),
              "manifest_sha256": sha256_file(source / shards.MANIFEST_NAME)}
    if (out / shards.MANIFEST_NAME).exists():
        finished = shards.read_manifest(out)
        if finished.get("fused_from") == origin:
            return finished
        raise DataError(f"{out}: holds a finished dataset of another source; give another --out")
    begin_or_resume(out, origin)
    files = {}
    for name, entry in manifest["files"].items():
        if "_val_bytes_" in name:
            continue
        sidecar = name.replace("_val_", "_val_bytes_")
        names = [name, sidecar] if sidecar != name and sidecar in manifest["files"] else [name]
        if not all((out / made).exists() for made in names):
            fuse_files(source, out, {made: manifest["files"][made] for made in names}, pairs)
        for made in names:
            files[made] = shards.file_entry(out / made, entry["split"], tuple(entry["documents"]))
        if on_bytes is not None:
            on_bytes(entry["bytes"])
    tokenizer_path = shards.tokenizer_path(source, manifest)
    new = {**manifest, "name": out.name, "files": dict(sorted(files.items())), "fused_from": origin}
    from_out = Path(os.path.relpath(tokenizer_path, out)).as_posix()
    new["tokenizer"] = {**manifest["tokenizer"], "file": from_out}
    new["fused"] = {str(unused): list(pair) for unused, pair in pairs.items()}
    shards.write_manifest(out, new)
    (out / JOURNAL_NAME).unlink(missing_ok=True)
    return new


def begin_or_resume(out: Path, origin: dict[str, str]) -> None:
    """Note the source of the shards. DataError if existing shards have another one."""
    journal = out / JOURNAL_NAME
    if read_json(journal) not in (None, origin):
        raise DataError(f"{journal}: holds shards of another source; give another --out")
    if not journal.exists() and any(out.glob("*.bin")):
        raise DataError(f"{out}: holds shards that this tool did not begin; give another --out")
    write_bytes(journal, json.dumps(origin).encode())


def fuse_files(source: Path, out: Path, entries: Mapping[str, Any], pairs: Pairs) -> None:
    """Write a shard and, if `entries` has one, the sidecar behind it. Each file is whole or absent."""
    for name, entry in entries.items():
        if problem := shards.verify_file(source / name, entry):
            raise DataError(f"{problem}; fetch it again")
    old = [shards.read_shard(source / name) for name in entries]
    try:
        new = fuse(old[0], pairs, *old[1:])
    except ValueError as error:
        raise DataError(f"{source / next(iter(entries))}: {error}; this data cannot be fused") from error
    back = separate(new[0], pairs, *new[1:])
    if not all(np.array_equal(one, other) for one, other in zip(back, old, strict=True)):
        raise DataError(f"{source / next(iter(entries))}: its fused form does not give it back, since a mark "
                        "counts bytes; `data/fineweb.py --verify` checks the sidecar")
    for name, values in zip(entries, new, strict=True):
        shards.write_shard(out / name, values)


def tokens_in(files: Mapping[str, Any]) -> int:
    """Tokens of all shards of a manifest; sidecars hold none."""
    return sum(entry["tokens"] for name, entry in files.items() if "_val_bytes_" not in name)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    form = argparse.RawDescriptionHelpFormatter
    command = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    command.add_argument("dataset", type=Path, help="folder of a finished CaseOps dataset")
    command.add_argument("--out", type=Path, help=f"folder to write (default: DATASET{SUFFIX})")
    escape_unprintable()
    options = command.parse_args(arguments)
    source = options.dataset.resolve()
    out = (options.out or source.with_name(source.name + SUFFIX)).resolve()
    try:
        before = shards.read_manifest(source)["files"]
        shards_bytes = sum(entry["bytes"] for name, entry in before.items() if "_val_bytes_" not in name)
        out.mkdir(parents=True, exist_ok=True)
        with exclusive(out / LOCK_NAME), bytes_bar("fuse", shards_bytes) as bar:
            after = fuse_dataset(source, out, bar.update)["files"]
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted. Finished work is kept: run the same command again", file=sys.stderr)
        return 130
    old = tokens_in(before)
    new = tokens_in(after)
    fewer = 1 - new / old if old else 0.0
    print(f"{out}: {old:,} tokens became {new:,}, {fewer:.1%} fewer\n"
          f"train with it: DATA_PATH={shlex.quote(str(out))} python train_gpt.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
