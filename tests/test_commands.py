"""Every command that a page gives is run by a test, or says why none can."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.__main__ import VERBS, build_parser, main
from tools.compare.rows import read_lines

REPO = Path(__file__).parents[1]
READMES = ["README.md", "data/README.md", "records/README.md", "tools/prove/adapters/README.md",
           *(f"docs/{path.name}" for path in REPO.glob("docs/*.md"))]  # fmt: skip
SETTING = r"[A-Z_]+=\S*"
COMMAND = re.compile(rf"(?:{SETTING} )*(?:make|python|torchrun|pip|pytest)(?: |$)|RESUME=\S+$|EVAL_ONLY=\S+$")

FIRST_HOUR = "test_first_hour.py::test_the_first_hour"
MENDED = "test_a_damaged_sample_is_reported_and_a_fresh_process_mends_it_with_the_same_bytes"
COSTS = "test_the_costs_of_test_time_training_are_what_its_program_counts"
REPLAYED = "test_a_run_is_repeated_document_by_document_and_whatever_was_touched_differs"
TORCHRUN = "script/test_distributed.py::test_torchrun_starts_it_and_shows_the_error_of_one_rank"

# What a command contains, and the test that runs it: the first row that fits counts.
RUN_BY = [
    ("make demo", FIRST_HOUR), ("make seeds", FIRST_HOUR),
    ("make test-torch", "test_commands.py::test_a_torch_that_fails_is_named_and_the_others_are_traced"),
    ("make test", FIRST_HOUR),
    ("make gpu-check", "tools/test_gpu_check.py::test_a_card_without_a_fault_passes"),
    ("benchmarks/gpu_check.py", "tools/test_gpu_check.py::test_without_a_gpu_it_says_so_and_writes_nothing"),
    ("make", FIRST_HOUR),
    ("tests/same_bits.py", "test_same_bits.py::test_equal_scripts_are_equal_and_other_weights_are_seen"),
    ("--nnodes=2", TORCHRUN),
    ("benchmarks.ttt cost", f"test_readme.py::{COSTS}"),
    ("RESUME=runs/long", "script/test_resume.py::test_a_run_stopped_twice_on_other_numbers_of_ranks"),
    ("torchrun", TORCHRUN), ("RESUME=", FIRST_HOUR), ("EVAL_ONLY=", FIRST_HOUR),
    ("TRACE_STEPS=", FIRST_HOUR),
    ("h100_1gpu.env", "tools/test_gpu_check.py::test_a_config_names_a_card_on_which_it_fits"),
    ("train_gpt.py --help", "script/test_bad_input.py::test_a_locale_that_is_not_utf_8"),
    ("data/fineweb.py", FIRST_HOUR), ("data/export.py", FIRST_HOUR),
    ("data/fuse.py", "data/test_fuse.py::test_a_dataset_is_fused_resumed_and_scored_by_the_same_bytes"),
    ("data/sample.py", f"data/test_sample.py::{MENDED}"),
    ("--adapter", "tools/test_prove.py::test_an_adapter_s_script_is_judged_by_what_it_records"),
    ("tools prove --replay", f"tools/test_prove.py::{REPLAYED}"),
    ("--self-test", "tools/test_prove.py::test_every_mutant_is_killed_and_no_legal_change_is"),
    ("tools prove", FIRST_HOUR), ("tools pack", FIRST_HOUR), ("tools check", FIRST_HOUR),
    ("tools diff", FIRST_HOUR),
    ("tools runs", "tools/test_sweep.py::test_runs_is_one_table"),
    ("tools sweep", "tools/test_sweep.py::test_a_sweep_killed_twice_ends_as_any_other"),
    ("tools export", "tools/test_plot.py::test_steps_are_exported"),
    ("tools try", "tools/test_try.py::test_a_planted_change_gets_its_verdict"),
    ("tools plot", FIRST_HOUR), ("tools timeline", FIRST_HOUR), ("tools generate", FIRST_HOUR),
    ("tools summary", FIRST_HOUR),
    ("tools.prove.seeds", "tools/test_prove.py::test_a_table_of_seeds_has_the_noise_of_every_check"),
    ("tests.tools.damage", "tools/test_check.py::test_damaged_folders_are_judged"),
]  # fmt: skip
# What no test of this repository runs, and why.
NOT_RUN = {
    "benchmarks/loader.py --turns": "it compares times, and ends where losses or hashes differ",
    "pip install": "it asks the network for packages",
}


class Command(NamedTuple):
    """A command and the file that gives it."""

    text: str
    file: str


def commands(repo: Path) -> list[Command]:
    """All of them, from blocks of code and from code within sentences."""
    found = []
    for name in READMES:
        text = (repo / name).read_text("utf-8")
        blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for line in [*lines, *(" ".join(span.split()) for span in spans)]:
            if COMMAND.match(line):
                found.append(Command(re.split(r"\s{2,}#|\s#\s", line)[0].strip(), name))
    return found


def test_every_command_is_run_by_a_test_and_every_row_has_one(repo: Path) -> None:
    texts = [command.text for command in commands(repo)]
    assert {"make demo", "make test"} <= set(texts) and len(texts) > 40
    assert {command.file for command in commands(repo)} <= set(READMES)
    # A new command needs a row in RUN_BY, and a test that runs it.
    without = []
    for command in commands(repo):
        known = [*NOT_RUN, *(part for part, _ in RUN_BY)]
        if not any(part in command.text for part in known):
            without.append(command)
    assert without == []
    texts = [command.text for command in commands(repo)]
    for part in (*NOT_RUN, *(part for part, _ in RUN_BY)):
        assert any(part in text for text in texts), f"no README gives {part!r} any more"
    for _, test in RUN_BY:
        file, name = test.split("::")
        assert f"def {name}(" in (repo / "tests" / file).read_text("utf-8"), test


@pytest.mark.parametrize("part", [part for part, test in RUN_BY if test == FIRST_HOUR])
def test_the_first_hour_does_what_it_is_said_to(part: str, repo: Path) -> None:
    """As a line of a shell, or as a setting that such a line is given."""
    assert part in (repo / "tests" / "test_first_hour.py").read_text("utf-8")


def test_every_verb_is_given_with_options_that_it_has(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each `python -m tools` command is read by its own parser."""
    seen = set()
    for command in commands(repo):
        found = re.search(r"python -m tools (\S.*)", command.text)
        if not found or "VERB" in found[1]:
            continue
        words = shlex.split(found[1])
        seen.add(words[0])
        if len(words) > 1:
            build_parser(words).parse_args(words)  # leaves with an error where it does not fit
    assert seen <= set(VERBS) and len(seen) >= 8


def test_without_a_verb_all_of_them_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    listed = capsys.readouterr().err
    assert all(re.search(rf"^ +{verb} +\w", listed, re.MULTILINE) for verb in VERBS)


def test_a_torch_that_fails_is_named_and_the_others_are_traced(repo: Path, tmp_path: Path) -> None:
    """`make test-torch`, with programs in the place of each version's Python: they fit, and one fails."""
    for version, status in (("2.1.0", 1), ("2.2.0", 0)):
        python = tmp_path / version / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "{version} $*"\nexit {status}\n')
        python.chmod(0o755)
    settings = [f"TORCH_ENVIRONMENTS={tmp_path}", "TORCH_VERSIONS=2.1.0 2.2.0"]
    ended = subprocess.run(["make", "test-torch", *settings], cwd=repo, capture_output=True, text=True)
    assert ended.returncode != 0
    traced = re.findall(r"^(\S+) -m pytest .+test_gpu_step\.py$", ended.stdout, re.MULTILINE)
    assert traced == ["2.1.0", "2.2.0"]
    assert re.findall(r"^failed on torch (.+)$", ended.stdout, re.MULTILINE) == ["2.1.0"]


def test_several_seeds_are_a_sweep_of_one_row(repo: Path, tmp_path: Path) -> None:
    """`make seeds`, with a program in the place of Python: it ends as the sweep ends, in this folder."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\n[ "$2" = tools ] || exit 0\necho "$*"\nexit $STATUS\n')
    python.chmod(0o755)
    (tmp_path / ".ready").touch()
    for status in (0, 1):
        environ = {**os.environ, "RUNS_DIR": f"{tmp_path}/my runs", "STATUS": str(status)}
        command = ["make", "seeds", f"VENV={tmp_path}", "SEEDS=1 2", "NAME=a", "CONFIG=my settings.env"]
        ended = subprocess.run(command, cwd=repo, env=environ, capture_output=True, text=True)
        assert (ended.returncode == 0) == (status == 0) == ("pack them: " in ended.stdout), ended.stderr
        assert f"-m tools sweep {tmp_path}/my runs/a.sweep --folder {tmp_path}/my runs" in ended.stdout
    lines = read_lines(tmp_path / "my runs/a.sweep")
    assert lines == {"seeds": ["1", "2"], "a": ["CONFIG=my settings.env"]}
