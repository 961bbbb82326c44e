"""Parts of tensors, as FSDP2 leaves on each rank, to whole ones for weights, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


class WholeModel(nn.Module):
    """The parameters and buffers of a model whose parameters are divided over ranks, whole and on the host.

    All ranks make it together; only the first keeps what it gathers.

    Args:
        model: Sharded.
        is_kept: Whether this is the first.
    """

    def __init__(self, model: nn.Module, *, is_kept: bool) -> None:
        super().__init__()
        parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        gathered: dict[int, Tensor] = {}
        self._whole: dict[str, Any] = {}
        for name, value in model.state_dict().items():
            if not isinstance(value, DTensor):
                self._whole[name] = value
                continue
            key = parameters.get(name, id(value))  # tied ones are gathered once
            if key not in gathered:
                gathered[key] = gathered_whole(value, is_kept=is_kept)
            self._whole[name] = gathered[key]

    def state_dict(self, *_arguments: Any, **_options: Any) -> dict[str, Any]:  # type: ignore[override]
        """As the model's own, of whole tensors."""
        return self._whole


def gathered_whole(value: Tensor, *, is_kept: bool) -> Tensor:
    """A tensor from its parts, on the host; nothing of it where it is not kept."""
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()
    return whole.detach().cpu() if is_kept else torch.empty(0)


def divided_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's saved state with what is divided as its parameters are.

    Args:
        optimizer: Over parameters that may be parts.
        state: Its `state_dict`, of whole tensors on the host or parts.

    Returns:
        What it can load; no rank needs to speak to another for it.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def divided(parameter: Tensor, value: Any) -> Any:
        if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
            return value
        if value.shape != parameter.shape:
            return value.clone()  # not to hold the file that it is in
        here = value.to(parameter.device)
        return distribute_tensor(here, parameter.device_mesh, parameter.placements, src_data_rank=None)

    return state | {
        "state": {
            index: {name: divided(parameters[index], value) for name, value in values.items()}
            for index, values in state["state"].items()
        }
    }
