"""Cost of recomputation, op by op and region by region, so that it adds up."""

from __future__ import annotations

from brimful.cost.regions import COPY_SECONDS, NESTED_FORWARD_SECONDS, region_seconds, saving_seconds
from brimful.cost.roofline import Roofline
from brimful.cost.step import step_seconds
from brimful.devices import Device
from brimful.trace import Op, Trace


class RecomputePrices:
    """Prices of recomputed ops and regions, of which a plan's time is the sum.

    On a CPU the host's work and the op's follow one another, and a price is both. On CUDA they overlap: where
    the GPU is behind, an op costs its work and Python nothing; where the host is, an op costs its launch. How
    much each counts follows from the whole: h is such that

        T(recomputed) − T(kept) = Σ ((1 − h) · work + h · host)

    over all ops and regions that are recomputed, with 0 ≤ h ≤ 1.

    Args:
        kept: A step with everything kept.
        recomputed: The same step with every unit recomputed.
        device: Where it runs.
    """

    def __init__(self, kept: Trace, recomputed: Trace, device: Device) -> None:
        self._roofline = Roofline.of(recomputed, device)
        self._device = device
        self._host_share = 1.0 if device.kind == "cpu" else self._share(kept, recomputed)

    def op_seconds(self, op: Op) -> float:
        """Of running an op again."""
        if self._device.kind == "cpu":
            return self._roofline.op_seconds(op)
        work, host = self._roofline.work_seconds(op), self._roofline.host_seconds(op)
        return (1 - self._host_share) * work + self._host_share * host

    def region_seconds(self) -> float:
        """Of a recomputed region, beside its ops."""
        return self._host_share * region_seconds(self._device)

    def saving_seconds(self, op_count: int) -> float:
        """Of saving some results of a region with `op_count` ops."""
        return self._host_share * saving_seconds(op_count)

    def copying_seconds(self, copies: int, size_bytes: int) -> float:
        """Of copies to the host and back, without waiting for them."""
        host, work = copies * COPY_SECONDS, self._roofline.copy_seconds(size_bytes)
        return 2 * (self._host_share * host + (1 - self._host_share) * work)

    def nested_forward_seconds(self) -> float:
        """Of a forward that runs again for a nested unit, beside its ops."""
        return self._host_share * NESTED_FORWARD_SECONDS

    def _share(self, kept: Trace, recomputed: Trace) -> float:
        step, micro_batch = recomputed.captured_steps - 1, recomputed.captured_micro_batches - 1
        again = [
            op for op in recomputed.ops if op.recomputed and (op.step, op.micro_batch) == (step, micro_batch)
        ]
        work = sum(map(self._roofline.work_seconds, again))
        host = sum(map(self._roofline.host_seconds, again))
        host += len(recomputed.settings.recomputed) * region_seconds(self._device)
        times = (step_seconds(trace, self._device).total_seconds for trace in (recomputed, kept))
        more = (next(times) - next(times)) / recomputed.settings.gradient_accumulation_steps
        return min(max((more - work) / (host - work), 0.0), 1.0) if host > work else 0.0
