"""A verb as the tests call it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests.support.shipped import the_wrapped_form_is_made_once
from tools.__main__ import main
from tools.compare import plot
from tools.runs.writing import write_figure

__all__ = ["the_wrapped_form_is_made_once"]
Tool = Callable[..., str]


class Blank:
    """Stands for a figure."""

    def savefig(self, file: BinaryIO, **_: Any) -> None:
        file.write(b"a figure")


def without_drawing(patch: pytest.MonkeyPatch) -> None:
    """`plot` reads, writes and prints, but loads no matplotlib, which takes a second: test_plot.py draws."""

    def draw(_groups: object, out: Path, _everything: bool) -> None:
        write_figure(out, Blank(), 100)  # type: ignore[arg-type]

    patch.setattr(plot, "draw", draw)


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    """Runs a verb, which must end with `status`; what it prints, its errors last."""

    def run(verb: str, *arguments: object, status: int = 0) -> str:
        capsys.readouterr()
        assert main([verb, *map(str, arguments)]) == status
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run
