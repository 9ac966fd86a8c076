"""The settings that public READMEs tell their readers to use: NAME=value pairs of each training command.

    git clone --mirror https://github.com/openai/parameter-golf parameter-golf.git
    git -C parameter-golf.git fetch origin refs/pull/591/head refs/pull/785/head refs/pull/1532/head
    python -m tests.support.public_commands parameter-golf.git      # writes public_commands.json beside this

What this writes holds names and values alone: which variables a command sets, and where it stands.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from tools.commands import Command, readme_commands, shell_commands

COMMANDS_FILE = Path(__file__).with_name("public_commands.json")
PUBLIC_COMMIT = "4908dc46f21ed3fdd08d2fdca285deb2194b9599"


@dataclass(frozen=True)
class PublicCommand(Command):
    """A command with its origin: the records folder it stands in and the pull request of that folder."""

    folder: str
    pull_request: int


# Heads of pull requests that were never merged: commit, number, file that holds the command.
PULL_REQUEST_FILES = (
    ("4ce0096be", 591, "records/track_non_record_16mb/2026-03-24-AsyncTrainingValidation/meta.json"),
    (
        "d3fc20b82",
        785,
        "records/track_non_record_16mb/2026-03-26_LeakyReLU_LegalTTT_ParallelMuon_PinnedPrefetch_FusionFriendlyMLP"
        "/README.md",
    ),
    (
        "69ae0e754",
        1532,
        "records/track_10min_16mb/2026-04-10_async_loader_SP8192_3LayerRecur_ParResid_QK525_LegalTTT/README.md",
    ),
)


def load_public_commands() -> list[PublicCommand]:
    """The stored commands: those of the records of the main tree, then those of open pull requests."""
    stored = json.loads(COMMANDS_FILE.read_text(encoding="utf-8"))
    return [PublicCommand(**entry) for entry in stored["commands"]]


def git(clone: Path, *arguments: str) -> str:
    """What a git command prints about this clone."""
    command = ["git", "-c", "core.quotePath=false", f"--git-dir={clone}", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout


def pull_request_of(clone: Path, path: str) -> int:
    """The number of the pull request that added this file; 0 for what the repository was opened with."""
    arguments = ["--first-parent", "-m", "--diff-filter=A", "--format=%s", PUBLIC_COMMIT, "--", path]
    oldest_subject = git(clone, "log", *arguments).strip().split("\n")[-1]
    match = re.search(r"#(\d+)", oldest_subject)
    return int(match.group(1)) if match else 0


def collect(clone: Path) -> list[PublicCommand]:
    """The training commands of all READMEs under records/, and of the files of PULL_REQUEST_FILES."""
    found = []
    files = git(clone, "ls-tree", "-r", "--name-only", PUBLIC_COMMIT, "records/").strip().split("\n")
    for path in files:
        if PurePosixPath(path).name.lower() != "readme.md":
            continue
        folder = str(PurePosixPath(path).parent)
        for command in readme_commands(git(clone, "show", f"{PUBLIC_COMMIT}:{path}")):
            number = pull_request_of(clone, path)
            found.append(PublicCommand(**asdict(command), folder=folder, pull_request=number))
    for commit, number, path in PULL_REQUEST_FILES:
        text = git(clone, "show", f"{commit}:{path}")
        if path.endswith(".json"):
            commands = shell_commands(json.loads(text)["command_bash"])
        else:
            commands = readme_commands(text)
        folder = str(PurePosixPath(path).parent)
        for command in commands:
            found.append(PublicCommand(**asdict(command), folder=folder, pull_request=number))
    return found


def main() -> None:
    """Write public_commands.json from a clone."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("clone", type=Path, help="git directory of openai/parameter-golf with these heads")
    commands = collect(parser.parse_args().clone)
    source = {"repository": "openai/parameter-golf", "commit": PUBLIC_COMMIT}
    entries = [asdict(command) for command in commands]
    text = json.dumps({"source": source, "commands": entries}, indent=1, ensure_ascii=False)
    COMMANDS_FILE.write_text(text + "\n", encoding="utf-8")
    with_settings = sum(bool(command.settings) for command in commands)
    print(f"{len(commands)} commands, {with_settings} with settings: {COMMANDS_FILE}")


if __name__ == "__main__":
    main()
