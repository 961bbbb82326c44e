"""Whether the loss of a batch is made of the losses of its parts, found by computing both."""

from __future__ import annotations

import math
import random
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn

from brimful.batches import BatchLayout, InputMover, layout_of, make_batch
from brimful.capture import capture_step, loss_terms
from brimful.capture.loss_terms import MEAN_OVER_LABELS
from brimful.devices import find_device
from brimful.errors import BrimfulError, EquivalenceError, PartialUpdateError
from brimful.execution.coupled_loss import CoupledLoss, gather_embeddings, loss_of
from brimful.execution.losses import loss_counts, loss_weights
from brimful.execution.precision import autocast, device_of, matmul_precision
from brimful.execution.random_state import RandomState, undisturbed
from brimful.execution.setup import build_model
from brimful.job import Batch, Job
from brimful.memory import live_profile, predict_memory, rounding_bytes_of
from brimful.profiling.aligned_draws import AlignedDraws
from brimful.profiling.coupled_layers import (
    carried_state,
    restoring_state,
    what_split_changes,
    without_gradients_if_it_can,
)
from brimful.results import Comparison, EquivalenceReport
from brimful.settings import Precision, Settings
from brimful.trace import Phase, Trace
from brimful.utils.one_at_a_time import one_at_a_time
from brimful.utils.quantities import format_bytes

IN_EVALUATION = "splitting, in evaluation mode"
WITH_SAME_DRAWS = "splitting, with the same random numbers for each sample"
ON_AVERAGE = "splitting, on average over random numbers"

_SMALL_LOSS = 0.1
"""A loss that is smaller is compared as if it were this: a mean of large terms that cancel is known no better
than they are. A choice; coupled losses are of the order of 1."""
CHECKED_SAMPLES = 2
"""Samples of each of two micro-batches, where a few are enough."""
ROUNDINGS = 1000
"""A sum of n float32 terms in another order is off by about √n roundings: 1000 are those of a million terms."""
_LOSS_ROUNDINGS = 100
"""Roundings by which a loss of few samples may be off: those of a sum of 10,000 terms. In the zoo of jobs,
losses that are made of those of their parts differ by 8 roundings at most, others by 400 and more."""
_REPETITIONS = 16
"""Number of draws for a loss whose random numbers cannot be aligned."""
_STANDARD_ERRORS = 5.0
"""Standard errors by which two means must differ to be called different: with 16 values each, equal means do so
about once in 40,000 times (Student's t with 30 degrees of freedom)."""


class SplitWarning(UserWarning):
    """Splitting a batch changes what is trained, or may do so."""


class LayerSplitWarning(SplitWarning):
    """Layers of the model depend on the micro-batch, as BatchNorm does."""


def compare_split_loss(
    job: Job,
    model: nn.Module,
    batch: Batch,
    *,
    samples: int,
    micro_batch_size: int,
    seed: int = 0,
) -> Comparison:
    """Compare the loss of a batch with that of its parts, in float32 and evaluation mode.

    Modes and buffers of the model and the states of random generators are restored afterwards; the batch may be
    on any device. The loss runs without gradients unless it computes some itself, as that of a physics-informed
    network does.

    If the loss draws random numbers, each sample gets the same ones in both (`AlignedDraws`). If that does not
    make them equal, the means of several draws are compared: a sum instead of a mean, or a loss that compares
    samples, differs by far more than its noise.

    If a forward updates state that the next one reads, in evaluation mode too, losses that differ are compared
    again, each from the state that the batch starts from.

    The comparison is skipped if the loss cannot be computed in evaluation mode, its noise is larger than the
    difference, or the losses differ from the same state too, which the update itself may cause.
    """
    layout = layout_of(job, whole=samples, expected=samples)
    split = _SplitLoss(job, model, batch, layout, micro_batch_size)
    with (
        restoring_state(job, model),
        evaluation_mode(model),
        matmul_precision(Precision.FP32),
        autocast(model, Precision.FP32),
    ):
        try:
            with without_gradients_if_it_can(model, partial(_compared_split, split, seed)) as compared:
                return compared()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model may have no loss in evaluation mode
            return Comparison(
                name=IN_EVALUATION, why_not_compared=f"the loss cannot be computed in it: {error}"
            )


def _compared_split(split: _SplitLoss, seed: int) -> Comparison:
    comparison, _ = _compared_once(split, seed)
    if comparison.holds or not split.updates_state():
        return comparison
    split.starts_each_alike()
    comparison, is_explained = _compared_once(split, seed)
    if comparison.holds or is_explained:
        return comparison
    return Comparison(name=comparison.name, why_not_compared=_UPDATES_STATE)


def _compared_once(split: _SplitLoss, seed: int) -> tuple[Comparison, bool]:
    """The comparison, and whether another reduction explains the difference."""
    whole, parts, draws = split.values(seed, aligned=True)
    bound = split.rounding
    comparison = _compared(WITH_SAME_DRAWS if draws else IN_EVALUATION, whole, parts, bound)
    other = None if comparison.holds else split.other_reduction(whole, parts, bound)
    if other is not None:
        where = f'{comparison.where}, which is a {other}: pass Job(reduction="{other}")'
        return replace(comparison, where=where), True
    if comparison.holds or not draws:
        return comparison, False
    return _compared_on_average(split, seed, bound), False


def coarsest_dtype(model: nn.Module) -> torch.dtype | None:
    """The coarsest 16-bit dtype of a model's parameters; None if no parameter has one."""
    dtypes = {parameter.dtype for parameter in model.parameters()} & {torch.bfloat16, torch.float16}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def check_split(
    job: Job,
    model: nn.Module,
    settings: Settings,
    global_batch: Batch,
    *,
    weighs_labels: bool = False,
    end: str | None = None,
) -> bool:
    """Check, on a few samples of a real batch, that splitting it leaves the loss as it is.

    The forward pass of at most four samples runs twice, in evaluation mode: of no more than a micro-batch,
    unless they take no more memory than the step does. The model and all random generators are left as they
    were.

    Returns whether the check decided, or a warning says why it did not; a batch that is not split decides
    nothing. Raises `EquivalenceError`, whose message ends with `end`, if the loss of the batch is not made of
    those of its parts.
    """
    end = NOT_TRAINED if end is None else end
    micro = settings.micro_batch_size
    layout = layout_of(job, whole=settings.rank_batch_size, expected=settings.rank_batch_size)
    samples = layout.count(global_batch)
    if settings.gradient_accumulation_steps == 1 or samples <= min(micro, CHECKED_SAMPLES):
        return False
    terms = terms_of_loss(replace(job, batch=global_batch), samples, weighs_labels=weighs_labels)
    if terms is not None:
        raise not_the_same(job, terms, samples, "cpu", end=end)
    most = min(micro, CHECKED_SAMPLES)
    few = _few_samples(job, layout, global_batch, min(2 * most, samples))
    _warn_of_layers(job, settings, model, layout.split(few, micro)[0])
    if job.embed is not None:
        return True
    fewest = few if most == 1 else _few_samples(job, layout, global_batch, min(2, samples))
    comparison, count = _compare_few(job, model, settings, layout, {most: few, 1: fewest})
    if comparison.why_not_compared:
        warnings.warn(split_not_compared(settings, comparison.why_not_compared), SplitWarning, stacklevel=3)
    elif not comparison.holds:
        raise not_the_same(job, comparison, count, device_of(model).type, end=end)
    return True


@undisturbed()  # who watches the step that is checked sees none of it
def _compare_few(
    job: Job, model: nn.Module, settings: Settings, layout: BatchLayout, batches: Mapping[int, Batch]
) -> tuple[Comparison, int]:
    """Compare the loss of a few samples with that of their parts.

    `batches` has the samples by the size of the parts; the next are tried where memory is short or what they
    take is not known. Returns the comparison and the number of samples.
    """
    for size, batch in batches.items():
        count = layout.count(batch)
        try:
            reason = _why_too_many(job, settings, batch) if count > settings.micro_batch_size else ""
            if not reason:
                return compare_split_loss(job, model, batch, samples=count, micro_batch_size=size), count
        except torch.OutOfMemoryError as error:
            reason = f"memory ran out: {error}"
    return Comparison(name=IN_EVALUATION, why_not_compared=reason), count


def _why_too_many(job: Job, settings: Settings, few: Batch) -> str:
    """Why a few samples are not computed together where a micro-batch has fewer; empty if they may be."""
    alone = replace(job, batch=few)
    samples = layout_of(alone).count(few)
    together = Settings(micro_batch_size=samples)
    device = find_device("cpu")
    try:
        with RandomState.kept():
            trace = capture_step(alone, together, device, steps=1, evaluates=True)
            taken = live_profile(trace, rounding_bytes_of(trace.device_kind)).live_bytes
            needed_bytes = max(
                held
                for event, held in zip(trace.events, taken.tolist(), strict=True)
                if trace.ops[event.op].phase is Phase.EVALUATION
            )
            planned = replace(settings, offload_optimizer=False, expandable_segments=False)
            step_bytes = predict_memory(capture_step(alone, planned, device, steps=1)).peak_allocated_bytes
    except BrimfulError as error:
        return f"it is not known what {samples} samples together take: {str(error).rstrip('.')}"
    if needed_bytes <= step_bytes:
        return ""
    return (
        f"{samples} samples together take {format_bytes(needed_bytes)}, more than the step with its "
        f"{format_bytes(step_bytes)}"
    )


def terms_of_loss(job: Job, samples: int, *, weighs_labels: bool = False) -> Comparison | None:
    """What the loss averages over, as a comparison that does not hold, if its ops show other than samples.

    Returns None if they show nothing else. The loss runs on fake tensors, which takes no memory; the values of
    labels are known. A job that states what its loss averages over is not checked, unless its micro-batches
    weigh by their labels other than -100, and not by their samples (`weighs_labels`).
    """
    is_stated = job.count is not None and not weighs_labels
    if is_stated or job.embed is not None or job.reduction == "sum":
        return None
    try:
        with RandomState.kept():
            terms = loss_terms(job, samples, find_device("cpu"))
    except BrimfulError:  # other checks run the loss for real
        return None
    found = [term for term in terms if not (weighs_labels and term.startswith(MEAN_OVER_LABELS))]
    return Comparison(name="splitting", evidence="; ".join(found)) if found else None


def check_labels(job: Job, batch: Batch, found: str, way_out: str) -> None:
    """Raise `EquivalenceError` if the loss of a global batch is a mean over labels that are not ignored.

    `found` names the ignored labels, for the message, and `way_out` ends it.
    """
    samples = layout_of(job, whole=1).count(batch)
    terms = terms_of_loss(replace(job, batch=batch), samples)
    if terms is not None:
        raise EquivalenceError(
            f"{job.name}: the loss is {terms.evidence}, and {found}. Micro-batches weigh by their samples, "
            f"which is not the training of the whole batch. {way_out} If the difference is meant, pass "
            "verify=False."
        )


def check_planned_split(job: Job, settings: Settings, baseline: Trace, *, weighs_labels: bool = False) -> bool:
    """Check, before training, whether the batch that a plan splits has the loss of its parts.

    `check_split` checks this in the first step. Here the losses of few samples are computed on the host, with
    weights as the model is built, if that takes no longer than planning does; `baseline` is training without a
    plan. Returns whether the loss is known to be made of those of the parts, and raises `EquivalenceError` if
    it is known not to be.
    """
    comparison = compare_planned_split(job, settings, baseline, weighs_labels=weighs_labels)
    if comparison is None:
        return True
    if not comparison.holds:
        samples = settings.rank_batch_size if comparison.evidence else 2 * _checked_size(settings)
        raise not_the_same(job, comparison, samples, "cpu", end=NOT_PLANNED)
    return not comparison.why_not_compared


def _checked_size(settings: Settings) -> int:
    """Samples of each micro-batch of which the loss is computed to plan."""
    return min(settings.micro_batch_size, CHECKED_SAMPLES)


def compare_planned_split(
    job: Job, settings: Settings, baseline: Trace, *, weighs_labels: bool = False
) -> Comparison | None:
    """Compare what `check_planned_split` checks; None if the loss is that of the whole batch in any case."""
    if settings.gradient_accumulation_steps == 1 or job.embed is not None:
        return None
    terms = terms_of_loss(job, settings.rank_batch_size, weighs_labels=weighs_labels)
    if terms is not None:
        return terms
    size = _checked_size(settings)
    samples = 2 * size
    flops = sum(op.flops for op in baseline.ops if op.phase is Phase.FORWARD)
    if baseline.parameter_count > _PLANNED_PARAMETERS or (
        2 * samples * flops > _PLANNED_FLOPS * baseline.settings.micro_batch_size
    ):
        return Comparison(name=IN_EVALUATION, why_not_compared="it would take longer than planning does")
    try:
        with one_at_a_time(), RandomState.kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build_model(job, is_copied=True).train()
            batch = make_batch(job, samples)
            return compare_split_loss(job, model, batch, samples=samples, micro_batch_size=size)
    except Exception as error:  # whatever code of the job raises that needs more than a host and few samples
        return Comparison(name=IN_EVALUATION, why_not_compared=f"{type(error).__name__}: {error}")


_PLANNED_PARAMETERS = 2**27
"""The loss of a model with more parameters is not computed to plan: 512 MiB of float32. A choice."""
_PLANNED_FLOPS = 2e10
"""A loss that takes more operations is not computed to plan: about a second on one core. A choice, as planning
itself takes seconds."""


NOT_TRAINED = "Nothing was trained. If the difference is meant, pass verify=False."
"""End of the error in the first step."""
NOT_PLANNED = (
    "Nothing was planned. If the difference is meant, Job(count=lambda batch: 1) weighs micro-batches alike."
)
"""End of the error while planning."""


def not_the_same(
    job: Job, comparison: Comparison, samples: int, device: str, *, end: str = NOT_TRAINED
) -> EquivalenceError:
    """The error for a batch whose loss is not made of those of its parts.

    `samples` samples were compared on `device`; `end` has the last sentences of the message.
    """
    report = EquivalenceReport(job=job.name, device=device, samples=samples, comparisons=(comparison,))
    return EquivalenceError(f"{report}\n{end}".rstrip())


def _warn_of_layers(job: Job, settings: Settings, model: nn.Module, few: Batch) -> None:
    try:
        changes = list(what_split_changes(job, settings, model, few))
    except PartialUpdateError:
        raise
    except Exception as error:  # whatever the loss raises; the step itself raises it too, or has more memory
        reason = (
            f"the layers that depend on it are not known, as the forward pass raised {type(error).__name__}"
        )
        reason = "memory ran out" if isinstance(error, torch.OutOfMemoryError) else reason
        warnings.warn(split_not_compared(settings, f"{reason}: {error}"), SplitWarning, stacklevel=4)
        return
    if changes:
        warnings.warn(split_changes_layers(changes), LayerSplitWarning, stacklevel=4)


def check_may_split(
    job: Job,
    model: nn.Module,
    settings: Settings,
    global_batch: Batch,
    *,
    permits_layers: bool = False,
    is_split: bool = False,
) -> bool:
    """Check that a batch may be split, or its micro-batches divided, where memory ran out.

    Args:
        job: Its loss and count are used.
        model: The model; neither it nor random generators are changed.
        settings: Settings with the split batch.
        global_batch: The next batch of the run.
        permits_layers: Whether the user permits splitting although layers depend on the micro-batch.
        is_split: Whether training splits batches already, after the check and its warnings.

    Returns:
        Whether the batch had enough samples to check.

    Raises:
        EquivalenceError: Splitting changes what is trained, or it is not known whether it does.
    """
    with one_at_a_time(), warnings.catch_warnings():
        warnings.simplefilter("ignore" if is_split else "error", SplitWarning)
        if permits_layers:
            warnings.simplefilter("ignore", LayerSplitWarning)
        try:
            return check_split(job, model, settings, global_batch, end="")
        except SplitWarning as warning:
            raise EquivalenceError(str(warning)) from warning


def _few_samples(job: Job, layout: BatchLayout, batch: Batch, count: int) -> Batch:
    """`count` samples spread over a batch; others, which `Job.count` counts, if it counts none of them."""
    samples = layout.count(batch)
    few = layout.take(batch, torch.arange(count) * samples // count)
    if job.count is None or any(loss_counts(job, [few])):
        return few
    singles = ((index, layout.take(batch, torch.tensor([index]))) for index in range(samples))
    counted = [index for index, single in singles if any(loss_counts(job, [single]))]
    return layout.take(batch, torch.tensor(counted[:count])) if counted else few


def split_changes_layers(changes: Sequence[str]) -> str:
    """The warning for a split batch of a model whose layers depend on the micro-batch."""
    return (
        f"splitting the batch changes what is trained: {'; '.join(changes)}. With the global batch as "
        "micro_batch_size it is the same training."
    )


def split_not_compared(settings: Settings, reason: str) -> str:
    """The warning for a split batch of which it is not known whether its parts' losses make up its own."""
    return (
        f"each batch is split into {settings.gradient_accumulation_steps} micro-batches, and whether that "
        f"changes the loss could not be checked: {reason}. If the loss is a sum over samples, or compares "
        "samples with each other, training differs from that of the whole batch. Then plan with the global "
        "batch as micro_batch_size, or see Job(reduction=…), Job(count=…) and Job(embed=…)."
    )


class _SplitLoss:
    """The loss of a batch, on any device, and of its parts, by a model in evaluation mode."""

    def __init__(
        self, job: Job, model: nn.Module, batch: Batch, layout: BatchLayout, micro_batch_size: int
    ) -> None:
        self._job, self._model, self._batch = job, model, batch
        self._restoring: Callable[[], AbstractContextManager[None]] = nullcontext
        self._loss = loss_of(job)
        self._dim = job.batch_dim or 0
        self._parts = layout.split(batch, micro_batch_size)
        self._reduction = job.reduction
        self._weights = loss_weights(job, self._parts)
        self._move = InputMover.copying_to(device_of(model))
        self._dtype = torch.float32
        self._samples = [layout.count(part) for part in self._parts]

    @property
    def rounding(self) -> float:
        """Relative error that rounding may cause in the loss; valid once `values` has computed it."""
        eps = torch.finfo(torch.float32).eps
        if self._dtype in (torch.bfloat16, torch.float16):
            return torch.finfo(self._dtype).eps  # of the batch and of its parts: half a rounding each
        return (_LOSS_ROUNDINGS if coarsest_dtype(self._model) is None else ROUNDINGS) * eps

    def values(self, seed: int, *, aligned: bool = False) -> tuple[float, float, bool]:
        """The loss of the batch, that of its parts, and whether random numbers were drawn.

        Both losses are computed from the same state of all generators, which `seed` seeds. With `aligned`, each
        sample gets the same random numbers in both.
        """
        device = device_of(self._model)
        with _seeded(seed, device):
            before = RandomState.now(device)
            with self._restoring(), self._drawing(aligned, 0, sum(self._samples)) as draws:
                loss = self._loss(self._model, self._move(self._batch))
                whole, self._dtype = _as_float(loss), getattr(loss, "dtype", torch.float32)
            after = RandomState.now(device)
            parts = self._of_parts(aligned)
        of_others = (before.python, before.numpy[2]) != (after.python, after.numpy[2])
        return whole, parts, of_others or (draws is not None and draws.drawn > 0)

    def updates_state(self) -> bool:
        """Whether a forward in evaluation mode updates state that the next one reads."""
        return bool(carried_state(self._job, self._model, self._parts[0]))

    def starts_each_alike(self) -> None:
        """Compute each loss from the state that the batch starts from, from now on."""
        self._restoring = partial(restoring_state, self._job, self._model)

    def other_reduction(self, whole: float, parts: float, bound: float) -> str | None:
        """The reduction of the loss, "sum" or "mean", if it is not the one that the job states; else None."""
        count = len(self._parts)
        if len(set(self._samples)) > 1:
            return None
        if self._reduction == "mean" and abs(whole - count * parts) <= bound * abs(whole):
            return "sum"
        if self._reduction == "sum" and abs(parts - count * whole) <= bound * abs(parts):
            return "mean"
        return None

    def _of_parts(self, aligned: bool) -> float:
        if isinstance(self._loss, CoupledLoss):
            embed = partial(self._loss.embed, self._model)
            gathered = gather_embeddings(embed, self._parts, self._move, count=self._loss.layout.count)
            return _as_float(self._loss.of_embeddings(gathered))
        total = 0.0
        begins = accumulate(self._samples, initial=0)
        for part, begin, samples, weight in zip(
            self._parts, begins, self._samples, self._weights, strict=False
        ):
            if weight:
                with self._restoring(), self._drawing(aligned, begin, samples):
                    total += _as_float(self._loss(self._model, self._move(part))) * weight
        return total

    def _drawing(self, aligned: bool, begin: int, samples: int) -> AbstractContextManager[AlignedDraws | None]:
        if not aligned:
            return nullcontext()
        return AlignedDraws(begin=begin, samples=samples, whole=sum(self._samples), dim=self._dim)


def _as_float(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)


def _compared_on_average(split: _SplitLoss, seed: int, bound: float) -> Comparison:
    """Compare the means over several draws; skipped where their noise is as large as their difference."""
    found = [split.values(seed + 1 + repetition)[:2] for repetition in range(_REPETITIONS)]
    wholes, parts = [whole for whole, _ in found], [of_parts for _, of_parts in found]
    if not all(map(math.isfinite, wholes + parts)):
        return Comparison(name=ON_AVERAGE, why_not_compared=_NOT_FINITE)
    noise = math.sqrt((statistics.variance(wholes) + statistics.variance(parts)) / _REPETITIONS)
    comparison = _compared(ON_AVERAGE, statistics.mean(wholes), statistics.mean(parts), bound)
    differ = abs(statistics.mean(wholes) - statistics.mean(parts)) > _STANDARD_ERRORS * noise
    if comparison.holds or differ:
        return comparison
    return Comparison(
        name=ON_AVERAGE,
        why_not_compared="the loss draws random numbers that do not belong to single samples, and varies more "
        "between draws than between the batch and its parts",
    )


_UPDATES_STATE = (
    "each forward updates state in evaluation mode too, which may be why the losses differ by more than "
    "rounding"
)
_NOT_FINITE = "the baseline computes NaN or infinite numbers itself"
_NO_LOSS = "the loss of few samples is zero within rounding, which shows nothing"


def _compared(name: str, whole: float, parts: float, bound: float) -> Comparison:
    if not math.isfinite(whole):
        return Comparison(name=name, why_not_compared=_NOT_FINITE)
    if max(abs(whole), abs(parts)) <= bound * _SMALL_LOSS:
        return Comparison(name=name, why_not_compared=_NO_LOSS)
    difference = abs(whole - parts) / max(abs(whole), abs(parts), _SMALL_LOSS)
    return Comparison(
        name=name,
        is_bitwise=difference == 0,
        largest_difference=difference if math.isfinite(difference) else math.inf,
        where=f"the loss ({whole:.6g} of the batch, {parts:.6g} of its parts)" if difference else "",
        bound=bound,
    )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules in evaluation mode; on exit, restore the mode of each."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch, Python and NumPy; on exit, restore the states of their generators."""
    with one_at_a_time():
        before = RandomState.now(device)
        try:
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            yield
        finally:
            before.restore(device)
