"""Tensors that a training loop holds between steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.batches import named_tensors, own_part
from brimful.execution.attached import attached_tensors
from brimful.job import Batch
from brimful.torch_utils.wrapper_tensors import inner_tensors


def resident_storages(model: nn.Module, optimizer: Optimizer) -> dict[int, int]:
    """Bytes of what a training loop holds between steps, by the address of their storage.

    These are parameters and what is attached to them, gradients, buffers and optimizer state.
    """
    return {
        storage.data_ptr(): storage.nbytes()
        for resident in _residents(model, optimizer)
        for tensor in inner_tensors(own_part(resident))
        if (storage := tensor.untyped_storage()).nbytes() > 0
    }


def tensor_storages(tensors: Batch) -> dict[int, int]:
    """Bytes of the tensors in any nest of containers, by the address of their storage.

    Where the tensors are only a part of a storage, that part counts.
    """
    parts = {
        (tensor.data_ptr(), tensor.nbytes): tensor.untyped_storage()
        for _path, tensor in named_tensors(tensors)
        if tensor.layout is torch.strided and tensor.device.type == "cpu"
    }
    found: dict[int, int] = {}
    for (_begin, nbytes), storage in parts.items():
        address = storage.data_ptr()
        found[address] = min(found.get(address, 0) + nbytes, storage.nbytes())
    return found


def _residents(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    yield from attached_tensors(model).values()
    for state in optimizer.state.values():
        yield from (tensor for _name, tensor in named_tensors(state))
