"""Backward works in place where it can, but not while a dispatch mode is active, as it is during a capture.

Private torch APIs used here: `Tensor._use_count`, `torch._C._storage_Use_Count`,
`torch._C._current_autograd_node`, `torch.autograd.graph._engine_run_backward` (checked: torch 2.13).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from brimful.capture.corrections.rule import Rule
from brimful.devices import Device
from brimful.settings import Settings

aten = torch.ops.aten

_IN_PLACE_ON_A_DEVICE = frozenset(
    {
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.index_add.default,
        aten.index_put.default,
        aten.masked_scatter.default,
    }
)

_USES = 4
_STORAGE_USES = 2
"""What holds a tensor that only the engine's buffer holds, when an op is asked to add to it: the buffer, the
call, the dispatcher and Python; and its storage: the tensor and Python. So it is with torch 2.13."""
_FORMULAS_WITHOUT_SUMS = frozenset({"MulBackward0"})
"""Nodes of which a sum of two fresh results is the engine's, as where both factors are one tensor."""


class InPlaceBackward(Rule):
    """Hand the input's block over to the result, where autograd would have written in place.

    Backward of `x[i]`, gather, index_select, max, topk, sort and prod fills a new tensor. It does so in place
    unless `isTensorSubclassLike`, which is true of every tensor while a dispatch mode is on.

    Where a tensor was used several times, the engine adds its gradients up as they come. It adds to the sum so
    far if nothing else holds that, and if the new one is not `isTensorSubclassLike` either.
    """

    name = "in_place_backward"
    source = (
        "torch aten/src/ATen/TensorSubclassLikeUtils.h, isTensorSubclassLike; "
        "torch/csrc/autograd/input_buffer.cpp, accumulate (checked: 2.13)"
    )

    def __init__(self, target: Device, settings: Settings) -> None:
        super().__init__(target, settings)
        self._node: tuple[str, int] | None = None
        """Name and number of the node that runs backward."""
        self._made: set[int] = set()
        """Addresses of the storages that the node has made."""

    device_kinds = ("cuda", "cpu")

    def before_op(self, func: Any, args: tuple[Any, ...], *, in_backward: bool) -> None:
        """Free the input's block before the op allocates its result."""
        if not in_backward:
            return
        self._follow_nodes()
        if func in _IN_PLACE_ON_A_DEVICE or (
            func is aten.add.Tensor
            and sys._getframe(2).f_code is _engine_run_backward.__code__  # whose code called the recorder
            and self._engine_adds_in_place(args[0])
        ):
            self.count(-self.recorder.ledger.free_tensor(args[0]))

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Note what a node makes: the sum of two such things is its formula's, not the engine's."""
        if self._node is not None:
            self._made.update(output.untyped_storage()._cdata for output in outputs)

    def _follow_nodes(self) -> None:
        node = torch._C._current_autograd_node()
        known_as = None if node is None else (node.name(), node._sequence_nr())
        if known_as != self._node:
            self._node = known_as
            self._made.clear()

    def _engine_adds_in_place(self, total: Tensor) -> bool:
        """Whether a sum so far may be added to: the engine's buffer alone holds it, and all of its storage."""
        storage = total.untyped_storage()
        return (
            self._node is not None
            and (storage._cdata not in self._made or self._node[0] in _FORMULAS_WITHOUT_SUMS)
            and not torch.is_grad_enabled()
            and storage.nbytes() == total.nbytes
            and hasattr(total, "_use_count")
            and total._use_count() == _USES
            and torch._C._storage_Use_Count(storage._cdata) == _STORAGE_USES
        )
