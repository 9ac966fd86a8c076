"""Fused case marks: exact both ways, the same bytes, resumed after a kill, refused where ids are in use."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import train_gpt
from data import contents, fuse, shards
from tests.support import case

PAIRS = {8: (20, 4), 9: (20, 5)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The settings of a CaseOps data set; to be read only."""
    return case.make_dataset(tmp_path_factory.mktemp("case"), "caseops")


@pytest.fixture
def source(made: dict[str, str], tmp_path: Path) -> Path:
    """A copy of it, with its tokenizer."""
    folder = Path(made["DATA_PATH"])
    shutil.copytree(folder.parents[1], tmp_path / "copy")
    return tmp_path / "copy" / "datasets" / folder.name


def test_pairs_come_back() -> None:
    tokens = np.array([1, 20, 4, 30, 20, 20, 5, 31, 4, 20], shards.TOKEN_DTYPE)
    counts = np.array([0, 1, 0, 5, 1, 1, 0, 2, 0, 1], shards.TOKEN_DTYPE)
    new, sums = fuse.fuse(tokens, PAIRS, counts)
    assert new.tolist() == [1, 8, 30, 20, 9, 31, 4, 20]
    assert sums.tolist() == [0, 1, 5, 1, 1, 2, 0, 1]
    back, counts_back = fuse.separate(new, PAIRS, sums)
    assert back.tolist() == tokens.tolist() and counts_back.tolist() == counts.tolist()


@given(st.lists(st.sampled_from([1, 4, 5, 6, 20, 20, 30]), max_size=40))
def test_tokens_come_back(ids: list[int]) -> None:
    tokens = np.array(ids, shards.TOKEN_DTYPE)
    (new,) = fuse.fuse(tokens, PAIRS)
    assert fuse.separate(new, PAIRS)[0].tolist() == ids
    assert not any(pair in PAIRS.values() for pair in zip(new.tolist(), new[1:].tolist(), strict=False))


def test_an_id_in_use_is_refused(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = source / "fineweb_train_000000.bin"
    tokens = np.array(shards.read_shard(path))
    pieces = shards.load_tokenizer(source.parents[1] / "tokenizers/caseops.model")
    tokens[7] = pieces.piece_to_id("<0x01>")
    shards.write_shard(path, tokens)
    manifest = shards.read_manifest(source)
    manifest["files"][path.name] = shards.file_entry(path, "train", (12, 13))
    shards.write_manifest(source, manifest)
    assert fuse.main([str(source)]) == 1
    assert f"{path}: token 7 has id" in capsys.readouterr().err


def test_a_dataset_is_fused_resumed_and_scored_by_the_same_bytes(
    made: dict[str, str], source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second start makes what the first one, killed between two files, did not."""
    write = shards.write_shard
    written: list[str] = []

    def killed(path: Path, tokens: np.ndarray) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        write(path, tokens)
        written.append(path.name)

    monkeypatch.setattr(shards, "write_shard", killed)
    assert fuse.main([str(source)]) == 130
    out = source.with_name("caseops_fused")
    assert not (out / shards.MANIFEST_NAME).exists() and len(list(out.glob("*.bin"))) == 2
    before = {name: (out / name).stat().st_mtime_ns for name in written}
    monkeypatch.setattr(shards, "write_shard", write)
    assert fuse.main([str(source)]) == 0
    assert "fewer" in capsys.readouterr().out
    assert before == {name: (out / name).stat().st_mtime_ns for name in written}

    manifest = shards.read_manifest(out)
    assert shards.verify_dataset(out) == [] and contents.content_problems(out, manifest) == []
    for path in source.glob("fineweb_[tv]*_00*.bin"):
        if "_val_bytes_" not in path.name:
            (back,) = fuse.separate(shards.read_shard(out / path.name), fuse.pairs_of(manifest))
            assert np.array_equal(back, shards.read_shard(path))
    totals = []
    for folder in (source, out):
        config = train_gpt.Config.from_env({**made, "DATA_PATH": str(folder)})
        validation = train_gpt.read_validation(
            train_gpt.open_shards(str(folder / "fineweb_val_[0-9]*.bin")), config)
        totals.append((validation.bytes_total, len(validation.tokens)))
    assert totals[0][0] == totals[1][0] and totals[1][1] < totals[0][1]

    # Once more: nothing is done. Of other data, or fused already: refused.
    assert fuse.main([str(source)]) == 0
    assert fuse.main([str(out)]) == 1
    (source / shards.MANIFEST_NAME).write_text(json.dumps({**shards.read_manifest(source), "name": "other"}))
    assert fuse.main([str(source)]) == 1
    assert "another source" in capsys.readouterr().err


def test_plain_data_is_refused(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuse.main([str(dataset), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith(f"error: {dataset}")
