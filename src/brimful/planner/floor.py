"""What every plan of a request takes, known from the baseline alone: a lower bound of the peak.

Parameters, gradients and optimizer state are on the device together when the optimizer runs, whatever units do
and however the batch is split. Where these alone are over the budget, no search is needed to say so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from brimful.errors import BatchError, CaptureError, UsageError
from brimful.memory import live_profile, most_held_bytes, rounding_bytes_of
from brimful.planner.request import Request
from brimful.planner.solutions import uniform_actions
from brimful.prediction.estimate import Estimate, estimate_unlimited
from brimful.settings import Action, Settings
from brimful.trace import Category, Phase, Trace
from brimful.trace.units import find_units, in_runs

SEARCHED_OPS = 1500
"""Steps of fewer ops are searched nevertheless, for the smallest peak: that takes a second or two. A choice; a
step of BERT-base has some 1,200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """A lower bound of the peak of all plans."""

    held_bytes: int
    """Allocated bytes that every plan holds at once."""
    parts: str
    """What the bytes are of: "parameters, gradients and optimizer state"."""

    @classmethod
    def of(cls, baseline: Trace, request: Request, *, has_state: bool = True) -> Floor:
        """The floor of a request: 0 bytes for several ranks, which may divide all of it.

        `has_state` is whether optimizer state counts, if it cannot be on the host; False for other optimizers.
        """
        parts = {Category.PARAMETERS: most_held_bytes(baseline, Category.PARAMETERS)}
        if request.world_size > 1:
            parts = {}
        elif not request.asked.optimizer_in_backward:
            parts[Category.GRADIENTS] = most_held_bytes(baseline, Category.GRADIENTS)
        state_bytes = most_held_bytes(baseline, Category.OPTIMIZER_STATE)
        may_be_on_host = request.asked.offload_optimizer or (
            request.may_offload_optimizer and state_bytes <= request.offload_host_bytes
        )
        if parts and has_state and not (may_be_on_host or request.asked.allow_optimizers):
            parts[Category.OPTIMIZER_STATE] = state_bytes
        *first, last = [str(category).replace("_", " ") for category in parts] or [""]
        return cls(held_bytes=sum(parts.values()), parts=" and ".join(filter(None, [", ".join(first), last])))

    def is_over(self, request: Request) -> bool:
        """Whether this floor is over the budget of a request."""
        return self.held_bytes > request.reserved_budget_bytes


def step_over_floor(capture: Callable[[Settings], Trace], request: Request, baseline: Trace) -> Estimate | None:
    """The smallest micro-batch with every unit recomputed, where even the floor is over the budget.

    The result is None where plans are to be searched: also where a Sequential's layers are recomputed in runs,
    of which only a search finds those that take least.
    """
    if len(baseline.ops) < SEARCHED_OPS or not Floor.of(baseline, request).is_over(request):
        return None
    is_whole = request.keeps_batch_whole(baseline)
    size = request.rank_batch_size if is_whole else request.micro_batch_sizes()[-1]
    units = () if request.recompute is Action.KEEP else find_units(baseline)
    if units and request.recompute is None and in_runs(baseline, units) != units:
        return None
    settings = replace(
        request.bases()[0].with_micro_batch_size(size),
        units=uniform_actions(units, Action.RECOMPUTE),
        expandable_segments=request.asked.expandable_segments and request.device.kind == "cuda",
    )
    try:
        return estimate_unlimited(capture(settings), request.device)
    except (CaptureError, BatchError, UsageError):  # the search finds another way, or says why not
        return None


def bytes_of_update(trace: Trace) -> int:
    """The most that leaves the device if the optimizer, on the device in the trace, moves to the host.

    These are the bytes of its state, or those that its update has beside parameters and gradients, if they are
    more.
    """
    state_bytes = most_held_bytes(trace, Category.OPTIMIZER_STATE)
    others = most_held_bytes(trace, Category.PARAMETERS) + most_held_bytes(trace, Category.GRADIENTS)
    profile = live_profile(trace, rounding_bytes_of(trace.device_kind))
    in_update = np.array([op.phase is Phase.OPTIMIZER for op in trace.ops] + [False])[profile.ops]
    return max(state_bytes, int(profile.live_bytes[in_update].max(initial=0)) - others)
