"""A1-A3: the folder's name and place, required files, submission.json's schema."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator

from tools.runs.folder import DEPTH_MAX, FILES_MAX, README, SCRIPT, SUBMISSION, Folder, number
from tools.runs.rules import RECORD_TEXT, TOKENIZER_TOLERANCE, TOKENIZERS, bytes_per_token
from tools.submit.check.budget import is_record
from tools.submit.check.claims import CODE_FIELDS, TOTAL_FIELDS
from tools.submit.check.findings import Finding, contested, fail, info, warn

FOLDER_NAME = re.compile(r"^\d{4}-\d\d-\d\d_[A-Za-z0-9._+-]+$")
TRACK_NAME = re.compile(r"^track_\w+$")
REQUIRED_TEXT = ("author", "github_id", "name", "date")
SCORE_ALIASES = ("mean_val_bpb", "mean_bpb", "bpb", "score")
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?![0-9])")


def check_name(folder: Folder) -> Iterator[Finding]:
    if not FOLDER_NAME.match(folder.name):
        yield warn(
            "A1",
            f"folder `{folder.name}` is not YYYY-MM-DD_Description",
            folder.name,
            "rename it (asked for in #1851)",
        )
    if not TRACK_NAME.match(folder.track):
        yield info(
            "A1", f"parent `{folder.track}` is no track_* folder", folder.name, "move it under its track"
        )


def check_files(folder: Folder) -> Iterator[Finding]:
    required = {README: folder.file(README), SUBMISSION: folder.submission_path, SCRIPT: folder.script_path}
    for name, path in required.items():
        if path is None or path not in folder.files():
            yield fail(
                "A2", f"missing `{name}`", folder.name, "add it; folders without it were not listed (#561)"
            )
        elif path.stat().st_size == 0:
            yield fail("A2", f"`{path.name}` is empty", folder.name, "ship the file that ran")
        elif path.name != name:
            yield contested(
                "A2", f"`{path.name}` stands in for `{name}` (#561)", folder.name, f"rename it to `{name}`"
            )
    if not folder.logs:
        yield fail("A2", "no training log", folder.name, "add one log per seed, as the script wrote it")


def check_submission(folder: Folder) -> Iterator[Finding]:
    if folder.submission_path is None:
        return
    name = folder.submission_path.name
    if folder.submission_error:
        yield fail(
            "A3", f"{name} cannot be read: {folder.submission_error}", name, "write valid JSON, one object"
        )
        return
    submission = folder.submission
    # What `pack` refuses to leave out of a record for the challenge is not missing from one by chance.
    needed = RECORD_TEXT if folder.ours and is_record(folder) else ()
    for key in dict.fromkeys((*REQUIRED_TEXT, *needed)):
        if not isinstance(submission.get(key), str) or not submission[key]:
            report = fail if key in needed else warn
            yield report("A3", f"`{key}` is absent or no text", name, f"add `{key}`")
    if isinstance(submission.get("date"), str) and not _is_past_day(submission["date"]):
        text = f"date `{submission['date']}` is not YYYY-MM-DD of a day up to today"
        yield warn("A3", text, name, "write an ISO date")
    for key in (*TOTAL_FIELDS, *CODE_FIELDS, "val_loss", "val_bpb_std"):
        if isinstance(submission.get(key), str):
            text = f"`{key}` is the text {submission[key]!r}: no number is compared with the logs"
            yield warn("A3", text, name, "write a number")
    yield from _check_score(folder, name)


def _is_past_day(text: str) -> bool:
    """Whether a text begins with the ISO date of a day that has come."""
    found = DATE.match(text)
    try:
        return found is not None and datetime.date.fromisoformat(found[0]) <= datetime.date.today()
    except ValueError:  # no such day, as 31 February
        return False


def _check_score(folder: Folder, name: str) -> Iterator[Finding]:
    loss = number(folder.submission.get("val_loss"))
    bpb = number(folder.submission.get("val_bpb"))
    if bpb is None:
        alias = next((key for key in SCORE_ALIASES if key in folder.submission), None)
        found = f", found `{alias}`" if alias else ""
        yield fail(
            "A3", f"`val_bpb` is absent or no number{found}", name, "add `val_bpb`, the mean over the seeds"
        )
        return
    if bpb <= 0 or not math.isfinite(bpb):
        yield fail("A3", f"`val_bpb` {bpb} is no bits per byte", name, "write the mean over the seeds")
        return
    if loss is None:
        return
    if loss == bpb:
        yield fail(
            "A3", f"`val_loss` equals `val_bpb` ({bpb}): bits stored as loss", name, "nats per token go here"
        )
        return
    implied = bytes_per_token(loss, bpb)
    if (
        not any(abs(implied / t.bytes_per_token - 1) < TOKENIZER_TOLERANCE for t in TOKENIZERS)
        and not folder.ours
    ):
        yield warn(
            "A3",
            f"`val_loss` {loss} and `val_bpb` {bpb} imply {implied:.3f} bytes/token, no known tokenizer's",
            name,
            "check that both are of the same run and that `val_loss` is nats per token",
        )


def check_links(folder: Folder) -> Iterator[Finding]:
    """A2: everything is in the folder, and was read."""
    for path in folder.leaving_links:
        where = path.relative_to(folder.path).as_posix()
        yield fail(
            "A2",
            f"`{where}` is a link that leaves the folder, or leads nowhere",
            where,
            "add the file itself",
        )
    for path, reason in folder.unread:
        where = path.relative_to(folder.path).as_posix()
        yield fail(
            "A2", f"`{where}` was not read to its end: {reason}", where, "leave out what is no log or script"
        )
    if folder.cut_off:
        yield fail(
            "A2",
            f"more than {FILES_MAX:,} files, or folders more than {DEPTH_MAX} deep: not all was looked at",
            folder.name,
            "leave out what does not belong to the record",
        )


CHECKS = (check_name, check_files, check_links, check_submission)
