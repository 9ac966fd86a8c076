"""The MLP kernel against its reference implementation: exact to rounding, every element written,
traceable, fit for GPUs.

Without a GPU it runs in Triton's interpreter (fp32 and fp16), which TRITON_INTERPRET=1 chooses before
Triton is first imported; with a GPU the same tests run the compiled kernel, in bf16 too.
"""

import dataclasses
import gc
import hashlib
import math
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from tests.support import interpreter
from tests.support.fake_gpu import Card
from tests.support.models import tiny_config
from tests.support.waiting import DEADLINE_SECONDS

triton = pytest.importorskip("triton", reason="Triton is not installed: there is no kernel to test")

interpreter.prepare()

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if CUDA else [torch.float32, torch.float16]
# On a GPU the tiles of the MLP fit its memory in half precision alone, as its tensor cores want it.
MLP_DTYPES = DTYPES[CUDA:]
needs_runnable_kernels = pytest.mark.skipif(
    not CUDA and not triton.knobs.runtime.interpret,
    reason="no GPU, and TRITON_INTERPRET=1 was not set before Triton was imported",
)

# (tokens, model dim, hidden) and slope: the least there is, a part of a tile along each side, whole tiles.
MLP_CASES = [((1, 8, 8), 0.0), ((97, 40, 136), 0.5), ((128, 64, 256), -0.25)]
# Several tiles along each side, which take the interpreter long.
LARGE_MLP_CASES = [((131, 264, 8), 0.3), ((140, 72, 264), 0.5)]
SCALE = 0.8  # of the norm before the MLP


def random_mlp(tokens: int, dim: int, hidden: int, seed: int = 0, whole: bool = False) -> list[Tensor]:
    """x, up and down. whole: the first two of whole numbers, up to a common factor."""
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(tokens, dim, generator=generator)
    up_FD = torch.randn(hidden, dim, generator=generator)
    down_DF = torch.randn(dim, hidden, generator=generator) / hidden**0.5
    if whole:
        x_ND, up_FD = x_ND.round(), up_FD.round()
    return [x_ND, up_FD / dim**0.5, down_DF]


def outputs_and_gradients(
    function: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Output, then the gradient of each tensor for a direction that is the same in every dtype."""
    leaves = [t.to(DEVICE, dtype).requires_grad_() for t in tensors]
    out = function(*leaves)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(torch.float16)
    return [out.detach(), *torch.autograd.grad(out, leaves, direction.to(out))]


def assert_as_exact_as_plain(
    fused: Callable[..., Tensor], plain: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype
) -> None:
    """Worst error against float64 at most 1.1 times that of the reference implementation, plus two units in
    the last place of the largest result."""
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
@pytest.mark.parametrize(("shape", "slope", "dtype"), [
    *((*case, dtype) for dtype in MLP_DTYPES for case in MLP_CASES),
    *((*case, MLP_DTYPES[0]) for case in LARGE_MLP_CASES),
], ids=str)
def test_mlp_is_as_exact_as_its_reference(
    shape: tuple[int, int, int], slope: float, dtype: torch.dtype, poisoned: None
) -> None:
    """In fp16, which has five bits of exponent, the square of a hidden value below 2^-7 loses its last bits,
    and so the sign. Products of whole numbers are zero or larger than that. bf16 has the range of fp32.
    """
    assert_as_exact_as_plain(
        lambda *tensors: train_gpt.mlp_fused(*tensors, SCALE, slope),
        lambda *tensors: train_gpt.mlp_plain(*tensors, SCALE, slope),
        random_mlp(*shape, whole=dtype == torch.float16),
        dtype,
    )


@needs_runnable_kernels
@pytest.mark.parametrize("dtype", MLP_DTYPES, ids=str)
@pytest.mark.parametrize("slope", [0.5, -0.3, 0.0])
def test_the_last_bit_of_an_activation_is_the_sign_of_its_input(slope: float, dtype: torch.dtype) -> None:
    """That is all the backward pass knows of the sign; the value is the nearest of its kind."""
    x_ND, up_FD, _ = (tensor.to(DEVICE, dtype) for tensor in random_mlp(37, 16, 56, whole=True))
    norm_N = torch.ones(37, device=DEVICE)
    (act_NF,) = train_gpt.mlp_matmul("up", x_ND, up_FD, norm_N, [], SCALE, slope)
    pre_NF = x_ND.double() @ up_FD.double().t()
    exact_NF = train_gpt.activation(pre_NF, slope)
    bits_NF = act_NF.view({2: torch.int16, 4: torch.int32}[act_NF.itemsize])
    negative = pre_NF < -1e-6
    if slope != 0.0:  # else fp16 has no number so small that it could be added to the zeros
        assert (bits_NF[negative] & 1 == 1).all() and negative.any()
    assert (bits_NF[pre_NF > 1e-6] & 1 == 0).all()
    # Numbers of one parity are twice as far apart: half of that is one unit in the last place.
    unit_NF = torch.finfo(dtype).eps * 2.0 ** exact_NF.clamp(min=1e-30).log2().floor()
    of_fp32_NF = 16 * torch.finfo(torch.float32).eps * exact_NF  # in which all is summed
    assert ((act_NF.double() - exact_NF).abs() <= 1.001 * unit_NF + of_fp32_NF)[exact_NF > 1e-3].all()


@needs_runnable_kernels
@pytest.mark.parametrize(("dim", "hidden", "skipped"), [(18, 32, 0), (16, 30, 0), (16, 32, 1)])
def test_what_tma_cannot_read_is_refused(dim: int, hidden: int, skipped: int) -> None:
    """Rows that are no whole 16 bytes, and a tensor that does not begin at a multiple of them."""
    x_ND, up_FD, down_DF = (t.to(DEVICE) for t in random_mlp(24, dim, hidden))
    x_ND = torch.cat((x_ND.new_zeros(skipped), x_ND.flatten()))[skipped:].view_as(x_ND)
    with pytest.raises(ValueError, match=f"16 bytes.*{dim} and {hidden} columns"):
        train_gpt.mlp_fused(x_ND, up_FD, down_DF, SCALE, 0.5)


@needs_runnable_kernels
def test_operands_lie_anywhere_frozen_ones_get_no_gradient() -> None:
    """Layouts that TMA cannot read are brought into order; the product of the forward pass may be refused."""
    x_ND, up_FD, down_DF = (t.to(DEVICE) for t in random_mlp(24, 16, 32))
    norm_N = x_ND.norm(dim=1)
    expected = train_gpt.mlp_matmul("up", x_ND, up_FD, norm_N, [], SCALE, 0.5)
    offset = torch.cat((x_ND.new_zeros(4), x_ND.flatten()))[4:].view_as(x_ND)
    for x in (offset, x_ND.t().contiguous().t()):
        found = train_gpt.mlp_matmul("up", x, up_FD, norm_N, [], SCALE, 0.5)
        assert all(map(torch.equal, found, expected))
    (act_NF,) = expected
    expected = train_gpt.mlp_matmul("d_up", x_ND, down_DF, norm_N, [act_NF], SCALE, 0.5)
    turned = act_NF.t().contiguous().t()
    for down, act in ((down_DF, turned), (down_DF.t().contiguous().t(), act_NF)):
        found = train_gpt.mlp_matmul("d_up", x_ND, down, norm_N, [act], SCALE, 0.5)
        assert all(map(torch.equal, found, expected))
    beside = torch.cat([act_NF.new_zeros(1), act_NF.flatten()])[1:].view_as(act_NF)
    with pytest.raises(ValueError, match=r"TMA.*16 bytes"):
        train_gpt.mlp_matmul("d_up", x_ND, down_DF, norm_N, [beside], SCALE, 0.5)
    # Triton keeps it until the next launch, in each thread: what it knew would lie in memory as long.
    x_ND, up_FD, _ = (t.to(DEVICE) for t in random_mlp(24, 16, 32))
    train_gpt.mlp_matmul("up", x_ND, up_FD, x_ND.norm(dim=1), [], SCALE, 0.5)
    operand = weakref.ref(x_ND)
    del x_ND
    gc.collect()
    assert operand() is None
    # Where adapters learn, the input's gradient is as ever, and no product is spent on the matrices.
    run = torch.compile(train_gpt.mlp_fused, backend="aot_eager", fullgraph=True, dynamic=False)
    gradients, flops = [], []
    for frozen in (False, True):
        x_ND, up_FD, down_DF = (t.to(DEVICE) for t in random_mlp(21, 16, 24))
        x_ND.requires_grad_()
        up_FD.requires_grad_(not frozen)
        down_DF.requires_grad_(not frozen)
        out_ND = run(x_ND, up_FD, down_DF, SCALE, 0.5)
        with FlopCounterMode(display=False) as counter:
            out_ND.sum().backward()
        assert (up_FD.grad is None) == (down_DF.grad is None) == frozen
        gradients.append(x_ND.grad)
        flops.append(counter.get_total_flops())
    assert torch.equal(*gradients)
    assert flops == [2 * (2 * 21 * 16 * 24), 0]


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
    tensors = random_mlp(37, 16, 56)
    outputs_and_gradients(lambda *t: train_gpt.mlp_fused(*t, SCALE, 0.5), tensors, torch.float32)
    assert len(buffers) >= 2
    for buffer, size in buffers:
        assert (buffer[:guard] == -7).all() and (buffer[guard + size :] == -7).all()


@needs_runnable_kernels
@pytest.mark.parametrize("backward", [False, True])
def test_a_graph_of_the_mlp_takes_any_number_of_rows(backward: bool) -> None:
    """Rows of test-time training differ from chunk to chunk: a graph for each would break the run.

    The gradients of its matrices are ordinary nodes, which the compiler may fuse.
    """
    products = []

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        products.append(calls.count("aten.mm.default") + calls.count("aten.addmm.default"))
        return make_boxed_func(graph)

    run = torch.compile(
        lambda *tensors: train_gpt.mlp_fused(*tensors, SCALE, 0.5),
        backend=aot_autograd(fw_compiler=counting), fullgraph=True, dynamic=False,
    )
    for rows in (5, 7):
        tensors = [tensor.to(DEVICE).requires_grad_(backward) for tensor in random_mlp(rows, 16, 32)]
        torch._dynamo.mark_dynamic(tensors[0], 0)
        out_ND = run(*tensors)
        torch.testing.assert_close(out_ND, train_gpt.mlp_plain(*tensors, SCALE, 0.5), rtol=1e-4, atol=1e-4)
        if backward:
            out_ND.sum().backward()
    assert products == ([0, 2] if backward else [0])


SMALL = tiny_config(MODEL_DIM=16, MLP_MULT=2, ROPE_DIMS=8, TRAIN_SEQ_LEN=16, MICRO_BATCH_TOKENS=32, COMPILE=0)


def packed_attention(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts: Tensor) -> Tensor:
    """Attention by where rows and documents begin, as the kernels for GPUs take it."""
    positions_BT = torch.arange(q_BTHE.size(0) * q_BTHE.size(1)).view(q_BTHE.shape[:2])
    document_BT = torch.searchsorted(starts.long(), positions_BT, right=True)
    same_B1TT = document_BT[:, None, :, None] == document_BT[:, None, None]
    return train_gpt.attention_sdpa(q_BTHE, k_BTKE, v_BTKE, same_B1TT.tril())


def broken(*given: Tensor) -> Tensor:
    raise RuntimeError("PTXAS error\nno kernel image")


def with_another_gradient(*given: Tensor) -> Tensor:
    y = packed_attention(*given)
    return y + (y - y.detach())


def not_a_number(*given: Tensor) -> Tensor:
    return packed_attention(*given) * math.nan


WRONG_FORMS: list[tuple[Callable[..., Tensor], str]] = [
    (broken, "RuntimeError: PTXAS error"), (with_another_gradient, r"error:[0-9.]+e[-+]00"),
    (not_a_number, "error:inf"), (lambda *given: 1.5 * packed_attention(*given), "error:5.0e-01"),
]


def attention_of(
    monkeypatch: pytest.MonkeyPatch, machine: train_gpt.Machine, found: dict[str, Callable[..., Tensor]],
    **settings: Any,
) -> tuple[Callable[..., Tensor], list[str], list[str]]:
    """The attention that is chosen if those of `found` are installed, the report, and the names looked at."""
    looked_at = []

    def load(name: str) -> Callable[..., Tensor]:
        looked_at.append(name)
        if name not in found:
            raise ModuleNotFoundError(f"no {name}")
        return found[name]

    monkeypatch.setattr(train_gpt, "load_attention", load)
    settings = {"attention": "auto", **settings}
    config = dataclasses.replace(SMALL, fused_mlp="0", fused_heads="0", **settings)
    chosen = train_gpt.fast_ops(config, machine)
    return chosen.ops.attend, chosen.report, looked_at


@pytest.mark.parametrize(("doc_mask", "tried"), [
    (True, "fa3"), (True, "fa3 varlen"), (True, "fa3 varlen fa2"), (True, "fa3 varlen fa2 sdpa"),
    (False, "fa3"), (False, "fa3 sdpa"),
])
def test_attention_is_tried_in_order(monkeypatch: pytest.MonkeyPatch, doc_mask: bool, tried: str) -> None:
    """The last one of these is installed and taken, those before it are not, those after it are not tried."""
    *absent, installed = tried.split()
    attention = train_gpt.attention_sdpa if installed == "sdpa" else packed_attention
    found = {name: attention for name in ("fa3", "varlen", "fa2", "sdpa") if name not in absent}
    attend, report, looked_at = attention_of(monkeypatch, Card(), found, doc_mask=doc_mask)
    assert attend is attention and looked_at == tried.split()
    reasons = "".join(f"{name} ModuleNotFoundError: no {name} | " for name in absent)
    assert report[0].startswith(f"attention:{installed} tried: {reasons}{installed} error:")
    # The only loss that is worth a warning where nothing is installed.
    slow = [line for line in report if line.startswith("warning: ATTENTION=sdpa ")]
    assert len(slow) == len([line for line in report if line.startswith("warning")])
    assert bool(slow) == (installed == "sdpa" and doc_mask)


@pytest.mark.parametrize(("wrong", "reason"), WRONG_FORMS)
def test_what_is_installed_and_refused_is_passed_over_loudly(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Tensor], reason: str
) -> None:
    """FlashAttention-3 that nobody can use costs a paid run a tenth of its steps: the log must warn."""
    found = {"fa3": wrong, "varlen": packed_attention}
    attend, (line, *more), looked_at = attention_of(monkeypatch, Card(), found)
    assert attend is packed_attention and looked_at == ["fa3", "varlen"]
    assert re.fullmatch(rf"attention:varlen tried: fa3 {reason} \| varlen error:\S+", line)
    (warning,) = [other for other in more if other.startswith("warning")]
    assert re.fullmatch(rf"warning: attention: fa3 is installed but rejected: {reason}", warning)
    # What was asked for is taken or refused: no other takes its place.
    told = rf"^ATTENTION=fa3: .*fa3 {reason};.*MICRO_BATCH_TOKENS.*ATTENTION=auto$"
    with pytest.raises(train_gpt.ConfigError, match=told):
        attention_of(monkeypatch, Card(), found, attention="fa3")
    attend, (line, *_), _ = attention_of(monkeypatch, train_gpt.Machine(), found, attention="varlen")
    assert attend is packed_attention and line.startswith("attention:varlen tried: varlen error:")


def test_attention_that_looks_across_documents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreement is asked for with document borders in the rows, so that they are part of it."""

    def across(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        rows_alone = torch.arange(0, q.size(0) * q.size(1) + 1, q.size(1))
        return packed_attention(q, k, v, rows_alone)

    torch.manual_seed(0)
    found = {"fa3": across, "varlen": packed_attention}
    attend, (line, *_), _ = attention_of(
        monkeypatch, Card(), found, train_seq_len=512, micro_batch_tokens=2048
    )
    assert attend is packed_attention and line.startswith("attention:varlen tried: fa3 error:")


@pytest.mark.parametrize("doc_mask", [False, True])
def test_attention_on_the_first_tokens_shows_faults(doc_mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first tokens of long rows are compared: correct attention passes, and a leak is found."""
    monkeypatch.setattr(train_gpt, "ATTENTION_CHECK_TOKENS", 24)
    settings: dict[str, Any] = dict(
        train_seq_len=64, micro_batch_tokens=256, doc_mask=doc_mask, attention="fa3")
    _, (line, *_), _ = attention_of(monkeypatch, train_gpt.Machine(), {"fa3": packed_attention}, **settings)
    error = re.search(r"fa3 error:(\S+)", line)
    assert error is not None and float(error[1]) < 1e-5

    def later_values_leak(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        return packed_attention(q, k, v, starts) + 0.1 * v.roll(-1, 1).repeat_interleave(2, 2)

    assert SMALL.num_heads == 2 * SMALL.num_kv_heads
    with pytest.raises(train_gpt.ConfigError, match=r"ATTENTION=fa3: .*fa3 error:"):
        attention_of(monkeypatch, train_gpt.Machine(), {"fa3": later_values_leak}, **settings)


def peers_found(monkeypatch: pytest.MonkeyPatch, *found: list[Any]) -> None:
    """This rank gathers what its peers found: for each implementation an error and a message, or a time."""
    told = iter(found)
    monkeypatch.setattr(train_gpt.Machine, "gather", lambda _, value: [value, *next(told)])


def test_the_worst_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation that passes here is not chosen if it fails on another rank."""
    found = {"fa3": packed_attention, "varlen": packed_attention}
    good = [(0.0, ""), (0.0, "")]
    of_attention = [[(0.0, ""), (0.5, "error:5.0e-01")], [(0.0, "error:0.0e+00"), (0.01, "fair")]]
    peers_found(monkeypatch, *of_attention, good, good)  # MLP and heads follow
    _, (line, warning, *_), _ = attention_of(monkeypatch, Card(), found)
    assert line == "attention:varlen tried: fa3 error:5.0e-01 | varlen fair"
    assert warning == "warning: attention: fa3 is installed but rejected: error:5.0e-01"
    peers_found(monkeypatch, [(math.inf, "OSError: no kernel here")])
    with pytest.raises(train_gpt.ConfigError, match=r"ATTENTION=fa3: .*fa3 OSError: no kernel here"):
        attention_of(monkeypatch, Card(), found, attention="fa3")
    # Where nothing agrees, all reasons are told.
    monkeypatch.setattr(train_gpt.Machine, "gather", lambda _, value: [value])
    reasons = (r"^ATTENTION=auto: .*fa3 ModuleNotFoundError: no fa3 \| varlen RuntimeError: PTXAS error \| "
               r"fa2 ModuleNotFoundError: no fa2 \| sdpa error:inf;.*MICRO_BATCH_TOKENS$")
    with pytest.raises(train_gpt.ConfigError, match=reasons):
        attention_of(monkeypatch, Card(), {"varlen": broken, "sdpa": not_a_number})


@pytest.mark.parametrize("asked", ["auto", "0"])
def test_a_cpu_has_the_references_and_tries_nothing(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """They are the definition, and a start must be quick."""
    monkeypatch.setattr(train_gpt, "both_passes", lambda *_: pytest.fail("an implementation was tried"))
    config = dataclasses.replace(SMALL, attention="auto", fused_mlp=asked, fused_heads=asked)
    chosen = train_gpt.fast_ops(config, train_gpt.Machine(dtype=torch.bfloat16))
    assert chosen.ops == train_gpt.Ops()
    assert [line.split()[0] for line in chosen.report] == [
        "attention:sdpa", "fused_mlp:plain", "fused_heads:plain"
    ]
    assert all("reference" in line for line in chosen.report)


def test_a_gpu_takes_the_kernel_of_the_mlp_by_itself_in_bfloat16_alone() -> None:
    """In fp32 it multiplies without TF32, which matmuls of torch have."""
    in_bfloat16 = Card(dtype=torch.bfloat16)
    assert train_gpt.implementations_to_try("fused_mlp", SMALL, in_bfloat16) == ["kernel", "plain"]
    assert train_gpt.implementations_to_try("fused_mlp", SMALL, Card()) == ["plain"]
    assert train_gpt.implementations_to_try("fused_heads", SMALL, Card()) == ["kernel", "plain"]
    asked = dataclasses.replace(SMALL, fused_mlp="1")
    assert train_gpt.implementations_to_try("fused_mlp", asked, Card()) == ["kernel"]


def mlp_of(
    machine: train_gpt.Machine, times_ms: tuple[float, ...] = (1.0, 2.0), **settings: Any
) -> tuple[str, str]:
    """The MLP that would run if its implementations took these times, and its line for the log."""
    config = dataclasses.replace(SMALL, **settings)
    names = train_gpt.implementations_to_try("fused_mlp", config, machine)
    # The interpreter has no bfloat16, in which alone a GPU takes the kernel by itself: here it does in fp32.
    if machine.on_gpu and config.fused_mlp == "auto":
        names = train_gpt.IMPLEMENTATIONS["fused_mlp"]

    def clock(passes: Any) -> float:
        return times_ms[train_gpt.IMPLEMENTATIONS["fused_mlp"].index(name_of(passes.args[1].ops))]

    def name_of(ops: train_gpt.Ops) -> str:
        return "plain" if ops.mlp is train_gpt.mlp_plain else "kernel"

    with (
        mock.patch.object(train_gpt, "implementations_to_try", lambda *_: names),
        mock.patch.object(train_gpt.triton.testing, "do_bench", clock),
    ):
        ops, report = train_gpt.choose_implementation("fused_mlp", train_gpt.Ops(), config, machine)
    return name_of(ops), report[0]


@needs_runnable_kernels
@pytest.mark.parametrize(("asked", "times_ms", "chosen"), [
    ("auto", (1, 2), "kernel"), ("auto", (2, 1), "plain"),
    ("1", (2, 1), "kernel"), ("0", (1, 2), "plain"),
])
def test_a_gpu_takes_the_fastest_mlp_it_may_have(
    asked: str, times_ms: tuple[float, ...], chosen: str
) -> None:
    """The log line has the time of each implementation."""
    name, line = mlp_of(Card(), times_ms, fused_mlp=asked)
    assert name == chosen and line.startswith(f"fused_mlp:{chosen} tried: ")
    names = train_gpt.IMPLEMENTATIONS["fused_mlp"] if asked == "auto" else []
    assert re.findall(r"(\w+) (\d)\.00 ms", line) == [*zip(names, map(str, times_ms), strict=False)]


@needs_runnable_kernels
def test_the_slowest_rank_decides_and_a_fast_wrong_mlp_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # The reference implementation by another name, which the interpreter need not run.
    right = train_gpt.mlp_plain
    monkeypatch.setattr(train_gpt, "mlp_fused", lambda *inputs: right(*inputs))
    for ours, theirs in (((1, 3), (9, 2)), ((9, 2), (1, 3))):
        with monkeypatch.context() as patch:
            peers_found(patch, *[[(0.0, "")]] * 2, *([ms] for ms in theirs))
            name, line = mlp_of(Card(), ours)
        assert name == "plain" and line.endswith(" | kernel 9.00 ms | plain 3.00 ms")
    # On a CPU nothing is timed: the first that agrees.
    name, line = mlp_of(train_gpt.Machine(), fused_mlp="1")
    assert name == "kernel" and " ms" not in line
    monkeypatch.setattr(train_gpt, "mlp_fused", lambda *inputs: 1.5 * right(*inputs))
    name, line = mlp_of(Card(), (1, 2))
    assert name == "plain" and line.startswith("fused_mlp:plain tried: kernel error:5.0e-01 | plain ")


@pytest.mark.parametrize("setting", ["FUSED_MLP", "FUSED_HEADS"])
def test_without_triton_a_kernel_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """As on Windows. `auto` goes on with the reference implementation, and says so."""
    monkeypatch.setattr(train_gpt, "triton", None)
    name = setting.lower()
    config = dataclasses.replace(SMALL, **{name: "1"})
    told = rf"^{setting}=1: .*kernel AttributeError: .*{setting}=auto$"
    with pytest.raises(train_gpt.ConfigError, match=told):
        train_gpt.fast_ops(config, train_gpt.Machine())
    config = dataclasses.replace(SMALL, attention="sdpa")
    chosen = train_gpt.fast_ops(config, Card(dtype=torch.bfloat16))
    assert chosen.ops == train_gpt.Ops()
    assert f"warning: {name}: kernel is installed but rejected: AttributeError: " in "\n".join(chosen.report)
    assert "ATTENTION=sdpa" not in "\n".join(chosen.report), "what was asked for needs no warning"


def without_residual(x_ND: Tensor, *rest: Any) -> Tensor:
    """An MLP that forgets to add its input."""
    return train_gpt.mlp_plain(x_ND, *rest) - x_ND


def without_its_gradient(x_ND: Tensor, *rest: Any) -> Tensor:
    """An MLP that forgets the residual in its backward pass."""
    return train_gpt.mlp_plain(x_ND, *rest) - x_ND + x_ND.detach()


def without_the_matmuls(x_ND: Tensor, *rest: Any) -> Tensor:
    """An MLP that is almost only the residual."""
    return x_ND + 0.8 * (train_gpt.mlp_plain(x_ND, *rest) - x_ND)


@pytest.mark.parametrize("wrong", [without_residual, without_its_gradient, without_the_matmuls])
def test_the_trial_of_the_mlp_sees_all_of_its_parts(wrong: Callable[..., Tensor]) -> None:
    """If one part were much larger than the others, errors of the others would be within the tolerance."""
    config = dataclasses.replace(train_gpt.Config(), train_seq_len=128, micro_batch_tokens=128)
    run, inputs = train_gpt.trial_of("fused_mlp", config, train_gpt.Machine())
    model = train_gpt.GPT(SMALL, seed=None)
    expected = train_gpt.both_passes(run, model, inputs)
    assert train_gpt.largest_error(train_gpt.both_passes(run, model, inputs), expected) == 0
    model.ops = train_gpt.Ops(mlp=wrong)
    error = train_gpt.largest_error(train_gpt.both_passes(run, model, inputs), expected)
    assert error > 2 * train_gpt.MAX_RELATIVE_ERROR


def test_implementations_are_tried_at_the_shapes_of_a_training_pass() -> None:
    config = tiny_config(TRAIN_SEQ_LEN=16, MICRO_BATCH_TOKENS=256, TRAIN_BATCH_TOKENS=256)

    def rows(config: train_gpt.Config, world_size: int) -> int:
        machine = train_gpt.Machine(world_size=world_size)
        _, (q_BTHE, *_) = train_gpt.trial_of("attention", config, machine)
        _, (x_ND, *_) = train_gpt.trial_of("fused_mlp", config, machine)
        _, (qkv_BTNE, *_) = train_gpt.trial_of("fused_heads", config, machine)
        assert q_BTHE.shape[:2] == qkv_BTNE.shape[:2] and 16 * len(q_BTHE) == len(x_ND)
        return len(q_BTHE)

    assert rows(config, world_size=1) == 16
    assert rows(config, world_size=4) == 4
    # Nobody could train with it, but EVAL_ONLY scores.
    assert rows(dataclasses.replace(config, micro_batch_tokens=8), world_size=1) == 1


@pytest.mark.parametrize("setting", ["attention", "fused_mlp", "fused_heads"])
def test_a_form_is_tried_as_the_model_will_hold_it(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """In one compiled graph, both passes, called by a model: what works by another path may fail there."""
    seen = []

    class Compiles(Card):
        def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
            compiled = torch.compile(function, backend="eager", dynamic=False, fullgraph=True)

            def watched(model: train_gpt.GPT, *inputs: Tensor) -> Tensor:
                seen.append((type(model), model.ops))
                return compiled(model, *inputs)

            return watched

    def breaks_the_graph(*given: Any) -> Any:
        if setting == "attention":  # the reason is told, which Dynamo hides behind other lines
            raise ValueError("heads of 64 alone")
        torch._dynamo.graph_break()
        return plain(*given)

    field = {"attention": "attend", "fused_mlp": "mlp", "fused_heads": "heads"}[setting]
    plain = getattr(train_gpt.Ops(), field)
    monkeypatch.setattr(train_gpt, "implementations_to_try", lambda *_: ["kernel", "plain"])
    candidates = {"kernel": train_gpt.Ops(**{field: breaks_the_graph}), "plain": train_gpt.Ops()}
    monkeypatch.setattr(train_gpt, "with_implementation", lambda ops, setting, name: candidates[name])
    torch._dynamo.reset()
    with mock.patch.object(train_gpt, "attention_documents", plain_documents):
        compiles = Compiles(compiled=True)
        ops, (line, *_) = train_gpt.choose_implementation(setting, train_gpt.Ops(), SMALL, compiles)
    assert ops == train_gpt.Ops()
    assert re.match(rf"{setting}:plain tried: kernel Unsupported: .* \| plain error:", line)
    assert ("heads of 64 alone" in line) == (setting == "attention")
    assert seen == [(train_gpt.GPT, candidates["kernel"]), (train_gpt.GPT, candidates["plain"])]


original_documents = train_gpt.attention_documents


def plain_documents(ids_BT: Tensor, starts: Any, attend: Any, *rest: Any) -> Any:
    """A mask for stand-ins, too."""
    return original_documents(ids_BT, starts, train_gpt.attention_sdpa, *rest)


@needs_runnable_kernels
@pytest.mark.parametrize("wrong", ["up", "down", "d_up", "d_x"])
def test_auto_keeps_only_what_is_right(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """A fault of a twenty-fifth in one of the four matmuls of the kernel turns it off."""
    exact = train_gpt.mlp_matmul

    def faulty(product: str, *given: Any) -> list[Tensor]:
        return [result * (1.04 if product == wrong else 1.0) for result in exact(product, *given)]

    monkeypatch.setattr(train_gpt, "mlp_matmul", faulty)
    name, line = mlp_of(Card())
    assert name == "plain"
    told = r"fused_mlp:plain tried: kernel error:\S+ \| plain error:0.0e\+00"
    assert re.fullmatch(told, line)


@needs_runnable_kernels
@pytest.mark.parametrize(("name", "backward", "result"), [
    ("launch_heads", False, 0), ("launch_heads", False, -1), ("launch_xsa", False, 0),
    ("launch_heads", True, 0), ("launch_heads", True, -1), ("launch_xsa", True, 0), ("launch_xsa", True, -1),
])
def test_auto_keeps_only_heads_that_are_right(
    monkeypatch: pytest.MonkeyPatch, name: str, backward: bool, result: int
) -> None:
    """The first or the last result of one kernel in one direction is too large by half."""
    exact = getattr(train_gpt, name)
    plain_inputs = 3  # of both kernels; behind them the gradients, none in the forward pass

    def faulty(*given: Any) -> Any:
        results = list(exact(*given))
        if any(map(len, given[plain_inputs:])) == backward:
            results[result] = results[result] * 1.5
        return results

    monkeypatch.setattr(train_gpt, name, faulty)
    config = dataclasses.replace(SMALL, micro_batch_tokens=16)  # one row takes the interpreter least
    ops, (line, warning) = train_gpt.choose_implementation("fused_heads", train_gpt.Ops(), config, Card())
    assert ops == train_gpt.Ops()
    assert re.fullmatch(r"fused_heads:plain tried: kernel error:\S+ \| plain error:0.0e\+00", line)
    assert warning.startswith("warning: fused_heads: kernel is installed but rejected: error:")


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import train_gpt

triton.knobs.nvidia.dump_ptxas_log = True

def build(kernel, types, constants, capability, **options):
    places = [kernel.arg_names.index(name) for name, kind in types.items() if kind != "fp32"]
    aligned = {(place,): [["tt.divisibility", 16]] for place in places}
    given = {**types, **dict.fromkeys(constants, "constexpr")}
    signature = {name: given[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

mlp_types = dict.fromkeys(["a", "weight", "given", "out"], "*bf16") | dict.fromkeys("MNK", "i32")
mlp_types |= {"factors": "*fp32", "scale": "fp32", "slope": "fp32", "more": "*bf16"}
for capability in map(int, sys.argv[1:]):
    hopper = capability == 90
    limit = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}[capability] * 1024  # bytes of shared memory
    # The pointers that a product lacks are None.
    for product, lacks in ("up", ["more"]), ("down", ["more", "factors"]), ("d_up", []), ("d_x", []):
        tile = train_gpt.mlp_tile(product, limit)
        sizes = {name: size for name, size in tile.items() if name.startswith("BLOCK")}
        options = {name: size for name, size in tile.items() if name not in sizes}
        types = {name: kind for name, kind in mlp_types.items() if name not in lacks}
        types |= {"more": "*fp32"} if product == "d_up" else {}
        constants = {"MATMUL": product, "UNIT": 1 << 16, **dict.fromkeys(lacks), **sizes}
        binary = build(train_gpt.mlp_kernel, types, constants, capability, **options)
        shared = binary.metadata.shared
        print(capability, product, tile, "shared", shared)
        assert shared <= limit, (capability, product, shared)
        assert ("wgmma.mma_async" in binary.asm["ptx"]) == hopper, "Hopper's tensor cores"
        assert ("cp.async.bulk.tensor" in binary.asm["ptx"]) == (capability >= 90), "TMA"
    e = 64
    # Of each kernel: its arguments, its sizes, and the pointers that each direction lacks, which are None.
    numbers = {"tokens": "i32", "T": "i32", "eps": "fp32"}
    pointers = dict.fromkeys(["qkv", "gain", "rotary", "q", "k", "v", "own_v", "d_qkv"], "*bf16")
    heads = {**pointers, "d_gain": "*fp32", **numbers}, {"H": 8, "K": 4, "HALF": 8}
    heads_lack = [["own_v", "d_qkv", "d_gain"], []]
    numbers = {"tokens": "i32", "v_stride": "i32", "min_square": "fp32"}
    pointers = dict.fromkeys(["y", "v", "gate", "out", "d_out", "d_y", "d_v", "d_gate"], "*bf16")
    xsa = {**pointers, **numbers}, {"K": 4, "GROUPS": 2}
    xsa_lack = [["d_out", "d_y", "d_v", "d_gate"], ["out"]]
    blocks = {"E": e, "BLOCK_N": train_gpt.HEAD_ROWS, "BLOCK_E": e}
    for kernel, (types, sizes), lacking in (
        (train_gpt.heads_kernel, heads, heads_lack), (train_gpt.xsa_kernel, xsa, xsa_lack)
    ):
        for number, absent in enumerate(lacking):
            present = {name: kind for name, kind in types.items() if name not in absent}
            constants = {"BACKWARD": number > 0, **sizes, **blocks, **dict.fromkeys(absent)}
            binary = build(kernel, present, constants, capability, num_warps=4)
            assert binary.metadata.shared <= 48 * 1024
print("compiled")
"""


@pytest.mark.parametrize("capability", [
    "90", *(pytest.param(other, marks=pytest.mark.slow) for other in ("80", "86", "89", "100", "120")),
])
def test_kernels_compile_for_real_gpus(
    capability: str, tmp_path: os.PathLike[str], pytestconfig: pytest.Config
) -> None:
    """Triton's compiler needs no GPU. All fits in shared memory and in registers; Hopper gets TMA and its
    tensor cores. What has passed here before is not compiled again."""
    source = Path(train_gpt.__file__).read_text(encoding="utf-8")
    kernels = source[source.index("\n# KERNELS") : source.index("\n# OPTIMIZER")]
    fingerprint = hashlib.sha256(f"{triton.__version__} {kernels} {COMPILE}".encode()).hexdigest()
    cache = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
    passed_before = f"kernels/{capability}"
    if cache is not None and cache.get(passed_before, "") == fingerprint:
        return
    path = os.pathsep.join([os.path.dirname(os.path.abspath(train_gpt.__file__)), *sys.path])
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path,
    }
    command = [sys.executable, "-c", COMPILE, capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True,
                          timeout=DEADLINE_SECONDS)
    assert done.returncode == 0 and done.stdout.endswith("compiled\n"), done.stderr[-3000:]
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stdout)
    # The MLP's kernel for four products; heads and XSA, each forward and backward.
    assert set(spilled) == {("0", "0")} and len(spilled) == 8
    if cache is not None:
        cache.set(passed_before, fingerprint)


# (rows, positions, query heads, key heads, channels of a head, half of the rotated ones): fewer tokens than a
# program takes, more, and just as many; groups of three and of one; all or few channels rotated.
SMALL_HEADS = (1, 5, 6, 2, 64, 8)
HEAD_SHAPES = [SMALL_HEADS, (2, 18, 3, 1, 24, 5), (2, 16, 2, 2, 16, 8)]


def random_heads(
    rows: int, positions: int, heads: int, key_heads: int, channels: int, half: int
) -> tuple[list[Tensor], Tensor]:
    """Projected heads, gains, and what makes gates; and a rotation. One token's value is zero."""
    generator = torch.Generator().manual_seed(0)
    qkv_BTNE = torch.randn(rows, positions, heads + 2 * key_heads, channels, generator=generator)
    qkv_BTNE[0, 0, -1] = 0
    gain_H = torch.randn(heads, generator=generator)
    x_BTD = torch.randn(rows, positions, 20, generator=generator)
    gate_HW = torch.randn(heads, 12, generator=generator)
    angles = torch.randn(positions, 1, half, generator=generator)
    return [qkv_BTNE, gain_H, x_BTD, gate_HW], torch.stack([angles.cos(), angles.sin()])


def around_attention(heads: Any, xsa: Any, rotary: Tensor, uses: int = 2) -> Callable[..., Tensor]:
    """What is made of heads before and after attention; uses: how often their values are used."""

    def function(qkv_BTNE: Tensor, gain_H: Tensor, *gate: Tensor) -> Tensor:
        of = heads(qkv_BTNE, gain_H, rotary.to(qkv_BTNE))
        q_BTHE = of.q_BTHE
        if gate:
            x_BTD, gate_HW = gate
            gate = x_BTD[..., :12], gate_HW
        if uses == 2:
            q_BTHE = xsa(q_BTHE, of.own_BTKE, *gate)
        # The kernel repeats keys and values for the query heads of a group.
        repeated = [train_gpt.repeat_heads(tensor, q_BTHE) for tensor in (of.k_BTKE, of.v_BTKE)]
        return torch.cat([q_BTHE, *repeated], dim=2)

    return function


@needs_runnable_kernels
@pytest.mark.parametrize(("shape", "uses", "dtype"), [
    *((shape, 2, dtype) for dtype in DTYPES for shape in HEAD_SHAPES), (SMALL_HEADS, 1, DTYPES[0]),
], ids=str)
def test_heads_and_xsa_exactly(shape: tuple[int, ...], dtype: torch.dtype, uses: int, poisoned: None) -> None:
    tensors, rotary = random_heads(*shape)
    rotary = rotary.to(DEVICE)
    if uses == 1 or dtype == torch.float16:
        tensors = tensors[:2]  # no gates
    assert_as_exact_as_plain(
        around_attention(train_gpt.heads_fused, train_gpt.xsa_fused, rotary, uses),
        around_attention(train_gpt.heads_plain, train_gpt.xsa_plain, rotary, uses),
        tensors,
        dtype,
    )


@needs_runnable_kernels
def test_heads_that_lie_elsewhere_give_the_same_result() -> None:
    (qkv_BTNE, gain_H, *_), rotary = random_heads(2, 3, 2, 1, 8, 2)
    fused = around_attention(train_gpt.heads_fused, train_gpt.xsa_fused, rotary.to(DEVICE))
    qkv_BTNE, gain_H = qkv_BTNE.to(DEVICE), gain_H.to(DEVICE)
    plain = fused(qkv_BTNE, gain_H)
    for axes in ((0, 1), (2, 3)):
        turned = qkv_BTNE.transpose(*axes).contiguous().transpose(*axes)
        assert torch.equal(fused(turned, gain_H), plain)
    # Values of their own, that do not lie between other heads.
    heads = train_gpt.heads_plain(qkv_BTNE, gain_H, rotary.to(DEVICE))
    between = train_gpt.xsa_fused(heads.q_BTHE, heads.own_BTKE)
    alone = train_gpt.xsa_fused(heads.q_BTHE, heads.own_BTKE.contiguous())
    assert torch.equal(between, alone)


@needs_runnable_kernels
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_model_is_the_same_with_all_its_kernels(compiled: bool) -> None:
    """Loss and gradients, also where all is traced in one graph."""
    config = tiny_config(NUM_LAYERS=1, NUM_LOOPS=0, PARALLEL_START_LAYER=-1, XSA_LAST_N=1, COMPILE=0)
    model = train_gpt.build_model(config).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(DEVICE)
    ids_BT = torch.randint(2, config.vocab_size, (2, 12)).to(DEVICE)
    plain = model.loss(ids_BT, ids_BT)
    expected = torch.autograd.grad(plain, list(model.parameters()))
    model.ops = train_gpt.Ops(mlp=train_gpt.mlp_fused, heads=train_gpt.heads_fused, xsa=train_gpt.xsa_fused)
    loss_of = train_gpt.GPT.loss
    if compiled:
        loss_of = torch.compile(loss_of, dynamic=False, fullgraph=True, backend="aot_eager")
    fused = loss_of(model, ids_BT, ids_BT)
    torch.testing.assert_close(fused, plain)
    found = torch.autograd.grad(fused, list(model.parameters()))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()) + 1e-9)


def test_eight_gpus_want_a_kernel_that_keeps_documents_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one a paid step is longer by half; who asks for it by name gets it."""
    monkeypatch.setattr(train_gpt.Machine, "gather", lambda _, value: [value])
    last = {setting: names[-1:] for setting, names in train_gpt.IMPLEMENTATIONS.items()}
    monkeypatch.setattr(train_gpt, "implementations_to_try", lambda setting, *_: last[setting])
    told = r"DOC_MASK=1 .*flash_attn_3.*COMPUTE_DTYPE=bfloat16.*ATTENTION=sdpa$"
    with pytest.raises(train_gpt.ConfigError, match=told):
        train_gpt.fast_ops(SMALL, Card(world_size=8))
    for config in (dataclasses.replace(SMALL, attention="sdpa"), dataclasses.replace(SMALL, doc_mask=False)):
        assert train_gpt.fast_ops(config, Card(world_size=8)).ops == train_gpt.Ops()
