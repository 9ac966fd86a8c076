"""MODEL: equal to a plain reference for every feature, golden numbers, separate documents."""

import cmath
import functools
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train_gpt
from tests.support.models import tiny_config
from train_gpt import GPT, Config, Machine, build_model, parameter_table

# Room for a feature to be on in some layers and off in others; two key heads, half of each one rotated.
SIX_LAYERS = {
    "NUM_LAYERS": 6, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "ROPE_DIMS": 4, "XSA_LAST_N": 3, "NUM_LOOPS": 2,
    "LOOP_START": 1, "LOOP_END": 2, "PARALLEL_START_LAYER": 4, "TRAIN_SEQ_LEN": 16,
}
# What PR #549 has besides: layer 1 is visited three times, layer 4 has two lanes.
BIGRAM = {"BIGRAM_VOCAB_SIZE": 24, "BIGRAM_DIM": 6}
VALUE = {"VE_ENABLED": 1, "VE_DIM": 6, "VE_LAYERS": "4,1"}
PR549 = {**BIGRAM, **VALUE, "CHANNEL_SMEAR_ENABLED": 1}
FEATURES = {
    "as by default": {},
    "no recurrence": {"NUM_LOOPS": 0, "LOOP_START": 4, "LOOP_END": 2},  # which is nobody's then
    "another recurrence": {"NUM_LOOPS": 3, "LOOP_START": 2, "LOOP_END": 4},
    "recurrence over all": {"NUM_LOOPS": 1, "LOOP_START": 0, "LOOP_END": 5},
    "documents not told apart": {"DOC_MASK": 0},
    "no smear gate": {"SMEAR_GATE_ENABLED": 0},
    "no head gate": {"SPARSE_ATTN_GATE_ENABLED": 0},
    "skips that add": {"SKIP_GATES_ENABLED": 0},
    "no XSA": {"XSA_LAST_N": 0},
    "no layer scale": {"LN_SCALE": 0},
    "all dimensions rotated": {"ROPE_DIMS": 0},
    "rescaled rotary base": {"ROPE_TRAIN_SEQ_LEN": 7},
    "relu squared": {"LEAKY_SLOPE": 0},
    "no parallel layers": {"PARALLEL_START_LAYER": -1},
    "GPT-J": {"PARALLEL_MODE": "gptj", "PARALLEL_START_LAYER": 3},
    "lanes from the first layer": {"PARALLEL_START_LAYER": 0},
    "no softcap": {"LOGIT_SOFTCAP": 0},
    "lanes from a layer beyond the last": {"PARALLEL_START_LAYER": 6},
    "bigrams": BIGRAM,
    "bigrams across documents": {**BIGRAM, "DOC_MASK": 0},
    "bigrams as wide as the model": {**BIGRAM, "BIGRAM_DIM": 32},
    "value embedding": VALUE,
    "value embedding as wide as the keys": {**VALUE, "VE_DIM": 16, "VE_LAYERS": "5"},
    "smear by channel": {"CHANNEL_SMEAR_ENABLED": 1},
    "smear by channel across documents": {"CHANNEL_SMEAR_ENABLED": 1, "DOC_MASK": 0},
    "smear by channel alone": {"CHANNEL_SMEAR_ENABLED": 1, "SMEAR_GATE_ENABLED": 0},
    "all of PR #549": PR549,
    "all of PR #549, across documents": {**PR549, "DOC_MASK": 0},
    "one layer": {"NUM_LAYERS": 1, "XSA_LAST_N": 1, "NUM_LOOPS": 0, "PARALLEL_START_LAYER": -1},
}
# Those in which a layer depends on its place.
ORDERED = ("as by default", "no recurrence", "another recurrence", "skips that add", "GPT-J",
           "value embedding", "lanes from the first layer")


def tiny(**changes: Any) -> Config:
    return tiny_config(**{**SIX_LAYERS, **changes})


def random_model(config: Config, seed: int = 0) -> GPT:
    """A float64 model whose every parameter matters: what starts as zero or one does not stay so."""
    model = build_model(config).double()
    model.compute_dtype = torch.float64
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def random_ids(config: Config, seed: int = 1) -> Tensor:
    """Two rows of ids: one starts with a document and ends with another, one holds two starts in a row."""
    shape = 2, config.train_seq_len
    ids = torch.randint(2, config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
    ids[0, 0] = ids[0, 5] = ids[0, -1] = ids[1, 6] = ids[1, 7] = train_gpt.BOS_ID
    return ids


def wrapped(number: int) -> int:
    """What a signed integer of 32 bits holds of a number."""
    return (number + 2**31) % 2**32 - 2**31


def normed(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 2.0**-23).sqrt()


class Reference:
    """The model once more: one row, one layer and one head at a time, from the formulas."""

    def __init__(self, model: GPT, looping: bool) -> None:
        self.c, self.looping = model.settings, looping
        self.w = {name: p.detach() for name, p in model.named_parameters()}

    def nats(self, ids: Tensor, targets: Tensor) -> Tensor:
        rows = zip(ids, targets, strict=True)
        return torch.stack([self.row_nats(row.tolist(), target.tolist()) for row, target in rows])

    def row_nats(self, row: list[int], targets: list[int]) -> Tensor:
        head = self.w["token_embedding_VD"]
        out = []
        for h, target in zip(self.hidden(row), targets, strict=True):
            scores = head @ h
            if self.c.logit_softcap:
                scores = self.c.logit_softcap * (scores / self.c.logit_softcap).tanh()
            out.append(scores.exp().sum().log() - scores[target])
        return torch.stack(out)

    def hidden(self, row: list[int]) -> Tensor:
        c, w = self.c, self.w
        e = [w["token_embedding_VD"][token] for token in row]
        if c.bigram_vocab_size:
            for t, number in enumerate(self.bigram_rows(row)):
                pair = w["bigram_table_RC"][number]
                if "bigram_projection_1DC" in w:
                    pair = w["bigram_projection_1DC"][0] @ pair
                e[t] = e[t] + w["bigram_scale_1"][0] * pair
        if c.smear_gate_enabled:
            smeared = [e[0]]
            for t in range(1, len(row)):
                opened = torch.sigmoid(w["smear_gate_1W"][0] @ e[t][: c.gate_window]) * w["smear_scale_1"][0]
                blocked = c.doc_mask and row[t] == 1
                smeared.append(e[t] if blocked else e[t] + opened * e[t - 1])
            e = smeared
        x0 = normed(torch.stack(e))
        if c.channel_smear_enabled:
            x0 = self.channel_smear(x0, row)
        order = list(range(c.num_layers))
        if self.looping and c.num_loops:
            middle = order[c.loop_start : c.loop_end + 1]
            order = order[: c.loop_start] + middle * (1 + c.num_loops) + order[c.loop_end + 1 :]
        halfway = len(order) // 2
        a = x0
        b = None
        remembered = []
        for visit, layer in enumerate(order):
            two = c.parallel_mode == "lanes" and 0 <= c.parallel_start_layer <= layer
            if two and b is None:
                b = a
            if not two and b is not None:
                a, b = (a + b) / 2, None
            if visit >= halfway and remembered:
                a = self.skip(visit - halfway, a, remembered.pop())
            a, b = self.layer(layer, a, b, x0, row)
            if visit < halfway:
                remembered.append(a)
        return normed(a if b is None else (a + b) / 2)

    def is_first(self, t: int, row: list[int]) -> bool:
        """Whether a token has none before it."""
        return t == 0 or (self.c.doc_mask and row[t] == 1)

    def bigram_rows(self, row: list[int]) -> list[int]:
        last = self.c.bigram_vocab_size - 1
        found = []
        for t, token in enumerate(row):
            if self.is_first(t, row):
                found.append(last)
            else:
                found.append((wrapped(36_313 * token) ^ wrapped(27_191 * row[t - 1])) % last)
        return found

    def channel_smear(self, x: Tensor, row: list[int]) -> Tensor:
        share = 1 / (1 + (-self.w["channel_smear_1D"][0]).exp())
        mixed = []
        for t in range(len(row)):
            before = torch.zeros_like(x[t]) if self.is_first(t, row) else x[t - 1]
            mixed.append((1 - share) * x[t] + share * before)
        return torch.stack(mixed)

    def added_values(self, i: int, row: list[int]) -> Tensor:
        """What the value embedding adds to the values of a layer that has one, (T, K)."""
        layers = [int(layer) for layer in self.c.ve_layers.split(",")]
        scale = self.w["value_scale_1"][0] * self.w["value_layer_scale_N"][layers.index(i)]
        table = self.w["value_table_VC"]
        if "value_projection_1KC" in self.w:
            table = table @ self.w["value_projection_1KC"][0].T
        return torch.stack([scale * table[token] for token in row])

    def skip(self, row: int, x: Tensor, early: Tensor) -> Tensor:
        early = self.w["skip_weight_SD"][row] * early
        if not self.c.skip_gates_enabled:
            return x + early
        share = torch.sigmoid(self.w["skip_gate_SD"][row])
        return share * x + (1 - share) * early

    def layer(
        self, i: int, a: Tensor, b: Tensor | None, x0: Tensor, row: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        c, w = self.c, self.w
        shrink = 1 / math.sqrt(i + 1) if c.ln_scale else 1.0
        z = w["resid_keep_LD"][i] * a + w["resid_inject_LD"][i] * x0
        attended = w["attn_scale_LD"][i] * self.attention(i, normed(z) * shrink, row)
        if b is not None:
            made = w["mlp_scale_LD"][i] * self.mlp(i, normed(b) * shrink)
            m = w["lane_mix_P23"][i - c.parallel_start_layer]
            return (m[0, 0] * a + m[0, 1] * attended + m[0, 2] * made,
                    m[1, 0] * b + m[1, 1] * attended + m[1, 2] * made)
        if c.parallel_mode == "gptj" and 0 <= c.parallel_start_layer <= i:
            return z + attended + w["mlp_scale_LD"][i] * self.mlp(i, normed(z) * shrink), None
        u = z + attended
        return u + w["mlp_scale_LD"][i] * self.mlp(i, normed(u) * shrink), None

    def mlp(self, i: int, x: Tensor) -> Tensor:
        h = x @ self.w["mlp_up_bank"][i].T
        h = torch.where(h > 0, h, self.c.leaky_slope * h)
        return (h * h) @ self.w["mlp_down_bank"][i].T

    def attention(self, i: int, x: Tensor, row: list[int]) -> Tensor:
        c, w = self.c, self.w
        size = c.head_dim
        query, output = w["qo_bank"][i], w["qo_bank"][c.num_layers + i]
        key, value = w["kv_bank"][i], w["kv_bank"][c.num_layers + i]
        values = x @ value.T
        if c.ve_enabled and str(i) in c.ve_layers.split(","):
            values = values + self.added_values(i, row)
        seen = torch.tensor(self.seen(row))
        heads = []
        for h in range(c.num_heads):
            g = h // (c.num_heads // c.num_kv_heads)
            q = self.rotate(normed(x @ query[h * size : (h + 1) * size].T)) * w["qk_gain_LH"][i, h]
            k = self.rotate(normed(x @ key[g * size : (g + 1) * size].T))
            v = values[:, g * size : (g + 1) * size]
            scores = torch.where(seen, q @ k.T / math.sqrt(size), -math.inf)
            y = torch.softmax(scores, dim=1) @ v
            if i >= c.num_layers - c.xsa_last_n:
                unit = v / v.norm(dim=-1, keepdim=True)
                y = y - (y * unit).sum(-1, keepdim=True) * unit
            if c.sparse_attn_gate_enabled:
                score = x[:, : c.gate_window] @ w["attn_gate_LHW"][i, h]
                y = y * torch.sigmoid(0.5 * score)[:, None]
            heads.append(y)
        return torch.cat(heads, dim=-1) @ output.T

    def seen(self, row: list[int]) -> list[list[bool]]:
        """For each position, which positions it attends to."""
        found = []
        for t in range(len(row)):
            first = 0
            if self.c.doc_mask:
                first = max([s for s in range(t + 1) if row[s] == 1], default=0)
            found.append([first <= s <= t for s in range(len(row))])
        return found

    def rotate(self, x: Tensor) -> Tensor:
        turns = self.turns(len(x))
        half = turns.size(1)
        both = torch.complex(x[:, :half], x[:, half : 2 * half]) * turns
        return torch.cat([both.real, both.imag, x[:, 2 * half :]], dim=1)

    @functools.cache  # noqa: B019  (there are few references)
    def turns(self, length: int) -> Tensor:
        """The turn of each position and rotated pair, as complex numbers."""
        c = self.c
        turned = c.rope_dims or c.head_dim
        trained = c.rope_train_seq_len or c.train_seq_len
        base = c.rope_base
        if length > trained:
            base *= (length / trained) ** (turned / (turned - 2))
        rates = [base ** (-2 * j / turned) for j in range(turned // 2)]
        return torch.tensor([[cmath.exp(-1j * t * rate) for rate in rates] for t in range(length)])


@pytest.mark.parametrize("name", FEATURES)
def test_equals_the_reference(name: str) -> None:
    """With the loop, which visits all layers; where layers know of their order, without it, too."""
    config = tiny(**FEATURES[name])
    model = random_model(config)
    for looping in (False, True) if name in ORDERED else (True,):
        ids, targets = random_ids(config), random_ids(config, seed=2)
        hidden_ND = model(ids, looping=looping).flatten(0, 1)
        ours = model.loss_per_token(hidden_ND, targets.flatten()).view_as(targets)
        # The rotary table is float32.
        expected = Reference(model, looping).nats(ids, targets)
        torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)


class DifferentiableReference(Reference):
    """The reference with gradients, and with the rotation's angles in fp32, as the model has them."""

    def __init__(self, model: GPT, looping: bool) -> None:
        super().__init__(model, looping)
        self.w = dict(model.named_parameters())

    def rotate(self, x: Tensor) -> Tensor:
        return train_gpt.rotate(x[:, None], train_gpt.rotary_table(len(x), self.c))[:, 0]


@pytest.mark.parametrize("name", ["as by default", "GPT-J", "no head gate", "skips that add", "no XSA"])
def test_loss_and_every_gradient_equal_the_reference(name: str) -> None:
    """In float64 to ten digits: whatever the model folds, merges or rearranges."""
    config = tiny(**FEATURES[name])
    model = random_model(config)
    parameters = list(model.parameters())
    ids, targets = random_ids(config), random_ids(config, seed=2)
    for looping in (False, True) if name == "as by default" else (True,):
        ours = model.loss(ids, targets, looping=looping)
        theirs = DifferentiableReference(model, looping).nats(ids, targets).mean()
        assert abs(ours.item() - theirs.item()) <= 1e-10 * theirs.item()
        found = torch.autograd.grad(ours, parameters)
        expected = torch.autograd.grad(theirs, parameters)
        for (parameter, _), gradient, wanted in zip(model.named_parameters(), found, expected, strict=True):
            worst = (gradient - wanted).abs().max() / wanted.abs().max()
            assert worst <= 1e-10, (parameter, looping, worst)


@pytest.mark.parametrize(("rows", "row", "expected"), [
    (1536, [5, 7, 1023, 0], [1535, 591, 1469, 658]),  # seen on PR #549's own code
    (1000, [7, 65_535, 60_000], [999, 346, 23]),  # products beyond 31 bits wrap around
])
def test_rows_of_hashed_pairs(rows: int, row: list[int], expected: list[int]) -> None:
    config = tiny(BIGRAM_VOCAB_SIZE=rows)
    assert train_gpt.bigram_rows(torch.tensor([row]), config).tolist() == [expected]


@pytest.mark.parametrize(("doc_mask", "expected"), [(1, [0, 2, 3, 4, 6, 8]), (0, [0, 4, 8])])
def test_documents_start_where_rows_and_their_first_tokens_do(doc_mask: int, expected: list[int]) -> None:
    """A row that begins with a document counts once: attention kernels never see an empty one."""
    ids = torch.tensor([[1, 5, 1, 1], [5, 6, 1, 7]])
    starts = train_gpt.document_starts(ids.numpy(), tiny(DOC_MASK=doc_mask))
    assert starts.tolist() == expected and starts.dtype == "int32"
    assert torch.equal(train_gpt.starts_on_device(ids, tiny(DOC_MASK=doc_mask)), torch.from_numpy(starts))


def test_losses_are_fp32_for_a_model_that_computes_in_less() -> None:
    config = tiny()
    model, ids = build_model(config), random_ids(config)
    exact = model.loss(ids, ids)
    model.compute_dtype = torch.bfloat16
    assert model(ids).dtype == torch.bfloat16 and model.loss(ids, ids).dtype == torch.float32
    torch.testing.assert_close(model.loss(ids, ids), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(("off", "on"), [
    ({"SMEAR_GATE_ENABLED": 0}, {"SMEAR_GATE_ENABLED": 1}),
    ({"NUM_LOOPS": 0}, {"NUM_LOOPS": 2}),
    ({"LOGIT_SOFTCAP": 0}, {"LOGIT_SOFTCAP": 30}),
    ({}, BIGRAM),
])
def test_a_feature_at_rest_changes_no_bit(off: dict[str, Any], on: dict[str, Any]) -> None:
    """Smear starts closed, recurrence starts off, and the softcap acts on logits alone."""
    without, with_it = build_model(tiny(**off)), build_model(tiny(**on))
    ids = random_ids(tiny(**off))
    assert torch.equal(without(ids), with_it(ids, looping=False))


@pytest.mark.parametrize("changes", FEATURES.values(), ids=FEATURES)
def test_switching_a_feature_leaves_the_other_weights(changes: dict[str, Any]) -> None:
    default, changed = build_model(tiny()).state_dict(), build_model(tiny(**changes)).state_dict()
    for name in default.keys() & changed.keys():
        if default[name].shape == changed[name].shape:
            assert torch.equal(default[name], changed[name]), name


@pytest.mark.parametrize(("changes", "owned"), [
    ({"SMEAR_GATE_ENABLED": 0}, {"smear_gate_1W", "smear_scale_1"}),
    ({"SPARSE_ATTN_GATE_ENABLED": 0}, {"attn_gate_LHW"}),
    ({"SKIP_GATES_ENABLED": 0}, {"skip_gate_SD"}),
    ({"PARALLEL_START_LAYER": -1}, {"lane_mix_P23"}),
    ({"PARALLEL_MODE": "gptj"}, {"lane_mix_P23"}),
    ({"BIGRAM_VOCAB_SIZE": 0}, {"bigram_table_RC", "bigram_projection_1DC", "bigram_scale_1"}),
    ({"BIGRAM_DIM": 32}, {"bigram_projection_1DC"}),
    ({"VE_ENABLED": 0},
     {"value_table_VC", "value_projection_1KC", "value_scale_1", "value_layer_scale_N"}),
    ({"VE_DIM": 16}, {"value_projection_1KC"}),
    ({"CHANNEL_SMEAR_ENABLED": 0}, {"channel_smear_1D"}),
    ({"PARALLEL_START_LAYER": 6}, {"lane_mix_P23"}),
    ({"XSA_LAST_N": 0}, set()),
    ({"DOC_MASK": 0}, set()),
])
def test_what_is_off_owns_no_parameter(changes: dict[str, Any], owned: set[str]) -> None:
    less = parameter_table(tiny(**{**PR549, **changes}))
    assert parameter_table(tiny(**PR549)).keys() - less.keys() == owned


def test_initial_weights() -> None:
    model = build_model(tiny(VOCAB_SIZE=4096, QK_GAIN_INIT=3.5))
    queries, outputs = model.qo_bank.detach().split(6)
    for matrix in (*queries, *model.kv_bank.detach()):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(len(matrix)), atol=1e-5, rtol=0)
    assert outputs.abs().max() == 0 and model.mlp_down_bank.abs().max() == 0
    assert abs(model.token_embedding_VD.std().item() - 0.005) < 0.0001
    assert (model.qk_gain_LH == 3.5).all()
    uniform = build_model(tiny(MATRIX_INIT="uniform"))
    bound = 32**-0.5
    assert uniform.mlp_up_bank.abs().max() <= bound < 1.01 * uniform.mlp_up_bank.abs().max()
    model = build_model(tiny(**PR549, VOCAB_SIZE=4096))
    for zeros in ("bigram_table_RC", "channel_smear_1D"):
        assert model.get_parameter(zeros).abs().max() == 0
    assert abs(model.value_table_VC.std().item() - 0.01) < 0.0005
    for name in ("bigram_projection_1DC", "value_projection_1KC"):
        tall = model.get_parameter(name)[0].detach()
        torch.testing.assert_close(tall.T @ tall, torch.eye(6), atol=1e-5, rtol=0)
    scales = {"bigram_scale_1": [0.05], "value_scale_1": [0.1], "value_layer_scale_N": [1.0, 1.0]}
    for name, values in scales.items():
        assert torch.equal(model.get_parameter(name), torch.tensor(values))


def test_initial_weights_are_the_same_for_any_number_of_threads() -> None:
    config = tiny(MODEL_DIM=128)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = build_model(config).state_dict()
        torch.set_num_threads(2)
        together = build_model(config).state_dict()
        assert torch.get_num_threads() == 2, "training still uses both"
    finally:
        torch.set_num_threads(before)
    for name, weights in alone.items():
        assert torch.equal(weights, together[name]), name


@pytest.mark.parametrize("trained", [0, 7])
def test_a_shorter_input_is_rotated_as_in_training(trained: int) -> None:
    """The base follows the trained length and a longer input's, never a shorter one's."""
    config = tiny(ROPE_TRAIN_SEQ_LEN=trained)
    model, ids = random_model(config), random_ids(config)
    torch.testing.assert_close(model(ids[:, :9]), model(ids)[:, :9])
    assert not torch.allclose(model(ids.repeat(1, 2))[:, :16], model(ids))


def test_the_rotary_base_grows_with_longer_inputs_and_never_shrinks() -> None:
    """The default's ROPE_TRAIN_SEQ_LEN is longer than TRAIN_SEQ_LEN."""
    plain = train_gpt.rotary_table(16, tiny(ROPE_TRAIN_SEQ_LEN=16))
    assert torch.equal(train_gpt.rotary_table(16, tiny(ROPE_TRAIN_SEQ_LEN=24)), plain)
    assert torch.equal(train_gpt.rotary_table(24, tiny(ROPE_TRAIN_SEQ_LEN=24))[:, :16], plain)
    assert not torch.equal(train_gpt.rotary_table(25, tiny(ROPE_TRAIN_SEQ_LEN=24))[:, :16], plain)
    # The only pair of channels is the fastest one, and keeps its speed.
    one_pair = train_gpt.rotary_table(32, tiny(ROPE_TRAIN_SEQ_LEN=16, ROPE_DIMS=2))
    assert torch.equal(one_pair[:, :16], train_gpt.rotary_table(16, tiny(ROPE_DIMS=2)))


@pytest.mark.parametrize(("name", "reference"), [
    ("upstream_baseline.env", 17_059_912), ("pr591.env", 17_059_912),
    ("pr549.env", 26_928_220), ("pr785.env", 26_928_220),
    ("pr1493.env", 35_944_536),
    # Of #1855's table of lane scalars only the rows of the layers that have two lanes exist.
    ("", 35_945_671 - (66 - 18)),
    *((f"{name}.env", 0) for name in "cpu_demo gpu_demo h200_1gpu frontier_1855".split()),
])
def test_parameter_counts(name: str, reference: int, repo: Path) -> None:
    """Those of the public systems, where there is one, and those that each file states."""
    config = Config.from_env({"CONFIG": str(repo / "configs" / name)} if name else {})
    with torch.device("meta"):
        count = sum(p.numel() for p in GPT(config, seed=0).parameters())
    assert count == train_gpt.count_parameters(config) == (reference or count)
    if name:
        assert f"{count:,} parameters" in (repo / "configs" / name).read_text(encoding="utf-8")


def test_calibration_follows_a_changed_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The activation stands in one place: the hidden values that are observed are those of the MLP."""
    config = tiny()
    model, ids = random_model(config), random_ids(config)
    before = model(ids)
    monkeypatch.setattr(train_gpt, "activation", lambda x, slope: F.gelu(x) + slope)
    seen = {}
    after = model(ids, observe=lambda site, layer, x: seen.setdefault((site, layer), x))
    assert not torch.equal(after, before)
    # What is observed is normalized to the layer's scale already, and stays so but for the norm's epsilon.
    matrices = model.mlp_up_bank[2], model.mlp_down_bank[2]
    written = train_gpt.mlp_plain(seen["mlp_in", 2], *matrices, 3**-0.5, config.leaky_slope)
    hidden = F.linear(seen["mlp_hidden", 2], model.mlp_down_bank[2])
    torch.testing.assert_close(seen["mlp_in", 2] + hidden, written, rtol=1e-4, atol=1e-5)


def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, causal: bool, groups: bool) -> Tensor:
    """Varlen attention, one document after the other; heads must match unless `groups`."""
    assert groups or q.size(1) == k.size(1), "this version knows no grouped heads"
    parts = []
    for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        part = [t[begin:end].transpose(0, 1) for t in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(*part, is_causal=causal, enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


def flash_attn_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, window_size=(-1, -1)
):
    return packed(q, k, v, cu_seqlens_q, causal, groups=True), None


def flash_attn_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
):
    assert dropout_p == 0.0 and softmax_scale is None
    return packed(q, k, v, cu_seqlens_q, causal, groups=True)


def torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    return packed(query, key, value, cu_seq_q, is_causal, groups=False)


def torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    return packed(query, key, value, cu_seq_q, window_size == (-1, 0), groups=False)


def torch_2_13(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    return packed(q, k, v, cu_q, window_size == (-1, 0), enable_gqa)


VERSIONS = [("fa3", flash_attn_3), ("fa2", flash_attn_2), ("varlen", torch_2_10), ("varlen", torch_2_11),
            ("varlen", torch_2_13)]
MODULES = {
    "fa3": "flash_attn_interface flash_attn_varlen_func", "fa2": "flash_attn flash_attn_varlen_func",
    "varlen": "torch.nn.attention.varlen varlen_attn",
}


@pytest.mark.parametrize(("name", "kernel"), VERSIONS, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("doc_mask", [0, 1])
def test_every_varlen_kernel(name: str, kernel: Any, doc_mask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function = MODULES[name].split()
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: kernel}))
    config = tiny(ATTENTION=name, DOC_MASK=doc_mask)
    model, ids = random_model(config), random_ids(config)
    expected = model(ids)
    chosen = train_gpt.fast_ops(config, Machine())
    model.ops = chosen.ops
    given = torch.from_numpy(train_gpt.document_starts(ids.numpy(), config))
    torch.testing.assert_close(model(ids), expected)
    torch.testing.assert_close(model(ids, given), expected)
    assert chosen.report[0].startswith(f"attention:{name}")


@pytest.mark.parametrize("softcap", [0, 15, 30, 60])
def test_the_loss_and_its_gradient_against_float64(softcap: float) -> None:
    """From tiny logits to absurd ones. Without a softcap, the bits of torch's own cross-entropy."""
    generator = torch.Generator().manual_seed(5)
    scales_N1 = torch.tensor([0.01, 1.0, 10.0, 1e4, 1e4, 1e30]).repeat(8)[:, None]
    logits_NV = scales_N1 * torch.randn(48, 4096, generator=generator)
    logits_NV[4::6] = -1e4  # every score as low as it can be
    targets_N = torch.randint(4096, (48,), generator=generator)
    found_NV, exact_NV = logits_NV.clone().requires_grad_(), logits_NV.double().requires_grad_()
    model = build_model(tiny(LOGIT_SOFTCAP=softcap, VOCAB_SIZE=4096))
    # A head that reads zeros adds none: the logits are those of an adapter.
    found_N = model.loss_per_token(torch.zeros(48, model.settings.model_dim), targets_N, found_NV)
    if softcap == 0:
        assert torch.equal(found_N, F.cross_entropy(found_NV, targets_N, reduction="none"))
        return
    exact_N = F.cross_entropy(softcap * torch.tanh(exact_NV / softcap), targets_N, reduction="none")
    torch.testing.assert_close(found_N.double(), exact_N, rtol=0, atol=2e-5)
    half_a_unit = torch.finfo(torch.float32).eps / 2
    assert abs(found_N.double().mean() - exact_N.mean()) < half_a_unit * exact_N.mean()
    found_N.sum().backward()
    exact_N.sum().backward()
    # Small logits come from a sigmoid near 1/2, whose rounding error is multiplied by twice the softcap.
    torch.testing.assert_close(found_NV.grad.double(), exact_NV.grad, rtol=0, atol=softcap * half_a_unit / 2)
