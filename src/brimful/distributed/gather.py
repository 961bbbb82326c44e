"""Gathers the shards that FSDP2 leaves on each rank into whole tensors for weights, and shards optimizer state.

Private torch API used: `DTensor.__create_chunk_list__`, `DTensor._spec` (checked: torch 2.13).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from brimful.batches import own_part
from brimful.errors import SaveError
from brimful.torch_utils.module_names import plain_namer
from brimful.utils.files import fresh


class WholeModel(nn.Module):
    """The whole parameters and buffers of a model whose parameters are sharded over ranks.

    Construction is collective, a tensor at a time. The first rank writes each to a file in `folder` and keeps
    it mapped, so that no rank needs memory for more than one of them. The files have no name any more when
    construction ends; `folder` is None on the other ranks. Raises `SaveError` if a file could not be written.
    """

    def __init__(self, model: nn.Module, folder: Path | None) -> None:
        super().__init__()
        parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        gathered: dict[int, Tensor] = {}
        failure: OSError | None = None
        self._whole: dict[str, Any] = {}
        plain_name = plain_namer(model)
        for own_name, value in model.state_dict().items():
            name = plain_name(own_name)
            if not isinstance(value, DTensor):
                self._whole[name] = value
                continue
            key = parameters.get(own_name, id(value))  # tied ones are gathered once
            if key not in gathered:
                whole = value.full_tensor().detach()
                gathered[key] = torch.empty(0)
                if folder is not None and failure is None:
                    try:
                        gathered[key] = _mapped(whole, folder / "whole.partial")
                    except OSError as error:
                        failure = error  # raised once the other ranks have what they wait for
                del whole
            self._whole[name] = gathered[key]
        if failure is not None:
            raise SaveError(f"the weights could not be gathered into {folder}: {failure}.") from failure

    def state_dict(self, *_arguments: Any, **_options: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's own `state_dict`, with whole tensors."""
        return self._whole


def _mapped(tensor: Tensor, path: Path) -> Tensor:
    """A tensor's values in a mapped file that has no name any more, and is freed with the returned tensor."""
    if tensor.numel() == 0:
        return tensor.cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # written, not filled through the map: there a full disk would end the process
        tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tofile(fresh(path))
        mapped = torch.from_file(str(path), shared=False, size=tensor.numel(), dtype=tensor.dtype)
    finally:
        path.unlink(missing_ok=True)
    return mapped.view(tensor.shape)


def divided_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's saved state, sharded as its parameters are, so that the optimizer can load it.

    `state` has whole tensors on the host, or shards. No communication between ranks is needed.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def divided(parameter: Tensor, value: Any) -> Any:
        if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
            return value
        if value.shape != parameter.shape:
            return value.clone()  # not to hold the file that it is in
        (place,) = parameter.__create_chunk_list__()
        here = tuple(slice(begin, begin + size) for begin, size in zip(place.offsets, place.sizes, strict=True))
        own = own_part(parameter)
        part = value[here].reshape(own.shape).to(own.device, copy=True)
        return DTensor(part, parameter._spec, requires_grad=False)

    return state | {
        "state": {
            index: {name: divided(parameters[index], value) for name, value in values.items()}
            for index, values in state["state"].items()
        }
    }
