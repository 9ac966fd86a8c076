"""A test leaves its process as it found it, so that any selection of tests passes in any order."""

import pytest

from tests import conftest

pytest_plugins = ["pytester"]

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


def test_no_handler_of_a_signal_outlives_its_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CATCHES_SIGNALS)
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-o", "timeout=60"]
    pytester.inline_run(*options, plugins=[conftest]).assertoutcome(passed=2)
