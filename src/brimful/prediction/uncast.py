"""Arithmetic in another type than the settings seem to say, for reports."""

from __future__ import annotations

from collections import defaultdict

from brimful.settings import Precision
from brimful.trace import Phase, Trace

NOTED_SHARE = 0.05
"""Share of a step's floating-point operations that must stay in float32 to be noted. A choice."""

_CAST = {Precision.BF16: "bfloat16", Precision.FP16: "float16"}


def uncast_notes(trace: Trace) -> tuple[str, ...]:
    """The ops that take a notable share of the arithmetic in float32 although the step runs under autocast."""
    half = _CAST.get(trace.settings.precision)
    if half is None:
        return ()
    flops = _flops(trace)
    total = sum(flops.values())
    return tuple(
        f"{share:.0%} of the arithmetic stays in float32: autocast does not cast {name}. With the weights in "
        f"{half} (--dtype {trace.settings.precision}), it would run in half precision."
        for (name, dtype), count in flops.items()
        if dtype == "float32" and (share := count / max(total, 1)) > NOTED_SHARE
    )


def half_weights_notes(trace: Trace) -> tuple[str, ...]:
    """What the precision of the settings means where the weights make most of the arithmetic half precision."""
    precision, flops = trace.settings.precision, _flops(trace)
    if precision in _CAST:
        return ()
    return tuple(
        f"{precision} in the settings says that autocast is off: the weights are {half}, and so is most of the "
        "arithmetic."
        for half in _CAST.values()
        if 2 * sum(count for (_, dtype), count in flops.items() if dtype == half) > sum(flops.values())
    )


def _flops(trace: Trace) -> dict[tuple[str, str], int]:
    """Floating-point operations of forward and backward by op and type."""
    flops: dict[tuple[str, str], int] = defaultdict(int)
    for op in trace.ops:
        if op.phase is not Phase.OPTIMIZER:
            flops[op.name, op.dtype] += op.flops
    return flops
