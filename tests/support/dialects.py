"""Logs in the two dialects of the public scripts."""

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
step:0/20000 val_loss:6.9370 val_bpb:4.1085 train_time:0ms step_avg:0.01ms
step:1/20000 train_loss:6.9334 train_time:76ms step_avg:75.51ms
step:13780/20000 val_loss:2.0606 val_bpb:1.2204 train_time:600038ms step_avg:43.54ms
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
