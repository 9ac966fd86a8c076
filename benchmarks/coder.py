"""The entropy coder of artifacts against general-purpose compressors, on trained codes and on Gaussian ones.

    python benchmarks/coder.py [--artifact runs/NAME/model.bin ...] [--weights 10000000] [--out FILE]

Trained codes are read from artifacts (default: the newest run that has one). Each coder gets the same arrays;
the general-purpose ones compress each array's bytes as one stream, rows in order. The yardstick is the
zeroth-order entropy of the codes of each role (attention, MLP, embedding), which no coder without context can
beat; that of train_gpt.py can, because it learns one table per class of column. Row scales are counted apart.
zstd and Brotli come from the packages `zstandard` and `brotli`; where one is missing, its row says so.
"""

from __future__ import annotations

import argparse
import bz2
import importlib
import lzma
import os
import platform
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402

HEADER = "| codes | coder | bytes | over zeroth-order entropy | bits per weight | encode s | decode s |"
Roles = dict[str, list[np.ndarray]]  # role -> code arrays (rows, columns) int8
Coder = tuple[str, Callable[[bytes], bytes] | None, Callable[[bytes], bytes] | None]


def codes_of(path: Path) -> Roles:
    """Codes of an artifact's matrices by role, as the coder sees them."""
    sizes = train_gpt.describe_artifact(path)["sections"]
    _, config = train_gpt.load_artifact(path)
    shapes = {name: (1, 1, *shape)[-3:] for name, shape in train_gpt.parameter_shapes(config).items()}
    both = [shape for n, rows, columns in shapes.values() for shape in ((rows, n * columns), (rows, n))]
    arrays = train_gpt.decode(path.read_bytes()[-sizes["weights"] :], both)
    roles: Roles = {}
    for name, codes in zip(shapes, arrays[::2], strict=True):
        if name in train_gpt.MATRIX_ROLES:
            roles.setdefault(train_gpt.MATRIX_ROLES[name], []).append(codes)
    return roles


def gaussian_codes(weights: int) -> Roles:
    """int6 codes of Gaussian rows clipped at 11.5 deviations: no class of column differs from another."""
    deviation = 31 / train_gpt.Config().mlp_clip_sigmas
    values = np.random.default_rng(0).standard_normal((512, weights // 512)) * deviation
    return {"gaussian": [np.clip(np.rint(values), -31, 31).astype(np.int8)]}


def entropy_bytes(roles: Roles) -> float:
    """Zeroth-order entropy of the codes, one distribution per role."""
    total = 0.0
    for arrays in roles.values():
        counts = sum(np.bincount(array.view(np.uint8).ravel(), minlength=256) for array in arrays)
        shares = counts[counts > 0] / counts.sum()
        total -= float(counts.sum() * (shares * np.log2(shares)).sum() / 8)
    return total


def package(name: str) -> object | None:
    """An optional package, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def general_coders() -> list[Coder]:
    """The compressors of the public stacks, each at its strongest setting."""
    zstandard, brotli = package("zstandard"), package("brotli")
    extreme = 9 | lzma.PRESET_EXTREME
    return [
        ("zlib-9", lambda data: zlib.compress(data, 9), zlib.decompress),
        ("bz2-9", lambda data: bz2.compress(data, 9), bz2.decompress),
        ("lzma-9e", lambda data: lzma.compress(data, preset=extreme), lzma.decompress),
        (
            "zstd-22",
            zstandard.ZstdCompressor(level=22).compress if zstandard else None,
            zstandard.ZstdDecompressor().decompress if zstandard else None,
        ),
        (
            "Brotli-11",
            (lambda data: brotli.compress(data, quality=11, lgwin=24)) if brotli else None,
            brotli.decompress if brotli else None,
        ),
    ]


def rows_for(label: str, roles: Roles) -> list[str]:
    """One table row per coder."""
    arrays = [array for members in roles.values() for array in members]
    weights, floor = sum(array.size for array in arrays), entropy_bytes(roles)

    def row(name: str, size: int, encode_s: float, decode_s: float) -> str:
        measured = f"{size:,} | {100 * (size / floor - 1):+.2f} % | {8 * size / weights:.4f}"
        return f"| {label} | {name} | {measured} | {encode_s:.2f} | {decode_s:.2f} |"

    start = time.perf_counter()
    data = train_gpt.encode(arrays)
    middle = time.perf_counter()
    decoded = train_gpt.decode(data, [array.shape for array in arrays])
    end = time.perf_counter()
    assert all(np.array_equal(a, b) for a, b in zip(arrays, decoded, strict=True)), (
        "the round trip is not exact"
    )
    table = [row("rANS, train_gpt.py", len(data), middle - start, end - middle)]
    for name, compress, decompress in general_coders():
        if compress is None or decompress is None:
            table.append(f"| {label} | {name} | not installed | | | | |")
            continue
        start = time.perf_counter()
        packed = [compress(array.tobytes()) for array in arrays]
        middle = time.perf_counter()
        for blob in packed:
            decompress(blob)
        table.append(row(name, sum(map(len, packed)), middle - start, time.perf_counter() - middle))
        print(table[-1], file=sys.stderr, flush=True)
    return table


def main() -> None:
    """Print the table; with --out append it to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--artifact", type=Path, action="append", help="a run's model.bin; may be repeated")
    parser.add_argument("--weights", type=int, default=10_000_000, help="Gaussian codes to draw; 0: none")
    parser.add_argument("--out", type=Path, help="append the table to this file")
    arguments = parser.parse_args()
    found = sorted(REPO.glob("runs/*/model.bin"), key=lambda path: path.stat().st_mtime)
    lines = []
    for path in arguments.artifact or found[-1:]:
        roles = codes_of(path)
        weights = sum(array.size for members in roles.values() for array in members)
        lines += rows_for(f"{path.parent.name}, {weights / 1e6:.2f} M trained", roles)
    if not lines:
        print(
            "no artifact under runs/: only Gaussian codes are measured; name one with --artifact",
            file=sys.stderr,
        )
    if arguments.weights:
        lines += rows_for(f"{arguments.weights / 1e6:.2f} M Gaussian", gaussian_codes(arguments.weights))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True
    ).stdout.strip()
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    versions = f"Python {platform.python_version()} · numpy {np.__version__}"
    machine = f"{platform.machine()}, {os.cpu_count()} cores · {versions}"
    title = f"## coder · {when} · {machine} · commit {commit}"
    table = "\n".join([title, "", HEADER, "|" + "---|" * (HEADER.count("|") - 1), *lines, ""])
    print(table)
    if arguments.out:
        with open(arguments.out, "a", encoding="utf-8") as file:
            file.write("\n" + table)


if __name__ == "__main__":
    main()
