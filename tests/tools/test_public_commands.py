"""What a README's commands set, read as a shell would pass it; synthetic READMEs, and the stored facts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.commands import Command, readme_commands, shell_commands


def in_readme(shell: str) -> str:
    return f"# A run\n\nWIDTH=1 torchrun train_gpt.py as prose.\n\n```bash\n{shell}\n```\n\nMore prose.\n"


STARTS = [
    "python train_gpt.py", "./.venv/bin/python -u train_gpt_small.py", "python3.11 train_gpt.py --help",
    "uv run torchrun train_gpt.py", "python -m torch.distributed.run --nproc_per_node=2 train_gpt.py",
    "nohup /usr/bin/torchrun train_gpt.py", "torchrun --standalone my_own_script.py",
    "python train_gpt.py DEPTH=2 --size=3",
]  # fmt: skip
# What stands in a block of a README, and the settings of each of its commands.
BLOCKS: list[tuple[str, list[dict[str, str]]]] = [
    *[(f"WIDTH=64 {start}", [{"WIDTH": "64"}]) for start in STARTS],
    ("REPO=me/data python3 data/download.py --variant a", []),
    ("cp train_gpt.py old.py\nwc -c train_gpt.py\npython -m py_compile train_gpt.py", []),
    ("env WIDTH=64 NAME='two words' LAYERS=\"9,10\" EMPTY= torchrun train_gpt.py",
     [{"WIDTH": "64", "NAME": "two words", "LAYERS": "9,10", "EMPTY": ""}]),
    # Exports reach every later command, plain variables of the shell do not.
    ("LOCAL=1\nexport WIDTH=64\nexport DEPTH=2 RATE=3 && WIDTH=128 python train_gpt.py\npython train_gpt.py",
     [{"WIDTH": "128", "DEPTH": "2", "RATE": "3"}, {"WIDTH": "64", "DEPTH": "2", "RATE": "3"}]),
    # Variables of the text are put in, and open values left out.
    ('WIDTH=64\nFOLDER="runs/w${WIDTH}" WIDTH=$WIDTH SEED=<SEED> OTHER=$UNKNOWN python train_gpt.py',
     [{"FOLDER": "runs/w64", "WIDTH": "64"}]),
    # A loop gives its first value.
    ("for SEED in 42 0 1234; do\n  SEED=$SEED torchrun train_gpt.py > log_${SEED}.txt 2>&1\ndone",
     [{"SEED": "42"}]),
    ("for SEED in 42 0\ndo export SEED=$SEED\n  torchrun train_gpt.py\ndone", [{"SEED": "42"}]),
    # Comments, and documents in the text.
    ("# don't set WIDTH=1 torchrun train_gpt.py\n  # nor DEPTH=1 torchrun train_gpt.py\n"
     "cat > a.json << 'EOF'\n{\"name\": \"it's\"}\nEOF\n"
     "WIDTH=64 python train_gpt.py  # it's DEPTH=2 by default",
     [{"WIDTH": "64"}]),
]  # fmt: skip


@pytest.mark.parametrize(("shell", "settings"), BLOCKS)
def test_settings_of_the_commands_of_a_block(shell: str, settings: list[dict[str, str]]) -> None:
    assert [command.settings for command in readme_commands(in_readme(shell))] == settings


def test_blocks_and_joined_lines() -> None:
    shell = "WIDTH=64 DEPTH=2 \\\nRATE=1e-3 \\\n  torchrun --nproc_per_node=8 \\\n  runs/train_gpt.py"
    expected = Command("train_gpt.py", {"WIDTH": "64", "DEPTH": "2", "RATE": "1e-3"})
    assert readme_commands(in_readme(shell)) == [expected]
    # Exports end with it, and code within a line or prose is none.
    readme = in_readme("export WIDTH=64") + in_readme("python train_gpt.py")
    assert readme_commands(readme) == [Command("train_gpt.py", {})]
    readme = "```bash pip install x```\n\n```bash\nWIDTH=64 python train_gpt.py\n```\n"
    assert readme_commands(readme) == [Command("train_gpt.py", {"WIDTH": "64"})]
    assert readme_commands("Set `WIDTH=1 torchrun train_gpt.py` as you like.\n") == []
    readme = in_readme("MODEL\\_WIDTH=64 \\\\\nDEPTH=2 \\\\\ntorchrun train\\_gpt.py").replace("\n", "\r\n")
    assert readme_commands(readme) == [Command("train_gpt.py", {"MODEL_WIDTH": "64", "DEPTH": "2"})]
    with pytest.raises(ValueError, match="close the quotation"):
        shell_commands("NAME='open torchrun train_gpt.py")


def test_a_shell_agrees(tmp_path: Path) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text("import json, os\nprint(json.dumps(dict(os.environ)))\n")
    shell = (
        "PAIR_UNSEEN=1\nexport PAIR_A=1 PAIR_B=two\nbase=x\n"
        f'PAIR_B="3 4" PAIR_C=${{base}}y env PAIR_D=5 {Path(sys.executable).name} {script} PAIR_E=6'
    )
    found = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}"}  # its folder's name may hold a space
    told = subprocess.run(["bash", "-c", shell], check=True, capture_output=True, text=True, env=found).stdout
    (command,) = shell_commands(shell)
    seen = {name: value for name, value in json.loads(told).items() if name.startswith("PAIR_")}
    assert command.settings == seen
