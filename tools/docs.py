"""`docs`: every generated block of this repository, each between two marks of its file.

docs/running.md has the main settings, docs/technique.md a patch, benchmarks/RESULTS.md
the records and the figures of the benchmarks.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import statistics
import sys
from pathlib import Path

from tools import RECORDS, REPO
from tools.markdown import Block, refresh, split_at_marks, table
from tools.runs.folder import LOG_NAME, Folder
from tools.runs.logs import read_log
from tools.runs.stats import mean_and_deviation

SETTINGS_BEGIN, SETTINGS_END = "<!-- settings:begin (make docs) -->", "<!-- settings:end -->"
RESULTS_BEGIN, RESULTS_END = "<!-- results:begin (make docs) -->", "<!-- results:end -->"

TECHNIQUE_BEGIN, TECHNIQUE_END = "<!-- technique:begin -->", "<!-- technique:end -->"

SETTINGS_PAGE, TECHNIQUE_PAGE = "docs/running.md", "docs/technique.md"
RESULTS_PAGE = "benchmarks/RESULTS.md"

# The settings that the page shows, chosen by hand.
MAIN_SETTINGS = """
DATA_PATH TOKENIZER_PATH SEED MAX_WALLCLOCK_SECONDS TRAIN_BATCH_TOKENS MICRO_BATCH_TOKENS TRAIN_SEQ_LEN
NUM_LAYERS MODEL_DIM MATRIX_LR ARTIFACT_BYTES_MAX EVAL_STRIDE TTT_ENABLED TTT_MODE RUN_ID RESUME EVAL_ONLY
""".split()

# The scores of a run in the order of its evaluation: the name in summary.json, the head of the column.
SCORES = {"roundtrip": "round-trip", "sliding_window": "sliding window", "legal_ttt": "legal TTT"}
RESULT_COLUMNS = [
    "track", "record", "seeds", "training s", "steps", "parameters", *SCORES.values(), "code and weights",
]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 when a block is stale"
    )


def run(args: argparse.Namespace) -> int:
    stale = [block for block in all_blocks() if refresh(block, args.check)]
    for block in stale:
        if args.check:
            print(f"{block.path}: the block {block.begin} is stale; run `make docs`", file=sys.stderr)
        else:
            print(f"{block.path}: wrote {block.begin}")
    return int(args.check and bool(stale))


def all_blocks() -> list[Block]:
    """Every generated block of the repository."""
    results = importlib.import_module("benchmarks.results")  # loads torch
    answers = importlib.import_module("benchmarks.answers")
    return [
        Block(REPO / SETTINGS_PAGE, SETTINGS_BEGIN, SETTINGS_END, settings_table),
        Block(REPO / RESULTS_PAGE, RESULTS_BEGIN, RESULTS_END, lambda: result_table(RECORDS)),
        Block(REPO / TECHNIQUE_PAGE, TECHNIQUE_BEGIN, TECHNIQUE_END, lambda: technique(REPO)),
        results.block(),
        answers.block(),
    ]


# ======================================================================================================
# SETTINGS
# ======================================================================================================


def settings_table() -> str:
    """Markdown rows of the main settings: name, default, meaning."""
    from tools.runs.script import Config  # loads torch

    fields = {field.name.upper(): field for field in dataclasses.fields(Config)}
    rows = []
    for name in MAIN_SETTINGS:
        default = fields[name].default
        if isinstance(default, bool):
            default = int(default)
        shown = "(empty)" if default == "" else default
        rows.append([f"`{name}`", shown, fields[name].metadata["meaning"]])
    return table(["variable", "default", "meaning"], rows)


# ======================================================================================================
# RESULTS
# ======================================================================================================


def result_table(records: Path) -> str:
    """All records, track by track; the best first by the score that all of them have."""
    folders = [Folder(path) for path in sorted(records.glob("track_*/*"))]
    folders = [folder for folder in folders if folder.file("submission.json").is_file()]
    folders.sort(key=lambda folder: (folder.track, roundtrip(folder)))
    rows = [result_row(folder) for folder in folders]
    return table(RESULT_COLUMNS, rows)


def roundtrip(folder: Folder) -> float:
    """The mean score after quantization: methods of test-time training differ among records."""
    losses = [summary["losses"]["roundtrip"] for summary in folder.summaries.values()]
    return statistics.mean(loss["bits_per_byte"] for loss in losses)


def result_row(folder: Folder) -> list[str]:
    """One record: means over its seeds, their standard deviations, and the most bytes of any seed."""
    summaries = list(folder.summaries.values())
    log = read_log(folder.file(LOG_NAME.format(seed=min(folder.summaries))))
    parameters = int(log.settings["model_params"].value)
    steps = statistics.mean(summary["steps"] for summary in summaries)
    seconds = statistics.mean(summary["train_seconds"] for summary in summaries)
    cells = [
        f"`{folder.track.removeprefix('track_')}`",
        f"[{folder.name.partition('_')[2]}](../records/{folder.track}/{folder.name}/)",
        str(len(summaries)),
        f"{seconds:.0f}",
        f"{steps:.0f}",
        f"{parameters:,}",
    ]
    for score in SCORES:
        found = [
            summary["losses"][score]["bits_per_byte"] for summary in summaries if score in summary["losses"]
        ]
        cells.append(mean_and_deviation(found, ".4f") if found else "-")
    most_bytes = max(summary["limits"]["artifact_bytes"]["value"] for summary in summaries)
    cells.append(f"{most_bytes:,}")
    return cells


# ======================================================================================================
# TECHNIQUE
# ======================================================================================================

HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@")


def technique(repo: Path) -> str:
    """The block of a page that holds a patch, with the line numbers of the files as they are."""
    page = (repo / TECHNIQUE_PAGE).read_text(encoding="utf-8")
    parts = split_at_marks(page, TECHNIQUE_BEGIN, TECHNIQUE_END)
    assert parts is not None, "refresh has found these marks"
    return numbered(parts.between, repo)


def numbered(patch: str, repo: Path) -> str:
    """A unified diff whose hunks have the line numbers at which their old lines stand in the files of `repo`.

    A hunk that is not found, or found twice, keeps its numbers; `git apply` then names it.
    """
    lines = patch.split("\n")
    text: list[str] = []  # of the file that is patched
    grown = 0  # lines that the hunks before have added to it
    for at, line in enumerate(lines):
        if line.startswith("--- a/"):
            text = (repo / line.removeprefix("--- a/")).read_text(encoding="utf-8").split("\n")
            grown = 0
        if not HUNK.match(line) or line.startswith("@@ -0,0"):
            continue
        body = []
        for below in lines[at + 1 :]:
            if below[:1] not in ("", " ", "+", "-") or below.startswith("--- "):
                break
            body.append(below)
        old = [below[1:] for below in body if below[:1] in ("", " ", "-")]
        new = [below[1:] for below in body if below[:1] in ("", " ", "+")]
        found = [i for i in range(len(text)) if text[i : i + len(old)] == old]
        if len(found) == 1:
            start = found[0] + 1
            lines[at] = f"@@ -{start},{len(old)} +{start + grown},{len(new)} @@"
            grown += len(new) - len(old)
    return "\n".join(lines)
