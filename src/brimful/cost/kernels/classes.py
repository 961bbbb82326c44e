"""An op → its kernels with their classes."""

from __future__ import annotations

from brimful.cost.kernels.convolutions import convolution_kernels
from brimful.cost.kernels.kernel import HALF_TYPES, Kernel, Unit, is_aligned
from brimful.cost.kernels.tiles import tiled_flops
from brimful.cost.kinds import base_name, kind_of_bytes
from brimful.trace import Op, Phase
from brimful.trace.extents import Attention, Convolution, Copy, Product, Rows, Strided, extents_of

TRANSPOSING_RUN = 8
"""Copies of shorter contiguous runs transpose: a run is then less than a 32-byte sector of the memory."""

PERSISTENT_COLUMNS = 1024
"""Longer rows do not stay in registers between the passes of a softmax, which then reads them again. Source:
aten/src/ATen/native/cuda/SoftMax.cu, `dim_size <= 1024` chooses `dispatch_softmax_forward`."""

FUSED_ATTENTION = frozenset({"attention", "attention_backward"})
"""Classes of fused attention."""

CONVOLUTION = "convolution"
"""Beginning of the names of convolutions by filters of several elements, of all channels of an image."""

LAUNCHES_NOTHING = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "as_strided"}
)
"""Ops that only allocate."""


def kernels_of(op: Op, sm_count: int, *, is_tf32: bool = False) -> list[Kernel]:
    """The kernels that an op launches on a GPU; an empty list for an op that only allocates."""
    base, moved_bytes = base_name(op.name), op.read_bytes + op.written_bytes
    if base in LAUNCHES_NOTHING:
        return []
    if op.phase is Phase.OPTIMIZER:
        return [Kernel("optimizer", moved_bytes=moved_bytes)]
    if base == "embedding_dense_backward":  # the gradient of the whole table is filled, then rows are added
        filled = Kernel("elementwise", moved_bytes=op.written_bytes)
        return [filled, Kernel("scatter", moved_bytes=2 * op.read_bytes)]
    extents = extents_of(op.extents)
    if isinstance(extents, Convolution) and not (extents.gradients or op.flops):  # of the bias alone
        return [Kernel("reduction_of_columns", moved_bytes=moved_bytes)]
    if isinstance(extents, Convolution):
        return list(convolution_kernels(extents, op.dtype, op.weight_bytes, sm_count, is_tf32=is_tf32))
    if isinstance(extents, Product):
        return [_product(extents, op.dtype, moved_bytes, sm_count)]
    if isinstance(extents, Attention):
        name = "attention_backward" if "backward" in base else "attention"
        flops = op.flops / 2 if extents.is_causal else float(op.flops)  # blocks above the diagonal are skipped
        return [Kernel(name, flops, Unit.TENSOR, moved_bytes)]
    if op.flops:
        return [Kernel("other_arithmetic", float(op.flops), Unit.TENSOR, moved_bytes)]
    name = _memory_class(base, extents)
    if name.startswith("batch_norm") and op.phase is Phase.EVALUATION:
        name = "batch_norm_inference"
    if isinstance(extents, Strided):
        places = float(extents.elements * extents.tensors)
        return [Kernel(name, places, Unit.INTEGER, moved_bytes)]
    return [Kernel(name, moved_bytes=moved_bytes)]


def _product(product: Product, dtype: str, moved_bytes: int, sm_count: int) -> Kernel:
    """cuBLAS's kernel, which depends on the rows of operands and result as they lie in memory."""
    name = "batched_matmul" if product.products > 1 else "matmul"
    is_unaligned = bool(odd_sizes(product))
    flops = tiled_flops(*product[:4], sm_count)
    if is_unaligned:
        name += "_unaligned"
    return Kernel(name, flops, Unit.TENSOR, moved_bytes, is_unaligned and dtype in HALF_TYPES)


def odd_sizes(product: Product) -> tuple[int, ...]:
    """Lengths of rows of a product's operands and result, as they lie in memory, that are not aligned."""
    first = product.rows if product.is_first_transposed else product.inner
    second = product.inner if product.is_second_transposed else product.columns
    lengths = dict.fromkeys((first, second, product.columns))
    return tuple(length for length in lengths if not is_aligned(length))


def _memory_class(base: str, extents: object) -> str:
    """The class of a kernel that memory limits."""
    kind = kind_of_bytes(base)
    backward = "_backward" if "backward" in base else ""
    if isinstance(extents, Copy):
        return "transposing_copy" if extents.run < TRANSPOSING_RUN else "copy"
    if kind == "normalization":
        return ("group_norm" if "group" in base else "layer_norm") + backward
    if isinstance(extents, Rows) and kind.startswith("batch_norm"):
        return "batch_norm" + backward + ("_channels_last" if extents.step > 1 else "")
    if "softmax" in base:
        is_long = isinstance(extents, Rows) and extents.columns > PERSISTENT_COLUMNS
        return "softmax" + backward + ("_long" if is_long else "")
    if kind == "reduction" and isinstance(extents, Rows):
        return "reduction_of_rows" if extents.step == 1 else "reduction_of_columns"
    return _NAMES.get(kind, kind)


_NAMES = {"exponential": "activation", "tanh": "activation", "reduction": "reduction_of_rows"}
"""Kinds of work that are the same class on a GPU."""
