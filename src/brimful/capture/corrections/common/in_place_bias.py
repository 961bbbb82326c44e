"""A linear layer adds its bias in place, but not while a dispatch mode is active, as it is during a capture."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from brimful.capture.corrections.rule import Rule
from brimful.devices import Device
from brimful.settings import Settings
from brimful.torch_utils.replaced import replaced
from brimful.torch_utils.wrapper_tensors import is_wrapper_tensor

aten = torch.ops.aten


class InPlaceBias(Rule):
    """Hand the product's block over to the sum, where a linear layer would have added its bias in place.

    For an input of three or more dimensions that is not contiguous, such as a transposed one, `linear` is a
    product and a sum. It adds in place unless `isTensorSubclassLike`, which is true of every tensor while a
    dispatch mode is on.
    """

    name = "in_place_bias"
    source = "torch aten/src/ATen/native/Linear.cpp, linear (checked: 2.13)"
    device_kinds = ("cuda", "cpu")

    def __init__(self, target: Device, settings: Settings) -> None:
        super().__init__(target, settings)
        self._is_in_linear = False

    def context(self) -> AbstractContextManager[object]:
        """Note the calls in torch's own modules; attention's functions hide theirs from function modes."""
        return replaced(torch.nn.functional, "linear", self._linear)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outer, self._is_in_linear = self._is_in_linear, not is_wrapper_tensor(weight)
        try:
            return linear(input, weight, bias)
        finally:
            self._is_in_linear = outer

    def watches_op(self, func: Any) -> bool:
        """Whether an op is a sum, as that of a bias is."""
        return func is aten.add.Tensor

    def before_op(self, func: Any, args: tuple[Any, ...], *, in_backward: bool) -> None:
        """Free the product's block before the op allocates its result."""
        if self._is_in_linear:
            self.count(-self.recorder.ledger.free_tensor(args[0]))
