"""Losses, gradients and weights that are no numbers: the error that says where the last good weights are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from brimful.batches import own_part
from brimful.errors import NonFiniteError
from brimful.results import StepRecord
from brimful.settings import Precision, Settings


def has_finite_parameters(model: nn.Module) -> bool:
    """Whether no parameter is NaN or infinite, as far as this rank has them; takes next to no memory.

    A buffer may be infinite: an attention mask, say.
    """
    return all(_is_finite(own_part(parameter).detach()) for parameter in model.parameters())


def _is_finite(tensor: Tensor) -> bool:
    """By the extremes, which are NaN if anything is; `isfinite` makes several tensors as large as this."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    low, high = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    return bool(low * 0 == high * 0)  # NaN if one is NaN or infinite; one transfer from a GPU


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
