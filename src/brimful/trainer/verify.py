"""Verifies a plan before training: its steps must compute what the baseline computes."""

from __future__ import annotations

import warnings

from torch import nn

from brimful.distributed.ranks import Ranks
from brimful.errors import EquivalenceError
from brimful.execution.out_of_memory import RanOut, make_room, unless_out_of_memory
from brimful.profiling import (
    LayerSplitWarning,
    SplitWarning,
    split_changes_layers,
    split_not_compared,
    verify_model,
)
from brimful.results import EquivalenceReport
from brimful.trainer.options import RunConfig


def verified(model: nn.Module, config: RunConfig, ranks: Ranks) -> EquivalenceReport | None:
    """Verify the plan of a run on the first rank, without changing the model; all ranks call this together.

    Returns the report, on the first rank alone; None if there is nothing to compare.
    """
    report, failure = None, None
    if ranks.is_first:
        try:
            report = _verified_here(model, config)
        except EquivalenceError as error:
            failure = error
    message = ranks.broadcast(None if failure is None else str(failure))
    if message is not None:
        raise failure or EquivalenceError(message)
    return report


def _verified_here(model: nn.Module, config: RunConfig) -> EquivalenceReport | None:
    settings = config.settings
    is_plain = (
        not settings.changed
        and settings.chunked_loss is None
        and not settings.optimizer_in_backward
        and settings.memory_format is None
    )
    if not config.options.verify or (is_plain and settings.gradient_accumulation_steps == 1):
        return None
    report = unless_out_of_memory(lambda: verify_model(config.job, settings, model, seed=config.options.seed))
    if isinstance(report, RanOut):
        make_room(config.device)
        warnings.warn(
            "the plan was not compared with the baseline, as memory ran out in that: "
            f"{report.message}. `brimful plan --verify` compares them on a CPU.",
            stacklevel=3,
        )
        return None
    if not report.holds:
        raise EquivalenceError(
            f"{report}\nNothing was trained. If the difference is meant, use Trainer(verify=False)."
        )
    if report.known_differences:
        warnings.warn(split_changes_layers(report.known_differences), LayerSplitWarning, stacklevel=3)
    if report.why_split_is_unknown:
        warnings.warn(split_not_compared(settings, report.why_split_is_unknown), SplitWarning, stacklevel=3)
    return report
