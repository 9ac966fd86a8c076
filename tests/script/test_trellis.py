"""TRELLIS: the nearest path is the nearest, its gain is the theory's, and off changes no byte."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from tests.support.models import plain_settings, trained_like
from train_gpt import Config, QuantizedWeights


def shifts_written_out(codes: list[int]) -> list[int]:
    """The shift of each row of a column, from the rule alone."""
    shifts: list[int] = []
    for row in range(len(codes)):
        shift = 0
        if row % train_gpt.TRELLIS_ROWS > 0:
            block = shifts[row - row % train_gpt.TRELLIS_ROWS :]
            before = block[-2] if len(block) > 1 else 0
            before_that = block[-3] if len(block) > 2 else 0
            shift = (codes[row - 1] + before + before_that) % 2
        shifts.append(shift)
    return shifts


def test_half_steps_follow_the_rule() -> None:
    codes = np.random.default_rng(0).integers(-127, 128, (300, 4)).astype(np.int8)
    halves = train_gpt.half_steps(codes)
    for column in range(4):
        expected = 2 * codes[:, column].astype(int) + shifts_written_out(codes[:, column].tolist())
        assert np.array_equal(halves[:, column], expected)


@pytest.mark.parametrize(("rows", "levels"), [(1, 2), (2, 3), (4, 2), (6, 1)])
def test_the_nearest_path_is_the_best_of_all(rows: int, levels: int) -> None:
    values = (1.5 * np.random.default_rng(rows).standard_normal((rows, 20))).astype(np.float32)
    least = np.full(20, np.inf)
    for codes in itertools.product(range(-levels, levels + 1), repeat=rows):
        halves = train_gpt.half_steps(np.array(codes)[:, None])
        least = np.minimum(least, np.square(values - halves / 2).sum(0))
    path = train_gpt.nearest_path(values, levels)
    assert np.array_equal(train_gpt.half_steps(path >> 1), path)
    np.testing.assert_allclose(np.square(values - path / 2).sum(0), least, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 128, 200])
def test_rows_of_any_number_are_on_the_trellis(rows: int) -> None:
    values = torch.randn(3, rows, generator=torch.Generator().manual_seed(0)) * 20
    steps = train_gpt.nearest_on_trellis(values, 12.4)
    halves = (2 * steps).short().T.numpy()
    assert np.array_equal(train_gpt.half_steps(halves >> 1), halves)
    assert np.abs(halves >> 1).max() <= 12


def test_the_gain_is_that_of_eight_states() -> None:
    """1.09 dB less error than rounding with the same step (Marcellin and Fischer), less what blocks cost."""
    values = torch.rand(64, 1024, generator=torch.Generator().manual_seed(0)) * 20 - 10
    error = (train_gpt.nearest_on_trellis(values, 100.0) - values).square().mean().item()
    assert 0.98 < 10 * np.log10(1 / 12 / error) < 1.10


NOWHERE = Path("model.bin")  # named in messages: these files are bytes in memory


def test_exponents_in_half_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their range is another: scales of any size would come of them."""
    config = Config.from_env(plain_settings(1, 16, 32))
    quantize = train_gpt.Quantizer.quantize

    def with_half_steps(quantizer: train_gpt.Quantizer, step: float, levels: float) -> QuantizedWeights:
        bank = quantize(quantizer, step, levels)
        return bank._replace(exponents=train_gpt.half_steps(np.full_like(bank.exponents, 127)))

    monkeypatch.setattr(train_gpt.Quantizer, "quantize", with_half_steps)
    data, _ = train_gpt.write_artifact(trained_like(config), config, {}, "", 1 << 20)
    with pytest.raises(train_gpt.ArtifactError, match=r"model.bin: .* is not finite"):
        train_gpt.load_artifact(NOWHERE, data)
