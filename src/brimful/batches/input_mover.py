"""How a micro-batch comes from the host to where the model is.

To another device it is copied. On a CPU the batch is there already, and the loss works on the batch itself. If
it writes to some of its tensors in place, those are copied from then on, so that a step can be repeated.

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
    """Brings micro-batches to a model, for `run_step`.

    Args:
        copy: Makes the copy on the device of a tensor, of which it is told where in the batch it is.
        is_there: Whether the batch is in the device's memory already.
    """

    def __init__(self, copy: Callable[[str, Tensor], Tensor], *, is_there: bool) -> None:
        self._copy = copy
        self._is_there = is_there
        self._lends = is_there
        self._lent: list[tuple[str, Tensor, int]] = []
        """Tensors that the loss works on: where they are in the batch, and their version before."""
        self.written: frozenset[str] = frozenset()
        """Tensors of a batch that the loss was seen to write to, by the expressions that reach them."""
        self.changed: frozenset[str] = frozenset()
        """Those of the latest step's batch that are not as they were."""

    @classmethod
    def to(cls, device: torch.device | str) -> InputMover:
        """A mover for real batches on the host.

        Args:
            device: Where the model is.

        Returns:
            One that copies unless the device is the CPU.
        """
        is_there = torch.device(device).type == "cpu"
        return cls(lambda _path, tensor: tensor.to(device, copy=True, non_blocking=True), is_there=is_there)

    @classmethod
    def copying_to(cls, device: torch.device | str) -> InputMover:
        """One that always copies, on a CPU too, so that the batch stays as it is.

        Args:
            device: Where the model is.

        Returns:
            The mover.
        """
        return cls(lambda _path, tensor: tensor.to(device, copy=True, non_blocking=True), is_there=False)

    def __call__(self, batch: Batch) -> Batch:
        """The micro-batch on the device.

        Args:
            batch: On the host. On a CPU what is returned shares its memory.

        Returns:
            The same nest.
        """
        self._find_writes()
        paths = iter([path for path, _tensor in named_tensors(batch)])
        return map_tensors(batch, lambda tensor: self._moved(next(paths), tensor))

    @contextmanager
    def one_step(self, *, repeats: bool = False) -> Iterator[None]:
        """Around the step of a global batch, which is not held on to afterwards.

        Args:
            repeats: Whether the step uses each micro-batch more than once, for which it must be as it was.

        Yields:
            Nothing.
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
        return tensor.detach()  # of its own: whether it requires a gradient is the loss's to say
