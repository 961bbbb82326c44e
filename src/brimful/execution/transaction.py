"""Runs optimizer steps as transactions: a step completes, or the state stays as before.

To undo what a step changes before its update, random states and the buffers that are known to change are
copied, and gradients are cleared. Parameters and optimizer state are not copied: `update.py` completes or
undoes their update.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from brimful.errors import PartialUpdateError
from brimful.execution.buffers import BufferSnapshot, modules_of
from brimful.execution.executor import StepExecutor
from brimful.execution.hooks import StepHooks
from brimful.execution.out_of_memory import despite_out_of_memory, make_room, with_room
from brimful.execution.parameters import ParameterSnapshot
from brimful.execution.random_state import RandomState
from brimful.execution.signals import HeldSignals
from brimful.execution.update import AtomicUpdate, ResumableUpdate

Result = TypeVar("Result")

_WAY_OUT = "Resume from the last checkpoint."


class StepTransaction:
    """Runs the steps of one model, and undoes a step that raises.

    A transaction restores parameters, buffers, gradients, the state of optimizer and loss scaler, and the
    random states of Python, NumPy, torch and the model's device. An interrupt during the update is delayed
    until the step is complete.

    Args:
        executor: Runs the steps, with `hooks`.
        is_sharded: Each rank has a shard of the parameters; None looks for DTensors.
        way_out: Called with the message when memory runs out in an update that cannot be completed; returns how
            the user can continue.
        keeps_parameters: Restore earlier gradients, and parameters that forward passes write to. False clears
            all gradients, for a loop that clears them after each step.
        holds_signals: Delay signals during the update. False if their handlers do not raise.
    """

    def __init__(
        self,
        executor: StepExecutor,
        *,
        is_sharded: bool | None = None,
        way_out: Callable[[str], str] = lambda _message: _WAY_OUT,
        keeps_parameters: bool = True,
        holds_signals: bool = True,
    ) -> None:
        self._executor = executor
        self._model = executor.model
        self._device = executor.device
        self._buffers = BufferSnapshot(executor.model)
        self._parameters = ParameterSnapshot(executor.optimizer) if keeps_parameters else None
        self._update = _update_of(
            executor, is_sharded=_has_dtensors(executor) if is_sharded is None else is_sharded, way_out=way_out
        )
        self._signals = HeldSignals() if holds_signals else None
        self._is_updated = False

    @property
    def hooks(self) -> StepHooks:
        """The hooks to run a step with."""
        return StepHooks(
            before_update=self._before_update,
            call_update=self._call_update,
            after_update=self._after_update,
            before_first_update=self._before_first_update,
        )

    def run(self, step: Callable[[], Result], *, keeps: bool = True) -> Result:
        """Run a step; `step` calls the executor once, with `hooks`.

        Without `keeps` the step is undone, whose executor is called with `updates=False`. Raises
        `PartialUpdateError` if the step raised, or is to be undone, and could not be undone.
        """
        with nullcontext() if self._signals is None else self._signals.in_force():
            random = RandomState.now(self._device)
            self._is_updated = False
            self._executor.move.changed = frozenset()
            modules = modules_of(self._model)
            self._buffers.take(modules)
            if self._parameters is not None:
                self._parameters.take(modules)
            try:
                result = step()
                if keeps:
                    self._buffers.release()
                else:
                    self._undo(random)
            except BaseException as error:
                self._hold_signals()
                self._undo_failed(random, error)
                raise
            finally:
                if self._parameters is not None:
                    self._parameters.release()
            return result

    def _before_update(self, _loss: Tensor, _gradient_norm: Tensor) -> bool:
        self._buffers.end_of_forward()
        if self._parameters is not None:
            self._parameters.end_of_forward()
        self._hold_signals()
        return True

    def _hold_signals(self) -> None:
        if self._signals is not None:
            self._signals.hold()

    def _call_update(self, update: Callable[[], object]) -> None:
        self._update.run(update)
        self._is_updated = True

    def _before_first_update(self) -> None:
        """With the optimizer in backward: from here on the step cannot be undone."""
        self._is_updated = True

    def _after_update(self, action: Callable[[], object]) -> None:
        despite_out_of_memory(action, self._device)

    def _undo(self, random: RandomState) -> None:
        with ExitStack() as parts:  # runs in reverse order, the others too if one raises
            parts.callback(random.restore, self._device)
            parts.callback(self._executor.reset_scaler)
            parts.callback(self._buffers.restore)
            if self._parameters is None:
                parts.callback(self._executor.optimizer.zero_grad, set_to_none=True)
            else:
                parts.callback(self._parameters.restore)

    def _undo_failed(self, random: RandomState, error: BaseException) -> None:
        """Undo a step that raised; raises `PartialUpdateError` if it cannot be undone."""
        try:
            with_room(partial(self._undo, random), during="a failed step is undone")
        except PartialUpdateError as failure:
            raise failure from error
        except BaseException as failure:
            if isinstance(error, PartialUpdateError):  # reports already that the step is not undone
                return
            raise PartialUpdateError(
                f"a step raised {_summary(error)}, and undoing it raised {_summary(failure)}. {_WAY_OUT}"
            ) from error
        ends_the_run = self._signals is None and not isinstance(error, Exception)
        if self._is_updated and not isinstance(error, PartialUpdateError) and not ends_the_run:
            raise PartialUpdateError(
                f"a step raised {_summary(error)}, after parameters were updated. {_WAY_OUT}"
            ) from error


def _update_of(
    executor: StepExecutor, *, is_sharded: bool, way_out: Callable[[str], str]
) -> ResumableUpdate | AtomicUpdate:
    """Choose how the update behaves when memory runs out in it."""
    on_host = executor.on_host
    if on_host is not None:
        return AtomicUpdate("parameters on the host", way_out, lambda: on_host.has_begun)
    if is_sharded:
        return AtomicUpdate("divided parameters", way_out)
    return ResumableUpdate(executor.optimizer, partial(make_room, executor.device))


def _has_dtensors(executor: StepExecutor) -> bool:
    groups = executor.optimizer.param_groups
    return any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
