"""Throughput and peak memory of data/export.py beside SentencePiece's own threaded encode, as one table.

    python benchmarks/export.py --docs docs.jsonl --tokenizer fineweb_1024_bpe.model [--keep]

Every line is a process of its own over the same documents, and rounds are interleaved, so that a busy machine
is unfair to none; the best round counts. Ours starts up, reads, parses, encodes, audits validation and writes
shards; SentencePiece is given texts in memory, in batches of 1,024 as the challenge does, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import sentencepiece as spm

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from benchmarks import results  # noqa: E402

TITLE = "Export of shards"
BATCH_DOCUMENTS = 1024
VAL_DOCUMENTS = 901
POLL_S = 0.05


def encode_with_sentencepiece(docs: Path, tokenizer_path: str, threads: int) -> None:
    """Print the seconds that SentencePiece's threaded encode takes; loading the texts is not counted."""
    with open(docs, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    tokenizer = spm.SentencePieceProcessor(model_file=tokenizer_path)
    begin_s = time.perf_counter()
    for first in range(0, len(texts), BATCH_DOCUMENTS):
        tokenizer.encode(texts[first:first + BATCH_DOCUMENTS], num_threads=threads)
    print(time.perf_counter() - begin_s)


def resident_bytes(root: int) -> int:
    """Memory of a process and its descendants, from /proc; shared pages count once per process."""
    total = 0
    pending = [root]
    while pending:
        pid = pending.pop()
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pending += map(int, children)
        total += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    return total


def run_export(docs: Path, tokenizer_path: str, workers: int, out: Path) -> tuple[float, float, int]:
    """Seconds, CPU seconds and peak bytes of one export in a process of its own."""
    command = [sys.executable, str(REPO / "data" / "export.py"), "--docs", str(docs), "--name", "bench",
               "--out", str(out), "--tokenizer", tokenizer_path, "--val-docs", str(VAL_DOCUMENTS),
               "--workers", str(workers)]
    cpu_before = os.times()
    begin_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak_bytes = 0
    while process.poll() is None:
        peak_bytes = max(peak_bytes, resident_bytes(process.pid))
        time.sleep(POLL_S)
    elapsed_s = time.perf_counter() - begin_s
    cpu_after = os.times()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    cpu_s = (cpu_after.children_user + cpu_after.children_system
             - cpu_before.children_user - cpu_before.children_system)
    return elapsed_s, cpu_s, peak_bytes


def run_sentencepiece(docs: Path, tokenizer_path: str, threads: int) -> tuple[float, float]:
    """Seconds of a process that loads the texts and encodes them, and of the encoding alone."""
    command = [sys.executable, __file__, "--docs", str(docs), "--tokenizer", tokenizer_path,
               "--sentencepiece-threads", str(threads)]
    begin_s = time.perf_counter()
    encode_s = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return time.perf_counter() - begin_s, encode_s


def repeated(docs: Path, times: int, folder: Path) -> Path:
    """`docs`, `times` times over, as one file."""
    path = folder / f"docs{times}.jsonl"
    content = docs.read_bytes()
    with open(path, "wb") as file:
        for _ in range(times):
            file.write(content)
    return path


def measure(docs: Path, tokenizer_path: str, rounds: int, copies: int, cores: int) -> dict[str, Any]:
    """Every way over one corpus, rounds interleaved."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = repeated(docs, copies, folder)
        exports: dict[int, list[tuple[float, float, int]]] = {1: [], cores: []}
        plain: list[tuple[float, float]] = []
        for number in range(rounds):
            for workers, kept in exports.items():
                kept.append(run_export(corpus, tokenizer_path, workers, folder / f"out{number}-{workers}"))
            plain.append(run_sentencepiece(corpus, tokenizer_path, cores))
        return {"bytes": corpus.stat().st_size, "export": exports, "sentencepiece": plain, "threads": cores}


def tables(measured: dict[str, Any]) -> list[str]:
    """One line per way and corpus; the best round counts."""
    lines = ["| what | corpus | MB/s | seconds | CPU seconds | peak MB |", "|---|---|---|---|---|---|"]
    for corpus in measured["corpora"]:
        size = corpus["bytes"] / 1e6
        for workers, rounds in corpus["export"].items():
            seconds, cpu_seconds, _ = min(rounds)
            peak = max(round_[2] for round_ in rounds) / 1e6
            lines.append(f"| export, {workers} worker(s) | {size:.0f} MB | {size / seconds:.2f} "
                         f"| {seconds:.1f} | {cpu_seconds:.1f} | {peak:.0f} |")
        labels = ("load and encode", "encode alone")
        for label, values in zip(labels, zip(*corpus["sentencepiece"], strict=True), strict=True):
            seconds = min(values)
            lines.append(f"| sentencepiece, {corpus['threads']} threads, {label} | {size:.0f} MB "
                         f"| {size / seconds:.2f} | {seconds:.1f} | | |")
    return [*lines, "", f"The best of {len(measured['corpora'][0]['sentencepiece'])} interleaved rounds."]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Throughput and peak memory of data/export.py.")
    parser.add_argument("--docs", type=Path, required=True, help="documents, one JSON object per line")
    parser.add_argument("--tokenizer", required=True, help="SentencePiece model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4], help="copies of --docs per corpus")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    parser.add_argument("--sentencepiece-threads", type=int, help="time SentencePiece alone, in this process")
    options = parser.parse_args()
    if options.sentencepiece_threads:
        encode_with_sentencepiece(options.docs, options.tokenizer, options.sentencepiece_threads)
        return
    before = results.conditions()
    place = (options.docs, options.tokenizer, options.rounds)
    corpora = [measure(*place, copies, options.cores) for copies in options.sizes]
    results.finish("export", before, {"corpora": corpora}, options.keep)


if __name__ == "__main__":
    main()
