"""Ops whose internal memory is not known, only bounded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule

aten = torch.ops.aten

_KNOWN_NAMESPACES = frozenset(
    {"aten", "prims", "prim", "profiler", "brimful", "c10d", "_c10d_functional", "fsdp"}
    | {"triton_kernels", "inductor_kernels", "inductor"}
)
_OF_BITSANDBYTES = frozenset({"bitsandbytes", "bitsandbytes_stand_in"})
"""Namespaces of bitsandbytes' ops, and of those that predict them where it is not installed."""
_KNOWN_ON_CUDA = frozenset({"optimizer_update_8bit_blockwise", "optimizer_update_32bit"})
"""Kernels that work in place and are handed nothing else to write to (bitsandbytes 0.50, backends/cuda)."""
_ALLOCATES_ITS_RESULT = frozenset(
    {
        "dequantize_4bit",
        "dequantize_blockwise",
        "gemm_4bit",
        "int8_linear_matmul",
        "int8_mm_dequant",
        "int8_vectorwise_quant",
    }
)
"""Kernels that allocate what they return and nothing else; `QuantisedWeights` runs the parts of the others."""
_NOT_MODELLED = frozenset(
    {
        aten._ctc_loss.default,
        aten._ctc_loss.Tensor,
        aten._ctc_loss_backward.default,
        aten._ctc_loss_backward.Tensor,
        aten._embedding_bag.default,
        aten._embedding_bag_dense_backward.default,
        aten._fft_r2c.default,
        aten._fft_c2c.default,
        aten._fft_c2r.default,
        aten._linalg_eigh.default,
        aten._linalg_svd.default,
        aten.linalg_qr.default,
        aten.linalg_cholesky_ex.default,
        aten.linalg_lu_factor_ex.default,
        aten.linalg_inv_ex.default,
        aten.linalg_solve_triangular.default,
        aten.grid_sampler_2d_backward.default,
        aten.kthvalue.default,
        aten.median.default,
        aten.median.dim,
    }
)
"""Aten ops that on CUDA ask a library, or allocate by rules not written down here: cuFFT, cuSOLVER, sorting."""


_MATMULS = frozenset(
    getattr(packet, overload)
    for packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
    for overload in ("default", "out")
)
_CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})
_DIMS_OF_IMAGES = 4
_NOT_MODELLED_ON_CPU = _MATMULS | _CONVOLUTIONS | {aten.linalg_matrix_exp.default}
_MATRIX_POWERS = (6, 12)
"""Memory inside a matrix exponential, in sizes of its argument: for small norms, and for any. Source: torch
aten/src/ATen/native/LinearAlgebra.cpp, compute_T2 to compute_T18_scale_square; torch 2.13's profiler."""


class UnknownOps(Rule):
    """Widen the interval by what an unknown op reads and writes, and name it.

    Unknown are ops of `torch.library`, Triton's and those of other packages, and a few of aten. Those of aten
    are on a CPU matrix products in bfloat16 and convolutions of volumes, for which oneDNN chooses layouts of
    its own, and matrix exponentials, whose powers depend on the norm.
    """

    name = "unknown_ops"
    source = "no source: as much again as the op's inputs and outputs is a guess"
    device_kinds = ("cuda", "cpu")

    def watches_op(self, func: Any) -> bool:
        """Whether the memory inside an op is not known."""
        if func.namespace in _KNOWN_NAMESPACES:
            return func in (_NOT_MODELLED_ON_CPU if self.target.kind == "cpu" else _NOT_MODELLED)
        if func.namespace not in _OF_BITSANDBYTES:
            return True
        known = _ALLOCATES_ITS_RESULT | (_KNOWN_ON_CUDA if self.target.kind == "cuda" else frozenset())
        return func._opname not in known

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add a block of no likely size."""
        inputs = [value for value in args if isinstance(value, Tensor)]
        if func in _MATMULS and outputs[0].dtype is not torch.bfloat16:
            return
        if func in _CONVOLUTIONS and inputs[0].dim() <= _DIMS_OF_IMAGES:
            return
        most = sum(tensor.nbytes for tensor in (*inputs, *outputs))
        likely = 0
        if func is aten.linalg_matrix_exp.default:
            likely, most = (factor * inputs[0].nbytes for factor in _MATRIX_POWERS)
        self.add(likely, f"inside {func}", most_bytes=most)
        what = "neither what it takes inside nor its arithmetic is known"
        if func in _NOT_MODELLED_ON_CPU and self.target.kind == "cpu":
            what = "what the CPU's library takes inside is not known"
        self.recorder.facts.note(f"{func}: {what}")
