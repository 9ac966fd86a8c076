"""Settings so small that a run takes a tenth of a second: some written here, and any others shrunk.

Shrinking changes widths, rows and tokens. Switches, numbers of layers, heads and visits, rates and epochs
stay as they are, and so does the order stride <= context <= chunk. Settings that only the script under audit
has keep their values everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tools.audit.worlds import PIECES

ON_CPU = {"DEVICE": "cpu", "COMPUTE_DTYPE": "float32", "COMPILE": "0"}
# A context of 16 tokens: several windows, chunks and documents in a text of 150 tokens. Rates at which
# test-time training moves every loss.
TINY = {
    **ON_CPU, "MAX_EVAL_SECONDS": "0", "VOCAB_SIZE": str(PIECES), "NUM_LAYERS": "2", "MODEL_DIM": "16",
    "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "MLP_MULT": "2", "XSA_LAST_N": "1", "ROPE_DIMS": "0",
    "NUM_LOOPS": "0", "PARALLEL_START_LAYER": "-1", "TRAIN_SEQ_LEN": "16", "EVAL_SEQ_LEN": "0",
    "ROPE_TRAIN_SEQ_LEN": "8", "TRAIN_BATCH_TOKENS": "64", "MICRO_BATCH_TOKENS": "64",
    "VAL_BATCH_SIZE": "1024", "EVAL_STRIDE": "8", "TTT_CHUNK_TOKENS": "32", "TTT_LR": "0.3",
    "TTT_EPOCHS": "2", "TTT_BATCH_SEQS": "2",
}
# All weights learn from the text, or adapters learn from a document: of one chunk and of several, longer and
# shorter than the context, in batches of several.
SGD = {**TINY, "TTT_MODE": "sgd"}
LORA = {
    "TTT_MODE": "lora", "EVAL_STRIDE": "0", "TTT_LORA_RANK": "2", "TTT_LORA_ALPHA": "2",
    "TTT_LORA_LR": "0.01", "TTT_CHUNK_SIZE": "8", "TTT_BATCH_SIZE": "3",
}
DOCUMENTS = {**TINY, **LORA}
# Features that the defaults have not.
TABLES = {
    **DOCUMENTS, "BIGRAM_VOCAB_SIZE": "16", "BIGRAM_DIM": "16", "VE_ENABLED": "1", "VE_DIM": "8",
    "VE_LAYERS": "1", "CHANNEL_SMEAR_ENABLED": "1", "SPARSE_ATTN_GATE_ENABLED": "0", "PARALLEL_MODE": "gptj",
    "PARALLEL_START_LAYER": "1", "LOGIT_SOFTCAP": "0", "ROPE_TRAIN_SEQ_LEN": "0", "VAL_PREFETCH": "0",
    "TTT_BATCH_SIZE": "0", "TTT_LORA_TARGETS": "q",
}
PROJECTED_TABLES = {
    **SGD, "NUM_LAYERS": "1", "BIGRAM_VOCAB_SIZE": "16", "BIGRAM_DIM": "4", "VE_ENABLED": "1", "VE_DIM": "4",
    "VE_LAYERS": "0", "TIE_EMBEDDINGS": "0", "DOC_MASK": "0", "MUON_MOMENTUM_WARMUP_FRAC": "0",
    "TRELLIS": "0", "COLUMN_STEPS": "0",
    # At 0.3, SGD on a tied head makes 8e-4 nats of the rounding between one rank and two; at 0.1 it is 2e-6.
    "TTT_LR": "0.1",
}
LANES = {
    **DOCUMENTS, "PARALLEL_MODE": "lanes", "PARALLEL_START_LAYER": "1", "NUM_LOOPS": "1", "LOOP_START": "0",
    "LOOP_END": "0", "TTT_LORA_TARGETS": "head",
}
# A run: a few steps at rates that move every weight far from its start, with validation on the way.
RUN = {
    "MAX_WALLCLOCK_SECONDS": "0", "WARMUP_STEPS": "0", "GPTQ_CALIBRATION_BATCHES": "2", "TRAIN_PREFETCH": "0",
    "ITERATIONS": "24", "VAL_LOSS_EVERY": "8", "WARMDOWN_ITERS": "4", "MATRIX_LR": "0.2", "EMBED_LR": "0.5",
    "TIED_EMBED_LR": "0.3", "HEAD_LR": "0.3", "SCALAR_LR": "0.3",
}
FEWER_STEPS = {"ITERATIONS": "12", "VAL_LOSS_EVERY": "6"}  # of a model with many layers
NO_LEARNING = {"TTT_ENABLED": "0", "EVAL_STRIDE": "0"}  # the round trip is the only score
# Where nothing of a user's run is read or written, whatever the settings say.
PRIVATE = ("DATA_PATH", "TOKENIZER_PATH", "RUN_ID", "RUNS_DIR", "RESUME", "EVAL_ONLY", "VAL_TOKENS_LIMIT",
           "TRACE_STEPS", "PROFILE_STEPS", "CPU_THREADS", "SAVE_FLOAT")

# The settings of our own script. One that is not here is a technique of the script under audit.
OURS = frozenset("""
TRAIN_SEQ_LEN DOC_MASK VOCAB_SIZE NUM_LAYERS MODEL_DIM NUM_HEADS NUM_KV_HEADS MLP_MULT LEAKY_SLOPE ROPE_DIMS
ROPE_TRAIN_SEQ_LEN LN_SCALE QK_GAIN_INIT XSA_LAST_N SPARSE_ATTN_GATE_ENABLED SMEAR_GATE_ENABLED
CHANNEL_SMEAR_ENABLED SKIP_GATES_ENABLED NUM_LOOPS LOOP_START LOOP_END ENABLE_LOOPING_AT PARALLEL_START_LAYER
PARALLEL_MODE BIGRAM_VOCAB_SIZE BIGRAM_DIM VE_ENABLED VE_DIM VE_LAYERS MATRIX_INIT LOGIT_SOFTCAP SEED
TRAIN_BATCH_TOKENS SHUFFLE ITERATIONS MAX_WALLCLOCK_SECONDS MATRIX_LR SCALAR_LR TIED_EMBED_LR MUON_MOMENTUM
MUON_MOMENTUM_WARMUP_START MUON_MOMENTUM_WARMUP_FRAC MUON_MOMENTUM_WARMUP_STEPS MUON_BACKEND_STEPS
MUON_POLAR_EXPRESS MUON_ROW_NORMALIZE MUON_WD EMBED_WD ADAM_WD BETA1 BETA2 GRAD_CLIP_NORM EMA_DECAY
WARMDOWN_FRAC WARMDOWN_ITERS MIN_LR ARTIFACT_BYTES_MAX RATE_CONTROL MATRIX_BITS EMBED_BITS MLP_CLIP_SIGMAS
ATTN_CLIP_SIGMAS EMBED_CLIP_SIGMAS TRELLIS COLUMN_STEPS GPTQ GPTQ_DAMPING GPTQ_CALIBRATION_BATCHES
GPTQ_RESERVE_SECONDS EVAL_SEQ_LEN EVAL_STRIDE TTT_ENABLED TTT_MODE TTT_LR TTT_EPOCHS TTT_CHUNK_TOKENS
TTT_BATCH_SEQS TTT_LORA_TARGETS TTT_LORA_RANK TTT_LORA_ALPHA TTT_LORA_LR TTT_CHUNK_SIZE TTT_BATCH_SIZE
DATA_PATH TOKENIZER_PATH MICRO_BATCH_TOKENS TRAIN_PREFETCH TRAIN_PREFETCH_QUEUE TRAIN_COPY_STREAM
VAL_PREFETCH VAL_TOKENS_LIMIT RUN_ID RUNS_DIR MAX_EVAL_SECONDS WARMUP_STEPS TRAIN_LOG_EVERY VAL_LOSS_EVERY
VAL_BATCH_SIZE VAL_PROGRESS_LOG_EVERY TRAINING_TIMING_BREAKDOWN TRAINING_TIMING_EVERY TRACE_STEPS
PROFILE_STEPS DEVICE CPU_THREADS COMPILE COMPUTE_DTYPE ATTENTION FUSED_MLP FUSED_HEADS
CHECKPOINT_EVERY_SECONDS RESUME RESUME_OTHER_CODE SAVE_FLOAT EVAL_ONLY FOREIGN_NAMES
""".split())

CONTEXT = 16  # tokens
ROWS = 4  # of a batch
NARROWEST = 16  # channels of a model: gates read 12 of them


def of_its_own(whole: Mapping[str, str]) -> dict[str, str]:
    """The settings that our script does not have, as they are audited."""
    return {name: value for name, value in whole.items() if name not in OURS}


def shrunk(whole: Mapping[str, str]) -> dict[str, str]:
    """Any settings, so small that a run is quick."""
    small = {**whole, **ON_CPU, "MAX_EVAL_SECONDS": "0", "VOCAB_SIZE": TINY["VOCAB_SIZE"]}
    small |= _widths(whole) | _lengths(whole) | _batches(whole)
    return {name: value for name, value in small.items() if name in whole and name not in PRIVATE}


def _widths(whole: Mapping[str, str]) -> dict[str, str]:
    """Heads stay as many, each narrower, and rotated in part if it was. Tables that are off stay off."""
    heads = int(whole["NUM_HEADS"])
    head_dim = int(whole["MODEL_DIM"]) // heads
    narrow = min(head_dim, 4 * math.ceil(NARROWEST / heads / 4))  # even halves
    small = {"MODEL_DIM": str(narrow * heads), "ROPE_DIMS": "0"}
    if 0 < int(whole["ROPE_DIMS"]) < head_dim:
        small["ROPE_DIMS"] = str(narrow // 2)
    for name in ("BIGRAM_DIM", "VE_DIM"):
        small[name] = str(min(int(whole.get(name, 0)), narrow))
    small["BIGRAM_VOCAB_SIZE"] = str(min(int(whole.get("BIGRAM_VOCAB_SIZE", 0)), 16))
    return small


def _lengths(whole: Mapping[str, str]) -> dict[str, str]:
    """Context, stride and chunk, in their order."""
    train, evaluated, stride, rope = (
        int(whole[name]) for name in ("TRAIN_SEQ_LEN", "EVAL_SEQ_LEN", "EVAL_STRIDE", "ROPE_TRAIN_SEQ_LEN"))
    short = min(train, CONTEXT)
    context = short
    if evaluated > train:
        context = 2 * short
    elif 0 < evaluated < train:
        context = short // 2
    small = {
        "TRAIN_SEQ_LEN": str(short), "EVAL_SEQ_LEN": str(context if evaluated else 0),
        "EVAL_STRIDE": str(context // 2), "TTT_CHUNK_TOKENS": str(2 * context),
        "TTT_CHUNK_SIZE": str(context // 2), "ROPE_TRAIN_SEQ_LEN": "0",
    }
    if stride in (0, evaluated or train):
        small["EVAL_STRIDE"] = str(min(stride, context))
    if rope >= (evaluated or train):
        small["ROPE_TRAIN_SEQ_LEN"] = str(context)
    elif rope:
        small["ROPE_TRAIN_SEQ_LEN"] = str(short // 2 if rope < train else short)
    return small


def _batches(whole: Mapping[str, str]) -> dict[str, str]:
    """Rows of a batch: several of them, and several batches in a chunk. Eight ranks share a scoring pass."""
    tokens = ROWS * min(int(whole["TRAIN_SEQ_LEN"]), CONTEXT)
    return {
        "TRAIN_BATCH_TOKENS": str(2 * tokens), "MICRO_BATCH_TOKENS": str(tokens),
        "VAL_BATCH_SIZE": str(8 * tokens), "TTT_BATCH_SEQS": str(min(int(whole["TTT_BATCH_SEQS"]), 2)),
        "TTT_BATCH_SIZE": str(min(int(whole.get("TTT_BATCH_SIZE", 0)) or 3, 3)),
        "TTT_LORA_RANK": str(min(int(whole.get("TTT_LORA_RANK", 2)), 2)),
    }
