"""A GPU that is not there: `install` makes a CPU build of torch trace, and generate code, as if it were.

Only fake tensors (shapes without values) can live on it; nothing can be run. torch asks for its CUDA hooks
once, while it is imported, so `install` must come before the first `import torch` of the process. That is why
the programs of this package import what needs torch inside their functions.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_model.roofline import CARDS, Card

DEFAULT_FOLDER = "~/.cache/gpu_model"
TORCH_RELEASE = "2.13."  # the one whose private names `install` and inductor.py replace


class Unavailable(RuntimeError):
    """The environment lacks something that the fake GPU is made from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that all programs of this package share."""
    parser.add_argument("--out", default=DEFAULT_FOLDER, help="folder of what is built, cached and written")


def prepare_folder(out: str) -> Path:
    """The folder of `--out`, made if absent, which Triton and Inductor use as their cache too."""
    folder = Path(out).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    # Triton would interpret kernels instead of compiling them.
    os.environ.pop("TRITON_INTERPRET", None)
    return folder


def prepare(card_name: str, out: str) -> tuple[Card, Path]:
    """Card and folder, with the fake GPU installed. Where it cannot be: one sentence, and exit status 2."""
    folder = prepare_folder(out)
    try:
        card = install(card_name, folder)
    except Unavailable as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    return card, folder


def install(card_name: str, folder: Path) -> Card:
    """Let this process believe that it has the card named. Raises Unavailable."""
    assert "torch" not in sys.modules, "install() comes before the first `import torch`"
    version = _check_environment()
    card = CARDS[card_name]
    ctypes.CDLL(_library("hooks", version, ("torch_cpu", "c10"), folder), ctypes.RTLD_GLOBAL)
    guard = ctypes.CDLL(_library("guard", version, ("c10",), folder))
    assert guard.install() == 1, "torch did not take the device guard"
    properties = _device_properties(card)
    _replace_torch_cuda(card, properties)
    _replace_dynamo_interface(properties)
    _replace_triton_driver(card)
    return card


def _check_environment() -> str:
    """The version of torch. Raises Unavailable for one that is missing, another, or built for CUDA."""
    wanted = f"expected a CPU build of torch {TORCH_RELEASE}x, triton and g++ (README.md)"
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise Unavailable(f"the GPU model needs {package}, which is not installed; {wanted}")
    version = importlib.metadata.version("torch")
    if not version.startswith(TORCH_RELEASE):
        raise Unavailable(f"the GPU model replaces private names of another torch than {version}; {wanted}")
    if not version.endswith("+cpu"):
        raise Unavailable(f"the GPU model cannot stand in for the real CUDA of torch {version}; {wanted}")
    return version


def _library(name: str, version: str, libraries: tuple[str, ...], folder: Path) -> str:
    """Path of the library built from NAME.cpp, once for each torch and its folder (the hooks: minutes)."""
    source = Path(__file__).with_name(f"{name}.cpp")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch was found before"
    torch_folder = Path(spec.origin).parent
    # What is built looks for torch where it was: another environment has another folder.
    place = hashlib.sha256(str(torch_folder).encode()).hexdigest()[:8]
    built = folder / f"lib{name}-{version}-{place}.so"
    if built.exists() and built.stat().st_mtime >= source.stat().st_mtime:
        return str(built)
    compiler = shutil.which("g++")
    if compiler is None:
        raise Unavailable(f"the GPU model builds {source.name} with g++, which was not found; install it")
    temporary = built.with_suffix(".tmp")
    command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch_folder}/include", str(source)]
    command += ["-o", str(temporary), f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib"]
    command += [f"-l{library}" for library in libraries]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if result.returncode != 0:
        raise Unavailable(f"the GPU model needs {source.name} built, but g++ failed: {result.stderr[-2000:]}")
    temporary.replace(built)
    return str(built)


class _Device:
    """`with torch.cuda.device(...)`, which changes nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class _Stream:
    """The only stream."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        import torch

        self.device = torch.device("cuda", 0)

    def synchronize(self) -> None:
        """There is nothing to wait for."""


def _always(value: Any) -> Callable[..., Any]:
    """A function that takes anything and returns `value`."""
    return lambda *_, **__: value


def _device_properties(card: Card) -> types.SimpleNamespace:
    """What `torch.cuda.get_device_properties` tells; what a card does not name is the same on all of them."""
    major, minor = card.capability
    return types.SimpleNamespace(
        name=card.name, major=major, minor=minor, multi_processor_count=card.multiprocessors,
        total_memory=card.memory_bytes, L2_cache_size=card.l2_cache_bytes, shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=card.shared_memory_bytes,
        shared_memory_per_multiprocessor=card.shared_memory_bytes + 1024, regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
        clock_rate=1_980_000, memory_clock_rate=2_619_000, memory_bus_width=5120, gcnArchName="", uuid="fake",
        is_integrated=0, is_multi_gpu_board=0, pci_bus_id=0, pci_device_id=0, pci_domain_id=0,
    )  # fmt: skip


def _replace_torch_cuda(card: Card, properties: types.SimpleNamespace) -> None:
    """Let every function of torch.cuda that tracing calls answer for the card."""
    import torch

    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "_is_compiled": True, "_is_in_bad_fork": False,
        "init": None, "_lazy_init": None, "device_count": 1, "current_device": 0, "set_device": None,
        "_exchange_device": 0, "_maybe_exchange_device": 0, "current_stream": _Stream(), "synchronize": None,
        "get_device_properties": properties, "get_device_capability": card.capability,
        "get_device_name": card.name, "is_bf16_supported": True, "is_tf32_supported": True,
        "mem_get_info": (card.memory_bytes, card.memory_bytes), "memory_allocated": 0,
        "max_memory_allocated": 0, "max_memory_reserved": 0, "set_rng_state": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    torch.cuda.device = _Device
    # A new tensor at each call: whoever asks may write to it.
    torch.cuda.get_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    torch._C._cuda_getCurrentRawStream = _always(0)
    torch.version.cuda = "13.0"


def _replace_dynamo_interface(properties: types.SimpleNamespace) -> None:
    """Let Dynamo and Inductor, which ask through an interface of their own, get the same answers."""
    import torch
    import torch._dynamo.device_interface as device_interface
    import torch._subclasses.fake_tensor as fake_tensor

    interface = device_interface.CudaInterface
    same_as_torch_cuda = (
        "current_device set_device device_count get_device_properties current_stream synchronize "
        "is_bf16_supported memory_allocated"
    ).split()
    for name in same_as_torch_cuda:
        setattr(interface, name, staticmethod(getattr(torch.cuda, name)))
    interface.device = _Device
    interface.get_raw_stream = staticmethod(_always(0))
    interface.exchange_device = staticmethod(_always(0))
    interface.maybe_exchange_device = staticmethod(_always(0))
    device_interface._device_initialized = False
    device_interface.caching_worker_device_properties["cuda"] = [properties]
    device_interface.register_interface_for_device("cuda", interface)
    device_interface.register_interface_for_device("cuda:0", interface)
    # It would allocate a real tensor on the device.
    fake_tensor.init_gpu_context = lambda device: None


def _replace_triton_driver(card: Card) -> None:
    """Let Triton take the card as its target without asking for a CUDA driver."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    major, minor = card.capability
    properties = {
        "max_shared_mem": card.shared_memory_bytes, "multiprocessor_count": card.multiprocessors,
        "warpSize": 32, "max_num_regs": 65_536,
    }  # fmt: skip
    driver = types.SimpleNamespace(
        get_current_target=_always(GPUTarget("cuda", major * 10 + minor, 32)),
        get_current_device=_always(0),
        get_current_stream=_always(0),
        set_current_device=_always(None),
        get_active_torch_device=_always(torch.device("cuda", 0)),
        get_device_interface=_always(torch.cuda),
        is_active=_always(True),
        utils=types.SimpleNamespace(get_device_properties=_always(properties)),
    )
    triton.runtime.driver.set_active(driver)
