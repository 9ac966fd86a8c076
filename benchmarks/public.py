"""What `python -m tools check` finds in the records that others have published.

    python benchmarks/public.py PARAMETER_GOLF [--keep]

PARAMETER_GOLF is a user's copy of github.com/openai/parameter-golf. Each folder of records/*/ is audited as
it is; nothing of it is executed. No folder is named in what is stored: a table of what practice leaves out is
the purpose, not a verdict on any of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks import paired, results  # noqa: E402
from tools.check.apart import Auditor  # noqa: E402
from tools.check.findings import Finding, Mode  # noqa: E402

TITLE = "Public records under the checker"
HEADER = "| check | folders with a FAIL | --strict | --convention | folders with a WARN | findings |"


def levels_of(findings: list[Finding]) -> list[dict[str, str]]:
    """Of each finding its check, and its level under each reading of the rules."""
    return [
        {"check": finding.check, **{mode.value: finding.level(mode).name for mode in Mode}}
        for finding in findings
    ]


def folders_with(folders: list[list[dict[str, str]]], check: str, mode: Mode, level: str) -> int:
    """In how many folders a check says so at least once; an empty check: any of them."""
    count = 0
    for found in folders:
        levels = {finding[mode.value] for finding in found if check in ("", finding["check"])}
        if level in levels:
            count += 1
    return count


def row(check: str, folders: list[list[dict[str, str]]], findings: int) -> str:
    """A line of the table."""
    failed = [folders_with(folders, check, mode, "FAIL") for mode in Mode]
    warned = folders_with(folders, check, Mode.AGREED, "WARN")
    return f"| {check} | {' | '.join(map(str, failed))} | {warned} | {findings} |"


def tables(measured: dict[str, Any]) -> list[str]:
    """A line for each check that found something."""
    folders = measured["folders"]
    counts = Counter(finding["check"] for found in folders for finding in found)
    levels = Counter(finding[Mode.AGREED.value] for found in folders for finding in found)
    checks = sorted(counts, key=lambda check: (check[0], int(check[1:])))
    failing = folders_with(folders, "", Mode.AGREED, "FAIL")
    return [
        f"{len(folders)} folders of openai/parameter-golf at {measured['commit']}, in "
        f"{measured['seconds']:.0f} s: {levels['FAIL']} FAIL in {failing} of them, {levels['WARN']} WARN, "
        f"{levels['INFO']} INFO. `records/README.md` says what each check asks. Where the rules as written "
        "and as practised disagree it warns, unless a reading is chosen: the written one (`--strict`) or the "
        "practised one (`--convention`).",
        "", *paired.table(HEADER, [row(check, folders, counts[check]) for check in checks]),
    ]  # fmt: skip


def main() -> None:
    """Audit, print the table, and with --keep store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="a copy of openai/parameter-golf, with its records/")
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    arguments = parser.parse_args()
    before = results.conditions()
    paths = sorted(path for path in arguments.path.glob("records/*/*") if path.is_dir())
    if not paths:
        parser.error(f"{arguments.path}: expected folders records/*/*")
    revision = ["git", "-C", str(arguments.path), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(revision, capture_output=True, text=True, check=False).stdout.strip()
    start = time.perf_counter()
    folders = []
    with Auditor() as auditor:
        for path in tqdm(paths, desc="auditing", disable=not sys.stderr.isatty()):
            report = auditor.report(path)
            if report.refusal is not None:
                parser.error(report.refusal)
            folders.append(levels_of(report.findings))
    seconds = time.perf_counter() - start
    measured = {"commit": commit or "an unknown commit", "seconds": seconds, "folders": folders}
    results.finish("public", before, measured, arguments.keep)


if __name__ == "__main__":
    main()
