"""PR #549's evaluation: rows that do not overlap, sliding windows, and windows with test-time training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.prove.adapters.public import NO_GRADIENTS, ROUND_TRIP, SLIDING, Public
from tools.prove.foreign import Record

SETTINGS = {
    "VOCAB_SIZE": "12",
    "NUM_LAYERS": "3",
    "MODEL_DIM": "16",
    "NUM_HEADS": "2",
    "NUM_KV_HEADS": "1",
    "MLP_MULT": "2",
    "ROPE_DIMS": "4",
    "XSA_LAST_N": "2",
    "BIGRAM_VOCAB_SIZE": "16",
    "BIGRAM_DIM": "8",
    "VE_DIM": "8",
    "VE_LAYERS": "1,2",
    "TRAIN_SEQ_LEN": "16",
    "EVAL_SEQ_LEN": "16",
    "VAL_BATCH_SIZE": "64",
    "TRAIN_BATCH_TOKENS": "64",
    "TTT_CHUNK_TOKENS": "32",
    "TTT_BATCH_SEQS": "2",
    "TTT_EPOCHS": "2",
    "TTT_LR": "0.3",
    "TTT_FREEZE_BLOCKS": "0",
}
STRIDE = 8


class Adapter:
    """See `tools.prove.foreign.Adapter`."""

    vocabulary = 12
    learns = {"roundtrip": False, "sliding_window": False, "legal_ttt": True}  # noqa: RUF012
    edges = (0, 15, 16, 31, 32, 64, 75, 140)

    def __init__(self, path: Path) -> None:
        self.script = Public(path, SETTINGS, (ROUND_TRIP, SLIDING, NO_GRADIENTS))

    def model(self, seed: int) -> Any:
        """The script's own model."""
        return self.script.model(seed)

    def score(self, label: str, model: Any, tokens: np.ndarray, record: Record) -> float:
        """The function of the script that belongs to a label, on one rank."""
        text = torch.from_numpy(tokens.astype(np.int64))
        arguments = self.script.arguments
        cpu = torch.device("cpu")
        if label == "roundtrip":
            return self.script.evaluate("eval_val", record, arguments, model, 0, 1, cpu, 1, text)
        name = "eval_val_sliding" if label == "sliding_window" else "eval_val_sliding_ttt"
        named: dict[str, Any] = {"stride": STRIDE, "batch_seqs": 4}
        if label == "legal_ttt":
            named["log0"] = lambda line: None
        return self.script.evaluate(name, record, arguments, model, 0, 1, cpu, text, **named)
