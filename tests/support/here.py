"""The script's `main` in this process, where the process is not what is tested."""

import os
import sys
from collections.abc import Mapping
from unittest import mock

import train_gpt


def main_here(environ: Mapping[str, str], *arguments: str) -> int:
    """Its exit status, in this environment and no other."""
    command = mock.patch.object(sys, "argv", ["train_gpt.py", *arguments])
    with mock.patch.dict(os.environ, environ, clear=True), command:
        return train_gpt.main()
