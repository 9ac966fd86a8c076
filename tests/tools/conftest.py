"""A verb as the tests call it."""

from collections.abc import Callable

import pytest

from tests.support.shipped import the_wrapped_form_is_made_once
from tools.__main__ import main

__all__ = ["the_wrapped_form_is_made_once"]
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
