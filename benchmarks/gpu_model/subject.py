"""All that this package asks of train_gpt.py: what is renamed there is renamed here, and nowhere else.

Import it after `fake_gpu.install`, if that is installed at all: it imports torch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import train_gpt

# ======================================================================================================
# THE MODEL
# ======================================================================================================


def config(path: str = "", settings: Sequence[str] = ()) -> train_gpt.Config:
    """The configuration in the file `path` (empty: the defaults), with settings KEY=VALUE over it.

    Raises train_gpt.ConfigError.
    """
    environ = {"CONFIG": path} if path else {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise train_gpt.ConfigError(f"--set {setting}: expected KEY=VALUE")
        environ[key] = value
    return train_gpt.Config.from_env(environ)


def model(
    config: train_gpt.Config, attention: str = "varlen", mlp: str = "plain", heads: str = "plain"
) -> nn.Module:
    """The model in bf16 on the fake GPU, with forms of attention, MLP and heads; in a FakeTensorMode."""
    for method in (train_gpt.GPT.forward, train_gpt.GPT.loss):
        if "looping" not in inspect.signature(method).parameters:
            raise RuntimeError(
                f"train_gpt.{method.__qualname__} takes no `looping`: the step with recurrence and the one "
                "without would be the same one measured twice; say in subject.py how it is switched on"
            )
    torch.set_float32_matmul_precision("high")
    # No seed: fake tensors have no numbers, so none are drawn.
    gpt = train_gpt.GPT(config, seed=None)
    for name, parameter in list(gpt.named_parameters()):
        gpt.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, device="cuda")))
    gpt.compute_dtype = torch.bfloat16
    gpt.attend = train_gpt.load_attention(attention)
    gpt.mlp = {"plain": train_gpt.mlp_plain, "kernel": train_gpt.mlp_fused}[mlp]
    gpt.heads = {"plain": train_gpt.heads_plain, "kernel": train_gpt.heads_fused}[heads]
    gpt.xsa = {"plain": train_gpt.xsa_plain, "kernel": train_gpt.xsa_fused}[heads]
    if config.prefix_loss:
        of_token_V = torch.empty(config.vocab_size, dtype=torch.int64, device="cuda")
        gpt.prefixes = train_gpt.PrefixTargets(of_token_V, torch.empty((), device="cuda"))
    return gpt


def loss(gpt: nn.Module, inputs_BT: Tensor, targets_BT: Tensor, starts: Tensor, looping: bool) -> Tensor:
    """Mean loss of a batch, with recurrence if `looping`."""
    if gpt.prefixes is not None:
        return gpt.loss_with_prefixes(inputs_BT, targets_BT, starts, looping=looping)
    return gpt.loss(inputs_BT, targets_BT, starts, looping=looping)


def hidden(gpt: nn.Module, inputs_BT: Tensor, starts: Tensor) -> Tensor:
    """Hidden states (B, T, D) as scoring asks for them: with recurrence, if the model has any."""
    return gpt(inputs_BT, starts, looping=gpt.settings.num_loops > 0)


def loops(config: train_gpt.Config, phase: str) -> bool:
    """Whether the model runs its loop in a phase."""
    return phase != "train" and config.num_loops > 0


def visits(config: train_gpt.Config, looping: bool) -> int:
    """How many blocks one forward pass runs, and so how often it attends."""
    encoder, decoder = train_gpt.visit_order(config, looping)
    return len(encoder) + len(decoder)


def sizes(config: train_gpt.Config) -> dict[str, int]:
    """Widths by which the products of a step can be told apart; 0: there is none of that kind."""
    return {
        "vocabulary": config.vocab_size,
        "mlp": config.mlp_dim,
        "gate": config.gate_window if config.sparse_attn_gate_enabled else 0,
    }


def rows(config: train_gpt.Config, phase: str, world_size: int = 8) -> tuple[int, int]:
    """Rows and their length in tokens that one of `world_size` ranks passes through the model at once."""
    if phase == "score":
        length = config.eval_length
        count = max(1, config.val_pass_tokens // length)
    elif phase == "ttt":
        length = config.eval_length
        count = max(1, min(config.ttt_batch_seqs, config.ttt_chunk_tokens // length) // world_size)
    else:
        length = config.train_seq_len
        count = min(config.micro_batch_tokens, config.train_batch_tokens // world_size) // length
        if count == 0:
            raise train_gpt.ConfigError(
                f"MICRO_BATCH_TOKENS={config.micro_batch_tokens}, TRAIN_BATCH_TOKENS="
                f"{config.train_batch_tokens} of {world_size} ranks: expected a whole row of {length} tokens"
            )
    return count, length


# ======================================================================================================
# ITS OWN KERNELS
# ======================================================================================================


def _linear_leaky_square_flop(arguments: Sequence[Any]) -> float:
    """Of A (M, K) times B (N, K) transposed; the activation is free beside it."""
    a_MK, b_NK = arguments[:2]
    return 2 * a_MK.size(0) * a_MK.size(1) * b_NK.size(0)


def _heads_flop(arguments: Sequence[Any]) -> float:
    """Some 16 for each channel of q, k and v: squares, their sum, the rotation and the products.

    The rotated channels are read again as their partners', from the lines of cache that the same program has
    just read: no bytes of memory.
    """
    return 16 * arguments[0].numel()


def _xsa_flop(arguments: Sequence[Any]) -> float:
    """Some 20 for each channel of a query head: three or four sums of products, and what is made of them."""
    return 20 * arguments[0].numel()


# Every custom operation of train_gpt.py, with its FLOP; accounting.py refuses one that is missing here.
CUSTOM_OPERATIONS: dict[str, Callable[[Sequence[Any]], float]] = {
    "train_gpt.linear_leaky_square": _linear_leaky_square_flop,
    "train_gpt.heads": _heads_flop,
    "train_gpt.heads_backward": _heads_flop,
    "train_gpt.xsa": _xsa_flop,
    "train_gpt.xsa_backward": _xsa_flop,
}


def mlp_kernel() -> tuple[Any, dict[str, dict[str, int]]]:
    """The Triton kernel of the MLP, and its tiles by name: block sizes, `num_warps`, `num_stages`."""
    tiles = {
        "LARGE": train_gpt.LARGE_TILE,
        "MEDIUM": train_gpt.MEDIUM_TILE,
        "SMALL": train_gpt.SMALL_TILE,
    }
    return train_gpt.linear_leaky_square_kernel, {name: dict(tile) for name, tile in tiles.items()}


def mlp_kernel_types(dtype: str) -> dict[str, str]:
    """Triton's type of each argument of that kernel that is not a constant; `dtype`: bf16, fp16 or fp32."""
    pointers = dict.fromkeys(("a", "b", "pre", "out"), f"*{dtype}")
    sizes = dict.fromkeys(("M", "N", "K"), "i32")
    return {**pointers, **sizes, "slope": "fp32"}


def mlp_tile(dtype: str, shared_bytes: int) -> str:
    """The tile that the script takes for a dtype on a GPU whose blocks have so much shared memory."""
    if dtype == "fp32":
        return "SMALL"
    return "LARGE" if shared_bytes >= train_gpt.LARGE_TILE_SHARED_BYTES else "MEDIUM"


# ======================================================================================================
# WHAT RUNS BESIDE THE MODEL
# ======================================================================================================


def optimizer(gpt: nn.Module, config: train_gpt.Config, world_size: int) -> Any:
    """The optimizer of rank 0."""
    return train_gpt.Optimizer(gpt, config, train_gpt.Machine(rank=0, world_size=world_size))


def replace_orthogonalize(of: Any, wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
    """Let the optimizer call `wrap(orthogonalize)` in the place of its orthogonalize."""
    of.orthogonalize = wrap(of.orthogonalize)


def optimizer_step(of: Any) -> None:
    """One step at full learning rate, in the middle of a run."""
    of.step(1.0, 0.95, 100)


def add_up_gradients(parameters: list[nn.Parameter], world_size: int) -> None:
    """What test-time training sends between ranks before each of its steps."""
    train_gpt.add_up_gradients(parameters, train_gpt.Machine(rank=0, world_size=world_size))


def collect_hessians(gpt: nn.Module, inputs_BT: Tensor, starts: Tensor) -> None:
    """The Hessians of one micro-batch on one rank."""
    batch = train_gpt.Batch(inputs_BT=inputs_BT, targets_BT=inputs_BT, starts=starts)
    train_gpt.collect_hessians(gpt, [batch], train_gpt.Machine())


def has_hessians(config: train_gpt.Config, name: str) -> bool:
    """Whether GPTQ makes up for the rounding errors of this parameter."""
    return bool(train_gpt.parameter_table(config)[name].inputs)


def loss_per_token(gpt: nn.Module, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Nats (N,) of each target: the head, as scoring calls it."""
    return gpt.loss_per_token(hidden_ND, targets_N)


def window_rows(targets: int, context: int, stride: int, begins: np.ndarray, chunk: int) -> list[np.ndarray]:
    """Rows of sliding windows (first token, first target, end) of each chunk of targets."""
    return train_gpt.window_rows(targets, context, stride, begins, chunk)


def even_batch_rows(rows: list[int], most: int) -> int:
    """Rows of a batch of scoring, where chunks have so many rows and a pass at most `most`."""
    return train_gpt.even_batch_rows(rows, most)


def document_starts(tokens: np.ndarray, config: train_gpt.Config) -> np.ndarray:
    """Where the document of each target begins, as scoring asks for it."""
    return train_gpt.document_start_of_targets(tokens, config)


def drawn_model(config: train_gpt.Config) -> nn.Module:
    """A model whose matrices look about as trained ones do: rows of different spread, heavy tails."""
    gpt = train_gpt.build_model(config)
    table = train_gpt.parameter_table(config)
    random_bits = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if table[name].role:
                noise = torch.randn(parameter.shape, generator=random_bits)
                spread = 0.5 + torch.rand(*parameter.shape[:-1], 1, generator=random_bits)
                parameter.copy_(0.03 * spread * noise * (1 + 0.15 * noise.abs()))
    return gpt


@contextlib.contextmanager
def replaced_coder(wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within it, `wrap("encode", …)` codes and `wrap("quantize", …)` rounds what becomes an artifact."""
    encode = train_gpt.encode
    quantize = train_gpt.Quantizer.quantize
    train_gpt.encode = wrap("encode", encode)
    train_gpt.Quantizer.quantize = wrap("quantize", quantize)  # type: ignore[method-assign]
    try:
        yield
    finally:
        train_gpt.encode = encode
        train_gpt.Quantizer.quantize = quantize  # type: ignore[method-assign]


def write_artifact(path: Path, gpt: nn.Module, config: train_gpt.Config) -> str:
    """The artifact of weights rounded to nearest, beside the shipped script; the line for the log."""
    script = Path(train_gpt.__file__).read_bytes()
    budget = config.artifact_bytes_max - len(train_gpt.shipped_code(script, config.code_bytes))
    return train_gpt.write_artifact(path, gpt, config, {}, 64 * "0", budget)


def load_artifact(path: Path) -> nn.Module:
    """The model that the artifact holds."""
    gpt, _ = train_gpt.load_artifact(path)
    return gpt
