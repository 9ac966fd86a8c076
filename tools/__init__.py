"""What packs runs into folders nobody can doubt, audits them, proves scores legal, compares and draws."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
RECORDS = REPO / "records"
