"""A5, A6, C1, C10: distinct runs of one program, one configuration and one text, each complete."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.runs.conditions import conditions_of, data_of
from tools.runs.folder import SUMMARY_NAME, Folder, SeedRun
from tools.runs.logs import LOG_BYTES_MAX, Located, RunLog, decimals
from tools.runs.reading import name_of
from tools.runs.source import Script
from tools.submit.findings import Finding, fail, warn

LOG_REMEDY = "ship one log per run, as the script wrote it"
PER_SEED_SETTINGS = {"seed", "run_id", "pid", "rank", "local_rank", "logfile", "artifact_dir"}
FIRST_LOSSES = 3  # of two seeds, which begin with other weights and other data
LOSS_DECIMALS_MIN = 4  # printed; with fewer two losses are soon equal
COPIED_POINTS_MIN = 8
# Of the steps that two logs have in common; two runs of eight GPUs reach a third by their clocks.
COPIED_SHARE = 0.6
MEASURED = re.compile(r"(?:^|_)(?:norm|loss|ms|mean|std|rms|elapsed)$")  # words for what a run measures
FRACTION = re.compile(r"-?[0-9]+(?:\.[0-9]{2,}(?:e-?[0-9]+)?|ms)")  # no setting has such a value
LINE_CHARACTERS_MAX = 80  # of a line of code that is shown
SAID_ELSEWHERE = {"threads", "world_size"}  # the first changes nothing on GPUs; the second is in the log
SEEDS_MAX = 20  # whose summaries are compared
PATH_SETTINGS = ("path", "dir", "file", "logs")


def check_distinct(folder: Folder) -> Iterator[Finding]:
    """A5: no log twice under two seeds; the seed in a file's name is the seed in the log."""
    digests: dict[str, SeedRun] = {}
    for run in folder.seed_runs:
        path = run.log.path
        if run.named_seed is not None and run.log.seed is not None and run.log.seed != run.named_seed:
            yield fail(
                "A5",
                f"{name_of(path)} is named for seed {run.named_seed}, but says seed {run.log.seed}",
                run.log.where(run.log.settings["seed"].line),
                f"ship the log of seed {run.named_seed}, or make the script read SEED",
            )
        digest = _digest(path)
        if digest in digests:
            other = name_of(digests[digest].log.path)
            yield fail("A5", f"{name_of(path)} is identical to {other}", path.name, LOG_REMEDY)
        digests[digest] = run
    yield from _check_declared_seeds(folder)


def _digest(path: Path) -> str:
    """SHA-256 of what of a log is read, and its size."""
    with path.open("rb") as file:
        return f"{hashlib.sha256(file.read(LOG_BYTES_MAX)).hexdigest()} {path.stat().st_size}"


def _check_declared_seeds(folder: Folder) -> Iterator[Finding]:
    declared = folder.submission.get("seeds")
    if not isinstance(declared, list):
        return
    seeds = {run.seed for run in folder.seed_runs} | {log.seed for log in folder.logs}
    if seeds <= {None}:  # no log says its seed
        return
    for seed in declared:
        if not isinstance(seed, int) or (seed not in seeds and seed not in folder.submitted_seeds()):
            text = f"seed {seed} is declared, but there is no log for it"
            yield warn("A5", text, folder.name, "add its log")


def check_same_code(folder: Folder) -> Iterator[Finding]:
    """A6: every seed ran the same bytes, and those are the bytes shipped."""
    sizes = {}  # of the code as a log prints it: a run that does
    for run in folder.seed_runs:
        if run.log.code_bytes:
            sizes[run.log.code_bytes.bytes] = run
    if len(sizes) > 1:
        text = ", ".join(f"{size:,} bytes in {name_of(run.log.path)}" for size, run in sorted(sizes.items()))
        yield fail(
            "A6", f"the seeds ran different code: {text}", folder.name, "rerun all seeds with one script"
        )
    scripts = folder.training_scripts
    embedded = [run for run in folder.seed_runs if run.log.source is not None]
    for run in embedded:
        yield from _check_embedded(run, scripts)
    if embedded or len(sizes) != 1 or folder.script is None:
        return
    shipped = set()  # as it is, unwrapped, and with the ends of lines of another system
    for script in scripts:
        shipped |= {script.bytes, len(script.text.encode()), len(script.raw.replace(b"\r\n", b"\n"))}
    ((size, run),) = sizes.items()
    count = run.log.code_bytes
    if size not in shipped and count:
        yield fail(
            "A6",
            f"the logs' code has {size:,} bytes, the shipped {name_of(folder.script.path)}"
            f" {folder.script.bytes:,}",
            run.log.where(count.line),
            "ship the file that ran",
        )


def _check_embedded(run: SeedRun, scripts: list[Script]) -> Iterator[Finding]:
    """The source at the head of a log is a shipped script; blank lines and comments do not count."""
    ran = _code_lines(run.log.source or "")
    shipped = {script.path: _code_lines(script.text) for script in scripts}
    if not scripts or ran in shipped.values():
        return
    nearest = max(scripts, key=lambda script: len(set(ran) & set(shipped[script.path])))
    only_ran, only_shipped = Counter(ran), Counter(shipped[nearest.path])
    changed = (only_ran - only_shipped).total() + (only_shipped - only_ran).total()
    first = next(
        (old or new for old, new in itertools.zip_longest(ran, shipped[nearest.path]) if old != new), ""
    )
    yield fail(
        "A6",
        f"{name_of(run.log.path)} holds a source that differs from {name_of(nearest.path)} in {changed}"
        f" lines, first at `{first.strip()[:LINE_CHARACTERS_MAX]}`",
        name_of(run.log.path),
        "ship the file that ran",
    )


def _code_lines(text: str) -> list[str]:
    """The lines of a script without spaces at their ends, blank lines, and lines that are comments."""
    lines = [line.rstrip() for line in text.splitlines()]
    return [line for line in lines if line and not line.lstrip().startswith("#")]


def check_same_config(folder: Folder) -> Iterator[Finding]:
    """A6: the settings that the logs print are equal but for the seed and paths."""
    runs = folder.seed_runs
    if len(runs) < 2:
        return
    reference = runs[0]
    for run in runs[1:]:
        for key, located in run.log.settings.items():
            first = reference.log.settings.get(key)
            if first is None or first.value == located.value or _may_differ(key, first.value, located.value):
                continue
            if MEASURED.search(key) and FRACTION.fullmatch(first.value) and FRACTION.fullmatch(located.value):
                continue
            yield fail(
                "A6",
                f"`{key}` is {first.value} in {name_of(reference.log.path)},"
                f" {located.value} in {name_of(run.log.path)}",
                run.log.where(located.line),
                "a record is several seeds of one configuration (#2124)",
            )


def check_same_place(folder: Folder) -> Iterator[Finding]:
    """A6: the summaries of our runs name one hardware, one torch and the same data."""
    said = {}
    for seed, summary in sorted(folder.summaries.items()):
        said[seed] = {**conditions_of(summary), **data_of(summary)}
    for (seed, first), (other, second) in itertools.islice(itertools.pairwise(said.items()), SEEDS_MAX):
        for name in sorted(first.keys() & second.keys() - SAID_ELSEWHERE):
            if first[name] != second[name]:
                values = [value[:LINE_CHARACTERS_MAX] for value in (first[name], second[name])]
                yield fail(
                    "A6",
                    f"`{name}` is {values[0]} with seed {seed}, and {values[1]} with seed {other}",
                    SUMMARY_NAME.format(seed=other),
                    "a record is several seeds of one configuration (#2124)",
                )


def _may_differ(key: str, first: str, second: str) -> bool:
    """Names of places and per-process values; not options."""
    return key in PER_SEED_SETTINGS or key.endswith(PATH_SETTINGS) or "/" in first + second


def check_complete(folder: Folder) -> Iterator[Finding]:
    """C10: every seed's log reaches a final metric."""
    for run in folder.seed_runs:
        if run.log.headline is None:
            yield fail(
                "C10",
                f"{name_of(run.log.path)} ends before a final metric",
                run.log.where(run.log.lines),
                "ship the complete log, or leave the run out",
            )


def check_first_losses(folder: Folder) -> Iterator[Finding]:
    """A5: different seeds begin with different losses."""
    for first, second in itertools.combinations(folder.seed_runs, 2):
        if first.seed is None or second.seed is None or first.seed == second.seed:
            continue
        pairs = list(itertools.islice(zip(first.log.train, second.log.train, strict=False), FIRST_LOSSES))
        equal = all(one.step == two.step and one.loss_text == two.loss_text for one, two in pairs)
        exact = all(decimals(one.loss_text) >= LOSS_DECIMALS_MIN for one, _ in pairs)
        if len(pairs) == FIRST_LOSSES and equal and exact:
            losses = ", ".join(one.loss_text for one, _ in pairs)
            names = " and ".join(f"{name_of(run.log.path)} (seed {run.seed})" for run in (first, second))
            yield fail(
                "A5",
                f"the first {FIRST_LOSSES} training losses of {names} are equal ({losses}); expected"
                " different ones, because the seed draws weights and data",
                second.log.where(pairs[0][1].line),
                LOG_REMEDY,
            )


def check_one_text(folder: Folder) -> Iterator[Finding]:
    """C1: what follows from the validation text is equal in all seeds: counts, batches, bytes per token."""
    for first, second in itertools.combinations(folder.seed_runs, 2):
        names = f"{name_of(first.log.path)}, {name_of(second.log.path)}"
        for what, (one, two) in _facts(first.log, second.log).items():
            if one.value != two.value:
                text = f"{what}: {one.value} and {two.value} in {names}; the same text has one"
                yield fail("C1", text, second.log.where(two.line), LOG_REMEDY)
                break
        common = [batch for batch in first.log.batches if batch in second.log.batches]
        apart = [b for b in common if first.log.batches[b].value != second.log.batches[b].value]
        if apart:
            one, two = first.log.batches[apart[0]], second.log.batches[apart[0]]
            text = (
                f"the documents of {len(apart)} of {len(common)} common batches have different lengths in"
                f" {names}: {apart[0]} has {one.value} and {two.value}; the same text has one list"
            )
            yield fail("C1", text, second.log.where(two.line), LOG_REMEDY)


def _facts(first: RunLog, second: RunLog) -> dict[str, tuple[Located, Located]]:
    """What both logs say of the text of their scores, by what it is."""
    facts = {}
    others = {final.label: final for final in second.finals}
    for final in first.finals:
        other = others.get(final.label)
        if other is None:
            continue
        for name in ("scored_tokens", "val_bytes"):
            one, two = getattr(final, name), getattr(other, name)
            if one is not None and two is not None:
                facts[f"{name} of `{final.label}`"] = (
                    Located(f"{one:,}", final.line),
                    Located(f"{two:,}", other.line),
                )
    return facts


def check_curves(folder: Folder) -> Iterator[Finding]:
    """A5: training losses and clock of one seed are not those of another, also not moved by a constant."""
    for first, second in itertools.combinations(folder.seed_runs, 2):
        for name, of_first, of_second in (
            ("training losses", _losses(first.log), _losses(second.log)),
            ("clock", _clock(first.log), _clock(second.log)),
        ):
            same, common = _copied(of_first, of_second)
            if same >= COPIED_POINTS_MIN and same >= COPIED_SHARE * common:
                yield fail(
                    "A5",
                    f"the {name} of {name_of(second.log.path)} and {name_of(first.log.path)} agree at"
                    f" {same} of {common} steps except for a constant: one run, not two",
                    second.log.path.name,
                    LOG_REMEDY,
                )


def _losses(log: RunLog) -> dict[int, float]:
    return {point.step: point.loss for point in log.train}


def _clock(log: RunLog) -> dict[int, float]:
    """Milliseconds of training by step, where the log prints more than whole seconds."""
    times = {point.step: point.time_ms for point in log.train if point.time_ms is not None}
    return {step: time for step, time in times.items() if time % 1000}


def _copied(first: dict[int, float], second: dict[int, float]) -> tuple[int, int]:
    """How many common steps have the commonest difference, to four decimals, and how many are common."""
    common = [step for step in first if step in second]
    differences = Counter(round(first[step] - second[step], 4) for step in common)
    return max(differences.values(), default=0), len(common)


def check_labels(folder: Folder) -> Iterator[Finding]:
    """A6: the words of a score's label are in the script that is said to have written it."""
    scripts = folder.training_scripts
    if not scripts or any(not script.text or script.problem for script in scripts):
        return
    texts = [script.text for script in (*scripts, *folder.scripts.values())]
    known = set(re.findall(r"[a-z]+", " ".join(texts).lower()))
    for run in folder.seed_runs:
        for label in dict.fromkeys(final.label for final in run.log.finals if final.rank > 0):
            missing = [word for word in re.findall(r"[a-z]+", label.lower()) if word not in known]
            if missing:
                line = next(final.line for final in run.log.finals if final.label == label)
                text = f"a line `{label}`, but the script has no word `{missing[0]}`: what wrote it?"
                yield warn("A6", text, run.log.where(line), "ship the file that ran")
                break


RULES = (
    check_distinct,
    check_first_losses,
    check_curves,
    check_same_code,
    check_same_config,
    check_same_place,
    check_one_text,
    check_labels,
    check_complete,
)
