"""How many graphs a run compiles: train, reload, score, learn at test time, score a copy.

    python -m benchmarks.gpu_model.recompiles

A reloaded model and a copy are new objects, as after `load_artifact` and in test-time training. Neither may
compile anew what the first one compiled for the same shapes. Traced with 2 layers, without code generation.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_model import census

SMALL = ("NUM_LAYERS=2", "NUM_LOOPS=0", "PARALLEL_START_LAYER=-1")
SCORED_ROWS, TRAINED_ROWS, LEARNED_ROWS = 32, 48, 2
LENGTH = 2048  # tokens of a row


def count_graphs(options: argparse.Namespace) -> dict[str, int]:
    """New graphs of each step, in the order of a run."""
    tracer, config, first = census.build(options, replay=False)
    import torch

    from benchmarks.gpu_model import subject

    with tracer.fake_mode:
        reloaded = subject.model(config, options.attention, options.mlp, options.heads)
        copied = copy.deepcopy(reloaded)
    tracer.start("recompiles")

    def score(model: Any, documents_per_row: int) -> None:
        hidden = torch.compile(subject.hidden, dynamic=False, fullgraph=True, backend=tracer.backend)
        starts = census.document_starts(tracer, SCORED_ROWS, documents_per_row)
        with torch.no_grad():
            hidden(model, tracer.empty(SCORED_ROWS, LENGTH), starts)

    def learn(model: Any, rows: int, documents_per_row: int) -> None:
        loss = torch.compile(subject.loss, dynamic=False, fullgraph=True, backend=tracer.backend)
        starts = census.document_starts(tracer, rows, documents_per_row)
        inputs_BT = tracer.empty(rows, LENGTH)
        targets_BT = tracer.empty(rows, LENGTH)
        loss(model, inputs_BT, targets_BT, starts, False).backward()

    steps: list[tuple[str, Callable[[], None]]] = [
        ("train", lambda: learn(first, TRAINED_ROWS, 3)),
        ("train, other documents", lambda: learn(first, TRAINED_ROWS, 5)),
        ("score", lambda: score(first, 3)),
        ("score, other documents", lambda: score(first, 5)),
        ("score a reloaded model", lambda: score(reloaded, 3)),
        ("learn at test time, reloaded model", lambda: learn(reloaded, LEARNED_ROWS, 3)),
        ("learn from the next chunk", lambda: learn(reloaded, LEARNED_ROWS, 4)),
        ("learn from rows of one document", lambda: learn(reloaded, LEARNED_ROWS, 1)),
        ("score a copy of the model", lambda: score(copied, 3)),
        ("learn with the copy", lambda: learn(copied, LEARNED_ROWS, 3)),
    ]
    counts = {}
    for label, step in steps:
        before = len(tracer.graphs)
        step()
        counts[label] = len(tracer.graphs) - before
        print(f"{label}: {counts[label]} new graphs", flush=True)
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    census.add_subject_arguments(parser)
    parser.set_defaults(set=list(SMALL))
    count_graphs(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
