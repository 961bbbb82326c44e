"""A GPU that is not in the table: a `Device` from the figures that are known, the others by stated rules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from brimful.devices.contexts import NEWEST_TORCH, context_rows, nearest_context
from brimful.devices.data_rows import listed, read_rows
from brimful.devices.device import Device
from brimful.devices.peaks import (
    CLOCK_SPREAD,
    EITHER_FACTOR,
    EITHER_SPREAD,
    Capability,
    MemoryType,
    architecture_of,
    cores_per_multiprocessor,
    fp32_flops_per_second,
    memory_type_of,
    tensor_ratios,
)
from brimful.devices.table import CUDA_DISPATCH, CUDA_LAUNCH_SECONDS

TYPICAL_CLOCK_HERTZ = 1.76e9
"""The clock to compute an unknown number of multiprocessors, or an unknown peak, with: the median of what the
82 rows of `data/gpus.csv` follow from, which a test checks."""

TYPICAL_CLOCK_SPREAD = 0.25
"""Standard deviation of the logarithm of the clocks that rows of `data/gpus.csv` follow from, which a test
checks."""

POWER_LIMITED_SPREAD = 0.25
"""Standard deviation of the logarithm of the clock of a laptop's GPU or a Max-Q card, which follows from the
laptop's power limit: near the widest of those that `data/gpus.csv` has for laptops (0.265)."""

LEAST_LINK_BYTES_PER_SECOND = 12.3e9
"""The link to the host if it is not known: PCIe 3.0 x16, the least of `data/gpus.csv`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is known of a GPU; None: not known."""

    name: str
    capacity_bytes: int
    memory_bandwidth_bytes_per_second: float
    compute_capability: Capability
    source: str
    """Source of these figures."""
    sm_count: int | None = None
    clock_hertz: float | None = None
    fp32_flops_per_second: float | None = None
    tf32_flops_per_second: float | None = None
    fp16_flops_per_second: float | None = None
    bf16_flops_per_second: float | None = None
    memory_type: MemoryType | None = None
    """Not known: by its name."""
    l2_bytes: int | None = None
    host_link_bytes_per_second: float | None = None
    nvlink_bytes_per_second: float | None = None

    @property
    def has_all_rates(self) -> bool:
        """Whether every rate that cards of this capability have is known."""
        ratios = tensor_ratios(self.compute_capability, self.name)
        needed = [self.fp32_flops_per_second]
        needed += [self.fp16_flops_per_second] if ratios.half is not None else []
        needed += [self.tf32_flops_per_second, self.bf16_flops_per_second] if ratios.has_bf16 else []
        return None not in needed


def derived_device(figures: Figures) -> Device:
    """The device with these figures; its source states each rule by which others were derived.

    The float32 peak or the number of multiprocessors must be known. The device has medium confidence if neither
    a rate nor the multiprocessors had to be derived, else low.
    """
    rules: list[str] = []
    capability, name = figures.compute_capability, figures.name
    fp32, sm_count, clock_spread = _fp32_and_multiprocessors(figures, rules)
    tensor = _tensor_rates(figures, fp32, rules)
    if figures.l2_bytes is None:
        rules.append("L2 cache not known, taken as none")
    if figures.host_link_bytes_per_second is None:
        rules.append(f"host link taken as PCIe 3.0 x16, {LEAST_LINK_BYTES_PER_SECOND / 1e9:g} GB/s")
    if figures.nvlink_bytes_per_second is not None:
        rules.append("NVLink taken to join all GPUs of a machine")
    rules += _by_name(figures)
    architecture = architecture_of(capability)
    context = nearest_context(context_rows(), name, architecture, NEWEST_TORCH)
    return Device(
        name=name,
        kind="cuda",
        architecture=architecture,
        compute_capability=capability,
        sm_count=sm_count,
        capacity_bytes=figures.capacity_bytes,
        memory_bandwidth_bytes_per_second=figures.memory_bandwidth_bytes_per_second,
        memory_type=figures.memory_type or memory_type_of(name),
        l2_bytes=figures.l2_bytes or 0,
        fp32_flops_per_second=fp32,
        tf32_flops_per_second=tensor.tf32,
        fp16_flops_per_second=tensor.fp16,
        bf16_flops_per_second=tensor.bf16,
        host_link_bytes_per_second=figures.host_link_bytes_per_second or LEAST_LINK_BYTES_PER_SECOND,
        nvlink_bytes_per_second=figures.nvlink_bytes_per_second,
        nvlink_joins_all=figures.nvlink_bytes_per_second is not None,
        context_bytes=context.context_bytes,
        context_low_bytes=context.low_bytes,
        context_high_bytes=context.high_bytes,
        context_source=context.source,
        launch_seconds=CUDA_LAUNCH_SECONDS,
        dispatch=CUDA_DISPATCH,
        source="; ".join([figures.source, *rules]),
        confidence="medium" if figures.has_all_rates and figures.sm_count is not None else "low",
        rates_spread=round(math.hypot(clock_spread, tensor.spread), 3),
    )


def _by_name(figures: Figures) -> Iterator[str]:
    """Rules that say what the name of the GPU decides."""
    name, capability = figures.name, figures.compute_capability
    if name in {gpu for cells in read_rows("gpu_fractions.csv") for gpu in listed(cells["gpus"])}:
        yield f"fractions of the peaks that it reaches are those of the {name}, by its name"
    elif figures.memory_type is None:
        kind = memory_type_of(name)
        other = "GDDR" if kind == "HBM" else "HBM"
        yield f"memory taken as {kind}, by its name; {other} reaches other fractions of the peaks"
    if name in {gpu for row in context_rows() for gpu in row.gpus}:
        yield f"CUDA context as measured on the {name}, by its name"
    ratios, tensor = tensor_ratios(capability, name), tensor_ratios(capability, "")
    half, rest = figures.fp16_flops_per_second, (figures.tf32_flops_per_second, figures.bf16_flops_per_second)
    if ratios.half is None and tensor.half is not None:
        if half is None or (tensor.has_bf16 and None in rest):
            yield "no tensor rates but those given, by its name"
    elif ratios != tensor and not (half or figures.bf16_flops_per_second):
        yield "tensor rates of a GeForce, by its name"


class _TensorRates(NamedTuple):
    tf32: float | None
    fp16: float | None
    bf16: float | None
    spread: float


def _tensor_rates(figures: Figures, fp32: float, rules: list[str]) -> _TensorRates:
    """The tensor rates that are given; the others from them, or from the float32 peak."""
    given = _TensorRates(
        figures.tf32_flops_per_second, figures.fp16_flops_per_second, figures.bf16_flops_per_second, 0.0
    )
    capability = figures.compute_capability
    ratios = tensor_ratios(capability, figures.name)
    if figures.has_all_rates or ratios.half is None:
        return given
    half = given.fp16 or given.bf16
    is_unsure = half is None and ratios.may_be_double
    half = half or ratios.half * fp32 * (EITHER_FACTOR if is_unsure else 1.0)
    tf32 = None if ratios.tf32 is None else half * ratios.tf32 / ratios.half
    kind = f"cards of compute capability {capability[0]}.{capability[1]}"
    if given.fp16 or given.bf16:
        rules.append(f"other tensor rates by the ratios of {kind}")
    else:
        between = " to twice that, as cards differ; their middle is taken" if is_unsure else ""
        also = "" if tf32 is None else f", bf16 the same, tf32 {ratios.tf32:g}×"
        rules.append(f"tensor rates by the ratios of {kind}: fp16 {ratios.half:g}× fp32{also}{between}")
    return _TensorRates(
        given.tf32 or tf32,
        given.fp16 or half,
        given.bf16 or (half if ratios.has_bf16 else None),
        EITHER_SPREAD if is_unsure else 0.0,
    )


def _fp32_and_multiprocessors(figures: Figures, rules: list[str]) -> tuple[float, int, float]:
    """The float32 peak, the multiprocessors, and the spread of what was derived of the two."""
    capability, clock = figures.compute_capability, figures.clock_hertz
    fp32, sm_count = figures.fp32_flops_per_second, figures.sm_count
    cores = cores_per_multiprocessor(capability)
    if fp32 is not None and sm_count is not None:
        return fp32, sm_count, 0.0
    shown = f"{cores} float32 units"
    if fp32 is not None:
        at = clock or TYPICAL_CLOCK_HERTZ
        sm_count = max(round(fp32 / fp32_flops_per_second(capability, 1, at)), 1)
        rules.append(f"{sm_count} multiprocessors: fp32 peak / (2 × {shown} × {at / 1e9:.3g} GHz)")
        return fp32, sm_count, 0.0
    assert sm_count is not None
    if clock is None:
        rules.append(
            f"fp32: {sm_count} multiprocessors × 2 × {shown} × {TYPICAL_CLOCK_HERTZ / 1e9:.3g} GHz, the median "
            "clock of known GPUs"
        )
        return fp32_flops_per_second(capability, sm_count, TYPICAL_CLOCK_HERTZ), sm_count, TYPICAL_CLOCK_SPREAD
    rules.append(f"fp32: {sm_count} multiprocessors × 2 × {shown} × {clock / 1e9:.4g} GHz")
    is_limited = re.search(r"\b(laptop|max-?q|mobile)\b", figures.name, re.IGNORECASE) is not None
    if is_limited:
        rules.append("a laptop's or Max-Q card, by its name: the power limit decides the clock that it reaches")
    spread = POWER_LIMITED_SPREAD if is_limited else CLOCK_SPREAD
    return fp32_flops_per_second(capability, sm_count, clock), sm_count, spread
