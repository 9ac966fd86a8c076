"""The challenge's public baseline: one evaluation, in rows that do not overlap, without learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.prove.adapters.public import ROUND_TRIP, Public
from tools.prove.foreign import Record

SETTINGS = {
    "VOCAB_SIZE": "12",
    "NUM_LAYERS": "2",
    "MODEL_DIM": "16",
    "NUM_HEADS": "2",
    "NUM_KV_HEADS": "1",
    "TRAIN_SEQ_LEN": "16",
    "VAL_BATCH_SIZE": "64",
    "TRAIN_BATCH_TOKENS": "64",
}


class Adapter:
    """See `tools.prove.foreign.Adapter`."""

    vocabulary = 12
    learns = {"final_int8_zlib_roundtrip": False}  # noqa: RUF012
    edges = (0, 10, 15, 16, 40, 63, 64, 143)

    def __init__(self, path: Path) -> None:
        self.script = Public(path, SETTINGS, (ROUND_TRIP,))

    def model(self, seed: int) -> Any:
        """The script's own model."""
        return self.script.model(seed)

    def score(self, label: str, model: Any, tokens: np.ndarray, record: Record) -> float:
        """`eval_val`, on one rank."""
        text = torch.from_numpy(tokens.astype(np.int64))
        arguments = (self.script.arguments, model, 0, 1, torch.device("cpu"), 1, text)
        return self.script.evaluate("eval_val", record, *arguments)
