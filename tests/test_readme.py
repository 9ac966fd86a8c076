"""The README says what is so: its table is generated, its links and commands exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import Ended, Lab, train_losses
from tools import docs
from tools.markdown import refresh
from tools.runs.folder import Folder
from tools.runs.rules import ARTIFACT_BYTES_MAX
from train_gpt import Config, visit_order


@pytest.fixture(scope="module")
def readme(repo: Path) -> str:
    return (repo / "README.md").read_text(encoding="utf-8")


def test_every_generated_block_is_fresh() -> None:
    # Not the patch: `git apply` finds lines that have moved, and then it need not be numbered anew.
    blocks = [block for block in docs.all_blocks() if block.begin != docs.TECHNIQUE_BEGIN]
    stale = [block.begin for block in blocks if refresh(block, check=True)]
    assert stale == [], "run `make docs`"


def test_links_targets_and_configs_exist(readme: str, repo: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#][^)]*)\)", readme) if "://" not in link]
    assert links and [link for link in links if not (repo / link.split("#")[0]).exists()] == []
    makefile = (repo / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for config in re.findall(r"`(\w+\.env)`", readme):
        assert (repo / "configs" / config).is_file() or config == "config.env", config


def test_every_torch_that_is_promised_is_traced(readme: str, repo: Path) -> None:
    """requirements.txt, the Makefile's versions and its default, and what the README says was traced."""
    requirements = (repo / "requirements.txt").read_text(encoding="utf-8")
    (bounds,) = re.findall(r"^torch>=2\.(\d+),<2\.(\d+)$", requirements, re.MULTILINE)
    makefile = (repo / "Makefile").read_text(encoding="utf-8")
    variables = dict(re.findall(r"^(TORCH_\w+) [?:]= (.+)$", makefile, re.MULTILINE))
    traced = variables["TORCH_VERSIONS"].split()
    promised = [f"2.{minor}" for minor in range(*map(int, bounds))]
    assert [version.rpartition(".")[0] for version in traced] == promised
    assert variables["TORCH_DEFAULT"] in traced
    assert f"Traced: torch {', '.join(traced[:-1])} and {traced[-1]}." in readme


def test_figures_and_log_lines_are_of_the_records(readme: str, repo: Path) -> None:
    """Numbers with three decimals or thousands; those in code are settings and log lines, checked apart."""
    prose = re.sub(r"```.*?```|`[^`]*`|arXiv [0-9.]+", "", readme, flags=re.DOTALL)
    for mark in ("settings", "results"):
        begin, end = f"<!-- {mark}:begin", f"<!-- {mark}:end -->"
        prose = prose.split(begin)[0] + prose.split(end)[1]
    allowed = {f"{ARTIFACT_BYTES_MAX:,}"}
    assert set(re.findall(r"\d{1,3}(?:,\d{3})+|\d+\.\d{3,}", prose)) <= allowed
    (line,) = re.findall(r"^step:\d+/.+$", readme, re.MULTILINE)
    logs = (repo / "records").glob("track_*/*/train_seed*.log")
    assert any(line in log.read_text(encoding="utf-8").splitlines() for log in logs)


def test_a_row_of_results_is_the_mean_of_its_summaries(repo: Path) -> None:
    folder = max((repo / "records" / "track_cpu_demo").glob("*_*"))
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("summary_seed*.json")]
    cells = docs.result_row(Folder(folder))
    row = dict(zip(docs.RESULT_COLUMNS, cells, strict=True))
    assert len(summaries) == 3 == int(row["seeds"])
    for name, column in docs.SCORES.items():
        scores = [summary["losses"][name]["bits_per_byte"] for summary in summaries]
        mean = sum(scores) / 3
        spread = (sum((score - mean) ** 2 for score in scores) / 2) ** 0.5
        assert row[column] == f"{mean:.4f} ± {spread:.4f}", name
    most = max(summary["limits"]["artifact_bytes"]["value"] for summary in summaries)
    assert row["code and weights"] == f"{most:,}"


def test_hunks_are_numbered_by_where_their_lines_stand(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\nfour\nfive\nsame\nsame\n")
    first = "@@ -7,2 +7,3 @@\n one\n+new\n two\n"
    second = "@@ -9,2 +9,2 @@\n-four\n+FOUR\n five\n"
    twice = "@@ -1 +1 @@\n-same\n+other\n"
    added = "--- /dev/null\n+++ b/b.txt\n@@ -0,0 +1,1 @@\n+text\n```"
    patch = docs.numbered(f"```diff\n--- a/a.txt\n+++ b/a.txt\n{first}{second}{twice}{added}", tmp_path)
    assert re.findall("^@@.*@@$", patch, re.M) == [
        "@@ -1,2 +1,3 @@", "@@ -4,2 +5,2 @@", "@@ -1 +1 @@", "@@ -0,0 +1,1 @@",
    ]  # fmt: skip


def test_the_model_that_is_drawn_is_the_default(readme: str) -> None:
    config = Config.from_env({})
    drawn = []
    for half in ("encoder", "decoder"):
        (layers,) = re.findall(rf"^{half} +layers ([0-9 ]+)", readme, re.MULTILINE)
        drawn.append([int(layer) for layer in layers.split()])
    assert tuple(drawn) == visit_order(config, looping=True)
    first, last, passes = config.loop_start, config.loop_end, {2: "three"}[config.num_loops]
    assert f"layers {first} to {last} run {passes} times" in readme
    assert f"once {config.enable_looping_at:.0%} of".replace("%", " %") in readme
    assert f"from layer {config.parallel_start_layer} on there are two lanes" in readme


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_says_that_a_python_is_too_old_before_it_makes_anything(repo: Path, tmp_path: Path) -> None:
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(repo / name, tmp_path)
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    command = ["make", "demo", f"PYTHON={old}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and f"{old} is no Python 3.10 or later" in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_the_technique_of_the_readme_works_and_its_off_is_off(
    readme: str, repo: Path, tmp_path: Path, lab: Lab, finished: Ended
) -> None:
    if "z_loss" in (repo / "train_gpt.py").read_text("utf-8"):
        pytest.skip("it is in the script already")
    patch = readme.split("<!-- technique:begin -->\n```diff\n")[1].split("```\n<!-- technique:end -->")[0]
    shutil.copy(repo / "train_gpt.py", tmp_path)
    (tmp_path / "configs").mkdir()
    shutil.copy(repo / "configs/README.md", tmp_path / "configs")
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, text=True, check=True)
    script = tmp_path / "train_gpt.py"
    off = lab.elsewhere("off").succeed(script=script, EVAL_STRIDE=0, TTT_ENABLED=0)
    assert train_losses(off) == train_losses(finished)
    on = lab.elsewhere("on").succeed(script=script, EVAL_STRIDE=0, TTT_ENABLED=0, Z_LOSS=0.01)
    assert all(train_losses(on)[step] > loss for step, loss in train_losses(off).items())
