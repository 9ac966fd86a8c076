"""`summary RUN`: the result of a run in ten lines: scores, simple compressors on the same text, bytes, speed.

For comparison, the same text is compressed with `xz -9`, and with a table of token pairs counted in as much
training data as the run has read.
"""

from __future__ import annotations

import argparse
import glob
import json
import lzma
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from data import caseops, fuse
from tools.runs import script
from tools.runs.derive import validation_set
from tools.runs.errors import RecordError
from tools.runs.folder import CONFIG
from tools.runs.reading import path_of
from tools.runs.rules import OWN, VALIDATION_BYTES, VALIDATION_BYTES_TOLERANCE
from tools.runs.runs import ARTIFACT, LOG, METRICS, SUMMARY, RunDirectory
from tools.runs.writing import print_json

LEADERBOARD = Path(__file__).parent / "runs" / "leaderboard.json"  # a copy of the public list, with its date
SCORES = {"roundtrip": "round trip", "sliding_window": "sliding window", "legal_ttt": "test-time training"}
TOKENS_MAX = 50_000_000  # that the model of pairs counts
PRIOR_TOKENS = 50.0  # weight of a token's frequency against what follows the previous token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(args: argparse.Namespace) -> int:
    directory = RunDirectory(args.run_directory)
    try:
        plain = plain_means(args.run_directory / CONFIG, directory.summary)
        scores = {name: score["bits_per_byte"] for name, score in directory.summary["losses"].items()}
        shown = lines(directory, plain)
    except script.DataError as error:
        raise RecordError(str(error)) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        place = path_of(directory.path / SUMMARY)
        raise RecordError(
            f"{place} is not what a finished run writes ({what}): it was edited or damaged"
        ) from error
    if args.json:
        print_json({"run": directory.run_id, "bits_per_byte": scores, "plain": plain})
    else:
        print("\n".join(shown))
    return 0


def lines(directory: RunDirectory, plain: dict[str, float]) -> list[str]:
    """The closing lines of a run."""
    summary = directory.summary
    config = summary["config"]
    told = validation_set(summary, directory.log)
    text = f"the validation text ({told})" if told else "the validation text"
    found = [f"{directory.run_id}: bits per byte of {text}, lower is better"]
    for name, label in SCORES.items():
        score = summary["losses"].get(name)
        value = f"{score['bits_per_byte']:.4f}" if score else "not computed"
        found.append(f"  {label:<20}{value}")
    for label in ("xz -9", "pairs of tokens"):
        value = f"{plain[label]:.4f}" if label in plain else f"not known: no data at {config['DATA_PATH']}"
        found.append(f"  {label:<20}{value}")
    best = min((score["bits_per_byte"] for score in summary["losses"].values()), default=math.inf)
    if told != OWN and (line := place(best, summary["data"]["val_bytes"])):
        found.append(line)
    size = summary["limits"]["artifact_bytes"]
    cap = f"of {size['limit']:,} bytes" if size["limit"] else "bytes, no limit"
    found.append(f"size: {size['value']:,} {cap}, code and weights together")
    seconds = summary["train_seconds"]
    speed = f", {summary['tokens'] / seconds:,.0f} tokens per second" if seconds else ""
    counts = f"{summary['steps']:,} steps, {summary['tokens']:,} tokens"
    scoring = ""
    if clocks := directory.log.eval_clocks:
        scoring = (f"; scoring in {clocks.scoring_seconds:.1f} s,"
                   f" {clocks.from_artifact_seconds:.1f} s from reading the artifact")
    found.append(f"training: {counts} in {seconds:.1f} s{speed}{scoring}")
    kept = [name for name in (LOG, METRICS, ARTIFACT) if (directory.path / name).is_file()]
    drawn = sorted(path.name for path in directory.path.glob("plot.*"))
    found.append(f"files: {path_of(directory.path)}: {', '.join([*kept, *drawn])}")
    artifact = shlex.quote(str(directory.path / ARTIFACT))
    found.append(f"again: EVAL_ONLY={artifact} {python_command()} train_gpt.py")
    return found


def place(val_bpb: float, val_bytes: int) -> str:
    """The place that a score would have on the challenge's list; empty for a score of another text."""
    if abs(val_bytes / VALIDATION_BYTES - 1) > VALIDATION_BYTES_TOLERANCE:
        return ""
    board = json.loads(LEADERBOARD.read_text(encoding="utf-8"))
    ahead = sum(row[0] <= val_bpb for row in board["records"])
    count = len(board["records"])
    told = f"{ahead} of {count} records are as good or better"
    return f"place: {told}, by the challenge's list of {board['date']}"


def python_command() -> str:
    """The Python that runs this, as short as a shell in the working directory takes it."""
    python = Path(sys.executable)  # a link in a virtual environment, and what makes it one: not resolved
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return shlex.quote(str(python))


def plain_means(settings: Path, summary: dict[str, Any]) -> dict[str, float]:
    """Bits per byte of `xz -9` and of pairs of tokens on the validation text; empty where data are gone."""
    try:
        config = script.Config.from_env({"CONFIG": str(settings)})
        folder = script.find_path(config.data_path)
        val_shards = script.open_shards(f"{glob.escape(str(folder))}/fineweb_val_[0-9]*.bin")
        train_shards = script.open_shards(f"{glob.escape(str(folder))}/fineweb_train_*.bin")
    except (script.DataError, script.ConfigError):
        return {}
    if not summary["tokens"]:
        raise RecordError(f"{settings.parent} was not trained: give the run that made its artifact")
    data = summary["data"]
    validation = first_tokens(val_shards, data["val_tokens"] + 1)
    training = first_tokens(train_shards, min(summary["tokens"], TOKENS_MAX))
    bits = {
        "xz -9": 8.0 * len(xz(text_of(validation, config))),
        "pairs of tokens": bits_of_pairs(training, validation, config.vocab_size),
    }
    return {name: value / data["val_bytes"] for name, value in bits.items()}


def xz(text: bytes) -> bytes:
    """What `xz -9` makes of a text. A short one needs no dictionary of 64 MiB, which takes time to set up."""
    dictionary = min(1 << 26, max(1 << 12, len(text)))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}]
    return lzma.compress(text, filters=filters)


def text_of(tokens: np.ndarray, config: script.Config) -> bytes:
    """The documents of a stream, decoded, one after the other."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(script.find_path(config.tokenizer_path)))
    (tokens,) = fuse.separate(tokens, script.read_manifest(script.find_path(config.data_path)).fused)
    starts = np.flatnonzero(tokens == script.BOS_ID)
    documents = [part[part != script.BOS_ID].tolist() for part in np.split(tokens, starts)]
    text = "".join(pieces.decode(documents))
    fused = caseops.form_of(pieces)
    return (text if fused is None else caseops.read(text, fused)).encode()


def first_tokens(shards: list[Any], count: int) -> np.ndarray:
    """That many tokens from the beginning of some shards, or all if there are fewer."""
    parts: list[np.ndarray] = []
    for shard in shards:
        missing = count - sum(map(len, parts))
        if missing > 0:
            parts.append(np.asarray(script.read_tokens(shard)[:missing]))
    return np.concatenate(parts)


def bits_of_pairs(training: np.ndarray, validation: np.ndarray, vocab_size: int) -> float:
    """Bits of all tokens but the first under p(b | a) = (pairs(a, b) + m p(b)) / (tokens(a) + m).

    p(b): frequency, each token counted one more time than it occurs; m: PRIOR_TOKENS (MacKay and Peto, 1995).
    """
    tokens_V = np.bincount(training, minlength=vocab_size).astype(np.float64)
    frequency_V = (tokens_V + 1) / (len(training) + vocab_size)
    before_N, after_N = validation[:-1].astype(np.int64), validation[1:].astype(np.int64)
    pairs, counts = np.unique(training[:-1].astype(np.int64) * vocab_size + training[1:], return_counts=True)
    asked_N = before_N * vocab_size + after_N
    place_N = np.minimum(np.searchsorted(pairs, asked_N), len(pairs) - 1)
    pairs_N = np.where(pairs[place_N] == asked_N, counts[place_N], 0)
    odds_N = (pairs_N + PRIOR_TOKENS * frequency_V[after_N]) / (tokens_V[before_N] + PRIOR_TOKENS)
    return float(-np.log(odds_N).sum() / math.log(2))
