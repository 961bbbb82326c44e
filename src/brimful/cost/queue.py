"""When a GPU is done that works through a queue its host fills."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def finish_seconds(host_seconds: NDArray[np.float64], work_seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """When each op ends, where the host submits ops one after another and the device runs them in that order.

    An op starts when it was submitted and the one before has ended. With S(j) the time at which op j was
    submitted and W(j) the work of the ops up to j,

        end(k) = max over j ≤ k of S(j) + work(j) + … + work(k) = W(k) + max over j ≤ k of (S(j) − W(j − 1))

    Args:
        host_seconds: What the host needs to submit each op, (N,).
        work_seconds: What the device needs for each, (N,).

    Returns:
        Seconds from the start, ascending, (N,).
    """
    submitted = np.cumsum(host_seconds)
    worked = np.cumsum(work_seconds)
    ends: NDArray[np.float64] = worked + np.maximum.accumulate(submitted - (worked - work_seconds))
    return ends
