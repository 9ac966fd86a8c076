"""Bytes of CaseOps data: the score divides by the original text's, each once; a wrong sidecar is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch

import train_gpt
from data import caseops, shards
from data.encoding import Encoder
from tests.support import case
from tools.prove import probes
from train_gpt import Config, DataError, Machine, open_shards, read_validation, token_bytes

FORMS = {"caseops": False, "caseops_fused": True}


@pytest.fixture(scope="module", params=list(FORMS))
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


def texts_of_tokens(tokens: np.ndarray, settings: dict[str, str]) -> list[str]:
    """The slow way back to the documents: decode the pieces, then the case transform."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=settings["TOKENIZER_PATH"])
    fused = FORMS[Path(settings["TOKENIZER_PATH"]).stem]
    starts = np.flatnonzero(tokens == train_gpt.BOS_ID)
    documents = np.split(tokens, starts)[1:]
    return [caseops.decode(pieces.decode(document[1:].tolist()), fused) for document in documents]


def test_every_scorer_divides_by_the_bytes_of_the_original_text(made: dict[str, str]) -> None:
    validation = {"EVAL_STRIDE": "16", "TTT_ENABLED": "1", "TTT_CHUNK_TOKENS": "1024"}
    config = Config.from_env({**made, **validation})
    data = read_validation(val_shards(made["DATA_PATH"]), config)
    originals = case.texts()[: case.VAL_DOCUMENTS]
    # NFKC makes "2" of "²", which no transform of the case can bring back; its bytes are those of "²".
    back = texts_of_tokens(data.tokens, made)
    assert back == [text.replace("²", "2") for text in originals]
    text_bytes = sum(len(text.encode()) for text in originals)
    assert data.bytes_total == text_bytes

    run = probes.RecordingRun()
    scores = train_gpt.evaluate(train_gpt.build_model(config), config, run, data, "int6")
    assert list(scores) == ["roundtrip", "sliding_window", "legal_ttt"]
    for score in scores.values():
        assert score.bytes == text_bytes and score.scored_tokens == len(data.tokens) - 1
        bits = score.nats * score.scored_tokens / math.log(2)
        assert score.bits_per_byte == pytest.approx(bits / text_bytes, rel=1e-12)


def test_each_document_has_the_bytes_of_its_text(made: dict[str, str]) -> None:
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


def test_preflight_takes_sound_data(made: dict[str, str], tmp_path: Path) -> None:
    config = Config.from_env({**made, "RUNS_DIR": str(tmp_path)})
    inputs = train_gpt.preflight(config, train_gpt.Run(Machine()))
    assert inputs.validation.bytes_total == sum(len(t.encode()) for t in case.texts()[: case.VAL_DOCUMENTS])


# --- a sidecar that is wrong ---

Damage = Callable[[Path, np.ndarray, np.ndarray], np.ndarray | None]  # folder, tokens, counts → other counts


def one_byte_more(folder: Path, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    counts[np.flatnonzero(counts)[5]] += 1
    return counts


def forge(folder: Path, counts: np.ndarray) -> np.ndarray:
    """The counts, with a manifest that agrees: what is wrong has to be seen in the counts themselves."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["splits"]["val"]["audit"]["sidecar_bytes"] = int(counts.sum())
    path.write_text(json.dumps(manifest))
    return counts


def marks_are_text(folder: Path, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    counts[(tokens >= 4) & (tokens < 8)] = 3
    return forge(folder, counts)


def documents_begin_with_text(folder: Path, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    counts[tokens == train_gpt.BOS_ID] = 1
    return forge(folder, counts)


def one_token_late(folder: Path, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return forge(folder, np.roll(counts, 1))


def everything_twice(folder: Path, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return forge(folder, counts * 2)


def a_document_counts_nothing(folder: Path, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    first, last = np.flatnonzero(tokens == train_gpt.BOS_ID)[[3, 4]]
    counts[first:last] = 0
    return forge(folder, counts)


def no_manifest(folder: Path, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    (folder / "manifest.json").unlink()
    return counts


def a_manifest_of_something_else(folder: Path, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    (folder / "manifest.json").write_text('["no", "audit"]')
    return counts


def a_damaged_manifest(folder: Path, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    (folder / "manifest.json").write_text('{"splits":')
    return counts


def a_shard_without(folder: Path, tokens: np.ndarray, counts: np.ndarray) -> None:
    (folder / "fineweb_val_bytes_000001.bin").unlink()


def none_at_all(folder: Path, tokens: np.ndarray, counts: np.ndarray) -> None:
    for path in folder.glob("fineweb_val_bytes_*.bin"):
        path.unlink()


def a_shorter_one(folder: Path, tokens: np.ndarray, counts: np.ndarray) -> None:
    path = folder / "fineweb_val_bytes_000000.bin"
    shards.write_shard(path, shards.read_shard(path)[:-1].copy())


FAULTS: list[tuple[Damage, str]] = [
    (one_byte_more, r"sum to \d+ bytes of text, expected \d+ by manifest.json"),
    (marks_are_text, r"id [4-7], stands for 3 bytes, expected 0: BOS and the marks"),
    (documents_begin_with_text, r"validation token 0, id 1, stands for 1 bytes, expected 0"),
    (one_token_late, r"expected 0: BOS and the marks"),
    (everything_twice, r"only \d+% of validation tokens stand for as many bytes"),
    (a_document_counts_nothing, r"validation document 3 has \d+ tokens and no bytes"),
    (no_manifest, r"manifest.json: no splits.val.audit.sidecar_bytes, expected the \d+"),
    (a_manifest_of_something_else, r"manifest.json: no splits.val.audit.sidecar_bytes"),
    (a_damaged_manifest, r"manifest.json: .*expected JSON"),
    (a_shard_without, r"byte sidecars are of the shards .*expected .*fineweb_val_000001.bin"),
    (none_at_all, r"has CaseOps marks, which are no text, and .* has no fineweb_val_bytes"),
    (a_shorter_one, r"byte sidecars are of the shards .*999.*expected .*1000"),
]


@pytest.mark.parametrize(("damage", "told"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_wrong_sidecar_is_refused(settings: dict[str, str], damage: Damage, told: str) -> None:
    folder = Path(settings["DATA_PATH"])
    tokens = np.concatenate([train_gpt.read_tokens(shard) for shard in val_shards(folder)])
    sidecars = open_shards(f"{folder}/fineweb_val_bytes_*.bin")
    counts = damage(folder, tokens, np.concatenate([train_gpt.read_tokens(s) for s in sidecars]))
    if counts is not None:
        begin = 0
        for sidecar in sidecars:
            shards.write_shard(sidecar.path, counts[begin : begin + sidecar.tokens])
            begin += sidecar.tokens
    with pytest.raises(DataError, match=f"{told}.*again") as error:
        read_validation(val_shards(folder), Config.from_env(settings))
    assert "data/fineweb.py" in str(error.value) or "fetch or export" in str(error.value)


def test_text_that_is_mostly_odd_is_no_wrong_sidecar(made: dict[str, str]) -> None:
    """Byte fallbacks count at their last, escaped marks three bytes, white space in runs: all is well."""
    model = made["TOKENIZER_PATH"]
    encoder = Encoder(model, Path(model).stem)
    odd = ["東京都🙂" * 40, "\ue004\ue001\ue002 " * 30, "Wide   \n\n  and\t\tTabs " * 20, "ﬁ ½ ㌔ " * 30]
    words = " ".join(case.texts()[:5])
    tokens: list[int] = []
    counts: list[int] = []
    for text in [*odd, words]:
        coded = encoder.transform(text)
        ids = np.array([train_gpt.BOS_ID, *encoder.tokenizer.encode(coded)])
        tokens += ids.tolist()
        counts += encoder.token_bytes(coded, ids).tolist()
    config = Config.from_env(made)
    train_gpt.check_sidecar(np.array(tokens), np.array(counts), train_gpt.load_tokenizer(config), config)


# --- plain text ---


def test_plain_text_has_no_marks_and_needs_no_sidecar(dataset: Path) -> None:
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(dataset / "tokenizer.model"))
    assert train_gpt.case_marks(pieces) == []


def test_longest_prefixes_are_pieces_of_text_and_none_is_longer(dataset: Path) -> None:
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(dataset / "tokenizer.model"))
    size = pieces.vocab_size()
    prefixes = train_gpt.longest_prefixes(pieces, size)
    no_text = [i for i in range(size) if pieces.is_byte(i) or pieces.is_control(i) or pieces.is_unknown(i)]
    texts = {pieces.id_to_piece(i) for i in set(range(size)) - set(no_text)}
    assert len(no_text) > 256 and all(prefixes[i] == -1 for i in no_text)
    found = 0
    for i in set(range(size)) - set(no_text):
        text = pieces.id_to_piece(i)
        known = [text[:length] for length in range(1, len(text)) if text[:length] in texts]
        if known:
            assert pieces.id_to_piece(int(prefixes[i])) == known[-1]
            found += 1
        else:
            assert prefixes[i] == -1
    assert found > 10


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("bytes of validation text", "7"),
        ("the device (DEVICE)", "cuda"),
        ("the dtype of activations (COMPUTE_DTYPE)", "torch.bfloat16"),
        ("the dtype of Muon's products (COMPUTE_DTYPE)", "torch.bfloat16"),
    ],
)
def test_ranks_must_count_the_same_bytes_and_compute_alike(
    name: str, theirs: str, made: dict[str, str]
) -> None:
    torch.manual_seed(0)

    class Two(Machine):
        def gather(self, mine: object) -> list[object]:
            if isinstance(mine, dict):
                assert name in mine
                return [mine, {**mine, name: theirs}]
            return [mine, mine]

    with pytest.raises(train_gpt.ConfigError, match=re.escape(f"{name} is {theirs} on rank 1")):
        train_gpt.preflight(Config.from_env(made), train_gpt.Run(Two()))
