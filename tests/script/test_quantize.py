"""QUANTIZE: GPTQ is GPTQ, and the Hessians are those of the inputs that training saw."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

import train_gpt
from tests.support.models import plain_settings, random_batches, tiny_config, trained_like
from tests.support.ranks import on_ranks
from train_gpt import ArtifactError, Config, Machine

PLAIN = Config(trellis=False, column_steps=0.0)  # whole steps, as large in all columns


@pytest.fixture(scope="module")
def tiny() -> Config:
    return Config.from_env(plain_settings(1, 16, 32))


def correlated_bank(matrices: int, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights and the Hessians of strongly correlated inputs of unequal size."""
    random_bits = torch.Generator().manual_seed(seed)
    weights = torch.randn(matrices, rows, columns, generator=random_bits)
    mix = torch.randn(matrices, columns, columns, generator=random_bits) / columns**0.5
    x = torch.randn(matrices, 8 * columns, columns, generator=random_bits) @ (mix + 0.3 * torch.eye(columns))
    x = x * torch.randn(matrices, 1, columns, generator=random_bits).mul(0.5).exp()
    return weights, x.mT @ x / x.size(1)


def gptq_written_out(weights: Tensor, hessian: Tensor, scales: Tensor, levels: int, damping: float) -> Tensor:
    """GPTQ of one matrix, one column at a time, with the inverse updated by elimination, in float64."""
    weights, hessian = weights.double().clone(), hessian.double().clone()
    weights[:, hessian.diagonal() == 0] = 0
    hessian.diagonal().add_(damping * hessian.diagonal().mean())
    inverse = torch.linalg.inv(hessian)
    codes = torch.zeros_like(weights)
    diagonal = hessian.diagonal().tolist()
    for column in sorted(range(len(diagonal)), key=lambda c: -diagonal[c]):
        codes[:, column] = (weights[:, column] / scales.double()).round().clamp(-levels, levels)
        error = (weights[:, column] - codes[:, column] * scales.double()) / inverse[column, column]
        weights -= error[:, None] * inverse[column][None, :]
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes


def quantizer_of(weights: Tensor, hessians: Tensor | None, **changes: float) -> train_gpt.Quantizer:
    """Of a bank of MLP matrices; without Hessians, each weight gets its nearest code."""
    seen = {} if hessians is None else {("mlp_in", layer): h for layer, h in enumerate(hessians)}
    parameter = train_gpt.parameter_table(Config())["mlp_up_bank"]._replace(shape=tuple(weights.shape))
    return train_gpt.Quantizer("mlp_up_bank", weights, parameter, seen, replace(PLAIN, **changes))


def quantize(weights: Tensor, hessians: Tensor | None, bits: int, clip: float) -> tuple[Tensor, Tensor]:
    """Codes and scales of a bank of MLP matrices."""
    levels = 2 ** (bits - 1) - 1
    codes, exponents, _ = quantizer_of(weights, hessians).quantize(clip / levels, levels)
    matrices, rows, columns = weights.shape
    codes_NRC = torch.from_numpy(codes).view(rows, matrices, columns).transpose(0, 1)
    return codes_NRC, torch.exp2(torch.from_numpy(exponents).T / 8).half()


@pytest.mark.parametrize("columns", [40, 300])
def test_gptq_is_gptq(columns: int) -> None:
    weights, hessians = correlated_bank(2, 24, columns)
    hessians[0, 5], hessians[0, :, 5] = 0, 0
    codes, scales = quantize(weights, hessians, 4, 5.0)
    for matrix in range(2):
        expected = gptq_written_out(weights[matrix], hessians[matrix], scales[matrix].float(), 7, 0.01)
        assert (codes[matrix] == expected).float().mean() > 0.995
    assert (codes[0, :, 5] == 0).all()


def test_uncorrelated_or_unknown_inputs_leave_nothing_to_gptq() -> None:
    weights, _ = correlated_bank(2, 16, 32)
    unequal = torch.linspace(0.5, 2.0, 32).diag().repeat(2, 1, 1)
    for hessians in (None, unequal):
        codes, scales = quantize(weights, hessians, 6, 10.0)
        nearest = (weights / scales.float()[:, :, None]).round().clamp(-31, 31)
        assert torch.equal(codes.float(), nearest)
    weights[1, 0, 0] = math.nan
    with pytest.raises(ArtifactError, match="mlp_up_bank is not finite"):
        quantize(weights, None, 6, 10.0)


@pytest.mark.parametrize("with_hessian", [False, True])
def test_zero_and_tiny_rows_are_safe(with_hessian: bool) -> None:
    weights, hessians = correlated_bank(1, 8, 16)
    weights[0, 2], weights[0, 3] = 0.0, weights[0, 3] * 1e-9
    codes, scales = quantize(weights, hessians if with_hessian else None, 6, 10.0)
    assert (scales > 0).all() and scales.isfinite().all() and (codes[0, 2:4] == 0).all()


def test_what_is_restored_is_codes_times_scales_of_the_clip() -> None:
    weights, _ = correlated_bank(1, 64, 128)
    codes, scales = quantize(weights, None, 6, 11.5)
    assert codes.dtype == torch.int8 and codes.abs().max() <= 31
    asked = 11.5 * weights.std(dim=2) / 31
    assert ((scales.float() / asked).log2().abs() < 1 / 15).all()
    scales = torch.exp2(torch.arange(-128, 128, dtype=torch.int8) / 8).half()
    assert scales.isfinite().all() and (scales > 0).all()
    # Matrix by matrix, for a bank, one matrix, a row and a single number.
    random_bits = torch.Generator().manual_seed(0)
    for shape in ((3, 4, 5), (4, 5), (5,), (1,)):
        matrices, rows, columns = train_gpt.bank_shape(shape)
        codes = torch.randint(-127, 128, (rows, matrices * columns), generator=random_bits).char()
        exponents = torch.randint(-40, 8, (rows, matrices), generator=random_bits).char()
        in_columns = torch.randint(-24, 24, (matrices, columns), generator=random_bits).char()
        quantized = train_gpt.QuantizedWeights(codes.numpy(), exponents.numpy(), in_columns.numpy())
        restored = train_gpt.dequantize(quantized, shape)
        assert restored.shape == shape and restored.dtype == torch.float32
        restored_NRC = restored.view(matrices, rows, columns)
        for matrix in range(matrices):
            mine = codes[:, matrix * columns : (matrix + 1) * columns].float()
            scales = torch.exp2(exponents[:, matrix] / 8).half().float()
            factors = torch.exp2(in_columns[matrix] / 8).half().float()
            assert torch.equal(restored_NRC[matrix], mine * scales[:, None] * factors)


@pytest.mark.parametrize("shape", [(2, 24, 40), (3, 40, 24), (1, 300, 16)])
def test_without_hessians_each_matrix_follows_the_trellis(shape: tuple[int, int, int]) -> None:
    """Along its rows: a decoder, which knows the shifts from the codes before, finds the same half steps."""
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    quantized = quantizer_of(weights, None, trellis=True).quantize(0.25, 31.0)
    codes = (quantized.codes >> 1).astype(np.int8)
    assert np.array_equal(train_gpt.half_steps(codes), quantized.codes)
    error = (weights - train_gpt.dequantize(quantized, shape)).square().mean()
    whole = quantizer_of(weights, None).quantize(0.25, 31.0)
    assert error < (weights - train_gpt.dequantize(whole, shape)).square().mean()


def with_column_steps(weights: Tensor, hessians: Tensor, power: float) -> tuple[float, float]:
    """Weighted error, and bits of the codes: their entropy column by column."""
    quantized = quantizer_of(weights, hessians, gptq_damping=1e-4, column_steps=power).quantize(0.25, 127.0)
    restored = train_gpt.dequantize(quantized, tuple(weights.shape))
    bits = 0.0
    for column in quantized.codes.T:
        shares = torch.from_numpy(column).int().add(127).bincount().double() / len(column)
        bits -= (torch.xlogy(shares, shares).sum() * len(column) / math.log(2)).item()
    error = weights - restored
    return float(torch.einsum("nrc,ncd,nrd->", error, hessians, error)), bits / weights.numel()


def test_steps_of_columns_lose_less_at_equal_bits_and_end_in_one_step() -> None:
    """Six decibels are a bit: the error that the same bits would have left with one step."""
    weights, hessians = correlated_bank(1, 256, 48)
    # GPTQ can make up for these columns very differently.
    sizes = torch.linspace(-1.5, 1.5, 48).exp()
    hessians = hessians * sizes[:, None] * sizes
    plain_error, plain_bits = with_column_steps(weights, hessians, 0.0)
    error, bits = with_column_steps(weights, hessians, 1.0)
    assert error * 4 ** (bits - plain_bits) < 0.75 * plain_error
    assert with_column_steps(weights, hessians, 1e-4) == pytest.approx((plain_error, plain_bits))


Seen = dict[tuple[str, int], Tensor]


@torch.no_grad()
def inputs_of_matrices(model: train_gpt.GPT, batches: list[train_gpt.Batch]) -> Seen:
    """All that forward passes show to an observer: (visits and tokens, width) by name and layer."""
    parts: dict[tuple[str, int], list[Tensor]] = {}

    def observe(name: str, layer: int, x: Tensor) -> None:
        parts.setdefault((name, layer), []).append(x.reshape(-1, x.size(-1)))

    for batch in batches:
        model(batch.inputs_BT, batch.starts, observe=observe)
    return {key: torch.cat(found) for key, found in parts.items()}


def test_hessians_are_the_sums_of_outer_products_over_every_visit(tiny: Config) -> None:
    model = trained_like(tiny)
    data = random_batches(tiny)
    seen = inputs_of_matrices(model, data)
    hessians = train_gpt.collect_hessians(model, iter(data))
    assert set(hessians) == {(name, 0) for name in "attn_in attn_out mlp_in mlp_hidden hidden".split()}
    assert set(seen) == set(hessians)
    for key, inputs in seen.items():
        x = inputs.double()
        torch.testing.assert_close(hessians[key].double(), x.T @ x, rtol=1e-4, atol=1e-4)
    config = Config.from_env(plain_settings(2, 16, 32, NUM_LOOPS=2, LOOP_START=0, LOOP_END=0))
    model = trained_like(config)
    batches = random_batches(config, 1)
    seen = inputs_of_matrices(model, batches)
    tokens = batches[0].inputs_BT.numel()
    assert len(seen["attn_in", 0]) == 3 * tokens and len(seen["attn_in", 1]) == tokens
    x = seen["attn_in", 0]
    hessians = train_gpt.collect_hessians(model, batches)
    torch.testing.assert_close(hessians["attn_in", 0], x.T @ x, rtol=1e-4, atol=1e-4)


def inputs_by_table(name: str, parameter: train_gpt.Parameter) -> list[tuple[str, int]]:
    """The input of each matrix of a parameter, by the table: a half of the bank for each of two names."""
    matrices, _, _ = train_gpt.bank_shape(parameter.shape)
    keys = []
    for input_name in parameter.inputs:
        for layer in range(matrices // len(parameter.inputs)):
            keys.append((input_name, layer))
    assert len(keys) == matrices, name
    return keys


@pytest.mark.parametrize("changes", [
    {}, {"NUM_LAYERS": 3, "LOOP_START": 1, "LOOP_END": 1}, {"PARALLEL_MODE": "gptj"}, {"NUM_LOOPS": 0},
], ids=str)
def test_the_table_names_what_each_matrix_multiplies(changes: dict[str, object]) -> None:
    """Every input that the table names is observed, nothing else is, and it is that matrix's own input.

    The gradient of W in W x is a sum of outer products with the inputs x: its rows lie in the span of these,
    which the few tokens of one short row do not fill.
    """
    config = tiny_config(TRAIN_SEQ_LEN=6, **changes)
    model = trained_like(config)
    (rows,) = random_batches(config, 1)
    batch = train_gpt.Batch(rows.inputs_BT[:1], rows.targets_BT[:1], starts=torch.tensor([0, 6]))
    seen = inputs_of_matrices(model, [batch])
    model.loss(batch.inputs_BT, batch.targets_BT, batch.starts).backward()
    named = set()
    for name, parameter in train_gpt.parameter_table(config).items():
        is_matrix = parameter.optimizer in ("muon", "embedding")
        assert bool(parameter.inputs) == is_matrix, name
        if not is_matrix:
            continue
        keys = inputs_by_table(name, parameter)
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        gradients_NRC = gradient.view(train_gpt.bank_shape(parameter.shape)).double()
        if parameter.optimizer == "embedding":  # the rows that are looked up have another gradient besides
            gradients_NRC[:, batch.inputs_BT[0]] = 0
        for key, gradient_RC in zip(keys, gradients_NRC, strict=True):
            basis = torch.linalg.qr(seen[key].double().T).Q
            assert basis.size(1) < gradient_RC.size(1), "the inputs would span everything"
            outside_RC = gradient_RC - gradient_RC @ basis @ basis.T
            assert gradient_RC.norm() > 0, (name, key)
            assert outside_RC.norm() < 1e-4 * gradient_RC.norm(), (name, key)
        named.update(keys)
    assert named == set(seen)


@pytest.mark.parametrize("changes", [{}, {"PARALLEL_MODE": "gptj"}], ids=str)
def test_every_matrix_finds_its_hessian(changes: dict[str, object]) -> None:
    """The codes of a matrix change with its own Hessian."""
    config = tiny_config(**changes, MLP_MULT=2, TRELLIS=0)
    model = trained_like(config)
    hessians = train_gpt.collect_hessians(model, random_batches(config))
    for name, parameter in train_gpt.parameter_table(config).items():
        if not parameter.inputs:
            continue
        columns = parameter.shape[-1]
        for matrix, key in enumerate(inputs_by_table(name, parameter)):
            weights = model.get_parameter(name)
            changed = {**hessians, key: torch.eye(columns)}
            codes = []
            for known in (hessians, changed):
                quantizer = train_gpt.Quantizer(name, weights, parameter, known, config)
                bank = quantizer.quantize(0.3, 30.0).codes
                codes.append(bank[:, matrix * columns : (matrix + 1) * columns])
            assert (codes[0] != codes[1]).any(), (name, matrix, key)


def _rank_hessians(machine: Machine, folder: str, env: dict[str, str]) -> None:
    config = Config.from_env(env)
    mine = random_batches(config, 2)[machine.rank]
    model = trained_like(config)
    model.machine = machine
    hessians = train_gpt.collect_hessians(model, [mine])
    torch.save(hessians, f"{folder}/{machine.rank}.pt")


def test_ranks_add_their_hessians(tiny: Config, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, _rank_hessians, str(tmp_path), tiny.as_env())
    alone = train_gpt.collect_hessians(trained_like(tiny), random_batches(tiny, 2))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for key, expected in alone.items():
        assert torch.equal(ranks[0][key], ranks[1][key])
        torch.testing.assert_close(ranks[0][key], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("shortfall", "used"), [(0.0, 0.01), (0.05, 0.1), (0.5, 1.0), (5.0, 10.0)])
def test_a_hessian_without_an_inverse_gets_more_damping(shortfall: float, used: float) -> None:
    """Its smallest eigenvalue lies below zero, by this share of the mean diagonal."""
    weights, hessians = correlated_bank(2, 6, 16)
    values, vectors = torch.linalg.eigh(hessians[1].double())
    values[0] = 0.0
    if shortfall:
        values[0] = -shortfall * values[1:].sum() / (16 + shortfall)  # as a share of the diagonal with it
    hessians[1] = (vectors * values) @ vectors.T
    quantizer = quantizer_of(weights, hessians.double())
    assert quantizer.damping == pytest.approx(used)
    # The result is that of the damping that was needed, had it been asked for.
    asked = quantizer_of(weights, hessians.double(), gptq_damping=quantizer.damping)
    found, expected = quantizer.quantize(0.1, 31.0), asked.quantize(0.1, 31.0)
    assert (found.codes == expected.codes).all() and (found.exponents == expected.exponents).all()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_every_finite_hessian_gets_an_inverse_in_the_end(size: float) -> None:
    """A paid training must not end without an artifact: even what no inputs can have is quantized."""
    weights, hessians = correlated_bank(1, 6, 16)
    for bad in (-hessians[0], torch.ones(16, 16), torch.zeros(16, 16)):
        quantizer = quantizer_of(weights, size * bad[None])
        assert quantizer.upper_NCC.isfinite().all()
        assert abs(quantizer.quantize(0.1, 31.0).codes).max() <= 31
    with pytest.raises(ArtifactError, match="not finite"):
        quantize(weights, torch.full((1, 16, 16), math.nan), 6, 10.0)


def test_more_damping_is_told_in_the_log(tiny: Config) -> None:
    config = replace(tiny, rate_control=False)
    model = trained_like(config)
    hessians = train_gpt.collect_hessians(model, random_batches(config))
    values, vectors = torch.linalg.eigh(hessians["mlp_in", 0].double())
    values[0] = -0.05 * values[1:].sum() / len(values)
    bad = {**hessians, ("mlp_in", 0): ((vectors * values) @ vectors.T).float()}
    _, usual = train_gpt.write_artifact(model, config, hessians, "", 100_000)
    assert "warning" not in usual
    _, damped = train_gpt.write_artifact(model, config, bad, "", 100_000)
    assert damped.count("warning") == 1
    needed = 10 * config.gptq_damping
    assert "warning: mlp_up_bank" in damped and f"GPTQ_DAMPING={needed:g}" in damped


@pytest.mark.parametrize("seconds_per_batch, taken", [(0.5, 4), (3.5, 2), (6.0, 1), (20.0, 1)])
def test_calibration_stops_before_a_batch_that_would_not_end_in_time(
    tiny: Config, seconds_per_batch: float, taken: int
) -> None:
    """Ten seconds are left, of which one is a margin. The first batch is taken in any case."""
    config = replace(tiny, gptq_calibration_batches=4, max_wallclock_seconds=10.0, gptq_reserve_seconds=10.0)
    logged: list[str] = []
    machine = SimpleNamespace(world_size=1, wait=lambda: None, gather=lambda value: [value])
    training = SimpleNamespace(
        config=config, seconds=0.0, run=SimpleNamespace(machine=machine, log=logged.append),
        loader=SimpleNamespace(next_batch=object),
    )
    batches = 0
    for _ in train_gpt.calibration_batches(training):
        training.seconds += seconds_per_batch
        batches += 1
    assert batches == taken
    assert len(logged) == (taken < 4)
