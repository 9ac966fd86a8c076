"""Numbers of the challenge, each only here, with where it comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass

ARTIFACT_BYTES_MAX = 16_000_000  # decimal, code plus compressed model; challenge README, FAQ
ARTIFACT_SLACK_BYTES = 10_000  # totals of one configuration were seen to move by +-5 KB between runs (#1978)
TRAIN_SECONDS_MAX = 600.0
EVAL_SECONDS_MAX = 600.0
TRAIN_OVERSHOOT_SECONDS = 0.2  # rows of March 2026 end 0.02-0.14 s late and were merged
RECORD_WORLD_SIZE = 8
RECORD_GPU = "H100"
OTHER_FORMS = ("PCIe", "NVL")  # of it; the challenge's are SXM, which the driver's name does not say
RECORD_TRACK = "track_10min_16mb"
REPOSITORY = "openai/parameter-golf"  # of the challenge, on GitHub
RECORD_SEEDS_MIN = 3
RECORD_TEXT = ("author", "github_id", "blurb")  # keys of submission.json that a record may not leave empty

VALIDATION_BYTES = 151_080_891  # normalized text of the 50,000 validation documents (#1804)
VALIDATION_BYTES_TOLERANCE = 5e-4  # whole windows drop part of the tail; 146 merged logs stay inside

OFFICIAL = "official"  # what a run calls the challenge's validation set,
OWN = "your own"  # and any other text


MARGIN_NATS = 0.005  # README: a record beats the previous one by this much ...
MARGIN_P = 0.01  # ... at this level; unit read as nats per token
FRONTIER_P = 0.25  # as practiced since April 28, 2026: one-sided, no margin (#1902)

LEGAL_TTT_GAIN_BPB = 0.03  # legal precedents gained 0.002-0.013 over the sliding window
PLAUSIBLE_BPB_MIN = 1.0


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of public records; `bytes_per_token`: the validation text over its scored tokens.

    `dataset` is the folder of the shards made with it, empty where there is none with a name.
    """

    name: str
    bytes_per_token: float
    dataset: str


TOKENIZERS = (
    Tokenizer("sp1024", 2.435930, "fineweb10B_sp1024"),
    Tokenizer("sp4096", 3.319681, "fineweb10B_sp4096"),
    Tokenizer("sp8192", 3.726631, "fineweb10B_sp8192"),
    Tokenizer("CaseOps 8192", 3.157152, "fineweb10B_sp8192_lossless_caps_caseops_v1_reserved"),
    Tokenizer("bytes", 1.0, ""),
)
TOKENIZER_TOLERANCE = 0.005  # relative; 4-digit logs and older validation splits stay inside


@dataclass(frozen=True)
class ByteError:
    """A byte denominator that went wrong in a known way; `ratio` is to `VALIDATION_BYTES`."""

    ratio: float
    cause: str


KNOWN_BYTE_ERRORS = (
    ByteError(176_332_748 / VALIDATION_BYTES, "leading-space byte counted twice (#1719)"),
    ByteError(157_319_833 / VALIDATION_BYTES, "byte-fallback pieces counted by their spelling (#1289)"),
    ByteError(164_594_398 / VALIDATION_BYTES, "case markers counted as text (#2138)"),
    ByteError(155_770_000 / VALIDATION_BYTES, "the validation export from before March 19, 2026"),
)
BYTE_ERROR_TOLERANCE = 2e-3


def is_record_gpu(name: str) -> bool:
    """Whether the name that a driver gives is that of the challenge's GPU."""
    words = name.lower()
    return RECORD_GPU.lower() in words and not any(form.lower() in words for form in OTHER_FORMS)


def bits_per_byte(nats_per_token: float, tokens: float, text_bytes: float) -> float:
    """Bits per byte of a mean loss in nats per token over `tokens` targets that spell `text_bytes` bytes."""
    return nats_per_token / math.log(2.0) * tokens / text_bytes


def bytes_per_token(nats_per_token: float, bpb: float) -> float:
    """Mean bytes per token that the two figures imply."""
    return nats_per_token / math.log(2.0) / bpb
