"""What `make` does with variables that are set but empty, as Compose and CI files hand them on."""

import os
import re
import subprocess
from pathlib import Path

import pytest

EMPTY = ("CONFIG", "NAME", "SEEDS", "RUNS_DIR", "PYTHON", "TEST_WORKERS", "TORCH_VERSIONS",
         "TORCH_ENVIRONMENTS")  # fmt: skip


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
