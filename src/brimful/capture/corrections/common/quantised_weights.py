"""Layers with quantised weights run the ops that their kernels on the target consist of.

bitsandbytes has one op for a product with 4-bit weights, and one for 8-bit weights. Most of their kernels are
several ops: the weights are dequantised, then multiplied. Run one by one, their temporaries, arithmetic and
traffic are seen as those of all other ops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.capture.corrections.rule import Rule
from brimful.models import predicted_layers
from brimful.torch_utils.replaced import replaced

_LARGEST_FUSED_ROWS = 1536
_ALWAYS_FUSED_ROWS = 4
"""Rows of inputs: for more, CUDA always dequantises the weights first; for so few it never does."""
_1_OF_127 = 7.874015718698502e-3


class QuantisedWeights(Rule):
    """Let bitsandbytes' ops run their parts, and choose the target's ops.

    Between 5 and 1536 rows of inputs, whether CUDA dequantises the weights depends on the GPU. It is assumed
    to, which needs more memory. In backward it always does. How many outlier columns an 8-bit product with a
    threshold has is not known; none are assumed.
    """

    name = "quantised_weights"
    source = (
        "bitsandbytes/backends/default/ops.py, _gemm_4bit_default_impl, int8_scaled_mm, int8_mixed_scaled_mm; "
        "backends/cuda/ops.py, gemm_4bit, int8_mm_dequant, int8_vectorwise_quant; "
        "autograd/_functions.py, matmul (checked: 0.50.2)"
    )
    device_kinds = ("cuda", "cpu")

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """Replacements of the ops that consist of others, where bitsandbytes is imported."""
        if sys.modules.get("bitsandbytes") is None:
            return {}
        ops = torch.ops.bitsandbytes
        stand_ins: dict[Callable[..., Any], Callable[..., Any]] = {
            ops.gemm_4bit.default: self._gemm_4bit,
            ops.int8_vectorwise_dequant.default: self._int8_vectorwise_dequant,
        }
        if self.target.kind == "cuda":
            stand_ins |= {
                ops.int8_scaled_mm.default: self._int8_scaled_mm,
                ops.int8_mixed_scaled_mm: self._int8_mixed_scaled_mm,
                ops.int8_vectorwise_quant.default: self._int8_vectorwise_quant,
            }
        return stand_ins

    @contextmanager
    def context(self) -> Iterator[None]:
        """Let 8-bit layers multiply integers, as on CUDA, while the context is open.

        On a CPU, where the fakes are, training dequantises.
        """
        library: Any = sys.modules.get("bitsandbytes")
        if self.target.kind != "cuda":
            yield
            return
        if library is None:
            with replaced(predicted_layers, "multiplies_integers", lambda: True):
                yield
            return
        functions = library.autograd._functions

        def matmul(
            inputs: Tensor,
            weight: Tensor,
            out: Tensor | None = None,
            state: Any = None,
            threshold: float = 0.0,
            bias: Tensor | None = None,
        ) -> Any:
            state = state or functions.MatmulLtState()
            if threshold > 0.0:
                state.threshold = threshold
            return functions.MatMul8bitLt.apply(inputs, weight, out, bias, state)

        with replaced(library, "matmul", matmul):
            yield

    def watches_op(self, func: Any) -> bool:
        """Whether an op stands for one of bitsandbytes, where that is not installed."""
        return func.namespace == "bitsandbytes_stand_in"

    def after_op(
        self,
        func: Any,
        _args: tuple[Any, ...],
        _kwargs: dict[str, Any],
        _outputs: list[Tensor],
    ) -> None:
        """Note the release whose kernels are predicted."""
        if func._opname.startswith("optimizer_"):
            self.recorder.facts.note("bitsandbytes is not installed: its optimizer is that of release 0.50")
            return
        self.count(0)
        self.recorder.facts.note(
            "bitsandbytes is not installed: its layers are those of release 0.50, and dequantise 4-bit "
            "weights; a fused kernel needs less memory"
        )

    def _gemm_4bit(
        self,
        inputs: Tensor,
        packed: Tensor,
        shape: Any,
        absmax: Tensor,
        blocksize: int,
        quant_type: str,
        bias: Tensor | None = None,
        absmax_8bit: Tensor | None = None,
        absmax_code: Tensor | None = None,
        absmax_offset: Tensor | None = None,
    ) -> Tensor:
        """Inputs (…, K) times packed weights of `shape` (N, K)."""
        ops = torch.ops.bitsandbytes
        columns = inputs.shape[-1]
        rows = inputs.numel() // columns
        is_cuda = self.target.kind == "cuda"
        if is_cuda and rows <= _ALWAYS_FUSED_ROWS and columns % blocksize == 0:
            scales = (absmax_8bit, absmax_code, absmax_offset)
            return ops.gemm_4bit.default(inputs, packed, shape, absmax, blocksize, quant_type, bias, *scales)
        if is_cuda and rows <= _LARGEST_FUSED_ROWS:
            self.recorder.facts.note(
                "bitsandbytes.gemm_4bit: assumed to dequantise its weights; a fused kernel needs less memory"
            )
        if absmax_8bit is not None:
            assert absmax_offset is not None
            absmax = ops.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, 256, torch.float32)
            absmax = absmax + absmax_offset
        weight = ops.dequantize_4bit.default(packed, absmax, blocksize, quant_type, shape, inputs.dtype)
        self.count(weight.nbytes)
        return F.linear(inputs, weight, bias)

    def _int8_vectorwise_dequant(self, weight: Tensor, stats: Tensor) -> Tensor:
        """Rows of integers times their scales, in float32."""
        self.count(0)
        return weight * stats.view(-1, 1) * _1_OF_127

    def _int8_scaled_mm(
        self,
        inputs: Tensor,
        weight: Tensor,
        row_stats: Tensor,
        column_stats: Tensor,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The product, made of integers in 32 bits, then of float16, then of `dtype`."""
        ops = torch.ops.bitsandbytes
        product = ops.int8_linear_matmul.default(inputs, weight)
        fused = bias if bias is not None and bias.dtype is torch.float16 else None
        result: Tensor = ops.int8_mm_dequant.default(product, row_stats, column_stats, torch.float16, fused)
        if bias is not None and fused is None:
            result.add_(bias)
        self.count(product.nbytes)
        return result.to(dtype or torch.float16)

    def _int8_mixed_scaled_mm(
        self,
        inputs: Tensor,
        quantised: Tensor,
        weight: Tensor,
        row_stats: Tensor,
        column_stats: Tensor,
        _outlier_columns: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The product of quantised inputs and an integer weight, without outliers."""
        none = torch.empty(0, device=inputs.device, dtype=inputs.dtype)
        return self._int8_scaled_mm(quantised, weight, row_stats, column_stats, bias, inputs.dtype), none

    def _int8_vectorwise_quant(
        self, inputs: Tensor, threshold: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Each row becomes integers in 8 bits, with one scale."""
        quantise = torch.ops.bitsandbytes.int8_vectorwise_quant.default
        if threshold == 0.0:
            return quantise(inputs)
        self.recorder.facts.note("bitsandbytes: the number of outlier columns is not known; none are assumed")
        outliers = inputs.abs() >= threshold
        columns = torch.empty(0, device=inputs.device, dtype=torch.int64)
        result, row_stats, _none = quantise(inputs)
        result[:, columns] = 0
        del outliers
        return result, row_stats, columns
