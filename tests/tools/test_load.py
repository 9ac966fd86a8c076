"""Copies of a script in one process: each keeps its own operators, whichever was loaded first."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tools.runs.load import load_script, operators_of_its_own

TIMES = """
import torch

@torch.library.custom_op("test_load::times", mutates_args=())
def times(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR

@times.register_fake
def shape_of_times(x):
    return torch.empty_like(x)

times.register_autograd(lambda ctx, gradient: gradient * FACTOR)
compiled = torch.compile(lambda x: times(x) + 1, backend="aot_eager", fullgraph=True)
"""


def copy_of_times(factor: int, folder: Path) -> Path:
    path = folder / f"times_{factor}.py"
    path.write_text(TIMES.replace("FACTOR", str(factor)))
    return path


def results(script: ModuleType) -> list[float]:
    """What a copy's operator computes: called, differentiated, and compiled."""
    x = torch.ones((), requires_grad=True)
    (gradient,) = torch.autograd.grad(script.times(x), x)
    return [script.times(x).item(), gradient.item(), script.compiled(x).item()]


def test_each_copy_of_a_script_keeps_its_own_operators(tmp_path: Path) -> None:
    scripts = {factor: load_script(copy_of_times(factor, tmp_path)) for factor in (2, 3, 5)}
    for factor, script in [*scripts.items(), *reversed(scripts.items())]:
        assert results(script) == [factor, factor, factor + 1]


def test_a_script_that_does_not_load_leaves_torch_as_it_was(tmp_path: Path) -> None:
    before = torch.library.custom_op, torch.library.triton_op
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        load_script(tmp_path / "broken.py")
    assert (torch.library.custom_op, torch.library.triton_op) == before
    with operators_of_its_own():
        assert torch.library.custom_op is not before[0] and torch.library.triton_op is not before[1]
    assert (torch.library.custom_op, torch.library.triton_op) == before
