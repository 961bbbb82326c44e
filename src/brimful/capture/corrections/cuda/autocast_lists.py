"""Autocast on CUDA runs norms, softmax, sums and powers in float32; the CPU's lists leave them in bfloat16."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule

_FLOAT32_OPS = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "cosine_similarity", "nll_loss", "nll_loss2d",
    "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "kl_div", "logsumexp",
    "binary_cross_entropy_with_logits", "norm.Scalar", "norm.ScalarOpt_dim",
)  # fmt: skip
"""Ops whose inputs are cast. Source: torch aten/src/ATen/autocast_mode.h, the fp32 list (checked: 2.13)."""

_FLOAT32_RESULTS = (
    "softmax.int", "log_softmax.int", "cumsum", "cumprod", "prod", "prod.dim_int", "sum", "sum.dim_IntList",
    "linalg_vector_norm",
)  # fmt: skip
"""Ops that are given dtype=float32 and read their inputs as they are. Source: autocast_mode.h,
fp32_set_opt_dtype (checked: 2.13)."""


_HALF_TO_FLOAT = {
    torch.ops.aten.softmax.int: torch.ops.aten._softmax.default,
    torch.ops.aten.log_softmax.int: torch.ops.aten._log_softmax.default,
}
"""Ops whose kernels give float32 for float16 without a copy; bfloat16 is converted first. Source: torch
aten/src/ATen/native/SoftMax.cpp."""

_NOT_LISTED = ("cross_entropy_loss",)
"""Ops on the CPU's float32 list but on none of CUDA's: their parts are, so their inputs are not cast."""

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class AutocastLists(Rule):
    """Let the CPU's autocast follow CUDA's float32 list while the capture runs."""

    name = "autocast_lists"
    source = "torch aten/src/ATen/autocast_mode.h (checked: 2.13)"

    @contextmanager
    def context(self) -> Iterator[None]:
        """Give the kernels to this rule for what this thread runs while the context is open."""
        _register_kernels()
        _here.rule = self
        try:
            yield
        finally:
            _here.rule = None

    def in_float32(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op of `_FLOAT32_OPS`."""
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            return op(*map(self._to_float32, args), **kwargs)

    def to_give_float32(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op of `_FLOAT32_RESULTS`."""
        is_half = isinstance(args[0], Tensor) and args[0].dtype in (torch.float16, torch.bfloat16)
        is_asked = _asked_dtype(op, args, kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            if is_half and not is_asked and args[0].dtype is torch.float16 and op in _HALF_TO_FLOAT:
                return _HALF_TO_FLOAT[op](args[0], args[1], True)
            if is_half and not is_asked:
                kwargs["dtype"] = torch.float32
            return op(*args, **kwargs)

    def _to_float32(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            self.count(value.numel() * 4)
        return _float32(value)


_here = threading.local()
_library = torch.library.Library("aten", "IMPL")


@cache
def _register_kernels() -> None:
    """Register the kernels once for the process.

    An op that another thread calls while its kernel changes may fail.
    """
    with warnings.catch_warnings():
        # Some of them are on the CPU's own list and are registered over, which is meant.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for names, run in (
            (_FLOAT32_OPS, AutocastLists.in_float32),
            (_FLOAT32_RESULTS, AutocastLists.to_give_float32),
            (_NOT_LISTED, None),
        ):
            for name in names:
                packet, _, overload = name.partition(".")
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                kernel = partial(_run, op, run, _is_listed(op))
                _library.impl(name, kernel, "AutocastCPU", with_keyset=True, allow_override=True)


def _is_listed(op: Any) -> bool:
    """Whether the CPU's own autocast runs an op in float32; of the ops here it runs none in bfloat16."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCPU")


def _run(op: Any, of_cuda: Any, is_listed: bool, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op as CUDA's lists say in a capture, and elsewhere as the CPU's do."""
    rule = getattr(_here, "rule", None)
    if rule is not None and of_cuda is not None:
        return of_cuda(rule, op, args, kwargs)
    if rule is None and is_listed:
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            return op(*map(_float32, args), **kwargs)
    # The Python dispatcher, which the compiler enables, would find this kernel once more.
    rest = keys.remove(torch._C.DispatchKey.AutocastCPU).remove(torch._C.DispatchKey.PythonDispatcher)
    return op.redispatch(rest, *args, **kwargs)


def _float32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


def _asked_dtype(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the caller passes the dtype of the result, by keyword or by position."""
    position = [argument.name for argument in op._schema.arguments].index("dtype")
    return kwargs.get("dtype") is not None or (len(args) > position and args[position] is not None)
