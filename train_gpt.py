"""Train, quantize and score a GPT under a hard budget: one file, from token shards to bits per byte.

    torchrun --standalone --nproc_per_node=8 train_gpt.py     # the 8-GPU run: the defaults
    CONFIG=records/configs/cpu_demo.env python train_gpt.py   # the whole job on a laptop
    EVAL_ONLY=runs/x/model.bin python train_gpt.py            # score an artifact in a fresh process
    python train_gpt.py --help                                # every variable

A run checks what a user can get wrong, compiles, trains for MAX_WALLCLOCK_SECONDS, writes an artifact that,
with the code, just fits ARTIFACT_BYTES_MAX, and scores what that file gives back. All lies in runs/<RUN_ID>/.

Shape suffixes: B rows, T positions, D model width, F MLP width, H query heads, K key heads, E channels of a
head, V vocabulary, L layers, S skips, P parallel layers, W gate channels, N anything flattened or batched,
R matrix rows, C matrix columns.
"""

from __future__ import annotations

import ast
import contextlib
import copy
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
import platform
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
import zlib
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from dataclasses import Field, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

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
    """A shard or tokenizer is missing, damaged, foreign, or does not fit the run."""


class LoaderError(RuntimeError):
    """The data loader failed or stalled; the message holds shard, position and the original traceback."""


class ArtifactError(RuntimeError):
    """An artifact does not fit its budget, or a file is not an artifact that can be trusted."""


def knob(default: Any, meaning: str, low: float = -1e300, high: float = 1e300, among: str = "") -> Any:
    """One setting: its default, meaning with unit, and range (never infinite) or space-separated choices."""
    choices = "0 1" if isinstance(default, bool) else among
    return field(default=default, metadata=dict(meaning=meaning, low=low, high=high, among=choices.split()))


@dataclass(frozen=True)
class Config:
    """All settings, in the order of what they decide; upper case in the environment. Default: 8 GPUs."""

    # --- the model: an artifact keeps these ---
    train_seq_len: int = knob(2048, "tokens; one training sequence", 1, 1 << 20)
    doc_mask: bool = knob(True, "attention and token shifts stay inside a document; 0: they cross its border")
    vocab_size: int = knob(8192, "tokens in the vocabulary", 4, 65_536)
    num_layers: int = knob(11, "blocks that own weights", 1, 256)
    model_dim: int = knob(512, "width of the residual stream", 8)
    num_heads: int = knob(8, "query heads", 1)
    num_kv_heads: int = knob(4, "key and value heads", 1)
    mlp_mult: float = knob(4.0, "MLP width / MODEL_DIM", 0.125, 64)
    leaky_slope: float = knob(0.5, "MLP activation LeakyReLU(slope)²; 0: relu²", 0, 1)
    rope_base: float = knob(10_000.0, "rotary base", 1)
    rope_dims: int = knob(16, "rotated dimensions of each head; 0: all", 0)
    rope_train_seq_len: int = knob(0, "tokens; longer inputs rescale the base; 0: TRAIN_SEQ_LEN", 0)
    ln_scale: bool = knob(True, "scale block inputs by 1/sqrt(layer + 1)")
    qk_gain_init: float = knob(5.25, "initial learned gain of each query head")
    xsa_last_n: int = knob(11, "last layers whose heads drop their own value's direction", 0)
    sparse_attn_gate_enabled: bool = knob(True, "gate each head by the first GATE_WINDOW channels")
    gate_window: int = knob(12, "channels that feed the gates", 1)
    smear_gate_enabled: bool = knob(True, "mix in the previous token's embedding, gated")
    skip_gates_enabled: bool = knob(True, "U-Net skips interpolate; 0: they add")
    num_loops: int = knob(2, "extra passes over LOOP_START..LOOP_END; 0: none", 0, 16)
    loop_start: int = knob(3, "first looped layer", 0)
    loop_end: int = knob(5, "last looped layer", 0)
    enable_looping_at: float = knob(0.35, "progress at which the loop switches on", 0, 1)
    parallel_start_layer: int = knob(8, "first layer whose attention and MLP run in parallel; -1: none", -1)
    parallel_mode: str = knob("lanes", "two residual lanes, or one (GPT-J)", among="lanes gptj")
    tie_embeddings: str = knob("1", "accepted; the output head is the input embedding", among="1")
    tied_embed_init_std: float = knob(0.005, "initial standard deviation of that embedding", 0)
    matrix_init: str = knob("orthogonal", "initial block matrices", among="orthogonal uniform")
    logit_softcap: float = knob(30.0, "logits are bounded by c·tanh(x/c); 0: unbounded", 0)
    # --- its training: a checkpoint keeps these as well ---
    seed: int = knob(1337, "initial weights and data order", 0, 2**63 - 1)
    train_batch_tokens: int = knob(786_432, "tokens; one optimizer step, all ranks together", 1)
    shuffle: bool = knob(True, "permute shards and sequences by SEED; 0: file order")
    iterations: int = knob(20_000, "steps; upper bound when a wall clock is set", 1)
    max_wallclock_seconds: float = knob(600.0, "seconds of training with Hessians; 0: ITERATIONS", 0)
    matrix_lr: float = knob(0.026, "Muon, block matrices", 0)
    scalar_lr: float = knob(0.02, "AdamW, small tensors", 0)
    tied_embed_lr: float = knob(0.03, "AdamW, embedding", 0)
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
    ema_decay: float = knob(0.9965, "per-step decay of the shipped average of weights; 0: none", 0, 0.99999)
    warmdown_frac: float = knob(0.85, "last part of the run in which learning rates fall", 0, 1)
    warmdown_iters: int = knob(0, "the same in steps, at the mean step time; 0: use the fraction", 0)
    min_lr: float = knob(0.1, "floor of the falling learning rate, as a share of it", 0, 1)
    # --- the artifact ---
    artifact_bytes_max: int = knob(16_000_000, "bytes; shipped code and artifact together", 1000)
    code_bytes: str = knob("wrapped", "form of the script that is shipped and counted", among="raw wrapped")
    rate_control: bool = knob(True, "scale steps until the budget is full; 0: bits and clips as given")
    matrix_bits: int = knob(6, "bits of block matrices at their clip; RATE_CONTROL scales the step", 2, 8)
    embed_bits: int = knob(7, "bits of embeddings, in the same way", 2, 8)
    mlp_clip_sigmas: float = knob(11.5, "clip of MLP matrices, in standard deviations of a row", 0.1)
    attn_clip_sigmas: float = knob(13.0, "clip of attention matrices", 0.1)
    embed_clip_sigmas: float = knob(14.0, "clip of embeddings", 0.1)
    gptq: bool = knob(True, "round with second-order information; 0: to nearest")
    gptq_damping: float = knob(0.01, "share of the mean diagonal added to Hessians", 0)
    gptq_calibration_batches: int = knob(64, "micro-batches of training data, all ranks together", 1)
    gptq_reserve_seconds: float = knob(2.0, "seconds of the clock for Hessians; fewer batches if short", 0)
    # --- its evaluation ---
    eval_seq_len: int = knob(0, "tokens of context; 0: TRAIN_SEQ_LEN", 0, 1 << 20)
    eval_stride: int = knob(64, "targets scored per window; 0: no sliding window", 0)
    ttt_enabled: bool = knob(True, "score with legal test-time training as well")
    ttt_lr: float = knob(0.005, "SGD; falls along a cosine over the chunks", 0)
    ttt_epochs: int = knob(3, "passes over each scored chunk", 0)
    ttt_momentum: float = knob(0.9, "SGD", 0, 0.9999)
    ttt_chunk_tokens: int = knob(32_768, "targets scored before the next update", 1)
    ttt_batch_seqs: int = knob(32, "sequences of one SGD step, all ranks together", 1)
    ttt_grad_clip: float = knob(1.0, "bound on the gradient norm; 0: none", 0)
    # --- the data and their way to the device ---
    data_path: str = knob("data/datasets/fineweb10B_sp8192", "folder of fineweb_{train,val}_*.bin shards")
    tokenizer_path: str = knob("data/tokenizers/fineweb_8192_bpe.model", "their SentencePiece model")
    micro_batch_tokens: int = knob(98_304, "tokens; one forward pass of one rank; bounds memory", 1)
    train_prefetch: bool = knob(True, "read and stage batches in threads; 0: the plain synchronous path")
    train_prefetch_queue: int = knob(2, "batches staged ahead of the step", 1, 64)
    train_copy_stream: bool = knob(True, "copy batches to the GPU on a stream of their own")
    val_prefetch: bool = knob(True, "copy validation to the device before scoring; 0: batch by batch")
    val_tokens_limit: int = knob(0, "targets; score only the first ones: NOT comparable; 0: all", 0)
    loader_timeout_seconds: float = knob(60.0, "seconds without data before the loader gives up", 0.1)
    # --- the run ---
    run_id: str = knob("", "name of the run directory; empty: date, time and seed")
    runs_dir: str = knob("runs", "folder that holds the run directories")
    max_eval_seconds: float = knob(600.0, "seconds of evaluation; judged in summary.json; 0: no limit", 0)
    warmup_steps: int = knob(20, "untimed steps that compile each graph, then undone", 0, 1000)
    train_log_every: int = knob(50, "steps between train lines; the first ten are always printed", 1)
    val_loss_every: int = knob(0, "steps between validations outside the clock; 0: only after training", 0)
    val_batch_size: int = knob(65_536, "tokens; one scoring pass of one rank", 1)
    val_progress_log_every: int = knob(0, "chunks between scoring progress lines; 0: twenty lines", 0)
    training_timing_breakdown: bool = knob(False, "print where the milliseconds of a step go")
    training_timing_every: int = knob(200, "steps between those lines", 1)
    device: str = knob("auto", "where to run", among="auto cpu cuda")
    compile: str = knob("auto", "torch.compile; auto: on CUDA", among="auto 0 1")
    compute_dtype: str = knob("auto", "activations; auto: where fast", among="auto float32 bfloat16")
    attention: str = knob("auto", "kernel; auto: the fastest that passes", among="auto fa3 varlen sdpa")
    fused_mlp: str = knob("auto", "Triton MLP; auto: where right and faster", among="auto 0 1")
    checkpoint_every_seconds: float = knob(0.0, "seconds between checkpoints; 0: only on a signal", 0)
    resume: str = knob("", "continue the unfinished run in this directory")
    peer_timeout_seconds: float = knob(900.0, "seconds a rank waits for another one before it ends", 1, 1e8)
    eval_only: str = knob("", "score this artifact instead of training")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Config:
        """`environ` over the file that its CONFIG names over the defaults; ConfigError for what is wrong."""
        path = environ.get("CONFIG") or os.devnull
        try:
            text = find_path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"CONFIG={path}: {error}; name a file of KEY=VALUE lines") from error
        lines = [f" {line}".split(" #")[0].partition("=") for line in text.split("\n")]  # ` #`: a comment
        for key, equals, value in lines:
            if bool(key.strip()) != bool(equals):
                raise ConfigError(f"CONFIG={path}: got {(key + equals + value).strip()!r}, not KEY=VALUE")
        in_file = {key.strip(): value.strip() for key, _, value in lines}
        known = {f.name.upper(): f for f in fields(cls)}
        # First words that are not ours alone: MAX_JOBS, PARALLEL_SEQ, TRAINING_JOB_NAME.
        common = "CHECKPOINT CODE COMPUTE DATA DEVICE HEAD MAX MIN MODEL NUM PARALLEL RATE RUN TRAINING"
        for name in sorted((in_file.keys() | environ.keys()) - known.keys() - {""}):
            word = name.split("_")[0]
            kin = [other for other in known if other.split("_")[0] == word and word not in common.split()]
            near = difflib.get_close_matches(name, known, cutoff=0.83) if len(name) >= 6 else []
            if meant := near or kin or ["one that --help lists"] * (name in in_file):
                raise ConfigError(f"unknown variable {name}: did you mean {' or '.join(meant)}?")
        given = {**in_file, **environ}
        config = cls(**{f.name: _parse(name, given[name], f) for name, f in known.items() if name in given})
        _cross_check(config)
        return config

    def as_env(self, through: str = "") -> dict[str, str]:
        """Settings as strings that `from_env` reads back: all, or the first ones through the one named."""
        env = {name.upper(): str(int(v) if isinstance(v, bool) else v) for name, v in vars(self).items()}
        count = list(env).index(through) + 1 if through else len(env)
        return dict(itertools.islice(env.items(), count))

    def overrides(self) -> dict[str, str]:
        """The settings that differ from their default, as strings."""
        default = Config().as_env()
        return {name: value for name, value in self.as_env().items() if value != default[name]}

    eval_length = property(lambda self: self.eval_seq_len or self.train_seq_len)  # tokens of context
    head_dim = property(lambda self: self.model_dim // self.num_heads)  # channels of one head
    mlp_dim = property(lambda self: int(self.mlp_mult * self.model_dim))  # width of the hidden layer


def _parse(name: str, text: str, spec: Field[Any]) -> Any:
    """The value of one variable in its field's type; ConfigError says what was expected."""
    meaning, low, high, among = spec.metadata.values()
    kind: Any = type(spec.default)
    with contextlib.suppress(ValueError):
        value = kind(int(text) if kind is bool else text)
        if text.isprintable() and (text in among or not among) and (kind is str or low <= value <= high):
            return value
    kind_and_range = "printable text" if kind is str else f"{kind.__name__} from {low:g} to {high:g}"
    raise ConfigError(f"{name}={text!r}: expected {' or '.join(among) or kind_and_range}; {meaning}")


def _cross_check(c: Config) -> None:
    """Raise ConfigError for settings that are fine alone and wrong together."""
    chunk, seconds, reserve = c.ttt_chunk_tokens, c.max_wallclock_seconds, c.gptq * c.gptq_reserve_seconds
    rules = [
        (c.model_dim % c.num_heads == 0, "MODEL_DIM in whole NUM_HEADS"),
        (c.num_heads % c.num_kv_heads == 0, "NUM_HEADS in whole NUM_KV_HEADS"),
        ((c.rope_dims or c.head_dim) % 2 == 0, "ROPE_DIMS (0: MODEL_DIM / NUM_HEADS ) even"),
        (c.rope_dims <= c.head_dim, "ROPE_DIMS <= MODEL_DIM / NUM_HEADS"),
        (c.gate_window <= c.model_dim, "GATE_WINDOW <= MODEL_DIM"),
        (c.parallel_start_layer < c.num_layers, "PARALLEL_START_LAYER < NUM_LAYERS"),
        (not c.num_loops or c.loop_start <= c.loop_end < c.num_layers, "LOOP_START <= LOOP_END < NUM_LAYERS"),
        (c.eval_stride <= c.eval_length, "EVAL_STRIDE <= EVAL_SEQ_LEN (0: TRAIN_SEQ_LEN )"),
        (not c.ttt_enabled or (c.eval_stride and chunk % c.eval_stride == 0 and chunk >= c.eval_length),
         "TTT_CHUNK_TOKENS in whole EVAL_STRIDE and >= EVAL_SEQ_LEN (0: TRAIN_SEQ_LEN ) for TTT_ENABLED"),
        (seconds or c.warmdown_iters <= c.iterations, "WARMDOWN_ITERS <= ITERATIONS"),
        (not seconds or reserve < seconds, "GPTQ_RESERVE_SECONDS < MAX_WALLCLOCK_SECONDS"),
        (os.sep not in c.run_id and not c.run_id.startswith("."), "RUN_ID as a plain name"),
    ]  # fmt: skip
    for rule in (rule for holds, rule in rules if not holds):
        got = [f"{name}={value}" for name, value in c.as_env().items() if name in rule.split()]
        raise ConfigError(f"expected {rule}; got {', '.join(got)}")


def micro_steps_per_step(config: Config, world_size: int) -> int:
    """Micro-batches of one rank per optimizer step; ConfigError when the batch does not split evenly."""
    wanted, length = config.train_batch_tokens, config.train_seq_len
    rows = min(config.micro_batch_tokens // length, wanted // length // world_size)
    if not rows or wanted % (unit := world_size * rows * length):
        raise ConfigError(f"TRAIN_BATCH_TOKENS={wanted}: expected a multiple of {world_size} ranks times the "
                          f"whole TRAIN_SEQ_LEN={length} in MICRO_BATCH_TOKENS={config.micro_batch_tokens}")
    return wanted // unit


def find_path(path: str) -> Path:
    """An existing path: as given, else relative to the script's folder or one above it; unfound: as given."""
    given = Path(path).expanduser()
    places = (folder / given for folder in (Path(), *Path(__file__).resolve().parents))
    return next((place for place in places if place.exists()), given)


# ============================================================================================================
# RUNTIME — device, ranks, run directory, log and clock: one object, the same on a laptop and on many nodes.
# ============================================================================================================


class Run:
    """One process of a run: where it computes, who its peers are, what it writes, where its seconds went."""

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self.rank, self.world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        self.directory = Path(os.devnull)  # until it is opened, and what is written there is lost
        self.phases = defaultdict[str, float](float)
        self.phase_name, self.stop_signal = "setup", 0
        local_rank, gpus = int(environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        if on_gpu and local_rank >= gpus:
            raise ConfigError(f"DEVICE={config.device}: local rank {local_rank}, {gpus} GPUs; try DEVICE=cpu")
        self.device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        self.device_name = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU"
        fast = torch.cuda.get_device_capability()[0] >= 8 if on_gpu else torch.cpu._is_amx_tile_supported()
        auto = torch.bfloat16 if fast else torch.float32  # fast: matrix units take bfloat16
        self.dtype = getattr(torch, config.compute_dtype, auto)
        if self.world_size > 1:
            backend, device = ("cpu:gloo,cuda:nccl", self.device) if on_gpu else ("gloo", None)
            limit = timedelta(seconds=config.peer_timeout_seconds)
            dist.init_process_group(backend, timeout=limit, device_id=device)

    path = property(lambda self: self.directory.joinpath)  # path("x"): a file of the run directory

    def log(self, line: str, event: str = "", **values: Any) -> None:
        """A line to log.txt and the console; of an `event` its values to metrics.jsonl; rank 0 only."""
        if self.rank == 0:
            tell(line, self.path("log.txt"), sys.stdout)
        if self.rank == 0 and event:
            tell(json.dumps({"event": event, **values}), self.path("metrics.jsonl"))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a block, device work included, to `phases[name]`."""
        self.sync()
        if self.stop_signal:  # it came when training had just ended
            self.leave(self.stop_signal)
        self.phase_name, start = name, time.perf_counter()
        yield
        self.sync()
        self.phases[name] += time.perf_counter() - start

    def sync(self) -> None:
        """Wait until the device has finished what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order; all ranks call it together."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def leave(self, number: int, _frame: Any = None) -> None:
        """On SIGTERM and SIGINT: the first in training asks for a checkpoint, any other ends this process."""
        if self.phase_name == "train" and not self.stop_signal:
            self.stop_signal = number
            return
        tell(f"rank {self.rank}: stopped by signal {number} in phase {self.phase_name}; to go on, where it "
             f"is there: RESUME={self.directory} or EVAL_ONLY={self.path('model.bin')}", sys.stderr)
        os._exit(128 + number)


def tell(line: str, *places: Any) -> None:
    """One line to streams and to the ends of files; a closed console or a full disk costs no run."""
    for place in places:  # RuntimeError: a signal's line, while another one is printed
        with contextlib.suppress(OSError, RuntimeError, ValueError), contextlib.ExitStack() as opened:
            if isinstance(place, Path):
                place = opened.enter_context(open(place, "a", encoding="utf-8"))
            print(line, file=place, flush=True)


def compiling(config: Config, device: torch.device) -> bool:
    """Whether torch.compile is wanted here."""
    return config.compile == "1" or (config.compile == "auto" and device.type == "cuda")


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path` as a whole or not at all if killed or out of disk. Raises ConfigError."""
    temporary = path.with_name(f".{path.name}.tmp")  # what a killed run left is overwritten
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"RUNS_DIR: {path} cannot be written ({error}); make room on that disk") from error


# ============================================================================================================
# TRACE — where the milliseconds of a step go, also with prefetch on; no step waits but one that is reported.
# ============================================================================================================


class StepTimer:
    """`timing_breakdown` lines of each `every`-th step; 0: of none.

    Milliseconds: batch_cpu and val, before the step, of the host; batch_h2d that the compute stream waited
    for batches; the others of the device. A step with a line is waited for; `records trace` draws timelines.
    """

    def __init__(self, every: int, cuda: bool) -> None:
        self.every, self.cuda, self.val_ms, self.reported = every, cuda, 0.0, False

    def begin(self, step: int) -> None:
        """Start of a step; those of the warm-up are negative."""
        self.step, self.reported = step, self.every > 0 and step >= 0 == step % self.every
        self.laps = list[tuple[str, float, Any]]()  # what ended, when on the host, and its event on the GPU
        self.lap("begin")

    def lap(self, name: str) -> None:
        """Here ends a batch, forward, backward or optimizer."""
        if self.reported:
            event = torch.cuda.Event(enable_timing=True) if self.cuda else None
            self.laps.append((name, time.perf_counter(), event))
            if event is not None:
                event.record()

    def line(self) -> str:
        """End of a step: its line, empty if it is not reported."""
        host, gpu = defaultdict[str, float](float), defaultdict[str, float](float)
        host["val"], self.val_ms = self.val_ms, 0.0
        if not self.reported:
            return ""
        if self.cuda:
            self.laps[-1][2].synchronize()
        for (_, start, first), (name, end, last) in zip(self.laps, self.laps[1:], strict=False):
            host[name] += 1e3 * (end - start)
            gpu[name] += first.elapsed_time(last) if self.cuda else 0.0
        ms = {"batch_cpu": host["batch"], "batch_h2d": gpu["batch"]}
        ms |= {name: (gpu if self.cuda else host)[name] for name in ("forward", "backward", "optimizer")}
        ms["val"] = host["val"]
        return f"timing_breakdown step:{self.step}" + "".join(f" {name}_ms:{ms[name]:.2f}" for name in ms)


# ============================================================================================================
# DATA — the tokens in an order that is a pure function of shards, seed and geometry, delivered ahead of need.
# ============================================================================================================

BOS_ID = 1
SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024

# A file of 256 little-endian int32 (magic, version, token count, zeros), then its uint16 ids.
Shard = namedtuple("Shard", "path tokens")
# On the device: B sequences of T tokens and their targets, int64; `document_starts`, int32.
Batch = namedtuple("Batch", "inputs_BT targets_BT cu_seqlens")


def open_shards(pattern: str) -> list[Shard]:
    """The shards that match, sorted by name, each header checked against its file. Raises DataError."""
    shards = list[Shard]()
    for path in map(Path, sorted(glob.glob(pattern))):
        try:
            magic, version, tokens = np.fromfile(path, "<i4", 3).tolist()
            got = (magic, version, path.stat().st_size)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: {error}, expected a token shard; check DATA_PATH") from error
        if got != (expected := (SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES + 2 * max(tokens, 1))):
            raise DataError(f"{path}: magic, version and size are {got}, expected {expected}; fetch it again")
        shards.append(Shard(path, tokens))
    if not shards:
        raise DataError(f"{pattern}: no token shard; set DATA_PATH, see data/README.md, or try `make demo`")
    return shards


def read_tokens(shard: Shard, vocab_size: int = 1 << 16) -> np.ndarray:
    """All tokens of a shard, uint16. DataError where it is no longer as it was opened, or an id too large."""
    if open_shards(glob.escape(str(shard.path))) != [shard]:
        raise DataError(f"{shard.path}: no longer has the {shard.tokens} tokens it had; fetch it again")
    ids = np.fromfile(shard.path, "<u2", offset=SHARD_HEADER_BYTES)
    if ids.max() >= vocab_size:
        at = int(np.argmax(ids >= vocab_size))
        raise DataError(f"{shard.path}, token {at}, byte {SHARD_HEADER_BYTES + 2 * at}: id {ids[at]}, "
                        f"expected below VOCAB_SIZE={vocab_size}")
    return ids


def permutation(config: Any, count: int, *key: int) -> np.ndarray:
    """The numbers below `count` in the order of random words of SEED and one or two more; SHUFFLE=0: in their
    own. The words are Philox4x64-10 itself (Salmon et al., 2011): numpy may change what it makes of them."""
    random = np.random.Philox(key=config.seed, counter=[0, len(key), *key, 0][:4])
    return np.argsort(random.random_raw(count) if config.shuffle else np.zeros(count), kind="stable")


def shard_visits(config: Any, shards: list[Shard], position: int) -> Iterator[Any]:
    """The stream without end: (where it begins, shard, order of its sequences) from the one with `position`.

    Each epoch permutes the shards and, within each, its sequences. Sequence i of a shard is its tokens
    i T … (i + 1) T inclusive; a partial one at the end is skipped. Any position is reached in O(shards).
    """
    length = config.train_seq_len
    usable = [shard for shard in shards if shard.tokens > length]
    if not usable:
        raise DataError(f"no training shard holds TRAIN_SEQ_LEN + 1 = {length + 1} tokens; fetch more")
    sizes = np.array([(shard.tokens - 1) // length for shard in usable])
    for epoch in itertools.count(position // int(sizes.sum())):
        numbers = permutation(config, len(usable), epoch)
        ends = epoch * sizes.sum() + np.cumsum(sizes[numbers])
        coming = np.stack((numbers, ends, sizes[numbers]), axis=1)[ends > position]
        for number, end, size in coming.tolist():
            yield end - size, usable[number], permutation(config, size, epoch, number)


def document_starts(inputs_BT: np.ndarray, config: Any) -> np.ndarray:
    """Where rows and, with DOC_MASK, documents begin, then B T; int32."""
    starts_BT = (inputs_BT == BOS_ID) & config.doc_mask
    starts_BT[:, 0] = True
    return np.append(np.flatnonzero(starts_BT), inputs_BT.size).astype(np.int32)


def hash_sequences(first: int, ids_BT: np.ndarray) -> int:
    """Sum modulo 2**64 over sequences of T + 1 ids: words times odd keys, times an odd word of the place."""
    even_BT = ids_BT[:, :-1] if ids_BT.shape[1] % 2 else np.pad(ids_BT[:, :-1], ((0, 0), (0, 1)))
    keys = np.random.Philox(key=1).random_raw(even_BT.shape[1] // 2 + 1) | np.uint64(1)
    places = np.random.Philox(key=2, counter=first).random_raw(4 * len(ids_BT))[::4] | np.uint64(1)
    sums = np.einsum("bw,w->b", even_BT.view(np.uint32), keys[1:]) + ids_BT[:, -1] * keys[0]
    return int((sums * places).sum(dtype=np.uint64))


class Loader:
    """Micro-batches of one rank, without end: disk → stage → `next_batch`; without threads the same bytes.

    Step k is the sequences [k S, (k + 1) S) of `shard_visits` for any number of ranks; rank r takes the r-th
    equal part of them, MICRO_BATCH_TOKENS at a time. Raises ConfigError if that does not divide.
    """

    def __init__(self, config: Config, shards: list[Shard], run: Run) -> None:
        self.config, self.shards, self.pools = config, shards, list[Any]()
        self.rank, self.world_size, self.device = run.rank, run.world_size, run.device
        copies = config.train_copy_stream and run.device.type == "cuda"
        self.stream = torch.cuda.Stream(run.device) if copies else None
        self.micro_steps = micro_steps_per_step(config, run.world_size)
        self.share = config.train_batch_tokens // config.train_seq_len // run.world_size  # rows of each step
        self.rows = self.share // self.micro_steps
        settings = ("seed", "shuffle", "train_seq_len", "train_batch_tokens")
        names = repr([(shard.path.name, shard.tokens) for shard in shards]).encode()
        self.fingerprint = {name: getattr(config, name) for name in settings}
        self.fingerprint["shards_sha256"] = hashlib.sha256(names).hexdigest()
        self.seek(0)

    def seek(self, step: int) -> None:
        """Go to the start of a step; the stream hash begins at zero."""
        self.close()
        self.index, self.stream_hash, self.waits_ms = step * self.micro_steps, 0, list[float]()
        visits = self._ahead("disk", self._read(self.index), 1)
        self.batches = self._ahead("stage", self._stage(visits, self.index), self.config.train_prefetch_queue)

    def _ahead(self, stage: str, items: Iterator[Any], count: int) -> Iterator[Any]:
        if not self.config.train_prefetch:
            return items
        # A new thread is on GPU 0; leaving `torch.cuda.stream` there would open a context on it.
        on_device: Any = (torch.cuda.set_device, (self.device,)) if self.device.type == "cuda" else ()
        self.pools.append(pool := futures.ThreadPoolExecutor(1, f"loader {stage}", *on_device))
        pending = deque(pool.submit(next, items) for _ in range(count))

        def in_order() -> Iterator[Any]:
            while True:
                pending.append(pool.submit(next, items))
                yield pending.popleft().result(self.config.loader_timeout_seconds)

        return in_order()

    def _position(self, index: int) -> int:
        step, micro_step = divmod(index, self.micro_steps)
        return (step * self.world_size + self.rank) * self.share + micro_step * self.rows

    def _read(self, first: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        length, start = self.config.train_seq_len, self._position(first)
        for begin, shard, order in shard_visits(self.config, self.shards, start):
            tokens = read_tokens(shard, self.config.vocab_size)
            positions = begin + np.arange(len(order))
            mine = (positions >= start) & (positions // self.share % self.world_size == self.rank)
            yield np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length], order[mine]

    def _stage(self, visits: Iterator[Any], first: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        # Nothing is written while it is read: a batch has its own memory. PyTorch reuses pinned memory after
        # the event behind its last copy, device memory when the streams told by `record_stream` are past it.
        # A batch is handed over once its copy is complete, so the stream of the step has nothing to wait for.
        shape, pin = (self.rows, self.config.train_seq_len + 1), self.device.type == "cuda"
        sequences = (sequences_NT[number] for sequences_NT, order in visits for number in order.tolist())
        for index in itertools.count(first):
            ids = torch.empty(shape, dtype=torch.uint16, pin_memory=pin)
            ids_BT = ids.numpy()
            np.concatenate(list(itertools.islice(sequences, self.rows)), out=ids_BT.reshape(-1))
            sequence_hash = hash_sequences(self._position(index), ids_BT)
            starts = torch.from_numpy(document_starts(ids_BT[:, :-1], self.config))
            if self.stream is not None:
                with torch.cuda.stream(self.stream):
                    ids = ids.to(self.device, non_blocking=True)
                    starts = starts.pin_memory().to(self.device, non_blocking=True)
                    self.stream.synchronize()
            yield ids, starts, sequence_hash

    def next_batch(self) -> Batch:
        """The next micro-batch. LoaderError says what failed, where in the stream, and its own traceback."""
        start = time.perf_counter()
        try:
            ids, starts, sequence_hash = next(self.batches)
        except (Exception, SystemExit, GeneratorExit) as error:
            step, last = self.index // self.micro_steps, self._position(self.index) + self.rows - 1
            _, shard, _ = next(shard_visits(self.config, self.shards, last))
            where = f"rank {self.rank}, step {step}, position {last} of the stream, {shard.path}"
            if isinstance(error, futures.TimeoutError):
                faulthandler.dump_traceback(sys.__stderr__ or 2)
                where += f": LOADER_TIMEOUT_SECONDS={self.config.loader_timeout_seconds:g}, stacks on stderr"
            raise LoaderError(f"{where}: {error!r}\n{traceback.format_exc()}") from error
        self.waits_ms.append(1e3 * (time.perf_counter() - start))
        ids, starts = (part.to(self.device, non_blocking=True) for part in (ids, starts))
        for part in (ids, starts) if self.stream is not None else ():
            part.record_stream(torch.cuda.current_stream(self.device))
        torch._dynamo.mark_dynamic(starts, 0)  # or code is compiled anew for every length
        self.index, self.stream_hash = self.index + 1, (self.stream_hash + sequence_hash) % 2**64
        return Batch(ids[:, :-1].long(), ids[:, 1:].long(), starts)

    def state_dict(self, total_hash: int) -> dict[str, Any]:
        """A state for all ranks, as JSON: the steps delivered, and the sum of the ranks' hashes of them."""
        assert self.index % self.micro_steps == 0, "a state is of whole steps"
        return self.fingerprint | {"step": self.index // self.micro_steps, "stream_hash": total_hash}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state ends, on any number of ranks. LoaderError names what would make it differ."""
        for name, value in self.fingerprint.items():
            if state.get(name) != value:
                raise LoaderError(f"state of other data: {name} is {state.get(name)!r}, expected {value!r}")
        self.seek(state["step"])
        self.stream_hash = state["stream_hash"] if self.rank == 0 else 0

    def close(self) -> None:
        """Let the threads end after the item under way; at any time, any number of times."""
        for pool in self.pools:
            pool.shutdown(wait=False, cancel_futures=True)
        self.batches, self.pools = iter(()), []


# ============================================================================================================
# KERNELS — the MLP in Triton beside its plain PyTorch twin; the twin is the definition it must equal.
# ============================================================================================================
LARGE_TILE = dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=3)  # for tensor cores
SMALL_TILE = dict(BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=2)

if triton is not None:

    @triton.jit
    def linear_leaky_square_kernel(  # type: ignore[no-untyped-def]
        a, b, pre, out, M, N, K, slope, BACKWARD: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
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
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(0, K, BLOCK_K):
                acc = tl.dot(a_tiles.load([row, k]), b_tiles.load([column, k]).T, acc, input_precision="ieee")
            halves = tl.split(acc.reshape(BLOCK_M, 2, HALF_N).permute(0, 2, 1))
            for half in tl.static_range(2):
                corner = [row, column + half * HALF_N]
                if BACKWARD:
                    p, factor = pre_tiles.load(corner).to(tl.float32), 2.0 * halves[half]
                else:  # the activation of the rounded P, which is what the backward pass reads
                    pre_tiles.store(corner, halves[half].to(pre.dtype.element_ty))
                    p = halves[half].to(pre.dtype.element_ty).to(tl.float32)
                    factor = p
                value = factor * tl.where(p > 0, p, slope * slope * p)
                out_tiles.store(corner, value.to(out.dtype.element_ty))


@torch.library.custom_op("train_gpt::linear_leaky_square", mutates_args=())
def linear_leaky_square(a_MK: Tensor, b_NK: Tensor, pre_MN: Tensor | None, slope: float) -> Tensor:
    """P = A Bᵀ and phi(P), phi = LeakyReLU(slope)²: (2, M, N). Given P: (A Bᵀ) phi'(P), (1, M, N)."""
    a, b = a_MK.contiguous(), b_NK.contiguous()
    planes = a.new_empty(2 if pre_MN is None else 1, len(a), len(b))
    if any(t.data_ptr() % 16 or t.shape[-1] * t.itemsize % 16 for t in (a, b, planes)):
        raise ValueError(f"TMA reads rows of whole 16 bytes; got {a.shape[1]} and {len(b)} columns")
    operands = a, b, planes[0] if pre_MN is None else pre_MN, planes[-1], len(a), len(b), a.shape[1], slope
    # Triton keeps the allocator of descriptors' scratch memory per thread, and the backward pass has its own.
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=a.device))
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 2
    tile = LARGE_TILE if a.is_cuda and a.itemsize == 2 else SMALL_TILE  # in fp32 large ones spill
    linear_leaky_square_kernel[(programs,)](*operands, BACKWARD=pre_MN is not None, **tile)
    return planes


linear_leaky_square.register_fake(lambda a, b, pre, _: a.new_empty(2 if pre is None else 1, len(a), len(b)))


class FusedMlp(torch.autograd.Function):
    """`mlp_plain`, activation and derivative in GEMM epilogues (PR #1530 after modded-nanogpt PR #197)."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, slope: float) -> Tensor:
        pre_NF, act_NF = linear_leaky_square(x_ND, up_FD, None, slope)
        ctx.save_for_backward(x_ND, up_FD, down_DF, pre_NF, act_NF)
        ctx.slope = slope
        return F.linear(act_NF, down_DF)

    @staticmethod
    def backward(ctx: Any, d_out_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x_ND, up_FD, down_DF, pre_NF, act_NF = ctx.saved_tensors
        (d_pre_NF,) = linear_leaky_square(d_out_ND, down_DF.t(), pre_NF, ctx.slope)
        return d_pre_NF @ up_FD, d_pre_NF.t() @ x_ND, d_out_ND.t() @ act_NF, None


mlp_fused = FusedMlp.apply


def mlp_plain(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, slope: float) -> Tensor:
    """LeakyReLU(slope)² MLP, (N, D) -> (N, D), the three tensors of one dtype; slope 0 is relu²."""
    return F.linear(F.leaky_relu(F.linear(x_ND, up_FD), slope).square(), down_DF)


def both_passes(function: Callable[..., Tensor], inputs: list[Tensor], *rest: Any) -> list[Tensor]:
    """What a function makes of its inputs, and their gradients along the first, which has its shape."""
    out, gradients = torch.autograd.functional.vjp(lambda *x: function(*x, *rest), tuple(inputs), inputs[0])
    return [out, *gradients]


def fastest(setting: str, names: list[str], load: Callable[[str], Any], inputs: list[Tensor],
            exact: list[Tensor], c: Config, run: Run) -> Callable[..., Tensor]:  # fmt: skip
    """The fastest form of those that compile here with output and gradients within 3 % of `exact`, on all
    ranks; logged. load: the form of a name, and what it takes after `inputs`. ConfigError if none is good."""
    forms, found = dict[str, Any](), dict[str, tuple[float, str]]()
    for name in names:
        try:
            forms[name], *rest = load(name)
            eager = not compiling(c, run.device)
            form: Any = torch.compile(forms[name], dynamic=False, fullgraph=True, disable=eager)
            check = functools.partial(both_passes, form, inputs, *rest)
            pairs = zip(check(), exact, strict=True)
            gaps = [(a[: len(b)] - b).abs().max() / b.abs().max() for a, b in pairs]
            error, timed = torch.stack(gaps).max().item(), len(names) > 1 and triton is not None
            ms = triton.testing.do_bench(check, return_mode="median") if timed else 0.0
            found[name] = ms if error <= 0.03 else math.inf, f"error:{error:.1e}" + f" ms:{ms:.3f}" * timed
        except Exception as failure:  # it is not installed, or does not compile or run here
            found[name] = math.inf, f"{type(failure).__name__}: {failure}".splitlines()[0]
    ranks = run.gather(found)
    worst = {name: max(rank[name] for rank in ranks) for name in names}
    tried = " | ".join(f"{name} {text}" for name, (_, text) in worst.items())
    best = min(names, key=lambda name: worst[name][0])
    if worst[best][0] == math.inf:
        where = f"{setting.upper()}={getattr(c, setting)}"
        raise ConfigError(f"{where}: {tried}; set auto, or lower MICRO_BATCH_TOKENS")
    run.log(f"{setting}:{best} tried: {tried}")
    return forms[best]


# ============================================================================================================
# MODEL — weights live in banks, one 3-D parameter per shape; one block serves training, scoring, calibration.
# ============================================================================================================

MATRIX_ROLES = {"qo_bank": "attn", "kv_bank": "attn", "mlp_up_bank": "mlp", "mlp_down_bank": "mlp",
                "token_embedding_VD": "embed"}  # fmt: skip
BANKS = tuple(MATRIX_ROLES)[:4]
Context = tuple[dict[str, tuple[Tensor, ...]], Tensor, Tensor | None]  # parameters by row, angles, documents


def visit_order(config: Config, looping: bool) -> tuple[list[int], list[int]]:
    """Layers in the order they run, split into the U-Net's encoder and decoder half (PR #1493)."""
    layers = list(range(config.num_layers))
    if looping:
        layers[config.loop_start : config.loop_end + 1] *= config.num_loops + 1
    return layers[: len(layers) // 2], layers[len(layers) // 2 :]


def parameter_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter; a feature that is off owns none."""
    layers, width, skips = c.num_layers, c.model_dim, len(visit_order(c, True)[0])
    per_layer = ("attn_scale_LD", "mlp_scale_LD", "resid_keep_LD", "resid_inject_LD")
    lanes = 0 if c.parallel_mode == "gptj" or c.parallel_start_layer < 0 else layers - c.parallel_start_layer
    shapes = {
        "token_embedding_VD": (c.vocab_size, width),
        "qo_bank": (2 * layers, width, width),
        "kv_bank": (2 * layers, c.num_kv_heads * c.head_dim, width),
        "mlp_up_bank": (layers, c.mlp_dim, width),
        "mlp_down_bank": (layers, width, c.mlp_dim),
        **dict.fromkeys(per_layer, (layers, width)),
        "qk_gain_LH": (layers, c.num_heads),
        "skip_weight_SD": (skips, width),
        "skip_gate_SD": (skips * c.skip_gates_enabled, width),
        "attn_gate_LHW": (layers * c.sparse_attn_gate_enabled, c.num_heads, c.gate_window),
        "smear_gate_1W": (int(c.smear_gate_enabled), c.gate_window),
        "smear_scale_1": (int(c.smear_gate_enabled),),
        "lane_mix_P23": (lanes, 2, 3),
    }
    return {name: shape for name, shape in shapes.items() if 0 not in shape}


def rotary_table(length: int, config: Config, device: torch.device | None = None) -> Tensor:
    """Cosines and sines (2, T, 1, rotated/2); for more than the trained length the base grows (PR #549)."""
    rotated, base = config.rope_dims or config.head_dim, config.rope_base
    stretch = max(length, config.train_seq_len) / (config.rope_train_seq_len or config.train_seq_len)
    if stretch > 1 and rotated > 2:
        base *= stretch ** (rotated / (rotated - 2))
    frequencies = base ** (-torch.arange(0, rotated, 2, dtype=torch.float64, device=device) / rotated)
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None, None] * frequencies
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
    """The model. Parameters are fp32 masters, drawn from (SEED, name) and cast to `compute_dtype` at use."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.looping = c, torch.float32, c.num_loops > 0
        self.attend, self.mlp = attention_sdpa, mlp_plain  # `ready_model` may find faster ones
        self.observer: Callable[[str, int, Tensor], None] | None = None
        constants = {"attn_scale_LD": 1.0, "mlp_scale_LD": 1.0, "resid_keep_LD": 1.0, "skip_weight_SD": 1.0,
                     "qk_gain_LH": c.qk_gain_init, "lane_mix_P23": [1.1, 1.0, 1.0]}  # fmt: skip
        uniform = functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5))  # torch's own: ±1/sqrt(inputs)
        draw = nn.init.orthogonal_ if c.matrix_init == "orthogonal" else uniform
        for name, shape in parameter_shapes(c).items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{c.seed} {name}".encode()))
            weights = torch.empty(shape).copy_(torch.tensor(constants.get(name, 0.0)))
            if name == "token_embedding_VD":
                weights.normal_(0.0, c.tied_embed_init_std, generator=generator)
            elif name in ("qo_bank", "kv_bank", "mlp_up_bank"):  # what writes to the residual stream is zero
                for matrix in weights[: c.num_layers] if name == "qo_bank" else weights:
                    draw(matrix, generator=generator)
            self.register_parameter(name, nn.Parameter(weights))

    def forward(self, inputs_BT: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Hidden states (B, T, D) after the last norm. cu_seqlens: as in `Batch`; varlen kernels read it."""
        c, dtype = self.config, self.compute_dtype
        rows = {n: p.to(dtype).unbind(0) for n, p in self.named_parameters() if not n.endswith("_VD")}
        rotary = rotary_table(inputs_BT.size(1), c, inputs_BT.device).to(dtype)
        context = rows, rotary, find_documents(inputs_BT, cu_seqlens, self.attend, c)
        x = F.embedding(inputs_BT, self.get_parameter("token_embedding_VD")).to(dtype)
        if c.smear_gate_enabled:  # never across the start of a row or, with DOC_MASK, a document (PR #1851)
            gate_BT = torch.sigmoid(x[..., : c.gate_window] @ rows["smear_gate_1W"][0])
            gate_BT = gate_BT.masked_fill((inputs_BT == BOS_ID) & c.doc_mask, 0.0) * rows["smear_scale_1"][0]
            x = torch.addcmul(x, gate_BT[..., None], F.pad(x, (0, 0, 1, 0))[:, :-1])
        x0, (encoder, decoder) = rms_norm(x), visit_order(c, self.looping)
        stack: list[Tensor] = []
        lanes = [x0]  # the first one gives and takes the skips
        for visit, layer in enumerate(encoder + decoder, -len(encoder)):
            two = c.parallel_mode == "lanes" and 0 <= c.parallel_start_layer <= layer
            if two != (len(lanes) == 2):
                lanes = lanes * 2 if two else [(lanes[0] + lanes[1]) / 2]
            if visit >= 0 and stack:
                skip, gates = rows["skip_weight_SD"][visit] * stack.pop(), rows.get("skip_gate_SD")
                lanes[0] = torch.lerp(skip, lanes[0], gates[visit].sigmoid()) if gates else lanes[0] + skip
            lanes = self._block(layer, lanes, x0, context)
            stack += lanes[:1] if visit < 0 else []
        hidden = rms_norm(lanes[0] if len(lanes) == 1 else (lanes[0] + lanes[1]) / 2)
        if self.observer is not None:
            self.observer("token_embedding_VD", 0, hidden)
        return hidden

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Scores (N, V) of every next token, before the softcap."""
        return F.linear(hidden_ND, self.get_parameter("token_embedding_VD").to(hidden_ND.dtype))

    def loss_per_token(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Nats (N,), at least fp32, of each target: cross-entropy of softcap·tanh(logits/softcap)."""
        logits_NV, softcap = self.logits(hidden_ND), self.config.logit_softcap
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        capped_NV = softcap * torch.tanh(logits_NV / softcap) if softcap else logits_NV
        return F.cross_entropy(capped_NV, targets_N, reduction="none")

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mean loss of a batch in nats per token: what training minimises."""
        return self.loss_per_token(self(inputs_BT, cu_seqlens).flatten(0, 1), targets_BT.flatten()).mean()

    def _block(self, layer: int, lanes: list[Tensor], x0: Tensor, context: Context) -> list[Tensor]:
        """One visit. Sequential: the MLP reads what attention wrote. Parallel: both read first, the same lane
        (GPT-J, PR #1493) or one each, into which learned weights mix what both wrote (PR #1529)."""
        c, total, (rows, rotary, documents) = self.config, self.config.num_layers, context
        scale, parallel = (layer + 1) ** -0.5 if c.ln_scale else 1.0, 0 <= c.parallel_start_layer <= layer
        mixed = torch.addcmul(rows["resid_keep_LD"][layer] * lanes[0], rows["resid_inject_LD"][layer], x0)
        attn_in = rms_norm(mixed) * scale
        q = F.linear(attn_in, rows["qo_bank"][layer]).unflatten(-1, (c.num_heads, -1))
        k = F.linear(attn_in, rows["kv_bank"][layer]).unflatten(-1, (c.num_kv_heads, -1))
        v = F.linear(attn_in, rows["kv_bank"][total + layer]).unflatten(-1, (c.num_kv_heads, -1))
        q = rotate(rms_norm(q), *rotary) * rows["qk_gain_LH"][layer][:, None]
        y = self.attend(q, rotate(rms_norm(k), *rotary), v, documents)
        if layer >= total - c.xsa_last_n:  # XSA: drop what lies along the value at the own position (PR #287)
            y, own = y.unflatten(2, (c.num_kv_heads, -1)), F.normalize(v, dim=-1, eps=1e-12).unsqueeze(3)
            y = (y - (y * own).sum(-1, keepdim=True) * own).flatten(2, 3)
        if c.sparse_attn_gate_enabled:
            gate = F.linear(attn_in[..., : c.gate_window], rows["attn_gate_LHW"][layer])
            y = y * torch.sigmoid(0.5 * gate)[..., None]  # half as steep (PR #1855)
        attn_out = y.flatten(2)
        attended = rows["attn_scale_LD"][layer] * F.linear(attn_out, rows["qo_bank"][total + layer])
        x = mixed if parallel else mixed + attended
        mlp_in = rms_norm(lanes[1] if len(lanes) == 2 else x) * scale
        up, down, mlp_scale = (rows[name][layer] for name in ("mlp_up_bank", "mlp_down_bank", "mlp_scale_LD"))
        written = mlp_scale * self.mlp(mlp_in.flatten(0, 1), up, down, c.leaky_slope).view_as(x)
        if self.observer is not None:
            hidden = F.leaky_relu(F.linear(mlp_in, up), c.leaky_slope).square()
            seen = {"attn_in": attn_in, "attn_out": attn_out, "mlp_in": mlp_in, "mlp_hidden": hidden}
            for site, value in seen.items():
                self.observer(site, layer, value)
        if len(lanes) == 1:
            return [x + attended + written if parallel else x + written]
        mixes = rows["lane_mix_P23"][layer - c.parallel_start_layer]
        return [m[0] * lane + m[1] * attended + m[2] * written for m, lane in zip(mixes, lanes, strict=True)]


build_model = GPT  # whose constructor draws the weights


def find_documents(ids_BT: Tensor, starts: Tensor | None, attend: Any, config: Config) -> Tensor | None:
    """Who sees whom, as `attend` reads it: a (B, 1, T, T) mask (None: whole rows), or `Batch.cu_seqlens`."""
    if attend is not attention_sdpa:
        return starts_on_device(ids_BT, config) if starts is None else starts
    document_BT = (ids_BT == BOS_ID).cumsum(1)
    same_B1TT = document_BT[:, None, :, None] == document_BT[:, None, None]
    return same_B1TT.tril() if config.doc_mask else None


def starts_on_device(ids_BT: Tensor, config: Config) -> Tensor:
    """`Batch.cu_seqlens` of any ids. It waits for the device, which compiled code cannot."""
    starts = torch.from_numpy(document_starts(ids_BT.cpu().numpy(), config)).to(ids_BT.device)
    torch._dynamo.mark_dynamic(starts, 0)  # or code is compiled anew for every length
    return starts


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """torch's attention: q (B, T, H, E), k and v (B, T, K, E) to (B, T, H, E). On CPU nothing is faster."""
    if mask is not None and q.is_cuda:  # there the fast kernels that take a mask know no grouped heads
        k, v = (t.repeat_interleave(q.size(2) // k.size(2), 2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
    return y.transpose(1, 2)


def load_attention(name: str) -> Callable[..., Tensor]:
    """The kernel of this name. Packages and versions spell causal and grouped heads differently."""
    if name == "sdpa":
        return attention_sdpa
    module = importlib.import_module("flash_attn_interface" if name == "fa3" else "torch.nn.attention.varlen")
    kernel = getattr(module, "flash_attn_varlen_func" if name == "fa3" else "varlen_attn")
    spellings = {"causal": True, "is_causal": True, "window_size": (-1, 0), "enable_gqa": True}
    options = {key: spellings[key] for key in inspect.signature(kernel).parameters if key in spellings}

    def attention_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        if not {"causal", "enable_gqa"} & options.keys():  # torch 2.10: equal numbers of heads only
            k, v = (t.repeat_interleave(q.size(2) // k.size(2), 2) for t in (k, v))
        flat, length = [t.flatten(0, 1) for t in (q, k, v)], q.size(1)
        y: Any = kernel(*flat, starts, starts, length, length, **options)
        return (y[0] if isinstance(y, tuple) else y).view_as(q)

    return attention_varlen


def choose_kernels(c: Config, run: Run) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The fastest attention and MLP here, at the real shape. ConfigError for what is asked for and fails."""
    shape, cuda = (c.micro_batch_tokens // c.train_seq_len, c.train_seq_len), run.device.type == "cuda"
    normal = functools.partial(torch.randn, device=run.device, dtype=run.dtype)
    ids_BT = (torch.rand(shape, device=run.device) < 1 / 256).long() * BOS_ID
    qkv = [normal(*shape, heads, c.head_dim) for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
    mask = find_documents(ids_BT[:2], None, attention_sdpa, c)
    exact = both_passes(attention_sdpa, [t[:2].double() for t in qkv], mask)

    def load(name: str) -> tuple[Any, Any]:
        attend = load_attention(name)
        return attend, find_documents(ids_BT, None, attend, c)

    names = ["fa3", *["varlen"] * c.doc_mask, "sdpa"] if cuda else ["sdpa"]
    attend = fastest("attention", names if c.attention == "auto" else [c.attention], load, qkv, exact, c, run)
    sizes = (c.micro_batch_tokens, c.model_dim), (c.mlp_dim, c.model_dim), (c.model_dim, c.mlp_dim)
    tensors = [normal(*size) for size in sizes]
    mlps = {"plain": (mlp_plain, c.leaky_slope), "kernel": (mlp_fused, c.leaky_slope)}
    names = {"auto": ["plain", "kernel"][: 1 + cuda], "0": ["plain"], "1": ["kernel"]}[c.fused_mlp]
    exact = both_passes(mlp_plain, tensors, c.leaky_slope)
    return attend, fastest("fused_mlp", names, mlps.__getitem__, tensors, exact, c, run)


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


class Optimizer:
    """One step over all parameters, which all ranks take together; the same on any number, to rounding.
    `average`: exponential moving average of all weights (PR #287); with EMA_DECAY=0 it is the weights."""

    def __init__(self, model: GPT, c: Config, rank: int, world_size: int, compiled: bool = False) -> None:
        self.config, self.rank, self.world_size = c, rank, world_size
        self.orthogonalize = torch.compile(orthogonalize, dynamic=False) if compiled else orthogonalize
        self.weights = [parameter.detach() for parameter in model.parameters()]
        self.average = [weight.clone() for weight in self.weights] if c.ema_decay else self.weights
        rest = dict(model.named_parameters())  # Muon takes the banks, AdamW what remains
        self.banks = sorted(map(rest.pop, BANKS), key=Tensor.numel, reverse=True)
        self.momenta = [bank.new_zeros(-(-len(bank) // world_size), *bank.shape[1:]) for bank in self.banks]
        self.small = list(rest.values())  # the embedding first
        groups = [{"params": self.small[:1], "base_lr": c.tied_embed_lr, "weight_decay": c.embed_wd},
                  {"params": self.small[1:], "base_lr": c.scalar_lr, "weight_decay": c.adam_wd}]  # fmt: skip
        self.adam = torch.optim.AdamW(groups, betas=(c.beta1, c.beta2), eps=c.adam_eps, fused=True)

    def _fill(self, bank: Tensor) -> Tensor:  # with zero matrices, so that all ranks hold equally many
        return F.pad(bank, (0, 0, 0, 0, 0, -len(bank) % self.world_size))

    @torch.no_grad()
    def step(self, scale: float, momentum: float, number: int = 0) -> Tensor:
        """Step `number`: update all from their gradients (means of this rank, used up) at `scale` times each
        LR, and the average of weights. Returns the global gradient norm before clipping, on the device."""
        gradients: Any = [[parameter.grad for parameter in group] for group in (self.banks, self.small)]
        c, (slices, small) = self.config, gradients
        if self.world_size > 1:  # means over ranks: own slices of the banks, all on the way at once; the rest
            whole, flat = map(self._fill, slices), nn.utils.parameters_to_vector(small)
            slices = [torch.empty_like(buffer) for buffer in self.momenta]
            pairs = zip(slices, whole, strict=True)
            sent = [dist.reduce_scatter_tensor(*pair, async_op=True) for pair in pairs]
            for handle in [*sent, dist.all_reduce(flat, async_op=True)]:
                handle.wait()
            torch._foreach_div_([*slices, flat], self.world_size)
            nn.utils.vector_to_parameters(flat, small)
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
        for bank, update in self._gather(self._muon_update(*pair, momentum) for pair in pairs):
            factor = max(1.0, bank.size(1) / bank.size(2)) ** 0.5
            bank.mul_(1.0 - lr * c.muon_wd).add_(update, alpha=-lr * factor)
        decay = min(c.ema_decay, (1 + number) / (10 + number))  # less at first: a short run forgets its start
        torch._foreach_lerp_(self.average, self.weights, 1.0 - decay)
        for parameter in (*self.banks, *self.small):
            parameter.grad = None
        return norm

    def _muon_update(self, gradient: Tensor, buffer: Tensor, momentum: float) -> Tensor:
        """Nesterov momentum, row normalisation (MuonEq-R), orthogonalisation."""
        update = gradient.add_(buffer.mul_(momentum).add_(gradient), alpha=momentum)
        if self.config.muon_row_normalize:
            update /= update.norm(dim=-1, keepdim=True).clamp(min=1e-7)
        return self.orthogonalize(update, self.config.muon_backend_steps, self.config.muon_polar_express)

    def _gather(self, slices: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each bank, and what its slices on all ranks make; they travel while the next are made (PR #399)."""
        if self.world_size == 1:
            yield from zip(self.banks, slices, strict=True)
            return
        sent = []
        for mine in slices:
            whole = mine.new_empty(len(mine) * self.world_size, *mine.shape[1:])
            sent.append((whole, dist.all_gather_into_tensor(whole, mine, async_op=True)))
        for bank, (whole, handle) in zip(self.banks, sent, strict=True):
            handle.wait()
            yield bank, whole[: len(bank)]

    def state(self) -> dict[str, Any]:
        """A copy of weights and state, the same whatever the world size; all ranks call it together."""
        state = {"weights": self.weights, "average": self.average, "adam": self.adam.state_dict()}
        return copy.deepcopy(state | {"momenta": [whole for _, whole in self._gather(self.momenta)]})

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned, on any world size."""
        mine = [self._fill(whole).chunk(self.world_size)[self.rank] for whole in state["momenta"]]
        tensors = [*self.weights, *self.average, *self.momenta]
        torch._foreach_copy_(tensors, [*state["weights"], *state["average"], *mine])
        self.adam.load_state_dict(state["adam"])


# ============================================================================================================
# SCHEDULE — pure functions of progress (0 at the first step, 1 at the last), so all machines see one curve.
# ============================================================================================================


def learning_rate_scale(progress: float, step: int, c: Config) -> float:
    """1, then linear to MIN_LR over the warm-down: a share of the run, or WARMDOWN_ITERS mean steps."""
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


def run_progress(elapsed_seconds: float, step: int, c: Config) -> float:
    """Share of the run that is over: of the steps, or of the clock less the reserve if that is more."""
    limit = c.max_wallclock_seconds - c.gptq * c.gptq_reserve_seconds
    return max(step / c.iterations, elapsed_seconds / limit if c.max_wallclock_seconds else 0.0)


# ============================================================================================================
# EVALUATION — every target is scored once, in order, before anything learns from it; a ledger enforces it.
# ============================================================================================================

Score = namedtuple("Score", "nats bits_per_byte scored_tokens bytes")  # nats: mean over targets
Validation = namedtuple("Validation", "tokens bytes_total mark")  # mark: of what compares with no other


class Ledger:
    """Nats of every target of a token stream (target i is token i + 1), each written once, in order; fp64."""

    def __init__(self, tokens: np.ndarray | Tensor) -> None:
        self._tokens, self._nats, self.scored = np.array(tokens), np.full(len(tokens) - 1, np.nan), 0
        self.nats = self._nats.view()
        self.nats.flags.writeable = False

    def record(self, start: int, nats: np.ndarray) -> None:
        """Write the next targets, from `start` on. ValueError for any other, and for what is no number."""
        good = np.isfinite(nats)
        if start != self.scored or start + len(nats) > len(self.nats) or not good.all():
            raise ValueError(f"target {start + int(good.argmin())} is scored, absent, early or no number")
        self._nats[start : start + len(nats)] = nats
        self.scored += len(nats)

    def scored_tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop: all that an update may learn from. ValueError if one is not scored yet."""
        if stop > self.scored + 1:
            raise ValueError(f"tokens {start}..{stop} are not all scored: nothing may learn from them yet")
        return self._tokens[start:stop].copy()

    def score(self, bytes_total: int) -> Score:
        """The result, for text of so many bytes. ValueError when a target was never scored."""
        if left := len(self.nats) - self.scored:
            raise ValueError(f"{left} targets were never scored, the first is {self.scored}")
        nats = float(self.nats.sum())
        return Score(nats / self.scored, nats / math.log(2) / bytes_total, self.scored, bytes_total)


def window_rows(targets: int, context: int, stride: int, begins: np.ndarray, chunk: int) -> list[np.ndarray]:
    """Rows of sliding windows by chunk of targets: first token, first target to score, one after its last.
    Window 0 scores all its targets, others their last `stride`. The last one that holds the document of the
    first unscored target, from `begins` on, stands for those between: they agree to rounding."""
    chunks, stop = [list[tuple[int, int, int]]() for _ in range(0, targets, chunk)], 0
    while stop < targets:
        start, chunk_end = stop, min((stop // chunk + 1) * chunk, targets)
        own, last = (max(0, (target - context) // stride + 1) for target in (start, chunk_end - 1))
        window = max(own, min(int(begins[start]) // stride, last))
        stop = min(window * stride + context, targets)
        chunks[start // chunk].append((window * stride, start, stop))
    return [np.array(rows) for rows in chunks if rows]


def token_bytes(tokens: np.ndarray, config: Config) -> np.ndarray:
    """Bytes of text that each target stands for: from the byte sidecar of the shards, else from the pieces.
    DataError for a foreign tokenizer, or one without a lone space, which over-counts (issue #897)."""
    import sentencepiece
    sidecar, path = f"{find_path(config.data_path)}/fineweb_val_bytes_*.bin", find_path(config.tokenizer_path)
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise DataError(f"TOKENIZER_PATH={path}: no SentencePiece model ({error}); see data/") from error
    counted, lone = bool(glob.glob(sidecar)), pieces.piece_to_id("▁") != pieces.unk_id()
    if pieces.vocab_size() != config.vocab_size or not (lone or counted):
        raise DataError(f"TOKENIZER_PATH={path}: {pieces.vocab_size()} pieces, expected "
                        f"VOCAB_SIZE={config.vocab_size} with a lone space among them")
    if counted:
        counts = np.concatenate([read_tokens(shard) for shard in open_shards(sidecar)])[1 : len(tokens)]
        if len(counts) < len(tokens) - 1:
            raise DataError(f"{sidecar}: {len(counts)} counts for {len(tokens) - 1} targets; export it again")
        return counts.astype(np.int64)
    ids, kinds = list(range(config.vocab_size)), (pieces.is_control, pieces.is_unknown, pieces.is_unused)
    texts, silent = pieces.id_to_piece(ids), np.any([is_kind(ids) for is_kind in kinds], axis=0)
    # A leading space is a byte, but not after a control, unknown or unused id, where decoding drops it.
    leads = np.array([text.startswith("▁") for text in texts]) & ~silent
    lengths = np.where(pieces.is_byte(ids), 1, [len(t.removeprefix("▁").encode()) for t in texts]) * ~silent
    return lengths[tokens[1:]] + (leads[tokens[1:]] & ~silent[tokens[:-1]])


def score_roundtrip(model: GPT, tokens: Any, config: Config, progress: Any = None) -> Ledger:
    """Score non-overlapping windows of EVAL_SEQ_LEN: the cheapest score, with the least context."""
    return score_sliding(model, tokens, replace(config, eval_stride=config.eval_length), progress)


def score_ttt(model: GPT, tokens: Any, config: Config, progress: Any = None) -> Ledger:
    """Sliding window; SGD on each chunk but the last, once scored (PRs #549, #1493), on a copy."""
    learner = copy.deepcopy(model)
    sgd = torch.optim.SGD(learner.parameters(), momentum=config.ttt_momentum)
    return score_sliding(learner, tokens, config, progress, sgd)


@torch.no_grad()
def score_sliding(model: GPT, tokens: Any, config: Config, progress: Any = None, sgd: Any = None) -> Ledger:
    """Score windows that advance by EVAL_STRIDE, each target with nearly EVAL_SEQ_LEN tokens of context."""
    ledger, tokens, context = Ledger(tokens), np.asarray(tokens).astype(np.int32), config.eval_length
    targets, chunk_tokens = len(tokens) - 1, config.ttt_chunk_tokens if sgd else 32 * config.val_batch_size
    begins = np.maximum.accumulate(np.arange(targets) * (tokens[:-1] == BOS_ID) * config.doc_mask)
    chunks = window_rows(targets, context, config.eval_stride, begins, chunk_tokens)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device, batch_rows = next(model.parameters()).device, max(1, config.val_batch_size // context)
    stream = torch.from_numpy(np.pad(tokens, (0, context))).to(device if config.val_prefetch else "cpu")
    windows, fixed_shapes = stream.unfold(0, context + 1, 1), compiling(config, device)
    forward: Any = torch.compile(GPT.forward, dynamic=False, fullgraph=True) if fixed_shapes else GPT.forward
    for index, chunk in enumerate(chunks):
        begin, end = int(chunk[0, 1]), int(chunk[-1, 2])
        nats = torch.zeros(end - begin, dtype=torch.float64, device=device)
        for at in range(rank * batch_rows, len(chunk), world_size * batch_rows):  # for any number alike
            first, start, stop = chunk[at : at + batch_rows].T
            offset = np.repeat(np.arange(len(start)) * context - first, stop - start)
            scored = torch.from_numpy(np.arange(start[0], stop[-1]) + offset).to(device)  # rows for the head
            if fixed_shapes:  # the same rows again, until the batch is full
                first = np.resize(first, batch_rows)
            ids_BT = windows[torch.from_numpy(first)].to(device).long()
            inputs_BT, targets_N = ids_BT[:, :-1], ids_BT[:, 1:].flatten()
            hidden_ND = forward(model, inputs_BT, starts_on_device(inputs_BT, config)).flatten(0, 1)
            found = model.loss_per_token(hidden_ND[scored], targets_N[scored])
            nats[start[0] - begin : stop[-1] - begin] = found
        if world_size > 1:
            dist.all_reduce(nats)
        ledger.record(begin, nats.cpu().numpy())
        if sgd and end < targets:
            share = 0.5 + 0.5 * math.cos(math.pi * index / (len(chunks) - 1))
            sgd.param_groups[0]["lr"] = config.ttt_lr * share
            learn(model, sgd, ledger.scored_tokens(begin, end + 1), config)
        if progress:
            progress(ledger, index, len(chunks))
    return ledger


@torch.enable_grad()
def learn(model: GPT, sgd: torch.optim.SGD, tokens: np.ndarray, config: Config) -> None:
    """TTT_EPOCHS passes over the whole sequences of scored tokens. All ranks call it together."""
    weights, device = list(model.parameters()), next(model.parameters()).device
    loss_of = torch.compile(GPT.loss, dynamic=False) if compiling(config, device) else GPT.loss
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    length, stream = config.eval_length, torch.from_numpy(tokens.astype(np.int64))
    for batch_NT in stream.unfold(0, length + 1, length).split(config.ttt_batch_seqs) * config.ttt_epochs:
        share = len(batch_NT[rank::world_size]) / len(batch_NT)  # 0: any row will do
        rows_NT = batch_NT[rank % len(batch_NT) :: world_size].to(device)
        inputs_NT, targets_NT = rows_NT[:, :-1], rows_NT[:, 1:]
        sgd.zero_grad()
        loss = loss_of(model, inputs_NT, targets_NT, starts_on_device(inputs_NT, config))
        (loss * share).backward()
        for weight in weights if world_size > 1 else []:
            dist.all_reduce(weight.grad)
        nn.utils.clip_grad_norm_(weights, config.ttt_grad_clip or math.inf)
        sgd.step()


def evaluate(model: GPT, config: Config, run: Run, validation: Validation, weights: str) -> dict[str, Score]:
    """All scores of reloaded weights, each with its final line. `weights`: their stored form, like int6."""
    scorers = {"roundtrip": score_roundtrip, "sliding_window": score_sliding, "legal_ttt": score_ttt}
    scores, start = dict[str, Score](), 0.0

    def progress(ledger: Ledger, chunk: int, chunks: int) -> None:
        if chunk % (config.val_progress_log_every or -(-chunks // 20)) == 0:
            share, mean = ledger.scored / len(ledger.nats), ledger.nats[: ledger.scored].mean()
            left = (time.perf_counter() - start) * (1 / share - 1)
            run.log(f"val_progress:{name} {share:.0%} partial_mean_loss:{mean:.4f} "
                    f"tokens_seen:{ledger.scored} eta:{left:.0f}s")

    for name, scorer in itertools.compress(scorers.items(), (True, config.eval_stride, config.ttt_enabled)):
        label = name if name == "legal_ttt" else f"final_{weights}_{name}"
        with run.phase(f"eval_{name}"):
            start = time.perf_counter()
            ledger = scorer(model, validation.tokens, config, progress)
        score, seconds = ledger.score(validation.bytes_total), run.phases[f"eval_{name}"]
        run.log(f"{label} val_loss:{score.nats:.4f} val_bpb:{score.bits_per_byte:.4f} "
                f"eval_time:{1e3 * seconds:.0f}ms{validation.mark}")
        run.log(f"{label}_exact val_loss:{score.nats:.8f} val_bpb:{score.bits_per_byte:.8f} "
                f"scored_tokens:{score.scored_tokens} val_bytes:{score.bytes}{validation.mark}",
                "final", name=f"{label}_exact", eval_seconds=seconds, **score._asdict())  # fmt: skip
        scores[name] = score
    return scores


# ============================================================================================================
# ARTIFACT — code and file together fill ARTIFACT_BYTES_MAX; what is scored is what the file gives back.
# ============================================================================================================

# What the matrices of a bank multiply; two sites: one run of layers for each. The head's site has its name.
HESSIAN_SITES = {"qo_bank": ["attn_in", "attn_out"], "kv_bank": ["attn_in", "attn_in"],
                 "mlp_up_bank": ["mlp_in"], "mlp_down_bank": ["mlp_hidden"]}  # fmt: skip
Hessians = dict[tuple[str, int], Tensor]  # (site, layer) -> (C, C) fp32


@torch.no_grad()
def collect_hessians(model: GPT, batches: Iterable[Batch], world_size: int) -> Hessians:
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


def quantizer(name: str, parameter: Tensor, hessians: Hessians, config: Config) -> Callable[..., list]:
    """GPTQ of a parameter, as a function of step and levels (Frantar et al., arXiv 2210.17323; PR #1394):
    codes (R, N * C) within ±levels, and exponents (R, N), in eighths of an octave, of the fp16 scales next to
    step * spread (deviation of a row; maximum if it is no matrix). Columns go by descending diagonal of the
    Hessian, those to come make up for what one loses in rounding; without it: to nearest. ArtifactError."""
    weights_NRC = parameter.detach().view((1, 1, *parameter.shape)[-3:])
    spreads_NR = weights_NRC.std(dim=2) if name in MATRIX_ROLES else weights_NRC.abs().amax(dim=2)
    sites = HESSIAN_SITES.get(name, [name])
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
    used_NRC = weights_NRC.masked_fill((diagonal_NC == 0)[:, None], 0.0).take_along_dim(order_NC[:, None], 2)

    def gptq(step: float, levels: float) -> list[np.ndarray]:
        exponents_NR = (8 * (spreads_NR * step).clamp(min=1e-9).log2()).round().clamp(-127, 127).char()
        scales_NR, work_NRC = torch.exp2(exponents_NR / 8).half().float(), used_NRC.clone()
        for c in range(work_NRC.size(2)):
            codes_NR = (work_NRC[:, :, c] / scales_NR).clamp(-levels, levels).round()
            errors_NR = (work_NRC[:, :, c] - codes_NR * scales_NR) / upper_NCC[:, c, c, None]
            work_NRC[:, :, c:].baddbmm_(errors_NR[:, :, None], upper_NCC[:, c, None, c:], alpha=-1)
            work_NRC[:, :, c] = codes_NR
        codes_NRC = work_NRC.take_along_dim(order_NC.argsort(dim=1)[:, None], 2).char()
        return [codes_NRC.transpose(0, 1).flatten(1).cpu().numpy(), exponents_NR.T.cpu().numpy()]

    return gptq


# The coder: rANS over arrays (rows, columns) of integers, row by row. A row's frequencies come from the rows
# before it, in one table per class of column (by its mean |code| so far): no table is stored, none can be
# forged, and columns of different spread do not share one. Integers, and float operations that IEEE 754
# rounds exactly, give the same bytes on every machine. (Duda, arXiv 1311.2540)
SLOTS = 1 << 15  # of a table; lane states have 17 to 32 bits, and move in words of 16
CLASS_EDGES = np.array([(4 + quarter) << octave for octave in range(12) for quarter in range(4)])  # 256ths


def code_rows(array: np.ndarray, peak: int, lanes: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Parts of an array of symbols (integers + peak), to be read or written before the next; where the tables
    of their columns begin; frequencies and first slots of all symbols, table after table."""
    means = np.append(2.0, CLASS_EDGES * 1.1)[:, None] / 256  # about the middle of each class
    bell = 1.0 / (1.0 + np.arange(-peak, peak + 1) ** 2 / (6.0 * means * means + 1.5))
    # A first guess with tails heavier than Gaussian; in products, as powers are not rounded alike everywhere.
    counts, size = np.floor(64.0 * bell * bell * bell * bell).astype(np.int64), 2 * peak + 1
    sums_256ths = np.full(array.shape[1], 2 * 256 * peak // 6)  # as if two rows came before
    for row, symbols in enumerate(array):
        frequencies = 1 + counts * (SLOTS - size) // counts.sum(1, keepdims=True)
        frequencies[range(len(counts)), counts.argmax(1)] += SLOTS - frequencies.sum(1)
        starts = frequencies.cumsum() - frequencies.ravel()
        tables = size * np.searchsorted(CLASS_EDGES, sums_256ths // (2 + row), side="right")
        for left in range(0, len(symbols), lanes):
            yield symbols[left : left + lanes], tables[left : left + lanes], frequencies.ravel(), starts
        counts += np.bincount(tables + symbols, minlength=counts.size).reshape(counts.shape)
        sums_256ths += np.abs(symbols - peak) << 8


def encode(arrays: list[np.ndarray]) -> bytes:
    """Bytes of integer arrays (rows, columns) with values in [-127, 127]; each lane costs four more."""
    lanes, parts, words = min(16 + sum(array.size for array in arrays) // 16_384, 1024), [], []
    peaks = bytes(int(np.abs(array).max(initial=0)) for array in arrays)
    states = np.full(lanes, 1 << 16, np.int64)
    for array, peak in zip(arrays, peaks, strict=True):
        array = array.astype(np.int64) + peak
        for symbols, tables, frequencies, starts in code_rows(array, peak, lanes):
            chosen = tables + symbols
            parts.append((frequencies[chosen].astype(np.uint16), (starts[chosen] % SLOTS).astype(np.uint16)))
    for frequencies, starts in reversed(parts):
        state = states[: len(starts)]
        full = state >> 17 >= frequencies
        words.append(state[full].astype("<u2").tobytes())
        quotients, rests = np.divmod(np.where(full, state >> 16, state), frequencies)
        state[:] = quotients * SLOTS + rests + starts
    return b"".join([peaks, lanes.to_bytes(2, "little"), states.astype("<u4").tobytes(), *reversed(words)])


def decode(data: bytes, shapes: list[tuple[int, int]]) -> list[np.ndarray]:
    """Inverse of `encode`. ValueError where the data end early, late, or in the wrong state."""
    peaks, head, arrays, used = data[: len(shapes)], data[len(shapes) :], [], 0
    lanes = int.from_bytes(head[:2], "little")
    states = np.frombuffer(head, "<u4", lanes, 2).astype(np.int64)
    words = np.frombuffer(head[2 + 4 * lanes :], "<u2").astype(np.int64)
    for shape, peak in zip(shapes, peaks, strict=True):
        array = np.empty(shape, np.int64)
        for symbols, tables, frequencies, starts in code_rows(array, peak, lanes):
            state = states[: len(symbols)]
            slots = starts[tables] + state % SLOTS
            chosen = starts.searchsorted(slots, side="right") - 1
            symbols[:] = chosen - tables
            state[:] = frequencies[chosen] * (state // SLOTS) + slots - starts[chosen]
            low = np.flatnonzero(state < 1 << 16)
            state[low] = (state[low] << 16) + words[used : used + len(low)]
            used += len(low)
        arrays.append((array - peak).astype(np.int8))
    if used != len(words) or (states != 1 << 16).any():
        raise ValueError("the words do not end where the arrays end")
    return arrays


MULTIPLIERS = 2.0 ** np.arange(-7, 12, 1 / 2048)  # of configured steps; a notch moves 36 M weights by 2 kB


def step_of(name: str, config: Config, multiplier: Any) -> tuple[Any, Any]:
    """Step of a bank's codes in spreads of a row, and steps to the clip, of a multiplier or an array of them:
    the configured step times it, from that of 8 bits up to 2.0. What is no matrix has 8 bits always."""
    role = MATRIX_ROLES.get(name)
    if not role:
        return 1 / 120, 127.0
    clip = getattr(config, f"{role}_clip_sigmas")
    configured = clip / (2 ** ((config.embed_bits if role == "embed" else config.matrix_bits) - 1) - 1)
    step = np.clip(multiplier * configured, clip / 127, max(configured, 2.0))
    return step, clip / step


def expected_bytes(config: Config, multiplier: Any) -> Any:
    """Bytes of the file, about: a thousand, and ½·log2(1 + 2πe/step²) bits per weight, as if Gaussian."""
    total = 1000.0
    for name, shape in parameter_shapes(config).items():
        step, _ = step_of(name, config, multiplier)
        total += math.prod(shape) * np.log2(1 + 2 * math.pi * math.e / step**2) / 16
    return total


def fill_budget(config: Config, budget: int, quantized: Callable[[float], Any]) -> tuple[Any, str]:
    """The finest file found within `budget` bytes, and how. `quantized` makes one for a multiplier of steps.
    The line through the last two passes, expected against true bytes, leads to the next multiplier, between
    those too fine and too coarse: for ten passes, or until 0.05 % of ARTIFACT_BYTES_MAX at most are left."""
    multipliers = MULTIPLIERS if config.rate_control else np.ones(1)
    expected, least = expected_bytes(config, multipliers), budget - 5e-4 * config.artifact_bytes_max
    finest, coarsest, best, passes = 0, len(multipliers) - 1, b"", 0
    aim = wanted = (budget + least) / 2
    before = 0.0, 0  # expected and true bytes of the last pass
    while finest <= coarsest and (not best or (len(best) < least and passes < 10)):
        at = int(np.clip(np.searchsorted(-expected, -wanted), finest, coarsest))
        data, passes = quantized(multipliers[at]), passes + 1
        slope = (expected[at] - before[0]) / (len(data) - before[1] or 1)
        wanted = expected[at] + (aim - len(data)) * np.clip(slope, 0.2, 2.0)  # sizes are noisy
        before = expected[at], len(data)
        if len(data) > budget:
            finest = at + 1
        else:
            coarsest, best, chosen = at - 1, data, multipliers[at]
    if not best:
        raise ArtifactError(f"{len(data) - budget} bytes above ARTIFACT_BYTES_MAX; lower MODEL_DIM")
    note = " unused: 8 bits cannot fill it" if chosen == MULTIPLIERS[0] and len(best) < least else ""
    return best, f"step_multiplier:{chosen:.4f} passes:{passes}{note}"


MAGIC, HEAD = b"\x89PGA\r\n\0\2", struct.Struct("<8s3I")  # with version; size of config, both CRC-32


def write_artifact(model: nn.Module, config: Config, hessians: Hessians, run: Run, inputs: Inputs) -> None:
    """Quantize, code and write `model` so that code and file fill ARTIFACT_BYTES_MAX, with RATE_CONTROL=0 as
    bits and clips are given; rank 0 alone calls it. ArtifactError, and no file, when it does not fit."""
    banks = {name: quantizer(name, p, hessians, config) for name, p in model.named_parameters()}
    header = {"config": config.as_env("LOGIT_SOFTCAP"), "tokenizer_sha256": inputs.hashes["tokenizer"]}
    about = zlib.compress(json.dumps(header).encode(), 9)

    def quantized(multiplier: float) -> bytes:
        arrays = (gptq(*step_of(name, config, multiplier)) for name, gptq in banks.items())
        weights = encode(list(itertools.chain(*arrays)))
        return HEAD.pack(MAGIC, len(about), zlib.crc32(about), zlib.crc32(weights)) + about + weights

    budget = config.artifact_bytes_max - len(inputs.files["train_gpt.shipped.py"])
    data, how = fill_budget(config, budget, quantized)
    write_atomically(run.path("model.bin"), data)
    run.log(f"artifact_bytes:{len(data)} budget_bytes:{budget} {how}")


def load_artifact(path: Path) -> tuple[GPT, dict[str, Any]]:
    """Model on the CPU, and what its file says: config (the model's settings), tokenizer_sha256, bits of each
    bank, label (int6: the widest block matrices), bytes, sha256, sections. Nothing is executed, memory stays
    in proportion to the file. ArtifactError with section and reason, and nothing else, whatever the bytes."""
    section = "head"
    try:
        data = path.read_bytes()
        magic, size, *checksums = HEAD.unpack_from(data)
        if magic != MAGIC:
            raise ValueError("not an artifact, or of another version; expected the model.bin of a run")
        parts = {"config": data[HEAD.size : HEAD.size + size], "weights": data[HEAD.size + size :]}
        for section, checksum in zip(parts, checksums, strict=True):
            if zlib.crc32(parts[section]) != checksum:
                raise ValueError("truncated or damaged; copy the file again")
        section = "config"
        about = json.loads(zlib.decompressobj().decompress(parts["config"], 1 << 16))
        if set(about["config"]) != set(Config().as_env("LOGIT_SOFTCAP")) or "tokenizer_sha256" not in about:
            raise ValueError("fields are missing or unknown")
        config = Config.from_env({**about["config"], "EVAL_STRIDE": "0", "TTT_ENABLED": "0"})
        shapes = parameter_shapes(config)
        entries = sum(map(math.prod, shapes.values())) + config.train_seq_len * config.head_dim
        if entries > min(1 << 28, 1024 * len(data)):
            raise ValueError(f"{entries} weights and angles are more than such a file can hold")
        section, banks = "weights", [(1, 1, *shape)[-3:] for shape in shapes.values()]
        arrays = decode(parts["weights"], [shape for n, r, c in banks for shape in ((r, n * c), (r, n))])
        model = GPT(config)
        both = zip(model.parameters(), banks, arrays[::2], arrays[1::2], strict=True)
        for parameter, (n, r, c), codes, exponents in both:
            scales_RN1 = torch.exp2(torch.from_numpy(exponents)[:, :, None] / 8).half().float()
            weights_RNC = torch.from_numpy(codes).view(r, n, c) * scales_RN1
            parameter.data.copy_(weights_RNC.transpose(0, 1).reshape(parameter.shape))
    except Exception as error:  # whatever the bytes are
        raise ArtifactError(f"{path}: section {section}: {error}") from error
    peaks = dict(zip(shapes, parts["weights"][::2], strict=False))  # the largest code of each parameter
    about["bits"] = {name: peak.bit_length() + 1 for name, peak in peaks.items() if name in MATRIX_ROLES}
    about["label"] = f"int{max(about['bits'][name] for name in BANKS)}"
    about["sections"] = {name: len(part) for name, part in parts.items()}
    return model, about | {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


WRAPPER = """# -*- coding: latin-1 -*-
import linecache,lzma
s=lzma.decompress('''%s'''.encode("latin-1")).decode()
n=__file__+" (unpacked)"
linecache.cache[n]=len(s),None,s.splitlines(True),n
exec(compile(s,n,"exec"))
"""
ESCAPES = str.maketrans({"\\": r"\\", "\0": r"\x00", "\r": r"\r", "'": r"\'"})


@functools.cache
def shipped_code(source: bytes, mode: str) -> bytes:
    """The script in the form that CODE_BYTES=`mode` ships and counts; wrapped: no comments, no docstrings."""
    if mode == "raw" or source.startswith(WRAPPER.split("%s")[0].encode()):  # shipped already
        return source
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    packed = lzma.compress(ast.unparse(tree).encode(), lzma.FORMAT_ALONE, preset=9 | lzma.PRESET_EXTREME)
    return (WRAPPER % packed.decode("latin-1").translate(ESCAPES)).encode("latin-1")


# ============================================================================================================
# CHECKPOINT — a resumed run goes on as if nothing had happened; half a file never replaces a whole one.
# ============================================================================================================

CHECKPOINT = "checkpoint.pt"


def save_checkpoint(training: Training) -> None:
    """Put the state in the place of the checkpoint before, from a thread. All ranks call it."""
    run, state = training.run, training.state()

    def write() -> None:
        try:
            if not all(weight.isfinite().all() for weight in state["optimizer"]["weights"]):
                raise ConfigError("its weights are not finite")
            torch.save(state, buffer := io.BytesIO())
            write_atomically(run.path(CHECKPOINT), buffer.getvalue())
            run.log(f"checkpoint:{run.path(CHECKPOINT)} step:{state['step']}")
        except ConfigError as error:
            run.log(f"warning: no checkpoint of step {state['step']}, none is replaced: {error}")

    training.writer.join()
    training.writer = threading.Thread(target=write if run.rank == 0 else None, name="checkpoint")
    training.writer.start()


def load_checkpoint(training: Training) -> None:
    """Take up the state of the run that RESUME names, on any world size. Raises ConfigError."""
    run, path = training.run, training.run.path(CHECKPOINT)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)  # executes nothing
    except Exception as error:  # whatever the bytes are
        raise ConfigError(f"RESUME: {path} cannot be read ({error}); start a new run") from error
    for name, ours in training.config.as_env("MIN_LR").items():
        if (theirs := state["config"].get(name)) != ours:
            raise ConfigError(f"{name}={ours}, it was {theirs}; resume with CONFIG={run.path('config.env')}")
    training.load_state(state)
    run.log(f"resumed:{run.directory} step:{training.step} train_time:{1e3 * state['seconds']:.0f}ms")


# ============================================================================================================
# TRAIN — steps under a clock that rank 0 reads for all, so that all ranks take the same ones and stop as one.
# ============================================================================================================


class Training:
    """Model, optimizer, loader and clock of a run: everything that a step touches."""

    def __init__(self, config: Config, run: Run, inputs: Inputs) -> None:
        self.config, self.run, self.validation = config, run, inputs.validation
        self.model, compiled = ready_model(build_model(config), config, run), compiling(config, run.device)
        self.loss = torch.compile(GPT.loss, dynamic=False, fullgraph=True) if compiled else GPT.loss
        self.optimizer = Optimizer(self.model, config, run.rank, run.world_size, compiled)
        every = config.training_timing_breakdown * config.training_timing_every
        self.timer = StepTimer(every, cuda=run.device.type == "cuda")
        self.loader = Loader(config, inputs.train_shards, run)
        self.step, self.unread = 0, list[tuple[int, float, Tensor, Any]]()
        self.writer = threading.Thread()  # of the next one; the first does nothing, as any can be joined
        self.writer.start()
        self.started = time.perf_counter()  # later by what is not counted

    seconds = property(lambda self: time.perf_counter() - self.started)  # of training, without validation

    def state(self) -> dict[str, Any]:
        """A copy of all that training has become, for any world size; all ranks call it together."""
        state = {"step": self.step, "seconds": self.seconds, "config": self.config.as_env()}
        stream_hash = sum(self.run.gather(self.loader.stream_hash)) % 2**64
        return state | {"loader": self.loader.state_dict(stream_hash), "optimizer": self.optimizer.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Become what `state` returned. LoaderError where that is not possible with this data."""
        self.loader.load_state_dict(state["loader"])
        self.optimizer.load_state(state["optimizer"])
        self.step, self.started = state["step"], time.perf_counter() - state["seconds"]

    def close(self) -> None:
        """End all threads, from any state."""
        self.loader.close()
        self.writer.join()


def ready_model(model: GPT, config: Config, run: Run) -> GPT:
    """Move a model to this rank's device and give it the fastest kernels that pass their checks."""
    torch.set_float32_matmul_precision("high" if run.device.type == "cuda" else "highest")
    model.to(run.device)
    model.compute_dtype = run.dtype
    model.attend, model.mlp = choose_kernels(config, run)
    return model


def train_step(training: Training, progress: float) -> Tensor:
    """One optimizer step. Returns this rank's mean loss and the gradient norm (2,), still on the device."""
    config, timer, loader, model = training.config, training.timer, training.loader, training.model
    model.looping, total = loop_is_on(progress, config), torch.zeros((), device=training.run.device)
    timer.begin(training.step if training.run.phase_name == "train" else -1)
    for _ in range(loader.micro_steps):
        batch = loader.next_batch()
        timer.lap("batch")
        loss = training.loss(model, batch.inputs_BT, batch.targets_BT, batch.cu_seqlens) / loader.micro_steps
        timer.lap("forward")
        loss.backward()
        timer.lap("backward")
        total += loss.detach()
    scale = learning_rate_scale(progress, training.step, config)
    norm = training.optimizer.step(scale, muon_momentum(progress, training.step, config), training.step)
    timer.lap("optimizer")
    if line := timer.line():
        training.run.log(line)
    return torch.stack([total, norm])


def warm_up(training: Training) -> None:
    """Run WARMUP_STEPS real steps of each graph, to compile; then undo it exactly."""
    config, run, before = training.config, training.run, training.state()
    for progress in (0.0, 1.0) if loop_is_on(1.0, config) > loop_is_on(0.0, config) else (1.0,):
        for number in range(1, config.warmup_steps + 1):
            train_step(training, progress)
            run.log(f"warmup_step:{number}/{config.warmup_steps} looping:{training.model.looping:d}")
    training.load_state(before)


def train(training: Training) -> None:
    """Step until the clock or ITERATIONS is over. A signal ends the process, once all is saved."""
    config, run, seconds = training.config, training.run, training.run.gather(training.seconds)[0]
    step_seconds = seconds / max(training.step, 1)  # of a resumed run: its mean
    save_every, look_every = config.checkpoint_every_seconds or math.inf, config.val_loss_every or math.inf
    behind = 2 if run.device.type == "cuda" else 0  # steps that a device may be behind the host
    while True:
        message = torch.tensor([training.seconds * (run.rank == 0), run.stop_signal], dtype=torch.float64)
        if run.world_size > 1:  # rank 0's clock and any rank's signal, on the host: no device is asked
            dist.all_reduce(message, dist.ReduceOp.MAX)
        step, before, (seconds, caught) = training.step, seconds, message.tolist()
        step_seconds = max(0.9 * step_seconds, seconds - before)
        over = caught or run_progress(seconds + (2 + behind) * step_seconds, step, config) >= 1
        save = seconds // save_every > before // save_every
        look = step > 0 and step % look_every == 0
        read_results(training, leave=0 if over or save or look else behind)
        if over:
            break
        if save:
            save_checkpoint(training)
        if look:
            validate(training, f"step:{step}/{config.iterations}")
        progress = run_progress(seconds, step, config)
        results = train_step(training, progress).to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if behind else None
        training.step += 1
        training.unread.append((training.step, progress, results, copied))
    run.sync()
    if caught or config.checkpoint_every_seconds:  # what follows can be repeated from here
        save_checkpoint(training)
    if caught:
        training.writer.join()
        run.gather(None)  # torchrun kills the others when a rank has left
        run.log(f"stopped by signal {caught:.0f}; continue with RESUME={run.directory}")
        os._exit(128 + int(caught))
    if step < config.iterations:
        run.log(f"stopping_early: wallclock_cap train_time:{1e3 * training.seconds:.0f}ms "
                f"step:{step}/{config.iterations}")


def read_results(training: Training, leave: int) -> None:
    """Check and log all steps but the last `leave`, for which the host would wait. FloatingPointError."""
    config, run, tokens = training.config, training.run, training.config.train_batch_tokens
    while len(training.unread) > leave:
        step, progress, results, copied = training.unread.pop(0)
        if copied is not None:
            copied.synchronize()
        loss, norm = results.tolist()
        if not math.isfinite(loss + norm):
            training.writer.join()
            saved = path if (path := run.path(CHECKPOINT)).exists() else "none"
            raise FloatingPointError(
                f"step {step}, batch at token {tokens * (step - 1)}: train_loss {loss}, grad_norm {norm}, "
                f"last good checkpoint: {saved}; lower MATRIX_LR, SCALAR_LR, TIED_EMBED_LR or GRAD_CLIP_NORM")
        if step > 10 and step % config.train_log_every:
            continue
        loss, seconds = sum(run.gather(loss)) / run.world_size, training.seconds
        p50, p99, most = np.percentile(training.loader.waits_ms or [0.0], [50, 99, 100]).tolist()
        training.loader.waits_ms.clear()
        scale = learning_rate_scale(progress, step - 1, config)
        left = seconds / run_progress(seconds, step, config) - seconds
        run.log(f"step:{step}/{config.iterations} train_loss:{loss:.4f} train_time:{1e3 * seconds:.0f}ms "
                f"step_avg:{1e3 * seconds / step:.2f}ms tok_s:{tokens * step / seconds:.0f} data_wait_ms:"
                f"{p50:.2f}/{p99:.2f}/{most:.2f} lr_scale:{scale:.4f} grad_norm:{norm:.3f} eta:{left:.0f}s",
                "train", step=step, train_loss=loss, train_time_ms=1e3 * seconds, tokens=tokens * step,
                grad_norm=norm, progress=progress, data_wait_max_ms=most)  # fmt: skip


def validate(training: Training, label: str) -> None:
    """Stop the clock, and score the current weights without overlap: a diagnostic, never the result."""
    training.run.sync()
    run, data, start = training.run, training.validation, time.perf_counter()
    score = score_roundtrip(training.model, data.tokens, training.config).score(data.bytes_total)
    training.started += (seconds := time.perf_counter() - start)
    training.timer.val_ms, trained_ms = 1e3 * seconds, 1e3 * training.seconds
    run.log(f"{label} val_loss:{score.nats:.4f} val_bpb:{score.bits_per_byte:.4f} "
            f"train_time:{trained_ms:.0f}ms step_avg:{trained_ms / max(training.step, 1):.2f}ms{data.mark}",
            "val", label=label, step=training.step, val_loss=score.nats, val_bpb=score.bits_per_byte,
            train_time_ms=trained_ms, val_ms=training.timer.val_ms)  # fmt: skip


def finish_training(training: Training) -> Hessians:
    """Take the averaged weights, collect Hessians while the clock allows, and validate once."""
    config, run, hessians = training.config, training.run, dict[tuple[str, int], Tensor]()
    spare, seconds = 0.1 * config.gptq_reserve_seconds, [training.seconds]

    def batches() -> Iterator[Batch]:  # the loader goes on where training stopped: training shards only
        for number in range(-(-config.gptq_calibration_batches // run.world_size)):
            run.sync()
            seconds.append(run.gather(training.seconds)[0])
            if number and 0 < config.max_wallclock_seconds < 2 * seconds[-1] - seconds[-2] + spare:
                return  # one more like the last would end too late
            yield training.loader.next_batch()

    torch._foreach_copy_(training.optimizer.weights, training.optimizer.average)
    training.model.looping = loop_is_on(1.0, config)
    if config.gptq:
        hessians = collect_hessians(training.model, batches(), run.world_size)
    validate(training, "DIAGNOSTIC post_ema" if config.ema_decay else "DIAGNOSTIC final")
    run.log(f"gptq:collected {len(hessians)} Hessians; with training {training.seconds:.2f}s")
    run.log(f"peak memory allocated: {torch.cuda.max_memory_allocated() >> 20} MiB "
            f"reserved: {torch.cuda.max_memory_reserved() >> 20} MiB")
    return hessians


# ============================================================================================================
# main — a table of contents: check, prepare, warm up, train, ship, reload, evaluate, report.
# ============================================================================================================

NOT_TRAINED = {"steps": 0, "tokens": 0, "train_seconds": 0.0, "stream_hash": "0" * 16}  # by an EVAL_ONLY run
# What a run reads, checked. files: the script, as it is and as it is counted, and the settings; hashes: by
# which two runs know that they read the same.
Inputs = namedtuple("Inputs", "train_shards validation files hashes micro_steps estimate")


def main() -> int:
    """Do what the environment asks for. Exit status 0: finished; 1: an error, told in one message."""
    if {"-h", "--help"} & set(sys.argv):
        tell(f"{__doc__ or ''}\nVariables, also as KEY=VALUE lines of a file named by CONFIG:\n", sys.stdout)
        for f, (name, value) in zip(fields(Config), Config().as_env().items(), strict=True):
            setting, among = f"{name}={value}", " | ".join(f.metadata["among"])
            tell(f"  {setting:<48} {f.metadata['meaning']}{among and f' [{among}]'}", sys.stdout)
        return 0
    run = None
    try:
        config = Config.from_env(os.environ)
        run = Run(config, os.environ)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, run.leave)
        return whole_run(config, run)
    except (ConfigError, DataError, LoaderError, ArtifactError, FloatingPointError) as error:
        message = f"error: {error}"
    except torch.cuda.OutOfMemoryError as error:
        message = f"error: out of GPU memory; lower MICRO_BATCH_TOKENS or VAL_BATCH_SIZE ({error})"
    except Exception:
        message = traceback.format_exc().strip()
        if run and any(sign in message for sign in ("gloo/", "pair closure", "DistBackendError")):
            tell(f"rank {run.rank}: ends, as another rank has, or is not heard of", sys.stderr)
            return 1
    message = f"rank {run.rank}: {message}" if run and run.world_size > 1 else message
    tell(message, sys.stderr)
    if run:
        record = {"message": message, "timestamp": int(time.time()) - 1}  # torchrun ends with the earliest
        tell(message, run.path("log.txt"))
        tell(json.dumps(record), Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)))
    return 1


def whole_run(config: Config, run: Run) -> int:
    """Train and ship, unless EVAL_ONLY; then reload the artifact, and score nothing but what it holds."""
    loaded = load_artifact(Path(config.eval_only)) if config.eval_only else None
    if loaded:  # the artifact knows its model, and the tokenizer
        config = Config.from_env({**config.as_env(), **loaded[1]["config"]})
    with run.phase("setup"):
        inputs = preflight(config, run, loaded[1]["tokenizer_sha256"] if loaded else "")
        open_run(config, run, inputs)
    trained = NOT_TRAINED if config.eval_only else train_and_ship(config, run, inputs)
    with run.phase("reload"):
        model, artifact = loaded or load_artifact(run.path("model.bin"))
        ready_model(model, config, run)
    scores = evaluate(model, config, run, inputs.validation, artifact["label"])
    summarize(config, run, inputs, trained, artifact, scores)
    return 0


def train_and_ship(config: Config, run: Run, inputs: Inputs) -> dict[str, Any]:
    """Train, and write the artifact: rank 0 does, all wait. Returns what training came to."""
    with run.phase("setup"):
        training = Training(config, run, inputs)
    with contextlib.closing(training):
        if config.resume:
            load_checkpoint(training)
        with run.phase("warmup"):
            warm_up(training)
        with run.phase("train"):
            train(training)
        with run.phase("hessians"):
            hessians = finish_training(training)
        stream_hash = f"{sum(run.gather(training.loader.stream_hash)) % 2**64:016x}"
        trained = {"steps": training.step, "tokens": training.step * config.train_batch_tokens,
                   "train_seconds": training.seconds, "stream_hash": stream_hash}  # fmt: skip
        with run.phase("quantize"):
            if run.rank == 0:
                write_artifact(training.model, config, hessians, run, inputs)
            run.gather(None)
    return trained


def preflight(config: Config, run: Run, tokenizer_sha256: str = "") -> Inputs:
    """Check what a user can get wrong, in seconds, before anything is written. All ranks call it together."""
    folder, tokenizer = find_path(config.data_path), find_path(config.tokenizer_path)
    train_shards = [] if config.eval_only else open_shards(str(folder / "fineweb_train_*.bin"))
    val_shards = open_shards(str(folder / "fineweb_val_[0-9]*.bin"))
    for shard in (val_shards[0], *train_shards[:1]):  # later ones may begin inside a document
        if (first := int(read_tokens(shard, vocab_size=config.vocab_size)[0])) != BOS_ID:
            raise DataError(f"{shard.path}: begins with id {first}, expected BOS={BOS_ID}; export it again")
    tokens, mark = np.concatenate([read_tokens(shard, config.vocab_size) for shard in val_shards]), ""
    if config.val_tokens_limit:  # so many targets: one token more
        tokens, mark = tokens[: config.val_tokens_limit + 1], " comparable:0"
    validation = Validation(tokens, int(token_bytes(tokens, config).sum()), mark)
    if not validation.bytes_total:
        raise DataError(f"{folder}: {len(tokens)} validation tokens stand for no text: nothing to score")
    micro_steps = 0 if config.eval_only else micro_steps_per_step(config, run.world_size)
    if train_shards:
        next(shard_visits(config, train_shards, 0))
    source, settings = Path(__file__).read_bytes(), config.as_env()
    files = {"train_gpt.py": source, "train_gpt.shipped.py": shipped_code(source, config.code_bytes),
             "config.env": "".join(f"{name}={value}\n" for name, value in settings.items()).encode()}
    listing = json.dumps([[shard.path.name, shard.tokens] for shard in (*train_shards, *val_shards)])
    read = {"code": source, "tokenizer": tokenizer.read_bytes(), "shards": listing.encode()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in read.items()}
    mine = {**settings, **hashes, "torch": torch.__version__}
    for rank, theirs in enumerate(run.gather(mine)):
        for name in (name for name in mine if theirs[name] != mine[name]):
            raise ConfigError(f"{name} is {theirs[name]} on rank {rank} and {mine[name]} on rank {run.rank}")
    if config.attention != "auto" or config.fused_mlp == "1":
        choose_kernels(config, run)
    if tokenizer_sha256 not in ("", hashes["tokenizer"]):
        raise ConfigError(f"TOKENIZER_PATH={tokenizer}: expected EVAL_ONLY's, with sha256 {tokenizer_sha256}")
    budget = config.artifact_bytes_max - len(files["train_gpt.shipped.py"])  # of a file of the expected size:
    _, estimate = fill_budget(replace(config, rate_control=True), budget,
                              lambda scale: range(round(expected_bytes(config, scale))))  # fmt: skip
    return Inputs(train_shards, validation, files, hashes, micro_steps, estimate)


def open_run(config: Config, run: Run, inputs: Inputs) -> None:
    """Make the run directory, or reopen RESUME's, and begin its log in upstream's words. ConfigError."""
    name = config.run_id or time.strftime("%Y%m%d-%H%M%S") + f"-seed{config.seed}"
    directory = Path(run.gather(config.resume or f"{config.runs_dir}/{name}")[0])
    if config.resume and (not (directory / CHECKPOINT).exists() or (directory / "summary.json").exists()):
        raise ConfigError(f"RESUME={directory}: expected an unfinished run with a {CHECKPOINT}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        parameters = sum(map(math.prod, parameter_shapes(config).values()))
        needed, free = config.artifact_bytes_max + 32 * parameters, shutil.disk_usage(directory.parent).free
        if not config.resume and free < needed:
            raise OSError(f"{free >> 20} MiB free, artifact and two checkpoints need {needed >> 20} MiB")
        if run.rank == 0:
            directory.mkdir(exist_ok=bool(config.resume))
    except OSError as error:
        advice = "nothing is overwritten: set another RUN_ID, a RUNS_DIR with room, or RESUME"
        raise ConfigError(f"RUN_ID={directory.name}: no {directory} ({error}); {advice}") from error
    run.directory = directory
    overrides, folder, data = config.overrides(), find_path(config.data_path), inputs.validation
    if run.rank == 0:
        for name, content in inputs.files.items() if not config.resume else ():
            write_atomically(run.path(name), content)
        for name, value in config.as_env().items():
            tell(f"  {name}={value}{'  # changed' * (name in overrides)}", run.path("log.txt"))
    run.log("\n".join((
        f"run:{directory}",
        f"Running Python {platform.python_version()} PyTorch {torch.__version__} on {run.device_name} "
        f"dtype:{run.dtype} compile:{compiling(config, run.device):d} threads:{torch.get_num_threads()}",
        f"overrides: {' '.join(f'{name}={value}' for name, value in overrides.items())}",
        f"train_loader:dataset:{folder.name} train_shards:{len(inputs.train_shards)}",
        f"val_loader:shards pattern={folder}/fineweb_val_*.bin tokens:{len(data.tokens) - 1} "
        f"bytes:{data.bytes_total}{data.mark}",
        f"model_params:{parameters}",
        f"world_size:{run.world_size} grad_accum_steps:{inputs.micro_steps} seed:{config.seed} "
        f"train_batch_tokens:{config.train_batch_tokens}",
        f"preflight:ok artifact:estimate {inputs.estimate}",
    )))  # fmt: skip


def summarize(config: Config, run: Run, inputs: Inputs, trained: dict, artifact: dict, scores: dict) -> None:
    """Print sizes, limits and results, and write summary.json: the one record of a run. All ranks call it."""
    devices, val = run.gather(run.device_name), inputs.validation
    source, code_bytes = inputs.files["train_gpt.py"], len(inputs.files["train_gpt.shipped.py"])
    total, label = code_bytes + artifact["bytes"], f"{artifact['label']}+rans"
    eval_seconds = sum(seconds for name, seconds in run.phases.items() if name.startswith("eval_"))
    run.log(f"Code size: {code_bytes} bytes ({config.code_bytes})")
    run.log(f"Serialized model {label}: {artifact['bytes']} bytes")
    run.log(f"Total submission size {label}: {total} bytes")
    limits = {}
    for name, value, limit in (
        ("train_seconds", trained["train_seconds"], config.max_wallclock_seconds),
        ("eval_seconds", eval_seconds, config.max_eval_seconds),
        ("artifact_bytes", total, config.artifact_bytes_max),
    ):
        limits[name] = {"value": value, "limit": limit, "ok": not limit or value <= limit}
        run.log(f"limit:{name} {value:.10g} of {limit:.10g} {'ok' if limits[name]['ok'] else 'EXCEEDED'}")
    summary = {
        "run_id": run.directory.name, "seed": config.seed, **trained,
        "config": config.as_env(), "overrides": config.overrides(),
        "code": {"sha256": inputs.hashes["code"], "bytes": len(source),
                 "bytes_wrapped": len(shipped_code(source, "wrapped"))},
        "data": {"hashes": inputs.hashes, "train_tokens": sum(shard.tokens for shard in inputs.train_shards),
                 "val_tokens": len(val.tokens) - 1, "val_bytes": val.bytes_total},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
                     "cuda": torch.version.cuda, "triton": getattr(triton, "__version__", None)},
        "hardware": {"gpus": devices if run.device.type == "cuda" else [], "world_size": run.world_size,
                     "cores": os.cpu_count(), "peak_memory_mib": torch.cuda.max_memory_allocated() >> 20},
        "phases": run.phases, "losses": {name: score._asdict() for name, score in scores.items()},
        "artifact": artifact, "limits": limits, "comparable": not val.mark, "exit": "finished",
    }  # fmt: skip
    files = {**inputs.files, "summary.json": (json.dumps(summary, indent=1) + "\n").encode()}
    for name, content in files.items() if run.rank == 0 else ():
        write_atomically(run.path(name), content)
    results = " ".join(f"{name}={score.bits_per_byte:.4f}" for name, score in scores.items())
    run.log(f"done: bits per byte {results}; stream_hash:{trained['stream_hash']}; files in {run.directory}")


if __name__ == "__main__":
    os._exit(main())  # peers may wait in a collective that this rank never joins
