"""Tiny models of train_gpt.py, with weights and batches that look as in training."""

import torch

import train_gpt
from tests.support import tiny
from train_gpt import GPT, Batch, Config


def tiny_config(**changes: object) -> Config:
    """The settings of the tiny model, some of them changed."""
    return Config.from_env(tiny.environment(**changes))


def plain_settings(layers: int, width: int, vocabulary: int, **changes: object) -> dict[str, str]:
    """The environment of a model of this size whose layers are all alike: no loop, one residual lane."""
    size = {"NUM_LAYERS": layers, "MODEL_DIM": width, "VOCAB_SIZE": vocabulary, "MLP_MULT": 4}
    heads = {"ROPE_DIMS": 4, "XSA_LAST_N": 1}
    off = {"NUM_LOOPS": 0, "PARALLEL_START_LAYER": -1}
    return tiny.environment(**{**size, **heads, **off, **changes})


def trained_like(config: Config, seed: int = 0) -> GPT:
    """A model whose weights look trained: rows and columns of different spread, a few outliers."""
    model = train_gpt.build_model(config)
    random_bits = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random_bits)
            if parameter.dim() > 1:
                noise *= torch.randn(parameter.shape[-1], generator=random_bits).mul(0.3).exp()
                noise *= torch.randn(*parameter.shape[:-1], 1, generator=random_bits).mul(0.3).exp()
                noise[torch.rand(noise.shape, generator=random_bits) < 1e-3] *= 6
            parameter.add_(0.03 * noise)
    return model


def random_batches(config: Config, count: int = 2, seed: int = 0) -> list[Batch]:
    """Random training batches of four rows, each one document."""
    random_bits = torch.Generator().manual_seed(seed)
    shape = (4, config.train_seq_len)
    batches = []
    for _ in range(count):
        inputs_BT = torch.randint(2, config.vocab_size, shape, generator=random_bits)
        targets_BT = inputs_BT.roll(-1, dims=1)
        batches.append(Batch(inputs_BT, targets_BT, train_gpt.starts_on_device(inputs_BT, config)))
    return batches
