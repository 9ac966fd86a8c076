"""The entropy coder of artifacts against general-purpose compressors, on trained codes and on Gaussian ones.

    python benchmarks/coder.py [--artifact runs/NAME/model.bin ...] [--weights 10000000] [--keep]

Trained codes are read from artifacts (default: the newest run that has one). Each coder gets the same arrays;
the general-purpose ones compress each array's bytes as one stream, rows in order. The yardstick is the
zeroth-order entropy of the codes of each role (attention, MLP, embedding), which no coder without context can
beat; that of train_gpt.py can, because it learns one table per class of column. Row scales are counted apart.
zstd and Brotli come from the packages `zstandard` and `brotli`; where one is missing, its row says so.
"""

import argparse
import bz2
import contextlib
import lzma
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks import paired, results  # noqa: E402
from train_gpt import ModelSettings  # noqa: E402

TITLE = "Entropy coder"
HEADER = "| codes | coder | bytes | over zeroth-order entropy | bits per weight | encode s | decode s |"
Roles = dict[str, list[np.ndarray]]  # role -> code arrays (rows, columns) int8
Coder = tuple[str, Callable[[bytes], bytes] | None, Callable[[bytes], bytes] | None]


def codes_of(path: Path) -> Roles:
    """Codes of an artifact's matrices by role, as the coder sees them."""
    header, banks = train_gpt.read_artifact(path.read_bytes())
    table = train_gpt.parameter_table(ModelSettings.from_values(header["config"]))
    roles: Roles = {}
    for name, parameter in table.items():
        if parameter.role:
            codes = banks[name].codes
            if codes.dtype == np.int16:
                codes = (codes >> 1).astype(np.int8)  # half steps: general coders get the codes alone
            roles.setdefault(parameter.role, []).append(codes)
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


def general_coders() -> list[Coder]:
    """The compressors of the public stacks, each at its strongest setting; None: its package is missing."""
    extreme = 9 | lzma.PRESET_EXTREME
    found: list[Coder] = [
        ("zlib-9", lambda data: zlib.compress(data, 9), zlib.decompress),
        ("bz2-9", lambda data: bz2.compress(data, 9), bz2.decompress),
        ("lzma-9e", lambda data: lzma.compress(data, preset=extreme), lzma.decompress),
        ("zstd-22", None, None),
        ("Brotli-11", None, None),
    ]
    with contextlib.suppress(ImportError):
        import zstandard

        found[3] = (
            "zstd-22", zstandard.ZstdCompressor(level=22).compress, zstandard.ZstdDecompressor().decompress)
    with contextlib.suppress(ImportError):
        import brotli

        found[4] = ("Brotli-11", lambda data: brotli.compress(data, quality=11, lgwin=24), brotli.decompress)
    return found


def map_list(function: Callable[[bytes], bytes], blobs: list[bytes]) -> list[bytes]:
    """The function's result for each."""
    return [function(blob) for blob in blobs]


def timed(name: str, pack: Callable[[], Any], unpack: Callable[[Any], Any]) -> tuple[dict[str, Any], Any]:
    """Bytes and seconds of one coder, and what came back."""
    start = time.perf_counter()
    packed = pack()
    middle = time.perf_counter()
    unpacked = unpack(packed)
    end = time.perf_counter()
    size = sum(map(len, packed))
    return {"name": name, "bytes": size, "encode_s": middle - start, "decode_s": end - middle}, unpacked


def measure(label: str, roles: Roles) -> dict[str, Any]:
    """All coders on the same arrays."""
    arrays = [array for members in roles.values() for array in members]
    shapes = [array.shape for array in arrays]

    def encode() -> list[bytes]:
        return [train_gpt.encode(arrays)]

    def decode(packed: list[bytes]) -> list[np.ndarray]:
        return train_gpt.decode(packed[0], shapes)

    ours, decoded = timed("rANS, train_gpt.py", encode, decode)
    if not all(np.array_equal(a, b) for a, b in zip(arrays, decoded, strict=True)):
        raise SystemExit(f"{label}: the round trip is not exact")
    coders = [ours]
    blobs = [array.tobytes() for array in arrays]
    for name, compress, decompress in general_coders():
        if compress is None or decompress is None:
            coders.append({"name": name})
            continue
        pack, unpack = (partial(map_list, function) for function in (compress, decompress))
        coders.append(timed(name, partial(pack, blobs), unpack)[0])
        print(label, coders[-1], file=sys.stderr, flush=True)
    return {
        "label": label,
        "weights": sum(array.size for array in arrays),
        "entropy_bytes": entropy_bytes(roles),
        "coders": coders,
    }


def tables(measured: dict[str, Any]) -> list[str]:
    """One row per coder and set of codes."""
    lines = paired.table(HEADER, [])
    for codes in measured["codes"]:
        label = f"{codes['label']}, {codes['weights'] / 1e6:.2f} M"
        for coder in codes["coders"]:
            if "bytes" not in coder:
                lines.append(f"| {label} | {coder['name']} | not installed | | | | |")
                continue
            size = coder["bytes"]
            over = 100 * (size / codes["entropy_bytes"] - 1)
            figures = f"{size:,} | {over:+.2f} % | {8 * size / codes['weights']:.4f}"
            seconds = f"{coder['encode_s']:.2f} | {coder['decode_s']:.2f}"
            lines.append(f"| {label} | {coder['name']} | {figures} | {seconds} |")
    return lines


def main() -> None:
    """Print the table; with --keep store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--artifact", type=Path, action="append", help="a run's model.bin; may be repeated")
    parser.add_argument("--weights", type=int, default=10_000_000, help="Gaussian codes to draw; 0: none")
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    arguments = parser.parse_args()
    before = results.conditions()
    codes = []
    found = sorted(REPO.glob("runs/*/model.bin"), key=lambda path: path.stat().st_mtime)
    for path in arguments.artifact or found[-1:]:
        codes.append(measure(f"trained, {path.parent.name}", codes_of(path)))
    if not codes:
        print("no artifact under runs/: only Gaussian codes; name one with --artifact", file=sys.stderr)
    if arguments.weights:
        codes.append(measure("Gaussian", gaussian_codes(arguments.weights)))
    results.finish("coder", before, {"codes": codes}, arguments.keep)


if __name__ == "__main__":
    main()
