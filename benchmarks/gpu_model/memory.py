"""Bytes that a training step needs on a GPU, by a formula: configs are checked by it before they meet a card.

    python -m benchmarks.gpu_model.memory configs/*.env
    python -m benchmarks.gpu_model.memory configs/h100_1gpu.env --set MICRO_BATCH_TOKENS=32768

The formula counts what a visit of a layer saves for the backward pass, as the census traces it, and all that
lasts as long as the run. It lies 0 to 10 % above the traced peak of the default run.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train_gpt
from benchmarks.gpu_model import subject
from data.files import escape_unprintable

# Widths of the model that a visit saves besides its MLP, queries, keys and values: lane, mixed lane, its
# norm, output of attention, the same behind XSA, input of the MLP, and what is under way.
SAVED_WIDTHS = 8
# fp32: weights, gradients, average, momenta or Adam's two moments, and what an update works in.
BYTES_A_PARAMETER = 28


def predicted_bytes(config: train_gpt.Config, world_size: int, bytes_a_value: int = 2) -> int:
    """Peak bytes of one of `world_size` ranks in training with recurrence, averages and optimizer included.

    bytes_a_value: of activations: 2 for bf16, with the Triton kernels; 4 for fp32, without them.
    """
    rows, length = subject.rows(config, "train", world_size)
    layers = subject.visits(config, looping=config.num_loops > 0)
    heads = config.model_dim + 2 * config.num_kv_heads * config.head_dim
    hidden = 2 * config.mlp_dim
    if bytes_a_value == 4:  # the plain MLP keeps its activation in one form more, and its normalised input
        hidden += config.mlp_dim + config.model_dim
    a_visit = hidden + 2 * heads + SAVED_WIDTHS * config.model_dim
    # The logits, and their gradient.
    a_token = layers * a_visit + 2 * config.vocab_size
    parameters = sum(math.prod(one.shape) for one in train_gpt.parameter_table(config).values())
    return rows * length * a_token * bytes_a_value + parameters * BYTES_A_PARAMETER


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    escape_unprintable()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="files of settings")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings over each file")
    options = parser.parse_args(arguments)
    for path in options.configs:
        config = subject.config(path, options.set)
        world_size = 1 if "1gpu" in path or "demo" in path else 8
        for bytes_a_value, name in ((2, "bf16"), (4, "fp32")):
            gigabytes = predicted_bytes(config, world_size, bytes_a_value) / 1e9
            print(f"{path}: {gigabytes:.1f} GB in {name}, {world_size} GPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
