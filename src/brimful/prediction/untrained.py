"""Parameters that are to be trained and get no gradient, for reports."""

from __future__ import annotations

from brimful.trace import Trace

_NAMED = 2
"""Parameters named before the others are only counted."""


def untrained_notes(trace: Trace) -> tuple[str, ...]:
    """What to say of trainable parameters without a gradient: which, and why where that is known."""
    names = trace.without_gradient
    if not names:
        return ()
    others = len(names) - _NAMED
    listed = ", ".join(names[:_NAMED]) + (f" and {others} more" if others > 0 else "")
    why = (
        " Reentrant checkpointing gives no gradients inside a region whose input needs none: pass "
        "use_reentrant=False, or let the input need one (model.enable_input_require_grads() in transformers)."
        if trace.checkpoints_without_gradient
        else ""
    )
    count = "1 trainable parameter gets" if len(names) == 1 else f"{len(names)} trainable parameters get"
    return (f"{count} no gradient and will not be trained: {listed}.{why}",)
