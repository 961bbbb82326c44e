"""The options by which a command predicts a whole run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from brimful.cli.options import arguments
from brimful.errors import UsageError
from brimful.options import RunLength

if TYPE_CHECKING:
    from brimful.planner import Plan
    from brimful.prediction import Estimate
    from brimful.results import WholeRun


def run_asked_for(
    length: RunLength, prices: Path | None, device: str
) -> Callable[[Estimate | Plan], WholeRun] | None:
    """A function that predicts the run of some length from a step; None if no length is given.

    Lengths and prices that cannot be used raise UsageError now, before a step is captured.
    """
    if length.is_given:
        length.check()
    elif prices is not None:
        raise UsageError(
            "--prices is for the cost of a run. Give its length too: --epochs with --dataset-size, --samples, "
            "or --tokens."
        )
    else:
        return None
    return partial(_predicted, length, None if prices is None else _price(prices, device))


def _predicted(length: RunLength, price_per_hour: float | None, step: Estimate | Plan) -> WholeRun:
    return step.predict_run(price_per_hour=price_per_hour, **arguments(length))


def _price(prices: Path, device: str) -> float:
    """The price of the device, which must have one."""
    from brimful.planner import prices_of
    from brimful.profiling.named_device import resolve_device

    target = resolve_device(device)
    if target.kind != "cuda":
        raise UsageError(
            f"{prices} has prices of GPUs, and the device is {target.name}. Name a GPU by --device."
        )
    name, found = target.name, prices_of(prices, [target.name])
    if name not in found:
        listed = ", ".join(found) or "none"
        raise UsageError(f"{prices} has no price of {name}; it has those of: {listed}. Add {name!r} to it.")
    return found[name]
