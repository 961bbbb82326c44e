"""Peak memory on a CUDA device: the allocator's own counters, and what the driver shows for the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from brimful.profiling.nvml import opened_gpu


@dataclass(slots=True, kw_only=True)
class CudaPeak:
    """Peaks of the recorded code; filled in when it has ended."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    device_bytes: int | None = None
    device: torch.device

    def count_from_here(self) -> None:
        """Ignore peaks before this call."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)


@contextmanager
def record_cuda_memory(device: torch.device) -> Iterator[CudaPeak]:
    """Record the peaks of what runs on `device` inside the context.

    The allocator keeps its cache: as in a training run, what earlier steps left counts as reserved.
    """
    peak = CudaPeak(device=device)
    peak.count_from_here()
    yield peak
    torch.cuda.synchronize(device)
    peak.allocated_bytes = torch.cuda.max_memory_allocated(device)
    peak.reserved_bytes = torch.cuda.max_memory_reserved(device)
    process_bytes = process_device_bytes(device)
    if process_bytes is not None:
        # The driver reports current memory. The context does not change, so the peak differs by the
        # allocator's.
        peak.device_bytes = process_bytes - torch.cuda.memory_reserved(device) + peak.reserved_bytes


def process_device_bytes(device: torch.device) -> int | None:
    """Bytes of a CUDA device's memory that this process holds, as nvidia-smi shows; None if not known.

    In a container NVML lists no process for this one, or one by its number on the host. Then, if at most one
    process is listed, all used memory of the device counts.
    """
    with opened_gpu(device) as gpu:
        computing = None if gpu is None else gpu.computing()
        if gpu is None or computing is None:
            return None
        own_bytes = computing.get(os.getpid())
        if own_bytes is not None or len(computing) > 1:
            return own_bytes
        memory = gpu.memory()
    return None if memory is None else int(memory.used)
