"""A GPU's properties, as the driver reports them → its `Device`: a row of the table, its part, or derived."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from brimful.devices.derived import Figures, derived_device
from brimful.devices.device import Device
from brimful.devices.peaks import Capability
from brimful.devices.table import find_device
from brimful.errors import UnknownNameError, UsageError
from brimful.utils.quantities import format_bytes

SAME_MULTIPROCESSORS_FRACTION = 0.05
"""By how much a card may differ from its row in multiprocessors: more than rows may be wrong by (the L4's: 58,
or 60 on other pages), less than two cards of one name differ (RTX 3050: 18 and 20). A choice."""

SAME_BANDWIDTH_FRACTION = 0.1
"""By how much a card may differ from its row in the memory's bandwidth: less than cards of one name differ (RTX
3060 Ti with GDDR6 and GDDR6X: 448 and 608 GB/s; GTX 1650 with GDDR5 and GDDR6: 128 and 192). A choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProperties:
    """What a driver reports of a GPU; None: not reported."""

    name: str
    capacity_bytes: int
    compute_capability: Capability | None = None
    sm_count: int | None = None
    clock_hertz: float | None = None
    """Highest clock of multiprocessors."""
    memory_clock_hertz: float | None = None
    memory_bus_bits: int | None = None
    l2_bytes: int | None = None
    link_generation: int | None = None
    """Of PCIe, the highest of card and slot."""
    link_lanes: int | None = None
    clock_source: str = "torch.cuda.get_device_properties"

    @property
    def memory_bandwidth_bytes_per_second(self) -> float | None:
        """Peak bandwidth: two transfers per clock of the bus.

        Source: NVIDIA's deviceQuery and bandwidth samples, `2 · memoryClockRate · memoryBusWidth / 8`. It gives
        1555 GB/s for an A100 (1215 MHz, 5120 bit) and 1792 GB/s for an RTX 5090 (14001 MHz, 512 bit).
        """
        if not self.memory_clock_hertz or not self.memory_bus_bits:
            return None
        return 2 * self.memory_clock_hertz * self.memory_bus_bits / 8


def device_with_properties(properties: GpuProperties) -> Device:
    """The device with these properties.

    A row of the table with this name is used if multiprocessors and bandwidth are its own, as cards with one
    name may differ. A MIG slice has its part of the whole card's row. Of any other GPU the rates are derived.

    Args:
        properties: As the driver reports them.

    Returns:
        A device with the capacity that the driver reports.

    Raises:
        UsageError: Too little is known of a GPU that is not in the table; says what.
    """
    row = _row_of(properties)
    if row is not None:
        return row
    if " MIG " in properties.name:
        return _mig_slice(properties)
    return _from_properties(properties)


def _row_of(properties: GpuProperties) -> Device | None:
    try:
        row = find_device(properties.name, capacity_bytes=properties.capacity_bytes)
    except UnknownNameError:
        return None
    assert row.sm_count is not None
    if not _is_near(properties.sm_count, row.sm_count, SAME_MULTIPROCESSORS_FRACTION):
        return None
    bandwidth = properties.memory_bandwidth_bytes_per_second
    if not _is_near(bandwidth, row.memory_bandwidth_bytes_per_second, SAME_BANDWIDTH_FRACTION):
        return None
    return row


def _is_near(reported: float | None, expected: float, fraction: float) -> bool:
    return reported is None or abs(reported - expected) <= fraction * expected


_SLICE = re.compile(r"(?P<card>.+?) MIG (?P<compute>\d+)(?:c\.\d+)?g\.(?P<memory>\d+)gb", re.IGNORECASE)


def _mig_slice(properties: GpuProperties) -> Device:
    """A slice's rates: the whole card's, by its multiprocessors and by its memory.

    Source: NVIDIA's MIG user guide: a slice has its own multiprocessors, and with its part of the memory the
    same part of L2 cache and bandwidth.
    """
    match = _SLICE.match(properties.name)
    if match is None or properties.sm_count is None:
        raise UsageError(
            f"{properties.name!r} is a MIG slice, whose multiprocessors and card are not known here. "
            f"{DESCRIBE_BY_HAND}"
        )
    try:
        card = find_device(match["card"])
    except UsageError:
        return _from_properties(properties)
    assert card.sm_count is not None
    compute = properties.sm_count / card.sm_count
    memory = min(properties.capacity_bytes / card.capacity_bytes, 1.0)

    def part(rate: float | None) -> float | None:
        return None if rate is None else rate * compute

    return replace(
        card,
        name=properties.name,
        sm_count=properties.sm_count,
        capacity_bytes=properties.capacity_bytes,
        memory_bandwidth_bytes_per_second=card.memory_bandwidth_bytes_per_second * memory,
        l2_bytes=int(card.l2_bytes * memory),
        fp32_flops_per_second=card.fp32_flops_per_second * compute,
        tf32_flops_per_second=part(card.tf32_flops_per_second),
        fp16_flops_per_second=part(card.fp16_flops_per_second),
        bf16_flops_per_second=part(card.bf16_flops_per_second),
        nvlink_bytes_per_second=None,
        nvlink_joins_all=False,
        source=(
            f"a MIG slice: {properties.sm_count} of {card.sm_count} multiprocessors and "
            f"{format_bytes(properties.capacity_bytes)} of {format_bytes(card.capacity_bytes)}, rates and "
            f"bandwidth in proportion to {card.name}: {card.source}"
        ),
        confidence="low",
        rates_spread=MIG_SPREAD,
    )


MIG_SPREAD = 0.1
"""Standard deviation of the logarithm of a slice's rates, which have the whole card's clock in proportion: the
other slices' work decides the clock. Assumed."""

DESCRIBE_BY_HAND = (
    'Describe it: --device "name=…,memory=8GiB,bandwidth=300GB,tflops=9,capability=8.6", from its datasheet.'
)


def _from_properties(properties: GpuProperties) -> Device:
    bandwidth = properties.memory_bandwidth_bytes_per_second
    capability, sm_count = properties.compute_capability, properties.sm_count
    missing = [
        what
        for what, value in {
            "compute capability": capability,
            "number of multiprocessors": sm_count,
            "memory clock and bus width": bandwidth,
        }.items()
        if value is None
    ]
    if missing:
        raise UsageError(
            f"{properties.name!r} is not in the table of GPUs, and neither torch nor the driver reports its "
            f"{', '.join(missing)}. {DESCRIBE_BY_HAND}"
        )
    assert capability is not None
    assert bandwidth is not None
    return derived_device(
        Figures(
            name=properties.name,
            capacity_bytes=properties.capacity_bytes,
            memory_bandwidth_bytes_per_second=bandwidth,
            compute_capability=capability,
            sm_count=sm_count,
            clock_hertz=properties.clock_hertz,
            l2_bytes=properties.l2_bytes,
            host_link_bytes_per_second=_link_bytes_per_second(properties),
            source=(
                f"not in the table: memory, multiprocessors and L2 as the driver reports them; clocks and bus "
                f"width from {properties.clock_source}, bandwidth 2 × memory clock × bus width"
            ),
        )
    )


_LANE_BYTES_PER_SECOND = {1: 0.19e9, 2: 0.38e9, 3: 0.769e9, 4: 1.5625e9, 5: 3.25e9}
"""One lane of PCIe by generation, as `data/gpus.csv` has it for generations 3 to 5 (12.3, 25 and 52 GB/s by 16
lanes), and in proportion for 1 and 2; generation 6 counts as 5, as on the B300."""


def _link_bytes_per_second(properties: GpuProperties) -> float | None:
    generation, lanes = properties.link_generation, properties.link_lanes
    if not generation or not lanes:
        return None
    return _LANE_BYTES_PER_SECOND[min(generation, max(_LANE_BYTES_PER_SECOND))] * lanes
