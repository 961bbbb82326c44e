"""The properties of a GPU of this machine, from torch, and from NVML what torch does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from brimful.devices import GpuProperties
from brimful.errors import UsageError
from brimful.profiling.nvml import NvmlGpu, opened_gpu


def read_properties(device: torch.device) -> GpuProperties:
    """What torch and the driver report of a CUDA device of this machine; creates no CUDA context.

    Raises `UsageError` for a GPU of AMD.
    """
    reported = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        raise UsageError(
            f"{reported.name!r} is a GPU of AMD (this torch is built for ROCm {torch.version.hip}). What "
            "brimful knows of kernels, workspaces, contexts and rates is of NVIDIA's GPUs, and nothing of it "
            "was checked with ROCm. Describe the GPU for a prediction of low confidence, as if NVIDIA's "
            'kernels ran on it: --device "name=…,memory=…,bandwidth=…,tflops=…".'
        )
    is_integrated = bool(getattr(reported, "is_integrated", False))  # its memory and clock are the CPU's
    properties = GpuProperties(
        name=reported.name,
        capacity_bytes=reported.total_memory,
        compute_capability=_capability(reported),
        sm_count=_positive(reported, "multi_processor_count"),
        clock_hertz=_hertz(_positive(reported, "clock_rate")),
        memory_clock_hertz=None if is_integrated else _hertz(_positive(reported, "memory_clock_rate")),
        memory_bus_bits=_positive(reported, "memory_bus_width"),
        l2_bytes=_positive(reported, "L2_cache_size"),
    )
    with opened_gpu(device) as gpu:
        return properties if gpu is None or is_integrated else _completed(properties, gpu)


def _completed(properties: GpuProperties, gpu: NvmlGpu) -> GpuProperties:
    """The properties with NVML's figures where torch has none."""
    nvml, handle = gpu
    generation = _asked(gpu, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    lanes = _asked(gpu, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    properties = replace(properties, link_generation=generation, link_lanes=lanes)
    if None not in (properties.clock_hertz, properties.memory_clock_hertz, properties.memory_bus_bits):
        return properties
    clock = _asked(gpu, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    memory_clock = _asked(gpu, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM))
    bus = _asked(gpu, lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle))
    return replace(
        properties,
        clock_hertz=properties.clock_hertz or (None if clock is None else clock * 1e6),
        memory_clock_hertz=properties.memory_clock_hertz
        or (None if memory_clock is None else memory_clock * 1e6),
        memory_bus_bits=properties.memory_bus_bits or bus,
        clock_source="torch and NVML, whose highest clock may be above the rated one",
    )


def _asked(gpu: NvmlGpu, ask: Callable[[], Any]) -> int | None:
    try:
        return int(ask()) or None
    except gpu.nvml.NVMLError:  # not supported by this GPU or driver
        return None


def _capability(reported: Any) -> tuple[int, int] | None:
    major, minor = getattr(reported, "major", None), getattr(reported, "minor", None)
    return None if major is None or minor is None else (major, minor)


def _positive(reported: Any, name: str) -> int | None:
    """A property that older versions of torch lack, and that virtual GPUs report as 0."""
    return getattr(reported, name, None) or None


def _hertz(kilohertz: int | None) -> float | None:
    return None if kilohertz is None else kilohertz * 1e3
