"""Bytes of memory that the operating system has to give a CPU's process again, op by op.

The first touch of a page costs a fault, in which the system finds and clears it: some 0.25 ns a byte, where a
product of warm tensors takes 0.02. The GNU C library, from which torch's Linux wheels allocate, hands out
blocks above 32 MiB as pages of their own and returns them when they are freed, so a step that makes such a
block pays each time. Smaller ones come from a heap. Its end could be returned too, but gradients and optimizer
state lie there: of 25 models (the rows of benchmarks/step_time.py among them) none but those with blocks above
32 MiB had more than 16 MiB of faults in a steady step, by getrusage.

Source: mallopt(3) of the Linux manual, M_MMAP_THRESHOLD: dynamic, at most DEFAULT_MMAP_THRESHOLD_MAX.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from brimful.quantities import MIB
from brimful.trace import EventKind, Trace

LARGEST_HEAP_BLOCK_BYTES = 32 * MIB
"""4 · 1024 · 1024 · sizeof(long) where a long has 8 bytes."""


def faulted_bytes(trace: Trace) -> NDArray[np.int64]:
    """Bytes that each op touches for the first time since the system gave them, (ops,)."""
    fresh = np.zeros(len(trace.ops), dtype=np.int64)
    large = {
        index: storage.size_bytes
        for index, storage in enumerate(trace.storages)
        if storage.size_bytes > LARGEST_HEAP_BLOCK_BYTES
    }
    for event in trace.events if large else ():
        if event.storage in large and event.kind is EventKind.ALLOCATE and event.op >= 0:
            fresh[event.op] += large[event.storage]
    return fresh
