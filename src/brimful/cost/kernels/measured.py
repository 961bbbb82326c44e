"""What the curves of a calibration say of a GPU: fractions of its peaks, and factors of classes of kernels.

Runs of a probe follow one another without waiting, so the time of a large one is the kernel's alone, and that
of a small one the host's. Only sizes that take clearly longer than the smallest say what the GPU does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace

from brimful.cost.kernels.constants import KERNEL_SECONDS
from brimful.cost.kernels.convolutions import convolution_kernels
from brimful.cost.kernels.fractions import KernelFactors, PeakFractions
from brimful.cost.kernels.kernel import HALF_TYPES, Kernel
from brimful.devices import Device, RateCurve
from brimful.trace.extents import Convolution

PROBE_SAMPLES, PROBE_CHANNELS, PROBE_KERNEL = 32, 128, 9
"""Size of the convolution that is timed on a GPU, forward and backward, contiguous: 3 × 3 from as many channels
to as many. Its images are square."""

CLEARLY_LONGER = 1.5
"""Times the smallest size's time: from here on the host is not what takes the time. A choice."""

CURVES = {
    "activation": "activation",
    "gather": "gather",
    "layer_norm": "normalization",
    "pooling": "pooling",
    "random": "random",
    "reduction_of_columns": "reduction",
    "scatter": "scatter",
    "selection": "selection",
    "softmax": "softmax",
}
"""Classes that memory limits, and the kind of work that calibration measures for each.

Not those of BatchNorm: the probe runs PyTorch's own kernels, training mostly cuDNN's. Not copies: the probe
puts heads before tokens, and most copies of a step convert types. On an H100 both curves gave times further
from a profile than the table's (docs/decisions/cost.md)."""

MEASURED_SPREAD = 0.08
"""Spread of a class that was measured on the GPU itself. Assumed: the medians of calibrated CPUs are 6 to 16 %
off (benchmarks/results/step_time.json, step_time_xeon.json)."""


def measured_rates(device: Device) -> dict[str, float]:
    """Amounts per second of a calibrated GPU's own work, by kind.

    Kinds of which even the largest size took little more than a launch are missing.
    """
    rates = {}
    for curve in device.curves:
        amount, seconds = curve.points[-1]
        if seconds >= CLEARLY_LONGER * curve.points[0][1] and seconds > KERNEL_SECONDS:
            rates[curve.kind] = amount / (seconds - KERNEL_SECONDS)
    return rates


def measured_fractions(device: Device, rates: Mapping[str, float], table: PeakFractions) -> PeakFractions:
    """Fractions of a calibrated GPU's peaks that probes reached, else those of the table.

    `rates` are those of `measured_rates`; `table` has the fractions without calibration. Those of convolutions
    follow from `with_convolutions`.
    """
    half = "bfloat16" if device.bf16_flops_per_second is not None else "float16"
    peaks = {
        f"matmul:{half}": device.bf16_flops_per_second or device.fp16_flops_per_second,
        "matmul:tf32": device.tf32_flops_per_second,
        "matmul:float32": device.fp32_flops_per_second,
        "elementwise": device.memory_bandwidth_bytes_per_second,
    }
    found = {kind: rates[kind] / peak for kind, peak in peaks.items() if peak and kind in rates}
    return replace(
        table,
        bandwidth=found.get("elementwise", table.bandwidth),
        half=found.get(f"matmul:{half}", table.half),
        tf32=found.get("matmul:tf32", table.tf32),
        fp32=found.get("matmul:float32", table.fp32),
        spread=MEASURED_SPREAD,
        rows=len(found),
    )


def measured_factors(rates: Mapping[str, float]) -> Iterator[tuple[str, KernelFactors]]:
    """Yield the name and factors of each class that was measured.

    Passes are how much slower than elementwise a class moves bytes. `rates` are those of `measured_rates`.
    """
    if "elementwise" not in rates:
        return
    for name, kind in CURVES.items():
        if kind in rates:
            passes = max(rates["elementwise"] / rates[kind], 1.0)
            yield name, KernelFactors(passes=passes, slowdown=1.0, spread=MEASURED_SPREAD, rows=1)


def with_convolutions(
    device: Device, reached: PeakFractions, factors: Mapping[str, KernelFactors]
) -> PeakFractions:
    """The fractions with those of convolutions, relative to products in the same type.

    Those of half types and of float32 stay as they are if they were not measured; the spread is that between
    sizes. `reached` has the fractions for products and memory, `factors` those of all classes.
    """
    by_kind = {curve.kind: curve for curve in device.curves}
    half = "bfloat16" if device.bf16_flops_per_second is not None else "float16"
    found = {
        dtype: _logarithms(by_kind[f"convolution:{dtype}"], dtype, device, reached, factors)
        for dtype in (half, "float32")
        if f"convolution:{dtype}" in by_kind
    }
    found = {dtype: each for dtype, each in found.items() if each}
    if not found:
        return reached
    relative = {dtype: math.exp(statistics.fmean(each)) for dtype, each in found.items()}
    spreads = [statistics.stdev(each) for each in found.values() if len(each) > 1]
    return replace(
        reached,
        convolution_half=relative.get(half, reached.convolution_half),
        convolution_fp32=relative.get("float32", reached.convolution_fp32),
        convolution_spread=max([*spreads, MEASURED_SPREAD]),
    )


def _logarithms(
    curve: RateCurve,
    dtype: str,
    device: Device,
    reached: PeakFractions,
    factors: Mapping[str, KernelFactors],
) -> list[float]:
    """Logarithms of modelled over measured time of the probe's convolutions, for sizes that the GPU limits."""
    least = CLEARLY_LONGER * curve.points[0][1]
    peak = (device.flops_per_second(dtype) or device.fp32_flops_per_second) * reached.arithmetic(
        dtype, is_tf32=False
    )
    bandwidth = device.memory_bandwidth_bytes_per_second * reached.bandwidth
    found = []
    for amount, seconds in curve.points:
        computing, moving = 0.0, 0.0
        for kernel in _probe_kernels(amount, dtype, device.sm_count or 1):
            if kernel.flops:
                computing += kernel.flops * factors[kernel.name].slowdown / peak
            else:
                moving += kernel.moved_bytes * factors[kernel.name].passes / bandwidth
            moving += KERNEL_SECONDS
        if seconds >= least and seconds > moving:
            found.append(math.log(computing / (seconds - moving)))
    return found


def _probe_kernels(flops: float, dtype: str, sm_count: int) -> Iterator[Kernel]:
    """Forward's and backward's kernels of the probe that has these FLOPs."""
    per_position = 3 * 2 * PROBE_SAMPLES * PROBE_KERNEL * PROBE_CHANNELS**2
    positions = round(flops / per_position)
    size = 2 if dtype in HALF_TYPES else 4
    weight_bytes = PROBE_KERNEL * PROBE_CHANNELS**2 * size
    forward = Convolution(
        samples=PROBE_SAMPLES,
        in_channels=PROBE_CHANNELS,
        out_channels=PROBE_CHANNELS,
        groups=1,
        kernel=PROBE_KERNEL,
        stride=1,
        in_positions=positions,
        out_positions=positions,
        is_channels_last=0,
        gradients=0,
        width=math.isqrt(PROBE_KERNEL),
        dilation=1,
    )
    for each in (forward, forward._replace(gradients=3)):
        yield from convolution_kernels(each, dtype, weight_bytes, sm_count)
