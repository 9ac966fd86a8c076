"""Run directories that the tests generate read as those of train_gpt.py."""

from __future__ import annotations

from pathlib import Path

from tests.support.runs import MODEL_BYTES, STEPS, TOKENS, make_run
from tools.runs.logs import read_log
from tools.runs.runs import RunDirectory


def test_generated_run_reads_as_a_finished_run(tmp_path: Path) -> None:
    directory = RunDirectory(make_run(tmp_path / "a", 42))
    log = read_log(tmp_path / "a" / "log.txt")
    assert log.headline is not None and log.headline.label == "legal_ttt_exact"
    assert (directory.seed, log.seed, log.steps) == (42, 42, STEPS)
    assert log.headline.scored_tokens == TOKENS and log.headline.eval_seconds == 4.321
    assert log.model_bytes is not None and log.model_bytes.bytes == MODEL_BYTES
