"""`prove --replay FOLDER`: some documents of a run's validation text are scored again, and compared.

A run leaves the nats of each document. The folder's script and artifact score a few of them anew, in a fresh
process without network, on a CPU. A script that cheated in the run alone, an artifact that was changed, and a
log that was edited are differences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from data.files import sha256_file
from data.shards import BOS_ID
from tools.check.findings import Finding, fail, info, warn
from tools.prove import cell
from tools.runs.derive import noted_bytes
from tools.runs.errors import RecordError
from tools.runs.folder import CONFIG, MANIFEST, NATS_NAME, SCRIPT, required_object
from tools.runs.logs import RunLog, read_log
from tools.runs.runs import LOG, settings_of

CHECK = "R1"
ARTIFACT = "model.bin"
MODES = "eval_modes.json"
SUMMARY = "summary.json"
PLACES = ("DATA_PATH", "TOKENIZER_PATH")
LABELS = ("legal_ttt", "sliding_window", "roundtrip")
DOCUMENTS = 8
# Nats a target, between a run and a replay on the same machine in fp32: other documents stand beside in a
# batch. Honest runs of 4 layers, 30 steps and 12 documents, with batches of 1 and 4 rows, had 2.6e-8 at most.
TOLERANCE = 1e-6
# A run in bfloat16, as on a GPU: ten times the most between such runs and their replay in fp32, 2.4e-3.
OTHER_MACHINE_TOLERANCE = 0.024
ON_CPU = {"DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "COMPILE": "0", "MAX_EVAL_SECONDS": "0"}


@dataclass(frozen=True)
class Witness:
    """In the script's process: a folder's script with the settings of its run, its model and its text."""

    script: ModuleType
    model: Any
    config: Any
    tokens: np.ndarray
    begins: np.ndarray  # the first target of each document, and the end of the last
    modes: dict[str, int]

    def again(self, label: str, document: int) -> np.ndarray | None:
        """The nats of a document, scored anew; None where they depend on what stands before it."""
        begin, end = self.begins[document], self.begins[document + 1]
        if label != "legal_ttt":
            return self._by_windows(label, begin, end)
        if self.config.ttt_mode != "lora":
            # Only the first chunk has the weights of the artifact.
            return self._by_windows(label, begin, end) if end <= self.config.ttt_chunk_tokens else None
        clock = self.script.ScoreClock(followed={"0": int(self._learned(document))})
        text = self.tokens[begin : end + 1]
        return np.array(self.script.score_ttt(self.model, text, self.config, clock).nats)

    def _learned(self, document: int) -> bool:
        """Whether the run learned from a document: what it noted of the first one of its batch."""
        longest_first = np.argsort(-np.diff(self.begins), kind="stable")
        size = self.config.documents_at_once(self.config.eval_length)
        place = int(np.flatnonzero(longest_first == document)[0])
        return bool(self.modes.get(str(longest_first[place // size * size]), 1))

    def _by_windows(self, label: str, begin: int, end: int) -> np.ndarray:
        """Only the windows that reach the document are read: they are those of the whole text."""
        config = self.config
        chunk = config.ttt_chunk_tokens if label == "legal_ttt" else 32 * config.val_pass_tokens
        if label == "roundtrip":
            config = replace(config, eval_stride=config.eval_length)
        scorer = self.script.WindowScorer(self.model, self.tokens, config, chunk, True)
        rows = np.concatenate(scorer.chunks)
        rows = rows[(rows[:, 2] > begin) & (rows[:, 1] < end)]
        return np.array(scorer.score(rows))[begin - rows[0, 1] :][: end - begin]


@cell.record
class Text(NamedTuple):
    """What a folder's script reads: the text of the run and how many bytes it has; and its witness."""

    tokens: np.ndarray
    bytes_total: int
    witness: Any


@cell.in_cell
def opened(script: Any, folder: Path, settings: Mapping[str, str]) -> Text:
    """The text and the artifact of a run, as the folder's script reads them with the run's settings."""
    config = script.Config.from_env({**settings, **ON_CPU})
    model, about = script.load_artifact(folder / ARTIFACT)
    config = script.Config.from_values({**config.as_env(), **about.config})
    shards = script.open_shards(f"{script.find_path(config.data_path)}/fineweb_val_[0-9]*.bin")
    validation = script.read_validation(shards, config)
    followed = modes_of(folder)
    begins = begins_of(validation.tokens)
    witness = Witness(script, model, config, validation.tokens, begins, followed)
    return Text(np.asarray(validation.tokens), int(validation.bytes_total), witness)


def modes_of(folder: Path) -> dict[str, int]:
    """Where a run's score learned, by the first document of each batch. RecordError for a damaged file."""
    path = folder / MODES
    followed = required_object(path) if path.is_file() else {}
    odd = [name for name, targets in followed.items() if not isinstance(targets, int)]
    if odd:
        raise RecordError(f"{path} has {followed[odd[0]]!r} for document {odd[0]}, expected a number")
    return followed


@cell.in_cell
def again(witness: Witness, label: str, document: int) -> np.ndarray | None:
    """`Witness.again`, asked from outside."""
    return witness.again(label, document)


def begins_of(tokens: np.ndarray) -> np.ndarray:
    """The first target of each document, and the end of the last."""
    return np.append(np.flatnonzero(tokens[:-1] == BOS_ID), len(tokens) - 1)


@dataclass(frozen=True)
class Run:
    """What a run directory says: nats of each document by label, its log, its settings."""

    nats: dict[str, np.ndarray]
    log: RunLog
    settings: dict[str, str]

    @staticmethod
    def of_folder(folder: Path, data: Mapping[str, str]) -> Run:
        """data: DATA_PATH and TOKENIZER_PATH, if not the run's. RecordError where a file is missing."""
        for name in (SCRIPT, ARTIFACT, CONFIG, LOG):
            if not (folder / name).is_file():
                raise RecordError(f"{folder}: no {name}; --replay needs a run directory with its artifact")
        nats = {}
        for label in LABELS:
            file = folder / NATS_NAME.format(label=label)
            if file.is_file():
                nats[label] = np.fromfile(file, np.float64)
        if not nats:
            name = NATS_NAME.format(label=LABELS[0])
            raise RecordError(f"{folder}: no {name}; runs of version 0.6 on write the nats of documents")
        settings = {**settings_of(folder / CONFIG), **data}
        for name in PLACES:  # of the working directory, if they are there
            if name in settings and Path(settings[name]).expanduser().exists():
                settings[name] = str(Path(settings[name]).expanduser().resolve())
        return Run(nats, read_log(folder / LOG), settings)

    @property
    def on_this_machine(self) -> bool:
        """Whether the run was one of fp32 on a CPU, so that its rounding is that of a replay."""
        ran = self.log.conditions
        return ran.get("device", "").endswith("CPU") and "float32" in ran.get("dtype", "")


def findings(
    folder: Path, documents: int, seed: int, data: Mapping[str, str], scratch: Path
) -> Iterator[Finding]:
    """`compared`, the folder's script in a process apart.

    data: as in `Run.of_folder`. scratch: where the script's process may write.
    """
    run = Run.of_folder(folder, data)
    keep = [Path(run.settings[name]) for name in PLACES if name in run.settings]
    with cell.opened(folder / SCRIPT, scratch, [folder, *keep], False) as (process, script):
        yield from compared(run, script, folder, documents, seed)
        yield info(CHECK, f"the script ran in a process apart: {process.said}", folder.name)


def compared(run: Run, script: Any, folder: Path, documents: int, seed: int) -> Iterator[Finding]:
    """What the folder's figures say of each other, and what some documents are when they are scored again."""
    yield from _hashes(folder)
    try:
        text = opened(script, folder, run.settings)
    except Exception as error:
        if getattr(error, "kind", type(error).__name__) != "ArtifactError":
            raise  # the data may be elsewhere
        yield fail(CHECK, f"the artifact does not load: {error}", ARTIFACT, "keep the file of the run")
        return
    yield from _bytes(run, text)
    begins = begins_of(text.tokens)
    count = len(begins) - 1
    chosen = np.random.default_rng(seed).choice(count, min(documents, count), replace=False)
    for label, nats in run.nats.items():
        yield from _figures(run, text, label, nats)
        if len(nats) == count:
            yield _documents(run, text, label, sorted(chosen.tolist()))


def _hashes(folder: Path) -> Iterator[Finding]:
    """Script and artifact are those that the run's summary names, if it has one."""
    try:
        summary = json.loads((folder / SUMMARY).read_bytes())
        noted = {ARTIFACT: summary["artifact"]["sha256"], SCRIPT: summary["code"]["sha256"]}
    except (OSError, ValueError, KeyError, TypeError):
        yield warn(CHECK, f"not checked: {SUMMARY} names no hashes", SUMMARY, "keep the file of the run")
        return
    for name, sha256 in noted.items():
        if sha256_file(folder / name) != sha256:
            yield fail(CHECK, f"is not the file of the run: {SUMMARY} notes another SHA-256", name, "keep it")


def _bytes(run: Run, text: Text) -> Iterator[Finding]:
    """The whole text has as many bytes as the manifest beside its shards notes of the sidecar, if it does."""
    path = Path(run.settings.get("DATA_PATH", "")) / MANIFEST
    limited = run.settings.get("VAL_TOKENS_LIMIT", "0") != "0"
    noted = noted_bytes(path)
    if noted not in (None, text.bytes_total) and not limited:
        said = f"the text counts {text.bytes_total} bytes, its manifest notes {noted}"
        yield fail(CHECK, said, MANIFEST, "get the data again, check them with data/fineweb.py --verify")


def _figures(run: Run, text: Text, label: str, nats: np.ndarray) -> Iterator[Finding]:
    """The log's line is the sum of the documents, over the bytes of the text."""
    targets = len(text.tokens) - 1
    count = len(begins_of(text.tokens)) - 1
    lines = [final for final in run.log.finals if final.label.endswith(f"{label}_exact")]
    if len(nats) != count:
        said = f"{len(nats)} documents were scored, the text has {count}"
        yield fail(CHECK, said, label, "give the text of the run as DATA_PATH")
    elif not lines:
        yield fail(CHECK, "no exact line in the log", label, "keep the log as the script wrote it")
    else:
        mean = math.fsum(nats) / targets
        bits = mean * targets / math.log(2) / text.bytes_total
        line = lines[-1]
        if abs(mean - line.loss) > 1e-8 or abs(bits - line.bpb) > 1e-8:
            said = (
                f"the log says {line.loss} nats, {line.bpb} bits; the documents give {mean:.8f}, {bits:.8f}"
            )
            yield fail(CHECK, said, f"{label}, {LOG}:{line.line}", "keep the log as the script wrote it")
        else:
            said = f"{targets} targets and {text.bytes_total} bytes: the log is the sum of the documents"
            yield info(CHECK, said, label)


def _documents(run: Run, text: Text, label: str, chosen: list[int]) -> Finding:
    """The documents that are scored again, against what the run says of them."""
    worst, at, scored = 0.0, -1, 0
    for document in chosen:
        nats = again(text.witness, label, document)
        if nats is None:
            continue
        scored += 1
        difference = abs(math.fsum(nats) - run.nats[label][document]) / len(nats)
        if not difference <= worst:  # so that a NaN is the worst
            worst, at = difference, document
    if scored == 0:
        said = f"not checked: none of {len(chosen)} documents lies in the first chunk"
        return warn(CHECK, said, label, "ask for more documents")
    said = f"{scored} documents scored again: at most {worst:.1e} nats a target apart"
    limit = TOLERANCE if run.on_this_machine else OTHER_MACHINE_TOLERANCE
    said += f", {limit:.1e} allowed"
    if not worst <= limit:
        return fail(CHECK, f"{said}, in document {at}", label, "score the artifact with the script beside it")
    if not run.on_this_machine:
        said += " (in bfloat16 or on another machine: only a larger difference is a proof)"
    return info(CHECK, said, label)
