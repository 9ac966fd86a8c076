"""The scripts for a rented machine, with programs in the place of those that they start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.compare.rows import read_sweep

PYTHON = """#!/bin/sh
echo "python $*" >> calls
case "$*" in
    *data/fineweb.py*) [ "$FAILS" != data ] ;;
    *gpu_check.py*) mkdir "$3" && [ "$FAILS" != check ] ;;
    *sweep*) mkdir -p runs/seeds/base-seed1337
        echo "stopped by signal 15; continue with RESUME=x" > runs/seeds/base-seed1337/log.txt
        [ "$FAILS" != seeds ] || { echo "Traceback of torchrun"; exit 1; } ;;
esac
"""
RSYNC = """#!/bin/sh
echo "rsync $*" >> calls
mkdir -p runs/pod; [ "$(wc -l < calls)" -lt 3 ] || echo 0 > runs/pod/ended
"""


@pytest.fixture
def there(repo: Path, tmp_path: Path) -> Path:
    """A folder with the scripts, and a folder of programs that note how they are called."""
    shutil.copytree(repo / "tools/pod", tmp_path / "tools/pod")
    for name, text in (("python", PYTHON), ("rsync", RSYNC), ("sleep", "#!/bin/sh\n")):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def start(there: Path, script: str, *arguments: str, **settings: str) -> tuple[int, str, list[str]]:
    """Its exit status, what it prints, and the calls of programs."""
    (there / "calls").unlink(missing_ok=True)
    environ = {"PATH": f"{there / 'bin'}{os.pathsep}{os.environ['PATH']}", **settings}
    command = ["bash", str(there / "tools/pod" / script), *arguments]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    calls = there / "calls"
    return done.returncode, done.stdout, calls.read_text().splitlines() if calls.exists() else []


def test_stages_come_in_order_stop_at_a_failure_and_are_done_once(there: Path) -> None:
    status, out, calls = start(there, "run.sh", FAILS="check", SHARDS="3")
    assert status == 1 and [re.findall(r"fineweb|gpu_check|sweep", call) for call in calls] == [
        ["fineweb"], ["gpu_check"],
    ]
    assert "--train-shards 3" in calls[0] and (there / "runs/pod/ended").read_text() == "1\n"
    status, out, calls = start(there, "run.sh", FAILS="seeds", SHARDS="3")
    assert status == 1 and [call.split()[1] for call in calls] == ["benchmarks/gpu_check.py", "-m"]
    # How to go on comes after all that torchrun prints.
    assert re.search(r"Traceback of torchrun\n.*log.txt: stopped .*; continue with RESUME=x\nended with", out)
    for _ in range(2):  # the sweep knows by itself what is left to do
        status, out, calls = start(there, "run.sh", SHARDS="3")
        assert status == 0 and calls == ["python -m tools sweep tools/pod/seeds.sweep"]
    assert (there / "runs/pod/ended").read_text() == "0\n" and "RESUME" not in out
    seconds = (there / "runs/pod/seconds.txt").read_text()
    assert re.fullmatch(r"(pod: (data-caseops-3|check|seeds) took \d+ s\n){4}", seconds)


def test_runs_are_fetched_until_the_machine_has_ended(there: Path) -> None:
    assert start(there, "fetch.sh")[0] == 2
    status, out, calls = start(there, "fetch.sh", "root@pod", EVERY="60", PORT="2222")
    assert status == 0 and len(calls) == 3 and "stop the machine" in out
    assert "root@pod:/repository/runs/ runs/" in calls[0] and "ssh -p 2222" in calls[0]


def test_what_is_missing_is_told_before_anything_is_paid_for(there: Path) -> None:
    status, out, calls = start(there, "run.sh", SWEEP="my.sweep")
    assert status == 2 and "SWEEP=my.sweep" in out and calls == []
    (there / "my.sweep").write_text("seeds: 1\nbase:\n")
    status, _, calls = start(there, "run.sh", SWEEP="my.sweep")
    assert status == 0 and calls[-1] == "python -m tools sweep my.sweep"
    # Without rsync, EVERY would try until somebody looks.
    for name in ("bash", "dirname", "mkdir", "rm"):
        (there / "few" / name).parent.mkdir(exist_ok=True)
        (there / "few" / name).symlink_to(shutil.which(name) or name)
    status, out, calls = start(there, "fetch.sh", "root@pod", EVERY="60", PATH=str(there / "few"))
    assert status == 2 and "rsync is not installed" in out and calls == []


def test_the_image_has_a_traced_torch_and_its_wheel(repo: Path) -> None:
    text = (repo / "tools/pod/Dockerfile").read_text("utf-8")
    (torch, cuda) = re.findall(r"^FROM pytorch/pytorch:([\d.]+)-cuda([\d.]+)-", text, re.MULTILINE)[0]
    assert f"/cu{cuda.replace('.', '')}_torch{torch.replace('.', '')}/" in text
    versions = re.search(r"^TORCH_VERSIONS \?= (.+)$", (repo / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert versions and torch in versions[1].split()
    copied = re.findall(r"^COPY (?!\.)(\S+)", text, re.MULTILINE)
    assert copied and all((repo / name).exists() for name in copied)
    sweep = read_sweep(repo / "tools/pod/seeds.sweep")
    assert sweep.seeds == ["1337", "42", "2025"] and sweep.rows["base"].start[0] == "torchrun"
