"""A trace and a device → memory and time of the step, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from brimful.cost import StepTime, step_seconds, time_interval
from brimful.devices import Device
from brimful.errors import CaptureError, UsageError
from brimful.memory import (
    AllocatorSettings,
    AllocatorWhatIf,
    FailedAllocation,
    HeldStorage,
    MemoryPrediction,
    ModuleShare,
    compare_allocators,
    least_allocated_bytes,
    most_held_bytes,
    most_reserved_bytes,
    pinned_host_bytes,
    predict_memory,
    smallest_surviving_capacity_bytes,
)
from brimful.results import PredictsRuns, Suggestion
from brimful.settings import Settings
from brimful.trace import Category, Correction, Guess, Phase, Trace
from brimful.utils.quantities import format_bytes, format_seconds

MARGIN_FRACTION = 0.05
"""Fraction of a GPU's memory that a plan without a budget leaves free. Of 54 public runs, 5 took over 5 % more
than predicted (benchmarks/gpu_truth.py); two of them because of when the loop cleared gradients, which is not
on record."""

RESIDUAL_FRACTION = 0.02
"""Fraction that a known allocation sequence may reserve beyond the prediction, in the upper end of the
interval: above the largest shortfall, 1.2 %, of public runs whose loop is known and uses no cuDNN
(benchmarks/gpu_truth.py)."""


COMPILED_FRACTION = 0.2
"""Fraction by which saved tensors and temporaries may be larger in compiled than in eager code, in the upper
end of the interval: above the largest seen, 13 %, of a ResNet compiled block by block. The compiler makes new
tensors for in-place ops, and saves masks of ReLUs too (torch 2.13's inductor on a CPU, eight models)."""

COMPILE_NOTE = (
    "torch.compile fuses kernels: they round otherwise in the last digits, dropout draws other numbers, and "
    "they are timed by the bytes that they read and write. Compiling takes seconds to minutes of the first "
    "step, which the step's time leaves aside."
)
"""Note of what is predicted for compiled steps."""

NO_LIMIT_BYTES = 1 << 62
"""Capacity for estimates of plans: a plan must fit without the allocator releasing its cache, which would stall
every step. The reserved bytes are then compared with the budget."""


class Verdict(StrEnum):
    """Whether a step fits a capacity."""

    FITS = "fits"
    """The upper end of the interval fits."""
    TIGHT = "tight"
    """The likely size fits; the upper end does not, or the allocator must release its cache to fit."""
    DOES_NOT_FIT = "does not fit"


class RunPart(StrEnum):
    """A part of a training run."""

    FIRST_STEP = "first step"
    STEADY_STEP = "steady step"
    EVALUATION = "evaluation"
    SAVING = "saving weights"
    LOADING = "loading weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """Peak memory of one part of a training run."""

    name: RunPart
    predicted_peak_allocated_bytes: int
    note: str
    """What the prediction assumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(PredictsRuns):
    """Predicted memory and time of one optimizer step on a device."""

    job: str
    device: str
    settings: Settings
    is_own_loop: bool
    """Whether the job's own loop was captured; of the settings, only the micro-batch size then applies."""
    predicted_peak_allocated_bytes: int
    """As `torch.cuda.max_memory_allocated` counts."""
    predicted_peak_reserved_bytes: int
    """As `torch.cuda.max_memory_reserved` counts; equal to allocated on a CPU, which caches nothing."""
    predicted_peak_device_bytes: int
    """Reserved plus the CUDA context, as nvidia-smi shows for the process; equal to reserved on a CPU."""
    predicted_device_interval_bytes: tuple[int, int]
    """The least and the most that the step may take, CUDA context included: the lower end is the smallest
    capacity at which the simulated allocator survives, the upper end has every library's workspace as large as
    it may be."""
    smallest_surviving_capacity_bytes: int | None
    """The smallest capacity at which the allocator survives, which is below what it reserves if there is room;
    without the CUDA context. None if it was not computed, as in a plan; the interval then begins at what is
    allocated."""
    predicted_pinned_host_bytes: int
    """Host memory for offloaded units and an offloaded optimizer, which stays pinned until training ends."""
    predicted_host_state_bytes: int
    """Optimizer state in host memory; with `offload_parameters` also shards of parameters and gradients."""
    predicted_paged_state_bytes: int
    """State of a paged optimizer in CUDA's managed memory, which torch's allocator does not count: in no peak
    here. It is in device memory that is free, else in host memory."""
    predicted_step_seconds: float
    predicted_step_seconds_interval: tuple[float, float]
    """Covers the measured time with 90 % probability."""
    step_time: StepTime
    capacity_bytes: int
    """Memory of the device, or the budget."""
    cache_flushes: int
    """Number of times the allocator must release its whole cache to fit; each stalls the device."""
    out_of_memory_at: FailedAllocation | None
    """The first request that the capacity cannot meet; None if the step fits."""
    breakdown: tuple[tuple[Category, int], ...]
    """Allocated bytes at the peak, by category."""
    peak_phase: Phase
    peak_module: str | None
    peak_op: str | None
    largest: tuple[HeldStorage, ...]
    """The largest blocks at the peak, at most 20."""
    modules: tuple[ModuleShare, ...]
    """Bytes held at the peak by each module, in the order of the module tree."""
    phases: tuple[PhasePeak, ...]
    allocators: tuple[AllocatorWhatIf, ...]
    """The same step under other allocator settings, PyTorch's defaults first; empty if not requested."""
    context_source: str
    """Source of the CUDA context's size."""
    torch_version: str
    """Release of PyTorch whose kernels and allocator are assumed, such as "2.13.0": the one that captured the
    step."""
    corrections: tuple[Correction, ...]
    uncertain_ops: tuple[str, ...]
    parameter_count: int
    """Number of parameters before any were quantised."""
    trainable_parameter_count: int
    tokens_per_sample: float | None = None
    """Tokens of each sample of the batch that is predicted, padding included; None if they are not known."""
    own_checkpoints: int = 0
    """Number of forward regions that the model itself recomputes in backward; their time is in
    `step_time.recompute_seconds`."""
    notes: tuple[str, ...] = ()
    """What was estimated where it was not given: the micro-batch size, the optimizer."""
    suggestions: tuple[Suggestion, ...] = ()
    """Changes with which a step that does not fit would, the fastest first, at most 5."""
    at_sizes: Callable[[int], Estimate] | None = field(default=None, repr=False, compare=False)
    """Predicts other micro-batch sizes, for `at`; None in an estimate that `bf.estimate` did not make."""

    @property
    def verdict(self) -> Verdict:
        """Whether the step fits the capacity."""
        if self.out_of_memory_at is not None:
            return Verdict.DOES_NOT_FIT
        if self.cache_flushes or self.predicted_device_interval_bytes[1] > self.capacity_bytes:
            return Verdict.TIGHT
        return Verdict.FITS

    def at(self, micro_batch_size: int) -> Estimate:
        """Predict the same step at another micro-batch size, from captures at two sizes.

        For this an estimate holds its job, and a model that is not made by a function.

        Args:
            micro_batch_size: Samples in one forward and backward pass.

        Returns:
            The estimate at that size, with the same settings otherwise.

        Raises:
            UsageError: The size is not positive, or the estimate was not made by `bf.estimate` in this process.
            CaptureError: The step cannot be run on fake tensors.
        """
        if self.at_sizes is None:
            raise UsageError(
                "only the result of bf.estimate predicts other sizes, and a pickled one does not: call "
                f"bf.estimate(job, {self.device!r}, micro_batch_size={micro_batch_size})."
            )
        return self.at_sizes(micro_batch_size)

    @property
    def uncertain(self) -> tuple[str, ...]:
        """Parts of the prediction that are uncertain, for reports."""
        dtypes = self.step_time.dtypes_at_fp32_rate
        return (*self.uncertain_ops, *(f"the speed of {dtype}, priced as float32" for dtype in dtypes))

    @property
    def predicted_time_shares(self) -> tuple[tuple[str, float], ...]:
        """Fractions of the step's time by kind of operation, largest first, which add up to 1.

        The kinds are "matmul", "convolution", "attention" (fused kernels), "normalization" (with softmax and
        other reductions), "pointwise", "data movement", "optimizer", "transfers" (copies of the batch, waiting
        for offloaded tensors and other ranks), "host" (launches and Python; on a GPU waiting for them) and
        "unknown" (kernels without measurements).
        """
        return self.step_time.shares

    @property
    def device_peak(self) -> DevicePeak:
        """The peak and the upper end of its interval, CUDA context included."""
        most_bytes = self.predicted_device_interval_bytes[1]
        return DevicePeak(self.predicted_peak_device_bytes, most_bytes, bool(self.uncertain_ops))

    @property
    def predicted_samples_per_second(self) -> float:
        """Samples of the global batch per second of step time."""
        return self.settings.global_batch_size / self.predicted_step_seconds


class DevicePeak(NamedTuple):
    """What a step takes on its device, CUDA context included."""

    likely_bytes: int
    most_bytes: int
    """The upper end of the interval."""
    is_uncertain: bool
    """Whether anything is uncertain about the step."""


class Extremes(NamedTuple):
    """A step whose sizes are guessed (`Trace.sizes_are_guessed`), with other guesses."""

    most: Trace | None
    """The step with `Guess.MOST`; None if it cannot be captured. `least` likewise."""
    least: Trace | None

    @classmethod
    def of(cls, trace: Trace, capture: Callable[[Guess], Trace]) -> Extremes | None:
        """Capture the extremes if the sizes of a trace, which has the expected guess, are guessed; else None.

        `capture` captures the same step with another guess.
        """
        if not trace.sizes_are_guessed:
            return None

        def other(guess: Guess) -> Trace | None:
            try:
                return capture(guess)
            except CaptureError:  # code may need at least one row, or an even number for each expert
                return None

        return cls(other(Guess.MOST), other(Guess.LEAST))


def estimate_trace(
    trace: Trace,
    device: Device,
    *,
    extremes: Extremes | None = None,
    capacity_bytes: int | None = None,
    allocator: AllocatorSettings | None = None,
    compares_allocators: bool = False,
    seeks_smallest_capacity: bool = True,
) -> Estimate:
    """Predict memory and time of the traced step on `device`.

    Args:
        trace: A capture for the same kind of device.
        device: Where the step would run.
        extremes: The same step with other guesses, for the interval.
        capacity_bytes: Bytes permitted, including the CUDA context; None permits the device's whole memory.
        allocator: Settings of the CUDA allocator; None uses those of the trace's settings.
        compares_allocators: Also replay the step under other allocator settings, which takes about a second.
        seeks_smallest_capacity: Also find the smallest capacity that the allocator needs, in some ten replays.

    Returns:
        Peaks over all captured steps, time of the last one, and a verdict. Where the steps do not fit, the
        peaks are those they would have on a larger device.

    Raises:
        UsageError: The capture follows another kind of device.
    """
    if trace.device_kind != device.kind:
        raise UsageError(
            f"the trace of {trace.job!r} follows a {trace.device_kind} device and says nothing of "
            f"{device.name}. Capture it for that device."
        )
    capacity = device.capacity_bytes if capacity_bytes is None else capacity_bytes
    reservable = max(capacity - device.context_bytes, 0)
    memory = predict_memory(trace, allocator=allocator, capacity_bytes=reservable)
    surviving = _smallest_surviving(trace, allocator, memory) if seeks_smallest_capacity else None
    return _estimate(
        trace,
        device,
        memory,
        capacity_bytes=capacity,
        interval=_widened(_interval(trace, device, memory, surviving), trace, extremes, device, allocator),
        surviving_bytes=surviving,
        allocators=compare_allocators(trace, reservable) if compares_allocators else (),
    )


def _estimate(
    trace: Trace,
    device: Device,
    memory: MemoryPrediction,
    *,
    capacity_bytes: int,
    interval: tuple[int, int],
    surviving_bytes: int | None,
    allocators: tuple[AllocatorWhatIf, ...],
) -> Estimate:
    """Collect the predictions for a trace in one record."""
    time = step_seconds(trace, device)
    return Estimate(
        job=trace.job,
        device=device.name,
        settings=trace.settings,
        is_own_loop=trace.is_own_loop,
        predicted_peak_allocated_bytes=memory.peak_allocated_bytes,
        predicted_peak_reserved_bytes=memory.peak_reserved_bytes,
        predicted_peak_device_bytes=memory.peak_reserved_bytes + device.context_bytes,
        predicted_device_interval_bytes=interval,
        smallest_surviving_capacity_bytes=surviving_bytes,
        predicted_pinned_host_bytes=pinned_host_bytes(trace),
        predicted_host_state_bytes=trace.host_state_bytes,
        predicted_paged_state_bytes=trace.paged_state_bytes,
        predicted_step_seconds=time.total_seconds,
        predicted_step_seconds_interval=time_interval(time, device),
        step_time=time,
        capacity_bytes=capacity_bytes,
        cache_flushes=memory.cache_flushes,
        out_of_memory_at=memory.out_of_memory_at,
        breakdown=memory.breakdown,
        peak_phase=memory.peak_phase,
        peak_module=memory.peak_module,
        peak_op=memory.peak_op,
        largest=memory.largest,
        modules=memory.modules,
        phases=tuple(_phases(trace, memory)),
        allocators=allocators,
        context_source=device.context_source,
        torch_version=trace.torch_version.partition("+")[0],
        corrections=trace.corrections,
        uncertain_ops=(*_uncertain(trace, device), *_of_paged_state(trace, device, memory)),
        parameter_count=trace.parameter_count,
        trainable_parameter_count=trace.trainable_parameter_count,
        own_checkpoints=trace.own_checkpoints,
    )


def estimate_unlimited(trace: Trace, device: Device) -> Estimate:
    """Predict the traced step on a device where the allocator never has to release its cache."""
    return estimate_trace(trace, device, capacity_bytes=NO_LIMIT_BYTES, seeks_smallest_capacity=False)


def device_peak(trace: Trace, device: Device) -> DevicePeak:
    """The memory of `estimate_unlimited`, for a trace that has no information about time."""
    memory = predict_memory(trace, capacity_bytes=NO_LIMIT_BYTES)
    return DevicePeak(
        likely_bytes=memory.peak_reserved_bytes + device.context_bytes,
        most_bytes=_interval(trace, device, memory, surviving_bytes=None)[1],
        is_uncertain=bool(_uncertain(trace, device) or trace.paged_state_bytes),
    )


def _uncertain(trace: Trace, device: Device) -> tuple[str, ...]:
    return (*trace.uncertain_ops, *_of_compiled_code(trace), *_of_device(device))


def _of_paged_state(trace: Trace, device: Device, memory: MemoryPrediction) -> Iterator[str]:
    """Where the state of a paged optimizer is assumed to lie; nothing where no state is paged."""
    if not (state_bytes := trace.paged_state_bytes):
        return
    free_bytes = max(device.capacity_bytes - device.context_bytes - memory.peak_reserved_bytes, 0)
    assumed = f"assumed to lie in the {format_bytes(free_bytes)} of the device that the step leaves free"
    if state_bytes > free_bytes:
        link = device.host_link_bytes_per_second
        moved = f", {format_seconds(2 * state_bytes / link)} if all of it moves" if link else ""
        assumed = (
            f"the step leaves only {format_bytes(free_bytes)} of the device free for it, so each update moves "
            f"state from the host's memory and back, which the time does not include{moved}"
        )
    yield (
        f"the paged optimizer's state, {format_bytes(state_bytes)} of CUDA's managed memory: outside of the "
        f"allocator and in no peak here; {assumed}"
    )


def _smallest_surviving(trace: Trace, allocator: AllocatorSettings | None, memory: MemoryPrediction) -> int:
    found = smallest_surviving_capacity_bytes(
        trace, allocator=allocator, unlimited_peak_reserved_bytes=memory.unlimited_peak_reserved_bytes
    )
    return memory.peak_reserved_bytes if found is None else found


def _interval(
    trace: Trace, device: Device, memory: MemoryPrediction, surviving_bytes: int | None
) -> tuple[int, int]:
    """The least and the most on the device; on a CPU, the prediction with the least and most of kernels."""
    most = most_reserved_bytes(trace, memory.unlimited_peak_reserved_bytes, allocator=memory.allocator)
    least = memory.peak_reserved_bytes
    is_lowered_for_cpu = device.kind == "cuda" and any(
        op.compiled and op.name.startswith("inductor_kernels.cpp_") for op in trace.ops
    )
    if trace.compiled_lines or is_lowered_for_cpu:
        least = min(least, least_allocated_bytes(trace))
        most += _more_if_compiled(trace, memory)
    if device.kind == "cpu":
        return least, most
    if surviving_bytes is None:
        surviving_bytes = memory.peak_allocated_bytes
    least = min(surviving_bytes, least)
    return least + device.context_low_bytes, int(most * (1 + RESIDUAL_FRACTION)) + device.context_high_bytes


def _widened(
    interval: tuple[int, int],
    trace: Trace,
    extremes: Extremes | None,
    device: Device,
    allocator: AllocatorSettings | None,
) -> tuple[int, int]:
    """The interval of a step, widened by those of the same step with other guesses."""
    if extremes is None:
        return interval
    others = [other for other in extremes if other is not None]
    intervals = [interval, *(_interval_of(other, device, allocator) for other in others)]
    low = device.context_low_bytes + _least_of_any_guess(trace, extremes, allocator)
    return min(low, *(low for low, _ in intervals)), max(high for _, high in intervals)


def _least_of_any_guess(trace: Trace, extremes: Extremes, allocator: AllocatorSettings | None) -> int:
    """Bytes that any choice takes at least: allocated bytes, as blocks of other sizes may leave smaller gaps.

    Evenly divided, fewer rows are gathered at once than in any other way; but options that no row chooses have
    no gradients and no optimizer state.
    """
    held = (Category.GRADIENTS, Category.OPTIMIZER_STATE)
    if extremes.least is None:
        held = (Category.PARAMETERS, Category.OPTIMIZER_STATE)
        return sum(most_held_bytes(trace, each) for each in held)
    unused = sum(most_held_bytes(trace, each) - most_held_bytes(extremes.least, each) for each in held)
    even, least = (
        predict_memory(each, allocator=allocator).peak_allocated_bytes for each in (trace, extremes.least)
    )
    return min(even - max(unused, 0), least)


def _interval_of(trace: Trace, device: Device, allocator: AllocatorSettings | None) -> tuple[int, int]:
    memory = predict_memory(trace, allocator=allocator)
    return _interval(trace, device, memory, _smallest_surviving(trace, allocator, memory))


def _more_if_compiled(trace: Trace, memory: MemoryPrediction) -> int:
    """Bytes that `torch.compile` may save beyond eager code, with relaid weights of convolutions."""
    held = dict(memory.breakdown)
    activations = held.get(Category.SAVED_TENSORS, 0) + held.get(Category.TEMPORARIES, 0)
    weights = sum(
        op.weight_bytes for op in trace.ops if op.phase is Phase.FORWARD and (op.step, op.micro_batch) == (0, 0)
    )
    return int(COMPILED_FRACTION * activations) + weights


def _of_device(device: Device) -> Iterator[str]:
    """Note that the rates of a GPU are derived or vary, and were not measured."""
    if device.rates_spread and not device.curves:
        yield (
            f"times, as the rates of {device.name} are derived or vary between machines ({device.confidence} "
            f"confidence; `brimful calibrate` there measures them): {device.source}"
        )


def _of_compiled_code(trace: Trace) -> Iterator[str]:
    """What is uncertain about compiled code."""
    if trace.compiled_lines:
        first, *others = trace.compiled_lines
        where = f"{first} and {len(others)} more lines" if others else first
        yield (
            f"compiled code ({where}), predicted as it runs eagerly: fused kernels may take less memory and "
            "time, CUDA graphs keep memory of their own"
        )


def _phases(trace: Trace, memory: MemoryPrediction) -> Iterator[PhasePeak]:
    """Peak memory of the parts of a run, as far as the trace shows it."""

    def phase(name: RunPart, peak_bytes: int, note: str) -> PhasePeak:
        return PhasePeak(name=name, predicted_peak_allocated_bytes=peak_bytes, note=note)

    yield phase(
        RunPart.FIRST_STEP, memory.first_step_peak_allocated_bytes, "the making of optimizer state included"
    )
    yield phase(RunPart.STEADY_STEP, memory.steady_peak_allocated_bytes, "all further ones")
    if memory.evaluation_peak_allocated_bytes is not None:
        note = "one micro-batch, without gradients"
        yield phase(RunPart.EVALUATION, memory.evaluation_peak_allocated_bytes, note)
    parameters, state = (
        most_held_bytes(trace, category) for category in (Category.PARAMETERS, Category.OPTIMIZER_STATE)
    )
    # torch/serialization.py (2.13): _save copies each storage to the host if it is on another device, one after
    # another; _load reads all of them onto `map_location` before load_state_dict copies any.
    note = "with optimizer state; written tensor by tensor, which takes no more here"
    yield phase(RunPart.SAVING, parameters + state, note)
    yield phase(RunPart.LOADING, 2 * parameters, "the model's and those read, by torch.load onto this device")
