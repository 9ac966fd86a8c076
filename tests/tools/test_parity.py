"""benchmarks/parity.py: names that cover every parameter, and a difference that is seen."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import parity
from benchmarks.parity import SYSTEMS, OurTraining, compare, our_config
from train_gpt import build_model


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_every_parameter_goes_over_once(system: parity.System) -> None:
    model = build_model(our_config(system, {}))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape)
    theirs = system.names(dict(model.named_parameters()))
    gone_over = torch.cat([weights.flatten() for weights in theirs.values()])
    own = torch.cat([weights.flatten() for weights in model.parameters()])
    assert torch.equal(gone_over.sort().values, own.sort().values)


class Double:
    """In the place of a public script: our own training, under names of its own."""

    wrong: float = 0.0

    def __init__(self, path: Path, settings: dict[str, str]) -> None:
        self.training = OurTraining(our_config(SYSTEMS["baseline"], settings))
        self.parameters_count = sum(p.numel() for p in self.training.model.parameters())

    def __enter__(self) -> Double:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            self.training.model.token_embedding_VD.copy_(weights["tok_emb.weight"] * (1 + self.wrong))

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> float:
        return self.training.step(inputs_BT, targets_BT)


@pytest.mark.parametrize(("wrong", "agrees"), [(0.0, True), (0.5, False)])
def test_a_difference_is_seen(wrong: float, agrees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "Upstream", Double)
    monkeypatch.setattr(Double, "wrong", wrong)
    ids = torch.randint(2, 1000, (2, 17), generator=torch.Generator().manual_seed(0))
    feed: Any = itertools.repeat((ids[:, :-1], ids[:, 1:]))
    largest = compare(SYSTEMS["baseline"], Path("unused"), {}, feed, 4)
    assert (largest <= parity.LARGEST_DIFFERENCE) == agrees
    assert agrees == (largest == 0.0)
