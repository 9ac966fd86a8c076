"""The patch of docs/technique.md, applied to a copy of the repository, passes what a change must pass."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.script import test_style

PARTS = (
    "benchmarks", "configs", "data", "docs", "tests", "tools", "train_gpt.py", "pyproject.toml", "README.md",
    "Makefile",
)  # fmt: skip
MADE_BY_RUNS = shutil.ignore_patterns("__pycache__", "datasets", "tokenizers", "downloads", "results")


@pytest.fixture(scope="module")
def patched(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the technique in it."""
    if "z_loss" in (repo / "train_gpt.py").read_text("utf-8"):
        pytest.skip("it is in the script already")
    tree = tmp_path_factory.mktemp("technique")
    for name in PARTS:
        if (repo / name).is_dir():
            shutil.copytree(repo / name, tree / name, ignore=MADE_BY_RUNS)
        else:
            shutil.copy(repo / name, tree / name)
    page = (repo / "docs/technique.md").read_text("utf-8")
    patch = page.split("<!-- technique:begin -->\n```diff\n")[1].split("```\n<!-- technique:end -->")[0]
    subprocess.run(["git", "apply", "-"], cwd=tree, input=patch, text=True, check=True)
    return tree


def passes(tree: Path, *command: str) -> str:
    """Run a Python module in the copy; it must succeed."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_it_is_in_style(patched: Path) -> None:
    passes(patched, "ruff", "check", ".")


def test_it_is_as_plain_as_the_script(patched: Path) -> None:
    source = (patched / "train_gpt.py").read_text("utf-8")
    tree = ast.parse(source)
    test_style.test_the_script_stays_below_its_ceiling(source)
    test_style.test_no_line_is_too_long(source)
    test_style.test_no_function_is_too_long_or_nested_too_deep(tree)
    test_style.test_every_setting_is_used(tree, source)
    for finds in test_style.FINDERS:
        assert finds(source) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_its_types_and_all_tests_of_the_script_pass(patched: Path) -> None:
    passes(patched, "mypy", "train_gpt.py")
    quick = ["pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "-n", "2"]
    assert " passed" in passes(patched, *quick, "tests/script")
