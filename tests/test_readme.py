"""The README says what is so: its table is generated, its links and commands exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from records import settings_table


@pytest.fixture(scope="module")
def readme(repo: Path) -> str:
    return (repo / "README.md").read_text(encoding="utf-8")


def test_the_table_of_settings_is_fresh(readme: str) -> None:
    assert settings_table.with_table(readme) == readme, "run `make docs`"


def test_every_linked_file_exists(readme: str, repo: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#][^)]*)\)", readme) if "://" not in link]
    assert links and [link for link in links if not (repo / link.split("#")[0]).exists()] == []


def test_every_make_target_and_config_exists(readme: str, repo: Path) -> None:
    makefile = (repo / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for config in re.findall(r"`(\w+\.env)`", readme):
        assert (repo / "records" / "configs" / config).is_file() or config == "config.env", config


def test_the_results_follow_from_the_record(readme: str, repo: Path) -> None:
    summaries = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in (repo / "records" / "track_cpu_demo").glob("*/summary_seed*.json")
    ]
    assert len(summaries) == 3
    for name in ("roundtrip", "sliding_window", "legal_ttt"):
        scores = [summary["losses"][name]["bits_per_byte"] for summary in summaries]
        assert f"**{sum(scores) / 3:.4f}**" in readme, name
    most = max(summary["limits"]["artifact_bytes"]["value"] for summary in summaries)
    assert f"{most:,} bytes" in readme


def test_every_benchmark_that_make_starts_exists(repo: Path) -> None:
    makefile = (repo / "Makefile").read_text(encoding="utf-8")
    listed = re.findall(r"for bench in ([a-z ]+);", makefile)
    names = [*listed[0].split(), *re.findall(r"benchmarks/(\w+)\.py", makefile)]
    assert "kernels" in names and [n for n in names if not (repo / "benchmarks" / f"{n}.py").is_file()] == []
