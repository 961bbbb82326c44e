"""Two captures → the options that offload a unit to the host: what leaves, and what hides its copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from brimful.cost import RecomputePrices
from brimful.devices import Device
from brimful.memory import chosen_to_leave, pinned_bytes
from brimful.memory import pinned_host as host
from brimful.planner.problem.steady_step import BACKWARD_BEGINS, FORWARD_ENDS, SteadyStep
from brimful.planner.solvers.chain import Option
from brimful.settings import Action, UnitAction
from brimful.trace import Phase, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """Storages that each unit may offload, and the time of its forward and backward, which hide copies."""

    sent_bytes: tuple[tuple[int, ...], ...]
    """By unit, sizes of what it copies to the host in one micro-batch, rounded as on the device."""
    permitted: frozenset[int]
    """Units that may be offloaded."""
    copy_bytes_per_second: float
    forward_seconds: NDArray[np.float64]
    """Time of each unit's forward, including what runs between it and the unit before, (n,)."""
    backward_seconds: NDArray[np.float64]
    """Time of each unit's backward, including what runs between it and the unit before, (n,)."""
    prices: RecomputePrices

    def beside_copies(self, unit: int, option: Option) -> Option:
        """An option with the times that hide copies of the unit before."""
        return replace(
            option,
            forward_seconds=float(self.forward_seconds[unit]),
            backward_seconds=float(self.backward_seconds[unit]) + option.seconds,
        )

    def options(self, unit: int, fqn: str, *, keep: Option) -> Iterator[tuple[Option, UnitAction]]:
        """Offload a unit, and as much of it as the next one hides, if that is permitted; `keep` keeps it."""
        if unit not in self.permitted:
            return
        whole = self.sent_bytes[unit]
        yield self._option(whole, keep), UnitAction(fqn=fqn, action=Action.OFFLOAD)
        hidden_seconds = min(self.forward_seconds[unit + 1], self.backward_seconds[unit + 1])
        leaving = chosen_to_leave(whole, int(hidden_seconds * self.copy_bytes_per_second))
        part = tuple(whole[i] for i in leaving)
        if part and part != whole:
            action = UnitAction(fqn=fqn, action=Action.OFFLOAD, most_offloaded_bytes=sum(part))
            yield self._option(part, keep), action

    def _option(self, sent_bytes: tuple[int, ...], keep: Option) -> Option:
        size_bytes = sum(sent_bytes)
        return replace(
            keep,
            retained_bytes=keep.retained_bytes - size_bytes,
            lingering_bytes=size_bytes,
            seconds=self.prices.copying_seconds(len(sent_bytes), size_bytes),
            copy_seconds=size_bytes / self.copy_bytes_per_second,
        )


def offload_options(
    k: SteadyStep, r: SteadyStep, kept: Trace, prices: RecomputePrices, device: Device, host_bytes: int
) -> OffloadOptions | None:
    """The options for offloading; None if it is not permitted."""
    if not host_bytes or device.host_link_bytes_per_second is None:
        return None
    sent_bytes = _sent_bytes(k, r)
    permitted, left_bytes = [], host_bytes
    for unit in range(k.unit_count - 1):  # beside the last one's copies nothing would run
        taken_bytes = sum(map(pinned_bytes, sent_bytes[unit]))
        if sent_bytes[unit] and unit in k.called_once and taken_bytes <= left_bytes:
            permitted.append(unit)
            left_bytes -= taken_bytes
    forward_seconds, backward_seconds = (
        k.seconds_by_unit(kept, phase, prices) for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    return OffloadOptions(
        sent_bytes=sent_bytes,
        permitted=frozenset(permitted),
        copy_bytes_per_second=device.host_link_bytes_per_second,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        prices=prices,
    )


def _sent_bytes(k: SteadyStep, r: SteadyStep) -> tuple[tuple[int, ...], ...]:
    """What units would send: what only the kept capture holds, at both moments, and no unit passes on."""
    only_kept = [k.held[moment] - r.held[moment] for moment in (FORWARD_ENDS, BACKWARD_BEGINS)]
    sizes_bytes: list[list[int]] = [[] for _ in range(k.unit_count)]
    for made, count in ((only_kept[0] & only_kept[1]) - r.passed_on).items():
        if made.owner >= 0 and made.is_by_op and made.size_bytes > host.LEAST_OFFLOADED_BYTES:
            sizes_bytes[made.owner] += [made.size_bytes] * count
    return tuple(map(tuple, sizes_bytes))
