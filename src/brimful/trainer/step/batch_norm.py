"""BatchNorm's momentum under accumulation: as far in a step as one update with the whole batch would go.

Private torch API used here: `_NormBase`, the class of all layers with running statistics (checked: 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def corrected_momentum(model: nn.Module, updates_per_step: int) -> Iterator[None]:
    """Within, `updates_per_step` updates of running statistics weigh what was before as one does outside.

    With momentum m, k updates leave (1 - m)**k of the statistics; with 1 - (1 - m)**(1 / k) they leave 1 - m.
    What the statistics are over, a micro-batch, stays as it is.

    Args:
        model: Its normalisation layers with a momentum are changed; those with a cumulative average are not.
        updates_per_step: Micro-batches to an optimizer step.
    """
    if updates_per_step == 1:
        yield
        return
    layers = [module for module in model.modules() if isinstance(module, _NormBase) and module.momentum]
    before = [layer.momentum for layer in layers]
    for layer, momentum in zip(layers, before, strict=True):
        assert momentum is not None
        layer.momentum = 1 - (1 - momentum) ** (1 / updates_per_step)
    try:
        yield
    finally:
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum
