"""Text from an artifact: reproducible, and with the tokenizer that it was trained with or not at all."""

import functools
import hashlib
import types
from pathlib import Path

import pytest
import sentencepiece
import torch

import train_gpt
from data import caseops
from tests.support import case
from tests.support.processes import Ended
from tests.tools.conftest import Tool
from tools import generate
from tools.runs import script

load_once = functools.cache(train_gpt.load_artifact)


@pytest.fixture(autouse=True)
def the_finished_run_s_artifact_is_read_once(finished: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what these tests took was reading it again."""
    artifact = finished.directory / "model.bin"

    def load(path: Path) -> tuple[train_gpt.GPT, train_gpt.ArtifactInfo]:
        return load_once(path) if path == artifact else train_gpt.load_artifact(path)

    monkeypatch.setattr(script, "load_artifact", load)


@pytest.fixture
def written(tool: Tool) -> Tool:
    """What the verb prints."""
    return functools.partial(tool, "generate")


def test_text_goes_on_from_the_prompt_every_time(finished: Ended, written: Tool) -> None:
    model = finished.directory / "model.bin"  # its config.env names the tokenizer
    texts = [written(model, "Bale", "--tokens", 12, "--seed", seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and all(text.startswith("Bale") for text in texts)
    assert written(finished.directory, "Bale", "--tokens", 12, "--seed", 1) == texts[0]
    assert len(written(model, "Bale", "--tokens", 40)) > len(texts[0])  # beyond the context of 32 too
    short = (model, "Bale", "--tokens", 8)
    greedy = [written(*short, "--temperature", 0, "--seed", seed) for seed in (1, 2)]
    assert greedy[0] == greedy[1] == written(*short, "--top-k", 1)
    assert greedy[0] != written(*short, "--top-k", 0)


def test_the_likeliest_token_is_the_one_with_the_least_loss(finished: Ended, dataset: Path) -> None:
    model, _ = train_gpt.load_artifact(finished.directory / "model.bin")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(dataset / "tokenizer.model"))
    ids = [train_gpt.BOS_ID, *pieces.encode("Bale ba")]
    with torch.no_grad():
        hidden_ND = model(torch.tensor([ids]))[0, -1:].expand(model.settings.vocab_size, -1)
        nats = model.loss_per_token(hidden_ND, torch.arange(model.settings.vocab_size))
    expected = pieces.decode([*ids, int(nats.argmin())])
    assert generate.generate_text(model, pieces, "Bale ba", 1, 0.0, 0, 1) == expected


def test_what_does_not_fit_is_told_and_an_artifact_may_lie_anywhere(
    finished: Ended, dataset: Path, tmp_path: Path, written: Tool
) -> None:
    def refused(*arguments: object) -> str:
        told = written(*arguments, status=2)
        assert told.startswith("tools generate: ") and "Traceback" not in told
        return told

    model, damaged, foreign = finished.directory / "model.bin", tmp_path / "model.bin", tmp_path / "tokenizer"
    damaged.write_bytes(model.read_bytes()[:-1])
    foreign.write_bytes((dataset / "tokenizer.model").read_bytes() + b"\0")
    assert "truncated or damaged" in refused(damaged, "Bale")
    assert "No such file" in refused(tmp_path / "absent", "Bale")
    told = refused(model, "Bale", "--tokenizer", foreign)
    assert "another file" in told and "--tokenizer" in told and str(foreign) in told
    assert "no file" in refused(model, "Bale", "--tokenizer", tmp_path / "absent")
    for option in ("--tokens", "--temperature", "--top-k"):
        assert option in refused(model, "Bale", option, -1)
    alone = damaged
    alone.write_bytes(model.read_bytes())
    assert "--tokenizer" in refused(alone, "Bale")
    there = written(model, "Bale", "--tokens", 12)
    tokenizer = dataset / "tokenizer.model"
    assert written(alone, "Bale", "--tokens", 12, "--tokenizer", tokenizer) == there


@pytest.mark.parametrize("variant", ["caseops", "caseops_fused"])
def test_text_in_a_case_transform_is_read_back(
    variant: str, tmp_path: Path, written: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is fed what the tokenizer was trained on, and a person reads plain text."""
    settings = train_gpt.Config.from_env(case.make_dataset(tmp_path, variant))
    tokenizer = Path(settings.tokenizer_path)
    about = types.SimpleNamespace(tokenizer_sha256=hashlib.sha256(tokenizer.read_bytes()).hexdigest())
    model = train_gpt.build_model(settings)
    monkeypatch.setattr(script, "load_artifact", lambda path: (model, about))
    pieces = generate.load_tokenizer(tmp_path, about.tokenizer_sha256, str(tokenizer))
    seen: list[str] = []
    original = generate.generate_text

    def watched(model: object, pieces: object, prompt: str, *rest: object) -> str:
        seen.append(prompt)
        return original(model, pieces, prompt, *rest) + caseops.TITLE  # as if it had been cut off there

    monkeypatch.setattr(generate, "generate_text", watched)
    prompt = "Bale McGraw of NASA"
    text = written(tmp_path / "model.bin", prompt, "--tokens", 30, "--tokenizer", tokenizer)
    assert seen == [caseops.encode(prompt, variant == "caseops_fused")]
    assert pieces.decode(pieces.encode(seen[0])) == seen[0]
    assert text.startswith(prompt) and not text.endswith(f"{caseops.TITLE}\n")
