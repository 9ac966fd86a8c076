"""The script wraps its own source in half a second: for the tests once."""

import functools
from collections.abc import Iterator

import pytest

import train_gpt
from tools.runs import script

SHIPPED_CODE = functools.cache(train_gpt.shipped_code)


@pytest.fixture(scope="module", autouse=True)
def the_wrapped_form_is_made_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "shipped_code", SHIPPED_CODE)
        patch.setattr(script, "shipped_code", SHIPPED_CODE)
        yield
