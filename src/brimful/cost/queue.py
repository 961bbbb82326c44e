"""When a GPU finishes a queue that its host fills, and waits for copies to and from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class LinkOp(NamedTuple):
    """An op of the queue that has to do with copies between device and host."""

    position: int
    """Position in the queue."""
    way: str
    """Which of the directions; the copies of each follow one another."""
    copy_seconds: float | None
    """Seconds of the copy that it begins; None if it waits for all that have begun in this direction."""
    follows: str | None = None
    """Another direction, whose copies so far end before the one that it begins."""
    host_waits: bool = False
    """Whether the host waits, and submits nothing meanwhile; else it lets the device wait."""


DEVICE = "device"
"""The `way` of a `LinkOp` at whose end the host waits for all that the device was given."""

_SYNCHRONIZING = frozenset({"nonzero", "masked_select", "_unique", "_unique2", "unique_dim"})


def synchronizes(base: str) -> bool:
    """Whether the host waits for the result of an op, whose size or value it needs.

    The op's name is without namespace and overload.

    Source: aten/src/ATen/native/cuda/{Nonzero,Unique,IndexKernel}.cu copy numbers of elements to the host.
    """
    return base in _SYNCHRONIZING


def finish_seconds(
    host_seconds: NDArray[np.float64], work_seconds: NDArray[np.float64], link_ops: Sequence[LinkOp] = ()
) -> NDArray[np.float64]:
    """When each op ends, where the host submits ops one after another and the device runs them in that order.

    An op starts when it was submitted and the one before has ended. With S(j) the time at which op j was
    submitted and W(j) the work of the ops up to j,

        end(k) = max over j ≤ k of S(j) + work(j) + … + work(k) = W(k) + max over j ≤ k of (S(j) − W(j − 1))

    A copy starts when its op has ended and the copy before it in its direction; the device does not wait for
    it. An op that waits starts no earlier than the copies have ended, as if it had been submitted then; where
    the host itself waits, for copies or for the device, all that follows is submitted later.

    Args:
        host_seconds: What the host needs to submit each op, (N,).
        work_seconds: What the device needs for each, (N,).
        link_ops: Those of the ops that begin copies or wait for them, in order.

    Returns:
        Seconds from the start, ascending, (N,).
    """
    submitted = np.cumsum(host_seconds)
    worked = np.cumsum(work_seconds)
    leads = submitted - (worked - work_seconds)
    copied: dict[str, float] = {}
    late = 0.0
    """Time that the host has waited."""
    lead = -np.inf
    """The largest of the ops before `looked_at`."""
    looked_at = 0
    for position, way, copy_seconds, follows, host_waits in link_ops:
        lead = max(lead, leads[looked_at:position].max(initial=-np.inf))
        looked_at = position
        if way == DEVICE:
            ended = worked[position] + max(lead, leads[position])
            more = max(ended - submitted[position] - late, 0.0)
            leads[position + 1 :] += more
            late += more
        elif host_waits:
            more = max(copied.get(way, 0.0) - submitted[position] - late, 0.0)
            leads[position:] += more
            late += more
        elif copy_seconds is None:
            before = worked[position] - work_seconds[position]
            leads[position] = max(leads[position], copied.get(way, 0.0) - before)
        else:
            ended = worked[position] + max(lead, leads[position])
            copied[way] = max(ended, copied.get(way, 0.0), copied.get(follows or way, 0.0)) + copy_seconds
    ends: NDArray[np.float64] = worked + np.maximum.accumulate(leads)
    return ends
