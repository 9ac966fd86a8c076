"""The pages lead somewhere: every link has its target, every command its program, every setting its name."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.__main__ import VERBS, build_parser
from train_gpt import Config

REPO = Path(__file__).parents[1]
PAGES = sorted(REPO.glob("*.md")) + sorted(
    page for folder in ("benchmarks", "configs", "data", "docs", "records", "tests", "tools")
    for page in (REPO / folder).rglob("*.md")
)
HISTORY = REPO / "CHANGELOG.md"  # it may name what is gone
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
COMMAND = re.compile(r"(?:[A-Z_]+=\S* )*(?:make|python|torchrun|pytest)(?: |$)")


class Command(NamedTuple):
    """A command and the page that gives it."""

    text: str
    page: str


def commands() -> list[Command]:
    """All of them, from blocks of code and from code within sentences."""
    found = []
    for page in PAGES:
        if page == HISTORY:
            continue
        text = page.read_text("utf-8")
        blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for line in [*lines, *(" ".join(span.split()) for span in spans)]:
            if COMMAND.match(line):
                command = re.split(r"\s{2,}#|\s#\s", line)[0].strip()
                found.append(Command(command, str(page.relative_to(REPO))))
    return found


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPO)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        if "://" not in link:
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text("utf-8")), link


def test_every_command_names_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """Targets of make, scripts, modules, verbs with options that they have, configurations and settings."""
    targets = re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text("utf-8"), re.MULTILINE)
    known = Config().as_env()
    found = commands()
    assert len(found) > 20, "no page gives commands any more?"
    for command in found:
        for config in re.findall(r"configs/\w+\.env", command.text):
            assert (REPO / config).is_file() or "NAME" in config, command
        try:
            words = shlex.split(command.text)
        except ValueError:
            continue  # a form with … in the place of quotes
        while "=" in words[0]:
            name = words.pop(0).partition("=")[0]
            if "train_gpt.py" in command.text:
                assert name in known or name in ("CONFIG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"), command
        program, *options = words
        if program == "make" and options:
            assert options[0] in targets or not re.fullmatch("[a-z-]+", options[0]), command
        for script in re.findall(r"(?:^|\s)((?:data|benchmarks|tests|tools)/[\w/]+\.py)", command.text):
            assert (REPO / script).is_file(), command
        if program == "python" and options[:2] == ["-m", "tools"] and len(options) > 3:
            assert options[2] in VERBS, command
            if not {"…", "...", "VERB"} & set(options):
                build_parser(options[2:]).parse_args(options[2:])  # exits where an option does not exist


def in_a_cell(pattern: str, cell: str) -> float:
    """The number of a cell that the pattern finds; 0 where there is none."""
    found = re.search(pattern, cell.strip(" *"))
    return float(found[1]) if found else 0.0


def test_the_estimate_is_the_sum_of_its_rows() -> None:
    """Each column of docs/design.md, in thousandths; the half-widths of the first add up as squares."""
    text = (REPO / "docs/design.md").read_text("utf-8").split("## What to expect")[1].split("\n## ")[0]
    rows = [line.split("|") for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)[2:]]
    for column in (2, 3, 4, 5):
        *effects, total = [in_a_cell(r"^([+-]?\d+\.\d+)", row[column]) for row in rows]
        *half_widths, whole = [in_a_cell(r"± (\d+\.\d+)", row[column]) for row in rows]
        assert len(effects) > 5 and sum(effects) / 1000 == pytest.approx(total, abs=5e-5)
        assert sum(one**2 for one in half_widths) ** 0.5 / 1000 == pytest.approx(whole, abs=5e-5)
        assert column > 2 or whole > 0


def test_every_torch_that_is_promised_is_traced() -> None:
    """The bounds in requirements.txt are the versions of `make test-torch`."""
    requirements = (REPO / "requirements.txt").read_text("utf-8")
    (bounds,) = re.findall(r"^torch>=2\.(\d+),<2\.(\d+)$", requirements, re.MULTILINE)
    makefile = (REPO / "Makefile").read_text("utf-8")
    variables = dict(re.findall(r"^(TORCH_\w+) [?:]= (.+)$", makefile, re.MULTILINE))
    traced = variables["TORCH_VERSIONS"].split()
    promised = [f"2.{minor}" for minor in range(*map(int, bounds))]
    assert [version.rpartition(".")[0] for version in traced] == promised
    assert variables["TORCH_DEFAULT"] in traced
