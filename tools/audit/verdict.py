"""The verdict of an audit, and the hashes that tie it to what was audited."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tools import REPO
from tools.audit.broken import Broken, NotChecked

PROVEN, REFUTED, NOT_CHECKED = range(3)  # exit statuses


@dataclass
class Verdict:
    """What an audit has found out, as it is printed and stored."""

    subject: dict[str, Any]  # what was audited, by hashes
    only: list[str] = field(default_factory=list)  # the laws that were asked; none: all
    walls: str = ""
    passed: list[dict[str, str]] = field(default_factory=list)
    refuted: str = ""
    not_checked: str = ""
    left_out: list[str] = field(default_factory=list)  # settings of the script's own, by lab
    not_run: list[str] = field(default_factory=list)  # branches
    largest: str = ""

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
                "walls": self.walls, "passed": self.passed, "left_out": self.left_out,
                "not_run": self.not_run, "largest": self.largest}

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Write down why the experiments inside ended early, if they did."""
        before = fingerprint()
        try:
            yield
        except Broken as error:
            self.refuted = str(error)
        except NotChecked as error:
            self.not_checked = str(error)
        except (KeyError, TypeError, ValueError, OSError) as error:  # files that our script would not write
            self.not_checked = f"its files cannot be read: {type(error).__name__}: {error}"
        if fingerprint() != before:
            self.refuted = "walls: the auditor's own files have changed"

    def note(self, law: str, text: str) -> None:
        """A law held."""
        self.passed.append({"law": law, "text": text})


def fingerprint() -> str:
    """SHA-256 of the auditor's own files."""
    found = hashlib.sha256()
    for folder in ("tools", "data"):
        for path in sorted((REPO / folder).rglob("*.py")):
            found.update(os.fsencode(path) + path.read_bytes())
    return found.hexdigest()
