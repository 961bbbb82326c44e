"""The layer that makes the logits of a cross-entropy, where they are large."""

from __future__ import annotations

from brimful.memory import live_profile, rounding_bytes_of
from brimful.settings import ChunkedLoss, op_kind
from brimful.trace import Phase, Trace

LOSS_CHUNKS = 8
"""Parts in which a loss is computed, if in parts: an eighth of what it takes at once is small beside the rest,
and with more parts, of fewer tokens each, products become slower."""

LARGE_FRACTION = 0.02
"""Fraction of a step's peak. What a cross-entropy takes at once is three or four times its logarithms of
probabilities: where they are less, computing it in chunks spares less than a tenth."""

_PRODUCTS = frozenset({"mm", "addmm"})


def chunked_loss_of(baseline: Trace) -> ChunkedLoss | None:
    """The loss in parts; None if the step has no large cross-entropy, or its loss couples the samples."""
    layer = None if baseline.couples_samples else logits_layer(baseline)
    return None if layer is None else ChunkedLoss(layer=layer, chunks=LOSS_CHUNKS)


def logits_layer(baseline: Trace) -> str | None:
    """The dotted path of the linear layer whose output a large cross-entropy takes.

    The result is None if the step has no cross-entropy, it is small, or its logits are not the output of a
    linear layer.
    """
    forward = [op for op in baseline.ops if op.phase is Phase.FORWARD]
    losses = [place for place, op in enumerate(forward) if op_kind(op.name) == "_log_softmax"]
    if not losses:
        return None
    largest = max(losses, key=lambda place: forward[place].written_bytes)
    peak_bytes = live_profile(baseline, rounding_bytes_of(baseline.device_kind)).peak_bytes
    if forward[largest].written_bytes < LARGE_FRACTION * peak_bytes:
        return None
    before = (op for op in reversed(forward[:largest]) if op.flops)
    product = next(before, None)
    if product is None or op_kind(product.name) not in _PRODUCTS:
        return None
    is_linear = dict(baseline.module_classes).get(product.module) == "Linear"
    return product.module if is_linear else None
