"""Train, quantize and score a GPT under a hard budget: one file, from token shards to bits per byte.

    torchrun --standalone --nproc_per_node=8 train_gpt.py     # the 8-GPU run: the defaults
    CONFIG=configs/cpu_demo.env python train_gpt.py           # the whole job on a laptop
    EVAL_ONLY=runs/x/model.bin python train_gpt.py            # score an artifact in a fresh process
    python train_gpt.py --help                                # every variable

A run checks what a user can get wrong, compiles, trains for MAX_WALLCLOCK_SECONDS, writes an artifact that,
with the code, just fits ARTIFACT_BYTES_MAX, and scores what that file gives back. All that it writes lies in
runs/<RUN_ID>/.

The file reads from top to bottom: no section uses anything defined below it.

    SETTINGS · MACHINE · MODEL · KERNELS · OPTIMIZER · SCHEDULE · RUN · TIMING · DATA · EVALUATION
    QUANTIZE · CODER · ARTIFACT · TRAIN · main

PR and issue numbers are those of openai/parameter-golf, unless another repository is named; its baseline
script is called upstream, and log lines keep the words of its lines.

Shape suffixes: B rows, T positions, D model width, F MLP width, H query heads, K key heads (in weights: all
their channels), E channels of a head, V vocabulary, L layers, S skips, P parallel layers, W gate channels,
N anything flattened or batched, R matrix rows, C matrix columns; in KERNELS M, N, K as usual for products.
"""

import ast
import bz2
import contextlib
import copy
import difflib
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
import struct
import sys
import tempfile
import threading
import time
import traceback
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
except ImportError:  # macOS, Windows, CPU-only installs: the plain PyTorch twins run instead
    triton = None

Array = np.ndarray  # on the host; a Tensor may lie on a GPU

# ============================================================================================================
# SETTINGS — one setting a line; a wrong one is refused by name, before anything starts.
# ============================================================================================================


class ConfigError(ValueError):
    """A setting is unknown, mistyped, out of range, or contradicts another one."""


class DataError(RuntimeError):
    """A shard or tokenizer is missing, damaged, of another kind, or does not fit; or their loader stalled."""


class ArtifactError(RuntimeError):
    """An artifact does not fit its budget, or a file is not an artifact that can be trusted."""


NO_LIMIT = 1e300  # stand-in for "no limit" that still refuses inf and nan


def setting(
    default: Any, meaning: str, low: float = 0, high: float = NO_LIMIT, among: str = "", pattern: str = ".*"
) -> Any:
    """One setting: its default, and its meaning with unit.

    low, high: the range of a number. among: the choices, separated by spaces. pattern: text must match it.
    """
    choices = "0 1" if isinstance(default, bool) else among
    metadata = {"meaning": meaning, "low": low, "high": high, "among": choices.split(), "pattern": pattern}
    return field(default=default, metadata=metadata)


def find_path(path: str) -> Path:
    """Look for `path` in the working directory, then in the script's folder and those above it.

    Returns the path unchanged if it is nowhere.
    """
    # Unlike Path.exists, os.path.exists returns False for names that cannot exist.
    given = Path(os.path.expanduser(path))
    for folder in (Path(), *Path(__file__).resolve().parents):
        if os.path.exists(folder / given):
            return folder / given
    return given


Settings = TypeVar("Settings", bound="ModelSettings")
Rule = tuple[bool, str]  # whether it holds, and what it expects, in the names of settings


@dataclass(frozen=True)
class ModelSettings:
    """The settings that define the model. The artifact stores them.

    In the environment their names are upper case. The class of a setting decides which file stores it:
    ModelSettings the artifact, TrainingSettings the checkpoint too, Config the run directory alone. A new
    setting here changes the artifact: load older ones with the script that wrote them. A name without a type
    is a constant, which nobody sets.
    """

    # The text.
    train_seq_len: int = setting(2048, "tokens of a training sequence", 1, 1 << 20)
    doc_mask: bool = setting(True, "attention and token shifts stay inside a document")
    vocab_size: int = setting(8192, "tokens in the vocabulary", 4, 65_536)
    # Size.
    num_layers: int = setting(11, "blocks that own weights", 1, 256)
    model_dim: int = setting(512, "width of the residual stream", 16)
    num_heads: int = setting(8, "query heads", 1)
    num_kv_heads: int = setting(4, "key and value heads", 1)
    mlp_mult: float = setting(4.0, "MLP width / MODEL_DIM", 0.125)
    leaky_slope: float = setting(0.5, "MLP activation LeakyReLU(slope)²; 0: relu²", 0, 1)
    # Positions: some channels of each head are rotated, the others compare contents alone.
    rope_base = 10_000.0
    rope_dims: int = setting(16, "rotated dimensions of each head; 0: all")
    rope_train_seq_len: int = setting(2560, "tokens; longer inputs rescale the base; 0: TRAIN_SEQ_LEN")
    # Attention, and bounds on deep layers.
    ln_scale: bool = setting(True, "scale block inputs by 1/sqrt(layer + 1)")
    qk_gain_init: float = setting(5.25, "initial learned gain of each query head")
    xsa_last_n: int = setting(11, "number of last layers with XSA")
    sparse_attn_gate_enabled: bool = setting(True, "gate each head by the first 12 channels of its input")
    gate_window = 12  # channels that feed this gate and the next
    # The token before, and the skips of the U-Net.
    smear_gate_enabled: bool = setting(True, "mix in the previous token's embedding, gated by 12 channels")
    channel_smear_enabled: bool = setting(False, "mix it in once more, a fixed share per channel (PR #549)")
    skip_gates_enabled: bool = setting(True, "U-Net skips interpolate; 0: they add")
    # Depth recurrence: some layers run several times with the same weights (PR #1493).
    num_loops: int = setting(2, "extra passes over LOOP_START..LOOP_END; 0: none", 0, 16)
    loop_start: int = setting(3, "first looped layer")
    loop_end: int = setting(5, "last looped layer")
    enable_looping_at: float = setting(0.35, "progress at which the loop switches on; from 1 on: never")
    # From this layer on, attention and MLP run in parallel.
    parallel_start_layer: int = setting(8, "first layer with parallel attention and MLP; -1: none", -1)
    parallel_mode: str = setting("lanes", "two residual lanes, or one (GPT-J)", among="lanes gptj")
    # Tables of bigram hashes and value embeddings (PR #549).
    bigram_vocab_size: int = setting(0, "rows for hashed pairs, added to embeddings; 0: none")
    bigram_dim: int = setting(128, "width of these rows, projected to MODEL_DIM", 2)
    ve_enabled: bool = setting(False, "add an embedding of the token to the values of attention")
    ve_dim: int = setting(128, "width of that embedding, projected to all key heads", 2)
    ve_layers: str = setting("9,10", "layers that add it, as 9,10", pattern="[0-9]{1,3}(,[0-9]{1,3})*")
    # Both ends of the model.
    tie_embeddings: bool = setting(True, "the output head is the input embedding; 0: a matrix of its own")
    tied_embed_init_std = 0.005  # of that embedding; untied: 1
    matrix_init: str = setting("orthogonal", "initial block matrices", among="orthogonal uniform")
    # At most 60: exp(60), summed over a vocabulary, stays below exp(88.7), fp32's largest number.
    logit_softcap: float = setting(30.0, "logits are bounded by c·tanh(x/c); 0: unbounded", 0, 60)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.model_dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        """Channels of all key heads together; the value heads have as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP's hidden layer."""
        return int(self.mlp_mult * self.model_dim)

    @property
    def activation_number(self) -> float:
        """What `activation` gets beside its input, in the model and where a fused form is tried."""
        return self.leaky_slope

    @property
    def rotated_dims(self) -> int:
        """Channels of a head that the rotary embedding turns."""
        return self.rope_dims or self.head_dim

    @property
    def value_layers(self) -> list[int]:
        """The layers that add a value embedding."""
        return [int(layer) for layer in self.ve_layers.split(",")] if self.ve_enabled else []

    def rules(self) -> list[Rule]:
        """The rules between these settings."""
        return [
            (self.model_dim % self.num_heads == 0, "MODEL_DIM as a multiple of NUM_HEADS"),
            (self.num_heads % self.num_kv_heads == 0, "NUM_HEADS as a multiple of NUM_KV_HEADS"),
            (self.rotated_dims % 2 == 0, "ROPE_DIMS (0: MODEL_DIM / NUM_HEADS) even"),
            (self.rope_dims <= self.head_dim, "ROPE_DIMS <= MODEL_DIM / NUM_HEADS"),
            (self.num_loops == 0 or self.loop_start <= self.loop_end < self.num_layers,
             "LOOP_START <= LOOP_END < NUM_LAYERS"),
            (self.bigram_vocab_size != 1, "BIGRAM_VOCAB_SIZE of 2 at least, or 0"),
            (max(self.value_layers, default=0) < self.num_layers, "VE_LAYERS as numbers < NUM_LAYERS"),
        ]

    def as_env(self, part: "type[ModelSettings] | None" = None) -> dict[str, str]:
        """Settings as strings that `from_values` reads back: all, or those of one class."""
        env = {}
        for spec in fields(part or type(self)):
            value = getattr(self, spec.name)
            env[spec.name.upper()] = str(int(value) if isinstance(value, bool) else value)
        return env

    @classmethod
    def from_values(cls: type[Settings], values: Mapping[str, str]) -> Settings:
        """The settings of this class in `values`, over the defaults. ConfigError for a wrong one."""
        given = {}
        for spec in fields(cls):
            name = spec.name.upper()
            if name in values:
                given[spec.name] = parse_value(name, values[name], spec)
        settings = cls(**given)
        # A rule names its settings: the message shows their values.
        for holds, expected in settings.rules():
            if not holds:
                named = re.findall(r"[A-Z_]{2,}", expected)
                got = [f"{name}={value}" for name, value in settings.as_env().items() if name in named]
                raise ConfigError(f"expected {expected}; got {', '.join(got)}")
        return settings


@dataclass(frozen=True)
class TrainingSettings(ModelSettings):
    """The settings that decide the trained weights. A checkpoint stores them, so a resumed run keeps them."""

    # Which tokens, how many, for how long.
    seed: int = setting(1337, "initial weights and data order", 0, 2**63 - 1)
    train_batch_tokens: int = setting(786_432, "tokens; one optimizer step, all ranks together", 1)
    shuffle: bool = setting(True, "permute shards and sequences by SEED; 0: file order")
    iterations: int = setting(20_000, "steps; upper bound when a wall clock is set; 0: none")
    max_wallclock_seconds: float = setting(600.0, "seconds of training with Hessians; 0: ITERATIONS")
    # Learning rates of the groups of parameters.
    matrix_lr: float = setting(0.028, "Muon, block matrices")
    scalar_lr: float = setting(0.02, "AdamW, small tensors")
    tied_embed_lr: float = setting(0.03, "AdamW, embeddings with TIE_EMBEDDINGS=1")
    embed_lr: float = setting(0.6, "AdamW, embeddings with TIE_EMBEDDINGS=0")
    head_lr: float = setting(0.008, "AdamW without decay, the output head with TIE_EMBEDDINGS=0")
    # Muon, for the matrices.
    muon_momentum: float = setting(0.97, "final momentum", 0, 0.9999)
    muon_momentum_warmup_start: float = setting(0.92, "first momentum", 0, 0.9999)
    muon_momentum_warmup_frac: float = setting(0.3, "progress over which momentum rises", 0, 1)
    muon_momentum_warmup_steps: int = setting(-1, "steps of that rise; 0: none; -1: fraction", -1)
    muon_backend_steps: int = setting(5, "Newton-Schulz iterations", 1, 20)
    muon_polar_express: bool = setting(True, "Polar Express coefficients; 0: one fixed quintic")
    muon_row_normalize: bool = setting(True, "normalise rows before orthogonalising")
    # Weight decay; AdamW, for the rest.
    muon_wd: float = setting(0.095, "decoupled weight decay of matrices")
    embed_wd: float = setting(0.085, "decoupled weight decay of embeddings")
    adam_wd: float = setting(0.02, "decoupled weight decay of small tensors")
    beta1: float = setting(0.9, "AdamW", 0, 0.9999)
    beta2: float = setting(0.99, "AdamW", 0, 0.99999)
    adam_eps = 1e-8
    # All of them.
    grad_clip_norm: float = setting(0.3, "bound on the global gradient norm; 0: none")
    ema_decay: float = setting(0.9965, "decay per step of the average of weights; 0: none", 0, 0.99999)
    # The schedule of the learning rates.
    warmdown_frac: float = setting(0.85, "last part of the run in which learning rates fall", 0, 1)
    warmdown_iters: int = setting(-1, "steps of that fall, at the mean step time; 0: none; -1: fraction", -1)
    min_lr: float = setting(0.1, "floor of the falling learning rate, as a share of it", 0, 1)


@dataclass(frozen=True)
class Config(TrainingSettings):
    """All settings. The defaults are the run on 8 GPUs."""

    # --- the artifact ---
    artifact_bytes_max: int = setting(16_000_000, "bytes; shipped code and artifact together", 1000)
    rate_control: bool = setting(True, "scale steps until the budget is full; 0: bits and clips as given")
    # A step is clip / (2^(bits - 1) - 1) standard deviations. RATE_CONTROL multiplies all steps by one
    # factor: then only their ratios count, and where weights are clipped.
    matrix_bits: int = setting(6, "bits of block matrices at their clip", 2, 8)
    embed_bits: int = setting(7, "bits of embeddings, in the same way", 2, 8)
    mlp_clip_sigmas: float = setting(11.5, "clip of MLP matrices, in standard deviations of a row", 0.1)
    attn_clip_sigmas: float = setting(13.0, "clip of attention matrices", 0.1)
    embed_clip_sigmas: float = setting(14.0, "clip of embeddings", 0.1)
    trellis: bool = setting(True, "codes on two grids half a step apart (TCQ); 0: one grid")
    column_steps: float = setting(0.5, "power of the GPTQ factor in column steps; 0: one step a row", 0, 1)
    gptq: bool = setting(True, "round with second-order information; 0: to nearest, all else alike")
    gptq_damping: float = setting(0.01, "share of the mean diagonal added to Hessians", 1e-6)
    gptq_calibration_batches: int = setting(64, "micro-batches of training data, all ranks together", 1)
    gptq_reserve_seconds: float = setting(4.0, "seconds of the clock for Hessians; fewer batches if short")
    # --- its evaluation ---
    eval_seq_len: int = setting(2560, "tokens of context; 0: TRAIN_SEQ_LEN")
    eval_stride: int = setting(64, "targets scored per window; 0: no sliding window")
    ttt_enabled: bool = setting(True, "score with legal test-time training as well")
    ttt_mode: str = setting("lora", "train all weights (sgd) or low-rank adapters (lora)", among="sgd lora")
    # TTT_MODE=sgd: the weights learn from the text chunk by chunk; names and values of PR #549.
    ttt_lr: float = setting(0.005, "SGD; falls along a cosine over the chunks")
    ttt_epochs: int = setting(3, "passes over each scored chunk")
    ttt_momentum = 0.9  # SGD
    ttt_chunk_tokens: int = setting(32_768, "targets scored before the next update", 1)
    ttt_batch_seqs: int = setting(32, "sequences of one SGD step, all ranks together", 1)
    ttt_grad_clip = 1.0  # bound on the gradient norm
    # TTT_MODE=lora: adapters learn from their document chunk by chunk; names of PR #1855, values of PR #2067.
    ttt_lora_targets: str = setting(
        "q,k,v,o,mlp,head", "modules with adapters: projections, attention, MLP, output head",
        pattern="(q|k|v|o|mlp|head)(,(q|k|v|o|mlp|head))*")  # fmt: skip
    ttt_lora_rank: int = setting(224, "rank of an adapter", 1)
    ttt_lora_alpha: float = setting(144.0, "an adapter's output is scaled by this over TTT_LORA_RANK")
    ttt_lora_lr: float = setting(6.1e-5, "AdamW, adapters")
    ttt_beta2 = 0.99  # AdamW, adapters, like the next one; β1 is 0
    ttt_weight_decay = 0.5
    ttt_chunk_size: int = setting(48, "targets of a document scored before the next step of its adapters", 1)
    ttt_batch_size: int = setting(0, "documents side by side on one rank; 0: rows of a micro-batch")
    # --- the data and their way to the device ---
    data_path: str = setting("data/datasets/fineweb10B_sp8192_lossless_caps_caseops_v1_reserved",
                             "folder of fineweb_{train,val}_*.bin shards")  # fmt: skip
    tokenizer_path: str = setting("data/tokenizers/fineweb_8192_bpe_lossless_caps_caseops_v1_reserved.model",
                                  "their SentencePiece model")  # fmt: skip
    micro_batch_tokens: int = setting(98_304, "tokens; one forward pass of one rank; bounds memory", 1)
    train_prefetch: bool = setting(True, "read and stage batches in threads; 0: the plain synchronous path")
    train_prefetch_queue: int = setting(2, "batches staged ahead of the step", 1, 1024)
    train_copy_stream: bool = setting(True, "copy batches to the GPU on a stream of their own")
    val_prefetch: bool = setting(True, "copy validation to the device before scoring; 0: batch by batch")
    val_tokens_limit: int = setting(0, "targets; score only the first ones: NOT comparable; 0: all")
    # --- the run ---
    run_id: str = setting("", "plain name of the run directory; empty: date, time and seed",
                          pattern=r"|[^./\\][^/\\]{0,199}")  # fmt: skip
    runs_dir: str = setting("runs", "folder that holds the run directories")
    max_eval_seconds: float = setting(600.0, "seconds of the score that ranks; it may learn less; 0: none")
    warmup_steps: int = setting(
        20, "untimed steps that compile each graph, after a rehearsal of the end; undone; 0: none", 0, 1000)
    train_log_every: int = setting(50, "steps between train lines, after the first ten; 0: no train lines")
    val_loss_every: int = setting(0, "steps between validations, first and last; 0: none")
    val_batch_size: int = setting(524_288, "tokens scored at once by eight ranks together", 1)
    val_progress_log_every: int = setting(10, "seconds between progress lines of a score; 0: none")
    training_timing_breakdown: bool = setting(False, "print where the milliseconds of a step go")
    training_timing_every: int = setting(200, "steps between those lines; the first ten are printed too", 1)
    trace_steps: str = setting("", "A:B; trace steps A to B - 1, of 1 …, for ui.perfetto.dev; empty: none",
                               pattern="|[1-9][0-9]{0,8}:[0-9]{1,9}")  # fmt: skip
    profile_steps: str = setting("", "A:B; as TRACE_STEPS, with torch.profiler's trace beside; empty: none",
                                 pattern="|[1-9][0-9]{0,8}:[0-9]{1,9}")  # fmt: skip
    device: str = setting("auto", "where to run", among="auto cpu cuda")
    cpu_threads: int = setting(0, "threads of torch on the CPU; 0: its own number", 0, 1024)
    compile: str = setting("auto", "torch.compile; auto: on CUDA", among="auto 0 1")
    compute_dtype: str = setting(
        "auto", "activations; auto: where fast; float32 is TF32 in products of GPUs that have it",
        among="auto float32 bfloat16")  # fmt: skip
    attention: str = setting("auto", "kernel; auto: the first that passes", among="auto fa3 varlen fa2 sdpa")
    fused_mlp: str = setting("auto", "Triton MLP; auto: CUDA in bf16, if right and fast", among="auto 0 1")
    fused_heads: str = setting("auto", "Triton norm, rotary, XSA; auto: CUDA if it passes", among="auto 0 1")
    checkpoint_every_seconds: float = setting(
        0.0, "seconds between checkpoints; 0: on a signal, and on a GPU at the end of training")
    resume: str = setting("", "continue the unfinished run in this directory")
    resume_other_code: bool = setting(False, "let RESUME go on with another script than the run's; recorded")
    save_float: bool = setting(False, "write the weights before quantization too, as final_model.pt")
    eval_only: str = setting("", "score this artifact instead of training")

    @property
    def eval_length(self) -> int:
        """Tokens of context in evaluation."""
        return self.eval_seq_len or self.train_seq_len

    @property
    def val_pass_tokens(self) -> int:
        """Tokens of one scoring pass of one rank.

        Upstream splits VAL_BATCH_SIZE over ranks and micro-steps, whose product is always eight. So does this
        script, on any number of ranks.
        """
        return max(1, self.val_batch_size // 8)

    @property
    def lora_targets(self) -> list[str]:
        """The modules that have adapters with TTT_MODE=lora."""
        return self.ttt_lora_targets.split(",")

    @property
    def lora_scale_root(self) -> float:
        """A and B have the root of an adapter's scale each."""
        return math.sqrt(self.ttt_lora_alpha / self.ttt_lora_rank)

    @property
    def documents_at_once(self) -> int:
        """Documents that learn side by side on one rank; by default as many as a micro-batch has rows.

        Each needs the memory of a row, and that of its adapters, their gradients and moments.
        """
        return self.ttt_batch_size or max(1, self.micro_batch_tokens // self.eval_length)

    @property
    def traced_steps(self) -> range:
        """The steps of TRACE_STEPS or PROFILE_STEPS; the first step of a run is 1."""
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
             "TTT_CHUNK_TOKENS >= EVAL_SEQ_LEN (0: TRAIN_SEQ_LEN), and a multiple of EVAL_STRIDE, which is "
             "above 0, for TTT_MODE=sgd"),
            (ttt_mode != "lora" or self.ttt_chunk_size <= self.eval_length,
             "TTT_CHUNK_SIZE <= EVAL_SEQ_LEN (0: TRAIN_SEQ_LEN) for TTT_MODE=lora"),
            (not self.gptq or clock == 0 or self.gptq_reserve_seconds < clock,
             "GPTQ_RESERVE_SECONDS < MAX_WALLCLOCK_SECONDS"),
            (not self.trace_steps or not self.profile_steps, "either TRACE_STEPS or PROFILE_STEPS"),
            (not window or len(self.traced_steps) > 0, "TRACE_STEPS or PROFILE_STEPS as A:B with A < B"),
            (not self.resume or not self.eval_only, "either RESUME or EVAL_ONLY"),
        ]  # fmt: skip

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Config":
        """Settings from `environ`, over the file that it names as CONFIG, over the defaults. ConfigError."""
        return cls.from_values(read_settings(environ))

    def overrides(self) -> dict[str, str]:
        """The settings that differ from their default, as strings, in the order of their names."""
        return dict(sorted(self.as_env().items() - Config().as_env().items()))


def parse_value(name: str, text: str, spec: Field[Any]) -> Any:
    """The value of one variable in its field's type. ConfigError says which values are expected."""
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
    # A file of KEY=VALUE lines must be able to hold every value.
    if not fits or not text.isprintable():
        raise ConfigError(f"{name}={text!r}: expected {expected}; {limits['meaning']}")
    return value


def similar_setting(name: str) -> str:
    """The setting whose name is most like `name`; empty if none is close."""
    # Of a short name one letter is a larger share.
    cutoff = 0.75 if len(name) < 5 else 0.83
    return "".join(difflib.get_close_matches(name, Config().as_env(), 1, cutoff))


def read_config_file(path: str) -> dict[str, str]:
    """The KEY=VALUE lines of a file. # begins a comment. ConfigError for a name that is no setting."""
    known = Config().as_env()
    values = {}
    try:
        lines = find_path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"CONFIG={path}: {error}; name a file of KEY=VALUE lines") from error
    for number, line in enumerate(lines, 1):
        # A # inside a value is part of it, as in a path.
        pair = re.split(r"(?:^|\s)#", line)[0].strip()
        if not pair:
            continue
        name, equals, value = (part.strip() for part in pair.partition("="))
        if name not in known or not equals:
            raise ConfigError(
                f"CONFIG={path} line {number}: {pair!r} is no KEY=VALUE of a setting; did you mean "
                f"{similar_setting(name) or 'one that --help lists'}? A run's config.env needs the "
                "train_gpt.py of that run")
        values[name] = value
    return values


def read_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """All variables of `environ`, over the settings in the file that it names as CONFIG. ConfigError.

    Without CONFIG, a shipped script has the settings of its run, which its wrapper holds; CONFIG=none: none.
    """
    settings = globals().get("SHIPPED_SETTINGS", {})
    path = environ.get("CONFIG")
    if path:
        settings = {} if path == "none" else read_config_file(path)
    return {**settings, **environ}


# main calls it once, after Config.from_env, and logs the lines: answers = public_answers(environ)
def public_answers(environ: Mapping[str, str]) -> list[str]:
    """Lines for the log about variables of other scripts. ConfigError if one would train something else.

    configs/public_names.json has the answers to the names of public scripts. Other names are refused if
    they resemble a setting. A name of fewer than six letters may be anybody's: it gives a warning.
    A script without that file looks for misspelt settings alone.
    """
    path = find_path("configs/public_names.json")
    public = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"names": [], "commands": {}}
    known = Config().as_env()
    rows = {}
    for row in public["names"]:
        for name in row["names"].split():
            # A former name may be a setting of a fork.
            if name not in known or "of_ours" in row:
                rows[name] = row
    values = {**known, **read_settings(environ)}

    # A public command without its configuration would train a mixture of its model and the default.
    given = {name: value for name, value in environ.items() if name in known or name in rows}
    shared = {config: len(given.items() & command.items()) for config, command in public["commands"].items()}
    nearest = max(shared, key=shared.__getitem__, default="")
    if nearest and shared[nearest] >= max(5, len(given) / 2) and not environ.get("CONFIG"):
        raise ConfigError(f"this command is of another model than the default; put CONFIG={nearest} before "
                          "it to run that model, or CONFIG=none to run the default with these settings")

    lines = []
    refused = []
    for name, value in sorted(environ.items()):
        row = rows.get(f"{name}={value}") or rows.get(name)
        near = "" if row or name in known else similar_setting(name)
        if near:
            row = {"answer": f"no setting; did you mean {near}?", "harmless": ""}
        if not row:
            continue
        line = f"{name}={value}: {row['answer']}"
        # The name of a setting stands for its value.
        accepted = [values.get(word, word) for word in row["harmless"].split()]
        if value in ("", *accepted) or "*" in accepted:
            lines.append(f"note: {line}")
        elif len(name) < 6:
            lines.append(f"warning: {line}")
        else:
            refused.append(line)
    if refused:
        raise ConfigError(" | ".join(refused))
    return lines


def micro_steps_per_step(config: Config, world_size: int) -> int:
    """Micro-batches of one rank per optimizer step. ConfigError when the batch does not split evenly."""
    wanted = config.train_batch_tokens
    length = config.train_seq_len
    # As many whole sequences as one forward pass may hold, and no more than the step gives a rank.
    micro_sequences = min(config.micro_batch_tokens // length, wanted // length // world_size)
    tokens_together = world_size * max(1, micro_sequences) * length
    if micro_sequences == 0 or wanted % tokens_together != 0:
        raise ConfigError(
            f"TRAIN_BATCH_TOKENS={wanted}: expected a multiple of {tokens_together}, {world_size} ranks by "
            f"the sequences of TRAIN_SEQ_LEN={length} tokens that fit in "
            f"MICRO_BATCH_TOKENS={config.micro_batch_tokens}, one at least")  # fmt: skip
    return wanted // tokens_together


# ============================================================================================================
# MACHINE — one process: its rank, its device, its peers.
# ============================================================================================================


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Machine:
    """Where this process computes and who its peers are: the one place that knows a rank."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32  # of activations: bfloat16 where matrix units take it
    compiled: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_name(self) -> str:
        """What the device is called: a GPU by its name, a CPU by the instructions that torch uses there."""
        if self.on_gpu:
            return torch.cuda.get_device_name(self.device)
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} CPU"

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled where that is wanted: as one graph, as a break would cost more than we gain.

        Only marked sizes may change. With dynamic=True settings would not be constants, which kernels need.
        """
        if not self.compiled:
            return function
        # Torch 2.11 fuses sums over rows with sums over columns, and at the looped graph that ends in an
        # AssertionError. Torch 2.9 has no such fusion.
        fusions = torch._inductor.config.triton
        if hasattr(fusions, "mix_order_reduction"):
            fusions.mix_order_reduction = False
        return torch.compile(function, dynamic=False, fullgraph=True)

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


# ============================================================================================================
# MODEL — weights live in banks, one 3-D parameter per shape; one block serves training, scoring, calibration.
# ============================================================================================================

# --- documents: where they begin, and how the device learns it ---

BOS_ID = 1  # begins every document, in all of the challenge's tokenizers


def document_starts(inputs_BT: Array, c: ModelSettings) -> Array:
    """Where rows and, with DOC_MASK, documents begin in the flattened inputs, then B T; int32, all different.

    Varlen attention reads them as its cu_seqlens.
    """
    begins_BT = (inputs_BT == BOS_ID) & c.doc_mask
    # Nothing attends across rows. A row that begins with a document counts once: no document is empty.
    begins_BT[:, 0] = True
    return np.append(np.flatnonzero(begins_BT), inputs_BT.size).astype(np.int32)


def to_device(array: Array, device: torch.device) -> Tensor:
    """The array as a tensor on the device. The host does not wait for a GPU that is still at work."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def starts_to_device(host_starts: Array, device: torch.device) -> Tensor:
    """The `document_starts` of a batch on the device, for compiled code."""
    starts = to_device(host_starts, device)
    torch._dynamo.mark_dynamic(starts, 0)  # or torch recompiles for every number of documents
    return starts


def starts_on_device(ids_BT: Tensor, c: ModelSettings) -> Tensor:
    """The `document_starts` of ids on a device. It waits for the device, which compiled code cannot."""
    return starts_to_device(document_starts(ids_BT.cpu().numpy(), c), ids_BT.device)


# --- parameters: one table says how each is initialised, optimised and quantized ---


class Parameter(NamedTuple):
    """Everything that the rest of the file knows about one parameter."""

    # Row i of the first axis belongs to layer i (or to use i). Muon needs three axes: a bank of matrices,
    # their rows, their columns.
    shape: tuple[int, ...]
    # The first weights: a constant (a list fills the last axis), or normal with standard deviation `std`.
    # Then the first `random_matrices` of a bank are drawn as MATRIX_INIT says.
    constant: float | list[float] = 0.0
    std: float = 0.0
    random_matrices: int = 0
    # muon: MATRIX_LR and MUON_WD. scalar: SCALAR_LR and ADAM_WD. embedding: TIED_EMBED_LR and EMBED_WD; a
    # table of the vocabulary, used as a whole. head: HEAD_LR; such a table that only TIE_EMBEDDINGS=0 has.
    optimizer: str = "scalar"
    # The group of quantization: attn, mlp or embed, with the *_CLIP_SIGMAS of that name, and EMBED_BITS or
    # MATRIX_BITS. Empty: a small tensor, always 8 bits.
    role: str = ""
    # The inputs of its matrices, by the names given to `observe`: matrix i of a bank has the Hessian
    # (name, i). With two names the second half counts from 0 again. Without a name GPTQ rounds to nearest.
    inputs: tuple[str, ...] = ()


def parameter_table(c: ModelSettings) -> dict[str, Parameter]:
    """Every parameter of the model by name, in the order in which they are stored.

    A line here initialises, optimises, quantizes, stores and checkpoints a parameter. Layers read it as
    `weights[name][layer]`.

    Names end in their axes, except those of banks. `qo_bank` holds all query matrices, then all output
    matrices. `kv_bank` holds all keys, then all values. The other banks hold one matrix a layer. Output and
    down matrices write to the residual stream and start at zero.
    """
    layers = c.num_layers
    width = c.model_dim
    skips = len(visit_order(c, looping=True)) // 2
    lane_layers = sum(is_parallel(layer, "lanes", c) for layer in range(layers))
    table = {
        "token_embedding_VD": Parameter(
            (c.vocab_size, width), std=c.tied_embed_init_std,
            optimizer="embedding", role="embed", inputs=("hidden",)),
        **older_tables(c),
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
    }  # fmt: skip
    if skips:
        table["skip_weight_SD"] = Parameter((skips, width), 1.0)
        if c.skip_gates_enabled:
            table["skip_gate_SD"] = Parameter((skips, width))
    if c.sparse_attn_gate_enabled:
        table["attn_gate_LHW"] = Parameter((layers, c.num_heads, c.gate_window))
    if c.smear_gate_enabled:
        table["smear_gate_1W"] = Parameter((1, c.gate_window))
        table["smear_scale_1"] = Parameter((1,))
    table.update(older_vectors(c))
    if lane_layers:
        # For each of the two lanes: how much it keeps of itself, of attention's output, of the MLP's.
        table["lane_mix_P23"] = Parameter((lane_layers, 2, 3), [1.1, 1.0, 1.0])
    return table


def count_parameters(c: ModelSettings) -> int:
    """How many weights the model has."""
    return sum(math.prod(parameter.shape) for parameter in parameter_table(c).values())


def generator_of(text: str) -> torch.Generator:
    """Random numbers that depend on the text alone: its CRC-32 is the same on every machine."""
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


def initial_weights(name: str, parameter: Parameter, c: ModelSettings, seed: int) -> Tensor:
    """The first weights of a parameter. They depend on seed and name alone: no feature changes another's."""
    generator = generator_of(f"{seed} {name}")
    weights = torch.empty(parameter.shape).copy_(torch.tensor(parameter.constant))
    if parameter.std:
        weights.normal_(0.0, parameter.std, generator=generator)
    for matrix in weights[: parameter.random_matrices]:
        if c.matrix_init == "orthogonal":
            nn.init.orthogonal_(matrix, generator=generator)
        else:  # torch's own for a linear layer: ±1 / sqrt(inputs)
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
    return weights


def visit_order(c: ModelSettings, looping: bool) -> list[int]:
    """The layers in the order they run; the first half are the U-Net's encoder (PR #1493)."""
    layers = list(range(c.num_layers))
    if looping and c.num_loops > 0:  # LOOP_START and LOOP_END have no meaning without extra passes
        first = c.loop_start
        after = c.loop_end + 1
        # The looped layers follow one another as a group, not each by itself.
        layers = layers[:first] + layers[first:after] * (c.num_loops + 1) + layers[after:]
    return layers


def is_parallel(layer: int, mode: str, c: ModelSettings) -> bool:
    """Whether attention and MLP of a layer read side by side, in this PARALLEL_MODE.

    lanes: each reads a residual lane of its own (PR #1529). gptj: both read the same one (PR #1493).
    """
    return c.parallel_mode == mode and 0 <= c.parallel_start_layer <= layer


# --- plain forms: the mathematics of a layer; KERNELS has faster twins of some ---

Operation = Callable[..., Tensor]  # of a layer: a plain form, or its faster twin
RMS_NORM_EPS = 2.0**-23  # the same for every version of torch
XSA_MIN_SQUARE = 1e-24  # of a value's length: nothing is divided by zero


def rms_norm(x: Tensor, scale: float = 1.0) -> Tensor:
    """x divided by its root mean square along the last axis (arXiv 1910.07467), times `scale`."""
    normalized = F.rms_norm(x, (x.size(-1),), eps=RMS_NORM_EPS)
    return normalized if scale == 1.0 else normalized * scale


def rotary_table(length: int, c: ModelSettings, device: torch.device = CPU, longest: int = 0) -> Tensor:
    """Cosines and sines (2, T, 1, rotated/2). Inputs longer than in training get a larger base (PR #549).

    longest: tokens of the longest input that shares this base; 0: `length`.
    """
    rotated = c.rotated_dims
    base = c.rope_base
    trained_length = c.rope_train_seq_len or c.train_seq_len
    # The slowest pair of channels slows down by the whole stretch: its angles stay within those of training.
    # The fastest pair keeps its speed. All inputs up to TRAIN_SEQ_LEN have the same base.
    stretch = max(longest or length, c.train_seq_len) / trained_length
    if stretch > 1 and rotated > 2:
        base *= stretch ** (rotated / (rotated - 2))
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64, device=device) / rotated
    # In float64: angles of thousands of radians lose digits in fp32.
    positions_T11 = torch.arange(length, dtype=torch.float64, device=device)[:, None, None]
    angles = positions_T11 * base ** (-exponents)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x_BTHE: Tensor, rotary: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) of the first channels of each head; the others pass unchanged.

    rotary: a `rotary_table`. The first half of the rotated channels pairs with the second half.
    """
    cos, sin = rotary
    half = cos.size(-1)
    a, b, rest = x_BTHE.split([half, half, x_BTHE.size(-1) - 2 * half], dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin, rest], dim=-1)


class Heads(NamedTuple):
    """The input of attention, (B, T, heads, E)."""

    q_BTHE: Tensor
    k_BTKE: Tensor
    v_BTKE: Tensor
    own_BTKE: Tensor  # the values once more, for XSA: the gradients of the two uses stay apart


def heads_plain(qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor) -> Heads:
    """Split projected inputs into the query, key and value heads of attention.

    Normalised queries and keys have cosines as products; the learned gain of each query head sharpens them.
    The heads N are the H query heads, then the key heads, then as many value heads.
    """
    key_heads = (qkv_BTNE.size(2) - len(gain_H)) // 2
    q_BTHE, k_BTKE, v_BTKE = qkv_BTNE.split([len(gain_H), key_heads, key_heads], dim=2)
    q_BTHE = rotate(rms_norm(q_BTHE), rotary) * gain_H[:, None]
    k_BTKE = rotate(rms_norm(k_BTKE), rotary)
    return Heads(q_BTHE, k_BTKE, v_BTKE, v_BTKE)


def repeat_heads(x_BTKE: Tensor, q_BTHE: Tensor) -> Tensor:
    """Keys or values, each head once for every query head of its group."""
    return x_BTKE.repeat_interleave(q_BTHE.size(2) // x_BTKE.size(2), 2)


def attention_sdpa(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Tensor | None) -> Tensor:
    """torch's attention, (B, T, H, E). mask: (B, 1, T, T), true where a query sees a key; None: causal."""
    if mask is not None and q_BTHE.is_cuda:
        # torch's fast kernels with a mask do not support grouped heads.
        k_BTKE = repeat_heads(k_BTKE, q_BTHE)
        v_BTKE = repeat_heads(v_BTKE, q_BTHE)
    y_BHTE = F.scaled_dot_product_attention(
        q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2),
        mask, is_causal=mask is None, enable_gqa=True,
    )  # fmt: skip
    return y_BHTE.transpose(1, 2)


def attention_documents(
    ids_BT: Tensor, starts: Tensor | None, attend: Operation, c: ModelSettings, one_a_row: bool = False
) -> Tensor | None:
    """The last argument of `attend`: a mask for torch's attention, `document_starts` for all others.

    starts: None if they are not known yet. one_a_row: each row is one document, which needs no mask.
    """
    if attend is not attention_sdpa:
        return starts_on_device(ids_BT, c) if starts is None else starts
    if one_a_row or not c.doc_mask:
        return None
    # Tokens of one document share its number. Nobody sees a later token.
    document_BT = (ids_BT == BOS_ID).cumsum(1)
    same_B1TT = document_BT[:, None, :, None] == document_BT[:, None, None]
    return same_B1TT.tril()


def gated(y_BTHE: Tensor, *gate: Tensor) -> Tensor:
    """Each head times its gate. gate: some channels of the layer's input, and weights; or nothing."""
    if not gate:
        return y_BTHE
    # 0.5 makes the sigmoid less steep (PR #1855).
    return y_BTHE * torch.sigmoid(0.5 * F.linear(*gate))[..., None]


def xsa_plain(y_BTHE: Tensor, v_BTKE: Tensor, *gate: Tensor) -> Tensor:
    """Exclusive self attention: each head loses its component along its own token's value, then is `gated`.

    The component is (y·v / v·v) v, with sums at least in fp32. (Zhai, arXiv 2603.09078; with grouped heads:
    PR #265.)
    """
    wide = torch.promote_types(y_BTHE.dtype, torch.float32)
    y_BTKGE = y_BTHE.unflatten(2, (v_BTKE.size(2), -1))
    v_BTK1E = v_BTKE.unsqueeze(3)
    square_BTK11 = (v_BTK1E * v_BTK1E).sum(-1, keepdim=True, dtype=wide).clamp(min=XSA_MIN_SQUARE)
    along_BTKG1 = (y_BTKGE * v_BTK1E).sum(-1, keepdim=True, dtype=wide) / square_BTK11
    rest_BTHE = (y_BTKGE - along_BTKG1 * v_BTK1E).flatten(2, 3)
    return gated(rest_BTHE, *gate).to(y_BTHE.dtype)


def activation(x: Tensor, slope: float) -> Tensor:
    """LeakyReLU(slope)², the MLP's activation (PR #493); slope 0 is relu². Calibration reads it from here."""
    return F.leaky_relu(x, slope).square()


def mlp_plain(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, scale: float, slope: float) -> Tensor:
    """x_ND plus the MLP of `rms_norm(x_ND, scale)`, (N, D); the three tensors have one dtype."""
    return x_ND + F.linear(activation(F.linear(rms_norm(x_ND, scale), up_FD), slope), down_DF)


def token_before(x_BTD: Tensor) -> Tensor:
    """For each token the vector of the one before it in its row; zero for the first."""
    return F.pad(x_BTD[:, :-1], (0, 0, 1, 0))


class Ops(NamedTuple):
    """The operations that KERNELS may replace; the defaults are the plain forms above."""

    attend: Operation = attention_sdpa
    mlp: Operation = mlp_plain
    heads: Callable[..., Heads] = heads_plain
    xsa: Operation = xsa_plain


# --- adapters of test-time training ---


class Adapter(NamedTuple):
    """A low-rank matrix for each row of a batch: it adds B A x to an output (arXiv 2106.09685)."""

    a_BRI: Tensor  # R: the rank; I: channels of the input
    b_BOR: Tensor  # O: channels of the output


# The adapters of one visit, by their place. q, k and v belong to projections. o and mlp go around attention
# and MLP as a whole, from the input of the branch to its output (PR #1530). head belongs to the logits.
Adapters = dict[str, Adapter]


def low_rank(x_BTI: Tensor, adapter: Adapter) -> Tensor:
    """The output of an adapter for x, (B, T, O)."""
    # A function, no method: Dynamo of torch 2.9 and 2.10 cannot trace a call of a NamedTuple of tensors.
    a_BRI, b_BOR = adapter
    return (x_BTI @ a_BRI.mT) @ b_BOR.mT


def adapted(y_BTO: Tensor, x_BTI: Tensor, adapters: Adapters, name: str) -> Tensor:
    """y plus the output of its adapter for x; without an adapter y itself."""
    if name not in adapters:
        return y_BTO
    return y_BTO + low_rank(x_BTI, adapters[name])


# --- the model ---

# Parameters by name, each split along its first axis, in the dtype of the activations.
WeightRows = dict[str, tuple[Tensor, ...]]
# Called with (name of the input, layer, values) where matrices multiply them: calibration sums x xᵀ.
Observer = Callable[[str, int, Tensor], None]


class Context(NamedTuple):
    """Computed once in a forward pass and shared by all visits. Put values made of the ids here."""

    weights: WeightRows
    x0_BTD: Tensor  # the embeddings: every block may mix them in again
    rotary: Tensor
    documents: Tensor | None  # of `attention_documents`
    observe: Observer | None
    values_BTK: Tensor | None  # an embedding of each token for all value heads, only with VE_ENABLED


class GPT(nn.Module):
    """The model. Parameters are fp32 masters, drawn from (SEED, name) and cast to `compute_dtype` at use."""

    def __init__(self, settings: ModelSettings, seed: int | None) -> None:
        """seed: of the first weights; None: they come from elsewhere, and nothing is drawn."""
        super().__init__()
        self.settings = settings
        # `ready_model` of KERNELS sets these three.
        self.machine = Machine()
        self.compute_dtype = torch.float32
        self.ops = Ops()
        # Tables of the vocabulary are used as a whole. Layers read everything else row by row.
        self.row_names = []
        for name, parameter in parameter_table(settings).items():
            weights = torch.empty(parameter.shape)
            if seed is not None:
                weights = initial_weights(name, parameter, settings, seed)
            self.register_parameter(name, nn.Parameter(weights))
            if parameter.optimizer not in ("embedding", "head"):
                self.row_names.append(name)

    def forward(
        self, inputs_BT: Tensor, starts: Tensor | None = None, looping: bool = True,
        observe: Observer | None = None, adapters: list[Adapters] | None = None, longest: int = 0
    ) -> Tensor:  # fmt: skip
        """Hidden states (B, T, D) after the last norm.

        starts: `document_starts`, found here if not given. looping: run the NUM_LOOPS extra passes.
        observe: called with the inputs of all matrices, for calibration.

        Two hooks serve test-time training. adapters: those of each visit, in the order of the visits; each
        row is then one document. longest: as in `rotary_table`. Without test-time training read `adapters`
        as [{}], and `longest` as 0.
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
        )  # fmt: skip
        adapters = adapters or [{}] * len(layers)

        # A U-Net. The encoder keeps the first lane after each visit. Each visit of the decoder gets one of
        # them back, the last one first.
        lanes = [context.x0_BTD]
        kept: list[Tensor] = []
        for visit, layer in enumerate(layers):
            # As many lanes as the layer reads: a loop may lead from layers with two back to one with one.
            lanes = [lanes[0], lanes[-1]] if is_parallel(layer, "lanes", c) else [join(lanes)]
            keep = weights["resid_keep_LD"][layer]
            decoded = visit - len(layers) // 2
            if decoded >= 0 and kept:
                lanes[0], x = self._take_back(lanes[0], kept.pop(), keep, decoded, weights)
            else:
                x = keep * lanes[0]
            # Attention reads the first lane, with some of the embeddings mixed in again.
            x = torch.addcmul(x, weights["resid_inject_LD"][layer], context.x0_BTD)
            lanes = self._block(layer, x, lanes, context, adapters[visit])
            if decoded < 0:
                kept.append(lanes[0])

        hidden = rms_norm(join(lanes))
        if observe is not None:
            observe("hidden", 0, hidden)
        return hidden

    def _take_back(
        self, lane: Tensor, skip: Tensor, keep: Tensor, decoded: int, weights: WeightRows
    ) -> tuple[Tensor, Tensor]:
        """A lane with a skip of the U-Net, and `keep` times it, both (B, T, D).

        decoded: the number of the decoder's visit. The second is multiplied out: so the backward pass needs a
        copy of the first only where it goes on.
        """
        skip_weight = weights["skip_weight_SD"][decoded]
        if self.settings.skip_gates_enabled:  # mix them by a learned share (PR #1493)
            share = weights["skip_gate_SD"][decoded].sigmoid()
            skip_weight = (1.0 - share) * skip_weight
            x = keep * share * lane
            lane = share * lane
        else:
            x = keep * lane
        x = torch.addcmul(x, keep * skip_weight, skip)
        return torch.addcmul(lane, skip_weight, skip), x

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Scores (N, V) of every next token, before the softcap."""
        head = "token_embedding_VD" if self.settings.tie_embeddings else "output_head_VD"
        return F.linear(hidden_ND, self.get_parameter(head).to(hidden_ND.dtype))

    def loss_per_token(self, hidden_ND: Tensor, targets_N: Tensor, added_NV: Tensor | None = None) -> Tensor:
        """Nats (N,), at least fp32, of each target: cross-entropy of softcap·tanh(logits/softcap).

        added_NV: the output of an adapter of the head. LOGIT_SOFTCAP=0: cross-entropy of the logits.
        """
        logits_NV = self.logits(hidden_ND)
        if added_NV is not None:
            logits_NV = logits_NV + added_NV
        # A sum over the vocabulary needs more digits than bfloat16 has.
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        softcap = self.settings.logit_softcap
        if not softcap:
            return F.cross_entropy(logits_NV, targets_N, reduction="none")
        # Powers of bounded scores cannot overflow, so no pass looks for the largest one first. A GPU computes
        # powers of two faster than those of e, hence bits.
        nats_of_bit = math.log(2)
        bits_NV = softcap / nats_of_bit * torch.tanh(logits_NV / softcap)
        bits_N = bits_NV.exp2().sum(1).log2() + F.nll_loss(bits_NV, targets_N, reduction="none")
        return nats_of_bit * bits_N

    def loss(
        self, inputs_BT: Tensor, targets_BT: Tensor, starts: Tensor | None = None, looping: bool = True
    ) -> Tensor:
        """Mean loss of a batch in nats per token: training minimises it."""
        hidden_BTD = self(inputs_BT, starts, looping)
        return self.loss_per_token(hidden_BTD.flatten(0, 1), targets_BT.flatten()).mean()

    def look_up(self, name: str, rows_BT: Tensor) -> Tensor:
        """Rows of a table of the vocabulary, (B, T, C), in the dtype of the activations."""
        return F.embedding(rows_BT, self.get_parameter(name)).to(self.compute_dtype)

    def _weights_by_row(self) -> WeightRows:
        """All parameters but the tables, split along the first axis; made once for all visits of a row."""
        whole: dict[str, Tensor] = {name: self.get_parameter(name) for name in self.row_names}
        queries, outputs = whole.pop("qo_bank").chunk(2)
        keys, values = whole.pop("kv_bank").chunk(2)
        # One product makes queries, keys and values: it reads the activations once, and so do its gradients.
        whole["qkv"] = torch.cat([queries, keys, values], dim=1)
        # Scale the rows of the matrix instead of the activations: fewer products, same output.
        whole["attn_out"] = whole.pop("attn_scale_LD")[:, :, None] * outputs
        whole["mlp_down"] = whole.pop("mlp_scale_LD")[:, :, None] * whole.pop("mlp_down_bank")
        return {name: weights.to(self.compute_dtype).unbind(0) for name, weights in whole.items()}

    def _embed(self, inputs_BT: Tensor, weights: WeightRows) -> Tensor:
        """Normalised embeddings (B, T, D), each mixed with the one before it."""
        c = self.settings
        x = self.look_up("token_embedding_VD", inputs_BT)
        if c.bigram_vocab_size:
            x = x + table_rows(
                self, bigram_rows(inputs_BT, c), weights,
                "bigram_table_RC", "bigram_projection_1DC", "bigram_scale_1")  # fmt: skip
        if c.smear_gate_enabled:
            gate_BT = torch.sigmoid(x[..., : c.gate_window] @ weights["smear_gate_1W"][0])
            # Nothing crosses the start of a document (PR #1851). A shut gate costs less than a zeroed vector.
            if c.doc_mask:
                gate_BT = gate_BT.masked_fill(inputs_BT == BOS_ID, 0.0)
            gate_BT = gate_BT * weights["smear_scale_1"][0]
            x = torch.addcmul(x, gate_BT[..., None], token_before(x))
        x = rms_norm(x)
        if c.channel_smear_enabled:
            x = channel_smear(x, inputs_BT, weights, c)
        return x

    def _block(
        self, layer: int, x: Tensor, lanes: list[Tensor], context: Context, adapters: Adapters
    ) -> list[Tensor]:
        """One visit of one layer: one residual lane, or from PARALLEL_START_LAYER on two (PR #1529).

        x: what attention reads, (B, T, D).
        """
        c = self.settings
        scale = (layer + 1) ** -0.5 if c.ln_scale else 1.0
        side_by_side = is_parallel(layer, "gptj", c)  # only configs/pr1493.env

        attended = self._attention(layer, rms_norm(x, scale), context, adapters)

        # The MLP reads the second lane if there is one, else the sum that attention wrote to.
        if len(lanes) == 2:
            mlp_reads = lanes[1]
        elif side_by_side:
            mlp_reads = x
        else:
            mlp_reads = x + attended
        mlp_sum = self._mlp(layer, mlp_reads, scale, context, adapters)

        if side_by_side:
            return [mlp_sum + attended]
        if len(lanes) == 1:
            return [mlp_sum]
        # Each lane keeps a learned share of itself and adds shares of both outputs.
        mixed = []
        written = mlp_sum - mlp_reads
        mix_23 = context.weights["lane_mix_P23"][layer - c.parallel_start_layer]
        for lane, (keep, from_attention, from_mlp) in zip(lanes, mix_23, strict=True):
            mixed.append(keep * lane + from_attention * attended + from_mlp * written)
        return mixed

    def _attention(self, layer: int, x_BTD: Tensor, context: Context, adapters: Adapters) -> Tensor:
        """The output of attention, (B, T, D)."""
        c = self.settings
        w = context.weights
        # Project the input to queries, keys and values, and split them into heads.
        qkv_BTR = F.linear(x_BTD, w["qkv"][layer])
        if adapters:
            parts = qkv_BTR.split([c.model_dim, c.kv_dim, c.kv_dim], dim=-1)
            parts = [adapted(part, x_BTD, adapters, name) for name, part in zip("qkv", parts, strict=True)]
            qkv_BTR = torch.cat(parts, dim=-1)
        qkv_BTNE = qkv_BTR.unflatten(-1, (-1, c.head_dim))
        heads = self.ops.heads(qkv_BTNE, w["qk_gain_LH"][layer], context.rotary)
        if context.values_BTK is not None and layer in c.value_layers:  # only configs/pr549.env (PR #549)
            scale = w["value_layer_scale_N"][c.value_layers.index(layer)]
            v_BTKE = heads.v_BTKE + (scale * context.values_BTK).unflatten(-1, (c.num_kv_heads, -1))
            heads = Heads(heads.q_BTHE, heads.k_BTKE, v_BTKE, v_BTKE)
        y_BTHE = self.ops.attend(heads.q_BTHE, heads.k_BTKE, heads.v_BTKE, context.documents)

        gate = []
        if c.sparse_attn_gate_enabled:
            gate = [x_BTD[..., : c.gate_window], w["attn_gate_LHW"][layer]]
        if layer >= c.num_layers - c.xsa_last_n:
            y_BTHE = self.ops.xsa(y_BTHE, heads.own_BTKE, *gate)
        else:
            y_BTHE = gated(y_BTHE, *gate)

        # Join the heads and project them back.
        y_BTD = y_BTHE.flatten(2)
        if context.observe is not None:
            context.observe("attn_in", layer, x_BTD)
            context.observe("attn_out", layer, y_BTD)
        return adapted(F.linear(y_BTD, w["attn_out"][layer]), x_BTD, adapters, "o")

    def _mlp(
        self, layer: int, x_BTD: Tensor, scale: float, context: Context, adapters: Adapters
    ) -> Tensor:
        """x plus the output of norm and MLP, (B, T, D); adapters and calibration read behind the norm."""
        slope = self.settings.activation_number
        up_FD = context.weights["mlp_up_bank"][layer]
        down_DF = context.weights["mlp_down"][layer]
        y_BTD = self.ops.mlp(x_BTD.flatten(0, 1), up_FD, down_DF, scale, slope).view_as(x_BTD)
        if context.observe is not None or "mlp" in adapters:
            x_BTD = rms_norm(x_BTD, scale)
        if context.observe is not None:
            # A fused kernel keeps its hidden values to itself: calibration computes them again.
            context.observe("mlp_in", layer, x_BTD)
            context.observe("mlp_hidden", layer, activation(F.linear(x_BTD, up_FD), slope))
        return adapted(y_BTD, x_BTD, adapters, "mlp")


def join(lanes: list[Tensor]) -> Tensor:
    """One lane out of one or two: their mean."""
    if len(lanes) == 1:
        return lanes[0]
    return (lanes[0] + lanes[1]) / 2


def build_model(config: Config) -> GPT:
    """The model of a run with its first weights, on the CPU.

    It has the settings that the artifact stores, and no others: if it needs more, its first step fails.
    """
    return GPT(ModelSettings.from_values(config.as_env()), config.seed)


# --- only configs/pr549.env and older: bigrams, value embeddings, channel smear, an untied head ---


def older_tables(c: ModelSettings) -> dict[str, Parameter]:
    """Tables with a row for each token, or for each hash of a pair of tokens."""
    table = {}
    if not c.tie_embeddings:
        # The embedding is no head: it starts as nn.Embedding does, and no matrix product reads it.
        size = (c.vocab_size, c.model_dim)
        table["token_embedding_VD"] = Parameter(size, std=1.0, optimizer="embedding", role="embed")
        table["output_head_VD"] = Parameter(size, optimizer="head", role="embed", inputs=("hidden",))
    if c.bigram_vocab_size:
        table["bigram_table_RC"] = Parameter(
            (c.bigram_vocab_size, c.bigram_dim), optimizer="embedding", role="embed")  # fmt: skip
    if c.ve_enabled:
        table["value_table_VC"] = Parameter(
            (c.vocab_size, c.ve_dim), std=0.01, optimizer="embedding", role="embed")  # fmt: skip
    return table


def older_vectors(c: ModelSettings) -> dict[str, Parameter]:
    """Scales, and the matrices that project rows of these tables to the width of embeddings or values."""
    table = {}
    if c.channel_smear_enabled:
        table["channel_smear_1D"] = Parameter((1, c.model_dim))
    if c.bigram_vocab_size:
        if c.bigram_dim != c.model_dim:
            table["bigram_projection_1DC"] = Parameter((1, c.model_dim, c.bigram_dim), random_matrices=1)
        table["bigram_scale_1"] = Parameter((1,), 0.05)
    if c.ve_enabled:
        if c.ve_dim != c.kv_dim:
            table["value_projection_1KC"] = Parameter((1, c.kv_dim, c.ve_dim), random_matrices=1)
        table["value_scale_1"] = Parameter((1,), 0.1)
        table["value_layer_scale_N"] = Parameter((len(c.value_layers),), 1.0)
    return table


def bigram_rows(inputs_BT: Tensor, c: ModelSettings) -> Tensor:
    """The row of the bigram table for each token and the one before it, (B, T): a hash of both (PR #549).

    The first token of a row and, with DOC_MASK, of a document has no token before it: it gets the last row.
    """
    last_row = c.bigram_vocab_size - 1
    ids_BT = inputs_BT.int()  # products wrap around at 32 bits
    hashed = torch.bitwise_xor(36_313 * ids_BT[:, 1:], 27_191 * ids_BT[:, :-1]) % last_row
    rows_BT = F.pad(hashed, (1, 0), value=last_row)
    if c.doc_mask:
        rows_BT = rows_BT.masked_fill(inputs_BT == BOS_ID, last_row)
    return rows_BT


def table_rows(
    model: GPT, rows_BT: Tensor, weights: WeightRows, table: str, projection: str, scale: str
) -> Tensor:
    """Rows of a table, (B, T, C): projected to C channels where the table has others, and scaled.

    The bigram table starts at zero, so pairs add nothing at first.
    """
    values = model.look_up(table, rows_BT)
    if projection in weights:
        values = F.linear(values, weights[projection][0])
    return values * weights[scale][0]


def channel_smear(x_BTD: Tensor, inputs_BT: Tensor, weights: WeightRows, c: ModelSettings) -> Tensor:
    """Mix each channel with a learned share of the token before (PR #549)."""
    previous = token_before(x_BTD)
    # The first token of a document is mixed with zero.
    if c.doc_mask:
        previous = previous.masked_fill((inputs_BT == BOS_ID)[..., None], 0.0)
    share_D = weights["channel_smear_1D"][0].sigmoid()
    return (1 - share_D) * x_BTD + share_D * previous


# ============================================================================================================
# KERNELS — faster forms of the operations in `Ops`. Before a run each is tried against its plain twin.
# ============================================================================================================
# The tile of the MLP's kernel for tensor cores: of those that were tried the fastest on an H100. On a card
# with less shared memory than it needs, the trial passes over the kernel.
TILE = dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=3)

if triton is not None:

    @triton.jit
    def linear_leaky_square_kernel(  # type: ignore[no-untyped-def]
        a, b, factors, given, out, more, M, N, K, scale, slope, GIVEN: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        # Descriptors are TMA on Hopper and later; for older GPUs the compiler makes them masked pointers.
        HALF_N: tl.constexpr = BLOCK_N // 2  # the epilogue goes by halves: its stores need half the memory
        a_tiles = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
        b_tiles = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
        given_tiles = tl.make_tensor_descriptor(given, [M, N], [N, 1], [BLOCK_M, HALF_N])
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
            rows = row + tl.arange(0, BLOCK_M)
            if factors is not None:
                factor = tl.load(factors + rows, rows < M, 0.0)[:, None]
            halves = tl.split(acc.reshape(BLOCK_M, 2, HALF_N).permute(0, 2, 1))

            for half in tl.static_range(2):
                corner = [row, column + half * HALF_N]
                value = halves[half]
                if GIVEN == 0:  # the activation of the rounded P, which is what the backward pass reads
                    p = (factor * value).to(out.dtype.element_ty)
                    given_tiles.store(corner, p)
                else:
                    p = given_tiles.load(corner)
                p = p.to(tl.float32)
                if factors is None:
                    value += p
                elif GIVEN == 2:
                    # By addresses: Triton 3.5 gives a third descriptor more memory than a Hopper has. What
                    # lies right of the last column is of the next row, and is not stored.
                    there = rows[:, None] * N + corner[1] + tl.arange(0, HALF_N)
                    value += factor * p
                    value += tl.load(more + there, there < M * N, 0.0)
                else:
                    steep = tl.where(p > 0, p, slope * slope * p)  # half the derivative
                    if GIVEN == 0:
                        value = p * steep
                    else:
                        value *= 2.0 * factor * steep
                        sums = tl.sum(factor * value * p, 1) / (-K * scale * scale)
                        tl.atomic_add(more + rows, sums, rows < M)
                out_tiles.store(corner, value.to(out.dtype.element_ty))

    @triton.jit
    def heads_kernel(  # type: ignore[no-untyped-def]
        qkv, gain, rotary, q, k, v, own_v, d_qkv, d_gain, tokens, T, eps,
        BACKWARD: tl.constexpr, H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    ):  # fmt: skip
        # One head of some tokens. Forward reads qkv and writes queries and keys into q and k. Backward finds
        # gradients in q, k, v and own_v, and writes those of qkv and, summed over these tokens, of the gain.
        # All is computed in fp32: Triton promotes every operand of an fp32 value.
        head = tl.program_id(1)
        row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        channel = tl.arange(0, BLOCK_E)[None, :]
        inside = (row < tokens) & (channel < E)
        here = (row * (H + 2 * K) + head) * E + channel

        if head >= H + K:  # values pass; their two gradients add up
            if BACKWARD:
                there = (row * K + head - H - K) * E + channel
                d_x = tl.load(v + there, inside, 0.0).to(tl.float32)
                d_x += tl.load(own_v + there, inside, 0.0)
                tl.store(d_qkv + here, d_x, inside)
        else:
            # Where this head lies in its own tensor, which has other heads than qkv.
            if head < H:
                own = q + (row * H + head) * E
            else:
                own = k + (row * K + head - H) * E
            # One over the root mean square of each row, and the gain of the head; keys have a gain of one.
            x = tl.load(qkv + here, inside, 0.0).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(x * x, 1) / E + eps)
            head_gain = tl.load(gain + head, head < H, 1.0)
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
                tl.store(d_qkv + here, d_x, inside)
                if head < H:
                    tl.store(d_gain + head * tl.num_programs(0) + tl.program_id(0), tl.sum(along * inverse))
            else:
                x_partner = tl.load(qkv + here - channel + partner, turned, 0.0).to(tl.float32)
                out = (x * cos + x_partner * sin) * scale
                tl.store(own + channel, out, inside)

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


@torch.library.custom_op("train_gpt::linear_leaky_square", mutates_args=())
def linear_leaky_square(
    a_MK: Tensor, b_NK: Tensor, factors_M: Tensor | None, given: list[Tensor],
    scale: float, slope: float,
) -> list[Tensor]:  # fmt: skip
    """A product and what follows it, by how many tensors (M, N) are given. phi: `activation`.

    None: P = factors A Bᵀ, and phi(P). P: G = factors A Bᵀ phi'(P), and in each row the factor of X that
    the gradient of a norm of this `scale` has: the sum of G P, times -factors / (K scale²).
    X and Y: A Bᵀ + factors X + Y. X without factors: A Bᵀ + X. factors: one for each row.
    ValueError where K or N are not whole 16 bytes, or a tensor does not begin at a multiple of them.
    """
    device = a_MK.device
    results = linear_leaky_square_shapes(a_MK, b_NK, factors_M, given)
    a, b, *given = [tensor.contiguous() for tensor in (a_MK, b_NK, *given)]
    # The tensor memory accelerator copies whole 16 bytes; other shapes take the plain form.
    for operand in (a, b, *given, results[0]):
        if operand.data_ptr() % 16 or operand.shape[-1] * operand.itemsize % 16:
            raise ValueError(f"TMA reads rows of whole 16 bytes; got {a.shape[1]} and {len(b)} columns")

    # Triton keeps the allocator of descriptors' scratch memory per thread, and the backward pass has its own.
    # It knows the device alone: a tensor in it would stay alive in both threads.
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
    programs = 1
    if a.is_cuda:
        programs = torch.cuda.get_device_properties(device).multi_processor_count
    # The kernel has one order of three pointers: P or X, the output, then nothing, the sums or Y.
    pointers = [*given[:1], *results, *given[1:], None]
    linear_leaky_square_kernel[(programs,)](
        a, b, factors_M, *pointers[:3], len(a), len(b), a.shape[1], scale, slope,
        GIVEN=len(given), **TILE)  # fmt: skip
    return results


@linear_leaky_square.register_fake
def linear_leaky_square_shapes(
    a_MK: Tensor, b_NK: Tensor, factors_M: Tensor | None, given: list[Tensor], *options: float
) -> list[Tensor]:
    """Empty outputs of the kernel's shapes, with which torch.compile traces."""
    # No `len`, which would make a number of rows that is left open a constant of the graph.
    results = [a_MK.new_empty(a_MK.size(0), b_NK.size(0))]
    if not given:
        results.append(torch.empty_like(results[0]))
    if len(given) == 1 and factors_M is not None:
        results.append(torch.zeros_like(factors_M))  # tiles add to it
    return results


class FusedMlp(torch.autograd.Function):
    """`mlp_plain`. Normalised rows are never written, nor kept for the backward pass.

    The factors of the norm, the activation, its derivative, and the gradients of norm and residual are in
    epilogues of products (PR #1530 after modded-nanogpt PR #197).
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, scale: float, slope: float
    ) -> Tensor:
        norm_N = scale * (x_ND.float().square().mean(1) + RMS_NORM_EPS).rsqrt()
        pre_NF, act_NF = linear_leaky_square(x_ND, up_FD, norm_N, [], scale, slope)
        ctx.save_for_backward(x_ND, norm_N, up_FD, down_DF, pre_NF, act_NF)
        ctx.options = (scale, slope)
        return linear_leaky_square(act_NF, down_DF, None, [x_ND], scale, slope)[0]

    @staticmethod
    def backward(ctx: Any, d_out_ND: Tensor) -> tuple[Any, ...]:
        x_ND, norm_N, up_FD, down_DF, pre_NF, act_NF = ctx.saved_tensors
        options = ctx.options
        # The gradient of X Upᵀ, as norm_N multiplies it behind the product. A longer row has a smaller
        # norm_N: along_N of x itself is in its gradient.
        d_product_NF, along_N = linear_leaky_square(d_out_ND, down_DF.t(), norm_N, [pre_NF], *options)
        d_x_ND = linear_leaky_square(d_product_NF, up_FD.t(), along_N, [x_ND, d_out_ND], *options)[0]
        # Where adapters learn, nobody asks for the last two: the compiler leaves them out.
        return d_x_ND, d_product_NF.t() @ x_ND, d_out_ND.t() @ act_NF, None, None


# A function around `apply`: Dynamo before torch 2.12 cannot trace a bound one that the model holds.
def mlp_fused(*inputs: Any) -> Tensor:
    """`mlp_plain` by the kernel."""
    return FusedMlp.apply(*inputs)


# Tokens of one program of the two kernels around attention: with heads of 64, 16 values a thread.
HEAD_ROWS = 32


@torch.library.custom_op("train_gpt::heads", mutates_args=())
def launch_heads(
    qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor, gradients: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Queries and keys of `heads_plain`. Given `gradients` of Heads: the gradients of qkv and of the gain.

    The gradient of the gain comes in one part for each program, (H, programs) in fp32.
    """
    results = heads_shapes(qkv_BTNE, gain_H, rotary, gradients)
    B, T, N, E = qkv_BTNE.shape
    H = len(gain_H)
    K = (N - H) // 2
    # The kernel has one order of pointers for both directions. Those that a direction lacks are None.
    if gradients:
        pointers = [*(gradient.contiguous() for gradient in gradients), *results]
        programs = results[1].size(1)  # the last may have no tokens: it writes zeros
    else:
        pointers = [*results, None, None, None, None]
        programs = triton.cdiv(B * T, HEAD_ROWS)
    # Forward, the values stay where they are.
    heads_kernel[(programs, N if gradients else H + K)](
        qkv_BTNE.contiguous(), gain_H.contiguous(), rotary.contiguous(), *pointers, B * T, T, RMS_NORM_EPS,
        BACKWARD=bool(gradients), H=H, K=K, E=E, HALF=rotary.size(-1),
        BLOCK_N=HEAD_ROWS, BLOCK_E=triton.next_power_of_2(E))  # fmt: skip
    return results


@launch_heads.register_fake
def heads_shapes(
    qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor, gradients: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """What the kernel returns, without its values."""
    B, T, N, E = qkv_BTNE.shape
    H = len(gain_H)
    if gradients:
        # Two at least: the compiler would make a graph of its own for one.
        programs = 2 + B * T // HEAD_ROWS
        return qkv_BTNE.new_empty(qkv_BTNE.shape), qkv_BTNE.new_empty(H, programs, dtype=torch.float32)
    return qkv_BTNE.new_empty(B, T, H, E), qkv_BTNE.new_empty(B, T, (N - H) // 2, E)


class FusedHeads(torch.autograd.Function):
    """`heads_plain` in one kernel each way. The backward pass needs no second look at the queries."""

    @staticmethod
    def forward(ctx: Any, qkv_BTNE: Tensor, gain_H: Tensor, rotary: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(qkv_BTNE, gain_H, rotary)
        q_BTHE, k_BTKE = launch_heads(qkv_BTNE, gain_H, rotary, [])
        # The values come twice, or autograd would add up their gradients before the kernel: two passes.
        values = -k_BTKE.size(2)
        return q_BTHE, k_BTKE, qkv_BTNE[:, :, values:], qkv_BTNE[:, :, values:]

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
    """The output of `xsa_plain`, in a list. Given its gradient: the gradients of y, v and gate."""
    results = xsa_shapes(y_BTHE, v_BTKE, gate_BTH, d_out_BTHE)
    # The values lie between the other heads of a token. The kernel reads them there, if tokens are evenly
    # spaced (`flatten` copies others) and the heads of a token lie side by side.
    v_NKE = v_BTKE.flatten(0, 1)
    N, K, E = v_NKE.shape
    if v_NKE.stride()[1:] != (E, 1):
        v_NKE = v_NKE.contiguous()
    # As in `launch_heads`: output, its gradient, and the gradients of the three inputs.
    if d_out_BTHE is None:
        pointers = [*results, None, None, None, None]
    else:
        pointers = [None, d_out_BTHE.contiguous(), *results]
    xsa_kernel[(triton.cdiv(N, HEAD_ROWS), K)](
        y_BTHE.contiguous(), v_NKE, gate_BTH.contiguous(), *pointers, N, v_NKE.stride(0), XSA_MIN_SQUARE,
        BACKWARD=d_out_BTHE is not None, K=K, GROUPS=y_BTHE.size(2) // K, E=E,
        BLOCK_N=HEAD_ROWS, BLOCK_E=triton.next_power_of_2(E))  # fmt: skip
    return results


@launch_xsa.register_fake
def xsa_shapes(
    y_BTHE: Tensor, v_BTKE: Tensor, gate_BTH: Tensor, d_out_BTHE: Tensor | None = None
) -> list[Tensor]:
    """What the kernel returns, without its values."""
    like = [y_BTHE] if d_out_BTHE is None else [y_BTHE, v_BTKE, gate_BTH]
    return [tensor.new_empty(tensor.shape) for tensor in like]


class FusedXsa(torch.autograd.Function):
    """`xsa_plain` in one kernel each way, with all sums of a row."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return launch_xsa(*inputs)[0]

    @staticmethod
    def backward(ctx: Any, d_out_BTHE: Tensor) -> Any:
        return tuple(launch_xsa(*ctx.saved_tensors, d_out_BTHE))


def xsa_fused(y_BTHE: Tensor, v_BTKE: Tensor, *gate: Tensor) -> Tensor:
    """`xsa_plain` by the kernel."""
    gate_BTH = y_BTHE.new_ones(y_BTHE.shape[:-1])
    if gate:
        gate_BTH = torch.sigmoid(0.5 * F.linear(*gate))  # as in `gated`
    return FusedXsa.apply(y_BTHE, v_BTKE, gate_BTH)


def load_attention(name: str) -> Operation:
    """The attention of this name. ImportError, AttributeError where it is not installed."""
    if name == "sdpa":
        return attention_sdpa
    if name == "fa3":
        kernel = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
    elif name == "fa2":
        kernel = importlib.import_module("flash_attn").flash_attn_varlen_func
    else:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # Packages and versions spell causal attention and grouped heads differently.
    spellings = {"causal": True, "is_causal": True, "window_size": (-1, 0), "enable_gqa": True}
    options = {key: spellings[key] for key in inspect.signature(kernel).parameters if key in spellings}
    takes_grouped_heads = "causal" in options or "enable_gqa" in options  # torch 2.10 does not

    def attention_varlen(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts: Tensor) -> Tensor:
        if not takes_grouped_heads:
            k_BTKE = repeat_heads(k_BTKE, q_BTHE)
            v_BTKE = repeat_heads(v_BTKE, q_BTHE)
        length = q_BTHE.size(1)
        # A second view of the starts for the keys: Dynamo of torch 2.13 refuses the same tensor twice where a
        # package's own autograd.Function takes it.
        y: Any = kernel(
            q_BTHE.flatten(0, 1), k_BTKE.flatten(0, 1), v_BTKE.flatten(0, 1),
            starts, starts.view(-1), length, length, **options)
        if isinstance(y, tuple):  # some return more than the output
            y = y[0]
        return y.view_as(q_BTHE)

    return attention_varlen


# The forms of each setting, the one known as the fastest first. The last one is the plain form.
FORMS = {
    "attention": ["fa3", "varlen", "fa2", "sdpa"],
    "fused_mlp": ["kernel", "plain"],
    "fused_heads": ["kernel", "plain"],
}


def forms_to_try(setting: str, c: Config, machine: Machine) -> list[str]:
    """The forms of a setting that this machine can run, in order; or the one that the setting names."""
    forms = FORMS[setting]
    asked = getattr(c, setting)
    if asked != "auto":
        return {"0": forms[-1:], "1": forms[:-1]}.get(asked, [asked])
    # In fp32 the MLP's kernel multiplies without TF32, which plain products have.
    if not machine.on_gpu or (setting == "fused_mlp" and machine.dtype != torch.bfloat16):
        return forms[-1:]
    # Without documents torch's own attention needs no mask, and is as fast as the other two.
    if setting == "attention" and not c.doc_mask:
        return ["fa3", "sdpa"]
    return forms


def with_form(ops: Ops, setting: str, form: str) -> Ops:
    """The operations with this form. ImportError, AttributeError where it is not installed."""
    if setting == "attention":
        return ops._replace(attend=load_attention(form))
    if form == "plain":
        return ops
    if setting == "fused_mlp":
        return ops._replace(mlp=mlp_fused)
    return ops._replace(heads=heads_fused, xsa=xsa_fused)


def trial_of(setting: str, c: Config, machine: Machine) -> tuple[Operation, list[Tensor]]:
    """The model's call of a setting's operations, with inputs as in one forward pass of training.

    The first input has the shape of the output: `both_passes` makes it the gradient of the output, too.
    """
    # EVAL_ONLY may have settings that nobody could train with: one row at least.
    rows = min(c.micro_batch_tokens, c.train_batch_tokens // machine.world_size) // c.train_seq_len
    shape_BT = (max(1, rows), c.train_seq_len)
    normal = functools.partial(torch.randn, device=machine.device, dtype=machine.dtype)

    if setting == "attention":
        # A document begins in every 256 tokens or so.
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

        x_ND = normal(math.prod(shape_BT), c.model_dim)
        return mlp, [x_ND, normal(c.mlp_dim, c.model_dim), normal(c.model_dim, c.mlp_dim)]

    rotary = rotary_table(c.train_seq_len, c, machine.device).to(machine.dtype)

    def around_attention(model: GPT, qkv_BTNE: Tensor, gain_H: Tensor, *gate: Tensor) -> Tensor:
        q_BTHE, k_BTKE, v_BTKE, own_BTKE = model.ops.heads(qkv_BTNE, gain_H, rotary)
        # Queries stand for the output of attention.
        return torch.cat([model.ops.xsa(q_BTHE, own_BTKE, *gate), k_BTKE, v_BTKE], dim=2)

    inputs = [normal(*shape_BT, c.num_heads + 2 * c.num_kv_heads, c.head_dim), normal(c.num_heads)]
    if c.sparse_attn_gate_enabled:
        inputs += [normal(*shape_BT, c.gate_window), normal(c.num_heads, c.gate_window)]
    return around_attention, inputs


def both_passes(run: Operation, model: GPT, inputs: list[Tensor]) -> list[Tensor]:
    """The output, then the gradient of each input, if the first input is the gradient of the output."""
    out, gradients = torch.autograd.functional.vjp(functools.partial(run, model), tuple(inputs), inputs[0])
    return [out, *gradients]


def largest_error(results: list[Tensor], exact: list[Tensor]) -> float:
    """Of all results, relative to their largest value; infinite if not a number.

    exact: possibly of the first rows and tokens alone.
    """
    errors = []
    for found, wanted in zip(results, exact, strict=True):
        found = found[tuple(slice(size) for size in wanted.shape)]
        error = ((found - wanted).abs().max() / wanted.abs().max()).item()
        errors.append(error if math.isfinite(error) else math.inf)
    return max(errors)


MAX_FORM_ERROR = 0.03  # relative to the largest value: bfloat16 has 8 bits, and errors add up along a row
# Tokens of a row on which attention is compared: the memory of the exact form grows with their square.
ATTENTION_CHECK_TOKENS = 2048


class ChosenOps(NamedTuple):
    """The operations of a run, chosen once for training and evaluation alike."""

    ops: Ops
    report: list[str]  # lines for the log: which forms were tried, and what came of each


def choose_form(setting: str, ops: Ops, c: Config, machine: Machine) -> ChosenOps:
    """`ops` with the first form of a setting that is installed, compiles, launches and agrees on all ranks.

    Of such forms of the MLP a GPU has the fastest: which one that is depends on the card and on torch.
    All ranks call it together. ConfigError if no form agrees.
    """
    forms = forms_to_try(setting, c, machine)
    if not machine.on_gpu and forms == FORMS[setting][-1:]:
        return ChosenOps(ops, [f"{setting}:{forms[0]} tried: nothing, it is the plain form"])
    model = GPT(c, seed=None)  # holds the operations as the model of the run will
    run, inputs = trial_of(setting, c, machine)
    compared = inputs
    if setting == "attention":
        # Its exact form is in float64. Queries behind the compared tokens are zero, and so are the gradients
        # from there: the results of the first tokens are those of a row that ends with them.
        inputs[0][:, ATTENTION_CHECK_TOKENS:] = 0.0
        compared = [tensor[:2, :ATTENTION_CHECK_TOKENS].double() for tensor in inputs]
    exact = both_passes(run, model, compared)
    # A form is tried exactly as it will run: held by a model, compiled in one graph, with a backward pass.
    passes = functools.partial(both_passes, machine.compile(run), model, inputs)

    tried = []
    agreed: dict[str, Ops] = {}
    warnings: list[str] = []
    for form in forms:
        error = math.inf
        try:
            model.ops = with_form(ops, setting, form)
            error = largest_error(passes(), exact)
            message = f"error:{error:.1e}"
        except Exception as failure:  # it is not installed, or does not compile or run here
            said = f"{type(failure).__name__}: {failure}"
            # Dynamo names its reasons further down.
            message = " ".join(re.findall(r"\A.*|(?:Explanation|context): .+", said))
        # All ranks look at the same form at the same time, and judge it by the worst of them.
        worst_error, worst_message = max(machine.gather((error, message)))
        tried.append(f"{form} {worst_message}")
        if worst_error <= MAX_FORM_ERROR:
            agreed[form] = model.ops
            if setting != "fused_mlp" or not machine.on_gpu:
                break
        elif not worst_message.startswith("ModuleNotFoundError"):
            warnings.append(f"warning: {setting}: {form} is installed, but refused: {worst_message}")

    if agreed:
        times_ms = dict.fromkeys(agreed, 0.0)
        if len(agreed) > 1:
            for form in agreed:
                model.ops = agreed[form]
                # All wait for the slowest rank. Two forms agree only where Triton is, which measures them.
                times_ms[form] = max(machine.gather(triton.testing.do_bench(passes)))
                tried.append(f"{form} {times_ms[form]:.2f} ms")
        fastest = min(agreed, key=times_ms.__getitem__)
        return ChosenOps(agreed[fastest], [f"{setting}:{fastest} tried: {' | '.join(tried)}", *warnings])
    raise ConfigError(f"{setting.upper()}={getattr(c, setting)}: {' | '.join(tried)}; "
                      "lower MICRO_BATCH_TOKENS, or set auto if it is not set")  # fmt: skip


def fast_ops(c: Config, machine: Machine) -> ChosenOps:
    """The fastest form of each operation that agrees with its plain twin at the shape of a micro-batch.

    All ranks call it together. ConfigError if a setting names a form and it fails.
    """
    ops = Ops()
    report = []
    for setting in FORMS:
        ops, lines = choose_form(setting, ops, c, machine)
        report += lines
    if machine.on_gpu and c.doc_mask and c.attention == "auto" and ops.attend is attention_sdpa:
        slow = ("ATTENTION=sdpa with DOC_MASK=1 makes a step about 1.5 times as long: install flash_attn_3, "
                "flash_attn, or torch 2.10 or later; all of them need COMPUTE_DTYPE=bfloat16")  # fmt: skip
        if machine.world_size >= 8:
            raise ConfigError(f"{slow}. ATTENTION=sdpa accepts it")
        report.append(f"warning: {slow}")
    return ChosenOps(ops, report)


def ready_model(model: GPT, machine: Machine, ops: Ops) -> GPT:
    """Move a model to this rank's device, and give it the operations of the run."""
    # Training, windows and adapters have graphs of the same functions; torch gives up after eight.
    torch._dynamo.config.recompile_limit = 64
    model.to(machine.device)
    model.machine = machine
    model.compute_dtype = machine.dtype
    model.ops = ops
    return model


# ============================================================================================================
# OPTIMIZER — Parallel Muon for the banks, AdamW for the rest, and the moving average of all weights.
# ============================================================================================================

# Amsel et al., arXiv 2505.16932, in the numbers of modded-nanogpt: for five iterations. They include a safety
# factor of 0.02, so the matrices need not be divided by 1.02 before.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
FIXED_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan et al., Muon


def orthogonalize(update_NRC: Tensor, steps: int, polar_express: bool, dtype: torch.dtype) -> Tensor:
    """Near-orthogonal factor of each matrix (N, R, C) by Newton-Schulz, in contiguous memory.

    steps: iterations. dtype: of their matrix products.
    """
    # The product of a matrix with its transpose is smallest for wide ones.
    tall = update_NRC.size(1) > update_NRC.size(2)
    x = update_NRC.mT if tall else update_NRC
    x = x.to(dtype)
    # The iteration converges for singular values up to one.
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for number in range(steps):
        # Every singular value s becomes a·s + b·s³ + c·s⁵.
        a, b, c = FIXED_QUINTIC
        if polar_express:  # beyond five iterations it repeats the last one
            a, b, c = POLAR_EXPRESS[min(number, len(POLAR_EXPRESS) - 1)]
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).contiguous()


def gradients_of(parameters: list[nn.Parameter]) -> list[Any]:
    """The gradients after a backward pass: tensors, as every parameter takes part in the loss."""
    return [parameter.grad for parameter in parameters]


class Optimizer:
    """One step over all parameters. All ranks call it together; any number gives the same step, to rounding.

    Each rank orthogonalises an equal part of every bank (Parallel Muon, PR #399). `average` is the
    exponential moving average of all weights (PR #287); with EMA_DECAY=0 it is the weights themselves.
    """

    def __init__(self, model: GPT, c: Config, machine: Machine) -> None:
        self.config = c
        self.machine = machine
        # On a CPU nearly all the time goes into matrix products, which no compiler makes faster.
        self.orthogonalize = machine.compile(orthogonalize) if machine.on_gpu else orthogonalize
        self.weights = [parameter.detach() for parameter in model.parameters()]
        self.average = [weight.clone() for weight in self.weights] if c.ema_decay else self.weights

        table = parameter_table(model.settings)

        def group(kind: str) -> list[nn.Parameter]:
            return [weights for name, weights in model.named_parameters() if table[name].optimizer == kind]

        # The largest bank first: its communication is the longest, and overlaps with the work on the others.
        self.banks = sorted(group("muon"), key=Tensor.numel, reverse=True)
        # The states of Muon: one tensor a bank, of the matrices that this rank updates. A new one needs an
        # entry here and its use in `_muon_update`: a checkpoint holds all of them, for any number of ranks.
        self.states = {
            "momenta": [torch.zeros_like(self._part(bank)) for bank in self.banks],
        }

        self.small = group("embedding") + group("scalar") + group("head")
        # An embedding that is not the head as well needs a much larger rate.
        embed_lr = c.tied_embed_lr if c.tie_embeddings else c.embed_lr
        self.adam = torch.optim.AdamW([
            {"params": group("embedding"), "base_lr": embed_lr, "weight_decay": c.embed_wd},
            {"params": group("scalar"), "base_lr": c.scalar_lr, "weight_decay": c.adam_wd},
            {"params": group("head"), "base_lr": c.head_lr, "weight_decay": 0.0},
        ], betas=(c.beta1, c.beta2), eps=c.adam_eps, fused=True)  # fmt: skip

    @torch.no_grad()
    def step(
        self, lr_scale: float, momentum: float, step: int = 0, lap: Callable[[str], None] = lambda name: None
    ) -> Tensor:
        """Update all weights from their gradients, which are used up, and the average of the weights.

        The gradients are the means of this rank. lr_scale: factor on every learning rate. momentum: of Muon.
        step: how many came before. lap: called before and after the clipping, with the name of the part that
        ends. Returns the global gradient norm before clipping, on the device.
        """
        # Phase 1: the gradients of all ranks become their mean.
        slices, small = self._reduce()
        lap("optimizer")
        # Phase 2: bound the global norm.
        norm = self._clip(slices, small)
        lap("grad_clip")
        # Phase 3: AdamW on the tables of the vocabulary and the small tensors.
        for group in self.adam.param_groups:
            group["lr"] = lr_scale * group["base_lr"]
        self.adam.step()
        # Phase 4: Muon on the banks.
        self._update_banks(slices, lr_scale * self.config.matrix_lr, momentum)
        # Phase 5: the average follows the weights, faster at first: a short run forgets its start.
        if self.config.ema_decay:
            decay = min(self.config.ema_decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.average, self.weights, 1.0 - decay)

        for parameter in (*self.banks, *self.small):
            parameter.grad = None
        return norm

    def use_average(self) -> None:
        """Replace the weights by their average; once a run."""
        torch._foreach_copy_(self.weights, self.average)

    def state(self) -> dict[str, Any]:
        """A copy of weights and state, the same for any world size; all ranks call it together."""
        muon = {name: [whole for _, whole in self._gather(parts)] for name, parts in self.states.items()}
        return copy.deepcopy({
            "weights": self.weights, "average": self.average, "adam": self.adam.state_dict(), "muon": muon,
        })  # fmt: skip

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`, on any world size. ConfigError if it has other states of Muon."""
        muon = state["muon"]
        if muon.keys() != self.states.keys():
            raise ConfigError(f"RESUME: the checkpoint has {list(muon)}, expected "
                              f"{list(self.states)}; resume with the train_gpt.py that wrote it")
        torch._foreach_copy_(self.weights, state["weights"])
        torch._foreach_copy_(self.average, state["average"])
        for name, parts in self.states.items():
            for part, whole in zip(parts, muon[name], strict=True):
                part.copy_(self._part(whole))
        self.adam.load_state_dict(state["adam"])

    def _reduce(self) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients as means over the ranks: of the banks this rank's matrices, of the others all."""
        whole = gradients_of(self.banks)
        small = gradients_of(self.small)
        if self.machine.world_size == 1:
            return whole, small
        # Start all, then wait for all. Since torch 2.13 the former name warns.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        slices = [torch.empty_like(momenta) for momenta in self.states["momenta"]]
        handles = [
            reduce_scatter(mine, self._fill(gradient), async_op=True)
            for mine, gradient in zip(slices, whole, strict=True)
        ]
        # Many small tensors travel as one.
        flat = nn.utils.parameters_to_vector(small)
        handles.append(dist.all_reduce(flat, async_op=True))
        for handle in handles:
            handle.wait()
        torch._foreach_div_([*slices, flat], self.machine.world_size)
        nn.utils.vector_to_parameters(flat, small)
        return slices, small

    def _clip(self, slices: list[Tensor], small: list[Tensor]) -> Tensor:
        """Scale the gradients to a global norm of at most GRAD_CLIP_NORM; returns the norm before."""
        squared = nn.utils.get_total_norm(slices).square()
        self.machine.add_up(squared)  # every rank has other matrices of the banks
        # The small ones are whole on every rank: they count once.
        norm = (squared + nn.utils.get_total_norm(small).square()).sqrt()
        if self.config.grad_clip_norm:
            factor = (self.config.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([*slices, *small], factor)
        return norm

    def _update_banks(self, gradients: list[Tensor], lr: float, momentum: float) -> None:
        """Muon (Jordan et al.): a step along the orthogonal factor, with decoupled weight decay."""
        # A generator: while the updates of one bank travel, those of the next are computed.
        updates = (
            self._muon_update(gradient, number, momentum) for number, gradient in enumerate(gradients)
        )
        for bank, update in self._gather(updates):
            factor = max(1.0, bank.size(1) / bank.size(2)) ** 0.5  # tall matrices: larger steps
            bank.mul_(1.0 - lr * self.config.muon_wd)
            bank.add_(update, alpha=-lr * factor)

    def _muon_update(self, gradient: Tensor, number: int, momentum: float) -> Tensor:
        """Nesterov momentum, row normalisation (MuonEq-R), orthogonalisation of (N, R, C).

        number: of the bank, in `banks` and in each of `states`.
        """
        c = self.config
        buffer = self.states["momenta"][number].mul_(momentum).add_(gradient)
        # Nesterov: as if the momentum of the next step were already in.
        update = gradient.add_(buffer, alpha=momentum)
        if c.muon_row_normalize:
            update /= update.norm(dim=-1, keepdim=True).clamp(min=1e-7)
        # Newton-Schulz needs little precision: the dtype of the activations.
        return self.orthogonalize(update, c.muon_backend_steps, c.muon_polar_express, self.machine.dtype)

    def _fill(self, bank: Tensor) -> Tensor:
        """The bank with zero matrices at its end, so that all ranks hold equally many."""
        return F.pad(bank, (0, 0, 0, 0, 0, -len(bank) % self.machine.world_size))

    def _part(self, bank: Tensor) -> Tensor:
        """The matrices of the bank that this rank updates."""
        return self._fill(bank).chunk(self.machine.world_size)[self.machine.rank]

    def _gather(self, slices: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each bank with its slices of all ranks as one tensor; they travel while the next are made."""
        if self.machine.world_size == 1:
            yield from zip(self.banks, slices, strict=True)
            return
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        sent = []
        for mine in slices:
            whole = mine.new_empty(len(mine) * self.machine.world_size, *mine.shape[1:])
            sent.append((whole, all_gather(whole, mine, async_op=True)))
        for bank, (whole, handle) in zip(self.banks, sent, strict=True):
            handle.wait()
            yield bank, whole[: len(bank)]


# ============================================================================================================
# SCHEDULE — pure functions of clock and steps; progress goes from 0 to 1, and is the same on all ranks.
# ============================================================================================================


def run_progress(elapsed_seconds: float, step: int, c: Config) -> float:
    """Share of the run that is over: of the steps, or of the clock without its reserve if that is more."""
    of_steps = step / c.iterations if c.iterations else 1.0
    if c.max_wallclock_seconds == 0:
        return of_steps
    reserve = c.gptq_reserve_seconds if c.gptq else 0.0
    return max(of_steps, elapsed_seconds / (c.max_wallclock_seconds - reserve))


def learning_rate_scale(progress: float, step: int, c: TrainingSettings) -> float:
    """1, then linear down to MIN_LR over the warm-down: WARMDOWN_FRAC of the run, or WARMDOWN_ITERS steps."""
    warmdown = c.warmdown_frac
    if c.warmdown_iters >= 0:
        # Their share of the run, by the mean time of the steps so far.
        warmdown = c.warmdown_iters * progress / max(step, 1)
        if progress == 0 and c.max_wallclock_seconds == 0:
            warmdown = c.warmdown_iters / max(c.iterations, 1)
    if warmdown == 0:
        return 1.0
    return max(c.min_lr, min(1.0, (1.0 - progress) / warmdown))


def muon_momentum(progress: float, step: int, c: TrainingSettings) -> float:
    """Momentum of Muon, linear from its first to its final value: over a share of the run, or over steps."""
    now = progress
    end = c.muon_momentum_warmup_frac
    if c.muon_momentum_warmup_steps >= 0:
        now = step
        end = c.muon_momentum_warmup_steps
    rise = min(1.0, now / end) if end else 1.0
    return c.muon_momentum_warmup_start + rise * (c.muon_momentum - c.muon_momentum_warmup_start)


def loop_is_on(progress: float, c: ModelSettings) -> bool:
    """Whether the looped layers run their extra passes (PR #1493: from 35 % of the run)."""
    # From 1 on means never.
    return c.num_loops > 0 and c.enable_looping_at < 1 and progress >= c.enable_looping_at


# ============================================================================================================
# RUN — device and ranks, run directory, log and clock: the same on a laptop and on many nodes.
# ============================================================================================================

NVIDIA_DRIVER = "/dev/nvidiactl"  # exists on Linux while the driver is loaded
PEER_TIMEOUT_SECONDS = 900  # that a rank waits for another one before it ends
CHECKPOINT = "checkpoint.pt"
ARTIFACT = "model.bin"


def this_machine(config: Config, environ: Mapping[str, str]) -> Machine:
    """The machine that the settings and torchrun's variables describe; joins the other ranks. ConfigError."""
    try:
        rank = int(environ.get("RANK") or 0)
        world_size = int(environ.get("WORLD_SIZE") or 1)
        local_rank = int(environ.get("LOCAL_RANK") or 0)
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK: {error}; unset them: torchrun sets them") from error
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)

    # An unusable GPU is an error, never a slower run. To run on a CPU, hide the GPUs. torch may count GPUs
    # that it cannot use.
    hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    found = torch.cuda.device_count() > 0 or (os.path.exists(NVIDIA_DRIVER) and not hidden)
    on_gpu = config.device == "cuda" or (config.device == "auto" and found)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if on_gpu and local_rank >= gpus:
        raise ConfigError(f"DEVICE={config.device}: torch {torch.__version__} for CUDA {torch.version.cuda} "
                          f"can use {gpus} GPUs, expected one for local rank {local_rank}, counted from 0; "
                          "mend driver, container or torch, start fewer processes, or set DEVICE=cpu")
    device = torch.device("cuda", local_rank) if on_gpu else CPU
    if on_gpu:
        torch.cuda.set_device(device)
        has_bfloat16_units = torch.cuda.get_device_capability()[0] >= 8
    else:
        has_bfloat16_units = torch.cpu._is_amx_tile_supported()

    # Processors without units for bfloat16 compute in it, but slower than in fp32.
    dtype = torch.bfloat16 if has_bfloat16_units else torch.float32
    if config.compute_dtype != "auto":
        dtype = getattr(torch, config.compute_dtype)
    # "high" is TF32 on GPUs that have it; on CPUs products stay exact.
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")
    compiled = config.compile == "1" or (config.compile == "auto" and on_gpu)
    machine = Machine(rank, world_size, device, dtype, compiled)
    # A rank that waits for others says so every ten seconds.
    connected = threading.Event()

    def say_that_it_waits() -> None:
        while not connected.wait(10):
            print_line(f"rank {rank}: waits for all {world_size} ranks to connect to MASTER_ADDR="
                       f"{environ.get('MASTER_ADDR')}, for {PEER_TIMEOUT_SECONDS}s at most", sys.stderr)

    if world_size > 1:
        threading.Thread(target=say_that_it_waits, daemon=True).start()
        # Host tensors use gloo also on GPUs: ranks agree on the clock without waiting for a device.
        backends = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        try:
            dist.init_process_group(
                backends, timeout=timedelta(seconds=PEER_TIMEOUT_SECONDS),
                device_id=device if on_gpu else None)  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"WORLD_SIZE={world_size}: {error}; use torchrun") from error
    # All ranks connect here. A rank that left while others still connect would hide its error behind theirs.
    machine.gather(None)
    connected.set()
    return machine


def print_line(line: str, stream: Any = None) -> None:
    """Print a line, to the console if no stream is given; never raise: a closed one must not end the run."""
    # RuntimeError: a signal arrived while another line was being printed.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        print(line, file=stream, flush=True)


def write_whole(path: Path, data: bytes) -> None:
    """Replace the file at `path` in one moment, or leave it as it was.

    Raises ConfigError if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # Somebody may have removed the run directory: weights are not lost with it.
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(f"{path} cannot be written ({error}); make room or set another RUNS_DIR") from error


@dataclass
class Run:
    """What one process of a run writes: its log and its events, and where its seconds went."""

    machine: Machine
    directory: Path | None = None  # None: nothing is written
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    phase_name: str = "setup"
    training: bool = False  # while it is true, a signal asks for a checkpoint first
    stop_signal: int = 0  # the signal that asked

    def path(self, name: str) -> Path:
        """The path of a file in the run directory."""
        assert self.directory is not None, "a run without a directory has no files"
        return self.directory / name

    def log(self, line: str) -> None:
        """A line to log.txt and the console; rank 0 only."""
        # One log for all ranks: another rank reports a problem by raising.
        if self.machine.rank != 0:
            return
        print_line(line)
        self.append("log.txt", line)

    def record(self, event: str, **values: Any) -> None:
        """An event to metrics.jsonl; rank 0 only."""
        if self.machine.rank == 0:
            self.append("metrics.jsonl", json.dumps({"event": event, **values}))

    def append(self, name: str, line: str) -> None:
        """Append a line to a file of the run, if it has files; never raise: a lost line must not end it."""
        if self.directory is not None:
            with contextlib.suppress(OSError), open(self.path(name), "a", encoding="utf-8") as file:
                print_line(line, file)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a block, device work included, to `phases[name]`."""
        # Work of the phase before must not be counted here.
        self.machine.wait()
        if self.stop_signal:  # it arrived after training had looked for one
            self.exit_by_signal(self.stop_signal)
        self.phase_name = name
        start = time.perf_counter()
        yield
        self.machine.wait()
        seconds = time.perf_counter() - start
        self.phases[name] = self.phases.get(name, 0.0) + seconds
        self.log(f"phase:{name} {seconds:.2f}s")

    def on_signal(self, number: int, _frame: Any = None) -> None:
        """The first signal in training asks for a checkpoint; any other signal ends the process."""
        if not self.training or self.stop_signal:
            self.exit_by_signal(number)
        self.stop_signal = number  # `train` sees it, saves, and ends
        print_line(f"rank {self.machine.rank}: signal {number}: ends after the step under way, with a "
                   "checkpoint if no rank is gone; a second signal ends at once", sys.stderr)

    def exit_by_signal(self, number: int) -> None:
        """End this process, and print how to continue."""
        print_line(f"rank {self.machine.rank}: stopped by signal {number} in phase {self.phase_name}; "
                   f"{self.ways_on()}", sys.stderr)
        os._exit(128 + number)

    def ways_on(self) -> str:
        """How to continue after the run has ended early: only files that exist are named."""
        folder = shlex.quote(f"{self.directory}")
        ways = {CHECKPOINT: f"RESUME={folder}", ARTIFACT: f"EVAL_ONLY={folder}/{ARTIFACT}"}
        found = [way for name, way in ways.items() if self.directory and self.path(name).exists()]
        return f"continue with {' or '.join(found)}" if found else "nothing is saved to continue with"


# ============================================================================================================
# TIMING — where the milliseconds of a step go, as lines and as a trace; steps that are not shown pay nothing.
# ============================================================================================================

FIRST_STEPS = 10  # of a run: each has its lines, whatever the period
# The rows of a trace: what the host does, by thread; what the GPU does, by stream.
LANES = ("main", "disk", "stage", "copy", "compute_stream")


class CopyMarks(NamedTuple):
    """The beginning and the end of the copy of a batch, in the stream that copies it."""

    begin: torch.cuda.Event
    end: torch.cuda.Event


class Lap(NamedTuple):
    """The end of a part of a step."""

    name: str  # begin, batch, forward, backward, grad_clip or optimizer
    host_seconds: float
    event: Any  # the same moment on the GPU, a torch.cuda.Event; None without one
    copy: CopyMarks | None  # of a batch: its way to the GPU


@dataclass
class Trace:
    """TRACE_STEPS of one rank as a file for ui.perfetto.dev, in Chrome's trace format; any thread adds to it.

    Times are seconds of `time.perf_counter`, one clock for all ranks of a machine; microseconds in the file.
    A span that reaches beyond these steps is cut at their first and their last moment. The file is written
    when the last step ends: a run that is killed earlier has none. Without TRACE_STEPS nothing is measured.
    With PROFILE_STEPS, torch.profiler records the same steps for a file of its own: operators, and on a GPU
    kernels, copies and NCCL. That makes these steps slower.
    """

    steps: range = field(default=range(0))
    directory: Path | None = None
    rank: int = 0
    log: Callable[[str], None] = print
    profiler: Any = None  # a torch.profiler.profile, with PROFILE_STEPS
    recording: bool = False
    began: float = 0.0  # when the first step began
    spans: list[list[Any]] = field(default_factory=list)  # name, lane, begin, end, args
    gpu_work: list[tuple[Any, ...]] = field(default_factory=list)  # step, name, lane, the events around it

    def begin(self, step: int) -> None:
        """Start of a step, counted from 1; 0: one of the warm-up."""
        if step in self.steps and not self.recording:
            if self.profiler:
                self.profiler.start()
            self.began = time.perf_counter()
            self.recording = True

    @contextlib.contextmanager
    def span(self, name: str, lane: str, **args: Any) -> Iterator[None]:
        """A span of what this thread does in a `with` block, also if that raises."""
        if not self.steps:
            yield
            return
        # Kept from its beginning on: the steps may begin or end in the middle of it.
        span = [name, lane, time.perf_counter(), math.inf, args]
        self.spans.append(span)
        try:
            yield
        finally:
            span[3] = time.perf_counter()
            if not self.recording:
                self.spans.remove(span)

    def add_step(self, step: int, laps: list[Lap]) -> None:
        """The spans of a step: `chunk` is all of it."""
        for before, lap in itertools.pairwise(laps):
            name = "gpu_queue_wait" if lap.name == "batch" else lap.name
            # The host's part: on a GPU it only launches the work.
            self.spans.append([name, "main", before.host_seconds, lap.host_seconds, {"step": step}])
            if lap.event is not None and lap.name != "batch":
                self.gpu_work.append((step, lap.name, "compute_stream", before.event, lap.event))
            if lap.copy is not None:
                self.gpu_work.append((step, "gpu_transfer", "copy", *lap.copy))
        self.spans.append(["chunk", "main", laps[0].host_seconds, laps[-1].host_seconds, {"step": step}])
        if step + 1 not in self.steps:
            self.finish()

    def finish(self) -> None:
        """Write the file, after the last step or after training."""
        if not self.recording or self.directory is None:
            return
        # GPU spans are placed by their distance from an event of known host time: now. Waiting here is
        # harmless, because the traced steps are over.
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
                           "args": {"name": lane}})  # fmt: skip
        # Unfinished spans of other threads end now.
        for name, lane, begin, end, args in list(self.spans):
            begin = max(begin, self.began)
            seconds = min(end, now) - begin
            if seconds >= 0:
                events.append({"ph": "X", "name": name, "pid": self.rank, "tid": 1 + LANES.index(lane),
                               "ts": 1e6 * begin, "dur": 1e6 * seconds, "args": args})  # fmt: skip
        path = self.directory / f"trace_rank{self.rank}.json"
        with contextlib.suppress(ConfigError):  # a full disk must not end the run
            write_whole(path, json.dumps({"traceEvents": events}).encode())
            self.log(f"trace:{path} for ui.perfetto.dev")
        if self.profiler:
            self.profiler.stop()
            self.profiler.export_chrome_trace(f"{self.directory}/profile_rank{self.rank}.json")


@dataclass
class StepTimer:
    """`timing_breakdown` lines of the first steps and of each `every`-th; 0: of none. Laps for the trace.

    All in milliseconds. Fields of batches and of `forward` and `backward` are means over the micro-steps, the
    others sums over the step (as in PR #591). `batch_wait` is how long the host waited for a batch.
    `batch_cpu` is how long the host made the last one, `batch_h2d` its copy to the GPU: no parts of the step
    if they were made ahead. The rest is device time. The host waits for the device at the end of a reported
    step, and of no other.
    """

    every: int
    on_gpu: bool
    trace: Trace = field(default_factory=Trace)
    # Of the step under way.
    reported: bool = False
    step: int = 0
    laps: list[Lap] = field(default_factory=list)

    def begin(self, step: int) -> None:
        """Start of a step, for the trace too; the first is 1. 0: one of the warm-up, never shown."""
        # Steps that are neither reported nor traced read no clock.
        self.trace.begin(step)
        self.step = step
        counted = step > 0 and self.every > 0
        self.reported = counted and (step <= FIRST_STEPS or step % self.every == 0)
        self.laps = []
        self.lap("begin")  # where the first part starts

    def lap(self, name: str, copy: CopyMarks | None = None) -> None:
        """Mark the end of a part of the step: batch, forward, backward, grad_clip or optimizer."""
        if not (self.reported or self.trace.recording):
            return
        # An event is a mark in the stream of the GPU: nobody waits for it.
        event = torch.cuda.Event(enable_timing=True) if self.on_gpu else None
        self.laps.append(Lap(name, time.perf_counter(), event, copy))
        if event is not None:
            event.record()

    def end(self, stage_ms: float, micro_steps: int) -> str:
        """End of a step, for the trace too: its line, empty if it is not reported. stage_ms: of a batch."""
        if self.trace.recording:
            self.trace.add_step(self.step, self.laps)
        if not self.reported:
            return ""
        total_ms: dict[str, float] = defaultdict(float)
        # The last event comes after all others in the stream.
        if self.laps[-1].event is not None:
            self.laps[-1].event.synchronize()
        # A part lasts from the lap before to its own; micro-batches add up.
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
# DATA — the tokens in an order that is a pure function of shards, seed and geometry, delivered ahead of need.
# ============================================================================================================

# A shard is a file of 256 little-endian int32 (magic, version, token count, zeros), then its uint16 ids.
SHARD_MAGIC = 20240520
SHARD_VERSION = 1
SHARD_HEADER_BYTES = 1024
LOADER_TIMEOUT_SECONDS = 60.0  # without data before the loader gives up


class Shard(NamedTuple):
    """A file of tokens."""

    path: Path
    tokens: int


class ShardVisit(NamedTuple):
    """One pass over a shard, as a part of the stream of sequences."""

    begin: int  # its first sequence's position in the stream
    shard: Shard
    order: Array  # the numbers of its sequences, in the order in which they come


class StagedBatch(NamedTuple):
    """A micro-batch on its way to the device."""

    ids_BT: Tensor  # uint16, of T + 1 columns: inputs and targets overlap
    starts: Array  # `document_starts` of the inputs
    sequence_hash: int
    copy: CopyMarks | None


class Batch(NamedTuple):
    """A micro-batch on the device."""

    inputs_BT: Tensor  # int64
    targets_BT: Tensor  # int64
    starts: Tensor  # where rows and documents begin in the flattened inputs, then B T; int32
    copy: CopyMarks | None = None  # of its way to the GPU, where that is measured


def open_shards(pattern: str) -> list[Shard]:
    """The shards that match, sorted by name, each header checked against its file. Raises DataError."""
    shards = []
    for number, name in enumerate(sorted(glob.glob(pattern))):
        path = Path(name)
        if "[0-9]*" in pattern and not name.endswith(f"_{number:06}.bin"):
            raise DataError(f"{path}: expected number {number:06}; fetch what is missing")
        header = np.fromfile(path, "<i4", 3).tolist()
        # The size shows a download that broke off.
        tokens, odd_byte = divmod(path.stat().st_size - SHARD_HEADER_BYTES, 2)
        expected = [SHARD_MAGIC, SHARD_VERSION, tokens]
        if header != expected or odd_byte or tokens < 1:
            raise DataError(f"{path}: magic, version and tokens are {header}, expected {expected} for a "
                            "file of this size; fetch it again")
        shards.append(Shard(path, tokens))
    if not shards:
        raise DataError(f"{pattern}: no token shard; set DATA_PATH to a folder of them, fetch shards "
                        "with data/fineweb.py, or try `make demo`")
    return shards


def read_tokens(shard: Shard, vocab_size: int = 1 << 16) -> Array:
    """All tokens of a shard, uint16.

    Raises DataError if the file has changed since it was opened, or an id is not below `vocab_size`.
    """
    # Somebody may have replaced or cut the file since the run began.
    if open_shards(glob.escape(str(shard.path))) != [shard]:
        raise DataError(f"{shard.path}: no longer has the {shard.tokens} tokens that it had; fetch it again")
    ids = np.fromfile(shard.path, "<u2", offset=SHARD_HEADER_BYTES)
    if ids.max() >= vocab_size:
        at = int(np.argmax(ids >= vocab_size))
        raise DataError(f"{shard.path}, token {at}, byte {SHARD_HEADER_BYTES + 2 * at}: id {ids[at]}, "
                        f"expected below VOCAB_SIZE={vocab_size}; name its tokenizer")
    return ids


def permutation(config: TrainingSettings, count: int, *key: int) -> Array:
    """A permutation of range(count) seeded by SEED and the key, one or two numbers; SHUFFLE=0: none moves.

    The numbers are sorted by random words. The words are Philox4x64-10 itself (Salmon et al., 2011). numpy's
    generators, which are built on it, may change from version to version.
    """
    if not config.shuffle:
        return np.arange(count)
    # Philox counts blocks of four words in the first of four places; the other three are free for the key.
    # Its length is a part of it: an epoch alone is another key than an epoch and shard 0.
    counter = [0, len(key), *key, 0, 0]
    words = np.random.Philox(key=config.seed, counter=counter[:4]).random_raw(count)
    return np.argsort(words, kind="stable")


def shard_visits(config: TrainingSettings, shards: list[Shard], position: int) -> Iterator[ShardVisit]:
    """The stream of training sequences, without end, from the shard that holds `position` on.

    Each epoch permutes the shards and, within each, its sequences. Sequence i of a shard is its tokens
    i T … (i + 1) T inclusive; a partial one at the end is skipped. Any position is reached in O(shards).
    Raises DataError if no shard holds a whole sequence.
    """
    length = config.train_seq_len
    usable = [shard for shard in shards if shard.tokens > length]
    if not usable:
        raise DataError(f"no training shard holds {length + 1} tokens, TRAIN_SEQ_LEN and one; fetch more, or "
                        "set shorter sequences")
    sizes = [(shard.tokens - 1) // length for shard in usable]
    epoch_size = sum(sizes)
    for epoch in itertools.count(position // epoch_size):
        begin = epoch * epoch_size
        for number in permutation(config, len(usable), epoch).tolist():
            # Shards that end before the position cost nothing but this comparison.
            if begin + sizes[number] > position:
                yield ShardVisit(begin, usable[number], permutation(config, sizes[number], epoch, number))
            begin += sizes[number]


def hash_sequences(first: int, ids_BT: Array) -> int:
    """Hash of sequences of T + 1 uint16 ids, the first of which is at position `first` of the stream.

    Two runs with equal hashes were given the same tokens in the same order, on any number of ranks. Within a
    sequence each pair of ids, and the last id, is multiplied by an odd random key; the products are added.
    Each of these sums is multiplied by an odd random word of the sequence's position; these products are
    added, modulo 2**64. A sum has no order: ranks and micro-batches add theirs in any.
    """
    # Two ids are one number of 32 bits; an odd one out is paired with zero.
    head_BT = ids_BT[:, :-1]
    pairs_BN = np.pad(head_BT, ((0, 0), (0, head_BT.shape[1] % 2))).view(np.uint32)
    keys = np.random.Philox(key=1).random_raw(pairs_BN.shape[1] + 1) | 1
    # The generator makes four words at a time: position p has the first of its p-th four.
    places = np.random.Philox(key=2, counter=first).random_raw(4 * len(ids_BT))[::4] | 1
    sums = np.einsum("bw,w->b", pairs_BN, keys[1:]) + ids_BT[:, -1] * keys[0]
    return int((sums * places).sum())


@dataclass
class Loader:
    """Micro-batches of one rank, without end: disk → stage → `next_batch`; without threads the same bytes.

    A step has S sequences, TRAIN_BATCH_TOKENS together: step k has the sequences [k S, (k + 1) S) of
    `shard_visits` on any number of ranks. Rank r takes the r-th equal part of them, MICRO_BATCH_TOKENS at a
    time. So the stream is a pure function of shards and SEED. Raises ConfigError if a step does not divide.
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
        # Of each step a rank has so many sequences, in so many micro-batches of so many.
        self.micro_steps = micro_steps_per_step(config, machine.world_size)
        self.step_sequences = config.train_batch_tokens // config.train_seq_len // machine.world_size
        self.micro_sequences = self.step_sequences // self.micro_steps
        self.seek(0)

    def seek(self, step: int, stream_hash: int = 0) -> None:
        """Go to the start of a step, in O(shards). stream_hash: of this rank's batches before it."""
        self.close()
        self.index = step * self.micro_steps  # micro-batches delivered, from the first step of the run on
        self.stream_hash = stream_hash
        self.wait_ms = 0.0  # for all batches; who reads it sets it back to zero
        self.stage_ms = 0.0  # in which the last batch was staged, its wait for a shard included
        visits = self._ahead("disk", self._read(self.index), 1)
        self.batches = self._ahead("stage", self._stage(visits, self.index), self.config.train_prefetch_queue)

    def _ahead(self, stage: str, items: Iterator[Any], count: int) -> Iterator[Any]:
        """The same items, `count` of them made ahead of need by a thread; not so without TRAIN_PREFETCH."""
        if not self.config.train_prefetch:
            return items
        # A new thread is on GPU 0; leaving `torch.cuda.stream` there would open a context on it.
        of_device = functools.partial(torch.cuda.set_device, self.machine.device)
        pool = futures.ThreadPoolExecutor(1, f"loader {stage}", of_device if self.machine.on_gpu else None)
        self.pools.append(pool)
        # Work begins now, not when the first item is asked for.
        pending = deque(pool.submit(next, items) for _ in range(count))

        def refill() -> None:
            pending.append(pool.submit(next, items))

        def in_order() -> Iterator[Any]:
            while True:
                # A worker's error is raised here, in its place among the items.
                item = pending.popleft().result(LOADER_TIMEOUT_SECONDS)
                if stage == "disk":
                    refill()
                yield item

        self.refill = refill  # of the stage that was begun last
        return in_order()

    def _position(self, index: int) -> int:
        """Position in the stream of the first sequence of a micro-batch of this rank."""
        step, micro_step = divmod(index, self.micro_steps)
        rank_part = step * self.machine.world_size + self.machine.rank
        return rank_part * self.step_sequences + micro_step * self.micro_sequences

    def _read(self, first: int) -> Iterator[tuple[Array, Array]]:
        """Disk stage: the sequences of each shard (N, T + 1), and the numbers of this rank's in order."""
        length = self.config.train_seq_len
        start = self._position(first)
        for visit in shard_visits(self.config, self.shards, start):
            with self.trace.span("disk_load", "disk", shard=visit.shard.path.name):
                tokens = read_tokens(visit.shard, self.config.vocab_size)
            sequences_NT = sliding_window_view(tokens, length + 1)[::length]
            positions = visit.begin + np.arange(len(visit.order))
            # Each step is cut into one run of sequences for each rank.
            owner = positions // self.step_sequences % self.machine.world_size
            mine = (positions >= start) & (owner == self.machine.rank)
            with self.trace.span("disk_idle", "disk", ready=visit.shard.path.name):
                yield sequences_NT, visit.order[mine]

    def _stage(self, visits: Iterator[Any], first: int) -> Iterator[StagedBatch]:
        """Stage: micro-batches from number `first` on, gathered in pinned memory and copied to the device."""
        # One after the other, (T + 1,) each.
        sequences = (sequences_NT[number] for sequences_NT, order in visits for number in order)
        for index in itertools.count(first):
            began = time.perf_counter()
            with self.trace.span("stage", "stage", batch=index):
                batch = self._stage_batch(sequences, index)
            self.stage_ms = 1e3 * (time.perf_counter() - began)
            yield batch

    def _stage_batch(self, sequences: Iterator[Array], index: int) -> StagedBatch:
        """The micro-batch of this number, made of the next sequences.

        Nothing is written while it is read: a batch has its own memory. PyTorch reuses pinned memory after
        the event behind its last copy, device memory when the streams told by `record_stream` are past it.
        The next batch is gathered while this one is copied: only the stream of the step waits for a copy.
        """
        ids = torch.empty(
            self.micro_sequences, self.config.train_seq_len + 1,
            dtype=torch.uint16, pin_memory=self.machine.on_gpu)  # fmt: skip
        ids_BT = ids.numpy()  # the same memory
        np.concatenate(list(itertools.islice(sequences, self.micro_sequences)), out=ids_BT.reshape(-1))
        # The hash reads the very memory that is copied.
        sequence_hash = hash_sequences(self._position(index), ids_BT)
        starts = document_starts(ids_BT[:, :-1], self.config)
        copy = None
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                ids, copy = self._copy(ids)
        return StagedBatch(ids, starts, sequence_hash, copy)

    def _copy(self, ids: Tensor) -> tuple[Tensor, CopyMarks]:
        """The ids on the device, copied in the current stream between two events."""
        marks = CopyMarks(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        marks.begin.record()
        ids = ids.to(self.machine.device, non_blocking=True)
        marks.end.record()
        return ids, marks

    def next_batch(self) -> Batch:
        """The next micro-batch. DataError has the place in the stream and the original traceback."""
        asked = time.perf_counter()
        ids, host_starts, sequence_hash, copy = self._next_staged()
        self.wait_ms += 1e3 * (time.perf_counter() - asked)
        # On a CPU the copy is the widening; a GPU's copies have events of their own.
        lane = "main" if self.machine.on_gpu else "copy"
        with self.trace.span("gpu_transfer", lane, batch=self.index):
            if copy is not None:
                # Made on the copy stream: its memory is not reused before this stream is done too.
                stream = torch.cuda.current_stream(self.machine.device)
                stream.wait_event(copy.end)
                ids.record_stream(stream)
            elif self.machine.on_gpu:
                ids, copy = self._copy(ids)
            # Widened on the device: two bytes a token cross the bus, not sixteen.
            inputs_BT = ids[:, :-1].long()
            targets_BT = ids[:, 1:].long()
            starts = starts_to_device(host_starts, self.machine.device)
        self.index += 1
        self.stream_hash = (self.stream_hash + sequence_hash) % 2**64
        if self.config.train_prefetch:
            # The thread wakes now that the step has its batch: both want the interpreter.
            self.refill()
        return Batch(inputs_BT, targets_BT, starts, copy)

    def stage_first(self) -> None:
        """Wait until the next batch is staged, and keep it for `next_batch`. Raises DataError."""
        self.batches = itertools.chain([self._next_staged()], self.batches)

    def _next_staged(self) -> StagedBatch:
        """Wait for the next batch of the workers. Raises DataError."""
        try:
            return next(self.batches)
        except (Exception, SystemExit, GeneratorExit) as error:  # all that can end a worker
            # The shard that holds the batch's last sequence is the one it was read from last.
            last = self._position(self.index) + self.micro_sequences - 1
            raise DataError(
                f"rank {self.machine.rank}, step {self.index // self.micro_steps}, position {last} of the "
                f"stream, {next(shard_visits(self.config, self.shards, last)).shard.path}: {error!r}\n"
                f"{traceback.format_exc()}") from error

    def close(self) -> None:
        """Let the threads end after the item under way; at any time, any number of times."""
        for pool in self.pools:
            pool.shutdown(wait=False, cancel_futures=True)
        self.pools = []
        self.batches = iter(())


# ============================================================================================================
# EVALUATION — every target is scored once, before anything learns from it; a ledger enforces it.
# ============================================================================================================


class Score(NamedTuple):
    """The result of one way to score a text."""

    nats: float  # mean over targets
    bits_per_byte: float
    scored_tokens: int
    bytes: int
    learned_tokens: int = 0  # those scored while the score went on learning from the text


class Validation(NamedTuple):
    """The text to score."""

    tokens: Array  # uint16
    bytes_total: int  # of all its targets
    mark: str  # ends every result's line: " comparable:0" where VAL_TOKENS_LIMIT left targets out


class Ledger:
    """Nats of every target of a token stream, in fp64, each written once. Target i is token i + 1."""

    def __init__(self, tokens: Array | Tensor) -> None:
        self._tokens = np.array(tokens)
        self._nats = np.full(len(tokens) - 1, np.nan)  # NaN: not scored yet
        self.scored = 0  # targets
        self.scored_nats = 0.0  # their sum so far, for a line of progress; `score` adds up all of them anew
        self.nats = self._nats.view()
        self.nats.flags.writeable = False

    def record(self, start: int, nats: Array) -> None:
        """Write the scores of some targets, from `start` on. Only this method writes, in any order.

        Raises ValueError for a target that has a score, FloatingPointError for a score that is not finite.
        """
        stop = start + len(nats)
        if start < 0 or stop > len(self.nats):
            raise ValueError(f"got targets {start}..{stop}, expected none beyond {len(self.nats)}")
        unscored = np.isnan(self.nats[start:stop])
        if not unscored.all():
            raise ValueError(f"got targets {start}..{stop}, but target {start + int(unscored.argmin())} has "
                             "its score: each is scored once")
        finite = np.isfinite(nats)
        if not finite.all():
            raise FloatingPointError(
                f"target {start + int(finite.argmin())} has a loss that is not finite: the weights diverged. "
                "If the round trip fails, lower the learning rates of training; else lower TTT_LORA_LR "
                "or TTT_LR")
        self._nats[start:stop] = nats
        self.scored += len(nats)
        self.scored_nats += float(nats.sum())

    def scored_tokens(self, start: int, stop: int) -> Array:
        """Tokens start .. stop, the only source of training tokens. ValueError if one is not scored yet."""
        # Token i + 1 is target i. Token 0 is no target.
        scored = np.isfinite(self.nats[max(start - 1, 0) : max(stop - 1, 0)])
        if start < 0 or stop > len(self._tokens) or not scored.all():
            raise ValueError(f"tokens {start}..{stop} are not all scored: nothing may learn from them yet")
        return self._tokens[start:stop].copy()

    def score(self, bytes_total: int) -> Score:
        """The result, for text of so many bytes. ValueError if a target was never scored."""
        missing = len(self.nats) - self.scored
        if missing:
            first = int(np.isnan(self.nats).argmax())
            raise ValueError(f"{missing} targets were never scored, the first is {first}")
        nats = float(self.nats.sum())
        return Score(nats / self.scored, nats / math.log(2) / bytes_total, self.scored, bytes_total)


# --- bytes of text ---


def load_tokenizer(config: Config) -> Any:
    """The SentencePiece model of TOKENIZER_PATH. DataError if there is none, or one of another size."""
    import sentencepiece

    path = find_path(config.tokenizer_path)
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise DataError(f"TOKENIZER_PATH={path}: no SentencePiece model ({error}); name the "
                        "tokenizer of the shards, see data/README.md") from error  # fmt: skip
    if pieces.vocab_size() != config.vocab_size:
        raise DataError(f"TOKENIZER_PATH={path}: {pieces.vocab_size()} pieces, expected VOCAB_SIZE="
                        f"{config.vocab_size}; set both as manifest.json says")
    return pieces


def piece_bytes(pieces: Any, size: int) -> tuple[Array, Array, Array]:
    """For each of `size` ids: bytes of its piece, whether a space comes before them, whether it is text."""
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
    return lengths, spaced, is_text


CASE_MARK = "\ue001"  # a piece of every CaseOps tokenizer: it capitalises the next word, and is no text


def token_bytes(tokens: Array, config: Config) -> Array:
    """Bytes of text of each target: from the byte sidecar of the shards, else from the pieces.

    CaseOps data (PR #1729) need a sidecar; data/fineweb.py --verify checks its counts. DataError if the
    sidecar has not one count for each token, and for a tokenizer without a lone space (it over-counts, issue
    #897).
    """
    pieces = load_tokenizer(config)
    folder = glob.escape(str(find_path(config.data_path)))
    if glob.glob(f"{folder}/fineweb_val_bytes_[0-9]*.bin"):
        sidecars = open_shards(f"{folder}/fineweb_val_bytes_[0-9]*.bin")
        found = [sidecar.tokens for sidecar in sidecars]
        expected = [shard.tokens for shard in open_shards(f"{folder}/fineweb_val_[0-9]*.bin")]
        if found != expected:
            raise DataError(f"DATA_PATH={folder}: fineweb_val_bytes_*.bin hold {found} counts, expected one "
                            f"for each of {expected} tokens; get the data again, see data/README.md")
        counts = np.concatenate([read_tokens(sidecar) for sidecar in sidecars])
        return counts[1 : len(tokens)].astype(np.int64)

    if pieces.piece_to_id(CASE_MARK) != pieces.unk_id():
        raise DataError(f"TOKENIZER_PATH={config.tokenizer_path}: has CaseOps marks, which are no text, and "
                        f"DATA_PATH={folder} no fineweb_val_bytes_*.bin; get the data again, see data/")
    if pieces.piece_to_id("▁") == pieces.unk_id():
        raise DataError(f"TOKENIZER_PATH={config.tokenizer_path}: expected a lone space among its pieces")
    lengths, spaced, is_text = piece_bytes(pieces, config.vocab_size)
    targets = tokens[1:]
    # A leading space is a byte. Decoding drops it after an id that is no text.
    return lengths[targets] + (spaced[targets] & is_text[tokens[:-1]])


# --- windows ---


def window_rows(
    targets: int, context: int, stride: int, document_begins: Array, chunk: int
) -> list[Array]:
    """The forward passes of a sliding-window score, by chunk: rows of (first token, first target, end).

    Window w reads the `context` tokens from w * stride on. Window 0 scores all its targets. A later window
    scores those that no window before it has reached, at most `stride` of them. Where a document begins
    inside the window there is a shortcut: all windows up to the document's beginning see the same context, so
    the last of them scores for all. `document_begins[i]` is the token where the document of target i begins.
    Context 4 and stride 2, one document: (0, 0, 4), (2, 4, 6), (4, 6, 8), …
    """
    # A window belongs to the chunk of its first target, as learning after a chunk changes the scores that
    # follow. It may score some targets of the next chunk, if the context is not a multiple of the stride.
    chunks: dict[int, list[Any]] = {}
    start = 0  # the first target without a score
    while start < targets:
        chunk_end = min((start // chunk + 1) * chunk, targets)
        # The first windows that reach the first and the last target of this chunk without a score.
        earliest = (start - context) // stride + 1
        latest = (chunk_end - 1 - context) // stride + 1
        window = max(0, earliest, min(int(document_begins[start]) // stride, latest))
        end = min(window * stride + context, targets)
        chunks.setdefault(start // chunk, []).append((window * stride, start, end))
        start = end
    return [np.array(rows) for rows in chunks.values()]


EVAL_MODES = "eval_modes.json"


@dataclass
class ScoreClock:
    """The clock of one score: it prints progress, and decides whether the next batch still fits.

    Nothing else reads the time while a text is scored. Where a score learns depends on this clock alone,
    never on tokens or losses.
    """

    run: Run = field(default_factory=lambda: Run(Machine()))
    name: str = ""
    every_seconds: float = 0.0  # between lines of progress; 0: none
    limit_seconds: float = math.inf
    followed: dict[str, int] = field(default_factory=dict)  # the modes of an earlier score, to be repeated
    # By the first document or target of a part of the text: its targets if the score learned there, else 0.
    modes: dict[str, int] = field(default_factory=dict)
    start: float = field(default_factory=lambda: time.perf_counter())
    printed_at: float = 0.0

    def seconds(self) -> float:
        """Seconds since the score began."""
        return time.perf_counter() - self.start

    def tell(self, ledger: Ledger, targets: int = 0) -> None:
        """Print a line if it is time for one. targets: how many this rank scores; 0: all."""
        now = self.seconds()
        early = now - self.printed_at < self.every_seconds
        if self.every_seconds == 0 or (early and ledger.scored < len(ledger.nats)):
            return
        self.printed_at = now
        share = min(1.0, ledger.scored / (targets or len(ledger.nats)))
        self.run.log(f"val_progress:{self.name} {share:.0%} "
                     f"partial_mean_loss:{ledger.scored_nats / ledger.scored:.4f} "
                     f"tokens_seen:{ledger.scored} eta:{now * (1 / share - 1):.0f}s")

    def learns(self, part: str, targets: int, needed_seconds: float) -> bool:
        """Whether the score learns in a part of the text: decided once, before its first target is scored.

        part, targets: as in `modes`. needed_seconds: for learning there, and for scoring all that is left.
        """
        now = self.seconds()
        learning = bool(self.followed.get(part, now + needed_seconds <= self.limit_seconds))
        if not learning and all(self.modes.values()):
            self.run.log(f"warning: {self.name} continues without learning: {now:.1f}s of "
                         f"{self.limit_seconds:.1f}s are used, the rest needs {needed_seconds:.1f}s")
        self.modes[part] = targets if learning else 0
        return learning


class WindowScorer:
    """Scores a token stream chunk by chunk with sliding windows."""

    def __init__(self, model: GPT, tokens: Array, config: Config, chunk_tokens: int, looping: bool) -> None:
        """tokens: 1-D ids. chunk_tokens: targets. looping: as in `GPT.forward`."""
        self.model = model
        self.machine = model.machine
        self.looping = looping
        self.context = config.eval_length
        self.batch_rows = max(1, config.val_pass_tokens // self.context)
        self.device = self.machine.device
        # The same compiled code serves every scorer and every reloaded model.
        self.forward = self.machine.compile(GPT.forward)

        tokens = np.asarray(tokens).astype(np.int64)
        # The token at which the document of each target begins; without DOC_MASK all are one document.
        starts = document_starts(tokens[None, :-1], config)
        begins = np.repeat(starts[:-1], np.diff(starts))
        self.chunks = window_rows(len(tokens) - 1, self.context, config.eval_stride, begins, chunk_tokens)
        tokens = np.pad(tokens, (0, self.context))  # the last windows reach beyond the text
        # Row i holds the T + 1 tokens from i on.
        self.host_windows = sliding_window_view(tokens, self.context + 1)
        self.device_windows = (
            torch.from_numpy(tokens).to(self.device).unfold(0, self.context + 1, 1)
            if config.val_prefetch else None)  # fmt: skip

    def score(self, chunk: Array) -> Array:
        """Nats of the targets of one of `chunks`, float64; all ranks call it together and get all of them."""
        # The targets of a chunk lie side by side.
        begin = chunk[0, 1]
        end = chunk[-1, 2]
        nats = torch.zeros(end - begin, dtype=torch.float64, device=self.device)
        # Ranks take batches in turn. A batch is the same for any number of ranks.
        first = self.machine.rank * self.batch_rows
        for at in range(first, len(chunk), self.machine.world_size * self.batch_rows):
            rows = chunk[at : at + self.batch_rows]
            nats[rows[0, 1] - begin : rows[-1, 2] - begin] = self._score_batch(rows)
        self.machine.add_up(nats)
        return nats.cpu().numpy()

    @torch.no_grad()
    def _score_batch(self, rows: Array) -> Tensor:
        """Nats of the targets of some windows, in order. The host waits for nothing and runs ahead."""
        first, start, stop = rows.T
        # Window r of the batch begins at token f. Its target i is row r T + (i - f) of the hidden states.
        shift = np.arange(len(rows)) * self.context - first
        scored_N = to_device(np.arange(start[0], stop[-1]) + np.repeat(shift, stop - start), self.device)
        if self.machine.compiled:  # one shape for compiled code: rows are repeated until the batch is full
            first = np.resize(first, self.batch_rows)
        host_ids_BT = self.host_windows[first]
        # With VAL_PREFETCH the tokens are on the device already, and only the numbers of the rows travel.
        if self.device_windows is None:
            ids_BT = to_device(host_ids_BT, self.device)
        else:
            ids_BT = self.device_windows[to_device(first, self.device)]
        targets_N = ids_BT[:, 1:].flatten()
        starts = starts_to_device(document_starts(host_ids_BT[:, :-1], self.model.settings), self.device)
        hidden_BTD = self.forward(self.model, ids_BT[:, :-1], starts, self.looping)
        # The head costs most, so it runs for scored rows alone.
        return self.model.loss_per_token(hidden_BTD.flatten(0, 1)[scored_N], targets_N[scored_N])


def score_sliding(
    model: GPT, tokens: Any, config: Config, clock: ScoreClock | None = None, looping: bool = True
) -> Ledger:
    """Score windows that advance by EVAL_STRIDE, each target with nearly EVAL_SEQ_LEN tokens of context.

    tokens: 1-D ids. looping: whether the extra passes run, as in `GPT.forward`. All ranks get one ledger. It
    is incomplete if the score would not end within the limit of its clock.
    """
    clock = clock or ScoreClock()
    ledger = Ledger(tokens)
    # Nothing is learned here: the size of chunks only says how often the clock is read.
    scorer = WindowScorer(model, tokens, config, 32 * config.val_pass_tokens, looping)
    for chunk in scorer.chunks:
        # At the rate so far, would the score end in time? Rank 0 decides for all.
        share = ledger.scored / len(ledger.nats) or 1.0
        if model.machine.gather(clock.seconds() > clock.limit_seconds * share)[0]:
            break
        ledger.record(int(chunk[0, 1]), scorer.score(chunk))
        clock.tell(ledger)
    return ledger


def score_roundtrip(
    model: GPT, tokens: Any, config: Config, clock: ScoreClock | None = None, looping: bool = True
) -> Ledger:
    """Score windows of EVAL_SEQ_LEN that do not overlap: the cheapest score, with the least context."""
    return score_sliding(model, tokens, replace(config, eval_stride=config.eval_length), clock, looping)


# --- test-time training ---


def score_ttt(model: GPT, tokens: Any, config: Config, clock: ScoreClock | None = None) -> Ledger:
    """Legal test-time training. The weights given stay as they are.

    TTT_MODE=sgd (PRs #549, #1493): score a chunk by sliding windows, then train all weights of a copy on it.
    The copy does not learn from the last chunk, as no score follows, nor from a chunk after which the clock
    has no time for it. TTT_MODE=lora: see `score_documents`.
    """
    machine = model.machine
    clock = clock or ScoreClock()
    if config.ttt_mode == "lora":
        return score_documents(model, tokens, config, clock)
    ledger = Ledger(tokens)
    learner = copy.deepcopy(model)
    sgd = torch.optim.SGD(learner.parameters(), momentum=config.ttt_momentum)
    scorer = WindowScorer(learner, tokens, config, config.ttt_chunk_tokens, looping=True)
    last = len(scorer.chunks) - 1
    learn_seconds = 0.0
    for number, chunk in enumerate(scorer.chunks):
        begin = int(chunk[0, 1])
        end = int(chunk[-1, 2])
        started = clock.seconds()
        ledger.record(begin, scorer.score(chunk))
        scored = clock.seconds()
        needed_seconds = learn_seconds + (scored - started) * (last - number)
        # All ranks learn together, by the clock of rank 0.
        if number < last and machine.gather(clock.learns(str(begin), end - begin, needed_seconds))[0]:
            # The learning rate falls to zero along a half cosine: later chunks have less left to gain.
            falling = 0.5 + 0.5 * math.cos(math.pi * number / last)
            sgd.param_groups[0]["lr"] = config.ttt_lr * falling
            learn(learner, sgd, ledger.scored_tokens(begin, end + 1), config)
            machine.wait()
            learn_seconds = clock.seconds() - scored
        clock.tell(ledger)
    return ledger


def learn(model: GPT, sgd: torch.optim.SGD, tokens: Array, config: Config) -> None:
    """TTT_EPOCHS passes over the whole sequences of scored tokens. All ranks call it together."""
    machine = model.machine
    weights = list(model.parameters())
    loss_of = machine.compile(GPT.loss)
    # Sequences overlap by one token: the last target of one is the first input of the next.
    length = config.eval_length
    sequences_NT = torch.from_numpy(tokens.astype(np.int64)).unfold(0, length + 1, length)
    for _ in range(config.ttt_epochs):
        for batch_BT in sequences_NT.split(config.ttt_batch_seqs):
            # Each rank computes its part of the batch, weighted by its size. A rank without a part computes
            # any row with weight zero, so that all ranks do the same steps.
            host_ids_BT = batch_BT[machine.rank % len(batch_BT) :: machine.world_size].numpy()
            weight = len(batch_BT[machine.rank :: machine.world_size]) / len(batch_BT)
            ids_BT = to_device(host_ids_BT, machine.device)
            starts = starts_to_device(document_starts(host_ids_BT[:, :-1], config), machine.device)
            sgd.zero_grad()
            with torch.enable_grad():
                loss = loss_of(model, ids_BT[:, :-1], ids_BT[:, 1:], starts)
                (loss * weight).backward()
            # One message for all.
            gradients = gradients_of(weights)
            flat = nn.utils.parameters_to_vector(gradients)
            machine.add_up(flat)
            nn.utils.vector_to_parameters(flat, gradients)
            nn.utils.clip_grad_norm_(weights, config.ttt_grad_clip)
            sgd.step()


# --- test-time training with adapters, document by document ---


def adapter_layout(c: Config) -> list[dict[str, int]]:
    """The adapters of each visit, extra passes included, and last that of the head: their outputs by name."""
    outputs = {"q": c.model_dim, "k": c.kv_dim, "v": c.kv_dim, "o": c.model_dim, "mlp": c.model_dim}
    of_visit = {name: outputs[name] for name in c.lora_targets if name != "head"}
    of_head = {"head": c.vocab_size} if "head" in c.lora_targets else {}
    return [*(len(visit_order(c, looping=True)) * [of_visit]), of_head]


def first_adapters(model: GPT, config: Config) -> Tensor:
    """The numbers (P,) with which the adapters of every document begin, in the order of `unpack`.

    A is drawn once, from SEED, name and visit alone: the same on every rank and for batches of any size. B is
    zero: the model scores the first chunk as it is.
    """
    inputs = config.model_dim
    bound = config.lora_scale_root / math.sqrt(inputs)
    matrices = []
    for visit, adapters in enumerate(adapter_layout(config)):
        for name, outputs in adapters.items():
            generator = generator_of(f"{config.seed} adapter {name} {visit}")
            a_N = torch.empty(config.ttt_lora_rank * inputs).uniform_(-bound, bound, generator=generator)
            matrices += [a_N, torch.zeros(outputs * config.ttt_lora_rank)]
    master = torch.promote_types(model.compute_dtype, torch.float32)
    return torch.cat(matrices).to(model.machine.device, master)


def unpack(numbers_BP: Tensor, layout: list[dict[str, int]], c: Config) -> list[Adapters]:
    """The adapters of these visits. Their numbers stand visit by visit and name by name, A before B."""
    rank = c.ttt_lora_rank
    sizes = []
    for visit in layout:
        for outputs in visit.values():
            sizes += [rank * c.model_dim, outputs * rank]
    # One split: on the way back it puts all gradients into one tensor at once.
    pieces = iter(numbers_BP.split(sizes, dim=1))
    found = []
    for visit in layout:
        adapters = {}
        for name in visit:
            a_BRI = next(pieces).unflatten(1, (rank, -1))
            adapters[name] = Adapter(a_BRI, next(pieces).unflatten(1, (-1, rank)))
        found.append(adapters)
    return found


def read_adapted(model: GPT, ids_BT: Tensor, starts: Tensor, numbers_BP: Tensor, config: Config) -> Tensor:
    """`GPT.forward`, each row with its own adapters. They are one tensor, as torch checks every input."""
    adapters = unpack(numbers_BP, adapter_layout(config), config)
    # All windows have the rotary base of the longest ones, so adapters see one geometry.
    return model(ids_BT, starts, True, None, adapters, config.eval_length)


ADAPTER_EPS = 1e-10  # of AdamW: gradients of one document's chunk are small (PR #1855)


def adamw_step(
    weights_N: Tensor, squares_N: Tensor, rounded_N: Tensor, gradients_N: Tensor, newest: Tensor,
    config: Config,
) -> None:  # fmt: skip
    """AdamW in place, with β1 = 0, which needs no first moment (PR #1855).

    newest: the share of the newest square in their mean. rounded_N: the weights, as the model reads them.
    """
    gradients_N = gradients_N.to(weights_N.dtype)
    squares_N.lerp_(gradients_N.square(), newest)
    # A step is as large for small weights as for large ones, so it has their scale.
    rate = config.ttt_lora_lr * config.lora_scale_root
    weights_N.mul_(1 - config.ttt_lora_lr * config.ttt_weight_decay)
    weights_N.addcdiv_(gradients_N, squares_N.sqrt() + ADAPTER_EPS, value=-rate)
    rounded_N.copy_(weights_N)


class DocumentAdapters:
    """The adapters of documents that learn side by side, and their optimizer.

    Each document has its own adapters and learns by itself: the loss is a sum over documents, and AdamW
    treats every number by itself. So scores do not depend on the neighbours, except for rounding.
    """

    def __init__(self, model: GPT, config: Config, first_P: Tensor, documents: int) -> None:
        """first_P: as `first_adapters` returns it. documents: how many."""
        self.config = config
        self.adamw = model.machine.compile(adamw_step)
        self.steps = 0
        # A document has a row of each, so that a step is one kernel. The last have the dtype of activations.
        # At least two: see `DocumentScorer.read`.
        self.weights_BP = first_P.repeat(max(documents, 2), 1)
        self.squares_BP = torch.zeros_like(self.weights_BP)
        self.rounded_BP = self.weights_BP.to(model.compute_dtype, copy=True)
        self.head_BP: Tensor | None = None

    def use(self, rows: int) -> Tensor:
        """The rounded numbers of the first documents; `step` learns from their gradients."""
        self.used_BP = self.rounded_BP[:rows].detach().requires_grad_()
        # Or torch recompiles for every number of documents.
        torch._dynamo.maybe_mark_dynamic(self.used_BP, 0)
        return self.used_BP

    def added_logits(self, hidden_BTD: Tensor) -> Tensor | None:
        """The part (N, V) of the head's adapters in the logits of some of the first documents."""
        c = self.config
        if "head" not in c.lora_targets:
            return None
        size = c.ttt_lora_rank * (c.model_dim + c.vocab_size)
        self.head_BP = self.rounded_BP[: len(hidden_BTD), -size:].detach().requires_grad_()
        (adapters,) = unpack(self.head_BP, adapter_layout(c)[-1:], c)
        return low_rank(hidden_BTD, adapters["head"]).flatten(0, 1)

    @torch.no_grad()
    def step(self, documents: int) -> None:
        """One step of the first documents, by the gradients of what was used last."""
        gradients_BP: Any = self.used_BP.grad
        if gradients_BP is None:  # the head alone has adapters
            gradients_BP = torch.zeros_like(self.used_BP)
        if self.head_BP is not None:
            gradients_BP[:documents, -self.head_BP.size(1) :] = self.head_BP.grad
        self.steps += 1
        # So the mean is AdamW's, with its correction.
        beta = self.config.ttt_beta2
        newest = self.weights_BP.new_full((), (1 - beta) / (1 - beta**self.steps))
        flat = []
        for numbers_BP in (self.weights_BP, self.squares_BP, self.rounded_BP, gradients_BP):
            flat.append(numbers_BP[:documents].view(-1))
            torch._dynamo.maybe_mark_dynamic(flat[-1], 0)
        self.adamw(*flat, newest, self.config)


class Chunk(NamedTuple):
    """One chunk of the documents of a batch. Places count from the beginning of a document."""

    documents: Array  # the numbers of those that reach this chunk, the first ones of the batch
    learning: int  # how many of them go on after it
    first: int  # the first token of the window
    start: int  # the first target of the chunk
    stop: int  # the end of both


class DocumentScorer:
    """Scores documents side by side, chunk by chunk, with adapters that learn from scored chunks."""

    def __init__(self, model: GPT, tokens: Array, config: Config, ledger: Ledger) -> None:
        """model: its weights must need no gradients."""
        self.model = model
        self.machine = model.machine
        self.config = config
        self.ledger = ledger
        self.device = self.machine.device
        # Rows and lengths differ from chunk to chunk: tensors are marked, and one graph serves several rows
        # of any length.
        self.forward = self.machine.compile(read_adapted)
        self.first_P = first_adapters(model, config)
        # Chunks may reach beyond the text: by a chunk, and the 16 tokens of `read`.
        self.tokens = np.pad(tokens, (0, config.eval_length + 16))
        # Document d has the targets begins[d] .. begins[d] + lengths[d]. Its last target is the next BOS.
        starts = document_starts(self.tokens[None, : len(tokens) - 1], replace(config, doc_mask=True))
        self.begins = starts[:-1]
        self.lengths = np.diff(starts)

    def batches(self) -> list[Array]:
        """The numbers of all documents in batches of similar length, the longest first, also in a batch."""
        longest_first = np.argsort(-self.lengths, kind="stable")
        size = self.config.documents_at_once
        return np.split(longest_first, range(size, len(longest_first), size))

    def batches_of_rank(self) -> list[Array]:
        """The batches of this rank: each goes to the rank with the least to do, before any is scored."""
        loads_tokens = np.zeros(self.machine.world_size)
        overhead_tokens = 8192  # a pass needs a few milliseconds at least
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

        The end of a chunk depends on its place alone, never on the length of the document, which is not known
        yet. Its window ends with it, and is EVAL_SEQ_LEN long if that many tokens stand before. Without
        learning a chunk may be long, and end with the longest document: it changes only how much context
        stands before a target, half of EVAL_SEQ_LEN at least.
        """
        lengths = self.lengths[batch]
        size = self.config.ttt_chunk_size
        if not learning:
            size = min((self.config.eval_length + 1) // 2, int(lengths[0]))
        start = 0
        while start < lengths[0]:
            stop = start + size
            first = max(0, stop - self.config.eval_length)
            going_on = int((lengths > stop).sum())
            yield Chunk(batch[lengths > start], going_on, first, start, stop)
            start = stop

    def score(self, batch: Array, learning: bool = True) -> None:
        """Score the documents of a batch; with `learning`, their adapters learn after every chunk."""
        adapters = DocumentAdapters(self.model, self.config, self.first_P, len(batch))
        for chunk in self.chunks(batch, learning):
            # Nothing learns after the last chunk of the longest document.
            learns = learning and chunk.learning > 0
            with torch.set_grad_enabled(learns):
                hidden_BCD = self.read(chunk, adapters)
            self.record(chunk, hidden_BCD, adapters)
            if learns:
                self.learn(chunk, hidden_BCD, adapters)

    def read(self, chunk: Chunk, adapters: DocumentAdapters) -> Tensor:
        """Hidden states (B, C, D) at the targets of a chunk, each from the tokens before it."""
        # Graphs of one row are others than those of several, and compile for a minute each: one document
        # stands in two rows.
        documents = chunk.documents
        if self.machine.compiled and len(documents) == 1:
            documents = documents.repeat(2)
        # Triton compiles its kernels again for a size that is no multiple of 16, so rows are padded to one.
        length = math.ceil((chunk.stop - chunk.first) / 16) * 16
        places_T = np.arange(chunk.first, chunk.first + length)
        places_BT = self.begins[documents, None] + places_T
        ids_BT = self.tokens[places_BT].astype(np.int64)
        # Padding follows the chunk and the document, so no token of them sees it.
        ends_B1 = np.minimum(self.lengths[documents, None], chunk.stop)
        ids_BT[places_T >= ends_B1] = BOS_ID
        # One document a row.
        row_starts = np.arange(0, ids_BT.size + 1, length, dtype=np.int32)
        starts = starts_to_device(row_starts, self.device)
        inputs_BT = to_device(ids_BT, self.device)
        # As the adapters: neither the number of rows nor their length is fixed.
        torch._dynamo.maybe_mark_dynamic(inputs_BT, (0, 1))
        numbers_BP = adapters.use(len(documents))
        hidden_BTD = self.forward(self.model, inputs_BT, starts, numbers_BP, self.config)
        return hidden_BTD[: len(chunk.documents), chunk.start - chunk.first : chunk.stop - chunk.first]

    @torch.no_grad()
    def record(self, chunk: Chunk, hidden_BCD: Tensor, adapters: DocumentAdapters) -> None:
        """Write the scores of a chunk into the ledger."""
        targets_BC = self.begins[chunk.documents, None] + np.arange(chunk.start, chunk.stop)
        nats_BC = self.nats(hidden_BCD, self.tokens[targets_BC + 1], adapters).double().cpu().numpy()
        for document, nats_C in zip(chunk.documents, nats_BC, strict=True):
            stop = min(chunk.stop, self.lengths[document])
            self.ledger.record(int(self.begins[document]) + chunk.start, nats_C[: stop - chunk.start])

    @torch.enable_grad()
    def learn(self, chunk: Chunk, hidden_BCD: Tensor, adapters: DocumentAdapters) -> None:
        """One step of the adapters of the documents that go on, on tokens from the ledger."""
        chunks = [
            self.ledger.scored_tokens(begin + chunk.start + 1, begin + chunk.stop + 1)
            for begin in self.begins[chunk.documents[: chunk.learning]]
        ]
        nats_BC = self.nats(hidden_BCD[: chunk.learning], np.stack(chunks), adapters)
        nats_BC.mean(1).sum().backward()
        adapters.step(chunk.learning)

    def nats(self, hidden_BCD: Tensor, targets_BC: Array, adapters: DocumentAdapters) -> Tensor:
        """Nats (B, C) of targets; the rows are the first documents of the batch."""
        targets_N = to_device(targets_BC.astype(np.int64).flatten(), self.device)
        added_NV = adapters.added_logits(hidden_BCD)
        return self.model.loss_per_token(hidden_BCD.flatten(0, 1), targets_N, added_NV).view(targets_BC.shape)


def score_documents(model: GPT, tokens: Any, config: Config, clock: ScoreClock) -> Ledger:
    """TTT_MODE=lora (PRs #1530, #1667): in each document, score a chunk, then train its adapters on it.

    The model itself does not learn, and no document sees another. So the sum of the nats does not depend on
    the order of the documents. Adapters do not learn from the last chunk of their document, nor in batches
    for which the clock has no time; each rank has its own clock.
    """
    ledger = Ledger(tokens)
    scorer = DocumentScorer(copy.deepcopy(model).requires_grad_(False), tokens, config, ledger)
    batches = scorer.batches_of_rank()
    own_targets = sum(int(scorer.lengths[batch].sum()) for batch in batches)
    passes = [len(list(scorer.chunks(batch, learning=False))) for batch in batches]
    step_seconds = 0.0  # of a chunk in the last batch with learning; later windows are no longer
    for number, batch in enumerate(batches):
        started = clock.seconds()
        steps = len(list(scorer.chunks(batch)))
        # Reserve: a pass without learning needs at most half a step, since it has no backward pass.
        needed_seconds = step_seconds * (steps + sum(passes[number + 1 :]) / 2)
        learning = clock.learns(str(batch[0]), int(scorer.lengths[batch].sum()), needed_seconds)
        scorer.score(batch, learning)
        if learning:
            step_seconds = (clock.seconds() - started) / steps
        clock.tell(ledger, own_targets)
    # Until now each rank has the scores of its own documents only. The ledger refuses a second score.
    machine = model.machine
    own = []
    for document in itertools.chain(*batches):
        begin = int(scorer.begins[document])
        own.append((begin, ledger.nats[begin : begin + scorer.lengths[document]]))
    for rank, scores in enumerate(machine.gather(own)):
        if rank != machine.rank:
            for begin, nats in scores:
                ledger.record(begin, nats)
    if machine.world_size > 1:
        clock.tell(ledger)
    return ledger


# --- all scores ---


def rehearse_evaluation(model: GPT, config: Config, run: Run) -> None:
    """Compile and try all of `evaluate`, on made-up text, before its clock; all ranks call it together."""
    # Every rank first compiles for itself: it scores as if it were alone, or it might get no batch.
    alone = copy.deepcopy(model)
    alone.machine = replace(model.machine, rank=0, world_size=1)
    # Four documents of 4, 2, 1 and 1 half windows.
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
            # In pairs: one row and several, with gradients and without.
            score_ttt(alone, text, replace(config, ttt_chunk_size=half, ttt_batch_size=2))
            # Then a batch for each rank, with the memory that the largest ones will need.
            document = text[: config.eval_length + 1]
            documents = config.documents_at_once * model.machine.world_size
            score_ttt(model, np.resize(document, documents * len(document) + 1), config)
            return
        # A whole chunk to learn from, and one more. All ranks share each batch of learning, of a size that
        # only compiled code must have met.
        chunk = config.ttt_chunk_tokens if model.machine.compiled else config.eval_length
        text = np.resize(text, chunk + half + 1)
        score_ttt(model, text, replace(config, ttt_epochs=1, ttt_chunk_tokens=chunk))


def evaluate(model: GPT, config: Config, run: Run, validation: Validation, form: str) -> dict[str, Score]:
    """Scores of reloaded weights, each with its final line: the one that ranks, then diagnostics.

    MAX_EVAL_SECONDS is for the first. Diagnostics get what is left of it, and are left out if that is too
    short. form: of the weights, as in the log: int6.
    """
    machine = model.machine
    # In this order. Each score starts from the same weights.
    scorers = {"legal_ttt": score_ttt, "sliding_window": score_sliding, "roundtrip": score_roundtrip}
    if not config.ttt_enabled:
        del scorers["legal_ttt"]
    if not config.eval_stride:
        del scorers["sliding_window"]

    # The modes beside EVAL_ONLY's artifact. Without a limit all is learned from.
    followed: dict[str, int] = {}
    path = find_path(config.eval_only).parent / EVAL_MODES
    if config.eval_only and config.max_eval_seconds and path.is_file():
        followed = json.loads(path.read_bytes())

    left_seconds = config.max_eval_seconds or math.inf
    scores: dict[str, Score] = {}
    for name, scorer in scorers.items():
        label = name if name == "legal_ttt" else f"final_{form}_{name}"
        # Windows that rank are all scored.
        limit = left_seconds if scores or config.ttt_enabled else math.inf
        with run.phase(f"eval_{name}"):
            clock = ScoreClock(run, name, config.val_progress_log_every, limit, followed)
            ledger = scorer(model, validation.tokens, config, clock)
        seconds = run.phases[f"eval_{name}"]
        left_seconds -= seconds
        if scores and ledger.scored < len(ledger.nats):
            run.log(f"{label} is left out: it would end after MAX_EVAL_SECONDS={config.max_eval_seconds:g}")
            continue
        for modes in machine.gather(clock.modes):  # of documents each rank knows its own
            clock.modes = modes | clock.modes
        score = ledger.score(validation.bytes_total)._replace(learned_tokens=sum(clock.modes.values()))
        run.log(f"{label} val_loss:{score.nats:.4f} val_bpb:{score.bits_per_byte:.4f} "
                f"eval_time:{1e3 * seconds:.0f}ms{validation.mark}\n"
                f"{label}_exact val_loss:{score.nats:.8f} val_bpb:{score.bits_per_byte:.8f} "
                f"scored_tokens:{score.scored_tokens} val_bytes:{score.bytes} "
                f"learned_tokens:{score.learned_tokens}{validation.mark}")
        run.record("final", name=f"{label}_exact", eval_seconds=seconds, **score._asdict())
        if machine.rank == 0 and run.directory is not None:
            # The nats of each document, fp64: `prove --replay` scores some of them again.
            begins = np.flatnonzero(validation.tokens[:-1] == BOS_ID)
            write_whole(run.path(f"nats_{name}.bin"), np.add.reduceat(ledger.nats, begins).tobytes())
            if clock.modes:
                write_whole(run.path(EVAL_MODES), json.dumps(clock.modes).encode())
        scores[name] = score
    return scores


# ============================================================================================================
# QUANTIZE — weights to integers: GPTQ moves each rounding error into weights that are still to be rounded.
# ============================================================================================================

Hessians = dict[tuple[str, int], Tensor]  # (input of matrices, layer) -> (C, C) fp32


@torch.no_grad()
def collect_hessians(model: GPT, batches: Iterable[Batch]) -> Hessians:
    """Sums of x xᵀ over the tokens of all ranks' training `batches`.

    All ranks call it together, with equally many batches. A looped layer adds up all of its visits.
    """
    sums: Hessians = {}

    def observe(site: str, layer: int, x: Tensor) -> None:
        x_NC = x.reshape(-1, x.size(-1)).float()
        sums[site, layer] = x_NC.T @ x_NC + sums.get((site, layer), 0.0)

    for batch in batches:
        model(batch.inputs_BT, batch.starts, observe=observe)
    for total in sums.values():
        model.machine.add_up(total)
    return sums


MAX_CODE = 127  # codes are int8, with as many on both sides of zero
# Steps of columns are at most eight times finer or coarser than those of their rows; in eighths of an octave.
COLUMN_EXPONENT_MAX = 24


class QuantizedWeights(NamedTuple):
    """A parameter as a bank of N matrices (R, C), in integers."""

    codes: Array  # (R, N * C) int8, in steps; along a trellis int16, in half steps
    exponents: Array  # (R, N) int8: the scale of each row, in eighths of an octave
    column_exponents: Array | None = None  # (N, C) int8: those of the columns; None: all are 0


def bank_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A parameter's shape as matrices, rows and columns; fewer axes: one matrix, perhaps of one row."""
    return (1, 1, *shape)[-3:]


def scales_of(exponents: Tensor) -> Tensor:
    """The scales of exponents. fp16 has too few digits to show how each machine rounds `exp2`."""
    return torch.exp2(exponents / 8).half().float()


class Quantizer:
    """GPTQ of one parameter (Frantar et al., arXiv 2210.17323; PR #1394).

    1. Order the columns by their Hessian diagonal, largest first.
    2. Factor the inverse of the damped Hessian; with `column_steps`, give every column its own step size.
    3. `quantize`: round column by column, and spread each rounding error over the columns still to come.

    Steps 1 and 2 are done once, step 3 for each step size that rate control tries. A parameter without any
    Hessian is rounded to nearest.
    """

    def __init__(
        self, name: str, weights: Tensor, parameter: Parameter, hessians: Hessians, config: Config
    ) -> None:
        """name: for messages. hessians: of `collect_hessians`.

        COLUMN_STEPS is the power in `_even_out`; 0: all columns have the same step. With TRELLIS=1 codes
        follow a trellis along the rows of a column. Both are for matrices alone, the parameters with a role.
        Raises ArtifactError where weights or Hessians are not finite.
        """
        self.trellis = config.trellis and parameter.role != ""
        self.nearest = nearest_on_trellis if self.trellis else nearest_code
        self.damping = config.gptq_damping  # more, where a Hessian needed it
        self.weights_NRC = weights.detach().view(bank_shape(parameter.shape))
        self.column_steps = 0.0
        self.column_exponents_NC = torch.zeros_like(self.weights_NRC[:, 0], dtype=torch.int8)
        # The unit of a step: a row's standard deviation; in small tensors its largest absolute weight.
        if parameter.role:
            self.spreads_NR = self.weights_NRC.std(dim=2)
            self.column_steps = config.column_steps
        else:
            self.spreads_NR = self.weights_NRC.abs().amax(dim=2)
        if not self.weights_NRC.isfinite().all():
            raise ArtifactError(f"{name} is not finite: nothing written; resume from a checkpoint")
        self.rounded = not (parameter.inputs and hessians)  # to nearest
        if self.rounded:
            return

        # With two inputs the first half of the bank has the first, the second half the second.
        layers = range(len(self.weights_NRC) // len(parameter.inputs))
        found = [hessians[site, layer] for site in parameter.inputs for layer in layers]
        h_NCC = torch.stack(found).double()
        if not h_NCC.isfinite().all():
            raise ArtifactError(f"inputs of {name} are not finite: nothing written; resume from a checkpoint")

        # Columns whose inputs are largest go first: their errors have the most columns to make up for them.
        diagonal_NC = h_NCC.diagonal(dim1=1, dim2=2)
        self.order_NC = diagonal_NC.argsort(dim=1, descending=True, stable=True)
        h_NCC = h_NCC.take_along_dim(self.order_NC[:, :, None], 1).take_along_dim(self.order_NC[:, None], 2)
        mean_N11 = diagonal_NC.mean(dim=1)[:, None, None].clamp(min=1e-30)
        self.upper_NCC = self._inverse_factor(h_NCC, mean_N11)
        if self.column_steps > 0:
            self.column_exponents_NC = self._even_out()
        # A column whose input was always zero changes nothing: zeros cost least to code.
        used_NRC = self.weights_NRC.masked_fill((diagonal_NC == 0)[:, None], 0.0)
        self.used_NRC = used_NRC.take_along_dim(self.order_NC[:, None], 2)

    def _inverse_factor(self, h_NCC: Tensor, mean_N11: Tensor) -> Tensor:
        """Upper Cholesky factors (N, C, C), fp32, of the inverses of damped Hessians.

        mean_N11: means of the diagonals. `damping` of them is added to the diagonals. Rounding can leave a
        Hessian without an inverse. A larger share then costs little precision, and a share that is large
        enough always helps.
        """
        identity_CC = torch.eye(h_NCC.size(1), device=h_NCC.device)
        while True:
            try:
                lower_NCC = torch.linalg.cholesky(h_NCC + self.damping * mean_N11 * identity_CC)
                return torch.linalg.cholesky(torch.cholesky_inverse(lower_NCC), upper=True).float()
            except torch.linalg.LinAlgError:
                self.damping *= 10

    def _even_out(self) -> Tensor:
        """Column exponents (N, C) that make all columns lose alike.

        GPTQ's loss is the sum of squares of error / U, with U the column's diagonal entry of the factor. With
        one step size, columns of small U make most of it. A given number of bits loses least with steps in
        proportion to U (WaterSIC: Lifar et al., arXiv 2603.04956). A power of U below 1 trusts Hessians of
        few tokens less.
        """
        octaves_NC = self.upper_NCC.diagonal(dim1=1, dim2=2).log2()
        # Only ratios matter: rate control sets the mean.
        octaves_NC = self.column_steps * (octaves_NC - octaves_NC.mean(dim=1, keepdim=True))
        exponents_NC = (8 * octaves_NC).round().clamp(-COLUMN_EXPONENT_MAX, COLUMN_EXPONENT_MAX).char()
        return exponents_NC.take_along_dim(self.order_NC.argsort(dim=1), 1)

    def quantize(self, step: float, levels: float) -> QuantizedWeights:
        """Codes for one step size, given in the spreads of a row.

        levels: the clip, in steps; with column exponents it is MAX_CODE, as finer steps need more of them.
        """
        # A scale is an eighth of an octave: one byte a row, and no table of scales.
        exponents_NR = (8 * (self.spreads_NR * step).clamp(min=1e-9).log2()).round().clamp(-127, 127).char()
        scales_NR = scales_of(exponents_NR)
        if self.rounded:
            values_NCR = (self.weights_NRC / scales_NR[:, :, None]).mT
            steps_NRC = self.nearest(values_NCR.flatten(0, 1), levels).view(values_NCR.shape).mT
        else:
            steps_NRC = self._compensate(scales_NR, levels)
        codes_NRC = (2 * steps_NRC).short() if self.trellis else steps_NRC.char()
        codes_RN = codes_NRC.transpose(0, 1).flatten(1)
        of_columns = self.column_exponents_NC.cpu().numpy() if self.column_steps > 0 else None
        return QuantizedWeights(codes_RN.cpu().numpy(), exponents_NR.T.cpu().numpy(), of_columns)

    def _compensate(self, row_scales_NR: Tensor, levels: float) -> Tensor:
        """Steps (N, R, C). Column by column, the weights still to come make up for each rounding error."""
        work_NRC = self.used_NRC.clone()
        column_scales_NC = scales_of(self.column_exponents_NC.take_along_dim(self.order_NC, 1))
        if self.column_steps > 0:
            levels = MAX_CODE
        for column in range(work_NRC.size(2)):
            scales_NR = row_scales_NR * column_scales_NC[:, column, None]
            values_NR = work_NRC[:, :, column]
            steps_NR = self.nearest(values_NR / scales_NR, levels)
            errors_NR = (values_NR - steps_NR * scales_NR) / self.upper_NCC[:, column, column, None]
            # Spread the error over the remaining columns, as GPTQ does.
            shares_N1C = self.upper_NCC[:, column, None, column:]
            work_NRC[:, :, column:].baddbmm_(errors_NR[:, :, None], shares_N1C, alpha=-1)
            work_NRC[:, :, column] = steps_NR
        # Back to the order in which the model has its columns.
        return work_NRC.take_along_dim(self.order_NC.argsort(dim=1)[:, None], 2)


def nearest_code(values: Tensor, levels: float) -> Tensor:
    """The whole step in ±levels nearest to each of the values in steps, of any shape: plain rounding."""
    return values.clamp(-levels, levels).round()


def restore_weights(quantized: QuantizedWeights, shape: tuple[int, ...]) -> Tensor:
    """The weights (`shape`) of codes and exponents, fp32, on the CPU."""
    matrices, rows, columns = bank_shape(shape)
    scales_RN1 = scales_of(torch.from_numpy(quantized.exponents)[:, :, None])
    if quantized.codes.dtype == np.int16:
        scales_RN1 /= 2
    weights_RNC = torch.from_numpy(quantized.codes).view(rows, matrices, columns) * scales_RN1
    if quantized.column_exponents is not None:
        weights_RNC *= scales_of(torch.from_numpy(quantized.column_exponents))
    return weights_RNC.transpose(0, 1).reshape(shape)


# --- the trellis: codes on two grids, half a step apart -----------------------------------------------------
#
# Weights that are rounded one by one have errors that fill a cube, of a mean square of step² / 12. A ball of
# the same volume has 1.53 dB less, and no code of the same entropy can gain more: 0.25 bits a weight.
#
# Trellis-coded quantization gets two thirds of that. A code k stands for k steps, or for k and a half: its
# shift is 0 or 1 half steps. The shift is not stored. It follows from the codes of the rows before:
#
#     next shift = parity of the code ^ shift one row before ^ shift two rows before
#
# So a code costs as many bits as one of whole steps, and its parity chooses the grids of the rows to come.
# The shifts of three rows are a state. Dynamic programming finds the sequence of codes with the least squared
# error in the trellis of the eight states.
# (TCQ: Marcellin and Fischer 1990, with an entropy coder: Fischer and Wang 1992; this code of eight states is
# Ungerboeck's, 1982; on weights, without an entropy coder: Tseng et al., arXiv 2406.11235)

# Rows after which all shifts are 0 again: blocks of rows are searched side by side, at a cost of 0.01 bits.
TRELLIS_ROWS = 128


class Trellis:
    """The shifts of an array that is read row by row; every column has its own state."""

    def __init__(self, columns: int) -> None:
        self.rows = 0
        # Of the next row, of the one before it and of the one before that.
        self.shifts_3C = np.zeros((3, columns), np.int64)

    def follow(self, codes_C: Array) -> None:
        """Move on to the row after these codes."""
        shift_C, before_C, before_that_C = self.shifts_3C
        next_shift_C = (codes_C & 1) ^ before_C ^ before_that_C
        self.shifts_3C = np.stack([next_shift_C, shift_C, before_C])
        self.rows += 1
        if self.rows % TRELLIS_ROWS == 0:
            self.shifts_3C[:] = 0


def half_steps(codes_RC: Array) -> Array:
    """The values of codes in half steps: 2 · code + shift, int16."""
    trellis = Trellis(codes_RC.shape[1])
    halves_RC = 2 * codes_RC.astype(np.int16)
    for codes_C, halves_C in zip(codes_RC, halves_RC, strict=True):
        halves_C += trellis.shifts_3C[0]
        trellis.follow(codes_C)
    return halves_RC


# A branch of the trellis leads from a state (the last three shifts) to the next one (next shift, shift, shift
# before). The code has the parity that leads to the next shift.
NEXT, SHIFT, BEFORE, BEFORE_THAT = np.indices((2, 2, 2, 2))
PARITY = NEXT ^ BEFORE ^ BEFORE_THAT


def nearest_path(values_RC: Array, levels: float) -> Array:
    """The half steps (R, C), int16, nearest to each column of `values_RC`, which are in steps.

    values_RC: up to TRELLIS_ROWS rows. The path has the least squared error of all that `half_steps` can give
    for codes in ±levels (Viterbi 1967).
    """
    rows, columns = values_RC.shape
    # For each shift and each parity of a code: the nearest half steps. Codes of one parity are two steps
    # apart; the largest is levels, rounded, or the one below.
    halves_22RC = np.empty((2, 2, rows, columns), np.float32)
    for shift in range(2):
        for parity in range(2):
            largest = round(levels)
            largest -= (largest + parity) % 2
            codes_RC = 2 * np.rint((values_RC - shift / 2 - parity) / 2) + parity
            halves_22RC[shift, parity] = 2 * np.clip(codes_RC, -largest, largest) + shift
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
        next_shift = shift
        shift = before
        before = before_that
    return path_RC


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


# ============================================================================================================
# CODER — integers to bytes: rANS under a model that learns as it goes; knows nothing of networks.
# ============================================================================================================

# A row's frequencies come from the rows before it, in one table per class of columns: no table is stored,
# none can be forged, and columns of different spread do not share one. Integers, and float operations that
# IEEE 754 rounds exactly, give the same bytes on every machine. (rANS: Duda, arXiv 1311.2540)
#
# Along a trellis each class has a second table, for codes that stand for half a step more. Both sides know
# the shift from the codes before, so it costs nothing.
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

    def __init__(self, columns: int, peak_byte: int) -> None:
        """peak_byte: the largest |code| of the array, plus ALONG_TRELLIS where it follows a trellis."""
        self.along_trellis = peak_byte >= ALONG_TRELLIS
        self.trellis = Trellis(columns)  # off the trellis all its shifts stay 0
        peak = peak_byte % ALONG_TRELLIS
        self.peak = peak
        self.size = 2 * peak + 1
        values = np.arange(-peak, peak + 1.0)
        if self.along_trellis:
            values = np.stack([values, values + 0.5])
        # A first guess for about the middle of each class, with heavier tails than a Gaussian: Student's t
        # with seven degrees of freedom, 64 at its top; 1.5 keeps the narrowest class from being too sure.
        # Products only: powers round differently on different machines, and then decoders would disagree.
        means = np.append(2.0, CLASS_EDGES * 1.1)[:, None] / 256
        bell = 1.0 / (1.0 + values[..., None, :] * values[..., None, :] / (6.0 * means * means + 1.5))
        self.counts = np.floor(64.0 * bell * bell * bell * bell).astype(np.int64).reshape(-1, self.size)
        # As if two rows had come before, with codes of a sixth of the peak.
        self.rows = 2
        self.sums_256ths = np.full(columns, 2 * 256 * peak // 6)

    def tables(self) -> tuple[Array, Array, Array]:
        """For the next row: first entry of each column's table; frequency and first slot of every entry."""
        # No symbol is impossible: each has one slot; the others are shared out by how often each was seen.
        totals = self.counts.sum(1, keepdims=True)
        frequencies = 1 + self.counts * (SLOTS - self.size) // totals
        # The slots that rounding left go to the most frequent symbol of each table.
        unused = SLOTS - frequencies.sum(1)
        most_frequent = self.counts.argmax(1)
        frequencies[range(len(frequencies)), most_frequent] += unused
        classes = np.searchsorted(CLASS_EDGES, self.sums_256ths // self.rows, side="right")
        classes += self.trellis.shifts_3C[0] * (len(CLASS_EDGES) + 1)
        flat = frequencies.ravel()
        return classes * self.size, flat, flat.cumsum() - flat

    def learn(self, first_entries: Array, symbols: Array) -> None:
        """Count the row that was just coded, by the tables that begin at `first_entries`."""
        # Counts only grow: old rows count as much as new ones, as weights have no order in time.
        seen = np.bincount(first_entries + symbols, minlength=self.counts.size)
        self.counts += seen.reshape(self.counts.shape)
        codes = symbols - self.peak
        self.sums_256ths += 128 * np.abs(2 * codes + self.trellis.shifts_3C[0])  # 128 are a half step
        self.rows += 1
        if self.along_trellis:
            self.trellis.follow(codes)


def encode(arrays: list[Array]) -> bytes:
    """Bytes of integer arrays (rows, columns): int8 codes in ±MAX_CODE, or int16 `half_steps` of such codes.

    Symbols go to lanes in turn, each with its own state, so that numpy codes many at once; a lane costs four
    bytes. The bytes: `peak_byte` of each array, number of lanes, states, words in the order they are read.
    """
    lanes = min(16 + sum(array.size for array in arrays) // 16_384, 1024)

    # Forward: frequency and first slot of each symbol, as the decoder will find them.
    peak_bytes = bytearray()
    coded = []
    for array in arrays:
        codes = array.astype(np.int64)
        kind = 0
        if array.dtype == np.int16:
            codes >>= 1  # the shift goes: it follows from the codes before
            kind = ALONG_TRELLIS
        peak_bytes.append(kind + np.abs(codes).max(initial=0))
        model = SymbolModel(array.shape[1], peak_bytes[-1])
        for symbols in codes + model.peak:
            first_entries, frequencies, starts = model.tables()
            entries = first_entries + symbols
            # 16 bits each: all of them wait until the last symbol is known.
            coded.append((frequencies[entries].astype("u2"), (starts[entries] % SLOTS).astype("u2")))
            model.learn(first_entries, symbols)

    # Backward: rANS decodes last what was coded first.
    states = np.full(lanes, 1 << 16, np.int64)
    words = []
    for row_frequencies, row_starts in reversed(coded):
        for left in reversed(range(0, len(row_starts), lanes)):
            frequencies = row_frequencies[left : left + lanes].astype(np.int64)
            starts = row_starts[left : left + lanes]
            state = states[: len(starts)]
            # Coding multiplies a state by SLOTS / frequency: one that would outgrow 32 bits first gives its
            # low word away.
            outgrows = (state >> 17) >= frequencies
            words.append(state[outgrows].astype("<u2").tobytes())
            state >>= np.where(outgrows, 16, 0)
            # Floats divide several times as fast, and here exactly: a quotient of 32 bits that is no whole
            # number is at least 2**-15 away from one.
            quotients = (state / frequencies).astype(np.int64)
            state += quotients * (SLOTS - frequencies) + starts
    head = peak_bytes + lanes.to_bytes(2, "little") + states.astype("<u4").tobytes()
    return b"".join([head, *reversed(words)])


def decode(data: bytes, shapes: list[tuple[int, int]]) -> list[Array]:
    """Inverse of `encode`, for arrays of these shapes (rows, columns): int8 codes, or int16 half steps.

    Raises ValueError where the data end early, late, or in the wrong state.
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
        for symbols in array:
            first_entries, frequencies, starts = model.tables()
            for left in range(0, columns, lanes):
                first = first_entries[left : left + lanes]
                state = states[: len(first)]
                # The low bits of a state name a slot of the column's table, and so the symbol it belongs to.
                slots = starts[first] + state % SLOTS
                entries = starts.searchsorted(slots, side="right") - 1
                symbols[left : left + lanes] = entries - first
                # Undo the encoder's step: the states before these symbols.
                state[:] = frequencies[entries] * (state // SLOTS) + slots - starts[entries]
                low = np.flatnonzero(state < 1 << 16)
                state[low] = (state[low] << 16) + words[used : used + len(low)]
                used += len(low)
            model.learn(first_entries, symbols)
        codes = (array - model.peak).astype(np.int8)
        arrays.append(half_steps(codes) if model.along_trellis else codes)
    if used != len(words) or (states != 1 << 16).any():
        raise ValueError("the words do not end where the arrays end")
    return arrays


# ============================================================================================================
# ARTIFACT — a model to bytes and back: code and file together fill ARTIFACT_BYTES_MAX, and never exceed it.
# ============================================================================================================

COARSEST_STEP = 2.0  # standard deviations of a row; two thirds of the codes are zero then
# Small tensors get 8 bits. With this step their largest weight fits into MAX_CODE steps even where rounding
# the exponent made the scale 2 ** (1 / 16) smaller.
SMALL_STEP = 1 / 120
# Factors of the configured steps that rate control tries; one notch changes a file of 36 M weights by 2 kB.
MULTIPLIERS = 2.0 ** np.arange(-7, 12, 1 / 2048)


def step_and_levels(parameter: Parameter, config: Config, multiplier: Any) -> tuple[Any, Any]:
    """Step of a parameter's codes in spreads of a row, and the number of steps from zero to the clip.

    A spread is the standard deviation of a row of a matrix, or the largest weight of a row of a small tensor.
    multiplier: a factor of the configured step, or an array of them. No step is finer than that of 8 bits,
    none coarser than COARSEST_STEP unless it is configured so. Small tensors always have 8 bits.
    """
    if not parameter.role:
        return SMALL_STEP, MAX_CODE
    # As published: a clip and a number of bits; rate control then scales the step.
    clip = getattr(config, f"{parameter.role}_clip_sigmas")
    bits = config.embed_bits if parameter.role == "embed" else config.matrix_bits
    configured = clip / (2 ** (bits - 1) - 1)
    step = np.clip(multiplier * configured, clip / MAX_CODE, max(configured, COARSEST_STEP))
    return step, clip / step


def expected_bytes(config: Config, multiplier: Any) -> Any:
    """About how large the file will be: a thousand bytes, and ½·log2(1 + 2πe/step²) bits per weight.

    These bits are about the entropy of a Gaussian value that is rounded with this step, in standard
    deviations. multiplier: as in `step_and_levels`; an array of them gives an array of sizes.
    """
    total = 1000.0
    for parameter in parameter_table(config).values():
        step, _ = step_and_levels(parameter, config, multiplier)
        bits = 0.5 * np.log2(1 + 2 * math.pi * math.e / step**2)
        total += math.prod(parameter.shape) * bits / 8
    return total


def check_size(size_bytes: int, budget: int) -> None:
    """ArtifactError where a file does not fit into `budget` bytes, which the code leaves for it."""
    if size_bytes > budget:
        raise ArtifactError(
            f"artifact {size_bytes} bytes, limit {budget} without the code: {size_bytes - budget} bytes too "
            "many for ARTIFACT_BYTES_MAX; lower MODEL_DIM, raise ARTIFACT_BYTES_MAX or set RATE_CONTROL=1")


def check_budget(config: Config, budget: int) -> None:
    """ArtifactError, before a paid training, where the coarsest file is expected to exceed `budget` bytes."""
    coarsest = MULTIPLIERS[-1] if config.rate_control else 1.0
    # Trained weights are no perfect Gaussians: a file that is expected to be 5 % too large may still fit.
    check_size(round(expected_bytes(config, coarsest) / 1.05), budget)


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
    note = ""
    passes = 0
    wanted = aim  # in expected bytes
    expected_before = 0.0
    true_before = 0
    while finest <= coarsest and (not best or (len(best) < enough and passes < 10)):
        # A new factor, inside the open interval.
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
            note = f"step_multiplier:{multipliers[at]:.4f}"
    check_size(len(best or data), budget)
    return best, f"{note} passes:{passes}"


MAGIC = b"\x89PGA\r\n\0\4"  # the last byte is the version
# Magic, size of the header, CRC-32 of it and of the coded weights, which follow.
HEAD = struct.Struct("<8s3I")


def write_artifact(
    model: GPT, config: Config, hessians: Hessians, tokenizer_sha256: str, budget: int
) -> tuple[bytes, str]:
    """Quantize and code a model: a file of at most `budget` bytes, and a line about it for the log.

    With RATE_CONTROL it fills them; without, bits and clips are as given. hessians: of `collect_hessians`;
    none: all weights are rounded to nearest. tokenizer_sha256: scoring compares it with its tokenizer's.
    Raises ArtifactError when nothing fits, or weights are not finite.
    """
    table = parameter_table(config)
    header = {"config": config.as_env(ModelSettings), "tokenizer_sha256": tokenizer_sha256,
              "column_steps": config.column_steps > 0}  # fmt: skip
    packed_header = zlib.compress(json.dumps(header).encode(), 9)
    quantizers = {}
    damped = ""
    for name, weights in model.named_parameters():
        quantizer = Quantizer(name, weights, table[name], hessians, config)
        quantizers[name] = quantizer
        if quantizer.damping != config.gptq_damping:
            damped += f" warning: {name} has no inverse Hessian below GPTQ_DAMPING={quantizer.damping:g}"

    def make_file(multiplier: float) -> bytes:
        # Codes and exponents of each parameter in turn, then the exponents of columns.
        arrays = []
        of_columns = []
        for name, quantizer in quantizers.items():
            bank = quantizer.quantize(*step_and_levels(table[name], config, multiplier))
            arrays += [bank.codes, bank.exponents]
            if bank.column_exponents is not None:
                of_columns.append(bank.column_exponents)
        coded = encode(arrays + of_columns)
        head = HEAD.pack(MAGIC, len(packed_header), zlib.crc32(packed_header), zlib.crc32(coded))
        return head + packed_header + coded

    data, note = fill_budget(config, budget, make_file)
    return data, f"artifact_bytes:{len(data)} budget_bytes:{budget} {note}{damped}"


class About(NamedTuple):
    """The facts about an artifact that do not lie in its model."""

    config: dict[str, str]  # the model's settings
    tokenizer_sha256: str
    bytes: int
    sha256: str


def load_artifact(path: Path, data: bytes | None = None) -> tuple[GPT, About]:
    """The model of an artifact, on the CPU. Nothing in the file is executed.

    data: the bytes of the file, for a process that does not see it; None: they are read. Memory stays in
    proportion to their number. Raises ArtifactError, and nothing else, whatever the bytes are.
    """
    try:
        if data is None:
            data = path.read_bytes()
        header, banks = read_artifact(data)
        model = GPT(ModelSettings.from_values(header["config"]), seed=None)
        for name, weights in model.named_parameters():
            weights.data.copy_(restore_weights(banks[name], weights.shape))
            if not weights.isfinite().all():
                raise ValueError(f"{name} is not finite")
        sha256 = hashlib.sha256(data).hexdigest()
        return model, About(header["config"], header["tokenizer_sha256"], len(data), sha256)
    except Exception as error:  # whatever the bytes are
        raise ArtifactError(f"{path}: expected the {ARTIFACT} of a run: {error}") from error


def read_artifact(data: bytes) -> tuple[dict[str, Any], dict[str, QuantizedWeights]]:
    """The header of a file and its parameters in integers. ValueError and others where the bytes are bad."""
    if not data.startswith(MAGIC):
        raise ValueError("no artifact, or made by version 0.5.4 or older: use the train_gpt.py of its run")
    _, header_bytes, *checksums = HEAD.unpack_from(data)
    # Nothing is interpreted before it is known to be whole.
    packed_header = data[HEAD.size : HEAD.size + header_bytes]
    coded = data[HEAD.size + header_bytes :]
    if checksums != [zlib.crc32(packed_header), zlib.crc32(coded)]:
        raise ValueError("truncated or damaged; copy the file again")
    header = json.loads(zlib.decompressobj().decompress(packed_header, 1 << 16))
    settings = ModelSettings.from_values(header["config"])
    if settings.as_env() != header["config"]:
        raise ValueError("this script has other settings than the file; use the train_gpt.py of its run")
    # A few bytes in a broken file could request any amount of memory. No trained file comes near 1,024
    # weights a byte.
    weights = count_parameters(settings)
    if weights > 1024 * len(data):
        raise ValueError(f"{weights} weights are more than {len(data)} bytes can hold")
    table = parameter_table(settings)
    shapes = []
    of_columns = {}  # shapes of the exponents of columns, by parameter
    for name, parameter in table.items():
        matrices, rows, columns = bank_shape(parameter.shape)
        shapes += [(rows, matrices * columns), (rows, matrices)]
        if header["column_steps"] and parameter.role:
            of_columns[name] = (matrices, columns)
    arrays = iter(decode(coded, [*shapes, *of_columns.values()]))
    banks = {name: QuantizedWeights(next(arrays), next(arrays)) for name in table}
    for name in of_columns:
        banks[name] = banks[name]._replace(column_exponents=next(arrays))
    return header, banks


SETTINGS_OF_A_START = ("RUN_ID", "RESUME", "RESUME_OTHER_CODE", "EVAL_ONLY")  # the next one has its own
# A wrapped script: Python that unpacks its own source. latin-1 has a character for every byte.
WRAPPER = """# coding: latin-1
SHIPPED_SETTINGS={}
import bz2,linecache
s=bz2.decompress('''%s'''.encode("latin-1")).decode()
n=__file__+"~"
linecache.cache[n]=len(s),None,s.splitlines(True),n
exec(compile(s,n,"exec"))
"""
# What the text of a wrapper cannot hold as it is, in the order of replacement. A digit after NUL would
# belong to its escape. Three quotes, or one more at the end, would end the text.
ESCAPES = {r"\\": r"\\\\", "\r": r"\\r", "\0(?=[0-7])": r"\\x00", "\0": r"\\0", r"'(?=''|\Z)": r"\\'"}

# Other decorators may read the types of a function: Triton's and torch's own do.
READ_NO_TYPES = {"staticmethod", "contextlib.contextmanager", "torch.no_grad()", "property", "classmethod"}


def shipped_code(source: bytes) -> bytes:
    """The script in the form that is shipped and counted: packed, without comments, docstrings and types.

    A script that is wrapped already stays as it is.
    """
    if source.startswith(WRAPPER.split("{")[0].encode()):
        return source
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        if not isinstance(node, ast.FunctionDef):
            continue
        if READ_NO_TYPES.issuperset(map(ast.unparse, node.decorator_list)):
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
    # The first = of a line needs no spaces; behind a quote it may be text. On a text of this length bzip2 is
    # 3 % ahead of LZMA.
    code = re.sub(r"(?m)^([^'\"\n]*?) = ", r"\1=", ast.unparse(tree))
    packed = bz2.compress(code.encode()).decode("latin-1")
    for pattern, escape in ESCAPES.items():
        packed = re.sub(pattern, escape, packed)
    return (WRAPPER % packed).encode("latin-1")


def with_settings(shipped: bytes, config: Config) -> bytes:
    """A shipped script with the settings of `config` as its defaults, whatever it had before.

    All seeds of a record ship one script: SEED, and what belongs to a single start, stay out.
    """
    settings = config.overrides()
    for name in (*SETTINGS_OF_A_START, "SEED", "RUNS_DIR"):
        settings.pop(name, None)
    # A value may hold a backslash, which a replacement text would expand.
    return re.sub(rb"(?<=SHIPPED_SETTINGS=).*", lambda _: ascii(settings).encode(), shipped)


# ============================================================================================================
# TRAIN — steps under a clock that rank 0 reads for all, so that all ranks take the same ones and stop as one.
# ============================================================================================================


class StepResult(NamedTuple):
    """Loss and gradient norm of a step, perhaps still on their way to the host."""

    step: int  # 1: the first
    progress: float
    values: Tensor  # (2,): mean loss of this rank, gradient norm
    copied: torch.cuda.Event | None  # when `values` has arrived; None: it has
    wait_ms: float  # of the host, for the step's batches


@dataclass
class Training:
    """Model, optimizer, loader and clock of a run: everything that a step touches."""

    config: Config
    run: Run
    shards: list[Shard]
    validation: Validation
    ops: Ops
    hashes: dict[str, str]  # SHA-256 of code, tokenizer and shards; a checkpoint holds them

    def __post_init__(self) -> None:
        config = self.config
        run = self.run
        machine = run.machine
        self.model = ready_model(build_model(config), machine, self.ops)
        # One graph from tokens to loss.
        self.loss = machine.compile(GPT.loss)
        self.optimizer = Optimizer(self.model, config, machine)
        profiler = torch.profiler.profile() if config.profile_steps else None
        self.trace = Trace(config.traced_steps, run.directory, machine.rank, run.log, profiler)
        self.timer = StepTimer(
            config.training_timing_every if config.training_timing_breakdown else 0,
            machine.on_gpu, self.trace)  # fmt: skip
        self.loader = Loader(config, self.shards, machine, self.trace)
        self.step = 0
        self.unread: list[StepResult] = []
        self.waits_ms: list[float] = []  # for batches, of the steps since the last line
        self.started = time.perf_counter()  # shifted forward by time that does not count
        self.val_seconds = 0.0  # of all validations since the process began

    @property
    def seconds(self) -> float:
        """Seconds of training, without validation and saving."""
        return time.perf_counter() - self.started

    def stream_hash(self) -> int:
        """The stream hash of all ranks' batches; all ranks call it together."""
        return sum(self.run.machine.gather(self.loader.stream_hash)) % 2**64

    def state(self) -> dict[str, Any]:
        """A copy of everything that training has changed, for any world size; all ranks call it together."""
        return {
            "config": self.config.as_env(TrainingSettings),
            "hashes": self.hashes,
            "step": self.step,
            "seconds": self.seconds,
            "stream_hash": self.stream_hash(),
            "optimizer": self.optimizer.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Become what `state` returned; all ranks call it together."""
        self.optimizer.load_state(state["optimizer"])
        self.step = state["step"]
        # The hash is a sum over the ranks: one of them begins with all of it.
        stream_hash = state["stream_hash"] if self.run.machine.rank == 0 else 0
        self.loader.seek(self.step, stream_hash)
        # The clock starts when the first batch is there on all ranks, and no device is still at work.
        self.loader.stage_first()
        self.run.machine.wait()
        self.run.machine.gather(None)
        self.started = time.perf_counter() - state["seconds"]

    def save(self) -> None:
        """Replace the checkpoint by one of now, outside the clock; a failure is told, and costs no run.

        All ranks call it together, after `read_results`; rank 0 writes.
        """
        start = time.perf_counter()
        state = self.state()
        try:
            if self.run.machine.rank == 0:
                if not all(weights.isfinite().all() for weights in state["optimizer"]["weights"]):
                    raise ConfigError("its weights are not finite")
                path = self.run.path(CHECKPOINT)
                write_whole(path, torch_file(state))
                self.run.log(f"checkpoint:{path} step:{self.step}")
        except (ConfigError, MemoryError, RuntimeError) as error:  # of torch: no memory, here or on a GPU
            self.run.log(f"warning: no checkpoint of step {self.step}, none is replaced: {error!r}")
        self.started += time.perf_counter() - start


def torch_file(value: Any) -> bytes:
    """The bytes of the file that torch.save writes, for `write_whole`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read_checkpoint(config: Config, hashes: dict[str, str]) -> dict[str, Any]:
    """The state of the run that RESUME names; empty without RESUME. Nothing in the file is executed.

    ConfigError where it cannot be read, or where settings of training, data or code are not those of now.
    RESUME_OTHER_CODE allows other code: then `hashes` gets the hash of the former code, too.
    """
    if not config.resume:
        return {}
    path = find_path(config.resume) / CHECKPOINT
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        then = {**state["config"], **state["hashes"]}
    except Exception as error:  # whatever the bytes are
        raise ConfigError(f"RESUME: {path} cannot be read ({type(error).__name__}); a finished run has none, "
                          "and those of 0.5.4 and older need that version") from error  # fmt: skip
    now = {**config.as_env(TrainingSettings), **hashes}
    changed = [name for name in then | now if then.get(name) != now.get(name)]
    # A bug in a log line must not cost a paid training. But all records then name both scripts, and no script
    # has such a hash.
    if changed == ["code"] and config.resume_other_code:
        hashes["code"] += f" after {then['code']}"
    elif changed:
        named = ", ".join(f"{name} is {now.get(name)}, it was {then.get(name)}" for name in changed)
        script = shlex.quote(f"{path.parent}/train_gpt.py")
        raise ConfigError(f"RESUME={config.resume}: {named}; start {script} with nothing "
                          "else set. RESUME_OTHER_CODE=1 allows another script, and is recorded")  # fmt: skip
    return state


def train_step(training: Training, progress: float) -> Tensor:
    """One optimizer step. Returns this rank's mean loss and the gradient norm (2,), still on the device.

    progress: share of the run that is over.
    """
    config = training.config
    loader = training.loader
    timer = training.timer
    looping = loop_is_on(progress, config)  # the same on all ranks, as progress is
    # The sum of the losses stays on the device: nobody waits for it.
    total = torch.zeros((), device=training.run.machine.device)
    # Steps of the warm-up have no number, and are neither timed nor traced.
    timer.begin(training.step + 1 if training.run.training else 0)
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
    norm = training.optimizer.step(lr_scale, momentum, training.step, timer.lap)
    timer.lap("optimizer")
    line = timer.end(loader.stage_ms, loader.micro_steps)
    if line:
        training.run.log(line)
    return torch.stack([total, norm])


def rehearse_end(training: Training) -> None:
    """Do all that follows training once, on the first weights, each part as a phase; all ranks together.

    What would fail after a paid training fails here, and compiles here. `warm_up` undoes it.
    """
    config = training.config
    run = training.run
    machine = run.machine
    hessians: Hessians = {}
    if config.gptq:
        # The first batch loads kernels. The second one shows how long all will take.
        for part in ("rehearse_hessians", "rehearse_calibration_batch"):
            with run.phase(part):
                hessians = collect_hessians(training.model, [training.loader.next_batch()])
        batches = math.ceil(config.gptq_calibration_batches / machine.world_size)
        seconds = batches * run.phases["rehearse_calibration_batch"]
        # Of the reserve, `calibration_batches` keeps a tenth to spare.
        if config.max_wallclock_seconds > 0 and seconds > 0.9 * config.gptq_reserve_seconds:
            run.log(f"warning: {batches} calibration batches need {seconds:.2f}s, GPTQ_RESERVE_SECONDS="
                    f"{config.gptq_reserve_seconds:g} allows 90 % of it; raise it, or fewer are used")
    with run.phase("rehearse_artifact"):
        data = b""
        if machine.rank == 0:
            # One pass, of any size: no search for the budget.
            data, _ = write_artifact(
                training.model, replace(config, rate_control=False), hessians, "", sys.maxsize)
        model, _ = load_artifact(Path("rehearsal"), machine.gather(data)[0])
        ready_model(model, machine, training.model.ops)
    rehearse_evaluation(model, config, run)
    if machine.on_gpu:
        # The steps to come find the memory as if nothing had been.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def warm_up(training: Training, resumed: dict[str, Any] | None = None) -> None:
    """Rehearse the end, and compile each graph by WARMUP_STEPS real steps, if that is not 0.

    Then undo all of it exactly, or become `resumed`.
    """
    config = training.config
    run = training.run
    after = resumed or training.state()
    if config.warmup_steps > 0:
        rehearse_end(training)
    # A graph runs with loops or without: it changes at this share of the run, if at all.
    graphs = {loop_is_on(share, config): share for share in (0.0, config.enable_looping_at)}
    for looping, share in graphs.items():
        training.loader.seek(0)
        with run.phase("warmup"):
            for number in range(1, config.warmup_steps + 1):
                train_step(training, share)
                run.log(f"warmup_step:{number}/{config.warmup_steps} looping:{looping:d}")
    training.load_state(after)
    if resumed:
        run.log(f"resumed:{run.directory} step:{training.step} "
                f"train_time:{1e3 * resumed['seconds']:.0f}ms code:{training.hashes['code']}")


def train(training: Training) -> None:
    """Step until the clock or ITERATIONS is over. A signal ends the process, once all is saved."""
    config = training.config
    run = training.run
    machine = run.machine
    every = config.checkpoint_every_seconds
    # Steps that a GPU may be behind the host, so that it always has work.
    behind = 2 if machine.on_gpu else 0
    seconds = machine.gather(training.seconds)[0]  # by the clock of rank 0
    step_seconds = seconds / max(training.step, 1)  # of a resumed run: its mean
    progress = run_progress(seconds, training.step, config)
    run.training = True
    while True:
        before = seconds
        # The clock of rank 0, and whether any rank has caught a signal: as sums, on the host, so no device is
        # asked. `gather` pickles, which costs eight ranks milliseconds a step.
        agreed = torch.tensor([training.seconds, run.stop_signal], dtype=torch.float64)
        if machine.rank != 0:
            agreed[0] = 0.0
        machine.add_up(agreed)
        seconds, caught = agreed.tolist()
        # The slowest recent step, which fades by 10 % per step.
        step_seconds = max(0.9 * step_seconds, seconds - before)
        # The step to come must end in time, so must those the device still has to do, and one to spare.
        ends_at = seconds + (2 + behind) * step_seconds
        stop = caught != 0 or run_progress(ends_at, training.step, config) >= 1
        # The end is always saved: whatever fails after it can be done again from there.
        save_now = stop or (every > 0 and seconds // every > before // every)
        validate_now = config.val_loss_every > 0 and (stop or training.step % config.val_loss_every == 0)

        # Before the weights are used or the run ends, all steps must be checked.
        read_results(training, leave=0 if save_now or validate_now else behind)
        if save_now:
            training.save()
        if validate_now and caught == 0:
            validate(training, f"step:{training.step}/{config.iterations}", loop_is_on(progress, config))
        if stop:
            break

        progress = run_progress(seconds, training.step, config)
        values = train_step(training, progress).to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if machine.on_gpu else None
        training.step += 1
        # Taken now: when the result is read, later steps have waited as well.
        wait_ms = training.loader.wait_ms
        training.loader.wait_ms = 0.0
        training.unread.append(StepResult(training.step, progress, values, copied, wait_ms))
    end_training(training)


def end_training(training: Training) -> None:
    """After the last step, which is saved: end the process if a signal has come."""
    run = training.run
    run.training = False  # from here on a signal ends the process at once
    caught = max(run.machine.gather(run.stop_signal))
    training.trace.finish()
    if caught != 0:
        run.machine.gather(None)  # torchrun kills the others when a rank has left
        run.log(f"stopped by signal {caught}; {run.ways_on()}")
        os._exit(128 + caught)
    if training.step < training.config.iterations:
        run.log(f"stopping_early: wallclock_cap train_time:{1e3 * training.seconds:.0f}ms "
                f"step:{training.step}/{training.config.iterations}")


def read_results(training: Training, leave: int) -> None:
    """Check and tell all steps but the last `leave`, for which the host would wait. FloatingPointError.

    All ranks call it together.
    """
    machine = training.run.machine
    while len(training.unread) > leave:
        # Two steps behind on a GPU: by then the numbers are there, and nobody waits.
        result = training.unread.pop(0)
        if result.copied is not None:
            result.copied.synchronize()
        # The mean over the ranks: a loss that is not finite on one of them ends all with the same message.
        values = result.values.double()
        machine.add_up(values)
        loss, norm = (values / machine.world_size).tolist()
        if not math.isfinite(loss + norm):
            raise FloatingPointError(
                f"step {result.step}, batch at token "
                f"{training.config.train_batch_tokens * (result.step - 1)}: train_loss {loss}, grad_norm "
                f"{norm}; lower MATRIX_LR and the other learning rates, or GRAD_CLIP_NORM")
        tell_step(training, result, loss, norm)


def tell_step(training: Training, result: StepResult, loss: float, norm: float) -> None:
    """The event of a step, and perhaps its line, in upstream's words."""
    config = training.config
    step = result.step
    seconds = training.seconds
    tokens = config.train_batch_tokens * step
    training.run.record(
        "train", step=step, train_loss=loss, train_time_ms=1e3 * seconds, tokens=tokens, grad_norm=norm,
        progress=result.progress, data_wait_max_ms=result.wait_ms)  # fmt: skip
    training.waits_ms.append(result.wait_ms)
    if step == 100:  # the mean is steady, and nearly all of a paid run is still to come
        training.run.log(f"pace:{1e3 * seconds / step:.2f}ms a step, at which MAX_WALLCLOCK_SECONDS="
                         f"{config.max_wallclock_seconds:g} and ITERATIONS={config.iterations} end after "
                         f"{step / run_progress(seconds, step, config):.0f} steps; looped layers and longer "
                         "sequences make later ones longer")
    every = config.train_log_every
    if every == 0 or (step > FIRST_STEPS and step % every != 0):
        return
    # Half of the steps waited for less than the first, 1 % for more than the second.
    p50, p99, most = np.percentile(training.waits_ms, [50, 99, 100])
    training.waits_ms.clear()
    training.run.log(
        f"step:{step}/{config.iterations} train_loss:{loss:.4f} train_time:{1e3 * seconds:.0f}ms "
        f"step_avg:{1e3 * seconds / step:.2f}ms tok_s:{tokens / seconds:.0f} "
        f"data_wait_ms:{p50:.2f}/{p99:.2f}/{most:.2f} "
        f"lr_scale:{learning_rate_scale(result.progress, step - 1, config):.4f} grad_norm:{norm:.3f} "
        f"eta:{seconds / run_progress(seconds, step, config) - seconds:.0f}s")


def validate(training: Training, label: str, looping: bool = True) -> None:
    """Stop the clock, and score the current weights without overlap: a diagnostic, never the result.

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
    # The time of looking does not count as training.
    training.started += val_seconds
    training.val_seconds += val_seconds
    train_ms = 1e3 * training.seconds
    run.log(
        f"{label} val_loss:{score.nats:.4f} val_bpb:{score.bits_per_byte:.4f} train_time:{train_ms:.0f}ms "
        f"step_avg:{train_ms / max(training.step, 1):.2f}ms{data.mark}\n"
        f"val_stage_time_ms:{1e3 * val_seconds:.0f}ms {label}")
    run.record(
        "val", label=label, step=training.step, val_loss=score.nats, val_bpb=score.bits_per_byte,
        train_time_ms=train_ms, val_ms=1e3 * val_seconds)  # fmt: skip


def calibration_batches(training: Training) -> Iterator[Batch]:
    """The training batches that follow the last step, while the clock allows; all ranks get equally many."""
    config = training.config
    machine = training.run.machine
    wanted = config.gptq_calibration_batches
    now = 0.0
    for number in range(math.ceil(wanted / machine.world_size)):
        machine.wait()
        before = now
        now = machine.gather(training.seconds)[0]
        # One more will take as long as the last; of the first one nothing is known. A tenth is to spare.
        ends_at = 2 * now - before + 0.1 * config.gptq_reserve_seconds
        if number > 0 and 0 < config.max_wallclock_seconds < ends_at:
            training.run.log(f"warning: {number * machine.world_size} calibration batches, expected "
                             f"GPTQ_CALIBRATION_BATCHES={wanted}; raise GPTQ_RESERVE_SECONDS")
            return
        yield training.loader.next_batch()


# ============================================================================================================
# main — a table of contents: check, prepare, warm up, train, ship, reload, evaluate, report.
# ============================================================================================================

SETTINGS_FILE = "config.env"


class Inputs(NamedTuple):
    """What a run reads, checked before anything is written."""

    directory: Path  # where it will write
    train_shards: list[Shard]  # none with EVAL_ONLY
    validation: Validation
    source: bytes  # the script that runs
    shipped: bytes  # the same script in the form that is counted
    hashes: dict[str, str]  # SHA-256 of code, tokenizer, shards and manifest
    chosen: ChosenOps  # one choice of operations, for training and scoring
    checkpoint: dict[str, Any]  # of the run that RESUME names


class Trained(NamedTuple):
    """What summary.json says about training; with EVAL_ONLY there was none."""

    steps: int = 0
    train_seconds: float = 0.0
    stream_hash: str = "0" * 16


def main() -> int:
    """Do what the environment asks for. Exit status 0: finished; 1: an error, told in one message."""
    if "-h" in sys.argv or "--help" in sys.argv:
        print_help()
        return 0
    run = None
    try:
        if len(sys.argv) > 1:
            raise ConfigError(f"got {sys.argv[1:]} on the command line, where only --help is read; settings "
                              "are variables of the environment: SEED=42 python train_gpt.py")  # fmt: skip
        environ = with_config_of_run(os.environ)
        config = Config.from_env(environ)
        answers = public_answers(environ)
        run = Run(this_machine(config, environ))
        signal.signal(signal.SIGTERM, run.on_signal)
        signal.signal(signal.SIGINT, run.on_signal)
        whole_run(config, run, answers)
        return 0
    except (ConfigError, DataError, ArtifactError, FloatingPointError, OSError) as error:
        message = f"error: {error}"
    except torch.cuda.OutOfMemoryError as error:
        message = ("error: out of GPU memory; lower MICRO_BATCH_TOKENS, VAL_BATCH_SIZE or, in test-time "
                   f"training, TTT_BATCH_SEQS or TTT_BATCH_SIZE ({error})")  # fmt: skip
    except Exception:
        # The traceback helps to mend an error of ours.
        message = traceback.format_exc().strip()
    # What ended the run, and how to continue from what it has saved.
    if run is not None:
        # A rank whose peer is gone only knows that. The peer itself prints the reason.
        if re.match("Traceback.*(gloo/|pair closure|DistBackendError)", message, re.DOTALL):
            message = "ends: another rank has ended or does not answer"
        if run.machine.world_size > 1:
            message = f"rank {run.machine.rank}: {message}"
        if run.directory is not None:
            message += f"\nin phase {run.phase_name}\n{run.ways_on()}"
            run.append("log.txt", message)
    print_line(message, sys.stderr)
    return 1


def print_help() -> None:
    """Print the head of this file and every variable."""
    print_line(__doc__ or "")
    print_line("Variables, also as KEY=VALUE lines of a file named by CONFIG:\n")
    for spec, (name, value) in zip(fields(Config), Config().as_env().items(), strict=True):
        print_line(f"  {f'{name}={value}':<48} {spec.metadata['meaning']} "
                   f"{' | '.join(spec.metadata['among'])}".rstrip())  # fmt: skip


def with_config_of_run(environ: Mapping[str, str]) -> Mapping[str, str]:
    """`environ`; if it names no CONFIG, with that of the run which RESUME or EVAL_ONLY names."""
    named = environ.get("RESUME") or environ.get("EVAL_ONLY")
    if named and not environ.get("CONFIG"):
        path = find_path(named)
        settings = (path.parent if path.is_file() else path) / SETTINGS_FILE
        # Beside an artifact that was copied there may be none. Then the defaults hold.
        if settings.is_file():
            return {**environ, "CONFIG": str(settings)}
    return environ


def whole_run(config: Config, run: Run, answers: list[str]) -> None:
    """Train and ship, unless EVAL_ONLY; then reload the artifact, and score nothing but what it holds.

    answers: lines for the log, about settings.
    """
    machine = run.machine
    tokenizer_sha256 = ""
    if config.eval_only:
        # The artifact defines the model. Other settings in the environment are ignored with a warning.
        model, about = load_artifact(find_path(config.eval_only))
        tokenizer_sha256 = about.tokenizer_sha256
        for name, value in config.overrides().items():
            its = about.config.get(name, value)
            if its != value:
                answers.append(f"warning: {name}={value} has no effect: the artifact has {its}")
        config = Config.from_values({**config.as_env(), **about.config})

    with run.phase("setup"):
        inputs = preflight(config, run, tokenizer_sha256)
        open_run(config, run, inputs, answers)
    trained = Trained() if config.eval_only else train_and_ship(config, run, inputs)
    with run.phase("reload"):
        if not config.eval_only:
            # Rank 0 wrote it on a disk that other nodes may not see. So it reads the file for all of them.
            path = run.path(ARTIFACT)
            data = path.read_bytes() if machine.rank == 0 else b""
            model, about = load_artifact(path, machine.gather(data)[0])
        ready_model(model, machine, inputs.chosen.ops)
    if machine.compiled:
        rehearse_evaluation(model, config, run)
    scores = evaluate(model, config, run, inputs.validation, f"int{config.matrix_bits}")
    summarize(config, run, inputs, trained, about, scores)
    if machine.rank == 0:
        run.path(CHECKPOINT).unlink(missing_ok=True)  # a finished run is never resumed


def train_and_ship(config: Config, run: Run, inputs: Inputs) -> Trained:
    """Train, collect Hessians while the clock allows, and write the artifact: rank 0 does, all wait."""
    with run.phase("setup"):
        training = Training(
            config, run, inputs.train_shards, inputs.validation, inputs.chosen.ops, inputs.hashes)
    warm_up(training, inputs.checkpoint)
    with run.phase("train"):
        train(training)
    # Of training alone: how many batches are calibrated with depends on ranks and on the clock.
    stream_hash = training.stream_hash()
    with run.phase("hessians"):
        # From here on the EMA is the model: calibrated, shipped and scored.
        training.optimizer.use_average()
        hessians: Hessians = {}
        if config.gptq:
            hessians = collect_hessians(training.model, calibration_batches(training))
            run.log(f"gptq:collected {len(hessians)} Hessians; with training {training.seconds:.2f}s")
        validate(training, "DIAGNOSTIC post_ema" if config.ema_decay else "DIAGNOSTIC final")
        run.log(f"timing_train_loop_ms:{1e3 * training.seconds:.0f}ms "
                f"timing_val_total_ms:{1e3 * training.val_seconds:.0f}ms\n"
                f"peak memory allocated: {torch.cuda.max_memory_allocated() >> 20} MiB "
                f"reserved: {torch.cuda.max_memory_reserved() >> 20} MiB")
    train_seconds = training.seconds
    training.loader.close()
    with run.phase("quantize"):
        if run.machine.rank == 0:
            if config.save_float:
                weights = torch_file(training.model.state_dict())
                write_whole(run.path("final_model.pt"), weights)
                run.log(f"Serialized model: {len(weights)} bytes")
            # A longer script leaves fewer bytes for weights.
            budget = config.artifact_bytes_max - len(inputs.shipped)
            data, line = write_artifact(training.model, config, hessians, inputs.hashes["tokenizer"], budget)
            keep_artifact(run.path(ARTIFACT), data)
            run.log(line)
        run.machine.gather(None)
    return Trained(training.step, train_seconds, f"{stream_hash:016x}")


def keep_artifact(path: Path, data: bytes) -> None:
    """Write the artifact of a run; where its disk is full, to the temporary folder or the home.

    Raises ConfigError that names that place, since the run cannot go on.
    """
    try:
        write_whole(path, data)
    except ConfigError as error:
        for folder in (tempfile.gettempdir(), os.path.expanduser("~")):
            spare = Path(folder) / f"{path.parent.name}.{os.getpid()}.{path.name}"
            try:
                write_whole(spare, data)
            except ConfigError:
                continue
            raise ConfigError(f"{error}. EVAL_ONLY={shlex.quote(str(spare))} scores the artifact") from error
        raise


def preflight(config: Config, run: Run, tokenizer_sha256: str) -> Inputs:
    """Check what a user can get wrong, in seconds, before anything is written. All ranks call it together.

    tokenizer_sha256: of the artifact that EVAL_ONLY names. Raises ConfigError, DataError, ArtifactError.
    """
    machine = run.machine
    # The headers of all shards; the ids of validation and of the first training shard.
    folder = find_path(config.data_path)
    pattern = glob.escape(str(folder))
    train_shards = [] if config.eval_only else open_shards(f"{pattern}/fineweb_train_[0-9]*.bin")
    val_shards = open_shards(f"{pattern}/fineweb_val_[0-9]*.bin")

    # One tokenizer made the shards, the artifact and the bytes that are counted. It has VOCAB_SIZE pieces.
    load_tokenizer(config)
    source = Path(__file__).read_bytes()
    manifest = folder / "manifest.json"
    # Names and sizes stand for gigabytes of shards, which take minutes to hash.
    listing = {shard.path.name: shard.tokens for shard in (*train_shards, *val_shards)}
    read = {"code": source, "tokenizer": find_path(config.tokenizer_path).read_bytes(),
            "shards": json.dumps(listing).encode(),
            "manifest": manifest.read_bytes() if manifest.is_file() else b"{}"}  # fmt: skip
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in read.items()}
    made_by = check_manifest(manifest, read["manifest"], listing if train_shards else {})
    for maker, expected in ((manifest, made_by), ("EVAL_ONLY's artifact", tokenizer_sha256)):
        if expected not in ("", hashes["tokenizer"]):
            raise DataError(f"TOKENIZER_PATH={config.tokenizer_path}: sha256 {hashes['tokenizer']}, expected "
                            f"{expected} by {maker}; name that tokenizer")  # fmt: skip

    for shard in (val_shards[0], *train_shards[:1]):
        first = read_tokens(shard, config.vocab_size)[0]
        if first != BOS_ID:
            raise DataError(f"{shard.path}: begins with id {first}, expected BOS={BOS_ID}; export it again")
    validation = read_validation(val_shards, config)

    # The ranks do the same, a resumed run goes on with the same, and the batch and the model have room.
    mine = {**config.as_env(), **hashes, "torch": torch.__version__, "dtype": machine.dtype}
    for rank, theirs in enumerate(machine.gather(mine)):
        for name, value in mine.items():
            if theirs[name] != value:
                raise ConfigError(f"{name} is {theirs[name]} on rank {rank}, {value} on rank {machine.rank}")
    checkpoint = read_checkpoint(config, hashes)
    shipped = with_settings(shipped_code(source), config)
    if train_shards:
        check_memory(config, machine)
        next(shard_visits(config, train_shards, 0))  # whether a shard holds a sequence
        check_budget(config, config.artifact_bytes_max - len(shipped))
    return Inputs(
        choose_directory(config, machine), train_shards, validation, source, shipped, hashes,
        fast_ops(config, machine), checkpoint)  # fmt: skip


def check_memory(c: Config, machine: Machine) -> None:
    """ConfigError for a micro-batch that the memory of this rank's device cannot hold.

    The estimate is a lower bound: of what the backward pass reads, the logits, the hidden values of the
    MLPs, and on a CPU one mask of attention.
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
            f"TRAIN_SEQ_LEN={c.train_seq_len} MICRO_BATCH_TOKENS={c.micro_batch_tokens}: {tokens} "
            f"tokens at once need {needed_bytes >> 20} MiB at least, this device has {memory_bytes >> 20} "
            "MiB; lower MICRO_BATCH_TOKENS, or both")


def check_manifest(path: Path, content: bytes, tokens_of: Mapping[str, int]) -> str:
    """The SHA-256 of the tokenizer that a manifest names, or empty text. DataError if its shards are others.

    tokens_of: tokens of each shard that is there. data/fineweb.py --verify compares contents, in minutes.
    """
    try:
        manifest = json.loads(content)
    except ValueError as error:
        raise DataError(f"{path}: {error}; fetch or export the data again") from error
    listed = {name: entry["tokens"] for name, entry in manifest.get("files", {}).items()}
    # Sidecars are checked with the bytes that they count.
    odd = {name for name, _ in listed.items() ^ tokens_of.items() if "_val_bytes_" not in name}
    if listed and tokens_of and odd:
        raise DataError(f"{path}: differs from the manifest: {', '.join(sorted(odd))}. Fetch the data "
                        "again, or remove foreign files")  # fmt: skip
    return str(manifest.get("tokenizer", {}).get("sha256", ""))


def read_validation(shards: list[Shard], config: Config) -> Validation:
    """The text to score, and its bytes. DataError if it has none."""
    tokens = np.concatenate([read_tokens(shard, config.vocab_size) for shard in shards])
    mark = ""
    if config.val_tokens_limit:
        tokens = tokens[: config.val_tokens_limit + 1]  # so many targets: one token more
        mark = " comparable:0"
    bytes_total = int(token_bytes(tokens, config).sum())
    if bytes_total == 0:
        raise DataError(f"{shards[0].path.parent}: {len(tokens)} validation tokens have no bytes")
    return Validation(tokens, bytes_total, mark)


def choose_directory(config: Config, machine: Machine) -> Path:
    """Where the run will write, the same on all ranks; nothing is made yet. ConfigError."""
    if config.resume:
        return find_path(config.resume)
    # Clocks of machines differ: rank 0 decides on a name made of the time.
    name = config.run_id or time.strftime(f"%Y%m%d-%H%M%S-seed{config.seed}")
    directory = Path(machine.gather(f"{config.runs_dir}/{name}")[0])
    if machine.rank == 0:
        if os.path.lexists(directory):
            raise ConfigError(f"RUN_ID={name}: {directory} exists, and nothing is overwritten; set another "
                              f"RUN_ID, or, if it holds a {CHECKPOINT}, RESUME={shlex.quote(str(directory))}")
        # Two checkpoints: the new one is written beside the old one, with at most 16 bytes a weight.
        needed = config.artifact_bytes_max + 2 * 16 * count_parameters(config)
        place = next(folder for folder in directory.absolute().parents if folder.exists())
        if not place.is_dir() or shutil.disk_usage(place).free < needed:
            raise ConfigError(
                f"{place}: a run needs a folder with {needed >> 20} MiB: make room or set RUNS_DIR"
            )
    return directory


def open_run(config: Config, run: Run, inputs: Inputs, answers: list[str]) -> None:
    """Make the run directory, or reopen RESUME's, and begin its log in upstream's words.

    All ranks call it together. answers: lines for the log, about settings.
    """
    machine = run.machine
    if machine.rank == 0 and not config.resume:
        inputs.directory.mkdir(parents=True)  # fails where another run was faster: nothing is overwritten
    machine.gather(None)
    run.directory = inputs.directory
    if machine.rank == 0:
        # The code that runs, as it is and as it is counted, and a CONFIG that starts such a run again.
        settings = ""
        for name, value in config.as_env().items():
            comment = "# " if name in SETTINGS_OF_A_START else ""
            settings += f"{comment}{name}={value}\n"
        write_whole(run.path("train_gpt.py"), inputs.source)
        write_whole(run.path("train_gpt.shipped.py"), inputs.shipped)
        write_whole(run.path(SETTINGS_FILE), settings.encode())
    data = inputs.validation
    folder = find_path(config.data_path)
    for line in (
        f"run:{run.directory}",
        f"Running Python {platform.python_version()} PyTorch {torch.__version__} on {machine.device_name} "
        f"dtype:{machine.dtype} compile:{int(machine.compiled)} threads:{torch.get_num_threads()}",
        f"overrides: {' '.join(f'{name}={value}' for name, value in config.overrides().items())}",
        *answers,
        f"train_loader:dataset:{folder.name} train_shards:{len(inputs.train_shards)}",
        f"val_loader:shards pattern={folder}/fineweb_val_*.bin tokens:{len(data.tokens) - 1} "
        f"bytes:{data.bytes_total}{data.mark}",
        f"model_params:{count_parameters(config)}",
        f"world_size:{machine.world_size} grad_accum_steps:"
        f"{0 if config.eval_only else micro_steps_per_step(config, machine.world_size)}",
        f"train_batch_tokens:{config.train_batch_tokens} train_seq_len:{config.train_seq_len} "
        f"iterations:{config.iterations} warmup_steps:{config.warmup_steps} "
        f"max_wallclock_seconds:{config.max_wallclock_seconds:.3f}",
        f"cost: at most {config.iterations} steps and {config.max_wallclock_seconds:g}s, then scores of "
        f"{len(data.tokens) - 1} targets, {config.max_eval_seconds:g}s; quick: TTT_ENABLED=0 EVAL_STRIDE=0",
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


def summarize(
    config: Config, run: Run, inputs: Inputs, trained: Trained, about: About, scores: dict[str, Score]
) -> None:
    """Print sizes, limits and results, and write summary.json: the one record of a run. All ranks call it."""
    machine = run.machine
    code_bytes = len(inputs.shipped)
    total_bytes = code_bytes + about.bytes
    run.log(f"Code size: {code_bytes} bytes (wrapped)\n"
            f"Serialized model int{config.matrix_bits}+rans: {about.bytes} bytes\n"
            f"Total submission size int{config.matrix_bits}+rans: {total_bytes} bytes")

    limits = {}
    for name, value, limit in (
        ("train_seconds", trained.train_seconds, config.max_wallclock_seconds),
        # Of the score that ranks.
        ("eval_seconds", run.phases[f"eval_{next(iter(scores))}"], config.max_eval_seconds),
        ("artifact_bytes", total_bytes, config.artifact_bytes_max),
    ):
        is_kept = limit == 0 or value <= limit  # 0: there is none
        limits[name] = {"value": value, "limit": limit, "ok": is_kept}
        run.log(f"limit:{name} {value:.10g} of {limit:.10g} {'ok' if is_kept else 'EXCEEDED'}")

    data = inputs.validation
    summary = {
        "run_id": inputs.directory.name,
        "seed": config.seed,
        **trained._asdict(),
        "tokens": trained.steps * config.train_batch_tokens,
        "config": config.as_env(),
        "overrides": config.overrides(),
        "code": {"sha256": inputs.hashes["code"], "bytes": len(inputs.source), "bytes_wrapped": code_bytes},
        "data": {"hashes": inputs.hashes, "val_tokens": len(data.tokens) - 1, "val_bytes": data.bytes_total},
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
        "phases": run.phases,
        "artifact": about._asdict(),
        "comparable": not data.mark,
        "losses": {name: score._asdict() for name, score in scores.items()},
        "limits": limits,
        "exit": "finished",
    }
    if machine.rank == 0:
        write_whole(run.path("summary.json"), (json.dumps(summary, indent=1) + "\n").encode())
    results = " ".join(f"{name}={score.bits_per_byte:.4f}" for name, score in scores.items())
    run.log(f"done: bits per byte {results}; stream_hash:{trained.stream_hash}; files in {run.directory}")


if __name__ == "__main__":
    os._exit(main())  # peers may wait in a collective that this rank never joins
