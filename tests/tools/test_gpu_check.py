"""`make gpu-check`, rehearsed on a CPU that calls itself a GPU (tests/support/fake_gpu.py), with faults."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu_check
from tests.support import tiny
from tests.support.processes import Lab
from train_gpt import BOS_ID, Config

CARD = "NVIDIA H100 80GB HBM3"
DEFAULT = Config()
CLOCK_SECONDS = DEFAULT.max_wallclock_seconds - DEFAULT.gptq_reserve_seconds  # of training
SETTINGS: dict[str, object] = {
    "TTT_ENABLED": 1, "TTT_MODE": "lora", "TTT_CHUNK_SIZE": 16, "TTT_BATCH_SIZE": 4, "EVAL_STRIDE": 16,
    "VAL_BATCH_SIZE": 16_384, "TRAIN_BATCH_TOKENS": 512, "ARTIFACT_BYTES_MAX": 1_000_000,
    "OMP_NUM_THREADS": 1,
}
# A check with arguments, on a card with this fault: exit status and page.
Checked = Callable[..., tuple[int, str]]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dataset: Path) -> Checked:
    """torch says that there are cards, and settings and data are tiny."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    data = {"DATA_PATH": dataset, "TOKENIZER_PATH": dataset / "tokenizer.model"}
    for name, value in tiny.environment(**SETTINGS, **data).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: CARD)

    def check(
        *arguments: str, fault: str = "none", gpus: int = 1, program: Path | None = None
    ) -> tuple[int, str]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        command = [str(program)] if program else ["-m", "tests.support.fake_gpu", fault]
        status = gpu_check.main(["--out", str(tmp_path / "check"), *arguments], command)
        for number, handler in before.items():
            signal.signal(number, handler)
        return status, (tmp_path / "check" / "page.md").read_text(encoding="utf-8")

    return check


@pytest.mark.slow
def test_a_card_without_a_fault_passes(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages, on one card and on two."""
    monkeypatch.setattr(gpu_check, "CLOCK_SECONDS", 3 + int(DEFAULT.gptq_reserve_seconds))
    status, page = checked(gpus=2)
    assert status == 0 and page.startswith(f"# gpu-check: PASS\n\n2 x {CARD}; torch ")
    assert [line.split(",")[0] for line in page.splitlines() if line.startswith("## ")] == [
        "## kernels: PASS", "## run: PASS", "## ranks: PASS"]
    assert "| attention | fa3 (chosen) | 0.500 | - |" in page
    assert page.count("| without recurrence | 85.0 | - |") == 2
    assert page.count("| with recurrence | 125.0 | - |") == 2
    # 35 % of the clock in steps of 85 ms, the rest in steps of 125 ms.
    steps = CLOCK_SECONDS * (0.35 / 0.085 + 0.65 / 0.125)
    assert page.count(f"Projected for eight GPUs: {steps:.0f} steps in 600 s.") == 2
    assert f"Hessians take 1.20 s, GPTQ_RESERVE_SECONDS={DEFAULT.gptq_reserve_seconds:g}." in page
    assert page.count("peak memory allocated: ") == 2


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "stage", "told"), [
    ("fa3 refused", "kernels", "attention: FlashAttention-3 is installed, and varlen was chosen"),
    ("slow kernel", "kernels", "fused_heads: the kernel takes 0.900 ms, expected at most 2.8 times"),
    ("graph break", "run", "it ended with status 1: torch._dynamo.exc.Unsupported: Call to `torch"),
    ("recompiles", "run", "graphs or kernels were compiled inside the clock of `evaluate`"),
    ("small reserve", "run", "the reserve is too small: Hessians take 4.80 s, GPTQ_RESERVE_SECONDS="),
])
def test_a_planted_fault_is_found(fault: str, stage: str, told: str, checked: Checked) -> None:
    status, page = checked("--only", stage, fault=fault)
    assert status == 1 and page.startswith("# gpu-check: FAIL") and f"## {stage}: FAIL" in page
    assert any(line.startswith(f"- {stage}: ") and told in line for line in page.splitlines()), page


def test_stages_hide_no_other(checked: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\nif sys.argv[1] == 'run':\n    print('begun', flush=True)\n    time.sleep(600)\n"
        "print('ValueError: no such luck')\nprint('the end')\nsys.exit(3)\n"
    )
    monkeypatch.setitem(gpu_check.STAGES, "run", 1.0)
    status, page = checked(program=program)
    assert status == 1
    assert "- kernels: it ended with status 3: ValueError: no such luck\n" in page
    assert "- run: it takes longer than 1 s; the end of its log: begun\n" in page
    assert "## ranks: PASS" in page


def test_an_interrupted_check_ends_its_program_and_prints_the_page_so_far(
    checked: Checked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, signal, sys, time\nif sys.argv[1] == 'run':\n"
        "    pathlib.Path(sys.argv[2] + '.id').write_text(str(os.getpid()))\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n    time.sleep(600)\n"
    )
    status, page = checked(program=program)
    assert status == 1 and "## kernels: FAIL" in page and "- run: did not end\n- ranks: did not end\n" in page
    assert page in capsys.readouterr().out
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "check" / "run.id").read_text()), 0)


def test_slow_steps_evaluation_and_documents_are_judged() -> None:
    events = []
    for step in range(40):
        events.append({"progress": step / 40, "train_time_ms": 120.0 * step, "data_wait_max_ms": 0.5})
    faults, lines = gpu_check.judge_steps(events, DEFAULT, DEFAULT, CARD)
    assert len(faults) == 1 and "without recurrence" in faults[0] and "120.0 ms" in faults[0]
    assert gpu_check.judge_steps(events, DEFAULT, DEFAULT, "NVIDIA A100").faults == []
    steps = CLOCK_SECONDS / 0.120
    assert f"{steps:.0f} steps in 600 s. A step waits for data for 0.5 ms at most." in lines[-1]
    lengths = [5, 900, *[100 + number % 7 for number in range(60)], 3]
    text = np.concatenate([[BOS_ID, *[9] * (length - 1)] for length in lengths])
    picked = gpu_check.some_documents(text, 103)
    begins = np.flatnonzero(picked == BOS_ID)
    assert len(begins) == gpu_check.DOCUMENTS + 1 and begins[-1] == len(picked) - 1
    assert sorted(np.diff(begins))[:3] == [3, 5, 100] and max(np.diff(begins)) == 106


def config_of(path: Path, **settings: int) -> Config:
    """The settings of a file, and more over it."""
    return Config.from_env({"CONFIG": str(path), **{name: str(value) for name, value in settings.items()}})


def test_a_config_names_a_card_on_which_it_fits(repo: Path) -> None:
    """By the formula, in bf16 (the demo: in fp32 too), with a tenth of the smallest card to spare."""
    for path in sorted(repo.glob("configs/*.env")):
        if path.stem.startswith("cpu_"):
            continue
        first_line = path.read_text(encoding="utf-8").splitlines()[0]
        cards = [int(number) for number in re.findall(r"(\d+) GB", first_line)]
        assert cards, f"the first line of {path} names its smallest card"
        one_gpu = path.stem.endswith("1gpu") or path.stem in ("gpu_demo", "one_gpu_10min", "pr591")
        for bytes_a_value in (2, 4) if path.stem == "gpu_demo" else (2,):
            needed = gpu_check.predicted_bytes(config_of(path), 1 if one_gpu else 8, bytes_a_value)
            assert needed <= 0.9 * min(cards) * 1e9, path


def test_the_memory_formula_is_just_above_the_measured_peak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An H100 took 27,985 MiB (benchmarks/results/h100/start.txt)."""
    measured = 27_985 * 2**20
    predicted = gpu_check.predicted_bytes(DEFAULT, 8)
    assert measured <= predicted <= 1.1 * measured
    monkeypatch.setenv("MICRO_BATCH_TOKENS", str(DEFAULT.micro_batch_tokens // 2))
    assert gpu_check.main(["--memory", "8"]) == 0
    told = float(capsys.readouterr().out.split()[0]) * 1e9
    assert 0.5 * predicted < told < 0.6 * predicted


def test_the_memory_of_smaller_micro_batches_is_what_the_formula_gives(repo: Path) -> None:
    """The table of docs/running.md, whose rows calibrate on as many tokens as the default."""
    text = (repo / "docs/running.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert len(rows) > 3
    for tokens, gigabytes, batches in rows:
        config = config_of(repo / "configs/h100_1gpu.env", MICRO_BATCH_TOKENS=int(tokens))
        assert gigabytes == f"{gpu_check.predicted_bytes(config, 1) / 1e9:.0f}"
        assert int(tokens) * int(batches) == DEFAULT.micro_batch_tokens * DEFAULT.gptq_calibration_batches


def test_ten_minutes_on_one_gpu_fit_on_each_card_of_the_table(repo: Path) -> None:
    """The table of docs/running.md: each row has a tenth to spare, and calibrates on as many tokens."""
    text = (repo / "docs/running.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) GB \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    path = repo / "configs/one_gpu_10min.env"
    plain = config_of(path)
    assert [row[0] for row in rows] == ["24", "48", "80"]
    for card, tokens, batches, gigabytes in rows:
        config = config_of(path, MICRO_BATCH_TOKENS=int(tokens))
        assert config.train_batch_tokens % int(tokens) == 0
        needed = gpu_check.predicted_bytes(config, 1)
        assert gigabytes == f"{needed / 1e9:.0f}" and needed <= 0.9 * int(card) * 1e9
        assert int(tokens) * int(batches) == plain.micro_batch_tokens * plain.gptq_calibration_batches


def test_evaluation_is_projected_from_passes_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all documents are scored: an eighth of what it took."""
    config = Config.from_env(tiny.environment(**SETTINGS))
    text = np.full(400, BOS_ID + 1)
    text[[0, 150, 250, 399]] = BOS_ID
    monkeypatch.setattr(gpu_check.ttt, "official_text", lambda: text)
    counts = [one.tokens for one in gpu_check.ttt.passes_of_documents(text, config)]
    moments = np.cumsum([0.0, *(50 + 0.1 * count for count in counts)])
    passes = list(zip(moments[:-1].tolist(), counts, strict=True))
    phases = {"train": 3.0, "eval_roundtrip": 80.0, "eval_legal_ttt": 9.9}
    found = gpu_check.judge_evaluation(phases, passes, text, config, config)
    assert f"(roundtrip 10 s, legal_ttt {moments[-1] / 8:.0f} s)" in found.lines[0]
    assert found.faults == (found.lines if moments[-1] / 8 + 10 > config.max_eval_seconds else [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(lab: Lab, repo: Path) -> None:
    done = lab.run("--out", str(lab.folder / "check"), script=repo / "benchmarks/gpu_check.py")
    assert done.status == 2 and "no GPU" in done.err and not (lab.folder / "check").exists()
