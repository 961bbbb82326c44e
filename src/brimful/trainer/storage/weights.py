"""Writes the weights of a model to a safetensors file, tied ones once, and loads them."""

from __future__ import annotations

import json
import os
import struct
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from brimful.arguments import checks_arguments
from brimful.codec import decode_json
from brimful.errors import FileFormatError, UsageError
from brimful.execution.attached import load_state
from brimful.execution.out_of_memory import out_of_memory
from brimful.torch_utils.module_names import wrapped_state

WEIGHTS = "weights.safetensors"
"""The latest weights in a run directory."""
BEST = "best.safetensors"
"""The weights with the lowest validation loss."""
AVERAGE = "average.safetensors"
"""The moving average of the weights."""
TIED = "tied"
"""Metadata key: JSON that maps the further names of tied weights to the name in the file."""


@checks_arguments
def load_weights(model: nn.Module, path: Path | str) -> Path:
    """Load the weights of a run into a model.

    Args:
        model: A model with the structure of the trained one, compiled or not, on any device.
        path: A run directory, or a safetensors file. From a run directory this loads `best.safetensors` if the
            run validated, else `average.safetensors` if it kept an average, else `weights.safetensors`.

    Returns:
        The file that was loaded.

    Raises:
        UsageError: The directory has no weights, or the file is damaged or of another model.
    """
    file = weights_of_run(Path(path)) if Path(path).is_dir() else Path(path)
    handled = sys.exc_info()[1]
    try:
        missing, unexpected = load_state(model, wrapped_state(model, read_tensors(file)))
        # extra state is not a tensor, and was not saved
        missing = [name for name in missing if not name.endswith("_extra_state")]
        if missing or unexpected:
            raise KeyError(f"missing {missing}, not in the model {unexpected}")
    except (FileFormatError, KeyError, RuntimeError) as error:
        if out_of_memory(error, handled) is not None:
            raise
        raise UsageError(f"{file} has no weights for this {type(model).__name__}: {error}") from error
    return file


def weights_of_run(directory: Path) -> Path:
    """The file that `load_weights` loads from a run directory."""
    names = (BEST, AVERAGE, WEIGHTS)
    for name in names:
        if (directory / name).exists():
            return directory / name
    raise UsageError(f"{directory} has no weights: none of {', '.join(names)} is there.")


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, deterministically. An existing file is overwritten.

    The tensors must be on the host, each with its own storage. safetensors writes the metadata in an order that
    differs between processes (0.8: Rust's `HashMap`), so this writes the header again with sorted metadata, of
    the same length.
    """
    save_file(dict(tensors), path, metadata={"format": "pt", **metadata})
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(ordered) <= length
        file.seek(_LENGTH_BYTES)
        file.write(ordered.ljust(length))


def write_or_link(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str], before: Path | None
) -> None:
    """Write a safetensors file that does not exist yet; link it to `before` if that has the same content."""
    if before is not None and _has(before, tensors, metadata):
        try:
            os.link(before, path)
        except OSError:  # the file system has no links, or no more of them
            path.unlink(missing_ok=True)
        else:
            return
    write_tensors(tensors, path, metadata)


def _has(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bool:
    """Whether a file has these tensors and no others, byte by byte."""
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
            if {name: found.get(name) for name in metadata} != metadata or set(file.keys()) != set(tensors):
                return False
            return all(_is_same(file.get_tensor(name), tensor) for name, tensor in tensors.items())
    except (OSError, SafetensorError):  # damaged
        return False


def _is_same(found: Tensor, expected: Tensor) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return torch.equal(_bytes_of(found), _bytes_of(expected))


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: as bytes, NaN is equal to itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


_LENGTH_BYTES = 8
"""Size of the number at the start of a safetensors file, the length of its header."""


def read_tensors(path: Path | str) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file to the host, tied ones under each of their names."""
    tied = read_tied(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise FileFormatError(f"{path} cannot be read: {error}.") from error
    return tensors | {name: tensors[first] for name, first in tied.items()}


def read_tied(path: Path | str, *, elsewhere: bool = False) -> dict[str, str]:
    """Read the further names of tied tensors in a safetensors file: the name in the file by further name.

    With `elsewhere` the tensors may be in other files.
    """
    if Path(path).exists() and not Path(path).is_file():  # opening a FIFO would block
        raise FileFormatError(f"{path} is not a regular file.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
    except (OSError, SafetensorError) as error:
        raise FileFormatError(f"{path} cannot be read: {error}.") from error
    where = f"the metadata {TIED!r} of {path}"
    tied = decode_json(metadata.get(TIED, "{}"), dict[str, str], where=where)
    for name, first in tied.items():
        if name in names or not (elsewhere or first in names):
            raise FileFormatError(f"{where}: {name!r} cannot be tied to {first!r}.")
    return tied


def distinct_tensors(
    state: Mapping[str, Any], *, copies: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Move the tensors of a `state_dict` to the host, tied ones once.

    Returns the tensors by their first name, and the first name by further name. With `copies`, tensors that are
    on the host already are copied, so that training can continue. `safetensors.torch.save_model` also writes
    tied tensors once, but refuses a parameter that shares its storage with others, as the weights of an RNN on
    a GPU do (safetensors 0.8).
    """
    distinct: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    blocks: set[int] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            warnings.warn(
                f"the model's state {name!r} ({type(tensor).__name__}) is not a tensor and is not saved.",
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
    """A key that is equal for two tensors if, and only if, they are the same memory."""
    if tensor.numel() == 0:
        return (name,)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _alone_in_block(tensor: Tensor, blocks: set[int]) -> Tensor:
    """The tensor on the host with its own storage, not one of `blocks`; adds its storage to them."""
    tensor = tensor.detach().cpu().contiguous()
    block = tensor.untyped_storage()
    if block.nbytes() != tensor.nbytes or block.data_ptr() in blocks:
        tensor = tensor.clone()
    blocks.add(tensor.untyped_storage().data_ptr())
    return tensor
