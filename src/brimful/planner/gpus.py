"""One job on every GPU of the table: whether it fits, how, how fast, and what would make it fit.

GPUs that decide alike run the same ops, so a few captures serve the whole table: what differs from one card to
the next is then its memory, its rates, its context, and the staging of reductions, which is computed for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from brimful.cost import step_seconds
from brimful.devices import Device
from brimful.display import PrintedResult
from brimful.errors import CaptureError
from brimful.memory import predict_memory
from brimful.prediction.estimate import MARGIN_FRACTION
from brimful.prediction.estimator import ScaledTraces
from brimful.settings import Action, Precision, Settings, UnitAction
from brimful.trace import CUBLAS_WORKSPACE, Storage, Trace
from brimful.trace.units import find_units


class GpuSurvey(tuple["GpuFit", ...], PrintedResult):
    """One record per GPU; prints as a table."""

    job: str
    global_batch_size: int

    def __new__(cls, fits: Iterable[GpuFit], *, job: str, global_batch_size: int) -> GpuSurvey:
        """Create the survey of a job and its global batch."""
        survey = super().__new__(cls, fits)
        survey.job, survey.global_batch_size = job, global_batch_size
        return survey

    def __getnewargs_ex__(self) -> tuple[tuple[object, ...], dict[str, object]]:
        return (tuple(self),), {"job": self.job, "global_batch_size": self.global_batch_size}


class CaptureOn(Protocol):
    """Runs a step on fake tensors as a device would."""

    def __call__(self, settings: Settings, device: Device) -> Trace:
        """The trace of two optimizer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFit:
    """One job on one GPU."""

    device: str
    capacity_bytes: int
    predicted_plain_peak_device_bytes: int
    """Peak of the baseline: the whole global batch as one micro-batch, nothing recomputed."""
    plain_fits: bool
    settings: Settings | None
    """The fastest of the settings tried that fits with a margin of 5 %; None if none does. A plan may find a
    faster mix of kept and recomputed units."""
    predicted_peak_device_bytes: int | None
    """Peak of those settings."""
    predicted_step_seconds: float | None
    change: str | None
    """The cheapest change to the mathematics that makes it fit, where nothing else does; None where none is
    needed, or none of those tried is enough."""
    predicted_smallest_peak_device_bytes: int
    """The smallest peak found without changing the mathematics."""

    @property
    def predicted_samples_per_second(self) -> float | None:
        """Samples of the global batch per second of step time; None if the job does not fit."""
        if self.settings is None or self.predicted_step_seconds is None:
            return None
        return self.settings.global_batch_size / self.predicted_step_seconds


def survey_gpus(
    capture: CaptureOn,
    devices: Sequence[Device],
    base: Settings,
    *,
    splits_coupled_batches: bool = False,
    can_split: bool = True,
) -> tuple[GpuFit, ...]:
    """Try the baseline, smaller micro-batches and recomputation on every GPU.

    Args:
        capture: Runs a step on fake tensors.
        devices: GPUs of the table.
        base: The baseline: its micro-batch is the global batch. GPUs without its precision take fp32.
        splits_coupled_batches: Whether a batch may be split although layers couple its samples.
        can_split: Whether the job's batches can be split at all.

    Returns:
        One record for each device, in the same order.

    Raises:
        CaptureError: The step cannot be run on fake tensors.
    """
    families: list[_Family] = []
    splitting = _Splitting(can_split, splits_coupled_batches)
    return tuple(_fit(_family_of(device, base, capture, families, splitting), device) for device in devices)


def deciding_class(device: Device) -> tuple[int, int]:
    """Compute capability as far as capture rules depend on it: all 6.x cards are equal."""
    capability = device.compute_capability or (0, 0)
    return (6, 0) if capability[0] == 6 else capability


class _Splitting(NamedTuple):
    """Whether batches can be split, and may be where layers couple their samples."""

    can: bool
    may_if_coupled: bool


class _Family:
    """The traces of one job for GPUs that run the same ops."""

    def __init__(self, capture: CaptureOn, device: Device, base: Settings, splitting: _Splitting) -> None:
        self._scaled = ScaledTraces(partial(capture, device=device))
        self._device = device
        self._splitting = splitting
        self.classes = {deciding_class(device)}
        self.precision = base.precision if device.supports(base.precision) else Precision.FP32
        self._base = replace(base, precision=self.precision)
        self._traces: dict[Settings, Trace] = {}
        self.baseline = self.trace(self._base)
        self._units = find_units(self.baseline)

    def candidates(self) -> list[Settings]:
        """The baseline, its micro-batches, and the same recomputed; the baseline first."""
        batch = self._base.global_batch_size
        is_coupled = bool(self.baseline.batch_coupled_modules)
        is_whole = not self._splitting.can or (is_coupled and not self._splitting.may_if_coupled)
        sizes = [batch] if is_whole else [size for size in range(batch, 0, -1) if batch % size == 0]
        kept = [self._base.with_micro_batch_size(size) for size in sizes]
        return [*kept, *(replace(settings, units=self._all_recomputed()) for settings in kept if self._units)]

    def trace(self, settings: Settings) -> Trace:
        """The step under settings."""
        if settings not in self._traces:
            self._traces[settings] = self._scaled.at(settings)
        return self._traces[settings]

    def changed(self) -> Iterator[tuple[str, Settings]]:
        """Changes to the mathematics, cheapest first, each with the settings that take least."""
        least = replace(self.candidates()[-1], units=self._all_recomputed())
        halves = [p for p in (Precision.BF16, Precision.FP16) if self._device.supports(p)]
        half = next(iter(halves), None)
        if half is not None and self.precision in (Precision.FP32, Precision.TF32):
            yield f"{half}", replace(least, precision=half)
        if least.optimizer != "adafactor":
            yield "adafactor", replace(least, optimizer="adafactor")
            if half is not None:
                yield f"{half} and adafactor", replace(least, optimizer="adafactor", precision=half)

    def _all_recomputed(self) -> tuple[UnitAction, ...]:
        return tuple(UnitAction(fqn=unit, action=Action.RECOMPUTE) for unit in self._units)


def _family_of(
    device: Device, base: Settings, capture: CaptureOn, families: list[_Family], splitting: _Splitting
) -> _Family:
    """The family whose ops the device runs; a new one if there is none."""
    precision = base.precision if device.supports(base.precision) else Precision.FP32
    for family in families:
        if family.precision is precision and deciding_class(device) in family.classes:
            return family
    fresh = _Family(capture, device, base, splitting)
    for family in families:
        if family.precision is precision and _decide_alike(family.baseline, fresh.baseline):
            family.classes.add(deciding_class(device))
            return family
    families.append(fresh)
    return fresh


def _decide_alike(a: Trace, b: Trace) -> bool:
    """Whether two traces differ only in what `_on` sets for each GPU."""
    return a.has_same_shape_as(b) and all(
        x.size_bytes == y.size_bytes or x.kernel is not None or x.label == CUBLAS_WORKSPACE
        for x, y in zip(a.storages, b.storages, strict=True)
    )


def _fit(family: _Family, device: Device) -> GpuFit:
    limit = int(device.capacity_bytes / (1 + MARGIN_FRACTION)) - device.context_bytes
    candidates = family.candidates()
    seconds = {settings: step_seconds(family.trace(settings), device).total_seconds for settings in candidates}
    peaks: dict[Settings, int] = {}

    def peak(settings: Settings) -> int:
        if settings not in peaks:
            peaks[settings] = predict_memory(_on(device, family.trace(settings))).peak_reserved_bytes
        return peaks[settings]

    baseline_bytes = peak(candidates[0])
    by_time = sorted(candidates, key=seconds.__getitem__)
    best = next((settings for settings in by_time if peak(settings) <= limit), None)
    change = None if best is not None else _first_change_that_fits(family, device, limit)
    return GpuFit(
        device=device.name,
        capacity_bytes=device.capacity_bytes,
        predicted_plain_peak_device_bytes=baseline_bytes + device.context_bytes,
        plain_fits=baseline_bytes <= limit,
        settings=best,
        predicted_peak_device_bytes=None if best is None else peak(best) + device.context_bytes,
        predicted_step_seconds=None if best is None else seconds[best],
        change=change,
        predicted_smallest_peak_device_bytes=min(peaks.values()) + device.context_bytes,
    )


def _first_change_that_fits(family: _Family, device: Device, limit: int) -> str | None:
    for name, settings in family.changed():
        try:
            trace = family.trace(settings)
        except CaptureError:  # an optimizer may not take these parameters
            continue
        if predict_memory(_on(device, trace)).peak_reserved_bytes <= limit:
            return name
    return None


def _on(device: Device, trace: Trace) -> Trace:
    """The trace with what depends on the card itself: its multiprocessors and cuBLAS's workspace."""
    multiprocessors, threads = device.sm_count, device.threads_per_multiprocessor
    workspace_bytes = device.cublas_workspace_bytes
    assert multiprocessors is not None
    assert threads is not None

    def storages() -> Iterable[Storage]:
        for storage in trace.storages:
            if storage.kernel is not None:
                kernel = storage.kernel.on_multiprocessors(multiprocessors, threads)
                yield replace(storage, size_bytes=kernel.size_bytes(), kernel=kernel)
            elif storage.label == CUBLAS_WORKSPACE:
                yield replace(storage, size_bytes=workspace_bytes)
            else:
                yield storage

    return replace(trace, storages=tuple(storages()))
