"""The pages are true: links lead somewhere, what is named exists, sums are right."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import ttt
from tools import __main__ as tools
from train_gpt import Config, visit_order

REPO = Path(__file__).parents[1]
PAGES = [REPO / "README.md", *sorted(REPO.glob("docs/*.md"))]
OTHER_PAGES = [REPO / name for name in ("configs/README.md", "data/README.md", "records/README.md",
                                        "benchmarks/RESULTS.md", "benchmarks/results/h100/README.md",
                                        "tools/prove/adapters/README.md", "CHANGELOG.md")]  # fmt: skip
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def page(name: str) -> str:
    return (REPO / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def readme() -> str:
    return page("README.md")


def anchors(text: str) -> dict[str, str]:
    """The sections of a page by the anchors that GitHub gives their headings."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in parts[1::2]]
    return dict(zip(slugs, parts[2::2], strict=True))


@pytest.mark.parametrize("path", [*PAGES, *OTHER_PAGES], ids=lambda path: str(path.relative_to(REPO)))
def test_every_link_leads_somewhere(path: Path) -> None:
    for link in LINK.findall(CODE.sub("", path.read_text(encoding="utf-8"))):
        file, _, anchor = link.partition("#")
        target = (path.parent / file) if file else path
        if "://" not in link:
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def test_every_make_target_and_config_exists(repo: Path) -> None:
    readme = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    makefile = (repo / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for config in re.findall(r"`(\w+\.env)`", readme):
        assert (repo / "configs" / config).is_file() or config == "config.env", config


def test_every_torch_that_is_promised_is_traced(repo: Path) -> None:
    """requirements.txt, the Makefile's versions and its default, and what the page says was traced."""
    requirements = (repo / "requirements.txt").read_text(encoding="utf-8")
    (bounds,) = re.findall(r"^torch>=2\.(\d+),<2\.(\d+)$", requirements, re.MULTILINE)
    makefile = (repo / "Makefile").read_text(encoding="utf-8")
    variables = dict(re.findall(r"^(TORCH_\w+) [?:]= (.+)$", makefile, re.MULTILINE))
    traced = variables["TORCH_VERSIONS"].split()
    promised = [f"2.{minor}" for minor in range(*map(int, bounds))]
    assert [version.rpartition(".")[0] for version in traced] == promised
    assert variables["TORCH_DEFAULT"] in traced
    assert f"Traced: torch {', '.join(traced[:-1])} and {traced[-1]}." in page("docs/running.md")


def test_the_costs_of_test_time_training_are_what_its_program_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["ttt.py", "cost"])
    ttt.main()
    counted = capsys.readouterr().out
    text = " ".join(page("docs/test_time_training.md").split())
    forward, backward = re.findall(r"LoRA \| ([\d.]+) \| ([\d.]+)", counted)[0]
    assert f"{float(forward):.0f} tokens pass forward and {float(backward):.0f} backward" in text
    (windows,) = re.findall(r"sliding window \| ([\d.]+)", counted)
    assert f"need {float(windows):.0f} forward" in text


def test_the_audit_that_is_shown_is_what_check_prints(
    readme: str, repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo)
    (folder,) = re.findall(r"^python -m tools check (\S+)$", readme, re.MULTILINE)
    assert tools.main(["check", folder]) == 0
    printed = capsys.readouterr().out.splitlines()
    (shown,) = re.findall(rf"```text\n({re.escape(folder)}\n.*?)```", readme, re.DOTALL)
    for line in shown.splitlines():
        assert any(one.startswith(line.removesuffix("…").rstrip()) for one in printed), line


def in_a_cell(pattern: str, cell: str) -> float:
    """The number of a cell that the pattern finds; 0 where there is none."""
    found = re.search(pattern, cell.strip(" *"))
    return float(found[1]) if found else 0.0


def test_the_estimate_is_the_sum_of_its_rows() -> None:
    """Each column of docs/estimate.md, in thousandths; its half-widths add up as squares."""
    text = page("docs/estimate.md").split("## The estimate")[1].split("\n## ")[0]
    rows = [line.split("|") for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)[2:]]
    for column in (2, 3):
        *effects, total = [in_a_cell(r"^([+-]?\d+\.\d+)", row[column]) for row in rows]
        *half_widths, whole = [in_a_cell(r"± (\d+\.\d+)", row[column]) for row in rows]
        assert len(effects) > 5 and sum(effects) / 1000 == pytest.approx(total, abs=5e-5)
        assert sum(one**2 for one in half_widths) ** 0.5 / 1000 == pytest.approx(whole, abs=5e-5)


def test_the_log_line_that_is_explained_is_from_a_log(repo: Path) -> None:
    (line,) = re.findall(r"^step:\d+/.+$", page("docs/logs.md"), re.MULTILINE)
    logs = (repo / "records").glob("track_*/*/train_seed*.log")
    assert any(line in log.read_text(encoding="utf-8").splitlines() for log in logs)


def test_the_model_that_is_drawn_is_the_default() -> None:
    readme = page("docs/model.md")
    config = Config.from_env({})
    drawn = []
    for half in ("encoder", "decoder"):
        (layers,) = re.findall(rf"^{half} +layers ([0-9 ]+)", readme, re.MULTILINE)
        drawn.append([int(layer) for layer in layers.split()])
    order = visit_order(config, looping=True)
    assert drawn == [order[: len(order) // 2], order[len(order) // 2 :]]
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
