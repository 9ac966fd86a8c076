"""The public systems that this one descends from: facts about their scripts, names and values alone.

ancestors.json holds, of openai/parameter-golf at its `commit`, the variables that each script reads, with
their defaults (null: a list of names), and those that the command in its README sets.
"""

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("ancestors.json")


@dataclass(frozen=True)
class Ancestor:
    """One public script, and the file of configs/ that is its system here."""

    config: str
    folder: str  # of its record in the challenge's repository
    defaults: dict[str, str | None]
    command: dict[str, str]


def load_ancestors() -> dict[str, Ancestor]:
    """Each ancestor by its pull request, or as `baseline`."""
    systems = json.loads(FILE.read_text(encoding="utf-8"))["systems"]
    return {name: Ancestor(**facts) for name, facts in systems.items()}
