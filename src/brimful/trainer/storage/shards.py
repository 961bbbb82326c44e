"""Writes the shards of each rank to a file, and loads them on any number of ranks.

    shards/
      00001-of-00004.safetensors    rank 0: its shards of parameters ("model.NAME") and optimizer state
      00002-of-00004.safetensors    ("optimizer.PARAMETER.NAME"); the header has the offset of each shard
      …

This is the format that torch's distributed checkpoint (DCP) writes with `HuggingFaceStorageWriter`. DCP's
reader of it reads it: each rank reads the parts of any file that it needs. DCP's own format is not used: its
`.metadata` is a pickle, and `FileSystemReader` unpickles it, which may run code. DCP's writer is not used
either: it builds the whole file in memory, beside the copies of the tensors.

Private torch API used: `DTensor.__create_chunk_list__`, as DCP uses it to find a shard (checked: torch 2.13).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from brimful.errors import ResumeError
from brimful.torch_utils.module_names import plain_namer, plain_state, wrapped_state
from brimful.trainer.storage.weights import read_tied

SHARDS = "shards"
"""The directory of a save with the shards of all ranks."""
_MODEL, _OPTIMIZER = "model.", "optimizer."
_HEADER, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys that DCP's reader looks for in a file."""


def own_shards(divided: Mapping[str, DTensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Copies on the host of this rank's shards, and the metadata of their file, with the offset of each."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, dict[str, list[int]]] = {}
    for name, tensor in divided.items():
        (place,) = tensor.__create_chunk_list__()
        if math.prod(place.sizes):  # the last ranks may have an empty shard of a small tensor
            tensors[name] = tensor.to_local().detach().to("cpu", copy=True).contiguous()
            header[name] = {_OFFSETS: list(place.offsets)}
    return tensors, {_HEADER: json.dumps(header)}


class SavedTensors:
    """The tensors in the `*.safetensors` of a directory, sharded or whole, read on demand."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def sizes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Unsharded shape and type of each tensor by name; raises ResumeError if a shard is missing."""
        if not self._directory.is_dir():
            return {}
        try:
            saved = self._reader().read_metadata().state_dict_metadata
        except (SafetensorError, KeyError, ValueError) as error:
            raise ResumeError(f"{self._directory} cannot be read: {error}") from error
        found = {}
        for name, tensor in saved.items():
            if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
                raise ResumeError(f"a part of {name!r} is missing in {self._directory}.")
            found[name] = tensor.size, tensor.properties.dtype
        return found

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Read into tensors by name, sharded or not, without communication between ranks.

        Their unsharded shapes must be those that were saved.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        if not targets:
            return
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(dict(targets), storage_reader=self._reader(), no_dist=True)
        except CheckpointException as error:  # a BaseException, not an Exception
            raise ResumeError(f"{self._directory} cannot be read: {error}") from error

    def _reader(self) -> Any:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        return HuggingFaceStorageReader(str(self._directory))


def divided_of_model(model: nn.Module) -> tuple[dict[str, Any], dict[str, DTensor], dict[str, str]]:
    """Separate the sharded tensors of a model from the rest of its state, by names without wrappers.

    Returns the state that is not sharded; each sharded tensor once, by its name in the shards; and for each
    further name of a tied sharded tensor, its first name.
    """
    plain_name = plain_namer(model)
    parameters = model.named_parameters(remove_duplicate=False)
    keys = {plain_name(name): id(parameter) for name, parameter in parameters}
    first_of: dict[int, str] = {}
    whole: dict[str, Any] = {}
    divided: dict[str, DTensor] = {}
    tied: dict[str, str] = {}
    for name, value in plain_state(model).items():
        if not isinstance(value, DTensor):
            whole[name] = value
            continue
        first = first_of.setdefault(keys.get(name, id(value)), name)
        if first == name:
            divided[_MODEL + name] = value
        else:
            tied[name] = first
    return whole, divided, tied


def divided_of_optimizer(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, DTensor]]:
    """Split an optimizer's `state_dict` into what is not sharded, and sharded tensors by name in the shards."""
    divided = {
        f"{_OPTIMIZER}{index}.{name}": value
        for index, values in state["state"].items()
        for name, value in values.items()
        if isinstance(value, DTensor)
    }
    rest = {
        index: {name: value for name, value in values.items() if not isinstance(value, DTensor)}
        for index, values in state["state"].items()
    }
    return {**state, "state": rest}, divided


def load_model(model: nn.Module, save: Path, whole_names: Sequence[str]) -> None:
    """Load the parameters and buffers of a save into a model, sharded or not; each rank reads its shards alone.

    `save` is the directory of the save, `whole_names` the names of its files of unsharded tensors. Raises
    ResumeError if the structure of the model differs.
    """
    wanted = {name: value for name, value in plain_state(model).items() if isinstance(value, Tensor)}
    tied = {
        name: first for file in whole_names for name, first in read_tied(save / file, elsewhere=True).items()
    }
    saved_names = {name: tied.get(name, name) for name in wanted}
    known: set[str] = set()
    for source, prefix in ((SavedTensors(save), ""), (SavedTensors(save / SHARDS), _MODEL)):
        own = {name for name in source.sizes if name.startswith(prefix)}
        known |= {name.removeprefix(prefix) for name in own}
        targets: dict[str, Tensor] = {}
        for name, saved_name in saved_names.items():
            if prefix + saved_name in own:
                check_alike(name, wanted[name], *source.sizes[prefix + saved_name])
                targets.setdefault(prefix + saved_name, wanted[name])
        source.fill(targets)
        for name, saved_name in saved_names.items():  # they were tied when saved, and are not now
            filled = targets.get(prefix + saved_name)
            if filled is not None and filled is not wanted[name]:
                wanted[name].copy_(filled)
    missing = {saved_names[name] for name, value in wanted.items() if value.numel()} - known
    unexpected = known - set(saved_names.values())
    check_names(save, missing, unexpected)
    # runs the model's hooks; the tensors are loaded already
    model.load_state_dict(wrapped_state(model, wanted), strict=False)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], save: Path) -> dict[str, Any]:
    """Add the sharded tensors of a save to an optimizer's state, sharded as the parameters are now.

    `state` is the saved `state_dict` without them, `save` the directory of the save. Returns the complete
    `state_dict`.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    source = SavedTensors(save / SHARDS)
    targets = {}
    for name, (shape, dtype) in source.sizes.items():
        if name.startswith(_OPTIMIZER):
            index = int(name.split(".")[1])
            if index >= len(parameters):
                raise ResumeError(
                    f"the run cannot be resumed: the saved optimizer has a parameter {index}, and this one "
                    f"{len(parameters)} parameters."
                )
            parameter = parameters[index]
            of_deepspeed = getattr(parameter, "ds_shape", None)  # DeepSpeed shards whole state itself
            if (of_deepspeed or parameter.shape) != shape:
                raise _unlike(name, "shape", tuple(of_deepspeed or parameter.shape), tuple(shape))
            targets[name] = (
                torch.empty(shape, dtype=dtype)
                if of_deepspeed is not None
                else torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            )
    if not targets:
        return dict(state)
    source.fill(targets)
    filled = {index: dict(values) for index, values in state["state"].items()}
    for name, tensor in targets.items():
        _, index_text, key = name.split(".", maxsplit=2)
        filled.setdefault(int(index_text), {})[key] = tensor
    return {**state, "state": filled}


def check_names(save: Path, missing: Set[str], unexpected: Set[str]) -> None:
    """Raise ResumeError if a save lacks tensors of the model, or the model some of the save."""
    if missing or unexpected:
        raise ResumeError(
            f"the run cannot be resumed with this model: {save} has no {sorted(missing)}, and the model has no "
            f"{sorted(unexpected)}."
        )


def check_alike(name: str, own: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raise ResumeError unless a model's tensor has the shape and dtype of the saved one."""
    if own.shape != shape:
        raise _unlike(name, "shape", tuple(own.shape), tuple(shape))
    if own.dtype != dtype:
        raise _unlike(name, "type", own.dtype, dtype)


def _unlike(name: str, what: str, own: object, saved: object) -> ResumeError:
    return ResumeError(
        f"the run cannot be resumed with this model: {name!r} has {what} {own}, and {saved} was saved."
    )
