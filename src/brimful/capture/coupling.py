"""Layers because of which a split batch trains otherwise: BatchNorm, and those that keep a state.

A state is what a forward changes: spectral norm's vectors, a codebook's averages, a teacher's centre. With k
micro-batches it changes k times a step. A whole number alone is taken for a counter of forwards, which couples
nothing.

Private torch APIs used here: `Module._buffers`, `_BatchNorm`, `_NormBase`, `Tensor._version`
(checked: torch 2.13).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from brimful.capture.fakes.outside import OutsideTensors, is_state
from brimful.module_names import plain_namer


class Coupling:
    """Finds what couples the samples of a batch while a step runs.

    Args:
        model: In training mode.
        outside: What the loss reads beside it.
    """

    def __init__(self, model: nn.Module, outside: OutsideTensors) -> None:
        self._model, self._outside = model, outside
        self._plain_name = plain_namer(model)
        self._before: dict[tuple[str, str], tuple[weakref.ref[Tensor], int]] = {}
        self._changed: dict[str, None] = {}

    def begin_forward(self) -> None:
        """Note how the buffers are."""
        self._before = {place: (weakref.ref(buffer), buffer._version) for place, buffer in self._buffers()}
        self._outside.begin_forward()

    def end_forward(self) -> None:
        """Find the buffers that are not as they were noted."""
        self._outside.end_forward()
        for place, buffer in self._buffers():
            before, version = self._before.get(place, (None, 0))
            is_same = before is not None and before() is buffer and version == buffer._version
            if not is_same and is_state(buffer):
                self._changed.setdefault(place[0])

    def batch_norms(self) -> tuple[str, ...]:
        """BatchNorm layers that normalise with the statistics of the batch itself."""
        inside = (
            path
            for path, module in self._model.named_modules()
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        )
        return (*map(self._plain_name, inside), *self._outside.batch_norms)

    def stateful(self) -> tuple[str, ...]:
        """Others that change their buffers in forward, and what the loss changes outside of the model."""
        inside = (*self._changed, *self._running_statistics())
        return (*map(self._plain_name, inside), *self._outside.changed)

    def _running_statistics(self) -> Iterator[str]:
        """Per-sample norms that keep running statistics, whose tensor version does not change when they do."""
        for path, module in self._model.named_modules():
            is_other_norm = isinstance(module, _NormBase) and not isinstance(module, _BatchNorm)
            if is_other_norm and module.training and module.running_mean is not None:
                yield path

    def _buffers(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        for path, module in self._model.named_modules():
            if not isinstance(module, _NormBase):
                yield from (((path, name), each) for name, each in module._buffers.items() if each is not None)
