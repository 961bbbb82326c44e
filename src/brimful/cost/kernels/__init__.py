"""An op → the GPU kernels that it launches, each with its class, arithmetic and bytes.

Input: an `Op` with its problem size (`trace.extents`). Output: `Kernel`s, whose time `roofline` computes with
the factors of their class (`factors`, `data/kernel_factors.csv`) and the rates that a GPU reaches
(`data/gpu_fractions.csv`). Start reading at `classes.kernels_of`; `convolutions` and `tiles` have what cuDNN
and cuBLAS do with a problem size.
"""

from brimful.cost.kernels.classes import kernels_of
from brimful.cost.kernels.factors import FactorTable
from brimful.cost.kernels.fractions import KernelFactors, PeakFractions
from brimful.cost.kernels.kernel import Kernel, Unit
from brimful.cost.kernels.measured import PROBE_CHANNELS, PROBE_SAMPLES

__all__ = [
    "PROBE_CHANNELS",
    "PROBE_SAMPLES",
    "FactorTable",
    "Kernel",
    "KernelFactors",
    "PeakFractions",
    "Unit",
    "kernels_of",
]
