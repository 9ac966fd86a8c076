"""What to ship of a run: the last weights, an average of them, or a blend, for each kind of weights.

    python benchmarks/readout.py --data DIR --tokenizer FILE --runs FOLDER [--size tiny] [--steps 300]
        [--seeds 1 2 3] [--bytes 130000] [--keep]

One run keeps averages of several decays beside each other; every blend of its weights is scored as it is, and
once more from an artifact of the same number of bytes, written by GPTQ under rate control. So the blends of a
run differ in nothing but the read-out, and the seed's noise is in all of them alike. Sizes and settings are
those of candidates.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import train_gpt  # noqa: E402
from benchmarks import ablation, budget, candidates, paired, results  # noqa: E402
from train_gpt import Config  # noqa: E402

TITLE = "Read-out: the last weights, their average, or a blend"
DECAYS = (0.9, 0.95, 0.98)
SHARES = (0.5, 1.0)
KINDS = ("matrices", "embedding", "small")
DEFAULT_DECAY = float(candidates.COMMON["EMA_DECAY"])
LAST = "last weights"
CALIBRATION_BATCHES = 8


class Blend(NamedTuple):
    """A read-out: of each kind of weights, what share is the average and of which decay."""

    decay: float
    shares: dict[str, float]  # by kind


def blends() -> dict[str, Blend]:
    """All that are scored, by name."""
    found = {LAST: Blend(DEFAULT_DECAY, dict.fromkeys(KINDS, 0.0))}
    for decay, share in itertools.product(DECAYS, SHARES):
        found[f"{share:g} of decay {decay:g}"] = Blend(decay, dict.fromkeys(KINDS, share))
    for kind in KINDS:
        shares = {**dict.fromkeys(KINDS, 1.0), kind: 0.0}
        found[f"decay {DEFAULT_DECAY:g}, {kind} last"] = Blend(DEFAULT_DECAY, shares)
    return found


def kind_of(parameter: train_gpt.Parameter) -> str:
    """The kind of weights that a parameter is of."""
    if parameter.optimizer == "muon":
        return "matrices"
    return "embedding" if parameter.optimizer == "embedding" else "small"


def keep_averages(trial: candidates.Trial) -> dict[float, list[Tensor]]:
    """Averages of all weights by their decay, which follow every step from now on."""
    weights = trial.optimizer.weights
    averages = {decay: [weight.clone() for weight in weights] for decay in DECAYS}

    def follow() -> None:
        step = round(trial.progress * trial.steps)
        for decay, average in averages.items():
            # Faster at first, as the optimizer's own.
            torch._foreach_lerp_(average, weights, 1.0 - min(decay, (1 + step) / (10 + step)))

    trial.after_step.append(follow)
    return averages


def measure(settings: dict[str, str], seed: int, _kind: str) -> dict[str, Any]:
    """Train once and score every blend, quantized and not; settings: with the BYTES of the artifact."""
    own = {name: value for name, value in settings.items() if name not in ("CANDIDATE", "BYTES")}
    config = Config.from_env({**own, "SEED": str(seed)})
    trial = candidates.Trial(config)
    averages = keep_averages(trial)
    # The optimizer's average is put in place at the end: the last weights are needed as well.
    last: list[Tensor] = []

    def keep_last() -> None:
        last[:] = [weight.clone() for weight in trial.optimizer.weights]

    trial.after_step.append(keep_last)
    candidates.train(trial)
    tokens, text_bytes = candidates.held_out(config)
    kinds = [kind_of(entry) for entry in train_gpt.parameter_table(config).values()]
    scores: dict[str, list[float]] = {}
    for name, blend in blends().items():
        for weight, first, second, kind in zip(
            trial.optimizer.weights, last, averages[blend.decay], kinds, strict=True
        ):
            weight.copy_(torch.lerp(first, second, blend.shares[kind]))
        score = train_gpt.score_roundtrip(trial.model, tokens, config, looping=config.num_loops > 0)
        scores[name] = [score.score(text_bytes).bits_per_byte]
        hessians = budget.calibrated(trial.model, config, CALIBRATION_BATCHES)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.bin"
            train_gpt.write_artifact(path, trial.model, config, hessians, "", int(settings["BYTES"]))
            quantized, _ = train_gpt.load_artifact(path)
        score = train_gpt.score_roundtrip(quantized, tokens, config, looping=config.num_loops > 0)
        scores[name].append(score.score(text_bytes).bits_per_byte)
    return {"seed": seed, "scores": scores}


def tables(measured: dict[str, Any]) -> list[str]:
    """What was held equal, and a line per blend; differences to the default's read-out, run by run."""
    runs = measured["runs"]
    default = f"1 of decay {measured['default_decay']:g}"
    lines = []
    for name in runs[0]["scores"]:
        cells = []
        for form in (0, 1):
            scores = [run["scores"][name][form] for run in runs]
            gains = [run["scores"][name][form] - run["scores"][default][form] for run in runs]
            error = f" ± {statistics.stdev(gains) / len(gains) ** 0.5:.4f}" if len(gains) > 1 else ""
            told = "-" if name == default else f"{statistics.mean(gains):+.4f}{error}"
            cells.extend([f"{statistics.mean(scores):.4f}", told])
        lines.append(f"| {name} | {' | '.join(cells)} |")
    geometry = measured["geometry"]
    size = "{NUM_LAYERS} layers × {MODEL_DIM}, {TRAIN_BATCH_TOKENS} tokens a step".format(**geometry)
    header = "| read-out | val_bpb | minus default | quantized val_bpb | minus default |"
    return [
        f"`{measured['data']}`, {measured['steps']} steps, {size}; seeds "
        f"{' '.join(str(run['seed']) for run in runs)}; {measured['val_tokens']:,} validation targets; "
        f"artifacts of {measured['bytes']:,} bytes. The default's read-out is the average of decay "
        f"{measured['default_decay']:g} for all weights.",
        "", *paired.table(header, lines),
    ]  # fmt: skip


def main() -> None:
    """Measure what is not measured yet, print the table, and with --keep store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    candidates.add_arguments(parser)
    parser.add_argument("--bytes", type=int, default=110_000, help="of each artifact, without code")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = results.conditions()
    arguments.only = [candidates.BASE]
    arguments.rates = [1.0]
    stack = candidates.stacks(arguments)
    stack[candidates.BASE].update({"BYTES": str(arguments.bytes), "GPTQ": "1", "RATE_CONTROL": "1"})
    measured = {
        "data": arguments.data.name, "steps": arguments.steps, "val_tokens": arguments.val_tokens,
        "geometry": {**candidates.COMMON, **candidates.SIZES[arguments.size]}, "bytes": arguments.bytes,
        "default_decay": DEFAULT_DECAY,
    }  # fmt: skip
    order = [(seed, candidates.BASE) for seed in arguments.seeds]
    alike = {key: before[key] for key in ("processor", "torch", "script")}
    about = json.dumps({**alike, **measured}, indent=1)
    rows = ablation.share_runs(arguments.runs, stack, order, "cpu", about, measure)
    measured["runs"] = rows.get(candidates.BASE, [])
    name = f"readout-{arguments.data.name}-{arguments.size}-{arguments.steps}steps"
    results.finish(name, before, measured, arguments.keep)


if __name__ == "__main__":
    main()
