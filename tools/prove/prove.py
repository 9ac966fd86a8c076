"""`prove PATH`: dynamic proofs of a legal score; exit status 0 proven, 1 refuted, 2 not checked.

Three processes: this one starts the auditor, the auditor starts the script's (`cell`), both without network.
The auditor asks the script's `evaluate` about tiny streams and has its `main` do whole runs, and judges; its
findings come through a pipe that the script's process has not. Two configurations are proved, the smallest
one and the script's defaults (or --config), shrunk in width, rows and tokens alone. Honest scores pass; every
mutant must be killed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from data.files import sha256_file
from tools.check.findings import Finding, Level, Mode, fail, info, warn
from tools.prove import network, walls
from tools.runs.errors import RecordError
from tools.runs.source import read_script
from tools.runs.writing import print_json

if TYPE_CHECKING:
    from tools.prove import cell

SECONDS_MAX = 1800  # of the clock: a machine may be busy
PROVEN, REFUTED, UNCHECKED = range(3)  # exit statuses
RANKS = (2, 3, 8)
PROOFS = {
    "B1": "future independence", "B2": "normalisation", "B3": "coverage", "B4": "write-once scores",
    "B5": "score before update", "B6": "weights", "B7": "inert warm-up", "B8": "data kept apart",
    "B9": "document isolation", "B10": "byte table", "B11": "tokenizer round trip", "B12": "artifact",
    "B13": "rank invariance", "B14": "determinism", "B15": "no network", "B16": "mutants",
    "B17": "full size", "B18": "execution", "B19": "the auditor untouched",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, nargs="?", metavar="PATH", help="a train_gpt.py")
    parser.add_argument(
        "--replay", type=Path, metavar="FOLDER", help="score documents of a run again: a run directory"
    )
    parser.add_argument("--documents", type=int, default=8, metavar="N", help="for --replay: how many")
    parser.add_argument("--config", type=Path, metavar="FILE", help="prove these settings, not the defaults")
    parser.add_argument("--adapter", type=Path, metavar="FILE", help="for a script of another kind: README")
    parser.add_argument("--seed", type=int, default=0, help="of the tiny model and stream")
    parser.add_argument(
        "--quick", action="store_true", help="flips and Kraft sums at the edges only, no whole run"
    )
    parser.add_argument(
        "--only", type=checks_in, metavar="B5,B9",
        help="only these checks, and what they need; no verdict. With --self-test: their mutants alone",
    )  # fmt: skip
    parser.add_argument(
        "--branches", action="store_true",
        help="list what on the path to a score reads sizes, counts, devices, places or time; run nothing",
    )  # fmt: skip
    parser.add_argument(
        "--self-test", action="store_true", help="try all mutants and legal changes of this script; minutes"
    )
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="of --self-test; 0: all cores")
    parser.add_argument("--full-size", action="store_true", help="ask a little at full size too; minutes")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")


def checks_in(text: str) -> list[str]:
    """The checks in the text of an option. ValueError for one that there is not."""
    checks = text.upper().split(",")
    unknown = [check for check in checks if check not in PROOFS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no check {unknown[0]}; there are {' '.join(PROOFS)}")
    return checks


def run(args: argparse.Namespace) -> int:
    if (args.script is None) == (args.replay is None):
        raise RecordError("name a train_gpt.py, or --replay with a run directory")
    if args.replay is not None:
        return _replay(args)
    path = args.script.resolve()
    if not path.is_file():
        raise RecordError(f"{args.script}: no such file; name a train_gpt.py")
    if args.branches:
        return _list_branches(path)
    for name in ("config", "adapter"):
        given = getattr(args, name)
        if given is not None and not given.is_file():
            raise RecordError(f"--{name} {given}: no such file")
    if args.self_test:
        return _self_test(path, args)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        order = Order.of_arguments(args, path)
        findings = _in_own_process(order, Path(folder))
    status = exit_status(findings)
    if args.json:
        listed = [finding.as_json(Mode.AGREED) for finding in findings]
        report = {"script": str(args.script), "sha256": sha256_file(path), "status": status}
        print_json({**report, "verdict": verdict(findings), "findings": listed})
    else:
        print(render(findings))
        seconds = time.monotonic() - started
        print(f"{args.script}: {verdict(findings)}; {len(findings)} results in {seconds:.0f} s")
    return status


def _list_branches(path: Path) -> int:
    """Print every condition of the path to a score that may be otherwise in a run than in a proof."""
    from tools.prove.execution import branches_that_read

    try:
        branches = branches_that_read(path)
    except (SyntaxError, ValueError) as error:
        said = f"{path}: no source in Python ({error}); of a wrapped script, name its source"
        raise RecordError(said) from error
    for line, reads, condition in branches:
        print(f"{path.name}:{line}: {condition}  [{reads}]")
    return PROVEN


def _self_test(path: Path, args: argparse.Namespace) -> int:
    """Print what became of every mutant and legal change; REFUTED if one did not end as it should."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        order = Order(str(path), only=args.only or [], workers=args.workers)
        findings = _in_own_process(order, Path(folder), "self-test")
    status = exit_status(findings)
    wrong = sum(finding.level(Mode.AGREED) is Level.FAIL for finding in findings)
    words = {
        PROVEN: "every mutant is killed, no legal change is",
        REFUTED: "the audit is blind",
        UNCHECKED: "not all could be tried",
    }[status]
    print(f"{render(findings)}\n{path.name}: {len(findings)} tried, {wrong} ended otherwise than they "
          f"should, in {time.monotonic() - started:.0f} s: {words}")  # fmt: skip
    return status


def _replay(args: argparse.Namespace) -> int:
    """Print what a folder's documents are when they are scored again; exit status REFUTED if they differ."""
    if not args.replay.is_dir():
        raise RecordError(f"--replay {args.replay}: no such folder")
    with tempfile.TemporaryDirectory() as folder:
        data = {key: os.environ[key] for key in ("DATA_PATH", "TOKENIZER_PATH") if os.environ.get(key)}
        order = Order(str(args.replay.resolve()), args.seed, settings=data, documents=args.documents)
        findings = _in_own_process(order, Path(folder), "replay")
    differs = exit_status(findings)
    words = {PROVEN: "the run is repeated", REFUTED: "differs", UNCHECKED: "not all could be repeated"}[
        differs
    ]
    if args.json:
        listed = [finding.as_json(Mode.AGREED) for finding in findings]
        print_json({"folder": str(args.replay), "status": differs, "findings": listed})
    else:
        print(f"{render(findings)}\n{args.replay}: {words}")
    return differs


@dataclasses.dataclass(frozen=True)
class Order:
    """What a worker is to do; its fields are what JSON can hold.

    settings: of a CONFIG file and of the environment; None: the script's defaults. only: the checks that are
    asked for; none: all.
    """

    path: str
    seed: int = 0
    quick: bool = False
    full_size: bool = False
    settings: dict[str, str] | None = None
    settings_name: str = "defaults"
    adapter: str = ""
    only: list[str] = dataclasses.field(default_factory=list)
    documents: int = 0  # to be scored again, of a run directory
    workers: int = 0  # of a self-test; 0: as many as there are cores

    def wants(self, *checks: str) -> bool:
        """Whether one of these checks is asked for; what is run is asked for with all checks, too."""
        return not self.only or "B18" in self.only or bool(set(checks) & set(self.only))

    @staticmethod
    def of_arguments(args: argparse.Namespace, path: Path) -> Order:
        """The order that a command line gives; with --config the environment's settings count as well."""
        settings = None
        name = "defaults"
        if args.config is not None:
            settings = {**settings_around(path), "CONFIG": str(args.config.resolve())}
            name = args.config.name
        adapter = str(args.adapter.resolve()) if args.adapter is not None else ""
        only = args.only or []
        return Order(str(path), args.seed, args.quick, args.full_size, settings, name, adapter, only)


def settings_around(path: Path) -> dict[str, str]:
    """The variables of the environment that the script may know: those whose name its text has."""
    words = set(re.findall(r"[a-z_0-9]+", read_script(path).text.lower()))
    return {name: value for name, value in os.environ.items() if name.lower() in words}


def exit_status(findings: list[Finding]) -> int:
    """PROVEN, REFUTED or UNCHECKED."""
    if any(finding.level(Mode.AGREED) is Level.FAIL for finding in findings):
        return REFUTED
    if any(finding.text.startswith("not checked") for finding in findings):
        return UNCHECKED
    return PROVEN


def verdict(findings: list[Finding]) -> str:
    """The exit status in words; a quick audit is no proof, and says what it left out."""
    status = exit_status(findings)
    if status == REFUTED:
        return "refuted"
    if status == UNCHECKED:
        checks = sorted({f.check for f in findings if f.text.startswith("not checked")}, key=_number)
        return f"not proven: not all could be checked ({', '.join(checks)})"
    checked = {finding.check for finding in findings}
    not_run = [f"{check} ({what})" for check, what in PROOFS.items() if check not in checked]
    if not_run == ["B17 (full size)"]:
        return "proven, in shrunk sizes; not asked at full size (--full-size)"
    if not_run:
        return f"not refuted; not run: {', '.join(not_run)}"
    return "proven"


def _number(check: str) -> int:
    return int(check[1:])


def render(findings: list[Finding]) -> str:
    """One line per result, those that fail with evidence and what to do."""
    names = {Level.INFO: "pass", Level.WARN: "WARN", Level.FAIL: "FAIL"}
    lines = []
    for finding in findings:
        level = finding.level(Mode.AGREED)
        name = "note" if finding.check == NOTE else names[level]
        lines.append(f"  {name} {finding.check:3} {finding.text}  [{finding.where}]")
        if level is not Level.INFO:
            lines.append(f"           -> {finding.remedy}")
    return "\n".join(lines)


NOTE = "B0"  # what a proof is about: no result


# ======================================================================================================
# PROCESSES
# ======================================================================================================


def _in_own_process(order: Order, folder: Path, what: str = "prove") -> list[Finding]:
    """The findings of an auditor's process; what ends it is a finding too.

    They come through a pipe that only the auditor has, with a number that only it was told: the script's
    process has neither.
    """
    nonce = secrets.token_hex(32)
    task = json.dumps(
        {"nonce": nonce, "order": dataclasses.asdict(order), "folder": str(folder), "what": what}
    )
    findings_end, auditors_end = os.pipe()
    command = [sys.executable, "-B", "-m", "tools.prove.prove", str(auditors_end)]
    last = f"no end within {SECONDS_MAX} s"
    with (folder / "messages").open("wb+") as messages, os.fdopen(findings_end, "rb") as findings_file:
        with subprocess.Popen(
            [*network.namespace_command(), *command], stdin=subprocess.PIPE, stdout=messages,
            stderr=None if what == "self-test" else messages,  # it prints what it has tried
            pass_fds=(auditors_end,), env={**_home(), **walls.environment()},
        ) as process:  # fmt: skip
            os.close(auditors_end)
            longer = 4 if what == "self-test" else 2 if order.full_size else 1
            watch = threading.Timer(SECONDS_MAX * longer, process.kill)
            watch.start()
            with contextlib.suppress(BrokenPipeError):
                process.communicate(task.encode())
            ended = watch.is_alive()
            watch.cancel()
        if ended:
            messages.seek(0)
            lines = messages.read().decode("utf-8", "replace").strip().splitlines()
            last = (lines or ["no message"])[-1]
        answer = findings_file.read()
    try:
        told, stored = json.loads(answer)
    except ValueError:
        told, stored = "", []
    if not secrets.compare_digest(told, nonce):
        return not_checked(Path(order.path), f"the auditor's process ended early: {last}")
    findings = []
    for one in stored:
        levels = {reading: Level(one[reading]) for reading in ("written", "practised")}
        findings.append(Finding(**{**one, **levels}))
    return findings


def _home() -> dict[str, str]:
    """Where the auditor may write: the script's process has a folder of its own."""
    return {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}


def not_checked(path: Path, why: str) -> list[Finding]:
    """A warning per proof that could not be run."""
    remedy = (
        "offer Config.from_env, build_model, Ledger, Validation, evaluate and token_bytes, or an --adapter"
    )
    return [warn(check, f"not checked ({what}): {why}", path.name, remedy) for check, what in PROOFS.items()]


# ======================================================================================================
# PROOFS
# ======================================================================================================


def proofs(
    script: ModuleType, folder: Path, order: Order, self_test: bool = True, thorough: bool = True
) -> Iterator[Finding]:
    """All findings about a script that offers the entry point. thorough: as in `scoring`."""
    from tools.prove import casing, elsewhere, probes, questions, rehearsal, tiny

    whole = probes_config(script, order)
    settings, shrunk = tiny.shrink(whole, tiny.FOR_SCORER)
    configured = probes.subject_of(script, settings, order.seed, order.settings_name)
    smallest = probes.make_subject(script, order.seed)
    yield info(NOTE, f"shrunk for the streams: {'; '.join(shrunk)}", configured.name)
    yield info(NOTE, f"not exercised: {tiny.NOT_EXERCISED}", configured.name)
    off = " ".join(tiny.switched_off(whole))
    yield info(NOTE, f"not exercised, as these settings are 0: {off}", configured.name)
    subjects = [smallest, configured]
    if hasattr(whole, "ttt_mode"):  # a second way of test-time training
        subjects.append(probes.make_subject(script, order.seed, "tiny, documents", **tiny.LORA))
    for subject in subjects:
        if order.wants("B1", "B2", "B3", "B4", "B5", "B6", "B9", "B14"):
            yield from scoring(subject, thorough and not order.quick and subject is not configured, order)
        if order.wants("B7") and subject is not configured:
            yield from probes.evaluation_warmup(subject)
            yield from elsewhere.same_as_on_gpu(subject)
    if not order.quick and order.wants("B1", "B2", "B3", "B4", "B5", "B6", "B9", "B14"):
        others = {
            "other features": tiny.OTHER,
            "lanes and a loop": tiny.LANES,
            "adapters of the head": tiny.HEAD_ALONE,
        }
        for name, more in others.items():
            other = probes.make_subject(script, order.seed, name, **tiny.known(whole, more))
            yield from probes.ledger_order(other)
            yield from questions.future(other.case(), [60], [35])
    if order.wants("B1", "B2") and not order.quick:
        yield from long_text(script, order.seed)
    if order.wants("B2"):
        yield whole_vocabulary(script, whole, order.seed)
    for subject in subjects[2:]:
        if order.wants("B1", "B5"):
            yield from probes.clock_alone(subject)
    if not order.quick and order.wants("B13"):
        yield from rank_invariance(smallest, folder, *subjects[1:])
    runs = not order.quick and order.wants("B3", "B4", "B7", "B8", "B10", "B12", "B14")
    if runs or order.wants("B10", "B11"):
        laboratory_folder = folder / "laboratory"
        laboratory_folder.mkdir()
        laboratory = rehearsal.build_laboratory(laboratory_folder)
        yield from byte_tables(smallest, laboratory)
        yield from casing.case_bytes(smallest, laboratory_folder)
        if runs:
            yield from whole_runs(script, laboratory, whole, order.settings_name)
    if self_test and not order.quick and (not order.only or "B16" in order.only):
        yield from surviving_mutants(Path(order.path), folder)
    if order.full_size:
        from tools.prove.full_size import full_size

        yield from full_size(script, whole.as_env(), order.seed)


def long_text(script: ModuleType, seed: int, ways: Sequence[str] = ("sgd", "lora")) -> Iterator[Finding]:
    """B1 and B2 late in a text of one long document and many short ones; of few ids, so that it is quick.

    ways: of test-time training.
    """
    from tools.prove import probes, questions, tiny

    for way in ways:
        settings = tiny.LORA if way == "lora" else {}
        subject = probes.make_subject(script, seed, f"long text, {way}", VOCAB_SIZE=tiny.FEW, **settings)
        case = subject.case(tokens=probes.long_tokens(subject))
        sums = questions.kraft(case, probes.LATE_TARGETS)
        moves = questions.future(case, [probes.LONG_DOCUMENT - 1], [400])
        for finding in itertools.chain(sums, moves):  # one after the other: a caller may stop at the first
            yield dataclasses.replace(finding, where=f"{subject.name}: {finding.where}")


def whole_vocabulary(script: ModuleType, config: Any, seed: int) -> Finding:
    """B2: over as many ids as a run has the probabilities sum to one, too."""
    from tools.prove import full_size, probes

    size = str(config.vocab_size)
    subject = probes.make_subject(script, seed, f"tiny, {size} ids", VOCAB_SIZE=size)
    _, found = full_size.kraft_at_full_size(subject, subject.model(), full_size.POSITIONS_OF_TINY)
    return dataclasses.replace(found, check="B2", where=subject.name)


def byte_tables(subject: Any, laboratory: Any) -> Iterator[Finding]:
    """B10 and B11 with both tokenizers of a laboratory, and B10 with many pieces."""
    import sentencepiece

    from tools.prove import probes, rehearsal

    tokenizer = str(laboratory.tokenizer)
    texts = rehearsal.TEXTS
    yield from probes.byte_table(subject, tokenizer, texts, laboratory.pieces)
    config = probes.with_tokenizer(subject.config, tokenizer, laboratory.pieces.vocab_size())
    yield probes.round_trip(subject, config, texts, laboratory.pieces)
    spaced = sentencepiece.SentencePieceProcessor(model_file=str(laboratory.spaced))
    yield from probes.byte_table(subject, str(laboratory.spaced), texts, spaced)
    many = laboratory.folder / "many"
    many.mkdir(exist_ok=True)
    yield from probes.many_ids(subject, many)


def scoring(subject: Any, thorough: bool, order: Order | None = None) -> Iterator[Finding]:
    """What is asked of a subject's `evaluate`, which each finding names; not thorough: at the edges alone.

    order: which checks are asked for; None: all.
    """
    for finding in _scoring(subject, order or Order(""), thorough):
        if finding.where.startswith(subject.name):
            yield finding
        else:
            yield dataclasses.replace(finding, where=f"{subject.name}: {finding.where}")


def _scoring(subject: Any, order: Order, thorough: bool) -> Iterator[Finding]:
    from tools.prove import probes, questions

    case = subject.case()
    edges = [0, subject.config.ttt_chunk_tokens - 1, subject.config.ttt_chunk_tokens, 75]
    sums = probes.kraft_positions(subject) if thorough else [*edges, len(case.tokens) - 2]
    if order.wants("B3", "B4", "B5", "B6"):
        yield from probes.ledger_order(subject)
    if order.wants("B14"):
        yield from questions.repetition(case)
    repeating = dataclasses.replace(case, tokens=questions.repeating(case.tokens))
    repeated: list[Finding] = []
    if order.wants("B2"):
        yield from questions.kraft(case, sums)
        repeated += questions.kraft(repeating, [50, 77, 140] if thorough else [77])
    if order.wants("B1"):
        suffixes = [35, 64, 118] if thorough else [64]
        flips = [20, 60, 140]
        if thorough:  # all tokens; to sum up over a target has changed its token already
            asked = {target + 1 for target in sums} if order.wants("B2") else set()
            flips = [token for token in range(1, len(case.tokens)) if token not in asked]
        yield from questions.future(case, flips, suffixes)
        repeated += questions.future(repeating, [30, 100, 145], [80])
    for finding in repeated:
        yield dataclasses.replace(finding, text=f"{finding.text}; phrases that repeat")
    if order.wants("B9"):
        yield from probes.document_isolation(subject)


def whole_runs(script: ModuleType, laboratory: Any, config: Any, name: str) -> Iterator[Finding]:
    """Runs of the script's `main`, and its artifact alone; then what no such run does here."""
    from tools.prove import rehearsal

    settings, shrunk = rehearsal.settings_for_runs(script, config)
    yield info(NOTE, f"shrunk for whole runs: {'; '.join(shrunk)}", name)
    files = rehearsal.data_files(laboratory)
    first = rehearsal.run_script(script, laboratory, "first", settings, forged=rehearsal.rising)
    yield from rehearsal.data_apart(laboratory, first)
    yield from rehearsal.one_score_each(laboratory, first)
    yield from rehearsal.figures(laboratory, first)
    yield from rehearsal.quantization_felt(script, first)
    yield from rehearsal.artifact_alone(laboratory, first, not network.is_out_of_reach())
    second = rehearsal.run_script(
        script, laboratory, "second", settings, rehearsal.SECOND, forged=rehearsal.falling
    )
    yield from rehearsal.figures(laboratory, second)
    yield from rehearsal.unaware_of_validation(first, second)
    warm = rehearsal.warm_settings(script, settings)
    warmed = rehearsal.run_script(script, laboratory, "warm", warm, forged=rehearsal.rising)
    yield from rehearsal.data_apart(laboratory, warmed)
    yield from rehearsal.one_score_each(laboratory, warmed)
    yield from rehearsal.same_result(first, warmed)
    yield from rehearsal.limited(script, laboratory, settings, first)
    yield from other_run(script, laboratory, config)
    yield from not_done_here(script, laboratory, settings)
    yield rehearsal.data_untouched(laboratory, files)


def other_run(script: ModuleType, laboratory: Any, config: Any) -> Iterator[Finding]:
    """B3, B4, B8, B10 and B13 of a run by two ranks, with features that the defaults have not."""
    from tools.prove import probes, ranks, rehearsal, tiny

    features = dict(tiny.OTHER_RUN)
    # OTHER_RUN leaves the trellis out; a configuration without it gets it here.
    if not getattr(config, "trellis", True):
        features.update(TRELLIS="1", COLUMN_STEPS="0.5")
    subject = probes.make_subject(script, 0, "other features", **tiny.known(config, features))
    settings, _ = rehearsal.settings_for_runs(script, subject.config)
    settings.update(tiny.known(config, tiny.OTHER_WAY))
    folder = Path(tempfile.mkdtemp(prefix="ranks_", dir=laboratory.folder.parent))
    codes, outcomes = ranks.run_together(script, laboratory, folder.name, settings, folder, RANKS[0])
    if any(codes):
        text = f"a whole run by {RANKS[0]} ranks ended with {codes}"
        yield fail("B13", text, "gloo, CPU", "let every rank join every collective")
        return
    for outcome in outcomes:
        yield from rehearsal.data_apart(laboratory, outcome)
        yield from rehearsal.one_score_each(laboratory, outcome)
    yield from rehearsal.figures(laboratory, outcomes[0])
    # Under a limit of time the artifact follows what its run noted: a configuration may have no such notes.
    again = {**settings, "EVAL_ONLY": str(outcomes[0].directory / "model.bin"), "MAX_EVAL_SECONDS": "600"}
    alone = rehearsal.run_script(script, laboratory, f"{folder.name}-alone", again)
    yield ranks.same_scores(alone, outcomes[0])


def not_done_here(script: ModuleType, laboratory: Any, settings: dict[str, str]) -> Iterator[Finding]:
    """B3, B7, B8, B10 and B12 of what no run on a CPU does by itself."""
    from tools.prove import elsewhere, probes, rehearsal

    data = laboratory.data(rehearsal.FIRST)
    for findings in (
        elsewhere.all_end(script, data, laboratory.folder / "ends"),
        elsewhere.same_batches(script, settings, data),
        elsewhere.damped(probes.make_subject(script)),
        elsewhere.same_compiled(script),
    ):
        try:
            yield from findings
        except (AttributeError, KeyError, TypeError, RuntimeError) as error:  # functions of another form
            yield warn("B18", f"not checked: {error}", "what no run on a CPU does", "offer functions as ours")


def rank_invariance(
    subject: Any, folder: Path, *more: Any, numbers: Sequence[int] = RANKS
) -> Iterator[Finding]:
    """B13: several ranks write the ledgers of one. Where one of them aborts, all try once more."""
    from tools.prove import ranks as several

    subjects = [several.in_small_batches(each) for each in (subject, *more)]
    alone = [several.ask(each) for each in subjects]
    for ranks in numbers:
        for attempt in range(2):
            codes, found = several.answers(subjects, folder / f"ranks_{ranks}_{attempt}", ranks)
            if not any(codes):
                break
            yield info("B13", f"{ranks} ranks ended with {codes}, attempt {attempt + 1}", "gloo, CPU")
        if any(codes):
            text = f"{ranks} ranks ended with {codes}, twice"
            yield fail("B13", text, "gloo, CPU", "let every rank join every collective")
            continue
        for number, each in enumerate(subjects):
            yield from several.compare(each, alone[number], [of_rank[number] for of_rank in found])


def surviving_mutants(path: Path, folder: Path) -> Iterator[Finding]:
    """B16: a mutant for each probe of scoring must be refuted by it; the tests do this with all of them."""
    from tools.prove import mutants

    survivors = []
    names = mutants.self_test(path)
    for name in names:
        if not mutants.killed_by(path, name, folder):
            survivors.append(name)
    if survivors:
        text = f"mutants survived: {', '.join(survivors)}"
        yield fail("B16", text, "self-test", "the audit itself is blind")
    else:
        by = ", ".join(f"{name} ({mutants.MUTANTS[name].probe})" for name in names)
        text = f"{len(names)} mutants of this script killed, of {len(mutants.MUTANTS)}: {by}"
        yield info("B16", text, "self-test")


# ======================================================================================================
# THE AUDITOR
# ======================================================================================================


def _work(order: Order, folder: Path) -> list[Finding]:
    """Everything the auditor finds out."""
    path = Path(order.path)
    out_of_reach = network.is_out_of_reach()
    if out_of_reach:
        network.start_loopback()
    try:
        findings, attempts = _checked(order, folder)
    except Exception as error:
        traceback.print_exc()
        findings, attempts = not_checked(path, _place_of(error)), []
    if attempts:
        text = f"tried to reach the network: {attempts[0]}"
        findings.append(fail("B15", text, path.name, "ship all it needs"))
    elif any(finding.check == "B15" for finding in findings):
        pass  # nothing of it was run
    elif out_of_reach:
        text = "no socket was asked for; no network is in reach of the process or its children"
        findings.append(info("B15", text, path.name))
    else:
        text = "not checked for child processes: no network namespace here; this process asked for no socket"
        findings.append(warn("B15", text, path.name, "run it on Linux with user namespaces"))
    # What was not run comes first: the rest is about what was.
    return sorted(findings, key=lambda finding: (finding.check != "B18", _number(finding.check)))


def _checked(order: Order, folder: Path) -> tuple[list[Finding], list[str]]:
    """The proofs of a script that loads and has the names that they need, else what was not checked.

    Also its attempts to reach the network.
    """
    from tools.prove import cell, execution, tiny

    path = Path(order.path)
    keep = [Path(name) for name in (order.adapter, (order.settings or {}).get("CONFIG", "")) if name]
    with cell.Cell(folder, [path, *keep]) as process:
        try:
            script = process.call("open", (path, not order.adapter))
        except cell.CellError as error:
            return not_checked(path, f"it does not load: {error}"), _attempts(process)
        from tools.prove.probes import ENTRY_POINT  # loads torch, which takes as long as the script's process

        missing = [name for name in ENTRY_POINT if not cell.offers(script, name)]
        findings: list[Finding] = []
        ended = True
        if order.adapter:
            from tools.prove import foreign

            findings += foreign.proofs(path, Path(order.adapter), order.seed)
        elif missing:
            return not_checked(path, f"it has no {', '.join(missing)}"), _attempts(process)
        else:
            try:
                for finding in proofs(script, folder, order):
                    findings.append(finding)
            except Exception as error:
                ended = False
                findings.append(_stopped(error, path))
        if ended and not order.adapter and not order.quick and order.wants("B18"):
            executed = execution.Execution(path)
            executed.add(process.call("ran", (script,)))
            for file in folder.glob("ranks_*/ran_*"):
                executed.add(file.read_bytes())
            same = tiny.left_alone(script, probes_config(script, order))
            findings += execution.findings(executed, same)
        findings.append(untouched(process, path))
        if order.only:
            findings = [finding for finding in findings if finding.check in (*order.only, NOTE)]
        return findings, _attempts(process)


def probes_config(script: Any, order: Order) -> Any:
    """The config that is proved."""
    from tools.prove import probes

    return probes.config_of(script, order.settings or {})


def untouched(process: cell.Cell, path: Path) -> Finding:
    """B19: what a script's process may see, and whether the script changed the auditor's code there."""
    from tools.prove import cell

    try:
        changed = process.call("changed")
    except cell.CellError as error:
        return warn("B19", f"not checked: {error}", path.name, "leave the auditor's process alone")
    if changed:
        text = f"the script changed {', '.join(changed[:3])} of the auditor"
        return fail("B19", text, path.name, "leave the auditor alone")
    return info(
        "B19", f"the auditor is as it was, in a process apart; the script's: {process.said}", path.name
    )


def _attempts(process: cell.Cell) -> list[str]:
    """The script's attempts to reach the network, as far as its process still tells."""
    from tools.prove import cell

    try:
        return list(map(str, process.call("refused")))
    except cell.CellError:
        return []


def _place_of(error: Exception) -> str:
    """That the proofs stopped, with the error and its place."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = getattr(error, "where", "") or f"{Path(place.filename).name}:{place.lineno}"
    kind = "" if hasattr(error, "where") else f"{type(error).__name__}: "
    return f"the proofs stopped: {kind}{error} ({where})"


def _stopped(error: Exception, path: Path) -> Finding:
    """What an error says: a score that the script's own ledger refuses is refuted, all else not checked."""
    traceback.print_exc()
    refuses = getattr(error, "kind", "") in ("ValueError", "ScoringError")
    if refuses and getattr(error, "function", "") in ("record", "score", "scored_tokens"):
        return fail("B3", f"the ledger refused: {error}", path.name, "score every target once, in order")
    return warn("B3", f"not checked: {_place_of(error)}", path.name, "see its message")


def _main(arguments: list[str]) -> None:
    """What an auditor does: it reads its task, and writes its findings into the pipe that it was given."""
    task = json.load(sys.stdin)
    order = Order(**task["order"])
    folder = Path(task["folder"])
    os.set_inheritable(int(arguments[0]), False)
    if task["what"] == "replay":
        from tools.prove import replay

        try:
            found = list(
                replay.findings(Path(order.path), order.documents, order.seed, order.settings or {}, folder)
            )
        except Exception as error:  # whatever its files hold
            traceback.print_exc()
            text = f"not checked: {type(error).__name__}: {error}"
            found = [warn(replay.CHECK, text, Path(order.path).name, "see its message")]
    elif task["what"] == "self-test":
        from tools.prove import cell, mutants

        if network.is_out_of_reach():
            network.start_loopback()
        with cell.opened(Path(order.path), folder, [], False, quiet=True):
            workers = order.workers or mutants.workers_here()
            found = []
            for finding in mutants.all_judged(Path(order.path), folder, workers, order.only):
                print(f"{finding.where}: {finding.check} {finding.text}", file=sys.stderr, flush=True)
                found.append(finding)
    else:
        found = _work(order, folder)
    with os.fdopen(int(arguments[0]), "w", encoding="utf-8") as file:
        json.dump([task["nonce"], [dataclasses.asdict(finding) for finding in found]], file)


if __name__ == "__main__":
    _main(sys.argv[1:])
