"""Sizes of memory that the GPU decides, not the job alone: of kernels' temporaries and cuBLAS's workspace."""

from __future__ import annotations

from typing import Protocol

from brimful.devices import Device
from brimful.trace.kernel_memory import CUBLAS_WORKSPACE, Kernel

DECIDING_PROPERTIES = ("sm_count", "threads_per_multiprocessor", "cublas_workspace_bytes")
"""All properties of a `Device` that such sizes depend on."""


class Memory(Protocol):
    """A block of memory as it is recorded, or a storage of a trace."""

    @property
    def size_bytes(self) -> int:
        """Its size on the GPU that it was captured for."""

    @property
    def label(self) -> str:
        """What it is called."""

    @property
    def kernel(self) -> Kernel | None:
        """What decides its size inside a kernel."""


def is_sized_by_gpu(memory: Memory) -> bool:
    """Whether the GPU decides the size."""
    return memory.kernel is not None or memory.label == CUBLAS_WORKSPACE


def size_on(memory: Memory, device: Device) -> tuple[int, Kernel | None]:
    """The size in bytes on a GPU, and the kernel with that GPU's properties; None if no kernel decides it.

    The memory may be captured for any GPU that runs the same ops.
    """
    if memory.kernel is None:
        is_workspace = memory.label == CUBLAS_WORKSPACE
        return device.cublas_workspace_bytes if is_workspace else memory.size_bytes, None
    kernel = memory.kernel.on_multiprocessors(device.sm_count or 0, device.threads_per_multiprocessor or 0)
    return kernel.size_bytes(), kernel
