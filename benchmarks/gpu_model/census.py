"""The census of a configuration: what one compiled step launches on the fake GPU, and a roofline of it.

    python -m benchmarks.gpu_model --what train train_loop --keys 517
    python -m benchmarks.gpu_model --config C.env --set KEY=VALUE --what score adapters --mlp kernel

For each of `--what`: launches, GB, TFLOP, modelled milliseconds and peak memory of every graph, graph breaks,
and whether another number of documents compiles anew. About a minute each; `--no-inductor` stops after
tracing. Nothing is measured on a GPU. What the words mean stands in README.md.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_model import fake_gpu
from benchmarks.gpu_model.roofline import CARDS
from data.files import escape_unprintable

if TYPE_CHECKING:  # they import torch, which must wait for the fake GPU
    from benchmarks.gpu_model.tracer import Tracer

PHASES = ("train", "train_loop", "score", "adapters")
COUNTED = ("function", "all", "none")
DOCUMENTS_PER_ROW = 3  # of the traced batch; any number compiles to the same code


def add_subject_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured: a configuration, the forms of its kernels, and the machine."""
    parser.add_argument("--config", default="", help="file of KEY=VALUE lines; default: the 8-GPU run")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings over that file")
    parser.add_argument("--attention", default="varlen", choices=["varlen", "fa3", "sdpa"])
    parser.add_argument("--mlp", default="plain", choices=["plain", "kernel"])
    parser.add_argument("--heads", default="kernel", choices=["plain", "kernel"],
                        help="norm, rotary and XSA; default: kernel, as `auto` takes on a GPU")  # fmt: skip
    parser.add_argument("--card", default="h100", choices=sorted(CARDS))
    parser.add_argument("--world", type=int, default=8, help="ranks that share a batch")
    parser.add_argument(
        "--keys", type=float, default=0.0, help="mean keys a token attends to; 0: half a row (517: README.md)"
    )
    parser.add_argument(
        "--instructions", default="function", choices=COUNTED,
        help="generated kernels to count them in; default: those with exp, tanh or the like",
    )  # fmt: skip
    fake_gpu.add_arguments(parser)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--what", nargs="+", default=["train_loop"], choices=PHASES, metavar="PHASE",
                        help=f"of {' '.join(PHASES)}; default: train_loop")  # fmt: skip
    parser.add_argument("--tag", default="default", help="begins the names of what is written")
    parser.add_argument("--no-inductor", action="store_true", help="trace alone: no launches, no times")
    add_subject_arguments(parser)
    return parser.parse_args(arguments)


def build(options: argparse.Namespace, replay: bool = True) -> tuple[Tracer, Any, Any]:
    """Install the fake GPU; tracer, configuration and model of the options."""
    card, folder = fake_gpu.prepare(options.card, options.out)
    import torch

    from benchmarks.gpu_model import stand_ins, subject
    from benchmarks.gpu_model.tracer import Tracer

    if options.attention == "fa3":
        stand_ins.install_flash_attention()
    if options.attention == "sdpa":
        torch.nn.functional.scaled_dot_product_attention = stand_ins.sdpa_as_cuda_chooses
    tracer = Tracer(card, folder, subject.CUSTOM_OPERATIONS, options.keys, replay, options.instructions)
    config = subject.config(options.config, options.set)
    with tracer.fake_mode:
        model = subject.model(config, options.attention, options.mlp, options.heads)
    return tracer, config, model


def label_of(options: argparse.Namespace, phase: str) -> str:
    """Name of a phase with these forms; what is usual is not said."""
    parts = [options.tag, phase]
    if options.attention != "varlen":
        parts.append(options.attention)
    if options.mlp != "plain":
        parts.append(options.mlp)
    if options.heads != "kernel":
        parts.append(f"heads-{options.heads}")
    if options.no_inductor:  # or it would overwrite the census with launches
        parts.append("traced")
    return "_".join(parts)


def trace(tracer: Tracer, model: Any, config: Any, phase: str, world_size: int) -> int:
    """Trace one phase into `tracer.graphs`; the tokens of one pass."""
    import torch

    from benchmarks.gpu_model import subject

    rows, length = subject.rows(config, phase, world_size)
    looping = subject.loops(config, phase)
    compiled = functools.partial(torch.compile, dynamic=False, fullgraph=True, backend=tracer.backend)
    inputs_BT = tracer.empty(rows, length)
    starts = document_starts(tracer, rows, DOCUMENTS_PER_ROW)
    if phase == "score":
        with torch.no_grad():
            compiled(subject.hidden)(model, inputs_BT, starts)
    elif phase == "adapters":
        with tracer.fake_mode:
            subject.learn_adapters(compiled, model, inputs_BT, config)
    else:
        targets_BT = tracer.empty(rows, length)
        loss = compiled(subject.loss)
        loss(model, inputs_BT, targets_BT, starts, looping).backward()
        graphs_before = len(tracer.graphs)
        more_starts = document_starts(tracer, rows, DOCUMENTS_PER_ROW + 1)
        loss(model, inputs_BT, targets_BT, more_starts, looping)
        recompiled = len(tracer.graphs) != graphs_before
        print("  compiled anew for another number of documents:", "yes" if recompiled else "no")
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    print(f"  graph breaks: {breaks or 'none'}; {rows * length} tokens")
    check_visits(tracer, subject.visits(config, looping), phase)
    return rows * length


def document_starts(tracer: Tracer, rows: int, documents_per_row: int) -> Any:
    """Where that many documents in each row begin, and the end; their number is free, as in training."""
    import torch

    starts = tracer.empty(rows * documents_per_row + 1, dtype=torch.int32)
    torch._dynamo.mark_dynamic(starts, 0)
    return starts


def check_visits(tracer: Tracer, expected: int, phase: str) -> None:
    """Refuse a census of other blocks than were meant: a loop that did not switch on would go unnoticed."""
    found = tracer.graphs[0].attention_calls
    if found != expected:
        raise RuntimeError(
            f"{phase}: the traced step attends {found} times, expected {expected}, once for each block it "
            "runs; does subject.py still switch the loop on and off, and does accounting.ATTENTION have the "
            "attention that it uses?"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    escape_unprintable()
    options = parse(arguments)
    tracer, config, model = build(options, replay=not options.no_inductor)
    from benchmarks.gpu_model import subject
    from benchmarks.gpu_model.report import report

    for phase in options.what:
        start = time.perf_counter()
        tracer.start(label_of(options, phase))
        tokens = trace(tracer, model, config, phase, options.world)
        report(tracer.label, tokens, tracer.graphs, tracer.folder, subject.sizes(config))
        print(f"   [{time.perf_counter() - start:.0f} s]", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
