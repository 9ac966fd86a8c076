"""The script can be loaded anywhere: as a module that nobody registers, plain and wrapped, by old Pythons."""

import ast
import bz2
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import Lab
from tests.support.shipped import shipped_code

# What public reviews of submissions do: load the file, and do not put the module into sys.modules.
UNREGISTERED = """
import importlib.util, os, sys, threading
for name in ("sentencepiece", "train_gpt"):  # which the server of the tests may have loaded
    sys.modules.pop(name, None)
before = dict(os.environ)
# Variables of other programs are ignored; a misspelled setting is named.
MISSPELLED = "warning: SEEDS=1: not a setting; did you mean SEED?"
settings = dict(pair.split("=") for pair in sys.argv[3:])
for path in sys.argv[1:3]:
    spec = importlib.util.spec_from_file_location("submission", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "submission" not in sys.modules and "train_gpt" not in sys.modules
    # It starts nothing, and touches nothing.
    assert dict(os.environ) == before and threading.active_count() == 1
    assert not module.dist.is_initialized() and not module.torch.cuda.is_initialized()
    assert "sentencepiece" not in sys.modules
    assert module.notes_on_environment({"SEEDS": "1"}) == [MISSPELLED]
    model = module.build_model(module.Config.from_env(settings))
    ids = module.torch.ones(2, 16, dtype=module.torch.int64)
    loss = model.loss(ids, ids)
    loss.backward()
    print(loss.item(), module.MAGIC, hasattr(module, "main"))
"""
SMALL = """NUM_LAYERS=2 MODEL_DIM=32 NUM_HEADS=2 NUM_KV_HEADS=1 XSA_LAST_N=1 VOCAB_SIZE=64 TRAIN_SEQ_LEN=16
NUM_LOOPS=0 PARALLEL_START_LAYER=-1 ROPE_DIMS=0 EVAL_SEQ_LEN=0 EVAL_STRIDE=0 TTT_ENABLED=0""".split()


@pytest.fixture(scope="module")
def wrapped(repo: Path, dataset: Path) -> bytes:
    """Made anew only if no other process of the session has done it; `dataset` says where they keep it."""
    return shipped_code((repo / "train_gpt.py").read_bytes())


def test_it_loads_as_a_module_that_nobody_registers(repo: Path, wrapped: bytes, lab: Lab) -> None:
    """Plain and wrapped alike, far from the repository."""
    plain_path = lab.folder / "plain.py"
    plain_path.write_bytes((repo / "train_gpt.py").read_bytes())
    wrapped_path = lab.folder / "wrapped.py"
    wrapped_path.write_bytes(wrapped)
    review = lab.folder / "review.py"
    review.write_text(UNREGISTERED)
    # As on a GPU, Triton reads the source of each kernel.
    done = lab.succeed(str(plain_path), str(wrapped_path), *SMALL, script=review, TRITON_INTERPRET=0)
    assert done.err == ""
    plain, again = done.out.splitlines()
    assert plain.endswith("True") and plain == again


def test_python_3_10_reads_it(repo: Path, wrapped: bytes) -> None:
    """The wrapped form too, and what it unpacks: the source that a Python of today wrote anew."""
    ast.parse((repo / "train_gpt.py").read_text("utf-8"), feature_version=(3, 10))
    shell = ast.parse(wrapped, feature_version=(3, 10))
    texts = [node.value for node in ast.walk(shell) if isinstance(node, ast.Constant)]
    packed = max((text for text in texts if isinstance(text, str)), key=len)
    unpacked = bz2.decompress(packed.encode("latin-1")).decode()
    ast.parse(unpacked, feature_version=(3, 10))
    assert "def main()" in unpacked


def test_without_packages_it_names_what_is_missing(repo: Path) -> None:
    command = [sys.executable, "-I", "-S", str(repo / "train_gpt.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "has no numpy" in done.stderr and "requirements.txt" in done.stderr
