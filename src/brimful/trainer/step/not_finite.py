"""NaN and infinity in losses, gradients and weights: the checks, and errors that name the last good weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from brimful.batches import own_part
from brimful.distributed.ranks import Ranks
from brimful.errors import NonFiniteError
from brimful.execution.out_of_memory import with_room
from brimful.results import StepRecord
from brimful.settings import Precision, Settings
from brimful.torch_utils.wrapper_tensors import inner_tensors


class NotFiniteStep(Exception):  # noqa: N818 - the trainer turns it into an error
    """The loss or a gradient of a step is NaN or infinite; the step was undone."""

    def __init__(self, record: StepRecord) -> None:
        super().__init__(record)
        self.record = record


def has_finite_parameters(model: nn.Module) -> bool:
    """Whether all parameters, or this rank's shards of them, are finite; needs next to no memory.

    Buffers are not checked: an attention mask may be infinite.
    """
    parts = (part for parameter in model.parameters() for part in inner_tensors(own_part(parameter)))
    return all(_is_finite(part.detach()) for part in parts)


def is_finite_on_all_ranks(model: nn.Module, ranks: Ranks) -> bool:
    """Whether no rank has a NaN or infinite parameter; every rank must call it."""
    check = partial(has_finite_parameters, model)
    return not ranks.any(not with_room(check, during="weights are checked for NaN and infinity"))


def _is_finite(tensor: Tensor) -> bool:
    """Check the extremes, which are NaN if any number is; `isfinite` would allocate tensors of this size."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    low, high = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    return bool(low * 0 == high * 0)  # NaN if one is NaN or infinite; one transfer from a GPU


def step_not_finite(record: StepRecord, settings: Settings, weights: str) -> NonFiniteError:
    """Make the error for a step that was undone.

    `weights` says where the last good weights are. The suggestions depend on the settings in force.
    """
    return _error(
        f"the loss is {record.loss:.6g} and the gradient norm {record.gradient_norm:.6g} in step {record.step} "
        f"(epoch {record.epoch}); the step was not taken.",
        settings,
        weights,
    )


def update_not_finite(step: int, settings: Settings, weights: str) -> NonFiniteError:
    """Make the error for an update that left the weights NaN or infinite.

    `weights` says where the last good weights are. The suggestions depend on the settings in force.
    """
    return _error(f"weights are NaN or infinite after step {step}; they are not saved.", settings, weights)


def _error(happened: str, settings: Settings, weights: str) -> NonFiniteError:
    ways_out = ["a lower learning rate, or one that warms up (schedule=…)", "max_gradient_norm=1.0"]
    if settings.precision is Precision.FP16:
        ways_out.append("bf16 or fp32, whose range is larger than that of fp16")
    ways_out.append("a look at the samples of this step")
    return NonFiniteError(f"{happened}\n  last good weights: {weights}\n  what may help: {'; '.join(ways_out)}")
