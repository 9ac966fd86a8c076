"""The script wraps its own source in half a second: for the tests once."""

import functools
from collections.abc import Iterator

import pytest

import train_gpt
from tests.support import processes
from tools.runs import script

WRAP = train_gpt.shipped_code


@functools.cache
def shipped_code(source: bytes) -> bytes:
    """The wrapped form, also for the processes of the session, which keep what one of them has made."""
    return processes.remembered(WRAP, processes.SCRIPT.read_bytes(), processes.KEPT)(source)


@pytest.fixture(scope="module", autouse=True)
def the_wrapped_form_is_made_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "shipped_code", shipped_code)
        patch.setattr(script, "shipped_code", shipped_code)
        yield
