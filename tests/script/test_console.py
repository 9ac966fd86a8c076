"""What a run prints reaches any console, whole; its clocks and limits are printed as they are."""

import io
import re
import sys
from pathlib import Path

import pytest
import torch

import train_gpt
from tests.support.planted import before, counted_clock, in_phase
from tests.support.processes import ROUNDED, SHORT_END, Ended, Lab

NARROW = ["ascii", "latin-1", "cp1252", "cp932", "gbk", "koi8-r"]


class Console(io.TextIOWrapper):
    """A console that knows one encoding, and what was printed on it."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    def printed(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoding", NARROW)
def test_every_line_reaches_a_console_that_knows_few_characters(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--help"])
    pages = {}
    for name in ("utf-8", encoding):
        console = Console(name)
        monkeypatch.setattr(sys, "stdout", console)
        assert train_gpt.main() == 0
        pages[name] = console.printed().splitlines()
    assert len(pages[encoding]) == len(pages["utf-8"]) > 100
    for whole, narrow in zip(pages["utf-8"], pages[encoding], strict=True):
        escaped = whole.encode(encoding, "backslashreplace").decode(encoding)
        assert narrow == escaped


@pytest.mark.parametrize("text", ["Übung-数据", "bytes \udcff of no name", "", "plain"])
@pytest.mark.parametrize("encoding", NARROW)
def test_no_character_costs_a_line(text: str, encoding: str) -> None:
    console = Console(encoding)
    train_gpt.print_line(f"before {text} after", console)
    train_gpt.print_line("next", console)
    first, second = console.printed().splitlines()
    assert first.startswith("before ") and first.endswith(" after") and second == "next"


def test_a_log_takes_a_name_that_is_no_text(tmp_path: Path) -> None:
    train_gpt.Run(train_gpt.Machine(), tmp_path).append("log.txt", "run:/data/\udce4\udcff")
    assert (tmp_path / "log.txt").read_text("utf-8") == "run:/data/\\udce4\\udcff\n"


def test_no_console_at_all_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    train_gpt.print_line("to nobody")


def test_a_whole_run_on_a_narrow_console_prints_what_its_log_has(lab: Lab) -> None:
    folder = lab.folder / "Übung-数据"
    # As Python finds it when it starts. A file that is opened without an encoding is of this locale, too.
    narrow = 'import locale; locale.setlocale(locale.LC_ALL, "C")\n'
    narrow += 'sys.stdout = open(1, "w", encoding="ascii", closefd=False)'
    ended = lab.succeed(fault=narrow, ITERATIONS=1, RUNS_DIR=folder, **SHORT_END)
    log = (folder / "run" / "log.txt").read_text("utf-8")
    assert "Übung-数据" in log
    assert ended.out == log.encode("ascii", "backslashreplace").decode("ascii")
    assert re.search(r"^run:.*\\xdcbung-\\u6570\\u636e/run$", ended.out, re.M)


# --- clocks and limits ---


def test_the_plan_says_what_a_run_will_do_and_what_makes_it_shorter(finished: Ended) -> None:
    timed = {"ITERATIONS": "7000", "MAX_WALLCLOCK_SECONDS": "60", "MAX_EVAL_SECONDS": "90"}

    def plan(**changes: str) -> str:
        return train_gpt.plan_line(train_gpt.Config.from_env({**timed, **changes}), 12345)

    whole = plan(TTT_ENABLED="1", EVAL_STRIDE="64")
    assert all(words in whole for words in ("7,000 steps", "60 s", "12,345 tokens", "90 s"))
    assert "TTT_ENABLED=0" in whole and "EVAL_STRIDE=0" in whole
    shortest = plan(TTT_ENABLED="0", EVAL_STRIDE="0")
    assert "7,000 steps" in shortest and "=0" not in shortest
    scores = plan(EVAL_ONLY=str(finished.directory / "model.bin"))
    assert "steps" not in scores and "12,345 tokens" in scores


def test_a_step_that_takes_a_cpu_hours_is_warned_of(lab: Lab, repo: Path) -> None:
    """As that of the default, which prints nothing for so long. A demo of a minute has no such line."""

    def warned(config: str = "none", device: str = "cpu", **changes: str) -> bool:
        settings = train_gpt.Config.from_env({"CONFIG": config, **changes})
        machine = train_gpt.Machine(device=torch.device(device))
        return bool(train_gpt.slow_step_warning(settings, machine))

    assert warned() and not warned(device="cuda")
    assert not warned(EVAL_ONLY="model.bin") and not warned(ITERATIONS="0")
    assert not any(warned(str(repo / "configs" / name)) for name in ("cpu_demo.env", "cpu_try.env"))
    stop = in_phase("build_model", "os._exit(0)")
    ended = lab.succeed(fault=stop, TRAIN_BATCH_TOKENS=2**36, RUNS_DIR="", RUN_ID="")
    (line,) = re.findall(r"^warning: there is no GPU.*$", ended.out, re.M)
    assert f"{2**36:,} tokens" in line and "CONFIG=configs/cpu_demo.env" in line


def test_a_limit_that_is_none_is_printed_as_none(finished: Ended) -> None:
    lines = re.findall(r"^limit:(\w+) ([\d.e-]+)(.*)$", finished.out, re.M)
    verdicts = {name: verdict for name, _, verdict in lines}
    assert verdicts["train_seconds"] == verdicts["eval_seconds"] == ", no limit"  # both are 0 here
    assert verdicts["artifact_bytes"] == " of 1000000 ok"
    limits = finished.summary["limits"]
    assert limits["train_seconds"]["limit"] == 0 and limits["train_seconds"]["ok"] is True


CLOCKS = re.compile(r"^eval_clock: scoring ([\d.]+) s, from reading the artifact ([\d.]+) s "
                    r"\(reload ([\d.]+) s, compilation ([\d.]+) s\)$", re.M)
# By a clock that counts forward passes, and four seconds for reading an artifact.
SLOW_RELOAD = counted_clock() + before("zlib.decompressobj", "now[0] += 4.0")


@pytest.mark.parametrize("scores_only", [False, True])
def test_both_clocks_of_an_evaluation_are_printed_and_recorded(
    scores_only: bool, lab: Lab, finished: Ended
) -> None:
    """A slow reload counts in one of them; scores that follow the one that ranks count in neither."""
    changes = {"EVAL_ONLY": finished.directory / "model.bin"} if scores_only else {}
    # Without test-time training, the sliding window has the headline score, and the round trip follows it.
    ended = lab.succeed(fault=SLOW_RELOAD, ITERATIONS=1, TTT_ENABLED=0, **ROUNDED, **changes)
    ((scoring, whole, reload, compilation),) = CLOCKS.findall(ended.out)
    assert (reload, compilation) == ("4.00", "0.00")
    assert float(whole) == pytest.approx(float(scoring) + 4.0)
    clocks = ended.summary["eval_clocks"]
    assert clocks["from_artifact_seconds"] == pytest.approx(clocks["scoring_seconds"] + 4.0)
    assert 0 < clocks["scoring_seconds"] == ended.summary["phases"]["eval_sliding_window"]
    assert ended.summary["phases"]["eval_roundtrip"] > 0
    assert clocks["scoring_seconds"] == ended.summary["limits"]["eval_seconds"]["value"]


# --- several nodes ---


# All ranks end together when the log of the run has begun.
END_EARLY = in_phase("build_model", "import torch.distributed; torch.distributed.barrier(); os._exit(0)")


def test_every_node_says_who_writes_the_run_and_where(lab: Lab) -> None:
    """Of four ranks on two nodes, the first of the second one speaks for it."""
    each = {rank: {"GROUP_RANK": rank // 2, "LOCAL_RANK": rank % 2} for rank in range(4)}
    ended = [rank.wait() for rank in lab.ranks(4, each=each, fault=END_EARLY)]
    assert [one.status for one in ended] == [0] * 4, [one.err for one in ended]
    directory = lab.folder / "runs" / "run"
    (said,) = re.findall(r"^nodes:2 written by rank 0 on \S+: (.*)$", ended[0].out, re.M)
    assert said == str(directory)
    assert re.search(rf"^rank 2 on \S+: .*rank 0 .* {directory} ", ended[2].out)
    assert ended[1].out == ended[3].out == ""
