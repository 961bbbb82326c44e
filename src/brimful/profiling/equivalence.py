"""A real batch under a plan and under the baseline → `EquivalenceReport`."""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from brimful.batches import InputMover, layout_of, make_batch, map_tensors
from brimful.errors import EquivalenceError, PartialUpdateError
from brimful.execution.attached import copied_model
from brimful.execution.coupled_loss import check_coupled
from brimful.execution.executor import StepExecutor, Transfers
from brimful.execution.hooks import StepHooks
from brimful.execution.losses import counting_parts, loss_weights
from brimful.execution.out_of_memory import out_of_memory
from brimful.execution.precision import device_of
from brimful.execution.setup import build_model, choose_device, device_name
from brimful.job import Batch, Job
from brimful.optimizers import make_optimizer
from brimful.planner import what_splitting_changes
from brimful.profiling.aligned_draws import DrawWatch
from brimful.profiling.coupled_layers import batch_norms, carried_state
from brimful.profiling.splitting import ROUNDINGS, coarsest_dtype, compare_split_loss, terms_of_loss
from brimful.results import Comparison, EquivalenceReport
from brimful.settings import Compile, Precision, Settings
from brimful.torch_utils.held_values import HeldValues
from brimful.transforms import apply_memory_format, apply_units
from brimful.utils.one_at_a_time import one_at_a_time

_GRADIENT = "the gradient of"
_BUFFER = "the state"
_NUMBER = "the number"
_STEPS = 2
"""Steps that are compared: what the first wrote beside gradients shows in the second."""
_MOVED = 0.01
"""Fraction by which trainable parameters move at random between the steps. A choice: by the same in all that is
compared, so that it shows whether what follows them followed alike."""
_UNSTEADY = 4
"""Factor by which two runs of a step whose kernels add in any order may differ more than two runs of the
baseline do, and than one rounding. A choice: on an H100 they differed by 1.02 roundings of bf16."""
_OTHER_DEVICE_SAMPLES = 2
"""Samples per micro-batch on a device that replaces the plan's, which may be much slower, or where plain
training may not fit."""


def verify(
    job: Job,
    settings: Settings,
    *,
    device: torch.device | str = "cpu",
    is_stand_in: bool = False,
    seed: int = 0,
) -> EquivalenceReport:
    """Compare loss, gradients and buffers of one global batch under a plan with those of the baseline.

    Recomputation must be bitwise equal. Splitting the batch changes the order of sums and may change the last
    bits; it is compared in float32, if the model draws no random numbers and does not normalise over the batch.
    Otherwise the losses of the batch and of its parts are compared in float32 and evaluation mode. A memory
    format is compared in float64 with the model's own layout, within one rounding of float32.

    Args:
        job: The job; its model is built or copied, and never changed.
        settings: Settings of the plan.
        device: "cpu" or a CUDA device of this machine.
        is_stand_in: Whether the device replaces another; then two micro-batches of two samples each are used.
        seed: Seeds the model's weights, the batch and dropout.

    Returns:
        The comparisons.

    Raises:
        UsageError: The device does not exist, or the optimizer cannot be used.
        BatchError: The job's batch cannot be made or split.
        LossError: The loss is not a scalar tensor or has no gradient.
        EquivalenceError: The step cannot run as planned: parameters get their gradients in parts, and are to be
            updated in backward.
    """
    device = choose_device(device, None)
    check_coupled(job, settings)
    with _random_state_kept(device), deterministic_kernels(device):
        torch.manual_seed(seed)
        model = build_model(job, is_copied=True).train()
        make_optimizer(job, model, settings)  # one that cannot be used is refused here as everywhere
        compared = _with_few_samples(settings) if is_stand_in else settings
        return _verified(job, settings, compared, model, device, seed)


def verify_model(job: Job, settings: Settings, model: nn.Module, *, seed: int = 0) -> EquivalenceReport:
    """Compare a few samples under a plan with the baseline, with a model that is about to be trained.

    Two micro-batches of two samples each are used. In addition to the model this needs memory for a copy of it
    and its gradients, which is less than the gradients and state that AdamW will need; twice that where a
    memory format is compared, in float64.

    The model is in training mode, on its device, and `settings` are not yet applied to it. Neither it nor
    random generators are changed. Raises `BatchError`, `LossError` and `EquivalenceError` as `verify` does.
    """
    device = device_of(model)
    try:
        _copied(model)
    except Exception as error:  # whatever a module's own copying raises
        reason = f"the model cannot be copied: {error}"
        comparisons = (Comparison(name="recomputing", why_not_compared=reason),)
        return EquivalenceReport(job=job.name, device=device_name(device), samples=0, comparisons=comparisons)
    with _random_state_kept(device), deterministic_kernels(device):
        report = _verified(job, settings, _with_few_samples(settings), model, device, seed)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # training begins with the allocator as it would be without the comparison
    return report


def _with_few_samples(settings: Settings) -> Settings:
    return replace(
        settings,
        micro_batch_size=min(settings.micro_batch_size, _OTHER_DEVICE_SAMPLES),
        gradient_accumulation_steps=min(settings.gradient_accumulation_steps, 2),
    )


def _verified(
    job: Job, planned: Settings, settings: Settings, model: nn.Module, device: torch.device, seed: int
) -> EquivalenceReport:
    """The report for `settings`, which may be the planned settings with fewer samples."""
    batches = [make_batch(job, settings.rank_batch_size) for _ in range(_STEPS)]
    layout = layout_of(job, whole=settings.rank_batch_size, expected=settings.rank_batch_size)
    few = layout.split(batches[0], settings.micro_batch_size)[0]
    stateful = carried_state(job, model.to(device), few)  # all else runs on copies
    try:
        return _compared(job, planned, settings, model, device, seed, batches, stateful)
    except PartialUpdateError as error:
        raise EquivalenceError(f"{job.name}: the plan cannot be compared with the baseline: {error}") from error


def _compared(
    job: Job,
    planned: Settings,
    settings: Settings,
    model: nn.Module,
    device: torch.device,
    seed: int,
    batches: list[Batch],
    stateful: tuple[str, ...],
) -> EquivalenceReport:
    batch, compiles = batches[0], settings.compile
    settings = replace(settings, compile=Compile.NONE)  # compared by itself, as it rounds otherwise
    compute = partial(_computed, job, model, batches, device, seed, stateful)
    plain = replace(settings, units=(), optimizer_in_backward=False, prefetch_inputs=False)
    kept = compute(plain)
    comparisons = [_recomputing(settings, kept, compute)]
    for is_on, name in (
        (settings.optimizer_in_backward, "updating in backward"),
        (settings.prefetch_inputs and settings.gradient_accumulation_steps > 1, "copying ahead"),
    ):
        if is_on and not settings.changed:  # else what is recomputed was compared under it, too
            comparisons.append(_same_but_for_order(name, kept, compute(settings), settings, compute))
    if settings.chunked_loss is not None:
        at_once = compute(replace(plain, chunked_loss=None))
        comparisons.append(
            _comparison("computing the loss in chunks", at_once, kept, bound=_rounding(settings.precision))
        )
    if settings.memory_format is not None:
        comparisons.append(_in_format(plain, kept.draws, compute))
    if compiles is not Compile.NONE:
        comparisons.append(_compiling(replace(settings, compile=compiles), kept, compute))
    terms = None
    if settings.gradient_accumulation_steps > 1:
        terms = terms_of_loss(replace(job, batch=batch), settings.rank_batch_size)
    splitting = terms or _splitting(settings, planned, kept, model, compute)
    comparisons.append(splitting)
    if splitting.why_not_compared and settings.gradient_accumulation_steps > 1:
        comparisons.append(
            compare_split_loss(
                job,
                model.to(device),
                batch,
                samples=settings.rank_batch_size,
                micro_batch_size=settings.micro_batch_size,
                seed=seed,
            )
        )
    return EquivalenceReport(
        job=job.name,
        device=device_name(device),
        samples=settings.rank_batch_size,
        comparisons=tuple(comparisons),
    )


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Run CUDA ops with kernels that add in a fixed order, where such kernels exist.

    Without them two equal steps differ in the last digits: on an H100, gradients of a Llama under bf16 by as
    much as one rounding of their largest entry. Nothing changes on other devices.

    Source: torch.use_deterministic_algorithms, which lists the ops.
    """
    if device.type != "cuda":
        yield
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    with one_at_a_time(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*determinis", category=UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_on, warn_only=only_warned)


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore torch's, Python's and NumPy's generators on exit."""
    with one_at_a_time(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        python, numpy = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@dataclass(frozen=True, slots=True)
class _Computed:
    """Results of the compared steps, by name, on the CPU."""

    values: Mapping[str, Tensor]
    draws: bool
    """Whether random numbers were drawn."""
    stateful: tuple[str, ...]
    """Names of what one forward changes and the next one reads."""


def _recomputing(settings: Settings, kept: _Computed, compute: Callable[[Settings], _Computed]) -> Comparison:
    """Compare the plan's recomputed or offloaded units with all units kept."""
    if not settings.changed:
        return Comparison(
            name="recomputing", why_not_compared="the plan recomputes nothing and offloads nothing"
        )
    return _same_but_for_order("recomputing", kept, compute(settings), settings, compute)


def _same_but_for_order(
    name: str, kept: _Computed, found: _Computed, settings: Settings, compute: Callable[[Settings], _Computed]
) -> Comparison:
    """Compare two computations that must be bitwise equal, unless the baseline itself varies.

    Some CUDA kernels add in any order, even among `deterministic_kernels`. Differences that the baseline shows
    between runs are not caused by the plan; differences larger than some roundings are not caused by the
    kernels.
    """
    comparison = _comparison(name, kept, found, bound=0.0)
    if comparison.is_bitwise:
        return comparison
    again = compute(replace(settings, units=(), optimizer_in_backward=False, prefetch_inputs=False))
    unsteadiness = _comparison("plain", kept, again, bound=0.0).largest_difference
    bound = min(_UNSTEADY * unsteadiness, _UNSTEADY * _rounding(settings.precision))
    return replace(comparison, bound=bound)


def _rounding(precision: Precision) -> float:
    """Largest error of a gradient from another order of summation, relative to its largest entry."""
    if precision.autocast_dtype is not None:
        return torch.finfo(getattr(torch, precision.autocast_dtype)).eps
    return ROUNDINGS * torch.finfo(torch.float32).eps


def _in_format(plain: Settings, draws: bool, compute: Callable[..., _Computed]) -> Comparison:
    """Compare the memory format with the model's own layout, in float64.

    In float32 a value near 0 may be rounded to either side of it, and a ReLU then passes a gradient or not: two
    formats that compute the same differ by percents there. What differs in float64 is not rounding.
    """
    name = "the memory format"
    if draws:
        reason = "the model draws random numbers, which may be others for each element in another layout"
        return Comparison(name=name, why_not_compared=reason)
    settings, handled = replace(plain, precision=Precision.FP32), sys.exc_info()[1]
    try:
        own, found = (
            compute(each, in_float64=True) for each in (replace(settings, memory_format=None), settings)
        )
    except Exception as error:  # whatever a model or loss raises that is given other numbers than float32
        if out_of_memory(error, handled) is not None:
            raise
        reason = f"the step does not run in float64, in which memory formats are compared: {error}"
        return Comparison(name=name, why_not_compared=reason)
    return _comparison(name, own, found, bound=torch.finfo(torch.float32).eps, has_floor=True)


def _compiling(compiled: Settings, kept: _Computed, compute: Callable[..., _Computed]) -> Comparison:
    """Compare compiled units with eager ones, all kept."""
    if kept.draws:
        reason = "the model draws random numbers, and compiled code draws others of the same distribution"
        return Comparison(name="compiling", why_not_compared=reason)
    found = compute(compiled, watches=False)
    return _comparison("compiling", kept, found, bound=_rounding(compiled.precision))


def _splitting(
    settings: Settings,
    planned: Settings,
    kept: _Computed,
    model: nn.Module,
    compute: Callable[[Settings], _Computed],
) -> Comparison:
    """Compare the batch in micro-batches with the whole batch."""
    if settings.gradient_accumulation_steps > 1 and (
        changes := list(what_splitting_changes(batch_norms(model), kept.stateful, planned))
    ):
        return Comparison(name="splitting", why_not_compared="; ".join(changes), is_known_to_differ=True)
    reason = _why_not_split(settings, model, kept)
    if reason:
        return Comparison(name="splitting", why_not_compared=reason)
    whole = compute(replace(settings, units=()).with_micro_batch_size(settings.rank_batch_size))
    whole, kept = (replace(each, values=_without_numbers(each.values)) for each in (whole, kept))
    return _comparison("splitting", whole, kept, bound=_rounding(settings.precision))


def _computed(
    job: Job,
    model: nn.Module,
    batches: Sequence[Batch],
    device: torch.device,
    seed: int,
    stateful: tuple[str, ...],
    settings: Settings,
    *,
    in_float64: bool = False,
    watches: bool = True,
) -> _Computed:
    """Loss, gradients, buffers and state of two steps of a copy of the model.

    Under the watch for random numbers compiled code runs eagerly; without it, none are known to be drawn.
    """
    copied = _copied(model).to(device)
    numbers = {name for name, value in HeldValues(copied).values.items() if not isinstance(value, Tensor)}
    if in_float64:
        copied, batches = copied.double(), [map_tensors(batch, _in_float64) for batch in batches]
    apply_memory_format(copied, settings)
    applied = apply_units(copied, settings)
    layout = layout_of(job, whole=settings.rank_batch_size, expected=settings.rank_batch_size)
    names = {id(parameter): name for name, parameter in copied.named_parameters()}
    values: dict[str, Tensor] = {}
    when = ""

    def keep_gradient(parameter: nn.Parameter) -> AbstractContextManager[object]:
        if parameter.grad is not None:
            values[f"{_GRADIENT} {names[id(parameter)]}{when}"] = parameter.grad.cpu()
        return nullcontext()

    def keep(loss: Tensor, _norm: Tensor) -> bool:
        values[f"the loss{when}"] = loss.cpu()
        for parameter in copied.parameters():
            keep_gradient(parameter)
        return settings.optimizer_in_backward  # before backward, which the executor runs without updates

    executor = StepExecutor(
        job,
        replace(settings, offload_optimizer=False),  # no update, so no optimizer to move
        copied,
        torch.optim.SGD(copied.parameters()),
        device=device,
        transfers=Transfers(move=InputMover.copying_to(device)),
    )
    hooks = StepHooks(before_update=keep, around_parameter_update=keep_gradient)
    for batch in batches:
        parts = layout.split(batch, settings.micro_batch_size)
        micro_batches, weights = counting_parts(parts, loss_weights(job, parts))
        with _seeded(seed), DrawWatch(device) if watches else nullcontext() as watch:
            executor(micro_batches, weights, hooks=hooks, updates=not settings.optimizer_in_backward)
            draws = watch is not None and watch.has_drawn
        copied.zero_grad()
        executor.reset_scaler()  # there was no update
        _move(copied)
        when = " in a second step"
    applied.remove()
    buffers = {name for name, _buffer in copied.named_buffers()}
    for name, value in HeldValues(copied).values.items():
        if name in buffers or name in stateful:
            values[f"{_BUFFER} {name}"] = torch.as_tensor(value).detach().cpu()
        elif name in numbers:
            values[f"{_NUMBER} {name}"] = torch.tensor(value)
    return _Computed(values, draws, stateful)


def _move(model: nn.Module) -> None:
    """Change trainable parameters, by the same factors in each call."""
    generator = random.Random(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + generator.random() * _MOVED)


def _in_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _copied(model: nn.Module) -> nn.Module:
    """A copy of a model, whose parameters are leaves; torch keeps a graph to those of a scripted model."""
    copied = copied_model(model)
    for parameter, own in zip(copied.parameters(), model.parameters(), strict=True):
        if not parameter.is_leaf:
            parameter.detach_().requires_grad_(own.requires_grad)
    return copied


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch, Python and NumPy within; their previous states are restored afterwards."""
    with _random_state_kept(torch.device("cpu")):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # all that NumPy takes
        torch.manual_seed(seed)
        yield


def _without_numbers(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values without counts of forwards, of which a split batch has more."""
    return {name: value for name, value in values.items() if not name.startswith(_NUMBER)}


def _why_not_split(settings: Settings, model: nn.Module, kept: _Computed) -> str:
    """Why a split batch is not compared with a whole one; empty if it is."""
    if settings.gradient_accumulation_steps == 1:
        return "the plan does not split the batch"
    if kept.draws:
        return "the model draws random numbers, others for a split batch"
    if settings.precision not in (Precision.FP32, Precision.TF32):
        return f"rounding to {settings.precision} is larger than what splitting changes"
    half = coarsest_dtype(model)
    if half is not None:
        return f"rounding to {str(half).removeprefix('torch.')} is larger than what splitting changes"
    return ""


def _comparison(
    name: str, computed: _Computed, other: _Computed, *, bound: float, has_floor: bool = False
) -> Comparison:
    """Compare two computations by name and value.

    With `has_floor`, buffers too count as if their largest entry were at least the smallest that matters.
    """
    expected, found = computed.values, other.values
    if expected.keys() != found.keys():
        where = sorted(expected.keys() ^ found.keys())[0]
        return Comparison(name=name, largest_difference=float("inf"), where=where, bound=bound)
    if not all(value.isfinite().all() for value in expected.values()):
        return Comparison(name=name, why_not_compared="the baseline computes NaN or infinite numbers itself")
    smallest = {_GRADIENT: _smallest(expected, _GRADIENT), _BUFFER: 0.0}
    if has_floor:
        smallest[_BUFFER] = _smallest(expected, _BUFFER)
    differences = {
        key: _difference(
            expected[key], found[key], next((s for part, s in smallest.items() if key.startswith(part)), 0.0)
        )
        for key in expected
    }
    where = max(differences, key=differences.__getitem__, default="")
    largest = differences.get(where, 0.0)
    return Comparison(
        name=name,
        is_bitwise=largest == 0,
        largest_difference=largest,
        where=where if largest else "",
        bound=bound,
    )


def _smallest(values: Mapping[str, Tensor], part: str) -> float:
    """The least value that counts as the largest entry of a gradient, or of a buffer.

    What is within `ROUNDINGS` of it is within one rounding of the largest gradient of all. The gradient of a
    bias of attention's keys is nothing but rounding: the softmax does not depend on it.
    """
    of_part = [value for key, value in values.items() if key.startswith(part) and value.numel()]
    largest = (float(value.abs().max()) for value in of_part)
    return max(largest, default=0.0) / ROUNDINGS


def _difference(expected: Tensor, found: Tensor, smallest: float) -> float:
    """The largest difference of two tensors over the largest entry, which counts as `smallest` at least;
    infinite if one is not finite."""
    if torch.equal(expected, found):
        return 0.0
    expected, found = expected.double(), found.double()
    scale = expected.abs().max().clamp_min(max(smallest, torch.finfo(torch.float32).tiny))
    difference = float((expected - found).abs().max() / scale)
    return difference if math.isfinite(difference) else math.inf
