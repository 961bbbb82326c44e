"""What a class of kernels takes and what a GPU reaches: rows of the tables in `data/`."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.cost.kernels.kernel import HALF_TYPES


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
    """Fraction of the peak of fp16 and bf16, with float32 accumulation; above 1 where a card runs above its
    rated clock."""
    tf32: float
    """Fraction of the peak of TF32."""
    fp32: float
    """Fraction of the peak of float32 outside tensor cores, for products."""
    attention: float
    """Fraction of the peak of the type in fused attention, whose kernels do not use all that newer GPUs
    have."""
    attention_spread: float
    """Least spread of the classes of fused attention: 0 on GPUs where it was measured."""
    convolution_half: float
    """Rate of convolutions by filters of several elements relative to products, in half types and TF32: 1 where
    cuDNN's kernels are as good as cuBLAS's, or it is not known."""
    convolution_fp32: float
    """Rate of these convolutions relative to products in float32 outside tensor cores."""
    convolution_spread: float
    """Least spread of these convolutions: 0 where their rate relative to products is that of the fit."""
    spread: float
    """Standard deviation of the logarithm of a step's time between GPUs of one generation."""
    rows: int
    """Measurements that the row is fitted to; 0: assumed."""

    def arithmetic(self, dtype: str, *, is_tf32: bool) -> float:
        """The fraction for products in a type, but for fused attention."""
        if dtype in HALF_TYPES:
            return self.half
        return self.tf32 if is_tf32 else self.fp32

    def convolution(self, dtype: str, *, is_tf32: bool) -> float:
        """The rate of convolutions relative to products in a type."""
        return self.convolution_half if is_tf32 or dtype in HALF_TYPES else self.convolution_fp32
