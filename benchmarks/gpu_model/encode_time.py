"""CPU seconds of writing the artifact of the default model, all passes of the search for its size together.

    python -m benchmarks.gpu_model.encode_time

The weights are drawn: rows of different spread, with heavier tails than a Gaussian. They are rounded to
nearest; GPTQ, which a run does on its GPU, is in eager_parts.py. One of eight ranks writes, the others wait.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> int:
    """The program."""
    from benchmarks.gpu_model import subject

    config = subject.config()
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
