"""What each quantizer loses of one trained model at equal bytes: divergence, loss, seconds of one CPU.

    python benchmarks/divergence.py RUN [--bits 3.55 2.8] [--targets 16384] [--batches 16] [--keep]

RUN is a run directory of SAVE_FLOAT=1; its settings name data and model. The arms are those of
arms/quantizers.json. All get the Hessians of the same training batches and --bits for each weight. The
divergence is the mean over targets of the Kullback-Leibler divergence from the predictions of the weights
before quantization, in nats.
"""

import argparse
import contextlib
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
from benchmarks import results  # noqa: E402
from benchmarks.experiments import as_settings, read_json  # noqa: E402
from benchmarks.paired import table  # noqa: E402
from train_gpt import GPT, Config, Machine  # noqa: E402

TITLE = "Quantizers on a trained model"
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


def measure(run: Path, bits: list[float], targets: int, batches: int) -> dict[str, Any]:
    """All arms at each size."""
    config = Config.from_env({"CONFIG": str(run / train_gpt.SETTINGS_FILE)})
    machine = Machine(dtype=torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32)
    model = trained_model(run, config, machine)
    folder = train_gpt.find_path(config.data_path)
    loader = train_gpt.Loader(config, train_gpt.open_shards(f"{folder}/fineweb_train_*.bin"), machine)
    hessians = train_gpt.collect_hessians(model, [loader.next_batch() for _ in range(batches)])
    loader.close()
    validation = train_gpt.open_shards(f"{folder}/fineweb_val_[0-9]*.bin")[0]
    tokens = train_gpt.read_tokens(validation, config.vocab_size)[: targets + 1]
    targets_N = torch.from_numpy(tokens[1:].astype(np.int64))
    before_NV = torch.cat(list(predictions(model, tokens, config)))
    nats_before = F.nll_loss(before_NV, targets_N).item()
    weights = train_gpt.count_parameters(config)
    rows = []
    for size in bits:
        for arm, changes in read_json("quantizers")["arms"].items():
            settings = {"CONFIG": str(run / train_gpt.SETTINGS_FILE), **as_settings(changes)}
            clock = Clock()
            with contextlib.ExitStack() as stack:
                for owner, name in WATCHED:
                    stack.enter_context(clock.watched(owner, name))
                arm_config = Config.from_env(settings)
                known = hessians if arm_config.gptq else {}
                data, _ = train_gpt.write_artifact(model, arm_config, known, "", int(weights * size / 8))
                read, _ = train_gpt.load_artifact(Path(arm), data)
            train_gpt.ready_model(read, machine, train_gpt.Ops())
            after_NV = torch.cat(list(predictions(read, tokens, config)))
            divergence = F.kl_div(after_NV, before_NV, log_target=True, reduction="batchmean").item()
            rows.append({
                "arm": arm, "bits": size, "bytes": len(data), "divergence": divergence,
                "nats_lost": F.nll_loss(after_NV, targets_N).item() - nats_before,
                "passes": clock.calls["encode"], "seconds": clock.seconds,
            })  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
    return {"parameters": weights, "targets": targets, "nats_before": nats_before, "rows": rows,
            "calibration_tokens": batches * config.micro_batch_tokens, "data": folder.name,
            "iterations": config.iterations, "tokens_a_step": config.train_batch_tokens,
            "seed": config.seed}  # fmt: skip


def tables(measured: dict[str, Any]) -> list[str]:
    """A row for each size and arm; divergences as a share of the first arm's at that size."""
    lines = []
    first: dict[float, float] = {}
    for row in measured["rows"]:
        share = row["divergence"] / first.setdefault(row["bits"], row["divergence"])
        seconds = row["seconds"]
        lines.append(
            f"| {row['arm']} | {row['bits']:g} | {row['bytes']:,} | {row['divergence']:.5f} | {share:.2f} | "
            f"{row['nats_lost']:+.5f} | {row['passes']} | {seconds['write_artifact']:.0f} | "
            f"{seconds['quantize']:.0f} | {seconds['encode']:.0f} | {seconds['decode']:.0f} |")
    header = (
        "| arm | bits a weight | bytes | divergence | of the first arm's | nats lost | passes | CPU s | of "
        "them rounding | coding | decoding |")
    return [
        f"One model of {measured['parameters']:,} weights on `{measured['data']}`, seed {measured['seed']}, "
        f"{measured['iterations']} steps of {measured['tokens_a_step']:,} tokens. Before quantization it has "
        f"{measured['nats_before']:.4f} nats. Hessians of {measured['calibration_tokens']:,} tokens, "
        f"{measured['targets']:,} validation targets.",
        "", *table(header, lines)]  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory of SAVE_FLOAT=1")
    parser.add_argument("--bits", type=float, nargs="+", default=[3.55, 2.8], help="of each weight")
    parser.add_argument("--targets", type=int, default=16_384, help="a multiple of EVAL_SEQ_LEN")
    parser.add_argument("--batches", type=int, default=16, help="micro-batches for Hessians")
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    arguments = parser.parse_args(argv)
    before = results.conditions()
    if arguments.keep:
        results.refuse_dirty()
    measured = measure(arguments.run, arguments.bits, arguments.targets, arguments.batches)
    size = f"{measured['parameters'] / 1e6:.1f}M"
    results.finish(f"divergence-{size}", before, measured, arguments.keep)


if __name__ == "__main__":
    main()
