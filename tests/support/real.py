"""Real FineWeb text, where the fixture `shared_data` has found it."""

import itertools
import json
from pathlib import Path


def real_texts(shared_data: Path, first: int, stop: int) -> list[str]:
    """Some of the documents of the official validation set, and of those that follow it."""
    with open(shared_data / "docs_selected.jsonl", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in itertools.islice(lines, first, stop)]
