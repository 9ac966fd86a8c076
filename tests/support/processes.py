"""train_gpt.py as real processes on a tiny dataset: forked, for speed, from a server with torch loaded."""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import fcntl
import gc
import hashlib
import inspect
import json
import marshal
import multiprocessing
import os
import pickle
import random
import select
import shutil
import socket
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support import tiny
from tests.support.waiting import DEADLINE_SECONDS, no_disk_is_waited_for

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "train_gpt.py"
# This module too, or each process would import it and pytest: a fifth of what a short run takes.
PRELOAD = "torch._dynamo torch._refs torch.distributed numpy.ma sentencepiece tests.support.processes"
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(PRELOAD.split())  # whoever needs it first starts it, unless `start_server` did
ONE_THREAD = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
OF_THE_PROCESS = ("PATH", "OMP_NUM_THREADS", "GOMP_SPINCOUNT")  # of the process, not of a run
KEPT: Path | None = None
# Six steps of the tiny model, every feature of the default run, all evaluations. A warm-up changes nothing
# and doubles the time: tests that are about one ask for it.
TINY_RUN: dict[str, object] = {
    **tiny.MODEL, "MODEL_DIM": 16, "MLP_MULT": 2, "ROPE_DIMS": 8,
    "CONFIG": REPO / "configs/cpu_demo.env", "DEVICE": "cpu", "COMPUTE_DTYPE": "float32",
    "TRAIN_BATCH_TOKENS": 128, "ITERATIONS": 6, "WARMUP_STEPS": 0, "MAX_WALLCLOCK_SECONDS": 0,
    "MAX_EVAL_SECONDS": 0, "ENABLE_LOOPING_AT": 0.5, "EMA_DECAY": 0.5, "MUON_WD": 0.1, "EMBED_WD": 0.1,
    "ADAM_WD": 0.1, "VAL_TOKENS_LIMIT": 1000, "VAL_BATCH_SIZE": 16_384, "EVAL_STRIDE": 16, "TTT_ENABLED": 1,
    "TTT_MODE": "lora", "TTT_CHUNK_SIZE": 32, "TTT_BATCH_SIZE": 4, "GPTQ_CALIBRATION_BATCHES": 4,
    "ARTIFACT_BYTES_MAX": 1_000_000, "RUN_ID": "run",
}
# For tests to which it is all the same how well weights are coded, and those that ask for one score alone: a
# third of the time of a run.
ROUNDED = {"GPTQ": 0, "TRELLIS": 0, "RATE_CONTROL": 0}
SHORT_END = {**ROUNDED, "EVAL_STRIDE": 0, "TTT_ENABLED": 0}


def start_server() -> None:
    """Start the server of processes as a copy of this one, which has just loaded torch, instead of anew.

    It loads the rest when the first process is asked for. Until then it costs nothing.
    """
    resource_tracker.ensure_running()  # or it, too, would be started in this way
    with mock.patch("multiprocessing.util.spawnv_passfds", become_server), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the threads of xdist are not copied
        forkserver.ensure_running()


def become_server(path: str, arguments: list[str], descriptors: list[int]) -> int:
    """In a copy of this process: do what a new Python would be started for. Returns its number.

    descriptors: of the server's socket, then of a pipe that closes when this process ends.
    """
    server = os.fork()
    if server:
        return server
    try:
        faulthandler.disable()  # it has a descriptor of its own
        for number in map(int, os.listdir("/dev/fd")):
            if number > 2 and number not in descriptors:
                with contextlib.suppress(OSError):  # that of the listing itself
                    os.close(number)
        # What pytest has put in place of Python's own: it would keep errors of threads to itself.
        threading.excepthook = threading.__excepthook__
        sys.unraisablehook = sys.__unraisablehook__
        gc.freeze()  # or each process would look through all of torch, and copy it
        gc.enable()
        listener, alive = descriptors[:2]
        ready, _, _ = select.select([listener, alive], [], [])
        if listener in ready:
            exec(arguments[-1], {})
    finally:
        os._exit(0)


class Hung(AssertionError):
    """A process had not ended when it should have."""


@dataclass(frozen=True)
class Ended:
    """How a process ended; status as a shell reports it, negative for a signal."""

    status: int
    out: str
    err: str
    runs_dir: Path

    @property
    def directory(self) -> Path:
        """The run directory, where there is exactly one."""
        (only,) = self.runs_dir.iterdir()
        return only

    @property
    def summary(self) -> dict[str, Any]:
        """What the run recorded of itself."""
        return json.loads((self.directory / "summary.json").read_text("utf-8"))

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [
            json.loads(line) for line in (self.directory / "metrics.jsonl").read_text("utf-8").splitlines()
        ]


def train_losses(ended: Ended) -> dict[int, float]:
    """The loss of each step."""
    return {event["step"]: event["train_loss"] for event in ended.events if event["event"] == "train"}


def results(ended: Ended) -> tuple[object, ...]:
    """What two equal runs agree on to the last bit."""
    trained = [(e["step"], e["train_loss"], e["grad_norm"]) for e in ended.events if e["event"] == "train"]
    summary = ended.summary
    return trained, summary["stream_hash"], summary["artifact"]["sha256"], summary["losses"]


class Started:
    """One process that runs the script."""

    def __init__(
        self, environ: Mapping[str, str], arguments: tuple[str, ...], cwd: Path, fault: str, script: Path
    ) -> None:
        self.runs_dir = Path(environ.get("RUNS_DIR") or cwd / "runs")
        self.console = cwd / f"console.{random.randrange(10**12)}"
        Path(f"{self.console}.err").touch()
        self.process = SERVER.Process(
            target=run_script,
            args=(dict(environ), [str(script), *arguments], str(cwd), str(self.console), fault, KEPT),
        )
        with environment(ONE_THREAD):
            self.process.start()

    @property
    def out(self) -> str:
        """What it has printed so far."""
        path = Path(f"{self.console}.out")
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def send(self, number: int) -> None:
        """Send a signal; one that has just ended gets none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)

    def wait(self, seconds: float = DEADLINE_SECONDS) -> Ended:
        """How it ended; fails where it has not after `seconds`."""
        self.process.join(seconds)
        hung = self.process.is_alive()
        if hung:
            self.process.kill()
            self.process.join()
        err = Path(f"{self.console}.err").read_text("utf-8", "replace")
        if hung:
            raise Hung(f"still running after {seconds} s\n{self.out}\n{err}")
        return Ended(self.process.exitcode or 0, self.out, err, self.runs_dir)


def run_script(
    environ: dict[str, str], arguments: list[str], cwd: str, console: str, fault: str, folder: Path | None
) -> None:
    """In the new process: the script as __main__; `fault`, when given, is Python that runs before it.

    folder: see `keep_what_scripts_give`.
    """
    for number, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(console + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = arguments
    no_disk_is_waited_for()
    if fault:
        exec(compile(fault, "fault", "exec"), {"os": os, "sys": sys})
    run_as_main(arguments[0], folder)


def keep_what_scripts_give(folder: Path) -> None:
    """Let all processes that start from now on keep here what they make of a source: see `kept`."""
    global KEPT
    folder.mkdir(exist_ok=True)
    KEPT = folder


def kept(folder: Path | None, name: str, source: bytes, make: Callable[[], bytes]) -> bytes:
    """What `make` gives for this source, made by the first process and read by all others.

    Every run compiles the script and counts the bytes of its wrapped form: half of what a tiny run takes.
    """
    if folder is None:
        return make()
    path = folder / f"{name}-{hashlib.sha256(source).hexdigest()}"
    if not path.exists():
        mine = folder / f"{os.getpid()}-{path.name}"
        mine.write_bytes(make())
        mine.rename(path)
    return path.read_bytes()


def remembered(function: Callable[..., Any], script: bytes, folder: Path | None) -> Callable[..., Any]:
    """A slow pure function of a script: equal runs, and the ranks of one, code the same weights."""

    def call(*given: Any) -> Any:
        key = pickle.dumps((script, given))
        return pickle.loads(kept(folder, function.__name__, key, lambda: pickle.dumps(function(*given))))

    return call


def compiled(path: str, source: bytes) -> bytes:
    """The script's code, to be unmarshalled. Before it ends with `main`, slow pure functions get a memory."""
    tree = ast.parse(source, path)
    for name in ("shipped_code", "encode", "decode"):
        if f"\ndef {name}(".encode() in source:  # not in a shipped script, which unpacks itself
            tree.body.insert(-1, ast.parse(f"{name} = keep({name})").body[0])
    return marshal.dumps(compile(ast.fix_missing_locations(tree), path, "exec"))


def run_as_main(path: str, folder: Path | None) -> None:
    """What runpy.run_path does, with code that is compiled once and slow functions that are `remembered`."""
    source = Path(path).read_bytes()
    code = kept(folder, "code", path.encode() + source, lambda: compiled(path, source))

    main = types.ModuleType("__main__")
    main.__file__ = path
    vars(main)["keep"] = lambda function: remembered(function, source, folder)
    # torch asks inspect whose file this is, three times, and it would look through all modules.
    inspect.modulesbyfile[os.path.abspath(path)] = "__main__"  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    exec(marshal.loads(code), vars(main))


def environment(values: Mapping[str, str]) -> Any:
    """The environment of this process for a moment: the server reads its threads from it when it starts."""
    return mock.patch.dict(os.environ, values)


class Lab:
    """A folder, a dataset and the settings of a tiny run; each call is one process."""

    def __init__(self, folder: Path, dataset: Path) -> None:
        self.folder = folder
        self.dataset = dataset

    def settings(self, **changes: object) -> dict[str, str]:
        """The environment of a tiny run; None removes a variable."""
        data = {"DATA_PATH": str(self.dataset), "TOKENIZER_PATH": str(self.dataset / "tokenizer.model"),
                "RUNS_DIR": str(self.folder / "runs"), "PATH": os.environ.get("PATH", "")}
        wanted = {**TINY_RUN, **ONE_THREAD, **data, **changes}
        return {name: str(value) for name, value in wanted.items() if value is not None}

    def nothing_but(self, **settings: object) -> dict[str, object]:
        """Changes of `settings` that leave out all that describes a run, but for these."""
        return {**{name: None for name in self.settings() if name not in OF_THE_PROCESS}, **settings}

    def start(self, *arguments: str, fault: str = "", script: Path = SCRIPT, **changes: object) -> Started:
        """Start a process with changed settings."""
        return Started(self.settings(**changes), arguments, self.folder, fault, script)

    def run(self, *arguments: str, **changes: Any) -> Ended:
        """Run a process to its end."""
        return self.start(*arguments, **changes).wait()

    def succeed(self, *arguments: str, **changes: Any) -> Ended:
        """Run a process that must succeed."""
        ended = self.run(*arguments, **changes)
        assert ended.status == 0, ended.out + ended.err
        return ended

    def ranks(
        self,
        count: int,
        each: Mapping[int, Mapping[str, object]] | None = None,
        fault: str = "",
        arguments: tuple[str, ...] = (),
        **changes: Any,
    ) -> list[Started]:
        """Start `count` ranks as torchrun does; `each` and `fault` may make one of them different."""
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        group = {**changes, **address, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        places = [{"RANK": rank, "LOCAL_RANK": rank, **(each or {}).get(rank, {})} for rank in range(count)]
        return [self.start(*arguments, **{"fault": fault, **group, **place}) for place in places]

    def elsewhere(self, name: str) -> Lab:
        """The same dataset with another folder."""
        folder = self.folder / name
        folder.mkdir()
        return Lab(folder, self.dataset)

    def copy_dataset(self, name: str = "data") -> Lab:
        """The same folder with a dataset of its own, to damage."""
        return Lab(self.folder, Path(shutil.copytree(self.dataset, self.folder / name)))


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def made_once(name: str, factory: pytest.TempPathFactory, make: Any) -> Path:
    """A folder filled by `make`, once for all test files and all parallel workers of a session."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, ready = base / f"shared-{name}", base / f"shared-{name}.ready"
    with open(base / f"shared-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            folder.mkdir()
            make(folder)
            ready.touch()
    return folder


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny dataset; to be read only."""
    keep_what_scripts_give(made_once("kept", tmp_path_factory, lambda folder: None))
    return made_once("dataset", tmp_path_factory, tiny.make_dataset)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Ended:
    """A finished run with the tiny settings; to be read only."""
    # SEEDS is no setting: the log says so.
    return finished_once("finished", tmp_path_factory, dataset, WARMUP_STEPS=1, SEEDS="1 2")


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Ended:
    """A finished run of the same six steps with a short end; to be read only."""
    return finished_once("short", tmp_path_factory, dataset, **SHORT_END)


def finished_once(name: str, factory: pytest.TempPathFactory, dataset: Path, **changes: object) -> Ended:
    """A run that must succeed, made once for all test files and all parallel workers."""

    def make(folder: Path) -> None:
        ended = Lab(folder, dataset).succeed(**changes)
        (folder / "out").write_text(ended.out, "utf-8")
        (folder / "err").write_text(ended.err, "utf-8")

    folder = made_once(name, factory, make)
    return Ended(0, (folder / "out").read_text("utf-8"), (folder / "err").read_text("utf-8"), folder / "runs")


@pytest.fixture
def lab(tmp_path: Path, dataset: Path) -> Lab:
    """A folder of this test's own."""
    return Lab(tmp_path, dataset)
