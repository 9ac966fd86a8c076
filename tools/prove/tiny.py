"""Settings of a model so small that a proof can score its stream thousands of times, or do a whole run."""

MODEL = {
    "DEVICE": "cpu",
    "COMPUTE_DTYPE": "float32",
    "COMPILE": "0",
    "NUM_LAYERS": "2",
    "NUM_HEADS": "2",
    "NUM_KV_HEADS": "1",
    "MLP_MULT": "2",
    "XSA_LAST_N": "2",
    "ROPE_DIMS": "0",
    "NUM_LOOPS": "0",
    "PARALLEL_START_LAYER": "-1",
    "TTT_EPOCHS": "1",
    "TTT_BATCH_SEQS": "2",
}

# For probes of a scorer: 12 tokens, so that all of them can be tried at a target; several windows, chunks and
# documents in a stream of 150 tokens; a learning rate at which test-time training moves every loss.
SCORER = {
    **MODEL,
    "VOCAB_SIZE": "12",
    "MODEL_DIM": "16",
    "GATE_WINDOW": "4",
    "TRAIN_SEQ_LEN": "16",
    "TRAIN_BATCH_TOKENS": "64",
    "MICRO_BATCH_TOKENS": "64",
    "VAL_BATCH_SIZE": "1024",
    "EVAL_STRIDE": "8",
    "TTT_CHUNK_TOKENS": "32",
    "TTT_LR": "0.3",
}

# For a whole run: three steps, with a tokenizer that covers every byte and an artifact that fills its budget.
RUN = {
    **MODEL,
    "VOCAB_SIZE": "320",
    "MODEL_DIM": "32",
    "TRAIN_SEQ_LEN": "32",
    "TRAIN_BATCH_TOKENS": "256",
    "MICRO_BATCH_TOKENS": "128",
    "VAL_BATCH_SIZE": "2048",
    "EVAL_STRIDE": "16",
    "TTT_CHUNK_TOKENS": "128",
    "ITERATIONS": "3",
    "MAX_WALLCLOCK_SECONDS": "0",
    "EMA_DECAY": "0.5",
    "GPTQ_CALIBRATION_BATCHES": "2",
    "ARTIFACT_BYTES_MAX": "150000",
}
