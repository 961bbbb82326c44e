"""Layers of a model that compute otherwise in a split batch: BatchNorm, and those that keep a state.

Private torch APIs used here: `_BatchNorm` (checked: torch 2.13).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from brimful.batches import InputMover, tensors_in
from brimful.capture.carried import CarriedState, running_statistics, storages_of
from brimful.errors import OutOfMemoryError, PartialUpdateError
from brimful.execution.buffers import BufferSnapshot
from brimful.execution.coupled_loss import loss_of, loss_parts
from brimful.execution.out_of_memory import with_room
from brimful.execution.precision import device_of
from brimful.execution.random_state import RandomState
from brimful.job import Batch, Job
from brimful.planner import what_splitting_changes
from brimful.settings import Settings
from brimful.torch_utils.dispatch_mode import EagerDispatchMode
from brimful.torch_utils.held_values import HeldValues
from brimful.torch_utils.op_writes import has_writes, written_tensors
from brimful.torch_utils.wrapper_tensors import calls_ops_on_parts

Result = TypeVar("Result")

NEEDS_GRADIENTS = "does not require grad"
"""What torch says of a gradient that is asked for where none is recorded (torch/csrc/autograd/engine.cpp)."""


def batch_norms(model: nn.Module) -> tuple[str, ...]:
    """BatchNorm layers that normalise with the statistics of the batch itself."""
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    )


def what_split_changes(job: Job, settings: Settings, model: nn.Module, part: Batch) -> Iterator[str]:
    """What splitting the batch changes in layers that depend on the micro-batch, found by one forward pass.

    Yields clauses; none where no layer depends on the micro-batch. `part` has a few samples. The model is in
    training mode; its buffers and all generators are left as they were. An error of the loss is raised.
    """
    yield from what_splitting_changes(batch_norms(model), carried_state(job, model, part), settings)


def carried_state(job: Job, model: nn.Module, part: Batch) -> tuple[str, ...]:
    """Names of what one forward changes and the next one reads, as `Trace.stateful_modules` has them.

    BatchNorm's running statistics are not among them. `part` has a few samples. The model is in training mode;
    it and all generators are left as they were. An error of the loss is raised.
    """
    device = device_of(model)
    random_state, carried = RandomState.now(device), CarriedState(model, loss_parts(job))

    def forward() -> None:
        random_state.restore(device)
        loss_of(job)(model, InputMover.copying_to(device)(part))

    with restoring_state(job, model, carried), without_gradients_if_it_can(model, forward) as compute:
        carried.begin()
        compute()
        carried.end()
        carried.settle(compute)
    random_state.restore(device)
    return (*carried.changed, *running_statistics(model))


@contextmanager
def restoring_state(job: Job, model: nn.Module, carried: CarriedState | None = None) -> Iterator[None]:
    """Restore, on exit, everything that forwards inside the context have written to.

    `carried` receives each op. Raises `PartialUpdateError` if memory runs out twice while restoring.
    """
    buffers, held, writes = (
        BufferSnapshot(model, buffers_only=True),
        HeldValues(model, loss_parts(job)),
        _KeptStorages(carried),
    )
    buffers.take()

    def restore() -> None:
        buffers.restore()
        held.restore()
        writes.restore()

    try:
        with writes:
            yield
    finally:
        try:
            with_room(restore, during="the model is restored after a check")
        except OutOfMemoryError as error:
            raise PartialUpdateError(
                f"{error} Build the model again, or resume from the last checkpoint."
            ) from error


class _KeptStorages(EagerDispatchMode):
    """Dispatch mode that copies an existing storage to the host before an op writes to it.

    `carried` receives each op.
    """

    def __init__(self, carried: CarriedState | None) -> None:
        super().__init__()
        self._carried = carried
        self._made: dict[int, weakref.ref[Any]] = {}
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(calls_ops_on_parts, types)):
            return NotImplemented  # the ops on the parts come here again
        if self._carried is not None and self._carried.use is not None:
            self._carried.use.note(func, args, kwargs)
        for tensor in written_tensors(func, args, kwargs) if has_writes(func) else ():
            self._keep(tensor.untyped_storage())
        out = func(*args, **kwargs)
        there = {*chain.from_iterable(map(storages_of, tensors_in((args, kwargs))))}
        for tensor in tensors_in(out):
            if there.isdisjoint(storages_of(tensor)) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                address = storage._cdata
                self._made[address] = weakref.ref(storage, partial(self._forget, address))
        return out

    def restore(self) -> None:
        """Write the copies back to their storages."""
        for storage, values in self._kept.values():
            storage.copy_(values)
        self._kept.clear()

    def _keep(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._made and address not in self._kept:
            self._kept[address] = storage, storage.clone() if storage.device.type == "cpu" else storage.cpu()

    def _forget(self, address: int, _end: object) -> None:
        self._made.pop(address, None)


@contextmanager
def without_gradients_if_it_can(
    model: nn.Module, compute: Callable[[], Result]
) -> Iterator[Callable[[], Result]]:
    """Yield a function that computes without gradients, or with them where the loss itself needs some."""

    def computed() -> Result:
        try:
            with torch.no_grad():
                return compute()
        except RuntimeError as error:
            if NEEDS_GRADIENTS not in str(error):
                raise
        with torch.enable_grad():
            return compute()

    with restoring_gradients(model):
        yield computed


@contextmanager
def restoring_gradients(model: nn.Module) -> Iterator[None]:
    """Remove the gradients of all parameters; on exit, restore them."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _gradient in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
