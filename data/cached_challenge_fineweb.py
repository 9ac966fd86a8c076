"""The challenge's name for `data/fineweb.py`: so pasted data commands of its READMEs work.

    python data/cached_challenge_fineweb.py --variant sp1024 --train-shards 10

The variable MATCHED_FINEWEB_REPO_ID names another repository, as there. --skip-manifest has no effect: the
manifest here is made of what arrives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data import fineweb


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Fetch the data that these arguments of the challenge's program name; returns the exit status."""
    ours = [word for word in arguments if word != "--skip-manifest"]
    if environ.get("MATCHED_FINEWEB_REPO_ID"):
        ours += ["--repo", environ["MATCHED_FINEWEB_REPO_ID"]]
    return fineweb.main(ours)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
