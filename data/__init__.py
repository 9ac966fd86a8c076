"""Data tools: `sample.py` (offline sample), `fineweb.py` (download), `export.py` (your own documents)."""
