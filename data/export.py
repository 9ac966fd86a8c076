"""Your own documents as a dataset: train a tokenizer, write shards, prove every validation byte.

    python data/export.py --docs docs.jsonl --name my_sp8192 --train-tokenizer 8192
    python data/export.py --docs docs.jsonl --name my_caseops --train-tokenizer 8192 --variant caseops_fused
    python data/export.py --docs docs.jsonl --name my_sp1024 --tokenizer fineweb_1024_bpe.model

Validation is the first --val-docs documents by global index, whatever the number of processes, and the
manifest records both ranges. Killed and started again with the same command, it goes on where it was; the
files are the same bytes for every number of processes and however often it was interrupted.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import io
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import sentencepiece as spm

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data import caseops, documents, shards
from data.documents import Chunk, DocumentSource
from data.encoding import (
    CASEOPS_FUSED,
    PLAIN,
    VARIANTS,
    EncodedChunk,
    Encoder,
    EncodingSettings,
    available_cores,
    encoded_chunks,
)
from data.files import (
    DataError,
    bytes_bar,
    escape_unprintable,
    exclusive,
    explain_os_error,
    is_count,
    is_range,
    read_json,
    sha256_file,
    size,
    write_bytes,
)

OFFICIAL_VAL_DOCUMENTS = 50_000
OFFICIAL_SHARD_TOKENS = 100_000_000
OFFICIAL_SENTENCE_BYTES = 4192  # SentencePiece's default, in the official tokenizers too
UNLIMITED_SENTENCE_BYTES = 1 << 30
TOKENIZER_DOCUMENTS = 200_000
JOURNAL_NAME = ".export.json"
LOCK_NAME = ".export.lock"
CHUNKS_PER_JOURNAL = 16
COPY_BYTES = 1 << 20


# ======================================================================================================
# TOKENIZER
# ======================================================================================================


@dataclass(frozen=True)
class TokenizerRecipe:
    """How a tokenizer is trained; `official`: the length limit of the challenge's own exporter."""

    source: DocumentSource
    vocab_size: int
    variant: str
    official: bool
    first_document: int
    documents: int

    def identity(self) -> dict[str, Any]:
        """All that decides the tokenizer, as plain JSON values."""
        values = {**asdict(self), "source": source_identity(self.source), "sentencepiece": spm.__version__}
        variant = values.pop("variant")
        values["caseops"] = variant != PLAIN  # as records say it since before there were two forms
        if variant == CASEOPS_FUSED:
            values["fused"] = True
        return dict(json.loads(json.dumps(values)))

    def coded(self, text: str) -> str:
        """The text that the tokenizer is to see."""
        return text if self.variant == PLAIN else caseops.encode(text, self.variant == CASEOPS_FUSED)

    def marks(self) -> tuple[str, ...]:
        """Pieces that must be in the vocabulary, whole and alone."""
        return () if self.variant == PLAIN else caseops.marks_of(self.variant == CASEOPS_FUSED)

    def texts(self, skipped: collections.Counter[str]) -> Iterator[str]:
        """Training texts; counts in `skipped` those that the length limit makes SentencePiece drop."""
        stop = self.first_document + self.documents
        for chunk in self.source.chunks():
            if chunk.document >= stop:
                return
            if chunk.document + chunk.document_count <= self.first_document:
                continue
            for index, text in enumerate(self.source.read(chunk), chunk.document):
                cleaned = text.replace("\0", " ").strip()
                if self.first_document <= index < stop and cleaned:
                    coded = self.coded(cleaned)
                    skipped["documents"] += 1
                    skipped["too_long"] += len(coded.encode()) > self.sentence_bytes()
                    yield coded

    def sentence_bytes(self) -> int:
        """Longest document that SentencePiece trains on."""
        return OFFICIAL_SENTENCE_BYTES if self.official else UNLIMITED_SENTENCE_BYTES


def train_tokenizer(recipe: TokenizerRecipe) -> tuple[bytes, collections.Counter[str]]:
    """Serialized SentencePiece BPE model with the challenge's settings, and the documents seen and dropped.

    Raises DataError where there is no text to train on or SentencePiece refuses (vocabulary too large, …).
    """
    counts: collections.Counter[str] = collections.Counter()
    failures: list[DataError] = []

    def sentences() -> Iterator[str]:
        try:
            yield from recipe.texts(counts)
        except DataError as error:  # SentencePiece would replace it with its own
            failures.append(error)

    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=sentences(), model_writer=model, minloglevel=2,
            model_type="bpe", vocab_size=recipe.vocab_size, hard_vocab_limit=False, character_coverage=0.999,
            byte_fallback=True, split_digits=True, add_dummy_prefix=False, normalization_rule_name="nmt_nfkc",
            max_sentence_length=recipe.sentence_bytes(),
            user_defined_symbols=list(recipe.marks()),
            pad_id=shards.PAD_ID, bos_id=shards.BOS_ID, eos_id=shards.EOS_ID, unk_id=shards.UNK_ID)
    except (RuntimeError, SystemError) as error:
        reason = failures[0] if failures else error
        raise DataError(
            f"no tokenizer of {recipe.vocab_size} pieces from {counts['documents']} documents "
            f"({', '.join(recipe.source.paths)}): {reason}; give more text, a smaller --train-tokenizer, or "
            f"a smaller --val-docs: the first {recipe.first_document:,} documents are validation, and a "
            "tokenizer trains on those after them") from error
    if failures:
        raise failures[0]
    found = spm.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size()
    if found != recipe.vocab_size:
        raise DataError(f"{', '.join(recipe.source.paths)}: {counts['documents']} documents yield {found} "
                        f"pieces, not {recipe.vocab_size}; give more text, or --train-tokenizer {found}")
    return model.getvalue(), counts


def make_tokenizer(path: Path, recipe: TokenizerRecipe) -> None:
    """Train the tokenizer of `recipe` into `path`; one made from the same recipe and files is left as it is.

    Raises DataError where `path` holds a tokenizer of another origin.
    """
    record_path = path.with_suffix(".json")
    identity = recipe.identity()
    if path.exists():
        record = read_json(record_path) or {}
        if record.get("recipe") != identity:
            raise DataError(f"{path}: exists and was not made by this command; give another --name, "
                            f"or use it with --tokenizer {path}")
        print(f"tokenizer {path}: already trained")
        return
    print(f"training a tokenizer of {recipe.vocab_size} pieces on up to {recipe.documents} documents "
          f"from document {recipe.first_document} on", flush=True)
    model, counts = train_tokenizer(recipe)
    made = {"recipe": identity, "sha256": hashlib.sha256(model).hexdigest(), **counts}
    write_bytes(record_path, (json.dumps(made, indent=2) + "\n").encode())
    write_bytes(path, model)
    print(f"tokenizer {path}: trained on {counts['documents'] - counts['too_long']} documents, "
          f"{counts['too_long']} longer than {recipe.sentence_bytes()} bytes left out")


def source_identity(source: DocumentSource) -> dict[str, Any]:
    """Identifies a source without reading it: names, sizes, and how documents are found."""
    files = [{"name": Path(path).name, "bytes": os.stat(path).st_size} for path in source.paths]
    return {"files": files, "text_key": source.text_key, "separator": source.separator}


# ======================================================================================================
# SHARDS
# ======================================================================================================


@dataclass
class StreamState:
    """The written part of a stream: entries of finished shards, tokens and documents of the open one."""

    split: str
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    open_tokens: int = 0
    open_documents: list[int] = field(default_factory=lambda: [0, 0])


class ShardStream:
    """Tokens cut into shards of `shard_tokens`, each written next to its place and moved when complete."""

    def __init__(self, directory: Path, stem: str, shard_tokens: int, state: StreamState) -> None:
        self.directory = directory
        self.stem = stem
        self.shard_tokens = shard_tokens
        self.state = state
        self.file: BinaryIO | None = None
        if state.open_tokens:
            self.reopen()

    def path(self) -> Path:
        """Name of the open shard."""
        return self.directory / f"{self.stem}_{len(self.state.finished):06d}.bin"

    def partial_path(self) -> Path:
        """Where the open shard is written until it is complete."""
        return self.path().with_name(f".{self.path().name}.partial")

    def reopen(self) -> None:
        """Undo what was written after the journal; the shard may even have been finished and moved."""
        if not self.partial_path().exists() and self.path().exists():
            os.replace(self.path(), self.partial_path())
        expected_bytes = shards.HEADER_BYTES + self.state.open_tokens * shards.TOKEN_DTYPE.itemsize
        try:
            self.file = open(self.partial_path(), "r+b")  # noqa: SIM115 - stays open between chunks
            found_bytes = self.file.seek(0, os.SEEK_END)
        except OSError as error:
            raise explain_os_error(error, self.partial_path()) from error
        if found_bytes < expected_bytes:
            raise DataError(f"{self.partial_path()}: {found_bytes} bytes, the journal says {expected_bytes}; "
                            f"delete {self.directory} and start again")
        self.file.truncate(expected_bytes)
        self.file.seek(expected_bytes)

    def append(self, values: np.ndarray, lengths: np.ndarray, first_document: int,
               max_shards: int | None) -> None:
        """Write `values` of documents with these token counts; ends early once `max_shards` are complete."""
        document_ends = np.cumsum(lengths)
        position = 0
        while position < len(values) and not self.full(max_shards):
            stop = min(position + self.shard_tokens - self.state.open_tokens, len(values))
            first, last = np.searchsorted(document_ends, [position, stop - 1], side="right")
            self.write(values[position:stop], first_document + int(first), first_document + int(last) + 1)
            position = stop
            if self.state.open_tokens == self.shard_tokens:
                self.finish_shard()

    def write(self, values: np.ndarray, first_document: int, stop_document: int) -> None:
        """Append to the open shard, opening it if need be."""
        try:
            if self.file is None:
                self.file = open(self.partial_path(), "wb")  # noqa: SIM115 - stays open between chunks
                self.file.write(shards.shard_header(0))
                self.state.open_documents[0] = first_document
            self.file.write(np.ascontiguousarray(values, dtype=shards.TOKEN_DTYPE).tobytes())
        except OSError as error:
            raise self.explain(error) from error
        self.state.open_documents[1] = stop_document
        self.state.open_tokens += len(values)

    def flush(self) -> None:
        """Bring everything written so far to the disk."""
        if self.file is not None:
            try:
                self.file.flush()
                os.fsync(self.file.fileno())
            except OSError as error:
                raise self.explain(error) from error

    def finish_shard(self) -> None:
        """Complete the open shard's header, move it to its name and note its manifest entry."""
        if self.file is None:
            return
        try:
            self.file.seek(0)
            self.file.write(shards.shard_header(self.state.open_tokens))
        except OSError as error:
            raise self.explain(error) from error
        self.flush()
        self.file.close()
        self.file = None
        path = self.path()
        os.replace(self.partial_path(), path)
        first, stop = self.state.open_documents
        self.state.finished[path.name] = shards.file_entry(path, self.state.split, (first, stop))
        self.state.open_tokens = 0

    def full(self, max_shards: int | None) -> bool:
        """Whether `max_shards` are complete."""
        return max_shards is not None and len(self.state.finished) >= max_shards

    def explain(self, error: OSError) -> DataError:
        """A failed write in words; journalled work is kept."""
        reason = explain_os_error(error, self.path())
        return DataError(f"{reason}. Finished work is kept: run the same command again afterwards")

    def close(self) -> None:
        """Close the open shard's file, unfinished."""
        if self.file is not None:
            self.file.close()
            self.file = None


# ======================================================================================================
# EXPORT
# ======================================================================================================


@dataclass(frozen=True)
class ExportPlan:
    """Everything that decides an export's bytes, its place, and its origin for the manifest."""

    encoding: EncodingSettings
    directory: Path
    name: str
    shard_tokens: int
    max_train_shards: int | None
    source_note: str | None
    revision: str | None

    def identity(self) -> dict[str, Any]:
        """The values that must agree for an export to be resumed, as plain JSON values."""
        return {
            "documents": source_identity(self.encoding.source),
            "chunk_bytes": documents.CHUNK_BYTES,
            "tokenizer_sha256": sha256_file(Path(self.encoding.tokenizer_path)),
            "variant": self.encoding.variant,
            "val_documents": self.encoding.val_documents,
            "shard_tokens": self.shard_tokens,
            "max_train_shards": self.max_train_shards,
        }


INPUT = "input"  # in the manifest: up to where the documents were read, and their hash
START = {"file": 0, "offset": 0, "document": 0}  # the place in the documents where an export begins


class Export:
    """One export under way: its streams, the place reached in the documents, and the audit so far."""

    def __init__(self, plan: ExportPlan, identity: dict[str, Any], journal: dict[str, Any]) -> None:
        self.plan = plan
        self.identity = identity
        self.next = journal.get("next", dict(START))
        self.audit = collections.Counter(journal.get("audit", {}))
        stems = {"train": "train", "val": "val"}
        if plan.encoding.variant != PLAIN:
            stems["val_bytes"] = "val"
        states = journal.get("streams", {})
        self.streams = {
            kind: ShardStream(plan.directory, f"fineweb_{kind}", plan.shard_tokens,
                              StreamState(**states[kind]) if kind in states else StreamState(split))
            for kind, split in stems.items()}

    def done(self) -> bool:
        """Whether validation is complete and no more training shards are wanted."""
        return (self.next["document"] >= self.plan.encoding.val_documents
                and self.streams["train"].full(self.plan.max_train_shards))

    def add(self, chunk: Chunk, encoded: EncodedChunk) -> None:
        """Write one chunk: its documents before `val_documents` to validation, the others to training."""
        val_count = min(max(self.plan.encoding.val_documents - chunk.document, 0), chunk.document_count)
        val_lengths, train_lengths = encoded.lengths[:val_count], encoded.lengths[val_count:]
        cut = int(val_lengths.sum())
        self.streams["val"].append(encoded.tokens[:cut], val_lengths, chunk.document, None)
        if "val_bytes" in self.streams:
            self.streams["val_bytes"].append(encoded.val_token_bytes, val_lengths, chunk.document, None)
        self.streams["train"].append(encoded.tokens[cut:], train_lengths, chunk.document + val_count,
                                     self.plan.max_train_shards)
        self.audit.update(encoded.audit)
        source = self.plan.encoding.source
        self.next = {"file": source.paths.index(chunk.path), "offset": chunk.offset + chunk.length_bytes,
                     "document": chunk.document + chunk.document_count}

    def write_journal(self) -> None:
        """Make all that was added so far survive a kill."""
        for stream in self.streams.values():
            stream.flush()
        journal = {
            "settings": self.identity,
            "next": self.next,
            "audit": self.audit,
            "streams": {kind: asdict(stream.state) for kind, stream in self.streams.items()},
        }
        write_bytes(self.plan.directory / JOURNAL_NAME, json.dumps(journal).encode())

    def done_bytes(self) -> int:
        """Bytes of the documents worked through."""
        paths = self.plan.encoding.source.paths
        return sum(os.stat(path).st_size for path in paths[:self.next["file"]]) + self.next["offset"]

    def expected_bytes(self) -> int:
        """Bytes of documents that the export will take; with limited shards, judged by the tokens so far."""
        total_bytes = self.plan.encoding.source.total_bytes()
        state = self.streams["train"].state
        written_tokens = sum(entry["tokens"] for entry in state.finished.values()) + state.open_tokens
        if self.plan.max_train_shards is None or not written_tokens:
            return total_bytes
        wanted_tokens = self.plan.max_train_shards * self.plan.shard_tokens
        return min(total_bytes, round(self.done_bytes() * wanted_tokens / written_tokens))

    def run(self, workers: int) -> None:
        """Encode from the place reached to the end, keeping the journal. Raises DataError."""
        source = self.plan.encoding.source
        bar = bytes_bar("export", self.expected_bytes(), self.done_bytes())
        chunks = source.chunks(self.next["file"], self.next["offset"], self.next["document"])
        results = encoded_chunks(self.plan.encoding, chunks, workers)
        try:
            for count, (chunk, encoded) in enumerate(results, 1):
                self.add(chunk, encoded)
                self.require_bytes()
                bar.total = self.expected_bytes()
                bar.set_postfix_str(self.note(), refresh=False)
                bar.update(self.done_bytes() - bar.n)
                if self.done():
                    break
                if count % CHUNKS_PER_JOURNAL == 0:
                    self.write_journal()
        finally:
            results.close()
            bar.close()

    def note(self) -> str:
        """Progress in shards, which is what --max-train-shards limits."""
        limit = "" if self.plan.max_train_shards is None else f" of {self.plan.max_train_shards}"
        train_shards = len(self.streams["train"].state.finished)
        return f"{self.next['document']:,} documents, {train_shards}{limit} train shards"

    def require_bytes(self) -> None:
        """Raise DataError where validation is complete and holds no text."""
        wanted = self.plan.encoding.val_documents
        if self.next["document"] >= wanted and not self.audit["decoded_bytes"]:
            paths = ", ".join(self.plan.encoding.source.paths)
            raise DataError(f"{paths}: no bytes to score: the first {wanted} documents are validation, and "
                            "decode to no text. Give other documents or a larger --val-docs, and delete "
                            f"{self.plan.directory}")

    def finish(self) -> dict[str, Any]:
        """Complete the last shards, write the manifest, return it. Raises DataError: too few documents."""
        wanted = self.plan.encoding.val_documents
        if self.next["document"] < wanted:
            paths = ", ".join(self.plan.encoding.source.paths)
            raise DataError(f"{paths}: {self.next['document']} documents, --val-docs needs {wanted} of them; "
                            "give more documents or a smaller --val-docs")
        self.require_bytes()
        for stream in self.streams.values():
            stream.finish_shard()
        manifest = self.manifest()
        shards.write_manifest(self.plan.directory, manifest)
        (self.plan.directory / JOURNAL_NAME).unlink(missing_ok=True)
        return manifest

    def manifest(self) -> dict[str, Any]:
        """The manifest of the finished export."""
        plan = self.plan
        tokenizer_path = Path(plan.encoding.tokenizer_path)
        files: dict[str, Any] = {}
        for stream in self.streams.values():
            files |= stream.state.finished
        train_entries = list(self.streams["train"].state.finished.values())
        val_documents = plan.encoding.val_documents
        train_stop = train_entries[-1]["documents"][1] if train_entries else val_documents
        digest = digest_of_input(plan.encoding.source, self.next)
        return {
            "version": shards.MANIFEST_VERSION,
            "name": plan.name,
            "source": plan.source_note or ", ".join(Path(path).name for path in plan.encoding.source.paths),
            "revision": plan.revision or f"sha256:{digest}",
            "tokenizer": {
                "file": Path(os.path.relpath(tokenizer_path, plan.directory)).as_posix(),
                "sha256": self.identity["tokenizer_sha256"],
                "vocab_size": shards.load_tokenizer(tokenizer_path).vocab_size(),
            },
            "splits": {"train": {"documents": [val_documents, train_stop]},
                       "val": {"documents": [0, val_documents], "audit": dict(self.audit)}},
            "files": dict(sorted(files.items())),
            "export": {**self.identity, INPUT: {"end": self.next, "sha256": digest}},
        }

    def close(self) -> None:
        """Close the files of unfinished shards."""
        for stream in self.streams.values():
            stream.close()


def export(plan: ExportPlan, workers: int) -> dict[str, Any]:
    """Make, resume or confirm the dataset of `plan`; returns its manifest. Raises DataError."""
    directory = plan.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, directory) from error
    with exclusive(directory / LOCK_NAME):
        identity = plan.identity()
        if (directory / shards.MANIFEST_NAME).exists():
            return confirm(directory, identity, plan.encoding.source)
        journal = read_json(directory / JOURNAL_NAME) or {}
        if journal:
            require_journal(directory / JOURNAL_NAME, journal)
            require_same(directory / JOURNAL_NAME, journal["settings"], identity)
        elif foreign := sorted(path.name for path in directory.glob("*.bin")):
            raise DataError(f"{directory}: holds {foreign[0]} and {len(foreign) - 1} more shard(s) but no "
                            "manifest; they are not overwritten: give another --name or move them away")
        run = Export(plan, identity, journal)
        try:
            run.write_journal()
            run.run(workers)
            return run.finish()
        finally:
            run.close()


def digest_of_input(source: DocumentSource, end: dict[str, int]) -> str:
    """SHA-256 of the bytes of the documents up to this place, over all files in order."""
    digest = hashlib.sha256()
    paths = source.paths[:end["file"] + 1]
    for index, path in enumerate(paths):
        left = end["offset"] if index == len(paths) - 1 else os.stat(path).st_size
        with open(path, "rb") as file:
            while left > 0 and (block := file.read(min(left, COPY_BYTES))):
                digest.update(block)
                left -= len(block)
    return digest.hexdigest()


def confirm(directory: Path, identity: dict[str, Any], source: DocumentSource) -> dict[str, Any]:
    """The manifest of a finished export, after checking that it is this one and sound."""
    manifest = shards.read_manifest(directory)
    stored = manifest.get("export", {})
    require_same(directory / shards.MANIFEST_NAME, stored, identity)
    if was_edited(source, stored.get(INPUT)):
        raise DataError(f"{directory}: was made of other documents: {', '.join(source.paths)} changed since; "
                        f"give another --name, or delete {directory}")
    if problems := shards.verify_dataset(directory):
        raise DataError("\n  ".join([f"{directory}: damaged since; delete it and start again", *problems]))
    (directory / JOURNAL_NAME).unlink(missing_ok=True)
    return manifest


def was_edited(source: DocumentSource, read: Any) -> bool:
    """Whether documents of the same names and sizes have other bytes than an export has read.

    read: what its manifest says of that; older manifests say nothing.
    """
    end = read.get("end") if isinstance(read, dict) else None
    if not isinstance(end, dict) or not all(is_count(end.get(key)) for key in START):
        return False
    return digest_of_input(source, end) != read.get("sha256")


def require_journal(path: Path, journal: dict[str, Any]) -> None:
    """Raise DataError where a journal holds what `Export.write_journal` does not write."""
    places = journal.get("next")
    streams = journal.get("streams")
    wrong = [name for name in ("settings", "audit") if not isinstance(journal.get(name), dict)]
    if not isinstance(places, dict) or not all(is_count(places.get(key)) for key in START):
        wrong.append("next")
    if not isinstance(streams, dict) or not all(is_stream_state(state) for state in streams.values()):
        wrong.append("streams")
    if not wrong and not shards.is_audit(journal["audit"]):
        wrong.append("audit")
    if wrong:
        raise DataError(f"{path}: damaged ({', '.join(wrong)}); delete {path.parent} and start again")


def is_stream_state(state: Any) -> bool:
    """Whether a value of a journal holds the fields of a `StreamState`."""
    if not isinstance(state, dict) or set(state) != {spec.name for spec in fields(StreamState)}:
        return False
    finished = state["finished"]
    if not isinstance(finished, dict):
        return False
    return (all(not shards.wrong_in(finished, name, shards.FILE_FIELDS) for name in finished)
            and state["split"] in ("train", "val") and is_count(state["open_tokens"])
            and is_range(state["open_documents"]))


def require_same(path: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise DataError that names every setting in which `stored` differs from `wanted`."""
    differences = [f"{key}: {stored.get(key)!r} there, {value!r} now"
                   for key, value in wanted.items() if stored.get(key) != value]
    if differences:
        raise DataError(f"{path}: belongs to another export ({'; '.join(differences)}); give another --name, "
                        f"the settings it was begun with, or delete {path.parent}")


# ======================================================================================================
# COMMAND
# ======================================================================================================


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(description="Turn documents into a tokenizer, shards and a manifest.")
    command.add_argument("--docs", type=Path, nargs="+", required=True, metavar="FILE",
                         help="documents: *.jsonl (one JSON object per line) or plain text, in this order")
    command.add_argument("--name", required=True, help="name of the dataset, which goes to DIR/datasets/NAME")
    command.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, metavar="DIR",
                         help="folder for datasets/ and tokenizers/ (default: that of this script)")
    tokenizer = command.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", type=Path, metavar="MODEL", help="SentencePiece model to use")
    tokenizer.add_argument("--train-tokenizer", type=positive, metavar="PIECES",
                           help="first train DIR/tokenizers/NAME.model with this many pieces")
    command.add_argument("--tokenizer-docs", type=positive, default=TOKENIZER_DOCUMENTS, metavar="N",
                         help="documents to train it on; more take more memory (default: %(default)s)")
    command.add_argument("--official-tokenizer-recipe", action="store_true",
                         help="train as the challenge's exporter does: from document 0 on, validation "
                              f"included, and without documents over {OFFICIAL_SENTENCE_BYTES} bytes")
    command.add_argument("--tokenizer-only", action="store_true", help="stop after training the tokenizer")
    command.add_argument("--variant", choices=VARIANTS, default=PLAIN,
                         help="caseops: lossless case transform, with a byte sidecar for validation; "
                              "caseops_fused: the same with each mark before the space of its word, which "
                              "takes fewer tokens (default: %(default)s)")
    command.add_argument("--val-docs", type=positive, default=OFFICIAL_VAL_DOCUMENTS, metavar="N",
                         help="the first N documents become validation (default: the official %(default)s)")
    command.add_argument("--max-train-shards", type=natural, metavar="N", help="stop after N training shards")
    command.add_argument("--shard-tokens", type=positive, default=OFFICIAL_SHARD_TOKENS, metavar="N",
                         help="tokens per shard (default: the official %(default)s)")
    command.add_argument("--workers", type=positive, default=available_cores(), metavar="N",
                         help="processes (default: %(default)s, the cores available)")
    command.add_argument("--text-key", default="text", metavar="KEY",
                         help="key of the text in a JSON line (default: %(default)s)")
    command.add_argument("--separator", default="<|endoftext|>",
                         help="line that ends a document of plain text (default: %(default)s)")
    command.add_argument("--source", help="origin to record in the manifest (default: the files' names)")
    command.add_argument("--revision", help="version to record in the manifest (default: the sha256)")
    return command


def positive(text: str) -> int:
    """An argument that counts something there must be."""
    value = natural(text)
    if value == 0:
        raise argparse.ArgumentTypeError("expected a number of at least 1, got 0")
    return value


def natural(text: str) -> int:
    """An argument that counts something."""
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return value


def place_tokenizer(options: argparse.Namespace, source: DocumentSource) -> Path:
    """Path of the tokenizer under DIR/tokenizers, trained or copied there. Raises DataError."""
    folder = options.out / "tokenizers"
    if options.train_tokenizer:
        path = folder / f"{options.name}.model"
        first_document = 0 if options.official_tokenizer_recipe else options.val_docs
        make_tokenizer(path, TokenizerRecipe(source, options.train_tokenizer, options.variant,
                                             options.official_tokenizer_recipe, first_document,
                                             options.tokenizer_docs))
        return path
    shards.load_tokenizer(options.tokenizer)
    path = folder / options.tokenizer.name
    if not path.exists():
        write_bytes(path, options.tokenizer.read_bytes())
    elif sha256_file(path) != sha256_file(options.tokenizer):
        raise DataError(f"{path}: another tokenizer of that name is there; rename {options.tokenizer}")
    return path


def report(directory: Path, manifest: dict[str, Any]) -> str:
    """A summary of an export, in lines."""
    lines = [f"{directory}: tokenizer sha256 {manifest['tokenizer']['sha256'][:12]}"]
    for split in ("train", "val"):
        facts = manifest["splits"][split]
        entries = [entry for name, entry in manifest["files"].items()
                   if entry["split"] == split and "_val_bytes_" not in name]
        start, stop = facts["documents"]
        tokens = sum(entry["tokens"] for entry in entries)
        lines.append(f"  {split}: documents {start:,} to {stop - 1:,}, {tokens:,} tokens in {len(entries)} "
                     f"shard(s), {size(sum(entry['bytes'] for entry in entries))}")
    audit = collections.Counter(manifest["splits"]["val"].get("audit"))
    lines.append(f"  audit of {audit['documents']:,} validation documents: {audit['text_bytes']:,} bytes of "
                 f"text, {audit['decoded_bytes']:,} decoded, the same by pieces")
    if "sidecar_bytes" in audit:
        lines.append(f"  sidecar: {audit['sidecar_bytes']:,} bytes; {audit['dropped_bytes']:,} bytes of text "
                     "dropped at the ends of documents")
    tokens = max(audit["tokens"], 1)
    lines.append(f"  {audit['text_bytes'] / tokens:.3f} bytes per token, "
                 f"{audit['byte_tokens'] / tokens:.2%} of the tokens are byte pieces")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    escape_unprintable()
    command = parser()
    options = command.parse_args(arguments)
    if options.tokenizer and (options.tokenizer_only or options.official_tokenizer_recipe):
        command.error("--tokenizer-only and --official-tokenizer-recipe need --train-tokenizer")
    source = DocumentSource(tuple(str(path) for path in options.docs), options.text_key, options.separator)
    directory = options.out / "datasets" / options.name
    try:
        source.require_text()
        if len({path.resolve() for path in options.docs}) < len(options.docs):
            raise DataError("--docs: a file is given twice, so its validation documents would be trained on")
        tokenizer_path = place_tokenizer(options, source)
        if options.tokenizer_only:
            return 0
        Encoder(str(tokenizer_path), options.variant)  # refuses an unfit one before any process starts
        encoding = EncodingSettings(source, str(tokenizer_path), options.variant, options.val_docs)
        plan = ExportPlan(encoding, directory, options.name, options.shard_tokens, options.max_train_shards,
                          options.source, options.revision)
        print(report(directory, export(plan, options.workers)))
        pieces = shards.load_tokenizer(tokenizer_path).vocab_size()
        paths = f"DATA_PATH={shlex.quote(str(directory))} TOKENIZER_PATH={shlex.quote(str(tokenizer_path))}"
        print(f"train with it: {paths} VOCAB_SIZE={pieces} python train_gpt.py")
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted. Finished work is kept: run the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
