"""Several ranks on one machine score what one rank scored (B13): each is a process of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tools.check.findings import Finding, fail, info
from tools.prove import probes
from tools.prove.cell import in_cell
from tools.prove.execution import MARKS
from tools.prove.probes import Subject
from tools.prove.rehearsal import Laboratory, Outcome, run_script

# SGD that learns fast makes much of a rounding. At TTT_LR=0.3 honest ranks, which sum gradients in another
# order, were up to 5.3e-5 nats apart. At this rate it was 7e-6, with the branches of a GPU too, and the
# tolerance is more than ten times that. A rate that is 1 % larger moves 1.3e-2 nats.
LEARNING_RATE = 0.03
LEARNING_TOLERANCE = 1e-4
# Where ranks do not make the same batches of the rows that they score, the kernels round in another way. fp32
# holds a loss of a few nats to about 5e-7, and this is ten times that: a bound that is chosen, not measured.
BATCHING_TOLERANCE = 5e-6


@in_cell
def in_small_batches(subject: Subject) -> Subject:
    """The subject with LEARNING_RATE, and two rows in a scoring pass: several ranks score each chunk."""
    config = subject.config
    sharing = 8 if hasattr(config, "val_pass_tokens") else 1  # ranks among which the setting is divided
    changes: dict[str, Any] = {"val_batch_size": sharing * 2 * config.eval_length, "ttt_lr": LEARNING_RATE}
    return dataclasses.replace(subject, config=dataclasses.replace(config, **changes))


@in_cell
def ask(subject: Subject) -> dict[str, Any]:
    """What this process finds: by label the nats, the batches that it scored, and whether it learned."""
    run = probes.evaluation(subject, subject.tokens(), subject.model(), passes=True)
    found = {}
    for label, labelled in run.labels.items():
        batches = []
        for at, kind, value in run.events.log:
            if at == f"eval_{label}" and kind in ("score", "pass"):
                batches.append(hashlib.sha256(json.dumps(value[0]).encode()).hexdigest())
        found[label] = {
            "nats": labelled.nats.tolist(),
            "batches": batches,
            "learns": probes.learns(run.events, label),
        }
    return found


def answer(subjects: list[Subject], folder: Path, rank: int, ranks: int) -> list[Any]:
    """What one rank does: join the others, score every subject."""
    import torch.distributed as dist

    script = subjects[0].script
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = []
    for subject in subjects:
        if hasattr(script, "Machine"):  # older scripts ask the process group
            machine = script.Machine(rank, ranks, device=torch.device("cpu"))
            subject = dataclasses.replace(subject, machine=machine)
        found.append(ask(subject))
    dist.destroy_process_group()
    return found


def together(
    script: Any, work: Callable[[int], Any], folder: Path, ranks: int
) -> tuple[list[int], list[Any]]:
    """Exit statuses of the processes of all ranks, and what `work(rank)` gives in each if all are 0.

    They are copies of this process: loading torch once more takes longer than all of their work.
    """
    folder.mkdir(exist_ok=True)

    def of_rank(rank: int) -> None:
        (folder / f"found_{rank}").write_bytes(pickle.dumps(work(rank)))
        (folder / f"ran_{rank}").write_bytes(vars(script).get(MARKS, b""))

    context = multiprocessing.get_context("fork")
    children = []
    for rank in range(ranks):
        children.append(context.Process(target=of_rank, args=(rank,)))
        children[-1].start()
    for child in children:
        child.join()
    codes = [child.exitcode or 0 for child in children]
    if any(codes):
        return codes, []
    return codes, [pickle.loads((folder / f"found_{rank}").read_bytes()) for rank in range(ranks)]


@in_cell
def answers(subjects: list[Subject], folder: Path, ranks: int) -> tuple[list[int], list[Any]]:
    """Exit statuses of all ranks, and what they found if all are 0."""

    def work(rank: int) -> list[Any]:
        return answer(subjects, folder, rank, ranks)

    return together(subjects[0].script, work, folder, ranks)


@in_cell
def run_together(
    script: Any, laboratory: Laboratory, name: str, settings: Mapping[str, str], folder: Path, ranks: int
) -> tuple[list[int], list[Outcome]]:
    """A whole run of `main` by several ranks: their exit statuses, and what each did if all are 0."""
    join = torch.distributed.init_process_group

    def joined(*_: Any, **named: Any) -> None:
        join("gloo", init_method=f"file://{folder}/store", **named)

    def work(rank: int) -> Outcome:
        of_rank = {**settings, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        named = {"rank": rank, "world_size": ranks}
        with mock.patch.object(torch.distributed, "init_process_group", lambda *_, **__: joined(**named)):
            outcome = run_script(script, laboratory, name, of_rank)
        torch.distributed.destroy_process_group()
        outcome.watch.run = None
        return outcome

    return together(script, work, folder, ranks)


def compare(subject: Subject, alone: dict[str, Any], ranks: list[dict[str, Any]]) -> list[Finding]:
    """Findings about one subject: what one rank found, and what each of several did."""
    findings = []
    for label, single in alone.items():
        where = f"{subject.name}: {label}"
        nats = np.array(single["nats"])
        together: Counter[str] = Counter()
        for found in ranks:
            together.update(found[label]["batches"])
        same_batches = together == Counter(single["batches"])
        if single["learns"]:
            limit = LEARNING_TOLERANCE
            why = "gradients are summed in another order"
        elif same_batches:
            limit = 0.0
            why = "the same batches"
        else:
            limit = BATCHING_TOLERANCE
            why = "other batches"
        differences = []
        for found in ranks:
            differences.append(np.abs(np.array(found[label]["nats"]) - nats))
        worst = np.max(differences, axis=0)
        target = int(worst.argmax())
        text = (
            f"{len(ranks)} ranks ({why}): at most {worst[target]:.1e} from the nats of one, "
            f"{limit:.0e} allowed, at target {target}"
        )
        if not (worst <= limit).all():  # so that a NaN is too far
            findings.append(fail("B13", text, where, "share no state before every rank has scored"))
        else:
            findings.append(info("B13", text, where))
    return findings


def same_scores(alone: Outcome, together: Outcome) -> Finding:
    """B13 of whole runs: one rank scores the artifact of several as they did."""
    worst = 0.0
    losses = together.summary["losses"]
    for label, loss in alone.summary["losses"].items():
        worst = max(worst, abs(loss["nats"] - losses[label]["nats"]))
    text = f"one rank scores the artifact of several as they did to {worst:.1e} nats"
    if not worst <= LEARNING_TOLERANCE or alone.summary["losses"].keys() != losses.keys():
        return fail("B13", text, "whole runs", "score the same on any number of ranks")
    return info("B13", text, "whole runs")
