"""Which kind of work an op is: what one measured curve stands for.

Names of kinds, and what their amounts count:

    matmul, convolution, depthwise, im2col, attention, recurrent
                  FLOPs; the arithmetic's type follows after a colon
    all others    bytes read and written
"""

from __future__ import annotations

from typing import NamedTuple

from brimful.settings import Precision
from brimful.trace import Op

TF32 = "tf32"
"""Type after the colon where float32 products may round to TF32."""


class Work(NamedTuple):
    """How much an op does, of what."""

    kind: str
    amount: int


_ARITHMETIC = {"convolution": "convolution", "attention": "attention", "_rnn": "recurrent"}
"""Parts of names of ops that have FLOPs; the others are matmuls."""

_OF_NAMES: dict[str, str] = {
    "exponential": "exp expm1 log log1p log2 softplus logsigmoid_forward cos sin erf erfinv pow rsqrt",
    "tanh": "tanh",
    "activation": "gelu gelu_backward silu silu_backward sigmoid elu mish mish_backward hardswish "
    "hardswish_backward hardsigmoid leaky_relu elu_backward softplus_backward logsigmoid_backward",
    "random": "bernoulli native_dropout normal uniform rand randn rand_like randn_like randint randperm "
    "exponential rrelu_with_noise multinomial log_normal geometric",
    "softmax": "_softmax _log_softmax logsumexp",
    "normalization": "native_layer_norm native_layer_norm_backward native_group_norm "
    "native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward",
    "batch_norm": "native_batch_norm _native_batch_norm_legit _batch_norm_with_update cudnn_batch_norm "
    "batch_norm_stats",
    "batch_norm_backward": "native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward",
    "reduction": "sum mean amax amin max min var var_mean std linalg_vector_norm norm all any prod argmax "
    "argmin nansum _foreach_norm cumsum",
    "pooling": "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d adaptive_max_pool2d "
    "_adaptive_avg_pool2d avg_pool2d_backward avg_pool3d_backward upsample_bilinear2d "
    "upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward upsample_nearest2d "
    "upsample_nearest2d_backward grid_sampler_2d grid_sampler_2d_backward",
    "selection": "where masked_fill",
    "gather": "embedding index index_select gather _embedding_bag take nonzero masked_select",
    "scatter": "index_put _index_put_impl scatter scatter_add index_add index_copy masked_scatter "
    "embedding_dense_backward",
    "copy": "clone copy _to_copy contiguous to_host to_device",
}  # fmt: skip

_KINDS = {name: kind for kind, names in _OF_NAMES.items() for name in names.split()}

OTHER = "elementwise"
"""Ops named nowhere stream their operands: additions and products, comparisons, the optimizer's."""

COPY = "copy"
"""Copies to another layout."""

WEIGHT_GRADIENT = "weight_gradient"
"""What a convolution's backward takes beside its arithmetic, by bytes of weights: threads add up what each
found for all weights, and the layout is changed."""

BYTE_KINDS = (OTHER, *_OF_NAMES, WEIGHT_GRADIENT)
DEPTHWISE, IM2COL = "depthwise", "im2col"
"""A CPU's convolutions of each channel by itself, and those for which oneDNN has no kernel: it copies patches
of the input into a matrix, and multiplies that."""
ARITHMETIC_KINDS = ("matmul", *_ARITHMETIC.values(), DEPTHWISE, IM2COL)


def work_of(op: Op, precision: Precision) -> Work:
    """The kind and amount of an op's work: FLOPs in a type where it has any, else bytes."""
    if op.flops:
        named = (kind for part, kind in _ARITHMETIC.items() if part in op.name)
        dtype = TF32 if op.dtype == "float32" and precision is Precision.TF32 else op.dtype
        return Work(f"{next(named, 'matmul')}:{dtype}", op.flops)
    return Work(kind_of_bytes(base_name(op.name)), op.read_bytes + op.written_bytes)


def kind_of_bytes(base: str) -> str:
    """The kind of an op without FLOPs, by `base_name`."""
    return _KINDS.get(base, OTHER)


def base_name(name: str) -> str:
    """The name of an op without namespace, overload and in-place mark: "add" of "aten.add_.Tensor"."""
    words = name.split(".")
    base = words[1] if len(words) > 1 else name
    return base if base.startswith("__") else base.rstrip("_")
