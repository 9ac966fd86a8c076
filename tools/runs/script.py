"""Every name of train_gpt.py that the tools use. Importing this loads torch."""

from train_gpt import (
    BOS_ID,
    GPT,
    ArtifactError,
    Config,
    ConfigError,
    DataError,
    find_path,
    load_artifact,
    open_shards,
    read_tokens,
    shipped_code,
)

__all__ = [
    "BOS_ID",
    "GPT",
    "ArtifactError",
    "Config",
    "ConfigError",
    "DataError",
    "find_path",
    "load_artifact",
    "open_shards",
    "read_tokens",
    "shipped_code",
]
