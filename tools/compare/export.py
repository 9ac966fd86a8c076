"""`export RUN… --to tensorboard|wandb`: the events of metrics.jsonl for programs that draw them.

TensorBoard gets a folder of event files in each run, wandb an offline run that `wandb sync` uploads. Either
needs its package, which requirements.txt does not name.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.runs.errors import RecordError
from tools.runs.reading import path_of
from tools.runs.runs import Event, RunDirectory

NO_VALUES = {"event", "step"}  # of an event; the other numbers are values
Values = dict[str, float]  # by the name that they are drawn under


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories, finished or not")
    parser.add_argument("--to", choices=sorted(WRITERS), required=True, help="the program")
    parser.add_argument("--out", type=Path, help="folder to write into (default: each run directory)")
    parser.add_argument("--project", default="train_gpt", help="project of wandb")


def run(args: argparse.Namespace) -> int:
    package, write = WRITERS[args.to]
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        name = package.rpartition(".")[2]
        raise RecordError(f"--to {args.to} needs a package ({error}); pip install {name}") from error
    for path in args.runs:
        directory = RunDirectory(path)
        steps = values_by_step(directory.events)
        if not steps:
            place = path_of(path)
            raise RecordError(f"{place}: metrics.jsonl has no step yet; wait for the run, or name another")
        folder = (args.out / path.resolve().name if args.out else path) / args.to
        for place in (folder, folder / args.to):  # wandb makes one in the other
            if place.is_symlink():  # the run may be somebody else's
                raise RecordError(f"{place} is a link, and is not followed; name another place with --out")
        write(module, folder, steps, directory, args.project)
        print(f"{path_of(folder)}: {len(steps)} steps of {path_of(path)}")
    return 0


def values_by_step(events: list[Event]) -> dict[int, Values]:
    """The numbers of all events by step, in order; events without a step are of the last one."""
    steps: dict[int, Values] = {}
    last = 0
    for event in events:
        last = max(last, event.step or 0)
        label = str(event.values.get("label") or event.values.get("name") or "")
        # `step:20/400` is a label of its own at each step.
        scope = event.kind if not label or label.startswith("step:") else f"{event.kind}/{label}"
        for name in event.values.keys() - NO_VALUES:
            number = event.number(name)
            if number is not None:
                at = last if event.step is None else event.step
                steps.setdefault(at, {})[f"{scope}/{name}"] = number
    return dict(sorted(steps.items()))


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
