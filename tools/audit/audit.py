"""`prove SCRIPT`: try to refute a script's scores by experiment. `prove --replay RUN` scores a run again.

The script's own `main` runs in a sandbox, and its answers are the files it writes. The laws: no score depends
on a later token; probabilities sum to one; every reported number is the sum of one ledger over the bytes that
the auditor counts; the artifact knows nothing about the validation text, and scoring knows nothing but the
artifact; ranks, compiled code and clocks change no score.

Exit status: 0 nothing refuted it, 1 refuted, 2 not everything could be checked.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from data.files import sha256_file
from tools.audit import box, settings, unexecuted
from tools.audit.broken import Broken
from tools.audit.laws import LAWS, Lab, Law
from tools.audit.replay import replayed
from tools.audit.verdict import Verdict
from tools.audit.worlds import Worlds
from tools.runs.errors import RecordError
from tools.runs.runs import settings_of, settings_sha256
from tools.runs.writing import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, nargs="?", metavar="SCRIPT", help="a train_gpt.py")
    parser.add_argument("--config", type=Path, metavar="FILE", help="audit these settings, not the defaults")
    names = ", ".join(law.name for law in LAWS)
    parser.add_argument("--only", metavar="A,B", help=f"check only some of the laws: {names}")
    parser.add_argument("--replay", type=Path, metavar="RUN", help="score documents of a finished run again")
    parser.add_argument("--documents", type=int, metavar="N", help="for --replay: the number of documents")
    parser.add_argument("--seed", type=int, metavar="N", help="for --replay: seed for drawing them")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def run(args: argparse.Namespace) -> int:
    if (args.script is None) == (args.replay is None):
        raise RecordError("name a train_gpt.py, or --replay with a run directory")
    began = time.monotonic()
    say = (lambda _: None) if args.json else (lambda line: print(line, flush=True))
    if args.replay is not None:
        verdict = replayed(args.replay, args.documents, args.seed, say)
        named = args.replay
    else:
        verdict = audited(args.script, args.config, chosen(args.only), say)
        named = args.script
    if args.json:
        print_json(verdict.as_json())
    else:
        for line in verdict.left_out:
            print(f"  left out: {line}")
        for line in verdict.not_run:
            print(f"  not run: {line}")
        if verdict.not_run:
            print(f"  {len(verdict.not_run)} branches were not run, so the audit says nothing about them")
            print(f"  the largest worlds had {verdict.largest}; --replay covers what a real run did")
        took = f"{time.monotonic() - began:.0f} s, {cpu_seconds():.0f} s of CPU time"
        print(f"{named}: {verdict}; {len(verdict.passed)} experiments in {took}")
    return verdict.status


def cpu_seconds() -> float:
    """CPU time of this process and of those that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def chosen(names: str | None) -> list[Law]:
    """The laws of --only, or all. RecordError for a name that there is not, or for none."""
    if names is None:
        return LAWS
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    known = {law.name: law for law in LAWS}
    if not wanted:
        raise RecordError(f"--only names no law; the laws are {', '.join(known)}")
    for name in wanted:
        if name not in known:
            raise RecordError(f"--only {name}: no such law; the laws are {', '.join(known)}")
    return [known[name] for name in wanted]


def audited(script: Path, config: Path | None, laws: list[Law], say: Callable[[str], None]) -> Verdict:
    """All experiments about a script, until the first that refutes it."""
    for path in (script, config):
        if path is not None and not path.is_file():
            raise RecordError(f"{path}: no such file; name a train_gpt.py, or a file of settings")
    script = script.resolve()
    given = settings_of(config) if config is not None else {}
    verdict = Verdict({"script": script.name, "sha256": sha256_file(script)})
    if len(laws) < len(LAWS):
        verdict.only = [law.name for law in laws]
    with tempfile.TemporaryDirectory(prefix="audit_") as folder:
        worlds = Worlds(Path(folder).resolve() / "worlds")
        runs = Path(folder).resolve() / "runs"
        with verdict.judging(), box.opened(script, runs, [worlds.folder]) as opened:
            verdict.walls = opened.walls
            say(f"  walls: {opened.walls}")
            whole = opened.settings(given)
            verdict.subject["settings_sha256"] = settings_sha256(whole)
            for name, text in experiments(opened, worlds, whole, laws, verdict.left_out):
                verdict.note(name, text)
                say(f"  pass {name}: {text}")
            opened.check_it_stayed_inside()
            if not verdict.only:
                describe_what_ran(verdict, script, opened)
    return verdict


def experiments(
    opened: box.Box, worlds: Worlds, whole: Mapping[str, str], laws: list[Law], left_out: list[str]
) -> Iterator[tuple[str, str]]:
    """(law, what held) of each law in each of its labs. `Broken` at the first that does not hold.

    left_out: gets a line for each lab without the script's own settings.
    """
    for name, given in configurations(whole).items():
        asked = [law for law in laws if name in law.labs]
        if not asked:
            continue
        lab = make_lab(opened, worlds, name, given, whole, left_out)
        for law in asked:
            try:
                for text in law.test(lab):
                    yield law.name, f"{name}: {text}"
            except Broken as error:
                text = "; ".join(filter(None, [error.text, opened.escapes()]))
                raise Broken(error.law, f"{name}: {text}") from error


def make_lab(
    opened: box.Box, worlds: Worlds, name: str, given: Mapping[str, str], whole: Mapping[str, str],
    left_out: list[str],
) -> Lab:
    """A lab with the settings that only this script has, so that its techniques are on in every lab.

    A technique may not run at this size, or not with those that are on here. Then the lab is without it, and
    `left_out` says so.
    """
    own = {key: value for key, value in settings.of_its_own(whole).items() if key not in given}
    lab = Lab(opened, worlds, name, {**given, **own}, set(whole))
    if own and not lab.can_train():
        lab = Lab(opened, worlds, name, given, set(whole))
        left_out.append(f"{', '.join(own)} in the lab {name}, where a run fails with that")
    return lab


def configurations(whole: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The settings of each lab. whole: those that are audited."""
    return {
        "sgd": settings.SGD, "documents": settings.DOCUMENTS, "configured": settings.shrunk(whole),
        "tables": settings.TABLES, "projected tables": settings.PROJECTED_TABLES, "lanes": settings.LANES,
    }


def describe_what_ran(verdict: Verdict, script: Path, opened: box.Box) -> None:
    """The branches that no run took, and the largest sizes that any had."""
    execution = unexecuted.Execution(script)
    verdict.not_run = [str(mark) for mark in execution.not_run(opened.ran)]
    verdict.largest = ", ".join(f"{size:,} {name}" for name, size in opened.largest.items())
