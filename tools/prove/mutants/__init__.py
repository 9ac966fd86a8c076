"""Scripts that are wrong or illegal on purpose: the proofs must refute every one, or they are blind (B16).

A mutant changes a freshly loaded script in one thing and names the probe that must kill it. `scoring` has
those of scorers, `evaluate` and ledger, `documents` those of adapters that learn from one document, `running`
those of data, bytes, artifact and ranks, `survivors` those of kinds that once passed. `sleeping` has changes
of the text that no proof wakes, so that their lines must be printed. `legal` has changes that no proof may
refute.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tools.check.findings import Finding, Level, Mode, fail
from tools.prove.cell import in_cell, record
from tools.prove.mutants.documents import DOCUMENTS
from tools.prove.mutants.legal import LEGAL, LEGAL_OF_DOCUMENTS, NOT_CHECKED, OF_RANKS
from tools.prove.mutants.running import RUNNING
from tools.prove.mutants.scoring import SCORING
from tools.prove.mutants.sleeping import SLEEPING, with_all
from tools.prove.mutants.survivors import SURVIVORS
from tools.prove.mutants.trial import Mutant
from tools.runs.load import load_script

MUTANTS: dict[str, Mutant] = {**SCORING, **DOCUMENTS, **RUNNING, **SURVIVORS}

LABORATORY = "mutants"
# One for each probe of scoring, quick ones: what every full proof tries on the script that it is given.
SELF_TEST = (
    "learning-rate-picked-in-private",
    "one-token-past-the-chunk",
    "rescore",
    "ledger-takes-overwrites",
    "adapt-then-score",
    "weights-not-restored",
    "warm-up-on-validation",
    "cross-document-smear",
    "double-space-bytes",
    "tokenizer-drops-case",
    "random-scores",
)
# And those of them that need a scorer of documents.
SELF_TEST_OF_DOCUMENTS = ("own-chunk-learned-early", "adapters-kept-from-the-batch-before")


@in_cell
def self_test(path: Path) -> list[str]:
    """What a full proof tries on the script at `path`."""
    names = [*SELF_TEST]
    if hasattr(load_script(path), "DocumentScorer"):
        names += SELF_TEST_OF_DOCUMENTS
    return names


def mutated(path: Path, name: str) -> ModuleType:
    """The script at `path`, loaded afresh and changed: by a mutant, or by a legal change of that name."""
    script = load_script(path)
    legal = {**LEGAL, **LEGAL_OF_DOCUMENTS}
    change = legal[name] if name in legal else MUTANTS[name].change
    change(script)
    return script


def kill(path: Path, name: str, folder: Path) -> Finding | None:
    """What refutes a mutant by the probe that is named for it; None when it survives."""
    mutant = MUTANTS[name]
    script = mutated(path, name)
    try:
        for finding in suspicions(script, path, mutant, name, folder):
            if finding.check == mutant.probe and finding.level(Mode.AGREED) is Level.FAIL:
                return finding
    except (ValueError, IndexError) as error:
        # A ledger that refuses what a script does has refuted it.
        if mutant.probe == "B3":
            text = f"the scorer raised {type(error).__name__}: {error}"
            return fail("B3", text, name, "score every target once")
        raise
    return None


@in_cell
def killed_by(path: Path, name: str, folder: Path) -> str:
    """The text of what refutes a mutant; empty when it survives."""
    killer = kill(path, name, folder)
    return killer.text if killer else ""


def suspicions(script: ModuleType, path: Path, mutant: Mutant, name: str, folder: Path) -> Iterator[Finding]:
    """What the probe named for a mutant finds, the quick questions first."""
    from tools.prove import casing, elsewhere, probes, prove, questions, tiny

    subject = probes.subject_of(script, {**tiny.scorer(script), **mutant.settings}, seed=0)
    case = subject.case()
    if mutant.place == "ranks":
        yield from prove.other_run(script, laboratory_in(folder), script.Config())
    elif mutant.whole_run:
        yield from whole_run(script, mutant, name, folder)
    elif mutant.by_clock:
        yield from probes.clock_alone(subject)
    elif mutant.place == "long text":
        yield from prove.long_text(script, 0, [mutant.settings.get("TTT_MODE", "sgd")])
    elif mutant.place == "vocabulary":
        yield prove.whole_vocabulary(script, script.Config(), 0)
    elif mutant.place == "elsewhere":
        settings = {**tiny.scorer(script), "VOCAB_SIZE": str(tiny.FOR_RUN.vocabulary)}
        yield from prove.not_done_here(script, laboratory_in(folder), settings)
    elif mutant.place == "many ids":
        yield from probes.many_ids(subject, Path(tempfile.mkdtemp(dir=folder)))
    elif mutant.probe == "B1":
        yield from questions.future(case, [20, 60, 140], [64, 35, 118])
        repeats = subject.case(tokens=questions.repeating(case.tokens))
        yield from questions.future(repeats, [100], [80])
    elif mutant.probe == "B2":
        chunk = subject.config.ttt_chunk_tokens
        yield from questions.kraft(case, [0, 15, chunk, 2 * chunk, 70], and_changes=False)
        repeats = subject.case(tokens=questions.repeating(case.tokens))
        yield from questions.kraft(repeats, [77], and_changes=False)
    elif mutant.probe in ("B3", "B4", "B5", "B6"):
        yield from probes.ledger_order(subject)
    elif mutant.probe == "B7":
        yield from probes.evaluation_warmup(subject)
        yield from elsewhere.same_as_on_gpu(subject)
    elif mutant.probe == "B9":
        yield from probes.document_isolation(subject)
    elif mutant.probe in ("B10", "B11"):
        laboratory = laboratory_in(folder)
        yield from byte_table(subject, laboratory)
        yield from casing.case_bytes(subject, laboratory.folder)
    elif mutant.probe == "B13":
        yield from prove.rank_invariance(subject, Path(tempfile.mkdtemp(dir=folder)))
    elif mutant.probe == "B14":
        yield from questions.repetition(case)


def laboratory_in(folder: Path) -> Any:
    """The laboratory of all mutants, built when the first one needs it."""
    from tools.prove import rehearsal

    place = folder / LABORATORY
    if not place.is_dir():
        place.mkdir()
        rehearsal.build_laboratory(place)
    return rehearsal.open_laboratory(place)


def byte_table(subject: Any, laboratory: Any) -> Iterator[Finding]:
    """B10 and B11 with the laboratory's tokenizers."""
    from tools.prove import prove

    return prove.byte_tables(subject, laboratory)


def whole_run(script: ModuleType, mutant: Mutant, name: str, folder: Path) -> Iterator[Finding]:
    """Runs of a mutated `main`: as many as the probe needs."""
    from tools.prove import probes, rehearsal

    laboratory = laboratory_in(folder)
    config = probes.make_subject(script).config
    settings, _ = rehearsal.settings_for_runs(script, config)
    files = rehearsal.data_files(laboratory)
    first = rehearsal.run_script(script, laboratory, f"{name}-1", settings, forged=rehearsal.rising)
    yield from rehearsal.data_apart(laboratory, first)
    yield from rehearsal.one_score_each(laboratory, first)
    yield from rehearsal.figures(laboratory, first)
    if mutant.probe == "B12":
        yield from rehearsal.artifact_alone(laboratory, first, True)
        yield rehearsal.data_untouched(laboratory, files)
    if mutant.probe == "B4":
        yield from rehearsal.limited(script, laboratory, settings, first)
    if mutant.probe in ("B8", "B10") and mutant.place != "warm":
        second = rehearsal.run_script(
            script, laboratory, f"{name}-2", settings, rehearsal.SECOND, forged=rehearsal.falling
        )
        yield from rehearsal.figures(laboratory, second)
        yield from rehearsal.unaware_of_validation(first, second)
    if mutant.probe in ("B7", "B14") or mutant.place == "warm":
        warm = rehearsal.warm_settings(script, settings)
        warmed = rehearsal.run_script(script, laboratory, f"{name}-3", warm, forged=rehearsal.rising)
        yield from rehearsal.data_apart(laboratory, warmed)
        yield from rehearsal.one_score_each(laboratory, warmed)
        yield from rehearsal.same_result(first, warmed)


# ======================================================================================================
# ALL OF THEM, side by side
# ======================================================================================================


@record
class Tried(NamedTuple):
    """What became of a mutant or of a legal change. by: the check that refutes it; empty: none does."""

    name: str
    by: str
    text: str
    seconds: float  # of a processor
    legal: bool = False


def asked(subject: Any, targets: list[int]) -> Iterator[Finding]:
    """A question of each kind, of all labels; those of B2 at these targets."""
    from tools.prove import probes, questions

    case = subject.case()
    yield from probes.ledger_order(subject)
    yield from questions.repetition(case)
    yield from questions.kraft(case, targets)
    yield from questions.future(case, [60], [64])


def asked_of_legal(path: Path, name: str, folder: Path) -> Iterator[Finding]:
    """Questions for a legal change."""
    from tools.prove import elsewhere, probes, prove, tiny

    script = mutated(path, name)
    settings = {**tiny.scorer(script), **(tiny.LORA if name in LEGAL_OF_DOCUMENTS else {})}
    subject = probes.subject_of(script, settings, 0)
    yield from asked(subject, [0, 32])
    yield from elsewhere.same_as_on_gpu(subject)
    if name in LEGAL_OF_DOCUMENTS:
        yield from probes.document_isolation(subject)
    if name in OF_RANKS:
        yield from prove.rank_invariance(subject, Path(tempfile.mkdtemp(dir=folder)))


def tried(path: Path, name: str, folder: Path) -> list[Tried]:
    """What became of one of them, or of all that sleep."""
    began = time.process_time()
    own = Path(tempfile.mkdtemp(dir=folder))
    try:
        if name == SLEEPERS:
            return asleep(path, own)
        if name in MUTANTS:
            # Its own: while an artifact is scored alone its laboratory is hidden.
            if MUTANTS[name].whole_run or MUTANTS[name].probe in ("B10", "B11"):
                shutil.copytree(laboratory_in(folder).folder, own / LABORATORY)
            killer = kill(path, name, own)
        else:
            failures = (f for f in asked_of_legal(path, name, own) if f.level(Mode.AGREED) is Level.FAIL)
            killer = next(failures, None)
    except Exception as error:
        traceback.print_exc()
        killer = fail("error", f"{type(error).__name__}: {error}", name, "")
    seconds = time.process_time() - began
    legal = name not in MUTANTS
    return [Tried(name, killer.check if killer else "", killer.text if killer else "", seconds, legal)]


SLEEPERS = "all that sleep"


def asleep(path: Path, folder: Path) -> list[Tried]:
    """Whether the line of each sleeping change is printed: a whole proof of a script with all of them."""
    from tools.prove import execution, prove, tiny

    began = time.process_time()
    changed = folder / path.name
    changed.write_text(with_all(path.read_text(encoding="utf-8")), encoding="utf-8")
    executed = execution.Execution(changed)
    script = executed.load()
    refuted = ""
    # A few targets are enough: which branches run depends on the places that are asked, not on their number.
    for finding in prove.proofs(script, folder, prove.Order(str(changed)), self_test=False, thorough=False):
        if finding.level(Mode.AGREED) is Level.FAIL:
            refuted = f"{finding.check} {finding.text}"
    executed.add(bytes(vars(script)[execution.MARKS]))
    for file in folder.glob("ranks_*/ran_*"):
        executed.add(file.read_bytes())
    printed = [f.text for f in execution.findings(executed, tiny.left_alone(script, script.Config()))]
    seconds = (time.process_time() - began) / len(SLEEPING)
    found = []
    for name, sleeper in SLEEPING.items():
        lines = [text for text in printed if text.startswith("not checked") and sleeper.line in text]
        found.append(Tried(name, "B18" if lines else "", (lines or [refuted])[0], seconds))
    return found


class Trials:
    """All mutants and legal changes under trial, in the script's process, side by side in others."""

    def __init__(self, path: Path, folder: Path, workers: int, only: list[str]) -> None:
        from tools.prove import casing

        laboratory = laboratory_in(folder)
        for variant in (casing.CASEOPS, casing.CASEOPS_FUSED):
            casing.case_data(laboratory.folder, variant)
        names = sorted((n for n in MUTANTS if not only or MUTANTS[n].probe in only), key=_longest_first)
        if not only or "B18" in only:
            names.insert(0, SLEEPERS)
        if not only:
            names += [name for name in (*LEGAL, *LEGAL_OF_DOCUMENTS) if name not in NOT_CHECKED]
        # Copies of this process: loading torch once more takes longer than most of their work.
        self.pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))
        self.pending = as_completed([self.pool.submit(tried, path, name, folder) for name in names])

    def more(self) -> list[Tried]:
        """What has ended next; nothing once all has."""
        ended = next(self.pending, None)
        return [] if ended is None else ended.result()


@in_cell
def begun_trials(path: Path, folder: Path, workers: int, only: list[str]) -> Trials:
    """All trials begin; only: those of mutants for these checks."""
    return Trials(path, folder, workers, only)


@in_cell
def next_tried(trials: Trials) -> list[Tried]:
    """`Trials.more`, asked from outside."""
    return trials.more()


def all_judged(path: Path, folder: Path, workers: int, only: list[str]) -> Iterator[Finding]:
    """A finding for each, as they end."""
    trials = begun_trials(path, folder, workers, only)
    while ended := next_tried(trials):
        yield from judged(ended)


def _longest_first(name: str) -> tuple[bool, bool]:
    mutant = MUTANTS[name]
    return not mutant.whole_run, mutant.probe != "B13"


def workers_here() -> int:
    """As many as there are processors for us."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def judged(all_of: list[Tried]) -> Iterator[Finding]:
    """A finding for each: a mutant must be refuted by the check that is named for it, a legal change not."""
    from tools.check.findings import info

    for one in all_of:
        text = f"{one.seconds:.0f} s: {one.text}"
        if one.legal:
            made = fail("legal", f"refuted by {one.by}: {text}", one.name, "mend the probe") if one.by else \
                info("legal", f"not refuted, {one.seconds:.0f} s", one.name)  # fmt: skip
        else:
            expected = MUTANTS[one.name].probe if one.name in MUTANTS else "B18"
            made = info(one.by, text, one.name)
            if one.by != expected:
                made = fail(expected, f"survived: {one.by} {text}", one.name, "the audit itself is blind")
        yield dataclasses.replace(made)
