"""Weights from a file, for a model of which some part may be new."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from brimful.errors import UsageError

_MOST_NAMED = 6


def load_matching(model: nn.Module, *, path: Path) -> None:
    """Load those tensors of a file whose name and shape a model has; say which parts stay as they were.

    Args:
        model: Just built.
        path: A safetensors file, or one that `torch.save` wrote of tensors by name, perhaps under "state_dict"
            or "model". No code in it is run.

    Raises:
        UsageError: The file cannot be read, or fits less than half of the model's parameters.
    """
    tensors = _read(path)
    own = model.state_dict()
    fitting = {name: tensor for name, tensor in tensors.items() if _fits(tensor, own.get(name))}
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}  # tied ones once
    new = [name for name in (*parameters, *dict(model.named_buffers())) if name in own and name not in fitting]
    loaded = sum(size for name, size in parameters.items() if name in fitting)
    if loaded * 2 < sum(parameters.values()):
        raise UsageError(
            f"{path} is of another model: {len(fitting)} of its {len(tensors)} tensors have the name and shape "
            f"of one of this {type(model).__name__}'s {len(own)}. The file has {_few(list(tensors))}; the "
            f"model {_few(list(own))}."
        )
    model.load_state_dict(fitting, strict=False)
    if new:
        tell_new(path, new)


def tell_new(path: Path, names: list[str]) -> None:
    """Warn that parts of a model are not in a file, or not in that shape."""
    warnings.warn(
        f"{path} has nothing that fits {_few(names)}: {'it starts' if len(names) == 1 else 'they start'} from "
        "random weights.",
        stacklevel=3,
    )


def _fits(tensor: Tensor, own: Tensor | None) -> bool:
    return own is not None and own.shape == tensor.shape


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"{path} has no weights that can be read: {error}") from error
    for inside in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(inside), dict):
            found = found[inside]
    entries = found.items() if isinstance(found, dict) else ()
    tensors = {name: value for name, value in entries if isinstance(value, Tensor)}
    if not tensors:
        raise UsageError(f"{path} has no tensors by name: it holds a {type(found).__name__}.")
    return tensors


def _few(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
