"""CODER: exact for any integers, at the entropy of the codes, the same bytes on every machine."""

import contextlib
import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt

GOLDEN_SHA256 = "3d87553005f5a03f6db1d57aaf9a4e3592426c17f9e4a75019617649072c0457"
QUIET = settings(max_examples=20, deadline=None)


@st.composite
def code_arrays(draw: st.DrawFn) -> list[np.ndarray]:
    """Arrays of all kinds: empty, constant, one row, one column, heavy tails."""
    arrays = []
    for _ in range(draw(st.integers(0, 3))):
        rows = draw(st.integers(0, 40))
        columns = draw(st.integers(1, 90))
        peak = draw(st.integers(0, 127))
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        values = rng.standard_normal((rows, columns)) * draw(st.sampled_from([0.0, 0.3, 3.0, 60.0]))
        arrays.append(np.clip(np.rint(values), -peak, peak).astype(np.int8))
    return arrays


@QUIET
@given(code_arrays())
def test_coder_round_trip(arrays: list[np.ndarray]) -> None:
    data = train_gpt.encode(arrays)
    decoded = train_gpt.decode(data, [array.shape for array in arrays])
    assert all(np.array_equal(a, b) for a, b in zip(arrays, decoded, strict=True))


def lcg_codes(rows: int, columns: int) -> np.ndarray:
    """Bell-shaped codes from whole-number arithmetic alone."""
    state = 12345
    values = np.empty(rows * columns, np.int8)
    for index in range(values.size):
        total = 0
        for _ in range(4):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            total += (state >> 33) % 9
        values[index] = total - 16
    return values.reshape(rows, columns)


def test_same_codes_give_the_same_bytes_everywhere() -> None:
    # The last array follows a trellis, over more rows than one of its blocks has.
    data = train_gpt.encode([lcg_codes(70, 90), lcg_codes(33, 7), train_gpt.half_steps(lcg_codes(300, 11))])
    assert hashlib.sha256(data).hexdigest() == GOLDEN_SHA256, f"{len(data)} bytes"


def zeroth_order_bytes(codes: np.ndarray) -> float:
    counts = np.bincount(codes.ravel().view(np.uint8))
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum() / 8)


def gaussian_codes(rows: int, columns: int, deviation: float, column_spread: float) -> np.ndarray:
    rng = np.random.default_rng(7)
    spread = np.exp(column_spread * rng.standard_normal(columns))
    codes = np.rint(rng.standard_normal((rows, columns)) * deviation * spread)
    return np.clip(codes, -127, 127).astype(np.int8)


@pytest.mark.parametrize(("deviation", "columns"), [(2.7, 4096), (1.0, 4096), (9.0, 512)])
def test_coder_is_at_the_entropy(deviation: float, columns: int) -> None:
    codes = gaussian_codes(1_048_576 // columns, columns, deviation, 0.0)
    assert len(train_gpt.encode([codes])) <= 1.003 * zeroth_order_bytes(codes)


def test_coder_is_at_the_entropy_of_columns_and_half_steps_cost_nothing() -> None:
    codes = gaussian_codes(256, 2048, 2.7, 0.3)
    assert len(train_gpt.encode([codes])) < 0.98 * zeroth_order_bytes(codes)
    # Half steps take the bytes of whole steps of the same size: the decoder knows the shift.
    halves = trellis_halves(128, 1024, 2.7)
    whole = gaussian_codes(128, 1024, 2.7, 0.0)
    assert len(train_gpt.encode([halves])) < 1.004 * len(train_gpt.encode([whole]))


def trellis_halves(rows: int, columns: int, deviation: float) -> np.ndarray:
    """Half steps of a Gaussian source along the trellis."""
    values = np.random.default_rng(3).standard_normal((columns, rows)) * deviation
    steps = train_gpt.nearest_on_trellis(torch.from_numpy(values).float(), 127.0)
    return (2 * steps).short().T.contiguous().numpy()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 7), (128, 9), (300, 40)])
def test_half_steps_come_back(rows: int, columns: int) -> None:
    halves = trellis_halves(rows, columns, 3.0)
    arrays = [halves, lcg_codes(12, 5), halves[:0]]
    decoded = train_gpt.decode(train_gpt.encode(arrays), [array.shape for array in arrays])
    for expected, found in zip(arrays, decoded, strict=True):
        assert found.dtype == expected.dtype and np.array_equal(found, expected)


def test_an_array_is_of_the_kind_its_peak_says() -> None:
    packed = bytearray(train_gpt.encode([lcg_codes(5, 20)]))
    packed[0] += train_gpt.ALONG_TRELLIS
    with pytest.raises(ValueError, match="the words do not end where the arrays end"):
        train_gpt.decode(bytes(packed), [(5, 20)])


TO_DAMAGE = [gaussian_codes(20, 30, 2.0, 0.0), trellis_halves(20, 30, 2.0)]


@QUIET
@given(st.data())
def test_damaged_codes_end_in_an_error_or_in_codes(data: st.DataObject) -> None:
    array = data.draw(st.sampled_from(TO_DAMAGE))
    packed = bytearray(train_gpt.encode([array]))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packed)))
    for damaged in (bytes(packed), bytes(packed[:cut]), bytes(packed) + b"xy"):
        with contextlib.suppress(ValueError):
            (decoded,) = train_gpt.decode(damaged, [array.shape])
            assert decoded.shape == array.shape
