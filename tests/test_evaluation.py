"""Scores are complete, in order, the same for any number of ranks, and equal to a plain loop over windows."""

from __future__ import annotations

import ast
import contextlib
import math
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Ended, Lab

import train_gpt
from records import probes, prove, rehearsal
from records.findings import Level, Mode
from train_gpt import (
    Config,
    ConfigError,
    DataError,
    Ledger,
    ScoringError,
    Validation,
    token_bytes,
    window_rows,
)

GOLDEN_TARGETS, GOLDEN_WINDOWS, GOLDEN_CHUNKS = 40_540_160, 633_409, 1_238
VALIDATION_PREFIX_BYTES = 2_504_310  # of its 901 whole documents
SOURCE = Path(train_gpt.__file__).read_text(encoding="utf-8")


def subject(**settings: str) -> probes.Subject:
    return probes.make_subject(train_gpt, **settings)


def plain_loop(model: Any, tokens: np.ndarray, config: Config, stride: int) -> np.ndarray:
    """Every window by itself, the head on every row; each target from the first window that reaches it."""
    nats, window = np.full(len(tokens) - 1, np.nan), 0
    while np.isnan(nats).any():
        begin = window * stride
        row = torch.from_numpy(tokens[begin : begin + config.eval_length + 1].astype(np.int64))
        with torch.no_grad():
            found = model.loss_per_token(model(row[None, :-1])[0], row[1:]).double().numpy()
        first = 0 if window == 0 else config.eval_length - stride
        nats[begin + first : begin + len(found)] = found[first:]
        window += 1
    return nats


def plain_ttt(model: Any, tokens: np.ndarray, config: Config) -> np.ndarray:
    """The protocol of PR #1493 written out for one rank; destroys the model."""
    c, targets = config, len(tokens) - 1
    chunk_count = -(-targets // c.ttt_chunk_tokens)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    nats = np.zeros(targets)
    for chunk in range(chunk_count):
        start, stop = chunk * c.ttt_chunk_tokens, min((chunk + 1) * c.ttt_chunk_tokens, targets)
        nats[start:stop] = plain_loop(model, tokens, config, c.eval_stride)[start:stop]
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


# --- the ledger ---


def test_a_ledger_takes_each_score_once_and_only_numbers() -> None:
    ledger = Ledger(np.arange(11))
    ledger.record(0, np.ones(4))
    with pytest.raises(ScoringError, match="target 3 "):
        ledger.record(3, np.ones(2))
    with pytest.raises(ScoringError, match="target 5 "):
        ledger.record(4, np.array([1.0, np.nan]))
    with pytest.raises(ScoringError, match="target 6 "):
        ledger.record(6, np.ones(2))
    with pytest.raises(ScoringError, match="6 targets were never scored, the first is 4"):
        ledger.score(1)
    with pytest.raises(ValueError, match="read-only"):
        ledger.nats[0] = 0.0
    ledger.record(4, np.full(6, 0.5))
    score = ledger.score(7)
    assert score == (0.7, pytest.approx(1 / math.log(2)), 10, 7) and len(ledger) == 10


@pytest.mark.parametrize(("start", "count"), [(8, 3), (10, 1), (12, 2)])
def test_a_ledger_has_no_place_beyond_the_stream(start: int, count: int) -> None:
    with pytest.raises(ScoringError, match="absent"):
        Ledger(np.arange(11)).record(start, np.ones(count))


def test_updates_get_scored_tokens_only() -> None:
    tokens = np.arange(10, 21)
    ledger = Ledger(tokens)
    assert ledger.scored_tokens(0, 1).tolist() == [10]
    with pytest.raises(ScoringError, match="not all scored"):
        ledger.scored_tokens(0, 2)
    ledger.record(0, np.ones(4))
    assert ledger.scored_tokens(1, 5).tolist() == [11, 12, 13, 14]
    for start, stop in ((0, 6), (4, 6), (0, 99)):
        with pytest.raises(ScoringError):
            ledger.scored_tokens(start, stop)
    ledger.scored_tokens(0, 5)[:] = 0
    assert ledger.scored_tokens(0, 1).tolist() == [10]


def test_the_source_learns_from_scored_tokens_only() -> None:
    section = SOURCE[SOURCE.index("# EVALUATION —") : SOURCE.index("# ARTIFACT —")]
    functions = {n.name: n for n in ast.walk(ast.parse(section)) if isinstance(n, ast.FunctionDef)}
    names = {
        name: {n.attr for n in ast.walk(f) if isinstance(n, ast.Attribute)} for name, f in functions.items()
    }
    assert [name for name, used in names.items() if {"backward", "grad", "step"} & used] == ["learn"]
    calls = [
        n for n in ast.walk(ast.parse(SOURCE)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "learn"
    ]
    (call,) = calls
    assert ast.unparse(call.args[2]) == "ledger.scored_tokens(begin, end + 1)"
    assert [argument.arg for argument in functions["learn"].args.args] == ["model", "sgd", "tokens", "config"]


# --- windows ---


def test_windows_and_chunks_have_the_published_counts() -> None:
    begins = np.zeros(GOLDEN_TARGETS, np.int32)
    chunks = window_rows(GOLDEN_TARGETS, 2048, 64, begins, 32_768)
    per_chunk = [len(rows) for rows in chunks]
    assert sum(per_chunk) == GOLDEN_WINDOWS and len(per_chunk) == GOLDEN_CHUNKS
    assert all((rows[:, 1] // 32_768 == index).all() for index, rows in enumerate(chunks))
    assert per_chunk[0] == 481 and per_chunk[-1] == 96 and set(per_chunk[1:-1]) == {512}


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.randoms())
def test_rows_cover_each_target_once_with_its_context(
    targets: int, stride: int, strides: int, contexts: int, random: Any
) -> None:
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
@pytest.mark.parametrize("batch_tokens", ["16", "128", "4096"])
def test_scorers_equal_a_plain_loop_over_windows(mask: str, batch_tokens: str) -> None:
    lab = subject(DOC_MASK=mask, VAL_BATCH_SIZE=batch_tokens)
    model, tokens = lab.model(), lab.tokens()
    for name, stride in (("score_roundtrip", 16), ("score_sliding", 8)):
        found, expected = lab.nats(name, tokens, model), plain_loop(model, tokens, lab.config, stride)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_with_documents_fewer_rows_are_computed_than_windows_exist() -> None:
    lab, rows = subject(), list[int]()
    model, forward = lab.model(), train_gpt.GPT.forward

    def counted(model: Any, ids_BT: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(ids_BT))
        return forward(model, ids_BT, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.GPT, "forward", counted)
        lab.nats("score_sliding", lab.tokens(), model)
    assert sum(rows) < 1 + (149 - 16 + 7) // 8


@pytest.mark.parametrize("length", [2, 3, 16, 17, 18, 33, 34])
def test_streams_shorter_than_a_window_or_a_chunk_are_scored_whole(length: int) -> None:
    lab = subject()
    tokens, model = lab.tokens()[:length], lab.model()
    found = [lab.nats(name, tokens, model) for name in probes.SCORERS]
    assert all(len(nats) == length - 1 and np.isfinite(nats).all() for nats in found)
    np.testing.assert_allclose(found[1], plain_loop(model, tokens, lab.config, 8), atol=2e-5)
    if length <= lab.config.ttt_chunk_tokens + 1:
        assert np.array_equal(found[1], found[2]), "there is nothing to learn from before the last chunk"


@pytest.mark.parametrize("kind", ["no BOS", "only BOS", "late BOS"])
def test_streams_with_odd_documents_are_scored_whole(kind: str) -> None:
    lab = subject()
    tokens = lab.tokens()
    tokens[tokens == 1] = 3
    tokens[{"no BOS": slice(0, 0), "only BOS": slice(None), "late BOS": slice(77, 79)}[kind]] = 1
    model = lab.model()
    found = lab.nats("score_sliding", tokens, model)
    np.testing.assert_allclose(found, plain_loop(model, tokens, lab.config, 8), atol=2e-5)
    assert np.isfinite(lab.nats("score_ttt", tokens, model)).all()


def test_a_context_that_is_no_multiple_of_the_stride_is_scored_whole_and_in_order() -> None:
    lab = subject(EVAL_STRIDE="6", TTT_CHUNK_TOKENS="36")
    found = lab.nats("score_sliding", lab.tokens())
    np.testing.assert_allclose(found, plain_loop(lab.model(), lab.tokens(), lab.config, 6), atol=2e-5)
    findings = [*probes.ledger_order(lab, "score_ttt"), *probes.kraft_sums(lab, "score_ttt", [0, 36, 40])]
    assert all(finding.level(Mode.AGREED) is Level.INFO for finding in findings)


# --- test-time training ---


@pytest.mark.parametrize("changes", [{}, {"TTT_EPOCHS": "2", "TTT_BATCH_SEQS": "1"}, {"TTT_GRAD_CLIP": "0"}])
def test_ttt_follows_the_protocol(changes: dict[str, str]) -> None:
    lab = subject(TTT_LR="0.05", **changes)
    found = lab.nats("score_ttt", lab.tokens())
    np.testing.assert_allclose(found, plain_ttt(lab.model(), lab.tokens(), lab.config), atol=2e-4)
    assert np.abs(found - lab.nats("score_sliding", lab.tokens())).max() > 0.01


def test_the_last_chunk_is_never_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    lab, learned = subject(), list[list[int]]()
    monkeypatch.setattr(
        train_gpt, "learn", lambda model, sgd, tokens, config: learned.append(tokens.tolist())
    )
    lab.nats("score_ttt", lab.tokens())
    stream = lab.tokens().tolist()
    assert learned == [stream[start : start + 33] for start in (0, 32, 64, 96)]


def test_weights_come_back_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = subject()
    model, calls = lab.model(), iter(range(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    original = train_gpt.learn

    def learn_twice(*arguments: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        original(*arguments)

    monkeypatch.setattr(train_gpt, "learn", learn_twice)
    with pytest.raises(KeyboardInterrupt):
        lab.nats("score_ttt", lab.tokens(), model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_ranks_with_unequal_and_zero_shares_write_the_same_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "RANKS", (3,))
    findings = list(prove.rank_invariance(subject(), Path(train_gpt.__file__), tmp_path))
    assert len(findings) == 3
    assert all(finding.level(Mode.AGREED) is Level.INFO for finding in findings), findings


# --- bytes ---


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> rehearsal.Laboratory:
    return rehearsal.build_laboratory(tmp_path_factory.mktemp("laboratory"))


def byte_config(laboratory: rehearsal.Laboratory, **changes: str) -> Config:
    places = {"DATA_PATH": str(laboratory.folder), "TOKENIZER_PATH": str(laboratory.tokenizer)}
    return Config.from_env({**rehearsal.TINY_RUN, **places, **changes})


@pytest.mark.parametrize("size", [1024, 8192])
def test_bytes_of_the_real_validation_prefix(shared_data: Path, size: int) -> None:
    folder = shared_data / f"datasets/fineweb_sample_sp{size}"
    model = shared_data / f"tokenizers/fineweb_{size}_bpe.model"
    config = Config.from_env(
        {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(model), "VOCAB_SIZE": str(size)}
    )
    tokens = np.concatenate(
        [train_gpt.read_tokens(s) for s in train_gpt.open_shards(f"{folder}/fineweb_val_*.bin")]
    )
    starts = np.append(np.flatnonzero(tokens == 1), len(tokens))
    whole = tokens[: starts[901]]
    assert token_bytes(whole, config).sum() == VALIDATION_PREFIX_BYTES


def test_pieces_count_the_bytes_that_they_decode_to(laboratory: rehearsal.Laboratory) -> None:
    lab = subject()
    findings = list(probes.byte_table(lab, str(laboratory.tokenizer), rehearsal.TEXTS, laboratory.pieces))
    assert [finding.check for finding in findings] == ["B10", "B11"]


def test_a_byte_sidecar_takes_precedence(laboratory: rehearsal.Laboratory, tmp_path: Path) -> None:
    tokens, counts = np.array([1, 5, 6, 1, 7], np.uint16), np.array([0, 3, 1, 0, 4], "<u2")
    header = np.zeros(256, "<i4")
    header[:3] = *rehearsal.SHARD_HEADER, len(counts)
    (tmp_path / "fineweb_val_bytes_000000.bin").write_bytes(header.tobytes() + counts.tobytes())
    config = byte_config(laboratory, DATA_PATH=str(tmp_path))
    assert token_bytes(tokens, config).tolist() == [3, 1, 0, 4]
    assert token_bytes(tokens[:3], config).tolist() == [3, 1]
    with pytest.raises(DataError, match="4 counts for 5 targets"):
        token_bytes(np.append(tokens, 8), config)


def test_a_foreign_tokenizer_is_refused(laboratory: rehearsal.Laboratory, tmp_path: Path) -> None:
    (tmp_path / "broken.model").write_bytes(b"no model")
    for changes in (
        {"TOKENIZER_PATH": str(tmp_path / "absent")},
        {"TOKENIZER_PATH": str(tmp_path / "broken.model")},
    ):
        with pytest.raises(DataError, match="no SentencePiece model"):
            token_bytes(np.array([1, 5]), byte_config(laboratory, **changes))
    with pytest.raises(DataError, match=r"320 pieces.*VOCAB_SIZE=512"):
        token_bytes(np.array([1, 5]), byte_config(laboratory, VOCAB_SIZE="512"))


# --- settings, lines, text ---


@pytest.mark.parametrize(
    "changes",
    [{"EVAL_STRIDE": "17"}, {"TTT_CHUNK_TOKENS": "36"}, {"TTT_CHUNK_TOKENS": "8"}, {"EVAL_STRIDE": "0"}],
)
def test_settings_that_contradict_are_config_errors(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"EVAL_STRIDE|TTT_CHUNK_TOKENS"):
        subject(**changes)


@pytest.fixture
def lines() -> Iterator[Any]:
    yield lambda run, label: [line for line in run.lines if line.startswith(label)]


@pytest.mark.parametrize("mark", ["", " comparable:0"])
def test_final_lines_are_verbatim_and_marked(mark: str, lines: Any) -> None:
    lab, run = subject(VAL_PROGRESS_LOG_EVERY="2"), probes.RecordingRun()
    scores = train_gpt.evaluate(lab.model(), lab.config, run, Validation(lab.tokens(), 321, mark), "int6")
    assert list(scores) == ["roundtrip", "sliding_window", "legal_ttt"]
    for label in ("final_int6_roundtrip", "final_int6_sliding_window", "legal_ttt"):
        short, exact = lines(run, f"{label} ")[0], lines(run, f"{label}_exact ")[0]
        assert re.fullmatch(
            rf"{label} val_loss:\d+\.\d{{4}} val_bpb:\d+\.\d{{4}} eval_time:\d+ms{mark}", short
        )
        numbers = rf"val_loss:\d+\.\d{{8}} val_bpb:\d+\.\d{{8}} scored_tokens:149 val_bytes:321{mark}"
        assert re.fullmatch(f"{label}_exact {numbers}", exact)
    score = scores["roundtrip"]
    assert math.isclose(score.bits_per_byte, score.nats * 149 / math.log(2) / 321, rel_tol=1e-12)
    assert len(lines(run, "val_progress:legal_ttt ")) == 3


# --- going on after a cut ---

PHASES = ("eval_roundtrip", "eval_sliding_window", "eval_legal_ttt")


class Cut(Exception):
    """What ends an evaluation in a test, as a signal ends a process."""


class ResumableRun(probes.RecordingRun):
    """A run with a directory, which ends after so many chunks of a phase."""

    def __init__(self, folder: Path, phase: str = "", chunks: int = 0) -> None:
        super().__init__()
        self.rank, self.folder, self.cut, self.left = 0, folder, phase, chunks

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add to the seconds of a phase, as a run does."""
        self.phase_name = name
        yield
        self.phases[name] = self.phases.get(name, 0.0) + 1.0

    def path(self, name: str) -> Path:
        """A file of the run directory."""
        return self.folder / name

    def alive(self) -> None:
        """Called after each chunk, before it is told of and saved."""
        self.left -= self.phase_name == self.cut
        if self.left < 0:
            raise Cut


def evaluated(run: ResumableRun, lab: probes.Subject, tokens: np.ndarray | None = None) -> dict[str, Any]:
    validation = Validation(lab.tokens() if tokens is None else tokens, 321, "")
    return train_gpt.evaluate(lab.model(), lab.config, run, validation, "int6")


def resumable(folder: Path, **changes: str) -> probes.Subject:
    """Settings under which every chunk is told of and saved."""
    every = {"VAL_PROGRESS_LOG_EVERY": "1", "CHECKPOINT_EVERY_SECONDS": "1e-9", "VAL_BATCH_SIZE": "1"}
    return subject(RESUME=str(folder), **every, **changes)


def seen(run: ResumableRun) -> list[tuple[str, str]]:
    return re.findall(r"val_progress:(\w+) .* tokens_seen:(\d+) ", "\n".join(run.lines))


@pytest.mark.parametrize("chunks", range(5))
@pytest.mark.parametrize("phase", PHASES)
def test_evaluation_goes_on_behind_the_last_finished_chunk(phase: str, chunks: int, tmp_path: Path) -> None:
    lab = resumable(tmp_path, TTT_LR="0.05")
    whole, cut, rest = ResumableRun(tmp_path), ResumableRun(tmp_path, phase, chunks), ResumableRun(tmp_path)
    expected = evaluated(whole, lab)
    assert not (tmp_path / "evaluation.pt").exists()
    with pytest.raises(Cut):
        evaluated(cut, lab)
    assert evaluated(rest, lab) == expected
    assert seen(cut) + seen(rest) == seen(whole) and len(seen(cut)) >= chunks
    assert not (tmp_path / "evaluation.pt").exists()


def test_what_is_saved_is_neither_scored_nor_learned_from_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, whole, parts, saves = resumable(tmp_path), probes.Events(), probes.Events(), list[int]()
    with probes.watched(lab, whole):
        evaluated(ResumableRun(tmp_path), lab)
    write = train_gpt.write_state

    def write_and_end(path: Path, state: Any) -> None:
        write(path, state)
        saves.append(1)
        if len(saves) == 12:
            raise Cut

    monkeypatch.setattr(train_gpt, "write_state", write_and_end)
    with probes.watched(lab, parts):
        with pytest.raises(Cut):
            evaluated(ResumableRun(tmp_path), lab)
        scored = train_gpt.read_state(tmp_path / "evaluation.pt")["nats"]
        assert {name: len(nats) for name, nats in scored.items()} == {
            "eval_roundtrip": 149, "eval_sliding_window": 149, "eval_legal_ttt": 64,
        }  # fmt: skip
        evaluated(ResumableRun(tmp_path), lab)
    for events in (whole, parts):
        events.log = [event for event in events.log if event[0] != "record"]
    assert parts.log == whole.log


@pytest.mark.parametrize("other", ["weights", "tokens", "settings", "cut file", "pickle", "no file"])
def test_the_state_of_another_evaluation_is_ignored(other: str, tmp_path: Path) -> None:
    lab, path = resumable(tmp_path), tmp_path / "evaluation.pt"
    with pytest.raises(Cut):
        evaluated(ResumableRun(tmp_path, "eval_legal_ttt", 3), lab)
    content, tokens = path.read_bytes(), lab.tokens()
    if other == "weights":
        lab = probes.make_subject(train_gpt, 1, **lab.config.as_env())
    elif other == "settings":
        lab = resumable(tmp_path, TTT_LR="0.01")
    elif other == "tokens":
        tokens[100] = 5
    elif other == "no file":
        path.unlink()
    else:
        path.write_bytes(content[:-99] if other == "cut file" else b"\x80\x04N.")
    run = ResumableRun(tmp_path)
    result = evaluated(run, lab, tokens)
    assert len(seen(run)) == 3 * 5 and result == evaluated(ResumableRun(tmp_path), lab, tokens)


def test_time_and_projection_hold_over_a_cut(tmp_path: Path) -> None:
    """The seconds before a cut belong to what was scored in them, and count towards MAX_EVAL_SECONDS."""
    lab, path = resumable(tmp_path, MAX_EVAL_SECONDS="250000"), tmp_path / "evaluation.pt"
    with pytest.raises(Cut):
        evaluated(ResumableRun(tmp_path, "eval_legal_ttt", 2), lab)
    state, run = train_gpt.read_state(path), ResumableRun(tmp_path)
    assert set(state["phases"]) == set(PHASES)
    seconds = {"eval_roundtrip": 6e4, "eval_sliding_window": 4e4, "eval_legal_ttt": 1e5}
    train_gpt.write_state(path, {**state, "phases": seconds})
    evaluated(run, lab)
    told = [line.split(" eta:")[1] for line in run.lines if line.startswith("val_progress:")]
    left = [float(text.split("s")[0]) for text in told]
    assert left == pytest.approx([1e5 * (149 / 96 - 1), 1e5 * (149 / 128 - 1), 0.0], rel=1e-3)
    assert [" warning: above MAX_EVAL_SECONDS: 2552" in text for text in told] == [True, False, False]
    assert run.phases == {name: before + 1.0 for name, before in seconds.items()}


KILLED = """
import os, signal, numpy
replace, repeat, saves, batches = os.replace, numpy.repeat, [], []
def counting_replace(source, target, *rest, **more):
    replace(source, target, *rest, **more)
    saves.extend([target] * str(target).endswith("evaluation.pt"))
def fatal_repeat(*given, **more):
    batches.extend([1] * (len(saves) == NUMBER))
    if len(batches) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return repeat(*given, **more)
os.replace, numpy.repeat = counting_replace, fatal_repeat
"""  # in the second batch after so many saved chunks
EVERY_CHUNK = {"VAL_TOKENS_LIMIT": 2500, "VAL_BATCH_SIZE": 32, "VAL_PROGRESS_LOG_EVERY": 1}


def tokens_seen(ended: Ended) -> list[tuple[str, str]]:
    log = (ended.directory / "log.txt").read_text("utf-8")
    return re.findall(r"^val_progress:(\w+) .* tokens_seen:(\d+) ", log, re.M)


def test_a_run_killed_in_each_scorer_goes_on_to_the_same_scores(lab: Lab) -> None:
    straight = lab.elsewhere("straight").succeed(**EVERY_CHUNK)
    chunks = tokens_seen(straight)
    assert [sum(label == name for label, _ in chunks) for name in ("roundtrip", "sliding_window")] == [3, 3]
    changes, done = {**EVERY_CHUNK, "CHECKPOINT_EVERY_SECONDS": 1e-9}, 0
    for saves in (2, 3, 7):  # in the third chunk of each scorer; of the last, in the seventh
        ended = lab.run(fault=KILLED.replace("NUMBER", str(saves)), **changes)
        done += saves
        assert ended.status == -signal.SIGKILL and tokens_seen(ended) == chunks[:done]
        changes["RESUME"] = ended.directory
    last = lab.succeed(**changes)
    assert tokens_seen(last) == chunks  # no chunk twice
    assert last.summary["losses"] == straight.summary["losses"]
    assert last.summary["artifact"]["sha256"] == straight.summary["artifact"]["sha256"]
    assert not (last.directory / "evaluation.pt").exists()


def test_two_ranks_go_on_where_they_were_killed(lab: Lab) -> None:
    first, _ = (rank.wait() for rank in lab.elsewhere("straight").ranks(2, **EVERY_CHUNK))
    changes = {**EVERY_CHUNK, "CHECKPOINT_EVERY_SECONDS": 1e-9}
    fault = {0: {"fault": KILLED.replace("NUMBER", "9")}}
    killed, peer = lab.ranks(2, fault, **changes)
    ended = killed.wait()
    peer.send(signal.SIGKILL)
    peer.wait()
    assert ended.status == -signal.SIGKILL and tokens_seen(ended) == tokens_seen(first)[:9]
    last, _ = (rank.wait() for rank in lab.ranks(2, RESUME=ended.directory, **changes))
    assert last.status == 0, last.err
    assert tokens_seen(last) == tokens_seen(first)
    assert last.summary["losses"] == first.summary["losses"]


FULL_DISK = """
import builtins, errno
real = builtins.open
def full(path, mode="r", *rest, **more):
    if "w" in mode and str(path).endswith("evaluation.pt.tmp"):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return real(path, mode, *rest, **more)
builtins.open = full
"""


def test_a_full_disk_ends_no_evaluation(lab: Lab, finished: Ended) -> None:
    ended = lab.succeed(fault=FULL_DISK, CHECKPOINT_EVERY_SECONDS=1e-9)
    assert ended.summary["losses"] == finished.summary["losses"]
    assert not [*ended.directory.glob("*evaluation.pt*")]


@pytest.mark.slow
def test_compiled_scoring_and_learning_give_the_same_ledgers() -> None:
    plain, compiled = subject(TTT_LR="0.05"), subject(TTT_LR="0.05", COMPILE="1")
    for name in probes.SCORERS:
        found = compiled.nats(name, compiled.tokens())
        np.testing.assert_allclose(found, plain.nats(name, plain.tokens()), atol=2e-4)
