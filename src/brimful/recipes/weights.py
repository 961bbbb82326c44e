"""Weights from a file, for a model that may have new parts."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from brimful.codec import parse_json, read_regular_file
from brimful.errors import UsageError
from brimful.execution.out_of_memory import out_of_memory
from brimful.utils.files import is_file

_MOST_NAMED = 6


def load_matching(model: nn.Module, *, path: Path) -> None:
    """Load the tensors of a file that match the model in name and shape; warn about parts without a match.

    The model is newly built. The file is a safetensors file, or tensors by name that `torch.save` wrote,
    perhaps under "state_dict" or "model"; code in it is not run. Raises `UsageError` if the file cannot be
    read, or fits less than half of the model's parameters.
    """
    tensors = _read(path)
    own = model.state_dict()
    fitting = {name: tensor for name, tensor in tensors.items() if _fits(tensor, own.get(name))}
    everything = (*dict(model.named_parameters()), *dict(model.named_buffers()))  # tied ones once
    new = [name for name in everything if name in own and name not in fitting]
    check_most_is_loaded(model, path, fitting)
    model.load_state_dict(fitting, strict=False)
    if new:
        warn_new(path, new)


def names_of_tensors(directory: Path) -> Collection[str]:
    """The names of the tensors in a directory saved by transformers, with weights in one file or several.

    Old versions of transformers may have chosen other names. Raises `UsageError` if a file cannot be read, and
    `FileFormatError` if the index is not JSON.
    """
    for index in sorted(directory.glob("*.index.json")):
        document = parse_json(read_regular_file(index, what="index of weights"), where=str(index))
        names = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(names, dict):
            raise UsageError(f"{index} has no weight_map, which names the tensors of each file.")
        return tuple(names)
    path = directory / "model.safetensors"
    if not path.exists():
        return _read(directory / "pytorch_model.bin").keys()
    if not is_file(path):  # opening a FIFO would wait
        raise UsageError(f"{path} has no weights that can be read: it is not a regular file.")
    try:
        with safe_open(path, framework="pt") as file:
            return tuple(file.keys())
    except (OSError, SafetensorError) as error:
        raise unreadable(path, error) from error


def check_most_is_loaded(model: nn.Module, path: Path, fitting: Collection[str]) -> None:
    """Raise `UsageError` for weights of another model: with less than half of the model's parameters.

    `fitting` has the names of the model's tensors that the weights have in the same shape; `path` is where they
    come from.
    """
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}  # tied ones once
    loaded = sum(size for name, size in sizes.items() if name in fitting)
    if loaded * 2 < sum(sizes.values()):
        raise UsageError(
            f"{path} is of another model than this {type(model).__name__}: it has the name and shape of "
            f"{len(fitting)} of {len(model.state_dict())} tensors, {loaded / sum(sizes.values()):.0%} of the "
            f"parameters. The model has {_few(list(sizes))}."
        )


def unreadable(path: Path, error: Exception) -> Exception:
    """The one-line `UsageError` for weights that cannot be read; `error` itself if memory ran out."""
    if out_of_memory(error, error.__context__) is not None:
        return error
    if isinstance(error, pickle.UnpicklingError):
        return UsageError(
            f"the weights in {path} are damaged, or are not tensors alone; what could run code is not loaded. "
            "Convert weights that you trust to .safetensors."
        )
    reason = str(error).strip().partition("\n")[0]
    return UsageError(f"{path} has no weights that can be read: {reason or type(error).__name__}")


def warn_new(path: Path, names: list[str]) -> None:
    """Warn that parts of a model are not in a file, or have another shape there."""
    warnings.warn(
        f"{path} has nothing that fits {_few(names)}: {'it starts' if len(names) == 1 else 'they start'} from "
        "random weights.",
        stacklevel=3,
    )


def _fits(tensor: Tensor, own: Tensor | None) -> bool:
    return own is not None and own.shape == tensor.shape


def _read(path: Path) -> dict[str, Tensor]:
    if path.exists() and not is_file(path):  # opening a FIFO would wait
        raise UsageError(f"{path} has no weights that can be read: it is not a regular file.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        raise unreadable(path, error) from error
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
