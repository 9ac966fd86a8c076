"""CPU seconds of writing and reading the artifact of a model, all passes of the search for its size together.

    python -m benchmarks.gpu_model.encode_time [--config configs/beyond.env] [--set KEY=VALUE ...]

The weights are drawn: rows of different spread, with heavier tails than a Gaussian. They are rounded to
nearest; GPTQ, which a run does on its GPU, is in eager_parts.py. One of eight ranks writes, the others wait.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="", help="file of KEY=VALUE lines; default: the 8-GPU run")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings over that file")
    options = parser.parse_args(arguments)
    from benchmarks.gpu_model import subject

    config = subject.config(options.config, options.set)
    model = subject.drawn_model(config)
    parts: dict[str, list[float]] = {"encode": [], "quantize": []}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.process_time()
            result = function(*arguments)
            parts[name].append(time.process_time() - start)
            return result

        return run

    with tempfile.TemporaryDirectory() as folder, subject.replaced_coder(timed):
        path = Path(folder) / "model.bin"
        start = time.process_time()
        line = subject.write_artifact(path, model, config)
        write_seconds = time.process_time() - start
        start = time.process_time()
        subject.load_artifact(path)
        read_seconds = time.process_time() - start

    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{weights:,} weights; {line}")
    for name, seconds in parts.items():
        print(f"{name}: {sum(seconds):.2f} CPU-s in {len(seconds)} calls")
    print(f"write_artifact: {write_seconds:.2f} CPU-s in all; load_artifact: {read_seconds:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
