"""What each rank has of divided tensors, in a file of its own, and back onto any number of ranks.

    shards/
      00001-of-00004.safetensors    rank 0: its part of parameters ("model.NAME") and of the optimizer's state
      00002-of-00004.safetensors    ("optimizer.PARAMETER.NAME"); where each part begins stands in the header
      …

This is the format that torch's distributed checkpoint (DCP) writes with `HuggingFaceStorageWriter`, and DCP's
reader of it reads it, each rank what it needs of any file. DCP's own format is not taken: its `.metadata` is a
pickle and `FileSystemReader` loads it as such, which may run code. DCP's writer is not taken either: it makes
the whole file in memory first, beside the copies that the file is made of.

Private torch API used: `DTensor.__create_chunk_list__`, by which DCP asks for the part (checked: torch 2.13).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from brimful.errors import ResumeError
from brimful.module_names import plain_namer, plain_state, wrapped_state
from brimful.trainer.storage.manifest import SHARDS
from brimful.trainer.storage.weights import read_tied, write_tensors

_MODEL, _OPTIMIZER = "model.", "optimizer."
_HEADER, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""What DCP's reader looks for in a file."""


class Shards:
    """Copies on the host of this rank's parts.

    Args:
        divided: Tensors by name, each of which every rank has a part of.
    """

    def __init__(self, divided: Mapping[str, DTensor]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._header: dict[str, dict[str, list[int]]] = {}
        for name, tensor in divided.items():
            (place,) = tensor.__create_chunk_list__()
            if math.prod(place.sizes):  # the last ranks may have nothing of a small tensor
                part = tensor.to_local().detach()
                self.tensors[name] = part.to("cpu", copy=True).contiguous()
                self._header[name] = {_OFFSETS: list(place.offsets)}

    def write(self, path: Path) -> None:
        """Write them to a file.

        Args:
            path: Is overwritten.
        """
        write_tensors(self.tensors, path, {_HEADER: json.dumps(self._header)})


class SavedTensors:
    """All `*.safetensors` in a directory, of which only what is asked for is read.

    Args:
        directory: With parts of tensors, or whole ones.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def sizes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Whole shape and type of each tensor by name; a ResumeError if a part of one is missing."""
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
        """Read into tensors, whole ones or this rank's parts; no rank need speak to another.

        Args:
            targets: By name, of the saved whole shapes.

        Raises:
            ResumeError: They cannot be read.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        if not targets:
            return
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(dict(targets), storage_reader=self._reader(), no_dist=True)
        except CheckpointException as error:  # no Exception, but a BaseException
            raise ResumeError(f"{self._directory} cannot be read: {error}") from error

    def _reader(self) -> Any:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        return HuggingFaceStorageReader(str(self._directory))


def divided_of_model(model: nn.Module) -> tuple[dict[str, Any], dict[str, DTensor], dict[str, str]]:
    """A model's state in what this rank has whole and what is divided.

    Args:
        model: Any.

    Returns:
        By names without wrappers: what is whole; what is divided, once each, by its name in the shards; the
        first name of each divided one that is tied.
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
    """An optimizer's `state_dict` without what is divided, and that by its name in the shards."""
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


def load_model(model: nn.Module, save: Path, whole_name: str) -> None:
    """Give a model a save's parameters and buffers; of what is divided, here or there, this rank's part alone.

    Args:
        model: Of the same structure as the saved one, divided or not.
        save: Its directory.
        whole_name: Of the file in it with what was not divided.

    Raises:
        ResumeError: It is of another structure.
    """
    wanted = {name: value for name, value in plain_state(model).items() if isinstance(value, Tensor)}
    tied = read_tied(save / whole_name, elsewhere=True)
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
        for name, saved_name in saved_names.items():  # not tied any more
            filled = targets.get(prefix + saved_name)
            if filled is not None and filled is not wanted[name]:
                wanted[name].copy_(filled)
    missing = {saved_names[name] for name, value in wanted.items() if value.numel()} - known
    unexpected = known - set(saved_names.values())
    if missing or unexpected:
        raise ResumeError(
            f"the run cannot be resumed with this model: {save} has no {sorted(missing)}, and the model has no "
            f"{sorted(unexpected)}."
        )
    # for hooks; what it copies is there already
    model.load_state_dict(wrapped_state(model, wanted), strict=False)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], save: Path) -> dict[str, Any]:
    """An optimizer's saved state with what was divided, divided as its parameters are now or whole.

    Args:
        optimizer: Over the parameters as they are now.
        state: Its saved `state_dict` without what was divided.
        save: The directory of the save.

    Returns:
        The state with it.

    Raises:
        ResumeError: It is of other parameters.
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
            of_deepspeed = getattr(
                parameter, "ds_shape", None
            )  # which has a part, and divides whole state itself
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


def check_alike(name: str, own: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Check that a tensor is of the shape and type of the one that was saved.

    Args:
        name: Names it in errors.
        own: The model's.
        shape: Of the saved one.
        dtype: Of the saved one.

    Raises:
        ResumeError: It is not.
    """
    if own.shape != shape:
        raise _unlike(name, "shape", tuple(own.shape), tuple(shape))
    if own.dtype != dtype:
        raise _unlike(name, "type", own.dtype, dtype)


def _unlike(name: str, what: str, own: object, saved: object) -> ResumeError:
    return ResumeError(
        f"the run cannot be resumed with this model: {name!r} has {what} {own}, and {saved} was saved."
    )
