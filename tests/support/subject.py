"""A tiny model, its settings and a text, for tests of the functions that score."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import train_gpt
from tools.audit.settings import LORA, SGD
from tools.audit.worlds import STARTS

SCORERS = ("score_roundtrip", "score_sliding", "score_ttt")
TOKENS = 150
VOCAB_SIZE = 12
__all__ = ["LORA", "SCORERS", "VOCAB_SIZE", "RecordingRun", "Subject", "subject"]


@dataclass(frozen=True)
class Subject:
    """Settings, and what is made of them. machine: the rank that models compute on."""

    config: train_gpt.Config
    machine: train_gpt.Machine = field(default_factory=train_gpt.Machine)

    def model(self) -> Any:
        """The model, every parameter away from its initial value, so that every path counts."""
        model = train_gpt.build_model(self.config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        model.machine = self.machine
        return model

    def tokens(self) -> np.ndarray:
        """The text: BOS first, an empty document, some longer than a window, a tail."""
        tokens = np.random.default_rng(0).integers(2, self.config.vocab_size, TOKENS).astype(np.uint16)
        tokens[STARTS] = train_gpt.BOS_ID
        return tokens

    def nats(self, name: str, tokens: np.ndarray, model: Any = None) -> np.ndarray:
        """What one of SCORERS puts in its ledger."""
        return np.array(getattr(train_gpt, name)(model or self.model(), tokens, self.config).nats)


def subject(**settings: object) -> Subject:
    """The smallest settings, with some changed."""
    changes = {name: str(value) for name, value in settings.items()}
    return Subject(train_gpt.Config.from_env({**SGD, "VOCAB_SIZE": str(VOCAB_SIZE), **changes}))


class RecordingRun:
    """Stands in for a Run: it keeps the lines of the log."""

    def __init__(self, machine: Any = None) -> None:
        self.machine = machine or train_gpt.Machine()
        self.directory = None
        self.phases: dict[str, float] = {}
        self.lines: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield
        self.phases[name] = 1.0

    def log(self, line: str) -> None:
        self.lines += line.splitlines()

    def record(self, *_: Any, **__: Any) -> None:
        """Forget an event."""
