"""DATA: an order of the tokens that threads, ranks, faults and resumes neither change nor stop."""

import contextlib
import ctypes
import itertools
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from data.shards import write_shard
from tests.support.loaders import (
    drain,
    loader_threads,
    make_config,
    on_read,
    on_stage,
    open_loader,
    sequences_of,
    stream,
    take,
    write_shards,
)
from tests.support.processes import Lab
from tests.support.tiny import tokens_of
from tests.support.waiting import DEADLINE_SECONDS, wait_until, within


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return write_shards(tmp_path_factory.mktemp("counting"))


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Whatever a test does, its loader's threads are gone soon after."""
    yield
    end = time.monotonic() + DEADLINE_SECONDS
    while loader_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not loader_threads()


def header(*fields: int) -> bytes:
    """The head of a shard with any fields, right or wrong."""
    return np.array([*fields] + [0] * (256 - len(fields)), "<i4").tobytes()


def sequences_from(config: Any, shards: list[Any], position: int) -> Iterator[tuple[int, int]]:
    """(shard, sequence) at `position` of the stream and on, by the visits; they join up."""
    for begin, shard, sequences in train_gpt.shard_visits(config, shards, position):
        assert begin <= position < begin + len(sequences)
        yield from ((int(shard.path.name), int(i)) for i in sequences[position - begin :])
        position = begin + len(sequences)


def rss_bytes() -> int:
    """Memory of this process that is resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_the_stream_is_the_documented_one_and_stays_it(shards: list[Any]) -> None:
    """Golden values keep published runs valid."""
    rows, stream_hash = stream(shards, 12)
    assert np.array_equal(rows, rows[:, :1] + np.arange(17))
    assert rows[:8, 0].tolist() == [780, 748, 700, 764, 732, 812, 716, 796]
    assert f"{stream_hash:016x}" == "823f6cffeaf9e2a0"


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=6), seq_len=st.integers(1, 20),
    seed=st.integers(0, 2**63 - 1), shuffle=st.booleans(), epoch=st.integers(0, 3),
)
def test_an_epoch_has_all_once(sizes: list[int], seq_len: int, seed: int, shuffle: bool, epoch: int) -> None:
    all_shards = [train_gpt.Shard(Path(f"{number}"), size) for number, size in enumerate(sizes)]
    config = make_config(train_seq_len=seq_len, seed=seed, shuffle=shuffle)
    if max(sizes) <= seq_len:
        with pytest.raises(train_gpt.DataError, match=rf"holds {seq_len + 1} tokens \(TRAIN_SEQ_LEN"):
            next(train_gpt.shard_visits(config, all_shards, 0))
        return
    expected = [(number, i) for number, size in enumerate(sizes) for i in range((size - 1) // seq_len)]
    first = epoch * len(expected)
    seen = list(itertools.islice(sequences_from(config, all_shards, first), len(expected)))
    assert sorted(seen) == expected
    assert shuffle or seen == expected
    reached = [next(sequences_from(config, all_shards, first + at)) for at in range(len(expected))]
    assert reached == seen  # without replaying


@pytest.mark.parametrize(("world_size", "prefetch", "copy_stream", "depth"), [
    (1, True, True, 1), (2, False, False, 2), (4, True, True, 1), (8, True, False, 3),
])
def test_every_geometry_sees_the_same_steps_at_any_speed_of_its_stages(
    shards: list[Any], world_size: int, prefetch: bool, copy_stream: bool, depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Same bytes and hash for any ranks, micro-batches and threads, over shard edges and several epochs."""
    expected, expected_hash = stream(shards, 16, train_prefetch=False)  # two epochs, in several rows at once
    delays = np.random.default_rng(1)
    for stage in (on_read, on_stage):
        stage(monkeypatch, lambda *_: time.sleep(delays.uniform(0, 0.0005)))
    threads = {"train_prefetch": prefetch, "train_copy_stream": copy_stream, "train_prefetch_queue": depth}
    for micro_batch_tokens in (16, 512):  # a row, or all that a rank has
        rows, stream_hash = stream(shards, 16, world_size, micro_batch_tokens=micro_batch_tokens, **threads)
        assert np.array_equal(rows, expected)
        assert stream_hash == expected_hash


def test_small_shards_and_odd_ids(tmp_path: Path) -> None:
    files = write_shards(tmp_path / "small", (12,))
    with pytest.raises(train_gpt.ConfigError, match="TRAIN_SEQ_LEN=12 tokens"):
        open_loader(files, train_seq_len=12, train_batch_tokens=384, micro_batch_tokens=11)
    write_shard(tmp_path / "fineweb_train_000000.bin", np.arange(65536))
    files = train_gpt.open_shards(str(tmp_path / "*.bin"))
    geometry = {"train_seq_len": 65535, "train_batch_tokens": 65535, "micro_batch_tokens": 65535}
    with open_loader(files, vocab_size=65536, **geometry) as loader:
        assert np.array_equal(take(loader, 2), np.tile(np.arange(65536), (2, 1)))


@settings(max_examples=20, deadline=None)
@given(data=st.data(), rows=st.integers(1, 4), seq_len=st.integers(1, 9), first=st.integers(0, 2**40))
def test_the_hash_sees_every_bit(data: st.DataObject, rows: int, seq_len: int, first: int) -> None:
    ids = st.lists(st.integers(0, 65535), min_size=seq_len + 1, max_size=seq_len + 1)
    block = np.array(data.draw(st.lists(ids, min_size=rows, max_size=rows)), np.uint16)
    got = train_gpt.hash_sequences(first, block)
    alone = [train_gpt.hash_sequences(first + i, row[None]) for i, row in enumerate(block)]
    assert got == sum(alone) % 2**64
    row, bit = data.draw(st.integers(0, rows - 1)), 1 << data.draw(st.integers(0, 15))
    for place in range(seq_len + 1):
        block[row, place] ^= bit
        assert got != train_gpt.hash_sequences(first, block)
        block[row, place] ^= bit


@pytest.mark.parametrize("prefetch", [False, True])
def test_resume_at_every_step_on_any_number_of_ranks(shards: list[Any], prefetch: bool) -> None:
    """Each step by new loaders that go on where the last ones ended: over shard edges and epochs."""
    steps = 20
    expected, expected_hash = stream(shards, steps, train_prefetch=False)
    total_hash = 0
    for step in range(steps):
        world_size = (1, 2, 4)[step % 3]
        geometry = {"micro_batch_tokens": 32, "train_prefetch": prefetch}
        loaders = [open_loader(shards, rank, world_size, **geometry) for rank in range(world_size)]
        for loader in loaders:
            # Hashes are added up over the ranks: one of them has what came before.
            loader.seek(step, total_hash if loader.machine.rank == 0 else 0)
        rows = np.concatenate([take(loader, loader.micro_steps) for loader in loaders])
        assert np.array_equal(rows, expected[16 * step : 16 * step + 16])
        total_hash = sum(loader.stream_hash for loader in loaders) % 2**64
        for loader in loaders:
            loader.close()
    assert total_hash == expected_hash


@pytest.mark.parametrize("prefetch", [False, True])
def test_seek_reads_what_it_needs(shards: list[Any], prefetch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs away, no sooner and no later than at once: nothing is read but the shard and those after it."""
    expected, _ = stream(shards, 2, first_step=10_000, train_prefetch=False)
    reads: list[Path] = []
    on_read(monkeypatch, reads.append)
    with open_loader(shards, train_prefetch=prefetch) as loader:
        loader.next_batch()
        reads.clear()
        loader.seek(10_000)
        assert loader.stream_hash == 0, "what came before leaves no trace"
        rows = take(loader, 1)
        assert len(reads) <= 3 and np.array_equal(rows, expected[: len(rows)])


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_staged_batch_is_next(shards: list[Any], prefetch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, expected_hash = stream(shards, 3, train_prefetch=False)
    reads: list[Path] = []
    on_read(monkeypatch, reads.append)
    with open_loader(shards, train_prefetch=prefetch) as loader:
        loader.stage_first()
        assert reads, "the first shard has been read"
        rows = take(loader, 3 * loader.micro_steps)
        assert np.array_equal(rows, expected) and loader.stream_hash == expected_hash


@pytest.mark.parametrize("prefetch", [False, True])
def test_batches_carry_their_document_starts(tmp_path: Path, prefetch: bool) -> None:
    ids = np.random.default_rng(0).integers(1, 5, 2000)
    write_shard(tmp_path / "fineweb_train_000000.bin", ids)
    files = train_gpt.open_shards(str(tmp_path / "*.bin"))
    with open_loader(files, train_prefetch=prefetch) as loader:
        for _ in range(60):
            batch = loader.next_batch()
            assert batch.starts.dtype == torch.int32
            expected = train_gpt.document_starts(batch.inputs_BT.numpy(), loader.config)
            assert batch.starts.tolist() == expected.tolist()
    with open_loader(files, train_prefetch=prefetch, doc_mask=False) as loader:
        assert loader.next_batch().starts.tolist() == [0, 16, 32, 48, 64]


def test_the_next_shard_alone_is_read_ahead_and_holds_nothing_up(
    shards: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While the first shard is in use the second is read; the third only when the first is done with."""
    reads: list[Path] = []
    on_read(monkeypatch, reads.append)
    with open_loader(shards, train_prefetch_queue=1) as loader:
        loader.next_batch()
        wait_until(lambda: len(reads) >= 2)
        time.sleep(0.05)
        assert len(reads) == 2
        visits = train_gpt.shard_visits(loader.config, shards, 0)
        assert reads == [next(visits).shard.path for _ in range(2)]
    # The second shard's read is held until the last batch of the first is delivered: none waits for it.
    files = write_shards(tmp_path / "two", (16 * 40 + 1, 16 * 40 + 1))
    gate = threading.Event()
    seen: list[Path] = []

    def held(path: Path) -> None:
        seen.append(path)
        if len(seen) == 2:
            assert gate.wait(DEADLINE_SECONDS)

    on_read(monkeypatch, held)
    with open_loader(files, train_prefetch_queue=2) as loader:
        for _ in range(10):
            loader.next_batch()
        gate.set()
        loader.next_batch()


def test_batches_belong_to_the_caller_waits_told(shards: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept for as long as one likes, a batch is never written again."""
    with open_loader(shards, train_prefetch=False) as loader:
        # Of a clock that goes on by a millisecond whenever it is read: by a wait, and by the staging in it.
        ticks = itertools.count()
        monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: next(ticks) / 1e3)
        steps = 3
        take(loader, steps * loader.micro_steps)
        assert loader.micro_steps > 1
        assert loader.wait_ms == pytest.approx(3 * steps * loader.micro_steps)
        assert loader.stage_ms == pytest.approx(1)
    with open_loader(shards) as loader:
        kept = [loader.next_batch() for _ in range(40)]
        copies = [(b.inputs_BT.clone(), b.targets_BT.clone(), b.starts.clone()) for b in kept]
        take(loader, 40)
        for batch, (inputs_BT, targets_BT, starts) in zip(kept, copies, strict=True):
            assert torch.equal(batch.inputs_BT, inputs_BT) and torch.equal(batch.targets_BT, targets_BT)
            assert torch.equal(batch.starts, starts)


@pytest.mark.parametrize(("where", "fault", "prefetch"), [
    ("read_tokens", OSError("disk on fire"), False), ("read_tokens", KeyError("k"), True),
    ("read_tokens", SystemExit(3), True), ("hash_sequences", ValueError("bug"), False),
    ("hash_sequences", SystemExit(1), True), ("hash_sequences", GeneratorExit(), True),
])
def test_an_error_arrives_in_order(
    shards: list[Any], where: str, fault: BaseException, prefetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All good batches first, then a DataError with rank, shard and position.

    It has the origin's traceback where the fault is ours to find, and not where a disk has failed.
    """
    expected, _ = stream(shards, 30, world_size=1, train_prefetch=False)
    (_, _, sequences), (_, bad, _) = itertools.islice(train_gpt.shard_visits(make_config(), shards, 0), 2)
    # Whole micro-batches of four out of the first shard, or six of them.
    good = len(sequences) // 4 if where == "read_tokens" else 6

    def fail(place: Path | int, ids_BT: np.ndarray | None = None) -> None:
        if place == bad.path if ids_BT is None else place == 4 * good:
            raise fault

    begins = on_read if where == "read_tokens" else on_stage
    begins(monkeypatch, fail)
    with open_loader(shards, train_prefetch=prefetch) as loader:
        rows, error = within(DEADLINE_SECONDS, lambda: drain(loader))
    assert len(rows) == good and np.array_equal(np.concatenate(rows), expected[: 4 * good])
    shard = str(bad.path) if where == "read_tokens" else "fineweb_train_"
    for part in (shard, f"position {4 * good + 3}", "rank 0", type(fault).__name__):
        assert part in str(error), part
    assert ("in fail" in str(error)) == (not isinstance(fault, OSError))


@pytest.mark.parametrize("name", ["loader disk", "loader stage"])
def test_a_worker_that_is_killed(shards: list[Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception from outside ends a worker between two items: its reader does not wait for ever."""
    with open_loader(shards) as loader:
        loader.next_batch()
        wait_until(lambda: loader.ready() == 2)
        monkeypatch.setattr(train_gpt, "LOADER_TIMEOUT_SECONDS", 0.1)
        (thread,) = (thread for thread in threading.enumerate() if thread.name.startswith(name))
        killed = ctypes.c_ulong(thread.ident)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(killed, ctypes.py_object(SystemExit)) == 1
        within(DEADLINE_SECONDS, lambda: drain(loader))


def test_a_stall_ends_in_an_error(shards: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    on_read(monkeypatch, lambda path: gate.wait(DEADLINE_SECONDS))
    monkeypatch.setattr(train_gpt, "LOADER_TIMEOUT_SECONDS", 0.1)
    with open_loader(shards) as loader:
        with pytest.raises(train_gpt.DataError, match=r"fineweb_train_.*no data within 0.1 s"):
            within(DEADLINE_SECONDS, loader.next_batch)
        gate.set()


@pytest.mark.parametrize("fault", ["truncated", "grown", "vanished", "magic", "count", "replaced", "foreign"])
def test_a_file_that_changes_during_the_run(tmp_path: Path, fault: str) -> None:
    files = write_shards(tmp_path / "data", (16 * 400 + 1, 16 * 8 + 1))
    with open_loader(files, shuffle=False, train_prefetch=False) as loader:
        take(loader, 1)
        path = files[1].path
        content = path.read_bytes()
        changed = {
            "truncated": content[:-2],
            "grown": content + b"\0\0",
            "magic": b"\0" + content[1:],
            "count": content[:8] + (64).to_bytes(4, "little") + content[12 : 1024 + 130],
            "replaced": content[:8] + (64).to_bytes(4, "little") + content[12 : 1024 + 128],
            "foreign": content[:-2] + b"\xff\xff",  # an id beyond the vocabulary
        }
        path.unlink() if fault == "vanished" else path.write_bytes(changed[fault])
        rows, error = within(DEADLINE_SECONDS, lambda: drain(loader))
    assert len(rows) == 99 and str(path) in str(error)
    assert isinstance(error, train_gpt.DataError) and "\n" not in str(error)  # a user can undo it


@pytest.mark.parametrize("content,message", [
    (b"", "begins with b''"),
    (header(20240520, 2, 8) + b"\0" * 16, "version 2 of the format, expected 1"),
    (header(20240521, 1, 8) + b"\0" * 16, "magic 20240520"),
    (header(20240520, 1, 8) + b"\0" * 15, "1039 bytes, expected 1040 for the 8 tokens"),
    (header(20240520, 1, 7) + b"\0" * 15, "1039 bytes, expected 1038 for the 7 tokens"),
    (header(20240520, 1, -5), "its header says -5 tokens"),
    (header(20240520, 1, 0), "its header says 0 tokens"),
])
def test_bad_shards_are_refused_at_the_start(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "fineweb_train_000000.bin").write_bytes(content)
    with pytest.raises(train_gpt.DataError, match=re.escape(message)) as error:
        train_gpt.open_shards(str(tmp_path / "*.bin"))
    assert "fineweb_train_000000.bin" in str(error.value)


def test_closing_in_any_state_leaves_nothing(shards: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for state in ("fresh", "used", "full", "moved", "synchronous") * 5:
        loader = open_loader(shards, train_prefetch_queue=2, train_prefetch=state != "synchronous")
        if state in ("used", "full", "synchronous"):
            loader.next_batch()
        if state == "full":
            wait_until(lambda loader=loader: loader.ready() == 2)
        if state == "moved":
            loader.seek(5)
        within(DEADLINE_SECONDS / 2, loader.close)
        loader.close()
        with pytest.raises(train_gpt.DataError, match="StopIteration"):
            loader.next_batch()
    wait_until(lambda: not loader_threads())
    gate = threading.Event()
    on_read(monkeypatch, lambda path: gate.wait(DEADLINE_SECONDS))
    loader = open_loader(shards)
    wait_until(lambda: len(loader_threads()) == 2)
    # The reader hangs for as long as the gate is shut: `close` does not wait for it.
    within(DEADLINE_SECONDS / 2, loader.close)
    assert not gate.is_set()
    gate.set()


@pytest.mark.parametrize("batches", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_batches_are_the_oracles_with_flat_memory(shards: list[Any], batches: int) -> None:
    """Threads and resident memory after the first tenth are those at the end; the bytes are the oracle's."""
    with open_loader(shards) as loader, open_loader(shards, train_prefetch=False) as oracle:
        for index in range(batches):
            if index == batches // 10:
                threads = threading.active_count()
                memory = rss_bytes()
            assert np.array_equal(sequences_of(loader.next_batch()), sequences_of(oracle.next_batch()))
        assert loader.stream_hash == oracle.stream_hash
        assert threading.active_count() == threads
        assert rss_bytes() - memory < 4 << 20


@pytest.mark.parametrize("targets", [0, 500])
def test_validation_tokens_are_the_shards_joined(
    lab: Lab, targets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_gpt, "shipped_code", bytes)  # slow, and not looked at
    lab = lab.copy_dataset()
    path = lab.dataset / "fineweb_val_000000.bin"
    ids = tokens_of(path)
    write_shard(path, ids[:500])
    write_shard(lab.dataset / "fineweb_val_000001.bin", ids[500:])
    (lab.dataset / "manifest.json").unlink()
    config = train_gpt.Config.from_env(lab.settings(VAL_TOKENS_LIMIT=targets))
    got = train_gpt.preflight(config, train_gpt.Run(train_gpt.Machine()), "").validation
    assert got.tokens.dtype == np.uint16
    assert np.array_equal(got.tokens, ids[: targets + 1] if targets else ids)
    assert bool(got.mark) == bool(targets)


class CallsOfCuda(train_gpt.Machine):
    """A machine that takes its CPU for a GPU: what the loader asks CUDA for is noted in `asked`."""

    on_gpu = True
    asked: list[str] = []  # noqa: RUF012

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the loader ask this class instead of CUDA."""
        cls.asked = []
        real_empty = torch.empty

        def empty(*shape: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
            cls.asked.append(f"pinned:{pin_memory}")
            return real_empty(*shape, **more)

        @contextlib.contextmanager
        def on_stream(stream: Any) -> Iterator[None]:
            cls.asked.append("on the copy stream")
            yield
            cls.asked.append("off")

        def event(enable_timing: bool) -> Any:
            return SimpleNamespace(record=lambda: cls.asked.append("mark"), elapsed_time=lambda later: 1.0)

        stream = SimpleNamespace(synchronize=lambda: pytest.fail("the host waited for a copy"))
        step = SimpleNamespace(name="the step", wait_event=lambda event: cls.asked.append("the step waits"))
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.cuda, "Event", event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "stream", on_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: step)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: cls.asked.append("thread on its GPU"))
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda self, stream: cls.asked.append(f"kept for {stream.name}")
        )


@pytest.mark.parametrize(("copy_stream", "expected"), [
    (True, "pinned:True|on the copy stream|mark|mark|off|the step waits|kept for the step"),
    (False, "pinned:True|mark|mark"),
])
def test_the_step_waits_for_the_copy_of_its_batch_and_keeps_it_and_the_host_does_not(
    shards: list[Any], copy_stream: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = stream(shards, 2, train_prefetch=False)
    CallsOfCuda.install(monkeypatch)
    config = make_config(train_copy_stream=copy_stream, train_prefetch=False)
    loader = train_gpt.Loader(config, shards, CallsOfCuda())
    for number in range(2 * loader.micro_steps):
        batch = loader.next_batch()
        assert np.array_equal(sequences_of(batch), rows[4 * number : 4 * number + 4])
        assert CallsOfCuda.asked == expected.split("|") and batch.copy is not None
        CallsOfCuda.asked.clear()
    config = make_config(train_copy_stream=copy_stream)
    with contextlib.closing(train_gpt.Loader(config, shards, CallsOfCuda())) as loader:
        loader.next_batch()
        assert CallsOfCuda.asked.count("thread on its GPU") == 2


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the stream, batches hold their own number, and before that a value that none has."""

    def poison(position: int, ids_BT: np.ndarray) -> None:
        for value in (65535, position // len(ids_BT)):
            ids_BT[...] = value

    on_stage(monkeypatch, poison)


@pytest.mark.gpu
@pytest.mark.parametrize("copy_stream", [True, False])
def test_copies_overlap_and_bring_no_poison(shards: list[Any], poisoned: None, copy_stream: bool) -> None:
    """A kernel of 100 ms goes ahead of each batch on the compute stream: the host runs far ahead of the GPU.

    The ids of a batch are copied on the copy stream, its document starts on the compute stream, which waits
    for them on purpose: of two copies in the profiler's timeline one may run while such a kernel runs.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    tokens = {"train_batch_tokens": 1 << 14, "micro_batch_tokens": 1 << 14, "doc_mask": False}
    batches = 24
    with (
        open_loader(shards, device=device, train_copy_stream=copy_stream, **tokens) as loader,
        torch.profiler.profile(activities=activities) as seen,
    ):
        for index in range(batches):
            torch.cuda._sleep(200_000_000)
            batch = loader.next_batch()
            wrong += (batch.inputs_BT != index).sum() + (batch.targets_BT != index).sum()
            del batch
        torch.cuda.synchronize()
    assert int(wrong) == 0
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in seen.events()]
    copies = [span[1:] for span in spans if "HtoD" in span[0]]
    kernels = [span[1:] for span in spans if "spin" in span[0] or "sleep" in span[0].lower()]
    assert len(copies) >= batches and len(kernels) >= batches
    overlapped = sum(any(a < end and start < b for a, b in kernels) for start, end in copies)
    assert overlapped > 2 / 3 * batches if copy_stream else overlapped == 0
