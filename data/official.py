"""Whether a validation text is the challenge's own, by its counts and the SHA-256 of its first tokens.

The table of the official texts is OFFICIAL_VALIDATION in `train_gpt.py`, and only there. It is read
without importing the script, which would load torch.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from data.shards import BOS_ID, TOKEN_DTYPE

SCRIPT = Path(__file__).resolve().parents[1] / "train_gpt.py"
TABLE, FIELDS, LENGTH = "OFFICIAL_VALIDATION", "OfficialText", "FINGERPRINT_TOKENS"
OWN = "your own"

Facts = dict[str, Any]  # of a text: pieces, documents, bytes, targets, sha256; None: not known


@functools.cache
def official_table(script: Path = SCRIPT) -> tuple[dict[str, Facts], int]:
    """The official texts by variant, and how many tokens are hashed; empty if the script has none."""
    names: list[str] = []
    texts: dict[str, Facts] = {}
    length = 0
    try:
        for node in ast.parse(script.read_bytes()).body:
            if isinstance(node, ast.ClassDef) and node.name == FIELDS:
                names = [ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)]
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            if node.targets[0].id == LENGTH:
                length = int(ast.literal_eval(node.value))
            if node.targets[0].id == TABLE and isinstance(node.value, ast.Dict):
                variants = [ast.literal_eval(key) for key in node.value.keys if key is not None]
                facts = [facts_in(text, names) for text in node.value.values]
                texts = dict(zip(variants, facts, strict=True))
    except (OSError, SyntaxError, TypeError, ValueError):  # a fork may write it in another form
        return {}, 0
    return texts, length


def facts_in(node: ast.expr, names: list[str]) -> Facts:
    """The facts in `OfficialText(1024, 50_000, …, sha256=None)`. ValueError for another form."""
    if not isinstance(node, ast.Call):
        raise ValueError(f"{ast.dump(node)}: expected a call of {FIELDS}")
    values = [ast.literal_eval(value) for value in node.args]
    named = {item.arg: ast.literal_eval(item.value) for item in node.keywords if item.arg}
    facts = {**dict(zip(names, values, strict=False)), **named}
    if len(values) > len(names) or set(facts) != set(names):
        raise ValueError(f"{sorted(facts)}: expected {names}")
    return facts


def facts_of(tokens: np.ndarray, bytes_total: int, pieces: int) -> Facts:
    """The facts of a validation text: its tokens, shape (tokens,), as a tokenizer of `pieces` wrote them."""
    _, length = official_table()
    return {
        "pieces": pieces,
        "documents": int(np.count_nonzero(tokens == BOS_ID)),
        "bytes": bytes_total,
        "targets": len(tokens) - 1,
        "sha256": hashlib.sha256(tokens[:length].astype(TOKEN_DTYPE).tobytes()).hexdigest(),
    }


def differences(facts: Facts, text: Facts) -> list[str]:
    """How a text differs from an official one, in words; empty if it is that one."""
    return [f"{name} {facts.get(name)}, expected {expected}" for name, expected in text.items()
            if expected is not None and facts.get(name) != expected]


def official_name(facts: Facts) -> str:
    """`official (VARIANT)` for one of the official texts, else `your own`; the words that a run prints."""
    texts, _ = official_table()
    for name, text in texts.items():
        if not differences(facts, text):
            return f"official ({name})"
    return OWN
