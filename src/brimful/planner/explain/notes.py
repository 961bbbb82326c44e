"""Notes of a plan: what it changes, what is uncertain, and what was not considered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from brimful.cost import difference_interval
from brimful.devices import torch_builds_note
from brimful.job import DEFAULT_OPTIMIZER_NOTE
from brimful.planner.candidate import Candidate
from brimful.planner.coupling import batch_norms_that, listed, what_splitting_changes, why_kept_whole
from brimful.planner.explain.alternatives import least_device_bytes
from brimful.planner.fastest import by_least_time
from brimful.planner.headroom import exceedance_of
from brimful.planner.plan import NOT_SURE
from brimful.planner.request import Request
from brimful.prediction.estimate import COMPILE_NOTE, Estimate
from brimful.prediction.exceedance import DEFAULT_PROBABILITY, bytes_at_probability
from brimful.prediction.odd_sizes import odd_size_notes
from brimful.prediction.uncast import half_weights_notes, uncast_notes
from brimful.prediction.untrained import untrained_notes
from brimful.settings import Compile, MemoryFormat, OptimizerImplementation, Settings
from brimful.trace import Trace
from brimful.utils.quantities import format_bytes, format_seconds

MEAN_OVER_SAMPLES_NOTE = (
    "The loss must be a mean over samples. For a mean over something else, such as tokens that are not "
    'ignored, pass Job(count=...); for a sum, Job(reduction="sum").'
)
"""Note of a plan that splits the batch of a job without a count. Integrations, whose users have no `Job`,
replace it."""

NOTED_GAIN = 0.05
"""Fraction of the step time that a plan which exceeds the budget more often must gain to be noted. A choice."""


def notes_for(
    found: Sequence[Estimate],
    baseline: Trace,
    planned: Trace,
    request: Request,
    candidates: Sequence[Candidate],
    searching: Sequence[str],
) -> Iterator[str]:
    """The notes of a plan: those of the search first, which say what could not be searched, then by topic.

    The plan is the first of the choices found; `planned` is its trace, `baseline` that of training without it.
    """
    best = found[0]
    yield from dict.fromkeys(searching)
    yield from _what_simplicity_costs(found, request)
    yield from about_device_and_job(best.settings, baseline, request)
    yield from _what_splitting_changes(best.settings, baseline, request)
    if best.settings.optimizer != request.asked.optimizer:
        yield (
            f"The optimizer is {best.settings.optimizer}, which you allowed: it computes other updates than "
            "the job's."
        )
    yield from _what_compiling_gives(found)
    yield from _what_the_host_gives(best, request)
    yield from _where_the_optimizer_returns(best, request, candidates)
    yield from _what_the_model_recomputes(best, baseline)
    if baseline.sizes_are_guessed:
        yield (
            "Values that are not known before training decide sizes, such as the experts that a router "
            "selects. The plan assumes an even or the most uneven selection, whichever takes more; others may "
            "take a little more."
        )
    yield from _what_ranks_take(best.settings, baseline, request)
    yield from _what_settings_change(best.settings, request)
    yield from untrained_notes(baseline)
    yield from odd_size_notes(planned, request.device, best.step_time)
    yield from uncast_notes(planned)
    yield from half_weights_notes(planned)
    yield from (f"{NOT_SURE}{uncertain}." for uncertain in best.uncertain)
    yield from _what_it_may_take(best, request, candidates)


def _what_compiling_gives(found: Sequence[Estimate]) -> Iterator[str]:
    best = found[0]
    if best.settings.compile is Compile.NONE:
        return
    eager = next((each for each in found if each.settings.compile is Compile.NONE), None)
    gain = ""
    if eager is not None:
        more = eager.predicted_peak_device_bytes - best.predicted_peak_device_bytes
        gain = (
            f" The fastest step that compiles nothing takes {format_seconds(eager.predicted_step_seconds)} and "
            f"{format_bytes(abs(more))} {'more' if more >= 0 else 'less'}."
        )
    yield f"{COMPILE_NOTE}{gain}"


def about_device_and_job(settings: Settings, baseline: Trace, request: Request) -> Iterator[str]:
    """Notes on times and builds of torch, on why the batch is whole, and on what the job leaves open."""
    if request.device.was_measured_busy:
        yield (
            "Step times rest on measurements of this device while other work kept it busy, and may be far off. "
            "`brimful calibrate --force` measures again."
        )
    if (note := torch_builds_note(request.device)) is not None:
        yield note
    if request.job.why_not_split is not None:
        yield f"Smaller micro-batches were not considered: {request.job.why_not_split}"
    elif request.keeps_batch_whole(baseline) and (settings.changed or settings.chunked_loss):
        yield (
            f"The batch is not split: {why_kept_whole(baseline)}. To permit it, set split_batch_norm=True "
            "(--split-batch-norm)."
        )
    if request.job.brings_own_loop:
        yield (
            "The job's own training loop is not used: what is predicted is brimful's own step, with one loss "
            "and one optimizer. `estimate` follows the loop."
        )
    if request.job.has_default_optimizer and settings.optimizer is None:
        yield DEFAULT_OPTIMIZER_NOTE


def _what_settings_change(settings: Settings, request: Request) -> Iterator[str]:
    """Notes on what rounds otherwise, on a CPU's choice of memory formats, and on the allocator."""
    if settings.chunked_loss:
        yield (
            "Chunked cross-entropy: the loss is computed for a part of the tokens at a time, the same sums in "
            "another order. Logits that are used for anything else are computed again."
        )
    if settings.memory_format is MemoryFormat.CHANNELS_LAST:
        yield (
            "The step runs in channels_last: the same sums in another order, equal within rounding. Random "
            "layers such as dropout may draw other numbers for each element."
        )
    if request.device.kind == "cpu" and len(request.memory_formats) > 1:
        yield (
            "On a CPU a convolution is timed alike in both memory formats, so only other work decided between "
            "them. brimful.measure with each shows which is faster."
        )
    if settings.expandable_segments:
        yield (
            "The CUDA allocator uses expandable segments, without which less fits. brimful's own step and "
            "training enable them; elsewhere set PYTORCH_ALLOC_CONF=expandable_segments:True."
        )
    if settings.optimizer_implementation is OptimizerImplementation.FUSED:
        yield (
            "The optimizer runs as one fused kernel: the same formula, rounded in another order, in the last "
            "digits."
        )


def _what_it_may_take(best: Estimate, request: Request, candidates: Sequence[Candidate]) -> Iterator[str]:
    """The probability of exceeding the budget, where it is larger than is permitted, or than by default."""
    probability, permitted = exceedance_of(best, request), request.asked.max_exceedance
    wanted = min(permitted, DEFAULT_PROBABILITY)
    if probability <= wanted:
        return
    needed_bytes = bytes_at_probability(best.device_peak, request.device.kind, wanted)
    unsure = (
        "what kernels take inside, what the allocator reserves and the CUDA context are not known to the byte"
        if request.device.kind == "cuda"
        else "what some kernels take inside is not known exactly"
    )
    least_bytes = min(least_device_bytes(request, candidates, best), best.predicted_peak_device_bytes)
    if best.settings.nested:
        nesting = (each for each in candidates if each.settings == replace(best.settings, units=()))
        nested_bytes = (
            min(each.solutions.smallest_nested_peak_bytes for each in nesting) + request.device.context_bytes
        )
        least_bytes = min(least_bytes, nested_bytes)
    limit = "the budget" if request.limit_bytes is None else "the device's memory"
    reason = "as max_exceedance permits" if probability <= permitted else "and nothing safer was found"
    yield (
        f"The peak exceeds {limit} with a probability of about {probability:.2g}, {reason}: {unsure}. With "
        f"{format_bytes(needed_bytes)} it would be {wanted:g}; the least that any plan takes is about "
        f"{format_bytes(least_bytes)}."
    )


def what_safety_costs(best: Estimate, candidates: Sequence[Candidate], request: Request) -> Iterator[str]:
    """What is expected within the budget and clearly faster than a plan that has more headroom."""
    if exceedance_of(best, request) > request.asked.max_exceedance:
        return
    bound = best.predicted_step_seconds * (1 - NOTED_GAIN)
    riskier = next(by_least_time(candidates, request.reserved_budget_bytes), None)
    if riskier is not None and riskier.seconds < bound:
        gain = 1 - riskier.seconds / best.predicted_step_seconds
        yield (
            f"With less headroom, {riskier.settings.describe()} is expected to fit and to be {gain:.0%} "
            f"faster. A max_exceedance (--max-exceedance) above {request.asked.max_exceedance:g} permits it."
        )


def _what_simplicity_costs(found: Sequence[Estimate], request: Request) -> Iterator[str]:
    """What the fastest choice does beyond the plan, and what it would gain, if a simpler one was chosen."""
    best = found[0]
    fastest = min(found, key=lambda estimate: estimate.predicted_step_seconds)
    if not request.prefers_simplest or fastest is best:
        return
    seconds = best.predicted_step_seconds
    gained = difference_interval(best.step_time, fastest.step_time, request.device)
    low, high = (each / seconds for each in gained)
    gain = 1 - fastest.predicted_step_seconds / seconds
    less_bytes = fastest.predicted_peak_device_bytes - best.predicted_peak_device_bytes
    less = f" and takes {format_bytes(less_bytes)} less" if less_bytes > 0 else ""
    yield (
        f"{fastest.settings.describe()}: {gain:.1%} faster as predicted ({low:+.1%} to {high:+.1%}), which "
        f"cannot be distinguished from no gain. The plan is simpler{less}; "
        'effort="max" (--effort max) takes the faster.'
    )


def _what_the_host_gives(best: Estimate, request: Request) -> Iterator[str]:
    """Host memory that the plan takes, and the rates by which its copies and updates are timed."""
    device, settings = request.device, best.settings
    if settings.offload_optimizer and device.kind == "cpu":
        yield (
            "The optimizer is on the host, as you asked, which is the device here: nothing is spared, and what "
            "is on its way takes memory."
        )
    if settings.offloaded:
        assert device.host_link_bytes_per_second is not None
        yield (
            f"Offloading's copies are timed at {device.host_link_bytes_per_second / 1e9:.3g} GB/s each way; "
            "`brimful calibrate` measures the link of a GPU in this machine."
        )
    if settings.offload_parameters and device.kind == "cuda":
        yield (
            "Each rank has its parts of parameters, gradients and optimizer state, "
            f"{format_bytes(best.predicted_host_state_bytes)}, in the host's memory, and updates them there as "
            f"if it had {device.host_update_bytes_per_second / 1e9:.3g} GB/s for itself."
        )
    if settings.offload_optimizer and device.kind == "cuda":
        is_measured = device.measured_host_update_bytes_per_second is not None
        how = "measured" if is_measured else "assumed: `brimful calibrate` measures it where the GPU is"
        yield (
            f"The optimizer's state, {format_bytes(best.predicted_host_state_bytes)}, is in the host's memory, "
            "and updates are rounded as the host's kernels round. They are timed as if the host read and wrote "
            f"{device.host_update_bytes_per_second / 1e9:.3g} GB/s ({how})."
        )
    taken_bytes = best.predicted_pinned_host_bytes + best.predicted_host_state_bytes
    if taken_bytes and device.kind == "cuda":
        permitted_bytes = request.offload_host_bytes
        permitted = f"{format_bytes(permitted_bytes)} permitted (set it with host_memory, --host-memory)"
        how = "of the" if taken_bytes <= permitted_bytes else "more than the"
        yield (
            f"{'Training' if settings.world_size == 1 else 'Each rank'} takes {format_bytes(taken_bytes)} of "
            f"the host's memory, {how} {permitted}; "
            f"{format_bytes(best.predicted_pinned_host_bytes)} of it are pinned for copies."
        )


def _where_the_optimizer_returns(
    best: Estimate, request: Request, candidates: Sequence[Candidate]
) -> Iterator[str]:
    """Note of the budget from which the optimizer fits the device, if want of room sent it to the host."""
    if not best.settings.offload_optimizer or request.asked.offload_optimizer:
        return
    on_device = [each for each in candidates if not each.settings.offload_optimizer]
    least_bytes = min(each.solutions.smallest_peak_bytes for each in on_device) + request.device.context_bytes
    if least_bytes > request.budget_bytes:
        yield f"With its optimizer on the device a plan takes about {format_bytes(least_bytes)} or more."


def _what_the_model_recomputes(best: Estimate, baseline: Trace) -> Iterator[str]:
    """Note on the cost of the model's own activation checkpointing, or that it is off."""
    regions = baseline.own_checkpoints
    if regions and best.settings.own_checkpointing:
        recompute = format_seconds(best.step_time.recompute_seconds)
        yield (
            f"The model itself checkpoints {regions} regions of its forward, which are recomputed in backward "
            f"whatever the plan chooses. Recomputation takes {recompute} of a step of "
            f'{format_seconds(best.predicted_step_seconds)}. Turn it off (own_checkpointing="off", '
            "--own-checkpointing off), and the plan alone decides what is recomputed."
        )
    elif regions and best.own_checkpoints:
        yield (
            f"The model itself still checkpoints {best.own_checkpoints} regions of its forward: they have no "
            "attribute gradient_checkpointing or grad_checkpointing that turns them off. Remove "
            "torch.utils.checkpoint from the model's code."
        )
    elif regions:
        yield f"The model's own checkpointing of {regions} regions is off while the plan is applied."


def _what_ranks_take(settings: Settings, baseline: Trace, request: Request) -> Iterator[str]:
    """Notes on what is uncertain about training on several ranks, and what it changes."""
    if settings.world_size == 1:
        return
    rate = request.device.peer_bytes_per_second(settings.world_size, settings.num_nodes)
    unseen = (
        "NCCL's own memory is not counted"
        if request.device.kind == "cuda"
        else "each is timed as if it had the machine to itself"
    )
    yield (
        f"What is predicted is of each of {settings.world_size} ranks. Gradients are taken to go between them "
        f"at {rate / 1e9:.3g} GB/s; {unseen}."
    )
    if settings.param_dtype is not None:
        yield (
            f"Parameters are gathered in {settings.param_dtype}: those of norms and embeddings, and what "
            "comes into each unit, are rounded to it too, which autocast alone does not do. Gradients are "
            "averaged in float32."
        )
    if settings.parallelism.is_zero:
        yield "What DeepSpeed takes is computed by its rules, not captured, and is less exact."
    if baseline.stateful_modules:
        yield (
            f"Each forward updates state that the next one reads, {listed(baseline.stateful_modules)}, each "
            "rank for itself; that of the first is kept."
        )
    if baseline.batch_norm_modules:
        yield (
            f"{batch_norms_that('normalise', baseline.batch_norm_modules)} over each rank's own samples, not "
            "over the global batch. On GPUs nn.SyncBatchNorm.convert_sync_batchnorm(model) lets ranks share "
            "statistics; the first rank's running statistics are those kept."
        )


def _what_splitting_changes(settings: Settings, baseline: Trace, request: Request) -> Iterator[str]:
    """Notes on differences from the baseline if the batch is split."""
    if settings.gradient_accumulation_steps == 1:
        return
    if baseline.couples_samples:
        yield (
            "The loss is that of all samples of the global batch together: each micro-batch's forward runs "
            "twice, without gradients for its embeddings, then for their gradient."
        )
    elif not request.job.weighs_by_count:
        yield MEAN_OVER_SAMPLES_NOTE
    for change in what_splitting_changes(baseline.batch_norm_modules, baseline.stateful_modules, settings):
        yield f"{change[0].upper()}{change[1:]}."
    if any(op.random for op in baseline.ops):
        yield (
            "Random layers (dropout) draw other numbers for a split batch: the same distribution, "
            "not the same values."
        )
