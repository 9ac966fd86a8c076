"""QUANTIZE: GPTQ is GPTQ, and the Hessians are those of the inputs that training saw."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import train_gpt
from tests.support.models import plain_settings, random_batches, trained_like
from train_gpt import ArtifactError, Config


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


# --- GPTQ -------------------------------------------------------------------------------------------------


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


def quantize(
    weights: Tensor, hessians: Tensor | None, bits: int, clip: float, damping: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a bank of MLP matrices; without Hessians, each weight's nearest code."""
    seen = {} if hessians is None else {("mlp_in", layer): h for layer, h in enumerate(hessians)}
    gptq = train_gpt.quantizer("mlp_up_bank", weights, seen, Config(gptq_damping=damping))
    levels = 2 ** (bits - 1) - 1
    codes, exponents = gptq(clip / levels, levels)
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


def weighted_error(weights: Tensor, hessians: Tensor, quantized: tuple[Tensor, Tensor]) -> float:
    error = weights - quantized[0].float() * quantized[1].float()[:, :, None]
    return float(torch.einsum("nrc,ncd,nrd->", error, hessians, error))


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_gptq_beats_rounding_in_the_metric_that_counts(bits: int) -> None:
    weights, hessians = correlated_bank(2, 48, 64)
    rounded = weighted_error(weights, hessians, quantize(weights, None, bits, 6.0))
    assert weighted_error(weights, hessians, quantize(weights, hessians, bits, 6.0)) < 0.6 * rounded


def test_uncorrelated_or_unknown_inputs_leave_nothing_to_gptq() -> None:
    weights, _ = correlated_bank(2, 16, 32)
    unequal = torch.linspace(0.5, 2.0, 32).diag().repeat(2, 1, 1)
    for hessians in (None, unequal):
        codes, scales = quantize(weights, hessians, 6, 10.0)
        nearest = (weights / scales.float()[:, :, None]).round().clamp(-31, 31)
        assert torch.equal(codes.float(), nearest)


@pytest.mark.parametrize("with_hessian", [False, True])
def test_zero_and_tiny_rows_are_safe(with_hessian: bool) -> None:
    weights, hessians = correlated_bank(1, 8, 16)
    weights[0, 2], weights[0, 3] = 0.0, weights[0, 3] * 1e-9
    codes, scales = quantize(weights, hessians if with_hessian else None, 6, 10.0)
    assert (scales > 0).all() and scales.isfinite().all() and (codes[0, 2:4] == 0).all()


def test_scales_are_the_clip_that_was_asked_for() -> None:
    weights, _ = correlated_bank(1, 64, 128)
    codes, scales = quantize(weights, None, 6, 11.5)
    assert codes.dtype == torch.int8 and codes.abs().max() <= 31
    asked = 11.5 * weights.std(dim=2) / 31
    assert ((scales.float() / asked).log2().abs() < 1 / 15).all()


def test_every_exponent_is_a_sound_scale() -> None:
    scales = torch.exp2(torch.arange(-128, 128, dtype=torch.int8) / 8).half()
    assert scales.isfinite().all() and (scales > 0).all()


def test_singular_hessians_are_damped_and_broken_ones_refused() -> None:
    weights, _ = correlated_bank(1, 8, 16)
    vector = torch.randn(16, generator=torch.Generator().manual_seed(1))
    singular = torch.outer(vector, vector)[None]
    codes, _ = quantize(weights, singular, 6, 10.0, damping=0.0)
    assert codes.abs().max() > 1
    with pytest.raises(ArtifactError, match="not finite"):
        quantize(weights, torch.full((1, 16, 16), math.nan), 6, 10.0)


def test_gptq_knows_the_inputs_of_every_matrix() -> None:
    config = Config.from_env(plain_settings(2, 16, 32))
    model = trained_like(config)
    hessians = train_gpt.collect_hessians(model, random_batches(config), 1)
    for name, parameter in model.named_parameters():
        informed, rounded = (train_gpt.quantizer(name, parameter, h, config) for h in (hessians, {}))
        moved = informed(0.3, 30.0)[0] != rounded(0.3, 30.0)[0]
        of_each_matrix = moved.reshape(len(moved), -1, parameter.shape[-1]).any((0, 2))
        assert (of_each_matrix == (name in train_gpt.MATRIX_ROLES)).all(), name


# --- Hessians -----------------------------------------------------------------------------------------------


def test_hessians_are_the_sums_of_outer_products(tiny: Config) -> None:
    model = trained_like(tiny)
    seen = {}
    data = random_batches(tiny)
    model.observer = lambda site, layer, x: seen.setdefault((site, layer), []).append(
        x.reshape(-1, x.size(-1))
    )
    with torch.no_grad():
        for batch in data:
            model(batch.inputs_BT, batch.cu_seqlens)
    hessians = train_gpt.collect_hessians(model, iter(data), 1)
    assert set(hessians) == {
        ("attn_in", 0),
        ("attn_out", 0),
        ("mlp_in", 0),
        ("mlp_hidden", 0),
        ("token_embedding_VD", 0),
    }
    for key, parts in seen.items():
        x = torch.cat(parts).double()
        torch.testing.assert_close(hessians[key].double(), x.T @ x, rtol=1e-4, atol=1e-4)


def test_looped_layers_count_every_visit() -> None:
    config = Config.from_env(plain_settings(2, 16, 32, NUM_LOOPS=2, LOOP_START=0, LOOP_END=0))
    model = trained_like(config)
    counted = []
    model.observer = lambda site, layer, x: counted.append((site, layer))
    model(random_batches(config)[0].inputs_BT, None)
    assert counted.count(("attn_in", 0)) == 3
    visits: list[Tensor] = []
    model.observer = lambda site, layer, x: (
        visits.append(x.reshape(-1, 16)) if (site, layer) == ("attn_in", 0) else None
    )
    with torch.no_grad():
        model(random_batches(config)[0].inputs_BT, None)
    x = torch.cat(visits)
    hessians = train_gpt.collect_hessians(model, random_batches(config, 1), 1)
    torch.testing.assert_close(hessians["attn_in", 0], x.T @ x, rtol=1e-4, atol=1e-4)


def test_calibration_reads_nothing_but_its_batches(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained_like(tiny)
    data = random_batches(tiny)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("calibration opened a file")

    for name in ("builtins.open", "numpy.fromfile", "numpy.memmap", "os.open"):
        monkeypatch.setattr(name, refuse)
    train_gpt.collect_hessians(model, iter(data), 1)


def _rank_hessians(rank: int, folder: str, env: dict[str, str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    config = Config.from_env(env)
    hessians = train_gpt.collect_hessians(trained_like(config), [random_batches(config, 2)[rank]], 2)
    torch.save(hessians, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_add_their_hessians(tiny: Config, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank_hessians, (str(tmp_path), tiny.as_env()), nprocs=2)
    alone = train_gpt.collect_hessians(trained_like(tiny), random_batches(tiny, 2), 1)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for key, expected in alone.items():
        assert torch.equal(ranks[0][key], ranks[1][key])
        torch.testing.assert_close(ranks[0][key], expected, rtol=1e-4, atol=1e-4)
