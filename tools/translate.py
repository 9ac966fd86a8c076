"""`translate 'COMMAND'`: a public training command in the settings of this script.

    python -m tools translate 'MATRIX_CLIP_SIGMAS=12.85 SEED=42 torchrun --nproc_per_node=8 train_gpt.py'

Prints the command. Comment lines before it tell which names have no effect here, and which are refused and
what to do about them. Exit status 0: the command runs the same; 1: something is refused.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tools import REPO
from tools.commands import shell_commands
from tools.runs.errors import RecordError
from tools.runs.reading import exact_text
from tools.runs.script import Config, ConfigError, find_path, read_settings, similar_setting

NAMES_FILE = REPO / "configs" / "public_names.json"
LAUNCHERS = ("NCCL_", "OMP_", "TORCH_", "PYTHON", "CUDA_", "HF_")  # their variables are passed on
# Settings of one run, not of a system: its files, its random numbers, its log.
OF_A_RUN = {"DATA_PATH", "TOKENIZER_PATH", "RUN_ID", "SEED", "TRAIN_LOG_EVERY", "VAL_LOSS_EVERY"}


@dataclass
class Translation:
    """A command in our settings. Notes and refusals are sentences, each with the variables it is about."""

    config: str = ""  # the value of CONFIG; empty: not given
    launcher: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="in quotes; without it, standard input")


def run(args: argparse.Namespace) -> int:
    try:
        text = args.command if args.command is not None else typed()
        commands = shell_commands(text) or shell_commands(f"{text.strip()} python train_gpt.py")
    except ValueError as error:
        raise RecordError(f"translate: {error}") from error
    if not commands:
        raise RecordError(f"translate: got {text!r}, expected a command like NAME=value … torchrun …")
    refused = False
    for command in commands:
        translation = translate(command.settings)
        print("\n".join(lines(translation, program(text))))
        refused = refused or bool(translation.refused)
    return 1 if refused else 0


def typed() -> str:
    """What comes on standard input. ValueError where that is no text."""
    stream = getattr(sys.stdin, "buffer", None)
    return exact_text(stream.read()) if stream is not None else sys.stdin.read()


def program(text: str) -> str:
    """How to start this script in the way of the command."""
    ranks = re.search(r"--nproc[_-]per[_-]node[= ](\S+)", text)
    if "torchrun" not in text and "torch.distributed" not in text:
        return "python train_gpt.py"
    return f"torchrun --standalone --nproc_per_node={ranks[1] if ranks else 8} train_gpt.py"


def lines(translation: Translation, start: str) -> list[str]:
    """Comment lines, then the command; with refusals it is a comment as well, so that no shell runs it."""
    found = []
    for kind, said in (("note", translation.notes), ("refused", translation.refused)):
        for answer, subjects in said.items():
            found.append(f"# {kind}: {' '.join(subjects)}: {answer}")
    given = {**translation.launcher, **translation.settings}
    if translation.config:
        given = {"CONFIG": translation.config, **given}
    words = " ".join([f"{name}={shlex.quote(value)}" for name, value in given.items()] + [start])
    if translation.refused:
        return [*found, "# without the refused settings:", f"# {words}"]
    return [*found, words]


# ======================================================================================================
# NAMES: each variable is a setting, stands for settings, has no effect, or is refused
# ======================================================================================================


def public_names() -> dict[str, dict[str, str]]:
    """The answer to each NAME, or NAME=VALUE, of configs/public_names.json."""
    known = Config().as_env()
    found = {}
    for row in json.loads(NAMES_FILE.read_text(encoding="utf-8"))["names"]:
        for name in row["names"].split():
            # A former name may be a setting of a fork.
            if name not in known or "of_ours" in row:
                found[name] = row
    return found


def published_commands() -> dict[str, dict[str, str]]:
    """The assignments of the published command of each ancestor, by its configuration."""
    return dict(json.loads(NAMES_FILE.read_text(encoding="utf-8"))["commands"])


def translate(given: dict[str, str], config: str = "") -> Translation:
    """The settings that `given` stands for. config: of which configuration they are, if that is known."""
    found = Translation(config=config or given.get("CONFIG", ""))
    rows = public_names()
    known = Config().as_env()
    resolved = {**known, **read_settings({**given, "CONFIG": found.config})}
    for name, value in sorted(given.items()):
        if name == "CONFIG":
            continue
        row = rows.get(f"{name}={value}") or rows.get(name)
        if name in known and (row is None or is_harmless(value, row, resolved)):
            found.settings[name] = value
        if row is not None:
            answer_by_row(found, f"{name}={value}", row, given, resolved)
        elif name.startswith(LAUNCHERS):
            found.launcher[name] = value
        elif name not in known:
            near = similar_setting(name)
            meant = f"; did you mean {near}?" if near else "; leave it out"
            found.refused.setdefault(f"no setting here{meant}", []).append(f"{name}={value}")
    if not found.config:
        choose_config(found, given)
    check(found)
    return found


def answer_by_row(
    found: Translation, subject: str, row: dict[str, str], given: dict[str, str], resolved: dict[str, str]
) -> None:
    """Add to `found` the answer to one variable, `subject` as NAME=VALUE."""
    value = subject.partition("=")[2]
    if is_harmless(value, row, resolved):
        found.notes.setdefault(row["answer"], []).append(subject)
        return
    if "means" not in row:
        found.refused.setdefault(row["answer"], []).append(subject)
        return
    answer = row["answer"]
    for pair in row["means"].split():
        setting, _, meaning = pair.partition("=")
        wanted = meaning.format(value.rstrip("/") or value, **resolved)
        # Our own name wins over another one, and of two others the first in the alphabet.
        winner = given.get(setting, found.settings.get(setting, wanted))
        found.settings[setting] = winner
        if winner != wanted:
            answer += f"; {setting}={winner} is given as well and wins"
    found.notes.setdefault(answer, []).append(subject)


def is_harmless(value: str, row: dict[str, str], resolved: dict[str, str]) -> bool:
    """Whether a value changes nothing here."""
    accepted = row["harmless"].split()
    return value == "" or "*" in accepted or any(same(value, resolved.get(word, word)) for word in accepted)


def same(given: str, wanted: str) -> bool:
    """Whether two texts are the same value: equal numbers where both are numbers, else equal letters."""
    try:
        return float(given) == float(wanted)
    except ValueError:
        return given.strip().lower() == wanted.lower()


# ======================================================================================================
# SYSTEMS: the configuration that a command is of
# ======================================================================================================


def choose_config(found: Translation, given: dict[str, str]) -> None:
    """Set CONFIG to the ancestor that the command is of, or to none where the script would ask for it."""
    nearest = nearest_command(given)
    if not nearest:
        return
    theirs = Config.from_env({"CONFIG": str(REPO / nearest)}).as_env()
    differs = {name for name, value in found.settings.items() if not same(value, theirs[name])}
    if differs <= OF_A_RUN:
        found.config = nearest
        kept = differs | OF_A_RUN
        found.settings = {name: value for name, value in found.settings.items() if name in kept}
        return
    found.config = "none"
    answer = f"most of this command is of {nearest}; CONFIG={nearest} instead of none is that model"
    found.notes[answer] = sorted(differs - OF_A_RUN)


def nearest_command(given: dict[str, str]) -> str:
    """The configuration whose published command shares five assignments at least and half of those given."""
    names = {*Config().as_env(), *public_names()}
    counted = {name: value for name, value in given.items() if name in names}
    # Any seed is one of the system.
    counted.pop("SEED", None)
    seeds = int("SEED" in given)
    shared = {
        config: seeds + len(counted.items() & command.items())
        for config, command in published_commands().items()
    }
    nearest = max(shared, key=lambda config: shared[config])
    return nearest if shared[nearest] >= max(5, (len(counted) + seeds) / 2) else ""


def check(found: Translation) -> None:
    """Refuse what `Config` refuses."""
    config = {} if found.config in ("", "none") else {"CONFIG": str(config_path(found.config))}
    try:
        Config.from_env({**config, **found.settings})
    except ConfigError as error:
        found.refused.setdefault(str(error), []).append("settings")


def config_path(config: str) -> Path:
    path = REPO / config
    return path if path.is_file() else find_path(config)
