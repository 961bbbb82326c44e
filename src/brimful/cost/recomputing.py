"""Cost of recomputation, op by op and region by region, so that it adds up."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from brimful.cost.regions import (
    COPY_SECONDS,
    NESTED_FORWARD_SECONDS,
    ops_seen_by_saving,
    region_seconds,
    saving_seconds,
)
from brimful.cost.roofline import Roofline
from brimful.cost.step import step_seconds
from brimful.devices import Device
from brimful.settings import Action, UnitAction
from brimful.trace import Op, Trace

_ANY_OP = ("op#0",)
"""A saved op for settings that are only priced: the modes' time does not depend on which ops are saved."""


class RecomputePrices:
    """Prices of recomputed ops and regions, of which a plan's time is the sum.

    On a CPU the host's work and the op's follow one another, and a price is both. On CUDA they overlap: where
    the GPU is behind, an op costs its work and Python nothing; where the host is, an op costs its launch. How
    much each counts follows from the whole: h is such that

        T(recomputed) − T(kept) = Σ ((1 − h) · work + h · host)

    over all ops and regions that are recomputed, with 0 ≤ h ≤ 1. The dispatch modes of selective checkpointing
    have a share of their own, as most of their time is in the forward and beside ops that are not run again.

    `kept` is a step with everything kept, `recomputed` the same step with every unit recomputed.
    """

    def __init__(self, kept: Trace, recomputed: Trace, device: Device) -> None:
        self._roofline = Roofline.of(recomputed, device)
        self._device = device
        self._kept, self._recomputed = kept, recomputed
        self._host_share = 1.0 if device.kind == "cpu" else self._share(kept, recomputed)

    def op_seconds(self, op: Op) -> float:
        """Seconds of running an op again."""
        if self._device.kind == "cpu":
            return self._roofline.op_seconds(op)
        work, host = self._roofline.work_seconds(op), self._roofline.host_seconds(op)
        return (1 - self._host_share) * work + self._host_share * host

    def region_seconds(self) -> float:
        """Seconds of a recomputed region, beside its ops."""
        return self._host_share * region_seconds(self._device)

    def saving_seconds(self, op_count: int) -> float:
        """Seconds of saving some results of a region with `op_count` ops."""
        return self._saving_share * saving_seconds(self._device, op_count)

    def copying_seconds(self, copies: int, size_bytes: int) -> float:
        """Seconds of copies to the host and back, without waiting for them."""
        host, work = copies * COPY_SECONDS, self._roofline.copy_seconds(size_bytes)
        return 2 * (self._host_share * host + (1 - self._host_share) * work)

    def nested_forward_seconds(self) -> float:
        """Seconds of a forward that runs again for a nested unit, beside its ops."""
        return self._host_share * NESTED_FORWARD_SECONDS

    @cached_property
    def _saving_share(self) -> float:
        """How much of the modes' time delays the step: (T(with modes) − T(without)) / their time.

        The less is run again, the less work of the GPU hides them. A unit's set of saved results lies between
        none and all, so this is the mean of both: modes around every unit of the step that runs all again, and
        of the one that runs nothing again.
        """
        if self._device.kind == "cpu":
            return 1.0
        shares = [
            _share_of_modes(each, self._recomputed, self._device) for each in (self._recomputed, self._kept)
        ]
        return sum(shares) / len(shares)

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


def _share_of_modes(step: Trace, recomputed: Trace, device: Device) -> float:
    """Which fraction of their time the dispatch modes add to a step, with the units of another capture."""
    units = recomputed.settings.units
    saving = tuple(UnitAction(fqn=unit.fqn, action=Action.SAVE, saved=_ANY_OP) for unit in units)
    without, with_modes = (
        replace(step, settings=replace(step.settings, units=each)) for each in (units, saving)
    )
    last = step.captured_steps - 1, step.captured_micro_batches - 1
    seen = zip(step.ops, ops_seen_by_saving(with_modes), strict=True)
    op_count = sum(is_seen and (op.step, op.micro_batch) == last for op, is_seen in seen)
    host = saving_seconds(device, op_count) * step.settings.gradient_accumulation_steps
    more = step_seconds(with_modes, device).total_seconds - step_seconds(without, device).total_seconds
    return min(max(more / host, 0.0), 1.0) if host else 0.0
