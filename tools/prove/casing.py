"""B10 on CaseOps data: what counts are the bytes of the original text, by a sidecar that is audited."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data import export, shards
from data.encoding import CASEOPS, CASEOPS_FUSED
from tools.check.findings import Finding, fail, info, warn
from tools.prove.cell import in_cell
from tools.prove.probes import Subject
from tools.prove.rehearsal import sample_texts, shard_path

PIECES = 400
ODD_TEXTS = ["NASA and McGraw's iPhone", "Café 東京 I \ue001 A", "Wide  Spaces\n\nAnd New LINES"]
VALIDATION_TEXTS = 15


def cased_texts() -> list[str]:
    """Documents whose words are written small, with a capital, or in capitals; the odd ones come first."""
    random = np.random.default_rng(0)
    texts = list(ODD_TEXTS)
    for text in sample_texts(3, 120):
        words = text.split()
        kinds = random.integers(0, 3, len(words))
        for i, kind in enumerate(kinds):
            if kind > 0:
                words[i] = words[i].upper() if kind == 2 else words[i].capitalize()
        texts.append(" ".join(words))
    return texts


def case_data(folder: Path, variant: str) -> Path:
    """The exported data set of a variant, made when first asked for; its tokenizer lies in tokenizers/."""
    made = folder / "datasets" / variant
    if not made.is_dir():
        docs = folder / "docs.jsonl"
        lines = [json.dumps({"text": text}) + "\n" for text in cased_texts()]
        docs.write_text("".join(lines), encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = export.main([
                "--docs", str(docs), "--name", variant, "--out", str(folder), "--variant", variant,
                "--workers", "1", "--train-tokenizer", str(PIECES), "--val-docs", str(VALIDATION_TEXTS),
            ])  # fmt: skip
        assert status == 0, f"no CaseOps data in {folder}"
    return made


def case_bytes(subject: Subject, folder: Path) -> Iterator[Finding]:
    """B10: bytes counted for CaseOps data, as they are, with a sidecar that lies, and without one."""
    expected = sum(len(text.encode()) for text in cased_texts()[:VALIDATION_TEXTS])
    for variant in (CASEOPS, CASEOPS_FUSED):
        data = case_data(folder, variant)
        counted = bytes_counted(subject, folder, data, variant)
        if counted != expected:
            got = f"{variant} data count {counted} bytes, their text has {expected}"
            yield fail("B10", got, "token_bytes", "count by fineweb_val_bytes_*.bin")
            return
        damaged = folder / f"{variant}-damaged"
        shutil.copytree(data, damaged, dirs_exist_ok=True)
        sidecar = shard_path(damaged, "val_bytes")
        counts = np.array(shards.read_shard(sidecar))
        counts[int(counts.argmax())] += 1
        shards.write_shard(sidecar, counts)
        if bytes_counted(subject, folder, damaged, variant) is not None:
            text = f"{variant}: a sidecar of one byte more than its manifest notes is taken for true"
            remedy = "compare them before a run: data/fineweb.py --verify; `check` refutes such a score"
            yield warn("B10", text, "token_bytes", remedy)
        sidecar.unlink()
        (damaged / "manifest.json").unlink()  # which would give such a count away
        without = bytes_counted(subject, folder, damaged, variant)
        if without not in (None, expected):
            text = f"{variant} data without sidecar count {without} bytes, their text has {expected}"
            yield fail("B10", text, "token_bytes", "refuse: case marks are no text (#2138)")
            return
    yield info("B10", f"CaseOps data in both forms count {expected} bytes, as their text has", "token_bytes")


@in_cell
def bytes_counted(subject: Subject, folder: Path, data: Path, variant: str) -> int | None:
    """Bytes of the validation text of a data set, as a run of the script reads it; None where it refuses."""
    script = subject.script
    tokenizer = str(folder / "tokenizers" / f"{variant}.model")
    config = replace(subject.config, tokenizer_path=tokenizer, vocab_size=PIECES, data_path=str(data))
    validation = shard_path(data, "val")
    errors: Any = getattr(script, "DataError", ValueError)
    try:
        if hasattr(script, "read_validation"):
            return int(script.read_validation(script.open_shards(str(validation)), config).bytes_total)
        return int(script.token_bytes(np.array(shards.read_shard(validation)), config).sum())
    except errors:
        return None
