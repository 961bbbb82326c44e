"""Copies of batches from the host's pageable memory to a GPU, which a step begins with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from brimful.devices import Device
from brimful.trace import Category, Trace

INPUT_COPY = "input_copy"
"""Name of the copies' time among the classes of kernels."""

ASYNCHRONOUS_BYTES = 64 * 1024
"""Up to this size the host does not wait. Source: CUDA C++ programming guide, "Asynchronous concurrent
execution": memory copies from host to device of a memory block of 64 KB or less."""

PAGEABLE_BYTES_PER_SECOND = 7e9
"""Rate at which the driver copies pageable memory: one thread of the host copies it to pinned memory, piece
after piece, so it is the host's rate and not the link's, unless the link is slower. 5.1 GB/s (pytorch/pytorch
issue 16901), 5 to 6 (rapidsai/dask-cuda pull request 98), 7.3 and 8.6 in two steps of ResNet-50 on an H100 SXM
(benchmarks/results/gpu_times.json), whose link moves 55 GB/s from pinned memory."""


def copied_input_bytes(trace: Trace) -> dict[int, int]:
    """Bytes of batches that ops copy from the host, by index of the op that makes the copy.

    A batch that lies on the device is not copied, and what `prefetch_inputs` copies has ops of its own.
    """
    copied: dict[int, int] = {}
    for storage in trace.storages:
        if storage.category is not Category.INPUTS or storage.op is None:
            continue
        if trace.ops[storage.op].written_bytes == 0:  # else a kernel of the device makes it
            copied[storage.op] = copied.get(storage.op, 0) + storage.size_bytes
    return copied


def input_copy_seconds(copied_bytes: NDArray[np.int64], device: Device) -> NDArray[np.float64]:
    """Seconds for which the host and a GPU are both busy with each copy, (N,).

    The host waits until the device has done all before the copy, and until the memory is copied (CUDA Runtime
    API, "API synchronization behavior": a stream sync is performed before the copy is initiated). Copies that
    the host does not wait for take 0 seconds.
    """
    rate = min(PAGEABLE_BYTES_PER_SECOND, device.host_link_bytes_per_second or PAGEABLE_BYTES_PER_SECOND)
    seconds: NDArray[np.float64] = np.where(copied_bytes > ASYNCHRONOUS_BYTES, copied_bytes / rate, 0.0)
    return seconds
