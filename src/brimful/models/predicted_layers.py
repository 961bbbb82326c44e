"""Quantised linear layers for predictions without bitsandbytes: the same tensors, without values.

They run the ops that bitsandbytes' layers and peft's adapters of them run on fake tensors, and no others.

Source: bitsandbytes/nn/modules.py, Linear4bit, Linear8bitLt; autograd/_functions.py, MatMul4Bit, MatMul8bitLt,
MatMul8bitFp; functional.py, QuantState, create_dynamic_map (0.50.2); peft/tuners/lora/bnb.py (0.21).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from brimful.errors import UsageError

_BLOCK = 64
"""Numbers that share a scale, `Params4bit.blocksize`."""
_NESTED_BLOCK = 256
"""Scales that share one of their own, in `quantize_4bit`."""
_CODES, _NESTED_CODES = 16, 256
"""Entries of the tables of values, of weights and of quantised scales."""


def multiplies_integers() -> bool:
    """Whether 8-bit layers multiply integers, as on CUDA; a capture replaces this for its target."""
    return False


_library = torch.library.Library("bitsandbytes_stand_in", "FRAGMENT")
_library.define("dequantize_4bit(Tensor packed, Tensor absmax, SymInt[] shape, ScalarType dtype) -> Tensor")
_library.define("dequantize_blockwise(Tensor absmax, Tensor scales, Tensor code) -> Tensor")
_library.define("int8_vectorwise_quant(Tensor rows) -> (Tensor, Tensor)")
_library.define("int8_linear_matmul(Tensor rows, Tensor weight) -> Tensor")
_library.define(
    "int8_mm_dequant(Tensor product, Tensor row_stats, Tensor column_stats, Tensor? bias) -> Tensor"
)
_ops: Any = torch.ops.bitsandbytes_stand_in


def _fake(function: Any) -> Any:
    """Register the shape of an op's result; there is no kernel with values."""
    torch.library.register_fake(f"bitsandbytes_stand_in::{function.__name__}", function, lib=_library)
    return function


@_fake
def dequantize_4bit(packed: Tensor, absmax: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    """Weights of `shape` (N, K)."""
    return packed.new_empty(shape, dtype=dtype)


@_fake
def dequantize_blockwise(absmax: Tensor, scales: Tensor, code: Tensor) -> Tensor:  # noqa: ARG001
    """Scales in float32."""
    return torch.empty_like(absmax, dtype=torch.float32)


@_fake
def int8_vectorwise_quant(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(R, K) integers, and the scale of each row."""
    return torch.empty_like(rows, dtype=torch.int8), rows.new_empty(rows.shape[0], dtype=torch.float32)


@_fake
def int8_linear_matmul(rows: Tensor, weight: Tensor) -> Tensor:
    """(R, K) by (N, K), in 32 bits."""
    return rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.int32)


@_fake
def int8_mm_dequant(
    product: Tensor,
    row_stats: Tensor,  # noqa: ARG001
    column_stats: Tensor,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
) -> Tensor:
    """(R, N) in float16."""
    return torch.empty_like(product, dtype=torch.float16)


def _check_is_predicted(weight: Tensor) -> None:
    if not isinstance(weight, FakeTensor):
        raise UsageError(
            "these layers have no weights: they predict those of bitsandbytes, which is not installed here. To "
            "train, pip install bitsandbytes and build the model again."
        )


class _Packed(nn.Parameter):
    """Two weights to a byte; `quant_state` has their shape, by which parameters are counted."""

    quant_state: Any


class _Product4Bit(torch.autograd.Function):
    """Inputs (…, K) by packed weights of (N, K), which backward dequantises again."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: PredictedLinear4bit, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return F.linear(inputs, layer.dequantised(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.matmul(gradient, ctx.layer.dequantised(ctx.layer.dtype).to(gradient.dtype)), None, None


class PredictedLinear4bit(nn.Linear):
    """Stands in for bitsandbytes' `Linear4bit` beneath an adapter.

    `weight` is (N, K), in the type to compute in; `bias` is (N,) or None; `is_nested` is whether the scales are
    quantised too.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_nested: bool) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.dtype = weight.dtype
        packed = weight.new_empty((weight.numel() + 1) // 2, 1, dtype=torch.uint8)
        self.weight: Any = _Packed(packed, requires_grad=False)
        self.weight.quant_state = SimpleNamespace(shape=weight.shape)
        self.bias: Any = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        blocks = -(-weight.numel() // _BLOCK)
        kept = {
            "absmax": ([blocks], torch.uint8 if is_nested else torch.float32),
            "code": ([_CODES], torch.float32),
        }
        if is_nested:
            kept["offset"] = ([], torch.float32)
            kept["scales"] = ([-(-blocks // _NESTED_BLOCK)], torch.float32)
            kept["scale_code"] = ([_NESTED_CODES], torch.float32)
        for name, (shape, dtype) in kept.items():
            self.register_buffer(name, weight.new_empty(shape, dtype=dtype))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights, (N, K)."""
        absmax: Any = self.absmax
        if hasattr(self, "offset"):
            absmax = _ops.dequantize_blockwise(absmax, self.scales, self.scale_code)
            absmax = absmax + self.offset
        weight: Tensor = _ops.dequantize_4bit(self.weight, absmax, self.weight.quant_state.shape, dtype)
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """Inputs (…, K) to (…, N)."""
        _check_is_predicted(self.weight)
        inputs = input.to(self.dtype)
        bias = None if self.bias is None else self.bias.to(self.dtype)
        product: Tensor = _Product4Bit.apply(inputs, self, bias)
        return product.to(input.dtype)


class _Product8Bit(torch.autograd.Function):
    """Inputs (…, K) by integers (N, K): multiplied as integers on CUDA, dequantised on a CPU."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: PredictedLinear8bit, bias: Tensor | None) -> Tensor:
        ctx.layer, ctx.shape, ctx.dtype = layer, inputs.shape, inputs.dtype
        if not multiplies_integers():
            ctx.inputs = inputs
            return F.linear(inputs, layer.dequantised(inputs.dtype), bias)
        rows = ctx.inputs = inputs.reshape(-1, inputs.shape[-1])
        quantised, row_stats = _ops.int8_vectorwise_quant(rows.to(torch.float16))
        product = _ops.int8_linear_matmul(quantised, layer.weight)
        fused = bias if bias is not None and bias.dtype is torch.float16 else None
        result: Tensor = _ops.int8_mm_dequant(product, row_stats, layer.scales, fused)
        if bias is not None and fused is None:
            result.add_(bias)
        return result.to(inputs.dtype).reshape(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        weight = ctx.layer.dequantised(ctx.dtype)
        return torch.matmul(gradient.to(ctx.dtype), weight).view(ctx.shape), None, None


class PredictedLinear8bit(nn.Linear):
    """Stands in for bitsandbytes' `Linear8bitLt` without a threshold.

    `weight` is (N, K); `bias` is (N,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(torch.empty_like(weight, dtype=torch.int8), requires_grad=False)
        self.bias: Any = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_buffer("scales", weight.new_empty(weight.shape[0], dtype=torch.float32))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights, (N, K)."""
        scales: Any = self.scales
        return self.weight.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1 / 127))

    def forward(self, input: Tensor) -> Tensor:
        """Inputs (…, K) to (…, N), whose type the bias takes."""
        _check_is_predicted(self.weight)
        if self.bias is not None:
            self.bias.data = self.bias.data.to(input.dtype)
        product: Tensor = _Product8Bit.apply(input, self, self.bias)
        return product


PREDICTED = (PredictedLinear4bit, PredictedLinear8bit)
