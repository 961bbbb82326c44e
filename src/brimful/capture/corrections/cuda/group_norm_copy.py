"""Group norm copies channels-last images on CUDA and saves the copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.capture.corrections.rule import Rule

# B samples, C channels


class GroupNormCopy(Rule):
    """Make the input of group norm contiguous, (B, C, …), as CUDA does and a CPU does not.

    The copy is saved for backward, in addition to the input if another op saves that; the output is contiguous
    too, so what follows in a channels-last model may copy it once more.
    """

    name = "group_norm_copy"
    source = (
        "torch aten/src/ATen/native/group_norm.cpp, group_norm: `input.contiguous()` unless on CPU or XPU; as "
        "measured on an H100 (torch 2.11, benchmarks/results/gpu_record.json)"
    )

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """Replacements of the function of `nn.GroupNorm`, and of the one it calls."""
        return {
            function: partial(self._of_contiguous, function) for function in (F.group_norm, torch.group_norm)
        }

    def _of_contiguous(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = args[0] if args else kwargs.pop("input")
        if not x.is_contiguous():
            self.count(x.nbytes)
        return function(x.contiguous(), *args[1:], **kwargs)
