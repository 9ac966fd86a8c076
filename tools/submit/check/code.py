"""A7, A8, A10-A13: what the script's text tells; advice, with FAIL only on certainties."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator

from tools.runs import source
from tools.runs.folder import ASIDE_BYTES_MAX, PICTURE_SUFFIXES, README, REQUIREMENTS, Folder
from tools.runs.logs import COUNT
from tools.runs.rules import VALIDATION_DOCUMENTS
from tools.submit.check.findings import Finding, contested, fail, info, warn

OPTIONAL_MODULES = {
    "flash_attn_interface",
    "flash_attn",
    "flash_attn_3",
    "mlx",
    "cutlass_evt_fusion",
    "pyminify",
}
HARMLESS_PROGRAMS = {"nvidia-smi", "git", "rocm-smi", "hostname"}
INSTALLERS = {"pip", "apt", "apt-get", "conda", "uv", "curl", "wget"}
PACKED_LINE_CHARACTERS = 4_000  # no readable line is that long
FIRST_PYTHON_WITH_NESTED_QUOTES = (3, 12)


def check_syntax(folder: Folder) -> Iterator[Finding]:
    """A7: the script parses here; a newer syntax is a warning, since it ran somewhere."""
    script = folder.script
    if script is None or not isinstance(script.tree, SyntaxError):
        return
    error = script.tree
    if script.problem is not None:
        return  # not read at all, or packed: `check_readable` says so
    here = ".".join(map(str, sys.version_info[:2]))
    where = script.where(error.lineno or 1)
    if sys.version_info[:2] >= FIRST_PYTHON_WITH_NESTED_QUOTES:
        yield fail("A7", f"does not parse on Python {here}: {error.msg}", where, "ship the file that ran")
        return
    yield warn(
        "A7",
        f"does not parse on Python {here}: {error.msg} (#1591)",
        where,
        "write 3.10 syntax: several images run 3.10 or 3.11",
    )


def check_imports(folder: Folder) -> Iterator[Finding]:
    """A8, A11: unguarded optional packages; modules that reach the network."""
    script = folder.script
    if script is None:
        return
    shipped = {path.stem for path in folder.files()}
    for call in source.imports(script):
        where = script.where(call.line)
        if call.name in OPTIONAL_MODULES and not call.detail and call.name not in shipped:
            yield warn(
                "A8",
                f"import of {call.name} is unguarded; the stock image lacks it (#280)",
                where,
                "import it inside try/except ImportError with a fallback",
            )
        if call.name in source.NETWORK_MODULES:
            yield warn(
                "A11",
                f"imports {call.name}: evaluation may not use the network",
                where,
                "move downloads to a separate script",
            )
    for call in source.unseen_imports(script):
        what = f"`{call.name}({call.detail})` loads what no reading of the text shows"
        if not call.detail:
            what = f"`{call.name}` loads from the network"
        yield warn("A11", what, script.where(call.line), "import by name; evaluation may not use the network")


def check_programs(folder: Folder) -> Iterator[Finding]:
    """A11: programs that the script starts."""
    script = folder.script
    if script is None:
        return
    notes = folder.text(README) + folder.text(REQUIREMENTS)
    for call in source.subprocess_calls(script):
        where = script.where(call.line)
        if call.name in INSTALLERS:
            yield warn(
                "A11", f"runs `{call.detail}`", where, "install before the run, in documented setup steps"
            )
        elif (
            call.name not in HARMLESS_PROGRAMS
            and call.name not in notes
            and not call.name.startswith(("?", "-"))
        ):
            yield warn(
                "A11",
                f"starts `{call.name}`, which neither README nor requirements.txt names (#1856)",
                where,
                "document it as a prerequisite",
            )


def check_closure(folder: Folder) -> Iterator[Finding]:
    """A10: code and data outside the counted script."""
    script = folder.script
    if script is None:
        return
    for path in folder.closure:
        verb = "runs" if path.suffix in source.CODE_SUFFIXES else "reads"
        yield contested(
            "A10",
            f"{script.path.name} also {verb} {path.relative_to(folder.path)} ({path.stat().st_size:,} bytes)",
            script.path.name,
            "all counted code lives in train_gpt.py; put it there, its bytes count",
        )


def check_large_files(folder: Folder) -> Iterator[Finding]:
    """A10: large files of which the script's text does not tell whether a run reads them."""
    known = {*folder.closure, *folder.scripts, *(log.path for log in folder.logs)}
    for path in folder.files():
        size = path.stat().st_size
        name = path.relative_to(folder.path).as_posix()
        if path in folder.models:
            text = f"`{name}` has the bytes of a model in a log: taken for that, and not counted once more"
        elif size > ASIDE_BYTES_MAX and path not in known and path.suffix.lower() not in PICTURE_SUFFIXES:
            text = f"`{name}` ({size:,} bytes) is named nowhere: not decidable whether the script reads it"
        else:
            continue
        yield warn("A10", text, name, "leave out what no run reads")


def check_outside(folder: Folder) -> Iterator[Finding]:
    """A10: code that is run from outside the folder, and code that this reading cannot see."""
    for script in folder.run_scripts:
        for call in source.leaving_paths(script):
            if call.name == "sys.path":
                text = f"`sys.path` gets `{call.detail}`: modules may come from outside the folder"
                yield warn("A10", text, script.where(call.line), "put the modules into the folder")
                continue
            yield fail(
                "A10",
                f"`{call.name}` runs `{call.detail}`, which is outside the folder",
                script.where(call.line),
                "all counted code lives in train_gpt.py; put it there",
            )
        for call in source.outside_weights(script):
            text = f"names `{call.detail}`, outside the folder: not decidable whether a run reads it"
            yield warn("A10", text, script.where(call.line), "what a run reads is in the folder, and counts")
        for call in source.hidden_code(script):
            yield warn(
                "A10",
                f"`{call.name}({call.detail})` runs code that no reading of the text shows",
                script.where(call.line),
                "write the code itself",
            )


def check_patterns(folder: Folder) -> Iterator[Finding]:
    """A12: functions worth proving. Names and keywords decide nothing, so this never warns."""
    script = folder.script
    if script is None:
        return
    for call in source.validation_training(script):
        yield info(
            "A12",
            f"`{call.name}` steps an optimizer beside validation tokens",
            script.where(call.line),
            "legal if every token is scored first; `python -m tools prove` decides",
        )


def check_split(folder: Folder) -> Iterator[Finding]:
    """A13: data preparation that cuts another validation split than the first 50,000 documents."""
    for script in folder.scripts.values():
        for call in source.argument_defaults(script, "--val-docs"):
            if re.fullmatch(COUNT, call.detail) and int(call.detail) != VALIDATION_DOCUMENTS:
                yield warn(
                    "A13",
                    f"--val-docs defaults to {int(call.detail):,}, validation is the first"
                    f" {VALIDATION_DOCUMENTS:,} documents: training shards cut with it"
                    " hold validation text (#2127)",
                    script.where(call.line),
                    f"use {VALIDATION_DOCUMENTS} and state the shards' hashes",
                )


def brotli_missing() -> bool:
    """Whether brotli shells cannot be unwrapped here."""
    return importlib.util.find_spec("brotli") is None


def check_readable(folder: Folder) -> Iterator[Finding]:
    """A7: code in a form that this tool cannot read."""
    script = folder.script
    if script is None or script.wrapped:
        return
    longest = max((len(line) for line in script.text.splitlines()), default=0)
    packed = source.EXECUTES.search(script.text) is not None and longest > PACKED_LINE_CHARACTERS
    if script.problem is None and (isinstance(script.tree, SyntaxError) or not packed):
        return
    reason = script.problem or ("brotli is not installed here" if brotli_missing() else "unknown form")
    yield warn(
        "A7", f"packed code was not unwrapped: {reason}", script.path.name, "ship the source beside it"
    )


CHECKS = (
    check_syntax,
    check_readable,
    check_imports,
    check_programs,
    check_closure,
    check_large_files,
    check_outside,
    check_patterns,
    check_split,
)
