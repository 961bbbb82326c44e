"""Estimates, traces and GPU comparisons for a job, on a device that need not be in this machine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from brimful.api.job_changes import JobChanges
from brimful.arguments import checks_arguments
from brimful.batches import layout_of, make_batch, named_tensors, sample_sizes, why_not_split
from brimful.capture import capture_step
from brimful.capture.cache import CachedCapture, CapturesOnDevices
from brimful.cost import step_seconds
from brimful.devices import Device, cannot_run_torch, known_devices, torch_builds_note
from brimful.errors import CaptureError, EquivalenceError, UnknownNameError, UsageError
from brimful.execution.job_loop import check_loop_decides
from brimful.execution.longest_batch import LongestBatch, with_longest_batch
from brimful.execution.random_state import undisturbed
from brimful.execution.setup import choose_device, is_of_this_machine
from brimful.job import DEFAULT_OPTIMIZER_NOTE, DefaultOptimizer, Job
from brimful.memory import DEFAULT_ALLOCATOR, AllocatorSettings
from brimful.options import (
    MemoryFormatLike,
    PlanOptions,
    PrecisionLike,
    parse_compile,
    parse_implementation,
    parse_memory_formats,
    parse_precision,
    parse_recompute,
)
from brimful.planner import SORTS, GpuFit, GpuSurvey, prices_of, survey_gpus, what_an_estimate_lacks
from brimful.planner.problem.logits import chunked_loss_of
from brimful.planner.solutions import offloaded_units
from brimful.prediction import AtSizes, Estimate, Estimator, Extremes, Verdict, estimate_trace
from brimful.prediction.estimate import COMPILE_NOTE
from brimful.prediction.growth import growth_notes
from brimful.prediction.odd_sizes import odd_size_notes
from brimful.prediction.uncast import half_weights_notes, uncast_notes
from brimful.prediction.untrained import untrained_notes
from brimful.profiling import check_planned_split
from brimful.profiling.free_memory import memory_here
from brimful.profiling.named_device import DeviceLike, resolve_device, with_best_context
from brimful.requests import request_of
from brimful.results import describe_growth
from brimful.settings import (
    Action,
    Compile,
    MemoryFormat,
    OptimizerImplementation,
    Precision,
    Settings,
    UnitAction,
)
from brimful.trace import Trace, find_units, per_rank_trace
from brimful.utils.quantities import parse_bytes
from brimful.utils.status import busy


@undisturbed()
@busy("estimating")
@checks_arguments
def estimate(
    job: Job,
    device: DeviceLike = "auto",
    *,
    settings: Settings | None = None,
    micro_batch_size: int | Literal["largest"] | None = None,
    gradient_accumulation_steps: int = 1,
    precision: PrecisionLike = Precision.FP32,
    optimizer: str | None = None,
    optimizer_implementation: str | OptimizerImplementation | None = None,
    recompute: str | Action | None = None,
    chunked_loss: bool = False,
    offload_activations: bool = False,
    optimizer_in_backward: bool = False,
    offload_optimizer: bool = False,
    memory_format: MemoryFormatLike | None = None,
    compile: str | Compile = Compile.NONE,
    budget: str | float | None = None,
    allocator: str | AllocatorSettings = DEFAULT_ALLOCATOR,
    compare_allocators: bool = False,
    evaluate: bool = False,
    suggest: bool = True,
    without: Collection[str] = (),
    save_trace: str | Path | None = None,
) -> Estimate:
    """Predict peak memory and time of one optimizer step, without running it.

    For a job with its own `loop`, that loop is captured as it is written; it then decides precision, gradient
    accumulation and optimizer.

    Args:
        job: The job to estimate.
        device: A name from the hardware table ("RTX 3090"), "cuda:0" or "cpu" for this machine, a description
            ("name=…,memory=8GiB,bandwidth=300GB,tflops=9"), or a `Device`.
        settings: How the step runs, chosen by hand, such as those of a plan or of a suggestion. The options
            below that settings have are then not given.
        micro_batch_size: Samples in one forward and backward pass; "largest" finds the most that fit. None
            estimates 1, and a note says so. Of the result, `at(size)` predicts another size.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        precision: "fp32", "tf32", "fp16" or "bf16".
        optimizer: Name of an optimizer that replaces the job's own: "adamw", "sgd", "adafactor", …
        optimizer_implementation: "for-loop", "foreach" or "fused"; None uses torch's default.
        recompute: "all" recomputes every unit (activation checkpointing), "none" keeps everything; a pattern of
            names such as "encoder.layer.*" recomputes the units that match.
        chunked_loss: Compute a large cross-entropy and its logits in parts: the same sums in another order.
        offload_activations: Copy what every unit but the last saves for backward to host memory.
        optimizer_in_backward: Update each parameter in backward, as soon as its gradient is complete.
        offload_optimizer: Keep the optimizer state in host memory and compute the update there.
        memory_format: Layout of 4-d and 5-d parameters and inputs: "channels_last" or "contiguous"; "auto"
            takes the faster by prediction, if the model has 2-d or 3-d convolutions; None leaves it as it is.
        compile: What `torch.compile` compiles: "units", each unit (such as a block) that is kept;
            "model", the whole model; or "none".
        budget: Size that the step must fit, such as "11GiB", instead of the device's capacity; on a GPU of this
            machine instead of what is free now.
        allocator: Settings of PyTorch's CUDA allocator, as in PYTORCH_ALLOC_CONF: "expandable_segments:True".
        compare_allocators: Also predict the same step under other allocator settings.
        evaluate: Also predict the evaluation of one micro-batch after a step.
        suggest: Where the step does not fit, list changes with which it would, which takes several captures.
        without: Names of corrections to disable, to see what they change.
        save_trace: Write the predicted steps to this file; see `Trace.save`.

    Returns:
        Peak memory with its breakdown, step time, and whether the step fits.

    Raises:
        UsageError: An argument is invalid.
        InfeasibleError: The largest micro-batch is asked for, and not even one sample fits.
        CaptureError: The step cannot be run on fake tensors.
        SaveError: The trace cannot be written.
    """
    target = resolve_device(device)
    capacity_bytes = capacity_bytes_of(job, device, target, budget)
    of_allocator = allocator_of(allocator)
    if settings is None:
        chosen = replace(
            _settings(target, gradient_accumulation_steps, precision, optimizer),
            optimizer_implementation=parse_implementation(optimizer_implementation),
            optimizer_in_backward=optimizer_in_backward,
            offload_optimizer=offload_optimizer,
        )
        check_loop_decides(job, chosen)
        compiles = parse_compile(compile)
    else:
        _refuse_beside_settings(
            micro_batch_size=micro_batch_size is not None,
            gradient_accumulation_steps=gradient_accumulation_steps != 1,
            precision=precision is not Precision.FP32,
            optimizer=optimizer is not None,
            optimizer_implementation=optimizer_implementation is not None,
            recompute=recompute is not None,
            chunked_loss=chunked_loss,
            offload_activations=offload_activations,
            optimizer_in_backward=optimizer_in_backward,
            offload_optimizer=offload_optimizer,
            memory_format=memory_format is not None,
            compile=compile is not Compile.NONE,
        )
        target.check_precision(settings.precision)
        check_loop_decides(job, settings)
        micro_batch_size, compiles = settings.micro_batch_size, settings.compile
        chosen = replace(settings, micro_batch_size=1, compile=Compile.NONE)
        if of_allocator == DEFAULT_ALLOCATOR:
            of_allocator = AllocatorSettings.of(settings)
    question = _Question(
        job=job,
        device=target,
        settings=chosen,
        formats=_memory_formats(job, memory_format) if settings is None else (settings.memory_format,),
        actions=_actions(job, _pattern_of(recompute), chunked_loss, offload_activations, compiles),
        capacity_bytes=capacity_bytes,
        allocator=of_allocator,
        evaluates=evaluate,
        suggests=suggest,
        without=tuple(without),
    )
    if micro_batch_size == "largest":
        found, trace = question.largest(compares_allocators=compare_allocators)
    else:
        found, trace = question.at(micro_batch_size, compares_allocators=compare_allocators)
    if save_trace is not None:
        trace.save(save_trace)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What an estimate is asked, except for the micro-batch size: that of `settings` is 1."""

    job: Job
    device: Device
    settings: Settings
    formats: tuple[MemoryFormat | None, ...]
    """Memory formats of which the fastest is taken."""
    actions: tuple[Callable[[Settings, Trace], Settings], ...]
    """What the model's own units and layers are asked to do, whose names are not in `settings` yet."""
    capacity_bytes: int | None
    allocator: AllocatorSettings
    evaluates: bool
    suggests: bool
    without: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Notes of the memory formats."""

    def at(self, size: int | None, *, compares_allocators: bool) -> tuple[Estimate, Trace]:
        """The step at one micro-batch size, or at 1 if none is given, from a capture at that size."""
        samples = 1 if size is None else size
        longest = with_longest_batch(self.job, replace(self.settings, micro_batch_size=samples).rank_batch_size)
        capture = self._capture(longest.job)
        decided = self._decided(capture, samples)
        settings = replace(decided.settings, micro_batch_size=samples)
        trace = capture(settings)
        found = decided._estimate(
            trace,
            self.device,
            notes=(*([_SIZE_NOTE] if size is None else []), *longest.notes),
            tokens_per_sample=longest.tokens_per_sample,
            extremes=Extremes.of(trace, lambda guess: capture(settings, guess=guess)),
            compares_allocators=compares_allocators,
        )
        is_usual = self.allocator == AllocatorSettings.of(settings) and settings.compile is Compile.NONE
        is_usual = is_usual and not (self.evaluates or self.without)
        is_asked = self.suggests and is_usual
        if found.verdict is Verdict.DOES_NOT_FIT and longest.job.loop is None and is_asked:
            found = _with_suggestions(longest.job, self.device, trace, found)
        return replace(found, at_sizes=AtSizes(decided.estimator)), trace

    def largest(self, *, compares_allocators: bool) -> tuple[Estimate, Trace]:
        """The step at the largest micro-batch that fits, from captures at two sizes."""
        longest = with_longest_batch(self.job, _USUAL_SAMPLES)
        estimator = self._estimator(longest)
        found = estimator.largest(compares_allocators=compares_allocators)
        size = found.settings.micro_batch_size
        longer = _note_of_longer_batch(self.job, longest.job, size)
        return replace(found, notes=(*longer, *found.notes)), estimator.trace_at(size)

    def estimator(self) -> Estimator:
        """The step at any micro-batch size, from captures at two sizes."""
        return self._estimator(with_longest_batch(self.job, _USUAL_SAMPLES))

    def _estimator(self, longest: LongestBatch) -> Estimator:
        capture = undisturbed()(self._capture(longest.job))  # it is called after `estimate` returns, too
        decided = self._decided(capture, _USUAL_SAMPLES)
        estimated = partial(decided._estimate, notes=longest.notes, tokens_per_sample=longest.tokens_per_sample)
        return Estimator(capture, decided.settings, self.device, estimate=estimated)

    def _capture(self, job: Job) -> Callable[..., Trace]:
        return cache(
            partial(
                capture_step,
                job,
                device=self.device,
                steps=_steps_of(job),
                evaluates=self.evaluates,
                without=self.without,
            )
        )

    def _decided(self, capture: Callable[..., Trace], samples: int) -> _Question:
        """The question with the memory format that is fastest for some samples, and the units recomputed."""
        sized = replace(self.settings, micro_batch_size=samples)
        memory_format, notes = self.formats[0], self.notes
        if len(self.formats) > 1:
            memory_format, notes = _fastest_format(capture, sized, self.device, self.formats)
        settings = replace(self.settings, memory_format=memory_format)
        for with_action in self.actions:
            settings = with_action(settings, capture(replace(sized, memory_format=memory_format)))
        return replace(self, settings=settings, formats=(memory_format,), actions=(), notes=notes)

    def _estimate(
        self,
        trace: Trace,
        device: Device,
        *,
        notes: tuple[str, ...],
        tokens_per_sample: float | None,
        **given: Any,
    ) -> Estimate:
        trace = per_rank_trace(trace)
        found = estimate_trace(
            trace, device, capacity_bytes=self.capacity_bytes, allocator=self.allocator, **given
        )
        job = self.job
        has_default_optimizer = (
            job.loop is None and self.settings.optimizer is None and isinstance(job.optimizer, DefaultOptimizer)
        )
        of_optimizer = [DEFAULT_OPTIMIZER_NOTE] if has_default_optimizer else []
        return replace(
            found,
            notes=(
                *notes,
                *of_optimizer,
                *([] if self.settings.compile is Compile.NONE else [COMPILE_NOTE]),
                *self.notes,
                *untrained_notes(trace),
                *odd_size_notes(trace, device, found.step_time),
                *uncast_notes(trace),
                *half_weights_notes(trace),
            ),
            uncertain_ops=(*found.uncertain_ops, *growth_notes(trace)),
            tokens_per_sample=tokens_per_sample,
        )


def _with_suggestions(job: Job, device: Device, trace: Trace, estimate: Estimate) -> Estimate:
    """The estimate with the changes with which its step, which does not fit, would."""
    settings = estimate.settings
    asked = PlanOptions(precision=str(settings.precision), optimizer=settings.optimizer)
    request = request_of(
        job,
        device,
        asked,
        global_batch_size=settings.global_batch_size,
        world_size=1,
        num_nodes=1,
        is_here=False,
    )
    request = replace(request, budget_bytes=estimate.capacity_bytes)
    capture = CachedCapture(job, device)
    skipped: list[str] = []
    changes = JobChanges(job, device, capture)
    suggested = what_an_estimate_lacks(capture, request, trace, estimate, changes, notes=skipped)
    return replace(estimate, suggestions=suggested, notes=(*estimate.notes, *skipped))


@undisturbed()
@busy("comparing GPUs")
@checks_arguments
def gpus(
    job: Job,
    *,
    global_batch_size: int,
    precision: PrecisionLike = Precision.FP32,
    optimizer: str | None = None,
    split_batch_norm: bool = False,
    devices: Sequence[DeviceLike] | None = None,
    prices: Mapping[str, float] | str | Path | None = None,
    sort: str | None = None,
) -> GpuSurvey:
    """Compare GPUs for a job: which can train it, with which settings, and how fast.

    Args:
        job: The job to train.
        global_batch_size: Samples per optimizer step.
        precision: Precision of the baseline; GPUs without it use fp32. With fp32, which is strict (TF32 is
            off), each GPU is also tried in the precision that training on it usually takes: bf16 autocast, or
            fp16 on GPUs with tensor cores but without bf16.
        optimizer: Name of an optimizer that replaces the job's own.
        split_batch_norm: Permit splitting a batch that BatchNorm couples, or of a forward that updates state
            that the next one reads, such as a teacher's weights.
        devices: GPUs to compare; None compares all in the hardware table.
        prices: Price per hour by name of a GPU, or a CSV or JSON file of them, for the cost of a step and of a
            million samples; see `planner.prices_of`.
        sort: "speed", "memory" or "cost" sorts the records; None keeps the order of `devices`.

    Returns:
        One record per GPU: the peak memory of the baseline, the fastest of the settings tried that fit, in
        the precision asked for and in the usual one, with the interval of its time, or what would fit. It
        prints as a table.

    Raises:
        UsageError: An argument is invalid.
        CaptureError: The step cannot be run on fake tensors.
    """
    base = Settings(
        micro_batch_size=global_batch_size, precision=parse_precision(precision), optimizer=optimizer
    )
    if sort is not None and sort not in SORTS:
        raise UnknownNameError("order of GPUs", str(sort), SORTS)
    asked = known_devices() if devices is None else _resolved_gpus(devices)
    by_name = {} if prices is None else prices_of(prices, [device.name for device in asked])
    if sort == "cost" and not by_name.keys() & {device.name for device in asked}:
        raise UsageError(
            "sorting by cost takes prices of the GPUs that are compared: prices={…}, --prices FILE."
        )
    compared = [with_best_context(device) for device in asked]
    longest = with_longest_batch(job, global_batch_size)
    job = longest.job
    why_whole = why_not_split(job, global_batch_size)
    notes = longest.notes
    with CapturesOnDevices(job, compared) as captures:

        def survey() -> tuple[GpuFit, ...]:
            return survey_gpus(
                captures,
                compared,
                base,
                splits_coupled_batches=split_batch_norm,
                can_split=why_whole is None,
                compares_usual=base.precision is Precision.FP32,
            )

        fits = survey()
        is_checked = _is_split_checked(
            job, fits, lambda: captures(replace(base, precision=Precision.FP32), compared[0])
        )
        if is_checked is None:
            why_whole = _NOT_OF_PARTS
            fits = survey()
    if not is_checked:
        notes = (*notes, why_whole or _NOT_CHECKED)
    priced = [fit.with_price(by_name.get(fit.device)) for fit in fits]
    return GpuSurvey(
        priced,
        job=job.name,
        global_batch_size=global_batch_size,
        tokens_per_sample=longest.tokens_per_sample,
        sort=sort,
        notes=notes,
    )


_NOT_OF_PARTS = (
    "Micro-batches are not considered: the loss of a batch is not made of those of its parts, as a few samples "
    "show. `plan` says by how much."
)
_NOT_CHECKED = (
    "Micro-batches have the loss of the whole batch if it is a mean or a sum over samples, which a few samples "
    "did not show."
)


def _is_split_checked(job: Job, fits: Sequence[GpuFit], baseline: Callable[[], Trace]) -> bool | None:
    """Whether the loss is known to be made of those of micro-batches, as `plan` checks; None if it is not.

    True if none of the fits splits the batch.
    """
    split = (each.settings for each in fits if each.settings is not None)
    settings = next((each for each in split if each.gradient_accumulation_steps > 1), None)
    if settings is None:
        return True
    try:
        return check_planned_split(job, settings, baseline())
    except EquivalenceError:
        return None


def _resolved_gpus(devices: Sequence[DeviceLike]) -> list[Device]:
    for device in devices:  # before a CPU is calibrated
        if isinstance(device, Device):
            name, is_gpu = device.name, device.kind == "cuda"
        else:
            name = str(device)
            is_gpu = not is_of_this_machine(device) or choose_device(device, None).type == "cuda"
        if not is_gpu:
            raise UsageError(f"{name} is not a CUDA GPU; this table compares GPUs.")
    return [resolve_device(device) for device in devices]


@undisturbed()
@checks_arguments
def capture_trace(job: Job, settings: Settings, device: DeviceLike = "cpu") -> Trace:
    """Capture training steps as a record that can be saved, and read without torch.

    Args:
        job: The job to capture.
        settings: How its steps run.
        device: The target device; the capture follows its choice of kernels.

    Returns:
        Two optimizer steps, or three of a job's own loop, so that the last one is steady.

    Raises:
        CaptureError: The step cannot be run on fake tensors.
    """
    longest = with_longest_batch(job, settings.rank_batch_size).job
    return capture_step(longest, settings, resolve_device(device), steps=_steps_of(job))


LOOP_STEPS = 3
"""Captured steps of a job's own loop: the first creates the optimizer state, the third is steady."""


_USUAL_SAMPLES = 32
"""Samples for which memory formats and lengths are compared before the size is known: a choice."""


_SIZE_NOTE = (
    "The micro-batch is 1 sample, as no size is given: micro_batch_size=… (--micro-batch-size). "
    'micro_batch_size="largest" (--largest batch) finds the largest that fits.'
)


_MOST_BATCH_BYTES = 2**30
"""A larger batch is not made to look at its lengths. A choice."""


def _note_of_longer_batch(job: Job, predicted: Job, samples: int) -> tuple[str, ...]:
    """A note if samples are longer in a batch of the largest size, or no such batch can be made.

    `predicted` is the job with the batches that are predicted.
    """
    try:
        few = make_batch(predicted, _USUAL_SAMPLES)
        few_bytes = sum(tensor.nbytes for _, tensor in named_tensors(few))
        if few_bytes * samples > _MOST_BATCH_BYTES * _USUAL_SAMPLES:
            return ()
        low = sample_sizes(few, layout_of(job, whole=_USUAL_SAMPLES))
        high = sample_sizes(make_batch(job, samples), layout_of(job, whole=samples))
    except Exception as error:  # whatever the job's own code raises
        return (f"No batch of {samples} samples, which would fit, could be made: {error}",)
    growth = describe_growth(low, high)
    if growth is None:
        return ()
    place, usual, longer = growth
    return (
        f"A batch of {samples} samples is longer: {place} is {longer}, and {usual} in one of "
        f"{_USUAL_SAMPLES}, which is predicted. micro_batch_size={samples} predicts the longer one.",
    )


def _steps_of(job: Job) -> int:
    return 2 if job.loop is None else LOOP_STEPS


def _settings(
    device: Device,
    gradient_accumulation_steps: int,
    precision: PrecisionLike,
    optimizer: str | None,
) -> Settings:
    settings = Settings(
        micro_batch_size=1,
        gradient_accumulation_steps=gradient_accumulation_steps,
        precision=parse_precision(precision),
        optimizer=optimizer,
    )
    device.check_precision(settings.precision)
    return settings


def capacity_bytes_of(job: Job, device: DeviceLike, target: Device, budget: str | float | None) -> int | None:
    """The bytes to judge against: the budget, else what is free on a GPU of this machine; None: all it has.

    Warns of what others hold, and of a GPU that no build of torch has kernels for.
    """
    if cannot_run_torch(target):
        warnings.warn(f"{torch_builds_note(target)}", stacklevel=6)
    if budget is not None:
        return parse_bytes(budget, is_budget=False)
    memory = memory_here(job, device)
    if memory is None:
        return None
    if memory.is_worth_saying:
        warnings.warn(memory.describe(), stacklevel=6)
    return memory.available_bytes


def _memory_formats(job: Job, asked: MemoryFormatLike | None) -> tuple[MemoryFormat | None, ...]:
    formats = parse_memory_formats(asked)
    check_loop_decides(job, Settings(micro_batch_size=1, memory_format=formats[0]))
    return formats


def _fastest_format(
    capture: Callable[..., Trace],
    settings: Settings,
    device: Device,
    formats: Sequence[MemoryFormat | None],
) -> tuple[MemoryFormat | None, tuple[str, ...]]:
    """The memory format that is predicted to be fastest, and notes of those that cannot be used."""
    first, *others = formats
    traces, notes = [capture(replace(settings, memory_format=first))], []
    for other in others if traces[0].convolves_images else ():
        try:
            traces.append(capture(replace(settings, memory_format=other)))
        except (CaptureError, UsageError) as error:
            notes.append(f"The memory format {other} is not considered: {error}")
    fastest = min(traces, key=lambda trace: step_seconds(trace, device).total_seconds)
    return fastest.settings.memory_format, tuple(notes)


_ALL_UNITS = "*"


def _pattern_of(recompute: str | Action | None) -> str | None:
    """The pattern of names of units to recompute; None for none."""
    if isinstance(recompute, str) and not isinstance(recompute, Action) and set(recompute) & set("*?[."):
        return recompute
    return _ALL_UNITS if parse_recompute(recompute, permits_auto=False) is Action.RECOMPUTE else None


def _actions(
    job: Job, pattern: str | None, chunks_loss: bool, offloads: bool, compiles: Compile
) -> tuple[Callable[[Settings, Trace], Settings], ...]:
    """What is asked of units and layers; UsageError if it goes with neither the job nor the rest."""
    compiled = compiles is not Compile.NONE
    if job.loop is not None and (chunks_loss or offloads or compiled):
        raise UsageError(
            f"{job.name!r} brings its own training loop, which computes the loss and has no units to offload "
            "or compile. Leave chunked_loss, offload_activations and compile out, or take the loop out of the "
            "job."
        )
    if offloads and pattern is not None:
        raise UsageError(
            "recompute and offload_activations both say what becomes of what a unit saves. Give one of them; "
            "settings=Settings(units=…) mixes them."
        )
    of_units = [_with_offloaded] if offloads else []
    if pattern is not None:
        of_units = [partial(_with_recomputed, pattern=pattern)]
    of_loss = [_with_chunked_loss] if chunks_loss else []
    return (*of_units, *of_loss, *([partial(_with_compiled, compiles=compiles)] if compiled else []))


def _with_compiled(settings: Settings, trace: Trace, compiles: Compile) -> Settings:
    """The settings with the model or its units compiled; units that they do not name are kept."""
    if compiles is Compile.UNITS and not settings.units:
        units = tuple(UnitAction(fqn=unit, action=Action.KEEP) for unit in find_units(trace))
        settings = replace(settings, units=units)
    return replace(settings, compile=compiles)


def _with_offloaded(settings: Settings, trace: Trace) -> Settings:
    units = find_units(trace)
    if len(units) < 2:
        raise UsageError(
            f"offload_activations offloads all units (such as blocks) but the last; the model has {len(units)}."
        )
    return replace(settings, units=offloaded_units(units))


def _with_chunked_loss(settings: Settings, trace: Trace) -> Settings:
    if trace.couples_samples:
        raise UsageError(
            "chunked_loss computes a cross-entropy in parts, and this job's loss compares the samples of a "
            "batch with each other (Job(embed=…)), so it is computed whole. Leave chunked_loss out."
        )
    chunked = chunked_loss_of(trace)
    if chunked is None:
        raise UsageError(
            "chunked_loss computes a cross-entropy in parts, and this step has none whose logits are large and "
            "come from a linear layer. Leave it out."
        )
    return replace(settings, chunked_loss=chunked)


def _with_recomputed(settings: Settings, trace: Trace, pattern: str) -> Settings:
    """The settings with the units recomputed whose names match; UnknownNameError if none does."""
    units = find_units(trace)
    actions = {unit: Action.RECOMPUTE if fnmatchcase(unit, pattern) else Action.KEEP for unit in units}
    if pattern != _ALL_UNITS and Action.RECOMPUTE not in actions.values():
        raise UnknownNameError("unit", pattern, units)
    return replace(settings, units=tuple(UnitAction(fqn=unit, action=actions[unit]) for unit in units))


def _refuse_beside_settings(**given: bool) -> None:
    """Refuse options that settings have; each says whether it was given."""
    named = [name for name, is_given in given.items() if is_given]
    if named:
        raise UsageError(f"settings say how the step runs; give {', '.join(named)} in them.")


def allocator_of(allocator: str | AllocatorSettings) -> AllocatorSettings:
    """The allocator's settings, from a text as in PYTORCH_ALLOC_CONF."""
    return allocator if isinstance(allocator, AllocatorSettings) else AllocatorSettings.parse(allocator)
