"""Exponential moving average of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from brimful.errors import InfeasibleError, ResumeError
from brimful.execution.out_of_memory import with_room
from brimful.planner import Plan
from brimful.torch_utils.wrapper_tensors import is_wrapper_tensor
from brimful.utils.quantities import format_bytes


class MovingAverage:
    """Averages parameters: `average = decay × average + (1 - decay) × parameter` after each update.

    The average starts from the parameters of the model; `decay` is at least 0 and less than 1. Buffers and
    quantised weights are not averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = _averaged(model)
        self._averages = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._fold_in = get_ema_multi_avg_fn(decay)

    @property
    def held_bytes(self) -> int:
        """Memory that the averages take on the device of the parameters."""
        return sum(average.nbytes for average in self._averages.values())

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the parameters, for all of them in one op."""
        self._fold_in(list(self._averages.values()), list(self._parameters.values()), torch.tensor(0))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the averages into the model within the context, without a copy."""
        own = with_room(
            lambda: {name: parameter.data for name, parameter in self._parameters.items()},
            during="the average takes the place of the weights",
        )
        try:
            self._give(self._averages)
            yield
        finally:
            self._give(own)

    def _give(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = values[name]

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by parameter name."""
        return self._averages

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor] | None) -> None:
        """Load averages that `state_dict` returned.

        Raises ResumeError if the state is None, as of a saved run without an average, or is of other
        parameters.
        """
        if state is None or _kinds(state) != _kinds(self._averages):
            raise ResumeError(
                "the saved run has no moving average of these parameters. Resume without ema_decay, or start a "
                "new run."
            )
        for name, average in self._averages.items():
            average.copy_(state[name])


def check_average_fits(model: nn.Module, plan: Plan) -> None:
    """Check that a plan leaves room in its budget for the averages, which it does not count.

    The model is on the device that the plan is for. Raises InfeasibleError if there is no room.
    """
    average_bytes = sum(parameter.nbytes for parameter in _averaged(model).values())
    peak_bytes = plan.predicted_peak_device_bytes + average_bytes
    if peak_bytes > plan.budget_bytes:
        raise InfeasibleError(
            f"with ema_decay the plan does not fit {format_bytes(plan.budget_bytes)}: it takes "
            f"{format_bytes(plan.predicted_peak_device_bytes)}, and the average of the weights "
            f"{format_bytes(average_bytes)} beside it for the whole run. Nothing was trained.\n"
            f"  Plan for a budget of {format_bytes(plan.budget_bytes - average_bytes)}, or train "
            "without ema_decay.",
            budget_bytes=plan.budget_bytes,
            smallest_peak_bytes=peak_bytes,
        )


def _averaged(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not is_wrapper_tensor(parameter) and (parameter.is_floating_point() or parameter.is_complex())
    }


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
