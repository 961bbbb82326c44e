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
        reasons.append(f"{batch_norms_that('compute with the whole of it', norms)} (first: {norms[0]!r})")
    if stateful := baseline.stateful_modules:
        reasons.append(
            "each forward updates state that the next one reads, which would change more often: "
            f"{listed(stateful)}"
        )
    return "; ".join(reasons)


def batch_norms_that(do: str, norms: Sequence[str]) -> str:
    """A clause on BatchNorm layers; `do` starts with the verb of several."""
    verb, *rest = do.split(" ", 1)
    subject = f"1 BatchNorm layer {verb}s" if len(norms) == 1 else f"{len(norms)} BatchNorm layers {verb}"
    return " ".join([subject, *rest])


def what_splitting_changes(
    batch_norms: Sequence[str], stateful: Sequence[str], settings: Settings
) -> Iterator[str]:
    """Changes by splitting the batch in layers that couple its samples, as clauses.

    `batch_norms` normalise with the statistics of the batch; `stateful` is what a forward changes and the next
    one finds.
    """
    steps = settings.gradient_accumulation_steps
    if batch_norms:
        yield (
            f"{batch_norms_that('normalise', batch_norms)} over micro-batches of {settings.micro_batch_size}, "
            f"not over the global batch, and running statistics are updated {steps} times a step"
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
