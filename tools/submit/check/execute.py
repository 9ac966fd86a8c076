"""A8 with `--run`: start the audited script without network, from its folder and from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.runs.folder import Folder
from tools.submit.check.findings import Finding, fail, info, warn

SECONDS_MAX = 120
OUTPUT_BYTES_MAX = 64 * 2**20  # of a file that the script writes
LAST_BYTES = 4096  # of its errors, in which the last line is looked for
IMPORT_ONLY = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='audited')"
NO_NETWORK = ("unshare", "--user", "--map-root-user", "--net")


def network_can_be_cut() -> bool:
    """Whether this machine lets an ordinary user start a process in an empty network namespace."""
    if shutil.which(NO_NETWORK[0]) is None:
        return False
    return subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False).returncode == 0


def check_starts(folder: Folder) -> list[Finding]:
    """Import the script under another name than `__main__`; ours must answer `--help`. Never with network."""
    if folder.script is None:
        return []
    if not network_can_be_cut():
        return [
            warn(
                "A8",
                "not started: this machine cannot cut the network of a process",
                folder.script.path.name,
                "run `check --run` where `unshare --user --net` works",
            )
        ]
    script = folder.script.path.resolve()
    command = ["-B", str(script), "--help"] if folder.ours else ["-B", "-c", IMPORT_ONLY, str(script)]
    places = {"its folder": script.parent, "another folder": Path(tempfile.gettempdir())}
    return [_start(folder, command, place, cwd) for place, cwd in places.items()]


def _start(folder: Folder, command: list[str], place: str, cwd: Path) -> Finding:
    name = folder.script.path.name if folder.script else ""
    with tempfile.TemporaryDirectory() as home:
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": home,
            "TMPDIR": home,
            "CUDA_VISIBLE_DEVICES": "",
        }
        outcome = _run([*NO_NETWORK, sys.executable, *command], cwd, environment)
    if outcome is None:
        return fail(
            "A8", f"started from {place}: no end within {SECONDS_MAX} s", name, "do no work at import"
        )
    status, last = outcome
    if status == 0:
        return info("A8", f"starts from {place}", name)
    report = fail if folder.ours else warn  # a foreign script may miss packages that only its own machine has
    return report(
        "A8", f"does not start from {place}: {last}", name, "make it start on a machine without a GPU"
    )


def _run(command: list[str], cwd: Path, environment: dict[str, str]) -> tuple[int, str] | None:
    """Exit status and last line of the errors of a command; None where it does not end in time.

    Its output is thrown away, its errors may have OUTPUT_BYTES_MAX, and what it started ends with it.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
            preexec_fn=_limit_files,
        )
        try:
            status = process.wait(timeout=SECONDS_MAX)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = errors.read().decode("utf-8", errors="replace").strip().splitlines()
    return status, lines[-1] if lines else "no message"


def _limit_files() -> None:
    """In the new process: no file may become larger than OUTPUT_BYTES_MAX. Only called on Linux."""
    import resource  # not on every system

    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_BYTES_MAX, OUTPUT_BYTES_MAX))
