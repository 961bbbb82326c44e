"""Seconds of a CPU's work for one op: from measured curves where it was calibrated, else a roofline."""

from __future__ import annotations

from brimful.cost.kinds import OTHER, WEIGHT_GRADIENT, Work, work_of
from brimful.devices import Device, RateCurve
from brimful.settings import Precision
from brimful.trace import Op

_STANDS_IN = {"attention": "matmul", "recurrent": "matmul", "convolution": "matmul"}
"""Arithmetic kinds whose curve may be missing for a type, and the kind that is measured for most."""


class CpuWork:
    """The rates of a CPU, which are achieved ones.

    Args:
        device: A CPU.
        precision: Of matmuls.
    """

    def __init__(self, device: Device, precision: Precision) -> None:
        self._device = device
        self._precision = precision
        self._curves = {curve.kind: curve for curve in device.curves}
        self._seconds_per_byte = 1 / device.memory_bandwidth_bytes_per_second

    def parts(self, op: Op, flops_per_second: float) -> list[tuple[str, float]]:
        """Seconds by kind of work, at least a bare launch.

        Convolutions copy their operands to another layout first: the two are added.

        Args:
            op: The op.
            flops_per_second: Rate of its type, for a CPU that was not calibrated.

        Returns:
            Pairs of a name and seconds.
        """
        work, moved_bytes = work_of(op, self._precision), op.read_bytes + op.written_bytes
        name, curve, least = work.kind.partition(":")[0], self._curve(work), self._device.launch_seconds
        if not op.flops:
            moving = moved_bytes * self._seconds_per_byte
            return [(name, max(moving, least) if curve is None else curve.seconds_at(work.amount))]
        streaming = self._curves.get(OTHER)
        moving = (
            moved_bytes * self._seconds_per_byte if streaming is None else streaming.seconds_at(moved_bytes)
        )
        computing = op.flops / flops_per_second if curve is None else curve.seconds_at(work.amount)
        if not op.weight_bytes:
            return [(name, max(computing, moving, least))]
        gradients = self._curves.get(WEIGHT_GRADIENT) if "backward" in op.name else None
        more = 0.0 if gradients is None else gradients.seconds_at(op.weight_bytes)
        return [(name, computing + moving + more)]

    def _curve(self, work: Work) -> RateCurve | None:
        """The curve of a kind, or of the one that stands in for it."""
        curve = self._curves.get(work.kind)
        if curve is None:
            name, colon, dtype = work.kind.partition(":")
            curve = self._curves.get(f"{_STANDS_IN.get(name, name)}:{dtype}" if colon else OTHER)
        return curve
