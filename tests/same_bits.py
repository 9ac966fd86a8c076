"""Whether two versions of train_gpt.py compute the same bits: ten short runs of each, compared.

    python tests/same_bits.py OLD NEW             # all cases
    python tests/same_bits.py OLD NEW demo lanes  # some of them
    python tests/same_bits.py --list              # the cases

A run trains a few steps on the sample text, quantizes, reloads and scores. Both scripts run in fp32 on one
thread. The program compares all training losses, gradient norms and validation losses, the stream hash, every
weight that a script reads back from its own model.bin, and the mean nats of every final score, all in full
precision. How a file stores the weights may change: its size is printed, not compared. A setting that one of
the scripts does not have is left out for it.

Exit status 0: all cases are equal; 1: some differ, or a run failed.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from tools.runs.load import load_script  # noqa: E402

SAMPLE = REPO / "data" / "datasets" / "sample_sp1024"
TOKENIZER = REPO / "data" / "tokenizers" / "sample_1024_bpe.model"

# What every case sets: a tiny model, six steps of two micro-batches, no clock, no search for the budget.
TINY = {
    "DATA_PATH": SAMPLE, "TOKENIZER_PATH": TOKENIZER, "DEVICE": "cpu", "COMPUTE_DTYPE": "float32",
    "CPU_THREADS": 1, "MAX_WALLCLOCK_SECONDS": 0, "ITERATIONS": 6, "WARMUP_STEPS": 1, "TRAIN_LOG_EVERY": 1,
    "VAL_LOSS_EVERY": 3, "VAL_TOKENS_LIMIT": 3000, "VAL_BATCH_SIZE": 8192, "TRAIN_SEQ_LEN": 128,
    "EVAL_SEQ_LEN": 128, "MATRIX_LR": 0.026, "TTT_LORA_LR": 0.0001, "TTT_LORA_TARGETS": "q,k,v,o,mlp,head",
    "TRAIN_BATCH_TOKENS": 2048, "MICRO_BATCH_TOKENS": 1024, "VOCAB_SIZE": 1024, "NUM_LAYERS": 4,
    "MODEL_DIM": 64, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "XSA_LAST_N": 4, "RATE_CONTROL": 0,
    "GPTQ_CALIBRATION_BATCHES": 2, "EVAL_STRIDE": 32, "TTT_CHUNK_TOKENS": 512, "TTT_BATCH_SEQS": 4,
    "TTT_CHUNK_SIZE": 32, "TTT_BATCH_SIZE": 8, "TTT_LORA_RANK": 8, "SEED": 7, "TRELLIS": 0, "COLUMN_STEPS": 0,
}
LOOPED = {"NUM_LOOPS": 1, "LOOP_START": 1, "LOOP_END": 2, "PARALLEL_START_LAYER": 2, "ROPE_DIMS": 8}


class Case(NamedTuple):
    """One pair of runs."""

    config: str  # a file of configs/, or none
    settings: dict[str, Any]
    ranks: int = 1
    environment: dict[str, str] | None = None  # besides settings


CASES = {
    "demo": Case("cpu_demo.env", {}),
    "default": Case("", LOOPED),
    "lanes": Case("", {**LOOPED, "TRAIN_PREFETCH": 0, "TRAINING_TIMING_BREAKDOWN": 1}),
    "two_ranks": Case("", LOOPED, ranks=2),
    "columns": Case("", {**LOOPED, "COLUMN_STEPS": 0.5, "TRELLIS": 1, "TTT_ENABLED": 0}),
    "pr1493": Case("pr1493.env", {**LOOPED, "ROPE_DIMS": 8}),
    "pr549": Case("pr549.env", {"VE_LAYERS": "2,3", "BIGRAM_VOCAB_SIZE": 256, "BIGRAM_DIM": 16, "VE_DIM": 16,
                                "ROPE_DIMS": 8}),
    "pr591": Case("pr591.env", {"VE_LAYERS": "2,3", "VE_DIM": 16}),
    "upstream": Case("upstream_baseline.env", {}),
    "kernels": Case("", {**LOOPED, "FUSED_MLP": 1, "FUSED_HEADS": 1, "ITERATIONS": 2, "VAL_LOSS_EVERY": 0,
                         "GPTQ": 0, "EVAL_STRIDE": 0, "TTT_ENABLED": 0, "TRAIN_BATCH_TOKENS": 256,
                         "MICRO_BATCH_TOKENS": 256, "VAL_TOKENS_LIMIT": 300},
                    environment={"TRITON_INTERPRET": "1"}),
}


class Script:
    """A version of train_gpt.py and the settings that it knows."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        command = [sys.executable, self.path, "--help"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.known = set(re.findall(r"^  ([A-Z][A-Z0-9_]+)=", text, re.MULTILINE))
        self.module = load_script(self.path)

    def settings(self, case: Case) -> dict[str, str]:
        """The settings of a case that this version has, with the spelling it has for them."""
        values: dict[str, Any] = {}
        if case.config:
            text = (REPO / "configs" / case.config).read_text(encoding="utf-8")
            values.update(re.findall(r"^([A-Z0-9_]+)=(.*?)(?:\s+#.*)?$", text, re.MULTILINE))
        values.update(TINY)
        values.update(case.settings)
        return {name: str(value) for name, value in values.items() if name in self.known}

    def run(self, case: Case, folder: Path) -> Path:
        """Run a case below `folder`; the run directory. RuntimeError with the end of its output."""
        command = [sys.executable, str(self.path)]
        if case.ranks > 1:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                       f"--nproc_per_node={case.ranks}", str(self.path)]
        ours = self.known | {"CONFIG"}
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        environment = {**kept, **self.settings(case), "CONFIG": "none", "RUNS_DIR": str(folder),
                       "RUN_ID": "run", "OMP_NUM_THREADS": "1", **(case.environment or {})}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
        if ended.returncode != 0:
            output = (ended.stdout + ended.stderr)[-3000:]
            raise RuntimeError(f"{self.path} ended with {ended.returncode}:\n{output}")
        return folder / "run"

    def weights(self, path: Path) -> dict[str, str]:
        """The SHA-256 of every parameter of an artifact, as this version reads it."""
        model, _ = self.module.load_artifact(path)
        hashes = {}
        for name, weights in model.named_parameters():
            hashes[name] = hashlib.sha256(weights.detach().numpy().tobytes()).hexdigest()[:12]
        return hashes


def results(script: Script, run: Path) -> dict[str, Any]:
    """Everything of a finished run that two equal versions have in common."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [event for event in events if event["event"] == "train"]
    return {
        "train losses": [step["train_loss"] for step in steps],
        "gradient norms": [step["grad_norm"] for step in steps],
        "validation losses": [event["val_loss"] for event in events if event["event"] == "val"],
        "stream hash": summary["stream_hash"],
        "decoded weights": script.weights(run / "model.bin"),
        "final scores": {name: loss["nats"] for name, loss in summary["losses"].items()},
    }


def compare(name: str, old: Script, new: Script) -> bool:
    """Run one case with both versions and print a line for it; whether all is equal."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        sizes = []
        for number, script in enumerate((old, new)):
            below = Path(folder, str(number))
            below.mkdir()
            try:
                run = script.run(CASES[name], below)
                found.append(results(script, run))
                sizes.append(f"{(run / 'model.bin').stat().st_size:,}")
            except RuntimeError as error:
                print(f"{name}: FAILED {error}", flush=True)
                return False
    different = [part for part in found[0] if found[0][part] != found[1][part]]
    print(f"{name}: {'equal' if not different else 'DIFFERENT ' + ', '.join(different)} "
          f"({len(found[0]['train losses'])} steps, artifact {' → '.join(sizes)} bytes, "
          f"scores {', '.join(found[0]['final scores'])})", flush=True)
    for part in different:
        print(f"  {part}\n    old {found[0][part]}\n    new {found[1][part]}", flush=True)
    return not different


def main() -> int:
    """Compare two versions, case by case."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("scripts", nargs="*", help="OLD NEW, then the names of cases; none: all")
    parser.add_argument("--list", action="store_true", help="print the cases")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CASES))
        return 0
    if len(options.scripts) < 2:
        parser.error("two scripts are compared: OLD NEW")
    names = options.scripts[2:] or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"no case is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    subprocess.run([sys.executable, REPO / "data" / "sample.py"], check=True, stdout=subprocess.DEVNULL)
    old, new = (Script(Path(path)) for path in options.scripts[:2])
    equal = [compare(name, old, new) for name in names]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
