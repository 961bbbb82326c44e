"""A predicted training run for a reader."""

from __future__ import annotations

from collections.abc import Iterator

from brimful.report.layout import Report, Row
from brimful.results import SECONDS_PER_HOUR, WholeRun
from brimful.utils.quantities import (
    format_hours,
    format_interval,
    format_price,
    format_rate,
    format_seconds,
)

NOT_INCLUDED = "waiting for data, evaluation, checkpoints"


def whole_run_report(run: WholeRun) -> Report:
    """Steps, time, speed and cost of a run."""
    return Report(heading=length_text(run), parts=tuple(_rows(run)))


def length_text(run: WholeRun) -> str:
    """The length of a run: "run of 3 epochs, 150,000 samples: 4,689 steps of 32"."""
    lengths = [] if run.epochs is None else [f"{run.epochs:,} epoch{'s' if run.epochs > 1 else ''}"]
    lengths.append(f"{run.samples:,} samples")
    if run.tokens is not None:
        lengths.append(f"{run.tokens:,} tokens")
    return f"run of {', '.join(lengths)}: {run.steps:,} steps of {run.global_batch_size:,}"


def _rows(run: WholeRun) -> Iterator[Row]:
    yield Row("predicted time", _time(run))
    rates = [format_rate(run.predicted_samples_per_second)]
    if run.predicted_tokens_per_second is not None:
        rates.append(format_rate(run.predicted_tokens_per_second, "tokens"))
    yield Row("speed", ", ".join(rates))
    if run.predicted_cost is not None and run.price_per_hour is not None:
        devices = f", {run.world_size} devices" if run.world_size > 1 else ""
        yield Row("predicted cost", f"{_cost(run)}, at {format_price(run.price_per_hour)} an hour{devices}")
    yield Row("not included", NOT_INCLUDED)


def _time(run: WholeRun) -> str:
    """The time of a run with its interval: "14.2 h (11.8–17.1 h)"."""
    if run.predicted_seconds_interval is None:
        return _hours(run.predicted_seconds)
    return f"{_hours(run.predicted_seconds)} ({format_interval(*map(_hours, run.predicted_seconds_interval))})"


def _hours(seconds: float) -> str:
    return f"{format_hours(seconds)} h" if seconds >= SECONDS_PER_HOUR else format_seconds(seconds)


def _cost(run: WholeRun) -> str:
    cost = format_price(run.predicted_cost or 0.0)
    if run.predicted_cost_interval is None:
        return cost
    return f"{cost} ({format_interval(*map(format_price, run.predicted_cost_interval))})"
