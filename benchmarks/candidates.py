"""Candidates that the default does not have, each against the default at equal steps or seconds of one core.

    python benchmarks/candidates.py --data DIR --tokenizer FILE --runs FOLDER [--size small] [--seeds 1 2 3]
        [--rates 1.0 0.8 1.25] [--only base "key offset"] [--steps 300] [--equal seconds] [--table] [--keep]

A candidate is a patch of the model, its loss or its optimizer that is made here: nothing enters train_gpt.py
before it has earned it. All runs of a seed see the same tokens from the same first weights, but for what a
candidate changes of them, and are scored on the same validation targets by their averaged weights. Runs are
kept in the folder as files, one for each candidate, seed and factor on all learning rates: what is there is
not measured again, and several processes share the work.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # for torch: waiting threads would burn CPU seconds

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks import ablation, paired, results  # noqa: E402
from train_gpt import GPT, Config, Machine  # noqa: E402

TITLE = "What the default does not have"
COMMON = {
    "DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "TRAIN_PREFETCH": "0", "GPTQ": "0", "TTT_ENABLED": "0",
    "EVAL_STRIDE": "0", "MAX_WALLCLOCK_SECONDS": "0", "VAL_BATCH_SIZE": "16384", "TRAIN_SEQ_LEN": "256",
    "TRAIN_BATCH_TOKENS": "1024", "MICRO_BATCH_TOKENS": "1024", "ROPE_DIMS": "8", "MUON_MOMENTUM": "0.95",
    "MUON_MOMENTUM_WARMUP_START": "0.85", "EMA_DECAY": "0.95", "BETA2": "0.95",
}  # fmt: skip
# Heads of 32 channels, of which the default's quarter is rotated, two queries to a key.
SIZES = {
    "tiny": {
        "NUM_LAYERS": "4", "MODEL_DIM": "64", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "MLP_MULT": "4",
        "XSA_LAST_N": "4", "NUM_LOOPS": "0", "PARALLEL_START_LAYER": "2",
    },
    "small": {
        "NUM_LAYERS": "4", "MODEL_DIM": "128", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "MLP_MULT": "3",
        "XSA_LAST_N": "4", "NUM_LOOPS": "0", "PARALLEL_START_LAYER": "2",
    },
    # With recurrence, and a third of the layers with two lanes.
    "looped": {
        "NUM_LAYERS": "6", "MODEL_DIM": "128", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "MLP_MULT": "3",
        "XSA_LAST_N": "6", "NUM_LOOPS": "2", "LOOP_START": "2", "LOOP_END": "2", "PARALLEL_START_LAYER": "4",
        "TRAIN_BATCH_TOKENS": "512", "MICRO_BATCH_TOKENS": "512",
    },
}  # fmt: skip
RATES = {"MATRIX_LR": 0.048, "SCALAR_LR": 0.048, "TIED_EMBED_LR": 0.064}


class Trial(ablation.Hooks):
    """A model, its optimizer and where the run stands: what candidates patch."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = train_gpt.build_model(config)
        self.progress = 0.0
        self.steps = config.iterations
        # Called before and after each step.
        self.before_step: list[Callable[[], None]] = []
        self.after_step: list[Callable[[], None]] = []
        kernels = train_gpt.choose_kernels(config, Machine())
        train_gpt.ready_model(self.model, Machine(), kernels)
        super().__init__(config, self.model)

    def begin_step(self, progress: float) -> None:
        self.progress = progress
        for call in self.before_step:
            call()

    def end_step(self) -> None:
        for call in self.after_step:
            call()

    def add_parameters(self, first: dict[str, Tensor], rate: float = 1.0) -> list[nn.Parameter]:
        """New tensors of the model, trained as its small ones are, at so many times their learning rate."""
        added = []
        for name, weights in first.items():
            parameter = nn.Parameter(weights)
            self.model.register_parameter(name, parameter)
            self.optimizer.small.append(parameter)
            self.optimizer.weights.append(parameter.detach())
            self.optimizer.average.append(parameter.detach().clone())
            added.append(parameter)
        small = self.optimizer.adam.param_groups[1]
        group = {"base_lr": rate * small["base_lr"], "weight_decay": small["weight_decay"]}
        self.optimizer.adam.add_param_group({"params": added, **group})
        return added


Patch = Callable[[Trial], None]


def logit_rescale(height: float, offset: float, width: float) -> Patch:
    """Logits as height·sigmoid((z + offset) / width) (modded-nanogpt PR #181)."""

    def cross_entropy(logits_NV: Tensor, targets_N: Tensor, softcap: float) -> Tensor:
        rescaled = height * torch.sigmoid((logits_NV + offset) / width)
        return F.cross_entropy(rescaled, targets_N, reduction="none")

    def patch(trial: Trial) -> None:
        trial.model.cross_entropy = cross_entropy

    return patch


def blind_attention_lane(trial: Trial) -> None:
    """The lane that attention reads takes nothing of the MLPs at first (modded-nanogpt PR #241)."""
    with torch.no_grad():
        trial.model.get_parameter("lane_mix_P23")[:, 0, 2] = 0.0


def lane_entry(model: GPT) -> list[Tensor]:
    """A list that will hold the stream that enters the two lanes, from each forward pass on."""
    split_or_join = model._split_or_join
    entry: list[Tensor] = []

    def keep_entry(layer: int, lanes: list[Tensor]) -> list[Tensor]:
        split = split_or_join(layer, lanes)
        if len(split) > len(lanes):
            entry[:] = lanes
        return split

    model._split_or_join = keep_entry  # type: ignore[method-assign]
    return entry


def backout(start: float) -> Patch:
    """What enters the lanes is taken out again before the head (modded-nanogpt PR #140)."""

    def patch(trial: Trial) -> None:
        model = trial.model
        (share_1,) = trial.add_parameters({"backout_1": torch.full((1,), start)})
        block = model._block
        entry = lane_entry(model)

        def take_out(layer: int, *rest: Any) -> list[Tensor]:
            lanes = block(layer, *rest)
            if layer == model.settings.num_layers - 1:
                return [lane - share_1 * entry[0] for lane in lanes]
            return lanes

        model._block = take_out  # type: ignore[method-assign]

    return patch


MUDD_HIDDEN = 16  # of 64 there, in a model of 768 channels
MUDD_SCALE = 0.1
# Of the rate of the small tensors: 0.0048 at the rates here, which are 2.4 times the default's; 0.002 there.
MUDD_RATE = 0.1


def mudd(before_last_layer: bool) -> Patch:
    """Each token says what it takes up of other streams before the head (modded-nanogpt PR #259), trimmed.

    The streams are the embeddings, what enters the lanes, and the one that the token has. Their shares come
    from that one, normalised, by an MLP whose output starts at zero; before_last_layer: so does the input of
    the last layer. Left out: the way into its values, what replaces static scalars, more streams, and
    the share of one half that is taken out of the middle stream at first (`backout` has it).
    """

    def patch(trial: Trial) -> None:
        model = trial.model
        dim = model.settings.model_dim
        last = model.settings.num_layers - 1
        random = torch.Generator().manual_seed(trial.config.seed)
        block = model._block
        entry = lane_entry(model)

        def new_site(name: str) -> Callable[[list[Tensor], Tensor], list[Tensor]]:
            bound = dim**-0.5
            drawn_HD = torch.empty(MUDD_HIDDEN, dim).uniform_(-bound, bound, generator=random)
            first = {f"{name}_in_HD": drawn_HD, f"{name}_out_3H": torch.zeros(3, MUDD_HIDDEN)}
            first[f"{name}_bias_3"] = torch.zeros(3)
            in_HD, out_3H, bias_3 = trial.add_parameters(first, MUDD_RATE)

            def take_up(lanes: list[Tensor], x0_BTD: Tensor) -> list[Tensor]:
                stream_BTD = train_gpt.join(lanes)
                hidden_BTH = F.gelu(F.linear(model.norm(stream_BTD), in_HD))
                shares_BT3 = MUDD_SCALE * F.linear(hidden_BTH, out_3H, bias_3)
                taken_BTD = torch.zeros_like(stream_BTD)
                for number, source_BTD in enumerate((x0_BTD, entry[0], stream_BTD)):
                    taken_BTD = taken_BTD + shares_BT3[..., number, None] * source_BTD
                return [lane + taken_BTD for lane in lanes]

            return take_up

        at_output = new_site("mudd_output")
        at_last_layer = new_site("mudd_last_layer") if before_last_layer else None

        def take_up_again(layer: int, lanes: list[Tensor], *rest: Any) -> list[Tensor]:
            context = rest[1]
            if layer == last and at_last_layer is not None:
                lanes = at_last_layer(lanes, context.x0_BTD)
            lanes = block(layer, lanes, *rest)
            return at_output(lanes, context.x0_BTD) if layer == last else lanes

        model._block = take_up_again  # type: ignore[method-assign]

    return patch


def future_weights(progress: float) -> list[float]:
    """Weights of the next, the second and the third token: both of the later ones fade out by thirds."""
    if progress < 1 / 3:
        return [1.0, 0.5, 0.25 * (1 - 3 * progress)]
    if progress < 2 / 3:
        return [1.0, 0.5 * (2 - 3 * progress)]
    return [1.0]


def multi_token(trial: Trial) -> None:
    """The same logits predict later tokens too (modded-nanogpt PR #178)."""

    def loss(model: GPT, inputs_BT: Tensor, targets_BT: Tensor, starts: Any, looping: bool) -> Tensor:
        logits = model.logits(model(inputs_BT, starts, looping).flatten(0, 1))
        cap = model.settings.logit_softcap
        log_p_BTV = (cap * torch.tanh(logits / cap)).log_softmax(-1).view(*targets_BT.shape, -1)
        total = logits.new_zeros(())
        for ahead, weight in enumerate(future_weights(trial.progress)):
            there_BT1 = targets_BT[:, ahead:, None]
            here_BTV = log_p_BTV[:, : there_BT1.size(1)]
            total = total - weight * here_BTV.gather(-1, there_BT1).mean()
        return total

    trial.loss_of = loss


def by_bank(trial: Trial) -> dict[int, str]:
    """The name of each momentum's bank, by the identity of its buffer."""
    names = {id(parameter): name for name, parameter in trial.model.named_parameters()}
    pairs = zip(trial.optimizer.momenta, trial.optimizer.banks, strict=True)
    return {id(buffer): names[id(bank)] for buffer, bank in pairs}


def head_pairs(trial: Trial) -> None:
    """Muon orthogonalises queries and keys by pairs of heads (modded-nanogpt PR #253)."""
    optimizer = trial.optimizer
    names = by_bank(trial)
    plain = optimizer._muon_update
    whole = optimizer.orthogonalize
    rows = 2 * trial.config.head_dim

    def by_pairs(update_NRC: Tensor, *rest: Any) -> Tensor:
        first_NRC, second_NRC = update_NRC.chunk(2)
        blocks = whole(first_NRC.unflatten(1, (-1, rows)).flatten(0, 1), *rest)
        return torch.cat([blocks.view_as(first_NRC), whole(second_NRC, *rest)])

    def update(gradient: Tensor, buffer: Tensor, *rest: Any) -> Tensor:
        # A single head, as of keys in the tiny size, has no other to be paired with.
        paired = names[id(buffer)] in ("qo_bank", "kv_bank") and buffer.size(1) % rows == 0
        optimizer.orthogonalize = by_pairs if paired else whole
        return plain(gradient, buffer, *rest)

    optimizer._muon_update = update  # type: ignore[method-assign]


def second_moment(decay: float) -> Patch:
    """Muon's updates over the root of their rows' second moments (NorMuon, modded-nanogpt PR #144)."""

    def patch(trial: Trial) -> None:
        optimizer = trial.optimizer
        plain = optimizer._muon_update
        moments: dict[int, Tensor] = {}

        def update(gradient: Tensor, buffer: Tensor, *rest: Any) -> Tensor:
            made_NRC = plain(gradient, buffer, *rest)
            along = -1 if made_NRC.size(1) >= made_NRC.size(2) else -2  # one value for each line
            square = made_NRC.square().mean(along, keepdim=True)
            moment = moments.setdefault(id(buffer), torch.zeros_like(square))
            moment.lerp_(square, 1 - decay)
            scaled = made_NRC / (moment + 1e-10).sqrt()
            length = scaled.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
            return scaled * (made_NRC.norm(dim=(1, 2), keepdim=True) / length)

        optimizer._muon_update = update  # type: ignore[method-assign]

    return patch


def cautious_decay(factor: float) -> Patch:
    """Weights decay only where their update shrinks them anyway (modded-nanogpt PR #154)."""

    def patch(trial: Trial) -> None:
        optimizer = trial.optimizer
        c = trial.config
        assert not c.muon_mixture, "the patch knows of one momentum"

        def update_banks(gradients: list[Tensor], lr: float, momentum: float) -> None:
            for bank, gradient, buffer in zip(optimizer.banks, gradients, optimizer.momenta, strict=True):
                update = optimizer._muon_update(gradient, buffer, momentum, None)
                decays = update * bank > 0
                scale = max(1.0, bank.size(1) / bank.size(2)) ** 0.5
                bank.mul_(1.0 - lr * factor * c.muon_wd * decays)
                bank.add_(update, alpha=-lr * scale)

        optimizer._update_banks = update_banks  # type: ignore[method-assign]

    return patch


def momentum_mixture(fast: float, slow: float, begin: float, slow_share: float = 0.5615) -> Patch:
    """From a share of the run on, two momenta of unlike age (bi-Maxwell, modded-nanogpt PR #340)."""

    def patch(trial: Trial) -> None:
        optimizer = trial.optimizer
        plain = optimizer._muon_update
        c = trial.config
        pairs: dict[int, tuple[Tensor, Tensor]] = {}

        assert not c.muon_mixture, "the patch has its own"

        def update(gradient: Tensor, buffer: Tensor, momentum: float, *rest: Any) -> Tensor:
            if trial.progress < begin:
                return plain(gradient, buffer, momentum, *rest)
            if id(buffer) not in pairs:
                mean = buffer * (1 - momentum)
                pairs[id(buffer)] = (mean.clone(), mean.clone())
            quick, late = pairs[id(buffer)]
            quick.lerp_(gradient, 1 - fast)
            late.lerp_(gradient, 1 - slow)
            made = (1 - momentum) * gradient + momentum * quick.lerp(late, slow_share)
            made /= made.norm(dim=-1, keepdim=True).clamp(min=1e-7)
            return optimizer.orthogonalize(made, c.muon_backend_steps, c.muon_polar_express, torch.float32)

        optimizer._muon_update = update  # type: ignore[method-assign]

    return patch


def look_ahead(strength: float, memory_share: float) -> Patch:
    """EMA-Nesterov (modded-nanogpt PR #308): steps begin further along the mean of former steps."""

    def patch(trial: Trial) -> None:
        weights = trial.optimizer.weights
        mean = [torch.zeros_like(weight) for weight in weights]
        before: list[Tensor] = []
        decay = 1 - 1 / (memory_share * trial.steps)

        def lean_forward() -> None:
            before[:] = [weight.clone() for weight in weights]
            if 0.15 <= trial.progress < 0.74:
                scale = train_gpt.learning_rate_scale(trial.progress, 1, trial.config)
                torch._foreach_add_(weights, mean, alpha=strength * scale)

        def remember() -> None:
            steps = torch._foreach_sub(weights, before)
            torch._foreach_lerp_(mean, steps, 1 - decay)

        trial.before_step.append(lean_forward)
        trial.after_step.append(remember)

    return patch


def momentum_cooldown(last: float, share: float) -> Patch:
    """Muon's momentum falls over the last share of the run."""

    def patch(trial: Trial) -> None:
        step = trial.optimizer.step

        def cooled(lr_scale: float, momentum: float, number: int) -> Tensor:
            fall = max(0.0, (trial.progress - 1 + share) / share)
            return step(lr_scale, momentum + fall * (last - momentum), number)

        trial.optimizer.step = cooled  # type: ignore[method-assign, assignment]

    return patch


def adam_warmdown(share: float) -> Patch:
    """The groups of Adam keep their rate until the last share of the run (modded-nanogpt track 3, #24)."""

    def patch(trial: Trial) -> None:
        groups = trial.optimizer.adam.param_groups
        rates = [group["base_lr"] for group in groups]
        c = trial.config

        def set_rates() -> None:
            common = train_gpt.learning_rate_scale(trial.progress, 1, c)
            own = max(c.min_lr, min(1.0, (1.0 - trial.progress) / share))
            for group, rate in zip(groups, rates, strict=True):
                group["base_lr"] = rate * own / common

        trial.before_step.append(set_rates)

    return patch


def embedding_betas(beta1: float, beta2: float) -> Patch:
    """Betas of the embedding alone (modded-nanogpt record 57)."""

    def patch(trial: Trial) -> None:
        trial.optimizer.adam.param_groups[0]["betas"] = (beta1, beta2)

    return patch


class Candidate(NamedTuple):
    """What a row changes."""

    settings: dict[str, str]
    patches: list[Patch]


SHORT_MEMORY = {"BETA1": "0.8", "BETA2": "0.95", "ADAM_EPS": "1e-10"}
MIXTURE = {"MUON_MIXTURE": "1"}
# Half of a sequence in the first third; modded-nanogpt's record 72 has 896 of 2,048 tokens.
SHORT_PIECES = {"TRAIN_SEQ_LENS": "128:0.3333333 256"}
BASE = "base"
CANDIDATES: dict[str, Candidate] = {
    BASE: Candidate({}, []),
    "key offset, half": Candidate({"KEY_OFFSET_DIMS": "16"}, []),
    "key offset, all unrotated": Candidate({"KEY_OFFSET_DIMS": "24"}, []),
    "prefix 0.25": Candidate({"PREFIX_LOSS": "0.25"}, []),
    "multi-token": Candidate({}, [multi_token]),
    "logit rescale 23 5 7.5": Candidate({}, [logit_rescale(23, 5, 7.5)]),
    "attention lane blind": Candidate({}, [blind_attention_lane]),
    "backout 0.5": Candidate({}, [backout(0.5)]),
    "MUDD at the output": Candidate({}, [mudd(before_last_layer=False)]),
    "MUDD at the output and the last layer": Candidate({}, [mudd(before_last_layer=True)]),
    "short pieces in the first third": Candidate(SHORT_PIECES, []),
    "Q, K by head pairs": Candidate({}, [head_pairs]),
    "second moment": Candidate({}, [second_moment(0.95)]),
    "cautious decay, doubled": Candidate({}, [cautious_decay(2.0)]),
    "momentum 0.97": Candidate({"MUON_MOMENTUM": "0.97"}, []),
    # As old as the mixture from the start, but of one age.
    "momentum 0.9553, from 0.8659": Candidate(
        {"MUON_MOMENTUM": "0.9553", "MUON_MOMENTUM_WARMUP_START": "0.8659"}, []
    ),
    "momentum cool-down": Candidate({}, [momentum_cooldown(0.85, 0.3)]),
    "momentum mixture": Candidate({}, [momentum_mixture(0.88, 0.97, 0.3)]),
    "momentum mixture, from the start": Candidate(MIXTURE, []),
    "EMA-Nesterov": Candidate({}, [look_ahead(0.6, 0.03)]),
    "Adam warm-down 0.4": Candidate({}, [adam_warmdown(0.4)]),
    "Adam betas 0.8 0.95": Candidate(SHORT_MEMORY, []),
    "Adam beta2 0.99": Candidate({"BETA2": "0.99"}, []),
    "Adam betas 0.8 0.95 and the mixture": Candidate({**SHORT_MEMORY, **MIXTURE}, []),
    # What configs/beyond.env changes of training.
    "betas, mixture, pieces, half the average": Candidate(
        {**SHORT_MEMORY, **MIXTURE, **SHORT_PIECES, "EMA_SHARE": "0.5"}, []
    ),
}


def made(settings: dict[str, str], seed: int) -> Trial:
    """The model of a row, patched; settings: those of the run, and the name of the CANDIDATE."""
    own = {name: value for name, value in settings.items() if name != "CANDIDATE"}
    trial = Trial(Config.from_env({**own, "SEED": str(seed)}))
    for patch in CANDIDATES[settings["CANDIDATE"]].patches:
        patch(trial)
    return trial


def train(trial: Trial) -> float:
    """Train and leave the average; CPU seconds of a step."""
    start = time.process_time()
    steps = ablation.train(trial.config, trial.model, time.process_time, trial)
    trial.progress = 1.0
    return (time.process_time() - start) / steps


TURNS = 40  # of every row, to compare what their steps cost
TURN_STEPS = 6  # of a turn: what changes by thirds of a run has its share
# Steps of 6 bits that reach 12.85 standard deviations, as MATRIX_CLIP_SIGMAS of the public records.
RELATIVE_STEP = 12.85 / 31


@torch.no_grad()
def coded_bits(model: GPT) -> float:
    """Bits that a weight of the matrices takes at steps that are equal parts of its row's deviation."""
    bits = 0.0
    weights = 0
    for name in ("qo_bank", "kv_bank", "mlp_up_bank", "mlp_down_bank"):
        for matrix_RC in model.get_parameter(name):
            steps_R1 = RELATIVE_STEP * matrix_RC.std(1, keepdim=True).clamp(min=1e-12)
            codes = (matrix_RC / steps_R1).round().flatten().int()
            share = torch.unique(codes, return_counts=True)[1] / codes.numel()
            bits -= float((share * share.log2()).sum()) * codes.numel()
            weights += codes.numel()
    return bits / weights


def held_out(config: Config) -> tuple[np.ndarray, int]:
    """The validation tokens that are scored, and the bytes of their text."""
    shards = train_gpt.open_shards(f"{config.data_path}/fineweb_val_[0-9]*.bin")
    tokens = np.concatenate([train_gpt.read_tokens(shard) for shard in shards])
    tokens = tokens[: config.val_tokens_limit + 1]
    return tokens, int(train_gpt.token_bytes(tokens, config).sum())


def measure(settings: dict[str, str], seed: int, _kind: str) -> dict[str, Any]:
    """Train and score one run; settings: as `made` takes them."""
    trial = made(settings, seed)
    config = trial.config
    seconds = train(trial)
    tokens, text_bytes = held_out(config)
    ledger = train_gpt.score_roundtrip(trial.model, tokens, config, looping=config.num_loops > 0)
    return {
        "seed": seed, "seconds_per_step": seconds, "val_bpb": ledger.score(text_bytes).bits_per_byte,
        "coded_bits": coded_bits(trial.model),
    }  # fmt: skip


def price(stack: dict[str, dict[str, str]], steps: int, ratios_file: Path) -> dict[str, int]:
    """Steps of each row that take the CPU seconds of `steps` of the first one.

    All rows take short turns, as what a second of a shared machine holds changes from one to the next; the
    median of the turns' ratios decides, and the file keeps them all.
    """
    trials = []
    for settings in stack.values():
        trials.append(made({**settings, "ITERATIONS": str(TURN_STEPS)}, 0))
    ratios: dict[str, list[float]] = {name: [] for name in stack}
    for _ in range(TURNS):
        seconds = []
        for trial in trials:
            start = time.process_time()
            ablation.train(trial.config, trial.model, time.process_time, trial)
            seconds.append(time.process_time() - start)
        for name, own in zip(stack, seconds, strict=True):
            ratios[name].append(own / seconds[0])
    train_gpt.write_atomically(ratios_file, json.dumps(ratios).encode())
    return {name: round(steps / statistics.median(found)) for name, found in ratios.items()}


def told_price(ratios: list[float]) -> str:
    """What a step takes of the base's CPU seconds, and the error of that: a median's, 1.25 times a mean's."""
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
    return f"{statistics.median(ratios):.3f} ± {error:.3f}"


def row_name(candidate: str, rate: float) -> str:
    """What a row is called; rate: the factor on all learning rates."""
    return candidate if rate == 1 else f"{candidate}, rates × {rate:g}"


def stacks(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Settings of every row by its name, the base of each rate first."""
    import sentencepiece

    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(arguments.tokenizer)).vocab_size()
    stack = {}
    for rate, (name, candidate) in itertools.product(arguments.rates, CANDIDATES.items()):
        if arguments.only and name not in (BASE, *arguments.only):
            continue
        rates = {setting: f"{rate * value:g}" for setting, value in RATES.items()}
        stack[row_name(name, rate)] = {
            **COMMON, **SIZES[arguments.size], **rates, "VOCAB_SIZE": str(vocabulary),
            "DATA_PATH": str(arguments.data), "TOKENIZER_PATH": str(arguments.tokenizer),
            "ITERATIONS": str(arguments.steps), "VAL_TOKENS_LIMIT": str(arguments.val_tokens),
            **candidate.settings, "CANDIDATE": name,
        }  # fmt: skip
    return stack


HEADER = "| candidate | val_bpb | minus base | standard error | coded bits | CPU time | seeds |"


def row(name: str, runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> str:
    """A line of the table; differences are taken seed by seed."""
    pairs = []
    reference = {run["seed"]: run for run in base}
    for run in runs:
        if run["seed"] in reference:
            pairs.append((run, reference[run["seed"]]))
    gains = [run["val_bpb"] - other["val_bpb"] for run, other in pairs]
    bits = statistics.mean(run["coded_bits"] - other["coded_bits"] for run, other in pairs)
    times = [run["seconds_per_step"] / other["seconds_per_step"] for run, other in pairs]
    error = f"{statistics.stdev(gains) / len(gains) ** 0.5:.4f}" if len(gains) > 1 else "-"
    score = statistics.mean(run["val_bpb"] for run in runs)
    if runs is base:
        return f"| {name} | {score:.4f} | - | - | {base[0]['coded_bits']:.4f} | 1 | {len(runs)} |"
    return (
        f"| {name} | {score:.4f} | {statistics.mean(gains):+.4f} | {error} | {bits:+.4f} | "
        f"{statistics.median(times):.2f} | {len(gains)} |"
    )


def base_of(name: str) -> str:
    """The row that another is compared with: the base at the same rates."""
    _, _, rates = name.partition(", rates × ")
    return f"{BASE}, rates × {rates}" if rates else BASE


def tables(measured: dict[str, Any]) -> list[str]:
    """What was held equal, and a line per candidate, the best first."""
    rows = measured["rows"]
    geometry = measured["geometry"]
    size = "{NUM_LAYERS} layers × {MODEL_DIM}, {TRAIN_BATCH_TOKENS} tokens a step, {TRAIN_SEQ_LEN} a sequence"

    def gain(name: str) -> float:
        reference = {run["seed"]: run["val_bpb"] for run in rows[base_of(name)]}
        shared = [run["val_bpb"] - reference[run["seed"]] for run in rows[name] if run["seed"] in reference]
        return statistics.mean(shared) if shared else math.inf

    lines = []
    for name in sorted(rows, key=gain):
        if gain(name) < math.inf:
            lines.append(row(name, rows[name], rows[base_of(name)]))
    rates = " ".join(f"{name}={value:g}" for name, value in measured["rates"].items())
    length = f"{measured['steps']} steps"
    if ratios := measured.get("ratios"):
        told = []
        for name, count in measured["counts"].items():
            if name != BASE:
                told.append(f"{name}: {count}, a step takes {told_price(ratios[name])} of the base's")
        length += (
            f" of the base, as many of the others as take the same CPU seconds, by {len(ratios[BASE])} short "
            f"turns ({'; '.join(told)})"
        )
    return [
        f"`{measured['data']}`, {length}, {size.format(**geometry)}, "
        f"{geometry['NUM_LOOPS']} extra passes over a loop; {measured['val_tokens']:,} validation targets, "
        f"averaged weights, not quantized. {rates}, or all of them times what a row says; BETA2="
        f"{geometry['BETA2']}, MUON_MOMENTUM={geometry['MUON_MOMENTUM']}. Coded bits: of a "
        "weight at steps that are equal parts of its row's deviation; CPU time: of a step, the median of "
        "pairs of runs on a machine that others share.",
        "", *paired.table(HEADER, lines),
    ]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every table of such runs has."""
    parser.add_argument("--data", type=Path, required=True, help="folder of fineweb_{train,val}_*.bin")
    parser.add_argument("--tokenizer", type=Path, required=True, help="SentencePiece model of these shards")
    parser.add_argument("--runs", type=Path, required=True, help="keep runs there; go on with what is there")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--val-tokens", type=int, default=32_768, help="targets to score")
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")


def hold_steps(
    stack: dict[str, dict[str, str]], arguments: argparse.Namespace, measured: dict[str, Any]
) -> None:
    """Give every row the steps that take equal seconds; they and their prices join what was measured."""
    ratios_file = arguments.runs / "ratios.json"
    pricing = functools.partial(price, ratios_file=ratios_file)
    counts = ablation.kept_steps(arguments.runs, stack, arguments.steps, pricing)
    measured["counts"] = counts
    measured["ratios"] = json.loads(ratios_file.read_text(encoding="utf-8"))
    for name, settings in stack.items():
        settings["ITERATIONS"] = str(counts[name])


def main() -> None:
    """Measure what is not measured yet, print the table, and with --keep store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="factors on all learning rates")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, help="candidates to measure; all by default")
    parser.add_argument(
        "--equal", choices=["steps", "seconds"], default="steps", help="seconds: of a core, by short turns"
    )
    parser.add_argument("--table", action="store_true", help="measure nothing more")
    arguments = parser.parse_args()
    if arguments.equal == "seconds" and len(arguments.rates) > 1:
        parser.error("--equal seconds takes one of --rates: steps are counted beside one base")
    if arguments.equal == "seconds" and arguments.table and not (arguments.runs / "steps.json").exists():
        parser.error(f"--table: {arguments.runs} has no prices yet; measure without it first")
    torch.set_num_threads(1)
    before = results.conditions()
    measured = {
        "data": arguments.data.name, "steps": arguments.steps, "val_tokens": arguments.val_tokens,
        "geometry": {**COMMON, **SIZES[arguments.size]}, "rates": RATES, "rows": {},
    }  # fmt: skip
    stack = stacks(arguments)
    name = f"candidates-{arguments.data.name}-{arguments.size}-{arguments.steps}steps"
    if arguments.equal == "seconds":
        name += "-seconds"
        hold_steps(stack, arguments, measured)
    if not arguments.table:
        order = list(itertools.product(arguments.seeds, stack))
        alike = {key: before[key] for key in ("processor", "torch", "script")}
        about = json.dumps({**alike, **measured}, indent=1)
        ablation.share_runs(arguments.runs, stack, order, "cpu", about, measure)
    # With all seeds, also those of former calls.
    measured["rows"] = ablation.kept_rows(arguments.runs, stack)
    results.finish(name, before, measured, arguments.keep)


if __name__ == "__main__":
    main()
