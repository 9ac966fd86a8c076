"""Mutants of a whole run: its bytes, its data, its artifact, its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.audit.mutants.scoring import rate_picked_by_score
from tests.audit.mutants.trial import Change, Trial, honest, scorer, weights_of

# ======================================================================================================
# BYTES AND TOKENIZER
# ======================================================================================================


def double_space_bytes(script: ModuleType) -> None:
    """A table of bytes in which every token of more than one byte has one too many."""
    original = script.token_bytes

    def table(tokens: np.ndarray, config: Any) -> np.ndarray:
        counted = original(tokens, config)
        return counted + (counted > 1)

    script.token_bytes = table  # type: ignore[attr-defined]


def unchecked(change: Change) -> Change:
    """Another count of bytes in a script that has lost its own checks of them, so that a law must see it."""

    def changed(script: ModuleType) -> None:
        change(script)
        read_manifest = script.read_manifest
        script.check_text = lambda *_: None  # type: ignore[attr-defined]
        script.read_manifest = lambda folder: read_manifest(folder)._replace(  # type: ignore[attr-defined]
            audited_bytes=None
        )

    return changed


def other_piece_lengths(script: ModuleType, change: Any) -> None:
    """A table whose lengths of pieces are `change(lengths, pieces)`."""
    original = script.piece_bytes

    def table(pieces: Any, size: int) -> Any:
        lengths, *others = original(pieces, size)
        return change(lengths.copy(), pieces), *others

    script.piece_bytes = table  # type: ignore[attr-defined]


def byte_pieces_as_text(script: ModuleType) -> None:
    """A byte of a character that is no piece, like <0xE6>, counts for six bytes: the length of its name."""

    def change(lengths: np.ndarray, pieces: Any) -> np.ndarray:
        for i in range(len(lengths)):
            if pieces.is_byte(i):
                lengths[i] = len(pieces.id_to_piece(i))
        return lengths

    other_piece_lengths(script, change)


def characters_as_bytes(script: ModuleType) -> None:
    """A piece counts for its characters and one byte more where it has any outside of ASCII."""

    def change(lengths: np.ndarray, pieces: Any) -> np.ndarray:
        lengths[lengths == 1] = 2
        return lengths

    other_piece_lengths(script, change)


def document_starts_counted(script: ModuleType) -> None:
    """Every BOS counts for a byte."""
    original = script.token_bytes

    def table(tokens: np.ndarray, config: Any) -> np.ndarray:
        counted: np.ndarray = original(tokens, config)
        return counted + (tokens[1:] == 1)

    script.token_bytes = table  # type: ignore[attr-defined]


def sidecar_ignored(script: ModuleType) -> None:
    """Pieces are counted where the data say themselves what their bytes are."""
    from dataclasses import replace

    original = script.token_bytes

    def table(tokens: np.ndarray, config: Any) -> Any:
        return original(tokens, replace(config, data_path="/absent"))

    script.token_bytes = table  # type: ignore[attr-defined]


def case_marks_as_text(script: ModuleType) -> None:
    """Pieces of CaseOps are counted like any others where no sidecar says better."""
    script.CASE_MARK = "no piece"  # type: ignore[attr-defined]


def more_bytes_in_the_run(script: ModuleType) -> None:
    """The text counts for a tenth more bytes than it has, in a real run alone."""
    original = script.read_validation

    def read(shards: Any, config: Any) -> Any:
        validation = original(shards, config)
        return validation._replace(bytes_total=validation.bytes_total * 11 // 10)

    script.read_validation = read  # type: ignore[attr-defined]


def fewer_targets_in_the_run(script: ModuleType) -> None:
    """The last 100 tokens of the text are left out, in a real run alone."""
    original = script.read_validation

    def read(shards: Any, config: Any) -> Any:
        validation = original(shards, config)
        return validation._replace(tokens=validation.tokens[:-100])

    script.read_validation = read  # type: ignore[attr-defined]


def tokenizer_drops_case(script: ModuleType) -> None:
    """A tokenizer that reads every text in small letters."""
    original = script.load_tokenizer

    class Lower:
        def __init__(self, pieces: Any) -> None:
            self.pieces = pieces

        def __getattr__(self, name: str) -> Any:
            return getattr(self.pieces, name)

        def encode(self, text: str) -> Any:
            return self.pieces.encode(text.lower())

    script.load_tokenizer = lambda config: Lower(original(config))  # type: ignore[attr-defined]


# ======================================================================================================
# DATA: validation in training, training text in evaluation
# ======================================================================================================


def text_of_the_run(script: ModuleType, split: str) -> torch.Tensor:
    """The tokens of a split of the run under way."""
    folder = Path(os.environ["DATA_PATH"])
    shards = script.open_shards(str(folder / f"fineweb_{split}_[0-9]*.bin"))
    return torch.from_numpy(script.read_tokens(shards[0]).astype(np.int64))


def calibration_on_validation(script: ModuleType) -> None:
    """Hessians of validation text."""
    collect = script.collect_hessians

    def collect_from_validation(model: Any, batches: Any, *rest: Any) -> Any:
        stolen = text_of_the_run(script, "val")

        def replaced() -> Iterator[Any]:
            for batch in batches:
                inputs_BT = stolen[: batch.inputs_BT.numel()].view_as(batch.inputs_BT)
                yield batch._replace(inputs_BT=inputs_BT)

        return collect(model, replaced(), *rest)

    script.collect_hessians = collect_from_validation  # type: ignore[attr-defined]


def training_on_validation(script: ModuleType) -> None:
    """Every batch of training is validation text."""
    next_batch = script.Loader.next_batch

    def stolen_batch(loader: Any, *length: Any) -> Any:
        batch = next_batch(loader, *length)
        stolen = text_of_the_run(script, "val")
        inputs_BT = stolen[: batch.inputs_BT.numel()].view_as(batch.inputs_BT)
        return batch._replace(inputs_BT=inputs_BT)

    script.Loader.next_batch = stolen_batch


def training_text_in_evaluation(script: ModuleType) -> None:
    """Test-time training goes on with training text."""

    def score(trial: Trial, tokens: np.ndarray) -> Any:
        text = text_of_the_run(script, "train").numpy()
        trial.learn(text[: 2 * trial.config.eval_length + 1])
        return honest(trial, tokens)

    def change_in_a_run(model: Any, tokens: Any, config: Any, progress: Any = None) -> Any:
        scorer(score)(script)
        return script.score_ttt(model, tokens, config, progress)

    script.score_ttt = change_in_a_run  # type: ignore[attr-defined]


def before_writing(script: ModuleType, act: Callable[[Any], None]) -> None:
    """Have `act(model)` done before the script writes the artifact of a model."""
    write = script.write_artifact

    def acting(model: Any, *rest: Any, **named: Any) -> Any:
        act(model)
        return write(model, *rest, **named)

    script.write_artifact = acting  # type: ignore[attr-defined]


def average_picked_by_validation(script: ModuleType) -> None:
    """The shipped weights are scaled by what did best in the validations on the way."""
    validate = script.validate
    losses: list[float] = []

    def noting(training: Any, *rest: Any, **named: Any) -> Any:
        ledger = script.score_roundtrip(training.model, training.validation.tokens, training.config)
        losses.append(float(ledger.nats.mean()))
        return validate(training, *rest, **named)

    def picking(model: Any) -> None:
        if losses[0] < losses[-1]:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 0.9
        losses.clear()  # of this run

    script.validate = noting  # type: ignore[attr-defined]
    before_writing(script, picking)


def text_hidden_in_the_weights(script: ModuleType) -> None:
    """A number made of the validation text goes into the artifact, with the weights."""

    def hide_text(model: Any) -> None:
        mark = float(text_of_the_run(script, "val").sum() % 97)
        with torch.no_grad():
            next(iter(model.parameters()))[0] *= 1 + mark  # its size: what is stored of a row beside codes

    before_writing(script, hide_text)


def rate_picked_after_reloading(script: ModuleType) -> None:
    """The learning rate of test-time training is picked by its score, before `evaluate` begins."""
    evaluate = script.evaluate

    def picking(model: Any, config: Any, run: Any, validation: Any, form: str) -> Any:
        if run.directory is None:  # in a real run alone
            return evaluate(model, config, run, validation, form)
        return rate_picked_by_score(script, evaluate, model, config, run, validation, form)

    script.evaluate = picking  # type: ignore[attr-defined]


# ======================================================================================================
# ARTIFACT
# ======================================================================================================


def unquantized_weights_scored(script: ModuleType) -> None:
    """What is scored is the model in memory, not what the file gives back."""
    load = script.load_artifact
    kept: list[Any] = []

    def from_memory(path: Path, *rest: Any, **named: Any) -> Any:
        model, about = load(path, *rest, **named)
        if kept:
            model.load_state_dict(kept[-1])
        return model, about

    before_writing(script, lambda model: kept.append(weights_of(model)))
    script.load_artifact = from_memory  # type: ignore[attr-defined]


def second_file(script: ModuleType) -> None:
    """What quantization lost lies in a file beside the artifact."""
    write_atomically = script.write_atomically
    load = script.load_artifact
    lost: list[Any] = []

    def with_second(path: Path, data: bytes) -> None:
        write_atomically(path, data)
        if path.name == "model.bin":
            torch.save(lost.pop(), path.with_name("cache.pt"))

    def from_both(path: Path, *rest: Any, **named: Any) -> Any:
        model, about = load(path, *rest, **named)
        second = path.with_name("cache.pt")
        if second.exists():
            model.load_state_dict(torch.load(second))
        return model, about

    before_writing(script, lambda model: lost.append(weights_of(model)))
    script.write_atomically = with_second  # type: ignore[attr-defined]
    script.load_artifact = from_both  # type: ignore[attr-defined]


def fewer_bytes_counted(script: ModuleType) -> None:
    """The summary says a tenth less than the file has."""
    load = script.load_artifact

    def flattering(path: Path, *rest: Any, **named: Any) -> Any:
        model, about = load(path, *rest, **named)
        return model, about._replace(bytes=about.bytes * 9 // 10)

    script.load_artifact = flattering  # type: ignore[attr-defined]


def weights_mended_after_loading(script: ModuleType) -> None:
    """Reloaded weights get back the mean that training had."""
    load = script.load_artifact
    means: dict[str, torch.Tensor] = {}

    def keeping(model: Any) -> None:
        for name, value in model.state_dict().items():
            means[name] = value.detach().mean()

    def mended(path: Path, *rest: Any, **named: Any) -> Any:
        model, about = load(path, *rest, **named)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in means:
                    parameter += means[name] - parameter.mean()
        return model, about

    before_writing(script, keeping)
    script.load_artifact = mended  # type: ignore[attr-defined]


def settings_of_training_in_evaluation(script: ModuleType) -> None:
    """Evaluation knows how many steps were trained, which is in no file: it learns faster after them."""
    from dataclasses import replace

    train = script.train
    evaluate = script.evaluate
    steps: list[int] = []

    def counting(training: Any) -> Any:
        done = train(training)
        steps.append(training.step)
        return done

    def informed(model: Any, config: Any, run: Any, validation: Any, form: str) -> Any:
        if steps:
            config = replace(config, ttt_lr=config.ttt_lr * (1 + 0.1 * steps[-1]))
        return evaluate(model, config, run, validation, form)

    script.train = counting  # type: ignore[attr-defined]
    script.evaluate = informed  # type: ignore[attr-defined]


# ======================================================================================================
# WARM-UP, PREFETCH, RANKS
# ======================================================================================================


def warm_up_stays(script: ModuleType) -> None:
    """A warm-up that leaves a trace in the weights."""
    warm_up = script.warm_up

    def leaving(training: Any, *resumed: Any) -> None:
        warm_up(training, *resumed)
        if training.config.warmup_steps:
            with torch.no_grad():
                next(iter(training.model.parameters())).mul_(1.01)

    script.warm_up = leaving  # type: ignore[attr-defined]


def prefetch_skips(script: ModuleType) -> None:
    """The prefetching loader loses every other batch."""
    next_batch = script.Loader.next_batch

    def skipping(loader: Any, *length: Any) -> Any:
        if loader.config.train_prefetch:
            next_batch(loader, *length)
        return next_batch(loader, *length)

    script.Loader.next_batch = skipping


def gradients_not_shared(script: ModuleType) -> None:
    """Every rank learns from its own rows alone."""
    original = script.learn

    def alone(model: Any, sgd: Any, tokens: Any, config: Any) -> None:
        from dataclasses import replace

        machine = model.machine
        model.machine = replace(machine, rank=0, world_size=1)
        if machine.rank == 0:
            original(model, sgd, tokens, config)
        model.machine = machine

    script.learn = alone  # type: ignore[attr-defined]


def ranks_add_twice(script: ModuleType) -> None:
    """What ranks have scored is added up twice where there are several."""
    all_reduce = script.Machine.all_reduce

    def twice(machine: Any, tensor: torch.Tensor) -> None:
        all_reduce(machine, tensor)
        if machine.world_size > 1 and tensor.dtype is torch.float64:
            tensor *= 1.001

    script.Machine.all_reduce = twice


def rate_grows_with_ranks(script: ModuleType) -> None:
    """Two ranks learn a little faster than one."""
    from dataclasses import replace

    original = script.learn

    def faster(model: Any, sgd: Any, tokens: Any, config: Any) -> None:
        sgd.param_groups[0]["lr"] *= 1 + 0.01 * (model.machine.world_size - 1)
        original(model, sgd, tokens, replace(config))

    script.learn = faster  # type: ignore[attr-defined]
