"""Moves micro-batches from the host to the model's device.

Batches are copied to other devices. On a CPU the loss works on the batch itself. Tensors that it changes
in-place are copied from then on, so that a step can be repeated.

Private torch API used here: `Tensor._version` (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from brimful.batches.tensors import map_tensors, named_tensors
from brimful.job import Batch


class InputMover:
    """Moves micro-batches to the model's device, for `run_step`.

    `copy` is called with a tensor's path in the batch and the tensor, and copies it to the device. `is_there`
    says whether the batch is in the device's memory already.
    """

    def __init__(self, copy: Callable[[str, Tensor], Tensor], *, is_there: bool) -> None:
        self._copy = copy
        self._is_there = is_there
        self._lends = is_there
        self._lent: list[tuple[str, Tensor, int]] = []
        """Tensors that the loss works on: path in the batch, tensor, and version before."""
        self.written: frozenset[str] = frozenset()
        """Paths of tensors of a batch that the loss has changed in-place."""
        self.changed: frozenset[str] = frozenset()
        """Paths of tensors that were changed in the latest step's batch."""

    @classmethod
    def to(cls, device: torch.device | str) -> InputMover:
        """A mover for real batches on the host, which copies unless the device is the CPU."""
        is_there = torch.device(device).type == "cpu"
        return cls(lambda _path, tensor: tensor.to(device, copy=True, non_blocking=True), is_there=is_there)

    @classmethod
    def copying_to(cls, device: torch.device | str) -> InputMover:
        """A mover that always copies, also on a CPU, so that the batch never changes."""
        return cls(lambda _path, tensor: tensor.to(device, copy=True, non_blocking=True), is_there=False)

    def __call__(self, batch: Batch) -> Batch:
        """The micro-batch on the device; on a CPU it may share the memory of `batch`."""
        self._find_writes()
        paths = iter([path for path, _tensor in named_tensors(batch)])
        return map_tensors(batch, lambda tensor: self._moved(next(paths), tensor))

    @contextmanager
    def one_step(self, *, repeats: bool = False) -> Iterator[None]:
        """Context of the step of a global batch; references to the batch are dropped at its end.

        `repeats` says whether the step uses each micro-batch more than once, so that it must not change.
        """
        self.changed = frozenset()
        self._lends = self._is_there and not repeats
        try:
            yield
        finally:
            self._find_writes()
            self._lent.clear()

    def _find_writes(self) -> None:
        self.changed |= {path for path, tensor, version in self._lent if tensor._version != version}
        self.written |= self.changed

    def _moved(self, path: str, tensor: Tensor) -> Tensor:
        if not self._lends or path in self.written or tensor.requires_grad or tensor.is_inference():
            return self._copy(path, tensor)
        self._lent.append((path, tensor, tensor._version))
        return tensor.detach()  # a separate tensor: the loss decides whether it requires a gradient
