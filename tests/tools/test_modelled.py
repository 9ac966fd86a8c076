"""Benchmarks of what a GPU does: kernels that are timed there, steps and evaluations that are modelled."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import kernels, modelled, results


def test_steps_with_each_switch_are_compared_with_those_without() -> None:
    times = {"FUSED_MLP=0 FUSED_HEADS=0": [100.0] * 5, "FUSED_MLP=1 FUSED_HEADS=1": [80.0] * 5}
    roof = {"tflops": 600.0, "gb_per_s": 3000.0}
    lines = kernels.tables({"roof": roof, "kernels": [], "step_ms": times})
    assert lines[-2:] == [
        "| FUSED_MLP=0 FUSED_HEADS=0 | 100.00 | 100.00 | 100.00 | 1.000 | 5 |",
        "| FUSED_MLP=1 FUSED_HEADS=1 | 80.00 | 80.00 | 80.00 | 1.250 | 5 |",
    ]


# --- modelled steps and evaluation ---


def launch(name: str, moved_bytes: float, flop: float, microseconds: float) -> dict[str, Any]:
    return {"name": name, "moved_bytes": moved_bytes, "flop": flop, "microseconds": microseconds}


def modelled_step() -> dict[str, Any]:
    """A census of two products of the MLP and something else, in its sums."""
    product = launch("train_gpt.linear_leaky_square.default", 1e9, 0.65 * 989e12 / 1000, 1003.0)
    other = launch("mm.out", 2e9, 1e12, 2000.0)
    graph = {"launches": [product, other, product], "peak_bytes": 3 * 2**30}
    return modelled.step_sums({"tokens": 4096, "graphs": [graph]})


def test_a_slower_product_of_the_mlp_makes_a_modelled_step_longer_by_its_share() -> None:
    step = modelled_step()
    assert (step["launches"], step["moved_bytes"], step["peak_bytes"]) == (3, 4e9, 3 * 2**30)
    as_fast_as_others = modelled.milliseconds(step, 0.65)
    assert as_fast_as_others == pytest.approx(2 * 1.003 + 2.0)
    assert modelled.milliseconds(step, 0.325) == pytest.approx(as_fast_as_others + 2 * 1.0)
    # At any share no faster than its bytes.
    assert modelled.milliseconds(step, 10.0) == pytest.approx(2 * (1 / (0.85 * 3.35) + 0.003) + 2.0)


def test_a_pass_takes_no_less_than_its_launches_and_scales_with_its_rows() -> None:
    step = modelled_step()
    nothing = {"launches": 0, "microseconds": 0.0}
    whole = modelled.pass_seconds(step, 1.0, nothing, 0.0)
    assert whole == pytest.approx(1e-3 * modelled.CALIBRATION * modelled.milliseconds(step, 0.65))
    half = modelled.pass_seconds(step, 0.5, nothing, 0.0)
    assert whole / 2 < half < whole
    many = {"launches": 1_000_000, "microseconds": 500.0}
    assert modelled.pass_seconds(step, 1.0, many, 1.0) == pytest.approx(13.0, rel=1e-3)


def test_the_modelled_page_keeps_its_bars() -> None:
    """Of what is stored: evaluation with test-time training, and its table next to the words that say so."""
    stored = results.latest("modelled")["measured"]
    *without_adapters, adapters = modelled.evaluation(stored)
    assert sum(phase.seconds for phase in without_adapters) <= 120
    assert adapters.seconds <= 300
    plain, looped, *_ = stored["steps"]
    assert modelled.milliseconds(looped, 0.65) <= 96 and looped["moved_bytes"] <= 200e9
    assert modelled.milliseconds(plain, 0.65) <= 65 and plain["moved_bytes"] <= 132e9
    assert "## Modelled, not measured" in results.page()
