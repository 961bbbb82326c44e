"""Optimizers whose step computes the loss itself."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

from brimful.errors import UsageError


def check_needs_no_closure(optimizer: Optimizer, *, job: str) -> None:
    """Raise `UsageError` if an optimizer's step requires a closure, as that of LBFGS does.

    `job` is the job's name, for the message.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{job}: {type(optimizer).__name__} computes the loss several times in a step, by a closure, and "
            "brimful's step computes it once. Choose another optimizer; or give the job a loop that calls it, "
            "to estimate and measure: Job(loop=...); or plan forward and backward with optimizer='sgd', and "
            "put the plan in force on your own loop: bf.prepare(plan, model)."
        )
