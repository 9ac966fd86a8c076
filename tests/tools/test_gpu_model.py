"""The model of a GPU that is not there: its arithmetic, what it refuses, and a small step traced whole."""

import json
import os
import re
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import kernels
from benchmarks.gpu_model import calibration, census, fake_gpu, memory, roofline, subject, summary
from benchmarks.gpu_model.accounting import Recorder, UnknownOperation, Watch
from benchmarks.gpu_model.inductor import GeneratedKernel
from benchmarks.gpu_model.tracer import Graph

H100 = roofline.CARDS["h100"]


def test_the_factor_of_a_step_is_that_of_the_measured_one() -> None:
    for modelled_ms, measured_ms in zip(calibration.STEP_MS, calibration.MEASURED_MS, strict=True):
        expected = calibration.expected_ms(modelled_ms)
        assert expected.least < expected.likely < expected.most
        assert expected.likely == pytest.approx(measured_ms, rel=0.02)


@pytest.fixture
def on_gpu() -> Iterator[FakeTensorMode]:
    """Tensors made within the test are on a GPU, and hold nothing."""
    with FakeTensorMode() as mode:
        yield mode


def gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_a_product_copies_an_addend_that_lies_elsewhere(on_gpu: FakeTensorMode) -> None:
    recorder = Recorder(H100)
    with Watch(recorder):
        gpu(3, 8, 16).baddbmm_(gpu(3, 8, 4), gpu(3, 4, 16))
        torch.addmm(gpu(16), gpu(8, 4), gpu(4, 16))
        torch.addmm(gpu(8, 16), gpu(8, 4), gpu(4, 16))
    assert [launch.kind for launch in recorder.launches] == ["product", "product", "eager", "product"]
    assert recorder.launches[2].moved_bytes == 2 * 2 * 8 * 16


def test_every_custom_operation_of_the_script_has_a_cost_and_a_part() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("train_gpt::")}
    assert {name.replace("::", ".") for name in registered} == set(subject.CUSTOM_OPERATIONS)
    assert {f"train_gpt.{name}" for name in summary.CUSTOM_PARTS} == set(subject.CUSTOM_OPERATIONS)


@pytest.mark.parametrize("given", range(3))
def test_the_fused_mlp_costs_as_much_as_its_product(on_gpu: FakeTensorMode, given: int) -> None:
    recorder = Recorder(H100, subject.CUSTOM_OPERATIONS)
    rows, inner, columns = 96, 512, 2048
    tensors = [gpu(rows, columns) for _ in range(given)]
    with Watch(recorder):
        operands = gpu(rows, inner), gpu(columns, inner), gpu(rows)
        torch.ops.train_gpt.linear_leaky_square(*operands, tensors, 1.0, 0.5)
    (launch,) = recorder.launches
    assert launch.kind == "custom" and launch.flop == 2 * rows * inner * columns
    # Two results, one result and the sums of rows, or one result: what is given is read.
    moved = rows * inner + columns * inner + rows + max(2, given + 1) * rows * columns
    assert launch.moved_bytes == 2 * (moved + rows * (given == 1))


def test_an_operation_of_unknown_cost_is_refused(on_gpu: FakeTensorMode) -> None:
    @torch.library.custom_op("test_gpu_model::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    mystery.register_fake(torch.empty_like)
    recorder = Recorder(H100, subject.CUSTOM_OPERATIONS)
    with pytest.raises(UnknownOperation, match=r"test_gpu_model\.mystery.*CUSTOM_OPER"), Watch(recorder):
        mystery(gpu(4, 4))
    with pytest.raises(UnknownOperation, match="convolution"), Watch(recorder):
        torch.nn.functional.conv1d(gpu(1, 4, 16), gpu(4, 4, 3))
    for source in ("'kernel_num_gb': 0.1, ... acc = tl.dot(a, b)", "def kernel_of_a_user(a, b): ..."):
        with pytest.raises(UnknownOperation, match="CUSTOM_OPERATIONS"):
            GeneratedKernel("triton_mystery", source, recorder)
    entered = Recorder(H100, {"test_gpu_model.mystery": lambda arguments: (7.0, 0.0)})
    with Watch(entered):
        mystery(gpu(4, 4))
    assert [launch.flop for launch in entered.launches] == [7.0]


def test_a_pass_has_the_rows_that_the_script_gives_one_rank_and_the_settings_that_were_given() -> None:
    config = subject.config()
    assert subject.rows(config, "train") == subject.rows(config, "train_loop") == (48, 2048)
    assert subject.rows(config, "train", world_size=16) == (24, 2048)
    assert subject.rows(config, "score") == (25, 2560)
    assert subject.rows(config, "adapters") == (config.documents_at_once, 2560)
    with pytest.raises(ValueError, match="MICRO_BATCH_TOKENS=1024"):
        subject.rows(subject.config(settings=["MICRO_BATCH_TOKENS=1024"]), "train")
    assert subject.config(settings=["NUM_LAYERS=9", "MATRIX_LR=0.5"]).num_layers == 9
    with pytest.raises(ValueError, match="--set NUM_LAYERS: expected KEY=VALUE"):
        subject.config(settings=["NUM_LAYERS"])


def test_a_model_that_does_not_loop_is_noticed() -> None:
    config = subject.config()
    assert subject.visits(config, looping=False) == 11 and subject.visits(config, looping=True) == 17
    calls = Counter({"torch_attn._varlen_attn.default": 11, "aten.mm.default": 78})
    tracer: Any = types.SimpleNamespace(graphs=[Graph("fwd", False, 0, calls, [], None)])
    census.check_visits(tracer, 11, "train")
    with pytest.raises(RuntimeError, match="attends 11 times, expected 17"):
        census.check_visits(tracer, 17, "train_loop")


def test_a_config_names_a_card_on_which_it_fits(repo: Path) -> None:
    """By the formula, in bf16 (the demo: in fp32 too), with a tenth of the smallest card to spare."""
    for path in sorted(repo.glob("configs/*.env")):
        if path.stem == "cpu_demo":
            continue
        first_line = path.read_text(encoding="utf-8").splitlines()[0]
        cards = [int(number) for number in re.findall(r"(\d+) GB", first_line)]
        assert cards, f"the first line of {path} names its smallest card"
        one_gpu = path.stem.endswith("1gpu") or path.stem in ("gpu_demo", "pr591")
        for bytes_a_value in (2, 4) if path.stem == "gpu_demo" else (2,):
            needed = memory.predicted_bytes(subject.config(str(path)), 1 if one_gpu else 8, bytes_a_value)
            assert needed <= 0.9 * min(cards) * 1e9, path


def test_the_formula_of_memory_lies_just_above_the_traced_peak() -> None:
    """32.72 GiB of the default run with all kernels, and what the trace of a step does not hold."""
    traced = 32.72 * 2**30 + 35_945_623 * (memory.BYTES_A_PARAMETER - 4)
    assert traced <= memory.predicted_bytes(subject.config(), 8) <= 1.1 * traced


def launch(kind: str, name: str, shapes: str = "", moved_bytes: float = 1e9) -> dict[str, Any]:
    costs = {"moved_bytes": moved_bytes, "flop": 2e12, "microseconds": 1000.0, "live_bytes": 0}
    return {"kind": kind, "name": name, "shapes": shapes, **costs}


def test_the_benchmark_of_kernels_counts_the_bytes_of_the_census(on_gpu: FakeTensorMode) -> None:
    rows, positions, heads, key_heads, channels = 4, 512, 8, 4, 64
    recorder = Recorder(H100, subject.CUSTOM_OPERATIONS)
    qkv = gpu(rows, positions, heads + 2 * key_heads, channels)
    queries, d_queries = (gpu(rows, positions, heads, channels) for _ in range(2))
    keys, values, own = (gpu(rows, positions, key_heads, channels) for _ in range(3))
    gate = gpu(rows, positions, heads)
    around = [qkv, gpu(heads), gpu(2, positions, 1, 8)]
    with Watch(recorder):
        torch.ops.train_gpt.heads(*around, [])
        torch.ops.train_gpt.xsa(queries, values, gate)
        torch.ops.train_gpt.heads(*around, [queries, keys, values, own])
        torch.ops.train_gpt.xsa(queries, values, gate, d_queries)
    costs = kernels.heads_costs(rows * positions, heads, key_heads, channels)
    # Gains and angles are left out: they are few.
    for launched, cost in zip(recorder.launches, costs["forward"] + costs["backward"], strict=True):
        assert launched.moved_bytes == pytest.approx(cost.bytes, rel=0.01)


SIZES = {"vocabulary": 8192, "mlp": 2048, "gate": 12}


def test_the_table_has_every_launch_in_its_part() -> None:
    for found, part in (
        (launch("product", "mm.out", "(98304, 512)@(512, 8192) bfloat16"), "products of the head"),
        (launch("product", "mm.out", "(98304, 2048)@(2048, 512) bfloat16"), "products of the MLP"),
        (launch("product", "mm.out", "(512, 98304)@(98304, 256) bfloat16"), "products of q, k, v and o"),
        (launch("custom", "train_gpt.xsa.default"), "XSA and gate"),
        (launch("generated", "triton_red_fused__log_softmax_nll_loss_forward_3"), "loss"),
        (launch("generated", "triton_poi_fused__to_copy_1", moved_bytes=1e6), "small"),
        (launch("generated", "triton_poi_fused_add_mul_1"), "residual, norms, scales"),
    ):
        assert summary.part_of(found, SIZES).startswith(part)
    head = launch("product", "mm.out", "(98304, 512)@(512, 8192) bfloat16")
    attention = launch("attention", "torch_attn._varlen_attn.default")
    forward = {"tag": "x_fwd0", "backward": False, "launches": [attention], "outputs": []}
    backward = {"tag": "x_bwd0", "backward": True, "launches": [head, head, attention], "outputs": []}
    step = {"label": "x", "tokens": 98304, "milliseconds": 4.0, "sizes": SIZES, "graphs": [forward, backward]}
    told = summary.table(step)
    assert "| attention | 1 | 1.00 | 2.00 | 1.00 | 1 | 1.00 | 2.00 | 1.00 |" in told
    assert "| total | 1 | 1.00 | 2.00 | 1.00 | 3 | 3.00 | 6.00 | 3.00 |" in told


def test_without_torch_or_compiler(monkeypatch: pytest.MonkeyPatch, repo: Path, tmp_path: Path) -> None:
    for version in ("2.9.1+cpu", "2.13.0+cu130"):
        monkeypatch.setattr(fake_gpu.importlib.metadata, "version", lambda _, found=version: found)
        with pytest.raises(fake_gpu.Unavailable, match=re.escape(version)):
            fake_gpu._check_environment()
    result = run_census(repo, "--out", str(tmp_path), path=str(tmp_path))
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("the GPU model")


def run_census(repo: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if path is not None:
        environ["PATH"] = path
    command = [sys.executable, "-m", "benchmarks.gpu_model", *arguments]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, env=environ)


TINY = (
    "NUM_LAYERS=2 MODEL_DIM=128 NUM_HEADS=4 NUM_KV_HEADS=2 VOCAB_SIZE=1024 MLP_MULT=2 "
    "PARALLEL_START_LAYER=-1 NUM_LOOPS=1 LOOP_START=0 LOOP_END=0 "
    "TRAIN_SEQ_LEN=256 EVAL_SEQ_LEN=256 TTT_CHUNK_TOKENS=1024 MICRO_BATCH_TOKENS=1024 TRAIN_BATCH_TOKENS=8192"
).split()
TINY_TOKENS = 1024


def tiny_product_flop(layers: int) -> int:
    """FLOP of all products of one forward pass over the tokens of `TINY`."""
    projections_and_mlp = 2 * 128 * (128 + 64) + 2 * 128 * 256  # gates are sums
    return 2 * TINY_TOKENS * (layers * projections_and_mlp + 128 * 1024)


@pytest.fixture(scope="session")
def gpu_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the libraries are built, once for all tests."""
    return tmp_path_factory.mktemp("gpu_model")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mlp", ["plain", "kernel"])
def test_a_tiny_step_is_traced_whole(repo: Path, gpu_model_folder: Path, mlp: str) -> None:
    settings = ["--what", "train", "train_loop", "--set", *TINY, "--mlp", mlp, "--out", str(gpu_model_folder)]
    result = run_census(repo, *settings)
    if result.returncode == 2:
        pytest.skip(result.stderr)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("compiled anew for another number of documents: no") == 2
    suffix = "" if mlp == "plain" else f"_{mlp}"
    for phase, layers in (("train", 2), ("train_loop", 3)):
        path = gpu_model_folder / f"default_{phase}{suffix}.json"
        forward, backward = json.loads(path.read_text(encoding="utf-8"))["graphs"]
        assert (forward["backward"], backward["backward"]) == (False, True)
        for graph, passes in ((forward, 1), (backward, 2)):
            kinds = Counter(one["kind"] for one in graph["launches"])
            around_attention = []
            flop = 0.0
            for one in graph["launches"]:
                if one["name"].startswith(("train_gpt.heads", "train_gpt.xsa")):
                    around_attention.append(one["name"])
                elif one["kind"] in ("product", "custom"):
                    flop += one["flop"]
            # Each product has two in its gradient, whichever way the MLP is computed.
            assert flop == passes * tiny_product_flop(layers)
            assert kinds["attention"] == layers
            assert len(around_attention) == 2 * layers
            assert kinds["custom"] - 2 * layers == (passes * layers if mlp == "kernel" else 0)
            assert kinds["generated"] > 0 and graph["peak_bytes"] >= graph["input_bytes"] > 0
        # What the forward pass saves is what the backward pass starts with.
        assert backward["input_bytes"] > sum(output["size_bytes"] for output in forward["outputs"])
        table = summary.table(json.loads(path.read_text(encoding="utf-8")))
        assert f"| total | {len(forward['launches'])} |" in table


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_step_of_the_default_moves_no_more_than_it_did(repo: Path, gpu_model_folder: Path) -> None:
    """Its bytes and modelled time, with the kernels that `auto` takes on an H100; no graph breaks."""
    settings = ["--what", "train", "train_loop", "--keys", "517"]
    result = run_census(repo, *settings, "--mlp", "kernel", "--out", str(gpu_model_folder), "--tag", "bars")
    if result.returncode == 2:
        pytest.skip(result.stderr)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("graph breaks: none") == 2
    saved_bytes = {}
    # Launches and gigabytes at most, and TFLOP at least: fewer would be another model.
    bars = (("train", 471, 126.84, 25.2), ("train_loop", 681, 186.63, 37.6))
    for (phase, most_launches, most_gb, least_tflop), ms in zip(bars, calibration.STEP_MS, strict=True):
        step = json.loads((gpu_model_folder / f"bars_{phase}_kernel.json").read_text(encoding="utf-8"))
        launches = [one for graph in step["graphs"] for one in graph["launches"]]
        assert len(launches) <= most_launches
        assert sum(one["moved_bytes"] for one in launches) <= most_gb * 1e9
        assert sum(one["flop"] for one in launches) >= least_tflop * 1e12
        assert step["milliseconds"] == pytest.approx(ms, abs=0.06)
        # The loss passes over its logits once in each direction: twice as many instructions are a pass more.
        issued = [one["instructions"] / (98_304 * 8192) for one in launches if "exp2" in one["name"]]
        assert min(issued) > 15 and max(issued) < 50 and len(issued) == 2
        assert max(graph["peak_bytes"] for graph in step["graphs"]) <= 40 * 2**30
        # Logits are never kept in fp32.
        outputs = step["graphs"][0]["outputs"]
        for output in outputs:
            assert output["dtype"] != "float32" or output["size_bytes"] < 98_304 * 8192
        saved_bytes[phase] = sum(output["size_bytes"] for output in outputs)
    # Six visits more keep 18 widths of the model in bf16 each, and some small sums.
    a_visit = (saved_bytes["train_loop"] - saved_bytes["train"]) / 6
    assert a_visit <= 2 * 98_304 * 512 * 18.2
