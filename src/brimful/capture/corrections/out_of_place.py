"""Some backward formulas work in place, but not while a dispatch mode is active, as it is during a capture."""

from __future__ import annotations

from typing import Any

import torch

from brimful.capture.corrections.base import Rule

aten = torch.ops.aten

_IN_PLACE_ON_A_DEVICE = frozenset(
    {
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.index_add.default,
        aten.masked_scatter.default,
    }
)


class InPlaceBackward(Rule):
    """Hand the input's block over to the result, where autograd would have written in place.

    Backward of gather, index_select, max, topk, sort and prod fills a new tensor. It does so in place unless
    `isTensorSubclassLike`, which is true of every tensor while a dispatch mode is on.
    """

    name = "in_place_backward"
    source = "torch aten/src/ATen/TensorSubclassLikeUtils.h, isTensorSubclassLike (checked: 2.13)"
    watches_ops = True

    def applies(self) -> bool:
        """On every device: it is the capture, not the device, that differs."""
        return True

    def before_op(self, recorder: Any, func: Any, args: tuple[Any, ...], *, in_backward: bool) -> None:
        """Free the input's block before the op allocates its result."""
        if in_backward and func in _IN_PLACE_ON_A_DEVICE:
            self.count(-recorder.release_early(args[0]))
