"""What a process takes of the device beside torch's allocator, step by step, and what software it runs on."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from brimful.errors import UsageError
from brimful.profiling import measure_context

_MAJOR, _MINOR, _PATCH = range(3)
"""What `cublasGetProperty` and `cudnnGetProperty` are asked for. Source: CUDA's library_types.h."""


def measure_stages(device: torch.device) -> Iterator[dict[str, Any]]:
    """What the device shows before torch touches it and after each of some first uses."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    idle = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
    yield {"stage": "before torch", "device_used_bytes": idle}
    for name, use in _stages(device):
        use()
        torch.cuda.synchronize(device)
        used = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
        reserved = torch.cuda.memory_reserved(device)
        yield {
            "stage": name,
            "device_used_bytes": used,
            "process_bytes": _listed_bytes(pynvml, handle),
            "reserved_bytes": reserved,
            "outside_allocator_bytes": used - idle - reserved,
        }


def measured_by_brimful() -> dict[str, Any]:
    """The same by `brimful.profiling.measure_context`, in a process of its own."""
    try:
        context = measure_context("cuda")
    except UsageError as error:
        return {"stage": "brimful.profiling.measure_context", "error": str(error)}
    return {
        "stage": "brimful.profiling.measure_context",
        "context_bytes": context.context_bytes,
        "low_bytes": context.low_bytes,
        "high_bytes": context.high_bytes,
    }


def _stages(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "torch.cuda.init", torch.cuda.init
    yield "get_device_properties", lambda: torch.cuda.get_device_properties(device)
    yield "zeros(1)", lambda: torch.zeros(1, device=device)
    square = (1024, 1024)
    yield "mm, fp32", lambda: torch.randn(square, device=device) @ torch.randn(square, device=device)
    yield "mm, bf16", lambda: _halves(square, device) @ _halves(square, device)
    images = (8, 16, 32, 32)
    kernel = (16, 16, 3, 3)
    yield "conv, fp32", lambda: F.conv2d(torch.randn(images, device=device), torch.randn(kernel, device=device))
    yield "conv, bf16", lambda: F.conv2d(_halves(images, device), _halves(kernel, device))
    yield "conv forward and backward", lambda: _train(nn.Conv2d(16, 16, 3).to(device), images)
    yield "linear, gelu, layer_norm, backward", lambda: _train(_layers().to(device), (32, 64))
    heads = (2, 4, 128, 64)
    yield "attention, bf16", lambda: F.scaled_dot_product_attention(*(_halves(heads, device) for _ in range(3)))
    yield "AdamW step", lambda: _adamw(device)
    yield "LSTM", lambda: _train(_Outputs(nn.LSTM(64, 64)).to(device), (8, 4, 64))


def _halves(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))


class _Outputs(nn.Module):
    """A recurrent layer without its last states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


def _train(model: nn.Module, shape: tuple[int, ...]) -> None:
    device = next(model.parameters()).device
    model(torch.randn(shape, device=device)).square().mean().backward()


def _adamw(device: torch.device) -> None:
    weight = nn.Parameter(torch.zeros(64, 64, device=device))
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight]).step()


def _listed_bytes(nvml: Any, handle: Any) -> int | None:
    """What NVML lists for this process; None in most containers."""
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid():
            return process.usedGpuMemory
    return None


def versions_of_libraries() -> dict[str, Any]:
    """What torch says of its libraries, those in use asked themselves, and the NVIDIA packages installed."""
    packages = {
        distribution.metadata["Name"]: distribution.version
        for distribution in distributions()
        if (distribution.metadata["Name"] or "").startswith(("nvidia-", "triton"))
    }
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cublas_in_use": _version_of("libcublas.so", "cublasGetProperty"),
        "cudnn_in_use": _version_of("libcudnn.so", "cudnnGetProperty"),
        "packages": dict(sorted(packages.items())),
    }


def _version_of(library: str, question: str) -> str | None:
    """Version of a library that this process has loaded."""
    with suppress(OSError, AttributeError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        path = re.search(rf"\S*/{re.escape(library)}\S*", maps)
        if path is None:
            return None
        ask = getattr(ctypes.CDLL(path.group()), question)
        numbers = []
        for part in (_MAJOR, _MINOR, _PATCH):
            number = ctypes.c_int()
            if ask(part, ctypes.byref(number)):
                return None
            numbers.append(str(number.value))
        return ".".join(numbers)
    return None


def gpu_by_driver() -> dict[str, Any]:
    """The first GPU as NVML names it, without making a context on it; `error` where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return {
            "gpu": _text(pynvml.nvmlDeviceGetName(handle)),
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "gpus": pynvml.nvmlDeviceGetCount(),
            "total_bytes": memory.total,
            "reserved_by_driver_bytes": memory.reserved,
            "used_bytes": memory.used,
        }
    except Exception as error:  # pynvml's own errors, whose class needs the import
        return {"error": f"{type(error).__name__}: {error}"}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
