"""How far the honest script is from equal where a probe compares floats: tolerances are ten times the most.

    ATEN_CPU_CAPABILITY=avx2 python -m tools.prove.noise train_gpt.py 0 1 2 3 4

One line for each seed, of the whole settings that a proof has. ATEN_CPU_CAPABILITY (default, avx2, avx512)
says which instructions torch uses, as other processors would.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from data.files import escape_unprintable
from tools.prove import full_size, probes, questions, ranks, tiny
from tools.runs.load import load_script

RANKS = (2, 3, 8)


def subjects_of(script: ModuleType, seed: int) -> list[probes.Subject]:
    """Those that a proof of the defaults has."""
    settings, _ = tiny.shrink(script.Config(), tiny.FOR_SCORER)
    return [
        probes.make_subject(script, seed),
        probes.subject_of(script, settings, seed, "defaults"),
        probes.make_subject(script, seed, "tiny, documents", **tiny.LORA),
    ]


def repacking(subject: probes.Subject) -> float:
    """B1: how far changes that make or unmake a BOS move earlier losses, as a share, of 1 at least."""
    worst = 0.0
    case = subject.case()
    before = case.ask(case.tokens)
    changes = [(64, changed) for _, changed in questions.suffix_changes(case, 64)]
    for first in (60, 100, 140):
        flipped = case.tokens.copy()
        flipped[first] = questions.BOS_ID
        changes.append((first, flipped))
    for first, changed in changes:
        for label, nats in case.ask(changed).items():
            earlier = before[label][: first - 1]
            moved = np.abs(nats[: first - 1] - earlier) / np.maximum(1, earlier)
            worst = max(worst, float(moved.max(initial=0.0)))
    return worst


def sums(subject: probes.Subject) -> float:
    """B2: how far sums over a small vocabulary are from one."""
    worst = 0.0
    case = subject.case()
    for target in (32, 75):
        asked = []
        for candidate in range(case.vocab_size):
            changed = case.tokens.copy()
            changed[target + 1] = candidate
            asked.append(case.ask(changed))
        for label in asked[0]:
            worst = max(worst, abs(sum(np.exp(-nats[label][target]) for nats in asked) - 1))
    return float(worst)


def compiled(subject: probes.Subject) -> float:
    """B7: how far the form that is compiled is from the plain one."""
    _, _, (found, plain) = probes.rehearsed(subject)
    return max(float(np.abs(found[label] - plain[label]).max()) for label in found)


def by_ranks(subjects: list[probes.Subject], folder: Path) -> tuple[float, float]:
    """B13: how far the nats of several ranks are from those of one; in labels that learn, and in others."""
    subjects = [ranks.in_small_batches(subject) for subject in subjects]
    alone = [ranks.ask(subject) for subject in subjects]
    worst = {True: 0.0, False: 0.0}
    for count in RANKS:
        _, found = ranks.answers(subjects, folder / f"ranks_{count}", count)
        for number, of_rank in itertools.product(range(len(subjects)), found):
            for label, single in alone[number].items():
                moved = np.abs(np.array(of_rank[number][label]["nats"]) - np.array(single["nats"])).max()
                worst[single["learns"]] = max(worst[single["learns"]], float(moved))
    return worst[True], worst[False]


def measured(script: ModuleType, seed: int, folder: Path) -> dict[str, float]:
    """The most of each kind, of all subjects."""
    subjects = subjects_of(script, seed)
    learning, other = by_ranks(subjects, folder)
    wide = probes.make_subject(script, seed, "8192 ids", VOCAB_SIZE="8192")
    _, totals = full_size.totals_at_full_size(wide, wide.model(), 2)
    return {
        "B1 repacking": max(map(repacking, subjects)),
        "B2 sums": max(sums(subjects[0]), sums(subjects[2])),
        "B2 sums of 8,192": max(abs(total - 1) for _, total in totals),
        "B7 compiled": max(compiled(subjects[0]), compiled(subjects[2])),
        "B13 learning": learning,
        "B13 other": other,
    }


def main(arguments: list[str]) -> None:
    """SCRIPT SEED …"""
    escape_unprintable()
    torch.set_num_threads(1)
    script: Any = load_script(Path(arguments[0]).resolve())
    for seed in map(int, arguments[1:]):
        with tempfile.TemporaryDirectory() as folder:
            found = measured(script, seed, Path(folder))
        values = "  ".join(f"{name} {value:.1e}" for name, value in found.items())
        print(f"{os.environ.get('ATEN_CPU_CAPABILITY') or 'as it is':8} seed {seed}: {values}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
