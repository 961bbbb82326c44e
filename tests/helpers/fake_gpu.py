"""A GPU that torch and NVML report, for tests on a machine without one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brimful.utils.quantities import MIB

RTX_3090 = "NVIDIA GeForce RTX 3090"


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """The module pynvml with one GPU.

    Args:
        total_mib: Memory.
        processes: MiB of each process that computes, by its number; None: not known.
        drawing: The same of processes that draw.
        unlisted_mib: Held, and listed for no process.
        clocks: MHz of multiprocessors and memory, and the bits of the bus; an RTX 3090's.
    """

    NVMLError = FakeNvmlError
    nvmlMemory_v2 = 2
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(
        self,
        total_mib: int,
        processes: dict[int, int | None],
        drawing: dict[int, int | None] | None = None,
        *,
        unlisted_mib: int = 0,
        clocks: tuple[int, int, int] = (1695, 9751, 384),
    ) -> None:
        self.total_mib, self.processes, self.drawing = total_mib, processes, drawing or {}
        self.unlisted_mib, self.clocks = unlisted_mib, clocks
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self.is_open
        if uuid != "GPU-0bad":
            raise FakeNvmlError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int) -> SimpleNamespace:
        assert (handle, version) == ("GPU-0bad", 2)
        listed = {**self.drawing, **self.processes}
        used = sum(size or 0 for size in listed.values()) + self.unlisted_mib
        return SimpleNamespace(free=(self.total_mib - used) * MIB, used=used * MIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return _listed(self.processes)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return _listed(self.drawing)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 8

    def nvmlDeviceGetMaxClockInfo(self, handle: str, clock: int) -> int:
        return self.clocks[clock - 1]

    def nvmlDeviceGetMemoryBusWidth(self, handle: str) -> int:
        return self.clocks[2]


def _listed(processes: dict[int, int | None]) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(pid=pid, usedGpuMemory=None if size is None else size * MIB)
        for pid, size in processes.items()
    ]


def put_gpu(
    patch: pytest.MonkeyPatch, nvml: FakeNvml | None, name: str = RTX_3090, **properties: Any
) -> SimpleNamespace:
    """Let torch and NVML report a GPU.

    Args:
        patch: Undoes it.
        nvml: None: there is no NVML.
        name: As the driver gives it.
        **properties: Of `torch.cuda.get_device_properties`.

    Returns:
        The properties.
    """
    total_mib = 24_123 if nvml is None else nvml.total_mib
    reported = SimpleNamespace(**{"name": name, "uuid": "0bad", "total_memory": total_mib * MIB} | properties)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: reported)
    patch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    patch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    patch.setitem(sys.modules, "pynvml", nvml)
    return reported
