"""Names of public scripts, and earlier ones of ours: taken with a line, or refused with the reason."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

import train_gpt
from tests.support.public_commands import COMMANDS_FILE, load_public_commands
from train_gpt import FORMER_NAMES, Config, ConfigError, read_settings

SETTINGS = Config().as_env()
# What each public script reads, with its defaults: facts, written down beside the commands.
SYSTEMS = json.loads(COMMANDS_FILE.with_name("public_defaults.json").read_text(encoding="utf-8"))["systems"]
# Variables of launchers and of Python, which scripts only pass on.
LAUNCHERS = ("NCCL_", "OMP_", "TORCH_", "PYTHON")

# What comes of each public command, in the order they are stored: pull request, whether it is taken, the
# configuration that is pointed to, and the names that are told of.
OUTCOMES = """
77 taken -
0 taken -
42 refused upstream_baseline MLP_HIDDEN
49 taken -
39 taken -
39 refused - INT4_LAYERS INT4_STEP
86 refused pr549 FP16_EMBED_EXPORT INT6_LAYER_END INT6_LAYER_START QAT_INT6 USE_ZSTD
65 taken -
63 refused pr549 MLP_HIDDEN
50 refused upstream_baseline EVAL_BATCH_SEQS LORA_RANK
52 taken -
61 refused - MLP_HIDDEN
65 taken -
265 taken pr549 MTP_NUM_HEADS SWA_ENABLED SWA_EVERY
287 taken pr549 EMA_ENABLED SWA_ENABLED
315 taken pr549 EMA_ENABLED LATE_QAT QAT_THRESHOLD SWA_ENABLED
549 taken pr549 EMA_ENABLED LATE_QAT LATE_QAT_THRESHOLD SWA_ENABLED SWA_EVERY TTT_BATCH_SEQS
    TTT_CHUNK_TOKENS TTT_EPOCHS TTT_FREEZE_BLOCKS TTT_GRAD_CLIP TTT_LR TTT_MOMENTUM
640 refused upstream_baseline ACTIVATION ADAM_LR ATTN_PROJ_TYPE BATCH_SCHEDULE_FRACTION BATCH_TOKENS_START
    BIGRAM_HASH BITNET_GROUP_SIZE CHURN_LOG_EVERY COMPILE_MODE CORR_WEIGHT_LR DIFF_ATTN EMBED_DIM
    EVAL_DEPTH_RECURRENCE FP_STORAGE LOGIT_HEAD_TYPE MATRIX_OPTIMIZER MLP_GROUPS MTP_HEADS REFINER
    REFINER_KERNEL ROPE_TYPE SEQ_LEN_START SEQ_SCHEDULE_FRACTION SLIDING_BATCH_SIZE SLIDING_EVAL
    SLIDING_EVAL_STRIDE SOFTCAP_TYPE TEMP_SCALING TRAINING_DEPTH_RECURRENCE TVERSKY_FEATURE_POOLS
    TVERSKY_MEMBERSHIP TVERSKY_NUM_FEATURES UNTIE_AT_FRACTION VAL_MAX_TOKENS WARMDOWN_FRACTION YARN_MAX_LEN
1019 refused - TARGET_MB
1060 refused upstream_baseline GPTQ_RESERVE_MS
1204 refused pr1493 DISABLE_LAYER0_ATTN MIXED_QUANT N_INT6_LAYERS PARALLEL_RESIDUAL POST_GPTQ_EVAL_ONLY
    RECUR_LAYERS RECUR_START_STEP REPEAT_UNTIE_MLP REPEAT_UNTIE_MLP_LAYERS
1218 taken -
1285 refused pr1493 MIXED_QUANT N_INT6_LAYERS RECUR_LAYERS
1285 refused pr1493 MIXED_QUANT N_INT6_LAYERS RECUR_LAYERS
1334 refused pr1493 RECUR_LAYERS RECUR_START_STEP
1394 taken -
1412 refused pr1493 HESSIAN_CLIP_LAMBDA LOOP_PHASE2_AT
1413 taken - TTT_EPOCHS TTT_LR
1477 taken -
1514 refused pr1493 NGRAM_TILT_ENABLED NGRAM_WITHIN_BETA NGRAM_WORD_BETA
1493 taken - TTT_EPOCHS TTT_LR
1530 taken - ARTIFACT_DIR
1530 refused - EVAL_ONLY_PATH
1610 refused - PHASED_TTT_ENABLED PHASED_TTT_PREFIX_DOCS
1610 refused - EVAL_ONLY_PATH PHASED_TTT_ENABLED PHASED_TTT_PREFIX_DOCS
1626 refused - PHASED_TTT_ENABLED PHASED_TTT_NUM_PHASES PHASED_TTT_PREFIX_DOCS
1667 refused - GATE_ATTN_OUT GATE_ATTN_SRC
1729 taken - DATASETS_DIR
1736 refused - GATED_ATTN_ENABLED PHASED_TTT_NUM_PHASES PHASED_TTT_PREFIX_DOCS
1769 refused - GATED_ATTN_ENABLED PHASED_TTT_NUM_PHASES PHASED_TTT_PREFIX_DOCS
1787 refused - PHASED_TTT_ENABLED PHASED_TTT_NUM_PHASES PHASED_TTT_PREFIX_DOCS SPARSE_ATTN_GATE_SCALE
1855 refused - GLOBAL_TTT_MOMENTUM LQER_ASYM_ENABLED LQER_ASYM_GROUP LQER_ENABLED LQER_FACTOR_BITS LQER_RANK
    LQER_TOP_K PHASED_TTT_ENABLED PHASED_TTT_NUM_PHASES PHASED_TTT_PREFIX_DOCS
1868 refused - PHASED_TTT_NUM_PHASES
0 taken -
542 refused - ATTN_VARIANT
542 taken -
641 refused upstream_baseline ACTIVATION ADAM_LR ATTN_PROJ_TYPE BATCH_SCHEDULE_FRACTION BATCH_TOKENS_START
    BIGRAM_HASH BITNET_GROUP_SIZE CHURN_LOG_EVERY COMPILE_MODE CORR_WEIGHT_LR DIFF_ATTN EMA_START_FRACTION
    EMBED_DIM EVAL_DEPTH_RECURRENCE FP_STORAGE LOGIT_HEAD_TYPE MATRIX_OPTIMIZER MLP_GROUPS MTP_HEADS REFINER
    REFINER_KERNEL ROPE_TYPE SEQ_LEN_START SEQ_SCHEDULE_FRACTION SLIDING_BATCH_SIZE SLIDING_EVAL
    SLIDING_EVAL_STRIDE SOFTCAP_TYPE TEMP_SCALING TRAINING_DEPTH_RECURRENCE TVERSKY_FEATURE_POOLS
    TVERSKY_MEMBERSHIP TVERSKY_NUM_FEATURES UNTIE_AT_FRACTION VAL_MAX_TOKENS WARMDOWN_FRACTION YARN_MAX_LEN
1104 refused upstream_baseline HNET_LR_DIFF OUTER_LAYERS RATIO_LOSS_WEIGHT TARGET_AVG_CHUNK_LEN
1104 refused upstream_baseline HNET_LR_DIFF OUTER_LAYERS RATIO_LOSS_WEIGHT TARGET_AVG_CHUNK_LEN
1104 refused upstream_baseline HNET_LR_DIFF OUTER_LAYERS RATIO_LOSS_WEIGHT TARGET_AVG_CHUNK_LEN
1443 refused - JEPA_PRETRAIN_FRAC
1337 refused - LEGENDRE_DEGREE_ATTN LEGENDRE_DEGREE_FFN LEGENDRE_GROUPS LR_SCHEDULE NUM_VIRTUAL_LAYERS
1644 refused pr1493 EVAL_OVERLAP EVAL_TEMP GPTQ_NUM_SEQS MUON_EQ_R NUM_ATTN_LAYERS QUANT_BITS
    QUANT_BITS_EMBED USE_BIGRAM_HASH USE_LZMA WARMDOWN_SHAPE WEIGHT_DECAY
2058 refused - INT6_LAYERS INT6_STEP MLP_RANK STRIDE
591 taken pr591 EMBED_LR HEAD_LR
785 taken pr785 EMA_ENABLED LATE_QAT LATE_QAT_THRESHOLD SWA_ENABLED SWA_EVERY TTT_BATCH_SEQS
    TTT_CHUNK_TOKENS TTT_EPOCHS TTT_FREEZE_BLOCKS TTT_GRAD_CLIP TTT_LR TTT_MOMENTUM
1532 taken - TTT_EPOCHS TTT_LR
"""


def names(entries: str) -> list[str]:
    return [entry.partition("=")[0] for entry in entries.split()]


ALL_FORMER = [name for row in FORMER_NAMES for name in names(row.names)]


def notes(**given: str) -> str:
    return "\n".join(read_settings(given).notes)


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as error:
        Config.from_env(environ)
    return str(error.value)


# -- the public commands -------------------------------------------------------------------------------------


def outcome(settings: dict[str, str]) -> str:
    """What the user is told: the table's words of it."""
    try:
        said = read_settings(settings).notes
        Config.from_env(settings)
        verdict = "taken"
    except ConfigError as error:
        said = str(error).split(" | ")
        verdict = "refused"
    told = set()
    nearest = "-"
    for line in said:
        found = re.search(r"CONFIG=configs/(\w+)\.env", line)
        if found:
            nearest = found[1]
        else:
            subjects, _, reason = re.sub("^(note|warning): ", "", line).partition(": ")
            assert len(reason) > 8, line
            told.update(names(subjects))
    return " ".join([verdict, nearest, *sorted(told)])


def test_what_comes_of_every_public_command() -> None:
    expected = re.sub(r"\n +", " ", OUTCOMES.strip()).split("\n")
    found = [f"{command.pull_request} {outcome(command.settings)}" for command in load_public_commands()]
    assert found == expected


def test_no_name_of_a_public_command_is_ignored() -> None:
    for command in load_public_commands():
        for name, value in command.settings.items():
            if name in SETTINGS or name.startswith(LAUNCHERS):
                continue
            try:
                assert f"{name}={value}" in notes(**{name: value}), name
            except ConfigError as error:
                assert f"{name}={value}: " in str(error)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_name_that_a_public_script_reads_is_answered(system: str) -> None:
    assert set(SYSTEMS[system]) <= {*SETTINGS, *ALL_FORMER}


@pytest.mark.parametrize(
    ("pull_request", "name", "parameters"),
    [(549, "pr549", 26_928_220), (785, "pr785", 26_928_220), (591, "pr591", 17_059_912),
     (1493, "pr1493", 35_944_536), (1532, "pr1493", 35_944_536)],
)  # fmt: skip
def test_a_command_over_its_configuration_is_the_system(
    pull_request: int, name: str, parameters: int, repo: Path
) -> None:
    """Nothing that the command sets differs from the configuration, but what names this one run."""
    file = {"CONFIG": str(repo / "configs" / f"{name}.env")}
    (command,) = [entry for entry in load_public_commands() if entry.pull_request == pull_request]
    config = Config.from_env({**file, **command.settings})
    assert sum(p.numel() for p in parameters_of(config)) == parameters
    changed = {key for key, value in config.as_env().items() if value != Config.from_env(file).as_env()[key]}
    assert changed <= {"DATA_PATH", "TOKENIZER_PATH", "RUN_ID", "SEED"}


def parameters_of(config: Config) -> list[train_gpt.Tensor]:
    with train_gpt.torch.device("meta"):
        return list(train_gpt.GPT(config, seed=None).parameters())


# -- the table -----------------------------------------------------------------------------------------------


def test_the_table_knows_what_is_a_setting() -> None:
    """A name in it is no setting, unless it is about one of its values; what it stands for is one."""
    for row in FORMER_NAMES:
        for entry in row.names.split():
            name, equals, _ = entry.partition("=")
            known = name in SETTINGS or any(other.names == name for other in FORMER_NAMES)
            assert known if equals else name not in SETTINGS, entry
        for name in names(row.stands_for):
            assert name in SETTINGS, row
    assert len(set(ALL_FORMER)) == len(ALL_FORMER) - 1  # SLIDING_WINDOW_ENABLED, and its 0


@pytest.mark.parametrize("row", FORMER_NAMES, ids=lambda row: row.names.split()[0])
def test_every_value_is_taken_with_a_line_or_refused_with_the_reason(row: train_gpt.FormerName) -> None:
    for entry in row.names.split():
        name, _, only = entry.partition("=")
        for value in (only, *row.harmless.split(), "17", "any"):
            value = SETTINGS.get(value, value).replace("*", "3")
            subject = f"{name}={value}"
            try:
                settings = read_settings({name: value})
            except ConfigError as error:
                assert f"{subject}" in str(error)
                assert len(name) > 5
            else:
                if not (only and value != only):  # another value of a setting is nothing special
                    kinds = "note: ", "warning: "
                    assert any(line.startswith(kinds) and subject in line for line in settings.notes)
                    assert settings.values == {name: value, **settings.values}


def test_a_name_that_is_not_taken_is_an_error_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.env"
    for line in ("LQER_RANK=4", "SMEAR=1", "MODE=full", "SEEDS=3", "RESUM=x"):
        path.write_text(line + "\n")
        assert line.partition("=")[0] in refusal({"CONFIG": str(path)})
    path.write_text("SWA_EVERY=50\nVAL_BATCH_TOKENS=4096\n")
    assert Config.from_env({"CONFIG": str(path)}).val_batch_size == 4096


def test_all_names_are_refused_in_one_message() -> None:
    message = refusal({"LQER_RANK": "4", "MATRX_LR": "1", "PREFLIGHT_ONLY": "1", "GENERATE": "Once"})
    for part in ("LQER_RANK=4", "MATRX_LR", "MATRIX_LR", "PREFLIGHT_ONLY=1", "GENERATE=Once"):
        assert part in message


# -- what names stand for ------------------------------------------------------------------------------------


STANDS_FOR = """
VAL_BATCH_TOKENS=4096 : VAL_BATCH_SIZE=4096
PARALLEL_RESIDUAL_START=7 : PARALLEL_START_LAYER=7 PARALLEL_MODE=gptj
MATRIX_CLIP_SIGMAS=12.85 : MLP_CLIP_SIGMAS=12.85 ATTN_CLIP_SIGMAS=12.85
MATRIX_CLIP_SIGMAS=12.85 MLP_CLIP_SIGMAS=10 : MLP_CLIP_SIGMAS=10.0 ATTN_CLIP_SIGMAS=12.85
SLIDING_WINDOW_ENABLED=0 : EVAL_STRIDE=0 TTT_ENABLED=0
WARMDOWN_ITERS=0 : WARMDOWN_FRAC=0.0
MUON_MOMENTUM_WARMUP_STEPS=0 : MUON_MOMENTUM_WARMUP_FRAC=0.0
DATA_DIR=/x/ : DATA_PATH=/x/datasets/fineweb10B_sp8192 TOKENIZER_PATH=/x/tokenizers/fineweb_8192_bpe.model
DATA_DIR=/x VOCAB_SIZE=1024 DATA_PATH=/y : DATA_PATH=/y TOKENIZER_PATH=/x/tokenizers/fineweb_1024_bpe.model
DATASETS_DIR=/y DATA_DIR=/x : DATA_PATH=/y
TTT_EVAL_SEQ_LEN=1024 : EVAL_SEQ_LEN=1024
"""


@pytest.mark.parametrize("line", STANDS_FOR.strip().split("\n"))
def test_what_a_name_stands_for(line: str) -> None:
    given, _, expected = line.partition(" : ")
    environ = dict(pair.split("=", 1) for pair in given.split())
    found = Config.from_env(environ).as_env()
    for pair in expected.split():
        name, _, value = pair.partition("=")
        assert found[name] == value


def test_what_the_environment_says_is_over_what_a_file_says(tmp_path: Path) -> None:
    path = tmp_path / "settings.env"
    path.write_text("MLP_CLIP_SIGMAS=5\nWARMDOWN_FRAC=0.72\nWARMDOWN_ITERS=0\n")
    file = {"CONFIG": str(path)}
    as_in_file = Config.from_env(file)
    assert (as_in_file.warmdown_frac, as_in_file.mlp_clip_sigmas) == (0.72, 5.0)
    assert read_settings(file).notes == []  # both are given: nothing is to be said
    changed = Config.from_env({**file, "WARMDOWN_ITERS": "0", "MATRIX_CLIP_SIGMAS": "9"})
    assert (changed.warmdown_frac, changed.mlp_clip_sigmas, changed.attn_clip_sigmas) == (0.0, 9.0, 9.0)


def test_one_that_is_given_wins_and_is_told_of() -> None:
    assert "EVAL_STRIDE=32 is given with it, and wins" in notes(SLIDING_WINDOW_ENABLED="0", EVAL_STRIDE="32")


def test_of_two_former_names_that_disagree_one_wins_and_the_other_is_told_of() -> None:
    both = {"GATE_WIDTH": "12", "SMEAR_GATE_WIDTH": "16"}
    assert Config.from_env(both).gate_window == 12
    assert "SMEAR_GATE_WIDTH=16: is GATE_WINDOW; GATE_WINDOW=12 of another name" in notes(**both)
    assert "DATA_PATH=/y of another name" in notes(DATASETS_DIR="/y", DATA_DIR="/x")
    assert "wins" not in notes(GATE_WIDTH="16", SMEAR_GATE_WIDTH="16")


def test_a_width_is_compared_with_the_setting() -> None:
    assert "EMBEDDING_DIM=256" in notes(EMBEDDING_DIM="256", MODEL_DIM="256")
    assert "EMBEDDING_DIM=256" in refusal({"EMBEDDING_DIM": "256"})


def test_rates_of_an_untied_head_are_told_of_where_they_do_nothing() -> None:
    assert "EMBED_LR=0.3 HEAD_LR=0.1: no effect with TIE_EMBEDDINGS=1" in notes(EMBED_LR="0.3", HEAD_LR="0.1")
    assert notes(EMBED_LR="0.3", HEAD_LR="0.1", TIE_EMBEDDINGS="0") == ""


# -- short names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [("SEEDS", "SEED"), ("SED", "SEED"), ("ESED", "SEED"), ("SEFD", "SEED"), ("RESUM", "RESUME"),
     ("BETA", "BETA1"), ("BETA3", "BETA2"), ("GPT", "GPTQ"), ("MINLR", "MIN_LR"), ("RUNID", "RUN_ID")],
)  # fmt: skip
def test_a_short_name_near_a_setting_is_told_of(name: str, meant: str) -> None:
    assert meant in notes(**{name: "1"}).split(f"warning: unknown variable {name}: did you mean")[1]
    assert Config.from_env({name: "1"}) == Config()


@pytest.mark.parametrize("pair", ["MODE=full", "EMA=1", "TRACE=1"])
def test_a_short_name_of_another_script_is_told_of(pair: str) -> None:
    """In the environment it may be anybody's."""
    name, _, value = pair.partition("=")
    assert notes(**{name: value}).startswith(f"warning: {pair}: ")


@pytest.mark.parametrize("name", "HOME PATH USER LANG TERM PWD SHELL TZ HOST PS1 SEA SEEDER".split())
def test_other_short_names_are_left_alone(name: str) -> None:
    assert notes(**{name: "1"}) == ""


# -- values that public scripts allow ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [("TRAIN_PREFETCH_QUEUE=100", "100"), ("ITERATIONS=0", "0"), ("MAX_WALLCLOCK_SECONDS=-1", "0.0"),
     ("TRAIN_LOG_EVERY=0", "0"), ("EVAL_SEQ_LEN=-1", "0"), ("VAL_LOSS_EVERY=-1", "0"),
     ("GRAD_CLIP_NORM=-1", "0.0"), ("PARALLEL_START_LAYER=11", "11"), ("XSA_LAST_N=99", "99"),
     ("ENABLE_LOOPING_AT=2", "2.0"), ("TIE_EMBEDDINGS=0", "0"), ("WARMDOWN_ITERS=30000", "30000")],
)  # fmt: skip
def test_values_that_public_scripts_allow(given: str, expected: str) -> None:
    name, _, value = given.partition("=")
    assert Config.from_env({name: value}).as_env()[name] == expected
    assert Config.from_env({"EVAL_STRIDE": "-1", "TTT_ENABLED": "0"}).eval_stride == 0


# -- configurations of the ancestors -------------------------------------------------------------------------


# With a hash of what their settings resolve to: who changes one on purpose changes it here as well.
ANCESTORS = {
    "upstream_baseline": "c575b062ceec",
    "pr549": "960d46caf263",
    "pr591": "b0e2674318b3",
    "pr785": "f72dbb5feb7f",
    "pr1493": "91890742e90b",
    "default_0_4": "9b3d67c9470a",
    "frontier_1855": "fcdfcaed7feb",
    "frontier_2014": "f119a79067a9",
}


@pytest.mark.parametrize("name", ANCESTORS)
def test_an_ancestor_names_all_it_depends_on(name: str, repo: Path) -> None:
    """No later change of a default changes it."""
    path = repo / "configs" / f"{name}.env"
    named = train_gpt.read_config_file(str(path))
    assert Config().as_env(train_gpt.TrainingSettings).keys() <= named.keys()
    assert {"DATA_PATH", "TOKENIZER_PATH"} <= named.keys()
    stored = """ARTIFACT_BYTES_MAX CODE_BYTES RATE_CONTROL MATRIX_BITS EMBED_BITS MLP_CLIP_SIGMAS
    ATTN_CLIP_SIGMAS EMBED_CLIP_SIGMAS TRELLIS COLUMN_STEPS GPTQ EVAL_SEQ_LEN EVAL_STRIDE TTT_ENABLED"""
    assert set(stored.split()) <= named.keys()
    if named["GPTQ"] == "1":
        assert {key for key in SETTINGS if key.startswith("GPTQ_")} <= named.keys()
    if named["TTT_ENABLED"] == "1":
        of_its_mode = train_gpt.SETTINGS_OF_TTT_MODE[named["TTT_MODE"]].split()
        assert set(of_its_mode) <= named.keys()
    resolved = Config.from_env({"CONFIG": str(path)}).as_env()
    values = json.dumps({key: resolved[key] for key in sorted(named)})
    assert hashlib.sha256(values.encode()).hexdigest()[:12] == ANCESTORS[name], values


@pytest.mark.parametrize(
    ("name", "system"),
    [("upstream_baseline", "baseline"), ("pr549", "549"), ("pr591", "591"), ("pr785", "785"),
     ("pr1493", "1493"), ("pr1493", "1532")],
)  # fmt: skip
def test_an_ancestor_has_the_values_of_its_script(name: str, system: str, repo: Path) -> None:
    """The script's defaults and what its command sets; what it does not read is not compared."""
    theirs = dict(SYSTEMS[system])
    for command in load_public_commands():
        if str(command.pull_request) == system:
            theirs.update(command.settings)
    # Not of the system: where its data lie, its random numbers; and 2,048 tokens are what 0 means here.
    for own in ("RUN_ID", "SEED", "DATA_PATH", "TOKENIZER_PATH", "EVAL_SEQ_LEN", "ROPE_TRAIN_SEQ_LEN"):
        theirs.pop(own, None)
    ours = Config.from_env({"CONFIG": str(repo / "configs" / f"{name}.env")}).as_env()
    compared = [key for key, value in theirs.items() if key in ours and value is not None]
    assert len(compared) > 30
    assert {key: ours[key] for key in compared if not train_gpt.same_value(ours[key], theirs[key])} == {}
