"""Train, quantize and score a GPT under a hard budget: one file, from token shards to bits per byte.

    torchrun --standalone --nproc_per_node=8 train_gpt.py           # the 8-GPU run: the defaults
    CONFIG=records/configs/cpu_demo.env python train_gpt.py         # the whole job on a laptop
    EVAL_ONLY=runs/x/model.bin python train_gpt.py                  # score an artifact in a fresh process
    python train_gpt.py --help                                      # every variable

setup: what a user can get wrong is checked before the first step. warm-up: compiles on real shapes, then
restores weights, optimizer and data position. train: timed; over, Hessians included, within
MAX_WALLCLOCK_SECONDS. quantize: artifact and code end just under ARTIFACT_BYTES_MAX. reload: nothing but the
weights in that file is ever scored. evaluate: timed; each target scored once, before any learning from it.

runs/<RUN_ID>/ then holds log.txt, metrics.jsonl, config.env, summary.json, model.bin (the artifact),
train_gpt.py (the source that ran), train_gpt.shipped.py (the form that is counted); on demand, checkpoint.pt
and traces.

Shape suffixes: B rows, T positions, D model width, F MLP width, H query heads, K key heads, E channels of a
head, V vocabulary, L layers, N anything flattened or batched, R matrix rows, C matrix columns.
"""

from __future__ import annotations

import ast
import atexit
import base64
import bisect
import contextlib
import copy
import dataclasses
import difflib
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
import pickle
import platform
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # what torch reads when it loads
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # idle threads that spin make a busy machine crawl
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for DETERMINISTIC=1

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
# CONFIG — every setting in one frozen dataclass; what is wrong is refused by name, before anything starts.
# ============================================================================================================


class ConfigError(ValueError):
    """A setting is unknown, mistyped, out of range, or contradicts another."""


class DataError(RuntimeError):
    """A shard, tokenizer or manifest is missing, damaged, foreign, or does not fit the run."""


class LoaderError(RuntimeError):
    """The data loader failed or stalled; the message holds shard, position and the original traceback."""


class ArtifactError(RuntimeError):
    """An artifact does not fit its budget, or a file is not an artifact that can be trusted."""


class ScoringError(RuntimeError):
    """A score was written twice, left out, or asked for before it existed."""


def knob(default: Any, meaning: str, low: float = -math.inf, high: float = math.inf, among: str = "") -> Any:
    """One setting: its default, what it means with its unit, and its range or its space-separated choices."""
    return field(default=default, metadata=dict(meaning=meaning, low=low, high=high, among=among.split()))


@dataclass(frozen=True)
class Config:
    """All settings. A field's environment name is its name in upper case; the defaults are the 8-GPU run."""

    # --- data ---
    data_path: str = knob("data/datasets/fineweb10B_sp8192", "folder of fineweb_{train,val}_*.bin shards")
    tokenizer_path: str = knob("data/tokenizers/fineweb_8192_bpe.model", "their SentencePiece model")
    train_seq_len: int = knob(2048, "tokens; one training sequence", 1, 1 << 20)
    train_batch_tokens: int = knob(786_432, "tokens; one optimizer step, all ranks together", 1)
    micro_batch_tokens: int = knob(98_304, "tokens; one forward pass of one rank; bounds memory", 1)
    shuffle: bool = knob(True, "permute shards and sequences by SEED; 0: file order")
    doc_mask: bool = knob(True, "attention and token shifts stay inside a document; 0: they cross its border")
    train_prefetch: bool = knob(True, "read and stage batches in threads; 0: the plain synchronous path")
    train_prefetch_queue: int = knob(2, "batches staged ahead of the step", 1, 64)
    train_copy_stream: bool = knob(True, "copy batches to the GPU on a stream of their own")
    val_prefetch: bool = knob(True, "copy validation to the device before scoring; 0: batch by batch")
    val_copy_stream: bool = knob(True, "accepted; validation is copied once, by VAL_PREFETCH")
    val_bytecount_device: str = knob("cpu", "accepted; bytes are summed once, on the host", among="cpu cuda")
    val_tokens_limit: int = knob(0, "targets; score only the first ones: NOT comparable; 0: all", 0)
    loader_timeout_seconds: float = knob(60.0, "seconds without data before the loader gives up", 0.1)
    # --- run ---
    run_id: str = knob("", "name of the run directory; empty: date, time and seed")
    runs_dir: str = knob("runs", "folder that holds the run directories")
    seed: int = knob(1337, "initial weights and data order", 0, 2**63 - 1)
    iterations: int = knob(20_000, "steps; upper bound when a wall clock is set", 1)
    max_wallclock_seconds: float = knob(600.0, "seconds of training with Hessians; 0: ITERATIONS", 0)
    max_eval_seconds: float = knob(600.0, "seconds of evaluation; judged in summary.json; 0: no limit", 0)
    warmup_steps: int = knob(20, "untimed steps that compile each graph, then undone", 0, 1000)
    train_log_every: int = knob(50, "steps between train lines; the first ten are always printed", 1)
    val_loss_every: int = knob(0, "steps between validations outside the clock; 0: only after training", 0)
    val_batch_size: int = knob(65_536, "tokens; one scoring pass of one rank", 1)
    val_progress_log_every: int = knob(0, "chunks between scoring progress lines; 0: twenty lines", 0)
    training_timing_breakdown: bool = knob(False, "print where the milliseconds of a step go")
    training_timing_every: int = knob(200, "steps between those lines; the first ten are always printed", 1)
    trace: bool = knob(False, "write trace_rank<r>.json for ui.perfetto.dev")
    trace_steps: str = knob("", "a:b; trace only these steps; empty: all")
    device: str = knob("auto", "where to run", among="auto cpu cuda")
    compile: str = knob("auto", "torch.compile; auto: on CUDA", among="auto 0 1")
    compute_dtype: str = knob("auto", "activations; auto: where fast", among="auto float32 bfloat16")
    attention: str = knob("auto", "kernel; auto: the first that passes", among="auto fa3 varlen sdpa")
    fused_mlp: str = knob("auto", "Triton MLP; auto: where exact and faster", among="auto 0 1")
    fused_ce: str = knob("auto", "Triton cross-entropy; auto: where exact and faster", among="auto 0 1")
    deterministic: bool = knob(False, "refuse kernels whose result depends on timing")
    checkpoint_every_seconds: float = knob(0.0, "seconds between checkpoints; 0: only on a signal", 0)
    resume: str = knob("", "continue a run: its directory, or auto for the newest checkpoint in RUNS_DIR")
    preflight_only: bool = knob(False, "stop after the checks that precede the first step")
    phase_timeout_seconds: float = knob(900.0, "seconds without a sign of life before a rank is ended", 1)
    eval_only: str = knob("", "score this artifact instead of training")
    generate: str = knob("", "write text after this prompt from the artifact")
    generate_tokens: int = knob(200, "tokens to write", 1, 1 << 20)
    generate_temperature: float = knob(0.8, "0: always the likeliest token", 0)
    generate_top_k: int = knob(40, "choose among this many; 0: all", 0)
    # --- model ---
    vocab_size: int = knob(8192, "tokens in the vocabulary", 4, 65_536)
    num_layers: int = knob(11, "blocks that own weights", 1, 256)
    model_dim: int = knob(512, "width of the residual stream", 8)
    num_heads: int = knob(8, "query heads", 1)
    num_kv_heads: int = knob(4, "key and value heads", 1)
    mlp_mult: float = knob(4.0, "MLP width / MODEL_DIM", 0.1, 64)
    leaky_slope: float = knob(0.5, "MLP activation LeakyReLU(slope)²; 0: relu²", 0, 1)
    rope_base: float = knob(10_000.0, "rotary base", 1)
    rope_dims: int = knob(16, "rotated dimensions of each head; 0: all", 0)
    rope_train_seq_len: int = knob(0, "tokens; longer inputs rescale the base; 0: TRAIN_SEQ_LEN", 0)
    ln_scale: bool = knob(True, "scale block inputs by 1/sqrt(layer + 1)")
    qk_gain_init: float = knob(5.25, "initial learned gain of each query head")
    xsa_last_n: int = knob(11, "last layers whose heads drop their own value's direction", 0)
    sparse_attn_gate_enabled: bool = knob(True, "gate each head by the first GATE_WINDOW channels")
    sparse_attn_gate_scale: float = knob(0.5, "steepness of that gate", 0)
    gate_window: int = knob(12, "channels that feed the gates", 1)
    smear_gate_enabled: bool = knob(True, "mix in the previous token's embedding, gated")
    skip_gates_enabled: bool = knob(True, "U-Net skips interpolate; 0: they add")
    num_loops: int = knob(2, "extra passes over LOOP_START..LOOP_END; 0: none", 0, 16)
    loop_start: int = knob(3, "first looped layer", 0)
    loop_end: int = knob(5, "last looped layer", 0)
    enable_looping_at: float = knob(0.35, "progress at which the loop switches on", 0, 1)
    parallel_start_layer: int = knob(8, "first layer whose attention and MLP run in parallel; -1: none", -1)
    parallel_mode: str = knob("lanes", "two residual lanes, or one (GPT-J)", among="lanes gptj")
    tie_embeddings: bool = knob(True, "the output head is the input embedding")
    tied_embed_init_std: float = knob(0.005, "initial standard deviation of the embedding", 0)
    matrix_init: str = knob("orthogonal", "initial block matrices", among="orthogonal uniform")
    logit_softcap: float = knob(30.0, "logits are bounded by c·tanh(x/c); 0: unbounded", 0)
    # --- optimizer and schedule ---
    matrix_lr: float = knob(0.026, "Muon, block matrices", 0)
    scalar_lr: float = knob(0.02, "AdamW, small tensors", 0)
    tied_embed_lr: float = knob(0.03, "AdamW, tied embedding", 0)
    embed_lr: float = knob(0.6, "AdamW, untied embedding", 0)
    head_lr: float = knob(0.008, "AdamW, untied head", 0)
    muon_momentum: float = knob(0.97, "final momentum", 0, 0.9999)
    muon_momentum_warmup_start: float = knob(0.92, "first momentum", 0, 0.9999)
    muon_momentum_warmup_frac: float = knob(0.3, "progress over which momentum rises", 0, 1)
    muon_momentum_warmup_steps: int = knob(0, "the same in steps; 0: use the fraction", 0)
    muon_backend_steps: int = knob(5, "Newton-Schulz iterations", 1, 20)
    muon_polar_express: bool = knob(True, "Polar Express coefficients; 0: one fixed quintic")
    muon_row_normalize: bool = knob(True, "normalise rows before orthogonalising")
    muon_wd: float = knob(0.095, "decoupled weight decay of matrices", 0)
    embed_wd: float = knob(0.085, "decoupled weight decay of embeddings", 0)
    adam_wd: float = knob(0.02, "decoupled weight decay of small tensors", 0)
    beta1: float = knob(0.9, "AdamW", 0, 0.9999)
    beta2: float = knob(0.99, "AdamW", 0, 0.99999)
    adam_eps: float = knob(1e-8, "AdamW", 0)
    grad_clip_norm: float = knob(0.3, "bound on the global gradient norm; 0: none", 0)
    ema_decay: float = knob(0.9965, "per-step decay of the shipped average of weights; 0: the last", 0, 1)
    warmdown_frac: float = knob(0.85, "last part of the run in which learning rates fall", 0, 1)
    warmdown_iters: int = knob(0, "the same in steps, at the mean step time; 0: use the fraction", 0)
    min_lr: float = knob(0.1, "floor of the falling learning rate, as a share of it", 0, 1)
    # --- artifact ---
    artifact_bytes_max: int = knob(16_000_000, "bytes; shipped code and artifact together", 1000)
    code_bytes: str = knob("wrapped", "form of the script that is shipped and counted", among="raw wrapped")
    rate_control: bool = knob(True, "search bits and clips that fill the budget; 0: take them as given")
    matrix_bits: int = knob(6, "bits of block matrices; a start for the search", 2, 8)
    embed_bits: int = knob(7, "bits of embeddings; a start for the search", 2, 8)
    mlp_clip_sigmas: float = knob(11.5, "clip of MLP matrices, in standard deviations of a row", 0.1)
    attn_clip_sigmas: float = knob(13.0, "clip of attention matrices", 0.1)
    embed_clip_sigmas: float = knob(14.0, "clip of embeddings", 0.1)
    gptq: bool = knob(True, "round with second-order information; 0: to nearest")
    gptq_damping: float = knob(0.01, "share of the mean diagonal added to Hessians", 0)
    gptq_calibration_batches: int = knob(64, "micro-batches of training data, all ranks together", 1)
    gptq_reserve_seconds: float = knob(0.0, "seconds of the clock for Hessians; 0: as measured", 0)
    # --- evaluation ---
    eval_seq_len: int = knob(0, "tokens of context; 0: TRAIN_SEQ_LEN", 0, 1 << 20)
    eval_stride: int = knob(64, "targets scored per window; 0: no sliding window", 0)
    ttt_enabled: bool = knob(True, "score with legal test-time training as well")
    ttt_lr: float = knob(0.005, "SGD; falls along a cosine over the chunks", 0)
    ttt_epochs: int = knob(3, "passes over each scored chunk", 0)
    ttt_momentum: float = knob(0.9, "SGD", 0, 0.9999)
    ttt_chunk_tokens: int = knob(32_768, "targets scored before the next update", 1)
    ttt_batch_seqs: int = knob(32, "sequences of one SGD step, all ranks together", 1)
    ttt_grad_clip: float = knob(1.0, "bound on the gradient norm; 0: none", 0)
    ttt_freeze_blocks: int = knob(0, "first layers that are not updated", 0)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Config:
        """Settings from names and strings: `environ` over the file that its CONFIG names over the defaults.

        Raises ConfigError for a misspelt name, a wrong type or range, or settings that contradict each other.
        """
        fields = {f.name.upper(): f for f in dataclasses.fields(cls)}
        given = {**_read_config_file(environ.get("CONFIG", "")), **environ}
        for name in sorted(given):
            _refuse_near_miss(name, list(fields))
        config = cls(**{f.name: _parse(name, given[name], f) for name, f in fields.items() if name in given})
        _cross_check(config)
        return config

    def as_env(self) -> dict[str, str]:
        """Every setting as the string that `from_env` reads back to the same value."""
        values = {f.name.upper(): getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: str(int(v)) if isinstance(v, bool) else str(v) for name, v in values.items()}

    def overrides(self) -> dict[str, str]:
        """The settings that differ from their default, as strings."""
        default = Config().as_env()
        return {name: value for name, value in self.as_env().items() if value != default[name]}

    def model_env(self) -> dict[str, str]:
        """The settings that decide what the weights mean."""
        names = [f.name.upper() for f in dataclasses.fields(self)]
        model = names[names.index("VOCAB_SIZE") : names.index("LOGIT_SOFTCAP") + 1]
        everything = self.as_env()
        return {name: everything[name] for name in ["TRAIN_SEQ_LEN", "DOC_MASK", *model]}

    @property
    def eval_length(self) -> int:
        """Tokens of context in evaluation."""
        return self.eval_seq_len or self.train_seq_len

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.model_dim // self.num_heads

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP's hidden layer."""
        return int(self.mlp_mult * self.model_dim)


OUR_PREFIXES = tuple(
    "TTT_ MUON_ TRAIN_ TRAINING_ VAL_ EVAL_ GPTQ_ WARMDOWN_ WARMUP_ EMA_ QK_ ROPE_ XSA_ SMEAR_ SPARSE_ATTN_ "
    "GATE_ LOOP_ PARALLEL_ ARTIFACT_ LOADER_ GENERATE_ LOGIT_ TIE_ TIED_ EMBED_ MATRIX_ SCALAR_ FUSED_ "
    "LEAKY_ MLP_ CHECKPOINT_ PREFLIGHT_ PHASE_".split()
)
FOREIGN_PREFIXES = tuple(
    "RANK WORLD_SIZE LOCAL_ MASTER_ GROUP_ ROLE_ TORCH PYTORCH NCCL_ GLOO_ OMP_ MKL_ KMP_ GOMP_ CUDA NVIDIA_ "
    "CUBLAS_ TRITON_ HF_ PYTHON PYTEST_ VIRTUAL_ CONFIG".split()
)


def _refuse_near_miss(name: str, known: list[str]) -> None:
    """Raise ConfigError when an unknown variable looks like one of ours; leave the others alone."""
    if name in known or name.startswith(FOREIGN_PREFIXES):
        return
    if name.startswith(OUR_PREFIXES) or (len(name) >= 6 and any(_within(2, name, other) for other in known)):
        kin = [other for other in known if other.split("_")[0] == name.split("_")[0]]
        nearest = difflib.get_close_matches(name, kin or known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown variable {name}: did you mean {nearest}? --help lists them all")


def _within(edits: int, a: str, b: str) -> bool:
    """Whether so many insertions, deletions and replacements of a character turn a into b."""
    if edits < 0 or not a or not b:
        return len(a) + len(b) <= edits
    if a[0] == b[0]:
        return _within(edits, a[1:], b[1:])
    return any(_within(edits - 1, *rest) for rest in ((a[1:], b), (a, b[1:]), (a[1:], b[1:])))


def _read_config_file(path: str) -> dict[str, str]:
    """KEY=VALUE lines of a file; `#` starts a comment. Every key must be a setting."""
    if not path:
        return {}
    try:
        text = find_path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"CONFIG={path}: {error}; name a file of KEY=VALUE lines") from error
    values: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):  # `#` inside a word is part of it
        key, equals, value = (part.strip() for part in f" {line}".split(" #")[0].partition("="))
        if (key or equals) and not (equals and key in Config().as_env()):
            raise ConfigError(f"CONFIG={path} line {number}: {line.strip()!r} sets no known variable")
        values[key] = value
    return {key: value for key, value in values.items() if key}


def _parse(name: str, text: str, spec: dataclasses.Field[Any]) -> Any:
    """The value of one variable in its field's type; ConfigError says what was expected."""
    kind: Any = type(spec.default)
    rules = spec.metadata
    low, high, among = rules["low"], rules["high"], rules["among"]
    words = {"0": False, "false": False, "1": True, "true": True}
    try:
        value = words[text.lower()] if kind is bool else kind(text)
        fits = low <= value <= high if kind in (int, float) else text in among or not among
        if not fits or not text.isprintable() or (kind is float and not math.isfinite(value)):
            raise ValueError
    except (ValueError, KeyError) as error:
        bounds = "" if (low, high) == (-math.inf, math.inf) else f" from {low:g} to {high:g}"
        numbers = {int: f"a whole number{bounds}", float: f"a number{bounds}"}
        expected = " or ".join(among) or {bool: "0 or 1", str: "printable text", **numbers}[kind]
        raise ConfigError(f"{name}={text!r}: expected {expected}; {rules['meaning']}") from error
    return value


def _cross_check(c: Config) -> None:
    """Raise ConfigError for settings that are fine alone and wrong together."""
    rules = [
        (c.train_batch_tokens % c.train_seq_len == 0, "TRAIN_BATCH_TOKENS must hold whole TRAIN_SEQ_LEN"),
        (c.micro_batch_tokens % c.train_seq_len == 0, "MICRO_BATCH_TOKENS must hold whole TRAIN_SEQ_LEN"),
        (c.model_dim % c.num_heads == 0, "MODEL_DIM must be a multiple of NUM_HEADS"),
        (c.num_heads % c.num_kv_heads == 0, "NUM_HEADS must be a multiple of NUM_KV_HEADS"),
        ((c.rope_dims or c.head_dim) % 2 == 0, "ROPE_DIMS (0 is MODEL_DIM / NUM_HEADS ) must be even"),
        (c.rope_dims <= c.head_dim, "ROPE_DIMS must not exceed MODEL_DIM / NUM_HEADS"),
        (c.xsa_last_n <= c.num_layers, "XSA_LAST_N must not exceed NUM_LAYERS"),
        (c.mlp_dim >= 1, "MLP_MULT * MODEL_DIM must be 1 or more"),
        (c.gate_window <= c.model_dim, "GATE_WINDOW must not exceed MODEL_DIM"),
        (not c.num_loops or c.loop_start <= c.loop_end, "LOOP_START must not exceed LOOP_END"),
        (not c.num_loops or c.loop_end < c.num_layers, "LOOP_END must be below NUM_LAYERS"),
        (c.parallel_start_layer < c.num_layers, "PARALLEL_START_LAYER must be below NUM_LAYERS (-1 is none)"),
        (c.eval_stride <= c.eval_length, "EVAL_STRIDE must not exceed EVAL_SEQ_LEN (0 is TRAIN_SEQ_LEN )"),
        (not c.ttt_enabled or c.eval_stride, "EVAL_STRIDE must be above 0 for TTT_ENABLED"),
        (not c.ttt_enabled or c.ttt_chunk_tokens % max(c.eval_stride, 1) == 0,
         "TTT_CHUNK_TOKENS must be a multiple of EVAL_STRIDE"),
        (not c.ttt_enabled or c.ttt_chunk_tokens >= c.eval_length,
         "TTT_CHUNK_TOKENS must hold EVAL_SEQ_LEN (0 is TRAIN_SEQ_LEN )"),
        (c.ttt_freeze_blocks <= c.num_layers, "TTT_FREEZE_BLOCKS must not exceed NUM_LAYERS"),
        (c.max_wallclock_seconds or c.warmdown_iters <= c.iterations, "WARMDOWN_ITERS must fit ITERATIONS"),
        (c.ema_decay < 1, "EMA_DECAY must be below 1"),
        (not c.max_wallclock_seconds or c.gptq_reserve_seconds < c.max_wallclock_seconds,
         "GPTQ_RESERVE_SECONDS must be below MAX_WALLCLOCK_SECONDS"),
        (not c.trace_steps or [part.isdecimal() for part in c.trace_steps.split(":")] == [True, True],
         "TRACE_STEPS must be a:b, two steps"),
        (os.sep not in c.run_id and not c.run_id.startswith("."), "RUN_ID must be a plain name"),
    ]  # fmt: skip
    for holds, rule in rules:
        if not holds:
            found = {name: c.as_env()[name] for name in rule.replace("=", " ").split() if name in c.as_env()}
            raise ConfigError(f"{rule}; got {', '.join(f'{name}={value}' for name, value in found.items())}")


def micro_steps_per_step(config: Config, world_size: int) -> int:
    """Micro-batches of one rank per optimizer step; ConfigError when the batch does not split evenly."""
    sequences = config.train_batch_tokens // config.train_seq_len
    wanted = config.micro_batch_tokens // config.train_seq_len
    rows = min(wanted, sequences // world_size)
    if rows < 1 or sequences % (world_size * rows):
        raise ConfigError(
            f"TRAIN_BATCH_TOKENS={config.train_batch_tokens} is {sequences} sequences of TRAIN_SEQ_LEN="
            f"{config.train_seq_len}, expected a multiple of {world_size} ranks times the {wanted} sequences "
            f"of MICRO_BATCH_TOKENS={config.micro_batch_tokens}; change one of them"
        )
    return sequences // world_size // rows


def help_text() -> str:
    """Every variable with its default and meaning: what `--help` prints."""
    lines = [__doc__ or "", "Variables (environment, or KEY=VALUE lines of a file named by CONFIG):", ""]
    for spec in dataclasses.fields(Config):
        choices = f" [{' | '.join(spec.metadata['among'])}]" if spec.metadata["among"] else ""
        lines.append(f"  {spec.name.upper()}={spec.default!s:<34} {spec.metadata['meaning']}{choices}")
    return "\n".join(lines)


def find_path(path: str) -> Path:
    """An existing path: as given, else relative to the script's folder or one above it; unfound: as given."""
    given = Path(path).expanduser()
    if given.exists() or given.is_absolute():
        return given
    above = [folder / given for folder in Path(__file__).resolve().parents]
    return next((candidate for candidate in above if candidate.exists()), given)

# ============================================================================================================
# RUNTIME — device, ranks, run directory, log and clock: one object, the same on a laptop and on many nodes.
# ============================================================================================================


class Run:
    """One process of a run: where it computes, who its peers are, what it writes, where its seconds went."""

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self.rank, self.world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        self.device = pick_device(config, int(environ.get("LOCAL_RANK", 0)))
        self.dtype = pick_dtype(config, self.device)
        self.directory: Path | None = None
        self.phases: dict[str, float] = {}
        self.phase_name, self.stop_signal, self._unwritten = "setup", 0, list[str]()
        if self.world_size > 1:
            on_gpu = {"backend": "cpu:gloo,cuda:nccl", "device_id": self.device}
            dist.init_process_group(**(on_gpu if self.device.type == "cuda" else {"backend": "gloo"}))
        self._last_sign_of_life = time.monotonic()
        threading.Thread(target=self._watch, args=(config.phase_timeout_seconds,), daemon=True).start()

    def open_directory(self, config: Config) -> None:
        """Create runs/<RUN_ID>, which must not exist, or reopen a resumed one. All ranks call it together."""
        names = [config.run_id or time.strftime("%Y%m%d-%H%M%S") + f"-seed{config.seed}"]
        if self.world_size > 1:
            dist.broadcast_object_list(names, src=0)
        directory = find_checkpoint(config) if config.resume else Path(config.runs_dir) / names[0]
        if self.rank == 0 and not config.resume:
            try:
                directory.mkdir(parents=True)
                weights = sum(map(math.prod, parameter_shapes(config).values()))
                needed = config.artifact_bytes_max + 32 * weights  # and two checkpoints
                if (free := shutil.disk_usage(directory).free) < needed:
                    directory.rmdir()
                    raise OSError(f"{free >> 20} MiB free, a run may need {needed >> 20} MiB")
            except OSError as error:
                advice = "nothing is ever overwritten: set another RUN_ID or RUNS_DIR, or RESUME"
                raise ConfigError(f"RUN_ID={names[0]}: no {directory} ({error}); {advice}") from error
        self.gather(None)  # no rank writes before the directory is there
        self.directory = directory
        for line in self._unwritten:
            self._append("log.txt", line)

    def path(self, name: str) -> Path:
        """A file of the run directory."""
        assert self.directory is not None, "the run directory opens after the checks"
        return self.directory / name

    def log(self, line: str, console: bool = True) -> None:
        """One line to console and log.txt, flushed; rank 0 only. A closed console never ends a run."""
        self.alive()
        if self.rank == 0:
            if console:
                with contextlib.suppress(OSError, ValueError):
                    print(line, flush=True)
            if self.directory is None:
                self._unwritten.append(line)
            else:
                self._append("log.txt", line)

    def event(self, kind: str, **values: Any) -> None:
        """One JSON object to metrics.jsonl, for machines; rank 0 only."""
        if self.rank == 0:
            self._append("metrics.jsonl", json.dumps({"event": kind, **values}))

    def _append(self, name: str, line: str) -> None:
        with contextlib.suppress(OSError), open(self.path(name), "a", encoding="utf-8") as file:
            file.write(line + "\n")  # a full disk ends no training: the console has the line as well

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a block, device work included, to `phases[name]`."""
        self.sync()
        if self.stop_signal:  # it came when training had just ended
            self.leave(self.stop_signal)
        outer, self.phase_name, start = self.phase_name, name, time.perf_counter()
        try:
            yield
        finally:
            self.sync()
            self.phase_name = outer
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def sync(self) -> None:
        """Wait until the device has finished what it was given."""
        self.alive()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def alive(self) -> None:
        """Tell the watchdog that this rank makes progress."""
        self._last_sign_of_life = time.monotonic()

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order; all ranks call it together."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def _watch(self, limit_seconds: float) -> None:
        while time.monotonic() - self._last_sign_of_life < limit_seconds:
            time.sleep(min(1.0, limit_seconds / 4))
        print(f"rank {self.rank}: no progress in phase {self.phase_name} for PHASE_TIMEOUT_SECONDS="
              f"{limit_seconds:g}; all stacks follow, then this rank ends", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    def note_signal(self, number: int, _frame: Any) -> None:
        """On SIGTERM and SIGINT: while training ask for a checkpoint and an orderly end, else end at once."""
        if self.stop_signal or self.phase_name != "train":
            self.leave(number)
        self.stop_signal = number

    def leave(self, number: int) -> None:
        """End this process now, in any state; what can go on is told."""
        found = [f"RESUME={name.parent}" for name in (self.directory or Path()).glob("checkpoint.pt")]
        found += [f"EVAL_ONLY={name}" for name in (self.directory or Path()).glob("model.bin")]
        with contextlib.suppress(OSError):
            print(f"rank {self.rank}: stopped by signal {number} in phase {self.phase_name}; to go on: "
                  f"{' or '.join(found) or 'start again'}", file=sys.stderr, flush=True)
        os._exit(128 + number)


def pick_device(config: Config, local_rank: int) -> torch.device:
    """The device of this rank; ConfigError when DEVICE asks for a GPU that is not there."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigError(f"DEVICE={config.device}: local rank {local_rank} found {found} GPUs; start"
                          " as many processes per node as it has GPUs, or set DEVICE=cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def pick_dtype(config: Config, device: torch.device) -> torch.dtype:
    """The dtype of activations: bfloat16 where there are matrix units for it, else float32."""
    fast = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device)[0] >= 8
    wanted = config.compute_dtype if config.compute_dtype != "auto" else ("bfloat16" if fast else "float32")
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path` completely or not at all: a full disk leaves what stood there. ConfigError."""
    temporary = path.with_name(f".{path.name}.tmp")  # what a killed run left is overwritten
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"RUNS_DIR: {path} cannot be written ({error}); make room, start again") from error
    finally:
        temporary.unlink(missing_ok=True)


# ============================================================================================================
# TRACE — where the time went: a Perfetto file that is valid JSON after every flush, and the timing lines.
# ============================================================================================================

TRACE_TAIL, TRACE_FLUSH_EVENTS = b"\n]}\n", 1000
NO_SPAN = contextlib.nullcontext()


class Trace:
    """Perfetto trace of one rank, one lane per stage and stream; safe from any thread. `path=None` is off.

    steps=(a, b) keeps what overlaps the steps a <= step < b. An existing file (a resumed run) is continued.
    """

    def __init__(self, path: Path | None, rank: int = 0, steps: tuple[int, int] | None = None) -> None:
        self.rank, self.steps, self.recording = rank, steps, path is not None and steps is None
        self.window_ns = [0.0 if self.recording else math.inf, math.inf]
        self.lock, self.lanes, self.events = threading.Lock(), dict[str, int](), list[str]()
        self.anchor: tuple[torch.cuda.Event, int] | None = None  # and the host time at which it completed
        self.file = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if self.file is not None:
            self.end = max(0, os.fstat(self.file).st_size - len(TRACE_TAIL))
            clocks = {"unix_ns": time.time_ns(), "host_ns": time.perf_counter_ns()}  # lines up the ranks
            self._add("main", 0, ph="M", name="process_name", args={"name": f"rank {rank}"} | clocks)
            self.flush()

    def span(self, name: str, lane: str, **args: Any) -> contextlib.AbstractContextManager[None]:
        """What the calling thread does inside the `with` block, also when that raises."""
        return NO_SPAN if self.file is None else self._span(name, lane, args)

    @contextlib.contextmanager
    def _span(self, name: str, lane: str, args: dict[str, Any]) -> Iterator[None]:
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.complete(name, lane, start_ns, time.perf_counter_ns(), **args)

    def complete(self, name: str, lane: str, start_ns: float, end_ns: float, **args: Any) -> None:
        """A span that is over, in times of `time.perf_counter_ns`."""
        if self.window_ns[0] <= end_ns and start_ns <= self.window_ns[1]:
            self._add(lane, start_ns, ph="X", name=name, dur=(end_ns - start_ns) / 1e3, args=args)

    def cuda_complete(self, name: str, lane: str, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """A span between two CUDA events with timing that have completed."""
        if self.window_ns[0] == math.inf:
            return
        if self.anchor is None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.Stream(end.device))  # an idle stream: nothing to wait for
            event.synchronize()
            self.anchor = (event, time.perf_counter_ns())
        event, host_ns = self.anchor
        self.complete(name, lane, *(host_ns + 1e6 * event.elapsed_time(other) for other in (start, end)))

    def point(self, phase: str, name: str, lane: str = "main", **fields: Any) -> None:
        """Now: counters ("C", args), or an arrow that leaves ("s", id) or enters ("f", id) the open span."""
        if self.recording:
            self._add(lane, time.perf_counter_ns(), ph=phase, name=name, cat="batch", bp="e", **fields)

    def step(self, step: int) -> None:
        """Tell the current step: it opens and closes the window, and flushes now and then."""
        inside = self.file is not None and (self.steps is None or self.steps[0] <= step < self.steps[1])
        if inside != self.recording:
            self.window_ns[0 if inside else 1] = time.perf_counter_ns()
            self.recording = inside
        if len(self.events) >= TRACE_FLUSH_EVENTS or (self.events and not inside):
            self.flush()

    def _add(self, lane: str, time_ns: float, **event: Any) -> None:
        with self.lock:
            named = {"ph": "M", "name": "thread_name", "args": {"name": lane}}
            events = [event] if lane in self.lanes else [named, event]
            lane_id = self.lanes.setdefault(lane, len(self.lanes))
            place = {"pid": self.rank, "tid": lane_id, "ts": time_ns / 1e3}
            self.events += [json.dumps(event | place) for event in events]

    def flush(self) -> None:
        """Overwrite the closing bracket, in one call, with what has gathered and a new bracket."""
        with self.lock:
            if self.file is not None and self.events:
                text = (",\n" if self.end else '{"traceEvents": [\n') + ",\n".join(self.events)
                self.events.clear()
                self.end += os.pwrite(self.file, text.encode() + TRACE_TAIL, self.end) - len(TRACE_TAIL)

    def close(self) -> None:
        """Flush and close the file; what comes later is dropped."""
        self.flush()
        with self.lock:
            if self.file is not None:
                os.close(self.file)
            self.file, self.recording, self.window_ns = None, False, [math.inf, math.inf]


class StepTimer:
    """`timing_breakdown` lines and `train` spans, from the host clock and CUDA events read once complete.

    A step neither reported (TRAINING_TIMING_EVERY) nor traced costs next to nothing; none waits for the GPU.
    All but optimizer and val (the validation before the step) are means per micro-step; batch_cpu is host
    time, batch_h2d what the compute stream waited for the batch.
    """

    def __init__(self, config: Any, device: torch.device, trace: Trace) -> None:
        self.every = config.training_timing_every if config.training_timing_breakdown else 0
        self.cuda, self.trace, self.active, self.val_ms = device.type == "cuda", trace, False, 0.0
        self.pending: list[tuple[int, bool, float, list[tuple[str, int, Any]]]] = []

    def begin(self, step: int) -> None:
        """Start of a step."""
        reported = self.every > 0 and step % self.every == 0
        self.active = reported or self.trace.recording
        if self.active:
            self.pending.append((step, reported, self.val_ms, []))
            self.lap("begin")
        self.val_ms = 0.0

    def lap(self, name: str) -> None:
        """Here ends a batch, forward, backward or optimizer."""
        if self.active:
            event = torch.cuda.Event(enable_timing=True) if self.cuda else None
            if event is not None:
                event.record()
            self.pending[-1][3].append((name, time.perf_counter_ns(), event))

    def end(self) -> str | None:
        """End of a step. Returns the line of the oldest reported step whose GPU work is over, if any."""
        self.active, line = False, None
        while line is None and self.pending and not (self.cuda and not self.pending[0][3][-1][2].query()):
            line = self._read(*self.pending.pop(0))
        return line

    def _read(self, step: int, reported: bool, val_ms: float, laps: list[tuple[str, int, Any]]) -> str | None:
        ms = dict.fromkeys(("batch_cpu", "batch_h2d", "forward", "backward", "optimizer"), 0.0)
        self.trace.complete("train", "main", laps[0][1], laps[-1][1], step=step)
        micro_steps = max(1, sum(name == "forward" for name, _, _ in laps))
        for (_, start_ns, start), (name, end_ns, end) in itertools.pairwise(laps):
            host_ms, gpu_ms = (end_ns - start_ns) / 1e6, start.elapsed_time(end) if self.cuda else 0.0
            self.trace.complete(name, "main", start_ns, end_ns, step=step)
            if self.cuda:
                self.trace.cuda_complete(name, "compute stream", start, end)
            both = {"batch_cpu": host_ms, "batch_h2d": gpu_ms}
            for key, value in (both if name == "batch" else {name: gpu_ms if self.cuda else host_ms}).items():
                ms[key] += value / (1 if name == "optimizer" else micro_steps)
        fields = " ".join(f"{name}_ms:{value:.2f}" for name, value in (ms | {"val": val_ms}).items())
        return f"timing_breakdown step:{step} micro_steps:{micro_steps} {fields}" if reported else None


# ============================================================================================================
# DATA — the tokens in an order that is a pure function of shards, seed and geometry, delivered ahead of need.
# ============================================================================================================

BOS_ID = 1
SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024
READ_TOKENS = 1 << 22  # per read: a stop is noticed soon, and ids are checked while they are in cache
CU_SEQLENS_MULTIPLE = 64  # few lengths of cu_seqlens, so that compiled kernels see few shapes
LIVENESS_SECONDS, CLOSE_SECONDS = 0.2, 1.5


@dataclass(frozen=True)
class Shard:
    """A file of 256 little-endian int32 (magic, version, token count, zeros), then its uint16 ids."""

    path: Path
    tokens: int


def open_shards(pattern: str) -> list[Shard]:
    """The shards that match, sorted by name, each header checked against its file. Raises DataError."""
    if not (names := sorted(glob.glob(pattern))):
        raise DataError(f"{pattern}: got no file, expected token shards; set DATA_PATH or see data/README.md")
    return [_open_shard(Path(name)) for name in names]


def _open_shard(path: Path) -> Shard:
    try:
        size, header = path.stat().st_size, np.fromfile(path, "<i4", SHARD_HEADER_BYTES // 4).tolist()
    except OSError as error:
        raise DataError(f"{path}: {error}, expected a token shard; check DATA_PATH") from error
    magic, version, tokens = (*header, 0, 0, 0)[:3]
    sizes = ("size in bytes", size, SHARD_HEADER_BYTES + 2 * max(tokens, 1))
    for what, got, expected in (("magic", magic, SHARD_MAGIC), ("version", version, SHARD_VERSION), sizes):
        if got != expected:
            raise DataError(f"{path}: {what} is {got}, expected {expected}; fetch or export this shard again")
    return Shard(path, tokens)


def read_into(file: Any, buffer: np.ndarray) -> int:
    """Fill `buffer` from `file`; returns how many bytes there were. All tokens of a run come through here."""
    return file.readinto(buffer)


def read_tokens(
    shard: Shard, start: int = 0, stop: int | None = None, vocab_size: int = 1 << 16,
    closed: Callable[[], bool] = lambda: False,
) -> np.ndarray:  # fmt: skip
    """Tokens [start, stop) of a shard, uint16; DataError names file and byte. LoaderError once `closed()`."""
    if (now := _open_shard(shard.path)) != shard:
        raise DataError(f"{shard.path}: has {now.tokens} tokens, expected {shard.tokens} as at the start")
    out = np.empty(min(shard.tokens if stop is None else stop, shard.tokens) - start, np.uint16)
    with open(shard.path, "rb") as file:
        for first in range(0, len(out), READ_TOKENS):
            part, byte = out[first : first + READ_TOKENS], SHARD_HEADER_BYTES + 2 * (start + first)
            try:
                file.seek(byte)
                got = read_into(file, part)
            except (Exception, SystemExit) as error:
                raise DataError(f"{shard.path}, byte {byte}: {error!r}; check disk and file") from error
            if got != part.nbytes:
                raise DataError(f"{shard.path}, byte {byte}: {got} bytes, expected {part.nbytes}; cut?")
            if part.max() >= vocab_size:
                at = int(np.argmax(part >= vocab_size))
                where = f"{shard.path}, token {start + first + at}, byte {byte + 2 * at}"
                raise DataError(f"{where}: id {part[at]}, expected below VOCAB_SIZE={vocab_size}")
            if closed():
                raise LoaderError(f"{shard.path}: closed while it was read")
    return out


def validation_tokens(config: Any, shards: list[Shard]) -> np.ndarray:
    """All validation tokens, uint16; with VAL_TOKENS_LIMIT that many targets, so one token more."""
    wanted = config.val_tokens_limit + 1 if config.val_tokens_limit else sum(shard.tokens for shard in shards)
    before = np.cumsum([0, *(shard.tokens for shard in shards)])
    kept = [(shard, int(wanted - skip)) for shard, skip in zip(shards, before, strict=False) if skip < wanted]
    return np.concatenate([read_tokens(shard, 0, stop, config.vocab_size) for shard, stop in kept])


def mix64(words: np.ndarray) -> np.ndarray:
    """A bijection of uint64 in which every bit depends on every other (the finalizer of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def random_words(start: int, count: int, *key: int) -> np.ndarray:
    """Words `start`… of the random stream `key`, uint64; ours, as numpy may change its streams."""
    state, gamma = np.zeros(1, np.uint64), 0x9E3779B97F4A7C15
    for part in key:
        state = mix64(state + np.uint64((part + gamma) % 2**64))
    return mix64(state + np.arange(start + 1, start + 1 + count, dtype=np.uint64) * np.uint64(gamma))


class TokenOrder:
    """The stream: each epoch permutes the shards and, within each, its sequences; any position in O(shards).

    Sequence i of a shard is its tokens i T … (i + 1) T inclusive; a partial one at the end is skipped.
    A visit is one reading of one shard, numbered on through the epochs. DataError: no sequence at all.
    """

    def __init__(self, shards: list[Shard], seq_len: int, seed: int, shuffle: bool) -> None:
        self.shards = [shard for shard in shards if shard.tokens > seq_len]
        self.seq_len, self.seed, self.shuffle = seq_len, seed, shuffle
        if not self.shards:
            longest = max((shard.tokens for shard in shards), default=0)
            raise DataError(f"the longest training shard has {longest} tokens, expected TRAIN_SEQ_LEN + 1 = "
                            f"{seq_len + 1}; fetch more or lower it")
        self.sizes = np.array([(shard.tokens - 1) // seq_len for shard in self.shards], np.int64)
        self.epoch_sequences = int(self.sizes.sum())

    def permutation(self, count: int, *key: int) -> np.ndarray:
        """The numbers below `count` in the order of random words (seed, *key); SHUFFLE=0: in their own."""
        if not self.shuffle:
            return np.arange(count)
        return np.argsort(random_words(0, count, self.seed, *key), kind="stable")

    def visit(self, visit: int) -> tuple[Shard, tuple[int, int, int]]:
        """The shard that a visit reads, and the arguments of `permutation` that order its sequences."""
        epoch, turn = divmod(visit, len(self.shards))
        number = int(self.permutation(len(self.shards), epoch)[turn])
        return self.shards[number], (int(self.sizes[number]), epoch, number)

    def segments(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The parts (visit, start within it, length) of `count` sequences from position `first` of it."""
        while count:
            epoch, place = divmod(first, self.epoch_sequences)
            ends = np.cumsum(sizes := self.sizes[self.permutation(len(self.shards), epoch)])
            turn = int(np.searchsorted(ends, place, side="right"))
            length = min(count, int(ends[turn]) - place)
            yield epoch * len(ends) + turn, place - int(ends[turn] - sizes[turn]), length
            first, count = first + length, count - length


class ShardFeed:
    """The stream in order, out of `visits`: (visit, its tokens, the order of its sequences), one by one."""

    def __init__(self, order: TokenOrder, visits: Iterator[Any]) -> None:
        self.order, self.visits = order, visits
        self.visit, self.tokens, self.sequences = -1, np.empty(0, np.uint16), np.empty(0, np.int64)

    def gather(self, first: int, inputs_BT: np.ndarray, last_B: np.ndarray) -> None:
        """Write the sequences at position `first`… of the stream: T inputs and the token behind them."""
        done, seq_len = 0, self.order.seq_len
        for visit, start, length in self.order.segments(first, len(last_B)):
            while self.visit != visit:
                self.visit, self.tokens, self.sequences = next(self.visits)
            picked, rows = self.sequences[start : start + length], slice(done, done + length)
            whole = self.tokens[: len(self.sequences) * seq_len].reshape(-1, seq_len)
            np.take(whole, picked, axis=0, out=inputs_BT[rows], mode="clip")  # "raise" goes through a buffer
            last_B[rows] = self.tokens[(picked + 1) * seq_len]
            done += length


def loader_error(where: str, error: BaseException) -> LoaderError:
    """`error`, of any kind, as `next_batch` raises it: with its place and the traceback of its origin."""
    if isinstance(error, LoaderError):
        return error
    return LoaderError(f"{where}: {error!r}\n{''.join(traceback.format_exception(error))}")


class Stage(Iterator[Any]):
    """A thread that runs `items` ahead of its one reader; every `get` ends in the next item or an error.

    With the item that the reader holds, `ahead + 1` exist: so many slots are never overwritten too soon.
    """

    def __init__(self, name: str, items: Iterator[Any], ahead: int, device: torch.device) -> None:
        self.name, self.items, self.ahead, self.device = name, items, ahead, device
        self.ready, self.end, self.changed = list[Any](), list[LoaderError](), threading.Condition()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a new thread is on device 0
            for item in self.items:
                self._put(item)
        except BaseException as error:
            self.stop(loader_error(self.name, error))

    def _put(self, item: Any) -> None:
        with self.changed:
            self.ready.append(item)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.end or len(self.ready) < self.ahead)
            if self.end:
                raise self.end[0]

    def get(self, timeout_seconds: float = math.inf) -> Any:
        """The next item. Raises LoaderError, or TimeoutError."""
        deadline = time.monotonic() + timeout_seconds
        with self.changed:
            while not self.ready:
                if self.end:
                    raise self.end[0]
                if not self.thread.is_alive():
                    raise LoaderError(f"{self.name}: the worker thread ended without a word")
                if time.monotonic() > deadline:
                    raise TimeoutError
                self.changed.wait(LIVENESS_SECONDS)
            self.changed.notify_all()
            return self.ready.pop(0)

    __next__ = get

    def stop(self, error: LoaderError | None = None) -> None:
        """Wake both sides: the thread ends at its next item, the reader after what is ready."""
        with self.changed:
            self.end.append((error or LoaderError(f"{self.name}: closed")).with_traceback(None))
            self.changed.notify_all()


class Slot:
    """Room for one batch of uint16 ids, on the host (pinned for a GPU) or on the device.

    Of its CUDA events `filled` lets the reader begin, and `free` the writer of the next batch.
    """

    def __init__(self, size: int, device: torch.device, cuda: bool) -> None:
        pin = cuda and device.type == "cpu"
        self.ids = torch.empty(size, dtype=torch.uint16, device=device, pin_memory=pin)
        self.index = -1
        self.meta: tuple[int, Tensor | None] = (0, None)  # hash, document starts
        self.filled: Any = torch.cuda.Event(enable_timing=True) if cuda else None
        self.free: Any = torch.cuda.Event(enable_timing=True, blocking=True) if cuda else None


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device: B sequences of T tokens."""

    inputs_BT: Tensor  # int64
    targets_BT: Tensor  # int64, the inputs one token later
    cu_seqlens: Tensor | None  # `document_starts` of the inputs; None without DOC_MASK
    step: int
    micro_step: int


def document_starts(inputs_BT: np.ndarray) -> np.ndarray:
    """Where documents and rows begin, then B T, once or up to a multiple of CU_SEQLENS_MULTIPLE; int32."""
    starts_BT = inputs_BT == BOS_ID
    starts_BT[:, 0] = True
    starts = np.flatnonzero(starts_BT).astype(np.int32)
    padding = CU_SEQLENS_MULTIPLE - len(starts) % CU_SEQLENS_MULTIPLE
    return np.pad(starts, (0, padding), constant_values=inputs_BT.size)


def hash_sequences(first: int, inputs_BT: np.ndarray, last_B: np.ndarray) -> int:
    """64-bit hash of the sequences at position `first`… of the stream; hashes of parts add up modulo 2**64.

    A sequence is the sum of its 32-bit words times random words (a collision: 2**-33), mixed with its place.
    """
    words = np.pad(inputs_BT, ((0, 0), (0, 1))) if inputs_BT.shape[1] % 2 else inputs_BT
    words = np.ascontiguousarray(words).view(np.uint32)
    keys = random_words(0, words.shape[1] + 1, 1)
    sums = np.einsum("bw,w->b", words, keys[1:]) + last_B * keys[:1]
    return int(mix64(sums ^ random_words(first, len(last_B), 2)).sum(dtype=np.uint64))


class Loader(contextlib.AbstractContextManager["Loader"]):
    """Micro-batches of one rank, without end: disk → stage → transfer → `next_batch`, in fixed memory.

    Step k is the sequences [k S, (k + 1) S) of `TokenOrder` for any number of ranks; rank r takes the r-th
    equal part of them, MICRO_BATCH_TOKENS at a time. Raises ConfigError if that does not divide.
    """

    def __init__(
        self, config: Any, shards: list[Shard],
        *, rank: int, world_size: int, device: torch.device, trace: Trace,
    ) -> None:  # fmt: skip
        self.config, self.device, self.trace, self.cuda = config, device, trace, device.type == "cuda"
        self.rank, self.world_size, self.name = rank, world_size, f"rank {rank} loader"
        self.micro_steps, self.seq_len = micro_steps_per_step(config, world_size), config.train_seq_len
        self.step_rows = config.train_batch_tokens // self.seq_len
        self.rows = self.step_rows // world_size // self.micro_steps
        self.order = TokenOrder(shards, self.seq_len, config.seed, config.shuffle)
        names = "\n".join(f"{shard.path.name} {shard.tokens}" for shard in shards)
        self.fingerprint = {"version": 1, "shard_tokens": sum(shard.tokens for shard in shards),
                            "shards_sha256": hashlib.sha256(names.encode()).hexdigest()}
        for name in ("seed", "shuffle", "train_seq_len", "train_batch_tokens"):
            self.fingerprint[name] = getattr(config, name)
        self._open(0)

    def _open(self, index: int) -> None:
        self.index, self.stream_hash, self.waits_ms = index, 0, list[float]()
        ahead, size = self.config.train_prefetch_queue, self.rows * (self.seq_len + 1)
        transfer = self.config.train_prefetch and self.config.train_copy_stream
        host = [Slot(size, torch.device("cpu"), self.cuda) for _ in range(ahead + 1)]
        room = [Slot(size, self.device, self.cuda) for _ in range(3 if transfer else 0)]
        self.stream = torch.cuda.Stream(self.device) if transfer and self.cuda else None
        if self.stream is not None:  # memory of the new slots may still be in use by earlier work
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.closed, self.stages = False, list[Stage]()
        atexit.register(self.close)
        visits = self._ahead("disk", self._read(next(self.order.segments(self._position(index), 1))[0]), 1)
        self.batches = self._ahead("stage", self._fill(ShardFeed(self.order, visits), host, index), ahead)
        if transfer:
            self.batches = self._ahead("transfer", self._transfer(self.batches, room), len(room) - 1)

    def _ahead(self, stage: str, items: Iterator[Any], ahead: int) -> Iterator[Any]:
        if not self.config.train_prefetch:
            return items
        self.stages.append(Stage(f"{self.name} {stage}", items, ahead, self.device))
        return self.stages[-1]

    def _position(self, index: int) -> int:
        step, micro_step = divmod(index, self.micro_steps)
        return step * self.step_rows + (self.rank * self.micro_steps + micro_step) * self.rows

    def _read(self, first: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        while True:
            epoch, turn = divmod(first, len(self.order.shards))
            last = first + len(self.order.shards) - turn
            with self.trace.span("epoch", "epochs", epoch=epoch):
                yield from map(self._read_visit, range(first, last))
            first = last

    def _read_visit(self, visit: int) -> tuple[int, np.ndarray, np.ndarray]:
        shard, key = self.order.visit(visit)
        with self.trace.span("disk_load", f"{self.name} disk", shard=shard.path.name):
            tokens = read_tokens(shard, 0, None, self.config.vocab_size, lambda: self.closed)
            return visit, tokens, self.order.permutation(*key)

    def _fill(self, feed: ShardFeed, slots: list[Slot], first: int) -> Iterator[Slot]:
        for index in itertools.count(first):
            slot = slots[index % len(slots)]
            if self.cuda:
                slot.free.synchronize()
            if self.stream is not None and slot.index >= 0:  # the copy before this one is over now
                self.trace.cuda_complete("gpu_transfer", f"{self.name} copy stream", slot.filled, slot.free)
            with self.trace.span("stage", f"{self.name} stage", batch=index):
                slot.index, slot.meta = index, self._gather(feed, index, slot.ids.numpy())
                self.trace.point("s", "batch", f"{self.name} stage", id=self.rank << 40 | index)
            yield slot

    def _gather(self, feed: ShardFeed, index: int, ids: np.ndarray) -> tuple[int, Tensor | None]:
        first, inputs_BT = self._position(index), ids[: -self.rows].reshape(self.rows, self.seq_len)
        try:
            feed.gather(first, inputs_BT, ids[-self.rows :])
            cu_seqlens = torch.from_numpy(document_starts(inputs_BT)) if self.config.doc_mask else None
            if cu_seqlens is not None and self.cuda:
                cu_seqlens = cu_seqlens.pin_memory()
            return hash_sequences(first, inputs_BT, ids[-self.rows :]), cu_seqlens
        except (Exception, SystemExit) as error:
            visit, start, _ = next(self.order.segments(first, 1))
            shard, key = self.order.visit(visit)
            byte = SHARD_HEADER_BYTES + 2 * self.seq_len * int(self.order.permutation(*key)[start])
            where = f"rank {self.rank}, step {index // self.micro_steps}, from {shard.path}, byte {byte}"
            raise loader_error(where, error) from error

    def _transfer(self, staged: Iterator[Slot], slots: list[Slot]) -> Iterator[Slot]:
        for host in staged:
            slot = slots[host.index % len(slots)]
            with self.trace.span("gpu_transfer", f"{self.name} transfer", batch=host.index):
                slot.index, slot.meta = host.index, host.meta
                self._copy(host, slot)
            yield slot

    def _copy(self, host: Slot, slot: Slot) -> None:
        if self.stream is None:  # numpy: torch's CPU operators stall in the threads of a busy machine
            np.copyto(slot.ids.numpy(), host.ids.numpy())
            return
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(slot.free)
            host.filled.record(self.stream)
            slot.ids.copy_(host.ids, non_blocking=True)
            host.free.record(self.stream)
            slot.filled.record(self.stream)

    def next_batch(self) -> Batch:
        """The next micro-batch. Raises LoaderError."""
        start = time.perf_counter()
        with self.trace.span("gpu_queue_wait", "main", batch=self.index):
            slot = self._wait()
        self.waits_ms.append(1e3 * (time.perf_counter() - start))
        self.trace.point("f", "batch", id=self.rank << 40 | self.index)
        self.trace.point("C", "ready", args={stage.name: len(stage.ready) for stage in self.stages})
        if self.cuda:
            slot.filled.wait()
        ids = slot.ids.to(self.device, non_blocking=True).to(torch.int64)  # 2 bytes a token cross the bus
        if self.cuda:
            slot.free.record()
        sequence_hash, cu_seqlens = slot.meta
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(self.device, non_blocking=True)
        inputs_BT = ids[: -self.rows].view(self.rows, self.seq_len)
        targets_BT = torch.cat((inputs_BT[:, 1:], ids[-self.rows :, None]), dim=1)
        step, micro_step = divmod(self.index, self.micro_steps)
        self.index, self.stream_hash = self.index + 1, (self.stream_hash + sequence_hash) % 2**64
        return Batch(inputs_BT, targets_BT, cu_seqlens, step, micro_step)

    def _wait(self) -> Slot:
        try:
            if self.stages:
                return self.stages[-1].get(self.config.loader_timeout_seconds)
            return next(self.batches)
        except StopIteration:
            raise LoaderError(f"{self.name}: next_batch() after an error or close()") from None
        except TimeoutError as error:
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
            ready = ", ".join(f"{stage.name} {len(stage.ready)}" for stage in self.stages)
            raise LoaderError(
                f"{self.name}, batch {self.index}: none for LOADER_TIMEOUT_SECONDS="
                f"{self.config.loader_timeout_seconds:g}; ready: {ready}. All stacks are on stderr: see what "
                "the first stage without items waits for"
            ) from error

    def take_waits_ms(self) -> list[float]:
        """Milliseconds that each batch since the last call was waited for (`data_wait`)."""
        waits_ms, self.waits_ms = self.waits_ms, []
        return waits_ms

    def seek(self, step: int, rows: int = 0) -> None:
        """Go to a step, behind the first `rows` sequences of this rank in it. The hash starts at zero."""
        self.close()
        self._open(step * self.micro_steps + rows // self.rows)

    def state_dict(self, total_hash: int | None = None) -> dict[str, Any]:
        """Where the last batch delivered ended, as JSON; with the sum of all hashes a state for all ranks."""
        step, micro_step = divmod(self.index, self.micro_steps)
        state = {"step": step, "rows": micro_step * self.rows, "world_size": self.world_size}
        whose = {"rank": self.rank, "stream_hash": self.stream_hash}
        return self.fingerprint | state | (whose if total_hash is None else {"stream_hash": total_hash})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state ends. LoaderError names the field that would make the data differ."""
        rows, own = state.get("rows", 0), "rank" in state  # a whole step of all ranks suits any world size
        expected = self.fingerprint | {"rows": rows // self.rows * self.rows}
        expected |= {"world_size": self.world_size} if own or rows else {}
        expected |= {"rank": self.rank} if own else {}
        for name, value in expected.items():
            if state.get(name) != value:
                raise LoaderError(f"loader state: {name} is {state.get(name)!r}, expected {value!r}; resume "
                                  "with the data and settings it was saved with, or start a new run")
        self.seek(state["step"], rows)
        self.stream_hash = state["stream_hash"] if own or self.rank == 0 else 0

    def close(self) -> None:
        """Stop the workers, waiting CLOSE_SECONDS at most; at any time and any number of times."""
        self.closed, deadline = True, time.monotonic() + CLOSE_SECONDS
        atexit.unregister(self.close)
        for stage in self.stages:
            stage.stop()
        for stage in self.stages:
            stage.thread.join(max(0.0, deadline - time.monotonic()))
            if stage.thread.is_alive():
                print(f"{stage.name}: busy {CLOSE_SECONDS} s after close(), left behind", file=sys.stderr)
        if self.stream is not None:  # who gets the memory of the slots next comes after their last copy
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.batches, self.stages = iter(()), []

    def __exit__(self, *error: object) -> None:
        self.close()


make_loader = Loader


# ============================================================================================================
# KERNELS — each Triton kernel beside its plain PyTorch twin; the twin is the definition it must equal.
# ============================================================================================================
if triton is not None:
    INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: on the CPU, nothing to tune
    TILES = [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
        for m, n, k, warps, stages in (
            (32, 32, 32, 4, 2), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3))
    ]  # fmt: skip

    @triton.autotune(
        TILES[:1] if INTERPRETED else TILES,
        key=["M", "N", "K", "BACKWARD"],
        # Without tensor cores (fp32) large tiles spill and take minutes to compile.
        prune_configs_by={"early_config_prune": lambda t, at, **_: t[:1] if at["a"].itemsize == 4 else t},
        cache_results=True,
    )
    @triton.jit
    def linear_leaky_square_kernel(  # type: ignore[no-untyped-def]
        a, b, pre, out, M, N, K, slope,
        BACKWARD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        # Descriptors are TMA on Hopper and later; for older GPUs the compiler makes them masked pointers.
        HALF_N: tl.constexpr = BLOCK_N // 2  # epilogue by halves: its stores need half the shared memory
        a_tiles = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
        b_tiles = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
        pre_tiles = tl.make_tensor_descriptor(pre, [M, N], [N, 1], [BLOCK_M, HALF_N])
        out_tiles = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BLOCK_M, HALF_N])
        across, tiles = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        # Flattened, so that the loads of a program's next tile overlap the epilogue of this one.
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            row, column = tile // across * BLOCK_M, tile % across * BLOCK_N
            product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(0, K, BLOCK_K):
                b_tile = b_tiles.load([column, k])
                product = tl.dot(a_tiles.load([row, k]), b_tile.T, product, input_precision="ieee")
            halves = tl.split(product.reshape(BLOCK_M, 2, HALF_N).permute(0, 2, 1))
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
    def softcapped(x, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
        if SOFTCAP != 0:  # tanh by a minimax polynomial below 0.75, by exp above it: neither cancels
            u = x * (1.0 / SOFTCAP)
            s = u * u
            tail = ((0.00173693453 * s - 0.00765725318) * s + 0.0214520339) * s - 0.0538927242
            small = u + u * s * ((tail * s + 0.133326948) * s - 0.333333164)
            e = tl.exp(-2.0 * tl.abs(u))
            large = (1.0 - e) / (1.0 + e)
            x = SOFTCAP * tl.where(tl.abs(u) < 0.75, small, tl.where(u < 0, -large, large))
        return x

    @triton.jit
    def cross_entropy_kernel(  # type: ignore[no-untyped-def]
        logits, targets, stats, out, N, V,
        SOFTCAP: tl.constexpr, BACKWARD: tl.constexpr, BLOCK_V: tl.constexpr,
    ):  # fmt: skip
        # stats: loss (backward: its gradient), log-sum-exp as peak and rest: their sum would lose digits.
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(targets + row)
        peak, total = -3.0e38, 0.0  # finite: a block of -inf logits must not give -inf minus -inf
        for start in range(0, V, BLOCK_V):
            column = start + tl.arange(0, BLOCK_V)
            x = tl.load(logits + row * V + column, mask=column < V, other=0.0).to(tl.float32)
            z = softcapped(x, SOFTCAP)
            if BACKWARD:
                p = tl.exp(z - tl.load(stats + N + row) - tl.load(stats + 2 * N + row))
                d_x = tl.load(stats + row) * (p - tl.where(column == target, 1.0, 0.0))
                if SOFTCAP != 0:
                    d_x *= 1.0 - (z * (1.0 / SOFTCAP)) * (z * (1.0 / SOFTCAP))
                tl.store(out + row * V + column, d_x.to(out.dtype.element_ty), mask=column < V)
            else:
                z = tl.where(column < V, z, -float("inf"))
                new_peak = tl.maximum(peak, tl.max(z, 0))
                total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(z - new_peak), 0)
                peak = new_peak
        if not BACKWARD:
            inside = (target >= 0) & (target < V)  # a target outside the vocabulary makes its loss NaN
            x = tl.load(logits + row * V + target, mask=inside, other=float("nan")).to(tl.float32)
            tl.store(stats + row, peak - softcapped(x, SOFTCAP) + tl.log(total))
            tl.store(stats + N + row, peak)
            tl.store(stats + 2 * N + row, tl.log(total))


def aligned(matrix: Tensor) -> Tensor:
    """The matrix as TMA reads it: contiguous, 16-byte start, sides zero-padded to multiples of 16."""
    rows, columns = (-side % 16 for side in matrix.shape)
    matrix = F.pad(matrix, (0, columns, 0, rows)) if rows or columns else matrix.contiguous()
    return matrix.clone() if matrix.data_ptr() % 16 else matrix


@torch.library.custom_op("train_gpt::linear_leaky_square", mutates_args=())
def linear_leaky_square(a_MK: Tensor, b_NK: Tensor, pre_MN: Tensor | None, slope: float) -> Tensor:
    """P = A Bᵀ and phi(P), phi = LeakyReLU(slope)²: (2, M, N). Given P: (A Bᵀ) phi'(P), (1, M, N)."""
    a, b = aligned(a_MK), aligned(b_NK)
    planes = a.new_empty(2 if pre_MN is None else 1, len(a), len(b))
    pre = planes[0] if pre_MN is None else aligned(pre_MN)
    # Triton keeps the allocator of descriptors' scratch memory per thread, and the backward pass has its own.
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=a.device))
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 2
    sides = len(a), len(b), a.shape[1]
    linear_leaky_square_kernel[(programs,)](a, b, pre, planes[-1], *sides, slope, BACKWARD=pre_MN is not None)
    return planes[:, : len(a_MK), : len(b_NK)].contiguous()


linear_leaky_square.register_fake(lambda a, b, pre, _: a.new_empty(2 if pre is None else 1, len(a), len(b)))


class FusedMlp(torch.autograd.Function):
    """Only the kernel is opaque to torch.compile: it sees, and may fuse around, the other four products."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, slope: float) -> Tensor:
        pre_NF, act_NF = linear_leaky_square(x_ND, up_FD, None, slope)
        ctx.save_for_backward(x_ND, up_FD, down_DF, pre_NF, act_NF)
        ctx.slope = slope
        return F.linear(act_NF, down_DF)

    @staticmethod
    def backward(ctx: Any, d_out_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x_ND, up_FD, down_DF, pre_NF, act_NF = ctx.saved_tensors
        (d_pre_NF,) = linear_leaky_square(d_out_ND, down_DF.t().contiguous(), pre_NF, ctx.slope)
        return d_pre_NF @ up_FD, d_pre_NF.t() @ x_ND, d_out_ND.t() @ act_NF, None


def mlp_plain(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, slope: float) -> Tensor:
    """LeakyReLU(slope)² MLP, (N, D) -> (N, D), the three tensors of one dtype; slope 0 is relu²."""
    return F.linear(F.leaky_relu(F.linear(x_ND, up_FD), slope).square(), down_DF)


def mlp_fused(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, slope: float) -> Tensor:
    """`mlp_plain`, activation and derivative in GEMM epilogues (PR #1530 after modded-nanogpt PR #197)."""
    return FusedMlp.apply(x_ND, up_FD, down_DF, slope)


@torch.library.custom_op("train_gpt::cross_entropy", mutates_args=())
def cross_entropy(logits_NV: Tensor, targets_N: Tensor, given_3N: Tensor | None, softcap: float) -> Tensor:
    """(loss, peak, log-sum-exp - peak), (3, N) fp32. Given these, loss gradient first: that of the logits."""
    logits_NV, (N, V) = logits_NV.contiguous(), logits_NV.shape
    stats_3N = logits_NV.new_empty(3, N, dtype=torch.float32) if given_3N is None else given_3N.contiguous()
    out = stats_3N if given_3N is None else torch.empty_like(logits_NV)
    options = softcap, given_3N is not None, min(8192, triton.next_power_of_2(V))
    cross_entropy_kernel[(N,)](logits_NV, targets_N.contiguous(), stats_3N, out, N, V, *options, num_warps=8)
    return out


def _cross_entropy_gradients(ctx: Any, d_stats_3N: Tensor) -> tuple[Tensor, None, None, None]:
    logits_NV, targets_N, stats_3N = ctx.saved_tensors
    given_3N = torch.cat((d_stats_3N[:1], stats_3N[1:]))
    return cross_entropy(logits_NV, targets_N, given_3N, ctx.softcap), None, None, None


def _cross_entropy_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits_NV, targets_N, _, ctx.softcap = inputs
    ctx.save_for_backward(logits_NV, targets_N, output)


cross_entropy.register_autograd(_cross_entropy_gradients, setup_context=_cross_entropy_context)
cross_entropy.register_fake(lambda logits, targets, given, softcap: logits.new_empty(logits.shape)
                            if given is not None else logits.new_empty(3, len(logits), dtype=torch.float32))


def softcapped_cross_entropy_plain(logits_NV: Tensor, targets_N: Tensor, softcap: float) -> Tensor:
    """Nats per token (N,), at least fp32: cross-entropy of softcap·tanh(logits/softcap); softcap 0: none."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    capped_NV = softcap * torch.tanh(logits_NV / softcap) if softcap else logits_NV
    return F.cross_entropy(capped_NV, targets_N, reduction="none")


def softcapped_cross_entropy_fused(logits_NV: Tensor, targets_N: Tensor, softcap: float) -> Tensor:
    """`softcapped_cross_entropy_plain`, one kernel a pass, gradient in the logits' dtype (PR #1787)."""
    return cross_entropy(logits_NV, targets_N, None, softcap)[0]


def compare_with_twin(plain: Callable[..., Any], fused: Callable[..., Any], *inputs: Any) -> tuple[bool, str]:
    """Whether `fused` is `plain` to 4 units of rounding and faster; the figures. Compiled, both passes."""
    leaves = [x.requires_grad_() for x in inputs if isinstance(x, Tensor) and x.is_floating_point()]
    d_out = torch.randn_like(fused(*inputs))

    def step(function: Callable[..., Tensor]) -> list[Tensor]:
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    forms = [torch.compile(function, dynamic=False, fullgraph=True) for function in (plain, fused)]
    pairs = zip(*map(step, forms), strict=True)
    ulps = [(b - a).abs().max().float() / a.abs().max() / torch.finfo(a.dtype).eps for a, b in pairs]
    gap = torch.stack(ulps).max()  # NaN if any is
    plain_ms, fused_ms = (triton.testing.do_bench(lambda f=f: step(f), return_mode="median") for f in forms)
    use = (gap <= 4) & (fused_ms < plain_ms)
    if dist.is_initialized():
        dist.all_reduce(use, dist.ReduceOp.MIN)
    return bool(use), f"gap_ulp:{gap.item():.2f} compiled_plain_ms:{plain_ms:.3f} fused_ms:{fused_ms:.3f}"


def choose_kernels(
    config: Config, device: torch.device, dtype: torch.dtype, log: Callable[[str], None]
) -> tuple[bool, bool]:
    """Whether FUSED_MLP and FUSED_CE run, logged; "auto": where a kernel is exact and faster at these shapes.

    Every rank calls it and all get the same answer. Raises ConfigError for an impossible "1".
    """
    rows, dim, hidden = config.micro_batch_tokens, config.model_dim, int(config.mlp_mult * config.model_dim)
    normal = functools.partial(torch.randn, device=device, dtype=dtype)
    mlp = mlp_plain, mlp_fused, lambda: (
        normal(rows, dim), normal(hidden, dim) / dim**0.5, normal(dim, hidden) / dim**0.5, config.leaky_slope)
    loss = softcapped_cross_entropy_plain, softcapped_cross_entropy_fused, lambda: (
        normal(rows, config.vocab_size), torch.randint(config.vocab_size, (rows,), device=device),
        config.logit_softcap)  # fmt: skip
    choices, lines = [], []
    for name, (plain, fused, inputs) in (("fused_mlp", mlp), ("fused_ce", loss)):
        asked, cuda = getattr(config, name), triton is not None and device.type == "cuda"
        use, why = asked == "1", f"asked:{asked} device:{device.type}"
        if use and not cuda and (triton is None or not INTERPRETED):
            raise ConfigError(f"{name.upper()}=1 needs Triton and CUDA, got {device.type}; set it to auto")
        if asked == "auto" and cuda:
            use, why = compare_with_twin(plain, fused, *inputs())
        choices.append(use)
        lines.append(f"{name}:{'kernel' if use else 'plain'} {why}")
    log(" | ".join(lines))
    return choices[0], choices[1]


# ============================================================================================================
# MODEL — weights live in banks, one 3-D parameter per shape; one block serves training, scoring, calibration.
# ============================================================================================================

BANKS = ("qo_bank", "kv_bank", "mlp_up_bank", "mlp_down_bank")
ROLES = ("attn", "attn", "mlp", "mlp", "embed", "embed")
MATRIX_ROLES = dict(zip((*BANKS, "token_embedding_VD", "lm_head_VD"), ROLES, strict=True))
Documents = tuple[Tensor | None, Tensor | None]  # a (B, T, T) mask, or int32 starts in the flattened batch
Context = tuple[dict[str, tuple[Tensor, ...]], Tensor, Documents]  # rows of all parameters, rotary table


def visit_order(config: Config, looping: bool) -> tuple[list[int], list[int]]:
    """Layers in the order they run, split into the U-Net's encoder and decoder half (PR #1493)."""
    layers = list(range(config.num_layers))
    if looping:
        layers[config.loop_start : config.loop_end + 1] *= config.num_loops + 1
    return layers[: len(layers) // 2], layers[len(layers) // 2 :]


def parameter_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter; a feature that is off owns none."""
    layers, width, skips = c.num_layers, c.model_dim, len(visit_order(c, True)[0])
    lanes = 0 if c.parallel_mode == "gptj" or c.parallel_start_layer < 0 else layers - c.parallel_start_layer
    shapes = {
        "token_embedding_VD": (c.vocab_size, width),
        "lm_head_VD": (0 if c.tie_embeddings else c.vocab_size, width),
        "qo_bank": (2 * layers, width, width),
        "kv_bank": (2 * layers, c.num_kv_heads * c.head_dim, width),
        "mlp_up_bank": (layers, c.mlp_dim, width),
        "mlp_down_bank": (layers, width, c.mlp_dim),
        "attn_scale_LD": (layers, width),
        "mlp_scale_LD": (layers, width),
        "resid_keep_LD": (layers, width),
        "resid_inject_LD": (layers, width),
        "qk_gain_LH": (layers, c.num_heads),
        "skip_weight_KD": (skips, width),
        "skip_gate_KD": (skips if c.skip_gates_enabled else 0, width),
        "attn_gate_LHW": (layers if c.sparse_attn_gate_enabled else 0, c.num_heads, c.gate_window),
        "smear_gate_1W": (1 if c.smear_gate_enabled else 0, c.gate_window),
        "smear_scale_1": (1 if c.smear_gate_enabled else 0,),
        "lane_mix_P23": (lanes, 2, 3),
    }
    return {name: shape for name, shape in shapes.items() if 0 not in shape}


def build_model(config: Config) -> GPT:
    """A model on the CPU, its weights drawn from (SEED, name): switching a feature leaves the others."""
    model = GPT(config)
    constants: dict[str, Any] = {"qk_gain_LH": config.qk_gain_init, "lane_mix_P23": [1.1, 1.0, 1.0]}
    constants |= dict.fromkeys(("attn_scale_LD", "mlp_scale_LD", "resid_keep_LD", "skip_weight_KD"), 1.0)
    uniform = functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5))  # torch's own: ±1/sqrt(inputs)
    draw = nn.init.orthogonal_ if config.matrix_init == "orthogonal" else uniform
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{config.seed} {name}".encode()))
        weights = parameter.detach().copy_(torch.tensor(constants.get(name, 0.0)))
        if name == "token_embedding_VD":
            deviation = config.tied_embed_init_std if config.tie_embeddings else 1.0
            weights.normal_(0.0, deviation, generator=generator)
        elif name in ("qo_bank", "kv_bank", "mlp_up_bank"):  # what writes to the residual stream stays zero
            for matrix in weights[: config.num_layers] if name == "qo_bank" else weights:
                draw(matrix, generator=generator)
    return model


def rotary_table(length: int, config: Config) -> Tensor:
    """Cosines and sines (2, T, 1, rotated/2); for more than the trained length the base grows (PR #549)."""
    rotated, base = config.rope_dims or config.head_dim, config.rope_base
    trained = config.rope_train_seq_len or config.train_seq_len
    if length > trained and rotated > 2:
        base *= (length / trained) ** (rotated / (rotated - 2))
    frequencies = base ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    angles = torch.arange(length, dtype=torch.float64)[:, None, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x_BTHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first channels of each head, in halves; the other channels pass."""
    half = cos.size(-1)
    a, b, rest = x_BTHE.split([half, half, x_BTHE.size(-1) - 2 * half], dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin, rest], dim=-1)


def rms_norm(x: Tensor) -> Tensor:
    """x over its root mean square along the last axis; no weight, and one epsilon for every torch version."""
    return F.rms_norm(x, (x.size(-1),), eps=2.0**-23)


class GPT(nn.Module):
    """The model. Parameters are fp32 masters; `compute_dtype` is what they are cast to at use."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.looping = config, torch.float32, config.num_loops > 0
        self.attend: Callable[..., Tensor] = attention_sdpa
        self.mlp: Callable[..., Tensor] = mlp_plain
        self.cross_entropy: Callable[..., Tensor] = softcapped_cross_entropy_plain
        self.observer: Callable[[str, int, Tensor], None] | None = None
        for name, shape in parameter_shapes(config).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.register_buffer("rotary_train", rotary_table(config.train_seq_len, config), persistent=False)
        self.register_buffer("rotary_eval", rotary_table(config.eval_length, config), persistent=False)

    def forward(self, inputs_BT: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Hidden states (B, T, D) after the last norm. cu_seqlens: as in `Batch`; varlen kernels read it."""
        c, dtype, length = self.config, self.compute_dtype, inputs_BT.size(1)
        rows = {n: p.to(dtype).unbind(0) for n, p in self.named_parameters() if not n.endswith("_VD")}
        rotary = getattr(self, "rotary_train" if length <= c.train_seq_len else "rotary_eval")[:, :length]
        context = rows, rotary.to(dtype), find_documents(inputs_BT, cu_seqlens, self.attend, c.doc_mask)
        x = F.embedding(inputs_BT, self.get_parameter("token_embedding_VD")).to(dtype)
        if c.smear_gate_enabled:  # never across the start of a row or, with DOC_MASK, a document (PR #1851)
            gate_BT = torch.sigmoid(x[..., : c.gate_window] @ rows["smear_gate_1W"][0])
            gate_BT = gate_BT.masked_fill((inputs_BT == BOS_ID) & c.doc_mask, 0.0) * rows["smear_scale_1"][0]
            x = torch.addcmul(x, gate_BT[..., None], F.pad(x, (0, 0, 1, 0))[:, :-1])
        x0, (encoder, decoder) = rms_norm(x), visit_order(c, self.looping)
        stack: list[Tensor] = []
        lanes = [x0]  # the first one takes and gives the skips
        for visit, layer in enumerate(encoder + decoder, -len(encoder)):
            two = c.parallel_mode == "lanes" and 0 <= c.parallel_start_layer <= layer
            if two != (len(lanes) == 2):
                lanes = lanes * 2 if two else [(lanes[0] + lanes[1]) / 2]
            if visit >= 0 and stack:
                skip, gates = rows["skip_weight_KD"][visit] * stack.pop(), rows.get("skip_gate_KD")
                x = lanes[0]
                lanes[0] = torch.lerp(skip, x, gates[visit].sigmoid()) if gates else x + skip
            lanes = self._block(layer, lanes, x0, context)
            stack += lanes[:1] if visit < 0 else []
        hidden = rms_norm(lanes[0] if len(lanes) == 1 else (lanes[0] + lanes[1]) / 2)
        self._observe("head_in", 0, hidden)
        return hidden

    def cu_seqlens(self, inputs_BT: Tensor) -> Tensor | None:
        """What compiled code must be given beside inputs that no loader made; None where nothing reads it."""
        packed = self.config.doc_mask and self.attend is not attention_sdpa
        return starts_on_device(inputs_BT) if packed else None

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Scores (N, V) of every next token, before the softcap."""
        head = self.get_parameter("token_embedding_VD" if self.config.tie_embeddings else "lm_head_VD")
        return F.linear(hidden_ND, head.to(hidden_ND.dtype))

    def loss_per_token(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Negative log-likelihood (N,) in nats, fp32, of each target under the full softcapped softmax."""
        return self.cross_entropy(self.logits(hidden_ND), targets_N, self.config.logit_softcap)

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mean loss of a batch in nats per token: what training minimises."""
        return self.loss_per_token(self(inputs_BT, cu_seqlens).flatten(0, 1), targets_BT.flatten()).mean()

    def _block(self, layer: int, lanes: list[Tensor], x0: Tensor, context: Context) -> list[Tensor]:
        """One visit. Sequential: the MLP reads what attention wrote. Parallel: both read first, the same lane
        (GPT-J, PR #1493) or one each, into which learned weights mix what both wrote (PR #1529)."""
        c, rows = self.config, context[0]
        scale, parallel = (layer + 1) ** -0.5 if c.ln_scale else 1.0, 0 <= c.parallel_start_layer <= layer
        mixed = torch.addcmul(rows["resid_keep_LD"][layer] * lanes[0], rows["resid_inject_LD"][layer], x0)
        attended = rows["attn_scale_LD"][layer] * self._attention(layer, rms_norm(mixed) * scale, context)
        x = mixed if parallel else mixed + attended
        mlp_in = rms_norm(lanes[1] if len(lanes) == 2 else x) * scale
        up, down = rows["mlp_up_bank"][layer], rows["mlp_down_bank"][layer]
        self._observe("mlp_in", layer, mlp_in)
        if self.observer is not None:
            self.observer("mlp_hidden", layer, F.leaky_relu(F.linear(mlp_in, up), c.leaky_slope).square())
        written = self.mlp(mlp_in.flatten(0, 1), up, down, c.leaky_slope).view_as(x)
        written = rows["mlp_scale_LD"][layer] * written
        if len(lanes) == 1:
            return [x + attended + written if parallel else x + written]
        mixes = rows["lane_mix_P23"][layer - c.parallel_start_layer]
        return [m[0] * x + m[1] * attended + m[2] * written for m, x in zip(mixes, lanes, strict=True)]

    def _attention(self, layer: int, x_BTD: Tensor, context: Context) -> Tensor:
        c, total, (rows, rotary, documents) = self.config, self.config.num_layers, context
        self._observe("attn_in", layer, x_BTD)
        q = F.linear(x_BTD, rows["qo_bank"][layer]).unflatten(-1, (c.num_heads, -1))
        k = F.linear(x_BTD, rows["kv_bank"][layer]).unflatten(-1, (c.num_kv_heads, -1))
        v = F.linear(x_BTD, rows["kv_bank"][total + layer]).unflatten(-1, (c.num_kv_heads, -1))
        q = rotate(rms_norm(q), *rotary) * rows["qk_gain_LH"][layer][:, None]
        y = self.attend(q, rotate(rms_norm(k), *rotary), v, *documents)
        if layer >= total - c.xsa_last_n:  # XSA: drop what lies along the value at the own position (PR #287)
            y, own = y.unflatten(2, (c.num_kv_heads, -1)), F.normalize(v, dim=-1, eps=1e-12).unsqueeze(3)
            y = (y - (y * own).sum(-1, keepdim=True) * own).flatten(2, 3)
        if c.sparse_attn_gate_enabled:
            gate = F.linear(x_BTD[..., : c.gate_window], rows["attn_gate_LHW"][layer])
            y = y * torch.sigmoid(c.sparse_attn_gate_scale * gate)[..., None]
        self._observe("attn_out", layer, y.flatten(2))
        return F.linear(y.flatten(2), rows["qo_bank"][total + layer])

    def _observe(self, site: str, layer: int, x: Tensor) -> None:
        if self.observer is not None:
            self.observer(site, layer, x)


def find_documents(ids_BT: Tensor, starts: Tensor | None, attend: Any, doc_mask: bool) -> Documents:
    """Who sees whom, as `attend` reads it; a mask of None means whole rows."""
    if attend is attention_sdpa:
        document_BT = (ids_BT == BOS_ID).cumsum(1)
        return (document_BT[:, :, None] == document_BT[:, None]).tril() if doc_mask else None, None
    if not doc_mask:
        starts = torch.arange(0, ids_BT.numel() + 1, ids_BT.size(1), dtype=torch.int32, device=ids_BT.device)
    return None, starts_on_device(ids_BT) if starts is None else starts


def starts_on_device(ids_BT: Tensor) -> Tensor:
    """`Batch.cu_seqlens` of any ids. Waits for the device, which compiled code cannot."""
    starts = torch.from_numpy(document_starts(ids_BT.cpu().numpy())).to(ids_BT.device)
    torch._dynamo.mark_dynamic(starts, 0)  # or code is compiled anew for every length
    return starts


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, starts: None) -> Tensor:
    """torch's attention: q (B, T, H, E), k and v (B, T, K, E) to (B, T, H, E). On CPU nothing is faster."""
    if mask is not None and q.is_cuda:  # there the fast kernels that take a mask know no grouped heads
        k, v = (t.repeat_interleave(q.size(2) // k.size(2), 2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    given, causal = (None, True) if mask is None else (mask[:, None], False)
    return F.scaled_dot_product_attention(q, k, v, given, is_causal=causal, enable_gqa=True).transpose(1, 2)


def load_attention(name: str) -> Callable[..., Tensor]:
    """The kernel of this name. Packages and versions spell causal and grouped heads differently."""
    if name == "sdpa":
        return attention_sdpa
    module = importlib.import_module("flash_attn_interface" if name == "fa3" else "torch.nn.attention.varlen")
    kernel = getattr(module, "flash_attn_varlen_func" if name == "fa3" else "varlen_attn")
    spellings = {"causal": True, "is_causal": True, "window_size": (-1, 0), "enable_gqa": True}
    options = {key: spellings[key] for key in inspect.signature(kernel).parameters if key in spellings}

    def attention_varlen(q: Tensor, k: Tensor, v: Tensor, mask: None, starts: Tensor) -> Tensor:
        if not {"causal", "enable_gqa"} & options.keys():  # torch 2.10: equal numbers of heads only
            k, v = (t.repeat_interleave(q.size(2) // k.size(2), 2) for t in (k, v))
        flat, length = [t.flatten(0, 1) for t in (q, k, v)], q.size(1)
        y: Any = kernel(*flat, starts, starts, length, length, **options)
        return (y[0] if isinstance(y, tuple) else y).view_as(q)

    return attention_varlen


def choose_attention(config: Config, run: Run) -> Callable[..., Tensor]:
    """The first kernel within 3 % of float64, both passes, at the real shape, on all ranks; logged."""
    c, shape = config, (config.micro_batch_tokens // config.train_seq_len, config.train_seq_len)
    ids_BT = (torch.rand(shape, device=run.device) < 1 / 256).long() * BOS_ID
    sizes = [(*shape, heads, c.head_dim) for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
    qkv = [torch.randn(size, device=run.device, dtype=run.dtype) for size in sizes]

    def both_passes(attend: Callable[..., Tensor], rows: int, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t[:rows].to(dtype, copy=True).requires_grad_() for t in qkv]
        run_it = torch.compile(attend, fullgraph=True) if compiling(c, run.device) else attend
        y = run_it(*leaves, *find_documents(ids_BT[:rows], None, attend, c.doc_mask))
        return [t[:2].double() for t in (y, *torch.autograd.grad(y.square().sum(), leaves))]

    ladder, tried = ["fa3", *["varlen"] * c.doc_mask, "sdpa"], list[str]()
    asked = ladder if run.device.type == "cuda" else ladder[-1:]
    for name in asked if c.attention == "auto" else [c.attention]:
        try:
            attend, exact = load_attention(name), both_passes(attention_sdpa, 2, torch.float64)
            pairs = zip(both_passes(attend, shape[0], run.dtype), exact, strict=True)
            errors = [(found - true).abs().max() / true.abs().max() for found, true in pairs]
            error = torch.stack(errors).max().item()
            tried.append(f"{name} error:{error:.1e}")
        except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as failure:
            error = math.inf
            tried.append(f"{name} {type(failure).__name__}: {failure}".splitlines()[0])
        if all(error <= 0.03 for error in run.gather(error)):
            run.log(f"attention:{name} tried: {' | '.join(tried)}")
            return attend
    raise ConfigError(f"ATTENTION={c.attention} fails here ({' | '.join(tried)}); set it to auto")


# ============================================================================================================
# OPTIMIZER — Parallel Muon for the banks, AdamW for the rest; each parameter is in one group, checked.
# ============================================================================================================

POLAR_EXPRESS = (  # Amsel et al., arXiv 2505.16932
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
FIXED_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan et al., Muon


def orthogonalize(update_NRC: Tensor, steps: int, polar_express: bool) -> Tensor:
    """Near-orthogonal factor of each matrix (N, R, C): in bf16 on GPU, fp32 on CPU. Contiguous."""
    tall = update_NRC.size(1) > update_NRC.size(2)
    x = (update_NRC.mT if tall else update_NRC).to(torch.bfloat16 if update_NRC.is_cuda else torch.float32)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for step in range(steps):
        a, b, c = POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)] if polar_express else FIXED_QUINTIC
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def optimizer_groups(config: Config, names: Iterable[str]) -> dict[str, list[str]]:
    """Which optimizer owns which parameter: `muon`, or AdamW's `embed`, `head`, `scalar`; each one."""
    owner = dict.fromkeys(BANKS, "muon") | {"token_embedding_VD": "embed", "lm_head_VD": "head"}
    groups: dict[str, list[str]] = {"muon": [], "embed": [], "head": [], "scalar": []}
    for name in names:
        groups[owner.get(name, "scalar")].append(name)
    assert sorted(itertools.chain(*groups.values())) == sorted(parameter_shapes(config)), "an owner for each"
    return groups


class Optimizer:
    """One step over all parameters, which all ranks take together; the same on any number, to rounding."""

    def __init__(
        self, model: GPT, config: Config, rank: int, world_size: int, compiled: bool = False
    ) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self.orthogonalize = torch.compile(orthogonalize, dynamic=False) if compiled else orthogonalize
        groups = optimizer_groups(config, [name for name, _ in model.named_parameters()])
        owned = {group: [getattr(model, name) for name in names] for group, names in groups.items()}
        embed_lr = config.tied_embed_lr if config.tie_embeddings else config.embed_lr
        rates = (embed_lr, config.embed_wd), (config.head_lr, 0.0), (config.scalar_lr, config.adam_wd)
        rated = zip(("embed", "head", "scalar"), rates, strict=True)
        adam = [{"params": owned[group], "base_lr": lr, "weight_decay": decay}
                for group, (lr, decay) in rated if owned[group]]
        betas = config.beta1, config.beta2
        self.adam = torch.optim.AdamW(adam, betas=betas, eps=config.adam_eps, fused=True)
        self.small = [*owned["embed"], *owned["head"], *owned["scalar"]]
        self.banks = sorted(owned["muon"], key=Tensor.numel, reverse=True)
        self.momenta = [torch.zeros_like(self._slice(bank)) for bank in self.banks]

    def _slice(self, bank: Tensor) -> Tensor:
        """This rank's matrices of a bank, which zero matrices fill up so that all ranks hold equally many."""
        filled = F.pad(bank.detach(), (0, 0, 0, 0, 0, -len(bank) % self.world_size))
        return filled.chunk(self.world_size)[self.rank]

    @torch.no_grad()
    def step(self, scale: float, momentum: float) -> Tensor:
        """Update all from their gradients (this rank's means), which are used up, at `scale` times each LR.
        Returns the global gradient norm before clipping, on the device."""
        c, slices, small = self.config, *self._mean_gradients()
        squared = torch.stack([gradient.square().sum() for gradient in slices]).sum()
        if self.world_size > 1:
            dist.all_reduce(squared)
        norm = (squared + torch.stack([gradient.square().sum() for gradient in small]).sum()).sqrt()
        if c.grad_clip_norm:
            torch._foreach_mul_([*slices, *small], (c.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0))
        for group in self.adam.param_groups:
            group["lr"] = scale * group["base_lr"]
        self.adam.step()
        pairs, lr = zip(slices, self.momenta, strict=True), scale * c.matrix_lr
        updates = [self._gather(self._muon_update(*pair, momentum)) for pair in pairs]
        for bank, update in zip(self.banks, updates, strict=True):  # sent while later ones were made
            factor = max(1.0, bank.size(1) / bank.size(2)) ** 0.5
            bank.mul_(1.0 - lr * c.muon_wd).add_(update()[: len(bank)], alpha=-lr * factor)
        for parameter in (*self.banks, *self.small):
            parameter.grad = None
        return norm

    def _mean_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Means over ranks: this rank's slice of each bank, all on the way at once; small ones whole."""
        small, size = [parameter.grad for parameter in self.small], self.world_size
        if size == 1:
            return [bank.grad for bank in self.banks], small
        slices = [torch.empty_like(buffer) for buffer in self.momenta]
        whole = [F.pad(bank.grad, (0, 0, 0, 0, 0, -len(bank) % size)) for bank in self.banks]
        work = [dist.reduce_scatter_tensor(*pair, async_op=True) for pair in zip(slices, whole, strict=True)]
        flat = nn.utils.parameters_to_vector(small)
        for handle in [*work, dist.all_reduce(flat, async_op=True)]:
            handle.wait()
        torch._foreach_div_([*slices, flat], size)
        nn.utils.vector_to_parameters(flat, small)
        return slices, small

    def _muon_update(self, gradient: Tensor, buffer: Tensor, momentum: float) -> Tensor:
        """Nesterov momentum, row normalisation (MuonEq-R), orthogonalisation."""
        update = gradient.add_(buffer.mul_(momentum).add_(gradient), alpha=momentum)
        if self.config.muon_row_normalize:
            update /= update.norm(dim=-1, keepdim=True).clamp(min=1e-7)
        return self.orthogonalize(update, self.config.muon_backend_steps, self.config.muon_polar_express)

    def _gather(self, mine: Tensor) -> Callable[[], Tensor]:
        """Send this rank's slice of a bank to all; what is returned waits for the whole bank (PR #399)."""
        if self.world_size == 1:
            return lambda: mine
        whole = mine.new_empty(len(mine) * self.world_size, *mine.shape[1:])
        handle = dist.all_gather_into_tensor(whole, mine, async_op=True)
        return lambda: (handle.wait(), whole)[1]

    def state(self) -> dict[str, Any]:
        """A copy of the whole state, the same whatever the world size; all ranks call it together."""
        pairs = zip(self.banks, self.momenta, strict=True)
        momenta = [self._gather(buffer)()[: len(bank)] for bank, buffer in pairs]
        return copy.deepcopy({"momenta": momenta, "adam": self.adam.state_dict()})

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned, on any world size."""
        torch._foreach_copy_(self.momenta, [self._slice(whole) for whole in state["momenta"]])
        self.adam.load_state_dict(state["adam"])


class WeightAverage:
    """Exponential moving average of all weights in fp32 (PR #287); EMA_DECAY=0 makes it the last weights."""

    def __init__(self, model: GPT, decay: float) -> None:
        self.live = [parameter.detach() for parameter in model.parameters()]
        self.average = [parameter.clone() for parameter in self.live] if decay else self.live
        self.update = functools.partial(torch._foreach_lerp_, self.average, self.live, 1.0 - decay)
        self.reset = functools.partial(torch._foreach_copy_, self.average, self.live)  # start again
        self.apply = functools.partial(torch._foreach_copy_, self.live, self.average)  # to the model


# ============================================================================================================
# SCHEDULE — pure functions of progress (0 at the first step, 1 at the last), so all machines see one curve.
# ============================================================================================================


def learning_rate_scale(progress: float, step: int, c: Config) -> float:
    """Factor on every learning rate: 1, then linear to MIN_LR over the warm-down (PR #1493).

    WARMDOWN_ITERS becomes a share of the run by the mean progress of a step so far (upstream baseline).
    """
    share = c.warmdown_iters * progress / max(step, 1) if c.warmdown_iters else c.warmdown_frac
    return max(c.min_lr, min(1.0, (1.0 - progress) / share)) if share else 1.0


def muon_momentum(progress: float, step: int, c: Config) -> float:
    """Momentum of Muon: linear from its first to its final value, in steps if given so, else in progress."""
    steps, share = c.muon_momentum_warmup_steps, c.muon_momentum_warmup_frac
    rise = min(1.0, step / steps) if steps else min(1.0, progress / share) if share else 1.0
    return c.muon_momentum_warmup_start + rise * (c.muon_momentum - c.muon_momentum_warmup_start)


def loop_is_on(progress: float, c: Config) -> bool:
    """Whether the looped layers run their extra passes (PR #1493: from 35 % of the run)."""
    return c.num_loops > 0 and progress >= c.enable_looping_at


def run_progress(elapsed_seconds: float, step: int, reserve_seconds: float, c: Config) -> float:
    """Share of the run that is over: of the steps, or of the clock less the reserve if that is more."""
    limit = c.max_wallclock_seconds - reserve_seconds
    return max(step / c.iterations, elapsed_seconds / max(limit, 1e-9) if c.max_wallclock_seconds else 0.0)


# ============================================================================================================
# EVALUATION — every target is scored once, in order, before anything learns from it; a ledger enforces it.
# ============================================================================================================

HEAD_ROWS = 4096  # scored positions that pass the output head at once
Progress = Callable[["Ledger", int], None] | None  # is given the ledger and how many targets are scored


class Ledger:
    """Nats of every target of a token stream (target i is token i + 1), each written once, in float64."""

    def __init__(self, tokens: np.ndarray | Tensor) -> None:
        self._tokens, self._nats = np.array(tokens), np.full(len(tokens) - 1, np.nan)
        self.nats = self._nats.view()
        self.nats.flags.writeable = False

    def __len__(self) -> int:
        return len(self.nats)

    def record(self, start: int, nats: np.ndarray) -> None:
        """Write the targets from `start` on. ScoringError for a second score or one that is not finite."""
        free = np.isnan(self._nats[start : start + len(nats)])
        good = np.isfinite(nats) & np.pad(free, (0, len(nats) - len(free)))
        if not good.all():
            raise ScoringError(f"target {start + int(good.argmin())} is scored, or absent, or not finite")
        self._nats[start : start + len(nats)] = nats

    def scored_tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop: all that an update may learn from. ScoringError if one is not scored yet."""
        if stop > len(self._tokens) or np.isnan(self.nats[max(start - 1, 0) : max(stop - 1, 0)]).any():
            raise ScoringError(f"tokens {start}..{stop} are not all scored: nothing may learn from them yet")
        return self._tokens[start:stop].copy()

    def total_nats(self) -> float:
        """Sum over all targets. ScoringError when one was never scored."""
        gaps = np.flatnonzero(np.isnan(self.nats))
        if len(gaps):
            raise ScoringError(f"{len(gaps)} targets were never scored, the first is {gaps[0]}")
        return float(self.nats.sum())


def window_rows(
    targets: int, context: int, stride: int, document_begin: np.ndarray, chunk_tokens: int
) -> Iterator[tuple[int, int, int]]:
    """Rows of sliding windows: first token, first target to score, one after its last; all inside a chunk.

    Window 0 scores all its targets, others their last `stride`. The last window that holds the document of
    the first unscored target stands for those between: attention stays in documents, they agree to rounding.
    `document_begin` is that of each target's input (zeros: a row per window); only the past decides the rows.
    """
    stop = 0
    while stop < targets:
        start, chunk_end = stop, min((stop // chunk_tokens + 1) * chunk_tokens, targets)
        own, last = (max(0, (target - context) // stride + 1) for target in (start, chunk_end - 1))
        window = max(own, min(int(document_begin[start]) // stride, last))
        stop = min(window * stride + context, targets)
        yield window * stride, start, stop


def token_bytes(tokens: np.ndarray, config: Config) -> np.ndarray:
    """Bytes of text that each target stands for: from the byte sidecar of the shards, else from the pieces.

    A leading space counts one byte, but none after a control, unknown or unused id, where decoding drops it.
    Raises DataError for a foreign tokenizer, or one without a lone space, which over-counts (issue #897).
    """
    import sentencepiece

    sidecar = str(find_path(config.data_path) / "fineweb_val_bytes_*.bin")
    if glob.glob(sidecar):
        counts = np.concatenate([read_tokens(shard) for shard in open_shards(sidecar)])[1 : len(tokens)]
        if len(counts) < len(tokens) - 1:
            raise DataError(f"{sidecar}: {len(counts)} counts for {len(tokens) - 1} targets; export it again")
        return counts.astype(np.int64)
    path = find_path(config.tokenizer_path)
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise DataError(f"TOKENIZER_PATH={path}: no SentencePiece model ({error}); see data/") from error
    size, spaces = pieces.vocab_size(), int(pieces.piece_to_id("▁") != pieces.unk_id())
    if size != config.vocab_size or not spaces:
        raise DataError(f"TOKENIZER_PATH={path}: {size} pieces, {spaces} of them a lone space; "
                        f"expected VOCAB_SIZE={config.vocab_size} with one lone space")
    kinds = (pieces.is_control, pieces.is_unknown, pieces.is_unused)
    silent = np.array([any(is_kind(i) for is_kind in kinds) for i in range(size)])
    texts = ["" if silent[i] else "?" if pieces.is_byte(i) else pieces.id_to_piece(i) for i in range(size)]
    leads = np.array([text.startswith("▁") for text in texts])
    lengths = np.array([len(text.removeprefix("▁").encode()) for text in texts])
    return lengths[tokens[1:]] + (leads[tokens[1:]] & ~silent[tokens[:-1]])


@dataclass(frozen=True)
class Score:
    """Mean nats per token and bits per byte, and what they were taken over."""

    nats: float
    bits_per_byte: float
    scored_tokens: int
    bytes: int


@dataclass(frozen=True)
class Validation:
    """The validation stream and the bytes of text its targets stand for; `limited`: not all of it."""

    tokens: np.ndarray
    bytes_total: int
    limited: bool

    @property
    def mark(self) -> str:
        """What every line says about a result that must not be compared with others."""
        return " comparable:0" if self.limited else ""

    def score(self, ledger: Ledger) -> Score:
        """The result of a complete ledger, from the ledger and nothing else."""
        nats = ledger.total_nats()
        return Score(nats / len(ledger), nats / math.log(2) / self.bytes_total, len(ledger), self.bytes_total)


def score_roundtrip(model: GPT, tokens: Any, config: Config, progress: Progress = None) -> Ledger:
    """Score non-overlapping windows of EVAL_SEQ_LEN: the cheapest score, with the least context."""
    return _score(model, tokens, config, config.eval_length, None, progress)


def score_sliding(model: GPT, tokens: Any, config: Config, progress: Progress = None) -> Ledger:
    """Score windows that advance by EVAL_STRIDE, each target with nearly EVAL_SEQ_LEN tokens of context."""
    return _score(model, tokens, config, config.eval_stride, None, progress)


def score_ttt(model: GPT, tokens: Any, config: Config, progress: Progress = None) -> Ledger:
    """Sliding window; SGD on each chunk but the last, once scored (PRs #549, #1493), undone at the end."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    sgd = torch.optim.SGD(model.parameters(), momentum=config.ttt_momentum)
    try:
        return _score(model, tokens, config, config.eval_stride, sgd, progress)
    finally:
        model.load_state_dict(found)
        sgd.zero_grad()


@torch.no_grad()
def _score(
    model: GPT, tokens: Any, config: Config, stride: int, sgd: torch.optim.SGD | None, progress: Progress
) -> Ledger:
    """Score chunk after chunk. Ranks share its batches, which are the same for any number of ranks."""
    ledger, tokens, context = Ledger(tokens), np.asarray(tokens).astype(np.int32), config.eval_length
    begins = np.where(config.doc_mask & (tokens[:-1] == BOS_ID), np.arange(len(ledger)), 0)
    chunk_tokens = config.ttt_chunk_tokens if sgd else 32 * config.val_batch_size
    rows = np.array([*window_rows(len(ledger), context, stride, np.maximum.accumulate(begins), chunk_tokens)])
    chunks = np.split(rows, np.flatnonzero(np.diff(rows[:, 1] // chunk_tokens)) + 1)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device, batch_rows = next(model.parameters()).device, max(1, config.val_batch_size // context)
    stream = torch.from_numpy(np.pad(tokens, (0, context))).to(device if config.val_prefetch else "cpu")
    windows, fixed_shapes = stream.unfold(0, context + 1, 1), compiling(config, device)
    forward: Any = torch.compile(GPT.forward, dynamic=False, fullgraph=True) if fixed_shapes else GPT.forward
    for index, chunk in enumerate(chunks):
        begin, end = int(chunk[0, 1]), int(chunk[-1, 2])
        nats = torch.zeros(end - begin, dtype=torch.float64, device=device)
        for at in range(rank * batch_rows, len(chunk), world_size * batch_rows):
            first, start, stop = chunk[at : at + batch_rows].T
            if fixed_shapes:  # the same rows again, until the batch is full
                first = np.resize(first, batch_rows)
            ids_BT = windows[torch.from_numpy(first)].to(device).long()
            inputs_BT, targets_N = ids_BT[:, :-1], ids_BT[:, 1:].flatten()
            hidden_ND = forward(model, inputs_BT, model.cu_seqlens(inputs_BT)).flatten(0, 1)
            offset = np.repeat(np.arange(len(start)) * context - first[: len(start)], stop - start)
            parts = torch.from_numpy(np.arange(start[0], stop[-1]) + offset).to(device).split(HEAD_ROWS)
            found = torch.cat([model.loss_per_token(hidden_ND[part], targets_N[part]) for part in parts])
            nats[start[0] - begin : stop[-1] - begin] = found
        if world_size > 1:
            dist.all_reduce(nats)
        ledger.record(begin, nats.cpu().numpy())
        if progress and index % (config.val_progress_log_every or -(-len(chunks) // 20)) == 0:
            progress(ledger, end)
        if sgd is not None and end < len(ledger):
            share = 0.5 + 0.5 * math.cos(math.pi * index / (len(chunks) - 1))
            sgd.param_groups[0]["lr"] = config.ttt_lr * share
            learn(model, sgd, ledger.scored_tokens(begin, end + 1), config)
    return ledger


@torch.enable_grad()
def learn(model: GPT, sgd: torch.optim.SGD, tokens: np.ndarray, config: Config) -> None:
    """TTT_EPOCHS passes over the whole sequences of scored tokens. All ranks call it together."""
    weights, device = dict(model.named_parameters()), next(model.parameters()).device
    loss_of = torch.compile(GPT.loss, dynamic=False) if compiling(config, device) else GPT.loss
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    length, stream = config.eval_length, torch.from_numpy(tokens.astype(np.int64))
    for batch_NT in stream.unfold(0, length + 1, length).split(config.ttt_batch_seqs) * config.ttt_epochs:
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight)
        mine_NT = batch_NT[rank::world_size].to(device)
        if len(mine_NT):  # a rank without a share takes part below, with zeros
            inputs_NT, targets_NT = mine_NT[:, :-1], mine_NT[:, 1:]
            loss = loss_of(model, inputs_NT, targets_NT, model.cu_seqlens(inputs_NT))
            (loss * (len(mine_NT) / len(batch_NT))).backward()
        for name, gradient in ((name, weight.grad) for name, weight in weights.items()):
            assert gradient is not None
            if world_size > 1:
                dist.all_reduce(gradient)
            if name in BANKS or "_L" in name:
                gradient.unflatten(0, (-1, config.num_layers))[:, : config.ttt_freeze_blocks] = 0.0
            elif "_P" in name:  # lanes start at PARALLEL_START_LAYER
                gradient[: max(0, config.ttt_freeze_blocks - config.parallel_start_layer)] = 0.0
        nn.utils.clip_grad_norm_(weights.values(), config.ttt_grad_clip or math.inf)
        sgd.step()


def compiling(config: Config, device: torch.device) -> bool:
    """Whether torch.compile is wanted here."""
    return config.compile == "1" or (config.compile == "auto" and device.type == "cuda")


@torch.no_grad()
def generate_text(model: GPT, config: Config, prompt: str) -> str:
    """The prompt and GENERATE_TOKENS more tokens, sampled with temperature and top-k from SEED."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(find_path(config.tokenizer_path)))
    source, device = torch.Generator().manual_seed(config.seed), next(model.parameters()).device
    ids = [BOS_ID, *pieces.encode(prompt)]
    for _ in range(config.generate_tokens):
        hidden_BTD = model(torch.tensor([ids[-config.eval_length :]], device=device))
        logits = model.logits(hidden_BTD[0, -1]).float().cpu()
        if config.logit_softcap:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        top = logits.topk(min(config.generate_top_k or len(logits), len(logits)))
        odds = (top.values / max(config.generate_temperature, 1e-6)).softmax(-1)
        ids.append(int(top.indices[torch.multinomial(odds, 1, generator=source)]))
    return pieces.decode(ids)


def evaluate(model: GPT, config: Config, run: Run, validation: Validation, weights: str) -> dict[str, Score]:
    """All scores of reloaded weights, each with its final line. `weights`: their stored form, like int6."""
    modes: dict[str, Callable[..., Ledger]] = {f"final_{weights}_roundtrip": score_roundtrip}
    if config.eval_stride:
        modes[f"final_{weights}_sliding_window"] = score_sliding
    if config.ttt_enabled:
        modes["legal_ttt"] = score_ttt
    noise = np.random.default_rng(config.seed).integers(config.vocab_size, size=config.ttt_chunk_tokens + 2)
    scores = {}
    for label, scorer in modes.items():
        name = label.removeprefix(f"final_{weights}_")
        if compiling(config, run.device):
            with run.phase("eval_warmup"):  # on random tokens, over a chunk of them: an update is compiled
                scorer(model, noise, config)
        progress = functools.partial(log_progress, run, label, config, time.perf_counter())
        with run.phase(f"eval_{name}"):
            ledger = scorer(model, validation.tokens, config, progress)
        score, seconds = validation.score(ledger), run.phases[f"eval_{name}"]
        run.log(f"{label} val_loss:{score.nats:.4f} val_bpb:{score.bits_per_byte:.4f} "
                f"eval_time:{1e3 * seconds:.0f}ms{validation.mark}")
        run.log(f"{label}_exact val_loss:{score.nats:.8f} val_bpb:{score.bits_per_byte:.8f} "
                f"scored_tokens:{score.scored_tokens} val_bytes:{score.bytes}{validation.mark}")
        run.event("final", name=f"{label}_exact", val_loss=score.nats, val_bpb=score.bits_per_byte,
                  scored_tokens=score.scored_tokens, val_bytes=score.bytes, eval_seconds=seconds)
        scores[name] = score
    return scores


def log_progress(run: Run, label: str, config: Config, start: float, ledger: Ledger, scored: int) -> None:
    """Print how far a scorer is and what all of evaluation is projected to take."""
    run.alive()
    seconds = time.perf_counter() - start
    left = seconds * (len(ledger) / scored - 1)
    total = sum(v for name, v in run.phases.items() if name.startswith("eval_")) + seconds + left
    over = f" warning: above MAX_EVAL_SECONDS: {total:.0f}s" if 0 < config.max_eval_seconds < total else ""
    run.log(f"val_progress:{label} {scored / len(ledger):.0%} partial_mean_loss:"
            f"{ledger.nats[:scored].mean():.4f} tokens_seen:{scored} eta:{left:.0f}s{over}")

# ============================================================================================================
# ARTIFACT — code and file together fill ARTIFACT_BYTES_MAX; what is scored is what the file gives back.
# ============================================================================================================

HESSIAN_SITES = {  # what the matrices of a bank multiply; two sites: one run of layers for each
    "qo_bank": ["attn_in", "attn_out"], "kv_bank": ["attn_in", "attn_in"], "mlp_up_bank": ["mlp_in"],
    "mlp_down_bank": ["mlp_hidden"], "token_embedding_VD": ["head_in"], "lm_head_VD": ["head_in"],
}  # fmt: skip
Hessians = Mapping[tuple[str, int], Tensor]  # (site, layer) -> (C, C) fp32
Bank = tuple[Tensor, Tensor, Tensor, Tensor]  # weights NRC, spreads NR, order NC, factor NCC


@torch.no_grad()
def collect_hessians(model: GPT, batches: Iterable[Batch], world_size: int) -> dict[tuple[str, int], Tensor]:
    """Sums of x xᵀ over the tokens of training `batches`, each visit of a looped layer; all ranks call it."""
    sums: dict[tuple[str, int], Tensor] = {}

    def observe(site: str, layer: int, x: Tensor) -> None:
        x_NC = x.reshape(-1, x.size(-1)).float()
        sums[site, layer] = sums.get((site, layer), 0.0) + x_NC.T @ x_NC

    model.observer = observe
    for batch in batches:
        model(batch.inputs_BT, batch.cu_seqlens)
    model.observer = None
    for total in sums.values() if world_size > 1 else ():
        dist.all_reduce(total)
    return sums


def prepare_bank(name: str, parameter: Tensor, hessians: Hessians, config: Config) -> Bank:
    """What GPTQ needs of a parameter: weights, zero in unused columns; deviations of rows, maxima if it is no
    matrix; columns by descending diagonal of H; the upper Cholesky factor of H⁻¹ in that order. H is the
    identity, which rounds to nearest, where nobody observed the inputs."""
    weights_NRC = parameter.detach().view((1, 1, *parameter.shape)[-3:])
    spreads_NR = weights_NRC.std(dim=2) if name in MATRIX_ROLES else weights_NRC.abs().amax(dim=2)
    looked_up = name == "token_embedding_VD" and not config.tie_embeddings
    sites = ["none"] if looked_up else HESSIAN_SITES.get(name, ["none"])
    keys = [(site, layer) for site in sites for layer in range(len(weights_NRC) // len(sites))]
    identity_CC = torch.eye(weights_NRC.size(2), device=weights_NRC.device)
    h_NCC = torch.stack([hessians.get(key, identity_CC) for key in keys]).double()
    if not (weights_NRC.isfinite().all() and h_NCC.isfinite().all()):
        raise ArtifactError(f"{name} or its inputs are not finite: nothing written; resume from a checkpoint")
    diagonal_NC = h_NCC.diagonal(dim1=1, dim2=2)
    ridge_N11 = max(config.gptq_damping, 1e-6) * diagonal_NC.mean(dim=1)[:, None, None].clamp(min=1e-30)
    order_NC = diagonal_NC.argsort(dim=1, descending=True, stable=True)
    h_NCC = h_NCC.take_along_dim(order_NC[:, :, None], 1).take_along_dim(order_NC[:, None], 2)
    lower_NCC = torch.linalg.cholesky(h_NCC + ridge_N11 * identity_CC)
    upper_NCC = torch.linalg.cholesky(torch.cholesky_inverse(lower_NCC), upper=True).float()
    return weights_NRC.masked_fill((diagonal_NC == 0)[:, None], 0.0), spreads_NR, order_NC, upper_NCC


def gptq(bank: Bank, step: float, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (R, N * C) within ±levels, and exponents (R, N), in eighths of an octave, of the fp16 scales next
    to step * spread; int8 both. Columns go in order, those to come make up for what one loses in rounding;
    blocks of 128 only batch the work. (Frantar et al., arXiv 2210.17323; PR #1394)"""
    weights_NRC, spreads_NR, order_NC, upper_NCC = bank
    exponents_NR = (8 * (step * spreads_NR).clamp(min=1e-9).log2()).round().clamp(-127, 127).to(torch.int8)
    scales_NR = torch.exp2(exponents_NR / 8).half().float()
    work_NRC = weights_NRC.take_along_dim(order_NC[:, None], 2)
    for left in range(0, work_NRC.size(2), 128):
        right, errors = min(left + 128, work_NRC.size(2)), []
        for c in range(left, right):
            codes_NR = (work_NRC[:, :, c] / scales_NR).round().clamp(-levels, levels)
            errors.append((work_NRC[:, :, c] - codes_NR * scales_NR) / upper_NCC[:, c, c, None])
            work_NRC[:, :, c:right] -= errors[-1][:, :, None] * upper_NCC[:, None, c, c:right]
            work_NRC[:, :, c] = codes_NR
        work_NRC[:, :, right:] -= torch.stack(errors, dim=2) @ upper_NCC[:, left:right, right:]
    codes_NRC = work_NRC.take_along_dim(order_NC.argsort(dim=1)[:, None], 2).to(torch.int8)
    return codes_NRC.transpose(0, 1).flatten(1).cpu().numpy(), exponents_NR.T.cpu().numpy()


# The coder: rANS over arrays (rows, columns) of integers, row by row. A row's frequencies come from the rows
# before it, in one table per class of column (by its mean |code| so far): no table is stored, none can be
# forged, and columns of different spread do not share one. Integers, and float operations that IEEE 754
# rounds exactly, give the same bytes on every machine. (Duda, arXiv 1311.2540)
SLOTS = 1 << 15  # of a table; lane states have 17 to 32 bits, and move in words of 16
CLASS_EDGES = np.array([(4 + quarter) << octave for octave in range(12) for quarter in range(4)])  # 256ths


def code_rows(array: np.ndarray, peak: int, lanes: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Parts of an array of symbols (integers + peak), to be read or written before the next; where the tables
    of their columns begin; frequencies and first slots of all symbols, table after table."""
    means = np.append(2.0, CLASS_EDGES * 1.1)[:, None] / 256
    bell = 1.0 / (1.0 + np.arange(-peak, peak + 1) ** 2 / (6.0 * means * means + 1.5))
    counts, size = np.floor(64.0 * bell * bell * bell * bell).astype(np.int64), 2 * peak + 1
    sums_256ths, renewal = np.full(array.shape[1], 2 * 256 * peak // 6), 0
    for row, symbols in enumerate(array):
        if row >= renewal:
            renewal = row + 1 + row // 16
            frequencies = 1 + counts * (SLOTS - size) // counts.sum(1, keepdims=True)
            frequencies[range(len(counts)), counts.argmax(1)] += SLOTS - frequencies.sum(1)
            frequencies = frequencies.ravel()
            starts = frequencies.cumsum() - frequencies
        tables = size * np.searchsorted(CLASS_EDGES, sums_256ths // (2 + row), side="right")
        for left in range(0, len(symbols), lanes):
            yield symbols[left : left + lanes], tables[left : left + lanes], frequencies, starts
        counts += np.bincount(tables + symbols, minlength=counts.size).reshape(counts.shape)
        sums_256ths += np.abs(symbols - peak) << 8


def first_states(symbols: int) -> np.ndarray:
    """States of rANS lanes that run side by side: more are faster, and each costs four bytes."""
    return np.full(min(16 + symbols // 16_384, 1024), 1 << 16, np.int64)


def encode(arrays: list[np.ndarray]) -> bytes:
    """Bytes of integer arrays (rows, columns) with values in [-127, 127]."""
    states = first_states(sum(array.size for array in arrays))
    peaks = bytes(int(np.abs(array).max(initial=0)) for array in arrays)
    parts, words = [], []
    for array, peak in zip(arrays, peaks, strict=True):
        array = array.astype(np.int64) + peak
        for symbols, tables, frequencies, starts in code_rows(array, peak, len(states)):
            chosen = tables + symbols
            parts.append((frequencies[chosen].astype(np.uint16), (starts[chosen] % SLOTS).astype(np.uint16)))
    for frequencies, starts in reversed(parts):
        state = states[: len(starts)]
        full = state >> 17 >= frequencies
        words.append(state[full].astype("<u2").tobytes())
        quotients, rests = np.divmod(np.where(full, state >> 16, state), frequencies)
        state[:] = quotients * SLOTS + rests + starts
    return b"".join([peaks, states.astype("<u4").tobytes(), *reversed(words)])


def decode(data: bytes, shapes: list[tuple[int, int]]) -> list[np.ndarray]:
    """Inverse of `encode`. ValueError where the data end early, late, or in the wrong state."""
    final, arrays, used = first_states(sum(map(math.prod, shapes))), [], 0
    states = np.frombuffer(data, "<u4", len(final), len(shapes)).astype(np.int64)
    words = np.frombuffer(data[len(shapes) + 4 * len(states) :], "<u2").astype(np.int64)
    for shape, peak in zip(shapes, data, strict=False):
        array = np.empty(shape, np.int64)
        for symbols, tables, frequencies, starts in code_rows(array, peak, len(states)):
            state = states[: len(symbols)]
            slots = starts[tables] + state % SLOTS
            chosen = starts.searchsorted(slots, side="right") - 1
            symbols[:] = chosen - tables
            state[:] = frequencies[chosen] * (state // SLOTS) + slots - starts[chosen]
            low = np.flatnonzero(state < 1 << 16)
            state[low] = (state[low] << 16) + words[used : used + len(low)]
            used += len(low)
        arrays.append((array - peak).astype(np.int8))
    if used != len(words) or (states != final).any():
        raise ValueError("the words do not end where the arrays end")
    return arrays


MULTIPLIERS = [2 ** (n / 2048) for n in range(-7 * 2048, 12 * 2048)]  # of configured steps, to all limits
TOO_LARGE = ("code and artifact are {} bytes above ARTIFACT_BYTES_MAX at the coarsest step of "
             "RATE_CONTROL={:d}: lower VOCAB_SIZE, MODEL_DIM, MLP_MULT or NUM_LAYERS, or raise the limit")


def step_of(name: str, config: Config, multiplier: float) -> tuple[float, int]:
    """Step of a bank's codes in spreads of a row, and the largest code, which reaches the configured clip.
    The configured step is multiplied, from that of 8 bits up to 2.0. What is no matrix has 8 bits always."""
    role = MATRIX_ROLES.get(name)
    if not role:
        return 1 / 120, 127
    clip = getattr(config, f"{role}_clip_sigmas")
    bits = config.embed_bits if role == "embed" else config.matrix_bits
    configured = clip / (2 ** (bits - 1) - 1)
    step = min(max(multiplier * configured, clip / 127), max(configured, 2.0))
    return step, round(clip / step)


def expected_bytes(config: Config, multiplier: float) -> float:
    """Bytes of the file, about: a thousand, and ½·log2(1 + 2πe/step²) bits per weight, as if Gaussian."""
    total = 1000.0
    for name, shape in parameter_shapes(config).items():
        step, _ = step_of(name, config, multiplier)
        total += math.prod(shape) * math.log2(1 + 2 * math.pi * math.e / step**2) / 16
    return total


def estimate_artifact_bytes(config: Config, code_bytes: int = 0) -> tuple[int, int]:
    """Fewest and most bytes of such a model, about; ArtifactError if even the fewest are too many."""
    most, fewest = (round(expected_bytes(config, MULTIPLIERS[end])) for end in (0, -1))
    excess = fewest + code_bytes - config.artifact_bytes_max
    if excess > 0:
        raise ArtifactError(TOO_LARGE.format(excess, True))
    return fewest, most


def fill_budget(
    banks: Mapping[str, Bank], config: Config, budget: int, assemble: Callable[[list[np.ndarray]], bytes]
) -> tuple[bytes, str]:
    """The file that ends at most 0.05 % of ARTIFACT_BYTES_MAX under its budget, and how it came about.

    Three passes, more only while none fits. Each corrects the expectation, and aims beyond the budget on the
    side not seen yet. Then rows of the finer pass replace the coarser's: to GPTQ rows are independent.
    """
    multipliers = MULTIPLIERS if config.rate_control else [1.0]
    enough = budget - 5e-4 * config.artifact_bytes_max
    fits, over, best = list[np.ndarray](), list[np.ndarray](), b""
    share, part, aim, ratio = 0.0, 0.5, (budget + enough) / 2, 1.0
    for passes in itertools.count(1):
        index = bisect.bisect_left(multipliers[:-1], -aim / ratio, key=lambda m: -expected_bytes(config, m))
        m = multipliers[index]
        arrays = [array for name, bank in banks.items() for array in gptq(bank, *step_of(name, config, m))]
        data = assemble(arrays)
        ratio = len(data) / expected_bytes(config, m)
        if len(data) > budget and m == multipliers[-1]:
            raise ArtifactError(TOO_LARGE.format(len(data) - budget, config.rate_control))
        fits, over, best = (arrays, over, data) if len(data) <= budget else (fits, arrays, best)
        if len(best) > enough or (fits and (over or passes > 2 or not index)):
            break
        aim = budget * (1 + (0.01 if fits else -0.01) * passes)
    while over and len(best) <= enough and part > 1e-6:
        cuts = [round((share + part) * len(rows)) for rows in fits]
        data = assemble([np.concatenate([f[:n], c[n:]]) for f, c, n in zip(over, fits, cuts, strict=True)])
        share, best, part = (share + part, data, part / 2) if len(data) <= budget else (share, best, part / 2)
    note = " unused: 8 bits cannot fill it" if m < 1 / 127 and len(best) <= enough else ""
    return best, f"step_multiplier:{m:.4f} passes:{passes}{note}"


MAGIC, HEAD = b"\x89PGA\r\n\0\1", struct.Struct("<8s3I")  # with version; size of config, both CRC-32


def write_artifact(
    model: nn.Module, config: Config, hessians: Hessians, path: Path, code_bytes: int, tokenizer_sha256: str,
    log: Callable[[str], None],
) -> None:  # fmt: skip
    """Quantize, code and write `model` so that code and file fill ARTIFACT_BYTES_MAX, with RATE_CONTROL=0 as
    bits and clips are given; rank 0 alone calls it. ArtifactError, and no file, when it does not fit."""
    banks = {name: prepare_bank(name, p, hessians, config) for name, p in model.named_parameters()}
    budget = config.artifact_bytes_max - code_bytes

    def assemble(arrays: list[np.ndarray]) -> bytes:
        peaks = {name: int(abs(codes).max()) for name, codes in zip(banks, arrays[::2], strict=True)}
        bits = {name: peak.bit_length() + 1 for name, peak in peaks.items() if name in MATRIX_ROLES}
        header = {"config": config.model_env(), "tokenizer_sha256": tokenizer_sha256, "bits": bits}
        about, weights = zlib.compress(json.dumps(header).encode(), 9), encode(arrays)
        return HEAD.pack(MAGIC, len(about), zlib.crc32(about), zlib.crc32(weights)) + about + weights

    data, how = fill_budget(banks, config, budget, assemble)
    write_atomically(path, data)
    log(f"artifact_bytes:{len(data)} budget_bytes:{budget} bits:{describe_artifact(path)['bits']} {how}")


def describe_artifact(path: Path) -> dict[str, Any]:
    """What a file says of itself, checksums verified: config (the model's settings), tokenizer_sha256, bits
    of each bank, label (int6: the widest block matrices), bytes. ArtifactError names section and reason."""
    section = "head"
    try:
        with open(path, "rb") as file:
            data = file.read(1 << 30)
        magic, size, *checksums = HEAD.unpack_from(data)
        if magic != MAGIC:
            raise ValueError("not an artifact, or of another version; expected the model.bin of a run")
        parts = {"config": data[HEAD.size : HEAD.size + size], "weights": data[HEAD.size + size :]}
        for section, checksum in zip(parts, checksums, strict=True):
            if zlib.crc32(parts[section]) != checksum:
                raise ValueError("truncated or damaged; copy the file again")
        section = "config"
        header = json.loads(zlib.decompressobj().decompress(parts["config"], 1 << 16))
        if set(header["config"]) != set(Config().model_env()) or "tokenizer_sha256" not in header:
            raise ValueError("fields are missing or unknown")
        header["label"] = f"int{max(header['bits'][name] for name in BANKS)}"
    except Exception as error:  # whatever the bytes are
        raise ArtifactError(f"{path}: section {section}: {error}") from error
    sizes = {name: len(part) for name, part in parts.items()}
    return {**header, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "sections": sizes}


def load_artifact(path: Path) -> tuple[GPT, Config]:
    """Model on the CPU and config of a file; nothing is executed, memory stays in proportion to the file.
    ArtifactError, and nothing else, whatever the bytes."""
    about, section, tensors = describe_artifact(path), "config", {}
    try:
        batch = dict.fromkeys(("TRAIN_BATCH_TOKENS", "MICRO_BATCH_TOKENS"), about["config"]["TRAIN_SEQ_LEN"])
        config = Config.from_env({**about["config"], **batch, "EVAL_STRIDE": "0", "TTT_ENABLED": "0"})
        shapes = parameter_shapes(config)
        entries = sum(map(math.prod, shapes.values())) + config.train_seq_len * config.head_dim
        if entries > min(1 << 28, 1024 * about["bytes"]):
            raise ValueError(f"{entries} weights and angles are more than such a file can hold")
        section, banks = "weights", [(1, 1, *shape)[-3:] for shape in shapes.values()]
        coded = path.read_bytes()[-about["sections"]["weights"] :]
        arrays = decode(coded, [shape for n, r, c in banks for shape in ((r, n * c), (r, n))])
        for name, (n, r, c), codes, exponents in zip(shapes, banks, arrays[::2], arrays[1::2], strict=True):
            scales_RN1 = torch.exp2(torch.from_numpy(exponents)[:, :, None] / 8).half().float()
            weights_RNC = torch.from_numpy(codes).view(r, n, c) * scales_RN1
            tensors[name] = weights_RNC.transpose(0, 1).reshape(shapes[name])
        model = GPT(config)
        model.load_state_dict(tensors)
    except Exception as error:  # whatever the bytes are
        raise ArtifactError(f"{path}: section {section}: {error}") from error
    return model, config


WRAPPER = """import base64,linecache,lzma
s=lzma.decompress(base64.b85decode("%s")).decode()
n=__file__+" (unpacked)"
linecache.cache[n]=len(s),None,s.splitlines(True),n
exec(compile(s,n,"exec"))
"""


def shipped_code(source: bytes, mode: str) -> bytes:
    """The script in the form that CODE_BYTES=`mode` ships and counts; wrapped, it unpacks the program without
    docstrings and comments, where `inspect` still finds it. One already wrapped stays as it is."""
    if mode == "raw" or source.startswith(WRAPPER.split("%s")[0].encode()):
        return source
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    filters = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0}]
    packed = lzma.compress(ast.unparse(tree).encode(), lzma.FORMAT_ALONE, filters=filters)
    return (WRAPPER % base64.b85encode(packed).decode()).encode()


# ============================================================================================================
# CHECKPOINT — a resumed run goes on as if nothing had happened; half a file never replaces a whole one.
# ============================================================================================================

CHECKPOINT_NAMES = ("checkpoint.pt", "checkpoint.previous.pt")
CHECKPOINT_FIXES = "TRAIN_SEQ_LEN DOC_MASK SEED TRAIN_BATCH_TOKENS ITERATIONS MAX_WALLCLOCK_SECONDS".split()


def save_checkpoint(training: Training, wait: bool = False) -> None:
    """Write all that training has become to checkpoint.pt, in a thread; the one before stays beside it.

    All ranks call it together. Everything is copied to host memory before this returns.
    """
    run, optimizer = training.run, training.optimizer.state()
    hashes = run.gather(training.loader.stream_hash)
    if run.rank:
        return
    state = {
        "config": training.config.as_env(),
        "step": training.step,
        "elapsed_seconds": training.clock.elapsed_seconds(),
        "reserve_seconds": training.clock.reserve_seconds,
        "weights": [p.detach().cpu().clone() for p in training.model.parameters()],
        "average": [a.cpu().clone() for a in training.average.average],
        "optimizer": optimizer,
        "loader": json.dumps(training.loader.state_dict(sum(hashes) % 2**64)),
    }
    current, previous = (run.path(name) for name in CHECKPOINT_NAMES)

    def write() -> None:
        try:
            if current.exists():
                os.replace(current, previous)
            write_state(current, state)
            run.log(f"checkpoint:{current} step:{state['step']}")
        except (OSError, ConfigError) as error:
            run.log(f"warning: no checkpoint of step {state['step']}, the one before stands: {error}")

    training.join_writer()
    training.writer = threading.Thread(target=write, name="checkpoint")
    training.writer.start()
    if wait:
        training.join_writer()


def find_checkpoint(config: Config) -> Path:
    """The run directory that RESUME names; `auto`: of the newest checkpoint in RUNS_DIR. ConfigError."""
    found = [p for p in Path(config.runs_dir).glob("*/checkpoint*.pt") if p.name in CHECKPOINT_NAMES]
    newest = max(found, key=lambda p: p.stat().st_mtime, default=None) if config.resume == "auto" else None
    directory = newest.parent if newest else Path(config.resume)
    there = any((directory / name).is_file() for name in CHECKPOINT_NAMES)
    if not there or (directory / "summary.json").exists():
        raise ConfigError(f"RESUME={config.resume}: no checkpoint.pt of an unfinished run in it or in "
                          f"RUNS_DIR={config.runs_dir}; name the directory of a run that has one")
    return directory


def write_state(path: Path, state: Any) -> None:
    """Write tensors, numbers, text and containers of them, behind their SHA-256. Raises ConfigError."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())


def read_state(path: Path) -> Any:
    """What `write_state` wrote, read as data, never as code; ValueError where it is not as it was written."""
    digest, data = (content := path.read_bytes())[:32], content[32:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError(f"{len(content)} bytes, and their checksum is wrong")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def load_checkpoint(training: Training) -> None:
    """Take up the newest readable state, on any world size. Raises ConfigError."""
    run, state = training.run, None
    for path in (run.path(name) for name in CHECKPOINT_NAMES):
        try:
            state = state or read_state(path)
        except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            run.log(f"checkpoint:unreadable {path} ({type(error).__name__}: {error})")
    if state is None:
        raise ConfigError(f"RESUME: no readable checkpoint in {run.directory}; start a new run")
    ours, theirs = training.config.as_env(), state["config"]
    names = list(ours)
    for name in CHECKPOINT_FIXES + names[names.index("VOCAB_SIZE") : names.index("MIN_LR") + 1]:
        if theirs.get(name) != ours[name]:
            raise ConfigError(f"{name}={ours[name]}, but {run.directory} has {theirs.get(name)}; "
                              f"resume with its settings: CONFIG={run.path('config.env')}")
    with torch.no_grad():
        tensors = [*training.model.parameters(), *training.average.average]
        torch._foreach_copy_(tensors, state["weights"] + state["average"])
    training.optimizer.load_state(state["optimizer"])
    training.loader.load_state_dict(json.loads(state["loader"]))
    training.step, training.clock.elapsed_before = state["step"], state["elapsed_seconds"]
    training.clock.reserve_seconds = state["reserve_seconds"]
    run.log(f"resumed:{run.directory} step:{training.step} train_time:{1e3 * state['elapsed_seconds']:.0f}ms")


# ============================================================================================================
# TRAIN — steps under a clock that rank 0 reads for all; what it says at step k all ranks obey at step k+1.
# ============================================================================================================


class Clock:
    """Seconds of training, and the decisions that hang on them; no step waits for the device to read it."""

    def __init__(self, config: Config, run: Run) -> None:
        self.config, self.run = config, run
        self.reserve_seconds = self.elapsed_before = 0.0
        self.started: float | None = None
        self._last_call = self._last_save = self._step_seconds = 0.0
        self._sent: tuple[Tensor, Any] | None = None

    def start(self) -> None:
        """Start, or go on after a pause."""
        self.run.sync()
        self.started = self._last_call = time.perf_counter()

    def pause(self) -> None:
        """Stop counting, once the device and the message under way have finished."""
        self.run.sync()
        self.elapsed_before, self.started = self.elapsed_seconds(), None
        if self._sent is not None and self._sent[1] is not None:
            self._sent[1].wait()

    def elapsed_seconds(self) -> float:
        """Seconds counted so far."""
        return self.elapsed_before + (time.perf_counter() - self.started if self.started else 0.0)

    def decide(self, step: int) -> tuple[float, bool, bool, int]:
        """What rank 0 said one call ago: progress, whether to stop, whether to save; and any rank's signal.

        Sends what holds for the next call over the host-side group, without waiting for it.
        """
        self.run.alive()
        now, elapsed, c = time.perf_counter(), self.elapsed_seconds(), self.config
        self._step_seconds, self._last_call = max(0.9 * self._step_seconds, now - self._last_call), now
        limit = c.max_wallclock_seconds - self.reserve_seconds if c.max_wallclock_seconds else math.inf
        save = 0 < c.checkpoint_every_seconds <= elapsed - self._last_save
        self._last_save = elapsed if save else self._last_save
        stop = elapsed + 2 * self._step_seconds >= limit
        progress = run_progress(elapsed, step, self.reserve_seconds, c)
        message = torch.tensor([progress, stop, save, self.run.stop_signal], dtype=torch.float64)
        if self.run.rank:
            message[:3] = 0.0
        work = dist.all_reduce(message, dist.ReduceOp.MAX, async_op=True) if self.run.world_size > 1 else None
        received, self._sent = self._sent, (message, work)
        if received is None:  # the first step starts where the run stands
            progress = run_progress(self.elapsed_before, step, self.reserve_seconds, c)
            return progress, 0 < limit <= elapsed, False, 0
        if received[1] is not None:
            received[1].wait()
        progress, stop, save, caught = received[0].tolist()
        return max(progress, step / c.iterations), bool(stop), bool(save), int(caught)


class Training:
    """Model, optimizer, loader and clock of a run: everything that a step touches."""

    def __init__(self, config: Config, run: Run, inputs: Inputs) -> None:
        torch.set_float32_matmul_precision("high" if run.device.type == "cuda" else "highest")
        torch.use_deterministic_algorithms(config.deterministic)
        self.config, self.run, self.validation = config, run, inputs.validation
        self.clock = Clock(config, run)
        self.model = ready_model(build_model(config), config, run)
        first, _, after = config.trace_steps.partition(":")
        window = (int(first), int(after)) if config.trace_steps else None
        self.trace = Trace(run.path(f"trace_rank{run.rank}.json") if config.trace else None, run.rank, window)
        self.timer = StepTimer(config, run.device, self.trace)
        self.loader = make_loader(config, inputs.train_shards, rank=run.rank, world_size=run.world_size,
                                  device=run.device, trace=self.trace)  # fmt: skip
        compiled = compiling(config, run.device)
        self.loss = torch.compile(GPT.loss, dynamic=False, fullgraph=True) if compiled else GPT.loss
        self.optimizer = Optimizer(self.model, config, run.rank, run.world_size, compiled)
        self.average = WeightAverage(self.model, config.ema_decay)
        self.calibration_batches = -(-config.gptq_calibration_batches // run.world_size)  # of each rank
        self.step, self.writer = 0, threading.Thread()  # of the checkpoint under way

    def join_writer(self) -> None:
        """Wait until no checkpoint is being written."""
        if self.writer.ident is not None:
            self.writer.join()

    def close(self) -> None:
        """End threads and files, from any state."""
        self.loader.close()
        self.trace.close()
        self.join_writer()


def ready_model(model: GPT, config: Config, run: Run) -> GPT:
    """Move a model to this rank's device and give it the fastest kernels that pass their checks."""
    model.to(run.device)
    model.compute_dtype, model.looping = run.dtype, loop_is_on(1.0, config)
    model.attend = choose_attention(config, run)
    fused_mlp, fused_ce = choose_kernels(config, run.device, run.dtype, run.log)
    model.mlp = mlp_fused if fused_mlp else mlp_plain
    model.cross_entropy = softcapped_cross_entropy_fused if fused_ce else softcapped_cross_entropy_plain
    return model


def train_step(training: Training, progress: float) -> Tensor:
    """One optimizer step. Returns this rank's mean loss and the gradient norm (2,), still on the device."""
    config, timer, loader = training.config, training.timer, training.loader
    training.model.looping = loop_is_on(progress, config)
    total = torch.zeros((), device=training.run.device)
    timer.begin(training.step)
    for _ in range(loader.micro_steps):
        batch = loader.next_batch()
        timer.lap("batch")
        loss = training.loss(training.model, batch.inputs_BT, batch.targets_BT, batch.cu_seqlens)
        loss = loss / loader.micro_steps
        timer.lap("forward")
        loss.backward()
        timer.lap("backward")
        total += loss.detach()
    scale = learning_rate_scale(progress, training.step, config)
    norm = training.optimizer.step(scale, muon_momentum(progress, training.step, config))
    training.average.update()
    timer.lap("optimizer")
    if (line := timer.end()) is not None:
        training.run.log(line)
    return torch.stack([total, norm])


def warm_up(training: Training) -> None:
    """Run WARMUP_STEPS real steps of each graph, to compile, and measure Hessians; then undo it exactly."""
    config, run = training.config, training.run
    weights = [p.detach().clone() for p in training.model.parameters()]
    state = training.optimizer.state()
    for progress in [0.0, 1.0] if loop_is_on(1.0, config) and not loop_is_on(0.0, config) else [1.0]:
        for number in range(1, config.warmup_steps + 1):
            train_step(training, progress)
            run.log(f"warmup_step:{number}/{config.warmup_steps} looping:{training.model.looping:d}")
    if config.gptq and config.max_wallclock_seconds:
        reserve_for_hessians(training)
    with torch.no_grad():
        torch._foreach_copy_(list(training.model.parameters()), weights)
    training.optimizer.load_state(state)
    training.average.reset()
    training.loader.seek(training.step)
    training.loader.take_waits_ms()


def reserve_for_hessians(training: Training) -> None:
    """Keep what Hessians need of the clock: GPTQ_RESERVE_SECONDS, or as measured and at most a tenth of it.

    Where the calibration would take longer it uses fewer batches, and the log says how many.
    """
    config, run, seconds = training.config, training.run, 0.0
    for _ in range(2):  # the first call also pays for allocations
        start = time.perf_counter()
        collect_hessians(training.model, [training.loader.next_batch()], run.world_size)
        run.sync()
        seconds = 1.25 * max(run.gather(time.perf_counter() - start))
    limit = config.gptq_reserve_seconds or 0.1 * config.max_wallclock_seconds
    batches = training.calibration_batches = max(1, min(training.calibration_batches, int(limit / seconds)))
    training.clock.reserve_seconds = config.gptq_reserve_seconds or seconds * batches
    run.log(f"gptq:reserving {training.clock.reserve_seconds:.2f}s for {batches} batches per rank")


def train(training: Training) -> bool:
    """Step until the clock or ITERATIONS is over; False when a signal came first and all is saved."""
    config, run, clock = training.config, training.run, training.clock
    unread: list[tuple[int, Tensor, Any]] = []
    clock.start()
    while True:
        progress, stop, save, caught = clock.decide(training.step)
        if training.step >= config.iterations or stop or caught:
            break
        if save:
            save_checkpoint(training)
        if config.val_loss_every and training.step and training.step % config.val_loss_every == 0:
            validate(training, f"step:{training.step}/{config.iterations}")
        training.trace.step(training.step)
        results = train_step(training, progress)
        training.step += 1
        unread.append((training.step, *read_later(results)))
        check_finite(unread, leave=2 if results.is_cuda else 0)
        if training.step <= 10 or training.step % config.train_log_every == 0:
            loss, norm = results.tolist()
            log_step(training, loss, norm, progress)
    check_finite(unread, leave=0)
    clock.pause()
    if caught:
        save_checkpoint(training, wait=True)
        run.log(f"stopped by signal {caught}; continue with RESUME={run.directory}")
        return False
    if config.checkpoint_every_seconds:  # what follows can be repeated from here
        save_checkpoint(training)
    if training.step < config.iterations:
        run.log(f"stopping_early: wallclock_cap train_time:{1e3 * clock.elapsed_seconds():.0f}ms "
                f"step:{training.step}/{config.iterations}")
    return True


def read_later(results: Tensor) -> tuple[Tensor, Any]:
    """A copy in host memory, and the event after which it may be read: no step waits for its own loss."""
    if not results.is_cuda:
        return results, None
    copy, event = torch.empty(2, pin_memory=True).copy_(results, non_blocking=True), torch.cuda.Event()
    event.record()
    return copy, event


def check_finite(unread: list[tuple[int, Tensor, Any]], leave: int) -> None:
    """Read all but the last `leave` results, which bounds how far the host runs ahead. FloatingPointError."""
    while len(unread) > leave:
        step, results, event = unread.pop(0)
        if event is not None:
            event.synchronize()
        loss, norm = results.tolist()
        if not math.isfinite(loss + norm):
            advice = "lower MATRIX_LR, SCALAR_LR or TIED_EMBED_LR, or set GRAD_CLIP_NORM"
            raise FloatingPointError(f"step {step}: train_loss {loss}, gradient norm {norm}; {advice}")


def log_step(training: Training, loss: float, norm: float, progress: float) -> None:
    """The train line (upstream's, new fields at its end) and its event; the loss is the mean over ranks."""
    run, config, step = training.run, training.config, training.step
    seconds = training.clock.elapsed_seconds()
    loss = sum(run.gather(loss)) / run.world_size
    p50, p99, most = np.percentile(training.loader.take_waits_ms() or [0.0], [50, 99, 100]).tolist()
    scale, tokens = learning_rate_scale(progress, step - 1, config), step * config.train_batch_tokens
    left = (config.iterations - step) * seconds / step
    if config.max_wallclock_seconds:
        left = min(left, config.max_wallclock_seconds - seconds)
    run.log(f"step:{step}/{config.iterations} train_loss:{loss:.4f} train_time:{1e3 * seconds:.0f}ms "
            f"step_avg:{1e3 * seconds / step:.2f}ms tok_s:{tokens / max(seconds, 1e-9):.0f} "
            f"data_wait_ms:{p50:.2f}/{p99:.2f}/{most:.2f} lr_scale:{scale:.4f} grad_norm:{norm:.3f} "
            f"eta:{left:.0f}s")
    run.event("train", step=step, train_loss=loss, train_time_ms=1e3 * seconds, tokens=tokens, grad_norm=norm,
              progress=progress, data_wait_p50_ms=p50, data_wait_p99_ms=p99, data_wait_max_ms=most)


def validate(training: Training, label: str) -> None:
    """Score the current weights without overlap, off the clock: a diagnostic, never the result."""
    run, clock, data, was_running = training.run, training.clock, training.validation, training.clock.started
    clock.pause()
    start = time.perf_counter()
    with training.trace.span("val", "main", step=training.step):
        score = data.score(score_roundtrip(training.model, data.tokens, training.config))
    trained_ms, training.timer.val_ms = 1e3 * clock.elapsed_seconds(), 1e3 * (time.perf_counter() - start)
    run.log(f"{label} val_loss:{score.nats:.4f} val_bpb:{score.bits_per_byte:.4f} "
            f"train_time:{trained_ms:.0f}ms step_avg:{trained_ms / max(training.step, 1):.2f}ms{data.mark}")
    run.event("val", label=label, step=training.step, val_loss=score.nats, val_bpb=score.bits_per_byte,
              train_time_ms=trained_ms, val_ms=training.timer.val_ms)
    if was_running:
        clock.start()


def finish_training(training: Training) -> dict[tuple[str, int], Tensor]:
    """Take the averaged weights, collect Hessians from training batches on the clock, and validate once."""
    config, run, hessians = training.config, training.run, dict[tuple[str, int], Tensor]()
    training.average.apply()
    training.model.looping = loop_is_on(1.0, config)
    training.clock.start()
    if config.gptq:  # the loader goes on where training stopped: its shards are training shards only
        batches = (training.loader.next_batch() for _ in range(training.calibration_batches))
        hessians = collect_hessians(training.model, batches, run.world_size)
    training.clock.pause()
    seconds = training.clock.elapsed_seconds()
    run.log(f"gptq:collected {len(hessians)} Hessians; training and Hessians took {seconds:.2f}s")
    validate(training, "DIAGNOSTIC post_ema" if config.ema_decay else "DIAGNOSTIC final")
    run.log("peak memory allocated: {} MiB reserved: {} MiB".format(*peak_memory_mib(run.device)))
    return hessians


def peak_memory_mib(device: torch.device) -> tuple[int, int]:
    """Most memory used and most reserved: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20, torch.cuda.max_memory_reserved(device) >> 20
    import resource  # absent on Windows, where only this line would need it

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)
    return peak, peak


# ============================================================================================================
# main — a table of contents: check, prepare, warm up, train, ship, reload, evaluate, report.
# ============================================================================================================


def main() -> int:
    """Do what the environment asks for. Exit status 0: finished; 1: an error, told in one message."""
    if set(sys.argv[1:]) & {"-h", "--help"}:
        print(help_text())
        return 0
    run = None
    try:
        config = Config.from_env(os.environ)
        run = Run(config, os.environ)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, run.note_signal)
        return score_artifact(config, run) if config.eval_only else whole_run(config, run)
    except (ConfigError, DataError, LoaderError, ArtifactError, ScoringError, FloatingPointError) as error:
        message = f"error: {error}"
    except torch.cuda.OutOfMemoryError as error:
        message = f"error: out of GPU memory; lower MICRO_BATCH_TOKENS or VAL_BATCH_SIZE ({error})"
    except Exception:
        message = traceback.format_exc()
    rank = f"rank {run.rank}: " if run and run.world_size > 1 else ""
    print(rank + message, file=sys.stderr, flush=True)
    if run and run.directory:
        with contextlib.suppress(OSError), open(run.path("log.txt"), "a", encoding="utf-8") as file:
            file.write(f"{rank}{message}\n")
    return 1


def whole_run(config: Config, run: Run) -> int:
    """Train, ship, and score what was shipped."""
    with run.phase("setup"):
        inputs = preflight(config, run)
        if config.preflight_only:
            run.log("preflight:ok")
            return 0
        open_run(config, run, inputs)
        training = Training(config, run, inputs)
    with contextlib.closing(training):
        with run.phase("warmup"):
            warm_up(training)
        if config.resume:
            load_checkpoint(training)
        with run.phase("train"):
            if not train(training):
                return 128 + (run.stop_signal or signal.SIGTERM)
        with run.phase("hessians"):
            hessians = finish_training(training)
        with run.phase("quantize"):
            ship(training, hessians, inputs)
    with run.phase("reload"):
        path = run.path("model.bin")
        model = ready_model(load_artifact(path)[0], config, run)
    scores = evaluate(model, config, run, inputs.validation, describe_artifact(path)["label"])
    summarize(config, run, inputs, scores, path, training)
    if config.generate:
        run.log(generate_text(model, config, config.generate))
    return 0


def score_artifact(config: Config, run: Run) -> int:
    """EVAL_ONLY: score an artifact, or with GENERATE write text from it, without any training data."""
    path = Path(config.eval_only)
    model, stored = load_artifact(path)
    config = Config.from_env({**os.environ, **stored.model_env()})
    tokenizer, expected = find_path(config.tokenizer_path), describe_artifact(path)["tokenizer_sha256"]
    if not tokenizer.is_file() or hashlib.sha256(tokenizer.read_bytes()).hexdigest() != expected:
        raise ConfigError(f"TOKENIZER_PATH={tokenizer}: expected the one of {path}, with sha256 {expected}")
    if config.generate:
        run.log(generate_text(ready_model(model, config, run), config, config.generate))
        return 0
    with run.phase("setup"):
        inputs = preflight(config, run)
        open_run(config, run, inputs)
        model = ready_model(model, config, run)
    scores = evaluate(model, config, run, inputs.validation, describe_artifact(path)["label"])
    summarize(config, run, inputs, scores, path)
    return 0


@dataclass(frozen=True)
class Inputs:
    """What a run reads, checked, and the hashes by which two runs know that they read the same."""

    train_shards: list[Shard]
    validation: Validation
    hashes: dict[str, str]
    source: bytes  # of this file
    micro_steps: int  # forward passes of a rank per step
    artifact_bytes: tuple[int, int]  # estimate, fewest and most


def preflight(config: Config, run: Run) -> Inputs:
    """Check what a user can get wrong, in seconds, before anything is written. All ranks call it together."""
    folder = find_path(config.data_path)
    if not folder.is_dir():
        raise DataError(f"DATA_PATH={config.data_path}: no such folder. `make demo` trains on a built-in "
                        "sample, data/README.md tells how to get shards, --help lists every variable")
    tokenizer = find_path(config.tokenizer_path)
    if not tokenizer.is_file():
        raise DataError(f"TOKENIZER_PATH={config.tokenizer_path}: no such file; see data/README.md")
    train_shards = [] if config.eval_only else open_shards(str(folder / "fineweb_train_*.bin"))
    val_shards = open_shards(str(folder / "fineweb_val_[0-9]*.bin"))
    for shard in (val_shards[0], *train_shards[:1]):  # the others are checked when they are read
        first = int(read_tokens(shard, vocab_size=config.vocab_size)[0])
        if first != BOS_ID:
            raise DataError(f"{shard.path}: begins with id {first}, expected BOS={BOS_ID}; export it again")
    tokens = validation_tokens(config, val_shards)
    validation = Validation(tokens, int(token_bytes(tokens, config).sum()), bool(config.val_tokens_limit))
    if not validation.bytes_total:
        raise DataError(f"{folder}: {len(tokens)} validation tokens stand for no text: nothing to score")
    micro_steps = 0 if config.eval_only else micro_steps_per_step(config, run.world_size)
    if micro_steps:  # its errors, before anything is written
        TokenOrder(train_shards, config.train_seq_len, config.seed, config.shuffle)
    source = Path(__file__).read_bytes()
    estimate = estimate_artifact_bytes(config, len(shipped_code(source, config.code_bytes)))
    listing = json.dumps([[shard.path.name, shard.tokens] for shard in (*train_shards, *val_shards)])
    read = {"code": source, "tokenizer": tokenizer.read_bytes(),
            "shards": listing.encode(), "manifest": check_manifest(folder / "manifest.json")}  # fmt: skip
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in read.items()}
    mine = {**config.as_env(), **hashes, "torch": torch.__version__}
    for rank, theirs in enumerate(run.gather(mine)):
        for name in (name for name in mine if theirs[name] != mine[name]):
            raise ConfigError(f"{name} is {theirs[name]} on rank {rank} and {mine[name]} on rank {run.rank}")
    return Inputs(train_shards, validation, hashes, source, micro_steps, estimate)


def check_manifest(path: Path) -> bytes:
    """The manifest's bytes, if there is one. DataError where training overlaps validation (issue #2127)."""
    if not path.is_file():
        return b""
    try:
        files = json.loads(path.read_bytes())["files"]
        val = {entry["sha256"]: entry["documents"] for entry in files.values() if entry["split"] == "val"}
        for name, entry in files.items():
            start, stop = entry["documents"]
            overlap = any(start < val_stop and val_start < stop for val_start, val_stop in val.values())
            if entry["split"] == "train" and (entry["sha256"] in val or overlap):
                raise DataError(f"{path}: training file {name} holds documents {start}..{stop}, some of "
                                "which are validation: not allowed; export the shards again")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a manifest ({error!r}); export the shards again") from error
    return path.read_bytes()


def open_run(config: Config, run: Run, inputs: Inputs) -> None:
    """Create the run directory with source and settings, and write the head of the log."""
    run.open_directory(config)
    overrides, folder = config.overrides(), find_path(config.data_path)
    settings = [f"{name}={value}" for name, value in config.as_env().items()]
    if run.rank == 0:
        write_atomically(run.path("train_gpt.py"), inputs.source)
        write_atomically(run.path("config.env"), "\n".join([*settings, ""]).encode())
    if config.val_bytecount_device != "cpu" or not config.val_copy_stream:
        run.log("VAL_BYTECOUNT_DEVICE, VAL_COPY_STREAM: accepted, but validation bytes are summed once on "
                "the host, and with VAL_PREFETCH=1 validation tokens are copied once, before scoring")
    for setting in settings:
        run.log(f"  {setting}{'  # changed' if setting.split('=')[0] in overrides else ''}", console=False)
    fewest, most = inputs.artifact_bytes
    for line in (
        f"run:{run.directory}",
        f"Running Python {platform.python_version()} PyTorch {torch.__version__} on {device_name(run)} "
        f"dtype:{run.dtype} compile:{compiling(config, run.device):d} threads:{torch.get_num_threads()}",
        f"overrides: {' '.join(f'{name}={value}' for name, value in overrides.items())}",
        f"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={find_path(config.tokenizer_path)}",
        f"train_loader:dataset:{folder.name} train_shards:{len(inputs.train_shards)}",
        f"val_loader:shards pattern={folder}/fineweb_val_*.bin tokens:{len(inputs.validation.tokens) - 1} "
        f"bytes:{inputs.validation.bytes_total}{inputs.validation.mark}",
        *(f"sha256:{name} {digest}" for name, digest in inputs.hashes.items()),
        f"model_params:{sum(map(math.prod, parameter_shapes(config).values()))}",
        f"world_size:{run.world_size} grad_accum_steps:{inputs.micro_steps}",
        f"train_batch_tokens:{config.train_batch_tokens} train_seq_len:{config.train_seq_len} "
        f"iterations:{config.iterations} warmup_steps:{config.warmup_steps} "
        f"max_wallclock_seconds:{config.max_wallclock_seconds:.3f}",
        f"seed:{config.seed}",
        f"artifact:estimate {fewest}..{most} bytes before code, limit with code {config.artifact_bytes_max}",
    ):
        run.log(line)


def device_name(run: Run) -> str:
    """What this rank computes on."""
    cpu = f"{platform.machine()} CPU"
    return torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else cpu


def ship(training: Training, hessians: dict[tuple[str, int], Tensor], inputs: Inputs) -> None:
    """Write the artifact and the form of the script that is counted; rank 0 does, all ranks wait."""
    config, run = training.config, training.run
    if run.rank == 0:
        code = shipped_code(inputs.source, config.code_bytes)
        write_atomically(run.path("train_gpt.shipped.py"), code)
        write_artifact(training.model, config, hessians, run.path("model.bin"), len(code),
                       inputs.hashes["tokenizer"], run.log)
    run.gather(None)


def summarize(
    config: Config, run: Run, inputs: Inputs, scores: dict[str, Score], path: Path,
    training: Training | None = None,
) -> None:  # fmt: skip
    """Print sizes, limits and results, and write summary.json: the one record of a run. All ranks call it."""
    stream_hash = sum(run.gather(training.loader.stream_hash if training else 0)) % 2**64
    devices = run.gather(device_name(run))
    if run.rank:
        return
    artifact = describe_artifact(path)
    code = {form: len(shipped_code(inputs.source, form)) for form in ("raw", "wrapped")}
    steps, train_seconds = (training.step, training.clock.elapsed_seconds()) if training else (0, 0.0)
    eval_seconds = sum(seconds for name, seconds in run.phases.items() if name.startswith("eval_"))
    limits = {}
    for name, used, limit in (
        ("train_seconds", train_seconds, config.max_wallclock_seconds),
        ("eval_seconds", eval_seconds, config.max_eval_seconds),
        ("artifact_bytes", code[config.code_bytes] + artifact["bytes"], config.artifact_bytes_max),
    ):
        limits[name] = {"value": used, "limit": limit, "ok": not limit or used <= limit}
        run.log(f"limit:{name} {used:.10g} of {limit:.10g} {'ok' if limits[name]['ok'] else 'EXCEEDED'}")
    label = f"{artifact['label']}+rans"
    run.log(f"Code size: {code[config.code_bytes]} bytes ({config.code_bytes})")
    run.log(f"Serialized model {label}: {artifact['bytes']} bytes")
    run.log(f"Total submission size {label}: {code[config.code_bytes] + artifact['bytes']} bytes")
    shards, validation = inputs.train_shards, inputs.validation
    summary = {
        "run_id": run.path("summary.json").parent.name, "seed": config.seed,
        "config": config.as_env(), "overrides": config.overrides(),
        "code": {"sha256": inputs.hashes["code"], "bytes": code["raw"], "bytes_wrapped": code["wrapped"]},
        "data": {"path": config.data_path, "hashes": inputs.hashes, "train_shards": len(shards),
                 "train_tokens": sum(shard.tokens for shard in shards),
                 "val_tokens": len(validation.tokens) - 1, "val_bytes": validation.bytes_total},
        "stream_hash": f"{stream_hash:016x}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
                     "cuda": torch.version.cuda, "triton": getattr(triton, "__version__", None)},
        "hardware": {"gpus": devices if run.device.type == "cuda" else [], "cpu": platform.machine(),
                     "cores": os.cpu_count(), "world_size": run.world_size,
                     "peak_memory_mib": peak_memory_mib(run.device)[0]},
        "phases": run.phases, "steps": steps, "tokens": steps * config.train_batch_tokens,
        "losses": {name: dataclasses.asdict(score) for name, score in scores.items()},
        "artifact": artifact,
        "limits": limits, "comparable": not validation.limited, "exit": "finished",
    }  # fmt: skip
    write_atomically(run.path("summary.json"), (json.dumps(summary, indent=1) + "\n").encode())
    run.log(" ".join(["seconds:", *(f"{name}:{seconds:.1f}" for name, seconds in run.phases.items())]))
    results = " ".join(f"{name}={score.bits_per_byte:.4f}" for name, score in scores.items())
    run.log(f"done: bits per byte {results}; stream_hash:{summary['stream_hash']}; files in {run.directory}")


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no locale loses a line
    status = main()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)  # peers may wait in a collective that this rank never joins, the console may be closed
