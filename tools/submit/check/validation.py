"""C1, A4: which text a run was scored on, and that its bytes are those that were audited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from data.official import official_table
from tools.runs.derive import audited_bytes, is_limited, nested, validation_set
from tools.runs.folder import MANIFEST, SUMMARY_NAME, Folder, SeedRun
from tools.runs.rules import OFFICIAL, OWN
from tools.submit.check.budget import is_record
from tools.submit.check.findings import Finding, fail, warn

DATA_REMEDY = "get the data again, check them with data/fineweb.py --verify, and run again"
LOG_REMEDY = "ship the log as the script wrote it"


def _summary_of(folder: Folder, run: SeedRun) -> Mapping[str, Any]:
    """The summary of a log's run; empty where there is none."""
    return folder.summaries.get(run.seed, {}) if run.seed is not None else {}


def counted_bytes(run: SeedRun, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Every number of bytes of the text that a run states, by the place where it stands."""
    counted: dict[str, Any] = {}
    if run.log.validation_bytes is not None:
        counted[run.log.where(run.log.validation_bytes.line)] = run.log.validation_bytes.integer
    recorded = nested(summary, "data", "val_bytes")
    if recorded is not None:
        counted[SUMMARY_NAME.format(seed=run.seed)] = recorded
    for final in run.log.finals:
        if final.val_bytes is not None:
            counted[run.log.where(final.line)] = final.val_bytes
    return counted


def check_bytes(folder: Folder) -> Iterator[Finding]:
    """C1: a run counts one number of bytes, and it is the one that the data's maker audited, to the byte."""
    noted = audited_bytes(folder.file(MANIFEST)) if folder.has(MANIFEST) else None
    for run in folder.seed_runs:
        summary = _summary_of(folder, run)
        counted = counted_bytes(run, summary)
        if not counted:
            continue
        (first, value), *others = counted.items()
        for place, other in others:
            if other != value:
                text = f"{value!r} bytes of text at {first}, {other!r} at {place}: one run counts one number"
                yield fail("C1", text, place, LOG_REMEDY)
                break
        if run.log.is_limited or is_limited(summary):
            continue
        audits = {MANIFEST: noted, "the run's own audit": nested(summary, "data", "audited_bytes")}
        for name, audited in audits.items():
            wrong = [place for place, found in counted.items() if audited is not None and found != audited]
            if wrong:
                text = f"{counted[wrong[0]]!r} bytes of text are counted, {name} has {audited!r}"
                yield fail("C1", text, wrong[0], DATA_REMEDY)
                break


def check_set(folder: Folder) -> Iterator[Finding]:
    """A4, C1: what a run says of its validation set holds, and a record is scored on the challenge's."""
    for run in folder.seed_runs:
        summary = _summary_of(folder, run)
        line = run.log.validation_set
        where = run.log.where(line.line) if line else SUMMARY_NAME.format(seed=run.seed)
        said = validation_set(summary, run.log)
        if line is not None and said != line.value:
            text = f"validation: {line.value} in the log, {said} in its summary"
            yield fail("A4", text, where, LOG_REMEDY)
        if said == OWN and is_record(folder):
            text = "it was scored on a text of your own, not on the challenge's validation set"
            yield fail("C1", text, where, "score the challenge's text (data/fineweb.py gets it)")
        if said.startswith(OFFICIAL) and not (run.log.is_limited or is_limited(summary)):
            yield from _check_official(run, summary, said, where)


def official_set(said: str) -> Mapping[str, Any] | None:
    """The facts of the set that `official (sp8192)` names, None where one is not known; None without it."""
    sets, _ = official_table()
    return sets.get(said.removeprefix(f"{OFFICIAL} (").removesuffix(")"))


def _check_official(run: SeedRun, summary: Mapping[str, Any], said: str, where: str) -> Iterator[Finding]:
    """C1: a run that names an official set has its counts."""
    known = official_set(said)
    if known is None:
        text = f"{said}: these tools know no validation set of that name: its counts are not decidable"
        yield warn("C1", text, where, "check it with the tools of the commit that ran")
        return
    tokens = nested(summary, "data", "val_tokens")
    if tokens is None and run.log.validation_tokens is not None:
        tokens = run.log.validation_tokens.integer
    found = {}
    for place, count in counted_bytes(run, summary).items():
        found[f"bytes at {place}"] = (count, known.get("bytes"))
    targets = known.get("targets")
    # data/fuse.py makes one token of two in CaseOps data.
    are_fused = "caseops" in said and isinstance(tokens, int) and tokens < (targets or 0)
    if not are_fused:
        found["targets"] = (tokens, targets)
    for what, (got, expected) in found.items():
        if expected and got not in (None, expected):
            yield fail("C1", f"{said}: {got!r} {what}, that set has {expected:,}", where, DATA_REMEDY)
            return


CHECKS = (check_bytes, check_set)
