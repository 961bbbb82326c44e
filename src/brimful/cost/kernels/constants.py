"""Constants that are the same for all classes of kernels and all GPUs: `data/kernel_constants.csv`."""

from __future__ import annotations

from brimful.devices import Device
from brimful.devices.data_rows import read_rows

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
Taken from the RTX 3090, which the misaligned classes are fitted to: its rate of aligned products, to which the
slowdowns of the classes are relative, over its rate of integer operations."""

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
