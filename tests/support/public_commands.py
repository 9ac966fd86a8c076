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
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

COMMANDS_FILE = Path(__file__).with_name("public_commands.json")
PUBLIC_COMMIT = "4908dc46f21ed3fdd08d2fdca285deb2194b9599"

FENCE = re.compile(r"^\s*(```|~~~)[^`]*$")  # a backtick further on makes it code within a line
ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)
REFERENCE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
PLACEHOLDER = re.compile(r"^<.*>$")
LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
TRAINING_SCRIPT = re.compile(r"^train_gpt\w*\.py$")
PYTHON = re.compile(r"^python[0-9.]*$")


@dataclass(frozen=True)
class Command:
    """One command that starts a training script, and the variables that it sets for it."""

    script: str
    settings: dict[str, str]


# ======================================================================================================
# READING: Markdown to blocks, blocks to statements, statements to commands
# ======================================================================================================


def readme_commands(readme: str) -> list[Command]:
    """Each command in a fenced block of a README that runs torchrun or a train_gpt*.py, in order."""
    found = []
    for block in fenced_blocks(readme):
        found += shell_commands(block)
    return found


def fenced_blocks(readme: str) -> Iterator[str]:
    """The text of each fenced code block; backslashes that only Markdown needs are removed."""
    lines: list[str] | None = None
    for line in readme.replace("\r\n", "\n").split("\n"):
        if FENCE.match(line):
            if lines is None:
                lines = []
            else:
                yield "\n".join(lines)
                lines = None
        elif lines is not None:
            lines.append(re.sub(r"\\\\\s*$", r"\\", line.replace("\\_", "_")))


def shell_commands(text: str) -> list[Command]:
    """The training commands of shell text.

    A pair reaches a command as the shell passes it: written before the program, after `env`, or exported on
    an earlier line. `$NAME` becomes what the text gave NAME, the first value of a `for` loop included; a pair
    whose value stays open (an unknown variable, `<SEED>`) is left out.
    """
    variables: dict[str, str] = {}
    exported: dict[str, str] = {}
    commands = []
    for words in statements(text):
        if words[0] in ("do", "then"):
            words = words[1:]
        if len(words) >= 4 and words[0] == "for" and words[2] == "in":
            variables[words[1]] = words[3]
            continue
        is_export = words[:1] == ["export"]
        own = assignments(words[1:] if is_export else words, variables)
        script = training_script(words)
        if script is not None:
            commands.append(Command(script, {**exported, **own}))
        elif is_export:
            exported.update(own)
            variables.update(own)
        elif all(ASSIGNMENT.match(word) for word in words):
            variables.update(own)
    return commands


def statements(text: str) -> Iterator[list[str]]:
    """The words of each simple command: lines are joined at a backslash and split at ; && || | and &."""
    joined = re.sub(r"\\[ \t]*\n", " ", text)
    for commented_line in joined.split("\n"):
        line = re.sub(r"(^|\s)#.*$", "", commented_line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        lexer.commenters = ""
        try:
            words = list(lexer)
        except ValueError as error:  # an apostrophe in prose, say; but a command must not be lost to one
            if any(launcher in line for launcher in LAUNCHERS):
                raise ValueError(f"{line!r}: {error}; close the quotation") from error
            continue
        yield from split_statements(words)


def split_statements(words: list[str]) -> Iterator[list[str]]:
    """The words between operators."""
    statement: list[str] = []
    for word in words:
        if set(word) <= set(";&|"):
            if statement:
                yield statement
            statement = []
        else:
            statement.append(word)
    if statement:
        yield statement


def assignments(words: list[str], variables: dict[str, str]) -> dict[str, str]:
    """The NAME=value words before the program's own arguments, with variables put in."""
    found: dict[str, str] = {}
    for word in words:
        if is_program(word):
            break
        match = ASSIGNMENT.match(word)
        if match is None:
            continue
        name, value = match.groups()
        names = [braced or bare for braced, bare in REFERENCE.findall(value)]
        is_open = PLACEHOLDER.match(value) or any(other not in variables for other in names)
        if not is_open:
            found[name] = REFERENCE.sub(lambda m: variables[m.group(1) or m.group(2)], value)
    return found


def is_program(word: str) -> bool:
    """Whether the word is an interpreter or a launcher, after which come arguments and no settings."""
    name = PurePosixPath(word).name
    return name in LAUNCHERS or PYTHON.match(name) is not None


def training_script(words: list[str]) -> str | None:
    """The file name of the script that these words train with, or None where they do something else."""
    programs = [position for position, word in enumerate(words) if is_program(word)]
    if not programs:
        return None
    arguments = words[programs[0] :]
    launched = any(PurePosixPath(word).name in LAUNCHERS for word in arguments)
    if "-m" in arguments and not launched:  # python -m py_compile train_gpt.py
        return None
    scripts = [PurePosixPath(word).name for word in arguments if word.endswith(".py")]
    if scripts and (launched or TRAINING_SCRIPT.match(scripts[0])):
        return scripts[0]
    return None


# ======================================================================================================
# COLLECTING: a clone of the public repository to public_commands.json
# ======================================================================================================


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
