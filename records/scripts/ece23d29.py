"""Train, quantize and score a GPT under a hard budget: one file, from token shards to bits per byte.

    torchrun --standalone --nproc_per_node=8 train_gpt.py     # the 8-GPU run: the defaults
    CONFIG=configs/cpu_demo.env python train_gpt.py           # the whole job on a laptop
    EVAL_ONLY=runs/x/model.bin python train_gpt.py            # score an artifact in a fresh process
    python train_gpt.py --help                                # every variable

A run checks what a user can get wrong, compiles, trains for MAX_WALLCLOCK_SECONDS, writes an artifact that,
with the code, just fits ARTIFACT_BYTES_MAX, and scores what that file gives back. All that it writes lies in
runs/<RUN_ID>/.

The file reads from top to bottom: a section uses only what stands above it.

    SETTINGS · RUN · TIMING · DATA · MODEL · KERNELS · OPTIMIZER · SCHEDULE · EVALUATION
    TRELLIS · QUANTIZE · CODER · ARTIFACT · TRAIN · main

PR and issue numbers are those of openai/parameter-golf, unless another repository is named; its baseline
script is called upstream, and log lines keep the words of its lines.

Shape suffixes: B rows, T positions, D model width, F MLP width, H query heads, K key heads (in weights: all
their channels), E channels of a head, V vocabulary, L layers, S skips, P parallel layers, W gate channels,
N anything flattened or batched, R matrix rows, C matrix columns; in KERNELS M, N, K as usual for products.
"""

import ast
import contextlib
import copy
import ctypes
import difflib
import errno
import faulthandler
import functools
import glob
import hashlib
import importlib
import inspect
import io
import itertools
import json
import lzma
import math
import os
import platform
import re
import shutil
import signal
import struct
import sys
import threading
import time
import tokenize
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from dataclasses import Field, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

# Before torch loads its OpenMP library, which reads it: threads that wait for work must not spin, for they
# would take cores from the loader's threads and other ranks. Importing this file changes no environment.
if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows, CPU-only installs: the plain PyTorch twins run instead
    triton = None

# ============================================================================================================
# SETTINGS — every setting in one frozen dataclass; what is wrong is refused by name, before anything starts.
# ============================================================================================================


class ConfigError(ValueError):
    """A setting is unknown, mistyped, out of range, or contradicts another."""


class DataError(RuntimeError):
    """A shard or tokenizer is missing, damaged, foreign, or does not fit the run."""


class LoaderError(RuntimeError):
    """The data loader failed or stalled; the message holds shard, position and the original traceback."""


class ArtifactError(RuntimeError):
    """An artifact does not fit its budget, or a file is not an artifact that can be trusted."""


def knob(
    default: Any,
    meaning: str,
    low: float = -1e300,
    high: float = 1e300,
    among: str = "",
    pattern: str = ".*",
    negative_is_zero: bool = False,
) -> Any:
    """One setting: its default, and its meaning with unit.

    low, high: the range of a number (finite: inf and nan are refused). among: the choices, if there are few.
    pattern: what text must match. negative_is_zero: a number below 0 is taken as 0, as public scripts do.
    """
    choices = "0 1" if isinstance(default, bool) else among
    metadata = {
        "meaning": meaning,
        "low": low,
        "high": high,
        "among": choices.split(),
        "pattern": pattern,
        "negative_is_zero": negative_is_zero,
    }
    return field(default=default, metadata=metadata)


def find_path(path: str) -> Path:
    """An existing path: as given, else relative to the script's folder or to one above; unfound: as given."""
    # os.path rather than Path: a name that cannot exist is one that is not found, no exception.
    given = Path(os.path.expanduser(path))
    for folder in (Path(), *Path(__file__).resolve().parents):
        if os.path.exists(folder / given):
            return folder / given
    return given


Settings = TypeVar("Settings", bound="ModelSettings")
LORA_TARGET = "(q|k|v|o|mlp|head)"  # one entry of TTT_LORA_TARGETS
Rule = tuple[bool, str]  # whether it holds, and what is expected, in the names of settings


@dataclass(frozen=True)
class ModelSettings:
    """The settings that define the model; an artifact stores them. In the environment they are upper case.

    The class decides what stores a setting: ModelSettings the artifact, TrainingSettings the checkpoint,
    Config the run directory alone. A new setting here is a new form of the artifact: older ones need their
    own script. """

    # The text: how it is cut, and what a token sees of it.
    train_seq_len: int = knob(
        2048, "tokens; one training sequence; with TRAIN_SEQ_LENS the last of them", 1, 1 << 20)
    doc_mask: bool = knob(True, "attention and token shifts stay inside a document; 0: they cross its border")
    vocab_size: int = knob(8192, "tokens in the vocabulary", 4, 65_536)
    # Size.
    num_layers: int = knob(11, "blocks that own weights", 1, 256)
    model_dim: int = knob(512, "width of the residual stream", 8)
    num_heads: int = knob(8, "query heads", 1)
    num_kv_heads: int = knob(4, "key and value heads", 1)
    mlp_mult: float = knob(4.0, "MLP width / MODEL_DIM", 0.125, 64)
    leaky_slope: float = knob(0.5, "MLP activation LeakyReLU(slope)²; 0: relu²", 0, 1)
    # Positions: some channels of each head are rotated, the others compare contents alone.
    rope_base: float = knob(10_000.0, "rotary base", 1)
    rope_dims: int = knob(16, "rotated dimensions of each head; 0: all", 0)
    rope_train_seq_len: int = knob(0, "tokens; longer inputs rescale the base; 0: TRAIN_SEQ_LEN", 0)
    # Attention, and what keeps deep layers in bounds.
    ln_scale: bool = knob(True, "scale block inputs by 1/sqrt(layer + 1)")
    qk_gain_init: float = knob(5.25, "initial learned gain of each query head")
    xsa_last_n: int = knob(11, "last layers whose heads drop their own value's direction", 0)
    key_offset_dims: int = knob(0, "last dimensions of each key that the token before gives; 0: none", 0)
    sparse_attn_gate_enabled: bool = knob(True, "gate each head by the first GATE_WINDOW channels")
    gate_window: int = knob(12, "channels that feed the gates", 1)
    # Ways around the blocks: the token before, and the skips of the U-Net.
    smear_gate_enabled: bool = knob(True, "mix in the previous token's embedding, gated")
    channel_smear_enabled: bool = knob(False, "mix it in once more, each channel by a fixed share (PR #549)")
    skip_gates_enabled: bool = knob(True, "U-Net skips interpolate; 0: they add")
    # Depth recurrence: some layers run several times, with the same weights (PR #1493).
    num_loops: int = knob(2, "extra passes over LOOP_START..LOOP_END; 0: none", 0, 16)
    loop_start: int = knob(3, "first looped layer", 0)
    loop_end: int = knob(5, "last looped layer", 0)
    enable_looping_at: float = knob(0.35, "progress at which the loop switches on; from 1 on: never", 0)
    # Late layers whose two halves read side by side.
    parallel_start_layer: int = knob(8, "first layer whose attention and MLP run in parallel; -1: none", -1)
    parallel_mode: str = knob("lanes", "two residual lanes, or one (GPT-J)", among="lanes gptj")
    # Tables of what a pair of tokens, or a token, says by itself (PR #549).
    bigram_vocab_size: int = knob(0, "rows for hashed pairs, added to embeddings; 0: none", 0, 1 << 20)
    bigram_dim: int = knob(128, "width of these rows, projected to MODEL_DIM", 2)
    ve_enabled: bool = knob(False, "add an embedding of the token to the values of attention")
    ve_dim: int = knob(128, "width of that embedding, projected to all key heads", 2)
    ve_layers: str = knob("9,10", "layers that add it", pattern="[0-9]{1,3}(,[0-9]{1,3})*")
    # Ends and beginnings.
    tie_embeddings: bool = knob(True, "the output head is the input embedding; 0: a matrix of its own")
    tied_embed_init_std: float = knob(0.005, "initial standard deviation of that embedding; untied: 1", 0)
    matrix_init: str = knob("orthogonal", "initial block matrices", among="orthogonal uniform")
    logit_softcap: float = knob(30.0, "logits are bounded by c·tanh(x/c); 0: unbounded", 0)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.model_dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        """Channels of all key heads together; those of all value heads are as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP's hidden layer."""
        return int(self.mlp_mult * self.model_dim)

    @property
    def rotated_dims(self) -> int:
        """Channels of a head that the rotary embedding turns."""
        return self.rope_dims or self.head_dim

    @property
    def value_layers(self) -> list[int]:
        """The layers that add a value embedding."""
        if not self.ve_enabled:
            return []
        return [int(layer) for layer in self.ve_layers.split(",")]

    def rules(self) -> list[Rule]:
        """What must hold between these settings."""
        loop_in_order = self.loop_start <= self.loop_end < self.num_layers
        value_layers = self.value_layers
        # Each of them has one scale.
        listed_once = len(set(value_layers)) == len(value_layers)
        value_layers_exist = all(layer < self.num_layers for layer in value_layers)
        stationary_dims = max(0, self.head_dim - self.rotated_dims)
        return [
            (self.model_dim % self.num_heads == 0, "MODEL_DIM as a multiple of NUM_HEADS"),
            (self.num_heads % self.num_kv_heads == 0, "NUM_HEADS as a multiple of NUM_KV_HEADS"),
            (self.rotated_dims % 2 == 0, "ROPE_DIMS (0: MODEL_DIM / NUM_HEADS) even"),
            (self.rope_dims <= self.head_dim, "ROPE_DIMS <= MODEL_DIM / NUM_HEADS"),
            (self.key_offset_dims <= stationary_dims,
             "KEY_OFFSET_DIMS <= MODEL_DIM / NUM_HEADS - ROPE_DIMS (0: all are rotated)"),
            (self.gate_window <= self.model_dim, "GATE_WINDOW <= MODEL_DIM"),
            (self.num_loops == 0 or loop_in_order, "LOOP_START <= LOOP_END < NUM_LAYERS"),
            (self.bigram_vocab_size != 1, "BIGRAM_VOCAB_SIZE of 2 at least, or 0"),
            (listed_once and value_layers_exist, "VE_LAYERS as different numbers < NUM_LAYERS"),
        ]

    def as_env(self, part: "type[ModelSettings] | None" = None) -> dict[str, str]:
        """Settings as strings that `from_values` reads back: all, or those of one class."""
        env = {}
        for spec in fields(part or type(self)):
            value = getattr(self, spec.name)
            if isinstance(value, bool):
                value = int(value)
            env[spec.name.upper()] = str(value)
        return env

    @classmethod
    def from_values(cls: type[Settings], values: Mapping[str, str]) -> Settings:
        """The settings of this class out of `values`, others left alone. ConfigError for what is wrong."""
        # What is not given keeps its default.
        given = {}
        for spec in fields(cls):
            name = spec.name.upper()
            if name in values:
                given[spec.name] = parse_value(name, values[name], spec)
        settings = cls(**given)
        # A rule names the settings it is about: their values are part of the message.
        for holds, expected in settings.rules():
            if not holds:
                named = re.findall(r"[A-Z_]{2,}", expected)
                got = [f"{name}={value}" for name, value in settings.as_env().items() if name in named]
                raise ConfigError(f"expected {expected}; got {', '.join(got)}")
        return settings


class LengthPart(NamedTuple):
    """A part of training whose sequences have one length."""

    length: int  # tokens
    until: float  # where it ends: below 1 a share of the run, from 1 on a step; infinite: it is the last


@dataclass(frozen=True)
class TrainingSettings(ModelSettings):
    """What training makes of the weights: a checkpoint keeps these too, and a resumed run has the same."""

    # Which tokens, how many, for how long.
    train_seq_lens: str = knob(
        "", "LENGTH:UNTIL ... LENGTH, as 1024:0.1 2048:0.7 3072; growing sequence lengths, each until a "
        "share of the run or, from 1 on, a step; empty: TRAIN_SEQ_LEN all along")  # fmt: skip
    seed: int = knob(1337, "initial weights and data order", 0, 2**63 - 1)
    train_batch_tokens: int = knob(786_432, "tokens; one optimizer step, all ranks together", 1)
    shuffle: bool = knob(True, "permute shards and sequences by SEED; 0: file order")
    iterations: int = knob(20_000, "steps; upper bound when a wall clock is set; 0: none are taken", 0)
    max_wallclock_seconds: float = knob(
        600.0, "seconds of training with Hessians; 0: ITERATIONS", 0, negative_is_zero=True)
    # What is learnt beside the next token.
    prefix_loss: float = knob(
        0.0, "weight of the next token's longest prefix in the loss; it falls to 0 over the middle third of "
        "the run; 0: none", 0, 8)  # fmt: skip
    # Step sizes of the groups of parameters.
    matrix_lr: float = knob(0.026, "Muon, block matrices", 0)
    scalar_lr: float = knob(0.02, "AdamW, small tensors", 0)
    tied_embed_lr: float = knob(0.03, "AdamW, embeddings with TIE_EMBEDDINGS=1", 0)
    embed_lr: float = knob(0.6, "AdamW, embeddings with TIE_EMBEDDINGS=0", 0)
    head_lr: float = knob(0.008, "AdamW without decay, the output head with TIE_EMBEDDINGS=0", 0)
    # Muon, for the matrices.
    muon_momentum: float = knob(0.97, "final momentum", 0, 0.9999)
    muon_momentum_warmup_start: float = knob(0.92, "first momentum", 0, 0.9999)
    muon_momentum_warmup_frac: float = knob(0.3, "progress over which momentum rises", 0, 1)
    muon_momentum_warmup_steps: int = knob(
        0, "the same in steps; 0: the fraction; given as 0 without it: none", 0)
    muon_backend_steps: int = knob(5, "Newton-Schulz iterations", 1, 20)
    muon_polar_express: bool = knob(True, "Polar Express coefficients; 0: one fixed quintic")
    muon_row_normalize: bool = knob(True, "normalise rows before orthogonalising")
    # Weight decay; AdamW, for the rest.
    muon_wd: float = knob(0.095, "decoupled weight decay of matrices", 0)
    embed_wd: float = knob(0.085, "decoupled weight decay of embeddings", 0)
    adam_wd: float = knob(0.02, "decoupled weight decay of small tensors", 0)
    beta1: float = knob(0.9, "AdamW", 0, 0.9999)
    beta2: float = knob(0.99, "AdamW", 0, 0.99999)
    adam_eps: float = knob(1e-8, "AdamW", 0)
    # What holds for all of them.
    grad_clip_norm: float = knob(0.3, "bound on the global gradient norm; 0: none", 0, negative_is_zero=True)
    ema_decay: float = knob(0.9965, "per-step decay of the shipped average of weights; 0: none", 0, 0.99999)
    ema_share: float = knob(
        1.0, "share of that average in what is shipped; the rest are the last weights", 0, 1)
    # The schedule of the learning rates.
    warmdown_frac: float = knob(0.85, "last part of the run in which learning rates fall", 0, 1)
    warmdown_iters: int = knob(
        0, "the same in steps, at the mean step time; 0: the fraction; given as 0 without it: none", 0)
    min_lr: float = knob(0.1, "floor of the falling learning rate, as a share of it", 0, 1)

    @property
    def length_parts(self) -> list[LengthPart]:
        """The parts of TRAIN_SEQ_LENS (PR #2014); one where it is empty, none where it cannot be read."""
        if not self.train_seq_lens:
            return [LengthPart(self.train_seq_len, math.inf)]
        number = r"[0-9]{1,8}"
        share = r"0?\.[0-9]+"
        if not re.fullmatch(rf"({number}:({number}|{share}) )+{number}", self.train_seq_lens):
            return []
        parts = []
        for entry in self.train_seq_lens.split():
            length, _, until = entry.partition(":")
            parts.append(LengthPart(int(length), float(until) if until else math.inf))
        return parts

    @property
    def segment_tokens(self) -> int:
        """Tokens of a segment: what is shuffled, and what every sequence length cuts into whole sequences."""
        return math.lcm(*(part.length for part in self.length_parts))

    def rules(self) -> list[Rule]:
        """What must hold between these settings."""
        parts = self.length_parts
        lengths = [part.length for part in parts]
        ends = [part.until for part in parts]
        above_zero = all(part.length > 0 and part.until > 0 for part in parts)
        lengths_grow = all(a < b for a, b in itertools.pairwise(lengths))
        ends_grow = all(a < b for a, b in itertools.pairwise(ends))
        of_one_kind = all(end < 1 for end in ends[:-1]) or all(end >= 1 for end in ends[:-1])
        return [
            *super().rules(),
            (len(parts) > 0 and above_zero and lengths_grow and ends_grow and of_one_kind,
             "TRAIN_SEQ_LENS as LENGTH:UNTIL ... LENGTH with growing lengths and growing ends, all of them "
             "shares of the run below 1, or all of them steps; like 1024:0.1 2048:0.7 3072"),
            (not parts or lengths[-1] == self.train_seq_len,
             "TRAIN_SEQ_LEN, where it is given, as the last of TRAIN_SEQ_LENS"),
        ]  # fmt: skip

    @classmethod
    def from_values(cls: type[Settings], values: Mapping[str, str]) -> Settings:
        """As for `ModelSettings`; with TRAIN_SEQ_LENS the model is one of its last length."""
        last = values.get("TRAIN_SEQ_LENS", "").rpartition(" ")[2]
        if last.isdecimal() and "TRAIN_SEQ_LEN" not in values:
            values = {**values, "TRAIN_SEQ_LEN": last}
        return super().from_values(values)


@dataclass(frozen=True)
class Config(TrainingSettings):
    """All settings, in the order of what they decide. The defaults are the run on 8 GPUs."""

    # --- the artifact ---
    artifact_bytes_max: int = knob(16_000_000, "bytes; shipped code and artifact together", 1000)
    code_bytes: str = knob("wrapped", "form of the script that is shipped and counted", among="raw wrapped")
    rate_control: bool = knob(True, "scale steps until the budget is full; 0: bits and clips as given")
    # A step is clip / (2^(bits - 1) - 1) standard deviations. RATE_CONTROL multiplies all steps by one
    # factor: then only their ratios count, and where weights are clipped.
    matrix_bits: int = knob(6, "bits of block matrices at their clip", 2, 8)
    embed_bits: int = knob(7, "bits of embeddings, in the same way", 2, 8)
    mlp_clip_sigmas: float = knob(11.5, "clip of MLP matrices, in standard deviations of a row", 0.1)
    attn_clip_sigmas: float = knob(13.0, "clip of attention matrices", 0.1)
    embed_clip_sigmas: float = knob(14.0, "clip of embeddings", 0.1)
    trellis: bool = knob(False, "codes on two grids half a step apart (TCQ); 0: weights rounded one by one")
    column_steps: float = knob(
        0.0, "power of the GPTQ factor in the steps of columns; in theory 1 is best; 0: one step a row",
        0, 1)
    gptq: bool = knob(True, "round with second-order information; 0: to nearest, all else alike")
    gptq_damping: float = knob(0.01, "share of the mean diagonal added to Hessians", 1e-6)
    gptq_calibration_batches: int = knob(64, "micro-batches of training data, all ranks together", 1)
    gptq_reserve_seconds: float = knob(2.0, "seconds of the clock for Hessians; fewer batches if short", 0)
    # --- its evaluation ---
    eval_seq_len: int = knob(0, "tokens of context; 0: TRAIN_SEQ_LEN", 0, 1 << 20, negative_is_zero=True)
    eval_stride: int = knob(64, "targets scored per window; 0: no sliding window", 0, negative_is_zero=True)
    ttt_enabled: bool = knob(True, "score with legal test-time training as well")
    ttt_mode: str = knob("lora", "what learns: all weights; or low-rank adapters, for each document its own",
                         among="sgd lora")  # fmt: skip
    # TTT_MODE=sgd: the weights learn from the text chunk by chunk.
    ttt_lr: float = knob(0.005, "SGD; falls along a cosine over the chunks", 0)
    ttt_epochs: int = knob(3, "passes over each scored chunk", 0)
    ttt_momentum: float = knob(0.9, "SGD", 0, 0.9999)
    ttt_chunk_tokens: int = knob(32_768, "targets scored before the next update", 1)
    ttt_batch_seqs: int = knob(32, "sequences of one SGD step, all ranks together", 1)
    ttt_grad_clip: float = knob(1.0, "bound on the gradient norm; 0: none", 0)
    # TTT_MODE=lora: adapters learn from their document chunk by chunk; names and values of PR #1855.
    ttt_lora_targets: str = knob(
        "q,k,v,o,mlp,head", "what has adapters: projections, attention and MLP as a whole, output head",
        pattern=f"{LORA_TARGET}(,{LORA_TARGET})*")  # fmt: skip
    ttt_lora_rank: int = knob(80, "rank of an adapter", 1, 4096)
    ttt_lora_alpha: float = knob(144.0, "an adapter's output is scaled by this over TTT_LORA_RANK", 0)
    ttt_lora_lr: float = knob(1e-4, "AdamW, adapters", 0)
    ttt_beta1: float = knob(0.0, "AdamW, adapters", 0, 0.9999)
    ttt_beta2: float = knob(0.99, "AdamW, adapters", 0, 0.99999)
    ttt_weight_decay: float = knob(0.5, "decoupled weight decay of adapters", 0)
    ttt_chunk_size: int = knob(48, "targets of a document scored before the next step of its adapters", 1)
    ttt_early_chunks: str = knob(
        "", "UNTIL:SIZE,…: another TTT_CHUNK_SIZE in a document's first UNTIL targets; empty: none",
        pattern="([1-9][0-9]{0,8}:[1-9][0-9]{0,8}(,[1-9][0-9]{0,8}:[1-9][0-9]{0,8})*)?")  # fmt: skip
    ttt_batch_size: int = knob(
        0, "documents that learn side by side on one rank; 0: as many as a micro-batch has rows", 0
    )
    # --- the data and their way to the device ---
    data_path: str = knob(
        "data/datasets/fineweb10B_sp8192_lossless_caps_caseops_v1_reserved",
        "folder of fineweb_{train,val}_*.bin shards")  # fmt: skip
    tokenizer_path: str = knob(
        "data/tokenizers/fineweb_8192_bpe_lossless_caps_caseops_v1_reserved.model",
        "their SentencePiece model")  # fmt: skip
    micro_batch_tokens: int = knob(98_304, "tokens; one forward pass of one rank; bounds memory", 1)
    train_prefetch: bool = knob(True, "read and stage batches in threads; 0: the plain synchronous path")
    train_prefetch_queue: int = knob(2, "batches staged ahead of the step", 1, 1024)
    train_copy_stream: bool = knob(True, "copy batches to the GPU on a stream of their own")
    val_prefetch: bool = knob(True, "copy validation to the device before scoring; 0: batch by batch")
    val_tokens_limit: int = knob(0, "targets; score only the first ones: NOT comparable; 0: all", 0)
    loader_timeout_seconds: float = knob(60.0, "seconds without data before the loader gives up", 0.1)
    # --- the run ---
    run_id: str = knob("", "name of the run directory; empty: date, time and seed")
    runs_dir: str = knob("runs", "folder that holds the run directories")
    max_eval_seconds: float = knob(600.0, "seconds of evaluation; judged in summary.json; 0: no limit", 0)
    warmup_steps: int = knob(20, "untimed steps that compile each graph, then undone", 0, 1000)
    train_log_every: int = knob(50, "steps between train lines, after the first ten; 0: no train lines", 0)
    val_loss_every: int = knob(
        0, "steps between validations outside the clock, first and last; 0: none", 0, negative_is_zero=True)
    val_batch_size: int = knob(524_288, "tokens scored at once by eight ranks; each takes an eighth", 1)
    val_progress_log_every: int = knob(
        -1, "batches of VAL_BATCH_SIZE between progress lines of every validation; 0: none; "
        "-1: twenty lines of each final score", -1)  # fmt: skip
    training_timing_breakdown: bool = knob(False, "print where the milliseconds of a step go")
    training_timing_every: int = knob(200, "steps between those lines; the first ten are printed too", 1)
    trace_steps: str = knob("", "A:B; steps A to B - 1, of 1 …, as a trace for ui.perfetto.dev; empty: none")
    device: str = knob("auto", "where to run", among="auto cpu cuda")
    cpu_threads: int = knob(0, "threads of torch on the CPU; 0: OMP_NUM_THREADS, or one a core", 0, 1024)
    compile: str = knob("auto", "torch.compile; auto: on CUDA", among="auto 0 1")
    compute_dtype: str = knob(
        "auto", "activations; auto: where fast; float32 on CUDA is TF32 in products",
        among="auto float32 bfloat16")  # fmt: skip
    attention: str = knob(
        "auto", "kernel; auto: the first that passes", among="auto fa3 varlen fa2 sdpa math")
    fused_mlp: str = knob("auto", "Triton MLP; auto: on CUDA, where it passes", among="auto 0 1")
    fused_heads: str = knob("auto", "Triton norm, rotary and XSA; auto: as FUSED_MLP", among="auto 0 1")
    manual_backward: str = knob(
        "auto", "MLP, heads, norms and loss with derivatives by hand; auto: on a CPU without COMPILE",
        among="auto 0 1")  # fmt: skip
    checkpoint_every_seconds: float = knob(0.0, "seconds between checkpoints; 0: only on a signal", 0)
    resume: str = knob("", "continue the unfinished run in this directory")
    save_float: bool = knob(False, "write the weights before quantization too, as final_model.pt")
    resume_other_code: bool = knob(False, "let RESUME go on with another script than the run's; recorded")
    peer_timeout_seconds: float = knob(900.0, "seconds a rank waits for another one before it ends", 1, 1e8)
    eval_only: str = knob("", "score this artifact instead of training")

    @property
    def eval_length(self) -> int:
        """Tokens of context in evaluation."""
        return self.eval_seq_len or self.train_seq_len

    @property
    def val_pass_tokens(self) -> int:
        """Tokens of one scoring pass of one rank.

        Upstream splits VAL_BATCH_SIZE over ranks and micro-steps, which together are always eight: so here,
        on any number of ranks.
        """
        return max(1, self.val_batch_size // 8)

    @property
    def lora_targets(self) -> list[str]:
        """What has adapters with TTT_MODE=lora."""
        return self.ttt_lora_targets.split(",")

    @property
    def documents_at_once(self) -> int:
        """Documents that learn side by side on one rank; by default as many as a micro-batch has rows.

        Each needs the memory of a row, and that of its adapters, their gradients and moments.
        """
        return self.ttt_batch_size or max(1, self.micro_batch_tokens // self.eval_length)

    @property
    def early_chunks(self) -> list[tuple[int, int]]:
        """The pairs (until, size) of TTT_EARLY_CHUNKS, in targets."""
        pairs = re.findall(r"(\d+):(\d+)", self.ttt_early_chunks)
        return [(int(until), int(size)) for until, size in pairs]

    @property
    def traced_steps(self) -> range:
        """The steps of TRACE_STEPS, the first of a run is 1; empty where it is empty, or no A:B."""
        if not re.fullmatch(r"[0-9]+:[0-9]+", self.trace_steps):
            return range(0)
        first, after = self.trace_steps.split(":")
        return range(int(first), int(after))

    def rules(self) -> list[Rule]:
        """What must hold between these settings."""
        chunk = self.ttt_chunk_tokens
        whole_strides = self.eval_stride > 0 and chunk % self.eval_stride == 0 and chunk >= self.eval_length
        by_sgd = self.ttt_enabled and self.ttt_mode == "sgd"
        by_adapters = self.ttt_enabled and self.ttt_mode == "lora"
        untils = [until for until, _ in self.early_chunks]
        longest_chunk = max([self.ttt_chunk_size, *(size for _, size in self.early_chunks)])
        reserve = self.gptq_reserve_seconds if self.gptq else 0.0
        clock = self.max_wallclock_seconds
        plain_name = os.sep not in self.run_id and not self.run_id.startswith(".")
        short_name = len(self.run_id.encode()) <= 200  # file systems allow 255 bytes
        return [
            *super().rules(),
            (self.eval_stride <= self.eval_length, "EVAL_STRIDE <= EVAL_SEQ_LEN (0: TRAIN_SEQ_LEN)"),
            (not by_sgd or whole_strides,
             "TTT_CHUNK_TOKENS as a multiple of EVAL_STRIDE, which is above 0, and >= EVAL_SEQ_LEN (0: "
             "TRAIN_SEQ_LEN) for TTT_ENABLED with TTT_MODE=sgd"),
            (len(set(self.lora_targets)) == len(self.lora_targets), "TTT_LORA_TARGETS each once"),
            (untils == sorted(set(untils)), "TTT_EARLY_CHUNKS with rising numbers before the colons"),
            (not by_adapters or longest_chunk <= self.eval_length,
             "TTT_CHUNK_SIZE and sizes of TTT_EARLY_CHUNKS <= EVAL_SEQ_LEN (0: TRAIN_SEQ_LEN) for "
             "TTT_ENABLED with TTT_MODE=lora"),
            (clock == 0 or reserve < clock, "GPTQ_RESERVE_SECONDS < MAX_WALLCLOCK_SECONDS"),
            (plain_name, "RUN_ID as a plain name"),
            (not self.trace_steps or len(self.traced_steps) > 0, "TRACE_STEPS as A:B, numbers with A < B"),
            (short_name, "RUN_ID of at most 200 bytes"),
            (not self.resume or not self.eval_only, "either RESUME or EVAL_ONLY"),
        ]  # fmt: skip

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Config":
        """Settings from `environ`; what is not there from the file it names as CONFIG; the rest by default.

        Raises ConfigError for what is wrong.
        """
        return cls.from_values(read_settings(environ).values)

    def overrides(self) -> dict[str, str]:
        """The settings that differ from their default, as strings."""
        default = Config().as_env()
        return {name: value for name, value in self.as_env().items() if value != default[name]}


def parse_value(name: str, text: str, spec: Field[Any]) -> Any:
    """The value of one variable in its field's type; ConfigError says what was expected."""
    among = spec.metadata["among"]
    low = spec.metadata["low"]
    high = spec.metadata["high"]
    kind: Any = type(spec.default)
    value: Any = None
    # A value that cannot be read is reported below, like one that is out of range.
    with contextlib.suppress(ValueError):
        value = bool(int(text)) if kind is bool else kind(text)
    if spec.metadata["negative_is_zero"] and value is not None and -1e300 <= value < 0:
        value = kind(0)
    # Text that would not print cannot be stored as KEY=VALUE either.
    if among:
        fits = value is not None and text in among
        expected = " or ".join(among)
    elif kind is str:
        fits = text.isprintable() and re.fullmatch(spec.metadata["pattern"], text) is not None
        expected = f"printable text like {spec.default!r}" if spec.default else "printable text"
    else:
        fits = value is not None and text.isprintable() and low <= value <= high
        expected = f"{kind.__name__} from {low:g} to {high:g}"
    if fits:
        return value
    raise ConfigError(f"{name}={text!r}: expected {expected}; {spec.metadata['meaning']}")


QUOTES = "\"'"


def read_config_file(path: str) -> dict[str, str]:
    """The KEY=VALUE lines of a file; a line's end from ` #` on is a comment. Raises ConfigError."""
    try:
        text = find_path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"CONFIG={path}: {error}; name a file of KEY=VALUE lines") from error
    if text.startswith("\ufeff"):
        raise ConfigError(f"CONFIG={path}: begins with a byte order mark; save it as UTF-8 without one")
    values: dict[str, str] = {}
    for line in text.split("\n"):
        if line.startswith("#"):
            continue
        # A # inside a value is part of it, like one in a path.
        setting = line.split(" #")[0].strip()
        if not setting:
            continue
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not name or not equals:
            raise ConfigError(f"CONFIG={path}: got {setting!r}, not KEY=VALUE; mend it, or put # before it")
        # No shell reads this file: its words and quotes would become part of names and values.
        plain = f"{name.removeprefix('export ').strip()}={value.strip(QUOTES)}"
        quoted = len(value) > 1 and value[0] in QUOTES and value[-1] == value[0]
        if name.startswith("export ") or quoted:
            raise ConfigError(f"CONFIG={path}: got {setting!r}, which is for a shell; write {plain!r}")
        if name in values:
            raise ConfigError(f"CONFIG={path}: {name} stands there twice, {values[name]!r} and {value!r}; "
                              "remove one of them")
        values[name] = value
    return values


# First words of our names that other programs use as well: MAX_JOBS, PARALLEL_SEQ, TRACE_ID.
COMMON_WORDS = """
    CHANNEL CHECKPOINT CODE COMPUTE DATA DEVICE HEAD MAX MIN MODEL NUM PARALLEL RATE RUN SAVE TRACE TRAINING
""".split()
# Words of at most so many letters may be anybody's: in the environment they are never refused.
SHORT_NAME = 5


class FormerName(NamedTuple):
    """How variables of public scripts, and earlier ones of ours, are answered that are no settings.

    A value is taken if it is `harmless`, or else by the settings it `stands_for`; if there are none, it is
    refused. Either way the user is told: in a line of the log, or of the error.
    """

    # NAME=value is about one value of a setting of ours that other scripts mean differently.
    names: str
    # The reason, and what to set instead: it is true whether a value is taken or refused.
    answer: str
    # Values that ask for what is done anyhow. *: any; a setting's name: its value.
    harmless: str = ""
    # NAME=value pairs: {} is the value that was given, {OTHER} that of a setting. One that is given wins.
    stands_for: str = ""


FORMER_NAMES = [
    # The same under another name. Of several that are given the first in the alphabet decides.
    FormerName("VAL_BATCH_TOKENS", "is VAL_BATCH_SIZE", stands_for="VAL_BATCH_SIZE={}"),
    FormerName("PARALLEL_RESIDUAL_START", "is PARALLEL_START_LAYER with PARALLEL_MODE=gptj",
               stands_for="PARALLEL_START_LAYER={} PARALLEL_MODE=gptj"),
    FormerName("MATRIX_CLIP_SIGMAS", "is MLP_CLIP_SIGMAS and ATTN_CLIP_SIGMAS",
               stands_for="MLP_CLIP_SIGMAS={} ATTN_CLIP_SIGMAS={}"),
    FormerName("ARTIFACT_DIR", "is RUNS_DIR; a run writes to RUNS_DIR/RUN_ID", stands_for="RUNS_DIR={}"),
    FormerName("PHASE_TIMEOUT_SECONDS", "is PEER_TIMEOUT_SECONDS", stands_for="PEER_TIMEOUT_SECONDS={}"),
    FormerName("TTT_EVAL_SEQ_LEN", "is EVAL_SEQ_LEN, of all scores", stands_for="EVAL_SEQ_LEN={}"),
    FormerName("DATASETS_DIR", "is DATA_PATH", stands_for="DATA_PATH={}"),
    FormerName("DATA_DIR", "stands for DATA_PATH and TOKENIZER_PATH",
               stands_for="DATA_PATH={}/datasets/fineweb10B_sp{VOCAB_SIZE} "
                          "TOKENIZER_PATH={}/tokenizers/fineweb_{VOCAB_SIZE}_bpe.model"),
    FormerName("MUON_WEIGHT_DECAY", "is MUON_WD", stands_for="MUON_WD={}"),
    FormerName("ADAM_WEIGHT_DECAY", "is ADAM_WD", stands_for="ADAM_WD={}"),
    FormerName("SMEAR_GATE", "is SMEAR_GATE_ENABLED", stands_for="SMEAR_GATE_ENABLED={}"),
    FormerName("GATE_WIDTH SMEAR_GATE_WIDTH", "is GATE_WINDOW", stands_for="GATE_WINDOW={}"),
    FormerName("USE_GPTQ", "is GPTQ", stands_for="GPTQ={}"),
    FormerName("SLIDING_WINDOW_ENABLED=0", "is EVAL_STRIDE=0 TTT_ENABLED=0",
               stands_for="EVAL_STRIDE=0 TTT_ENABLED=0"),
    FormerName("SLIDING_WINDOW_ENABLED", "EVAL_STRIDE sets the sliding window; 0: none", "1"),
    # Values of settings of ours that mean something else elsewhere.
    FormerName("WARMDOWN_ITERS=0", "no warm-down, unless WARMDOWN_FRAC is given with it",
               stands_for="WARMDOWN_FRAC=0"),
    FormerName("MUON_MOMENTUM_WARMUP_STEPS=0", "final momentum from the first step, unless "
               "MUON_MOMENTUM_WARMUP_FRAC is given with it", stands_for="MUON_MOMENTUM_WARMUP_FRAC=0"),
    FormerName("PARALLEL_START_LAYER=0", "parallel from layer 0 on (PR #1855: none); -1: none", "*"),
    FormerName("RESUME=auto", "name the run directory to continue"),
    # What is done anyhow, or can be had by other settings.
    FormerName("EMA_ENABLED", "EMA_DECAY averages the weights; EMA_DECAY=0 does not", "1"),
    FormerName("TTT_FREEZE_BLOCKS", "all blocks take part in test-time training, so 0 is what is done", "0"),
    FormerName("EMBEDDING_DIM", "embeddings are as wide as the model; leave it out", "MODEL_DIM"),
    FormerName("CASEOPS_ENABLED", "DATA_PATH and TOKENIZER_PATH name the data, by default those of CaseOps; "
               "leave it out, and for plain text set CONFIG=configs/sp8192.env", "1"),
    FormerName("VAL_COPY_STREAM", "no effect on results: VAL_PREFETCH says how validation is copied", "0 1"),
    FormerName("VAL_PREFETCH_QUEUE", "no effect on results: validation is copied whole", "*"),
    FormerName("VAL_BYTECOUNT_DEVICE", "no effect on results: the host counts bytes, once", "cpu cuda"),
    FormerName("COMPRESSOR", "no effect: codes go through the built-in range coder, which writes less", "*"),
    FormerName("FUSED_CE FUSED_CE_ENABLED", "no effect on results: torch.compile fuses the loss", "0 1 auto"),
    FormerName("VAL_DOC_FRACTION", "all documents are scored; VAL_TOKENS_LIMIT scores fewer tokens", "1"),
    FormerName("TTT_EVAL_BATCHES", "all of validation is scored; VAL_TOKENS_LIMIT scores a part"),
    FormerName("PARALLEL_FINAL_LANE", "the model ends with the mean of its lanes", "mean"),
    FormerName("SPARSE_ATTN_GATE_SCALE", "the steepness of that gate is 0.5, as in PR #1855", "0.5"),
    FormerName("SPARSE_ATTN_GATE_INIT_STD", "the weights of that gate begin at zero", "0"),
    FormerName("GATED_ATTN_QUANT_GATE", "gates are stored with 8 bits a row, like all small weights", "1"),
    FormerName("TTT_EVAL_ONLY EVAL_ONLY_PATH", "EVAL_ONLY=runs/x/model.bin scores a stored artifact", "0"),
    FormerName("PREQUANT_ONLY", "every run writes and scores an artifact, and logs the loss before it", "0"),
    FormerName("PREFLIGHT_ONLY", "every run makes these checks first, and cannot stop after them", "0"),
    FormerName("TRACE", "TRACE_STEPS=A:B records where the time of some steps goes", "0"),
    FormerName("DETERMINISTIC", "a CPU repeats runs of fixed steps bit for bit, a GPU does not", "0"),
    FormerName("MUON_BETA2", "no effect: PRs #549 and #1493 read it and never use it; BETA2 is AdamW's", "*"),
    FormerName("SWA_ENABLED SWA_EVERY",
               "no effect, as in PR #549, which never used that average; see EMA_DECAY", "*"),
    FormerName("LATE_QAT LATE_QAT_THRESHOLD QAT_ENABLED QAT_THRESHOLD", "no effect, as in PR #549, where "
               "it reached no bank; training does not quantize here", "*"),
    # What is not here: its off value is taken, and so are numbers of what is off elsewhere by default.
    FormerName("TRAIN_SEQ_SCHEDULE", "set TRAIN_SEQ_LENS, which says 1024@0.100,2048@0.700,3072@1.000 as "
               "1024:0.1 2048:0.7 3072"),
    FormerName("TRAIN_SEQ_SCHEDULE_MODE", "TRAIN_SEQ_LENS counts in shares of the run, by its clock "
               "if it has one, or in steps", "wallclock"),
    FormerName("SEQ_CHANGE_WARMUP_STEPS", "TRAIN_SEQ_LENS leaves learning rates as they are", "0"),
    FormerName("EVAL_INCLUDE_TAIL", "every target is scored, the last ones as well", "1"),
    FormerName("RECUR_ALPHA_ENABLED", "loop visits are not blended", "0"),
    FormerName("ASYM_LOGIT_RESCALE", "there is one softcap, LOGIT_SOFTCAP", "0"),
    FormerName("AWQ_LITE_ENABLED", "all columns of a matrix have the same bits", "0"),
    FormerName("AWQ_LITE_BITS AWQ_LITE_GROUP_SIZE AWQ_LITE_GROUP_TOP_K", "all columns of a matrix have the "
               "same bits; leave it out"),
    FormerName("ROPE_YARN", "longer inputs rescale the rotary base; see ROPE_TRAIN_SEQ_LEN", "0"),
    FormerName("GATED_ATTN_ENABLED ATTN_OUT_GATE_ENABLED GATED_ATTENTION",
               "no gate of this form; SPARSE_ATTN_GATE_ENABLED=1 is another one", "0"),
    FormerName("GATED_ATTN_INIT_STD ATTN_OUT_GATE_SRC", "no gate of this form", "*"),
    FormerName("VALUE_RESIDUAL", "later layers do not mix in the first layer's values; set it to 0", "0"),
    FormerName("DTG_ENABLED", "no gate around a whole block; set it to 0", "0"),
    FormerName("MTP_NUM_HEADS", "no extra heads (those of PR #549 were in no optimizer); set it to 0", "0"),
    FormerName("MTP_LOSS_WEIGHT", "no extra heads", "*"),
    FormerName("LAWA_ENABLED", "no average of snapshots; EMA_DECAY averages the weights", "0"),
    FormerName("LAWA_K LAWA_FREQ", "no average of snapshots", "*"),
    FormerName("ETLB_ENABLED", "evaluation trains no bias of the logits; set it to 0", "0"),
    FormerName("ETLB_LR ETLB_STEPS ETLB_CLIP", "evaluation trains no bias of the logits", "*"),
    FormerName("LQER_ENABLED", "no low-rank correction of rounding errors; set it to 0", "0"),
    FormerName("LQER_RANK LQER_TOP_K LQER_FACTOR_BITS LQER_ASYM_ENABLED LQER_ASYM_GROUP",
               "no low-rank correction of rounding errors; leave it out"),
    FormerName("NGRAM_TILT_ENABLED", "evaluation mixes in no n-grams; set it to 0", "0"),
    FormerName("PHASED_TTT_ENABLED PHASED_TTT_PREFIX_DOCS", "with TTT_ENABLED=1 adapters of each document "
               "learn, and nothing between documents; set it to 0", "0"),
    FormerName("PHASED_TTT_NUM_PHASES GLOBAL_TTT_LR GLOBAL_TTT_MOMENTUM GLOBAL_TTT_EPOCHS "
               "GLOBAL_TTT_CHUNK_TOKENS GLOBAL_TTT_BATCH_SEQS GLOBAL_TTT_WARMUP_START_LR "
               "GLOBAL_TTT_WARMUP_CHUNKS GLOBAL_TTT_GRAD_CLIP GLOBAL_TTT_RESPECT_DOC_BOUNDARIES",
               "with TTT_ENABLED=1 adapters of each document learn, and nothing between documents; leave it "
               "out"),
    FormerName("TTT_K_LORA TTT_O_LORA TTT_MLP_LORA", "TTT_LORA_TARGETS lists what has adapters with "
               "TTT_MODE=lora; leave it out there", "1"),
    FormerName("TTT_OPTIMIZER", "adapters learn with AdamW", "adam adamw"),
    FormerName("TTT_GRAD_STEPS", "adapters take one step a chunk", "1"),
    FormerName("TTT_WARM_START_A", "every document's adapters are drawn anew, so that no score depends on "
               "other documents; set it to 0", "0"),
    FormerName("CONTROL_TENSOR_NAME_PATTERNS INT8_KEEP_FLOAT_FP32_NAME_PATTERNS", "parameter_table says how "
               "a parameter is trained and stored, not its name; leave it out"),
    FormerName("GENERATE GENERATE_TOKENS GENERATE_TEMPERATURE GENERATE_TOP_K", "python -m tools generate "
               "writes text; leave it out"),
    FormerName("GPTQ_RESERVE_MS", "set GPTQ_RESERVE_SECONDS, a thousandth of it"),
    FormerName("TARGET_MB", "set ARTIFACT_BYTES_MAX, of code and artifact together, in bytes"),
    FormerName("SEQ_LEN_START SEQ_SCHEDULE_FRACTION", "set TRAIN_SEQ_LENS, of lengths and where they end"),
    FormerName("MLP_HIDDEN", "set MLP_MULT, that width over MODEL_DIM", "0"),
    FormerName("STRIDE", "set EVAL_STRIDE"),
    FormerName(
        """
        ACTIVATION ADAM_LR ATTN_PROJ_TYPE ATTN_VARIANT BATCH_SCHEDULE_FRACTION BATCH_TOKENS_START BIGRAM_HASH
        BITNET_GROUP_SIZE CHURN_LOG_EVERY COMPILE_MODE CORR_WEIGHT_LR DIFF_ATTN DISABLE_LAYER0_ATTN EMA
        EMA_START_FRACTION EMBED_DIM EVAL_BATCH_SEQS EVAL_DEPTH_RECURRENCE EVAL_OVERLAP EVAL_TEMP
        FP16_EMBED_EXPORT FP_STORAGE GATE_ATTN_OUT GATE_ATTN_SRC GPTQ_NUM_SEQS HESSIAN_CLIP_LAMBDA
        HNET_LR_DIFF INT4_LAYERS INT4_STEP INT6_LAYERS INT6_LAYER_END INT6_LAYER_START INT6_STEP
        JEPA_PRETRAIN_FRAC LEGENDRE_DEGREE_ATTN LEGENDRE_DEGREE_FFN LEGENDRE_GROUPS LOGIT_HEAD_TYPE
        LOOP_PHASE2_AT LORA_RANK LR_SCHEDULE MATRIX_OPTIMIZER MIXED_QUANT MLP_GROUPS MLP_RANK MODE MTP_HEADS
        MUON_EQ_R NGRAM_WITHIN_BETA NGRAM_WORD_BETA NUM_ATTN_LAYERS NUM_VIRTUAL_LAYERS N_INT6_LAYERS
        OUTER_LAYERS PARALLEL_RESIDUAL POST_GPTQ_EVAL_ONLY QAT QAT_INT6 QUANT_BITS QUANT_BITS_EMBED
        RATIO_LOSS_WEIGHT RECUR_LAYERS RECUR_START_STEP REFINER REFINER_KERNEL REPEAT_UNTIE_MLP
        REPEAT_UNTIE_MLP_LAYERS ROPE_TYPE SLIDING_BATCH_SIZE SLIDING_EVAL
        SLIDING_EVAL_STRIDE SMEAR SOFTCAP_TYPE TARGET_AVG_CHUNK_LEN TEMP_SCALING TRAINING_DEPTH_RECURRENCE
        TVERSKY_FEATURE_POOLS TVERSKY_MEMBERSHIP TVERSKY_NUM_FEATURES UNTIE_AT_FRACTION USE_BIGRAM_HASH
        USE_LZMA USE_ZSTD VAL_MAX_TOKENS WARMDOWN_FRACTION WARMDOWN_SHAPE WEIGHT_DECAY YARN_MAX_LEN
        """, "of another public script, and no setting here; leave it out"),
]  # fmt: skip


# What only one way of test-time training reads.
SETTINGS_OF_TTT_MODE = {
    "sgd": "TTT_LR TTT_EPOCHS TTT_MOMENTUM TTT_CHUNK_TOKENS TTT_BATCH_SEQS TTT_GRAD_CLIP",
    "lora": "TTT_LORA_TARGETS TTT_LORA_RANK TTT_LORA_ALPHA TTT_LORA_LR TTT_BETA1 TTT_BETA2 TTT_WEIGHT_DECAY "
            "TTT_CHUNK_SIZE TTT_EARLY_CHUNKS TTT_BATCH_SIZE",
}  # fmt: skip


class GivenSettings(NamedTuple):
    """What the user gave, once every name is answered."""

    values: dict[str, str]  # all that was given, and the settings that former names stand for
    notes: list[str]  # lines for the log


def read_settings(environ: Mapping[str, str]) -> GivenSettings:
    """What `environ` gives, over the file that it names as CONFIG; former and unknown names are answered.

    Raises one ConfigError for all names that are refused, so that they can be mended at once.
    """
    in_file = read_config_file(environ["CONFIG"]) if environ.get("CONFIG") else {}
    resolved = {**Config().as_env(), **in_file, **environ}
    values: dict[str, str] = {}
    said: dict[tuple[str, str], list[str]] = {}  # kind and reason, and the variables that it is said of
    # The environment is second: also what a name there stands for is over what the file gives.
    for given in (in_file, environ):
        stood_for: dict[str, str] = {}
        for name in sorted(given):
            answer = answer_name(name, given, resolved, given is in_file)
            if answer is not None:
                answer = give_way(answer, stood_for)
                said.setdefault((answer.kind, answer.reason), []).append(answer.subject)
                stood_for.update(answer.settings)
        values.update(stood_for)
        values.update(given)
    # Settings, and idle with another one: commands of public scripts give them all the same.
    for name in ("EMBED_LR", "HEAD_LR"):
        if name in environ and resolved["TIE_EMBEDDINGS"] == "1":
            reason = "no effect with TIE_EMBEDDINGS=1: TIED_EMBED_LR is the rate of embedding and head"
            said.setdefault(("note", reason), []).append(f"{name}={environ[name]}")
    for mode, names in SETTINGS_OF_TTT_MODE.items():
        for name in names.split():
            if name in environ and resolved["TTT_MODE"] != mode:
                reason = f"no effect with TTT_MODE={resolved['TTT_MODE']}; for it set TTT_MODE={mode}"
                said.setdefault(("note", reason), []).append(f"{name}={environ[name]}")

    notes = []
    errors = []
    for (kind, reason), subjects in said.items():
        line = f"{' '.join(subjects)}: {reason}"
        if kind == "error":
            errors.append(line)
        else:
            notes.append(f"{kind}: {line}")
    nearest = nearest_config(values) if said else ""
    if errors:
        if nearest:
            errors.append(f"most of the values given are those of CONFIG={nearest}")
        raise ConfigError(" | ".join(errors))
    if nearest and not environ.get("CONFIG"):
        notes.append(f"warning: what is not given has the defaults, of another model than CONFIG={nearest}")
    return GivenSettings(values, notes)


class NameAnswer(NamedTuple):
    """What is said of a name that is no setting, or of a value that means something else elsewhere."""

    subject: str
    reason: str
    kind: str  # note: taken; warning: ignored; error: refused
    settings: dict[str, str]  # that it stands for


def answer_name(
    name: str, given: Mapping[str, str], resolved: Mapping[str, str], in_file: bool
) -> NameAnswer | None:
    """The answer to one of the `given` variables; None: a setting, or a variable of another program.

    resolved: all settings. in_file: whether CONFIG gives them. That file is ours alone: there every unknown
    name is refused. The environment holds much else: there a name is refused if it is a former one, is close
    to a setting or begins with the same word; if it is short, it is ignored with a warning.
    """
    value = given[name]
    refusal = "warning" if len(name) <= SHORT_NAME and not in_file else "error"
    row = former_name(name, value)
    if row is None:
        meant = similar_settings(name, in_file)
        if not meant:
            return None
        return NameAnswer(f"unknown variable {name}", f"did you mean {' or '.join(meant)}?", refusal, {})

    # Taken: what asks for nothing, and what asks for what is done anyhow.
    subject = f"{name}={value}"
    harmless = value == "" or row.harmless == "*"
    for wanted in row.harmless.split():
        harmless = harmless or same_value(value, resolved.get(wanted, wanted))
    if harmless:
        return NameAnswer(subject, row.answer, "note", {})
    if not row.stands_for:
        return NameAnswer(subject, row.answer, refusal, {})
    # Taken as settings of ours. One that is given as well is what the user meant by our own names.
    settings = {}
    reason = row.answer
    for pair in row.stands_for.split():
        setting, _, meaning = pair.partition("=")
        if setting in given:
            reason += f"; {setting}={given[setting]} is given with it, and wins"
        else:
            settings[setting] = meaning.format(value.rstrip("/") or value, **resolved)
    if name in Config().as_env() and not settings:
        return None  # a setting, given together with what it would stand for
    return NameAnswer(subject, reason, "note", settings)


def give_way(answer: NameAnswer, taken: Mapping[str, str]) -> NameAnswer:
    """The answer without settings that another former name has given another value; its reason says so."""
    settings = {}
    reason = answer.reason
    for setting, value in answer.settings.items():
        if taken.get(setting, value) == value:
            settings[setting] = value
        else:
            reason += f"; {setting}={taken[setting]} of another name is given with it, and wins"
    return answer._replace(reason=reason, settings=settings)


def former_name(name: str, value: str) -> FormerName | None:
    """The row that answers a variable, if there is one."""
    for row in FORMER_NAMES:
        for entry in row.names.split():
            its_name, equals, its_value = entry.partition("=")
            if its_name == name and (not equals or same_value(value, its_value)):
                return row
    return None


def same_value(given: str, wanted: str) -> bool:
    """Whether two texts are the same value: equal numbers where both are numbers, else equal letters."""
    try:
        return float(given) == float(wanted)
    except ValueError:
        return given.strip().lower() == wanted.lower()


def similar_settings(name: str, in_file: bool) -> list[str]:
    """The settings that an unknown name may stand for; none: it is a setting, or of another program."""
    known = [spec.name.upper() for spec in fields(Config)]
    if name in known:
        return []
    meant = []
    if len(name) <= SHORT_NAME:  # short ones are close to everything
        meant = [other for other in known if is_one_edit(name, other)]
    else:
        meant = difflib.get_close_matches(name, known, cutoff=0.83)
    word = name.split("_")[0]
    if not meant and word not in COMMON_WORDS:
        meant = [other for other in known if other.split("_")[0] == word]
    if not meant and in_file:
        meant = ["one that --help lists"]
    return meant


def is_one_edit(name: str, other: str) -> bool:
    """Whether one letter added, lost or replaced, or two neighbours swapped, make one of the other."""
    # What they have in common at both ends does not count.
    while name and other and name[0] == other[0]:
        name = name[1:]
        other = other[1:]
    while name and other and name[-1] == other[-1]:
        name = name[:-1]
        other = other[:-1]
    if len(name) == 2:
        return other == name[::-1]
    return len(name) <= 1 and len(other) <= 1


def nearest_config(given: Mapping[str, str]) -> str:
    """The configuration of an ancestor that shares most values with `given`; of equal ones the shortest.

    Empty where the defaults share as many, and where there is no folder of configurations.
    """
    nearest = ""
    shortest = 0
    most = shared_values(given, Config().as_env())
    for path in sorted(find_path("configs").glob("*.env")):
        # Files for demonstrations and for machines are no system that a command could be of.
        if not path.name.startswith(("pr", "upstream")):
            continue
        values = read_config_file(str(path))
        shared = shared_values(given, values)
        if shared > most or (shared == most and nearest and len(values) < shortest):
            nearest = f"configs/{path.name}"
            most = shared
            shortest = len(values)
    return nearest


def shared_values(given: Mapping[str, str], others: Mapping[str, str]) -> int:
    """How many settings have the same value in both; of a path its last part counts."""
    shared = 0
    for name, value in others.items():
        if name in given and same_value(Path(given[name]).name, Path(value).name):
            shared += 1
    return shared


def micro_steps_per_step(config: Config, world_size: int) -> int:
    """Micro-batches of one rank per optimizer step; ConfigError when the batch does not split evenly."""
    wanted = config.train_batch_tokens
    length = config.segment_tokens
    # As many whole segments as one forward pass may hold, and no more than the step gives a rank.
    micro_segments = min(config.micro_batch_tokens // length, wanted // length // world_size)
    tokens_together = world_size * max(1, micro_segments) * length
    if micro_segments == 0 or wanted % tokens_together != 0:
        unit = f"sequences of TRAIN_SEQ_LEN={length}"
        if config.train_seq_lens:
            unit = (f"segments of {length}, the least common multiple of TRAIN_SEQ_LENS="
                    f"{config.train_seq_lens},")  # fmt: skip
        raise ConfigError(f"TRAIN_BATCH_TOKENS={wanted}: expected a multiple of {tokens_together}, which is "
                          f"{world_size} ranks times the {unit} that fit into MICRO_BATCH_TOKENS="
                          f"{config.micro_batch_tokens}; one at least must fit; change one of these settings")
    return wanted // tokens_together


# ============================================================================================================
# RUN — device and ranks, run directory, log and clock: the same on a laptop and on many nodes.
# ============================================================================================================


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Machine:
    """Where this process computes and who its peers are: the one place that knows a rank."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    # Of activations: bfloat16 where matrix units take it.
    dtype: torch.dtype = torch.float32
    # Whether torch.compile is wanted.
    compiled: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_name(self) -> str:
        """What the device is called in the log."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else f"{platform.machine()} CPU"

    @property
    def for_scoring(self) -> "Machine":
        """This machine for scoring: not compiled on a CPU, where that takes longer than to score."""
        return self if self.on_gpu else replace(self, compiled=False)

    @property
    def orthogonalize_dtype(self) -> torch.dtype:
        """Of the products of Newton-Schulz, which need few digits: bfloat16 where there are units for it."""
        if self.on_gpu or (self.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()):
            return torch.bfloat16
        return torch.float32

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The function, compiled where that is wanted."""
        return torch.compile(function, **options) if self.compiled else function

    def wait(self) -> None:
        """Wait until the device has finished what it was given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order; all ranks call it together."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks; all ranks call it together."""
        if self.world_size > 1:
            dist.all_reduce(tensor)


class Place(NamedTuple):
    """Where a process stands among those of a run; ranks are counted from 0."""

    rank: int
    world_size: int
    local_rank: int  # on its machine


def place_among_ranks(environ: Mapping[str, str]) -> Place:
    """What the launcher says; nothing said: alone. ConfigError where it says only a part of it."""
    numbers = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    # An empty variable is one that was not set.
    for name in numbers:
        text = environ.get(name, "")
        if text and not text.isdecimal():
            raise ConfigError(f"{name}={text!r}: expected a whole number; start several ranks with torchrun")
        if text:
            numbers[name] = int(text)
    place = Place(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"])
    # Ranks meet at an address; without one they would wait for each other, or end in a stack trace.
    needed = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environ.get(name)]
    if place.world_size > 1 and missing:
        raise ConfigError(f"WORLD_SIZE={place.world_size} without {', '.join(missing)}: "
                          "start with torchrun, or unset WORLD_SIZE for one process alone")
    if place.rank >= place.world_size:
        raise ConfigError(f"RANK={place.rank}: expected below WORLD_SIZE={place.world_size}; "
                          "start with torchrun, or unset both for one process alone")
    return place


M_TRIM_THRESHOLD = -1  # numbers of glibc's malloc.h
M_MMAP_THRESHOLD = -3
KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Let the C library keep up to 1 GiB that was freed, on Linux with glibc; elsewhere nothing happens.

    A step on a CPU frees what it computed. Given back to the system, every page of it is zeroed and mapped
    again in the next step: 7 % of the time of the demo.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)


def check_cpp_compiler(environ: Mapping[str, str]) -> None:
    """ConfigError where torch.compile for CPUs would fail, later and with a message of its linker."""
    folder = str(Path(torch.__file__).parent)
    if " " in folder:
        raise ConfigError(f"COMPILE=1: torch is in {folder!r}, and cannot link what it compiles for a CPU "
                          "from a path with a space; move the environment, or set COMPILE=0")
    compiler = environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if sys.platform != "win32" and shutil.which(compiler) is None:
        raise ConfigError(f"COMPILE=1: on a CPU it needs a C++ compiler, and there is no {compiler}; install "
                          "it, set CXX to another one, or set COMPILE=0")


NVIDIA_DRIVER = "/dev/nvidiactl"  # is there on Linux where its driver is loaded


def this_machine(config: Config, environ: Mapping[str, str]) -> Machine:
    """The machine that the settings and the launcher's variables describe; joins the other ranks.

    Raises ConfigError for a device that is not there or cannot be used, and where ranks do not meet.
    """
    rank, world_size, local_rank = place_among_ranks(environ)
    # Before the first operation: a small model's are so short that several threads may gain nothing.
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)

    # A device that was asked for and is not there is an error, never a slower run.
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    gpus = torch.cuda.device_count()
    if on_gpu and local_rank >= gpus:
        raise ConfigError(f"DEVICE={config.device}: expected a GPU for each process, got {gpus} for local "
                          f"rank {local_rank}, counted from 0; start fewer processes, or try DEVICE=cpu")
    # torch counts GPUs by asking their driver: it may count some on which it cannot start.
    if config.device == "auto" and not on_gpu and (gpus > 0 or os.path.exists(NVIDIA_DRIVER)):
        raise ConfigError(f"DEVICE=auto: this machine has GPUs, but torch {torch.__version__} for CUDA "
                          f"{torch.version.cuda} cannot use them: an older driver or a CPU build; install a "
                          "torch that fits, or set DEVICE=cpu")
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        has_bfloat16_units = torch.cuda.get_device_capability()[0] >= 8
    else:
        has_bfloat16_units = torch.cpu._is_amx_tile_supported()
        keep_freed_memory()

    # Processors without units for bfloat16 compute in it, but slower than in fp32.
    dtype = torch.bfloat16 if has_bfloat16_units else torch.float32
    if config.compute_dtype != "auto":
        dtype = getattr(torch, config.compute_dtype)
    compiled = config.compile == "1" or (config.compile == "auto" and on_gpu)
    if compiled and not on_gpu:
        check_cpp_compiler(environ)

    # Tensors on the host go over gloo also on GPUs: the clock is agreed on without asking a device.
    if world_size > 1:
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                timeout=timedelta(seconds=config.peer_timeout_seconds),
                device_id=device if on_gpu else None,
            )
        except (ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"rank {rank}: MASTER_ADDR={environ['MASTER_ADDR']} "
                              f"MASTER_PORT={environ['MASTER_PORT']}: {world_size} ranks have not met there "
                              f"({reason}); start all of them, with torchrun") from error
    machine = Machine(rank, world_size, device, dtype, compiled)
    # A rank that soon finds something wrong would leave while others still connect to it, and they would
    # tell of a lost connection, or wait for it.
    machine.gather(None)
    return machine


def print_line(line: str, stream: Any) -> None:
    """One line to a stream; a closed console costs no run."""
    # RuntimeError: a signal's line, while another one is being printed.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        print(line, file=stream, flush=True)


def append_line(line: str, path: Path) -> None:
    """One line to the end of a file; a full disk costs no run."""
    with contextlib.suppress(OSError, RuntimeError, ValueError), open(path, "a", encoding="utf-8") as file:
        print(line, file=file, flush=True)


# What helps where a file or folder cannot be written.
REMEDIES = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room in your quota of that disk",
    errno.EACCES: "give yourself the right to write there, or set another RUNS_DIR",
    errno.EPERM: "give yourself the right to write there, or set another RUNS_DIR",
    errno.EROFS: "that disk is read-only: set another RUNS_DIR",
    errno.ENAMETOOLONG: "set a shorter RUN_ID or RUNS_DIR",
    errno.ENOTDIR: "a part of that path is a file: set another RUNS_DIR",
}


def remedy_of(error: OSError) -> str:
    """What helps against an error of the file system."""
    return REMEDIES.get(error.errno or 0, "set another RUNS_DIR")


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path` as a whole, or not at all where the process is killed or the disk is full.

    Raises ConfigError where it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # what a killed run left there is overwritten
    try:
        # Somebody tidied up: what was trained is worth more than the order of folders.
        if not path.parent.exists():
            print_line(f"warning: {path.parent} was removed while the run was under way: it is made again, "
                       "and its log begins here", sys.stderr)
            path.parent.mkdir(parents=True)
        # A name changes hands in one moment: nobody ever reads half a file.
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ConfigError(f"RUNS_DIR: {path} cannot be written ({error}); {remedy_of(error)}") from error


CHECKPOINT_WAIT_SECONDS = 60.0  # at most, for one that is being written when a signal ends the run
CHECKPOINT = "checkpoint.pt"
ARTIFACT = "model.bin"
SETTINGS_FILE = "config.env"
SUMMARY = "summary.json"


class Run:
    """What one process of a run writes: its log and its events, and where its seconds went."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.directory: Path | None = None  # until it is opened
        self.phases: dict[str, float] = {}  # seconds
        self.phase_name = "setup"
        self.training = False  # while it is true, a signal asks for a checkpoint first
        self.stop_signal = 0  # the signal that asked
        self.writer: threading.Thread | None = None  # of the last checkpoint

    def path(self, name: str) -> Path:
        """A file of the run directory, which must have been opened."""
        assert self.directory is not None, "the run directory is opened before anything is written to it"
        return self.directory / name

    def log(self, line: str, event: str = "", **values: Any) -> None:
        """A line to log.txt and the console; of an `event` its values to metrics.jsonl; rank 0 only."""
        # One log for all ranks: what another one has to say, it says by raising.
        if self.machine.rank != 0:
            return
        print_line(line, sys.stdout)
        if self.directory is None:
            return
        append_line(line, self.path("log.txt"))
        if event:
            self.record(event, [values])

    def record(self, event: str, entries: list[dict[str, Any]]) -> None:
        """Events of one kind to metrics.jsonl, all at once; rank 0 only."""
        if self.machine.rank == 0 and self.directory is not None and entries:
            lines = [json.dumps({"event": event, **values}) for values in entries]
            append_line("\n".join(lines), self.path("metrics.jsonl"))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a block, device work included, to `phases[name]`."""
        # Work of the phase before must not be counted here.
        self.machine.wait()
        if self.stop_signal:  # it came when training was about to end by itself
            self.exit_by_signal(self.stop_signal)
        self.phase_name = name
        start = time.perf_counter()
        yield
        self.machine.wait()
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def on_signal(self, number: int, _frame: FrameType | None = None) -> None:
        """While training is under way the first signal asks for a checkpoint; otherwise the process ends."""
        if self.training and not self.stop_signal:
            self.stop_signal = number  # `train` sees it, saves, and ends
            print_line(f"rank {self.machine.rank}: signal {number}: ends after the step under way, with a "
                       "checkpoint; a second signal ends at once, without one", sys.stderr)
        else:
            self.exit_by_signal(number)

    def exit_by_signal(self, number: int) -> None:
        """Say what there is to go on with, and end this process."""
        rank = f"rank {self.machine.rank}"
        # A checkpoint that is nearly on disk is worth the moment it takes.
        writer = self.writer
        if writer is not None and writer.is_alive():
            # The second signal comes here too, while the first one waits: it takes no notice of the disk.
            self.writer = None
            print_line(f"{rank}: signal {number}: ends once the checkpoint under way is on disk, or after "
                       f"{CHECKPOINT_WAIT_SECONDS:g} s; a second signal ends at once", sys.stderr)
            writer.join(CHECKPOINT_WAIT_SECONDS)
        line = f"{rank}: stopped by signal {number} in phase {self.phase_name}; {self.ways_on()}"
        print_line(line, sys.stderr)
        os._exit(128 + number)

    def ways_on(self) -> str:
        """How to go on after the run has ended early: only what exists is named."""
        ways = []
        if self.directory is not None and self.path(CHECKPOINT).exists():
            ways.append(f"RESUME={self.directory}")
        if self.directory is not None and self.path(ARTIFACT).exists():
            ways.append(f"EVAL_ONLY={self.path(ARTIFACT)}")
        if not ways:
            return "nothing is saved to continue with"
        return f"continue with {' or '.join(ways)}"


# ============================================================================================================
# TIMING — where the milliseconds of a step go, as lines and as a trace; steps that are not shown pay nothing.
# ============================================================================================================

FIRST_STEPS = 10  # of a run: each has its lines, whatever the period

# The rows of a trace: what the host does, by thread; what the GPU does, by stream; passes over the data.
LANES = ("main", "disk", "stage", "copy_stream", "compute_stream", "epochs")
TRACE_END = b"\n]}\n"


class CopyMarks(NamedTuple):
    """The beginning and the end of the copy of a batch, in the stream that copies it."""

    begin: torch.cuda.Event
    end: torch.cuda.Event


class Lap(NamedTuple):
    """The end of a part of a step."""

    name: str  # batch, forward, backward, grad_clip or optimizer
    host_seconds: float
    event: torch.cuda.Event | None  # the same moment on the GPU
    copy: CopyMarks | None  # of a batch: its way to the GPU


class Work(NamedTuple):
    """A part of a step that was given to the GPU."""

    name: str
    step: int
    asked_seconds: float  # when the host began to ask for it
    begin: torch.cuda.Event
    end: torch.cuda.Event


class Trace:
    """TRACE_STEPS of one rank as a file for ui.perfetto.dev, in Chrome's trace format; any thread adds to it.

    With TRACE_STEPS empty nothing is measured, kept or written. The file has what overlaps the steps asked
    for; a step lasts until the next one begins, the last one until training ends. Times are seconds of
    `time.perf_counter`, one clock for all ranks of a machine. The file is valid JSON after each flush, also
    if the run is killed then; a full disk costs no run.
    """

    def __init__(self, steps: range = range(0), run: Run | None = None) -> None:
        self.steps = steps
        self.run = run
        self.wanted = len(steps) > 0
        self.opened = math.inf  # when the first of these steps began
        self.closed = math.inf  # when the first step after them began
        self.restarted = 0.0  # when the loader last went elsewhere: what began before belongs to no step
        self.epoch = 0  # pass over the data of the step under way
        self.epoch_began = 0.0
        self.events: deque[str] = deque()  # that the file has not yet
        self.lengths_ms: dict[str, list[float]] = {}  # of all spans, by lane and name
        self.unfinished: deque[Work] = deque()  # by the GPU, as far as known
        # A moment that both clocks know: an event that is over, and when.
        self.anchor: torch.cuda.Event | None = None
        self.anchor_seconds = 0.0

    @property
    def recording(self) -> bool:
        """Whether the step under way is one of those asked for."""
        return self.opened < math.inf and self.closed == math.inf

    def now(self) -> float:
        """Seconds of the trace's clock; 0 where it is not wanted."""
        return time.perf_counter() if self.wanted else 0.0

    def begin(self, step: int, epoch: int) -> None:
        """Start of a step, in a pass over the data; both are counted from 1. Not called in the warm-up."""
        now = time.perf_counter()
        if step in self.steps and self.opened == math.inf:
            self._open(epoch)
        elif self.recording and step not in self.steps:
            self._close(now)
        elif self.recording and epoch != self.epoch:
            self._end_epoch(now)
            self.epoch = epoch
        # Once a step: whoever kills the run loses one step of the trace.
        self._place_finished_work()
        self.flush()

    def _open(self, epoch: int) -> None:
        """The first step asked for begins. On a GPU it is waited for, this once, to compare the clocks."""
        # An event that is over at a known time: what follows is placed by its distance from it.
        if self.run is not None and self.run.machine.on_gpu:
            self.anchor = torch.cuda.Event(enable_timing=True)
            self.anchor.record()
            self.anchor.synchronize()
        self.opened = time.perf_counter()
        self.anchor_seconds = self.opened
        self.epoch_began = self.opened
        self.epoch = epoch

    def _close(self, now: float) -> None:
        """The last step asked for is over; what began before now is still shown when it ends."""
        self._end_epoch(now)
        self.closed = now

    def _end_epoch(self, now: float) -> None:
        """The pass over the data as far as it lies in the trace."""
        self.add("epoch", "epochs", self.epoch_began, now, epoch=self.epoch)
        self.epoch_began = now

    def finish(self) -> None:
        """End of training, the GPU is done: log how often and how long each span was, in milliseconds."""
        if not self.wanted or self.run is None:
            return
        if self.recording:
            self._close(time.perf_counter())
        self._place_finished_work()
        self.flush()
        # What was asked for and did not happen is told as well.
        if self.opened == math.inf:
            self.run.log(f"trace:none, no step of TRACE_STEPS={self.steps.start}:{self.steps.stop} was run")
            return
        self.run.log(f"trace:{self.path} for ui.perfetto.dev")
        for name, lengths_ms in sorted(self.lengths_ms.items()):
            mean_ms = sum(lengths_ms) / len(lengths_ms)
            self.run.log(f"trace_span:{name} count:{len(lengths_ms)} mean_ms:{mean_ms:.3f} "
                         f"min_ms:{min(lengths_ms):.3f} max_ms:{max(lengths_ms):.3f}")

    def span(self, name: str, lane: str, **args: Any) -> contextlib.AbstractContextManager[None]:
        """A span of what this thread does in a `with` block, also where that raises."""
        return self._measure(name, lane, args) if self.wanted else contextlib.nullcontext()

    @contextlib.contextmanager
    def _measure(self, name: str, lane: str, args: dict[str, Any]) -> Iterator[None]:
        """`span`, where one is wanted."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, lane, begin, time.perf_counter(), **args)

    def add(self, name: str, lane: str, begin: float, end: float, **args: Any) -> None:
        """A span from begin to end, in seconds, if it overlaps the steps asked for."""
        if begin >= self.restarted and begin < self.closed and end >= self.opened:
            self._span(name, lane, begin, end, args)

    def _span(self, name: str, lane: str, begin: float, end: float, args: dict[str, Any]) -> None:
        """A span, and its length for the table."""
        length = end - begin
        self.lengths_ms.setdefault(f"{lane}/{name}", []).append(1e3 * length)
        self._event("X", name, lane, begin, dur=1e6 * length, args=args)

    def count(self, name: str, value: int) -> None:
        """A counter that from now on has this value."""
        self._event("C", name, "main", time.perf_counter(), args={name: value})

    def arrow(self, number: int, begin: float) -> None:
        """An arrow from a moment of the lane `stage` to now, in `main`; its number is unique in a rank."""
        if not self.recording or begin < self.opened:
            return
        assert self.run is not None, "a trace with steps belongs to a run"
        # With the rank in its upper bits a number is unique among ranks too: their files can be merged.
        link = {"id": (self.run.machine.rank << 40) + number, "cat": "batch", "bp": "e"}
        self._event("s", "batch", "stage", begin, **link)
        self._event("f", "batch", "main", time.perf_counter(), **link)

    def add_step(self, step: int, laps: list[Lap]) -> None:
        """The spans of a step: `chunk` is all of it, `train` what lies between two waits for a batch."""
        # Waits and trains follow one another without a gap, so that a chunk is their sum; parts fill a train.
        began = laps[0].host_seconds
        train_began = began
        for before, lap in itertools.pairwise(laps):
            if lap.name == "batch":
                # What came before is over: nothing at all, if this is the first batch.
                if before.name != "begin":
                    self.add("train", "main", train_began, before.host_seconds, step=step)
                self.add("gpu_queue_wait", "main", before.host_seconds, lap.host_seconds, step=step)
                train_began = lap.host_seconds
            else:
                self.add(lap.name, "main", before.host_seconds, lap.host_seconds, step=step)
                if before.event is not None and lap.event is not None:
                    work = Work(lap.name, step, before.host_seconds, before.event, lap.event)
                    self.unfinished.append(work)
        # The last train has the optimizer in it.
        ended = laps[-1].host_seconds
        self.add("train", "main", train_began, ended, step=step)
        self.add("chunk", "main", began, ended, step=step)

    def _place_finished_work(self) -> None:
        """Add what the GPU has finished, without waiting for the rest.

        Its clock and the host's drift apart. So each piece is placed by its distance from the one before, and
        then moved to where it neither begins before the host asked for it nor ends later than now.
        """
        while self.unfinished and self.unfinished[0].end.query():
            work = self.unfinished.popleft()
            assert self.anchor is not None, "work of a GPU follows the comparison of the clocks"
            length = work.begin.elapsed_time(work.end) / 1e3
            started = self.anchor_seconds + self.anchor.elapsed_time(work.begin) / 1e3
            ended = max(started, work.asked_seconds) + length
            ended = min(ended, time.perf_counter())
            self.anchor = work.end
            self.anchor_seconds = ended
            # Of the steps asked for, even where the host is already further.
            self._span(work.name, "compute_stream", ended - length, ended, {"step": work.step})

    @property
    def path(self) -> Path:
        """The file of this rank, in the run directory."""
        assert self.run is not None, "a trace with steps belongs to a run"
        return self.run.path(f"trace_rank{self.run.machine.rank}.json")

    def _event(self, kind: str, name: str, lane: str, seconds: float, **more: Any) -> None:
        """One event, as text: a span is of kind X, a counter C, the ends of an arrow s and f, a name M."""
        rank = 0 if self.run is None else self.run.machine.rank
        place = {"ph": kind, "name": name, "pid": rank, "tid": 1 + LANES.index(lane), "ts": 1e6 * seconds}
        self.events.append(f",\n{json.dumps({**place, **more})}")

    def _new_file(self) -> bytes:
        """A file with the names of its rows, and no event."""
        assert self.run is not None, "a trace with steps belongs to a run"
        rank = self.run.machine.rank
        names = [{"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}]
        for number, lane in enumerate(LANES, 1):
            row = {"ph": "M", "pid": rank, "name": "thread_name", "tid": number, "args": {"name": lane}}
            names.append(row)
        lines = ",\n".join([json.dumps(name) for name in names])
        return b'{"traceEvents": [\n' + lines.encode() + TRACE_END

    def flush(self) -> None:
        """Write what was added since the last call where the closing brackets were, and these behind it."""
        # Other threads may add meanwhile: what is there now is taken, event by event.
        text = "".join([self.events.popleft() for _ in range(len(self.events))])
        if not text:
            return
        # In one call: nobody kills a process between the events and the bracket behind them.
        with contextlib.suppress(OSError):
            if not self.path.exists():  # a resumed run goes on with its file
                self.path.write_bytes(self._new_file())
            with open(self.path, "r+b", buffering=0) as file:
                file.seek(-len(TRACE_END), os.SEEK_END)
                file.write(text.encode() + TRACE_END)


class StepTimer:
    """`timing_breakdown` lines of the first steps and of each `every`-th; 0: of none. Laps for the trace.

    All in milliseconds. Fields up to `backward` are means over the micro-steps, the others sums over the step
    (as in PR #591). `batch_cpu` and `val` are host time, `val` of the validation just before the step;
    `batch_h2d` is the copy to the GPU, which is no part of the step if it was made ahead; the rest is device
    time. A reported step is waited for, as its events must have happened before they can be read.
    """

    def __init__(self, every: int, on_gpu: bool, trace: Trace | None = None) -> None:
        self.every = every
        self.on_gpu = on_gpu
        self.trace = trace or Trace()
        self.reported = False
        self.timed = False
        self.step = 0
        self.val_ms = 0.0
        self.laps: list[Lap] = []

    def begin(self, step: int | None, val_ms: float = 0.0) -> None:
        """Start of a step, the first is 1; None: one of the warm-up, which is never reported."""
        self.reported = False
        if self.every > 0 and step is not None:
            self.reported = step <= FIRST_STEPS or step % self.every == 0
        self.timed = self.reported or self.trace.recording
        self.step = step or 0
        self.val_ms = val_ms
        self.laps = []
        self.lap("begin")  # where the first part starts

    def lap(self, name: str, copy: CopyMarks | None = None) -> None:
        """Mark the end of a part of the step: batch, forward, backward, grad_clip or optimizer."""
        if not self.timed:
            return
        # An event is a mark in the stream of the GPU: it costs no waiting.
        event = torch.cuda.Event(enable_timing=True) if self.on_gpu else None
        self.laps.append(Lap(name, time.perf_counter(), event, copy))
        if event is not None:
            event.record()

    def end(self) -> str:
        """End of a step, for the trace too: its line, empty if it is not reported."""
        if self.trace.recording:
            self.trace.add_step(self.step, self.laps)
        if not self.reported:
            return ""
        names = ("batch", "forward", "backward", "grad_clip", "optimizer")
        host_ms = dict.fromkeys(names, 0.0)
        device_ms = dict.fromkeys(names, 0.0)
        copy_ms = 0.0
        micro_steps = 0
        # Only here a step is waited for.
        last_event = self.laps[-1].event
        if last_event is not None:
            last_event.synchronize()
        # A part lasts from the lap before to its own; micro-batches add up.
        for before, lap in itertools.pairwise(self.laps):
            host_ms[lap.name] += 1e3 * (lap.host_seconds - before.host_seconds)
            if before.event is not None and lap.event is not None:
                device_ms[lap.name] += before.event.elapsed_time(lap.event)
            if lap.copy is not None:
                copy_ms += lap.copy.begin.elapsed_time(lap.copy.end)
            if lap.name == "batch":
                micro_steps += 1
        work_ms = device_ms if self.on_gpu else host_ms
        parts = max(micro_steps, 1)
        return (f"timing_breakdown step:{self.step} micro_steps:{micro_steps} "
                f"batch_cpu_ms:{host_ms['batch'] / parts:.2f} batch_h2d_ms:{copy_ms / parts:.2f} "
                f"forward_ms:{work_ms['forward'] / parts:.2f} backward_ms:{work_ms['backward'] / parts:.2f} "
                f"grad_clip_ms:{work_ms['grad_clip']:.2f} optimizer_ms:{work_ms['optimizer']:.2f} "
                f"val_ms:{self.val_ms:.2f}")


# ============================================================================================================
# DATA — the tokens in an order that is a pure function of shards, seed and geometry, delivered ahead of need.
# ============================================================================================================

BOS_ID = 1  # begins every document, in all of the challenge's tokenizers
# A shard is a file of 256 little-endian int32 (magic, version, token count, zeros), then its uint16 ids.
SHARD_MAGIC = 20240520
SHARD_VERSION = 1
SHARD_HEADER_BYTES = 1024


class Shard(NamedTuple):
    """A file of tokens."""

    path: Path
    tokens: int


class ShardVisit(NamedTuple):
    """One pass over a shard, as a part of the stream of segments."""

    begin: int  # its first segment's position in the stream
    shard: Shard
    order: np.ndarray  # the numbers of its segments, in the order in which they come


class LengthStart(NamedTuple):
    """From which step on sequences have which length."""

    step: int  # of the run, the first is 0
    length: int  # tokens


class StagedBatch(NamedTuple):
    """A micro-batch on its way to the device."""

    ids_BT: Tensor  # uint16, of T + 1 columns: inputs and targets overlap
    starts: Tensor  # as in `Batch`
    sequence_hash: int
    copy: CopyMarks | None
    staged_seconds: float  # when it was ready, by the trace's clock


class Batch(NamedTuple):
    """A micro-batch on the device."""

    inputs_BT: Tensor  # int64
    targets_BT: Tensor  # int64
    starts: Tensor  # where rows and documents begin in the flattened inputs, then B T; int32
    copy: CopyMarks | None = None  # of its way to the GPU, where that is measured


def why_no_file(head: bytes) -> str:
    """Why a file that begins so cannot be what it should be, and what helps; empty: no reason to be seen."""
    if not head:
        return "the file is empty; fetch it again"
    if head.startswith(b"version https://git-lfs"):
        return "the file is a Git LFS pointer, not what it points to; run `git lfs pull`"
    if head.lstrip()[:1] == b"<":
        return "the file is a web page, perhaps of a failed download; fetch it again"
    return ""


# Folders of the public data sets, and what data/fineweb.py calls them.
PUBLISHED_DATA = {
    "fineweb10B_sp1024": "sp1024",
    "fineweb10B_sp4096": "sp4096",
    "fineweb10B_sp8192": "sp8192",
    "fineweb10B_sp8192_lossless_caps_caseops_v1_reserved": "caseops",
}


def open_shards(pattern: str) -> list[Shard]:
    """The shards that match, sorted by name, each header checked against its file. Raises DataError."""
    shards = []
    for name in sorted(glob.glob(pattern)):
        path = Path(name)
        try:
            with open(path, "rb") as file:
                head = file.read(SHARD_HEADER_BYTES)
            size_bytes = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path}: {error}, expected a token shard; check DATA_PATH") from error
        why = why_no_file(head)
        if not why and len(head) < SHARD_HEADER_BYTES:
            why = f"{len(head)} bytes are less than the header of a shard; fetch it again"
        if why:
            raise DataError(f"{path}: expected a token shard: {why}")
        magic, version, tokens = np.frombuffer(head, "<i4", 3).tolist()
        # The size tells of a download that broke off.
        got = (magic, version, size_bytes)
        expected = (SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES + 2 * tokens)
        if tokens < 1 and (magic, version) == (SHARD_MAGIC, SHARD_VERSION):
            raise DataError(f"{path}: a shard of {tokens} tokens; export it again, or remove it")
        if got != expected:
            raise DataError(f"{path}: magic, version and size are {got}, expected {expected}; fetch it again")
        shards.append(Shard(path, tokens))
    if not shards:
        variant = PUBLISHED_DATA.get(Path(pattern).parent.name)
        fetch = f"fetch them with `python data/fineweb.py --variant {variant}`, " if variant else ""
        raise DataError(f"{pattern}: no token shard; {fetch}set DATA_PATH, see data/README.md, or try "
                        "`make demo`")
    return shards


def read_tokens(shard: Shard, vocab_size: int = 1 << 16) -> np.ndarray:
    """All tokens of a shard, uint16.

    Raises DataError where the file has changed since it was opened, or an id is not below `vocab_size`.
    """
    # A file may have been replaced since it was opened, while the run was under way.
    if open_shards(glob.escape(str(shard.path))) != [shard]:
        raise DataError(f"{shard.path}: no longer has the {shard.tokens} tokens it had; fetch it again")
    ids = np.fromfile(shard.path, "<u2", offset=SHARD_HEADER_BYTES)
    if ids.max() >= vocab_size:
        at = int(np.argmax(ids >= vocab_size))
        raise DataError(f"{shard.path}, token {at}, byte {SHARD_HEADER_BYTES + 2 * at}: id {ids[at]}, "
                        f"expected below VOCAB_SIZE={vocab_size}; set it and DATA_PATH for one tokenizer")
    return ids


def permutation(config: TrainingSettings, count: int, *key: int) -> np.ndarray:
    """A permutation of range(count) seeded by SEED and the key, one or two numbers; SHUFFLE=0: none moves.

    The numbers are sorted by random words. The words are Philox4x64-10 itself (Salmon et al., 2011) and not
    what numpy's generators make of them, which numpy may change from version to version.
    """
    if not config.shuffle:
        return np.arange(count)
    # Philox counts blocks of four words in the first of four places; the other three are free for the key.
    # Its length is a part of it: an epoch alone is another key than an epoch and shard 0.
    counter = [0, len(key), 0, 0]
    counter[2 : 2 + len(key)] = key
    words = np.random.Philox(key=config.seed, counter=counter).random_raw(count)
    return np.argsort(words, kind="stable")


def segments_per_epoch(config: TrainingSettings, shards: list[Shard]) -> int:
    """Whole segments in all shards: those of one pass over the data."""
    return sum(max(shard.tokens - 1, 0) // config.segment_tokens for shard in shards)


def shard_visits(config: TrainingSettings, shards: list[Shard], position: int) -> Iterator[ShardVisit]:
    """The stream of training tokens in segments, without end, from the shard that holds `position` on.

    A segment is a sequence. With TRAIN_SEQ_LENS it is the least common multiple M of the lengths: each of
    them cuts it into whole sequences. So a new length takes what the epoch still has in the order in which
    the old one would have come to it; no token comes twice, none is lost.

    Each epoch permutes the shards and, within each, its segments. Segment i of a shard is its tokens
    i M … (i + 1) M inclusive; a partial one at the end is skipped. Any position is reached in O(shards).
    Raises DataError if no shard holds a whole segment.
    """
    length = config.segment_tokens
    # A shard shorter than one segment has nothing to give.
    usable = [shard for shard in shards if shard.tokens > length]
    if not usable:
        unit = "the least common multiple of TRAIN_SEQ_LENS" if config.train_seq_lens else "TRAIN_SEQ_LEN"
        raise DataError(f"no training shard holds {unit} + 1 = {length + 1} tokens; fetch more")
    sizes = [(shard.tokens - 1) // length for shard in usable]
    epoch_size = segments_per_epoch(config, shards)
    for epoch in itertools.count(position // epoch_size):
        begin = epoch * epoch_size
        for number in permutation(config, len(usable), epoch).tolist():
            # Shards that end before the position cost nothing but this comparison.
            if begin + sizes[number] > position:
                yield ShardVisit(begin, usable[number], permutation(config, sizes[number], epoch, number))
            begin += sizes[number]


def known_length_starts(config: Config) -> list[LengthStart]:
    """Where the lengths of training begin, as far as the settings alone say it: always the first.

    Shares of a run of ITERATIONS are steps. Under a clock nobody knows them yet: `Loader.begin_length` is
    told in time.
    """
    parts = config.length_parts
    starts = [LengthStart(0, parts[0].length)]
    for before, part in itertools.pairwise(parts):
        step = before.until
        if step < 1 and config.max_wallclock_seconds > 0:
            break
        if step < 1:
            # The first step at which so much of the run is over; as a product it may be a rounding off.
            step = int(before.until * config.iterations)
            while step < config.iterations and step / config.iterations < before.until:
                step += 1
        # In a run of few steps each length has one at least.
        starts.append(LengthStart(max(int(step), starts[-1].step + 1), part.length))
    return starts


def document_starts(inputs_BT: np.ndarray, config: ModelSettings) -> np.ndarray:
    """Where rows and, with DOC_MASK, documents begin, then B T; int32."""
    starts_BT = np.zeros(inputs_BT.shape, bool)
    if config.doc_mask:
        starts_BT = inputs_BT == BOS_ID
    # A row begins anew: what stood before it belongs to another sequence.
    starts_BT[:, 0] = True
    return np.append(np.flatnonzero(starts_BT), inputs_BT.size).astype(np.int32)


def hash_sequences(first: int, ids_BT: np.ndarray) -> int:
    """Hash of sequences of T + 1 uint16 ids, the first of which is at position `first` of the stream.

    By it two runs can show that they were given the same tokens in the same order, on any number of ranks.
    Within a sequence each pair of ids, and the last id, is multiplied by an odd random key, and all are added
    up. Each of these sums is multiplied by an odd random word of the sequence's position, and all are added
    up, modulo 2**64. A sum has no order: ranks and micro-batches add theirs in any.
    """
    # Two ids are one number of 32 bits; an odd one out is paired with zero.
    head_BT = ids_BT[:, :-1]
    if head_BT.shape[1] % 2 != 0:
        head_BT = np.pad(head_BT, ((0, 0), (0, 1)))
    pairs_BN = head_BT.view(np.uint32)
    one = np.uint64(1)
    keys = np.random.Philox(key=1).random_raw(pairs_BN.shape[1] + 1) | one
    # The generator makes four words at a time: position p has the first of its p-th four.
    places = np.random.Philox(key=2, counter=first).random_raw(4 * len(ids_BT))[::4] | one
    sums = np.einsum("bw,w->b", pairs_BN, keys[1:]) + ids_BT[:, -1] * keys[0]
    return int((sums * places).sum(dtype=np.uint64))


class Loader:
    """Micro-batches of one rank, without end: disk → stage → `next_batch`; without threads the same bytes.

    A step has S segments, TRAIN_BATCH_TOKENS together: step k has the segments [k S, (k + 1) S) of
    `shard_visits` on any number of ranks. Rank r takes the r-th equal part of them, MICRO_BATCH_TOKENS at a
    time. Each segment is cut into sequences of the length that the step has: so the stream is a pure function
    of shards, SEED and `length_starts`. Raises ConfigError if a step does not divide like this.
    """

    def __init__(
        self, config: Config, shards: list[Shard], machine: Machine, trace: Trace | None = None
    ) -> None:
        self.config = config
        self.shards = shards
        self.machine = machine
        self.trace = trace or Trace()
        self.pools: list[futures.ThreadPoolExecutor] = []
        self.stream: torch.cuda.Stream | None = None
        if config.train_copy_stream and machine.on_gpu:
            self.stream = torch.cuda.Stream(machine.device)
        # Events before and after each copy, for who wants to know how long it takes.
        self.marks_copies = machine.on_gpu and (config.training_timing_breakdown or self.trace.wanted)

        # Of each step a rank has so many segments, in so many micro-batches of so many.
        self.micro_steps = micro_steps_per_step(config, machine.world_size)
        self.step_segments = config.train_batch_tokens // config.segment_tokens // machine.world_size
        self.micro_segments = self.step_segments // self.micro_steps
        self.length_starts = known_length_starts(config)

        # By this a state knows whether it is of the same stream.
        self.fingerprint: dict[str, Any] = {}
        for name in ("seed", "shuffle", "train_seq_len", "train_seq_lens", "train_batch_tokens"):
            self.fingerprint[name] = getattr(config, name)
        names = repr([(shard.path.name, shard.tokens) for shard in shards]).encode()
        self.fingerprint["shards_sha256"] = hashlib.sha256(names).hexdigest()

        self.waits_ms: list[float] = []  # how long each step waited for batches, since they were last taken
        self.index = 0  # micro-batches delivered, from the first step of the run on
        self.stream_hash = 0  # of what was delivered
        self.seek(0)

    def seek(self, step: int) -> None:
        """Go to the start of a step; the stream hash begins at zero."""
        self.close()
        self.index = step * self.micro_steps
        self.stream_hash = 0
        self.waits_ms = []
        self.trace.restarted = self.trace.now()
        visits = self._ahead("disk", self._read(self.index), 1)
        staged = self._stage(visits, self.index)
        self.batches = self._ahead("stage", staged, self.config.train_prefetch_queue)

    def begin_length(self, start: LengthStart) -> None:
        """Let another length begin at a step to come; all ranks call it alike, before that step is staged."""
        # Each of TRAIN_PREFETCH_QUEUE batches may be a whole step.
        staged_step = self.index // self.micro_steps + self.config.train_prefetch_queue
        assert start.step > staged_step, f"step {start.step} may be staged: it is at most {staged_step}"
        self.length_starts = [*self.length_starts, start]

    def length_of(self, step: int) -> int:
        """Tokens of a sequence in this step."""
        length = self.length_starts[0].length
        for start in self.length_starts:
            if start.step <= step:
                length = start.length
        return length

    def _ahead(self, stage: str, items: Iterator[Any], count: int) -> Iterator[Any]:
        """The same items, `count` of them made ahead of need by a thread; not so without TRAIN_PREFETCH."""
        if not self.config.train_prefetch:
            return items
        # A new thread is on GPU 0; leaving `torch.cuda.stream` there would open a context on it.
        initializer: Callable[..., Any] | None = None
        arguments: tuple[Any, ...] = ()
        if self.machine.on_gpu:
            initializer = torch.cuda.set_device
            arguments = (self.machine.device,)
        pool = futures.ThreadPoolExecutor(1, f"loader {stage}", initializer, arguments)
        self.pools.append(pool)
        # Work begins now, not when the first item is asked for.
        pending = deque(pool.submit(next, items) for _ in range(count))

        def in_order() -> Iterator[Any]:
            while True:
                if self.trace.recording:
                    self.trace.count(f"{stage} queue", sum(item.done() for item in pending))
                pending.append(pool.submit(next, items))
                yield pending.popleft().result(self.config.loader_timeout_seconds)

        return in_order()

    def _position(self, index: int) -> int:
        """Position in the stream of the first segment of a micro-batch of this rank."""
        step, micro_step = divmod(index, self.micro_steps)
        rank_part = step * self.machine.world_size + self.machine.rank
        return rank_part * self.step_segments + micro_step * self.micro_segments

    def _read(self, first: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Disk stage: the segments of each shard (N, M + 1), and those of this rank in their order."""
        length = self.config.segment_tokens
        start = self._position(first)
        for visit in shard_visits(self.config, self.shards, start):
            with self.trace.span("disk_load", "disk", shard=visit.shard.path.name):
                tokens = read_tokens(visit.shard, self.config.vocab_size)
            segments_NM = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
            positions = visit.begin + np.arange(len(visit.order))
            # Each step is cut into one run of segments for each rank.
            owner = positions // self.step_segments % self.machine.world_size
            mine = (positions >= start) & (owner == self.machine.rank)
            yield segments_NM, visit.order[mine]

    def _segments(self, visits: Iterator[Any]) -> Iterator[np.ndarray]:
        """The segments of this rank (M + 1,), one after the other."""
        for segments_NM, order in visits:
            for number in order.tolist():
                yield segments_NM[number]

    def _stage(self, visits: Iterator[Any], first: int) -> Iterator[StagedBatch]:
        """Stage: micro-batches from number `first` on, gathered in pinned memory and copied to the device."""
        segments = self._segments(visits)
        for index in itertools.count(first):
            with self.trace.span("stage", "stage", batch=index):
                batch = self._stage_batch(segments, index)
            yield batch

    def _stage_batch(self, segments: Iterator[np.ndarray], index: int) -> StagedBatch:
        """The micro-batch of this number, made of the next segments.

        Nothing is written while it is read: a batch has its own memory. PyTorch reuses pinned memory after
        the event behind its last copy, device memory when the streams told by `record_stream` are past it.
        A batch is handed over once its copy is complete, so the stream of the step has nothing to wait for.
        """
        length = self.length_of(index // self.micro_steps)
        per_segment = self.config.segment_tokens // length
        rows = []
        for segment in itertools.islice(segments, self.micro_segments):
            for begin in range(0, self.config.segment_tokens, length):
                rows.append(segment[begin : begin + length + 1])
        shape = (self.micro_segments * per_segment, length + 1)
        ids = torch.empty(shape, dtype=torch.uint16, pin_memory=self.machine.on_gpu)
        ids_BT = ids.numpy()  # the same memory
        np.concatenate(rows, out=ids_BT.reshape(-1))
        # What is hashed is what is sent: the very memory that is copied. A sequence has the position that it
        # would have if its length were that of the whole run.
        sequence_hash = hash_sequences(self._position(index) * per_segment, ids_BT)
        starts = torch.from_numpy(document_starts(ids_BT[:, :-1], self.config))
        if self.machine.on_gpu:
            starts = starts.pin_memory()
        copy = None
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                ids, starts, copy = self._copy(ids, starts)
                self.stream.synchronize()
            self._trace_copy(copy)
        return StagedBatch(ids, starts, sequence_hash, copy, self.trace.now())

    def _copy(self, ids: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, CopyMarks | None]:
        """Both on the device, copied in the current stream; marked where somebody asks how long it takes."""
        if not self.marks_copies:
            ids = ids.to(self.machine.device, non_blocking=True)
            starts = starts.to(self.machine.device, non_blocking=True)
            return ids, starts, None
        marks = CopyMarks(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        marks.begin.record()
        ids = ids.to(self.machine.device, non_blocking=True)
        starts = starts.to(self.machine.device, non_blocking=True)
        marks.end.record()
        return ids, starts, marks

    def _trace_copy(self, marks: CopyMarks | None) -> None:
        """Show a copy that has just been waited for: it ended now."""
        if marks is not None and self.trace.wanted:
            ended = self.trace.now()
            began = ended - marks.begin.elapsed_time(marks.end) / 1e3
            self.trace.add("gpu_transfer", "copy_stream", began, ended)

    def next_batch(self) -> Batch:
        """The next micro-batch. LoaderError says what failed, where in the stream, and its own traceback."""
        start = time.perf_counter()
        staged = self._next_staged()
        self._add_wait(1e3 * (time.perf_counter() - start))
        self.trace.arrow(self.index, staged.staged_seconds)

        ids = staged.ids_BT
        starts = staged.starts
        copy = staged.copy
        if self.stream is not None:
            # They were made on the copy stream: their memory is not reused before this stream is done too.
            ids.record_stream(torch.cuda.current_stream(self.machine.device))
            starts.record_stream(torch.cuda.current_stream(self.machine.device))
        elif self.machine.on_gpu:
            # The copy goes before the step in its own stream: what is shown is how long it takes to ask.
            with self.trace.span("gpu_transfer", "main"):
                ids, starts, copy = self._copy(ids, starts)
        torch._dynamo.mark_dynamic(starts, 0)  # or torch recompiles for every number of documents
        self.index += 1
        self.stream_hash = (self.stream_hash + staged.sequence_hash) % 2**64
        # Widened on the device: two bytes a token cross the bus, not sixteen.
        return Batch(ids[:, :-1].long(), ids[:, 1:].long(), starts, copy)

    def _add_wait(self, wait_ms: float) -> None:
        """Count a wait for the next batch to its step."""
        # A step has as many batches as micro-steps.
        first_of_step = self.index % self.micro_steps == 0
        if first_of_step or not self.waits_ms:
            self.waits_ms.append(0.0)
        self.waits_ms[-1] += wait_ms

    def stage_first(self) -> None:
        """Wait until the next batch is staged, and keep it for `next_batch`. Raises LoaderError."""
        first = self._next_staged()
        self.batches = itertools.chain([first], self.batches)

    def _next_staged(self) -> StagedBatch:
        """Wait for the next batch of the workers. Raises LoaderError."""
        try:
            staged: StagedBatch = next(self.batches)
        except (Exception, SystemExit, GeneratorExit) as error:  # whatever a worker died of
            raise self._failure(error) from error
        return staged

    def _failure(self, error: BaseException) -> LoaderError:
        """What went wrong with the next batch, and where in the stream."""
        # The shard that holds the batch's last sequence is the one it was read from last.
        step = self.index // self.micro_steps
        last = self._position(self.index) + self.micro_segments - 1
        shard = next(shard_visits(self.config, self.shards, last)).shard
        where = f"rank {self.machine.rank}, step {step}, position {last} of the stream, {shard.path}"
        if isinstance(error, futures.TimeoutError):
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            where += f": LOADER_TIMEOUT_SECONDS={self.config.loader_timeout_seconds:g}, stacks on stderr"
        return LoaderError(f"{where}: {error!r}\n{traceback.format_exc()}")

    @property
    def epoch(self) -> int:
        """The pass over the data that the next batch belongs to; the first is 1."""
        return 1 + self._position(self.index) // segments_per_epoch(self.config, self.shards)

    def take_waits_ms(self) -> list[float]:
        """How long each step since the last call waited for its batches, in milliseconds."""
        waits_ms = self.waits_ms
        self.waits_ms = []
        return waits_ms

    def state_dict(self, total_hash: int) -> dict[str, Any]:
        """A state for all ranks, as JSON: the steps delivered, and the sum of the ranks' hashes of them."""
        assert self.index % self.micro_steps == 0, "a state is of whole steps"
        return {
            **self.fingerprint,
            "length_starts": [list(start) for start in self.length_starts],
            "step": self.index // self.micro_steps,
            "stream_hash": total_hash,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state ends, on any number of ranks. LoaderError names what would make it differ."""
        for name, value in self.fingerprint.items():
            if state.get(name) != value:
                raise LoaderError(f"state of other data: {name} is {state.get(name)!r}, expected {value!r}; "
                                  "go on with the settings and shards of the run that made it")
        self.length_starts = [LengthStart(step, length) for step, length in state["length_starts"]]
        self.seek(state["step"])
        if self.machine.rank == 0:  # hashes are added up over the ranks
            self.stream_hash = state["stream_hash"]

    def close(self) -> None:
        """Let the threads end after the item under way; at any time, any number of times."""
        for pool in self.pools:
            pool.shutdown(wait=False, cancel_futures=True)
        self.pools = []
        self.batches = iter(())


# ============================================================================================================
# MODEL — weights live in banks, one 3-D parameter per shape; one block serves training, scoring, calibration.
# ============================================================================================================


class Parameter(NamedTuple):
    """All that the rest of the file knows about one parameter."""

    # A row of the first axis is what one layer (or one use) takes. Muon wants three axes: a bank of matrices,
    # their rows, their columns. Where a size is 0 the feature is off, and there is no parameter.
    shape: tuple[int, ...]
    # The start: this constant (a list fills the last axis), or normal values of standard deviation `std`;
    # then the first `random_matrices` of a bank as MATRIX_INIT says.
    constant: float | list[float] = 0.0
    std: float = 0.0
    random_matrices: int = 0
    # muon: MATRIX_LR and MUON_WD; scalar: SCALAR_LR and ADAM_WD; embedding: TIED_EMBED_LR or EMBED_LR, and
    # EMBED_WD; head: HEAD_LR, no decay. The last two are tables of the vocabulary, which are used as a whole.
    optimizer: str = "scalar"
    # How it is quantized. attn, mlp, embed: by the *_CLIP_SIGMAS of that name, and by EMBED_BITS or
    # MATRIX_BITS. Empty: a small tensor, always 8 bits.
    role: str = ""
    # What its matrices multiply, by the names that `observe` is given: matrix i of a bank has the Hessian
    # (name, i). With two names the second half of the bank counts from 0 again. None: rounded to nearest.
    inputs: tuple[str, ...] = ()


def parameter_table(c: ModelSettings) -> dict[str, Parameter]:
    """Every parameter of the model, by name.

    One line here initialises, optimises, quantizes, stores and checkpoints a parameter. If layers read it,
    add a field to `LayerWeights` and a line to `_layer_weights`.

    Names end in their axes; those of banks do not. `qo_bank` holds all query matrices, then all output
    matrices; `kv_bank` all keys, then all values; the other banks one matrix a layer. Output and down
    matrices, which write to the residual stream, start at zero.
    """
    layers = c.num_layers
    width = c.model_dim
    skips = len(visit_order(c, looping=True)[0])
    skip_gates = skips if c.skip_gates_enabled else 0
    attn_gates = layers if c.sparse_attn_gate_enabled else 0
    smear = 1 if c.smear_gate_enabled else 0
    channel_smear = 1 if c.channel_smear_enabled else 0
    has_lanes = c.parallel_mode == "lanes" and c.parallel_start_layer >= 0
    # GPT-J layers share one lane, and need no weights to mix two.
    lane_layers = max(0, layers - c.parallel_start_layer) if has_lanes else 0
    table = {
        **vocabulary_tables(c),
        "qo_bank": Parameter(
            (2 * layers, width, width), random_matrices=layers,
            optimizer="muon", role="attn", inputs=("attn_in", "attn_out")),
        "kv_bank": Parameter(
            (2 * layers, c.kv_dim, width), random_matrices=2 * layers,
            optimizer="muon", role="attn", inputs=("attn_in", "attn_in")),
        "mlp_up_bank": Parameter(
            (layers, c.mlp_dim, width), random_matrices=layers,
            optimizer="muon", role="mlp", inputs=("mlp_in",)),
        "mlp_down_bank": Parameter(
            (layers, width, c.mlp_dim),
            optimizer="muon", role="mlp", inputs=("mlp_hidden",)),
        "attn_scale_LD": Parameter((layers, width), 1.0),
        "mlp_scale_LD": Parameter((layers, width), 1.0),
        "resid_keep_LD": Parameter((layers, width), 1.0),
        "resid_inject_LD": Parameter((layers, width)),
        "qk_gain_LH": Parameter((layers, c.num_heads), c.qk_gain_init),
        "skip_weight_SD": Parameter((skips, width), 1.0),
        "skip_gate_SD": Parameter((skip_gates, width)),
        "attn_gate_LHW": Parameter((attn_gates, c.num_heads, c.gate_window)),
        "smear_gate_1W": Parameter((smear, c.gate_window)),
        "smear_scale_1": Parameter((smear,)),
        "channel_smear_1D": Parameter((channel_smear, width)),
        **projections_of_tables(c),
        # What each of the two lanes takes of itself, of the attention's output and of the MLP's.
        "lane_mix_P23": Parameter((lane_layers, 2, 3), [1.1, 1.0, 1.0]),
    }  # fmt: skip
    return {name: parameter for name, parameter in table.items() if 0 not in parameter.shape}


def vocabulary_tables(c: ModelSettings) -> dict[str, Parameter]:
    """The parameters with a row for each token, or for each hash of a pair of tokens."""
    # Tied, the embedding is the head as well. Untied, it starts as nn.Embedding does, and multiplies nothing.
    embedding_std = c.tied_embed_init_std
    embedding_inputs: tuple[str, ...] = ("hidden",)
    head_rows = 0
    if not c.tie_embeddings:
        embedding_std = 1.0
        embedding_inputs = ()
        head_rows = c.vocab_size
    value_rows = c.vocab_size if c.ve_enabled else 0
    return {
        "token_embedding_VD": Parameter(
            (c.vocab_size, c.model_dim), std=embedding_std,
            optimizer="embedding", role="embed", inputs=embedding_inputs),
        "output_head_VD": Parameter(
            (head_rows, c.model_dim),
            optimizer="head", role="embed", inputs=("hidden",)),
        "bigram_table_RC": Parameter(
            (c.bigram_vocab_size, c.bigram_dim),
            optimizer="embedding", role="embed"),
        "value_table_VC": Parameter(
            (value_rows, c.ve_dim), std=0.01,
            optimizer="embedding", role="embed"),
    }  # fmt: skip


def projections_of_tables(c: ModelSettings) -> dict[str, Parameter]:
    """What turns rows of the bigram and value tables into embeddings and values: matrices and scales."""
    bigram = 1 if c.bigram_vocab_size else 0
    value = 1 if c.ve_enabled else 0
    # A table as wide as what it is added to needs no matrix.
    bigram_matrices = bigram if c.bigram_dim != c.model_dim else 0
    value_matrices = value if c.ve_dim != c.kv_dim else 0
    return {
        "bigram_projection_1DC": Parameter((bigram_matrices, c.model_dim, c.bigram_dim), random_matrices=1),
        "bigram_scale_1": Parameter((bigram,), 0.05),
        "value_projection_1KC": Parameter((value_matrices, c.kv_dim, c.ve_dim), random_matrices=1),
        "value_scale_1": Parameter((value,), 0.1),
        "value_layer_scale_N": Parameter((len(c.value_layers),), 1.0),
    }


def initial_weights(name: str, parameter: Parameter, c: ModelSettings, seed: int) -> Tensor:
    """The start of a parameter, drawn from the seed and its name alone: no feature changes another's draw."""
    # CRC-32 of a text: the same seed in every Python and on every machine.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    weights = torch.empty(parameter.shape).copy_(torch.tensor(parameter.constant))
    if parameter.std:
        weights.normal_(0.0, parameter.std, generator=generator)
    for matrix in weights[: parameter.random_matrices]:
        if c.matrix_init == "orthogonal":
            nn.init.orthogonal_(matrix, generator=generator)
        else:  # torch's own for a linear layer: ±1 / sqrt(inputs)
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
    return weights


def visit_order(c: ModelSettings, looping: bool) -> tuple[list[int], list[int]]:
    """Layers in the order they run, split into the U-Net's encoder and decoder half (PR #1493)."""
    layers = list(range(c.num_layers))
    if looping and c.num_loops > 0:  # without extra passes the borders of the loop may be anywhere
        first = c.loop_start
        after = c.loop_end + 1
        # The looped layers follow one another as a group, not each by itself.
        layers = layers[:first] + layers[first:after] * (c.num_loops + 1) + layers[after:]
    half = len(layers) // 2
    return layers[:half], layers[half:]


def rotary_table(
    length: int, c: ModelSettings, device: torch.device | None = None, longest: int = 0
) -> Tensor:
    """Cosines and sines (2, T, 1, rotated/2); for more than the trained length the base grows (PR #549).

    longest: tokens of the longest input that is to have this base; 0: this one.
    """
    rotated = c.rotated_dims
    base = c.rope_base
    trained_length = c.rope_train_seq_len or c.train_seq_len
    # Longer inputs turn more slowly. The slowest pair of channels is slowed by all of the stretch, and its
    # angles stay within those of training; the fastest is not. Inputs up to TRAIN_SEQ_LEN have one base.
    stretch = max(longest or length, c.train_seq_len) / trained_length
    if stretch > 1 and rotated > 2:
        base *= stretch ** (rotated / (rotated - 2))
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64, device=device) / rotated
    # In float64: angles of thousands of radians lose digits in fp32.
    positions_T11 = torch.arange(length, dtype=torch.float64, device=device)[:, None, None]
    angles = positions_T11 * base ** (-exponents)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x_BTHE: Tensor, rotary: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) of the first channels of each head; the other channels pass.

    rotary: of `rotary_table`. Of the channels that turn, the first half pair with the second half.
    """
    cos, sin = rotary
    half = cos.size(-1)
    a, b, rest = x_BTHE.split([half, half, x_BTHE.size(-1) - 2 * half], dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin, rest], dim=-1)


RMS_NORM_EPS = 2.0**-23  # one for every version of torch


def rms_norm(x: Tensor, scale: float = 1.0) -> Tensor:
    """x over its root mean square along the last axis (arXiv 1910.07467), times `scale`."""
    normalized = F.rms_norm(x, (x.size(-1),), eps=RMS_NORM_EPS)
    return normalized if scale == 1.0 else normalized * scale


class Heads(NamedTuple):
    """What attention reads, (B, T, heads, E)."""

    q_BTHE: Tensor
    k_BTKE: Tensor
    v_BTKE: Tensor
    own_BTKE: Tensor  # the values once more, for XSA: so the gradients of both uses arrive apart


def heads_plain(qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor) -> Heads:
    """Queries, keys and values of attention out of what the projection made of them, side by side.

    Queries and keys are normalised, so that their products are cosines, and rotated; the gain of each query
    head makes them sharp. Of the heads N those that are no queries are half keys, half values.
    """
    key_heads = (qkv_BTNE.size(2) - len(gain_H)) // 2
    q_BTHE, k_BTKE, v_BTKE = qkv_BTNE.split([len(gain_H), key_heads, key_heads], dim=2)
    q_BTHE = rotate(rms_norm(q_BTHE), rotary) * gain_H[:, None]
    k_BTKE = rotate(rms_norm(k_BTKE), rotary)
    return Heads(q_BTHE, k_BTKE, v_BTKE, v_BTKE)


def token_before(x: Tensor, first_BT: Tensor | None = None) -> Tensor:
    """For each token of x (B, T, ...) what x has for the token before it; zero where there is none.

    first_BT: true for tokens with none before them, as the first of a document; None: the first of each row
    alone.
    """
    # One place more in front of the tokens, and none at its end. F.pad counts axes from the last one.
    axes_of_a_token = x.dim() - 2
    previous = F.pad(x, [0, 0] * axes_of_a_token + [1, 0])[:, :-1]
    if first_BT is None:
        return previous
    first = first_BT
    for _ in range(axes_of_a_token):
        first = first.unsqueeze(-1)
    return previous.masked_fill(first, 0.0)


def offset_keys(k_BTKE: Tensor, channels: int, first_BT: Tensor | None) -> Tensor:
    """Keys whose last channels are those of the token before; first_BT as in `token_before`.

    So a key says where its token stands and what came before it: one layer finds the tokens that followed
    what the query is looking at (modded-nanogpt PR #169).
    """
    own, carried = k_BTKE.split([k_BTKE.size(-1) - channels, channels], dim=-1)
    return torch.cat([own, token_before(carried, first_BT)], dim=-1)


XSA_MIN_SQUARE = 1e-24  # of a value's length, so that nothing is divided by zero


def xsa_plain(y_BTHE: Tensor, v_BTKE: Tensor, gate_BTH: Tensor) -> Tensor:
    """XSA: each head without its component along the token's own value (PR #287), times the head's gate.

    The component is (y·v / v·v) v: no unit vector is made. The sums are at least in fp32.
    """
    wide = torch.promote_types(y_BTHE.dtype, torch.float32)
    y_BTKGE = y_BTHE.unflatten(2, (v_BTKE.size(2), -1))
    v_BTK1E = v_BTKE.unsqueeze(3)
    square_BTK11 = (v_BTK1E * v_BTK1E).sum(-1, keepdim=True, dtype=wide).clamp(min=XSA_MIN_SQUARE)
    along_BTKG1 = (y_BTKGE * v_BTK1E).sum(-1, keepdim=True, dtype=wide) / square_BTK11
    rest_BTHE = (y_BTKGE - along_BTKG1 * v_BTK1E).flatten(2, 3)
    return (rest_BTHE * gate_BTH[..., None]).to(y_BTHE.dtype)


def attention_sdpa(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Tensor | None) -> Tensor:
    """torch's attention, (B, T, H, E). mask: (B, 1, T, T), who sees whom; None: all tokens before oneself."""
    if mask is not None and q_BTHE.is_cuda:  # its fast kernels with a mask have no grouped heads
        group = q_BTHE.size(2) // k_BTKE.size(2)
        k_BTKE = k_BTKE.repeat_interleave(group, 2)
        v_BTKE = v_BTKE.repeat_interleave(group, 2)
    y_BHTE = F.scaled_dot_product_attention(
        q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2),
        mask, is_causal=mask is None, enable_gqa=True,
    )  # fmt: skip
    return y_BHTE.transpose(1, 2)


def pack_heads(x_BTHE: Tensor, key_heads: int) -> Tensor:
    """(B, T, H, E) to (B K, T G, E): the G query heads that share keys are more rows of one product."""
    x_BTKGE = x_BTHE.unflatten(2, (key_heads, -1))
    return x_BTKGE.transpose(1, 2).flatten(0, 1).flatten(1, 2)


def unpack_heads(x_NRE: Tensor, shape_BTHE: torch.Size) -> Tensor:
    """Undo `pack_heads`."""
    B, T, H, E = shape_BTHE
    key_heads = len(x_NRE) // B
    x_BKTGE = x_NRE.view(B, key_heads, T, H // key_heads, E)
    return x_BKTGE.transpose(1, 2).reshape(shape_BTHE)


MATH_ATTENTION_BLOCK = 64  # tokens whose scores are made together


class MathAttention(torch.autograd.Function):
    """`attention_sdpa` as plain matrix products, for CPUs.

    The attention weights are kept for the backward pass: their number grows as T². Queries come in blocks,
    which see no later keys: products and weights of a block end with it. Shapes: N is B K, rows of the batch
    times key heads; R is T G, tokens times the query heads of a group; S is the rows of a block.
    """

    @staticmethod
    def forward(ctx: Any, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Tensor | None) -> Tensor:
        B, T, H, E = q_BTHE.shape
        key_heads = k_BTKE.size(2)
        group = H // key_heads
        q_NRE = pack_heads(q_BTHE, key_heads)
        # Keys are fewest: they take the scale of the scores.
        k_NTE = pack_heads(k_BTKE * E**-0.5, key_heads)
        v_NTE = pack_heads(v_BTKE, key_heads)
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool, device=q_BTHE.device).tril()[None, None]
        # Added to scores: minus infinity where a token is not seen, whose weight so is zero.
        unseen_B1T1T = torch.zeros(mask.shape, dtype=q_BTHE.dtype, device=q_BTHE.device)
        unseen_B1T1T = unseen_B1T1T.masked_fill_(~mask, -math.inf)[:, :, :, None]
        y_NRE = torch.empty_like(q_NRE)
        blocks = []
        for start in range(0, T, MATH_ATTENTION_BLOCK):
            stop = min(start + MATH_ATTENTION_BLOCK, T)
            rows = slice(start * group, stop * group)
            scores_NST = q_NRE[:, rows] @ k_NTE[:, :stop].mT
            scores_BKTGT = scores_NST.view(B, key_heads, stop - start, group, stop)
            scores_BKTGT += unseen_B1T1T[:, :, start:stop, :, :stop]
            weights_NST = scores_NST.softmax(-1)
            torch.bmm(weights_NST, v_NTE[:, :stop], out=y_NRE[:, rows])
            blocks.append(weights_NST)
        ctx.save_for_backward(q_NRE, k_NTE, v_NTE, *blocks)
        return unpack_heads(y_NRE, q_BTHE.shape)

    @staticmethod
    def backward(ctx: Any, d_y_BTHE: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_NRE, k_NTE, v_NTE, *blocks = ctx.saved_tensors
        B, T, H, E = d_y_BTHE.shape
        key_heads = len(k_NTE) // B
        group = H // key_heads
        # Rows of a group's heads are rows of one product, so gradients of what they share are sums already.
        d_y_NRE = pack_heads(d_y_BTHE, key_heads)
        d_q_NRE = torch.empty_like(q_NRE)
        d_k_NTE = torch.zeros_like(k_NTE)
        d_v_NTE = torch.zeros_like(v_NTE)
        for number, weights_NST in enumerate(blocks):
            stop = weights_NST.size(2)
            start = number * MATH_ATTENTION_BLOCK
            rows = slice(start * group, stop * group)
            d_v_NTE[:, :stop] += weights_NST.mT @ d_y_NRE[:, rows]
            d_weights_NST = d_y_NRE[:, rows] @ v_NTE[:, :stop].mT
            d_scores_NST = torch.ops.aten._softmax_backward_data(
                d_weights_NST, weights_NST, -1, weights_NST.dtype)
            torch.bmm(d_scores_NST, k_NTE[:, :stop], out=d_q_NRE[:, rows])
            d_k_NTE[:, :stop] += d_scores_NST.mT @ q_NRE[:, rows]
        shape_BTKE = torch.Size((B, T, key_heads, E))
        return (
            unpack_heads(d_q_NRE, d_y_BTHE.shape),
            unpack_heads(d_k_NTE * E**-0.5, shape_BTKE),
            unpack_heads(d_v_NTE, shape_BTKE),
            None,
        )


attention_math = MathAttention.apply


def mlp_plain(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, slope: float) -> Tensor:
    """LeakyReLU(slope)² MLP, (N, D) -> (N, D), the three tensors of one dtype; slope 0 is relu² (PR #493)."""
    hidden_NF = F.leaky_relu(F.linear(x_ND, up_FD), slope).square()
    return F.linear(hidden_NF, down_DF)


class SecondTargets(NamedTuple):
    """A target of each token besides the next one, (N,)."""

    tokens_N: Tensor
    weight_N: Tensor  # of its nats; where it is 0 the token does not matter


def cross_entropy_plain(
    logits_NV: Tensor, targets_N: Tensor, softcap: float, second: SecondTargets | None = None
) -> Tensor:
    """Nats (N,), at least fp32, of each target under softcap·tanh(logits/softcap); softcap 0: the logits.

    With `second` the weighted nats of those targets are added.
    """
    # A sum over the vocabulary needs more digits than bfloat16 has.
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if softcap:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    nats_N = F.cross_entropy(logits_NV, targets_N, reduction="none")
    if second is None:
        return nats_N
    # Nats of two targets differ by their logits. These are found by sums over the vocabulary: compiled, they
    # join passes that are made anyway, where a second look-up would write all log-probabilities once more.
    column_V = torch.arange(logits_NV.size(1), device=logits_NV.device)
    own_NV = torch.where(column_V == targets_N[:, None], logits_NV, 0.0)
    second_NV = torch.where(column_V == second.tokens_N[:, None], logits_NV, 0.0)
    second_nats_N = nats_N + (own_NV - second_NV).sum(1)
    return nats_N + second.weight_N * second_nats_N


def starts_on_device(ids_BT: Tensor, c: ModelSettings) -> Tensor:
    """`Batch.starts` of any ids. It waits for the device, which compiled code cannot."""
    starts = torch.from_numpy(document_starts(ids_BT.cpu().numpy(), c)).to(ids_BT.device)
    torch._dynamo.mark_dynamic(starts, 0)  # or torch recompiles for every number of documents
    return starts


def attention_documents(
    ids_BT: Tensor,
    starts: Tensor | None,
    attend: Callable[..., Tensor],
    c: ModelSettings,
    one_a_row: bool = False,
) -> Tensor | None:
    """Who sees whom, as `attend` reads it: torch's own and the plain one a mask, others `Batch.starts`.

    one_a_row: whether each row is one document; then these need no mask.
    """
    if attend not in (attention_sdpa, attention_math):
        return starts_on_device(ids_BT, c) if starts is None else starts
    if one_a_row or not c.doc_mask:
        return None
    # Tokens of the same document share its number; nobody sees a later token.
    document_BT = (ids_BT == BOS_ID).cumsum(1)
    same_B1TT = document_BT[:, None, :, None] == document_BT[:, None, None]
    return same_B1TT.tril()


def bigram_rows(inputs_BT: Tensor, c: ModelSettings) -> Tensor:
    """Row of the bigram table for each token and the one before it, (B, T): a hash of both (PR #549).

    The last row is of tokens with none before them: the first of a row and, with DOC_MASK, of a document.
    """
    last_row = c.bigram_vocab_size - 1
    ids_BT = inputs_BT.int()  # products wrap around at 32 bits
    hashed = torch.bitwise_xor(36_313 * ids_BT[:, 1:], 27_191 * ids_BT[:, :-1]) % last_row
    rows_BT = F.pad(hashed, (1, 0), value=last_row)
    if c.doc_mask:
        rows_BT = rows_BT.masked_fill(inputs_BT == BOS_ID, last_row)
    return rows_BT


# Parameters by name, each split along its first axis.
WeightRows = dict[str, tuple[Tensor, ...]]
# Called with (name of the input, layer, values) where matrices multiply them: calibration sums x xᵀ.
Observer = Callable[[str, int, Tensor], None]


class LayerWeights(NamedTuple):
    """The weights of one layer, in the dtype of the activations; those of features that are off are None."""

    qkv_RD: Tensor  # the rows of queries, then of keys, then of values
    o_DD: Tensor  # with the scale of what attention writes in its rows
    up_FD: Tensor
    down_DF: Tensor  # likewise
    resid_keep_D: Tensor
    resid_inject_D: Tensor
    qk_gain_H: Tensor
    attn_gate_HW: Tensor | None
    lane_mix_23: Tensor | None
    value_scale: Tensor | None  # of the value embedding, in the layers that add it


class Adapter(NamedTuple):
    """A low-rank matrix of each row of a batch: what it adds to an output is B A x (arXiv 2106.09685)."""

    a_BRI: Tensor  # R: the rank; I: channels of the input
    b_BOR: Tensor  # O: channels of the output

    def __call__(self, x_BTI: Tensor) -> Tensor:
        """What it adds, (B, T, O)."""
        return (x_BTI @ self.a_BRI.mT) @ self.b_BOR.mT


# The adapters of one visit, by what they belong to: q, k and v are those of projections, o and mlp go around
# attention and MLP as a whole, from the input of the branch to its output (PR #1530), head is of the logits.
Adapters = dict[str, Adapter]


def adapted(y_BTO: Tensor, x_BTI: Tensor, adapters: Adapters, name: str) -> Tensor:
    """y with what its adapter makes of x; y itself where there is none."""
    if name not in adapters:
        return y_BTO
    return y_BTO + adapters[name](x_BTI)


class Context(NamedTuple):
    """What is computed once in a forward pass and shared by all visits; values made of the ids go here."""

    x0_BTD: Tensor  # the embeddings, which every block may mix in again
    rotary: Tensor
    documents: Tensor | None
    observe: Observer | None
    values_BTK: Tensor | None  # value embeddings; K is all key channels, as in `LayerWeights`
    first_BT: Tensor | None  # as in `token_before`


class PrefixTargets(NamedTuple):
    """The second target of every token (modded-nanogpt PR #337): a part of what its text begins with."""

    of_token_V: Tensor  # the token of the longest proper prefix of a token's text; -1: there is none
    weight: Tensor  # of its loss beside that of the token itself; a tensor, so that compiled code is one


class GPT(nn.Module):
    """The model. Parameters are fp32 masters, drawn from (SEED, name) and cast to `compute_dtype` at use."""

    def __init__(self, settings: ModelSettings, seed: int | None) -> None:
        """seed: of the first weights; None: they come from elsewhere, and nothing is drawn."""
        super().__init__()
        self.settings = settings
        self.machine = Machine()  # `ready_model` tells it where it runs, and with which kernels
        self.compute_dtype = torch.float32
        self.attend: Callable[..., Tensor] = attention_sdpa
        self.mlp: Callable[..., Tensor] = mlp_plain
        self.heads: Callable[..., Heads] = heads_plain
        self.xsa: Callable[..., Tensor] = xsa_plain
        self.norm: Callable[..., Tensor] = rms_norm
        self.cross_entropy: Callable[..., Tensor] = cross_entropy_plain
        self.prefixes: PrefixTargets | None = None  # of training alone
        # Tables of the vocabulary are used as a whole; everything else is read row by row.
        self.row_names = []
        for name, parameter in parameter_table(settings).items():
            weights = torch.empty(parameter.shape)
            if seed is not None:
                weights = initial_weights(name, parameter, settings, seed)
            self.register_parameter(name, nn.Parameter(weights))
            if parameter.optimizer not in ("embedding", "head"):
                self.row_names.append(name)

    def forward(
        self,
        inputs_BT: Tensor,
        starts: Tensor | None = None,
        looping: bool = True,
        observe: Observer | None = None,
        adapters: list[Adapters] | None = None,
        longest: int = 0,
    ) -> Tensor:
        """Hidden states (B, T, D) after the last norm.

        starts: as in `Batch`; found here if they are not given. looping: whether the NUM_LOOPS extra passes
        run. observe: is called with what each matrix multiplies; calibration listens there. adapters: of each
        visit, in the order of the visits, if each row is one document; test-time training learns them.
        longest: as in `rotary_table`.
        """
        c = self.settings
        weights = self._weights_by_row()
        layers = [self._layer_weights(layer, weights) for layer in range(c.num_layers)]
        # Shared by all visits of all layers.
        rotary = rotary_table(inputs_BT.size(1), c, inputs_BT.device, longest).to(self.compute_dtype)
        # Where there are adapters, each row is one document.
        one_a_row = adapters is not None
        documents = attention_documents(inputs_BT, starts, self.attend, c, one_a_row)
        first_BT = None
        if c.doc_mask:
            first_BT = inputs_BT == BOS_ID
        x0 = self._embed(inputs_BT, first_BT, weights)
        values = self._embed_values(inputs_BT, weights)
        context = Context(x0, rotary, documents, observe, values, first_BT)

        # First half: every visit keeps what it leaves in the first lane.
        encoder, decoder = visit_order(c, looping)
        if adapters is None:
            adapters = [{}] * (len(encoder) + len(decoder))
        lanes = [x0]
        skips = []
        for visit, layer in enumerate(encoder):
            lanes = self._split_or_join(layer, lanes)
            lanes = self._block(layer, lanes, layers[layer], context, adapters[visit])
            skips.append(lanes[0])

        # Second half: every visit takes one of them back, the last one first.
        for visit, layer in enumerate(decoder):
            lanes = self._split_or_join(layer, lanes)
            if skips:
                lanes[0] = self._add_skip(visit, lanes[0], skips.pop(), weights)
            lanes = self._block(layer, lanes, layers[layer], context, adapters[len(encoder) + visit])

        hidden = self.norm(join(lanes))
        if observe is not None:
            observe("hidden", 0, hidden)
        return hidden

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Scores (N, V) of every next token, before the softcap."""
        head = "token_embedding_VD" if self.settings.tie_embeddings else "output_head_VD"
        return F.linear(hidden_ND, self.get_parameter(head).to(hidden_ND.dtype))

    def loss_per_token(
        self, hidden_ND: Tensor, targets_N: Tensor, added_NV: Tensor | None = None
    ) -> Tensor:
        """Nats (N,), at least fp32, of each target: cross-entropy of softcap·tanh(logits/softcap).

        added_NV: what an adapter adds to the logits.
        """
        logits_NV = self.logits(hidden_ND)
        if added_NV is not None:
            logits_NV = logits_NV + added_NV
        return self.cross_entropy(logits_NV, targets_N, self.settings.logit_softcap)

    def loss(
        self, inputs_BT: Tensor, targets_BT: Tensor, starts: Tensor | None = None, looping: bool = True
    ) -> Tensor:
        """Mean loss of a batch in nats per token: what training minimises."""
        hidden_BTD = self(inputs_BT, starts, looping)
        return self.loss_per_token(hidden_BTD.flatten(0, 1), targets_BT.flatten()).mean()

    def loss_with_prefixes(
        self, inputs_BT: Tensor, targets_BT: Tensor, starts: Tensor | None = None, looping: bool = True
    ) -> Tensor:
        """`loss` of each token and, weighted, of the prefix it has in `prefixes`, by the same scores."""
        assert self.prefixes is not None, "Training gives the model its prefixes"
        logits_NV = self.logits(self(inputs_BT, starts, looping).flatten(0, 1))
        targets_N = targets_BT.flatten()
        prefix_N = self.prefixes.of_token_V[targets_N]
        weight_N = torch.where(prefix_N < 0, 0.0, self.prefixes.weight)
        second = SecondTargets(prefix_N.clamp(min=0), weight_N)
        return self.cross_entropy(logits_NV, targets_N, self.settings.logit_softcap, second).mean()

    def _weights_by_row(self) -> WeightRows:
        """All parameters but tables, split along the first axis; made once for all visits of a row."""
        whole: dict[str, Tensor] = {name: self.get_parameter(name) for name in self.row_names}
        queries, outputs = whole.pop("qo_bank").chunk(2)
        keys, values = whole.pop("kv_bank").chunk(2)
        downs = whole.pop("mlp_down_bank")
        # One product makes queries, keys and values: it reads activations once, and so do its gradients.
        whole["qkv"] = torch.cat([queries, keys, values], dim=1)
        # To scale what a layer writes is to scale the rows of its matrix: fewer numbers than the activations.
        whole["o"] = whole.pop("attn_scale_LD")[:, :, None] * outputs
        whole["mlp_down"] = whole.pop("mlp_scale_LD")[:, :, None] * downs
        return {name: weights.to(self.compute_dtype).unbind(0) for name, weights in whole.items()}

    def _embed(self, inputs_BT: Tensor, first_BT: Tensor | None, weights: WeightRows) -> Tensor:
        """Normalised embeddings (B, T, D), each mixed with the one before it; first_BT: as in `Context`."""
        c = self.settings
        x = self._look_up("token_embedding_VD", inputs_BT)
        # The table starts at zero: at first pairs say nothing, and the projection shapes what they learn.
        if c.bigram_vocab_size:
            pairs = self._look_up("bigram_table_RC", bigram_rows(inputs_BT, c))
            if "bigram_projection_1DC" in weights:
                pairs = F.linear(pairs, weights["bigram_projection_1DC"][0])
            x = x + pairs * weights["bigram_scale_1"][0]
        if c.smear_gate_enabled:
            # Never across the start of a row or, with DOC_MASK, of a document (PR #1851). There the gate is
            # shut, which costs less than to set the embedding before it to zero.
            gate_BT = torch.sigmoid(x[..., : c.gate_window] @ weights["smear_gate_1W"][0])
            if first_BT is not None:
                gate_BT = gate_BT.masked_fill(first_BT, 0.0)
            gate_BT = gate_BT * weights["smear_scale_1"][0]
            x = torch.addcmul(x, gate_BT[..., None], token_before(x))
        x = self.norm(x)
        if c.channel_smear_enabled:
            # A token with none before it is mixed with zero, and keeps its own share (PR #549).
            previous = token_before(x, first_BT)
            share_D = weights["channel_smear_1D"][0].sigmoid()
            x = (1 - share_D) * x + share_D * previous
        return x

    def _look_up(self, name: str, rows_BT: Tensor) -> Tensor:
        """Rows of a table (B, T, C), in the dtype of the activations."""
        return F.embedding(rows_BT, self.get_parameter(name)).to(self.compute_dtype)

    def _embed_values(self, inputs_BT: Tensor, weights: WeightRows) -> Tensor | None:
        """Value embeddings (B, T, K), the same for all layers that add them; None where they are off."""
        if not self.settings.ve_enabled:
            return None
        values = self._look_up("value_table_VC", inputs_BT)
        if "value_projection_1KC" in weights:
            values = F.linear(values, weights["value_projection_1KC"][0])
        return values * weights["value_scale_1"][0]

    def _split_or_join(self, layer: int, lanes: list[Tensor]) -> list[Tensor]:
        """Two lanes from PARALLEL_START_LAYER on, one before it; a loop may lead back."""
        c = self.settings
        # A late layer of the decoder may be followed by an earlier one of the loop.
        two = c.parallel_mode == "lanes" and 0 <= c.parallel_start_layer <= layer
        if two and len(lanes) == 1:
            return [lanes[0], lanes[0]]
        if not two and len(lanes) == 2:
            return [join(lanes)]
        return lanes

    def _add_skip(self, visit: int, lane: Tensor, skip: Tensor, weights: WeightRows) -> Tensor:
        """U-Net skip: add what the encoder left, or go a learned part of the way to it (PR #1493)."""
        skip = weights["skip_weight_SD"][visit] * skip
        if not self.settings.skip_gates_enabled:
            return lane + skip
        return torch.lerp(skip, lane, weights["skip_gate_SD"][visit].sigmoid())

    def _block(
        self, layer: int, lanes: list[Tensor], w: LayerWeights, context: Context, adapters: Adapters
    ) -> list[Tensor]:
        """One visit of one layer.

        Sequential: the MLP reads what attention wrote. Parallel: both read first; the same lane (GPT-J,
        PR #1493), or one lane each, into which learned weights mix what both wrote (PR #1529).
        """
        c = self.settings
        parallel = 0 <= c.parallel_start_layer <= layer
        scale = (layer + 1) ** -0.5 if c.ln_scale else 1.0

        # Attention reads the first lane, with some of the embeddings mixed in again; of two lanes, the lanes
        # themselves stay as they are.
        mixed = torch.addcmul(w.resid_keep_D * lanes[0], w.resid_inject_D, context.x0_BTD)
        attended = self._attention(layer, self.norm(mixed, scale), w, context, adapters)

        # The MLP reads the second lane if there is one.
        if len(lanes) == 2:
            mlp_from = lanes[1]
        elif parallel:
            mlp_from = mixed
        else:
            mlp_from = mixed + attended
        written = self._mlp(layer, self.norm(mlp_from, scale), w, context, adapters)

        # Each lane keeps some of itself and takes some of both outputs.
        if w.lane_mix_23 is not None:  # which only layers with two lanes have
            mixed_lanes = []
            for lane, (keep, from_attention, from_mlp) in zip(lanes, w.lane_mix_23, strict=True):
                mixed_lanes.append(keep * lane + from_attention * attended + from_mlp * written)
            return mixed_lanes
        if parallel:
            return [mixed + attended + written]
        return [mlp_from + written]

    def _layer_weights(self, layer: int, weights: WeightRows) -> LayerWeights:
        """The rows of one layer."""
        c = self.settings
        has_lanes = "lane_mix_P23" in weights and layer >= c.parallel_start_layer
        value_scale = None
        if layer in c.value_layers:
            value_scale = weights["value_layer_scale_N"][c.value_layers.index(layer)]
        return LayerWeights(
            qkv_RD=weights["qkv"][layer],
            o_DD=weights["o"][layer],
            up_FD=weights["mlp_up_bank"][layer],
            down_DF=weights["mlp_down"][layer],
            resid_keep_D=weights["resid_keep_LD"][layer],
            resid_inject_D=weights["resid_inject_LD"][layer],
            qk_gain_H=weights["qk_gain_LH"][layer],
            attn_gate_HW=weights["attn_gate_LHW"][layer] if c.sparse_attn_gate_enabled else None,
            lane_mix_23=weights["lane_mix_P23"][layer - c.parallel_start_layer] if has_lanes else None,
            value_scale=value_scale,
        )

    def _attention(
        self, layer: int, x_BTD: Tensor, w: LayerWeights, context: Context, adapters: Adapters
    ) -> Tensor:
        """What attention adds to the residual stream, (B, T, D)."""
        c = self.settings
        # Project the input to queries, keys and values, and split them into heads.
        qkv_BTR = F.linear(x_BTD, w.qkv_RD)
        if "q" in adapters or "k" in adapters or "v" in adapters:
            q_BTD, k_BTK, v_BTK = qkv_BTR.split([c.model_dim, c.kv_dim, c.kv_dim], dim=-1)
            q_BTD = adapted(q_BTD, x_BTD, adapters, "q")
            k_BTK = adapted(k_BTK, x_BTD, adapters, "k")
            v_BTK = adapted(v_BTK, x_BTD, adapters, "v")
            qkv_BTR = torch.cat([q_BTD, k_BTK, v_BTK], dim=-1)
        qkv_BTNE = qkv_BTR.unflatten(-1, (-1, c.head_dim))
        heads = self.heads(qkv_BTNE, w.qk_gain_H, context.rotary)
        v_BTKE = heads.v_BTKE
        own_BTKE = heads.own_BTKE
        if w.value_scale is not None and context.values_BTK is not None:
            # What the token says by itself (PR #549).
            v_BTKE = v_BTKE + (w.value_scale * context.values_BTK).unflatten(-1, (c.num_kv_heads, -1))
            own_BTKE = v_BTKE
        k_BTKE = heads.k_BTKE
        if c.key_offset_dims:
            k_BTKE = offset_keys(k_BTKE, c.key_offset_dims, context.first_BT)
        y_BTHE = self.attend(heads.q_BTHE, k_BTKE, v_BTKE, context.documents)

        # Gate each head by a few channels of the input; 0.5 makes the sigmoid less steep (PR #1855).
        gate_BTH = None
        if w.attn_gate_HW is not None:
            gate_BTH = torch.sigmoid(0.5 * F.linear(x_BTD[..., : c.gate_window], w.attn_gate_HW))
        if layer >= c.num_layers - c.xsa_last_n:
            open_BTH = y_BTHE.new_ones(y_BTHE.shape[:-1]) if gate_BTH is None else gate_BTH
            y_BTHE = self.xsa(y_BTHE, own_BTKE, open_BTH)
        elif gate_BTH is not None:
            y_BTHE = y_BTHE * gate_BTH[..., None]

        # Join the heads and project them back.
        y_BTD = y_BTHE.flatten(2)
        if context.observe is not None:
            context.observe("attn_in", layer, x_BTD)
            context.observe("attn_out", layer, y_BTD)
        return adapted(F.linear(y_BTD, w.o_DD), x_BTD, adapters, "o")

    def _mlp(
        self, layer: int, x_BTD: Tensor, w: LayerWeights, context: Context, adapters: Adapters
    ) -> Tensor:
        """What the MLP adds to the residual stream, (B, T, D)."""
        slope = self.settings.leaky_slope
        y_ND = self.mlp(x_BTD.flatten(0, 1), w.up_FD, w.down_DF, slope)
        if context.observe is not None:
            # A fused kernel keeps its hidden values to itself: calibration makes them anew.
            hidden_BTF = F.leaky_relu(F.linear(x_BTD, w.up_FD), slope).square()
            context.observe("mlp_in", layer, x_BTD)
            context.observe("mlp_hidden", layer, hidden_BTF)
        return adapted(y_ND.view_as(x_BTD), x_BTD, adapters, "mlp")


def join(lanes: list[Tensor]) -> Tensor:
    """One lane out of one or two: their mean."""
    if len(lanes) == 1:
        return lanes[0]
    return (lanes[0] + lanes[1]) / 2


def build_model(config: Config) -> GPT:
    """The model of a run with its first weights, on the CPU."""
    return GPT(config, config.seed)


# ============================================================================================================
# KERNELS — what may replace attention and MLP: the first of a fixed order that agrees with the plain twin.
# ============================================================================================================
# Tiles of the MLP's kernel: by the shared memory of a block, 227 KB on an H100, 163 on an A100, 99 on an
# RTX 4090 or 5090; small ones where sums are fp32.
LARGE_TILE = dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=3)  # for tensor cores
MEDIUM_TILE = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=2)
SMALL_TILE = dict(BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=2)
LARGE_TILE_SHARED_BYTES = 160 << 10  # of a block, that a card must have for the large tile

if triton is not None:

    @triton.jit
    def linear_leaky_square_kernel(  # type: ignore[no-untyped-def]
        a, b, pre, out, M, N, K, slope, BACKWARD: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        # Descriptors are TMA on Hopper and later; for older GPUs the compiler makes them masked pointers.
        HALF_N: tl.constexpr = BLOCK_N // 2  # the epilogue goes by halves: its stores need half the memory
        a_tiles = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
        b_tiles = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
        pre_tiles = tl.make_tensor_descriptor(pre, [M, N], [N, 1], [BLOCK_M, HALF_N])
        out_tiles = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BLOCK_M, HALF_N])
        tiles_across = tl.cdiv(N, BLOCK_N)
        tiles = tl.cdiv(M, BLOCK_M) * tiles_across

        # Flattened, so that the loads of a program's next tile overlap the epilogue of this one.
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            row = tile // tiles_across * BLOCK_M
            column = tile % tiles_across * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(0, K, BLOCK_K):
                a_tile = a_tiles.load([row, k])
                b_tile = b_tiles.load([column, k])
                acc = tl.dot(a_tile, b_tile.T, acc, input_precision="ieee")
            halves = tl.split(acc.reshape(BLOCK_M, 2, HALF_N).permute(0, 2, 1))

            for half in tl.static_range(2):
                corner = [row, column + half * HALF_N]
                if BACKWARD:
                    p = pre_tiles.load(corner).to(tl.float32)
                    factor = 2.0 * halves[half]
                else:  # the activation of the rounded P, which is what the backward pass reads
                    pre_tiles.store(corner, halves[half].to(pre.dtype.element_ty))
                    p = halves[half].to(pre.dtype.element_ty).to(tl.float32)
                    factor = p
                value = factor * tl.where(p > 0, p, slope * slope * p)
                out_tiles.store(corner, value.to(out.dtype.element_ty))

    @triton.jit
    def heads_kernel(  # type: ignore[no-untyped-def]
        qkv, gain, rotary, q, k, v, own_v, d_qkv, d_gain, tokens, T, eps,
        BACKWARD: tl.constexpr, HAS_OWN: tl.constexpr, H: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
        HALF: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    ):  # fmt: skip
        # One head of some tokens. Forward reads qkv and writes queries and keys into q and k. Backward finds
        # gradients in q, k, v and own_v, and writes those of qkv and, for each token, of the gain.
        head = tl.program_id(1)
        token = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        channel = tl.arange(0, BLOCK_E)[None, :]
        row = token[:, None]
        inside = (row < tokens) & (channel < E)
        here = (row * (H + 2 * K) + head) * E + channel

        if head >= H + K:  # values pass; their two gradients add up
            if BACKWARD:
                there = (row * K + head - H - K) * E + channel
                d_x = tl.load(v + there, inside, 0.0).to(tl.float32)
                if HAS_OWN:
                    d_x += tl.load(own_v + there, inside, 0.0).to(tl.float32)
                tl.store(d_qkv + here, d_x.to(d_qkv.dtype.element_ty), inside)
        else:
            # Where this head lies in its own tensor, which has other heads than qkv.
            if head < H:
                own = q + (row * H + head) * E
            else:
                own = k + (row * K + head - H) * E
            # One over the root mean square of each row, and the gain of the head; keys have a gain of one.
            x = tl.load(qkv + here, inside, 0.0).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(x * x, 1) / E + eps)
            head_gain = tl.load(gain + tl.minimum(head, H - 1)).to(tl.float32)
            head_gain = tl.where(head < H, head_gain, 1.0)
            scale = (inverse * head_gain)[:, None]
            # The partner of a channel in the rotation, and the rotation of this position; others stay.
            turned = inside & (channel < 2 * HALF)
            first = channel < HALF
            partner = tl.where(first, channel + HALF, channel - HALF)
            angle = (row % T) * HALF + channel % HALF
            cos = tl.load(rotary + angle, turned, 1.0).to(tl.float32)
            sin = tl.load(rotary + T * HALF + angle, turned, 0.0).to(tl.float32)
            sin = tl.where(first, sin, -sin)
            if BACKWARD:
                d = tl.load(own + channel, inside, 0.0).to(tl.float32) * cos
                d -= tl.load(own + partner, turned, 0.0).to(tl.float32) * sin
                along = tl.sum(d * x, 1)
                d_x = scale * (d - x * (inverse * inverse * along / E)[:, None])
                tl.store(d_qkv + here, d_x.to(d_qkv.dtype.element_ty), inside)
                if head < H:
                    tl.store(d_gain + token * H + head, along * inverse, token < tokens)
            else:
                x_partner = tl.load(qkv + here - channel + partner, turned, 0.0).to(tl.float32)
                out = (x * cos + x_partner * sin) * scale
                tl.store(own + channel, out.to(q.dtype.element_ty), inside)

    @triton.jit
    def xsa_kernel(  # type: ignore[no-untyped-def]
        y, v, gate, out, d_out, d_y, d_v, d_gate, tokens, v_stride, min_square, BACKWARD: tl.constexpr,
        K: tl.constexpr, GROUPS: tl.constexpr, E: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    ):  # fmt: skip
        # One key head of some tokens, with all query heads of its group.
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
            value = tl.load(y + here, inside, 0.0).to(tl.float32)
            opened = tl.load(gate + head, exists, 0.0).to(tl.float32)
            share = tl.sum(value * own, 1) / square
            rest = value - share[:, None] * own
            if BACKWARD:
                d = tl.load(d_out + here, inside, 0.0).to(tl.float32)
                tl.store(d_gate + head, tl.sum(d * rest, 1).to(d_gate.dtype.element_ty), exists)
                d = d * opened[:, None]
                along = (tl.sum(d * own, 1) / square)[:, None]
                tl.store(d_y + here, (d - along * own).to(d_y.dtype.element_ty), inside)
                d_own -= share[:, None] * d + along * (rest - share[:, None] * own)
            else:
                tl.store(out + here, (opened[:, None] * rest).to(out.dtype.element_ty), inside)
        if BACKWARD:
            there = (token[:, None] * K + key_head) * E + channel
            tl.store(d_v + there, d_own.to(d_v.dtype.element_ty), inside)


@torch.library.custom_op("train_gpt::linear_leaky_square", mutates_args=())
def linear_leaky_square(a_MK: Tensor, b_NK: Tensor, pre_MN: Tensor | None, slope: float) -> Tensor:
    """P = A Bᵀ and phi(P), phi = LeakyReLU(slope)²: (2, M, N). Given P: (A Bᵀ) phi'(P), (1, M, N).

    ValueError where K or N are not whole 16 bytes, or a tensor does not begin at a multiple of them.
    """
    a = a_MK.contiguous()
    b = b_NK.contiguous()
    device = a.device
    if pre_MN is None:
        planes = a.new_empty(2, len(a), len(b))
        pre = planes[0]
    else:
        planes = a.new_empty(1, len(a), len(b))
        pre = pre_MN.contiguous()
    # The tensor memory accelerator copies whole 16 bytes; other shapes take the plain form.
    for operand in (a, b, pre, planes):
        if operand.data_ptr() % 16 or operand.shape[-1] * operand.itemsize % 16:
            raise ValueError(f"TMA reads rows of whole 16 bytes; got {a.shape[1]} and {len(b)} columns")

    # Triton keeps the allocator of descriptors' scratch memory per thread, and the backward pass has its own.
    # It knows the device alone: a tensor in it would stay alive in both threads.
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
    programs = 2
    tile = SMALL_TILE  # in fp32 large ones spill
    if a.is_cuda:
        card: Any = torch.cuda.get_device_properties(device)
        programs = card.multi_processor_count
        if a.itemsize == 2:
            has_room = card.shared_memory_per_block_optin >= LARGE_TILE_SHARED_BYTES
            tile = LARGE_TILE if has_room else MEDIUM_TILE
    linear_leaky_square_kernel[(programs,)](
        a, b, pre, planes[-1], len(a), len(b), a.shape[1], slope, BACKWARD=pre_MN is not None, **tile)
    return planes


@linear_leaky_square.register_fake
def linear_leaky_square_shape(a_MK: Tensor, b_NK: Tensor, pre_MN: Tensor | None, slope: float) -> Tensor:
    """What the kernel returns, without its values: torch.compile traces with this."""
    planes = 2 if pre_MN is None else 1
    # No `len`, which would make a number of rows that is left open a constant of the graph.
    return a_MK.new_empty(planes, a_MK.size(0), b_NK.size(0))


class FusedMlp(torch.autograd.Function):
    """`mlp_plain`, activation and derivative in GEMM epilogues (PR #1530 after modded-nanogpt PR #197)."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, slope: float) -> Tensor:
        pre_NF, act_NF = linear_leaky_square(x_ND, up_FD, None, slope)
        ctx.save_for_backward(x_ND, up_FD, down_DF, pre_NF, act_NF)
        ctx.slope = slope
        return F.linear(act_NF, down_DF)

    @staticmethod
    def backward(ctx: Any, d_out_ND: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x_ND, up_FD, down_DF, pre_NF, act_NF = ctx.saved_tensors
        (d_pre_NF,) = linear_leaky_square(d_out_ND, down_DF.t(), pre_NF, ctx.slope)
        # Plain products from here on: nothing is left that an epilogue could take over. Where adapters learn,
        # the matrices stay as they are.
        d_x_ND = d_pre_NF @ up_FD
        d_up_FD = None
        d_down_DF = None
        if ctx.needs_input_grad[1]:
            d_up_FD = d_pre_NF.t() @ x_ND
        if ctx.needs_input_grad[2]:
            d_down_DF = d_out_ND.t() @ act_NF
        return d_x_ND, d_up_FD, d_down_DF, None


mlp_fused = FusedMlp.apply

# Rows of one program of the kernels of heads: with heads of 64 some 32 values a thread.
HEAD_ROWS = 32


def launch_heads(
    operands: list[Tensor], parts: list[Tensor], gradients: list[Tensor], own_v: Tensor | None = None
) -> None:
    """Run `heads_kernel` on qkv, gain and rotary.

    Forward: without `gradients`, parts are q and k, which it fills. Backward: parts are the gradients of q, k
    and v, `own_v` the one of the values' second use; it fills `gradients`, those of qkv and gain.
    """
    qkv_BTNE, gain_H, rotary = (operand.contiguous() for operand in operands)
    B, T, N, E = qkv_BTNE.shape
    H = len(gain_H)
    K = (N - H) // 2
    backward = len(gradients) > 0
    if backward:
        q, k, v = parts
        d_qkv, d_gain = gradients
        heads = N
    else:
        q, k = parts
        # Forward leaves the values alone. What it does not have is not read: any tensor stands in its place.
        v = d_qkv = d_gain = k
        heads = H + K
    has_own = own_v is not None
    heads_kernel[(triton.cdiv(B * T, HEAD_ROWS), heads)](
        qkv_BTNE, gain_H, rotary, q, k, v, own_v if has_own else v, d_qkv, d_gain, B * T, T, RMS_NORM_EPS,
        BACKWARD=backward, HAS_OWN=has_own, H=H, K=K, E=E, HALF=rotary.size(-1),
        BLOCK_N=HEAD_ROWS, BLOCK_E=triton.next_power_of_2(E), num_warps=4)  # fmt: skip


@torch.library.custom_op("train_gpt::heads", mutates_args=())
def heads_forward(qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of `heads_plain`, in one pass."""
    q_BTHE, k_BTKE = heads_forward_shape(qkv_BTNE, gain_H, rotary)
    launch_heads([qkv_BTNE, gain_H, rotary], [q_BTHE, k_BTKE], [])
    return q_BTHE, k_BTKE


@heads_forward.register_fake
def heads_forward_shape(qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel returns, without its values."""
    B, T, N, E = qkv_BTNE.shape
    H = len(gain_H)
    return qkv_BTNE.new_empty(B, T, H, E), qkv_BTNE.new_empty(B, T, (N - H) // 2, E)


@torch.library.custom_op("train_gpt::heads_backward", mutates_args=())
def heads_backward(
    qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor,
    d_q_BTHE: Tensor, d_k_BTKE: Tensor, d_v_BTKE: Tensor, d_own_BTKE: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv and, for each token (B, T, H) in fp32, of the gain."""
    d_qkv_BTNE = qkv_BTNE.new_empty(qkv_BTNE.shape)
    d_gain_BTH = qkv_BTNE.new_empty(d_q_BTHE.shape[:3], dtype=torch.float32)
    parts = [gradient.contiguous() for gradient in (d_q_BTHE, d_k_BTKE, d_v_BTKE)]
    own_v = None if d_own_BTKE is None else d_own_BTKE.contiguous()
    launch_heads([qkv_BTNE, gain_H, rotary], parts, [d_qkv_BTNE, d_gain_BTH], own_v)
    return d_qkv_BTNE, d_gain_BTH


@heads_backward.register_fake
def heads_backward_shape(
    qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor,
    d_q_BTHE: Tensor, d_k_BTKE: Tensor, d_v_BTKE: Tensor, d_own_BTKE: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the kernel returns, without its values."""
    d_gain_BTH = qkv_BTNE.new_empty(d_q_BTHE.shape[:3], dtype=torch.float32)
    return qkv_BTNE.new_empty(qkv_BTNE.shape), d_gain_BTH


class FusedHeads(torch.autograd.Function):
    """`heads_plain` in one kernel forward and one backward, which reads no queries again for their gain."""

    @staticmethod
    def forward(
        ctx: Any, qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv_BTNE, gain_H, rotary)
        ctx.set_materialize_grads(False)
        q_BTHE, k_BTKE = heads_forward(qkv_BTNE, gain_H, rotary)
        # Twice, or their gradients would be added up before they get to the kernel: two passes more.
        values = -k_BTKE.size(2)
        return q_BTHE, k_BTKE, qkv_BTNE[:, :, values:], qkv_BTNE[:, :, values:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        qkv_BTNE, gain_H, rotary = ctx.saved_tensors
        d_qkv_BTNE, d_gain_BTH = heads_backward(qkv_BTNE, gain_H, rotary, *gradients)
        return d_qkv_BTNE, d_gain_BTH.sum((0, 1)).to(gain_H.dtype), None


def heads_fused(qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor) -> Heads:
    """`heads_plain` by the kernel."""
    return Heads(*FusedHeads.apply(qkv_BTNE, gain_H, rotary))


def launch_xsa(operands: list[Tensor], results: list[Tensor]) -> None:
    """Run `xsa_kernel`.

    Forward: operands are y, v and gate, the result is the output. Backward: the gradient of the output is one
    more operand, and the results are the gradients of the other three.
    """
    y_BTHE, v_BTKE, gate_BTH = operands[:3]
    B, T, H, E = y_BTHE.shape
    K = v_BTKE.size(2)
    # The values lie between the other heads of a token, and are read there: tokens must be evenly spaced, and
    # the heads of a token side by side.
    evenly = v_BTKE.stride(0) == T * v_BTKE.stride(1)
    side_by_side = v_BTKE.stride()[2:] == (E, 1)
    if not (evenly and side_by_side):
        v_BTKE = v_BTKE.contiguous()
    y_BTHE = y_BTHE.contiguous()
    gate_BTH = gate_BTH.contiguous()
    # What one direction does not have is neither read nor written: any tensor stands in its place.
    backward = len(operands) == 4
    if backward:
        out = y_BTHE
        d_out = operands[3].contiguous()
        d_y, d_v, d_gate = results
    else:
        (out,) = results
        d_out = d_y = d_v = d_gate = y_BTHE
    xsa_kernel[(triton.cdiv(B * T, HEAD_ROWS), K)](
        y_BTHE, v_BTKE, gate_BTH, out, d_out, d_y, d_v, d_gate, B * T, v_BTKE.stride(1), XSA_MIN_SQUARE,
        BACKWARD=backward, K=K, GROUPS=H // K, E=E,
        BLOCK_N=HEAD_ROWS, BLOCK_E=triton.next_power_of_2(E), num_warps=4)  # fmt: skip


@torch.library.custom_op("train_gpt::xsa", mutates_args=())
def xsa_forward(y_BTHE: Tensor, v_BTKE: Tensor, gate_BTH: Tensor) -> Tensor:
    """`xsa_plain` in one pass."""
    out_BTHE = y_BTHE.new_empty(y_BTHE.shape)
    launch_xsa([y_BTHE, v_BTKE, gate_BTH], [out_BTHE])
    return out_BTHE


@xsa_forward.register_fake
def xsa_forward_shape(y_BTHE: Tensor, v_BTKE: Tensor, gate_BTH: Tensor) -> Tensor:
    """What the kernel returns, without its values."""
    return y_BTHE.new_empty(y_BTHE.shape)


@torch.library.custom_op("train_gpt::xsa_backward", mutates_args=())
def xsa_backward(
    y_BTHE: Tensor, v_BTKE: Tensor, gate_BTH: Tensor, d_out_BTHE: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y, v and gate."""
    d_y, d_v, d_gate = (tensor.new_empty(tensor.shape) for tensor in (y_BTHE, v_BTKE, gate_BTH))
    launch_xsa([y_BTHE, v_BTKE, gate_BTH, d_out_BTHE], [d_y, d_v, d_gate])
    return d_y, d_v, d_gate


@xsa_backward.register_fake
def xsa_backward_shape(
    y_BTHE: Tensor, v_BTKE: Tensor, gate_BTH: Tensor, d_out_BTHE: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel returns, without its values."""
    d_y, d_v, d_gate = (tensor.new_empty(tensor.shape) for tensor in (y_BTHE, v_BTKE, gate_BTH))
    return d_y, d_v, d_gate


class FusedXsa(torch.autograd.Function):
    """`xsa_plain` in one kernel each way: all sums of a row and what is made of them."""

    @staticmethod
    def forward(ctx: Any, y_BTHE: Tensor, v_BTKE: Tensor, gate_BTH: Tensor) -> Tensor:
        ctx.save_for_backward(y_BTHE, v_BTKE, gate_BTH)
        return xsa_forward(y_BTHE, v_BTKE, gate_BTH)

    @staticmethod
    def backward(ctx: Any, d_out_BTHE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return xsa_backward(*ctx.saved_tensors, d_out_BTHE)


xsa_fused = FusedXsa.apply


# On a CPU a step is hundreds of passes over a few hundred KB. Derivatives written by hand read and write less
# than those that autograd puts together from operators.


class ManualMlp(torch.autograd.Function):
    """`mlp_plain` that keeps one hidden tensor, the activation before its square."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, slope: float) -> Tensor:
        active_NF = F.leaky_relu(F.linear(x_ND, up_FD), slope, inplace=True)
        ctx.save_for_backward(x_ND, up_FD, down_DF, active_NF)
        ctx.slope = slope
        return F.linear(active_NF.square(), down_DF)

    @staticmethod
    def backward(ctx: Any, d_out_ND: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x_ND, up_FD, down_DF, active_NF = ctx.saved_tensors
        d_active_NF = (d_out_ND @ down_DF).mul_(active_NF).mul_(2)
        # The activation has the sign of what it was made of.
        d_pre_NF = torch.ops.aten.leaky_relu_backward(d_active_NF, active_NF, ctx.slope, True)
        # Where adapters learn, the matrices stay as they are.
        d_up_FD = None
        d_down_DF = None
        if ctx.needs_input_grad[1]:
            d_up_FD = d_pre_NF.t() @ x_ND
        if ctx.needs_input_grad[2]:
            d_down_DF = d_out_ND.t() @ active_NF.square()
        return d_pre_NF @ up_FD, d_up_FD, d_down_DF, None


mlp_manual = ManualMlp.apply


def inverse_rms(x: Tensor) -> Tensor:
    """One over the root mean square along the last axis, which becomes one; at least fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return norm.square_().mul_(1.0 / x.size(-1)).add_(RMS_NORM_EPS).rsqrt_()


class ManualRmsNorm(torch.autograd.Function):
    """`rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        factor = inverse_rms(x).mul_(scale)
        out = (x * factor).to(x.dtype)
        # Not x: what comes next keeps `out` as well.
        ctx.save_for_backward(out, factor)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        out, factor = ctx.saved_tensors
        # What grows along the row itself is taken out.
        along = (d_out * out).sum(-1, keepdim=True, dtype=factor.dtype) / (-out.size(-1) * ctx.scale**2)
        return torch.addcmul(d_out, out, along).mul_(factor).to(out.dtype), None


def rms_norm_manual(x: Tensor, scale: float = 1.0) -> Tensor:
    """`rms_norm` by hand."""
    return ManualRmsNorm.apply(x, scale)


def rotate_in_place(x_BTHE: Tensor, rotary: Tensor, backwards: bool = False) -> None:
    """`rotate` of what is in x, or back."""
    cos, sin = rotary
    half = cos.size(-1)
    a = x_BTHE[..., :half]
    b = x_BTHE[..., half : 2 * half]
    sign = -1 if backwards else 1
    turned_a = torch.addcmul(a * cos, b, sin, value=sign)
    b.mul_(cos).addcmul_(a, sin, value=-sign)
    a.copy_(turned_a)


class ManualHeads(torch.autograd.Function):
    """`heads_plain`: norm and gain are one factor of each head, and rotating changes no length."""

    @staticmethod
    def forward(
        ctx: Any, qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        queries = len(gain_H)
        key_heads = (qkv_BTNE.size(2) - queries) // 2
        qk_BTNE = qkv_BTNE[:, :, :-key_heads]
        gain_N1 = torch.cat([gain_H, gain_H.new_ones(key_heads)])[:, None]
        inverse_BTN1 = inverse_rms(qk_BTNE)
        # Keys have a gain of one.
        out_BTNE = (qk_BTNE * (inverse_BTN1 * gain_N1)).to(qkv_BTNE.dtype)
        rotate_in_place(out_BTNE, rotary)
        ctx.save_for_backward(qkv_BTNE, gain_N1, inverse_BTN1, rotary)
        ctx.set_materialize_grads(False)
        values = qkv_BTNE[:, :, -key_heads:]
        return out_BTNE[:, :, :queries], out_BTNE[:, :, queries:], values, values.view_as(values)

    @staticmethod
    def backward(
        ctx: Any, d_q_BTHE: Tensor, d_k_BTKE: Tensor, d_v_BTKE: Tensor, d_own_BTKE: Tensor | None
    ) -> tuple[Tensor, Tensor, None]:
        qkv_BTNE, gain_N1, inverse_BTN1, rotary = ctx.saved_tensors
        queries = d_q_BTHE.size(2)
        key_heads = d_k_BTKE.size(2)
        if d_own_BTKE is not None:
            d_v_BTKE = d_v_BTKE + d_own_BTKE
        d_qkv_BTNE = torch.cat([d_q_BTHE, d_k_BTKE, d_v_BTKE], dim=2)
        d_qk_BTNE = d_qkv_BTNE[:, :, :-key_heads]
        qk_BTNE = qkv_BTNE[:, :, :-key_heads]
        rotate_in_place(d_qk_BTNE, rotary, backwards=True)
        # The product with the normalised head is the gradient of its gain; along the head nothing changes.
        along_BTN1 = (d_qk_BTNE * qk_BTNE).sum(-1, keepdim=True, dtype=inverse_BTN1.dtype) * inverse_BTN1
        d_gain_H = along_BTN1.sum((0, 1)).flatten()[:queries]
        factor_BTN1 = inverse_BTN1 * gain_N1
        # Through the factor as it is, and through what each channel changes of it.
        d_qk_BTNE.mul_(factor_BTN1)
        d_qk_BTNE.addcmul_(qk_BTNE, along_BTN1 * inverse_BTN1 * factor_BTN1, value=-1.0 / qkv_BTNE.size(-1))
        return d_qkv_BTNE, d_gain_H.to(gain_N1.dtype), None


def heads_manual(qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor) -> Heads:
    """`heads_plain` by hand."""
    return Heads(*ManualHeads.apply(qkv_BTNE, gain_H, rotary))


class ManualCrossEntropy(torch.autograd.Function):
    """`cross_entropy_plain`. tanh(x) is 2·sigmoid(2x) - 1, which takes a fifth of its time."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, softcap: float, second: SecondTargets | None
    ) -> Tensor:
        wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        sigmoid_NV = None
        if softcap:
            # One number less in all logits changes no probability.
            sigmoid_NV = (wide_NV * (2 / softcap)).sigmoid_()
            wide_NV = sigmoid_NV * (2 * softcap)
        largest_N1 = wide_NV.amax(1, keepdim=True)
        target_N1 = wide_NV.gather(1, targets_N[:, None])
        if second is not None:
            second_N1 = wide_NV.gather(1, second.tokens_N[:, None])
        # Without a softcap these are the caller's logits.
        wide_NV = wide_NV.sub_(largest_N1) if softcap else wide_NV - largest_N1
        exponentials_NV = wide_NV.exp_()
        sum_N1 = exponentials_NV.sum(1, keepdim=True)
        ctx.save_for_backward(exponentials_NV, sum_N1, sigmoid_NV, targets_N, *(second or ()))
        ctx.dtype = logits_NV.dtype
        log_sum_N1 = sum_N1.log() + largest_N1
        nats_N1 = log_sum_N1 - target_N1
        if second is not None:
            nats_N1 += second.weight_N[:, None] * (log_sum_N1 - second_N1)
        return nats_N1.squeeze(1)

    @staticmethod
    def backward(ctx: Any, d_nats_N: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials_NV, sum_N1, sigmoid_NV, targets_N, *second = ctx.saved_tensors
        d_nats_N1 = d_nats_N[:, None]
        if sigmoid_NV is not None:
            d_nats_N1 = 4 * d_nats_N1  # the slope of the softcap is 4·sigmoid·(1 - sigmoid)
        # Probabilities, less one at each target.
        d_both_N1 = d_nats_N1
        if second:
            tokens_N, weight_N = second
            d_second_N1 = d_nats_N1 * weight_N[:, None]
            d_both_N1 = d_nats_N1 + d_second_N1
        d_logits_NV = exponentials_NV * (d_both_N1 / sum_N1)
        d_logits_NV.scatter_add_(1, targets_N[:, None], -d_nats_N1)
        if second:
            d_logits_NV.scatter_add_(1, tokens_N[:, None], -d_second_N1)
        if sigmoid_NV is not None:
            d_logits_NV = torch.ops.aten.sigmoid_backward(d_logits_NV, sigmoid_NV)
        return d_logits_NV.to(ctx.dtype), None, None, None


def cross_entropy_manual(
    logits_NV: Tensor, targets_N: Tensor, softcap: float, second: SecondTargets | None = None
) -> Tensor:
    """`cross_entropy_plain` by hand."""
    return ManualCrossEntropy.apply(logits_NV, targets_N, softcap, second)


def load_attention(name: str) -> Callable[..., Tensor]:
    """The attention of this name. ImportError, AttributeError where it is not installed."""
    if name == "sdpa":
        return attention_sdpa
    if name == "math":
        return attention_math
    if name == "fa3":
        kernel = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
    elif name == "fa2":
        kernel = importlib.import_module("flash_attn").flash_attn_varlen_func
    else:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # Packages and versions spell causal attention and grouped heads differently.
    spellings = {"causal": True, "is_causal": True, "window_size": (-1, 0), "enable_gqa": True}
    options = {key: spellings[key] for key in inspect.signature(kernel).parameters if key in spellings}
    # Without it keys and values are repeated for each query head of their group.
    takes_grouped_heads = "causal" in options or "enable_gqa" in options  # torch 2.10 does not

    def attention_varlen(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts: Tensor) -> Tensor:
        if not takes_grouped_heads:
            group = q_BTHE.size(2) // k_BTKE.size(2)
            k_BTKE = k_BTKE.repeat_interleave(group, 2)
            v_BTKE = v_BTKE.repeat_interleave(group, 2)
        length = q_BTHE.size(1)
        y: Any = kernel(
            q_BTHE.flatten(0, 1), k_BTKE.flatten(0, 1), v_BTKE.flatten(0, 1),
            starts, starts, length, length, **options)
        if isinstance(y, tuple):  # some return more than the output
            y = y[0]
        return y.view_as(q_BTHE)

    return attention_varlen


class Form(NamedTuple):
    """One way to compute attention or the MLP."""

    function: Callable[..., Tensor]
    rest: tuple[Any, ...]  # what it takes after the tensors that have gradients


def both_passes(function: Callable[..., Tensor], inputs: list[Tensor], rest: tuple[Any, ...]) -> list[Tensor]:
    """The output, then each input's gradient when the first input is the upstream gradient."""
    out, gradients = torch.autograd.functional.vjp(lambda *x: function(*x, *rest), tuple(inputs), inputs[0])
    return [out, *gradients]


class Chosen(NamedTuple):
    """The form that a run computes with."""

    name: str
    function: Callable[..., Tensor]
    line: str  # for the log: which forms were tried, and what came of each


# Relative to the largest value: bfloat16 has 8 bits, and errors add up along a row.
MAX_FORM_ERROR = 0.03


def first_that_agrees(
    asked: str,
    names: list[str],
    load: Callable[[str], Form],
    inputs: list[Tensor],
    exact: list[Tensor],
    machine: Machine,
) -> Chosen:
    """The first form that compiles, launches and agrees with `exact` on all ranks, which call it together.

    asked: the setting and its value. inputs: tensors with gradients, of the real shape. exact: output and
    gradients by the plain form, possibly for the first rows only. Raises ConfigError if no form agrees.
    """
    tried = []
    for name in names:
        error = math.inf
        try:
            form = load(name)
            # Tested exactly as it will run: compiled, in one graph, with a backward pass. On a CPU a graph
            # takes half a minute, and holds no kernel of ours that a compiler might not take.
            function = form.function
            if machine.on_gpu:
                function = machine.compile(function, dynamic=False, fullgraph=True)
            error = 0.0
            for found, wanted in zip(both_passes(function, inputs, form.rest), exact, strict=True):
                gap = (found[: len(wanted)] - wanted).abs().max() / wanted.abs().max()
                error = max(error, gap.item()) if math.isfinite(gap.item()) else math.inf
            message = f"error:{error:.1e}"
        except Exception as failure:  # it is not installed, or does not compile or run here
            error = math.inf
            message = f"{type(failure).__name__}: {failure}".splitlines()[0]
        # All ranks look at the same form at the same time, and judge it by the worst of them.
        worst_error, worst_message = max(machine.gather((error, message)), key=lambda found: found[0])
        tried.append(f"{name} {worst_message}")
        if worst_error <= MAX_FORM_ERROR:
            setting = asked.split("=")[0].lower()
            return Chosen(name, form.function, f"{setting}:{name} tried: {' | '.join(tried)}")
    raise ConfigError(f"{asked}: {' | '.join(tried)}; set auto, or lower MICRO_BATCH_TOKENS")


class Kernels(NamedTuple):
    """The forms that a run computes with, chosen once for training and evaluation alike."""

    attend: Callable[..., Tensor]
    mlp: Callable[..., Tensor]
    heads: Callable[..., Heads]
    xsa: Callable[..., Tensor]
    report: list[str]  # lines for the log
    # On GPUs these, unless MANUAL_BACKWARD=1 asks for others.
    norm: Callable[..., Tensor] = rms_norm
    cross_entropy: Callable[..., Tensor] = cross_entropy_plain


def choose_kernels(c: Config, machine: Machine) -> Kernels:
    """Attention, MLP and what is made of heads, tried at the real shape; all ranks call it together.

    `auto` tries them in the order of the speed they are known for; `benchmarks/kernels.py` times them.
    Raises ConfigError for one that was asked for and fails.
    """
    attention = choose_attention(c, machine)
    mlp = choose_mlp(c, machine)
    heads = choose_heads(c, machine)
    loss = choose_loss(c, machine)
    report = [attention.line, mlp.line, heads.line]
    if loss is not None:
        report.append(loss.line)
    report += slow_attention(attention.name, c, machine)
    manual_loss = loss is not None and loss.name == "manual"
    return Kernels(
        attend=attention.function,
        mlp=mlp.function,
        heads={"kernel": heads_fused, "manual": heads_manual, "plain": heads_plain}[heads.name],
        xsa=xsa_fused if heads.name == "kernel" else xsa_plain,
        norm=rms_norm_manual if manual_loss else rms_norm,
        cross_entropy=cross_entropy_manual if manual_loss else cross_entropy_plain,
        report=report,
    )


def slow_attention(name: str, c: Config, machine: Machine) -> list[str]:
    """A warning where a GPU could attend faster than by the kernel of this name."""
    if not machine.on_gpu or not c.doc_mask or c.attention != "auto":
        return []
    if name == "sdpa":
        return ["warning: ATTENTION=sdpa with DOC_MASK=1 makes a step about 2.4 times as long: "
                "install flash_attn_3, flash_attn, or torch 2.10 or later"]  # fmt: skip
    if name != "fa3":
        return [f"warning: ATTENTION={name}: a Hopper card takes about 8 % less time with flash_attn_3"]
    return []


# On a CPU plain products attend faster than torch's own kernel, as long as the weights that they keep for the
# backward pass take no more memory than this.
MATH_ATTENTION_BYTES = 1 << 30


def choose_attention(c: Config, machine: Machine) -> Chosen:
    """The attention of this machine; as `choose_kernels`."""
    # Queries, keys and values of one micro-batch, with a document border in every 256 tokens or so.
    shape_BT = (c.micro_batch_tokens // c.train_seq_len, c.train_seq_len)
    normal = functools.partial(torch.randn, device=machine.device, dtype=machine.dtype)
    ids_BT = (torch.rand(shape_BT, device=machine.device) < 1 / 256).long() * BOS_ID
    qkv = [normal(*shape_BT, heads, c.head_dim) for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
    mask = attention_documents(ids_BT[:2], None, attention_sdpa, c)
    exact = both_passes(attention_sdpa, [tensor[:2].double() for tensor in qkv], (mask,))

    def load_attention_form(name: str) -> Form:
        attend = load_attention(name)
        return Form(attend, (attention_documents(ids_BT, None, attend, c),))

    if c.attention != "auto":
        names = [c.attention]
    elif not machine.on_gpu:
        longest = max(c.eval_length, *(part.length for part in c.length_parts))
        visits = sum(map(len, visit_order(c, looping=True)))
        kept_bytes = 4 * c.micro_batch_tokens * c.num_heads * (longest // 2) * visits
        # A compiler knows torch's own as well.
        fits = kept_bytes <= MATH_ATTENTION_BYTES and not machine.compiled
        names = ["math", "sdpa"] if fits else ["sdpa"]
    elif c.doc_mask:
        names = ["fa3", "varlen", "fa2", "sdpa"]
    else:
        names = ["fa3", "sdpa"]  # without documents torch's own kernel needs no mask, and is as fast
    return first_that_agrees(f"ATTENTION={c.attention}", names, load_attention_form, qkv, exact, machine)


def form_names(setting: str, c: Config, machine: Machine) -> list[str]:
    """The forms to try for the value of FUSED_MLP or FUSED_HEADS, in order."""
    if setting == "1":
        return ["kernel"]
    if setting == "auto" and machine.on_gpu and c.manual_backward != "1":
        return ["kernel", "plain"]
    return manual_names(c, machine)


def manual_names(c: Config, machine: Machine) -> list[str]:
    """The forms to try for the value of MANUAL_BACKWARD, in order."""
    if c.manual_backward == "1":
        return ["manual"]
    # A compiler fuses operators better than these do.
    if c.manual_backward == "auto" and not machine.on_gpu and not machine.compiled:
        return ["manual", "plain"]
    return ["plain"]


def choose_mlp(c: Config, machine: Machine) -> Chosen:
    """The form of the MLP; as `choose_kernels`."""
    # Input, up and down matrix, of real sizes.
    normal = functools.partial(torch.randn, device=machine.device, dtype=machine.dtype)
    sizes = [(c.micro_batch_tokens, c.model_dim), (c.mlp_dim, c.model_dim), (c.model_dim, c.mlp_dim)]
    tensors = [normal(*size) for size in sizes]
    exact = both_passes(mlp_plain, tensors, (c.leaky_slope,))
    forms = {
        "kernel": Form(mlp_fused, (c.leaky_slope,)),
        "manual": Form(mlp_manual, (c.leaky_slope,)),
        "plain": Form(mlp_plain, (c.leaky_slope,)),
    }
    names = form_names(c.fused_mlp, c, machine)
    asked = f"FUSED_MLP={c.fused_mlp}"
    return first_that_agrees(asked, names, lambda name: forms[name], tensors, exact, machine)


def choose_heads(c: Config, machine: Machine) -> Chosen:
    """The form of what stands before and after attention, whose function is both; as `choose_kernels`."""
    # What the projection makes of a micro-batch, the gains, and the gates.
    normal = functools.partial(torch.randn, device=machine.device, dtype=machine.dtype)
    shape_BT = (c.micro_batch_tokens // c.train_seq_len, c.train_seq_len)
    qkv_BTNE = normal(*shape_BT, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
    tensors = [qkv_BTNE, normal(c.num_heads), normal(*shape_BT, c.num_heads)]
    rotary = rotary_table(c.train_seq_len, c, machine.device).to(machine.dtype)

    # Both in a row, with queries for what attention would have made of them.
    def both(heads: Callable[..., Heads], xsa: Callable[..., Tensor]) -> Form:
        def function(qkv_BTNE: Tensor, gain_H: Tensor, gate_BTH: Tensor, rotary: Tensor) -> Tensor:
            q_BTHE, k_BTKE, v_BTKE, own_BTKE = heads(qkv_BTNE, gain_H, rotary)
            return torch.cat([xsa(q_BTHE, own_BTKE, gate_BTH), k_BTKE, v_BTKE], dim=2)

        return Form(function, (rotary,))

    forms = {
        "kernel": both(heads_fused, xsa_fused),
        "manual": both(heads_manual, xsa_plain),
        "plain": both(heads_plain, xsa_plain),
    }
    exact = both_passes(forms["plain"].function, tensors, (rotary,))
    names = form_names(c.fused_heads, c, machine)
    asked = f"FUSED_HEADS={c.fused_heads}"
    return first_that_agrees(asked, names, lambda name: forms[name], tensors, exact, machine)


LOSS_CHECK_TOKENS = 256  # as many as show whether a loss is right; those of a batch would take GBs


def choose_loss(c: Config, machine: Machine) -> Chosen | None:
    """The form of all norms and of the loss; None: the plain one, nothing is tried; as `choose_kernels`."""
    names = manual_names(c, machine)
    if names == ["plain"]:
        return None
    # Hidden states and the head.
    normal = functools.partial(torch.randn, device=machine.device, dtype=machine.dtype)
    tensors = [normal(LOSS_CHECK_TOKENS, c.model_dim), normal(c.vocab_size, c.model_dim)]
    targets_N = torch.arange(LOSS_CHECK_TOKENS, device=machine.device) % c.vocab_size

    def nats(norm: Callable[..., Tensor], cross_entropy: Callable[..., Tensor]) -> Form:
        def function(hidden_ND: Tensor, head_VD: Tensor) -> Tensor:
            logits_NV = F.linear(norm(hidden_ND), head_VD)
            nats_N1 = cross_entropy(logits_NV, targets_N, c.logit_softcap)[:, None]
            return nats_N1.expand_as(hidden_ND).to(hidden_ND.dtype)

        return Form(function, ())

    forms = {
        "manual": nats(rms_norm_manual, cross_entropy_manual),
        "plain": nats(rms_norm, cross_entropy_plain),
    }
    exact = both_passes(forms["plain"].function, tensors, ())
    asked = f"MANUAL_BACKWARD={c.manual_backward}"
    return first_that_agrees(asked, names, lambda name: forms[name], tensors, exact, machine)


def ready_model(model: GPT, machine: Machine, kernels: Kernels) -> GPT:
    """Move a model to this rank's device, give it the kernels of the run, and set the process's precision."""
    # "high" is TF32 on GPUs, also for COMPUTE_DTYPE=float32; on CPUs products in fp32 stay exact.
    torch.set_float32_matmul_precision("high" if machine.on_gpu else "highest")
    # Each length of TRAIN_SEQ_LENS is a graph with and one without loops; torch gives up after eight.
    torch._dynamo.config.recompile_limit = 64
    model.to(machine.device)
    model.machine = machine
    model.compute_dtype = machine.dtype
    model.attend = kernels.attend
    model.mlp = kernels.mlp
    model.heads = kernels.heads
    model.xsa = kernels.xsa
    model.norm = kernels.norm
    model.cross_entropy = kernels.cross_entropy
    return model


# ============================================================================================================
# OPTIMIZER — Parallel Muon for the banks, AdamW for what remains, and the average of all weights.
# ============================================================================================================

POLAR_EXPRESS = (  # Amsel et al., arXiv 2505.16932
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
FIXED_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan et al., Muon

Quintic = tuple[float, float, float]  # a, b, c of a·x + b·x³ + c·x⁵, for every singular value x


def quintics(steps: int, polar_express: bool) -> list[Quintic]:
    """The polynomials of so many Newton-Schulz iterations; Polar Express ends by repeating its last one."""
    if not polar_express:
        return [FIXED_QUINTIC] * steps
    return [POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)] for step in range(steps)]


def iterate_on_gram(x_NRC: Tensor, iterations: list[Quintic]) -> Tensor:
    """Newton-Schulz for wide matrices: all but the first and the last of its products are R × R.

    Each iteration multiplies x from the left by q = a + b·g + c·g², a polynomial of the Gram matrix g = x xᵀ,
    which becomes q g q. Those are differences of large numbers: bfloat16 has too few digits for them.
    """
    gram_NRR = x_NRC @ x_NRC.mT
    product_NRR = None
    for number, (a, b, c) in enumerate(iterations, 1):
        # q without its first term, which `beta` adds wherever q multiplies.
        rest_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        if product_NRR is None:
            product_NRR = rest_NRR.clone()
            product_NRR.diagonal(dim1=1, dim2=2).add_(a)
        else:
            product_NRR = torch.baddbmm(product_NRR, rest_NRR, product_NRR, beta=a)
        if number < len(iterations):
            half_NRR = torch.baddbmm(gram_NRR, rest_NRR, gram_NRR, beta=a)
            gram_NRR = torch.baddbmm(half_NRR, half_NRR, rest_NRR, beta=a)
    assert product_NRR is not None, "MUON_BACKEND_STEPS is one at least"
    return product_NRR @ x_NRC


def orthogonalize(
    update_NRC: Tensor, steps: int, polar_express: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """Near-orthogonal factor of each matrix (N, R, C) by Newton-Schulz; contiguous.

    dtype: of its products; None: bf16 on GPU, fp32 on CPU.
    """
    # The product of a matrix with its transpose is smallest for wide ones.
    tall = update_NRC.size(1) > update_NRC.size(2)
    x = update_NRC.mT if tall else update_NRC
    x = x.to(dtype or (torch.bfloat16 if update_NRC.is_cuda else torch.float32))
    # The iteration converges for singular values up to one.
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    iterations = quintics(steps, polar_express)
    if x.dtype == torch.float32 and x.size(2) >= 2 * x.size(1):
        x = iterate_on_gram(x, iterations)
        return (x.mT if tall else x).contiguous()
    for a, b, c in iterations:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).contiguous()


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """Sum of the squares of all entries, on the device."""
    if tensors[0].is_cuda:
        return torch.stack([tensor.square().sum() for tensor in tensors]).sum()
    # In one pass over each: a CPU would write the squares, and read them again.
    flat = [tensor.flatten() for tensor in tensors]
    return torch.stack([torch.dot(entries, entries) for entries in flat]).sum()


def collective(name: str, former_name: str) -> Callable[..., Any]:
    """A collective of torch by the name that it has from 2.13 on, or by its former one, which warns there."""
    return getattr(dist, name, None) or getattr(dist, former_name)


class Gradients(NamedTuple):
    """The gradients of one step, means over all ranks."""

    slices: list[Tensor]  # of the banks: the matrices that this rank updates
    small: list[Tensor]  # of all other parameters, whole


class Optimizer:
    """One step over all parameters, which all ranks take together; the same on any number, to rounding.

    Each rank orthogonalises an equal part of every bank. `average` is the exponential moving average of all
    weights (PR #287); with EMA_DECAY=0 it is the weights themselves.
    """

    def __init__(self, model: GPT, c: Config, machine: Machine) -> None:
        self.config = c
        self.machine = machine
        self.orthogonalize = orthogonalize
        # On a CPU it is all matrix products, which no compiler makes faster.
        if machine.on_gpu:
            self.orthogonalize = machine.compile(orthogonalize, dynamic=False)
        self.weights = [parameter.detach() for parameter in model.parameters()]
        # Without an average, what is shipped is what was trained.
        self.average = self.weights
        if c.ema_decay:
            self.average = [weight.clone() for weight in self.weights]

        groups: dict[str, list[nn.Parameter]] = {"muon": [], "embedding": [], "scalar": [], "head": []}
        table = parameter_table(model.settings)
        for name, parameter in model.named_parameters():
            groups[table[name].optimizer].append(parameter)

        # The largest bank first: its communication takes longest, and hides behind the others' work.
        self.banks = sorted(groups["muon"], key=Tensor.numel, reverse=True)
        self.momenta = []
        for bank in self.banks:
            matrices = math.ceil(len(bank) / machine.world_size)
            self.momenta.append(bank.new_zeros(matrices, *bank.shape[1:]))

        self.small = groups["embedding"] + groups["scalar"] + groups["head"]
        # An embedding that is no head as well bears, and needs, a much larger rate.
        embed_lr = c.tied_embed_lr if c.tie_embeddings else c.embed_lr
        adam_groups = [
            {"params": groups["embedding"], "base_lr": embed_lr, "weight_decay": c.embed_wd},
            {"params": groups["scalar"], "base_lr": c.scalar_lr, "weight_decay": c.adam_wd},
        ]
        # Only where there is one: checkpoints of other runs keep their two groups.
        if groups["head"]:
            adam_groups.append({"params": groups["head"], "base_lr": c.head_lr, "weight_decay": 0.0})
        self.adam = torch.optim.AdamW(adam_groups, betas=(c.beta1, c.beta2), eps=c.adam_eps, fused=True)

    @torch.no_grad()
    def step(
        self, lr_scale: float, momentum: float, step: int = 0, timer: StepTimer | None = None
    ) -> Tensor:
        """Update all weights from their gradients (means of this rank, used up), and the average of weights.

        lr_scale: factor on every learning rate. momentum: of Muon. step: how many came before. timer: is told
        where the clipping begins and ends. Returns the global gradient norm before it, on the device.
        """
        # Phase 1: gradients of all ranks become one.
        gradients = self._reduce()
        if timer is not None:
            timer.lap("optimizer")
        # Phase 2: bound their global norm.
        norm = self._clip(gradients)
        if timer is not None:
            timer.lap("grad_clip")
        # Phase 3: AdamW on the tables of the vocabulary and the small tensors.
        for group in self.adam.param_groups:
            group["lr"] = lr_scale * group["base_lr"]
        self.adam.step()
        # Phase 4: Muon on the banks.
        self._update_banks(gradients.slices, lr_scale * self.config.matrix_lr, momentum)
        # Phase 5: the average follows.
        self._update_average(step)

        for parameter in (*self.banks, *self.small):
            parameter.grad = None
        return norm

    def use_average(self) -> None:
        """Put the average of the weights, or with EMA_SHARE a blend of both, in their place; once a run."""
        if self.config.ema_share == 1.0:
            torch._foreach_copy_(self.weights, self.average)
        else:
            torch._foreach_lerp_(self.weights, self.average, self.config.ema_share)

    def _reduce(self) -> Gradients:
        """Means over ranks: of the banks this rank's matrices, of the others all."""
        whole = [require_gradient(bank.grad) for bank in self.banks]
        small = [require_gradient(parameter.grad) for parameter in self.small]
        if self.machine.world_size == 1:
            return Gradients(whole, small)
        # All are on the way at once.
        reduce_scatter = collective("reduce_scatter_single", "reduce_scatter_tensor")
        slices = [torch.empty_like(buffer) for buffer in self.momenta]
        handles = []
        for mine, gradient in zip(slices, whole, strict=True):
            handles.append(reduce_scatter(mine, self._fill(gradient), async_op=True))
        # Many small tensors travel as one.
        flat = nn.utils.parameters_to_vector(small)
        handles.append(dist.all_reduce(flat, async_op=True))
        for handle in handles:
            handle.wait()
        torch._foreach_div_([*slices, flat], self.machine.world_size)
        nn.utils.vector_to_parameters(flat, small)
        return Gradients(slices, small)

    def _clip(self, gradients: Gradients) -> Tensor:
        """Scale gradients so that their global norm is at most GRAD_CLIP_NORM; returns the norm before."""
        squared = squared_norm(gradients.slices)
        self.machine.add_up(squared)  # every rank has other matrices of the banks
        # The small ones are whole on every rank: they are added once.
        norm = (squared + squared_norm(gradients.small)).sqrt()
        if self.config.grad_clip_norm:
            factor = (self.config.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([*gradients.slices, *gradients.small], factor)
        return norm

    def _update_banks(self, gradients: list[Tensor], lr: float, momentum: float) -> None:
        """Muon (Jordan et al.): step along the orthogonal factor, with decoupled weight decay."""
        # Made one by one: while a bank's updates travel, the next bank's are computed.
        updates = (
            self._muon_update(gradient, buffer, momentum)
            for gradient, buffer in zip(gradients, self.momenta, strict=True)
        )
        for bank, update in self._gather(updates):
            factor = max(1.0, bank.size(1) / bank.size(2)) ** 0.5  # tall matrices: larger steps
            if self.config.muon_wd:
                bank.mul_(1.0 - lr * self.config.muon_wd)
            bank.add_(update, alpha=-lr * factor)

    def _update_average(self, step: int) -> None:
        """Move the average towards the weights; faster at first, so that a short run forgets its start."""
        if self.config.ema_decay:
            decay = min(self.config.ema_decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.average, self.weights, 1.0 - decay)

    def _muon_update(self, gradient: Tensor, buffer: Tensor, momentum: float) -> Tensor:
        """Nesterov momentum, row normalisation (MuonEq-R), orthogonalisation of (N, R, C)."""
        c = self.config
        buffer.mul_(momentum).add_(gradient)
        # Nesterov: as if the next step's momentum were already in.
        update = gradient.add_(buffer, alpha=momentum)
        if c.muon_row_normalize:
            update /= update.norm(dim=-1, keepdim=True).clamp(min=1e-7)
        dtype = self.machine.orthogonalize_dtype
        return self.orthogonalize(update, c.muon_backend_steps, c.muon_polar_express, dtype)

    def _fill(self, bank: Tensor) -> Tensor:
        """The bank with zero matrices at its end, so that all ranks hold equally many."""
        missing = -len(bank) % self.machine.world_size
        return F.pad(bank, (0, 0, 0, 0, 0, missing))

    def _gather(self, slices: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each bank, and what its slices on all ranks make; they travel while the next are made (PR #399)."""
        if self.machine.world_size == 1:
            yield from zip(self.banks, slices, strict=True)
            return
        all_gather = collective("all_gather_single", "all_gather_into_tensor")
        sent = []
        for mine in slices:
            whole = mine.new_empty(len(mine) * self.machine.world_size, *mine.shape[1:])
            sent.append((whole, all_gather(whole, mine, async_op=True)))
        for bank, (whole, handle) in zip(self.banks, sent, strict=True):
            handle.wait()
            yield bank, whole[: len(bank)]

    def state(self) -> dict[str, Any]:
        """A copy of weights and state, the same whatever the world size; all ranks call it together."""
        momenta = [whole for _, whole in self._gather(self.momenta)]
        # A copy: training goes on while it is written.
        state = {"weights": self.weights, "average": self.average, "adam": self.adam.state_dict()}
        return copy.deepcopy({**state, "momenta": momenta})

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned, on any world size."""
        torch._foreach_copy_(self.weights, state["weights"])
        torch._foreach_copy_(self.average, state["average"])
        for buffer, whole in zip(self.momenta, state["momenta"], strict=True):
            parts = self._fill(whole).chunk(self.machine.world_size)
            buffer.copy_(parts[self.machine.rank])
        self.adam.load_state_dict(state["adam"])


def require_gradient(gradient: Tensor | None) -> Tensor:
    """A gradient, which every parameter has after a backward pass."""
    assert gradient is not None, "every parameter takes part in the loss"
    return gradient


# ============================================================================================================
# SCHEDULE — pure functions of clock and steps; progress goes from 0 to 1, and is the same on all ranks.
# ============================================================================================================


def run_progress(elapsed_seconds: float, step: int, c: Config) -> float:
    """Share of the run that is over: of the steps, or of the clock less its reserve if that is more."""
    of_steps = step / c.iterations if c.iterations else 1.0
    if c.max_wallclock_seconds == 0:
        return of_steps
    reserve = c.gptq_reserve_seconds if c.gptq else 0.0
    return max(of_steps, elapsed_seconds / (c.max_wallclock_seconds - reserve))


def learning_rate_scale(progress: float, step: int, c: TrainingSettings) -> float:
    """1, then linear to MIN_LR over the warm-down: a part of the run, or WARMDOWN_ITERS mean steps."""
    warmdown = c.warmdown_frac
    if c.warmdown_iters and progress == 0 and c.max_wallclock_seconds == 0:
        # Before the first step a mean is not known; without a clock it is the run's own.
        warmdown = c.warmdown_iters / max(c.iterations, 1)
    elif c.warmdown_iters:
        warmdown = c.warmdown_iters * progress / max(step, 1)
    if warmdown == 0:
        return 1.0
    return max(c.min_lr, min(1.0, (1.0 - progress) / warmdown))


def muon_momentum(progress: float, step: int, c: TrainingSettings) -> float:
    """Momentum of Muon: linear from its first to its final value, in steps if given so, else in progress."""
    if c.muon_momentum_warmup_steps:
        rise = min(1.0, step / c.muon_momentum_warmup_steps)
    elif c.muon_momentum_warmup_frac:
        rise = min(1.0, progress / c.muon_momentum_warmup_frac)
    else:
        rise = 1.0
    return c.muon_momentum_warmup_start + rise * (c.muon_momentum - c.muon_momentum_warmup_start)


def prefix_weight(progress: float, c: TrainingSettings) -> float:
    """Weight of prefixes in the loss: PREFIX_LOSS for a third of the run, then linear to 0 over the next.

    So the last third, and the average of its weights, learn nothing but what is scored.
    """
    return c.prefix_loss * min(1.0, max(0.0, 2.0 - 3.0 * progress))


def loop_is_on(progress: float, c: ModelSettings) -> bool:
    """Whether the looped layers run their extra passes (PR #1493: from 35 % of the run)."""
    return c.num_loops > 0 and progress >= c.enable_looping_at


def next_length(
    known: list[LengthStart], elapsed_seconds: float, step_seconds: float, step: int, c: Config
) -> LengthStart | None:
    """Where the next of TRAIN_SEQ_LENS begins, once its share of the run is near; None: not yet, or no more.

    known: what is known already. step_seconds: of a step to come, about. A step must be known before it is
    staged: so it lies TRAIN_PREFETCH_QUEUE + 1 steps ahead of the one that is next.
    """
    parts = c.length_parts
    if len(known) == len(parts):
        return None
    ahead = c.train_prefetch_queue + 1
    progress = run_progress(elapsed_seconds + ahead * step_seconds, step + ahead, c)
    if progress < parts[len(known) - 1].until:
        return None
    return LengthStart(step + ahead, parts[len(known)].length)


# ============================================================================================================
# EVALUATION — every target is scored once, before anything learns from it; a ledger enforces it.
# ============================================================================================================


class Score(NamedTuple):
    """The result of one way to score a text."""

    nats: float  # mean over targets
    bits_per_byte: float
    scored_tokens: int
    bytes: int


class Validation(NamedTuple):
    """The text that is scored."""

    tokens: np.ndarray  # uint16
    bytes_total: int  # of all its targets
    mark: str  # ends every result's line: " comparable:0" where VAL_TOKENS_LIMIT left targets out


class Ledger:
    """Nats of every target of a token stream (target i is token i + 1), in fp64, each written once."""

    def __init__(self, tokens: np.ndarray | Tensor) -> None:
        self._tokens = np.array(tokens)
        self._nats = np.full(len(tokens) - 1, np.nan)
        self.scored = 0  # targets
        self.scored_nats = 0.0  # their sum so far, for a line of progress; `score` adds up all of them anew
        self.nats = self._nats.view()
        self.nats.flags.writeable = False

    def record(self, start: int, nats: np.ndarray) -> None:
        """Write some targets, from `start` on. ValueError for one that has a score, and for no number."""
        # In any order and once; this is the only place that writes.
        stop = start + len(nats)
        if start < 0 or stop > len(self.nats):
            raise ValueError(f"got targets {start}..{stop}, expected none beyond {len(self.nats)}")
        unscored = np.isnan(self.nats[start:stop])
        if not unscored.all():
            raise ValueError(f"got targets {start}..{stop}, but target {start + int(unscored.argmin())} has "
                             "its score: each is scored once")
        finite = np.isfinite(nats)
        if not finite.all():
            raise ValueError(f"target {start + int(finite.argmin())} has a loss that is not finite: weights "
                             "diverged, in training or in learning from the text; lower that learning rate")
        self._nats[start:stop] = nats
        self.scored += len(nats)
        self.scored_nats += float(nats.sum())

    def scored_tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop: all that an update may learn from. ValueError if one is not scored yet."""
        # Token i + 1 is target i; token 0 is nobody's target.
        scored = np.isfinite(self.nats[max(start - 1, 0) : max(stop - 1, 0)])
        if start < 0 or stop > len(self._tokens) or not scored.all():
            raise ValueError(f"tokens {start}..{stop} are not all scored: nothing may learn from them yet")
        return self._tokens[start:stop].copy()

    def score(self, bytes_total: int) -> Score:
        """The result, for text of so many bytes. ValueError when a target was never scored."""
        missing = len(self.nats) - self.scored
        if missing:
            first = int(np.isnan(self.nats).argmax())
            raise ValueError(f"{missing} targets were never scored, the first is {first}")
        nats = float(self.nats.sum())
        return Score(nats / self.scored, nats / math.log(2) / bytes_total, self.scored, bytes_total)


def load_tokenizer(config: Config) -> Any:
    """The SentencePiece model of TOKENIZER_PATH. DataError if there is none, or one of another size."""
    import sentencepiece

    path = find_path(config.tokenizer_path)
    if path.is_file():
        with open(path, "rb") as file:
            why = why_no_file(file.read(64))
        if why:
            raise DataError(f"TOKENIZER_PATH={path}: expected a SentencePiece model: {why}")
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise DataError(f"TOKENIZER_PATH={path}: no SentencePiece model ({error}); name the one that made "
                        f"the shards of DATA_PATH={config.data_path}, see data/") from error
    if pieces.vocab_size() != config.vocab_size:
        raise DataError(f"TOKENIZER_PATH={path}: {pieces.vocab_size()} pieces, expected "
                        f"VOCAB_SIZE={config.vocab_size}")
    return pieces


class PieceBytes(NamedTuple):
    """What each id stands for."""

    lengths: np.ndarray  # bytes of its piece, without a leading space
    spaced: np.ndarray  # whether the piece begins with a space
    is_text: np.ndarray  # whether it is text at all


def piece_bytes(pieces: Any, size: int) -> PieceBytes:
    """The bytes of each of `size` pieces of a SentencePiece model."""
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
            lengths[i] = len(piece.removeprefix("▁").encode())
    return PieceBytes(lengths, spaced, is_text)


def longest_prefixes(pieces: Any, size: int) -> np.ndarray:
    """For each of `size` pieces of a SentencePiece model the id of its text's longest proper prefix, or -1.

    Pieces that are no text, and single bytes, neither have a prefix nor are one.
    """
    is_text = piece_bytes(pieces, size).is_text
    ids = {}
    for i in range(size):
        if is_text[i] and not pieces.is_byte(i):
            ids[pieces.id_to_piece(i)] = i
    prefixes = np.full(size, -1, np.int64)
    for text, i in ids.items():
        for length in range(len(text) - 1, 0, -1):
            if text[:length] in ids:
                prefixes[i] = ids[text[:length]]
                break
    return prefixes


# Pieces of CaseOps (PR #1729): they say how the next word is written, and are no text. A tokenizer has the
# first four or all of them, from id 4 on. The fourth says that the one behind it is text after all.
CASE_MARKS = ("\ue001", "\ue002", "\ue003", "\ue004", "\ue005", "\ue006")
FIRST_MARK_ID = 4
ESCAPE_ID = 7
MAKE_AGAIN = ("run data/fineweb.py, which keeps what is right and notes it in the manifest, or export again "
              "with data/export.py")


def case_marks(pieces: Any) -> list[int]:
    """The ids of a tokenizer's CaseOps marks, in order; none in a tokenizer of plain text."""
    ids: list[int] = []
    for i, mark in enumerate(CASE_MARKS, FIRST_MARK_ID):
        if i == pieces.vocab_size() or pieces.id_to_piece(i) != mark:
            break
        ids.append(i)
    return ids


def read_manifest(folder: Path) -> Any:
    """What manifest.json of a folder of shards says; None where there is no such file. DataError."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}, expected JSON; fetch or export the data again") from error


def read_sidecar(folder: Path) -> np.ndarray:
    """Bytes of original text behind each validation token, by the byte sidecar of a folder of shards, uint16.

    DataError where it has not one count for each token of its shard, or not the sum that the manifest has.
    """
    pattern = glob.escape(str(folder))
    shards = open_shards(f"{pattern}/fineweb_val_[0-9]*.bin")
    sidecars = open_shards(f"{pattern}/fineweb_val_bytes_*.bin")
    found = [(sidecar.path.name.replace("_val_bytes_", "_val_"), sidecar.tokens) for sidecar in sidecars]
    expected = [(shard.path.name, shard.tokens) for shard in shards]
    if found != expected:
        raise DataError(f"{folder}: the byte sidecars are of the shards {found} (name, tokens), expected "
                        f"{expected}; {MAKE_AGAIN}")

    counts = np.concatenate([read_tokens(sidecar) for sidecar in sidecars])
    # The tool that made the sidecar had the text itself, and noted how many bytes of it are counted.
    total = int(counts.sum(dtype=np.int64))
    try:
        noted = int(read_manifest(folder)["splits"]["val"]["audit"]["sidecar_bytes"])
    except (LookupError, TypeError, ValueError):
        raise DataError(f"{folder}/manifest.json: no splits.val.audit.sidecar_bytes, expected the {total} "
                        f"that fineweb_val_bytes_*.bin sum to; {MAKE_AGAIN}") from None
    if total != noted:
        raise DataError(f"{folder}: fineweb_val_bytes_*.bin sum to {total} bytes of text, expected {noted} "
                        f"by manifest.json; {MAKE_AGAIN}")
    return counts


def check_sidecar(tokens: np.ndarray, counts: np.ndarray, pieces: Any, config: Config) -> None:
    """DataError where the counts of a byte sidecar cannot be those of these tokens; both shape (tokens,)."""
    here = f"DATA_PATH={config.data_path}: by fineweb_val_bytes_*.bin"
    # Each byte counts once: none where there is no text.
    marks = case_marks(pieces)
    is_mark = np.zeros(config.vocab_size, bool)
    is_mark[marks] = True
    no_text = is_mark[tokens]
    if marks:
        no_text[1:] &= tokens[:-1] != ESCAPE_ID
    no_text |= tokens == BOS_ID
    wrong = np.flatnonzero(no_text & (counts > 0))
    if len(wrong):
        at = int(wrong[0])
        raise DataError(f"{here} validation token {at}, id {tokens[at]}, stands for {counts[at]} bytes, "
                        f"expected 0: BOS and the marks of CaseOps are no text; {MAKE_AGAIN}")
    # And no document with text is without bytes; the last one may be cut anywhere.
    begins = np.flatnonzero(tokens == BOS_ID)
    if len(begins) > 1:
        of_document = np.add.reduceat(counts.astype(np.int64), begins)[:-1]
        lengths = np.diff(begins)
        empty = np.flatnonzero((of_document == 0) & (lengths > 2))
        if len(empty):
            number = int(empty[0])
            raise DataError(f"{here} validation document {number} has {lengths[number]} tokens and no bytes; "
                            f"{MAKE_AGAIN}")
    # Normalising changes characters here and there; most pieces stand for as many bytes as they have. Pieces
    # of one byte are not asked: several of them may make a character, which counts at the last.
    of_piece = piece_bytes(pieces, config.vocab_size)
    expected = (of_piece.lengths + of_piece.spaced).astype(np.uint16)
    is_asked = (expected > 1) & ~is_mark
    asked = is_asked[tokens]
    share = float(np.mean((counts == expected[tokens])[asked])) if asked.any() else 1.0
    if share < 0.5:
        raise DataError(f"{here} only {share:.0%} of validation tokens stand for as many bytes as their "
                        f"pieces have; {MAKE_AGAIN}")


def token_bytes(tokens: np.ndarray, config: Config) -> np.ndarray:
    """Bytes of text that each target stands for: from the byte sidecar of the shards, else from the pieces.

    DataError for a foreign tokenizer, or one without a lone space, which over-counts (issue #897); for one of
    CaseOps without a sidecar, whose marks would count as text (#2138); for a sidecar that cannot be right.
    """
    pieces = load_tokenizer(config)
    folder = find_path(config.data_path)
    if any(folder.glob("fineweb_val_bytes_*.bin")):
        counts = read_sidecar(folder)
        if len(counts) < len(tokens):
            raise DataError(f"{folder}: {len(counts)} counts in fineweb_val_bytes_*.bin for {len(tokens)} "
                            f"validation tokens; {MAKE_AGAIN}")
        counts = counts[: len(tokens)]
        check_sidecar(tokens, counts, pieces, config)
        return counts[1:].astype(np.int64)
    if case_marks(pieces):
        raise DataError(f"TOKENIZER_PATH={config.tokenizer_path}: has CaseOps marks, which are no text, and "
                        f"{folder} has no fineweb_val_bytes_*.bin that counts without them; {MAKE_AGAIN}")
    if pieces.piece_to_id("▁") == pieces.unk_id():
        raise DataError(f"TOKENIZER_PATH={config.tokenizer_path}: expected a lone space among its pieces")
    of_piece = piece_bytes(pieces, config.vocab_size)
    targets = tokens[1:]
    before = tokens[:-1]
    # A leading space is a byte, but not after an id that is no text: decoding drops it there.
    return of_piece.lengths[targets] + (of_piece.spaced[targets] & of_piece.is_text[before])


def document_start_of_targets(tokens: np.ndarray, c: ModelSettings) -> np.ndarray:
    """The token at which the document of each target begins; without DOC_MASK all are one document."""
    inputs = tokens[:-1]
    begins = np.zeros(len(inputs), np.int64)
    if c.doc_mask:
        at = np.flatnonzero(inputs == BOS_ID)
        begins[at] = at
    return np.maximum.accumulate(begins)


def window_rows(
    targets: int, context: int, stride: int, document_begins: np.ndarray, chunk: int
) -> list[np.ndarray]:
    """The forward passes of a sliding-window score, by chunk: rows of (first token, first target, end).

    Window w reads the `context` tokens from w * stride on. Window 0 scores all its targets; a later one those
    that no window before it has reached, at most `stride` of them. Where a document begins inside the window
    there is a shortcut: every window up to the document's beginning sees the same context, so the last of
    them scores for all. `document_begins[i]` is the token at which the document of target i begins.
    Context 4 and stride 2, one document: (0, 0, 4), (2, 4, 6), (4, 6, 8), …
    """
    # Windows never cross the end of a chunk: what is learnt there changes what comes after.
    chunks: list[list[tuple[int, int, int]]] = [[] for _ in range(0, targets, chunk)]
    start = 0  # the first target without a score
    while start < targets:
        chunk_end = min((start // chunk + 1) * chunk, targets)
        window = max(0, (start - context) // stride + 1)  # the first one that reaches this target
        last = max(0, (chunk_end - 1 - context) // stride + 1)  # the one that reaches the end of the chunk
        window = max(window, min(int(document_begins[start]) // stride, last))
        end = min(window * stride + context, targets)
        chunks[start // chunk].append((window * stride, start, end))
        start = end
    return [np.array(rows) for rows in chunks if rows]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor there; the host does not wait until a GPU that is behind has taken it."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def even_batch_rows(rows: list[int], most: int) -> int:
    """Rows of a batch, at most `most`, with which eight ranks finish chunks of so many rows soonest.

    Each rank takes every eighth batch of a chunk, and a batch that is not full takes as long as a full one.
    The number of ranks is the one of VAL_BATCH_SIZE, so that a batch is the same for any number of them.
    """
    rows_of_chunk = np.array(rows)
    overhead_rows = 2  # what a batch takes besides its rows, in rows: a few milliseconds
    best = most
    least = math.inf
    for size in range(most, 0, -1):
        rounds = np.ceil(rows_of_chunk / (8 * size)).sum()
        cost = float(rounds) * (size + overhead_rows)
        if cost < least:
            best = size
            least = cost
    return best


# A score that takes its time is seen to be at work: so many seconds without a line, at most.
SILENT_SECONDS = 5.0


class ProgressReport:
    """Lines about a score under way, with the time it still takes: see VAL_PROGRESS_LOG_EVERY."""

    def __init__(self, run: Run, name: str, every: int, batch_tokens: int) -> None:
        """every: batches of so many tokens between two lines; 0: no lines; -1: twenty in all."""
        self.run = run
        self.name = name
        self.every = every
        self.batch_tokens = batch_tokens
        self.targets = 0  # that this rank scores; 0: all, as the ranks score them together
        self.told = 0  # how many times `every` had been scored when the last line was printed
        self.done = 0.0  # share of this rank's work
        self.start = time.perf_counter()
        self.told_at = self.start

    def __call__(self, ledger: Ledger, number: int, chunks: int) -> None:
        """Log a line after some chunks, and after the last. number: of the chunk, among so many."""
        if self.every == 0:
            return
        self.done = max(self._scored_share(ledger), (number + 1) / chunks)
        if self._reached(ledger) > self.told or ledger.scored == len(ledger.nats):
            self._log(ledger)

    def still_at_work(self, ledger: Ledger, under_way: int = 0) -> None:
        """Log a line, after a batch or a step of learning, where there has been none for SILENT_SECONDS.

        under_way: targets of the chunk that the device has been given, and that are not in the ledger yet.
        """
        if self.every != 0 and time.perf_counter() - self.told_at >= SILENT_SECONDS:
            self.done = max(self.done, self._scored_share(ledger, under_way))
            self._log(ledger)

    def _scored_share(self, ledger: Ledger, under_way: int = 0) -> float:
        """Share of this rank's targets; in the end the ledger has those of the others as well."""
        return min(1.0, (ledger.scored + under_way) / (self.targets or len(ledger.nats)))

    def _reached(self, ledger: Ledger) -> int:
        """How many times `every` has been scored: there is a line for each of them."""
        interval = self.every * self.batch_tokens
        if self.every < 0:
            interval = math.ceil((self.targets or len(ledger.nats)) / 20)
        return ledger.scored // interval

    def _log(self, ledger: Ledger) -> None:
        self.told = self._reached(ledger)
        self.told_at = time.perf_counter()
        mean = "-"
        eta = "-"
        if ledger.scored > 0:  # before the first chunk it is not known
            mean = f"{ledger.scored_nats / ledger.scored:.4f}"
        if self.done > 0:
            eta = f"{(self.told_at - self.start) * (1 / self.done - 1):.0f}s"
        self.run.log(f"val_progress:{self.name} {self.done:.0%} partial_mean_loss:{mean} "
                     f"tokens_seen:{ledger.scored} eta:{eta}")


class WindowScorer:
    """Scores a token stream chunk by chunk with sliding windows; keeps what all chunks share."""

    def __init__(
        self, model: GPT, tokens: np.ndarray, config: Config, stride: int, chunk_tokens: int, looping: bool
    ) -> None:
        """tokens: 1-D ids. stride, chunk_tokens: targets. looping: as in `GPT.forward`."""
        self.model = model
        self.machine = model.machine
        self.looping = looping
        self.config = config
        self.context = config.eval_length
        self.batch_rows = max(1, config.val_pass_tokens // self.context)
        self.device = next(model.parameters()).device
        self.after_batch: Callable[[int], None] | None = None  # takes the targets of the chunk so far
        # The same compiled code serves every scorer and every reloaded model.
        self.forward = self.machine.compile(GPT.forward, dynamic=False, fullgraph=True)

        tokens = np.asarray(tokens).astype(np.int32)
        begins = document_start_of_targets(tokens, config)
        self.chunks = window_rows(len(tokens) - 1, self.context, stride, begins, chunk_tokens)
        if self.machine.compiled:  # elsewhere a batch is never filled up, and only its overhead counts
            self.batch_rows = even_batch_rows([len(chunk) for chunk in self.chunks], self.batch_rows)
        tokens = np.pad(tokens, (0, self.context))  # the last windows reach beyond the text
        # Row i: the tokens from i on, one more than T.
        self.host_windows = np.lib.stride_tricks.sliding_window_view(tokens, self.context + 1)
        self.device_windows: Tensor | None = None
        if config.val_prefetch:
            self.device_windows = torch.from_numpy(tokens).to(self.device).unfold(0, self.context + 1, 1)

    def score(self, chunk: np.ndarray) -> np.ndarray:
        """Nats of the targets of one of `chunks`, float64; all ranks call it together and get all of them."""
        # The targets of a chunk lie side by side.
        begin = int(chunk[0, 1])
        end = int(chunk[-1, 2])
        nats = torch.zeros(end - begin, dtype=torch.float64, device=self.device)
        # Ranks take batches in turn; a batch is the same for any number of them.
        first = self.machine.rank * self.batch_rows
        for at in range(first, len(chunk), self.machine.world_size * self.batch_rows):
            rows = chunk[at : at + self.batch_rows]
            nats[rows[0, 1] - begin : rows[-1, 2] - begin] = self._score_batch(rows)
            if self.after_batch:
                self.after_batch(int(rows[-1, 2]) - begin)
        self.machine.add_up(nats)
        return nats.cpu().numpy()

    @torch.no_grad()
    def _score_batch(self, rows: np.ndarray) -> Tensor:
        """Nats of the targets of some windows, in order. The host waits for nothing: it runs ahead."""
        first, start, stop = rows.T
        # Target i, in window r of the batch, which begins at token f, is row r T + (i - f) of the hidden
        # states.
        shift = np.arange(len(rows)) * self.context - first
        scored = np.arange(start[0], stop[-1]) + np.repeat(shift, stop - start)
        scored_N = to_device(scored, self.device)
        if self.machine.compiled:  # compiled code wants one shape: the same rows again, until it is full
            first = np.resize(first, self.batch_rows)
        host_ids_BT = self.host_windows[first]
        # On the device already, if VAL_PREFETCH: then only the numbers of the rows travel.
        if self.device_windows is None:
            ids_BT = to_device(host_ids_BT, self.device).long()
        else:
            ids_BT = self.device_windows[to_device(first, self.device)].long()
        targets_N = ids_BT[:, 1:].flatten()
        starts = to_device(document_starts(host_ids_BT[:, :-1], self.config), self.device)
        torch._dynamo.mark_dynamic(starts, 0)  # or torch recompiles for every number of documents
        hidden_BTD = self.forward(self.model, ids_BT[:, :-1], starts, self.looping)
        # The head, which costs most, for scored rows alone.
        return self.model.loss_per_token(hidden_BTD.flatten(0, 1)[scored_N], targets_N[scored_N])


def unlearned_scorer(
    model: GPT, tokens: np.ndarray, config: Config, stride: int, looping: bool = True
) -> WindowScorer:
    """The scorer of weights that stay as they are: one for the score, and for what is compiled before."""
    # Chunks bound nothing here but how often there is something to report.
    return WindowScorer(model, tokens, config, stride, 32 * config.val_pass_tokens, looping)


def score_sliding(
    model: GPT, tokens: Any, config: Config, progress: ProgressReport | None = None, looping: bool = True
) -> Ledger:
    """Score windows that advance by EVAL_STRIDE, each target with nearly EVAL_SEQ_LEN tokens of context.

    tokens: 1-D ids. looping: whether the extra passes run, as in `GPT.forward`. All ranks get one ledger.
    """
    ledger = Ledger(tokens)
    scorer = unlearned_scorer(model, tokens, config, config.eval_stride, looping)
    if progress:
        scorer.after_batch = functools.partial(progress.still_at_work, ledger)
    for number, chunk in enumerate(scorer.chunks):
        ledger.record(int(chunk[0, 1]), scorer.score(chunk))
        if progress:
            progress(ledger, number, len(scorer.chunks))
    return ledger


def score_roundtrip(
    model: GPT, tokens: Any, config: Config, progress: ProgressReport | None = None, looping: bool = True
) -> Ledger:
    """Score windows of EVAL_SEQ_LEN that do not overlap: the cheapest score, with the least context."""
    return score_sliding(model, tokens, replace(config, eval_stride=config.eval_length), progress, looping)


def score_ttt(model: GPT, tokens: Any, config: Config, progress: ProgressReport | None = None) -> Ledger:
    """Legal test-time training in the way of TTT_MODE; the weights given stay as they are."""
    if config.ttt_mode == "lora":
        return score_documents(model, tokens, config, progress)
    return score_chunks(model, tokens, config, progress)


def score_chunks(model: GPT, tokens: Any, config: Config, progress: ProgressReport | None = None) -> Ledger:
    """Sliding windows with test-time training (PRs #549, #1493): score a chunk, then learn from it.

    A copy of the model learns, with SGD; not from the last chunk, as nothing is scored after it.
    """
    ledger = Ledger(tokens)
    # The caller's weights stay as they are.
    learner = copy.deepcopy(model)
    sgd = torch.optim.SGD(learner.parameters(), momentum=config.ttt_momentum)
    scorer = WindowScorer(learner, tokens, config, config.eval_stride, config.ttt_chunk_tokens, looping=True)
    if progress:
        scorer.after_batch = functools.partial(progress.still_at_work, ledger)
        sgd.register_step_post_hook(lambda *_: progress.still_at_work(ledger))
    last = len(scorer.chunks) - 1
    for number, chunk in enumerate(scorer.chunks):
        begin = int(chunk[0, 1])
        end = int(chunk[-1, 2])
        ledger.record(begin, scorer.score(chunk))
        if number < last:
            # Later chunks have less left to gain: the rate falls to zero along a half cosine.
            falling = 0.5 + 0.5 * math.cos(math.pi * number / last)
            sgd.param_groups[0]["lr"] = config.ttt_lr * falling
            learn(learner, sgd, ledger.scored_tokens(begin, end + 1), config)
        if progress:
            progress(ledger, number, len(scorer.chunks))
    return ledger


def learn(model: GPT, sgd: torch.optim.SGD, tokens: np.ndarray, config: Config) -> None:
    """TTT_EPOCHS passes over the whole sequences of scored tokens. All ranks call it together."""
    machine = model.machine
    weights = list(model.parameters())
    device = weights[0].device
    loss_of = machine.compile(GPT.loss, dynamic=False)
    # Sequences overlap by one token: the last target of one is the first input of the next.
    length = config.eval_length
    sequences_NT = torch.from_numpy(tokens.astype(np.int64)).unfold(0, length + 1, length)
    for _ in range(config.ttt_epochs):
        for batch_BT in sequences_NT.split(config.ttt_batch_seqs):
            # Each rank takes its part of the batch, weighted by its size. A rank without a part computes any
            # row with weight zero, so that all of them take the same steps.
            host_ids_BT = batch_BT[machine.rank % len(batch_BT) :: machine.world_size].numpy()
            weight = len(batch_BT[machine.rank :: machine.world_size]) / len(batch_BT)
            ids_BT = to_device(host_ids_BT, device)
            starts = to_device(document_starts(host_ids_BT[:, :-1], config), device)
            torch._dynamo.mark_dynamic(starts, 0)  # or torch recompiles for every number of documents
            sgd.zero_grad()
            with torch.enable_grad():
                loss = loss_of(model, ids_BT[:, :-1], ids_BT[:, 1:], starts)
                (loss * weight).backward()
            add_up_gradients(weights, machine)
            nn.utils.clip_grad_norm_(weights, config.ttt_grad_clip or math.inf)
            sgd.step()


def add_up_gradients(weights: list[nn.Parameter], machine: Machine) -> None:
    """Replace all gradients by their sums over the ranks, which travel as one; all ranks call it together."""
    if machine.world_size == 1:
        return
    gradients = [require_gradient(weight.grad) for weight in weights]
    flat = nn.utils.parameters_to_vector(gradients)
    machine.add_up(flat)
    nn.utils.vector_to_parameters(flat, gradients)


# The constants of SplitMix64 as signed numbers.
SPLITMIX_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
SPLITMIX_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SPLITMIX_SECOND = 0x94D049BB133111EB - (1 << 64)


def shifted(bits: Tensor, places: int) -> Tensor:
    """64 bits shifted to the right; a tensor's own shift copies the sign in, which is masked out."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def splitmix(state: Tensor) -> Tensor:
    """The next 64 bits of SplitMix64 (Steele, Lea, Flood 2014) after each state, as int64.

    Sums and products wrap around. The same on every device, and every number by itself.
    """
    bits = state + SPLITMIX_STEP
    bits = (bits ^ shifted(bits, 30)) * SPLITMIX_FIRST
    bits = (bits ^ shifted(bits, 27)) * SPLITMIX_SECOND
    return bits ^ shifted(bits, 31)


def draw_uniform(keys_N: Tensor, count: int) -> Tensor:
    """`count` numbers in [-1, 1) of each key's own, (N, count), fp32."""
    steps = SPLITMIX_STEP * torch.arange(count, device=keys_N.device)
    bits_NC = splitmix(keys_N[:, None] + steps)
    # The 24 leading bits, which fp32 holds.
    return shifted(bits_NC, 40).float() * 2.0**-23 - 1


LORA_TARGETS = ("q", "k", "v", "o", "mlp", "head")
ADAPTER_EPS = 1e-10  # of AdamW: gradients of one document's chunk are small (PR #1855)


class DocumentAdapters:
    """The adapters of documents that learn side by side, and their optimizer.

    Each document has its own, drawn of SEED and its number in the text alone, and learns by itself: AdamW
    takes every number for itself, and the loss is a sum over documents. So nothing depends on which documents
    are neighbours, but for rounding.
    """

    def __init__(self, model: GPT, config: Config, documents: np.ndarray) -> None:
        """documents: their numbers in the text."""
        c = model.settings
        encoder, decoder = visit_order(c, looping=True)
        self.visits = len(encoder) + len(decoder)
        self.config = config
        self.dtype = model.compute_dtype
        outputs = {"q": c.model_dim, "k": c.kv_dim, "v": c.kv_dim, "o": c.model_dim, "mlp": c.model_dim,
                   "head": c.vocab_size}  # fmt: skip
        device = next(model.parameters()).device
        numbers_B = torch.from_numpy(documents.astype(np.int64)).to(device)
        master = torch.promote_types(self.dtype, torch.float32)

        # A and B of all visits: (visits, B, rank, inputs) and (visits, B, outputs, rank). The head is visited
        # once. B begins at zero, so that the first chunk is scored by the model as it is.
        self.a: dict[str, nn.Parameter] = {}
        self.b: dict[str, nn.Parameter] = {}
        for name in config.lora_targets:
            visits = 1 if name == "head" else self.visits
            a_NBRI = torch.stack([self._draw(name, visit, numbers_B, c.model_dim) for visit in range(visits)])
            b_NBOR = a_NBRI.new_zeros(visits, len(documents), outputs[name], config.ttt_lora_rank)
            self.a[name] = nn.Parameter(a_NBRI.to(master))
            self.b[name] = nn.Parameter(b_NBOR.to(master))
        self.adamw = torch.optim.AdamW(
            [*self.a.values(), *self.b.values()], lr=config.ttt_lora_lr,
            betas=(config.ttt_beta1, config.ttt_beta2), eps=ADAPTER_EPS, weight_decay=config.ttt_weight_decay,
            fused=True,
        )  # fmt: skip

    def _draw(self, name: str, visit: int, numbers_B: Tensor, inputs: int) -> Tensor:
        """The first A of one visit, (B, rank, inputs), uniform within ±1 / sqrt(inputs)."""
        rank = self.config.ttt_lora_rank
        # One key of SEED, projection, visit and document, each number mixed in after the other.
        key_B = torch.full_like(numbers_B, self.config.seed)
        for number in (LORA_TARGETS.index(name), visit, numbers_B):
            key_B = splitmix(key_B) + number
        return draw_uniform(key_B, rank * inputs).view(-1, rank, inputs) / math.sqrt(inputs)

    def of_visits(self, rows: int) -> list[Adapters]:
        """What `GPT.forward` takes: the adapters of the first `rows` documents, visit by visit."""
        found: list[Adapters] = [{} for _ in range(self.visits)]
        for name in self.config.lora_targets:
            if name == "head":
                continue
            for visit, adapter in enumerate(self._adapters(name, rows)):
                # Or torch recompiles for every number of documents.
                torch._dynamo.maybe_mark_dynamic(adapter.a_BRI, 0)
                torch._dynamo.maybe_mark_dynamic(adapter.b_BOR, 0)
                found[visit][name] = adapter
        return found

    def added_logits(self, hidden_BTD: Tensor) -> Tensor | None:
        """What the head's adapters add to the logits (N, V) of some of the first documents."""
        if "head" not in self.a:
            return None
        (adapter,) = self._adapters("head", len(hidden_BTD))
        return adapter(hidden_BTD).flatten(0, 1)

    def _adapters(self, name: str, rows: int) -> list[Adapter]:
        """The adapters of one name, in the dtype of activations; the scale of what they add is in A."""
        scale = self.config.ttt_lora_alpha / self.config.ttt_lora_rank
        a_NBRI = (scale * self.a[name][:, :rows]).to(self.dtype)
        b_NBOR = self.b[name][:, :rows].to(self.dtype)
        return [Adapter(a_BRI, b_BOR) for a_BRI, b_BOR in zip(a_NBRI, b_NBOR, strict=True)]


class Chunk(NamedTuple):
    """One chunk of the documents of a batch. Places count from the beginning of a document."""

    rows: int  # documents that reach this chunk, the first ones of the batch
    learning: int  # those of them that go on after it
    first: int  # the first token of the window
    start: int  # the first target of the chunk
    stop: int  # the end of both


class DocumentScorer:
    """Scores documents side by side, chunk by chunk, with adapters that learn from what is scored."""

    def __init__(self, model: GPT, tokens: np.ndarray, config: Config, ledger: Ledger) -> None:
        """model: its weights are not to be changed, nor to have gradients."""
        self.model = model
        self.machine = model.machine
        self.config = config
        self.ledger = ledger
        self.after_chunk: Callable[[], None] | None = None
        self.device = next(model.parameters()).device
        # Rows and lengths differ from chunk to chunk: tensors are marked, and one graph takes several rows of
        # any length. With dynamic=True settings would be no constants either, which our kernels need.
        self.forward = self.machine.compile(GPT.forward, dynamic=False, fullgraph=True)
        self.tokens = np.asarray(tokens)
        # Document d has the targets begins[d] .. begins[d] + lengths[d]: the first BOS after it is its last.
        begins = np.union1d([0], np.flatnonzero(self.tokens[:-1] == BOS_ID))
        self.begins = begins
        self.lengths = np.diff(np.append(begins, len(self.tokens) - 1))

    def batches(self) -> list[np.ndarray]:
        """The numbers of all documents in batches of similar length, the longest first; so within a batch."""
        longest_first = np.argsort(-self.lengths, kind="stable")
        size = self.config.documents_at_once
        return [longest_first[at : at + size] for at in range(0, len(longest_first), size)]

    def batches_of_rank(self) -> list[np.ndarray]:
        """The batches of this rank: each goes to the one with least to do, before anything is scored."""
        loads = np.zeros(self.machine.world_size)
        mine = []
        for batch in self.batches():
            rank = int(loads.argmin())
            loads[rank] += self.cost_tokens(batch)
            if rank == self.machine.rank:
                mine.append(batch)
        return mine

    def cost_tokens(self, batch: np.ndarray) -> int:
        """Tokens that pass through the model for a batch, and what a round takes besides, as tokens."""
        overhead_tokens = 8192  # the few milliseconds that a pass takes at least
        cost = 0
        for chunk in self.chunks(batch):
            cost += chunk.rows * (chunk.stop - chunk.first) + overhead_tokens
        return cost

    def chunks(self, batch: np.ndarray) -> Iterator[Chunk]:
        """The chunks of a batch, in order.

        Where a chunk ends depends on its place alone, not on how long the document will be: that is not known
        yet. Its window ends with it, and is EVAL_SEQ_LEN long if there is as much before.
        """
        lengths = self.lengths[batch]
        start = 0
        while start < lengths[0]:
            size = self.config.ttt_chunk_size
            for until, early_size in reversed(self.config.early_chunks):
                if start < until:
                    size = early_size
            stop = start + size
            first = max(0, stop - self.config.eval_length)
            rows = int((lengths > start).sum())
            learning = int((lengths > stop).sum())
            yield Chunk(rows, learning, first, start, stop)
            start = stop

    def score(self, batch: np.ndarray) -> None:
        """Score the documents of a batch, and let the adapters of each learn from it on the way."""
        adapters = DocumentAdapters(self.model, self.config, batch)
        for chunk in self.chunks(batch):
            # The last chunk of the longest document: nothing learns any more.
            with torch.set_grad_enabled(chunk.learning > 0):
                hidden_BCD = self.read(batch, chunk, adapters)
            self.record(batch, chunk, hidden_BCD, adapters)
            if chunk.learning > 0:
                self.learn(batch, chunk, hidden_BCD, adapters)
            if self.after_chunk:
                self.after_chunk()

    def read(self, batch: np.ndarray, chunk: Chunk, adapters: DocumentAdapters) -> Tensor:
        """Hidden states (B, C, D) at the targets of a chunk, made of what stands before each of them."""
        begins_B1 = self.begins[batch[: chunk.rows], None]
        places_T = np.arange(chunk.first, chunk.stop)
        # Beyond the end of a document stands what nobody before it sees, and its states are not used.
        beyond_BT = places_T >= self.lengths[batch[: chunk.rows], None]
        ids_BT = self.tokens[np.minimum(begins_B1 + places_T, len(self.tokens) - 1)].astype(np.int64)
        ids_BT[beyond_BT] = BOS_ID
        # One document a row.
        row_starts = np.arange(0, ids_BT.size + 1, len(places_T), dtype=np.int32)
        starts = to_device(row_starts, self.device)
        inputs_BT = to_device(ids_BT, self.device)
        # Or torch recompiles for every number of documents and every length. "Maybe": a single row stays one.
        torch._dynamo.mark_dynamic(starts, 0)
        torch._dynamo.maybe_mark_dynamic(inputs_BT, (0, 1))
        visits = adapters.of_visits(chunk.rows)
        # All windows have the rotary base of the longest ones, so that adapters learn of one geometry.
        longest = self.config.eval_length
        hidden_BTD = self.forward(self.model, inputs_BT, starts, True, None, visits, longest)
        return hidden_BTD[:, chunk.start - chunk.first :]

    @torch.no_grad()
    def record(self, batch: np.ndarray, chunk: Chunk, hidden_BCD: Tensor, adapters: DocumentAdapters) -> None:
        """Write the scores of a chunk into the ledger."""
        begins_B1 = self.begins[batch[: chunk.rows], None]
        targets_BC = begins_B1 + np.arange(chunk.start, chunk.stop)
        tokens_BC = self.tokens[np.minimum(targets_BC + 1, len(self.tokens) - 1)]
        nats_BC = self.nats(hidden_BCD, tokens_BC, adapters).double().cpu().numpy()
        for document, nats_C in zip(batch[: chunk.rows], nats_BC, strict=True):
            stop = min(chunk.stop, self.lengths[document])
            self.ledger.record(int(self.begins[document]) + chunk.start, nats_C[: stop - chunk.start])

    @torch.enable_grad()
    def learn(self, batch: np.ndarray, chunk: Chunk, hidden_BCD: Tensor, adapters: DocumentAdapters) -> None:
        """One step of the adapters of the documents that go on, on their chunk as the ledger gives it out."""
        learning = batch[: chunk.learning]
        chunks = []
        for begin in self.begins[learning]:
            chunks.append(self.ledger.scored_tokens(begin + chunk.start + 1, begin + chunk.stop + 1))
        nats_BC = self.nats(hidden_BCD[: chunk.learning], np.stack(chunks), adapters)
        adapters.adamw.zero_grad()
        nats_BC.mean(1).sum().backward()
        adapters.adamw.step()

    def nats(self, hidden_BCD: Tensor, targets_BC: np.ndarray, adapters: DocumentAdapters) -> Tensor:
        """Nats (B, C) of targets; rows are those of the first documents."""
        targets_N = to_device(targets_BC.astype(np.int64).flatten(), self.device)
        added_NV = adapters.added_logits(hidden_BCD)
        return self.model.loss_per_token(hidden_BCD.flatten(0, 1), targets_N, added_NV).view(targets_BC.shape)

    def exchange(self) -> None:
        """Give all ranks the scores of all; all ranks call it together.

        Raises ValueError for a target that no rank has scored, or more than one.
        """
        nats_N = self.ledger.nats
        scored_N = ~np.isnan(nats_N)
        both_2N = torch.from_numpy(np.stack([np.nan_to_num(nats_N), scored_N])).to(self.device)
        self.machine.add_up(both_2N)
        everyones_N, ranks_N = both_2N.cpu().numpy()
        wrong_N = ranks_N != 1
        if wrong_N.any():
            target = int(wrong_N.argmax())
            raise ValueError(f"target {target} was scored by {ranks_N[target]:.0f} ranks: expected one")
        for begin, length in zip(self.begins, self.lengths, strict=True):
            if np.isnan(self.ledger.nats[begin]):
                self.ledger.record(int(begin), everyones_N[begin : begin + length])


def score_documents(
    model: GPT, tokens: Any, config: Config, progress: ProgressReport | None = None
) -> Ledger:
    """Test-time training of each document by itself (PRs #1530, #1667): score a chunk, then take one step.

    Only low-rank adapters learn. Nothing passes from one document to another, so that the order in which they
    are scored is of no account: the sum of the nats is that of the order of the text. Nothing is learnt from
    the last chunk of a document.
    """
    ledger = Ledger(tokens)
    frozen = copy.deepcopy(model).requires_grad_(False)
    scorer = DocumentScorer(frozen, tokens, config, ledger)
    batches = scorer.batches_of_rank()
    if progress:
        progress.targets = sum(int(scorer.lengths[batch].sum()) for batch in batches)
        scorer.after_chunk = functools.partial(progress.still_at_work, ledger)
    for number, batch in enumerate(batches):
        scorer.score(batch)
        if progress:
            progress(ledger, number, len(batches))
    # Of several ranks each knows its own documents only, until now.
    if frozen.machine.world_size > 1:
        scorer.exchange()
        if progress:
            progress(ledger, 0, 1)
    return ledger


def compile_evaluation(model: GPT, config: Config, tokens: np.ndarray) -> None:
    """Compile all that `evaluate` will run, before its clock; all ranks call it together.

    What is read here is made up, and has of the text only where its documents begin: that decides shapes.
    """
    if not model.machine.compiled:
        return
    wordless = np.where(tokens == BOS_ID, BOS_ID, BOS_ID + 1).astype(tokens.dtype)
    # Every rank compiles for itself, so each scores as if it were alone: one batch does not go round.
    alone = copy.deepcopy(model)
    alone.machine = replace(model.machine, rank=0, world_size=1)
    scorers = [unlearned_scorer(alone, wordless, config, config.eval_length)]
    if config.eval_stride:
        scorers.append(unlearned_scorer(alone, wordless, config, config.eval_stride))
    if config.ttt_enabled and config.ttt_mode == "lora":
        # Documents of 4, 2, 1 and 1 chunks, in pairs: with gradients and without, one row and several.
        half = max(1, config.eval_length // 2)
        made_up = np.full(8 * half + 1, BOS_ID + 1, np.uint16)
        made_up[[0, 4 * half, 6 * half, 7 * half]] = BOS_ID
        in_pairs = replace(config, ttt_chunk_size=half, ttt_early_chunks="", ttt_batch_size=2)
        score_documents(alone, made_up, in_pairs)
    elif config.ttt_enabled:
        learner = copy.deepcopy(model)
        made_up = np.full(config.ttt_chunk_tokens + 1, BOS_ID + 1, np.uint16)
        sgd = torch.optim.SGD(learner.parameters(), lr=0.0, momentum=config.ttt_momentum)
        # All ranks together, as they share out its batches; then each alone again.
        learn(learner, sgd, made_up, replace(config, ttt_epochs=1))
        learner.machine = alone.machine
        scorers.append(
            WindowScorer(learner, wordless, config, config.eval_stride, config.ttt_chunk_tokens, True))
    for scorer in scorers:
        scorer.score(scorer.chunks[0][:1])


def evaluate(model: GPT, config: Config, run: Run, validation: Validation, form: str) -> dict[str, Score]:
    """All scores of reloaded weights, each with its final line. form: what it calls them, like int6."""
    scorers: dict[str, Callable[..., Ledger]] = {"roundtrip": score_roundtrip}
    if config.eval_stride:
        scorers["sliding_window"] = score_sliding
    if config.ttt_enabled:
        scorers["legal_ttt"] = score_ttt

    # Each score starts from the same reloaded weights, and has its own clock.
    scores = {}
    for name, scorer in scorers.items():
        phase = f"eval_{name}"
        with run.phase(phase):
            report = ProgressReport(run, name, config.val_progress_log_every, config.val_batch_size)
            ledger = scorer(model, validation.tokens, config, report)
        score = ledger.score(validation.bytes_total)
        seconds = run.phases[phase]
        label = name if name == "legal_ttt" else f"final_{form}_{name}"
        run.log(f"{label} val_loss:{score.nats:.4f} val_bpb:{score.bits_per_byte:.4f} "
                f"eval_time:{1e3 * seconds:.0f}ms{validation.mark}")
        run.log(
            f"{label}_exact val_loss:{score.nats:.8f} val_bpb:{score.bits_per_byte:.8f} "
            f"scored_tokens:{score.scored_tokens} val_bytes:{score.bytes}{validation.mark}",
            "final", name=f"{label}_exact", eval_seconds=seconds, **score._asdict(),
        )  # fmt: skip
        scores[name] = score
    return scores


# ============================================================================================================
# TRELLIS — codes on two grids, half a step apart; on which one a weight is follows from the codes before it.
# ============================================================================================================

# Weights that are rounded one by one have errors that fill a cube, of a mean square of step² / 12. A ball of
# the same volume has 1.53 dB less, and no code of the same entropy can gain more: 0.25 bits a weight.
#
# Trellis-coded quantization gets two thirds of that. A code k stands for k steps, or for k and a half: its
# shift is 0 or 1 half steps. The shift is not stored. It follows from the codes of the rows before:
#
#     next shift = parity of the code ^ shift one row before ^ shift two rows before
#
# So a code costs what one of a whole step costs, but has a say in the grids of the rows to come. Of all
# sequences of codes for a column, the one of least squared error leads to the grids that suit its weights.
# The shifts of three rows are a state, and dynamic programming finds that sequence in the trellis of the
# eight states.
# (TCQ: Marcellin and Fischer 1990, with an entropy coder: Fischer and Wang 1992; this code of eight states is
# Ungerboeck's, 1982; on weights, without an entropy coder: Tseng et al., arXiv 2406.11235)

# Rows after which all shifts are 0 again: blocks of rows are searched side by side, which costs 0.01 bits.
TRELLIS_ROWS = 128


class Trellis:
    """The shifts of an array that is read row by row; every column has a state of its own."""

    def __init__(self, columns: int) -> None:
        self.rows = 0
        # Of the next row, of the one before it and of the one before that.
        self.shifts_3C = np.zeros((3, columns), np.int64)

    def follow(self, codes_C: np.ndarray) -> None:
        """Take in the codes of the next row."""
        shift_C, before_C, before_that_C = self.shifts_3C
        next_shift_C = (codes_C & 1) ^ before_C ^ before_that_C
        self.shifts_3C = np.stack([next_shift_C, shift_C, before_C])
        self.rows += 1
        if self.rows % TRELLIS_ROWS == 0:
            self.shifts_3C[:] = 0


def half_steps(codes_RC: np.ndarray) -> np.ndarray:
    """What codes stand for, in half steps: 2 · code + shift, int16."""
    trellis = Trellis(codes_RC.shape[1])
    halves_RC = 2 * codes_RC.astype(np.int16)
    for codes_C, halves_C in zip(codes_RC, halves_RC, strict=True):
        halves_C += trellis.shifts_3C[0]
        trellis.follow(codes_C)
    return halves_RC


# A branch of the trellis goes from the state of a row (its shift, the one before, the one before that) to the
# next state (next shift, shift, shift before). The code has the parity that leads to the next shift.
NEXT, SHIFT, BEFORE, BEFORE_THAT = np.indices((2, 2, 2, 2))
PARITY = NEXT ^ BEFORE ^ BEFORE_THAT


def nearest_path(values_RC: np.ndarray, levels: float) -> np.ndarray:
    """The half steps (R, C), int16, nearest to each column of `values_RC`, which are in steps.

    Of all that `half_steps` can give for codes in ±levels and up to TRELLIS_ROWS rows, those of least squared
    error (Viterbi 1967).
    """
    rows, columns = values_RC.shape
    halves_22RC = nearest_halves(values_RC, levels)
    errors_22RC = np.square(values_RC - 0.5 * halves_22RC)

    # Forward: the least error of all paths to each state, and which of two states the best one came from.
    costs_222C = np.full((2, 2, 2, columns), np.inf, np.float32)
    costs_222C[0, 0, 0] = 0.0
    came_from_R222C = np.empty((rows, 2, 2, 2, columns), bool)
    for row in range(rows):
        branches_2222C = costs_222C + errors_22RC[SHIFT, PARITY, row]
        from_0 = branches_2222C[:, :, :, 0]
        from_1 = branches_2222C[:, :, :, 1]
        np.less(from_1, from_0, out=came_from_R222C[row])
        costs_222C = np.minimum(from_0, from_1)

    # Backward: from the best state at the end, along the branches that led to it.
    path_RC = np.empty((rows, columns), np.int16)
    column = np.arange(columns)
    best_C = costs_222C.reshape(8, columns).argmin(0)
    next_shift, shift, before = np.unravel_index(best_C, (2, 2, 2))
    for row in reversed(range(rows)):
        before_that = came_from_R222C[row, next_shift, shift, before, column].astype(np.int64)
        parity = next_shift ^ before ^ before_that
        path_RC[row] = halves_22RC[shift, parity, row, column]
        next_shift, shift, before = shift, before, before_that
    return path_RC


def nearest_halves(values_RC: np.ndarray, levels: float) -> np.ndarray:
    """For each shift and each parity of a code in ±levels: the nearest half steps (2, 2, R, C), float32."""
    halves_22RC = np.empty((2, 2, *values_RC.shape), np.float32)
    for shift in range(2):
        for parity in range(2):
            # Codes of one parity are two steps apart; the largest is levels, rounded, or the one below.
            largest = round(levels)
            largest -= (largest + parity) % 2
            codes_RC = 2 * np.rint((values_RC - shift / 2 - parity) / 2) + parity
            halves_22RC[shift, parity] = 2 * np.clip(codes_RC, -largest, largest) + shift
    return halves_22RC


def nearest_on_trellis(values_NR: Tensor, levels: float) -> Tensor:
    """The steps (N, R), whole ones and halves, that a trellis along R can give nearest to values in steps."""
    rows = values_NR.size(1)
    length = min(rows, TRELLIS_ROWS)
    # Zeros fill the last block of rows, and are dropped after the search.
    filled_NR = F.pad(values_NR, (0, -rows % length))
    # Each block is a column of its own: no path goes from one into the next.
    blocks_RC = filled_NR.reshape(-1, length).T.cpu().numpy()
    path_CR = torch.from_numpy(nearest_path(blocks_RC, levels).T.astype(np.float32))
    return path_CR.to(values_NR.device).reshape(filled_NR.shape)[:, :rows] / 2


def nearest_code(values: Tensor, levels: float) -> Tensor:
    """The whole step in ±levels nearest to each of the values in steps, of any shape: plain rounding."""
    return values.clamp(-levels, levels).round()


# ============================================================================================================
# QUANTIZE — weights to integers: GPTQ, which makes up for each rounding error in the weights still to come.
# ============================================================================================================

Hessians = dict[tuple[str, int], Tensor]  # (what matrices multiply, layer) -> (C, C) fp32


@torch.no_grad()
def collect_hessians(model: GPT, batches: Iterable[Batch], machine: Machine) -> Hessians:
    """Sums of x xᵀ over the tokens of all ranks' training `batches`. All ranks call it, with equally many."""
    sums: Hessians = {}

    # Every visit of a looped layer adds to the same sum: its matrices serve them all.
    def observe(site: str, layer: int, x: Tensor) -> None:
        x_NC = x.reshape(-1, x.size(-1)).float()
        product_CC = x_NC.T @ x_NC
        if (site, layer) in sums:
            product_CC += sums[site, layer]
        sums[site, layer] = product_CC

    for batch in batches:
        model(batch.inputs_BT, batch.starts, observe=observe)
    for total in sums.values():
        machine.add_up(total)
    return sums


COARSEST_STEP = 2.0  # standard deviations of a row; two thirds of the codes are zero then
# Codes of what is no matrix: 8 bits, and a step that fits the largest weight into 127 codes even where
# rounding the exponent made the scale 2 ** (1 / 16) smaller.
SMALL_STEP = 1 / 120
MAX_CODE = 127


def step_and_levels(parameter: Parameter, config: Config, multiplier: Any) -> tuple[Any, Any]:
    """Step of a parameter's codes in spreads of a row, and the number of steps from zero to the clip.

    A spread is the standard deviation of a row of a matrix, or the largest weight of a row of a small tensor.
    multiplier: a factor of the configured step, or an array of them. No step is finer than that of 8 bits,
    none coarser than COARSEST_STEP unless it is configured so. What is no matrix always gets 8 bits.
    """
    if not parameter.role:
        return SMALL_STEP, float(MAX_CODE)
    # As published: a clip and a number of bits; rate control then scales the step.
    clip = getattr(config, f"{parameter.role}_clip_sigmas")
    bits = config.embed_bits if parameter.role == "embed" else config.matrix_bits
    configured = clip / (2 ** (bits - 1) - 1)
    step = np.clip(multiplier * configured, clip / MAX_CODE, max(configured, COARSEST_STEP))
    return step, clip / step


class QuantizedWeights(NamedTuple):
    """A parameter as a bank of N matrices (R, C), in integers."""

    codes: np.ndarray  # (R, N * C) int8, in steps; along a trellis int16, in half steps
    exponents: np.ndarray  # (R, N) int8: the scale of each row, in eighths of an octave


def bank_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A parameter's shape as matrices, rows and columns; fewer axes: one matrix, perhaps of one row."""
    matrices, rows, columns = (1, 1, *shape)[-3:]
    return matrices, rows, columns


def array_shapes(parameter: Parameter) -> list[tuple[int, int]]:
    """Shapes of the codes and of the exponents: what a reader must know before it can decode them."""
    matrices, rows, columns = bank_shape(parameter.shape)
    return [(rows, matrices * columns), (rows, matrices)]


def column_shapes(table: dict[str, Parameter]) -> list[tuple[int, int]]:
    """Shapes of the exponents of columns (N, C), of each parameter that can have them."""
    shapes = []
    for parameter in table.values():
        if parameter.role:
            matrices, _, columns = bank_shape(parameter.shape)
            shapes.append((matrices, columns))
    return shapes


# Steps of columns are at most eight times finer or coarser than those of their rows; in eighths of an octave.
COLUMN_EXPONENT_MAX = 24


def scales_of(exponents: Tensor) -> Tensor:
    """The scales that exponents stand for; fp16 has too few digits to show how machines round `exp2`."""
    return torch.exp2(exponents / 8).half().float()


# How often a Hessian without an inverse is tried: as asked for, then each time with ten times the damping.
DAMPING_TRIES = 4


def inverse_factor(h_NCC: Tensor, ridge_N11: Tensor) -> Tensor:
    """Upper Cholesky factors, fp32, of the inverses of Hessians plus a ridge. Raises LinAlgError."""
    identity_CC = torch.eye(h_NCC.size(1), device=h_NCC.device)
    lower_NCC = torch.linalg.cholesky(h_NCC + ridge_N11 * identity_CC)
    inverse_NCC = torch.cholesky_inverse(lower_NCC)
    return torch.linalg.cholesky(inverse_NCC, upper=True).float()


class Quantizer:
    """GPTQ of one parameter (Frantar et al., arXiv 2210.17323; PR #1394).

    1. Order the columns by their Hessian diagonal, largest first.
    2. Factor the inverse of the damped Hessian; with `column_steps`, give every column a step of its own.
    3. `quantize`: round column by column; spread each rounding error over the columns still to come.

    Steps 1 and 2 are done once, step 3 for each step size that is tried. A parameter without any Hessian is
    rounded to nearest at once. Raises ArtifactError where weights or Hessians are not finite, or a Hessian
    has no inverse with any of DAMPING_TRIES.
    """

    def __init__(
        self,
        name: str,
        weights: Tensor,
        parameter: Parameter,
        hessians: Hessians,
        damping: float,
        column_steps: float = 0.0,
    ) -> None:
        """name: in messages. hessians: as `collect_hessians` gives them. damping, column_steps: settings."""
        self.weights_NRC = weights.detach().view(bank_shape(parameter.shape))
        # The unit of a step: a row's standard deviation; in small tensors its largest absolute weight.
        if parameter.role:
            self.spreads_NR = self.weights_NRC.std(dim=2)
        else:
            self.spreads_NR = self.weights_NRC.abs().amax(dim=2)
        self.damping = damping  # more, where a Hessian needs it
        # How much coarser the steps of a column are than those of the rows, in eighths of an octave.
        self.column_exponents_NC: Tensor | None = None
        if column_steps > 0 and parameter.role:
            self.column_exponents_NC = torch.zeros_like(self.weights_NRC[:, 0], dtype=torch.int8)
        self.rounded = not any(site in parameter.inputs for site, _ in hessians)  # to nearest, at once
        if self.rounded:
            if not self.weights_NRC.isfinite().all():
                raise ArtifactError(f"{name} is not finite: nothing written; resume from a checkpoint")
            return
        h_NCC = self._hessians(parameter.inputs, hessians)
        if not (self.weights_NRC.isfinite().all() and h_NCC.isfinite().all()):
            raise ArtifactError(
                f"{name} or its inputs are not finite: nothing written; resume from a checkpoint")

        # Columns whose inputs are largest go first: their errors have the most columns to make up for them.
        diagonal_NC = h_NCC.diagonal(dim1=1, dim2=2)
        self.order_NC = diagonal_NC.argsort(dim=1, descending=True, stable=True)
        h_NCC = h_NCC.take_along_dim(self.order_NC[:, :, None], 1).take_along_dim(self.order_NC[:, None], 2)

        # A share of the mean diagonal is added, so that every Hessian has an inverse. Where rounding has left
        # one without, a larger share costs a little precision, and giving up would cost the training.
        mean_N11 = diagonal_NC.mean(dim=1)[:, None, None].clamp(min=1e-30)
        for attempt in range(1, DAMPING_TRIES + 1):
            try:
                self.upper_NCC = inverse_factor(h_NCC, self.damping * mean_N11)
                break
            except torch.linalg.LinAlgError as error:
                if attempt == DAMPING_TRIES:
                    raise ArtifactError(f"{name}: no inverse of its Hessian with damping up to "
                                        f"{self.damping:g}; set a larger GPTQ_DAMPING than {damping:g}"
                                        ) from error
                self.damping *= 10

        if self.column_exponents_NC is not None:
            self.column_exponents_NC = self._even_out(column_steps)

        # A column whose input was always zero changes nothing: zeros cost least to code.
        used_NRC = self.weights_NRC.masked_fill((diagonal_NC == 0)[:, None], 0.0)
        self.used_NRC = used_NRC.take_along_dim(self.order_NC[:, None], 2)

    def _hessians(self, inputs: tuple[str, ...], hessians: Hessians) -> Tensor:
        """The Hessian of each matrix (N, C, C), float64; the identity where none was collected."""
        matrices = self.weights_NRC.size(0)
        identity_CC = torch.eye(self.weights_NRC.size(2), device=self.weights_NRC.device)
        found = []
        for matrix in range(matrices):
            hessian = None
            if inputs:
                # With two inputs the first half of the bank has the first, the second half the second.
                layers = matrices // len(inputs)
                hessian = hessians.get((inputs[matrix // layers], matrix % layers))
            found.append(identity_CC if hessian is None else hessian)
        return torch.stack(found).double()

    def _even_out(self, column_steps: float) -> Tensor:
        """Column exponents (N, C) with which a bit brings as much in one column as in another.

        GPTQ's loss is the sum of squares of error / U, with U the column's diagonal entry of the factor: with
        one step, columns of small U make most of it. The same number of bits loses least where all columns
        lose alike, with steps in proportion to U (WaterSIC: Lifar et al., arXiv 2603.04956). A smaller power
        of U trusts Hessians of few tokens less.
        """
        octaves_NC = self.upper_NCC.diagonal(dim1=1, dim2=2).log2()
        # Only ratios matter: rate control sets the mean.
        octaves_NC = column_steps * (octaves_NC - octaves_NC.mean(dim=1, keepdim=True))
        exponents_NC = (8 * octaves_NC).round().clamp(-COLUMN_EXPONENT_MAX, COLUMN_EXPONENT_MAX).char()
        return exponents_NC.take_along_dim(self.order_NC.argsort(dim=1), 1)

    def quantize(self, step: float, levels: float, trellis: bool = False) -> QuantizedWeights:
        """Codes of the weights, in ±levels steps; with column exponents in ±MAX_CODE.

        step, levels: as by `step_and_levels`. trellis: along the rows of a column codes follow a trellis;
        else each weight is rounded by itself.
        """
        nearest = nearest_on_trellis if trellis else nearest_code
        # A scale is an eighth of an octave: one byte a row, and no table of scales.
        exponents_NR = (8 * (self.spreads_NR * step).clamp(min=1e-9).log2()).round().clamp(-127, 127).char()
        scales_NR = scales_of(exponents_NR)
        if self.rounded:
            values_NCR = (self.weights_NRC / scales_NR[:, :, None]).mT
            steps_NRC = nearest(values_NCR.flatten(0, 1), levels).view(values_NCR.shape).mT
        else:
            steps_NRC = self._compensate(scales_NR, nearest, levels)
        codes_NRC = (2 * steps_NRC).short() if trellis else steps_NRC.char()
        return QuantizedWeights(
            codes_NRC.transpose(0, 1).flatten(1).cpu().numpy(),
            exponents_NR.T.cpu().numpy(),
        )

    def _compensate(
        self, row_scales_NR: Tensor, nearest: Callable[[Tensor, float], Tensor], levels: float
    ) -> Tensor:
        """Steps (N, R, C), column by column: those to come make up for the errors of those before."""
        work_NRC = self.used_NRC.clone()
        if self.column_exponents_NC is not None:
            column_scales_NC = scales_of(self.column_exponents_NC.take_along_dim(self.order_NC, 1))
            levels = MAX_CODE  # finer steps need more of them
        for column in range(work_NRC.size(2)):
            scales_NR = row_scales_NR
            if self.column_exponents_NC is not None:
                scales_NR = row_scales_NR * column_scales_NC[:, column, None]
            values_NR = work_NRC[:, :, column]
            steps_NR = nearest(values_NR / scales_NR, levels)
            errors_NR = (values_NR - steps_NR * scales_NR) / self.upper_NCC[:, column, column, None]
            # The columns still to come take the error up, each as much as it can make up for.
            shares_N1C = self.upper_NCC[:, column, None, column:]
            work_NRC[:, :, column:].baddbmm_(errors_NR[:, :, None], shares_N1C, alpha=-1)
            work_NRC[:, :, column] = steps_NR
        # Back to the order in which the model has its columns.
        back_NC = self.order_NC.argsort(dim=1)
        return work_NRC.take_along_dim(back_NC[:, None], 2)


def restore_weights(
    quantized: QuantizedWeights, shape: tuple[int, ...], column_exponents: np.ndarray | None = None
) -> Tensor:
    """The weights (`shape`) that codes and exponents stand for, fp32, on the CPU.

    column_exponents: (N, C) int8, as `Quantizer` has them; None: all columns have the steps of their row.
    """
    matrices, rows, columns = bank_shape(shape)
    scales_RN1 = scales_of(torch.from_numpy(quantized.exponents)[:, :, None])
    if quantized.codes.dtype == np.int16:
        scales_RN1 /= 2
    weights_RNC = torch.from_numpy(quantized.codes).view(rows, matrices, columns) * scales_RN1
    if column_exponents is not None:
        weights_RNC *= scales_of(torch.from_numpy(column_exponents))
    return weights_RNC.transpose(0, 1).reshape(shape)


# ============================================================================================================
# CODER — integers to bytes: rANS under a model that learns as it goes; knows nothing of networks.
# ============================================================================================================

# A row's frequencies come from the rows before it, in one table per class of columns: no table is stored,
# none can be forged, and columns of different spread do not share one. Integers, and float operations that
# IEEE 754 rounds exactly, give the same bytes on every machine. (rANS: Duda, arXiv 1311.2540)
#
# Along a trellis each class has a second table, for codes that stand for half a step more: the shift that the
# codes before led to is known to both sides, and costs nothing.
SLOTS = 1 << 15  # of a table; a lane's state has 17 to 32 bits, and moves in words of 16
# Borders of the classes of columns, in 256ths of the mean |code| of a column: four to an octave.
CLASS_EDGES = np.array([(4 + quarter) << octave for octave in range(12) for quarter in range(4)])
ALONG_TRELLIS = 128  # in the byte of an array's peak, which needs seven bits


class SymbolModel:
    """How probable each symbol of an array is, learned row by row, alike in the encoder and in the decoder.

    A column belongs to a class, by the mean |code| of its rows so far; every class has a table of whole
    frequencies that sum to SLOTS. The tables lie behind one another in one array, so that a symbol of table
    t is entry `t * size + symbol`, and its slots begin at `starts[entry]`. A symbol is a code plus the peak.
    """

    def __init__(self, columns: int, peak: int, along_trellis: bool) -> None:
        self.trellis = Trellis(columns) if along_trellis else None
        self.peak = peak
        self.size = 2 * peak + 1
        # A first guess for about the middle of each class, with heavier tails than a Gaussian: Student's t
        # with seven degrees of freedom, 64 at its top; 1.5 keeps the narrowest class from being too sure.
        # Products only: powers round differently on different machines, and then decoders would disagree.
        means = np.append(2.0, CLASS_EDGES * 1.1)[:, None] / 256
        tables = []
        shifts = (0.0, 0.5) if along_trellis else (0.0,)
        for shift in shifts:
            values = np.arange(-peak, peak + 1) + shift
            bell = 1.0 / (1.0 + values**2 / (6.0 * means * means + 1.5))
            tables.append(np.floor(64.0 * bell * bell * bell * bell))
        self.counts = np.concatenate(tables).astype(np.int64)
        # As if two rows had come before, with codes of a sixth of the peak.
        self.rows = 2
        self.sums_256ths = np.full(columns, 2 * 256 * peak // 6)

    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For the next row: first entry of each column's table; frequency and first slot of every entry."""
        # No symbol is impossible: each has one slot; the others are shared out by how often each was seen.
        totals = self.counts.sum(1, keepdims=True)
        frequencies = 1 + self.counts * (SLOTS - self.size) // totals
        # The slots that rounding left go to the most frequent symbol of each table.
        unused = SLOTS - frequencies.sum(1)
        most_frequent = self.counts.argmax(1)
        frequencies[range(len(frequencies)), most_frequent] += unused
        classes = np.searchsorted(CLASS_EDGES, self.sums_256ths // self.rows, side="right")
        if self.trellis:
            classes += self.trellis.shifts_3C[0] * (len(CLASS_EDGES) + 1)
        return classes * self.size, frequencies.ravel(), frequencies.cumsum() - frequencies.ravel()

    def learn(self, first_entries: np.ndarray, symbols: np.ndarray) -> None:
        """Take in the row that was just coded, by the tables that begin at `first_entries`."""
        # Counts only grow: old rows count as much as new ones, as weights have no order in time.
        seen = np.bincount(first_entries + symbols, minlength=self.counts.size)
        self.counts += seen.reshape(self.counts.shape)
        halves = 2 * (symbols - self.peak)
        if self.trellis:
            halves += self.trellis.shifts_3C[0]
            self.trellis.follow(symbols - self.peak)
        self.sums_256ths += 128 * np.abs(halves)  # a half step is 128 of them
        self.rows += 1


def encode(arrays: list[np.ndarray]) -> bytes:
    """Bytes of integer arrays (rows, columns): int8 codes in ±MAX_CODE, or int16 `half_steps` of such codes.

    Symbols go to lanes in turn, each with a state of its own, so that numpy codes many at once; a lane costs
    four bytes. The bytes: peak of each array, plus ALONG_TRELLIS where it has half steps; number of lanes,
    states, words in the order they are read.
    """
    lanes = min(16 + sum(array.size for array in arrays) // 16_384, 1024)

    # Forward: what the decoder will know of each symbol when it gets there.
    peaks = b""
    coded = []
    for array in arrays:
        codes = array.astype(np.int64)
        along_trellis = array.dtype == np.int16
        if along_trellis:
            codes >>= 1  # the shift goes: it follows from the codes before
            assert np.array_equal(half_steps(codes), array), "these half steps are on no trellis"
        peak = int(np.abs(codes).max(initial=0))
        peaks += bytes([peak + ALONG_TRELLIS if along_trellis else peak])
        model = SymbolModel(array.shape[1], peak, along_trellis)
        for symbols in codes + peak:
            first_entries, frequencies, starts = model.tables()
            entries = first_entries + symbols
            # 16 bits each: all of them wait until the last symbol is known.
            in_table = (starts % SLOTS).astype(np.uint16)
            coded.append((frequencies.astype(np.uint16)[entries], in_table[entries]))
            model.learn(first_entries, symbols)

    # Backward: rANS gives back last what it took in first.
    states = np.full(lanes, 1 << 16, np.int64)
    words = []
    for row_frequencies, row_starts in reversed(coded):
        wide_frequencies = row_frequencies.astype(np.int64)
        for left in reversed(range(0, len(row_starts), lanes)):
            frequencies = wide_frequencies[left : left + lanes]
            starts = row_starts[left : left + lanes]
            state = states[: len(starts)]
            # Coding multiplies a state by SLOTS / frequency: one that would outgrow 32 bits first gives its
            # low word away.
            full = state >> 17 >= frequencies
            words.append(state[full].astype("<u2").tobytes())
            state >>= np.where(full, 16, 0)
            # Floats divide several times as fast, and here exactly: a quotient of 32 bits that is no whole
            # number is at least 2**-15 away from one.
            quotients = (state / frequencies).astype(np.int64)
            state += quotients * (SLOTS - frequencies) + starts
    head = peaks + lanes.to_bytes(2, "little") + states.astype("<u4").tobytes()
    return b"".join([head, *reversed(words)])


def decode(data: bytes, shapes: list[tuple[int, int]]) -> list[np.ndarray]:
    """Inverse of `encode`, for arrays of these shapes (rows, columns): int8 codes, or int16 half steps.

    ValueError where the data end early, late, or in the wrong state.
    """
    peaks = data[: len(shapes)]
    rest = data[len(shapes) :]
    lanes = int.from_bytes(rest[:2], "little")
    states = np.frombuffer(rest, "<u4", lanes, 2).astype(np.int64)
    words = np.frombuffer(rest[2 + 4 * lanes :], "<u2").astype(np.int64)
    used = 0  # words
    arrays = []
    for (rows, columns), peak_byte in zip(shapes, peaks, strict=True):
        along_trellis = peak_byte >= ALONG_TRELLIS
        peak = peak_byte % ALONG_TRELLIS
        array = np.empty((rows, columns), np.int64)
        model = SymbolModel(columns, peak, along_trellis)
        for symbols in array:
            first_entries, frequencies, starts = model.tables()
            for left in range(0, columns, lanes):
                first = first_entries[left : left + lanes]
                state = states[: len(first)]
                # The low bits of a state name a slot of the column's table, and so the symbol it belongs to.
                slots = starts[first] + state % SLOTS
                entries = starts.searchsorted(slots, side="right") - 1
                symbols[left : left + lanes] = entries - first
                # Back to what the states were before the encoder took these symbols in.
                state[:] = frequencies[entries] * (state // SLOTS) + slots - starts[entries]
                low = np.flatnonzero(state < 1 << 16)
                state[low] = (state[low] << 16) + words[used : used + len(low)]
                used += len(low)
            model.learn(first_entries, symbols)
        codes = (array - peak).astype(np.int8)
        arrays.append(half_steps(codes) if along_trellis else codes)
    if used != len(words) or (states != 1 << 16).any():
        raise ValueError("the words do not end where the arrays end")
    return arrays


# ============================================================================================================
# ARTIFACT — code and file together fill ARTIFACT_BYTES_MAX; what is scored is what the file gives back.
# ============================================================================================================

# Factors of the configured steps that rate control tries; one notch changes a file of 36 M weights by 2 kB.
MULTIPLIERS = 2.0 ** np.arange(-7, 12, 1 / 2048)


def expected_bytes(config: Config, multiplier: Any) -> Any:
    """Bytes of the file, about: a thousand for the head, and ½·log2(1 + 2πe/step²) bits per weight.

    That is about the entropy of a Gaussian value that is rounded with this step, in standard deviations.
    multiplier: as in `step_and_levels`; an array of them gives an array of sizes.
    """
    total = 1000.0
    for parameter in parameter_table(config).values():
        step, _ = step_and_levels(parameter, config, multiplier)
        bits = 0.5 * np.log2(1 + 2 * math.pi * math.e / step**2)
        total += math.prod(parameter.shape) * bits / 8
    return total


def fill_budget(config: Config, budget: int, make_file: Callable[[float], bytes]) -> tuple[bytes, str]:
    """The file of the finest steps found that fits `budget` bytes, and a note about the search for the log.

    budget: what ARTIFACT_BYTES_MAX leaves beside the code. make_file: makes the file for a factor of all
    steps. The straight line through the last two passes (at first through zero), expected against true bytes,
    leads to the next factor, between those known to be too fine and too coarse. Once a file fits, the search
    ends after ten passes, or when at most 0.05 % of ARTIFACT_BYTES_MAX is unused. Raises ArtifactError if
    nothing fits.
    """
    multipliers = MULTIPLIERS if config.rate_control else np.ones(1)
    expected = expected_bytes(config, multipliers)  # falls from the finest to the coarsest
    enough = budget - 5e-4 * config.artifact_bytes_max
    aim = (budget + enough) / 2
    finest = 0  # the first factor that is not known to be too fine
    coarsest = len(multipliers) - 1  # the last one that is not known to fit
    best = b""
    best_multiplier = 1.0
    passes = 0
    wanted = aim  # in expected bytes
    expected_before = 0.0
    true_before = 0
    while finest <= coarsest and (not best or (len(best) < enough and passes < 10)):
        # Never twice the same, and never outside what is still open.
        at = int(np.clip(np.searchsorted(-expected, -wanted), finest, coarsest))
        data = make_file(multipliers[at])
        passes += 1
        # Sizes are noisy: two passes close to each other may suggest any slope, so it is bounded.
        slope = (expected[at] - expected_before) / ((len(data) - true_before) or 1)
        wanted = expected[at] + (aim - len(data)) * np.clip(slope, 0.2, 2.0)
        expected_before = expected[at]
        true_before = len(data)
        if len(data) > budget:
            finest = at + 1
        else:
            coarsest = at - 1
            best = data
            best_multiplier = multipliers[at]
    if not best:
        advice = "lower MODEL_DIM" if config.rate_control else "set RATE_CONTROL=1 or fewer bits"
        if budget <= 0:
            advice = "raise it, for the code alone takes as much"
        raise ArtifactError(f"a file of {len(data)} bytes, expected {budget} at most beside the code: "
                            f"{len(data) - budget} bytes above ARTIFACT_BYTES_MAX; {advice}")
    note = ""
    if best_multiplier == MULTIPLIERS[0] and len(best) < enough:
        note = " unused: 8 bits cannot fill it"
    return best, f"step_multiplier:{best_multiplier:.4f} passes:{passes}{note}"


def estimate_artifact(config: Config, budget: int) -> str:
    """How `budget` bytes will be filled, by files of the expected size. ArtifactError if none can fit."""

    def make_file(multiplier: float) -> bytes:
        size_bytes = float(expected_bytes(config, multiplier))
        # Trained weights are no perfect Gaussians. Without rate control, which would make up for it, an
        # artifact is refused before training only where it is expected to be 5 % too large.
        if not config.rate_control:
            size_bytes /= 1.05
        return bytes(round(size_bytes))

    _, estimate = fill_budget(config, budget, make_file)
    return estimate


MAGIC = b"\x89PGA\r\n\0\3"  # the last byte is the version
# Magic, size of the section "config", CRC-32 of it and of the section "weights", which follow.
HEAD = struct.Struct("<8s3I")


def write_artifact(
    path: Path, model: GPT, config: Config, hessians: Hessians, tokenizer_sha256: str, budget: int
) -> str:
    """Quantize, code and write `model` as a file of at most `budget` bytes; returns a line for the log.

    With RATE_CONTROL it fills them; without, bits and clips are as given. hessians: of `collect_hessians`;
    none: all weights are rounded to nearest. tokenizer_sha256: is stored, for who scores the file. Raises
    ArtifactError when it does not fit, ConfigError when it cannot be written; then there is no file.
    """
    table = parameter_table(config)
    quantizers = {}
    damped = ""
    for name, weights in model.named_parameters():
        quantizer = Quantizer(
            name, weights, table[name], hessians, config.gptq_damping, config.column_steps)
        quantizers[name] = quantizer
        if quantizer.damping != config.gptq_damping:
            damped += f" damping:{name}={quantizer.damping:g}"

    def make_file(multiplier: float) -> bytes:
        arrays: list[np.ndarray] = []
        for name, quantizer in quantizers.items():
            step, levels = step_and_levels(table[name], config, multiplier)
            trellis = config.trellis and table[name].role != ""
            arrays.extend(quantizer.quantize(step, levels, trellis))
        for quantizer in quantizers.values():
            if quantizer.column_exponents_NC is not None:
                arrays.append(quantizer.column_exponents_NC.cpu().numpy())
        return artifact_bytes(config, arrays, tokenizer_sha256)

    data, how = fill_budget(config, budget, make_file)
    write_atomically(path, data)
    return f"artifact_bytes:{len(data)} budget_bytes:{budget} {how}{damped}"


def artifact_bytes(config: Config, arrays: list[np.ndarray], tokenizer_sha256: str) -> bytes:
    """The whole file: settings of the model, and codes and exponents of each parameter in turns.

    With COLUMN_STEPS those of the columns follow, one array for each parameter with a role.
    """
    header: dict[str, Any] = {
        "config": config.as_env(ModelSettings), "tokenizer_sha256": tokenizer_sha256}  # fmt: skip
    if config.column_steps > 0:
        header["column_steps"] = True
    packed_header = zlib.compress(json.dumps(header).encode(), 9)
    coded = encode(arrays)
    head = HEAD.pack(MAGIC, len(packed_header), zlib.crc32(packed_header), zlib.crc32(coded))
    return head + packed_header + coded


def weights_form(config: Config) -> str:
    """What log lines call quantized weights, like int6: by the setting, whatever codes occur in the file."""
    return f"int{config.matrix_bits}"


class About(NamedTuple):
    """What an artifact says of itself."""

    config: dict[str, str]  # the model's settings
    tokenizer_sha256: str
    bits: dict[str, int]  # that the widest code of each matrix parameter needs
    widest_bits: int  # of all block matrices
    sections: dict[str, int]  # bytes
    bytes: int
    sha256: str


def read_artifact(path: Path) -> bytes:
    """The bytes of a file that should be an artifact. Raises ArtifactError."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: {error}; name the model.bin of a run") from error


def load_artifact(path: Path) -> tuple[GPT, About]:
    """The model on the CPU, and what its file says.

    Nothing of the file is executed, and memory stays in proportion to its size. Raises ArtifactError with
    section and reason, and nothing else, whatever the bytes.
    """
    return parse_artifact(read_artifact(path), str(path))


class Header(NamedTuple):
    """What stands before the weights of an artifact."""

    settings: ModelSettings
    tokenizer_sha256: str
    column_steps: bool  # whether the columns have exponents, too
    parts: dict[str, bytes]  # sections by name: config, weights


def parse_header(data: bytes, name: str) -> Header:
    """The header of an artifact of these bytes. name: what messages call it. ArtifactError where it is none.

    All sections are whole then, the weights as well; they are not decoded.
    """
    section = "head"  # the one that is looked at: an error names it
    try:
        why = why_no_file(data[:1024])
        if why:
            raise ValueError(f"expected an artifact: {why}")
        if len(data) < HEAD.size:
            raise ValueError(f"{len(data)} bytes, expected at least {HEAD.size}; copy the file again")
        magic, size, *checksums = HEAD.unpack_from(data)
        if magic != MAGIC:
            raise ValueError("not an artifact, or of another version; expected the model.bin of a run")
        # Checksums first: nothing is interpreted before it is known to be whole.
        parts = {"config": data[HEAD.size : HEAD.size + size], "weights": data[HEAD.size + size :]}
        for section, checksum in zip(parts, checksums, strict=True):
            if zlib.crc32(parts[section]) != checksum:
                raise ValueError("truncated or damaged; copy the file again")
        section = "config"
        header = json.loads(zlib.decompressobj().decompress(parts["config"], 1 << 16))
        settings = read_model_settings(header, len(data))
    except Exception as error:  # whatever the bytes are
        raise ArtifactError(f"{name}: section {section}: {error}") from error
    return Header(settings, header["tokenizer_sha256"], "column_steps" in header, parts)


def parse_artifact(data: bytes, name: str) -> tuple[GPT, About]:
    """`load_artifact` of a file's bytes; name: what messages call it."""
    settings, tokenizer_sha256, column_steps, parts = parse_header(data, name)
    try:
        model = read_model(settings, parts["weights"], column_steps)
    except Exception as error:  # whatever the bytes are
        raise ArtifactError(f"{name}: section weights: {error}") from error

    # The coded weights begin with the largest code of each array: codes and exponents in turns.
    table = parameter_table(settings)
    peaks = parts["weights"][: 2 * len(table) : 2]
    bits = {}
    block_bits = []
    for (parameter_name, parameter), peak_byte in zip(table.items(), peaks, strict=True):
        peak = peak_byte % ALONG_TRELLIS
        if parameter.role:
            bits[parameter_name] = peak.bit_length() + 1
        if parameter.optimizer == "muon":
            block_bits.append(peak.bit_length() + 1)
    sizes = {part_name: len(part) for part_name, part in parts.items()}
    sha256 = hashlib.sha256(data).hexdigest()
    return model, About(
        settings.as_env(), tokenizer_sha256, bits, max(block_bits), sizes, len(data), sha256)


def read_model_settings(header: dict[str, Any], size_bytes: int) -> ModelSettings:
    """The settings in the header of a file of so many bytes. ValueError where they cannot be those of one."""
    different = set(header["config"]) ^ set(ModelSettings().as_env())
    if different:
        names = " ".join(sorted(different))
        raise ValueError(f"this script has other settings than the file: {names}; use the script of its run")
    if not isinstance(header.get("tokenizer_sha256"), str):
        raise ValueError("the tokenizer's hash is missing")
    settings = ModelSettings.from_values(header["config"])
    # A few bytes could ask for any amount of memory. Even the likeliest symbol costs a little: no trained
    # file comes near 1,024 weights a byte.
    entries = settings.train_seq_len * settings.head_dim
    for parameter in parameter_table(settings).values():
        entries += math.prod(parameter.shape)
    if entries > min(1 << 28, 1024 * size_bytes):
        raise ValueError(f"{entries} weights and angles are more than such a file can hold")
    return settings


def read_model(settings: ModelSettings, coded: bytes, column_steps: bool) -> GPT:
    """The model whose weights `encode` made these bytes of. ValueError and others where they are not."""
    table = parameter_table(settings)
    shapes = []
    for parameter in table.values():
        shapes.extend(array_shapes(parameter))
    if column_steps:
        shapes.extend(column_shapes(table))
    arrays = decode(coded, shapes)
    # Behind codes and exponents of all parameters: one array for each of those whose columns have exponents.
    of_columns = iter(arrays[2 * len(table) :])
    model = GPT(settings, seed=None)
    # Parameters are in the order of the table, as they were written.
    for number, (name, weights) in enumerate(model.named_parameters()):
        quantized = QuantizedWeights(arrays[2 * number], arrays[2 * number + 1])
        column_exponents = None
        if column_steps and table[name].role:
            column_exponents = next(of_columns)
        for exponents in (quantized.exponents, column_exponents):
            if exponents is not None and exponents.dtype != np.int8:
                raise ValueError(f"exponents of {name} are half steps, expected whole numbers")
        weights.data.copy_(restore_weights(quantized, table[name].shape, column_exponents))
    return model


def write_float_weights(run: Run, model: GPT) -> None:
    """Write the weights before quantization, fp32, by name, for torch.load; where upstream has them."""
    path = run.path("final_model.pt")
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    write_atomically(path, buffer.getvalue())
    run.log(f"Serialized model: {len(buffer.getvalue())} bytes")


def check_artifact(config: Config) -> None:
    """Write an artifact of this model and read it back, in memory, before anything is trained.

    A parameter or a setting that the file does not carry would otherwise be missed when training is over. The
    weights are made up, none of them zero, so that each part of the model shows in its loss; there are fewer
    of them where only time depends on their number. Raises ArtifactError.
    """
    header = {"config": config.as_env(ModelSettings), "tokenizer_sha256": ""}
    try:
        read_model_settings(header, config.artifact_bytes_max)
    except ValueError as error:
        raise ArtifactError(f"an artifact of this model could not be read back: {error}") from error
    # The model as training has it, with every setting of the run: a few words, narrow hidden layers.
    config = replace(config, vocab_size=min(config.vocab_size, 256), mlp_mult=min(config.mlp_mult, 1.0))
    trained = GPT(config, seed=None)
    table = parameter_table(config)
    random_codes = np.random.default_rng(0)
    arrays: list[np.ndarray] = []
    of_columns = []
    for name, weights in trained.named_parameters():
        if name not in table:
            raise ArtifactError(f"{name} is a parameter of the model, and no artifact would hold it; "
                                "add it to parameter_table")
        codes_shape, exponents_shape = array_shapes(table[name])
        codes = random_codes.integers(1, 3, codes_shape, np.int8)
        if config.trellis and table[name].role:
            codes = half_steps(codes)
        quantized = QuantizedWeights(codes, np.full(exponents_shape, -32, np.int8))
        column_exponents = None
        if config.column_steps > 0 and table[name].role:
            matrices, _, columns = bank_shape(table[name].shape)
            column_exponents = random_codes.integers(-8, 9, (matrices, columns), np.int8)
            of_columns.append(column_exponents)
        weights.data.copy_(restore_weights(quantized, table[name].shape, column_exponents))
        arrays.extend(quantized)
    arrays.extend(of_columns)

    # What comes back must be what went in, parameter by parameter.
    reloaded, _ = parse_artifact(artifact_bytes(config, arrays, ""), "an artifact of this model")
    for name, weights in trained.named_parameters():
        if not torch.equal(weights, reloaded.get_parameter(name)):
            raise ArtifactError(f"{name}: an artifact gives other weights back than it was given; "
                                "see parameter_table")
    # To the model read back a setting outside ModelSettings is unknown: that shows in an error or its loss.
    length = min(config.train_seq_len, 64)
    ids_BT = torch.from_numpy(random_codes.integers(0, config.vocab_size, (1, length + 1)))
    with torch.no_grad():
        expected = trained.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        try:
            found = reloaded.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        except AttributeError as error:
            raise ArtifactError(f"the model reads a setting that no artifact would hold ({error}); "
                                "make it a field of ModelSettings") from error
    if not torch.equal(expected, found):
        raise ArtifactError(f"a model read back from its artifact has loss {found.item()}, before it had "
                            f"{expected.item()}: a setting of the model is no field of ModelSettings")


# A wrapped script: Python that unpacks its own source. latin-1 has a character for every byte.
WRAPPER = """# -*- coding: latin-1 -*-
import linecache,lzma
s=lzma.decompress('''%s'''.encode("latin-1")).decode()
n=__file__+" (unpacked)"
linecache.cache[n]=len(s),None,s.splitlines(True),n
exec(compile(s,n,"exec"))
"""
ESCAPES = str.maketrans({"\\": r"\\", "\0": r"\x00", "\r": r"\r", "'": r"\'"})


def line_numbers(node: ast.expr | ast.stmt) -> range:
    """The lines of a part of a program, from 1."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def bare_source(source: str) -> str:
    """A program without docstrings, comments and empty lines; all else as it is written.

    Not `ast.unparse` of its tree: Python from 3.12 on writes f-strings that older ones cannot read.
    """
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()

    dropped: set[int] = set()  # numbers of lines, from 1
    of_text: set[int] = set()  # within strings an empty line has a meaning
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            of_text.update(line_numbers(node))
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0] if node.body else None
        if first is None or ast.get_docstring(node, clean=False) is None:
            continue
        # A docstring that shares its lines with other code stays.
        numbers = line_numbers(first)
        before = lines[numbers[0] - 1].encode()[: first.col_offset]
        after = lines[numbers[-1] - 1].encode()[first.end_col_offset :]
        if before.strip() or after.strip():
            continue
        dropped.update(numbers)
        if len(node.body) == 1:
            lines[first.lineno - 1] = before.decode() + "pass"
            dropped.discard(first.lineno)

    kept = []
    for number, line in enumerate(lines, start=1):
        if number not in dropped and (line.strip() or number in of_text):
            kept.append(line)
    return "\n".join(kept)


@functools.cache
def shipped_code(source: bytes, mode: str) -> bytes:
    """The script in the form that CODE_BYTES=`mode` ships and counts; wrapped: no comments, no docstrings."""
    already_wrapped = source.startswith(WRAPPER.split("%s")[0].encode())
    if mode == "raw" or already_wrapped:
        return source
    bare = bare_source(source.decode())
    packed = lzma.compress(bare.encode(), lzma.FORMAT_ALONE, preset=9 | lzma.PRESET_EXTREME)
    text = packed.decode("latin-1").translate(ESCAPES)
    return (WRAPPER % text).encode("latin-1")


# ============================================================================================================
# TRAIN — steps under a clock that rank 0 reads for all, so that all ranks take the same ones and stop as one.
# ============================================================================================================

# A training of so many seconds is worth a checkpoint at its end, whatever was asked for; on a GPU each is.
SAVED_FROM_SECONDS = 60.0


class StepResult(NamedTuple):
    """Loss and gradient norm of a step, perhaps still on their way to the host."""

    step: int  # 1: the first
    progress: float
    values: Tensor  # (2,): mean loss of this rank, gradient norm
    copied: torch.cuda.Event | None  # when `values` has arrived; None: it has
    wait_ms: float  # of the host, for the step's batches


class Trained(NamedTuple):
    """What training took, for summary.json."""

    steps: int
    tokens: int
    train_seconds: float
    stream_hash: str
    train_seq_lens: str  # as the setting, with the steps at which lengths gave way; empty if there was one


def choose_loss_function(model: GPT, config: Config) -> Callable[..., Tensor]:
    """What training minimises, as a function of model and batch; for PREFIX_LOSS the model gets its prefixes.

    The model must be on its device. Raises DataError where the tokenizer, which has the prefixes, is none.
    """
    if not config.prefix_loss:
        return GPT.loss
    device = model.machine.device
    of_token_V = longest_prefixes(load_tokenizer(config), config.vocab_size)
    model.prefixes = PrefixTargets(to_device(of_token_V, device), torch.zeros((), device=device))
    return GPT.loss_with_prefixes


def weigh_prefixes(model: GPT, progress: float, config: TrainingSettings) -> None:
    """Give the second targets of a model, if it has any, the weight of this part of the run."""
    if model.prefixes is not None:
        model.prefixes.weight.fill_(prefix_weight(progress, config))


class Training:
    """Model, optimizer, loader and clock of a run: everything that a step touches."""

    def __init__(
        self, config: Config, run: Run, shards: list[Shard], validation: Validation, kernels: Kernels
    ) -> None:
        machine = run.machine
        self.config = config
        self.run = run
        self.validation = validation
        self.model = ready_model(build_model(config), machine.for_scoring, kernels)
        # One graph from tokens to loss: a break in it would cost more than any kernel gains.
        loss = choose_loss_function(self.model, config)
        self.loss = machine.compile(loss, dynamic=False, fullgraph=True)
        self.optimizer = Optimizer(self.model, config, machine)
        self.trace = Trace(config.traced_steps, run)
        every = config.training_timing_every if config.training_timing_breakdown else 0
        self.timer = StepTimer(every, machine.on_gpu, self.trace)
        self.loader = Loader(config, shards, machine, self.trace)
        self.step = 0
        self.unread: list[StepResult] = []
        self.untold: list[dict[str, Any]] = []  # what metrics.jsonl will say of the steps read since
        self.waits_ms: list[float] = []  # for batches, of the steps since the last line
        self.started = time.perf_counter()  # shifted forward by time that does not count

    @property
    def seconds(self) -> float:
        """Seconds of training, without validation."""
        return time.perf_counter() - self.started

    def stream_hash(self) -> int:
        """The stream hash of all ranks' batches; all ranks call it together."""
        return sum(self.run.machine.gather(self.loader.stream_hash)) % 2**64

    def state(self) -> dict[str, Any]:
        """A copy of all that training has become, for any world size; all ranks call it together."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "config": self.config.as_env(),
            "loader": self.loader.state_dict(self.stream_hash()),
            "optimizer": self.optimizer.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Become what `state` returned; all ranks call it together. LoaderError where the data do not fit."""
        self.loader.load_state_dict(state["loader"])
        self.optimizer.load_state(state["optimizer"])
        self.step = state["step"]
        # The clock starts when the first batch is there on all ranks, and the device has nothing else to do:
        # what is left of the warm-up is no training.
        self.loader.stage_first()
        self.run.machine.wait()
        self.run.machine.gather(None)
        self.started = time.perf_counter() - state["seconds"]

    def save(self) -> None:
        """Replace the checkpoint by one of now. All ranks call it together."""
        # The copy is taken now; for the disk a thread waits.
        state = self.state()
        self.finish_saving()
        if self.run.machine.rank == 0:
            writer = threading.Thread(target=write_checkpoint, args=(self.run, state), name="checkpoint")
            writer.start()
            self.run.writer = writer

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self.run.writer is not None:
            self.run.writer.join()

    def resume(self) -> None:
        """Take up the checkpoint of the run that RESUME names, on any world size. Raises ConfigError."""
        path = self.run.path(CHECKPOINT)
        state = read_checkpoint(path)
        for name, ours in self.config.as_env(TrainingSettings).items():
            theirs = state["config"].get(name)
            if theirs is None:
                raise ConfigError(f"{name} is newer than {path}; resume with {self.run.path('train_gpt.py')}")
            if theirs != ours:
                again = self.run.path(SETTINGS_FILE)
                raise ConfigError(f"{name}={ours}, it was {theirs}; resume with CONFIG={again}")
        self.load_state(state)
        train_ms = 1e3 * state["seconds"]
        self.run.log(f"resumed:{self.run.directory} step:{self.step} train_time:{train_ms:.0f}ms")

    def close(self) -> None:
        """End all threads, from any state."""
        self.loader.close()
        self.finish_saving()


def read_checkpoint(path: Path, lazily: bool = False) -> dict[str, Any]:
    """The state that `write_checkpoint` put there, on the CPU; lazily: tensors stay on disk. ConfigError."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)  # executes nothing
    except Exception as error:  # whatever the bytes are
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise ConfigError(f"RESUME: {path} cannot be read ({reason}); start a new run") from error


def write_checkpoint(run: Run, state: dict[str, Any]) -> None:
    """Put a state in the place of the checkpoint before, as a whole or not at all; a failure costs no run."""
    try:
        if not all(weight.isfinite().all() for weight in state["optimizer"]["weights"]):
            raise ConfigError("its weights are not finite")
        # Through memory: a file of this size is written in one go or not at all.
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(run.path(CHECKPOINT), buffer.getvalue())
        run.log(f"checkpoint:{run.path(CHECKPOINT)} step:{state['step']}")
    except (ConfigError, MemoryError, RuntimeError) as error:  # of torch: no memory for it, here or on a GPU
        reason = str(error) or repr(error)
        run.log(f"warning: no checkpoint of step {state['step']}, none is replaced: {reason}")


def train_step(training: Training, progress: float, val_ms: float = 0.0) -> Tensor:
    """One optimizer step. Returns this rank's mean loss and the gradient norm (2,), still on the device.

    progress: share of the run that is over. val_ms: of a validation just before, for the timing line.
    """
    config = training.config
    loader = training.loader
    timer = training.timer
    # Both are the same on all ranks, as progress is.
    looping = loop_is_on(progress, config)
    weigh_prefixes(training.model, progress, config)
    # The sum of the losses stays on the device: nobody waits for it.
    total = torch.zeros((), device=training.run.machine.device)
    # Steps of the warm-up have no number, and are neither timed nor traced.
    number = training.step + 1 if training.run.training else None
    if training.trace.wanted and number is not None:
        training.trace.begin(number, loader.epoch)
    timer.begin(number, val_ms)
    for _ in range(loader.micro_steps):
        batch = loader.next_batch()
        timer.lap("batch", batch.copy)
        loss = training.loss(training.model, batch.inputs_BT, batch.targets_BT, batch.starts, looping)
        # Gradients add up: each micro-batch gives its part of a mean.
        loss = loss / loader.micro_steps
        timer.lap("forward")
        loss.backward()
        timer.lap("backward")
        total += loss.detach()
    lr_scale = learning_rate_scale(progress, training.step, config)
    momentum = muon_momentum(progress, training.step, config)
    norm = training.optimizer.step(lr_scale, momentum, training.step, timer)
    timer.lap("optimizer")
    line = timer.end()
    if line:
        training.run.log(line)
    return torch.stack([total, norm])


class Graph(NamedTuple):
    """A kind of training step that the compiler knows as one graph."""

    length: int  # tokens of a sequence
    progress: float  # one at which there are such steps; it decides whether the looped layers loop


# Under a clock a length begins somewhat before or after its share of the run. Graphs are compiled for all of
# that range, which reaches so far to either side, as a share of the run.
NEAR_PROGRESS = 0.05


def graphs_of(config: Config) -> list[Graph]:
    """The graphs that training needs, or may need: each is compiled before the clock starts."""
    graphs = []
    begin = 0.0
    for part in config.length_parts:
        end = min(1.0, part.until + NEAR_PROGRESS)
        if not loop_is_on(begin, config):
            graphs.append(Graph(part.length, 0.0))
        if loop_is_on(end, config):
            graphs.append(Graph(part.length, 1.0))
        # Of a length that begins at a step nobody knows at which share of the run that will be.
        begin = max(0.0, part.until - NEAR_PROGRESS) if part.until < 1 else 0.0
    return graphs


def warm_up(training: Training) -> None:
    """Run WARMUP_STEPS real steps of each graph, to compile; then undo it exactly."""
    config = training.config
    before = training.state()
    for graph in graphs_of(config):
        training.loader.length_starts = [LengthStart(0, graph.length)]
        training.loader.seek(training.step)
        looping = int(loop_is_on(graph.progress, config))
        about = f" train_seq_len:{graph.length}" if config.train_seq_lens else ""
        for number in range(1, config.warmup_steps + 1):
            train_step(training, graph.progress)
            training.run.log(f"warmup_step:{number}/{config.warmup_steps} looping:{looping}{about}")
    training.load_state(before)


def log_length(training: Training, start: LengthStart) -> None:
    """The line of a length and the step, from 1, that is its first."""
    training.run.log(f"train_seq_len:{start.length} from step:{start.step + 1}",
                     "length", train_seq_len=start.length, step=start.step + 1)  # fmt: skip


def lengths_of_run(training: Training) -> str:
    """TRAIN_SEQ_LENS in the steps at which its lengths gave way, for a run of fixed steps to see the same."""
    config = training.config
    if not config.train_seq_lens:
        return ""
    began = {start.length: start.step for start in training.loader.length_starts}
    entries = []
    end = 0
    for part, following in itertools.pairwise(config.length_parts):
        # A length that never began gets a step after the last one: so a replay does not reach it either.
        end = began.get(following.length, max(training.step, end + 1))
        if end >= training.step:
            training.run.log(f"warning: TRAIN_SEQ_LENS: no step had sequences of {following.length} tokens")
        entries.append(f"{part.length}:{end}")
    return " ".join([*entries, str(config.train_seq_len)])


def agree_on_clock_and_signal(training: Training) -> tuple[float, int]:
    """Rank 0's seconds of training, and a signal that any rank has caught (0: none); the same on all ranks.

    All ranks call it together. The tensor is on the host, so no device is asked: it may be steps behind.
    """
    mine = torch.zeros(2, dtype=torch.float64)
    if training.run.machine.rank == 0:
        mine[0] = training.seconds
    mine[1] = training.run.stop_signal
    if training.run.machine.world_size > 1:
        dist.all_reduce(mine, dist.ReduceOp.MAX)
    seconds, number = mine.tolist()
    return seconds, int(number)


def is_due(every_seconds: float, before: float, now: float) -> bool:
    """Whether a multiple of `every_seconds` lies between two times; 0: never."""
    return every_seconds > 0 and now // every_seconds > before // every_seconds


def train(training: Training) -> None:
    """Step until the clock or ITERATIONS is over. A signal ends the process, once all is saved."""
    config = training.config
    run = training.run
    # Steps that a GPU may be behind the host, so that it always has work.
    behind = 2 if run.machine.on_gpu else 0
    seconds = run.machine.gather(training.seconds)[0]  # by the clock of rank 0, here and below
    step_seconds = seconds / max(training.step, 1)  # of a resumed run: its mean
    progress = run_progress(seconds, training.step, config)
    loader = training.loader
    for known in loader.length_starts[1:]:
        log_length(training, known)
    while True:
        before = seconds
        seconds, caught = agree_on_clock_and_signal(training)
        # The slowest recent step; of what it took 10 % is forgotten with each step.
        step_seconds = max(0.9 * step_seconds, seconds - before)
        # The step to come must end in time, so must those the device still has to do, and one to spare.
        ends_at = seconds + (2 + behind) * step_seconds
        finished = caught != 0 or run_progress(ends_at, training.step, config) >= 1
        save_now = is_due(config.checkpoint_every_seconds, before, seconds)
        validate_now = config.val_loss_every > 0 and training.step % config.val_loss_every == 0

        # Whatever looks at weights, or ends the run, first wants to know that all steps were good.
        look_now = finished or save_now or validate_now
        read_results(training, leave=0 if look_now else behind)
        if look_now:
            record_steps(training)
        looping = loop_is_on(progress, config)  # as in the step before
        if finished:
            break
        if save_now:
            training.save()
        # The first step's validation shows where training begins.
        val_ms = 0.0
        if validate_now:
            val_ms = validate_step(training, looping)

        progress = run_progress(seconds, training.step, config)
        # By rank 0's clock, as progress is: so all ranks find the same step.
        mean_seconds = seconds / max(training.step, 1)
        start = next_length(loader.length_starts, seconds, mean_seconds, training.step, config)
        if start is not None:
            loader.begin_length(start)
            log_length(training, start)
        values = train_step(training, progress, val_ms).to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if run.machine.on_gpu else None
        # Taken now: when the result is read, later steps have waited as well.
        wait_ms = sum(loader.take_waits_ms())
        training.step += 1
        training.unread.append(StepResult(training.step, progress, values, copied, wait_ms))
    end_training(training, looping)


def end_training(training: Training, looping: bool) -> None:
    """After the last step: save it where that is wanted, and end the process if a signal has come."""
    config = training.config
    run = training.run
    run.machine.wait()  # from here on the host may look at weights
    seconds, caught = agree_on_clock_and_signal(training)
    # Everything after training can be redone from here: whatever fails there, no paid training is lost.
    worth_saving = run.machine.on_gpu or seconds > SAVED_FROM_SECONDS
    save_now = caught != 0 or config.checkpoint_every_seconds > 0 or worth_saving
    if save_now:
        training.save()
    # Upstream validates the last step too.
    if caught == 0 and config.val_loss_every > 0:
        validate_step(training, looping)
        # A signal may have come meanwhile: then it asked for a checkpoint.
        _, caught = agree_on_clock_and_signal(training)
        if caught != 0 and not save_now:
            training.save()
    training.trace.finish()
    if caught != 0:
        leave_training(training, caught)
    if training.step < config.iterations:
        run.log(f"stopping_early: wallclock_cap train_time:{1e3 * training.seconds:.0f}ms "
                f"step:{training.step}/{config.iterations}")
        if training.step <= 1:
            run.log(f"warning: training was {training.step} step: MAX_WALLCLOCK_SECONDS="
                    f"{config.max_wallclock_seconds:g} less GPTQ_RESERVE_SECONDS leaves no time for another")


def leave_training(training: Training, number: int) -> None:
    """End the process after a signal, once the checkpoint is written. All ranks call it together."""
    training.finish_saving()
    training.run.machine.gather(None)  # torchrun kills the others when a rank has left
    training.run.log(f"stopped by signal {number}; {training.run.ways_on()}")
    os._exit(128 + number)


def read_results(training: Training, leave: int) -> None:
    """Check and tell all steps but the last `leave`, for which the host would wait. FloatingPointError."""
    config = training.config
    run = training.run
    while len(training.unread) > leave:
        # Two steps behind on a GPU: by then the numbers are there, and nobody waits.
        result = training.unread.pop(0)
        if result.copied is not None:
            result.copied.synchronize()
        loss, norm = result.values.tolist()
        if not math.isfinite(loss + norm):
            run.record("train", training.untold)  # of this rank alone: the others may be gone
            training.finish_saving()
            checkpoint = run.path(CHECKPOINT)
            saved = checkpoint if checkpoint.exists() else "none"
            raise FloatingPointError(
                f"step {result.step}, batch at token {config.train_batch_tokens * (result.step - 1)}: "
                f"train_loss {loss}, grad_norm {norm}, last good checkpoint: {saved}; "
                "lower MATRIX_LR, SCALAR_LR, TIED_EMBED_LR or GRAD_CLIP_NORM")
        training.untold.append(step_event(training, result, loss, norm))
        every = config.train_log_every
        told_now = every > 0 and (result.step <= FIRST_STEPS or result.step % every == 0)
        if told_now or len(training.untold) == STEPS_AT_ONCE:
            last = record_steps(training)
            if told_now:
                log_step(training, last)


# Steps that metrics.jsonl gets in one go, at most: files and ranks are not asked in every step.
STEPS_AT_ONCE = 100


def step_event(training: Training, result: StepResult, loss: float, norm: float) -> dict[str, Any]:
    """What metrics.jsonl says of a step; loss: of this rank."""
    training.waits_ms.append(result.wait_ms)
    return {
        "step": result.step,
        "train_loss": loss,
        "train_time_ms": 1e3 * training.seconds,
        "tokens": training.config.train_batch_tokens * result.step,
        "grad_norm": norm,
        "progress": result.progress,
        "data_wait_max_ms": result.wait_ms,
    }


def record_steps(training: Training) -> dict[str, Any]:
    """Write down the steps read since, with the mean loss of the ranks. All ranks call it together.

    Returns the last of them; empty if there is none.
    """
    run = training.run
    events = training.untold
    if not events:
        return {}
    # The losses of all these steps travel together.
    losses_of_ranks = run.machine.gather([event["train_loss"] for event in events])
    for number, event in enumerate(events):
        total = sum(losses[number] for losses in losses_of_ranks)
        event["train_loss"] = total / run.machine.world_size
    run.record("train", events)
    training.untold = []
    return events[-1]


def log_step(training: Training, event: dict[str, Any]) -> None:
    """The line of a step, in upstream's words. event: as `step_event` gave it."""
    config = training.config
    step = event["step"]
    train_ms = event["train_time_ms"]
    # Half of the steps waited for less than the first, 1 % for more than the second.
    p50, p99, most = np.percentile(training.waits_ms or [0.0], [50, 99, 100]).tolist()
    training.waits_ms = []
    lr_scale = learning_rate_scale(event["progress"], step - 1, config)
    seconds = train_ms / 1e3
    eta_seconds = seconds / run_progress(seconds, step, config) - seconds
    training.run.log(
        f"step:{step}/{config.iterations} train_loss:{event['train_loss']:.4f} train_time:{train_ms:.0f}ms "
        f"step_avg:{train_ms / step:.2f}ms tok_s:{event['tokens'] / seconds:.0f} "
        f"data_wait_ms:{p50:.2f}/{p99:.2f}/{most:.2f} lr_scale:{lr_scale:.4f} "
        f"grad_norm:{event['grad_norm']:.3f} eta:{eta_seconds:.0f}s")


def validate_step(training: Training, looping: bool) -> float:
    """`validate`, with the label of the step that has just been done, or of step 0."""
    return validate(training, f"step:{training.step}/{training.config.iterations}", looping)


def validate(training: Training, label: str, looping: bool = True) -> float:
    """Stop the clock, and score the current weights without overlap: a diagnostic, never the result.

    looping: as in `GPT.forward`. Returns how long it took, in milliseconds.
    """
    config = training.config
    run = training.run
    data = training.validation
    run.machine.wait()
    start = time.perf_counter()
    every = max(0, config.val_progress_log_every)
    progress = ProgressReport(run, "training", every, config.val_batch_size)
    with training.trace.span("val", "main", step=training.step):
        ledger = score_roundtrip(training.model, data.tokens, config, progress, looping)
    score = ledger.score(data.bytes_total)
    val_seconds = time.perf_counter() - start
    # The time of looking does not count as training.
    training.started += val_seconds
    train_ms = 1e3 * training.seconds
    run.log(
        f"{label} val_loss:{score.nats:.4f} val_bpb:{score.bits_per_byte:.4f} train_time:{train_ms:.0f}ms "
        f"step_avg:{train_ms / max(training.step, 1):.2f}ms{data.mark}",
        "val", label=label, step=training.step, val_loss=score.nats, val_bpb=score.bits_per_byte,
        train_time_ms=train_ms, val_ms=1e3 * val_seconds,
    )  # fmt: skip
    return 1e3 * val_seconds


def calibration_batches(training: Training) -> Iterator[Batch]:
    """The training batches that follow the last step, while the clock allows; all ranks get equally many.

    A warning says so where the clock allows fewer than GPTQ_CALIBRATION_BATCHES.
    """
    config = training.config
    machine = training.run.machine
    wanted = config.gptq_calibration_batches
    spare_seconds = 0.1 * config.gptq_reserve_seconds
    now = 0.0
    for number in range(math.ceil(wanted / machine.world_size)):
        machine.wait()
        before = now
        now = machine.gather(training.seconds)[0]
        # One more will take as long as the last; of the first one nothing is known.
        ends_at = 2 * now - before + spare_seconds
        if number > 0 and 0 < config.max_wallclock_seconds < ends_at:
            training.run.log(f"warning: {number * machine.world_size} calibration batches, expected "
                             f"GPTQ_CALIBRATION_BATCHES={wanted}: GPTQ_RESERVE_SECONDS="
                             f"{config.gptq_reserve_seconds:g} had no time for more; raise it")
            return
        yield training.loader.next_batch()


def finish_training(training: Training) -> Hessians:
    """Take the averaged weights, collect Hessians while the clock allows, and validate once."""
    config = training.config
    run = training.run
    # What is calibrated, shipped and scored is the average.
    training.optimizer.use_average()
    hessians: Hessians = {}
    if config.gptq:
        hessians = collect_hessians(training.model, calibration_batches(training), run.machine)
    validate(training, "DIAGNOSTIC post_ema" if config.ema_decay else "DIAGNOSTIC final")
    run.log(f"gptq:collected {len(hessians)} Hessians; with training {training.seconds:.2f}s")
    run.log(f"peak memory allocated: {torch.cuda.max_memory_allocated() >> 20} MiB "
            f"reserved: {torch.cuda.max_memory_reserved() >> 20} MiB")
    return hessians


# ============================================================================================================
# main — a table of contents: check, prepare, warm up, train, ship, reload, evaluate, report.
# ============================================================================================================


class Inputs(NamedTuple):
    """What a run reads, checked before anything is written."""

    train_shards: list[Shard]  # none with EVAL_ONLY
    validation: Validation
    source: bytes  # the script that runs
    shipped: bytes  # the same in the form that is counted
    hashes: dict[str, str]  # of code, tokenizer and shards: by these, runs know that they read the same
    micro_steps: int  # 0 with EVAL_ONLY
    estimate: str  # how the budget will be filled, as far as that is known before training
    kernels: Kernels


def main() -> int:
    """Do what the environment asks for. Exit status 0: finished; 1: an error, told in one message."""
    if "-h" in sys.argv or "--help" in sys.argv:
        print_help()
        return 0
    run = None
    try:
        refuse_arguments(sys.argv[1:])
        given, notes = read_settings(os.environ)
        known = known_settings(given)
        # What was found is ours: nothing in it is a former name, or stands for anything else.
        config = Config.from_values({**known.found, **given, **known.fixed})
        run = Run(this_machine(config, os.environ))
        signal.signal(signal.SIGTERM, run.on_signal)
        signal.signal(signal.SIGINT, run.on_signal)
        return whole_run(config, run, [*notes, *known.notes])
    except (ConfigError, DataError, LoaderError, ArtifactError, FloatingPointError) as error:
        message = f"error: {error}"
    except torch.cuda.OutOfMemoryError as error:
        message = ("error: out of GPU memory; lower MICRO_BATCH_TOKENS, VAL_BATCH_SIZE or, in test-time "
                   f"training, TTT_BATCH_SEQS or TTT_BATCH_SIZE ({error})")
    except Exception:
        # An error of ours: the traceback is what helps to mend it.
        message = traceback.format_exc().strip()
    report_failure(message, run, os.environ)
    return 1


def refuse_arguments(arguments: list[str]) -> None:
    """ConfigError for words on the command line: they would be ignored."""
    if arguments:
        raise ConfigError(f"got {' '.join(arguments)!r} on the command line, where only --help is read; "
                          "settings are variables of the environment: SEED=42 python train_gpt.py")


# What EVAL_ONLY takes from the config.env beside its artifact where nobody gives it: where the text is, and
# how it is scored. Of the model it takes nothing: that is the artifact's to say.
EVALUATION_SETTINGS = (
    "DATA_PATH", "TOKENIZER_PATH", "VAL_TOKENS_LIMIT", "VAL_BATCH_SIZE", "EVAL_SEQ_LEN", "EVAL_STRIDE",
    "TTT_ENABLED", "TTT_MODE", *" ".join(SETTINGS_OF_TTT_MODE.values()).split(), "MAX_EVAL_SECONDS",
    "ARTIFACT_BYTES_MAX", "CODE_BYTES", "COMPUTE_DTYPE", "SEED",  # of which adapters are drawn
)  # fmt: skip
# What belongs to one start of the script: neither taken from a run's config.env nor put there.
SETTINGS_OF_A_START = ("RUN_ID", "RESUME", "RESUME_OTHER_CODE", "EVAL_ONLY")


class Known(NamedTuple):
    """What the files of an earlier run say about this one."""

    found: dict[str, str]  # settings that nobody gives
    fixed: dict[str, str]  # of the artifact's model: whatever is given
    notes: list[str]  # lines for the log


def known_settings(given: Mapping[str, str]) -> Known:
    """What RESUME or EVAL_ONLY finds in its run. ConfigError, ArtifactError.

    RESUME takes the settings of training from the checkpoint, all others from the run's config.env. EVAL_ONLY
    takes those of the model from the artifact, and EVALUATION_SETTINGS from the config.env beside it, where
    there is one.
    """
    stored: dict[str, str] = {}
    fixed: dict[str, str] = {}
    notes: list[str] = []
    if given.get("RESUME"):
        directory = find_path(given["RESUME"])
        check_resumable(directory)
        # What training makes of the weights stands where the weights stand; the file beside it has the rest.
        of_training = TrainingSettings().as_env().keys()
        names = [name for name in Config().as_env() if name not in (*of_training, *SETTINGS_OF_A_START)]
        in_checkpoint = read_checkpoint(directory / CHECKPOINT, lazily=True)["config"]
        stored = {name: in_checkpoint[name] for name in of_training if name in in_checkpoint}
    elif given.get("EVAL_ONLY"):
        path = find_path(given["EVAL_ONLY"])
        directory = path.parent
        names = list(EVALUATION_SETTINGS)
        settings = parse_header(read_artifact(path), str(path)).settings
        fixed = settings.as_env()
        # What somebody gave and does not get must not go unsaid.
        for spec in fields(ModelSettings):
            name = spec.name.upper()
            if name in given and parse_value(name, given[name], spec) != getattr(settings, spec.name):
                notes.append(f"warning: {name}={given[name]} has no effect: "
                             f"EVAL_ONLY's artifact has {fixed[name]}")
    else:
        return Known({}, {}, [])

    # A run of older days, or an artifact that was copied alone, has no such file: then defaults hold.
    if (directory / SETTINGS_FILE).is_file():
        in_file = read_config_file(str(directory / SETTINGS_FILE))
        stored.update({name: in_file[name] for name in names if name in in_file})
    found = {name: value for name, value in stored.items() if name not in given}
    default = Config().as_env()
    notes = [*(f"found:{name}={value}" for name, value in found.items() if value != default[name]), *notes]
    return Known(found, fixed, notes)


def print_help() -> None:
    """The head of this file and every variable."""
    print_line(__doc__ or "", sys.stdout)
    print_line("Variables, also as KEY=VALUE lines of a file named by CONFIG:\n", sys.stdout)
    # Every setting is a field: nothing else can be set.
    defaults = Config().as_env()
    for spec in fields(Config):
        name = spec.name.upper()
        setting = f"{name}={defaults[name]}"
        choices = " | ".join(spec.metadata["among"])
        if choices:
            choices = f" [{choices}]"
        print_line(f"  {setting:<48} {spec.metadata['meaning']}{choices}", sys.stdout)


def report_failure(message: str, run: Run | None, environ: Mapping[str, str]) -> None:
    """Tell what ended the run: on the console, in the log, and where torchrun looks for it."""
    if run is None:
        print_line(message, sys.stderr)
        return
    machine = run.machine
    # A training that is over is on disk, or its artifact is: the last line says how to go on from there.
    training_is_over = run.phase_name not in ("setup", "warmup", "train")
    # What the libraries say when a peer is gone: the peer itself tells the reason.
    peer_is_gone = any(sign in message for sign in ("gloo/", "pair closure", "DistBackendError"))
    if peer_is_gone and message.startswith("Traceback"):
        line = f"rank {machine.rank}: ends: another rank has ended or does not answer"
        if training_is_over:
            line += f"; {run.ways_on()}"
        print_line(line, sys.stderr)
        return
    if machine.world_size > 1:
        message = f"rank {machine.rank}: {message}"
    if training_is_over:
        message += f"\n{run.ways_on()}"
    print_line(message, sys.stderr)
    if run.directory is not None:
        append_line(message, run.path("log.txt"))
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        # Dated a second back: torchrun shows the earliest error, and this one is the cause of the others.
        record = {"message": message, "timestamp": int(time.time()) - 1}
        append_line(json.dumps(record), Path(error_file))


def whole_run(config: Config, run: Run, notes: list[str]) -> int:
    """Train and ship, unless EVAL_ONLY; then reload the artifact, and score nothing but what it holds.

    notes: lines for the log about settings.
    """
    directory = choose_directory(config, run.machine)
    loaded = None
    tokenizer_sha256 = ""
    if config.eval_only:  # the artifact knows the tokenizer
        loaded = load_artifact(find_path(config.eval_only))
        _, about = loaded
        tokenizer_sha256 = about.tokenizer_sha256

    # Whatever can be wrong is found before anything is written.
    with run.phase("setup"):
        inputs = preflight(config, run, tokenizer_sha256)
        open_run(config, run, inputs, directory, notes)
    if loaded is None:
        trained = train_and_ship(config, run, inputs)
    else:
        trained = Trained(steps=0, tokens=0, train_seconds=0.0, stream_hash="0" * 16, train_seq_lens="")
    with run.phase("reload"):
        model, about = loaded or load_artifact(run.path(ARTIFACT))
        ready_model(model, run.machine.for_scoring, inputs.kernels)
        compile_evaluation(model, config, inputs.validation.tokens)
    scores = evaluate(model, config, run, inputs.validation, weights_form(config))
    summarize(config, run, inputs, trained, about, scores)
    if run.machine.rank == 0 and config.checkpoint_every_seconds == 0:
        run.path(CHECKPOINT).unlink(missing_ok=True)  # nobody asked for it, and nothing can go on from it now
    return 0


def train_and_ship(config: Config, run: Run, inputs: Inputs) -> Trained:
    """Train, and write the artifact: rank 0 does, all wait."""
    with run.phase("setup"):
        training = Training(config, run, inputs.train_shards, inputs.validation, inputs.kernels)
    with contextlib.closing(training):
        if config.resume:
            training.resume()
        with run.phase("warmup"):
            warm_up(training)
        with run.phase("train"):
            run.training = True
            train(training)
            run.training = False
        # Of training alone: how many batches are calibrated with depends on ranks and on the clock.
        stream_hash = training.stream_hash()
        with run.phase("hessians"):
            hessians = finish_training(training)
        trained = Trained(
            steps=training.step,
            tokens=training.step * config.train_batch_tokens,
            train_seconds=training.seconds,
            stream_hash=f"{stream_hash:016x}",
            train_seq_lens=lengths_of_run(training),
        )
        with run.phase("quantize"):
            if run.machine.rank == 0 and config.save_float:
                write_float_weights(run, training.model)
            if run.machine.rank == 0:
                # A longer script leaves fewer bytes for weights.
                budget = config.artifact_bytes_max - len(inputs.shipped)
                path = run.path(ARTIFACT)
                tokenizer = inputs.hashes["tokenizer"]
                run.log(write_artifact(path, training.model, config, hessians, tokenizer, budget))
            run.machine.gather(None)  # nobody reads the file before it is there
    return trained


def preflight(config: Config, run: Run, tokenizer_sha256: str = "") -> Inputs:
    """Check what a user can get wrong, in seconds, before anything is written. All ranks call it together.

    tokenizer_sha256: of the tokenizer that an artifact to be scored was trained with; empty: any will do.
    """
    machine = run.machine
    train_shards: list[Shard] = []
    micro_steps = 0
    folder = find_path(config.data_path)
    pattern = glob.escape(str(folder))
    if not config.eval_only:
        train_shards = open_shards(f"{pattern}/fineweb_train_*.bin")
    val_shards = open_shards(f"{pattern}/fineweb_val_[0-9]*.bin")
    check_first_tokens([val_shards[0], *train_shards[:1]], config)
    validation = read_validation(val_shards, config)
    if not config.eval_only:
        micro_steps = micro_steps_per_step(config, machine.world_size)
        next(shard_visits(config, train_shards, 0))  # whether a shard holds a sequence

    tokenizer = find_path(config.tokenizer_path)
    source = Path(__file__).read_bytes()
    shipped = shipped_code(source, config.code_bytes)
    # Names and sizes stand for gigabytes of shards, which take minutes to hash.
    listing = [[shard.path.name, shard.tokens] for shard in (*train_shards, *val_shards)]
    read = {"code": source, "tokenizer": tokenizer.read_bytes(), "shards": json.dumps(listing).encode()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in read.items()}
    # The manifest of a data set has the hash of each shard; shards of one's own may have none.
    manifest = folder / "manifest.json"
    hashes["manifest"] = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else "none"
    alike = {**config.as_env(), **hashes, "torch": torch.__version__}
    alike["bytes of validation text"] = str(validation.bytes_total)
    compare_ranks(alike, machine)
    if tokenizer_sha256 not in ("", hashes["tokenizer"]):
        raise ConfigError(f"TOKENIZER_PATH={tokenizer}: expected EVAL_ONLY's, with sha256 {tokenizer_sha256}")

    check_tokenizer(config, hashes["tokenizer"], validation.tokens)

    estimate = ""
    if not config.eval_only:
        estimate = estimate_artifact(config, config.artifact_bytes_max - len(shipped))
        if machine.rank == 0:
            check_artifact(config)
    kernels = choose_kernels(config, machine)
    return Inputs(train_shards, validation, source, shipped, hashes, micro_steps, estimate, kernels)


def check_tokenizer(config: Config, sha256: str, tokens: np.ndarray) -> None:
    """DataError where TOKENIZER_PATH is not the tokenizer that made the shards.

    By the hash in the shards' manifest. Where there is none, some validation text is decoded and encoded
    again: by its own tokenizer nearly all ids come back, by another one hardly any.
    """
    # Two tokenizers may well have as many pieces: then nothing else would show that scores mean nothing.
    path = find_path(config.tokenizer_path)
    manifest = find_path(config.data_path) / "manifest.json"
    try:
        maker = read_manifest(manifest.parent)["tokenizer"]
        made_by = maker["sha256"]
    except (LookupError, TypeError):
        made_by = None  # no manifest, or one that says nothing about it
    if made_by is not None:
        if made_by != sha256:
            raise DataError(f"TOKENIZER_PATH={path}: sha256 {sha256}, by {manifest} the shards were made "
                            f"by {made_by}; name that tokenizer, {maker.get('file', 'wherever it is')}")
        return
    share = share_that_comes_back(load_tokenizer(config), tokens[:SAMPLE_TOKENS])
    if share < 0.5:
        raise DataError(f"TOKENIZER_PATH={path}: only {share:.0%} of validation tokens come back when they "
                        f"are decoded and encoded; name the one that made the shards of {manifest.parent}")


SAMPLE_TOKENS = 20_000  # tens of documents, a few milliseconds


def share_that_comes_back(pieces: Any, tokens: np.ndarray) -> float:
    """Share of ids that are the same, from either end of their document, when decoded and encoded again."""
    begins = np.flatnonzero(tokens == BOS_ID)
    documents = np.split(tokens, begins)[1:]
    if len(documents) > 1:
        documents = documents[:-1]  # the last one may be cut anywhere
    same = 0
    total = 0
    for document in documents:
        ids = document[1:].tolist()
        again = pieces.encode(pieces.decode(ids))
        # One odd place in a long text must not count as a whole text that differs: both ends are compared.
        shorter = min(len(ids), len(again))
        equal_ahead = 0
        while equal_ahead < shorter and ids[equal_ahead] == again[equal_ahead]:
            equal_ahead += 1
        equal_behind = 0
        while equal_behind < shorter - equal_ahead and ids[-1 - equal_behind] == again[-1 - equal_behind]:
            equal_behind += 1
        same += equal_ahead + equal_behind
        total += len(ids)
    return same / total if total else 1.0


def check_first_tokens(shards: list[Shard], config: Config) -> None:
    """DataError if a split does not begin with a document, as its first shard must; later ones may not."""
    for shard in shards:
        first = int(read_tokens(shard, config.vocab_size)[0])
        if first != BOS_ID:
            raise DataError(f"{shard.path}: begins with id {first}, expected BOS={BOS_ID}; export it again")


def read_validation(shards: list[Shard], config: Config) -> Validation:
    """The text to score, and its bytes. DataError where it has none."""
    tokens = np.concatenate([read_tokens(shard, config.vocab_size) for shard in shards])
    mark = ""
    if config.val_tokens_limit:
        tokens = tokens[: config.val_tokens_limit + 1]  # so many targets: one token more
        mark = " comparable:0"
    bytes_total = int(token_bytes(tokens, config).sum())
    if bytes_total == 0:
        folder = shards[0].path.parent
        raise DataError(f"{folder}: {len(tokens)} validation tokens stand for no text: nothing to score")
    return Validation(tokens, bytes_total, mark)


def compare_ranks(mine: dict[str, str], machine: Machine) -> None:
    """ConfigError where ranks differ in what must be alike. All ranks call it together."""
    for rank, theirs in enumerate(machine.gather(mine)):
        for name, value in mine.items():
            if theirs[name] != value:
                raise ConfigError(
                    f"{name} is {theirs[name]} on rank {rank} and {value} on rank {machine.rank}")


def choose_directory(config: Config, machine: Machine) -> Path:
    """Where this run will write; all ranks call it. ConfigError where it cannot; nothing is made yet."""
    if config.resume:
        directory = find_path(config.resume)
        check_resumable(directory)
        if config.run_id not in ("", directory.name):
            raise ConfigError(f"RUN_ID={config.run_id}: RESUME goes on with {directory}; unset one of them")
        check_same_code(directory, config)
        return directory
    # Clocks of machines differ: rank 0 decides on a name made of the time.
    name = config.run_id or time.strftime("%Y%m%d-%H%M%S") + f"-seed{config.seed}"
    directory = Path(machine.gather(f"{config.runs_dir}/{name}")[0])
    if machine.rank == 0:
        check_is_new(directory)
        check_room(directory, config)
    return directory


def check_resumable(directory: Path) -> None:
    """ConfigError where a directory does not hold an unfinished run with a checkpoint."""
    if not directory.is_dir():
        why = "there is no such directory"
    elif (directory / SUMMARY).exists():
        why = f"that run is finished; EVAL_ONLY={directory / ARTIFACT} scores it again"
    elif not (directory / CHECKPOINT).exists():
        why = f"it holds no {CHECKPOINT}; start a new run"
    else:
        return
    raise ConfigError(f"RESUME={directory}: expected an unfinished run with a {CHECKPOINT}: {why}")


def check_same_code(directory: Path, config: Config) -> None:
    """ConfigError where a run to resume began with another script, and that was not allowed."""
    # Bytes, not meaning: whether another text does the same is not for a program to say.
    began_with = directory / "train_gpt.py"
    if config.resume_other_code or not began_with.is_file():
        return
    if began_with.read_bytes() != Path(__file__).read_bytes():
        raise ConfigError(f"RESUME={directory}: this script is not the one that the run began with; start "
                          f"{began_with} instead, or set RESUME_OTHER_CODE=1: the run's records will tell")


def check_is_new(directory: Path) -> None:
    """ConfigError where there is something at the place of a new run: nothing is overwritten."""
    # Also a link that leads nowhere is something.
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        what = "is a file"
    elif (directory / SUMMARY).exists():
        what = "holds a finished run"
    elif (directory / CHECKPOINT).exists():
        what = f"holds an unfinished run, which RESUME={directory} goes on with"
    elif (directory / "log.txt").exists():
        what = "holds a run that is under way, or that ended without a checkpoint"
    else:
        what = "is there already, and holds no run"
    advice = "nothing is overwritten: set another RUN_ID"
    raise ConfigError(f"RUN_ID={directory.name}: {directory} {what}; {advice}")


def check_room(directory: Path, config: Config) -> None:
    """ConfigError where a new run directory cannot be made, or its disk has no room for what it will hold."""
    # The nearest folder that exists is the one that will have to take the new ones.
    parent = directory.parent
    try:
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise ConfigError(f"RUNS_DIR={config.runs_dir}: {parent} is a file; set another RUNS_DIR")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not allowed to write there", str(parent))
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise ConfigError(f"RUNS_DIR={config.runs_dir}: {error}; {remedy_of(error)}") from error
    if config.eval_only:  # a log and a summary
        return
    # A checkpoint has weights, average, momenta and Adam's moments in fp32: at most 16 bytes a weight.
    needed = config.artifact_bytes_max + 2 * 16 * count_parameters(config)
    if config.save_float:
        needed += 4 * count_parameters(config)
    if free < needed:
        raise ConfigError(f"RUNS_DIR={config.runs_dir}: {free >> 20} MiB free, artifact and two checkpoints "
                          f"need {needed >> 20} MiB; {REMEDIES[errno.ENOSPC]}, or set another RUNS_DIR")


def count_parameters(config: ModelSettings) -> int:
    """Weights of the model."""
    return sum(math.prod(parameter.shape) for parameter in parameter_table(config).values())


def open_run(
    config: Config, run: Run, inputs: Inputs, directory: Path | None = None, notes: Iterable[str] = ()
) -> None:
    """Make the run directory, or reopen RESUME's, and begin its log in upstream's words. ConfigError.

    directory: as `choose_directory` gives it, which is asked if it is not given. notes: further lines.
    """
    directory = directory or choose_directory(config, run.machine)
    notes = [*notes, *idle_phases(config, inputs)]
    overrides = config.overrides()
    if run.machine.rank == 0:
        if config.resume:
            notes += keep_former_code(directory, inputs)
        else:
            make_directory(directory)
    run.directory = directory
    if run.machine.rank == 0:
        if not config.resume:
            write_inputs(config, run, inputs)
        for name, value in config.as_env().items():
            changed = "  # changed" if name in overrides else ""
            append_line(f"  {name}={value}{changed}", run.path("log.txt"))
    data = inputs.validation
    folder = find_path(config.data_path)
    machine = run.machine
    for line in (
        f"run:{run.directory}",
        f"Running Python {platform.python_version()} PyTorch {torch.__version__} on {machine.device_name} "
        f"dtype:{machine.dtype} compile:{int(machine.compiled)} threads:{torch.get_num_threads()}",
        f"overrides: {' '.join(f'{name}={value}' for name, value in overrides.items())}",
        *notes,
        f"train_loader:dataset:{folder.name} train_shards:{len(inputs.train_shards)}",
        f"val_loader:shards pattern={folder}/fineweb_val_*.bin tokens:{len(data.tokens) - 1} "
        f"bytes:{data.bytes_total}{data.mark}",
        f"model_params:{count_parameters(config)}",
        f"world_size:{machine.world_size} grad_accum_steps:{inputs.micro_steps}",
        f"train_batch_tokens:{config.train_batch_tokens} train_seq_len:{config.train_seq_len} "
        f"iterations:{config.iterations} warmup_steps:{config.warmup_steps} "
        f"max_wallclock_seconds:{config.max_wallclock_seconds:.3f}",
        f"seed:{config.seed}",
        *io_lines(config, machine),
        f"preflight:ok artifact:estimate {inputs.estimate}",
        *inputs.kernels.report,
        about_dtype(config, machine),
    ):
        run.log(line)


def io_lines(config: Config, machine: Machine) -> list[str]:
    """How training and validation get their data, in the words of PR #591."""
    copy_stream = config.train_copy_stream and machine.on_gpu
    return [
        f"train_io:prefetch:{config.train_prefetch} copy_stream:{copy_stream} "
        f"prefetch_queue:{config.train_prefetch_queue}",
        f"val_io:overlap:{machine.on_gpu} prefetch:{config.val_prefetch} bytecount_device:cpu "
        f"tokens_per_pass:{config.val_pass_tokens}",
    ]


def about_dtype(config: Config, machine: Machine) -> str:
    """The dtype of activations, why it is this one, and what to expect of it."""
    # A choice that a machine makes must be seen: two machines may choose differently.
    name = str(machine.dtype).removeprefix("torch.")
    device = "GPU" if machine.on_gpu else "CPU"
    if config.compute_dtype != "auto":
        why = f"as COMPUTE_DTYPE={config.compute_dtype} asks"
    elif machine.dtype == torch.bfloat16:
        why = f"this {device} has matrix units for it"
    else:
        why = f"this {device} has no matrix units for bfloat16"
    return f"compute_dtype:{name}, {why}; steps and scores compare only with runs of the same dtype"


def make_directory(directory: Path) -> None:
    """Make the directory of a new run. ConfigError where it cannot be made."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        check_is_new(directory)  # another run was faster
    except OSError as error:
        raise ConfigError(f"RUNS_DIR: no {directory} ({error}); {remedy_of(error)}") from error


def idle_phases(c: Config, inputs: Inputs) -> list[str]:
    """Warnings of parts of the run that are asked for and will do nothing."""
    found = []
    # Nothing is learnt from the last chunk: there must be another one before it.
    targets = len(inputs.validation.tokens) - 1
    if c.ttt_enabled and c.ttt_mode == "lora" and c.ttt_lora_lr == 0:
        found.append("TTT_ENABLED=1 TTT_MODE=lora learns nothing with TTT_LORA_LR=0")
    by_sgd = c.ttt_enabled and c.ttt_mode == "sgd"
    if by_sgd and targets <= c.ttt_chunk_tokens:
        found.append(f"TTT_ENABLED=1 learns nothing: the {targets} targets are one chunk of TTT_CHUNK_TOKENS="
                     f"{c.ttt_chunk_tokens}, and nothing is scored after it")
    if by_sgd and (c.ttt_epochs == 0 or c.ttt_lr == 0):
        found.append(f"TTT_ENABLED=1 learns nothing with TTT_EPOCHS={c.ttt_epochs} TTT_LR={c.ttt_lr:g}")
    if not c.eval_only:
        tokens = sum(shard.tokens for shard in inputs.train_shards)
        if c.train_batch_tokens > tokens:
            found.append(f"TRAIN_BATCH_TOKENS={c.train_batch_tokens} is more than the {tokens} tokens of the "
                         "training shards: each step repeats text")
        if c.num_loops > 0 and c.enable_looping_at >= 1:
            found.append(f"NUM_LOOPS={c.num_loops} is never trained with ENABLE_LOOPING_AT="
                         f"{c.enable_looping_at:g}, and is scored all the same")
        if c.ema_decay == 0 and c.ema_share != 1:
            found.append(f"EMA_SHARE={c.ema_share:g} does nothing with EMA_DECAY=0: there is no average")
        if not c.gptq and c.column_steps > 0:
            found.append(f"COLUMN_STEPS={c.column_steps:g} does nothing with GPTQ=0, whose factor it needs")
    return [f"warning: {line}" for line in found]


FORMER_CODE = "train_gpt.until_step*.py"


def keep_former_code(directory: Path, inputs: Inputs) -> list[str]:
    """Put another script in the place of that of a resumed run, whose own is kept; lines that tell it."""
    began_with = directory / "train_gpt.py"
    if not began_with.is_file():
        return [f"warning: {began_with} is gone: whether the run goes on with its own code is not known"]
    former = began_with.read_bytes()
    if former == inputs.source:
        return []
    # The name says up to where the code before made the run; a run may change its code several times.
    step = read_checkpoint(directory / CHECKPOINT, lazily=True)["step"]
    kept = directory / FORMER_CODE.replace("*", str(step))
    write_atomically(kept, former)
    write_atomically(began_with, inputs.source)
    write_atomically(directory / "train_gpt.shipped.py", inputs.shipped)
    return [f"warning: other code from step {step} on: sha256 {inputs.hashes['code']}, before it "
            f"{hashlib.sha256(former).hexdigest()}, kept as {kept.name}"]


def former_code(run: Run) -> list[dict[str, str]]:
    """The scripts that a resumed run went on from, for summary.json."""
    # The directory itself remembers: a run may have been resumed many times, and its summary comes last.
    found = []
    for path in sorted(run.path("").glob(FORMER_CODE)):
        found.append({"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    return found


def write_inputs(config: Config, run: Run, inputs: Inputs) -> None:
    """The script, as it is and as it is counted, and the settings, into the run directory."""
    assert run.directory is not None
    lines = [f"# The settings of {run.directory.name}; CONFIG=path/of/this/file starts such a run again."]
    for name, value in config.as_env().items():
        # What named this start would name or redirect the next one: it is there only to be read.
        lines.append(f"# {name}={value}" if name in SETTINGS_OF_A_START else f"{name}={value}")
    write_atomically(run.path("train_gpt.py"), inputs.source)
    write_atomically(run.path("train_gpt.shipped.py"), inputs.shipped)
    write_atomically(run.path(SETTINGS_FILE), ("\n".join(lines) + "\n").encode())


def summarize(
    config: Config, run: Run, inputs: Inputs, trained: Trained, about: About, scores: dict[str, Score]
) -> None:
    """Print sizes, limits and results, and write summary.json: the one record of a run. All ranks call it."""
    code_bytes = len(inputs.shipped)
    total_bytes = code_bytes + about.bytes
    form = f"{weights_form(config)}+rans"
    run.log(f"Code size: {code_bytes} bytes ({config.code_bytes})")
    run.log(f"Serialized model {form}: {about.bytes} bytes")
    run.log(f"Total submission size {form}: {total_bytes} bytes")

    eval_seconds = sum(seconds for name, seconds in run.phases.items() if name.startswith("eval_"))
    limits = {
        "train_seconds": judge(trained.train_seconds, config.max_wallclock_seconds),
        "eval_seconds": judge(eval_seconds, config.max_eval_seconds),
        "artifact_bytes": judge(total_bytes, config.artifact_bytes_max),
    }
    for name, verdict in limits.items():
        outcome = "ok" if verdict["ok"] else "EXCEEDED"
        run.log(f"limit:{name} {verdict['value']:.10g} of {verdict['limit']:.10g} {outcome}")

    summary = summary_of(config, run, inputs, trained, about)
    summary["losses"] = {name: score._asdict() for name, score in scores.items()}
    summary["limits"] = limits
    summary["exit"] = "finished"
    if run.machine.rank == 0:
        write_inputs(config, run, inputs)  # a resumed run's settings may be others than it began with
        write_atomically(run.path(SUMMARY), (json.dumps(summary, indent=1) + "\n").encode())
    results = " ".join(f"{name}={score.bits_per_byte:.4f}" for name, score in scores.items())
    run.log(f"done: bits per byte {results}; stream_hash:{trained.stream_hash}; files in {run.directory}")


def judge(value: float, limit: float) -> dict[str, Any]:
    """A limit and whether it was kept; 0: there is none."""
    return {"value": value, "limit": limit, "ok": limit == 0 or value <= limit}


def summary_of(config: Config, run: Run, inputs: Inputs, trained: Trained, about: About) -> dict[str, Any]:
    """What summary.json says of a run besides its results. All ranks call it together."""
    machine = run.machine
    data = inputs.validation
    # All ranks take part in this, so it comes before rank 0 writes.
    devices = machine.gather(machine.device_name)
    assert run.directory is not None
    return {
        "run_id": run.directory.name,
        "seed": config.seed,
        **trained._asdict(),
        "config": config.as_env(),
        "overrides": config.overrides(),
        "code": {
            "sha256": inputs.hashes["code"],
            "bytes": len(inputs.source),
            "bytes_wrapped": len(shipped_code(inputs.source, "wrapped")),
            "former": former_code(run),
        },
        "data": {
            "hashes": inputs.hashes,
            "train_tokens": sum(shard.tokens for shard in inputs.train_shards),
            "val_tokens": len(data.tokens) - 1,
            "val_bytes": data.bytes_total,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "cuda": torch.version.cuda,
            "triton": getattr(triton, "__version__", None),
        },
        "hardware": {
            "gpus": devices if machine.on_gpu else [],
            "world_size": machine.world_size,
            "cores": os.cpu_count(),
            "peak_memory_mib": torch.cuda.max_memory_allocated() >> 20,
        },
        "phases": run.phases,
        "artifact": about._asdict(),
        "comparable": not data.mark,
    }


if __name__ == "__main__":
    os._exit(main())  # peers may wait in a collective that this rank never joins
