"""configs/: files name what differs from the defaults, the ancestors' the values of their scripts."""

import re
from pathlib import Path

import pytest

import train_gpt
from data.fineweb import VARIANTS
from tests.support.ancestors import load_ancestors
from tests.support.patches import is_in_the_making
from train_gpt import Config, TrainingSettings

CONFIGS = sorted(path.name for path in (Path(__file__).parents[1] / "configs").glob("*.env"))


@pytest.fixture(scope="module")
def page(repo: Path) -> str:
    return (repo / "docs" / "design.md").read_text(encoding="utf-8")


def test_configurations_are_listed_and_of_fetched_data(repo: Path) -> None:
    listed = re.findall(r"`(\w+\.env)`", (repo / "configs" / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == CONFIGS
    plain = Config.from_env({"CONFIG": str(repo / "configs/sp8192.env")})
    record = Config.from_env({"CONFIG": str(repo / "configs/frontier_1855.env")})
    for config, name in [(Config(), "caseops"), (plain, "sp8192"), (record, "caseops_published")]:
        assert config.data_path == f"data/datasets/{VARIANTS[name].folder()}"
        assert config.tokenizer_path == f"data/tokenizers/{VARIANTS[name].tokenizer}"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_names_only_what_differs_from_the_defaults(name: str, repo: Path) -> None:
    path = repo / "configs" / name
    overrides = Config.from_env({"CONFIG": str(path)}).overrides()
    assert overrides.keys() == train_gpt.read_config_file(str(path)).keys()
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("system", load_ancestors())
def test_an_ancestor_has_the_values_of_its_script(system: str, repo: Path) -> None:
    """The script's defaults and what its command sets; what it does not read is not compared."""
    ancestor = load_ancestors()[system]
    theirs = {**ancestor.defaults, **ancestor.command}
    # Of one run: its data, its random numbers, its log. And 2,048 tokens are what 0 means here.
    for own in ("RUN_ID", "SEED", "DATA_PATH", "TOKENIZER_PATH", "TRAIN_LOG_EVERY", "VAL_LOSS_EVERY",
                "EVAL_SEQ_LEN", "ROPE_TRAIN_SEQ_LEN"):
        theirs.pop(own, None)
    # Constants of ours are compared, too: they are values of these scripts.
    config = Config.from_env({"CONFIG": str(repo / "configs" / f"{ancestor.config}.env")})
    constants = "ROPE_BASE TIED_EMBED_INIT_STD ADAM_EPS TTT_MOMENTUM TTT_GRAD_CLIP".split()
    ours = {**config.as_env(), **{key: str(getattr(config, key.lower())) for key in constants}}
    compared = {key: value for key, value in theirs.items() if key in ours and value is not None}
    assert len(compared) > 25
    unequal = {key: (ours[key], value) for key, value in compared.items() if not same(ours[key], value)}
    assert unequal == {}, "(ours, theirs)"


@pytest.mark.parametrize("system", load_ancestors())
def test_the_command_of_an_ancestor_over_its_configuration_changes_nothing(system: str, repo: Path) -> None:
    """But for what names this one run: its data, its random numbers, its log."""
    ancestor = load_ancestors()[system]
    path = str(repo / "configs" / f"{ancestor.config}.env")
    plain = Config.from_env({"CONFIG": path}).as_env()
    given = Config.from_env({"CONFIG": path, **ancestor.command}).as_env()
    changed = {name for name, value in given.items() if value != plain[name]}
    assert changed <= {"DATA_PATH", "TOKENIZER_PATH", "RUN_ID", "SEED", "TRAIN_LOG_EVERY", "VAL_LOSS_EVERY"}


def same(ours: str, theirs: str) -> bool:
    """Whether two texts are the same value: equal numbers, or equal letters."""
    try:
        return float(ours) == float(theirs)
    except ValueError:
        return ours.lower() == theirs.lower()


def test_every_deciding_default_stands_in_the_table_once_with_its_value(page: str, repo: Path) -> None:
    table = page.split("## Where each default comes from")[1].split("\n## ")[0]
    stated: dict[str, str] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for name, value in re.findall(r"`([A-Z0-9_]+)=([^`]*)`", cells[0] if cells else ""):
            assert name not in stated, f"{name} stands there twice"
            assert len(cells) == 3 and all(cells), f"{name}: no source or no effect"
            stated[name] = value
    # What decides the result of a run, not only where and how fast it runs.
    defaults = Config().as_env()
    names = list(defaults)
    deciding = {*TrainingSettings().as_env(), *names[: names.index("DATA_PATH") + 1], "TOKENIZER_PATH"}
    rows = [f"{name}={defaults[name]}" for name in sorted(deciding) if stated.get(name) != defaults[name]]
    gone = sorted(stated.keys() - deciding)
    if (rows or gone) and not is_in_the_making(repo):
        pytest.skip(f"a fork with defaults of its own: {', '.join(rows + gone)}")
    assert not rows, "add these rows, each with its source, to docs/design.md"
    assert not gone, "docs/design.md has rows for settings that are gone"
