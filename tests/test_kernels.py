"""Kernels against their plain twins: exact to rounding, every element written, traceable, fit for real GPUs.

Without a GPU the kernels run in Triton's interpreter (fp32 and fp16), which TRITON_INTERPRET=1 chooses before
Triton is first imported; with a GPU the same tests run the compiled kernels, in bf16 too.
"""

from __future__ import annotations

import functools
import itertools
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

triton = pytest.importorskip("triton", reason="Triton is not installed: only the plain twins exist here")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if CUDA else [torch.float32, torch.float16]
needs_runnable_kernels = pytest.mark.skipif(
    not CUDA and not triton.knobs.runtime.interpret,
    reason="no GPU, and TRITON_INTERPRET=1 was not set before Triton was imported",
)

# (tokens, model dim, hidden): ones, primes, tile edges, more tiles than programs.
MLP_SHAPES = [(1, 1, 1), (2, 1, 7), (37, 13, 53), (64, 32, 64), (97, 40, 136), (33, 72, 31)]
# (tokens, vocabulary): one, primes, a power of two, more than one block of columns.
CE_SHAPES = [(1, 1), (1, 2), (7, 131), (5, 1024), (3, 8209)]


def random_mlp(tokens: int, dim: int, hidden: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(tokens, dim, generator=generator)
    up_FD = torch.randn(hidden, dim, generator=generator) / dim**0.5
    down_DF = torch.randn(dim, hidden, generator=generator) / hidden**0.5
    return [x_ND, up_FD, down_DF]


def random_logits(tokens: int, vocab: int, seed: int = 0) -> list[Tensor]:
    """Logits wide enough to reach both branches of tanh, and targets that include the first and last id."""
    generator = torch.Generator().manual_seed(seed)
    targets_N = torch.randint(vocab, (tokens,), generator=generator)
    targets_N[0], targets_N[-1] = 0, vocab - 1
    return [12 * torch.randn(tokens, vocab, generator=generator), targets_N]


def outputs_and_gradients(
    function: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Output, then the gradient of each floating tensor for a direction that is the same in every dtype."""
    leaves = [
        t.to(DEVICE, dtype).requires_grad_() if t.is_floating_point() else t.to(DEVICE) for t in tensors
    ]
    out = function(*leaves)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(torch.float16)
    gradients = torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], direction.to(out))
    return [out.detach(), *gradients]


def assert_as_exact_as_plain(
    fused: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    tensors: list[Tensor],
    dtype: torch.dtype,
    operands: float = 0.0,
) -> None:
    """Worst error against float64 at most 1.1 times that of the plain form plus two units in the last place.

    The unit is that of the largest result, or of `operands` where the output is a difference of such numbers.
    """
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    exact = outputs_and_gradients(plain, tensors, torch.float64)
    ours = outputs_and_gradients(fused, tensors, dtype)
    theirs = outputs_and_gradients(plain, tensors, dtype)
    for position, (reference, got, twin) in enumerate(zip(exact, ours, theirs, strict=True)):
        assert got.shape == twin.shape and got.dtype == twin.dtype and got.isfinite().all()
        largest = max(
            float(reference.abs().max()), torch.finfo(twin.dtype).tiny, 0.0 if position else operands
        )
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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", CE_SHAPES, ids=str)
@pytest.mark.parametrize("softcap", [30.0, 15.0, 0.0])
def test_cross_entropy_is_as_exact_as_its_twin(
    shape: tuple[int, int], softcap: float, dtype: torch.dtype, poisoned: None
) -> None:
    tensors = random_logits(*shape)
    capped_NV = softcap * torch.tanh(tensors[0] / softcap) if softcap else tensors[0]
    assert_as_exact_as_plain(
        lambda logits, targets: train_gpt.softcapped_cross_entropy_fused(logits, targets, softcap),
        lambda logits, targets: train_gpt.softcapped_cross_entropy_plain(logits, targets, softcap),
        tensors,
        dtype,
        operands=float(capped_NV.abs().max()),  # loss = log-sum-exp minus a capped logit
    )


@needs_runnable_kernels
@pytest.mark.parametrize(("scale", "softcap"), [(0.01, 30.0), (1.0, 15.0), (10.0, 5.0), (30.0, 5.0)])
def test_cross_entropy_is_exact_far_from_the_cap_and_deep_inside_it(scale: float, softcap: float) -> None:
    logits_NV, targets_N = random_logits(33, 1024)
    logits_NV *= scale / 12
    assert_as_exact_as_plain(
        lambda logits, targets: train_gpt.softcapped_cross_entropy_fused(logits, targets, softcap),
        lambda logits, targets: train_gpt.softcapped_cross_entropy_plain(logits, targets, softcap),
        [logits_NV, targets_N],
        torch.float32,
        operands=float((softcap * torch.tanh(logits_NV / softcap)).abs().max()),
    )


@needs_runnable_kernels
def test_strided_and_offset_operands_give_the_same_result() -> None:
    x_ND, up_FD, down_DF = (t.to(DEVICE) for t in random_mlp(24, 16, 32))
    plain = train_gpt.mlp_fused(x_ND, up_FD, down_DF, 0.5)
    offset = torch.cat((x_ND.new_zeros(1), x_ND.flatten()))[1:].view_as(x_ND)  # not on a 16-byte address
    assert torch.equal(train_gpt.mlp_fused(offset, up_FD, down_DF, 0.5), plain)
    assert torch.equal(train_gpt.mlp_fused(x_ND.t().contiguous().t(), up_FD, down_DF, 0.5), plain)
    logits_NV, targets_N = (t.to(DEVICE) for t in random_logits(6, 50))
    loss_N = train_gpt.softcapped_cross_entropy_fused(logits_NV, targets_N, 30.0)
    strided = logits_NV.t().contiguous().t()
    assert torch.equal(train_gpt.softcapped_cross_entropy_fused(strided, targets_N, 30.0), loss_N)


@needs_runnable_kernels
def test_gradients_are_finite_differences() -> None:
    """Along each gradient, a central difference in fp32 gives the gradient's norm."""
    x_ND, up_FD, down_DF = (t.to(DEVICE) for t in random_mlp(29, 16, 24))
    logits_NV, targets_N = (t.to(DEVICE) for t in random_logits(5, 67))

    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return train_gpt.mlp_fused(x, up, down, 0.5).double().square().mean()

    def loss(logits: Tensor) -> Tensor:
        return train_gpt.softcapped_cross_entropy_fused(logits, targets_N, 30.0).double().mean()

    for function, points in ((mlp, [x_ND, up_FD, down_DF]), (loss, [logits_NV])):
        leaves = [point.clone().requires_grad_() for point in points]
        gradients = torch.autograd.grad(function(*leaves), leaves)
        for index, gradient in enumerate(gradients):
            direction = gradient / gradient.norm()
            before, point, after = points[:index], points[index], points[index + 1 :]
            ahead = function(*before, point + 1e-2 * direction, *after)
            behind = function(*before, point - 1e-2 * direction, *after)
            slope = float(ahead - behind) / 2e-2
            assert slope == pytest.approx(float(gradient.norm()), rel=3e-3)


@needs_runnable_kernels
def test_kernels_write_inside_their_outputs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are cut from the middle of larger buffers; what surrounds them must stay as it was."""
    guard, buffers = 64, []

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
    outputs_and_gradients(lambda *t: train_gpt.mlp_fused(*t, 0.5), random_mlp(37, 13, 53), torch.float32)
    outputs_and_gradients(
        lambda *t: train_gpt.softcapped_cross_entropy_fused(*t, 30.0), random_logits(3, 131), torch.float32
    )
    assert len(buffers) >= 4
    for buffer, size in buffers:
        assert (buffer[:guard] == -7).all() and (buffer[guard + size :] == -7).all()


@needs_runnable_kernels
def test_infinite_logits_and_foreign_targets() -> None:
    """-inf masks a token out exactly; a target outside the vocabulary gives NaN, not foreign memory."""
    logits_NV, targets_N = (t.to(DEVICE) for t in random_logits(3, 9000))
    logits_NV[:, :8500] = float("-inf")  # the whole first block of columns
    targets_N.fill_(8600)
    got = train_gpt.softcapped_cross_entropy_fused(logits_NV, targets_N, 0.0)
    want = train_gpt.softcapped_cross_entropy_plain(logits_NV, targets_N, 0.0)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    foreign = torch.tensor([-100, 9000, 8999], device=DEVICE)
    loss_N = train_gpt.softcapped_cross_entropy_fused(logits_NV, foreign, 30.0)
    assert loss_N.isnan().tolist() == [True, True, False]


@needs_runnable_kernels
def test_twins_match_their_formulas() -> None:
    """The twins are the definition, so they are held to the formulas written out."""
    x_ND, up_FD, down_DF = (t.double() for t in random_mlp(5, 4, 6))
    pre_NF = x_ND @ up_FD.t()
    act_NF = torch.where(pre_NF > 0, pre_NF**2, 0.3**2 * pre_NF**2)
    torch.testing.assert_close(train_gpt.mlp_plain(x_ND, up_FD, down_DF, 0.3), act_NF @ down_DF.t())
    logits_NV, targets_N = random_logits(4, 11)
    capped_NV = 15 * torch.tanh(logits_NV.double() / 15)
    want = capped_NV.exp().sum(1).log() - capped_NV[torch.arange(4), targets_N]
    got = train_gpt.softcapped_cross_entropy_plain(logits_NV, targets_N, 15.0)
    assert got.dtype == torch.float32 and got.shape == (4,)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert train_gpt.softcapped_cross_entropy_plain(logits_NV.half(), targets_N, 15.0).dtype == torch.float32


@needs_runnable_kernels
def test_operators_pass_opcheck() -> None:
    x_ND, up_FD, _ = (t.to(DEVICE) for t in random_mlp(9, 16, 32))
    torch.library.opcheck(train_gpt.linear_leaky_square, (x_ND, up_FD, None, 0.5))
    torch.library.opcheck(
        train_gpt.linear_leaky_square, (x_ND, up_FD, torch.randn(9, 32, device=DEVICE), 0.5)
    )
    logits_NV, targets_N = (t.to(DEVICE) for t in random_logits(4, 19))
    cross_entropy = train_gpt.softcapped_cross_entropy_fused
    torch.library.opcheck(cross_entropy, (logits_NV.requires_grad_(), targets_N, 30.0))
    torch.library.opcheck(cross_entropy, (logits_NV.detach(), targets_N, 30.0, torch.ones(4, device=DEVICE)))


@needs_runnable_kernels
@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.gpu), "aot_eager"])
def test_full_graph_compilation_sees_the_other_products(backend: str) -> None:
    """One graph, equal results; the MLP's other products are ordinary nodes that the compiler may fuse."""
    products = []

    def run(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, targets_N: Tensor) -> Tensor:
        hidden_ND = train_gpt.mlp_fused(x_ND.sin(), up_FD, down_DF, 0.5)
        return train_gpt.softcapped_cross_entropy_fused(hidden_ND, targets_N, 30.0)

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        products.extend(target for target in targets if target in ("aten.mm.default", "aten.addmm.default"))
        return graph

    tensors = [*random_mlp(21, 10, 18), torch.arange(21) % 10]
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


SMALL = {"micro_batch_tokens": 64, "model_dim": 16, "mlp_mult": 2.0, "vocab_size": 40}


class StubRun:
    """What `choose_kernels` needs of a run: a device, the other ranks' votes, and the log."""

    def __init__(self, device: str = "cpu", *votes: tuple[bool, str]) -> None:
        self.device, self.dtype, self.votes = torch.device(device), torch.float32, votes
        self.lines: list[str] = []

    def gather(self, vote: tuple[bool, str]) -> list[tuple[bool, str]]:
        return [vote, *self.votes]

    def log(self, line: str) -> None:
        self.lines.append(line)


def chosen(run: Any, **settings: str) -> list[str]:
    """Names of the MLP and of the cross-entropy that would run."""
    plain = train_gpt.mlp_plain, train_gpt.softcapped_cross_entropy_plain
    functions = train_gpt.choose_kernels(train_gpt.Config(**SMALL, **settings), run)
    return ["plain" if one is twin else "kernel" for one, twin in zip(functions, plain, strict=True)]


@pytest.fixture
def as_if_on_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The check at start-up runs here: inputs on the CPU, nothing compiled, kernels twice as fast."""
    for name in ("randn", "randint"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, make=make, device, **kind: make(*size, **kind))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    clock = itertools.cycle((2.0, 1.0))
    monkeypatch.setattr("triton.testing.do_bench", lambda run, return_mode: next(clock))
    return monkeypatch


def test_choice_on_the_cpu() -> None:
    run = StubRun()
    assert chosen(run) == ["plain", "plain"]
    assert [line.split()[0] for line in run.lines] == ["fused_mlp:plain", "fused_ce:plain"]
    assert chosen(run, fused_mlp="0", fused_ce="0") == ["plain", "plain"]


@pytest.mark.parametrize("interpreted", [True, False])
def test_a_kernel_that_cannot_run_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpreted)
    for field in ("fused_mlp", "fused_ce"):
        if interpreted:
            assert chosen(StubRun(), **{field: "1"}).index("kernel") == ("mlp" not in field)
            monkeypatch.setattr(train_gpt, "triton", None)
        with pytest.raises(train_gpt.ConfigError, match=field.upper()):
            chosen(StubRun(), **{field: "1"})
        monkeypatch.setattr(train_gpt, "triton", triton)


@needs_runnable_kernels
def test_auto_takes_what_is_exact_and_faster_and_logs_by_how_much_and_the_tile(
    as_if_on_cuda: pytest.MonkeyPatch,
) -> None:
    run = StubRun("cuda")
    train_gpt.linear_leaky_square_kernel.cache.clear()
    assert chosen(run) == ["kernel", "kernel"]
    for line, name in zip(run.lines, ("fused_mlp", "fused_ce"), strict=False):
        assert line.startswith(f"{name}:kernel gap_ulp:") and line.endswith("ms:2.000 faster:+100.0%")
    tiles = [line for line in run.lines if "BLOCK_M: 32, BLOCK_N: 32, BLOCK_K: 32, num_warps: 4" in line]
    assert len(run.lines) == 4 and len(tiles) == 2 and "(64, 32, 16, False)" in tiles[0]
    assert chosen(StubRun("cuda"), fused_mlp="0") == ["plain", "kernel"]


@needs_runnable_kernels
@pytest.mark.parametrize("broken", ["mlp_fused", "softcapped_cross_entropy_fused"])
def test_a_kernel_that_fails_at_start_up_is_left_off_by_auto_and_ends_a_run_that_insists(
    as_if_on_cuda: pytest.MonkeyPatch, broken: str
) -> None:
    def fails(*_: object) -> Tensor:
        raise RuntimeError("PTXAS error\nno kernel image")

    as_if_on_cuda.setattr(train_gpt, broken, fails)
    run = StubRun("cuda")
    at, name = (0, "fused_mlp") if "mlp" in broken else (1, "fused_ce")
    assert chosen(run)[at] == "plain" and chosen(run)[1 - at] == "kernel"
    assert run.lines[at].startswith(f"{name}:plain failed: RuntimeError('PTXAS error")
    assert all("\n" not in line for line in run.lines)
    assert chosen(run, **{name: "0"})[at] == "plain"
    with pytest.raises(RuntimeError, match="PTXAS error"):
        chosen(run, **{name: "1"})


@needs_runnable_kernels
def test_a_kernel_that_one_rank_refuses_runs_on_none(as_if_on_cuda: pytest.MonkeyPatch) -> None:
    run = StubRun("cuda", (True, "faster"), (False, "failed: PTXAS"), (True, "faster"))
    assert chosen(run) == ["plain", "plain"] and run.lines[0] == "fused_mlp:plain failed: PTXAS"
    assert chosen(StubRun("cuda", (True, "")), fused_mlp="1") == ["kernel", "kernel"]


def _choose_on_rank(rank: int, store: str) -> None:
    """One of two ranks; the kernels fail on the second alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(train_gpt, "compare_with_twin", lambda *_: (True, "faster") if rank == 0 else 1 / 0)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.zeros(1))
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.zeros(1))
    run = StubRun("cuda")
    gather = functools.partial(train_gpt.Run.gather, SimpleNamespace(world_size=2))
    monkeypatch.setattr(run, "gather", gather)
    assert chosen(run) == ["plain", "plain"] and "failed: ZeroDivisionError" in run.lines[0]
    torch.distributed.destroy_process_group()


def test_two_ranks_decide_the_same_when_the_kernel_fails_on_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_choose_on_rank, (str(tmp_path / "store"),), nprocs=2)


@needs_runnable_kernels
@pytest.mark.parametrize(
    ("scale", "fused_ms", "wanted"),
    [(1.0, 1.0, True), (1.0, 3.0, False), (1.01, 1.0, False), (float("nan"), 1.0, False)],
)
def test_auto_keeps_only_what_is_exact_and_faster(
    monkeypatch: pytest.MonkeyPatch, scale: float, fused_ms: float, wanted: bool
) -> None:
    """Faults injected into the kernel's result and into the clock each turn the kernel off."""
    clock = iter((2.0, fused_ms))
    monkeypatch.setattr("triton.testing.do_bench", lambda run, return_mode: next(clock))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    inputs = [t.to(DEVICE) for t in random_mlp(32, 16, 24)]
    use, reason = train_gpt.compare_with_twin(
        train_gpt.mlp_plain, lambda *t: scale * train_gpt.mlp_fused(*t), *inputs, 0.5
    )
    assert use is wanted and "compiled_plain_ms:2.000" in reason
    assert f"faster:{2 / fused_ms - 1:+.1%}" in reason


def test_large_tiles_are_tuned_where_there_are_tensor_cores_for_the_dtype() -> None:
    kernel = train_gpt.linear_leaky_square_kernel
    for is_cuda, itemsize, count in ((True, 2, 4), (True, 4, 1), (False, 2, 1)):
        tensor = SimpleNamespace(is_cuda=is_cuda, itemsize=itemsize)
        assert len(kernel.early_config_prune(kernel.configs, {"a": tensor}, BACKWARD=False)) == count


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
for capability in map(int, sys.argv[2:]):
    hopper, limit = capability == 90, {80: 163, 90: 227}[capability] * 1024  # bytes of shared memory
    for tile in mlp.configs[int(sys.argv[1]) :]:
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        for backward in (False, True):
            binary = build(mlp.fn, mlp_types, {"BACKWARD": backward, **tile.kwargs}, capability, **options)
            assert binary.metadata.shared <= limit, (capability, tile, binary.metadata.shared)
            large = tile.kwargs["BLOCK_M"] >= 64
            assert ("wgmma.mma_async" in binary.asm["ptx"]) == (hopper and large), "Hopper's tensor cores"
            assert ("cp.async.bulk.tensor" in binary.asm["ptx"]) == hopper, "TMA"
    for backward in (False, True):
        out = "*bf16" if backward else "*fp32"
        types = {"logits": "*bf16", "targets": "*i64", "d_loss": "*fp32", "out": out}
        constants = {"V": 8192, "SOFTCAP": 30.0, "BACKWARD": backward, "BLOCK_V": 8192}
        built = build(train_gpt.cross_entropy_kernel, types, constants, capability, num_warps=8)
        assert built.asm["ptx"].count("ld.global") <= 6, "a row is read once"
assert mlp.cache_results, "the choice of a tile is kept"
print("compiled")
"""


@pytest.mark.parametrize(
    ("first_tile", "capabilities"),
    [(-1, ["90"]), pytest.param(0, ["80", "90"], marks=pytest.mark.slow)],
    ids=["last tile", "all"],
)
def test_tiles_compile_for_real_gpus(
    first_tile: int, capabilities: list[str], tmp_path: os.PathLike[str]
) -> None:
    """Triton's compiler needs no GPU. Tiles fit in shared memory; Hopper gets TMA and its tensor cores."""
    path = os.pathsep.join([os.path.dirname(os.path.abspath(train_gpt.__file__)), *sys.path])
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": path,
    }
    command = [sys.executable, "-c", COMPILE, str(first_tile), *capabilities]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.strip() == "compiled", done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(98_304, 512, 2048), (65_536, 512, 1024), (4_099, 509, 1021)], ids=str)
def test_mlp_at_real_shapes(shape: tuple[int, int, int], poisoned: None) -> None:
    assert_as_exact_as_plain(
        lambda *tensors: train_gpt.mlp_fused(*tensors, 0.5),
        lambda *tensors: train_gpt.mlp_plain(*tensors, 0.5),
        random_mlp(*shape),
        torch.bfloat16,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16_384, 8192), (65_536, 1024), (4_099, 50_257)], ids=str)
def test_cross_entropy_at_real_shapes(shape: tuple[int, int], poisoned: None) -> None:
    assert_as_exact_as_plain(
        lambda logits, targets: train_gpt.softcapped_cross_entropy_fused(logits, targets, 30.0),
        lambda logits, targets: train_gpt.softcapped_cross_entropy_plain(logits, targets, 30.0),
        random_logits(*shape),
        torch.bfloat16,
    )


@pytest.mark.gpu
def test_auto_decides_and_logs_on_a_gpu() -> None:
    run = StubRun("cuda")
    run.dtype = torch.bfloat16
    train_gpt.choose_kernels(train_gpt.Config(micro_batch_tokens=16_384), run)
    assert [line.count("faster:") for line in run.lines[:2]] == [1, 1] and "BLOCK_M" in run.lines[2]
