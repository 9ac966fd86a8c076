"""Settings: what is wrong is refused by name before anything starts; what is right survives being written."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from tests.support.here import main_here
from train_gpt import Config, ConfigError, notes_on_environment

FIELDS = {field.name.upper(): field for field in dataclasses.fields(Config)}

# What the user set; of several settings, the variable that the message must name. Values that lie beyond a
# bound are in `values_beyond`.
WRONG_VALUES = """
TRAIN_SEQ_LEN=0 RUN_ID=../other RUN_ID=.hidden RUN_ID=.. SEED=9223372036854775808 MAX_WALLCLOCK_SECONDS=inf
MODEL_DIM=500 NUM_HEADS=5 NUM_HEADS=3 NUM_KV_HEADS=3 NUM_KV_HEADS=16 MLP_MULT=0.1 ROPE_DIMS=15 ROPE_DIMS=128
LOOP_START=6 LOOP_END=11 BIGRAM_VOCAB_SIZE=1 VE_LAYERS=9,,10 VE_LAYERS=9;10 VE_LAYERS=9999 MATRIX_LR=0,02
ARTIFACT_BYTES_MAX=16MB GPTQ_RESERVE_SECONDS=600 EVAL_STRIDE=4096 TTT_CHUNK_SIZE=3073 TTT_LORA_TARGETS=q,w
TRACE_STEPS=110:100 TRACE_STEPS=110 PROFILE_STEPS=110:100 TRACE_STEPS=3: TRACE_STEPS=:3 TRACE_STEPS=3:3
TRACE_STEPS=0:2 TRACE_STEPS=a:b TRACE_STEPS=1:2:3 PROFILE_STEPS=1_0:20
"""
WRONG_TOGETHER = """
ROPE_DIMS=0 MODEL_DIM=24 NUM_HEADS=8 : ROPE_DIMS
VE_ENABLED=1 VE_LAYERS=10,11 : VE_LAYERS
TTT_MODE=sgd EVAL_STRIDE=0 : EVAL_STRIDE
TTT_MODE=sgd EVAL_SEQ_LEN=65536 : TTT_CHUNK_TOKENS
TTT_MODE=sgd TTT_CHUNK_TOKENS=1000 : TTT_CHUNK_TOKENS
TTT_MODE=sgd TTT_CHUNK_TOKENS=64 : TTT_CHUNK_TOKENS
EVAL_SEQ_LEN=32 EVAL_STRIDE=16 : TTT_CHUNK_SIZE
RESUME=x EVAL_ONLY=y : RESUME
TRACE_STEPS=1:2 PROFILE_STEPS=1:2 : PROFILE_STEPS
"""
# A misspelled name, and the right one that the message must offer.
WRONG_NAMES = """
MATRX_LR:MATRIX_LR TOKENISER_PATH:TOKENIZER_PATH GPTQ_DAMPNG:GPTQ_DAMPING
"""

LEFT_ALONE = """
RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME
MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_MAX_RESTARTS TORCH_NCCL_ASYNC_ERROR_HANDLING
TORCHINDUCTOR_CACHE_DIR NCCL_DEBUG NCCL_IB_DISABLE GLOO_SOCKET_IFNAME OMP_NUM_THREADS MKL_NUM_THREADS
KMP_AFFINITY GOMP_SPINCOUNT CUDA_VISIBLE_DEVICES CUDA_HOME NVIDIA_VISIBLE_DEVICES CUBLAS_WORKSPACE_CONFIG
TRITON_CACHE_DIR TRITON_INTERPRET PYTORCH_CUDA_ALLOC_CONF HF_HOME HF_HUB_OFFLINE PYTHONPATH PYTHONUNBUFFERED
PYTEST_CURRENT_TEST VIRTUAL_ENV PATH HOME USER SHELL LANG LC_ALL TERM PWD OLDPWD TMPDIR HOSTNAME LOGNAME
SHLVL EDITOR DISPLAY SSH_CONNECTION XDG_RUNTIME_DIR LD_LIBRARY_PATH CONDA_PREFIX MAKEFLAGS MAKELEVEL CI
GITHUB_RUN_ID RUNPOD_POD_ID SLURM_JOB_ID SLURM_NODEID KUBERNETES_PORT DEBIAN_FRONTEND COLUMNS LINES MAX_JOBS _
PARALLEL_SEQ PARALLEL_PID PARALLEL_JOBSLOT TRAINING_JOB_NAME HEAD_NODE HEAD_NODE_IP CHECKPOINT_DIR MIN_NODES
TRACE_LEVEL TRACE_ID SAVE_DIR
"""


def refused(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
            folder: Path) -> str:
    """What main() prints of wrong settings, once it is sure that it did nothing else."""
    monkeypatch.chdir(folder)
    for first in ("this_machine", "Run"):
        monkeypatch.setattr(train_gpt, first, lambda *_: pytest.fail("the run began"))
    assert main_here(environ) == 1
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and err.startswith("error: ")
    assert err.count("\n") == 1 + ("did you mean" in err)  # wrong names are listed, and then the way out
    assert not any(folder.iterdir())
    return err


def values_beyond(field: dataclasses.Field[Any]) -> list[str]:
    """Values just outside of what a field may hold, and words that are none of its kind."""
    rules = field.metadata
    if isinstance(field.default, bool):
        return ["2", "-1", "yes", "true", ""]
    if rules["among"]:
        return [f"no {rules['among'][0]}"]
    if isinstance(field.default, str):
        odd = ["two\nlines", "bell\a", "bytes \udcff", "line\u2028separator"]  # in no file
        return odd if re.fullmatch(rules["pattern"], "any") else [*odd, "any"]
    beyond = ["", "many", "nan", "-inf", "1e400", "9" * 400, "9" * 5000, "0x10", "1 2", "--1"]
    if isinstance(field.default, int):
        beyond.append("1.5")
    for end, sign in (("low", -1), ("high", 1)):
        beyond.append(repr(rules[end] + sign * (1 + abs(rules[end]))))
    return beyond


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if values_beyond(field)])
def test_every_setting_refuses_what_lies_beyond_it(name: str) -> None:
    for text in values_beyond(FIELDS[name]):
        with pytest.raises(ConfigError, match=rf"{name}=") as error:
            Config.from_env({name: text})
        assert "expected" in str(error.value), text


@pytest.mark.parametrize("wrong", [
    *(f"{value} : {value.split('=')[0]} : expected" for value in WRONG_VALUES.split()),
    *(f"{line} : expected" for line in WRONG_TOGETHER.strip().splitlines()),
    *(f"{pair.replace(':', '=1 : ')} : did you mean" for pair in WRONG_NAMES.split()),
])
def test_what_is_wrong_is_refused_by_name(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, named, told = wrong.split(" : ")
    environ = dict(part.split("=", 1) for part in given.split(" "))
    message = refused(environ, monkeypatch, capsys, tmp_path)
    before, _, after = message.partition(told)
    assert told in message and named in (after if told == "did you mean" else message)
    assert told == "expected" or given.removesuffix("=1") in before
    assert environ.get(named, "") in message  # what was got


def a_value(field: dataclasses.Field[Any]) -> str:
    """A value that a setting may have."""
    default = Config().as_env()[field.name.upper()]
    return default or ("1:2" if field.name in ("trace_steps", "profile_steps") else "x")


def test_near_names_are_refused_and_those_of_systems_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # A single name is not compared with all ancestors, each of which has a file to read.
    monkeypatch.setattr(train_gpt, "ancestor_of", lambda _: "")
    for number, (name, field) in enumerate(FIELDS.items()):
        misspelled = (name[:-1], name + name[-1], name[0] + name, name[:-2] + name[-1] + name[-2])
        wrong = misspelled[number % len(misspelled)]  # they take turns
        if len(wrong) >= 6 and wrong not in FIELDS:
            with pytest.raises(ConfigError, match=wrong):
                notes_on_environment({wrong: a_value(field)})
    monkeypatch.undo()
    environ = dict.fromkeys(LEFT_ALONE.split(), "1")
    assert Config.from_env(environ) == Config()
    assert notes_on_environment(environ) == []


@pytest.mark.parametrize("pair", [
    "MODEL_DIR=/models", "NUM_THREADS=all", "WARMUP_STEP=auto", "COMPILER=gcc", "ITERATION=first",
    "TRACE_STEP=all", "TRAIN_LOG_EVER=never", "DEVICES=0,1",
])
def test_a_near_name_with_a_value_that_does_not_fit_is_anybodys(pair: str) -> None:
    name, _, value = pair.partition("=")
    assert train_gpt.similar_setting(name)
    (line,) = notes_on_environment({name: value})
    assert line.startswith(f"warning: {pair}: ")


@pytest.mark.parametrize("pair", ["BATCH_SIZE=32", "RUN_DIR=/scratch/run", "MATRX_LR=0.1"])
def test_a_foreign_name_has_two_ways_out(pair: str, tmp_path: Path) -> None:
    name, _, value = pair.partition("=")
    with pytest.raises(ConfigError, match=f"unset .*FOREIGN_NAMES={name}$") as error:
        notes_on_environment({name: value})
    assert f"{pair}: " in str(error.value)
    config = Config.from_env({name: value, "FOREIGN_NAMES": f"OTHER,{name}"})
    assert config == Config(foreign_names=f"OTHER,{name}")
    assert notes_on_environment({name: value}, config.foreign_names) == []
    # It speaks for these names alone, and never for a setting.
    with pytest.raises(ConfigError, match=r"MUON_W=0.2: .*did you mean MUON_WD"):
        notes_on_environment({name: value, "MUON_W": "0.2"}, config.foreign_names)
    assert Config.from_env({"SEED": "5", "FOREIGN_NAMES": "SEED"}).seed == 5
    # In a file of settings an unknown name stays an error: nobody else writes there.
    path = tmp_path / "foreign.env"
    path.write_text(f"FOREIGN_NAMES={name}\n{pair}\n")
    with pytest.raises(ConfigError, match=f"line 2: .*'{pair}'"):
        Config.from_env({"CONFIG": str(path)})


def test_names_of_others_are_not_a_part_of_the_record(tmp_path: Path) -> None:
    """Which names a machine exports is nothing that seeds of one record share."""
    plain = Config()
    wrapped = train_gpt.shipped_code(b"x = 1\n")
    foreign = Config.from_env({"FOREIGN_NAMES": "RUN_DIR, MODEL_DIR"})
    assert train_gpt.with_settings(wrapped, foreign) == train_gpt.with_settings(wrapped, plain)
    assert notes_on_environment({"RUN_DIR": "/x", "MODEL_DIR": "8"}, foreign.foreign_names) == []
    (line,) = notes_on_environment({"SEED": "5"}, "SEED")
    assert line.startswith("warning: FOREIGN_NAMES: SEED is a setting")


def test_what_a_foreign_variable_holds_stays_one_line() -> None:
    for value in ("/m\nvalidation: official (sp1024)", "\x1b[31mred", "x" * 10_000):
        (line,) = notes_on_environment({"MODEL_DIR": value})
        assert line.isprintable() and len(line) < 400


NAMED = [name for name, field in FIELDS.items() if isinstance(field.default, str)]


@pytest.mark.parametrize("name", NAMED)
def test_empty_means_not_given_for_what_names_something(name: str, tmp_path: Path) -> None:
    """As Compose and CI files hand on ${NAME:-}: the default, or the value of the file under it."""
    assert Config.from_env({name: ""}) == Config.from_env({name: "  "}) == Config()
    value = FIELDS[name].metadata["among"][-1] if FIELDS[name].metadata["among"] else a_value(FIELDS[name])
    path = tmp_path / "settings.env"
    path.write_text(f"{name}={value}\n")
    given = Config.from_env({"CONFIG": str(path), name: ""})
    assert given == Config.from_env({name: value})
    path.write_text(f"{name}=\n")
    assert Config.from_env({"CONFIG": str(path)}) == Config()


def test_an_empty_number_is_an_error_that_says_how_to_get_the_default() -> None:
    for name, field in FIELDS.items():
        if name not in NAMED:
            default = re.escape(str(field.default))
            with pytest.raises(ConfigError, match=f"{name}=''.*unset it to get the default, {default}"):
                Config.from_env({name: ""})


def test_files_are_under_the_environment_and_none_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a b ü.env"
    text = "# a comment\n\n  SEED = 5  # why\nMATRIX_LR=0.5\nDATA_PATH=/x/a#b c ü\n"
    path.write_text(text, encoding="utf-8")
    config = Config.from_env({"CONFIG": str(path), "MATRIX_LR": "0.25"})
    assert (config.seed, config.matrix_lr, config.num_layers) == (5, 0.25, Config().num_layers)
    assert config.data_path == "/x/a#b c ü"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").write_text("SEED=5\n")
    for config in ("none", ""):
        assert Config.from_env({"CONFIG": config}) == Config()


@pytest.mark.parametrize(("content", "named"), [
    ("MATRX_LR=1", "MATRX_LR"), ("PATH=/bin", "PATH"), ("SEED", "SEED"), ("SEED=x", "SEED"),
    ("CONFIG=b", "CONFIG"), ("SEED=1\nexport SEED=2", "export SEED"), ("NUM_HEADS=3", "NUM_HEADS"),
    ("\xff", "CONFIG"), (None, "CONFIG"), ("RESUME", "RESUME"), ("=5", "KEY=VALUE"),
    ("SEED=1\n\nMATRX_LR=1", "line 3: .*'MATRX_LR=1'.* did you mean .*MATRIX_LR"),
    ("MUON_MIXTURE=0", "MUON_MIXTURE.* the train_gpt.py of that run"),
])
def test_wrong_files_are_refused(content: str | None, named: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.env"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=named):
        Config.from_env({"CONFIG": str(path)})
    with pytest.raises(ConfigError, match="CONFIG"):
        Config.from_env({"CONFIG": str(tmp_path)})


def test_help_lists_every_variable_with_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_here({"SEED": "wrong, and yet help must come"}, "--help") == 0
    listed = capsys.readouterr().out.splitlines()
    defaults = Config().as_env()
    for name, field in FIELDS.items():
        (line,) = [line for line in listed if line.startswith(f"  {name}=")]
        assert line.split()[0] == f"{name}={defaults[name]}"
        assert field.metadata["meaning"] in line
        assert all(choice in line for choice in field.metadata["among"])


TEXTS = ["a b#c ü", "9,10", "q,k", "1:2", "run-1.a"]  # each is what some setting may hold


def test_what_may_be_set_reads_back_to_the_same_settings() -> None:
    """Of each setting its bounds, all of its choices, and numbers with many digits."""
    read = set()
    defaults = Config().as_env()
    for name, field in FIELDS.items():
        rules = field.metadata
        ends = [str(end) for end in (rules["low"], rules["high"]) if abs(end) < train_gpt.NO_LIMIT]
        for text in ("0", "1", "4", "128", *rules["among"], *ends, "0.1234567890123456", "1e-07", *TEXTS):
            try:
                config = Config.from_env({name: text})
            except ConfigError:
                continue
            read.add((name, text))
            overrides = config.overrides()
            assert Config.from_env(config.as_env()) == config == Config.from_env(overrides)
            assert all(defaults[changed] != value for changed, value in overrides.items())
    assert {name for name, _ in read} == FIELDS.keys() and len(read) > 400


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), st.text(max_size=30), max_size=4))
@settings(max_examples=20, deadline=None)
def test_whatever_the_text_there_is_a_config_or_a_config_error(environ: dict[str, str]) -> None:
    try:
        config = Config.from_env(environ)
    except ConfigError as error:
        assert any(name in str(error) for name in FIELDS)
    else:
        assert Config.from_env(config.as_env()) == config


@pytest.mark.parametrize(("settings", "ranks"), [
    ({}, 7), ({"TRAIN_BATCH_TOKENS": "1000"}, 1), ({"MICRO_BATCH_TOKENS": "1000"}, 1),
    ({"TRAIN_BATCH_TOKENS": "786433"}, 8), ({"MICRO_BATCH_TOKENS": "14336"}, 1),
])
def test_a_batch_that_does_not_split_evenly_is_refused_by_name(settings: dict[str, str], ranks: int) -> None:
    config = Config.from_env(settings)
    with pytest.raises(ConfigError, match=r"TRAIN_BATCH_TOKENS.*TRAIN_SEQ_LEN.*MICRO_BATCH_TOKENS"):
        train_gpt.micro_steps_per_step(config, ranks)


def test_micro_steps_are_those_that_fill_the_batch_and_few_settings_decide_the_weights() -> None:
    assert [train_gpt.micro_steps_per_step(Config(), ranks) for ranks in (1, 2, 8, 16)] == [8, 4, 1, 1]
    rounded = Config(micro_batch_tokens=100_000)  # whole sequences count
    assert train_gpt.micro_steps_per_step(rounded, 1) == 8
    stored = set(Config().as_env(train_gpt.ModelSettings))
    assert set("TRAIN_SEQ_LEN DOC_MASK VOCAB_SIZE MODEL_DIM LOGIT_SOFTCAP NUM_LOOPS".split()) <= stored
    assert not {"MATRIX_LR", "SEED", "DATA_PATH", "TTT_LR", "MATRIX_BITS"} & stored


def test_a_path_is_found_upwards_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_gpt.find_path("configs").samefile(repo / "configs")
    (tmp_path / "configs").mkdir(parents=True)
    assert train_gpt.find_path("configs").resolve() == (tmp_path / "configs").resolve()
    assert train_gpt.find_path("no/such/thing") == Path("no/such/thing")


@pytest.mark.parametrize(("count", "driver"), [(8, "absent"), (0, "there")])
def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(
    count: int, driver: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An old driver or a CPU build of torch: the driver tells the number, or its device is there."""
    monkeypatch.setattr(train_gpt.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train_gpt.torch.cuda, "device_count", lambda: count)
    (tmp_path / "there").touch()
    monkeypatch.setattr(train_gpt, "NVIDIA_DRIVER", str(tmp_path / driver))
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=rf"DEVICE={device}: torch .* can use 0 GPUs.* DEVICE=cpu"):
            train_gpt.this_machine(Config(device=device), {})
    assert not train_gpt.this_machine(Config(device="cpu"), {}).on_gpu  # asked for
    monkeypatch.setattr(train_gpt.torch.cuda, "device_count", lambda: 0)
    for hidden in ("", "-1"):  # the usual way to ask for a CPU
        assert not train_gpt.this_machine(Config(), {"CUDA_VISIBLE_DEVICES": hidden}).on_gpu
    monkeypatch.setattr(train_gpt, "NVIDIA_DRIVER", str(tmp_path / "absent"))
    assert not train_gpt.this_machine(Config(), {}).on_gpu


def test_threads_are_those_asked_for_and_else_left_alone() -> None:
    found = torch.get_num_threads()
    try:
        train_gpt.this_machine(Config(device="cpu", cpu_threads=found + 1), {})
        assert torch.get_num_threads() == found + 1
        train_gpt.this_machine(Config(device="cpu"), {})
        assert torch.get_num_threads() == found + 1
    finally:
        torch.set_num_threads(found)
