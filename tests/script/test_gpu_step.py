"""What a run asks of a GPU, seen without one: what it waits for, what it compiles, and when it stops.

Nothing here runs on a device: graphs are traced and give zeros, and time is counted.
"""

import contextlib
import copy
import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from tests.support import attention_packages, tiny
from tests.support.loaders import write_shards
from tests.support.models import random_batches, tiny_config
from tests.support.planted import before
from tests.support.processes import SHORT_END
from train_gpt import GPT, Config, Machine, Ops, StepResult

# --- no step waits for the device ---

# What needs values before the host can go on: on a GPU each waits for all that was asked for before.
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim",
           "bincount", "allclose", "item")


class NoWaits(TorchDispatchMode):
    """Refuses operations whose result depends on the values of a tensor; counts the others."""

    count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        name = operation.overloadpacket.__name__
        assert name not in WAITING, f"{operation} makes the host wait for the device"
        self.count += 1
        return operation(*arguments, **(keywords or {}))


def refuse_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a tensor is already where it is fetched to: only the call can be seen."""
    for name in ("cpu", "item", "tolist", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, lambda *_, name=name: pytest.fail(f"Tensor.{name} waits"))


def training_of(config: Config) -> Any:
    """A training in its first steps, with batches that are on the device already."""
    machine = Machine()
    model = train_gpt.build_model(config)
    batches = itertools.cycle(random_batches(config))
    loader = SimpleNamespace(
        micro_steps=2, next_batch=lambda: next(batches), stage_ms=0.0, stream_hash=0)
    timer = train_gpt.StepTimer(0, machine.on_gpu)
    run = SimpleNamespace(machine=machine, training=True)
    return SimpleNamespace(
        config=config, run=run, loader=loader, timer=timer, trace=timer.trace, model=model,
        loss=GPT.loss, optimizer=train_gpt.Optimizer(model, config, machine), step=0,
    )


def test_what_is_compiled_is_one_graph_with_settings_as_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph break is an error, and no size is left open that is not marked."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options) or function)
    assert Machine(compiled=True).compile(abs) is abs
    assert given == [{"dynamic": False, "fullgraph": True}]
    assert Machine().compile(abs) is abs and len(given) == 1
    # On an H100 with torch 2.11 this fusion ended the looped graph in an AssertionError.
    assert not getattr(torch._inductor.config.triton, "mix_order_reduction", False)


@pytest.mark.parametrize("progress", [0.0, 0.9])
def test_a_step_waits_for_nothing(progress: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without recurrence and with it; gradients clipped, weights averaged."""
    training = training_of(tiny_config(GRAD_CLIP_NORM=0.3, ROPE_DIMS=8))
    refuse_fetching(monkeypatch)
    with NoWaits() as operations:
        values = train_gpt.train_step(training, progress)
    assert values.shape == (2,) and operations.count > 500


def open_sizes(graph: Any, arguments: list[Any]) -> dict[Any, int]:
    """The sizes that a traced graph leaves open, by their symbol, as these arguments have them."""
    found = {}
    holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, argument in zip(holders, arguments, strict=True):
        traced = node.meta["val"]
        pairs = [(traced, argument)]
        if isinstance(traced, Tensor):
            pairs = list(zip(traced.shape, argument.shape, strict=True))
        for size, actual in pairs:
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                found[size.node.expr] = actual
    return found


def number(size: Any, known: dict[Any, int]) -> Any:
    """A size as it is with these arguments; `int` would make the graph one of this size alone."""
    return int(size.node.expr.xreplace(known)) if isinstance(size, torch.SymInt) else size


class Compiler(Machine):
    """A machine that traces whole graphs, forward and backward, and counts them; none of them is run."""

    graphs: list[Any] = []  # noqa: RUF012  (of all, as they are compared by value)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if function is train_gpt.orthogonalize:
            return function
        return torch.compile(function, backend=self.backend(), dynamic=False, fullgraph=True)

    @staticmethod
    def backend() -> Callable[..., Any]:
        """The same function each time, as Dynamo looks for what it compiled by it."""
        return trace_alone


def note_graph(graph: Any, _: Any) -> Callable[..., Any]:
    """A compiler that notes the graph, and returns zeros in its place."""
    Compiler.graphs.append(graph)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")

    def run(arguments: list[Any]) -> list[Any]:
        known = open_sizes(graph, arguments)
        arguments.clear()
        made = []
        for node in output.args[0]:
            value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
            if isinstance(value, Tensor):
                shape = [number(size, known) for size in value.shape]
                strides = [number(stride, known) for stride in value.stride()]
                made.append(torch.empty_strided(shape, strides, dtype=value.dtype).zero_())
            else:
                made.append(number(value, known))
        return made

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def trace_alone(graph: Any, inputs: Any) -> Any:
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=note_graph)(graph, inputs)


@pytest.fixture
def new_graphs() -> Iterator[Callable[[], int]]:
    """How many graphs, forward and backward ones, were traced since it was last asked."""
    torch._dynamo.reset()
    Compiler.graphs.clear()

    def count() -> int:
        found = len(Compiler.graphs)
        Compiler.graphs.clear()
        return found

    yield count
    torch._dynamo.reset()


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
# Each attention that `auto` may take on a GPU, and its operator in a graph.
ATTENTION = {
    "fa3": "flash_attn_3._flash_attn_forward.default",
    "varlen": "torch_attn._varlen_attn.default",
    "fa2": "flash_attn._flash_attn_varlen_forward.default",
    "sdpa": "aten._scaled_dot_product_flash_attention_for_cpu.default",
}
OUR_KERNELS = {"mlp_matmul": 2, "heads": 1, "xsa": 1}  # how often a visit's forward pass calls each


@pytest.fixture(params=ATTENTION)
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of one attention, which can be imported."""
    if request.param == "varlen" and TORCH < (2, 10):
        pytest.skip("torch 2.9 has no packed attention of its own")
    attention_packages.install(monkeypatch)
    return request.param


def ready(model: GPT, attention: str) -> GPT:
    """This model on a machine that traces, with what `auto` chooses on an H100 with this attention."""
    machine = Compiler(dtype=torch.bfloat16, compiled=True)
    attend = train_gpt.load_attention(attention)
    ops = Ops(attend, train_gpt.mlp_fused, train_gpt.heads_fused, train_gpt.xsa_fused)
    return train_gpt.ready_model(model, machine, ops)


def train_on_other_documents(model: GPT, config: Config, looping: tuple[bool, ...]) -> None:
    """Both passes for each of these, three times, with other numbers of documents each time."""
    loss_of = model.machine.compile(GPT.loss)
    for batch, every in zip(random_batches(config, count=3), (9, 5, 2), strict=True):
        batch.inputs_BT[:, ::every] = train_gpt.BOS_ID
        starts = train_gpt.starts_on_device(batch.inputs_BT, config)
        for loops in looping:
            loss_of(model, batch.inputs_BT, batch.targets_BT, starts, loops).backward()


def assert_kernels_in(graph: Any, attention: str, visits: int) -> None:
    """Attention and our own kernels in each visit, and none of them decomposed into other operations."""
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    for name, times in {ATTENTION[attention]: 1, **OUR_KERNELS}.items():
        name = name if "." in name else f"train_gpt.{name}.default"
        assert calls.count(name) == times * visits, name


PR549 = {
    "BIGRAM_VOCAB_SIZE": 24, "BIGRAM_DIM": 6, "VE_ENABLED": 1, "VE_DIM": 6, "VE_LAYERS": "0",
    "CHANNEL_SMEAR_ENABLED": 1,
}


def test_each_attention_is_one_graph_whatever_number_of_documents(
    attention: str, new_graphs: Callable[[], int]
) -> None:
    """Its forward and its backward pass, with other numbers of documents each time."""
    config = one_layer()
    attend = train_gpt.load_attention(attention)

    def attend_in_documents(qkv: tuple[Tensor, ...], ids_BT: Tensor, starts: Tensor) -> Tensor:
        return attend(*qkv, train_gpt.attention_documents(ids_BT, starts, attend, config))

    run = Compiler(compiled=True).compile(attend_in_documents)
    for batch, every in zip(random_batches(config, count=3), (9, 5, 2), strict=True):
        batch.inputs_BT[:, ::every] = train_gpt.BOS_ID
        starts = train_gpt.starts_on_device(batch.inputs_BT, config)
        shape_BT, width = batch.inputs_BT.shape, config.head_dim
        heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
        qkv = [
            torch.zeros(*shape_BT, count, width, dtype=torch.bfloat16, requires_grad=True) for count in heads
        ]
        run(tuple(qkv), batch.inputs_BT, starts).sum().backward()
    calls = [str(node.target) for node in Compiler.graphs[0].graph.nodes if node.op == "call_function"]
    assert calls.count(ATTENTION[attention]) == 1
    assert new_graphs() == 2


@pytest.mark.parametrize("attention", [
    "sdpa", *(pytest.param(name, marks=pytest.mark.slow) for name in ATTENTION if name != "sdpa"),
], indirect=True)
def test_attention_and_all_kernels_are_one_graph(attention: str, new_graphs: Callable[[], int]) -> None:
    """Forward and backward pass, whatever number of documents; once with all of PR #549 and a loop."""
    everything = attention == "sdpa"
    config = one_layer(**PR549, NUM_LOOPS=1) if everything else one_layer()
    model = ready(train_gpt.build_model(config), attention)
    train_on_other_documents(model, config, looping=(everything,))
    assert_kernels_in(Compiler.graphs[0], attention, visits=1 + everything)
    assert new_graphs() == 2


def one_layer(**changes: object) -> Config:
    """The cheapest model that has every kernel."""
    size = {"NUM_LAYERS": 1, "NUM_LOOPS": 0, "PARALLEL_START_LAYER": -1, "XSA_LAST_N": 1, "ROPE_DIMS": 8}
    return tiny_config(**{**size, **changes})


@pytest.mark.slow
def test_a_run_compiles_each_graph_once_and_none_inside_the_clock_of_evaluation(
    attention: str, new_graphs: Callable[[], int]
) -> None:
    """Train, validate, reload, copy, learn, score: each attention and all our kernels."""
    config = tiny_config(
        MODEL_DIM=32, TRAIN_SEQ_LEN=64, MICRO_BATCH_TOKENS=256, TTT_ENABLED=1, TTT_CHUNK_TOKENS=256,
        TTT_BATCH_SEQS=2, EVAL_STRIDE=16, VAL_BATCH_SIZE=2048, ROPE_DIMS=8,
    )
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, 1500).astype(np.uint16)

    # Training: a graph without recurrence and one with it, each with its backward pass.
    model = ready(train_gpt.build_model(config), attention)
    train_on_other_documents(model, config, looping=(False, True))
    assert_kernels_in(Compiler.graphs[0], attention, visits=config.num_layers)
    assert new_graphs() == 4

    # Validation inside training: a forward pass with each.
    for looping in (False, True, False):
        train_gpt.score_roundtrip(model, tokens, config, looping=looping)
    assert new_graphs() == 2

    # A reloaded model is another object, with the operations of the run and the same graphs.
    reloaded = GPT(model.settings, seed=None)
    reloaded.load_state_dict(model.state_dict())
    train_gpt.ready_model(reloaded, model.machine, model.ops)
    train_gpt.score_roundtrip(reloaded, tokens, config)
    assert new_graphs() == 0

    # Before the clock of evaluation: sliding windows and those of test-time training have other shapes.
    train_gpt.rehearse_evaluation(reloaded, config, train_gpt.Run(reloaded.machine))
    assert 2 <= new_graphs() <= 4
    for score in (train_gpt.score_roundtrip, train_gpt.score_sliding, train_gpt.score_ttt):
        score(reloaded, tokens, config)
        assert new_graphs() == 0, score
    train_gpt.score_ttt(copy.deepcopy(reloaded), tokens[:900], config)
    assert new_graphs() == 0


def text_of(documents: int, length: int) -> np.ndarray:
    """Random tokens in about this many documents of different lengths."""
    random = np.random.default_rng(documents)
    tokens = random.integers(train_gpt.BOS_ID + 1, tiny.VOCAB_SIZE, length).astype(np.uint16)
    tokens[[0, *random.integers(1, length, documents - 1)]] = train_gpt.BOS_ID
    return tokens


@pytest.mark.slow
def test_no_length_of_a_document_needs_another_graph(attention: str, new_graphs: Callable[[], int]) -> None:
    """Other numbers of documents, other lengths and other rows, again and again."""
    config = one_layer(  # with more context than in training
        NUM_LAYERS=2, TRAIN_SEQ_LEN=32, EVAL_SEQ_LEN=48, VAL_BATCH_SIZE=2048, TTT_ENABLED=1, TTT_MODE="lora",
        TTT_LORA_RANK=5, TTT_CHUNK_SIZE=6, TTT_BATCH_SIZE=8,
    )
    model = ready(train_gpt.build_model(config), attention)
    tokens = text_of(documents=13, length=400)
    train_gpt.rehearse_evaluation(model, config, train_gpt.Run(model.machine))
    # Windows; documents, forward and backward; AdamW. Documents that nothing learns from have the same graph,
    # and so has a single document, which gets two rows.
    assert new_graphs() == 1 + 2 + 1
    train_gpt.score_ttt(model, tokens, config)
    assert new_graphs() == 0
    for chunk, rows, documents in ((5, 3, 4), (16, 5, 21), (7, 1, 6)):
        other = replace(config, ttt_chunk_size=chunk, ttt_batch_size=rows)
        train_gpt.score_ttt(model, text_of(documents, length=350), other)
        assert new_graphs() == 0, f"{documents} documents, chunks of {chunk}, {rows} rows"


@pytest.mark.slow
def test_warm_up_compiles_all_that_training_meets(new_graphs: Callable[[], int], tmp_path: Path) -> None:
    config = tiny_config(
        VOCAB_SIZE=4096, ENABLE_LOOPING_AT=0.5, ITERATIONS=20,
        MAX_WALLCLOCK_SECONDS=0, WARMUP_STEPS=1, TRAIN_BATCH_TOKENS=64,
    )
    run = train_gpt.Run(Compiler(dtype=torch.float32, compiled=True))
    training = train_gpt.Training(config, run, write_shards(tmp_path), None, Ops(), {})  # type: ignore[arg-type]
    with contextlib.closing(training.loader):
        train_gpt.warm_up(training)
        # The windows of the evaluation; forward and backward, with and without loops.
        assert new_graphs() == 1 + 2 * 2
        for step in range(config.iterations):
            train_gpt.train_step(training, step / config.iterations)
        assert new_graphs() == 0


class Device:
    """A device that does its steps one after another, while the host runs ahead; time is counted."""

    def __init__(self, plain_seconds: float, looped_seconds: float) -> None:
        self.seconds = {False: plain_seconds, True: looped_seconds}
        self.now = 0.0  # of the host
        self.free = 0.0  # when the device has done all it was asked for
        self.looped = 0  # steps with recurrence
        self.asked = 0  # steps
        self.wait_ms = 0.0  # as of a loader
        self.told: list[StepResult] = []  # as they were read

    def step(self, training: Any, progress: float) -> Any:
        """In the place of `train_step`: 2 ms for the host to ask, and a device that is busy for longer."""
        self.now += 0.002
        looping = train_gpt.loop_is_on(progress, training.config)
        self.looped += looping
        self.asked += 1
        self.wait_ms += self.asked  # the wait of a step is its number
        self.free = max(self.free, self.now) + self.seconds[looping]
        return torch.zeros(2)

    def record_event(self) -> Any:
        ends = self.free

        def synchronize() -> None:
            self.now = max(self.now, ends)

        return SimpleNamespace(synchronize=synchronize)


def train_on(device: Device, config: Config, monkeypatch: pytest.MonkeyPatch) -> int:
    """`train` by this device; the steps it took."""

    class Clocked(SimpleNamespace):
        """A training that asks for the seconds again and again."""

        seconds = property(lambda _: device.now)

    machine = Machine()
    monkeypatch.setattr(Machine, "on_gpu", True)
    run = SimpleNamespace(machine=machine, stop_signal=0)
    training: Any = Clocked(config=config, run=run, step=0, unread=[], loader=device, save=lambda: None)
    monkeypatch.setattr(train_gpt, "train_step", device.step)
    monkeypatch.setattr(train_gpt, "end_training", lambda *_: None)
    monkeypatch.setattr(train_gpt, "log_step", lambda _, result, *__: device.told.append(result))
    monkeypatch.setattr(train_gpt.torch.cuda, "current_stream", lambda: device)
    train_gpt.train(training)
    return training.step


def twelve_seconds(looping_at: float) -> Config:
    """The settings of a run of so many seconds, two of which are kept for calibration."""
    return tiny_config(MAX_WALLCLOCK_SECONDS=12, GPTQ_RESERVE_SECONDS=2, ITERATIONS=10_000,
                       ENABLE_LOOPING_AT=looping_at, TRAIN_LOG_EVERY=0)


@pytest.mark.parametrize(("slower", "switch"), [(1.0, 0.5), (1.5, 0.8), (2.0, 0.35), (2.0, 0.8)])
def test_training_ends_in_time_although_recurrence_makes_steps_longer(
    slower: float, switch: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is two steps behind, and the host learns late that its steps have become longer."""
    plain_seconds = 0.1
    device = Device(plain_seconds, slower * plain_seconds)
    steps = train_on(device, twelve_seconds(switch), monkeypatch)
    assert steps > device.looped >= 4
    assert device.free <= 12 - 2, "training runs into the time kept for calibration"
    # And no more than a few steps are given away.
    assert device.free >= 12 - 2 - 4 * slower * plain_seconds


def test_a_wait_is_of_its_own_step_and_late_recurrence_in_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are read two steps later, when other steps have waited as well."""
    config = tiny_config(MAX_WALLCLOCK_SECONDS=0, ITERATIONS=7, TRAIN_LOG_EVERY=0)
    device = Device(0.1, 0.1)
    assert train_on(device, config, monkeypatch) == 7
    assert [(result.step, result.wait_ms) for result in device.told] == [(n, n) for n in range(1, 8)]
    # The one moment at which a longer step cannot be known before it is over.
    for switch in np.linspace(0.94, 0.999, 13):
        device = Device(0.1, 0.2)
        train_on(device, twelve_seconds(round(float(switch), 4)), monkeypatch)
        assert device.free <= 10 + 2 * 0.1, "at most what the last two steps took longer"


COUNTED_CHOICES = before("torch.autograd.functional.vjp", 'print("an implementation is run", flush=True)')


def test_kernels_are_chosen_once_in_a_run(lab: Any) -> None:
    """If they were chosen again at reload, the run could score with other kernels than it trained with."""
    size = {"NUM_LAYERS": 1, "NUM_LOOPS": 0, "PARALLEL_START_LAYER": -1, "XSA_LAST_N": 1}
    one_row = {"TRAIN_SEQ_LEN": 16, "MICRO_BATCH_TOKENS": 16, "TRAIN_BATCH_TOKENS": 16}
    short = {**one_row, "ITERATIONS": 1, "GPTQ_CALIBRATION_BATCHES": 1, "VAL_TOKENS_LIMIT": 16}
    off = {**SHORT_END, "TRITON_INTERPRET": 1}
    ended = lab.succeed(fault=COUNTED_CHOICES, FUSED_HEADS=1, **size, **short, **off)
    # The reference implementation, and the kernel.
    assert re.findall(r"^fused_heads:kernel tried: kernel error:", ended.out, re.MULTILINE)
    assert ended.out.count("an implementation is run") == 2


def test_a_run_says_how_long_it_took_to_start_and_whether_its_graphs_were_compiled_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three seeds cost three starts: the second is short only if the cache of the first was found."""
    run = train_gpt.Run(Machine(compiled=True), phases={"preflight": 3.0, "warmup": 72.5})
    for found, made, state in ((0, 14, "cold"), (13, 1, "warm")):
        counts = {"fxgraph_cache_hit": found, "fxgraph_cache_miss": made, "fxgraph_cache_bypass": 0}
        monkeypatch.setitem(torch._dynamo.utils.counters, "inductor", counts)
        line = train_gpt.start_line(run)
        assert line.startswith("start: 75.5 s ") and f"{state}: {found} of 14 graphs" in line
    assert "graphs" not in train_gpt.start_line(train_gpt.Run(Machine(), phases={"preflight": 3.0}))


class Doubled(torch.autograd.Function):
    """An autograd function, as each of our kernels has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """2 x."""
        return 2 * x

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Tensor:
        """Its gradient."""
        return 2 * d_y


@pytest.fixture
def cache_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The compiler's cache in a folder of its own; its settings are restored."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    settings: Any = importlib.import_module("torch._functorch.config")
    compiler: Any = torch.compiler.config
    with (
        settings.patch("autograd_cache_allow_custom_autograd_functions", False),
        compiler.patch("cache_key_tag", ""),
    ):
        yield


@pytest.mark.slow
def test_graphs_with_our_autograd_functions_are_cached(cache_settings: None) -> None:
    """By default torch traces them in every run: a minute or two of an H100 for the default model."""

    def outcomes() -> dict[str, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(Doubled.apply, dynamic=False, fullgraph=True)
        compiled(torch.ones(16, requires_grad=True)).sum().backward()
        counts = torch._dynamo.utils.counters["aot_autograd"]
        return {key: count for key, count in counts.items() if "cache" in key}

    assert outcomes() == {"autograd_cache_bypass": 1}, "this version of torch caches them by default"
    train_gpt.cache_compiled_graphs()
    assert outcomes() == {"autograd_cache_miss": 1, "autograd_cache_saved": 1}
    assert outcomes() == {"autograd_cache_hit": 1}


def test_other_shapes_of_our_operators_are_another_entry_of_the_cache(
    cache_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached graph has the shapes that they return, and its key does not."""
    tags = set()
    for function in (train_gpt.heads_shapes, train_gpt.xsa_shapes):
        monkeypatch.setattr(train_gpt, "heads_shapes", function)
        train_gpt.cache_compiled_graphs()
        tags.add(torch.compiler.config.cache_key_tag)
    assert len(tags) == 2 and "" not in tags
