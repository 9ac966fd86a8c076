"""The settings in which two groups differ, also where one is ours and the other a public log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

UNSET = "–"
# A public log prints these among its settings: names of files and of machines, and what follows from others.
NO_SETTINGS = {"LOGFILE", "MODEL_PARAMS", "RUN_ID", "ARTIFACT_DIR", "DATA_DIR", "DATE", "HOST", "HOSTNAME"}
NO_SETTINGS |= {"LOCAL_RANK", "RANK", "WORLD_SIZE", "GRAD_ACCUM_STEPS", "VAL_TOKENS", "TRAIN_SHARDS"}
NO_SETTINGS |= {"TRAIN_FILES", "VAL_FILES", "VAL_BYTES_FILES", "MODEL_PATH", "QUANTIZED_MODEL_PATH"}
FLAGS = {"True": "1", "False": "0"}
OFF = {0.0, "", "none", "[]"}  # a name that one side lacks changes nothing with such a value

# What the ancestors (PRs #549, #785, #591, #1493, #1532) and #1855 call settings of ours; {} is their value.
OUR_NAMES = {
    "VAL_BATCH_TOKENS": "VAL_BATCH_SIZE={}",
    "TTT_EVAL_SEQ_LEN": "EVAL_SEQ_LEN={}",
    "PARALLEL_RESIDUAL_START": "PARALLEL_START_LAYER={} PARALLEL_MODE=gptj",
    "MATRIX_CLIP_SIGMAS": "MLP_CLIP_SIGMAS={} ATTN_CLIP_SIGMAS={}",
    "SLIDING_WINDOW_ENABLED=0": "EVAL_STRIDE=0 TTT_ENABLED=0",
    "TTT_MASK=no_qv": "TTT_LORA_TARGETS=k,o,mlp,head",
    "MUON_WEIGHT_DECAY": "MUON_WD={}",
    "ADAM_WEIGHT_DECAY": "ADAM_WD={}",
    "SMEAR_GATE": "SMEAR_GATE_ENABLED={}",
    "USE_GPTQ": "GPTQ={}",
    "LEAKY_RELU_SQ_SLOPE": "LEAKY_SLOPE={}",
    "NEGATIVE_SLOPE": "LEAKY_SLOPE={}",
}
# Settings of theirs that do not exist here, with values that make their script do what ours always does: a
# constant, a choice that is made, or an option that has no effect, as nothing reads it. * is any value, the
# name of a setting its value.
ALWAYS_HERE = """
ADAM_EPS=1e-8 ROPE_BASE=10000 TIED_EMBED_INIT_STD=0.005 GATE_WINDOW=12 EMBEDDING_DIM=MODEL_DIM EMA_ENABLED=1
TIE_EMBEDDINGS=1 EMBED_LR=* HEAD_LR=*
CASEOPS_ENABLED=1 PARALLEL_FINAL_LANE=mean SPARSE_ATTN_GATE_SCALE=0.5 GATED_ATTN_QUANT_GATE=1
GATED_ATTN_INIT_STD=* ATTN_OUT_GATE_SRC=* MUON_BETA2=* MTP_LOSS_WEIGHT=* LAWA_K=* LAWA_FREQ=* SWA_ENABLED=*
SWA_EVERY=* LATE_QAT=* LATE_QAT_THRESHOLD=* QAT_ENABLED=* QAT_THRESHOLD=* COMPRESSOR=* FUSED_CE_ENABLED=*
VAL_COPY_STREAM=* VAL_PREFETCH_QUEUE=* VAL_BYTECOUNT_DEVICE=* VAL_DOC_FRACTION=1 SLIDING_WINDOW_ENABLED=1
TTT_MOMENTUM=0.9 TTT_GRAD_CLIP=1 TTT_WEIGHT_DECAY=0.5 TTT_BETA1=0 TTT_BETA2=0.99 TTT_OPTIMIZER=adam
TTT_GRAD_STEPS=1 TTT_LOCAL_LR_MULT=1 TTT_Q_LORA=1 TTT_K_LORA=1 TTT_V_LORA=1 TTT_O_LORA=1 TTT_MLP_LORA=1
TTT_FREEZE_BLOCKS=0 ETLB_LR=* ETLB_STEPS=* ETLB_CLIP=*
"""


def changed_settings(
    base: Mapping[str, str], new: Mapping[str, str], defaults: Mapping[str, str] | None = None
) -> list[tuple[str, str, str]]:
    """(name, base value, new value) of the settings that differ.

    Equal numbers are equal, and paths that end alike. defaults: our settings. Where one side has them and the
    other is of a public script, its names become ours. A name that one side lacks differs if its value is
    neither off nor, of ours, the default.
    """
    base = plain_values(base)
    new = plain_values(new)
    absent: Mapping[str, str] = {}
    if defaults is not None and has_our_settings(base, defaults) != has_our_settings(new, defaults):
        absent = defaults
        if has_our_settings(base, defaults):
            new = in_our_names(new, defaults)
        else:
            base = in_our_names(base, defaults)
    changed = []
    for name in sorted({*base, *new}):
        in_base = _canonical(base.get(name, absent.get(name, "")))
        in_new = _canonical(new.get(name, absent.get(name, "")))
        if in_base != in_new and {in_base, in_new} - OFF:
            changed.append((name, base.get(name, UNSET), new.get(name, UNSET)))
    return changed


def has_our_settings(settings: Mapping[str, str], defaults: Mapping[str, str]) -> bool:
    """Whether these are the settings of this script, of this version or one near it: most names are."""
    return len(settings.keys() & defaults.keys()) > 0.8 * len(defaults)


def plain_values(settings: Mapping[str, str]) -> dict[str, str]:
    """Without names that are not settings, truth values as 0 and 1, of a path its last part."""
    plain = {}
    for name, value in settings.items():
        if name in NO_SETTINGS:
            continue
        value = FLAGS.get(value, value)
        plain[name] = PurePosixPath(value).name if "/" in value else value
    return plain


def in_our_names(theirs: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """The settings of a public script in our names. What is always so here is left out.

    A name of our own wins over one that stands for it. A name without a meaning here stays. defaults: all
    settings of ours, for those that `theirs` lacks.
    """
    always = dict(pair.split("=") for pair in ALWAYS_HERE.split())
    ours = {name: value for name, value in theirs.items() if name in defaults}
    values = {**defaults, **ours}
    for name, value in theirs.items():
        meaning = OUR_NAMES.get(f"{name}={value}") or OUR_NAMES.get(name)
        if name in defaults:
            continue
        if meaning is not None:
            for pair in meaning.split():
                setting, _, text = pair.partition("=")
                ours.setdefault(setting, text.format(value))
            continue
        accepted = always.get(name)
        if accepted in values:
            accepted = values[accepted]
        if accepted is None or (accepted != "*" and _canonical(value) != _canonical(accepted)):
            ours[name] = value
    return ours


def _canonical(value: str) -> object:
    try:
        return float(value)
    except ValueError:
        return value
