"""Inductor up to the code it generates, and that code run on fake tensors with kernels that only report.

What is replaced here are private names of torch 2.13; each has its reason. Import it after
`fake_gpu.install`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch._inductor.async_compile as async_compile
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor import compile_fx
from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu_model import instructions
from benchmarks.gpu_model.accounting import (
    Recorder,
    UnknownOperation,
    Watch,
    shapes_of,
    tensor_bytes,
    tensors_in,
)

LEAST_COUNTED_BYTES = 1e8  # of a launch: what moves less takes some microseconds, whatever it computes


class CodeReady(BaseException):
    """Carries the generated code out of Inductor; not an Exception, so that nothing on its way handles it."""

    def __init__(self, code: str) -> None:
        super().__init__("the code is generated")
        self.code = code


def patch() -> None:
    """Let Inductor generate code for a device that is not there, and stop when it has."""
    inductor_config.force_disable_caches = True
    inductor_config.fx_graph_cache = False
    inductor_config.compile_threads = 1
    inductor_config.use_static_cuda_launcher = False
    inductor_config.triton.autotune_at_compile_time = False
    # Padding of products is decided by timing them on the device.
    inductor_config.shape_padding = False
    # Each kernel then carries the bytes that it moves.
    inductor_config.profile_bandwidth = True

    # These make real tensors on the device. None of their patterns (attention written by hand, padding of
    # products) occurs in the models measured here.
    fuse_attention._sfdp_init = _nothing
    misc_patterns._misc_patterns_init = _nothing
    pad_mm._pad_mm_init = _nothing

    joint_graph.UniformValueConstantFolder._deduce_value = _deduce_on_cpu
    GraphLowering._compile_to_module = _stop_with_code
    # The generated code imports it, and a CPU build of torch lacks it; `replay` puts its own in place.
    if not hasattr(torch._C._dynamo.guards, "_empty_strided_cuda"):
        torch._C._dynamo.guards._empty_strided_cuda = None


def _nothing(*_: Any, **__: Any) -> None:
    pass


_deduce_value = joint_graph.UniformValueConstantFolder._deduce_value


def _deduce_on_cpu(folder: Any, node: Any) -> Any:
    """Inductor's folding of uniform constants, which computes tensors of one element: on the CPU."""
    if node.target == torch.ops.prims.device_put.default:
        return folder.unknown_value
    keywords = node.kwargs
    if keywords.get("device") is None:
        return _deduce_value(folder, node)
    node.kwargs = {**keywords, "device": torch.device("cpu")}
    try:
        return _deduce_value(folder, node)
    finally:
        node.kwargs = keywords


def _stop_with_code(graph: GraphLowering) -> NoReturn:
    wrapper, _ = graph.codegen()
    raise CodeReady(wrapper.value)


def generate_code(graph_module: Any, example_inputs: Sequence[Any], **options: Any) -> str:
    """The code that Inductor generates for a graph: kernels, and the wrapper that launches them in order."""
    try:
        compile_fx.compile_fx_inner(graph_module, example_inputs, **options)
    except CodeReady as ready:
        return ready.code
    raise AssertionError("Inductor compiled a graph without passing the place where it is stopped")


class GeneratedKernel:
    """Stands for a Triton kernel of the generated code: a launch that moves what Inductor says it moves."""

    def __init__(
        self, name: str, source: str, recorder: Recorder, counter: instructions.Counter | None = None
    ) -> None:
        found = re.search(r"'kernel_num_gb': ([0-9.e+-]+)", source)
        if found is None or "tl.dot(" in source:
            raise UnknownOperation(
                f"{name}: a Triton kernel that Inductor did not make from element-wise work, so neither its "
                "bytes nor its FLOP are known; wrap it as a custom operation and enter that in "
                "CUSTOM_OPERATIONS of benchmarks/gpu_model/subject.py"
            )
        self.name = name
        self.moved_bytes = 1e9 * float(found[1])
        self.computes_in_fp64 = "tl.float64" in source
        self._source = source
        self._recorder = recorder
        self._counter = counter

    def run(self, *arguments: Any, **_: Any) -> None:
        """The launch; the grid and the stream are among the arguments and cost nothing."""
        tensors = tensors_in(arguments)
        for tensor in tensors:
            self._recorder.track(tensor)
        # Inductor rounds to nanoseconds' worth of bytes: a kernel on a few elements has 0.
        moved_bytes = self.moved_bytes or sum(tensor_bytes(tensor) for tensor in tensors)
        issued = 0.0
        if self._counter is not None and moved_bytes >= LEAST_COUNTED_BYTES:
            issued = self._counter.of_launch(self.name, self._source, arguments)
        shapes = shapes_of(tensors[:4])
        self._recorder.add("generated", self.name, moved_bytes, shapes=shapes, instructions=issued)


class KernelCollector:
    """In the place of Inductor's AsyncCompile: takes the source of each kernel and compiles none itself."""

    def __init__(self, recorder: Recorder, counter: instructions.Counter | None) -> None:
        self.kernels: dict[str, GeneratedKernel] = {}
        self._recorder = recorder
        self._counter = counter

    def triton(self, name: str, source: str, *_: Any, **__: Any) -> GeneratedKernel:
        """The stand-in of a kernel."""
        self.kernels[name] = GeneratedKernel(name, source, self._recorder, self._counter)
        return self.kernels[name]

    def wait(self, _scope: dict[str, Any]) -> None:
        """There is nothing to wait for."""


def as_int(size: Any) -> int:
    """A size as a number; a symbolic one as the number it had when the graph was traced."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def sizes_of(tensor: Tensor) -> list[int]:
    """The shape in numbers."""
    return [as_int(size) for size in tensor.shape]


def empty_twin(tensor: Tensor) -> Tensor:
    """A tensor of the same layout, with numbers for symbolic sizes; in a FakeTensorMode it holds nothing."""
    strides = [as_int(stride) for stride in tensor.stride()]
    return torch.empty_strided(sizes_of(tensor), strides, dtype=tensor.dtype, device=tensor.device)


class Replay:
    """A run of generated code on fake tensors, with the exact sequence of launches and the memory alive.

    input_bytes: what was alive before the first launch. kernels: the Triton kernels by name. counter: of
    their instructions; None: bytes alone count.
    """

    def __init__(
        self, code: str, path: Path, example_inputs: Sequence[Any], recorder: Recorder,
        fake_mode: FakeTensorMode, counter: instructions.Counter | None = None,
    ) -> None:  # fmt: skip
        self.recorder = recorder
        collector = KernelCollector(recorder, counter)
        scope = self._load(code, path, collector)
        with fake_mode:
            inputs = [self._input(value) for value in example_inputs]
            for tensor in tensors_in(inputs):
                recorder.track(tensor)
            self.input_bytes = recorder.live_bytes("inputs")
            with Watch(recorder):
                # The wrapper empties the list, so that inputs die as soon as nothing needs them.
                scope["call"](inputs)
        self.kernels = collector.kernels

    def _load(self, code: str, path: Path, collector: KernelCollector) -> dict[str, Any]:
        """The generated module's names, those that touch the device replaced."""
        scope: dict[str, Any] = {"__name__": "generated", "__file__": str(path)}
        with mock.patch.object(async_compile, "AsyncCompile", lambda: collector):
            exec(compile(code, str(path), "exec"), scope)
        scope["empty_strided_cuda"] = self._allocate
        scope["reinterpret_tensor"] = _reinterpret
        for name in ("assert_size_stride", "assert_alignment", "start_graph", "end_graph"):
            scope[name] = _nothing
        return scope

    def _allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty_strided(size, stride, dtype=dtype, device="cuda")
        self.recorder.track(tensor)
        return tensor

    @staticmethod
    def _input(value: Any) -> Any:
        if isinstance(value, Tensor):
            return empty_twin(value)
        return as_int(value) if isinstance(value, torch.SymInt) else value


def _reinterpret(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
