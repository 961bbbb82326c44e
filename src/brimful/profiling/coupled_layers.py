"""Layers of a model that compute otherwise in a split batch: BatchNorm, and those that keep a state.

Private torch APIs used here: `_BatchNorm` (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from brimful.batches import InputMover
from brimful.capture.fakes.outside import is_state
from brimful.execution.buffers import BufferSnapshot
from brimful.execution.coupled_loss import loss_of
from brimful.execution.precision import device_of
from brimful.execution.random_state import RandomState
from brimful.job import Batch, Job
from brimful.planner import what_splitting_changes
from brimful.settings import Settings

NEEDS_GRADIENTS = "does not require grad"
"""What torch says of a gradient that is asked for where none is recorded (torch/csrc/autograd/engine.cpp)."""


def batch_norms(model: nn.Module) -> tuple[str, ...]:
    """BatchNorm layers that normalise with the statistics of the batch itself."""
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    )


def stateful_modules(model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Modules other than BatchNorm with a buffer that a forward pass changed and that is more than a counter.

    Args:
        model: Has these modules.
        before: Buffers by name, as they were before the forward pass.
        after: The same after it.

    Returns:
        Names, each once.
    """
    found: dict[str, None] = {}
    for name, buffer in after.items():
        path = name.rpartition(".")[0]
        is_changed = name not in before or not _are_equal(before[name].cpu(), buffer.cpu())
        if is_changed and is_state(buffer) and not isinstance(model.get_submodule(path), _BatchNorm):
            found.setdefault(path)
    return list(found)


def _are_equal(tensor: Tensor, other: Tensor) -> bool:
    """Entry by entry; NaN is equal to NaN."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


def what_split_changes(job: Job, settings: Settings, model: nn.Module, part: Batch) -> Iterator[str]:
    """What splitting the batch changes in layers that depend on the micro-batch, found by one forward pass.

    Args:
        job: Its loss is computed.
        settings: Of a split batch.
        model: In training mode; its buffers and all generators are left as they were.
        part: A few samples.

    Yields:
        Clauses; none where no layer depends on the micro-batch.

    Raises:
        Exception: Whatever the loss raises.
    """
    yield from what_splitting_changes(batch_norms(model), _stateful_in(job, model, part), settings)


def _stateful_in(job: Job, model: nn.Module, part: Batch) -> list[str]:
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    if not any(map(is_state, before.values())):
        return []
    device = device_of(model)
    random_state, buffers = RandomState.now(device), BufferSnapshot(model)
    buffers.take()
    try:
        compute = partial(loss_of(job), model, InputMover.copying_to(device)(part))
        try:
            with torch.no_grad():
                compute()
        except RuntimeError as error:
            if NEEDS_GRADIENTS not in str(error):
                raise
            with restoring_gradients(model):
                compute()
        return stateful_modules(model, before, dict(model.named_buffers()))
    finally:
        buffers.restore()
        random_state.restore(device)


@contextmanager
def restoring_gradients(model: nn.Module) -> Iterator[None]:
    """Within, parameters have no gradients; afterwards those that they had before."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _gradient in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
