"""Our examples are patches: a fork that changes the same lines is no fault of its own."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest


def is_fork(repo: Path) -> bool:
    """Whether train_gpt.py is not the project's own: neither the release's nor one in the making."""
    release = json.loads((repo / "benchmarks/results/release.json").read_text("utf-8"))
    script = hashlib.sha256((repo / "train_gpt.py").read_bytes()).hexdigest()
    in_the_making = "not released yet" in (repo / "CHANGELOG.md").read_text("utf-8").split("\n## ")[1]
    return script != release["script"] and not in_the_making


def apply(patch: str, tree: Path, repo: Path) -> None:
    """Apply a patch of a page to a tree. One that does not apply fails the test, and skips it in a fork."""
    done = subprocess.run(["git", "apply", "-"], cwd=tree, input=patch, text=True, capture_output=True)
    if done.returncode != 0 and is_fork(repo):
        pytest.skip(f"this script has other lines than the example: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
