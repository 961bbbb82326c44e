"""Dropout keeps a mask of one byte an element on CUDA; the CPU keeps one in the activation's type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.capture.corrections.rule import Rule
from brimful.torch_utils.replaced import replaced

_DROPOUT = F.dropout


class DropoutMask(Rule):
    """Run dropout as `native_dropout`, as CUDA does."""

    name = "dropout_mask"
    source = "torch aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable (checked: 2.13)"

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """Replacements of `F.dropout` and `torch.dropout`."""
        return {_DROPOUT: self._functional, torch.dropout: self._plain}

    def context(self) -> AbstractContextManager[object]:
        """Replace the name that `F.multi_head_attention_forward` calls, out of reach of function modes."""
        return replaced(F, "dropout", self._functional)

    def _functional(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if inplace or not training or not 0 < p < 1:
            return _DROPOUT(input, p, training, inplace)
        self.count(input.numel() * (1 - input.element_size()))
        return torch.native_dropout(input, p, True)[0]

    def _plain(self, input: Tensor, p: float, train: bool) -> Tensor:
        return self._functional(input, p, train)
