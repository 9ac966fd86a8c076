"""A test leaves its process as it found it, so that any selection of tests passes in any order."""

import subprocess
import sys
from pathlib import Path

CATCHES_SIGNALS = """
import signal
import pytest

NUMBERS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
BEFORE = [signal.getsignal(number) for number in NUMBERS]

@pytest.fixture(scope="module")
def caught_for_the_module():
    signal.signal(signal.SIGTERM, print)

def test_one(caught_for_the_module):
    signal.signal(signal.SIGINT, print)
    signal.signal(signal.SIGUSR1, print)

def test_another():
    assert [signal.getsignal(number) for number in NUMBERS] == BEFORE
"""


def test_no_handler_of_a_signal_outlives_its_test(repo: Path, tmp_path: Path) -> None:
    file = tmp_path / "test_signals.py"
    file.write_text(CATCHES_SIGNALS)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-o", "timeout=60", f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", "-q", *options, str(file)]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
