"""Warns of the first batch with ignored labels where micro-batches weigh by their samples."""

from __future__ import annotations

import torch

from brimful.batches import named_tensors
from brimful.job import Batch, Job
from brimful.settings import Settings

_IGNORED = -100
"""The label that torch's losses ignore by default (torch.nn.functional.cross_entropy)."""


class LabelWatch:
    """Looks for labels of -100 in batches on the host; what the first batch has is checked elsewhere.

    A loss that ignores labels is a mean over the others. Where all samples have as many, that is a mean over
    samples too.

    Args:
        job: If it says what its loss averages over, nothing is looked for.
        settings: Nothing is looked for where they do not split the batch.
    """

    def __init__(self, job: Job, settings: Settings) -> None:
        is_stated = job.count is not None or job.embed is not None or job.reduction == "sum"
        self._watches = settings.gradient_accumulation_steps > 1 and not is_stated

    def ignored(self, batch: Batch) -> str | None:
        """Where a batch has ignored labels, and what to do about it; None if it has none, or if another had."""
        for name, tensor in named_tensors(batch) if self._watches else ():
            is_integer = tensor.dtype in (torch.int64, torch.int32)
            if not is_integer or tensor.dim() == 0 or tensor.device.type != "cpu":
                continue
            counts = (tensor == _IGNORED).reshape(len(tensor), -1).sum(1)
            if counts.numel() and bool((counts != counts[0]).any()):
                self._watches = False
                return (
                    f"{name} has labels of {_IGNORED}, {int(counts.min())} to {int(counts.max())} in a sample. "
                    "If the loss ignores them, it is a mean over the others, but micro-batches weigh by their "
                    "samples, which is not the training of the whole batch. Pass "
                    f"Job(count=lambda batch: ({name} != {_IGNORED}).sum())."
                )
        return None
