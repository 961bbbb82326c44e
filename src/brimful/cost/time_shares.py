"""Shares of a step's time by kind of operation: what the classes of kernels add up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from brimful.cost.kinds import kind_of_bytes

MATMUL, CONVOLUTION, ATTENTION = "matmul", "convolution", "attention"
"""Tensor contractions. Fused kernels alone count as attention; written out, it is matmuls and a softmax."""

NORMALIZATION = "normalization"
"""Normalizations, softmax, and other reductions: sums, means, pooling."""

POINTWISE = "pointwise"
"""Activations, additions, dropout: one result for each element."""

DATA_MOVEMENT = "data movement"
"""Copies within the device's memory, embeddings, gathers and scatters; what offload reads and writes of it."""

OPTIMIZER = "optimizer"
"""The update, where it runs on the device."""

TRANSFERS = "transfers"
"""Copies of the batch; waiting for offloaded tensors and for communication between ranks."""

HOST = "host"
"""Launches and Python; on a GPU the time in which it waits for them, or for an update on the host."""

LOADING = "data loading"
"""Waiting for a DataLoader; predictions have none."""

UNKNOWN = "unknown"
"""Kernels whose class has no measurements."""

LINK = "link"
"""Class of the time in which a step waits for copies of offloaded tensors."""

_BEGINNINGS = {
    MATMUL: ("matmul", "batched_matmul", "other_arithmetic", "recurrent"),
    CONVOLUTION: (
        *("convolution", "depthwise", "grouped", "pointwise", "stem", "im2col"),
        *("layout_conversion", "weight_gradient"),
    ),
    ATTENTION: ("attention",),
    NORMALIZATION: (
        "softmax",
        "normalization",
        "layer_norm",
        "group_norm",
        "batch_norm",
        "reduction",
        "pooling",
    ),
    POINTWISE: ("activation", "elementwise", "exponential", "random", "selection", "tanh"),
    DATA_MOVEMENT: ("copy", "transposing_copy", "gather", "scatter", "host_copy"),
    OPTIMIZER: ("optimizer",),
    TRANSFERS: ("input_copy", LINK, "communication"),
    HOST: ("host",),
    LOADING: (LOADING,),
}
"""By kind of operation, how names of its classes begin; the longest beginning counts. Convolutions of 1 × 1 are
of the class "pointwise"."""

_KIND_OF = {beginning: kind for kind, beginnings in _BEGINNINGS.items() for beginning in beginnings}


_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr"})


def kind_of_op(base: str) -> str:
    """The kind of operation of an op of aten by its name, such as "addmm"; of what moves bytes the class."""
    if base.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad")):
        return OPTIMIZER
    if "conv" in base:
        return CONVOLUTION
    if "attention" in base:
        return ATTENTION
    return MATMUL if base in _PRODUCTS else kind_of_bytes(base)


def time_shares(class_seconds: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """The fraction of a step's time that each kind of operation takes, largest first; they add up to 1.

    Args:
        class_seconds: Seconds by class of kernel, as in `StepTime.kernel_seconds`.

    Returns:
        Kinds and fractions; nothing where the step takes no time.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for name, each in class_seconds:
        seconds[_kind_of(name)] += each
    total = sum(seconds.values())
    largest_first = sorted(seconds.items(), key=lambda item: item[1], reverse=True)
    return tuple((kind, each / total) for kind, each in largest_first if each)


def _kind_of(name: str) -> str:
    matching = (beginning for beginning in _KIND_OF if name.startswith(beginning))
    return _KIND_OF.get(max(matching, key=len, default=""), UNKNOWN)
