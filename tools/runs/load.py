"""A training script as a module, to run it. `source` reads one as text."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


def load_script(path: Path) -> ModuleType:
    """Import a script by path under a name that is not `__main__`."""
    spec = importlib.util.spec_from_file_location("audited_script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    writes_bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # a folder of scripts holds what its user put there
    try:
        with contextlib.redirect_stdout(sys.stderr), operators_of_its_own():
            spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes_bytecode
    return module


@contextlib.contextmanager
def operators_of_its_own() -> Iterator[None]:
    """While a script is loaded, give each operator that it defines a name that no other operator has.

    torch keeps one operator per name for the whole process, and the latest definition wins without a word. So
    a second copy of a script would take over the kernels of the first one, which is still in use. The first
    keeps its names: a later copy that calls an operator by name, as torch.ops.x.y, calls that of the first.
    """
    import torch

    definers = {name: getattr(torch.library, name) for name in ("custom_op", "triton_op")}
    for name, define in definers.items():
        setattr(torch.library, name, under_a_free_name(define))
    try:
        yield
    finally:
        for name, define in definers.items():
            setattr(torch.library, name, define)


def under_a_free_name(define: Callable[..., Any]) -> Callable[..., Any]:
    """What defines an operator as `define` does, under a free name."""

    def defined(name: str, *arguments: Any, **options: Any) -> Any:
        return define(free_name(name), *arguments, **options)

    return defined


def free_name(name: str) -> str:
    """This name of an operator, `namespace::operator`, or where it is taken one with a numbered namespace."""
    import torch

    namespace, _, operator = name.partition("::")
    free = namespace
    copies = 1
    while hasattr(getattr(torch.ops, free), operator):
        copies += 1
        free = f"{namespace}_{copies}"
    return f"{free}::{operator}"
