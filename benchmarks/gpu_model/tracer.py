"""A backend for torch.compile that measures each graph instead of compiling it.

    tracer = Tracer(card, folder, subject.CUSTOM_OPERATIONS)
    torch.compile(function, dynamic=False, fullgraph=True, backend=tracer.backend)(...).backward()
    tracer.graphs

Real: Dynamo, AOTAutograd, the choice of what is saved for the backward pass, Inductor's lowering, scheduling
and code generation for "cuda". Then the generated code runs on fake tensors (inductor.py). Import it after
`fake_gpu.install`.
"""

import collections
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_model import inductor, instructions
from benchmarks.gpu_model.accounting import ATTENTION, CustomOperations, Recorder
from benchmarks.gpu_model.inductor import Replay, empty_twin, sizes_of
from benchmarks.gpu_model.roofline import Card


class Output(NamedTuple):
    """A tensor that a graph makes: of the forward graph, the loss and what the backward pass needs."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


@dataclass
class Graph:
    """What is known about one graph."""

    tag: str  # also the name of its file of generated code
    backward: bool
    nodes: int
    operations: collections.Counter[str]  # how often each occurs
    outputs: list[Output]  # those that are not inputs as well
    replay: Replay | None  # None: traced alone

    @property
    def output_bytes(self) -> int:
        """Bytes of all outputs."""
        return sum(output.size_bytes for output in self.outputs)

    @property
    def attention_calls(self) -> int:
        """How often attention is called."""
        total = 0
        for operation, count in self.operations.items():
            name, _, _ = operation.removeprefix("aten.").rpartition(".")
            if name in ATTENTION:
                total += count
        return total


class Tracer:
    """Measures the graphs that torch.compile hands to `backend`.

    replay: False traces alone, in a third of the time: graphs, saved bytes, recompiles, but no launches.
    counted: the kernels whose instructions are counted: those with a "function", "all" or "none".
    """

    def __init__(
        self, card: Card, folder: Path, custom_operations: CustomOperations | None = None,
        attention_keys: float = 0.0, replay: bool = True, counted: str = "function",
    ) -> None:  # fmt: skip
        inductor.patch()
        self.card = card
        self.folder = folder
        self.custom_operations = custom_operations
        self.attention_keys = attention_keys
        self.replay = replay
        self.counter = None
        if counted != "none":
            self.counter = instructions.Counter(card, folder, every=counted == "all")
        self.fake_mode = FakeTensorMode()
        self.label = ""
        self.graphs: list[Graph] = []

    def start(self, label: str) -> None:
        """Forget the graphs and what Dynamo compiled; `label` begins the names of the next ones."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.label = label
        self.graphs = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """A tensor on the fake GPU."""
        with self.fake_mode:
            return torch.empty(*shape, dtype=dtype, device="cuda")

    def backend(self, graph_module: Any, example_inputs: list[Any]) -> Callable[..., Any]:
        """What torch.compile takes as its backend."""
        return compile_fx.compile_fx(graph_module, example_inputs, inner_compile=self._measure)

    def _measure(self, graph_module: Any, example_inputs: list[Any], **options: Any) -> Callable[..., Any]:
        """Measure one graph; the function returned in its place makes empty outputs of the right shapes."""
        backward = bool(options.get("is_backward"))
        nodes = list(graph_module.graph.nodes)
        tag = self._next_tag(backward)
        replay = None
        seconds = 0.0
        # Collected first: code generation changes the graph.
        operations = collections.Counter(str(node.target) for node in nodes if node.op == "call_function")
        outputs = _output_values(graph_module)
        new_outputs = _new_outputs(graph_module)
        if self.replay:
            start = time.perf_counter()
            code = inductor.generate_code(graph_module, example_inputs, **options)
            seconds = time.perf_counter() - start
            path = self.folder / f"{tag}.py"
            path.write_text(code, encoding="utf-8")
            recorder = Recorder(self.card, self.custom_operations, self.attention_keys)
            replay = Replay(code, path, example_inputs, recorder, self.fake_mode, self.counter)
        self.graphs.append(Graph(tag, backward, len(nodes), operations, new_outputs, replay))
        print(f"  graph {tag}: {len(nodes)} fx nodes, {seconds:.0f} s of code generation", flush=True)
        return self._boxed(outputs)

    def _next_tag(self, backward: bool) -> str:
        side = "bwd" if backward else "fwd"
        count = sum(graph.backward == backward for graph in self.graphs)
        return f"{self.label}_{side}{count}"

    def _boxed(self, outputs: list[Any]) -> Callable[[list[Any]], list[Any]]:
        """A compiled graph as AOTAutograd calls it: one list of inputs, which the callee empties."""

        def run(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            made = []
            with self.fake_mode:
                for value in outputs:
                    if isinstance(value, Tensor):
                        value = empty_twin(value)
                    elif isinstance(value, torch.SymInt):
                        value = inductor.as_int(value)
                    made.append(value)
            return made

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _output_nodes(graph_module: Any) -> list[Any]:
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    return tree_leaves(output.args[0])


def _output_values(graph_module: Any) -> list[Any]:
    """The outputs as fake tensors, numbers or None."""
    return [_value_of(node) for node in _output_nodes(graph_module)]


def _value_of(node: Any) -> Any:
    return node.meta.get("val") if hasattr(node, "meta") else node


def _new_outputs(graph_module: Any) -> list[Output]:
    """The tensors among the outputs that are not inputs passed on."""
    inputs = {node.name for node in graph_module.graph.nodes if node.op == "placeholder"}
    new = []
    for node in _output_nodes(graph_module):
        value = _value_of(node)
        if not isinstance(value, Tensor) or node.name in inputs:
            continue
        shape = tuple(sizes_of(value))
        dtype = str(value.dtype).removeprefix("torch.")
        new.append(Output(node.name, shape, dtype, math.prod(shape) * value.element_size()))
    return new
