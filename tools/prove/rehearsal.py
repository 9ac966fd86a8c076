"""A whole run of a script on synthetic documents, watched: what is read when, what comes back (B7-B14)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import sentencepiece
import torch

from data import shards
from tools.check.findings import Finding, fail, info
from tools.prove import tiny
from tools.runs.folder import CONFIG

GRAM = 8  # tokens that tell validation text from training text
ARTIFACT_TOLERANCE = 1e-4  # of a score, between the run that reports it and the artifact read back
TRAINING_SEED, VALIDATION_SEED = 0, 1
TEXTS = [
    "",
    " ",
    "a plain line",
    "two  spaces",
    "café 東京 🙂 \u2581 nul\x00byte",
    "tab\tand\nnewline",
    "ﬁ ½",
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


@dataclass(frozen=True)
class Laboratory:
    """A folder with a tokenizer, a training shard and a validation shard."""

    folder: Path
    pieces: sentencepiece.SentencePieceProcessor

    @property
    def tokenizer(self) -> Path:
        """The SentencePiece model."""
        return self.folder / "tokenizer.model"

    def tokens(self, split: str) -> np.ndarray:
        """Token ids of a split."""
        return np.array(shards.read_shard(shard_path(self.folder, split)))

    def grams(self, split: str) -> set[bytes]:
        """Every run of GRAM tokens of a split."""
        rows = np.lib.stride_tricks.sliding_window_view(self.tokens(split).astype(np.int64), GRAM)
        return {row.tobytes() for row in rows}


def shard_path(folder: Path, split: str) -> Path:
    """The one shard of a split."""
    return folder / f"fineweb_{split}_000000.bin"


def build_laboratory(folder: Path) -> Laboratory:
    """Train a tiny tokenizer and write both shards."""
    splits = {"train": sample_texts(TRAINING_SEED, 200), "val": sample_texts(VALIDATION_SEED, 12)}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*splits["train"], *splits["val"]]), model_prefix=str(folder / "tokenizer"),
        vocab_size=int(tiny.RUN["VOCAB_SIZE"]), model_type="bpe", byte_fallback=True,
        unk_id=0, bos_id=shards.BOS_ID, eos_id=2, character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for split, texts in splits.items():
        ids: list[int] = []
        for text in texts:
            ids += [shards.BOS_ID, *pieces.encode(text)]
        shards.write_shard(shard_path(folder, split), np.array(ids))
    return Laboratory(folder, pieces)


# ======================================================================================================
# RUN
# ======================================================================================================


class Pass(NamedTuple):
    """One forward pass of a run."""

    phase: str
    learns: bool  # or calibrates
    grams: list[bytes]  # a few runs of GRAM tokens of its inputs


@dataclass
class Watch:
    """The forward passes of a run, in order; `run` is the script's Run once it has begun."""

    passes: list[Pass] = field(default_factory=list)
    run: Any = None


@contextlib.contextmanager
def watched_run(script: ModuleType, watch: Watch) -> Iterator[None]:
    """Record the forward passes of whatever the script runs."""
    forward = script.GPT.forward
    start = script.Run.__init__

    def watched_forward(model: Any, inputs_BT: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        phase = watch.run.phase_name if watch.run else ""
        observe = named.get("observe", getattr(model, "observer", None))  # older scripts: an attribute
        learns = torch.is_grad_enabled() or observe is not None
        watch.passes.append(Pass(phase, learns, some_grams(inputs_BT)))
        return forward(model, inputs_BT, *rest, **named)

    def watched_start(run: Any, *args: Any) -> None:
        start(run, *args)
        watch.run = run

    with mock.patch.object(script.GPT, "forward", watched_forward), \
            mock.patch.object(script.Run, "__init__", watched_start):  # fmt: skip
        yield


def some_grams(inputs_BT: torch.Tensor) -> list[bytes]:
    """GRAM tokens from the beginning and from the middle of every row."""
    grams = []
    for row in inputs_BT.cpu().numpy():
        for start in (0, len(row) // 2):
            grams.append(row[start : start + GRAM].tobytes())
    return grams


def run_script(script: ModuleType, laboratory: Laboratory, name: str, **settings: str) -> tuple[Watch, Path]:
    """Do a whole tiny run in this process; what was watched and its directory. RuntimeError when it fails."""
    runs = laboratory.folder / "runs"
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    environment |= tiny.RUN
    environment |= {"DATA_PATH": str(laboratory.folder), "TOKENIZER_PATH": str(laboratory.tokenizer)}
    environment |= {"RUNS_DIR": str(runs), "RUN_ID": name}
    environment |= settings
    watch = Watch()
    with mock.patch.dict(os.environ, environment, clear=True), \
            mock.patch.object(sys, "argv", [script.__file__]), \
            watched_run(script, watch), \
            contextlib.redirect_stdout(sys.stderr):  # fmt: skip
        status = script.main()
    if status:
        raise RuntimeError(f"the tiny run {name} ended with status {status}; its log is above")
    return watch, runs / name


# ======================================================================================================
# FINDINGS
# ======================================================================================================


def data_apart(laboratory: Laboratory, watch: Watch) -> Iterator[Finding]:
    """B8: nothing learns from or calibrates on validation before evaluation, which sees no training text."""
    training = laboratory.grams("train")
    validation = laboratory.grams("val")
    before_evaluation = 0
    for phase, learns, grams in watch.passes:
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
    in_evaluation = len(watch.passes) - before_evaluation
    text = (
        f"{before_evaluation} passes before evaluation, none on validation;"
        f" {in_evaluation} in it, none on training text"
    )
    yield info("B8", text, "a whole tiny run")


def same_result(first: Path, second: Path) -> Iterator[Finding]:
    """B7 and B14: warm-up and prefetch change neither the artifact nor the losses."""
    summaries = [json.loads((path / "summary.json").read_text()) for path in (first, second)]
    results = [
        {"stream hash": s["stream_hash"], "artifact": s["artifact"]["sha256"], "losses": s["losses"]}
        for s in summaries
    ]
    differs = [name for name, value in results[0].items() if value != results[1][name]]
    for check, what in (("B7", "two warm-up steps"), ("B14", "prefetching loader")):
        if differs:
            text = f"{', '.join(differs)} differ with and without {what}"
            yield fail(check, text, "two tiny runs", "undo it exactly")
        else:
            text = f"stream hash, artifact and losses are the same with and without {what}"
            yield info(check, text, "two tiny runs")


def artifact_returns(script: ModuleType, laboratory: Laboratory, directory: Path) -> Iterator[Finding]:
    """B12: the artifact on disk has the bytes that were counted, and scores what the run reported."""
    summary = json.loads((directory / "summary.json").read_text())
    path = directory / "model.bin"
    size_bytes = path.stat().st_size
    counted_bytes = summary["artifact"]["bytes"]
    config = script.Config.from_env({"CONFIG": str(directory / CONFIG)})
    with contextlib.redirect_stdout(sys.stderr):
        model, _ = script.load_artifact(path)
        ledger = script.score_roundtrip(model, laboratory.tokens("val"), config)
    nats = float(np.sum(ledger.nats))
    loss = summary["losses"]["roundtrip"]
    reported = loss["nats"] * loss["scored_tokens"]
    if size_bytes != counted_bytes:
        text = f"artifact has {size_bytes} bytes, {counted_bytes} were counted"
        yield fail("B12", text, path.name, "count the file that is written")
    elif abs(nats - reported) > ARTIFACT_TOLERANCE * reported:
        text = f"artifact scores {nats} nats, the run reported {reported}"
        yield fail("B12", text, path.name, "score what is read")
    else:
        text = f"artifact: {size_bytes} bytes as counted; reloaded it scores the same"
        yield info("B12", text, path.name)
