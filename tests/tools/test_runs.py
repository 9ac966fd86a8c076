"""Run directories that the tests generate read as those of train_gpt.py."""

import sys
from pathlib import Path

import pytest

import tools.__main__


def test_a_python_without_the_packages_is_told_which_has_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)  # as where it is not installed
    for module in ("tools.summary", "train_gpt"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(tools.__main__, "MADE_BY_MAKE", tmp_path / "python")
    assert tools.__main__.main(["summary", "runs/x"]) == 2
    message = capsys.readouterr().err
    assert f"{sys.executable} has no numpy; `make demo` makes an environment" in message
    (tmp_path / "python").touch()
    assert tools.__main__.main(["summary", "runs/x"]) == 2
    assert f"{tmp_path / 'python'} -m tools" in capsys.readouterr().err
