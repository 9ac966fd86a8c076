"""Which text the scores of a group of runs are of: scores of two texts cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.runs.derive import is_limited, nested, validation_set
from tools.runs.logs import RunLog
from tools.runs.rules import OFFICIAL
from tools.runs.runs import Run

# Relative difference of bytes below which two texts are the same: some scripts leave out the last tokens.
SAME_TEXT = 0.01


def different_texts(base: Sequence[Run], new: Sequence[Run]) -> str:
    """What text each side has scored, in words; empty where that is the same, or not known."""
    sets = validation_sets(base), validation_sets(new)
    if all(sets) and sets[0] != sets[1]:
        return " against ".join(", ".join(sorted(names)) for names in sets)
    base_bytes = scored_bytes(base)
    new_bytes = scored_bytes(new)
    if base_bytes is None or new_bytes is None or abs(new_bytes / base_bytes - 1) < SAME_TEXT:
        return ""
    return f"{base_bytes:,} bytes against {new_bytes:,}"


def validation_sets(runs: Sequence[Run]) -> set[str]:
    """The validation sets of runs, in words, as far as they say."""
    return {text_of(run.summary, run.log) for run in runs} - {""}


def text_of(summary: Mapping[str, Any], log: RunLog) -> str:
    """The validation set of a run, in words; empty for one that does not say.

    The official one is one text in any tokenizer. Of others, and of a part of it, the bytes tell them apart.
    """
    said = validation_set(summary, log)
    is_official = said.startswith(OFFICIAL)
    if is_official and not is_limited(summary) and not log.is_limited:
        return OFFICIAL
    counted = nested(summary, "data", "val_bytes")
    if counted is None and log.validation_bytes is not None:
        counted = log.validation_bytes.integer
    name = OFFICIAL if is_official else said
    return f"{name} ({counted:,} bytes)" if said and isinstance(counted, int) else name


def scored_bytes(runs: Sequence[Run]) -> int | None:
    """Bytes of the text that the first run with a score has scored; None where they are unknown."""
    for run in runs:
        if run.score is not None:
            counted = run.score.val_bytes or nested(run.summary, "data", "val_bytes")
            return counted if isinstance(counted, int) else None
    return None
