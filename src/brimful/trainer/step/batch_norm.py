"""Corrects BatchNorm's momentum under gradient accumulation.

Private torch API used here: `_NormBase`, the class of all layers with running statistics (checked: 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def corrected_momentum(model: nn.Module, updates_per_step: int) -> Iterator[None]:
    """Lower the momentum within the context, so that k updates of running statistics decay them as much as one.

    k is `updates_per_step`, the micro-batches per optimizer step. With momentum m, k updates leave (1 - m)**k
    of the statistics; with 1 - (1 - m)**(1 / k) they leave 1 - m. The statistics are still those of
    micro-batches. Layers that keep a cumulative average do not change.
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
