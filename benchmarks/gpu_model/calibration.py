"""What a real step adds to a modelled one: the one place of that factor, of its spread and of their sources.

A modelled time leaves out the host, collectives, clocks, and what products and attention lose to their peaks
(README.md). Where a stack is traced, its logged step over its modelled step is a factor. This script's own
gives the likely factor; the least and the most of all stacks are the spread.
"""

from typing import NamedTuple


class Anchor(NamedTuple):
    """A public stack: its modelled milliseconds of a step, and the fewest and most that its logs tell."""

    stack: str
    recurrence: bool
    modelled_ms: float
    logged_ms: tuple[float, float]

    def factors(self) -> tuple[float, float]:
        """Logged over modelled, by its fastest and by its slowest log."""
        fastest_ms, slowest_ms = self.logged_ms
        return fastest_ms / self.modelled_ms, slowest_ms / self.modelled_ms


# Milliseconds of the default's step as modelled (98,304 tokens, one of 8 H100), without recurrence and with:
# `python -m benchmarks.gpu_model --what train train_loop --keys 517 --mlp kernel` gives them.
STEP_MS = (60.1, 87.9)
# The same on one H100, which also did the optimizer's work of eight (benchmarks/results/h100/page.md).
MEASURED_MS = (83.1, 122.9)
# A looped step of 98,304 tokens there, a quarter of one of 393,216: ours with FUSED_HEADS=0, and #1855's
# (results/h100/README.md, from step-*.txt).
BESIDE_1855_MS = (126.7, 139.6)

# Logs of 8 H100: records/ of the challenge's repository, and PRs #1493 and #1855 (three seeds). All but
# the baseline attend by FlashAttention-3. The baseline and #1493 were traced as they are. #1855 was traced as
# this script in its forms: FlashAttention-3, a fused MLP and loss, norms and XSA left to Inductor. The loss
# of the baseline and of #1493 is counted by the instructions that Inductor of torch 2.13 emits for it.
ANCHORS = (
    Anchor("the challenge's baseline", False, 28.7, (43.54, 43.54)),
    Anchor("#1493", False, 87.1, (102.1, 102.1)),
    Anchor("#1493", True, 129.6, (150.5, 150.5)),
    Anchor("#1855", False, 67.6, (95.9, 96.5)),
    Anchor("#1855", True, 100.1, (140.9, 142.0)),
    Anchor("this script", False, STEP_MS[0], (MEASURED_MS[0], MEASURED_MS[0])),
    Anchor("this script", True, STEP_MS[1], (MEASURED_MS[1], MEASURED_MS[1])),
)
NEAREST_STACK = "this script"


class Expected(NamedTuple):
    """What a log would tell: likely by this script's own, between the least and the most of all stacks."""

    least: float
    likely: float
    most: float

    def __str__(self) -> str:
        """Of milliseconds: the likely ones, and the range."""
        return f"{self.likely:.0f} ms ({self.least:.0f} to {self.most:.0f})"


def logged_over_modelled() -> Expected:
    """The factor: the mean of the nearest stack's, and the least and the most of all stacks'."""
    every = [factor for anchor in ANCHORS for factor in anchor.factors()]
    nearest = [factor for anchor in ANCHORS if anchor.stack == NEAREST_STACK for factor in anchor.factors()]
    return Expected(min(every), sum(nearest) / len(nearest), max(every))


def expected_ms(modelled_ms: float) -> Expected:
    """What a log would tell of a step that is modelled at so many milliseconds."""
    factor = logged_over_modelled()
    return Expected(factor.least * modelled_ms, factor.likely * modelled_ms, factor.most * modelled_ms)
