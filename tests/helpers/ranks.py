"""Runs a function in several processes that talk over gloo."""

from __future__ import annotations

import faulthandler
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException

_TIMEOUT = timedelta(seconds=60)
"""For a collective that one rank never comes to."""

_DEADLINE_SECONDS = 240

# Ranks are forks of a process that has imported this once.
set_forkserver_preload(["torch.distributed", "brimful.api", "brimful.trainer", "helpers.ranks"])


def on_ranks(work: Callable[..., Any], *arguments: Any, count: int = 2) -> list[Any]:
    """What `work(*arguments)` returns on each rank.

    Args:
        work: A function of an importable module; what it returns can be pickled.
        arguments: Its arguments.
        count: Ranks.

    Returns:
        By rank.
    """
    try:
        return _on_ranks(work, arguments, count)
    except ProcessExitedException as error:
        if error.signal_name != "SIGABRT":
            raise
        # torch 2.13 aborted with "free(): invalid pointer" in 1 of about 120 runs of FSDP2 over gloo, where no
        # code of brimful is native. Each rank prints its stacks then; a second abort in a row fails.
        print(f"{work.__name__}: {error}; run once more.", file=sys.stderr)
        return _on_ranks(work, arguments, count)


def _on_ranks(work: Callable[..., Any], arguments: tuple[Any, ...], count: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.start_processes(
            _run, (count, folder, work, arguments), nprocs=count, join=False, start_method="forkserver"
        )
        assert context is not None
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{work.__name__} took more than {_DEADLINE_SECONDS} s on {count} ranks.")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(count)]


def one_after_another(works: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """What several functions return, each with its arguments: processes are launched once for all of them."""
    return [work(*arguments) for work, arguments in works]


def _run(rank: int, count: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=_TIMEOUT)
    try:
        torch.save(work(*arguments), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
        gc.collect()  # as `init_distributed` does
