"""What reaches the device: each operation a launch with bytes, FLOP and time, and the memory alive after it.

An operation with arithmetic that counts must stand in one of the tables below or among the
`custom_operations` of the caller. Any other one of a foreign namespace, and any that torch itself knows to
have FLOP, is refused with UnknownOperation: work that nobody entered would look free.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu_model.roofline import Card, attention_rate, launch_seconds, matrix_product_rate

# Name of a custom operation, as in "train_gpt.linear_leaky_square", and from its arguments its FLOP and the
# bytes of them that it does not read. All other bytes of its inputs and outputs count once.
CustomOperations = Mapping[str, Callable[[Sequence[Any]], tuple[float, float]]]

# Products of matrices, and where the first factor stands among the arguments.
MATRIX_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "baddbmm_": 1}

# Namespaces whose other operations are element-wise work, sums and copies: bytes alone count.
BYTES_ALONE = ("aten", "prims", "inductor")

# They reserve memory and launch nothing.
ALLOCATIONS = ("empty", "empty_strided", "empty_like", "new_empty")

BACKWARD_OVER_FORWARD = 2.5  # FLOP of attention's gradient, which computes the scores again


class UnknownOperation(RuntimeError):
    """An operation that no table here knows, so its cost cannot be told."""


class AttentionCall(NamedTuple):
    """Where an attention operation has its query, and how many positions the rows have."""

    query: int  # place among the arguments
    backward: bool
    length_argument: int | None = None  # place of the most keys of a document, for packed ones
    length_axis: int | None = None  # axis of the query that counts positions, for separate rows


ATTENTION = {
    "torch_attn._varlen_attn": AttentionCall(0, False, length_argument=6),
    "torch_attn._varlen_attn_backward": AttentionCall(1, True, length_argument=9),
    "_flash_attention_forward": AttentionCall(0, False, length_argument=6),
    "_flash_attention_backward": AttentionCall(1, True, length_argument=9),
    "_scaled_dot_product_flash_attention": AttentionCall(0, False, length_axis=2),
    "_scaled_dot_product_flash_attention_backward": AttentionCall(1, True, length_axis=2),
    "_scaled_dot_product_efficient_attention": AttentionCall(0, False, length_axis=2),
    "_scaled_dot_product_efficient_attention_backward": AttentionCall(1, True, length_axis=2),
    "gpu_model.attention": AttentionCall(0, False, length_axis=1),
    "gpu_model.attention_backward": AttentionCall(1, True, length_axis=1),
}


@dataclass(frozen=True)
class Launch:
    """One launch on the device."""

    kind: str  # product, attention, custom, generated or eager
    name: str
    moved_bytes: float
    flop: float
    microseconds: float  # modelled
    shapes: str
    live_bytes: int  # of all tensors alive just after it
    instructions: float = 0.0  # of all threads; 0: not counted


class _Storage(NamedTuple):
    reference: StorageWeakRef
    size_bytes: int


class Recorder:
    """The launches of one graph or one eager step, and its peak memory.

    attention_keys: mean number of keys that a token attends to; 0: half the longest row (causal).
    """

    def __init__(
        self, card: Card, custom_operations: CustomOperations | None = None, attention_keys: float = 0.0
    ) -> None:
        self.card = card
        self.custom_operations = custom_operations or {}
        self.attention_keys = attention_keys
        self.launches: list[Launch] = []
        self.peak_bytes = 0
        self.peak_at = ""  # the launch after which that much was alive
        self._storages: dict[int, _Storage] = {}

    def track(self, tensor: Tensor) -> None:
        """Count the memory of a tensor on the device as long as it is alive; views share theirs."""
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = _Storage(StorageWeakRef(storage), storage.nbytes())

    def live_bytes(self, where: str) -> int:
        """Bytes alive now; the most so far is the peak, reached at `where`."""
        live = 0
        for key, storage in list(self._storages.items()):
            if storage.reference.expired():
                del self._storages[key]
            else:
                live += storage.size_bytes
        if live > self.peak_bytes:
            self.peak_bytes = live
            self.peak_at = where
        return live

    def add(
        self, kind: str, name: str, moved_bytes: float, flop: float = 0.0, flop_per_second: float = 0.0,
        shapes: str = "", instructions: float = 0.0,
    ) -> None:  # fmt: skip
        """One launch."""
        seconds = launch_seconds(self.card, moved_bytes, flop, flop_per_second, instructions)
        live = self.live_bytes(name)
        launch = Launch(kind, name, moved_bytes, flop, 1e6 * seconds, shapes, live, instructions)
        self.launches.append(launch)


class Watch(TorchDispatchMode):
    """Within it, each operation that does work on the device becomes a launch of the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*arguments, **(keywords or {}))
        inputs = tensors_in((arguments, keywords))
        outputs = tensors_in(result)
        for tensor in (*inputs, *outputs):
            self.recorder.track(tensor)
        if _does_work(operation, inputs, outputs):
            account(self.recorder, operation, arguments, inputs, outputs)
        return result


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors of nested tuples, lists and dictionaries, in their order."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of all elements, those of an expanded tensor counted each time."""
    return tensor.numel() * tensor.element_size()


def _does_work(operation: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether the operation launches anything on the device: views and allocations do not."""
    if operation.namespace == "prim":
        return False
    if all(tensor.device.type != "cuda" for tensor in (*inputs, *outputs)):
        return False
    if short_name(operation) in ALLOCATIONS:
        return False
    if operation._schema.is_mutable or not inputs or not outputs:
        return True
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return any(output.untyped_storage()._cdata not in storages for output in outputs)


def short_name(operation: Any) -> str:
    """Name without overload, and for ATen without namespace: "mm", "train_gpt.linear_leaky_square"."""
    name, _, _ = str(operation).removeprefix("aten.").rpartition(".")
    return name


def account(
    recorder: Recorder, operation: Any, arguments: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor]
) -> None:
    """Add the launch of one operation. Raises UnknownOperation where its FLOP are not known."""
    name = short_name(operation)
    full_name = str(operation).removeprefix("aten.")
    distinct = {id(tensor): tensor for tensor in (*inputs, *outputs)}
    moved_bytes = sum(tensor_bytes(tensor) for tensor in distinct.values())
    dtype = str(inputs[0].dtype if inputs else torch.float32).removeprefix("torch.")
    product_rate = matrix_product_rate(recorder.card, dtype)

    if name in MATRIX_PRODUCTS:
        first = MATRIX_PRODUCTS[name]
        a, b = arguments[first : first + 2]
        shapes = f"{tuple(a.shape)}@{tuple(b.shape)} {dtype}"
        # torch adds in place alone: it first copies an addend that lies elsewhere, unless it is one row.
        if first and arguments[0].dim() > 1 and outputs[0] is not arguments[0]:
            copied = 2 * tensor_bytes(outputs[0])
            recorder.add("eager", f"copy before {full_name}", copied, shapes=shapes_of(inputs[:1]))
        recorder.add("product", full_name, moved_bytes, 2 * a.numel() * b.size(-1), product_rate, shapes)
    elif name in recorder.custom_operations:
        flop, unread_bytes = recorder.custom_operations[name](arguments)
        moved_bytes -= unread_bytes
        recorder.add("custom", full_name, moved_bytes, flop, product_rate, shapes_of(inputs[:3]))
    elif name in ATTENTION:
        flop = attention_flop(ATTENTION[name], arguments, recorder.attention_keys)
        rate = attention_rate(recorder.card)
        recorder.add("attention", full_name, moved_bytes, flop, rate, shapes_of(inputs[:3]))
    elif operation.namespace not in BYTES_ALONE or operation.overloadpacket in flop_registry:
        raise UnknownOperation(
            f"{full_name} of {shapes_of(inputs)}: no table of benchmarks/gpu_model knows its FLOP, so its "
            "work would look free; enter it in CUSTOM_OPERATIONS of subject.py, or, if it is torch's own, in "
            "accounting.py"
        )
    elif name.startswith(("_foreach", "_fused")):  # one launch for a whole list, or few
        recorder.add("eager", full_name, moved_bytes, shapes=f"{len(arguments[0])} tensors")
    else:
        recorder.add("eager", full_name, moved_bytes, shapes=shapes_of(inputs[:3]))


def attention_flop(call: AttentionCall, arguments: Sequence[Any], keys: float) -> float:
    """FLOP of scores and of their product with the values; keys: as `Recorder.attention_keys`."""
    query = arguments[call.query]
    if not keys:
        if call.length_argument is not None:
            keys = arguments[call.length_argument] / 2
        else:
            assert call.length_axis is not None, "an entry of ATTENTION names one of the two"
            keys = query.size(call.length_axis) / 2
    flop = 4 * query.numel() * keys
    return BACKWARD_OVER_FORWARD * flop if call.backward else flop


def shapes_of(tensors: Sequence[Tensor]) -> str:
    """Shapes as text: "98304x512 2048x512"."""
    return " ".join("x".join(str(size) for size in tensor.shape) for tensor in tensors)
