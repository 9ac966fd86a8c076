"""A verb as the tests call it. The script wraps its own source in half a second: for the tests once."""

import functools
from collections.abc import Callable, Iterator

import pytest

import train_gpt
from tools.__main__ import main
from tools.runs import script

SHIPPED_CODE = functools.cache(train_gpt.shipped_code)


@pytest.fixture(scope="module", autouse=True)
def the_wrapped_form_is_made_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "shipped_code", SHIPPED_CODE)
        patch.setattr(script, "shipped_code", SHIPPED_CODE)
        yield


Tool = Callable[..., str]


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    """Runs a verb, which must end with `status`; what it prints, its errors last."""

    def run(verb: str, *arguments: object, status: int = 0) -> str:
        capsys.readouterr()
        assert main([verb, *map(str, arguments)]) == status
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run
