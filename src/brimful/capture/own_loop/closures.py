"""Optimizers that compute the loss themselves, several times in a step, as LBFGS does.

When LBFGS ends a step depends on numbers that are not known. So the last step runs all iterations that it
permits, with a full history of directions, as after some steps of training.

Private torch API used here: `torch.optim.LBFGS`'s state and parameter groups, and what `_strong_wolfe` keeps
(checked: torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from brimful.capture.recording.recorder import Recorder
from brimful.trace import Phase

_WARM_ITERATIONS = 2
"""Iterations of the steps before the last: the first makes the state, the second a direction from it."""
_SEARCHED_GRADIENTS = 4
"""Flat gradients that a line search keeps while it tries another length: of both ends of its bracket, of the
trial before and of the latest."""


class ClosureSteps:
    """Follows the steps of optimizers that receive a closure."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._options: dict[int, dict[str, Any]] = {}
        self._rejected: dict[int, int] = {}
        """By optimizer: the block of a direction and a gradient's change that its history does not take."""

    def begin(
        self, optimizer: Optimizer, args: Any, kwargs: Any, *, micro_batch: int, is_last: bool
    ) -> tuple[Any, Any] | None:
        """Prepare an optimizer for its step, and return the arguments to call `step` with.

        `args` and `kwargs` are those of `step`, with the optimizer first; None is returned if there is no
        closure among them. `is_last` says that no step is captured after this one.
        """
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if not callable(closure):
            return None
        searched_bytes = 0
        if isinstance(optimizer, LBFGS):
            (group,) = optimizer.param_groups
            self._options[id(optimizer)] = dict(group)
            flat_bytes = sum(p.nbytes for p in group["params"])
            self._rejected[id(optimizer)] = self._recorder.ledger.allocate(
                0, "pair that LBFGS rejects", most_bytes=2 * flat_bytes
            )
            # Nothing but their number ends the iterations.
            group.update(tolerance_grad=-math.inf, tolerance_change=-math.inf)
            if not is_last:
                group["max_iter"] = min(group["max_iter"], _WARM_ITERATIONS)
            if group["line_search_fn"] is not None:
                searched_bytes = _SEARCHED_GRADIENTS * flat_bytes
        return args[:1], {"closure": self._in_forward(closure, micro_batch, searched_bytes)}

    def end(self, optimizer: Optimizer) -> None:
        """Restore the options of an optimizer, and fill its history."""
        options = self._options.pop(id(optimizer), None)
        if options is None:
            return
        self._recorder.ledger.free(self._rejected.pop(id(optimizer)))
        (group,) = optimizer.param_groups
        group.update(options)
        _fill_history(optimizer, group["history_size"])
        self._recorder.facts.note(
            f"when LBFGS ends a step: all {group['max_iter']} iterations are predicted, and a full history of "
            f"{group['history_size']}"
        )

    def _in_forward(
        self, closure: Callable[[], Any], micro_batch: int, searched_bytes: int
    ) -> Callable[[], Any]:
        def run() -> Any:
            searched = self._recorder.ledger.allocate(searched_bytes, "line search") if searched_bytes else None
            self._recorder.position.enter(Phase.FORWARD, micro_batch)
            try:
                return closure()
            finally:
                self._recorder.position.enter(Phase.OPTIMIZER, micro_batch)
                if searched is not None:
                    self._recorder.ledger.free(searched)

        return run


def _fill_history(optimizer: Optimizer, size: int) -> None:
    (state,) = optimizer.state.values()
    for name in ("old_dirs", "old_stps", "ro"):
        history = state.get(name)
        if history:
            history += [torch.empty_like(history[0]) for _ in range(size - len(history))]
