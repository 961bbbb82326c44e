"""A model's weights in a safetensors file, tied ones once, and back."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from brimful.codec import decode_json
from brimful.errors import FileFormatError, UsageError
from brimful.execution.out_of_memory import out_of_memory
from brimful.module_names import wrapped_state

WEIGHTS = "weights.safetensors"
"""In a run directory: the latest weights."""
BEST = "best.safetensors"
"""Those with the lowest validation loss."""
AVERAGE = "average.safetensors"
"""Their moving average."""
TIED = "tied"
"""Metadata: further names of tied weights, each with the name they are written under, as JSON."""


def load_weights(model: nn.Module, path: Path | str) -> Path:
    """Give a model the weights that a run saved.

    Args:
        model: Of the same structure as the one that was trained, compiled or not; on any device.
        path: A run directory, or a safetensors file. Of a run directory: `best.safetensors` if the run
            validated, else `average.safetensors` if it kept an average, else `weights.safetensors`.

    Returns:
        The file that was loaded.

    Raises:
        UsageError: The directory has no weights, or the file is damaged or of another model.
    """
    file = _weights_of_run(Path(path)) if Path(path).is_dir() else Path(path)
    try:
        missing, unexpected = model.load_state_dict(wrapped_state(model, read_tensors(file)), strict=False)
        # what is no tensor was not saved
        missing = [name for name in missing if not name.endswith("_extra_state")]
        if missing or unexpected:
            raise KeyError(f"missing {missing}, not in the model {unexpected}")
    except (FileFormatError, KeyError, RuntimeError) as error:
        if out_of_memory(error) is not None:
            raise
        raise UsageError(f"{file} has no weights for this {type(model).__name__}: {error}") from error
    return file


def _weights_of_run(directory: Path) -> Path:
    names = (BEST, AVERAGE, WEIGHTS)
    for name in names:
        if (directory / name).exists():
            return directory / name
    raise UsageError(f"{directory} has no weights: none of {', '.join(names)} is there.")


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file: the same bytes for the same tensors and metadata.

    safetensors writes the metadata in an order that differs from process to process (0.8: Rust's `HashMap`), so
    the header is written once more with them sorted, which leaves its length as it is.

    Args:
        tensors: On the host, each in a block of memory of its own.
        path: Is overwritten.
        metadata: Kept beside them.
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


_LENGTH_BYTES = 8
"""Of the header's length, with which a safetensors file begins."""


def read_tensors(path: Path | str) -> dict[str, Tensor]:
    """All tensors of a safetensors file, tied ones by each of their names.

    Args:
        path: What `write_tensors` wrote of `distinct_tensors`, or any safetensors file.

    Returns:
        Tensors on the host by name.

    Raises:
        FileFormatError: It is not one, or cannot be read.
    """
    tied = read_tied(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise FileFormatError(f"{path} cannot be read: {error}.") from error
    return tensors | {name: tensors[first] for name, first in tied.items()}


def read_tied(path: Path | str, *, elsewhere: bool = False) -> dict[str, str]:
    """The further names of the tensors in a safetensors file, each with the name that it is written under.

    Args:
        path: The file.
        elsewhere: The tensors may be in other files.

    Returns:
        The names; none if no weights are tied.

    Raises:
        FileFormatError: It is not a safetensors file, or cannot be read.
    """
    if Path(path).exists() and not Path(path).is_file():  # opening a FIFO would wait
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
