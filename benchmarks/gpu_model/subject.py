"""All that this package asks of train_gpt.py: what is renamed there is renamed here, and nowhere else.

Import it after `fake_gpu.install`, if that is installed at all: it imports torch.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import train_gpt


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
    ops = train_gpt.Ops()
    for setting, form in (("attention", attention), ("fused_mlp", mlp), ("fused_heads", heads)):
        ops = train_gpt.with_form(ops, setting, form)
    gpt.ops = ops
    return gpt


def loss(gpt: nn.Module, inputs_BT: Tensor, targets_BT: Tensor, starts: Tensor, looping: bool) -> Tensor:
    """Mean loss of a batch, with recurrence if `looping`."""
    return gpt.loss(inputs_BT, targets_BT, starts, looping=looping)


def hidden(gpt: nn.Module, inputs_BT: Tensor, starts: Tensor) -> Tensor:
    """Hidden states (B, T, D) as scoring asks for them: with recurrence, if the model has any."""
    return gpt(inputs_BT, starts, looping=gpt.settings.num_loops > 0)


def learn_adapters(compiled: Callable[..., Any], gpt: nn.Module, ids_BT: Tensor, config: Any) -> None:
    """Read whole windows of as many documents as fit, with their adapters, both ways, and step the adapters.

    The script scores the last TTT_CHUNK_SIZE tokens of each window outside of its graphs: not seen here.
    """
    gpt.requires_grad_(False)
    layout = train_gpt.adapter_layout(config)
    size = sum(config.ttt_lora_rank * (config.model_dim + out) for visit in layout for out in visit.values())
    rounded_BP = torch.empty(len(ids_BT), size, dtype=gpt.compute_dtype, device="cuda", requires_grad=True)
    starts = torch.empty(len(ids_BT) + 1, dtype=torch.int32, device="cuda")
    hidden_BTD = compiled(train_gpt.read_adapted)(gpt, ids_BT, starts, rounded_BP, config)
    hidden_BTD[:, -config.ttt_chunk_size :].sum().backward()
    wide_and_rounded = (torch.float32, torch.float32, gpt.compute_dtype, gpt.compute_dtype)
    flat = [torch.empty(rounded_BP.numel(), dtype=dtype, device="cuda") for dtype in wide_and_rounded]
    compiled(train_gpt.adamw_step)(*flat, torch.empty((), device="cuda"), config)


def loops(config: train_gpt.Config, phase: str) -> bool:
    """Whether the model runs its loop in a phase."""
    return phase != "train" and config.num_loops > 0


def visits(config: train_gpt.Config, looping: bool) -> int:
    """How many blocks one forward pass runs, and so how often it attends."""
    return len(train_gpt.visit_order(config, looping))


def sizes(config: train_gpt.Config) -> dict[str, int]:
    """Widths by which the products of a step can be told apart; 0: there is none of that kind."""
    gate = config.gate_window if config.sparse_attn_gate_enabled else 0
    return {"vocabulary": config.vocab_size, "mlp": config.mlp_dim, "gate": gate}


def rows(config: train_gpt.Config, phase: str, world_size: int = 8) -> tuple[int, int]:
    """Rows and their length in tokens that one of `world_size` ranks passes through the model at once."""
    if phase == "score":
        length = config.eval_length
        count = max(1, config.val_pass_tokens // length)
    elif phase == "adapters":
        length, count = config.eval_length, config.documents_at_once
    else:
        length = config.train_seq_len
        count = min(config.micro_batch_tokens, config.train_batch_tokens // world_size) // length
        if count == 0:
            raise train_gpt.ConfigError(
                f"MICRO_BATCH_TOKENS={config.micro_batch_tokens}, TRAIN_BATCH_TOKENS="
                f"{config.train_batch_tokens} of {world_size} ranks: expected a whole row of {length} tokens"
            )
    return count, length


def _linear_leaky_square(arguments: Sequence[Any]) -> tuple[float, float]:
    """Of A (M, K) times B (N, K) transposed; what follows in its epilogue is free beside it.

    Backward it also fills one number a row with zero, and turns its matrix: two launches of some 4 us each
    that are not seen. A product with another epilogue may not reach the share of a plain one.
    """
    a_MK, b_NK = arguments[:2]
    return 2 * a_MK.size(0) * a_MK.size(1) * b_NK.size(0), 0.0


def _heads(arguments: Sequence[Any]) -> tuple[float, float]:
    """Some 16 for each channel of q, k and v, in each direction: squares, their sum, rotation and products.

    The rotated channels are read again as their partners', from the lines of cache that the same program has
    just read: no bytes of memory. The values lie in the same tensor, and are not read in either direction.
    """
    qkv_BTNE, gain_H = arguments[:2]
    heads = qkv_BTNE.size(2)
    values = (heads - gain_H.size(0)) // 2
    return 16 * qkv_BTNE.numel(), qkv_BTNE.numel() * qkv_BTNE.element_size() * values / heads


def _xsa(arguments: Sequence[Any]) -> tuple[float, float]:
    """Some 20 for each channel of a query head, in each direction: sums of products, and more."""
    return 20 * arguments[0].numel(), 0.0


# Every custom operation of train_gpt.py, with its FLOP and the bytes of its arguments that it does not read;
# accounting.py refuses one that is missing here.
CUSTOM_OPERATIONS: dict[str, Callable[[Sequence[Any]], tuple[float, float]]] = {
    "train_gpt.linear_leaky_square": _linear_leaky_square,
    "train_gpt.heads": _heads,
    "train_gpt.xsa": _xsa,
}
