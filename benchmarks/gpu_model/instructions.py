"""The instructions of a generated kernel: compiled for the card by Triton and ptxas, and counted in its SASS.

A kernel with tanh, exp or another function may compute longer than it moves its bytes. Only such kernels are
compiled by default (README.md).

The count is an upper bound: every branch counts as passed, and a loop that ptxas unrolls in part counts as if
it were not. Import it after `fake_gpu.install`.
"""

import importlib.util
import math
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_model.roofline import Card

# Calls in Inductor's Triton code that become many instructions. A square root is a single one on a GPU.
FUNCTION = re.compile(
    r"\b(?:libdevice|tl_math|tl)\.(?:exp2?|expm1|log2?|log1p|tanh|sigmoid|erf|sin|cos|pow)\("
)
# A line of nvdisasm: address, predicate, operation and the rest; and a label on a line of its own.
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)([^;]*);")
LABEL = re.compile(r"(\.L_x_\d+):")
LANES = 32  # of a warp: one of its instructions is one of each of its threads


def per_thread(sass: str, trips: int) -> int:
    """Instructions that a thread issues, where each loop of the kernel runs `trips` times."""
    addresses: list[int] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []  # labels of the instruction that comes next
    loops: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            waiting.append(label[1])
        found = INSTRUCTION.match(line)
        if found is None or found[2] == "NOP":
            continue
        address = int(found[1], 16)
        addresses.append(address)
        labels.update(dict.fromkeys(waiting, address))
        waiting = []
        target = re.search(r"\.L_x_\d+", found[3])
        # A jump backwards ends a loop. The last one, to itself, is never reached.
        if found[2].startswith("BRA") and target and labels.get(target[0], address) < address:
            loops.append((labels[target[0]], address))
    in_loops = sum(first <= address <= last for first, last in loops for address in addresses)
    return len(addresses) + (trips - 1) * in_loops


def programs_and_trips(blocks: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, int]:
    """How many programs a launch has, and how often each of them runs its loops.

    blocks: XBLOCK and so on of the kernel's configuration. sizes: xnumel and so on of the launch.
    """
    if "RSPLIT_SIZE" in blocks:  # a program has so many rows, and goes through them by XBLOCK
        programs = math.ceil(sizes["xnumel"] / blocks["RSPLIT_SIZE"])
        return programs, math.ceil(blocks["RSPLIT_SIZE"] / blocks["XBLOCK"])
    programs = 1
    for axis in "xyz":
        programs *= math.ceil(sizes.get(f"{axis}numel", 1) / blocks.get(f"{axis.upper()}BLOCK", 1))
    reduced = sizes.get("r0_numel", 1)
    return programs, math.ceil(reduced / blocks.get("R0_BLOCK", reduced))


class Counter:
    """Counts the instructions of kernels on a card; compiled ones stay in Triton's cache.

    every: count kernels without a function, too.
    """

    def __init__(self, card: Card, folder: Path, every: bool = False) -> None:
        self.card = card
        self.every = every
        self._folder = folder / "kernels"
        self._folder.mkdir(exist_ok=True)

    def of_launch(self, name: str, source: str, arguments: Sequence[Any]) -> float:
        """Instructions of all threads of one launch with these arguments; 0: the kernel is not counted."""
        if not self.every and FUNCTION.search(source) is None:
            return 0.0
        kernel = self._load(name, source)
        sizes = dict(zip(kernel.fn.arg_names, arguments, strict=False))
        counts = []
        for config in kernel.configs:
            programs, trips = programs_and_trips(config.kwargs, sizes)
            threads = programs * config.num_warps * LANES
            counts.append(threads * per_thread(self._sass(kernel, config), trips))
        # Inductor times its configurations on the card and takes the fastest.
        return float(min(counts))

    def _load(self, name: str, source: str) -> Any:
        """The kernel as Inductor's own object. Triton reads its source from a file."""
        path = self._folder / f"{name[:100]}.py"
        # There is no driver to ask.
        path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None, "the file has just been written"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)

    def _sass(self, kernel: Any, config: Any) -> str:
        """The kernel in one configuration, in the card's own instructions."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        meta = kernel.triton_meta
        names = kernel.fn.arg_names
        constants = {**meta.get("constants", {}), **config.kwargs}
        signature = {}
        for name in names:
            signature[name] = "constexpr" if name in constants else meta["signature"][name]
        values = {(names.index(name),): value for name, value in constants.items() if name in names}
        code = ASTSource(kernel.fn, signature, values, meta["configs"][0])
        major, minor = self.card.capability
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        built = triton.compile(code, target=GPUTarget("cuda", 10 * major + minor, LANES), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
            binary.write(built.asm["cubin"])
            binary.flush()
            command = [triton.knobs.nvidia.nvdisasm.path, "-c", binary.name]
            return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
