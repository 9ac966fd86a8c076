"""Scripts of tests that train nothing, run in this process: a new one takes longer than all that they do."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock


class RunHere:
    """Stands in for `subprocess.Popen`: runs the script that a command ends with."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **_: Any) -> None:
        path = command[-1]
        code = compile(Path(path).read_text("utf-8"), path, "exec")
        self.status = 0
        with mock.patch.dict(os.environ, env, clear=True), mock.patch.object(sys, "argv", [path]):
            try:
                exec(code, {"__name__": "__main__"})
            except SystemExit as error:
                self.status = int(error.code or 0)

    def wait(self) -> int:
        return self.status


# What tools.compare.driver uses of subprocess.
SUBPROCESS = SimpleNamespace(Popen=RunHere, DEVNULL=subprocess.DEVNULL)
