"""The least time of the script's kernels on this GPU, from rates that are measured first.

The floor of a pass adds, kernel by kernel, the larger of operations over the matmul rate and least bytes over
the copy rate. `gpu_check.py` compares it with the time of each form.
"""

from dataclasses import dataclass

import torch

BYTES = 2  # of a bf16 element


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


def mlp_costs(tokens: int, dim: int, hidden_dim: int) -> dict[str, list[Cost]]:
    """Two products forward, four backward; hidden values are written once and read once a use.

    The residual is read by the second product, and with its gradient by the last but two.
    """
    x = tokens * dim
    weight = hidden_dim * dim
    hidden = tokens * hidden_dim
    operations = 2.0 * tokens * dim * hidden_dim
    two_hidden = Cost(operations, BYTES * (x + weight + 2 * hidden))
    one_hidden = Cost(operations, BYTES * (x + weight + hidden))
    forward = [one_hidden, Cost(operations, one_hidden.bytes + BYTES * x)]
    backward = [two_hidden, Cost(operations, one_hidden.bytes + BYTES * 2 * x), one_hidden, one_hidden]
    return {"forward": forward, "backward": backward, "both": forward + backward}


def heads_costs(tokens: int, heads: int, key_heads: int, head_dim: int) -> dict[str, list[Cost]]:
    """A kernel before attention and one behind it, each way: every tensor is read or written once."""
    queries = tokens * heads * head_dim
    keys = tokens * key_heads * head_dim
    gates = tokens * heads
    projected = queries + 2 * keys
    # All heads are read, and keys and values are written once for each query head. Backward their gradients
    # are read, those of the values once more, and those of all heads are written.
    before = Cost(0.0, BYTES * (projected + 3 * queries))
    before_backward = Cost(0.0, BYTES * (queries + keys + 3 * queries + keys + projected) + 4 * gates)
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
