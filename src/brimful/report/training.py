"""A training run as text: predicted beside measured, and beside the baseline if that was run too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from brimful.report.data_loading import feeding_lines
from brimful.report.layout import Part, Remark, Report, Row, as_text
from brimful.report.measurements import gauges, predicted_beside_measured
from brimful.results import StopReason, TrainingResult
from brimful.results.measurement import busy_text
from brimful.utils.quantities import format_bytes, format_rates, format_seconds

_SPARK_CELLS = 40
_LABEL_CELLS = 20
_MUCH_SLOWER = 1.25
"""Measured against predicted: of 95 on an idle machine none took so much (benchmarks/plan/measured.py)."""

_LISTED_EPOCHS = 5
"""Epochs whose times are listed one by one. A choice."""
_SPARKS = "▁▂▃▄▅▆▇█"


def training_text(result: TrainingResult, plain: TrainingResult | None = None) -> str:
    """Text of a training run: predicted beside measured, losses, and the run directory.

    `plain` is the same job trained without a plan from the same seed, if that was run.
    """
    return as_text(training_report(result, plain))


def training_report(result: TrainingResult, plain: TrainingResult | None = None) -> Report:
    """A training run, and beside it the baseline, as in `training_text`."""
    steps = len(result.steps)
    heading = f"{result.job} on {result.device}: {steps} step{'s' if steps != 1 else ''}{_ended(result)}"
    return Report(heading=heading, parts=tuple(_parts(result, plain)), label_cells=_LABEL_CELLS)


def summary_report(result: TrainingResult) -> Report:
    """Steps, losses, predicted beside measured, and notes: what `print(result)` shows."""
    losses = f", loss {result.losses[0]:.4g} to {result.losses[-1]:.4g}" if result.losses else ""
    return Report(
        heading=f"{len(result.steps)} steps{_ended(result)}{losses}",
        parts=(
            *gauges(result, result.budget_bytes),
            predicted_beside_measured(result),
            *_not_measured(result),
            *_times(result),
            *(Row("note", note) for note in result.notes),
            *((Row("run directory", _run_directory(result)),) if _is_unfinished(result) else ()),
        ),
        label_cells=_LABEL_CELLS,
    )


def training_document(result: TrainingResult, plain: TrainingResult | None = None) -> dict[str, Any]:
    """The run, and what sets it apart from the baseline, as JSON."""
    document = result.to_json()
    document["plain"] = None if plain is None else plain.to_json()
    document["largest_loss_difference"] = None if plain is None else largest_loss_difference(result, plain)
    return document


def largest_loss_difference(result: TrainingResult, plain: TrainingResult) -> float:
    """Largest difference between two loss curves, over the steps that both have."""
    pairs = zip(result.losses, plain.losses, strict=False)
    return max((abs(ours - theirs) for ours, theirs in pairs), default=0.0)


def sparkline(values: Sequence[float], low: float, high: float, cells: int = _SPARK_CELLS) -> str:
    """A curve in one line of text, each cell the mean of its share of the finite values."""
    values = [value for value in values if math.isfinite(value)]
    count = len(values)
    cells = min(cells, count)
    means = []
    for cell in range(cells):
        part = values[cell * count // cells : (cell + 1) * count // cells]
        means.append(sum(part) / len(part))
    span = (high - low) or 1.0
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[min(max(round((mean - low) / span * top), 0), top)] for mean in means)


def _parts(result: TrainingResult, plain: TrainingResult | None) -> Iterator[Part]:
    yield Row("settings", result.settings.describe())
    if result.certificate is not None:
        yield from (Remark("", str(comparison)) for comparison in result.certificate.comparisons)
    yield predicted_beside_measured(result)
    yield from _not_measured(result)
    yield from _slower_cpu(result)
    yield from _budget(result)
    yield from _throughput(result)
    yield from _times(result)
    yield from _recoveries(result)
    yield from (Row("note", note) for note in result.notes)
    for label, line in feeding_lines(result.steps, result.data_loading, on_gpu=result.device != "cpu"):
        yield Row(label, line)
    yield from _plain_rows(result, plain)
    yield from _curves(result, plain)
    yield from _validation(result, plain)
    if result.run_dir is not None or _is_unfinished(result):
        yield Row("run directory", _run_directory(result))


def _ended(result: TrainingResult) -> str:
    return "" if result.stopped_because is StopReason.FINISHED else f", {result.stopped_because}"


def _is_unfinished(result: TrainingResult) -> bool:
    return result.stopped_because in (StopReason.INTERRUPTED, StopReason.TERMINATED)


def _run_directory(result: TrainingResult) -> str:
    """Where the run is, and how to continue it if it was stopped."""
    if result.run_dir is None:
        return "none: nothing is saved, and the run cannot be resumed"
    how = "; resume it with resume=True (--resume)" if _is_unfinished(result) else ""
    return f"{result.run_dir}{how}"


def _not_measured(result: TrainingResult) -> Iterator[Row]:
    """Why the peak or the step time was not measured."""
    if result.measured_peak_allocated_bytes is None:
        samples = result.settings.global_batch_size
        yield Row(
            "peak not measured",
            "it is measured in a step after the first of a launch, with a full batch of "
            f"{samples} samples; this launch had none",
        )
    if result.measured_step_seconds is None:
        yield Row(
            "time not measured",
            "the first step and the one whose memory is measured are slower and are not "
            "timed; train for 3 steps or more",
        )


def _slower_cpu(result: TrainingResult) -> Iterator[Row]:
    """Why a step on a CPU may have taken much longer than was predicted."""
    predicted, measured = result.predicted_step_seconds, result.measured_step_seconds
    found = result.self_correction
    if found is not None and (busy := busy_text(found.core_wait_fraction)):
        yield Row("busy machine", busy)
    elif result.device == "cpu" and predicted and measured and measured > _MUCH_SLOWER * predicted:
        yield Row("", "times on a CPU hold while nothing else, such as workers, computes on it")


def _budget(result: TrainingResult) -> Iterator[Row]:
    peak = result.measured_peak_device_bytes or result.measured_peak_reserved_bytes
    if result.budget_bytes is not None and peak is not None:
        within = "within" if peak <= result.budget_bytes else "OVER"
        used = f"{peak / result.budget_bytes:.1%} of it used"
        yield Row("budget", f"{format_bytes(result.budget_bytes)}: {within}, {used}")


def _recoveries(result: TrainingResult) -> Iterator[Row]:
    """How often memory ran out, and to what that led."""
    if not result.recoveries:
        return
    times = len(result.recoveries)
    lost = format_seconds(sum(recovery.seconds for recovery in result.recoveries))
    changed = [recovery for recovery in result.recoveries if recovery.before != recovery.after]
    how = f"; in the end {changed[-1].after}" if changed else ""
    yield Row("memory ran out", f"{times} time{'s' if times > 1 else ''}, {lost} lost, no step{how}")


def _throughput(result: TrainingResult) -> Iterator[Row]:
    """Samples and what the job counts per second, waiting included, and the part of the device's peak."""
    samples, counted = result.samples_per_second, result.terms_per_second
    said = [] if samples is None or counted is None else format_rates(samples, counted, result.loss_unit)
    if result.measured_mfu is not None:
        predicted = "" if result.predicted_mfu is None else f" ({result.predicted_mfu:.0%} predicted)"
        said.append(f"MFU {result.measured_mfu:.0%}{predicted}")
    if said:
        yield Row("throughput", f"{', '.join(said)}; mean, waiting for data included")


def _times(result: TrainingResult) -> Iterator[Row]:
    """The time of the epochs, and of the whole run."""
    epochs = [epoch.seconds for epoch in result.epochs]
    known = [seconds for seconds in epochs if seconds is not None]
    if len(epochs) == 1 and known:
        yield Row("epoch", format_seconds(known[0]))
    elif 1 < len(epochs) <= _LISTED_EPOCHS:
        listed = (f"{'not known' if each is None else format_seconds(each)}" for each in epochs)
        yield Row("epochs", f"{len(epochs)}: {', '.join(listed)}")
    elif known and len(epochs) == len(known):
        mean = format_seconds(statistics.fmean(known))
        yield Row(
            "epochs",
            f"{len(epochs)}: first {format_seconds(known[0])}, mean {mean}, last {format_seconds(known[-1])}",
        )
    if result.seconds is not None:
        validating = sum(validation.seconds for validation in result.validations)
        more = f"; validation {format_seconds(validating)} more" if result.validations else ""
        yield Row("training time", f"{format_seconds(result.seconds)}, waiting for data included{more}")


def _plain_rows(result: TrainingResult, plain: TrainingResult | None) -> Iterator[Remark]:
    if plain is None or plain.measured_peak_allocated_bytes is None:
        return
    line = f"the baseline took {format_bytes(plain.measured_peak_allocated_bytes)}"
    if plain.measured_step_seconds is not None and result.measured_step_seconds is not None:
        ratio = result.measured_step_seconds / plain.measured_step_seconds
        line += f" and {format_seconds(plain.measured_step_seconds)} a step; "
        compared = [run.self_correction for run in (result, plain) if run.self_correction is not None]
        is_busy = any(busy_text(each.core_wait_fraction) for each in compared)
        line += (
            "the times are of a busy machine, so their ratio is not shown"
            if is_busy
            else f"the plan took {ratio:.2f} × that time"
        )
    yield Remark("", line)


def _curves(result: TrainingResult, plain: TrainingResult | None) -> Iterator[Row]:
    curves = (
        [("loss", result.losses)]
        if plain is None
        else [("loss, plain", plain.losses), ("loss, plan", result.losses)]
    )
    every = [loss for _name, losses in curves for loss in losses if math.isfinite(loss)]
    for name, losses in curves:
        if losses and every:
            spark = sparkline(losses, min(every), max(every))
            yield Row(name, f"{losses[0]:.4f} → {losses[-1]:.4f}  {spark}")
    if plain is not None and plain.losses and result.losses:
        difference = largest_loss_difference(result, plain)
        said = "none: equal to the last bit" if difference == 0 else f"{difference:.2g} at most"
        yield Row("difference", f"{said}, over {min(len(plain.losses), len(result.losses))} steps")
        if difference:
            yield from (Row("", reason) for reason in _why_different(result, plain))


def _why_different(result: TrainingResult, plain: TrainingResult) -> Iterator[str]:
    """Possible causes of different losses, which training amplifies."""
    own, others = result.settings, plain.settings
    if own.gradient_accumulation_steps != others.gradient_accumulation_steps:
        yield "the batch is split: sums in another order, and random layers such as dropout draw other numbers"
    if own.optimizer_implementation is not others.optimizer_implementation:
        how = own.optimizer_implementation or "default"
        yield f"the {how} optimizer may round in another order"
    if own.optimizer != others.optimizer:
        yield f"the optimizer is {own.optimizer}, which computes other updates"
    if own.precision is not others.precision:
        yield f"the precision is {own.precision}"
    if own.offload_optimizer is not others.offload_optimizer:
        yield "the optimizer is on the host, whose kernels may round otherwise"
    if own.chunked_loss is not None:
        yield "the loss is computed in chunks: sums in another order"


def _validation(result: TrainingResult, plain: TrainingResult | None) -> Iterator[Row]:
    if not result.validations:
        return
    last = result.validations[-1]
    parts = [f"loss {last.loss:.4f}", *(f"{name} {value:.4f}" for name, value in last.metrics.items())]
    line = f"{', '.join(parts)} ({last.samples} samples)"
    if plain is not None and plain.validations:
        other = plain.validations[-1]
        line += f"; plain: loss {other.loss:.4f}"
        line += "".join(f", {name} {value:.4f}" for name, value in other.metrics.items())
    yield Row("validation", line)
