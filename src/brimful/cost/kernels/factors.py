"""What kernel classes take beyond their least work, and what GPUs reach of their peaks: two tables in `data/`.

The time of a kernel on a GPU that was not calibrated:

    max(flops · slowdown / (peak FLOP/s · arithmetic fraction),
        bytes · passes / (peak bandwidth · bandwidth fraction)) + the least time of a kernel

`passes` and `slowdown` are of a class and the same for all GPUs; the fractions are of a GPU and the same for
all classes. `benchmarks/times/fit.py` fits both to published times of training steps, forward passes and
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from brimful.cost.kernels.classes import FUSED_ATTENTION
from brimful.devices import Device, RateCurve
from brimful.devices.data_rows import listed, read_rows
from brimful.devices.peaks import memory_type_of

_CONSTANTS = {cells["name"]: float(cells["value"]) for cells in read_rows("kernel_constants.csv")}

KERNEL_SECONDS = _CONSTANTS["kernel_seconds"]
"""Least time of a kernel on a GPU, beside its work: start and end of its blocks, and the gap to the next one.
Fitted with the classes, so other fixed costs of an op are in it: a kernel that does nothing takes 2 to 3 µs."""

CACHED_FRACTION = _CONSTANTS["cached_fraction"]
"""Fraction of the L2 cache that has bytes which a kernel reads or writes, because the one before wrote them or
the one after reads them. Fitted with the classes, to GPUs with 6 to 128 MiB."""

L2_SPEEDUP = 4.0
"""Bandwidth of the L2 cache relative to the memory's. 3 to 5 on an A100, H100 and RTX 4090 in microbenchmarks
(Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", arXiv 2402.13499)."""


PLACE_OPERATIONS = _CONSTANTS["place_operations"]
"""Integer operations to compute where an element lies in one operand of a pointwise kernel whose operands are
broadcast or not contiguous: a division for each dimension, by multiplication and shift, a product and a sum
(aten/src/ATen/cuda/detail/OffsetCalculator.cuh). Fitted with the classes."""

ELEMENT_LOADING_FLOPS = _CONSTANTS["element_loading_flops"]
"""FLOPs of a product in a half type for each 32-bit integer operation that a GPU could do meanwhile, where rows
of operands are not whole 16 bytes. Asynchronous copies to shared memory take at least 4 bytes (PTX ISA,
cp.async), so cuBLAS runs the kernels of the generation before them (`cutlass_75_tensorop_…_align1`), whose
threads load element by element: their rate follows the multiprocessors and the clock, not the tensor cores.
Taken from the RTX 3090, the one GPU whose misaligned products are fitted: its rate of aligned products, to which
the slowdowns of the classes are relative, over its rate of integer operations."""

_INTEGERS_PER_CLOCK = 64
"""32-bit integer operations of a multiprocessor per clock. Source: CUDA C++ programming guide, throughput of
native arithmetic instructions, compute capability 7.0 and later; used for older GPUs too."""
_FLOAT32_LANES = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}
"""float32 multiply-adds of a multiprocessor per clock, by compute capability; 128 for all others. Source: as
above."""


DIFFERENCE_WIDENING = _CONSTANTS["widening"]
"""Factor of the intervals of differences, with which 90 % of the differences of vision models in two layouts
are within theirs. Errors of a class differ between two steps of a model by more than those of whole steps
show."""


def integers_per_second(device: Device) -> float:
    """The peak rate of 32-bit integer operations of a GPU, from that of float32: one of 2 FLOPs per lane."""
    lanes = _FLOAT32_LANES.get(device.compute_capability or (0, 0), 128)
    return device.fp32_flops_per_second / 2 / lanes * _INTEGERS_PER_CLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFactors:
    """What a class of kernels takes beyond its least work: a row of `data/kernel_factors.csv`."""

    passes: float
    """Bytes moved, relative to operands read once and results written once."""
    slowdown: float
    """Time of its arithmetic, relative to a large matrix product of the same FLOPs."""
    spread: float
    """Standard deviation of the logarithm of measured over predicted time."""
    rows: int
    """Measurements in which the class takes at least 3 % of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakFractions:
    """Fractions of its peaks that a GPU reaches: a row of `data/gpu_fractions.csv`."""

    bandwidth: float
    half: float
    """Of the peak of fp16 and bf16, with float32 accumulation; above 1 where a card runs above its rated
    clock."""
    tf32: float
    """Of the peak of TF32."""
    fp32: float
    """Of the peak of float32 outside tensor cores, for products."""
    attention: float
    """Of the peak of the type in fused attention, whose kernels do not use all that newer GPUs have."""
    attention_spread: float
    """Least spread of the classes of fused attention: 0 on GPUs where it was measured."""
    spread: float
    """Standard deviation of the logarithm of a step's time between GPUs of one generation."""
    rows: int
    """Measurements that the row is fitted to; 0: assumed."""

    def arithmetic(self, dtype: str, *, is_tf32: bool) -> float:
        """The fraction for products in a type, but for fused attention."""
        if dtype in ("float16", "bfloat16"):
            return self.half
        return self.tf32 if is_tf32 else self.fp32


UNKNOWN = "unknown"
"""The row of a class that is not in the table, with a wide spread."""


class FactorTable:
    """The factors of all classes on one GPU, and the fractions of its peaks that it reaches.

    Args:
        reached: Fractions of the peaks.
        measured: Factors of classes that were measured on the GPU; the table has those of others.
    """

    def __init__(self, reached: PeakFractions, measured: Mapping[str, KernelFactors]) -> None:
        self.reached = reached
        self._factors = {**_kernel_table(), **measured}

    @classmethod
    def of(cls, device: Device) -> FactorTable:
        """The factors for a GPU: from its curves if it was calibrated, else from the tables."""
        reached = reached_by(device)
        if not device.curves:
            return cls(reached, {})
        rates = {curve.kind: _marginal_rate(curve) for curve in device.curves}
        return cls(_measured_fractions(device, rates, reached), dict(_measured_factors(rates)))

    def factors(self, name: str) -> KernelFactors:
        """The factors of a class, with the spread that they have on this GPU."""
        found = self._factors.get(name) or self._factors[UNKNOWN]
        if name not in FUSED_ATTENTION:
            return found
        return replace(found, spread=max(found.spread, self.reached.attention_spread))


def _marginal_rate(curve: RateCurve) -> float:
    """Amount per second without the launch: between the smallest and the largest probe."""
    (least, least_seconds), (most, most_seconds) = curve.points[0], curve.points[-1]
    if most_seconds > least_seconds:
        return (most - least) / (most_seconds - least_seconds)
    return most / most_seconds


_CURVES = {
    "activation": "activation",
    "batch_norm": "batch_norm",
    "batch_norm_backward": "batch_norm_backward",
    "copy": "copy",
    "gather": "gather",
    "layer_norm": "normalization",
    "pooling": "pooling",
    "random": "random",
    "reduction_of_rows": "reduction",
    "scatter": "scatter",
    "selection": "selection",
    "softmax": "softmax",
}
"""Classes that memory limits, and the kind of work that calibration measures for each."""

MEASURED_SPREAD = 0.08
"""Spread of a class that was measured on the GPU itself. Assumed: the medians of calibrated CPUs are 6 to 16 %
off (benchmarks/results/step_time.json, step_time_xeon.json)."""


def _measured_fractions(device: Device, rates: Mapping[str, float], table: PeakFractions) -> PeakFractions:
    """The fractions of the peaks that probes reached, else those of the table."""
    half = "bfloat16" if device.bf16_flops_per_second is not None else "float16"
    peaks = {
        f"matmul:{half}": device.bf16_flops_per_second or device.fp16_flops_per_second,
        "matmul:tf32": device.tf32_flops_per_second,
        "matmul:float32": device.fp32_flops_per_second,
        "elementwise": device.memory_bandwidth_bytes_per_second,
    }
    found = {kind: rates[kind] / peak for kind, peak in peaks.items() if peak and kind in rates}
    return PeakFractions(
        bandwidth=found.get("elementwise", table.bandwidth),
        half=found.get(f"matmul:{half}", table.half),
        tf32=found.get("matmul:tf32", table.tf32),
        fp32=found.get("matmul:float32", table.fp32),
        attention=table.attention,
        attention_spread=table.attention_spread,
        spread=MEASURED_SPREAD,
        rows=len(found),
    )


def _measured_factors(rates: Mapping[str, float]) -> Iterator[tuple[str, KernelFactors]]:
    """Passes of each class that was measured: how much slower than elementwise it moves bytes."""
    if "elementwise" not in rates:
        return
    for name, kind in _CURVES.items():
        if kind in rates:
            passes = max(rates["elementwise"] / rates[kind], 1.0)
            yield name, KernelFactors(passes=passes, slowdown=1.0, spread=MEASURED_SPREAD, rows=1)


@cache
def _kernel_table() -> dict[str, KernelFactors]:
    return {
        cells["kernel"]: KernelFactors(
            passes=float(cells["passes"]),
            slowdown=float(cells["slowdown"]),
            spread=float(cells["spread"]),
            rows=int(cells["rows"]),
        )
        for cells in read_rows("kernel_factors.csv")
    }


def reached_by(device: Device) -> PeakFractions:
    """The fractions that a GPU reaches: of its own row, else of its architecture and kind of memory.

    Args:
        device: A GPU of the table.

    Returns:
        The most specific row.
    """
    return _reached(device.name, device.architecture, memory_kind(device))


def memory_kind(device: Device) -> str:
    """HBM or GDDR: as the device says, else by its name."""
    return device.memory_type or memory_type_of(device.name)


@cache
def _reached(name: str, architecture: str, memory: str) -> PeakFractions:
    rows = list(read_rows("gpu_fractions.csv"))
    found = max(rows, key=lambda cells: _specificity(cells, name, architecture, memory))
    return PeakFractions(
        bandwidth=float(found["bandwidth"]),
        half=float(found["half"]),
        tf32=float(found["tf32"]),
        fp32=float(found["fp32"]),
        attention=float(found["attention"]),
        attention_spread=float(found["attention_spread"]),
        spread=float(found["spread"]),
        rows=int(found["rows"]),
    )


def _specificity(cells: dict[str, str], name: str, architecture: str, memory: str) -> int:
    """3 for a row of the GPU, 2 of its architecture and memory, 1 of its memory, 0 of another."""
    if cells["gpus"]:
        return 3 if name in listed(cells["gpus"]) else -1
    if cells["memory"] != memory:
        return -1
    if cells["architecture"]:
        return 2 if cells["architecture"] == architecture else -1
    return 1
