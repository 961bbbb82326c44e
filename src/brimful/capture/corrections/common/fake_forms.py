"""Ops whose fake form is not what their kernels do: it takes fewer types, or answers with other strides.

Private torch APIs used here: `torch._decomp`, `torch._prims_common` (checked: torch 2.13).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format

from brimful.capture.corrections.rule import Rule

aten = torch.ops.aten


class FakeForms(Rule):
    """Give ops whose fake form differs from their kernels the form of the kernels.

    Strides matter: a gradient that does not lie contiguously is copied later.
    """

    name = "fake_forms"
    source = (
        "torch/_meta_registrations.py, _meta_grouped_mm_common; torch/_decomp/decompositions.py against the "
        "strides that the CPU's kernels return; torch aten/src/ATen/native/Onehot.cpp (checked: 2.13)"
    )
    device_kinds = ("cuda", "cpu")

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """A replacement of `F.one_hot`, which compares where tensors are fake and scatters otherwise."""
        return {F.one_hot: _one_hot}

    @contextmanager
    def context(self) -> Iterator[None]:
        """Register the forms of kernels while the context is open."""
        library = torch.library.Library("aten", "IMPL")
        before = {op: decomposition_table[op] for op in _LAYOUTS}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "Warning only once for all operators"
                )  # to replace it is meant
                library.impl("_grouped_mm", _grouped_mm, "Meta", allow_override=True)
            decomposition_table.update((op, _laid_out(op, form)) for op, form in before.items())
            yield
        finally:
            decomposition_table.update(before)
            library._destroy()


def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    _bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The result of a grouped product: one matrix, or one per group if groups divide the dimension summed over.

    The operands are (rows, K) and (groups, K, N), in any float type; (M, rows) and (rows, N); or two batches.
    """
    if mat_a.dim() == mat_b.dim() == 2:
        assert offs is not None
        shape: tuple[int, ...] = (offs.shape[0], mat_a.shape[0], mat_b.shape[1])
    elif mat_a.dim() == mat_b.dim() == 3:
        shape = (mat_a.shape[0], mat_a.shape[1], mat_b.shape[2])
    else:
        shape = (mat_a.shape[-2], mat_b.shape[-1])
    return mat_a.new_empty(shape, dtype=out_dtype or mat_a.dtype)


def _contiguous(_args: tuple[Any, ...], made: Tensor) -> Tensor:
    return torch.empty_like(made, memory_format=torch.contiguous_format)


def _as_input(args: tuple[Any, ...], made: Tensor) -> Tensor:
    """The result contiguous, or with channels last if the input is so."""
    return torch.empty_like(made, memory_format=suggest_memory_format(args[0]))


def _as_second(args: tuple[Any, ...], made: Tensor) -> Tensor:
    return torch.empty_like(made, memory_format=suggest_memory_format(args[1]))


def _by_gradient(args: tuple[Any, ...], made: Tensor) -> Tensor:
    """The result as an elementwise kernel makes it that is given the gradient first."""
    tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.shape == made.shape]
    return made.new_empty_strided(made.shape, compute_elementwise_output_strides(*tensors))


_LAYOUTS: dict[Any, Callable[[tuple[Any, ...], Tensor], Tensor]] = {
    aten.native_layer_norm_backward.default: _contiguous,
    aten._log_softmax_backward_data.default: _contiguous,
    aten.mse_loss_backward.default: _contiguous,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.huber_loss_backward.default: _contiguous,
    aten.glu_backward.default: _contiguous,
    aten.log_sigmoid_forward.default: _contiguous,
    aten.native_batch_norm.default: _as_input,
    aten.native_batch_norm_backward.default: _as_second,
    aten.native_group_norm_backward.default: _as_second,
    aten.native_dropout_backward.default: _by_gradient,
    aten.hardswish_backward.default: _by_gradient,
    aten.hardtanh_backward.default: _by_gradient,
    aten.elu_backward.default: _by_gradient,
    aten.softplus_backward.default: _by_gradient,
}
"""Ops whose fake form is written in Python, and the layout in which their kernels make the first result."""

_WANT_CONTIGUOUS = frozenset({aten.native_group_norm_backward.default})
"""Ops whose Python form fails for gradients that are not contiguous, which the kernel takes."""


def _laid_out(op: Any, form: Callable[..., Any]) -> Callable[..., Any]:
    """A fake form whose first result has the strides of the kernel's."""

    @functools.wraps(form)  # torch checks which module a form is from
    def run(*args: Any, **kwargs: Any) -> Any:
        if op in _WANT_CONTIGUOUS:
            made = form(*(arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args), **kwargs)
        else:
            made = form(*args, **kwargs)
        if isinstance(made, Tensor):
            return _LAYOUTS[op](args, made)
        first, *others = made
        return (first if first is None else _LAYOUTS[op](args, first)), *others

    return run


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes == -1:
        num_classes = int(tensor.max().item()) + 1
    rows = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype)
    return rows.scatter_(-1, tensor.unsqueeze(-1), 1)
