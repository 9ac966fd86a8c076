"""Shared fixtures. SHARED_DATA names the folder with real FineWeb text; its default stands here alone."""

import atexit
import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import dataset, finished, lab, short, start_server  # noqa: F401
from tests.support.waiting import TIME_SCALE, no_disk_is_waited_for

REPO = Path(__file__).resolve().parents[1]
HAS_GPU = False
if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg"):  # else torch, slow to load, is not asked
    import torch

    HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # Triton decides at import whether its interpreter runs the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """One thread per process: the suite runs in parallel on small machines."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process only hands tests to others, and needs no torch
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start, too
    gc.disable()
    import torch

    if hasattr(config, "workerinput"):  # of the whole suite: some test uses it, and so does the server
        import torch._dynamo
    # Runs after all other exit handlers. Only Triton still writes then: a hundred lines about what its
    # bindings leak, below the results.
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))
    torch.set_num_threads(1)
    start_server()
    no_disk_is_waited_for()


def pytest_collection_finish() -> None:
    """Modules stay: no collection looks through them for what could be freed, then or later."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scale the limits that end a test which hangs; skip what needs a GPU where there is none, and say so."""
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = float(mark.args[0] if mark else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * TIME_SCALE), append=False)
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    """Give every signal back the handler that it had before the test, its fixtures included.

    Some tests run the script's `main` in this process. Its handlers would stay, and Ctrl-C would then end the
    whole session without a report.
    """
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The repository root."""
    return REPO


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with documents, tokenizers/ and datasets/ of real FineWeb text; skips where absent."""
    folder = Path(os.environ.get("SHARED_DATA") or REPO.parent / "shared") / "data"
    if not folder.is_dir():
        pytest.skip(f"no real FineWeb text at {folder}: set SHARED_DATA to the folder that holds data/")
    return folder
