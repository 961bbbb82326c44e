"""How much training waited for its data, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from brimful.results import WAITING_FRACTION, DataLoading, StepRecord, steady_steps, waiting_fraction


def feeding_lines(
    steps: Sequence[StepRecord], loading: DataLoading | None, *, on_gpu: bool
) -> Iterator[tuple[str, str]]:
    """Pairs of a label and a line on the data loading of a run: time spent waiting, and what would help."""
    waited = waiting_fraction(steps)
    if waited >= WAITING_FRACTION:
        help_text = "" if loading is None else f": {_what_helps(steps, loading)}"
        yield "waited for data", f"{waited:.0%} of the time{help_text}"
    if loading is not None and loading.workers is not None and on_gpu and not loading.pins_memory:
        yield (
            "copies of data",
            "pin_memory=True of the DataLoader (--pin-memory) lets them run beside other work",
        )


def _what_helps(steps: Sequence[StepRecord], loading: DataLoading) -> str:
    if loading.workers is None:
        return "a DataLoader with workers (num_workers=…) reads ahead"
    needed = loading.needed_workers(steps)
    if needed is None:
        return _what_helps_at_the_start(steps, loading)
    if needed <= loading.processors:
        return f"{needed} workers would keep up; there are {loading.workers}"
    return (
        f"{needed} workers would keep up if reading computes little (there are {loading.workers}); with "
        f"{loading.processors} processors, else do less work for each sample, or do it once and keep it"
    )


def _what_helps_at_the_start(steps: Sequence[StepRecord], loading: DataLoading) -> str:
    """Advice if training did not wait within epochs, or there are too few steps to know."""
    if not steady_steps(steps):
        return "more workers (num_workers=…), or less work for each sample"
    if loading.workers and not loading.persistent_workers:
        return (
            "mostly while workers start in each epoch: persistent_workers=True starts them once (a resumed run "
            "is then exact only if reading draws no random numbers)"
        )
    return "mostly for the first batch of each epoch"
