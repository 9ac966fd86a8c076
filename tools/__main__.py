"""`python -m tools VERB …`: a module per verb, each with `add_arguments` and `run(args) -> exit status`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shlex
import sys
from collections.abc import Sequence

from data.files import DataError, escape_unprintable, explain_os_error
from tools import REPO
from tools.runs.errors import RecordError
from tools.runs.reading import printable
from tools.runs.writing import Terminal

VERBS: dict[str, tuple[str, str]] = {
    "pack": ("tools.submit.pack", "turn finished runs into a records folder"),
    "check": ("tools.submit.check", "audit a records folder, ours or any public one"),
    "prove": ("tools.audit.audit", "try to refute the scores of a script by experiment"),
    "diff": ("tools.compare.diff", "compare two runs or folders: settings, code, metrics, losses"),
    "runs": ("tools.compare.overview", "print one table of many runs, finished or not"),
    "try": ("tools.compare.trial", "find out whether a change is better: train it and the base in pairs"),
    "sweep": ("tools.compare.sweep", "run settings x seeds from one file, and compare them in pairs"),
    "plot": ("tools.compare.plot", "plot loss, bits per byte and step times"),
    "export": ("tools.compare.export", "write a run's steps for TensorBoard or wandb, or its weights"),
    "summary": ("tools.summary", "print the result of a run in ten lines"),
    "timeline": ("tools.trace.timeline", "draw the trace that TRACE_STEPS recorded, lane by lane"),
    "generate": ("tools.generate", "continue a prompt with a run's artifact"),
}
MADE_BY_MAKE = REPO / ".venv" / "bin" / "python"
EXIT_USAGE = 2  # argparse's own status for a bad command line; used for bad inputs too
EXIT_INTERRUPTED = 130


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Parser with every verb listed; only the module of the verb in `argv` is imported: `--help` is quick."""
    parser = argparse.ArgumentParser(
        prog="python -m tools", description="Pack, audit, prove, compare and draw runs and records."
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for verb, (module_name, purpose) in VERBS.items():
        subparser = verbs.add_parser(
            verb, help=purpose, description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if verb == wanted:
            module = importlib.import_module(module_name)
            subparser.description = module.__doc__
            module.add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 fine, 1 the verb's own negative verdict, 2 input that cannot be used."""
    escape_unprintable()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = build_parser(arguments)
        args, more = parser.parse_known_args(arguments)
        if args.verb is None:
            parser.print_help(sys.stderr)
            return EXIT_USAGE
        if more:
            left_over = f"{args.verb}: did not expect {shlex.join(more)}"
            parser.error(f"{left_over}; a pattern like *_Base may match two folders: name one of them")
        return _run(args)
    except ModuleNotFoundError as error:
        print(f"tools: {sys.executable} has no {error.name}; {python_with_packages()}", file=sys.stderr)
        return EXIT_USAGE


def python_with_packages() -> str:
    """How to get a Python with the packages of requirements.txt."""
    if MADE_BY_MAKE.exists():
        return f"use the environment that `make` made: {MADE_BY_MAKE} -m tools"
    return "`make demo` makes an environment with everything needed; or pip install -r requirements.txt"


def _run(args: argparse.Namespace) -> int:
    """Run the verb, and turn its exceptions into an exit status."""
    module_name, _ = VERBS[args.verb]
    try:
        # What a verb prints may come from anybody. Where the console is closed there is nothing to protect.
        terminal = Terminal(sys.stdout) if sys.stdout is not None else None
        with contextlib.redirect_stdout(terminal):
            return int(importlib.import_module(module_name).run(args))
    except (RecordError, DataError) as error:
        print(printable(f"tools {args.verb}: {error}"), file=sys.stderr)
        return EXIT_USAGE
    except UnicodeEncodeError as error:
        sentence = f"this locale cannot encode a name: {error}; set LC_ALL=C.UTF-8"
        print(printable(f"tools {args.verb}: {sentence}"), file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # of a disk, such as one that is full
        name = error.filename2 or error.filename
        if name is None:
            raise
        print(printable(f"tools {args.verb}: {explain_os_error(error, name)}"), file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"tools {args.verb}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
