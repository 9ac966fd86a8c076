"""ARTIFACT: the coder is exact and at its limit, GPTQ is GPTQ, budgets are filled, bad files refused."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import linecache
import lzma
import math
import random
import re
import resource
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import train_gpt
from tools.runs.source import decoded, unwrap
from train_gpt import ArtifactError, Config

TOKENIZER = "ab" * 32
QUIET = settings(max_examples=40, deadline=None)


def settings_of(layers: int, width: int, vocabulary: int, **others: Any) -> dict[str, str]:
    """Environment of a small model."""
    chosen = {
        "NUM_LAYERS": layers,
        "MODEL_DIM": width,
        "VOCAB_SIZE": vocabulary,
        "NUM_HEADS": 2,
        "NUM_KV_HEADS": 1,
        "NUM_LOOPS": 0,
        "PARALLEL_START_LAYER": -1,
        "XSA_LAST_N": 1,
        "GATE_WINDOW": 4,
        "ROPE_DIMS": 4,
        "TRAIN_SEQ_LEN": 32,
        "TRAIN_BATCH_TOKENS": 128,
        "MICRO_BATCH_TOKENS": 128,
        "EVAL_STRIDE": 0,
        "TTT_ENABLED": 0,
        **others,
    }
    return {name: str(value) for name, value in chosen.items()}


def trained_like(config: Config, seed: int = 0) -> nn.Module:
    """A model whose weights look trained: rows and columns of different spread, a few outliers."""
    model, random_bits = train_gpt.build_model(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random_bits)
            if parameter.dim() > 1:
                noise *= torch.randn(parameter.shape[-1], generator=random_bits).mul(0.3).exp()
                noise *= torch.randn(*parameter.shape[:-1], 1, generator=random_bits).mul(0.3).exp()
                noise[torch.rand(noise.shape, generator=random_bits) < 1e-3] *= 6
            parameter.add_(0.03 * noise)
    return model


def batches(config: Config, count: int = 2, seed: int = 0) -> list[Any]:
    """Random training batches."""
    random_bits = torch.Generator().manual_seed(seed)
    shape = (4, config.train_seq_len)
    return [
        SimpleNamespace(
            inputs_BT=torch.randint(2, config.vocab_size, shape, generator=random_bits), cu_seqlens=None
        )
        for _ in range(count)
    ]


def place(path: Path, code_bytes: int = 0, lines: list[str] | None = None) -> tuple[Any, Any]:
    """What the writer asks of a run and its inputs."""
    log = print if lines is None else lines.append
    files, hashes = {"train_gpt.shipped.py": bytes(code_bytes)}, {"tokenizer": TOKENIZER}
    run = SimpleNamespace(path=lambda _: path, log=log)
    return run, SimpleNamespace(files=files, hashes=hashes)


def write(path: Path, config: Config, code_bytes: int = 0, seed: int = 0) -> tuple[nn.Module, Any, list[str]]:
    """Write the artifact of a trained-looking model."""
    model, lines = trained_like(config, seed), []
    hessians = train_gpt.collect_hessians(model, batches(config), 1) if config.gptq else {}
    train_gpt.write_artifact(model, config, hessians, *place(path, code_bytes, lines))
    return model, train_gpt.load_artifact(path)[1], lines


def correlated_bank(matrices: int, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights and the Hessians of strongly correlated inputs of unequal size."""
    random_bits = torch.Generator().manual_seed(seed)
    weights = torch.randn(matrices, rows, columns, generator=random_bits)
    mix = torch.randn(matrices, columns, columns, generator=random_bits) / columns**0.5
    x = torch.randn(matrices, 8 * columns, columns, generator=random_bits) @ (mix + 0.3 * torch.eye(columns))
    x = x * torch.randn(matrices, 1, columns, generator=random_bits).mul(0.5).exp()
    return weights, x.mT @ x / x.size(1)


@pytest.fixture(scope="module")
def tiny() -> Config:
    return Config.from_env(settings_of(1, 16, 32, ARTIFACT_BYTES_MAX=100_000))


@pytest.fixture(scope="module")
def tiny_file(tiny: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "model.bin"
    write(path, tiny)
    return path


# --- coder --------------------------------------------------------------------------------------------------


@st.composite
def code_arrays(draw: st.DrawFn) -> list[np.ndarray]:
    """Arrays of all kinds: empty, constant, one row, one column, heavy tails."""
    arrays = []
    for _ in range(draw(st.integers(0, 3))):
        rows, columns, peak = draw(st.integers(0, 40)), draw(st.integers(1, 90)), draw(st.integers(0, 127))
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
    state, values = 12345, np.empty(rows * columns, np.int8)
    for index in range(values.size):
        total = 0
        for _ in range(4):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            total += (state >> 33) % 9
        values[index] = total - 16
    return values.reshape(rows, columns)


def test_same_codes_give_the_same_bytes_everywhere() -> None:
    data = train_gpt.encode([lcg_codes(70, 90), lcg_codes(33, 7)])
    assert hashlib.sha256(data).hexdigest() == GOLDEN_SHA256, f"{len(data)} bytes"


GOLDEN_SHA256 = "7cfecf83855a27d24ede733d4ff4358c73df0356417f59928561a657d0337d98"


def zeroth_order_bytes(codes: np.ndarray) -> float:
    counts = np.bincount(codes.ravel().view(np.uint8))
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum() / 8)


def gaussian_codes(rows: int, columns: int, deviation: float, column_spread: float) -> np.ndarray:
    rng = np.random.default_rng(7)
    spread = np.exp(column_spread * rng.standard_normal(columns))
    return np.clip(np.rint(rng.standard_normal((rows, columns)) * deviation * spread), -127, 127).astype(
        np.int8
    )


@pytest.mark.parametrize(("deviation", "columns"), [(2.7, 4096), (1.0, 4096), (9.0, 512)])
def test_coder_is_at_the_entropy(deviation: float, columns: int) -> None:
    codes = gaussian_codes(2_097_152 // columns, columns, deviation, 0.0)
    assert len(train_gpt.encode([codes])) <= 1.003 * zeroth_order_bytes(codes)


def test_columns_of_different_spread_beat_the_entropy() -> None:
    codes = gaussian_codes(512, 2048, 2.7, 0.3)
    assert len(train_gpt.encode([codes])) < 0.98 * zeroth_order_bytes(codes)


def test_coder_beats_lzma_by_four_percent() -> None:
    codes = gaussian_codes(512, 512, 2.7, 0.0)
    assert len(train_gpt.encode([codes])) < 0.96 * len(
        lzma.compress(codes.tobytes(), preset=9 | lzma.PRESET_EXTREME)
    )


@QUIET
@given(st.data())
def test_damaged_codes_end_in_an_error_or_in_codes(data: st.DataObject) -> None:
    array = gaussian_codes(20, 30, 2.0, 0.0)
    packed = bytearray(train_gpt.encode([array]))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packed)))
    for damaged in (bytes(packed), bytes(packed[:cut]), bytes(packed) + b"xy"):
        with contextlib.suppress(ValueError):
            (decoded,) = train_gpt.decode(damaged, [array.shape])
            assert decoded.shape == array.shape


# --- GPTQ -------------------------------------------------------------------------------------------------


def gptq_written_out(weights: Tensor, hessian: Tensor, scales: Tensor, levels: int, damping: float) -> Tensor:
    """GPTQ of one matrix, one column at a time, with the inverse updated by elimination, in float64."""
    weights, hessian = weights.double().clone(), hessian.double().clone()
    weights[:, hessian.diagonal() == 0] = 0
    hessian.diagonal().add_(damping * hessian.diagonal().mean())
    inverse, codes = torch.linalg.inv(hessian), torch.zeros_like(weights)
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
    config = Config.from_env(settings_of(2, 16, 32))
    model = trained_like(config)
    hessians = train_gpt.collect_hessians(model, batches(config), 1)
    for name, parameter in model.named_parameters():
        informed, rounded = (train_gpt.quantizer(name, parameter, h, config) for h in (hessians, {}))
        moved = informed(0.3, 30.0)[0] != rounded(0.3, 30.0)[0]
        of_each_matrix = moved.reshape(len(moved), -1, parameter.shape[-1]).any((0, 2))
        assert (of_each_matrix == (name in train_gpt.MATRIX_ROLES)).all(), name


# --- Hessians -----------------------------------------------------------------------------------------------


def test_hessians_are_the_sums_of_outer_products(tiny: Config) -> None:
    model, seen = trained_like(tiny), {}
    data = batches(tiny)
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
    config = Config.from_env(settings_of(2, 16, 32, NUM_LOOPS=2, LOOP_START=0, LOOP_END=0))
    model = trained_like(config)
    counted = []
    model.observer = lambda site, layer, x: counted.append((site, layer))
    model(batches(config)[0].inputs_BT, None)
    assert counted.count(("attn_in", 0)) == 3
    visits: list[Tensor] = []
    model.observer = lambda site, layer, x: (
        visits.append(x.reshape(-1, 16)) if (site, layer) == ("attn_in", 0) else None
    )
    with torch.no_grad():
        model(batches(config)[0].inputs_BT, None)
    x = torch.cat(visits)
    hessians = train_gpt.collect_hessians(model, batches(config, 1), 1)
    torch.testing.assert_close(hessians["attn_in", 0], x.T @ x, rtol=1e-4, atol=1e-4)


def test_calibration_reads_nothing_but_its_batches(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = trained_like(tiny), batches(tiny)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("calibration opened a file")

    for owner, name in [("builtins.open", ""), ("numpy.fromfile", ""), ("numpy.memmap", ""), ("os.open", "")]:
        monkeypatch.setattr(owner + name, refuse)
    train_gpt.collect_hessians(model, iter(data), 1)


def _rank_hessians(rank: int, folder: str, env: dict[str, str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    config = Config.from_env(env)
    hessians = train_gpt.collect_hessians(trained_like(config), [batches(config, 2)[rank]], 2)
    torch.save(hessians, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_add_their_hessians(tiny: Config, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank_hessians, (str(tmp_path), tiny.as_env()), nprocs=2)
    alone = train_gpt.collect_hessians(trained_like(tiny), batches(tiny, 2), 1)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for key, expected in alone.items():
        assert torch.equal(ranks[0][key], ranks[1][key])
        torch.testing.assert_close(ranks[0][key], expected, rtol=1e-4, atol=1e-4)


# --- rate control -------------------------------------------------------------------------------------------


SIZES = [(1, 32, 128), (2, 64, 256), (3, 96, 512)]


@pytest.mark.parametrize(("bits_per_weight", "passes"), [(1.7, 8), (3.5, 5)])  # coarse steps: ragged sizes
@pytest.mark.parametrize(("layers", "width", "vocabulary"), SIZES)
def test_budget_is_filled(
    layers: int, width: int, vocabulary: int, bits_per_weight: float, passes: int, tmp_path: Path
) -> None:
    env = settings_of(layers, width, vocabulary)
    weights = sum(math.prod(shape) for shape in train_gpt.parameter_shapes(Config.from_env(env)).values())
    limit = int(weights * bits_per_weight / 8) + 6000
    config = Config.from_env({**env, "ARTIFACT_BYTES_MAX": str(limit)})
    _, report, lines = write(tmp_path / "model.bin", config, code_bytes=4000)
    total = (tmp_path / "model.bin").stat().st_size + 4000
    assert int(re.findall(r"passes:(\d+)", "".join(lines))[0]) <= passes and report["bytes"] == total - 4000
    assert limit - max(8, 5e-4 * limit) <= total <= limit  # the smallest files move in steps of some bytes


def test_same_weights_give_the_same_file(tmp_path: Path) -> None:
    config = Config.from_env(settings_of(2, 32, 64, ARTIFACT_BYTES_MAX=20_000))
    write(tmp_path / "a.bin", config)
    write(tmp_path / "b.bin", config)
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


def test_more_bytes_buy_less_error(tmp_path: Path) -> None:
    errors = []
    for limit in (12_000, 16_000, 24_000):
        config = Config.from_env(settings_of(2, 32, 64, ARTIFACT_BYTES_MAX=limit))
        model, _, _ = write(tmp_path / f"{limit}.bin", config)
        loaded, _ = train_gpt.load_artifact(tmp_path / f"{limit}.bin")
        errors.append(
            sum(
                float((a - b).detach().square().sum())
                for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
            )
        )
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_a_model_too_small_for_the_budget_is_written_at_eight_bits(tiny: Config, tmp_path: Path) -> None:
    model, report, lines = write(tmp_path / "model.bin", tiny)
    assert any("8 bits cannot fill it" in line for line in lines)
    assert max(report["bits"].values()) >= 7 and report["bytes"] < 50_000
    loaded, _ = train_gpt.load_artifact(tmp_path / "model.bin")
    assert (model.qo_bank - loaded.qo_bank).norm() < 0.06 * model.qo_bank.norm()


def test_a_model_too_large_is_refused_before_and_after_training(tmp_path: Path) -> None:
    config = Config.from_env(settings_of(2, 64, 256, ARTIFACT_BYTES_MAX=8_000))
    with pytest.raises(ArtifactError, match=r"\d+ bytes above ARTIFACT_BYTES_MAX;"):
        train_gpt.fill_budget(config, 8_000, lambda m: range(round(train_gpt.expected_bytes(config, m))))
    with pytest.raises(ArtifactError, match=r"\d+ bytes above ARTIFACT_BYTES_MAX;"):
        write(tmp_path / "model.bin", config)
    assert not list(tmp_path.iterdir())


def test_the_estimate_brackets_what_is_written(tmp_path: Path) -> None:
    env = settings_of(2, 64, 256)
    high, *_, low = train_gpt.expected_bytes(Config.from_env(env), train_gpt.MULTIPLIERS)
    _, report, _ = write(tmp_path / "model.bin", Config.from_env(env))
    assert low < report["bytes"] and abs(report["bytes"] / high - 1) < 0.05
    tight = Config.from_env({**env, "ARTIFACT_BYTES_MAX": str(int(1.3 * low))})
    _, report, _ = write(tmp_path / "tight.bin", tight)
    assert max(report["bits"].values()) <= 4


def test_without_rate_control_bits_and_clips_are_as_given(tmp_path: Path) -> None:
    env = settings_of(
        2, 32, 64, RATE_CONTROL=0, MATRIX_BITS=3, EMBED_BITS=5, ATTN_CLIP_SIGMAS=3, MLP_CLIP_SIGMAS=3
    )
    _, report, lines = write(tmp_path / "model.bin", Config.from_env(env))
    assert {report["bits"].pop("token_embedding_VD")} <= {4, 5}
    assert report["bits"] == dict.fromkeys(train_gpt.BANKS, 3)
    assert report["label"] == "int3" and "passes:1" in "".join(lines)
    with pytest.raises(ArtifactError, match="above ARTIFACT_BYTES_MAX"):
        write(tmp_path / "small.bin", Config.from_env({**env, "ARTIFACT_BYTES_MAX": "3000"}))


def fill(size_of: Callable[[float], float], budget: int = 30_000) -> tuple[int, str, int]:
    """Size and note of the file found where files have these sizes, and how many were made."""
    config, made = Config.from_env(settings_of(2, 64, 256, ARTIFACT_BYTES_MAX=40_000)), []

    def quantized(multiplier: float) -> bytes:
        made.append(multiplier)
        return b"x" * int(size_of(multiplier))

    data, how = train_gpt.fill_budget(config, budget, quantized)
    assert len(set(made)) == len(made), "no file is made twice"
    return len(data), how, len(made)


def expected(multiplier: float) -> float:
    return train_gpt.expected_bytes(Config.from_env(settings_of(2, 64, 256)), multiplier)


@pytest.mark.parametrize("factor", [0.8, 0.97, 1.0, 1.1, 1.2])
def test_a_wrong_expectation_corrects_itself(factor: float) -> None:
    rng = np.random.default_rng(0)
    for noise in (0, 5):
        size, how, passes = fill(lambda m, n=noise: factor * expected(m) + n * rng.standard_normal())
        assert 30_000 - 20 <= size <= 30_000 and passes <= 9 and f"passes:{passes}" in how


@pytest.mark.parametrize("steepness", [0.6, 2.3])
def test_sizes_that_move_otherwise_than_expected_are_followed(steepness: float) -> None:
    size, _, passes = fill(lambda m: 30_000 + steepness * (expected(m) - 32_000))
    assert 30_000 - 20 <= size <= 30_000 and passes <= 6


def test_sizes_that_jump_end_with_the_best_that_fits() -> None:
    size, how, passes = fill(lambda m: 28_000 if expected(m) < 30_500 else 33_000)
    assert size == 28_000 and passes <= 10 and "unused" not in how


def test_what_never_fits_says_by_how_much_and_ends() -> None:
    with pytest.raises(ArtifactError, match="77 bytes above ARTIFACT_BYTES_MAX"):
        fill(lambda m: 30_077)
    with pytest.raises(ArtifactError, match="9 bytes above"):
        fill(lambda m: max(30_009.0, expected(m)))


def test_the_last_file_tried_may_be_the_only_one_that_fits() -> None:
    coarsest = train_gpt.MULTIPLIERS[-1]
    assert fill(lambda m: 29_000 if m == coarsest else 31_000)[0] == 29_000
    size, how, passes = fill(lambda m: 0.2 * expected(m))
    assert size < 25_000 and passes <= 4 and how.endswith(" unused: 8 bits cannot fill it")


# --- file -------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    config = Config.from_env(settings_of(2, 32, 64, ARTIFACT_BYTES_MAX=40_000))
    model, report, _ = write(tmp_path / "model.bin", config)
    loaded, _ = train_gpt.load_artifact(tmp_path / "model.bin")
    assert loaded.config.as_env("LOGIT_SOFTCAP") == config.as_env("LOGIT_SOFTCAP") == report["config"]
    assert report["tokenizer_sha256"] == TOKENIZER
    for (name, a), b in zip(model.named_parameters(), loaded.parameters(), strict=True):
        if name in train_gpt.MATRIX_ROLES:
            assert (a - b).norm() < 0.2 * a.norm(), name
        else:
            assert ((a - b).abs() <= a.abs().amax(-1, keepdim=True) / 225 + 1e-4).all(), name
    assert report["bytes"] - sum(report["sections"].values()) == train_gpt.HEAD.size
    assert report["sha256"] == hashlib.sha256((tmp_path / "model.bin").read_bytes()).hexdigest()


def test_weights_that_are_not_numbers_are_not_written(tiny: Config, tmp_path: Path) -> None:
    model = trained_like(tiny)
    with torch.no_grad():
        model.mlp_up_bank[0, 3, 1] = math.inf
    with pytest.raises(ArtifactError, match="mlp_up_bank"):
        train_gpt.write_artifact(model, tiny, {}, *place(tmp_path / "model.bin"))
    assert not list(tmp_path.iterdir())


def sections_of(path: Path) -> dict[str, bytes]:
    """The sections of an artifact, as they stand in the file."""
    rest, sizes = path.read_bytes()[train_gpt.HEAD.size :], train_gpt.load_artifact(path)[1]["sections"]
    return {"config": rest[: sizes["config"]], "weights": rest[sizes["config"] :]}


def reseal(sections: dict[str, bytes]) -> bytes:
    """An artifact with right sizes and checksums, whatever its sections hold."""
    config, weights = sections["config"], sections["weights"]
    head = train_gpt.HEAD.pack(train_gpt.MAGIC, len(config), zlib.crc32(config), zlib.crc32(weights))
    return head + config + weights


def with_config(path: Path, **changes: str | None) -> bytes:
    """The file with settings changed (None: removed) and sealed again."""
    sections = sections_of(path)
    header = json.loads(zlib.decompress(sections["config"]))
    for name, value in changes.items():
        header["config"].pop(name, None)
        if value is not None:
            header["config"][name] = value
    return reseal({**sections, "config": zlib.compress(json.dumps(header).encode())})


def refused(data: bytes, folder: Path) -> str:
    """The message with which a file of these bytes is refused."""
    path = folder / "bad.bin"
    path.write_bytes(data)
    with pytest.raises(ArtifactError) as caught:
        train_gpt.load_artifact(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("section", ["config", "weights"])
def test_a_flipped_bit_is_refused_by_section(section: str, tiny_file: Path, tmp_path: Path) -> None:
    data, sections = bytearray(tiny_file.read_bytes()), sections_of(tiny_file)
    data[data.index(sections[section]) + len(sections[section]) // 2] ^= 16
    assert f"section {section}: truncated or damaged" in refused(bytes(data), tmp_path)


def test_foreign_newer_and_cut_files_are_refused(tiny_file: Path, tmp_path: Path) -> None:
    data = tiny_file.read_bytes()
    assert "section head" in refused(b"", tmp_path)
    assert "not an artifact" in refused(b"PK\x03\x04" + data[4:], tmp_path)
    newer = bytearray(data)
    newer[7] += 1
    assert "another version" in refused(bytes(newer), tmp_path)
    assert "section weights" in refused(data + b"\0", tmp_path)
    for cut in (3, 11, 60, len(data) // 2, len(data) - 1):
        refused(data[:cut], tmp_path)
    with pytest.raises(ArtifactError, match="No such file"):
        train_gpt.load_artifact(tmp_path / "absent.bin")
    with pytest.raises(ArtifactError, match="directory"):
        train_gpt.load_artifact(tmp_path)


def test_forged_settings_are_refused_before_they_cost_memory(tiny_file: Path, tmp_path: Path) -> None:
    for name in ("MODEL_DIM", "TRAIN_SEQ_LEN"):
        message = refused(with_config(tiny_file, **{name: "1048576"}), tmp_path)
        assert "more than such a file can hold" in message, name
    for name, value in [("NUM_LAYERS", "256"), ("VOCAB_SIZE", "65536"), ("MLP_MULT", "64")]:
        assert "section" in refused(with_config(tiny_file, **{name: value}), tmp_path), name
    for name, value in [("MODEL_DIM", "nan"), ("NUM_HEADS", "0"), ("NUM_HEADS", "3"), ("VOCAB_SIZE", "31")]:
        assert "section" in refused(with_config(tiny_file, **{name: value}), tmp_path), name
    assert "section" in refused(with_config(tiny_file, SMEAR_GATE="off"), tmp_path)
    assert "missing or unknown" in refused(with_config(tiny_file, VOCAB_SIZE=None), tmp_path)
    assert "missing or unknown" in refused(with_config(tiny_file, CONFIG="/etc/passwd"), tmp_path)
    assert "section config" in refused(with_config(tiny_file, VOCAB_SIZE=32), tmp_path)
    sections = sections_of(tiny_file)
    bomb = zlib.compress(b" " * (1 << 28))
    assert "section config" in refused(reseal({**sections, "config": bomb}), tmp_path)
    nested = zlib.compress(b"[" * 60_000)
    assert "section config" in refused(reseal({**sections, "config": nested}), tmp_path)
    for cut in (0, 10, len(sections["weights"]) - 2):
        cut_short = {**sections, "weights": sections["weights"][:cut]}
        assert "section weights" in refused(reseal(cut_short), tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"config": ["VOCAB_SIZE"]}, {"config": list(Config().as_env("LOGIT_SOFTCAP"))}, {"config": None},
        {"DOC_MASK": 1}, {"VOCAB_SIZE": ["32"]}, {"TRAIN_SEQ_LEN": {}}, {"MATRIX_INIT": None},
    ],
)  # fmt: skip
def test_headers_of_the_wrong_kind_are_refused(
    change: dict[str, Any], tiny_file: Path, tmp_path: Path
) -> None:
    sections = sections_of(tiny_file)
    header = json.loads(zlib.decompress(sections["config"]))
    target = header if set(change) <= set(header) else header["config"]
    target.update(change)
    damaged = reseal({**sections, "config": zlib.compress(json.dumps(header).encode())})
    assert "section config" in refused(damaged, tmp_path)


def fuzz(path: Path, folder: Path, count: int, seed: int) -> None:
    """Random damage, half of it sealed again under right checksums: the one error, or a sound model."""
    rng, original, bad = random.Random(seed), path.read_bytes(), folder / "fuzz.bin"
    whole = sections_of(path)
    refusals = 0
    for _ in range(count):
        sections = dict(whole)
        name = rng.choice(list(sections))
        target = bytearray(sections[name] if rng.random() < 0.6 else original)
        sealed = len(target) == len(sections[name])
        for _ in range(rng.choice([1, 1, 2, 8])):
            kind, place = rng.random(), rng.randrange(len(target)) if target else 0
            if kind < 0.5 and target:
                target[place] ^= 1 << rng.randrange(8)
            elif kind < 0.7 and target:
                target[place : place + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
            elif kind < 0.85:
                del target[place:]
            else:
                target[place:place] = rng.choice([b"\xff" * 8, b"\0" * 8, rng.randbytes(3)])
        bad.write_bytes(reseal({**sections, name: bytes(target)}) if sealed else bytes(target))
        try:
            model, _ = train_gpt.load_artifact(bad)
            assert all(parameter.isfinite().all() for parameter in model.parameters())
        except ArtifactError:
            refusals += 1
    assert refusals > 0.7 * count


def test_fuzz(tiny_file: Path, tmp_path: Path) -> None:
    fuzz(tiny_file, tmp_path, 2_000, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_fuzz_long(seed: int, tiny_file: Path, tmp_path: Path) -> None:
    fuzz(tiny_file, tmp_path, 10_000, seed=100 + seed)


# --- disk ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """The kernel refuses to let files grow beyond this: a full disk in all but name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_file(tiny: Config, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"the old file")
    with file_size_limit(200), pytest.raises(train_gpt.ConfigError, match="cannot be written"):
        write(path, tiny)
    assert path.read_bytes() == b"the old file"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.bin"]


# --- shipped code -------------------------------------------------------------------------------------------


PROGRAM = '''"""A program — with a docstring."""
from __future__ import annotations
import inspect, sys
from dataclasses import dataclass
@dataclass
class Point:
    """A point."""
    x: int
    name: str = "é\\\\ %s"
class Nothing(Exception):
    """Nothing but words."""
def knob(default, meaning):
    return default
SIDE = knob(3, "length of a side")
def read(function):
    return function.__annotations__["x"]
@read
def number(x: int):
    return x
def area(point: Point) -> int:
    """Its area."""  # a comment
    return point.x * point.x
if __name__ == "__main__":
    print(__file__, __name__, sys.argv[1:], area(Point(SIDE)), Point(3).name, number)
    print(inspect.getsource(area))
    area(None)
'''


def run_script(folder: Path, source: bytes) -> subprocess.CompletedProcess[str]:
    (folder / "train_gpt.py").write_bytes(source)
    return subprocess.run(
        [sys.executable, "train_gpt.py", "a", "b"], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_wrapped_code_is_the_same_program(tmp_path: Path) -> None:
    raw = run_script(tmp_path, PROGRAM.encode())
    wrapped = run_script(tmp_path, train_gpt.shipped_code(PROGRAM.encode(), "wrapped"))
    assert raw.stdout.split("\n")[0] == wrapped.stdout.split("\n")[0]
    assert "return point.x * point.x" in wrapped.stdout
    assert raw.returncode == wrapped.returncode == 1
    for told in (raw.stderr, wrapped.stderr):
        assert re.search(r'train_gpt.py.*", line \d+, in area\n', told)
    assert "Its area" in raw.stdout and "Its area" not in wrapped.stdout and "comment" not in wrapped.stdout


def test_wrapped_code_can_be_imported_and_run_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "wrapped.py").write_bytes(train_gpt.shipped_code(PROGRAM.encode(), "wrapped"))
    program = "import wrapped; print(wrapped.area(wrapped.Point(4)), wrapped.Point(1).name)"
    for arguments, told in (
        (["-c", program], "16 é\\ %s\n"),
        (["-m", "wrapped"], "__main__ [] 9"),
    ):
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, timeout=60,
                              env={"PYTHONIOENCODING": "utf-8"})  # fmt: skip
        assert told in done.stdout.decode(), done.stderr


def test_wrapped_code_holds_any_byte() -> None:
    escapes, held = set[bytes](), set[int]()
    for seed in range(60):
        noise = random.Random(seed).randbytes(600).hex()
        wrapped = train_gpt.shipped_code(f'NOISE = "{noise}"'.encode(), "wrapped")
        scope = {"__file__": "noise.py"}
        exec(compile(wrapped, "noise.py", "exec"), scope)
        assert scope["NOISE"] == noise and read_source(wrapped) == f"NOISE = '{noise}'"
        escapes |= set(re.findall(rb"\\(x00\d|x00|.)", wrapped))
        held |= set(wrapped)
    assert {b"x00", b"r", b"'", b"\\"} <= escapes, "each escape was needed somewhere"
    assert any(escape.startswith(b"x00") and len(escape) == 4 for escape in escapes), "NUL before a digit"
    assert held == set(range(256)) - {0, 13}


def read_source(wrapped: bytes) -> str | None:
    return unwrap(decoded(wrapped))


def test_shipped_code_follows_the_mode(repo: Path) -> None:
    source = Path(train_gpt.__file__).read_bytes()
    assert train_gpt.shipped_code(source, "raw") == source
    wrapped = train_gpt.shipped_code(source, "wrapped")
    assert len(wrapped) < 0.25 * len(source)
    payload = lzma.compress(unwrap(decoded(wrapped)).encode(), preset=9 | lzma.PRESET_EXTREME)
    assert len(wrapped) < 1.035 * len(payload)
    assert train_gpt.shipped_code(wrapped, "wrapped") == wrapped
    assert wrapped == train_gpt.shipped_code(source, "wrapped")
    assert linecache.getlines(inspect.getfile(train_gpt))
