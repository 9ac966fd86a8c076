"""Training commands in text: Markdown to fenced blocks, blocks to statements, statements to commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

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
