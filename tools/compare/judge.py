"""What two sides of a comparison must share, or their scores say nothing: scoring code, data, conditions.

The scoring code of a script is its section EVALUATION, and the functions around it that read the validation
text and report the score. Comments and docstrings do not count. Whether the model itself looks ahead is not
asked here: `prove` does that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.files import sha256_file
from tools.runs.errors import RecordError
from tools.runs.logs import read_log
from tools.runs.runs import LOG
from tools.runs.script import find_path

BANNER = re.compile(r"^# =+\n# ([A-Za-z]+)\b.*\n# =+$", re.MULTILINE)
SCORING_SECTION = "EVALUATION"
SCORING_ELSEWHERE = ("open_shards", "read_tokens", "read_validation", "whole_run", "summarize")
# Settings that are the budget or the judge of a comparison, and so the same on both sides.
SHARED = ("ITERATIONS", "MAX_WALLCLOCK_SECONDS", "MAX_EVAL_SECONDS", "ARTIFACT_BYTES_MAX", "VAL_TOKENS_LIMIT",
          "TTT_ENABLED", "DEVICE", "CPU_THREADS", "COMPUTE_DTYPE", "COMPILE")


def scoring_code(script: Path) -> dict[str, str]:
    """The definitions that score, by name. RecordError for a script without a section of that name."""
    source = script.read_text(encoding="utf-8")
    banners = list(BANNER.finditer(source))
    lines = [source.count("\n", 0, banner.start()) + 1 for banner in banners]
    names = [banner[1] for banner in banners]
    if SCORING_SECTION not in names[:-1]:
        raise RecordError(f"{script} has no section {SCORING_SECTION} between lines of =, so try cannot see "
                          "whether both sides score in the same way; compare them with sweep")
    place = names.index(SCORING_SECTION)
    found = {}
    for statement in ast.parse(source).body:
        name = name_of(statement)
        if lines[place] < statement.lineno < lines[place + 1] or name in SCORING_ELSEWHERE:
            found[name] = ast.unparse(without_docstrings(statement))
    return found


def name_of(statement: ast.stmt) -> str:
    """What a top-level statement defines; of one that defines nothing, its text."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        return ast.unparse(target)
    return ast.unparse(statement)


def without_docstrings(statement: ast.stmt) -> ast.stmt:
    """The statement, changed in place."""
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return statement


def scoring_changes(base: Path, new: Path) -> list[str]:
    """Names of the definitions that score otherwise in one script than in the other."""
    return changed_names(scoring_code(base), scoring_code(new))


def setting_changes(base: Any, new: Any) -> list[str]:
    """`NAME=old → new` of the shared settings in which two configurations differ.

    Without a time limit, the tokens of a step are part of the budget, as their number is.
    """
    before, after = base.as_env(), new.as_env()
    by_steps = float(before.get("MAX_WALLCLOCK_SECONDS", 0)) == 0
    shared = (*SHARED, "TRAIN_BATCH_TOKENS") if by_steps else SHARED
    # Whether windows slide decides which score counts; how far they do is a setting like another.
    for values in (before, after):
        values["EVAL_STRIDE > 0"] = str(float(values.get("EVAL_STRIDE", 0)) > 0)
    changed = []
    for name in (*shared, "EVAL_STRIDE > 0"):
        if before.get(name) != after.get(name):
            changed.append(f"{name}={before.get(name)} → {after.get(name)}")
    return changed


def data_changes(base: Any, new: Any) -> list[str]:
    """Files of the validation text and the tokenizer whose bytes are not the same on both sides."""
    places = [(config.data_path, config.tokenizer_path) for config in (base, new)]
    if places[0] == places[1]:
        return []  # hashing takes time
    return changed_names(*(scored_files(*place) for place in places))


def changed_names(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The names that only one side has, or that stand for something else on each."""
    return [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]


def scored_files(data_path: str, tokenizer_path: str) -> dict[str, str]:
    """SHA-256 by name of the tokenizer, and of all validation shards with their sidecars."""
    paths = sorted(find_path(data_path).glob("fineweb_val_*.bin"))
    hashes = {path.name: sha256_file(path) for path in paths}
    tokenizer = find_path(tokenizer_path)
    if tokenizer.is_file():
        hashes["tokenizer"] = sha256_file(tokenizer)
    return hashes


def files_read(data_path: str, tokenizer_path: str) -> dict[str, str]:
    """What identifies the data of a run: the files that it is scored on, and the sizes of those it reads.

    Hashing all training shards would take minutes. Those of other text have another number of tokens.
    """
    paths = sorted(find_path(data_path).glob("fineweb_train_*.bin"))
    sizes = {path.name: f"{path.stat().st_size} bytes" for path in paths}
    return {**scored_files(data_path, tokenizer_path), **sizes}


def scored_text(directory: Path, stage: str) -> str:
    """How many tokens and bytes the score of a finished run is of, in words."""
    score = read_log(directory / LOG).score_after(stage)
    return f"{score.scored_tokens} tokens of {score.val_bytes} bytes" if score else "nothing"
