"""Problem sizes of kernels, which decide their speed together with FLOPs and bytes.

`Op.extents` stores one of these records as plain numbers, each affine in the micro-batch, so that a trace stays
a table and scales; `extents_of` returns the record.
"""

from __future__ import annotations

from typing import NamedTuple


class Product(NamedTuple):
    """Matrix products (rows, inner) × (inner, columns)."""

    products: int
    """Independent products of one call."""
    rows: int
    columns: int
    inner: int
    is_first_transposed: int = 0
    """1 if elements of one column are neighbours in the memory of the first operand, as in the gradient of a
    weight; 0 if those of one row are."""
    is_second_transposed: int = 0


class Convolution(NamedTuple):
    """A convolution, or in backward its gradients."""

    samples: int
    in_channels: int
    out_channels: int
    groups: int
    kernel: int
    """Elements of the filter per pair of channels: 9 of 3 × 3."""
    stride: int
    """Product of the strides over the dimensions."""
    in_positions: int
    """Height × width of the input."""
    out_positions: int
    is_channels_last: int
    """1 if input or weight is channels_last, the layout of cuDNN's tensor-core kernels."""
    gradients: int
    """0 in forward; 1 of the input, 2 of the weight, 3 of both."""
    width: int
    """Size of the filter's last dimension."""
    dilation: int
    """The largest of all dimensions."""


class Attention(NamedTuple):
    """Fused attention."""

    heads: int
    """Heads of all samples together."""
    queries: int
    keys: int
    head_size: int
    is_causal: int


class Rows(NamedTuple):
    """Norms, softmax and reductions: `rows` groups of `columns` elements each."""

    rows: int
    columns: int
    step: int
    """Stride in elements within a group: 1 if it is contiguous."""


class Copy(NamedTuple):
    """A copy, possibly to another layout; or a pointwise op of operands in different layouts."""

    run: int
    """Number of elements that are contiguous in both source and result; 1 if it transposes."""


class Strided(NamedTuple):
    """A pointwise op that computes the place of each element, as an operand is broadcast or not contiguous."""

    elements: int
    """Elements of the result."""
    tensors: int
    """Operands and the result."""


Extents = Product | Convolution | Attention | Rows | Copy | Strided

_KINDS: dict[int, type[Extents]] = {
    12: Convolution,
    6: Product,
    5: Attention,
    4: Product,
    3: Rows,
    2: Strided,
    1: Copy,
}
"""Records by how many numbers they have; traces of earlier versions have products without the layouts."""


def extents_of(numbers: tuple[int, ...]) -> Extents | None:
    """The record of `Op.extents`; None for an op whose FLOPs and bytes alone decide its speed."""
    kind = _KINDS.get(len(numbers))
    return None if kind is None else kind(*numbers)
