"""Every name of train_gpt.py that the tools use, and the names besides its settings. This loads torch."""

from train_gpt import (
    BOS_ID,
    GPT,
    ArtifactError,
    Config,
    ConfigError,
    DataError,
    find_path,
    learning_rate_scale,
    load_artifact,
    open_shards,
    read_config_file,
    read_manifest,
    read_tokens,
    shipped_code,
    similar_setting,
)

__all__ = [
    "BOS_ID",
    "GPT",
    "LAUNCHERS",
    "ArtifactError",
    "Config",
    "ConfigError",
    "DataError",
    "find_path",
    "learning_rate_scale",
    "load_artifact",
    "open_shards",
    "read_config_file",
    "read_manifest",
    "read_tokens",
    "shipped_code",
    "similar_setting",
]

# Variables of torchrun, torch and its libraries begin like this. A run may need them, and gets them.
LAUNCHERS = ("NCCL_", "OMP_", "TORCH_", "PYTHON", "CUDA_", "HF_")
