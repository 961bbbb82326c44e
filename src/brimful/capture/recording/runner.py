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
        elif func is _LIFT and (number := self._number(args[0])) is not None:
            out = number
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

    def _number(self, real: Tensor) -> Tensor | None:
        """The fake of a number that `torch.tensor` made, as the mode in force makes it, but without its checks.

        An optimizer makes one for each parameter. None for other tensors.

        Source: FakeTensorMode._dispatch_impl, "constant propagate" (checked: 2.13).
        """
        mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if mode is None or type(real) is not Tensor or real.dim() or real.requires_grad or real.is_quantized:
            return None
        if real.layout is not torch.strided or real.device.type != "cpu":
            return None
        with torch._C._DisableTorchDispatch():
            constant = real.clone()
        fake = self._wrapper.empty(mode, (), (), real.dtype, real.device)
        fake.constant = constant
        mode.fake_tensor_converter.add_constant_storage_mapping(fake)
        return fake


_LIFT = torch.ops.aten.lift_fresh.default
"""What `torch.tensor` ends in."""


def _can_be_viewed(tensor: Any) -> bool:
    return type(tensor) is FakeTensor and tensor.constant is None and tensor.layout is torch.strided


def _has_no_value(tensors: Any) -> bool:
    """Whether all of a list are fakes without a value; torch keeps it for scalars such as a step count."""
    return all(type(tensor) is FakeTensor and tensor.constant is None for tensor in tensors)
