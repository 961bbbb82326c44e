"""An exponential moving average of the parameters, kept beside them and validated in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from brimful.errors import ResumeError, UsageError
from brimful.execution.out_of_memory import with_room


class MovingAverage:
    """`average = decay × average + (1 - decay) × parameter`, after each update; buffers are not averaged.

    Args:
        model: Its parameters begin the average.
        decay: Part that an update leaves of the average, from 0 up to, but not, 1.

    Raises:
        UsageError: The decay is none.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise UsageError(f"ema_decay is {decay}; it must be at least 0 and less than 1, such as 0.999.")
        self._parameters = dict(model.named_parameters())
        self._averages = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._fold_in = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Fold the parameters into the average; for all of them in one op, or for none."""
        self._fold_in(list(self._averages.values()), list(self._parameters.values()), torch.tensor(0))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model has the averages for parameters; nothing is copied."""
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
        """The averages by the names of their parameters."""
        return self._averages

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor] | None) -> None:
        """Resume from saved averages.

        Args:
            state: What `state_dict` returned.

        Raises:
            ResumeError: There is none, or it is of other parameters.
        """
        if state is None or _kinds(state) != _kinds(self._averages):
            raise ResumeError(
                "the saved run has no moving average of these parameters. Resume without ema_decay, or start a "
                "new run."
            )
        for name, average in self._averages.items():
            average.copy_(state[name])


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
