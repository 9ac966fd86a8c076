"""A public training script on a CPU: its own model, its own loss, its own training step.

    with Upstream(path, {"NUM_LAYERS": "2"}) as upstream:
        loss = upstream.step(inputs_BT, targets_BT)

`path` is your own copy of a script of the challenge: the baseline, PR #549's, #591's, #785's, #1493's or
#1532's. It is read, unwrapped where it is compressed, changed in memory by the named replacements below. Its
`main` runs up to the point where it asks for a batch. Each step then hands it one and waits until it asks for
the next: optimizers, schedule, clipping and order are the script's. Nothing is written. What fits no
replacement is an error that names it, never a guess. What differs from the script as written: the device,
fp32 everywhere (no autocast, no bfloat16), no compiler, one rank, one micro-step, plain attention.
`benchmarks/parity.py` compares its steps with ours, `benchmarks/beside.py` its speed and its scores.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import queue
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from data.shards import read_shard  # noqa: E402
from tools.runs.settings import in_our_names as settings_in_our_names  # noqa: E402
from tools.runs.source import read_script  # noqa: E402
from train_gpt import Config  # noqa: E402


class UpstreamError(RuntimeError):
    """A script is not of the family that the replacements fit, or failed in its own code."""


# --- REPLACEMENTS: what a script for GPUs says, and what it says on a CPU ---


@dataclass(frozen=True)
class Replacement:
    """One thing that changes in the text of a script. `needed`: a script without it is another kind."""

    name: str
    pattern: str
    new: str
    needed: bool = False


STAND_IN = "_on_cpu"  # the one global that replaced text refers to: an `OnCpu`

REPLACEMENTS = (
    Replacement("environment", r"\bos\.environ\b", f"{STAND_IN}.environ", needed=True),
    Replacement("device", r"torch\.device\(\s*[\"']cuda[\"'][^()]*\)", "torch.device('cpu')", needed=True),
    Replacement("attention backends", r"\benable_\w+_sdp\((True|False)\)", f"{STAND_IN}.nothing()"),
    Replacement("matrix precision", r"torch\.set_float32_matmul_precision\(", f"{STAND_IN}.nothing("),
    Replacement("CUDA", r"\btorch\.cuda\.", f"{STAND_IN}.cuda.", needed=True),
    Replacement("compiler", r"\btorch\.compile\b", f"{STAND_IN}.uncompiled", needed=True),
    Replacement("autocast", r"torch\.autocast\([^()]*\)", f"{STAND_IN}.autocast()", needed=True),
    # A copy: Newton-Schulz divides its argument in place, which in bfloat16 is a copy as well.
    Replacement("orthogonalisation", r"\bG\.bfloat16\(\)", "G.float().clone()", needed=True),
    Replacement("precision of modules", r"\.bfloat16\(\)", ".float()", needed=True),
    Replacement("precision of tensors", r"\btorch\.bfloat16\b", "torch.float32"),
    Replacement("fused optimizers", r"\bfused\s*=\s*True\b", "fused=False"),
    Replacement("accumulation", r"\b8\s*//\s*(h\.|args\.)?world_size(_env)?\b", "1", needed=True),
    Replacement("flash attention", r"from flash_attn_interface import flash_attn_func as (\w+)",
                rf"\1 = {STAND_IN}.attention"),
    Replacement("tokenizer", r"\bspm\.SentencePieceProcessor\(", f"{STAND_IN}.tokenizer(", needed=True),
    Replacement("clock", r"\btime\.perf_counter\(\)", f"{STAND_IN}.clock()"),
    Replacement("external tools", r"\bsubprocess\.run\(", f"{STAND_IN}.tool("),
    # Quotes of the same kind inside the braces of an f-string are Python 3.12.
    Replacement("quotes of file patterns", r"glob\(\"(fineweb_\w+\*\.bin)\"\)", r"glob('\1')"),
    Replacement("quotes of lists", r"\{\", \"\.join\(", "{', '.join("),
)

# Functions and classes of a script that `main` calls and a step does not need: replaced by name.
LOADERS = ("DistributedTokenLoader", "ShuffledSequenceLoader")
SHUFFLING_LOADERS = ("ShuffledSequenceLoader",)
DATA_OF_VALIDATION = ("load_validation_tokens", "build_sentencepiece_luts", "ValidationData")

# The average of the weights that a script keeps (EMA): a local variable of the function with its loop.
AVERAGES = ("ema_state",)
NAME_OF_AN_AVERAGE = re.compile(r"ema(_\w+)?", re.IGNORECASE)

# What quantizes in the manner of the baseline, and back.
FUNCTIONS_OF_SHIPPING = ("quantize_state_dict_int8", "dequantize_state_dict_int8")

# Rank 1 of a world of one: no process group, and neither log nor files, which are rank 0's.
FIXED_SETTINGS = {
    "RANK": "1", "WARMUP_STEPS": "0", "VAL_LOSS_EVERY": "0", "TRAIN_LOG_EVERY": "0",
    "TRAIN_PREFETCH": "0", "TRAIN_COPY_STREAM": "0", "VAL_PREFETCH": "0", "VAL_COPY_STREAM": "0",
    "MAX_WALLCLOCK_SECONDS": "0", "GPTQ_RESERVE_SECONDS": "0",  # a clock's seconds are all of training
}


def in_our_names(settings: Mapping[str, str], config: Path) -> dict[str, str]:
    """Settings of a public script as train_gpt.py has them over a config. UpstreamError where it refuses."""
    known = Config.from_env({"CONFIG": str(config)}).as_env()
    ours = settings_in_our_names(settings, known)
    for name in sorted(ours.keys() - known.keys()):
        raise UpstreamError(f"{name}={ours[name]}: no setting here; leave it out")
    return ours


def patched(text: str, name: str) -> str:
    """The script's text with all replacements made. UpstreamError for one that is needed and fits nowhere."""
    for replacement in REPLACEMENTS:
        text, count = re.subn(replacement.pattern, replacement.new, text)
        if replacement.needed and not count:
            raise UpstreamError(
                f"{name}: the replacement '{replacement.name}' found nothing like {replacement.pattern}; "
                "expected a training script of the challenge's baseline family"
            )
    return text


def check_nothing_is_left(text: str, name: str) -> None:
    """UpstreamError for what needs a GPU, a compiler or a missing package still, with its line."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UpstreamError(
            f"{name}:{error.lineno}: {error.msg} in Python {version}; try a newer Python"
        ) from error
    problems = [(statement.lineno, missing_package(statement)) for statement in tree.body]
    problems += [(getattr(node, "lineno", 0), needs_a_gpu(node)) for node in ast.walk(tree)]
    for line, left in problems:
        if left:
            raise UpstreamError(f"{name}:{line}: {left}, and no replacement fits; add one to REPLACEMENTS")


def needs_a_gpu(node: ast.AST) -> str:
    """What of a GPU this node asks for; "" for nothing."""
    if isinstance(node, ast.Attribute):
        dotted = ast.unparse(node)
        if dotted in ("torch.cuda", "torch.compile", "torch.bfloat16", "torch.autocast"):
            return f"uses {dotted}"
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.device":
        constants = [value.value for value in node.args if isinstance(value, ast.Constant)]
        if "cuda" in constants:
            return "asks for a CUDA device"
    return ""


def missing_package(statement: ast.stmt) -> str:
    """The package that this statement imports and that is not installed; "" for none."""
    modules = []
    if isinstance(statement, ast.Import):
        modules = [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.level == 0:
        modules = [statement.module or ""]
    for module in modules:
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return f"imports {package}, which is not installed"
    return ""


def names_used(text: str) -> set[str]:
    """Variables and attributes of a script's text."""
    nodes = list(ast.walk(ast.parse(text)))
    variables = {node.id for node in nodes if isinstance(node, ast.Name)}
    return variables | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


# --- STAND-INS: what replaced text calls ---


class CpuInsteadOfCuda:
    """The calls of torch.cuda that a plain training loop makes; any other is an error that names it."""

    def is_available(self) -> bool:
        """True: the script's own check has nothing to refuse."""
        return True

    def set_device(self, device: Any) -> None:
        """There is one device."""

    def synchronize(self, device: Any = None) -> None:
        """A CPU has finished what it returned from."""

    def manual_seed_all(self, seed: int) -> None:
        """torch.manual_seed has seeded the CPU."""

    def __getattr__(self, name: str) -> Any:
        raise UpstreamError(f"the script calls torch.cuda.{name}, which has no counterpart on a CPU here")


class ReadSettings(dict[str, str]):
    """An environment that remembers which of its names were asked for."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(settings)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """As os.environ.get."""
        self.asked.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return super().__getitem__(name)


class OnCpu:
    """The global that replaced text refers to, and where the model that the script compiles is caught."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.environ = ReadSettings(settings)
        self.cuda = CpuInsteadOfCuda()
        self.models: list[nn.Module] = []
        self.namespace: dict[str, Any] = {}
        self.clock: Callable[[], float] = time.perf_counter

    def uncompiled(self, target: Any = None, **options: Any) -> Any:
        """torch.compile as function and as decorator: what it is given, unchanged."""
        if target is None:
            return self.uncompiled
        if isinstance(target, nn.Module):
            self.models.append(target)
        return target

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """No autocast: everything is fp32."""
        return contextlib.nullcontext()

    def nothing(self, *arguments: Any) -> None:
        """For switches of GPU kernels."""

    def tool(self, command: Any, **options: Any) -> SimpleNamespace:
        """For nvidia-smi: nothing runs."""
        return SimpleNamespace(stdout="", stderr="", returncode=0)

    def tokenizer(self, **options: Any) -> SimpleNamespace:
        """A tokenizer of the size that the script expects; only its size is asked for."""
        return SimpleNamespace(vocab_size=lambda: self.namespace["Hyperparameters"].vocab_size)

    def attention(self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, causal: bool) -> Tensor:
        """Plain causal attention in FlashAttention-3's layout, grouped heads included."""
        group = q_BTHE.size(2) // k_BTKE.size(2)
        k_BTHE = k_BTKE.repeat_interleave(group, dim=2)
        v_BTHE = v_BTKE.repeat_interleave(group, dim=2)
        y_BHTE = F.scaled_dot_product_attention(
            q_BTHE.transpose(1, 2), k_BTHE.transpose(1, 2), v_BTHE.transpose(1, 2), is_causal=causal
        )
        return y_BHTE.transpose(1, 2)


class TrainingClock:
    """Seconds since the first step, as a script under a wall clock sees them: always less than its limit.

    So the script's schedule follows the clock, and its end is the caller's to say.
    """

    def __init__(self, now: Callable[[], float], limit_seconds: float) -> None:
        self.now = now
        self.limit_seconds = limit_seconds
        self.begun: float | None = None

    @property
    def seconds(self) -> float:
        """Since the first step."""
        return 0.0 if self.begun is None else self.now() - self.begun

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        return self.seconds >= self.limit_seconds

    def begin(self) -> None:
        """The first step begins."""
        if self.begun is None:
            self.begun = self.now()

    def __call__(self) -> float:
        """What the script reads."""
        return min(self.seconds, self.limit_seconds * (1 - 1e-6))


class Stop(BaseException):
    """Ends the script's main from inside; no `except Exception` of its own holds it."""


class Exchange:
    """Where the script's thread asks for batches and the caller's thread hands them over, one at a time."""

    def __init__(self) -> None:
        self.batches: queue.Queue[tuple[Tensor, Tensor] | None] = queue.Queue()
        self.events: queue.Queue[str | BaseException] = queue.Queue()

    def next_batch(self, *sizes: Any) -> tuple[Tensor, Tensor]:
        """What the script's loader is here: says that a batch is wanted, and waits for it."""
        self.events.put("wanted")
        batch = self.batches.get()
        if batch is None:
            raise Stop
        return batch


# --- UPSTREAM: the running script ---


class Upstream:
    """A script that waits for its next batch. Use as a context manager, or `close` it.

    settings: variables as its README sets them; UpstreamError for one that it does not read, or that is
    fixed here (FIXED_SETTINGS). clock: of its schedule; None: ITERATIONS is its length. The script seeds
    torch, numpy and random, for the whole process.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, str] | None = None, clock: TrainingClock | None = None
    ) -> None:
        self.path = path
        self.steps = 0
        self._losses: list[Tensor] = []
        self._exchange = Exchange()
        self._names: set[str] = set()  # all that the script's text uses
        given = dict(settings or {})
        fixed = sorted(given.keys() & FIXED_SETTINGS.keys())
        if fixed:
            raise UpstreamError(f"{' '.join(fixed)}: fixed here, as steps are fed one by one; leave it out")
        self._clock = clock
        self._on_cpu = OnCpu({**given, **FIXED_SETTINGS})
        if clock is not None:
            self._on_cpu.environ["MAX_WALLCLOCK_SECONDS"] = str(clock.limit_seconds)
            self._on_cpu.clock = clock
        self._module = ModuleType(f"upstream_{id(self)}")
        self._namespace = self._module.__dict__
        sys.modules[self._module.__name__] = self._module  # dataclasses look there for their own module
        try:
            self._load()
        except BaseException:
            del sys.modules[self._module.__name__]
            raise
        self._thread = threading.Thread(target=self._run_main, name=path.name, daemon=True)
        self._thread.start()
        self._wait_until_a_batch_is_wanted()
        unread = sorted(given.keys() - self._on_cpu.environ.asked)
        if unread:
            self.close()
            raise UpstreamError(f"{path}: never reads {' '.join(unread)}; leave it out")
        self.model.register_forward_hook(self._note_loss)

    def __enter__(self) -> Upstream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def model(self) -> nn.Module:
        """The module that the script trains, under the script's own parameter names."""
        if len(self._on_cpu.models) != 1:
            count = len(self._on_cpu.models)
            raise UpstreamError(f"{self.path}: compiled {count} models before its first batch; expected one")
        return self._on_cpu.models[0]

    @property
    def parameters_count(self) -> int:
        """All parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def shuffles(self) -> bool:
        """Whether the script's own loader draws sequences at random; else it reads shards in their order."""
        return any(name in self._namespace for name in SHUFFLING_LOADERS)

    @property
    def ships(self) -> bool:
        """Whether `ship` knows how the script quantizes."""
        return not self._missing_of_shipping()

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> float:
        """One training step of the script on this batch (int64 ids); the loss before the update, in nats."""
        self._losses.clear()
        if self._clock is not None:
            self._clock.begin()
        self._exchange.batches.put((inputs_BT, targets_BT))
        self._wait_until_a_batch_is_wanted()
        if len(self._losses) != 1:
            raise UpstreamError(f"{self.path}: {len(self._losses)} forward passes in a step; expected one")
        self.steps += 1
        return self._losses[0].item()

    @torch.no_grad()
    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> float:
        """Mean nats of a batch with the weights as they are; nothing is updated.

        As the scripts evaluate, so without what they do in training alone, like rounding of weights.
        """
        was_training = self.model.training
        self.model.eval()
        loss: Tensor = self.model(inputs_BT, targets_BT)
        self.model.train(was_training)
        return loss.item()

    def average(self) -> dict[str, Tensor] | None:
        """The average of the weights that the script keeps, by the names of its model's state; None: none.

        Such a script evaluates the average, not the last weights. It is no global: it is read in the function
        that waits for a batch, or in one that called it. UpstreamError where the script's text speaks of an
        average and none of AVERAGES is there, or is one of other names than the model's.
        """
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            for name in AVERAGES:
                if name in frame.f_locals:
                    return self._checked_average(name, frame.f_locals[name])
            frame = frame.f_back
        told = sorted(name for name in self._names if NAME_OF_AN_AVERAGE.fullmatch(name))
        if told:
            raise UpstreamError(
                f"{self.path}: has {' '.join(told)}, but no function that waits for a batch has a variable "
                f"{' or '.join(AVERAGES)}; add the name of its average to AVERAGES"
            )
        return None

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy in all parameters, by the script's names. UpstreamError if a name or shape is not its own."""
        own = dict(self.model.named_parameters())
        if own.keys() != weights.keys():
            missing = sorted(own.keys() - weights.keys())
            foreign = sorted(weights.keys() - own.keys())
            raise UpstreamError(f"{self.path}: weights lack {missing} and have no use for {foreign}")
        wrong = [name for name, parameter in own.items() if parameter.shape != weights[name].shape]
        if wrong:
            name = wrong[0]
            shapes = f"{tuple(weights[name].shape)}, expected {tuple(own[name].shape)}"
            raise UpstreamError(f"{self.path}: {name} has shape {shapes}")
        for name, parameter in own.items():
            parameter.copy_(weights[name])

    def ship(self) -> int:
        """Quantize the weights as the script does and put them back so; bytes of the file it would write.

        Of scripts in the manner of the baseline: 8 bits a weight, pickled by torch, zlib. UpstreamError for
        others.
        """
        missing = self._missing_of_shipping()
        if missing:
            raise UpstreamError(
                f"{self.path}: has no {' and no '.join(missing)} that it calls; nothing else ships it here")
        quantize, dequantize = (self._namespace[name] for name in FUNCTIONS_OF_SHIPPING)
        quantized = quantize(self.model.state_dict())[0]
        pickled = io.BytesIO()
        torch.save(quantized, pickled)
        self.model.load_state_dict(dequantize(quantized))
        return len(zlib.compress(pickled.getvalue(), 9))

    def close(self) -> None:
        """End the script; safe to call twice."""
        self._exchange.batches.put(None)
        self._thread.join(timeout=60)
        sys.modules.pop(self._module.__name__, None)

    def _missing_of_shipping(self) -> list[str]:
        """The functions of shipping that the script lacks; one that it has and never calls is a leftover."""
        called = self._namespace.keys() & self._names
        return [name for name in FUNCTIONS_OF_SHIPPING if name not in called]

    def _checked_average(self, name: str, average: Any) -> dict[str, Tensor] | None:
        """What the script calls its average, if it is one of all of its model's state; None: it is off."""
        if average is None:
            return None
        own = self.model.state_dict()
        if not isinstance(average, dict) or average.keys() != own.keys():
            raise UpstreamError(f"{self.path}: {name} is {type(average).__name__}, expected the names of "
                                f"the model's state: {' '.join(own)}")
        return average

    def _load(self) -> None:
        """Fill the script's globals, with all replacements made; its `main` is not yet called."""
        text = patched(read_script(self.path).text, self.path.name)
        check_nothing_is_left(text, self.path.name)
        self._names = names_used(text)
        namespace = self._namespace
        namespace["__file__"] = str(self.path)
        namespace[STAND_IN] = self._on_cpu
        self._on_cpu.namespace = namespace
        exec(compile(text, str(self.path), "exec"), namespace)  # the user's own script, as if they ran it
        loaders = [name for name in LOADERS if name in namespace]
        if not loaders or "main" not in namespace:
            raise UpstreamError(f"{self.path}: expected a function main and one of {' '.join(LOADERS)}")
        for name in loaders:
            namespace[name] = lambda *arguments, **options: self._exchange
        for name in DATA_OF_VALIDATION:
            if name in namespace:
                namespace[name] = no_validation_data

    def _run_main(self) -> None:
        """The script's thread: tells how its main ended."""
        try:
            self._namespace["main"]()
            self._exchange.events.put("ended")
        except BaseException as error:  # whatever it is, the thread that waits must hear of it
            self._exchange.events.put(error)

    def _wait_until_a_batch_is_wanted(self) -> None:
        """Return when the script asks for a batch. UpstreamError if its main ended instead."""
        event = self._exchange.events.get()
        if isinstance(event, BaseException):
            text = f"{type(event).__name__}: {event}"
            raise UpstreamError(f"{self.path}: after {self.steps} steps its main raised {text}") from event
        if event != "wanted":
            raise UpstreamError(f"{self.path}: its main ended after {self.steps} steps; raise ITERATIONS")

    def _note_loss(self, module: nn.Module, inputs: Any, loss: Tensor) -> None:
        """The hook behind each forward pass of the model."""
        self._losses.append(loss.detach())


def no_validation_data(*arguments: Any) -> Any:
    """In place of what reads validation: tokens to unpack, tables to unpack, or an object with tokens."""
    return NoValidationData(val_tokens=torch.zeros(2, dtype=torch.int64))


class NoValidationData(SimpleNamespace):
    """What the places that read validation data accept; nothing in a training step uses it."""

    def numel(self) -> int:
        """As of a tensor of tokens."""
        return 2

    def __iter__(self) -> Iterator[Tensor]:
        """As three tables of bytes."""
        return iter(torch.zeros(3, 1))


# --- DATA ---


def batches(folder: Path, rows: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets (rows, length) from the training shards, in their order."""
    shards = sorted(folder.glob("fineweb_train_*.bin"))
    if not shards:
        raise SystemExit(f"{folder}: no fineweb_train_*.bin; name a folder of shards")
    for shard in shards:
        tokens = torch.from_numpy(read_shard(shard).astype(np.int64))
        for start in range(0, len(tokens) - rows * length, rows * length):
            span = tokens[start : start + rows * length + 1]
            yield span[:-1].view(rows, length), span[1:].view(rows, length)
