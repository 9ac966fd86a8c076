"""`prove PATH`: dynamic proofs of a legal score; exit status 0 proven, 1 refuted, 2 not checked.

The script is loaded in a process of its own without network. Honest scores pass; every mutant must be killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tools import REPO
from tools.check.findings import Finding, Level, Mode, fail, info, warn
from tools.runs.errors import RecordError
from tools.runs.load import load_script
from tools.runs.writing import json_text

SECONDS_MAX = 600
PROVEN, REFUTED, UNCHECKED = range(3)  # exit statuses
RANKS = (2, 4)
RANK_TOLERANCE = 1e-3  # nats; summing gradients in another order, after several updates
PROOFS = {
    "B1": "future independence", "B2": "normalisation", "B3": "coverage", "B4": "write-once scores",
    "B5": "score before update", "B6": "weights", "B7": "inert warm-up", "B8": "data kept apart",
    "B9": "document isolation", "B10": "byte table", "B11": "tokenizer round trip", "B12": "artifact",
    "B13": "rank invariance", "B14": "determinism", "B15": "no network", "B16": "mutants",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, metavar="PATH", help="a train_gpt.py")
    parser.add_argument("--seed", type=int, default=0, help="of the tiny model and stream")
    parser.add_argument(
        "--quick", action="store_true", help="flips and Kraft sums at the edges only, no whole run"
    )
    parser.add_argument("--json", action="store_true", help="print findings as JSON")


def run(args: argparse.Namespace) -> int:
    path = args.script.resolve()
    if not path.is_file():
        raise RecordError(f"{args.script}: no such file; name a train_gpt.py")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        findings = _in_own_process(path, Path(folder), args.seed, args.quick)
    status = exit_status(findings)
    if args.json:
        listed = [finding.as_json(Mode.AGREED) for finding in findings]
        print(json_text({"script": str(args.script), "status": status, "findings": listed}), end="")
    else:
        print(render(findings))
        seconds = time.monotonic() - started
        print(f"{args.script}: {verdict(findings)}; {len(findings)} results in {seconds:.0f} s")
    return status


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
        return "not proven: something could not be checked"
    checked = {finding.check for finding in findings}
    not_run = [f"{check} ({what})" for check, what in PROOFS.items() if check not in checked]
    if not_run:
        return f"not refuted; not run: {', '.join(not_run)}"
    return "proven"


def render(findings: list[Finding]) -> str:
    """One line per result, those that fail with evidence and what to do."""
    names = {Level.INFO: "pass", Level.WARN: "WARN", Level.FAIL: "FAIL"}
    lines = []
    for finding in findings:
        level = finding.level(Mode.AGREED)
        lines.append(f"  {names[level]} {finding.check:3} {finding.text}  [{finding.where}]")
        if level is not Level.INFO:
            lines.append(f"           -> {finding.remedy}")
    return "\n".join(lines)


def _in_own_process(path: Path, folder: Path, seed: int, quick: bool) -> list[Finding]:
    """The findings of a worker process; what ends it is a finding too."""
    out = folder / "findings.json"
    command = _worker(path, folder, seed, "quick" if quick else "full")
    try:
        done = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, timeout=SECONDS_MAX, check=False
        )
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        last = f"no end within {SECONDS_MAX} s"
    if not out.is_file():
        return not_checked(path, f"the script's process ended early: {last}")
    findings = []
    for stored in json.loads(out.read_text()):
        levels = {reading: Level(stored[reading]) for reading in ("written", "practised")}
        findings.append(Finding(**{**stored, **levels}))
    return findings


def _worker(path: Path, folder: Path, seed: int, *mode: str) -> list[str]:
    """The command that `_main` answers."""
    return [sys.executable, "-B", "-m", "tools.prove.prove", str(path), str(folder), str(seed), *mode]


def _environment() -> dict[str, str]:
    """Of a worker: one thread, no GPU, and none of the user's settings."""
    keep = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR", "LANG") if key in os.environ}
    ours = {
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return keep | ours


def not_checked(path: Path, why: str) -> list[Finding]:
    """A warning per proof that could not be run."""
    remedy = (
        "offer Config.from_env, build_model, Ledger and the scorers score_roundtrip, score_sliding, score_ttt"
    )
    return [
        warn(check, f"not checked ({what}): {why}", path.name, remedy) for check, what in PROOFS.items()
    ]


def proofs(script: ModuleType, folder: Path, seed: int, quick: bool) -> Iterator[Finding]:
    """All findings about a script that offers the entry point."""
    from tools.prove import probes, rehearsal

    subject = probes.make_subject(script, seed)
    edges: set[int] = set()  # the tokens on both sides of each critical target
    for target in probes.kraft_positions(subject):
        edges |= {target, target + 1}
    flips = sorted(edges - {0}) if quick else None
    for name in subject.scorers:
        yield from probes.ledger_order(subject, name)
        yield from probes.determinism(subject, name)
        yield from probes.kraft_sums(subject, name)
        yield from probes.future_flip(subject, name, flips)
        if name != "score_ttt":
            yield from probes.document_isolation(subject, name)
    yield from probes.evaluation_warmup(subject)
    if not quick:
        yield from rank_invariance(subject, Path(script.__file__ or ""), folder)
    laboratory = rehearsal.build_laboratory(folder)
    yield from probes.byte_table(subject, str(laboratory.tokenizer), rehearsal.TEXTS, laboratory.pieces)
    if not quick:
        watch, first = rehearsal.run_script(script, laboratory, "plain", WARMUP_STEPS="0", TRAIN_PREFETCH="0")
        yield from rehearsal.data_apart(laboratory, watch)
        yield from rehearsal.artifact_returns(script, laboratory, first)
        _, second = rehearsal.run_script(script, laboratory, "warm", WARMUP_STEPS="2", TRAIN_PREFETCH="1")
        yield from rehearsal.same_result(first, second)
        yield from surviving_mutants(subject, laboratory)


def rank_invariance(subject: Any, path: Path, folder: Path) -> Iterator[Finding]:
    """B13: two and four ranks write the single-rank ledger."""
    import numpy as np

    alone = {name: subject.nats(name, subject.tokens()) for name in subject.scorers}
    for ranks in RANKS:
        children = []
        for rank in range(ranks):
            command = _worker(path, folder, subject.seed, "rank", str(rank), str(ranks))
            children.append(subprocess.Popen(command, env=_environment(), stdout=subprocess.DEVNULL))
        codes = [child.wait(timeout=SECONDS_MAX) for child in children]
        if any(codes):
            text = f"{ranks} ranks ended with {codes}"
            yield fail("B13", text, "gloo, CPU", "let every rank join every collective")
            continue
        ledgers = [np.load(folder / f"ledger_{ranks}_{rank}.npz") for rank in range(ranks)]
        for name, nats in alone.items():
            limit = RANK_TOLERANCE if name == "score_ttt" else 0.0
            worst = np.max([np.abs(ledger[name] - nats) for ledger in ledgers], axis=0)
            target = int(worst.argmax())
            text = f"{ranks} ranks: at most {worst[target]:.1e} from the ledger of one, at target {target}"
            if worst[target] > limit:
                yield fail("B13", text, name, "share no state before every rank has scored")
            else:
                yield info("B13", text, name)


def surviving_mutants(subject: Any, laboratory: Any) -> Iterator[Finding]:
    """B16: each mutant must fail some proof."""
    from tools.prove.mutants import MUTANTS

    killers = {name: kill(subject, name, laboratory) for name in MUTANTS}
    survivors = [name for name, finding in killers.items() if finding is None]
    if survivors:
        text = f"mutants survived: {', '.join(survivors)}"
        yield fail("B16", text, "self-test", "the audit itself is blind")
    else:
        by = ", ".join(f"{name} ({finding.check})" for name, finding in killers.items() if finding)
        yield info("B16", f"{len(killers)} of {len(killers)} mutants killed: {by}", "self-test")


def kill(subject: Any, name: str, laboratory: Any) -> Finding | None:
    """The first finding that refutes a mutant; None when it survives."""
    from tools.prove.mutants import MUTANTS

    with MUTANTS[name](subject) as mutant:
        for finding in _suspicions(mutant, name, laboratory):
            if finding.level(Mode.AGREED) is Level.FAIL:
                return finding
    return None


def _suspicions(mutant: Any, name: str, laboratory: Any) -> Iterator[Finding]:
    """The proofs on a mutant, the quick ones first; an exception of the script refutes too."""
    from tools.prove import probes, rehearsal

    script = mutant.script
    try:
        if name == "calibration-on-validation":
            watch, _ = rehearsal.run_script(script, laboratory, name, WARMUP_STEPS="0", TRAIN_PREFETCH="0")
            yield from rehearsal.data_apart(laboratory, watch)
            return
        yield from probes.byte_table(mutant, str(laboratory.tokenizer), rehearsal.TEXTS, laboratory.pieces)
        yield from probes.evaluation_warmup(mutant)
        for scorer in mutant.scorers:
            yield from probes.ledger_order(mutant, scorer)
            yield from probes.determinism(mutant, scorer)
            yield from probes.kraft_sums(mutant, scorer, [0, 15, mutant.config.ttt_chunk_tokens, 70])
            yield from probes.future_flip(mutant, scorer, [20, 60, 140])
            if scorer != "score_ttt":
                yield from probes.document_isolation(mutant, scorer)
    except (probes.refusal(script), IndexError) as error:
        text = f"the scorer raised {type(error).__name__}: {error}"
        yield fail("B3", text, name, "score every target once")


def _without_network(attempts: list[str]) -> None:
    """From now on every socket call in this process is noted and refused."""

    def refuse(event: str, details: Any) -> None:
        if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
            attempts.append(f"{event} {details}")
            raise PermissionError(f"the proof blocks the network: {event}")

    sys.addaudithook(refuse)


def _work(path: Path, folder: Path, seed: int, quick: bool) -> list[Finding]:
    """Everything the worker finds out."""
    attempts: list[str] = []
    _without_network(attempts)
    try:
        script = load_script(path)
    except BaseException as error:
        return not_checked(path, f"it does not load: {type(error).__name__}: {error}")
    from tools.prove.probes import ENTRY_POINT

    missing = [name for name in ENTRY_POINT if not hasattr(script, name)]
    if missing:
        return not_checked(path, f"it has no {', '.join(missing)}")
    findings: list[Finding] = []
    try:
        findings.extend(proofs(script, folder, seed, quick))
    except Exception as error:
        traceback.print_exc()
        text = f"the proofs stopped: {type(error).__name__}: {error}"
        findings.append(fail("B3", text, path.name, "see its message"))
    if attempts:
        text = f"tried to reach the network: {attempts[0]}"
        findings.append(fail("B15", text, path.name, "ship all it needs"))
    else:
        findings.append(info("B15", "no socket was asked for, with all of them blocked", path.name))
    return sorted(findings, key=lambda finding: int(finding.check[1:]))


def _ledgers_of_a_rank(path: Path, folder: Path, seed: int, rank: int, ranks: int) -> None:
    """Write the ledgers that one of several ranks ends with."""
    import numpy as np
    import torch.distributed as dist

    from tools.prove import probes

    store = f"file://{folder}/store_{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    script = load_script(path)
    subject = probes.make_subject(script, seed)
    if hasattr(script, "Machine"):  # older scripts ask the process group
        subject = dataclasses.replace(subject, machine=script.Machine(rank, ranks))
    ledgers: dict[str, Any] = {name: subject.nats(name, subject.tokens()) for name in subject.scorers}
    np.savez(folder / f"ledger_{ranks}_{rank}.npz", **ledgers)
    dist.destroy_process_group()


def _main(arguments: list[str]) -> None:
    """What a worker does: PATH FOLDER SEED and then `quick`, `full` or `rank RANK RANKS`."""
    import torch

    torch.set_num_threads(1)
    path = Path(arguments[0])
    folder = Path(arguments[1])
    seed = int(arguments[2])
    mode = arguments[3]
    if mode == "rank":
        _ledgers_of_a_rank(path, folder, seed, int(arguments[4]), int(arguments[5]))
        return
    findings = [dataclasses.asdict(finding) for finding in _work(path, folder, seed, mode == "quick")]
    (folder / "findings.json").write_text(json.dumps(findings))


if __name__ == "__main__":
    _main(sys.argv[1:])
