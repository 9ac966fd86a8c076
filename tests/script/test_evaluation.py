"""Scores are complete, in order, the same for any number of ranks, and equal to a plain loop over windows."""

import copy
import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from tests.support import tiny
from tests.support.before import before
from tests.support.planted import counted_clock
from tests.support.processes import ROUNDED, Lab
from tests.support.ranks import on_ranks
from tests.support.subject import LORA, SCORERS, RecordingRun, subject
from train_gpt import Config, Ledger, Validation, token_bytes, window_rows

GOLDEN_TARGETS, GOLDEN_WINDOWS, GOLDEN_CHUNKS = 40_540_160, 633_409, 1_238
VALIDATION_PREFIX_BYTES = 2_504_310  # of its 901 whole documents


def plain_loop(
    model: Any, tokens: np.ndarray, config: Config, stride: int, start: int = 0, stop: int | None = None
) -> np.ndarray:
    """Every window by itself, the head on every row; each target from the first window that reaches it.

    start, stop: targets outside may be left out.
    """
    nats = np.full(len(tokens) - 1, np.nan)
    window = -1
    while np.isnan(nats[start:stop]).any():
        window += 1
        begin = window * stride
        if begin + config.eval_length <= start:
            continue
        row = torch.from_numpy(tokens[begin : begin + config.eval_length + 1].astype(np.int64))
        with torch.no_grad():
            hidden = model(row[None, :-1], longest=config.eval_length)[0]
            found = model.loss_per_token(hidden, row[1:]).double().numpy()
        first = 0 if window == 0 else config.eval_length - stride
        nats[begin + first : begin + len(found)] = found[first:]
    return nats


def plain_ttt(model: Any, tokens: np.ndarray, config: Config) -> np.ndarray:
    """The protocol of PR #1493 written out for one rank; destroys the model."""
    c = config
    targets = len(tokens) - 1
    chunk_count = -(-targets // c.ttt_chunk_tokens)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    nats = np.zeros(targets)
    for chunk in range(chunk_count):
        start, stop = chunk * c.ttt_chunk_tokens, min((chunk + 1) * c.ttt_chunk_tokens, targets)
        nats[start:stop] = plain_loop(model, tokens, config, c.eval_stride, start, stop)[start:stop]
        rows = [
            tokens[i : i + c.eval_length + 1] for i in range(start, stop - c.eval_length + 1, c.eval_length)
        ]
        lr = c.ttt_lr * 0.5 * (1 + math.cos(math.pi * chunk / max(chunk_count - 1, 1)))
        for _ in range(c.ttt_epochs):
            for first in range(0, len(rows), c.ttt_batch_seqs):
                batch = torch.from_numpy(np.stack(rows[first : first + c.ttt_batch_seqs]).astype(np.int64))
                loss = model.loss(batch[:, :-1], batch[:, 1:])
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
                scale = min(1.0, c.ttt_grad_clip / norm) if c.ttt_grad_clip else 1.0
                with torch.no_grad():
                    for p, v, g in zip(model.parameters(), velocity, gradients, strict=True):
                        v.mul_(c.ttt_momentum).add_(g, alpha=scale)
                        p.sub_(v, alpha=lr)
    return nats


def test_a_ledger_takes_each_score_once_and_gives_scored_tokens_only() -> None:
    ledger = Ledger(np.arange(11))
    ledger.record(0, np.ones(4))
    with pytest.raises(ValueError, match=r"targets 3\.\.5, .*target 3 "):
        ledger.record(3, np.ones(2))
    with pytest.raises(FloatingPointError, match=r"target 5 .*not finite.*TTT_LORA_LR"):
        ledger.record(4, np.array([1.0, np.nan]))
    assert ledger.scored == 4
    # In any order, but all of them, and each once.
    ledger.record(6, np.full(3, 0.5))
    with pytest.raises(ValueError, match=r"targets 4\.\.8, .*target 6 "):
        ledger.record(4, np.ones(4))
    assert ledger.scored == 7
    with pytest.raises(ValueError, match=r"3 targets were never scored\b.* 4$"):
        ledger.score(1)
    with pytest.raises(ValueError, match="read-only"):
        ledger.nats[0] = 0.0
    ledger.record(9, np.full(1, 0.5))
    ledger.record(4, np.full(2, 0.5))
    score = ledger.score(7)
    assert score == (0.7, pytest.approx(1 / math.log(2)), 10, 7, 0) and len(ledger.nats) == 10
    tokens = np.arange(10, 21)
    ledger = Ledger(tokens)
    assert ledger.scored_tokens(0, 1).tolist() == [10]
    with pytest.raises(ValueError, match="not all scored"):
        ledger.scored_tokens(0, 2)
    ledger.record(0, np.ones(4))
    assert ledger.scored_tokens(1, 5).tolist() == [11, 12, 13, 14]
    for start, stop in ((0, 6), (4, 6), (0, 99)):
        with pytest.raises(ValueError, match="not all scored"):
            ledger.scored_tokens(start, stop)
    ledger.scored_tokens(0, 5)[:] = 0
    assert ledger.scored_tokens(0, 1).tolist() == [10]
    # What lies behind a gap may be learned from, the gap not: token 7 is target 6.
    ledger.record(6, np.ones(2))
    assert ledger.scored_tokens(7, 9).tolist() == [17, 18]
    for start, stop in ((6, 8), (5, 9), (8, 10), (-1, 1)):
        with pytest.raises(ValueError, match="not all scored"):
            ledger.scored_tokens(start, stop)


@pytest.mark.parametrize(("start", "count"), [(8, 3), (10, 1), (12, 2), (-1, 1)])
def test_a_ledger_has_no_place_beyond_the_stream(start: int, count: int) -> None:
    with pytest.raises(ValueError, match=rf"targets {start}\.\.{start + count}, .*\.\.10$"):
        Ledger(np.arange(11)).record(start, np.ones(count))


def test_windows_and_chunks_have_the_published_counts() -> None:
    """All chunks but the first and the last have equally many windows: of a text with fewer of those, too."""
    left_out = GOLDEN_CHUNKS - 10
    targets = GOLDEN_TARGETS - left_out * 32_768
    chunks = window_rows(targets, 2048, 64, np.zeros(targets, np.int32), 32_768)
    per_chunk = [len(rows) for rows in chunks]
    assert sum(per_chunk) + left_out * 512 == GOLDEN_WINDOWS and len(per_chunk) == 10
    assert all((rows[:, 1] // 32_768 == index).all() for index, rows in enumerate(chunks))
    assert per_chunk[0] == 481 and per_chunk[-1] == 96 and set(per_chunk[1:-1]) == {512}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 100), st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.randoms())
def test_rows_cover_each_target(targets: int, stride: int, strides: int, contexts: int, random: Any) -> None:
    context = stride * strides
    starts = np.array([random.random() < 0.05 for _ in range(targets)])
    begins = np.maximum.accumulate(np.where(starts, np.arange(targets), 0))
    expected = 0
    chunks = window_rows(targets, context, stride, begins, contexts * context)
    for first, start, stop in np.concatenate(chunks):
        assert start == expected < stop <= first + context
        assert start // (contexts * context) == (stop - 1) // (contexts * context)
        for target in range(start, stop):
            assert first <= max(int(begins[target]), target - (context - stride), 0)
        expected = stop
    assert expected == targets


@pytest.mark.parametrize("mask", ["0", "1"])
@pytest.mark.parametrize("batch_tokens", ["1", "512", "32768"])
def test_scorers_equal_a_plain_loop_over_windows(mask: str, batch_tokens: str) -> None:
    """A batch is split over eight passes as upstream does, whatever the number of ranks."""
    lab = subject(DOC_MASK=mask, VAL_BATCH_SIZE=batch_tokens)
    model, tokens = lab.model(), lab.tokens()
    rows: list[int] = []
    for name, stride in (("score_roundtrip", 16), ("score_sliding", 8)):
        rows.clear()
        with pytest.MonkeyPatch.context() as patch:
            before(patch, train_gpt.GPT, "forward", lambda _, ids_BT, *__, **___: rows.append(len(ids_BT)))
            found = lab.nats(name, tokens, model)
        expected = plain_loop(model, tokens, lab.config, stride)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
        if batch_tokens != "32768":
            assert max(rows) == max(1, int(batch_tokens) // 8 // lab.config.eval_length)
    windows = 1 + (149 - 16 + 7) // 8
    assert sum(rows) < windows if mask == "1" else sum(rows) == windows


@pytest.mark.parametrize(("begins", "length"), [
    *((None, length) for length in (2, 3, 16, 17, 18, 33, 34)),  # shorter than a window, or than a chunk
    (slice(0), 100), (slice(None), 100), (slice(47, 49), 100),  # no document, all, two late ones
])
def test_odd_streams_are_scored_whole(begins: slice | None, length: int) -> None:
    lab = subject()
    tokens, model = lab.tokens()[:length], lab.model()
    if begins is not None:
        tokens[tokens == 1] = 3
        tokens[begins] = 1
    found = [lab.nats(name, tokens, model) for name in SCORERS]
    assert all(len(nats) == length - 1 and np.isfinite(nats).all() for nats in found)
    np.testing.assert_allclose(found[1], plain_loop(model, tokens, lab.config, 8), atol=2e-5)
    if length <= lab.config.ttt_chunk_tokens + 1:
        assert np.array_equal(found[1], found[2]), "there is nothing to learn from before the last chunk"


@pytest.mark.parametrize("settings", [{}, {"EVAL_STRIDE": "6", "TTT_CHUNK_TOKENS": "36"}], ids=str)
def test_all_is_scored_once_and_in_order_and_learned_from_behind_its_score(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the context is no multiple of the stride. No weight of the model changes."""
    lab = subject(**settings)
    found = lab.nats("score_sliding", lab.tokens())
    expected = plain_loop(lab.model(), lab.tokens(), lab.config, lab.config.eval_stride)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    events: list[tuple[str, int, int]] = []
    note = events.append
    before(monkeypatch, Ledger, "record", lambda _, start, nats: note(("score", start, start + len(nats))))
    before(monkeypatch, Ledger, "scored_tokens", lambda _, start, stop: note(("learn", start, stop)))
    for name in SCORERS:
        events.clear()
        model = lab.model()
        weights = copy.deepcopy(model.state_dict())
        nats = lab.nats(name, lab.tokens(), model)
        scored = [event for event in events if event[0] == "score"]
        assert [start for _, start, _ in scored] == [0, *(stop for *_, stop in scored[:-1])]
        assert scored[-1][2] == len(nats) == 149
        for number, (kind, _, stop) in enumerate(events):
            assert kind == "score" or stop - 1 <= max(end for *_, end in events[:number])
        assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


LONGER = {"EVAL_SEQ_LEN": "64", "TTT_CHUNK_TOKENS": "64"}  # more context than in training


@pytest.mark.parametrize("changes", [{}, {"TTT_EPOCHS": "2", "TTT_BATCH_SEQS": "1"}, LONGER], ids=str)
def test_ttt_follows_the_protocol(changes: dict[str, str]) -> None:
    lab = subject(TTT_LR="0.05", **changes)
    found = lab.nats("score_ttt", lab.tokens())
    np.testing.assert_allclose(found, plain_ttt(lab.model(), lab.tokens(), lab.config), atol=2e-4)
    assert np.abs(found - lab.nats("score_sliding", lab.tokens())).max() > 0.01


SMALL_BATCHES = {"VAL_BATCH_SIZE": 8 * 2 * 16, "TTT_LR": 0.03}  # two rows: several ranks score each chunk


def write_ledgers(machine: train_gpt.Machine, folder: Path) -> None:
    """What one rank finds, in a file."""
    lab = dataclasses.replace(subject(**SMALL_BATCHES), machine=machine)
    for name in SCORERS:
        np.save(folder / f"{name}_{machine.rank}.npy", lab.nats(name, lab.tokens()))


def test_ranks_with_unequal_and_zero_shares_write_the_same_ledger(tmp_path: Path) -> None:
    """Bit by bit, but where gradients are summed in another order."""
    on_ranks(3, tmp_path, write_ledgers, tmp_path)
    lab = subject(**SMALL_BATCHES)
    for name in SCORERS:
        alone = lab.nats(name, lab.tokens())
        for rank in range(3):
            found = np.load(tmp_path / f"{name}_{rank}.npy")
            np.testing.assert_allclose(found, alone, rtol=0, atol=1e-4 if name == "score_ttt" else 0)


def byte_config(dataset: Path, **changes: str) -> Config:
    """The settings of a run on the tiny dataset."""
    places = {"DATA_PATH": str(dataset), "TOKENIZER_PATH": str(dataset / "tokenizer.model")}
    return Config.from_env({**tiny.environment(), **places, **changes})


@pytest.mark.parametrize("size", [1024, 8192])
def test_bytes_of_the_real_validation_prefix(shared_data: Path, size: int) -> None:
    folder = shared_data / f"datasets/fineweb_sample_sp{size}"
    model = shared_data / f"tokenizers/fineweb_{size}_bpe.model"
    config = byte_config(folder, TOKENIZER_PATH=str(model), VOCAB_SIZE=str(size))
    shards = train_gpt.open_shards(f"{folder}/fineweb_val_*.bin")
    tokens = np.concatenate([train_gpt.read_tokens(shard) for shard in shards])
    starts = np.append(np.flatnonzero(tokens == 1), len(tokens))
    whole = tokens[: starts[901]]
    assert token_bytes(whole, config).sum() == VALIDATION_PREFIX_BYTES


def lines(run: RecordingRun, label: str) -> list[str]:
    return [line for line in run.lines if line.startswith(label)]


def tick_each_record(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by so much with each chunk that is scored."""
    now = [0.0]
    before(monkeypatch, Ledger, "record", lambda *_: now.append(now.pop() + seconds))
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: now[0])


SINGLE_ROWS = {"VAL_BATCH_SIZE": "1", "TTT_EPOCHS": "1"}  # so that every score has chunks of 32 targets


@functools.cache
def scores_without_lines() -> dict[str, train_gpt.Score]:
    lab = subject(VAL_PROGRESS_LOG_EVERY=0, **SINGLE_ROWS)
    text = Validation(lab.tokens(), 321, "")
    return train_gpt.evaluate(lab.model(), lab.config, RecordingRun(), text, "int6")


@pytest.mark.parametrize(
    ("every", "told_at"), [("0", []), ("1", [32, 64, 96, 128, 149]), ("20", [64, 128, 149]), ("90", [149])]
)
def test_progress_comes_in_time(every: str, told_at: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds a chunk of 32 targets, and what all should come to. No score depends on the lines."""
    lab = subject(VAL_PROGRESS_LOG_EVERY=every, **SINGLE_ROWS)
    text = Validation(lab.tokens(), 321, "")
    run = RecordingRun()
    expected = scores_without_lines()
    tick_each_record(10.0, monkeypatch)
    assert train_gpt.evaluate(lab.model(), lab.config, run, text, "int6") == expected
    told = [
        f"{seen / 149:.0%} tokens_seen:{seen} eta:{10 * chunk * (149 / seen - 1):.0f}s"
        for chunk, seen in enumerate((32, 64, 96, 128, 149), 1) if seen in told_at
    ]
    for name in expected:
        found = lines(run, f"val_progress:{name} ")
        assert all(re.search(r" partial_mean_loss:\d+\.\d{4} ", line) for line in found)
        assert [re.sub(r"^\S+ | partial_mean_loss:\S+", "", line) for line in found] == told, name


@pytest.mark.parametrize("prefetch", ["0", "1"])
def test_the_host_fetches_nothing_from_the_device_but_the_scores_of_a_chunk(prefetch: str) -> None:
    """Each `.cpu()` and each `.item()` would wait for all that the device still has to do."""
    lab = subject(VAL_PREFETCH=prefetch, VAL_BATCH_SIZE="8", TTT_EPOCHS="1")
    model = lab.model()
    tokens = lab.tokens()
    fetched: list[torch.Size] = []
    with pytest.MonkeyPatch.context() as patch:
        before(patch, torch.Tensor, "cpu", lambda tensor: fetched.append(tensor.shape))
        patch.setattr(torch.Tensor, "item", lambda _: pytest.fail("a number was asked for"))
        patch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("numbers were asked for"))
        lab.nats("score_ttt", tokens, model)
    assert fetched == [torch.Size([length]) for length in (32, 32, 32, 32, 21)]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "names"), [
    ({"TTT_LR": "0.05"}, [*SCORERS]), (LORA, ["score_ttt"]),
])
def test_compiled_scoring_and_learning_give_the_same_ledgers(
    settings: dict[str, str], names: list[str]
) -> None:
    plain = subject(**settings)
    compiled = dataclasses.replace(plain, machine=train_gpt.Machine(compiled=True))
    for name in names:
        found = compiled.nats(name, compiled.tokens())
        np.testing.assert_allclose(found, plain.nats(name, plain.tokens()), atol=2e-4)


def test_with_sgd_learning_stops_where_time_is_for_scoring_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk takes a second to score and five to learn from; there are five chunks."""
    now = [0.0]
    for seconds, place, name in ((1, train_gpt.WindowScorer, "score"), (5, train_gpt, "learn")):
        before(monkeypatch, place, name, lambda *_, seconds=seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(train_gpt.ScoreClock, "seconds", lambda _: now[0])
    lab = subject(TTT_EPOCHS="1")
    whole = lab.nats("score_ttt", lab.tokens())
    for limit, chunks, taken in ((25, 4, 25), (24, 3, 20), (19, 2, 15), (9, 1, 10), (4, 0, 5)):
        now[0] = 0.0
        clock = train_gpt.ScoreClock(RecordingRun(), "legal_ttt", 0, limit)
        nats = train_gpt.score_ttt(lab.model(), lab.tokens(), lab.config, clock).nats
        assert list(clock.modes.values()) == chunks * [32] + (4 - chunks) * [0] and now[0] == taken
        same = 32 * (chunks + 1)
        assert np.array_equal(nats[:same], whole[:same]) and (chunks == 4 or nats[same] != whole[same])


def test_ranks_learn_together_by_the_clock_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_gpt.Machine, "gather", lambda _, value: [False, value])
    monkeypatch.setattr(train_gpt.Machine, "all_reduce", lambda *_: None)
    monkeypatch.setattr(train_gpt, "learn", lambda *_: pytest.fail("rank 0 does not learn"))
    lab = subject()
    model = lab.model()
    model.machine = train_gpt.Machine(1, 2)
    train_gpt.score_ttt(model, lab.tokens(), lab.config)


@pytest.mark.parametrize(("changes", "lengths", "learned"), [
    ({}, [1] * 30, 0),  # a document of one chunk is scored, and nothing follows that could have learned
    ({}, [8] * 10, 0),
    ({}, [8, 9, 1, 20, 1], 29),  # those of 9 and 20 tokens
    ({"TTT_LORA_LR": "0"}, [20, 20], 0),
    ({"TTT_MODE": "sgd", "TTT_EPOCHS": "0"}, [80], 0),
    ({"TTT_MODE": "sgd", "TTT_LR": "0"}, [80], 0),
    ({"TTT_MODE": "sgd"}, [80], 64),  # two whole chunks; nothing learns from the last
])
def test_learned_tokens_are_those_that_there_was_a_step_on(
    changes: dict[str, str], lengths: list[int], learned: int
) -> None:
    """lengths: the targets of each document, BOS of the next one included."""
    adapters = {"TTT_MODE": "lora", "TTT_CHUNK_SIZE": "8", "TTT_LORA_LR": "0.01"}
    lab = subject(**{**adapters, "TTT_LR": "0.01", **changes})
    documents = [[1, *(5 + place % 5 for place in range(length - 1))] for length in [*lengths, 1]]
    tokens = np.concatenate(documents).astype(np.uint16)
    validation = Validation(tokens, 321, "")
    scores = train_gpt.evaluate(lab.model(), lab.config, RecordingRun(), validation, "int6")
    assert scores["legal_ttt"].learned_tokens == learned
    assert scores["roundtrip"].learned_tokens == 0


DAMAGED_MODES = [
    "", "[]", "null", "3", "{", '{"a": 1}', '{"0": "x"}', '{"0": 1.5}', '{"0": true}', '{"0": -1}',
    '{"0": null}', '{"-1": 3}', "[" * 200_000 + "]" * 200_000, "\xff\xfe{",
]


@pytest.mark.parametrize("content", DAMAGED_MODES, ids=lambda content: content[:20])
def test_modes_in_any_damaged_form_are_one_sentence_before_anything_is_scored(
    content: str, tmp_path: Path
) -> None:
    artifact = tmp_path / "model.bin"
    (tmp_path / "eval_modes.json").write_bytes(content.encode("latin-1"))
    config = train_gpt.Config(eval_only=str(artifact))
    with pytest.raises(train_gpt.ConfigError, match=r"eval_modes.json: not the modes.*remove it") as told:
        train_gpt.read_modes(config)
    assert "\n" not in str(told.value)
    # Without a limit nothing needs to be followed.
    assert train_gpt.read_modes(train_gpt.Config(eval_only=str(artifact), max_eval_seconds=0)) == {}
    (tmp_path / "eval_modes.json").write_text('{"0": 32, "7": 0}')
    assert train_gpt.read_modes(config) == {"0": 32, "7": 0}
    (tmp_path / "eval_modes.json").unlink()
    assert train_gpt.read_modes(config) == {}


@pytest.mark.parametrize(("limit", "left_out"), [("0", 0), ("16", 0), ("14", 1), ("9", 2)])
def test_diagnostics_follow_in_time(limit: str, left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them has five chunks of a second."""
    lab = subject(**SINGLE_ROWS, MAX_EVAL_SECONDS=limit)
    tick_each_record(1.0, monkeypatch)

    class Timed(RecordingRun):
        phase = train_gpt.Run.phase
        stop_signal = 0

    run = Timed(train_gpt.Machine())
    scores = train_gpt.evaluate(lab.model(), lab.config, run, Validation(lab.tokens(), 321, ""), "int6")
    assert next(iter(scores)) == "legal_ttt"
    told = [line.split()[0] for line in run.lines if " MAX_EVAL_SECONDS=" in line]
    assert len(told) == left_out and len(scores) == 3 - left_out, run.lines


def test_the_time_of_another_rank_was_up_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    of_peer = ({"7": 0}, {}, "warning: legal_ttt continues without training")
    monkeypatch.setattr(train_gpt.Machine, "gather", lambda _, value: [value, of_peer])
    lab = subject()

    class Timed(RecordingRun):
        phase = train_gpt.Run.phase
        stop_signal = 0
        directory = None

    run = Timed(train_gpt.Machine())
    train_gpt.evaluate(lab.model(), lab.config, run, Validation(lab.tokens(), 321, ""), "int6")
    assert of_peer[2] in run.lines


def test_eval_only_follows_the_modes_beside_its_artifact_unless_there_is_no_limit(lab: Lab) -> None:
    adapters = {"TTT_BATCH_SIZE": 1, "TTT_CHUNK_SIZE": 16, "TTT_LORA_LR": 0.01}
    of_a_run = {**ROUNDED, "ITERATIONS": 1, "EVAL_STRIDE": 0}
    short = {**adapters, **of_a_run, "MAX_EVAL_SECONDS": 30, "VAL_TOKENS_LIMIT": 500}
    first = lab.succeed(fault=counted_clock(forward_seconds=1), **short)
    modes = json.loads((first.directory / "eval_modes.json").read_bytes())
    learned = first.summary["losses"]["legal_ttt"]["learned_tokens"]
    assert 0 < learned <= sum(modes.values()) < 500
    again = lab.elsewhere("again").succeed(EVAL_ONLY=first.directory / "model.bin", **short)
    assert again.summary["losses"]["legal_ttt"] == first.summary["losses"]["legal_ttt"]
    no_limit = {**short, "MAX_EVAL_SECONDS": 0, "ARTIFACT_BYTES_MAX": 1000}
    whole = lab.elsewhere("whole").succeed(EVAL_ONLY=first.directory / "model.bin", **no_limit)
    assert whole.summary["losses"]["legal_ttt"]["learned_tokens"] == 500
    # Its bytes are not judged by the script that happens to score it.
    assert "EXCEEDED" in whole.out and "what counts is the script of the artifact's own run" in whole.out
    assert "what counts" not in again.out
