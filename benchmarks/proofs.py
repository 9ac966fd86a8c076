"""What `python -m tools prove` says of the script's defaults, of configs/beyond.env and of every record.

    python benchmarks/proofs.py --runs FOLDER [--only NAME ...] [--keep]

Each record is proved by its own script and settings, as `prove --config` shrinks them. Each answer is kept in
FOLDER as a file: what is there is not asked again, and several processes share the work, one proof each at a
time. A proof takes minutes of one core; where ranks are compared, of four for a moment.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks import ablation, paired, results  # noqa: E402
from tools.prove.prove import NOTE  # noqa: E402

TITLE = "Proofs"
HEADER = "| settings | verdict | proofs | results | of these warnings | s |"


class Subject(NamedTuple):
    """What is proved: a script, and a file of settings; none: its defaults."""

    script: Path
    config: Path | None


def subjects() -> dict[str, Subject]:
    """The script's own and all of records/, by name."""
    script = REPO / "train_gpt.py"
    found = {
        "the defaults": Subject(script, None),
        "configs/beyond.env": Subject(script, REPO / "configs/beyond.env"),
    }
    for config in sorted(REPO.glob("records/*/*/config.env")):
        folder = config.parent
        found[folder.relative_to(REPO / "records").as_posix()] = Subject(
            folder / "train_gpt_readable.py", config
        )
    return found


def prove(subject: Subject) -> dict[str, Any]:
    """The verdict, and how many results each proof had by their level. RuntimeError if there is none."""
    command = [sys.executable, "-m", "tools", "prove", str(subject.script), "--json"]
    if subject.config is not None:
        command += ["--config", str(subject.config)]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if not done.stdout:
        raise RuntimeError(f"{' '.join(command)}: ended with {done.returncode}: {done.stderr.strip()}")
    report = json.loads(done.stdout)
    of_check: dict[str, Counter[str]] = {}
    for finding in report["findings"]:
        if finding["check"] != NOTE:
            of_check.setdefault(finding["check"], Counter())[finding["level"]] += 1
    return {"status": report["status"], "verdict": report["verdict"], "seconds": seconds, "checks": of_check}


def share(folder: Path, chosen: dict[str, Subject], about: str) -> dict[str, dict[str, Any]]:
    """Prove what no file of the folder holds and no other process proves; all answers there are.

    about: what all answers of the folder must have in common; SystemExit where it holds others.
    """
    ablation.hold_common(folder, about)
    paths = {name: folder / f"{name.replace('/', '_').replace(' ', '_')}.json" for name in chosen}
    for name, subject in chosen.items():
        ablation.measure_once(paths[name], name, functools.partial(prove, subject))
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def row(name: str, answer: dict[str, Any]) -> str:
    """A line of the table."""
    levels: Counter[str] = Counter()
    for counts in answer["checks"].values():
        levels.update(counts)
    return (
        f"| {name} | {answer['verdict']} | {len(answer['checks'])} | {levels.total()} | "
        f"{levels['WARN']} | {answer['seconds']:.0f} |"
    )


def tables(measured: dict[str, Any]) -> list[str]:
    """A line for each subject."""
    return [
        "By `prove`, whose proofs `records/README.md` lists; each of its results is a question about one way "
        "of scoring, or about whole runs. Seconds by the clock of a machine that did other work as well.",
        "", *paired.table(HEADER, [row(name, answer) for name, answer in measured["answers"].items()]),
    ]  # fmt: skip


def main() -> None:
    """Prove, print the table, and with --keep store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="keep each answer there; go on with them")
    parser.add_argument("--only", nargs="+", help="names of the subjects; all by default")
    parser.add_argument("--keep", action="store_true", help="store it in results/ and RESULTS.md")
    arguments = parser.parse_args()
    before = results.conditions()
    known = subjects()
    if unknown := set(arguments.only or []) - known.keys():
        parser.error(f"--only {sorted(unknown)}: expected names among {list(known)}")
    chosen = {name: known[name] for name in arguments.only or known}
    about = json.dumps({key: before[key] for key in ("processor", "torch", "script")}, indent=1)
    answers = share(arguments.runs, chosen, about)
    results.finish("proofs", before, {"answers": answers}, arguments.keep)


if __name__ == "__main__":
    main()
