"""The MLP's Triton kernel compiled ahead of time, for GPUs that are not here.

    python -m benchmarks.gpu_model.aot_kernel

One line of JSON for each architecture, dtype, tile and pass: registers, spills and shared memory from ptxas,
and which instructions were chosen. The same lines go to OUT/aot_kernel.json, the PTX beside them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_model import fake_gpu

# Bytes of shared memory that one block may ask for, by compute capability (CUDA C++ Programming Guide).
SHARED_MEMORY_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
ARCHITECTURES = (90, 100, 80, 89, 120)
DTYPES = ("bf16", "fp16", "fp32")

# How often an instruction stands in the PTX says which of the matrix units and copy engines a kernel uses.
INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma_sync": r"\bmma\.sync",
    "fma": r"fma\.rn\.f32",
    "tma_load": r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global",
    "tma_store": r"cp\.async\.bulk\.tensor\.2d\.global\.shared",
    "cp_async": r"cp\.async\.c[ag]",
}


class Variant(NamedTuple):
    """One way to compile the kernel."""

    architecture: int  # 90: sm_90
    dtype: str
    tile: str
    backward: bool
    used: bool  # by the script; the other ones show why it is not


class Assembled(NamedTuple):
    """What ptxas says of a kernel."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def variants() -> Iterator[Variant]:
    """Every variant that the script may use, and on an H100 the small tile in bf16 to compare."""
    from benchmarks.gpu_model import subject

    for architecture in ARCHITECTURES:
        for dtype in DTYPES:
            for tile in ("LARGE", "MEDIUM", "SMALL"):
                used = tile == subject.mlp_tile(dtype, SHARED_MEMORY_LIMIT[architecture])
                if not used and not (dtype == "bf16" and architecture == 90):
                    continue
                for backward in (False, True):
                    yield Variant(architecture, dtype, tile, backward, used)


def compile_variant(variant: Variant) -> Any:
    """The compiled kernel, with its PTX and metadata."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.gpu_model import subject

    kernel, tiles = subject.mlp_kernel()
    blocks = tiles[variant.tile]
    options = {name: blocks.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"BACKWARD": variant.backward, **blocks}
    types = {**subject.mlp_kernel_types(variant.dtype), **dict.fromkeys(constants, "constexpr")}

    # Triton wants types in the order of the arguments, and the rest by their places.
    names = kernel.arg_names
    signature = {name: types[name] for name in names}
    constant_places = {(names.index(name),): value for name, value in constants.items()}
    # As at run time: TMA reads whole 16 bytes, so pointers and sizes are multiples of 16.
    aligned = [name for name in names if types[name].startswith("*") or types[name] == "i32"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}

    source = ASTSource(kernel, signature, constant_places, attributes)
    target = GPUTarget("cuda", variant.architecture, 32)
    return triton.compile(source, target=target, options=options)


def assemble(ptx: str, architecture: str) -> Assembled:
    """Registers and spills of PTX compiled for "sm_90a". Raises RuntimeError with what ptxas says."""
    import triton.backends.nvidia

    folder = Path(triton.backends.nvidia.__file__).parent / "bin"
    newer = folder / "ptxas-blackwell"
    number = int(re.sub(r"\D", "", architecture))
    program = newer if number >= 90 and newer.exists() else folder / "ptxas"
    command = [str(program), "-v", f"--gpu-name={architecture}", "-", "-o", "/dev/null"]
    result = subprocess.run(command, input=ptx, capture_output=True, text=True)
    registers = re.search(r"Used (\d+) registers", result.stderr)
    memory = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", result.stderr
    )
    if result.returncode != 0 or registers is None or memory is None:
        raise RuntimeError(f"ptxas for {architecture}: {result.stderr[:300]}")
    return Assembled(int(registers[1]), int(memory[1]), int(memory[2]), int(memory[3]))


def target_of(ptx: str) -> str:
    """The architecture that PTX names, "sm_90a"."""
    found = re.search(r"\.target (\w+)", ptx)
    assert found is not None, "PTX names its target"
    return found[1]


def measure(variant: Variant, folder: Path) -> dict[str, Any]:
    """One line of the table; what does not compile has an "error" in it."""
    start = time.perf_counter()
    row: dict[str, Any] = variant._asdict()
    try:
        compiled = compile_variant(variant)
        ptx = compiled.asm["ptx"]
        side = "bwd" if variant.backward else "fwd"
        name = f"kernel_{variant.architecture}_{variant.dtype}_{variant.tile}_{side}.ptx"
        (folder / name).write_text(ptx, encoding="utf-8")
        limit = SHARED_MEMORY_LIMIT[variant.architecture]
        row["target"] = target_of(ptx)
        row["shared_bytes"] = compiled.metadata.shared
        row["shared_limit_bytes"] = limit
        row["fits"] = compiled.metadata.shared <= limit
        for instruction, pattern in INSTRUCTIONS.items():
            row[instruction] = len(re.findall(pattern, ptx))
        row.update(assemble(ptx, row["target"])._asdict())
    except Exception as error:  # a compiler's failure is a result of this table
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    fake_gpu.add_arguments(parser)
    fake_gpu.require_triton()
    folder = fake_gpu.prepare_folder(parser.parse_args(arguments).out)
    rows = []
    for variant in variants():
        rows.append(measure(variant, folder))
        print(json.dumps(rows[-1]), flush=True)
    (folder / "aot_kernel.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
