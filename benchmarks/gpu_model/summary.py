"""Tables of a census by part of the model.

    python -m benchmarks.gpu_model.summary ~/.cache/gpu_model/default_train*.json

The part of a product follows from its sizes; that of a generated kernel from the names of the operations that
Inductor fused into it, so borders between such parts are rough.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.files import escape_unprintable

GIB = 2**30
SMALL_BYTES = 3e7  # of a launch: casts of weights and stacks of their gradients move less
GAIN_GRADIENT_BYTES = 1.5e8  # of a launch: the gradient of qk_gain reads whole activations
# The part that each of the script's own kernels belongs to.
CUSTOM_PARTS = {
    "linear_leaky_square": "products of the MLP",
    "heads": "q and k norm, rotary",
    "xsa": "XSA and gate",
}
HEADER = (
    "| part | fwd launches | fwd GB | fwd TFLOP | fwd ms | bwd launches | bwd GB | bwd TFLOP | bwd ms |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass
class Sums:
    """Sums over launches of one direction."""

    launches: int = 0
    moved_bytes: float = 0.0
    flop: float = 0.0
    microseconds: float = 0.0

    def add(self, launch: dict[str, Any]) -> None:
        """Count one launch of a census."""
        self.launches += 1
        self.moved_bytes += launch["moved_bytes"]
        self.flop += launch["flop"]
        self.microseconds += launch["microseconds"]

    def cells(self) -> str:
        """Four columns of the table."""
        return (
            f"{self.launches} | {self.moved_bytes / 1e9:.2f} | {self.flop / 1e12:.2f} | "
            f"{self.microseconds / 1e3:.2f}"
        )


@dataclass
class Part:
    """One line of the table."""

    forward: Sums = field(default_factory=Sums)
    backward: Sums = field(default_factory=Sums)

    def add(self, launch: dict[str, Any], backward: bool) -> None:
        """Count one launch of a census."""
        side = self.backward if backward else self.forward
        side.add(launch)

    def row(self, name: str) -> str:
        """The line."""
        return f"| {name} | {self.forward.cells()} | {self.backward.cells()} |"

    def microseconds(self) -> float:
        """Of both directions."""
        return self.forward.microseconds + self.backward.microseconds


def product_part(shapes: str, sizes: dict[str, int]) -> str:
    """The part that a product "(98304, 512)@(512, 2048) bfloat16" belongs to, by the sizes in it."""
    found = {int(number) for number in re.findall(r"\d+", shapes.rpartition(" ")[0])}
    if sizes["vocabulary"] in found:
        return "products of the head"
    if sizes["mlp"] in found:
        return "products of the MLP"
    if sizes["gate"] in found:
        return "products of the gates"
    return "products of q, k, v and o"


def kernel_part(name: str, moved_bytes: float) -> str:
    """The part that a generated kernel belongs to, by the operations in its name."""
    has_norm = "rsqrt" in name or "pow" in name
    if "log_softmax" in name or "nll" in name or "exp2" in name:
        return "loss"
    if "leaky" in name or "relu" in name:
        return "MLP activation"
    if "embedding" in name:
        return "embedding"
    if moved_bytes < SMALL_BYTES:
        return "small (casts of weights, stacks of gradients)"
    if "mul_sum_view" in name and "red" in name and moved_bytes > GAIN_GRADIENT_BYTES and not has_norm:
        return "gradient of qk_gain"
    if "cat" in name and has_norm:
        return "q and k norm, rotary"
    if "vector_norm" in name or "clamp_min" in name or "varlen_attn_backward" in name:
        return "XSA and gate"
    if "sigmoid" in name and "unsqueeze" in name:
        return "XSA and gate"
    return "residual, norms, scales"


def part_of(launch: dict[str, Any], sizes: dict[str, int]) -> str:
    """The part of the model that a launch belongs to."""
    if launch["kind"] == "product":
        return product_part(launch["shapes"], sizes)
    if launch["kind"] == "custom":
        return CUSTOM_PARTS[launch["name"].split(".")[1]]
    if launch["kind"] == "attention":
        return "attention"
    if launch["kind"] == "eager":
        return "eager operations in the wrapper"
    return kernel_part(launch["name"], launch["moved_bytes"])


def table(census: dict[str, Any]) -> str:
    """The table of one census, dearest part first, and a line on the memory of each graph."""
    parts: defaultdict[str, Part] = defaultdict(Part)
    total = Part()
    for graph in census["graphs"]:
        for launch in graph["launches"]:
            parts[part_of(launch, census["sizes"])].add(launch, graph["backward"])
            total.add(launch, graph["backward"])
    lines = [f"### {census['label']}: {census['tokens']} tokens, {census['milliseconds']:.1f} ms modelled"]
    lines.append(HEADER)
    for name, part in sorted(parts.items(), key=lambda item: -item[1].microseconds()):
        lines.append(part.row(name))
    lines.append(total.row("total"))
    lines += [memory_line(graph) for graph in census["graphs"]]
    return "\n".join(lines)


def memory_line(graph: dict[str, Any]) -> str:
    """What one graph keeps and holds at most."""
    output_bytes = sum(output["size_bytes"] for output in graph["outputs"])
    line = f"{graph['tag']}: new outputs {output_bytes / GIB:.2f} GiB"
    if "peak_bytes" in graph:
        line += f", inputs {graph['input_bytes'] / GIB:.2f} GiB, peak {graph['peak_bytes'] / GIB:.2f} GiB"
        line += f" at {graph['peak_at'][:80]}, in float64: {', '.join(graph['float64_kernels']) or 'nothing'}"
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    escape_unprintable()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("census", nargs="+", help="LABEL.json, written by the census")
    for path in parser.parse_args(arguments).census:
        census = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        print(table(census) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
