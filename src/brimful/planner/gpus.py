"""One job on every GPU of the table: whether it fits, how, how fast, what it costs, and what would make it fit.

GPUs that decide alike run the same ops, so a few captures serve the whole table: what differs from one card to
the next is then its memory, its rates, its context, and the staging of reductions, which is computed for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Protocol, Self, Unpack

from brimful.cost import StepTimer, time_interval
from brimful.devices import Device, torch_builds_note
from brimful.errors import BatchError, CaptureError, UnknownNameError, UsageError
from brimful.options import RunLength, RunLengthKeywords, takes_options
from brimful.planner.cached_method import cached_method
from brimful.planner.on_gpus import AllocationsOnGpus
from brimful.prediction.estimate import MARGIN_FRACTION
from brimful.prediction.estimator import SCALED_SIZES, DerivedTraces
from brimful.results import SECONDS_PER_HOUR, WholeRun, whole_run
from brimful.settings import Action, Precision, Settings, UnitAction
from brimful.trace import Trace
from brimful.trace.gpu_sizes import is_sized_by_gpu
from brimful.trace.units import find_units
from brimful.utils.display import PrintedResult
from brimful.utils.status import reporting_part


class GpuSurvey(tuple["GpuFit", ...], PrintedResult):
    """One record per GPU; prints as a table."""

    job: str
    global_batch_size: int
    sort: str | None
    """What the records are sorted by; None: in the order of the table, and printed by speed."""
    tokens_per_sample: float | None
    """Tokens of each sample, padding included; None if they are not known."""
    notes: tuple[str, ...]
    """The lengths that the figures are for, where the job's batches differ."""

    def __new__(
        cls,
        fits: Iterable[GpuFit],
        *,
        job: str,
        global_batch_size: int,
        tokens_per_sample: float | None = None,
        sort: str | None = None,
        notes: tuple[str, ...] = (),
    ) -> GpuSurvey:
        """Create the survey of a job and its global batch."""
        survey = super().__new__(cls, fits if sort is None else sort_fits(fits, sort))
        survey.job, survey.global_batch_size, survey.sort, survey.notes = job, global_batch_size, sort, notes
        survey.tokens_per_sample = tokens_per_sample
        return survey

    def __getnewargs_ex__(self) -> tuple[tuple[object, ...], dict[str, object]]:
        return (tuple(self),), vars(self)

    @takes_options(RunLength, RunLengthKeywords)
    def predict_run(self, **length: Unpack[RunLengthKeywords]) -> GpuSurvey:
        """Predict a whole training run on each GPU: steps, time, speed, and with prices the cost.

        Waiting for data, evaluation and checkpoints are not included.

        Args:
            **length: The fields of `RunLength`, of which epochs, samples or tokens is given.

        Returns:
            The same records with `run`, in the same order. It prints the time and the cost of the run.

        Raises:
            UsageError: No length or several are given, or the tokens of a sample are not known.
        """
        asked, tokens = RunLength(**length), self.tokens_per_sample
        asked.check()
        return GpuSurvey((fit.with_run(asked, tokens) for fit in self), **vars(self))


class CaptureOn(Protocol):
    """Runs a step on fake tensors as a device would."""

    def __call__(self, settings: Settings, device: Device) -> Trace:
        """The trace of one optimizer step."""

    def is_same_on(self, device: Device, other: Device, precision: Precision) -> bool:
        """Whether what was captured on a device is the same on another, but for sizes that are set for each."""


MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestFit:
    """The fastest way to train a job on a GPU in one precision, of those tried."""

    settings: Settings | None
    """The fastest of the settings tried that fits with a margin of 5 %; None if none does. A plan may find a
    faster mix of kept and recomputed units."""
    predicted_peak_device_bytes: int | None
    """Peak of those settings."""
    predicted_step_seconds: float | None
    predicted_step_seconds_interval: tuple[float, float] | None = None
    """Covers the measured time with 90 % probability."""
    price_per_hour: float | None = None
    """Price of the GPU, in the currency of the prices; None without a price."""
    run: WholeRun | None = None
    """A whole run with these settings; None if none is asked for, or the job does not fit."""

    @property
    def predicted_samples_per_second(self) -> float | None:
        """Samples of the global batch per second of step time; None if the job does not fit."""
        if self.settings is None or self.predicted_step_seconds is None:
            return None
        return self.settings.global_batch_size / self.predicted_step_seconds

    @property
    def predicted_samples_per_second_interval(self) -> tuple[float, float] | None:
        """The lower and the upper end of the samples per second, with 90 % probability between them."""
        if self.settings is None or self.predicted_step_seconds_interval is None:
            return None
        shortest, longest = self.predicted_step_seconds_interval
        return self.settings.global_batch_size / longest, self.settings.global_batch_size / shortest

    @property
    def predicted_cost_per_step(self) -> float | None:
        """Price of the time of a step; None without a price, or if the job does not fit."""
        if self.price_per_hour is None or self.predicted_step_seconds is None:
            return None
        return self.price_per_hour * self.predicted_step_seconds / SECONDS_PER_HOUR

    @property
    def predicted_cost_per_million_samples(self) -> float | None:
        """Price of the time of a million samples of the global batch; None as for `predicted_cost_per_step`."""
        cost = self.predicted_cost_per_step
        return (
            None if cost is None or self.settings is None else cost * MILLION / self.settings.global_batch_size
        )

    def with_run(self, length: RunLength, tokens_per_sample: float | None) -> Self:
        """The record with a whole run of some length."""
        if self.settings is None or self.predicted_step_seconds is None:
            return self
        run = whole_run(
            length,
            self.settings,
            step_seconds=self.predicted_step_seconds,
            step_seconds_interval=self.predicted_step_seconds_interval,
            tokens_per_sample=tokens_per_sample,
            price_per_hour=self.price_per_hour,
        )
        return replace(self, run=run)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualFit(FastestFit):
    """A job on a GPU in the precision that training on it usually takes."""

    precision: Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFit(FastestFit):
    """One job on one GPU."""

    device: str
    capacity_bytes: int
    predicted_plain_peak_device_bytes: int
    """Peak of the baseline: the whole global batch as one micro-batch, nothing recomputed."""
    plain_fits: bool
    change: str | None
    """The cheapest change to the mathematics that makes it fit, where nothing else does; None where none is
    needed, or none of those tried is enough."""
    predicted_smallest_peak_device_bytes: int
    """The smallest peak found without changing the mathematics."""
    confidence: str
    """Confidence in the GPU's figures: "high", "medium" or "low"."""
    note: str | None = None
    """Which builds of torch lack kernels for the GPU; None if they all have them."""
    usual: UsualFit | None = None
    """The fit in the precision that training on this GPU usually takes (`usual_precision`); None if another
    precision than fp32 was asked for, which is then the one to compare."""

    @property
    def best(self) -> FastestFit:
        """What speed and cost are compared by: the usual precision where it fits, else the one asked for."""
        return self if self.usual is None or self.usual.settings is None else self.usual

    def with_price(self, price_per_hour: float | None) -> GpuFit:
        """The record with a price of the GPU."""
        usual = None if self.usual is None else replace(self.usual, price_per_hour=price_per_hour)
        return replace(self, price_per_hour=price_per_hour, usual=usual)

    def with_run(self, length: RunLength, tokens_per_sample: float | None) -> GpuFit:
        """The record with a whole run of some length, in both precisions."""
        usual = None if self.usual is None else self.usual.with_run(length, tokens_per_sample)
        return replace(FastestFit.with_run(self, length, tokens_per_sample), usual=usual)


def usual_precision(device: Device) -> Precision:
    """The precision in which one would train on a GPU by default, beside strict fp32.

    It is bf16 autocast where the hardware has it, since it needs no loss scaling; fp16 autocast on GPUs with
    tensor cores before; else fp32, as half types are not faster there.
    """
    if device.supports(Precision.BF16):
        return Precision.BF16
    return Precision.FP32 if device.fp16_flops_per_second is None else Precision.FP16


SORTS = ("speed", "memory", "cost")
"""What GPUs can be sorted by: the fastest, those with the most memory, or the cheapest per sample first."""


def sort_fits(fits: Iterable[GpuFit], sort: str) -> list[GpuFit]:
    """GPUs in the order of `sort`; those on which the job does not fit are last.

    A `sort` other than "speed", "memory" or "cost", or "cost" where no GPU has a price, raises UsageError.
    """
    listed = list(fits)
    if sort not in SORTS:
        raise UnknownNameError("order of GPUs", str(sort), SORTS)
    if sort == "cost" and all(fit.price_per_hour is None for fit in listed):
        raise UsageError("GPUs are sorted by cost where prices are given: prices={…}, or --prices FILE.")
    return sorted(listed, key=lambda fit: (fit.best.settings is None, _first_key(fit, sort), _slowness(fit)))


def _first_key(fit: GpuFit, sort: str) -> float:
    if sort == "memory":
        return -fit.capacity_bytes
    cost = fit.best.predicted_cost_per_million_samples if sort == "cost" else 0.0
    return math.inf if cost is None else cost


def _slowness(fit: GpuFit) -> float:
    return -(fit.best.predicted_samples_per_second or 0.0)


def survey_gpus(
    capture: CaptureOn,
    devices: Sequence[Device],
    base: Settings,
    *,
    splits_coupled_batches: bool = False,
    can_split: bool = True,
    compares_usual: bool = False,
) -> tuple[GpuFit, ...]:
    """Try the baseline, smaller micro-batches and recomputation on every GPU; one record for each, in order.

    The micro-batch of `base` is the global batch; GPUs without its precision take fp32.
    `splits_coupled_batches` is whether a batch may be split although layers couple its samples, `can_split`
    whether the job's batches can be split at all, `compares_usual` whether to try each GPU's usual precision
    too. A step that cannot be run on fake tensors raises CaptureError.
    """
    survey = _Survey(capture, base, can_split=can_split, splits_coupled_batches=splits_coupled_batches)
    fits = []
    for number, device in enumerate(devices, start=1):
        with reporting_part(f"{device.name}, {number} of {len(devices)}"):
            fit = survey.fit(device, base.precision)
            if compares_usual:
                usual = usual_precision(device)
                in_usual = fit if usual is base.precision else survey.fit(device, usual)
                fit = replace(fit, usual=_usual_of(in_usual, usual))
            fits.append(fit)
    return tuple(fits)


def _usual_of(fit: GpuFit, precision: Precision) -> UsualFit:
    return UsualFit(
        precision=precision, **{field.name: getattr(fit, field.name) for field in fields(FastestFit)}
    )


def deciding_class(device: Device) -> tuple[int, int]:
    """Compute capability as far as capture rules depend on it: all 6.x cards are equal."""
    capability = device.compute_capability or (0, 0)
    return (6, 0) if capability[0] == 6 else capability


class _Survey:
    """One job on one GPU after another, of which those that run the same ops share captures."""

    def __init__(
        self, capture: CaptureOn, base: Settings, *, can_split: bool, splits_coupled_batches: bool
    ) -> None:
        self._capture = capture
        self._base = base
        self._can_split = can_split
        self._splits_coupled_batches = splits_coupled_batches
        self._families: list[_Family] = []

    def fit(self, device: Device, precision: Precision) -> GpuFit:
        """The record of a GPU, in a precision."""
        family = self._family(device, precision)
        limit = int(device.capacity_bytes / (1 + MARGIN_FRACTION)) - device.context_bytes
        candidates = self._kept(family)
        baseline_bytes = smallest_bytes = family.two_steps(candidates[0]).reserved_bytes(device)
        if baseline_bytes > limit:  # what is recomputed is never faster than the same kept
            candidates += [family.recomputing(settings) for settings in candidates if family.units]
        times = {settings: family.timer(settings).on(device) for settings in candidates}
        best, best_bytes = None, 0
        for settings in sorted(candidates, key=lambda settings: times[settings].total_seconds):
            # The peak of allocated bytes is a lower bound of reserved ones, and takes no replay.
            if family.two_steps(settings).least_bytes(device) <= limit:
                reserved_bytes = family.two_steps(settings).reserved_bytes(device)
                smallest_bytes = min(smallest_bytes, reserved_bytes)
                if reserved_bytes <= limit:
                    best, best_bytes = settings, reserved_bytes
                    break
        if best is None:
            least = {settings: family.two_steps(settings).least_bytes(device) for settings in candidates}
            for settings in sorted(candidates, key=least.__getitem__):
                if least[settings] < smallest_bytes:
                    reserved_bytes = family.two_steps(settings).reserved_bytes(device)
                    smallest_bytes = min(smallest_bytes, reserved_bytes)
        return GpuFit(
            device=device.name,
            capacity_bytes=device.capacity_bytes,
            predicted_plain_peak_device_bytes=baseline_bytes + device.context_bytes,
            plain_fits=baseline_bytes <= limit,
            settings=best,
            predicted_peak_device_bytes=None if best is None else best_bytes + device.context_bytes,
            predicted_step_seconds=None if best is None else times[best].total_seconds,
            predicted_step_seconds_interval=None if best is None else time_interval(times[best], device),
            change=None if best is not None else self._first_change_that_fits(family, device, limit),
            predicted_smallest_peak_device_bytes=smallest_bytes + device.context_bytes,
            confidence=device.confidence,
            note=torch_builds_note(device),
        )

    def _kept(self, family: _Family) -> list[Settings]:
        """The baseline, then its smaller micro-batches; nothing recomputed."""
        batch = self._base.global_batch_size
        is_coupled = bool(family.baseline.batch_coupled_modules)
        is_whole = not self._can_split or (is_coupled and not self._splits_coupled_batches)
        sizes = [batch] if is_whole else [size for size in range(batch, 0, -1) if batch % size == 0]
        return [family.base.with_micro_batch_size(size) for size in sizes]

    def _family(self, device: Device, precision: Precision) -> _Family:
        """The family whose ops the device runs; a new one if there is none."""
        precision = precision if device.supports(precision) else Precision.FP32
        in_precision = [family for family in self._families if family.base.precision is precision]
        for family in in_precision:
            is_known = deciding_class(device) in family.classes
            if is_known or self._capture.is_same_on(family.device, device, precision):
                return family
        base = replace(self._base, precision=precision)
        small = self._small_trace(device, base)
        for family in in_precision:
            if small is not None and family.small is not None and _decide_alike(family.small, small):
                family.classes.add(deciding_class(device))
                return family
        self._families.append(_Family(self._capture, device, base, small))
        return self._families[-1]

    def _small_trace(self, device: Device, base: Settings) -> Trace | None:
        """The step at the size that others are scaled from; None if the job makes no such batch."""
        try:
            return self._capture(replace(base, micro_batch_size=SCALED_SIZES[0]), device=device)
        except (CaptureError, BatchError):
            return None

    def _first_change_that_fits(self, family: _Family, device: Device, limit: int) -> str | None:
        for name, precision, optimizer in _changes(family.base, device):
            try:
                changed = family if precision is family.base.precision else self._family(device, precision)
                least = changed.recomputing(self._kept(changed)[-1])
                allocations = changed.two_steps(replace(least, optimizer=optimizer))
            except CaptureError:  # an optimizer may not take these parameters
                continue
            if allocations.least_bytes(device) <= limit and allocations.reserved_bytes(device) <= limit:
                return name
        return None


class _Family:
    """The traces of one job for GPUs that run the same ops."""

    def __init__(self, capture: CaptureOn, device: Device, base: Settings, small: Trace | None) -> None:
        self.device = device
        self.base = base
        """The baseline."""
        self.small = small
        """The one capture by which GPUs are compared."""
        self.classes = {deciding_class(device)}
        self._scaled = DerivedTraces(partial(capture, device=device))
        self.baseline = self._trace(base)
        self.units = find_units(self.baseline)

    def recomputing(self, settings: Settings) -> Settings:
        """The settings with all units recomputed."""
        units = tuple(UnitAction(fqn=unit, action=Action.RECOMPUTE) for unit in self.units)
        return replace(settings, units=units)

    @cached_method
    def timer(self, settings: Settings) -> StepTimer:
        """Times the step under settings on any GPU."""
        return StepTimer(self._trace(settings))

    @cached_method
    def two_steps(self, settings: Settings) -> AllocationsOnGpus:
        """Two steps under settings: the second finds memory as the allocator was left by the first."""
        return AllocationsOnGpus(self._trace(settings).with_last_step_again())

    @cached_method
    def _trace(self, settings: Settings) -> Trace:
        return self._scaled.at(settings)


def _decide_alike(a: Trace, b: Trace) -> bool:
    """Whether two traces differ only in what is set for each GPU."""
    return a.has_same_shape_as(b) and all(
        x.size_bytes == y.size_bytes or is_sized_by_gpu(x) for x, y in zip(a.storages, b.storages, strict=True)
    )


def _changes(base: Settings, device: Device) -> Iterator[tuple[str, Precision, str | None]]:
    """Changes to the mathematics, cheapest first: what they are called, precision and optimizer."""
    halves = (p for p in (Precision.BF16, Precision.FP16) if device.supports(p))
    half = next(halves, None)
    if half is not None and base.precision in (Precision.FP32, Precision.TF32):
        yield f"{half}", half, base.optimizer
    if base.optimizer != "adafactor":
        yield "adafactor", base.precision, "adafactor"
        if half is not None:
            yield f"{half} and adafactor", half, "adafactor"
