"""Download: against a hub on 127.0.0.1 that cuts, truncates, lies and refuses."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import sentencepiece as spm

from data import fineweb, official, shards
from tests.support import hub_server, tiny
from tests.support.waiting import DEADLINE_SECONDS

REPO = "willdepueoai/parameter-golf"
DATASET = "fineweb10B_sp1024"
TRAIN_SHARDS = 5
SHARD_TOKENS = 12_000
VAL_TOKENS = 3_000  # --verify decodes and encodes all of them
Hub = hub_server.HubServer


def shard_bytes(tokens: np.ndarray) -> bytes:
    return shards.shard_header(len(tokens)) + tokens.astype(shards.TOKEN_DTYPE).tobytes()


@pytest.fixture(scope="module")
def files(dataset: Path) -> dict[str, bytes]:
    """A repository in the official layout: validation is text, and training shards begin within documents."""
    generator = np.random.default_rng(0)
    folder = f"datasets/datasets/{DATASET}"
    content = {"README.md": b"a small file"}
    for index in range(TRAIN_SHARDS + 1):
        tokens = generator.integers(4, tiny.VOCAB_SIZE, SHARD_TOKENS)
        tokens[generator.integers(1, SHARD_TOKENS, 30)] = shards.BOS_ID
        tokens[0] = shards.BOS_ID if index < 2 else 7
        if index == 0:
            tokens = np.resize(tiny.tokens_of(dataset / "fineweb_val_000000.bin"), VAL_TOKENS)
        name = "fineweb_val_000000.bin" if index == 0 else f"fineweb_train_{index - 1:06d}.bin"
        content[f"{folder}/{name}"] = shard_bytes(tokens)
    model = dataset / "tokenizer.model"
    content["datasets/tokenizers/fineweb_1024_bpe.model"] = model.read_bytes()
    return content


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The repository behind HF_ENDPOINT."""
    server = Hub(REPO, dict(files))
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setattr(fineweb, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(fineweb, "POLL_S", 0.01)
    yield server
    server.close()


def remote(name: str) -> str:
    return f"datasets/datasets/{DATASET}/{name}"


def command(out: Path, *more: str, train_shards: int = 3) -> list[str]:
    return ["--variant", "sp1024", "--out", str(out), "--train-shards", str(train_shards), *more]


def directory(out: Path) -> Path:
    return out / "datasets" / DATASET


def fetch(out: Path, files: dict[str, bytes], *more: str, train_shards: int = 3) -> None:
    """Download: exactly the wanted files with exactly the hub's bytes, and nothing left of the transfer."""
    assert fineweb.main(command(out, *more, train_shards=train_shards)) == 0
    assert_complete(out, files, train_shards)


def assert_complete(out: Path, files: dict[str, bytes], train_shards: int) -> None:
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{index:06d}.bin" for index in range(train_shards))]
    assert sorted(path.name for path in directory(out).glob("*.bin")) == sorted(names)
    for name in names:
        assert (directory(out) / name).read_bytes() == files[remote(name)]
    assert shards.verify_dataset(directory(out)) == []
    assert not list(out.rglob("*.incomplete")) and not list(out.rglob(".staging*"))


Fails = Callable[..., str]


@pytest.fixture
def error_of(hub: Hub, capsys: pytest.CaptureFixture[str]) -> Fails:
    """What the command says where it must fail."""
    def error(out: Path, *more: str, train_shards: int = 3) -> str:
        capsys.readouterr()
        assert fineweb.main(command(out, *more, train_shards=train_shards)) == 1
        return capsys.readouterr().err

    return error


def test_download_extend_verify(hub: Hub, files: dict[str, bytes], tmp_path: Path,
                                capsys: pytest.CaptureFixture[str]) -> None:
    assert fineweb.main(command(tmp_path / "dry", "--dry-run")) == 0
    assert remote("fineweb_train_000002.bin") in capsys.readouterr().out
    assert not hub.sent and not (tmp_path / "dry").exists()
    fetch(tmp_path, files, train_shards=2)
    first = hub.completed.copy()
    fetch(tmp_path, files, train_shards=4)
    added = [remote(f"fineweb_train_{index:06d}.bin") for index in (2, 3)]
    assert sorted((hub.completed - first).elements()) == added
    hub.faults.status = 500
    assert fineweb.main(command(tmp_path, "--verify")) == 0
    # The manifest pins the revision and counts documents.
    manifest = shards.read_manifest(directory(tmp_path))
    assert (manifest["source"], manifest["revision"]) == (REPO, hub_server.COMMIT)
    tiny.assert_documents_are_counted(directory(tmp_path))


def test_sidecars_are_fetched_and_must_match(hub: Hub, tmp_path: Path, error_of: Fails) -> None:
    tokens = np.frombuffer(hub.files[remote("fineweb_val_000000.bin")][shards.HEADER_BYTES:], np.uint16)
    table = shards.ByteTable.from_sentencepiece(spm.SentencePieceProcessor(
        model_proto=hub.files["datasets/tokenizers/fineweb_1024_bpe.model"]))
    counts = np.append(0, table.count(tokens[:-1], tokens[1:]))
    counts[1000] += 5  # of white space that was dropped
    hub.files[remote("fineweb_val_bytes_000000.bin")] = shard_bytes(counts)
    assert fineweb.main(command(tmp_path / "good")) == 0
    manifest = shards.read_manifest(directory(tmp_path / "good"))
    entry = manifest["files"]["fineweb_val_bytes_000000.bin"]
    assert (entry["split"], entry["tokens"]) == ("val", VAL_TOKENS)
    audit = {"sidecar_bytes": int(counts.sum()), "piece_bytes": int(counts.sum()) - 5}
    assert manifest["splits"]["val"]["audit"] == audit
    hub.files[remote("fineweb_val_bytes_000000.bin")] = shard_bytes(counts + (counts > 1))
    assert re.search(r"count \d+ bytes of text, the pieces of their tokens", error_of(tmp_path / "more"))
    assert not (directory(tmp_path / "more") / shards.MANIFEST_NAME).exists()
    hub.files[remote("fineweb_val_bytes_000000.bin")] = shard_bytes(np.ones(VAL_TOKENS - 1))
    assert "not one for each token" in error_of(tmp_path / "bad")


def test_cut_connections_are_resumed_within_the_file(hub: Hub, files: dict[str, bytes], tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 4096
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", block_bytes)
    # The client waits for a second before it goes on.
    monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda seconds: None)
    name = remote("fineweb_train_000001.bin")
    hub.faults.cut_after_bytes[name] = [10_000, 6_000]
    fetch(tmp_path, files)
    assert hub.sent[name] < len(files[name]) + 2 * block_bytes


@pytest.mark.parametrize(("fault", "expected"), [("wrong_content", "hash"), ("truncated", "size")])
def test_bad_copies_are_fetched_again_and_lasting_damage_is_an_error(
        hub: Hub, files: dict[str, bytes], tmp_path: Path, fault: str, expected: str,
        error_of: Fails) -> None:
    name = remote("fineweb_train_000001.bin")
    damaged = getattr(hub.faults, fault)
    damaged[name] = 10**6
    error = error_of(tmp_path, "--workers", "1")
    assert name in error and expected in error
    assert not (directory(tmp_path) / Path(name).name).exists()
    assert not (directory(tmp_path) / shards.MANIFEST_NAME).exists()
    damaged[name] = 1
    fetch(tmp_path, files)
    assert hub.completed[remote("fineweb_val_000000.bin")] == 1
    damaged["datasets/tokenizers/fineweb_1024_bpe.model"] = 1
    assert fineweb.main(command(tmp_path / "again", train_shards=1)) == 0


def test_gated_missing_and_unreachable_hubs_are_told_apart(hub: Hub, tmp_path: Path, error_of: Fails,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such dataset repository" in error_of(tmp_path, "--repo", "some/body")
    hub.faults.error_code = None
    assert "no such revision" in error_of(tmp_path, "--revision", "elsewhere")
    hub.faults.status, hub.faults.error_code = 403, "GatedRepo"
    assert "request access" in error_of(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "run the same command again" in error_of(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_offline_mode_is_said(tmp_path: Path, error_of: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    # The client reads HF_HUB_OFFLINE into this when it is imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in error_of(tmp_path)


def test_other_layouts_are_explained(hub: Hub, files: dict[str, bytes], tmp_path: Path,
                                     error_of: Fails) -> None:
    assert "5 training shards, expected at least 1 and the 9" in error_of(tmp_path, train_shards=9)
    assert "models there: fineweb_1024_bpe.model" in error_of(tmp_path, "--tokenizer", "other.model")
    assert f"shards are in datasets/datasets/{DATASET}" in error_of(tmp_path, "--dataset", "other")
    hub.files = {name.removeprefix("datasets/"): content for name, content in files.items()}
    fetch(tmp_path / "root", files, "--root", "")
    hub.files = {f"flat/{Path(name).name}": content for name, content in hub.files.items()}
    assert "shards are in flat" in error_of(tmp_path)
    hub.files = {"README.md": b""}
    assert "no shards anywhere" in error_of(tmp_path)
    assert "give its --repo" in error_of(tmp_path, "--variant", "sp999")


@pytest.mark.parametrize(("names", "told"), [
    (("fineweb_{}_000001.bin", "fineweb_{}_000002.bin"), "_train_000001.bin: expected fineweb_train_000000"),
    (("edu_fineweb_{}_000000.bin",), "it has edu_fineweb_train_000000.bin, edu_fineweb_val_000000.bin, but"),
    (("fineweb_{}_000000.bin", "fineweb_{}_000002.bin"), "_val_000002.bin: expected fineweb_val_000001.bin"),
    (("fineweb_{}_00000.bin", "fineweb_{}_00001.bin"), "it has fineweb_train_00000.bin"),
    (("{}.bin",), "it has train.bin, val.bin, but runs read fineweb_"),
])
def test_shards_that_a_run_would_not_find_are_named_before_they_are_fetched(
    names: tuple[str, ...], told: str, hub: Hub, files: dict[str, bytes], tmp_path: Path, error_of: Fails
) -> None:
    for split in ("train", "val"):
        for name in [name for name in hub.files if f"_{split}_" in name]:
            del hub.files[name]
        for name in names:
            hub.files[remote(name.format(split))] = files[remote(f"fineweb_{split}_000000.bin")]
    said = error_of(tmp_path, train_shards=1)
    assert told in said and "numbered from 000000" in said
    assert list(tmp_path.iterdir()) == [] and not any("_0" in name for name in hub.requested)


def test_the_validation_text_is_held_against_the_official_one(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hub's own hashes cannot say that: they come with the files."""
    monkeypatch.setattr(official, "official_table", lambda: ({}, 100))
    arguments = command(tmp_path, train_shards=1)
    assert fineweb.main(arguments) == 0
    said = capsys.readouterr()
    assert f"validation: your own: {VAL_TOKENS - 1} targets, " in said.out and "warning" not in said.err
    assert f"commit {hub_server.COMMIT}" in said.out
    tokens = tiny.joined(directory(tmp_path), "val_")
    tokenizer = shards.load_tokenizer(tmp_path / "tokenizers/fineweb_1024_bpe.model")
    bytes_total = shards.ByteTable.from_sentencepiece(tokenizer).total(tokens)
    mine = official.facts_of(tokens, bytes_total, tokenizer.vocab_size())
    cases = [(mine, ""), ({**mine, "sha256": None}, ""), ({**mine, "sha256": "0"}, "sha256")]
    cases += [({**mine, name: 5}, name) for name in ("pieces", "targets", "bytes", "documents")]
    for expected, wrong in cases:
        table = {"sp8192": {**mine, "documents": 0}, "sp1024": expected}
        monkeypatch.setattr(official, "official_table", lambda table=table: (table, 100))
        # Both commands print it by the same function; the download is asked about the first three.
        for more in ([], ["--verify"]) if wrong in ("", "sha256") else (["--verify"],):
            assert fineweb.main([*arguments, *more]) == 0
            said = capsys.readouterr()
            assert ("validation: your own" if wrong else "validation: official (sp1024): ") in said.out
            told = [line for line in said.err.splitlines() if line.startswith("warning: ")]
            assert len(told) == bool(wrong) and all(f"{wrong} {mine[wrong]}, expected" in line
                                                    for line in told)
    # Another repository may hold whatever it likes.
    hub.repo = "you/yours"
    assert fineweb.main([*command(tmp_path / "other", train_shards=1), "--repo", "you/yours"]) == 0
    said = capsys.readouterr()
    assert "validation: your own" in said.out and "warning" not in said.err


def test_damage_is_mended(hub: Hub, files: dict[str, bytes], tmp_path: Path, error_of: Fails) -> None:
    assert fineweb.main(command(tmp_path)) == 0
    victim = directory(tmp_path) / "fineweb_train_000001.bin"
    status = victim.stat()
    content = bytearray(victim.read_bytes())
    content[5000] ^= 1
    victim.write_bytes(content)
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))  # a bad disk does not touch the time
    assert f"{victim}: sha256" in error_of(tmp_path, "--verify")
    before = hub.completed.copy()
    fetch(tmp_path, files)
    assert list((hub.completed - before).elements()) == [remote(victim.name)]


def test_files_of_other_tools_are_taken_if_right(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    directory(tmp_path).mkdir(parents=True)
    right, wrong, empty = (directory(tmp_path) / f"fineweb_train_{index:06d}.bin" for index in range(3))
    right.write_bytes(files[remote(right.name)])
    wrong.write_bytes(files[remote(right.name)])  # the right size
    empty.write_bytes(b"")
    fetch(tmp_path, files)
    assert hub.completed[remote(right.name)] == 0
    assert wrong.with_name(f"{wrong.name}.replaced").read_bytes() == files[remote(right.name)]


def test_mine_is_kept(hub: Hub, tmp_path: Path, error_of: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tmp_path / "tokenizers" / "fineweb_1024_bpe.model"
    tokenizer.parent.mkdir()
    tokenizer.write_text("mine")
    assert str(tokenizer) in error_of(tmp_path) and tokenizer.read_text() == "mine"
    mine = directory(tmp_path / "mine")
    shards.write_manifest(mine, {"version": shards.MANIFEST_VERSION, "name": "mine"})
    assert "was not downloaded" in error_of(tmp_path / "mine")
    assert fineweb.main(command(tmp_path / "more")) == 0
    monkeypatch.setattr(hub_server, "COMMIT", "badcab" + "1" * 34)
    assert "must not be mixed" in error_of(tmp_path / "more", "--revision", "main")


def test_a_disk_too_small_names_the_shards_that_fit(hub: Hub, files: dict[str, bytes], tmp_path: Path,
                                                    error_of: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = len(files[remote("fineweb_train_000000.bin")])
    always = sum(len(files[name]) for name in (remote("fineweb_val_000000.bin"),
                                               "datasets/tokenizers/fineweb_1024_bpe.model"))
    free = [fineweb.DISK_RESERVE_BYTES + always + 2 * shard + 10]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free[0]))
    assert "--train-shards 2 would fit" in error_of(tmp_path, train_shards=5)
    assert fineweb.main(command(tmp_path, train_shards=2)) == 0
    free[0] = fineweb.DISK_RESERVE_BYTES + 2 * shard
    assert "--train-shards 4 would fit" in error_of(tmp_path, train_shards=5)
    free[0] = 0
    assert "not even one" in error_of(tmp_path / "none", train_shards=1)


def test_foreign_tokens_and_damaged_receipts_are_refused(hub: Hub, tmp_path: Path, error_of: Fails) -> None:
    for index, (content, expected) in enumerate([
        (shard_bytes(np.array([1, 5000])), "token 5000"),
        (shard_bytes(np.array([7, 1, 8])), "does not begin with BOS"),
        (b"\0" * 4000, "magic"),
    ]):
        hub.files[remote("fineweb_train_000000.bin")] = content
        assert expected in error_of(tmp_path / str(index), train_shards=1)
    directory(tmp_path).mkdir(parents=True)
    (directory(tmp_path) / fineweb.RECEIPTS_NAME).write_text(json.dumps({"repo": 1}))
    assert "damaged" in error_of(tmp_path)


def sum_of(counts: Counter[str], names: list[str]) -> int:
    return sum(counts[name] for name in names)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_download_resumes_without_refetching(hub: Hub, files: dict[str, bytes], repo: Path,
                                                      tmp_path: Path, kills: int) -> None:
    """Kill a slow download at random moments, then resume it; no finished file may be fetched again."""
    out = tmp_path / "out"
    generator = random.Random(kills)
    hub.faults.delay_s = 0.04
    arguments = command(out, "--workers", "2", train_shards=5)
    line = [sys.executable, str(repo / "data" / "fineweb.py"), *arguments]
    for kill in range(kills):
        # The tokenizer comes first and is longer than all shards: every second kill counts shards alone. The
        # first comes when two transfers under way cannot have sent as much: some file is finished by then.
        hub.faults.delayed = "" if kill % 2 else ".bin"
        slow = [name for name in hub.files if name.endswith(hub.faults.delayed)]
        slow_bytes = sum(len(files[name]) for name in slow)
        target = sum_of(hub.sent, slow) + generator.randrange(1 if kill else slow_bytes // 2, slow_bytes)
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + DEADLINE_SECONDS
        while process.poll() is None and sum_of(hub.sent, slow) < target and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert process.poll() in (None, 0), "it failed by itself"
        process.send_signal(generator.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        process.wait(DEADLINE_SECONDS)
        receipts = fineweb.Receipts.load(directory(out) / fineweb.RECEIPTS_NAME)
        received = receipts.files if receipts else {}
        finished = {path.name for path in directory(out).glob("*.bin") if path.name in received}
        assert kill or finished
        requested_before = hub.requested.copy()
        if kill == kills - 1 or generator.random() < 0.4:
            hub.faults.delay_s = 0.0
            fetch(out, files, "--workers", "2", train_shards=5)
            assert not {Path(name).name for name in (hub.requested - requested_before)} & finished
            hub.faults.delay_s = 0.04
            shutil.rmtree(out)
