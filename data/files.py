"""Files as every tool writes them: whole or not at all; hashes; errors of the disk in words."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

HASH_BLOCK_BYTES = 1 << 20


class DataError(Exception):
    """An error that the user can fix: it names the file, what was found, what was expected, the next step."""


DISK_ERRORS = {
    errno.ENOSPC: "the disk is full: free space or choose another folder",
    errno.EDQUOT: "the disk quota is used up: free space or choose another folder",
    errno.EFBIG: "the file system allows no file of that size: choose another folder",
    errno.EACCES: "no permission: choose a folder you can write, or change its permissions",
    errno.EPERM: "no permission: choose a folder you can write, or change its permissions",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOTDIR: "a file stands where a folder is needed: move it away or choose another folder",
    errno.EEXIST: "a file stands where a folder is needed: move it away or choose another folder",
    errno.EISDIR: "a folder stands where a file is needed: move it away",
    errno.ENOENT: "it does not exist: check the path",
}


def explain_os_error(error: OSError, path: Path) -> DataError:
    """Turn an operating-system error on `path` into a message with a next step."""
    advice = DISK_ERRORS.get(error.errno or 0, "check the path and the disk")
    return DataError(f"{path}: {error.strerror or error}; {advice}")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write a temporary file beside `path`, which replaces it only when the block ends without an error."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~current_umask())  # mkstemp made it readable by its owner alone
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise explain_os_error(error, path) from error
        raise


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold `path` as a lock, so that two commands do not write the same dataset. DataError when it is held.

    The system lets go of it when the process ends, however it ends.
    """
    import fcntl  # absent on Windows, where only these tools, not the sample, go without

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise explain_os_error(error, path) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{path}: another command is writing to {path.parent}; wait for it") from error
        yield
    finally:
        os.close(descriptor)


def current_umask() -> int:
    """The process's file-creation mask (it can only be read by setting it)."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically."""
    with atomic_file(path) as file:
        file.write(content)


def sha256_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file as hex; `on_bytes` gets the number of bytes of each read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(HASH_BLOCK_BYTES):
                digest.update(block)
                if on_bytes is not None:
                    on_bytes(len(block))
    except OSError as error:
        raise explain_os_error(error, path) from error
    return digest.hexdigest()
