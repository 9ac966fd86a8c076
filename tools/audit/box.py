"""The sandbox of a script under audit: a process behind walls that forks itself for each run of `main`.

The auditor sends it settings and a data set, and gets an exit status. Everything else it reads from the files
of the run. The box looks inside the script in only one place: a ledger that is summed leaves its nats in a
file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import resource
import select
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.shards import BOS_ID
from tools.audit import clock, unexecuted, walls
from tools.audit.broken import Broken, NotChecked

NAMES = ("Config", "Ledger", "main")  # what a script must have
SECONDS_MAX = 900  # for a run: one that takes longer is ended
SECONDS_TO_END = 10
FILE_BYTES_MAX = 1 << 33  # of one file that a run writes
ENDED, HANGS = 98, 97  # exit statuses: the box is gone; the run was ended


@dataclass(frozen=True)
class Run:
    """The files of a run that has ended."""

    folder: Path
    status: int
    tokens: np.ndarray  # of the validation text, as the auditor wrote it

    def path(self, name: str) -> Path:
        """A file of the run. `Broken` if it left none."""
        path = self.folder / name
        if self.status or not path.is_file() or path.is_symlink():
            raise Broken("ends", f"status {self.status}, and no {name}: {self.last_words()}")
        return path

    def last_words(self) -> str:
        """Why it ended, or the last line that it printed."""
        lines = self.beside("out0").read_text(errors="replace").split("\n")
        errors = [line for line in lines if "rror" in line]
        return [*filter(None, lines), "it printed nothing"][-1][-300:] if not errors else errors[-1][-300:]

    def beside(self, suffix: str) -> Path:
        """A file that the box, not the script, has written about this run."""
        return self.folder.with_name(f"{self.folder.name}.{suffix}")

    @functools.cached_property
    def log(self) -> str:
        """Its log."""
        return self.path("log.txt").read_text(encoding="utf-8")

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """Its summary.json."""
        loaded: dict[str, Any] = json.loads(self.path("summary.json").read_text())
        return loaded

    @functools.cached_property
    def artifact(self) -> str:
        """The SHA-256 of its artifact."""
        return hashlib.sha256(self.path("model.bin").read_bytes()).hexdigest()

    @property
    def labels(self) -> list[str]:
        """Its scores, in their order."""
        return list(self.summary["losses"])

    @functools.cached_property
    def stamps(self) -> list[tuple[int, float, str]]:
        """(reads, seconds, line) of its log by the auditor's clock."""
        return [tuple(json.loads(line)) for line in self.beside("stamps").read_text().splitlines()]

    @functools.cached_property
    def ledgers(self) -> list[np.ndarray]:
        """The nats of every target, of each ledger that was summed, in that order."""
        return [np.load(path) for path in sorted(self.folder.parent.glob(f"{self.folder.name}.ledger*.npy"))]

    def documents(self, label: str) -> np.ndarray:
        """The nats of each document of a score, which the script has written."""
        return np.fromfile(self.path(f"nats_{label}.bin"))

    @functools.cached_property
    def _matched(self) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """The ledger of each label, and those left over. A ledger is a label's if its documents' sums are."""
        left = list(self.ledgers)
        found = {}
        for label in self.labels:
            said = self.documents(label)
            for number, nats in enumerate(left):
                begins = np.flatnonzero(self.tokens[: len(nats)] == BOS_ID)
                sums = np.add.reduceat(nats, begins)
                if len(sums) == len(said) and np.allclose(sums, said, rtol=1e-12, atol=1e-12):
                    found[label] = left.pop(number)
                    break
            else:
                raise Broken("ledgers", f"{label}: nats_{label}.bin matches no ledger")
        return found, left

    @property
    def nats(self) -> dict[str, np.ndarray]:
        """The nats of every target, by label."""
        return self._matched[0]

    @property
    def other_ledgers(self) -> list[np.ndarray]:
        """Ledgers that were summed besides those of the labels."""
        return self._matched[1]


class Box:
    """Asks the process of a script for runs. Only settings go in, only exit statuses come out."""

    def __init__(self, script: Path, folder: Path, readable: list[Path], threads: int = 1) -> None:
        self.script, self.folder = script, folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.count = 0
        self.largest = {"tokens": 0, "pieces": 0, "ranks": 1, "steps": 0}  # of all runs
        self.cpu_seconds = 0.0  # that all runs have taken
        self.tried: list[str] = []
        self.ran: bytes = b""
        home = folder / "home"
        home.mkdir()
        prefix, self.walls = walls.around(folder, [script, *readable])
        with open(folder / "box.out", "wb") as printed:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-B", "-m", "tools.audit.box", str(script), str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, text=True, cwd=home,
                start_new_session=True, env=walls.environment(home, threads),
            )
        if self._answer(SECONDS_MAX) != 0:
            self.close()
            raise NotChecked(f"{script.name} does not load: {self.last_words()}")

    def last_words(self) -> str:
        """The last line that the box itself printed."""
        return (self.folder / "box.out").read_text(errors="replace").strip().rpartition("\n")[2]

    def settings(self, given: Mapping[str, str]) -> dict[str, str]:
        """All settings of the script, over its defaults. `NotChecked` if it refuses them."""
        name = self._next_name()
        status = self._ask({"name": name, "environment": dict(given), "what": "settings"})
        if status:
            reason = Run(self.folder / name, status, np.zeros(0)).last_words()
            raise NotChecked(f"its Config refuses these settings: {reason}")
        settings: dict[str, str] = json.loads((self.folder / f"{name}.settings").read_text())
        return settings

    def run(
        self, settings: Mapping[str, str], data: Path, tokens: np.ndarray, ranks: int = 1,
        by_clock: clock.Clock | None = None,
    ) -> Run:
        """A run of `main` on a dataset by that many ranks."""
        name = self._next_name()
        environment = {"TOKENIZER_PATH": str(data / "tokenizer.model"), **settings}
        # All settings are given: no file, and none that a shipped script has in its wrapper.
        environment |= {"CONFIG": "none", "RUN_ID": name}
        environment |= {"DATA_PATH": str(data), "RUNS_DIR": str(self.folder)}
        order = {"name": name, "environment": environment, "what": "run", "ranks": ranks}
        if by_clock is not None:
            order["clock"] = clock.as_text(by_clock)
        status = self._ask(order)
        run = Run(self.folder / name, status, tokens)
        sizes = {"tokens": len(tokens), "pieces": int(settings.get("VOCAB_SIZE", 0)), "ranks": ranks,
                 "steps": 0 if settings.get("EVAL_ONLY") else int(settings.get("ITERATIONS", 0))}
        self.largest = {name: max(size, self.largest[name]) for name, size in sizes.items()}
        for rank in range(ranks):
            self._note(run, rank)
        return run

    def check_it_stayed_inside(self) -> None:
        """`Broken` if a run tried to leave the box."""
        if self.tried:
            raise Broken("walls", self.escapes())

    def escapes(self) -> str:
        """What the runs tried to do outside, the first three; empty for nothing."""
        return f"it tried to leave its box: {', '.join(self.tried[:3])}" if self.tried else ""

    def _note(self, run: Run, rank: int) -> None:
        """Add what a rank has executed, and what it tried to do outside."""
        marks, tried = run.beside(f"ran{rank}"), run.beside(f"tried{rank}")
        if marks.is_file():
            ran = marks.read_bytes()
            self.ran = bytes(a | b for a, b in zip(self.ran, ran, strict=True)) if self.ran else ran
        if tried.is_file():
            self.tried += [line for line in tried.read_text().splitlines() if line not in self.tried]

    def _next_name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def _ask(self, order: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except OSError:
            return ENDED
        return self._answer(SECONDS_MAX)

    def _answer(self, seconds: float) -> int:
        """The next exit status."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.process.kill()
            return HANGS
        status, _, seconds_used = self.process.stdout.readline().partition(" ")
        if not status.isdigit():
            return ENDED
        self.cpu_seconds = float(seconds_used)
        return int(status)

    def close(self) -> None:
        """End the script's process, and with it all in its namespace."""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        # At the end of its orders it ends by itself, and its CPU time is counted with ours.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=SECONDS_TO_END)
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def opened(script: Path, folder: Path, readable: list[Path], threads: int = 1) -> Iterator[Box]:
    """A box for the time of an audit."""
    box = Box(script, folder, readable, threads)
    try:
        yield box
    finally:
        box.close()


# --- inside the box: the process of the script ---

# Of the environment. The last one is read when a process first computes: in each run, not in the box.
KEPT = ("HOME", "TMPDIR", "GLOO_SOCKET_IFNAME", "ATEN_CPU_CAPABILITY")
watched: list[Path] = []  # where attempts to leave the box are noted; none: not now
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir": 0, "os.remove": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1, "os.chmod": 0,
           "os.truncate": 0, "shutil.copyfile": 1}


def serve(path: Path, folder: Path) -> None:
    """Load the script, then do what each line of standard input asks for."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    clock.install()
    sys.addaudithook(functools.partial(notice, folder))
    script: Any = unexecuted.Execution(path).load()
    missing = [name for name in NAMES if not hasattr(script, name)]
    if missing:
        raise AttributeError(f"it has no {', '.join(missing)}, which an audit needs")
    warm_up(script, path)
    print(0, 0, file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        children = []
        for rank in range(order.get("ranks", 1)):
            child = os.fork()
            if child == 0:
                become_run(script, folder, order, rank)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255 for child in children]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(max(statuses), used.ru_utime + used.ru_stime, file=answers, flush=True)


def warm_up(script: Any, path: Path) -> None:
    """Do once what each run would do: load what it may import, and wrap the script."""
    import scipy.linalg  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed

    # Nothing here must outlive a crash, and disks are slow.
    os.fsync = lambda _: None  # type: ignore[assignment]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if hasattr(script, "shipped_code"):
        script.shipped_code = functools.cache(script.shipped_code)
        script.shipped_code(path.read_bytes())


def become_run(script: Any, folder: Path, order: dict[str, Any], rank: int) -> None:
    """Do a run in this copy of the process, and end it."""
    status = 99
    beside = str(folder / order["name"])
    ranks = order.get("ranks", 1)
    environment = order["environment"]
    marks = vars(script).get(unexecuted.MARKS, bytearray())
    try:
        out = os.open(f"{beside}.out{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        kept = {key: os.environ[key] for key in KEPT if key in os.environ}
        if ranks > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            meet_at_a_file(f"file://{beside}.store", rank, ranks)
        os.environ.clear()
        os.environ.update(kept | environment)
        sys.argv = [script.__file__]
        if order["what"] == "settings":
            settings = script.Config.from_env(os.environ).as_env()
            Path(f"{beside}.settings").write_text(json.dumps(settings))
            status = 0
        else:
            if rank == 0:
                keep_ledgers(script, beside)
            if "clock" in order:
                sys.stdout = clock.Stamped(sys.stdout, Path(f"{beside}.stamps"))
                clock.start(order["clock"])
            watched.append(Path(f"{beside}.tried{rank}"))
            status = script.main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        watched.clear()
        with contextlib.suppress(OSError):
            Path(f"{beside}.ran{rank}").write_bytes(bytes(marks))
        os._exit(status)


def meet_at_a_file(store: str, rank: int, ranks: int) -> None:
    """Let `init_process_group` meet the other ranks at a file: there is no network."""
    import torch.distributed as dist

    join = dist.init_process_group
    dist.init_process_group = lambda *_, **__: join("gloo", init_method=store, rank=rank, world_size=ranks)


def keep_ledgers(script: Any, beside: str) -> None:
    """The one look inside: a ledger that is summed leaves its nats. What would be compiled stays eager."""
    import torch

    def stays(function: Any = None, **_: Any) -> Any:
        return stays if function is None else function

    torch.compile = stays  # type: ignore[assignment]
    score = script.Ledger.score
    numbers = iter(range(1000))

    def scored(ledger: Any, *args: Any, **named: Any) -> Any:
        result = score(ledger, *args, **named)
        np.save(f"{beside}.ledger{next(numbers):03}.npy", np.array(ledger.nats))
        return result

    script.Ledger.score = scored


def notice(folder: Path, event: str, args: tuple[Any, ...]) -> None:
    """An audit hook of Python: it notes what a run tries to change outside the box. The walls stop it."""
    if not watched:
        return
    if event == "open":
        name, _, flags = args
        changes = isinstance(flags, int) and flags & WRITING
    elif event in CHANGES:
        name, changes = args[CHANGES[event]], True
    elif event in ("socket.connect", "socket.getaddrinfo"):
        name, changes = str(args[-1] if event == "socket.connect" else args[0]), True
    else:
        return
    if not changes or not isinstance(name, str | bytes | os.PathLike):
        return
    path = os.path.realpath(os.fsdecode(name))
    if path.startswith(("/dev/", "/proc/self/")) and not path.startswith("/dev/shm"):
        return
    if Path(path).is_relative_to(folder) and event != "socket.connect":
        return
    noted = watched.pop()
    with open(noted, "a", encoding="utf-8") as file:
        file.write(f"{event} {os.fsdecode(name)!r}\n")
    watched.append(noted)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
