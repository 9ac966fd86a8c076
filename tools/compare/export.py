"""`export RUN… --to tensorboard|wandb`, or `--weights`: write what other programs can read.

TensorBoard gets a folder of event files in each run, and wandb an offline run that `wandb sync` uploads. Both
get losses, scores, learning rate, milliseconds per step and tokens per second. `--weights` writes the weights
as the scores read them from the artifact into model.safetensors. Each of the three needs its own package.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from data.files import write_bytes
from tools.runs.errors import RecordError
from tools.runs.reading import path_of
from tools.runs.runs import ARTIFACT, Event, RunDirectory
from tools.runs.script import ArtifactError, Config, ConfigError, learning_rate_scale, load_artifact

NO_VALUES = {"event", "step"}  # of an event; the other numbers are values
WEIGHTS = "model.safetensors"
Values = dict[str, float]  # by the name that they are drawn under


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories, finished or not")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", choices=sorted(WRITERS), help="the program to export steps for")
    what.add_argument("--weights", action="store_true", help="write the weights as safetensors")
    parser.add_argument("--out", type=Path, help="folder to write into (default: each run directory)")
    parser.add_argument("--project", default="train_gpt", help="name of the wandb project")


def run(args: argparse.Namespace) -> int:
    if args.weights:
        safetensors = optional_package("safetensors.torch", "--weights")
        for path in args.runs:
            print(write_weights(safetensors, path, args.out))
        return 0
    package, write = WRITERS[args.to]
    module = optional_package(package, f"--to {args.to}")
    for path in args.runs:
        directory = RunDirectory(path)
        steps = values_by_step(directory.events)
        add_rates(steps, directory)
        if not steps:
            place = path_of(path)
            raise RecordError(f"{place}: metrics.jsonl has no step yet; wait for the run, or name another")
        folder = (args.out / path.resolve().name if args.out else path) / args.to
        for place in (folder, folder / args.to):  # wandb makes one in the other
            if place.is_symlink():  # the run may be somebody else's
                raise RecordError(f"{place} is a link, which is not followed; name another place with --out")
        write(module, folder, steps, directory, args.project)
        print(f"{path_of(folder)}: {len(steps)} steps of {path_of(path)}")
    return 0


def optional_package(name: str, wanted_by: str) -> ModuleType:
    """A package that not everybody has. RecordError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        distribution = "safetensors" if name.startswith("safetensors") else name.rpartition(".")[2]
        raise RecordError(f"{wanted_by} needs a package ({error}); pip install {distribution}") from error


def write_weights(safetensors: ModuleType, path: Path, out: Path | None) -> str:
    """Write the weights of an artifact; returns where, and how many. RecordError for an existing file."""
    artifact = path if path.is_file() else path / ARTIFACT
    target = (out / path.resolve().name if out else artifact.parent) / WEIGHTS
    if target.is_symlink() or target.exists():
        raise RecordError(f"{target} exists: remove it to export again, or name another place with --out")
    if not artifact.is_file():
        raise RecordError(f"{artifact}: no such artifact; give a finished run, or the artifact itself")
    try:
        model, about = load_artifact(artifact)
    except ArtifactError as error:
        raise RecordError(str(error)) from error
    # A file of its own for each tensor's values: safetensors refuses two that share them.
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    data = safetensors.save(tensors, metadata={name: str(value) for name, value in about.config.items()})
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(target, data)
    count = sum(tensor.numel() for tensor in tensors.values())
    return f"{target}: {len(tensors)} tensors, {count:,} numbers, of {artifact}"


def add_rates(steps: dict[int, Values], directory: RunDirectory) -> None:
    """Add milliseconds per step, tokens per second and the learning rate to the steps of training."""
    last_step, last_ms, last_tokens = 0, 0.0, 0.0
    for step, values in steps.items():
        time_ms, tokens = values.get("train/train_time_ms"), values.get("train/tokens")
        if time_ms is None or tokens is None or step <= last_step or time_ms <= last_ms:
            continue
        values["speed/ms_per_step"] = (time_ms - last_ms) / (step - last_step)
        values["speed/tokens_per_second"] = 1e3 * (tokens - last_tokens) / (time_ms - last_ms)
        last_step, last_ms, last_tokens = step, time_ms, tokens
    config = config_of(directory)
    if config is None:
        return
    for step, values in steps.items():
        progress = values.get("train/progress")
        if progress is not None:
            # That of step N was chosen after N - 1 steps.
            scale = learning_rate_scale(progress, step - 1, config)
            values["learning_rate/matrices"] = scale * config.matrix_lr


def config_of(directory: RunDirectory) -> Any:
    """The settings of a run; None where this version of the script cannot read them."""
    try:
        return Config.from_values(directory.config)
    except (RecordError, ConfigError):
        return None


def values_by_step(events: list[Event]) -> dict[int, Values]:
    """The numbers of all events by step, in order; events without a step are of the last one."""
    steps: dict[int, Values] = {}
    last = 0
    for event in events:
        last = max(last, event.step or 0)
        label = str(event.values.get("label") or event.values.get("name") or "")
        # `step:20/400` is a label of its own at each step.
        scope = event.kind if not label or label.startswith("step:") else f"{event.kind}/{tag(label)}"
        for name in event.values.keys() - NO_VALUES:
            number = event.number(name)
            if number is not None:
                at = last if event.step is None else event.step
                steps.setdefault(at, {})[f"{scope}/{name}"] = number
    return dict(sorted(steps.items()))


def tag(label: str) -> str:
    """A label of the log as a part of a name: `DIAGNOSTIC final` is diagnostic_final."""
    return re.sub(r"[^a-z0-9_.-]+", "_", label.lower())


def to_tensorboard(
    tensorboard: ModuleType, folder: Path, steps: Mapping[int, Values], directory: RunDirectory, _project: str
) -> None:
    """Event files whose time is the seconds of training."""
    if folder.exists():
        raise RecordError(f"{folder} exists: remove it to export again")
    writer = tensorboard.SummaryWriter(str(folder))
    seconds = 0.0
    for step, values in steps.items():
        times = [value for name, value in values.items() if name.endswith("/train_time_ms")]
        seconds = max([seconds, *(time / 1e3 for time in times)])
        for name, value in values.items():
            writer.add_scalar(name, value, step, walltime=seconds)
    writer.add_text("config", "\n".join(f"    {line}" for line in directory.config_lines))
    writer.close()


def to_wandb(
    wandb: ModuleType, folder: Path, steps: Mapping[int, Values], directory: RunDirectory, project: str
) -> None:
    """An offline run: nothing leaves this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    name = directory.path.resolve().name
    written = wandb.init(mode="offline", project=project, name=name, dir=str(folder), config=directory.config)
    for step, values in steps.items():
        written.log(values, step=step)
    written.finish()


WRITERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "tensorboard": ("torch.utils.tensorboard", to_tensorboard),
    "wandb": ("wandb", to_wandb),
}
