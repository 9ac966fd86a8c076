"""Both public log dialects, ours, and the traps in them."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.dialects import DIALECT_A, DIALECT_B, OURS
from tests.tools.damage import LINES, repeated
from tools.runs import logs
from tools.runs.logs import DECIMALS_MAX, LINE_CHARACTERS_MAX, decimals, parse_log, read_log


def test_dialect_a() -> None:
    log = parse_log(DIALECT_A, Path("train.log"))
    assert (log.dialect, log.seed, log.steps, log.train_seconds) == ("A", 1337, 13780, 600.038)
    assert [point.step for point in log.validation] == [0, 13780] and len(log.train) == 1
    assert log.source is not None and log.source.startswith("import torch")
    assert log.headline is not None
    assert DIALECT_A.splitlines()[log.headline.line - 1].startswith("final_int8_zlib_roundtrip_exact")
    assert (log.headline.bpb_text, log.headline.eval_seconds) == ("1.21972502", 1.401)
    assert log.code_bytes and log.model_bytes and log.total_bytes
    assert (log.code_bytes.bytes, log.model_bytes.bytes, log.total_bytes.bytes) == (47642, 15815847, 15863489)
    assert log.gpus == ["NVIDIA H100 80GB HBM3"] and log.versions["python"].value == "3.12.3"
    assert log.validation_tokens is not None and log.validation_tokens.value == "62021632"


# What our logs called it before: one line for these settings, sums of a 0-based step, labels by the codes.
BEFORE = {
    "grad_accum_steps:8\n": "grad_accum_steps:8 seed:1337 train_batch_tokens:524288\n",
    "seed:1337\n": "",
    "timing_breakdown step:1 micro_steps:8": "timing_breakdown step:0",
    "final_int6": "final_int7",
    "val_progress:training": "val_progress:roundtrip",
}


@pytest.mark.parametrize("before", [False, True])
def test_ours(before: bool) -> None:
    text = OURS
    if before:
        for now, then in BEFORE.items():
            text = text.replace(now, then)
    log = parse_log(text, Path("log.txt"))
    assert (log.dialect, log.seed, log.steps, log.train_seconds) == ("A", 1337, 30, 32.058)
    assert [(point.step, point.bpb) for point in log.validation] == [(0, 4.1927), (30, 2.8189)]
    assert [point.step for point in log.train] == [1, 30]
    assert log.headline is not None
    assert (log.headline.bpb_text, log.headline.scored_tokens) == ("2.83752470", 62021632)
    assert [final.rank for final in log.finals] == [0, 1, 1]
    assert log.model_bytes is not None and log.model_bytes.bytes == 5000000
    assert log.settings["train_batch_tokens"].value == "524288"
    told_twice = {"prefetch", "copy_stream", "train_io", "val_io", "tokens_per_pass", "step", "count"}
    assert not told_twice & set(log.settings), "lines that hold no settings"


def test_the_attention_of_a_run_is_read() -> None:
    """From lines of a GPU, which tried some, and of a CPU, which has the reference implementation."""
    for line in ("attention:fa3 tried: fa3 error:4.0e-03", "attention:fa3 (reference implementation)"):
        assert parse_log(f"{line}\n", Path("log.txt")).attention == ["fa3"]


def test_dialect_b() -> None:
    log = parse_log(DIALECT_B, Path("train_seed42.log"))
    assert (log.dialect, log.seed, log.steps) == ("B", 42, 4945)
    assert log.settings["matrix_lr"].value == "0.026"
    assert log.train[0].time_ms == 100.0  # from tokens per second: tenths of minutes are too coarse
    assert log.headline is not None and log.headline.label == "quantized_ttt_phased"
    assert log.code_bytes is not None and log.code_bytes.bytes == 157868
    assert log.hessian_seconds is not None and log.hessian_seconds.value == "4.7"

    text = "\n".join(line for line in DIALECT_B.splitlines() if "ttt" not in line)
    assert parse_log(text, Path("x.log")).headline is None  # diagnostics are never a score


PREFIXES = {
    "torchrun --tee": "[default0]:", "torch": "[rank0]: ", "srun": " 0: ", "srun, a node": "12: ",
    "mpirun": "[1,0]<stdout>:", "a rank": "rank 3: ", "epoch seconds": "1776142360.539 ",
    "logging": "2026-11-27 10:00:{:02d},123 INFO ",
    "logging with names": "2026-11-27 10:00:{:02d},123 - root - INFO - ",
    "logging in brackets": "[2026-03-23 04:02:{:02d}] INFO: ", "without a format": "INFO:root:",
    "loguru": "2026-11-27 10:00:{:02d}.123 | INFO     | __main__:train:{} - ",
    "hydra": "[2026-11-27 10:00:{:02d},123][__main__][INFO] - ",
    "DeepSpeed": "[2026-11-27 10:00:{:02d},123] [INFO] [logging.py:96:log_dist] [Rank 0] ",
    "glog": "I1127 10:00:{:02d}.123456 12345 train.py:{}] ",
    "syslog": "Nov 27 10:00:{:02d} node-3 python[4242]: ",
    "journal": "2026-11-27T10:00:{:02d}+08:00 ",
    "Kubernetes": "2026-11-27T10:00:{:02d}.123456789Z stdout F ",
    "a clock": "[05:08:{:02d}] ", "Transformers": "11/27/2026 10:00:{:02d} - INFO - __main__ - ",
    "Docker": "trainer-1  | ", "a name": "h100_run: ", "two blanks": "  ",
    "two tools": "[default0]:[05:08:{:02d}] ",
    "colors": "\x1b[36m[rank0]\x1b[0m: ",
}


@pytest.mark.parametrize("dialect", [DIALECT_A, DIALECT_B, OURS])
@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_a_log_behind_the_prefix_of_a_tool_says_the_same(prefix: str, dialect: str) -> None:
    lines = dialect.splitlines()
    stamped = [prefix.format(number % 60, number) + line for number, line in enumerate(lines)]
    # What a launcher writes itself, in its own form.
    stamped.append("W1127 10:00:00.000000 1 torch/distributed/run.py:766] Setting OMP_NUM_THREADS")
    expected = parse_log("\n".join([*lines, ""]) + "\n", Path("x.log"))
    found = parse_log("\n".join(stamped), Path("x.log"))
    assert found.finals and found == expected


def test_lines_of_other_ranks_do_not_count() -> None:
    lines = [f"[default{rank}]:{line}" for line in DIALECT_B.splitlines() for rank in (0, 1)]
    lines.insert(3, "[default7]:node-3:25635:26029 [7] NCCL INFO Connected all rings")
    log, alone = (parse_log(text, Path("x.log")) for text in ("\n".join(lines), DIALECT_B))
    assert len(log.train) == len(alone.train) and len(log.finals) == len(alone.finals)
    assert {name: found.value for name, found in log.settings.items()} == {
        name: found.value for name, found in alone.settings.items()
    }


def test_a_log_without_a_prefix_keeps_its_beginnings() -> None:
    lines = ["seed: 42", "10: x", "[0] y", "  0: z", "INFO = 3", "Monday 3/4 loss: 2"]
    assert logs.without_prefixes(lines) == lines


def test_a_file_that_is_no_log_says_what_it_begins_with() -> None:
    log = parse_log("\n  Epoch 1: loss=5.1\nEpoch 2: loss=4.7\n", Path("my\nrun.log"))
    assert log.says_nothing and "Epoch 1: loss=5.1" in log.nothing and "3 lines" in log.nothing
    assert "\n" not in log.nothing
    assert parse_log("", Path("x.log")).says_nothing and not parse_log(OURS, Path("x.log")).says_nothing


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=300))
def test_any_text_parses(text: str) -> None:
    parse_log(text, Path("x.log"))


def test_odd_numbers() -> None:
    texts = ("1.0810", "2", "1e-08", "0.5", "1e-9999", "nan")
    assert [decimals(text) for text in texts] == [4, 0, 8, 1, DECIMALS_MAX, 0]
    many = "9" * 5_000
    text = f"seed:{many}\nstep:{many}/{many} train_loss:1\na val_loss:{many} val_bpb:1\nval_tokens: {many}\n"
    log = parse_log(text, Path("x.log"))
    assert log.seed is None and not log.train and not log.finals


def test_lines_that_look_like_others() -> None:
    mangled = DIALECT_A.replace(
        "import torch\n", "import torch\nstep:3/20000 train_loss:6.1 train_time:9ms\n"
    )
    log = parse_log(mangled, Path("train.log"))
    assert log.source is None and [point.step for point in log.train] == [3, 1]
    for line, label in (
        ("final_int8_zlib_roundtrip_exact val_loss:2.0594 val_bpb:1.2197", "final_int8_zlib_roundtrip_exact"),
        ("final eval (int6): step:3 chunk:4 val_loss: 2.0594 val_bpb: 1.2197", "final eval (int6)"),
    ):
        (final,) = parse_log(line, Path("x.log")).finals
        assert (final.label, final.loss_text, final.bpb_text) == (label, "2.0594", "1.2197")


def test_a_log_of_two_runs_has_the_source_of_the_last() -> None:
    second = DIALECT_A.replace("import torch\n", "import torch as second\n")
    log = parse_log(DIALECT_A + second, Path("x.log"))
    assert log.source is not None and log.source.startswith("import torch as second\n")
    assert len(log.finals) == 4 and log.finals[0] == parse_log(DIALECT_A, Path("x.log")).finals[0]


@pytest.mark.parametrize("length", [60_000, 3_900])
@pytest.mark.parametrize("line", LINES)
def test_no_line_takes_more_than_linear_time(line: tuple[str, str, str], length: int) -> None:
    """In quadratic time these lines would take minutes, and the test would end by its timeout."""
    text = "\n".join([repeated(line, length)] * (200 if length < LINE_CHARACTERS_MAX else 1))
    parse_log(text[:4_000_000], Path("x.log"))


def test_a_long_log_is_read_up_to_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LINES_MAX", 50)
    monkeypatch.setattr(logs, "LOG_BYTES_MAX", 10_000)
    path = tmp_path / "train.log"
    path.write_text("step:1/2 train_loss:1.5\n" * 57)
    log = read_log(path)
    assert log.lines == len(log.train) == 50 and log.unread is not None
    path.write_text("step:1/2 train_loss:1.5\n" * 50)
    assert read_log(path).unread is None
    with path.open("ab") as file:
        file.truncate(10_001)
    assert "bytes" in (read_log(path).unread or "")
