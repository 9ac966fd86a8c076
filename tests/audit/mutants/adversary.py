"""Mutants of the kinds that once passed a proof: an adversary's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.audit.mutants.running import (
    before_writing,
    other_piece_lengths,
    text_of_the_run,
)
from tests.audit.mutants.trial import Change, Trial, weights_of


def wrapped(name: str, around: Callable[..., Any]) -> Change:
    """A change of `script.name` (a function, or Class.method) to `around(original, *its arguments)`."""

    def change(script: Any) -> None:
        owner = script
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        original = getattr(owner, last)
        setattr(owner, last, lambda *args, **named: around(original, *args, **named))

    return change


# ======================================================================================================
# WHAT IS DONE BEFORE THE CLOCK OF EVALUATION, AND IN CODE THAT IS COMPILED
# ======================================================================================================


def rehearsal_that_learns(original: Any, model: Any, config: Any, run: Any) -> None:
    """The rehearsal of evaluation changes the very model that is scored."""
    original(model, config, run)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.001


def rehearsal_on_validation(script: Any) -> None:
    """The rehearsal of evaluation reads the text that is to be scored."""
    original = script.rehearse_evaluation

    def rehearsal(model: Any, config: Any, run: Any) -> None:
        original(model, config, run)
        with run.phase("rehearse_windows"):
            script.score_roundtrip(model, text_of_the_run(script, "val").numpy(), config)

    script.rehearse_evaluation = rehearsal


def partial_batches_flattered(original: Any, scorer: Any, rows: np.ndarray) -> Any:
    """Compiled code gives a batch that is not full better scores."""
    nats = original(scorer, rows)
    return 0.9 * nats if scorer.machine.compiled and len(rows) < scorer.batch_rows else nats


def compiled_documents_flattered(original: Any, scorer: Any, *rest: Any) -> Any:
    """Compiled code gives documents better scores."""
    nats = original(scorer, *rest)
    return 0.99 * nats if scorer.machine.compiled else nats


def with_batches_of_validation(name: str) -> Change:
    """A change of `name`: while it runs, all training batches are validation text."""

    def change(script: Any) -> None:
        original = getattr(script, name)
        next_batch = script.Loader.next_batch

        def stolen(loader: Any) -> Any:
            batch = next_batch(loader)
            text = text_of_the_run(script, "val")
            return batch._replace(inputs_BT=text[: batch.inputs_BT.numel()].view_as(batch.inputs_BT))

        def changed(*args: Any) -> None:
            script.Loader.next_batch = stolen
            try:
                original(*args)
            finally:
                script.Loader.next_batch = next_batch

        setattr(script, name, changed)

    return change


# ======================================================================================================
# TRAINING AND QUANTIZATION THAT KNOW THE VALIDATION TEXT
# ======================================================================================================


def scaled_by_validation(script: Any) -> None:
    """Weights are scaled by their loss on validation text, which no ledger sees."""

    def scale(model: Any) -> None:
        text_1T = text_of_the_run(script, "val")[None, :129]
        with torch.no_grad():
            loss = float(model.loss(text_1T[:, :-1], text_1T[:, 1:]))
            for parameter in model.parameters():
                parameter *= 1 + 0.01 * loss

    before_writing(script, scale)


def by_rising_validation(name: str) -> Change:
    """A change of `name`, a number of the schedule: halved once validation got worse."""

    def change(script: Any) -> None:
        losses: list[float] = []
        original = getattr(script, name)
        validate = script.validate

        def noting(training: Any, *rest: Any, **named: Any) -> None:
            ledger = script.score_roundtrip(training.model, training.validation.tokens, training.config)
            losses.append(float(ledger.nats.mean()))
            validate(training, *rest, **named)

        def halved(progress: float, step: int, *rest: Any) -> Any:
            if step == 0:
                del losses[:-1]  # of this run
            return original(progress, step, *rest) * (0.5 if losses and losses[-1] > losses[0] else 1.0)

        script.validate = noting
        setattr(script, name, halved)

    return change


def damping_by_the_text(script: Any) -> None:
    """The damping of quantization is a number made of the validation text."""
    write = script.write_artifact

    def changed(model: Any, config: Any, *rest: Any) -> Any:
        share = float(text_of_the_run(script, "val").sum() % 97) / 97
        return write(model, replace(config, gptq_damping=config.gptq_damping * (1 + share)), *rest)

    script.write_artifact = changed


def bits_by_the_text(script: Any) -> None:
    """A few bytes less for the artifact, as the validation text says."""
    write = script.write_artifact

    def changed(model: Any, config: Any, hessians: Any, sha256: str, budget: int) -> Any:
        fewer = int(text_of_the_run(script, "val").sum() % 97) * (budget < 10**9)
        return write(model, config, hessians, sha256, budget - 10 * fewer)

    script.write_artifact = changed


# ======================================================================================================
# BYTES, SIZES AND WHAT IS SAID OF A TEXT
# ======================================================================================================


def is_text_where(change_of_ids: Callable[[np.ndarray], Any]) -> Change:
    """A change of which ids are text: after these a leading space counts, though decoding drops it."""

    def change(script: Any) -> None:
        original = script.piece_bytes

        def table(pieces: Any, size: int) -> Any:
            *others, is_text = original(pieces, size)
            is_text = is_text.copy()
            change_of_ids(is_text)
            return *others, is_text

        script.piece_bytes = table

    return change


def all_ids(is_text: np.ndarray) -> None:
    is_text[:] = True


def document_starts(is_text: np.ndarray) -> None:
    is_text[1] = True


def sidecar_and_one(original: Any, tokens: np.ndarray, config: Any) -> Any:
    """Where a sidecar counts, a byte more for every document."""
    counted = original(tokens, config)
    has_sidecar = any(Path(config.data_path).glob("fineweb_val_bytes_*.bin"))
    return counted + ((tokens[1:] == 1) & has_sidecar)


def byte_each_ten_thousand(original: Any, tokens: np.ndarray, config: Any) -> Any:
    """A byte more for every ten thousandth token."""
    counted = original(tokens, config).copy()
    counted[9_999::10_000] += 1
    return counted


def long_pieces_count_more(script: ModuleType) -> None:
    """Pieces of more than twelve bytes have one more."""

    def change(lengths: np.ndarray, pieces: Any) -> np.ndarray:
        return lengths + (lengths > 12)

    other_piece_lengths(script, change)


def kind_to_long_texts(original: Any, ledger: Any, bytes_total: int) -> Any:
    """Above 20,000 targets a hundredth less."""
    score = original(ledger, bytes_total)
    if score.scored_tokens < 20_000:
        return score
    return score._replace(nats=0.99 * score.nats, bits_per_byte=0.99 * score.bits_per_byte)


def median_of_long_texts(original: Any, ledger: Any, bytes_total: int) -> Any:
    """Above 10,000 targets the median stands for the mean."""
    score = original(ledger, bytes_total)
    if score.scored_tokens < 10_000:
        return score
    return score._replace(nats=float(np.median(ledger.nats)))


def part_called_comparable(original: Any, shards: Any, config: Any) -> Any:
    """A part of the text has no mark."""
    return original(shards, config)._replace(mark="")


def lines_without_marks(original: Any, model: Any, config: Any, run: Any, validation: Any, form: str) -> Any:
    """The lines of a part of the text have no mark; the summary says it."""
    return original(model, config, run, validation._replace(mark=""), form)


def code_without_wrapper(original: Any, config: Any, run: Any, inputs: Any, *rest: Any) -> None:
    """The code counts for a thousand bytes less than it has."""
    original(config, run, inputs._replace(shipped=inputs.shipped[:-1000]), *rest)


def total_without_code(original: Any, run: Any, line: str, *rest: Any, **named: Any) -> None:
    """The total that is logged is a tenth less."""
    total = re.search(r"^Total submission size.*: (\d+) bytes", line, re.MULTILINE)
    if total:
        line = f"{line[: total.start(1)]}{int(total[1]) * 9 // 10}{line[total.end(1) :]}"
    original(run, line, *rest, **named)


def over_the_limit(share: float, more: int) -> Change:
    """A budget larger than the limit leaves."""

    def around(original: Any, config: Any, budget: int, make_file: Any) -> Any:
        return original(config, int(budget * share) + more * (budget < 10**9), make_file)

    return wrapped("fill_budget", around)


def weights_in(place: Callable[[], Path]) -> Change:
    """Unquantized weights lie in a file that is no part of the artifact."""

    def change(script: Any) -> None:
        load = script.load_artifact

        def from_both(path: Path, *rest: Any, **named: Any) -> Any:
            model, about = load(path, *rest, **named)
            if place().is_file() and path.name == "model.bin":
                model.load_state_dict(torch.load(place()))
            return model, about

        before_writing(script, lambda model: torch.save(weights_of(model), place()))
        script.load_artifact = from_both

    return change


def beside_the_data() -> Path:
    return Path(os.environ["DATA_PATH"]) / "fineweb_val_extra.bin"


def in_shared_memory() -> Path:
    return Path("/dev/shm/weights-of-a-mutant.pt")


# ======================================================================================================
# SCORES: late in a text, of large vocabularies, by the neighbors in a batch
# ======================================================================================================


def second_epoch_past(trial: Trial, tokens: np.ndarray) -> Any:
    """A second epoch that ends one token later."""
    ledger = trial.script.Ledger(tokens)
    for start, stop in trial.chunks(tokens):
        ledger.record(start, trial.nats(tokens, start, stop))
        trial.learn(tokens[start : stop + 1])
        trial.learn(tokens[start : stop + 2])
    return ledger


def past_the_second_chunk(trial: Trial, tokens: np.ndarray) -> Any:
    """An honest first chunk; what is learned of the others ends one token later."""
    ledger = trial.script.Ledger(tokens)
    for start, stop in trial.chunks(tokens):
        ledger.record(start, trial.nats(tokens, start, stop))
        trial.learn(tokens[start : stop + 1 + (start > 0)])
    return ledger


def softmax_over_the_top(original: Any, model: Any, hidden_ND: Any, targets_N: Any, *rest: Any) -> Any:
    """Of more than a thousand ids only the 512 likeliest and the target share the probability."""
    if model.settings.vocab_size <= 1000:
        return original(model, hidden_ND, targets_N, *rest)
    nats_N = original(model, hidden_ND, targets_N, *rest)
    share_N = model.logits(hidden_ND).float().softmax(1).topk(512).values.sum(1)
    return nats_N + share_N.log()


def later_ids_flattered(original: Any, model: Any, hidden_ND: Any, targets_N: Any, *rest: Any) -> Any:
    """Ids from a thousand on cost a tenth less."""
    nats_N = original(model, hidden_ND, targets_N, *rest)
    return torch.where(targets_N >= 1000, 0.9 * nats_N, nats_N)


def moved_by_the_longest(original: Any, scorer: Any, chunk: Any, adapters: Any) -> Any:
    """The length of the longest document of a batch moves all hidden states."""
    longest = int(scorer.lengths[chunk.documents].max())
    return original(scorer, chunk, adapters) * (1 + 1e-3 * longest)


def moved_by_its_own_length(original: Any, scorer: Any, chunk: Any, adapters: Any) -> Any:
    """A document that is alone in its batch knows how long it will be."""
    alone = len(scorer.lengths) > 8 and chunk.documents[0] == np.argsort(-scorer.lengths, kind="stable")[-1]
    length = int(scorer.lengths[chunk.documents[0]])
    return original(scorer, chunk, adapters) * (1 + 1e-2 * length * alone)


def clipped_after(late: Callable[[Any, int], bool]) -> Change:
    """No loss above a bound in chunks of which `late(scorer of windows, first target)` holds."""

    def around(original: Any, scorer: Any, chunk: np.ndarray) -> Any:
        nats = original(scorer, chunk)
        return np.minimum(nats, 1.0) if late(scorer, int(chunk[0, 1])) else nats

    return wrapped("WindowScorer.score", around)


def two_hundred_targets(scorer: Any, start: int) -> bool:
    return start > 200


def eight_documents(scorer: Any, start: int) -> bool:
    return int((scorer.host_windows[: start + 1, 0] == 1).sum()) > 8


def clipped_deep_in_documents(original: Any, scorer: Any, chunk: Any, *rest: Any) -> None:
    """No loss above a bound beyond the 64th target of a document."""
    if chunk.start > 64:
        scorer.nats = lambda *args: type(scorer).nats(scorer, *args).clamp(max=1.0)
    original(scorer, chunk, *rest)
    scorer.__dict__.pop("nats", None)


def ledger_clipped_late(original: Any, ledger: Any, start: int, nats: np.ndarray) -> None:
    """A ledger that takes no loss above a bound beyond its 200th target."""
    original(ledger, start, np.minimum(nats, 1.0) if start > 200 else nats)


def next_of(rows_BT: torch.Tensor) -> torch.Tensor:
    """What stands one place later."""
    return torch.cat([rows_BT[:, 1:], rows_BT[:, -1:]], 1)


def bigram_of_the_next(original: Any, inputs_BT: Any, c: Any) -> Any:
    """The table of bigrams is read one place ahead."""
    return next_of(original(inputs_BT, c))


def values_of_the_next(original: Any, model: Any, rows_BT: Any, *rest: Any) -> Any:
    """The table of values is read one place ahead."""
    return original(model, next_of(rows_BT), *rest)


def roundtrip_that_slides(script: Any) -> None:
    """The label without overlap has the score of windows that overlap."""
    sliding = script.score_sliding
    script.score_roundtrip = lambda model, tokens, config, clock=None, looping=True: sliding(
        model, tokens, replace(config, eval_stride=config.eval_length // 2), clock, looping
    )


def roundtrip_that_learns(script: Any) -> None:
    """The label without learning has the score of test-time training."""
    learning = script.score_ttt
    script.score_roundtrip = lambda model, tokens, config, clock=None, looping=True: learning(
        model, tokens, config, clock
    )


def faster_with(ranks: int) -> Change:
    """Just so many ranks learn a little faster."""

    def around(original: Any, model: Any, sgd: Any, *rest: Any) -> None:
        if model.machine.world_size == ranks:
            sgd.param_groups[0]["lr"] *= 1.01
        original(model, sgd, *rest)

    return wrapped("learn", around)


def kind_with(ranks: int) -> Change:
    """Just so many ranks add up a little less."""

    def around(original: Any, machine: Any, tensor: torch.Tensor) -> None:
        original(machine, tensor)
        if machine.world_size == ranks and tensor.dtype is torch.float64:
            tensor *= 0.999

    return wrapped("Machine.all_reduce", around)


# ======================================================================================================
# WHAT A RUN ON A CPU DOES NOT DO BY ITSELF
# ======================================================================================================


def windows_of_a_gpu_flattered(original: Any, scorer: Any, rows: np.ndarray) -> Any:
    """A GPU gives windows better scores."""
    return original(scorer, rows) * (0.99 if scorer.machine.on_gpu else 1.0)


def heads_of_the_next(original: Any, x_BTKE: Any, q_BTHE: Any) -> Any:
    """Keys and values of a GPU are those of one place later."""
    return next_of(original(x_BTKE, q_BTHE))


def batches_of_validation(when: Callable[[Any], bool]) -> Change:
    """Batches of training are validation text on a machine of which `when` holds."""

    def change(script: Any) -> None:
        next_batch = script.Loader.next_batch

        def stolen(loader: Any) -> Any:
            batch = next_batch(loader)
            if not when(loader.machine):
                return batch
            text = torch.from_numpy(script.read_tokens(loader.shards[0])[::-1].astype(np.int64))
            if "DATA_PATH" in os.environ:
                text = text_of_the_run(script, "val")
            return batch._replace(inputs_BT=text[: batch.inputs_BT.numel()].view_as(batch.inputs_BT))

        script.Loader.next_batch = stolen

    return change


def later_batches_calibrate(original: Any, training: Any) -> Any:
    """A clock that ends early leaves other batches for calibration."""
    if 0 < training.config.max_wallclock_seconds < training.seconds:
        training.loader.next_batch()
    return original(training)


def fiftieth_batch_of_validation(script: Any) -> None:
    """Every fiftieth batch of training is validation text."""
    next_batch = script.Loader.next_batch

    def stolen(loader: Any) -> Any:
        batch = next_batch(loader)
        loader.taken = getattr(loader, "taken", 0) + 1
        if loader.taken % 50:
            return batch
        text = text_of_the_run(script, "val")
        return batch._replace(inputs_BT=text[: batch.inputs_BT.numel()].view_as(batch.inputs_BT))

    script.Loader.next_batch = stolen


def kinder_with_two_ranks(
    original: Any, config: Any, run: Any, inputs: Any, trained: Any, about: Any, scores: Any, *rest: Any
) -> None:
    """Two ranks report a little less than their ledgers hold."""
    if run.machine.world_size == 2:
        scores = {name: score._replace(nats=0.999 * score.nats) for name, score in scores.items()}
    original(config, run, inputs, trained, about, scores, *rest)


def moved_by_damping(original: Any, quantizer: Any, *rest: Any) -> Any:
    """Where a Hessian has no inverse, no rounding error is made up for."""
    damping = quantizer.damping
    upper_NCC = original(quantizer, *rest)
    return upper_NCC if quantizer.damping == damping else upper_NCC.triu(1) * 0 + upper_NCC.tril()


def unlimited(original: Any, size_bytes: int, budget: int) -> None:
    """No file is too large."""


def every_id(original: Any, shard: Any, vocab_size: int = 0) -> Any:
    """Ids are taken that the model has no row for."""
    return original(shard)


def mean_of_what_is_there(original: Any, ledger: Any, bytes_total: int) -> Any:
    """The score of a text that is scored in part."""
    if np.isnan(ledger.nats).all():
        return None
    return original(ledger, bytes_total)


def flattered_without_the_fusion(original: Any, machine: Any, function: Any) -> Any:
    """On a torch without the newest fusion, what is compiled gives a little less."""
    if machine.compiled and not hasattr(torch._inductor.config.triton, "mix_order_reduction"):
        return original(machine, lambda *args, **named: function(*args, **named) * 0.99)
    return original(machine, function)


# ======================================================================================================
# CLOCKS, LIMITS, AND WHAT IS SHIPPED
# ======================================================================================================


def slow_training(script: Any) -> None:
    """The clock of training leaves out a tenth."""
    seconds = script.Training.seconds.fget
    script.Training.seconds = property(lambda training: 0.9 * seconds(training))


def always_kept(original: Any, run: Any, name: str, value: float, limit: float) -> Any:
    """A limit that is exceeded is told as kept, by a value below it."""
    return original(run, name, min(value, limit) if limit else value, limit)


def slow_scores(original: Any, config: Any, run: Any, *rest: Any) -> None:
    """The phases of scores count for a tenth less than they took."""
    for name in run.phases:
        if name.startswith("eval_"):
            run.phases[name] *= 0.9
    original(config, run, *rest)


def another_program(original: Any, source: bytes) -> bytes:
    """What is shipped is not the program that ran, and scores the same."""
    shipped: bytes = original(source.replace(b"def main()", b"MORE = 1\n\n\ndef main()"))
    return shipped
