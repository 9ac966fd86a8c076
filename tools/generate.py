"""`generate MODEL PROMPT`: continue a prompt with a run's artifact. It needs only that and its tokenizer.

A CaseOps tokenizer is recognized by its pieces. The prompt is then coded for it, and the text decoded.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import sentencepiece
import torch

from data import caseops, fuse
from tools.runs import script
from tools.runs.errors import RecordError
from tools.runs.folder import CONFIG
from tools.runs.runs import ARTIFACT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, metavar="MODEL", help="model.bin of a run, or its directory")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to write (default: 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: always take the likeliest token (default: 0.8)"
    )
    parser.add_argument(
        "--top-k", type=int, default=40, metavar="N",
        help="sample from the N likeliest tokens; 0: from all tokens (default: 40)",
    )
    parser.add_argument("--seed", type=int, default=1337, help="seed for sampling (default: 1337)")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="default: the one named in the config.env next to the artifact"
    )


def run(args: argparse.Namespace) -> int:
    if args.tokens < 1 or args.temperature < 0 or args.top_k < 0:
        raise RecordError("expected --tokens of at least 1, --temperature and --top-k of at least 0")
    # The other verbs take the directory of a run.
    artifact = args.artifact / ARTIFACT if args.artifact.is_dir() else args.artifact
    try:
        model, about = script.load_artifact(artifact)
        pieces = load_tokenizer(artifact, about.tokenizer_sha256, args.tokenizer)
        data = script.find_path(settings_of_run(artifact.parent).data_path)
        pairs = script.read_manifest(data).fused
    except (script.ArtifactError, script.ConfigError) as error:
        raise RecordError(f"{error}; name the model.bin of a run of this script") from error
    except script.DataError as error:
        raise RecordError(str(error)) from error
    fused = caseops.form_of(pieces)
    prompt = args.prompt if fused is None else caseops.encode(args.prompt, fused)
    text = generate_text(model, pieces, prompt, args.tokens, args.temperature, args.top_k, args.seed, pairs)
    print(text if fused is None else caseops.read(text, fused))
    return 0


def load_tokenizer(artifact: Path, expected: str, given: str | None) -> sentencepiece.SentencePieceProcessor:
    """The tokenizer that the artifact was trained with, by its expected SHA-256; RecordError for another."""
    name = given or tokenizer_of_run(artifact.parent)
    path = script.find_path(name)
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != expected:
        found = "another file" if content else "no file"
        raise RecordError(
            f"{path}: {found}, expected the tokenizer of {artifact}, with sha256 {expected};"
            " name it with --tokenizer"
        )
    return sentencepiece.SentencePieceProcessor(model_proto=content)


def tokenizer_of_run(directory: Path) -> str:
    """The path in the config.env of a run directory; without one, the default."""
    return settings_of_run(directory).tokenizer_path


def settings_of_run(directory: Path) -> script.Config:
    """The settings in the config.env of a run directory; without one, the defaults."""
    settings = directory / CONFIG
    environment = {"CONFIG": str(settings)} if settings.is_file() else {}
    return script.Config.from_env(environment)


@torch.no_grad()
def generate_text(
    model: script.GPT,
    pieces: sentencepiece.SentencePieceProcessor,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    pairs: Mapping[int, tuple[int, int]] = MappingProxyType({}),
) -> str:
    """The prompt and N more tokens, sampled among the `top_k` likeliest; temperature 0: the likeliest.

    pairs: of tokens that data/fuse.py made one.
    """
    softcap = model.settings.logit_softcap
    context_tokens = model.settings.train_seq_len
    choices = torch.Generator().manual_seed(seed)
    ids = fuse.fuse(np.array([script.BOS_ID, *pieces.encode(prompt)]), pairs)[0].tolist()
    for _ in range(tokens):
        hidden_BTD = model(torch.tensor([ids[-context_tokens:]]))
        logits_V = model.logits(hidden_BTD[0, -1])
        if softcap:
            logits_V = softcap * torch.tanh(logits_V / softcap)
        likeliest = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
        odds = (likeliest.values / max(temperature, 1e-6)).softmax(-1)
        chosen = torch.multinomial(odds, 1, generator=choices)
        ids.append(int(likeliest.indices[chosen]))
    return str(pieces.decode(fuse.separate(np.array(ids), pairs)[0].tolist()))
