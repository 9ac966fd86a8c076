"""The audit's checks, A on folder and source, C on logs; each module lists its own in `CHECKS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tools.check import budget, claims, code, layout, mixed, packed, score, seeds
from tools.check.findings import Finding
from tools.runs.folder import Folder

Check = Callable[[Folder], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    *layout.CHECKS,
    *claims.CHECKS,
    *seeds.CHECKS,
    *code.CHECKS,
    *mixed.CHECKS,
    *budget.CHECKS,
    *score.CHECKS,
    *packed.CHECKS,
)


def audit(folder: Folder) -> list[Finding]:
    """All findings on one folder, in the order of the checklist."""
    return sorted(
        (f for check in CHECKS for f in check(folder)), key=lambda f: (f.check[0], int(f.check[1:]))
    )
