"""Finds ignored labels in batches whose micro-batches weigh by their samples: warns, or refuses the batch.

Private torch API used here: `torch._C._DisableTorchDispatch` (checked: 2.13).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from brimful.batches import BatchLayout, named_tensors
from brimful.job import Batch, Job
from brimful.settings import Settings

IGNORED_LABEL = -100
"""The label that torch's losses ignore by default (torch.nn.functional.cross_entropy)."""
Refuse = Callable[[Batch, str, str], None]
"""Raises an error if the loss of a batch is known to ignore labels; it gets where they are, and the way out."""
_MAY_BE_IGNORED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
"""Types that can hold that label; a loss may convert the labels of a batch."""


class LabelWatch:
    """Finds labels of -100 in batches on the host, in tensors of whole numbers with a row for each sample.

    A loss that ignores labels is a mean over the others. If all samples have equally many, that is a mean over
    samples too.

    Args:
        layout: Counts the samples of batches.
        counts_by: Where the user passes what the loss averages over, with {count} for the function.
        dim: The batch dimension.
        refuse: Called before an ignored label is reported.
    """

    def __init__(
        self,
        layout: BatchLayout,
        *,
        counts_by: str = "Job(count={count})",
        dim: int = 0,
        refuse: Refuse | None = None,
    ) -> None:
        self._dim, self._layout = dim, layout
        self._counts_by = counts_by
        self._refuse = refuse
        self._watches = True

    @classmethod
    def of_job(cls, job: Job, layout: BatchLayout, refuse: Refuse | None = None) -> LabelWatch:
        """A watch for the loss of a job; a job that says what its loss averages over is not watched."""
        watch = cls(layout, dim=job.batch_dim or 0, refuse=refuse)
        watch._watches = job.count is None and job.embed is None and job.reduction == "mean"
        return watch

    def ignored(self, batch: Batch, settings: Settings) -> str | None:
        """Where a global batch has ignored labels, and what to do about it, in sentences for a warning.

        None if the batch is not split, has no such labels or as many in each sample, or if an earlier batch was
        reported.
        """
        is_whole = settings.gradient_accumulation_steps == 1  # unless it is larger than planned
        most = settings.global_batch_size if is_whole else settings.micro_batch_size
        if not self._watches or (samples := self._layout.count(batch)) <= most:
            return None
        for name, tensor in named_tensors(batch):
            if not _may_be_labels(tensor) or tensor.dim() <= self._dim:
                continue
            if tensor.shape[self._dim] != samples:
                continue
            with torch._C._DisableTorchDispatch():  # not an op of the step, in which memory may run out
                labels = np.moveaxis(tensor.numpy(), self._dim, 0)
            counts = (labels == IGNORED_LABEL).reshape(samples, -1).sum(1)
            if (counts != counts[0]).any():
                found = f"{name} has labels of {IGNORED_LABEL}, {counts.min()} to {counts.max()} in a sample"
                count = f"lambda batch: ({name} != {IGNORED_LABEL}).sum()"
                way_out = f"Pass {self._counts_by.format(count=count)}."
                if self._refuse is not None:
                    self._refuse(batch, found, way_out)
                self._watches = False
                return (
                    f"{found}. If the loss ignores them, it is a mean over the others, but micro-batches weigh "
                    f"by their samples, which is not the training of the whole batch. {way_out}"
                )
        return None


def _may_be_labels(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type == "cpu"
    return is_plain and tensor.dtype in _MAY_BE_IGNORED and tensor.numel() > 0
