"""A function on several ranks of a process group, each in a process of its own."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.support.processes import ONE_THREAD, environment
from tests.support.waiting import DEADLINE_SECONDS
from train_gpt import Machine

DEADLINE = timedelta(seconds=DEADLINE_SECONDS)  # for ranks that wait for one another in vain


def on_ranks(count: int, folder: Path, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(machine, *arguments)` on so many ranks; an error on one of them is raised here.

    folder: an empty one, where the ranks meet. The function stands at the top of its module, so that another
    process finds it.
    """
    meeting_place = f"file://{folder}/meeting_place"
    with environment(ONE_THREAD):
        torch.multiprocessing.start_processes(
            as_one_rank, (count, meeting_place, function, arguments), nprocs=count, start_method="forkserver"
        )


def as_one_rank(
    rank: int, count: int, meeting_place: str, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """In the new process: join the others, do the work, and leave together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting_place, rank=rank, world_size=count, timeout=DEADLINE)
    function(Machine(rank, count), *arguments)
    # A rank that left while another one still talks to it would make that one fail.
    dist.barrier()
    # As the script ends: threads of the group that are still at work cannot fail in a process that is over.
    os._exit(0)
