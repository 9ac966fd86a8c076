"""Several ranks on one machine score what one rank scored (B13): each is a process of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.check.findings import Finding, fail, info
from tools.prove import probes
from tools.prove.cell import in_cell
from tools.prove.execution import MARKS
from tools.prove.probes import Subject

# Nats. What learns sums gradients in another order, and SGD at the large rate of a proof makes more of it.
# Ten times the most that honest ranks were seen apart, 4.2e-5.
LEARNING_TOLERANCE = 4.2e-4
# Where ranks do not make the same batches of the rows that they score, the kernels round in another way. fp32
# holds a loss of a few nats to about 5e-7, and this is ten times that: a bound that is chosen, not measured.
BATCHING_TOLERANCE = 5e-6


@in_cell
def in_small_batches(subject: Subject) -> Subject:
    """The subject with two rows in a scoring pass: a chunk has several, so that several ranks score it."""
    config = subject.config
    sharing = 8 if hasattr(config, "val_pass_tokens") else 1  # ranks among which the setting is divided
    tokens = sharing * 2 * config.eval_length
    return dataclasses.replace(subject, config=dataclasses.replace(config, val_batch_size=tokens))


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


def answer(subjects: list[Subject], folder: Path, rank: int, ranks: int) -> None:
    """What the process of one rank does: join the others, score every subject, write what it found."""
    import torch.distributed as dist

    script = subjects[0].script
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = []
    for subject in subjects:
        if hasattr(script, "Machine"):  # older scripts ask the process group
            machine = script.Machine(rank, ranks, device=torch.device("cpu"))
            subject = dataclasses.replace(subject, machine=machine)
        found.append(ask(subject))
    (folder / f"found_{rank}.json").write_text(json.dumps(found))
    (folder / f"ran_{rank}").write_bytes(vars(script).get(MARKS, b""))
    dist.destroy_process_group()


@in_cell
def answers(subjects: list[Subject], folder: Path, ranks: int) -> tuple[list[int], list[Any]]:
    """Exit statuses of the processes of all ranks, and what they found if all are 0.

    They are copies of this process: loading torch once more takes longer than all of their work.
    """
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    children = []
    for rank in range(ranks):
        children.append(context.Process(target=answer, args=(subjects, folder, rank, ranks)))
        children[-1].start()
    for child in children:
        child.join()
    codes = [child.exitcode or 0 for child in children]
    if any(codes):
        return codes, []
    return codes, [json.loads((folder / f"found_{rank}.json").read_text()) for rank in range(ranks)]


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
