"""The fused MLP against eager PyTorch and torch.compile of its plain twin.

    python benchmarks/kernels.py [--keep]

Each form runs forward, backward and both at the per-GPU shapes of the baseline, PR #549, PR #1493 and the
default config, in bf16. The floor of a pass adds, product by product, the larger of operations over the
matmul rate and least bytes over the copy rate, both measured here first. `gpu_check.py` times the forms of
all operations at the shapes of a run. Without a GPU it says so, exits with status 2 and writes nothing.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks import results  # noqa: E402

TITLE = "Kernels"
BYTES = 2  # of a bf16 element
QUANTILES = (0.5, 0.2, 0.8)
HEADER = "| config | pass | form | median ms | p20 | p80 | TFLOP/s | GB/s | floor ms | of floor |"


@dataclass(frozen=True)
class Shape:
    """What one GPU of eight works on."""

    name: str
    tokens: int  # rows of one micro-batch
    dim: int
    hidden: int
    slope: float


@dataclass(frozen=True)
class Cost:
    """Least work of one product or kernel."""

    operations: float
    bytes: float


@dataclass(frozen=True)
class Roof:
    """Measured rates of this GPU."""

    tflops: float
    gb_per_s: float

    def floor_ms(self, costs: list[Cost]) -> float:
        """Milliseconds below which these kernels, one after another, cannot finish at the measured rates."""
        return sum(max(c.operations / self.tflops / 1e9, c.bytes / self.gb_per_s / 1e6) for c in costs)


def shapes() -> list[Shape]:
    """The four configurations; the default is read from train_gpt.Config."""
    config = train_gpt.Config.from_env({})
    hidden = int(config.mlp_mult * config.model_dim)
    return [
        Shape("baseline", 65_536, 512, 1024, 0.0),
        Shape("PR 549", 98_304, 512, 1536, 0.5),
        Shape("PR 1493", 98_304, 512, 2048, 0.5),
        Shape("default", config.micro_batch_tokens, config.model_dim, hidden, config.leaky_slope),
    ]


def mlp_costs(s: Shape) -> dict[str, list[Cost]]:
    """Two products forward, four backward; P and H are written once and read once a use.

    The residual is read by the second product, and with its gradient by the last but two.
    """
    x = s.tokens * s.dim
    weight = s.hidden * s.dim
    hidden = s.tokens * s.hidden
    operations = 2.0 * s.tokens * s.dim * s.hidden
    two_hidden = Cost(operations, BYTES * (x + weight + 2 * hidden))
    one_hidden = Cost(operations, BYTES * (x + weight + hidden))
    forward = [two_hidden, Cost(operations, one_hidden.bytes + BYTES * x)]
    backward = [two_hidden, Cost(operations, one_hidden.bytes + BYTES * 2 * x), one_hidden, one_hidden]
    return {"forward": forward, "backward": backward, "both": forward + backward}


def passes(function: Callable[..., Tensor], tensors: list[Tensor]) -> dict[str, Callable[[], object]]:
    """The three things to time; the backward pass reuses one graph."""
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    out = function(*tensors)
    d_out = torch.randn_like(out)
    return {
        "forward": lambda: function(*tensors),
        "backward": lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True),
        "both": lambda: torch.autograd.grad(function(*tensors), leaves, d_out),
    }


def forms(plain: Callable[..., Tensor], **fused: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """Eager, compiled and ours; ours are compiled too, as they are in a run."""
    torch._dynamo.reset()
    options = {"dynamic": False, "fullgraph": True}
    ours = {name: torch.compile(function, **options) for name, function in fused.items()}
    return {"eager": plain, "compiled": torch.compile(plain, **options), **ours}


def timed(
    s: Shape, functions: dict[str, Callable[..., Tensor]], tensors: list[Tensor],
    costs: dict[str, list[Cost]], roof: Roof,
) -> list[dict[str, Any]]:  # fmt: skip
    """Median, p20 and p80 of every form and pass, and the least work there is."""
    from triton.testing import do_bench

    found: list[dict[str, Any]] = []
    for form, function in functions.items():
        for name, run in passes(function, tensors).items():
            work = {
                "operations": sum(c.operations for c in costs[name]),
                "bytes": sum(c.bytes for c in costs[name]),
                "floor_ms": roof.floor_ms(costs[name]),
            }
            times = do_bench(run, quantiles=QUANTILES)
            found.append({"config": s.name, "pass": name, "form": form, "ms": times, **work})
            print(found[-1], file=sys.stderr, flush=True)
    return found


def kernel_times(s: Shape, roof: Roof) -> list[dict[str, Any]]:
    """The MLP at one shape, on normal inputs (zeros would draw less power and run faster)."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, device="cuda")).bfloat16().requires_grad_()

    def mlp_plain(*tensors: Tensor) -> Tensor:
        return train_gpt.mlp_plain(*tensors, 1.0, s.slope)

    def mlp_fused(*tensors: Tensor) -> Tensor:
        return train_gpt.mlp_fused(*tensors, 1.0, s.slope)

    def mlp_fused_in_pairs(*tensors: Tensor) -> Tensor:
        return train_gpt.mlp_fused_in_pairs(*tensors, 1.0, s.slope)

    scale = s.dim**-0.5
    mlp = [
        normal(s.tokens, s.dim),
        normal(s.hidden, s.dim, scale=scale),
        normal(s.dim, s.hidden, scale=scale),
    ]
    functions = forms(mlp_plain, kernel=mlp_fused, kernel2=mlp_fused_in_pairs)
    return timed(s, functions, mlp, mlp_costs(s), roof)


def heads_costs(tokens: int, heads: int, key_heads: int, head_dim: int) -> dict[str, list[Cost]]:
    """A kernel before attention and one behind it, each way: every tensor is read or written once."""
    queries = tokens * heads * head_dim
    keys = tokens * key_heads * head_dim
    gates = tokens * heads
    projected = queries + 2 * keys
    # Queries and keys are read and written; backward the gradients of all three as well, of the values twice.
    before = Cost(0.0, BYTES * 2 * (queries + keys))
    before_backward = Cost(0.0, BYTES * (queries + keys + 2 * projected + keys) + 4 * gates)
    behind = Cost(0.0, BYTES * (2 * queries + keys + gates))
    behind_backward = Cost(0.0, BYTES * (3 * queries + 2 * keys + 2 * gates))
    forward = [before, behind]
    backward = [before_backward, behind_backward]
    return {"forward": forward, "backward": backward, "both": forward + backward}


def measure_roof() -> Roof:
    """Matmul rate in bf16 and device copy rate of this GPU."""
    from triton.testing import do_bench

    side = 8192
    elements = 1 << 29
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_ms = do_bench(lambda: a @ b, return_mode="median")
    source = torch.randn(elements, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_ms = do_bench(lambda: target.copy_(source), return_mode="median")
    return Roof(tflops=2 * side**3 / matmul_ms / 1e9, gb_per_s=2 * BYTES * elements / copy_ms / 1e6)


def tables(measured: dict[str, Any]) -> list[str]:
    """The passes of the MLP."""
    roof = measured["roof"]
    lines = [
        f"Roof, measured first: bf16 matmul {roof['tflops']:.0f} TFLOP/s, copy {roof['gb_per_s']:.0f} GB/s. "
        "TFLOP/s and GB/s count the least work.",
        "", HEADER, "|" + "---|" * (HEADER.count("|") - 1),
    ]  # fmt: skip
    for one in measured["kernels"]:
        median, low, high = one["ms"]
        lines.append(
            f"| {one['config']} | {one['pass']} | {one['form']} | {median:.3f} | {low:.3f} | {high:.3f} | "
            f"{one['operations'] / median / 1e9:.0f} | {one['bytes'] / median / 1e6:.0f} | "
            f"{one['floor_ms']:.3f} | {one['floor_ms'] / median:.0%} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    keep = parser.parse_args().keep
    if not torch.cuda.is_available() or train_gpt.triton is None:
        print("kernels: needs a CUDA GPU and Triton; nothing measured, nothing written", file=sys.stderr)
        return 2
    before = results.conditions()
    roof = measure_roof()
    kernels: list[dict[str, Any]] = []
    for shape in shapes():
        kernels += kernel_times(shape, roof)
        torch.cuda.empty_cache()
    rates = {"tflops": roof.tflops, "gb_per_s": roof.gb_per_s}
    measured = {"roof": rates, "kernels": kernels}
    results.finish("kernels", before, measured, keep)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
