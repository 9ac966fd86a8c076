"""Compare this script's training step with a public one's: same weights, same batches, loss after loss.

    python benchmarks/parity.py pr549 ~/parameter-golf/records/.../train_gpt.py
        --data data/datasets/fineweb_sample_sp1024 [--steps 5] [NUM_LAYERS=6 ...]

PATH is your own copy of the script, which `benchmarks/upstream.py` runs on the CPU. Both get the same
variables under the public script's names, on top of that system's config for ours, and our initial weights
are copied over. The exit status is 1 if a loss differs by more than 1e-3 nats.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
import train_gpt  # noqa: E402
from benchmarks.upstream import Upstream, UpstreamError, batches, in_our_names  # noqa: E402
from data.files import escape_unprintable  # noqa: E402
from train_gpt import GPT, Config, ConfigError, Machine, Optimizer, build_model  # noqa: E402

LARGEST_DIFFERENCE = 1e-3  # nats

# A model for a CPU; a schedule that begins to fall within a few steps.
SMALL = {
    "NUM_LAYERS": "4", "MODEL_DIM": "64", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "VOCAB_SIZE": "1024",
    "TRAIN_SEQ_LEN": "128", "ITERATIONS": "100",
}
IN_STEPS = {"WARMDOWN_ITERS": "98"}
OF_PR549 = {"VE_LAYERS": "2,3", "XSA_LAST_N": "3", "ROPE_DIMS": "8", "BIGRAM_VOCAB_SIZE": "1536", **IN_STEPS}
OF_PR1493 = {
    "EMBEDDING_DIM": "64", "LOOP_START": "1", "LOOP_END": "2", "PARALLEL_RESIDUAL_START": "3",
    "XSA_LAST_N": "4", "ROPE_DIMS": "8", "QK_GAIN_INIT": "5.25",
}
# Ours alone: what a run on a CPU without a clock needs, and what no training step asks for.
OURS_ALONE = {"DEVICE": "cpu", "MAX_WALLCLOCK_SECONDS": "0", "EVAL_STRIDE": "0", "TTT_ENABLED": "0"}

Weights = Mapping[str, Tensor]


def common_names(ours: Weights) -> dict[str, Tensor]:
    """What all scripts name alike: embedding, skips, and the vectors of each block."""
    theirs = {"tok_emb.weight": ours["token_embedding_VD"], "skip_weights": ours["skip_weight_SD"]}
    if "skip_gate_SD" in ours:
        theirs["skip_gates"] = ours["skip_gate_SD"]
    for layer in range(len(ours["attn_scale_LD"])):
        block = f"blocks.{layer}"
        theirs[f"{block}.attn_scale"] = ours["attn_scale_LD"][layer]
        theirs[f"{block}.mlp_scale"] = ours["mlp_scale_LD"][layer]
        mix = [ours["resid_keep_LD"][layer], ours["resid_inject_LD"][layer]]
        theirs[f"{block}.resid_mix"] = torch.stack(mix)
        theirs[f"{block}.attn.q_gain"] = ours["qk_gain_LH"][layer]
    return theirs


def matrix_by_matrix(ours: Weights) -> dict[str, Tensor]:
    """Scripts with a linear layer for each matrix: the baseline, PRs #591, #1493 and #1532."""
    theirs = common_names(ours)
    layers = len(ours["attn_scale_LD"])
    for layer in range(layers):
        block = f"blocks.{layer}"
        theirs[f"{block}.attn.c_q.weight"] = ours["qo_bank"][layer]
        theirs[f"{block}.attn.proj.weight"] = ours["qo_bank"][layers + layer]
        theirs[f"{block}.attn.c_k.weight"] = ours["kv_bank"][layer]
        theirs[f"{block}.attn.c_v.weight"] = ours["kv_bank"][layers + layer]
        theirs[f"{block}.mlp.fc.weight"] = ours["mlp_up_bank"][layer]
        theirs[f"{block}.mlp.proj.weight"] = ours["mlp_down_bank"][layer]
    return theirs


def in_banks(ours: Weights) -> dict[str, Tensor]:
    """Scripts with banks, in our order, and tables of the vocabulary: PRs #549 and #785."""
    theirs = common_names(ours)
    for bank in ("qo_bank", "kv_bank", "mlp_up_bank", "mlp_down_bank"):
        theirs[bank] = ours[bank]
    theirs["smear.gate"] = ours["channel_smear_1D"][0]
    theirs["bigram.embed.weight"] = ours["bigram_table_RC"]
    theirs["bigram.proj.weight"] = ours["bigram_projection_1DC"][0]
    theirs["bigram.scale"] = ours["bigram_scale_1"][0]
    theirs["ve_shared.embed.weight"] = ours["value_table_VC"]
    theirs["ve_shared.proj.weight"] = ours["value_projection_1KC"][0]
    theirs["ve_shared.scale"] = ours["value_scale_1"][0]
    for number, scale in enumerate(ours["value_layer_scale_N"]):
        theirs[f"ve_layer_scales.{number}"] = scale[None]
    return theirs


class System(NamedTuple):
    """A public script, and how it is compared."""

    config: str  # under configs/
    settings: dict[str, str]  # for both
    names: Callable[[Weights], dict[str, Tensor]]


SYSTEMS = {
    "baseline": System("upstream_baseline.env", IN_STEPS, matrix_by_matrix),
    "pr591": System("pr591.env", IN_STEPS, matrix_by_matrix),
    "pr549": System("pr549.env", OF_PR549, in_banks),
    "pr785": System("pr785.env", OF_PR549, in_banks),
    "pr1493": System("pr1493.env", OF_PR1493, matrix_by_matrix),
    "pr1532": System("pr1493.env", OF_PR1493, matrix_by_matrix),
}


def our_config(system: System, settings: Mapping[str, str]) -> Config:
    """The system's configuration with the settings of a comparison. ConfigError, UpstreamError."""
    path = REPO / "configs" / system.config
    given = in_our_names({**SMALL, **system.settings, **settings}, path)
    return Config.from_env({"CONFIG": str(path), **given, **OURS_ALONE})


class OurTraining:
    """Training steps of train_gpt.py on batches from outside, without a clock."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model: GPT = build_model(config)
        self.optimizer = Optimizer(self.model, config, Machine())
        self.steps = 0

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> float:
        """One step; the loss before it, in nats."""
        config = self.config
        progress = self.steps / config.iterations
        loss = self.model.loss(inputs_BT, targets_BT, looping=train_gpt.loop_is_on(progress, config))
        loss.backward()
        lr_scale = train_gpt.learning_rate_scale(progress, self.steps, config)
        momentum = train_gpt.muon_momentum(progress, self.steps, config)
        self.optimizer.step(lr_scale, momentum, self.steps)
        self.steps += 1
        return loss.item()


def compare(
    system: System, path: Path, settings: Mapping[str, str], feed: Iterator[tuple[Tensor, Tensor]], steps: int
) -> float:
    """Take steps with both from our first weights, and print their losses; the largest difference in nats.

    Raises UpstreamError where the script has other parameters, or reads none of a setting's name.
    """
    ours = OurTraining(our_config(system, settings))
    largest = 0.0
    with Upstream(path, {**SMALL, **system.settings, **settings}) as theirs:
        theirs.set_weights(system.names(dict(ours.model.named_parameters())))
        count = sum(parameter.numel() for parameter in ours.model.parameters())
        print(f"parameters: theirs:{theirs.parameters_count} ours:{count}")
        for step in range(1, steps + 1):
            inputs_BT, targets_BT = next(feed)
            their_loss = theirs.step(inputs_BT, targets_BT)
            our_loss = ours.step(inputs_BT, targets_BT)
            difference = our_loss - their_loss
            largest = max(largest, abs(difference))
            print(f"step:{step} theirs:{their_loss:.7f} ours:{our_loss:.7f} difference:{difference:+.1e}")
    return largest


def main() -> int:
    """Compare some steps. Status 0: the losses agree."""
    escape_unprintable()
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("path", type=Path, help="your copy of that system's train_gpt.py")
    parser.add_argument("settings", nargs="*", metavar="NAME=value", help="variables for both")
    parser.add_argument("--data", type=Path, required=True, help="folder of fineweb_train_*.bin")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4, help="sequences per step")
    arguments = parser.parse_intermixed_args()
    for pair in arguments.settings:
        if "=" not in pair:
            parser.error(f"{pair}: expected NAME=value")
    settings = dict(pair.split("=", 1) for pair in arguments.settings)
    system = SYSTEMS[arguments.system]
    try:
        length = our_config(system, settings).train_seq_len
        feed = batches(arguments.data, arguments.rows, length)
        largest = compare(system, arguments.path, settings, feed, arguments.steps)
    except (ConfigError, UpstreamError) as error:
        raise SystemExit(str(error)) from error
    agree = largest <= LARGEST_DIFFERENCE
    print(f"largest_difference:{largest:.1e} {'ok' if agree else f'above {LARGEST_DIFFERENCE:g}'}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
