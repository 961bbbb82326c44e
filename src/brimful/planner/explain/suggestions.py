"""Changes that a plan does not make unasked, as they change what is computed, and what each would gain.

With each change everything is kept, at the largest micro-batch that fits, if that is as large as the plan's;
else actions for the model's units are searched at the plan's and at the next larger one. A plan with the change
may find a faster way still. Start reading at `suggestions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from operator import attrgetter
from typing import Any

from brimful.cost import difference_interval
from brimful.errors import BatchError, CaptureError, UsageError
from brimful.memory import AllocatorSettings, most_held_bytes, replay_allocations
from brimful.options import parse_parallelisms
from brimful.planner.candidate import Candidate
from brimful.planner.family import CandidateFamily
from brimful.planner.fastest import by_least_time
from brimful.planner.floor import Floor
from brimful.planner.headroom import exceedance_of, lowered_limit
from brimful.planner.request import Request
from brimful.planner.solutions import uniform_actions
from brimful.prediction.estimate import Estimate, estimate_unlimited
from brimful.prediction.estimator import Capture, RoughlyScaledTraces
from brimful.results import Suggestion
from brimful.settings import Action, Parallelism, Precision, Settings, UnitAction
from brimful.trace import Category, Trace
from brimful.trace.ddp import per_rank_trace
from brimful.trace.units import find_units

MOST_SUGGESTIONS = 5
"""Number of suggestions, at most."""

LEAST_GAIN_OF_MEMORY = 0.1
"""Fraction of the step time that unlimited memory must gain for changes to be tried that only take less. A
choice: they gain a part of it."""

LARGE_FRACTION_OF_STATE = 0.5
"""Fraction of the budget from which gradients and optimizer state count as large. A choice."""

HIGHEST_EXCEEDANCE = 0.5
"""Probability of exceeding the budget from which a step counts as one that does not fit."""

LEAST_GAIN = 0.03
"""Smallest fraction of the step time that a suggestion to a plan gains: the median error of predicted steps
(`benchmarks/results/times_vision.json`, 3.1 %)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of what is computed, and how to ask for it."""

    name: str
    effect: str
    option: str
    flag: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Settings` with their values."""
    capture: Capture | None = None
    """Captures steps of the changed job; None if the job stays as it is."""
    splits_batch: bool = False
    """Whether it permits micro-batches where the request does not."""
    recomputes_all: bool = False
    """Whether it recomputes every unit."""
    takes_less: bool = True
    """Whether a step takes less memory, so that more may be kept."""
    gains_speed: bool = True
    """Whether a step is faster by more than what its memory permits."""
    floor_bytes: int | None = None
    """Bytes that every step of the changed job holds; None if its settings show it."""
    family: str | None = None
    """Of the changes of one family, the first with which a step fits is suggested."""

    @property
    def keeps_ranks(self) -> bool:
        """Whether the number of ranks stays."""
        return "world_size" not in self.settings


JobChanges = Callable[[Trace], Iterable[Change]]
"""The changes of a job that may help, given training without a plan."""


@dataclass(frozen=True, slots=True)
class _Context:
    """What suggestions are for."""

    capture: Capture
    request: Request
    baseline: Trace
    """Training without a plan."""
    chosen: Estimate
    """The choice of the plan, or what takes least."""
    most_seconds: float = math.inf
    """Slower steps are not of interest."""
    searches: bool = True
    """Whether actions for units are searched, and micro-batches other than that of the choice tried."""

    def fitting(self, changes: Iterable[Change]) -> list[Suggestion]:
        """The changes with which a step fits."""
        return [_suggestion(change, found, self.request, None) for change, found in self.found(changes)]

    def found(self, changes: Iterable[Change]) -> Iterator[tuple[Change, Estimate]]:
        """The changes with which a step fits, each with its fastest step."""
        families: set[str] = set()
        for change in changes:
            if change.family is None or change.family not in families:
                found = _fastest_with(change, self)
                if found is not None:
                    families |= {change.family} if change.family else set()
                    yield change, found

    def is_safe(self, estimate: Estimate) -> bool:
        """Whether a step exceeds the budget as rarely as is asked for, or as the choice does."""
        return self.lowered_limit(estimate) is None

    def lowered_limit(self, estimate: Estimate) -> int | None:
        """Reserved bytes below which a step would be safe; None if it is."""
        permitted = self.request.asked.max_exceedance
        own = exceedance_of(self.chosen, self.request)
        if own < HIGHEST_EXCEEDANCE:
            permitted = max(permitted, own)
        return lowered_limit(estimate.device_peak, self.request, permitted)


def suggestions(
    capture: Capture,
    request: Request,
    baseline: Trace,
    best: Estimate,
    others: JobChanges,
    *,
    least_seconds: float,
) -> tuple[Suggestion, ...]:
    """The changes with which a plan would certainly be faster, the fastest first.

    `baseline` is training without a plan, which takes `least_seconds` where memory permits it; `best` is the
    choice of the plan; `others` has changes of the job.
    """
    most_seconds = best.predicted_step_seconds * (1 - LEAST_GAIN)
    context = _Context(capture, request, baseline, best, most_seconds)
    found = []
    changes = [*_changes(request, baseline, best.settings)]
    if best.predicted_step_seconds * (1 - LEAST_GAIN_OF_MEMORY) < least_seconds:
        changes = [each for each in changes if each.gains_speed]
    if _is_limited(best.settings):
        changes += (
            each for each in others(baseline) if each.gains_speed or _is_mostly_state(baseline, request)
        )
    if best.settings.nested:  # little more memory does not change what it does
        changes = [each for each in changes if each.keeps_ranks]
    for change, faster in context.found(changes):
        if faster.predicted_step_seconds > most_seconds:
            continue
        interval = difference_interval(faster.step_time, best.step_time, request.device)
        if interval[1] < 0:
            found.append(_suggestion(change, faster, request, interval))
    return _first_of(found)


def what_would_fit(
    capture: Capture, request: Request, baseline: Trace, smallest: Estimate, others: JobChanges
) -> tuple[Suggestion, ...]:
    """The changes with which there would be a plan where nothing fits a request, the fastest first.

    `smallest` is the choice that takes least of what is permitted. Where no change suffices, two together are
    tried.
    """
    context = _Context(capture, request, baseline, smallest)
    changes = [*_changes(request, baseline, smallest.settings, takes_all=True), *others(baseline)]
    found = context.fitting(changes)
    if not found:
        found = context.fitting(_pairs(changes))
    return _first_of(found)


def what_an_estimate_lacks(
    capture: Capture, request: Request, trace: Trace, estimate: Estimate, others: JobChanges
) -> tuple[Suggestion, ...]:
    """The changes with which a step that does not fit would, those that keep its results among them.

    `trace` is of that step. The budget of the request is what it must fit, and its global batch that of a step.
    """
    settings = estimate.settings
    recomputing = Change(
        name="activation checkpointing",
        effect="the same results, with forwards computed again in backward",
        option='recompute="all"',
        flag="--recompute all",
        recomputes_all=True,
    )
    context = _Context(capture, request, trace, estimate, searches=False)
    same = [] if settings.units or not find_units(trace) else [recomputing]
    of_settings = (
        each
        for each in _changes(request, trace, settings, takes_all=True)
        if each.keeps_ranks and each.takes_less and not each.splits_batch
    )
    changes = [*same, *of_settings, *others(trace)]
    found = [*_accumulating(context), *context.fitting(changes)]
    return _first_of(found or context.fitting(_pairs(changes)))


_ACCUMULATION = Change(
    name="gradient accumulation",
    effect="the same loss and gradients, if the loss is a mean over samples",
    option="",
    flag="",
)


def _accumulating(context: _Context) -> Iterator[Suggestion]:
    """The largest smaller micro-batch that fits, accumulated to the same step, where it may be split."""
    is_coupled = context.request.keeps_batch_whole(context.baseline)
    change = _batch_norm_split(context.baseline) if is_coupled else _ACCUMULATION
    size_now = context.chosen.settings.micro_batch_size
    if size_now == 1:
        return
    try:
        changed = _Changed(change, context)
        found = changed.kept_below(size_now) if len(changed.sizes) > 1 else None
    except (CaptureError, BatchError, UsageError):
        return
    if found is not None:
        size, steps = found.settings.micro_batch_size, found.settings.gradient_accumulation_steps
        yield replace(
            _suggestion(change, found, context.request, None),
            option=f"micro_batch_size={size}, gradient_accumulation_steps={steps}",
            flag=f"--micro-batch-size {size} --gradient-accumulation-steps {steps}",
        )


def _pairs(changes: Sequence[Change]) -> Iterator[Change]:
    """Two changes together: of different settings, or one of the job and one of settings but the optimizer."""
    for first, second in combinations(changes, 2):
        of_job = [each for each in (first, second) if each.capture is not None]
        has_optimizer = "optimizer" in {*first.settings, *second.settings}
        is_of_one_job = not of_job or (len(of_job) == 1 and not has_optimizer)
        together = {**first.settings, **second.settings}
        if together.get("precision") is Precision.FP16 and together.get("parallelism") is Parallelism.FSDP2:
            continue
        if is_of_one_job and first.settings.keys().isdisjoint(second.settings):
            changed = of_job[0] if of_job else first
            yield Change(
                name=f"{first.name} and {second.name}",
                effect=f"{first.effect}; {second.effect}",
                option=f"{first.option}, {second.option}",
                flag=f"{first.flag} {second.flag}",
                settings=together,
                capture=changed.capture,
                splits_batch=first.splits_batch or second.splits_batch,
                recomputes_all=first.recomputes_all or second.recomputes_all,
                floor_bytes=changed.floor_bytes,
                family=changed.family,
            )


def _first_of(found: Sequence[Suggestion]) -> tuple[Suggestion, ...]:
    return tuple(sorted(found, key=attrgetter("predicted_step_seconds"))[:MOST_SUGGESTIONS])


def _suggestion(
    change: Change, predicted: Estimate, request: Request, interval: tuple[float, float] | None
) -> Suggestion:
    return Suggestion(
        change=change.name,
        effect=change.effect,
        option=change.option,
        flag=change.flag,
        settings=predicted.settings,
        predicted_peak_device_bytes=predicted.predicted_peak_device_bytes,
        predicted_exceedance_probability=exceedance_of(predicted, request),
        predicted_step_seconds=predicted.predicted_step_seconds,
        predicted_difference_interval_seconds=interval,
        uncertain=predicted.uncertain,
    )


_PRECISIONS: Mapping[Precision, tuple[str, str]] = {
    Precision.BF16: ("bf16 autocast", "products have 8 significant bits; weights and updates stay float32"),
    Precision.FP16: (
        "fp16 autocast",
        "products have 11 significant bits and a scaled loss; updates stay float32",
    ),
    Precision.TF32: ("TF32 products", "products round their inputs to 11 significant bits"),
}
"""What each precision is called and changes. Source: torch.amp, torch.backends.cuda.matmul (torch 2.13)."""

_OPTIMIZERS: Mapping[str, str] = {
    "adamw8bit": "AdamW with its state in 8 bits, by blocks",
    "adafactor": "other updates, with second moments of rows and columns of each matrix",
    "sgd": "other updates, with momentum alone",
}
"""Optimizers with less state than Adam, and what they change."""

_ADAM_BYTES = 7.9
"""Bytes of state for each parameter from which an optimizer counts as Adam, which has 8."""


def _changes(
    request: Request, baseline: Trace, chosen: Settings, *, takes_all: bool = False
) -> Iterator[Change]:
    """The changes of settings that may gain something beside a choice, under which a step may take less."""
    yield from _precisions(request)
    if _is_limited(chosen) or takes_all:
        yield from _optimizers(request, baseline, takes_all=takes_all)
        if request.keeps_batch_whole(baseline) and request.job.why_not_split is None:
            yield _batch_norm_split(baseline)
    yield from _two_gpus(request, baseline, Parallelism.FSDP2 if takes_all else Parallelism.DDP)


def _is_limited(chosen: Settings) -> bool:
    """Whether a choice does something only to take less memory."""
    return bool(chosen.changed) or chosen.gradient_accumulation_steps > 1 or chosen.offload_optimizer


def _is_mostly_state(baseline: Trace, request: Request) -> bool:
    """Whether what adapters do without, gradients and optimizer state, is a large part of the budget."""
    state_bytes = sum(
        most_held_bytes(baseline, each) for each in (Category.GRADIENTS, Category.OPTIMIZER_STATE)
    )
    return state_bytes >= LARGE_FRACTION_OF_STATE * request.reserved_budget_bytes


def _precisions(request: Request) -> Iterator[Change]:
    """Autocast to the usual half precision of the device, and TF32."""
    if request.precisions != (Precision.FP32,):
        return
    supported = [each for each in _PRECISIONS if request.device.supports(each)]
    if Precision.BF16 in supported:
        supported.remove(Precision.FP16)
    if request.device.kind == "cuda" and Precision.TF32 in supported and not _is_faster_in_tf32(request):
        supported.remove(Precision.TF32)
    for precision in supported:
        name, effect = _PRECISIONS[precision]
        yield Change(
            name=name,
            effect=effect,
            option=f'precision="{precision}"',
            flag=f"--precision {precision}",
            settings={"precision": precision},
            takes_less=precision is not Precision.TF32,
        )


def _is_faster_in_tf32(request: Request) -> bool:
    in_fp32, in_tf32 = map(request.device.peak_flops_per_second, (Precision.FP32, Precision.TF32))
    return in_fp32 is None or in_tf32 is None or in_tf32 > in_fp32 * (1 + LEAST_GAIN)


def _optimizers(request: Request, baseline: Trace, *, takes_all: bool) -> Iterator[Change]:
    """Optimizers with less state in place of Adam, or only the one most like it."""
    state_bytes = most_held_bytes(baseline, Category.OPTIMIZER_STATE) + baseline.host_state_bytes
    is_adam = state_bytes >= _ADAM_BYTES * baseline.trainable_parameter_count
    if not is_adam or request.asked.allow_optimizers or request.world_size > 1:
        return
    for name, effect in _OPTIMIZERS.items():
        on_host = bool(request.asked.offload_optimizer)
        if name != "adamw8bit" or (request.device.kind == "cuda" and not on_host):  # bitsandbytes' is for GPUs
            yield Change(
                name=f"optimizer {name}",
                effect=effect,
                option=f'optimizer="{name}"',
                flag=f"--optimizer {name}",
                settings={"optimizer": name, "optimizer_implementation": None, "offload_optimizer": on_host},
                gains_speed=False,
            )
            if not takes_all:
                return


def _batch_norm_split(baseline: Trace) -> Change:
    has_norms = bool(baseline.batch_norm_modules)
    return Change(
        name="micro-batches",
        effect=f"{'BatchNorm has statistics' if has_norms else 'forwards update their state'} of micro-batches",
        option="split_batch_norm=True",
        flag="--split-batch-norm",
        splits_batch=True,
        gains_speed=False,
    )


_NORMS = ", BatchNorm with statistics of its half"


def _two_gpus(request: Request, baseline: Trace, parallelism: Parallelism) -> Iterator[Change]:
    """A second GPU, where half of the global batch can be a rank's part."""
    asked = request.asked
    is_one = request.device.kind == "cuda" and request.world_size == 1
    divides = request.global_batch_size % 2 == 0 and request.job.why_not_split is None
    if asked.micro_batch_size is not None:
        divides &= request.global_batch_size // 2 % asked.micro_batch_size == 0
    is_permitted = parallelism in parse_parallelisms(asked.parallelism, 2)
    is_permitted &= not (asked.offload_optimizer or asked.optimizer_in_backward)
    if is_one and divides and is_permitted:
        yield Change(
            name="two GPUs",
            effect=f"each computes half of the global batch{_NORMS if baseline.batch_norm_modules else ''}",
            option="world_size=2",
            flag="--world-size 2",
            settings={"world_size": 2, "parallelism": parallelism, "offload_optimizer": False},
        )


def _fastest_with(change: Change, context: _Context) -> Estimate | None:
    """The fastest step found with a change that is within the budget; None if there is none."""
    if _floor_bytes(change, context) > context.request.reserved_budget_bytes:
        return None
    try:
        changed = _Changed(change, context)
        if not context.searches:
            return changed.recomputed() or changed.kept()
        if changed.is_divided or (changed.nests and "precision" in change.settings):
            return changed.as_chosen()
        return changed.kept() or changed.searched() or (changed.as_chosen() if changed.nests else None)
    except (CaptureError, BatchError, UsageError):  # what is pinned may not go with it
        return None


def _floor_bytes(change: Change, context: _Context) -> int:
    """Bytes that every step with a change holds at once, as far as training without a plan shows them."""
    if change.floor_bytes is not None:
        return change.floor_bytes
    has_state = "optimizer" not in change.settings
    held_bytes = Floor.of(context.baseline, context.request, has_state=has_state).held_bytes
    ranks = change.settings.get("world_size", 1)
    return held_bytes // int(ranks) if change.settings.get("parallelism") is Parallelism.FSDP2 else held_bytes


class _Changed:
    """Steps with a change: what is kept, what a search of a few micro-batch sizes finds."""

    def __init__(self, change: Change, context: _Context) -> None:
        request, chosen = context.request, context.chosen.settings
        self._change, self._context, self._request, self._chosen = change, context, request, chosen
        world_size = int(change.settings.get("world_size", request.world_size))
        self._rank_batch = request.global_batch_size // world_size
        keeps_units = not context.searches and change.capture is None
        plain: dict[str, Any] = {
            "units": chosen.units if keeps_units else (),
            "micro_batch_size": self._rank_batch,
            "gradient_accumulation_steps": 1,
        }
        if change.capture is not None:  # another model: other names, other bytes
            plain |= {"chunked_loss": None, "offload_optimizer": False}
        self._base = replace(chosen, **{**plain, **change.settings})
        capture = context.capture if change.capture is None else change.capture
        is_replicated = world_size > request.world_size and self._base.parallelism is Parallelism.DDP
        self._capture = _on_one_rank(capture) if is_replicated else capture
        self._scaled = RoughlyScaledTraces(self._capture)

    def kept(self) -> Estimate | None:
        """Everything kept at the largest micro-batch that fits, if it is as large as that of the choice."""
        if not self._change.takes_less or self._request.recompute is Action.RECOMPUTE:
            return None
        sizes = [size for size in self.sizes if size >= self._least_size]
        return self._largest_kept(sizes if self._context.searches else sizes[:1])

    def kept_below(self, size: int) -> Estimate | None:
        """Everything kept at the largest micro-batch below a size that fits."""
        return self._largest_kept([each for each in self.sizes if each < size])

    def recomputed(self) -> Estimate | None:
        """Every unit recomputed at the micro-batch of the choice, if that is the change."""
        recomputed_already = not self._context.searches and bool(self._chosen.units)
        if not (self._change.recomputes_all or (recomputed_already and self._change.capture is not None)):
            return None
        units = find_units(self._captured(self._least_size, ()))
        found = self._estimate(self._captured(self._least_size, uniform_actions(units, Action.RECOMPUTE)))
        return found if self._context.is_safe(found) else None

    def searched(self) -> Estimate | None:
        """The fastest choice of actions for units, at the micro-batch of the choice and the next larger one."""
        sizes = [size for size in self.sizes if size >= self._least_size][: 2 if self._change.takes_less else 1]
        notes: list[str] = []
        family = CandidateFamily(self._capture, self._request, self._base, sizes, notes, divides_units=False)
        candidates = [
            Candidate(each, self._capture, notes, expandable_segments=self._base.expandable_segments)
            for each in family.of_all_sizes()
        ]
        limit_bytes: int | None = self._request.reserved_budget_bytes
        for _ in range(2):  # the second finds what has the headroom that the first lacks
            assert limit_bytes is not None
            expected = next(by_least_time(candidates, limit_bytes), None)
            if expected is None or expected.seconds > self._context.most_seconds:
                return None
            found = expected.candidate.captured_from(expected.level, limit_bytes)
            if found is None or self._context.is_safe(found):
                return found
            limit_bytes = self._context.lowered_limit(found)
        return None

    def as_chosen(self) -> Estimate | None:
        """The actions of the choice, with the change, at the micro-batch of the choice."""
        if self._chosen.micro_batch_size not in self.sizes:
            return None
        found = self._estimate(self._captured(self._least_size, self._chosen.units))
        return found if self._context.is_safe(found) else None

    @property
    def is_divided(self) -> bool:
        """Whether ranks divide the model."""
        return self._base.divides_model

    @property
    def nests(self) -> bool:
        """Whether the choice nests units, which no search here does."""
        return bool(self._chosen.nested)

    @cached_property
    def sizes(self) -> list[int]:
        """The micro-batch sizes that may be taken, rising."""
        request, pinned = self._request, self._request.asked.micro_batch_size
        is_whole = request.job.why_not_split is not None or request.asked.optimizer_in_backward
        is_whole |= request.keeps_batch_whole(self._context.baseline) and not self._change.splits_batch
        if is_whole:
            return [self._rank_batch]
        divisors = [size for size in range(1, self._rank_batch + 1) if self._rank_batch % size == 0]
        return [size for size in divisors if pinned in (None, size)]

    @cached_property
    def _least_size(self) -> int:
        """The micro-batch of the choice, or the largest that may be taken below it."""
        below = [size for size in self.sizes if size <= self._chosen.micro_batch_size]
        return max(below, default=self._rank_batch)

    def _largest_kept(self, sizes: Sequence[int]) -> Estimate | None:
        """Everything kept at the largest of some sizes, rising, that fits; None if none does."""
        trace_at = self._captured if len(sizes) == 1 else self._scaled_to
        low, high = 0, len(sizes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._may_fit(trace_at(sizes[middle])) else (low, middle)
        found = (self._estimate(trace_at(size)) for size in reversed(sizes[:low]))
        return next(filter(self._context.is_safe, found), None)

    def _sized(self, size: int) -> Settings:
        steps = self._rank_batch // size
        return replace(self._base, micro_batch_size=size, gradient_accumulation_steps=steps)

    def _captured(self, size: int, units: tuple[UnitAction, ...] | None = None) -> Trace:
        settings = self._sized(size)
        settings = settings if units is None else replace(settings, units=units)
        trace = self._capture(replace(settings, expandable_segments=False))
        return replace(per_rank_trace(trace), settings=settings)

    def _scaled_to(self, size: int) -> Trace:
        settings = self._sized(size)
        return replace(
            per_rank_trace(self._scaled.at(replace(settings, expandable_segments=False))), settings=settings
        )

    def _may_fit(self, trace: Trace) -> bool:
        replayed = replay_allocations(trace, allocator=AllocatorSettings.of(trace.settings))
        return replayed.peak_reserved_bytes <= self._request.reserved_budget_bytes

    def _estimate(self, trace: Trace) -> Estimate:
        return estimate_unlimited(trace.with_last_step_again(), self._request.device)


def _on_one_rank(capture: Capture) -> Capture:
    """Captures of steps on several ranks under DDP, each of which runs what a single one does."""

    def captured(settings: Settings, steps: int = 1) -> Trace:
        return capture(replace(settings, world_size=1, num_nodes=1), steps).with_settings(settings)

    return captured
