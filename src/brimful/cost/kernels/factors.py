"""What kernel classes take beyond their least work, and what GPUs reach of their peaks: two tables in `data/`.

The time of a kernel on a GPU that was not calibrated:

    max(flops · slowdown / (peak FLOP/s · arithmetic fraction),
        bytes · passes / (peak bandwidth · bandwidth fraction)) + the least time of a kernel

`passes` and `slowdown` are of a class and the same for all GPUs; the fractions are of a GPU and the same for
all classes. `benchmarks/times/fit.py` fits both to published times of training steps, forward passes and
blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from brimful.cost.kernels.classes import CONVOLUTION, FUSED_ATTENTION
from brimful.cost.kernels.fractions import KernelFactors, PeakFractions
from brimful.cost.kernels.measured import (
    measured_factors,
    measured_fractions,
    measured_rates,
    with_convolutions,
)
from brimful.devices import Device
from brimful.devices.data_rows import listed, read_rows
from brimful.devices.peaks import memory_type_of

UNKNOWN = "unknown"
"""The row of a class that is not in the table, with a wide spread."""


class FactorTable:
    """The factors of all classes on one GPU, and the fractions of its peaks that it reaches.

    `measured` has the factors of classes that were measured on the GPU; the table has those of others.
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
        rates = measured_rates(device)
        measured = dict(measured_factors(rates))
        reached = measured_fractions(device, rates, reached)
        return cls(with_convolutions(device, reached, {**_kernel_table(), **measured}), measured)

    def factors(self, name: str) -> KernelFactors:
        """The factors of a class, with the spread that they have on this GPU."""
        found = self._factors.get(name) or self._factors[UNKNOWN]
        if name in FUSED_ATTENTION:
            return replace(found, spread=max(found.spread, self.reached.attention_spread))
        if name.startswith(CONVOLUTION):
            return replace(found, spread=max(found.spread, self.reached.convolution_spread))
        return found


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
    """The fractions that a GPU reaches, from its own row, else from its architecture's and kind of memory's."""
    return _reached(device.name, device.architecture, memory_kind(device))


def memory_kind(device: Device) -> str:
    """Type of a GPU's memory, HBM or GDDR: as the device says, else by its name."""
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
        convolution_half=float(found["convolution_half"]),
        convolution_fp32=float(found["convolution_fp32"]),
        convolution_spread=float(found["convolution_spread"]),
        spread=float(found["spread"]),
        rows=int(found["rows"]),
    )


def _specificity(cells: dict[str, str], name: str, architecture: str, memory: str) -> int:
    """3 for a row of the GPU, 2 of its architecture and memory, 1 of its memory, -1 if it does not apply."""
    if cells["gpus"]:
        return 3 if name in listed(cells["gpus"]) else -1
    if cells["memory"] != memory:
        return -1
    if cells["architecture"]:
        return 2 if cells["architecture"] == architecture else -1
    return 1
