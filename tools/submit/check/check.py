"""`check FOLDER…`: the checklist on any records folder; exit status 1 on a FAIL, 2 on what is no folder."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from tools.runs.folder import Folder
from tools.runs.writing import print_json, printable
from tools.submit.check.apart import Auditor
from tools.submit.check.execute import check_starts
from tools.submit.check.findings import Finding, Level, Mode

EXIT_UNUSABLE = 2  # a path that is no folder; the others are audited all the same


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="records folders")
    reading = parser.add_mutually_exclusive_group()
    reading.add_argument(
        "--strict", action="store_true", help="decide contested points by the rules as written"
    )
    reading.add_argument("--convention", action="store_true", help="decide contested points as practised")
    parser.add_argument(
        "--run", action="store_true", help="also start the script, without network (A8); runs its code"
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
    with Auditor() as auditor:
        for path in progress:
            report = auditor.report(path)
            if report.refusal is not None:
                refusals.append(report.refusal)
                continue
            findings = report.findings
            if args.run:
                findings += check_starts(Folder(path))
            reports[str(path)] = findings
    if args.json:
        listed = {path: [finding.as_json(mode) for finding in found] for path, found in reports.items()}
        print_json(listed)
    else:
        for path, found in reports.items():
            print(render(path, found, mode, args.quiet))
    for refusal in refusals:
        print(printable(f"tools check: {refusal}"), file=sys.stderr)
    levels = {finding.level(mode) for found in reports.values() for finding in found}
    if Level.FAIL in levels:
        return 1
    return EXIT_UNUSABLE if refusals else 0


def render(path: str, findings: list[Finding], mode: Mode, quiet: bool) -> str:
    """The report on one folder: the worst first, each with evidence and what to do, then the counts."""
    lines = [path]
    for finding in sorted(findings, key=lambda f: -f.level(mode)):
        level = finding.level(mode)
        if quiet and level is Level.INFO:
            continue
        where = f"  [{finding.where}]" if finding.where else ""
        text = f"{finding.text}{where}".replace("\n", "\\n")
        lines.append(f"  {level.name:4} {finding.check:3} {text}")
        if finding.remedy and level is not Level.INFO:
            lines.append(f"           -> {finding.remedy}")
    counts = Counter(finding.level(mode).name for finding in findings)
    shown = ", ".join(f"{counts[level.name]} {level.name}" for level in reversed(Level))
    return "\n".join([*lines, f"  {shown} ({mode.value} reading)"])
