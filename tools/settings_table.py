"""Write the README's table of settings from `Config`: `python -m tools.settings_table`, or `make docs`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import train_gpt

BEGIN, END = "<!-- settings:begin (make docs) -->", "<!-- settings:end -->"
MAIN = """
DATA_PATH TOKENIZER_PATH VOCAB_SIZE TRAIN_SEQ_LEN TRAIN_BATCH_TOKENS MICRO_BATCH_TOKENS
TRAIN_PREFETCH TRAIN_PREFETCH_QUEUE RUN_ID SEED ITERATIONS MAX_WALLCLOCK_SECONDS MAX_EVAL_SECONDS
WARMUP_STEPS TRAIN_LOG_EVERY VAL_LOSS_EVERY VAL_TOKENS_LIMIT TRAINING_TIMING_BREAKDOWN
CHECKPOINT_EVERY_SECONDS RESUME EVAL_ONLY NUM_LAYERS MODEL_DIM NUM_HEADS NUM_KV_HEADS
MLP_MULT LEAKY_SLOPE NUM_LOOPS PARALLEL_START_LAYER MATRIX_LR SCALAR_LR TIED_EMBED_LR MUON_MOMENTUM
WARMDOWN_FRAC EMA_DECAY FUSED_MLP ARTIFACT_BYTES_MAX CODE_BYTES MATRIX_BITS EMBED_BITS
EVAL_STRIDE TTT_ENABLED TTT_LR TTT_EPOCHS TTT_CHUNK_TOKENS
""".split()


def settings_table() -> str:
    """Markdown rows of the main settings: name, default, meaning."""
    fields = {field.name.upper(): field for field in dataclasses.fields(train_gpt.Config)}
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name in MAIN:
        default = fields[name].default
        shown = int(default) if isinstance(default, bool) else default
        rows.append(
            f"| `{name}` | {shown if shown != '' else '(empty)'} | {fields[name].metadata['meaning']} |"
        )
    return "\n".join(rows)


def with_table(readme: str) -> str:
    """The README with its table brought up to date."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{settings_table()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Rewrite README.md."""
    path = Path(__file__).resolve().parents[1] / "README.md"
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
