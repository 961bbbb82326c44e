"""The most memory that one training step holds, measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from brimful.errors import UsageError
from brimful.measurement import OpTemporary
from brimful.measuring.cpu_memory import record_cpu_memory
from brimful.measuring.cuda_memory import CudaPeak, record_cuda_memory
from brimful.measuring.residents import resident_bytes


@dataclass(slots=True, kw_only=True)
class PeakMemory:
    """What a step took; filled in when it has ended."""

    allocated_bytes: int = 0
    """Peak of bytes in tensors, parameters and optimizer state included."""
    reserved_bytes: int = 0
    """Peak of bytes held by the caching allocator; on a CPU, which caches nothing, the same as allocated."""
    device_bytes: int | None = None
    """What the driver shows for the process at that peak; None on a CPU, and where the driver cannot tell."""
    temporaries_at_peak: tuple[OpTemporary, ...] = ()
    """Op-internal temporaries live at the peak, largest first; seen on a CPU only."""


@contextmanager
def peak_memory(
    model: nn.Module, optimizer: Optimizer, device: torch.device | str, *, held_besides_bytes: int = 0
) -> Iterator[PeakMemory]:
    """Measure the peak memory of the steps that run inside the context.

    On CUDA it costs next to nothing. On a CPU a profiler records every op, so steps inside it are slow and not
    to be timed.

    Args:
        model: On `device`; with its optimizer it is what is held before the first step.
        optimizer: Over the parameters of `model`.
        device: Where the steps run.
        held_besides_bytes: What is held from before that is in neither, such as DDP's buckets. Only a CPU is to
            be told.

    Yields:
        What was measured, once the context has ended without an error.

    Raises:
        UsageError: `device` is neither a CPU nor a CUDA device.
    """
    device = torch.device(device)
    peak = PeakMemory()
    if device.type == "cuda":
        with record_cuda_memory(device) as cuda:
            yield peak
        _fill_from_cuda(peak, cuda)
    elif device.type == "cpu":
        resident = resident_bytes(model, optimizer)
        with record_cpu_memory() as cpu:
            yield peak
        peak.allocated_bytes = peak.reserved_bytes = resident + held_besides_bytes + cpu.peak_bytes
        peak.temporaries_at_peak = cpu.temporaries_at_peak
    else:
        raise UsageError(f"memory is measured on a CPU or a CUDA device, not on {device.type!r}.")


def _fill_from_cuda(peak: PeakMemory, cuda: CudaPeak) -> None:
    peak.allocated_bytes = cuda.allocated_bytes
    peak.reserved_bytes = cuda.reserved_bytes
    peak.device_bytes = cuda.device_bytes
