"""Train, quantize and score a GPT under a hard budget: one file, from token shards to bits per byte.

    torchrun --standalone --nproc_per_node=8 train_gpt.py     # the 8-GPU run, with the default settings
    CONFIG=configs/cpu_demo.env python train_gpt.py           # the whole pipeline on a laptop
    EVAL_ONLY=runs/x/model.bin python train_gpt.py            # score an artifact in a fresh process
    python train_gpt.py --help                                # list every setting

A run checks its settings and data, compiles, and trains for MAX_WALLCLOCK_SECONDS. Then it quantizes the
weights into an artifact that fills ARTIFACT_BYTES_MAX together with the code, reads that file back, and
scores the weights it got. Everything it writes goes to runs/<RUN_ID>/.

A section uses only sections above it, so the file reads from top to bottom. On a first reading, start at
MODEL and continue with OPTIMIZER, SCHEDULE, TRAIN and main, then DATA, EVALUATION and QUANTIZE. Skip the
sections marked with a dash:

      SETTINGS      every setting with its default, range and meaning
    - MACHINE       rank, device and collectives of one process
      MODEL         parameters, layers, forward pass, loss
    - KERNELS       Triton kernels and attention packages, each checked before it is used
      OPTIMIZER     Parallel Muon, AdamW, moving average of the weights
      SCHEDULE      learning rate, momentum and depth recurrence over the course of a run
    - ENVIRONMENT   environment variables and CONFIG files to settings
    - RUN           process group, run directory, log
    - TIMING        step times and traces
      DATA          shards, the order of training, the loader
      EVALUATION    validation set, sliding windows, test-time training (TTT)
      QUANTIZE      GPTQ and trellis-coded quantization
    - CODER         the lossless entropy coder
    - ARTIFACT      the size budget; the model to a file and back
      TRAIN         warmup, training loop, checkpoints
      main          the whole job in order

PR and issue numbers are those of openai/parameter-golf unless another repository is named. Upstream is its
baseline script; log lines use upstream's words. Ancestors are earlier public entries that configs/pr*.env
reproduce; code that only they use says so, and a reader of the default can skip it. A visit is one execution
of a layer: with depth recurrence, some layers are visited several times in a forward pass. Targets are the
tokens to predict. Progress is the fraction of training that is over, from 0 to 1.

Shape suffixes: B rows of a batch, T positions, D model width, F MLP width, H query heads, K key/value heads
(in parameter names: all their channels), E channels of a head, V vocabulary, L layers, S skips, P parallel
layers, W gate channels, R matrix rows, C matrix columns, N anything flattened or batched; a digit is an axis
of that length. In the MLP kernel, M, N and K are the sizes of a matmul, as usual. In test-time training, P
are adapter parameters, R is their rank, I and O are input and output channels, and C the targets of a chunk.
"""

import ast
import bisect
import bz2
import contextlib
import copy
import ctypes
import difflib
import errno
import functools
import glob
import hashlib
import importlib
import inspect
import io
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import struct
import sys
import tempfile
import threading
import time
import traceback
import zipfile
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from dataclasses import Field, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from numpy.lib.stride_tricks import sliding_window_view
    from torch import Tensor, nn
except ModuleNotFoundError as error:
    sys.exit(f"error: {sys.executable} has no {error.name}; use Python 3.10 or later with requirements.txt")

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows, CPU-only installs: the PyTorch reference implementations run instead
    triton = None

Array = np.ndarray  # always on the host, whereas a Tensor may be on a GPU

# ============================================================================================================
# SETTINGS — one per line. A wrong value is an error that names the setting, before anything starts.
# ============================================================================================================


class ConfigError(ValueError):
    """A setting is unknown, malformed, out of range, or contradicts another one."""


class DataError(RuntimeError):
    """A shard or tokenizer is missing, damaged, or does not match the run, or the loader stalled."""


class ArtifactError(RuntimeError):
    """An artifact exceeds its budget, or a file is not a valid artifact."""


NO_LIMIT = 1e300  # no upper bound, except that inf and nan are still errors


def setting(
    default: Any, meaning: str, low: float = 0, high: float = NO_LIMIT, among: str = "", pattern: str = ".*"
) -> Any:
    """One setting: its default, and the meaning, with its unit, that --help prints.

    low, high: range of a number, inclusive. among: the choices, separated by spaces. pattern: regular
    expression that a text must match.
    """
    choices = "0 1" if isinstance(default, bool) else among
    metadata = {"meaning": meaning, "low": low, "high": high, "among": choices.split(), "pattern": pattern}
    return field(default=default, metadata=metadata)


Settings = TypeVar("Settings", bound="ModelSettings")
Rule = tuple[bool, str]  # whether it holds, and what it expects of which settings


@dataclass(frozen=True)
class ModelSettings:
    """The settings that define the model. The artifact stores them.

    The environment variable of a setting has its name in upper case. The class of a setting decides where it
    is stored: ModelSettings in the artifact, TrainingSettings in the checkpoint, Config in the run directory;
    each includes the class before it. A new setting in this class changes the artifact, so that only the
    script that wrote an older artifact can load it. A name without a type annotation is a constant.
    """

    # Input.
    train_seq_len: int = setting(2048, "tokens per training sequence", 1, 1 << 20)
    doc_mask: bool = setting(True, "keep attention and token shifts within a document")
    vocab_size: int = setting(8192, "tokens in the vocabulary", 4, 65_536)
    # Size.
    num_layers: int = setting(11, "layers, not counting repeats by NUM_LOOPS", 1, 256)
    model_dim: int = setting(512, "width of the residual stream", 16)
    num_heads: int = setting(8, "query heads", 1)
    num_kv_heads: int = setting(4, "key/value heads", 1)
    mlp_mult: float = setting(4.0, "width of the MLP's hidden layer / MODEL_DIM", 0.125)
    leaky_slope: float = setting(0.5, "MLP activation: LeakyReLU(slope)²; 0: ReLU²", 0, 1)
    # Positions: rotary embedding on some channels of each head. The other channels do not see positions.
    rope_base = 10_000.0
    rope_dims: int = setting(16, "channels of each head with rotary embedding; 0: all")
    rope_train_seq_len: int = setting(
        3072, "longest input, in tokens, for which RoPE has base 10,000, not a larger one; 0: TRAIN_SEQ_LEN")
    # Attention, and the scale of deep layers.
    ln_scale: bool = setting(True, "scale the normalized inputs of a layer by 1/sqrt(layer + 1)")
    qk_gain_init: float = setting(5.25, "initial value of the learned gain of each query head")
    xsa_last_n: int = setting(11, "use exclusive self-attention (XSA) in the last N layers")
    sparse_attn_gate_enabled: bool = setting(True, "gate each head by the first 12 channels of its input")
    gate_window = 12  # channels that feed this gate and the smear gate
    # Mixing with the previous token, and the skip connections of the U-Net.
    smear_gate_enabled: bool = setting(True, "mix in the previous token's embedding, gated by 12 channels")
    channel_smear_enabled: bool = setting(
        False, "mix in the previous token again, by a learned share per channel (PR #549)")
    skip_gates_enabled: bool = setting(True, "U-Net skips interpolate; 0: they add")
    # Depth recurrence: some layers run several times with the same weights (PR #1493).
    num_loops: int = setting(2, "extra passes through layers LOOP_START..LOOP_END; 0: no recurrence", 0, 16)
    loop_start: int = setting(3, "first layer of the loop")
    loop_end: int = setting(5, "last layer of the loop")
    enable_looping_at: float = setting(
        0.35, "progress at which recurrence turns on, below 1; for a run without it, set NUM_LOOPS=0")
    # Attention and MLP in parallel.
    parallel_start_layer: int = setting(8, "first layer with parallel attention and MLP; -1: none", -1)
    parallel_mode: str = setting(
        "lanes", "two residual lanes for parallel layers, or one as in GPT-J (PR #1493)", among="lanes gptj")
    # Only configs/pr549.env and pr785.env: hashed bigrams and value embeddings (PR #549).
    bigram_vocab_size: int = setting(0, "rows of a table of hashed bigrams, added to embeddings; 0: no table")
    bigram_dim: int = setting(128, "width of the bigram table, projected to MODEL_DIM", 2)
    ve_enabled: bool = setting(False, "add an embedding of each token to the values of attention")
    ve_dim: int = setting(128, "width of the value embedding, projected to all value heads", 2)
    ve_layers: str = setting("9,10", "layers with a value embedding", pattern="[0-9]{1,3}(,[0-9]{1,3})*")
    # Embedding, which is also the output head; initialization and output.
    tied_embed_init_std = 0.005  # standard deviation of the initial embedding
    matrix_init: str = setting("orthogonal", "initialization of block matrices", among="orthogonal uniform")
    # At most 60: exp(60) summed over a vocabulary stays below exp(88.7), the largest number in fp32.
    logit_softcap: float = setting(30.0, "cap logits smoothly by c·tanh(x/c); 0: no cap", 0, 60)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.model_dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        """Channels of all key heads together, and of all value heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP's hidden layer."""
        return int(self.mlp_mult * self.model_dim)

    @property
    def activation_number(self) -> float:
        """The second argument of `activation`, in the model and when fused kernels are checked."""
        return self.leaky_slope

    @property
    def rotated_dims(self) -> int:
        """Channels of a head that have rotary embedding."""
        return self.rope_dims or self.head_dim

    @property
    def value_layers(self) -> list[int]:
        """The layers that add a value embedding; none in the default."""
        return [int(layer) for layer in self.ve_layers.split(",")] if self.ve_enabled else []

    def rules(self) -> list[Rule]:
        """The rules between these settings. Each text completes the sentence "expected …"."""
        return [
            (self.model_dim % self.num_heads == 0, "MODEL_DIM to be a multiple of NUM_HEADS"),
            (self.num_heads % self.num_kv_heads == 0, "NUM_HEADS to be a multiple of NUM_KV_HEADS"),
            (self.rotated_dims % 2 == 0, "ROPE_DIMS (0: MODEL_DIM / NUM_HEADS) to be even"),
            (self.rope_dims <= self.head_dim, "ROPE_DIMS <= MODEL_DIM / NUM_HEADS"),
            (self.num_loops == 0 or self.loop_start <= self.loop_end < self.num_layers,
             "LOOP_START <= LOOP_END < NUM_LAYERS"),
            (self.num_loops == 0 or self.enable_looping_at < 1,
             "ENABLE_LOOPING_AT < 1, because scoring uses recurrence; for a run without it, set NUM_LOOPS=0"),
            (self.bigram_vocab_size != 1, "BIGRAM_VOCAB_SIZE to be 0 or at least 2"),
            (max(self.value_layers, default=0) < self.num_layers, "all VE_LAYERS < NUM_LAYERS"),
        ]

    def as_env(self, part: "type[ModelSettings] | None" = None) -> dict[str, str]:
        """Settings as strings that `from_values` reads back: all of them, or those of one class."""
        env = {}
        for spec in fields(part or type(self)):
            value = getattr(self, spec.name)
            env[spec.name.upper()] = str(int(value) if isinstance(value, bool) else value)
        return env

    @classmethod
    def before_rules(cls: type[Settings], values: Mapping[str, str]) -> Settings:
        """`from_values`, where each value is checked by itself, but not the rules between them."""
        given = {}
        for spec in fields(cls):
            name = spec.name.upper()
            if name in values:
                given[spec.name] = parse_value(name, values[name], spec)
        return cls(**given)

    @classmethod
    def from_values(cls: type[Settings], values: Mapping[str, str]) -> Settings:
        """The settings of this class: defaults, overridden by `values`. ConfigError if one is wrong."""
        settings = cls.before_rules(values)
        # The message shows the value of each setting that the rule names.
        for holds, expected in settings.rules():
            if not holds:
                named = re.findall(r"[A-Z_]{2,}", expected)
                got = [f"{name}={value}" for name, value in settings.as_env().items() if name in named]
                raise ConfigError(f"expected {expected}; got {', '.join(got)}")
        return settings


@dataclass(frozen=True)
class TrainingSettings(ModelSettings):
    """The settings that decide the trained weights. A checkpoint stores them, so a resumed run keeps them."""

    # Data order, batch size, and length of the run.
    seed: int = setting(1337, "seed of the initial weights and of the data order", 0, 2**63 - 1)
    train_batch_tokens: int = setting(786_432, "tokens per optimizer step, over all ranks", 1)
    shuffle: bool = setting(True, "permute shards and sequences by SEED; 0: file order")
    iterations: int = setting(20_000, "maximum number of training steps; 0: no training")
    max_wallclock_seconds: float = setting(
        600.0, "time limit of training in seconds, Hessians included; 0: none, only ITERATIONS")
    # Learning rates of the parameter groups.
    matrix_lr: float = setting(0.028, "learning rate of block matrices (Muon)")
    scalar_lr: float = setting(0.02, "learning rate of small tensors (AdamW)")
    tied_embed_lr: float = setting(0.03, "learning rate of embeddings (AdamW)")
    # Muon, for block matrices.
    muon_momentum: float = setting(0.97, "momentum of Muon after its warmup", 0, 0.9999)
    muon_momentum_warmup_start: float = setting(0.92, "momentum of Muon at the first step", 0, 0.9999)
    muon_momentum_warmup_frac: float = setting(0.3, "progress over which the momentum rises", 0, 1)
    muon_momentum_warmup_steps: int = setting(
        -1, "the same in steps; 0: no warmup; -1: use MUON_MOMENTUM_WARMUP_FRAC", -1)
    muon_backend_steps: int = setting(5, "Newton-Schulz iterations per update", 1, 20)
    muon_polar_express: bool = setting(True, "Polar Express coefficients; 0: one fixed quintic")
    muon_row_normalize: bool = setting(True, "normalize the rows of an update before orthogonalizing it")
    # Weight decay, and AdamW for everything else.
    muon_wd: float = setting(0.095, "decoupled weight decay of block matrices")
    embed_wd: float = setting(0.085, "decoupled weight decay of embeddings")
    adam_wd: float = setting(0.02, "decoupled weight decay of small tensors")
    beta1: float = setting(0.9, "β1 of AdamW", 0, 0.9999)
    beta2: float = setting(0.99, "β2 of AdamW", 0, 0.99999)
    adam_eps = 1e-8
    # All parameters.
    grad_clip_norm: float = setting(0.3, "clip the global gradient norm to this; 0: no clipping")
    ema_decay: float = setting(0.9965, "decay per step of the weight average (EMA); 0: none", 0, 0.99999)
    # Learning rate schedule: constant, then linear warmdown.
    warmdown_frac: float = setting(0.85, "final fraction of training in which learning rates fall", 0, 1)
    warmdown_iters: int = setting(
        -1, "the same in steps, at the average step time; 0: none; -1: use WARMDOWN_FRAC", -1)
    min_lr: float = setting(0.1, "lowest learning rate, as a fraction of the full one", 0, 1)


@dataclass(frozen=True)
class Config(TrainingSettings):
    """All settings. The defaults are those of the 8-GPU run."""

    # --- artifact ---
    artifact_bytes_max: int = setting(16_000_000, "maximum bytes of code and artifact together", 1000)
    rate_control: bool = setting(
        True, "scale quantization steps to fill the size budget; 0: use bits and clips as given")
    # A quantization step is clip / (2^(bits - 1) - 1) standard deviations of a row. RATE_CONTROL scales all
    # steps by one factor, so the bits and clips only set the ratios of the steps, and the entropy coder
    # decides how many bits a parameter takes in the file: about 3.5 in the default run. With COLUMN_STEPS,
    # GPTQ clips at 127 steps instead.
    matrix_bits: int = setting(6, "bits per parameter of block matrices, for weights up to their clip", 2, 8)
    embed_bits: int = setting(7, "bits per parameter of embeddings, for weights up to their clip", 2, 8)
    mlp_clip_sigmas: float = setting(11.5, "clip of MLP matrices, in standard deviations of a row", 0.1)
    attn_clip_sigmas: float = setting(13.0, "clip of attention matrices, in standard deviations", 0.1)
    embed_clip_sigmas: float = setting(14.0, "clip of embeddings, in standard deviations", 0.1)
    trellis: bool = setting(True, "trellis-coded quantization: two grids half a step apart; 0: one grid")
    column_steps: float = setting(
        0.5, "exponent of the GPTQ factor in quantization steps per column; 0: one step per row", 0, 1)
    gptq: bool = setting(
        True, "quantize by GPTQ; 0: round to nearest, without Hessians, their time reserve, and COLUMN_STEPS")
    gptq_damping: float = setting(0.01, "fraction of a Hessian's mean diagonal that is added to it", 1e-6)
    gptq_calibration_batches: int = setting(64, "training micro-batches for Hessians, over all ranks", 1)
    gptq_reserve_seconds: float = setting(
        4.0, "seconds of the training time limit kept for Hessians; if too short, fewer batches are used")
    # --- evaluation ---
    eval_seq_len: int = setting(3072, "tokens of context in evaluation; 0: TRAIN_SEQ_LEN")
    eval_stride: int = setting(64, "targets scored per sliding window; 0: no sliding-window score")
    ttt_enabled: bool = setting(True, "score with test-time training (TTT), which is then the headline score")
    ttt_mode: str = setting("lora", "TTT of all weights by SGD, or of low-rank adapters", among="sgd lora")
    # TTT_MODE=sgd: all weights learn, chunk by chunk. Names and values of PR #549. Only configs/pr549.env,
    # pr785.env and pr1493.env.
    ttt_lr: float = setting(0.005, "TTT_MODE=sgd: learning rate; cosine decay over the chunks")
    ttt_epochs: int = setting(3, "TTT_MODE=sgd: passes over each scored chunk")
    ttt_momentum = 0.9
    ttt_chunk_tokens: int = setting(32_768, "TTT_MODE=sgd: targets scored between updates", 1)
    ttt_batch_seqs: int = setting(32, "TTT_MODE=sgd: sequences per SGD step, over all ranks", 1)
    ttt_grad_clip = 1.0
    # TTT_MODE=lora: each document has adapters, which learn from it chunk by chunk. Names of PR #1855, values
    # of PRs #1953 and #2008.
    ttt_lora_targets: str = setting(
        "k,o,mlp,head", "TTT_MODE=lora: modules with adapters; o and mlp: around attention and MLP",
        pattern="(q|k|v|o|mlp|head)(,(q|k|v|o|mlp|head))*")
    ttt_lora_rank: int = setting(96, "TTT_MODE=lora: rank of an adapter", 1)
    ttt_lora_alpha: float = setting(144.0, "TTT_MODE=lora: α in the scale α / TTT_LORA_RANK of outputs")
    ttt_lora_lr: float = setting(7.5e-5, "TTT_MODE=lora: learning rate of AdamW")
    ttt_beta2 = 0.99  # of AdamW for adapters; β1 is 0
    ttt_weight_decay = 0.5
    ttt_chunk_size: int = setting(48, "TTT_MODE=lora: targets of a document scored between updates", 1)
    ttt_batch_size: int = setting(
        0, "TTT_MODE=lora: documents per batch of one rank; 0: as many as a micro-batch holds")
    # --- data ---
    data_path: str = setting("data/datasets/fineweb10B_sp8192_lossless_caps_caseops_v1_reserved_fused",
                             "directory of fineweb_{train,val}_*.bin shards")
    tokenizer_path: str = setting("data/tokenizers/fineweb_8192_bpe_lossless_caps_caseops_v1_reserved.model",
                                  "SentencePiece model of these shards")
    micro_batch_tokens: int = setting(98_304, "tokens per forward pass of one rank; bounds memory", 1)
    train_prefetch: bool = setting(True, "load batches in background threads; 0: synchronously")
    train_prefetch_queue: int = setting(2, "batches loaded ahead of the current step", 1, 1024)
    train_copy_stream: bool = setting(True, "copy batches to the GPU on a separate CUDA stream")
    val_prefetch: bool = setting(True, "copy all validation tokens to the device at once; 0: batch by batch")
    val_tokens_limit: int = setting(0, "score only the first N targets: NOT comparable; 0: score all")
    # --- run ---
    run_id: str = setting("", "name of the run directory; empty: date, time and seed",
                          pattern=r"|[^./\\][^/\\]{0,199}")
    runs_dir: str = setting("runs", "directory that holds the run directories")
    max_eval_seconds: float = setting(
        600.0, "time limit of the headline score in seconds; TTT stops early to meet it; 0: none")
    warmup_steps: int = setting(
        20, "throwaway steps that compile each graph, after a rehearsal of the end of the run; 0: neither",
        0, 1000)
    train_log_every: int = setting(50, "steps between train log lines, after the first ten; 0: none")
    val_loss_every: int = setting(0, "steps between validations; 0: only one, after training")
    val_batch_size: int = setting(524_288, "8 times the tokens that a rank validates in one forward pass", 1)
    val_progress_log_every: int = setting(10, "seconds between progress lines while scoring; 0: none")
    training_timing_breakdown: bool = setting(False, "print where the time of a training step goes")
    training_timing_every: int = setting(200, "steps between timing lines, after the first ten", 1)
    trace_steps: str = setting("", "A:B traces steps A to B - 1 for ui.perfetto.dev; the first step is 1",
                               pattern="|[1-9][0-9]{0,8}:[0-9]{1,9}")
    profile_steps: str = setting("", "A:B like TRACE_STEPS, plus a trace by torch.profiler",
                                 pattern="|[1-9][0-9]{0,8}:[0-9]{1,9}")
    device: str = setting("auto", "device to run on; auto: CUDA if there is a GPU", among="auto cpu cuda")
    cpu_threads: int = setting(0, "CPU threads of torch; 0: torch's default", 0, 1024)
    compile: str = setting("auto", "use torch.compile; auto: on CUDA", among="auto 0 1")
    compute_dtype: str = setting(
        "auto", "dtype of activations; auto: bfloat16 where it is fast; float32 uses TF32 on a GPU if it can",
        among="auto float32 bfloat16")
    attention: str = setting(
        "auto", "attention kernel; auto: the first that passes its check", among="auto fa3 varlen fa2 sdpa")
    fused_mlp: str = setting(
        "auto", "Triton MLP; auto: on CUDA in bfloat16, if correct and faster", among="auto 0 1")
    fused_heads: str = setting(
        "auto", "Triton QK norm, rotary and XSA; auto: on CUDA, if correct", among="auto 0 1")
    checkpoint_every_seconds: float = setting(
        0.0, "seconds between checkpoints; 0: only on a signal and at the end of training")
    resume: str = setting("", "directory of an unfinished run to continue")
    resume_other_code: bool = setting(False, "allow RESUME with a script other than the run's (recorded)")
    save_float: bool = setting(False, "also save the weights before quantization, as final_model.pt")
    eval_only: str = setting("", "artifact to score instead of training")
    foreign_names: str = setting(
        "", "variables of other programs (A,B) to ignore, although they resemble settings",
        pattern="[A-Za-z0-9_, ]*")

    @property
    def eval_length(self) -> int:
        """Tokens of context in evaluation."""
        return self.eval_seq_len or self.train_seq_len

    @property
    def val_pass_tokens(self) -> int:
        """Tokens that one rank scores in one forward pass.

        Upstream divides VAL_BATCH_SIZE by ranks · micro-steps, which is always 8 there. This script divides
        by 8 for any number of ranks.
        """
        return max(1, self.val_batch_size // 8)

    @property
    def lora_targets(self) -> list[str]:
        """The modules that have adapters in TTT_MODE=lora."""
        return self.ttt_lora_targets.split(",")

    @property
    def lora_scale_root(self) -> float:
        """The square root of α/r, the factor of an adapter's output α/r · B A x.

        Instead of multiplying outputs, each of the two matrices absorbs one root. A is initialized, and both
        are updated by AdamW, at √(α/r) times the scale: the initial bound of A and the learning rate have
        this factor. B starts at zero.
        """
        return math.sqrt(self.ttt_lora_alpha / self.ttt_lora_rank)

    most_documents_at_once = 96

    def documents_at_once(self, longest: int) -> int:
        """How many documents of up to `longest` targets one rank trains adapters for in one batch.

        TTT_BATCH_SIZE if it is set. Otherwise as many windows of EVAL_SEQ_LEN as a micro-batch has tokens
        for; more if the documents are shorter, but at most `most_documents_at_once`, because the adapters of
        each document take memory too.
        """
        if self.ttt_batch_size:
            return self.ttt_batch_size
        rows = max(1, self.micro_batch_tokens // self.eval_length)
        short_rows = self.micro_batch_tokens // min(longest, self.eval_length)
        return max(rows, min(short_rows, self.most_documents_at_once))

    @property
    def traced_steps(self) -> range:
        """The steps of TRACE_STEPS or PROFILE_STEPS, counted from 1."""
        first, _, after = (self.trace_steps or self.profile_steps or "0:0").partition(":")
        return range(int(first), int(after))

    def rules(self) -> list[Rule]:
        """The rules between these settings."""
        ttt_mode = self.ttt_mode if self.ttt_enabled else "none"
        chunk = self.ttt_chunk_tokens
        chunk_fits = self.eval_stride > 0 and chunk % self.eval_stride == 0 and chunk >= self.eval_length
        clock = self.max_wallclock_seconds
        window = self.trace_steps or self.profile_steps
        return [
            *super().rules(),
            (self.eval_stride <= self.eval_length, "EVAL_STRIDE <= EVAL_SEQ_LEN (0: TRAIN_SEQ_LEN)"),
            (ttt_mode != "sgd" or chunk_fits,
             "for TTT_MODE=sgd: EVAL_STRIDE > 0, TTT_CHUNK_TOKENS >= EVAL_SEQ_LEN (0: TRAIN_SEQ_LEN), and "
             "TTT_CHUNK_TOKENS to be a multiple of EVAL_STRIDE"),
            (ttt_mode != "lora" or self.ttt_chunk_size <= self.eval_length,
             "for TTT_MODE=lora: TTT_CHUNK_SIZE <= EVAL_SEQ_LEN (0: TRAIN_SEQ_LEN)"),
            (not self.gptq or clock == 0 or self.gptq_reserve_seconds < clock,
             "GPTQ_RESERVE_SECONDS < MAX_WALLCLOCK_SECONDS"),
            (not self.trace_steps or not self.profile_steps, "only one of TRACE_STEPS and PROFILE_STEPS"),
            (not window or len(self.traced_steps) > 0, "TRACE_STEPS or PROFILE_STEPS as A:B with A < B"),
            (not self.resume or not self.eval_only, "only one of RESUME and EVAL_ONLY"),
        ]

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Config":
        """Defaults, overridden by the file that CONFIG names, overridden by `environ`. Raises ConfigError.

        This is the one place that uses a function defined in a later section, ENVIRONMENT.
        """
        return cls.from_values(read_settings(environ))

    def overrides(self) -> dict[str, str]:
        """The settings that differ from their defaults, as strings, sorted by name."""
        return dict(sorted(self.as_env().items() - Config().as_env().items()))


def parse_value(name: str, text: str, spec: Field[Any]) -> Any:
    """The value of one variable in the type of its field. ConfigError names the values that are expected."""
    kind: Any = type(spec.default)
    limits = spec.metadata
    choices = limits["among"]
    value: Any = text
    if choices:
        expected = " or ".join(choices)
        fits = text in choices
        value = text == "1" if kind is bool else text
    elif kind is str:
        expected = "printable text"
        fits = re.fullmatch(limits["pattern"], text) is not None
    else:
        most = "or more" if limits["high"] == NO_LIMIT else f"to {limits['high']:g}"
        expected = f"{kind.__name__} of {limits['low']:g} {most}"
        try:
            value = kind(text)
            fits = limits["low"] <= value <= limits["high"]
        except ValueError:
            fits = False
    # Printable, because config.env stores every value on one line.
    if not fits or not text.isprintable():
        way_out = "" if text else f"; unset it to get the default, {spec.default}"
        raise ConfigError(f"{name}={text!r}: expected {expected}; {limits['meaning']}{way_out}")
    return value


# ============================================================================================================
# MACHINE — one process: its rank, its device, and collectives with its peers.
# ============================================================================================================


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Machine:
    """Where this process computes, and collectives with the other ranks."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32  # of activations; bfloat16 where the hardware is fast at it
    compiled: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_name(self) -> str:
        """The name of the GPU, or the architecture and instruction set that torch uses on this CPU."""
        if self.on_gpu:
            return torch.cuda.get_device_name(self.device)
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} CPU"

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled into one graph if COMPILE asks for it. A graph break is an error.

        dynamic=False: only sizes marked as dynamic may change. The kernels take settings as constants, which
        dynamic=True would turn into variables.
        """
        if not self.compiled:
            return function
        # Torch 2.11 can fuse reductions over rows with reductions over columns, which fails with an
        # AssertionError on the looped graph. Torch 2.9 does not have this option.
        fusions = torch._inductor.config.triton
        if hasattr(fusions, "mix_order_reduction"):
            fusions.mix_order_reduction = False
        return torch.compile(function, dynamic=False, fullgraph=True)

    def wait(self) -> None:
        """Wait until the device has finished all submitted work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. Collective: all ranks must call it."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks. Collective: all ranks must call it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)


# ============================================================================================================
# MODEL — the matrices of all layers are in 3-D banks; one forward pass trains, scores and calibrates.
# ============================================================================================================

BOS_ID = 1  # begins every document, in all tokenizers of the challenge

# --- parameters: one table says how each is initialized, optimized and quantized ---


class Parameter(NamedTuple):
    """How one parameter is initialized, optimized and quantized."""

    # Row i of the first axis belongs to layer i (or to skip i, or parallel layer i). The axes of a parameter
    # that Muon optimizes are those of a bank: matrices, their rows, their columns.
    shape: tuple[int, ...]
    # Initial weights: a constant (a list fills the last axis), or normal with standard deviation `std`. Then
    # the first `random_matrices` matrices of a bank are drawn by MATRIX_INIT.
    constant: float | list[float] = 0.0
    std: float = 0.0
    random_matrices: int = 0
    # muon: MATRIX_LR and MUON_WD. scalar: SCALAR_LR and ADAM_WD. embedding: TIED_EMBED_LR and EMBED_WD, for a
    # table that is looked up by token.
    optimizer: str = "scalar"
    # attn or mlp: MATRIX_BITS and the *_CLIP_SIGMAS of that name. embed: EMBED_BITS and EMBED_CLIP_SIGMAS.
    # Empty: a small tensor, always 8 bits.
    quantize_as: str = ""
    # What its matrices multiply, by the names passed to `observe`: GPTQ rounds matrix i of a bank with the
    # Hessian (name, i). A bank with two names holds two matrices per layer, and its second half counts from 0
    # again: with 11 layers, matrix 11 + i of `qo_bank` has the Hessian ("attn_out", i). Without a name, GPTQ
    # rounds to nearest.
    inputs: tuple[str, ...] = ()


def parameter_table(c: ModelSettings) -> dict[str, Parameter]:
    """Every parameter of the model by name, in the order in which the artifact stores them.

    An entry is all it takes to initialize, optimize, quantize, store and checkpoint a parameter. Layers read
    it as `weights[name][layer]`.

    Names end in their axes, except those of banks. `qo_bank` holds all query matrices, then all output
    matrices. `kv_bank` holds all key matrices, then all value matrices. The other banks hold one matrix per
    layer. Output and down matrices write to the residual stream and start at zero.
    """
    layers = c.num_layers
    width = c.model_dim
    skips = len(visit_order(c, looping=True)) // 2
    lane_layers = sum(is_parallel(layer, "lanes", c) for layer in range(layers))
    table = {
        "token_embedding_VD": Parameter(
            (c.vocab_size, width), std=c.tied_embed_init_std,
            optimizer="embedding", quantize_as="embed", inputs=("hidden",)),
        "qo_bank": Parameter(
            (2 * layers, width, width), random_matrices=layers,
            optimizer="muon", quantize_as="attn", inputs=("attn_in", "attn_out")),
        "kv_bank": Parameter(
            (2 * layers, c.kv_dim, width), random_matrices=2 * layers,
            optimizer="muon", quantize_as="attn", inputs=("attn_in", "attn_in")),
        "mlp_up_bank": Parameter(
            (layers, c.mlp_dim, width), random_matrices=layers,
            optimizer="muon", quantize_as="mlp", inputs=("mlp_in",)),
        "mlp_down_bank": Parameter(
            (layers, width, c.mlp_dim),
            optimizer="muon", quantize_as="mlp", inputs=("mlp_hidden",)),
        "attn_scale_LD": Parameter((layers, width), 1.0),
        "mlp_scale_LD": Parameter((layers, width), 1.0),
        "resid_keep_LD": Parameter((layers, width), 1.0),
        "resid_inject_LD": Parameter((layers, width)),
        "qk_gain_LH": Parameter((layers, c.num_heads), c.qk_gain_init),
    }
    if skips:
        table["skip_weight_SD"] = Parameter((skips, width), 1.0)
        if c.skip_gates_enabled:
            table["skip_gate_SD"] = Parameter((skips, width))
    if c.sparse_attn_gate_enabled:
        table["attn_gate_LHW"] = Parameter((layers, c.num_heads, c.gate_window))
    if c.smear_gate_enabled:
        table["smear_gate_1W"] = Parameter((1, c.gate_window))
        table["smear_scale_1"] = Parameter((1,))
    table.update(ancestor_parameters(c))  # none in the default
    if lane_layers:
        # For each of the two lanes: the weights of the lane itself, of attention's output and of the MLP's.
        table["lane_mix_P23"] = Parameter((lane_layers, 2, 3), [1.1, 1.0, 1.0])
    return table


def count_parameters(c: ModelSettings) -> int:
    """The number of parameters of the model."""
    return sum(math.prod(parameter.shape) for parameter in parameter_table(c).values())


def visit_order(c: ModelSettings, looping: bool) -> list[int]:
    """The layers in the order in which they run; the first half is the encoder of the U-Net (PR #1493).

    looping: whether recurrence is on. With the default settings the order is then
    0 1 2 3 4 5 3 4 | 5 3 4 5 6 7 8 9 10, where | separates encoder and decoder.
    """
    layers = list(range(c.num_layers))
    if looping and c.num_loops > 0:  # without extra passes, LOOP_START and LOOP_END are not checked
        first = c.loop_start
        after = c.loop_end + 1
        # The loop repeats as a group: 3 4 5 3 4 5, not 3 3 4 4 5 5.
        layers = layers[:first] + layers[first:after] * (c.num_loops + 1) + layers[after:]
    return layers


def is_parallel(layer: int, mode: str, c: ModelSettings) -> bool:
    """Whether attention and MLP of a layer run in parallel, in this PARALLEL_MODE.

    lanes: each reads a residual stream of its own, called a lane (PR #1529). gptj: both read the same
    residual stream (PR #1493).
    """
    return c.parallel_mode == mode and 0 <= c.parallel_start_layer <= layer


# --- reference implementations of the parts of a layer; KERNELS has faster implementations of some ---

Operation = Callable[..., Tensor]  # any implementation of one part of a layer
RMS_NORM_EPS = 2.0**-23  # explicit, because torch's default depends on its version
XSA_MIN_SQUARE = 1e-24  # least squared length of a value, to avoid a division by zero


def rms_norm(x: Tensor, scale: float = 1.0) -> Tensor:
    """x divided by its root mean square along the last axis (arXiv 1910.07467), times `scale`."""
    normalized = F.rms_norm(x, (x.size(-1),), eps=RMS_NORM_EPS)
    return normalized if scale == 1.0 else normalized * scale


def rotary_table(length: int, c: ModelSettings, device: torch.device = CPU, longest: int = 0) -> Tensor:
    """Cosines and sines (2, T, 1, rotated/2). Inputs longer than ROPE_TRAIN_SEQ_LEN get a larger base (#549).

    longest: tokens of the longest input that shares this base, so that all of them see the same angles;
    0: `length`.
    """
    rotated = c.rotated_dims
    base = c.rope_base
    unscaled_length = c.rope_train_seq_len or c.train_seq_len
    # NTK-aware scaling: the slowest channel pair slows down by the whole stretch, so that its angles stay in
    # the range of training, and the fastest keeps its speed. Inputs up to TRAIN_SEQ_LEN share one base.
    stretch = max(longest or length, c.train_seq_len) / unscaled_length
    if stretch > 1 and rotated > 2:
        base *= stretch ** (rotated / (rotated - 2))
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64, device=device) / rotated
    # In float64, because fp32 loses digits at angles of thousands of radians.
    positions_T11 = torch.arange(length, dtype=torch.float64, device=device)[:, None, None]
    angles = positions_T11 * base ** (-exponents)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x_BTHE: Tensor, rotary: Tensor) -> Tensor:
    """Apply rotary embedding (arXiv 2104.09864) to the first channels of each head, (B, T, heads, E).

    rotary: a `rotary_table`. Channel i of the first half of the rotated channels pairs with channel i of the
    second half.
    """
    cos, sin = rotary
    half = cos.size(-1)
    a, b, rest = x_BTHE.split([half, half, x_BTHE.size(-1) - 2 * half], dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin, rest], dim=-1)


class Heads(NamedTuple):
    """The input of attention, (B, T, heads, E). Keys and values may be repeated for every query head."""

    q_BTHE: Tensor
    k_BTKE: Tensor
    v_BTKE: Tensor
    own_BTKE: Tensor  # the values, never repeated: XSA reads them


def heads_plain(qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor) -> Heads:
    """Split the projection into query, key and value heads, with QK norm and rotary embedding.

    The heads N are H query heads, then K key heads, then K value heads. After QK norm, an attention score is
    √E times a cosine; a learned gain per query head sharpens it.
    """
    key_heads = (qkv_BTNE.size(2) - len(gain_H)) // 2
    q_BTHE, k_BTKE, v_BTKE = qkv_BTNE.split([len(gain_H), key_heads, key_heads], dim=2)
    q_BTHE = rotate(rms_norm(q_BTHE), rotary) * gain_H[:, None]
    k_BTKE = rotate(rms_norm(k_BTKE), rotary)
    return Heads(q_BTHE, k_BTKE, v_BTKE, v_BTKE)


def repeat_heads(x_BTKE: Tensor, like_BTHE: Tensor) -> Tensor:
    """Keys or values, each head repeated so that there is one for every head of the other tensor."""
    if x_BTKE.size(2) == like_BTHE.size(2):
        return x_BTKE
    return x_BTKE.repeat_interleave(like_BTHE.size(2) // x_BTKE.size(2), 2)


def attention_sdpa(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Tensor | None) -> Tensor:
    """torch's attention, (B, T, H, E). mask: (B, 1, T, T), true where a query sees a key; None: causal."""
    if mask is not None and q_BTHE.is_cuda:
        # The fast kernels of torch that take a mask do not support grouped heads.
        k_BTKE = repeat_heads(k_BTKE, q_BTHE)
        v_BTKE = repeat_heads(v_BTKE, q_BTHE)
    dtype = q_BTHE.dtype
    if not q_BTHE.is_cuda and dtype == torch.bfloat16:
        # On a CPU the backward pass of torch's attention takes longer in bfloat16 than in fp32 if rows are
        # short: twice as long for the 128 tokens of configs/cpu_demo.env. From 1024 tokens on it takes less.
        q_BTHE, k_BTKE, v_BTKE = q_BTHE.float(), k_BTKE.float(), v_BTKE.float()
    y_BHTE = F.scaled_dot_product_attention(
        q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2),
        mask, is_causal=mask is None, enable_gqa=True,
    )
    return y_BHTE.transpose(1, 2).to(dtype)


def attention_documents(
    ids_BT: Tensor, starts: Tensor | None, attend: Operation, c: ModelSettings, one_a_row: bool = False
) -> Tensor | None:
    """The last argument of `attend`: a mask for torch's attention, `document_starts` for all others.

    starts: `document_starts` on the device, or None to find them here. one_a_row: each row is a single
    document, so torch's attention takes no mask.
    """
    if attend is not attention_sdpa:
        return starts_on_device(ids_BT, c) if starts is None else starts
    if one_a_row or not c.doc_mask:
        return None
    # Number the documents of a row: a query sees the keys with its own number, up to its own position.
    document_BT = (ids_BT == BOS_ID).cumsum(1)
    same_B1TT = document_BT[:, None, :, None] == document_BT[:, None, None]
    return same_B1TT.tril()


def gated(y_BTHE: Tensor, *gate: Tensor) -> Tensor:
    """Multiply each head by its gate. gate: some channels of the layer's input and their weights, or none."""
    if not gate:
        return y_BTHE
    # The factor 0.5 makes the sigmoid less steep (PR #1855).
    return y_BTHE * torch.sigmoid(0.5 * F.linear(*gate))[..., None]


def xsa_plain(y_BTHE: Tensor, v_BTKE: Tensor, *gate: Tensor) -> Tensor:
    """Exclusive self-attention (XSA; Zhai, arXiv 2603.09078; with grouped heads: PR #265), then `gated`.

    Remove from the output y of each head its component along the value v of the same token,
    (y·v / v·v) v. Sums are at least in fp32.
    """
    wide = torch.promote_types(y_BTHE.dtype, torch.float32)
    y_BTKGE = y_BTHE.unflatten(2, (v_BTKE.size(2), -1))
    v_BTK1E = v_BTKE.unsqueeze(3)
    square_BTK11 = (v_BTK1E * v_BTK1E).sum(-1, keepdim=True, dtype=wide).clamp(min=XSA_MIN_SQUARE)
    along_BTKG1 = (y_BTKGE * v_BTK1E).sum(-1, keepdim=True, dtype=wide) / square_BTK11
    rest_BTHE = (y_BTKGE - along_BTKG1 * v_BTK1E).flatten(2, 3)
    return gated(rest_BTHE, *gate).to(y_BTHE.dtype)


def activation(x: Tensor, slope: float) -> Tensor:
    """The activation of the MLP, LeakyReLU(slope)² (PR #493); slope 0 is ReLU²."""
    return F.leaky_relu(x, slope).square()


def mlp_plain(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, scale: float, slope: float) -> Tensor:
    """x_ND plus the MLP of `rms_norm(x_ND, scale)`, (N, D). The three tensors have the same dtype."""
    return x_ND + F.linear(activation(F.linear(rms_norm(x_ND, scale), up_FD), slope), down_DF)


def previous_token(x_BTD: Tensor) -> Tensor:
    """For each token, the vector of the previous token in its row; zero for the first."""
    return F.pad(x_BTD[:, :-1], (0, 0, 1, 0))


class Ops(NamedTuple):
    """The implementations that the model calls. KERNELS may replace these reference implementations."""

    attend: Operation = attention_sdpa
    mlp: Operation = mlp_plain
    heads: Callable[..., Heads] = heads_plain
    xsa: Operation = xsa_plain


# --- adapters of test-time training ---


# An adapter adds B A x to an output (LoRA, arXiv 2106.09685), with separate matrices A and B for each row of
# the batch. q, k and v adapt projections. o and mlp bypass attention and MLP as a whole, from the input of
# the branch to its output (PR #1530). head adapts the logits.
#
# Adapters of a visit that read the same x form a group: "attention" (q, k, v, o), "mlp" or "head". A group
# has one tensor with the A matrices of all its adapters side by side, and one B per adapter. All are stored
# transposed, as their gradients come out of a matmul. For rank r and TTT_LORA_TARGETS=q,v,mlp, for example,
# the adapters of a visit are
#   {"attention": (A of shape (B, D, 2r), {"q": B of shape (B, r, D), "v": B of shape (B, r, kv_dim)}),
#    "mlp": (A of shape (B, D, r), {"mlp": B of shape (B, r, D)})}
Adapters = dict[str, tuple[Tensor, dict[str, Tensor]]]


def low_rank(x_BTI: Tensor, adapters: Adapters, group: str) -> dict[str, Tensor]:
    """The output B A x, (B, T, O), of each adapter in a group, by name; empty without adapters."""
    if group not in adapters:
        return {}
    a_BIR, b_of_name = adapters[group]
    # Side by side, the A matrices of a group take one matmul, and so does the gradient of x. `bmm`, because
    # torch.compile takes longer to trace `@`, which accepts more shapes.
    inner_BTR = torch.bmm(x_BTI, a_BIR).chunk(len(b_of_name), dim=-1)
    return {name: torch.bmm(inner, b_of_name[name]) for name, inner in zip(b_of_name, inner_BTR, strict=True)}


# --- the model ---

# Parameters by name, each split along its first axis, in the dtype of the activations.
WeightRows = dict[str, tuple[Tensor, ...]]
# Called with (name, layer, x) for the input x of every matrix: calibration sums x xᵀ.
Observer = Callable[[str, int, Tensor], None]


class Context(NamedTuple):
    """Computed once per forward pass and shared by all layers. Anything derived from the ids goes here."""

    weights: WeightRows
    x0_BTD: Tensor  # the embeddings, which every layer can mix in again
    rotary: Tensor
    documents: Tensor | None  # from `attention_documents`
    observe: Observer | None
    values_BTK: Tensor | None  # value embeddings, only with VE_ENABLED (configs/pr549.env and pr785.env)


class GPT(nn.Module):
    """The model. Parameters are kept in fp32 and cast to `compute_dtype` at use."""

    def __init__(self, settings: ModelSettings, seed: int | None) -> None:
        """seed: of the initial weights; None leaves them uninitialized, to be loaded."""
        super().__init__()
        self.settings = settings
        # `ready_model` in KERNELS sets these three.
        self.machine = Machine()
        self.compute_dtype = torch.float32
        self.ops = Ops()
        # Layers read their parameters row by row; embedding tables are used whole.
        self.row_names = []
        for name, parameter in parameter_table(settings).items():
            weights = torch.empty(parameter.shape)
            if seed is not None:
                weights = initial_weights(name, parameter, settings, seed)
            self.register_parameter(name, nn.Parameter(weights))
            if parameter.optimizer != "embedding":
                self.row_names.append(name)

    def forward(
        self, inputs_BT: Tensor, starts: Tensor | None = None, looping: bool = True,
        observe: Observer | None = None, adapters: list[Adapters] | None = None, longest: int = 0
    ) -> Tensor:
        """Hidden states (B, T, D) after the last norm.

        starts: `document_starts` on the device, found here if not given. looping: run the NUM_LOOPS extra
        passes. observe: called with the inputs of all matrices, for calibration.

        The other two arguments are for test-time training; on a first reading, take `adapters` as empty.
        adapters: one entry per visit, in order; each row of the batch is then a single document.
        longest: as in `rotary_table`.
        """
        c = self.settings
        layers = visit_order(c, looping)
        weights = self._weights_by_row()
        context = Context(
            weights=weights,
            x0_BTD=self._embed(inputs_BT, weights),
            rotary=rotary_table(inputs_BT.size(1), c, inputs_BT.device, longest).to(self.compute_dtype),
            documents=attention_documents(inputs_BT, starts, self.ops.attend, c, adapters is not None),
            observe=observe,
            values_BTK=table_rows(
                self, inputs_BT, weights, "value_table_VC", "value_projection_1KC", "value_scale_1"
            ) if c.ve_enabled else None,
        )
        adapters = adapters or [{}] * len(layers)

        # A lane is a residual stream: there is one, or two from PARALLEL_START_LAYER on. The layers form a
        # U-Net: encoder visits push their first lane on a stack, decoder visits pop one, last in, first out.
        lanes = [context.x0_BTD]
        skips: list[Tensor] = []
        for visit, layer in enumerate(layers):
            # As many lanes as this layer reads: a loop can lead from a layer with two back to one with one.
            lanes = [lanes[0], lanes[-1]] if is_parallel(layer, "lanes", c) else [merge_lanes(lanes)]
            keep = weights["resid_keep_LD"][layer]
            decoder_visit = visit - len(layers) // 2  # negative in the encoder
            if decoder_visit >= 0 and skips:
                lanes[0], x = self._add_skip(lanes[0], skips.pop(), keep, decoder_visit, weights)
            else:
                x = keep * lanes[0]
            # Attention reads the first lane, scaled by `keep`, with a share of the embeddings mixed in again.
            # With one lane, x is also the residual stream from here on. Two lanes stay as they are.
            x = torch.addcmul(x, weights["resid_inject_LD"][layer], context.x0_BTD)
            lanes = self._block(layer, x, lanes, context, adapters[visit])
            if decoder_visit < 0:
                skips.append(lanes[0])

        hidden = rms_norm(merge_lanes(lanes))
        if observe is not None:
            observe("hidden", 0, hidden)
        return hidden

    def _add_skip(
        self, lane: Tensor, skip: Tensor, keep: Tensor, decoder_visit: int, weights: WeightRows
    ) -> tuple[Tensor, Tensor]:
        """The lane with a skip connection added, and `keep` times that sum, both (B, T, D).

        `keep` times the sum is computed from the inputs, not from the sum, so that the backward pass does not
        have to store the sum.
        """
        # One weight per decoder visit. When recurrence turns on, visits become more and weight i moves to
        # another pair of layers, as in PR #1493.
        skip_weight = weights["skip_weight_SD"][decoder_visit]
        if self.settings.skip_gates_enabled:  # interpolate by a learned share (PR #1493)
            share = weights["skip_gate_SD"][decoder_visit].sigmoid()
            skip_weight = (1.0 - share) * skip_weight
            x = keep * share * lane
            lane = share * lane
        else:
            x = keep * lane
        x = torch.addcmul(x, keep * skip_weight, skip)
        return torch.addcmul(lane, skip_weight, skip), x

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits (N, V) of the next token, before the softcap. The input embedding is the output head."""
        return F.linear(hidden_ND, self.get_parameter("token_embedding_VD").to(hidden_ND.dtype))

    def loss_per_token(self, hidden_ND: Tensor, targets_N: Tensor, added_NV: Tensor | None = None) -> Tensor:
        """Loss (N,) in nats of each target, at least in fp32: cross-entropy of softcap·tanh(logits/softcap).

        added_NV: the output of the head's adapter. LOGIT_SOFTCAP=0: cross-entropy of the logits themselves.
        """
        logits_NV = self.logits(hidden_ND)
        if added_NV is not None:
            logits_NV = logits_NV + added_NV
        # Sums over the vocabulary take fp32.
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        softcap = self.settings.logit_softcap
        if not softcap:
            return F.cross_entropy(logits_NV, targets_N, reduction="none")
        # tanh(x) = 2 sigmoid(2x) - 1, because tanh takes several times as long as sigmoid.
        share_NV = torch.sigmoid(2 / softcap * logits_NV)
        if not logits_NV.is_cuda:
            # On a CPU each operation is a pass over the logits. The softmax is the same without the -1.
            return F.cross_entropy(2 * softcap * share_NV, targets_N, reduction="none")
        # Bounded logits cannot overflow, so the softmax does not have to subtract the maximum first. In bits
        # rather than nats, because exp2 is faster than exp on a GPU.
        nats_of_bit = math.log(2)
        bits_NV = softcap / nats_of_bit * (2 * share_NV - 1)
        bits_N = bits_NV.exp2().sum(1).log2() + F.nll_loss(bits_NV, targets_N, reduction="none")
        return nats_of_bit * bits_N

    def loss(
        self, inputs_BT: Tensor, targets_BT: Tensor, starts: Tensor | None = None, looping: bool = True
    ) -> Tensor:
        """Mean loss of a batch in nats per token, which training minimizes."""
        hidden_BTD = self(inputs_BT, starts, looping)
        return self.loss_per_token(hidden_BTD.flatten(0, 1), targets_BT.flatten()).mean()

    def look_up(self, name: str, rows_BT: Tensor) -> Tensor:
        """Rows of an embedding table, (B, T, C), in the dtype of the activations."""
        return F.embedding(rows_BT, self.get_parameter(name)).to(self.compute_dtype)

    def _weights_by_row(self) -> WeightRows:
        """The parameters that layers read, cast and split along the first axis, once per forward pass."""
        whole: dict[str, Tensor] = {name: self.get_parameter(name) for name in self.row_names}
        queries, outputs = whole.pop("qo_bank").chunk(2)
        keys, values = whole.pop("kv_bank").chunk(2)
        # One matmul for queries, keys and values reads the activations once, and so do its gradients.
        whole["qkv"] = torch.cat([queries, keys, values], dim=1)
        # Scaling the rows of a matrix gives the same output as scaling activations, with fewer operations.
        whole["attn_out"] = whole.pop("attn_scale_LD")[:, :, None] * outputs
        whole["mlp_down"] = whole.pop("mlp_scale_LD")[:, :, None] * whole.pop("mlp_down_bank")
        if "attn_gate_LHW" in whole:
            # GPU matmuls work on groups of eight channels: pad the gate with zero weights to a multiple.
            gates_LHW = whole.pop("attn_gate_LHW")
            more = min(-gates_LHW.size(2) % 8, self.settings.model_dim - gates_LHW.size(2))
            whole["attn_gate"] = F.pad(gates_LHW, (0, more))
        return {name: weights.to(self.compute_dtype).unbind(0) for name, weights in whole.items()}

    def _embed(self, inputs_BT: Tensor, weights: WeightRows) -> Tensor:
        """Normalized embeddings (B, T, D), each mixed with the previous token's."""
        c = self.settings
        x = self.look_up("token_embedding_VD", inputs_BT)
        if c.bigram_vocab_size:  # only configs/pr549.env and pr785.env
            x = x + table_rows(
                self, bigram_rows(inputs_BT, c), weights,
                "bigram_table_RC", "bigram_projection_1DC", "bigram_scale_1")
        if c.smear_gate_enabled:
            gate_BT = torch.sigmoid(x[..., : c.gate_window] @ weights["smear_gate_1W"][0])
            # Nothing crosses the start of a document (PR #1851). Closing the gate is cheaper than zeroing the
            # previous token's vector.
            if c.doc_mask:
                gate_BT = gate_BT.masked_fill(inputs_BT == BOS_ID, 0.0)
            gate_BT = gate_BT * weights["smear_scale_1"][0]
            x = torch.addcmul(x, gate_BT[..., None], previous_token(x))
        x = rms_norm(x)
        if c.channel_smear_enabled:  # only configs/pr549.env and pr785.env
            x = channel_smear(x, inputs_BT, weights, c)
        return x

    def _block(
        self, layer: int, x: Tensor, lanes: list[Tensor], context: Context, adapters: Adapters
    ) -> list[Tensor]:
        """One visit of a layer: its new lanes, one or, from PARALLEL_START_LAYER on, two (PR #1529).

        x: the input of attention, (B, T, D). lanes: one or two residual streams, (B, T, D) each.
        """
        c = self.settings
        scale = (layer + 1) ** -0.5 if c.ln_scale else 1.0
        gptj = is_parallel(layer, "gptj", c)  # only configs/pr1493.env

        attn_out = self._attention(layer, rms_norm(x, scale), context, adapters)

        # The MLP reads the second lane if there is one, otherwise the residual stream after attention.
        if len(lanes) == 2:
            mlp_in = lanes[1]
        elif gptj:
            mlp_in = x
        else:
            mlp_in = x + attn_out
        mlp_sum = self._mlp(layer, mlp_in, scale, context, adapters)

        if gptj:
            return [mlp_sum + attn_out]
        if len(lanes) == 1:
            return [mlp_sum]
        # Each lane is a learned combination of itself and the two outputs.
        mixed = []
        mlp_out = mlp_sum - mlp_in
        mix_23 = context.weights["lane_mix_P23"][layer - c.parallel_start_layer]
        for lane, (keep, from_attention, from_mlp) in zip(lanes, mix_23, strict=True):
            mixed.append(keep * lane + from_attention * attn_out + from_mlp * mlp_out)
        return mixed

    def _attention(self, layer: int, x_BTD: Tensor, context: Context, adapters: Adapters) -> Tensor:
        """The output of attention for its normalized input, both (B, T, D)."""
        c = self.settings
        w = context.weights
        qkv_BTR = F.linear(x_BTD, w["qkv"][layer])
        added = low_rank(x_BTD, adapters, "attention")
        before = 0
        for name, width in (("q", c.model_dim), ("k", c.kv_dim), ("v", c.kv_dim)):
            if name in added:
                # Padded with zeros: if qkv were split and joined again, its gradient would be copied.
                qkv_BTR = qkv_BTR + F.pad(added[name], (before, qkv_BTR.size(-1) - before - width))
            before += width
        qkv_BTNE = qkv_BTR.unflatten(-1, (-1, c.head_dim))
        heads = self.ops.heads(qkv_BTNE, w["qk_gain_LH"][layer], context.rotary)
        if context.values_BTK is not None and layer in c.value_layers:  # only configs/pr549.env and pr785.env
            scale = w["value_layer_scale_N"][c.value_layers.index(layer)]
            v_BTKE = heads.own_BTKE + (scale * context.values_BTK).unflatten(-1, (c.num_kv_heads, -1))
            heads = Heads(heads.q_BTHE, heads.k_BTKE, repeat_heads(v_BTKE, heads.k_BTKE), v_BTKE)
        y_BTHE = self.ops.attend(heads.q_BTHE, heads.k_BTKE, heads.v_BTKE, context.documents)

        gate = []
        if c.sparse_attn_gate_enabled:
            gate_HW = w["attn_gate"][layer]
            gate = [x_BTD[..., : gate_HW.size(1)], gate_HW]
        if layer >= c.num_layers - c.xsa_last_n:
            y_BTHE = self.ops.xsa(y_BTHE, heads.own_BTKE, *gate)
        else:
            y_BTHE = gated(y_BTHE, *gate)

        y_BTD = y_BTHE.flatten(2)
        if context.observe is not None:
            context.observe("attn_in", layer, x_BTD)
            context.observe("attn_out", layer, y_BTD)
        out_BTD = F.linear(y_BTD, w["attn_out"][layer])
        return out_BTD + added["o"] if "o" in added else out_BTD

    def _mlp(
        self, layer: int, x_BTD: Tensor, scale: float, context: Context, adapters: Adapters
    ) -> Tensor:
        """x plus the MLP of its norm, (B, T, D). Adapters and calibration read x after the norm."""
        slope = self.settings.activation_number
        up_FD = context.weights["mlp_up_bank"][layer]
        down_DF = context.weights["mlp_down"][layer]
        y_BTD = self.ops.mlp(x_BTD.flatten(0, 1), up_FD, down_DF, scale, slope).view_as(x_BTD)
        if context.observe is not None or "mlp" in adapters:
            x_BTD = rms_norm(x_BTD, scale)
        if context.observe is not None:
            # A fused kernel does not return its hidden values, so calibration computes them again.
            context.observe("mlp_in", layer, x_BTD)
            context.observe("mlp_hidden", layer, activation(F.linear(x_BTD, up_FD), slope))
        added = low_rank(x_BTD, adapters, "mlp")
        return y_BTD + added["mlp"] if added else y_BTD


def merge_lanes(lanes: list[Tensor]) -> Tensor:
    """The mean of one or two lanes."""
    if len(lanes) == 1:
        return lanes[0]
    return (lanes[0] + lanes[1]) / 2


def build_model(config: Config) -> GPT:
    """The model of a run with its initial weights, on the CPU.

    It gets only the settings that the artifact stores: a model that reads any other setting fails at its
    first step, not after training, when the artifact is loaded.
    """
    # With several threads, the QR factorizations of orthogonal matrices would round differently for each
    # number of threads, and take many times as long.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return GPT(ModelSettings.from_values(config.as_env()), config.seed)
    finally:
        torch.set_num_threads(threads)


# --- initial weights ---


def generator_of(text: str) -> torch.Generator:
    """A random generator seeded by a text. CRC-32 makes the seed the same on every machine."""
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


def initial_weights(name: str, parameter: Parameter, c: ModelSettings, seed: int) -> Tensor:
    """The initial weights of a parameter. They depend only on the seed and the name of the parameter.

    So a new parameter does not change the initial weights of the others.
    """
    generator = generator_of(f"{seed} {name}")
    weights = torch.empty(parameter.shape).copy_(torch.tensor(parameter.constant))
    if parameter.std:
        weights.normal_(0.0, parameter.std, generator=generator)
    for matrix in weights[: parameter.random_matrices]:
        if c.matrix_init == "orthogonal":
            nn.init.orthogonal_(matrix, generator=generator)
        else:  # the default of nn.Linear: uniform within ±1 / sqrt(inputs)
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
    return weights


# --- where documents begin, on the host and on the device ---


def document_starts(inputs_BT: Array, c: ModelSettings) -> Array:
    """The cu_seqlens of varlen attention: where sequences begin in the flattened inputs, and B·T; int32.

    A sequence is a row or, with DOC_MASK, a document within a row.
    """
    begins_BT = (inputs_BT == BOS_ID) & c.doc_mask
    # Every row begins a sequence, but only one if it begins with BOS: no sequence is empty.
    begins_BT[:, 0] = True
    return np.append(np.flatnonzero(begins_BT), inputs_BT.size).astype(np.int32)


def to_device(array: Array, device: torch.device) -> Tensor:
    """The array as a tensor on the device. The host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def starts_to_device(host_starts: Array, device: torch.device) -> Tensor:
    """The `document_starts` of a batch as a tensor on the device, for compiled code."""
    starts = to_device(host_starts, device)
    torch._dynamo.mark_dynamic(starts, 0)  # otherwise every number of documents compiles a new graph
    return starts


def starts_on_device(ids_BT: Tensor, c: ModelSettings) -> Tensor:
    """The `document_starts` of ids that are on a device. Not for compiled code: it waits for the device."""
    return starts_to_device(document_starts(ids_BT.cpu().numpy(), c), ids_BT.device)


# --- ancestors only, none of it in the default ---
#
# Hashed bigrams, value embeddings and channel smear: configs/pr549.env and pr785.env.


def ancestor_parameters(c: ModelSettings) -> dict[str, Parameter]:
    """Tables with a row per token or per hash of two tokens, each with a scale.

    A matrix projects rows that are not as wide as the embeddings or values that they are added to.
    """
    table = {}
    if c.channel_smear_enabled:
        table["channel_smear_1D"] = Parameter((1, c.model_dim))
    if c.bigram_vocab_size:
        table["bigram_table_RC"] = Parameter(
            (c.bigram_vocab_size, c.bigram_dim), optimizer="embedding", quantize_as="embed")
        if c.bigram_dim != c.model_dim:
            table["bigram_projection_1DC"] = Parameter((1, c.model_dim, c.bigram_dim), random_matrices=1)
        table["bigram_scale_1"] = Parameter((1,), 0.05)
    if c.ve_enabled:
        table["value_table_VC"] = Parameter(
            (c.vocab_size, c.ve_dim), std=0.01, optimizer="embedding", quantize_as="embed")
        if c.ve_dim != c.kv_dim:
            table["value_projection_1KC"] = Parameter((1, c.kv_dim, c.ve_dim), random_matrices=1)
        table["value_scale_1"] = Parameter((1,), 0.1)
        table["value_layer_scale_N"] = Parameter((len(c.value_layers),), 1.0)
    return table


def bigram_rows(inputs_BT: Tensor, c: ModelSettings) -> Tensor:
    """Rows (B, T) of the bigram table: a hash of each token and the previous one (PR #549).

    The first token of a row and, with DOC_MASK, of a document has no previous token: it gets the last row.
    """
    last_row = c.bigram_vocab_size - 1
    ids_BT = inputs_BT.int()  # int32, so that the products below wrap around
    hashed = torch.bitwise_xor(36_313 * ids_BT[:, 1:], 27_191 * ids_BT[:, :-1]) % last_row
    rows_BT = F.pad(hashed, (1, 0), value=last_row)
    if c.doc_mask:
        rows_BT = rows_BT.masked_fill(inputs_BT == BOS_ID, last_row)
    return rows_BT


def table_rows(
    model: GPT, rows_BT: Tensor, weights: WeightRows, table: str, projection: str, scale: str
) -> Tensor:
    """Rows of a table, projected to the width at which they are used if the table is narrower; scaled."""
    values = model.look_up(table, rows_BT)
    if projection in weights:
        values = F.linear(values, weights[projection][0])
    return values * weights[scale][0]


def channel_smear(x_BTD: Tensor, inputs_BT: Tensor, weights: WeightRows, c: ModelSettings) -> Tensor:
    """Mix a learned share of the previous token into each channel (PR #549)."""
    previous = previous_token(x_BTD)
    # The first token of a document is mixed with zero.
    if c.doc_mask:
        previous = previous.masked_fill((inputs_BT == BOS_ID)[..., None], 0.0)
    share_D = weights["channel_smear_1D"][0].sigmoid()
    return (1 - share_D) * x_BTD + share_D * previous


# ============================================================================================================
# KERNELS — faster implementations for `Ops`, each checked against its reference implementation before a run.
# ============================================================================================================
# New to Triton? A program is one thread block, and `tl.program_id` is its number. It works on whole tiles,
# small rectangles of a tensor; a descriptor loads or stores one and masks the edges. `tl.constexpr` arguments
# are compiled in, so every combination of them is a kernel of its own. `xsa_kernel` is the easiest to start
# with.
#
# One kernel computes four of the MLP's six matmuls; the gradients of the weights are torch's. A program loops
# over tiles of the output, and finishes each tile with an epilogue on the result Z of the matmul. The columns
# are named as the kernel's arguments:
#
#   MATMUL  Z = a · weight  factors  given  epilogue                  out  more
#   "up"    x · upᵀ         norm     -      phi(P), P = norm · Z      act  -
#   "down"  act · downᵀ     -        x      Z + given                 y    -
#   "d_up"  d_y · down      norm     act    norm · Z · phi'(P)        d_up along, one sum per row (written)
#   "d_x"   d_up · up       along    x      Z + along · given + more  d_x  d_y (read)
#
# P is always that of the forward pass.
# phi is `activation`. Its derivative needs only the root of phi(P) and the sign of P. So P itself is never
# stored: its sign is the lowest bit of act. In bfloat16 that is more exact than phi of a rounded P.

# Tile sizes by the shared memory that a block may use. The first was the fastest of those tried on an H100.
# The other two were only compiled, for an A100 and for GPUs with 99 KB.
MLP_TILES = {
    227 << 10: dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=3),
    160 << 10: dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3),
    0: dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=2),
}

if triton is not None:

    @triton.jit
    def mlp_kernel(  # type: ignore[no-untyped-def]
        a, weight, factors, given, out, more, M, N, K, scale, slope,
        MATMUL: tl.constexpr, UNIT: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ):
        # a (M, K); weight (N, K), in the backward pass (K, N); factors (M,); given, out (M, N); more (M,) and
        # fp32 in "d_up", (M, N) in "d_x".
        # UNIT: the lowest mantissa bit of the output's dtype, as a bit of an fp32 number.
        # Descriptors use TMA on Hopper and later; on older GPUs the compiler turns them into masked pointers.
        BACKWARD: tl.constexpr = MATMUL == "d_up" or MATMUL == "d_x"
        HALF_N: tl.constexpr = BLOCK_N // 2  # the epilogue handles half a tile at a time, to halve its memory
        a_tiles = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
        if BACKWARD:  # the backward pass multiplies by the weights, the forward pass by their transpose
            weight_tiles = tl.make_tensor_descriptor(weight, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
        else:
            weight_tiles = tl.make_tensor_descriptor(weight, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
        given_tiles = tl.make_tensor_descriptor(given, [M, N], [N, 1], [BLOCK_M, HALF_N])
        out_tiles = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BLOCK_M, HALF_N])
        tiles_across = tl.cdiv(N, BLOCK_N)
        tiles = tl.cdiv(M, BLOCK_M) * tiles_across

        # flatten=True lets the loads of a program's next tile overlap the epilogue of this one.
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            row = tile // tiles_across * BLOCK_M
            column = tile % tiles_across * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(0, K, BLOCK_K):
                a_tile = a_tiles.load([row, k])
                if BACKWARD:
                    weight_tile = weight_tiles.load([k, column])
                else:
                    weight_tile = weight_tiles.load([column, k]).T
                acc = tl.dot(a_tile, weight_tile, acc, input_precision="ieee")
            rows = row + tl.arange(0, BLOCK_M)
            if factors is not None:
                factor = tl.load(factors + rows, rows < M, 0.0)[:, None]
            halves = tl.split(acc.reshape(BLOCK_M, 2, HALF_N).permute(0, 2, 1))

            for half in tl.static_range(2):
                corner = [row, column + half * HALF_N]
                value = halves[half]
                if MATMUL == "up":
                    value *= factor
                    leaky = tl.where(value > 0, value, slope * value)
                    bits = (leaky * leaky).to(tl.int32, bitcast=True)
                    # Round to the nearest number whose lowest bit is 0, or 1 where P is negative.
                    bits = tl.where(value < 0, (bits & (-2 * UNIT)) | UNIT, (bits + UNIT) & (-2 * UNIT))
                    value = bits.to(tl.float32, bitcast=True)
                elif MATMUL == "down":
                    value += given_tiles.load(corner).to(tl.float32)
                elif MATMUL == "d_up":
                    act = given_tiles.load(corner).to(tl.float32)
                    value *= 2.0 * factor
                    # K is the model width here, over which the norm takes its mean.
                    sums = tl.sum(factor * value * act, 1) / (-K * scale * scale)
                    # Tiles add in any order, so gradients are not reproducible to the last bit.
                    tl.atomic_add(more + rows, sums, rows < M)
                    # Half of phi'(P) is the root of act, times -slope where P is negative.
                    was_negative = act.to(tl.int32, bitcast=True) & UNIT != 0
                    value *= act * tl.rsqrt(tl.maximum(act, 1e-30))
                    value = tl.where(was_negative, -tl.abs(slope) * value, value)
                else:
                    value += factor * given_tiles.load(corner).to(tl.float32)
                    # By addresses, because a third descriptor of Triton 3.5 would exceed the shared memory of
                    # Hopper. Addresses right of the last column are in the next row; nothing stores those.
                    there = rows[:, None] * N + corner[1] + tl.arange(0, HALF_N)
                    value += tl.load(more + there, there < M * N, 0.0)
                out_tiles.store(corner, value.to(out.dtype.element_ty))

    @triton.jit
    def heads_kernel(  # type: ignore[no-untyped-def]
        qkv, gain, rotary, q, k, v, own_v, d_qkv, d_gain, tokens, T, eps,
        BACKWARD: tl.constexpr, H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    ):
        # A program handles one head of BLOCK_N tokens. The forward pass reads qkv and writes q, k and v, with
        # each key and value head repeated for every query head of its group. The backward pass reads the
        # gradients from q, k, v and own_v, and writes those of qkv and, summed over its tokens, of the gain.
        # Arithmetic is in fp32, because one operand is and Triton promotes the other.
        head = tl.program_id(1)
        row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        channel = tl.arange(0, BLOCK_E)[None, :]
        inside = (row < tokens) & (channel < E)
        here = (row * (H + 2 * K) + head) * E + channel
        GROUPS: tl.constexpr = H // K

        if head >= H + K:  # values: copied for each query head of the group; their gradients add up
            there = (row * H + (head - H - K) * GROUPS) * E + channel
            if BACKWARD:
                d_x = tl.load(own_v + (row * K + head - H - K) * E + channel, inside, 0.0).to(tl.float32)
                for group in tl.static_range(GROUPS):
                    d_x += tl.load(v + there + group * E, inside, 0.0)
                tl.store(d_qkv + here, d_x, inside)
            else:
                value = tl.load(qkv + here, inside, 0.0)
                for group in tl.static_range(GROUPS):
                    tl.store(v + there + group * E, value, inside)
        else:
            # Where this head is in q or k. In k, a key head is repeated for each query head of its group.
            if head < H:
                own = q + (row * H + head) * E
            else:
                own = k + (row * H + (head - H) * GROUPS) * E
            # 1 / RMS of each row, and the gain of the head, which is 1 for keys.
            x = tl.load(qkv + here, inside, 0.0).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(x * x, 1) / E + eps)
            head_gain = tl.load(gain + head, head < H, 1.0)
            scale = (inverse * head_gain)[:, None]
            # The partner of each rotated channel, and the angle at this position. Other channels pass.
            turned = inside & (channel < 2 * HALF)
            first = channel < HALF
            partner = tl.where(first, channel + HALF, channel - HALF)
            angle = (row % T) * HALF + channel % HALF
            cos = tl.load(rotary + angle, turned, 1.0).to(tl.float32)
            sin = tl.load(rotary + T * HALF + angle, turned, 0.0).to(tl.float32)
            sin = tl.where(first, sin, -sin)
            if BACKWARD:
                d_out = tl.load(own + channel, inside, 0.0).to(tl.float32)
                d_partner = tl.load(own + partner, turned, 0.0).to(tl.float32)
                if head >= H:
                    for group in tl.static_range(1, GROUPS):
                        d_out += tl.load(own + group * E + channel, inside, 0.0)
                        d_partner += tl.load(own + group * E + partner, turned, 0.0)
                d = d_out * cos - d_partner * sin
                along = tl.sum(d * x, 1)
                d_x = scale * (d - x * (inverse * inverse * along / E)[:, None])
                tl.store(d_qkv + here, d_x, inside)
                if head < H:
                    tl.store(d_gain + head * tl.num_programs(0) + tl.program_id(0), tl.sum(along * inverse))
            else:
                x_partner = tl.load(qkv + here - channel + partner, turned, 0.0).to(tl.float32)
                out = (x * cos + x_partner * sin) * scale
                tl.store(own + channel, out, inside)
                if head >= H:
                    for group in tl.static_range(1, GROUPS):
                        tl.store(own + group * E + channel, out, inside)

    @triton.jit
    def xsa_kernel(  # type: ignore[no-untyped-def]
        y, v, gate, out, d_out, d_y, d_v, d_gate, tokens, v_stride, min_square, BACKWARD: tl.constexpr,
        K: tl.constexpr, GROUPS: tl.constexpr, E: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    ):
        # A program handles one key head of BLOCK_N tokens, with all query heads of its group.
        key_head = tl.program_id(1)
        token = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        channel = tl.arange(0, BLOCK_E)[None, :]
        exists = token < tokens
        inside = exists[:, None] & (channel < E)
        own = tl.load(v + token[:, None] * v_stride + key_head * E + channel, inside, 0.0).to(tl.float32)
        square = tl.maximum(tl.sum(own * own, 1), min_square)
        d_own = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
        for group in tl.static_range(GROUPS):
            head = token * (K * GROUPS) + key_head * GROUPS + group
            here = head[:, None] * E + channel
            value = tl.load(y + here, inside, 0.0)
            opened = tl.load(gate + head, exists, 0.0)[:, None]
            share = (tl.sum(value * own, 1) / square)[:, None]
            rest = value - share * own
            if BACKWARD:
                d = tl.load(d_out + here, inside, 0.0).to(tl.float32)
                tl.store(d_gate + head, tl.sum(d * rest, 1), exists)
                d = d * opened
                along = (tl.sum(d * own, 1) / square)[:, None]
                tl.store(d_y + here, d - along * own, inside)
                d_own -= share * d + along * (rest - share * own)
            else:
                tl.store(out + here, opened * rest, inside)
        if BACKWARD:
            there = (token[:, None] * K + key_head) * E + channel
            tl.store(d_v + there, d_own, inside)


@torch.library.custom_op("train_gpt::mlp_matmul", mutates_args=())
def mlp_matmul(
    matmul: str, a_MK: Tensor, weight: Tensor, factors_M: Tensor | None, given: list[Tensor],
    scale: float, slope: float,
) -> list[Tensor]:
    """One of the four matmuls of the MLP, by the kernel: see the table at the top of this section.

    weight: up_FD or down_DF; the forward pass sums over its second axis, the backward pass over its first.
    factors_M: norm or along, fp32. given: the (M, N) tensors that the epilogue reads: x, act, or x and d_y.
    scale: of the norm before the MLP.

    Returns out (M, N), and for "d_up" also along_M. The norm of x depends on x, which adds along · x to the
    gradient of x: along is -norm / (K scale²) times the sum of norm · Z · phi'(P) P over a row.

    Raises ValueError if a row is not a multiple of 16 bytes or a tensor does not begin at one, as TMA needs.
    """
    device = a_MK.device
    results = mlp_matmul_shapes(matmul, a_MK, weight, factors_M, given)
    out = results[0]
    a, weight, *given = [tensor.contiguous() for tensor in (a_MK, weight, *given)]
    for operand in (a, weight, *given, out):
        if operand.data_ptr() % 16 or operand.shape[-1] * operand.itemsize % 16:
            columns = f"{a.shape[1]} and {out.shape[1]} columns"
            raise ValueError(f"TMA expects aligned rows of a multiple of 16 bytes; got {columns}")

    # Triton stores the allocator of scratch memory for descriptors per thread, and the backward pass has a
    # thread of its own. The function refers only to `device`: both threads would keep a tensor alive.
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
    # The values for a CPU are for tests, which interpret the kernels there.
    programs = 1
    shared_bytes = max(MLP_TILES)
    if a.is_cuda:
        programs = torch.cuda.get_device_properties(device).multi_processor_count
        shared_bytes = shared_memory_bytes(device.index)
    # "up" has no `given`; its descriptor gets `out`.
    first_given = given[0] if given else out
    more = None
    if matmul == "d_up":
        more = results[1]  # along, which the kernel writes
    elif matmul == "d_x":
        more = given[1]  # d_y, which it reads
    mlp_kernel[(programs,)](
        a, weight, factors_M, first_given, out, more, *out.shape, a.shape[1], scale, slope, MATMUL=matmul,
        UNIT=int(torch.finfo(a.dtype).eps * 2**23), **mlp_tile(matmul, shared_bytes))
    return results


@functools.cache
def shared_memory_bytes(device: int) -> int:
    """The shared memory that a block of this GPU may use."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def mlp_tile(matmul: str, shared_bytes: int) -> dict[str, int]:
    """Options of the kernel for a matmul, on a GPU whose blocks may use this much shared memory."""
    fitting = max(least_bytes for least_bytes in MLP_TILES if least_bytes <= shared_bytes)
    tile = dict(MLP_TILES[fitting])
    # The epilogue of "up" reads no tile, which on Hopper leaves memory for a fourth stage.
    if matmul == "up" and fitting == max(MLP_TILES):
        tile["num_stages"] = 4
    return tile


@mlp_matmul.register_fake
def mlp_matmul_shapes(
    matmul: str, a_MK: Tensor, weight: Tensor, factors_M: Tensor | None, given: list[Tensor], *options: float
) -> list[Tensor]:
    """Outputs of `mlp_matmul` with their shapes but not their values; torch.compile traces with them."""
    columns = weight.size(0) if matmul in ("up", "down") else weight.size(1)
    # `size`, because `len` would turn a dynamic number of rows into a constant of the graph.
    results = [a_MK.new_empty(a_MK.size(0), columns)]
    if matmul == "d_up" and factors_M is not None:
        results.append(torch.zeros_like(factors_M))  # tiles add to it
    return results


class FusedMlp(torch.autograd.Function):
    """`mlp_plain` by the kernel. Normalized rows are neither written nor stored for the backward pass.

    The epilogues of the matmuls apply the factors of the norm, the activation and its derivative, and the
    gradients of the norm and the residual (PR #1530 after modded-nanogpt PR #197; storing only act follows
    modded-nanogpt PR #322).
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, scale: float, slope: float
    ) -> Tensor:
        norm_N = scale * (x_ND.float().square().mean(1) + RMS_NORM_EPS).rsqrt()
        (act_NF,) = mlp_matmul("up", x_ND, up_FD, norm_N, [], scale, slope)
        ctx.save_for_backward(x_ND, norm_N, up_FD, down_DF, act_NF)
        ctx.options = (scale, slope)
        return mlp_matmul("down", act_NF, down_DF, None, [x_ND], scale, slope)[0]

    @staticmethod
    def backward(ctx: Any, d_y_ND: Tensor) -> tuple[Any, ...]:
        x_ND, norm_N, up_FD, down_DF, act_NF = ctx.saved_tensors
        options = ctx.options
        d_up_NF, along_N = mlp_matmul("d_up", d_y_ND, down_DF, norm_N, [act_NF], *options)
        (d_x_ND,) = mlp_matmul("d_x", d_up_NF, up_FD, along_N, [x_ND, d_y_ND], *options)
        # While only adapters learn, the gradients of the matrices are unused, and the compiler drops them.
        return d_x_ND, d_up_NF.t() @ x_ND, d_y_ND.t() @ act_NF, None, None


# A function around `apply`, because Dynamo before torch 2.12 cannot trace a bound method held by the model.
def mlp_fused(*inputs: Any) -> Tensor:
    """`mlp_plain` by the kernel."""
    return FusedMlp.apply(*inputs)


# Tokens per program of the two kernels around attention. With heads of 64 channels, a thread has 16 values.
HEAD_ROWS = 32


@torch.library.custom_op("train_gpt::heads", mutates_args=())
def launch_heads(
    qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor, gradients: list[Tensor]
) -> list[Tensor]:
    """Without `gradients`: q, k and v of `heads_plain`, keys and values repeated for each query head.

    With the gradients of the four tensors in Heads: the gradients of qkv and of the gain. The gradient of the
    gain is a partial sum per program, (H, programs) in fp32.
    """
    results = heads_shapes(qkv_BTNE, gain_H, rotary, gradients)
    B, T, N, E = qkv_BTNE.shape
    H = len(gain_H)
    K = (N - H) // 2
    # The kernel's arguments q, k, v, own_v, d_qkv and d_gain. The forward pass has only the first three.
    if gradients:
        pointers = [*(gradient.contiguous() for gradient in gradients), *results]
        programs = results[1].size(1)  # the last one or two have no tokens, and write zeros
    else:
        pointers = [*results, None, None, None]
        programs = triton.cdiv(B * T, HEAD_ROWS)
    heads_kernel[(programs, N)](
        qkv_BTNE.contiguous(), gain_H.contiguous(), rotary.contiguous(), *pointers, B * T, T, RMS_NORM_EPS,
        BACKWARD=bool(gradients), H=H, K=K, E=E, HALF=rotary.size(-1),
        BLOCK_N=HEAD_ROWS, BLOCK_E=triton.next_power_of_2(E))
    return results


@launch_heads.register_fake
def heads_shapes(
    qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor, gradients: list[Tensor]
) -> list[Tensor]:
    """Outputs of `launch_heads` with their shapes but not their values."""
    B, T, _, E = qkv_BTNE.shape
    H = len(gain_H)
    if gradients:
        # At least 2, because torch.compile makes a separate graph for sizes of 1.
        programs = 2 + B * T // HEAD_ROWS
        return [qkv_BTNE.new_empty(qkv_BTNE.shape), qkv_BTNE.new_empty(H, programs, dtype=torch.float32)]
    return [qkv_BTNE.new_empty(B, T, H, E) for _ in range(3)]


class FusedHeads(torch.autograd.Function):
    """`heads_plain` in one kernel per direction."""

    @staticmethod
    def forward(ctx: Any, qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(qkv_BTNE, gain_H, rotary)
        key_heads = (qkv_BTNE.size(2) - len(gain_H)) // 2
        return *launch_heads(qkv_BTNE, gain_H, rotary, []), qkv_BTNE[:, :, -key_heads:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        qkv_BTNE, gain_H, rotary = ctx.saved_tensors
        d_qkv_BTNE, d_gain_HP = launch_heads(qkv_BTNE, gain_H, rotary, list(gradients))
        return d_qkv_BTNE, d_gain_HP.sum(1).to(gain_H.dtype), None


def heads_fused(*inputs: Tensor) -> Heads:
    """`heads_plain` by the kernel."""
    return Heads(*FusedHeads.apply(*inputs))


@torch.library.custom_op("train_gpt::xsa", mutates_args=())
def launch_xsa(
    y_BTHE: Tensor, v_BTKE: Tensor, gate_BTH: Tensor, d_out_BTHE: Tensor | None = None
) -> list[Tensor]:
    """Without `d_out_BTHE`: [the output of `xsa_plain`]. With it: the gradients of y, v and gate."""
    results = xsa_shapes(y_BTHE, v_BTKE, gate_BTH, d_out_BTHE)
    # The values are a slice of qkv. The kernel reads them there without a copy, if tokens have a constant
    # stride (otherwise `flatten` copies) and the heads of a token are contiguous.
    v_NKE = v_BTKE.flatten(0, 1)
    N, K, E = v_NKE.shape
    if v_NKE.stride()[1:] != (E, 1):
        v_NKE = v_NKE.contiguous()
    # The kernel's arguments out, d_out, d_y, d_v and d_gate.
    if d_out_BTHE is None:
        pointers = [*results, None, None, None, None]
    else:
        pointers = [None, d_out_BTHE.contiguous(), *results]
    xsa_kernel[(triton.cdiv(N, HEAD_ROWS), K)](
        y_BTHE.contiguous(), v_NKE, gate_BTH.contiguous(), *pointers, N, v_NKE.stride(0), XSA_MIN_SQUARE,
        BACKWARD=d_out_BTHE is not None, K=K, GROUPS=y_BTHE.size(2) // K, E=E,
        BLOCK_N=HEAD_ROWS, BLOCK_E=triton.next_power_of_2(E))
    return results


@launch_xsa.register_fake
def xsa_shapes(
    y_BTHE: Tensor, v_BTKE: Tensor, gate_BTH: Tensor, d_out_BTHE: Tensor | None = None
) -> list[Tensor]:
    """Outputs of `launch_xsa` with their shapes but not their values."""
    like = [y_BTHE] if d_out_BTHE is None else [y_BTHE, v_BTKE, gate_BTH]
    return [tensor.new_empty(tensor.shape) for tensor in like]


class FusedXsa(torch.autograd.Function):
    """`xsa_plain` in one kernel per direction."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return launch_xsa(*inputs)[0]

    @staticmethod
    def backward(ctx: Any, d_out_BTHE: Tensor) -> Any:
        return tuple(launch_xsa(*ctx.saved_tensors, d_out_BTHE))


def xsa_fused(y_BTHE: Tensor, v_BTKE: Tensor, *gate: Tensor) -> Tensor:
    """`xsa_plain` by the kernel."""
    if gate:
        gate_BTH = torch.sigmoid(0.5 * F.linear(*gate))  # as in `gated`
    else:
        gate_BTH = y_BTHE.new_ones(y_BTHE.shape[:-1])
    return FusedXsa.apply(y_BTHE, v_BTKE, gate_BTH)


def load_attention(name: str) -> Operation:
    """The attention implementation of this name. Raises ImportError or AttributeError if not installed."""
    if name == "sdpa":
        return attention_sdpa
    if name == "fa3":
        kernel = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
    elif name == "fa2":
        kernel = importlib.import_module("flash_attn").flash_attn_varlen_func
    else:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # Packages and versions spell causal attention differently. pack_gqa would keep FlashAttention-3 from
    # reading queries by TMA.
    spellings = {"causal": True, "is_causal": True, "window_size": (-1, 0), "pack_gqa": False}
    options = {key: spellings[key] for key in inspect.signature(kernel).parameters if key in spellings}

    def attention_varlen(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts: Tensor) -> Tensor:
        # With grouped heads, FlashAttention-3 sums the gradients of keys and values in an fp32 buffer that it
        # has to clear and convert. Repeating keys and values for each query head is faster.
        k_BTKE = repeat_heads(k_BTKE, q_BTHE)
        v_BTKE = repeat_heads(v_BTKE, q_BTHE)
        length = q_BTHE.size(1)
        # A view for the keys, because Dynamo of torch 2.13 does not accept the same tensor twice as inputs of
        # a package's autograd.Function.
        y: Any = kernel(
            q_BTHE.flatten(0, 1), k_BTKE.flatten(0, 1), v_BTKE.flatten(0, 1),
            starts, starts.view(-1), length, length, **options)
        if isinstance(y, tuple):  # some return more than the output
            y = y[0]
        return y.view_as(q_BTHE)

    return attention_varlen


# The implementations of each setting, by expected speed; the last one is the reference implementation.
IMPLEMENTATIONS = {
    "attention": ["fa3", "varlen", "fa2", "sdpa"],
    "fused_mlp": ["kernel", "plain"],
    "fused_heads": ["kernel", "plain"],
}


def implementations_to_try(setting: str, c: Config, machine: Machine) -> list[str]:
    """The implementations of a setting to try on this machine, in order. For auto, all that it can run."""
    names = IMPLEMENTATIONS[setting]
    asked = getattr(c, setting)
    if asked != "auto":
        return {"0": names[-1:], "1": names[:-1]}.get(asked, [asked])
    # In fp32 the MLP's kernel does not use TF32, which torch's matmuls do.
    if not machine.on_gpu or (setting == "fused_mlp" and machine.dtype != torch.bfloat16):
        return names[-1:]
    # Without DOC_MASK torch's attention takes no mask, and is as fast as `varlen` and `fa2`.
    if setting == "attention" and not c.doc_mask:
        return ["fa3", "sdpa"]
    return names


def with_implementation(ops: Ops, setting: str, name: str) -> Ops:
    """`ops` with this implementation of a setting. ImportError or AttributeError if it is not installed."""
    if setting == "attention":
        return ops._replace(attend=load_attention(name))
    if name == "plain":
        return ops
    if setting == "fused_mlp":
        return ops._replace(mlp=mlp_fused)
    return ops._replace(heads=heads_fused, xsa=xsa_fused)


def trial_of(setting: str, c: Config, machine: Machine) -> tuple[Operation, list[Tensor]]:
    """A function that calls the `Ops` of a setting as the model does, and random inputs for it.

    The inputs have the size of one forward pass of training. The output of function(model, *inputs) has the
    shape of inputs[0], as `both_passes` requires.
    """
    # At least one row, because EVAL_ONLY accepts settings that could not train.
    rows = min(c.micro_batch_tokens, c.train_batch_tokens // machine.world_size) // c.train_seq_len
    shape_BT = (max(1, rows), c.train_seq_len)
    normal = functools.partial(torch.randn, device=machine.device, dtype=machine.dtype)

    if setting == "attention":
        # A document begins about every 256 tokens.
        ids_BT = (torch.rand(shape_BT, device=machine.device) < 1 / 256).long() * BOS_ID
        starts = starts_on_device(ids_BT, c)

        def attend(model: GPT, *qkv: Tensor) -> Tensor:
            rows, length = qkv[0].shape[:2]
            documents = attention_documents(ids_BT[:rows, :length], starts, model.ops.attend, c)
            return model.ops.attend(*qkv, documents)

        heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        return attend, [normal(*shape_BT, count, c.head_dim) for count in heads]

    if setting == "fused_mlp":

        def mlp(model: GPT, *tensors: Tensor) -> Tensor:
            return model.ops.mlp(*tensors, 0.5, c.activation_number)

        # Scaled so that the MLP's part of the output is as large as the residual, and both are compared.
        x_ND = normal(math.prod(shape_BT), c.model_dim)
        up_FD = normal(c.mlp_dim, c.model_dim) * (2 / math.sqrt(c.model_dim))
        down_DF = normal(c.model_dim, c.mlp_dim) / math.sqrt(c.mlp_dim)
        return mlp, [x_ND, up_FD, down_DF]

    rotary = rotary_table(c.train_seq_len, c, machine.device).to(machine.dtype)

    def around_attention(model: GPT, wide_BTNE: Tensor, gain_H: Tensor, *gate: Tensor) -> Tensor:
        # The output has 3 H heads: queries, repeated keys, repeated values. So does the input, although only
        # H + 2 K of them are read.
        qkv_BTNE = wide_BTNE[:, :, : c.num_heads + 2 * c.num_kv_heads]
        q_BTHE, k_BTKE, v_BTKE, own_BTKE = model.ops.heads(qkv_BTNE, gain_H, rotary)
        # XSA takes the queries, in place of the output of attention.
        y_BTHE = model.ops.xsa(q_BTHE, own_BTKE, *gate)
        return torch.cat([y_BTHE, repeat_heads(k_BTKE, q_BTHE), repeat_heads(v_BTKE, q_BTHE)], dim=2)

    inputs = [normal(*shape_BT, 3 * c.num_heads, c.head_dim), normal(c.num_heads)]
    if c.sparse_attn_gate_enabled:
        inputs += [normal(*shape_BT, c.gate_window), normal(c.num_heads, c.gate_window)]
    return around_attention, inputs


def both_passes(run: Operation, model: GPT, inputs: list[Tensor]) -> list[Tensor]:
    """The output of run(model, *inputs), then the gradient of each input.

    The backward pass starts from some gradient of the output: any will do, so it is inputs[0].
    """
    out, gradients = torch.autograd.functional.vjp(functools.partial(run, model), tuple(inputs), inputs[0])
    return [out, *gradients]


def largest_error(results: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of any result, relative to the largest expected value; infinite if not a number.

    expected: may have only the first rows and tokens of each result, which are then compared alone.
    """
    errors = []
    for found, wanted in zip(results, expected, strict=True):
        found = found[tuple(slice(size) for size in wanted.shape)]
        error = ((found - wanted).abs().max() / wanted.abs().max()).item()
        errors.append(error if math.isfinite(error) else math.inf)
    return max(errors)


MAX_RELATIVE_ERROR = 0.03  # bfloat16 has 8 bits of precision, and errors add up along a row
# Attention is compared on this many tokens of a row: the reference takes memory quadratic in their number.
ATTENTION_CHECK_TOKENS = 2048


class ChosenOps(NamedTuple):
    """The implementations of a run, chosen once for training and evaluation."""

    ops: Ops
    report: list[str]  # lines for the log: the chosen implementations, and what became of the others


def choose_implementation(setting: str, ops: Ops, c: Config, machine: Machine) -> ChosenOps:
    """`ops` with an implementation of a setting that is installed, compiles, and is correct on all ranks.

    Attention and heads get the first such implementation. On a GPU the MLP gets another one if that is at
    least 3% faster, because the order depends on the GPU and on torch. Collective. ConfigError if no
    implementation passes.
    """
    names = implementations_to_try(setting, c, machine)
    if not machine.on_gpu and names == IMPLEMENTATIONS[setting][-1:]:
        return ChosenOps(ops, [f"{setting}:{names[0]} (reference implementation)"])
    model = GPT(c, seed=None)  # for its `ops`; its parameters are not used
    run, inputs = trial_of(setting, c, machine)
    reference_inputs = inputs
    if setting == "attention":
        # The reference is in float64, on the first rows and tokens only. For the first tokens to have the
        # same results in the whole row, no gradient may reach them from later tokens: the later entries of
        # inputs[0], which is both the queries and the gradient of the output, are zero.
        inputs[0][:, ATTENTION_CHECK_TOKENS:] = 0.0
        reference_inputs = [tensor[:2, :ATTENTION_CHECK_TOKENS].double() for tensor in inputs]
    expected = both_passes(run, model, reference_inputs)
    # Try an implementation exactly as it will run: called by a model, compiled, with a backward pass.
    passes = functools.partial(both_passes, machine.compile(run), model, inputs)

    tried = []
    passed: dict[str, Ops] = {}
    warnings: list[str] = []
    for name in names:
        error = math.inf
        try:
            model.ops = with_implementation(ops, setting, name)
            error = largest_error(passes(), expected)
            message = f"error:{error:.1e}"
        except Exception as failure:  # it is not installed, or does not compile or run here
            said = f"{type(failure).__name__}: {failure}"
            # The first line, and the lines further down in which Dynamo gives its reasons.
            message = " ".join(re.findall(r"\A.*|(?:Explanation|context): .+", said))
        # All ranks try the same implementation at the same time, and the worst result decides.
        worst_error, worst_message = max(machine.gather((error, message)))
        tried.append(f"{name} {worst_message}")
        if worst_error <= MAX_RELATIVE_ERROR:
            passed[name] = model.ops
            if setting != "fused_mlp" or not machine.on_gpu:
                break
        elif not worst_message.startswith("ModuleNotFoundError"):
            warnings.append(f"warning: {setting}: {name} is installed but rejected: {worst_message}")

    if not passed:
        asked = getattr(c, setting)
        way_out = "" if asked == "auto" else f", or set {setting.upper()}=auto"
        raise ConfigError(f"{setting.upper()}={asked}: no implementation works here: {' | '.join(tried)}; "
                          f"if memory ran out, lower MICRO_BATCH_TOKENS{way_out}")
    chosen, *others = passed
    if others:  # the MLP on a GPU: Triton is installed, and measures them
        times_ms = {}
        for name in passed:
            model.ops = passed[name]
            # Every step waits for the slowest rank.
            times_ms[name] = max(machine.gather(triton.testing.do_bench(passes)))
            tried.append(f"{name} {times_ms[name]:.2f} ms")
        fastest = min(times_ms, key=times_ms.__getitem__)
        # Runs that are compared should compute alike, so a difference that may be noise decides nothing.
        if times_ms[fastest] < 0.97 * times_ms[chosen]:
            chosen = fastest
    return ChosenOps(passed[chosen], [f"{setting}:{chosen} tried: {' | '.join(tried)}", *warnings])


def cache_compiled_graphs() -> None:
    """Let torch reuse compiled graphs that contain this file's autograd functions, from its per-user cache.

    By default torch caches only what Inductor makes of them, and every run traces their backward pass anew.
    """
    settings: Any = importlib.import_module("torch._functorch.config")
    if not hasattr(settings, "autograd_cache_allow_custom_autograd_functions"):
        return
    settings.autograd_cache_allow_custom_autograd_functions = True
    # A cached graph includes the shapes that our operators return, but not the code that computes them.
    shapes = [inspect.getsource(function) for function in (mlp_matmul_shapes, heads_shapes, xsa_shapes)]
    torch.compiler.config.cache_key_tag = hashlib.sha256("".join(shapes).encode()).hexdigest()


def fast_ops(c: Config, machine: Machine) -> ChosenOps:
    """Implementations for a run, each checked against its reference at the shapes of a micro-batch.

    Collective. ConfigError if a setting names an implementation that fails its check.
    """
    if machine.on_gpu:
        cache_compiled_graphs()
    ops = Ops()
    report = []
    for setting in IMPLEMENTATIONS:
        ops, lines = choose_implementation(setting, ops, c, machine)
        report += lines
    if machine.on_gpu and c.doc_mask and c.attention == "auto" and ops.attend is attention_sdpa:
        slow = ("ATTENTION=sdpa with DOC_MASK=1 makes steps about 1.5 times as long; install flash_attn_3, "
                "flash_attn, or torch 2.10 or later, and use COMPUTE_DTYPE=bfloat16")
        if machine.world_size >= 8:
            raise ConfigError(f"{slow}; to train anyway, set ATTENTION=sdpa")
        report.append(f"warning: {slow}")
    return ChosenOps(ops, report)


def ready_model(model: GPT, machine: Machine, ops: Ops) -> GPT:
    """Move a model to this rank's device, and set the implementations that it calls."""
    # Training, windows and adapters compile the same functions; torch stops after eight graphs of one.
    torch._dynamo.config.recompile_limit = 64
    model.to(machine.device)
    model.machine = machine
    model.compute_dtype = machine.dtype
    model.ops = ops
    return model


# ============================================================================================================
# OPTIMIZER — Parallel Muon for the banks, AdamW for the rest, and a moving average of all parameters.
# ============================================================================================================

# Polar Express (Amsel et al., arXiv 2505.16932): modded-nanogpt's coefficients for five iterations. A safety
# factor of 0.02 is built in, so the matrices need not be divided by 1.02 first.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
FIXED_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan et al., Muon


def orthogonalize(update_NRC: Tensor, steps: int, polar_express: bool, dtype: torch.dtype) -> Tensor:
    """Replace each matrix (N, R, C) by a nearly orthogonal one with Newton-Schulz; the result is contiguous.

    steps: number of iterations. dtype: of the matmuls.
    """
    # Transpose tall matrices, because the Gram matrix R x R is smaller for wide ones.
    tall = update_NRC.size(1) > update_NRC.size(2)
    x = update_NRC.mT if tall else update_NRC
    x = x.to(dtype)
    # The iteration converges only for singular values up to 1.
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for number in range(steps):
        # Every singular value s becomes a·s + b·s³ + c·s⁵.
        a, b, c = FIXED_QUINTIC
        if polar_express:  # more than five iterations repeat the last triple
            a, b, c = POLAR_EXPRESS[min(number, len(POLAR_EXPRESS) - 1)]
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).contiguous()


def gradients_of(parameters: list[nn.Parameter]) -> list[Any]:
    """The gradients after a backward pass. RuntimeError if the loss does not depend on some parameter."""
    unused = [f"{tuple(parameter.shape)}" for parameter in parameters if parameter.grad is None]
    if unused:
        raise RuntimeError(f"no gradient for parameters of shape {', '.join(unused)}: the loss must depend "
                           "on every entry of `parameter_table`; use it, or leave it out with these settings")
    return [parameter.grad for parameter in parameters]


class Optimizer:
    """Updates all parameters. All ranks call its methods together; their number only changes rounding.

    Muon takes the momentum of a matrix and replaces it by the nearest (semi-)orthogonal one, U Vᵀ of its SVD,
    so that all directions move equally far. Newton-Schulz approximates that with matmuls alone.

    Each rank orthogonalizes an equal share of every bank (Parallel Muon, PR #399), which zero matrices pad to
    a multiple of the ranks. `average` is the exponential moving average of all parameters (PR #287); with
    EMA_DECAY=0 it is the parameters themselves.
    """

    def __init__(self, model: GPT, c: Config, machine: Machine) -> None:
        self.config = c
        self.machine = machine
        # On a CPU nearly all the time goes into matmuls, which torch.compile does not speed up.
        self.orthogonalize = machine.compile(orthogonalize) if machine.on_gpu else orthogonalize
        self.weights = [parameter.detach() for parameter in model.parameters()]
        self.average = [weight.clone() for weight in self.weights] if c.ema_decay else self.weights

        table = parameter_table(model.settings)

        def group(kind: str) -> list[nn.Parameter]:
            return [weights for name, weights in model.named_parameters() if table[name].optimizer == kind]

        # Largest bank first: its communication takes longest, and overlaps with the work on the others.
        self.banks = sorted(group("muon"), key=Tensor.numel, reverse=True)
        # Muon's state: in each entry one tensor per bank, for the matrices that this rank updates. To add a
        # state, add an entry here and use it in `_muon_update`; checkpoints save every entry.
        self.states = {
            "momenta": [torch.zeros_like(self._part(bank)) for bank in self.banks],
        }

        self.small = group("embedding") + group("scalar")
        self.adam = torch.optim.AdamW([
            {"params": group("embedding"), "base_lr": c.tied_embed_lr, "weight_decay": c.embed_wd},
            {"params": group("scalar"), "base_lr": c.scalar_lr, "weight_decay": c.adam_wd},
        ], betas=(c.beta1, c.beta2), eps=c.adam_eps, fused=True)

    @torch.no_grad()
    def step(
        self, lr_scale: float, momentum: float, step: int = 0, lap: Callable[[str], None] = lambda name: None
    ) -> Tensor:
        """Update all parameters from their gradients, then the moving average. The gradients are consumed.

        Each rank's gradients must be those of its mean loss. lr_scale: factor on every learning rate.
        momentum: Muon's. step: number of steps before this one. lap: called with the name of the part that
        has just ended, before and after clipping. Returns the global gradient norm before clipping, on the
        device.
        """
        # Phase 1: average the gradients over the ranks.
        slices, small = self._reduce()
        lap("optimizer")
        # Phase 2: clip the global norm.
        norm = self._clip(slices, small)
        lap("grad_clip")
        # Phase 3: AdamW on the embedding and the small tensors.
        for group in self.adam.param_groups:
            group["lr"] = lr_scale * group["base_lr"]
        self.adam.step()
        # Phase 4: Muon on the banks.
        self._update_banks(slices, lr_scale * self.config.matrix_lr, momentum)
        # Phase 5: update the average. Its decay is smaller at first, so that it forgets the initialization.
        if self.config.ema_decay:
            decay = min(self.config.ema_decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.average, self.weights, 1.0 - decay)

        for parameter in (*self.banks, *self.small):
            parameter.grad = None
        return norm

    def use_average(self) -> None:
        """Replace the parameters by their average; called once, after training."""
        torch._foreach_copy_(self.weights, self.average)

    def state(self) -> dict[str, Any]:
        """A copy of parameters and optimizer state that any number of ranks can load."""
        muon = {name: [whole for _, whole in self._gather(parts)] for name, parts in self.states.items()}
        return copy.deepcopy({
            "weights": self.weights, "average": self.average, "adam": self.adam.state_dict(), "muon": muon,
        })

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, on any number of ranks. ConfigError if Muon's state differs."""
        muon = state["muon"]
        if muon.keys() != self.states.keys():
            raise ConfigError(f"RESUME: the checkpoint has the Muon states {list(muon)}, expected "
                              f"{list(self.states)}; resume with the train_gpt.py that wrote it")
        torch._foreach_copy_(self.weights, state["weights"])
        torch._foreach_copy_(self.average, state["average"])
        for name, parts in self.states.items():
            for part, whole in zip(parts, muon[name], strict=True):
                part.copy_(self._part(whole))
        self.adam.load_state_dict(state["adam"])

    def _reduce(self) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients averaged over the ranks: this rank's matrices of each bank, and all small tensors."""
        whole = gradients_of(self.banks)
        small = gradients_of(self.small)
        if self.machine.world_size == 1:
            return whole, small
        # Start everything, then wait for it. torch 2.13 renamed this collective; the old name warns.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        slices = [torch.empty_like(momenta) for momenta in self.states["momenta"]]
        handles = [
            reduce_scatter(mine, self._pad(gradient), async_op=True)
            for mine, gradient in zip(slices, whole, strict=True)
        ]
        # One all-reduce for the many small tensors.
        flat = nn.utils.parameters_to_vector(small)
        handles.append(dist.all_reduce(flat, async_op=True))
        for handle in handles:
            handle.wait()
        torch._foreach_div_([*slices, flat], self.machine.world_size)
        nn.utils.vector_to_parameters(flat, small)
        return slices, small

    def _clip(self, slices: list[Tensor], small: list[Tensor]) -> Tensor:
        """Clip the gradients to a global norm of GRAD_CLIP_NORM, in place; returns the norm before that."""
        squared = nn.utils.get_total_norm(slices).square()
        self.machine.all_reduce(squared)  # each rank holds different matrices of the banks
        # Every rank holds all small gradients, so they are not summed over the ranks.
        norm = (squared + nn.utils.get_total_norm(small).square()).sqrt()
        if self.config.grad_clip_norm:
            factor = (self.config.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([*slices, *small], factor)
        return norm

    def _update_banks(self, gradients: list[Tensor], lr: float, momentum: float) -> None:
        """Muon (Jordan et al.) with decoupled weight decay."""
        # A generator, so that the next bank's updates are computed while this one's are being gathered.
        updates = (
            self._muon_update(gradient, index, momentum) for index, gradient in enumerate(gradients)
        )
        for bank, update in self._gather(updates):
            factor = max(1.0, bank.size(1) / bank.size(2)) ** 0.5  # larger updates for tall matrices
            bank.mul_(1.0 - lr * self.config.muon_wd)
            bank.add_(update, alpha=-lr * factor)

    def _muon_update(self, gradient: Tensor, index: int, momentum: float) -> Tensor:
        """This rank's update (N, R, C): Nesterov momentum, row normalization (MuonEq-R), orthogonalization.

        index: of the bank, in `banks` and in each entry of `states`. Overwrites `gradient`.
        """
        c = self.config
        buffer = self.states["momenta"][index].mul_(momentum).add_(gradient)
        # Nesterov: look one momentum step ahead.
        update = gradient.add_(buffer, alpha=momentum)
        if c.muon_row_normalize:
            update /= update.norm(dim=-1, keepdim=True).clamp(min=1e-7)
        # Newton-Schulz tolerates low precision, so it runs in the dtype of the activations.
        return self.orthogonalize(update, c.muon_backend_steps, c.muon_polar_express, self.machine.dtype)

    def _pad(self, bank: Tensor) -> Tensor:
        """The bank, padded with zero matrices so that it splits evenly over the ranks."""
        return F.pad(bank, (0, 0, 0, 0, 0, -len(bank) % self.machine.world_size))

    def _part(self, bank: Tensor) -> Tensor:
        """The matrices of the bank that this rank updates."""
        return self._pad(bank).chunk(self.machine.world_size)[self.machine.rank]

    def _gather(self, slices: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each bank with the slices of all ranks as one tensor.

        `slices` may be a generator: each gather overlaps with computing the next slices.
        """
        if self.machine.world_size == 1:
            yield from zip(self.banks, slices, strict=True)
            return
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        started = []
        for mine in slices:
            whole = mine.new_empty(len(mine) * self.machine.world_size, *mine.shape[1:])
            started.append((whole, all_gather(whole, mine, async_op=True)))
        for bank, (whole, handle) in zip(self.banks, started, strict=True):
            handle.wait()
            yield bank, whole[: len(bank)]


# ============================================================================================================
# SCHEDULE — pure functions of elapsed time and step; progress goes from 0 to 1, the same on all ranks.
# ============================================================================================================


def run_progress(elapsed_seconds: float, step: int, c: Config) -> float:
    """Fraction of the run that is over: of ITERATIONS or of the time limit, whichever is further along.

    GPTQ_RESERVE_SECONDS of the time limit are kept for calibration.
    """
    step_progress = step / c.iterations if c.iterations else 1.0  # ITERATIONS=0: over before the first step
    if c.max_wallclock_seconds == 0:
        return step_progress
    reserve = c.gptq_reserve_seconds if c.gptq else 0.0
    return max(step_progress, elapsed_seconds / (c.max_wallclock_seconds - reserve))


def learning_rate_scale(progress: float, step: int, c: TrainingSettings) -> float:
    """Factor on every learning rate: 1, then linear toward 0 over the warmdown, but never below MIN_LR.

    The warmdown is the last WARMDOWN_FRAC of the run, or, unless it is -1, the last WARMDOWN_ITERS steps.
    """
    warmdown = c.warmdown_frac
    if c.warmdown_iters >= 0:
        # The fraction of the run that these steps will take, at the average pace so far.
        warmdown = c.warmdown_iters * progress / max(step, 1)
        if progress == 0 and c.max_wallclock_seconds == 0:
            # Before the first step there is no pace yet, but without a time limit only steps count.
            warmdown = c.warmdown_iters / max(c.iterations, 1)
    if warmdown == 0:
        return 1.0
    return max(c.min_lr, min(1.0, (1.0 - progress) / warmdown))


def muon_momentum(progress: float, step: int, c: TrainingSettings) -> float:
    """Muon's momentum, with a linear warmup over a fraction of the run or over a number of steps."""
    elapsed = progress
    duration = c.muon_momentum_warmup_frac
    if c.muon_momentum_warmup_steps >= 0:
        elapsed = step
        duration = c.muon_momentum_warmup_steps
    warmup = min(1.0, elapsed / duration) if duration else 1.0
    return c.muon_momentum_warmup_start + warmup * (c.muon_momentum - c.muon_momentum_warmup_start)


def loop_is_on(progress: float, c: ModelSettings) -> bool:
    """Whether the looped layers run their extra passes (PR #1493: after 35% of the run)."""
    return c.num_loops > 0 and progress >= c.enable_looping_at


# ============================================================================================================
# ENVIRONMENT — variables and KEY=VALUE files become a Config; no setting is silently ignored.
# ============================================================================================================


def find_path(path: str) -> Path:
    """Look for `path` in the working directory, then in this script's folder and its parents.

    If it is in none of them, returns `path` itself, with ~ expanded.
    """
    # os.path.exists returns False for an impossible name, such as one that is too long; Path.exists raises.
    given = Path(os.path.expanduser(path))
    for folder in (Path(), *Path(__file__).resolve().parents):
        if os.path.exists(folder / given):
            return folder / given
    return given


def similar_setting(name: str) -> str:
    """The setting with the name most similar to `name`; empty if none is close."""
    # One wrong letter lowers the ratio more in a short name.
    cutoff = 0.75 if len(name) < 5 else 0.83
    return "".join(difflib.get_close_matches(name, Config().as_env(), 1, cutoff))


def read_config_file(path: str) -> dict[str, str]:
    """The KEY=VALUE lines of a file, where # starts a comment. ConfigError for an unknown setting."""
    known = Config().as_env()
    values = {}
    try:
        lines = find_path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"CONFIG={path}: {reason}; set it to a file of KEY=VALUE lines") from error
    for number, line in enumerate(lines, 1):
        # A # inside a value is part of it, as in a path.
        pair = re.split(r"(?:^|\s)#", line)[0].strip()
        if not pair:
            continue
        name, equals, value = (part.strip() for part in pair.partition("="))
        if name not in known or not equals:
            raise ConfigError(
                f"CONFIG={path} line {number}: got {pair!r}, expected KEY=VALUE with a known setting; did "
                f"you mean {similar_setting(name) or 'one of those in --help'}? A run's config.env works "
                "with the train_gpt.py of that run")
        values[name] = value
    return values


def read_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """All variables of `environ`, on top of the settings in the file that CONFIG names.

    Without CONFIG, a shipped script starts from the settings in its wrapper, which are those of its run;
    CONFIG=none ignores these. Raises ConfigError.
    """
    settings = globals().get("SHIPPED_SETTINGS", {})
    path = environ.get("CONFIG")
    if path:
        settings = {} if path == "none" else read_config_file(path)
    return merge_environments(settings, environ)


def merge_environments(*environments: Mapping[str, str]) -> dict[str, str]:
    """Merge environments; a later one wins.

    For a text setting (a path, a choice, a list) an empty value counts as unset, because Compose and CI files
    pass variables on as `RUNS_DIR=${RUNS_DIR:-}`.
    """
    text_settings = {spec.name.upper() for spec in fields(Config) if isinstance(spec.default, str)}
    values = {}
    for environ in environments:
        for name, text in environ.items():
            if text.strip() or name not in text_settings:
                values[name] = text
    return values


def fits_setting(name: str, text: str) -> bool:
    """Whether `text` is a valid value of the setting `name`."""
    (spec,) = (spec for spec in fields(Config) if spec.name.upper() == name)
    try:
        parse_value(name, text, spec)
    except ConfigError:
        return False
    return True


# Switches of the scripts that this one reproduces, which are not settings here: the value that asks for what
# happens anyway ("*": any value), and what does happen. Any other value would train or score something else,
# so it is an error.
ANCESTOR_SWITCHES: dict[str, tuple[str, str]] = {
    "CASEOPS_ENABLED": ("1", "DATA_PATH and TOKENIZER_PATH select the data; for plain text, use "
                        "CONFIG=configs/sp8192.env"),
    "EMA_ENABLED": ("1", "EMA_DECAY=0 turns off the average of the parameters"),
    "SWA_ENABLED": ("*", "no effect, as in PR #549, which never used its average"),
    "LATE_QAT": ("*", "no effect, as in PR #549, where it reached no matrix"),
    "MTP_NUM_HEADS": ("0", "there are no extra heads; PR #549's were never optimized"),
    "LAWA_ENABLED": ("0", "there is no average of snapshots; EMA_DECAY averages the parameters"),
    "DTG_ENABLED": ("0", "there is no gate around a whole block"),
    "ETLB_ENABLED": ("0", "evaluation does not train a logit bias"),
    "SLIDING_WINDOW_ENABLED": ("1", "EVAL_STRIDE sets the sliding window; 0 turns it off"),
    "LQER_ENABLED": ("0", "there is no low-rank correction of rounding errors"),
    "AWQ_LITE_ENABLED": ("0", "all columns of a matrix have the same number of bits"),
    "NGRAM_TILT_ENABLED": ("0", "evaluation does not mix in n-grams"),
    "PHASED_TTT_ENABLED": ("0", "each document has its own adapters; nothing else learns in evaluation"),
    "TTT_WARM_START_A": ("0", "the adapters of every document start from the same values"),
    "GATED_ATTN_ENABLED": ("0", "SPARSE_ATTN_GATE_ENABLED is the only attention gate"),
    "ATTN_OUT_GATE_ENABLED": ("0", "SPARSE_ATTN_GATE_ENABLED is the only attention gate"),
    "FUSED_CE_ENABLED": ("*", "no effect on results: torch.compile fuses the loss"),
    "COMPRESSOR": ("*", "no effect: the built-in rANS coder is always used"),
    # Settings here by another name, and constants.
    "VAL_BATCH_TOKENS": ("", "use VAL_BATCH_SIZE"),
    "MATRIX_CLIP_SIGMAS": ("", "use MLP_CLIP_SIGMAS and ATTN_CLIP_SIGMAS"),
    "PARALLEL_RESIDUAL_START": ("", "use PARALLEL_START_LAYER with PARALLEL_MODE=gptj"),
    "TTT_EVAL_SEQ_LEN": ("", "use EVAL_SEQ_LEN, the context of all scores"),
    "MUON_WEIGHT_DECAY": ("", "use MUON_WD"),
    "ADAM_WEIGHT_DECAY": ("", "use ADAM_WD"),
    "DATA_DIR": ("", "use DATA_PATH and TOKENIZER_PATH"),
    "TIE_EMBEDDINGS": ("1", "the input embedding is also the output head"),
    "EMBED_LR": ("*", "no effect: it is for an embedding that is not the output head; see TIED_EMBED_LR"),
    "HEAD_LR": ("*", "no effect: it is for an output head that is not the embedding; see TIED_EMBED_LR"),
    "TTT_FREEZE_BLOCKS": ("0", "all blocks take part in test-time training"),
    "TTT_LOCAL_LR_MULT": ("", "use TTT_LORA_LR"),
    "TTT_MASK": ("no_qv", "TTT_LORA_TARGETS lists the matrices that have adapters"),
    "TTT_Q_LORA": ("0", "TTT_LORA_TARGETS lists the matrices that have adapters"),
    "TTT_V_LORA": ("0", "TTT_LORA_TARGETS lists the matrices that have adapters"),
    "ASYM_LOGIT_RESCALE": ("0", "evaluation does not learn softcaps"),
    "SPARSE_ATTN_GATE_SCALE": ("0.5", "a constant in `gated`"),
    "GATE_WINDOW": ("12", "a constant in ModelSettings"),
    "TIED_EMBED_INIT_STD": ("0.005", "a constant in ModelSettings"),
    "ROPE_BASE": ("10000", "a constant in ModelSettings"),
    "ADAM_EPS": ("1e-8", "a constant in TrainingSettings"),
    "TTT_MOMENTUM": ("0.9", "a constant in Config"),
    "TTT_GRAD_CLIP": ("1", "a constant in Config"),
    "TTT_BETA1": ("0", "a constant of `adamw_step`"),
    "TTT_BETA2": ("0.99", "a constant in Config"),
    "TTT_WEIGHT_DECAY": ("0.5", "a constant in Config"),
}
# Configurations whose published commands people paste, and how many settings in common make it one of them.
ANCESTORS = "upstream_baseline pr549 pr591 pr785 pr1493"
SETTINGS_IN_COMMON = 5


def same_value(first: str, second: str) -> bool:
    """Whether two texts are equal, or equal as numbers."""
    try:
        return first == second or float(first) == float(second)
    except ValueError:
        return False


def ancestor_of(environ: Mapping[str, str]) -> str:
    """The file of configs/ that at least half of these settings come from; empty if there is none.

    Without its CONFIG such a command would train a mixture of that model and the default.
    """
    if environ.get("CONFIG"):
        return ""
    # Not by the rules: in a shipped script, they hold for these settings together with those of its run.
    given = Config.before_rules(read_settings({**environ, "CONFIG": "none"})).overrides().items()
    in_common = {}
    for name in ANCESTORS.split():
        path = find_path(f"configs/{name}.env")
        if path.is_file():  # a script that was copied alone has no configs/
            theirs = Config.from_env({"CONFIG": str(path)}).overrides().items()
            in_common[f"configs/{name}.env"] = len(given & theirs)
    nearest = max(in_common, key=in_common.__getitem__, default="")
    if nearest and in_common[nearest] >= max(SETTINGS_IN_COMMON, len(given) / 2):
        return nearest
    return ""


def notes_on_environment(environ: Mapping[str, str], foreign_names: str = "") -> list[str]:
    """Log lines about variables that are not settings. ConfigError if one would have changed the result.

    A name close to that of a setting is taken for a typo. It is an error if its value is valid for that
    setting. Otherwise, and if the name has fewer than six letters, it probably belongs to another program,
    and is only a warning. foreign_names: FOREIGN_NAMES, which the user says belong to other programs.
    """
    ancestor = ancestor_of(environ)
    if ancestor:
        raise ConfigError(f"these settings are those of {ancestor}, without the rest of its model; set "
                          f"CONFIG={ancestor} to run it, or CONFIG=none to run the default with them")
    known = Config().as_env()
    foreign = set(re.findall(r"\w+", foreign_names))
    lines = []
    rejected = {}  # what is wrong, by name
    for name in sorted(foreign & known.keys()):
        lines.append(f"warning: FOREIGN_NAMES: {name} is a setting of this script and takes effect")
    for name, value in sorted(environ.items()):
        if name in known or name in foreign:
            continue
        # The value may be anything, but must not break the log line.
        value = value if value.isprintable() and len(value) <= 200 else ascii(value)[:200]
        if name in ANCESTOR_SWITCHES:
            accepted, meaning = ANCESTOR_SWITCHES[name]
            if value == "" or accepted == "*" or same_value(value, accepted):
                lines.append(f"note: {name}={value}: {meaning}")
            else:
                rejected[name] = f"{name}={value}: not supported by this script: {meaning}"
            continue
        near = similar_setting(name)
        if not near:
            continue
        line = f"{name}={value}: not a setting; did you mean {near}?"
        if not value:
            lines.append(f"note: {line}")
        elif len(name) < 6 or not fits_setting(near, value):
            lines.append(f"warning: {line}")
        else:
            rejected[name] = line
    if rejected:
        one_per_line = "\n".join(rejected.values())
        raise ConfigError(f"{one_per_line}\ncorrect or unset it; if it belongs to another program, set "
                          f"FOREIGN_NAMES={','.join(rejected)}")
    return lines


# ============================================================================================================
# RUN — device, ranks, run directory, log and phases: the same on a laptop and on many nodes.
# ============================================================================================================

NVIDIA_DRIVER = "/dev/nvidiactl"  # exists on Linux while the driver is loaded
PEER_TIMEOUT_SECONDS = 900  # how long a rank waits for another one before it gives up
CHECKPOINT = "checkpoint.pt"
ARTIFACT = "model.bin"
# Each of these asks the process to end. They come from a user, a lost terminal, torchrun, or a scheduler that
# warns before its time limit (Slurm's --signal=USR1@120, submitit's USR2, a CPU time limit).
ENDING_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
ONE_REQUEST_SECONDS = 2.0  # several signals within this time are one request to end


def this_machine(config: Config, environ: Mapping[str, str]) -> Machine:
    """The machine that the settings and torchrun's variables describe. Waits for all ranks to connect.

    Raises ConfigError if torchrun's variables are wrong, or if torch cannot use the GPU.
    """
    try:
        rank = int(environ.get("RANK") or 0)
        world_size = int(environ.get("WORLD_SIZE") or 1)
        local_rank = int(environ.get("LOCAL_RANK") or 0)
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK: {error}; unset them or use torchrun") from error
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)

    # A GPU that torch cannot use is an error: a user who has a GPU does not want to train on the CPU. The
    # device count alone does not decide, because torch may count GPUs that it cannot use.
    hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    found = torch.cuda.device_count() > 0 or (os.path.exists(NVIDIA_DRIVER) and not hidden)
    on_gpu = config.device == "cuda" or (config.device == "auto" and found)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if on_gpu and local_rank >= gpus:
        raise ConfigError(f"DEVICE={config.device}: torch {torch.__version__} for CUDA {torch.version.cuda} "
                          f"can use {gpus} GPUs, expected one for local rank {local_rank} (counted from 0); "
                          "fix the driver, container or torch, start fewer processes, or set DEVICE=cpu")
    device = torch.device("cuda", local_rank) if on_gpu else CPU
    if on_gpu:
        torch.cuda.set_device(device)
        has_bfloat16_units = torch.cuda.get_device_capability()[0] >= 8
    else:
        # Decided by CPU flags, never by timing: two runs to be compared must use the same dtype.
        has_bfloat16_units = torch.cpu._is_avx512_bf16_supported()

    # Without hardware support, bfloat16 works but is slower than fp32.
    dtype = torch.bfloat16 if has_bfloat16_units else torch.float32
    if config.compute_dtype != "auto":
        dtype = getattr(torch, config.compute_dtype)
    # "high" uses TF32 on GPUs that have it; on a CPU, matmuls stay in full fp32.
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")
    compiled = config.compile == "1" or (config.compile == "auto" and on_gpu)
    machine = Machine(rank, world_size, device, dtype, compiled)
    if world_size > 1:
        connect(machine, environ)
    return machine


def connect(machine: Machine, environ: Mapping[str, str]) -> None:
    """Wait until all ranks have connected, and log a line every ten seconds while waiting. ConfigError."""
    connected = threading.Event()

    def report_waiting() -> None:
        while not connected.wait(10):
            print_line(f"rank {machine.rank}: waiting for all {machine.world_size} ranks to connect to "
                       f"MASTER_ADDR={environ.get('MASTER_ADDR')}, at most {PEER_TIMEOUT_SECONDS}s",
                       sys.stderr)

    threading.Thread(target=report_waiting, daemon=True).start()
    # Host tensors use gloo even on GPUs, so that ranks agree on the time without waiting for a device.
    backends = "cpu:gloo,cuda:nccl" if machine.on_gpu else "gloo"
    try:
        dist.init_process_group(
            backends, timeout=timedelta(seconds=PEER_TIMEOUT_SECONDS),
            device_id=machine.device if machine.on_gpu else None)
    except ValueError as error:
        raise ConfigError(f"WORLD_SIZE={machine.world_size}: {error}; use torchrun") from error
    # All ranks connect here. If one left before, its error would be hidden by the others' connection errors.
    machine.gather(None)
    connected.set()


def print_line(line: str, stream: Any = None) -> None:
    """Print a line to `stream` (default: stdout). Never raises: a closed console must not end the run.

    Characters that the stream cannot encode become backslash escapes.
    """
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    # RuntimeError: a signal handler prints during another print. AttributeError: there is no console.
    with contextlib.suppress(OSError, RuntimeError, ValueError, AttributeError):
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def no_symlink(path: str, flags: int) -> int:
    """An opener for `open` that raises OSError for a symlink: a run directory may come from someone else."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)  # Windows has no such flag


def flush_to_disk(descriptor: int) -> None:
    """Flush a file or folder to disk, so that it survives a crash of the machine."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems do not support fsync. But a full disk may only show here.
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file at `path` atomically, or leave it unchanged, even if the machine crashes.

    Raises ConfigError if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # If the run directory was deleted, make it again: the weights must not be lost.
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # left by a killed run; a symlink's target stays
        with open(temporary, "xb", opener=no_symlink) as file:
            file.write(data)
            file.flush()
            flush_to_disk(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(f"{path} cannot be written ({error}); free disk space or set RUNS_DIR") from error
    # Flush the new name as well. Windows cannot open a folder; if this fails, the file itself is still safe.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@dataclass
class Run:
    """What one process of a run writes: its log, its events, and the seconds of each phase."""

    machine: Machine
    directory: Path | None = None  # None: write nothing
    phases: dict[str, float] = field(default_factory=dict)  # seconds of each
    phase_name: str = "preflight"
    training: bool = False  # while True, a signal asks for a checkpoint before the process ends
    stop_signal: int = 0  # the signal that asked for it
    asked_at: float = 0.0  # when that was, by time.perf_counter

    def path(self, name: str) -> Path:
        """The path of a file in the run directory."""
        assert self.directory is not None, "a run without a directory has no files"
        return self.directory / name

    def log(self, line: str) -> None:
        """Write a line to log.txt and the console; rank 0 only."""
        # Only rank 0 logs. Other ranks report a problem by raising.
        if self.machine.rank != 0:
            return
        print_line(line)
        self.append("log.txt", line)

    def record(self, event: str, **values: Any) -> None:
        """Write an event to metrics.jsonl; rank 0 only."""
        if self.machine.rank == 0:
            self.append("metrics.jsonl", json.dumps({"event": event, **values}))

    def append(self, name: str, line: str) -> None:
        """Append a line to a file of the run. Never raises, because a lost log line must not end the run."""
        if self.directory is not None:
            with (
                contextlib.suppress(OSError),
                open(self.path(name), "a", encoding="utf-8", opener=no_symlink) as file,
            ):
                print_line(line, file)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a `with` block, including its device work, to `phases[name]`, and log them."""
        # Unfinished device work of the previous phase must not be counted here.
        self.machine.wait()
        self.phase_name = name
        start = time.perf_counter()
        yield
        self.machine.wait()
        seconds = time.perf_counter() - start
        self.phases[name] = self.phases.get(name, 0.0) + seconds
        self.log(f"phase:{name} {seconds:.2f}s")

    def on_signal(self, number: int, _frame: Any = None) -> None:
        """During training the first signal asks for a checkpoint; before and after, it ends the process.

        Later signals are taken for the same request, because schedulers repeat themselves and torchrun passes
        signals on. But Ctrl-C or Ctrl-\\ pressed again ends the process at once, unless it comes within
        ONE_REQUEST_SECONDS, because a terminal signals both torchrun and its ranks.
        """
        from_keyboard = number in (signal.SIGINT, getattr(signal, "SIGQUIT", None))
        too_soon = time.perf_counter() - self.asked_at < ONE_REQUEST_SECONDS
        if self.stop_signal and (too_soon or not from_keyboard):
            return
        if not self.training or self.stop_signal:
            print_line(f"rank {self.machine.rank}: stopped by signal {number} in phase {self.phase_name}; "
                       f"{self.how_to_continue()}", sys.stderr)
            os._exit(128 + number)
        self.stop_signal = number  # `train` sees it, saves a checkpoint and stops
        self.asked_at = time.perf_counter()
        print_line(f"rank {self.machine.rank}: got signal {number}, stopping after the current step, with a "
                   f"checkpoint if all ranks are alive; Ctrl-C after {ONE_REQUEST_SECONDS:g}s stops at once",
                   sys.stderr)

    def how_to_continue(self) -> str:
        """How to continue a run that has ended early. Names only files that exist."""
        folder = shlex.quote(f"{self.directory}")
        ways = {CHECKPOINT: f"RESUME={folder}", ARTIFACT: f"EVAL_ONLY={folder}/{ARTIFACT}"}
        found = [way for name, way in ways.items() if self.directory and self.path(name).exists()]
        return f"continue with {' or '.join(found)}" if found else "no checkpoint or artifact was saved"


# ============================================================================================================
# TIMING — where the milliseconds of a step go, in the log and as a trace; other steps pay next to nothing.
# ============================================================================================================

FIRST_STEPS = 10  # each of the first steps is logged, whatever the period
# The rows of a trace: host work by thread, GPU work by stream.
LANES = ("main", "disk", "stage", "copy", "compute_stream")


class CopyMarks(NamedTuple):
    """Events before and after a batch's copy to the GPU, in the stream that copies it."""

    begin: torch.cuda.Event
    end: torch.cuda.Event


class Lap(NamedTuple):
    """The end of one part of a step."""

    name: str  # begin, batch, forward, backward, grad_clip or optimizer
    host_seconds: float
    event: Any  # the same point in the GPU's work, a torch.cuda.Event; None without a GPU
    copy: CopyMarks | None  # of a batch that was copied to the GPU


@dataclass
class Trace:
    """A trace of one rank's TRACE_STEPS in Chrome's format, for ui.perfetto.dev. Any thread may add spans.

    Times are seconds of `time.perf_counter`, which the ranks of a machine share; microseconds in the file. A
    span that extends beyond the traced steps is clipped to them. The file is written when the last step ends,
    so a run that is killed earlier has none. Without TRACE_STEPS nothing is measured. With PROFILE_STEPS,
    torch.profiler records the same steps into a file of its own: operators, and on a GPU kernels, copies and
    NCCL. That makes these steps slower.
    """

    steps: range = field(default=range(0))
    directory: Path | None = None
    rank: int = 0
    log: Callable[[str], None] = print
    profiler: Any = None  # a torch.profiler.profile, with PROFILE_STEPS
    recording: bool = False
    began: float = 0.0  # when the first traced step began
    spans: list[list[Any]] = field(default_factory=list)  # name, lane, begin, end, args
    gpu_work: list[tuple[Any, ...]] = field(default_factory=list)  # step, name, lane, events before and after

    def begin(self, step: int) -> None:
        """Start of a step, counted from 1; 0 is a warmup step."""
        if step in self.steps and not self.recording:
            if self.profiler:
                self.profiler.start()
            self.began = time.perf_counter()
            self.recording = True

    @contextlib.contextmanager
    def span(self, name: str, lane: str, **args: Any) -> Iterator[None]:
        """Record a `with` block of the calling thread as a span, even if it raises."""
        if not self.steps:
            yield
            return
        # Added when it begins, because tracing may start or stop in the middle of it.
        span = [name, lane, time.perf_counter(), math.inf, args]
        self.spans.append(span)
        try:
            yield
        finally:
            span[3] = time.perf_counter()
            if not self.recording:
                self.spans.remove(span)

    def add_step(self, step: int, laps: list[Lap]) -> None:
        """Add the spans of a step; `chunk` is the whole step."""
        for before, lap in itertools.pairwise(laps):
            name = "gpu_queue_wait" if lap.name == "batch" else lap.name
            # Host time: with a GPU, the time it takes to launch the work.
            self.spans.append([name, "main", before.host_seconds, lap.host_seconds, {"step": step}])
            if lap.event is not None and lap.name != "batch":
                self.gpu_work.append((step, lap.name, "compute_stream", before.event, lap.event))
            if lap.copy is not None:
                self.gpu_work.append((step, "gpu_transfer", "copy", *lap.copy))
        self.spans.append(["chunk", "main", laps[0].host_seconds, laps[-1].host_seconds, {"step": step}])
        if step + 1 not in self.steps:
            self.finish()

    def finish(self) -> None:
        """Write the file; called after the last traced step or after training."""
        if not self.recording or self.directory is None:
            return
        # GPU spans are located by their distance from an event whose host time is known: now. Waiting for it
        # does no harm, because the traced steps are over.
        if self.gpu_work:
            last = torch.cuda.Event(enable_timing=True)
            last.record()
            last.synchronize()
        now = time.perf_counter()
        for step, name, lane, start, end in self.gpu_work:
            ended = now - end.elapsed_time(last) / 1e3
            self.spans.append([name, lane, ended - start.elapsed_time(end) / 1e3, ended, {"step": step}])
        self.recording = False
        events = []
        for number, lane in enumerate(LANES, 1):
            events.append({"ph": "M", "name": "thread_name", "pid": self.rank, "tid": number,
                           "args": {"name": lane}})
        # Spans that other threads have not finished end now.
        for name, lane, begin, end, args in list(self.spans):
            begin = max(begin, self.began)
            seconds = min(end, now) - begin
            if seconds >= 0:
                events.append({"ph": "X", "name": name, "pid": self.rank, "tid": 1 + LANES.index(lane),
                               "ts": 1e6 * begin, "dur": 1e6 * seconds, "args": args})
        path = self.directory / f"trace_rank{self.rank}.json"
        with contextlib.suppress(ConfigError):  # a full disk must not end the run
            write_atomically(path, json.dumps({"traceEvents": events}).encode())
            self.log(f"trace:{path} (open in ui.perfetto.dev)")
        if self.profiler:
            self.profiler.stop()
            self.profiler.export_chrome_trace(f"{self.directory}/profile_rank{self.rank}.json")


@dataclass
class StepTimer:
    """Makes `timing_breakdown` lines for the first steps and then every `every` steps (0: never).

    All fields are milliseconds. Those of batches, `forward` and `backward` are averages over the micro-steps,
    the others totals of the step (as in PR #591). `batch_wait` is the time the host waited for a batch.
    `batch_cpu` is the host time that it took to stage the last batch, and `batch_h2d` its copy to the GPU;
    with prefetching both overlap with earlier work. The other fields are device time. The host waits for the
    device only at the end of a reported step. The trace gets its laps from here.
    """

    every: int
    on_gpu: bool
    trace: Trace = field(default_factory=Trace)
    # Of the current step.
    reported: bool = False
    step: int = 0
    laps: list[Lap] = field(default_factory=list)

    def begin(self, step: int) -> None:
        """Start of a step, also for the trace. Steps count from 1; 0 is a warmup step, never reported."""
        self.trace.begin(step)
        self.step = step
        counted = step > 0 and self.every > 0
        self.reported = counted and (step <= FIRST_STEPS or step % self.every == 0)
        self.laps = []
        self.lap("begin")  # the start of the first part

    def lap(self, name: str, copy: CopyMarks | None = None) -> None:
        """Mark the end of a part of the step: batch, forward, backward, grad_clip or optimizer."""
        # Steps that are neither reported nor traced do not even read the clock.
        if not (self.reported or self.trace.recording):
            return
        # An event marks a point in the GPU's stream; nothing waits for it.
        event = torch.cuda.Event(enable_timing=True) if self.on_gpu else None
        self.laps.append(Lap(name, time.perf_counter(), event, copy))
        if event is not None:
            event.record()

    def end(self, stage_ms: float, micro_steps: int) -> str:
        """End of a step, also for the trace. Returns its log line, or "" if it is not reported.

        stage_ms: host time to stage the last batch.
        """
        if self.trace.recording:
            self.trace.add_step(self.step, self.laps)
        if not self.reported:
            return ""
        total_ms: dict[str, float] = defaultdict(float)
        # In stream order, the last event comes after all others.
        if self.laps[-1].event is not None:
            self.laps[-1].event.synchronize()
        # A part lasts from the previous lap to its own. Micro-batches add up.
        for before, lap in itertools.pairwise(self.laps):
            if lap.event is None or lap.name == "batch":
                total_ms[lap.name] += 1e3 * (lap.host_seconds - before.host_seconds)
            else:
                total_ms[lap.name] += before.event.elapsed_time(lap.event)
            if lap.copy is not None:
                total_ms["copy"] += lap.copy.begin.elapsed_time(lap.copy.end)
        return (f"timing_breakdown step:{self.step} micro_steps:{micro_steps} "
                f"batch_cpu_ms:{stage_ms:.2f} "
                f"batch_h2d_ms:{total_ms['copy'] / micro_steps:.2f} "
                f"forward_ms:{total_ms['forward'] / micro_steps:.2f} "
                f"backward_ms:{total_ms['backward'] / micro_steps:.2f} "
                f"grad_clip_ms:{total_ms['grad_clip']:.2f} optimizer_ms:{total_ms['optimizer']:.2f} "
                f"batch_wait_ms:{total_ms['batch'] / micro_steps:.2f}")


# ============================================================================================================
# DATA — token order is a pure function of shards, seed and batch shape; batches are prefetched.
# ============================================================================================================

# A shard is a file of 256 little-endian int32 (magic, version, token count, zeros), followed by uint16 ids.
SHARD_MAGIC = 20240520
SHARD_VERSION = 1
SHARD_HEADER_BYTES = 1024
LLAMA3_MAGIC = 20240801  # of llm.c's Llama 3 shards
LOADER_TIMEOUT_SECONDS = 60.0  # the loader gives up after this time without data


class Shard(NamedTuple):
    """A file of tokens."""

    path: Path
    tokens: int


class ShardVisit(NamedTuple):
    """One pass over a shard, as a part of the stream of sequences."""

    begin: int  # position of its first sequence in the stream
    shard: Shard
    order: Array  # numbers of the shard's sequences, in the order of this pass


class StagedBatch(NamedTuple):
    """A micro-batch on its way to the device."""

    ids_BT: Tensor  # uint16, with T + 1 columns because inputs and targets overlap
    starts: Array  # `document_starts` of the inputs
    sequence_hash: int
    copy: CopyMarks | None


class Batch(NamedTuple):
    """A micro-batch on the device."""

    inputs_BT: Tensor  # int64
    targets_BT: Tensor  # int64
    starts: Tensor  # int32: where rows and documents start in the flattened inputs, then B T
    copy: CopyMarks | None = None  # if it was copied to a GPU


def open_shards(pattern: str) -> list[Shard]:
    """The shards that match `pattern`, sorted by name. DataError if there are none or one is not sound."""
    shards = []
    for number, name in enumerate(sorted(glob.glob(pattern))):
        path = Path(name)
        if "[0-9]*" in pattern and not name.endswith(f"_{number:06}.bin"):
            raise DataError(f"{path}: expected number {number:06} here; {numbering_advice(path, number)}")
        tokens = (path.stat().st_size - SHARD_HEADER_BYTES) // 2
        fault = shard_fault(path)
        if fault:
            raise DataError(f"{path}: {fault}")
        shards.append(Shard(path, tokens))
    if not shards:
        others = sorted(path.name for path in Path(pattern).parent.glob("*") if path.suffix == ".bin")
        found = f", only {', '.join(others[:3])}{' …' if len(others) > 3 else ''}" if others else ""
        raise DataError(f"{pattern}: no token shard matches{found}; set DATA_PATH to a folder of shards, "
                        "fetch some with data/fineweb.py, or try `make demo`")
    return shards


def numbering_advice(path: Path, number: int) -> str:
    """What to do about a shard whose name does not have the number that is next."""
    digits = re.sub(r".*_|\.bin$", "", path.name)
    if not digits.isdecimal():
        return "its name does not end in a number (is it a copy of another file?): remove it or move it away"
    if len(digits) != 6:
        return f"its number has {len(digits)} digits, expected six: rename the shards to fineweb_*_%06d.bin"
    if number == 0:
        return "fetch it if it is missing, or rename the shards so that their numbers start at 000000"
    return "fetch the missing shards"


def shard_fault(path: Path) -> str:
    """What is wrong with the header or size of a shard, and what to do about it; empty if nothing is."""
    size_bytes = path.stat().st_size
    ids_bytes = size_bytes - SHARD_HEADER_BYTES
    header = np.fromfile(path, "<i4", 3)
    magic, version, tokens = header.tolist() if len(header) == 3 else (0, 0, 0)
    if [magic, version] == [SHARD_MAGIC, SHARD_VERSION]:
        if tokens < 1:
            return f"its header says {tokens} tokens; export it again"
        if ids_bytes == 2 * tokens:
            return ""
        if ids_bytes == 4 * tokens:
            return ("uint32 ids (4 bytes per token), expected uint16; convert them, if the vocabulary has at "
                    "most 65,536 pieces")
        return (f"{size_bytes} bytes, expected {SHARD_HEADER_BYTES + 2 * tokens} for the {tokens} tokens in "
                "its header; fetch it again")
    if magic == LLAMA3_MAGIC:
        return ("a shard of llm.c for Llama 3 with uint32 ids, expected uint16 ids; make shards from the "
                "text with data/export.py and a vocabulary of at most 65,536 pieces")
    if magic == SHARD_MAGIC:
        return f"version {version} of the format, expected {SHARD_VERSION}; export it again"
    if header.byteswap()[:1].tolist() == [SHARD_MAGIC]:
        return "big-endian numbers, expected little-endian ones; export it again"
    with open(path, "rb") as file:
        first = file.read(24)
    if first.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the shard itself; run `git lfs pull` where it came from"
    return (f"begins with {first[:12]!r}, expected a shard header with magic {SHARD_MAGIC}; fetch it again, "
            "or, if it holds ids without a header, add one (data/README.md, Formats)")


def read_tokens(shard: Shard, vocab_size: int = 1 << 16) -> Array:
    """All tokens of a shard (N,), uint16.

    Raises DataError if the file has changed since `open_shards`, or if an id is not below `vocab_size`.
    """
    # The file may have been removed, replaced or truncated since the run began.
    if not shard.path.exists():
        raise DataError(f"{shard.path}: removed since the run began; put it back")
    fault = shard_fault(shard.path)
    if fault:
        raise DataError(f"{shard.path}: {fault}")
    if shard.path.stat().st_size != SHARD_HEADER_BYTES + 2 * shard.tokens:
        raise DataError(f"{shard.path}: replaced since the run began, when it had {shard.tokens} tokens; put "
                        "that shard back")
    ids = np.fromfile(shard.path, "<u2", offset=SHARD_HEADER_BYTES)
    if ids.max() >= vocab_size:
        at = int(np.argmax(ids >= vocab_size))
        raise DataError(f"{shard.path}, token {at}, byte {SHARD_HEADER_BYTES + 2 * at}: id {ids[at]}, "
                        f"expected less than VOCAB_SIZE={vocab_size}; set TOKENIZER_PATH and VOCAB_SIZE to "
                        "those of the dataset's tokenizer")
    return ids


SHA256_OR_NOTHING = "([0-9a-f]{64})?"


class Manifest(NamedTuple):
    """What an optional `manifest.json` next to the shards says about them. The tools in data/ write one."""

    files: dict[str, int]  # tokens in each file
    tokenizer_sha256: str
    audited_bytes: int | None  # of the validation text, counted by a program that had the text itself
    fused: dict[int, tuple[int, int]]  # the pair of ids that each id made by data/fuse.py replaces


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder of shards; empty if there is none. DataError if it is damaged."""
    path = folder / "manifest.json"
    if not path.exists():
        return Manifest({}, "", None, {})
    try:
        found = json.loads(path.read_bytes())
        files = {name: int(entry["tokens"]) for name, entry in section(found, "files").items()}
        # Byte sidecars count the original text. Without them, the export has decoded all tokens and counted.
        audit = section(section(section(found, "splits"), "val"), "audit")
        audited = audit.get("sidecar_bytes", audit.get("decoded_bytes"))
        fused = {}
        for one_id, (first, second) in section(found, "fused").items():
            fused[int(one_id)] = (int(first), int(second))
        if not all(0 <= number < 1 << 16 for one_id, pair in fused.items() for number in (one_id, *pair)):
            raise ValueError("fused: expected ids below 65,536")
        sha256 = section(found, "tokenizer").get("sha256") or ""
        if not re.fullmatch(SHA256_OR_NOTHING, sha256):
            raise ValueError("tokenizer: expected a SHA-256 as its sha256")
        return Manifest(files, sha256, None if audited is None else int(audited), fused)
    except Exception as error:  # whatever the bytes are
        raise DataError(f"{path}: not the manifest of a dataset ({type(error).__name__}: {error}); fetch or "
                        "export the data again, or move it away if another program wrote it") from error


def section(mapping: Any, name: str) -> Any:
    """The value of `name`, or an empty mapping if it is absent or null."""
    value = mapping.get(name)
    return {} if value is None else value


def permutation(config: TrainingSettings, count: int, *key: int) -> Array:
    """A permutation of range(count), seeded by SEED and one or two key numbers; SHUFFLE=0: the identity.

    It sorts the numbers by random words. These are the raw output of Philox4x64-10 (Salmon et al., 2011),
    because numpy's generators on top of it may change from version to version.
    """
    if not config.shuffle:
        return np.arange(count)
    # Philox's counter has four words. It counts in the first one, and the other three hold our key. They
    # include its length, so that the key (epoch,) differs from (epoch, shard 0).
    counter = [0, len(key), *key, 0, 0]
    words = np.random.Philox(key=config.seed, counter=counter[:4]).random_raw(count)
    return np.argsort(words, kind="stable")


def shard_visits(config: TrainingSettings, shards: list[Shard], position: int) -> Iterator[ShardVisit]:
    """The endless stream of training sequences, starting with the shard that contains `position`.

    Each epoch permutes the shards and, within each shard, its sequences. Sequence i of a shard is its tokens
    i T … (i + 1) T inclusive; an incomplete last one is dropped. Reaching any position takes O(shards).
    Raises DataError if no shard holds a whole sequence.
    """
    length = config.train_seq_len
    usable = [shard for shard in shards if shard.tokens > length]
    if not usable:
        raise DataError(f"no training shard holds {length + 1} tokens (TRAIN_SEQ_LEN + 1); fetch more data "
                        "or lower TRAIN_SEQ_LEN")
    sizes = [(shard.tokens - 1) // length for shard in usable]
    epoch_size = sum(sizes)
    for epoch in itertools.count(position // epoch_size):
        begin = epoch * epoch_size
        for number in permutation(config, len(usable), epoch).tolist():
            # Shards that end before the position are skipped without permuting their sequences.
            if begin + sizes[number] > position:
                yield ShardVisit(begin, usable[number], permutation(config, sizes[number], epoch, number))
            begin += sizes[number]


def hash_sequences(first: int, ids_BT: Array) -> int:
    """Hash of sequences of T + 1 uint16 ids at the positions p = first, first + 1, … of the stream:

        Σ_p place(p) · (Σ_w key_w · pair_w + key_0 · last)   mod 2^64

    pair_w: the w-th pair of ids in sequence p, as one 32-bit number, for w = 1, 2, …; last: its last id. All
    keys and places are odd random words. Equal hashes mean that two runs saw the same tokens in the same
    order. Because it is a sum, ranks and micro-batches can add their parts in any order.
    """
    # View two ids as one 32-bit number. If their number is odd, the last one is paired with zero.
    head_BT = ids_BT[:, :-1]
    pairs_BN = np.pad(head_BT, ((0, 0), (0, head_BT.shape[1] % 2))).view(np.uint32)
    keys = np.random.Philox(key=1).random_raw(pairs_BN.shape[1] + 1) | 1
    # Philox makes four words per count, so position p uses the first word of count p.
    places = np.random.Philox(key=2, counter=first).random_raw(4 * len(ids_BT))[::4] | 1
    sums = np.einsum("bw,w->b", pairs_BN, keys[1:]) + ids_BT[:, -1] * keys[0]
    return int((sums * places).sum())


def micro_steps_per_step(config: Config, world_size: int) -> int:
    """Micro-batches per rank and optimizer step. ConfigError if the batch does not divide evenly."""
    batch_tokens = config.train_batch_tokens
    length = config.train_seq_len
    # As many whole sequences as MICRO_BATCH_TOKENS holds, but no more than a step has for each rank.
    micro_sequences = min(config.micro_batch_tokens // length, batch_tokens // length // world_size)
    micro_step_tokens = world_size * max(1, micro_sequences) * length
    if micro_sequences == 0 or batch_tokens % micro_step_tokens != 0:
        raise ConfigError(
            f"TRAIN_BATCH_TOKENS={batch_tokens}: expected a multiple of {micro_step_tokens}, which is "
            f"{world_size} ranks times as many sequences of TRAIN_SEQ_LEN={length} tokens as fit in "
            f"MICRO_BATCH_TOKENS={config.micro_batch_tokens} (at least one); change one of the three")
    return batch_tokens // micro_step_tokens


@dataclass
class Loader:
    """An endless stream of one rank's micro-batches: disk → stage → `next_batch`.

    A step has S sequences, TRAIN_BATCH_TOKENS in total: step k has the sequences [k S, (k + 1) S) of
    `shard_visits`, on any number of ranks. Rank r takes the r-th equal part of them, MICRO_BATCH_TOKENS at a
    time. So the stream is a pure function of shards and SEED. Disk and stage run in threads of their own;
    TRAIN_PREFETCH=0 gives the same bytes without threads. Raises ConfigError if a step does not divide
    evenly.
    """

    config: Config
    shards: list[Shard]
    machine: Machine
    trace: Trace = field(default_factory=Trace)
    pools: list[futures.ThreadPoolExecutor] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        machine = self.machine
        copies = config.train_copy_stream and machine.on_gpu
        self.stream = torch.cuda.Stream(machine.device) if copies else None
        # Per step, a rank has micro_steps micro-batches of micro_sequences each, step_sequences in total.
        self.micro_steps = micro_steps_per_step(config, machine.world_size)
        self.step_sequences = config.train_batch_tokens // config.train_seq_len // machine.world_size
        self.micro_sequences = self.step_sequences // self.micro_steps
        self.seek(0)

    def seek(self, step: int, stream_hash: int = 0) -> None:
        """Go to the start of a step, in O(shards). stream_hash: of this rank's batches before that step."""
        self.close()
        self.index = step * self.micro_steps  # micro-batches delivered since the first step of the run
        self.stream_hash = stream_hash
        self.wait_ms = 0.0  # total of all batches since its reader last set it to zero
        self.stage_ms = 0.0  # time it took to stage the last batch, including its wait for a shard
        visits, read_ahead = self._prefetch("disk", self._read(self.index), 1)
        batches = self._stage(visits, read_ahead, self.index)
        self.batches, self.stage_ahead = self._prefetch("stage", batches, self.config.train_prefetch_queue)

    def _prefetch(
        self, stage: str, items: Iterator[Any], count: int
    ) -> tuple[Iterator[Any], Callable[[], None]]:
        """Let a thread make the first `count` items ahead of need; it starts now.

        Returns the items, and a function that lets the thread make one more of them. Whoever takes an item
        calls it, and so decides when the thread gets to work. Without TRAIN_PREFETCH there is no thread.
        """
        if not self.config.train_prefetch:
            return items, lambda: None
        # A new thread is on GPU 0, where leaving `torch.cuda.stream` would open a context.
        use_device = functools.partial(torch.cuda.set_device, self.machine.device)
        pool = futures.ThreadPoolExecutor(1, f"loader {stage}", use_device if self.machine.on_gpu else None)
        self.pools.append(pool)
        pending = deque(pool.submit(next, items) for _ in range(count))

        def make_one_more() -> None:
            pending.append(pool.submit(next, items))

        def in_order() -> Iterator[Any]:
            while True:
                # This raises an error of the thread, in its place among the items.
                yield pending.popleft().result(LOADER_TIMEOUT_SECONDS)

        return in_order(), make_one_more

    def _position(self, index: int) -> int:
        """Position in the stream of the first sequence of this rank's micro-batch number `index`."""
        step, micro_step = divmod(index, self.micro_steps)
        rank_part = step * self.machine.world_size + self.machine.rank
        return rank_part * self.step_sequences + micro_step * self.micro_sequences

    def _read(self, first: int) -> Iterator[tuple[Array, Array]]:
        """Disk stage: of each shard, its sequences (N, T + 1) and the numbers of this rank's, in order."""
        length = self.config.train_seq_len
        start = self._position(first)
        for visit in shard_visits(self.config, self.shards, start):
            with self.trace.span("disk_load", "disk", shard=visit.shard.path.name):
                tokens = read_tokens(visit.shard, self.config.vocab_size)
            sequences_NT = sliding_window_view(tokens, length + 1)[::length]
            positions = visit.begin + np.arange(len(visit.order))
            # Each step is split into one run of consecutive positions per rank.
            owner = positions // self.step_sequences % self.machine.world_size
            mine = (positions >= start) & (owner == self.machine.rank)
            with self.trace.span("disk_idle", "disk", ready=visit.shard.path.name):
                yield sequences_NT, visit.order[mine]

    def _sequences(self, visits: Iterator[Any], read_ahead: Callable[[], None]) -> Iterator[Array]:
        """This rank's sequences (T + 1,), one by one."""
        for sequences_NT, order in visits:
            read_ahead()  # the next shard, while this one is used
            for number in order:
                yield sequences_NT[number]

    def _stage(
        self, visits: Iterator[Any], read_ahead: Callable[[], None], first: int
    ) -> Iterator[StagedBatch]:
        """Stage: micro-batches from number `first` on, gathered in pinned memory and copied to the device."""
        sequences = self._sequences(visits, read_ahead)
        for index in itertools.count(first):
            began = time.perf_counter()
            with self.trace.span("stage", "stage", batch=index):
                batch = self._stage_batch(sequences, index)
            self.stage_ms = 1e3 * (time.perf_counter() - began)
            yield batch

    def _stage_batch(self, sequences: Iterator[Array], index: int) -> StagedBatch:
        """Micro-batch number `index`, made of the next sequences.

        Nothing is overwritten while it is read, because each batch has its own memory. PyTorch reuses pinned
        memory after the event that follows its last copy, and device memory once the streams passed to
        `record_stream` are done with it. The next batch is gathered while this one is copied: only the step's
        stream waits for a copy.
        """
        ids = torch.empty(
            self.micro_sequences, self.config.train_seq_len + 1,
            dtype=torch.uint16, pin_memory=self.machine.on_gpu)
        ids_BT = ids.numpy()  # the same memory
        np.concatenate(list(itertools.islice(sequences, self.micro_sequences)), out=ids_BT.reshape(-1))
        # Hash the same memory that is copied to the device.
        sequence_hash = hash_sequences(self._position(index), ids_BT)
        starts = document_starts(ids_BT[:, :-1], self.config)
        copy = None
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                ids, copy = self._copy(ids)
        return StagedBatch(ids, starts, sequence_hash, copy)

    def _copy(self, ids: Tensor) -> tuple[Tensor, CopyMarks]:
        """Copy ids to the device in the current stream, between two events."""
        marks = CopyMarks(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        marks.begin.record()
        ids = ids.to(self.machine.device, non_blocking=True)
        marks.end.record()
        return ids, marks

    def next_batch(self) -> Batch:
        """The next micro-batch. DataError names the position in the stream and the cause."""
        asked = time.perf_counter()
        ids, host_starts, sequence_hash, copy = self._next_staged()
        self.wait_ms += 1e3 * (time.perf_counter() - asked)
        # On a CPU the cast is the copy. On a GPU the copy is traced by its own events.
        lane = "main" if self.machine.on_gpu else "copy"
        with self.trace.span("gpu_transfer", lane, batch=self.index):
            if copy is not None:
                # The ids belong to the copy stream: keep their memory until this stream has read them.
                stream = torch.cuda.current_stream(self.machine.device)
                stream.wait_event(copy.end)
                ids.record_stream(stream)
            elif self.machine.on_gpu:
                ids, copy = self._copy(ids)
            # Cast on the device: 2 bytes per token cross the bus instead of 16.
            inputs_BT = ids[:, :-1].long()
            targets_BT = ids[:, 1:].long()
            starts = starts_to_device(host_starts, self.machine.device)
        self.index += 1
        self.stream_hash = (self.stream_hash + sequence_hash) % 2**64
        # Wake the stage thread only now that the step has its batch, because both compete for the GIL.
        self.stage_ahead()
        return Batch(inputs_BT, targets_BT, starts, copy)

    def stage_first(self) -> None:
        """Wait until the next batch is staged, and keep it for `next_batch`. Raises DataError."""
        self.batches = itertools.chain([self._next_staged()], self.batches)

    def _next_staged(self) -> StagedBatch:
        """The next batch from the stage thread. Raises DataError."""
        try:
            return next(self.batches)
        except (Exception, SystemExit, GeneratorExit) as error:  # whatever can end a thread
            # The shard that was read last is the one that holds the batch's last sequence.
            last = self._position(self.index) + self.micro_sequences - 1
            # A sentence is enough for what a user can fix; anything else needs the traceback.
            reason = f"{error}" if isinstance(error, DataError) else f"{error!r}"
            if isinstance(error, futures.TimeoutError):
                reason = f"no data within {LOADER_TIMEOUT_SECONDS} s; is the disk slow, or does it hang?"
            elif not isinstance(error, (DataError, OSError)):
                reason += f"\n{traceback.format_exc()}"
            raise DataError(
                f"rank {self.machine.rank}, step {self.index // self.micro_steps}, position {last} of the "
                f"stream, {next(shard_visits(self.config, self.shards, last)).shard.path}: {reason}"
            ) from error

    def close(self) -> None:
        """Let the threads end after their current item. May be called at any time, and repeatedly."""
        for pool in self.pools:
            pool.shutdown(wait=False, cancel_futures=True)
        self.pools = []
        self.batches = iter(())


# ============================================================================================================
# EVALUATION — every target is scored once, before anything trains on it; a ledger enforces this.
# ============================================================================================================
# What makes a score legal (issue #1017 of the challenge), and what sees to it here: a probability depends on
# earlier tokens only (attention is causal, and chunks end where they do for any text), it is a softmax over
# the whole vocabulary (`GPT.loss_per_token`), nothing trains on a target before its score is taken, and no
# target is scored twice (both `Ledger`). `python -m tools prove` tests all four on whole runs.


class Score(NamedTuple):
    """The result of one evaluation method."""

    nats: float  # mean over targets
    bits_per_byte: float
    scored_tokens: int
    bytes: int
    learned_tokens: int = 0  # targets in the chunks or documents that test-time training trained on


class Validation(NamedTuple):
    """The validation data."""

    tokens: Array  # uint16
    bytes_total: int  # of all targets
    mark: str  # ends every result line: " comparable:0" if VAL_TOKENS_LIMIT left targets out
    official: str = ""  # the key of OFFICIAL_VALIDATION that these tokens match; empty: none
    audited_bytes: int | None = None  # of the whole validation set, according to its manifest


class Ledger:
    """The nats of every target of a token stream, in fp64, each written once. Target i is token i + 1."""

    def __init__(self, tokens: Array | Tensor) -> None:
        self._tokens = np.array(tokens)
        self._nats = np.full(len(tokens) - 1, np.nan)  # NaN: not scored yet
        self.scored = 0  # targets
        self.scored_nats = 0.0  # running sum for the progress lines; `score` sums all targets again
        self.nats = self._nats.view()
        self.nats.flags.writeable = False

    def record(self, start: int, nats: Array) -> None:
        """Write the nats of the targets from `start` on. Only this method writes them, in any order.

        Raises ValueError for a target that already has a score, FloatingPointError for nats that are not
        finite.
        """
        stop = start + len(nats)
        if start < 0 or stop > len(self.nats):
            raise ValueError(f"got targets {start}..{stop}, expected them within 0..{len(self.nats)}")
        unscored = np.isnan(self.nats[start:stop])
        if not unscored.all():
            raise ValueError(f"got targets {start}..{stop}, but target {start + int(unscored.argmin())} "
                             "already has a score: each is scored once")
        finite = np.isfinite(nats)
        if not finite.all():
            raise FloatingPointError(
                f"the loss of target {start + int(finite.argmin())} is not finite: the weights diverged. If "
                "this happens in the round-trip evaluation, lower the learning rates of training; otherwise "
                "lower TTT_LORA_LR or TTT_LR")
        self._nats[start:stop] = nats
        self.scored += len(nats)
        self.scored_nats += float(nats.sum())

    def scored_tokens(self, start: int, stop: int) -> Array:
        """Tokens start..stop, the only source of training tokens. ValueError if one is not scored yet."""
        # Token i + 1 is target i. Token 0 is not a target.
        scored = np.isfinite(self.nats[max(start - 1, 0) : max(stop - 1, 0)])
        if start < 0 or stop > len(self._tokens) or not scored.all():
            raise ValueError(f"tokens {start}..{stop} are not all scored, so nothing may train on them yet")
        return self._tokens[start:stop].copy()

    def score(self, bytes_total: int) -> Score:
        """The result for data of `bytes_total` bytes. ValueError if a target was never scored."""
        missing = len(self.nats) - self.scored
        if missing:
            first = int(np.isnan(self.nats).argmax())
            raise ValueError(f"{missing} targets were never scored; the first of them is {first}")
        nats = float(self.nats.sum())
        return Score(nats / self.scored, nats / math.log(2) / bytes_total, self.scored, bytes_total)


# --- bytes per token ---


def load_tokenizer(config: Config) -> Any:
    """Load the SentencePiece model at TOKENIZER_PATH. DataError if it is missing or does not fit."""
    import sentencepiece

    path = find_path(config.tokenizer_path)
    if not os.path.exists(path):
        raise DataError(f"TOKENIZER_PATH={path}: no such file; set it to the tokenizer that made the shards "
                        f"in DATA_PATH={config.data_path}. Their manifest.json names it; see data/README.md")
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise DataError(f"TOKENIZER_PATH={path}: not a SentencePiece model ({error}); set it to the "
                        "tokenizer of the shards, see data/README.md") from error
    if pieces.vocab_size() != config.vocab_size:
        raise DataError(f"TOKENIZER_PATH={path}: has {pieces.vocab_size()} pieces, expected VOCAB_SIZE="
                        f"{config.vocab_size}; set both to match manifest.json")
    if pieces.bos_id() != BOS_ID:
        raise DataError(f"TOKENIZER_PATH={path}: BOS has id {pieces.bos_id()}, expected {BOS_ID}; train the "
                        "tokenizer with pad, bos, eos, unk = 0, 1, 2, 3")
    return pieces


def piece_bytes(pieces: Any, size: int) -> tuple[Array, Array, Array]:
    """For each of `size` ids: the bytes of its piece, whether a space precedes them, whether it is text.

    "▁" means a space, and only a leading one is counted separately: "▁the" has three bytes and a space before
    them, "▁▁▁" has two bytes and a space before them, "for▁" has four bytes.
    """
    lengths = np.zeros(size, np.int64)
    spaced = np.zeros(size, bool)
    is_text = np.zeros(size, bool)
    for i in range(size):
        if pieces.is_control(i) or pieces.is_unknown(i) or pieces.is_unused(i):
            continue
        piece = pieces.id_to_piece(i)
        is_text[i] = True
        spaced[i] = piece.startswith("▁")
        if pieces.is_byte(i):
            lengths[i] = 1
        else:
            lengths[i] = len(piece.removeprefix("▁").replace("▁", " ").encode())
    return lengths, spaced, is_text


CASE_MARK = "\ue001"  # a piece of every CaseOps tokenizer: it capitalizes the next word and is not text


def has_byte_sidecar(config: Config) -> bool:
    """Whether the shards come with files that hold the number of bytes of each validation token."""
    folder = glob.escape(str(find_path(config.data_path)))
    return bool(glob.glob(f"{folder}/fineweb_val_bytes_[0-9]*.bin"))


def token_bytes(tokens: Array, config: Config) -> Array:
    """Bytes of text of each target: from the byte sidecar if the shards have one, else from the pieces.

    A sidecar counts the bytes of the original text; CaseOps data (PR #1729) must have one. Without a sidecar,
    the text is what SentencePiece decodes. DataError if a sidecar does not have one count per token, for a
    tokenizer without a piece for a lone space (it over-counts, issue #897), and for an unknown character,
    whose bytes are lost.
    """
    pieces = load_tokenizer(config)
    folder = glob.escape(str(find_path(config.data_path)))
    if has_byte_sidecar(config):
        sidecars = open_shards(f"{folder}/fineweb_val_bytes_[0-9]*.bin")
        found = [sidecar.tokens for sidecar in sidecars]
        expected = [shard.tokens for shard in open_shards(f"{folder}/fineweb_val_[0-9]*.bin")]
        if found != expected:
            raise DataError(f"DATA_PATH={folder}: fineweb_val_bytes_*.bin hold {found} counts, expected one "
                            f"per token, {expected}; get the data again, see data/README.md")
        counts = np.concatenate([read_tokens(sidecar) for sidecar in sidecars])
        return counts[1 : len(tokens)].astype(np.int64)

    if pieces.piece_to_id(CASE_MARK) != pieces.unk_id():
        raise DataError(f"TOKENIZER_PATH={config.tokenizer_path}: has CaseOps marks, which are not text, but "
                        f"DATA_PATH={folder} has no fineweb_val_bytes_*.bin to count bytes; get the data "
                        "again, see data/README.md")
    if pieces.piece_to_id("▁") == pieces.unk_id():
        raise DataError(f"TOKENIZER_PATH={config.tokenizer_path}: expected a piece for a lone space, found "
                        "none; use a tokenizer that has one")
    targets = tokens[1:]
    unknown = np.flatnonzero(targets == pieces.unk_id())
    if len(unknown):
        raise DataError(f"DATA_PATH={folder}: validation token {unknown[0] + 1} is a character that "
                        f"TOKENIZER_PATH={config.tokenizer_path} has no piece for, so its bytes are unknown; "
                        "use a tokenizer with byte fallback")
    lengths, spaced, is_text = piece_bytes(pieces, config.vocab_size)
    # A leading space is one byte. At the start of a document, after an id that is not text, most tokenizers
    # drop it when they decode; one that leaves white space alone keeps it.
    keeps_first = pieces.decode([pieces.piece_to_id("▁")]) == " "
    return lengths[targets] + (spaced[targets] & (is_text[tokens[:-1]] | keeps_first))


# --- do tokens, tokenizer and byte counts match? ---

# Before a run, the first documents are decoded and encoded again, which takes about a second. An id "comes
# back" if this reproduces it.
CHECKED_DOCUMENTS = 1000
CHECKED_TOKENS = 2_000_000
CUT_TOKENS = 4  # ignored at each end of a document: where it was cut, ids need not come back
NEIGHBORS = 4  # on each side: with the wrong tokenizer many single ids come back, but hardly any in a row
FEW_IDS = 200  # with fewer, the share is too noisy
LEAST_SHARE = 0.95  # of the ids must come back; with the right tokenizer nearly all do
LEAST_SINGLE_SHARE = 0.97  # the same for short documents: with the wrong tokenizer up to 96% come back


class OfficialText(NamedTuple):
    """What is known about the challenge's validation set in one tokenizer; None: not known."""

    pieces: int  # of the tokenizer
    documents: int
    bytes: int
    targets: int | None
    sha256: str | None  # of the first FINGERPRINT_TOKENS ids as little-endian uint16


FINGERPRINT_TOKENS = 500_000
# Taken from the challenge's public logs and shards. The bytes are those of the text after the tokenizer has
# normalized it, except for CaseOps, whose sidecar counts the original text.
OFFICIAL_VALIDATION = {
    "sp1024": OfficialText(1024, 50_000, 151_080_891, 62_021_845,
                           "0f81cdf702a26f57c8013c8c8e469c2c01c5a42911cf44cbe791fef323e41bc5"),
    "sp4096": OfficialText(4096, 50_000, 151_080_891, None, None),
    "sp8192": OfficialText(8192, 50_000, 151_080_891, 40_540_802,
                           "6a6475e0ebfad1992f502a1034ad0041baeb68c8c03e593831c014f4a3dd63d2"),
    "caseops": OfficialText(8192, 50_000, 151_080_645, 47_853_343, None),
}


def official_name(tokens: Array, bytes_total: int, vocab_size: int) -> str:
    """The key of OFFICIAL_VALIDATION that these tokens and bytes match in full; empty: none."""
    found = OfficialText(
        pieces=vocab_size,
        documents=int(np.count_nonzero(tokens == BOS_ID)),
        bytes=bytes_total,
        targets=len(tokens) - 1,
        sha256=hashlib.sha256(tokens[:FINGERPRINT_TOKENS].astype("<u2").tobytes()).hexdigest(),
    )
    for name, text in OFFICIAL_VALIDATION.items():
        known = [(mine, theirs) for mine, theirs in zip(found, text, strict=True) if theirs is not None]
        if all(mine == theirs for mine, theirs in known):
            return name
    return ""


def check_text(tokens: Array, config: Config, manifest: Manifest) -> None:
    """Check the first 1,000 validation documents against the tokenizer and the byte counts. DataError.

    With another tokenizer of the same size, or with byte counts of another text, the scores are meaningless,
    and nothing else would reveal it. tokens: 1-D ids, BOS before each document.
    """
    pieces = load_tokenizer(config)
    tokens = tokens[: CHECKED_TOKENS + 1]
    counts = token_bytes(tokens, config)
    has_sidecar = has_byte_sidecar(config)
    if has_sidecar:
        check_sidecar(tokens, counts, pieces, config)
    found = first_documents(separate_pairs(tokens, manifest.fused), pieces)
    documents = [document.ids for document in found]
    texts = pieces.decode([ids.tolist() for ids in documents])
    for (begin, ids, cut_at_start), text in zip(found, texts, strict=True):
        counted = counts[begin : begin + len(ids)]
        # A document cut at its start cannot be checked: the decoder drops a space there that is part of the
        # text.
        if not has_sidecar and not cut_at_start and counted.sum() != len(text.encode()):
            at = first_miscounted(ids.tolist(), counted, pieces)
            raise DataError(
                f"TOKENIZER_PATH={config.tokenizer_path}: the validation document at token {begin} decodes "
                f"to {len(text.encode())} bytes, but {counted.sum()} are counted; the first difference is at "
                f"its token {at}, piece {pieces.id_to_piece(int(ids[at]))!r}, counted as {counted[at]}. Bits "
                "per byte would be wrong: use another tokenizer, or add a byte sidecar to the data "
                "(data/README.md)")
    share, least = share_that_comes_back(documents, pieces.encode(texts), pieces)
    if share < least:
        raise DataError(
            f"TOKENIZER_PATH={config.tokenizer_path}: only {share:.1%} of the ids of {len(documents)} "
            f"validation documents come back when decoded and encoded again, expected {least:.0%}; set it to "
            f"the tokenizer that made the shards in DATA_PATH={config.data_path}. If the ids were rewritten "
            "afterwards, as data/fuse.py does, keep the manifest.json that describes it")


class CheckedDocument(NamedTuple):
    """A validation document without BOS and without incomplete characters at either end."""

    begin: int  # the position of its BOS
    ids: Array
    cut_at_start: bool  # it began with the rest of a character


def first_documents(tokens: Array, pieces: Any) -> list[CheckedDocument]:
    """The first documents that contain text: CHECKED_DOCUMENTS of them, or all.

    Documents that were cut to a length may end inside a character or after a space. Such ends are dropped:
    the decoder replaces an incomplete character by a mark, and the encoder drops a space at the end.
    """
    is_bos = np.append(tokens == BOS_ID, True)
    begins = np.flatnonzero(is_bos[:-1] & ~is_bos[1:])[:CHECKED_DOCUMENTS]
    ends = np.flatnonzero(is_bos)
    space = pieces.piece_to_id("▁")
    documents = []
    for begin in begins.tolist():
        ids = tokens[begin + 1 : ends[np.searchsorted(ends, begin, "right")]]
        first = 0
        while first < len(ids) and continues_character(int(ids[first]), pieces):
            first += 1
        stop = len(ids)
        while stop > first and (ids[stop - 1] == space or pieces.is_byte(int(ids[stop - 1]))):
            stop -= 1
        documents.append(CheckedDocument(begin, ids[first:stop], first > 0))
    return documents


def continues_character(token: int, pieces: Any) -> bool:
    """Whether a token is one of the bytes <0x80> to <0xBF>, which never start a UTF-8 character."""
    return pieces.is_byte(token) and pieces.id_to_piece(token)[3] in "89AB"


def first_miscounted(ids: list[int], counts: Array, pieces: Any) -> int:
    """The first position in a document where the bytes decoded so far differ from those counted so far."""
    # Cut only between characters: for an incomplete one the decoder would put a mark of three bytes.
    ends = [i for i in range(len(ids)) if i + 1 == len(ids) or not continues_character(ids[i + 1], pieces)]
    totals = np.cumsum(counts)
    number = bisect.bisect_left(
        ends, True, key=lambda i: len(pieces.decode(ids[: i + 1]).encode()) != totals[i])
    return ends[min(number, len(ends) - 1)]


def share_that_comes_back(
    documents: list[Array], again: list[list[int]], pieces: Any
) -> tuple[float, float]:
    """The share of ids that come back after decoding and encoding, and the lowest share to accept.

    An id comes back if it and its neighbors have the same byte offset in their document, counted from the
    start or from the end, so one odd spot does not make the whole document differ. The ends of documents do
    not count, since they may have been cut. If all documents are short, ids count without their neighbors,
    all but the first and the last of each document.
    """
    lengths, spaced, is_text = piece_bytes(pieces, pieces.vocab_size())
    lengths += spaced

    def offsets(ids: Array) -> tuple[Array, Array]:
        """Each id and its byte offset packed into one number; counted from the start and from the end."""
        ids = ids[is_text[ids]].astype(np.int64)
        begins = np.cumsum(lengths[ids]) - lengths[ids]
        return begins << 16 | ids, begins - lengths[ids].sum() << 16 | ids

    same = 0
    checked = 0
    single: list[Array] = []
    for ids, back in zip(documents, again, strict=True):
        from_start, from_end = offsets(ids)
        start_again, end_again = offsets(np.array(back, np.int64))
        comes_back = np.isin(from_start, start_again) | np.isin(from_end, end_again)
        single.append(comes_back[1:-1])
        inner = comes_back[CUT_TOKENS:-CUT_TOKENS]
        if len(inner) > 2 * NEIGHBORS:
            in_a_row: Array = sliding_window_view(inner, 2 * NEIGHBORS + 1).min(1)
            same += int(in_a_row.sum())
            checked += len(in_a_row)
    if checked >= FEW_IDS:
        return same / checked, LEAST_SHARE
    all_single = np.concatenate(single)
    if len(all_single) < FEW_IDS:
        return 1.0, LEAST_SHARE  # too few ids to judge
    return float(all_single.mean()), LEAST_SINGLE_SHARE


def separate_pairs(tokens: Array, pairs: Mapping[int, tuple[int, int]]) -> Array:
    """Undo `data/fuse.py`, which replaced each of these pairs by one id: the tokenizer's own output."""
    if not pairs:
        return tokens
    first = np.arange(1 << 16, dtype=tokens.dtype)
    second = first.copy()
    for fused, (one, other) in pairs.items():
        first[fused] = one
        second[fused] = other
    at = np.flatnonzero(np.isin(tokens, list(pairs)))
    return np.insert(first[tokens], at + 1, second[tokens[at]])


def check_sidecar(tokens: Array, counts: Array, pieces: Any, config: Config) -> None:
    """DataError if a byte sidecar cannot belong to these tokens. counts: of the targets.

    Normalization changes some characters, but most pieces of several bytes have exactly the bytes they spell.
    """
    targets = tokens[1:]
    sidecar = f"DATA_PATH={config.data_path}: fineweb_val_bytes_*.bin"
    odd = np.flatnonzero((targets == BOS_ID) & (counts > 0))
    if len(odd):
        raise DataError(f"{sidecar}: validation token {odd[0] + 1} is BOS and has {counts[odd[0]]} bytes, "
                        "expected 0; get the data again, see data/README.md")
    lengths, spaced, _ = piece_bytes(pieces, config.vocab_size)
    spelled = (lengths + spaced)[targets]
    has_several = spelled > 1
    share = float(np.mean((counts == spelled)[has_several])) if has_several.any() else 1.0
    if share < 0.5:
        raise DataError(f"{sidecar}: only {share:.0%} of the counts are the bytes that the piece spells, so "
                        "they belong to other tokens; get the data again, see data/README.md")


# --- sliding windows ---


def window_rows(
    targets: int, context: int, stride: int, document_begins: Array, chunk: int
) -> list[Array]:
    """Plan sliding-window evaluation: for each chunk, rows of (first token, first target, end of targets).

    Window w reads the `context` tokens from w * stride on. Window 0 scores all its targets; every later
    window scores the targets that no window before it has reached, at most `stride` of them. With context 4,
    stride 2 and one document: (0, 0, 4), (2, 4, 6), (4, 6, 8), …

    A document that starts inside a window allows a shortcut. Attention stops at the document's start, so all
    windows that begin no later than it see the same context, and the last of them scores for all.
    `document_begins[i]` is the token at which the document of target i starts.
    """

    def first_window(target: int) -> int:
        # Window w reaches the targets below w * stride + context, so the first one to reach this target is
        # ceil((target + 1 - context) / stride).
        return (target - context) // stride + 1

    # A window belongs to the chunk of its first target, because training on a chunk changes the scores that
    # follow. It may score some targets of the next chunk if the context is not a multiple of the stride.
    chunks: dict[int, list[Any]] = {}
    start = 0  # the first target without a score
    while start < targets:
        chunk_end = min((start // chunk + 1) * chunk, targets)
        earliest = first_window(start)
        latest = first_window(chunk_end - 1)
        window = max(0, earliest, min(int(document_begins[start]) // stride, latest))
        end = min(window * stride + context, targets)
        chunks.setdefault(start // chunk, []).append((window * stride, start, end))
        start = end
    return [np.array(rows) for rows in chunks.values()]


EVAL_MODES = "eval_modes.json"


@dataclass
class ScoreClock:
    """The clock of one evaluation: it logs progress and decides whether there is time left to train.

    Nothing else reads the time during an evaluation. Which parts of the data test-time training trains on
    depends on this clock alone, never on tokens or losses.
    """

    run: Run = field(default_factory=lambda: Run(Machine()))
    name: str = ""
    every_seconds: float = 0.0  # between progress lines; 0: none
    limit_seconds: float = math.inf
    # The `modes` of an earlier evaluation: where they decide, the clock does not (see `read_modes`).
    earlier_modes: dict[str, int] = field(default_factory=dict)
    # A part of the data is a batch of documents (TTT_MODE=lora) or a chunk (sgd), named by its first document
    # or target. For each part: its number of targets if training on it was allowed, else 0.
    modes: dict[str, int] = field(default_factory=dict)
    # For each part: its targets in documents or chunks with at least one training step. A document of a
    # single chunk has none.
    learned: dict[str, int] = field(default_factory=dict)
    notice: str = ""  # the warning that some part was not trained on, which is logged once
    start: float = field(default_factory=lambda: time.perf_counter())
    logged_at: float = 0.0

    def seconds(self) -> float:
        """Seconds since the evaluation began."""
        return time.perf_counter() - self.start

    def log_progress(self, ledger: Ledger, targets: int = 0) -> None:
        """Log a line if one is due. targets: how many this rank scores; 0: all."""
        now = self.seconds()
        too_early = now - self.logged_at < self.every_seconds
        if self.every_seconds == 0 or (too_early and ledger.scored < len(ledger.nats)):
            return
        self.logged_at = now
        share = min(1.0, ledger.scored / (targets or len(ledger.nats)))
        self.run.log(f"val_progress:{self.name} {share:.0%} "
                     f"partial_mean_loss:{ledger.scored_nats / ledger.scored:.4f} "
                     f"tokens_seen:{ledger.scored} eta:{now * (1 / share - 1):.0f}s")

    def learns(self, part: str, targets: int, needed_seconds: float) -> bool:
        """Decide whether to train on a part of the data; called once per part.

        part, targets: as in `modes`. needed_seconds: to train on this part and to score everything left.
        """
        now = self.seconds()
        in_time = now + needed_seconds <= self.limit_seconds
        learning = bool(self.earlier_modes.get(part, in_time))
        if not learning and not self.notice:
            self.notice = (
                f"warning: {self.name} continues without training: {now:.1f} of {self.limit_seconds:.1f} s "
                f"are used, the rest would take {needed_seconds:.1f} s")
            self.run.log(self.notice)
        self.modes[part] = targets if learning else 0
        return learning

    def repeat(self, parts: set[str]) -> None:
        """Prepare to repeat `earlier_modes`. parts: the names of the parts now, on all ranks.

        They may be others. Then, if the earlier evaluation trained on everything, so will this one. If not,
        the clock decides.
        """
        if not self.earlier_modes or self.earlier_modes.keys() == parts:
            return
        if all(self.earlier_modes.values()):
            self.earlier_modes = dict.fromkeys(parts, 1)
            return
        self.earlier_modes = {}
        self.run.log(f"warning: {self.name}: {EVAL_MODES} is about other batches of documents, so the clock "
                     "decides after all; to repeat that score, use the data, MICRO_BATCH_TOKENS and "
                     "TTT_BATCH_SIZE of its run")


class WindowScorer:
    """Score a token stream chunk by chunk with sliding windows."""

    def __init__(self, model: GPT, tokens: Array, config: Config, chunk_tokens: int, looping: bool) -> None:
        """tokens: 1-D ids. chunk_tokens: targets. looping: as in `GPT.forward`."""
        self.model = model
        self.machine = model.machine
        self.looping = looping
        self.context = config.eval_length
        self.batch_rows = max(1, config.val_pass_tokens // self.context)
        self.device = self.machine.device
        # GPT.forward, not model.forward: all scorers and reloaded models then share the compiled graphs.
        self.forward = self.machine.compile(GPT.forward)

        tokens = np.asarray(tokens).astype(np.int64)
        # The token at which the document of each target starts; without DOC_MASK all are one document.
        starts = document_starts(tokens[None, :-1], config)
        begins = np.repeat(starts[:-1], np.diff(starts))
        self.chunks = window_rows(len(tokens) - 1, self.context, config.eval_stride, begins, chunk_tokens)
        tokens = np.pad(tokens, (0, self.context))  # the last windows reach beyond the end
        # Row i holds the T + 1 tokens from i on.
        self.host_windows = sliding_window_view(tokens, self.context + 1)
        self.device_windows = (
            torch.from_numpy(tokens).to(self.device).unfold(0, self.context + 1, 1)
            if config.val_prefetch else None)

    def score(self, chunk: Array) -> Array:
        """The nats of all targets of one of `chunks`, float64, on every rank. All ranks call it together."""
        # The targets of a chunk are contiguous.
        begin = chunk[0, 1]
        end = chunk[-1, 2]
        nats = torch.zeros(end - begin, dtype=torch.float64, device=self.device)
        # Ranks take turns. The batches do not depend on the number of ranks.
        first = self.machine.rank * self.batch_rows
        for at in range(first, len(chunk), self.machine.world_size * self.batch_rows):
            rows = chunk[at : at + self.batch_rows]
            nats[rows[0, 1] - begin : rows[-1, 2] - begin] = self._score_batch(rows)
        self.machine.all_reduce(nats)
        return nats.cpu().numpy()

    @torch.no_grad()
    def _score_batch(self, rows: Array) -> Tensor:
        """The nats of the targets of some windows, in order. Never waits for the device."""
        first, start, stop = rows.T
        # Row r of the batch reads tokens from first[r] on, so the hidden state that predicts its target i is
        # number r * context + i - first[r] of the flattened hidden states. The targets of the rows are
        # contiguous: one range, to which every row adds its offset.
        row_offsets = np.arange(len(rows)) * self.context - first
        position_of_target = np.arange(start[0], stop[-1]) + np.repeat(row_offsets, stop - start)
        scored_N = to_device(position_of_target, self.device)
        if self.machine.compiled:  # rows repeat until the batch is full, so that there is only one shape
            first = np.resize(first, self.batch_rows)
        host_ids_BT = self.host_windows[first]
        # With VAL_PREFETCH the tokens are already on the device, and only the row numbers are copied.
        if self.device_windows is None:
            ids_BT = to_device(host_ids_BT, self.device)
        else:
            ids_BT = self.device_windows[to_device(first, self.device)]
        targets_N = ids_BT[:, 1:].flatten()
        starts = starts_to_device(document_starts(host_ids_BT[:, :-1], self.model.settings), self.device)
        hidden_BTD = self.forward(self.model, ids_BT[:, :-1], starts, self.looping)
        # The output head is the most expensive part, so it only runs at the scored positions.
        return self.model.loss_per_token(hidden_BTD.flatten(0, 1)[scored_N], targets_N[scored_N])


def score_sliding(
    model: GPT, tokens: Any, config: Config, clock: ScoreClock | None = None, looping: bool = True
) -> Ledger:
    """Score windows that advance by EVAL_STRIDE: almost EVAL_SEQ_LEN tokens of context for each target.

    tokens: 1-D ids. looping: whether the extra passes run, as in `GPT.forward`. All ranks get the same
    ledger. It is incomplete if the evaluation would exceed the time limit of its clock.
    """
    clock = clock or ScoreClock()
    ledger = Ledger(tokens)
    # Nothing trains here: the chunk size only decides how often the clock is read.
    scorer = WindowScorer(model, tokens, config, 32 * config.val_pass_tokens, looping)
    for chunk in scorer.chunks:
        # At the rate so far, would the evaluation end in time? Rank 0 decides for all.
        share = ledger.scored / len(ledger.nats) or 1.0
        if model.machine.gather(clock.seconds() > clock.limit_seconds * share)[0]:
            break
        ledger.record(int(chunk[0, 1]), scorer.score(chunk))
        clock.log_progress(ledger)
    return ledger


def score_roundtrip(
    model: GPT, tokens: Any, config: Config, clock: ScoreClock | None = None, looping: bool = True
) -> Ledger:
    """Score non-overlapping windows of EVAL_SEQ_LEN: the cheapest evaluation, with the least context."""
    return score_sliding(model, tokens, replace(config, eval_stride=config.eval_length), clock, looping)


# --- test-time training with adapters, document by document ---


def adapter_layout(c: Config) -> list[dict[str, dict[str, int]]]:
    """The adapters of each layer visit, extra passes included; the last entry is the output head's.

    Each entry has groups and names as in `Adapters`, with the number of output channels of each name. With
    model dimension 512, key dimension 256 and adapters on q, k, mlp and head:
    [{"attention": {"q": 512, "k": 256}, "mlp": {"mlp": 512}}, …, {"head": {"head": 8192}}]
    """
    outputs = {"q": c.model_dim, "k": c.kv_dim, "v": c.kv_dim, "o": c.model_dim, "mlp": c.model_dim}
    in_attention = {name: outputs[name] for name in c.lora_targets if name in "qkvo"}
    of_visit = {"attention": in_attention} if in_attention else {}
    if "mlp" in c.lora_targets:
        of_visit["mlp"] = {"mlp": outputs["mlp"]}
    of_head = {"head": {"head": c.vocab_size}} if "head" in c.lora_targets else {}
    return [*(len(visit_order(c, looping=True)) * [of_visit]), of_head]


def initial_adapters(model: GPT, config: Config) -> Tensor:
    """The initial adapter parameters (P,) of every document, in the order of `unpack`.

    A depends only on SEED, name and visit, so it is the same on every rank and for any batch size. B is zero,
    so the first chunk of a document is scored by the model as it is.
    """
    inputs = config.model_dim
    rank = config.ttt_lora_rank
    bound = config.lora_scale_root / math.sqrt(inputs)
    matrices = []
    for visit, groups in enumerate(adapter_layout(config)):
        for outputs_of_name in groups.values():
            a_RI = []
            for name in outputs_of_name:
                generator = generator_of(f"{config.seed} adapter {name} {visit}")
                a_RI.append(torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator))
            matrices.append(torch.cat(a_RI).t().flatten())
            matrices.append(torch.zeros(rank * sum(outputs_of_name.values())))
    master = torch.promote_types(model.compute_dtype, torch.float32)
    return torch.cat(matrices).to(model.machine.device, master)


def unpack(flat_BP: Tensor, layout: list[dict[str, dict[str, int]]], c: Config) -> list[Adapters]:
    """View flat parameters (B, P) as the adapters of each visit in the layout.

    Visits and groups follow one another; a group has all its A first, then one B for each name. In the
    example of `adapter_layout`, with rank R, the parameters of one visit are: A of q and k (512 * 2R), B of q
    (R * 512), B of k (R * 256), A of mlp (512 * R), B of mlp (R * 512).
    """
    rank = c.ttt_lora_rank
    sizes = []
    for groups in layout:
        for outputs_of_name in groups.values():
            sizes.append(len(outputs_of_name) * rank * c.model_dim)
            sizes += [outputs * rank for outputs in outputs_of_name.values()]
    # A single split: its backward pass writes all gradients into one tensor at once.
    pieces = iter(flat_BP.split(sizes, dim=1))
    found = []
    for groups in layout:
        adapters: Adapters = {}
        for group, outputs_of_name in groups.items():
            a_BIR = next(pieces).unflatten(1, (c.model_dim, -1))
            adapters[group] = a_BIR, {name: next(pieces).unflatten(1, (rank, -1)) for name in outputs_of_name}
        found.append(adapters)
    return found


def forward_adapted(model: GPT, ids_BT: Tensor, starts: Tensor, flat_BP: Tensor, config: Config) -> Tensor:
    """`GPT.forward`, where each row has its own adapters: flat_BP, a single tensor.

    It is a single tensor because compiled code checks each of its inputs on every call.
    """
    adapters = unpack(flat_BP, adapter_layout(config), config)
    # Short windows use the rotary base of the longest ones, so positions mean the same in all of them.
    return model(ids_BT, starts, adapters=adapters, longest=config.eval_length)


ADAPTER_EPS = 1e-10  # of AdamW: the gradients of one chunk are small (PR #1855)


def adamw_step(
    weights_N: Tensor, squares_N: Tensor, rounded_N: Tensor, gradients_N: Tensor, newest: Tensor,
    config: Config,
) -> None:
    """One AdamW step in place. β1 is 0, so there is no first moment (PR #1855).

    squares_N: running mean of squared gradients. newest: weight of the new square in it. rounded_N: receives
    the weights in the dtype that the model reads.
    """
    gradients_N = gradients_N.to(weights_N.dtype)
    squares_N.lerp_(gradients_N.square(), newest)
    # A and B each include the square root of LoRA's factor α/r. The size of an AdamW step does not depend on
    # the scale of the parameters, so the learning rate includes it, too.
    rate = config.ttt_lora_lr * config.lora_scale_root
    weights_N.mul_(1 - config.ttt_lora_lr * config.ttt_weight_decay)
    weights_N.addcdiv_(gradients_N, squares_N.sqrt() + ADAPTER_EPS, value=-rate)
    rounded_N.copy_(weights_N)


class DocumentAdapters:
    """The adapters of a batch of documents, and their optimizer.

    Each document trains its own adapters: the loss is a sum over documents, and AdamW is elementwise. So a
    document's scores do not depend on the other documents of the batch, except for rounding.
    """

    def __init__(self, model: GPT, config: Config, initial_P: Tensor, documents: int) -> None:
        """initial_P: from `initial_adapters`. documents: their number."""
        self.config = config
        self.adamw = model.machine.compile(adamw_step)
        self.steps = 0
        # One row per document, so that a step is a single kernel. At least two rows: see
        # `DocumentScorer.read`.
        self.weights_BP = initial_P.repeat(max(documents, 2), 1)
        self.squares_BP = torch.zeros_like(self.weights_BP)
        self.rounded_BP = self.weights_BP.to(model.compute_dtype, copy=True)  # what the model reads
        # The head's adapters are the last columns of rounded_BP, but a leaf of their own in autograd. As a
        # slice of used_BP, their gradient would first be padded with zeros to the full size.
        self.head_BP: Tensor | None = None

    def use(self, rows: int) -> Tensor:
        """The adapters of the first `rows` documents as a leaf that collects gradients for `step`."""
        self.used_BP = self.rounded_BP[:rows].detach().requires_grad_()
        # Otherwise torch recompiles for every number of documents.
        torch._dynamo.maybe_mark_dynamic(self.used_BP, 0)
        return self.used_BP

    def added_logits(self, hidden_BTD: Tensor) -> Tensor | None:
        """The logits (N, V) that the head's adapters add, for the first documents; None without adapters."""
        c = self.config
        if "head" not in c.lora_targets:
            return None
        size = c.ttt_lora_rank * (c.model_dim + c.vocab_size)
        self.head_BP = self.rounded_BP[: len(hidden_BTD), -size:].detach().requires_grad_()
        (adapters,) = unpack(self.head_BP, adapter_layout(c)[-1:], c)
        return low_rank(hidden_BTD, adapters, "head")["head"].flatten(0, 1)

    @torch.no_grad()
    def step(self, documents: int) -> None:
        """One optimizer step for the first documents, from the gradients of the last backward pass."""
        gradients_BP: Any = self.used_BP.grad
        if gradients_BP is None:  # only the head has adapters
            gradients_BP = torch.zeros_like(self.used_BP)
        if self.head_BP is not None:
            gradients_BP[:documents, -self.head_BP.size(1) :] = self.head_BP.grad
        self.steps += 1
        # With this weight, the running mean is AdamW's second moment after bias correction.
        beta = self.config.ttt_beta2
        newest = self.weights_BP.new_full((), (1 - beta) / (1 - beta**self.steps))
        flat = []
        for rows_BP in (self.weights_BP, self.squares_BP, self.rounded_BP, gradients_BP):
            flat.append(rows_BP[:documents].view(-1))
            torch._dynamo.maybe_mark_dynamic(flat[-1], 0)
        self.adamw(*flat, newest, self.config)


class Chunk(NamedTuple):
    """The same chunk of all documents of a batch. Positions count from the start of a document."""

    documents: Array  # indices of the documents that reach this chunk: the first ones of the batch
    learning: int  # how many of them continue after it, so that training on it is useful
    first: int  # the first token of the window
    start: int  # the first target of the chunk
    stop: int  # the end of both


class DocumentScorer:
    """Score batches of documents chunk by chunk, with adapters that train on the chunks already scored."""

    def __init__(self, model: GPT, tokens: Array, config: Config, ledger: Ledger) -> None:
        """model: with requires_grad off for all its parameters."""
        self.model = model
        self.machine = model.machine
        self.config = config
        self.ledger = ledger
        self.device = self.machine.device
        # Batch size and length vary from chunk to chunk. `read` marks both as dynamic, so that a single graph
        # serves them all.
        self.forward = self.machine.compile(forward_adapted)
        self.initial_P = initial_adapters(model, config)
        # The last chunk may reach beyond the end, and `read` pads to a multiple of 16.
        self.tokens = np.pad(tokens, (0, config.eval_length + 16))
        # Document d has the targets begins[d]..begins[d] + lengths[d]. Its last target is the next BOS.
        starts = document_starts(self.tokens[None, : len(tokens) - 1], replace(config, doc_mask=True))
        self.begins = starts[:-1]
        self.lengths = np.diff(starts)

    def batches(self) -> list[Array]:
        """Batches of document indices, sorted by length: the longest first, across and within batches."""
        longest_first = np.argsort(-self.lengths, kind="stable")
        found = []
        start = 0
        while start < len(longest_first):
            stop = start + self.config.documents_at_once(int(self.lengths[longest_first[start]]))
            found.append(longest_first[start:stop])
            start = stop
        return found

    def batches_of_rank(self) -> list[Array]:
        """The batches of this rank. Each goes to the rank with the least work, before any is scored."""
        loads_tokens = np.zeros(self.machine.world_size)
        overhead_tokens = 8192  # even the smallest pass takes a few milliseconds
        mine = []
        for batch in self.batches():
            rank = int(loads_tokens.argmin())
            for chunk in self.chunks(batch):
                loads_tokens[rank] += len(chunk.documents) * (chunk.stop - chunk.first) + overhead_tokens
            if rank == self.machine.rank:
                mine.append(batch)
        return mine

    def chunks(self, batch: Array, learning: bool = True) -> Iterator[Chunk]:
        """The chunks of a batch, in order.

        Where a chunk ends depends only on its position, never on the length of the document, which a model
        does not know yet. Its window ends with it and is EVAL_SEQ_LEN long, or shorter near the start of the
        document. Without learning, chunks are half a window, so a target has at least half of EVAL_SEQ_LEN as
        context; a batch of documents that are all shorter has one chunk without padding.
        """
        lengths = self.lengths[batch]
        size = self.config.ttt_chunk_size
        if not learning:
            size = min((self.config.eval_length + 1) // 2, int(lengths[0]))
        start = 0
        while start < lengths[0]:
            stop = start + size
            first = max(0, stop - self.config.eval_length)
            continuing = int((lengths > stop).sum())
            yield Chunk(batch[lengths > start], continuing, first, start, stop)
            start = stop

    def score(self, batch: Array, learning: bool = True) -> None:
        """Score the documents of a batch; with `learning`, train their adapters after every chunk."""
        adapters = DocumentAdapters(self.model, self.config, self.initial_P, len(batch))
        for chunk in self.chunks(batch, learning):
            # There is nothing to train for after the last chunk of the longest document.
            learns = learning and chunk.learning > 0
            # Compiled code keeps gradients on, because without them it would be another graph to compile.
            with torch.set_grad_enabled(learns or self.machine.compiled):
                hidden_BCD = self.read(chunk, adapters)
            self.record(chunk, hidden_BCD, adapters)
            if learns:
                self.learn(chunk, hidden_BCD, adapters)

    def read(self, chunk: Chunk, adapters: DocumentAdapters) -> Tensor:
        """The hidden states (B, C, D) that predict the targets of a chunk, each from the tokens before it."""
        # A batch of one row would compile a graph of its own, which takes a minute, so a single document gets
        # two rows.
        documents = chunk.documents
        if self.machine.compiled and len(documents) == 1:
            documents = documents.repeat(2)
        # Triton recompiles its kernels for sizes that are not a multiple of 16, so rows are padded to one.
        length = math.ceil((chunk.stop - chunk.first) / 16) * 16
        positions_T = np.arange(chunk.first, chunk.first + length)
        positions_BT = self.begins[documents, None] + positions_T
        ids_BT = self.tokens[positions_BT].astype(np.int64)
        # Padding comes after the chunk and the document, where causal attention never reads it.
        ends_B1 = np.minimum(self.lengths[documents, None], chunk.stop)
        ids_BT[positions_T >= ends_B1] = BOS_ID
        # For attention, each row is one document.
        row_starts = np.arange(0, ids_BT.size + 1, length, dtype=np.int32)
        starts = starts_to_device(row_starts, self.device)
        inputs_BT = to_device(ids_BT, self.device)
        torch._dynamo.maybe_mark_dynamic(inputs_BT, (0, 1))
        flat_BP = adapters.use(len(documents))
        hidden_BTD = self.forward(self.model, inputs_BT, starts, flat_BP, self.config)
        return hidden_BTD[: len(chunk.documents), chunk.start - chunk.first : chunk.stop - chunk.first]

    @torch.no_grad()
    def record(self, chunk: Chunk, hidden_BCD: Tensor, adapters: DocumentAdapters) -> None:
        """Write the nats of a chunk into the ledger."""
        targets_BC = self.begins[chunk.documents, None] + np.arange(chunk.start, chunk.stop)
        nats_BC = self.nats(hidden_BCD, self.tokens[targets_BC + 1], adapters).double().cpu().numpy()
        for document, nats_C in zip(chunk.documents, nats_BC, strict=True):
            stop = min(chunk.stop, self.lengths[document])
            self.ledger.record(int(self.begins[document]) + chunk.start, nats_C[: stop - chunk.start])

    @torch.enable_grad()
    def learn(self, chunk: Chunk, hidden_BCD: Tensor, adapters: DocumentAdapters) -> None:
        """One training step for the documents that continue, on tokens from the ledger."""
        chunks = [
            self.ledger.scored_tokens(begin + chunk.start + 1, begin + chunk.stop + 1)
            for begin in self.begins[chunk.documents[: chunk.learning]]
        ]
        nats_BC = self.nats(hidden_BCD[: chunk.learning], np.stack(chunks), adapters)
        nats_BC.mean(1).sum().backward()
        adapters.step(chunk.learning)

    def nats(self, hidden_BCD: Tensor, targets_BC: Array, adapters: DocumentAdapters) -> Tensor:
        """The nats (B, C) of targets; the rows are the first documents of the batch.

        Here, and in `WindowScorer._score_batch`, hidden states become probabilities.
        """
        targets_N = to_device(targets_BC.astype(np.int64).flatten(), self.device)
        added_NV = adapters.added_logits(hidden_BCD)
        return self.model.loss_per_token(hidden_BCD.flatten(0, 1), targets_N, added_NV).view(targets_BC.shape)


MERGING_SECONDS = 1e-7  # per target, for ranks to share their scores


def score_documents(model: GPT, tokens: Any, config: Config, clock: ScoreClock) -> Ledger:
    """TTT_MODE=lora (PRs #1530, #1667): in each document, score a chunk, then train adapters on it.

    The model itself does not change, and no document affects another, so the result does not depend on the
    order of the documents. Nothing trains on the last chunk of a document, nor in batches for which the clock
    leaves no time; each rank has its own clock.
    """
    ledger = Ledger(tokens)
    scorer = DocumentScorer(copy.deepcopy(model).requires_grad_(False), tokens, config, ledger)
    clock.repeat({str(batch[0]) for batch in scorer.batches()})
    batches = scorer.batches_of_rank()
    own_targets = sum(int(scorer.lengths[batch].sum()) for batch in batches)
    passes = [len(list(scorer.chunks(batch, learning=False))) for batch in batches]
    # Seconds per chunk in the latest batch with training, and the same per document. Later windows are not
    # longer, but a batch may have more documents, and their adapters take time at any length.
    step_seconds = 0.0
    document_seconds = 0.0
    machine = model.machine
    merging_seconds = MERGING_SECONDS * len(ledger.nats) if machine.world_size > 1 else 0.0
    for number, batch in enumerate(batches):
        started = clock.seconds()
        steps = len(list(scorer.chunks(batch)))
        step_seconds = max(step_seconds, document_seconds * len(batch))
        # Keep enough time to score the remaining batches without training. Without a backward pass, a chunk
        # takes at most half as long.
        needed_seconds = step_seconds * (steps + sum(passes[number + 1 :]) / 2) + merging_seconds
        learning = clock.learns(str(batch[0]), int(scorer.lengths[batch].sum()), needed_seconds)
        scorer.score(batch, learning)
        if learning:
            step_seconds = (clock.seconds() - started) / steps
            document_seconds = step_seconds / len(batch)
            # No step follows the last chunk of a document, and at a learning rate of 0 nothing learns.
            lengths = scorer.lengths[batch]
            has_steps = (lengths > config.ttt_chunk_size) & (config.ttt_lora_lr > 0)
            clock.learned[str(batch[0])] = int(lengths[has_steps].sum())
        clock.log_progress(ledger, own_targets)
    # So far each rank has only the scores of its own documents. Each target has a score on one rank only.
    if machine.world_size > 1:
        own = np.isfinite(ledger.nats)
        sums = torch.from_numpy(np.stack([np.where(own, ledger.nats, 0.0), own])).to(machine.device)
        machine.all_reduce(sums)
        nats, scores = sums.cpu().numpy()
        if (scores != 1).any():
            raise ValueError(f"target {int((scores != 1).argmax())} was not scored by exactly one rank")
        # Consecutive documents of other ranks are recorded at once: every two edges are around some.
        theirs = ~own[scorer.begins]
        edges = np.flatnonzero(np.diff(theirs, prepend=False, append=False))
        for first, after in edges.reshape(-1, 2):
            begin = int(scorer.begins[first])
            stop = int(scorer.begins[after - 1] + scorer.lengths[after - 1])
            ledger.record(begin, nats[begin:stop])
        clock.log_progress(ledger)
    return ledger


# --- only configs/pr549.env, pr785.env and pr1493.env: test-time training of all parameters by SGD ---


def score_chunks(model: GPT, tokens: Any, config: Config, clock: ScoreClock) -> Ledger:
    """TTT_MODE=sgd: score a chunk with sliding windows, then train all parameters of a copy on it.

    Nothing trains on the last chunk, since no score follows it, nor on a chunk for which the clock leaves no
    time.
    """
    machine = model.machine
    ledger = Ledger(tokens)
    learner = copy.deepcopy(model)
    sgd = torch.optim.SGD(learner.parameters(), momentum=config.ttt_momentum)
    scorer = WindowScorer(learner, tokens, config, config.ttt_chunk_tokens, looping=True)
    last = len(scorer.chunks) - 1
    clock.repeat({str(chunk[0, 1]) for chunk in scorer.chunks[:last]})
    learn_seconds = 0.0
    for number, chunk in enumerate(scorer.chunks):
        begin = int(chunk[0, 1])
        end = int(chunk[-1, 2])
        started = clock.seconds()
        ledger.record(begin, scorer.score(chunk))
        scored = clock.seconds()
        needed_seconds = learn_seconds + (scored - started) * (last - number)
        # All ranks train together; the clock of rank 0 decides.
        if number < last and machine.gather(clock.learns(str(begin), end - begin, needed_seconds))[0]:
            # The learning rate follows a half cosine to zero: late chunks have less left to gain.
            falling = 0.5 + 0.5 * math.cos(math.pi * number / last)
            sgd.param_groups[0]["lr"] = config.ttt_lr * falling
            learn(learner, sgd, ledger.scored_tokens(begin, end + 1), config)
            # `learn` takes no step on less than a full sequence.
            has_steps = end - begin >= config.eval_length and config.ttt_epochs > 0 and config.ttt_lr > 0
            clock.learned[str(begin)] = end - begin if has_steps else 0
            machine.wait()
            learn_seconds = clock.seconds() - scored
        clock.log_progress(ledger)
    return ledger


def learn(model: GPT, sgd: torch.optim.SGD, tokens: Array, config: Config) -> None:
    """Train TTT_EPOCHS times on the scored tokens, in full sequences. All ranks call it together."""
    machine = model.machine
    weights = list(model.parameters())
    loss_of = machine.compile(GPT.loss)
    # Sequences overlap by one token: the last target of one is the first input of the next.
    length = config.eval_length
    sequences_NT = torch.from_numpy(tokens.astype(np.int64)).unfold(0, length + 1, length)
    for _ in range(config.ttt_epochs):
        for batch_BT in sequences_NT.split(config.ttt_batch_seqs):
            # Each rank computes its share of the batch, weighted by the size of the share. A rank without one
            # computes some row with weight zero, so that all ranks take the same steps.
            host_ids_BT = batch_BT[machine.rank % len(batch_BT) :: machine.world_size].numpy()
            weight = len(batch_BT[machine.rank :: machine.world_size]) / len(batch_BT)
            ids_BT = to_device(host_ids_BT, machine.device)
            starts = starts_to_device(document_starts(host_ids_BT[:, :-1], config), machine.device)
            sgd.zero_grad()
            with torch.enable_grad():
                loss = loss_of(model, ids_BT[:, :-1], ids_BT[:, 1:], starts)
                (loss * weight).backward()
            # All gradients in one message.
            gradients = gradients_of(weights)
            flat = nn.utils.parameters_to_vector(gradients)
            machine.all_reduce(flat)
            nn.utils.vector_to_parameters(flat, gradients)
            nn.utils.clip_grad_norm_(weights, config.ttt_grad_clip)
            sgd.step()


def score_ttt(model: GPT, tokens: Any, config: Config, clock: ScoreClock | None = None) -> Ledger:
    """Test-time training in the mode of TTT_MODE. The given model is not changed."""
    score = score_documents if config.ttt_mode == "lora" else score_chunks
    return score(model, tokens, config, clock or ScoreClock())


# --- all evaluations ---


def rehearse_evaluation(model: GPT, config: Config, run: Run) -> None:
    """Compile and try all of `evaluate` on made-up tokens, before its clock. All ranks call it together."""
    # First every rank compiles by itself, as if it were alone: sharing the work, it might get no batch.
    alone = copy.deepcopy(model)
    alone.machine = replace(model.machine, rank=0, world_size=1)
    # Four documents of 4, 2, 1 and 1 half windows. With chunks of half a window and two documents per batch,
    # test-time training meets every kind of chunk:
    #   batch 1, chunk 1: both documents train, in a short window
    #            chunk 2: the first one trains, the second one ends; the window is full from here on
    #            chunk 3: the first one is alone and trains
    #            chunk 4: it ends, so nothing trains: one document, scored alone
    #   batch 2, chunk 1: both documents end: two documents, scored alone
    half = (config.eval_length + 1) // 2
    text = np.full(8 * half + 1, BOS_ID + 1, np.uint16)
    text[[0, 4 * half, 6 * half, 7 * half]] = BOS_ID
    with run.phase("rehearse_windows"):
        score_roundtrip(alone, text, config)
        if config.eval_stride:
            score_sliding(alone, text, config)
        score_roundtrip(model, text, config)
    if not config.ttt_enabled:
        return
    with run.phase("rehearse_ttt"):
        if config.ttt_mode == "lora":
            score_ttt(alone, text, replace(config, ttt_chunk_size=half, ttt_batch_size=2))
            # Then a batch on each rank that takes as much memory as the largest ones: those with the longest
            # documents, and those with the most.
            longest = config.eval_length
            shortest = max(1, min(longest, config.micro_batch_tokens // config.most_documents_at_once))
            for length in (longest, shortest):
                most = config.documents_at_once(length)
                if length == longest or most > config.documents_at_once(longest):
                    documents = most * model.machine.world_size
                    document = text[: length + 1]
                    text_of_rank = np.resize(document, documents * len(document) + 1)
                    score_ttt(model, text_of_rank, config)
                    # Once more as if the time were up: then chunks are longer, and nothing trains.
                    score_ttt(model, text_of_rank, config, ScoreClock(limit_seconds=0.0, notice="rehearsal"))
            return
        # A whole chunk to train on, and one more. Only compiled code has to see the real chunk size, which
        # determines the batch sizes of training.
        chunk = config.ttt_chunk_tokens if model.machine.compiled else config.eval_length
        text = np.resize(text, chunk + half + 1)
        score_ttt(model, text, replace(config, ttt_epochs=1, ttt_chunk_tokens=chunk))


def read_modes(config: Config) -> dict[str, int]:
    """`ScoreClock.modes` of the run that made EVAL_ONLY's artifact, so that its score can be reproduced.

    Empty if there is no such file next to the artifact, or if MAX_EVAL_SECONDS=0: then everything is trained
    on. ConfigError for a file that no run wrote.
    """
    path = find_path(config.eval_only).parent / EVAL_MODES
    if not config.eval_only or not config.max_eval_seconds or not path.exists():
        return {}
    try:
        if not path.is_file():
            raise ValueError("not an ordinary file")
        with open(path, "rb") as file:
            modes = json.loads(file.read(1 << 24))
        for part, targets in modes.items():
            if int(part) < 0 or type(targets) is not int or targets < 0:
                raise ValueError(f"part {part}: {targets}, expected a number of targets")
        return dict(modes)
    except Exception as error:  # whatever the bytes are
        raise ConfigError(f"{path}: not the modes of a run ({type(error).__name__}: {error}); copy it again, "
                          "or remove it to let the clock decide") from error


def evaluate(
    model: GPT, config: Config, run: Run, validation: Validation, weights_format: str
) -> dict[str, Score]:
    """Evaluate the reloaded model and log the final lines: the headline metric first, then diagnostics.

    MAX_EVAL_SECONDS applies to the headline metric. Diagnostics get the time that is left, and are skipped if
    it is too short. weights_format: for the log lines, in upstream's words: int6.

    To add a way to score, write a function (model, tokens, config, clock) -> Ledger, add it to `scorers`, and
    call it in `rehearse_evaluation`.
    """
    machine = model.machine
    # In this order. Each evaluation starts from the same weights.
    scorers = {"legal_ttt": score_ttt, "sliding_window": score_sliding, "roundtrip": score_roundtrip}
    if not config.ttt_enabled:
        del scorers["legal_ttt"]
    if not config.eval_stride:
        del scorers["sliding_window"]

    earlier_modes = read_modes(config)
    if earlier_modes:
        run.log(f"legal_ttt: trains on what the run of this artifact trained on, by its {EVAL_MODES}; remove "
                "that file to let the clock decide")
    left_seconds = config.max_eval_seconds or math.inf
    scores: dict[str, Score] = {}
    for name, scorer in scorers.items():
        label = name if name == "legal_ttt" else f"final_{weights_format}_{name}"
        # Sliding windows cannot be cut short when they are the headline metric, so then they have no limit.
        limit = left_seconds if scores or config.ttt_enabled else math.inf
        with run.phase(f"eval_{name}"):
            clock = ScoreClock(run, name, config.val_progress_log_every, limit, earlier_modes)
            ledger = scorer(model, validation.tokens, config, clock)
        seconds = run.phases[f"eval_{name}"]
        left_seconds -= seconds
        if scores and ledger.scored < len(ledger.nats):
            run.log(f"{label} is skipped: it would end after MAX_EVAL_SECONDS={config.max_eval_seconds:g}")
            continue
        # Each rank knows only the modes of its own documents.
        notices = []
        for modes, learned, notice in machine.gather((clock.modes, clock.learned, clock.notice)):
            clock.modes = modes | clock.modes
            clock.learned = learned | clock.learned
            notices += [notice] if notice else []
        if notices and not clock.notice:
            run.log(notices[0])  # the time of rank 0 was not up, but that of another rank was
        score = ledger.score(validation.bytes_total)._replace(learned_tokens=sum(clock.learned.values()))
        run.log(f"{label} val_loss:{score.nats:.4f} val_bpb:{score.bits_per_byte:.4f} "
                f"eval_time:{1e3 * seconds:.0f}ms{validation.mark}\n"
                f"{label}_exact val_loss:{score.nats:.8f} val_bpb:{score.bits_per_byte:.8f} "
                f"scored_tokens:{score.scored_tokens} val_bytes:{score.bytes} "
                f"learned_tokens:{score.learned_tokens}{validation.mark}")
        run.record("final", name=f"{label}_exact", eval_seconds=seconds, **score._asdict())
        if machine.rank == 0 and run.directory is not None:
            # The nats of each document, fp64, with which a later evaluation of that document can be compared.
            begins = np.flatnonzero(validation.tokens[:-1] == BOS_ID)
            try:
                write_atomically(run.path(f"nats_{name}.bin"), np.add.reduceat(ledger.nats, begins).tobytes())
                if clock.modes:
                    write_atomically(run.path(EVAL_MODES), json.dumps(clock.modes).encode())
            except ConfigError as error:
                run.log(f"warning: {error}")  # a full disk costs no score
        scores[name] = score
    return scores


# ============================================================================================================
# QUANTIZE — weights to integers: GPTQ makes up for each rounding error in columns that are rounded later.
# ============================================================================================================

Hessians = dict[tuple[str, int], Tensor]  # (input name, layer) -> (C, C) fp32


@torch.no_grad()
def collect_hessians(model: GPT, batches: Iterable[Batch]) -> Hessians:
    """For every matrix input x (C,), the sum of x xᵀ over the tokens of all ranks' training `batches`.

    All ranks call it together, with the same number of batches. A looped layer sums over all of its passes.
    """
    sums: Hessians = {}

    def observe(input_name: str, layer: int, x: Tensor) -> None:
        x_NC = x.reshape(-1, x.size(-1)).float()
        sums[input_name, layer] = x_NC.T @ x_NC + sums.get((input_name, layer), 0.0)

    for batch in batches:
        model(batch.inputs_BT, batch.starts, observe=observe)
    for total in sums.values():
        model.machine.all_reduce(total)
    return sums


MAX_CODE = 127  # codes are int8 and symmetric around zero
# In eighths of an octave: a column's step is at most 8 times finer or coarser than that of its row.
COLUMN_EXPONENT_MAX = 24


class QuantizedWeights(NamedTuple):
    """A parameter as a bank of N matrices (R, C) of integers.

    An array that you add also needs its shape in `read_artifact`, and files of the new kind another MAGIC.
    """

    codes: Array  # (R, N * C): int8, in steps; with a trellis int16, in half steps
    exponents: Array  # (R, N) int8: log2 of each row's step, times 8
    column_exponents: Array  # (N, C) int8: log2 of each column's factor, times 8


def bank_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape as (matrices, rows, columns): a matrix is a bank of one, a vector is one row."""
    return (1, 1, *shape)[-3:]


def scales_of(exponents: Tensor) -> Tensor:
    """2 ** (exponents / 8). Rounded to fp16, so that it is the same however a machine rounds `exp2`."""
    return torch.exp2(exponents / 8).half().float()


class Quantizer:
    """GPTQ of one parameter (Frantar et al., arXiv 2210.17323; PR #1394).

    It minimizes the change of a layer's output, ‖(W − Q) X‖² = tr((W − Q) H (W − Q)ᵀ), where the columns of X
    are the layer's inputs and H = X Xᵀ is half the Hessian of that loss. With H⁻¹ = Uᵀ U, U upper triangular,
    an error e in column j is repaired best by subtracting (e / U_jj) · U_jk from each later column k.

    1. Sort the columns by their Hessian diagonal, largest first.
    2. Factor the inverse of the damped Hessian. With `column_steps`, give each column its own step.
    3. `quantize`: round column by column, and spread each rounding error over the remaining columns.

    A step is the distance between two neighboring codes. 1 and 2 are done once, 3 for every step that rate
    control tries. A parameter without a Hessian is rounded to nearest.
    """

    def __init__(
        self, name: str, weights: Tensor, parameter: Parameter, hessians: Hessians, config: Config
    ) -> None:
        """name: for messages. hessians: from `collect_hessians`.

        COLUMN_STEPS is the power in `_equalize_columns`; 0 gives all columns the same step, and so does a
        missing Hessian. With TRELLIS=1 the codes of each column of a matrix follow a trellis.
        Raises ArtifactError if weights or Hessians are not finite.
        """
        self.trellis = config.trellis and parameter.quantize_as != ""
        self.nearest = nearest_on_trellis if self.trellis else nearest_code
        self.damping = config.gptq_damping  # grows if a Hessian needs more
        self.weights_NRC = weights.detach().view(bank_shape(parameter.shape))
        self.column_steps = config.column_steps
        self.column_exponents_NC = torch.zeros_like(self.weights_NRC[:, 0], dtype=torch.int8)
        # The unit of a step: the standard deviation of a row, or in small tensors its largest |weight|.
        if parameter.quantize_as:
            self.spreads_NR = self.weights_NRC.std(dim=2)
        else:
            self.spreads_NR = self.weights_NRC.abs().amax(dim=2)
        if not self.weights_NRC.isfinite().all():
            raise ArtifactError(f"{name} is not finite, so no artifact was written; resume from a checkpoint")
        self.round_to_nearest = not (parameter.inputs and hessians)
        if self.round_to_nearest:
            return

        # With two inputs, the first half of the bank reads the first one, the second half the second.
        layers = range(len(self.weights_NRC) // len(parameter.inputs))
        found = [hessians[input_name, layer] for input_name in parameter.inputs for layer in layers]
        h_NCC = torch.stack(found).double()
        if not h_NCC.isfinite().all():
            raise ArtifactError(f"inputs of {name} are not finite, so no artifact was written; resume from a "
                                "checkpoint")

        # Columns with the largest inputs go first, while most columns are left to make up for their errors.
        diagonal_NC = h_NCC.diagonal(dim1=1, dim2=2)
        self.order_NC = diagonal_NC.argsort(dim=1, descending=True, stable=True)
        h_NCC = h_NCC.take_along_dim(self.order_NC[:, :, None], 1).take_along_dim(self.order_NC[:, None], 2)
        mean_N11 = diagonal_NC.mean(dim=1)[:, None, None].clamp(min=1e-30)
        self.upper_NCC = self._inverse_factor(h_NCC, mean_N11)
        if self.column_steps > 0:
            self.column_exponents_NC = self._equalize_columns()
        # A column whose input is always zero has no effect, and zeros cost the fewest bits.
        used_NRC = self.weights_NRC.masked_fill((diagonal_NC == 0)[:, None], 0.0)
        self.used_NRC = used_NRC.take_along_dim(self.order_NC[:, None], 2)

    def _inverse_factor(self, h_NCC: Tensor, mean_N11: Tensor) -> Tensor:
        """Upper Cholesky factors (N, C, C), fp32, of the inverses of the damped Hessians.

        mean_N11: means of the diagonals; `damping` times them is added to the diagonals. Rounding can make a
        Hessian singular. Then the damping grows until the factorization succeeds.
        """
        identity_CC = torch.eye(h_NCC.size(1), device=h_NCC.device)
        while True:
            try:
                lower_NCC = torch.linalg.cholesky(h_NCC + self.damping * mean_N11 * identity_CC)
                return torch.linalg.cholesky(torch.cholesky_inverse(lower_NCC), upper=True).float()
            except torch.linalg.LinAlgError:
                self.damping *= 10

    def _equalize_columns(self) -> Tensor:
        """Column exponents (N, C) that make the columns contribute equally to the loss.

        GPTQ's loss is the sum of (error / U)², where U is the column's diagonal entry in the factor. If all
        columns have the same step, those with a small U dominate it. At a given number of bits, steps
        proportional to U minimize the loss (WaterSIC: Lifar et al., arXiv 2603.04956). A power of U below 1
        relies less on Hessians of few tokens.
        """
        octaves_NC = self.upper_NCC.diagonal(dim1=1, dim2=2).log2()
        # Only ratios matter, because rate control sets the mean.
        octaves_NC = self.column_steps * (octaves_NC - octaves_NC.mean(dim=1, keepdim=True))
        exponents_NC = (8 * octaves_NC).round().clamp(-COLUMN_EXPONENT_MAX, COLUMN_EXPONENT_MAX).char()
        return exponents_NC.take_along_dim(self.order_NC.argsort(dim=1), 1)

    def quantize(self, step: float, clip_steps: float) -> QuantizedWeights:
        """Quantize with this step, in units of each row's spread.

        clip_steps: weights are clipped at this many steps; with column steps (some finer), at MAX_CODE.
        """
        # In eighths of an octave, the step of a row takes one byte.
        exponents_NR = (8 * (self.spreads_NR * step).clamp(min=1e-9).log2()).round().clamp(-127, 127).char()
        scales_NR = scales_of(exponents_NR)
        if self.round_to_nearest:
            values_NCR = (self.weights_NRC / scales_NR[:, :, None]).mT
            steps_NRC = self.nearest(values_NCR.flatten(0, 1), clip_steps).view(values_NCR.shape).mT
        else:
            steps_NRC = self._compensate(scales_NR, clip_steps)
        codes_NRC = (2 * steps_NRC).short() if self.trellis else steps_NRC.char()
        codes_RN = codes_NRC.transpose(0, 1).flatten(1)
        arrays = (codes_RN, exponents_NR.T, self.column_exponents_NC)
        return QuantizedWeights(*(array.cpu().numpy() for array in arrays))

    def _compensate(self, row_scales_NR: Tensor, clip_steps: float) -> Tensor:
        """GPTQ: the weights (N, R, C) in whole or half steps, rounded column by column."""
        work_NRC = self.used_NRC.clone()
        column_scales_NC = scales_of(self.column_exponents_NC.take_along_dim(self.order_NC, 1))
        if self.column_steps > 0:
            clip_steps = MAX_CODE
        for column in range(work_NRC.size(2)):
            scales_NR = row_scales_NR * column_scales_NC[:, column, None]
            values_NR = work_NRC[:, :, column]
            steps_NR = self.nearest(values_NR / scales_NR, clip_steps)
            errors_NR = (values_NR - steps_NR * scales_NR) / self.upper_NCC[:, column, column, None]
            # The remaining columns make up for the error.
            shares_N1C = self.upper_NCC[:, column, None, column:]
            work_NRC[:, :, column:].baddbmm_(errors_NR[:, :, None], shares_N1C, alpha=-1)
            work_NRC[:, :, column] = steps_NR
        # Undo the sorting of the columns.
        return work_NRC.take_along_dim(self.order_NC.argsort(dim=1)[:, None], 2)


def nearest_code(values: Tensor, clip_steps: float) -> Tensor:
    """Round values in steps to the nearest whole step within ±clip_steps; any shape."""
    return values.clamp(-clip_steps, clip_steps).round()


def dequantize(quantized: QuantizedWeights, shape: tuple[int, ...]) -> Tensor:
    """The weights of this shape, fp32 on the CPU."""
    matrices, rows, columns = bank_shape(shape)
    scales_RN1 = scales_of(torch.from_numpy(quantized.exponents)[:, :, None])
    if quantized.codes.dtype == np.int16:
        scales_RN1 /= 2
    weights_RNC = torch.from_numpy(quantized.codes).view(rows, matrices, columns) * scales_RN1
    weights_RNC *= scales_of(torch.from_numpy(quantized.column_exponents))
    return weights_RNC.transpose(0, 1).reshape(shape)


# --- the trellis: codes on two grids, half a step apart -----------------------------------------------------
#
# If weights are rounded one by one, their errors fill a cube, with a mean square of step² / 12. In a ball of
# the same volume it is 1.53 dB lower. No code of the same entropy can gain more; it is worth 0.25 bits per
# parameter.
#
# Trellis-coded quantization gets two thirds of that. A code k means either k or k + ½ steps: it has a shift
# of 0 or 1 half steps. The shift is not stored, because it follows from the codes of the previous rows:
#
#     shift[row + 1] = (code[row] & 1) ^ shift[row - 1] ^ shift[row - 2]
#
# So a code takes as many bits as one of whole steps, and its parity selects the grids of the following rows.
# The shifts of three rows are a state. Dynamic programming finds the path through the trellis of these eight
# states with the least squared error.
# (TCQ: Marcellin and Fischer 1990, with an entropy coder: Fischer and Wang 1992; this code of eight states is
# Ungerboeck's, 1982; on weights, without an entropy coder: Tseng et al., arXiv 2406.11235)

# All shifts return to 0 after this many rows, so that blocks of rows can be searched in parallel. This costs
# 0.01 bits per parameter.
TRELLIS_ROWS = 128


class Trellis:
    """The shifts of an array as it is read row by row. Every column has its own state."""

    def __init__(self, columns: int) -> None:
        self.rows = 0
        # Shifts of the next row, of the row before it and of the row before that.
        self.shift_C = self.before_C = self.before_that_C = np.zeros(columns, np.int64)

    def follow(self, codes_C: Array) -> None:
        """Advance by a row that has these codes."""
        next_shift_C = (codes_C & 1) ^ self.before_C ^ self.before_that_C
        self.before_C, self.before_that_C = self.shift_C, self.before_C
        self.shift_C = next_shift_C
        self.rows += 1
        if self.rows % TRELLIS_ROWS == 0:
            self.shift_C = self.before_C = self.before_that_C = np.zeros_like(next_shift_C)


def half_steps(codes_RC: Array) -> Array:
    """The values of codes (R, C) in half steps: 2 · code + shift, int16."""
    trellis = Trellis(codes_RC.shape[1])
    halves_RC = 2 * codes_RC.astype(np.int16)
    for codes_C, halves_C in zip(codes_RC, halves_RC, strict=True):
        halves_C += trellis.shift_C
        trellis.follow(codes_C)
    return halves_RC


def nearest_path(values_RC: Array, clip_steps: float) -> Array:
    """The path through the trellis nearest to each column of `values_RC` (in steps): half steps, int16.

    values_RC: at most TRELLIS_ROWS rows. Of everything that `half_steps` can return for codes in ±clip_steps,
    the result has the least squared error (Viterbi 1967).
    """
    rows, columns = values_RC.shape
    # The nearest half steps, for each shift and each parity of the code. Codes of one parity are two steps
    # apart; the largest is clip_steps, rounded, or the one below it.
    halves_22RC = np.empty((2, 2, rows, columns), np.float32)
    for shift in range(2):
        for parity in range(2):
            largest = round(clip_steps)
            largest -= (largest + parity) % 2
            codes_RC = 2 * np.rint((values_RC - shift / 2 - parity) / 2) + parity
            halves_22RC[shift, parity] = 2 * np.clip(codes_RC, -largest, largest) + shift
    errors_22RC = np.square(values_RC - 0.5 * halves_22RC)

    # A state is (shift, shift before, shift before that). From each, two branches lead on, one for each next
    # shift, to the state (next shift, shift, shift before). The next shift fixes the parity of the code.
    next_2222, shift_2222, before_2222, before_that_2222 = np.indices((2, 2, 2, 2))
    parity_2222 = next_2222 ^ before_2222 ^ before_that_2222

    # Forward: the least error of all paths to each state, and which of two states the best path came from.
    costs_222C = np.full((2, 2, 2, columns), np.inf, np.float32)
    costs_222C[0, 0, 0] = 0.0
    came_from_R222C = np.empty((rows, 2, 2, 2, columns), bool)
    for row in range(rows):
        # By (next shift, shift, shift before, shift before that): the costs of the states are the same for
        # both next shifts.
        branch_costs_2222C = costs_222C + errors_22RC[shift_2222, parity_2222, row]
        from_0 = branch_costs_2222C[:, :, :, 0]
        from_1 = branch_costs_2222C[:, :, :, 1]
        np.less(from_1, from_0, out=came_from_R222C[row])
        costs_222C = np.minimum(from_0, from_1)

    # Backward: from the best final state, along the branches that led to it.
    path_RC = np.empty((rows, columns), np.int16)
    column = np.arange(columns)
    best_C = costs_222C.reshape(8, columns).argmin(0)
    next_shift, shift, before = np.unravel_index(best_C, (2, 2, 2))
    for row in reversed(range(rows)):
        before_that = came_from_R222C[row, next_shift, shift, before, column].astype(np.int64)
        parity = next_shift ^ before ^ before_that
        path_RC[row] = halves_22RC[shift, parity, row, column]
        next_shift = shift
        shift = before
        before = before_that
    return path_RC


def nearest_on_trellis(values_NR: Tensor, clip_steps: float) -> Tensor:
    """Round values in steps (N, R) to the nearest path, in whole and half steps, of a trellis along R."""
    rows = values_NR.size(1)
    length = min(rows, TRELLIS_ROWS)
    # Pad the last block of rows with zeros, which are dropped after the search.
    padded_NR = F.pad(values_NR, (0, -rows % length))
    # Each block becomes a column of its own, because the shifts restart there.
    blocks_RC = padded_NR.reshape(-1, length).T.cpu().numpy()
    path_CR = torch.from_numpy(nearest_path(blocks_RC, clip_steps).T.astype(np.float32))
    return path_CR.to(values_NR.device).reshape(padded_NR.shape)[:, :rows] / 2


# ============================================================================================================
# CODER — integers to bytes: rANS with an adaptive model of the symbols; knows nothing about networks.
# ============================================================================================================

# rANS (Duda, arXiv 1311.2540) turns a message into one big integer, the state. A symbol with frequency f out
# of SLOTS, whose slots begin at b, makes it
#
#     state = (state // f) * SLOTS + b + state % f
#
# which adds log2(SLOTS / f) bits. To decode, `state % SLOTS` is a slot of that symbol, and
#
#     state = f * (state // SLOTS) + state % SLOTS - b
#
# is the state before it: the last symbol comes out first. Here a state has at most 32 bits, and its low word
# moves to the output before it would have more.
#
# The symbol frequencies of a row are estimated from the previous rows, so no table is stored. Each class of
# columns has its own table, because columns differ in spread. Only integers and float operations that IEEE
# 754 requires to be correctly rounded are used, which gives the same bytes on every machine.
#
# With a trellis, each class has a second table for codes with a shift of half a step. Encoder and decoder
# both know the shift from the previous codes, so it costs nothing.
SLOTS = 1 << 15  # per table; a lane's state has 17 to 32 bits, and is refilled by words of 16 bits
# Lower edges of the classes of columns, in 256ths of a column's mean |code|: four per octave.
CLASS_EDGES = np.array([(4 + quarter) << octave for octave in range(12) for quarter in range(4)])
ALONG_TRELLIS = 128  # a flag in the byte of an array's peak, which itself takes seven bits
# A row costs the same time however short it is, so rows of fewer symbols are coded and learned together.
SYMBOLS_AT_ONCE = 16


class SymbolModel:
    """The probability of each symbol of an array, learned row by row, in the encoder and decoder alike.

    A column's class is determined by the mean |code| of its rows so far. Each class has a table of integer
    frequencies that sum to SLOTS. The tables are concatenated, so that a symbol of table t is entry
    `t * size + symbol`, and its slots begin at `starts[entry]`. A symbol is a code plus the peak.
    """

    def __init__(self, columns: int, peak_byte: int) -> None:
        """peak_byte: the largest |code| of the array, plus ALONG_TRELLIS if it follows a trellis."""
        self.along_trellis = peak_byte >= ALONG_TRELLIS
        self.trellis = Trellis(columns)  # without a trellis, all its shifts stay 0
        peak = peak_byte % ALONG_TRELLIS
        self.peak = peak
        self.size = 2 * peak + 1
        # Along a trellis, each row shifts the next one, so rows are coded one by one.
        self.rows_at_once = 1 if self.along_trellis else max(1, SYMBOLS_AT_ONCE // max(columns, 1))
        values = np.arange(-peak, peak + 1.0)
        if self.along_trellis:
            values = np.stack([values, values + 0.5])
        # Initial counts: Student's t with ν = 7, which has heavier tails than a Gaussian,
        #
        #     64 · (1 + x² / (6σ² + 1.5))^−4,
        #
        # for a value x and the mean |code| σ near the middle of each class. The 1.5 keeps the narrowest
        # classes from being too sure. The power is written as multiplications, because `**` rounds
        # differently on different machines, and their decoders would disagree.
        sigmas = np.append(2.0, CLASS_EDGES * 1.1)[:, None] / 256
        bell = 1.0 / (1.0 + values[..., None, :] * values[..., None, :] / (6.0 * sigmas * sigmas + 1.5))
        self.counts = np.floor(64.0 * bell * bell * bell * bell).astype(np.int64).reshape(-1, self.size)
        self.frequencies = np.empty_like(self.counts)
        self.starts = np.empty_like(self.counts)
        self.divide_slots(np.arange(len(self.counts)))
        # Start as if two rows had been seen, with a mean |code| of a sixth of the peak.
        self.rows = 2
        self.sums_256ths = np.full(columns, 2 * 256 * peak // 6)

    def tables(self) -> tuple[Array, Array, Array]:
        """For the next rows: first entry of each column's table; frequency and first slot of each entry."""
        classes = np.searchsorted(CLASS_EDGES, self.sums_256ths // self.rows, side="right")
        classes += self.trellis.shift_C * (len(CLASS_EDGES) + 1)
        return classes * self.size, self.frequencies.ravel(), self.starts.ravel()

    def learn(self, table_starts: Array, symbols: Array) -> None:
        """Count the rows that were just coded with the tables that begin at `table_starts`."""
        # Counts do not decay, because the rows of a matrix have no order in time.
        entries = (table_starts + symbols).ravel()
        seen = np.bincount(entries, minlength=self.counts.size).reshape(self.counts.shape)
        self.counts += seen
        self.divide_slots(np.flatnonzero(seen.any(1)))
        codes = symbols - self.peak
        self.sums_256ths += 128 * np.abs(2 * codes + self.trellis.shift_C).sum(0)  # half a step is 128
        self.rows += len(codes)
        if self.along_trellis:
            self.trellis.follow(codes[0])

    def divide_slots(self, tables: Array) -> None:
        """Divide the slots of each of these tables among its symbols by their counts, which have changed."""
        # Each symbol gets one slot, so that none is impossible. The others are divided up by the counts.
        counts = self.counts[tables]
        totals = counts.sum(1, keepdims=True)
        frequencies = 1 + counts * (SLOTS - self.size) // totals
        # The slots left over by rounding go to the most frequent symbol of each table.
        unused = SLOTS - frequencies.sum(1)
        frequencies[np.arange(len(tables)), counts.argmax(1)] += unused
        self.frequencies[tables] = frequencies
        self.starts[tables] = SLOTS * tables[:, None] + frequencies.cumsum(1) - frequencies


def encode(arrays: list[Array]) -> bytes:
    """Encode integer arrays (rows, columns): int8 codes in ±MAX_CODE, or int16 `half_steps` of such codes.

    Symbols go to the lanes in turn. Each lane has its own state, so that numpy codes many at once, and costs
    four bytes. The result: `peak_byte` of each array, number of lanes, their states, and the words in the
    order in which they are read.
    """
    lanes = min(16 + sum(array.size for array in arrays) // 16_384, 1024)

    # Forward: the frequency and first slot of each symbol, as the decoder will see them.
    peak_bytes = bytearray()
    coded = []
    for array in arrays:
        codes = array.astype(np.int64)
        kind = 0
        if array.dtype == np.int16:
            codes >>= 1  # drop the shift, which follows from the previous codes
            kind = ALONG_TRELLIS
        peak_bytes.append(kind + np.abs(codes).max(initial=0))
        model = SymbolModel(array.shape[1], peak_bytes[-1])
        for row in range(0, len(codes), model.rows_at_once):
            symbols = codes[row : row + model.rows_at_once] + model.peak
            table_starts, frequencies, starts = model.tables()
            entries = (table_starts + symbols).ravel()
            # 16 bits each, because all of them are kept until the last symbol.
            coded.append((frequencies[entries].astype("u2"), (starts[entries] % SLOTS).astype("u2")))
            model.learn(table_starts, symbols)

    # Backward, because rANS decodes in reverse order.
    states = np.full(lanes, 1 << 16, np.int64)
    words = []
    for row_frequencies, row_starts in reversed(coded):
        for left in reversed(range(0, len(row_starts), lanes)):
            frequencies = row_frequencies[left : left + lanes].astype(np.int64)
            starts = row_starts[left : left + lanes]
            state = states[: len(starts)]
            # Coding multiplies a state by about SLOTS / frequency. If that would exceed 32 bits, first move
            # its low word to the output.
            outgrows = (state >> 17) >= frequencies
            words.append(state[outgrows].astype("<u2").tobytes())
            state >>= np.where(outgrows, 16, 0)
            # Float division is several times faster, and exact enough here: a quotient is below 2**32, and at
            # least 2**-15 away from a whole number if it is not one.
            quotients = (state / frequencies).astype(np.int64)
            # (state // f) * SLOTS + b + state % f, with state % f written as state - (state // f) * f.
            state += quotients * (SLOTS - frequencies) + starts
    head = peak_bytes + lanes.to_bytes(2, "little") + states.astype("<u4").tobytes()
    return b"".join([head, *reversed(words)])


def decode(data: bytes, shapes: list[tuple[int, int]]) -> list[Array]:
    """Inverse of `encode` for arrays of these shapes (rows, columns): int8 codes, or int16 half steps.

    Raises ValueError if the data ends too early, too late, or in the wrong state.
    """
    peak_bytes = data[: len(shapes)]
    rest = data[len(shapes) :]
    lanes = int.from_bytes(rest[:2], "little")
    states = np.frombuffer(rest, "<u4", lanes, 2).astype(np.int64)
    words = np.frombuffer(rest[2 + 4 * lanes :], "<u2").astype(np.int64)
    used = 0  # words
    arrays = []
    for (rows, columns), peak_byte in zip(shapes, peak_bytes, strict=True):
        array = np.empty((rows, columns), np.int64)
        model = SymbolModel(columns, peak_byte)
        for row in range(0, rows, model.rows_at_once):
            symbols_RC = array[row : row + model.rows_at_once]
            table_starts, frequencies, starts = model.tables()
            symbols = symbols_RC.reshape(-1)  # a view: what is decoded here fills the array
            first_entries = np.tile(table_starts, len(symbols_RC))
            for left in range(0, len(symbols), lanes):
                first = first_entries[left : left + lanes]
                state = states[: len(first)]
                # The low bits of a state are a slot of the column's table, which belongs to one symbol.
                slots = starts[first] + state % SLOTS
                entries = starts.searchsorted(slots, side="right") - 1
                symbols[left : left + lanes] = entries - first
                # Undo the encoder's update: the states before these symbols.
                state[:] = frequencies[entries] * (state // SLOTS) + slots - starts[entries]
                low = np.flatnonzero(state < 1 << 16)
                state[low] = (state[low] << 16) + words[used : used + len(low)]
                used += len(low)
            model.learn(table_starts, symbols_RC)
        codes = (array - model.peak).astype(np.int8)
        arrays.append(half_steps(codes) if model.along_trellis else codes)
    if used != len(words) or (states != 1 << 16).any():
        raise ValueError("the words do not end where the arrays end")
    return arrays


# ============================================================================================================
# ARTIFACT — a model to bytes and back; code and file together fill ARTIFACT_BYTES_MAX and never exceed it.
# ============================================================================================================

COARSEST_STEP = 2.0  # standard deviations of a row; two thirds of the codes are zero then
# Small tensors get 8 bits. With this step, their largest weight is within MAX_CODE steps even if rounding the
# exponent has made the step smaller by a factor of 2 ** (1 / 16).
SMALL_STEP = 1 / 120
# The factors on all steps that rate control can choose from. Neighbors differ by 2 kB in a file of 36M
# parameters.
MULTIPLIERS = 2.0 ** np.arange(-7, 12, 1 / 2048)


def step_and_clip(parameter: Parameter, config: Config, multiplier: Any) -> tuple[Any, Any]:
    """The quantization step of a parameter, in units of a row's spread, and the clip in steps.

    The spread is the standard deviation of a matrix row, or the largest |weight| of a small tensor's row.
    multiplier: factor on the configured step, or an array of factors. The step is never finer than that of 8
    bits, nor coarser than COARSEST_STEP unless configured so. Small tensors always get 8 bits.
    """
    if not parameter.quantize_as:
        return SMALL_STEP, MAX_CODE
    # Clip and bits are as published; rate control then scales the step.
    clip = getattr(config, f"{parameter.quantize_as}_clip_sigmas")
    bits = config.embed_bits if parameter.quantize_as == "embed" else config.matrix_bits
    configured = clip / (2 ** (bits - 1) - 1)
    step = np.clip(multiplier * configured, clip / MAX_CODE, max(configured, COARSEST_STEP))
    return step, clip / step


def expected_bytes(config: Config, multiplier: Any) -> Any:
    """An estimate of the file size: 1,000 bytes plus ½·log2(1 + 2πe/step²) bits per parameter.

    That is roughly the entropy of a standard Gaussian that is rounded with this step. multiplier: as in
    `step_and_clip`; an array of them gives an array of sizes.
    """
    total = 1000.0
    for parameter in parameter_table(config).values():
        step, _ = step_and_clip(parameter, config, multiplier)
        bits = 0.5 * np.log2(1 + 2 * math.pi * math.e / step**2)
        total += math.prod(parameter.shape) * bits / 8
    return total


def max_parameters(coded_bytes: int) -> int:
    """The most parameters that a file may claim to hold, which bounds the memory that a bad one can take.

    4M parameters (16 MiB), and 64 more per byte, which is an eighth of a bit each. The default has 2.3 per
    byte.
    """
    return (1 << 22) + 64 * coded_bytes


def check_size(size_bytes: int, budget: int) -> None:
    """ArtifactError if a file exceeds `budget`, the bytes that the code leaves of ARTIFACT_BYTES_MAX."""
    if size_bytes > budget:
        raise ArtifactError(
            f"the artifact takes {size_bytes} bytes, but ARTIFACT_BYTES_MAX leaves {budget} for it after the "
            f"code: {size_bytes - budget} bytes too many; lower MODEL_DIM, raise ARTIFACT_BYTES_MAX or set "
            "RATE_CONTROL=1")


def check_budget(config: Config, budget: int) -> None:
    """ArtifactError, before training is paid for, if even the coarsest file should exceed `budget` bytes."""
    coarsest = MULTIPLIERS[-1] if config.rate_control else 1.0
    # Trained weights are not exactly Gaussian: a file with an estimate 5% too large may still fit.
    check_size(round(expected_bytes(config, coarsest) / 1.05), budget)


def fill_budget(config: Config, budget: int, make_file: Callable[[float], bytes]) -> tuple[bytes, str]:
    """Search for the finest steps whose file fits `budget` bytes. Returns the file and a note for the log.

    budget: the bytes that the code leaves of ARTIFACT_BYTES_MAX. make_file: makes the file for a factor on
    all steps. This is a secant search: a straight line through the last two passes (at first through zero)
    predicts the estimated size at which the true size is right. It stays between the factors known to be too
    fine and too coarse. Once a file fits, the search ends after ten passes, or when at most 0.05% of
    ARTIFACT_BYTES_MAX is unused. Raises ArtifactError if nothing fits.
    """
    multipliers = MULTIPLIERS if config.rate_control else np.ones(1)
    expected = expected_bytes(config, multipliers)  # decreasing, from the finest to the coarsest
    enough = budget - 5e-4 * config.artifact_bytes_max
    aim = (budget + enough) / 2
    finest = 0  # index of the first factor that is not known to be too fine
    coarsest = len(multipliers) - 1  # index of the last one that is not known to fit
    best = b""
    note = ""
    passes = 0
    wanted = aim  # estimated size of the next file
    expected_before = 0.0
    true_before = 0
    while finest <= coarsest and (not best or (len(best) < enough and passes < 10)):
        # The finest factor whose estimate is not above `wanted`, among those that have not been decided.
        at = int(np.clip(np.count_nonzero(expected > wanted), finest, coarsest))
        data = make_file(multipliers[at])
        passes += 1
        # Sizes are noisy, so two passes close to each other could give any slope: bound it.
        slope = (expected[at] - expected_before) / ((len(data) - true_before) or 1)
        wanted = expected[at] + (aim - len(data)) * np.clip(slope, 0.2, 2.0)
        expected_before = expected[at]
        true_before = len(data)
        if len(data) > budget:
            finest = at + 1
        else:
            coarsest = at - 1
            best = data
            note = f"step_multiplier:{multipliers[at]:.4f}"
    check_size(len(best or data), budget)
    return best, f"{note} passes:{passes}"


MAGIC = b"\x89PGA\r\n\0\5"  # the last byte is the version
# Magic, size of the header, CRC-32 of it and of the coded weights, which follow.
HEAD = struct.Struct("<8s3I")


def write_artifact(
    model: GPT, config: Config, hessians: Hessians, tokenizer_sha256: str, budget: int
) -> tuple[bytes, str]:
    """Quantize and encode a model. Returns a file of at most `budget` bytes and a line for the log.

    With RATE_CONTROL=1 it fills the budget; with 0, bits and clips are as configured. hessians: from
    `collect_hessians`; without any, everything is rounded to nearest. tokenizer_sha256: scoring checks its
    tokenizer against it. Raises ArtifactError if nothing fits, or if weights are not finite.
    """
    table = parameter_table(config)
    header = {"config": config.as_env(ModelSettings), "tokenizer_sha256": tokenizer_sha256}
    packed_header = zlib.compress(json.dumps(header).encode(), 9)
    quantizers = {}
    damped = ""
    for name, weights in model.named_parameters():
        quantizer = Quantizer(name, weights, table[name], hessians, config)
        quantizers[name] = quantizer
        if quantizer.damping != config.gptq_damping:
            damped += f" warning: {name}: its Hessian was singular below GPTQ_DAMPING={quantizer.damping:g}"

    def make_file(multiplier: float) -> bytes:
        arrays: list[Array] = []  # column exponents that are all zero take one byte
        for name, quantizer in quantizers.items():
            arrays += quantizer.quantize(*step_and_clip(table[name], config, multiplier))
        coded = encode(arrays)
        head = HEAD.pack(MAGIC, len(packed_header), zlib.crc32(packed_header), zlib.crc32(coded))
        return head + packed_header + coded

    data, note = fill_budget(config, budget, make_file)
    return data, f"artifact_bytes:{len(data)} budget_bytes:{budget} {note}{damped}"


class ArtifactInfo(NamedTuple):
    """Everything about an artifact besides its model."""

    config: dict[str, str]  # the model's settings
    tokenizer_sha256: str
    bytes: int
    sha256: str


def load_artifact(
    path: Path, data: bytes | None = None, is_ours: bool = False
) -> tuple[GPT, ArtifactInfo]:
    """The model of an artifact, on the CPU. Nothing in the file is executed.

    data: contents of the file, for a rank that cannot see it; None reads `path`. is_ours: this run has just
    made the file. A file from elsewhere can only ask for memory in proportion to its size, by
    `max_parameters`. Raises ArtifactError, and nothing else, whatever the contents are.
    """
    try:
        if data is None:
            if path.exists() and not path.is_file():
                raise ValueError("expected a regular file, got a directory, pipe or device")
            data = path.read_bytes()
        header, banks = read_artifact(data, is_ours)
        model = GPT(ModelSettings.from_values(header["config"]), seed=None)
        for name, weights in model.named_parameters():
            weights.data.copy_(dequantize(banks[name], weights.shape))
            if not weights.isfinite().all():
                raise ValueError(f"{name} is not finite")
        sha256 = hashlib.sha256(data).hexdigest()
        return model, ArtifactInfo(header["config"], header["tokenizer_sha256"], len(data), sha256)
    except Exception as error:  # whatever the bytes are
        raise ArtifactError(f"{path}: expected the {ARTIFACT} of a run: {error}") from error


def read_artifact(
    data: bytes, is_ours: bool = False
) -> tuple[dict[str, Any], dict[str, QuantizedWeights]]:
    """The header and the quantized parameters of a file. ValueError and other exceptions if it is bad."""
    if not data.startswith(MAGIC):
        raise ValueError("not an artifact, or one of version 0.6 or older; use the train_gpt.py of its run")
    _, header_bytes, *checksums = HEAD.unpack_from(data)
    # Check that the file is intact before interpreting anything.
    packed_header = data[HEAD.size : HEAD.size + header_bytes]
    coded = data[HEAD.size + header_bytes :]
    if checksums != [zlib.crc32(packed_header), zlib.crc32(coded)]:
        raise ValueError("truncated or damaged; copy the file again")
    unpacker = zlib.decompressobj()
    header = json.loads(unpacker.decompress(packed_header, 1 << 16))
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("its header does not end where it should")
    if not re.fullmatch(SHA256_OR_NOTHING, header["tokenizer_sha256"]):
        raise ValueError("tokenizer_sha256 is not a SHA-256")
    settings = ModelSettings.from_values(header["config"])
    if settings.as_env() != header["config"]:
        raise ValueError("this script has different settings; use the train_gpt.py of its run")
    # A bad header could ask for any amount of memory.
    parameters = count_parameters(settings)
    if parameters > max_parameters(len(coded)) and not is_ours:
        raise ValueError(f"{parameters} parameters are more than {len(coded)} bytes can hold")
    table = parameter_table(settings)
    shapes = []
    for parameter in table.values():
        matrices, rows, columns = bank_shape(parameter.shape)
        shapes += [(rows, matrices * columns), (rows, matrices), (matrices, columns)]
    arrays = iter(decode(coded, shapes))
    banks = {name: QuantizedWeights(next(arrays), next(arrays), next(arrays)) for name in table}
    return header, banks


SETTINGS_OF_A_START = ("RUN_ID", "RESUME", "RESUME_OTHER_CODE", "EVAL_ONLY")  # each start has its own
WHERE_A_RUN_WRITES = (*SETTINGS_OF_A_START, "RUNS_DIR")
# The wrapper of a shipped script unpacks its source. It is latin-1, which has a character for every byte.
WRAPPER = """# coding: latin-1
SHIPPED_SETTINGS={}
import bz2,linecache
s=bz2.decompress('''%s'''.encode("latin-1")).decode()
n=__file__+"~"
linecache.cache[n]=len(s),None,s.splitlines(True),n
exec(compile(s,n,"exec"))
"""
# What a wrapper's string literal cannot contain verbatim, in order of replacement. An octal digit after \0
# would become part of the escape. Three quotes, or one at the very end, would end the literal.
ESCAPES = {r"\\": r"\\\\", "\r": r"\\r", "\0(?=[0-7])": r"\\x00", "\0": r"\\0", r"'(?=''|\Z)": r"\\'"}


def shipped_code(source: bytes) -> bytes:
    """The script as it is shipped and counted: compressed, without comments and docstrings.

    A script that is already wrapped is returned unchanged.
    """
    if source.startswith(WRAPPER.split("{")[0].encode()):
        return source
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    # The first = of a line needs no spaces around it; after a quote, it may be inside a string. At this size,
    # the output of bzip2 is 3% smaller than that of LZMA.
    code = re.sub(r"(?m)^([^'\"\n]*?) = ", r"\1=", ast.unparse(tree))
    packed = bz2.compress(code.encode()).decode("latin-1")
    for pattern, escape in ESCAPES.items():
        packed = re.sub(pattern, escape, packed)
    return (WRAPPER % packed).encode("latin-1")


def with_settings(shipped: bytes, config: Config) -> bytes:
    """A shipped script with the settings of `config` as its defaults, replacing any it had before.

    SEED and whatever belongs to a single start are left out, so that all seeds of a record ship one script.
    """
    settings = config.overrides()
    for name in (*WHERE_A_RUN_WRITES, "SEED", "FOREIGN_NAMES"):
        settings.pop(name, None)
    # A function, because backslashes in a replacement string would be expanded.
    return re.sub(rb"(?<=SHIPPED_SETTINGS=).*", lambda _: ascii(settings).encode(), shipped)


# ============================================================================================================
# TRAIN — steps until the time limit; rank 0 reads the clock for all, so all ranks stop after the same step.
# ============================================================================================================


class StepResult(NamedTuple):
    """Loss and gradient norm of a step, possibly still being copied to the host."""

    step: int  # the first is 1
    progress: float
    lr_scale: float
    loss_and_norm: Tensor  # (2,): mean loss of this rank, gradient norm
    copied: torch.cuda.Event | None  # when `loss_and_norm` has arrived; None: it has
    wait_ms: float  # time the host waited for the step's batches


@dataclass
class Training:
    """The model, optimizer, data loader and clock of a run: everything that a step touches."""

    config: Config
    run: Run
    shards: list[Shard]
    validation: Validation
    ops: Ops
    hashes: dict[str, str]  # SHA-256 of code, tokenizer and shards; saved in checkpoints

    def __post_init__(self) -> None:
        config = self.config
        run = self.run
        machine = run.machine
        self.model = ready_model(build_model(config), machine, self.ops)
        # A single graph from tokens to loss.
        self.loss = machine.compile(GPT.loss)
        self.optimizer = Optimizer(self.model, config, machine)
        profiler = torch.profiler.profile() if config.profile_steps else None
        self.trace = Trace(config.traced_steps, run.directory, machine.rank, run.log, profiler)
        self.timer = StepTimer(
            config.training_timing_every if config.training_timing_breakdown else 0,
            machine.on_gpu, self.trace)
        self.loader = Loader(config, self.shards, machine, self.trace)
        self.step = 0
        self.unread: list[StepResult] = []  # oldest first
        self.waits_ms: list[float] = []  # for batches, one per step since the last train line
        self.started = time.perf_counter()  # moved forward by the time that does not count as training
        self.val_seconds = 0.0  # of all validations since the process started

    @property
    def seconds(self) -> float:
        """Seconds of training, without validation and saving."""
        return time.perf_counter() - self.started

    def stream_hash(self) -> int:
        """The stream hash of all ranks' batches; all ranks call it together."""
        return sum(self.run.machine.gather(self.loader.stream_hash)) % 2**64

    def state(self) -> dict[str, Any]:
        """A copy of everything that training changes, for any world size; all ranks call it together."""
        return {
            "config": self.config.as_env(TrainingSettings),
            "hashes": self.hashes,
            "dtype": dtype_name(self.run.machine.dtype),
            "step": self.step,
            "seconds": self.seconds,
            "stream_hash": self.stream_hash(),
            "optimizer": self.optimizer.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; all ranks call it together."""
        self.optimizer.load_state(state["optimizer"])
        self.step = state["step"]
        # The hash is a sum over the ranks, so a single rank restores it.
        stream_hash = state["stream_hash"] if self.run.machine.rank == 0 else 0
        self.loader.seek(self.step, stream_hash)
        # The clock starts once all ranks have their first batch and all devices are idle.
        self.loader.stage_first()
        self.run.machine.wait()
        self.run.machine.gather(None)
        self.started = time.perf_counter() - state["seconds"]

    def save(self) -> None:
        """Replace the checkpoint, off the clock. A failure is logged and does not end the run.

        All ranks call it together, after `read_results`; rank 0 writes.
        """
        start = time.perf_counter()
        state = self.state()
        try:
            if self.run.machine.rank == 0:
                if not all(weights.isfinite().all() for weights in state["optimizer"]["weights"]):
                    raise ConfigError("its weights are not finite")
                path = self.run.path(CHECKPOINT)
                write_atomically(path, torch_file(state))
                self.run.log(f"checkpoint:{path} step:{self.step}")
        except (ConfigError, MemoryError, RuntimeError) as error:  # torch: out of memory on host or GPU
            self.run.log(f"warning: no checkpoint at step {self.step}, an earlier one is kept: {error!r}")
        self.started += time.perf_counter() - start


def torch_file(value: Any) -> bytes:
    """The bytes that torch.save would write to a file."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as COMPUTE_DTYPE names it."""
    return f"{dtype}".removeprefix("torch.")


def read_checkpoint(config: Config, hashes: dict[str, str], dtype: torch.dtype) -> dict[str, Any]:
    """The state of the run that RESUME names; empty without RESUME. No code in the file is executed.

    dtype: of the activations here. ConfigError if the checkpoint cannot be read, or if training settings,
    dtype, data or code have changed since. RESUME_OTHER_CODE allows changed code; `hashes` then gets the hash
    of the earlier code, too.
    """
    if not config.resume:
        return {}
    path = find_path(config.resume) / CHECKPOINT
    if not path.exists():
        raise ConfigError(f"RESUME: there is no {path}: the run has finished, or it ended before its first "
                          "checkpoint; start it again under another RUN_ID")
    try:
        # torch.load does not verify checksums. A flipped bit in the weights would show up hundreds of steps
        # later, or never.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"damaged: the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
        then = {**state["config"], **state["hashes"]}
    except Exception as error:  # whatever the bytes are
        reason = f"{error}" if isinstance(error, zipfile.BadZipFile) else type(error).__name__
        raise ConfigError(
            f"RESUME: {path} cannot be read ({reason}); if it was copied, copy it again. Checkpoints of "
            "0.5.4 and older need that version") from error
    now = {**config.as_env(TrainingSettings), **hashes}
    changed = [name for name in then | now if then.get(name) != now.get(name)]
    # A bug in a log line must not cost a paid training run. But then every record names both scripts, since
    # the combined hash is that of no script.
    if changed == ["code"] and config.resume_other_code:
        hashes["code"] += f" after {then['code']}"
    elif changed:
        named = ", ".join(f"{name} is {now.get(name)} but was {then.get(name)}" for name in changed)
        script = shlex.quote(f"{path.parent}/train_gpt.py")
        raise ConfigError(f"RESUME={config.resume}: {named}; run {script} with no other "
                          "settings. RESUME_OTHER_CODE=1 allows another script and is recorded")
    # COMPUTE_DTYPE=auto can mean something else on another machine. Older checkpoints do not say.
    dtype_then = state.get("dtype", dtype_name(dtype))
    if dtype_then != dtype_name(dtype):
        raise ConfigError(f"RESUME={config.resume}: activations are in {dtype_name(dtype)} here, but were in "
                          f"{dtype_then} when the run began; set COMPUTE_DTYPE={dtype_then}")
    return state


def fail_together(machine: Machine, failure: DataError | None) -> None:
    """Raise DataError on all ranks if one of them got no batch; all ranks call it together.

    This happens before gradients are exchanged, so the weights are still those of the previous step.
    """
    anywhere = failure is not None
    if machine.world_size > 1:
        failures = torch.tensor([anywhere], dtype=torch.float64)
        machine.all_reduce(failures)
        anywhere = failures.item() > 0
    if failure is not None:
        raise failure
    if anywhere:
        raise DataError("another rank got no batch; it prints the reason")


def train_step(training: Training, progress: float) -> Tensor:
    """One optimizer step. Returns this rank's mean loss and the gradient norm (2,), still on the device.

    progress: fraction of the run that is over. DataError on all ranks if one of them gets no batch; then no
    weight has changed.
    """
    config = training.config
    loader = training.loader
    timer = training.timer
    looping = loop_is_on(progress, config)  # the same on all ranks, as progress is
    # The sum of the losses stays on the device, so that the host does not wait for it.
    total = torch.zeros((), device=training.run.machine.device)
    # Warmup steps have no number and are neither timed nor traced.
    timer.begin(training.step + 1 if training.run.training else 0)
    hash_before = loader.stream_hash
    failure = None
    for _ in range(loader.micro_steps):
        try:
            batch = loader.next_batch()
        except DataError as error:
            failure = error
            break
        timer.lap("batch", batch.copy)
        loss = training.loss(training.model, batch.inputs_BT, batch.targets_BT, batch.starts, looping)
        # Gradients add up over micro-batches, so each loss is divided by their number.
        loss = loss / loader.micro_steps
        timer.lap("forward")
        loss.backward()
        timer.lap("backward")
        total += loss.detach()
    try:
        fail_together(training.run.machine, failure)
    except DataError:
        loader.stream_hash = hash_before  # only steps that were taken count
        raise
    lr_scale = learning_rate_scale(progress, training.step, config)
    momentum = muon_momentum(progress, training.step, config)
    norm = training.optimizer.step(lr_scale, momentum, training.step, timer.lap)
    timer.lap("optimizer")
    line = timer.end(loader.stage_ms, loader.micro_steps)
    if line:
        training.run.log(line)
    return torch.stack([total, norm])


def rehearse_end(training: Training) -> None:
    """Run everything that follows training once, on the initial weights. All ranks call it together.

    Whatever would fail after a paid training run fails here instead, and is compiled here. Each part is a
    phase of its own. `warm_up` undoes it.
    """
    config = training.config
    run = training.run
    machine = run.machine
    hessians: Hessians = {}
    if config.gptq:
        # The first batch loads kernels; the second one shows how long a batch takes.
        for part in ("rehearse_hessians", "rehearse_calibration_batch"):
            with run.phase(part):
                hessians = collect_hessians(training.model, [training.loader.next_batch()])
        batches = math.ceil(config.gptq_calibration_batches / machine.world_size)
        seconds = batches * run.phases["rehearse_calibration_batch"]
        # `calibration_batches` keeps a tenth of the reserve as a margin.
        if config.max_wallclock_seconds > 0 and seconds > 0.9 * config.gptq_reserve_seconds:
            run.log(f"warning: GPTQ_RESERVE_SECONDS={config.gptq_reserve_seconds:g} is too short for "
                    f"{batches} calibration batches ({seconds:.2f} s, plus a margin of 10%); will use fewer")
    with run.phase("rehearse_artifact"):
        data = b""
        if machine.rank == 0:
            # A single pass of any size: no search for the size that fits.
            data, _ = write_artifact(
                training.model, replace(config, rate_control=False), hessians, "", sys.maxsize)
        model, _ = load_artifact(Path("rehearsal"), machine.gather(data)[0], is_ours=True)
        ready_model(model, machine, training.model.ops)
    rehearse_evaluation(model, config, run)
    if machine.on_gpu:
        # Training starts with the memory as if nothing had happened.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def warm_up(training: Training, resumed: dict[str, Any] | None = None) -> None:
    """Unless WARMUP_STEPS is 0: rehearse the end, then compile each training graph with that many real steps.

    Finally restore the exact initial state, or load `resumed`.
    """
    config = training.config
    run = training.run
    after = resumed or training.state()
    if config.warmup_steps > 0:
        rehearse_end(training)
    # There are two training graphs if recurrence turns on during the run, else one.
    stages = [0.0]  # as fractions of the run
    if loop_is_on(config.enable_looping_at, config) and not loop_is_on(0.0, config):
        stages.append(config.enable_looping_at)
    for progress in stages:
        training.loader.seek(0)
        with run.phase("warmup"):
            for number in range(1, config.warmup_steps + 1):
                train_step(training, progress)
                run.log(f"warmup_step:{number}/{config.warmup_steps} "
                        f"looping:{loop_is_on(progress, config):d}")
    training.load_state(after)
    if resumed:
        run.log(f"resumed:{run.directory} step:{training.step} "
                f"train_time:{1e3 * resumed['seconds']:.0f}ms code:{training.hashes['code']}")


def train(training: Training) -> None:
    """Train until the time limit or ITERATIONS. After a signal, save a checkpoint and end the process."""
    config = training.config
    run = training.run
    machine = run.machine
    every = config.checkpoint_every_seconds
    # The host runs at most this many steps ahead of a GPU, so that the GPU always has work.
    steps_ahead = 2 if machine.on_gpu else 0
    seconds = machine.gather(training.seconds)[0]  # by the clock of rank 0
    first_step = training.step
    recent_seconds: deque[float] = deque(maxlen=20)  # of the latest steps
    if first_step:
        recent_seconds.append(seconds / first_step)  # a resumed run begins with the mean so far
    progress = run_progress(seconds, training.step, config)
    run.training = True
    while True:
        before = seconds
        # The clock of rank 0, and whether any rank has caught a signal: a sum over ranks, on the host, so no
        # rank waits for its device. `gather` pickles, which takes eight ranks milliseconds per step.
        agreed = torch.tensor([training.seconds, run.stop_signal], dtype=torch.float64)
        if machine.rank != 0:
            agreed[0] = 0.0
        machine.all_reduce(agreed)
        seconds, caught = agreed.tolist()
        if training.step > first_step:
            recent_seconds.append(seconds - before)
        # The next step must end in time, and so must the steps still queued on the device, with one to spare.
        queued = len(training.unread) if machine.on_gpu else 0
        ends_at = seconds + (queued + 2) * slow_step_seconds(recent_seconds)
        stop = caught != 0 or run_progress(ends_at, training.step, config) >= 1
        # The end of training is always saved, so that whatever fails later can be repeated from there. Before
        # that, save when another multiple of CHECKPOINT_EVERY_SECONDS has passed since the last step.
        save_now = stop or (every > 0 and seconds // every > before // every)
        validate_now = config.val_loss_every > 0 and (stop or training.step % config.val_loss_every == 0)

        # Before the weights are saved or evaluated, or the run ends, all steps must have been checked.
        read_results(training, leave=0 if save_now or validate_now else steps_ahead)
        if save_now:
            training.save()
        if validate_now and caught == 0:
            validate(training, f"step:{training.step}/{config.iterations}", loop_is_on(progress, config))
        if stop:
            break

        progress = run_progress(seconds, training.step, config)
        lr_scale = learning_rate_scale(progress, training.step, config)
        try:
            loss_and_norm = train_step(training, progress).to("cpu", non_blocking=True)
        except DataError:
            # A shard was truncated or removed. Training so far is sound and can resume once it is back.
            read_results(training, leave=0)
            training.save()
            machine.gather(None)  # torchrun kills the other ranks as soon as one exits
            raise
        copied = torch.cuda.current_stream().record_event() if machine.on_gpu else None
        training.step += 1
        # Read it now: when the result is read, later steps will have added to it.
        wait_ms = training.loader.wait_ms
        training.loader.wait_ms = 0.0
        training.unread.append(StepResult(training.step, progress, lr_scale, loss_and_norm, copied, wait_ms))
    end_training(training)


def slow_step_seconds(recent_seconds: Iterable[float]) -> float:
    """What the next steps may take: as long as the slowest recent one but one.

    The slowest may have stalled, on a disk for example, which says nothing about the next steps.
    """
    slowest = sorted(recent_seconds)[-2:]
    return slowest[0] if slowest else 0.0


def end_training(training: Training) -> None:
    """After the last step, which has been saved: end the process if there was a signal."""
    run = training.run
    run.training = False  # from here on, a signal ends the process at once
    caught = max(run.machine.gather(run.stop_signal))
    training.trace.finish()
    if caught != 0:
        run.machine.gather(None)  # torchrun kills the other ranks as soon as one exits
        run.log(f"stopped by signal {caught}; {run.how_to_continue()}")
        os._exit(128 + caught)
    if training.step < training.config.iterations:
        run.log(f"stopping_early: wallclock_cap train_time:{1e3 * training.seconds:.0f}ms "
                f"step:{training.step}/{training.config.iterations}")


def read_results(training: Training, leave: int) -> None:
    """Check and log all steps except the newest `leave`, for which the host would have to wait.

    FloatingPointError if a loss or gradient norm is not finite. All ranks call it together.
    """
    machine = training.run.machine
    while len(training.unread) > leave:
        result = training.unread.pop(0)
        if result.copied is not None:
            result.copied.synchronize()
        # The mean over ranks: if the loss of one rank is not finite, all end with the same message.
        values = result.loss_and_norm.double()
        machine.all_reduce(values)
        loss, norm = (values / machine.world_size).tolist()
        if not math.isfinite(loss + norm):
            raise FloatingPointError(
                f"step {result.step}, batch at token "
                f"{training.config.train_batch_tokens * (result.step - 1)}: train_loss {loss}, grad_norm "
                f"{norm}; lower MATRIX_LR and the other learning rates, or GRAD_CLIP_NORM")
        log_step(training, result, loss, norm)


def log_step(training: Training, result: StepResult, loss: float, norm: float) -> None:
    """Record a step in metrics.jsonl and, if a line is due, log it in upstream's format."""
    config = training.config
    step = result.step
    seconds = training.seconds
    tokens = config.train_batch_tokens * step
    training.run.record(
        "train", step=step, train_loss=loss, train_time_ms=1e3 * seconds, tokens=tokens, grad_norm=norm,
        progress=result.progress, data_wait_max_ms=result.wait_ms)
    training.waits_ms.append(result.wait_ms)
    step_ms = 1e3 * seconds / step
    progress = run_progress(seconds, step, config)
    run_seconds = seconds / progress  # of the whole training, at the mean pace so far
    if step == 100:  # by now the mean is steady, and most of a paid run is still ahead
        gets_slower = loop_is_on(1.0, config) and not loop_is_on(progress, config)
        training.run.log(f"pace: {step_ms:.1f} ms/step → about {step / progress:,.0f} steps in "
                         f"{run_seconds:,.0f} s{' (slower once recurrence turns on)' if gets_slower else ''}")
    every = config.train_log_every
    if every == 0 or (step > FIRST_STEPS and step % every != 0):
        return
    p50, p99, longest = np.percentile(training.waits_ms, [50, 99, 100])
    training.waits_ms.clear()
    training.run.log(
        f"step:{step}/{config.iterations} train_loss:{loss:.4f} train_time:{1e3 * seconds:.0f}ms "
        f"step_avg:{step_ms:.2f}ms tok_s:{tokens / seconds:.0f} "
        f"data_wait_ms:{p50:.2f}/{p99:.2f}/{longest:.2f} "
        f"lr_scale:{result.lr_scale:.4f} grad_norm:{norm:.3f} eta:{run_seconds - seconds:.0f}s")


def validate(training: Training, label: str, looping: bool = True) -> None:
    """Stop the clock and evaluate the current weights on non-overlapping windows: only a diagnostic.

    looping: as in `GPT.forward`.
    """
    run = training.run
    data = training.validation
    run.machine.wait()
    start = time.perf_counter()
    clock = ScoreClock(run, "training", training.config.val_progress_log_every)
    with training.trace.span("val", "main", step=training.step):
        ledger = score_roundtrip(training.model, data.tokens, training.config, clock, looping)
    score = ledger.score(data.bytes_total)
    val_seconds = time.perf_counter() - start
    # Validation does not count as training time.
    training.started += val_seconds
    training.val_seconds += val_seconds
    train_ms = 1e3 * training.seconds
    run.log(
        f"{label} val_loss:{score.nats:.4f} val_bpb:{score.bits_per_byte:.4f} train_time:{train_ms:.0f}ms "
        f"step_avg:{train_ms / max(training.step, 1):.2f}ms{data.mark}\n"
        f"val_stage_time_ms:{1e3 * val_seconds:.0f}ms {label}")
    run.record(
        "val", label=label, step=training.step, val_loss=score.nats, val_bpb=score.bits_per_byte,
        train_time_ms=train_ms, val_ms=1e3 * val_seconds)


def calibration_batches(training: Training) -> Iterator[Batch]:
    """The training batches that follow the last step, while there is time; the same number on all ranks."""
    config = training.config
    machine = training.run.machine
    wanted = config.gptq_calibration_batches
    now = 0.0
    for number in range(math.ceil(wanted / machine.world_size)):
        machine.wait()
        before = now
        now = machine.gather(training.seconds)[0]
        # Assume that the next batch takes as long as the last one, and keep a tenth of the reserve as a
        # margin. The first batch is always taken, because nothing is known yet.
        ends_at = 2 * now - before + 0.1 * config.gptq_reserve_seconds
        if number > 0 and 0 < config.max_wallclock_seconds < ends_at:
            training.run.log(f"warning: out of time after {number * machine.world_size} calibration batches, "
                             f"expected GPTQ_CALIBRATION_BATCHES={wanted}; raise GPTQ_RESERVE_SECONDS")
            return
        yield training.loader.next_batch()


# ============================================================================================================
# main — a run from start to end: check, prepare, warm up, train, ship, reload, evaluate, report.
# ============================================================================================================

SETTINGS_FILE = "config.env"


class Inputs(NamedTuple):
    """Everything a run reads, checked before anything is written."""

    directory: Path  # where the run will write
    train_shards: list[Shard]  # empty with EVAL_ONLY
    validation: Validation
    source: bytes  # the script that runs
    shipped: bytes  # the same script as it is counted towards ARTIFACT_BYTES_MAX
    hashes: dict[str, str]  # SHA-256 of code, tokenizer, shards and manifest
    chosen: ChosenOps  # the implementations for training and evaluation
    checkpoint: dict[str, Any]  # of the run that RESUME names; else empty


class Trained(NamedTuple):
    """What summary.json records about training; nothing with EVAL_ONLY."""

    steps: int = 0
    train_seconds: float = 0.0
    stream_hash: str = ""


def main() -> int:
    """Run what the environment asks for. Exit status 0: finished; 1: an error, reported in one message."""
    if "-h" in sys.argv or "--help" in sys.argv:
        print_help()
        return 0
    run = None
    try:
        if len(sys.argv) > 1:
            raise ConfigError(f"got {sys.argv[1:]} on the command line, expected only --help; settings are "
                              "environment variables: SEED=42 python train_gpt.py")
        environ = with_config_of_run(os.environ)
        config = Config.from_env(environ)
        notes = notes_on_environment(environ, config.foreign_names)
        run = Run(this_machine(config, environ))
        for name in ENDING_SIGNALS:
            number: Any = getattr(signal, name, None)  # Windows has only the first two
            # The parent process may have chosen to ignore a signal, as nohup does with SIGHUP.
            if number is None:
                continue
            if name in ("SIGTERM", "SIGINT") or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, run.on_signal)
        end_with_launcher(os.environ)
        whole_run(config, run, notes)
        return 0
    except (ConfigError, DataError, ArtifactError, FloatingPointError, OSError) as error:
        message = f"error: {error}"
    except torch.cuda.OutOfMemoryError as error:
        message = ("error: out of GPU memory; lower MICRO_BATCH_TOKENS, VAL_BATCH_SIZE or, for test-time "
                   f"training, TTT_BATCH_SEQS or TTT_BATCH_SIZE ({error})")
    except Exception:
        # A bug in this script: the traceback helps to fix it.
        message = traceback.format_exc().strip()
    # Report what ended the run, and how to continue from what it has saved.
    if run is not None:
        # All that this rank knows is that a peer is gone. The peer itself prints the reason. NCCL raises the
        # same exception if something fails on this rank, such as a lack of shared memory: that is shown.
        nccl = "DistBackendError.*(remote process|[Cc]onnection (closed|reset)|[Tt]imed? ?out)"
        if re.match(f"Traceback.*(gloo/|pair closure|{nccl})", message, re.DOTALL):
            message = "stopped: another rank has ended or does not respond"
        if run.machine.world_size > 1:
            message = f"rank {run.machine.rank}: {message}"
        if run.directory is not None:
            message += f"\nin phase {run.phase_name}\n{run.how_to_continue()}"
            run.append("log.txt", message)
    print_line(message, sys.stderr)
    return 1


def print_help() -> None:
    """Print the docstring of this file and all settings."""
    print_line(__doc__ or "")
    print_line("Settings: environment variables, or KEY=VALUE lines in the file named by CONFIG:\n")
    for spec, (name, value) in zip(fields(Config), Config().as_env().items(), strict=True):
        choices = " | ".join(spec.metadata["among"])
        choices = f" ({choices})" if choices else ""
        print_line(f"  {f'{name}={value}':<48} {spec.metadata['meaning']}{choices}")


def end_with_launcher(environ: Mapping[str, str]) -> None:
    """On Linux, ask for a SIGTERM when torchrun, our parent process, is gone.

    torchrun forwards the signals that it handles. Any other signal kills it, and the ranks would run on.
    """
    if "TORCHELASTIC_RUN_ID" in environ and sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM))


def with_config_of_run(environ: Mapping[str, str]) -> Mapping[str, str]:
    """`environ`; if it has no CONFIG, on top of the settings of the run that RESUME or EVAL_ONLY names.

    An artifact's folder may come from anybody, so its settings of where to write are ignored.
    """
    named = environ.get("RESUME") or environ.get("EVAL_ONLY")
    if not named or environ.get("CONFIG"):
        return environ
    path = find_path(named)
    if environ.get("RESUME") and not environ.get("EVAL_ONLY") and not path.is_dir():
        raise ConfigError(f"RESUME={named}: no such directory; set it to that of a run that was stopped")
    settings = (path if path.is_dir() else path.parent) / SETTINGS_FILE
    # There may be none next to an artifact that was copied. Then the defaults apply.
    if not os.path.lexists(settings):
        return environ
    if not settings.is_file():
        raise ConfigError(f"{settings}: not an ordinary file; remove it, or set CONFIG to another file")
    if environ.get("RESUME"):
        return {**environ, "CONFIG": str(settings)}
    values = read_config_file(str(settings))
    for name in WHERE_A_RUN_WRITES:
        values.pop(name, None)
    return {**merge_environments(values, environ), "CONFIG": "none"}


def whole_run(config: Config, run: Run, notes: list[str]) -> None:
    """Train and ship, unless EVAL_ONLY; then reload the artifact and evaluate exactly what it contains.

    notes: lines about settings, for the log.
    """
    machine = run.machine
    tokenizer_sha256 = ""
    reading_began = time.perf_counter()
    if config.eval_only:
        # The artifact defines the model. Settings that disagree with it are ignored with a warning.
        model, artifact = load_artifact(find_path(config.eval_only))
        tokenizer_sha256 = artifact.tokenizer_sha256
        for name, value in config.overrides().items():
            its = artifact.config.get(name, value)
            if its != value:
                notes.append(f"warning: {name}={value} is ignored: the artifact has {name}={its}")
        config = Config.from_values({**config.as_env(), **artifact.config})

    with run.phase("preflight"):
        inputs = preflight(config, run, tokenizer_sha256)
        open_run(config, run, inputs, notes)
    trained = Trained()
    if not config.eval_only:
        trained = train_and_ship(config, run, inputs)
        reading_began = time.perf_counter()
    with run.phase("reload"):
        if not config.eval_only:
            # Rank 0 wrote it to a disk that other nodes may not see, so it reads the file for all of them.
            path = run.path(ARTIFACT)
            data = path.read_bytes() if machine.rank == 0 else b""
            model, artifact = load_artifact(path, machine.gather(data)[0], is_ours=True)
        ready_model(model, machine, inputs.chosen.ops)
    reloaded = time.perf_counter()
    if machine.compiled:
        rehearse_evaluation(model, config, run)
    compile_seconds = time.perf_counter() - reloaded
    scores = evaluate(model, config, run, inputs.validation, f"int{config.matrix_bits}")
    summarize(config, run, inputs, trained, artifact, scores, reloaded - reading_began, compile_seconds)
    if machine.rank == 0:
        run.path(CHECKPOINT).unlink(missing_ok=True)  # a finished run cannot be resumed


def start_line(run: Run) -> str:
    """What the run took before training, and how much of its compilation an earlier run had already done."""
    line = f"start: {sum(run.phases.values()):.1f} s before training"
    if not run.machine.compiled:
        return line
    counts = torch._dynamo.utils.counters["inductor"]
    cached = counts["fxgraph_cache_hit"]
    graphs = cached + counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]
    state = "warm" if 2 * cached > graphs else "cold"
    return f"{line}, {state}: {cached} of {graphs} graphs were in Inductor's cache"


def train_and_ship(config: Config, run: Run, inputs: Inputs) -> Trained:
    """Train, collect Hessians while there is time, and write the artifact: on rank 0, all others wait."""
    with run.phase("build_model"):
        training = Training(
            config, run, inputs.train_shards, inputs.validation, inputs.chosen.ops, inputs.hashes)
    warm_up(training, inputs.checkpoint)
    run.log(start_line(run))
    with run.phase("train"):
        train(training)
    # Before calibration, whose number of batches depends on the clock and on the number of ranks.
    stream_hash = training.stream_hash()
    with run.phase("hessians"):
        # From here on, the EMA is the model that is calibrated, shipped and evaluated.
        training.optimizer.use_average()
        hessians: Hessians = {}
        if config.gptq:
            hessians = collect_hessians(training.model, calibration_batches(training))
            run.log(f"gptq:collected {len(hessians)} Hessians, {training.seconds:.2f}s since training began")
        validate(training, "DIAGNOSTIC post_ema" if config.ema_decay else "DIAGNOSTIC final")
        run.log(f"timing_train_loop_ms:{1e3 * training.seconds:.0f}ms "
                f"timing_val_total_ms:{1e3 * training.val_seconds:.0f}ms\n"
                f"peak memory allocated: {torch.cuda.max_memory_allocated() >> 20} MiB "
                f"reserved: {torch.cuda.max_memory_reserved() >> 20} MiB")
    train_seconds = training.seconds
    training.loader.close()
    with run.phase("quantize"):
        if run.machine.rank == 0:
            # The script and the weights share the limit.
            budget = config.artifact_bytes_max - len(inputs.shipped)
            data, line = write_artifact(training.model, config, hessians, inputs.hashes["tokenizer"], budget)
            keep_artifact(run.path(ARTIFACT), data, config)
            run.log(line)
            if config.save_float:
                save_float(training.model, run)
        run.machine.gather(None)
    return Trained(training.step, train_seconds, f"{stream_hash:016x}")


def save_float(model: GPT, run: Run) -> None:
    """Write the unquantized weights, too. If that fails, the run continues."""
    weights = torch_file(model.state_dict())
    try:
        write_atomically(run.path("final_model.pt"), weights)
        run.log(f"Serialized model: {len(weights)} bytes")
    except ConfigError as error:
        run.log(f"warning: SAVE_FLOAT: {error}")


def settings_file(config: Config) -> bytes:
    """The contents of a CONFIG file that repeats this run."""
    settings = ""
    for name, value in config.as_env().items():
        comment = "# " if name in SETTINGS_OF_A_START else ""
        settings += f"{comment}{name}={value}\n"
    return settings.encode()


def keep_artifact(path: Path, data: bytes, config: Config) -> None:
    """Write the artifact; if the disk is full, save it with its settings in a temporary folder or in home.

    The run cannot continue from there, so this raises ConfigError with the command that evaluates the copy.
    """
    try:
        write_atomically(path, data)
    except ConfigError as error:
        for folder in (tempfile.gettempdir(), os.path.expanduser("~")):
            try:
                spare = Path(tempfile.mkdtemp(prefix=f"{path.parent.name}.", dir=folder))
                write_atomically(spare / SETTINGS_FILE, settings_file(config))
                write_atomically(spare / path.name, data)
            except (ConfigError, OSError):
                continue
            kept = shlex.quote(str(spare))
            command = f"RUNS_DIR={kept} EVAL_ONLY={kept}/{path.name} python {shlex.quote(sys.argv[0])}"
            raise ConfigError(f"{error}. The artifact and its settings were saved in {kept}; to evaluate it, "
                              f"run: {command}") from error
        raise


def preflight(config: Config, run: Run, tokenizer_sha256: str) -> Inputs:
    """Check within seconds what a user can get wrong, before anything is written. All ranks call it together.

    tokenizer_sha256: of the artifact that EVAL_ONLY names. Raises ConfigError, DataError, ArtifactError.
    """
    machine = run.machine
    # This reads the headers of all shards, but the tokens only of validation and the first training shard.
    folder = find_path(config.data_path)
    pattern = glob.escape(str(folder))
    train_shards = [] if config.eval_only else open_shards(f"{pattern}/fineweb_train_[0-9]*.bin")
    val_shards = open_shards(f"{pattern}/fineweb_val_[0-9]*.bin")

    manifest = read_manifest(folder)

    # Shards, artifact and byte counts must come from the same tokenizer, with VOCAB_SIZE pieces.
    load_tokenizer(config)
    source = Path(__file__).read_bytes()
    # Hashing gigabytes of shards would take minutes, so hash their names and sizes.
    listing = {shard.path.name: shard.tokens for shard in (*train_shards, *val_shards)}
    manifest_file = folder / "manifest.json"
    read = {"code": source, "tokenizer": find_path(config.tokenizer_path).read_bytes(),
            "shards": json.dumps(listing).encode(),
            "manifest": manifest_file.read_bytes() if manifest_file.is_file() else b"{}"}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in read.items()}
    if train_shards:
        check_manifest(manifest_file, manifest, listing)
    made_by = manifest.tokenizer_sha256
    for maker, expected in ((manifest_file, made_by), ("EVAL_ONLY's artifact", tokenizer_sha256)):
        if expected not in ("", hashes["tokenizer"]):
            raise DataError(f"TOKENIZER_PATH={config.tokenizer_path}: has sha256 {hashes['tokenizer']}, but "
                            f"{maker} expects {expected}; use that tokenizer")

    for shard in (val_shards[0], *train_shards[:1]):
        check_first_token(shard, read_tokens(shard, config.vocab_size))
    validation = read_validation(val_shards, config)
    check_text(validation.tokens, config, manifest)

    # All ranks must agree.
    mine = {**config.as_env(), **hashes, "torch": torch.__version__, "dtype": machine.dtype}
    for rank, theirs in enumerate(machine.gather(mine)):
        for name, value in mine.items():
            if theirs[name] != value:
                raise ConfigError(f"{name} is {theirs[name]} on rank {rank}, {value} on rank {machine.rank}")
    checkpoint = read_checkpoint(config, hashes, machine.dtype)
    read_modes(config)
    shipped = with_settings(shipped_code(source), config)
    if train_shards:
        check_memory(config, machine)
        next(shard_visits(config, train_shards, 0))  # DataError if no shard holds a whole sequence
        check_budget(config, config.artifact_bytes_max - len(shipped))
    return Inputs(
        choose_directory(config, machine), train_shards, validation, source, shipped, hashes,
        fast_ops(config, machine), checkpoint)


def check_first_token(shard: Shard, tokens: Array) -> None:
    """DataError if the first shard of a split does not begin with a document. Later shards need not."""
    if tokens[0] == BOS_ID:
        return
    begins = np.flatnonzero(tokens == BOS_ID)
    if len(begins) == 0:
        raise DataError(f"{shard.path}: begins with id {tokens[0]} and has no BOS={BOS_ID} at all, expected "
                        "one before each document; export it again, with 1 as the id of BOS")
    raise DataError(
        f"{shard.path}: begins inside a document, with id {tokens[0]}, expected BOS={BOS_ID} at the start of "
        "the first shard. Is it a later shard, copied by itself? Add the shards before it, numbered from "
        f"000000, or drop the {begins[0]} ids before its first document")


def check_memory(c: Config, machine: Machine) -> None:
    """ConfigError if a micro-batch cannot fit into the memory of this rank's device.

    The estimate is a lower bound. It counts the logits, the hidden activations of the MLPs and, on a CPU, one
    attention mask.
    """
    tokens = c.train_batch_tokens // machine.world_size // micro_steps_per_step(c, machine.world_size)
    values = c.vocab_size + c.num_layers * c.mlp_dim
    memory_bytes = sys.maxsize
    if machine.on_gpu:
        memory_bytes, _ = torch.cuda.mem_get_info()
    elif hasattr(os, "sysconf"):  # not on Windows
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if c.doc_mask:
            values += c.train_seq_len
    needed_bytes = machine.dtype.itemsize * tokens * values
    if needed_bytes > memory_bytes:
        raise ConfigError(
            f"TRAIN_SEQ_LEN={c.train_seq_len} MICRO_BATCH_TOKENS={c.micro_batch_tokens}: a micro-batch of "
            f"{tokens} tokens takes at least {needed_bytes >> 20} MiB, but this device has "
            f"{memory_bytes >> 20} MiB; lower MICRO_BATCH_TOKENS, or both")


def check_manifest(path: Path, manifest: Manifest, tokens_of: Mapping[str, int]) -> None:
    """DataError if the shards and their sizes differ from those in the manifest.

    tokens_of: the tokens of each shard, by file name. data/fineweb.py --verify compares contents, which takes
    minutes.
    """
    # `token_bytes` checks the sidecars.
    odd = {name for name, _ in manifest.files.items() ^ tokens_of.items() if "_val_bytes_" not in name}
    if manifest.files and odd:
        raise DataError(f"{path}: these files differ from the manifest: {', '.join(sorted(odd))}. Fetch the "
                        "data again, or remove foreign files")


def read_validation(shards: list[Shard], config: Config) -> Validation:
    """Read the validation data. DataError if it has no bytes, or not as many as the manifest audited."""
    folder = find_path(config.data_path)
    tokens = np.concatenate([read_tokens(shard, config.vocab_size) for shard in shards])
    bytes_total = int(token_bytes(tokens, config).sum())
    manifest = read_manifest(folder)
    if manifest.audited_bytes not in (None, bytes_total):
        raise DataError(f"DATA_PATH={folder}: validation has {bytes_total} bytes, but manifest.json audited "
                        f"{manifest.audited_bytes}; get the data again, see data/README.md")
    official = official_name(separate_pairs(tokens, manifest.fused), bytes_total, config.vocab_size)
    mark = ""
    if config.val_tokens_limit:
        tokens = tokens[: config.val_tokens_limit + 1]  # N targets take N + 1 tokens
        bytes_total = int(token_bytes(tokens, config).sum())
        mark = " comparable:0"
    if bytes_total == 0:
        raise DataError(f"{shards[0].path.parent}: {len(tokens)} validation tokens have no bytes; get the "
                        "data again, or raise VAL_TOKENS_LIMIT if it is set")
    return Validation(tokens, bytes_total, mark, official, manifest.audited_bytes)


def reject_links(directory: Path) -> None:
    """ConfigError if a file in the directory to be resumed is a link: the run would write to its target."""
    for entry in os.scandir(directory):
        found = entry.stat(follow_symlinks=False)
        is_file = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        if not is_file and not stat.S_ISDIR(found.st_mode):
            raise ConfigError(
                f"RESUME={directory}: {entry.name} is a link, has several names, or is not a file, but a run "
                "only writes to its own files; replace it with a copy, or remove it")


def choose_directory(config: Config, machine: Machine) -> Path:
    """Choose the run directory, the same on all ranks, without creating it. ConfigError if it is unusable."""
    if config.resume:
        directory = find_path(config.resume)
        reject_links(directory)
        return directory
    # The name contains the time and machines have different clocks, so rank 0 chooses it.
    job = "eval" if config.eval_only else f"seed{config.seed}"
    name = config.run_id or time.strftime(f"%Y%m%d-%H%M%S-{job}")
    directory = Path(machine.gather(f"{config.runs_dir}/{name}")[0])
    if machine.rank == 0:
        if os.path.lexists(directory):
            raise ConfigError(f"RUN_ID={name}: {directory} exists, and nothing is overwritten; set another "
                              f"RUN_ID or, if it has a {CHECKPOINT}, RESUME={shlex.quote(str(directory))}")
        # Room for logs and nats, and for two checkpoints of at most 16 bytes per parameter: the new one is
        # written before the old one goes.
        needed_bytes = 1 << 20
        if not config.eval_only:
            needed_bytes += config.artifact_bytes_max + 2 * 16 * count_parameters(config)
        place = next(folder for folder in directory.absolute().parents if folder.exists())
        if not place.is_dir():
            raise ConfigError(f"{place}: a run writes to a folder, but this is a file; set RUNS_DIR")
        free_bytes = shutil.disk_usage(place).free
        if free_bytes < needed_bytes:
            raise ConfigError(f"{place}: {free_bytes >> 20} MiB are free, but a run takes up to "
                              f"{needed_bytes >> 20} MiB; free some space or set RUNS_DIR")
    return directory


def open_run(config: Config, run: Run, inputs: Inputs, notes: list[str]) -> None:
    """Create the run directory, or reopen that of RESUME, and start its log in upstream's format.

    All ranks call it together. notes: lines about settings, for the log.
    """
    machine = run.machine
    if machine.rank == 0 and not config.resume:
        inputs.directory.mkdir(parents=True)  # fails if another run has just created it
    machine.gather(None)
    run.directory = inputs.directory
    if machine.rank == 0:
        # The code that runs, as it is and as it is counted.
        write_atomically(run.path("train_gpt.py"), inputs.source)
        write_atomically(run.path("train_gpt.shipped.py"), inputs.shipped)
        write_atomically(run.path(SETTINGS_FILE), settings_file(config))
    data = inputs.validation
    folder = find_path(config.data_path)
    # Tell the consoles of other nodes where rank 0 writes.
    nodes = machine.gather((platform.node(), os.environ.get("GROUP_RANK")))
    if nodes.index(nodes[machine.rank]) == machine.rank != 0:
        print_line(f"rank {machine.rank} on {platform.node()}: only traces are written here; rank 0 writes "
                   f"the run to {run.directory} on {nodes[0][0]}")
    if len(set(nodes)) > 1:
        notes = [f"nodes:{len(set(nodes))} written by rank 0 on {nodes[0][0]}: "
                 f"{inputs.directory.absolute()}", *notes]
    for line in (
        f"run:{run.directory}",
        f"Running Python {platform.python_version()} PyTorch {torch.__version__} on {machine.device_name} "
        f"dtype:{machine.dtype} compile:{int(machine.compiled)} threads:{torch.get_num_threads()}",
        f"overrides: {' '.join(f'{name}={value}' for name, value in config.overrides().items())}",
        *notes,
        f"train_loader:dataset:{folder.name} train_shards:{len(inputs.train_shards)}",
        f"val_loader:shards pattern={folder}/fineweb_val_*.bin tokens:{len(data.tokens) - 1} "
        f"bytes:{data.bytes_total}{data.mark}",
        f"validation: {f'official ({data.official})' if data.official else 'your own'}",
        f"model_params:{count_parameters(config)}",
        f"world_size:{machine.world_size} grad_accum_steps:"
        f"{0 if config.eval_only else micro_steps_per_step(config, machine.world_size)}",
        f"train_batch_tokens:{config.train_batch_tokens} train_seq_len:{config.train_seq_len} "
        f"iterations:{config.iterations} warmup_steps:{config.warmup_steps} "
        f"max_wallclock_seconds:{config.max_wallclock_seconds:.3f}",
        plan_line(config, len(data.tokens) - 1),
        *slow_step_warning(config, machine),
        f"seed:{config.seed}",
        f"train_io:prefetch:{config.train_prefetch} "
        f"copy_stream:{config.train_copy_stream and machine.on_gpu} "
        f"prefetch_queue:{config.train_prefetch_queue}",
        f"training_timing_breakdown:{'enabled' if config.training_timing_breakdown else 'disabled'} "
        f"log_every:{config.training_timing_every}",
        f"val_io:overlap:{machine.on_gpu} prefetch:{config.val_prefetch} bytecount_device:cpu "
        f"tokens_per_pass:{config.val_pass_tokens}",
        *inputs.chosen.report,
    ):
        run.log(line)


LONG_STEP_FLOPS = 1e13  # minutes on a CPU, which does 1e10 to 1e12 a second


def plan_line(config: Config, targets: int) -> str:
    """How long this run will take at most, and how to make it shorter: one line for the log."""
    line = "plan: "
    if not config.eval_only:
        time_limit = f" or {config.max_wallclock_seconds:g} s" if config.max_wallclock_seconds else ""
        line += f"{config.iterations:,} steps{time_limit}, then "
    line += f"evaluate {targets:,} tokens"
    if config.ttt_enabled and config.max_eval_seconds:  # without test-time training there is no time limit
        line += f" (≤{config.max_eval_seconds:g} s)"
    shortcuts = ["TTT_ENABLED=0"] if config.ttt_enabled else []
    shortcuts += ["EVAL_STRIDE=0"] if config.eval_stride else []
    return f"{line}. Faster: {' '.join(shortcuts)}" if shortcuts else line


def slow_step_warning(config: Config, machine: Machine) -> list[str]:
    """A line for the log if a CPU takes minutes or hours for a step, in which it would seem to hang."""
    parameters = count_parameters(config)
    flops = 6 * parameters * config.train_batch_tokens
    if machine.on_gpu or config.eval_only or not config.iterations or flops < LONG_STEP_FLOPS:
        return []
    return [f"warning: there is no GPU in use, and a CPU takes minutes to hours for one step of "
            f"{config.train_batch_tokens:,} tokens with {parameters:,} parameters; for a small model, set "
            "CONFIG=configs/cpu_demo.env"]


def log_limit(run: Run, name: str, value: float, limit: float) -> dict[str, Any]:
    """Log whether a limit was kept; 0: there is none. Returns its entry in summary.json."""
    is_kept = limit == 0 or value <= limit
    verdict = f" of {limit:.10g} {'ok' if is_kept else 'EXCEEDED'}" if limit else ", no limit"
    run.log(f"limit:{name} {value:.10g}{verdict}")
    return {"value": value, "limit": limit, "ok": is_kept}


def versions_and_hardware(machine: Machine) -> dict[str, Any]:
    """What the run ran on, for summary.json. All ranks call it together."""
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "cuda": torch.version.cuda,
            "triton": getattr(triton, "__version__", None),
        },
        "hardware": {
            "gpus": machine.gather(machine.device_name) if machine.on_gpu else [],
            "world_size": machine.world_size,
            "cores": os.cpu_count(),
            "device": machine.device_name,
            "dtype": f"{machine.dtype}",
            "threads": torch.get_num_threads(),
        },
    }


def summarize(
    config: Config, run: Run, inputs: Inputs, trained: Trained, artifact: ArtifactInfo,
    scores: dict[str, Score], reload_seconds: float, compile_seconds: float,
) -> None:
    """Log sizes, limits and results, and write them to summary.json. All ranks call it together.

    reload_seconds: from reading the artifact until its model was ready. compile_seconds: from then until the
    first evaluation began.
    """
    machine = run.machine
    code_bytes = len(inputs.shipped)
    total_bytes = code_bytes + artifact.bytes
    run.log(f"Code size: {code_bytes} bytes (wrapped)\n"
            f"Serialized model int{config.matrix_bits}+rans: {artifact.bytes} bytes\n"
            f"Total submission size int{config.matrix_bits}+rans: {total_bytes} bytes")

    scoring_seconds = run.phases[f"eval_{next(iter(scores))}"]  # of the headline metric
    limits = {
        "train_seconds": log_limit(run, "train_seconds", trained.train_seconds, config.max_wallclock_seconds),
        "eval_seconds": log_limit(run, "eval_seconds", scoring_seconds, config.max_eval_seconds),
        "artifact_bytes": log_limit(run, "artifact_bytes", total_bytes, config.artifact_bytes_max),
    }
    if config.eval_only and not limits["artifact_bytes"]["ok"]:
        run.log("note: these bytes include this script; what counts is the script of the artifact's own run")
    # It is disputed whether the limit applies to scoring alone or to everything after reading the artifact.
    from_artifact_seconds = reload_seconds + compile_seconds + scoring_seconds
    run.log(f"eval_clock: scoring {scoring_seconds:.2f} s, from reading the artifact "
            f"{from_artifact_seconds:.2f} s (reload {reload_seconds:.2f} s, "
            f"compilation {compile_seconds:.2f} s)")

    data = inputs.validation
    summary = {
        "run_id": inputs.directory.name,
        "seed": config.seed,
        **trained._asdict(),
        "tokens": trained.steps * config.train_batch_tokens,
        "config": config.as_env(),
        "overrides": config.overrides(),
        "code": {"sha256": inputs.hashes["code"], "bytes": len(inputs.source), "bytes_wrapped": code_bytes},
        "data": {
            "hashes": inputs.hashes,
            "val_tokens": len(data.tokens) - 1,
            "val_bytes": data.bytes_total,
            "audited_bytes": data.audited_bytes,
            "validation": "official" if data.official else "your own",
            "validation_name": data.official,
        },
        **versions_and_hardware(machine),
        "phases": run.phases,
        "artifact": artifact._asdict(),
        "comparable": not data.mark,
        "losses": {name: score._asdict() for name, score in scores.items()},
        "limits": limits,
        "eval_clocks": {"scoring_seconds": scoring_seconds, "from_artifact_seconds": from_artifact_seconds},
        "exit": "finished",
    }
    if machine.rank == 0:
        write_atomically(run.path("summary.json"), (json.dumps(summary, indent=1) + "\n").encode())
    results = " ".join(f"{name}={score.bits_per_byte:.4f}" for name, score in scores.items())
    stream = "" if config.eval_only else f" stream_hash:{trained.stream_hash};"
    run.log(f"done: bits per byte {results};{stream} files in {run.directory}")


if __name__ == "__main__":
    os._exit(main())  # a normal exit could hang: peers may wait in a collective that this rank never joins
