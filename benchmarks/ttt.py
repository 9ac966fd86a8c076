"""What test-time training brings and costs: round trip, sliding window, SGD and adapters side by side.

    python benchmarks/ttt.py cost --data DIR [--config FILE] [--census FILE.json]
    python benchmarks/ttt.py measure --data DIR --tokenizer FILE --store DIR [--seeds 42 1337 2025]
        [--steps 400] [--documents 0] [--only "round trip" "LoRA"] [--sweep NAME=V1/V2 …] [--set NAME=VALUE …]
    python benchmarks/ttt.py table --store DIR [--keep NAME]

`measure` trains one small model a seed for a fixed number of steps, at contexts of 512 tokens, and scores its
averaged weights, before any quantization, on the first documents of the validation text (0: on all). What is
done lies in the store, a file each: the same command goes on where it was ended, and several processes, each
with a seed of its own, share a store. One thread each, and seconds of the process's CPU: what the wall would
show on an idle core. `--sweep` scores by every combination of some values, not by the rows of the table.

`cost` counts the tokens that pass through the model for each scored target, at the lengths that the documents
of the validation text have, with the settings of a configuration. With a census of
`python -m benchmarks.gpu_model --what train_loop` it gives the seconds of 8 GPUs: modelled, not measured. A
token backward then costs what it does in training. Adapters need no gradients of weights, which takes about
as much off as their own products add; what their optimizer reads and writes counts by itself.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # for torch: waiting threads would burn what is counted

import numpy as np
import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks import ablation, results  # noqa: E402
from benchmarks.gpu_model.document_rows import OFFICIAL_DOCUMENTS, OFFICIAL_TARGETS  # noqa: E402
from benchmarks.gpu_model.roofline import BANDWIDTH_SHARE, CARDS  # noqa: E402
from train_gpt import BOS_ID, GPT, Config  # noqa: E402

TITLE = "Test-time training"
GPUS = 8
# How often a step reads or writes as much as the adapters are, in fp32: AdamW reads four numbers for each and
# writes three; its gradient is filled with zeros and written; casts read and write twice, half as much.
ADAPTER_PASSES = 7 + 2 + 3
# Contexts of 512 tokens, the width and the choices of the ablation, three layers, the second of them twice.
# All scores see as much before a target: windows advance by as many tokens as a chunk of a document has.
# The rate of SGD is the best of four, each a third of the next; that of adapters of two, with a larger rank
# than that of the sweep in results/earlier/, which tried three.
SMALL = {
    **ablation.SMALL, **ablation.DEFAULT_SMALL,
    "NUM_LAYERS": "3", "NUM_LOOPS": "1", "XSA_LAST_N": "3", "PARALLEL_START_LAYER": "2",
    "TRAIN_SEQ_LEN": "512", "TRAIN_BATCH_TOKENS": "8192", "MICRO_BATCH_TOKENS": "8192",
    "MAX_WALLCLOCK_SECONDS": "0", "EVAL_STRIDE": "128", "TTT_ENABLED": "1", "TTT_CHUNK_TOKENS": "4096",
    "TTT_BATCH_SEQS": "4", "TTT_CHUNK_SIZE": "128", "TTT_BATCH_SIZE": "16",
    "TTT_LORA_LR": "0.003", "TTT_LR": "0.006",
}  # fmt: skip
SCORERS = {"round trip": "score_roundtrip", "sliding window": "score_sliding"}
ROWS: dict[str, dict[str, str]] = {
    "round trip": {},
    "sliding window": {},
    "SGD": {"TTT_MODE": "sgd"},
    "LoRA": {"TTT_MODE": "lora"},
}


# ======================================================================================================
# MEASURED
# ======================================================================================================


def given(arguments: argparse.Namespace) -> dict[str, str]:
    """The settings of --set."""
    return dict(pair.split("=", 1) for pair in arguments.set)


def settings_of(arguments: argparse.Namespace, seed: int) -> dict[str, str]:
    """The settings of the small model of a seed."""
    import sentencepiece

    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(arguments.tokenizer)).vocab_size()
    return {
        **SMALL, "SEED": str(seed), "ITERATIONS": str(arguments.steps), "VOCAB_SIZE": str(vocabulary),
        "DATA_PATH": str(arguments.data), "TOKENIZER_PATH": str(arguments.tokenizer), **given(arguments),
    }  # fmt: skip


def rows_of(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The rows to measure: those of the table, or every combination of the sweep, named by its values."""
    if not arguments.sweep:
        return {name: row for name, row in ROWS.items() if not arguments.only or name in arguments.only}
    choices = []
    for entry in arguments.sweep:
        name, _, values = entry.partition("=")
        choices.append([(name, value) for value in values.split("/")])
    rows = {}
    for combination in itertools.product(*choices):
        row = dict(combination)
        rows[" ".join(f"{name}={value}" for name, value in row.items())] = row
    return rows


def trained_model(config: Config, store: Path) -> GPT:
    """The model of a config after ITERATIONS steps: out of the store, or trained and put there."""
    kept = config.as_env(train_gpt.TrainingSettings)
    key = hashlib.sha256(json.dumps([kept, config.data_path]).encode()).hexdigest()[:12]
    path = store / f"model-{key}.pt"
    machine = train_gpt.this_machine(config, {})
    kernels = train_gpt.choose_kernels(config, machine)
    model = train_gpt.ready_model(train_gpt.build_model(config), machine, kernels)
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model
    started = time.process_time()
    steps = ablation.train(config, model, ablation.clock("cpu"))
    seconds = time.process_time() - started
    print(f"seed {config.seed}: {steps} steps, {seconds:.0f} s of CPU", flush=True)
    torch.save(model.state_dict(), path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)
    return model


def validation_tokens(config: Config, documents: int) -> np.ndarray:
    """The validation text up to the end of its first documents; 0: all of it."""
    shards = train_gpt.open_shards(f"{config.data_path}/fineweb_val_*.bin")
    tokens = np.concatenate([train_gpt.read_tokens(shard) for shard in shards])
    begins = np.flatnonzero(tokens == BOS_ID)
    if 0 < documents < len(begins):
        tokens = tokens[: begins[documents] + 1]
    return tokens


def measure(arguments: argparse.Namespace) -> None:
    """Train and score what is not in the store yet."""
    torch.set_num_threads(1)
    arguments.store.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        settings = settings_of(arguments, seed)
        for name, row in rows_of(arguments).items():
            config = Config.from_env({**settings, **row})
            measured = {
                "row": name, "seed": seed, "documents": arguments.documents, "data": arguments.data.name,
                "settings": {key: settings[key] for key in (*SMALL, "ITERATIONS", *given(arguments))} | row,
                "script": results.conditions()["script"],
            }  # fmt: skip
            key = hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:12]
            path = arguments.store / f"score-{key}.json"
            if path.exists():
                continue
            model = trained_model(config, arguments.store)
            tokens = validation_tokens(config, arguments.documents)
            scorer = getattr(train_gpt, SCORERS.get(name, "score_ttt"))
            started = time.process_time()
            ledger = scorer(model, tokens, config)
            seconds = time.process_time() - started
            score = ledger.score(int(train_gpt.token_bytes(tokens, config).sum()))
            parameters = train_gpt.count_parameters(config)
            measured |= {**score._asdict(), "seconds": seconds, "parameters": parameters}
            path.write_text(json.dumps(measured, indent=1), encoding="utf-8")
            print(f"seed {seed}, {name}: {score.bits_per_byte:.4f} bpb, {seconds:.0f} s of CPU", flush=True)


def stored(store: Path) -> list[dict[str, Any]]:
    """All scores of a store."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(store.glob("score-*.json"))]


def tables(measured: dict[str, Any]) -> list[str]:
    """A table for each data set and number of documents, a line for each row, means over seeds."""
    lines = []
    scores = measured["scores"]
    for data, documents in sorted({(score["data"], score["documents"]) for score in scores}):
        alike = [score for score in scores if (score["data"], score["documents"]) == (data, documents)]
        seeds = sorted({score["seed"] for score in alike})
        geometry = alike[0]["settings"]
        text = f"the first {documents} documents" if documents else "all documents"
        targets = f"{alike[0]['scored_tokens']:,} targets"
        size = f"{alike[0]['parameters']:,} parameters"
        sliding = {}
        for score in alike:
            if score["row"] == "sliding window":
                sliding[score["seed"]] = score["bits_per_byte"]
        lines += [
            f"`{data}`, {text}, {targets}; {geometry['NUM_LAYERS']} layers × {geometry['MODEL_DIM']}, "
            f"{size}, {geometry['ITERATIONS']} steps of {geometry['TRAIN_BATCH_TOKENS']} tokens, context "
            f"{geometry['TRAIN_SEQ_LEN']}; float weights; seeds {' '.join(map(str, seeds))}. Test-time "
            f"training: `{settings_of_learning(geometry)}`, else the script's defaults; a row named by "
            "settings changes these.",
            "", "| score | bits per byte | std | minus sliding window | seconds of one core | n |",
            "|---|---|---|---|---|---|",
        ]  # fmt: skip
        for row in dict.fromkeys([*ROWS, *sorted(score["row"] for score in alike)]):
            found = [score for score in alike if score["row"] == row]
            if found:
                lines.append(line_of(row, found, sliding))
        lines.append("")
    return lines


def settings_of_learning(settings: dict[str, str]) -> str:
    """What of the settings is about test-time training, but for its switches."""
    switches = ("TTT_ENABLED", "TTT_MODE")
    return " ".join(
        f"{name}={value}" for name, value in settings.items()
        if name.startswith("TTT_") and name not in switches
    )  # fmt: skip


def line_of(row: str, found: list[dict[str, Any]], sliding: dict[int, float]) -> str:
    """One row over its seeds; the difference is taken seed by seed."""
    bits = [score["bits_per_byte"] for score in found]
    spread = f"{statistics.stdev(bits):.4f}" if len(bits) > 1 else "-"
    gains = [score["bits_per_byte"] - sliding[score["seed"]] for score in found if score["seed"] in sliding]
    gain = f"{statistics.mean(gains):+.4f}" if gains and row != "sliding window" else "-"
    seconds = statistics.mean(score["seconds"] for score in found)
    return f"| {row} | {statistics.mean(bits):.4f} | {spread} | {gain} | {seconds:.0f} | {len(bits)} |"


# ======================================================================================================
# MODELLED
# ======================================================================================================


class TokenTime(NamedTuple):
    """Modelled microseconds of one GPU for a token forward and for one backward."""

    forward_microseconds: float
    backward_microseconds: float

    @classmethod
    def of(cls, census: dict[str, Any]) -> TokenTime:
        """From a traced training step."""
        microseconds = {False: 0.0, True: 0.0}
        for graph in census["graphs"]:
            for launch in graph["launches"]:
                microseconds[graph["backward"]] += launch["microseconds"]
        return cls(microseconds[False] / census["tokens"], microseconds[True] / census["tokens"])


class Cost(NamedTuple):
    """What a score asks for, per target that is scored."""

    forward: float  # tokens that pass through the model
    backward: float
    adapter_bytes: float = 0.0  # read and written by steps of adapters
    passes: float = 0.0  # of a batch through the model, where they are counted

    def seconds(self, token: TokenTime, targets: int) -> float:
        """Of 8 GPUs: modelled, their host not counted."""
        microseconds = self.forward * token.forward_microseconds + self.backward * token.backward_microseconds
        moving = self.adapter_bytes / (BANDWIDTH_SHARE * CARDS["h100"].bytes_per_second)
        return (1e-6 * microseconds + moving) * targets / GPUS


def cost_of_windows(tokens: np.ndarray, config: Config, stride: int, chunk_tokens: int) -> Cost:
    """Of windows that learn nothing."""
    begins = train_gpt.document_start_of_targets(tokens, config)
    rows = train_gpt.window_rows(len(tokens) - 1, config.eval_length, stride, begins, chunk_tokens)
    return Cost(sum(map(len, rows)) * config.eval_length / (len(tokens) - 1), 0.0)


def cost_of_chunks(tokens: np.ndarray, config: Config) -> Cost:
    """Of SGD on chunks of the text: windows, and epochs over each chunk but the last."""
    windows = cost_of_windows(tokens, config, config.eval_stride, config.ttt_chunk_tokens)
    learned = (len(tokens) - 1) // config.ttt_chunk_tokens * config.ttt_chunk_tokens
    learning = config.ttt_epochs * learned / (len(tokens) - 1)
    return Cost(windows.forward + learning, learning)


def documents_of_a_rank(tokens: np.ndarray) -> np.ndarray:
    """These documents, again and again until they are as many as one of 8 ranks has of the official text.

    The more documents there are, the more alike are the lengths of a batch.
    """
    documents = int((tokens == BOS_ID).sum())
    return np.tile(tokens, max(round(OFFICIAL_DOCUMENTS / GPUS / documents), 1))


def cost_of_documents(tokens: np.ndarray, config: Config) -> Cost:
    """Of adapters: the windows of all chunks, as they are filled up to rows of one length."""
    model = GPT(config, seed=None)  # nothing is scored
    scorer = train_gpt.DocumentScorer(model, tokens, config, train_gpt.Ledger(tokens))
    adapters = train_gpt.DocumentAdapters(model, config, np.array([0]))
    document_bytes = 4 * sum(weights.numel() for weights in [*adapters.a.values(), *adapters.b.values()])
    forward = 0
    backward = 0
    adapter_bytes = 0
    passes = 0
    for batch in scorer.batches():
        for chunk in scorer.chunks(batch):
            passed = chunk.rows * (chunk.stop - chunk.first)
            forward += passed
            passes += 1
            if chunk.learning:
                backward += passed
                adapter_bytes += ADAPTER_PASSES * document_bytes * len(batch)
    targets = len(tokens) - 1
    return Cost(forward / targets, backward / targets, adapter_bytes / targets, passes / targets)


def cost(arguments: argparse.Namespace) -> None:
    """Print the cost of each way of scoring."""
    environ = given(arguments)
    if arguments.config:
        environ["CONFIG"] = str(arguments.config)
    environ["DATA_PATH"] = str(arguments.data)
    config = Config.from_env(environ)
    tokens = validation_tokens(config, 0)
    costs = {
        "round trip": cost_of_windows(tokens, config, config.eval_length, len(tokens)),
        "sliding window": cost_of_windows(tokens, config, config.eval_stride, len(tokens)),
        "SGD": cost_of_chunks(tokens, config),
        "LoRA": cost_of_documents(documents_of_a_rank(tokens), config),
    }
    token = None
    if arguments.census:
        token = TokenTime.of(json.loads(arguments.census.read_text(encoding="utf-8")))
    print(f"{arguments.data.name}: {len(tokens) - 1:,} targets; context {config.eval_length}, stride "
          f"{config.eval_stride}, SGD chunks of {config.ttt_chunk_tokens}, LoRA chunks of "
          f"{config.ttt_early_chunks} {config.ttt_chunk_size}, batches of {config.documents_at_once}")
    print("| score | forward tokens per target | backward | modelled seconds on 8 GPUs |\n|---|---|---|---|")
    for name, found in costs.items():
        seconds = f"{found.seconds(token, OFFICIAL_TARGETS):.0f}" if token else "-"
        print(f"| {name} | {found.forward:.2f} | {found.backward:.2f} | {seconds} |")


# ======================================================================================================
# THE PROGRAM
# ======================================================================================================


def main() -> None:
    """Measure, count, or print what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("--data", type=Path, required=True, help="folder of fineweb_{train,val}_*.bin")
    measuring.add_argument("--tokenizer", type=Path, required=True, help="their SentencePiece model")
    measuring.add_argument("--store", type=Path, required=True, help="folder of what is done")
    measuring.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2025])
    measuring.add_argument("--steps", type=int, default=400, help="of training, 8192 tokens each")
    measuring.add_argument("--documents", type=int, default=0, help="the first ones alone; 0: all")
    measuring.add_argument("--only", nargs="+", choices=ROWS, help="rows of the table; all by default")
    measuring.add_argument("--sweep", nargs="+", default=[], metavar="NAME=V1/V2", help="instead of the rows")
    measuring.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of all rows")
    counting = verbs.add_parser("cost")
    counting.add_argument("--data", type=Path, required=True, help="folder of fineweb_val_*.bin")
    counting.add_argument("--config", type=Path, help="settings; the script's defaults without it")
    counting.add_argument("--census", type=Path, help="LABEL.json of benchmarks.gpu_model, with recurrence")
    counting.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings over it")
    printing = verbs.add_parser("table")
    printing.add_argument("--store", type=Path, required=True)
    printing.add_argument("--keep", metavar="NAME", help="store as results/ttt-NAME.json and in RESULTS.md")
    arguments = parser.parse_args()
    if arguments.verb == "measure":
        measure(arguments)
    elif arguments.verb == "cost":
        cost(arguments)
    else:
        torch.set_num_threads(1)
        conditions = results.conditions()
        measured = {"scores": stored(arguments.store)}
        others = {score["script"] for score in measured["scores"]} - {conditions["script"]}
        if others:
            raise SystemExit(f"{arguments.store} has scores of train_gpt.py {', '.join(others)}, this one is "
                             f"{conditions['script']}: print their table with that script")
        name = f"ttt-{arguments.keep}" if arguments.keep else "ttt"
        results.finish(name, conditions, measured, bool(arguments.keep))


if __name__ == "__main__":
    main()
