"""Hooks for the callers of a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.job import Batch
from brimful.trace import Phase

Observer = Callable[[Phase, int], None]
"""Called with the phase and the micro-batch as each begins."""

CallAction = Callable[[Callable[[], object]], object]
"""Calls an action."""


def call(action: Callable[[], object]) -> object:
    """Call an action, and nothing else; the default of `StepHooks`."""
    return action()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """Hooks that run in a step; by default they do nothing."""

    observe: Observer = lambda _phase, _micro_batch: None
    """Called with the phase and the micro-batch as each begins."""
    before_update: Callable[[Tensor, Tensor], bool] | None = None
    """Called with loss and gradient norm; returning False skips the update."""
    call_update: CallAction = call
    """Calls the optimizer's step."""
    after_update: CallAction = call
    """Calls what follows the update; each action may be called again."""
    before_first_update: Callable[[], None] = lambda: None
    """Called before the first parameter is updated in backward."""
    around_parameter_update: Callable[[nn.Parameter], AbstractContextManager[object]] = lambda _parameter: (
        nullcontext()
    )
    """Makes a context for the update of a parameter in backward, whose gradient is complete."""
    synchronising: Callable[[bool], AbstractContextManager[object]] = lambda _is_last: nullcontext()
    """Makes a context for forward and backward of a micro-batch; called with whether it is the last."""
    clip: Callable[[Optimizer, float | None], Tensor] | None = None
    """Clips the gradients to a norm and returns their norm; None clips those of the parameters."""
    loss: Callable[[nn.Module, Batch], Tensor] | None = None
    """Replaces the job's loss, if it runs through a wrapper of the model."""


NO_HOOKS = StepHooks()
