"""What each quantizer loses of trained models at equal bytes: divergence, loss, seconds of one CPU.

    python benchmarks/divergence.py [RUN ...] [--bits 3.55] [--curve 2.4 2.8 4.5]

A RUN is a run directory of SAVE_FLOAT=1, each of another seed; its settings name data and model. Without one
a small model is trained on the built-in sample. The arms are those of ARMS. All get the
Hessians of the same training batches and --bits for each weight. At the sizes of --curve only the first arm
and the last are measured. The divergence is the mean over targets of the Kullback-Leibler divergence from the
predictions of the weights before quantization, in nats.
"""

import argparse
import contextlib
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import train_gpt  # noqa: E402
from benchmarks.conditions import conditions, described  # noqa: E402
from data import sample  # noqa: E402
from data.files import escape_unprintable  # noqa: E402
from tools.runs.stats import paired  # noqa: E402
from train_gpt import GPT, Config, Machine  # noqa: E402

ARMS = {
    "GPTQ": {"TRELLIS": "0", "COLUMN_STEPS": "0"},
    "to nearest": {"TRELLIS": "0", "COLUMN_STEPS": "0", "GPTQ": "0"},
    "trellis": {"TRELLIS": "1", "COLUMN_STEPS": "0"},
    "steps of columns": {"TRELLIS": "0", "COLUMN_STEPS": "0.5"},
    "steps of columns, trellis": {"TRELLIS": "1", "COLUMN_STEPS": "0.5"},
}
TRAINED = REPO / "runs" / "divergence" / "small"  # the small model: its folder, and how it is trained
TRAINING = {
    "DATA_PATH": f"data/datasets/{sample.NAME}", "TOKENIZER_PATH": f"data/tokenizers/{sample.TOKENIZER_FILE}",
    "VOCAB_SIZE": "1024", "NUM_LAYERS": "4", "MODEL_DIM": "64", "NUM_HEADS": "2", "NUM_KV_HEADS": "1",
    "XSA_LAST_N": "4", "LOOP_START": "1", "LOOP_END": "1", "PARALLEL_START_LAYER": "3",
    "TRAIN_SEQ_LEN": "128", "TRAIN_BATCH_TOKENS": "4096", "MICRO_BATCH_TOKENS": "4096", "EVAL_SEQ_LEN": "0",
    "MATRIX_LR": "0.04", "SCALAR_LR": "0.04", "TIED_EMBED_LR": "0.05", "SEED": "42", "ITERATIONS": "60",
    "MAX_WALLCLOCK_SECONDS": "0", "WARMUP_STEPS": "0", "VAL_LOSS_EVERY": "0", "VAL_BATCH_SIZE": "65536",
    "EVAL_STRIDE": "0", "TTT_ENABLED": "0", "GPTQ_DAMPING": "0.05", "GPTQ_CALIBRATION_BATCHES": "16",
    "DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "CPU_THREADS": "1", "TRAIN_PREFETCH": "0", "SAVE_FLOAT": "1",
}  # fmt: skip
WATCHED: list[tuple[Any, str]] = [
    (train_gpt.Quantizer, "quantize"), (train_gpt, "write_artifact"), (train_gpt, "encode"),
    (train_gpt, "decode"),
]  # fmt: skip


def predictions(model: GPT, tokens: np.ndarray, config: Config) -> Iterator[torch.Tensor]:
    """Log-probabilities (N, V) of the targets of rows of the context, some rows at once."""
    length = config.eval_length
    rows = max(1, config.val_pass_tokens // length)
    softcap = config.logit_softcap
    for inputs_BT in torch.from_numpy(tokens[:-1].astype(np.int64)).view(-1, length).split(rows):
        with torch.no_grad():
            logits_NV = model.logits(model(inputs_BT).flatten(0, 1)).float()
        if softcap:
            logits_NV = softcap * torch.tanh(logits_NV / softcap)
        yield F.log_softmax(logits_NV, dim=-1)


def trained_model(run: Path, config: Config, machine: Machine) -> GPT:
    """The weights of a run before they were quantized."""
    model = train_gpt.build_model(config)
    model.load_state_dict(torch.load(run / "final_model.pt", weights_only=True))
    return train_gpt.ready_model(model, machine, train_gpt.Ops())


class Clock:
    """CPU seconds and calls of functions of train_gpt.py, by their names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def watched(self, owner: Any, name: str) -> Any:
        """A patch of `owner` whose `name` is timed."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.process_time()
            result = function(*arguments, **named)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin
            self.calls[name] = self.calls.get(name, 0) + 1
            return result

        return mock.patch.object(owner, name, timed)


def measure(run: Path, wanted: list[tuple[float, str]], targets: int, batches: int) -> dict[str, Any]:
    """What one trained model loses at each of these sizes by each arm."""
    config = Config.from_env({"CONFIG": str(run / train_gpt.SETTINGS_FILE)})
    machine = Machine(dtype=torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32)
    model = trained_model(run, config, machine)
    folder = train_gpt.find_path(config.data_path)
    loader = train_gpt.Loader(config, train_gpt.open_shards(f"{folder}/fineweb_train_*.bin"), machine)
    hessians = train_gpt.collect_hessians(model, [loader.next_batch() for _ in range(batches)])
    loader.close()
    validation = train_gpt.open_shards(f"{folder}/fineweb_val_[0-9]*.bin")[0]
    whole = train_gpt.read_tokens(validation, config.vocab_size)
    tokens = whole[: targets + 1]
    targets_N = torch.from_numpy(tokens[1:].astype(np.int64))
    bytes_of_text = int(train_gpt.token_bytes(whole, config)[:targets].sum())
    bits_per_byte = targets / bytes_of_text / math.log(2)  # of one nat a target
    before_NV = torch.cat(list(predictions(model, tokens, config)))
    nats_before = F.nll_loss(before_NV, targets_N).item()
    weights = train_gpt.count_parameters(config)
    rows = []
    for size, arm in wanted:
        arm_config = Config.from_env({"CONFIG": str(run / train_gpt.SETTINGS_FILE), **ARMS[arm]})
        clock = Clock()
        with contextlib.ExitStack() as stack:
            for owner, name in WATCHED:
                stack.enter_context(clock.watched(owner, name))
            known = hessians if arm_config.gptq else {}
            data, _ = train_gpt.write_artifact(model, arm_config, known, "", int(weights * size / 8))
            read, _ = train_gpt.load_artifact(Path(arm), data)
        train_gpt.ready_model(read, machine, train_gpt.Ops())
        after_NV = torch.cat(list(predictions(read, tokens, config)))
        divergence = F.kl_div(after_NV, before_NV, log_target=True, reduction="batchmean").item()
        lost = F.nll_loss(after_NV, targets_N).item() - nats_before
        rows.append({
            "arm": arm, "bits": size, "bytes": len(data), "divergence": divergence,
            "bpb_lost": lost * bits_per_byte, "passes": clock.calls["encode"], "seconds": clock.seconds,
        })  # fmt: skip
        print(config.seed, rows[-1], file=sys.stderr, flush=True)
    return {"parameters": weights, "targets": targets, "nats_before": nats_before, "rows": rows,
            "calibration_tokens": batches * config.micro_batch_tokens, "data": folder.name,
            "iterations": config.iterations, "tokens_a_step": config.train_batch_tokens,
            "seed": config.seed}  # fmt: skip


def of_arm(measured: dict[str, Any], arm: str, size: float) -> list[dict[str, Any]]:
    """The figures of an arm at a size, one of each trained model, with its seed."""
    return [
        {**row, "seed": run["seed"]}
        for run in measured["runs"] for row in run["rows"] if (row["arm"], row["bits"]) == (arm, size)
    ]  # fmt: skip


def line_of(rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> str:
    """The cells of an arm beside the first arm, as means over the models."""
    mean = {name: statistics.mean(row[name] for row in rows) for name in ("bytes", "divergence", "bpb_lost")}
    share = mean["divergence"] / statistics.mean(row["divergence"] for row in reference)
    own, others = ({str(row["seed"]): row["bpb_lost"] for row in side} for side in (rows, reference))
    found = None if rows is reference else paired(own, others)
    told = "- | - | -"
    if found is not None and found.error is not None:
        p = "-" if found.p is None else f"{found.p:.2g}"
        told = f"{found.difference:+.4f} | {found.error:.4f} | {p}"
    seconds = [
        f"{statistics.mean(row['seconds'].get(name, 0.0) for row in rows):.0f}"
        for name in ("write_artifact", "quantize", "encode", "decode")
    ]
    return (
        f"| {rows[0]['arm']} | {mean['bytes']:,.0f} | {mean['divergence']:.5f} | {share:.2f} | "
        f"{mean['bpb_lost']:+.4f} | {told} | {len(rows)} | {' | '.join(seconds)} |"
    )


def tables(measured: dict[str, Any]) -> list[str]:
    """A table for each size: a row for each arm, beside the first of them."""
    runs = measured["runs"]
    of = runs[0]
    before = ", ".join(f"{run['nats_before']:.4f} (seed {run['seed']})" for run in runs)
    lines = [
        f"Models of {of['parameters']:,} weights on `{of['data']}`, {of['iterations']} steps of "
        f"{of['tokens_a_step']:,} tokens. Before quantization they have {before} nats. Hessians of "
        f"{of['calibration_tokens']:,} tokens, {of['targets']:,} validation targets.",
    ]  # fmt: skip
    for size in dict.fromkeys(row["bits"] for row in of["rows"]):
        arms = list(dict.fromkeys(row["arm"] for row in of["rows"] if row["bits"] == size))
        reference = of_arm(measured, arms[0], size)
        header = (
            f"| arm | bytes | divergence | of {arms[0]}'s | bpb lost | minus {arms[0]} | its error | p | n | "
            "CPU s | of them rounding | coding | decoding |"
        )
        rows = [reference, *(of_arm(measured, arm, size) for arm in arms[1:])]
        of_size = [line_of(found, reference) for found in rows]
        rule = "|" + "---|" * (header.count("|") - 1)
        lines += ["", f"{size:g} bits a weight:", "", header, rule, *of_size]
    return lines


def trained() -> Path:
    """The run directory of the small model, which is trained anew: its script may have changed."""
    if sample.main([]) != 0:
        raise SystemExit("the built-in sample is not there; `python data/sample.py` makes it")
    shutil.rmtree(TRAINED, ignore_errors=True)
    settings = {"CONFIG", *Config().as_env()}
    kept = {name: value for name, value in os.environ.items() if name not in settings}
    place = {"RUNS_DIR": str(TRAINED.parent), "RUN_ID": TRAINED.name}
    command = [sys.executable, str(REPO / "train_gpt.py")]
    ended = subprocess.run(
        command, cwd=REPO, env={**kept, **TRAINING, **place}, stdout=subprocess.DEVNULL, check=False
    )
    if ended.returncode != 0:
        raise SystemExit(f"{TRAINED}: the small model was not trained")
    return TRAINED


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; `wanted` has each size with each arm."""
    every = list(ARMS)
    ends = [every[0], every[-1]]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="*", help="run directories of SAVE_FLOAT=1")
    parser.add_argument("--bits", type=float, nargs="+", default=[3.55], help="of each weight, for all arms")
    parser.add_argument("--curve", type=float, nargs="*", default=[], help=f"more bits, for {ends}")
    parser.add_argument("--targets", type=int, default=16_384, help="a multiple of EVAL_SEQ_LEN")
    parser.add_argument("--batches", type=int, default=16, help="micro-batches for Hessians")
    given = parser.parse_args(argv)
    given.wanted = [(size, arm) for size in given.bits for arm in every]
    given.wanted += [(size, arm) for size in given.curve for arm in ends]
    return given


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    escape_unprintable()
    arguments = parse(argv)
    torch.set_num_threads(1)
    before = conditions()
    directories = arguments.runs or [trained()]
    runs = [measure(run, arguments.wanted, arguments.targets, arguments.batches) for run in directories]
    print("\n".join([described(before), "", *tables({"runs": runs})]))


if __name__ == "__main__":
    main()
