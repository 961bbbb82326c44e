"""One optimizer step: the code that capture predicts, measuring measures and training runs.

The order is: for each micro-batch (autocast → loss × weight → scale → backward), then once: unscale, clip,
check, step, update the scale, clear the gradients. The sum of the weighted losses is the loss of the
global batch, whatever the micro-batches. A loss that couples the samples takes another way; see `coupled.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from brimful.batches import layout_of, map_tensors
from brimful.errors import BatchError, LossError, UsageError
from brimful.execution.coupled_loss import CoupledLoss, accumulate_coupled
from brimful.execution.update_in_backward import UpdateInBackward
from brimful.job import Batch, Job
from brimful.optimizers import check_gradients_are_dense
from brimful.results import Recovery
from brimful.settings import Precision
from brimful.trace import Phase

Observer = Callable[[Phase, int], None]
"""Called with the phase and the micro-batch as each begins."""

CallAction = Callable[[Callable[[], object]], object]
"""Calls an action it is given."""


def call(action: Callable[[], object]) -> object:
    """Call an action: the plain way."""
    return action()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one optimizer step came to."""

    loss: Tensor
    """Scalar: the loss of the global batch, a mean or a sum as `Job.reduction` says, before the update."""
    gradient_norm: Tensor
    """Scalar: 2-norm of all gradients of the global batch, before clipping."""
    updated: bool
    """False if `before_update` declined or the scaler skipped the update."""
    recoveries: tuple[Recovery, ...] = ()
    """Each time that memory ran out in the step, and with which settings it was run again."""


def run_step(
    *,
    model: nn.Module,
    loss: Callable[[nn.Module, Batch], Tensor],
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    weights: Sequence[float],
    precision: Precision,
    scaler: GradScaler | None = None,
    max_gradient_norm: float | None = None,
    before_update: Callable[[Tensor, Tensor], bool] | None = None,
    observe: Observer | None = None,
    move: Callable[[Batch], Batch] = lambda batch: batch,
    prefetch: Callable[[Batch], Callable[[], Batch]] | None = None,
    call_update: CallAction = call,
    after_update: CallAction = call,
    synchronising: Callable[[bool], AbstractContextManager[object]] = lambda _is_last: nullcontext(),
    clip: Callable[[Optimizer, float | None], Tensor] | None = None,
    last_repeats: int = 1,
    in_backward: UpdateInBackward | None = None,
) -> StepOutcome:
    """Run one optimizer step over the micro-batches of a global batch.

    Args:
        model: In training mode, on its device.
        loss: `loss(model, batch)`, a scalar: the mean over a micro-batch. A `CoupledLoss` is one of the global
            batch, computed with cached gradients where that is split.
        optimizer: Holds the parameters of `model`; its gradients are clear.
        micro_batches: The global batch in parts.
        weights: Factors for the losses of the micro-batches, see `loss_weights`; over ranks times their number.
        precision: FP16 and BF16 run forward under autocast.
        scaler: Scales the loss under FP16; None otherwise.
        max_gradient_norm: Gradients are scaled down to this norm; None leaves them.
        before_update: Called with loss and gradient norm; returning False leaves the parameters as they are.
        observe: Told of each phase.
        move: Brings a micro-batch to the device just before it is used.
        prefetch: Takes its place where a batch is split: begins to bring one there while the one before it is
            computed, and returns what waits until it is there. Not for a `CoupledLoss`.
        call_update: Calls the optimizer's step.
        after_update: Calls what follows it; each is safe to call again.
        synchronising: Around forward and backward of a micro-batch; told whether it is the last.
        clip: Scales the gradients down to a norm and returns what it was; None takes those of the parameters.
        last_repeats: How many micro-batches the last one stands for, where nothing is truly computed: a coupled
            loss has the embeddings of all of them, and beside it the next is on its way.
        in_backward: Updates each parameter as its gradient is complete; then `before_update` is called before
            backward, with no gradient norm. Nothing is clipped or scaled.

    Returns:
        The loss and gradient norm of the global batch.

    Raises:
        LossError: The loss is not a scalar tensor or has no gradient.
        UsageError: The batch is in several parts, and parameters are to be updated in backward.
    """
    tell = observe or (lambda _phase, _micro_batch: None)

    if in_backward is not None:
        (micro_batch,) = _only_one(micro_batches)
        tell(Phase.FORWARD, 0)
        value = _forward(model, loss, move(micro_batch), 1.0, precision)
        if before_update is not None and not before_update(value.detach(), torch.zeros(())):
            return StepOutcome(loss=value.detach(), gradient_norm=torch.zeros(()), updated=False)
        tell(Phase.BACKWARD, 0)
        norm = in_backward.run(value.backward)
        return StepOutcome(loss=value.detach(), gradient_norm=norm, updated=in_backward.updates)

    def backward(value: Tensor) -> None:
        (scaler.scale(value) if scaler is not None else value).backward()

    total: Tensor | None = None
    if isinstance(loss, CoupledLoss) and len(micro_batches) > 1:
        total = accumulate_coupled(
            model=model,
            embed=partial(_embed, model, loss, precision),
            count=loss.layout.count,
            loss=partial(_loss_of_embeddings, model, loss, precision),
            backward=backward,
            micro_batches=micro_batches,
            tell=tell,
            move=move,
            synchronising=synchronising,
            last_repeats=last_repeats,
        )
    else:
        moved: Iterator[Batch] = map(move, micro_batches)
        if prefetch is not None:
            moved = _prefetched(prefetch, micro_batches, last_repeats)
        for index, weight in enumerate(weights):
            tell(Phase.FORWARD, index)
            with synchronising(index == len(micro_batches) - 1):
                part = _forward(model, loss, next(moved), weight, precision)
                tell(Phase.BACKWARD, index)
                backward(part)
            total = part.detach() if total is None else total + part.detach()
            del part
        del moved  # and what it began to move
    assert total is not None
    tell(Phase.OPTIMIZER, len(micro_batches) - 1)
    if scaler is not None:
        scaler.unscale_(optimizer)
    gradient_norm = (clip or _clip)(optimizer, max_gradient_norm)
    updated = before_update is None or before_update(total, gradient_norm)
    if updated:
        updated = _update(optimizer, scaler, call_update, after_update)
        after_update(optimizer.zero_grad)
    else:
        optimizer.zero_grad()
    return StepOutcome(loss=total, gradient_norm=gradient_norm, updated=updated)


def _prefetched(
    prefetch: Callable[[Batch], Callable[[], Batch]], micro_batches: Sequence[Batch], last_repeats: int
) -> Iterator[Batch]:
    """Micro-batches on the device, of which nothing is held here; the next of each is on its way."""
    coming: Callable[[], Batch] | None = prefetch(micro_batches[0])
    for following in (*micro_batches[1:], micro_batches[-1] if last_repeats > 1 else None):
        assert coming is not None
        here = [coming()]
        coming = None if following is None else prefetch(following)
        yield here.pop()


def _only_one(micro_batches: Sequence[Batch]) -> Sequence[Batch]:
    if len(micro_batches) > 1:
        raise UsageError(
            "optimizer_in_backward takes a batch at once, and this one has more samples than a micro-batch: "
            f"it is in {len(micro_batches)} parts. Give smaller batches, or set optimizer_in_backward=False."
        )
    return micro_batches


def _forward(
    model: nn.Module,
    loss: Callable[[nn.Module, Batch], Tensor],
    batch: Batch,
    weight: float,
    precision: Precision,
) -> Tensor:
    with autocast(model, precision):
        value = loss(model, batch)
    check_loss(value)
    # A weight of exactly 1 is left out, so that one whole batch runs the plain step, bit for bit.
    return value if weight == 1.0 else value * weight


def _embed(model: nn.Module, loss: CoupledLoss, precision: Precision, batch: Batch) -> Any:
    with autocast(model, precision):
        return loss.embed(model, batch)


def _loss_of_embeddings(model: nn.Module, loss: CoupledLoss, precision: Precision, embeddings: Any) -> Tensor:
    with autocast(model, precision):
        value = loss.of_embeddings(embeddings)
    check_loss(value)
    return value


def loss_weights(job: Job, micro_batches: Sequence[Batch]) -> list[float]:
    """Factors for the losses of micro-batches, such that they sum to the loss of the global batch.

    Args:
        job: Of a loss that is a mean, `count` says over how many terms; None means samples.
        micro_batches: The global batch in parts.

    Returns:
        For a mean, shares that sum to 1; for a sum, and for a single micro-batch, exactly 1 each.

    Raises:
        BatchError: The counts are no numbers, negative or not finite, or the global batch has nothing to count.
    """
    if job.reduction == "sum" or (job.count is None and len(micro_batches) == 1):
        return [1.0] * len(micro_batches)
    counts = loss_counts(job, micro_batches)
    return shares_of(counts, sum(counts))


def counting_parts(micro_batches: Sequence[Batch], weights: Sequence[float]) -> tuple[list[Batch], list[float]]:
    """The micro-batches, and their weights, without those that count for nothing.

    The mean loss of such a one is no number, even times 0.
    """
    parts = [part for part, weight in zip(micro_batches, weights, strict=True) if weight]
    return parts, [weight for weight in weights if weight]


def loss_counts(job: Job, micro_batches: Sequence[Batch], *, whole: int = 1) -> list[float]:
    """How many terms the mean loss of each micro-batch is over.

    Args:
        job: Its `count` counts them; None means samples.
        micro_batches: Parts of a global batch.
        whole: How many samples a batch counts for that cannot be split.

    Returns:
        Numbers of at least 0.

    Raises:
        BatchError: They are no numbers, negative or not finite.
    """
    count = job.count or layout_of(job, whole=whole).count
    counts = [_number(count(micro_batch)) for micro_batch in micro_batches]
    if not all(math.isfinite(terms) and terms >= 0 for terms in counts):
        raise BatchError(f"the counts of the micro-batches are {counts}; each must be finite and at least 0.")
    return counts


def _number(found: Any) -> float:
    """What a job's `count` returned, as a number; digits in a text are not one."""
    if isinstance(found, Tensor) and (found.numel() != 1 or found.is_complex()):
        raise _no_number(f"a {str(found.dtype).removeprefix('torch.')} tensor of shape {tuple(found.shape)}")
    what = f"an object of type {type(found).__name__}"
    if isinstance(found, str | bytes):
        raise _no_number(what)
    try:
        return float(found)
    except (TypeError, ValueError) as error:
        raise _no_number(what) from error


def _no_number(what: str) -> BatchError:
    return BatchError(
        f"count(batch) returned {what}. It must return one number: over how many terms the mean loss of the "
        "batch is, such as (labels != -100).sum()."
    )


def shares_of(counts: Sequence[float], total: float) -> list[float]:
    """What part each count is of a total.

    Args:
        counts: Of micro-batches.
        total: Of the global batch.

    Returns:
        As many parts.

    Raises:
        BatchError: The total is 0.
    """
    if total == 0:
        raise BatchError(
            f"the mean over the global batch is over nothing: the counts of its {len(counts)} micro-batches "
            "sum to 0. Leave such batches out, or check `count`: do all labels have the value it ignores?"
        )
    return [terms / total for terms in counts]


def check_loss(value: Any) -> None:
    """Check that a loss can be trained on.

    Args:
        value: What a job's loss returned.

    Raises:
        LossError: It is no tensor, no real scalar, or has no gradient.
    """
    if not isinstance(value, Tensor):
        raise LossError(
            f"the loss is a {type(value).__name__}, not a tensor. Return the scalar itself: for a "
            "Transformers model, `model(**batch).loss`."
        )
    if value.numel() != 1:
        raise LossError(
            f"the loss has shape {tuple(value.shape)}; it must be a scalar. Reduce it: `loss.mean()`."
        )
    if value.is_complex():
        raise LossError(
            f"the loss is complex ({str(value.dtype).removeprefix('torch.')}), and only a real number can be "
            "minimized. Return a real one: `loss.abs()`, or `loss.real`."
        )
    if not value.requires_grad:
        raise LossError(
            "the loss has no gradient. It was computed under no_grad, detached, or from frozen parameters only."
        )


def autocast(model: nn.Module, precision: Precision) -> torch.autocast:
    """The autocast context of `precision` on the device of `model`; it does nothing for FP32 and TF32."""
    dtype = precision.autocast_dtype
    return torch.autocast(
        device_of(model).type,
        dtype=getattr(torch, dtype) if dtype else None,
        enabled=dtype is not None,
    )


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Let float32 matmuls and convolutions use TF32 only if `precision` is TF32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision is Precision.TF32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer is; the CPU if it has none."""
    for tensor in chain(model.parameters(), model.buffers()):  # lazily: every micro-batch asks
        if isinstance(tensor, DTensor) and tensor.device_mesh.device_type != tensor.device.type:
            return torch.device(tensor.device_mesh.device_type)  # its part is on the host meanwhile
        return tensor.device
    return torch.device("cpu")


def copied_to(device: torch.device | str) -> Callable[[Batch], Batch]:
    """A `move` that always copies a micro-batch to `device`, so that the batch stays as it is.

    Training steps take an `InputMover`, which copies nothing on a CPU.
    """
    return lambda batch: map_tensors(batch, lambda tensor: tensor.to(device, copy=True, non_blocking=True))


def make_scaler(precision: Precision, device_type: str) -> GradScaler | None:
    """The loss scaler that FP16 needs; None for other precisions."""
    return GradScaler(device_type) if precision is Precision.FP16 else None


def unused_scaler(scaler: GradScaler, device_type: str) -> GradScaler:
    """A loss scaler with the state of another, that has found nothing yet about a step's gradients."""
    unused = GradScaler(device_type)
    unused.load_state_dict(scaler.state_dict())
    return unused


def _clip(optimizer: Optimizer, max_norm: float | None) -> Tensor:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    check_gradients_are_dense(gradients)
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):  # of gradients that are divided over ranks
        norm = norm.full_tensor()
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _update(
    optimizer: Optimizer, scaler: GradScaler | None, call_update: CallAction, after_update: CallAction
) -> bool:
    if scaler is None:
        call_update(optimizer.step)
        return True
    scale = scaler.get_scale()
    with _stepping_through(optimizer, call_update):
        scaler.step(optimizer)
    after_update(scaler.update)
    scales: list[float] = []
    after_update(lambda: scales.append(scaler.get_scale()))
    return scales[-1] >= scale  # the scale falls when, and only when, the step was skipped


@contextmanager
def _stepping_through(optimizer: Optimizer, call_update: CallAction) -> Iterator[None]:
    """Within, the optimizer's step is called by `call_update`; a scaler calls it by name."""
    step, own = optimizer.step, optimizer.__dict__.get("step")  # a schedule puts one of its own there
    optimizer.step = lambda: call_update(step)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is None:
            del optimizer.__dict__["step"]
        else:
            optimizer.step = own  # type: ignore[method-assign]
        for name in ("grad_scale", "found_inf"):  # a scaler leaves them where a fused step raises
            optimizer.__dict__.pop(name, None)
