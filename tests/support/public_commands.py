"""The settings that public READMEs tell their readers to use: NAME=value pairs of each training command.

public_commands.json holds those of the READMEs in openai/parameter-golf at its `commit`, as
`tools.commands.readme_commands` reads them, and those of three open pull requests: names and values alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tools.commands import Command

COMMANDS_FILE = Path(__file__).with_name("public_commands.json")


@dataclass(frozen=True)
class PublicCommand(Command):
    """A command with its origin: the records folder it stands in and the pull request of that folder."""

    folder: str
    pull_request: int


def load_public_commands() -> list[PublicCommand]:
    """The stored commands: those of the records of the main tree, then those of open pull requests."""
    stored = json.loads(COMMANDS_FILE.read_text(encoding="utf-8"))
    return [PublicCommand(**entry) for entry in stored["commands"]]
