"""The census of a label, printed and written as LABEL.json for summary.py.

Import it after `fake_gpu.install`.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_model.accounting import Launch
from benchmarks.gpu_model.roofline import launch_seconds
from benchmarks.gpu_model.tracer import Graph

GIB = 2**30


@dataclass
class Total:
    """Sums over launches."""

    launches: int = 0
    moved_bytes: float = 0.0
    flop: float = 0.0
    instructions: float = 0.0
    microseconds: float = 0.0

    def add(self, launch: Launch) -> None:
        """Count one launch."""
        self.launches += 1
        self.moved_bytes += launch.moved_bytes
        self.flop += launch.flop
        self.instructions += launch.instructions
        self.microseconds += launch.microseconds

    def __str__(self) -> str:
        return (
            f"{self.launches} launches, {self.moved_bytes / 1e9:.2f} GB, {self.flop / 1e12:.3f} TFLOP, "
            f"{self.instructions / 1e9:.1f} G instructions counted, {self.microseconds / 1e3:.2f} ms modelled"
        )


def total_of(launches: Iterable[Launch]) -> Total:
    """The sums over all of them."""
    total = Total()
    for launch in launches:
        total.add(launch)
    return total


def report(label: str, tokens: int, graphs: list[Graph], folder: Path, sizes: dict[str, int]) -> Total:
    """Print the census of one traced step and write it to `folder`; returns its sums.

    sizes: widths of "vocabulary", "mlp" and "gate", by which summary.py tells products apart.
    """
    whole = Total()
    described = []
    for graph in graphs:
        print(f"\n== {graph.tag}: {graph.nodes} fx nodes, new outputs {graph.output_bytes / GIB:.2f} GiB")
        described.append(_described(graph))
        if graph.replay is None:
            continue
        launches = graph.replay.recorder.launches
        for launch in launches:
            whole.add(launch)
        for kind in sorted({launch.kind for launch in launches}):
            of_kind = total_of(launch for launch in launches if launch.kind == kind)
            print(f"   {kind:10} {of_kind}")
        _print_bound_by_instructions(graph)
        _print_memory(graph)
    if any(graph.replay is not None for graph in graphs):
        print(f"\n== {label}: {tokens} tokens, {whole}", flush=True)
    content = {
        "label": label, "tokens": tokens, "sizes": sizes, "milliseconds": whole.microseconds / 1e3,
        "graphs": described,
    }  # fmt: skip
    (folder / f"{label}.json").write_text(json.dumps(content), encoding="utf-8")
    return whole


def _print_bound_by_instructions(graph: Graph) -> None:
    """The launches that compute longer than they move bytes."""
    assert graph.replay is not None, "asked only of graphs that were replayed"
    recorder = graph.replay.recorder
    for launch in recorder.launches:
        moving = 1e6 * launch_seconds(recorder.card, launch.moved_bytes)
        if launch.instructions and launch.microseconds > moving:
            print(f"   bound by its {launch.instructions / 1e9:.1f} G instructions: {launch.name}, "
                  f"{launch.microseconds / 1e3:.2f} ms, by its bytes {moving / 1e3:.2f}")  # fmt: skip


def _print_memory(graph: Graph) -> None:
    assert graph.replay is not None, "asked only of graphs that were replayed"
    recorder = graph.replay.recorder
    input_gib = graph.replay.input_bytes / GIB
    peak_gib = recorder.peak_bytes / GIB
    print(f"   inputs {input_gib:.2f} GiB, peak {peak_gib:.2f} GiB at {recorder.peak_at}")
    kernels = graph.replay.kernels
    in_fp64 = [name for name, kernel in kernels.items() if kernel.computes_in_fp64]
    print(f"   {len(kernels)} distinct generated kernels; in float64: {', '.join(in_fp64) or 'none'}")


def _described(graph: Graph) -> dict[str, Any]:
    """A graph as JSON."""
    content: dict[str, Any] = {
        "tag": graph.tag, "backward": graph.backward, "nodes": graph.nodes, "launches": [],
        "operations": dict(graph.operations), "outputs": [output._asdict() for output in graph.outputs],
    }  # fmt: skip
    if graph.replay is not None:
        recorder = graph.replay.recorder
        kernels = graph.replay.kernels
        content["launches"] = [asdict(launch) for launch in recorder.launches]
        content["input_bytes"] = graph.replay.input_bytes
        content["peak_bytes"] = recorder.peak_bytes
        content["peak_at"] = recorder.peak_at
        content["float64_kernels"] = [name for name, kernel in kernels.items() if kernel.computes_in_fp64]
    return content
