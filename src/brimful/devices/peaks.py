"""Peak rates of a GPU that is not in the table, by its compute capability."""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

Capability = tuple[int, int]
MemoryType = Literal["HBM", "GDDR"]

_HBM = ("P100", "V100", "A30", "A100", "A800", "H100", "H200", "H20", "H800", "GH200", "B200", "B300", "GB200")
"""Words of the names of GPUs with stacked memory."""

_ARCHITECTURES = {
    3: "Kepler",
    5: "Maxwell",
    6: "Pascal",
    8: "Ampere",
    9: "Hopper",
    10: "Blackwell",
    12: "Blackwell",
}
"""Architectures by major compute capability; 7.x and 8.9 are in `architecture_of`."""

_CORES = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
"""Float32 units of a multiprocessor; 192 before 5.0, 128 otherwise.

Source: CUDA C++ programming guide, throughput of native arithmetic instructions. The peaks of all rows of
`data/gpus.csv` follow from it with clocks from 0.7 to 2.65 GHz, which a test checks.
"""

CLOCK_SPREAD = 0.1
"""Standard deviation of the logarithm of the rated clock, if a driver reports it: an RTX 5090 reports 2655 MHz
(github aikitoria/open-gpu-kernel-modules#1), 10 % above what its rated peak follows from."""

EITHER_FACTOR, EITHER_SPREAD = math.sqrt(2), math.log(2) / 2
"""For tensor rates that a card may have twice of: their middle on a logarithmic scale, relative to the slower
one, and the standard deviation, by which either is away from the middle."""


class TensorRatios(NamedTuple):
    """Dense rates of tensor cores relative to the float32 peak; None without such hardware."""

    tf32: float | None
    half: float | None
    """fp16 with float32 accumulation."""
    may_be_double: bool = False
    """Whether it may be one of the cards with twice these rates."""

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 runs at the rate of fp16, which is so where there is TF32 (NVIDIA A100 whitepaper)."""
        return self.tf32 is not None


def memory_type_of(name: str) -> MemoryType:
    """The type of a GPU's memory, by the words of its name."""
    return "HBM" if any(mark in re.split(r"[^A-Za-z0-9]+", name) for mark in _HBM) else "GDDR"


def architecture_of(capability: Capability) -> str:
    """NVIDIA's name of an architecture, or "compute capability X.Y" of one that is not known."""
    major, minor = capability
    if major == 7:
        return "Turing" if minor == 5 else "Volta"
    if capability == (8, 9):
        return "Ada Lovelace"
    return _ARCHITECTURES.get(major, f"compute capability {major}.{minor}")


def cores_per_multiprocessor(capability: Capability) -> int:
    """Float32 units, each of which computes a multiplication and an addition per clock."""
    return 192 if capability < (5, 0) else _CORES.get(capability, 128)


def fp32_flops_per_second(capability: Capability, sm_count: int, clock_hertz: float) -> float:
    """The float32 peak outside tensor cores."""
    return 2.0 * cores_per_multiprocessor(capability) * sm_count * clock_hertz


def tensor_ratios(capability: Capability, name: str) -> TensorRatios:
    """Tensor rates relative to the float32 peak for a compute capability, of the slower cards that have it.

    They are those of the rows of `data/gpus.csv`, in NVIDIA's whitepapers. A GeForce has half the rates of a
    professional card where they accumulate in float32, and so have the A10G and the L40. A name without
    "GeForce" may be either. `name` is the driver's: the GTX 16 cards have no tensor cores.
    """
    if capability < (7, 0) or "gtx" in name.lower():
        return TensorRatios(None, None)
    is_unsure = "geforce" not in name.lower()
    if capability < (7, 5):
        return TensorRatios(None, 8.0)
    if capability < (8, 0):
        return TensorRatios(None, 4.0, may_be_double=is_unsure)
    if capability == (8, 0):
        return TensorRatios(8.0, 16.0)
    if capability == (9, 0):
        return TensorRatios(7.39, 14.79)
    if capability[0] == 10:
        return TensorRatios(15.0, 30.0)
    return TensorRatios(1.0, 2.0, may_be_double=is_unsure)
