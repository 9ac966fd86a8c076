"""A4, C1 of folders that `pack` wrote: scores are summed again, from the nats of each document."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data import shards
from data.files import DataError, sha256_file
from tools.runs.derive import Evidence, audited_bytes, is_limited, mapping, nested, validation_set
from tools.runs.folder import MANIFEST, NATS_NAME, Folder
from tools.runs.logs import decimals, exact
from tools.runs.rules import OFFICIAL, bits_per_byte
from tools.submit.findings import Finding, fail, warn
from tools.submit.pack import find
from tools.submit.packed import evidence_of
from tools.submit.scores import official_set

NATS_BYTES_MAX = 64 * 2**20
DATA_BYTES_MAX = 128 * 2**20  # of shards and tokenizer; the challenge's text has 124 MB in 1,024 pieces
REMEDY = "ship the files that the run wrote"


def check_nats(folder: Folder) -> Iterator[Finding]:
    """A4: the nats of all documents make the loss of the log and, over the bytes of the text, its score."""
    text_bytes = TextBytes(folder)
    missing = []
    documents: dict[int, str] = {}  # their number, and the file that has it
    for evidence in evidence_of(folder):
        known = _official_documents(evidence)
        for label in mapping(evidence.summary, "losses"):
            name = NATS_NAME.format(label=f"{label}_seed{evidence.seed}")
            if not folder.has(name):
                missing.append(name)
                continue
            try:
                nats = read_nats(folder.file(name))
            except ValueError as error:
                yield fail("A4", f"{name} {error}", name, REMEDY)
                continue
            documents.setdefault(len(nats), name)
            if known not in (None, len(nats)):
                text = f"{name} has {len(nats):,} documents, but that validation set has {known:,}"
                yield fail("C1", text, name, REMEDY)
            yield from _check_sum(evidence, label, name, math.fsum(nats), text_bytes.of(evidence))
    if len(documents) > 1:
        shown = ", ".join(f"{count:,} documents in {name}" for count, name in sorted(documents.items()))
        yield fail("C1", f"{shown}: the same text has one number", folder.name, REMEDY)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        text = f"no `{missing[0]}`{more}: its score cannot be added up again"
        yield warn("A4", text, folder.name, "pack the run directories with their nats_*.bin")


def read_nats(path: Path) -> np.ndarray:
    """Nats of each document, float64. ValueError, in words, where a file holds none."""
    size = path.stat().st_size
    if size == 0 or size % 8 or size > NATS_BYTES_MAX:
        raise ValueError(f"has {size:,} bytes: expected 8 for each document")
    nats = np.fromfile(path, "<f8")
    wrong = ~(np.isfinite(nats) & (nats >= 0))
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(
            f"has {nats[place]} nats for document {place}, and {wrong.sum():,} such values in all"
        )
    return nats


def _check_sum(
    evidence: Evidence, label: str, name: str, total: float, text_bytes: tuple[int, str] | None
) -> Iterator[Finding]:
    """The exact line of a score against the sum of its nats."""
    log = evidence.log
    line = exact([final for final in log.finals if label in final.label])
    tokens = line.scored_tokens if line is not None else None
    if line is None or not tokens:
        text = f"no line of the log has the token count of `{label}`, which {name} belongs to"
        yield fail("A4", text, name, REMEDY)
        return
    where = log.where(line.line)
    loader = log.validation_tokens
    if loader is not None and loader.integer != tokens:
        text = f"`{line.label}` has {tokens:,} scored tokens, but the loader read {loader.value}"
        yield fail("C1", text, where, REMEDY)
    sums = [("val_loss", total / tokens, line.loss_text, f"{tokens:,} tokens")]
    if text_bytes is not None:
        count, source = text_bytes
        bpb = bits_per_byte(total / tokens, tokens, count)
        sums.append(("val_bpb", bpb, line.bpb_text, f"{count:,} bytes ({source})"))
    for key, summed, printed, over in sums:
        if not abs(summed - float(printed)) <= 10.0 ** -decimals(printed):
            text = (
                f"`{line.label}` {key} is {printed}; {name} has {total:,.4f} nats, over {over} {summed:.8f}"
            )
            yield fail("A4", text, where, REMEDY)


def _official_documents(evidence: Evidence) -> int | None:
    """Documents of the official set that a run names, if it scored all of it."""
    said = validation_set(evidence.summary, evidence.log)
    known = official_set(said) if said.startswith(OFFICIAL) else None
    if known is None or is_limited(evidence.summary):
        return None
    count = known.get("documents")
    return count if isinstance(count, int) else None


class TextBytes:
    """Bytes of the text that the runs of a folder scored: its maker audited them, or the data have them."""

    def __init__(self, folder: Folder) -> None:
        self.audited = audited_bytes(folder.file(MANIFEST)) if folder.has(MANIFEST) else None
        self.counted: dict[tuple[str, ...], int | None] = {}  # by what names the text

    def of(self, evidence: Evidence) -> tuple[int, str] | None:
        """The bytes, and who counted them. None where nobody has, and the data are not here."""
        if isinstance(self.audited, int) and self.audited > 0 and not is_limited(evidence.summary):
            return self.audited, MANIFEST
        settings = mapping(evidence.summary, "config")
        key = tuple(str(settings.get(name)) for name in ("DATA_PATH", "TOKENIZER_PATH", "VAL_TOKENS_LIMIT"))
        if key not in self.counted:
            self.counted[key] = None
            with contextlib.suppress(DataError, OSError, ValueError, MemoryError):
                self.counted[key] = count_bytes(evidence)
        count = self.counted[key]
        return (count, "counted in the data") if count else None


def count_bytes(evidence: Evidence) -> int | None:
    """Bytes of the validation text of a run, if its shards and its tokenizer are where it read them."""
    settings = mapping(evidence.summary, "config")
    directory = find(str(settings.get("DATA_PATH", "")))
    tokenizer = find(str(settings.get("TOKENIZER_PATH", "")))
    texts = sorted(directory.glob("fineweb_val_[0-9]*.bin"))
    sidecars = sorted(directory.glob("fineweb_val_bytes_[0-9]*.bin"))
    files = [*texts, *sidecars, tokenizer]
    sizes = [path.stat().st_size if path.is_file() else 0 for path in files]
    if not texts or not all(sizes) or sum(sizes) > DATA_BYTES_MAX:
        return None
    targets = nested(evidence.summary, "data", "val_tokens")
    tokens = np.concatenate([shards.read_shard(path) for path in texts])
    missing = len(tokens) - 1 - targets if isinstance(targets, int) else -1
    if missing < 0 or (missing and not is_limited(evidence.summary)):
        return None  # other data than the run's
    if sidecars:
        counts = np.concatenate([shards.read_shard(path) for path in sidecars])
        return int(counts[1 : targets + 1].sum(dtype=np.int64))
    if sha256_file(tokenizer) != nested(evidence.summary, "data", "hashes", "tokenizer"):
        return None
    table = shards.ByteTable.from_sentencepiece(shards.load_tokenizer(tokenizer))
    return table.total(tokens[: targets + 1])


RULES = (check_nats,)
