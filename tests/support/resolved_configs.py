"""The settings that every file of configs/ resolves to, pinned: no later default may drift under an ancestor.

    python -m tests.support.resolved_configs      # writes resolved_configs.json beside this: read its diff

A file names only what differs from the defaults. Who changes a default on purpose names the old value in the
files of the systems that need it, and writes the JSON anew only where a file itself is to change.
"""

import json
from pathlib import Path

from train_gpt import Config

PINNED_FILE = Path(__file__).with_name("resolved_configs.json")
CONFIGS = Path(__file__).parents[2] / "configs"


def resolved_configs() -> dict[str, dict[str, str]]:
    """All settings of each configuration, by the name of its file."""
    paths = sorted(CONFIGS.glob("*.env"))
    return {path.name: Config.from_env({"CONFIG": str(path)}).as_env() for path in paths}


def pinned_configs() -> dict[str, dict[str, str]]:
    """The stored settings of each configuration."""
    return dict(json.loads(PINNED_FILE.read_text(encoding="utf-8")))


def main() -> None:
    """Write the JSON, one configuration a line."""
    lines = [f" {json.dumps(name)}: {json.dumps(settings)}" for name, settings in resolved_configs().items()]
    PINNED_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(lines)} configurations: {PINNED_FILE}")


if __name__ == "__main__":
    main()
