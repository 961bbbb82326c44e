"""Changes by splitting a batch in layers that couple its samples, for reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from brimful.settings import Settings
from brimful.trace import Trace

_NAMED = 3
"""Layers named before the others are only counted."""


def why_kept_whole(baseline: Trace) -> str:
    """Why a plan does not split the batch unless that is permitted: one or two clauses."""
    reasons = []
    if norms := baseline.batch_norm_modules:
        reasons.append(f"{len(norms)} BatchNorm layers (first: {norms[0]!r}) compute with the whole of it")
    if stateful := baseline.stateful_modules:
        reasons.append(
            "each forward updates state that the next one reads, which would change more often: "
            f"{listed(stateful)}"
        )
    return "; ".join(reasons)


def what_splitting_changes(
    batch_norms: Sequence[str], stateful: Sequence[str], settings: Settings
) -> Iterator[str]:
    """Changes by splitting the batch in layers that couple its samples, as clauses.

    `batch_norms` normalise with the statistics of the batch; `stateful` is what a forward changes and the next
    one finds.
    """
    steps = settings.gradient_accumulation_steps
    if batch_norms:
        count = len(batch_norms)
        layers = "1 BatchNorm layer normalises" if count == 1 else f"{count} BatchNorm layers normalise"
        yield (
            f"{layers} over micro-batches of {settings.micro_batch_size}, not over the global batch, and "
            f"running statistics are updated {steps} times a step"
        )
    if stateful:
        yield (
            f"each forward updates state that the next one reads: {steps} times a step, and each micro-batch "
            f"sees other values: {listed(stateful)}"
        )


def listed(names: Sequence[str]) -> str:
    """The first few of some names, and how many others there are."""
    others = len(names) - _NAMED
    return ", ".join(repr(name) if name else "the model itself" for name in names[:_NAMED]) + (
        f" and {others} more" if others > 0 else ""
    )
