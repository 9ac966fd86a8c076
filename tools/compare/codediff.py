"""Unified diffs of scripts, wrapped ones unwrapped."""

from __future__ import annotations

import difflib

from tools.runs.source import Script


def unified(base: Script, new: Script, base_name: str, new_name: str) -> str:
    """Unified diff of the readable sources; empty when they are equal."""
    lines = difflib.unified_diff(
        base.text.splitlines(keepends=True),
        new.text.splitlines(keepends=True),
        f"{base_name}/{base.path.name}",
        f"{new_name}/{new.path.name}",
    )
    return "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )


def changed_lines(diff: str) -> tuple[int, int]:
    """Lines added and removed by a unified diff."""
    body = [line for line in diff.splitlines() if not line.startswith(("+++", "---"))]
    return sum(line.startswith("+") for line in body), sum(line.startswith("-") for line in body)
