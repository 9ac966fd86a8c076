"""The audit's checks, A on folder and source, C on logs; each module lists its own in `CHECKS`.

A check that ends in an error is a finding itself: the other checks and the other folders are judged all the
same, and a folder that breaks a check does not pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from tools.runs.folder import Folder
from tools.submit.check import budget, claims, code, layout, packed, score, seeds, validation, within
from tools.submit.check.findings import Finding, fail

Check = Callable[[Folder], Iterator[Finding]]
UNFINISHED = "A0"  # the finding that a check could not be finished
UNFINISHED_REMEDY = "mend what the folder holds; if all is as it should be, report the error"
FINDINGS_MAX = 100  # of one check on one folder
ERROR_CHARACTERS_MAX = 300

CHECKS: tuple[Check, ...] = (
    *layout.CHECKS,
    *claims.CHECKS,
    *seeds.CHECKS,
    *code.CHECKS,
    *budget.CHECKS,
    *score.CHECKS,
    *validation.CHECKS,
    *within.CHECKS,
    *packed.CHECKS,
)


def audit(folder: Folder) -> list[Finding]:
    """All findings on one folder, in the order of the checklist."""
    findings: list[Finding] = []
    for check in CHECKS:
        findings += _findings_of(check, folder)
    return sorted(findings, key=lambda finding: (finding.check[0], int(finding.check[1:])))


def _findings_of(check: Check, folder: Folder) -> list[Finding]:
    """What one check finds; an error in it ends that check alone."""
    found: list[Finding] = []
    try:
        for finding in itertools.islice(check(folder), FINDINGS_MAX):
            found.append(finding)
    except Exception as error:  # whatever the folder holds that nobody thought of
        what = f"{check.__module__.removeprefix('tools.submit.check.')}.{check.__name__}"
        reason = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
        found.append(
            fail(UNFINISHED, f"{what} could not be finished: {reason}", folder.name, UNFINISHED_REMEDY)
        )
    return found
