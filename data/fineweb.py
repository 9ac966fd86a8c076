"""Fetch a public export of FineWeb: parallel, resumable, every byte checked against the hub's own hashes.

    python data/fineweb.py --variant sp8192 --train-shards 10   # 2 GB of training tokens and the rest
    python data/fineweb.py --variant sp8192 --dry-run           # what would be fetched, and whether it fits
    python data/fineweb.py --variant sp8192 --verify            # re-read everything, offline
    python data/fineweb.py --variant sp8192 --repo you/yours    # the same layout from another repository
    python data/fineweb.py --variant caseops                    # fused case marks: the default of a run

`--variant caseops` rewrites each shard as it arrives: a space and the case mark after it become one token
(`data/fuse.py`). `--variant caseops_published` leaves the shards as they are.

Files come into place only after their hash was checked. The same command resumes an interrupted download and
fetches no finished file again. The revision is pinned by the first run and kept in the manifest.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import sentencepiece as spm

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data import caseops, fuse, official, shards
from data.contents import content_problems
from data.files import (
    DISK_ERRORS,
    DataError,
    bytes_bar,
    escape_unprintable,
    exclusive,
    explain_os_error,
    is_count,
    is_string,
    read_json,
    sha256_file,
    size,
    write_bytes,
)
from data.shards import ByteTable

DEFAULT_TRAIN_SHARDS = 80  # as the records use: 8 billion tokens
DEFAULT_WORKERS = 8
REMOTE_ROOT = "datasets"
DOCUMENTS_FILE = "docs_selected.jsonl"
RECEIPTS_NAME = ".download.json"
LOCK_NAME = ".download.lock"
MOST_NORMALIZED = 0.01  # of the bytes: FineWeb's text and its normalized form differ by a hundredth of that
NAMING = "runs read fineweb_{train,val}_%06d.bin, numbered from 000000 without a gap"
ATTEMPTS = 4
FIRST_WAIT_S = 1.0
POLL_S = 0.5
FUSED_AT_ONCE = 4  # shards of 200 MB; each takes a gigabyte of memory and four seconds
DISK_RESERVE_BYTES = 200_000_000  # left free, for the tokenizer, the manifest and everybody else
Result = TypeVar("Result")
ABANDONED = re.compile(r".*\.[0-9a-f]{8}\.incomplete")


@dataclass(frozen=True)
class Variant:
    """Where a tokenization is published: repository, folder of its shards, tokenizer file."""

    repo: str
    dataset: str
    tokenizer: str
    fused: bool = False  # rewrite each shard: a space and the case mark after it become one token

    def folder(self) -> str:
        """Name of the folder here. Data that are not as published have a name of their own."""
        return f"{self.dataset}{fuse.SUFFIX}" if self.fused else self.dataset


CASEOPS = Variant("romeerp/parameter-golf-caseops-v1", "fineweb10B_sp8192_lossless_caps_caseops_v1_reserved",
                  "fineweb_8192_bpe_lossless_caps_caseops_v1_reserved.model")
VARIANTS = {
    "sp1024": Variant("willdepueoai/parameter-golf", "fineweb10B_sp1024", "fineweb_1024_bpe.model"),
    "sp4096": Variant("kevclark/parameter-golf", "fineweb10B_sp4096", "fineweb_4096_bpe.model"),
    "sp8192": Variant("kevclark/parameter-golf", "fineweb10B_sp8192", "fineweb_8192_bpe.model"),
    "caseops": replace(CASEOPS, fused=True),
    "caseops_published": CASEOPS,
}


@dataclass(frozen=True)
class RemoteFile:
    """A file to have: its path in the repository, its place here, and the hub's size and hash of it."""

    remote: str
    local: Path
    size_bytes: int
    sha256: str | None
    git_blob: str

    def hub_hash(self) -> str:
        """The hub's hash of the content: sha256 of large files, git's hash of small ones."""
        return self.sha256 or self.git_blob

    def check(self, path: Path) -> str | None:
        """The fault of `path` as a copy of this file, or None."""
        found_bytes = path.stat().st_size
        if found_bytes != self.size_bytes:
            return f"{found_bytes} bytes, the hub says {self.size_bytes}"
        digest = sha256_file(path) if self.sha256 else git_blob_hash(path)
        return None if digest == self.hub_hash() else f"hash {digest}, the hub says {self.hub_hash()}"


def git_blob_hash(path: Path) -> str:
    """Git's hash of a file's content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Request:
    """The data that the user wants, and its folder."""

    variant: Variant
    root: str
    revision: str | None
    train_shards: int
    with_documents: bool
    out: Path
    workers: int

    def directory(self) -> Path:
        """Dataset directory."""
        return self.out / "datasets" / self.variant.folder()

    def tokenizer_path(self) -> Path:
        """Place of the tokenizer."""
        return self.out / "tokenizers" / self.variant.tokenizer

    def staging(self, file: RemoteFile) -> Path:
        """Where a file arrives before it is checked: next to its place, hence on the same disk."""
        return file.local.parent / f".staging-{self.variant.folder()}"


# ======================================================================================================
# HUB
# ======================================================================================================


class Hub:
    """One dataset repository at one commit. Every failure is a DataError with the next step."""

    def __init__(self, repo: str, revision: str | None) -> None:
        import huggingface_hub  # here, so that --verify works without it
        import huggingface_hub.errors
        import huggingface_hub.utils

        huggingface_hub.utils.disable_progress_bars()
        self.repo = repo
        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        self.library = huggingface_hub
        self.api = huggingface_hub.HfApi(endpoint=self.endpoint)
        self.revision = self.attempt(
            lambda: str(self.api.dataset_info(repo, revision=revision).sha), f"revision {revision or 'main'}")

    def attempt(self, call: Callable[[], Result], what: str) -> Result:
        """Result of `call`, tried again when the failure may pass."""
        for attempt in range(ATTEMPTS):
            try:
                return call()
            except Exception as error:  # the client's HTTP library, hence its errors, differs by version
                final = self.lasting(error)
                if final or attempt == ATTEMPTS - 1:
                    raise DataError(final or f"{self.repo}: {what}: {type(error).__name__}: {error}; "
                                    "run the same command again, finished files are kept") from error
            time.sleep(FIRST_WAIT_S * 2 ** attempt)
        raise AssertionError("unreachable")

    def lasting(self, error: Exception) -> str | None:
        """Message for a failure that will not pass by itself; None for one that may."""
        errors = self.library.errors
        if isinstance(error, errors.GatedRepoError):
            return f"{self.repo}: gated; request access on its page, then `hf auth login` (or set HF_TOKEN)"
        if isinstance(error, errors.RepositoryNotFoundError):
            return (f"{self.repo}: no such dataset repository, or a private one; check --repo, and "
                    "`hf auth login` (or set HF_TOKEN) if it is private")
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{self.repo}: no such revision; check --revision"
        if isinstance(error, errors.OfflineModeIsEnabled):
            return f"{self.repo}: HF_HUB_OFFLINE is set; unset it to download, or --verify the local files"
        if isinstance(error, errors.LocalEntryNotFoundError):
            return None
        if isinstance(error, errors.EntryNotFoundError):
            return f"{self.repo}: {error}"
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            return str(explain_os_error(error, Path(error.filename or "download")))
        return None

    def folder(self, path: str) -> dict[str, Any] | None:
        """Files directly in a folder of the repository, by name; None where there is no such folder."""
        def listing() -> list[Any] | None:
            try:
                return list(self.api.list_repo_tree(self.repo, path or None, revision=self.revision,
                                                    repo_type="dataset"))
            except self.library.errors.EntryNotFoundError:
                return None

        entries = self.attempt(listing, f"listing of {path}")
        if entries is None:
            return None
        return {Path(entry.path).name: entry for entry in entries if hasattr(entry, "size")}

    def folders_with_shards(self) -> list[str]:
        """Folders anywhere in the repository that hold a first validation shard."""
        paths = self.attempt(lambda: self.api.list_repo_files(self.repo, revision=self.revision,
                                                              repo_type="dataset"), "listing")
        return sorted(str(Path(path).parent) for path in paths if path.endswith("_val_000000.bin"))

    def fetch(self, file: RemoteFile, staging: Path) -> Path:
        """Bring one file into `staging`, hash checked. Raises DataError after several bad copies."""
        problem = None
        for _ in range(ATTEMPTS):
            staged = Path(self.attempt(
                lambda: self.library.hf_hub_download(
                    self.repo, file.remote, repo_type="dataset", revision=self.revision, local_dir=staging,
                    endpoint=self.endpoint, force_download=problem is not None),  # noqa: B023 - called at once
                file.remote))
            problem = file.check(staged)
            if problem is None:
                return staged
            staged.unlink()
        raise DataError(f"{self.repo}/{file.remote}: {ATTEMPTS} copies were wrong, the last: {problem}; "
                        "a proxy may damage them: try another network, or report it to the repository")


def wanted_files(hub: Hub, request: Request) -> list[RemoteFile]:
    """The files of a request, as the repository has them. Raises DataError where its layout is another."""
    variant = request.variant
    folder = f"{request.root}/datasets/{variant.dataset}".lstrip("/")
    found = hub.folder(folder)
    if found is None:
        others = hub.folders_with_shards()
        hint = f"shards are in {', '.join(others)}" if others else "there are no shards anywhere in it"
        raise DataError(f"{hub.repo}: no folder {folder}; {hint}, expected in ROOT/datasets/DATASET: "
                        "give --root and --dataset, or another --repo")
    kinds: dict[str, list[str]] = {"train": [], "val": [], "val_bytes": []}
    for name in sorted(found):
        match = shards.SHARD_NAME.fullmatch(name)
        if match and match["prefix"] == "fineweb":
            kinds[match["kind"]].append(name)
    if not kinds["val"] or len(kinds["train"]) < request.train_shards:
        others = sorted({name for name in found if name.endswith(".bin")}.difference(*kinds.values()))
        told = f"; it has {', '.join(others[:3])}, but {NAMING}" if others else ""
        raise DataError(f"{hub.repo}/{folder}: {len(kinds['val'])} validation and {len(kinds['train'])} "
                        "training shards, expected at least 1 and the "
                        f"{request.train_shards} of --train-shards{told}")
    kinds["train"] = kinds["train"][: request.train_shards]
    for kind, shard_names in kinds.items():
        for number, name in enumerate(shard_names):
            if name != f"fineweb_{kind}_{number:06d}.bin":
                raise DataError(f"{hub.repo}/{folder}/{name}: expected fineweb_{kind}_{number:06d}.bin here; "
                                f"{NAMING}: take a repository that has them so, or get the files yourself "
                                "and rename them")
    names = kinds["val"] + kinds["val_bytes"] + kinds["train"]
    files = [remote_file(found[name], request.directory() / name) for name in names]
    tokenizers = hub.folder(f"{request.root}/tokenizers".lstrip("/")) or {}
    if variant.tokenizer not in tokenizers:
        models = sorted(name for name in tokenizers if name.endswith(".model"))
        raise DataError(f"{hub.repo}: no tokenizer {request.root}/tokenizers/{variant.tokenizer}; "
                        f"models there: {', '.join(models) or 'none'}; give --tokenizer")
    files.insert(0, remote_file(tokenizers[variant.tokenizer], request.tokenizer_path()))
    if request.with_documents:
        documents = (hub.folder(request.root) or {}).get(DOCUMENTS_FILE)
        if documents is None:
            raise DataError(f"{hub.repo}: no {request.root}/{DOCUMENTS_FILE}; leave out --with-docs")
        files.append(remote_file(documents, request.out / "downloads" / DOCUMENTS_FILE))
    return files


def remote_file(entry: Any, local: Path) -> RemoteFile:
    """A file as the hub lists it; large ones carry a sha256, small ones git's hash."""
    sha256 = entry.lfs.sha256 if entry.lfs else None
    return RemoteFile(entry.path, local, entry.size, sha256, entry.blob_id)


# ======================================================================================================
# RECEIPTS: which files here are known to be right
# ======================================================================================================


RECEIPT_FIELDS: shards.Fields = {"bytes": is_count, "modified_ns": lambda time_ns: type(time_ns) is int,
                                 "hub_hash": is_string, "sha256": is_string}
SHARD_FACTS: shards.Fields = {"tokens": is_count, "largest": is_count, "documents": is_count,
                              "begins_document": lambda begins: isinstance(begins, bool)}


@dataclass
class Receipts:
    """The files that were fetched or found right, by name: valid while its size and time do not change."""

    path: Path
    repo: str
    revision: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def load(cls, path: Path) -> Receipts | None:
        """Receipts of a dataset directory, or None where there are none."""
        stored = read_json(path)
        if stored is None:
            return None
        wrong = [name for name in ("repo", "revision") if not is_string(stored.get(name))]
        files = stored.get("files")
        if not isinstance(files, dict):
            wrong.append("files")
        else:
            for name in files:
                wanted = {**RECEIPT_FIELDS, **(SHARD_FACTS if shards.SHARD_NAME.fullmatch(name) else {})}
                wrong += [f"files.{field}" for field in shards.wrong_in(files, name, wanted)]
        if wrong:
            raise DataError(f"{path}: damaged ({', '.join(wrong[:5])}); delete it, files are then checked "
                            "afresh")
        return cls(path, stored["repo"], stored["revision"], stored["files"])

    def holds(self, file: RemoteFile) -> bool:
        """Whether the local file is known to be the hub's, unchanged since."""
        receipt = self.files.get(file.local.name)
        if receipt is None or not file.local.is_file():
            return False
        status = file.local.stat()
        return ((receipt["bytes"], receipt["modified_ns"]) == (status.st_size, status.st_mtime_ns)
                and receipt["hub_hash"] == file.hub_hash())

    def add(self, file: RemoteFile, path: Path, is_fused: bool = False) -> None:
        """Note that `path` was checked and is to stand at file.local, with what the manifest needs of it."""
        status = path.stat()
        as_published = file.sha256 is not None and not is_fused
        receipt = {"bytes": status.st_size, "modified_ns": status.st_mtime_ns, "hub_hash": file.hub_hash(),
                   "sha256": file.sha256 if as_published else sha256_file(path)}
        if shards.SHARD_NAME.fullmatch(file.local.name):
            receipt |= shard_facts(path)
        with self.lock:
            self.files[file.local.name] = receipt
            self.save()

    def forget(self, names: list[str]) -> None:
        """Drop receipts, so that these files are checked or fetched again."""
        for name in names:
            self.files.pop(name, None)
        self.save()

    def save(self) -> None:
        """Write the receipts."""
        content = {"repo": self.repo, "revision": self.revision, "files": self.files}
        write_bytes(self.path, json.dumps(content, indent=1).encode())


def shard_facts(path: Path) -> dict[str, Any]:
    """Tokens, largest id, and the boundaries of documents in a shard. DataError if its header is wrong."""
    tokens = shards.read_shard(path)
    is_sidecar = "_val_bytes_" in path.name
    return {
        "tokens": len(tokens),
        "largest": int(tokens.max(initial=0)),
        "documents": 0 if is_sidecar else int(np.count_nonzero(tokens == shards.BOS_ID)),
        "begins_document": bool(len(tokens)) and int(tokens[0]) == shards.BOS_ID,
    }


def byte_audit(
    directory: Path, sidecars: list[str], tokenizer: spm.SentencePieceProcessor, pairs: fuse.Pairs
) -> dict[str, int]:
    """Sums over the byte sidecars of a dataset and over the pieces of their shards, for the manifest.

    Raises DataError where they are further apart than normalized text can be from its original: then the
    sidecar is not of these tokens, or it counts case marks as text (issue #2138 upstream).
    """
    table = ByteTable.from_sentencepiece(tokenizer)
    fused = caseops.form_of(tokenizer)
    if fused is not None:  # marks are pieces, and no text
        stop = caseops.FIRST_MARK_ID + len(caseops.marks_of(fused))
        table.piece_bytes[caseops.FIRST_MARK_ID:stop] = 0
    sums = {"sidecar_bytes": 0, "piece_bytes": 0}
    for name in sidecars:
        counts = shards.read_shard(directory / name)
        (tokens,) = fuse.separate(shards.read_shard(directory / name.replace("_val_bytes_", "_val_")), pairs)
        sums["sidecar_bytes"] += int(counts.sum(dtype=np.int64))
        sums["piece_bytes"] += table.total(tokens)
    difference = abs(sums["sidecar_bytes"] - sums["piece_bytes"])
    if difference > MOST_NORMALIZED * sums["piece_bytes"]:
        raise DataError(f"{directory}: the byte sidecars count {sums['sidecar_bytes']} bytes of text, the "
                        f"pieces of their tokens hold {sums['piece_bytes']}: more than {MOST_NORMALIZED:.0%} "
                        "apart; the repository is not in the challenge's format, give another --repo")
    return sums


# ======================================================================================================
# DOWNLOAD
# ======================================================================================================


def split_finished(
    files: list[RemoteFile], receipts: Receipts | None, is_fused: bool
) -> tuple[list[RemoteFile], list[RemoteFile]]:
    """Files that are here and right, and files to fetch; a file without a receipt is hashed."""
    present = [file for file in files if file.local.is_file()]
    unknown = [file for file in present if not (receipts and receipts.holds(file))]
    wrong = []
    with bytes_bar("checking", sum(file.size_bytes for file in unknown)) as bar:
        for file in unknown:
            if problem := file.check(file.local):
                bar.write(f"{file.local}: {problem}; it will be fetched", file=sys.stderr)
                wrong.append(file)
            bar.update(file.size_bytes)
    missing = [file for file in files if file in wrong or file not in present]
    if is_fused:  # a shard and its sidecar are rewritten together
        missing = [file for group in with_sidecars(files) if set(group) & set(missing) for file in group]
    return [file for file in files if file not in missing], missing


def require_space(files: list[RemoteFile], request: Request) -> None:
    """DataError where the disk is too small for the files; it names the training shards that would fit."""
    directory = request.directory().absolute()
    place = next(folder for folder in (directory, *directory.parents) if folder.is_dir())
    free_bytes = shutil.disk_usage(place).free - DISK_RESERVE_BYTES
    needed_bytes = sum(file.size_bytes for file in files)
    if needed_bytes <= free_bytes:
        return
    train = [file for file in files if "_train_" in file.local.name]
    left_bytes = free_bytes - (needed_bytes - sum(file.size_bytes for file in train))
    fitting = request.train_shards - len(train)
    for file in train:
        left_bytes -= file.size_bytes
        fitting += left_bytes >= 0
    advice = f"--train-shards {fitting} would fit" if fitting > 0 else "not even one training shard would fit"
    raise DataError(f"{request.out}: {size(needed_bytes)} needed, {size(max(free_bytes, 0))} free (with "
                    f"{size(DISK_RESERVE_BYTES)} kept in reserve); {advice}, or give another --out")


def set_aside(files: list[RemoteFile], request: Request, receipts: Receipts) -> None:
    """Rename foreign files in the place of fetched ones: they may be the user's own work.

    Raises DataError for a tokenizer, which other datasets may need under its name.
    """
    for file in files:
        if file.local.name in receipts.files or not file.local.exists():
            continue
        if file.local == request.tokenizer_path():
            raise DataError(f"{file.local}: not the tokenizer of {receipts.repo}; move it away, "
                            "or give another --out")
        kept = file.local.with_name(f"{file.local.name}.replaced")
        os.replace(file.local, kept)
        print(f"{file.local}: kept as {kept.name}", file=sys.stderr)


def fetch_all(hub: Hub, files: list[RemoteFile], request: Request, receipts: Receipts) -> None:
    """Fetch files in parallel. Raises the first DataError when the transfers under way have ended."""
    stagings = {request.staging(file) for file in files}
    for staging in stagings:
        remove_abandoned(staging)
    bar = bytes_bar("download", sum(file.size_bytes for file in files))
    fusing = threading.Semaphore(FUSED_AT_ONCE)

    def job(group: list[RemoteFile], pairs: fuse.Pairs) -> list[RemoteFile]:
        staged = [hub.fetch(file, request.staging(file)) for file in group]
        if pairs:
            with fusing:
                fuse.fuse_files(staged, pairs)
        # The receipt comes first, so that no file is in place without one.
        for file, path in zip(group, staged, strict=True):
            receipts.add(file, path, is_fused=bool(pairs))
            os.replace(path, file.local)
        return group

    is_tokenizer = [file.local == request.tokenizer_path() for file in files]
    done_files = [file for file, first in zip(files, is_tokenizer, strict=True) if first]
    if done_files:
        job(done_files, {})  # first, because its pieces say which tokens are fused
    rest = [file for file, first in zip(files, is_tokenizer, strict=True) if not first]
    pairs = pairs_to_fuse(request)
    pool = concurrent.futures.ThreadPoolExecutor(request.workers)
    pending = {pool.submit(job, group, pairs) for group in with_sidecars(rest)}
    try:
        while pending:
            done, pending = concurrent.futures.wait(pending, timeout=POLL_S,
                                                    return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                done_files += future.result()
            done_bytes = sum(file.size_bytes for file in done_files)
            arrived_bytes = done_bytes + sum(map(folder_bytes, stagings))
            bar.set_postfix_str(f"{len(done_files)} of {len(files)} files", refresh=False)
            bar.update(min(arrived_bytes, bar.total) - bar.n)
    finally:
        bar.close()
        pool.shutdown(wait=sys.exc_info()[0] is not KeyboardInterrupt, cancel_futures=True)


def with_sidecars(files: list[RemoteFile]) -> list[list[RemoteFile]]:
    """Files that are rewritten together: each alone, but a validation shard with its byte sidecar."""
    by_shard: dict[str, list[RemoteFile]] = {}
    for file in files:
        shard = file.local.name.replace("_val_bytes_", "_val_")
        by_shard.setdefault(shard, []).append(file)
    return [sorted(group, key=lambda file: "_val_bytes_" in file.local.name) for group in by_shard.values()]


def pairs_to_fuse(request: Request) -> fuse.Pairs:
    """The pairs of tokens that become one in this request's data; none for data as published."""
    return fuse.choose_pairs(request.tokenizer_path()) if request.variant.fused else {}


def remove_abandoned(staging: Path) -> None:
    """Delete pieces that a killed download left; the hub's client never looks for their names again."""
    for path in staging.rglob("*.incomplete"):
        if ABANDONED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def folder_bytes(folder: Path) -> int:
    """Bytes in a folder whose files may vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def download(request: Request, dry_run: bool) -> None:
    """Fetch what a request lacks and write the manifest; `dry_run`: only print the plan. Raises DataError."""
    directory = request.directory()
    receipts = Receipts.load(directory / RECEIPTS_NAME)
    if receipts is None and (directory / shards.MANIFEST_NAME).exists():
        raise DataError(f"{directory}: holds a dataset that was not downloaded; give another --out")
    hub = Hub(request.variant.repo, request.revision or (receipts.revision if receipts else None))
    if receipts and (receipts.repo, receipts.revision) != (hub.repo, hub.revision):
        raise DataError(f"{directory}: holds {receipts.repo} at {receipts.revision}, asked for {hub.repo} at "
                        f"{hub.revision}, which must not be mixed; give another --out, or delete it")
    files = wanted_files(hub, request)
    finished, missing = split_finished(files, receipts, request.variant.fused)
    print(f"{hub.repo} at {hub.revision}: {len(files)} files, {len(finished)} of them here; to fetch: "
          f"{len(missing)} files, {size(sum(file.size_bytes for file in missing))}", flush=True)
    if dry_run:
        for file in missing:
            print(f"  {file.remote} -> {file.local} ({size(file.size_bytes)})")
    require_space(missing, request)
    if dry_run:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, directory) from error
    with exclusive(directory / LOCK_NAME):
        receipts = receipts or Receipts(directory / RECEIPTS_NAME, hub.repo, hub.revision)
        for file in finished:
            if not receipts.holds(file):
                receipts.add(file, file.local)
        if missing:
            set_aside(missing, request, receipts)
            fetch_all(hub, missing, request, receipts)
        for staging in {request.staging(file) for file in files}:
            shutil.rmtree(staging, ignore_errors=True)
        made = manifest(request, receipts)
        shards.write_manifest(directory, made)
    print(f"{directory}: complete, {size(sum(file.size_bytes for file in files))}, every hash checked, "
          f"commit {hub.revision}")
    tell_validation(request, directory, made)


def receipts_of_kind(request: Request, receipts: Receipts, kind: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, receipt) of the shards of one kind that are here, from the first up to the first gap."""
    found = {}
    for name, receipt in receipts.files.items():
        match = shards.SHARD_NAME.fullmatch(name)
        if match and match["kind"] == kind and (request.directory() / name).is_file():
            found[int(match["index"])] = (name, receipt)
    return [found[index] for index in itertools.takewhile(found.__contains__, itertools.count())]


def split_entries(split: str, found: list[tuple[str, dict[str, Any]]], first_document: int,
                  tokenizer_path: Path, vocab_size: int) -> tuple[dict[str, Any], int]:
    """Manifest records of one split's shards, and the global index after its last document.

    Raises DataError if ids are outside the tokenizer or the split does not begin with a document.
    """
    entries: dict[str, Any] = {}
    document = first_document
    for name, receipt in found:
        if receipt["largest"] >= vocab_size:
            raise DataError(f"{name}: token {receipt['largest']}, but {tokenizer_path} has {vocab_size} "
                            "pieces; they do not belong together, give another --tokenizer")
        if not entries and not receipt["begins_document"]:
            raise DataError(f"{name}: does not begin with BOS ({shards.BOS_ID}), as the first shard of a "
                            "split must; the repository is not in the challenge's format")
        start = document if receipt["begins_document"] else document - 1
        document += receipt["documents"]
        entries[name] = manifest_entry(split, receipt, [start, document])
    return entries, document


def manifest(request: Request, receipts: Receipts) -> dict[str, Any]:
    """Manifest of local files, document ranges counted from the shards. Raises DataError on bad shards."""
    tokenizer_path = request.tokenizer_path()
    tokenizer = shards.load_tokenizer(tokenizer_path)
    vocab_size = tokenizer.vocab_size()
    val, val_stop = split_entries("val", receipts_of_kind(request, receipts, "val"), 0, tokenizer_path,
                                  vocab_size)
    train, train_stop = split_entries("train", receipts_of_kind(request, receipts, "train"), val_stop,
                                      tokenizer_path, vocab_size)
    sidecars: dict[str, Any] = {}
    for name, receipt in receipts_of_kind(request, receipts, "val_bytes"):
        twin = name.replace("_val_bytes_", "_val_")
        if twin not in val or receipt["tokens"] != val[twin]["tokens"]:
            raise DataError(f"{name}: {receipt['tokens']} byte counts, not one for each token of {twin}; "
                            "the repository is not in the challenge's format")
        sidecars[name] = manifest_entry("val", receipt, val[twin]["documents"])
    splits: dict[str, Any] = {"train": {"documents": [val_stop, train_stop]},
                              "val": {"documents": [0, val_stop]}}
    pairs = pairs_to_fuse(request)
    if sidecars:
        splits["val"]["audit"] = byte_audit(request.directory(), list(sidecars), tokenizer, pairs)
    return {
        "version": shards.MANIFEST_VERSION,
        "name": request.variant.folder(),
        "source": receipts.repo,
        "revision": receipts.revision,
        "tokenizer": {
            "file": Path(os.path.relpath(tokenizer_path, request.directory())).as_posix(),
            "sha256": sha256_file(tokenizer_path),
            "vocab_size": vocab_size,
        },
        "splits": splits,
        "files": train | val | sidecars,
        **({"fused": {str(new): list(pair) for new, pair in pairs.items()}} if pairs else {}),
    }


def manifest_entry(split: str, receipt: dict[str, Any], documents: list[int]) -> dict[str, Any]:
    """Manifest record of a fetched shard."""
    return {"split": split, "tokens": receipt["tokens"], "bytes": receipt["bytes"],
            "sha256": receipt["sha256"], "documents": documents}


def tell_validation(request: Request, directory: Path, stored: dict[str, Any]) -> None:
    """Print whether the validation text is the challenge's own, as a run will; warn where it should be.

    The hub's hashes come from whoever answers. These facts are of the text itself.
    """
    files = shards.names_of_kind(stored["files"], "val")
    if not files:
        return
    pairs = fuse.pairs_of(stored)
    (tokens,) = fuse.separate(np.concatenate([shards.read_shard(directory / name) for name in files]), pairs)
    sidecars = shards.names_of_kind(stored["files"], "val_bytes")
    tokenizer = shards.load_tokenizer(shards.tokenizer_path(directory, stored))
    if sidecars:
        bytes_total = sum(int(shards.read_shard(directory / name).sum(dtype=np.int64)) for name in sidecars)
    else:
        bytes_total = ByteTable.from_sentencepiece(tokenizer).total(tokens)
    facts = official.facts_of(tokens, bytes_total, tokenizer.vocab_size())
    name = official.official_name(facts)
    print(f"validation: {name}: {facts['targets']} targets, {facts['bytes']} bytes of text, "
          f"{facts['documents']} documents, sha256 of the first tokens {facts['sha256']}")
    if name != official.OWN:
        return
    texts, _ = official.official_table()
    plain = replace(request.variant, fused=False)
    expected = [text for variant, text in texts.items()
                if variant in VARIANTS and replace(VARIANTS[variant], fused=False) == plain]
    for text in expected:
        different = "; ".join(official.differences(facts, text))
        print(f"warning: {directory}: this is not the challenge's validation set, which "
              f"{request.variant.repo} should hold: {different}. Scores on it cannot be compared with "
              "others'. Look at the repository's history, and name an earlier commit with --revision",
              file=sys.stderr)


def verify(request: Request) -> None:
    """Re-read a dataset against its manifest, offline. Raises DataError with a list of faults."""
    directory = request.directory()
    stored = shards.read_manifest(directory)
    with bytes_bar("verify", sum(entry["bytes"] for entry in stored["files"].values())) as bar:
        problems = shards.verify_dataset(directory, bar.update)
    if not problems:
        problems = content_problems(directory, stored)
        if problems:
            advice = "every file is as the manifest says, but they do not belong together; export them again:"
            raise DataError("\n  ".join([f"{directory}: {advice}", *problems]))
        origin = f"{stored.get('source', 'unknown')} at {stored.get('revision', 'unknown')}"
        print(f"{directory}: {len(stored['files'])} shards and the tokenizer are as the manifest says "
              f"({origin}), and belong together")
        tell_validation(request, directory, stored)
        return
    receipts = Receipts.load(directory / RECEIPTS_NAME)
    if receipts is not None:
        receipts.forget([name for name in receipts.files
                         if any(f"{os.sep}{name}:" in problem for problem in problems)])
    advice = "missing or damaged files; the same command without --verify fetches them again:"
    raise DataError("\n  ".join([f"{directory}: {advice}", *problems]))


# ======================================================================================================
# COMMAND
# ======================================================================================================


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = "; ".join(f"{name}: {variant.repo}" for name, variant in VARIANTS.items())
    command = argparse.ArgumentParser(description="Fetch FineWeb shards from the Hugging Face hub.",
                                      epilog=f"Known variants: {known}.")
    command.add_argument("--variant", required=True,
                         help=f"{', '.join(VARIANTS)}, or with --repo any other name")
    command.add_argument("--train-shards", type=int, default=DEFAULT_TRAIN_SHARDS, metavar="N",
                         help="how many training shards, of 200 MB each (default: %(default)s)")
    command.add_argument("--repo", help="dataset repository OWNER/NAME (default: by variant)")
    command.add_argument("--dataset", help="folder of the shards (default: by variant, fineweb10B_VARIANT)")
    command.add_argument("--tokenizer", help="tokenizer file (default: by variant, fineweb_SIZE_bpe.model)")
    command.add_argument("--root", default=REMOTE_ROOT,
                         help="the repository's folder of datasets/ and tokenizers/ (default: %(default)s)")
    command.add_argument("--revision", help="commit, branch or tag (default: that of earlier downloads)")
    command.add_argument("--with-docs", action="store_true",
                         help=f"also fetch {DOCUMENTS_FILE}, for export.py (48 GB)")
    command.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, metavar="DIR",
                         help="folder for datasets/ and tokenizers/ (default: that of this script)")
    command.add_argument("--workers", type=int, default=DEFAULT_WORKERS, metavar="N",
                         help="files fetched at a time (default: %(default)s)")
    mode = command.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="print the plan without fetching anything")
    mode.add_argument("--verify", action="store_true", help="check the local files again, offline")
    return command


def chosen_variant(options: argparse.Namespace) -> Variant:
    """The variant that the options describe. Raises DataError for an unknown one without --repo."""
    known = VARIANTS.get(options.variant)
    if known is None and not (options.repo or options.verify):
        raise DataError(f"--variant {options.variant}: not one of {', '.join(VARIANTS)}; give its --repo")
    pieces = options.variant.removeprefix("sp")
    return Variant(options.repo or (known.repo if known else ""),
                   options.dataset or (known.dataset if known else f"fineweb10B_{options.variant}"),
                   options.tokenizer or (known.tokenizer if known else f"fineweb_{pieces}_bpe.model"),
                   known is not None and known.fused)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    escape_unprintable()
    command = parser()
    options = command.parse_args(arguments)
    if options.train_shards < 0 or options.workers < 1:
        command.error("expected --train-shards of at least 0 and --workers of at least 1")
    try:
        request = Request(chosen_variant(options), options.root.strip("/"), options.revision,
                          options.train_shards, options.with_docs, options.out, options.workers)
        if options.verify:
            verify(request)
        else:
            download(request, options.dry_run)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished files are kept: run the same command again", file=sys.stderr, flush=True)
        os._exit(130)  # transfers under way would hold the process until they end
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
