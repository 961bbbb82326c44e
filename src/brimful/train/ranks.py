"""The processes that train one model together: which of them this is, and what they tell each other."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from brimful.batches import count_samples, split_batch, take
from brimful.errors import UsageError
from brimful.job import Batch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Data-parallel ranks, seen from one of them. What is not a question is asked of all at once."""

    rank: int = 0
    count: int = 1
    group: Any = None
    """Over which numbers on the host go; None is torch's default."""

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes, and is shown."""
        return self.rank == 0

    @property
    def are_several(self) -> bool:
        """Whether there is another."""
        return self.count > 1

    def micro_batches(self, batch: Batch, micro_batch_size: int) -> list[tuple[Batch, bool]]:
        """This rank's part of a global batch, in micro-batches: as many on each rank, as they run together.

        Args:
            batch: On the host, the same on every rank.
            micro_batch_size: Most samples of each.

        Returns:
            Micro-batches, and whether they count: a rank with too few samples runs its own, or the batch's
            first, once more for nothing.
        """
        if not self.are_several:
            return [(part, True) for part in split_batch(batch, micro_batch_size)]
        shares = torch.arange(count_samples(batch)).tensor_split(self.count)
        runs = math.ceil(len(shares[0]) / micro_batch_size)
        share = shares[self.rank]
        found = (
            [(part, True) for part in split_batch(take(batch, share), micro_batch_size)] if len(share) else []
        )
        # two samples: BatchNorm refuses to normalise over one
        again = take(batch, share[:2] if len(share) else torch.arange(min(2, count_samples(batch))))
        return found + [(again, False)] * (runs - len(found))

    def sum(self, *values: float) -> tuple[float, ...]:
        """The sums of some numbers over the ranks, the same on each."""
        if not self.are_several:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return tuple(total.tolist())

    def any(self, is_so: bool) -> bool:
        """Whether something is so on any rank."""
        return is_so if not self.are_several else self.sum(float(is_so))[0] > 0

    def gather(self, value: T) -> list[T]:
        """What each rank has of something, by rank."""
        if not self.are_several:
            return [value]
        found: list[T | None] = [None] * self.count
        dist.all_gather_object(found, value, group=self.group)
        return found  # type: ignore[return-value]

    def of_first(self, value: T | None) -> T:
        """What the first rank has of something, on every rank."""
        made = [value]
        if self.are_several:
            dist.broadcast_object_list(made, src=0, group=self.group)
        return made[0]  # type: ignore[return-value]

    def take_buffers_of_first(self, model: nn.Module) -> None:
        """Give every rank the first one's buffers, such as BatchNorm's running statistics."""
        if self.are_several:
            for buffer in model.buffers():
                dist.broadcast(buffer.detach(), src=0)

    def take_parameters_of_first(self, model: nn.Module) -> None:
        """Give every rank the first one's parameters and buffers."""
        self.take_buffers_of_first(model)
        if self.are_several:
            for parameter in model.parameters():
                dist.broadcast(parameter.detach(), src=0)

    def apart(self) -> Ranks:
        """The same ranks over connections of their own, for a thread beside this one."""
        return self if not self.are_several else replace(self, group=dist.new_group(backend="gloo"))

    def wait(self) -> None:
        """Until every rank is here."""
        self.sum(0.0)


ALONE = Ranks()
"""One process."""


def ranks_launched() -> int:
    """How many ranks a launcher started, this one included: `torchrun` and `accelerate launch` say so."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _number("WORLD_SIZE", 1)


def processors_here() -> int:
    """Processors that this process may use, divided by the ranks on its machine."""
    permitted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(permitted * nodes_launched() // ranks_launched(), 1)


def nodes_launched() -> int:
    """On how many machines, as far as the launcher says."""
    ranks, of_machine = ranks_launched(), _number("LOCAL_WORLD_SIZE", ranks_launched())
    return ranks // of_machine if of_machine and ranks % of_machine == 0 else 1


def rank_here() -> int:
    """Which of them this is, from 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return _number("RANK", 0)


def device_here(device: torch.device) -> torch.device:
    """This rank's own GPU, where several are launched on a machine and none is named."""
    if device.type != "cuda" or device.index is not None or ranks_launched() == 1:
        return device
    return torch.device("cuda", _number("LOCAL_RANK", 0))


@contextmanager
def joined_ranks(device: torch.device) -> Iterator[Ranks]:
    """Within, the ranks of a launcher are connected; alone where there is no launcher.

    Args:
        device: This rank's own.

    Yields:
        The ranks. A process group that is there already is used, and stays.
    """
    if ranks_launched() == 1:
        yield ALONE
        return
    is_own = not dist.is_initialized()
    if is_own:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _connect(device)
    try:
        group = None if is_own else dist.new_group(backend="gloo")  # another's may be for GPUs alone
        yield Ranks(rank=dist.get_rank(), count=dist.get_world_size(), group=group)
    finally:
        if is_own:
            dist.destroy_process_group()
            # What is left of it in cycles goes now, not with the interpreter: there a thread that asks for the
            # interpreter is ended, and C++ ends the process by SIGABRT (seen once under FSDP2, torch 2.13).
            gc.collect()


def _connect(device: torch.device) -> None:
    """Make the process group; what ranks tell each other of numbers on the host goes over gloo in any case.

    On one machine, each launch gets its own names in the launcher's store. Under torchrun's static rendezvous,
    its default, those of the launch before are still there, and a rank would call one that has ended (torch
    2.13, rendezvous.py: a new store for every retry is taken for granted).
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    launch = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if launch is None or nodes_launched() > 1:  # several machines do not count launches alike
        dist.init_process_group(backend)
        return
    store, rank, count = next(rendezvous("env://"))
    dist.init_process_group(backend, store=PrefixStore(f"launch {launch}", store), rank=rank, world_size=count)


def check_ranks(asked: int) -> None:
    """Check that as many ranks were launched as settings are for.

    Args:
        asked: Ranks of the settings.

    Raises:
        UsageError: They were not.
    """
    found = ranks_launched()
    if found == asked:
        return
    if found == 1:
        raise UsageError(
            f"the plan is for {asked} ranks, and this process is alone. Start it with "
            f"`torchrun --nproc-per-node {asked} -m brimful train …`, or plan for one."
        )
    raise UsageError(f"{found} ranks were launched, and the plan is for {asked}. Plan again for {found}.")


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default
