"""OPTIMIZER: Muon from its formulas, one owner for each parameter, any number of ranks."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import train_gpt
from tests.support.before import before
from tests.support.models import tiny_config
from tests.support.ranks import on_ranks
from train_gpt import Config, Machine, Optimizer, build_model, orthogonalize

PR549 = {"BIGRAM_VOCAB_SIZE": 24, "BIGRAM_DIM": 6, "VE_ENABLED": 1, "VE_DIM": 6, "VE_LAYERS": "0,2",
         "CHANNEL_SMEAR_ENABLED": 1}


def three_layers(**changes: object) -> Config:
    """Three matrices of a kind: no bank divides among two or four ranks."""
    return tiny_config(**{"NUM_LAYERS": 3, "LOOP_START": 1, "LOOP_END": 1, **changes})


def batch(step: int, rows: int = 8) -> Tensor:
    """Ids (rows, 17) with some order in them, the same for everyone."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(2, 64, (rows, 1), generator=generator)
    return (starts + 3 * torch.arange(17)) % 62 + 2


def bank_names(config: Config) -> list[str]:
    """The parameters that Muon updates."""
    table = train_gpt.parameter_table(config)
    return [name for name, parameter in table.items() if parameter.optimizer == "muon"]


def alone(model: train_gpt.GPT, config: Config) -> Optimizer:
    """The optimizer of a single rank."""
    return Optimizer(model, config, Machine())


def train(model: train_gpt.GPT, optimizer: Optimizer, steps: range) -> list[Tensor]:
    """Losses of all ranks' tokens, one per step; each rank sees its rows in micro-batches of two."""
    machine = optimizer.machine
    losses = []
    for step in steps:
        mine = batch(step).chunk(machine.world_size)[machine.rank].split(2)
        total = torch.zeros(())
        for ids in mine:
            loss = model.loss(ids[:, :-1], ids[:, 1:], looping=step >= 4) / len(mine)
            loss.backward()
            total += loss.detach()
        machine.all_reduce(total)
        losses.append(total / machine.world_size)
        optimizer.step(lr_scale=1.0 - step / 40, momentum=0.9)
    return losses


def one_rank(machine: Machine, folder: str, changes: dict[str, Any]) -> None:
    """A rank of a group: 6 steps, the state saved and loaded into a new optimizer, 4 more."""
    config = three_layers(**changes)
    model = build_model(config)
    optimizer = Optimizer(model, config, machine)
    losses = train(model, optimizer, range(6))
    state = optimizer.state()
    optimizer = Optimizer(model, config, machine)
    optimizer.load_state(state)
    losses += train(model, optimizer, range(6, 10))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    torch.save({"losses": losses, "weights": weights, "state": state}, f"{folder}/{machine.rank}.pt")


def test_four_ranks_take_the_same_steps_as_one(tmp_path: Path) -> None:
    """Every bank is filled up to a number of matrices that the ranks divide."""
    size = 4
    changes = {"GRAD_CLIP_NORM": 0.05, **PR549}
    config = three_layers(**changes)
    model = build_model(config)
    expected = train(model, alone(model, config), range(10))
    on_ranks(size, tmp_path, one_rank, str(tmp_path), changes)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(size)]
    for rank in ranks:
        torch.testing.assert_close(rank["losses"], expected, rtol=2e-5, atol=2e-5)
        for name, weights in rank["weights"].items():
            assert torch.equal(weights, ranks[0]["weights"][name]), name
    resumed = alone(model, config)
    resumed.load_state(ranks[-1]["state"])
    assert [m.shape for m in resumed.states["momenta"]] == [bank.shape for bank in resumed.banks]
    assert all(m.abs().max() > 0 for m in resumed.states["momenta"])


def by_formula(weight: Tensor, gradients: list[Tensor], config: Config, momentum: float) -> Tensor:
    """Muon on one matrix, step after step, in float64."""
    weight = weight.double()
    tall = weight.size(0) > weight.size(1)
    coefficients = train_gpt.POLAR_EXPRESS if config.muon_polar_express else [(3.4445, -4.775, 2.0315)] * 5
    for last in range(len(gradients)):
        newest_first = reversed(gradients[: last + 1])
        buffer = sum(momentum**age * gradient.double() for age, gradient in enumerate(newest_first))
        x = gradients[last].double() + momentum * buffer
        if config.muon_row_normalize:
            x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-7)
        x = x.T if tall else x
        x = x / (x.norm() + 1e-7)
        for a, b, c in coefficients:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        stretch = math.sqrt(max(1.0, weight.size(0) / weight.size(1)))
        decayed = weight * (1 - config.matrix_lr * config.muon_wd)
        weight = decayed - config.matrix_lr * stretch * (x.T if tall else x)
    return weight


@pytest.mark.parametrize("changes", [
    {}, {"MUON_ROW_NORMALIZE": 0, "MUON_POLAR_EXPRESS": 0, "MUON_WD": 0},
], ids=["default", "plain"])
def test_muon_step_from_its_formulas(changes: dict[str, Any]) -> None:
    momentum = 0.9
    config = three_layers(GRAD_CLIP_NORM=0, **changes)
    model = build_model(config)
    optimizer = alone(model, config)
    before = {name: model.get_parameter(name).detach().clone() for name in bank_names(config)}
    assert len(before) == 4
    gradients: dict[str, list[Tensor]] = {name: [] for name in before}
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for name, parameter in model.named_parameters():
            # As small as the gradients of a real run, whose clipped norm is 0.3 over all parameters.
            parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator)
            if name in gradients:
                gradients[name].append(parameter.grad.clone())
        optimizer.step(1.0, momentum)
    for name, bank in before.items():
        for index, matrix in enumerate(bank):
            found = getattr(model, name)[index].double()
            expected = by_formula(matrix, [g[index] for g in gradients[name]], config, momentum)
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("changes", [{}, PR549])
def test_small_tensors_follow_adamw(changes: dict[str, Any]) -> None:
    config = three_layers(**{"GRAD_CLIP_NORM": 0, "EMBED_WD": 0.3, "ADAM_WD": 0.2, **changes})
    model = build_model(config)
    rates = {}
    for table in ("token_embedding_VD", "bigram_table_RC", "value_table_VC"):
        rates[table] = (config.tied_embed_lr, config.embed_wd)
    twins = {}
    steps = []
    for name, parameter in model.named_parameters():
        if name not in bank_names(config):
            twins[name] = parameter.detach().clone().requires_grad_()
            lr, decay = rates.get(name, (config.scalar_lr, config.adam_wd))
            betas = config.beta1, config.beta2
            steps.append(torch.optim.AdamW([twins[name]], lr / 2, betas, config.adam_eps, decay))
    optimizer = alone(model, config)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            if name in twins:
                twins[name].grad = parameter.grad.clone()
        optimizer.step(0.5, 0.9)
        for step in steps:
            step.step()
    for name, twin in twins.items():
        torch.testing.assert_close(getattr(model, name), twin)


@pytest.mark.parametrize(("norm", "factor"), [(0.5, 0.05), (20.0, 1.0), (0.0, 1.0)])
def test_clipping_is_by_the_global_norm(norm: float, factor: float) -> None:
    """Every gradient is scaled by one factor; momentum buffers hold what was left of it."""
    config = three_layers(GRAD_CLIP_NORM=norm)
    model = build_model(config)
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 10.0 / math.sqrt(count))
    optimizer = alone(model, config)
    laps: list[str] = []
    assert float(optimizer.step(1.0, 0.0, lap=laps.append)) == pytest.approx(10.0, rel=1e-4)
    assert laps == ["optimizer", "grad_clip"]  # the parts before the clipping and with it
    for buffer in optimizer.states["momenta"]:
        expected = torch.full_like(buffer, factor * 10.0 / math.sqrt(count))
        torch.testing.assert_close(buffer, expected, rtol=1e-4, atol=0)
    assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 24, 24), (3, 16, 64), (2, 64, 16)])
@pytest.mark.parametrize(("polar", "low", "high"), [(True, 0.85, 1.15), (False, 0.45, 1.25)])
def test_orthogonalized_singular_values_are_near_one(
    shape: tuple[int, ...], polar: bool, low: float, high: float, dtype: torch.dtype
) -> None:
    """In bfloat16 too, on GPUs and on CPUs with units for it: the same bounds."""
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = orthogonalize(update, 5, polar, dtype)
    assert x.is_contiguous() and x.dtype == dtype
    assert torch.equal(x, orthogonalize(update, 5, polar, torch.float32)) == (dtype == torch.float32)
    x = x.float()
    values = torch.linalg.svdvals(x)
    spread = torch.linalg.svdvals(update)
    strong = values[spread > 0.02 * spread.norm(dim=1, keepdim=True)]
    assert strong.min() > low and strong.max() < high
    assert torch.equal(orthogonalize(torch.zeros(shape), 5, polar, dtype).float(), torch.zeros(shape))


def after_steps(numbers: list[int], **changes: Any) -> tuple[Optimizer, list[list[Tensor]]]:
    """An optimizer after steps of these numbers, and the weights at first and after each."""
    config = three_layers(**changes)
    model = build_model(config)
    optimizer = alone(model, config)
    generator = torch.Generator().manual_seed(3)
    seen = [[p.detach().clone() for p in model.parameters()]]
    for number in numbers:
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step(1.0, 0.9, number)
        seen.append([p.detach().clone() for p in model.parameters()])
    return optimizer, seen


def test_the_average_of_weights() -> None:
    """Each step keeps a share of the average, more in later ones, and takes the rest from its weights."""
    optimizer, (first, second, third) = after_steps([26, 8])
    for average, a, b, c in zip(optimizer.average, first, second, third, strict=True):
        torch.testing.assert_close(average, 0.5 * (0.75 * a + 0.25 * b) + 0.5 * c)
        assert not torch.equal(b, c)
    optimizer, (first, second) = after_steps([100_000])
    for average, a, b in zip(optimizer.average, first, second, strict=True):
        torch.testing.assert_close(average, 0.9965 * a + 0.0035 * b)
    optimizer, (*_, last) = after_steps([3, 4])
    average = [weight.clone() for weight in optimizer.average]
    optimizer.use_average()
    assert all(map(torch.equal, optimizer.weights, average))
    assert not any(map(torch.equal, optimizer.weights, last))
    optimizer, (*_, last) = after_steps([0, 7], EMA_DECAY=0)
    assert all(map(torch.equal, optimizer.average, last))
    assert all(map(torch.equal, optimizer.weights, last))


@pytest.fixture
def eight_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """This process is one of eight whose peers are not there; counts its collectives."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    calls: Counter[str] = Counter()
    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    collectives = ["all_reduce", "broadcast"]
    for name, former in (("reduce_scatter_single", "reduce_scatter_tensor"),
                         ("all_gather_single", "all_gather_into_tensor")):
        collectives.append(name if hasattr(torch.distributed, name) else former)
    for name in collectives:
        kind = "_".join(name.split("_")[:2])
        before(monkeypatch, torch.distributed, name, lambda *_, kind=kind, **__: calls.update([kind]))
    yield calls
    torch.distributed.destroy_process_group()


def test_collectives_of_a_step_are_few_and_those_of_learning_are_one(eight_ranks: Counter[str]) -> None:
    config = tiny_config(TTT_EPOCHS=2, TTT_CHUNK_TOKENS=64, TTT_BATCH_SEQS=1)
    machine = train_gpt.Machine(rank=0, world_size=8)
    model = train_gpt.build_model(config)
    model.machine = machine
    optimizer = train_gpt.Optimizer(model, config, machine)
    ids_BT = torch.randint(2, config.vocab_size, (1, config.train_seq_len))
    model.loss(ids_BT, ids_BT).backward()
    optimizer.step(1.0, 0.9)
    # The small tensors travel as one, and the norm of all gradients is one number.
    banks = len(optimizer.banks)
    assert banks == 4
    assert eight_ranks == {"reduce_scatter": banks, "all_gather": banks, "all_reduce": 2}
    eight_ranks.clear()
    tokens = np.full(64 + 1, 2, np.uint16)
    train_gpt.learn(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens, config)
    assert eight_ranks == {"all_reduce": 2 * (64 // config.eval_length)}  # one of each step


def test_a_parameter_that_the_loss_does_not_use_is_named() -> None:
    """Whoever adds a row to the table and forgets to read it, or reads it in other layers only."""
    config = tiny_config()
    model = build_model(config)
    optimizer = Optimizer(model, config, Machine())
    model.loss(torch.ones(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64)).backward()
    model.get_parameter("smear_scale_1").grad = None
    with pytest.raises(RuntimeError, match=r"no gradient for parameters of shape \(1,\): .*parameter_table"):
        optimizer.step(1.0, 0.9)
