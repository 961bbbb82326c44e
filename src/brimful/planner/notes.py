"""Notes of a plan: what it changes, what is uncertain, and what was not considered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from brimful.cost import difference_interval
from brimful.devices import Device, torch_builds_note
from brimful.job import DEFAULT_OPTIMIZER_NOTE
from brimful.planner.alternatives import least_device_bytes
from brimful.planner.candidate_search import CandidateSearch
from brimful.planner.coupling import listed, what_splitting_changes, why_kept_whole
from brimful.planner.fastest import by_least_time
from brimful.planner.headroom import exceedance_of
from brimful.planner.plan import NOT_SURE
from brimful.planner.request import Request
from brimful.prediction.estimate import Estimate
from brimful.prediction.exceedance import DEFAULT_PROBABILITY, bytes_at_probability
from brimful.prediction.untrained import untrained_notes
from brimful.quantities import format_bytes, format_seconds
from brimful.settings import MemoryFormat, OptimizerImplementation, Settings
from brimful.trace import Trace

_OWN_LOOP_NOTE = (
    "The job's own training loop is not used: this is a plan for brimful's own step, with one loss and one "
    "optimizer. `estimate` follows the loop."
)

MEAN_OVER_SAMPLES_NOTE = (
    "The loss must be a mean over samples. For a mean over something else, such as tokens that are not "
    'ignored, pass Job(count=...); for a sum, Job(reduction="sum").'
)
"""Note of a plan that splits the batch of a job without a count. Integrations, whose users have no `Job`,
replace it."""

_FUSED_NOTE = (
    "The optimizer runs as one fused kernel: the same formula, rounded in another order, in the last digits."
)

_CHUNKED_NOTE = (
    "Chunked cross-entropy: the loss is computed for a part of the tokens at a time, the same sums in another "
    "order. Logits that are used for anything else are computed again."
)

_FORMAT_NOTE = (
    "The step runs in channels_last: the same sums in another order, equal within rounding. Random layers such "
    "as dropout may draw other numbers for each element."
)

_FORMATS_ON_CPU_NOTE = (
    "On a CPU a convolution is timed alike in both memory formats, so only other work decided between them. "
    "brimful.measure with each shows which is faster."
)

_EXPANDABLE_NOTE = (
    "The CUDA allocator uses expandable segments, without which less fits. brimful's own step and training "
    "enable them; elsewhere set PYTORCH_ALLOC_CONF=expandable_segments:True."
)

_GUESSED_NOTE = (
    "Values that are not known before training decide sizes, such as the experts that a router selects. The "
    "plan assumes an even or the most uneven selection, whichever takes more; others may take a little more."
)

_BUSY_NOTE = (
    "Step times rest on measurements of this device while other work kept it busy, and may be far off. "
    "`brimful calibrate --force` measures again."
)


NOTED_GAIN = 0.05
"""Fraction of the step time that a plan which exceeds the budget more often must gain to be noted. A choice."""


def notes_for(
    found: Sequence[Estimate],
    baseline: Trace,
    request: Request,
    candidates: Sequence[CandidateSearch],
    searching: Sequence[str],
) -> tuple[str, ...]:
    """The notes of a plan: those of the search first, which say what could not be searched, then by topic.

    The plan is the first of the choices found.
    """
    best = found[0]
    settings = best.settings
    return (
        *dict.fromkeys(searching),
        *_what_simplicity_costs(found, request),
        *([_BUSY_NOTE] if request.device.was_measured_busy else []),
        *_which_torch_has_kernels(request.device),
        *_why_the_batch_is_whole(settings, baseline, request),
        *([_OWN_LOOP_NOTE] if request.job.brings_own_loop else []),
        *([DEFAULT_OPTIMIZER_NOTE] if request.job.has_default_optimizer and settings.optimizer is None else []),
        *_what_splitting_changes(settings, baseline, request),
        *_what_the_optimizer_changes(settings, request),
        *_what_the_host_gives(best, request),
        *_where_the_optimizer_returns(best, request, candidates),
        *_what_the_model_recomputes(best, baseline),
        *([_GUESSED_NOTE] if baseline.sizes_are_guessed else []),
        *_what_ranks_take(settings, baseline, request),
        *([_CHUNKED_NOTE] if settings.chunked_loss else []),
        *_what_the_format_changes(settings, request),
        *([_EXPANDABLE_NOTE] if settings.expandable_segments else []),
        *([_FUSED_NOTE] if settings.optimizer_implementation is OptimizerImplementation.FUSED else []),
        *untrained_notes(baseline),
        *(f"{NOT_SURE}{uncertain}." for uncertain in best.uncertain),
        *_what_it_may_take(best, request, candidates),
    )


def _which_torch_has_kernels(device: Device) -> list[str]:
    """Note that builds of torch lack kernels for an old GPU."""
    note = torch_builds_note(device)
    return [] if note is None else [note]


def _why_the_batch_is_whole(settings: Settings, baseline: Trace, request: Request) -> list[str]:
    """Note that no smaller micro-batches were tried, if the job's batches cannot be split, or should not be.

    Layers that depend on the micro-batch are named where the plan spares memory in another way.
    """
    if request.job.why_not_split is not None:
        return [f"Smaller micro-batches were not considered: {request.job.why_not_split}"]
    if request.keeps_batch_whole(baseline) and (settings.changed or settings.chunked_loss):
        return [
            f"The batch is not split: {why_kept_whole(baseline)}. To permit it, set split_batch_norm=True "
            "(--split-batch-norm)."
        ]
    return []


def _what_the_optimizer_changes(settings: Settings, request: Request) -> list[str]:
    """Note that the optimizer is another than the job's, if it is."""
    if settings.optimizer == request.asked.optimizer:
        return []
    return [
        f"The optimizer is {settings.optimizer}, which you allowed: it computes other updates than the job's."
    ]


def _what_the_format_changes(settings: Settings, request: Request) -> list[str]:
    """Notes that channels_last rounds otherwise, and that a CPU's choice rests on copies alone."""
    notes = [_FORMAT_NOTE] if settings.memory_format is MemoryFormat.CHANNELS_LAST else []
    if request.device.kind == "cpu" and len(request.memory_formats) > 1:
        notes.append(_FORMATS_ON_CPU_NOTE)
    return notes


def _what_it_may_take(best: Estimate, request: Request, candidates: Sequence[CandidateSearch]) -> list[str]:
    """The probability of exceeding the budget, where it is larger than is permitted, or than by default."""
    probability, permitted = exceedance_of(best, request), request.asked.max_exceedance
    if probability <= min(permitted, DEFAULT_PROBABILITY):
        return []
    wanted = min(permitted, DEFAULT_PROBABILITY)
    needed_bytes = bytes_at_probability(best, request.device.kind, wanted)
    unsure = (
        "what kernels take inside, what the allocator reserves and the CUDA context are not known to the byte"
        if request.device.kind == "cuda"
        else "what some kernels take inside is not known exactly"
    )
    least_bytes = min(least_device_bytes(request, candidates, best), best.predicted_peak_device_bytes)
    if best.settings.nested:
        nesting = (each for each in candidates if each.settings == replace(best.settings, units=()))
        nested_bytes = (
            min(each.grid.smallest_nested_peak_bytes for each in nesting) + request.device.context_bytes
        )
        least_bytes = min(least_bytes, nested_bytes)
    limit = "the budget" if request.limit_bytes is None else "the device's memory"
    reason = "as max_exceedance permits" if probability <= permitted else "and nothing safer was found"
    return [
        f"The peak exceeds {limit} with a probability of about {probability:.2g}, {reason}: {unsure}. With "
        f"{format_bytes(needed_bytes)} it would be {wanted:g}; the least that any plan takes is about "
        f"{format_bytes(least_bytes)}."
    ]


def what_safety_costs(best: Estimate, candidates: Sequence[CandidateSearch], request: Request) -> list[str]:
    """What is expected within the budget and clearly faster than a plan that has more headroom."""
    if exceedance_of(best, request) > request.asked.max_exceedance:
        return []
    bound = best.predicted_step_seconds * (1 - NOTED_GAIN)
    riskier = next(by_least_time(candidates, request.reserved_budget_bytes), None)
    if riskier is None or riskier.seconds >= bound:
        return []
    gain = 1 - riskier.seconds / best.predicted_step_seconds
    return [
        f"With less headroom, {riskier.settings.describe()} is expected to fit and to be {gain:.0%} faster. A "
        f"max_exceedance (--max-exceedance) above {request.asked.max_exceedance:g} permits it."
    ]


def _what_simplicity_costs(found: Sequence[Estimate], request: Request) -> list[str]:
    """What the fastest choice does beyond the plan, and what it would gain, if a simpler one was chosen."""
    best = found[0]
    fastest = min(found, key=lambda estimate: estimate.predicted_step_seconds)
    if not request.prefers_simplest or fastest is best:
        return []
    seconds = best.predicted_step_seconds
    gained = difference_interval(best.step_time, fastest.step_time, request.device)
    low, high = (each / seconds for each in gained)
    gain = 1 - fastest.predicted_step_seconds / seconds
    less_bytes = fastest.predicted_peak_device_bytes - best.predicted_peak_device_bytes
    less = f" and takes {format_bytes(less_bytes)} less" if less_bytes > 0 else ""
    return [
        f"{fastest.settings.describe()}: {gain:.1%} faster as predicted ({low:+.1%} to {high:+.1%}), which "
        f"cannot be distinguished from no gain. The plan is simpler{less}; "
        'effort="max" (--effort max) takes the faster.'
    ]


def _what_the_host_gives(best: Estimate, request: Request) -> list[str]:
    """Host memory that the plan takes, and the rates by which its copies and updates are timed."""
    device, settings = request.device, best.settings
    notes = []
    if settings.offload_optimizer and device.kind == "cpu":
        notes.append(
            "The optimizer is on the host, as you asked, which is the device here: nothing is spared, and what "
            "is on its way takes memory."
        )
    if settings.offloaded:
        assert device.host_link_bytes_per_second is not None
        notes.append(
            f"Offloading's copies are timed at {device.host_link_bytes_per_second / 1e9:.3g} GB/s each way; "
            "`brimful calibrate` measures the link of a GPU in this machine."
        )
    if settings.offload_parameters and device.kind == "cuda":
        notes.append(
            "Each rank has its parts of parameters, gradients and optimizer state, "
            f"{format_bytes(best.predicted_host_state_bytes)}, in the host's memory, and updates them there as "
            f"if it had {device.host_update_bytes_per_second / 1e9:.3g} GB/s for itself."
        )
    if settings.offload_optimizer and device.kind == "cuda":
        is_measured = device.measured_host_update_bytes_per_second is not None
        how = "measured" if is_measured else "assumed: `brimful calibrate` measures it where the GPU is"
        notes.append(
            f"The optimizer's state, {format_bytes(best.predicted_host_state_bytes)}, is in the host's memory, "
            "and updates are rounded as the host's kernels round. They are timed as if the host read and wrote "
            f"{device.host_update_bytes_per_second / 1e9:.3g} GB/s ({how})."
        )
    taken_bytes = best.predicted_pinned_host_bytes + best.predicted_host_state_bytes
    if taken_bytes and device.kind == "cuda":
        permitted_bytes = request.offload_host_bytes
        permitted = f"{format_bytes(permitted_bytes)} permitted (set it with host_memory, --host-memory)"
        how = "of the" if taken_bytes <= permitted_bytes else "more than the"
        notes.append(
            f"{'Training' if settings.world_size == 1 else 'Each rank'} takes {format_bytes(taken_bytes)} of "
            f"the host's memory, {how} {permitted}; "
            f"{format_bytes(best.predicted_pinned_host_bytes)} of it are pinned for copies."
        )
    return notes


def _where_the_optimizer_returns(
    best: Estimate, request: Request, candidates: Sequence[CandidateSearch]
) -> list[str]:
    """Note of the budget from which the optimizer fits the device, if want of room sent it to the host."""
    if not best.settings.offload_optimizer or request.asked.offload_optimizer:
        return []
    on_device = [each for each in candidates if not each.settings.offload_optimizer]
    least_bytes = min(each.grid.smallest_peak_bytes for each in on_device) + request.device.context_bytes
    if least_bytes <= request.budget_bytes:
        return []
    return [f"With its optimizer on the device a plan takes about {format_bytes(least_bytes)} or more."]


def _what_the_model_recomputes(best: Estimate, baseline: Trace) -> list[str]:
    """Note on the cost of the model's own activation checkpointing, or that it is off."""
    regions = baseline.own_checkpoints
    if not regions:
        return []
    if best.settings.own_checkpointing:
        recompute = format_seconds(best.step_time.recompute_seconds)
        return [
            f"The model itself checkpoints {regions} regions of its forward, which are recomputed in backward "
            f"whatever the plan chooses. Recomputation takes {recompute} of a step of "
            f'{format_seconds(best.predicted_step_seconds)}. Turn it off (own_checkpointing="off", '
            "--own-checkpointing off), and the plan alone decides what is recomputed."
        ]
    if best.own_checkpoints:
        return [
            f"The model itself still checkpoints {best.own_checkpoints} regions of its forward: they have no "
            "attribute gradient_checkpointing or grad_checkpointing that turns them off. Remove "
            "torch.utils.checkpoint from the model's code."
        ]
    return [f"The model's own checkpointing of {regions} regions is off while the plan is applied."]


def _what_ranks_take(settings: Settings, baseline: Trace, request: Request) -> list[str]:
    """Notes on what is uncertain about training on several ranks, and what it changes."""
    if settings.world_size == 1:
        return []
    rate = request.device.peer_bytes_per_second(settings.world_size, settings.num_nodes)
    unseen = (
        "NCCL's own memory is not counted"
        if request.device.kind == "cuda"
        else "each is timed as if it had the machine to itself"
    )
    notes = [
        f"What is predicted is of each of {settings.world_size} ranks. Gradients are taken to go between them "
        f"at {rate / 1e9:.3g} GB/s; {unseen}."
    ]
    if settings.param_dtype is not None:
        notes.append(
            f"Parameters are gathered in {settings.param_dtype}: those of norms and embeddings, and what "
            "comes into each unit, are rounded to it too, which autocast alone does not do. Gradients are "
            "averaged in float32."
        )
    if settings.parallelism.is_zero:
        notes.append("What DeepSpeed takes is computed by its rules, not captured, and is less exact.")
    if baseline.stateful_modules:
        notes.append(
            f"Each forward changes what the next one finds, {listed(baseline.stateful_modules)}, "
            "each rank for itself; "
            "that of the first is kept."
        )
    if baseline.batch_norm_modules:
        notes.append(
            f"{len(baseline.batch_norm_modules)} BatchNorm layers normalise over each rank's own samples, not "
            "over the global batch. On GPUs nn.SyncBatchNorm.convert_sync_batchnorm(model) lets ranks share "
            "statistics; the first rank's running statistics are those kept."
        )
    return notes


def _what_splitting_changes(settings: Settings, baseline: Trace, request: Request) -> list[str]:
    """Notes on differences from the baseline if the batch is split."""
    if settings.gradient_accumulation_steps == 1:
        return []
    changes = []
    if baseline.couples_samples:
        changes.append(
            "The loss is that of all samples of the global batch together: each micro-batch's forward runs "
            "twice, without gradients for its embeddings, then for their gradient."
        )
    elif not request.job.weighs_by_count:
        changes.append(MEAN_OVER_SAMPLES_NOTE)
    for change in what_splitting_changes(baseline.batch_norm_modules, baseline.stateful_modules, settings):
        changes.append(f"{change[0].upper()}{change[1:]}.")
    if any(op.random for op in baseline.ops):
        changes.append(
            "Random layers (dropout) draw other numbers for a split batch: the same distribution, "
            "not the same values."
        )
    return changes
