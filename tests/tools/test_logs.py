"""Both public log dialects, ours, and the traps in them."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tools.runs.logs import decimals, parse_log

DIALECT_A = """import torch
        log0(f"step:{step}/{args.iterations} val_loss:{val_loss:.4f} val_bpb:{val_bpb:.4f}")
====================================================================================================
Running Python 3.12.3 (main) [GCC 13.3.0]
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:19:00.0 Off |                    0 |
train_loader:dataset:fineweb10B_sp1024 train_shards:80
val_loader:shards pattern=./data/fineweb_val_*.bin tokens:62021632
world_size:8 grad_accum_steps:1
train_batch_tokens:524288 train_seq_len:1024 iterations:20000 warmup_steps:20 max_wallclock_seconds:600.000
seed:1337
step:0/20000 val_loss:6.9370 val_bpb:4.1077 train_time:0ms step_avg:0.01ms
step:1/20000 train_loss:6.9334 train_time:76ms step_avg:75.51ms
step:13780/20000 val_loss:2.0606 val_bpb:1.2172 train_time:600038ms step_avg:43.54ms
stopping_early: wallclock_cap train_time:600038ms step:13780/20000
Serialized model: 67224983 bytes
Code size: 47642 bytes
Total submission size: 67272625 bytes
Serialized model int8+zlib: 15815847 bytes (payload:17178912 raw_torch:17224025 payload_ratio:3.91x)
Total submission size int8+zlib: 15863489 bytes
final_int8_zlib_roundtrip val_loss:2.0595 val_bpb:1.2197 eval_time:1401ms
final_int8_zlib_roundtrip_exact val_loss:2.05945460 val_bpb:1.21972502
"""

DIALECT_B = """Hyperparameters:
  matrix_lr: 0.026
  seed: 42
  train_batch_tokens: 786432
train_shards: 80
val_tokens: 47851520
1/20000 train_loss: 9.0087 train_time: 0.0m tok/s: 7864320
4900/20000 val_loss: 2.3539 val_bpb: 1.0756
stopping_early: wallclock_cap train_time: 599592ms step: 4945/20000
diagnostic pre-quantization post-ema val_loss:2.32848665 val_bpb:1.06395844 eval_time:6718ms
Code size (uncompressed): 157868 bytes
Code size (compressed): 31999 bytes
GPTQ:collected 67 Hessians in 4.7s
Serialized model quantized+pergroup: 15865260 bytes
Total submission size quantized+pergroup: 15897259 bytes
diagnostic quantized val_loss:2.34727563 val_bpb:1.07254371 eval_time:49995ms
quantized_ttt_phased val_loss:2.31944212 val_bpb:1.05989454 eval_time:508785ms
total_eval_time:508.8s
"""


def test_dialect_a() -> None:
    log = parse_log(DIALECT_A, Path("train.log"))
    assert (log.dialect, log.seed, log.steps, log.train_seconds) == ("A", 1337, 13780, 600.038)
    assert [point.step for point in log.validation] == [0, 13780] and len(log.train) == 1
    assert log.headline is not None
    assert (log.headline.bpb_text, log.headline.eval_seconds) == ("1.21972502", 1.401)
    assert log.code_bytes and log.model_bytes and log.total_bytes
    assert (log.code_bytes.bytes, log.model_bytes.bytes, log.total_bytes.bytes) == (47642, 15815847, 15863489)
    assert log.gpus == ["NVIDIA H100 80GB HBM3"] and log.versions["python"].value == "3.12.3"
    assert log.validation_tokens is not None and log.validation_tokens.value == "62021632"


def test_source_at_the_head_is_kept_apart_and_lines_stay_numbered() -> None:
    log = parse_log(DIALECT_A, Path("train.log"))
    assert log.source is not None and log.source.startswith("import torch")
    assert log.headline is not None
    assert DIALECT_A.splitlines()[log.headline.line - 1].startswith("final_int8_zlib_roundtrip_exact")


def test_dialect_b() -> None:
    log = parse_log(DIALECT_B, Path("train_seed42.log"))
    assert (log.dialect, log.seed, log.steps) == ("B", 42, 4945)
    assert log.settings["matrix_lr"].value == "0.026"
    assert log.train[0].time_ms == 100.0  # from tokens per second: tenths of minutes are too coarse
    assert log.headline is not None and log.headline.label == "quantized_ttt_phased"
    assert log.code_bytes is not None and log.code_bytes.bytes == 157868
    assert log.hessian_seconds is not None and log.hessian_seconds.value == "4.7"


def test_diagnostics_are_never_a_score() -> None:
    text = "\n".join(line for line in DIALECT_B.splitlines() if "ttt" not in line)
    assert parse_log(text, Path("x.log")).headline is None


def test_clock_prefix_of_a_wrapper_is_dropped() -> None:
    stamped = "\n".join(f"1776142360.539 {line}" for line in DIALECT_B.splitlines())
    log = parse_log(stamped, Path("x.log"))
    assert log.seed == 42 and log.headline is not None


@given(st.text(max_size=300))
def test_any_text_parses(text: str) -> None:
    parse_log(text, Path("x.log"))


def test_decimals() -> None:
    assert [decimals(text) for text in ("1.0810", "2", "1e-08", "0.5")] == [4, 0, 8, 1]


def test_source_with_log_lines_in_it_is_no_source() -> None:
    mangled = DIALECT_A.replace(
        "import torch\n", "import torch\nstep:3/20000 train_loss:6.1 train_time:9ms\n"
    )
    log = parse_log(mangled, Path("train.log"))
    assert log.source is None and [point.step for point in log.train] == [3, 1]
