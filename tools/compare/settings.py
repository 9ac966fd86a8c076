"""The settings in which two groups differ, also where one is ours and the other a public log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from tools.translate import is_harmless, public_names

UNSET = "–"
# A public log prints these among its settings: names of files and of machines, and what follows from others.
NO_SETTINGS = {"LOGFILE", "MODEL_PARAMS", "RUN_ID", "ARTIFACT_DIR", "DATA_DIR", "DATE", "HOST", "HOSTNAME"}
NO_SETTINGS |= {"LOCAL_RANK", "RANK", "WORLD_SIZE", "GRAD_ACCUM_STEPS", "VAL_TOKENS", "TRAIN_SHARDS"}
NO_SETTINGS |= {"TRAIN_FILES", "VAL_FILES", "VAL_BYTES_FILES", "MODEL_PATH", "QUANTIZED_MODEL_PATH"}
FLAGS = {"True": "1", "False": "0"}
OFF = {0.0, "", "none", "[]"}  # a name that one side lacks changes nothing with such a value


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
            new = in_our_names(new, base, defaults)
        else:
            base = in_our_names(base, new, defaults)
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
    """Without names that are no settings, truth values as 0 and 1, of a path its last part."""
    plain = {}
    for name, value in settings.items():
        if name in NO_SETTINGS:
            continue
        value = FLAGS.get(value, value)
        plain[name] = PurePosixPath(value).name if "/" in value else value
    return plain


def in_our_names(
    theirs: Mapping[str, str], other: Mapping[str, str], defaults: Mapping[str, str]
) -> dict[str, str]:
    """The settings of a public script in our names; a name of our own wins over one that stands for it."""
    rows = public_names()
    ours = {name: value for name, value in theirs.items() if name in defaults}
    resolved = {**defaults, **other}
    for name, value in theirs.items():
        row = rows.get(f"{name}={value}") or rows.get(name)
        if name in defaults:
            continue
        if row is not None and "means" in row:
            for pair in row["means"].split():
                setting, _, meaning = pair.partition("=")
                ours.setdefault(setting, meaning.format(value, **resolved))
        elif row is None or not is_harmless(value, row, resolved):
            ours[name] = value
    return ours


def _canonical(value: str) -> object:
    try:
        return float(value)
    except ValueError:
        return value
