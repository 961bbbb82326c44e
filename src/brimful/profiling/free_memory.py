"""The memory of a GPU of this machine that is free now, and the processes that hold the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]  # psutil ships no annotations
import torch
from torch import nn

from brimful.errors import InfeasibleError
from brimful.execution.setup import choose_device, is_of_this_machine
from brimful.job import Job
from brimful.profiling.local_device import local_gpu
from brimful.profiling.nvml import Holder, NvmlGpu, has_own_process_numbers, opened_gpu
from brimful.torch_utils.wrapper_tensors import inner_tensors
from brimful.utils.quantities import format_bytes

WORTH_SAYING_FRACTION = 0.01
"""Fraction of a GPU's memory: what others hold below this is counted and not reported. A choice."""
_LISTED_HOLDERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Who holds the memory of a GPU now."""

    device: str
    """As the driver names it."""
    capacity_bytes: int
    available_bytes: int
    """What this process may have: what is free, and what it holds already, but for tensors of its own."""
    own_tensor_bytes: int
    """Tensors of this process on the GPU that are not of the job's model."""
    holders: tuple[Holder, ...]
    """Other processes, the largest first."""
    unlisted_bytes: int
    """Held by what the driver does not list: other containers, the desktop, the driver itself."""

    @property
    def held_bytes(self) -> int:
        """What this process cannot have."""
        return max(self.capacity_bytes - self.available_bytes, 0)

    @property
    def is_worth_saying(self) -> bool:
        """Whether so much is held that a reader should know who holds it."""
        return self.held_bytes > WORTH_SAYING_FRACTION * self.capacity_bytes

    def describe(self) -> str:
        """A sentence on what is free, and who holds the rest: process, user and bytes."""
        listed = [_described(holder) for holder in self.holders[:_LISTED_HOLDERS]]
        if len(self.holders) > _LISTED_HOLDERS:
            rest = self.holders[_LISTED_HOLDERS:]
            more = sum(holder.held_bytes or 0 for holder in rest)
            listed.append(f"{format_bytes(more)} by {len(rest)} more processes")
        if self.own_tensor_bytes:
            size = format_bytes(self.own_tensor_bytes)
            listed.append(f"{size} by tensors of this process (pid {os.getpid()}), which `del` frees")
        if self.unlisted_bytes > WORTH_SAYING_FRACTION * self.capacity_bytes:
            listed.append(f"{format_bytes(self.unlisted_bytes)} by what the driver does not list")
        free, whole = format_bytes(self.available_bytes), format_bytes(self.capacity_bytes)
        return (
            f"{free} of the {whole} of {self.device} can be used now; held: {', '.join(listed) or 'the rest'}."
        )


def _described(holder: Holder) -> str:
    """Text such as "9.1 GiB by python, a notebook kernel (pid 4711, user anna)"."""
    size = "an unknown size" if holder.held_bytes is None else format_bytes(holder.held_bytes)
    user = f", user {holder.user}" if holder.user else ""
    name = holder.process or "a process that cannot be seen from here"
    is_notebook = any(each in (holder.command or "") for each in ("ipykernel", "colab_kernel"))
    return f"{size} by {name}{', a notebook kernel' if is_notebook else ''} (pid {holder.pid}{user})"


def device_memory(device: torch.device, job: Job | None = None) -> DeviceMemory:
    """The memory of a GPU of this machine that this process may have now, and who holds the rest.

    Parameters and buffers of the job's model may be on the GPU already, as training uses them. Without NVML the
    holders are not known, and asking torch creates a CUDA context.
    """
    properties = torch.cuda.get_device_properties(device)
    own_tensor_bytes = max(torch.cuda.memory_allocated(device) - _model_bytes(job, device), 0)
    with opened_gpu(device) as gpu:
        usage = None if gpu is None else _usage(gpu, device)
    if usage is None:
        usage = torch.cuda.mem_get_info(device)[0], _reserved_and_context_bytes(device), []
    free_bytes, own_bytes, holders = usage
    capacity_bytes = int(properties.total_memory)
    reachable = min(free_bytes + own_bytes, capacity_bytes)
    listed = sum(holder.held_bytes or 0 for holder in holders)
    return DeviceMemory(
        device=properties.name,
        capacity_bytes=capacity_bytes,
        available_bytes=max(reachable - own_tensor_bytes, 0),
        own_tensor_bytes=own_tensor_bytes,
        holders=tuple(sorted(holders, key=lambda holder: -(holder.held_bytes or 0))),
        unlisted_bytes=max(capacity_bytes - reachable - listed, 0),
    )


def memory_here(job: Job, device: object, *, ranks_of_machine: int = 1) -> DeviceMemory | None:
    """The memory of the GPU of this machine that a device means; None if it means none.

    If `ranks_of_machine` ranks train on this machine, each on its own GPU, it is the memory of the one of these
    GPUs with the least available.
    """
    if not is_of_this_machine(device):
        return None
    where = choose_device(device, None)  # type: ignore[arg-type]  # it was checked above
    if where.type != "cuda":
        return None
    count = min(ranks_of_machine, torch.cuda.device_count())
    devices = [torch.device("cuda", index) for index in range(count)] if count > 1 else [where]
    return min((device_memory(each, job) for each in devices), key=lambda memory: memory.available_bytes)


def memory_notes(memory: DeviceMemory | None, budget_bytes: int) -> list[str]:
    """Notes of a plan on the memory that others hold: one where it is worth saying, else none.

    `memory` is None for a GPU elsewhere. The budget may be the user's, and more than is free now.
    """
    if memory is None or not memory.is_worth_saying:
        return []
    if budget_bytes > memory.available_bytes:
        return [
            f"The budget of {format_bytes(budget_bytes)} is more than can be used now: {memory.describe()} "
            "Such a run needs that memory to be freed first."
        ]
    return [f"The memory of this GPU is shared: {memory.describe()}"]


@contextmanager
def explains_memory(memory: DeviceMemory | None) -> Iterator[None]:
    """Add to an `InfeasibleError` who holds the memory of the GPU."""
    try:
        yield
    except InfeasibleError as error:
        if memory is not None and memory.is_worth_saying:
            error.add_note(f"  {memory.describe()}")
        raise


def _usage(gpu: NvmlGpu, device: torch.device) -> tuple[int, int, list[Holder]] | None:
    """Free bytes, those of this process and its sibling ranks, and other holders; None if NVML knows none."""
    memory = gpu.memory()
    if memory is None:
        return None
    held = gpu.processes()
    own_pids = _own_pids()
    own_bytes = sum(size or 0 for pid, size in held.items() if pid in own_pids)
    # Not `torch.cuda.is_initialized()`: reading the properties of a GPU sets it, and creates no context.
    is_listed, has_cache = os.getpid() in held, torch.cuda.memory_reserved(device) > 0
    if not own_bytes and (is_listed or has_cache):
        own_bytes = _reserved_and_context_bytes(device)
    are_foreign = not is_listed and (has_cache or has_own_process_numbers())
    others = {pid: size for pid, size in held.items() if pid not in own_pids}
    holders = [Holder.of(pid, size, is_hidden=are_foreign) for pid, size in others.items()]
    return int(memory.free), own_bytes, holders


def _reserved_and_context_bytes(device: torch.device) -> int:
    """What this process holds on a GPU, where the driver does not list it: a budget includes its context."""
    return torch.cuda.memory_reserved(device) + local_gpu(device).context_bytes


def _own_pids() -> set[int]:
    """This process, and under a launcher the other ranks of this machine, which it started beside this one."""
    own = {os.getpid()}
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        with suppress(psutil.Error):
            launcher = psutil.Process().parent()
            own |= {child.pid for child in launcher.children()} if launcher is not None else set()
    return own


def _model_bytes(job: Job | None, device: torch.device) -> int:
    """Bytes of the job's model that are on the GPU already, if it was built before."""
    if job is None or not isinstance(job.model, nn.Module):
        return 0
    held = (*job.model.parameters(), *job.model.buffers())
    tensors = [part for tensor in held for part in inner_tensors(tensor)]
    storages = {
        storage.data_ptr(): storage.nbytes()
        for tensor in tensors
        if tensor.device.type == device.type
        and device.index in (None, tensor.device.index)
        and (storage := tensor.untyped_storage()).nbytes()
    }
    return sum(storages.values())
