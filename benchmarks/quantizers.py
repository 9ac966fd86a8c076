"""What quantizers lose at equal bytes, on the same trained weights with the same Hessians.

    python benchmarks/quantizers.py --data DIR --tokenizer FILE --runs FOLDER [--size 10M] [--bits 3.5 2.8]
        [--seeds 1337 42 2025] [--only "lattice E8" trellis] [--train] [--table] [--keep]

A model is trained once for each seed and kept in the folder with its Hessians; every quantizer gets these.
Rate control fits each into the same number of bytes. Two figures say what was lost. The loss over the weights
before quantization is what counts, but some ten thousand tokens may by chance like a rounding error. The
divergence (Kullback and Leibler) of the predictions from those before quantization is never below zero, and
is told apart on fewer tokens.

All quantizers but one are train_gpt.py's own, and write its files. The lattice E8 is made here, to be
measured beside the trellis: its bytes are what an ideal coder with the same tables would take. A file has a
head and the states of its coder besides, so the lattice is favoured by some tenths of a percent.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # for torch: waiting threads would burn CPU seconds

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks import ablation, budget, paired, results  # noqa: E402
from benchmarks.budget import Trained  # noqa: E402
from train_gpt import GPT, Config  # noqa: E402

TITLE = "Quantizers at equal bytes"
COMMON = {
    "DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "TRAIN_PREFETCH": "0", "TTT_ENABLED": "0",
    "EVAL_STRIDE": "0", "MAX_WALLCLOCK_SECONDS": "0", "GPTQ": "1", "RATE_CONTROL": "1",
}  # fmt: skip
SIZES = {
    # 10.6 M weights in matrices; two passes over a loop, two lanes, half as many keys, as the default has.
    # What a core can train in twenty minutes: such weights are still near where they began.
    "10M": {
        "NUM_LAYERS": "8", "MODEL_DIM": "384", "NUM_HEADS": "6", "NUM_KV_HEADS": "3", "MLP_MULT": "3",
        "XSA_LAST_N": "8", "NUM_LOOPS": "1", "LOOP_START": "3", "LOOP_END": "3", "PARALLEL_START_LAYER": "6",
        "TRAIN_SEQ_LEN": "256", "TRAIN_BATCH_TOKENS": "4096", "MICRO_BATCH_TOKENS": "4096",
        "VAL_BATCH_SIZE": "4096", "MATRIX_LR": "0.04", "SCALAR_LR": "0.04", "TIED_EMBED_LR": "0.05",
        "EMA_DECAY": "0.97", "ITERATIONS": "150", "GPTQ_CALIBRATION_BATCHES": "16",
    },
    "demo": {
        "CONFIG": str(REPO / "configs" / "cpu_demo.env"), "ITERATIONS": "600", "VAL_BATCH_SIZE": "16384",
        "COLUMN_STEPS": "0",
    },
}  # fmt: skip
BASE = "GPTQ"
LATTICE = "lattice E8"
# What each sets; the lattice goes the trellis's way through the quantizer, with another search.
QUANTIZERS: dict[str, dict[str, str]] = {
    BASE: {},
    LATTICE: {"TRELLIS": "1"},
    "trellis": {"TRELLIS": "1"},
    "steps of columns": {"COLUMN_STEPS": "0.5"},
    "trellis, steps of columns": {"TRELLIS": "1", "COLUMN_STEPS": "0.5"},
}
BITS = (3.5, 2.8)
VAL_TOKENS = 65_536


# The lattice E8: eight whole numbers of even sum, or eight such numbers and a half each. As many points as
# there are whole numbers, but farther apart: 0.65 dB less error at the same number of bits. Along a column
# eight rows are a point. (Conway and Sloane, Sphere Packings, Lattices and Groups, chapter 20)
GROUP = 8


def nearest_of_even_sum(values_8N: np.ndarray) -> np.ndarray:
    """The whole numbers nearest to each column of eight, among those of even sum."""
    nearest_8N = np.rint(values_8N)
    error_8N = values_8N - nearest_8N
    # Where the sum is odd, the number that was least sure goes to its second nearest.
    odd = np.flatnonzero(nearest_8N.sum(0) % 2)
    worst = np.abs(error_8N[:, odd]).argmax(0)
    away = np.where(error_8N[worst, odd] < 0, -1.0, 1.0)
    nearest_8N[worst, odd] += away
    return nearest_8N


def nearest_in_lattice(values_NR: Tensor, levels: float) -> Tensor:
    """The steps (N, R), whole ones and halves, that E8 along R has nearest to values in steps."""
    rows = values_NR.size(1)
    filled_NR = F.pad(values_NR.clamp(-levels, levels), (0, -rows % GROUP))
    values_8N = filled_NR.reshape(-1, GROUP).T.cpu().numpy()
    whole_8N = nearest_of_even_sum(values_8N)
    half_8N = nearest_of_even_sum(values_8N - 0.5) + 0.5
    whole_is_nearer = np.square(values_8N - whole_8N).sum(0) <= np.square(values_8N - half_8N).sum(0)
    found_8N = np.where(whole_is_nearer, whole_8N, half_8N)
    return torch.from_numpy(found_8N.T.copy()).to(values_NR).reshape(filled_NR.shape)[:, :rows]


class Cosets:
    """Which of the lattice's two grids each row of codes is on: what a trellis is to the symbol model."""

    def __init__(self, halves_RC: np.ndarray) -> None:
        self.of_rows_RC = (halves_RC & 1).astype(np.int64)
        self.row = 0

    @property
    def shifts_3C(self) -> np.ndarray:
        """Of the next row, (1, C); a trellis has those of the two rows before as well."""
        return self.of_rows_RC[self.row : self.row + 1]

    def follow(self, _codes_C: np.ndarray) -> None:
        """On to the next row."""
        self.row += 1


def entropy_bits(ones: int, count: int) -> float:
    """Bits of so many yes-or-no choices, coded by how often they were yes."""
    bits = 0.0
    for part in (ones, count - ones):
        if part:
            bits -= part * math.log2(part / count)
    return bits


def ideal_bits(array_RC: np.ndarray, in_lattice: bool = False) -> float:
    """Bits of an array by the frequencies that the coder's model has for it.

    in_lattice: half steps of points of E8. Of a point, its coset is told; the parity of its last number is
    not, as the other seven have it.
    """
    along_trellis = array_RC.dtype == np.int16
    codes_RC = (array_RC >> 1).astype(np.int8) if along_trellis else array_RC
    peak = int(np.abs(codes_RC.astype(np.int16)).max(initial=0))
    kind = train_gpt.ALONG_TRELLIS if along_trellis else 0
    model = train_gpt.SymbolModel(codes_RC.shape[1], kind + peak)
    bits = 0.0
    if in_lattice:
        cosets = Cosets(array_RC)
        model.trellis = cosets  # type: ignore[assignment]
        of_points = cosets.of_rows_RC[::GROUP]
        bits += entropy_bits(int(of_points.sum()), of_points.size)
    for row, codes_C in enumerate(codes_RC):
        first_entries, frequencies, _ = model.tables()
        symbols = codes_C.astype(np.int64) + peak
        entries = first_entries + symbols
        possible = np.full(len(symbols), train_gpt.SLOTS, np.int64)
        if in_lattice and row % GROUP == GROUP - 1:
            by_table = frequencies.reshape(-1, model.size)
            of_parity = np.stack([by_table[:, 0::2].sum(1), by_table[:, 1::2].sum(1)])
            possible = of_parity[symbols % 2, first_entries // model.size]
        bits -= float(np.log2(frequencies[entries] / possible).sum())
        model.learn(first_entries, symbols)
    return bits


def trained(settings: dict[str, str], seed: int, folder: Path) -> Trained:
    """The model of a seed: from the folder, or trained and kept there; one process trains, others wait."""
    config = Config.from_env({**settings, "SEED": str(seed)})
    model = train_gpt.build_model(config)
    machine = train_gpt.Machine()
    train_gpt.ready_model(model, machine, train_gpt.fast_ops(config, machine).ops)
    path = folder / f"trained-seed{seed}.pt"
    with open(path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            found = budget.trained(config, model, "cpu", config.gptq_calibration_batches)
            part = path.with_suffix(".part")
            torch.save({**found._asdict(), "model": model.state_dict()}, part)
            part.rename(path)
    kept = torch.load(path, weights_only=True)
    model.load_state_dict(kept["model"])
    return Trained(**{**kept, "model": model})


@torch.no_grad()
def log_probabilities(model: GPT, tokens: np.ndarray, config: Config) -> Iterator[Tensor]:
    """Of every next token, in nats, (N, V), batch by batch; sequences without overlap."""
    rows = config.val_batch_size // config.train_seq_len
    inputs_NT = torch.from_numpy(tokens[:-1].astype(np.int64)).view(-1, config.train_seq_len)
    looping = train_gpt.loop_is_on(1.0, config)
    for inputs_BT in inputs_NT.split(rows):
        logits_NV = model.logits(model(inputs_BT, None, looping).flatten(0, 1)).float()
        capped_NV = config.logit_softcap * torch.tanh(logits_NV / config.logit_softcap)
        yield capped_NV.log_softmax(-1)


class Judge:
    """The validation text, and what a model predicted there before quantization."""

    def __init__(self, model: GPT, config: Config) -> None:
        shards = train_gpt.open_shards(f"{config.data_path}/fineweb_val_[0-9]*.bin")
        tokens = np.concatenate([train_gpt.read_tokens(shard) for shard in shards])
        count = len(tokens) - 1
        if config.val_tokens_limit:
            count = min(config.val_tokens_limit, count)
        self.tokens = tokens[: count - count % config.train_seq_len + 1]
        self.targets = torch.from_numpy(self.tokens[1:].astype(np.int64))
        self.config = config
        # Bits per byte of text that a nat is, summed over all targets.
        self.bpb_per_nat = 1 / math.log(2) / int(train_gpt.token_bytes(self.tokens, config).sum())
        self.before = list(log_probabilities(model, self.tokens, config))
        self.float_bpb = self.judge(model)["val_bpb"]

    def judge(self, model: GPT) -> dict[str, float]:
        """Bits per byte of a model, and its divergence from the one before quantization, in the same unit."""
        nats = 0.0
        divergence = 0.0
        after = log_probabilities(model, self.tokens, self.config)
        for before_NV, after_NV, targets_N in zip(
            self.before, after, self.targets.split(self.config.val_batch_size), strict=True
        ):
            nats -= float(after_NV.gather(-1, targets_N[:, None]).double().sum())
            divergence += float((before_NV.exp() * (before_NV - after_NV)).double().sum())
        return {"val_bpb": nats * self.bpb_per_nat, "divergence": divergence * self.bpb_per_nat}


def ship(found: Trained, config: Config) -> tuple[GPT, dict[str, Any]]:
    """The model of an artifact that fills ARTIFACT_BYTES_MAX, its bytes, and CPU seconds of both ways."""
    shipped = budget.ship(found, config)
    passes = int(shipped.line.partition("passes:")[2].split()[0])
    return shipped.model, {
        "bytes": shipped.bytes, "passes": passes,
        "write_seconds": shipped.write_seconds, "read_seconds": shipped.read_seconds,
    }  # fmt: skip


def ship_in_lattice(found: Trained, config: Config) -> tuple[GPT, dict[str, Any]]:
    """The same by the lattice: its bytes are those of an ideal coder, and nothing reads them."""
    tried: dict[int, list[train_gpt.QuantizedWeights]] = {}

    def ideal_file(_config: Config, banks: list[train_gpt.QuantizedWeights], _tokenizer: str) -> bytes:
        bits = 0.0
        for bank in banks:
            bits += ideal_bits(bank.codes, in_lattice=bank.codes.dtype == np.int16)
            bits += ideal_bits(bank.exponents)
        data = bytes(round(bits / 8))
        tried[len(data)] = banks
        return data

    with (
        mock.patch.object(train_gpt, "nearest_on_trellis", nearest_in_lattice),
        mock.patch.object(train_gpt, "artifact_bytes", ideal_file),
    ):
        data, _ = train_gpt.write_artifact(
            found.model, config, found.hessians, "0" * 64, config.artifact_bytes_max
        )
    shipped = copy.deepcopy(found.model)
    with torch.no_grad():
        for weights, bank in zip(shipped.parameters(), tried[len(data)], strict=True):
            weights.copy_(train_gpt.restore_weights(bank, tuple(weights.shape)))
    return shipped, {"bytes": len(data), "passes": len(tried)}


def row_name(quantizer: str, bits: float) -> str:
    """What a row is called."""
    return f"{quantizer}, {bits:g} bits"


class Bench:
    """The trained model of a seed and its judge, made when the first of its quantizers is measured."""

    def __init__(self, settings: dict[str, str], folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.of_seed: dict[int, tuple[Trained, Judge]] = {}

    def measure(self, quantizer: str, bits: float, seed: int) -> dict[str, Any]:
        """What one quantizer leaves of the model of a seed, in so many bits a weight."""
        if seed not in self.of_seed:
            found = trained(self.settings, seed, self.folder)
            self.of_seed.clear()  # one model at a time: its predictions take much memory
            config = Config.from_env({**self.settings, "SEED": str(seed)})
            self.of_seed[seed] = (found, Judge(found.model, config))
        found, judge = self.of_seed[seed]
        weights = sum(parameter.numel() for parameter in found.model.parameters())
        own = {
            **self.settings, **QUANTIZERS[quantizer], "SEED": str(seed),
            "ARTIFACT_BYTES_MAX": str(round(bits * weights / 8)),
        }  # fmt: skip
        config = Config.from_env(own)
        made = ship_in_lattice if quantizer == LATTICE else ship
        shipped, figures = made(found, config)
        machine = train_gpt.Machine()
        train_gpt.ready_model(shipped, machine, train_gpt.fast_ops(config, machine).ops)
        return {
            "seed": seed, "weights": weights, "training_seconds": found.seconds,
            "targets": len(judge.targets), "float_bpb": judge.float_bpb, **figures, **judge.judge(shipped),
        }  # fmt: skip


HEADER = (
    "| quantizer | bytes | bpb lost | of GPTQ's | minus GPTQ's | its error | divergence | of GPTQ's "
    "| its error | written, s | passes | read, s | n |"
)


def lost(run: dict[str, Any]) -> float:
    """Bits per byte by which a model became worse."""
    return float(run["val_bpb"] - run["float_bpb"])


def mean_and_error(values: list[float], digits: int, sign: str = "") -> str:
    """Two cells: the mean, and its standard error where there are two or more."""
    if not values:
        return "- | -"
    error = f"{statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else "-"
    return f"{statistics.mean(values):{sign}.{digits}f} | {error}"


def row(name: str, runs: paired.Runs, base: paired.Runs) -> str:
    """A line of the table; what is told beside the base is of the seeds that both have.

    Of losses the ratio of their sums: that of one seed may be hardly more than chance.
    """
    of_base = {run["seed"]: run for run in base}
    pairs = [(run, of_base[run["seed"]]) for run in runs if run["seed"] in of_base]
    beside = ["-", "- | -", "- | -"]
    if runs is not base and pairs:
        ratio = sum(lost(run) for run, _ in pairs) / sum(lost(other) for _, other in pairs)
        differences = [lost(run) - lost(other) for run, other in pairs]
        ratios = [run["divergence"] / other["divergence"] for run, other in pairs]
        beside = [f"{ratio:.2f}", mean_and_error(differences, 5, "+"), mean_and_error(ratios, 3)]
    seconds = ["-", "-"]
    if "write_seconds" in runs[0]:
        seconds = [
            f"{statistics.median(run[key] for run in runs):.0f}" for key in ("write_seconds", "read_seconds")
        ]
    return (
        f"| {name} | {statistics.mean(run['bytes'] for run in runs):,.0f} | "
        f"{statistics.mean(map(lost, runs)):.5f} | {beside[0]} | {beside[1]} | "
        f"{statistics.mean(run['divergence'] for run in runs):.5f} | {beside[2]} | "
        f"{seconds[0]} | {statistics.median(run['passes'] for run in runs):g} | {seconds[1]} | {len(pairs)} |"
    )


def tables(measured: dict[str, Any]) -> list[str]:
    """What was held equal, and a table for each number of bits that GPTQ was measured at."""
    rows: dict[str, paired.Runs] = measured["rows"]
    runs = [run for of_row in rows.values() for run in of_row]
    seeds = sorted({run["seed"] for run in runs})
    before = {run["seed"]: run["float_bpb"] for run in runs}
    length = f"{measured['steps']} steps of {measured['tokens_a_step']:,} tokens"
    if measured["steps"] * measured["tokens_a_step"] < runs[0]["weights"]:
        length += ", fewer in all than weights, which are near where they began"
    lines = [
        f"`{measured['data']}`, {measured['model']}, {runs[0]['weights']:,} weights, {length}; seeds "
        f"{' '.join(map(str, seeds))}; {runs[0]['targets']:,} validation targets, "
        f"{statistics.mean(before.values()):.4f} bits per byte before quantization. Hessians of "
        f"{measured['calibration_batches']} batches. Lost: bits per byte after quantization less before; of "
        "GPTQ's: sums over the seeds. Divergence: of the predictions from those before, in bits a byte of "
        "text; of GPTQ's: seed by seed. Written: CPU seconds of one core, beside other jobs; Hessians are "
        "factored once, GPTQ's sweep and the coder run in each pass. The lattice has no file: its bytes are "
        "an ideal coder's, with the tables that the trellis has.",
    ]  # fmt: skip
    for bits in measured["bits"]:
        base = rows.get(row_name(BASE, bits), [])
        of_bits = []
        for quantizer in QUANTIZERS:
            if found := rows.get(row_name(quantizer, bits)):
                of_bits.append(row(quantizer, found, found if quantizer == BASE else base))
        if of_bits:
            lines += ["", f"{bits:g} bits a weight:", "", *paired.table(HEADER, of_bits)]
    return lines


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of fineweb_{train,val}_*.bin")
    parser.add_argument("--tokenizer", type=Path, required=True, help="SentencePiece model of these shards")
    parser.add_argument(
        "--runs", type=Path, required=True, help="keep models and runs there; go on with those"
    )
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 42, 2025])
    parser.add_argument("--bits", type=float, nargs="+", default=BITS, help="a weight of the artifact has")
    parser.add_argument("--only", nargs="+", choices=QUANTIZERS, help="beside GPTQ; all by default")
    parser.add_argument("--val-tokens", type=int, default=VAL_TOKENS, help="targets to score; 0: all")
    parser.add_argument("--train", action="store_true", help="train the models and measure nothing more")
    parser.add_argument("--table", action="store_true", help="measure nothing more")
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    return parser.parse_args()


def main() -> None:
    """Measure what is not measured yet, print the table, and with --keep store it."""
    arguments = parse()
    import sentencepiece

    torch.set_num_threads(1)
    before = results.conditions()
    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(arguments.tokenizer)).vocab_size()
    settings = {
        **COMMON, **SIZES[arguments.size], "VOCAB_SIZE": str(vocabulary), "DATA_PATH": str(arguments.data),
        "TOKENIZER_PATH": str(arguments.tokenizer), "VAL_TOKENS_LIMIT": str(arguments.val_tokens),
    }  # fmt: skip
    config = Config.from_env(settings)
    measured = {
        "data": arguments.data.name, "model": f"{config.num_layers} layers × {config.model_dim}",
        "steps": config.iterations, "tokens_a_step": config.train_batch_tokens, "bits": list(arguments.bits),
        "calibration_batches": config.gptq_calibration_batches,
    }  # fmt: skip
    alike = {key: before[key] for key in ("processor", "torch", "script")}
    common = {**alike, "data": arguments.data.name, **config.as_env()}
    for path in ("CONFIG", "DATA_PATH", "TOKENIZER_PATH"):  # the same files may lie elsewhere
        common.pop(path, None)
    about = json.dumps(common, indent=1)
    if arguments.train:
        ablation.hold_common(arguments.runs, about)
        for seed in arguments.seeds:
            trained(settings, seed, arguments.runs)
        return

    stack = {}
    order = []
    for bits, quantizer in itertools.product(arguments.bits, QUANTIZERS):
        name = row_name(quantizer, bits)
        stack[name] = {"QUANTIZER": quantizer, "BITS": str(bits)}
        if not arguments.only or quantizer in (BASE, *arguments.only):
            order.append(name)
    seeds = [] if arguments.table else arguments.seeds
    bench = Bench(settings, arguments.runs)

    def measure_one(row_of: dict[str, str], seed: int, _kind: str) -> dict[str, Any]:
        return bench.measure(row_of["QUANTIZER"], float(row_of["BITS"]), seed)

    measured["rows"] = ablation.share_runs(
        arguments.runs, stack, list(itertools.product(seeds, order)), "cpu", about, measure_one
    )
    name = f"quantizers-{arguments.data.name}-{arguments.size}"
    if arguments.val_tokens != VAL_TOKENS:
        name += f"-{arguments.val_tokens}targets"
    results.finish(name, before, measured, arguments.keep)


if __name__ == "__main__":
    main()
