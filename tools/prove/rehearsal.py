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
from typing import Any
from unittest import mock

import numpy as np
import sentencepiece
import torch

from tools.check.findings import Finding, fail, info
from tools.prove.probes import BOS_ID

VOCAB_SIZE = 320
GRAM = 8  # tokens that tell validation text from training text
SHARD_HEADER = (20240520, 1)
TEXTS = [
    "",
    " ",
    "a plain line",
    "two  spaces",
    "café 東京 🙂 \u2581 nul\x00byte",
    "tab\tand\nnewline",
    "ﬁ ½",
]
TINY_RUN = {
    "DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "COMPILE": "0", "VOCAB_SIZE": str(VOCAB_SIZE),
    "NUM_LAYERS": "2",
    "MODEL_DIM": "32", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "MLP_MULT": "2", "XSA_LAST_N": "2",
    "ROPE_DIMS": "0",
    "NUM_LOOPS": "0", "PARALLEL_START_LAYER": "-1", "TRAIN_SEQ_LEN": "32", "TRAIN_BATCH_TOKENS": "256",
    "MICRO_BATCH_TOKENS": "128", "VAL_BATCH_SIZE": "256", "EVAL_STRIDE": "16", "TTT_CHUNK_TOKENS": "128",
    "TTT_EPOCHS": "1", "TTT_BATCH_SEQS": "2", "ITERATIONS": "3", "MAX_WALLCLOCK_SECONDS": "0",
    "EMA_DECAY": "0.5",
    "GPTQ_CALIBRATION_BATCHES": "2", "ARTIFACT_BYTES_MAX": "150000",
}  # fmt: skip


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
        return np.fromfile(self.folder / f"fineweb_{split}_000000.bin", "<u2", offset=1024)

    def grams(self, split: str) -> set[bytes]:
        """Every run of GRAM tokens of a split."""
        rows = np.lib.stride_tricks.sliding_window_view(self.tokens(split).astype(np.int64), GRAM)
        return {row.tobytes() for row in rows}


def build_laboratory(folder: Path) -> Laboratory:
    """Train a tiny tokenizer and write both shards."""
    splits = {"train": sample_texts(0, 200), "val": sample_texts(1, 12)}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*splits["train"], *splits["val"]]), model_prefix=str(folder / "tokenizer"),
        vocab_size=VOCAB_SIZE, model_type="bpe", byte_fallback=True, unk_id=0, bos_id=BOS_ID, eos_id=2,
        character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for split, texts in splits.items():
        ids = np.array([i for text in texts for i in (BOS_ID, *pieces.encode(text))], "<u2")
        header = np.zeros(256, "<i4")
        header[:3] = *SHARD_HEADER, len(ids)
        (folder / f"fineweb_{split}_000000.bin").write_bytes(header.tobytes() + ids.tobytes())
    return Laboratory(folder, pieces)


@dataclass
class Watch:
    """Phase, purpose and rows of every forward pass of a run."""

    passes: list[tuple[str, bool, list[bytes]]] = field(default_factory=list)
    run: Any = None


@contextlib.contextmanager
def watched_run(script: ModuleType, watch: Watch) -> Iterator[None]:
    """Record the forward passes of whatever the script runs."""
    forward, start = script.GPT.forward, script.Run.__init__

    def watched_forward(model: Any, inputs_BT: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows = [row[k : k + GRAM].tobytes() for row in inputs_BT.cpu().numpy() for k in (0, len(row) // 2)]
        learns = torch.is_grad_enabled() or getattr(model, "observer", None) is not None
        watch.passes.append((watch.run.phase_name if watch.run else "", learns, rows))
        return forward(model, inputs_BT, *rest)

    def watched_start(run: Any, *args: Any) -> None:
        start(run, *args)
        watch.run = run

    with mock.patch.object(script.GPT, "forward", watched_forward), \
            mock.patch.object(script.Run, "__init__", watched_start):  # fmt: skip
        yield


def run_script(script: ModuleType, laboratory: Laboratory, name: str, **settings: str) -> tuple[Watch, Path]:
    """Do a whole tiny run in this process; what was watched and its directory. RuntimeError when it fails."""
    watch, runs = Watch(), laboratory.folder / "runs"
    places = {"DATA_PATH": str(laboratory.folder), "TOKENIZER_PATH": str(laboratory.tokenizer)}
    environment = {**TINY_RUN, **places, "RUNS_DIR": str(runs), "RUN_ID": name, **settings}
    keep = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    with mock.patch.dict(os.environ, {**keep, **environment}, clear=True), watched_run(script, watch), \
            mock.patch.object(sys, "argv", [script.__file__]), \
            contextlib.redirect_stdout(sys.stderr):  # fmt: skip
        status = script.main()
    if status:
        raise RuntimeError(f"the tiny run {name} ended with status {status}; its log is above")
    return watch, runs / name


def data_apart(laboratory: Laboratory, watch: Watch) -> Iterator[Finding]:
    """B8: nothing learns from or calibrates on validation before evaluation, which sees no training text."""
    training, validation = laboratory.grams("train"), laboratory.grams("val")
    counts = {"learning": 0, "evaluation": 0}
    for phase, learns, rows in watch.passes:
        evaluating = phase.startswith("eval_")
        counts["evaluation" if evaluating else "learning"] += 1
        stolen = {False: validation - training, True: training - validation}[evaluating].intersection(rows)
        if stolen and (learns or evaluating):
            what = (
                "training text is read"
                if evaluating
                else "a pass learns from or calibrates on validation text"
            )
            text = f"{what} in phase {phase!r}: tokens {np.frombuffer(stolen.pop(), np.int64).tolist()}"
            yield fail("B8", text, "a whole tiny run", "keep the splits apart (#728)")
            return
    text = f"{counts['learning']} passes before evaluation, none on validation; {counts['evaluation']} in it"
    yield info("B8", text + ", none on training text", "a whole tiny run")


def same_result(first: Path, second: Path) -> Iterator[Finding]:
    """B7 and B14: warm-up and prefetch change neither the artifact nor the losses."""
    summaries = [json.loads((path / "summary.json").read_text()) for path in (first, second)]
    results = [(s["stream_hash"], s["artifact"]["sha256"], s["losses"]) for s in summaries]
    names = ("stream hash", "artifact", "losses")
    differs = [name for name, a, b in zip(names, *results, strict=True) if a != b]
    for check, what in (("B7", "two warm-up steps"), ("B14", "prefetching loader")):
        if differs:
            yield fail(
                check,
                f"{', '.join(differs)} differ with and without {what}",
                "two tiny runs",
                "undo it exactly",
            )
        else:
            yield info(
                check,
                f"stream hash, artifact and losses are the same with and without {what}",
                "two tiny runs",
            )


def artifact_returns(script: ModuleType, laboratory: Laboratory, directory: Path) -> Iterator[Finding]:
    """B12: the artifact on disk has the bytes that were counted, and scores what the run reported."""
    summary, path = json.loads((directory / "summary.json").read_text()), directory / "model.bin"
    with contextlib.redirect_stdout(sys.stderr):
        model, _ = script.load_artifact(path)
        nats = float(np.sum(script.score_roundtrip(model, laboratory.tokens("val"), model.config).nats))
    reported = summary["losses"]["roundtrip"]["nats"] * summary["losses"]["roundtrip"]["scored_tokens"]
    if path.stat().st_size != summary["artifact"]["bytes"]:
        text = f"artifact has {path.stat().st_size} bytes, {summary['artifact']['bytes']} were counted"
        yield fail("B12", text, str(path.name), "count the file that is written")
    elif abs(nats - reported) > 1e-4 * reported:
        yield fail(
            "B12",
            f"artifact scores {nats} nats, the run reported {reported}",
            "model.bin",
            "score what is read",
        )
    else:
        yield info(
            "B12",
            f"artifact: {path.stat().st_size} bytes as counted; reloaded it scores the same",
            "model.bin",
        )
