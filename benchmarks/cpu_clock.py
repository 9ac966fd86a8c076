"""A version of train_gpt.py whose clock counts the CPU seconds of its process, of all threads together.

    MAX_WALLCLOCK_SECONDS=60 python benchmarks/cpu_clock.py SCRIPT

An idle machine's wall would show these seconds, where one thread computes. So runs can be compared at equal
seconds on a machine that others share. The script must read its clock by `time.perf_counter()`.
"""

import importlib.util
import os
import sys
import time
from types import SimpleNamespace
from typing import Any


def load(path: str) -> Any:
    """The script as the module `train_gpt`, without starting it."""
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module  # dataclasses look there for their own module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run the script that is named."""
    script = load(sys.argv.pop(1))
    script.time = SimpleNamespace(**{**vars(time), "perf_counter": time.process_time})
    status = script.main()
    sys.stdout.flush()
    os._exit(status)  # as the script ends itself


if __name__ == "__main__":
    main()
