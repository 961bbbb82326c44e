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
from brimful.results.equivalence import SPLITTING_WAY_OUT
from brimful.settings import Settings
from brimful.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a trainer divides its batches."""

    whole: int
    """Samples of a batch of its loader."""
    whose: str
    """"trainer" or "loader", in messages."""
    weighs_labels: bool = False
    """Whether micro-batches weigh by their labels other than -100."""

    def check_planned(self, job: Job, settings: Settings, baseline: Trace) -> bool:
        """Check before training what `check_first` checks in the first step.

        Args:
            job: Its count is that by which the trainer weighs micro-batches.
            settings: The plan's settings.
            baseline: Training without a plan.

        Returns:
            Whether a batch is known to be what its parts are.

        Raises:
            EquivalenceError: It is not.
        """
        if settings.micro_batch_size >= self.whole:
            return True
        with self._saying_how_to_keep_it_whole():
            return check_planned_split(job, self._divided(settings), baseline, weighs_labels=self.weighs_labels)

    def check_first(self, job: Job, model: nn.Module, settings: Settings, batch: Batch) -> bool:
        """Check, on a few samples of the first batch, that its loss is made of those of its micro-batches.

        Args:
            job: As for `check_planned`.
            model: In training; neither it nor random generators are changed.
            settings: The plan's settings.
            batch: One of the loader.

        Returns:
            Whether that is decided; a batch of few samples decides nothing.

        Raises:
            EquivalenceError: It is not.
        """
        with self._saying_how_to_keep_it_whole():
            return check_split(job, model, self._divided(settings), batch, weighs_labels=self.weighs_labels)

    def _divided(self, settings: Settings) -> Settings:
        """Settings of which a step is one batch."""
        return replace(settings, gradient_accumulation_steps=-(-self.whole // settings.micro_batch_size))

    @contextmanager
    def _saying_how_to_keep_it_whole(self) -> Iterator[None]:
        try:
            yield
        except EquivalenceError as error:
            found = re.sub(r': pass Job\(reduction="\w+"\)', "", str(error))
            found = found.replace(SPLITTING_WAY_OUT, _NO_MEAN).replace(NOT_PLANNED, "Nothing was planned.")
            way_out = f"To keep the {self.whose}'s batches whole, pass micro_batch_size={self.whole} to plan()."
            raise EquivalenceError(f"{found} {way_out}") from None


_NO_MEAN = "The loss of a batch is not made of those of its micro-batches."
