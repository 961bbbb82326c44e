"""A model's weights in a safetensors file, tied ones once, and back."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from brimful.errors import UsageError

TIED = "tied"
"""Metadata: further names of tied weights, each with the name they are written under, as JSON."""


def load_weights(model: nn.Module, path: Path | str) -> None:
    """Give a model the weights that a run saved.

    Args:
        model: Of the same structure as the one that was trained; on any device.
        path: A `weights.safetensors` or `best.safetensors`.

    Raises:
        UsageError: The file is damaged, or of another model.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tied = json.loads((file.metadata() or {}).get(TIED, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        tensors |= {name: tensors[first] for name, first in tied.items()}
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        # what is no tensor was not saved
        missing = [name for name in missing if not name.endswith("_extra_state")]
        if missing or unexpected:
            raise KeyError(f"missing {missing}, not in the model {unexpected}")
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise UsageError(f"{path} has no weights for this {type(model).__name__}: {error}") from error


def distinct_tensors(
    state: Mapping[str, Any], *, copies: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a `state_dict` on the host, each once, and which further names it has.

    Args:
        state: A model's.
        copies: Copy what is on the host already, so that training may go on.

    Returns:
        Tensors by their first name, and the first name of each that is tied.

    `safetensors.torch.save_model` would do, but refuses a parameter that is a part of a larger block, as every
    weight of an RNN on a GPU is (safetensors 0.8).
    """
    distinct: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    blocks: set[int] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            warnings.warn(
                f"the model's state {name!r} ({type(tensor).__name__}) is no tensor and is not saved.",
                stacklevel=4,
            )
            continue
        first = names.setdefault(_place(name, tensor), name)
        if first == name:
            distinct[name] = _alone_in_block(tensor.detach().to("cpu", copy=copies), blocks)
        else:
            tied[name] = first
    return distinct, tied


def _place(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """The same for two tensors if, and only if, they are one."""
    if tensor.numel() == 0:
        return (name,)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _alone_in_block(tensor: Tensor, blocks: set[int]) -> Tensor:
    """The tensor on the host, filling a block of memory that is not one of `blocks`, where it is then added."""
    tensor = tensor.detach().cpu().contiguous()
    block = tensor.untyped_storage()
    if block.nbytes() != tensor.nbytes or block.data_ptr() in blocks:
        tensor = tensor.clone()
    blocks.add(tensor.untyped_storage().data_ptr())
    return tensor
