"""How long a launch would take: its bytes at the memory's speed, its FLOP at the matrix units', or its
instructions at the schedulers'.

These shares of the peaks are the calibration that README.md describes. Every modelled time of this package
comes from here, so a change of one of them makes old and new tables incomparable.
"""

from dataclasses import dataclass

BANDWIDTH_SHARE = 0.85  # of the memory's peak, that a streaming kernel reaches
MATRIX_PRODUCT_SHARE = 0.65  # of the matrix units' peak, that a large product reaches
ATTENTION_SHARE = 0.50  # the same of an attention kernel
ISSUE_SHARE = 0.85  # of the schedulers' slots, that a kernel bound by its instructions fills
LAUNCH_SECONDS = 3e-6


@dataclass(frozen=True)
class Card:
    """A GPU: what Inductor and Triton ask of it, and its peaks from the maker's data sheet."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    shared_memory_bytes: int  # that one block may ask for
    l2_cache_bytes: int
    bytes_per_second: float
    bf16_flop_per_second: float  # dense, as the two below
    tf32_flop_per_second: float
    fp64_flop_per_second: float
    clock_hertz: float  # under load

    def instructions_per_second(self) -> float:
        """Of all threads: each of a multiprocessor's four schedulers issues one of a warp in a cycle."""
        return 4 * 32 * self.multiprocessors * self.clock_hertz


CARDS = {
    "h100": Card(
        "NVIDIA H100", (9, 0), 132, 80 << 30, 232_448, 50 << 20, 3.35e12, 989e12, 494e12, 34e12, 1.755e9
    ),
    "h200": Card(
        "NVIDIA H200", (9, 0), 132, 141 << 30, 232_448, 50 << 20, 4.8e12, 989e12, 494e12, 34e12, 1.755e9
    ),
    "a100": Card(
        "NVIDIA A100", (8, 0), 108, 80 << 30, 166_912, 40 << 20, 2.0e12, 312e12, 156e12, 9.7e12, 1.41e9
    ),
}


def matrix_product_rate(card: Card, dtype: str) -> float:
    """FLOP per second that a product of this dtype ("bfloat16", "float32", …) reaches."""
    if dtype in ("bfloat16", "float16"):
        peak = card.bf16_flop_per_second
    elif dtype == "float32":
        peak = card.tf32_flop_per_second
    else:
        peak = card.fp64_flop_per_second
    return MATRIX_PRODUCT_SHARE * peak


def attention_rate(card: Card) -> float:
    """FLOP per second that an attention kernel reaches, in bf16."""
    return ATTENTION_SHARE * card.bf16_flop_per_second


def launch_seconds(
    card: Card, moved_bytes: float, flop: float = 0.0, flop_per_second: float = 0.0, instructions: float = 0.0
) -> float:
    """Modelled seconds of one launch that moves `moved_bytes` and computes `flop` at `flop_per_second`.

    instructions: of all its threads; 0: not counted.
    """
    memory_seconds = moved_bytes / (BANDWIDTH_SHARE * card.bytes_per_second)
    arithmetic_seconds = flop / flop_per_second if flop else 0.0
    issue_seconds = instructions / (ISSUE_SHARE * card.instructions_per_second())
    return max(memory_seconds, arithmetic_seconds, issue_seconds) + LAUNCH_SECONDS
