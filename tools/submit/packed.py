"""A2-A6, A9, C2, C3 of folders that `pack` wrote: all is derived again, and scores are summed again."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any

from data.files import sha256_file
from tools.runs.derive import (
    Evidence,
    compare_with,
    data_facts,
    is_of_mixed_code,
    mapping,
    nested,
    proof_facts,
    submission,
)
from tools.runs.errors import RecordError
from tools.runs.folder import (
    BASELINE_DIFF,
    CASEOPS,
    CONFIG,
    FORMAT,
    LOG_NAME,
    MANIFEST,
    PER_RUN_SETTINGS,
    PICTURE_SUFFIXES,
    PROOF,
    PROSE_SUFFIXES,
    READABLE_SCRIPT,
    README,
    SCRIPT,
    SETTINGS_OF_A_START,
    SUBMISSION,
    SUMMARY_NAME,
    Folder,
    number,
    read_object,
)
from tools.runs.logs import decimals
from tools.runs.runs import Group, load_group, settings_in, settings_sha256, settings_that_differ
from tools.runs.source import changed_lines, read_script, same_program
from tools.submit import readme
from tools.submit.findings import Finding, fail, warn
from tools.submit.limits import is_record

LIMIT_CHECKS = {"train_seconds": "C2", "eval_seconds": "C3", "artifact_bytes": "A9"}
STARTS = PER_RUN_SETTINGS | SETTINGS_OF_A_START  # what no shipped script has for a default
PACKED_BYTES_MAX = 64 * 2**20  # of one file; no more is hashed
LINK = re.compile(r"\]\(([^()\s]{1,200})\)|\bsrc=[\"']([^\"'\s]{1,200})")  # in Markdown, also as HTML
REMEDY = "restore the packed file, or pack the runs again"


def check_files(folder: Folder) -> Iterator[Finding]:
    """A2: no file was changed or removed since packing, and none was added."""
    files = folder.submission.get("files")
    if not isinstance(files, dict) or not files:
        yield fail("A2", "`files` is missing: nothing says what was packed", SUBMISSION, REMEDY)
        return
    for name, digest in files.items():
        if not folder.has(name):
            yield fail("A2", f"`{name}` was packed and is missing", name, REMEDY)
        elif folder.file(name).stat().st_size > PACKED_BYTES_MAX:
            yield fail("A2", f"`{name}` has more than {PACKED_BYTES_MAX:,} bytes: not read", name, REMEDY)
        elif sha256_file(folder.file(name)) != digest:
            yield fail("A2", f"`{name}` is not the file that was packed: its sha256 differs", name, REMEDY)
    yield from _added_files(folder, {*files, SUBMISSION, README})


def _added_files(folder: Folder, known: set[str]) -> Iterator[Finding]:
    """Files besides the packed ones; prose and pictures that README.md links are its own."""
    linked = {PurePosixPath(one or other).as_posix() for one, other in LINK.findall(folder.text(README))}
    for path in folder.files():
        name = path.relative_to(folder.path).as_posix()
        explains = path.suffix.lower() in (*PROSE_SUFFIXES, *PICTURE_SUFFIXES)
        if name in known or (explains and name in linked):
            continue
        text = f"`{name}` ({path.stat().st_size:,} bytes) was not packed: nothing says what it is for"
        yield warn("A2", text, name, "remove it; README.md may link prose and pictures")


def check_code(folder: Folder) -> Iterator[Finding]:
    """A6: the shipped program is the one whose hash every run recorded, wrapped or not."""
    if folder.script is None:
        return
    source = folder.script.raw
    if folder.readable is not None:
        readable = read_script(folder.readable)
        source = readable.raw
        if not same_program(folder.script.text, readable.text):
            text = f"{folder.script.path.name} is not the program in {READABLE_SCRIPT}"
            yield fail("A6", text, READABLE_SCRIPT, REMEDY)
    elif folder.script.wrapped and folder.ran_sources not in ([], [folder.script.sha256]):
        text = f"the source of the wrapped script, sha256 {folder.ran_sources[0][:12]}…, is not in the folder"
        yield fail("A6", text, folder.script.path.name, f"put it next to the script as {READABLE_SCRIPT}")
        return
    digest = hashlib.sha256(source).hexdigest()
    for seed, summary in folder.summaries.items():
        ran = str(nested(summary, "code", "sha256") or "")
        where = SUMMARY_NAME.format(seed=seed)
        if is_of_mixed_code(summary):
            text = f"seed {seed} ran mixed code: it began with another script (RESUME_OTHER_CODE)"
            yield fail("A6", text, where, "train that seed again, with one script from start to end")
        elif ran and ran != digest:
            text = f"the shipped source is not what seed {seed} ran: sha256 {digest[:12]}…, ran {ran[:12]}…"
            yield fail("A6", text, where, REMEDY)


def check_config(folder: Folder) -> Iterator[Finding]:
    """A4: config.env, from which the command in README.md starts, holds the settings that every run had."""
    if not folder.has(CONFIG):
        yield fail("A4", f"`{CONFIG}` is missing: the run cannot be repeated", CONFIG, REMEDY)
        return
    written = dict(line.split("=", 1) for line in settings_in(folder.text(CONFIG)))
    shipped = folder.script.shipped_settings if folder.script else None
    for seed, summary in folder.summaries.items():
        ran = mapping(summary, "config")
        if not ran:
            name = SUMMARY_NAME.format(seed=seed)
            yield warn("A4", f"{name} records no settings: `{CONFIG}` cannot be checked", name, REMEDY)
            continue
        for key in settings_that_differ(written, ran):
            yield fail(
                "A4",
                f"{CONFIG} says {key}={written.get(key, 'nothing')}, seed {seed} ran with"
                f" {ran.get(key, 'no such setting')}",
                CONFIG,
                REMEDY,
            )
        changed = {key: value for key, value in mapping(summary, "overrides").items() if key not in STARTS}
        if shipped is not None and shipped != changed:
            text = f"{SCRIPT} starts with {shipped}, seed {seed} ran with {changed} for its defaults"
            yield fail("A4", text, SCRIPT, REMEDY)


def _declared_seeds(folder: Folder) -> list[int]:
    seeds = folder.submission.get("seeds")
    return [seed for seed in seeds if isinstance(seed, int)] if isinstance(seeds, list) else []


def evidence_of(folder: Folder) -> list[Evidence]:
    logs = {log.path.name: log for log in folder.logs if log.path.parent == folder.path}
    found = []
    for seed in _declared_seeds(folder):
        log = logs.get(LOG_NAME.format(seed=seed))
        summary = folder.summaries.get(seed)
        if log is not None and summary is not None:
            found.append(Evidence(seed, log, summary))
    return found


def check_summaries(folder: Folder) -> Iterator[Finding]:
    """A4, A5: one log and one summary per seed, and both say the same of it."""
    found = {evidence.seed: evidence for evidence in evidence_of(folder)}
    for seed in _declared_seeds(folder):
        if seed not in found:
            yield fail("A5", f"seed {seed} is declared, but lacks its log or summary", SUBMISSION, REMEDY)
            continue
        log, summary = found[seed].log, found[seed].summary
        if nested(summary, "seed") not in (None, seed):
            name = SUMMARY_NAME.format(seed=seed)
            text = f"{name} is named for seed {seed}, but says seed {nested(summary, 'seed')}"
            yield fail("A5", text, name, REMEDY)
        yield from _check_losses(found[seed])
        pairs = {
            "artifact bytes": (
                nested(summary, "artifact", "bytes"),
                log.model_bytes and log.model_bytes.bytes,
            ),
            "steps": (nested(summary, "steps"), log.steps_done),
        }
        for what, (recorded, printed) in pairs.items():
            if recorded is not None and printed is not None and recorded != printed:
                text = f"{what}: {printed:,} in the log, {recorded!r} in the summary"
                yield fail("A4", text, log.path.name, REMEDY)


def _check_losses(evidence: Evidence) -> Iterator[Finding]:
    log = evidence.log
    losses = mapping(evidence.summary, "losses")
    for final in log.finals:
        if losses and final.rank > 0 and not any(name in final.label for name in losses):
            text = f"`{final.label}` is in the log, but the summary has no such score"
            yield fail("A4", text, log.where(final.line), REMEDY)
    for name, loss in losses.items():
        if not isinstance(loss, Mapping):
            continue
        found = [final for final in log.finals if name in final.label]
        for final in found:
            pairs = {
                "val_loss": (final.loss_text, loss.get("nats")),
                "val_bpb": (final.bpb_text, loss.get("bits_per_byte")),
            }
            for key, (printed, value) in pairs.items():
                recorded = number(value)
                if recorded is not None and f"{recorded:.{decimals(printed)}f}" != printed:
                    yield fail(
                        "A4",
                        f"`{final.label}` {key} is {printed} in the log and {recorded!r} in the summary",
                        log.where(final.line),
                        REMEDY,
                    )


def check_data(folder: Folder) -> Iterator[Finding]:
    """A4: manifest and tokenizer, where the folder holds them, are those that every run names."""
    for evidence in evidence_of(folder):
        hashes = mapping(evidence.summary, "data", "hashes")
        settings = mapping(evidence.summary, "config")
        tokenizer = PurePosixPath(str(settings.get("TOKENIZER_PATH", ""))).name
        for name, kind in ((MANIFEST, "manifest"), (tokenizer, "tokenizer")):
            if not name or not folder.has(name) or folder.file(name).stat().st_size > PACKED_BYTES_MAX:
                continue
            if sha256_file(folder.file(name)) != hashes.get(kind):
                text = f"`{name}` is not the {kind} of seed {evidence.seed}: its sha256 differs"
                yield fail("A4", text, name, REMEDY)


def check_derived(folder: Folder) -> Iterator[Finding]:
    """A4: submission.json and README.md are what logs and summaries give when derived again."""
    if folder.script is None:
        return
    written = folder.submission.get("format", FORMAT)
    if written != FORMAT:
        what = f"`format` is {written!r}, but these tools can only derive {FORMAT}"
        remedy = "pack the runs again, or audit the folder with the tools of the commit that packed it"
        yield fail("A4", what, SUBMISSION, remedy)
        return
    evidences = evidence_of(folder)
    if not evidences:
        yield fail("A5", "`seeds` names no seed that has a log and a summary", SUBMISSION, REMEDY)
        return
    files = folder.submission.get("files")
    manifest = read_object(folder.file(MANIFEST)) if folder.has(MANIFEST) else None
    try:
        report = read_object(folder.file(PROOF)) if folder.has(PROOF) else None
        expected = submission(
            folder.submission,
            evidences,
            folder.script.bytes,
            files if isinstance(files, dict) else {},
            None,
            data_facts(evidences[0].summary, manifest, folder.has(CASEOPS)),
            proof_facts(report, _source_sha256(folder)),
        )
    except RecordError as error:
        yield fail("C10", str(error), folder.name, REMEDY)
        return
    claimed = folder.submission.get("comparison")
    if isinstance(claimed, dict):
        bases = _baselines(folder, claimed.get("baseline"))
        if not bases:
            text = f"no folder `{claimed.get('baseline')}` in these records: its scores are only claimed"
            yield warn("A4", text, SUBMISSION, "put the baseline's folder next to this one, and check it too")
        diff = folder.text(BASELINE_DIFF)
        expected["comparison"] = _comparison(claimed, expected["seed_results"], bases, diff)
    for place, got, derived in _differences(folder.submission, expected):
        yield fail("A4", f"`{place}` is {got!r}, but logs and summaries give {derived!r}", SUBMISSION, REMEDY)
    yield from _check_readme(folder, expected, {evidence.seed: evidence.summary for evidence in evidences})


def _source_sha256(folder: Folder) -> str:
    """Of the readable source, which was run and proved."""
    source = read_script(folder.readable) if folder.readable is not None else folder.script
    return source.sha256 if source is not None else ""


def check_proof(folder: Folder) -> Iterator[Finding]:
    """A4: the proof that was packed proved this script with these settings, and refuted nothing."""
    report = read_object(folder.file(PROOF)) if folder.has(PROOF) else None
    if report is None:
        if folder.has(PROOF):
            yield fail("A4", f"{PROOF} cannot be read", PROOF, REMEDY)
        return
    remedy = "prove the script of this record with its config.env: python -m tools prove SCRIPT --config FILE"
    replays = report.get("replays")
    replays = replays if isinstance(replays, list) else []
    # A record may have replays alone: then there is no verdict on the script.
    verdicts = [*replays, report] if "status" in report or not replays else replays
    settings = settings_sha256(dict(line.split("=", 1) for line in settings_in(folder.text(CONFIG))))
    code = _source_sha256(folder)
    artifacts = [nested(summary, "artifact", "sha256") for summary in folder.summaries.values()]
    for verdict in verdicts:
        said = verdict if isinstance(verdict, dict) else {}
        if said.get("status") != 0:
            text = f"the proof ended with status {said.get('status')!r}: {said.get('verdict')}"
            yield fail("A4", text, PROOF, remedy)
        if said is not report and said.get("sha256") != code:  # what `proof_facts` asks of the report itself
            yield fail("A4", f"the proof is for a script with sha256 {said.get('sha256')}", PROOF, remedy)
        if "artifact_sha256" in said and said["artifact_sha256"] not in artifacts:
            text = f"a replay used artifact {said['artifact_sha256']}, which belongs to no seed"
            yield fail("A4", text, PROOF, remedy)
        if "settings_sha256" not in said:
            text = "the proof does not say which settings it used: it may be for others"
            yield warn("A4", text, PROOF, remedy)
        elif said["settings_sha256"] != settings:
            yield fail("A4", f"the proof used other settings than {CONFIG}", PROOF, remedy)
    findings = report.get("findings")
    for finding in findings if isinstance(findings, list) else []:
        if isinstance(finding, dict) and finding.get("level") == "FAIL":
            text = f"the proof has a FAIL: {finding.get('check')} {finding.get('text')}"
            yield fail("A4", text, PROOF, remedy)


def _comparison(
    claimed: Mapping[str, Any], results: Mapping[str, Any], bases: list[Group], diff: str
) -> dict[str, Any] | None:
    """The comparison with the baseline's scores as its folder has them; without it, as they are claimed."""
    of_bases = [(base.scores("bpb"), base.scores("loss")) for base in bases]
    scores = _numbers(claimed.get("baseline_val_bpb")), _numbers(claimed.get("baseline_val_loss"))
    if of_bases and scores not in of_bases:
        scores = of_bases[0]
    if not all(scores):
        return None
    seeds = [int(seed) for seed in _numbers(claimed.get("baseline_seeds"))]
    if len(seeds) != len(scores[0]):
        seeds = []
    derived = compare_with(str(claimed.get("baseline")), results, *scores, seeds)
    # These are of the baseline, which may not be here.
    settings = claimed.get("settings")
    rows = settings if isinstance(settings, list) else []
    derived["settings"] = [row for row in rows if isinstance(row, list) and len(row) == 3]
    is_same = claimed.get("source_lines") == [0, 0]
    derived["source_lines"] = list(changed_lines(diff)) if diff else [0, 0] if is_same else None
    return derived


def _baselines(folder: Folder, name: Any) -> list[Group]:
    """The records of that name next to the folder, and in the other tracks."""
    track = folder.path.resolve().parent
    found = []
    for place in dict.fromkeys([track, *sorted(track.parent.glob("track_*"))]):
        if place.is_symlink() or not place.is_dir():
            continue
        for path in place.iterdir():
            if path.name != name or path.is_symlink() or not path.is_dir():
                continue
            with contextlib.suppress(RecordError):  # no record: nothing to compare with
                found.append(load_group(path))
    return found


def _numbers(value: Any) -> list[float]:
    """`value` where it is a list of numbers, else nothing."""
    if not isinstance(value, list):
        return []
    found = [number(item) for item in value]
    return [item for item in found if item is not None] if None not in found else []


def _differences(got: Any, expected: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ, by dotted path; keys that somebody added are left alone."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key, value in expected.items():
            inner = f"{place}.{key}" if place else str(key)
            yield from _differences(got.get(key), value, inner)
    elif isinstance(expected, float) and isinstance(got, float):
        if abs(got - expected) > 1e-9 * max(1.0, abs(expected)):
            yield place, got, expected
    elif got != expected:
        yield place, got, expected


def _check_readme(
    folder: Folder, expected: dict[str, Any], summaries: Mapping[int, Mapping[str, Any]]
) -> Iterator[Finding]:
    text = folder.text(README)
    parts = readme.split_at_marks(text, readme.BEGIN, readme.END)
    if parts is None:
        yield fail("A4", "README.md has lost the marks of its generated part", README, REMEDY)
        return
    baked = folder.script is not None and folder.script.shipped_settings is not None
    wanted = readme.render(expected, summaries, folder.readable is not None, baked)
    wanted_parts = readme.split_at_marks(wanted, readme.BEGIN, readme.END)
    assert wanted_parts is not None
    first_line = parts.before.count("\n") + 1
    lines = zip_longest(parts.between.splitlines(), wanted_parts.between.splitlines(), fillvalue="")
    for line, (got, derived) in enumerate(lines, first_line):
        if got != derived:
            where = f"{README}:{line}"
            yield fail("A4", f"README.md says `{got}`, but the logs give `{derived}`", where, REMEDY)
            return


def check_limits(folder: Folder) -> Iterator[Finding]:
    """C2, C3, A9: limits that the runs themselves judged; binding in the record track."""
    report = fail if is_record(folder) else warn
    for seed, summary in folder.summaries.items():
        for name, limit in mapping(summary, "limits").items():
            if isinstance(limit, Mapping) and limit.get("ok") is False:
                yield report(
                    LIMIT_CHECKS.get(name, "C2"),
                    f"seed {seed} broke its own limit: {name} {limit.get('value')} > {limit.get('limit')}",
                    SUMMARY_NAME.format(seed=seed),
                    "run again inside the limit",
                )


RULES = (
    check_files,
    check_code,
    check_config,
    check_summaries,
    check_data,
    check_derived,
    check_proof,
    check_limits,
)
