"""Loaders over tiny shards whose every token tells where it stands, and faults for their stages."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train_gpt
from data import shards as shard_files
from tests.support.before import before
from tests.support.models import tiny_config

SIZES = (700, 133, 9, 1200)  # tokens per shard; the third is too small for one sequence of 16


def make_config(**changes: Any) -> train_gpt.Config:
    """The settings of a small loader, fields in lower case; values that no run would take are let pass."""
    config = tiny_config(VOCAB_SIZE=8192, TRAIN_SEQ_LEN=16)
    return dataclasses.replace(config, **changes)


def write_shards(folder: Path, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    """Counting shards: every token is its own position in the joined shards, so each one can be checked."""
    start = 0
    for number, size in enumerate(sizes):
        path = folder / f"fineweb_train_{number:06d}.bin"
        shard_files.write_shard(path, np.arange(start, start + size))
        start += size
    return train_gpt.open_shards(str(folder / "fineweb_train_*.bin"))


class WatchedLoader(train_gpt.Loader, contextlib.AbstractContextManager):
    """A loader that a `with` block closes, and that counts the batches which stand ready."""

    def seek(self, step: int, stream_hash: int = 0) -> None:
        """Go to a step, and count from there."""
        self.delivered = 0
        super().seek(step, stream_hash)

    def _stage(self, *given: Any) -> Iterator[Any]:
        self.staged: list[int] = []  # a new one: a thread of before the seek may still add to its own
        return note_each(super()._stage(*given), self.staged)

    def next_batch(self) -> Any:
        """The next micro-batch."""
        batch = super().next_batch()
        self.delivered += 1
        return batch

    def ready(self) -> int:
        """Batches that are staged and not delivered."""
        return len(self.staged) - self.delivered

    def __exit__(self, *error: object) -> None:
        self.close()


def note_each(items: Iterator[Any], noted: list[int]) -> Iterator[Any]:
    """The items, with a note of each one that is made."""
    for number, item in enumerate(items):
        noted.append(number)
        yield item


def open_loader(
    shards: list[Any], rank: int = 0, world_size: int = 1, device: Any = train_gpt.CPU, **changes: Any
) -> WatchedLoader:
    """A loader of one rank, with settings changed."""
    machine = train_gpt.Machine(rank, world_size, device)
    return WatchedLoader(make_config(**changes), shards, machine)


def sequences_of(batch: Any) -> np.ndarray:
    """(B, T + 1) ids of a batch; checks that targets are the inputs one token later."""
    assert batch.inputs_BT.dtype == batch.targets_BT.dtype == torch.int64
    assert torch.equal(batch.inputs_BT[:, 1:], batch.targets_BT[:, :-1])
    return torch.cat((batch.inputs_BT, batch.targets_BT[:, -1:]), dim=1).cpu().numpy()


def take(loader: Any, count: int) -> np.ndarray:
    """The sequences of the next batches."""
    return np.concatenate([sequences_of(loader.next_batch()) for _ in range(count)])


def stream(
    shards: list[Any], steps: int, world_size: int = 1, first_step: int = 0, **changes: Any
) -> tuple[np.ndarray, int]:
    """All ranks' sequences in stream order, and the sum of their hashes."""
    parts = []
    total = 0
    for rank in range(world_size):
        with open_loader(shards, rank, world_size, **changes) as loader:
            loader.seek(first_step)
            parts.append([take(loader, loader.micro_steps) for _ in range(steps)])
            total += loader.stream_hash
    return np.concatenate([part[step] for step in range(steps) for part in parts]), total % 2**64


def loader_threads() -> list[str]:
    """Names of the threads of all loaders."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loader ")]


def drain(loader: Any) -> tuple[list[np.ndarray], BaseException]:
    """Batches until the error, and the error, which must come again when asked again."""
    rows: list[np.ndarray] = []
    try:
        while len(rows) < 10_000:
            rows.append(sequences_of(loader.next_batch()))
    except train_gpt.DataError as error:
        with pytest.raises(train_gpt.DataError):
            loader.next_batch()
        return rows, error
    raise AssertionError("no error in 10,000 batches")


def on_read(monkeypatch: pytest.MonkeyPatch, action: Callable[[Path], Any]) -> None:
    """Do something with the path of each shard before it is read."""
    before(monkeypatch, train_gpt, "read_tokens", lambda shard, *_, **__: action(shard.path))


def on_stage(monkeypatch: pytest.MonkeyPatch, action: Callable[[int, np.ndarray], Any]) -> None:
    """Do something with the stream position of each batch and its ids as they are staged."""
    before(monkeypatch, train_gpt, "hash_sequences", action)
