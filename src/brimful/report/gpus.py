"""A survey of GPUs as a table for a reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from brimful.planner.gpus import FastestFit, GpuFit, GpuSurvey, sort_fits
from brimful.report.whole_run import NOT_INCLUDED, length_text
from brimful.results import WholeRun
from brimful.settings import Settings
from brimful.utils.quantities import format_bytes, format_hours, format_price

_NAME = 31
_SIZE = 11
_USUAL = 12
_SPEED = 24
_COST = 12
_HOURS = 22
_RUN_COST = 10
_LISTED_NOTES = 2


def gpus_text(fits: GpuSurvey) -> str:
    """A table of GPUs: those that fit, in the survey's order or by speed; then the others by what they lack."""
    listed = list(fits) if fits.sort is not None else sort_fits(fits, "speed")
    fitting = [fit for fit in listed if fit.best.settings is not None]
    others = [fit for fit in listed if fit.best.settings is None]
    others.sort(key=lambda fit: fit.predicted_smallest_peak_device_bytes - fit.capacity_bytes)
    lines = _lines if not fitting or fitting[0].best.run is None else _run_lines
    return "\n".join(lines(fits, fitting, others))


def _run_lines(fits: GpuSurvey, fitting: Sequence[GpuFit], others: Sequence[GpuFit]) -> Iterator[str]:
    """Lines on a whole run on each GPU."""
    runs = [(fit, fit.best.run) for fit in fitting]
    has_prices = any(fit.price_per_hour is not None for fit in fits)
    yield f"{fits.job}: fits {len(fitting)} of {len(fits)} GPUs"
    yield from (f"  {length_text(run)}" for _, run in runs[:1] if run is not None)
    name = max(len(fit.device) for fit in fits)
    cost = f"{'cost':>{_RUN_COST}}" if has_prices else ""
    yield f"  {'GPU':<{name}}{'memory':>10}{'in':>6}{'peak':>10} {'hours (90 %)':>{_HOURS}}{cost}"
    for fit, run in runs:
        assert run is not None
        assert fit.best.settings is not None
        columns = (
            f"{format_bytes(fit.capacity_bytes):>10}{fit.best.settings.precision:>6}"
            f"{format_bytes(fit.best.predicted_peak_device_bytes or 0):>10} {_hours(run):>{_HOURS}}"
        )
        price = "no price" if run.predicted_cost is None else format_price(run.predicted_cost)
        yield f"  {fit.device:<{name}}{columns}{price if has_prices else '':>{_RUN_COST}}".rstrip()
    for fit in others:
        least = format_bytes(fit.predicted_smallest_peak_device_bytes)
        change = f"; fits with {fit.change}" if fit.change else ""
        yield f"  {fit.device:<{name}}{format_bytes(fit.capacity_bytes):>10}  needs {least} or more{change}"
    yield "  in: the precision one trains in by default on this GPU, or the one asked for"
    yield "  peak: of the fastest way that fits; `brimful plan` may find a faster one"
    yield f"  not included: {NOT_INCLUDED}"
    yield from _notes_of_gpus(fits)


def _hours(run: WholeRun) -> str:
    """The hours of a run with their interval: "14.2 (11.8–17.1)"."""
    if run.predicted_seconds_interval is None:
        return format_hours(run.predicted_seconds)
    low, high = map(format_hours, run.predicted_seconds_interval)
    return f"{format_hours(run.predicted_seconds)} ({low}–{high})"


def _lines(fits: GpuSurvey, fitting: Sequence[GpuFit], others: Sequence[GpuFit]) -> Iterator[str]:
    """Lines on a step on each GPU."""
    asked = sorted({str(fit.settings.precision) for fit in fitting if fit.settings is not None})
    how = "whole or in micro-batches, all kept or all recomputed"
    how += f", in {' or '.join(asked)}" if asked else ""
    has_usual = any(fit.usual is not None for fit in fits)
    has_prices = any(fit.price_per_hour is not None for fit in fits)
    yield f"{fits.job}, global batch {fits.global_batch_size}: fits {len(fitting)} of {len(fits)} GPUs, {how}"
    yield _heading(asked[0] if asked else "fp32", has_usual=has_usual, has_prices=has_prices)
    for fit in fitting:
        yield _row(fit, has_usual=has_usual, has_prices=has_prices)
    for fit in others:
        change = (
            f"with {fit.change}, or as `brimful plan` may find" if fit.change else "as `brimful plan` may find"
        )
        least = format_bytes(fit.predicted_smallest_peak_device_bytes)
        columns = f"{_first_columns(fit)}{'–':>{_SIZE}}{'does not fit':>{_SPEED}}"
        yield f"{columns}  smallest peak {least}; fits {change}"
    yield from _notes(has_usual=has_usual, has_prices=has_prices)
    yield from _notes_of_gpus(fits)


def _heading(asked: str, *, has_usual: bool, has_prices: bool) -> str:
    cost = f"{'per 1M':>{_COST}}" if has_prices else ""
    speed = "samples/s (90 %)"
    usual = f"{'usual':>8}{'usual peak':>{_USUAL}}{f'usual {speed}':>{_SPEED}}" if has_usual else ""
    of_asked = f"{asked} " if has_usual else ""
    first = f"  {'GPU':<{_NAME}}{'memory':>9}{'baseline':>{_SIZE}}{f'{of_asked}peak':>{_SIZE}}"
    return f"{first}{of_asked + speed:>{_SPEED}}{usual}{cost}  how"


def _first_columns(fit: GpuFit) -> str:
    plain = format_bytes(fit.predicted_plain_peak_device_bytes)
    return f"  {fit.device:<{_NAME}}{format_bytes(fit.capacity_bytes):>9}{plain:>{_SIZE}}"


def _row(fit: GpuFit, *, has_usual: bool, has_prices: bool) -> str:
    row = _first_columns(fit) + _peak_and_speed(fit, _SIZE)
    if has_usual:
        row += f"{fit.usual.precision if fit.usual else '':>8}{_peak_and_speed(fit.usual or fit, _USUAL)}"
    if has_prices:
        cost = fit.best.predicted_cost_per_million_samples
        row += f"{'no price' if cost is None else format_price(cost):>{_COST}}"
    return f"{row}  {_how(fit)}"


def _peak_and_speed(fit: FastestFit, width: int) -> str:
    if fit.predicted_peak_device_bytes is None:
        return f"{'–':>{width}}{'does not fit':>{_SPEED}}"
    return f"{format_bytes(fit.predicted_peak_device_bytes):>{width}}  {_speed(fit):>{_SPEED - 2}}"


def _speed(fit: FastestFit) -> str:
    """A speed with its interval: "412 (350–480)"."""
    interval = fit.predicted_samples_per_second_interval
    speed = _number(fit.predicted_samples_per_second or 0.0)
    return speed if interval is None else f"{speed} ({_number(interval[0])}–{_number(interval[1])})"


def _number(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _how(fit: GpuFit) -> str:
    """How the job runs in each precision, in the order of the columns: "fp32, bf16: baseline"."""
    tried = [fit.settings, None if fit.usual is None else fit.usual.settings]
    precisions: dict[str, list[str]] = {}
    for settings in tried:
        if settings is not None:
            how = "baseline" if _is_plain(settings) else settings.describe()
            named = precisions.setdefault(how.removeprefix(f"{settings.precision}, "), [])
            if str(settings.precision) not in named:
                named.append(str(settings.precision))
    return "; ".join(f"{', '.join(named)}: {how}" for how, named in precisions.items())


def _is_plain(settings: Settings) -> bool:
    """Whether the whole batch is one micro-batch and nothing else changes."""
    return not settings.units and settings.gradient_accumulation_steps == 1


def _notes(*, has_usual: bool, has_prices: bool) -> Iterator[str]:
    yield (
        "  baseline: peak of the whole batch at once, everything kept. peak: of the fastest way that fits. "
        "(90 %): the interval that covers the measured speed with that probability."
    )
    if has_usual:
        yield (
            "  fp32 is strict: TF32 is off for matmuls, as in PyTorch, and for convolutions and recurrent "
            "layers, where PyTorch uses it by default. --precision tf32 permits it in all of them."
        )
        yield (
            "  usual: what one trains in by default: bf16 autocast, or fp16 on tensor cores without bf16, else "
            "fp32. Speed and cost are compared by it."
        )
    if has_prices:
        yield "  per 1M: price of a million samples in the usual precision, or the one asked for"


def _notes_of_gpus(fits: GpuSurvey) -> Iterator[str]:
    notes = [fit.note for fit in fits if fit.note is not None]
    yield from (f"  {note}" for note in notes[:_LISTED_NOTES])
    if len(notes) > _LISTED_NOTES:
        yield f"  and {len(notes) - _LISTED_NOTES} more GPUs that not all builds of torch have kernels for"
    unsure = [fit.device for fit in fits if fit.confidence == "low"]
    if unsure:
        yield f"  figures of low confidence: {', '.join(unsure)}"
    yield from (f"  {note}" for note in fits.notes)
