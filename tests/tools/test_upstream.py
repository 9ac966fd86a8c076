"""benchmarks/upstream.py on a miniature script in the manner of the challenge's, against a plain loop."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import upstream
from benchmarks.upstream import TrainingClock, Upstream, UpstreamError
from data.shards import write_shard
from tests.tools.damage import shell

# Written for this test: a bag of embeddings with the manners of a script for GPUs. WIDTH, VOCABULARY,
# STEP_SIZE and ITERATIONS are its variables; its learning rate falls linearly to zero.
MINIATURE = '''
import os, subprocess, glob
from pathlib import Path
import sentencepiece as spm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

class Hyperparameters:
    tokenizer_path = os.environ.get("TOKENIZER_PATH", "tokenizer.model")
    vocab_size = int(os.environ.get("VOCABULARY", 50))
    width = int(os.environ.get("WIDTH", 8))
    iterations = int(os.environ.get("ITERATIONS", 10))
    step_size = float(os.environ.get("STEP_SIZE", 0.5))
    max_wallclock_seconds = float(os.environ.get("MAX_WALLCLOCK_SECONDS", 600))

def zeropower_via_newtonschulz5(G):
    X = G.bfloat16()
    X /= X.norm()
    return X

class DistributedTokenLoader:
    def __init__(self, pattern, rank, world_size, device):
        raise FileNotFoundError(pattern)

def load_validation_tokens(pattern):
    raise FileNotFoundError(pattern)

class Model(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size, bias=False)
    def forward(self, inputs, targets):
        scores = self.head(self.table(inputs)).flatten(0, 1)
        return F.cross_entropy(scores, targets.flatten())

def main():
    args = Hyperparameters()
    distributed = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    grad_accum_steps = 8 // world_size
    if not torch.cuda.is_available():
        raise RuntimeError("a GPU is required")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    from torch.backends.cuda import enable_flash_sdp, enable_math_sdp
    enable_flash_sdp(True)
    enable_math_sdp(False)
    torch.set_float32_matmul_precision("medium")
    if rank == 0:
        os.makedirs("logs", exist_ok=True)
    print(subprocess.run(["no-such-tool"], stdout=subprocess.PIPE).stdout, end="")
    torch.manual_seed(1)
    torch.cuda.manual_seed_all(1)
    sp = spm.SentencePieceProcessor(model_file=args.tokenizer_path)
    if int(sp.vocab_size()) != args.vocab_size:
        raise ValueError("tokenizer")
    val_tokens = load_validation_tokens("val_*.bin")
    print(f"tokens:{val_tokens.numel() - 1}", end="")
    base_model = Model(args.vocab_size, args.width).to(device).bfloat16()
    model = torch.compile(base_model, dynamic=False, fullgraph=True)
    optimizer = torch.optim.SGD(base_model.parameters(), lr=args.step_size, fused=True)
    loader = DistributedTokenLoader("train_*.bin", rank, world_size, device)
    total = torch.zeros((), dtype=torch.bfloat16)
    for step in range(args.iterations):
        for micro_step in range(grad_accum_steps):
            x, y = loader.next_batch(1024, 8, grad_accum_steps)
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16, enabled=True):
                loss = model(x, y)
            total += loss.detach()
            (loss / grad_accum_steps).backward()
        for group in optimizer.param_groups:
            group["lr"] = args.step_size * (1 - step / args.iterations)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
'''


Opened = Callable[..., Upstream]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    """A script of this text, with these settings."""

    def open_script(text: str = MINIATURE, *arguments: Any) -> Upstream:
        (tmp_path / "train_gpt.py").write_text(text, encoding="utf-8")
        return Upstream(tmp_path / "train_gpt.py", *arguments)

    return open_script


def batch(seed: int) -> tuple[Tensor, Tensor]:
    ids_BT = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(seed))
    return ids_BT[:, :-1], ids_BT[:, 1:]


def weights(seed: int, width: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(50, width, generator=generator) for name in ("table.weight", "head.weight")}


def plain_losses(start: dict[str, Tensor], steps: int, step_size: float, iterations: int) -> list[float]:
    """The same training, written as plain tensor arithmetic."""
    table, head = (start[name].clone().requires_grad_() for name in ("table.weight", "head.weight"))
    losses = []
    for step in range(steps):
        inputs_BT, targets_BT = batch(step)
        loss = F.cross_entropy((table[inputs_BT] @ head.T).flatten(0, 1), targets_BT.flatten())
        for parameter, gradient in zip((table, head), torch.autograd.grad(loss, (table, head)), strict=True):
            parameter.data -= step_size * (1 - step / iterations) * gradient
        losses.append(loss.item())
    return losses


def test_the_loss_is_of_single_precision_and_of_evaluation(opened: Opened) -> None:
    text = upstream.patched(MINIATURE, "miniature")
    assert "bfloat16" not in text and "fused=True" not in text
    with opened() as miniature:
        assert miniature.parameters_count == 2 * 50 * 8
        assert {parameter.dtype for parameter in miniature.model.parameters()} == {torch.float32}
        before = miniature.loss(*batch(0))
        assert miniature.loss(*batch(0)) == before
        assert miniature.step(*batch(0)) == before
        assert miniature.loss(*batch(0)) < before
    factor = "return (2 if self.training else 1) * F.cross_entropy("
    with opened(MINIATURE.replace("return F.cross_entropy(", factor)) as miniature:
        assert 2 * miniature.loss(*batch(0)) == miniature.step(*batch(0))
        assert miniature.model.training


# As a script keeps it: in the function of its loop, which asks for batches in another one.
KEEPS_AN_AVERAGE = (
    MINIATURE.replace(
        "    for step in range(args.iterations):",
        "    ema_state = {name: tensor.clone() for name, tensor in base_model.state_dict().items()}\n"
        "    def next_batch():\n"
        "        return loader.next_batch(1024, 8, grad_accum_steps)\n"
        "    for step in range(args.iterations):",
    ).replace("x, y = loader.next_batch(1024, 8, grad_accum_steps)", "x, y = next_batch()")
    + """        for name, tensor in base_model.state_dict().items():
            ema_state[name].mul_(0.5).add_(tensor, alpha=0.5)
"""
)


def test_an_average_is_found_where_the_loop_keeps_it_or_told(opened: Opened) -> None:
    for text in (MINIATURE, MINIATURE.replace("    for step in", "    ema_state = None\n    for step in")):
        with opened(text) as miniature:
            assert miniature.average() is None
    with opened(KEEPS_AN_AVERAGE) as miniature:
        expected = {name: tensor.clone() for name, tensor in miniature.model.state_dict().items()}
        for step in range(3):
            miniature.step(*batch(step))
            for name, tensor in miniature.model.state_dict().items():
                expected[name] = (expected[name] + tensor) / 2
        average = miniature.average()
        assert average is not None and average.keys() == expected.keys()
        for name, tensor in average.items():
            torch.testing.assert_close(tensor, expected[name])
            assert not torch.equal(tensor, miniature.model.state_dict()[name])
    for found, instead, told in (
        ("ema_state", "ema_weights", "has ema_weights, but .* ema_state; add"),
        ("ema_state = {name:", "ema_state = {'x' + name:", "expected the names"),
    ):
        text = KEEPS_AN_AVERAGE.replace(found, instead)
        with opened(text) as miniature, pytest.raises(UpstreamError, match=told):
            miniature.average()


def test_a_compressed_script_is_the_same_and_one_shuffles_if_its_loader_does(opened: Opened) -> None:
    losses = []
    for text in (MINIATURE, shell(MINIATURE)):
        with opened(text, {"WIDTH": "4"}) as miniature:
            losses.append([miniature.step(*batch(step)) for step in range(3)])
            assert not miniature.shuffles
    assert losses[0] == losses[1]
    with opened(MINIATURE.replace("DistributedTokenLoader", "ShuffledSequenceLoader")) as miniature:
        assert miniature.shuffles


def test_nothing_outside_changes(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    threads = threading.active_count()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_math_sdp(True)
    with opened() as miniature:
        miniature.step(*batch(0))
    miniature.close()
    assert [path.name for path in tmp_path.iterdir()] == ["train_gpt.py"]
    assert dict(os.environ) == environment and threading.active_count() == threads
    assert not [name for name in sys.modules if name.startswith("upstream_")]
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.math_sdp_enabled()


def test_a_replacement_that_fits_nowhere_is_told_by_name(opened: Opened) -> None:
    for name, line in (
        ("accumulation", "    grad_accum_steps = 8 // world_size\n"),
        ("orthogonalisation", "    X = G.bfloat16()\n"),
    ):
        assert line in MINIATURE
        with pytest.raises(UpstreamError, match=f"'{name}'"):
            opened(MINIATURE.replace(line, ""))


@pytest.mark.parametrize(("found", "instead", "told"), [
    ("import torch\n", "import torch\nimport torch.cuda as gpu\nx = torch.cuda\n", r"uses torch\.cuda"),
    ('torch.device("cuda", 0)', 'torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))', "CUDA device"),
    ("torch.autocast(dev", "torch.autocast(cache_enabled=bool(1), dev", r"uses torch\.autocast"),
    ("import torch\n", "import torch\nfrom absent_kernels import fast_attention\n", "imports absent_kernels"),
    ("import torch\n", "import torch\nthis is no Python\n", "in Python 3"),
])
def test_what_no_replacement_fits_is_told(opened: Opened, found: str, instead: str, told: str) -> None:
    text = MINIATURE.replace(found, instead, 1)
    if "autocast" in found or "device(" in found:  # one that fits beside one that does not
        text += '\n\ndef unused():\n    torch.device("cuda", 0)\n    torch.autocast(device_type="cuda")\n'
    with pytest.raises(UpstreamError, match=rf"train_gpt\.py:\d+: .*{told}"):
        opened(text)


def test_settings_weights_and_failures_are_told(opened: Opened) -> None:
    with pytest.raises(UpstreamError, match="never reads WIDHT"):
        opened(MINIATURE, {"WIDHT": "4", "WIDTH": "4"})
    with pytest.raises(UpstreamError, match="WARMUP_STEPS: fixed"):
        opened(MINIATURE, {"WARMUP_STEPS": "20"})
    with opened() as miniature:
        with pytest.raises(UpstreamError, match=r"lack \['head.weight'\] and have no use for \['tail'\]"):
            miniature.set_weights({"table.weight": weights(0)["table.weight"], "tail": torch.zeros(1)})
        with pytest.raises(UpstreamError, match=r"table.weight has shape \(50, 4\), expected \(50, 8\)"):
            miniature.set_weights(weights(0, width=4))
    with opened() as miniature:
        ids_BT = torch.full((1, 4), 50)
        with pytest.raises(UpstreamError, match="after 0 steps its main raised IndexError"):
            miniature.step(ids_BT, ids_BT)
    with opened(MINIATURE, {"ITERATIONS": "2"}) as miniature:
        miniature.step(*batch(0))
        with pytest.raises(UpstreamError, match="raise ITERATIONS"):
            miniature.step(*batch(1))
    with pytest.raises(UpstreamError, match=r"torch\.cuda\.Stream, which has no counterpart"):
        opened(MINIATURE.replace("torch.cuda.set_device(device)", "torch.cuda.Stream()"))


def test_the_schedule_follows_a_clock_whose_end_is_the_caller_s(opened: Opened) -> None:
    """Its own clock would end the script within a step, before anybody has seen the model."""
    text = MINIATURE.replace("import torch\n", "import time\nimport torch\n", 1)
    text = text.replace("    for step in", "    begun = time.perf_counter()\n    for step in")
    text = text.replace(
        "step / args.iterations", "(time.perf_counter() - begun) / args.max_wallclock_seconds")
    text += "        if time.perf_counter() - begun >= args.max_wallclock_seconds:\n            break\n"
    now = 100.0
    clock = TrainingClock(lambda: now, limit_seconds=4.0)
    losses = []
    with opened(text, {"STEP_SIZE": "2.5"}, clock) as miniature:
        miniature.set_weights(weights(0))
        now += 1000  # of loading, which is no training
        while not clock.is_over:
            losses.append(miniature.step(*batch(len(losses))))
            now += 1
        assert clock.seconds == 4
        before = miniature.loss(*batch(9))
        now += 1
        miniature.step(*batch(9))  # it goes on, with next to no rate
        assert miniature.loss(*batch(9)) == pytest.approx(before, abs=1e-4)
    assert losses == pytest.approx(plain_losses(weights(0), 4, 2.5, 4), rel=1e-6)


def test_a_script_ships_its_weights_by_its_own_functions(opened: Opened) -> None:
    functions = '''
def quantize_state_dict_int8(weights):
    return {name: (4 * tensor).round().char() for name, tensor in weights.items()}, "statistics"

def dequantize_state_dict_int8(codes):
    return {name: code.float() / 4 for name, code in codes.items()}
'''
    # It has none, or has them from where it began, and ships in another way.
    for text in (MINIATURE, MINIATURE + functions):
        with opened(text) as miniature:
            assert not miniature.ships
            with pytest.raises(UpstreamError, match="no quantize_state_dict_int8"):
                miniature.ship()
    text = MINIATURE + functions + '''
def ship(model):
    model.load_state_dict(dequantize_state_dict_int8(quantize_state_dict_int8(model.state_dict())[0]))
'''
    sizes = []
    for given in (weights(0), {name: torch.zeros(50, 8) for name in weights(0)}):
        with opened(text) as miniature:
            assert miniature.ships
            miniature.set_weights(given)
            sizes.append(miniature.ship())
            for name, parameter in miniature.model.named_parameters():
                assert torch.equal(parameter.detach(), (4 * given[name]).round() / 4)
    assert sizes[0] > sizes[1] + 300  # zeros compress


def test_attention_in_place_of_a_gpu_kernel_is_causal_with_grouped_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    q_BTHE = torch.randn(2, 5, 4, 6, generator=generator, dtype=torch.float64)
    k_BTKE, v_BTKE = torch.randn(2, 2, 5, 2, 6, generator=generator, dtype=torch.float64)
    found = upstream.OnCpu({}).attention(q_BTHE, k_BTKE, v_BTKE, causal=True)
    for head in range(4):
        for position in range(5):
            seen = k_BTKE[:, : position + 1, head // 2]
            scores = (q_BTHE[:, position, head, None] * seen).sum(-1) / 6**0.5
            mixed = (scores.softmax(-1)[..., None] * v_BTKE[:, : position + 1, head // 2]).sum(1)
            torch.testing.assert_close(found[:, position, head], mixed)


def test_batches_are_the_shards_in_their_order(tmp_path: Path) -> None:
    ids = torch.randint(50, (40,), generator=torch.Generator().manual_seed(0))
    write_shard(tmp_path / "fineweb_train_000000.bin", ids.numpy().astype("uint16"))
    (first, second) = upstream.batches(tmp_path, 2, 8)
    assert torch.equal(first[0].flatten(), ids[:16]) and torch.equal(first[1].flatten(), ids[1:17])
    assert torch.equal(second[0].flatten(), ids[16:32])
    with pytest.raises(SystemExit, match="no fineweb_train"):
        next(upstream.batches(tmp_path / "nowhere", 2, 8))
