"""The verdict of an audit, and the hashes that tie it to what was audited."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools import REPO
from tools.runs.folder import PER_RUN_SETTINGS, SETTINGS_OF_A_START

PROVEN, REFUTED, NOT_CHECKED = range(3)  # exit statuses
PLACES = ("DATA_PATH", "TOKENIZER_PATH")  # settings that the environment may give


@dataclass
class Verdict:
    """What an audit has found out, as it is printed and stored."""

    subject: dict[str, Any]  # what was audited, by hashes
    only: list[str] = field(default_factory=list)  # the laws that were asked; none: all
    walls: str = ""
    passed: list[dict[str, str]] = field(default_factory=list)
    refuted: str = ""
    not_checked: str = ""
    not_run: list[str] = field(default_factory=list)  # branches
    largest: str = ""
    cpu_seconds: float = 0.0  # of the script's process

    @property
    def status(self) -> int:
        """The exit status."""
        if self.refuted:
            return REFUTED
        return NOT_CHECKED if self.not_checked or not self.passed else PROVEN

    def __str__(self) -> str:
        if self.refuted:
            return f"refuted: {self.refuted}"
        if self.status == NOT_CHECKED:
            return f"not checked: {self.not_checked or 'nothing was asked'}"
        return f"not refuted by {', '.join(self.only)}" if self.only else "proven: nothing refuted it"

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**self.subject, "only": self.only, "status": self.status, "verdict": str(self),
                "walls": self.walls, "passed": self.passed, "not_run": self.not_run,
                "largest": self.largest}  # fmt: skip


def hash_of_settings(settings: Mapping[str, str]) -> str:
    """SHA-256 of settings but for what belongs to a single start."""
    own = PER_RUN_SETTINGS | SETTINGS_OF_A_START | {"FOREIGN_NAMES", *PLACES}
    kept = {name: value for name, value in sorted(settings.items()) if name not in own}
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()


def fingerprint() -> str:
    """SHA-256 of the auditor's own files."""
    found = hashlib.sha256()
    for folder in ("tools", "data"):
        for path in sorted((REPO / folder).rglob("*.py")):
            found.update(os.fsencode(path) + path.read_bytes())
    return found.hexdigest()
