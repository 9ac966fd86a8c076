"""Attention kernels that this machine does not have: operations with the right shapes and no body.

They serve to count launches and bytes. They say nothing about whether the real package compiles into one
graph. Import it after `fake_gpu.install`.
"""

import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("gpu_model::attention", mutates_args=())
def attention(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor]:
    """Output of q's shape, and the log-sum-exp (B, H, T) that the backward pass needs."""
    raise NotImplementedError("nothing can be run on the fake GPU")


@attention.register_fake
def _attention_shapes(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor]:
    rows, positions, heads, _ = q_BTHE.shape
    log_sum_BHT = q_BTHE.new_empty(rows, heads, positions, dtype=torch.float32)
    return torch.empty_like(q_BTHE), log_sum_BHT


@torch.library.custom_op("gpu_model::attention_backward", mutates_args=())
def attention_backward(
    d_out_BTHE: Tensor, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, out_BTHE: Tensor, log_sum_BHT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    raise NotImplementedError("nothing can be run on the fake GPU")


@attention_backward.register_fake
def _attention_backward_shapes(
    d_out_BTHE: Tensor, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, out_BTHE: Tensor, log_sum_BHT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_BTHE), torch.empty_like(k_BTKE), torch.empty_like(v_BTKE)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, d_out_BTHE: Tensor, _d_log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return attention_backward(d_out_BTHE.contiguous(), *ctx.saved_tensors)


attention.register_autograd(_gradients, setup_context=_save)


def install_flash_attention() -> None:
    """Make `import flash_attn_interface` (FA3) find the stand-in."""

    # These names are read from the signature, so they are the package's own.
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, causal: bool = True,
    ) -> Tensor:  # fmt: skip
        return attention(q[None], k[None], v[None])[0][0]

    module = types.ModuleType("flash_attn_interface")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn_interface", None)
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    sys.modules["flash_attn_interface"] = module


def sdpa_as_cuda_chooses(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` by the kernel that a card would choose, since choosing needs a card.

    Without a mask flash attention; with one the memory-efficient kernel, whose bias is the mask in q's type.
    """
    if attn_mask is None:
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(q_BHTE, k_BKTE, v_BKTE, 0.0, is_causal)
        return outputs[0]
    nothing = torch.zeros(attn_mask.shape, dtype=q_BHTE.dtype, device=q_BHTE.device)
    bias = nothing.masked_fill(~attn_mask, float("-inf")).expand(-1, q_BHTE.size(1), -1, -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q_BHTE, k_BKTE, v_BKTE, bias, True, 0.0, False)[0]
