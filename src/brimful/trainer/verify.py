"""Before anything is trained: that a plan computes what plain training does."""

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


def certified(model: nn.Module, config: RunConfig, ranks: Ranks) -> EquivalenceReport | None:
    """What the first rank finds; the others wait for it, and end with it.

    Args:
        model: Which is to be trained, on the device; it is left as it was.
        config: What was asked, the plan above all.
        ranks: All of them.

    Returns:
        On the first rank, that the plan is the same training; None if there is nothing to compare.

    Raises:
        EquivalenceError: It is another.
    """
    certificate, failure = None, None
    if ranks.is_first:
        try:
            certificate = _certified_here(model, config)
        except EquivalenceError as error:
            failure = error
    told = ranks.broadcast(None if failure is None else str(failure))
    if told is not None:
        raise failure or EquivalenceError(told)
    return certificate


def _certified_here(model: nn.Module, config: RunConfig) -> EquivalenceReport | None:
    settings = config.settings
    is_plain = not settings.changed and settings.chunked_loss is None and not settings.optimizer_in_backward
    if not config.options.verify or (is_plain and settings.gradient_accumulation_steps == 1):
        return None
    certificate = unless_out_of_memory(
        lambda: verify_model(config.job, settings, model, seed=config.options.seed)
    )
    if isinstance(certificate, RanOut):
        make_room(config.device)
        warnings.warn(
            "the plan was not compared with plain training, as memory ran out in that: "
            f"{certificate.message}. `brimful plan --verify` compares them on a CPU.",
            stacklevel=3,
        )
        return None
    if not certificate.holds:
        raise EquivalenceError(
            f"{certificate}\nNothing was trained. If the difference is meant, use Trainer(verify=False)."
        )
    if certificate.known_differences:
        warnings.warn(split_changes_layers(certificate.known_differences), LayerSplitWarning, stacklevel=3)
    if certificate.why_split_is_unknown:
        warnings.warn(
            split_not_compared(settings, certificate.why_split_is_unknown), SplitWarning, stacklevel=3
        )
    return certificate
