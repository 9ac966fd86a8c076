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

# Ours: upstream's lines with more fields at their ends, and lines between them that are no results.
OURS = """run:runs/x
Running Python 3.11.7 PyTorch 2.13.0 on x86_64 CPU dtype:torch.float32 compile:0 threads:1
overrides: VOCAB_SIZE=1024 TRACE_STEPS=2:4
train_loader:dataset:fineweb10B_sp1024 train_shards:80
val_loader:shards pattern=data/fineweb_val_*.bin tokens:62021632 bytes:151080891
model_params:17059912
world_size:1 grad_accum_steps:8
train_batch_tokens:524288 train_seq_len:1024 iterations:30 warmup_steps:1 max_wallclock_seconds:600.000
seed:1337
train_io:prefetch:True copy_stream:False prefetch_queue:2
val_io:overlap:False prefetch:True bytecount_device:cpu tokens_per_pass:65536
warmup_step:1/1 looping:0
val_progress:training 50% partial_mean_loss:6.9000 tokens_seen:31010816 eta:3s
step:0/30 val_loss:6.8938 val_bpb:4.1927 train_time:0ms step_avg:0.22ms
timing_breakdown step:1 micro_steps:8 batch_cpu_ms:0.66 batch_h2d_ms:0.30 forward_ms:53.49 backward_ms:206.75 grad_clip_ms:0.89 optimizer_ms:18.32 val_ms:2043.36
step:1/30 train_loss:6.8992 train_time:664ms step_avg:664.00ms tok_s:1542 data_wait_ms:1.32/1.32/1.32 lr_scale:1.0000 grad_norm:0.676 eta:19s
step:30/30 train_loss:4.6400 train_time:32000ms step_avg:1066.67ms tok_s:983 data_wait_ms:0.90/2.10/2.20 lr_scale:0.1000 grad_norm:0.600 eta:0s
step:30/30 val_loss:4.6350 val_bpb:2.8189 train_time:32058ms step_avg:1068.60ms
trace:runs/x/trace_rank0.json for ui.perfetto.dev
DIAGNOSTIC post_ema val_loss:4.6622 val_bpb:2.8355 train_time:35618ms step_avg:1187.26ms
Serialized model: 68239648 bytes
val_progress:roundtrip 100% partial_mean_loss:4.6656 tokens_seen:62021632 eta:0s
final_int6_roundtrip val_loss:4.6656 val_bpb:2.8375 eval_time:4017ms
final_int6_roundtrip_exact val_loss:4.66558446 val_bpb:2.83752470 scored_tokens:62021632 val_bytes:151080891
Code size: 36000 bytes (wrapped)
Serialized model int6+rans: 5000000 bytes
Total submission size int6+rans: 5036000 bytes
"""  # noqa: E501

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
