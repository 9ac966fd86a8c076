"""ARTIFACT: budgets are filled, what was written is read back, bad files are refused."""

import ast
import bz2
import hashlib
import inspect
import json
import linecache
import math
import os
import random
import re
import resource
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train_gpt
from tests.support.models import plain_settings, random_batches, trained_like
from tools.runs.source import decoded, same_program, unwrap
from train_gpt import ArtifactError, Config, ModelSettings

TOKENIZER = "ab" * 32


def write(
    path: Path, config: Config, code_bytes: int = 0, seed: int = 0
) -> tuple[train_gpt.GPT, train_gpt.ArtifactInfo, str]:
    """Write the artifact of a model that looks trained; the model, what its file says, the log line."""
    model = trained_like(config, seed)
    hessians: train_gpt.Hessians = {}
    if config.gptq:
        hessians = train_gpt.collect_hessians(model, random_batches(config))
    budget = config.artifact_bytes_max - code_bytes
    data, line = train_gpt.write_artifact(model, config, hessians, TOKENIZER, budget)
    path.write_bytes(data)
    _, about = train_gpt.load_artifact(path)
    return model, about, line


def bits_of(path: Path) -> dict[str, int]:
    """The bits that the widest code of each matrix needs."""
    _, banks = train_gpt.read_artifact(path.read_bytes())
    table = train_gpt.parameter_table(Config())
    return {
        name: int(abs(bank.codes.astype(int)).max()).bit_length() + 1
        for name, bank in banks.items()
        if table[name].quantize_as
    }


@pytest.fixture(scope="module")
def tiny() -> Config:
    return Config.from_env(plain_settings(1, 16, 32, ARTIFACT_BYTES_MAX=100_000))


@pytest.fixture(scope="module")
def tiny_file(tiny: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "model.bin"
    write(path, tiny)
    return path


@pytest.mark.parametrize(
    ("size", "bits_per_weight", "passes"),  # coarse steps: ragged sizes
    [((1, 16, 128), 1.7, 8), ((2, 16, 128), 3.5, 5)],
)
def test_full_budget(size: tuple[int, int, int], bits_per_weight: float, passes: int, tmp_path: Path) -> None:
    env = plain_settings(*size)
    table = train_gpt.parameter_table(Config.from_env(env))
    weights = sum(math.prod(parameter.shape) for parameter in table.values())
    limit = int(weights * bits_per_weight / 8) + 6000
    config = Config.from_env({**env, "ARTIFACT_BYTES_MAX": str(limit)})
    _, about, line = write(tmp_path / "model.bin", config, code_bytes=4000)
    total = (tmp_path / "model.bin").stat().st_size + 4000
    assert int(re.findall(r"passes:(\d+)", line)[0]) <= passes and about.bytes == total - 4000
    assert line.startswith(f"artifact_bytes:{total - 4000} budget_bytes:{limit - 4000} ")
    assert limit - max(8, 5e-4 * limit) <= total <= limit  # the smallest files move in steps of some bytes


def test_a_model_too_small_or_too_large_for_its_budget(tiny: Config, tmp_path: Path) -> None:
    model, about, line = write(tmp_path / "model.bin", tiny)
    assert f"step_multiplier:{train_gpt.MULTIPLIERS[0]:.4f}" in line
    assert max(bits_of(tmp_path / "model.bin").values()) >= 7 and about.bytes < 50_000
    loaded, _ = train_gpt.load_artifact(tmp_path / "model.bin")
    assert (model.qo_bank - loaded.qo_bank).norm() < 0.06 * model.qo_bank.norm()
    config = Config.from_env(plain_settings(2, 64, 256, ARTIFACT_BYTES_MAX=8_000))
    said = r"ARTIFACT_BYTES_MAX leaves 8000 .* \d+ bytes too many; lower MODEL_DIM"
    with pytest.raises(ArtifactError, match=said):
        train_gpt.check_budget(config, 8_000)
    with pytest.raises(ArtifactError, match=said):
        train_gpt.write_artifact(trained_like(config), config, {}, TOKENIZER, 8_000)


@pytest.mark.parametrize("rate_control", [0, 1])
def test_a_paid_training_begins_unless_its_file_cannot_fit(rate_control: int) -> None:
    """Trained weights need a little less than Gaussian ones: 5 % above the budget may still fit."""
    config = Config.from_env(plain_settings(2, 64, 256, RATE_CONTROL=rate_control))
    multiplier = train_gpt.MULTIPLIERS[-1] if rate_control else 1.0
    size = float(train_gpt.expected_bytes(config, multiplier))
    train_gpt.check_budget(config, math.ceil(size / 1.04))
    with pytest.raises(ArtifactError, match=r"bytes too many; .* or set RATE_CONTROL=1"):
        train_gpt.check_budget(config, int(size / 1.06))
    # A finer file would be larger by far, and no reason to refuse the run.
    assert rate_control == 0 or train_gpt.expected_bytes(config, 1.0) > 2 * size
    with pytest.raises(ArtifactError, match="leaves -5 "):
        train_gpt.check_budget(config, -5)  # the code alone is larger


def test_the_estimate_brackets_what_is_written_and_bits_are_as_given(tmp_path: Path) -> None:
    env = plain_settings(1, 32, 256, TRELLIS=0, COLUMN_STEPS=0)
    high, *_, low = train_gpt.expected_bytes(Config.from_env(env), train_gpt.MULTIPLIERS)
    _, about, _ = write(tmp_path / "model.bin", Config.from_env(env))
    assert low < about.bytes and abs(about.bytes / high - 1) < 0.05
    tight = Config.from_env({**env, "ARTIFACT_BYTES_MAX": str(int(1.3 * low))})
    _, about, _ = write(tmp_path / "tight.bin", tight)
    assert about.bytes <= 1.3 * low and max(bits_of(tmp_path / "tight.bin").values()) <= 4
    env = plain_settings(
        1, 32, 32, RATE_CONTROL=0, MATRIX_BITS=3, EMBED_BITS=5, ATTN_CLIP_SIGMAS=3, MLP_CLIP_SIGMAS=3,
        TRELLIS=0, COLUMN_STEPS=0,
    )
    _, _, line = write(tmp_path / "model.bin", Config.from_env(env))
    bits = bits_of(tmp_path / "model.bin")
    assert bits.pop("token_embedding_VD") in {4, 5}
    assert bits == dict.fromkeys(["qo_bank", "kv_bank", "mlp_up_bank", "mlp_down_bank"], 3)
    assert "step_multiplier:1.0000 passes:1" in line
    with pytest.raises(ArtifactError, match=r"bytes too many; .*ARTIFACT_BYTES_MAX"):
        write(tmp_path / "small.bin", Config.from_env({**env, "ARTIFACT_BYTES_MAX": "3000"}))


SEARCHED = Config.from_env(plain_settings(2, 64, 256, ARTIFACT_BYTES_MAX=40_000))


def fill(size_of: Callable[[float], float], budget: int = 30_000) -> tuple[int, str, int]:
    """Size and note of the file found where files have these sizes, and how many were made."""
    made: list[float] = []

    def make_file(multiplier: float) -> bytes:
        made.append(multiplier)
        return b"x" * int(size_of(multiplier))

    data, how = train_gpt.fill_budget(SEARCHED, budget, make_file)
    assert len(set(made)) == len(made), "no file is made twice"
    return len(data), how, len(made)


def expected(multiplier: float) -> float:
    return train_gpt.expected_bytes(SEARCHED, multiplier)


def test_searches_that_jump_never_fit_or_fit_at_their_end() -> None:
    size, how, passes = fill(lambda m: 28_000 if expected(m) < 30_500 else 33_000)
    assert size == 28_000 and passes <= 10 and f"passes:{passes}" in how
    assert fill(lambda m: 30_000)[0] == 30_000, "a file that fits exactly"
    with pytest.raises(ArtifactError, match="77 bytes too many"):
        fill(lambda m: 30_077)
    with pytest.raises(ArtifactError, match="9 bytes too many"):
        fill(lambda m: max(30_009.0, expected(m)))
    coarsest = train_gpt.MULTIPLIERS[-1]
    assert fill(lambda m: 29_000 if m == coarsest else 31_000)[0] == 29_000
    size, how, passes = fill(lambda m: 0.2 * expected(m))
    finest = train_gpt.MULTIPLIERS[0]
    assert size < 25_000 and passes <= 4 and how == f"step_multiplier:{finest:.4f} passes:{passes}"


def bell_shaped(rows: int, columns: int) -> np.ndarray:
    """Values from whole-number arithmetic alone, of a standard deviation of about 38,000."""
    words = np.random.Philox(key=7).random_raw(rows * columns)
    parts = [(words >> np.uint64(shift)) % np.uint64(1 << 16) for shift in (0, 16, 32, 48)]
    return (np.sum(parts, axis=0).astype(np.int64) - (1 << 17)).reshape(rows, columns)


# Budget: notches of the multipliers that were tried, size and hash of the file.
GOLDEN_FILES = {
    14_000: ([24575, 4013, 3866, 3886], 13_981,
             "905ac927b2d152efc5b6832761eedfc85f5ff5e543a262d7e911db6473c67706"),
    40_000: ([1426, -3257, -2741, -2806], 39_991,
             "7f955578544479ac7fbc4c9a2fb76c48c2077542115f9bc20a9da5a26b301c60"),
}


@pytest.mark.parametrize("budget", GOLDEN_FILES)
def test_the_same_budget_gives_the_same_bytes(budget: int) -> None:
    """In every version: the search asks for the same files, and ends with the same one."""
    config = Config.from_env(plain_settings(2, 64, 256, ARTIFACT_BYTES_MAX=60_000))
    values = bell_shaped(128, 512)
    notches = []

    def make_file(multiplier: float) -> bytes:
        notches.append(round(2048 * math.log2(multiplier)))
        step = round(14_000 * 2 ** (notches[-1] / 2048))
        step = min(max(step, 3_400), 75_700)  # from 8 bits to two standard deviations
        codes = np.clip((2 * values + step) // (2 * step), -127, 127)
        return train_gpt.encode([codes.astype(np.int8)])

    data, _ = train_gpt.fill_budget(config, budget, make_file)
    assert (notches, len(data), hashlib.sha256(data).hexdigest()) == GOLDEN_FILES[budget]


def test_round_trip(tmp_path: Path) -> None:
    config = Config.from_env(plain_settings(2, 16, 64, ARTIFACT_BYTES_MAX=40_000))
    model, about, _ = write(tmp_path / "model.bin", config)
    loaded, _ = train_gpt.load_artifact(tmp_path / "model.bin")
    assert loaded.settings.as_env() == config.as_env(ModelSettings) == about.config
    assert about.tokenizer_sha256 == TOKENIZER
    table = train_gpt.parameter_table(config)
    for (name, a), b in zip(model.named_parameters(), loaded.parameters(), strict=True):
        if table[name].inputs:
            assert (a - b).norm() < 0.2 * a.norm(), name
        else:
            assert ((a - b).abs() <= a.abs().amax(-1, keepdim=True) / 225 + 1e-4).all(), name
    assert about.bytes == (tmp_path / "model.bin").stat().st_size
    assert about.sha256 == hashlib.sha256((tmp_path / "model.bin").read_bytes()).hexdigest()


def test_tables_of_the_vocabulary_are_stored_like_every_other_parameter() -> None:
    """BigramHash, value embedding and smear by channel."""
    config = Config.from_env(plain_settings(
        2, 32, 64, ARTIFACT_BYTES_MAX=60_000, TRELLIS=0, CHANNEL_SMEAR_ENABLED=1,
        BIGRAM_VOCAB_SIZE=48, BIGRAM_DIM=8, VE_ENABLED=1, VE_DIM=8, VE_LAYERS="0,1",
    ))
    model = trained_like(config)
    with torch.no_grad():
        model.bigram_table_RC[7] = 0.0  # a pair that never came
    hessians = train_gpt.collect_hessians(model, random_batches(config))
    data, _ = train_gpt.write_artifact(model, config, hessians, TOKENIZER, 60_000)
    read, _ = train_gpt.load_artifact(Path("model.bin"), data)
    assert read.settings == train_gpt.ModelSettings.from_values(config.as_env())
    _, banks = train_gpt.read_artifact(data)
    assert {"token_embedding_VD", "bigram_table_RC", "value_table_VC"} <= banks.keys()
    for name, weights in model.named_parameters():
        error = (read.get_parameter(name) - weights).norm() / weights.norm()
        assert error < 0.05, name
    assert read.bigram_table_RC[7].abs().max() == 0
    batch = random_batches(config)[0]
    torch.testing.assert_close(
        read.loss(batch.inputs_BT, batch.targets_BT), model.loss(batch.inputs_BT, batch.targets_BT),
        rtol=0, atol=2e-3)


def test_weights_that_are_not_finite_are_refused(tiny: Config) -> None:
    model = trained_like(tiny)
    with torch.no_grad():
        model.mlp_up_bank[0, 3, 1] = math.inf
    with pytest.raises(ArtifactError, match="mlp_up_bank"):
        train_gpt.write_artifact(model, tiny, {}, TOKENIZER, 100_000)


def test_what_no_artifact_would_hold(tiny: Config, tiny_file: Path) -> None:
    model = train_gpt.build_model(tiny)
    model.register_parameter("forgotten_D", torch.nn.Parameter(torch.ones(4)))
    with pytest.raises(KeyError, match="forgotten_D"):
        train_gpt.Optimizer(model, tiny, train_gpt.Machine())
    # So one that was put elsewhere is an error in the first step of the warm-up, not after training.
    trained = train_gpt.build_model(tiny)
    loaded, _ = train_gpt.load_artifact(tiny_file)
    assert type(trained.settings) is type(loaded.settings) is ModelSettings
    assert trained.settings == loaded.settings
    with pytest.raises(AttributeError):
        _ = trained.settings.ttt_lr  # type: ignore[attr-defined]


def sections_of(path: Path) -> dict[str, bytes]:
    """The sections of an artifact, as they stand in the file."""
    data = path.read_bytes()
    _, config_bytes, *_ = train_gpt.HEAD.unpack_from(data)
    rest = data[train_gpt.HEAD.size :]
    return {"config": rest[:config_bytes], "weights": rest[config_bytes:]}


def reseal(sections: dict[str, bytes]) -> bytes:
    """An artifact with right sizes and checksums, whatever its sections hold."""
    config, weights = sections["config"], sections["weights"]
    head = train_gpt.HEAD.pack(train_gpt.MAGIC, len(config), zlib.crc32(config), zlib.crc32(weights))
    return head + config + weights


def with_config(path: Path, **changes: str | None) -> bytes:
    """The file with settings changed (None: removed) and sealed again."""
    sections = sections_of(path)
    header = json.loads(zlib.decompress(sections["config"]))
    for name, value in changes.items():
        header["config"].pop(name, None)
        if value is not None:
            header["config"][name] = value
    return reseal({**sections, "config": zlib.compress(json.dumps(header).encode())})


def refused(data: bytes, folder: Path) -> str:
    """The message with which a file of these bytes is refused."""
    path = folder / "bad.bin"
    path.write_bytes(data)
    with pytest.raises(ArtifactError) as caught:
        train_gpt.load_artifact(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_foreign_older_cut_and_flipped_files_are_refused(tiny_file: Path, tmp_path: Path) -> None:
    data = tiny_file.read_bytes()
    older = bytearray(data)
    older[7] -= 1
    for foreign in (b"", b"PK\x03\x04" + data[4:], bytes(older), data[:3]):
        message = refused(foreign, tmp_path)
        assert "version 0.6 or older; use the train_gpt.py of its run" in message
    for cut in (60, len(data) // 2, len(data) - 1):
        assert "truncated or damaged" in refused(data[:cut], tmp_path)
    for section in sections_of(tiny_file).values():
        flipped = bytearray(data)
        flipped[data.index(section) + len(section) // 2] ^= 16
        assert "truncated or damaged; copy the file again" in refused(bytes(flipped), tmp_path)
    assert "truncated or damaged" in refused(data + b"\0", tmp_path)
    refused(data[:11], tmp_path)
    with pytest.raises(ArtifactError, match="No such file"):
        train_gpt.load_artifact(tmp_path / "absent.bin")
    with pytest.raises(ArtifactError, match="directory"):
        train_gpt.load_artifact(tmp_path)


def test_a_valid_file_gets_memory_in_proportion_to_its_bytes(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros are coded in next to nothing; whatever is padded around them does not make room for them."""
    real_limit = train_gpt.max_parameters
    assert 4e6 < real_limit(0) < 5e6
    monkeypatch.setattr(train_gpt, "max_parameters", lambda coded: real_limit(coded) - 4_150_000)
    sections = sections_of(tiny_file)
    header = json.loads(zlib.decompress(sections["config"]))
    settings = {**header["config"], "MODEL_DIM": "128", "MLP_MULT": "4.0"}
    config = ModelSettings.from_values(settings)
    arrays = []
    for parameter in train_gpt.parameter_table(config).values():
        matrices, rows, columns = train_gpt.bank_shape(parameter.shape)
        for shape in ((rows, matrices * columns), (rows, matrices), (matrices, columns)):
            arrays.append(np.zeros(shape, np.int16))
    header = {**header, "config": config.as_env(ModelSettings)}
    packed = zlib.compress(json.dumps(header).encode(), 9)
    coded = train_gpt.encode(arrays)
    weights = train_gpt.count_parameters(config)
    assert weights > 100 * (len(packed) + len(coded)), "a bomb"
    bomb = reseal({"config": packed, "weights": coded})
    assert "parameters are more than" in refused(bomb, tmp_path)
    # A run's own file may be so: its first weights are zeros.
    header_again, _ = train_gpt.read_artifact(bomb, is_ours=True)
    assert header_again == header
    # Bytes behind the end of the header are in the file, but no weights are.
    padded = reseal({"config": packed + bytes(weights), "weights": coded})
    assert "does not end where it should" in refused(padded, tmp_path)


def test_a_hash_that_is_text_of_somebody_is_refused(tiny_file: Path, tmp_path: Path) -> None:
    sections = sections_of(tiny_file)
    header = json.loads(zlib.decompress(sections["config"]))
    header["tokenizer_sha256"] = "\x1b[31mX\nFAIL"
    forged = reseal({**sections, "config": zlib.compress(json.dumps(header).encode())})
    assert "\x1b" not in refused(forged, tmp_path)


def test_what_is_not_a_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.bin")
    (tmp_path / "endless.bin").symlink_to("/dev/zero")
    for name in ("model.bin", "endless.bin"):
        with pytest.raises(ArtifactError, match="expected a regular file"):
            train_gpt.load_artifact(tmp_path / name)


def test_forged_settings_are_refused_before_they_cost_memory(tiny_file: Path, tmp_path: Path) -> None:
    message = refused(with_config(tiny_file, MODEL_DIM="1048576"), tmp_path)
    assert re.search(r"\d+ parameters are more than \d+ bytes can hold", message)
    for name, value in [("NUM_LAYERS", "256"), ("VOCAB_SIZE", "65536"), ("MLP_MULT", "64")]:
        refused(with_config(tiny_file, **{name: value}), tmp_path)
    for name, value in [("MODEL_DIM", "nan"), ("NUM_HEADS", "0"), ("NUM_HEADS", "3"), ("VOCAB_SIZE", "31")]:
        refused(with_config(tiny_file, **{name: value}), tmp_path)
    for name, value in [("VOCAB_SIZE", None), ("CONFIG", "/etc/passwd"), ("SMEAR_GATE", "off")]:
        message = refused(with_config(tiny_file, **{name: value}), tmp_path)  # missing, or unknown
        assert "different settings; use the train_gpt.py of its run" in message
    sections = sections_of(tiny_file)
    bomb = zlib.compress(b" " * (1 << 24))
    refused(reseal({**sections, "config": bomb}), tmp_path)
    nested = zlib.compress(b"[" * 60_000)
    refused(reseal({**sections, "config": nested}), tmp_path)
    for cut in (0, 10, len(sections["weights"]) - 2):
        refused(reseal({**sections, "weights": sections["weights"][:cut]}), tmp_path)


@pytest.mark.parametrize("change", [
    {"config": ["VOCAB_SIZE"]}, {"config": list(ModelSettings().as_env())}, {"config": None},
    {"tokenizer": TOKENIZER}, {"VOCAB_SIZE": 32}, {"DOC_MASK": 1}, {"TRAIN_SEQ_LEN": {}},
])
def test_headers_of_a_wrong_kind_are_refused(change: dict[str, Any], tiny_file: Path, tmp_path: Path) -> None:
    sections = sections_of(tiny_file)
    header = json.loads(zlib.decompress(sections["config"]))
    if "tokenizer" in change:
        del header["tokenizer_sha256"]
    target = header["config"] if set(change) <= set(header["config"]) else header
    target.update(change)
    refused(reseal({**sections, "config": zlib.compress(json.dumps(header).encode())}), tmp_path)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seed", "count"), [(1, 60), pytest.param(2, 50_000, marks=pytest.mark.slow)])
def test_random_damage_is_the_one_error_or_a_sound_model(seed: int, count: int, tiny_file: Path) -> None:
    """Half of it is sealed again under right checksums."""
    rng = random.Random(seed)
    original = tiny_file.read_bytes()
    whole = sections_of(tiny_file)
    refusals = 0
    for _ in range(count):
        sections = dict(whole)
        name = rng.choice(list(sections))
        sealed = rng.random() < 0.6
        target = bytearray(sections[name] if sealed else original)
        for _ in range(rng.choice([1, 1, 2, 8])):
            kind = rng.random()
            place = rng.randrange(len(target)) if target else 0
            if kind < 0.5 and target:
                target[place] ^= 1 << rng.randrange(8)
            elif kind < 0.7 and target:
                target[place : place + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
            elif kind < 0.85:
                del target[place:]
            else:
                target[place:place] = rng.choice([b"\xff" * 8, b"\0" * 8, rng.randbytes(3)])
        damaged = reseal({**sections, name: bytes(target)}) if sealed else bytes(target)
        try:
            model, _ = train_gpt.load_artifact(Path("model.bin"), damaged)
            assert all(parameter.isfinite().all() for parameter in model.parameters())
        except ArtifactError:
            refusals += 1
    assert refusals > 0.7 * count


def test_a_full_disk_leaves_the_old_file(tiny_file: Path, tmp_path: Path) -> None:
    """The kernel refuses to let files grow beyond a size: a full disk in all but name."""
    path = tmp_path / "model.bin"
    path.write_bytes(b"the old file")
    data = tiny_file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(train_gpt.ConfigError, match="cannot be written"):
            train_gpt.write_atomically(path, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"the old file"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.bin"]
    # A folder that somebody has removed is made again.
    train_gpt.write_atomically(tmp_path / "removed" / "model.bin", data)
    assert (tmp_path / "removed" / "model.bin").read_bytes() == data


def test_wrapped_code_holds_any_byte_and_the_shell_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    escapes: set[bytes] = set()
    held: set[int] = set()
    for seed in range(6):
        noise = random.Random(seed).randbytes(1800).hex()
        wrapped = train_gpt.shipped_code(f'NOISE = "{noise}"'.encode())
        scope = {"__file__": "noise.py"}
        exec(compile(wrapped, "noise.py", "exec"), scope)
        assert scope["NOISE"] == noise and unwrap(decoded(wrapped)) == f"NOISE='{noise}'"
        escapes |= set(re.findall(rb"\\(x00\d|x00|.)", wrapped))
        held |= set(wrapped)
    assert {b"0", b"r", b"\\"} <= escapes, "each escape was needed somewhere"
    assert any(escape.startswith(b"x00") and len(escape) == 4 for escape in escapes), "NUL before a digit"
    assert held == set(range(256)) - {0, 13}
    with monkeypatch.context() as patch:  # three quotes and a last one are too rare in noise
        for rare in ("'" * 3, "'" * 4 + "7'", "\\" + "'" * 5 + "\0" + "7'"):
            patch.setattr(bz2, "compress", lambda _, rare=rare: rare.encode())
            nodes = ast.walk(ast.parse(train_gpt.shipped_code(b"1")))
            assert rare in [node.value for node in nodes if isinstance(node, ast.Constant)]
    source = Path(train_gpt.__file__).read_bytes()
    wrapped = train_gpt.shipped_code(source)
    inner = unwrap(decoded(wrapped))
    assert inner is not None and same_program(inner, source.decode()) and '"""Of' not in inner
    # The shell costs little, and what is wrapped already stays as it is.
    assert len(wrapped) < 1.035 * len(bz2.compress(inner.encode()))
    assert train_gpt.shipped_code(wrapped) == wrapped
    assert linecache.getlines(inspect.getfile(train_gpt))
