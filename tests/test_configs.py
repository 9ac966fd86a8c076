"""configs/README.md says where each default comes from: what it says of them is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data.fineweb import VARIANTS
from train_gpt import PUBLISHED_DATA, Config, TrainingSettings


@pytest.fixture(scope="module")
def page(repo: Path) -> str:
    return (repo / "configs" / "README.md").read_text(encoding="utf-8")


def deciding_settings() -> set[str]:
    """Settings that decide the result of a run, not only where and how fast it runs."""
    names = list(Config().as_env())
    return {*TrainingSettings().as_env(), *names[: names.index("DATA_PATH")], "DATA_PATH", "TOKENIZER_PATH"}


def test_every_deciding_default_stands_in_the_table_once_with_its_value(page: str) -> None:
    table = page.split("## Where each default comes from")[1].split("\n## ")[0]
    stated: dict[str, str] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for name, value in re.findall(r"`([A-Z0-9_]+)=([^`]*)`", cells[0] if cells else ""):
            assert name not in stated, f"{name} stands there twice"
            assert len(cells) == 3 and all(cells), f"{name}: no source or no effect"
            stated[name] = value
    defaults = {name: value for name, value in Config().as_env().items() if name in deciding_settings()}
    assert stated == defaults


def test_every_configuration_is_listed_and_exists(page: str, repo: Path) -> None:
    listed = re.findall(r"`(\w+\.env)`", page.split("## ")[0])
    assert sorted(listed) == sorted(path.name for path in (repo / "configs").glob("*.env"))


def test_the_public_data_are_those_that_the_tool_fetches(repo: Path) -> None:
    assert {variant.dataset: name for name, variant in VARIANTS.items()} == PUBLISHED_DATA
    plain = Config.from_env({"CONFIG": str(repo / "configs/sp8192.env")})
    for config, name in [(Config(), "caseops"), (plain, "sp8192")]:
        assert config.data_path == f"data/datasets/{VARIANTS[name].dataset}"
        assert config.tokenizer_path == f"data/tokenizers/{VARIANTS[name].tokenizer}"
