"""benchmarks/quantizers.py: the lattice is E8, an ideal coder is almost ours, every quantizer is judged."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train_gpt
from benchmarks import quantizers
from train_gpt import Config


def test_the_nearest_point_of_the_lattice_is_the_best_of_all() -> None:
    values_8N = np.random.default_rng(0).uniform(-2, 2, (8, 40))
    steps_N8 = quantizers.nearest_in_lattice(torch.from_numpy(values_8N.T), 5.0).numpy()
    # No nearest point is farther than one from a value in any of its numbers.
    around = np.array(list(itertools.product((-1, 0, 1), repeat=8)))
    for value_8, found_8 in zip(values_8N.T, steps_N8, strict=True):
        least = np.inf
        for shift in (0.0, 0.5):
            points_P8 = np.rint(value_8 - shift) + around
            points_P8 = points_P8[points_P8.sum(1) % 2 == 0] + shift
            least = min(least, np.square(points_P8 - value_8).sum(1).min())
        whole_8 = found_8 - found_8[0] % 1
        assert np.array_equal(whole_8, np.rint(whole_8)) and whole_8.sum() % 2 == 0, "a point of E8"
        np.testing.assert_allclose(np.square(found_8 - value_8).sum(), least)


def test_the_error_of_the_lattice_is_as_published() -> None:
    """Conway and Sloane, table 2.3: 0.07168 a number, where rounding has a twelfth."""
    values = 50 * torch.rand(200, 800, generator=torch.Generator().manual_seed(0))
    errors = values - quantizers.nearest_in_lattice(values, 127.0)
    assert float(errors.square().mean()) == pytest.approx(929 / 12960, rel=0.01)


def bits_and_error(kind: str, step: float) -> tuple[float, float]:
    """Of a Gaussian array that is quantized in such steps: bits and mean squared error of a number."""
    values_RC = np.random.default_rng(1).standard_normal((512, 400)).astype(np.float32)
    in_steps_CR = torch.from_numpy(values_RC.T.copy()) / step
    if kind == "rounding":
        steps_CR = train_gpt.nearest_code(in_steps_CR, 127.0)
        codes_RC = steps_CR.numpy().T.astype(np.int8)
    else:
        nearest = train_gpt.nearest_on_trellis if kind == "trellis" else quantizers.nearest_in_lattice
        steps_CR = nearest(in_steps_CR, 127.0)
        codes_RC = (2 * steps_CR.numpy().T).astype(np.int16)
    error = float(((in_steps_CR - steps_CR) * step).square().mean())
    bits = quantizers.ideal_bits(codes_RC, in_lattice=kind == "lattice")
    if kind != "lattice":
        assert 8 * len(train_gpt.encode([codes_RC])) == pytest.approx(bits, rel=0.003), "what ours takes"
    return bits / codes_RC.size, error


def test_lattice_and_trellis_gain_what_theory_gives_them() -> None:
    """At equal error, in bits a number: E8 0.65 dB, 0.108 bits; eight states about 1 dB, 0.17."""
    found = {kind: bits_and_error(kind, 0.25) for kind in ("rounding", "lattice", "trellis")}
    gains = {}
    for kind, (bits, error) in found.items():
        # Six decibels are a bit.
        gains[kind] = found["rounding"][0] - bits + 0.5 * np.log2(found["rounding"][1] / error)
    assert gains["lattice"] == pytest.approx(0.108, abs=0.02)
    assert gains["trellis"] == pytest.approx(0.17, abs=0.02)


def settings_of(dataset: Path) -> dict[str, str]:
    """Three steps of a model of one layer."""
    small = {
        "VOCAB_SIZE": 320, "NUM_LAYERS": 1, "MODEL_DIM": 32, "NUM_HEADS": 2, "NUM_KV_HEADS": 1,
        "MLP_MULT": 2, "ROPE_DIMS": 8, "XSA_LAST_N": 1, "NUM_LOOPS": 0, "PARALLEL_START_LAYER": -1,
        "TRAIN_SEQ_LEN": 32, "TRAIN_BATCH_TOKENS": 128, "MICRO_BATCH_TOKENS": 128, "VAL_BATCH_SIZE": 128,
        "ITERATIONS": 3, "VAL_TOKENS_LIMIT": 512, "MATRIX_LR": 0.05, "GPTQ_CALIBRATION_BATCHES": 2,
        "DATA_PATH": dataset, "TOKENIZER_PATH": dataset / "tokenizer.model",
    }  # fmt: skip
    return {**quantizers.COMMON, **{name: str(value) for name, value in small.items()}}


def test_quantizers_fill_the_same_bytes_and_are_judged_beside_the_same_model(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(dataset)
    bench = quantizers.Bench(settings, tmp_path)
    rows = {}
    for name in (quantizers.BASE, quantizers.LATTICE, "trellis, steps of columns"):
        rows[quantizers.row_name(name, 4)] = [bench.measure(name, 4, 5)]
    plain, lattice, both = (runs[0] for runs in rows.values())
    budget = round(4 * plain["weights"] / 8)
    for run in (plain, lattice, both):
        assert 0.97 * budget < run["bytes"] <= budget and run["float_bpb"] == plain["float_bpb"]
    # A lattice that was put together wrongly would be far off.
    assert 0.5 < lattice["divergence"] / plain["divergence"] < 1.2
    assert 0 < both["divergence"] != plain["divergence"]

    # A model that is kept is not trained again.
    def train_again(*_args: Any) -> None:
        raise AssertionError("trained twice")

    monkeypatch.setattr(quantizers.ablation, "train", train_again)
    again = quantizers.Bench(settings, tmp_path).measure(quantizers.BASE, 4, 5)
    assert again["val_bpb"] == plain["val_bpb"]
    measured = {
        "data": "d", "model": "m", "steps": 3, "tokens_a_step": 128, "bits": [4.0], "calibration_batches": 2,
        "rows": rows,
    }  # fmt: skip
    lines = quantizers.tables(measured)
    names = [line.split("|")[1].strip() for line in lines[-3:]]
    assert names == ["GPTQ", "lattice E8", "trellis, steps of columns"]


def test_a_judge_scores_as_the_script_does(dataset: Path, tmp_path: Path) -> None:
    settings = settings_of(dataset)
    config = Config.from_env({**settings, "SEED": "5", "ARTIFACT_BYTES_MAX": "8000"})
    found = quantizers.trained(settings, 5, tmp_path)
    judge = quantizers.Judge(found.model, config)
    shipped, _ = quantizers.ship(found, config)
    text_bytes = int(train_gpt.token_bytes(judge.tokens, config).sum())
    scores = []
    for model in (found.model, shipped):
        ledger = train_gpt.score_roundtrip(model, judge.tokens, config, looping=False)
        scores.append(ledger.score(text_bytes).bits_per_byte)
    assert judge.float_bpb == pytest.approx(scores[0], rel=1e-6)
    assert judge.judge(shipped)["val_bpb"] == pytest.approx(scores[1], rel=1e-6)
    assert scores[0] != scores[1]
    assert judge.judge(found.model) == {"val_bpb": judge.float_bpb, "divergence": 0.0}


def test_what_is_told_beside_gptq_is_of_the_seeds_that_both_have() -> None:
    def run(seed: int, lost: float, divergence: float) -> dict[str, Any]:
        return {
            "seed": seed, "bytes": 1000, "weights": 9, "float_bpb": 2.0, "val_bpb": 2.0 + lost,
            "divergence": divergence, "passes": 2,
        }  # fmt: skip

    base = [run(1, 0.10, 0.2), run(2, 0.20, 0.4)]
    half = [run(1, 0.05, 0.1), run(2, 0.05, 0.3), run(3, 0.05, 0.3)]
    cells = [cell.strip() for cell in quantizers.row("half", half, base).split("|")]
    assert cells[1:4] == ["half", "1,000", "0.05000"]
    assert cells[4:7] == ["0.33", "-0.10000", "0.05000"], "losses: 0.1 of 0.3"
    assert cells[8:10] == ["0.625", "0.125"] and cells[-2] == "2"
    alone = [cell.strip() for cell in quantizers.row("alone", [run(9, 0.1, 0.2)], base).split("|")]
    assert alone[4:7] == ["-", "-", "-"] and alone[-2] == "0"
