"""A GPU in miniature, on a clock that only it and its host move: what timing and traces see of a device.

    python -m tests.support.fake_gpu FAULT kernels|run OUT

starts a program of gpu-check on such a card, which has a fault, or `none`.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from torch import Tensor

import train_gpt
from benchmarks import gpu_check, kernels

US = 1000  # nanoseconds
# What the host needs to ask for each part of a step, and the device to do it.
HOST_US = {"batch": 5, "forward": 10, "backward": 20, "grad_clip": 2, "optimizer": 8}
DEVICE_US = {"batch": 0, "forward": 30, "backward": 60, "grad_clip": 20, "optimizer": 70}
COPY_US = 5
STAGE_MS = 1.5
STEPS_AHEAD = 2  # that the host may be ahead of the device


class FakeGpu:
    """Work that the host gives it at once and it does later, in order; its own clock may run differently."""

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate  # of its clock beside the host's
        self.host_ns = 10**9  # now
        self.free_ns = 0  # when all work that it has been given is done
        self.waits = 0  # how often the host waited for it
        self.did: list[tuple[str, int, int]] = []  # begin and end of each piece of work, with its name
        self.ends_of_steps: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let train_gpt take it for torch's GPU and for its clock."""
        monkeypatch.setattr(train_gpt.torch.cuda, "Event", self.Event)
        monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: self.host_ns / 1e9)

    def Event(self, enable_timing: bool) -> FakeEvent:
        """A torch.cuda.Event of this GPU."""
        assert enable_timing
        return FakeEvent(self)

    def launch(self, name: str, host_us: int, device_us: int) -> None:
        """So long for the host to ask for it, and so long for the device to do."""
        self.host_ns += host_us * US
        start = max(self.free_ns, self.host_ns)
        self.free_ns = start + device_us * US
        self.did.append((name, start, self.free_ns))

    def step(self, timer: train_gpt.StepTimer, number: int, micro_steps: int = 1) -> str:
        """What the script does in a step, as far as time goes; its line."""
        timer.trace.begin(number)
        timer.begin(number)
        for _ in range(micro_steps):
            for part in ("batch", "forward", "backward"):
                self._part(timer, part)
        for part in ("optimizer", "grad_clip", "optimizer"):
            self._part(timer, part)
        line = timer.end(STAGE_MS, micro_steps)
        # The host is a few steps ahead of the device, and no more.
        self.ends_of_steps.append(self.free_ns)
        if len(self.ends_of_steps) > STEPS_AHEAD:
            self.host_ns = max(self.host_ns, self.ends_of_steps[-1 - STEPS_AHEAD])
        return line

    def _part(self, timer: train_gpt.StepTimer, part: str) -> None:
        """One part of a step, and its lap; a batch comes with the marks of its copy."""
        copy = None
        if part == "batch":
            copy = train_gpt.CopyMarks(self.Event(True), self.Event(True))
            copy.begin.ns = self.host_ns - 2 * COPY_US * US
            copy.end.ns = self.host_ns - COPY_US * US
        self.launch(part, HOST_US[part], DEVICE_US[part])
        timer.lap(part, copy)


class FakeEvent:
    """A moment in the work of a GPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.ns = 0

    def record(self) -> None:
        """It is when all that was asked for before is done."""
        self.ns = max(self.gpu.free_ns, self.gpu.host_ns)

    def query(self) -> bool:
        """Whether it is over."""
        return self.ns <= self.gpu.host_ns

    def synchronize(self) -> None:
        """Wait for it."""
        self.gpu.waits += 1
        self.gpu.host_ns = max(self.gpu.host_ns, self.ns)

    def elapsed_time(self, later: FakeEvent) -> float:
        """Milliseconds by the GPU's clock."""
        assert self.query() and later.query(), "an event was asked that is not over"
        return self.gpu.rate * (later.ns - self.ns) / 1e6


# Both passes of each implementation.
ATTENTION_US = {"fa3": 500, "varlen": 800, "sdpa": 2000}
KERNEL_US = {"mlp": 900, "heads": 450}
PLAIN_US = {"mlp": 1500, "heads": 800}
STEP_SECONDS = {False: 0.085, True: 0.125}
CALIBRATION_SECONDS = 0.15  # of a micro-batch
PASS_SECONDS = 0.005  # of a scoring pass, and with adapters, besides its tokens
TOKEN_SECONDS = 1e-6
ROOF = kernels.Roof(tflops=0.13, gb_per_s=0.26)
CARD = FakeGpu()


@torch.library.custom_op("fake_gpu::busy", mutates_args=())
def busy(x: Tensor, us: int) -> Tensor:
    """The same numbers, after so long on the card."""
    CARD.launch("busy", 0, us)
    return x.clone()


busy.register_fake(lambda x, us: torch.empty_like(x))
busy.register_autograd(lambda ctx, gradient: (gradient, None))


def on_card(function: Callable[..., Any], us: int) -> Callable[..., Any]:
    """The function, which keeps the card busy for so long."""
    return lambda first, *others: function(busy(first, us), *others)


def bench(run: Callable[[], object], return_mode: str = "mean") -> float:
    """In the place of Triton's do_bench: the milliseconds that the card is busy."""
    begin_ns = CARD.free_ns
    run()
    return (CARD.free_ns - begin_ns) / 1e6


def package(us: int) -> Callable[..., Tensor]:
    """An attention package's function: attention inside documents, (N, H, E). 0: it does not run here."""

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_q: int, max_k: int, causal: bool = False,
    ) -> Tensor:
        if us == 0:
            raise RuntimeError("no kernel image is available for execution on the device")
        place_N = torch.arange(len(q))
        document_N = torch.searchsorted(cu_seqlens_q.long(), place_N, right=True)
        seen_NN = (document_N[:, None] == document_N) & (place_N[:, None] >= place_N)
        qkv = (tensor.transpose(0, 1)[None] for tensor in (busy(q, us), k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*qkv, seen_NN, enable_gqa=True)[0].transpose(0, 1)

    return varlen


class Card(train_gpt.Machine):
    """A CPU that calls itself a GPU."""

    @property
    def on_gpu(self) -> bool:
        """So it tries the implementations for one."""
        return True


def install_implementations(fault: str) -> None:
    """The implementations of all settings, each with its time."""
    plain = []
    for name, kernel_us in KERNEL_US.items():
        function = getattr(train_gpt, f"{name}_plain")
        plain.append(on_card(function, PLAIN_US[name]))
        times = 2 if fault == "slow kernel" else 1
        for kernel in [kernel for kernel in vars(train_gpt) if kernel.startswith(f"{name}_fused")]:
            setattr(train_gpt, kernel, on_card(function, times * kernel_us))
    train_gpt.xsa_fused = train_gpt.xsa_plain
    train_gpt.attention_sdpa = on_card(train_gpt.attention_sdpa, ATTENTION_US["sdpa"])
    train_gpt.Ops.__new__.__defaults__ = (train_gpt.attention_sdpa, *plain, train_gpt.xsa_plain)
    fa3_us = 0 if fault == "fa3 refused" else ATTENTION_US["fa3"]
    packages = {
        "flash_attn_interface": {"flash_attn_varlen_func": package(fa3_us)},
        "torch.nn.attention.varlen": {"varlen_attn": package(ATTENTION_US["varlen"])},
    }
    for name, content in packages.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content, __spec__=ModuleSpec(name, None))
    torch.cuda.Event = CARD.Event
    kernels.measure_roof = lambda: ROOF
    import triton.testing

    triton.testing.do_bench = bench


class CountedTime:
    """In the place of the module `time`: only the work of the card takes any."""

    seconds = 0.0

    def perf_counter(self) -> float:
        """Seconds that were counted."""
        return self.seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def let_take(self, holder: Any, name: str, seconds_of: Callable[..., float]) -> None:
        """Let a function take so many seconds, by what it is given."""
        function = getattr(holder, name)

        def counted(*given: Any) -> Any:
            self.seconds += seconds_of(*given)
            return function(*given)

        setattr(holder, name, counted)


def install_run(fault: str) -> None:
    """The times of what a run asks for, and the faults of what is compiled."""
    counted = CountedTime()
    train_gpt.time = gpu_check.time = counted

    def of_step(training: Any, progress: float, *_: float) -> float:
        return STEP_SECONDS[train_gpt.loop_is_on(progress, training.config)]

    counted.let_take(train_gpt, "train_step", of_step)

    def of_chunk(scorer: Any, chunk: Any, *_: Any) -> float:
        return PASS_SECONDS + TOKEN_SECONDS * len(chunk.documents) * (chunk.stop - chunk.first)

    counted.let_take(train_gpt.DocumentScorer, "read", of_chunk)
    counted.let_take(train_gpt.WindowScorer, "_score_batch", lambda *_: PASS_SECONDS)
    collect = train_gpt.collect_hessians
    batch_seconds = CALIBRATION_SECONDS * (4 if fault == "small reserve" else 1)

    def slowly(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            counted.seconds += batch_seconds
            yield batch

    train_gpt.collect_hessians = lambda model, batches: collect(model, slowly(batches))

    if fault == "recompiles":
        torch._dynamo.maybe_mark_dynamic = lambda *_: None
    if fault == "graph break":
        product = train_gpt.low_rank

        def breaking(*given: Any) -> Tensor:
            torch._dynamo.graph_break()
            return product(*given)

        train_gpt.low_rank = breaking


def install_card(fault: str, as_gpu: bool) -> None:
    """What both programs see: a machine, and a compiler that traces whole graphs and runs them."""
    torch.compile = partial(torch.compile, backend="eager")
    this_machine = train_gpt.this_machine

    def machine_of(config: train_gpt.Config, environ: Mapping[str, str]) -> train_gpt.Machine:
        assert config.device == "cuda"
        machine = this_machine(replace(config, device="cpu"), environ)
        if as_gpu:
            return Card(dtype=torch.bfloat16, compiled=True)
        # One rank shows what is compiled. Two would only take longer.
        return replace(machine, compiled=fault != "small reserve" and machine.world_size == 1)

    train_gpt.this_machine = machine_of


if __name__ == "__main__":
    fault, name, out = sys.argv[1:]
    install_card(fault, as_gpu=name == "kernels")
    if name == "kernels":
        install_implementations(fault)
    else:
        install_run(fault)
    sys.exit(gpu_check.run_program(name, out))
