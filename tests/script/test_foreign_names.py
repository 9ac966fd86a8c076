"""Variables that are no settings: a misspelled one is refused or named in a warning, others are ignored."""

import dataclasses

import pytest

import train_gpt
from train_gpt import ANCESTOR_SWITCHES, Config, ConfigError, notes_on_environment


def refusal(given: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as error:
        notes_on_environment(given)
    return str(error.value)


def test_all_misspelled_names_are_in_one_message_with_the_ways_out() -> None:
    message = refusal({"MATRX_LR": "1", "NUM_LAYER": "12", "SEEDS": "1", "HOME": "/root"})
    assert "MATRX_LR=1: not a setting; did you mean MATRIX_LR?" in message
    assert "NUM_LAYER=12: not a setting; did you mean NUM_LAYERS?" in message
    assert "unset" in message and message.endswith("FOREIGN_NAMES=MATRX_LR,NUM_LAYER")
    assert "SEEDS" not in message and "HOME" not in message


OF_OTHERS = [f"{name}=1" for name in "HOME PATH USER LANG TERM PWD SHELL TZ HOST PS1 SEA SEEDER".split()]
OF_SETTINGS = ["PARALLEL_START_LAYER=8", "WARMDOWN_ITERS=-1", "RESUME=x", "MATRIX_LR=1"]


@pytest.mark.parametrize("pair", [*OF_OTHERS, *OF_SETTINGS])
def test_there_is_nothing_to_say_about_settings_and_other_short_names(pair: str) -> None:
    name, _, value = pair.partition("=")
    assert notes_on_environment({name: value}) == []


@pytest.mark.parametrize(("pair", "meant"), [
    ("SEEDS=1", "SEED"), ("SEDE=3", "SEED"), ("RESUM=1", "RESUME"), ("BETA=1", "BETA"), ("GPT=1", "GPTQ"),
    ("SEEDS=1 2", "SEED"), ("MINLR=1", "MIN_LR"), ("RUNID=1", "RUN_ID"),
])
def test_a_name_of_five_letters_may_be_anybodys_and_is_a_warning(pair: str, meant: str) -> None:
    name, _, value = pair.partition("=")
    (line,) = notes_on_environment({name: value})
    assert line.startswith(f"warning: {pair}: ") and meant in line


def test_a_switch_of_an_ancestor_is_a_note_or_ends_the_run() -> None:
    """Never silently ignored: the log says what happens instead, or the run ends before it starts."""
    for name, (accepted, answer) in ANCESTOR_SWITCHES.items():
        assert notes_on_environment({name: ""}) == [f"note: {name}=: {answer}"]
        if accepted == "*":
            assert notes_on_environment({name: "0.7"}) == [f"note: {name}=0.7: {answer}"]
        else:
            assert notes_on_environment({name: accepted}) == [f"note: {name}={accepted}: {answer}"]
            message = refusal({name: "7"})
            assert f"{name}=7: " in message and answer in message
            assert notes_on_environment({name: "7"}, name) == []
    assert not ANCESTOR_SWITCHES.keys() & Config().as_env().keys()
    # As published commands write the same numbers.
    for name, value in (("ADAM_EPS", "1e-08"), ("ROPE_BASE", "10000.0"), ("TTT_GRAD_CLIP", "1.0")):
        (line,) = notes_on_environment({name: value})
        assert line.startswith(f"note: {name}={value}: ")


def test_a_public_name_of_a_constant_is_answered_with_its_value() -> None:
    """Otherwise a pasted TTT_WEIGHT_DECAY=1 would be ignored without a word."""
    ours = {"MOST_DOCUMENTS_AT_ONCE"}  # a name of no other script
    settings = {spec.name for spec in dataclasses.fields(Config)}
    for part in Config.__mro__:
        for name, value in vars(part).items():
            if type(value) in (int, float) and name not in settings and name.upper() not in ours:
                accepted, _ = ANCESTOR_SWITCHES[name.upper()]
                assert float(accepted) == value, name


def test_a_shipped_script_takes_what_fits_the_settings_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit shorter than what the default reserves for Hessians: the record reserves less."""
    environ = {"MAX_WALLCLOCK_SECONDS": "2"}
    with pytest.raises(ConfigError, match="GPTQ_RESERVE_SECONDS < MAX_WALLCLOCK_SECONDS"):
        Config.from_env(environ)
    shipped = {"GPTQ_RESERVE_SECONDS": "1.0"}
    monkeypatch.setattr(train_gpt, "SHIPPED_SETTINGS", shipped, raising=False)  # a wrapper has it
    assert Config.from_env(environ).gptq_reserve_seconds == 1.0
    assert notes_on_environment(environ) == []
