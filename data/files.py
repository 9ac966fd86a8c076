"""Files as every tool writes them: whole or not at all; hashes; errors of the disk in words."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

HASH_BLOCK_BYTES = 1 << 20


class DataError(Exception):
    """An error that the user can fix: it names the file, what was found, what was expected, the next step."""


def escape_unprintable() -> None:
    """From now on a character that the console cannot print is a backslash escape: no line is lost for it.

    Windows pipes, and machines with an ASCII or ISO-8859 locale, have such consoles.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a closed one is None
            stream.reconfigure(errors="backslashreplace")


def bytes_bar(label: str, total_bytes: int, done_bytes: int = 0) -> tqdm:
    """Progress over bytes with rate and time left, on a terminal alone: a log file gets none of it.

    done_bytes: from an earlier run. They are kept out of the rate.
    """
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return tqdm(desc=label, total=total_bytes, initial=done_bytes, unit="B", unit_scale=True,
                dynamic_ncols=True, disable=not (on_terminal and total_bytes))


def size(count_bytes: float) -> str:
    """Bytes in the decimal unit that reads best."""
    return tqdm.format_sizeof(count_bytes, "B")


DISK_ERRORS = {
    errno.ENOSPC: "the disk is full: free space or choose another folder",
    errno.EDQUOT: "the disk quota is used up: free space or choose another folder",
    errno.EFBIG: "the file system allows no file of that size: choose another folder",
    errno.EACCES: "no permission: choose a folder you can write, or change its permissions",
    errno.EPERM: "no permission: choose a folder you can write, or change its permissions",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOTDIR: "there is a file where a folder is needed: move it away or choose another folder",
    errno.EEXIST: "there is a file where a folder is needed: move it away or choose another folder",
    errno.EISDIR: "there is a folder where a file is needed: move it away",
    errno.ENOENT: "check the path",
}


def explain_os_error(error: OSError, path: Path | str) -> DataError:
    """Turn an operating-system error on `path` into a message with a next step."""
    advice = DISK_ERRORS.get(error.errno or 0, "check the path and the disk")
    return DataError(f"{path}: {error.strerror or error}; {advice}")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write a temporary file next to `path`, which replaces it only when the block ends without an error."""
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
def exclusive(path: Path, wait: bool = False) -> Iterator[int]:
    """Hold `path` as a lock, so that two commands do not write to one folder. DataError when it is held.

    wait: until it is free, where others hold it for moments.

    The system lets go of it when the process ends, however it ends, and so have all that have inherited the
    descriptor, which this yields.
    """
    import fcntl  # absent on Windows, where only these tools, not the sample, go without

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise explain_os_error(error, path) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise DataError(f"{path}: another command is writing to {path.parent}; wait for it") from error
        yield descriptor
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


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None where the file is absent. DataError, in one sentence, for all else."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise explain_os_error(error, path) from error
    except RecursionError as error:
        raise DataError(f"{path}: nested too deeply; delete it and start again") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise DataError(f"{path}: not JSON ({error}); delete it and start again") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: holds {type(found).__name__}, expected a JSON object; delete it and start "
                        "again")
    return found


def is_count(value: Any) -> bool:
    """Whether a value of a JSON file is a whole number that can count something."""
    return type(value) is int and 0 <= value < 1 << 63  # true is an int, too


def is_range(value: Any) -> bool:
    """Whether a value of a JSON file is [first, stop) as a list."""
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value)) and value[0] <= value[1]


def is_string(value: Any) -> bool:
    """Whether a value of a JSON file is text."""
    return isinstance(value, str)


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
