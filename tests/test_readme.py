"""The pages are true: tables are generated, links lead somewhere, figures stand in the sources they link."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import ttt
from benchmarks.gpu_model import memory, subject
from tools import __main__ as tools
from tools import docs
from tools.markdown import refresh
from tools.runs.folder import Folder
from tools.runs.rules import ARTIFACT_BYTES_MAX
from train_gpt import Config, visit_order

REPO = Path(__file__).parents[1]
PAGES = [REPO / "README.md", *sorted(REPO.glob("docs/*.md"))]
OTHER_PAGES = [REPO / name for name in ("configs/README.md", "data/README.md", "records/README.md",
                                        "benchmarks/RESULTS.md", "benchmarks/gpu_model/README.md",
                                        "CHANGELOG.md")]  # fmt: skip
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


def test_every_generated_block_is_fresh() -> None:
    # Not the patch: `git apply` finds lines that have moved, and then it need not be numbered anew.
    blocks = [block for block in docs.all_blocks() if block.begin != docs.TECHNIQUE_BEGIN]
    stale = [block.begin for block in blocks if refresh(block, check=True)]
    assert stale == [], "run `make docs`"


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


FIGURE = re.compile(r"(?<![\w.#:-])[-+−]?\d{1,3}(?:,\d{3})*(?:\.\d+)?(?![\w.:]*\d|\.[a-z])")
VERSIONS = re.compile(r"arXiv [\d.]+|(?:torch|Python|version|up to) \d\.[\d.]+(?:(?:,| and| to) \d\.[\d.]+)*")
PUBLIC = r"#\d|nanochat|record 72|[Mm]odelled|[Ee]stimate"
PUBLISHED = ("estimate", "test_time_training")


def figures(text: str) -> list[str]:
    """Numbers with a decimal point or thousands, but for those in code, versions and addresses."""
    found = FIGURE.findall(VERSIONS.sub(" ", re.sub(r"\]\([^)]*\)", " ", text)))
    return [figure for figure in found if "." in figure or "," in figure]


def values(text: str) -> list[float]:
    return [abs(float(number.replace(",", ""))) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_figure_stands_in_a_source_that_its_section_links(path: Path) -> None:
    """Numbers with decimals or thousands in prose and tables, as rounded there.

    In docs/ a line may name the public pull request that a figure is of, or say that it is modelled; four
    decimals are ours, except on pages of PUBLISHED.
    """
    told = re.compile(PUBLIC if path.parent.name == "docs" else r"(?!)")
    text = CODE.sub(" ", path.read_text(encoding="utf-8"))
    text = re.sub(r"<!-- (\w+):begin.*?\1:end -->", "", text, flags=re.DOTALL)
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        known = [float(ARTIFACT_BYTES_MAX)]
        for link in LINK.findall(section):
            file, _, anchor = link.partition("#")
            target = path.parent / file
            if file and target.suffix in (".md", ".json", ".env", ".txt"):
                source = target.read_text(encoding="utf-8")
                known += values(anchors(source)[anchor] if anchor else source)
        for line in section.splitlines():
            for figure in figures(line):
                digits = len(figure.partition(".")[2])
                value = abs(float(figure.replace(",", "").replace("−", "-")))
                public = told.search(line) and (digits < 4 or path.stem in PUBLISHED)
                assert public or any(round(one, digits) == value for one in known), f"{figure} in: {line}"


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
    for run in ttt.LOGGED:
        logged = ", ".join(f"{seconds:.0f}" for seconds in run.seconds)
        assert re.search(rf"{run.name} \|[^|]+\| {logged} \|", text)


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


def test_the_memory_of_smaller_micro_batches_is_what_the_formula_gives() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \|$", page("docs/running.md"), re.MULTILINE)
    default = Config.from_env({})
    for tokens, gigabytes, batches in rows:
        config = subject.config("configs/h100_1gpu.env", [f"MICRO_BATCH_TOKENS={tokens}"])
        assert gigabytes == f"{memory.predicted_bytes(config, 1) / 1e9:.0f}"
        assert int(tokens) * int(batches) == default.micro_batch_tokens * default.gptq_calibration_batches
    assert len(rows) > 3


def test_the_log_line_that_is_explained_is_from_a_log(repo: Path) -> None:
    (line,) = re.findall(r"^step:\d+/.+$", page("docs/logs.md"), re.MULTILINE)
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
