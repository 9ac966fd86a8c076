"""What `make` does with variables that are set but empty, as Compose and CI files hand them on."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.compare.rows import read_lines

EMPTY = ("CONFIG", "NAME", "SEEDS", "RUNS_DIR", "PYTHON", "TEST_WORKERS", "TORCH_VERSIONS",
         "TORCH_ENVIRONMENTS")


def recipe(repo: Path, target: str, *given: str, **environment: str) -> str:
    """What `make TARGET` would run, but for the time in a run's name."""
    kept = {name: value for name, value in os.environ.items() if name not in EMPTY}
    command = ["make", "--dry-run", "--always-make", target, *given]
    ended = subprocess.run(command, cwd=repo, env={**kept, **environment}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return re.sub(r"demo-\d{8}-\d{6}", "demo-TIME", ended.stdout)


@pytest.mark.parametrize("target", ["demo", "seeds", "test", "test-torch", "bench"])
def test_empty_means_not_given(target: str, repo: Path) -> None:
    plain = recipe(repo, target)
    assert recipe(repo, target, *(f"{name}=" for name in EMPTY)) == plain
    assert recipe(repo, target, **dict.fromkeys(EMPTY, "")) == plain
    assert recipe(repo, target, **dict.fromkeys(EMPTY, " ")) == plain


def test_what_is_given_counts(repo: Path, tmp_path: Path) -> None:
    given = ["CONFIG=my.env", "NAME=x", "SEEDS=7 8", "RUNS_DIR=/else where"]
    seeds = recipe(repo, "seeds", *given)
    assert '"7 8" "x" "my.env" > "/else where/x.sweep"' in seeds
    assert 'sweep "/else where/x.sweep" --folder "/else where"' in seeds
    assert recipe(repo, "demo", **dict(pair.split("=") for pair in given)).count('"/else where/x') == 3
    # A file of settings may say where runs are written.
    (tmp_path / "c.env").write_text("RUNS_DIR=/there\n")
    assert '-m tools plot "/there/' in recipe(repo, "demo", f"CONFIG={tmp_path / 'c.env'}")
    assert '-m tools plot "/here/' in recipe(repo, "demo", f"CONFIG={tmp_path / 'c.env'}", RUNS_DIR="/here")


def test_a_demo_without_settings_does_not_wait_for_them(repo: Path, tmp_path: Path) -> None:
    """`CONFIG= make demo` once read its settings from the console, for ever; here echo stands for Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/echo")
    (tmp_path / ".ready").touch()
    environment = {**os.environ, "CONFIG": "", "NAME": "", "RUNS_DIR": ""}
    command = ["make", "demo", f"VENV={tmp_path}"]
    made = subprocess.run(command, cwd=repo, env=environment, input=b"", capture_output=True, timeout=60)
    assert made.returncode == 0 and b"expect" in made.stdout and b"plot runs/demo-" in made.stdout
    assert b"\nnext: " in made.stdout


def test_a_torch_that_fails_is_named_and_the_others_are_traced(repo: Path, tmp_path: Path) -> None:
    """`make test-torch`, with programs in the place of each version's Python: they fit, and one fails."""
    for version, status in (("2.1.0", 1), ("2.2.0", 0)):
        python = tmp_path / version / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "{version} $*"\nexit {status}\n')
        python.chmod(0o755)
    settings = [f"TORCH_ENVIRONMENTS={tmp_path}", "TORCH_VERSIONS=2.1.0 2.2.0"]
    ended = subprocess.run(["make", "test-torch", *settings], cwd=repo, capture_output=True, text=True)
    assert ended.returncode != 0
    traced = re.findall(r"^(\S+) -m pytest .+test_gpu_step\.py$", ended.stdout, re.MULTILINE)
    assert traced == ["2.1.0", "2.2.0"]
    assert re.findall(r"^failed on torch (.+)$", ended.stdout, re.MULTILINE) == ["2.1.0"]


def test_several_seeds_are_a_sweep_of_one_row(repo: Path, tmp_path: Path) -> None:
    """`make seeds`, with a program in the place of Python: it ends as the sweep ends, in this folder."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\n[ "$2" = tools ] || exit 0\necho "$*"\nexit $STATUS\n')
    python.chmod(0o755)
    (tmp_path / ".ready").touch()
    for status in (0, 1):
        environ = {**os.environ, "RUNS_DIR": f"{tmp_path}/my runs", "STATUS": str(status)}
        command = ["make", "seeds", f"VENV={tmp_path}", "SEEDS=1 2", "NAME=a", "CONFIG=my settings.env"]
        ended = subprocess.run(command, cwd=repo, env=environ, capture_output=True, text=True)
        assert (ended.returncode == 0) == (status == 0) == ("pack them: " in ended.stdout), ended.stderr
        assert f"-m tools sweep {tmp_path}/my runs/a.sweep --folder {tmp_path}/my runs" in ended.stdout
    lines = read_lines(tmp_path / "my runs/a.sweep")
    assert lines == {"seeds": ["1", "2"], "a": ["CONFIG=my settings.env"]}


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_says_that_a_python_is_too_old_before_it_makes_anything(repo: Path, tmp_path: Path) -> None:
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(repo / name, tmp_path)
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    command = ["make", "demo", f"PYTHON={old}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and f"{old} is not Python 3.10 or later" in done.stdout
    assert not (tmp_path / ".venv").exists()
