"""Temporary memory of some CPU kernels, allocated and freed inside them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule

aten = torch.ops.aten

_INDEX_BYTES = 8
_GRAIN_SIZE = 32768
"""Fewer elements are not divided among threads. Source: torch aten/src/ATen/Parallel.h."""
_SMALL_IMAGE = 128
"""Up to this height plus width an image is resized with its channels last. Source: torch
aten/src/ATen/native/cpu/UpSampleKernel.cpp, _use_vectorized_kernel_cond_2d."""
_ATTENTION_ROWS = ((768, 256), (192, 64), (0, 32))
"""Queries in a block of attention, each after the number of queries from which on it holds."""
_ATTENTION_COLUMNS = 512
"""Keys in a block of attention. Source of both: torch aten/src/ATen/native/cpu/FlashAttentionKernel.cpp,
flash_attention_kernel_impl and flash_attention_backward_kernel_impl."""


class KernelTemporaries(Rule):
    """Count temporaries of CPU kernels that are about as large as an argument."""

    name = "kernel_temporaries"
    source = "torch aten/src/ATen/native, each op's own file; seen by torch 2.13's profiler"
    device_kinds = ("cpu",)

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add the op's temporaries to its outputs."""
        if func in _TEMPORARIES:
            size_bytes = _TEMPORARIES[func](args, outputs)
            if size_bytes > 0:
                self.add(size_bytes, f"inside {func}")


def _batch_norm_backward(args: tuple[Any, ...], _outputs: list[Tensor]) -> int:
    """Bytes of the result, made a second time where all lies in one layout (Normalization.cpp)."""
    grad, x, mask = args[0], args[1], args[9]
    formats = (torch.contiguous_format, *((torch.channels_last,) if x.dim() == 4 else ()))
    is_plain = any(all(t.is_contiguous(memory_format=each) for t in (grad, x)) for each in formats)
    return x.nbytes if mask[0] and is_plain else 0


def _gelu_backward(args: tuple[Any, ...], _outputs: list[Tensor]) -> int:
    """Bytes of gradient and result in the input's layout, where that is contiguous and the gradient is not."""
    grad, x = args[:2]
    return 2 * x.nbytes if x.is_contiguous() and not grad.is_contiguous() else 0


def _resize(args: tuple[Any, ...], outputs: list[Tensor]) -> int:
    """Bytes of a small image's argument and result with channels last."""
    (result,) = outputs
    if args[0].is_contiguous(memory_format=torch.channels_last) or sum(result.shape[2:]) > _SMALL_IMAGE:
        return 0
    return args[0].nbytes + result.nbytes


def _masked_select(args: tuple[Any, ...], outputs: list[Tensor]) -> int:
    """Bytes of the mask as integers, and of their running sums unless one thread reads all in order."""
    x, mask = args
    numel = prod(torch.broadcast_shapes(x.shape, mask.shape))
    is_expanded = numel not in (x.numel(), mask.numel()) or x.shape != mask.shape
    is_serial = numel < _GRAIN_SIZE or torch.get_num_threads() == 1
    is_plain = x.is_contiguous() and mask.is_contiguous() and not is_expanded
    if is_serial and is_plain:  # the integers are summed before there is a result
        return _INDEX_BYTES * numel - outputs[0].nbytes
    return 2 * _INDEX_BYTES * numel


def _index(args: tuple[Any, ...], outputs: list[Tensor]) -> int:
    return _positions(args[1], outputs[0])


def _index_put(args: tuple[Any, ...], _outputs: list[Tensor]) -> int:
    return _positions(args[1], args[2])


def _positions(indices: Any, picked: Tensor) -> int:
    """Bytes of the positions where the masks among some indices are true, for each row that they pick."""
    masks = [index for index in indices if index is not None and index.dtype is torch.bool]
    rows = picked.shape[0] if picked.dim() else 0
    return rows * _INDEX_BYTES * sum(mask.dim() for mask in masks)


def _roll(args: tuple[Any, ...], _outputs: list[Tensor]) -> int:
    """Bytes of what was rolled along all dimensions but the last one."""
    return args[0].nbytes if len(args[1]) > 1 else 0


def _safe_softmax(args: tuple[Any, ...], _outputs: list[Tensor]) -> int:
    """Bytes of a contiguous copy of the argument; if it is contiguous, of a mask of its minus infinities."""
    return args[0].numel() if args[0].is_contiguous() else args[0].nbytes


def _binary_cross_entropy_with_logits(args: tuple[Any, ...], _outputs: list[Tensor]) -> int:
    """Bytes of the logarithm of the sigmoid and what it keeps; and of a copy, if it is not contiguous."""
    return (2 if args[0].is_contiguous() else 3) * args[0].nbytes


def _distances(args: tuple[Any, ...], _outputs: list[Tensor]) -> int:
    """Bytes of points (..., D) of both sides, with their norms and ones beside them, (..., D + 2)."""
    return sum(points.nbytes // points.shape[-1] * (points.shape[-1] + 2) for points in args[:2])


def _real_from_complex(args: tuple[Any, ...], outputs: list[Tensor]) -> int:
    """Bytes of the copy for the last dimension, and of the transform along the others, if there are any."""
    x, dims = args[:2]
    return 2 * x.nbytes if len(dims) > 1 else _transformed(args, outputs)


def _transformed(args: tuple[Any, ...], _outputs: list[Tensor]) -> int:
    """Bytes of a copy, where the dimensions that are not transformed cannot be viewed as one.

    Source: torch aten/src/ATen/native/mkl/SpectralOps.cpp.
    """
    x, dims = args[:2]
    transformed = {dim % x.dim() for dim in dims}
    others = sorted((dim for dim in range(x.dim()) if dim not in transformed), key=x.stride, reverse=True)
    is_one = all(x.stride(a) == x.stride(b) * x.shape[b] for a, b in pairwise(others))
    return 0 if is_one else x.nbytes


def _attention(args: tuple[Any, ...], _outputs: list[Tensor]) -> int:
    """Bytes of one block of scores for each thread, its rows' maxima and sums, and its rows of the result."""
    query, key = args[:2]
    rows, columns = _attention_block(query, key)
    in_float = rows * (columns + 2 + query.shape[-1])
    return _for_each_thread(query, in_float, rows * columns)


def _attention_backward(args: tuple[Any, ...], _outputs: list[Tensor]) -> int:
    """Bytes of a copied gradient (B, H, M, D), if (B, M, H, D) is not contiguous, and two blocks per thread."""
    grad, query, key = args[:3]
    rows, columns = _attention_block(query, key)
    copy = 0 if grad.transpose(1, 2).is_contiguous() else grad.nbytes
    return copy + _for_each_thread(query, 2 * rows * columns, 2 * rows * columns)


def _attention_block(query: Tensor, key: Tensor) -> tuple[int, int]:
    queries, keys = query.shape[2], key.shape[2]
    rows = next(rows for least, rows in _ATTENTION_ROWS if queries >= least)
    return min(rows, queries), min(_ATTENTION_COLUMNS, keys)


def _for_each_thread(query: Tensor, in_float: int, in_half: int) -> int:
    """Bytes for all threads of a buffer that accumulates and of one in the query's type of 16 bits."""
    is_half = query.dtype.itemsize < torch.float32.itemsize
    accumulated = in_float * max(query.dtype.itemsize, torch.float32.itemsize)
    return torch.get_num_threads() * (accumulated + (in_half * query.dtype.itemsize if is_half else 0))


def _first(args: tuple[Any, ...], _outputs: list[Tensor]) -> int:
    return args[0].nbytes


_TEMPORARIES: dict[Any, Callable[[tuple[Any, ...], list[Tensor]], int]] = {
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.gelu_backward.default: _gelu_backward,
    aten.upsample_nearest2d.default: _resize,
    aten.upsample_bilinear2d.default: _resize,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten._safe_softmax.default: _safe_softmax,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.roll.default: _roll,
    aten._euclidean_dist.default: _distances,
    aten.binary_cross_entropy_with_logits.default: _binary_cross_entropy_with_logits,
    aten._fused_rms_norm.default: _first,  # the squares, then the quotients
    aten._fft_c2r.default: _real_from_complex,
    aten._fft_r2c.default: _transformed,
    aten._fft_c2c.default: _transformed,
    aten.logsumexp.default: _first,  # what is exponentiated
}
"""Functions for the bytes of temporaries, from arguments and outputs."""
