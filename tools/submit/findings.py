"""What an audit says: findings with a level under the rules as written and as practiced."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.IntEnum):
    """FAIL: a rule is certainly broken. WARN: contested, or cannot be decided here. INFO: worth knowing."""

    INFO = 0
    WARN = 1
    FAIL = 2


class Mode(str, enum.Enum):
    """Which reading of the rules decides: the written one, the practiced one, or only what both agree on."""

    AGREED = "agreed"
    STRICT = "strict"
    CONVENTION = "convention"


@dataclass(frozen=True)
class Finding:
    """`where` is file:line, `remedy` what to do; the two levels differ where the rule is contested."""

    check: str
    text: str
    where: str
    remedy: str
    written: Level
    practiced: Level

    def level(self, mode: Mode) -> Level:
        """Level under `mode`; without a chosen reading a contested point is a warning."""
        if mode is Mode.STRICT:
            return self.written
        if mode is Mode.CONVENTION:
            return self.practiced
        return self.written if self.written == self.practiced else Level.WARN

    def as_json(self, mode: Mode) -> dict[str, str]:
        return {
            "check": self.check,
            "level": self.level(mode).name,
            "text": self.text,
            "where": self.where,
            "remedy": self.remedy,
        }


def fail(check: str, text: str, where: str, remedy: str) -> Finding:
    return Finding(check, text, where, remedy, Level.FAIL, Level.FAIL)


def warn(check: str, text: str, where: str, remedy: str) -> Finding:
    return Finding(check, text, where, remedy, Level.WARN, Level.WARN)


def info(check: str, text: str, where: str, remedy: str = "") -> Finding:
    return Finding(check, text, where, remedy, Level.INFO, Level.INFO)


def contested(check: str, text: str, where: str, remedy: str) -> Finding:
    """Against the rule as written, accepted in practice; the text names the thread."""
    return Finding(check, text, where, remedy, Level.FAIL, Level.INFO)
