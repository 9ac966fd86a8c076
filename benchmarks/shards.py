"""What it costs that a batch comes from one shard at a time, as in our loader, and not from all (PR #1532).

    python benchmarks/shards.py --data DIR --tokenizer FILE [--seeds 42 1337 2025] [--keep]

The same tokens in three folders: one shard, so that each batch has sequences from all of the text; many
shards of shuffled documents, as the challenge publishes them; the same with the documents sorted by likeness,
the worst order that there can be. Small models train one pass over each. About four minutes of one core.
"""

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sentencepiece import SentencePieceProcessor

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks import experiments, paired, results  # noqa: E402
from data.shards import BOS_ID, read_shard, write_shard  # noqa: E402

TITLE = "Shards"
SHARDS = 12
SHARD_STEPS = 24
DOCUMENT_TOKENS = 1000  # the rest of a document is left out, so that a shard has about 25
SIZE = "2x128"
# An average over two shards, as in the run on eight GPUs: 285 steps of 127 a shard.
SETTINGS = {
    "MODEL_DIM": "64", "EMA_DECAY": "0.98", "GPTQ": "0", "TRELLIS": "0", "RATE_CONTROL": "0",
    "VAL_TOKENS_LIMIT": "65536",
}  # fmt: skip
ONE, SHUFFLED, SORTED = "any shard for each sequence", "one shard at a time", "one shard, documents sorted"


def documents(folder: Path, tokens: int) -> list[np.ndarray]:
    """Beginnings of the first training documents, at least so many tokens together."""
    found: list[np.ndarray] = []
    for path in sorted(folder.glob("fineweb_train_*.bin")):
        ids = read_shard(path)
        starts = np.flatnonzero(ids == BOS_ID)
        for start, end in itertools.pairwise(starts):
            found.append(ids[start : min(end, start + DOCUMENT_TOKENS)])
            tokens -= len(found[-1])
            if tokens < 0:
                return found
    raise SystemExit(f"{folder}: too few training tokens, by {tokens}")


def sorted_by_likeness(docs: list[np.ndarray]) -> list[np.ndarray]:
    """Along the direction in which the counts of their tokens differ most."""
    size = 1 + max(int(ids.max()) for ids in docs)
    counts = np.log1p(np.array([np.bincount(ids, minlength=size) for ids in docs], np.float64))
    counts -= counts.mean(axis=0)
    along = np.linalg.svd(counts, full_matrices=False)[0][:, 0]
    return [docs[number] for number in np.argsort(along)]


def unlike(shards: list[np.ndarray]) -> float:
    """Nats by which the tokens of a shard differ from those of all, in the mean (Kullback and Leibler)."""
    counts = np.array([np.bincount(ids, minlength=1 << 16) for ids in shards], np.float64)
    shares = counts / counts.sum(axis=1, keepdims=True)
    ratio = np.where(shares > 0, shares / np.maximum(shares.mean(axis=0), 1e-300), 1.0)
    return float((shares * np.log(ratio)).sum(axis=1).mean())


def spread(losses: list[float], steps: int) -> float:
    """Standard deviation of the means over so many steps, about a straight line, in the second half."""
    means = np.reshape(losses[len(losses) // 2 :], (-1, steps)).mean(axis=1)
    places = np.arange(len(means))
    return float(np.std(means - np.polyval(np.polyfit(places, means, 1), places), ddof=2))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train all models; by arm what its shards are like, and the runs."""
    arm = experiments.read_arms({"arms": {"base": {}}, "settings": SETTINGS}, SIZE)["base"]
    shard_tokens = SHARD_STEPS * int(arm.settings["TRAIN_BATCH_TOKENS"])
    docs = documents(arguments.data, SHARDS * shard_tokens)
    arms = {ONE: (docs, 1), SHUFFLED: (docs, SHARDS), SORTED: (sorted_by_likeness(docs), SHARDS)}
    found: dict[str, Any] = {}
    for name, (ordered, count) in arms.items():
        ids = np.concatenate(ordered)[: SHARDS * shard_tokens]
        shards = np.split(ids, count)
        place = folder / f"{len(found)}"
        place.mkdir()
        for number, shard in enumerate(shards):
            # The target of the last token.
            write_shard(place / f"fineweb_train_{number:06d}.bin", np.append(shard, np.uint16(BOS_ID)))
        for path in arguments.data.glob("fineweb_val_*.bin"):
            (place / path.name).symlink_to(path.resolve())
        found[name] = {"shards": count, "nats_apart": unlike(shards), "place": place, "runs": []}
    for seed in arguments.seeds:
        for one in found.values():
            settings = {
                **arm.settings, "SEED": str(seed), "DATA_PATH": str(one["place"]),
                "TOKENIZER_PATH": str(arguments.tokenizer.resolve()), "MAX_WALLCLOCK_SECONDS": "0",
                "ITERATIONS": str(SHARDS * SHARD_STEPS),
                "VOCAB_SIZE": str(SentencePieceProcessor(model_file=str(arguments.tokenizer)).vocab_size()),
            }  # fmt: skip
            directory = folder / "runs" / f"{one['place'].name}-{seed}"
            run = experiments.run_script(REPO / "train_gpt.py", settings, directory)
            events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
            losses = [event["train_loss"] for event in events if event["event"] == "train"]
            one["runs"].append({
                "seed": seed, "val_bpb": run["scores"]["float"], "step_spread": spread(losses, 1),
                "shard_spread": spread(losses, SHARD_STEPS),
            })  # fmt: skip
    return {
        "data": arguments.data.name,
        "arms": {
            name: {key: value for key, value in one.items() if key != "place"} for name, one in found.items()
        },
    }


def tables(measured: dict[str, Any]) -> list[str]:
    """A row for each folder: how unlike its shards are, how the loss of training scatters, the score."""
    arms = measured["arms"]
    lines = []
    for name, one in arms.items():
        step, shard = (np.mean([run[key] for run in one["runs"]]) for key in ("step_spread", "shard_spread"))
        cells = paired.cells(one["runs"], arms[ONE]["runs"])
        lines.append(
            f"| {name} | {one['shards']} | {one['nats_apart']:.3f} | {step:.3f} | {shard:.3f} | {cells}"
        )
    header = paired.HEADER.format("the first")
    return [
        f"`{measured['data']}`, {SHARDS * SHARD_STEPS} steps, {SHARD_STEPS} of each shard; size {SIZE}, 64 "
        f"wide. Spread: deviation of the loss of single steps and of means over {SHARD_STEPS}, second half.",
        "",
        *paired.table("| batches | shards | nats apart | spread of steps | of shards | " + header, lines),
    ]  # fmt: skip


def main() -> None:
    """Train, and print the table; with --keep store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of fineweb_{train,val}_*.bin")
    parser.add_argument("--tokenizer", type=Path, required=True, help="SentencePiece model of these shards")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2025])
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    arguments = parser.parse_args()
    if arguments.keep:
        results.refuse_dirty()
    before = experiments.conditions("float32", (Path(__file__), *experiments.PROGRAM))
    with tempfile.TemporaryDirectory() as name:
        measured = measure(arguments, Path(name))
    results.finish("shards", before, measured, arguments.keep)


if __name__ == "__main__":
    main()
