"""Scripts that are wrong or illegal on purpose: the proofs must refute every one, or they are blind (B16).

A mutant changes a freshly loaded script in one thing and names the probe that must kill it. `scoring` has
those of scorers, `evaluate` and ledger, `documents` those of adapters that learn from one document, `running`
those of data, bytes, artifact and ranks. `legal` has changes that no proof may refute.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.check.findings import Finding, Level, Mode, fail
from tools.prove.cell import in_cell
from tools.prove.mutants.documents import DOCUMENTS
from tools.prove.mutants.legal import LEGAL, LEGAL_OF_DOCUMENTS
from tools.prove.mutants.running import RUNNING
from tools.prove.mutants.scoring import SCORING
from tools.prove.mutants.trial import Mutant
from tools.runs.load import load_script

MUTANTS: dict[str, Mutant] = {**SCORING, **DOCUMENTS, **RUNNING}

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


def suspicions(
    script: ModuleType, path: Path, mutant: Mutant, name: str, folder: Path
) -> Iterator[Finding]:
    """What the probe named for a mutant finds, the quick questions first."""
    from tools.prove import casing, probes, prove, questions, tiny

    subject = probes.subject_of(script, {**tiny.scorer(script), **mutant.settings}, seed=0)
    case = subject.case()
    if mutant.whole_run:
        yield from whole_run(script, mutant, name, folder)
    elif mutant.by_clock:
        yield from probes.clock_alone(subject)
    elif mutant.probe == "B1":
        yield from questions.future(case, [20, 60, 140], [64, 35, 118])
        repeats = subject.case(tokens=questions.repeating(case.tokens))
        yield from questions.future(repeats, [100], [80])
    elif mutant.probe == "B2":
        chunk = subject.config.ttt_chunk_tokens
        yield from questions.kraft(case, [0, 15, chunk, 70], and_changes=False)
        repeats = subject.case(tokens=questions.repeating(case.tokens))
        yield from questions.kraft(repeats, [77], and_changes=False)
    elif mutant.probe in ("B3", "B4", "B5", "B6"):
        yield from probes.ledger_order(subject)
    elif mutant.probe == "B7":
        yield from probes.evaluation_warmup(subject)
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

    place = folder / "mutants"
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
    first = rehearsal.run_script(script, laboratory, f"{name}-1", settings, forged=rehearsal.rising)
    yield from rehearsal.data_apart(laboratory, first)
    yield from rehearsal.one_score_each(laboratory, first)
    yield from rehearsal.figures(laboratory, first)
    if mutant.probe == "B12":
        yield from rehearsal.artifact_alone(laboratory, first, True)
    if mutant.probe in ("B8", "B10"):
        second = rehearsal.run_script(
            script, laboratory, f"{name}-2", settings, rehearsal.SECOND, forged=rehearsal.falling
        )
        yield from rehearsal.figures(laboratory, second)
        yield from rehearsal.unaware_of_validation(first, second)
    if mutant.probe in ("B7", "B14"):
        warm = rehearsal.warm_settings(script, settings)
        warmed = rehearsal.run_script(script, laboratory, f"{name}-3", warm, forged=rehearsal.rising)
        yield from rehearsal.data_apart(laboratory, warmed)
        yield from rehearsal.one_score_each(laboratory, warmed)
        yield from rehearsal.same_result(first, warmed)
