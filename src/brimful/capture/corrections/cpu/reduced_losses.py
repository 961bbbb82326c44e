"""Losses that are summed keep, on a CPU, the memory of what they summed."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule

aten = torch.ops.aten

_KEPT = frozenset({aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default,
                   aten.binary_cross_entropy.default})  # fmt: skip
"""Losses whose scalar is written into a result that was made for all elements, and keeps its storage."""
_TWICE = frozenset({aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default})
"""Losses that hold the elements apart as well until they are summed."""
_REDUCTION = {aten.binary_cross_entropy.default: 3}
"""Position of the argument that says whether to sum, 2 elsewhere; 0 leaves the elements."""


class ReducedLosses(Rule):
    """Give losses the storage of their elements, and count those that are freed."""

    name = "reduced_losses"
    source = "torch aten/src/ATen/native/Loss.cpp; the profiler and `untyped_storage` of torch 2.13"
    device_kinds = ("cpu",)

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Let the loss's storage grow; add what is freed."""
        if func not in _KEPT and func not in _TWICE:
            return
        position = _REDUCTION.get(func, 2)
        if len(args) > position and args[position] == 0:
            return
        numel = prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
        size_bytes = numel * outputs[0].element_size()
        if func in _KEPT:
            outputs[0].untyped_storage().resize_(size_bytes)
            self.count(size_bytes)
        if func in _TWICE:
            self.add(size_bytes, f"inside {func}")
