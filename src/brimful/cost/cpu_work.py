"""Seconds of a CPU's work for one op: from measured curves where it was calibrated, else a roofline."""

from __future__ import annotations

from brimful.cost.cpu_convolutions import images_bytes, kernels, layout_copy_bytes
from brimful.cost.kinds import COPY, DEPTHWISE, IM2COL, OTHER, WEIGHT_GRADIENT, Work, work_of
from brimful.devices import Device, RateCurve
from brimful.settings import Precision
from brimful.trace import Op, Phase
from brimful.trace.extents import Convolution, extents_of

_STANDS_IN = {
    "attention": "matmul",
    "recurrent": "matmul",
    "convolution": "matmul",
    DEPTHWISE: "convolution",
    IM2COL: "convolution",
}
"""Arithmetic kinds whose curve may be missing for a type, and the kind that is measured for most."""


class CpuWork:
    """The rates of a CPU, which are achieved ones."""

    def __init__(self, device: Device, precision: Precision) -> None:
        self._device = device
        self._precision = precision
        self._curves = {curve.kind: curve for curve in device.curves}
        self._seconds_per_byte = 1 / device.memory_bandwidth_bytes_per_second

    def parts(self, op: Op, flops_per_second: float) -> list[tuple[str, float]]:
        """Seconds by kind of work, at least a bare launch; all of the optimizer's is one kind.

        A convolution's copies to and from oneDNN's layout are added to its arithmetic. `flops_per_second` is
        the rate of the op's type, for a CPU that was not calibrated.
        """
        work, moved_bytes = work_of(op, self._precision), op.read_bytes + op.written_bytes
        name = "optimizer" if op.phase is Phase.OPTIMIZER else work.kind.partition(":")[0]
        curve, least = self._curve(work), self._device.launch_seconds
        if not op.flops:
            moving = moved_bytes * self._seconds_per_byte
            return [(name, max(moving, least) if curve is None else curve.seconds_at(work.amount))]
        computing = self._arithmetic(work.kind, op.flops, flops_per_second)
        if not op.weight_bytes:
            return [(name, max(computing, self._moving(OTHER, moved_bytes), least))]
        shape = extents_of(op.extents)
        if isinstance(shape, Convolution):
            streaming = self._moving(OTHER, images_bytes(shape, op.weight_bytes))
            computing = sum(
                max(self._arithmetic(f"{kind}:{op.dtype}", flops, flops_per_second), streaming)
                for kind, flops in kernels(shape, op.flops)
            )
            moved_bytes = layout_copy_bytes(shape, op.weight_bytes)
        gradients = self._curves.get(WEIGHT_GRADIENT) if "backward" in op.name else None
        more = 0.0 if gradients is None else gradients.seconds_at(op.weight_bytes)
        return [(name, computing + self._moving(COPY, moved_bytes) + more)]

    def _arithmetic(self, kind: str, flops: int, flops_per_second: float) -> float:
        curve = self._curve(Work(kind, flops))
        return flops / flops_per_second if curve is None else curve.seconds_at(flops)

    def _moving(self, kind: str, moved_bytes: int) -> float:
        curve = self._curves.get(kind) or self._curves.get(OTHER)
        return moved_bytes * self._seconds_per_byte if curve is None else curve.seconds_at(moved_bytes)

    def _curve(self, work: Work) -> RateCurve | None:
        """The curve of a kind, or of the one that stands in for it."""
        curve = self._curves.get(work.kind)
        if curve is None:
            name, colon, dtype = work.kind.partition(":")
            if not colon:
                return self._curves.get(OTHER)
            return self._curve(Work(f"{_STANDS_IN[name]}:{dtype}", work.amount)) if name in _STANDS_IN else None
        return curve
