"""What makes a split batch train otherwise: BatchNorm, and state that a forward carries to the next one."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from brimful.capture.carried import CarriedState, running_statistics
from brimful.capture.fakes.outside import OutsideTensors
from brimful.torch_utils.module_names import plain_namer


class Coupling:
    """Finds what couples the samples of a batch while a step runs.

    `model` is in training mode. `others` are values, by name, that the loss is computed with beside the model,
    and `outside` are tensors that it reads beside the model.
    """

    def __init__(self, model: nn.Module, others: dict[str, Any], outside: OutsideTensors) -> None:
        self._model, self._outside = model, outside
        self._plain_name = plain_namer(model)
        self.carried = CarriedState(model, others, outside.known_stand_in)

    def begin_forward(self) -> None:
        """Note the values that are held before a forward."""
        self.carried.begin()

    def end_forward(self) -> None:
        """Find the values that the forward changed."""
        self._outside.end_forward(self.carried.end())

    def batch_norms(self) -> tuple[str, ...]:
        """BatchNorm layers that normalise with the statistics of the batch itself."""
        inside = (
            path
            for path, module in self._model.named_modules()
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        )
        return (*map(self._plain_name, inside), *self._outside.batch_norms)

    def stateful(self) -> tuple[str, ...]:
        """Names of other state that a forward updates and the next one reads."""
        inside = map(self._plain_name, running_statistics(self._model))
        return tuple(dict.fromkeys((*self.carried.changed, *inside, *self._outside.changed)))
