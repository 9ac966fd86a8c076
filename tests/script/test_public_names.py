"""Variables of other scripts and removed settings: accepted with a line in the log, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import train_gpt
from tests.support.public_commands import load_public_commands
from tools.translate import LAUNCHERS, public_names, published_commands
from train_gpt import Config, ConfigError, public_answers

SETTINGS = Config().as_env()
NAMES = public_names()
# Settings of version 0.5.4 that are gone, with the value that they had by default.
REMOVED = """
PREFIX_LOSS=0.0 MUON_MIXTURE=0 KEY_OFFSET_DIMS=0 EMA_SHARE=1.0 TTT_EARLY_CHUNKS= MANUAL_BACKWARD=auto
CODE_BYTES=wrapped LOADER_TIMEOUT_SECONDS=60.0 PEER_TIMEOUT_SECONDS=900.0 ROPE_BASE=10000.0
TIED_EMBED_INIT_STD=0.005 GATE_WINDOW=12 ADAM_EPS=1e-08 TTT_MOMENTUM=0.9 TTT_GRAD_CLIP=1.0
TTT_WEIGHT_DECAY=0.5 TTT_BETA1=0.0 TTT_BETA2=0.99
"""
# Settings that the published command of a system gives, each of them once.
SYSTEMS = {549: "pr549", 785: "pr785", 591: "pr591", 1493: "pr1493", 1532: "pr1493", 0: "upstream_baseline"}


def notes(**given: str) -> str:
    return "\n".join(public_answers(given))


def refusal(given: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as error:
        public_answers(given)
    return str(error.value)


def test_no_name_of_a_public_command_is_ignored() -> None:
    for command in load_public_commands():
        for name, value in command.settings.items():
            if name in SETTINGS or name.startswith(LAUNCHERS):
                continue
            try:
                assert f"{name}={value}: " in notes(**{name: value}), name
            except ConfigError as error:
                assert f"{name}={value}: " in str(error)


@pytest.mark.parametrize("pair", REMOVED.split())
def test_a_removed_setting_is_accepted_at_its_default_alone(pair: str) -> None:
    name, _, value = pair.partition("=")
    assert name not in SETTINGS
    assert notes(**{name: value}).startswith(f"note: {pair}: ")
    assert refusal({name: "0.123"}).startswith(f"{name}=0.123: ")


@pytest.mark.parametrize(("pair", "answer"), [
    ("TTT_MASK=no_qv", "use TTT_LORA_TARGETS=k,o,mlp,head"), ("TTT_MASK=other", "TTT_LORA_TARGETS lists"),
    ("TTT_Q_LORA=0", "TTT_LORA_TARGETS"), ("TTT_LOCAL_LR_MULT=0.75", "multiply TTT_LORA_LR by it"),
    ("VAL_BATCH_TOKENS=4096", "use VAL_BATCH_SIZE"), ("SLIDING_WINDOW_ENABLED=0", "EVAL_STRIDE=0"),
    ("RESUME=auto", "name the run directory"), ("LQER_RANK=4", "leave it out"),
])  # fmt: skip
def test_a_name_that_would_change_the_run_is_refused_with_the_remedy(pair: str, answer: str) -> None:
    name, _, value = pair.partition("=")
    message = refusal({name: value})
    assert message.startswith(f"{pair}: ") and answer in message


@pytest.mark.parametrize("pair", [
    "EMA_ENABLED=1", "SWA_EVERY=50", "SLIDING_WINDOW_ENABLED=1", "EMBEDDING_DIM=512",
    "MUON_WEIGHT_DECAY=0.095", "TTT_LOCAL_LR_MULT=1.0", "LQER_RANK=", "PARALLEL_START_LAYER=0",
    "WARMDOWN_ITERS=0", "MUON_MOMENTUM_WARMUP_STEPS=0", "EMBED_LR=0.3", "TTT_LR=0.002",
])  # fmt: skip
def test_a_value_that_changes_nothing_or_has_a_catch_is_told_in_one_line(pair: str) -> None:
    name, _, value = pair.partition("=")
    (line,) = public_answers({name: value})
    assert line.startswith(f"note: {pair}: ")


OF_OTHERS = [f"{name}=1" for name in "HOME PATH USER LANG TERM PWD SHELL TZ HOST PS1 SEA SEEDER".split()]
OF_SETTINGS = ["PARALLEL_START_LAYER=8", "WARMDOWN_ITERS=-1", "RESUME=x", "MATRIX_LR=1"]


@pytest.mark.parametrize("pair", [*OF_OTHERS, *OF_SETTINGS])
def test_other_short_names_and_other_values_are_nothing_to_tell(pair: str) -> None:
    name, _, value = pair.partition("=")
    assert notes(**{name: value}) == ""


def test_widths_and_all_names_in_one_message(tmp_path: Path) -> None:
    assert "EMBEDDING_DIM=256" in notes(EMBEDDING_DIM="256", MODEL_DIM="256")
    assert "EMBEDDING_DIM=256" in refusal({"EMBEDDING_DIM": "256"})
    path = tmp_path / "small.env"
    path.write_text("MODEL_DIM=256\n")
    assert "EMBEDDING_DIM=256" in notes(EMBEDDING_DIM="256", CONFIG=str(path))
    message = refusal({"LQER_RANK": "4", "MATRX_LR": "1", "PREFLIGHT_ONLY": "1", "GENERATE": "Once"})
    for pair in ("LQER_RANK=4", "MATRX_LR=1", "PREFLIGHT_ONLY=1", "GENERATE=Once"):
        assert f"{pair}: " in message
    assert "MATRX_LR=1: not a setting; did you mean MATRIX_LR?" in message


@pytest.mark.parametrize(("pair", "meant"), [
    ("SEEDS=1", "SEED"), ("SEDE=3", "SEED"), ("RESUM=1", "RESUME"), ("BETA=1", "BETA"), ("GPT=1", "GPTQ"),
    ("SEEDS=1 2", "SEED"),
    ("MINLR=1", "MIN_LR"), ("RUNID=1", "RUN_ID"), ("MODE=full", "leave it out"), ("EMA=1", "leave it out"),
    ("TRACE=1", "TRACE_STEPS=A:B"),
])  # fmt: skip
def test_a_name_of_five_letters_may_be_anybodys_and_is_a_warning(pair: str, meant: str) -> None:
    name, _, value = pair.partition("=")
    assert meant in notes(**{name: value}).split(f"warning: {pair}: ")[1]


@pytest.mark.parametrize(("pull_request", "system"), SYSTEMS.items())
def test_a_pasted_command_ends_with_the_line_that_works(pull_request: int, system: str, repo: Path) -> None:
    given = next(c.settings for c in load_public_commands() if c.pull_request == pull_request)
    assert Config.from_env(given)  # so that main comes to this message
    assert f"CONFIG=configs/{system}.env before it" in refusal(given)
    assert "CONFIG=none" in refusal(given)
    for config in (str(repo / f"configs/{system}.env"), "none"):
        assert all(line.startswith("note: ") for line in public_answers({**given, "CONFIG": config}))


def test_a_few_settings_are_no_pasted_command() -> None:
    assert notes(NUM_LAYERS="12", MATRIX_LR="0.03") == ""
    command = published_commands()["configs/pr785.env"]
    ours = {name: value for name, value in command.items() if name in SETTINGS and not name.startswith("TTT")}
    four = dict(list(ours.items())[:4])
    fifth = dict(list(ours.items())[4:5])
    assert notes(**four) == ""
    assert "CONFIG=configs/pr785.env" in refusal({**four, **fifth})
    # Six settings of somebody's own: five of eleven are less than half.
    own = dict.fromkeys("SEED NUM_HEADS NUM_KV_HEADS MLP_MULT DOC_MASK QK_GAIN_INIT".split(), "1")
    assert notes(**four, **fifth, **own) == ""
    # Variables of other programs do not count.
    others = {f"OTHER_{number}": "1" for number in range(20)}
    assert "CONFIG=configs/pr785.env" in refusal({**four, **fifth, **others})


def test_every_answer_has_a_use_and_none_comes_twice() -> None:
    for name, row in NAMES.items():
        known = name.partition("=")[0]
        assert "=" in name or (known in SETTINGS) == ("of_ours" in row), name
        assert "of_ours" not in row or row["harmless"] == "*", name
        assert len(row["answer"]) >= 8
        for pair in row.get("means", "").split():
            assert pair.partition("=")[0] in SETTINGS, name
    for config, command in published_commands().items():
        assert set(command) <= {*SETTINGS, *NAMES}, config
    file = Path(__file__).parents[2] / "configs" / "public_names.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["names"]
    listed = [name for row in rows for name in row["names"].split()]
    assert len(listed) == len(set(listed)) == len(NAMES)


def test_a_former_name_may_be_a_setting_of_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"names": "MATRIX_LR", "answer": "no effect: never read", "harmless": "*"}
    path = tmp_path / "names.json"
    monkeypatch.setattr(train_gpt, "find_path", lambda _: path)
    for of_ours, lines in (({}, []), ({"of_ours": ""}, ["note: MATRIX_LR=0.5: no effect: never read"])):
        path.write_text(json.dumps({"names": [{**row, **of_ours}], "commands": {}}))
        assert public_answers({"MATRIX_LR": "0.5"}) == lines
