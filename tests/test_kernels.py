"""Kernels against their plain twins: exact to rounding, every element written, traceable, fit for real GPUs.

Without a GPU the kernels run in Triton's interpreter (fp32 and fp16), which TRITON_INTERPRET=1 chooses before
Triton is first imported; with a GPU the same tests run the compiled kernels, in bf16 too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import train_gpt

triton = pytest.importorskip("triton", reason="Triton is not installed: only the plain twins exist here")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if CUDA else [torch.float32, torch.float16]
needs_runnable_kernels = pytest.mark.skipif(
    not CUDA and not train_gpt.INTERPRETED,
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
    x_ND, up_FD, _ = (t.to(DEVICE) for t in random_mlp(9, 5, 12))
    torch.library.opcheck(train_gpt.linear_leaky_square, (x_ND, up_FD, None, 0.5))
    torch.library.opcheck(
        train_gpt.linear_leaky_square, (x_ND, up_FD, torch.randn(9, 12, device=DEVICE), 0.5)
    )
    logits_NV, targets_N = (t.to(DEVICE) for t in random_logits(4, 19))
    torch.library.opcheck(train_gpt.cross_entropy, (logits_NV.requires_grad_(), targets_N, None, 30.0))


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


def kernel_config(**changes: object) -> SimpleNamespace:
    fields: dict[str, object] = {
        "fused_mlp": "auto", "fused_ce": "auto", "micro_batch_tokens": 64, "model_dim": 16, "mlp_mult": 2.0,
        "vocab_size": 40, "leaky_slope": 0.5, "logit_softcap": 30.0,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def test_choice_on_the_cpu() -> None:
    lines: list[str] = []
    device = torch.device("cpu")
    assert train_gpt.choose_kernels(kernel_config(), device, torch.float32, lines.append) == (False, False)
    assert len(lines) == 1 and "fused_mlp:plain" in lines[0] and "fused_ce:plain" in lines[0]
    off = kernel_config(fused_mlp="0", fused_ce="0")
    assert train_gpt.choose_kernels(off, device, torch.float32, lines.append) == (False, False)


@pytest.mark.parametrize("interpreted", [True, False])
def test_a_kernel_that_cannot_run_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool
) -> None:
    monkeypatch.setattr(train_gpt, "INTERPRETED", interpreted)
    for field, variable in (("fused_mlp", "FUSED_MLP"), ("fused_ce", "FUSED_CE")):
        config, device = kernel_config(**{field: "1"}), torch.device("cpu")
        if interpreted:
            chosen = train_gpt.choose_kernels(config, device, torch.float32, lambda _: None)
            assert chosen == (field == "fused_mlp", field == "fused_ce")
            monkeypatch.setattr(train_gpt, "triton", None)
        with pytest.raises(train_gpt.ConfigError, match=variable):
            train_gpt.choose_kernels(config, device, torch.float32, lambda _: None)
        monkeypatch.setattr(train_gpt, "triton", triton)


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
    assert use is wanted and "compiled_plain_ms:2.000" in reason and f"fused_ms:{fused_ms:.3f}" in reason


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
        types = {"logits": "*bf16", "targets": "*i64", "stats": "*fp32", "out": out, "N": "i32", "V": "i32"}
        constants = {"SOFTCAP": 30.0, "BACKWARD": backward, "BLOCK_V": 8192}
        build(train_gpt.cross_entropy_kernel, types, constants, capability, num_warps=8)
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
    lines: list[str] = []
    config = kernel_config(micro_batch_tokens=16_384, model_dim=512, mlp_mult=4.0, vocab_size=8192)
    chosen = train_gpt.choose_kernels(config, torch.device("cuda"), torch.bfloat16, lines.append)
    assert len(chosen) == 2 and len(lines) == 1 and lines[0].count("fused_ms:") == 2
