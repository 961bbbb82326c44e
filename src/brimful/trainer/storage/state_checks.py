"""Checks saved state before this run's optimizer, schedule and loss scaler load it; raises ResumeError.

Their `load_state_dict` accepts almost anything, and state that does not fit would raise or broadcast within an
update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from brimful.codec import NonNegativeInt, PositiveInt, from_builtins
from brimful.errors import FileFormatError, ResumeError
from brimful.trainer.storage.checkpoint import Checkpoint


def check_parts(
    state: Checkpoint, optimizer: Optimizer, scheduler: LRScheduler | None, scaler: GradScaler | None
) -> None:
    """Check that this run's optimizer, schedule and loss scaler can load a saved state."""
    check_optimizer_state(optimizer, state.optimizer)
    for name, part, saved in (("scheduler", scheduler, state.scheduler), ("scaler", scaler, state.scaler)):
        if (part is None) != (saved is None):
            had, has = ("a", "none") if part is None else ("no", "one")
            raise ResumeError(f"the saved run had {had} {name}, and this one has {has}. Resume it as it was.")
    if scheduler is not None and state.scheduler is not None:
        check_scheduler_state(scheduler, state.scheduler)
    if state.scaler is not None:
        check_scaler_state(state.scaler)


def check_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Check that a saved `state_dict` is of the parameters of an optimizer.

    The shapes and dtypes of its tensors must fit these; they are whole, or sharded as the parameters are.
    """
    saved_groups, groups = state["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        raise _other(optimizer, "its groups have other numbers of parameters")
    for index, (saved, own) in enumerate(zip(saved_groups, groups, strict=True)):
        for name in own.keys() & saved.keys() - {"params"}:
            _check_kind(optimizer, f"`{name}` of group {index}", saved[name], own[name])
    numbers = [number for group in saved_groups for number in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    if unknown := state["state"].keys() - set(numbers):
        raise _other(optimizer, f"it has state of a parameter {min(unknown)}, which is in none of its groups")
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in state["state"].get(number, {}).items():
            if isinstance(value, Tensor):
                _check_tensor(optimizer, f"{name!r} of parameter {number}", value, parameter)


def check_scheduler_state(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Check that a saved `state_dict` is of a scheduler like this run's: loading it replaces attributes."""
    own = scheduler.state_dict()
    if missing := own.keys() - state.keys():
        raise _other(scheduler, f"it has no `{min(missing)}`")
    for name, value in state.items():
        if name in own:
            _check_kind(scheduler, f"`{name}`", value, own[name])
        elif callable(getattr(type(scheduler), name, None)):
            raise _other(scheduler, f"it has `{name}`, which is a method")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScalerState:
    """The result of `torch.amp.GradScaler.state_dict`."""

    scale: Annotated[float, Meta(gt=0, le=2.0**127)]
    growth_factor: Annotated[float, Meta(gt=1, le=2.0**20)]
    backoff_factor: Annotated[float, Meta(gt=0, lt=1)]
    growth_interval: PositiveInt
    growth_tracker: NonNegativeInt


def check_scaler_state(state: Mapping[str, Any]) -> None:
    """Check that a saved `state_dict` is of a loss scaler."""
    try:
        named = {name.removeprefix("_"): value for name, value in state.items()}
        from_builtins(named, _ScalerState, where="the saved state of the loss scaler")
    except FileFormatError as error:
        raise ResumeError(f"the run cannot be resumed: {error}") from error


def _check_tensor(optimizer: Optimizer, name: str, value: Tensor, parameter: nn.Parameter) -> None:
    """Check the state of an optimizer of torch: one number, or a tensor that fits its parameter.

    Adafactor keeps a mean for each row and each column, with a size of 1 for the other dimension.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or value.numel() == 1:
        return
    shape = getattr(parameter, "ds_shape", parameter.shape)  # DeepSpeed leaves a shard on each rank
    fits = value.dim() == len(shape) and all(
        size in (1, own) for size, own in zip(value.shape, shape, strict=True)
    )
    if not fits or value.dtype != parameter.dtype:
        raise _other(
            optimizer,
            f"{name} is {value.dtype} of shape {tuple(value.shape)}, and the parameter {parameter.dtype} of "
            f"shape {tuple(shape)}",
        )


_KINDS = (bool, int | float, str, Tensor, list | tuple, dict)


def _check_kind(owner: object, name: str, saved: Any, own: Any) -> None:
    """Check that a saved value has the kind of the current one: a number, a list, and so on."""
    if saved is None or own is None:
        return
    for kind in _KINDS:
        if isinstance(own, kind):
            if not isinstance(saved, kind):
                raise _other(owner, f"{name} is a {type(saved).__name__}, and a {type(own).__name__} is due")
            return


def _other(owner: object, what: str) -> ResumeError:
    return ResumeError(
        f"the saved state is not that of this {type(owner).__name__}: {what}. Resume with the optimizer and "
        "schedule that the run was begun with."
    )
