"""Scripts that leave their box: what they do, and where it would show."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.audit.mutants.trial import Change
from tools import REPO


def at_start(deed: Callable[[], object]) -> Change:
    """A deed before all else."""

    def change(_: ModuleType) -> None:
        with contextlib.suppress(OSError):
            deed()

    return change


def appended(path: Path) -> Change:
    """A line at the end of a file."""

    def deed() -> None:
        with open(path, "a") as file:
            file.write("\n# left by a mutant\n")

    return at_start(deed)


HOSTILE: dict[str, Change] = {
    "writes-to-the-auditor": appended(REPO / "tools" / "audit" / "laws.py"),
    "writes-to-site-packages": appended(Path(socket.__file__).with_name("left_by_a_mutant.pth")),
    "writes-to-the-home": appended(Path(pwd.getpwuid(os.getuid()).pw_dir) / "left_by_a_mutant"),
    "writes-to-tmp": appended(Path("/tmp/left_by_a_mutant")),
    "writes-to-the-data": at_start(lambda: Path(os.environ["DATA_PATH"], "left_by_a_mutant").touch()),
    "asks-the-network": at_start(lambda: socket.create_connection(("192.0.2.1", 80), 1)),
}
