"""What was measured: results/*.json hold every raw figure, and RESULTS.md is made from them alone.

`make docs` writes RESULTS.md anew from the files, and so does a benchmark that is started with --keep.
A benchmark has a TITLE and `tables(measured)`, a pure function from its raw figures to lines of Markdown. A
file of results/ holds the benchmark's name, the machine as it was before it began, and those raw figures.

results/release.json names a version and the train_gpt.py that is it; tables of other scripts are listed.
A clone alone measures the files of the built-in sample again. They are no tables, but a line under them.
Tables whose programs have left are frozen in results/0.5.md; nothing makes that page anew.
"""

import hashlib
import importlib
import json
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data import sample, shards
from tools import REPO
from tools.markdown import Block, refresh
from tools.runs.writing import write_text

FOLDER = REPO / "benchmarks" / "results"
RELEASE = "release.json"
PAGE = REPO / "benchmarks" / "RESULTS.md"
SAMPLE = REPO / "data" / "datasets" / sample.NAME
ON_SAMPLE = f"-{sample.NAME}"  # in the names of the sample's files, after program and arms
BEGIN, END = "<!-- measured:begin (make docs) -->", "<!-- measured:end -->"


def processor() -> str:
    """Name of the processor, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit this was measured at, marked if a program was changed since."""
    revision = ["git", "rev-parse", "--short", "HEAD"]
    ended = subprocess.run(revision, cwd=REPO, capture_output=True, encoding="utf-8", check=False)
    name = ended.stdout.strip()
    difference = ["git", "diff", "--quiet", "HEAD", "--", "*.py"]
    changed = subprocess.run(difference, cwd=REPO, check=False).returncode != 0
    name = name or "unknown"
    return f"{name}-dirty" if changed else name


def script_hash() -> str:
    """The first digits of the SHA-256 of train_gpt.py as it is."""
    return hashlib.sha256((REPO / "train_gpt.py").read_bytes()).hexdigest()[:12]


def sample_hash() -> str:
    """The first digits of a SHA-256 over those of the sample's tokenizer and files."""
    manifest = shards.read_manifest(SAMPLE)
    hashes = [manifest["tokenizer"]["sha256"], *(file["sha256"] for file in manifest["files"].values())]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:12]


def conditions() -> dict[str, Any]:
    """Machine, versions, commit and date; take them before a measurement, which is what loads the machine."""
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "processor": processor(), "cores": os.cpu_count(),
        "threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
        "commit": commit(), "script": script_hash(),
    }  # fmt: skip


def described(at: dict[str, Any]) -> str:
    """The conditions in one line."""
    device = f"{at['gpu']}, " if at["gpu"] else ""
    return (
        f"{at['date']}, {device}{at['processor']}, {at['cores']} cores, {at['threads']} threads, load "
        f"average {at['load']} before, Python {at['python']}, torch {at['torch']}, numpy {at['numpy']}, "
        f"commit {at['commit']}, train_gpt.py {at['script']}"
        + (f", program {at['program']}, {at['dtype']}" if "program" in at else "")
        + (f", sample {at['sample']}" if "sample" in at else "")
    )


def program_of(result: dict[str, Any]) -> Any:
    """The module that measured it."""
    return importlib.import_module(f"benchmarks.{result['benchmark']}")


def section(result: dict[str, Any], of: str = "") -> str:
    """One section of RESULTS.md; of: what distinguishes it from others of the same benchmark."""
    benchmark = program_of(result)
    title = benchmark.TITLE + (f": {of}" if of else "")
    lines = benchmark.tables(result["measured"])
    return "\n".join([f"## {title}", "", described(result["conditions"]), "", *lines, ""])


def of_clone(name: str, found: dict[str, dict[str, Any]]) -> str:
    """The line under a table: what a clone alone measures again, by the same program with the same arms."""
    for of_sample, result in found.items():
        of, on_sample, _ = of_sample.partition(ON_SAMPLE)
        if on_sample and name.startswith(f"{of}-"):
            program = program_of(result)
            measured = result["measured"]
            at = result["conditions"]
            return (
                f"From a clone alone: `{program.command(measured)}` gave {program.figure(measured)} on the "
                f"built-in sample {at['sample']} of Python {at['python']} ([conditions](results/{of_sample}"
                ".json), [elsewhere](#how-it-was-measured)).\n"
            )
    return ""


def beside_kept(name: str, result: dict[str, Any]) -> str:
    """The figure of a result beside the kept one of that name; empty where none is kept."""
    if not (FOLDER / f"{name}.json").exists():
        return ""
    kept = latest(name)
    lines = []
    for label, one in (("kept", kept), ("here", result)):
        at = one["conditions"]
        told = program_of(one).figure(one["measured"])
        lines.append(f"{label}: {told}; {at['processor']}, Python {at['python']}, script {at['script']}")
    if kept["conditions"]["sample"] == result["conditions"]["sample"]:
        return "\n".join([*lines, "sample: the same bytes"])
    return "\n".join([*lines, "sample: other bytes, as another version of Python or SentencePiece makes"])


def stored(folder: Path) -> dict[str, dict[str, Any]]:
    """All measurements of a folder by the names of their files, which sort them."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        if path.name != RELEASE:
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return found


def latest(name: str) -> dict[str, Any]:
    """The measurement in results/NAME.json."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def release() -> dict[str, Any]:
    """version, commit, script (SHA-256) of the release; same_bits: commits with the same results."""
    return latest(RELEASE.removesuffix(".json"))


def page() -> str:
    """The generated part of RESULTS.md: the figures of the release."""
    of = release()
    found = stored(FOLDER)
    alike = [script[:12] for script in (of["script"], *of["same_bits"].values())]
    same = [f"The script of {commit} (`{script[:12]}`) computes the same bits in all cases of "
            "`tests/same_bits.py`. " for commit, script in of["same_bits"].items()]  # fmt: skip
    others = [name for name, one in found.items() if one["conditions"]["script"] not in alike]
    told = f" Other scripts, which the tables name, made {', '.join(others)}." if others else ""
    return "\n".join([
        "# Tables", "",
        f"Version {of['version']} is train_gpt.py of commit {of['commit']}, SHA-256 `{of['script']}`. "
        f"{''.join(same)}Tables whose programs have left are in [results/0.5.md](results/0.5.md).{told}",
        "", "In tables of differences: they are taken seed by seed, over the seeds that both rows have, so "
        "columns of means need not subtract. *Its error* is the standard error of their mean, *p* that of a "
        "paired t-test, bold below 0.01.", "",
        *(part for name, result in found.items() if ON_SAMPLE not in name
          for part in (section(result, name.partition("-")[2]), of_clone(name, found)) if part),
    ])  # fmt: skip


def block() -> Block:
    """The generated part of RESULTS.md."""
    return Block(PAGE, BEGIN, END, page)


def refuse_dirty() -> None:
    """SystemExit where a program differs from the commit: what is kept must be what a commit can repeat."""
    if commit().endswith("-dirty"):
        raise SystemExit("--keep: some *.py differ from the commit; commit them first, then measure")


def finish(name: str, before: dict[str, Any], measured: dict[str, Any], keep: bool) -> None:
    """Print a benchmark's section; with `keep` store it as results/NAME.json and write RESULTS.md anew.

    SystemExit with `keep` where programs differed from their commit when it was measured.
    """
    if ON_SAMPLE in name:
        before = {**before, "sample": sample_hash()}
    result = {"benchmark": re.split("[-/]", name)[0], "conditions": before, "measured": measured}
    text = json.dumps(result, indent=1)
    print(section(json.loads(text), name.partition("-")[2]))
    if ON_SAMPLE in name:
        print(beside_kept(name, result))
    if keep:
        if before["commit"].endswith("-dirty"):
            raise SystemExit(f"--keep: measured at {before['commit']}; commit the programs, then measure")
        write_text(FOLDER / f"{name}.json", text + "\n")
        refresh(block())
