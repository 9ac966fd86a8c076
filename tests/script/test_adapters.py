"""TTT_MODE=lora: each document is scored by itself, as a plain loop over documents does; off is off."""

import copy
import dataclasses
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import train_gpt
from tests.support.before import before
from tests.support.subject import LORA, VOCAB_SIZE, RecordingRun, Subject
from tests.support.subject import subject as tiny_subject
from tests.support.waiting import DEADLINE_SECONDS
from train_gpt import (
    BOS_ID,
    GPT,
    Config,
    DocumentAdapters,
    DocumentScorer,
    Ledger,
    Machine,
    initial_adapters,
)

ALL = "q,k,v,o,mlp,head"


def subject(**settings: object) -> Subject:
    return tiny_subject(**{**LORA, **settings})


def exact_model(lab: Subject) -> Any:
    """The subject's model in float64, so that rounding does not blur a comparison."""
    model = lab.model().double()
    model.compute_dtype = torch.float64
    return model


def first(model: Any, config: Config) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The adapters of a document before it learns, by visit: (1, rank, inputs) and (1, outputs, rank)."""
    visits = []
    numbers_1P = initial_adapters(model, config)[None]
    for groups in train_gpt.unpack(numbers_1P, train_gpt.adapter_layout(config), config):
        adapters = {}
        for a_1IR, b_of_name in groups.values():
            parts = a_1IR.mT.chunk(len(b_of_name), dim=1)
            adapters.update({name: (a, b_of_name[name].mT) for name, a in zip(b_of_name, parts, strict=True)})
        visits.append(adapters)
    return visits


class PlainAdapters:
    """The adapters of one document, written out: weights by name, and AdamW on each number."""

    def __init__(self, model: Any, config: Config) -> None:
        self.config = config
        self.scale = config.ttt_lora_alpha / config.ttt_lora_rank
        self.weights = {}
        for visit, adapters in enumerate(first(model, config)):
            for name, (a_1RI, b_1OR) in adapters.items():
                # The script's A and B have the root of the scale each; here the product has it.
                place = (name, 0 if name == "head" else visit)
                self.weights[(*place, "a")] = (a_1RI[0] / self.scale**0.5).requires_grad_()
                self.weights[(*place, "b")] = b_1OR[0].clone().requires_grad_()
        self.squares = {key: torch.zeros_like(weight) for key, weight in self.weights.items()}
        self.steps = 0

    def added(self, name: str, visit: int, x_TI: torch.Tensor) -> torch.Tensor:
        if name not in self.config.lora_targets:
            return torch.zeros(())
        return self.scale * x_TI @ self.weights[name, visit, "a"].T @ self.weights[name, visit, "b"].T

    def step(self, loss: torch.Tensor) -> None:
        c = self.config
        self.steps += 1
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        for (key, weight), gradient in zip(self.weights.items(), gradients, strict=True):
            square = c.ttt_beta2 * self.squares[key] + (1 - c.ttt_beta2) * gradient * gradient
            self.squares[key] = square
            size = (square / (1 - c.ttt_beta2**self.steps)).sqrt() + 1e-10 * self.scale**0.5
            with torch.no_grad():
                weight -= c.ttt_lora_lr * (gradient / size + c.ttt_weight_decay * weight)


class PlainModel(GPT):
    """The model with one document's adapters, added where its own code knows nothing of them."""

    plain: PlainAdapters
    visit = 0

    def nats(self, tokens: np.ndarray, first: int, start: int, stop: int, config: Config) -> torch.Tensor:
        """Of targets start .. stop, in a window from token `first` on."""
        self.visit = 0
        ids = torch.from_numpy(tokens[first : stop + 1].astype(np.int64))
        hidden = self(ids[None, :-1], longest=config.eval_length)[0, start - first :]
        logits = self.logits(hidden) + self.plain.added("head", 0, hidden)
        cap = config.logit_softcap
        targets = ids[start - first + 1 :]
        return F.cross_entropy(cap * torch.tanh(logits / cap), targets, reduction="none")

    def _attention(self, layer: int, x_BTD: Any, context: Any, adapters: Any) -> Any:
        # Projections are linear: their adapters are a change of the matrix.
        c = self.settings
        eye_DD = torch.eye(c.model_dim, dtype=x_BTD.dtype)
        changes = []
        widths = [c.model_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        for name, width in zip("qkv", widths, strict=True):
            change_DO = self.plain.added(name, self.visit, eye_DD)
            changes.append(change_DO.expand(c.model_dim, width).T)
        qkv = list(context.weights["qkv"])
        qkv[layer] = qkv[layer] + torch.cat(changes)
        changed = context._replace(weights={**context.weights, "qkv": tuple(qkv)})
        found = super()._attention(layer, x_BTD, changed, {})
        return found + self.plain.added("o", self.visit, x_BTD)

    def _mlp(self, layer: int, x_BTD: Any, scale: float, context: Any, adapters: Any) -> Any:
        added = self.plain.added("mlp", self.visit, train_gpt.rms_norm(x_BTD, scale))
        self.visit += 1
        return super()._mlp(layer, x_BTD, scale, context, {}) + added


def plain_scores(model: Any, tokens: np.ndarray, config: Config) -> np.ndarray:
    """Document by document and chunk by chunk: a pass that scores, and one more that learns."""
    plain = PlainModel(model.settings, seed=None).double()
    plain.load_state_dict(model.state_dict())
    plain.compute_dtype = model.compute_dtype
    plain.requires_grad_(False)
    borders = [0, *(i for i in range(1, len(tokens) - 1) if tokens[i] == BOS_ID), len(tokens) - 1]
    nats = np.full(len(tokens) - 1, np.nan)
    size = config.ttt_chunk_size
    for begin, end in itertools.pairwise(borders):
        plain.plain = PlainAdapters(plain, config)
        start = begin
        while start < end:
            stop = min(start + size, end)
            # A window of a whole chunk, though the document may end inside it.
            first = max(begin, start + size - config.eval_length)
            with torch.no_grad():
                nats[start:stop] = plain.nats(tokens, first, start, stop, config).numpy()
            if stop < end:
                plain.plain.step(plain.nats(tokens, first, start, stop, config).mean())
            start = stop
    return nats


def short_text(lab: Subject) -> np.ndarray:
    """An empty document, one longer than a window of 32 tokens, and a tail: two batches of three."""
    tokens = lab.tokens()[:84]
    tokens[tokens == BOS_ID] = 3
    tokens[[0, 11, 33, 34, 75]] = BOS_ID
    return tokens


PLAIN_CASES: list[dict[str, object]] = [
    {},
    {"TTT_LORA_TARGETS": "k,o,mlp,head", "TTT_LORA_ALPHA": 6, "TTT_CHUNK_SIZE": 6},
    {"EVAL_SEQ_LEN": 32, "TTT_LORA_TARGETS": "q", "TTT_BATCH_SIZE": 1},
    {"NUM_LOOPS": 1, "LOOP_START": 0, "LOOP_END": 1, "PARALLEL_START_LAYER": 1, "TTT_CHUNK_SIZE": 7},
    {"DOC_MASK": 0, "TTT_LORA_TARGETS": "head"},
]


@pytest.mark.parametrize("changes", PLAIN_CASES, ids=str)
def test_scores_are_a_plain_loop_s(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    if changes.get("TTT_CHUNK_SIZE") == 6:  # a constant of AdamW, at a value that counts in each step
        monkeypatch.setattr(Config, "ttt_weight_decay", 2.0)
    lab = subject(**changes)
    tokens = short_text(lab)
    model = exact_model(lab)
    found = lab.nats("score_ttt", tokens, model)
    expected = plain_scores(model, tokens, lab.config)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)
    unlearned = subject(**changes, TTT_LORA_LR=0)
    assert np.abs(found - unlearned.nats("score_ttt", tokens, model)).max() > 0.01
    # In fp32, as a run computes: to a millionth of a nat in the mean.
    in_fp32 = lab.nats("score_ttt", tokens)
    assert abs(in_fp32.mean() - expected.mean()) < 1e-6


def test_what_is_learned_from_is_scored_and_documents_are_alone() -> None:
    lab = subject()
    tokens = lab.tokens()
    model = lab.model()
    before = lab.nats("score_ttt", tokens, model)
    borders = [*np.flatnonzero(tokens == BOS_ID), len(tokens)]
    for begin, end in ((borders[1], borders[2]), (borders[3], borders[4])):
        changed = np.where(tokens == BOS_ID, BOS_ID, 2 + (tokens + 3) % 9).astype(tokens.dtype)
        changed[begin:end] = tokens[begin:end]
        after = lab.nats("score_ttt", changed, model)
        assert np.array_equal(after[begin : end - 1], before[begin : end - 1])
        assert not np.array_equal(after, before)
    lab = subject()
    model = lab.model()
    before = copy.deepcopy(model.state_dict())
    lab.nats("score_ttt", lab.tokens(), model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_first_weights_are_those_of_every_document_and_drawn_from_seed_and_name_alone() -> None:
    lab = subject(TTT_LORA_TARGETS=ALL, TTT_LORA_RANK=3)
    model = lab.model()
    numbers_P = initial_adapters(model, lab.config)
    several = DocumentAdapters(model, lab.config, numbers_P, 3)
    assert torch.equal(several.weights_BP, numbers_P.expand(3, -1)) and not several.squares_BP.any()
    two = first(model, dataclasses.replace(lab.config, ttt_lora_targets="k,head"))
    bound = math.sqrt(lab.config.ttt_lora_alpha / 3 / lab.config.model_dim)
    drawn = []
    for visit, adapters in enumerate(first(model, lab.config)):
        for name, (a_1RI, b_1OR) in adapters.items():
            assert not b_1OR.any() and a_1RI.abs().max() <= bound
            assert torch.equal(two[visit].get(name, (a_1RI,))[0], a_1RI)
            drawn.append(a_1RI.flatten())
    assert [list(adapters) for adapters in (*first(model, lab.config), *two)] == [
        *len(two[:-1]) * [["q", "k", "v", "o", "mlp"]], ["head"], *len(two[:-1]) * [["k"]], ["head"],
    ]
    # Over all of the range, and none like another.
    every = torch.cat(drawn)
    assert float(every.abs().max()) > 0.99 * bound and len(every.unique()) > 0.99 * len(every)
    other_seed = dataclasses.replace(lab.config, seed=lab.config.seed + 1)
    assert not torch.equal(initial_adapters(model, other_seed), numbers_P)


class Together(Machine):
    """One of several ranks that are threads of this process."""

    meeting: threading.Barrier
    values: list[Any]

    def gather(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.meeting.wait()
        return self.values

    def all_reduce(self, tensor: Tensor) -> None:
        total = sum(self.gather(tensor.clone()))
        self.meeting.wait()  # all have read the values
        tensor.copy_(total)


def test_ranks_together_write_the_ledger_of_one() -> None:
    ranks = 8
    lab = subject(TTT_BATCH_SIZE=2)
    tokens = lab.tokens()
    Together.meeting = threading.Barrier(ranks, timeout=DEADLINE_SECONDS)
    Together.values = [None] * ranks

    def score(rank: int) -> np.ndarray:
        return dataclasses.replace(lab, machine=Together(rank, ranks)).nats("score_ttt", tokens)

    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(score, range(ranks)))
    alone = lab.nats("score_ttt", tokens)
    assert all(np.array_equal(nats, alone) for nats in found)


def scorer_of(lab: Subject, tokens: np.ndarray, machine: Machine | None = None) -> DocumentScorer:
    model = lab.model()
    model.machine = machine or Machine()
    return DocumentScorer(model, tokens, lab.config, Ledger(tokens))


def test_batches_are_dealt_before_anything_is_scored_and_evenly() -> None:
    lab = subject(TTT_BATCH_SIZE=4)
    random = np.random.default_rng(0)
    tokens = random.integers(2, VOCAB_SIZE, 20_000).astype(np.uint16)
    tokens[np.unique(random.integers(0, len(tokens), 300))] = BOS_ID
    whole = scorer_of(lab, tokens)
    all_batches = [batch.tolist() for batch in whole.batches()]
    assert sorted(itertools.chain(*all_batches)) == list(range(len(whole.begins)))
    lengths = [whole.lengths[number] for batch in all_batches for number in batch]
    assert lengths == sorted(lengths, reverse=True)
    dealt = []
    costs = []
    for rank in range(8):
        mine = scorer_of(lab, tokens, Machine(rank, 8)).batches_of_rank()
        dealt += [batch.tolist() for batch in mine]
        chunks = itertools.chain(*(whole.chunks(batch) for batch in mine))
        costs.append(sum(len(one.documents) * (one.stop - one.first) + 8192 for one in chunks))
    assert sorted(dealt) == sorted(all_batches)
    assert max(costs) < 1.1 * min(costs)


def test_a_rank_tells_how_much_of_its_own_documents_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would say twice the time that is left, if it counted those of its peer. The last line counts all."""

    lab = subject(TTT_BATCH_SIZE=1)
    tokens = lab.tokens()

    def with_peer(_: Machine, sums: Tensor) -> None:
        """The peer has scored the rest."""
        sums += sums[1] == 0

    monkeypatch.setattr(Machine, "gather", lambda _, value: [value, value])
    monkeypatch.setattr(Machine, "all_reduce", with_peer)
    model = lab.model()
    model.machine = Machine(0, 2)
    mine = scorer_of(lab, tokens, model.machine)
    own_targets = sum(int(mine.lengths[batch].sum()) for batch in mine.batches_of_rank())
    seconds = itertools.count()
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: float(next(seconds)))
    run = RecordingRun()
    clock = train_gpt.ScoreClock(run, "legal_ttt", 1)
    train_gpt.score_ttt(model, tokens, lab.config, clock)
    assert len(run.lines) > 2 and own_targets < len(tokens) - 1
    for line in run.lines:
        seen = int(line.split("tokens_seen:")[1].split()[0])
        assert line.split()[1] == f"{min(1, seen / own_targets):.0%}"
    assert seen == len(tokens) - 1


@pytest.mark.parametrize("of_peer", ["nothing", "the same"])
def test_a_target_that_not_one_rank_has_scored_is_an_error(
    of_peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would be a perfect score, and the sum of two a wrong one."""
    peers = {"nothing": 0, "the same": 1}
    monkeypatch.setattr(Machine, "gather", lambda _, value: [value, value])
    monkeypatch.setattr(Machine, "all_reduce", lambda _, sums: sums.add_(peers[of_peer] * sums))
    lab = subject(TTT_BATCH_SIZE=1)
    model = lab.model()
    model.machine = Machine(0, 2)
    with pytest.raises(ValueError, match="was not scored by exactly one rank"):
        train_gpt.score_ttt(model, lab.tokens(), lab.config).score(1)


def test_chunks_and_sizes_follow_from_settings_alone() -> None:
    lab = subject(TTT_CHUNK_SIZE=5, EVAL_SEQ_LEN=16)
    tokens = np.full(200, 3, np.uint16)
    tokens[[0, 150]] = BOS_ID
    scorer = scorer_of(lab, tokens)
    of_both = [(chunk.first, chunk.start, chunk.stop) for chunk in scorer.chunks(np.array([0, 1]))]
    of_shorter = [(chunk.first, chunk.start, chunk.stop) for chunk in scorer.chunks(np.array([1]))]
    assert of_shorter == of_both[: len(of_shorter)] and len(of_shorter) == 10
    assert [(start, stop) for _, start, stop in of_both] == [(at, at + 5) for at in range(0, 150, 5)]
    assert all(stop - first == min(stop, 16) for first, _, stop in of_both)
    rows = [(len(chunk.documents), chunk.learning) for chunk in scorer.chunks(np.array([0, 1]))]
    assert rows[0] == (2, 2) and rows[-1] == (1, 0) and sorted(rows, reverse=True) == rows
    # No sliding window is needed for documents, and long chunks of documents are no matter with SGD.
    assert subject(EVAL_STRIDE=0).config.eval_stride == 0
    assert subject(TTT_MODE="sgd", EVAL_STRIDE=8, TTT_CHUNK_SIZE=48).config.ttt_chunk_size == 48


def test_short_documents_learn_in_larger_batches_of_no_more_tokens() -> None:
    """As many as a micro-batch has tokens for, its rows at least, and 96 at most for the adapters' memory."""
    lab = subject(TTT_BATCH_SIZE=0, EVAL_SEQ_LEN=16, TRAIN_SEQ_LEN=16, MICRO_BATCH_TOKENS=320)
    lengths = [200] * 30 + [9] * 30 + [2] * 300
    tokens = np.full(sum(lengths) + 1, 3, np.uint16)
    tokens[np.cumsum([0, *lengths])] = BOS_ID
    batches = scorer_of(lab, tokens).batches()
    assert [len(batch) for batch in batches] == [20, 20, 35, 96, 96, 93]
    # What the setting says is done.
    lab = subject(TTT_BATCH_SIZE=7, EVAL_SEQ_LEN=16, TRAIN_SEQ_LEN=16, MICRO_BATCH_TOKENS=320)
    assert {len(batch) for batch in scorer_of(lab, tokens).batches()[:-1]} == {7}


@pytest.mark.parametrize("kind", ["no BOS", "only BOS", "late BOS", "two tokens", "BOS last"])
def test_odd_texts_are_scored_whole(kind: str) -> None:
    lab = subject()
    tokens = lab.tokens()[:60]
    tokens[tokens == BOS_ID] = 3
    at = {"no BOS": [], "only BOS": range(60), "late BOS": [37, 38], "two tokens": [0], "BOS last": [0, 59]}
    tokens[list(at[kind])] = BOS_ID
    if kind == "two tokens":
        tokens = tokens[:2]
    model = exact_model(lab)
    found = lab.nats("score_ttt", tokens, model)
    np.testing.assert_allclose(found, plain_scores(model, tokens, lab.config), atol=1e-8)


def test_a_forward_pass_without_adapters_is_the_same_bits_as_with_idle_ones() -> None:
    lab = subject(TTT_LORA_TARGETS=ALL)
    model = lab.model()
    # One document a row.
    ids_BT = torch.from_numpy(lab.tokens()[:64].astype(np.int64)).view(4, 16)
    ids_BT[ids_BT == BOS_ID] = BOS_ID + 1
    ids_BT[:2, 0] = BOS_ID
    idle = DocumentAdapters(model, lab.config, initial_adapters(model, lab.config), 4)
    with torch.no_grad():
        without = model(ids_BT)
        starts = torch.arange(0, 65, 16, dtype=torch.int32)
        assert torch.equal(train_gpt.forward_adapted(model, ids_BT, starts, idle.use(4), lab.config), without)
        targets_N = ids_BT.flatten()
        plain = model.loss_per_token(without.flatten(0, 1), targets_N)
        added = idle.added_logits(without)
        assert torch.equal(model.loss_per_token(without.flatten(0, 1), targets_N, added), plain)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 8), (7, 8)])
@pytest.mark.parametrize("mode", ["sgd", "lora"])
def test_every_rank_compiles_all_before_the_clock(mode: str, rank: int, ranks: int) -> None:
    """Windows of each score; documents, always in several rows, with gradients. No text is read for it, and
    no weight changes.
    """
    lab = subject(TTT_MODE=mode, EVAL_STRIDE=8, TTT_CHUNK_TOKENS=64)
    model = lab.model()
    seen: set[tuple[object, ...]] = set()
    ids: set[int] = set()

    class Noting(Machine):
        def compile(self, function: Any) -> Any:
            def noted(model: Any, inputs_BT: torch.Tensor, *rest: Any) -> Any:
                if function is train_gpt.adamw_step:  # of any number of documents
                    seen.add((function,))
                    return function(model, inputs_BT, *rest)
                shape: object = tuple(inputs_BT.shape)
                if function is train_gpt.forward_adapted:  # rows and lengths are left open
                    shape = len(inputs_BT) > 1
                seen.add((function, torch.is_grad_enabled(), shape))
                ids.update(inputs_BT.flatten().tolist())
                return function(model, inputs_BT, *rest)

            return noted

        def all_reduce(self, tensor: torch.Tensor) -> None:
            """The other ranks have scored what this one has not."""
            if tensor.dim() == 2:
                tensor += tensor[1] == 0

        def gather(self, value: Any) -> list[Any]:
            return [[] if isinstance(value, list) else value] * self.world_size

    model.machine = Noting(rank, ranks, compiled=True)
    tokens = lab.tokens()
    weights = copy.deepcopy(model.state_dict())
    train_gpt.rehearse_evaluation(model, lab.config, train_gpt.Run(model.machine))
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert model.machine.world_size == ranks
    assert ids == {BOS_ID, BOS_ID + 1}
    before = set(seen)
    if mode == "lora":
        documents = {key[1:] for key in before if isinstance(key[-1], bool)}
        assert (train_gpt.adamw_step,) in before
        assert documents == {(True, True)}  # with gradients and in several rows: a single graph
    if ranks == 1:
        scores = ("score_roundtrip", "score_sliding", "score_ttt")
        found = [lab.nats(score, tokens, model) for score in scores]
        assert seen == before
        # One document in two rows has the score that it has in one.
        model.machine = Machine()
        assert found[-1] == pytest.approx(lab.nats("score_ttt", tokens, model), rel=1e-5)
    else:  # as many graphs as a rank that is alone
        model.machine = Noting(compiled=True)
        train_gpt.rehearse_evaluation(model, lab.config, train_gpt.Run(model.machine))
        learnt = {key for key in seen if key[0] is GPT.loss}  # its rows are shared out to the ranks
        assert seen - learnt == before - learnt and bool(learnt) == (mode == "sgd")


def test_any_number_of_documents_reads_and_steps_by_one_graph() -> None:
    """A graph for each number would take a minute of compilation in the middle of an evaluation."""
    graphs = []

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    lab = subject()
    model = lab.model()
    adapters = DocumentAdapters(model, lab.config, initial_adapters(model, lab.config), 5)
    read = torch.compile(torch.square, backend=counting, dynamic=False)
    adapters.adamw = torch.compile(train_gpt.adamw_step, backend=counting, dynamic=False)
    for documents in (5, 3, 2):
        read(adapters.use(documents)).sum().backward()
        adapters.step(documents)
    assert len(graphs) == 2


def test_triton_meets_no_size_that_is_no_multiple_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would compile its kernels once more for such a size, inside the clock."""
    lab = subject(TTT_CHUNK_SIZE=5, EVAL_SEQ_LEN=24)
    lengths: list[int] = []
    before(monkeypatch, GPT, "forward", lambda _, ids_BT, *__, **___: lengths.append(ids_BT.size(1)))
    lab.nats("score_ttt", lab.tokens())
    assert set(lengths) == {16, 32}


class Worked:
    """Seconds by work: a pass takes one, with gradients three, on a slow rank more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slowness: float = 1.0) -> None:
        self.now = 0.0
        self.slowness = slowness
        monkeypatch.setattr(Machine, "gather", lambda of, value: [value] * of.world_size)
        monkeypatch.setattr(Machine, "all_reduce", lambda _, sums: sums.add_(sums[1] == 0))
        before(monkeypatch, GPT, "forward", self.work)
        monkeypatch.setattr(train_gpt.ScoreClock, "seconds", lambda _: self.now)

    def work(self, *_: Any, **__: Any) -> None:
        """Another pass."""
        self.now += self.slowness * (3 if torch.is_grad_enabled() else 1)

    def score(self, lab: Subject, tokens: np.ndarray, limit: float, rank: int = 0) -> Any:
        """The clock and the nats of a rank, which is the only one, or has a peer that scores the rest."""

        self.now = 0.0
        model = lab.model()
        model.machine = Machine(rank, 2) if self.slowness != 1 or rank else Machine()
        clock = train_gpt.ScoreClock(RecordingRun(), "legal_ttt", 0, limit)
        return clock, np.array(train_gpt.score_ttt(model, tokens, lab.config, clock).nats)


def many_documents() -> np.ndarray:
    tokens = np.random.default_rng(1).integers(2, VOCAB_SIZE, 430).astype(np.uint16)
    tokens[[0, *np.cumsum(np.arange(8, 40, 2)), 420]] = BOS_ID
    return tokens


def test_batches_without_time_left_are_scored_without_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the limit, a document has the scores of one that learns, or of one that does not, to its end.

    The limit holds, and its time is used, unless it is shorter than the first batch and scoring alone.
    """
    worked = Worked(monkeypatch)
    lab = subject(TTT_BATCH_SIZE=2)
    tokens = many_documents()
    borders = [*np.flatnonzero(tokens == BOS_ID), len(tokens) - 1]
    _, learned = worked.score(lab, tokens, math.inf)
    most = worked.now
    clock, _ = worked.score(lab, tokens, 0.0)
    least = worked.now
    (warning,) = clock.run.lines
    assert all(words in warning for words in ("legal_ttt", "19.0 ", " 0.0 s"))
    assert [count > 0 for count in clock.modes.values()] == [True] + 8 * [False]
    frozen = train_gpt.ScoreClock(clock.run, "", 0, math.inf, dict.fromkeys(clock.modes, 0))
    plain = train_gpt.score_ttt(lab.model(), tokens, lab.config, frozen).nats
    counts = []
    for limit in np.linspace(least, most, 3):
        clock, nats = worked.score(lab, tokens, limit)
        assert limit - 3 < worked.now <= limit
        for begin, end in itertools.pairwise(borders):
            document = slice(begin, end)
            assert any(np.allclose(nats[document], of[document], atol=1e-6) for of in (learned, plain))
        counts.append(sum(clock.modes.values()))
        assert bool(clock.run.lines) == (counts[-1] < len(nats))
    assert counts == sorted(counts) and counts[0] == 90 and counts[-1] == len(tokens) - 1, counts


def test_modes_of_other_batches_are_repeated_if_everything_was_learned_from() -> None:
    tokens = many_documents()
    lab = subject(TTT_BATCH_SIZE=2)
    first = train_gpt.ScoreClock(RecordingRun(), "legal_ttt")
    nats = train_gpt.score_ttt(lab.model(), tokens, lab.config, first).nats
    wider = subject(TTT_BATCH_SIZE=3)

    def again(modes: dict[str, int], limit: float) -> tuple[train_gpt.ScoreClock, np.ndarray]:
        clock = train_gpt.ScoreClock(RecordingRun(), "legal_ttt", 0, limit, modes)
        return clock, train_gpt.score_ttt(wider.model(), tokens, wider.config, clock).nats

    clock, same = again(first.modes, limit=0.0)
    assert all(clock.modes.values()) and clock.modes.keys() != first.modes.keys()
    assert not clock.run.lines and np.allclose(same, nats, atol=1e-5)
    # Otherwise they say nothing about these batches.
    some = dict.fromkeys(first.modes, 0) | {next(iter(first.modes)): 1}
    for limit, learns in ((math.inf, True), (0.0, False)):
        clock, _ = again(some, limit)
        assert all(list(clock.modes.values())[1:]) is learns
        assert "MICRO_BATCH_TOKENS" in clock.run.lines[0] and len(clock.run.lines) == 2 - learns


def test_a_slow_rank_learns_less_and_plain_chunks_are_half_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = subject(TTT_BATCH_SIZE=2)
    tokens = many_documents()
    worked = Worked(monkeypatch)
    whole, _ = worked.score(lab, tokens, math.inf, rank=1)
    limit = 1.5 * worked.now
    clock, _ = worked.score(lab, tokens, limit, rank=1)
    assert clock.modes == whole.modes and all(whole.modes.values())
    # Nothing is left of its time, if it takes as long to share the scores.
    monkeypatch.setattr(train_gpt, "MERGING_SECONDS", 1.01 * limit / len(tokens))
    clock, _ = worked.score(lab, tokens, limit, rank=1)
    assert not any(clock.modes.values())
    monkeypatch.setattr(train_gpt, "MERGING_SECONDS", 0.0)
    worked.slowness = 2.0
    clock, _ = worked.score(lab, tokens, limit, rank=1)
    assert limit - 3 < worked.now <= limit and clock.modes.keys() == whole.modes.keys()
    assert 0 < sum(clock.modes.values()) < sum(whole.modes.values())
    scorer = scorer_of(subject(TTT_CHUNK_SIZE=4, EVAL_SEQ_LEN=32), many_documents())
    chunks = list(scorer.chunks(scorer.batches()[0], learning=False))
    places = [(chunk.first, chunk.start, chunk.stop) for chunk in chunks[:3]]
    assert places == [(0, 0, 16), (0, 16, 32), (16, 32, 48)]
    (only,) = scorer.chunks(np.array([0]), learning=False)
    assert only.stop == scorer.lengths[0] == 8
