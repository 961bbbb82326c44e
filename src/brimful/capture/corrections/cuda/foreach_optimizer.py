"""Optimizers work on all parameters at once on CUDA, with temporaries the size of all parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils

from brimful.capture.corrections.rule import Rule
from brimful.torch_utils.replaced import replaced

_NAME = "_get_foreach_kernels_supported_devices"


class ForeachOptimizer(Rule):
    """Let each optimizer choose as if the CPU were CUDA, unless it is on the host; a choice by hand stays.

    The rule itself stays torch's: `_default_to_fused_or_foreach` asks this list of devices. Adafactor and Muon
    do not ask, on CUDA either.
    """

    name = "foreach_optimizer"
    source = "torch/optim/optimizer.py, _default_to_fused_or_foreach (checked: 2.13)"

    @contextmanager
    def context(self) -> Iterator[None]:
        """Let torch's list of devices name the CPU too while the context is open."""
        own = _foreach_utils._get_foreach_kernels_supported_devices()
        devices = [*own, "cpu"]
        modules = [module for module in (optimizer_module, _foreach_utils) if hasattr(module, _NAME)]
        with ExitStack() as stack:
            for module in modules:
                chosen = lambda: own if self.recorder.position.is_on_host else devices  # noqa: E731
                stack.enter_context(replaced(module, _NAME, chosen))
            yield

    def watches_op(self, func: Any) -> bool:
        """Whether an op is what optimizers begin with for each list."""
        return func is torch.ops.aten._foreach_sqrt.default

    def before_op(self, func: Any, args: tuple[Any, ...], *, in_backward: bool) -> None:
        """Count the temporaries that whole lists make."""
        (tensors,) = args
        assert isinstance(tensors, (list, tuple))
        self.count(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
