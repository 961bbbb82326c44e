"""NVML's handle of a GPU of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch


class NvmlGpu(NamedTuple):
    """A GPU as NVML knows it."""

    nvml: Any
    """The module."""
    handle: Any


@contextmanager
def opened_nvml(device: torch.device) -> Iterator[NvmlGpu | None]:
    """Yield NVML with the handle of a CUDA device; None without NVML, or if NVML does not know this GPU."""
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
        handle = _handle(pynvml, device)
        yield None if handle is None else NvmlGpu(pynvml, handle)
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _handle(nvml: Any, device: torch.device) -> Any:
    # By UUID, as NVML ignores CUDA_VISIBLE_DEVICES.
    uuid = torch.cuda.get_device_properties(device).uuid
    for kind in ("GPU", "MIG"):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
    return None
