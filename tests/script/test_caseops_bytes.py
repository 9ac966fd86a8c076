"""Bytes of CaseOps data: the score divides by those of the original text; no other sidecar will do."""

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train_gpt
from data import shards
from tests.support import case
from tests.support.subject import RecordingRun
from train_gpt import Config, DataError, Machine, open_shards, read_validation, token_bytes


@pytest.fixture(scope="module", params=["caseops", "caseops_fused"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The settings of a data set of each form."""
    return case.make_dataset(tmp_path_factory.mktemp("case"), request.param)


@pytest.fixture
def settings(made: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The same with a copy of the data set, to be damaged."""
    shutil.copytree(made["DATA_PATH"], tmp_path / "data")
    return {**made, "DATA_PATH": str(tmp_path / "data")}


def val_shards(folder: str | Path) -> list[train_gpt.Shard]:
    return open_shards(f"{folder}/fineweb_val_[0-9]*.bin")


def test_scores_and_documents_have_the_bytes_of_the_text(made: dict[str, str]) -> None:
    one_layer = {"NUM_LAYERS": "1", "NUM_LOOPS": "0", "PARALLEL_START_LAYER": "-1", "XSA_LAST_N": "1"}
    validation = {"EVAL_STRIDE": "16", "TTT_ENABLED": "1", "TTT_CHUNK_TOKENS": "1024"}
    config = Config.from_env({**made, **one_layer, **validation})
    data = read_validation(val_shards(made["DATA_PATH"]), config)
    text_bytes = sum(len(text.encode()) for text in case.texts()[: case.VAL_DOCUMENTS])
    assert data.bytes_total == text_bytes

    run = RecordingRun()
    scores = train_gpt.evaluate(train_gpt.build_model(config), config, run, data, "int6")
    assert list(scores) == ["legal_ttt", "sliding_window", "roundtrip"]
    for score in scores.values():
        assert score.bytes == text_bytes and score.scored_tokens == len(data.tokens) - 1
        bits = score.nats * score.scored_tokens / math.log(2)
        assert score.bits_per_byte == pytest.approx(bits / text_bytes, rel=1e-12)
    config = Config.from_env(made)
    tokens = np.concatenate([train_gpt.read_tokens(shard) for shard in val_shards(made["DATA_PATH"])])
    counts = np.append(0, token_bytes(tokens, config))
    starts = np.flatnonzero(tokens == train_gpt.BOS_ID)
    of_document = np.add.reduceat(counts, starts).tolist()
    assert of_document == [len(text.encode()) for text in case.texts()[: case.VAL_DOCUMENTS]]
    # A limit on the targets takes their bytes alone, wherever it cuts.
    for limit in (7, 999, 1000, 1001):
        config = Config.from_env({**made, "VAL_TOKENS_LIMIT": str(limit)})
        found = read_validation(val_shards(made["DATA_PATH"]), config)
        assert found.bytes_total == counts[1 : limit + 1].sum()


def a_shard_without(folder: Path) -> None:
    (folder / "fineweb_val_bytes_000001.bin").unlink()


def a_shorter_one(folder: Path) -> None:
    path = folder / "fineweb_val_bytes_000000.bin"
    shards.write_shard(path, shards.read_shard(path)[:-1].copy())


def none_at_all(folder: Path) -> None:
    for path in folder.glob("fineweb_val_bytes_*.bin"):
        path.unlink()


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (a_shard_without, "fineweb_val_bytes_000002.bin: expected number 000001 here"),
    (a_shorter_one, r"fineweb_val_bytes.*\[999, .*expected .*\[1000, .*get the data again"),
    (none_at_all, "TOKENIZER_PATH=.*CaseOps marks.* no fineweb_val_bytes.*get the data again"),
]


@pytest.mark.parametrize(("damage", "told"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_wrong_sidecar_refused(settings: dict[str, str], damage: Callable[[Path], None], told: str) -> None:
    folder = Path(settings["DATA_PATH"])
    damage(folder)
    with pytest.raises(DataError, match=told):
        read_validation(val_shards(folder), Config.from_env(settings))


@pytest.mark.parametrize(("name", "theirs"), [
    ("tokenizer", "of another rank"),  # with the shards it decides what the bytes are
    ("shards", "of another rank"),
    ("dtype", "torch.bfloat16"),
])
def test_ranks_count_the_same_bytes_and_compute_alike(
    name: str, theirs: str, made: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)

    def of_two(_: Machine, mine: Any) -> list[Any]:
        return [mine, {**mine, name: theirs}] if isinstance(mine, dict) and name in mine else [mine, mine]

    monkeypatch.setattr(Machine, "gather", of_two)
    with pytest.raises(train_gpt.ConfigError, match=re.escape(f"{name} is {theirs} on rank 1")):
        train_gpt.preflight(Config.from_env(made), train_gpt.Run(Machine()), "")
