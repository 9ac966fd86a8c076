"""A pasted command of an ancestor ends before it trains a mixture of that model and the default."""

from pathlib import Path

import pytest

from tests.support.ancestors import load_ancestors
from train_gpt import Config, ConfigError, notes_on_environment


@pytest.mark.parametrize("system", ["549", "591", "785"])
def test_a_pasted_command_ends_with_the_line_that_works(system: str, repo: Path) -> None:
    ancestor = load_ancestors()[system]
    assert Config.from_env(ancestor.command)  # so that main comes to this message
    with pytest.raises(ConfigError, match=r"CONFIG=configs/\w+\.env .* CONFIG=none"):
        notes_on_environment(ancestor.command)
    for config in (str(repo / f"configs/{ancestor.config}.env"), "none"):
        lines = notes_on_environment({**ancestor.command, "CONFIG": config})
        assert all(line.startswith("note: ") for line in lines)


def test_a_few_settings_are_no_pasted_command() -> None:
    assert notes_on_environment({"NUM_LAYERS": "12", "MATRIX_LR": "0.03"}) == []
    changed = list(Config.from_env(load_ancestors()["549"].command).overrides().items())
    assert notes_on_environment(dict(changed[:4])) == []
    with pytest.raises(ConfigError, match="CONFIG=configs/pr"):
        notes_on_environment(dict(changed[:5]))
    # Six settings of somebody's own: five of eleven are less than half.
    own = dict(SEED="5", MODEL_DIM="256", NUM_HEADS="4", NUM_KV_HEADS="2", MUON_WD="0.5", BETA1="0")
    assert notes_on_environment({**dict(changed[:5]), **own}) == []
