"""One run of a row with a seed: started, resumed or skipped, whatever was there before.

A run is in FOLDER/ROW-seedSEED. Nothing is overwritten: a run that cannot be resumed moves to
FOLDER/stopped. A run with other settings than the row has now, or of a script that was edited since, is
refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.files import exclusive, sha256_file
from tools.compare import overview
from tools.compare.rows import SET_BY_THE_DRIVER, Row
from tools.runs.derive import mapping
from tools.runs.errors import RecordError
from tools.runs.folder import CONFIG, required_object
from tools.runs.runs import ARTIFACT, CHECKPOINT, FINISHED, SUMMARY, settings_of
from tools.runs.settings import plain_values
from tools.runs.source import same_program

SCRIPT = "train_gpt.py"  # the copy of it in a run directory
# What a CPU gains from its libraries: waiting threads spin for microseconds, freed memory is kept.
LIBRARIES = {
    "GOMP_SPINCOUNT": "3000",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}


def directory_of(folder: Path, row: str, seed: str) -> Path:
    """The directory of a row's run."""
    return folder / f"{row}-seed{seed}"


def run_once(row: Row, seed: str, folder: Path, quiet: bool = False) -> str:
    """Start, resume or skip one run. Returns why no other should follow; empty text if all is well.

    quiet: what the run prints is not shown; all but its errors is in its log.
    """
    directory = directory_of(folder, row.name, seed)
    if (directory / CONFIG).is_file():
        refuse_other_settings(directory, row, seed)
    if is_finished(directory):
        refuse_other_script(directory, row)
        refuse_other_artifact(directory, directory_of(folder, row.of, seed) if row.of else None)
    else:
        variables = {**row.settings, "SEED": seed, "RUNS_DIR": str(folder), "RUN_ID": directory.name}
        if row.of:
            variables["EVAL_ONLY"] = str(directory_of(folder, row.of, seed) / ARTIFACT)
        if (directory / CHECKPOINT).is_file():
            variables = {**row.settings, "SEED": seed, "RESUME": str(directory)}
        elif directory.exists():
            keep_aside(directory)
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        if not quiet:
            print(f"sweep {row.name}, seed {seed}: {' '.join(words)} {shlex.join(row.start)}", flush=True)
        exit_status = start(row.start, variables, quiet)
        if exit_status != 0 or not is_finished(directory):
            return f"{directory} ended with exit status {exit_status}"
    over = overview.failed_limits(required_object(directory / SUMMARY))
    return f"{directory} exceeded its limits: {', '.join(over)}" if over else ""


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Keep others from running the same rows; so does a run that a killed driver left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / f".{name}.lock") as descriptor:
        os.set_inheritable(descriptor, True)
        yield


def start(command: Sequence[str], variables: dict[str, str], quiet: bool = False) -> int:
    """The exit status of a run. An interrupt reaches the run too: it gets the time for its checkpoint."""
    beneath = {name: value for name, value in os.environ.items() if name not in SET_BY_THE_DRIVER}
    environment = {**LIBRARIES, **beneath, **variables}
    output = subprocess.DEVNULL if quiet else None
    # It inherits what `locked` holds.
    process = subprocess.Popen(
        command, env=environment, stdout=output, close_fds=False, preexec_fn=end_with_parent
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def end_with_parent() -> None:
    """In a run, on Linux: get SIGTERM once the driver is gone, or a killed one would leave its run behind."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM))


def is_finished(directory: Path) -> bool:
    """Whether the run wrote its summary. RecordError for a damaged one, or the run would be made again."""
    path = directory / SUMMARY
    return path.is_file() and required_object(path).get("exit") == FINISHED


def refuse_other_settings(directory: Path, row: Row, seed: str) -> None:
    """RecordError if the existing run was started with other settings than the row has now."""
    wanted = plain_values(row.config(seed).as_env())
    written = plain_values(settings_of(directory / CONFIG))
    differs = [name for name in sorted(wanted.keys() & written.keys()) if wanted[name] != written[name]]
    differs = [name for name in differs if name not in SET_BY_THE_DRIVER]
    if differs:
        got = ", ".join(f"{name}={written[name]}, not {wanted[name]}" for name in differs)
        raise RecordError(f"{directory} was started with other settings ({got}); give the row another name, "
                          "or move that directory away")


def refuse_other_script(directory: Path, row: Row) -> None:
    """RecordError if another program made a finished run than the row would start now.

    Its score would pass for that of the edited script. Comments do not count. A run that is not finished is
    started over, or resumed by its script, which looks for itself.
    """
    kept, current = directory / SCRIPT, Path(row.start[-1])
    if not kept.is_file() or not current.is_file():
        return
    then, now = (path.read_text(encoding="utf-8", errors="replace") for path in (kept, current))
    if not same_program(then, now):
        raise RecordError(f"{directory} is a run of another version of {current}; give the row another name "
                          "(make seeds: another NAME), move that directory away, or keep its version with "
                          f"script={shlex.quote(str(kept))} in the row")


def refuse_other_artifact(directory: Path, trained: Path | None) -> None:
    """RecordError if a finished run scored an artifact that its row has replaced since.

    trained: the run whose artifact it is; None: one of its own.
    """
    if trained is None or not (trained / ARTIFACT).is_file():
        return
    scored = mapping(required_object(directory / SUMMARY), "artifact").get("sha256")
    if scored and scored != sha256_file(trained / ARTIFACT):
        raise RecordError(f"{directory} has scored another {ARTIFACT} than {trained} has now; move that "
                          "directory away, and the sweep scores the new one")


def keep_aside(directory: Path) -> None:
    """Rename the directory of a run that cannot be resumed: nothing is overwritten."""
    stopped = directory.parent / "stopped"
    stopped.mkdir(exist_ok=True)
    numbered = (stopped / f"{directory.name}.{number}" for number in itertools.count(1))
    aside = next(path for path in numbered if not path.exists())
    directory.rename(aside)
    told = f"{directory.name} had no checkpoint: it is kept as {aside}, and the run starts over"
    print(told, file=sys.stderr)


def scores_of(directory: Path) -> dict[str, float]:
    """Bits per byte of a finished run after each stage, in the order of the stages; of another none."""
    return dict(overview.read_row(directory).scores) if is_finished(directory) else {}


def version_of(directory: Path) -> str:
    """The first digits of the SHA-256 of the script that a run has kept; empty where it kept none."""
    path = directory / SCRIPT
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ""
