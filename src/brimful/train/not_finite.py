"""Losses, gradients and weights that are no numbers: the error that says where the last good weights are."""

from __future__ import annotations

import torch
from torch import nn

from brimful.batches import own_part
from brimful.errors import NonFiniteError
from brimful.settings import Precision, Settings
from brimful.training import StepRecord


def has_finite_parameters(model: nn.Module) -> bool:
    """Whether no parameter is NaN or infinite, as far as this rank has them. (A buffer may be: an attention
    mask, say.)"""
    return all(bool(torch.isfinite(own_part(parameter).detach()).all()) for parameter in model.parameters())


def step_not_finite(record: StepRecord, settings: Settings, weights: str) -> NonFiniteError:
    """The error for a step that was not taken.

    Args:
        record: The step.
        settings: Decide what may help.
        weights: Where the last good weights are.

    Returns:
        It, to be raised.
    """
    return _error(
        f"the loss is {record.loss:.6g} and the gradient norm {record.gradient_norm:.6g} in step {record.step} "
        f"(epoch {record.epoch}); the step was not taken.",
        settings,
        weights,
    )


def update_not_finite(step: int, settings: Settings, weights: str) -> NonFiniteError:
    """The error for an update that left the weights NaN or infinite.

    Args:
        step: The latest step.
        settings: Decide what may help.
        weights: Where the last good weights are.

    Returns:
        It, to be raised.
    """
    return _error(f"weights are NaN or infinite after step {step}; they are not saved.", settings, weights)


def _error(happened: str, settings: Settings, weights: str) -> NonFiniteError:
    ways_out = ["a lower learning rate, or one that warms up (schedule=…)", "max_gradient_norm=1.0"]
    if settings.precision is Precision.FP16:
        ways_out.append("bf16 or fp32, whose range is larger than that of fp16")
    ways_out.append("a look at the samples of this step")
    return NonFiniteError(f"{happened}\n  last good weights: {weights}\n  what may help: {'; '.join(ways_out)}")
