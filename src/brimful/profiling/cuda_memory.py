"""Peak memory on a CUDA device: the allocator's own counters, and what the driver shows for the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch


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
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return _process_bytes(pynvml, device)
    except pynvml.NVMLError:
        return None
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _process_bytes(nvml: Any, device: torch.device) -> int | None:
    # By UUID, as NVML ignores CUDA_VISIBLE_DEVICES.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    if own and own[0] is not None:
        return int(own[0])
    if len(processes) > 1:
        return None
    # Version 2 excludes what the driver reserves for itself; version 1 counts it as used.
    return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
