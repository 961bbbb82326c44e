"""Updates under the loss scaler of a user's own loop, retried if memory runs out in them.

A scaler divides the gradients by its scale once in a step, steps the optimizer unless one of them is infinite,
and then changes the scale. Until the optimizer steps, the step so far can be run again, if what the scaler has
found about the gradients is discarded. From then on the update is completed. The scale is changed last, by one
op.

Private torch API used here: `GradScaler._per_optimizer_states`, `OptState` (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from brimful.execution.out_of_memory import RanOut, StepOutOfMemoryError, with_retries, with_room
from brimful.torch_utils.replaced import replace_attribute

_OF_FUSED = ("grad_scale", "found_inf")
"""Attributes that a scaler gives an optimizer with a fused step, and leaves where its step raises."""


def enabled(scaler: GradScaler | None) -> GradScaler | None:
    """A loss scaler that scales; None for a disabled one, which keeps nothing about gradients."""
    return scaler if scaler is not None and scaler.is_enabled() else None


class ScaledUpdates:
    """Watches a loss scaler's part in the updates of one optimizer, until `remove`.

    Args:
        scaler: Steps the optimizer; not disabled.
        optimizer: Not in a wrapper; something else completes its own `step`.
        device: Where memory runs out.
        run_unscaling: Runs an action that divides the gradients, runs the step so far again where memory runs
            out in it, and repeats the action where memory runs out later in the step.
        end_step: Called when the scale has been updated.
    """

    def __init__(
        self,
        scaler: GradScaler,
        optimizer: Optimizer,
        device: torch.device,
        run_unscaling: Callable[[Callable[[], object]], object],
        end_step: Callable[[], None],
    ) -> None:
        self._scaler, self._optimizer, self._device = scaler, optimizer, device
        self._run_unscaling, self._end_step = run_unscaling, end_step
        self._changes = ExitStack()
        for name, method in (("unscale_", self._unscale), ("step", self._step), ("update", self._update)):
            watched = partial(method, getattr(scaler, name))
            self._changes.callback(replace_attribute(scaler, name, watched))

    def remove(self) -> None:
        """Restore the scaler's methods."""
        self._changes.close()

    def forget(self) -> None:
        """Discard what the scaler found about the step's gradients, which are computed again."""
        self._scaler._per_optimizer_states.pop(id(self._optimizer), None)
        self._clear_attributes()

    def _unscale(self, own: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        if optimizer is self._optimizer:
            self._run_unscaling(partial(own, optimizer))
        else:
            own(optimizer)

    def _step(self, own: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if optimizer is not self._optimizer:
            return own(optimizer, *args, **kwargs)
        states = self._scaler._per_optimizer_states
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if states[id(optimizer)]["stage"] is OptState.READY and not is_fused:
            self._scaler.unscale_(optimizer)

        def recover(ran_out: RanOut, *, is_retry: bool) -> None:  # the optimizer has not stepped
            self._clear_attributes()
            if is_retry:
                raise StepOutOfMemoryError(
                    f"memory ran out twice where the loss scaler steps the optimizer: {ran_out.message}. "
                    "Parameters and optimizer are as before. Plan for a smaller budget."
                )

        return with_retries(partial(own, optimizer, *args, **kwargs), recover, self._device)

    def _update(self, own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with_room(partial(own, *args, **kwargs), during="the loss scale is updated")
        self._end_step()

    def _clear_attributes(self) -> None:
        for name in _OF_FUSED:
            vars(self._optimizer).pop(name, None)


def replace_step(optimizer: Optimizer, wrapper: Any, step: Callable[..., Any]) -> Callable[[], None]:
    """Replace an optimizer's `step`, also where Accelerate calls it for a loss scaler.

    Accelerate 1.15 replaces `step` by a method of its own for each update, and afterwards restores the one that
    it found when it wrapped the optimizer. `wrapper` is Accelerate's or another, or the optimizer itself.
    Returns a function that restores `step`.
    """
    changes = ExitStack()
    changes.callback(replace_attribute(optimizer, "step", step))
    if getattr(wrapper, "scaler", None) is not None and hasattr(wrapper, "_optimizer_patched_step_method"):

        def called(*args: Any, **kwargs: Any) -> Any:
            wrapper._accelerate_step_called = True
            return step(*args, **kwargs)

        for name, method in (("patched", called), ("original", step)):
            changes.callback(replace_attribute(wrapper, f"_optimizer_{name}_step_method", method))
    return changes.close
