"""The laws of an honest score. Each is an experiment: runs of `main` in worlds that differ in one thing.

To add a law, write a function that takes a `Lab`, yields a sentence for each thing that held, and raises
`Broken` for one that did not, and put `@law` before it. `equalities` has the comparisons between two runs.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.shards import BOS_ID
from tools.audit import equalities as same
from tools.audit import walls
from tools.audit.box import Box, Run
from tools.audit.broken import Broken
from tools.audit.clock import Clock
from tools.audit.settings import FEWER_STEPS, NO_LEARNING, RUN
from tools.audit.worlds import (
    FIRST_LETTER,
    NEVER_SEEN,
    PIECES,
    STARTS,
    World,
    Worlds,
    hard_text,
    random_text,
    repeating,
    words,
)
from tools.runs.source import same_program, unwrap

RANKS = (2, 3, 8)
QUICK_LABS = ("sgd", "documents")  # of two layers: a run takes a sixth of a second
LABS = (*QUICK_LABS, "configured")
EVERY_LAB = (*LABS, "tables", "projected tables", "lanes")
# Room for the head of an artifact; then half a byte a weight, so that quantization is felt.
HEAD_BYTES = 1260
AMPLE = {"ARTIFACT_BYTES_MAX": "99999999"}
NOTHING: Mapping[str, str] = {}


class Lab:
    """One configuration of a script: its settings, shrunk, and an artifact that it has made with them."""

    def __init__(
        self, box: Box, worlds: Worlds, name: str, settings: Mapping[str, str], known: set[str]
    ) -> None:
        """known: the settings that the script has."""
        self.box, self.worlds, self.name = box, worlds, name
        given = {**settings, **RUN, **(FEWER_STEPS if name == "configured" else {})}
        self.settings = {name: value for name, value in given.items() if name in known}
        self._asked: dict[bytes, Run] = {}

    def train(
        self, world: World, more: Mapping[str, str] = NOTHING, ranks: int = 1, by_clock: Clock | None = None
    ) -> Run:
        """A whole run. more: settings on top of the lab's."""
        settings = {**self.settings, "VOCAB_SIZE": str(world.pieces), **more}
        return self.box.run(settings, world.folder, world.tokens, ranks, by_clock)

    def ask(
        self, ids: np.ndarray, more: Mapping[str, str] = NOTHING, ranks: int = 1,
        by_clock: Clock | None = None, artifact: Path | None = None,
    ) -> Run:
        """The artifact's scores of a text."""
        world = self.worlds.asks(ids)
        settings = {**self.settings, "EVAL_ONLY": str(artifact or self.artifact), **more}
        return self.box.run(settings, world.folder, world.tokens, ranks, by_clock)

    def asked(self, ids: np.ndarray) -> Run:
        """The artifact's scores of a text, by its settings alone. One run serves all laws."""
        key = ids.tobytes()
        if key not in self._asked:
            self._asked[key] = self.ask(ids)
        return self._asked[key]

    @property
    def apart(self) -> bool:
        """Whether no document may affect another."""
        return self.settings.get("TTT_MODE") != "sgd" and self.settings.get("DOC_MASK") != "0"

    @functools.cached_property
    def trained(self) -> Run:
        """A run whose weights have left their start, with room for all that it has to ship."""
        world = self.worlds.short()
        run = self.train(world, AMPLE)
        same.counted_once(run, world)
        return run

    def can_train(self) -> bool:
        """Whether such a run ends at all."""
        return self.train(self.worlds.short(), AMPLE).status == 0

    @property
    def artifact(self) -> Path:
        """The artifact of that run."""
        return self.trained.path("model.bin")


class Law(NamedTuple):
    """An experiment, what it shows, and the labs that it is done in."""

    name: str
    shows: str
    test: Callable[[Lab], Iterator[str]]
    labs: Sequence[str]


LAWS: list[Law] = []


def law(shows: str, labs: Sequence[str] = LABS) -> Callable[..., Callable[[Lab], Iterator[str]]]:
    """Add a function to LAWS, under its name."""

    def added(test: Callable[[Lab], Iterator[str]]) -> Callable[[Lab], Iterator[str]]:
        LAWS.append(Law(test.__name__.replace("_", "-"), shows, test, labs))
        return test

    return added


# ======================================================================================================
# A SCORE DEPENDS ON THE ARTIFACT AND ON EARLIER TOKENS
# ======================================================================================================


def in_one_run(lab: Lab, ids: np.ndarray, places: Sequence[int]) -> Iterator[list[int]]:
    """The places in groups, in each of which the text may be changed at all of them at once.

    Where no document may affect another, a group has a place in each of several documents.
    """
    document = np.cumsum(ids == BOS_ID)
    left = sorted(places)
    while left:
        group = left[:1]
        for place in left[1:] if lab.apart else []:
            if document[place] > document[group[-1]]:
                group.append(place)
        yield group
        left = [place for place in left if place not in group]


def after(ids: np.ndarray, places: Sequence[int]) -> np.ndarray:
    """Which tokens are after a place: to the end of its document, and after the last one all."""
    document = np.cumsum(ids == BOS_ID)
    position = np.arange(len(ids))
    found = position >= places[-1]
    for place in places:
        found |= (position >= place) & (document == document[place])
    return found


def other_endings(lab: Lab, ids: np.ndarray, places: Sequence[int]) -> Iterator[np.ndarray]:
    """The text with other endings: likely, unlikely, never seen, easy to learn, like training text."""
    changes = after(ids, places) & (ids != BOS_ID)
    again = np.roll(np.resize(ids[places[0] - 12 : places[0]], len(ids)), places[0])
    for ending in (
        again, np.full(len(ids), PIECES - 1), np.full(len(ids), NEVER_SEEN),
        lab.worlds.train[: len(ids)],
    ):
        yield np.where(changes, np.where(ending == BOS_ID, 5, ending), ids)


def blind_to_endings(lab: Lab, ids: np.ndarray, places: Sequence[int]) -> Iterator[str]:
    first = lab.asked(ids)
    for group in in_one_run(lab, ids, places):
        for changed in other_endings(lab, ids, group):
            same.blind(first, lab.ask(changed), lab.apart)
        changed = ids.copy()
        changed[np.array(group) + 3] = BOS_ID
        same.blind(first, lab.ask(changed), lab.apart, same.REPACKED)
    places_in_words = f"{len(places)} place{'s' * (len(places) != 1)}"
    yield f"at {places_in_words}, 5 other endings of {len(ids)} tokens change no score before them"


@law("no score depends on a later token", EVERY_LAB)
def endings(lab: Lab) -> Iterator[str]:
    ids = lab.worlds.short().tokens
    same.same_nats(lab.asked(ids), lab.ask(ids), "a second run")
    yield "a second run gives the same bits"
    if lab.name not in QUICK_LABS:
        yield from blind_to_endings(lab, ids[:100], (64, 35) if lab.name == "configured" else (64,))
        return
    yield from blind_to_endings(lab, ids, (64, 35, 118))
    yield from blind_to_endings(lab, repeating(ids), (80,))
    yield from blind_to_endings(lab, lab.worlds.long().tokens, (339,))
    if lab.apart:
        for start in STARTS[-2:]:  # the text ends with the document before
            same.same_nats(lab.ask(ids[: start + 1]), lab.asked(ids), "text that follows", same.REPACKED)
        yield "a text that ends earlier has the same scores up to its end"


@law("no document affects a later one, unless the weights learn from the text in order")
def documents(lab: Lab) -> Iterator[str]:
    if lab.settings.get("DOC_MASK") == "0":
        return
    ids = lab.worlds.short().tokens
    changed = ids.copy()
    changed[12:40] = FIRST_LETTER + (ids[12:40] - FIRST_LETTER + 1) % (PIECES - FIRST_LETTER)
    first, second = lab.asked(ids), lab.ask(changed)
    labels = [label for label in first.nats if lab.apart or label != "legal_ttt"]
    same.same_nats(first, second, "an earlier document", begin=40, labels=labels)
    yield "changing an earlier document changes no score in a later one"


# ======================================================================================================
# A SCORE IS MINUS THE LOGARITHM OF A PROBABILITY
# ======================================================================================================


def probabilities(lab: Lab, ids: np.ndarray, targets: Sequence[int]) -> Iterator[str]:
    """At some targets every token in turn. Each is another ending as well, so no score before it moves."""
    first = lab.asked(ids)
    for group in in_one_run(lab, ids, targets):
        at = np.array(group)
        sums = {label: np.exp(-nats[at]) for label, nats in first.nats.items()}
        for shift in range(1, PIECES):
            changed = ids.copy()
            changed[at + 1] = (ids[at + 1] + shift) % PIECES
            run = lab.ask(changed)
            repacked = BOS_ID in ids[at + 1] or BOS_ID in changed[at + 1]
            same.blind(first, run, lab.apart, same.REPACKED if repacked else same.BIT_BY_BIT)
            for label in sums:
                sums[label] += np.exp(-run.nats[label][at])
        for number, target in enumerate(group):
            same.sum_to_one({label: found[number] for label, found in sums.items()}, f"target {target}")
    yield f"at {len(targets)} of {len(ids) - 1} targets, the probabilities of all tokens sum to one"


@law("the probabilities of all tokens at a target sum to one")
def sums(lab: Lab) -> Iterator[str]:
    ids = lab.worlds.short().tokens
    if lab.name not in QUICK_LABS:
        yield from probabilities(lab, ids[:100], (64, 31))
        return
    # The end of a chunk and the beginnings of two, the end of a document; amid a phrase; in a document that
    # is alone in its batch, and deep in one.
    yield from probabilities(lab, ids, (31, 64, 130))
    yield from probabilities(lab, repeating(ids), (32, 77))
    yield from probabilities(lab, lab.worlds.long().tokens, (301, 420) if lab.apart else (420,))


@law("the same over a large vocabulary", ("configured",))
def vocabulary(lab: Lab) -> Iterator[str]:
    """A whole sum in one run: a text with a document for each candidate.

    Where a document sees those before it, each is as long as a window.
    """
    world = lab.worlds.of_texts("pieces", words(1, 14, 20), 1600, words(2, 5, 150))
    run = lab.train(world, {**NO_LEARNING, "ITERATIONS": "2"})
    same.counted_once(run, world)
    settings = lab.settings
    context = int(settings.get("EVAL_SEQ_LEN", 0)) or int(settings["TRAIN_SEQ_LEN"])
    length = 4 if settings.get("DOC_MASK") != "0" else context
    # First some text that is text, as a script may check that; it ends with a window.
    ordinary = np.append(BOS_ID, world.tokens[world.tokens != BOS_ID][:400])
    ordinary = np.append(ordinary, np.full(-len(ordinary) % context, BOS_ID))
    prefix = world.tokens[: length - 1]
    candidates = [np.append(prefix, piece) for piece in range(world.pieces) if piece != BOS_ID]
    ids = np.concatenate([ordinary, *candidates, prefix, [BOS_ID, FIRST_LETTER]])
    asked = lab.worlds.with_sidecar("candidates", ids, world)
    settings = {**settings, **NO_LEARNING, "VOCAB_SIZE": str(world.pieces)}
    scored = lab.box.run({**settings, "EVAL_ONLY": str(run.path("model.bin"))}, asked.folder, asked.tokens)
    same.ended(scored)
    at = len(ordinary) + length - 2
    for label, nats in scored.nats.items():
        same.sum_to_one({label: math.fsum(np.exp(-nats[at::length]))}, f"{world.pieces} pieces")
    yield f"over {world.pieces} pieces, the probabilities sum to one"


# ======================================================================================================
# A SCORE IS COUNTED ONCE, OVER THE BYTES OF THE TEXT
# ======================================================================================================


@law("every reported number is the sum of one ledger, over the bytes that the auditor counts", ("documents",))
def counts(lab: Lab) -> Iterator[str]:
    quick = {**NO_LEARNING, "ITERATIONS": "1"}
    for world in (
        lab.worlds.of_texts("spaced", words(3, 4, 60), 320),
        lab.worlds.with_sidecar("sidecar", random_text(8, 300), lab.worlds.short(), more=1),
        lab.worlds.cased(True), lab.worlds.long(30_001),
    ):
        same.counted_once(lab.train(world, quick), world)
        yield f"{world.folder.name}: {len(world.tokens) - 1} targets, {world.text_bytes} bytes"
    bare = lab.worlds.cased(False)
    run = lab.train(bare, quick)
    if run.status == 0:  # an honest script may refuse it
        same.counted_once(run, bare)
    yield "CaseOps marks count as no bytes"
    ids = lab.worlds.short().tokens
    part = lab.worlds.asks(ids[:101])
    same.counted_once(lab.ask(ids, {"VAL_TOKENS_LIMIT": "100"}), part, 100)
    yield "a score of part of the text is marked as not comparable"


# ======================================================================================================
# THE ARTIFACT DOES NOT KNOW THE VALIDATION TEXT, AND IS ALL THAT SCORING KNOWS
# ======================================================================================================


def limited(lab: Lab) -> dict[str, str]:
    """A limit of bytes in which quantization is felt; where bits are fixed, few of them."""
    if lab.settings.get("RATE_CONTROL") == "0":
        return {**AMPLE, "MATRIX_BITS": "3", "EMBED_BITS": "3"}
    run = lab.trained
    code = run.path("train_gpt.shipped.py").stat().st_size - len(AMPLE["ARTIFACT_BYTES_MAX"])
    weights = int(run.log.partition("model_params:")[2].split()[0])
    limit = code + HEAD_BYTES + weights // 2
    return {"ARTIFACT_BYTES_MAX": str(limit + len(str(limit)))}


def of_two_texts(lab: Lab, easy: World, hard: World, more: Mapping[str, str], ranks: int = 1) -> Run:
    """Two validation texts, one that gets better with training and one that gets worse: one artifact."""
    runs = [lab.train(world, more, ranks) for world in (easy, hard)]
    for run, world in zip(runs, (easy, hard), strict=True):
        same.counted_once(run, world)
    same.same_artifact(runs, "another validation text")
    return runs[0]


@law("the artifact knows nothing about the validation text", ("sgd", "configured"))
def validation(lab: Lab) -> Iterator[str]:
    worlds = lab.worlds
    limit = limited(lab)
    first = of_two_texts(lab, worlds.easy(), worlds.hard(), limit)
    yield "a different validation text doesn't change the artifact"
    alone(lab, first)
    yield "the artifact alone gives the same scores, with nothing else in reach"
    wrapped_as_it_is(lab, first)
    yield "the shipped script is the same program as its source"


@law("warm-up, rehearsal and prefetch leave no trace", ("configured",))
def warm_up(lab: Lab) -> Iterator[str]:
    warm = {"WARMUP_STEPS": "2", "TRAIN_PREFETCH": "1", "COMPILE": "1", "TRAINING_TIMING_BREAKDOWN": "1"}
    warmed = lab.train(lab.worlds.hard(), {**AMPLE, **warm})
    same.counted_once(warmed, lab.worlds.hard())
    same.same_artifact([lab.trained, warmed], "warm-up, rehearsal, prefetch or another validation text")
    yield "warm-up, rehearsal and prefetch don't change the artifact"


@law("not even after many steps, which read all shards again and again", ("documents",))
def many_steps(lab: Lab) -> Iterator[str]:
    many = {**AMPLE, "ITERATIONS": "120", "VAL_LOSS_EVERY": "40"}
    easy = lab.worlds.several("easy", lab.worlds.train[:400])
    hard = lab.worlds.several("hard", hard_text())
    warmed = of_two_texts(lab, easy, hard, {**many, "WARMUP_STEPS": "12"})
    plain = lab.train(easy, {**many, "VAL_LOSS_EVERY": "0"})
    same.same_artifact([warmed, plain], "twelve steps of warm-up, or validation during training")
    yield "a different text, validation, and 12 warm-up steps don't change the artifact of 120 steps"


def alone(lab: Lab, run: Run) -> None:
    """Shipped script, artifact, tokenizer and text in an empty folder give the scores of the run."""
    world = lab.worlds.easy()
    folder = Path(tempfile.mkdtemp(prefix="alone_", dir=lab.box.folder.parent))
    (folder / "data").mkdir()
    shutil.copy(run.path("train_gpt.shipped.py"), folder / "train_gpt.py")
    shutil.copy(run.path("model.bin"), folder)
    shutil.copy(world.folder / "tokenizer.model", folder)
    shutil.copy(world.folder / "fineweb_val_000000.bin", folder / "data")
    settings = {
        **lab.settings, "DATA_PATH": "data", "TOKENIZER_PATH": "tokenizer.model", "RUNS_DIR": ".",
        "RUN_ID": "again", "EVAL_ONLY": "model.bin",
    }
    prefix, _ = walls.around(folder, [], [lab.box.folder.parent])
    done = subprocess.run(
        [*prefix, sys.executable, "-B", "train_gpt.py"], cwd=folder, capture_output=True, text=True,
        check=False, env={**walls.environment(folder), **settings},
    )
    if done.returncode:
        raise Broken("alone", done.stderr.strip()[-300:])
    scores = json.loads((folder / "again" / "summary.json").read_text())["losses"]
    if {n: s["nats"] for n, s in scores.items()} != {n: s["nats"] for n, s in run.summary["losses"].items()}:
        raise Broken("alone", "the artifact alone gives different scores")


def wrapped_as_it_is(lab: Lab, run: Run) -> None:
    """The run keeps its source, and ships the same program."""
    source = lab.box.script.read_bytes()
    if run.path("train_gpt.py").read_bytes() != source:
        raise Broken("program", "the script that the run kept is not the one that ran")
    shipped = run.path("train_gpt.shipped.py").read_bytes().decode("latin-1")
    if not same_program(unwrap(shipped) or shipped, source.decode()):
        raise Broken("program", "the shipped script is not the same program as its source")


# ======================================================================================================
# RANKS, COMPILED CODE AND CLOCKS CHANGE NO SCORE
# ======================================================================================================


@law("several ranks, and compiled code, give the scores of one rank")
def ranks(lab: Lab) -> Iterator[str]:
    ids = lab.worlds.short().tokens
    small = {"TTT_LR": "0.03", "VAL_BATCH_SIZE": "256"}
    first = lab.ask(ids, small)
    same.same_nats(first, lab.ask(ids, {**small, "COMPILE": "1"}), "compiled code", same.LEARNED)
    yield "compiled code gives the same scores as plain code"
    world = lab.worlds.short()
    for number in RANKS:
        run = lab.ask(ids, small, number)
        same.same_nats(first, run, f"{number} ranks", same.LEARNED)
        same.counted_once(run, world)
    yield f"{', '.join(map(str, RANKS))} ranks give the same scores as one"


@law("two ranks train without the validation text, and one scores their artifact", ("projected tables",))
def trained_by_two(lab: Lab) -> Iterator[str]:
    worlds = lab.worlds
    several = of_two_texts(lab, worlds.easy(), worlds.hard(), AMPLE, 2)
    again = lab.ask(worlds.easy().tokens, artifact=several.path("model.bin"))
    same.same_nats(several, again, "one rank instead of two", same.LEARNED)
    yield "one rank gives an artifact of two ranks the same scores as they did"


LIMIT = 4000.0  # seconds of training by the auditor's clock
SHARE = 0.7  # of the time that a score with all its learning takes
LONG = 100_000.0  # seconds, of a jump


def read_between(run: Run, first: str, second: str) -> int:
    """A read of the clock half-way between two lines of a log."""
    places = [reads for reads, _, line in run.stamps if line.startswith((first, second))]
    if len(places) < 2:
        raise Broken("clock", f"the log has no lines {first} and {second}")
    return (places[0] + places[1]) // 2


@law("training ends by its clock, which is the auditor's", ("documents",))
def clock_of_training(lab: Lab) -> Iterator[str]:
    world = lab.worlds.short()
    by_time = {"MAX_WALLCLOCK_SECONDS": str(LIMIT), "ITERATIONS": "2000", "VAL_LOSS_EVERY": "0",
               "GPTQ_RESERVE_SECONDS": "100", "TRAIN_LOG_EVERY": "1"}
    run = lab.train(world, by_time, by_clock=Clock())
    same.counted_once(run, world)
    same.same_seconds(run)
    seconds, kept = same.limits_told(run)["train_seconds"]
    if not kept or run.summary["steps"] < 10:
        raise Broken("clock", f"{run.summary['steps']} steps in {seconds:.0f} s of {LIMIT:.0f}")
    yield f"{run.summary['steps']} steps fit into {LIMIT:.0f} s; all times agree with the auditor's clock"
    late = Clock(jump_at=read_between(run, "step:5/", "step:6/"), jump=LONG)
    stopped = lab.train(world, by_time, by_clock=late)
    same.counted_once(stopped, world)
    seconds, kept = same.limits_told(stopped)["train_seconds"]
    if kept or seconds < LONG or stopped.summary["steps"] > 7:
        taken = f"{stopped.summary['steps']} steps ran in {seconds:.0f} s, limit reported as kept: {kept}"
        raise Broken("clock", f"step 6 takes {LONG:.0f} s, the limit is {LIMIT:.0f}, and {taken}")
    yield "a step that takes too long is the last one, and the limit is reported as exceeded"


@law("test-time training stops when its time is up, by the clock alone", ("sgd", "documents"))
def clock_of_scores(lab: Lab) -> Iterator[str]:
    ids = lab.worlds.short().tokens
    # Next to an artifact, its run has noted where it learned, and that would be followed.
    bare = copied(lab, "bare", lab.artifact)
    in_pairs = {"TTT_BATCH_SIZE": "2"}
    ample = lab.ask(ids, {**in_pairs, "MAX_EVAL_SECONDS": "1000000"}, 1, Clock(), bare)
    same.same_nats(lab.ask(ids, in_pairs), ample, "a limit that leaves enough time")
    same.same_seconds(ample)
    label = ample.labels[0]
    needed = ample.summary["phases"][f"eval_{label}"]
    short = {"MAX_EVAL_SECONDS": f"{SHARE * needed:.0f}", **in_pairs}
    first = lab.ask(ids, short, 1, Clock(), bare)
    same.same_seconds(first)
    _, kept = same.limits_told(first)["eval_seconds"]
    if np.array_equal(first.nats[label], ample.nats[label]):
        if kept:
            raise Broken("clock", f"{label}: needs {needed:.0f} s, but learns as much in {SHARE:.0%} of that")
        yield f"{label}: it has no time limit, and says so"
        return
    yield f"{label}: with {SHARE:.0%} of the time that it needs, it learns less"
    for place in (64, 35):
        for changed in other_endings(lab, ids, [place]):
            same.blind(first, lab.ask(changed, short, 1, Clock(), bare), False)
    yield "where it learns doesn't depend on later tokens"
    noted = copied(lab, "noted", lab.artifact, first.path("eval_modes.json"))
    for tick in (0.001, 10.0):
        again = lab.ask(ids, short, 1, Clock(tick), noted)
        same.ended(again)
        if not np.array_equal(again.nats[label], first.nats[label]):
            raise Broken("clock", f"{label}: another clock changes scores in spite of the recorded choices")
    yield "with the recorded choices of where to learn, the score is the same by any clock"
    late = Clock(jump_at=read_between(ample, "phase:reload", f"phase:eval_{label}"), jump=LONG)
    seconds, kept = same.limits_told(lab.ask(ids, short, 1, late, bare))["eval_seconds"]
    if kept or seconds < LONG:
        raise Broken("clock", f"{label}: takes {LONG:.0f} s longer, but reports {seconds:.0f}, kept: {kept}")
    yield "an exceeded limit is reported as exceeded"


def copied(lab: Lab, name: str, *files: Path) -> Path:
    """The first of some files, copied with the others to a folder of their own."""
    folder = lab.worlds.folder / f"{name}-{lab.name}"
    folder.mkdir(exist_ok=True)
    for path in files:
        shutil.copy(path, folder)
    return folder / files[0].name
