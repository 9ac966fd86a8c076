"""Settings so small that a proof can score a stream thousands of times, or do a whole run.

Either all of them are given here, or any settings are shrunk: in width, rows and tokens alone.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

from tools.prove.cell import in_cell

MODEL = {
    "DEVICE": "cpu",
    "COMPUTE_DTYPE": "float32",
    "COMPILE": "0",
    "MAX_EVAL_SECONDS": "0",
    "NUM_LAYERS": "2",
    "NUM_HEADS": "2",
    "NUM_KV_HEADS": "1",
    "MLP_MULT": "2",
    "XSA_LAST_N": "1",
    "ROPE_DIMS": "0",
    "NUM_LOOPS": "0",
    "PARALLEL_START_LAYER": "-1",
    "TTT_EPOCHS": "2",  # so that rows are learned from again
    "TTT_BATCH_SEQS": "2",
}

# For probes of a scorer: 12 tokens, so that all of them can be tried at a target; several windows, chunks and
# documents in a stream of 150 tokens; a learning rate at which test-time training moves every loss.
SCORER = {
    **MODEL,
    "VOCAB_SIZE": "12",
    "MODEL_DIM": "16",
    "TRAIN_SEQ_LEN": "16",
    "EVAL_SEQ_LEN": "0",
    "ROPE_TRAIN_SEQ_LEN": "8",  # so that rotary bases are stretched
    "TRAIN_BATCH_TOKENS": "64",
    "MICRO_BATCH_TOKENS": "64",
    "VAL_BATCH_SIZE": "1024",
    "EVAL_STRIDE": "8",
    "TTT_CHUNK_TOKENS": "32",
    "TTT_LR": "0.3",
}


def scorer(script: ModuleType) -> dict[str, str]:
    """SCORER with test-time training by SGD, which older scripts have no name for: they know no other way."""
    if hasattr(script.Config, "ttt_mode"):
        return {**SCORER, "TTT_MODE": "sgd"}
    return dict(SCORER)


# Of a scorer with adapters: documents of one chunk and of several, longer and shorter than the context, in
# batches of several; a learning rate at which adapters move the losses.
LORA = {
    "TTT_MODE": "lora",
    "EVAL_STRIDE": "0",
    "TTT_LORA_RANK": "2",
    "TTT_LORA_ALPHA": "2",
    "TTT_LORA_LR": "0.01",
    "TTT_CHUNK_SIZE": "8",
    "TTT_BATCH_SIZE": "3",
}

# Features that the defaults have not, so that their branches are proved too.
OTHER = {
    **LORA,
    "BIGRAM_VOCAB_SIZE": "16",
    "BIGRAM_DIM": "16",  # the model's width: no projection
    "VE_ENABLED": "1",
    "VE_DIM": "8",  # that of all key heads
    "VE_LAYERS": "1",
    "CHANNEL_SMEAR_ENABLED": "1",
    "SPARSE_ATTN_GATE_ENABLED": "0",
    "PARALLEL_MODE": "gptj",
    "PARALLEL_START_LAYER": "1",
    "LOGIT_SOFTCAP": "0",
    "ROPE_TRAIN_SEQ_LEN": "0",
    "VAL_PREFETCH": "0",
    "TTT_BATCH_SIZE": "0",
    "TTT_LORA_TARGETS": "q",
}
# Of a configuration without them: two residual lanes, and a layer that runs twice.
LANES = {
    **LORA,
    "PARALLEL_MODE": "lanes",
    "PARALLEL_START_LAYER": "1",
    "NUM_LOOPS": "1",
    "LOOP_START": "0",
    "LOOP_END": "0",
}
HEAD_ALONE = {**LORA, "TTT_LORA_TARGETS": "head"}
# And a whole run: tables that are projected, no skips, weights in plain steps.
OTHER_RUN = {
    **{name: value for name, value in OTHER.items() if name not in LORA},
    "NUM_LAYERS": "1",
    "VE_LAYERS": "0",
    "BIGRAM_DIM": "4",
    "VE_DIM": "4",
    "PARALLEL_START_LAYER": "0",
    "MUON_MOMENTUM_WARMUP_FRAC": "0",
    "TRELLIS": "0",
    "COLUMN_STEPS": "0",
    "TTT_MODE": "sgd",
}
# Of that run: with rehearsal, timing and a trace.
OTHER_WAY = {"WARMUP_STEPS": "1", "TRAINING_TIMING_BREAKDOWN": "1", "TRACE_STEPS": "1:2"}

FEW = "4"  # ids: quick sums in a long text

# For a whole run: a few steps, with validation on the way.
RUN = {
    "ITERATIONS": "3",
    "MAX_WALLCLOCK_SECONDS": "0",
    "WARMUP_STEPS": "0",
    "GPTQ_CALIBRATION_BATCHES": "2",
    "VAL_LOSS_EVERY": "1",
    "TRAIN_PREFETCH": "0",
}
NOT_EXERCISED = "the arithmetic of another device, the compiler, bfloat16 and kernels for GPUs"

# Where nothing of a user's run is to be read or written, whatever the settings say.
PRIVATE = (
    "DATA_PATH",
    "TOKENIZER_PATH",
    "RUN_ID",
    "RUNS_DIR",
    "RESUME",
    "EVAL_ONLY",
    "VAL_TOKENS_LIMIT",
    "TRACE_STEPS",
    "PROFILE_STEPS",
)


class Size(NamedTuple):
    """What settings are shrunk to."""

    vocabulary: int
    context: int  # tokens
    rows: int  # of a batch
    head_dim: int


WIDTH_MIN = 16  # of a model: gates read 12 of its channels
FOR_SCORER = Size(vocabulary=12, context=16, rows=4, head_dim=4)
FOR_RUN = Size(vocabulary=320, context=32, rows=4, head_dim=8)


def shrink(config: Any, size: Size) -> tuple[dict[str, str], list[str]]:
    """The settings of a config, smaller in width, rows and tokens alone, and what was changed, in words.

    Switches, numbers of layers, heads and visits, rates and epochs stay. So does the order
    stride <= context <= chunk, and which of them are equal or off.
    """
    before = config.as_env()
    values = dict(before)
    values.update(_smaller_widths(config, size))
    values.update(_smaller_lengths(config, size))
    values.update(_smaller_batches(config, size))
    values.update({"DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "COMPILE": "0", "MAX_EVAL_SECONDS": "0"})
    for name in PRIVATE:
        values.pop(name, None)
    values = {name: value for name, value in values.items() if name in before}
    changed = [f"{name} {before[name]} -> {value}" for name, value in values.items() if value != before[name]]
    return values, changed


@in_cell
def left_alone(script: ModuleType, config: Any) -> set[str]:
    """Names of the fields of a config that every proof of it leaves as a run has them."""
    whole = config.as_env()
    changed = {"SEED", *PRIVATE, *RUN}
    for size in (FOR_SCORER, FOR_RUN):
        settings, _ = shrink(config, size)
        changed |= {
            name for name, value in script.Config.from_env(settings).as_env().items() if value != whole[name]
        }
    return {name.lower() for name in whole.keys() - changed}


def known(config: Any, settings: dict[str, str]) -> dict[str, str]:
    """Those of some settings that a script has; older ones have fewer."""
    return {name: value for name, value in settings.items() if name in config.as_env()}


def switched_off(config: Any) -> list[str]:
    """Settings that are zero: features that are off, so that nothing is proved about them."""
    return [name for name, value in config.as_env().items() if value in ("0", "0.0") and name != "SEED"]


def _smaller_widths(config: Any, size: Size) -> dict[str, str]:
    """Channels and vocabulary: heads stay as many, each narrower, rotated in part if it was."""
    narrowest = 4 * math.ceil(WIDTH_MIN / config.num_heads / 4)  # channels of a head, so that halves are even
    head_dim = min(config.head_dim, max(size.head_dim, narrowest))
    width = head_dim * config.num_heads
    rotated = 0
    if 0 < config.rope_dims < config.head_dim:
        rotated = head_dim // 2
    # Tables that are off stay off; a width that needs no projection, as it is the model's, stays so.
    widths = {}
    for name in ("bigram_dim", "ve_dim"):
        if hasattr(config, name):
            widths[name.upper()] = str(min(getattr(config, name), head_dim))
    if getattr(config, "bigram_vocab_size", 0):
        widths["BIGRAM_VOCAB_SIZE"] = str(min(config.bigram_vocab_size, 16))
    return {
        **widths,
        "MODEL_DIM": str(width),
        "ROPE_DIMS": str(rotated),
        "VOCAB_SIZE": str(size.vocabulary),
    }


def _smaller_lengths(config: Any, size: Size) -> dict[str, str]:
    """Context, stride and chunk, in their order."""
    train = min(config.train_seq_len, size.context)
    context = train
    if config.eval_seq_len > config.train_seq_len:
        context = 2 * train
    if 0 < config.eval_seq_len < config.train_seq_len:
        context = train // 2
    stride = context // 2
    if config.eval_stride == 0 or config.eval_stride == config.eval_length:
        stride = min(config.eval_stride, context)
    lengths = {"TRAIN_SEQ_LEN": str(train), "EVAL_STRIDE": str(stride), "TTT_CHUNK_TOKENS": str(2 * context)}
    if getattr(config, "ttt_mode", "sgd") == "lora":
        lengths["TTT_CHUNK_SIZE"] = str(context // 2)
    if config.eval_seq_len:
        lengths["EVAL_SEQ_LEN"] = str(context)
    if config.rope_train_seq_len:
        rope = train
        if config.rope_train_seq_len < config.train_seq_len:
            rope = train // 2
        if config.rope_train_seq_len >= config.eval_length:
            rope = context
        lengths["ROPE_TRAIN_SEQ_LEN"] = str(rope)
    return lengths


def _smaller_batches(config: Any, size: Size) -> dict[str, str]:
    """Rows of a batch: several of them, and several batches in a chunk."""
    train = min(config.train_seq_len, size.context)
    # Eight ranks share a scoring pass; in older scripts it is that of one.
    sharing = 8 if hasattr(config, "val_pass_tokens") else 1
    documents = {}
    if getattr(config, "ttt_mode", "sgd") == "lora":
        documents = {"TTT_BATCH_SIZE": str(min(config.ttt_batch_size or 3, 3))}
        documents["TTT_LORA_RANK"] = str(min(config.ttt_lora_rank, 2))
    return {
        **documents,
        "TRAIN_BATCH_TOKENS": str(2 * size.rows * train),
        "MICRO_BATCH_TOKENS": str(size.rows * train),
        "VAL_BATCH_SIZE": str(sharing * size.rows * train),
        "TTT_BATCH_SEQS": str(min(config.ttt_batch_seqs, 2)),
    }
