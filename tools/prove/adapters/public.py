"""What the adapters of the baseline's family share: the script as `benchmarks/upstream.py` runs it on a CPU.

Its own `main` builds the model; its own evaluation scores. Beside the replacements of that loader, named
lines of the evaluation get a call that notes the nats of each target where the script itself has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks import upstream
from tools.prove.foreign import Record

SEED_SCALE = 0.3  # of the noise on every parameter, so that every path counts


class Public:
    """A public script with notes of its scores; `replacements` name the lines that get one."""

    def __init__(
        self, path: Path, settings: Mapping[str, str], replacements: tuple[upstream.Replacement, ...]
    ) -> None:
        every = [*upstream.REPLACEMENTS, *replacements]
        with mock.patch.object(upstream, "REPLACEMENTS", every):
            self.running = upstream.Upstream(path, settings)
        self.namespace = self.running._namespace
        self.notes = self.running._on_cpu
        self.arguments = self.namespace["Hyperparameters"]()
        self.notes.one_by_one = self.one_by_one  # type: ignore[attr-defined]
        self.begin = {name: value.clone() for name, value in self.running.model.state_dict().items()}

    def model(self, seed: int) -> torch.nn.Module:
        """The script's model, with noise on every parameter."""
        model = self.running.model
        model.load_state_dict(self.begin)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(SEED_SCALE * torch.randn(parameter.shape, generator=generator))
        return model

    def evaluate(self, name: str, record: Record, *arguments: Any, **named: Any) -> float:
        """Call an evaluation of the script; its mean loss. One byte a token: bytes are not asked about."""
        self.notes.record = record.add  # type: ignore[attr-defined]
        size = self.arguments.vocab_size
        ones = torch.ones(size, dtype=torch.int16)
        none = torch.zeros(size, dtype=torch.bool)
        loss, _ = self.namespace[name](*arguments, ones, none, none, **named)
        return float(loss)

    def one_by_one(self, model: Callable[..., Any], x: Any, y: Any, start: int) -> Any:
        """The mean loss of a batch, as the script computes it, with a note of each target's."""
        found = []
        original = F.cross_entropy

        def each(logits: Any, targets: Any, reduction: str = "mean", **named: Any) -> Any:
            nats = original(logits, targets, reduction="none", **named)
            found.append(nats)
            return nats.mean() if reduction == "mean" else nats

        with mock.patch.object(F, "cross_entropy", each):
            loss = model(x, y)
        self.notes.record(start, found[-1])  # type: ignore[attr-defined]
        return loss


ROUND_TRIP = upstream.Replacement(
    "batches of the plain evaluation",
    r"batch_loss = model\(x, y\)\.detach\(\)",
    f"batch_loss = {upstream.STAND_IN}.one_by_one(model, x, y, raw_start).detach()",
    needed=True,
)
SLIDING = upstream.Replacement(
    "scores of a sliding window",
    r"(scored_nll = nll\[i, s:wlen\]\.to\(torch\.float64\))",
    rf"\1; {upstream.STAND_IN}.record(ws + s, scored_nll)",
    needed=True,
)
# Rotary tables are cached where they are first needed. On a GPU each use casts them to bfloat16, a copy; in
# fp32 it does not, and what inference mode made cannot be learned through.
NO_GRADIENTS = upstream.Replacement(
    "inference mode", r"torch\.inference_mode\(\)", "torch.no_grad()", needed=True
)
