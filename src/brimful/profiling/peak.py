"""The most memory that one training step holds, measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.errors import UsageError
from brimful.execution.setup import device_name
from brimful.job import Batch
from brimful.profiling.cpu_memory import CpuPeak, record_cpu_memory
from brimful.profiling.cuda_memory import CudaPeak, record_cuda_memory
from brimful.profiling.residents import resident_storages, tensor_storages
from brimful.results import Measurement, OpTemporary


@dataclass(slots=True, kw_only=True)
class PeakMemory:
    """Peak memory of a step; filled in when it has ended."""

    allocated_bytes: int = 0
    """Peak of bytes in tensors, parameters and optimizer state included."""
    reserved_bytes: int = 0
    """Peak of bytes held by the caching allocator; on a CPU, which caches nothing, the same as allocated."""
    device_bytes: int | None = None
    """What the driver shows for the process at that peak; None on a CPU, or if the driver cannot report it."""
    temporaries_at_peak: tuple[OpTemporary, ...] = ()
    """Op-internal temporaries live at the peak, largest first; seen on a CPU only."""


def larger_peak(one: PeakMemory | None, other: PeakMemory) -> PeakMemory:
    """The highest of two peaks in each of their fields."""
    if one is None:
        return other
    larger = max(one, other, key=lambda peak: peak.allocated_bytes)
    return PeakMemory(
        allocated_bytes=larger.allocated_bytes,
        reserved_bytes=max(one.reserved_bytes, other.reserved_bytes),
        device_bytes=max((peak.device_bytes for peak in (one, other) if peak.device_bytes), default=None),
        temporaries_at_peak=larger.temporaries_at_peak,
    )


@contextmanager
def peak_memory(
    model: nn.Module,
    optimizer: Optimizer,
    device: torch.device | str,
    *,
    batch: Batch = None,
    held_besides: Iterable[Tensor] = (),
) -> Iterator[PeakMemory]:
    """Measure the peak memory of the steps that run inside the context.

    On CUDA it costs next to nothing. On a CPU a profiler records every op, so steps inside it are slow and not
    to be timed.

    Args:
        model: On `device`; with its optimizer it is what is held before the first step. On a CPU, whatever else
            ops read that was there before counts too, such as a teacher's weights.
        optimizer: Over the parameters of `model`.
        device: Where the steps run.
        batch: The global batch that the step is on, which is in a CPU's memory.
        held_besides: Other tensors that are held between steps, such as the flat parameters of ZeRO: on a CPU
            they count whether or not an op reads them.

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
        found = peak_of_cuda(cuda)
    elif device.type == "cpu":
        residents = resident_storages(model, optimizer)
        with record_cpu_memory() as cpu:
            yield peak
        found = peak_of_cpu(cpu, residents, batch, held_besides=held_besides)
    else:
        raise UsageError(f"memory is measured on a CPU or a CUDA device, not on {device.type!r}.")
    for field in fields(PeakMemory):
        setattr(peak, field.name, getattr(found, field.name))


def peak_of_cpu(
    cpu: CpuPeak, residents: Mapping[int, int], batch: Batch, *, held_besides: Iterable[Tensor] = ()
) -> PeakMemory:
    """Memory held at a recorded peak.

    Args:
        cpu: What was recorded.
        residents: Bytes of storages from before, by address.
        batch: From before, too.
        held_besides: Other tensors from before.

    Returns:
        The peak.
    """
    held = {**cpu.read_from_before, **tensor_storages([batch, *held_besides]), **residents}
    peak_bytes = sum(held.values()) + cpu.peak_bytes
    return PeakMemory(
        allocated_bytes=peak_bytes, reserved_bytes=peak_bytes, temporaries_at_peak=cpu.temporaries_at_peak
    )


def peak_of_cuda(cuda: CudaPeak) -> PeakMemory:
    """Counters of the allocator and the driver at a recorded peak."""
    return PeakMemory(
        allocated_bytes=cuda.allocated_bytes,
        reserved_bytes=cuda.reserved_bytes,
        device_bytes=cuda.device_bytes,
    )


def measurement_of(
    peak: PeakMemory,
    seconds: Sequence[float],
    device: torch.device,
    *,
    loss: float | None,
    core_wait_fraction: float | None,
) -> Measurement:
    """The record of a measured step.

    Args:
        peak: What one step held.
        seconds: How long others took.
        device: Where they ran.
        loss: Of the first step; None if it is not known.
        core_wait_fraction: Of the time of the timed steps, as `WaitsForCores` measures it.

    Returns:
        Peak memory, and the median time with its range.
    """
    return Measurement(
        device=device_name(device),
        measured_peak_allocated_bytes=peak.allocated_bytes,
        measured_peak_reserved_bytes=peak.reserved_bytes,
        measured_peak_device_bytes=peak.device_bytes,
        measured_step_seconds=statistics.median(seconds),
        measured_steps=len(seconds),
        shortest_step_seconds=min(seconds),
        longest_step_seconds=max(seconds),
        core_wait_fraction=core_wait_fraction if device.type == "cpu" else None,
        loss=loss,
        temporaries_at_peak=peak.temporaries_at_peak,
    )
