"""The kernels of a step by class: predicted seconds, and amounts of work that `fit.py` fits factors to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from brimful.cost import StepTime
from brimful.cost.input_copies import INPUT_COPY
from brimful.cost.kernels import Unit, kernels_of
from brimful.cost.kernels.classes import LAUNCHES_NOTHING
from brimful.cost.kernels.constants import integers_per_second
from brimful.cost.kinds import base_name
from brimful.cost.roofline import Roofline
from brimful.devices import Device
from brimful.settings import Precision
from brimful.trace import Op


class AtPeak(NamedTuple):
    """A kernel with its time at the peak rates of a device."""

    name: str
    arithmetic: str
    """Type of the products: "half", "tf32" or "fp32"; "scalar" outside tensor cores; "integer" if it
    computes places of elements."""
    computing_seconds: float
    moving_seconds: float

    @property
    def loads_elements(self) -> bool:
        """Whether it is a misaligned product in a half type; see `Kernel`."""
        return self.arithmetic == "half" and self.name.endswith("matmul_unaligned")


def class_seconds(ops: Iterable[Op], device: Device, precision: Precision) -> dict[str, float]:
    """Predicted seconds of each kernel class, those that take most first.

    Args:
        ops: Those of one step.
        device: A GPU.
        precision: That of matmuls.

    Returns:
        Seconds by class.
    """
    roofline = Roofline(device, precision)
    found: Counter[str] = Counter()
    for op in ops:
        for name, seconds in roofline.work_parts(op):
            found[name] += seconds
    return {name: float(f"{seconds:.4g}") for name, seconds in found.most_common()}


def seconds_without_input_copies(time: StepTime) -> float:
    """The time of a step whose batches lie on the device already, as those of synthetic benchmarks do."""
    return time.total_seconds - dict(time.kernel_seconds).get(INPUT_COPY, 0.0)


def kernels_at_peak(ops: Iterable[Op], device: Device, precision: Precision) -> Counter[AtPeak]:
    """How often a step launches each kernel.

    Args:
        ops: Those of one step.
        device: A GPU.
        precision: That of matmuls.

    Returns:
        Numbers of launches.
    """
    scalar = device.fp32_flops_per_second
    peaks = {Unit.SCALAR: scalar, Unit.INTEGER: integers_per_second(device)}
    bandwidth = device.memory_bandwidth_bytes_per_second
    found: Counter[AtPeak] = Counter()
    for op in ops:
        rate = device.flops_per_second(op.dtype, precision) or scalar
        for kernel in kernels_of(op, device.sm_count or 1, is_tf32=precision is Precision.TF32):
            peak = peaks.get(kernel.unit, rate)
            arithmetic = str(kernel.unit) if kernel.unit in peaks else _arithmetic(op, precision)
            found[AtPeak(kernel.name, arithmetic, kernel.flops / peak, kernel.moved_bytes / bandwidth)] += 1
    return found


def _arithmetic(op: Op, precision: Precision) -> str:
    if op.dtype in ("float16", "bfloat16"):
        return "half"
    return "tf32" if precision is Precision.TF32 else "fp32"


def plain_roofline_seconds(ops: Iterable[Op], device: Device, precision: Precision) -> float:
    """The peer: each op takes max(FLOPs / peak, bytes / peak bandwidth).

    Args:
        ops: Those of one step.
        device: A GPU.
        precision: That of matmuls.

    Returns:
        Their sum.
    """
    fp32 = device.fp32_flops_per_second
    return sum(
        max(
            op.flops / (device.flops_per_second(op.dtype, precision) or fp32),
            (op.read_bytes + op.written_bytes) / device.memory_bandwidth_bytes_per_second,
        )
        for op in ops
        if base_name(op.name) not in LAUNCHES_NOTHING
    )
