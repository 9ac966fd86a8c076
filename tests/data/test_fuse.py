"""Fused case marks: exact both ways, the same bytes, made as shards arrive, refused where ids are in use."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from data import fineweb, fuse, shards
from tests.support import case
from tests.support.hub_server import HubServer

PAIRS = {8: (20, 4), 9: (20, 5)}
VARIANT = fineweb.VARIANTS["caseops"]
TRAIN_SHARDS = 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The settings of a CaseOps data set; to be read only."""
    return case.make_dataset(tmp_path_factory.mktemp("case"), "caseops")


def remote(name: str) -> str:
    return f"datasets/datasets/{VARIANT.dataset}/{name}"


@pytest.fixture
def hub(made: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """This data as the challenge's repository has it, behind HF_ENDPOINT."""
    files = {remote(path.name): path.read_bytes() for path in Path(made["DATA_PATH"]).glob("*.bin")}
    files[f"datasets/tokenizers/{VARIANT.tokenizer}"] = Path(made["TOKENIZER_PATH"]).read_bytes()
    server = HubServer(VARIANT.repo, files)
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setattr(fineweb, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(fineweb, "POLL_S", 0.01)
    yield server
    server.close()


def fetch(out: Path, *more: str, variant: str = "caseops") -> int:
    shards_wanted = ["--train-shards", str(TRAIN_SHARDS)]
    return fineweb.main(["--variant", variant, "--out", str(out), *shards_wanted, *more])


def fused_folder(out: Path) -> Path:
    return out / "datasets" / VARIANT.folder()


def test_pairs_come_back() -> None:
    tokens = np.array([1, 20, 4, 30, 20, 20, 5, 31, 4, 20], shards.TOKEN_DTYPE)
    counts = np.array([0, 1, 0, 5, 1, 1, 0, 2, 0, 1], shards.TOKEN_DTYPE)
    new, sums = fuse.fuse(tokens, PAIRS, counts)
    assert new.tolist() == [1, 8, 30, 20, 9, 31, 4, 20]
    assert sums.tolist() == [0, 1, 5, 1, 1, 2, 0, 1]
    back, counts_back = fuse.separate(new, PAIRS, sums)
    assert back.tolist() == tokens.tolist() and counts_back.tolist() == counts.tolist()


@settings(deadline=None)
@given(st.lists(st.sampled_from([1, 4, 5, 6, 20, 20, 30]), max_size=40))
def test_tokens_come_back(ids: list[int]) -> None:
    tokens = np.array(ids, shards.TOKEN_DTYPE)
    (new,) = fuse.fuse(tokens, PAIRS)
    assert fuse.separate(new, PAIRS)[0].tolist() == ids
    assert not any(pair in PAIRS.values() for pair in zip(new.tolist(), new[1:].tolist(), strict=False))


def test_shards_are_fused_as_they_arrive_and_scored_by_the_same_bytes(
    made: dict[str, str], hub: HubServer, tmp_path: Path
) -> None:
    """What a first, interrupted command has finished, a second one does not fetch again."""
    late = remote("fineweb_train_000001.bin")
    hub.faults.wrong_content[late] = 10**6
    assert fetch(tmp_path, "--workers", "1") == 1
    out = fused_folder(tmp_path)
    assert not (out / shards.MANIFEST_NAME).exists()
    before = hub.completed.copy()
    hub.faults.wrong_content[late] = 0
    assert fetch(tmp_path) == 0
    assert set(hub.completed - before) == {late}
    assert not list(tmp_path.rglob(".staging*"))

    manifest = shards.read_manifest(out)
    assert fetch(tmp_path, "--verify") == 0
    assert manifest["name"] == out.name
    assert len(shards.names_of_kind(manifest["files"], "train")) == TRAIN_SHARDS
    pairs = fuse.pairs_of(manifest)
    source = Path(made["DATA_PATH"])
    val, sidecar = "fineweb_val_000000.bin", "fineweb_val_bytes_000000.bin"
    for name in shards.names_of_kind(manifest["files"], "train"):
        fused = shards.read_shard(out / name)
        (back,) = fuse.separate(fused, pairs)
        assert np.array_equal(back, shards.read_shard(source / name)) and len(fused) < len(back)
    back, counts = fuse.separate(shards.read_shard(out / val), pairs, shards.read_shard(out / sidecar))
    assert np.array_equal(back, shards.read_shard(source / val))
    assert np.array_equal(counts, shards.read_shard(source / sidecar))
    totals = []
    for folder in (source, out):
        config = train_gpt.Config.from_env({**made, "DATA_PATH": str(folder)})
        validation = train_gpt.read_validation(
            train_gpt.open_shards(str(folder / "fineweb_val_[0-9]*.bin")), config)
        totals.append((validation.bytes_total, len(validation.tokens)))
    assert totals[0][0] == totals[1][0] and totals[1][1] < totals[0][1]

    # A damaged sidecar is mended from both halves of the pair, and nothing else is fetched.
    content = bytearray((out / sidecar).read_bytes())
    content[-1] ^= 1
    (out / sidecar).write_bytes(content)
    assert fetch(tmp_path, "--verify") == 1
    before = hub.completed.copy()
    assert fetch(tmp_path) == 0
    assert set(hub.completed - before) == {remote(val), remote(sidecar)}
    assert shards.verify_dataset(out) == []


def test_published_shards_stay_as_they_are(made: dict[str, str], hub: HubServer, tmp_path: Path) -> None:
    assert fetch(tmp_path, variant="caseops_published") == 0
    for path in (tmp_path / "datasets" / VARIANT.dataset).glob("*.bin"):
        assert path.read_bytes() == (Path(made["DATA_PATH"]) / path.name).read_bytes()
    assert fetch(tmp_path) == 0  # side by side: neither touches the other
    assert fetch(tmp_path, "--verify", variant="caseops_published") == 0


@pytest.mark.parametrize(("name", "change", "told"), [
    ("fineweb_train_000000.bin", lambda ids, pairs: np.append(ids, min(pairs)), "is to stand for a pair"),
    ("fineweb_val_bytes_000000.bin", lambda counts, pairs: counts + 1, "a mark counts bytes"),
    ("fineweb_val_bytes_000000.bin", lambda counts, pairs: counts[:-1], "not one for each of"),
])
def test_what_cannot_be_fused_is_refused(
    name: str, change: Callable[[np.ndarray, fuse.Pairs], np.ndarray], told: str, made: dict[str, str],
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    values = change(shards.read_shard(Path(made["DATA_PATH"]) / name),
                    fuse.choose_pairs(Path(made["TOKENIZER_PATH"])))
    hub.files[remote(name)] = shards.shard_header(len(values)) + values.astype(shards.TOKEN_DTYPE).tobytes()
    assert fetch(tmp_path) == 1
    said = capsys.readouterr().err
    assert told in said and name in said
    assert not (fused_folder(tmp_path) / shards.MANIFEST_NAME).exists()
    assert not (fused_folder(tmp_path) / name).exists()


def test_a_tokenizer_without_marks_is_refused(
    hub: HubServer, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = (dataset / "tokenizer.model").read_bytes()
    hub.files[f"datasets/tokenizers/{VARIANT.tokenizer}"] = model
    assert fetch(tmp_path) == 1
    assert "fused already, or it has none" in capsys.readouterr().err
    assert not list(fused_folder(tmp_path).glob("*.bin"))
