"""Two processes on this machine that talk over gloo.

Its threads finish a collective after the process that waited for it, and until then hold what it needed; how
much of it at the peak is chance. NCCL has no such threads. So memory is measured as it runs, and with a pause
after each collective, in which they let go.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

T = TypeVar("T")

RANKS = 2
PAUSE_SECONDS = 0.03
COLLECTIVES = (
    *("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"),  # DeepSpeed's
    *("all_gather_single", "reduce_scatter_single"),  # FSDP2's of torch 2.13
)


def on_ranks(run: Callable[[], T], *, pauses: bool = False) -> list[T]:
    """What a function gives on each rank.

    Args:
        run: Can be pickled, as can what it gives.
        pauses: After each collective, in which gloo's threads let go.

    Returns:
        By rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (folder, run, pauses), nprocs=RANKS)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def _rank(rank: int, folder: str, run: Callable[[], T], pauses: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for name in COLLECTIVES if pauses else ():
        if hasattr(dist, name):
            setattr(dist, name, _pausing(getattr(dist, name)))
    torch.save(run(), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def _pausing(collective: Any) -> Any:
    def paused(*arguments: Any, **options: Any) -> Any:
        work = collective(*arguments, **options)
        time.sleep(PAUSE_SECONDS)
        return work

    return paused
