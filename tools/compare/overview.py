"""`runs [FOLDER …]`: one table of many runs, finished or not, from their summaries and logs.

Each row has the headline score and those of the earlier stages in bits per byte, steps, milliseconds per
step, bytes, the state of the run, and the settings that differ between the rows. Settings that don't fit into
120 columns are listed below the table.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.runs.derive import nested, stage_scores, validation_set
from tools.runs.errors import RecordError
from tools.runs.folder import CONFIG, PER_RUN_SETTINGS, SETTINGS_OF_A_START, is_own, required_object
from tools.runs.logs import STAGES, RunLog, read_log
from tools.runs.runs import ARTIFACT, CHECKPOINT, FINISHED, LOG, SUMMARY, settings_of
from tools.runs.settings import UNSET, plain_values
from tools.runs.texts import text_of
from tools.runs.writing import columns, print_json

WIDTH = 120
NAME_WIDTH = 32
STAGE_HEADS = dict(zip(STAGES, ("float", "quantized", "windows", "ttt"), strict=True))
SORT_KEYS = ("name", "steps", "ms", "val_bpb", "bytes")


@dataclass(frozen=True)
class Row:
    """One run directory; later stages that it lacks are None or missing."""

    path: Path
    settings: dict[str, str]
    seed: str
    steps: int | None
    ms: float | None
    scores: dict[str, float] = field(default_factory=dict)  # bits per byte by stage
    bytes: int | None = None
    status: str = ""
    validation: str = ""  # `your own`, `official (sp8192)`; empty: older runs do not say
    text: str = ""  # the same, with what tells two texts of one's own apart
    stopped_learning: bool = False  # test-time training ended at its time limit, before the text did

    @property
    def val_bpb(self) -> float | None:
        """The score of the last stage that the run has."""
        reached = [stage for stage in STAGES if stage in self.scores]
        return self.scores[reached[-1]] if reached else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs = os.environ.get("RUNS_DIR") or "runs"
    parser.add_argument("folders", type=Path, nargs="*", default=[Path(runs)], metavar="FOLDER",
                        help=f"run directories, or folders that hold them (default: {runs})")
    parser.add_argument("--sort", choices=SORT_KEYS, default="name", help="the column to sort by")
    parser.add_argument("--where", action="append", default=[], metavar="NAME=VALUE",
                        help="only runs with this setting; may be given several times")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: argparse.Namespace) -> int:
    wanted = {}
    for pair in args.where:
        name, equals, value = pair.partition("=")
        if not equals:
            raise RecordError(f"--where {pair!r}: expected NAME=VALUE, as in --where MODEL_DIM=256")
        wanted[name] = value
    rows = [read_row(path) for path in run_directories(args.folders)]
    rows = [row for row in rows if wanted.items() <= {**row.settings, "SEED": row.seed}.items()]
    if not rows:
        places = ", ".join(map(str, args.folders))
        raise RecordError(f"{places}: no matching run; expected directories with a {LOG}")
    rows.sort(key=lambda row: sort_key(row, args.sort))
    if args.json:
        print_json([as_json(row) for row in rows])
    else:
        print(table(rows))
        for warning in different_texts(rows):
            print(warning)
    return 0


def different_texts(rows: Sequence[Row]) -> list[str]:
    """A warning if the rows were not all scored on one text."""
    texts = sorted({row.text for row in rows if row.text and row.scores})
    if len(texts) < 2:
        return []
    return [f"warning: scores on different validation sets cannot be compared: {', '.join(texts)}"]


def run_directories(folders: Sequence[Path]) -> list[Path]:
    """The folders that are runs, and the runs inside the others, those of sweeps too.

    RecordError for a missing folder. Those that a sweep started over, and moved to `stopped`, are left out.
    """
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise RecordError(f"{folder}: no such folder; give run directories, or a folder that holds some")
        if is_own(folder / LOG):
            found.append(folder)
        else:
            inside = [*folder.glob(f"*/{LOG}"), *folder.glob(f"*/*/{LOG}")]
            found += sorted(log.parent for log in inside if is_own(log) and log.parts[-3] != "stopped")
    return found


def read_row(path: Path) -> Row:
    """The row of a run directory, from its summary if it has one, else from its log."""
    log = read_log(path / LOG)
    summary: dict[str, Any] = {}
    damage = ""
    if is_own(path / SUMMARY):
        try:
            summary = required_object(path / SUMMARY)
        except RecordError as error:
            damage = str(error)
    config = path / CONFIG
    settings = plain_values(settings_of(config) if is_own(config) else {})
    seed = settings.get("SEED", UNSET)
    for name in PER_RUN_SETTINGS | SETTINGS_OF_A_START:
        settings.pop(name, None)
    size = nested(summary, "limits", "artifact_bytes", "value")
    return Row(
        path, settings, seed, log.steps_done, log.step_ms, stage_scores(log),
        size if isinstance(size, int) else None, damage or status(path, summary, log),
        validation_set(summary, log), text_of(summary, log), log.unlearned is not None,
    )


def status(path: Path, summary: dict[str, Any], log: RunLog) -> str:
    """The state of a run: finished, with the limits that failed, or its last step and how to continue.

    A run of EVAL_ONLY has trained nothing: it says whose artifact it has scored.
    """
    if summary.get("exit") == FINISHED:
        failed = failed_limits(summary)
        scored = nested(summary, "config", "EVAL_ONLY")
        verb = f"scored {Path(str(scored)).parent.name} again" if scored else "finished"
        stopped = ", learning stopped early" if log.unlearned else ""
        return verb + stopped + (f", over {', '.join(failed)}" if failed else "")
    if (path / ARTIFACT).is_file():
        return "not scored"
    saved = ", checkpoint" if (path / CHECKPOINT).is_file() else ""
    return f"step {log.steps or 0}{saved}"


def failed_limits(summary: dict[str, Any]) -> list[str]:
    """The names of the limits that a finished run did not keep."""
    limits = nested(summary, "limits")
    if not isinstance(limits, dict):
        return []
    return [name for name, limit in limits.items() if isinstance(limit, dict) and limit.get("ok") is False]


def sort_key(row: Row, column: str) -> tuple[bool, Any, str]:
    """Rows without a value come last."""
    value = row.path.name if column == "name" else getattr(row, column)
    return (value is None, value if value is not None else 0, row.path.name)


def differing_settings(rows: Sequence[Row]) -> list[str]:
    """Names of the settings that not all rows share."""
    names = sorted({name for row in rows for name in row.settings})
    return [name for name in names if len({row.settings.get(name) for row in rows}) > 1]


def table(rows: Sequence[Row]) -> str:
    """The table for a terminal."""
    # A run of a sweep has the name of the sweep before its own where other runs are in the table.
    above = os.path.commonpath([row.path.absolute().parent for row in rows])
    stages = stages_before(rows)
    differing = differing_settings(rows)
    heads = ["run", "bpb", *(STAGE_HEADS[stage] for stage in stages), "seed", "steps", "ms/step", "bytes"]
    heads += ["status"]
    cells = []
    for row in rows:
        line = [
            shortened(os.path.relpath(row.path.absolute(), above)),
            UNSET if row.val_bpb is None else f"{row.val_bpb:.5f}",
            *(f"{row.scores[stage]:.5f}" if stage in row.scores else UNSET for stage in stages),
            row.seed,
            UNSET if row.steps is None else f"{row.steps:,}",
            UNSET if row.ms is None else f"{row.ms:.1f}",
            UNSET if row.bytes is None else f"{row.bytes:,}",
            row.status,
        ]
        cells.append(line)
    if not differing:
        return cut(columns(heads, cells))
    settings = [" ".join(f"{name}={row.settings.get(name, UNSET)}" for name in differing) for row in rows]
    whole = columns([*heads, "settings"], [[*line, text] for line, text in zip(cells, settings, strict=True)])
    if max(map(len, whole.splitlines())) <= WIDTH:
        return whole
    below = ["", "settings that differ:"]
    for line, text in zip(cells, settings, strict=True):
        below += textwrap.wrap(f"{line[0]}: {text}", WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join([cut(columns(heads, cells)), *below])


def cut(table: str) -> str:
    """A table whose lines fit; a status may be a long sentence."""
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in table.splitlines())


def stages_before(rows: Sequence[Row]) -> list[str]:
    """The stages that have a column: those that come before the last one that a row has reached."""
    found = [stage for stage in STAGES if any(stage in row.scores for row in rows)]
    return found[:-1]


def shortened(name: str) -> str:
    """A long name without its beginning: runs of a sweep differ at their ends."""
    return name if len(name) <= NAME_WIDTH else "…" + name[1 - NAME_WIDTH :]


def as_json(row: Row) -> dict[str, Any]:
    """A row with all its settings."""
    scores = {STAGE_HEADS[stage]: score for stage, score in row.scores.items()}
    return {"run": str(row.path), "seed": row.seed, "steps": row.steps, "ms": row.ms, "val_bpb": row.val_bpb,
            "scores": scores, "bytes": row.bytes, "validation": row.validation or None,
            "status": row.status, "settings": row.settings}
