"""On a CPU training takes the number of threads that is fastest there, unless the user names one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import train_gpt
from tests.support.loaders import write_shards
from tests.support.models import tiny_config
from train_gpt import Config, Kernels, Machine, Training

PLAIN = Kernels(train_gpt.attention_sdpa, train_gpt.mlp_plain, train_gpt.heads_plain, train_gpt.xsa_plain, [])


@pytest.fixture(autouse=True)
def threads_of_this_process() -> Iterator[None]:
    """Tests take one thread; here some take more for a moment."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def training_in(folder: Path, numbers: tuple[int, ...] = (1, 2, 4), **changes: object) -> Iterator[Training]:
    """A training that has not begun, on a machine with these numbers of threads to try."""
    settings = {
        "VOCAB_SIZE": 4096,
        "WARMUP_STEPS": 1,
        "MAX_WALLCLOCK_SECONDS": 0,
        "ITERATIONS": 20,
        **changes,
    }
    run = train_gpt.Run(Machine(threads_to_try=numbers))
    shards = write_shards(folder)
    training = Training(tiny_config(**settings), run, shards, None, PLAIN)  # type: ignore[arg-type]
    with contextlib.closing(training):
        yield training


def take_seconds(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, list[float]]) -> list[int]:
    """Let a step on each number of threads take what is next for it; the list gets the numbers asked for."""
    asked: list[int] = []
    measure = train_gpt.seconds_of_step

    def step(training: Training, progress: float, threads: int) -> float:
        measure(training, progress, threads)
        asked.append(threads)
        return seconds[threads][asked.count(threads) % len(seconds[threads])]

    monkeypatch.setattr(train_gpt, "seconds_of_step", step)
    return asked


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: [0.5], 2: [0.3], 4: [0.4]}, 2),
        ({1: [0.5], 2: [0.3], 4: [0.2]}, 4),
        ({1: [0.5], 2: [0.6], 4: [0.7]}, 1),
        ({1: [0.301], 2: [0.3], 4: [0.299]}, 1),  # what others cannot tell apart needs no more threads
        ({1: [0.4], 2: [0.3, 0.3, 0.9], 4: [0.4]}, 2),  # one step that something else disturbed
    ],
)
def test_the_fastest_number_is_taken_and_nothing_is_learned_by_trying(
    seconds: dict[int, list[float]], chosen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with training_in(tmp_path) as training:
        before = training.state()
        asked = take_seconds(monkeypatch, seconds)
        train_gpt.choose_threads(training)
        after = training.state()
        assert torch.get_num_threads() == training.threads == chosen
        assert set(asked) == {1, 2, 4} and len(asked) == 1 + 3 * train_gpt.THREADS_TRIED_STEPS
        same_optimizer(before["optimizer"], after["optimizer"])
        assert after["loader"] == before["loader"] and after["step"] == before["step"]
    assert f"threads:{chosen} of 4" in capsys.readouterr().out


def same_optimizer(mine: Any, other: Any) -> None:
    """Fail unless two states are the same, bit for bit."""
    if isinstance(mine, torch.Tensor):
        assert torch.equal(mine, other)
    elif isinstance(mine, dict):
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            same_optimizer(value, other[key])
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other)
        for value, partner in zip(mine, other, strict=True):
            same_optimizer(value, partner)
    else:
        assert mine == other


def test_long_steps_take_all_threads_without_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training_in(tmp_path) as training:
        asked = take_seconds(monkeypatch, {4: [2.0]})
        train_gpt.choose_threads(training)
        assert asked == [4] and torch.get_num_threads() == 4


@pytest.mark.parametrize(
    ("numbers", "changes"), [((), {}), ((1, 2), {"WARMUP_STEPS": 0})], ids=["named by the user", "no warm-up"]
)
def test_no_trial_where_the_user_wants_none(
    numbers: tuple[int, ...], changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    with training_in(tmp_path, numbers, **changes) as training:
        asked = take_seconds(monkeypatch, {})
        train_gpt.choose_threads(training)
        assert not asked and torch.get_num_threads() == before


def test_a_resumed_run_has_as_many_threads_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over other parts are other sums; on a machine that has not as many, they are tried anew."""
    with training_in(tmp_path) as training:
        training.run.directory = tmp_path
        training.threads = 2
        training.save()
        training.finish_saving()
    for numbers, expected in (((1, 2, 4), 2), ((1, 3), 3), ((), 0)):
        with training_in(tmp_path, numbers) as training:
            training.run.directory = tmp_path
            training.resume()
            asked = take_seconds(monkeypatch, {1: [0.5], 3: [0.3]})
            train_gpt.choose_threads(training)
            assert training.threads == expected
            assert bool(asked) == (expected == 3)


def test_which_numbers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Config(device="cpu", compute_dtype="float32")
    for threads, numbers in ((1, ()), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))):
        torch.set_num_threads(threads)
        assert train_gpt.this_machine(cpu, {}).threads_to_try == numbers
        assert train_gpt.this_machine(cpu, {"OMP_NUM_THREADS": "3"}).threads_to_try == ()
    named = Config(device="cpu", cpu_threads=2)
    assert train_gpt.this_machine(named, {}).threads_to_try == ()
    # A compiler's loops are made for one number of threads.
    monkeypatch.setattr(train_gpt, "check_cpp_compiler", lambda environ: None)
    torch.set_num_threads(2)
    assert train_gpt.this_machine(Config(device="cpu", compile="1"), {}).threads_to_try == ()
