"""Throughput and peak memory of data/export.py beside SentencePiece's own threaded encode, as one table.

    python benchmarks/export.py --docs docs.jsonl --tokenizer fineweb_1024_bpe.model

Every line is a process of its own over the same documents, and rounds are interleaved, so that a busy machine
is unfair to none; the best round counts. Ours starts up, reads, parses, encodes, audits validation and writes
shards; SentencePiece is given texts in memory, in batches of 1,024 as the challenge does, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sentencepiece as spm

REPO = Path(__file__).resolve().parents[1]
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


def measure(docs: Path, tokenizer_path: str, rounds: int, sizes: list[int], cores: int) -> None:
    """Run everything and print the table."""
    print(f"{platform.platform()}, {cores} cores, Python {platform.python_version()}, sentencepiece "
          f"{spm.__version__}, best of {rounds} rounds, load {os.getloadavg()[0]:.1f}\n")
    print("| what | corpus | MB/s | seconds | CPU seconds | peak MB |\n|---|---|---|---|---|---|")
    for times in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            corpus = repeated(docs, times, folder)
            megabytes = corpus.stat().st_size / 1e6
            exports: dict[int, list[tuple[float, float, int]]] = {1: [], cores: []}
            plain: list[tuple[float, float]] = []
            for number in range(rounds):
                for workers, results in exports.items():
                    out = folder / f"out{number}-{workers}"
                    results.append(run_export(corpus, tokenizer_path, workers, out))
                plain.append(run_sentencepiece(corpus, tokenizer_path, cores))
        for workers, results in exports.items():
            seconds, cpu_seconds, _ = min(results)
            peak = max(result[2] for result in results) / 1e6
            print(f"| export, {workers} worker(s) | {megabytes:.0f} MB | {megabytes / seconds:.2f} "
                  f"| {seconds:.1f} | {cpu_seconds:.1f} | {peak:.0f} |")
        labels = ("load and encode", "encode alone")
        for label, seconds in zip(labels, map(min, zip(*plain, strict=True)), strict=True):
            print(f"| sentencepiece, {cores} threads, {label} | {megabytes:.0f} MB "
                  f"| {megabytes / seconds:.2f} | {seconds:.1f} | | |", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Throughput and peak memory of data/export.py.")
    parser.add_argument("--docs", type=Path, required=True, help="documents, one JSON object per line")
    parser.add_argument("--tokenizer", required=True, help="SentencePiece model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4], help="copies of --docs per corpus")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sentencepiece-threads", type=int, help="time SentencePiece alone, in this process")
    options = parser.parse_args()
    if options.sentencepiece_threads:
        encode_with_sentencepiece(options.docs, options.tokenizer, options.sentencepiece_threads)
    else:
        measure(options.docs, options.tokenizer, options.rounds, options.sizes, options.cores)


if __name__ == "__main__":
    main()
