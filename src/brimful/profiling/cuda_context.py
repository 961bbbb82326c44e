"""Device memory of a CUDA context outside torch's allocator, measured once and cached.

A new process measures it, because a context stays until its process ends. Run on an H100 with
torch 2.11; tests mock NVML and the other process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from brimful.codec import PositiveFloat, PositiveInt, decode_json
from brimful.devices import CudaContext, Device, cuda_context, find_device
from brimful.errors import FileFormatError, UsageError
from brimful.profiling.cache import keep, read_kept
from brimful.profiling.nvml import NvmlGpu, opened_nvml

CACHE_FILE = "cuda_contexts.json"

_READING_SECONDS_AT_MOST = 300
"""Limit of the reading: loading torch's CUDA libraries from a cold disk can take a minute; assumed, not
measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptContext:
    """One cached measurement, with what it is valid for."""

    gpu_name: str
    """The driver's name of the GPU."""
    device_name: str
    """Its name in `devices.find_device`; the driver's name if that has no such GPU."""
    driver_version: str
    torch_version: str
    measured_at_seconds: PositiveFloat
    """Since the epoch."""
    context_bytes: PositiveInt
    """Size after a small training step, which loads cuBLAS, cuDNN and its own kernels."""
    low_bytes: PositiveInt
    """Size right after the context was created."""
    high_bytes: PositiveInt
    """Size with kernels of other ops: as much again as the small training step loaded; assumed, not
    measured."""

    def __post_init__(self) -> None:
        if not self.low_bytes <= self.context_bytes <= self.high_bytes:
            raise ValueError(
                f"a context of {self.context_bytes} bytes is not between {self.low_bytes} and {self.high_bytes}"
            )

    @property
    def context(self) -> CudaContext:
        """The measured context; its source says what the measurement is valid for."""
        return CudaContext(
            context_bytes=self.context_bytes,
            low_bytes=self.low_bytes,
            high_bytes=self.high_bytes,
            source=f"measured on this machine ({self.gpu_name}, driver {self.driver_version}, "
            f"torch {self.torch_version})",
            is_measured=True,
        )


def measure_context(device: torch.device | str | None = None) -> CudaContext:
    """Measure the memory of a CUDA context on a GPU of this machine, and keep it in the user's cache directory.

    Takes some seconds. Where the driver does not list the measuring process, as in a container, other programs'
    use of the GPU must not change meanwhile. `device` is the current CUDA device if not given.

    The size is that after a small training step. The interval reaches from the context without any op to as
    much again for kernels of other ops as the small step loaded. Raises `UsageError`, which says why, if there
    is no such GPU here or it cannot be measured.
    """
    device = _cuda_device(device)
    properties = torch.cuda.get_device_properties(device)
    reading = _read_in_fresh_process(f"GPU-{properties.uuid}")
    measured = KeptContext(
        gpu_name=properties.name,
        device_name=_table_name(properties.name, properties.total_memory),
        driver_version=reading.driver_version,
        torch_version=torch.__version__,
        measured_at_seconds=time.time(),
        context_bytes=reading.warm_bytes,
        low_bytes=reading.bare_bytes,
        high_bytes=2 * reading.warm_bytes - reading.bare_bytes,
    )
    key = f"{measured.gpu_name}; driver {measured.driver_version}; torch {measured.torch_version}"
    keep(CACHE_FILE, "contexts", key, measured, what="the measured CUDA context")
    return measured.context


def kept_context(gpu_name: str, torch_version: str | None = None) -> CudaContext | None:
    """The latest measurement cached for a GPU, with any driver; None if there is none.

    `gpu_name` is the name of the driver or of `devices.find_device`. With a `torch_version`, such as "2.13.0",
    only measurements with this minor release count.
    """
    matching = [
        kept
        for kept in read_kept(CACHE_FILE, "contexts", KeptContext).values()
        if gpu_name.casefold() in (kept.gpu_name.casefold(), kept.device_name.casefold())
        and (torch_version is None or _minor_release(kept.torch_version) == _minor_release(torch_version))
    ]
    return max(matching, key=lambda kept: kept.measured_at_seconds).context if matching else None


def best_context(device: Device, torch_version: str | None = None) -> CudaContext:
    """The best available figures for the CUDA context on `device`.

    These are a cached measurement for this GPU and minor release of torch, else the published figures. The GPU
    need not be in this machine. `torch_version` is that of this process if not given; `UsageError` is raised if
    it is not a version.
    """
    version = torch.__version__ if torch_version is None else torch_version
    published = cuda_context(device, version)
    return kept_context(device.name, version) or published


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """What the fresh process found; bytes outside torch's allocator."""

    driver_version: str
    bare_bytes: int
    warm_bytes: int


def _cuda_device(asked: torch.device | str | None) -> torch.device:
    if not torch.cuda.is_available():
        raise UsageError(
            "a CUDA context can only be measured on a machine with a CUDA GPU, and torch finds none here. "
            "Without a measurement the published figures are used: see brimful.devices.cuda_context."
        )
    device = torch.device("cuda" if asked is None else asked)
    if device.type != "cuda":
        raise UsageError(f"{str(device)!r} has no CUDA context. Name a GPU, such as cuda:0.")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise UsageError(
            f"there is no cuda:{index}; this machine has {torch.cuda.device_count()}, from cuda:0 on."
        )
    return torch.device("cuda", index)


def _read_in_fresh_process(uuid: str) -> _Reading:
    code = f"from {__name__} import print_reading; print_reading()"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": uuid}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_READING_SECONDS_AT_MOST,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"the CUDA context could not be measured: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise UsageError(f"the CUDA context could not be measured: {lines[-1]}")
    reading = _parsed(done.stdout)
    if not 0 < reading.bare_bytes <= reading.warm_bytes:
        raise UsageError(
            f"the CUDA context could not be measured: {reading.bare_bytes} bytes without an op and "
            f"{reading.warm_bytes} after a training step cannot both be. Other programs may have taken or "
            "freed memory on the GPU meanwhile: measure again when it is idle."
        )
    return reading


def _parsed(output: str) -> _Reading:
    """The reading from the last line, as libraries may print lines of their own before."""
    try:
        return decode_json(output.strip().splitlines()[-1], _Reading, where="the measuring process's answer")
    except (FileFormatError, IndexError) as error:
        raise UsageError(
            f"the CUDA context could not be measured: the measuring process wrote {output[-200:]!r}"
        ) from error


def print_reading() -> None:
    """Make a context on the first visible GPU and print what it takes, as one line of JSON.

    `measure_context` runs this in a fresh process: the context stays until the process ends.
    """
    with opened_nvml() as nvml:
        if nvml is None:
            raise UsageError("NVML is not found: it is part of NVIDIA's driver, and nvidia-ml-py calls it.")
        reading = _take_reading(nvml, os.environ["CUDA_VISIBLE_DEVICES"], torch.device("cuda", 0))
    print(json.dumps(asdict(reading)))


def _take_reading(nvml: Any, uuid: str, device: torch.device) -> _Reading:
    # NVML knows nothing of CUDA_VISIBLE_DEVICES. Torch is not asked for the UUID: on an H100 that alone made a
    # context of 527 MiB (benchmarks/results/gpu_record.json, "context").
    gpu = NvmlGpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    idle_bytes = _used_bytes(gpu)
    _make_context(device)
    bare_bytes = _context_bytes(gpu, idle_bytes, device)
    _train_a_little(device)
    return _Reading(
        driver_version=str(nvml.nvmlSystemGetDriverVersion()),
        bare_bytes=bare_bytes,
        warm_bytes=_context_bytes(gpu, idle_bytes, device),
    )


def _context_bytes(gpu: NvmlGpu, idle_bytes: int, device: torch.device) -> int:
    """What this process takes of the device, less what torch's allocator holds.

    In a container NVML lists no process or other process numbers: then by how much the use of the whole device
    has grown.
    """
    torch.cuda.synchronize(device)
    taken_bytes = (gpu.computing() or {}).get(os.getpid())
    if taken_bytes is None:
        taken_bytes = _used_bytes(gpu) - idle_bytes
    return taken_bytes - torch.cuda.memory_reserved(device)


def _used_bytes(gpu: NvmlGpu) -> int:
    memory = gpu.memory()
    if memory is None:
        raise UsageError("NVML does not report the memory of this GPU, as where CPU and GPU share it.")
    return int(memory.used)


def _make_context(device: torch.device) -> None:
    torch.zeros(1, device=device)


def _train_a_little(device: torch.device) -> None:
    """Run two tiny training steps, in float32 and with autocast, so that libraries and kernels are loaded."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(8 * 6 * 6, 16),
        nn.LayerNorm(16),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for is_autocast in (False, True):
        images = torch.randn(4, 3, 8, 8, device=device)
        with torch.autocast(device.type, enabled=is_autocast):
            loss = nn.functional.cross_entropy(model(images), torch.zeros(4, dtype=torch.long, device=device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _table_name(gpu_name: str, capacity_bytes: int) -> str:
    try:
        return find_device(gpu_name, capacity_bytes=capacity_bytes).name
    except UsageError:
        return gpu_name


def _minor_release(torch_version: str) -> tuple[str, ...]:
    """The major and minor version of a release: ("2", "13") for "2.13.0+cu130"."""
    return tuple(torch_version.split(".")[:2])
