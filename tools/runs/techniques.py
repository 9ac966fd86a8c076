"""What a record is made of, from its settings: one line of words, and where each part comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tools import REPO

SOURCES = REPO / "docs" / "design.md"  # a table of it has a row for settings of one origin
ROW = re.compile(r"^\| (?P<settings>`[A-Z][A-Z0-9_]*=[^|]*) \| (?P<source>[^|]*) \|", re.MULTILINE)
PUBLISHED = re.compile(r"#\d|arXiv")  # a pull request of the challenge, or a paper
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")  # it would lead nowhere from a record's folder
PAIR = re.compile(r"`([A-Z][A-Z0-9_]*)=([^`]*)`")
OFF = {"", "0", "0.0", "-1"}
# A setting that is off leaves its part out; the first part has none.
PARTS = (
    ("VOCAB_SIZE", "{VOCAB_SIZE} pieces"),
    ("NUM_LAYERS", "{NUM_LAYERS} layers of width {MODEL_DIM}"),
    ("NUM_HEADS", "{NUM_HEADS} query and {NUM_KV_HEADS} key heads"),
    ("MLP_MULT", "MLP {MLP_MULT}x with LeakyReLU({LEAKY_SLOPE})²"),
    ("NUM_LOOPS", "layers {LOOP_START} to {LOOP_END} run {NUM_LOOPS} more times"),
    ("PARALLEL_START_LAYER", "parallel {PARALLEL_MODE} from layer {PARALLEL_START_LAYER} on"),
    ("XSA_LAST_N", "XSA in the last {XSA_LAST_N} layers"),
    ("EMA_DECAY", "EMA {EMA_DECAY}"),
    ("GPTQ", "GPTQ"),
    ("TRELLIS", "trellis"),
    ("MATRIX_BITS", "{MATRIX_BITS}-bit matrices and {EMBED_BITS}-bit embeddings in rANS"),
    ("TTT_ENABLED", "score-first test-time training (TTT_MODE={TTT_MODE})"),
)


def technique_summary(config: Mapping[str, str]) -> str:
    """The parts of a run in words; those whose settings it does not have are left out."""
    told = []
    for switch, text in PARTS:
        if config.get(switch, "") not in OFF:
            try:
                told.append(text.format_map(config))
            except KeyError:
                continue
    return "; ".join(told)


def attribution(config: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Where the run's settings come from, by their names, for those with a published source.

    `default` has the values of the page, whose source it is, where the run has others.
    """
    found = {}
    for row in ROW.finditer(SOURCES.read_text(encoding="utf-8")):
        pairs = PAIR.findall(row["settings"])
        source = LINK.sub(r"\1", row["source"]).strip()
        is_published = PUBLISHED.search(source) and not source.startswith("off")
        if not is_published or not all(name in config for name, _ in pairs):
            continue
        changed = [f"{name}={value}" for name, value in pairs if config[name] != value]
        names = " ".join(name for name, _ in pairs)
        found[names] = {"default": " ".join(changed), "source": source}
    return found
