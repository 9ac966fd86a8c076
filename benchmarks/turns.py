"""A version of train_gpt.py in a process of its own that trains in turns: so many steps, then it waits.

    python benchmarks/turns.py SCRIPT    # settings in the environment, commands on standard input

The script's own `main` runs; only its `train_step` is replaced by one that waits for its turn first. So any
version is measured as it really trains, between the end of one step and the end of the next, as long as its
loop calls the global `train_step(training, ...)` and gets back a tensor whose first element is the loss.

A command is a number of steps, the answer a `Turn` as JSON; end of input ends the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks.cpu_clock import load  # noqa: E402


def endless(config: Path, runs: Path, overrides: list[str], **more: str) -> dict[str, str]:
    """The environment of a run that is stopped by hand, not by a clock."""
    given = dict(item.split("=", 1) for item in overrides)
    return {
        "CONFIG": str(config), "RUNS_DIR": str(runs), "MAX_WALLCLOCK_SECONDS": "0", "VAL_LOSS_EVERY": "0",
        "ITERATIONS": "1000000", "WARMDOWN_ITERS": "0", **given, **more,
    }  # fmt: skip


class Turn(NamedTuple):
    """What some steps took and what they learnt, each by step."""

    ms: list[float]  # by the clock on the wall
    cpu_ms: list[float]  # of all threads of the process
    losses: list[float]


class TurnsError(RuntimeError):
    """A script ended or answered something else than its turn; the message has the end of what it printed."""


class Turns:
    """The parent's side: start a script, give it turns, end it. Use as a context manager."""

    def __init__(self, script: Path, settings: Mapping[str, str]) -> None:
        """settings: variables of the script on top of this process's environment, with one thread."""
        self.script = script
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
        self._printed = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 — `close` does
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(script.resolve())], encoding="utf-8", stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._printed, env={**os.environ, **threads, **settings},
        )  # fmt: skip

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def steps(self, count: int) -> Turn:
        """The next `count` steps. TurnsError where the script ends instead."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(count, file=self._process.stdin, flush=True)
            answer = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            self._printed.seek(0)
            printed = self._printed.read().strip()[-2000:]
            raise TurnsError(f"{self.script} ended instead of taking {count} steps:\n{printed}") from error
        return Turn(**answer)

    def close(self) -> None:
        """End the process; safe to call twice."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)
        self._printed.close()


class TakesTurns:
    """In the place of a script's `train_step`: waits until it is told to go on, and times what goes on."""

    def __init__(self, train_step: Any, answers: Any) -> None:
        self.train_step = train_step
        self.answers = answers
        self.left = 0
        self.begun = (0.0, 0.0)
        self.turn = Turn([], [], [])

    def __call__(self, *arguments: Any) -> Any:
        """One step of the script, in its turn."""
        if self.left == 0:
            self.wait()
        results = self.train_step(*arguments)
        self.turn.losses.append(results.tolist()[0])
        now = (time.perf_counter(), time.process_time())
        self.turn.ms.append(1e3 * (now[0] - self.begun[0]))
        self.turn.cpu_ms.append(1e3 * (now[1] - self.begun[1]))
        self.begun = now
        self.left -= 1
        if self.left == 0:
            print(json.dumps(self.turn._asdict()), file=self.answers, flush=True)
        return results

    def wait(self) -> None:
        """Read how many steps come next; without an answer the process ends."""
        command = sys.stdin.readline()
        if not command:
            os._exit(0)
        self.left = int(command)
        self.turn = Turn([], [], [])
        self.begun = (time.perf_counter(), time.process_time())


def main() -> None:
    """Run the script that is named; what it prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module = load(sys.argv.pop(1))
    module.train_step = TakesTurns(module.train_step, answers)
    sys.exit(module.main())


if __name__ == "__main__":
    main()
