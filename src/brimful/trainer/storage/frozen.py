"""The file of a save for parameters that are not trained: saves share it as long as these stay the same.

Each save has the file under its own name, so that it is complete by itself; on the disk these are two files
with several names (hard links), so that damage to one leaves every second save whole. Whether the parameters
are the same is decided by comparing them with the file byte by byte, because some code changes frozen
parameters without a trace, as momentum encoders do by `.data`.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from brimful.module_names import plain_namer
from brimful.trainer.storage.manifest import FROZEN, by_step
from brimful.trainer.storage.weights import write_tensors


def split_frozen(model: nn.Module, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the parameters that are not trained from the rest of a model's state, which is by plain names.

    Returns the frozen parameters, with what belongs to them, such as the scales of quantised weights; and the
    rest.
    """
    plain_name = plain_namer(model)
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {plain_name(name) for name, parameter in parameters if not parameter.requires_grad}
    kept = {name: value for name, value in state.items() if _is_of(name, frozen)}
    return kept, {name: value for name, value in state.items() if name not in kept}


def frozen_to_share(saves: Path, *, keep: int) -> Path | None:
    """The file of frozen parameters that the next save may share; None if there is none.

    It is that of the newest save but one, so that two saves in a row never share one; of the newest if only one
    save is kept.
    """
    found = by_step(saves)[min(keep, 2) - 1 :]
    return found[0] / FROZEN if found and (found[0] / FROZEN).is_file() else None


def write_frozen(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str], before: Path | None
) -> None:
    """Write frozen parameters on the host, or give an existing file with the same ones a further name.

    The file `path` does not exist; `before` is that of an earlier save, None if there is none.
    """
    if before is not None and _has(before, tensors, metadata):
        try:
            os.link(before, path)
        except OSError:  # the file system has no links, or no more of them
            path.unlink(missing_ok=True)
        else:
            return
    write_tensors(tensors, path, metadata)


def _is_of(name: str, parameters: Container[str]) -> bool:
    """Whether an entry is a parameter, or named after one."""
    while name:
        if name in parameters:
            return True
        name = name.rpartition(".")[0]
    return False


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
