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
    read_manifest,
    read_settings,
    read_tokens,
    shipped_code,
    similar_setting,
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
    "read_manifest",
    "read_settings",
    "read_tokens",
    "shipped_code",
    "similar_setting",
]
