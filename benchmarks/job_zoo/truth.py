"""How much memory a process really holds on the CPU, as torch's allocator counts it under the profiler.

Nothing here asks brimful: every block that the allocator hands out counts, whoever holds it: parameters,
buffers, gradients, optimizer state, the batch, a frozen model in a global variable. Memory of others, such as
NumPy's, does not.

Source: `FLAGS_caffe2_report_cpu_memory_usage` of the library c10 (CPUAllocator.cpp, ProfiledCPUMemoryReporter)
lets the allocator count from when it is set; `total_allocated` of the profiler's events is the count (checked:
torch 2.13).
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile


@contextmanager
def all_bytes_counted() -> Iterator[None]:
    """Within, the allocator counts what it hands out and takes back; what is from before must not be freed."""
    library = next(
        path
        for name in ("libc10.so", "libc10.dylib", "c10.dll")
        if (path := Path(torch.__file__).parent / "lib" / name).exists()
    )
    flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler says on stderr that it starts and stops
    before, flag.value = flag.value, True
    try:
        yield
    finally:
        flag.value = before


def live_bytes() -> int:
    """What is held now, above some constant."""
    gc.collect()
    counts, sizes = _counts_during(lambda: torch.empty(1))
    return counts[0] - sizes[0]


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that is held at once while something runs, above the same constant."""
    before = live_bytes()
    counts, _sizes = _counts_during(run)
    return max(counts, default=before)


def _counts_during(run: Callable[[], object]) -> tuple[list[int], list[int]]:
    """After each allocation and release: what is held; and how much it changed."""
    gc.collect()
    with profile(profile_memory=True) as profiler:
        run()
    results: Any = profiler.kineto_results
    events, stack = [], list(results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            events.append((event.start_time_ns, event.extra_fields))
    events.sort(key=lambda event: event[0])
    return [fields.total_allocated for _, fields in events], [fields.alloc_size for _, fields in events]
