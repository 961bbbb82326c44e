"""On a GPU, where the time of a step goes: kernels by kind, waiting for the host and for data, launches.

From what Kineto records, torch's profiler of GPUs: ops and calls of the CUDA runtime on the host, kernels and
copies on the device. Events of AMD's GPUs have this form as well.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.torch_version import TorchVersion

from brimful.cost.time_shares import ATTENTION, OPTIMIZER, UNKNOWN, kind_of_op

_COMMUNICATION, _INPUT_COPY, _COPY, _POINTWISE, _REDUCTION = (
    "communication",
    "input_copy",
    "copy",
    "elementwise",
    "reduction",
)
_BY_KERNEL = {
    "Memcpy HtoD": _INPUT_COPY,
    "Memcpy DtoH": _INPUT_COPY,
    "Memcpy": _COPY,
    "Memset": _COPY,
    "nccl": _COMMUNICATION,
    "triton_poi": _POINTWISE,
    "triton_red": _REDUCTION,
    "triton_per": _REDUCTION,
}
"""Beginnings of names of kernels whose kind no op says: copies, NCCL's, and those that Inductor generates."""
_FIRST = ("Memcpy HtoD", "Memcpy DtoH", "nccl")
"""Those that count as they are, whichever op launches them."""
_LOADER = "enumerate(DataLoader)#"
_OPTIMIZER_STEP = "Optimizer.step#"
_SYNCHRONIZE = "DeviceSynchronize"


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """What the kernels of one step take, and what waits for what."""

    class_seconds: dict[str, float]
    """Seconds in which the GPU is busy, by kind of kernel; they add up to them."""
    loading_seconds: float
    """Seconds in which the GPU is idle while the host waits for a `DataLoader`."""
    idle_seconds: float
    """All other seconds in which the GPU is idle: it waits for launches, Python, or values to be read."""
    launches: int
    """How many kernels the step launches, copies not counted."""
    waiting_seconds: float
    """Seconds in which the host waits for the GPU, in calls that synchronise."""


def gpu_times(events: Iterable[FunctionEvent]) -> GpuTimes:
    """What the kernels of a profiled step take.

    Kernels of several streams run at the same time: communication counts as far as nothing else runs, and
    where others overlap, each counts by its part of the sum.

    Args:
        events: Those of the host and of the GPU, as `torch.autograd.profiler.profile` has them; the profile
            begins with the step, on an idle GPU, and ends with a synchronisation.

    Returns:
        Seconds by kind of kernel, what is idle, and how many kernels there are.
    """
    of_host: list[FunctionEvent] = []
    of_gpu: list[FunctionEvent] = []
    for event in events:
        if event.device_type == DeviceType.CPU:
            of_host.append(event)
        elif not event.is_user_annotation:
            of_gpu.append(event)
    kinds = _kinds_of_kernels(of_host)
    found: defaultdict[str, float] = defaultdict(float)
    for kernel in of_gpu:
        launched_by = kinds.get(_key(kernel.name, _length(kernel)))
        found[_kind_of_kernel(kernel.name, launched_by.pop() if launched_by else None)] += _length(kernel)
    busy = _union(_range(each) for each in of_gpu)
    busy_seconds = _covered(busy)
    overlap = max(sum(found.values()) - busy_seconds, 0.0)
    found[_COMMUNICATION] -= min(overlap, found[_COMMUNICATION])
    total = sum(found.values())
    synchronised = [each for each in of_host if each.name.endswith("Synchronize")]
    last = max(synchronised, key=lambda each: each.time_range.start, default=None)
    if last is not None and last.name.endswith(_SYNCHRONIZE):  # the profile's own
        synchronised.remove(last)
    else:
        last = None
    end = max((_range(each)[1] for each in (*of_host, *of_gpu) if each is not last), default=0.0)
    idle = _gaps(busy, end)
    loading = _union(_range(each) for each in of_host if each.name.startswith(_LOADER))
    loading_seconds = _overlap(idle, loading)
    return GpuTimes(
        class_seconds={kind: each * busy_seconds / total for kind, each in found.items() if each > 0},
        loading_seconds=loading_seconds,
        idle_seconds=_covered(idle) - loading_seconds,
        launches=sum(not each.name.startswith(("Memcpy", "Memset")) for each in of_gpu),
        waiting_seconds=sum(map(_length, synchronised)),
    )


@contextmanager
def tears_down() -> Iterator[None]:
    """Let Kineto unload CUPTI after a profile that ends here, which else slows all later launches.

    Below CUDA 12.6 programs with CUDA graphs crash then; and who has set the variable keeps it.
    """
    version, name = TorchVersion(torch.version.cuda or "0"), "TEARDOWN_CUPTI"
    if version < "12.6" or name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _kinds_of_kernels(of_host: Iterable[FunctionEvent]) -> dict[tuple[str, int], list[str]]:
    """The kinds of ops that have launched kernels, by the kernels' name and length."""
    found: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for event in of_host:
        if event.kernels:
            kind = _kind_of_event(event)
            for kernel in event.kernels:
                found[_key(kernel.name, kernel.duration / 1e6)].append(kind)
    return found


def _kind_of_event(event: FunctionEvent) -> str:
    around: FunctionEvent | None = event
    while around is not None:
        # The update itself runs without gradients, unlike a closure that an optimizer calls.
        if around.name.startswith(_OPTIMIZER_STEP) and event.sequence_nr < 0:
            return OPTIMIZER
        around = around.cpu_parent
    namespace, _, base = event.name.rpartition("::")
    if namespace == "aten":
        return kind_of_op(base.rstrip("_"))
    return ATTENTION if "attn" in base or "attention" in base else UNKNOWN


def _kind_of_kernel(name: str, of_op: str | None) -> str:
    if of_op is not None and not name.startswith(_FIRST):
        return of_op
    return next((kind for beginning, kind in _BY_KERNEL.items() if name.startswith(beginning)), UNKNOWN)


def _key(name: str, seconds: float) -> tuple[str, int]:
    return name, round(seconds * 1e9)


def _range(event: FunctionEvent) -> tuple[float, float]:
    """Begin and end, in seconds since the profile began."""
    return event.time_range.start / 1e6, event.time_range.end / 1e6


def _length(event: FunctionEvent) -> float:
    begin, end = _range(event)
    return end - begin


def _union(ranges: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times that any of the ranges covers, in order and apart."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _gaps(busy: list[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """The times from 0 to `end` that `busy` does not cover."""
    ends = [0.0, *(each[1] for each in busy)]
    begins = [*(each[0] for each in busy), end]
    return [(begin, end) for begin, end in zip(ends, begins, strict=True) if end > begin]


def _overlap(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    """Seconds that both cover."""
    return _covered([*left, *right]) - _covered(_union([*left, *right]))


def _covered(ranges: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in ranges)
