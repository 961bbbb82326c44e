"""Gradients of norms are added up in parts on CUDA where there are many rows."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule
from brimful.trace import Kernel

# M rows, N their width; of images, B samples, C channels, G groups

aten = torch.ops.aten

_NORMS = frozenset(
    {
        aten.native_layer_norm_backward.default,
        aten._fused_rms_norm_backward.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
    }
)
_FLOAT_BYTES = 4
_MOST_BATCH_NORM_PARTS = 128
"""Blocks along the rows of a channels-last batch norm. Source: Normalization.cuh, flexible_launch_configs."""


class NormParts(Rule):
    """Count the partial sums of layer, RMS, group and batch norm.

    Layer norm: for M > 65536 rows that are narrow for the GPU, parts of the gradients of weight and bias, about
    a million numbers each, and what it takes to add one of them up. RMS norm: those of its weight. Group norm:
    sums of each sample and channel, (B, C), three in backward with two of each group, two in forward. Batch
    norm of channels-last images: statistics of at most 128 parts, four numbers a channel in forward and two in
    backward; in the NCHW layout none.
    """

    name = "norm_parts"
    source = (
        "torch aten/src/ATen/native/cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel; "
        "group_norm_kernel.cu; Normalization.cuh (header of 2.13); as measured on an H100 (torch 2.11, "
        "benchmarks/results/gpu_record.json), where cuDNN's batch norm takes more"
    )

    def watches_op(self, func: Any) -> bool:
        """Whether an op is of a norm that may take partial sums."""
        return func in _NORMS

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add the temporaries of the op."""
        if func is aten.native_layer_norm_backward.default:
            self._by_rows(func, *args[1:3], weight=args[5], gradients=2)
        elif func is aten._fused_rms_norm_backward.default:
            self._by_rows(func, *args[1:3], weight=args[4], gradients=1)
        elif func in (aten.native_group_norm.default, aten.native_group_norm_backward.default):
            is_backward = func is aten.native_group_norm_backward.default
            place = 5 if is_backward else 3
            samples, channels, _size, groups = args[place : place + 4]
            size_bytes = samples * (3 * channels + 2 * groups if is_backward else 2 * channels) * _FLOAT_BYTES
            self.add(size_bytes, f"inside {func}")
        elif func in (aten.native_batch_norm.default, aten.native_batch_norm_backward.default):
            is_backward = func is aten.native_batch_norm_backward.default
            x = args[1 if is_backward else 0]
            if x.dim() == 4 and not x.is_contiguous():
                most = (2 if is_backward else 4) * x.size(1) * _MOST_BATCH_NORM_PARTS * _FLOAT_BYTES
                self.add(0, f"inside {func}", most_bytes=most)

    def _by_rows(
        self, func: Any, x: Tensor, shape: list[int], *, weight: Tensor | None, gradients: int
    ) -> None:
        multiprocessors, threads = self.target.sm_count, self.target.threads_per_multiprocessor
        if weight is None or multiprocessors is None or threads is None:
            return
        width = max(prod(shape), 1)
        numbers = (multiprocessors, threads, x.numel() // width, width, weight.element_size())
        for name in ["layer norm backward"] * gradients + ["layer norm backward sums"]:
            kernel = Kernel(name=name, numbers=numbers)
            self.add(kernel.size_bytes(), f"inside {func}", kernel=kernel)
