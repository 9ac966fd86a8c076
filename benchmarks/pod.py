"""Is this machine worth its rent? Disks, matrix units, buses and links against reference figures.

    python benchmarks/pod.py
    torchrun --standalone --nproc_per_node=8 benchmarks/pod.py

DATA_PATH, RUNS_DIR and DEVICE are read as train_gpt.py reads them. All ranks measure at once, as they will
work, and the slowest one counts. Exit status 1: the ranks have different GPUs, drivers or versions.
`reference` figures are published by others ([pub]), follow from public logs ([log]), were measured on a CPU
([cpu]) or are estimates ([est]). A disk is slow below the need of the default run, all else below SLOW of its
reference.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
import train_gpt  # noqa: E402

SLOW = 0.8
CHUNK_BYTES = 1 << 24
REPEATS = 5
READ_NEED = 1e-6 * 2 * 786_432 / 0.083  # MB/s: the tokens of a default step in the time of one
WRITE_NEED = 1e-6 * 16 * 36_000_000 / 30  # MB/s: a checkpoint of the default model every 30 s
REFERENCES = {  # figure, where it is from, from where on a measurement is ok
    "data read MB/s": (1626.0, "a shard of 200 MB in 123 ms [log]", 2 * READ_NEED),
    "runs write MB/s": (WRITE_NEED, "need: a checkpoint of 36 M weights every 30 s", 2 * WRITE_NEED),
    "matmul TFLOP/s H200": (790.0, "an H200 in bf16", SLOW * 790),
    "matmul TFLOP/s H100": (720.0, "an H100 in bf16 [pub]", SLOW * 720),
    "matmul TFLOP/s cpu": (0.365, "2 cores in fp32 [cpu]", SLOW * 0.365),
    "pinned copy GB/s": (50.0, "PCIe 5", SLOW * 50),
    "all-reduce GB/s": (350.0, "on the bus, 8 GPUs with NVLink [est]", SLOW * 350),
}


def seconds_of(work: Callable[[], object], machine: train_gpt.Machine, repeats: int = REPEATS) -> float:
    """Median seconds of a call, the device's work included; the first call is not counted."""
    taken = []
    for _ in range(repeats + 1):
        machine.wait()
        start = time.perf_counter()
        work()
        machine.wait()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def read_rate(folder: Path, most_bytes: int, rank: int) -> tuple[float | None, str]:
    """MB/s of one shard read from its start, after the kernel was asked to forget it; and what was read."""
    shards = sorted(folder.glob("fineweb_*.bin"))
    if not shards:
        return None, f"no shards in {folder}"
    path = shards[rank % len(shards)]
    buffer = memoryview(bytearray(CHUNK_BYTES))
    done = 0
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # not on macOS, where the page cache answers
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        while done < most_bytes and (got := file.readinto(buffer)):
            done += got
    return done / 1e6 / (time.perf_counter() - start), f"{done / 1e6:.1f} MB of {path}"


def write_rate(folder: Path, size_bytes: int) -> tuple[float, str]:
    """MB/s of a file written and synced, then removed again."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".pod-check.{os.getpid()}"
    data = os.urandom(min(size_bytes, CHUNK_BYTES))
    try:
        start = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for _ in range(-(-size_bytes // len(data))):
                file.write(data)
            os.fsync(file.fileno())
            written = file.tell()
        return written / 1e6 / (time.perf_counter() - start), f"{written / 1e6:.1f} MB to {folder}"
    finally:
        path.unlink(missing_ok=True)


def matmul_rate(machine: train_gpt.Machine, size: int) -> tuple[float, str]:
    """TFLOP/s of a square product: bf16 on a GPU, fp32 on a CPU; of noise, since zeros flatter."""
    dtype = torch.bfloat16 if machine.on_gpu else torch.float32
    a, b = (torch.randn(size, size, device=machine.device).to(dtype) for _ in range(2))
    seconds = seconds_of(lambda: torch.mm(a, b), machine, 4 * REPEATS)
    return 2e-12 * size**3 / seconds, f"{size}³ {str(dtype).removeprefix('torch.')}"


def copy_rate(machine: train_gpt.Machine, size_bytes: int) -> tuple[float | None, str]:
    """GB/s from pinned host memory to the GPU."""
    if not machine.on_gpu:
        return None, "no GPU"
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size_bytes, dtype=torch.uint8, device=machine.device)
    seconds = seconds_of(lambda: there.copy_(host, non_blocking=True), machine)
    return 1e-9 * size_bytes / seconds, f"{size_bytes / 1e6:.1f} MB"


def all_reduce_rate(machine: train_gpt.Machine, size_bytes: int) -> tuple[float | None, str]:
    """GB/s that cross each rank's link in an all-reduce: 2 (n - 1) / n of the bytes."""
    if machine.world_size == 1:
        return None, "one rank"
    values = torch.ones(size_bytes // 4, device=machine.device)
    seconds = seconds_of(functools.partial(dist.all_reduce, values), machine)
    crossing = 2 * (machine.world_size - 1) / machine.world_size * size_bytes
    return 1e-9 * crossing / seconds, f"{size_bytes / 1e6:.1f} MB, {'nccl' if values.is_cuda else 'gloo'}"


def identity(machine: train_gpt.Machine) -> dict[str, str]:
    """What must be equal on all ranks."""
    found = {"device": platform.machine() + " CPU", "memory MiB": "", "driver": "none"}
    if machine.on_gpu:
        card = torch.cuda.get_device_properties(machine.device)
        found = {"device": card.name, "memory MiB": str(card.total_memory >> 20), "driver": "unknown"}
    with contextlib.suppress(OSError, IndexError):
        found["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    versions = {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }
    return found | versions


def reference_of(name: str, machine: train_gpt.Machine, device: str) -> tuple[float, str, float] | None:
    """The figures that a measurement is held against, if there are any for this kind of machine."""
    if name == "all-reduce GB/s" and not machine.on_gpu:
        return None
    if not name.startswith("matmul"):
        return REFERENCES.get(name)
    if not machine.on_gpu:
        return REFERENCES[f"{name} cpu"]
    for kind in ("H200", "H100"):
        if kind in device:
            return REFERENCES[f"{name} {kind}"]
    return None


def table(
    rows: dict[str, list[tuple[float | None, str]]], machine: train_gpt.Machine, device: str
) -> list[str]:
    """One line per measurement: the slowest rank, all of them, the reference and the verdict."""
    head = "| check | slowest rank | all ranks | reference | share | ok from | verdict | what |"
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    for name, measured in rows.items():
        values = [value for value, _ in measured if value is not None]
        if not values:
            lines.append(f"| {name} | | | | | | skipped | {measured[0][1]} |")
            continue
        slowest = min(values)
        everyone = " ".join(f"{value:.4g}" for value in values)
        held = " | | | no reference"
        if known := reference_of(name, machine, device):
            figure, source, enough = known
            verdict = "slow" if slowest < enough else "ok"
            held = f"{figure:.4g} ({source}) | {slowest / figure:.0%} | {enough:.4g} | {verdict}"
        lines.append(f"| {name} | {slowest:.4g} | {everyone} | {held} | {measured[0][1]} |")
    return lines


def main() -> int:
    """Measure, print the table on rank 0, and compare the ranks. Exit status 1 when they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--read-mb", type=float, default=200.0, help="of a shard, read by each rank")
    parser.add_argument("--write-mb", type=float, default=500.0, help="written to RUNS_DIR by rank 0")
    parser.add_argument("--copy-mb", type=float, default=256.0, help="copied and all-reduced")
    parser.add_argument("--matmul", type=int, default=0, help="rows of the square product; 0: 8192, CPU 2048")
    given = parser.parse_args()
    config = train_gpt.Config.from_env(os.environ)
    machine = train_gpt.this_machine(config, os.environ)
    size = given.matmul or (8192 if machine.on_gpu else 2048)
    copied_bytes = int(1e6 * given.copy_mb) // 4 * 4
    data = train_gpt.find_path(config.data_path)
    mine: dict[str, Any] = {
        "data read MB/s": read_rate(data, int(1e6 * given.read_mb), machine.rank),
        "matmul TFLOP/s": matmul_rate(machine, size),
        "pinned copy GB/s": copy_rate(machine, copied_bytes),
        "all-reduce GB/s": all_reduce_rate(machine, copied_bytes),
        "runs write MB/s": (None, "rank 0 writes"),
    }
    if machine.rank == 0:
        mine["runs write MB/s"] = write_rate(Path(config.runs_dir), int(1e6 * given.write_mb))
    everyone = machine.gather(mine)
    identities = machine.gather(identity(machine))
    different = [name for name in identities[0] if len({one[name] for one in identities}) > 1]
    if machine.rank == 0:
        described = ", ".join(f"{name}: {value}" for name, value in identities[0].items())
        print(f"{machine.world_size} x {described}")
        rows = {name: [one[name] for one in everyone] for name in mine}
        print("\n".join(table(rows, machine, identities[0]["device"])))
        for name in different:
            values = [one[name] for one in identities]
            print(f"error: {name} differs between ranks: {values}; rent another machine", file=sys.stderr)
    machine.gather(None)
    return int(bool(different))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as train_gpt.py: no rank waits for another's end
