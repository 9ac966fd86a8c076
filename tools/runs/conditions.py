"""Where a finished run ran and what it read, from its summary: runs that differ in it are hard to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.runs.derive import mapping
from tools.runs.folder import required_object
from tools.runs.runs import SUMMARY

HARDWARE = ("device", "dtype", "threads", "world_size", "gpus")  # of a summary
DATA = ("shards", "tokenizer")  # of its hashes: names and sizes of the shards, and a file


def conditions_of(summary: Mapping[str, Any]) -> dict[str, str]:
    """The hardware of a run, and the version that rounds; what the summary does not say is left out."""
    hardware = mapping(summary, "hardware")
    found = {name: str(hardware[name]) for name in HARDWARE if name in hardware}
    torch = mapping(summary, "versions").get("torch")
    return {**found, "torch": str(torch)} if torch else found


def data_of(summary: Mapping[str, Any]) -> dict[str, str]:
    """The hashes of what a run read."""
    hashes = mapping(summary, "data", "hashes")
    return {name: str(hashes[name]) for name in DATA if name in hashes}


def unlike_conditions(directories: Sequence[Path]) -> str:
    """In what the conditions of finished runs differ, in words; empty where they are the same."""
    found = [conditions_of(required_object(directory / SUMMARY)) for directory in directories]
    for name in (*HARDWARE, "torch"):
        values = {conditions[name] for conditions in found if name in conditions}
        if len(values) > 1:
            return f"{name} {' and '.join(sorted(values))}"
    return ""


def unlike_data(directories: Sequence[Path]) -> str:
    """What finished runs read that was not the same; empty where it was."""
    found = [data_of(required_object(directory / SUMMARY)) for directory in directories]
    names = [name for name in DATA if len({read[name] for read in found if name in read}) > 1]
    return " and ".join(names)
