"""Folders audited in a process of their own, within limits of time and memory.

What reads the files is bounded by itself (`tools.runs`); this is what holds where something was overlooked,
so that no folder can harm the report on another.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import re
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, TracebackType

from tools.runs.errors import RecordError
from tools.runs.folder import Folder
from tools.submit.check.checks import UNFINISHED, UNFINISHED_REMEDY, audit
from tools.submit.check.findings import Finding, fail

CPU_SECONDS_MAX = 5  # for one folder, counted in whole seconds; the largest public one takes 0.3 s
WALL_SECONDS_MAX = 60.0
MEMORY_BYTES_MAX = 400 * 2**20  # beyond what the process has before it reads its first folder
STATUS = Path("/proc/self/status")
MAPPED_PAGES = Path("/proc/self/statm")  # its first number: pages of memory that are mapped


@dataclass(frozen=True)
class Report:
    """The findings on one folder, and what they took; `refusal` says why a path cannot be audited at all."""

    findings: list[Finding]
    refusal: str | None = None
    cpu_seconds: float = 0.0
    peak_bytes: int = 0


class Auditor:
    """A worker process that audits one folder after the other; one that ends or hangs is replaced."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context(
            "spawn"
        )  # a fresh interpreter: nothing of ours is at risk
        self._worker: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Auditor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def report(self, path: Path) -> Report:
        """Audit one folder; a folder that cannot be audited within the limits gets that as its finding."""
        if self._worker is None or self._pipe is None:
            self._start()
        assert self._worker is not None and self._pipe is not None
        try:
            self._pipe.send(path)
            if self._pipe.poll(WALL_SECONDS_MAX):
                report = self._pipe.recv()
                assert isinstance(report, Report)
                return report
            reason = f"no end within {WALL_SECONDS_MAX:.0f} s"
        except (EOFError, OSError):  # the worker ended
            self._worker.join(WALL_SECONDS_MAX)
            reason = f"more than {CPU_SECONDS_MAX} s of computing or {MEMORY_BYTES_MAX >> 20} MiB"
            reason += f" (the process ended with {self._worker.exitcode})"
        self.stop()
        text = f"the audit was stopped: {reason}; no record is that large"
        return Report([fail(UNFINISHED, text, path.name, UNFINISHED_REMEDY)])

    def stop(self) -> None:
        """End the worker process."""
        if self._pipe is not None:
            self._pipe.close()
        if self._worker is not None:
            self._worker.kill()
            self._worker.join()
        self._worker = self._pipe = None

    def _start(self) -> None:
        self._pipe, other = self._context.Pipe()
        self._worker = self._context.Process(target=_serve, args=(other,), daemon=True)
        self._worker.start()
        other.close()


def _serve(pipe: Connection) -> None:
    """The worker: a report for every path that comes, until the pipe closes."""
    limits = _limits()
    if limits is not None:
        _limit_memory(limits)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            path = pipe.recv()
            pipe.send(_report_within(path, limits))


def _limits() -> ModuleType | None:
    """The module that limits a process; None on a system without it."""
    try:
        return importlib.import_module("resource")
    except ImportError:
        return None


def _limit_memory(limits: ModuleType) -> None:
    if not MAPPED_PAGES.is_file():  # no Linux: other systems do not enforce the limit anyway
        return
    mapped = int(MAPPED_PAGES.read_text(encoding="utf-8").split()[0]) * limits.getpagesize()
    _, hard = limits.getrlimit(limits.RLIMIT_AS)
    limits.setrlimit(limits.RLIMIT_AS, (mapped + MEMORY_BYTES_MAX, hard))


def _report_within(path: Path, limits: ModuleType | None) -> Report:
    if limits is None:
        return _report(path)
    begin = _cpu_seconds(limits)
    _, hard = limits.getrlimit(limits.RLIMIT_CPU)
    limits.setrlimit(limits.RLIMIT_CPU, (int(begin) + CPU_SECONDS_MAX, hard))
    report = _report(path)
    return Report(report.findings, report.refusal, _cpu_seconds(limits) - begin, _peak_bytes())


def _peak_bytes() -> int:
    """The most memory that this process held so far; 0 where the system does not tell."""
    if not STATUS.is_file():
        return 0
    found = re.search(r"^VmHWM:\s*(\d+) kB", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _cpu_seconds(limits: ModuleType) -> float:
    usage = limits.getrusage(limits.RUSAGE_SELF)
    return float(usage.ru_utime + usage.ru_stime)


def _report(path: Path) -> Report:
    try:
        return Report(audit(Folder(path)))
    except RecordError as error:
        return Report([], refusal=str(error))
