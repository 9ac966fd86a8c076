"""Offline sample: the running Python's own documentation as a small dataset in the challenge's format.

    python data/sample.py            # make it: seconds, nothing is downloaded
    python data/sample.py --check    # verify it, change nothing

A document is one module's docstrings or one topic of `pydoc_data`, read from the source files without
importing them. Text that occurs twice is kept once, validation first: no paragraph of it is trained on.
The same Python and SentencePiece versions give the same bytes; others give another, similar sample.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import io
import os
import platform
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece as spm

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data import shards
from data.files import DataError, escape_unprintable, explain_os_error, is_count, write_bytes

NAME = "sample_sp1024"
TOKENIZER_FILE = "sample_1024_bpe.model"
RECIPE = 1  # raise it when the way the sample is made changes, so that old ones are recognized
VOCAB_SIZE = 1024
VAL_DOCUMENTS = 40
TRAIN_SHARDS = 4
MIN_SHARED_CHARACTERS = 40  # shorter paragraphs ("Example:") are common phrases, not copies

# Linux distributions ship these apart from Python: with them two installs of one version would differ.
SEPARATE_PACKAGES = frozenset({"distutils", "ensurepip", "idlelib", "lib2to3", "turtledemo"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"})


# ======================================================================================================
# TEXT
# ======================================================================================================


def stdlib_sources() -> list[tuple[str, Path]]:
    """(name, path) of the standard library's modules, sorted by name; names use `/` on every system."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in TEST_FOLDERS]  # most files are in there
        for name in names:
            path = Path(folder, name)
            parts = path.relative_to(root).parts
            top = parts[0].removesuffix(".py")
            if name.endswith(".py") and top in sys.stdlib_module_names and top not in SEPARATE_PACKAGES:
                sources.append(("/".join(parts), path))
    if not sources:
        raise DataError(f"{root}: no sources of the standard library there; use a Python installed with them")
    return sorted(sources)


def parse_source(path: Path) -> ast.Module:
    """Syntax tree of a source file, without the warnings its old escapes may cause."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes())
    except OSError as error:
        raise explain_os_error(error, path) from error
    except (SyntaxError, ValueError) as error:
        raise DataError(f"{path}: cannot be parsed ({error}); is this Python damaged?") from error


def docstrings(tree: ast.Module) -> str:
    """All docstrings of a module in source order, separated by blank lines."""
    owners = [node for node in ast.walk(tree)
              if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
    owners.sort(key=lambda node: getattr(node, "lineno", 0))
    texts = [ast.get_docstring(node, clean=False) for node in owners]
    return "\n\n".join(inspect.cleandoc(text) for text in texts if text)


def help_topics(tree: ast.Module) -> dict[str, str]:
    """The `topics` table of `pydoc_data/topics.py`, read from its syntax tree."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return ast.literal_eval(node.value)
    return {}


def stdlib_documents() -> list[str]:
    """Documents in the order of the hashes of their names: shuffled, yet alike in neighboring versions."""
    named = {}
    for name, path in stdlib_sources():
        tree = parse_source(path)
        if name == "pydoc_data/topics.py":
            named.update({f"topic:{key}": text for key, text in help_topics(tree).items()})
        else:
            named[name] = docstrings(tree)
    order = sorted(named, key=lambda name: hashlib.sha256(name.encode()).digest())
    return drop_repeats([named[name] for name in order])


def drop_repeats(documents: list[str]) -> list[str]:
    """Remove every paragraph seen before, blank space aside, and the documents that this leaves empty."""
    seen: set[str] = set()
    kept_documents = []
    for document in documents:
        kept = []
        for paragraph in document.split("\n\n"):
            key = " ".join(paragraph.split())
            if len(key) >= MIN_SHARED_CHARACTERS and key in seen:
                continue
            seen.add(key)
            kept.append(paragraph)
        text = "\n\n".join(kept).strip()
        if text:
            kept_documents.append(text)
    return kept_documents


# ======================================================================================================
# TOKENS
# ======================================================================================================


def train_tokenizer(documents: list[str]) -> bytes:
    """Serialized SentencePiece BPE model of `documents`; one thread, so that no machine changes its bytes."""
    model = io.BytesIO()
    longest_bytes = max(len(document.encode()) for document in documents)
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(documents), model_writer=model, num_threads=1, minloglevel=2,
            model_type="bpe", vocab_size=VOCAB_SIZE, character_coverage=0.999, byte_fallback=True,
            split_digits=True, user_defined_symbols=["\n"], max_sentence_length=longest_bytes + 1,
            normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
            pad_id=shards.PAD_ID, bos_id=shards.BOS_ID, eos_id=shards.EOS_ID, unk_id=shards.UNK_ID)
    except RuntimeError as error:
        raise DataError(f"{sysconfig.get_path('stdlib')}: {text_bytes(documents)} bytes of text, too few "
                        f"for {VOCAB_SIZE} pieces ({error}); use a complete Python") from error
    return model.getvalue()


def encode(tokenizer: spm.SentencePieceProcessor, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Token stream, BOS before each document, and the offset at which each document starts in it.

    Raises DataError where a document does not decode to itself: the sample promises exact bytes.
    """
    encoded = tokenizer.encode(documents)
    for document, ids in zip(documents, encoded, strict=True):
        if tokenizer.decode(ids) != document:
            raise DataError(f"a document does not survive the tokenizer: it begins {document[:60]!r}")
    lengths = np.array([len(ids) + 1 for ids in encoded], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    stream = np.concatenate([np.array([shards.BOS_ID, *ids], dtype=shards.TOKEN_DTYPE) for ids in encoded])
    return stream, starts


def write_split(directory: Path, split: str, tokens: np.ndarray, starts: np.ndarray, first_document: int,
                shard_count: int) -> dict[str, dict[str, Any]]:
    """Write one split as `shard_count` shards of equal length; returns their manifest entries."""
    edges = [len(tokens) * index // shard_count for index in range(shard_count + 1)]
    ranges = shards.document_ranges(starts, edges, first_document)
    entries = {}
    for index, documents in enumerate(ranges):
        path = directory / f"fineweb_{split}_{index:06d}.bin"
        shards.write_shard(path, tokens[edges[index]:edges[index + 1]])
        entries[path.name] = shards.file_entry(path, split, documents)
    return entries


def build(root: Path) -> Path:
    """Make the sample under `root` (`datasets/`, `tokenizers/`) and return its dataset directory."""
    directory = root / "datasets" / NAME
    model_path = root / "tokenizers" / TOKENIZER_FILE
    documents = stdlib_documents()
    val_documents, train_documents = documents[:VAL_DOCUMENTS], documents[VAL_DOCUMENTS:]
    model = train_tokenizer(train_documents)
    write_bytes(model_path, model)
    tokenizer = shards.load_tokenizer(model_path)
    val_tokens, val_starts = encode(tokenizer, val_documents)
    train_tokens, train_starts = encode(tokenizer, train_documents)
    files = write_split(directory, "train", train_tokens, train_starts, VAL_DOCUMENTS, TRAIN_SHARDS)
    files |= write_split(directory, "val", val_tokens, val_starts, 0, 1)
    shards.write_manifest(directory, {
        "version": shards.MANIFEST_VERSION,
        "name": NAME,
        "source": "docstrings and help topics of the Python standard library",
        "revision": f"Python {platform.python_version()}, sentencepiece {spm.__version__}, recipe {RECIPE}",
        "tokenizer": {
            "file": f"../../tokenizers/{TOKENIZER_FILE}",
            "sha256": hashlib.sha256(model).hexdigest(),
            "vocab_size": tokenizer.vocab_size(),
        },
        "splits": {
            "train": {"documents": [VAL_DOCUMENTS, len(documents)], "bytes": text_bytes(train_documents)},
            "val": {"documents": [0, VAL_DOCUMENTS], "bytes": text_bytes(val_documents)},
        },
        "files": files,
    })
    return directory


def text_bytes(documents: list[str]) -> int:
    """UTF-8 bytes of all documents."""
    return sum(len(document.encode()) for document in documents)


# ======================================================================================================
# COMMAND
# ======================================================================================================


def describe(directory: Path) -> str:
    """One line per split of a finished sample."""
    manifest = shards.read_manifest(directory)
    lines = [f"{directory}: {manifest.get('revision', 'of unknown origin')}"]
    for split in ("train", "val"):
        facts = manifest["splits"][split]
        entries = [entry for entry in manifest["files"].values() if entry["split"] == split]
        start, stop = facts["documents"]
        tokens = sum(entry["tokens"] for entry in entries)
        text = f"{facts['bytes']:,} bytes of text, " if is_count(facts.get("bytes")) else ""
        lines.append(f"  {split}: {stop - start} documents, {text}{tokens:,} tokens in {len(entries)} "
                     "shard(s)")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    escape_unprintable()
    parser = argparse.ArgumentParser(description="Make or check the offline sample dataset.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, metavar="DIR",
                        help="folder for datasets/ and tokenizers/ (default: that of this script)")
    parser.add_argument("--check", action="store_true", help="verify an existing sample, change nothing")
    options = parser.parse_args(arguments)
    directory = options.out / "datasets" / NAME
    try:
        problems = shards.verify_dataset(directory)
        if problems and options.check:
            told = "the sample is damaged; `python data/sample.py` repairs it:"
            raise DataError("\n  ".join([told, *problems]))
        if problems:
            build(options.out)
        print(("made " if problems else "complete ") + describe(directory))
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: run the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
