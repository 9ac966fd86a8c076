"""A8 with `--run`: start the audited script without network, from its folder and from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.check.findings import Finding, fail, info, warn
from tools.runs.folder import Folder

SECONDS_MAX = 120
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
        try:
            done = subprocess.run(
                [*NO_NETWORK, sys.executable, *command],
                cwd=cwd,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return fail(
                "A8", f"started from {place}: no end within {SECONDS_MAX} s", name, "do no work at import"
            )
    if done.returncode == 0:
        return info("A8", f"starts from {place}", name)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    report = fail if folder.ours else warn  # a foreign script may miss packages that only its own machine has
    return report(
        "A8", f"does not start from {place}: {last}", name, "make it start on a machine without a GPU"
    )
