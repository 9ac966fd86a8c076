"""`check FOLDER…`: audit record folders, ours or any public one. Nothing in a folder is executed.

Exit status: 0 without a FAIL, 1 with one, 2 if a path is not a record folder (the others are still audited).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from tools.runs.errors import RecordError
from tools.runs.folder import Folder
from tools.runs.reading import one_line, path_of
from tools.runs.runs import SUMMARY
from tools.runs.writing import print_json
from tools.submit import claims, limits, nats, packed, scores, seeds
from tools.submit.findings import Finding, Level, Mode, fail

EXIT_UNUSABLE = 2
CPU_SECONDS_MAX = 10  # for one folder; the largest public one takes 0.3 s
MEMORY_BYTES_MAX = 400 * 2**20  # beyond what the process has before it reads its first folder
MAPPED_PAGES = Path("/proc/self/statm")  # its first number: pages of memory that are mapped
FINDINGS_MAX = 100  # of one rule on one folder
ERROR_CHARACTERS_MAX = 300
UNFINISHED = "A0"  # the finding that a rule could not be finished
UNFINISHED_REMEDY = "fix what the folder holds; if nothing is wrong with it, report the error"

Rule = Callable[[Folder], Iterator[Finding]]
# A: the folder and its claims. C: the logs. Each module has the rules of its title.
RULES: tuple[Rule, ...] = (*claims.RULES, *limits.RULES, *scores.RULES, *seeds.RULES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="records folders")
    reading = parser.add_mutually_exclusive_group()
    reading.add_argument(
        "--strict", action="store_true", help="decide contested points by the challenge's rules as written"
    )
    reading.add_argument(
        "--convention", action="store_true", help="decide contested points by the challenge's practice"
    )
    parser.add_argument("--quiet", action="store_true", help="FAIL and WARN only")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")


def run(args: argparse.Namespace) -> int:
    mode = Mode.AGREED
    if args.strict:
        mode = Mode.STRICT
    elif args.convention:
        mode = Mode.CONVENTION
    progress = tqdm(args.folders, desc="auditing", disable=len(args.folders) < 2 or not sys.stderr.isatty())
    reports: dict[str, list[Finding]] = {}
    refusals: list[str] = []
    with limited_memory():
        for path in progress:
            try:
                reports[str(path)] = audit(path)
            except RecordError as error:
                refusals.append(str(error))
    if args.json:
        listed = {path: [finding.as_json(mode) for finding in found] for path, found in reports.items()}
        print_json(listed)
    else:
        for name, found in reports.items():
            print(render(Path(name), found, mode, args.quiet))
    for refusal in refusals:
        print(one_line(f"tools check: {refusal}"), file=sys.stderr)
    levels = {finding.level(mode) for found in reports.values() for finding in found}
    if Level.FAIL in levels:
        return 1
    return EXIT_UNUSABLE if refusals else 0


def render(path: Path, findings: list[Finding], mode: Mode, quiet: bool) -> str:
    """The report on one folder: the worst first, each with evidence and what to do, then the counts."""
    lines = [path_of(path)]
    for finding in sorted(findings, key=lambda f: -f.level(mode)):
        level = finding.level(mode)
        if quiet and level is Level.INFO:
            continue
        where = f"  [{finding.where}]" if finding.where else ""
        lines.append(one_line(f"  {level.name:4} {finding.check:3} {finding.text}{where}"))
        if finding.remedy and level is not Level.INFO:
            lines.append(one_line(f"           -> {finding.remedy}"))
    counts = Counter(finding.level(mode).name for finding in findings)
    shown = ", ".join(f"{counts[level.name]} {level.name}" for level in reversed(Level))
    return "\n".join([*lines, f"  {shown} ({mode.value} reading)"])


def audit(path: Path) -> list[Finding]:
    """All findings on one folder, in the order of the rules' names. RecordError if there is no folder.

    A rule that ends in an error, or a folder that takes too long, is a finding itself: the other rules and
    folders are judged all the same, and a folder that breaks a rule's program does not pass.
    """
    refuse_other_folders(path)
    folder = Folder(path)
    findings: list[Finding] = []
    try:
        with limited_time():
            rules = (*RULES, *packed.RULES, *nats.RULES) if folder.ours else RULES
            for rule in rules:
                findings += _findings_of(rule, folder)
    except TimeLimit:
        text = f"the audit was stopped after {CPU_SECONDS_MAX} s of CPU time: no record takes that long"
        findings.append(fail(UNFINISHED, text, folder.name, UNFINISHED_REMEDY))
    return sorted(findings, key=lambda finding: (finding.check[0], int(finding.check[1:])))


def refuse_other_folders(path: Path) -> None:
    """RecordError for a run that is not packed, or a folder of several records."""
    if any((path / name).exists() for name in ("README.md", "submission.json")):
        return
    if (path / SUMMARY).is_file():
        raise RecordError(f"{path} is the folder of a run: pack it first, with python -m tools pack {path}")
    records = sorted(path.glob("*/submission.json"))
    if records:
        raise RecordError(f"{path} is a folder of {len(records)} record(s): check {path}/*")


def _findings_of(rule: Rule, folder: Folder) -> list[Finding]:
    """What one rule finds; an error in it ends that rule alone."""
    found: list[Finding] = []
    try:
        for finding in itertools.islice(rule(folder), FINDINGS_MAX):
            found.append(finding)
    except Exception as error:  # whatever the folder holds that nobody thought of
        what = f"{rule.__module__.removeprefix('tools.submit.')}.{rule.__name__}"
        reason = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
        text = f"{what} could not be finished: {reason}"
        found.append(fail(UNFINISHED, text, folder.name, UNFINISHED_REMEDY))
    return found


class TimeLimit(BaseException):
    """The audit of a folder takes too long. No `except Exception` on the way takes it for its own."""


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """TimeLimit after CPU_SECONDS_MAX of computing, where the system has such a timer."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS_MAX, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """MemoryError for whatever takes more than MEMORY_BYTES_MAX, on Linux: others do not enforce a limit."""
    if not MAPPED_PAGES.is_file():
        yield
        return
    resource = importlib.import_module("resource")  # not on every system
    mapped = int(MAPPED_PAGES.read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES_MAX, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
