"""Tools that pack runs into folders, audit them, prove scores legal, compare and draw."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
RECORDS = REPO / "records"
