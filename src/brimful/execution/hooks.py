"""What the callers of a step do in it beside the step itself."""

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
"""Calls an action it is given."""


def call(action: Callable[[], object]) -> object:
    """Call an action: the plain way."""
    return action()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """What a caller does in a step beside the step itself; by default nothing."""

    observe: Observer = lambda _phase, _micro_batch: None
    """Called with the phase and the micro-batch as each begins."""
    before_update: Callable[[Tensor, Tensor], bool] | None = None
    """Called with loss and gradient norm; returning False leaves the parameters as they are."""
    call_update: CallAction = call
    """Calls the optimizer's step."""
    after_update: CallAction = call
    """Calls what follows the update; each may be called again."""
    before_first_update: Callable[[], None] = lambda: None
    """Called before the first parameter is updated in backward."""
    around_parameter_update: Callable[[nn.Parameter], AbstractContextManager[object]] = lambda _parameter: (
        nullcontext()
    )
    """Around the update of each parameter in backward; its gradient is complete."""
    synchronising: Callable[[bool], AbstractContextManager[object]] = lambda _is_last: nullcontext()
    """Around forward and backward of a micro-batch; called with whether it is the last."""
    clip: Callable[[Optimizer, float | None], Tensor] | None = None
    """Scales the gradients down to a norm and returns what it was; None takes those of the parameters."""
    loss: Callable[[nn.Module, Batch], Tensor] | None = None
    """Takes the place of the job's, where it runs through a wrapper of the model."""


NO_HOOKS = StepHooks()
