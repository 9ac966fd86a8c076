"""`translate`: every public command in our settings, as version 0.5.4 took it, or the reason why not."""

import io
import json
from pathlib import Path

import pytest

import train_gpt
from tests.support.public_commands import COMMANDS_FILE, load_public_commands
from tests.tools.conftest import Tool
from tools.commands import shell_commands
from tools.translate import published_commands, translate
from train_gpt import Config

# What each public script reads, with its defaults: facts, written down beside the commands.
SYSTEMS = json.loads(COMMANDS_FILE.with_name("public_defaults.json").read_text(encoding="utf-8"))["systems"]
# What comes of the stored commands: names that none of them gets here, and what the accepted ones get.
OUTCOMES = json.loads(COMMANDS_FILE.with_name("public_outcomes.json").read_text(encoding="utf-8"))
# Commands whose value of such a name asks for what is here.
FITTING = {(1787, "GATED_ATTN_ENABLED"), (1855, "SPARSE_ATTN_GATE_SCALE"), (591, "ROPE_BASE")}


def translated(settings: dict[str, str]) -> Config:
    """The settings of a command once it is translated."""
    found = translate(settings)
    assert not found.refused
    config = {"CONFIG": found.config} if found.config else {}
    return Config.from_env({**config, **found.settings})


def test_every_public_command_has_its_outcome() -> None:
    for command in load_public_commands():
        fitting = {name for number, name in FITTING if number == command.pull_request}
        expected = sorted({*command.settings} & {*OUTCOMES["refused"]} - fitting)
        listed = translate(command.settings).refused.values()
        names = {pair.partition("=")[0] for pairs in listed for pair in pairs}
        assert sorted(names) == expected, command.folder
    # Except for those of an ancestor.
    then = OUTCOMES["commands"]
    accepted = [command for command in load_public_commands() if not translate(command.settings).refused]
    assert [command.pull_request for command in accepted] == [entry["pull_request"] for entry in then]
    for command, entry in zip(accepted, then, strict=True):
        found = translate(command.settings)
        assert found.config == entry["config"]
        if not found.config.startswith("configs/"):
            assert translated(command.settings).overrides() == entry["settings"], command.folder


@pytest.mark.parametrize(("pull_request", "name"), [
    (549, "pr549"), (785, "pr785"), (591, "pr591"), (1493, "pr1493"), (1532, "pr1493"),
])  # fmt: skip
def test_an_ancestor_is_its_configuration(pull_request: int, name: str, repo: Path) -> None:
    """Translated, or over its configuration: nothing differs but what names this one run."""
    (command,) = [entry for entry in load_public_commands() if entry.pull_request == pull_request]
    theirs = Config.from_env({"CONFIG": str(repo / "configs" / f"{name}.env")}).as_env()
    for config in (
        translated(command.settings),
        Config.from_env({"CONFIG": f"configs/{name}.env", **command.settings}),
    ):
        changed = {setting for setting, value in config.as_env().items() if value != theirs[setting]}
        assert changed <= {"DATA_PATH", "TOKENIZER_PATH", "RUN_ID", "SEED"}


def test_every_name_is_answered_and_ancestors_are_as_published() -> None:
    for name in {name for read in SYSTEMS.values() for name in read}:
        assert "no setting here" not in "".join(translate({name: "17"}).refused), name
    for config, command in published_commands().items():
        published = [entry.settings for entry in load_public_commands()]
        assert any(command.items() <= settings.items() for settings in published), config


STANDS_FOR = """
VAL_BATCH_TOKENS=4096 : VAL_BATCH_SIZE=4096
PARALLEL_RESIDUAL_START=7 : PARALLEL_START_LAYER=7 PARALLEL_MODE=gptj
MATRIX_CLIP_SIGMAS=12.85 : MLP_CLIP_SIGMAS=12.85 ATTN_CLIP_SIGMAS=12.85
MATRIX_CLIP_SIGMAS=12.85 MLP_CLIP_SIGMAS=10 : MLP_CLIP_SIGMAS=10.0 ATTN_CLIP_SIGMAS=12.85
SLIDING_WINDOW_ENABLED=0 : EVAL_STRIDE=0 TTT_ENABLED=0
WARMDOWN_ITERS=0 : WARMDOWN_ITERS=0
DATA_DIR=/x/ : DATA_PATH=/x/datasets/fineweb10B_sp8192 TOKENIZER_PATH=/x/tokenizers/fineweb_8192_bpe.model
DATA_DIR=/x VOCAB_SIZE=1024 DATA_PATH=/y : DATA_PATH=/y TOKENIZER_PATH=/x/tokenizers/fineweb_1024_bpe.model
DATASETS_DIR=/y DATA_DIR=/x : DATA_PATH=/y
TTT_EVAL_SEQ_LEN=1024 : EVAL_SEQ_LEN=1024
TTT_MASK=no_qv : TTT_LORA_TARGETS=k,o,mlp,head
"""


def test_what_a_name_stands_for() -> None:
    for line in STANDS_FOR.strip().split("\n"):
        given, _, expected = line.partition(" : ")
        found = translated(dict(pair.split("=", 1) for pair in given.split())).as_env()
        for pair in expected.split():
            name, _, value = pair.partition("=")
            assert found[name] == value, line
    # Our own name wins, and that is told.
    both = translate({"MATRIX_CLIP_SIGMAS": "12.85", "MLP_CLIP_SIGMAS": "10"})
    assert "MLP_CLIP_SIGMAS=10 is given as well and wins" in "".join(both.notes)
    assert both.settings == {"MLP_CLIP_SIGMAS": "10", "ATTN_CLIP_SIGMAS": "12.85"}


def test_commands_are_translated(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = [entry for entry in load_public_commands() if entry.pull_request == 785]
    pairs = " ".join(f"{name}={value}" for name, value in command.settings.items())
    text = f"NCCL_NET=Socket {pairs} \\\n  torchrun --nproc_per_node=4 folder/train_gpt.py"
    *comments, last = tool("translate", text).splitlines()
    settings = "CONFIG=configs/pr785.env NCCL_NET=Socket SEED=1337"
    assert last == f"{settings} torchrun --standalone --nproc_per_node=4 train_gpt.py"
    assert all(line.startswith("# note: ") for line in comments)
    assert any("SWA_ENABLED=1 SWA_EVERY=50: no effect" in line for line in comments)
    (again,) = shell_commands(last)
    assert train_gpt.public_answers(again.settings) == []
    assert tool("translate", "MUON_WEIGHT_DECAY=0.09").splitlines()[-1] == "MUON_WD=0.09 python train_gpt.py"
    monkeypatch.setattr("sys.stdin", io.StringIO("export SEED=3\ntorchrun train_gpt.py\n"))
    assert tool("translate") == "SEED=3 torchrun --standalone --nproc_per_node=8 train_gpt.py\n"
    assert "close the quotation" in tool("translate", "NAME='open torchrun train_gpt.py", status=2)


def test_a_refused_command_is_a_comment_and_exit_status_1(tool: Tool) -> None:
    text = "LQER_RANK=4 MATRX_LR=1 SEED=2 NEW_THING=1 NUM_HEADS=3 python train_gpt.py"
    lines = tool("translate", text, status=1).splitlines()
    assert all(line.startswith("# ") for line in lines)
    for part in (
        "# refused: LQER_RANK=4: there is no low-rank correction of rounding errors; leave it out",
        "# refused: MATRX_LR=1: no setting here; did you mean MATRIX_LR?",
        "# refused: NEW_THING=1: no setting here; leave it out",
        "# NUM_HEADS=3 SEED=2 python train_gpt.py",
    ):
        assert part in lines
    assert any("expected MODEL_DIM as a multiple of NUM_HEADS" in line for line in lines)
