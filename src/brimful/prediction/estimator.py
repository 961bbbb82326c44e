"""Estimates of one job at any micro-batch size, from captures at two sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

from brimful.devices import Device
from brimful.errors import BatchError, CaptureError, InfeasibleError
from brimful.prediction.estimate import Estimate, Extremes, Verdict, estimate_trace
from brimful.settings import Settings
from brimful.trace import Guess, Trace, TraceLine
from brimful.trace.derive import Counterparts, with_one_micro_batch
from brimful.utils.quantities import format_bytes

SCALED_SIZES = (2, 3)
"""Micro-batches captured to predict all others. Not 1: some ops treat a dimension of 1 differently."""

ROUGH_SIZES = (5, 7)
"""Micro-batches that `RoughlyScaledTraces` captures, which distinguishes tensors that grow with the micro-batch
from weights by their size. Primes that do not divide widths of layers: 2 sequences of 512 are as large as a
width of 1024."""

MOST_SAMPLES = 2**20
"""The largest micro-batch that a search considers."""


class Capture(Protocol):
    """Runs steps under some settings on fake tensors; may be called repeatedly with the same settings."""

    def __call__(self, settings: Settings, steps: int = 1) -> Trace:
        """The trace of `steps` optimizer steps."""


@dataclass(frozen=True, slots=True)
class _Line:
    """The line through two captures, if they run the same ops."""

    line: TraceLine | None = None
    multiple: int = 1
    """Factor of the two sizes, and so of those that the model is known to accept."""
    fails: bool = False
    """Whether the step fails at one of the sizes."""

    def is_known_to_accept(self, size: int, smallest: int) -> bool:
        """Whether a size is a multiple, and not below the smaller capture: models may refuse few samples."""
        return size % self.multiple == 0 and size >= self.multiple * smallest


class ScaledTraces:
    """Traces of one job at any micro-batch size.

    Bytes and FLOPs of an op are affine in the micro-batch while the ops stay the same, and what kernels
    take inside is computed from the scaled sizes. So two captures give every size exactly. Where bytes may
    grow faster, as similarities of all samples with all do, a third one shows whether they do. A model may
    accept some sizes only, such as even ones: if it fails at the two sizes and not at the one asked for,
    the same multiple of both serves, by the least divisor of the size asked for at which both run. If the
    two run different ops, bytes grow faster, or there is no such divisor, each size is captured separately;
    so is size 1.
    """

    sizes = SCALED_SIZES

    def __init__(self, capture: Callable[[Settings], Trace]) -> None:
        self._capture = capture
        self._lines: dict[Settings, _Line] = {}

    def at(self, settings: Settings) -> Trace:
        """The trace of a step with any micro-batch size: a capture, or one scaled from others.

        A step that cannot be run on fake tensors raises CaptureError; a size of which the job makes no batch
        raises BatchError.
        """
        if settings.micro_batch_size == 1:
            return self._capture(settings)
        # Micro-batches after the second repeat it, so captures for two serve any number.
        steps = min(settings.gradient_accumulation_steps, 2)
        line = self._line(replace(settings, gradient_accumulation_steps=steps))
        if line is None:
            return self._capture(settings)
        trace = line.at(settings.micro_batch_size)
        return trace if trace.is_own_loop else trace.with_settings(settings)

    def _line(self, settings: Settings) -> TraceLine | None:
        """The line through captures at two sizes that run the same ops; None if there are none."""
        key = replace(settings, micro_batch_size=1)
        found = self._lines.get(key)
        if found is None:
            found = self._lines[key] = self._captured_line(key, 1)
        size = settings.micro_batch_size
        if found.line is None and found.fails and self._runs(settings):
            multiples = (self._captured_line(key, n) for n in range(2, size + 1) if size % n == 0)
            found = self._lines[key] = next((each for each in multiples if not each.fails), _Line())
        return found.line if found.multiple == 1 or found.is_known_to_accept(size, self.sizes[0]) else None

    def _runs(self, settings: Settings) -> bool:
        try:
            self._capture(settings)
        except (CaptureError, BatchError):
            return False
        return True

    def _captured_line(self, key: Settings, multiple: int) -> _Line:
        at_small, at_large = (replace(key, micro_batch_size=multiple * size) for size in self.sizes)
        try:
            small = self._capture(at_small)
            if small.couples_samples:  # its loss is not affine in the micro-batch
                return _Line()
            large = self._capture(at_large)
            line = TraceLine(small, large) if small.has_same_shape_as(large) else None
            if line is not None and line.may_bend:
                third = self._capture(replace(key, micro_batch_size=multiple * sum(self.sizes)))
                line = line if line.passes_through(third) else None
        except (CaptureError, BatchError):
            return _Line(fails=True)
        return _Line(line, multiple)


class DerivedTraces(ScaledTraces):
    """Traces at any micro-batch size, with one capture of a step that recomputes units: at the smaller size.

    What a recomputation runs, the forward ran too, so it grows as ops of the step with everything kept do.
    Where that is ambiguous, the larger size is captured as well. Counts of corrections are those of the smaller
    size.
    """

    def __init__(self, capture: Callable[[Settings], Trace]) -> None:
        super().__init__(capture)
        self._counterparts: dict[Settings, Counterparts] = {}

    def at(self, settings: Settings) -> Trace:
        """The trace of a step; see `ScaledTraces.at`."""
        if settings.units and settings.micro_batch_size != 1:
            steps = min(settings.gradient_accumulation_steps, 2)
            key = replace(settings, gradient_accumulation_steps=steps)
            kept = self._line(replace(key, units=()))
            trace = None if kept is None else self._recomputed(key, kept)
            if trace is not None:
                return trace.with_settings(settings)
        return super().at(settings)

    def _recomputed(self, settings: Settings, kept: TraceLine) -> Trace | None:
        at_small = replace(settings, micro_batch_size=kept.small.settings.micro_batch_size)
        if at_small not in self._counterparts:
            self._counterparts[at_small] = Counterparts(self._capture(at_small), kept)
        trace = self._counterparts[at_small].at(settings.micro_batch_size)
        if trace is not None:
            return trace
        line = self._line(settings)
        return None if line is None else line.at(settings.micro_batch_size)


class RoughlyScaledTraces(DerivedTraces):
    """Traces from as few captures as possible, for a caller that captures its final choice itself.

    A step of one micro-batch is derived from that of two, and a micro-batch of one sample from larger ones.
    """

    sizes = ROUGH_SIZES

    def at(self, settings: Settings) -> Trace:
        """The trace of a step, with small errors where it is derived; see `ScaledTraces.at`."""
        size = settings.micro_batch_size
        key = replace(settings, gradient_accumulation_steps=2)
        kept = self._line(replace(key, units=()))
        trace = None
        if kept is not None:
            trace = self._recomputed(key, kept) if settings.units else kept.at(size)
        if trace is None:
            return super().at(settings)
        if settings.gradient_accumulation_steps == 1:
            trace = with_one_micro_batch(trace)
        return trace.with_settings(settings)


class Estimator:
    """Predicts a step at any micro-batch size, from captures at two sizes; see `ScaledTraces`.

    Args:
        capture: Runs steps under some settings on fake tensors, with a `guess`.
        settings: Settings of the step; their micro-batch size is replaced.
        device: Where the step would run.
        estimate: Makes an estimate like `estimate_trace`, for example with another capacity.
    """

    def __init__(
        self,
        capture: Callable[..., Trace],
        settings: Settings,
        device: Device,
        *,
        estimate: Callable[..., Estimate] = estimate_trace,
    ) -> None:
        self._traces = {guess: ScaledTraces(partial(capture, guess=guess)) for guess in Guess}
        self._settings = settings
        self._device = device
        self._estimate = estimate

    def at(self, micro_batch_size: int, **given: Any) -> Estimate:
        """Estimate the step at one micro-batch size.

        Args:
            micro_batch_size: Samples in one forward and backward pass.
            **given: What `estimate` takes besides, such as `compares_allocators`.

        Returns:
            The estimate.

        Raises:
            CaptureError: The step cannot be run on fake tensors.
        """
        trace = self.trace_at(micro_batch_size)
        extremes = Extremes.of(trace, lambda guess: self.trace_at(micro_batch_size, guess))
        found = self._estimate(trace, self._device, extremes=extremes, **given)
        return replace(found, at_sizes=AtSizes(lambda: self))

    def trace_at(self, micro_batch_size: int, guess: Guess = Guess.EXPECTED) -> Trace:
        """The step at one micro-batch size; errors as `at` raises them."""
        return self._traces[guess].at(replace(self._settings, micro_batch_size=micro_batch_size))

    def largest(self, **given: Any) -> Estimate:
        """Find the largest micro-batch that fits with the upper end of its interval, without cache flushes.

        It searches by doubling and bisection, assuming that memory grows with the micro-batch.

        Args:
            **given: What `estimate` takes besides, for the estimate of that micro-batch.

        Returns:
            The estimate of that micro-batch.

        Raises:
            InfeasibleError: Not even one sample fits; the message says by how much.
        """
        fitting, too_large = 1, 2
        while too_large <= MOST_SAMPLES and self.at(too_large).verdict is Verdict.FITS:
            fitting, too_large = too_large, 2 * too_large
        if fitting == 1 and (one := self.at(1)).verdict is not Verdict.FITS:
            raise _nothing_fits(one)
        if too_large > MOST_SAMPLES:
            note = f"The search ends at {MOST_SAMPLES:,} samples, which fit; more may fit too."
            found = self.at(fitting, **given)
            return replace(found, notes=(*found.notes, note))
        while too_large - fitting > 1:
            middle = (fitting + too_large) // 2
            if self.at(middle).verdict is Verdict.FITS:
                fitting = middle
            else:
                too_large = middle
        return self.at(fitting, **given)


def _nothing_fits(estimate: Estimate) -> InfeasibleError:
    needed = estimate.predicted_device_interval_bytes[1]
    return InfeasibleError(
        f"not even one sample of {estimate.job!r} is certain to fit {format_bytes(estimate.capacity_bytes)} on "
        f"{estimate.device}: it may take up to {format_bytes(needed)}, "
        f"{format_bytes(max(needed - estimate.capacity_bytes, 0))} too much. Recompute its units, choose an "
        "optimizer with less state or half precision, or let `brimful plan` find what fits.",
        budget_bytes=estimate.capacity_bytes,
        smallest_peak_bytes=needed,
    )


class AtSizes:
    """The step of an estimate at other micro-batch sizes; a pickled estimate is without it.

    Args:
        make: Makes the estimator, on first use: it captures the step at two sizes.
    """

    def __init__(self, make: Callable[[], Estimator]) -> None:
        self._estimator = cache(make)

    def __call__(self, micro_batch_size: int) -> Estimate:
        """The estimate at one size; see `Estimator.at`."""
        return self._estimator().at(micro_batch_size)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
