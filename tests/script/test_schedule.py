"""SCHEDULE: golden values of the records' curves, and the same curve for every machine and clock."""

import dataclasses

import pytest

from train_gpt import Config, learning_rate_scale, loop_is_on, muon_momentum, run_progress

CLOCKLESS = Config(warmdown_iters=200, min_lr=0.0, iterations=1000, max_wallclock_seconds=0.0)
# The baseline: steps to come over WARMDOWN_ITERS.
LONGER = dataclasses.replace(CLOCKLESS, warmdown_iters=150, iterations=100)
IN_STEPS = Config(muon_momentum=0.99, muon_momentum_warmup_steps=1500)
RATE, MOMENTUM = learning_rate_scale, muon_momentum
# A curve under its settings, and its values at shares of the run.
OF_SHARES = [
    (RATE, Config(warmdown_frac=0.72, min_lr=0.0),  # PR #1493
     {0.0: 1.0, 0.15: 1.0, 0.28: 1.0, 0.64: 0.5, 0.82: 0.25, 1.0: 0.0}),
    (RATE, Config(), {0.0: 1.0, 0.15: 1.0, 0.575: 0.5, 0.915: 0.1, 0.99: 0.1, 1.3: 0.1}),
    *((RATE, Config(max_wallclock_seconds=seconds, **none), {0.0: 1.0, 0.999: 1.0})
      for seconds in (0.0, 600.0) for none in ({"warmdown_frac": 0.0}, {"warmdown_iters": 0})),
    (MOMENTUM, Config(), {0.0: 0.92, 0.15: 0.945, 0.3: 0.97, 1.0: 0.97}),
    (MOMENTUM, Config(muon_momentum_warmup_frac=0.0), {0.0: 0.97}),
    (MOMENTUM, Config(muon_momentum_warmup_steps=0), {0.0: 0.97}),
]
# The same, and its values at steps.
OF_STEPS = [
    (RATE, CLOCKLESS, {0: 1.0, 800: 1.0, 900: 0.5, 990: 0.05}),
    (RATE, LONGER, {step: (100 - step) / 150 for step in (0, 1, 50, 99)}),
    (MOMENTUM, IN_STEPS, {0: 0.92, 750: 0.955, 1500: 0.99, 9000: 0.99}),
]


def test_curves_have_their_golden_values() -> None:
    for curve, config, values in OF_SHARES:
        assert {share: curve(share, 100, config) for share in values} == pytest.approx(values, abs=1e-12)
    for curve, config, values in OF_STEPS:
        found = {step: curve(run_progress(123.0, step, config), step, config) for step in values}
        assert found == pytest.approx(values)


@pytest.mark.parametrize("step", [1, 12_000, 12_580, 12_581, 13_000, 13_779])
def test_warmdown_in_steps_follows_the_baseline_under_a_clock(step: int) -> None:
    """The baseline: remaining milliseconds over WARMDOWN_ITERS mean steps, 43.54 ms each, 600 s in all."""
    config = Config(warmdown_iters=1200, min_lr=0.0)
    elapsed_ms = 43.54 * step
    remaining_ms, warmdown_ms = 600_000 - elapsed_ms, 1200 * elapsed_ms / step
    expected = remaining_ms / warmdown_ms if remaining_ms <= warmdown_ms else 1.0
    assert learning_rate_scale(elapsed_ms / 600_000, step, config) == pytest.approx(expected)


def test_a_short_run() -> None:
    assert run_progress(0.0, 0, Config(iterations=0)) == 1.0
    without_clock = Config(iterations=0, max_wallclock_seconds=0.0)
    assert run_progress(0.0, 0, without_clock) == 1.0
    # A warm-down longer than the run: full rate at step 0, then as far down as the mean step says.
    config = Config(warmdown_iters=3500, min_lr=0.0)
    assert learning_rate_scale(0.0, 0, config) == 1.0
    assert learning_rate_scale(0.001, 1, config) == pytest.approx(0.999 / 3.5)


def test_progress_and_the_loop() -> None:
    on = [loop_is_on(percent / 100, Config()) for percent in range(101)]
    assert on == [False] * 35 + [True] * 66
    assert not loop_is_on(1.0, Config(num_loops=0))
    assert loop_is_on(0.0, Config(enable_looping_at=0.0))
    config = Config(iterations=1000, max_wallclock_seconds=600.0, gptq_reserve_seconds=12.0)
    assert run_progress(294.0, 100, config) == pytest.approx(0.5)
    assert run_progress(58.8, 500, config) == pytest.approx(0.5)
    steps_only = dataclasses.replace(config, max_wallclock_seconds=0.0)
    assert run_progress(1e9, 250, steps_only) == 0.25
    assert run_progress(0.0, 0, config) == 0.0
    assert run_progress(300.0, 100, dataclasses.replace(config, gptq=False)) == 0.5  # reserves nothing
