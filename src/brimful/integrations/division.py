"""Whether the batches of a trainer may be divided: checked when it is planned, and in the first step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from brimful.errors import EquivalenceError
from brimful.job import Batch, Job
from brimful.profiling import check_planned_split, check_split
from brimful.profiling.splitting import NOT_PLANNED
from brimful.results.equivalence import LABELS_WAY_OUT, SPLITTING_WAY_OUT
from brimful.settings import Settings
from brimful.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a trainer divides its batches."""

    whole: int
    """Samples of a batch of the loader."""
    whose: str
    """"trainer" or "loader", in messages."""
    weighs_labels: bool = False
    """Whether micro-batches weigh by their labels other than -100."""

    def check_planned(self, job: Job, settings: Settings, baseline: Trace) -> bool:
        """Check before training what `check_first` checks in the first step.

        The count of `job` is that by which the trainer weighs micro-batches; `baseline` is training without a
        plan. Returns whether a batch is known to be what its parts are; raises `EquivalenceError` if it is not.
        """
        if settings.micro_batch_size >= self.whole:
            return True
        with self._saying_how_to_keep_it_whole():
            return check_planned_split(job, self._divided(settings), baseline, weighs_labels=self.weighs_labels)

    def check_first(self, job: Job, model: nn.Module, settings: Settings, batch: Batch) -> bool:
        """Check, on a few samples of the first batch, that its loss is made of those of its micro-batches.

        The count of `job` is that by which the trainer weighs micro-batches. The model is in training; neither
        it nor random generators are changed. Returns whether that is decided: a batch of few samples decides
        nothing. Raises `EquivalenceError` if the loss is not made of those of the micro-batches.
        """
        with self._saying_how_to_keep_it_whole():
            return check_split(job, model, self._divided(settings), batch, weighs_labels=self.weighs_labels)

    def _divided(self, settings: Settings) -> Settings:
        """The plan's settings for a step of one batch."""
        return replace(settings, gradient_accumulation_steps=-(-self.whole // settings.micro_batch_size))

    @contextmanager
    def _saying_how_to_keep_it_whole(self) -> Iterator[None]:
        try:
            yield
        except EquivalenceError as error:
            found = re.sub(r': pass Job\(reduction="\w+"\)', "", str(error))
            for of_jobs in (SPLITTING_WAY_OUT, LABELS_WAY_OUT):
                found = found.replace(of_jobs, _NO_MEAN)
            found = found.replace(NOT_PLANNED, "Nothing was planned.")
            way_out = f"To keep the {self.whose}'s batches whole, pass micro_batch_size={self.whole} to plan()."
            raise EquivalenceError(f"{found} {way_out}") from None


_NO_MEAN = "The loss of a batch is not made of those of its micro-batches."
