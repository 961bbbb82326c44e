"""How the ranks' gradients come together: a step's loss, and when a backward pass speaks to the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from brimful.job import Batch, Job
from brimful.train.ranks import Ranks

Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True, slots=True)
class DataParallel:
    """What a step does otherwise where it is one rank's part."""

    loss: Loss
    synchronising: Callable[[bool], AbstractContextManager[object]]
    """Around forward and backward of a micro-batch; told whether it is the step's last, in which gradients are
    averaged over the ranks."""


def data_parallel(job: Job, model: nn.Module, ranks: Ranks) -> DataParallel:
    """Let the ranks train as one.

    DDP is laid around the loss, not the model: so the loss is given the model itself, with all its methods and
    attributes, and DDP sees whatever it computes.

    Args:
        job: Its loss.
        model: On the device, with the unit actions applied; the first rank's weights become those of all.
        ranks: All of them.

    Returns:
        The job's own loss, and nothing else, where there is one rank.
    """
    if not ranks.are_several:
        return DataParallel(job.loss, lambda _is_last: nullcontext())
    wrapped = DistributedDataParallel(
        _LossModule(model, job.loss),
        gradient_as_bucket_view=True,
        # A branch that no sample takes on one rank may be taken on another; without this, that rank waits for
        # ever.
        find_unused_parameters=True,
    )

    def loss(_model: nn.Module, batch: Batch) -> Tensor:
        value: Tensor = wrapped(batch)
        return value

    return DataParallel(loss, lambda is_last: nullcontext() if is_last else wrapped.no_sync())


class _LossModule(nn.Module):
    """A job's loss as a module's forward."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self._loss(self.model, batch)
