"""Changes of a step to parameters before its update: gradients, and writes of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.batches import own_part
from brimful.errors import PartialUpdateError
from brimful.execution.random_state import copied_to_host


class ParameterSnapshot:
    """Gradients before a step, and the parameters that its forward passes are known to write to.

    Before a step there are no gradients, usually, so nothing is copied. Existing gradients are copied to the
    host, and so are parameters to which an earlier step's forward pass wrote (`Embedding(max_norm=…)`).
    Parameters of the optimizer count beside those of the model.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._usually_written: set[int] = set()
        """Ids of parameters that forward passes were seen to write to."""
        self._parameters: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._gradients: list[Tensor | None] = []
        self._values: dict[int, Tensor] = {}
        """Copies on the host, by index in the list of parameters."""
        self._gradient_values: dict[int, Tensor] = {}
        self._written: list[int] | None = None
        """Indices of parameters to which this step's forward passes wrote; None until they end."""

    def take(self, modules: Sequence[nn.Module]) -> None:
        """Keep what a step may change; `modules` are all modules of the model."""
        self._parameters = self._all(modules)
        self._versions = [parameter._version for parameter in self._parameters]
        self._gradients = [parameter.grad for parameter in self._parameters]
        usual = self._usually_written
        self._values = {i: _on_host(p) for i, p in enumerate(self._parameters) if usual and id(p) in usual}
        self._gradient_values = {i: _on_host(g) for i, g in enumerate(self._gradients) if g is not None}
        self._written = None

    def end_of_forward(self) -> None:
        """Learn which parameters were written to; the update makes all later changes."""
        self._written = self._written_since()
        self._usually_written |= {id(self._parameters[i]) for i in self._written}

    def release(self) -> None:
        """Drop what was kept."""
        self._parameters, self._gradients = [], []
        self._values, self._gradient_values = {}, {}

    def restore(self) -> None:
        """Restore gradients, and the values of parameters from before the forward passes.

        Raises `PartialUpdateError` if a parameter was written to for the first time, and has no copy.
        """
        for i, (parameter, gradient) in enumerate(zip(self._parameters, self._gradients, strict=True)):
            if gradient is not None:
                own_part(gradient).copy_(self._gradient_values[i])
            parameter.grad = gradient
        for i in self._written_since() if self._written is None else self._written:
            parameter = self._parameters[i]
            if i not in self._values:
                raise PartialUpdateError(
                    f"a forward pass of a step that raised wrote to a parameter of shape "
                    f"{tuple(parameter.shape)} for the first time, so there is no copy of it. Resume from the "
                    "last checkpoint."
                )
            with torch.no_grad():
                own_part(parameter).copy_(self._values[i])

    def _all(self, modules: Sequence[nn.Module]) -> list[nn.Parameter]:
        """Parameters that a step may give a gradient, each once."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        parameters += [p for module in modules for p in module._parameters.values() if p is not None]
        return list(dict(zip(map(id, parameters), parameters, strict=True)).values())

    def _written_since(self) -> list[int]:
        pairs = zip(self._parameters, self._versions, strict=True)
        return [i for i, (parameter, version) in enumerate(pairs) if parameter._version != version]


def _on_host(tensor: Tensor) -> Tensor:
    return copied_to_host(own_part(tensor.detach()))
