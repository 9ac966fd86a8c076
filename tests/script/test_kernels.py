"""The MLP kernel against its plain twin: exact to rounding, every element written, traceable, fit for GPUs.

Without a GPU it runs in Triton's interpreter (fp32 and fp16), which TRITON_INTERPRET=1 chooses before
Triton is first imported; with a GPU the same tests run the compiled kernel, in bf16 too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import train_gpt
from tests.support.models import tiny_config

triton = pytest.importorskip("triton", reason="Triton is not installed: only the plain twin exists here")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if CUDA else [torch.float32, torch.float16]
needs_runnable_kernels = pytest.mark.skipif(
    not CUDA and not triton.knobs.runtime.interpret,
    reason="no GPU, and TRITON_INTERPRET=1 was not set before Triton was imported",
)

# (tokens, model dim, hidden): the least there is, primes, tile edges, more tiles than programs.
MLP_SHAPES = [(1, 8, 8), (2, 8, 24), (37, 16, 56), (64, 32, 64), (97, 40, 136), (33, 72, 8)]


def random_mlp(tokens: int, dim: int, hidden: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(tokens, dim, generator=generator)
    up_FD = torch.randn(hidden, dim, generator=generator) / dim**0.5
    down_DF = torch.randn(dim, hidden, generator=generator) / hidden**0.5
    return [x_ND, up_FD, down_DF]


def outputs_and_gradients(
    function: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Output, then the gradient of each tensor for a direction that is the same in every dtype."""
    leaves = [t.to(DEVICE, dtype).requires_grad_() for t in tensors]
    out = function(*leaves)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(torch.float16)
    return [out.detach(), *torch.autograd.grad(out, leaves, direction.to(out))]


def assert_as_exact_as_plain(
    fused: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    tensors: list[Tensor],
    dtype: torch.dtype,
) -> None:
    """Worst error against float64 at most 1.1 times that of the plain form plus two units in the last place
    of the largest result."""
    tensors = [t.to(dtype) for t in tensors]
    exact = outputs_and_gradients(plain, tensors, torch.float64)
    ours = outputs_and_gradients(fused, tensors, dtype)
    theirs = outputs_and_gradients(plain, tensors, dtype)
    for position, (reference, got, twin) in enumerate(zip(exact, ours, theirs, strict=True)):
        assert got.shape == twin.shape and got.dtype == twin.dtype and got.isfinite().all()
        largest = max(float(reference.abs().max()), torch.finfo(twin.dtype).tiny)
        ulp = torch.finfo(twin.dtype).eps * 2.0 ** torch.tensor(largest).log2().floor().item()
        allowed = 1.1 * float((twin - reference).abs().max()) + 2 * ulp
        error = float((got - reference).abs().max())
        assert error <= allowed, (
            f"result {position}: error {error / ulp:.2f} ulp, allowed {allowed / ulp:.2f} ulp"
        )


@pytest.fixture
def poisoned() -> Iterator[None]:
    """`torch.empty` returns NaN, so an element that a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@needs_runnable_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", MLP_SHAPES, ids=str)
@pytest.mark.parametrize("slope", [0.5, 0.0, 0.3, -0.25])
def test_mlp_is_as_exact_as_its_twin(
    shape: tuple[int, int, int], slope: float, dtype: torch.dtype, poisoned: None
) -> None:
    assert_as_exact_as_plain(
        lambda *tensors: train_gpt.mlp_fused(*tensors, slope),
        lambda *tensors: train_gpt.mlp_plain(*tensors, slope),
        random_mlp(*shape),
        dtype,
    )


@needs_runnable_kernels
def test_strided_and_offset_operands_give_the_same_result() -> None:
    x_ND, up_FD, down_DF = (t.to(DEVICE) for t in random_mlp(24, 16, 32))
    plain = train_gpt.mlp_fused(x_ND, up_FD, down_DF, 0.5)
    offset = torch.cat((x_ND.new_zeros(4), x_ND.flatten()))[4:].view_as(x_ND)
    assert torch.equal(train_gpt.mlp_fused(offset, up_FD, down_DF, 0.5), plain)
    assert torch.equal(train_gpt.mlp_fused(x_ND.t().contiguous().t(), up_FD, down_DF, 0.5), plain)


@needs_runnable_kernels
@pytest.mark.parametrize(("dim", "hidden", "skipped"), [(18, 32, 0), (16, 30, 0), (16, 32, 1)])
def test_what_tma_cannot_read_is_refused(dim: int, hidden: int, skipped: int) -> None:
    """Rows that are no whole 16 bytes, and a tensor that does not begin at a multiple of them."""
    x_ND, up_FD, down_DF = (t.to(DEVICE) for t in random_mlp(24, dim, hidden))
    x_ND = torch.cat((x_ND.new_zeros(skipped), x_ND.flatten()))[skipped:].view_as(x_ND)
    with pytest.raises(ValueError, match=f"16 bytes; got {dim} and {hidden} columns"):
        train_gpt.mlp_fused(x_ND, up_FD, down_DF, 0.5)


@needs_runnable_kernels
def test_gradients_are_finite_differences() -> None:
    """Along each gradient, a central difference in fp32 gives the gradient's norm."""
    points = [t.to(DEVICE) for t in random_mlp(29, 16, 24)]

    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return train_gpt.mlp_fused(x, up, down, 0.5).double().square().mean()

    leaves = [point.clone().requires_grad_() for point in points]
    for index, gradient in enumerate(torch.autograd.grad(mlp(*leaves), leaves)):
        direction = gradient / gradient.norm()
        before, point, after = points[:index], points[index], points[index + 1 :]
        ahead = mlp(*before, point + 1e-2 * direction, *after)
        behind = mlp(*before, point - 1e-2 * direction, *after)
        slope = float(ahead - behind) / 2e-2
        assert slope == pytest.approx(float(gradient.norm()), rel=3e-3)


@needs_runnable_kernels
def test_the_kernel_writes_inside_its_outputs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are cut from the middle of larger buffers; what surrounds them must stay as it was."""
    guard = 64
    buffers = []

    allocate = Tensor.new_empty

    def guarded(self: Tensor, *shape: int, dtype: torch.dtype | None = None, **options: object) -> Tensor:
        if options:  # the interpreter's own bookkeeping
            return allocate(self, *shape, dtype=dtype or self.dtype, **options)
        size = torch.Size(shape).numel()
        buffer = torch.full((size + 2 * guard,), -7.0, dtype=dtype or self.dtype, device=self.device)
        buffers.append((buffer, size))
        return buffer[guard : guard + size].view(shape)

    monkeypatch.setattr(Tensor, "new_empty", guarded)
    monkeypatch.setattr(torch, "empty_like", lambda tensor: guarded(tensor, *tensor.shape))
    outputs_and_gradients(lambda *t: train_gpt.mlp_fused(*t, 0.5), random_mlp(37, 16, 56), torch.float32)
    assert len(buffers) >= 2
    for buffer, size in buffers:
        assert (buffer[:guard] == -7).all() and (buffer[guard + size :] == -7).all()


def test_the_twin_matches_its_formula() -> None:
    """The twin is the definition, so it is held to the formula written out."""
    x_ND, up_FD, down_DF = (t.double() for t in random_mlp(5, 4, 6))
    pre_NF = x_ND @ up_FD.t()
    act_NF = torch.where(pre_NF > 0, pre_NF**2, 0.3**2 * pre_NF**2)
    torch.testing.assert_close(train_gpt.mlp_plain(x_ND, up_FD, down_DF, 0.3), act_NF @ down_DF.t())


@needs_runnable_kernels
def test_the_operator_passes_opcheck() -> None:
    x_ND, up_FD, _ = (t.to(DEVICE) for t in random_mlp(9, 16, 32))
    torch.library.opcheck(train_gpt.linear_leaky_square, (x_ND, up_FD, None, 0.5))
    torch.library.opcheck(
        train_gpt.linear_leaky_square, (x_ND, up_FD, torch.randn(9, 32, device=DEVICE), 0.5)
    )


@needs_runnable_kernels
@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.gpu), "aot_eager"])
def test_full_graph_compilation_sees_the_other_products(backend: str) -> None:
    """One graph, equal results; the MLP's other products are ordinary nodes that the compiler may fuse."""
    products = []

    def run(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
        return train_gpt.mlp_fused(x_ND.sin(), up_FD, down_DF, 0.5).cos()

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        products.extend(target for target in targets if target in ("aten.mm.default", "aten.addmm.default"))
        return graph

    tensors = random_mlp(21, 12, 20)
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=False)
    for got, want in zip(
        outputs_and_gradients(compiled, tensors, torch.float32),
        outputs_and_gradients(run, tensors, torch.float32),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    from torch._dynamo.backends.common import aot_autograd

    seen = torch.compile(run, backend=aot_autograd(fw_compiler=counting), fullgraph=True, dynamic=False)
    outputs_and_gradients(seen, tensors, torch.float32)
    assert len(products) == 4


SMALL = tiny_config(MODEL_DIM=16, MLP_MULT=2, ROPE_DIMS=8, TRAIN_SEQ_LEN=16, ATTENTION="sdpa", COMPILE=0)
LOSES = {"plain": (2.0, "slow"), "kernel": (math.inf, "PTXAS")}  # what another rank finds


class Card(str):
    """A CPU that calls itself a GPU."""

    type = "cuda"


class StubRun:
    """What `choose_kernels` needs of a run: a device, what the other ranks find, and the log."""

    def __init__(self, device: Any = DEVICE, *found: dict[str, tuple[float, str]]) -> None:
        self.device = device
        self.dtype = torch.float32
        self.found = found
        self.lines: list[str] = []

    def gather(self, found: dict[str, tuple[float, str]]) -> list[dict[str, tuple[float, str]]]:
        return [found, *(other for other in self.found if other.keys() == found.keys())]

    def log(self, line: str) -> None:
        self.lines += [line] if line.startswith("fused_mlp:") else []


def chosen(run: Any, **settings: Any) -> str:
    """The form that would run."""
    _, function = train_gpt.choose_kernels(dataclasses.replace(SMALL, **settings), run)
    return {train_gpt.mlp_plain: "plain", train_gpt.mlp_fused: "kernel"}[function]


def clock(monkeypatch: pytest.MonkeyPatch, plain_ms: float = 2.0, kernel_ms: float = 1.0) -> None:
    """How long each form will be found to take."""
    times_ms = iter((plain_ms, kernel_ms))
    monkeypatch.setattr("triton.testing.do_bench", lambda run, return_mode: next(times_ms))


@pytest.mark.parametrize("asked", ["auto", "0"])
def test_the_plain_form_runs_on_the_cpu(asked: str) -> None:
    run = StubRun(torch.device("cpu"))
    assert chosen(run, fused_mlp=asked) == "plain"
    assert run.lines == ["fused_mlp:plain tried: plain error:0.0e+00"]


def test_without_triton_the_kernel_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_gpt, "triton", None)
    with pytest.raises(train_gpt.ConfigError, match=r"FUSED_MLP=1: kernel .*; set auto"):
        chosen(StubRun(), fused_mlp="1")


@needs_runnable_kernels
def test_auto_takes_what_is_faster_and_logs_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch)
    run = StubRun(Card("cpu"))
    assert chosen(run) == "kernel"
    (line,) = run.lines
    assert line.startswith("fused_mlp:kernel tried: plain error:0.0e+00 ms:2.000 | kernel error:")
    assert line.endswith(" ms:1.000")


@needs_runnable_kernels
@pytest.mark.parametrize(("asked", "form"), [("0", "plain"), ("1", "kernel")])
def test_0_and_1_are_obeyed_once_they_pass(monkeypatch: pytest.MonkeyPatch, asked: str, form: str) -> None:
    monkeypatch.setattr("triton.testing.do_bench", lambda *_, **__: pytest.fail("nothing is to be timed"))
    run = StubRun(Card("cpu"))
    assert chosen(run, fused_mlp=asked) == form
    assert len(run.lines) == 1 and run.lines[0].startswith(f"fused_mlp:{form} tried: {form} error:")


@needs_runnable_kernels
def test_a_kernel_that_fails_is_left_off_by_auto_and_refused_where_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> Tensor:
        raise RuntimeError("PTXAS error\nno kernel image")

    clock(monkeypatch)
    monkeypatch.setattr(train_gpt, "linear_leaky_square", fails)
    run = StubRun(Card("cpu"))
    assert chosen(run) == chosen(run, fused_mlp="0") == "plain"
    assert run.lines[0].endswith(" ms:2.000 | kernel RuntimeError: PTXAS error")
    with pytest.raises(train_gpt.ConfigError, match="FUSED_MLP=1: kernel RuntimeError: PTXAS error;"):
        chosen(run, fused_mlp="1")


@needs_runnable_kernels
def test_a_width_that_tma_cannot_read_is_left_off_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch)
    run = StubRun(Card("cpu"))
    assert chosen(run, model_dim=18) == "plain" and "16 bytes; got 18 and 36 columns" in run.lines[0]
    with pytest.raises(train_gpt.ConfigError, match=r"FUSED_MLP=1: kernel ValueError: .*18 and 36 columns"):
        chosen(run, model_dim=18, fused_mlp="1")


@needs_runnable_kernels
def test_a_kernel_that_one_rank_refuses_runs_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch)
    run = StubRun(Card("cpu"), {"plain": (1.5, ""), "kernel": (0.5, "")}, LOSES)
    assert chosen(run) == "plain" and run.lines[0].endswith(" | kernel PTXAS")
    with pytest.raises(train_gpt.ConfigError, match="FUSED_MLP=1: kernel PTXAS"):
        chosen(StubRun(Card("cpu"), {"kernel": LOSES["kernel"]}), fused_mlp="1")


def _choose_on_rank(rank: int, store: str) -> None:
    """One of two ranks; the kernel, here its twin, fails on the second alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    monkeypatch = pytest.MonkeyPatch()
    times_ms = iter((2.0, 1.0))
    monkeypatch.setattr("triton.testing.do_bench", lambda run, return_mode: next(times_ms))
    twin = train_gpt.mlp_plain
    monkeypatch.setattr(train_gpt, "mlp_fused", lambda *t: twin(*t) if rank == 0 else 1 / 0)
    run = StubRun(Card("cpu"))
    monkeypatch.setattr(run, "gather", functools.partial(train_gpt.Run.gather, SimpleNamespace(world_size=2)))
    assert chosen(run) == "plain" and "kernel ZeroDivisionError" in run.lines[0]
    assert rank == 1 or next(times_ms, None) is None, "rank 0 alone would have taken it"
    torch.distributed.destroy_process_group()


def test_two_ranks_decide_the_same_when_the_kernel_fails_on_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_choose_on_rank, (str(tmp_path / "store"),), nprocs=2)


@needs_runnable_kernels
@pytest.mark.parametrize(
    ("scale", "kernel_ms", "wanted"),
    [(1.0, 1.0, "kernel"), (1.0, 3.0, "plain"), (1.04, 1.0, "plain"), (float("nan"), 1.0, "plain")],
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_auto_keeps_only_what_is_right_and_faster(
    monkeypatch: pytest.MonkeyPatch, scale: float, kernel_ms: float, wanted: str, where: str
) -> None:
    """Faults injected into one result of the kernel and into the clock each turn the kernel off."""
    clock(monkeypatch, kernel_ms=kernel_ms)
    exact = train_gpt.linear_leaky_square

    def faulty(a: Tensor, b: Tensor, pre: Tensor | None, slope: float) -> Tensor:
        here = (pre is None) == (where == "forward")
        return exact(a, b, pre, slope) * (scale if here else 1.0)

    monkeypatch.setattr(train_gpt, "linear_leaky_square", faulty)
    run = StubRun(Card("cpu"))
    assert chosen(run) == wanted
    assert run.lines[0].startswith(f"fused_mlp:{wanted} tried: plain error:0.0e+00 ms:2.000 | kernel error:")
    assert run.lines[0].endswith(f" ms:{kernel_ms:.3f}")


@needs_runnable_kernels
@pytest.mark.parametrize("is_cuda", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_tiles_are_for_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, is_cuda: bool, dtype: torch.dtype
) -> None:
    launched: list[dict[str, Any]] = []

    class Card(torch.Tensor):
        """A CPU tensor that may call itself a GPU's."""

    monkeypatch.setattr(Card, "is_cuda", is_cuda, raising=False)
    card = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    kernel = {(2,): lambda *_, **options: launched.append(options)}
    monkeypatch.setattr(train_gpt, "linear_leaky_square_kernel", kernel)
    a, b = (torch.zeros(8, 16, dtype=dtype).as_subclass(Card) for _ in range(2))
    train_gpt.linear_leaky_square._init_fn(a, b, None, 0.5)
    tile = train_gpt.LARGE_TILE if is_cuda and dtype != torch.float32 else train_gpt.SMALL_TILE
    assert launched == [{"BACKWARD": False, **tile}]


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import train_gpt

def build(kernel, types, constants, capability, **options):
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind != "fp32"}
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature, constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

mlp_types = dict.fromkeys(["a", "b", "pre", "out"], "*bf16") | dict.fromkeys("MNK", "i32") | {"slope": "fp32"}
mlp = train_gpt.linear_leaky_square_kernel
for capability in map(int, sys.argv[1:]):
    hopper, limit = capability == 90, {80: 163, 90: 227}[capability] * 1024  # bytes of shared memory
    for tile in (train_gpt.SMALL_TILE, train_gpt.LARGE_TILE):
        sizes = {name: size for name, size in tile.items() if name.startswith("BLOCK")}
        options = {name: size for name, size in tile.items() if name not in sizes}
        for backward in (False, True):
            binary = build(mlp, mlp_types, {"BACKWARD": backward, **sizes}, capability, **options)
            assert binary.metadata.shared <= limit, (capability, tile, binary.metadata.shared)
            large = tile["BLOCK_M"] >= 64
            assert ("wgmma.mma_async" in binary.asm["ptx"]) == (hopper and large), "Hopper's tensor cores"
            assert ("cp.async.bulk.tensor" in binary.asm["ptx"]) == hopper, "TMA"
print("compiled")
"""


@pytest.mark.parametrize("capability", ["90", pytest.param("80", marks=pytest.mark.slow)])
def test_tiles_compile_for_real_gpus(capability: str, tmp_path: os.PathLike[str]) -> None:
    """Triton's compiler needs no GPU. Tiles fit in shared memory; Hopper gets TMA and its tensor cores."""
    path = os.pathsep.join([os.path.dirname(os.path.abspath(train_gpt.__file__)), *sys.path])
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": path,
    }
    command = [sys.executable, "-c", COMPILE, capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.strip() == "compiled", done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(98_304, 512, 2048), (65_536, 512, 1024), (4_099, 504, 1016)], ids=str)
def test_mlp_at_real_shapes(shape: tuple[int, int, int], poisoned: None) -> None:
    assert_as_exact_as_plain(
        lambda *tensors: train_gpt.mlp_fused(*tensors, 0.5),
        lambda *tensors: train_gpt.mlp_plain(*tensors, 0.5),
        random_mlp(*shape),
        torch.bfloat16,
    )


@pytest.mark.gpu
def test_auto_decides_and_logs_on_a_gpu() -> None:
    run = StubRun(torch.device("cuda"))
    run.dtype = torch.bfloat16
    train_gpt.choose_kernels(train_gpt.Config(micro_batch_tokens=16_384), run)
    assert len(run.lines) == 1 and run.lines[0].count(" ms:") == 2
