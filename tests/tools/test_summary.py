"""The closing lines of a run: its scores, plain means on the same text, and where things are."""

import lzma
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import tools.__main__
from tests.support import tiny
from tests.support.processes import Ended
from tests.tools.conftest import Tool
from tools import summary


def test_ten_lines_say_what_was_reached(finished: Ended, tool: Tool) -> None:
    told = tool("summary", finished.directory).splitlines()
    assert len(told) == 10
    for name, label in summary.SCORES.items():
        score = finished.summary["losses"][name]["bits_per_byte"]
        assert f"  {label:<20}{score:.4f}" in told
    plain = {m[1].strip(): float(m[2]) for line in told if (m := re.match(r"  ([xp].{19})([\d.]+)$", line))}
    assert plain.keys() == {"xz -9", "pairs of tokens"} and all(0.5 < bits < 8 for bits in plain.values())
    assert f"{finished.summary['limits']['artifact_bytes']['value']:,} of " in told[6]
    assert "768 tokens" in told[7] and str(finished.directory) in told[8]


def test_xz_is_asked_about_the_validation_text(finished: Ended, dataset: Path) -> None:
    import train_gpt

    config = train_gpt.Config.from_env({"CONFIG": str(finished.directory / "config.env")})
    validation = summary.first_tokens(train_gpt.open_shards(f"{dataset}/fineweb_val_0*.bin"), 10**9)
    text = summary.text_of(validation, config)
    documents = "".join(tiny.documents())
    assert len(text) > 1000 and text.decode()[:40] in documents
    plain = summary.plain_means(finished.directory / "config.env", finished.summary)
    scored = summary.text_of(validation[:1001], config)
    assert plain["xz -9"] == 8 * len(lzma.compress(scored, preset=9)) / finished.summary["data"]["val_bytes"]


def test_pairs_of_tokens_cost_what_a_count_by_hand_says() -> None:
    training, validation = np.array([1, 2, 3, 1, 2, 2], np.uint16), np.array([1, 2, 0], np.uint16)
    frequency = {2: 4 / 10, 0: 1 / 10}  # 4 ids: each once more than it occurs
    m = summary.PRIOR_TOKENS
    after_1 = (2 + m * frequency[2]) / (2 + m)
    after_2 = (0 + m * frequency[0]) / (3 + m)
    assert summary.bits_of_pairs(training, validation, 4) == pytest.approx(
        -math.log2(after_1) - math.log2(after_2)
    )
    random = np.random.default_rng(0)
    training = random.integers(0, 8, 500).astype(np.uint16)
    odds = [2 ** -summary.bits_of_pairs(training, np.array([3, b], np.uint16), 8) for b in range(8)]
    before_the_last = abs(sum(odds) - 1)  # the last token of all has no follower
    assert before_the_last < 1 / (np.bincount(training)[3] + summary.PRIOR_TOKENS)


def test_what_is_missing_is_told(finished: Ended, tmp_path: Path, tool: Tool) -> None:
    copy = Path(shutil.copytree(finished.directory, tmp_path / "run"))
    settings = (copy / "config.env").read_text("utf-8")
    (copy / "config.env").write_text(re.sub(r"^DATA_PATH=.*", "DATA_PATH=/gone", settings, flags=re.M))
    told = tool("summary", copy)
    assert told.count("not known: no data at") == 2 and "round trip" in told
    assert "not a run directory" in tool("summary", tmp_path, status=2)


@pytest.mark.parametrize(("val_bpb", "ahead"), [(1.0, 0), (1.0611, 1), (1.0612, 1), (2.0, 42)])
def test_a_score_of_the_challenge_s_text_has_its_place(val_bpb: float, ahead: int) -> None:
    assert f" {ahead} of 42 records" in summary.place(val_bpb, 151_080_891)
    assert summary.place(val_bpb, 76_606) == ""


def test_a_python_without_the_packages_is_told_which_has_them(
    monkeypatch: pytest.MonkeyPatch, tool: Tool, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)  # as where it is not installed
    for module in ("tools.summary", "train_gpt"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(tools.__main__, "MADE_BY_MAKE", tmp_path / "python")
    message = tool("summary", "runs/x", status=2)
    assert f"{sys.executable} has no numpy; `make demo` makes an environment" in message
    (tmp_path / "python").touch()
    assert f"{tmp_path / 'python'} -m tools" in tool("summary", "runs/x", status=2)
