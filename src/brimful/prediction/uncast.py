"""Arithmetic that autocast leaves in float32, for reports."""

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
    flops: dict[tuple[str, str], int] = defaultdict(int)
    for op in trace.ops:
        if op.phase is not Phase.OPTIMIZER:
            flops[op.name, op.dtype] += op.flops
    total = sum(flops.values())
    return tuple(
        f"{share:.0%} of the arithmetic stays in float32: autocast does not cast {name}. With the weights in "
        f"{half} (--dtype {trace.settings.precision}), it would run in half precision."
        for (name, dtype), count in flops.items()
        if dtype == "float32" and (share := count / max(total, 1)) > NOTED_SHARE
    )
