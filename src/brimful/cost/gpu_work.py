"""Seconds of a GPU's work for one op: the sum over the kernels that it launches."""

from __future__ import annotations

from brimful.cost.kernels import FactorTable, Kernel, Unit, kernels_of
from brimful.cost.kernels.classes import CONVOLUTION, FUSED_ATTENTION
from brimful.cost.kernels.constants import (
    CACHED_FRACTION,
    ELEMENT_LOADING_FLOPS,
    KERNEL_SECONDS,
    L2_SPEEDUP,
    PLACE_OPERATIONS,
    integers_per_second,
)
from brimful.devices import Device
from brimful.settings import Precision
from brimful.trace import Op


class GpuWork:
    """The rates of a GPU: its peaks, the fractions of them that it reaches, and factors of kernel classes."""

    def __init__(self, device: Device, precision: Precision) -> None:
        self._factors = FactorTable.of(device)
        reached = self._factors.reached
        self._is_tf32 = is_tf32 = precision is Precision.TF32 and device.tf32_flops_per_second is not None
        self._sm_count = device.sm_count or 1
        self._fp32_rate = device.fp32_flops_per_second
        has_rate = {
            "float32": True,
            "float16": device.fp16_flops_per_second is not None,
            "bfloat16": device.bf16_flops_per_second is not None,
        }  # without one, the rate is that of float32
        self._fractions = {
            dtype: reached.arithmetic(dtype, is_tf32=is_tf32) for dtype, has in has_rate.items() if has
        }
        self._convolutions = {
            dtype: reached.convolution(dtype, is_tf32=is_tf32) for dtype, has in has_rate.items() if has
        }
        self._fp32_fraction = reached.fp32
        self._element_loading_rate = integers_per_second(device) * ELEMENT_LOADING_FLOPS
        self._places_per_second = integers_per_second(device) / PLACE_OPERATIONS
        self._attention = reached.attention
        self._cached_bytes = CACHED_FRACTION * device.l2_bytes
        self.seconds_per_byte = 1 / (device.memory_bandwidth_bytes_per_second * reached.bandwidth)

    def parts(self, op: Op, flops_per_second: float) -> list[tuple[str, float]]:
        """Seconds by class of kernel; `flops_per_second` is the peak rate of products in the op's type."""
        return [
            (kernel.name, self.kernel_seconds(kernel, op.dtype, flops_per_second))
            for kernel in kernels_of(op, self._sm_count, is_tf32=self._is_tf32)
        ]

    def kernel_seconds(self, kernel: Kernel, dtype: str, flops_per_second: float) -> float:
        """Seconds of one launch: the larger of arithmetic and memory, and the least time of a kernel.

        `flops_per_second` is the peak rate of products in `dtype`.
        """
        factors = self._factors.factors(kernel.name)
        if kernel.unit is Unit.INTEGER:
            computing = kernel.flops / self._places_per_second
        else:
            computing = kernel.flops * factors.slowdown / self._rate(kernel, dtype, flops_per_second)
        moving = self._from_memory(kernel.moved_bytes) * factors.passes * self.seconds_per_byte
        return max(computing, moving) + KERNEL_SECONDS

    def _rate(self, kernel: Kernel, dtype: str, flops_per_second: float) -> float:
        if kernel.unit is Unit.SCALAR:
            return self._fp32_rate
        if kernel.name in FUSED_ATTENTION:
            return flops_per_second * self._attention
        rate = flops_per_second * self._fractions.get(dtype, self._fp32_fraction)
        if kernel.name.startswith(CONVOLUTION):
            return rate * self._convolutions.get(dtype, 1.0)
        return min(rate, self._element_loading_rate) if kernel.loads_elements else rate

    def _from_memory(self, moved_bytes: int) -> float:
        """Bytes from memory that take as long as `moved_bytes`, of which the L2 cache has some."""
        cached = min(self._cached_bytes, moved_bytes)
        return moved_bytes - cached * (1 - 1 / L2_SPEEDUP)
