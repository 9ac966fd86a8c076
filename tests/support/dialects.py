"""Logs in the two dialects of the public scripts, and ours.

Ours has upstream's lines with more fields at their ends, and lines between them that are no results.
"""

from pathlib import Path

LOGS = Path(__file__).with_name("logs")
DIALECT_A = (LOGS / "public_a.log").read_text(encoding="utf-8")
DIALECT_B = (LOGS / "public_b.log").read_text(encoding="utf-8")
OURS = (LOGS / "ours.log").read_text(encoding="utf-8")
