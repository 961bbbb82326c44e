"""One launch of a GPU kernel: its class and amounts of work."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Unit(StrEnum):
    """What does a kernel's arithmetic."""

    TENSOR = "tensor"
    """Tensor cores, or on GPUs or in types without them the rate of products in the op's type."""
    SCALAR = "scalar"
    """float32 outside tensor cores."""
    INTEGER = "integer"
    """32-bit integers, which compute where elements lie; "FLOPs" are then numbers of places."""


class Kernel(NamedTuple):
    """One launch of a kernel."""

    name: str
    """Class: a row of `data/kernel_factors.csv`."""
    flops: float = 0.0
    """FLOPs with those that tiles and padding waste; 0 where arithmetic does not limit."""
    unit: Unit = Unit.TENSOR
    moved_bytes: int = 0
    """Operands read once and results written once."""
    loads_elements: bool = False
    """Whether it loads elements of two bytes one by one, as rows are not whole 16 bytes."""


HALF_TYPES = frozenset({"float16", "bfloat16"})

ALIGNMENT = 8
"""Elements of a half type in 16 bytes: dimensions that are not multiples of it are slower on tensor cores.
NVIDIA, "Matrix Multiplication Background User's Guide", requirements to use tensor cores."""


def is_aligned(*dimensions: int) -> bool:
    """Whether tensor cores load all dimensions in whole 16 bytes."""
    return not any(dimension % ALIGNMENT for dimension in dimensions)
