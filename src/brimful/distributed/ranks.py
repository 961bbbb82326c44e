"""The ranks that train one model together: which of them this is, and how they communicate."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from brimful.batches import BatchLayout
from brimful.errors import TrainingError, UsageError
from brimful.execution.out_of_memory import with_room
from brimful.job import Batch
from brimful.torch_utils.wrapper_tensors import inner_tensors
from brimful.utils.first_rank import is_first_rank

T = TypeVar("T")

_MOST_PORT = 2**16 - 1
_MOST_DIGITS = 10
"""Digits from which a number in the environment is refused; no launcher has that number of ranks."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Data-parallel ranks, seen from one of them. Methods that exchange values are collective."""

    rank: int = 0
    count: int = 1
    group: Any = None
    """Process group for numbers on the host; None is torch's default."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and shows output."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.count > 1

    def micro_batches(
        self, batch: Batch, micro_batch_size: int, layout: BatchLayout
    ) -> list[tuple[Batch, bool]]:
        """This rank's part of a global batch, in micro-batches; every rank has the same number of them.

        Args:
            batch: The global batch on the host, equal on every rank.
            micro_batch_size: Maximum samples per micro-batch.
            layout: Finds the batch's samples.

        Returns:
            Micro-batches, and whether they count: a rank with too few samples repeats its own first samples, or
            the batch's, without counting them.
        """
        if not self.is_distributed:
            return [(part, True) for part in layout.split(batch, micro_batch_size)]
        shares = torch.arange(layout.count(batch)).tensor_split(self.count)
        runs = math.ceil(len(shares[0]) / micro_batch_size)
        share = shares[self.rank]
        found = []
        if len(share):
            own = layout.part(batch, int(share[0]), int(share[-1]) + 1)
            found = [(part, True) for part in layout.split(own, micro_batch_size)]
        # two samples: BatchNorm refuses to normalise over one
        again = layout.take(batch, share[:2] if len(share) else torch.arange(min(2, layout.count(batch))))
        return found + [(again, False)] * (runs - len(found))

    def all_reduce(self, *values: float) -> tuple[float, ...]:
        """The sums of numbers over all ranks, equal on each."""
        if not self.is_distributed:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return tuple(total.tolist())

    def any(self, is_so: bool) -> bool:
        """Whether a condition holds on any rank."""
        return is_so if not self.is_distributed else self.all_reduce(float(is_so))[0] > 0

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        if not self.is_distributed:
            return [value]
        found: list[T | None] = [None] * self.count
        dist.all_gather_object(found, value, group=self.group)
        return found  # type: ignore[return-value]

    def broadcast(self, value: T | None) -> T:
        """The first rank's value, on every rank."""
        made = [value]
        if self.is_distributed:
            dist.broadcast_object_list(made, src=0, group=self.group)
        return made[0]  # type: ignore[return-value]

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy the first rank's buffers, such as BatchNorm's running statistics, to every rank."""
        if self.is_distributed:
            for buffer in model.buffers():
                dist.broadcast(buffer.detach(), src=0)

    def broadcast_parameters(self, model: nn.Module) -> None:
        """Copy the first rank's parameters and buffers to every rank."""
        self.broadcast_buffers(model)
        if self.is_distributed:
            for part in chain.from_iterable(map(inner_tensors, model.parameters())):
                dist.broadcast(part.detach(), src=0)

    def with_room(self, action: Callable[[], T], *, during: str) -> T:
        """Run an action that all ranks run together; in a single process, run it once more if memory runs out.

        `action` and `during` are those of `out_of_memory.with_room`, but `action` may wait for other ranks.
        Raises `OutOfMemoryError` if memory ran out in both calls.
        """
        return action() if self.is_distributed else with_room(action, during=during)

    def apart(self) -> Ranks:
        """These ranks with separate connections, for another thread."""
        return self if not self.is_distributed else replace(self, group=dist.new_group(backend="gloo"))

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_reduce(0.0)


SINGLE = Ranks()
"""The rank of a run in one process."""


def ranks_launched() -> int:
    """Number of ranks that a launcher (`torchrun`, `accelerate launch`) started, including this one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _number("WORLD_SIZE", 1, least=1)


def processors_here() -> int:
    """Processors that this process may use, divided by the ranks on its machine."""
    permitted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(permitted * nodes_launched() // ranks_launched(), 1)


def nodes_launched() -> int:
    """Number of machines, as far as the launcher reports it."""
    ranks, of_machine = ranks_launched(), _number("LOCAL_WORLD_SIZE", ranks_launched(), least=1)
    return ranks // of_machine if ranks % of_machine == 0 else 1


def current_rank() -> int:
    """Index of this rank, from 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return _number("RANK", 0) if ranks_launched() > 1 else 0


def shows_report(error: BaseException | None, own_task: str = "") -> bool:
    """Whether this process shows what all ranks could show: the first rank, and one with an error of its own.

    `error` is what ended the run here. What torch raises where another rank has gone is not this one's.
    `own_task` is that of a run which has no other ranks.
    """
    is_first = dist.get_rank() == 0 if dist.is_available() and dist.is_initialized() else is_first_rank()
    others = (SystemExit, KeyboardInterrupt, getattr(dist, "DistError", SystemExit))
    return is_first or bool(own_task) or (error is not None and not isinstance(error, others))


def trains_with_ranks() -> bool:
    """Whether this process exchanges gradients with others now."""
    is_connected = dist.is_available() and dist.is_initialized()
    return is_connected or not sys.modules.keys().isdisjoint(("horovod.torch", "mpi4py.MPI"))


def local_device(device: torch.device) -> torch.device:
    """A device with its GPU's index; without one, this rank's own GPU, or a single rank's current one."""
    if device.type != "cuda" or device.index is not None:
        return device
    if ranks_launched() > 1:
        return torch.device("cuda", _number("LOCAL_RANK", 0))
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def check_launch() -> None:
    """Raise `UsageError` unless a launcher set valid environment variables by which the ranks connect."""
    count = ranks_launched()
    if count == 1 or dist.is_initialized():
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {count}, so this process is one of {count} ranks, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Start it by `torchrun --nproc-per-node {count} "
            "-m brimful train …`, which sets them, or unset WORLD_SIZE to train in one process."
        )
    if current_rank() >= count:
        raise UsageError(
            f"RANK is {current_rank()}, and WORLD_SIZE is {count}: ranks count from 0 to {count - 1}."
        )
    if _number("MASTER_PORT", 0) > _MOST_PORT:
        raise UsageError(f"MASTER_PORT is {os.environ['MASTER_PORT']}; the largest port is {_MOST_PORT}.")


@contextmanager
def init_distributed(device: torch.device) -> Iterator[Ranks]:
    """Context in which the ranks of a launcher are connected; a single rank where there is no launcher.

    `device` is this rank's own. A process group that exists already is used, and stays. Raises `UsageError` if
    the launcher's environment variables are incomplete, `TrainingError` if the ranks cannot connect.
    """
    if ranks_launched() == 1:
        yield SINGLE
        return
    is_own = not dist.is_initialized()
    if is_own:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        check_launch()
        try:
            _connect(device)
        except (RuntimeError, OSError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = str(error).partition("\n")[0]
            raise TrainingError(
                f"rank {current_rank()} cannot connect to the others at {where}: {reason}"
            ) from error
    try:
        group = None if is_own else dist.new_group(backend="gloo")  # an existing group may be for GPUs alone
        yield Ranks(rank=dist.get_rank(), count=dist.get_world_size(), group=group)
    finally:
        if is_own:
            dist.destroy_process_group()
            # Reference cycles are collected now, not when the interpreter exits: then a thread that asks for
            # the interpreter is ended, and C++ ends the process by SIGABRT (seen once under FSDP2, torch 2.13).
            gc.collect()


def _connect(device: torch.device) -> None:
    """Create the process group; it uses gloo for tensors on the host in any case.

    On one machine, each launch gets its own prefix in the launcher's store. Under torchrun's static rendezvous,
    its default, entries of the previous launch are still there, and a rank would connect to one that has ended
    (torch 2.13, rendezvous.py, which assumes a new store for every retry).
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    launch = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if launch is None or nodes_launched() > 1:  # several machines do not count launches alike
        dist.init_process_group(backend)
        return
    store, rank, count = next(rendezvous("env://"))
    dist.init_process_group(backend, store=PrefixStore(f"launch {launch}", store), rank=rank, world_size=count)


def check_ranks(asked: int) -> None:
    """Raise `UsageError` unless the number of launched ranks is `asked`, the world size of the settings."""
    found = ranks_launched()
    if found == asked:
        return
    if found == 1:
        raise UsageError(
            f"the plan is for {asked} ranks, and this process is alone. Start it with "
            f"`torchrun --nproc-per-node {asked} -m brimful train …`, or plan for one."
        )
    raise UsageError(f"{found} ranks were launched, and the plan is for {asked}. Plan again for {found}.")


def _number(name: str, default: int, *, least: int = 0) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS and int(text) >= least):
        raise UsageError(
            f"the environment variable {name} is {text[:_MOST_DIGITS]!r}; launchers such as torchrun set it to "
            f"a whole number from {least} on. Unset it to train in one process."
        )
    return int(text)
