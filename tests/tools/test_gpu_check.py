"""`make gpu-check`, rehearsed without a GPU: each command of it is simulated, the report is real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

import train_gpt
from benchmarks import gpu_check
from tests.support.waiting import DEADLINE_SECONDS


class Card:
    """Stands for the machine: says what each command would, and keeps what it was asked."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.asked: list[Mapping[str, str]] = []

    def __call__(
        self, command: Sequence[str], variables: Mapping[str, str], seconds: float
    ) -> tuple[int, str]:
        self.asked.append(variables)
        if "pytest" in command:
            return self.answer("tests", "12 passed in 33.00s")
        # What the script would refuse is refused here too.
        config = train_gpt.Config.from_env(variables)
        if config.eval_only:
            return self.answer("score", "final_int6_exact val_loss:5.1\nlegal_ttt_exact val_loss:5.0")
        lines = [f"fused_heads:{'kernel' if config.fused_heads == '1' else 'plain'} tried: kernel error:0"]
        for step in range(config.iterations):
            ms = 60.0 if step < 15 else 90.0
            lines.append(f"timing_breakdown step:{step} batch_cpu_ms:0.10 batch_h2d_ms:0.00 "
                         f"forward_ms:{ms / 3:.2f} backward_ms:{ms / 2:.2f} optimizer_ms:{ms / 6:.2f}")
        lines.append("peak memory allocated: 36000 MiB reserved: 38000 MiB")
        return self.answer("steps", "\n".join(lines))

    def answer(self, part: str, output: str) -> tuple[int, str]:
        return (1, "out of memory") if part == self.failing else (0, output)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that there is a card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")


def test_it_runs_in_order_and_reports_what_was_predicted_beside_what_was_measured(
    simulated: None, tmp_path: Path
) -> None:
    card = Card()
    assert gpu_check.main(["--out", str(tmp_path / "check")], card) == 0
    tests, fused, plain, score = card.asked
    assert not tests and fused["FUSED_HEADS"] == fused["FUSED_MLP"] == "1" and plain["FUSED_HEADS"] == "0"
    assert score["EVAL_ONLY"] == str(tmp_path / "check" / "kernels" / "model.bin")
    report = (tmp_path / "check" / "report.md").read_text(encoding="utf-8")
    assert "NVIDIA H100 80GB HBM3" in report and report.count("| ok |") == 4
    assert "| without recurrence | 62.4 | 77.5 | 60.0 |" in report
    assert "| with recurrence | 92.1 | 111.4 | 90.0 |" in report
    assert "Peak memory: 37.7 GB" in report and "legal_ttt_exact val_loss:5.0" in report
    with pytest.raises(FileExistsError):  # nothing is overwritten
        gpu_check.main(["--out", str(tmp_path / "check")], card)


@pytest.mark.parametrize("failing", ["tests", "steps", "score"])
def test_a_part_that_fails_is_reported_and_the_others_still_run(
    failing: str, simulated: None, tmp_path: Path
) -> None:
    card = Card(failing)
    assert gpu_check.main(["--out", str(tmp_path / "check")], card) == 1
    report = (tmp_path / "check" / "report.md").read_text(encoding="utf-8")
    assert len(card.asked) == 4 and "out of memory" in report
    assert report.count("FAILED") == (2 if failing == "steps" else 1)


def test_a_command_that_takes_too_long_is_a_failure() -> None:
    status, output = gpu_check.run_command([sys.executable, "-c", "import time; time.sleep(60)"], {}, 0.5)
    assert status == 124 and output == ""
    status, output = gpu_check.run_command([sys.executable, "-c", "import os; print(os.environ['A'])"],
                                           {"A": "b"}, DEADLINE_SECONDS)  # fmt: skip
    assert (status, output) == (0, "b\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(repo: Path, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_check.py", "--out", str(tmp_path / "check")]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 2 and "no GPU" in done.stderr and not (tmp_path / "check").exists()
