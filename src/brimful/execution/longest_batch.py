"""A job whose batches differ in length, predicted for the longest of several draws and of its data.

Start reading at `with_longest_batch`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from brimful.batches import is_real, layout_of, make_batch, sample_sizes
from brimful.execution.longest_data import LongestRead, longest_of_data
from brimful.execution.random_state import RandomState
from brimful.job import Batch, Data, Job
from brimful.results import SampleSize, describe_growth, larger_entries
from brimful.utils.one_at_a_time import one_at_a_time

FEW_SAMPLES = 2
"""Samples of a batch that is only compared with others: with few, the longest of them varies most."""
MOST_FEW, FEW_SECONDS = 32, 0.05
"""Such draws, and the time after which no more are made: choices. A text that one sample in 20 is as long as is
then missed in 4 % of jobs."""
MOST_DRAWS, DRAW_SECONDS = 8, 0.5
"""Draws of a whole batch, where draws differ: choices."""

ADVICE = (
    "If training has longer ones, name the longest batch: "
    "Job(data=lambda: Data(train=…, longest=lambda n: …)), or let batch(n) return it"
)
"""How a user of a `Job` names the longest batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestBatch:
    """A job, and the lengths that its predictions are for."""

    job: Job
    """The job as given; its `batch` is the longest batch that was found, where batches differ."""
    sizes: tuple[SampleSize, ...] = ()
    """Sizes of the batch that is predicted; empty if the job makes none."""
    tokens_per_sample: float | None = None
    """Tokens of each of its samples, padding included; None if they are not known."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """Batches that `Job.batch` made."""

    largest: Batch
    high: tuple[SampleSize, ...]
    low: tuple[SampleSize, ...]
    count: int

    def elements(self) -> float:
        """Elements for each sample of the largest batch."""
        return _elements(self.high)


def with_longest_batch(job: Job, samples: int) -> LongestBatch:
    """Find whether batches of a job differ in more than their samples, and use the longest.

    `job.batch` is drawn a few times, always with the same random numbers. The job's data, if it has any, are
    read within bounds, unless they name the longest batch. `samples` is the size of a global batch, or of a
    rank's part. The result has the job itself if all draws are alike and no batch of the data is larger.
    """
    try:
        with one_at_a_time(), RandomState.kept():
            draws = _draws_of(job, samples)
            tokens = _tokens_per_sample(job, draws.largest, draws.high, samples)
    except Exception:  # raised by the job or its batch: the step itself explains it
        return LongestBatch(job=job)
    found = LongestBatch(
        job=_with_draw(job, draws, samples),
        sizes=draws.high,
        tokens_per_sample=tokens,
        notes=_draw_notes(draws),
    )
    if job.data is None:
        return found
    try:
        with RandomState.kept():
            data = job.data() if callable(job.data) else job.data
            read = _read(data, samples, job) if isinstance(data, Data) else None
            return found if read is None else _with_read(found, read, samples)
    except Exception as error:  # data may only be where training is
        note = f"the data were not read for their lengths: {type(error).__name__}: {error}"
        return replace(found, notes=(*found.notes, note))


def _draws_of(job: Job, samples: int) -> _Draws:
    """Draw batches of few samples until they differ or enough are alike; then whole batches, if they differ."""
    if is_real(job.batch):
        return _compared([make_batch(job, samples)], job, samples)
    _seed()
    few = min(FEW_SAMPLES, samples)
    try:
        first = make_batch(job, few)
    except Exception:  # it may want an even number, or make one number alone
        few, first = samples, make_batch(job, samples)
    if few != samples and layout_of(job, whole=few, expected=few).why_whole(first) is not None:
        few, first = samples, make_batch(job, samples)  # its sizes are not those of samples
    found = _compared([first, *_repeated(partial(make_batch, job, few), MOST_FEW, FEW_SECONDS)], job, few)
    if describe_growth(found.low, found.high) is None or few == samples:
        return found
    drawn = list(_repeated(partial(make_batch, job, samples), MOST_DRAWS, DRAW_SECONDS))
    whole, layout = _compared(drawn, job, samples), layout_of(job, whole=samples, expected=samples)
    can_repeat = layout.why_whole(drawn[0]) is None and not layout.samples_vary_in_size(drawn[0])
    if not can_repeat:
        return whole
    return replace(max(found, whole, key=_Draws.elements), low=found.low, count=found.count + whole.count)


def _repeated(draw: Callable[[], Batch], most: int, seconds: float) -> Iterator[Batch]:
    """Make draws, at least one, as long as there is time."""
    began = time.perf_counter()
    for _ in range(most):
        yield draw()
        if time.perf_counter() - began > seconds:
            return


def _compared(draws: list[Batch], job: Job, samples: int) -> _Draws:
    layout = layout_of(job, whole=samples, expected=samples)
    sizes = [sample_sizes(batch, layout) for batch in draws]
    totals = [_elements(each) for each in sizes]
    most, least = totals.index(max(totals)), totals.index(min(totals))
    return _Draws(largest=draws[most], high=sizes[most], low=sizes[least], count=len(draws))


def _elements(sizes: tuple[SampleSize, ...]) -> float:
    return sum(size.elements for size in sizes)


def _with_draw(job: Job, draws: _Draws, samples: int) -> Job:
    if describe_growth(draws.low, draws.high) is None:
        return job
    return _with_batch(job, draws.largest, samples)


def _with_batch(job: Job, batch: Batch, samples: int) -> Job:
    """The job with one batch, resized to any size; one that cannot be split is used at its own size only."""
    layout = layout_of(job, whole=samples, expected=samples)
    own = job.batch

    def made(n: int) -> Batch:
        if layout.why_whole(batch) is None:
            return layout.resize(batch, n)
        return batch if n == samples or not callable(own) else own(n)

    return replace(job, batch=made)


def _draw_notes(draws: _Draws) -> tuple[str, ...]:
    differs = describe_growth(draws.low, draws.high)
    if differs is None:
        return ()
    place, low, high = differs
    return (
        f"Batches differ: {place} is {low} to {high} in {draws.count} draws of Job.batch. "
        f"Predicted for {high}. {ADVICE}.",
    )


def _read(data: Data, samples: int, job: Job) -> LongestRead | None:
    layout = layout_of(job, whole=samples)
    if data.longest is None:
        return longest_of_data(data.train, samples, layout)
    batch: Any = data.longest(samples) if callable(data.longest) else data.longest
    sizes = sample_sizes(batch, layout)
    return LongestRead(batch=batch, high=sizes, low=sizes, read=0, total=None)


def _with_read(found: LongestBatch, read: LongestRead, samples: int) -> LongestBatch:
    """Combine what was found with a batch of the data, which is used if it is larger."""
    is_larger = bool(larger_entries(read.high, found.sizes))
    sizes = read.high if is_larger else found.sizes
    notes = read_notes(read, sizes, ADVICE)
    if is_larger and not notes:
        place, low, high = describe_growth(found.sizes, read.high) or ("", "", "")
        notes = (f"Predicted for {high} in {place}, as in Job.data; Job.batch makes {low}.",)
    if not is_larger:
        return replace(found, notes=notes or found.notes)
    return LongestBatch(
        job=_with_batch(found.job, read.batch, samples),
        sizes=sizes,
        tokens_per_sample=_tokens_per_sample(found.job, read.batch, sizes, samples),
        notes=notes or found.notes,
    )


_TOKEN_IDS = ('["input_ids"]', ".input_ids")
"""How the name of an entry with token ids ends, as the models of Transformers name them."""


def _tokens_per_sample(job: Job, batch: Batch, sizes: tuple[SampleSize, ...], samples: int) -> float | None:
    """Tokens of each sample of a batch, padding included: its `input_ids`, else what the job counts as tokens.

    None if there are neither. `sizes` are those of the batch, `samples` its samples if they cannot be counted.
    """
    ids = [size.elements for size in sizes if size.name.endswith(_TOKEN_IDS)]
    if ids:
        return sum(ids) or None
    if job.count is None or job.counted != "tokens":
        return None
    return float(job.count(batch)) / layout_of(job, whole=samples).count(batch) or None


def read_notes(read: LongestRead, predicted: tuple[SampleSize, ...], advice: str) -> tuple[str, ...]:
    """Note the lengths that a prediction is for, if batches of data differ; one note, or none.

    `predicted` are sizes of the batch that is predicted; `advice` says how a longer batch is named, without its
    period.
    """
    differs = describe_growth(read.low, predicted)
    if differs is None or describe_growth(read.low, read.high) is None:
        return ()
    place, low, high = differs
    more = "" if read.is_whole else f" {advice}."
    found = f"{place} is {low} to {high} in {read.extent} read"
    return (f"Batches differ: {found}. Predicted for {high}.{more}",)


def _seed() -> None:
    """Seed the draws alike for each prediction, so that a plan and a measurement are of the same batch."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
