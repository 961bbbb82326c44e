"""Memory of a CUDA context outside torch's allocator: `data/contexts.csv`, each row with its source.

`profiling.measure_context` replaces these figures by a measurement.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache

from brimful.devices.data_rows import listed, read_rows
from brimful.devices.device import CudaContext, Device
from brimful.errors import UsageError
from brimful.utils.quantities import MIB

CUDA_CONTEXT_BYTES = 600 * MIB
"""Assumed size of a CUDA context with torch where `data/contexts.csv` has no applicable row.

Not measured: between the 114 MiB (T4) and 712 MiB (B200) that lazily loaded contexts take there.
"""

CUDA_CONTEXT_HIGH_BYTES = 1604 * MIB
"""The largest context measured in `data/contexts.csv`: RTX 3090, torch 1.7.1, kernels loaded eagerly."""


def cuda_context(device: Device, torch_version: str | None = None) -> CudaContext:
    """The size of the CUDA context on `device`, from published measurements.

    The most specific row of `data/contexts.csv` for this version of torch is used: that of the GPU, else of its
    architecture, else of the way torch loads kernels, else the stated default. Since CUDA 11.7 kernels are
    loaded at first use, by default since torch 1.13 (pytorch #86509), which made contexts smaller.

    Most rows are computed from messages of torch's `OutOfMemoryError`, which since torch 2.1 (pytorch #99699)
    report what NVML shows for the process: without what the allocator holds, that is the context of a real
    training or inference run, to about 10 MiB. With three measurements or more the interval spans them; with
    fewer it is at least ±25 %, a little more than the spread of the T4's nine around their median.

    Args:
        device: A GPU, or the CPU, which has no context.
        torch_version: Version of torch, such as "2.13.0" or "2.13.0+cu130"; None means the newest.

    Returns:
        The context's size, interval and source. This function measures nothing.

    Raises:
        UsageError: `torch_version` is not a version.

    Source: named in each row.
    """
    if device.kind == "cpu":
        return NO_CONTEXT
    version = NEWEST_TORCH if torch_version is None else _major_minor(torch_version)
    return nearest_context(context_rows(), device.name, device.architecture, version)


def with_context(device: Device, context: CudaContext) -> Device:
    """The device with another figure for its CUDA context, such as a measured one."""
    return replace(
        device,
        context_bytes=context.context_bytes,
        context_low_bytes=context.low_bytes,
        context_high_bytes=context.high_bytes,
        context_source=context.source,
    )


NO_CONTEXT = CudaContext(
    context_bytes=0, low_bytes=0, high_bytes=0, source="a CPU has no CUDA context", is_measured=False
)

_Version = tuple[float, float]

NEWEST_TORCH: _Version = (math.inf, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ContextRow:
    """One row of `data/contexts.csv`."""

    gpus: tuple[str, ...]
    """Names in `data/gpus.csv`; empty: all."""
    architecture: str
    """Empty: all."""
    torch_from: _Version
    torch_to: _Version
    """The first version that the row does not apply to."""
    context: CudaContext

    def applies(self, name: str, architecture: str, version: _Version) -> bool:
        """Whether the row may be used for this GPU and this version of torch."""
        is_of_gpu = name in self.gpus if self.gpus else self.architecture in ("", architecture)
        return is_of_gpu and self.torch_from <= version < self.torch_to

    @property
    def specificity(self) -> int:
        """How specific the row is: 2 for a row of a GPU, 1 of an architecture, 0 of all."""
        return 2 if self.gpus else int(bool(self.architecture))


def nearest_context(
    rows: tuple[_ContextRow, ...], name: str, architecture: str, version: _Version
) -> CudaContext:
    """The context of the most specific row that applies, or the stated default.

    `name` is the GPU's in the table; `version` has the major and minor version of torch.
    """
    applicable = [row for row in rows if row.applies(name, architecture, version)]
    if applicable:
        return max(applicable, key=lambda row: row.specificity).context
    return CudaContext(
        context_bytes=CUDA_CONTEXT_BYTES,
        low_bytes=0,
        high_bytes=CUDA_CONTEXT_HIGH_BYTES,
        source="default, neither measured nor published",
        is_measured=False,
    )


@cache
def context_rows() -> tuple[_ContextRow, ...]:
    """All rows of `data/contexts.csv`."""
    return tuple(_context_row(cells) for cells in read_rows("contexts.csv"))


def _context_row(cells: dict[str, str]) -> _ContextRow:
    start, end = cells["torch_from"], cells["torch_to"]
    return _ContextRow(
        gpus=listed(cells["gpu"]),
        architecture=cells["architecture"],
        torch_from=_major_minor(start) if start else (0, 0),
        torch_to=_major_minor(end) if end else (math.inf, math.inf),
        context=CudaContext(
            context_bytes=int(cells["context_bytes"]),
            low_bytes=int(cells["low_bytes"]),
            high_bytes=int(cells["high_bytes"]),
            source=f"{cells['source']}; {cells['confidence']} confidence",
            is_measured=False,
        ),
    )


def _major_minor(version: str) -> _Version:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UsageError(f"{version!r} is not a version of torch. Write one such as 2.13.0.")
    return int(match[1]), int(match[2])
