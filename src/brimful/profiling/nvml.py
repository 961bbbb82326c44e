"""GPUs of this machine as NVIDIA's management library knows them: memory, and the processes that hold it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]  # psutil ships no annotations
import torch

from brimful.utils.decode_errors import one_line

_HOST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the namespace in which process numbers are the host's. Source: Linux, include/linux/proc_ns.h,
PROC_PID_INIT_INO."""


class NvmlGpu(NamedTuple):
    """A GPU as NVML knows it."""

    nvml: Any
    """The module."""
    handle: Any

    def memory(self) -> Any | None:
        """Its `total`, `free` and `used` bytes; None if NVML reports none, as where CPU and GPU share it.

        Version 2 excludes what the driver reserves for itself; version 1 counts it as used.
        """
        with suppress(self.nvml.NVMLError):
            return self.nvml.nvmlDeviceGetMemoryInfo(self.handle, version=self.nvml.nvmlMemory_v2)
        return None

    def processes(self) -> dict[int, int | None]:
        """Processes that compute or draw, with their bytes; None where the driver does not know."""
        found = self.computing() or {}
        with suppress(self.nvml.NVMLError):
            for process in self.nvml.nvmlDeviceGetGraphicsRunningProcesses(self.handle):
                found[process.pid] = max(found.get(process.pid) or 0, process.usedGpuMemory or 0) or None
        return found

    def computing(self) -> dict[int, int | None] | None:
        """Processes that compute, with their bytes; None if NVML does not list them."""
        with suppress(self.nvml.NVMLError):
            listed = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
            return {process.pid: process.usedGpuMemory for process in listed}
        return None


@contextmanager
def opened_nvml() -> Iterator[Any | None]:
    """Yield the module of NVML; None without it, or without a driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


@contextmanager
def opened_gpu(device: torch.device) -> Iterator[NvmlGpu | None]:
    """Yield a CUDA device as NVML knows it; None without NVML, or if NVML does not know this GPU."""
    with opened_nvml() as nvml:
        handle = None if nvml is None else _handle(nvml, device)
        yield None if handle is None else NvmlGpu(nvml, handle)


def _handle(nvml: Any, device: torch.device) -> Any:
    # By UUID, as NVML ignores CUDA_VISIBLE_DEVICES.
    uuid = torch.cuda.get_device_properties(device).uuid
    for kind in ("GPU", "MIG"):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds memory of a GPU."""

    pid: int
    held_bytes: int | None
    """None if the driver does not know, as on Windows."""
    process: str | None
    """Its name; None, as are user, age and command, if it cannot be seen from here, as inside a container."""
    user: str | None
    age_seconds: float | None
    command: str | None
    is_own: bool
    """Whether it is of the user who asks, and neither this process nor one that started it."""

    @classmethod
    def of(cls, pid: int, held_bytes: int | None, *, is_hidden: bool) -> Holder:
        """A process by its number; nothing more of it is known if it `is_hidden`."""
        process = user = age_seconds = command = None
        is_own = False
        if not is_hidden:
            with suppress(psutil.Error):
                seen = psutil.Process(pid)
                process = command = one_line(seen.name())
                age_seconds = time.time() - seen.create_time()
                user = seen.username()
                is_own = user == psutil.Process().username() and pid not in this_and_its_parents()
                command = one_line(" ".join(seen.cmdline()) or command)
        return cls(
            pid=pid,
            held_bytes=held_bytes,
            process=process,
            user=user,
            age_seconds=age_seconds,
            command=command,
            is_own=is_own,
        )


def this_and_its_parents() -> set[int]:
    """Numbers of this process, and of those that started it."""
    found = {os.getpid()}
    with suppress(psutil.Error):
        found |= {each.pid for each in psutil.Process().parents()}
    return found


def has_own_process_numbers(namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    """Whether processes have other numbers here than on the host, as in a container.

    The driver lists them by the numbers of the host, which are of others here. False also where the system has
    no such namespaces, or does not report them.
    """
    with suppress(OSError):
        return str(namespace.readlink()) != f"pid:[{_HOST_PID_NAMESPACE}]"
    return False
