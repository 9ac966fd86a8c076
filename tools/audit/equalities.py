"""What an honest script keeps: equalities between the files of its runs. `Broken` names one that is not."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from data.shards import BOS_ID
from tools.audit.box import Run
from tools.audit.broken import Broken
from tools.audit.worlds import World

EXACT = re.compile(r"^(\S+)_exact val_loss:(\S+) val_bpb:(\S+) scored_tokens:(\d+) val_bytes:(\d+)", re.M)
FIGURE = re.compile(r"^(\S+) .*?\b(val_loss|val_bpb):(\d+\.\d+)", re.M)
SIZES = re.compile(r"^(?:Code size|Total submission size).*: (\d+) bytes", re.M)
ON_THE_WAY = re.compile(r"^(step:\d+/\d+|DIAGNOSTIC \S+) val_loss:(\S+)", re.M)
BIT_BY_BIT = 0.0
REPACKED = 2e-5  # nats, where a new BOS packs rows otherwise: ten times the most of an honest script
LEARNED = 1e-4  # nats, where gradients are summed in another order
NORMALIZED = 1e-5  # of a sum of probabilities


def ended(run: Run) -> None:
    """A run ends with its files and status 0."""
    if run.status:
        raise Broken("ends", f"status {run.status}: {run.last_words()}")


def counted_once(run: Run, world: World, targets: int = 0) -> None:
    """Every figure is the sum of the one ledger of its label, over all targets and all bytes of the text.

    targets: of a part of the text, whose bytes are `world.text_bytes`; 0: the whole.
    """
    ended(run)
    is_part, targets = bool(targets), targets or len(world.tokens) - 1
    said: dict[str, list[tuple[float, float, int, int]]] = {}
    for label, loss in run.summary["losses"].items():
        said[label] = [(loss["nats"], loss["bits_per_byte"], loss["scored_tokens"], loss["bytes"])]
    for name, loss, bits, scored, count in EXACT.findall(run.log):
        label = next((one for one in said if name.endswith(one)), name)
        said.setdefault(label, []).append((float(loss), float(bits), int(scored), int(count)))
    if set(run.nats) != set(said) or len(run.other_ledgers) != len(ON_THE_WAY.findall(run.log)):
        raise Broken("ledgers", f"{len(run.ledgers)} were summed, expected one for each of {', '.join(said)} "
                                f"and {len(ON_THE_WAY.findall(run.log))} validations on the way")
    for label, figures in said.items():
        if len(figures) != 2:
            raise Broken("ledgers", f"{label}: {len(figures) - 1} exact lines in the log, expected one")
        nats = run.nats[label]
        if len(nats) != targets or not np.isfinite(nats).all():
            raise Broken("coverage", f"{label}: {np.isfinite(nats).sum()} of {targets} targets have a score")
        total = math.fsum(nats)
        right = (total / targets, total / math.log(2) / world.text_bytes, targets, world.text_bytes)
        for figure in figures:
            for name, got, expected in zip(("nats", "bits", "targets", "bytes"), figure, right, strict=True):
                if not math.isclose(got, expected, rel_tol=1e-8, abs_tol=1e-8):
                    raise Broken(name, f"{label}: says {got}, but ledger and text give {expected}")
    for name, key, value in FIGURE.findall(run.log):
        label = next((one for one in said if name.removesuffix("_exact").endswith(one)), "")
        if label and abs(float(value) - said[label][0][key == "val_bpb"]) > half_of_the_last_digit(value):
            raise Broken(key, f"{name}: a line says {value}, but the ledger gives {said[label][0]}")
    on_the_way = zip(run.other_ledgers, ON_THE_WAY.findall(run.log), strict=True)
    for nats, (name, value) in on_the_way:
        if abs(float(value) - nats.mean()) > half_of_the_last_digit(value):
            raise Broken("val_loss", f"{name}: a line says {value}, but the ledger gives {nats.mean()}")
    marked = ["comparable:0" in line for line in run.log.splitlines() if "_exact val_loss" in line]
    if set(marked) != {is_part} or run.summary["comparable"] == is_part:
        raise Broken("marks", "a score of a part is marked as comparable, or one of the whole is not")
    within_limit(run)


def half_of_the_last_digit(number: str) -> float:
    """By how much a printed number may differ from what was rounded."""
    return 0.51 * 10.0 ** -len(number.partition(".")[2])


def within_limit(run: Run) -> None:
    """Script and artifact are the bytes that were counted, and keep the limit."""
    if not (run.folder / "model.bin").is_file():
        return
    code, weights = (run.path(name).stat().st_size for name in ("train_gpt.shipped.py", "model.bin"))
    limit = int(run.summary["config"]["ARTIFACT_BYTES_MAX"])
    told = [*SIZES.findall(run.log), run.summary["code"]["bytes_wrapped"], run.summary["artifact"]["bytes"]]
    if list(map(int, told)) != [code, code + weights, code, weights] or code + weights > limit:
        raise Broken("size", f"reported {told}, files have {code} and {weights} bytes, of {limit}")


def blind(first: Run, second: Run, apart: bool, tolerance: float = BIT_BY_BIT) -> None:
    """Targets before the first token that differs keep their nats; before that of their document, if apart.

    apart: no document may affect another.
    """
    ended(second)
    tokens = first.tokens
    differ = tokens != second.tokens
    begins = np.where(tokens == BOS_ID, np.arange(len(tokens)), 0) if apart else np.zeros(len(tokens), int)
    begins = np.maximum.accumulate(begins)
    before = np.append(0, differ.cumsum())  # a token: how many differ
    may_move = before[2:] > before[begins[:-1]]  # target i is token i + 1
    for label, nats in first.nats.items():
        other = second.nats.get(label, np.zeros(0))
        if len(other) != len(nats):
            raise Broken("future", f"{label}: a different number of scores")
        moved = np.where(may_move, 0, np.abs(other - nats))
        if not (moved <= tolerance * np.maximum(1, nats)).all():
            at = int(moved.argmax())
            token = int(np.append(np.flatnonzero(differ[at + 2 :]) + at + 2, differ.argmax())[0])
            raise Broken("future", f"{label}: token {token} changes target {at} by {moved[at]:.1e} nats")


def sum_to_one(sums: dict[str, float], where: str, tolerance: float = NORMALIZED) -> None:
    """The probabilities of all candidates sum to one."""
    for label, total in sums.items():
        if not abs(total - 1) <= tolerance:
            raise Broken("kraft", f"{label}: {where}: probabilities sum to {total:.6f}")


def same_nats(
    first: Run, second: Run, what: str, tolerance: float = BIT_BY_BIT, begin: int = 0,
    labels: Sequence[str] | None = None,
) -> None:
    """All labels of two runs, or those named, have the same nats from a target on, until a text ends."""
    ended(second)
    for label in first.nats if labels is None else labels:
        nats, other = first.nats[label], second.nats.get(label, np.zeros(0))
        if len(other) - len(nats) != len(second.tokens) - len(first.tokens):
            raise Broken("same", f"{label}: {what}: a different number of scores")
        shared = slice(begin, min(len(nats), len(other)))
        moved = np.abs(other[shared] - nats[shared]).max(initial=0.0)
        if not moved <= tolerance:
            raise Broken("same", f"{label}: {what}: a target changes by {moved:.1e} nats")


def same_artifact(runs: list[Run], what: str) -> None:
    """The artifact and the order of the training tokens are the same."""
    if len({(run.artifact, run.summary["stream_hash"]) for run in runs}) > 1:
        raise Broken("artifact", f"{what}: a different artifact or different training tokens")


# --- the clock ---

PHASE = re.compile(r"phase:(\S+) (\d+\.\d+)s$")
TRAIN_TIME = re.compile(r"\btrain_time:(\d+)ms")
LIMIT = re.compile(r"limit:(\w+) (\S+)(?:(?: of (\S+) (ok|EXCEEDED))|, no limit)$")
SLACK = 40  # reads, between what a script times and the lines about it


def same_seconds(run: Run) -> None:
    """Each time is what the auditor's clock says: a phase is between two lines of the log."""
    ended(run)
    if [line for *_, line in run.stamps] != run.log.splitlines():
        raise Broken("clock", "the log does not have the lines that were printed")
    tick = 1.0
    before = 0.0
    for _, now, line in run.stamps:
        phase = PHASE.match(line)
        if phase is None:
            continue
        if abs(float(phase[2]) - (now - before)) > SLACK * tick:
            raise Broken("clock", f"{line}: {now - before:.0f} s by the auditor's clock")
        before = now
    trained = [(now, float(found[1]) / 1e3) for _, now, line in run.stamps
               if (found := TRAIN_TIME.search(line)) and line.startswith("step:")]
    for (then, said_then), (now, said_now) in itertools.pairwise(trained):
        if abs((said_now - said_then) - (now - then)) > SLACK * tick:
            raise Broken("clock", f"train_time runs from {said_then:.0f} to {said_now:.0f} s, but by the "
                                  f"auditor's clock {now - then:.0f} s pass")


def limits_told(run: Run) -> dict[str, tuple[float, bool]]:
    """By name: the value of a limit, and whether it was kept. Log and summary say so alike, and rightly."""
    found = {}
    for line in run.log.splitlines():
        if match := LIMIT.match(line):
            found[match[1]] = (float(match[2]), match[4] != "EXCEEDED")
    for name, limit in run.summary["limits"].items():
        value, kept = found.get(name, (math.nan, False))
        right = not limit["limit"] or limit["value"] <= limit["limit"]
        if not math.isclose(value, limit["value"], rel_tol=1e-9) or {kept, limit["ok"]} != {right}:
            shown = f"{limit['value']:g} of {limit['limit']:g}"
            raise Broken("limits", f"{name}: {shown}, reported as kept: {kept}")
    return found
