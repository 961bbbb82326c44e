"""Every allocation on the CPU, as torch's profiler sees it.

The profiler is of one thread: a block that another releases would stay in its sum until the end. gloo's threads
do that with what a collective needed, where they finish after the thread that waited for it. The allocator can
count what all threads hold, and then says it with each event.

Private torch APIs used here: the profiler's event tree, as `torch.profiler._memory_profiler` reads it,
`torch._C._dispatch_has_kernel_for_dispatch_key`, and the variable `FLAGS_caffe2_report_cpu_memory_usage` of the
library c10 (CPUAllocator.cpp, ProfiledCPUMemoryReporter) (checked: torch 2.13).
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType, _TensorMetadata
from torch.autograd.profiler import profile, record_function

from brimful.results import OpTemporary
from brimful.utils.one_at_a_time import one_at_a_time

_SILENT = "6"
"""Above every level of the profiler's log, which else says on stderr that it starts and stops (kineto's
ILoggerObserver.h, LoggerOutputType)."""

_COUNTED_FROM = "brimful counts from here"
"""Name of the range that marks the moment in the profile."""


@dataclass(slots=True, kw_only=True)
class CpuPeak:
    """What the recorded code held at its peak, above what was there before; filled in when it has ended."""

    peak_bytes: int = 0
    """The most bytes live of those that the thread allocated since recording began, or others for it. It is not
    seen where a block from before is released (CPUAllocator.cpp, ProfiledCPUMemoryReporter)."""
    temporaries_at_peak: tuple[OpTemporary, ...] = ()
    read_from_before: Mapping[int, int] = field(default_factory=dict)
    """By address: bytes of storages that ops were given and that were there before. Of a storage of which ops
    were given parts only, the largest part counts."""

    def count_from_here(self) -> None:
        """Look for the peak from here on; what was allocated before is held still."""
        with record_function(_COUNTED_FROM):
            pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuEvent:
    """One allocation or release."""

    time_ns: int
    address: int
    size_bytes: int
    """Negative for a release."""
    all_threads_bytes: int
    """Live afterwards of what all threads allocated, above some constant."""
    ops: tuple[tuple[int, str], ...]
    """(number of the call, name) of the ops that were running, outermost first."""


@contextmanager
def record_cpu_memory() -> Iterator[CpuPeak]:
    """Record the CPU memory of what runs inside the context; torch has one profiler, for which threads wait."""
    peak = CpuPeak()
    gc.collect()  # else cycles that earlier code left might be freed inside
    with (
        one_at_a_time(),
        _quiet_profiler(),
        _all_threads_counted(),
        profile(profile_memory=True, record_shapes=True) as profiler,
    ):
        yield peak
    results: Any = profiler.kineto_results
    roots = results.experimental_event_tree()
    events = sorted(_memory_events(roots), key=lambda event: event.time_ns)
    peak.peak_bytes, position = _peak(events, since_ns=_counted_from_ns(roots))
    peak.temporaries_at_peak = _temporaries_at(events, position)
    peak.read_from_before = _read_from_before(roots, {event.address for event in events})


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Within, the profiler logs nothing, unless the user has asked for its log."""
    is_ours = "KINETO_LOG_LEVEL" not in os.environ
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    try:
        yield
    finally:
        if is_ours:
            os.environ.pop("KINETO_LOG_LEVEL", None)


@contextmanager
def _all_threads_counted() -> Iterator[None]:
    """Within, the allocator counts what any thread allocates and releases, not the profiled one alone."""
    flag = _count_flag()
    if flag is None:
        yield
        return
    before, flag.value = flag.value, True
    try:
        yield
    finally:
        flag.value = before


@cache
def _count_flag() -> ctypes.c_bool | None:
    """The allocator's flag; None where torch has been built otherwise, and releases elsewhere stay unseen."""
    for name in ("libc10.so", "libc10.dylib", "c10.dll"):
        library = Path(torch.__file__).parent / "lib" / name
        if library.exists():
            try:
                return ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
            except (OSError, ValueError):
                return None
    return None


def _counted_from_ns(roots: Iterable[Any]) -> int:
    """Time from which the peak counts, by the latest marker among the events; 0 without one."""
    stack, latest = [*roots], 0
    while stack:
        event = stack.pop()
        stack += event.children
        if event.name == _COUNTED_FROM:
            latest = max(latest, event.start_time_ns)
    return latest


def _memory_events(roots: Iterable[Any]) -> Iterator[CpuEvent]:
    """Allocations on the CPU below the roots of an event tree, each with the ops around it."""
    stack: list[tuple[Any, tuple[tuple[int, str], ...]]] = [(root, ()) for root in roots]
    calls = 0
    while stack:
        event, ops = stack.pop()
        tag, fields = event.tag, event.extra_fields
        if tag == _EventType.Allocation and fields.device.type == "cpu":
            yield CpuEvent(
                time_ns=event.start_time_ns,
                address=fields.ptr,
                size_bytes=fields.alloc_size,
                all_threads_bytes=fields.total_allocated,
                ops=ops,
            )
        elif tag == _EventType.TorchOp and _is_op(event.name):
            calls += 1
            ops = (*ops, (calls, event.name))
        stack += [(child, ops) for child in event.children]


def _read_from_before(roots: Iterable[Any], made: Set[int]) -> dict[int, int]:
    """Bytes of storages on the CPU that ops were given, but for those at addresses where blocks were made."""
    read: dict[int, int] = {}
    stack = [*roots]
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag != _EventType.TorchOp:
            continue
        for given in event.extra_fields.inputs:
            for tensor in given if isinstance(given, list) else (given,):
                if isinstance(tensor, _TensorMetadata) and tensor.device.type == "cpu":
                    address = tensor.storage_data_ptr
                    if address and address not in made:
                        read[address] = max(read.get(address, 0), _spanned_bytes(tensor))
    return read


def _spanned_bytes(tensor: _TensorMetadata) -> int:
    """Bytes from the first element of a tensor to its last."""
    if not all(tensor.sizes):
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.sizes, tensor.strides, strict=False))
    return (last + 1) * tensor.dtype.itemsize


def _peak(events: list[CpuEvent], since_ns: int = 0) -> tuple[int, int]:
    """The most bytes live from a moment on and the index of the event that reached it; 0 and -1 if none were.

    What the events add up to is too much by what other threads released of it, and what all threads hold by
    what others, such as one that reads batches ahead, allocated: the lesser is the nearer.
    """
    added = most = 0
    position = -1
    before = events[0].all_threads_bytes - events[0].size_bytes if events else 0
    for index, event in enumerate(events):
        added += event.size_bytes
        live = min(added, event.all_threads_bytes - before)
        if live > most and event.time_ns >= since_ns:
            most, position = live, index
    return most, position


def _temporaries_at(events: list[CpuEvent], position: int) -> tuple[OpTemporary, ...]:
    """Blocks live after an event that one call of an op both made and freed, summed by op, largest first.

    Composite ops, such as `aten::linear`, are skipped: their memory shows up in the ops they call.
    """
    made: dict[int, CpuEvent] = {}
    for event in events[: position + 1]:
        if event.size_bytes > 0:
            made[event.address] = event
        else:
            made.pop(event.address, None)
    totals: dict[str, int] = defaultdict(int)
    for event in events[position + 1 :]:
        if event.size_bytes < 0 and event.address in made:
            block = made.pop(event.address)
            op = _common_op(block.ops, event.ops)
            if op is not None:
                totals[op] += block.size_bytes
    largest_first = sorted(totals.items(), key=lambda item: -item[1])
    return tuple(OpTemporary(op=op, size_bytes=size_bytes) for op, size_bytes in largest_first)


def _common_op(made_in: tuple[tuple[int, str], ...], freed_in: tuple[tuple[int, str], ...]) -> str | None:
    """The innermost call that two events share, if it or a call around it is not a composite op; else None."""
    common = [a[1] for a, b in zip(made_in, freed_in, strict=False) if a == b]
    return common[-1] if any(not _is_composite(name) for name in common) else None


def _is_op(name: str) -> bool:
    """Whether a profiled range is an op, such as "aten::mm", and not a node of autograd or a label."""
    return "::" in name and not name.startswith(("autograd::", "torch::"))


@cache
def _is_composite(name: str) -> bool:
    """Whether an op is only a sequence of others, which dispatch sees one by one."""
    namespace, _, packet = name.partition("::")
    try:
        overloads = getattr(getattr(torch.ops, namespace), packet).overloads()
    except (AttributeError, RuntimeError):  # a range that someone else named like an op
        return False
    return any(_has_composite_kernel(f"{name}.{overload}".removesuffix(".default")) for overload in overloads)


def _has_composite_kernel(qualified: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd")
    except RuntimeError:  # an overload of TorchScript's alone, which is not dispatched
        return False
