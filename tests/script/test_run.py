"""The whole job as a process: what it prints and leaves behind, and what must not change its result."""

import hashlib
import math
import random
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import train_gpt
from data import shards
from tests.support.ancestors import load_ancestors
from tests.support.loaders import write_shards
from tests.support.models import tiny_config
from tests.support.planted import FORWARD_SECONDS, before, counted_clock
from tests.support.processes import ROUNDED, SCRIPT, SHORT_END, Ended, Lab, results

FILES = """config.env eval_modes.json log.txt metrics.jsonl model.bin nats_legal_ttt.bin nats_roundtrip.bin
nats_sliding_window.bin summary.json train_gpt.py train_gpt.shipped.py"""
SUMMARY_KEYS = """run_id seed config overrides code data stream_hash versions hardware phases
steps tokens train_seconds losses artifact limits comparable exit"""
FLOAT, EXACT = r"\d+\.\d{4}", r"\d+\.\d{8}"
RESULT = rf"val_loss:{FLOAT} val_bpb:{FLOAT}"
NUMBERS = rf"val_loss:{EXACT} val_bpb:{EXACT} scored_tokens:1000 val_bytes:\d+ learned_tokens:"
# VAL_TOKENS_LIMIT leaves targets out.
TIME = r"eval_time:\d+ms comparable:0$"
LINES = [  # of upstream's dialect, in order; new fields only at the end of a line
    r"warning: SEEDS=1 2: .*did you mean SEED\?$",
    r"train_loader:dataset:\S+ train_shards:2$",
    r"val_loader:shards pattern=\S+fineweb_val_\*.bin tokens:1000 bytes:\d+ comparable:0$",
    r"validation: your own$",
    r"model_params:\d+$",
    r"world_size:1 grad_accum_steps:2$",
    r"train_batch_tokens:128 train_seq_len:32 iterations:6 warmup_steps:1 max_wallclock_seconds:0\.000$",
    r"seed:1337$",
    r"train_io:prefetch:True copy_stream:False prefetch_queue:2$",
    r"val_io:overlap:False prefetch:True bytecount_device:cpu tokens_per_pass:2048$",
    *(
        rf"phase:rehearse_{part} \d+\.\d\ds$"
        for part in ("hessians", "calibration_batch", "artifact", "windows", "ttt")
    ),
    r"warmup_step:1/1 ",
    *(rf"step:{step}/6 train_loss:{FLOAT} train_time:\d+ms step_avg:\d+\.\d\dms " for step in range(1, 7)),
    rf"DIAGNOSTIC post_ema {RESULT} train_time:\d+ms step_avg:\d+\.\d\dms",
    r"peak memory allocated: \d+ MiB reserved: \d+ MiB$",
    rf"legal_ttt {RESULT} {TIME}",
    rf"legal_ttt_exact {NUMBERS}[1-9]\d* comparable:0$",
    rf"final_int6_sliding_window {RESULT} {TIME}",
    rf"final_int6_sliding_window_exact {NUMBERS}0 comparable:0$",
    rf"final_int6_roundtrip {RESULT} {TIME}",
    rf"final_int6_roundtrip_exact {NUMBERS}0 comparable:0$",
    r"Code size: \d+ bytes",
    r"Serialized model int6\+rans: \d+ bytes$",
    r"Total submission size int6\+rans: \d+ bytes$",
]


def log_of(ended: Ended) -> list[str]:
    return (ended.directory / "log.txt").read_text("utf-8").splitlines()


def test_the_run_directory_holds_the_evidence(finished: Ended) -> None:
    assert {path.name for path in finished.directory.iterdir()} == set(FILES.split())
    assert finished.directory.name == "run" and finished.err == ""
    assert log_of(finished) == finished.out.splitlines()
    assert (finished.directory / "train_gpt.py").read_bytes() == SCRIPT.read_bytes()
    config = train_gpt.Config.from_env({"CONFIG": str(finished.directory / "config.env")})
    assert config.as_env() == {**finished.summary["config"], "RUN_ID": ""}  # that is of one start alone


def test_settings_lines_and_metrics_are_written_down(finished: Ended) -> None:
    written = (finished.directory / "config.env").read_text("utf-8").splitlines()
    config = finished.summary["config"]
    settings = [f"{name}={value}" for name, value in config.items()]
    assert [line.removeprefix("# ") for line in written] == settings
    commented = {line.split("=")[0] for line in written if line.startswith("# ")}
    assert commented == {f"# {name}" for name in train_gpt.SETTINGS_OF_A_START}
    default = train_gpt.Config().as_env()
    overrides = finished.summary["overrides"]
    assert overrides == {name: value for name, value in config.items() if value != default[name]}
    told = " ".join(f"{name}={value}" for name, value in overrides.items())
    assert f"overrides: {told}" in log_of(finished)
    lines = iter(log_of(finished))
    assert finished.out.count("warning:") == 1
    for pattern in LINES:
        assert any(re.match(pattern, line) for line in lines), pattern
    trained = [event for event in finished.events if event["event"] == "train"]
    assert [event["step"] for event in trained] == [1, 2, 3, 4, 5, 6]
    assert [event["tokens"] for event in trained] == [128 * step for step in range(1, 7)]
    assert trained[-1]["train_loss"] < trained[0]["train_loss"] - 1.0  # it learns
    final = {event["name"]: event for event in finished.events if event["event"] == "final"}
    losses = finished.summary["losses"]
    keys = losses["roundtrip"].keys()
    assert [{key: event[key] for key in keys} for event in final.values()] == list(losses.values())
    for name, event in final.items():
        exact = f"{name} val_loss:{event['nats']:.8f} val_bpb:{event['bits_per_byte']:.8f} scored_tokens:1000"
        assert sum(line.startswith(exact) for line in log_of(finished)) == 1


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_summary_is_true_and_scores_are_per_byte_of_text(finished: Ended, dataset: Path) -> None:
    summary = finished.summary
    model, shipped = finished.directory / "model.bin", finished.directory / "train_gpt.shipped.py"
    assert set(summary) >= set(SUMMARY_KEYS.split())
    assert [summary[key] for key in ("run_id", "seed", "steps", "tokens")] == ["run", 1337, 6, 6 * 128]
    assert summary["artifact"]["bytes"] == model.stat().st_size and summary["exit"] == "finished"
    assert summary["artifact"]["sha256"] == sha256(model)
    assert summary["code"]["sha256"] == sha256(SCRIPT)
    assert summary["code"]["bytes"] == SCRIPT.stat().st_size
    assert summary["code"]["bytes_wrapped"] == shipped.stat().st_size
    config = train_gpt.Config.from_values(summary["config"])
    plain = train_gpt.shipped_code(SCRIPT.read_bytes())
    assert shipped.read_bytes() == train_gpt.with_settings(plain, config)
    assert summary["data"]["hashes"]["tokenizer"] == sha256(dataset / "tokenizer.model")
    assert set(summary["losses"]) == {"roundtrip", "sliding_window", "legal_ttt"}
    assert {"preflight", "build_model", "warmup", "train", "quantize", "reload"} <= set(summary["phases"])
    assert all(limit["ok"] for limit in summary["limits"].values())
    assert summary["comparable"] is False  # VAL_TOKENS_LIMIT
    total = summary["artifact"]["bytes"] + summary["code"]["bytes_wrapped"]
    assert f"Total submission size int6+rans: {total} bytes" in finished.out
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(dataset / "tokenizer.model"))
    targets = shards.read_shard(dataset / "fineweb_val_000000.bin")[1:1001]
    documents = np.split(targets, np.flatnonzero(targets == shards.BOS_ID))
    text_bytes = sum(len(pieces.decode(document.tolist()).encode()) for document in documents)
    for loss in finished.summary["losses"].values():
        assert (loss["scored_tokens"], loss["bytes"]) == (1000, text_bytes)
        assert math.isclose(
            loss["bits_per_byte"], loss["nats"] * 1000 / math.log(2) / text_bytes, rel_tol=1e-12
        )


def test_the_shipped_script_scores_the_artifact_without_training_data(finished: Ended, lab: Lab) -> None:
    lab = lab.copy_dataset()
    for shard in lab.dataset.glob("fineweb_train_*"):
        shard.unlink()
    shipped = finished.directory / "train_gpt.shipped.py"
    alone = lab.succeed(script=shipped, EVAL_ONLY=finished.directory / "model.bin", MODEL_DIM=None)
    assert alone.summary["losses"] == finished.summary["losses"]
    assert alone.summary["artifact"]["sha256"] == finished.summary["artifact"]["sha256"]


# What the process opens is in the file `opened` when it leaves.
WATCH = """
opened = []
def note(event, given):
    if event == "open" and isinstance(given[0], (str, bytes)):
        opened.append(os.path.abspath(os.fsdecode(given[0])))
sys.addaudithook(note)
""" + before("os._exit", 'open("opened", "w").write("\\n".join(sorted(set(opened))))')


def test_an_artifact_alone_is_scored_again_and_what_it_overrides_is_named(short: Ended, lab: Lab) -> None:
    """EVAL_ONLY=runs/x/model.bin and nothing more: the same scores, from two files of that directory."""
    model = short.directory / "model.bin"
    alone = lab.succeed(fault=WATCH, **lab.nothing_but(EVAL_ONLY=model, RUNS_DIR=lab.folder / "runs"))
    assert alone.summary["losses"] == short.summary["losses"]
    assert alone.directory.name.endswith("-eval")
    assert alone.summary["limits"]["artifact_bytes"] == short.summary["limits"]["artifact_bytes"]
    opened = (lab.folder / "opened").read_text("utf-8").splitlines()
    beside = [Path(path).name for path in opened if Path(path).parent == short.directory]
    assert beside == ["config.env", "model.bin"]
    assert not [line for line in alone.out.splitlines() if line.startswith("warning:")]
    ended = lab.elsewhere("other").succeed(EVAL_ONLY=model, MODEL_DIM=64, EVAL_STRIDE=0, TTT_ENABLED=0)
    warnings = [line for line in ended.out.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1 and "MODEL_DIM=64" in warnings[0] and "MODEL_DIM=16" in warnings[0]
    assert ended.summary["config"]["MODEL_DIM"] == "16"


def test_its_config_starts_the_run_again_and_another_seed_is_another_run(short: Ended, lab: Lab) -> None:
    """It has the same bits where the loader and the reader of the text work in the step itself."""
    plain = {"TRAIN_PREFETCH": 0, "VAL_PREFETCH": 0}
    config = short.directory / "config.env"
    again = lab.succeed(**lab.nothing_but(CONFIG=config, RUNS_DIR=lab.folder / "runs", **plain))
    assert results(again) == results(short) and again.directory.name != "run"
    changes = {"SEED": 1338, "MATRIX_BITS": 5, "EVAL_SEQ_LEN": 64, "ITERATIONS": 1}
    other = lab.elsewhere("other").succeed(**changes, GPTQ=0, TRELLIS=0)
    assert other.summary["stream_hash"] != short.summary["stream_hash"]
    assert results(other)[0][0][1] != results(short)[0][0][1], "the loss of the first step"
    # Lines are named by the setting, also where the rate control makes the codes of two the same width.
    assert "final_int5_roundtrip_exact " in other.out and "Serialized model int5+rans: " in other.out
    # Evaluation may see more context than training.
    assert set(other.summary["losses"]) == {"roundtrip", "sliding_window", "legal_ttt"}


def test_a_run_that_is_watched_closely_has_the_same_bits(short: Ended, lab: Lab) -> None:
    changes = {
        "WARMUP_STEPS": 2, "VAL_LOSS_EVERY": 2, "TRAINING_TIMING_BREAKDOWN": 1, "TRAINING_TIMING_EVERY": 2,
        "CHECKPOINT_EVERY_SECONDS": 0.01, "SAVE_FLOAT": 1, "VAL_PROGRESS_LOG_EVERY": 100,
    }
    again = lab.succeed(**SHORT_END, **changes)
    assert results(again) == results(short)
    for step in (0, 2, 4, 6):
        assert len(re.findall(rf"^step:{step}/6 {RESULT} train_time:\d+ms", again.out, re.M)) == 1
    assert re.search(r"timing_breakdown.*forward_ms", again.out)
    assert again.out.count("val_progress:training 100%") == 5  # the fifth is of the averaged weights
    assert_float_weights(again)


def assert_float_weights(ended: Ended) -> None:
    """Those that are quantized: what the file gives is within a step of what the artifact gives."""
    path = ended.directory / "final_model.pt"
    assert f"Serialized model: {path.stat().st_size} bytes" in ended.out
    weights = torch.load(path, weights_only=True)
    quantized, _ = train_gpt.load_artifact(ended.directory / "model.bin")
    assert weights.keys() == quantized.state_dict().keys()
    for name, parameter in quantized.named_parameters():
        assert weights[name].dtype == torch.float32
        error = (parameter - weights[name]).norm() / weights[name].norm().clamp(min=1e-9)
        assert error < 0.3, name


def test_training_with_hessians_ends_within_its_seconds(lab: Lab) -> None:
    """However many batches are asked for: as many are taken as the clock, which counts work, allows."""
    clock = {"MAX_WALLCLOCK_SECONDS": 0.31, "GPTQ_RESERVE_SECONDS": 0.16, "GPTQ_CALIBRATION_BATCHES": 100_000}
    changes = {**SHORT_END, **clock, "GPTQ": 1, "WARMUP_STEPS": 1, "ITERATIONS": 100_000, "VAL_LOSS_EVERY": 4}
    ended = lab.succeed(fault=counted_clock(), **changes)
    # Steps take 0.02 s: 7 fit into 0.15 s, of which one is kept free. Validation stops the clock.
    assert ended.summary["steps"] == 6
    assert "\nstopping_early: wallclock_cap train_time:120ms step:6/100000\n" in ended.out
    limit = ended.summary["limits"]["train_seconds"]
    assert limit["ok"] and limit["value"] == pytest.approx(6 * 0.02 + 17 * FORWARD_SECONDS)
    # A reserve that is too short: a warning before the first step, and another one when time is up.
    early, late = (line for line in ended.out.splitlines() if line.startswith("warning: "))
    named = ("GPTQ_RESERVE_SECONDS=0.16", "100000 calibration batches", f"{1e5 * FORWARD_SECONDS:.2f} s")
    assert all(words in early for words in named)
    assert ended.out.index(early) < ended.out.index("\nwarmup_step:")
    named = ("17 calibration batches", "GPTQ_CALIBRATION_BATCHES=100000", "GPTQ_RESERVE_SECONDS")
    assert all(words in late for words in named)


def test_one_stall_of_a_disk_does_not_end_training_early(lab: Lab) -> None:
    """0.1 s in the fourth step, where a step takes 0.02 s. The steps after it take no longer than before."""
    stall = before("torch.nn.functional.embedding", "calls.append(0); now[0] += 0.1 * (len(calls) == 7)")
    short = {"MAX_WALLCLOCK_SECONDS": 0.31, "ITERATIONS": 100_000, "GPTQ": 0, "WARMUP_STEPS": 0}
    ended = lab.succeed(fault=counted_clock() + "calls = []\n" + stall, **{**SHORT_END, **short})
    # 0.18 s for the first four. Six more of them fit into the rest, of which one is kept free.
    assert ended.summary["steps"] == 9 and ended.summary["train_seconds"] == pytest.approx(0.28)


KILL_AT_SCORING = before("builtins.open", """
    path = str(given[0])
    if path.endswith("log.txt") and os.path.exists(path) and "roundtrip_exact" in real(path).read():
        os.kill(os.getpid(), 9)
""")


def test_a_run_killed_in_its_evaluation_is_finished_with_the_same_result(short: Ended, lab: Lab) -> None:
    """Also where its model is damaged, and evaluation goes by other batches."""
    killed = lab.run(fault=KILL_AT_SCORING, **SHORT_END)
    assert killed.status == -signal.SIGKILL
    model = killed.directory / "model.bin"
    model.write_bytes(model.read_bytes()[:-1])
    ended = lab.succeed(RESUME=killed.directory, **{**SHORT_END, "VAL_BATCH_SIZE": 4096, "WARMUP_STEPS": 2})
    assert f"resumed:{killed.directory} step:{short.summary['steps']} " in ended.out
    assert results(ended) == results(short)
    limit = ended.summary["limits"]["train_seconds"]
    assert limit["value"] == ended.summary["train_seconds"] > 0.0


@pytest.mark.parametrize(("ancestor", "changes"), [
    ("549", {"VE_LAYERS": "0,1", "BIGRAM_VOCAB_SIZE": 64, "BIGRAM_DIM": 8}), ("1493", {}),
    pytest.param("591", {}, marks=pytest.mark.slow),
])
def test_the_command_of_an_ancestor_trains(
    ancestor: str, changes: dict[str, Any], lab: Lab, repo: Path
) -> None:
    """At the size of the tests: what decides the size, the data and the length of a run is theirs."""
    system = load_ancestors()[ancestor]
    own = lab.settings()
    settings: dict[str, Any] = {name: value for name, value in system.command.items() if name not in own}
    config = repo / f"configs/{system.config}.env"
    # Some of its names have no meaning here, and may resemble a setting.
    foreign = ",".join(settings.keys() - train_gpt.Config().as_env().keys())
    # A rehearsal would run what follows the training anyway.
    short = {"VAL_TOKENS_LIMIT": 300, "ITERATIONS": 2, "WARMUP_STEPS": 0}
    ended = lab.succeed(**{**settings, "CONFIG": config, "FOREIGN_NAMES": foreign, **short, **changes})
    assert ended.summary["steps"] == 2
    assert {"roundtrip", "sliding_window", "legal_ttt"} == ended.summary["losses"].keys()
    model, _ = train_gpt.load_artifact(ended.directory / "model.bin")
    stored = {name for name, _ in model.named_parameters()}
    if ancestor == "549":
        assert {"bigram_table_RC", "value_table_VC"} <= stored


def test_after_a_hundred_steps_the_number_of_steps_is_projected() -> None:
    """100 steps of 50 ms in 5 of 598 s; the log is silent except for that line."""
    lines: list[str] = []
    run = SimpleNamespace(log=lines.append, record=lambda *_, **__: None)
    for iterations, steps, seconds in ((20_000, "11,960", 598), (4_000, "4,000", 200)):
        config = train_gpt.Config(train_log_every=0, iterations=iterations, gptq_reserve_seconds=2.0)
        training = SimpleNamespace(config=config, run=run, seconds=5.0, waits_ms=[])
        for step in (99, 100, 101):
            result = train_gpt.StepResult(step, 0.0, 1.0, torch.zeros(2), None, 0.0)
            train_gpt.log_step(training, result, 3.0, 1.0)
        (line,) = lines
        assert re.match(rf"pace: 50\.0 ms/step .* {steps} steps .* {seconds} s\b.*recurrence", line)
        lines.clear()


# What breaks a part of the end, on the last rank: a kernel that is missing, a graph that is not compiled, two
# collectives.
PLANTED = """
if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 and CONDITION:
    raise RuntimeError("a planted fault")
"""
SUMS = "given[0].dtype == torch.float32 and given[0].ndim == 2"
SCORES = "given[0].dtype == torch.float64 and len(given[0]) > 2"


@pytest.mark.parametrize(("part", "ranks", "function", "condition"), [
    ("artifact", 1, "torch.cholesky_inverse", "True"),
    ("ttt", 1, "torch._dynamo.maybe_mark_dynamic", "True"),
    ("hessians", 2, "torch.distributed.all_reduce", SUMS),
    ("windows", 2, "torch.distributed.all_reduce", SCORES),
])
def test_what_would_fail_at_the_end_fails_before_the_first_step(
    part: str, ranks: int, function: str, condition: str, lab: Lab
) -> None:
    fault = before(function, PLANTED.replace("CONDITION", condition))
    coded = ROUNDED if part in ("ttt", "windows") else {}  # parts that come after the artifact
    ended = [started.wait() for started in lab.ranks(ranks, fault=fault, WARMUP_STEPS=1, **coded)]
    assert all(one.status == 1 for one in ended)
    told = ended[-1].err.splitlines()
    assert "RuntimeError: a planted fault" in told
    assert told[-2:] == [f"in phase rehearse_{part}", "no checkpoint or artifact was saved"]
    assert "warmup_step:" not in ended[0].out


@pytest.mark.parametrize(("mode", "trellis"), [("lora", 0), ("sgd", 1)])
def test_a_rehearsal_leaves_nothing_behind(
    mode: str, trellis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"VOCAB_SIZE": 192, "MODEL_DIM": 16, "MLP_MULT": 2, "ROPE_DIMS": 8}
    changes = {"TTT_ENABLED": 1, "TTT_MODE": mode, "TTT_CHUNK_SIZE": 8, "EVAL_STRIDE": 8, "TRELLIS": trellis}
    config = tiny_config(**size, **changes, WARMUP_STEPS=1, TRAIN_BATCH_TOKENS=64)
    run = train_gpt.Run(train_gpt.Machine())
    training = train_gpt.Training(config, run, write_shards(tmp_path, (192,)), None, train_gpt.Ops(), {})  # type: ignore[arg-type]

    def trace() -> list[Any]:
        state = {**training.state(), "seconds": 0.0}
        gradients = [(weights.grad, weights.requires_grad) for weights in training.model.parameters()]
        numbers = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        return [train_gpt.torch_file((state, numbers)), gradients, training.loader.index]

    before = trace()
    train_gpt.rehearse_end(training)
    assert training.loader.index == 2 and run.phases["rehearse_ttt"] > 0
    training.loader.seek(0)
    assert trace() == before
    # The steps of the warm-up are undone as well; there it rehearses once more, which takes long.
    monkeypatch.setattr(train_gpt, "rehearse_end", lambda training: training.loader.next_batch())
    train_gpt.warm_up(training)
    assert trace()[0] == before[0]
    training.loader.close()
