"""CPU seconds of the entropy coder, scaled to the default model.

python -m benchmarks.gpu_model.encode_time
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

MODEL_SYMBOLS = 35.9e6  # integers of the default model's artifact
SHAPE = (1536, 22 * 512)  # of the measured array: 17.3 M of them, so that the coder has as many lanes
DEVIATION = 2.5  # of the codes, in steps; 6-bit codes end at ±31


def main() -> int:
    """The program."""
    from benchmarks.gpu_model import subject

    draws = np.random.default_rng(0).normal(0, DEVIATION, SHAPE)
    codes = np.clip(np.round(draws), -31, 31).astype(np.int8)

    start = time.process_time()
    data = subject.encode([codes])
    encode_seconds = time.process_time() - start

    start = time.process_time()
    (decoded,) = subject.decode(data, [codes.shape])
    decode_seconds = time.process_time() - start
    if not np.array_equal(decoded, codes):
        raise RuntimeError("decode does not invert encode")

    scale = MODEL_SYMBOLS / codes.size
    print(f"{codes.size} symbols, {len(data)} bytes; {MODEL_SYMBOLS / 1e6} M symbols scaled from them")
    for name, seconds in (("encode", encode_seconds), ("decode", decode_seconds)):
        print(f"{name} {seconds:.2f} CPU-s, scaled {scale * seconds:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
