"""What a training loop holds between steps."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.batches import named_tensors, own_part


def resident_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Bytes of parameters, gradients, buffers and optimizer state; storage that several share counts once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for tensor in _residents(model, optimizer)
        if (storage := own_part(tensor).untyped_storage()).nbytes() > 0
    }
    return sum(storages.values())


def _residents(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for state in optimizer.state.values():
        yield from (tensor for _name, tensor in named_tensors(state))
