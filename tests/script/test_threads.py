"""On a CPU a run takes the number of threads that trains fastest there, unless the user names one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import train_gpt
from tests.support.clock import counted_clock
from tests.support.loaders import write_shards
from tests.support.models import tiny_config
from tests.support.processes import Lab
from train_gpt import Config, Kernels, Machine, Training

PLAIN = Kernels(train_gpt.attention_sdpa, train_gpt.mlp_plain, train_gpt.heads_plain, train_gpt.xsa_plain, [])


@pytest.fixture(autouse=True)
def threads_of_this_process() -> Iterator[None]:
    """Tests take one thread; here some take more for a moment."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def training_in(folder: Path, numbers: tuple[int, ...] = (4, 2, 1), **changes: object) -> Iterator[Training]:
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


def take_ms(monkeypatch: pytest.MonkeyPatch, ms: dict[int, list[float]]) -> list[int]:
    """Let a step on each number of threads take what is next for it; the list gets the numbers asked for."""
    asked: list[int] = []

    def step(training: Training, progress: float, threads: int) -> float:
        torch.set_num_threads(threads)
        turn = asked.count(threads)
        asked.append(threads)
        return ms[threads][turn % len(ms[threads])]

    monkeypatch.setattr(train_gpt, "step_on_threads", step)
    return asked


@pytest.mark.parametrize(
    ("ms", "chosen"),
    [
        ({1: [44], 2: [30], 4: [40]}, 2),
        ({1: [37], 2: [30], 4: [25]}, 4),
        ({1: [50], 2: [60], 4: [70]}, 1),
        ({1: [30.1], 2: [30], 4: [29.9]}, 1),  # what others cannot tell apart needs no more threads
        ({1: [40], 2: [30, 30, 90], 4: [40]}, 2),  # one step that something else disturbed
        ({1: [85], 2: [100], 4: [900]}, 1),  # all threads are far too many: fewer are tried all the same
    ],
)
def test_the_fastest_number_is_taken(
    ms: dict[int, list[float]], chosen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with training_in(tmp_path) as training:
        asked = take_ms(monkeypatch, ms)
        train_gpt.choose_threads(training)
        assert torch.get_num_threads() == training.threads == chosen
        assert len(asked) == 1 + 3 * train_gpt.THREADS_TRIED_STEPS
        assert training.state()["threads"] == chosen
    assert f"train_threads:{chosen} of 4, by ms a step 4:" in capsys.readouterr().out


def test_nothing_is_learned_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real steps, which do change the weights, and are undone."""
    taken: list[int] = []
    train_step = train_gpt.train_step

    def watched(training: Training, progress: float) -> Any:
        taken.append(torch.get_num_threads())
        return train_step(training, progress)

    monkeypatch.setattr(train_gpt, "train_step", watched)
    with training_in(tmp_path, (2, 1)) as training:
        before = training.state()
        train_gpt.choose_threads(training)
        after = training.state()
        assert set(taken) == {1, 2}
        same(before["optimizer"], after["optimizer"])
        assert after["loader"] == before["loader"] and after["step"] == before["step"]


def same(mine: Any, other: Any) -> None:
    """Fail unless two states are the same, bit for bit."""
    if isinstance(mine, torch.Tensor):
        assert torch.equal(mine, other)
    elif isinstance(mine, dict):
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            same(value, other[key])
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other)
        for value, partner in zip(mine, other, strict=True):
            same(value, partner)
    else:
        assert mine == other


def test_numbers_that_are_much_slower_are_tried_once_and_fewer_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 64 threads that pay, a single one would take a minute to tell what is known."""
    with training_in(tmp_path) as training:
        asked = take_ms(monkeypatch, {4: [10], 2: [19], 1: [38]})
        train_gpt.choose_threads(training)
        assert asked == [4, 4, 2, *[4] * (train_gpt.THREADS_TRIED_STEPS - 1)]
        assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("seconds_a_step", "steps"), [(20.0, 1), (3.0, 4)])
def test_trying_ends_in_time(
    seconds_a_step: float, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first step takes all of it the operations are large, and all threads are taken."""
    clock = [0.0]
    with training_in(tmp_path) as training:
        asked = take_ms(monkeypatch, {4: [30], 2: [20], 1: [30]})
        step = train_gpt.step_on_threads  # that of `take_ms`

        def slow_step(*given: Any) -> float:
            clock[0] += seconds_a_step
            return step(*given)

        monkeypatch.setattr(train_gpt, "step_on_threads", slow_step)
        monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: clock[0])
        train_gpt.choose_threads(training)
        assert len(asked) == steps
        assert training.threads == torch.get_num_threads() == (4 if steps == 1 else 2)


@pytest.mark.parametrize("numbers", [(), (4, 2, 1)], ids=["named by the user", "no warm-up"])
def test_no_trial_where_the_user_wants_none(
    numbers: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(4 if numbers else 3)
    before = torch.get_num_threads()
    with training_in(tmp_path, numbers, WARMUP_STEPS=0 if numbers else 1) as training:
        asked = take_ms(monkeypatch, {})
        train_gpt.choose_threads(training)
        assert not asked and torch.get_num_threads() == training.threads == before


@pytest.mark.parametrize(
    ("numbers", "expected"), [((4, 2, 1), 3), ((8, 4, 2, 1), 3), ((2, 1), 2), ((), 1)],
    ids=["the same machine", "a larger one", "a smaller one", "named by the user"],
)  # fmt: skip
def test_a_resumed_run_has_as_many_threads_as_before(
    numbers: tuple[int, ...], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other numbers add up in another order; where there are not as many, the machine is tried anew."""
    torch.set_num_threads(3)
    with training_in(tmp_path, ()) as training:
        training.run.directory = tmp_path
        training.save()
        training.finish_saving()
    torch.set_num_threads(numbers[0] if numbers else 1)
    with training_in(tmp_path, numbers) as training:
        training.run.directory = tmp_path
        training.resume()
        asked = take_ms(monkeypatch, {2: [0.3], 1: [0.5]})
        train_gpt.choose_threads(training)
        assert training.threads == torch.get_num_threads() == expected
        assert bool(asked) == (numbers == (2, 1))
        assert training.state()["threads"] == expected


def test_which_numbers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Config(device="cpu", compute_dtype="float32")
    for threads, numbers in ((1, ()), (2, (2, 1)), (6, (6, 3, 1)), (8, (8, 4, 2, 1))):
        torch.set_num_threads(threads)
        assert train_gpt.this_machine(cpu, {}).threads_to_try == numbers
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            assert train_gpt.this_machine(cpu, {name: "3"}).threads_to_try == ()
    named = Config(device="cpu", cpu_threads=2)
    assert train_gpt.this_machine(named, {}).threads_to_try == ()
    # A compiler's loops are made for one number of threads.
    monkeypatch.setattr(train_gpt, "check_cpp_compiler", lambda environ: None)
    torch.set_num_threads(2)
    assert train_gpt.this_machine(Config(device="cpu", compile="1"), {}).threads_to_try == ()


# To be run before the script: two threads, whatever machine this is, and every phase says how many it has.
TWO_THREADS = """
import contextlib, torch
torch.set_num_threads(2)
enter = contextlib._GeneratorContextManager.__enter__
def begin(manager):
    name = manager.args[-1:]
    result = enter(manager)
    if manager.gen.__name__ == "phase":
        print("threads in", *name, torch.get_num_threads(), flush=True)
    return result
contextlib._GeneratorContextManager.__enter__ = begin
"""


def test_a_run_tries_before_its_clock_and_trains_as_one_that_names_its_number(lab: Lab) -> None:
    """By a clock that counts passes both numbers are alike, so one thread is taken, to the end of the run."""
    fault = TWO_THREADS + counted_clock()
    tried = lab.succeed(fault=fault, OMP_NUM_THREADS=None, WARMUP_STEPS=1, RUN_ID="tried")
    assert "threads in warmup 2" in tried.out and "threads in train 1" in tried.out
    assert "threads in eval_roundtrip 1" in tried.out
    assert tried.out.index("train_threads:1 of 2") < tried.out.index("step:1/6")
    named = lab.succeed(fault=counted_clock(), CPU_THREADS=1, WARMUP_STEPS=1, RUN_ID="named")
    assert "train_threads:" not in named.out
    steps = []
    hashes = []
    for name in ("tried", "named"):
        directory = tried.runs_dir / name
        summary = json.loads((directory / "summary.json").read_text("utf-8"))
        assert summary["train_threads"] == 1
        lines = (directory / "metrics.jsonl").read_text("utf-8").splitlines()
        events = [event for event in map(json.loads, lines) if event["event"] == "train"]
        steps.append([(event["step"], event["train_loss"], event["train_time_ms"]) for event in events])
        hashes.append(summary["stream_hash"])
    assert hashes[0] == hashes[1]
    # Not bit for bit: the first weights are drawn on all threads, which round differently.
    assert steps[0] == [pytest.approx(figures, rel=1e-5) for figures in steps[1]]
