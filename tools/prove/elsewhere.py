"""What no run on a CPU does by itself: the branches of a GPU, and those that end a run.

They are called here and compared with their plain twins, so that a proof has run them too (B18).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tools.check.findings import Finding, fail, info, warn
from tools.prove import questions, tiny
from tools.prove.cell import in_cell, offers
from tools.prove.probes import RecordingRun, Subject, nats_by_label, with_settings
from tools.prove.ranks import LEARNING_RATE, LEARNING_TOLERANCE

FIXED = ("roundtrip", "sliding_window", "a single pass")  # labels that learn nothing
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
BATCHES = 3  # of a loader
SIGNAL = 15
COLUMN_STEPS = (0.5, 0.0)
NO_INVERSE = 0.05  # of a Hessian's diagonal: so far below zero its smallest eigenvalues are


# ======================================================================================================
# AS ON A GPU
# ======================================================================================================


class OnGpu(TorchFunctionMode):
    """All tensors say that they are on a GPU, and are on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if function == torch.Tensor.device.__get__:
            return GPU
        if function is torch.Tensor.pin_memory:
            return args[0]
        named = {name: CPU if value == GPU else value for name, value in (kwargs or {}).items()}
        named.pop("pin_memory", None)
        return function(*(CPU if isinstance(one, torch.device) else one for one in args), **named)


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """A script finds a GPU's streams and events, which do nothing, and `OnGpu`."""
    names = ("synchronize", "Event", "Stream", "current_stream")
    streams: dict[str, Any] = {name: mock.MagicMock() for name in names}
    with mock.patch.multiple(torch.cuda, stream=contextlib.nullcontext, **streams), \
            mock.patch.object(torch.Tensor, "record_stream", mock.MagicMock()), OnGpu():  # fmt: skip
        yield


def attention_by_starts(script: ModuleType) -> Callable[..., torch.Tensor]:
    """A twin of the kernels that get the starts of documents: they become the mask of torch's attention."""

    def attend(q_BTHE: Any, k_BTKE: Any, v_BTKE: Any, starts: torch.Tensor) -> torch.Tensor:
        places_N = torch.arange(q_BTHE.size(0) * q_BTHE.size(1))
        document_BT = torch.searchsorted(starts.long(), places_N, right=True).view(q_BTHE.shape[:2])
        same_B1TT = document_BT[:, None, :, None] == document_BT[:, None, None]
        attended: torch.Tensor = script.attention_sdpa(q_BTHE, k_BTKE, v_BTKE, same_B1TT.tril())
        return attended

    return attend


@in_cell
def forms_of_gpu(subject: Subject) -> list[dict[str, np.ndarray]]:
    """Nats by label: on the CPU; as on a GPU with torch's attention; there with one that gets starts.

    One label more has the whole stream in a single pass, which is not told where documents start.
    """
    subject = with_settings(subject, ttt_lr=LEARNING_RATE)
    tokens = subject.tokens()
    ids_1T = torch.from_numpy(tokens.astype(np.int64))[None]

    def nats(model: Any) -> dict[str, np.ndarray]:
        found = nats_by_label(subject, tokens, model)
        with torch.no_grad():
            found["a single pass"] = model.loss_per_token(model(ids_1T[:, :-1])[0], ids_1T[0, 1:]).numpy()
        return found

    forms = [nats(subject.model())]
    for by_starts in (False, True):
        model = subject.model()
        model.machine = replace(model.machine, device=GPU)
        if by_starts:
            model.ops = model.ops._replace(attend=attention_by_starts(subject.script))
        with as_on_gpu():
            forms.append(nats(model))
    return forms


def same_as_on_gpu(subject: Subject) -> Iterator[Finding]:
    """B7: the branches of a GPU score what those of a CPU do."""
    if not offers(subject.script, "Machine", "Ops", "attention_sdpa"):  # older scripts
        return
    plain, *forms = forms_of_gpu(subject)
    worst = 0.0
    for form, nats in zip(("with torch's attention", "by the starts of documents"), forms, strict=True):
        for label, expected in plain.items():
            moved = np.abs(nats[label] - expected).max()
            limit = questions.REPACKING_TOLERANCE if label in FIXED else LEARNING_TOLERANCE
            if not moved <= limit:
                text = f"as on a GPU, {form}, losses move by {moved:.1e}"
                yield fail("B7", text, f"{subject.name}: {label}", "score the same on every device")
                return
            worst = max(worst, float(moved))
    text = f"as on a GPU, {len(plain)} labels are the same, by both forms of attention; apart by {worst:.1e}"
    yield info("B7", text, subject.name)


@in_cell
def loaded(script: ModuleType, settings: Mapping[str, str], data: Path) -> list[list[np.ndarray]]:
    """The first batches of training: on the CPU; as on a GPU; there with a stream for copies."""
    config = replace(script.Config.from_env(dict(settings)), train_prefetch=False)
    shards = script.open_shards(str(data / "fineweb_train_*.bin"))

    def batches(machine: Any, copy_stream: bool) -> list[np.ndarray]:
        loader = script.Loader(replace(config, train_copy_stream=copy_stream), shards, machine)
        found = []
        for _ in range(BATCHES):
            batch = loader.next_batch()
            found += [batch.inputs_BT.numpy(), batch.targets_BT.numpy(), batch.starts.numpy()]
        return found

    forms = [batches(script.Machine(), False)]
    with as_on_gpu():
        forms += [batches(script.Machine(device=GPU), copy_stream) for copy_stream in (False, True)]
    return forms


@in_cell
def calibrated(script: ModuleType, seconds_max: float) -> list[int]:
    """Numbers of the batches that calibrate, out of four, five seconds after a training of so many began."""
    config = SimpleNamespace(
        gptq_calibration_batches=4, gptq_reserve_seconds=0.0, max_wallclock_seconds=seconds_max
    )
    loader = SimpleNamespace(next_batch=iter(range(9)).__next__)
    training = SimpleNamespace(config=config, run=RecordingRun(script.Machine()), loader=loader, seconds=5.0)
    return list(script.calibration_batches(training))


def same_batches(script: ModuleType, settings: Mapping[str, str], data: Path) -> Iterator[Finding]:
    """B8: batches are the loader's as on a GPU too, and those of calibration under a clock that ends."""
    if not offers(script, "Machine", "Loader", "calibration_batches"):
        return
    plain, *forms = loaded(script, settings, data)
    if not all(np.array_equal(a, b) for form in forms for a, b in zip(plain, form, strict=True)):
        yield fail("B8", "as on a GPU the loader gives other batches", "Loader", "load the same everywhere")
        return
    found = [calibrated(script, seconds_max) for seconds_max in (0.0, 1.0)]
    if found[0] != [0, 1, 2, 3] or found[1] != found[0][: len(found[1])]:
        text = f"batches {found[0]} and, after the clock, {found[1]} calibrate, of 0 to 3"
        yield fail("B8", text, "calibration_batches", "take the batches after training, in order")
        return
    yield info("B8", f"{BATCHES} batches are the same as on a GPU, with and without a stream for copies; the "
               f"clock leaves {len(found[1])} of 4 batches for calibration", "Loader")  # fmt: skip


# ======================================================================================================
# WHAT ENDS A RUN
# ======================================================================================================


@in_cell
def ends(script: Any, data: Path, folder: Path) -> list[tuple[str, str, str]]:
    """What was tried that must not go on: its check, what it is, and the name of the error that ended it."""
    (folder / "a folder").mkdir(parents=True, exist_ok=True)
    (folder / script.ARTIFACT).touch()
    shards = script.open_shards(str(data / "fineweb_val_0*.bin"))
    config = script.Config.from_env({**tiny.scorer(script), "ARTIFACT_BYTES_MAX": "9000"})
    budget = int(script.expected_bytes(config, 1.0))
    sizes = itertools.chain([budget + 1] * 2, itertools.repeat(9 * budget))

    def settings(**given: str) -> Callable[[], Any]:
        return lambda: script.Config.from_env(given)

    def stopped(directory: Path | None) -> Callable[[], Any]:
        def caught() -> None:
            run = script.Run(script.Machine(), directory)
            run.log("a line before the signal")
            with mock.patch.object(os, "_exit", side_effect=SystemExit):
                run.on_signal(SIGNAL)

        return caught

    tried: list[tuple[str, str, Callable[[], Any]]] = [
        ("B3", "the score of a text without a score", lambda: script.Ledger(np.arange(9)).score(9)),
        ("B10", "ids above the vocabulary", lambda: script.read_tokens(shards[0], 4)),
        ("B12", "a file in the place of a folder", lambda: script.write_whole(folder / "a folder", b"")),
        ("B12", "no file below the limit",
         lambda: script.fill_budget(config, budget, lambda _: bytes(next(sizes)))),
        ("B18", "NUM_HEADS that do not divide MODEL_DIM", settings(NUM_HEADS="3", MODEL_DIM="16")),
        ("B18", "NUM_LAYERS=x", settings(NUM_LAYERS="x")),
        ("B18", "RESUME with EVAL_ONLY", settings(RESUME="x", EVAL_ONLY="x")),
        ("B18", "a signal outside training", stopped(folder)),
        ("B18", "a signal, without files", stopped(None)),
    ]  # fmt: skip
    found = []
    for check, what, attempt in tried:
        try:
            attempt()
        except BaseException as error:  # whatever ends it
            found.append((check, what, type(error).__name__))
        else:
            found.append((check, what, ""))
    return found


def all_end(script: Any, data: Path, folder: Path) -> Iterator[Finding]:
    """B3, B10, B12 and B18: what must not go on ends with an error, and no score."""
    functions = ("read_tokens", "write_whole", "fill_budget", "expected_bytes")
    if not offers(script, "Run", "Machine", "ARTIFACT", *functions):
        return
    found = ends(script, data, folder)
    for check, what, error in found:
        if not error and check == "B18":
            yield warn(check, f"not checked: {what} did not end a run", "ends", "end it with an error")
        elif not error:
            yield fail(check, f"{what}: it goes on", "ends", "end it with an error")
    ended = ", ".join(f"{what} ({error})" for _, what, error in found if error)
    yield info("B18", f"each ends without a score: {ended}", "ends")


@in_cell
def without_inverse(subject: Subject, column_steps: float) -> tuple[bool, bool]:
    """Of Hessians that have an inverse with ten times the damping: whether the log says that they needed it,
    and whether the artifact is the one that is made with so much from the beginning."""
    script: Any = subject.script
    config = replace(subject.config, rate_control=False, trellis=False, column_steps=column_steps)
    model = subject.model()
    ids_BT = torch.from_numpy(subject.tokens().astype(np.int64))[None, : config.train_seq_len]
    found = script.collect_hessians(model, [SimpleNamespace(inputs_BT=ids_BT, starts=None)])
    singular = {key: torch.ones_like(h) - NO_INVERSE * torch.eye(len(h)) for key, h in found.items()}
    data, line = script.write_artifact(model, config, singular, "", 10**9)
    enough = replace(config, gptq_damping=10 * config.gptq_damping)
    expected, quiet = script.write_artifact(model, enough, singular, "", 10**9)
    return "warning" in line and "warning" not in quiet, data == expected


def damped(subject: Subject) -> Iterator[Finding]:
    """B12: Hessians without an inverse are damped more, which is logged, and nothing else becomes of them."""
    if not offers(subject.script, "collect_hessians", "write_artifact", "load_artifact", "Quantizer"):
        return
    for column_steps in COLUMN_STEPS:
        told, same = without_inverse(subject, column_steps)
        if not told or not same:
            text = f"Hessians without an inverse: told {told}, the artifact of more damping {same}"
            where = f"write_artifact, COLUMN_STEPS={column_steps:g}"
            yield fail("B12", text, where, "damp them more, and log it")
            return
    text = "Hessians without an inverse give the artifact of ten times the damping, and the log says so"
    yield info("B12", text, "write_artifact")


# ======================================================================================================
# OTHER VERSIONS OF TORCH
# ======================================================================================================


@in_cell
def compiled(script: ModuleType, fuses: bool) -> list[tuple[bool, dict[str, Any]]]:
    """Each call of torch's compiler in `Machine.compile`: whether its function was the one, and its options.

    fuses: whether torch has the fusion that the script switches off.
    """
    called: list[tuple[bool, dict[str, Any]]] = []

    def double(number: int) -> int:
        return 2 * number

    def compile_it(function: Callable[[int], int], **named: Any) -> Callable[[int], int]:
        called.append((function is double, named))
        return function

    kernels = SimpleNamespace(mix_order_reduction=True) if fuses else SimpleNamespace()
    machine = script.Machine(compiled=True)
    with mock.patch.object(torch._inductor, "config", SimpleNamespace(triton=kernels)), \
            mock.patch.object(torch, "compile", compile_it):  # fmt: skip
        made = machine.compile(double)
    return called if made is double else []


def same_compiled(script: ModuleType) -> Iterator[Finding]:
    """B7: code is compiled alike by a torch that has the fusion to be switched off, and by one without."""
    if not offers(script, "Machine"):  # older scripts
        return
    without, fused = [compiled(script, fuses) for fuses in (False, True)]
    if without != fused or [same for same, _ in fused] != [True]:
        text = f"a torch with one more fusion compiles {fused}, without it {without}"
        yield fail("B7", text, "Machine.compile", "compile the function itself, alike on every torch")
        return
    text = "a function is compiled alike by a torch with one more fusion and by one without"
    yield info("B7", text, "Machine.compile")
