"""A6: each run was made by one program from its first step to its last."""

from __future__ import annotations

from collections.abc import Iterator

from tools.check.findings import Finding, fail
from tools.runs.derive import nested
from tools.runs.folder import SUMMARY_NAME, Folder


def check_one_program(folder: Folder) -> Iterator[Finding]:
    """A6: no seed went on with other code than it began with (RESUME_OTHER_CODE), as its summary tells."""
    for seed, summary in folder.summaries.items():
        former = nested(summary, "code", "former")
        if not isinstance(former, list) or not former:
            continue
        names = ", ".join(str(nested(script, "file")) for script in former)
        text = f"seed {seed} is of mixed code: it began with {names}, which is not the shipped script"
        where = SUMMARY_NAME.format(seed=seed)
        yield fail("A6", text, where, "train that seed again, with one script from start to end")


CHECKS = (check_one_program,)
