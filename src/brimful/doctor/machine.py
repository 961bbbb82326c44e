"""This machine: its GPUs, who holds their memory, and the settings of torch that decide how it is used."""

from __future__ import annotations

import csv
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from shutil import which
from typing import Any

import psutil  # type: ignore[import-untyped]  # psutil ships no annotations
import torch

from brimful.devices.this_machine import memory_limits_bytes
from brimful.errors import UsageError
from brimful.memory import AllocatorSettings
from brimful.profiling.nvml import (
    Holder,
    NvmlGpu,
    has_own_process_numbers,
    opened_nvml,
    this_and_its_parents,
)
from brimful.utils.decode_errors import one_line
from brimful.utils.quantities import MIB

_SMI_SECONDS = 30
_END_SECONDS = 10.0
"""How long a process is given to end. A choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineGpu:
    """A GPU as the driver knows it."""

    index: int
    name: str
    total_bytes: int | None
    """None, as are free bytes, if the driver does not know, as where CPU and GPU share their memory."""
    free_bytes: int | None
    holders: tuple[Holder, ...]
    """The largest first."""

    @property
    def unlisted_bytes(self) -> int:
        """Bytes in use that belong to no listed process: other containers, the desktop, the driver."""
        if self.total_bytes is None or self.free_bytes is None:
            return 0
        listed = sum(each.held_bytes or 0 for each in self.holders)
        return max(self.total_bytes - self.free_bytes - listed, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine, as far as it matters to training."""

    gpus: tuple[MachineGpu, ...]
    driver: str
    """Its version; "" without a driver."""
    driver_cuda: tuple[int, int] | None
    """The newest CUDA that the driver runs."""
    torch: str
    torch_cuda: str | None
    """The CUDA that torch is built for; None for another build."""
    settings: Mapping[str, str]
    """Variables of the environment that decide how torch uses memory."""
    odd: tuple[str, ...]
    """What is odd in all that."""
    cores: int
    """Cores that this process may use."""
    memory_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None
    """That of the control group, as of a container; None without one."""


def this_machine() -> Machine:
    """What this machine has, and who holds the memory of its GPUs, without a CUDA context of its own."""
    driver, driver_cuda, gpus = _by_nvml() or _by_smi() or ("", None, ())
    settings = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    memory = psutil.virtual_memory()
    limits = [each for each in memory_limits_bytes() if each < memory.total]
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return Machine(
        gpus=gpus,
        driver=driver,
        driver_cuda=driver_cuda,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        settings=settings,
        odd=(*_odd_settings(settings), *_odd_builds(gpus, driver_cuda)),
        cores=len(affinity(0)) if affinity is not None else psutil.cpu_count() or 1,
        memory_bytes=int(memory.total),
        memory_available_bytes=int(memory.available),
        memory_limit_bytes=min(limits, default=None),
    )


def end_process(pid: int, machine: Machine, confirms: Callable[[Holder], bool]) -> bool:
    """Ask a process of the user's that holds memory of a GPU to end, if `confirms` says so; whether it ended.

    UsageError for a process that is not listed, or not the user's own.
    """
    holder = next((each for gpu in machine.gpus for each in gpu.holders if each.pid == pid), None)
    if holder is None:
        raise UsageError(
            f"process {pid} does not hold memory of a GPU here, so it is not ended. Those that do: "
            "brimful doctor machine"
        )
    if not holder.is_own:
        owner = holder.user or "a user who cannot be seen from here"
        why = "it is this one, or started it" if pid in this_and_its_parents() else f"it is of {owner}"
        raise UsageError(f"process {pid} is not ended: {why}.")
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        began = process.create_time()
        if not confirms(holder):
            return False
        if process.create_time() == began:  # or else another process has its number by now
            process.terminate()
            return _has_ended(process)
    return True


def _has_ended(process: Any) -> bool:
    """Whether a process ends in time; one that its parent has not looked after yet holds no memory any more."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


_Found = tuple[str, tuple[int, int] | None, tuple[MachineGpu, ...]]


def _by_nvml() -> _Found | None:
    """Driver, its CUDA and GPUs by NVML; None without it."""
    with opened_nvml() as nvml:
        if nvml is not None:
            with suppress(nvml.NVMLError):
                cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
                gpus = tuple(_nvml_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
                return str(nvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10), gpus
    return None


def _nvml_gpu(nvml: Any, index: int) -> MachineGpu:
    gpu = NvmlGpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
    memory = gpu.memory()
    return MachineGpu(
        index=index,
        name=str(nvml.nvmlDeviceGetName(gpu.handle)),
        total_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
        holders=_holders(gpu.processes()),
    )


def _by_smi() -> _Found | None:
    """Driver and GPUs by the command nvidia-smi, where NVML is not found; None without it."""
    gpus = _ask_smi("--query-gpu=index,uuid,name,memory.total,memory.free,driver_version")
    if gpus is None:
        return None
    held: dict[str, dict[int, int | None]] = defaultdict(dict)
    for uuid, pid, used in _ask_smi("--query-compute-apps=gpu_uuid,pid,used_memory") or ():
        held[uuid][int(pid)] = _bytes_of(used)
    found = tuple(
        MachineGpu(
            index=int(index),
            name=name,
            total_bytes=_bytes_of(total),
            free_bytes=_bytes_of(free),
            holders=_holders(held[uuid]),
        )
        for index, uuid, name, total, free, _ in gpus
    )
    return gpus[0][-1] if gpus else "", None, found


def _ask_smi(query: str) -> list[list[str]] | None:
    command = which("nvidia-smi")
    if command is None:
        return None
    try:
        asked = [command, query, "--format=csv,noheader,nounits"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [row for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True) if row]


def _bytes_of(mebibytes: str) -> int | None:
    """A size of nvidia-smi; None for "[N/A]" and its like."""
    return int(mebibytes) * MIB if mebibytes.isdecimal() else None


def _holders(held: Mapping[int, int | None]) -> tuple[Holder, ...]:
    is_hidden = has_own_process_numbers()
    found = [Holder.of(pid, size, is_hidden=is_hidden) for pid, size in held.items()]
    return tuple(sorted(found, key=lambda each: -(each.held_bytes or 0)))


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_VARIABLES = (*_ALLOCATOR, "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES")


def _odd_settings(settings: Mapping[str, str]) -> Iterator[str]:
    """What is odd in variables of the environment."""
    given = [name for name in _ALLOCATOR if name in settings]
    for name in given:
        try:
            AllocatorSettings.parse(settings[name])
        except UsageError as error:
            yield f"{name}={one_line(settings[name])}: {error}"
    if len({settings[name] for name in given}) > 1:
        yield f"{' and '.join(given)} differ, and which of them counts depends on torch's version: unset one"
    if settings.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") != "0":
        yield "PYTORCH_NO_CUDA_MEMORY_CACHING is set: each tensor waits for cudaMalloc and cudaFree"
    if settings.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        yield "CUDA_LAUNCH_BLOCKING is set: the host waits for each kernel"
    if settings.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield "CUDA_VISIBLE_DEVICES hides all GPUs from torch"


def _odd_builds(gpus: tuple[MachineGpu, ...], driver_cuda: tuple[int, int] | None) -> Iterator[str]:
    """A torch that does not fit the driver."""
    built = torch.version.cuda
    if gpus and built is None and torch.version.hip is None:
        yield f"torch {torch.__version__} is built for CPUs and uses no GPU: install a build for CUDA"
    if built is not None and driver_cuda is not None and driver_cuda[0] < int(built.partition(".")[0]):
        newest = ".".join(map(str, driver_cuda))
        yield f"the driver runs CUDA up to {newest}, and torch is built for {built}: update the driver"
