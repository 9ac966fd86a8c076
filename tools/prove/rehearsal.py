"""Whole runs of a script on synthetic documents, watched: what is read when, and what comes out.

B4 and B10 for the figures of a real run, B7, B8 and B14 for what must not change it, B12 for its artifact.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import sentencepiece
import torch

from data import shards
from tools.check.findings import Finding, fail, info, warn
from tools.prove import tiny
from tools.prove.cell import in_cell, record
from tools.prove.probes import REPORTED, weights_of
from tools.runs.folder import CONFIG

GRAM = 8  # tokens that tell validation text from training text
FIXED_BITS = 5  # at most, of a code where settings fix them: of 8 bits too little would be felt
FELT = 0.01  # of the weights' size: what quantization must at least change for a proof about it
BITS_PER_WEIGHT = 4.0  # that the artifact's limit leaves
ALONE_SECONDS_MAX = 600
ROUNDED = 1e-5  # nats of a mean
TRAINING_SEED, FIRST_SEED, SECOND_SEED = 0, 1, 2
# Data sets: the same training text, another validation text. Their names are of one length: a run ships its
# settings, so a longer path would leave fewer bytes for its artifact.
FIRST, SECOND = "data_1", "data_2"
TEXTS = [
    "",
    "a",
    "a plain line",
    "two  spaces",
    "café 東京 🙂 nul\x00byte",
    "tab\tand\nnewline",
    "ﬁ ½ Große",
]


# ======================================================================================================
# LABORATORY: documents, tokenizer, shards
# ======================================================================================================


def sample_texts(seed: int, documents: int) -> list[str]:
    """Documents of random words; two seeds share next to no run of tokens."""
    random = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(random.choice(letters, random.integers(1, 8))) for _ in range(300)]
    return [" ".join(random.choice(words, random.integers(5, 60))) for _ in range(documents)]


@record
@dataclass(frozen=True)
class Laboratory:
    """A folder with a tokenizer and two data sets; the second has a byte sidecar.

    text_bytes: of all validation documents of each data set, by this module's own count.
    """

    folder: Path
    pieces: sentencepiece.SentencePieceProcessor
    text_bytes: Mapping[str, int]

    def to_cell(self) -> list[Path]:
        """What crosses to the script's process."""
        return [self.folder]

    @staticmethod
    def from_cell(folder: Path) -> Laboratory:
        """The laboratory again."""
        return open_laboratory(folder)

    @property
    def tokenizer(self) -> Path:
        """The SentencePiece model."""
        return self.folder / "tokenizer.model"

    @property
    def spaced(self) -> Path:
        """A SentencePiece model with the defaults of its kind, as those of the challenge have them."""
        return self.folder / "spaced.model"

    def data(self, name: str) -> Path:
        """The folder of a data set."""
        return self.folder / name

    def tokens(self, split: str, name: str = FIRST) -> np.ndarray:
        """Token ids of a split."""
        return np.array(shards.read_shard(shard_path(self.data(name), split)))

    def grams(self, split: str, name: str = FIRST) -> set[bytes]:
        """Every run of GRAM tokens of a split."""
        rows = np.lib.stride_tricks.sliding_window_view(self.tokens(split, name).astype(np.int64), GRAM)
        return {row.tobytes() for row in rows}


def shard_path(folder: Path, split: str) -> Path:
    """The one shard of a split."""
    return folder / f"fineweb_{split}_000000.bin"


def build_laboratory(folder: Path) -> Laboratory:
    """Train a tiny tokenizer that gives every text back, and write both data sets."""
    training = sample_texts(TRAINING_SEED, 200)
    validation = {FIRST: sample_texts(FIRST_SEED, 12), SECOND: sample_texts(SECOND_SEED, 15)}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*training, *validation[FIRST], *validation[SECOND]]),
        model_prefix=str(folder / "tokenizer"), vocab_size=tiny.FOR_RUN.vocabulary, model_type="bpe",
        byte_fallback=True, unk_id=0, bos_id=shards.BOS_ID, eos_id=2, character_coverage=1.0, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    sentencepiece.SentencePieceTrainer.train(  # as most are made: with a space before each text
        sentence_iterator=iter(training), model_prefix=str(folder / "spaced"), bos_id=shards.BOS_ID,
        vocab_size=tiny.FOR_RUN.vocabulary, model_type="bpe", byte_fallback=True, unk_id=0, eos_id=2,
        minloglevel=2,
    )  # fmt: skip
    text_bytes = {}
    for name, texts in validation.items():
        (folder / name).mkdir()
        shards.write_shard(shard_path(folder / name, "train"), packed(pieces, training))
        shards.write_shard(shard_path(folder / name, "val"), packed(pieces, texts))
        text_bytes[name] = sum(len(text.encode()) for text in texts)
    # The second data set says itself how many bytes a token stands for: one more at the end of a document,
    # as if a newline had been there. A script that counts pieces instead is off by one a document.
    counts = sidecar_counts(pieces, validation[SECOND])
    shards.write_shard(shard_path(folder / SECOND, "val_bytes"), counts)
    text_bytes[SECOND] = int(counts.sum())
    audit = {"splits": {"val": {"audit": {"sidecar_bytes": text_bytes[SECOND]}}}}
    (folder / SECOND / "manifest.json").write_text(json.dumps(audit), encoding="utf-8")
    (folder / "text_bytes.json").write_text(json.dumps(text_bytes), encoding="utf-8")
    return open_laboratory(folder)


def open_laboratory(folder: Path) -> Laboratory:
    """The laboratory that was built in a folder."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return Laboratory(folder, pieces, json.loads((folder / "text_bytes.json").read_text(encoding="utf-8")))


def packed(pieces: sentencepiece.SentencePieceProcessor, texts: list[str]) -> np.ndarray:
    """The ids of documents, a BOS before each."""
    ids: list[int] = []
    for text in texts:
        ids += [shards.BOS_ID, *pieces.encode(text)]
    return np.array(ids)


def sidecar_counts(pieces: sentencepiece.SentencePieceProcessor, texts: list[str]) -> np.ndarray:
    """Bytes of each token of packed documents: those by which it lengthens the decoded text."""
    counts: list[int] = []
    for text in texts:
        ids = pieces.encode(text)
        lengths = [len(pieces.decode(ids[:i]).encode()) for i in range(len(ids) + 1)]
        of_document = np.diff(lengths)
        of_document[-1] += 1
        counts += [0, *of_document.tolist()]
    return np.array(counts)


# ======================================================================================================
# RUN
# ======================================================================================================


@record
class Pass(NamedTuple):
    """One forward pass of a run."""

    phase: str
    learns: bool  # or calibrates
    grams: list[bytes]  # a few runs of GRAM tokens of its inputs


# Takes the number of a validation during training; returns the nats that it is made to see.
Forgery = Callable[[int], float]


@record
@dataclass
class Watch:
    """The forward passes of a run, in order, and the phases in which ledgers were begun.

    run: the script's Run once it has begun. shipped: the weights that were handed to `write_artifact`.
    forged: replaces what validations see during training, each by one number; None: nothing is replaced.
    """

    passes: list[Pass] = field(default_factory=list)
    ledgers: list[str] = field(default_factory=list)
    run: Any = None
    shipped: dict[str, torch.Tensor] = field(default_factory=dict)
    forged: Forgery | None = None

    def to_cell(self) -> list[Any]:
        """What crosses from the script's process."""
        return [self.passes, self.ledgers, self.run, self.shipped]

    @property
    def phase(self) -> str:
        """The phase that the run is in."""
        return self.run.phase_name if self.run else ""


def rising(number: int) -> float:
    """Validation gets worse and worse: the first model looks best."""
    return 2.0 + 0.1 * number


def falling(number: int) -> float:
    """Validation gets better and better: the last model looks best."""
    return 9.0 - 0.1 * number


@contextlib.contextmanager
def watched_run(script: ModuleType, watch: Watch) -> Iterator[None]:
    """Record what a run of the script does."""
    model_class = type(script.build_model(script.Config.from_env(tiny.scorer(script))))
    forward = model_class.forward
    start = script.Run.__init__
    begin = script.Ledger.__init__
    record = script.Ledger.record
    write = getattr(script, "write_artifact", None)

    def watched_forward(model: Any, inputs_BT: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        observe = named.get("observe", getattr(model, "observer", None))  # older scripts: an attribute
        if observe is None and len(rest) > 2:
            observe = rest[2]
        learns = torch.is_grad_enabled() or observe is not None
        watch.passes.append(Pass(watch.phase, learns, some_grams(inputs_BT)))
        return forward(model, inputs_BT, *rest, **named)

    def watched_start(run: Any, *args: Any) -> None:
        start(run, *args)
        watch.run = watch.run or run  # a clock without a run makes one, too

    def watched_begin(ledger: Any, *args: Any, **named: Any) -> None:
        begin(ledger, *args, **named)
        watch.ledgers.append(watch.phase)

    def watched_record(ledger: Any, first: int, nats: np.ndarray, *rest: Any) -> None:
        if watch.forged is not None and watch.phase in ("train", "hessians"):
            nats = np.full_like(nats, watch.forged(len(watch.ledgers)))
        record(ledger, first, nats, *rest)

    def watched_write(*args: Any, **named: Any) -> Any:
        watch.shipped = weights_of(model_among(args))
        assert write is not None
        return write(*args, **named)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(model_class, "forward", watched_forward))
        stack.enter_context(mock.patch.object(script.Run, "__init__", watched_start))
        stack.enter_context(mock.patch.object(script.Ledger, "__init__", watched_begin))
        stack.enter_context(mock.patch.object(script.Ledger, "record", watched_record))
        if write is not None:
            stack.enter_context(mock.patch.object(script, "write_artifact", watched_write))
        yield


def model_among(args: Sequence[Any]) -> Any:
    """The model among the arguments of `write_artifact`: the first one; of older scripts the second."""
    return next(value for value in args if isinstance(value, torch.nn.Module))


def code_bytes_of(script: ModuleType, config: Any) -> int:
    """Bytes of a script in the form that it counts; older ones had a setting for it."""
    source = Path(script.__file__ or "").read_bytes()
    forms = [config.code_bytes] if hasattr(config, "code_bytes") else []
    shipped = script.shipped_code(source, *forms)
    return len(script.with_settings(shipped, config) if hasattr(script, "with_settings") else shipped)


def some_grams(inputs_BT: torch.Tensor) -> list[bytes]:
    """GRAM tokens from the beginning and from the middle of every row."""
    grams = []
    for row in inputs_BT.cpu().numpy():
        for start in (0, len(row) // 2):
            grams.append(row[start : start + GRAM].tobytes())
    return grams


@in_cell
def settings_for_runs(script: ModuleType, config: Any) -> tuple[dict[str, str], list[str]]:
    """A config's settings for a tiny run with an artifact in which quantization is felt; what was shrunk."""
    settings, shrunk = tiny.shrink(config, tiny.FOR_RUN)
    settings.update(tiny.RUN)
    if config.warmdown_iters > 0:
        settings["WARMDOWN_ITERS"] = tiny.RUN["ITERATIONS"]
    small = script.Config.from_env(settings)
    weights = sum(parameter.numel() for parameter in script.build_model(small).parameters())
    code_bytes = code_bytes_of(script, small)
    if small.rate_control:
        weight_bytes = math.ceil(BITS_PER_WEIGHT * weights / 8)
    else:
        weight_bytes = 2 * weights  # no limit makes fixed bits fewer: they are made fewer here
        for name in ("MATRIX_BITS", "EMBED_BITS"):
            bits = int(small.as_env()[name])
            if bits > FIXED_BITS:
                settings[name] = str(FIXED_BITS)
                shrunk.append(f"{name} {bits} -> {FIXED_BITS}")
    settings["ARTIFACT_BYTES_MAX"] = str(code_bytes + 1200 + weight_bytes)
    return settings, shrunk


@record
@dataclass(frozen=True)
class Outcome:
    """A finished run: what was watched, its directory, and the data set it had."""

    watch: Watch
    directory: Path
    data: str

    @property
    def summary(self) -> dict[str, Any]:
        """Its summary.json."""
        loaded: dict[str, Any] = json.loads((self.directory / "summary.json").read_text(encoding="utf-8"))
        return loaded

    def log(self) -> str:
        """Its log."""
        return (self.directory / "log.txt").read_text(encoding="utf-8")


@in_cell
def run_script(
    script: ModuleType, laboratory: Laboratory, name: str, settings: Mapping[str, str],
    data: str = FIRST, forged: Forgery | None = None,
) -> Outcome:  # fmt: skip
    """Do a whole tiny run in this process; what it compiles stays as it is. RuntimeError when it fails."""
    runs = laboratory.folder / "runs"
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    environment |= settings
    environment |= {"DATA_PATH": str(laboratory.data(data)), "TOKENIZER_PATH": str(laboratory.tokenizer)}
    environment |= {"RUNS_DIR": str(runs), "RUN_ID": name}
    watch = Watch(forged=forged)
    with mock.patch.dict(os.environ, environment, clear=True), \
            mock.patch.object(sys, "argv", [script.__file__]), \
            mock.patch.object(torch, "compile", lambda function, **_: function), \
            watched_run(script, watch), \
            contextlib.redirect_stdout(sys.stderr):  # fmt: skip
        status = script.main()
    if status:
        raise RuntimeError(f"the tiny run {name} ended with status {status}; its log is above")
    return Outcome(watch, runs / name, data)


# ======================================================================================================
# FINDINGS OF ONE RUN
# ======================================================================================================


def data_apart(laboratory: Laboratory, outcome: Outcome) -> Iterator[Finding]:
    """B8: nothing learns from or calibrates on validation, which sees no training text in evaluation."""
    training = laboratory.grams("train", outcome.data)
    validation = laboratory.grams("val", outcome.data)
    before_evaluation = 0
    for phase, learns, grams in outcome.watch.passes:
        stolen: set[bytes] = set()
        if phase.startswith("eval_"):
            what = "training text is read"
            stolen = (training - validation).intersection(grams)
        else:
            before_evaluation += 1
            if learns:
                what = "a pass learns from or calibrates on validation text"
                stolen = (validation - training).intersection(grams)
        if stolen:
            tokens = np.frombuffer(stolen.pop(), np.int64).tolist()
            text = f"{what} in phase {phase!r}: tokens {tokens}"
            yield fail("B8", text, "a whole tiny run", "keep the splits apart (#728)")
            return
    in_evaluation = len(outcome.watch.passes) - before_evaluation
    text = (
        f"{before_evaluation} passes before evaluation, none learns from validation;"
        f" {in_evaluation} in it, none on training text"
    )
    yield info("B8", text, "a whole tiny run")


def one_score_each(laboratory: Laboratory, outcome: Outcome) -> Iterator[Finding]:
    """B3 and B7 of a whole run: one ledger a label; validation is read in training's checks and in timers."""
    validation = laboratory.grams("val", outcome.data)
    training = laboratory.grams("train", outcome.data)
    where = "a whole tiny run"
    for phase, _, grams in outcome.watch.passes:
        timed = phase.startswith("eval_") or phase in ("train", "hessians")
        if not timed and (validation - training).intersection(grams):
            text = f"validation text is read in phase {phase!r}, outside the timers of evaluation (#1530)"
            yield fail("B7", text, where, "warm up on random tokens, score in a timed phase")
            break
    labels = list(outcome.summary["losses"])
    begun = [
        phase for phase in outcome.watch.ledgers
        if phase not in ("train", "hessians") and not phase.startswith("rehearse_")
    ]  # fmt: skip
    expected = [f"eval_{label}" for label in labels]
    if begun != expected:
        text = f"ledgers begun in {begun}, expected one in each of {expected}"
        yield fail("B3", text, where, "score once: no second pass, no choice among passes (C4)")
        return
    yield info("B3", f"{len(labels)} labels, a ledger each, none elsewhere after training", where)


def figures(laboratory: Laboratory, outcome: Outcome) -> Iterator[Finding]:
    """B4 and B10 of a whole run: scored tokens and bytes are those of the texts; bpb follows from them."""
    text_bytes = laboratory.text_bytes[outcome.data]
    targets = len(laboratory.tokens("val", outcome.data)) - 1
    where = f"run {outcome.directory.name}"
    log = outcome.log()
    for label, loss in outcome.summary["losses"].items():
        expected = {"val_bytes": text_bytes, "scored_tokens": targets}
        got = {"val_bytes": loss["bytes"], "scored_tokens": loss["scored_tokens"]}
        for line in log.splitlines():
            if f"{label}_exact " in line:
                printed = dict(REPORTED.findall(line))
                got |= {f"printed {name}": int(printed[name]) for name in expected if name in printed}
        for name, value in got.items():
            right = expected[name.removeprefix("printed ")]
            if value != right:
                check = "B10" if "bytes" in name else "B4"
                text = f"{label}: {name} is {value}, the texts have {right}"
                yield fail(check, text, where, "count every byte and every target of the text once")
                return
        bits = loss["nats"] * targets / math.log(2) / text_bytes
        if not math.isclose(loss["bits_per_byte"], bits, rel_tol=1e-9):
            text = f"{label}: {loss['bits_per_byte']} bits per byte, nats and text give {bits}"
            yield fail("B4", text, where, "divide by the bytes of the text")
            return
    yield info("B10", f"{text_bytes} bytes and {targets} targets, as the texts have", where)
    yield sizes(outcome)


def sizes(outcome: Outcome) -> Finding:
    """B12: the code that is counted is the one that is shipped, and with the artifact it keeps the limit."""
    where = f"run {outcome.directory.name}"
    summary = outcome.summary
    shipped = outcome.directory / "train_gpt.shipped.py"
    if not shipped.is_file():  # an older script
        return warn("B12", "not checked: no script as it is shipped", where, "write train_gpt.shipped.py")
    code_bytes = shipped.stat().st_size
    total_bytes = code_bytes + (outcome.directory / "model.bin").stat().st_size
    limit = int(summary["config"]["ARTIFACT_BYTES_MAX"])
    logged = re.findall(r"^(?:Code size|Total submission size).*: (\d+) bytes", outcome.log(), re.MULTILINE)
    if logged != [str(code_bytes), str(total_bytes)] or summary["code"]["bytes_wrapped"] != code_bytes:
        text = f"logged {logged} bytes, the shipped script has {code_bytes}, with the artifact {total_bytes}"
        return fail("B12", text, where, "count the files that are shipped")
    if total_bytes > limit:
        return fail("B12", f"{total_bytes} bytes, at most {limit} may be shipped", where, "keep the limit")
    return info("B12", f"script and artifact have {total_bytes} bytes, as logged, of {limit}", where)


def data_untouched(laboratory: Laboratory, before: dict[str, str]) -> Finding:
    """B12: nothing was written beside the shards, where evaluation would find it again."""
    changed = sorted(name for name, _ in before.items() ^ data_files(laboratory).items())
    if changed:
        text = f"{', '.join(dict.fromkeys(changed))} written or changed in the folder of the data"
        return fail("B12", text, "whole tiny runs", "write into the run directory alone")
    return info("B12", f"{len(before)} files of the data are as they were, and no other", "whole tiny runs")


def data_files(laboratory: Laboratory) -> dict[str, str]:
    """The files of both data sets with their SHA-256."""
    files = [path for name in (FIRST, SECOND) for path in laboratory.data(name).rglob("*") if path.is_file()]
    return {
        str(path.relative_to(laboratory.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def limited(
    script: ModuleType, laboratory: Laboratory, settings: Mapping[str, str], first: Outcome
) -> Iterator[Finding]:
    """B4 of an artifact that is scored again: all of the text as it was, a part of it with a mark."""
    again = {**settings, "EVAL_ONLY": str(first.directory / "model.bin")}
    whole = run_script(script, laboratory, "again", {**again, "MAX_EVAL_SECONDS": "600"})
    # The artifact decides on its model, whatever is set; without learning the limit of time is for nobody.
    fewer = {"VAL_TOKENS_LIMIT": "100", "LEAKY_SLOPE": "0.25", "TTT_ENABLED": "0"}
    part = run_script(script, laboratory, "part", {**again, **fewer})
    if whole.summary["losses"] != first.summary["losses"]:
        yield fail("B4", "EVAL_ONLY gives other losses than the run", "EVAL_ONLY", "score the artifact alone")
        return
    losses = part.summary["losses"].values()
    marked = [line for line in part.log().splitlines() if "_exact val_loss" in line]
    told = not part.summary["comparable"] and all("comparable:0" in line for line in marked)
    if not told or {loss["scored_tokens"] for loss in losses} != {100}:
        text = "a score of 100 targets is called comparable, or is of others"
        yield fail("B4", text, "VAL_TOKENS_LIMIT", "mark every line of such a score with comparable:0")
        return
    yield info(
        "B4", "an artifact scored again has the same losses; a part of the text is marked", "EVAL_ONLY"
    )


@in_cell
def lost(script: ModuleType, outcome: Outcome) -> tuple[float, float]:
    """Sizes of the difference between shipped and stored weights, and of those shipped; 0, 0 if unknown."""
    with contextlib.redirect_stdout(sys.stderr):
        model, _ = script.load_artifact(outcome.directory / "model.bin")
    stored = model.state_dict()
    shipped = outcome.watch.shipped
    if stored.keys() != shipped.keys():
        return 0.0, 0.0
    names = [name for name in stored if stored[name].ndim > 1]
    difference = math.sqrt(sum(float((stored[name] - shipped[name]).square().sum()) for name in names))
    return difference, math.sqrt(sum(float(shipped[name].square().sum()) for name in names))


def quantization_felt(script: ModuleType, outcome: Outcome) -> Iterator[Finding]:
    """B12: the artifact holds other weights than training left, so that to score those would show."""
    difference, size = lost(script, outcome)
    if size == 0:
        text = "not checked: which weights were handed to `write_artifact` cannot be told"
        yield warn("B12", text, "model.bin", "offer write_artifact(model, ...)")
        return
    text = f"quantization changed the weights by {difference / size:.1%} of their size"
    if difference < FELT * size:
        yield warn("B12", f"not checked: {text}", "model.bin", "a tighter limit would be needed")
    else:
        yield info("B12", text, "model.bin")


# ======================================================================================================
# FINDINGS ABOUT TWO RUNS
# ======================================================================================================


WARM = {"WARMUP_STEPS": "2", "TRAIN_PREFETCH": "1", "COMPILE": "1"}


@in_cell
def warm_settings(script: ModuleType, settings: Mapping[str, str]) -> dict[str, str]:
    """The settings with WARM. The script ships them, so the limit moves: weights get as many bytes."""
    warm = {**settings, **WARM}
    more = code_bytes_of(script, script.Config.from_env(warm))
    more -= code_bytes_of(script, script.Config.from_env(dict(settings)))
    return {**warm, "ARTIFACT_BYTES_MAX": str(int(settings["ARTIFACT_BYTES_MAX"]) + more)}


def differing(first: Outcome, second: Outcome, losses: bool) -> list[str]:
    """What of two runs is not the same: stream hash, artifact and, where asked for, losses.

    Code that is compiled scores full batches, so losses may differ by rounding.
    """
    results: list[dict[str, Any]] = []
    for outcome in (first, second):
        summary = outcome.summary
        artifact = hashlib.sha256((outcome.directory / "model.bin").read_bytes()).hexdigest()
        result = {"stream hash": summary["stream_hash"], "artifact": artifact}
        if losses:
            result["losses"] = Nearly([loss["nats"] for loss in summary["losses"].values()])
        results.append(result)
    return [name for name, value in results[0].items() if value != results[1][name]]


class Nearly(list[float]):
    """Losses that equal others up to the rounding of other batches."""

    def __ne__(self, other: object) -> bool:
        return not (isinstance(other, list) and np.allclose(self, other, rtol=0, atol=ROUNDED))


def same_result(first: Outcome, second: Outcome) -> Iterator[Finding]:
    """B7 and B14: warm-up and prefetch change neither the artifact nor the losses."""
    differs = differing(first, second, losses=True)
    for check, what in (("B7", "two warm-up steps and a rehearsed end"), ("B14", "prefetching loader")):
        if differs:
            text = f"{', '.join(differs)} differ with and without {what}"
            yield fail(check, text, "two tiny runs", "undo it exactly")
        else:
            text = f"stream hash, artifact and losses are the same with and without {what}"
            yield info(check, text, "two tiny runs")


def unaware_of_validation(first: Outcome, second: Outcome) -> Iterator[Finding]:
    """B8: another validation text, and other results of validating it, leave every byte of the artifact."""
    differs = differing(first, second, losses=False)
    if differs:
        text = f"{', '.join(differs)} depend on the validation text or on its score during training"
        yield fail("B8", text, "two tiny runs", "let nothing of validation reach training (#728)")
    else:
        text = "two validation texts, with opposite results during training, give the same artifact"
        yield info("B8", text, "two tiny runs")


# ======================================================================================================
# THE ARTIFACT ALONE
# ======================================================================================================


def artifact_alone(laboratory: Laboratory, outcome: Outcome, has_network: bool) -> Iterator[Finding]:
    """B12: artifact and shipped script in an empty folder score the same, to the bit, in a fresh process.

    All else is out of reach: the folder of the laboratory has another name for that time, and the process
    has a home and a folder for temporary files of its own. has_network: whether it could reach a network.
    """
    summary = outcome.summary
    model = outcome.directory / "model.bin"
    size_bytes = model.stat().st_size
    counted_bytes = summary["artifact"]["bytes"]
    if size_bytes != counted_bytes:
        text = f"artifact has {size_bytes} bytes, {counted_bytes} were counted"
        yield fail("B12", text, model.name, "count the file that is written")
        return
    folder = laboratory.folder.with_name(f"{laboratory.folder.name}-alone-{outcome.directory.name}")
    environment = alone_in(folder, laboratory, outcome)
    status, last = run_alone(folder, environment, laboratory.folder)
    if status:
        yield fail("B12", f"alone it ends with {status}: {last}", model.name, "ship all it needs")
        return
    alone = json.loads((folder / "runs" / "alone" / "summary.json").read_text(encoding="utf-8"))["losses"]
    for label, loss in summary["losses"].items():
        if alone.get(label) != loss:
            text = f"{label}: alone the artifact scores {alone.get(label)}, the run reported {loss}"
            yield fail("B12", text, model.name, "score what the file gives back, and nothing else")
            return
    network = "with the network in reach" if has_network else "without network"
    text = f"{size_bytes} bytes as counted; alone, {network}, all {len(alone)} labels score the same bits"
    yield info("B12", text, model.name)


@in_cell
def run_alone(folder: Path, environment: Mapping[str, str], laboratory: Path) -> tuple[int, str]:
    """Exit status and last message of the script in `folder`, while the laboratory has another name."""
    hidden = laboratory.with_name(f"{laboratory.name}-hidden")
    laboratory.rename(hidden)
    try:
        command = [*without_shared_memory(), sys.executable, "-B", str(folder / "train_gpt.py")]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", errors="replace",
            timeout=ALONE_SECONDS_MAX, check=False,
        )  # fmt: skip
    finally:
        hidden.rename(laboratory)
    return done.returncode, (done.stderr.strip().splitlines() or ["no message"])[-1]


def without_shared_memory() -> list[str]:
    """What starts a command with an empty /dev/shm of its own; empty where the system has none for us."""
    command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
    try:
        done = subprocess.run([*command, "true"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return command if done.returncode == 0 else []


def alone_in(folder: Path, laboratory: Laboratory, outcome: Outcome) -> dict[str, str]:
    """Copy to `folder` what evaluation may have; the environment of its process."""
    for name in ("home", "temporary", "data"):
        (folder / name).mkdir(parents=True)
    shipped = outcome.directory / "train_gpt.shipped.py"
    if not shipped.is_file():  # an older script
        shipped = outcome.directory / "train_gpt.py"
    shutil.copy(shipped, folder / "train_gpt.py")
    shutil.copy(outcome.directory / "model.bin", folder / "model.bin")
    shutil.copy(laboratory.tokenizer, folder / "tokenizer.model")
    for split in ("val", "val_bytes"):  # those that were made here, and no other file beside them
        shard = shard_path(laboratory.data(outcome.data), split)
        if shard.is_file():
            shutil.copy(shard, folder / "data" / shard.name)
    environment = {key: os.environ[key] for key in ("PATH", "LANG", "OMP_NUM_THREADS") if key in os.environ}
    for line in (outcome.directory / CONFIG).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, _, value = line.partition("=")
            environment[name.strip()] = value.strip()
    return environment | {
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "temporary"),
        "DATA_PATH": str(folder / "data"),
        "TOKENIZER_PATH": str(folder / "tokenizer.model"),
        "RUNS_DIR": str(folder / "runs"),
        "RUN_ID": "alone",
        "EVAL_ONLY": str(folder / "model.bin"),
    }
