"""One optimizer step: the code that capture predicts, measuring measures and training runs.

The order is: for each micro-batch (autocast → loss × weight → scale → backward), then once: unscale, clip,
check, step, update the scale, clear the gradients. The sum of the weighted losses is the loss of the
global batch, whatever the micro-batches. A loss that couples the samples runs as `coupled_loss.py` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from brimful.errors import UsageError
from brimful.execution.coupled_loss import CoupledLoss, accumulate_coupled
from brimful.execution.hooks import NO_HOOKS, CallAction, StepHooks
from brimful.execution.losses import check_loss
from brimful.execution.precision import autocast
from brimful.execution.update_in_backward import UpdateInBackward
from brimful.job import Batch
from brimful.optimizers import check_gradients_are_dense
from brimful.results import Recovery
from brimful.settings import Precision
from brimful.trace import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of one optimizer step."""

    loss: Tensor
    """Scalar: the loss of the global batch before the update, a mean or a sum (see `Job.reduction`)."""
    gradient_norm: Tensor
    """Scalar: 2-norm of all gradients of the global batch, before clipping."""
    updated: bool
    """False if `before_update` declined or the scaler skipped the update."""
    recoveries: tuple[Recovery, ...] = ()
    """One record for each attempt that was repeated, with the settings of the next one: memory ran out, or the
    model refused a smaller micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The model, loss, optimizer and options of a step."""

    model: nn.Module
    """A model in training mode, on its device."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """Computes a scalar: the mean or the sum over a micro-batch, or a `CoupledLoss` over the global batch."""
    optimizer: Optimizer
    """The optimizer of the parameters of `model`, whose gradients are cleared."""
    precision: Precision
    """FP16 and BF16 run forward under autocast."""
    scaler: GradScaler | None = None
    """Scales the loss under FP16."""
    max_gradient_norm: float | None = None
    """Norm to clip gradients to; None does not clip."""
    move: Callable[[Batch], Batch] = lambda batch: batch
    """Moves a micro-batch to the device just before its use."""
    prefetch: Callable[[Batch], Callable[[], Batch]] | None = None
    """Replaces `move`: starts the copy of a micro-batch while the previous one is computed, and returns a
    function that waits for it. Not for a `CoupledLoss`, nor with `in_backward`."""
    in_backward: UpdateInBackward | None = None
    """Updates each parameter when its gradient is complete; then `before_update` is called before backward,
    without a gradient norm, and gradients are neither clipped nor scaled."""


def run_step(
    parts: StepParts,
    micro_batches: Sequence[Batch],
    weights: Sequence[float],
    *,
    hooks: StepHooks = NO_HOOKS,
    last_repeats: int = 1,
) -> StepOutcome:
    """Run one optimizer step over the micro-batches of a global batch.

    Args:
        parts: What the step computes with.
        micro_batches: The global batch in parts.
        weights: Factors for the losses of the micro-batches, see `losses.loss_weights`; over several
            ranks each is multiplied by their number, as gradients are averaged.
        hooks: What the caller does in the step.
        last_repeats: In a capture, how many micro-batches the last one represents: of many equal ones it runs
            two at most. Training leaves it at 1.

    Returns:
        The loss and gradient norm of the global batch.

    Raises:
        LossError: The loss is not a scalar tensor or has no gradient.
        UsageError: The batch is in several parts, and parameters are to be updated in backward.
    """
    if parts.in_backward is not None:
        return _run_with_updates_in_backward(parts, parts.in_backward, micro_batches, hooks)
    optimizer, scaler = parts.optimizer, parts.scaler
    if scaler is not None:
        _scale_existing(optimizer, scaler)
    total = _accumulate(parts, micro_batches, weights, hooks=hooks, last_repeats=last_repeats)
    hooks.observe(Phase.OPTIMIZER, len(micro_batches) - 1)
    if scaler is not None:
        scaler.unscale_(optimizer)
    gradient_norm = (hooks.clip or _clip)(optimizer, parts.max_gradient_norm)
    updated = hooks.before_update is None or hooks.before_update(total, gradient_norm)
    if updated:
        updated = _update(optimizer, scaler, hooks)
        hooks.after_update(optimizer.zero_grad)
    else:
        optimizer.zero_grad()
    return StepOutcome(loss=total, gradient_norm=gradient_norm, updated=updated)


def _scale_existing(optimizer: Optimizer, scaler: GradScaler) -> None:
    """Scale gradients that are there before the step, as it unscales all of them."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    scale = scaler.get_scale() if gradients else 1.0  # it waits for the device
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(scale)


def _accumulate(
    parts: StepParts,
    micro_batches: Sequence[Batch],
    weights: Sequence[float],
    *,
    hooks: StepHooks,
    last_repeats: int,
) -> Tensor:
    """Run forward and backward of every micro-batch; returns the loss of the global batch, detached."""
    scaler = parts.scaler

    def backward(value: Tensor) -> None:
        (scaler.scale(value) if scaler is not None else value).backward()

    if isinstance(parts.loss, CoupledLoss) and len(micro_batches) > 1:
        return accumulate_coupled(
            parts.loss,
            parts.model,
            micro_batches,
            autocast=partial(autocast, parts.model, parts.precision),
            backward=backward,
            move=parts.move,
            hooks=hooks,
            last_repeats=last_repeats,
        )
    total: Tensor | None = None
    moved: Iterator[Batch] = map(parts.move, micro_batches)
    if parts.prefetch is not None:
        moved = _prefetched(parts.prefetch, micro_batches, last_repeats)
    for index, weight in enumerate(weights):
        hooks.observe(Phase.FORWARD, index)
        with hooks.synchronising(index == len(micro_batches) - 1):
            value = _forward(parts, next(moved), weight)
            hooks.observe(Phase.BACKWARD, index)
            backward(value)
        total = value.detach() if total is None else total + value.detach()
        del value
    del moved  # and what it began to move
    assert total is not None
    return total


def _run_with_updates_in_backward(
    parts: StepParts, in_backward: UpdateInBackward, micro_batches: Sequence[Batch], hooks: StepHooks
) -> StepOutcome:
    (micro_batch,) = _only_one(micro_batches)
    hooks.observe(Phase.FORWARD, 0)
    value = _forward(parts, parts.move(micro_batch), 1.0)
    if hooks.before_update is not None and not hooks.before_update(value.detach(), torch.zeros(())):
        return StepOutcome(loss=value.detach(), gradient_norm=torch.zeros(()), updated=False)
    hooks.observe(Phase.BACKWARD, 0)
    norm = in_backward.run(value.backward)
    return StepOutcome(loss=value.detach(), gradient_norm=norm, updated=in_backward.updates)


def _prefetched(
    prefetch: Callable[[Batch], Callable[[], Batch]], micro_batches: Sequence[Batch], last_repeats: int
) -> Iterator[Batch]:
    """Micro-batches on the device, of which nothing is held here; the copy of the next one has begun."""
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


def _forward(parts: StepParts, batch: Batch, weight: float) -> Tensor:
    with autocast(parts.model, parts.precision):
        value = parts.loss(parts.model, batch)
    check_loss(value)
    # No multiplication by a weight of exactly 1, so that one whole batch runs the plain step, bit for bit.
    return value if weight == 1.0 else value * weight


def _clip(optimizer: Optimizer, max_norm: float | None) -> Tensor:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    check_gradients_are_dense(gradients)
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):  # gradients are sharded over ranks
        norm = norm.full_tensor()
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _update(optimizer: Optimizer, scaler: GradScaler | None, hooks: StepHooks) -> bool:
    if scaler is None:
        hooks.call_update(optimizer.step)
        return True
    scale = scaler.get_scale()
    with _stepping_through(optimizer, hooks.call_update):
        scaler.step(optimizer)
    hooks.after_update(scaler.update)
    scales: list[float] = []
    hooks.after_update(lambda: scales.append(scaler.get_scale()))
    return scales[-1] >= scale  # the scale falls when, and only when, the step was skipped


@contextmanager
def _stepping_through(optimizer: Optimizer, call_update: CallAction) -> Iterator[None]:
    """Within, `call_update` calls the optimizer's step; a scaler calls it by name."""
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
