"""same_bits finds two equal scripts equal, and names the first thing in which two others differ."""

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import same_bits
from tests.support.processes import SHORT_END, Lab

SHORT = {"ITERATIONS": 2, "VAL_LOSS_EVERY": 0, **SHORT_END}


def test_equal_scripts_are_equal_and_other_weights_are_seen(
    lab: Lab, repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(command: list[Any], env: dict[str, str] | None = None, **_: Any) -> Any:
        """Without a start of Python."""
        changes = {**lab.nothing_but(), **(env or {})}
        ended = lab.run(*command[2:], script=Path(command[1]), **changes)
        return subprocess.CompletedProcess(command, ended.status, ended.out, ended.err)

    monkeypatch.setattr(subprocess, "run", start)
    script = same_bits.Script(repo / "train_gpt.py")
    source = script.path.read_text(encoding="utf-8")
    drawn = "manual_seed(zlib.crc32(text.encode()))"
    assert drawn in source
    other = copy.copy(script)
    other.path = lab.folder / "train_gpt.py"
    other.path.write_text(source.replace(drawn, "manual_seed(1)"), encoding="utf-8")
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
