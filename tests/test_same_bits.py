"""same_bits finds two equal scripts equal, and names the first thing in which two others differ."""

import copy
import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest

import train_gpt
from tests import same_bits
from tests.support.processes import SHORT_END, Lab

SHORT = {"ITERATIONS": 2, "VAL_LOSS_EVERY": 0, **SHORT_END}


def test_equal_scripts_are_equal_and_other_weights_are_seen(
    lab: Lab, repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script_path, other_path = repo / "train_gpt.py", lab.folder / "train_gpt.py"
    # The other script stands for one that draws other weights: a changed source would have to be compiled.
    draws = {script_path: {}, other_path: {"QK_GAIN_INIT": 2.5}}

    def start(command: list[Any], env: dict[str, str] | None = None, **_: Any) -> Any:
        """Without a start of Python."""
        changes = {**lab.nothing_but(), **(env or {}), **draws[Path(command[1])]}
        ended = lab.run(*command[2:], **changes)
        return subprocess.CompletedProcess(command, ended.status, ended.out, ended.err)

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(same_bits, "load_script", lambda _: train_gpt)
    script = same_bits.Script(script_path)
    # One run is compared twice, and takes part three times.
    monkeypatch.setattr(script, "weights", functools.cache(script.weights))
    other = copy.copy(script)
    other.path = other_path
    of_the_lab = {name: value for name, value in lab.settings().items() if name in script.known}
    case = same_bits.Case("", {**of_the_lab, **SHORT})
    monkeypatch.setitem(same_bits.CASES, "short", case)
    run = script.run(case, lab.folder)
    monkeypatch.setattr(script, "run", lambda *_: run)
    assert same_bits.compare("short", script, script)
    assert not same_bits.compare("short", script, other)
    equal, different, *_ = capsys.readouterr().out.splitlines()
    assert equal.startswith("short: equal (2 steps, ")
    parts = "train losses, gradient norms, validation losses, decoded weights, final scores"
    assert different.startswith(f"short: DIFFERENT {parts} (")
