"""Optimizer steps each of which is made whole, or leaves everything as it was before.

What a step changes before its update is kept or can be dropped: random numbers, the buffers that are known to
change, and the gradients, of which there are none before a step, usually. Parameters and optimizer state are
not copied: their update is finished or taken back by `update.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from brimful.errors import HalfUpdatedError
from brimful.execution.buffers import BufferSnapshot, modules_of
from brimful.execution.out_of_memory import despite_out_of_memory, make_room
from brimful.execution.parameters import ParameterSnapshot
from brimful.execution.signals import HeldSignals
from brimful.execution.update import SurvivingUpdate, WholeUpdate
from brimful.random_state import RandomState
from brimful.step import unused_scaler

Result = TypeVar("Result")

_WAY_OUT = "Resume from the last checkpoint."


class HostUpdate(Protocol):
    """An update on the host; see `applying/host_update.py`."""

    has_begun: bool

    def run(self, step: Callable[[], object]) -> None:
        """Carry out a step."""


class StepTransaction:
    """Runs steps of one model; one that raises leaves everything as it was before.

    That is: parameters, buffers, gradients, the optimizer's state, the loss scaler's, and the random numbers of
    Python, NumPy, torch and the model's device. An interrupt that comes during the update waits until the step
    is complete.

    Args:
        model: On `device`.
        optimizer: Over parameters of the model.
        device: Whose random numbers count beside the host's.
        scaler: Of FP16; None without.
        on_host: Updates on the host; None where the optimizer updates on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        device: torch.device,
        scaler: GradScaler | None,
        on_host: HostUpdate | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._on_host = on_host
        self._buffers = BufferSnapshot(model)
        self._parameters = ParameterSnapshot(optimizer)
        self._update = _update_of(optimizer, device, on_host)
        self._signals = HeldSignals()
        self._is_updated = False
        self.scaler = scaler
        """The one to use in the next step."""

    def run(self, step: Callable[[], Result]) -> Result:
        """Run a step that calls `before_update`, `carry_out` and `follow_up`.

        Args:
            step: The whole of it.

        Returns:
            What it returned.

        Raises:
            HalfUpdatedError: It raised, and not everything is as before.
        """
        with self._signals.in_force():
            random = RandomState.now(self._device)
            self._is_updated = False
            modules = modules_of(self._model)
            self._buffers.take(modules)
            self._parameters.take(modules)
            try:
                result = step()
                self._buffers.release()
            except BaseException as error:
                self._signals.hold()
                self._take_back(random, error)
                raise
            finally:
                self._parameters.release()
            return result

    def before_update(self, _loss: Tensor, _gradient_norm: Tensor) -> bool:
        """Call it before the first parameter changes; it permits the update."""
        self._parameters.end_of_forward()
        self._signals.hold()
        return True

    def carry_out(self, update: Callable[[], object]) -> None:
        """Let the optimizer step.

        Args:
            update: Its step.
        """
        self._update.run(update if self._on_host is None else partial(self._on_host.run, update))
        self._is_updated = True

    def begin_update_in_backward(self) -> None:
        """Call it before the first parameter is updated in backward: from then on nothing can be taken back."""
        self._is_updated = True

    def follow_up(self, action: Callable[[], object]) -> None:
        """What follows an update.

        Args:
            action: Called again if memory runs out.
        """
        despite_out_of_memory(action, self._device)

    def _take_back(self, random: RandomState, error: BaseException) -> None:
        """Leave everything as before the step, or raise HalfUpdatedError."""
        try:
            with ExitStack() as parts:  # the last first, and the others too if one raises
                parts.callback(random.restore, self._device)
                parts.callback(self._forget_what_the_scaler_found)
                parts.callback(self._buffers.restore)
                parts.callback(self._parameters.restore)
        except HalfUpdatedError as failure:
            raise failure from error
        except BaseException as failure:
            raise HalfUpdatedError(
                f"a step raised {_said(error)}, and taking it back raised {_said(failure)}. {_WAY_OUT}"
            ) from error
        if self._is_updated and not isinstance(error, HalfUpdatedError):
            raise HalfUpdatedError(
                f"a step raised {_said(error)}, after parameters were updated. {_WAY_OUT}"
            ) from error

    def _forget_what_the_scaler_found(self) -> None:
        if self.scaler is not None:
            self.scaler = unused_scaler(self.scaler, self._device.type)


def _update_of(
    optimizer: Optimizer, device: torch.device, on_host: HostUpdate | None
) -> SurvivingUpdate | WholeUpdate:
    if on_host is not None:
        return WholeUpdate("parameters on the host", lambda _message: _WAY_OUT, lambda: on_host.has_begun)
    if any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
        return WholeUpdate("divided parameters", lambda _message: _WAY_OUT)
    return SurvivingUpdate(optimizer, partial(make_room, device))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
