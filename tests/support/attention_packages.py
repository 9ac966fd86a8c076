"""FlashAttention's own interface files, without its compiled kernels: they can be traced, and not run."""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

PACKAGES = Path(__file__).parent / "packages"
HOPPER = (9, 0)  # the compute capability that their shapes ask for
# What is built with the kernels: each module with what is read of it. No width of a head was left out.
FLAGS = {f"FLASHATTENTION_DISABLE_HDIM{width}": False for width in (64, 96, 128, 192, 256)}
BUILT: dict[str, dict[str, Any]] = {
    "flash_attn_3": {},
    "flash_attn_3._C": {},
    "flash_attn_config": {"CONFIG": {"build_flags": FLAGS}},
    "flash_attn_2_cuda": {},
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `flash_attn_interface` (FA3) and `flash_attn` (FA2) be imported, and a Hopper card be asked for."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: HOPPER)


@functools.cache
def modules() -> dict[str, ModuleType]:
    """All modules by name, made once: their operators stay registered with torch."""
    found = {name: made_up(name, content) for name, content in BUILT.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in found.items():
            patch.setitem(sys.modules, name, module)
        fa3 = from_file("flash_attn_interface", PACKAGES / "hopper/flash_attn_interface.py")
        fa2 = from_file("flash_attn.flash_attn_interface", PACKAGES / "flash_attn/flash_attn_interface.py")
    return {**found, fa3.__name__: fa3, fa2.__name__: fa2, "flash_attn": fa2}


def made_up(name: str, content: dict[str, Any]) -> ModuleType:
    """A module of this name that holds these values."""
    module = ModuleType(name)
    vars(module).update(content)
    return module


def from_file(name: str, path: Path) -> ModuleType:
    """A module of this name, whatever the name of its file."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
