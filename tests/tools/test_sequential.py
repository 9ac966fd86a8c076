"""The rule by which a try stops: how often it is wrong, simulated; and what its verdicts say."""

import numpy as np
import pytest
from scipy import special

from tools.compare.sequential import (
    DROP,
    FIRST_LOOK,
    KEEP,
    LOOK_P,
    MOST_PAIRS,
    UNDECIDED,
    half_widths,
    pairs_to_decide,
    resolution,
    verdict,
)

DRAWS = 10_000


def looks(differences: np.ndarray) -> np.ndarray:
    """The two-sided p of every look of every row of differences: [draws, looks]."""
    counts = np.arange(1, differences.shape[1] + 1)
    means = differences.cumsum(1) / counts
    squares = (differences**2).cumsum(1) - counts * means**2
    with np.errstate(divide="ignore", invalid="ignore"):
        t = means / np.sqrt(squares / (counts - 1) / counts)
    return 2 * special.stdtr(counts - 1, -np.abs(t))[:, FIRST_LOOK - 1 :]


def test_whoever_stops_at_the_first_look_that_shows_something_is_rarely_wrong() -> None:
    """Also where the differences are not normal, as long as they are no more even than a normal's."""
    random = np.random.default_rng(0)
    shape = (DRAWS, MOST_PAIRS)
    bound = 0.05 + 2 * (0.05 * 0.95 / DRAWS) ** 0.5  # two standard errors of the simulation
    for draws in (random.standard_normal(shape), random.standard_t(4, shape), random.laplace(size=shape)):
        shown = (looks(draws) < LOOK_P).any(axis=1).mean()
        assert shown <= bound
    # At the level of a single test the same looks would be wrong several times as often.
    assert (looks(random.standard_normal(shape)) < 0.05).any(axis=1).mean() > 3 * 0.05


@pytest.mark.parametrize("useful", [0.0, 0.5])
def test_verdicts_on_no_change_and_on_a_real_one_by_the_rule_itself(useful: float) -> None:
    """Through `verdict`, pair by pair, as a try does it; the spread is 1."""
    random = np.random.default_rng(1)
    words = {}
    for effect in (0.0, -2.0, 2.0):
        ends = [final_word(random.normal(effect, 1.0, MOST_PAIRS), useful) for _ in range(60)]
        words[effect] = {word: ends.count(word) / len(ends) for word in (KEEP, DROP, UNDECIDED)}
    assert words[0.0][KEEP] <= 0.05
    assert words[-2.0][KEEP] > 0.9 and words[-2.0][DROP] <= 0.05
    assert words[2.0][DROP] > 0.9 and words[2.0][KEEP] <= 0.05


def final_word(differences: np.ndarray, useful: float) -> str:
    for count in range(1, len(differences) + 1):
        word = verdict(list(differences[:count]), useful).word
        if word != UNDECIDED:
            return word
    return UNDECIDED


def test_each_verdict_has_its_reason() -> None:
    assert verdict([-0.1, -0.101, -0.099, -0.1], 0.002).word == KEEP
    assert "hurts" in verdict([0.1, 0.101, 0.099, 0.1], 0.002).why
    small = [-0.0001, -0.00011, -0.00009, -0.0001]
    assert "smallest useful" in verdict(small, 0.002).why and verdict(small, 0.0).word == KEEP
    early = verdict([-0.1, -0.101, -0.099], 0.002)  # no look yet
    assert early.word == UNDECIDED and "--seeds 4 continues" in early.why
    idle = verdict([0.0] * 4, 0.002)
    assert idle.word == UNDECIDED and "same to the last digit" in idle.why
    scattered = [-0.02, 0.01, -0.03, 0.005, -0.01]
    undecided = verdict(scattered, 0.002)
    assert undecided.word == UNDECIDED and undecided.interval is not None
    # So many seeds would decide, and one less would not, if the mean and the spread stayed.
    center, spread = np.mean(scattered), np.std(scattered, ddof=1)
    count = pairs_to_decide(float(center), float(spread), 5, 0.002)
    distance = max(-center, center + 0.002)
    after, before = half_widths(float(spread), [count, count - 1])
    assert after < distance <= before
    assert f"about {count - 5} more seeds" in undecided.why
    # It names the option that goes on, unless the rule ends before.
    assert count > MOST_PAIRS and "continues" not in undecided.why
    nearly = verdict([-0.02, -0.01, -0.02, -0.005, -0.012], 0.002)
    assert nearly.why == "about 1 more seed, if they go on like these (--seeds 6 continues)"


def test_what_can_be_shown_is_what_a_look_shows() -> None:
    spread = 0.01
    for pairs, smallest in resolution(spread).items():
        unit = np.resize([1.0, -1.0], pairs)
        unit *= spread / np.std(unit, ddof=1)
        assert verdict(list(unit - 1.01 * smallest), 0.0).word == KEEP
        assert verdict(list(unit - 0.99 * smallest), 0.0).word == UNDECIDED
