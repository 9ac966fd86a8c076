"""The dearest kernels that Inductor generated in a census, compiled ahead of time for the card.

    python -m benchmarks.gpu_model.aot_inductor default_train_loop --count 6

For each of the dearest kernels of each graph, and its first two configurations: registers, spills and shared
memory, from ptxas. Which configuration is the fastest, only a GPU can say.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_model import fake_gpu
from benchmarks.gpu_model.aot_kernel import assemble, target_of
from benchmarks.gpu_model.roofline import CARDS

CONFIGURATIONS = 2  # of each kernel; Inductor offers up to five


def dearest(graph: dict[str, Any], count: int) -> list[tuple[str, float]]:
    """Names and milliseconds, all launches together, of the dearest generated kernels of a graph."""
    milliseconds: defaultdict[str, float] = defaultdict(float)
    for launch in graph["launches"]:
        if launch["kind"] == "generated":
            milliseconds[launch["name"]] += launch["microseconds"] / 1e3
    return sorted(milliseconds.items(), key=lambda item: -item[1])[:count]


def sources_in(code: str) -> dict[str, str]:
    """The source of each Triton kernel of a generated module, by name."""
    pattern = r"async_compile\.triton\('([^']+)', '''(.*?)''', device_str"
    sources = {}
    for name, source in re.findall(pattern, code, re.DOTALL):
        # The module is a string in a string; and there is no driver that could be set.
        without_driver = source.replace("triton_helpers.set_driver_to_gpu()", "")
        sources[name] = without_driver.replace("\\\\", "\\")
    return sources


def load_kernel(name: str, source: str, folder: Path) -> Any:
    """Inductor's object of one kernel: the function, and the configurations it would try."""
    path = folder / "aot_inductor_kernel.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("aot_inductor_kernel", path)
    assert spec is not None and spec.loader is not None, "the file was just written"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def compile_configuration(kernel: Any, configuration: Any, architecture: int) -> Any:
    """By triton.compile itself: Inductor's own path goes on to load the result, which needs a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.fn.arg_names
    constants = {**kernel.triton_meta.get("constants", {}), **configuration.kwargs}
    signature = {}
    constant_places = {}
    for place, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            constant_places[(place,)] = constants[name]
        else:
            signature[name] = kernel.triton_meta["signature"].get(name, "constexpr")
    source = ASTSource(kernel.fn, signature, constant_places, kernel.triton_meta["configs"][0])
    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def describe(name: str, source: str, folder: Path, architecture: int) -> str:
    """One kernel's line: what its first configurations compile to, or why they do not."""
    start = time.process_time()
    try:
        kernel = load_kernel(name, source, folder)
        found = []
        for configuration in kernel.configs[:CONFIGURATIONS]:
            compiled = compile_configuration(kernel, configuration, architecture)
            ptx = compiled.asm["ptx"]
            assembled = assemble(ptx, target_of(ptx))
            found.append(
                f"{configuration.kwargs} warps {configuration.num_warps}: "
                f"registers {assembled.registers}, spilled bytes {assembled.spill_store_bytes}, "
                f"shared bytes {compiled.metadata.shared}"
            )
        seconds = time.process_time() - start
        return f"{len(kernel.configs)} configurations: {' | '.join(found)} [{seconds:.1f} s CPU]"
    except Exception as error:  # a compiler's failure is a result of this table
        return f"FAILED {type(error).__name__}: {str(error)[:200]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("label", help="of a census: the name of its JSON file")
    parser.add_argument("--count", type=int, default=4, help="kernels of each graph")
    parser.add_argument("--card", default="h100", choices=sorted(CARDS))
    fake_gpu.add_arguments(parser)
    options = parser.parse_args(arguments)
    path = fake_gpu.prepare_folder(options.out) / f"{options.label}.json"
    if not path.exists():
        print(f"{path} is not there: run the census of {options.label} first", file=sys.stderr)
        return 1
    card, folder = fake_gpu.prepare(options.card, options.out)
    architecture = 10 * card.capability[0] + card.capability[1]
    for graph in json.loads(path.read_text(encoding="utf-8"))["graphs"]:
        sources = sources_in((folder / f"{graph['tag']}.py").read_text(encoding="utf-8"))
        for name, milliseconds in dearest(graph, options.count):
            line = describe(name, sources[name], folder, architecture)
            print(f"{graph['tag']} {milliseconds:.2f} ms {name[:90]}: {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
