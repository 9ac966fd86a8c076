"""Launches and bytes of what runs outside the compiled loss, on rank 0 of 8 ranks that are not there.

    python -m benchmarks.gpu_model.eager_parts

The optimizer's step on 8 ranks and on one, the Hessians of one micro-batch, the head in scoring, what a step
of test-time training does beside its loss, and the columns of GPTQ. In a run `orthogonalize` is compiled;
here it is eager. Collectives are not counted: their time is that of the links between GPUs.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_model import census
from benchmarks.gpu_model.roofline import launch_seconds

if TYPE_CHECKING:  # they import torch, which must wait for the fake GPU
    from torch import Tensor

    from benchmarks.gpu_model.accounting import Recorder
    from benchmarks.gpu_model.tracer import Tracer

SCORED_TARGETS = 9600  # of one call of the head
COMMON_NAMES = 24  # that are printed


def summarize(label: str, recorder: Recorder, remark: str = "") -> dict[str, Any]:
    """Print the sums over what was recorded, and return them."""
    from benchmarks.gpu_model.report import total_of

    names = collections.Counter(launch.name.split(".")[0] for launch in recorder.launches)
    total = total_of(recorder.launches)
    print(f"{label}: {total} {remark}\n    {dict(names.most_common(COMMON_NAMES))}", flush=True)
    return {**vars(total), "names": dict(names)}


def give_gradients(model: Any) -> None:
    """Gradients of every parameter, as after a backward pass."""
    import torch

    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)


def measure_optimizer(tracer: Tracer, model: Any, config: Any, world_size: int) -> dict[str, Any]:
    """One step of the optimizer of rank 0; how much of it orthogonalizes."""
    from benchmarks.gpu_model import subject
    from benchmarks.gpu_model.accounting import Launch, Watch
    from benchmarks.gpu_model.report import total_of

    recorder = tracer.recorder()
    inside: list[Launch] = []

    def watched(orthogonalize: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*arguments: Any, **keywords: Any) -> Tensor:
            before = len(recorder.launches)
            result = orthogonalize(*arguments, **keywords)
            inside.extend(recorder.launches[before:])
            return result

        return run

    optimizer = subject.optimizer(model, config, world_size)
    subject.replace_orthogonalize(optimizer, watched)
    give_gradients(model)
    with Watch(recorder):
        subject.optimizer_step(optimizer)
    if not inside:
        raise RuntimeError(
            "the optimizer's step did not call what subject.replace_orthogonalize put in place"
        )
    remark = f"of which orthogonalize, eager here: {total_of(inside)}"
    return summarize(f"optimizer step, {world_size} ranks", recorder, remark)


def measure_hessians(tracer: Tracer, model: Any, config: Any) -> dict[str, Any]:
    """The eager forward pass of one micro-batch whose inputs to each matrix are observed."""
    from benchmarks.gpu_model import subject
    from benchmarks.gpu_model.accounting import Watch

    rows, length = subject.rows(config, "train_loop", world_size=1)
    inputs_BT = tracer.empty(rows, length)
    starts = census.document_starts(tracer, rows, census.DOCUMENTS_PER_ROW)
    recorder = tracer.recorder()
    with Watch(recorder):
        subject.collect_hessians(model, inputs_BT, starts)
    remark = f"peak {recorder.peak_bytes / 2**30:.1f} GiB"
    return summarize("Hessians, one micro-batch, eager", recorder, remark)


def measure_head(tracer: Tracer, model: Any, config: Any) -> dict[str, Any]:
    """The head in scoring, eager."""
    import torch

    from benchmarks.gpu_model import subject
    from benchmarks.gpu_model.accounting import Watch

    hidden_ND = tracer.empty(SCORED_TARGETS, config.model_dim, dtype=torch.bfloat16)
    targets_N = tracer.empty(SCORED_TARGETS)
    recorder = tracer.recorder()
    with torch.no_grad(), Watch(recorder):
        subject.loss_per_token(model, hidden_ND, targets_N)
    return summarize(f"head in scoring, {SCORED_TARGETS} targets, eager", recorder)


def measure_test_time_step(tracer: Tracer, model: Any, world_size: int) -> dict[str, Any]:
    """What a step of test-time training does after its backward pass: all-reduce, clip, SGD."""
    import torch

    from benchmarks.gpu_model import subject
    from benchmarks.gpu_model.accounting import Watch

    parameters = list(model.parameters())
    sgd = torch.optim.SGD(parameters, momentum=0.9, lr=0.1)
    give_gradients(model)
    recorder = tracer.recorder()
    with Watch(recorder):
        subject.add_up_gradients(parameters, world_size)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        sgd.step()
        sgd.zero_grad()
    return summarize("test-time step after its loss", recorder)


def quantize_column(work_NRC: Tensor, scales_NR: Tensor, upper_NCC: Tensor, column: int) -> None:
    """One column of the loop of `Quantizer.quantize`, written again, because the class itself asks whether
    values are finite, which fake tensors cannot tell. A change there is a change here."""
    codes_NR = (work_NRC[:, :, column] / scales_NR).clamp(-31, 31).round()
    errors_NR = (work_NRC[:, :, column] - codes_NR * scales_NR) / upper_NCC[:, column, column, None]
    work_NRC[:, :, column:].baddbmm_(errors_NR[:, :, None], upper_NCC[:, column, None, column:], alpha=-1)
    work_NRC[:, :, column] = codes_NR


def measure_gptq(tracer: Tracer, model: Any, config: Any) -> dict[str, Any]:
    """One pass of GPTQ over all matrices with Hessians, from the middle column of each."""
    import torch

    from benchmarks.gpu_model import subject
    from benchmarks.gpu_model.accounting import Watch

    per_parameter = {}
    for name, parameter in model.named_parameters():
        if not subject.has_hessians(config, name):  # rounded to nearest, in one go
            continue
        count, rows, columns = (1, 1, *parameter.shape)[-3:]
        middle = columns // 2
        work_NRC = torch.empty(count, rows, columns, device="cuda")
        scales_NR = torch.empty(count, rows, device="cuda")
        upper_NCC = torch.empty(count, columns, columns, device="cuda")
        recorder = tracer.recorder()
        with torch.no_grad(), Watch(recorder):
            quantize_column(work_NRC, scales_NR, upper_NCC, middle)
        # All but the update of the columns to come read one column and write one.
        launches = len(recorder.launches)
        column_bytes = 2 * 4 * count * rows
        update_bytes = column_bytes * (columns - middle)
        seconds = (launches - 1) * launch_seconds(tracer.card, column_bytes)
        seconds += launch_seconds(tracer.card, update_bytes)
        per_parameter[name] = {
            "columns": columns,
            "launches": launches * columns,
            "moved_bytes": update_bytes * columns,
            "seconds": seconds * columns,
        }
    total = {
        key: sum(one[key] for one in per_parameter.values())
        for key in ("columns", "launches", "moved_bytes", "seconds")
    }
    print(f"GPTQ, one pass: {total['columns']} columns, {total['launches']} launches, "
          f"{total['moved_bytes'] / 1e9:.0f} GB, {total['seconds']:.2f} s modelled")  # fmt: skip
    for name, one in per_parameter.items():
        print(f"    {name}: {one['columns']} columns, {one['launches']} launches, {one['seconds']:.3f} s")
    return {**total, "parameters": per_parameter}


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    census.add_subject_arguments(parser)
    options = parser.parse_args(arguments)
    tracer, config, model = census.build(options)
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=options.world, store=FakeStore())
    with tracer.fake_mode:
        result = {
            "optimizer": measure_optimizer(tracer, model, config, options.world),
            "optimizer_1_rank": measure_optimizer(tracer, model, config, 1),
            "hessians": measure_hessians(tracer, model, config),
            "head": measure_head(tracer, model, config),
            "test_time_step": measure_test_time_step(tracer, model, options.world),
            "gptq": measure_gptq(tracer, model, config),
        }
    dist.destroy_process_group()
    (tracer.folder / "eager_parts.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
