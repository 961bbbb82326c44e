"""The schema of a save.

    saves/step-000000120/
      run.json            the identity of the run and its progress: numbers and text
      state.pt            optimizer, schedule, loss scaler, moving average, random states: with tensors
      model.safetensors   parameters and buffers, except those in the next files
      frozen.safetensors  parameters that are not trained, if there are any; see `saves.py`
      shards/             each rank's shards of parameters and optimizer state; see `shards.py`
      manifest.json       size and SHA-256 of each of these files; see `restore.py`

`Checkpoint` has everything but parameters and buffers: the fields of `run.json`, as `RunFile` has them, and
those of `state.pt`. Reading checks every number against its range, and tries random states on separate
generators; `check_parts` compares a checkpoint with a run's own optimizer, schedule and loss scaler.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from brimful.codec import NonNegativeInt, PositiveInt, decode_json, from_json_document, to_json_document
from brimful.errors import FileFormatError, ResumeError
from brimful.execution.random_state import RandomState
from brimful.results import SelfCorrection, ValidationRecord
from brimful.settings import Settings

Rates = tuple[tuple[float, ...], ...]
"""The learning rate and weight decay of each parameter group, as far as it has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """The content of `run.json`: the annotations are its schema."""

    step: NonNegativeInt
    """Number of optimizer steps taken, including those that the loss scaler skipped."""
    updates: NonNegativeInt
    """Number of steps that changed the parameters."""
    skipped_in_a_row: NonNegativeInt
    """Number of steps that the loss scaler skipped since the last update."""
    epoch: PositiveInt
    """Number of the epoch, from 1."""
    batches: NonNegativeInt
    """Number of batches of this epoch that the run has trained on."""
    settings: Settings
    """The settings in force."""
    optimizer_class: str
    asked_settings: Settings
    """The settings in the configuration; those in force may take less memory."""
    seed: Annotated[int, Meta(ge=0)]
    about: Any
    """`Job.about`, as JSON."""
    rates: Rates
    schedule: str | None
    """None without a `Schedule`, and for a scheduler made by a function."""
    validations: tuple[ValidationRecord, ...]
    """All validations so far: the lowest loss determines the best weights and early stopping."""
    metrics_bytes: NonNegativeInt
    """Length of `metrics.jsonl` in bytes."""
    self_correction: SelfCorrection | None = None
    """Predicted beside measured in the first steps; None before they were compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(RunFile):
    """Everything that a run resumes from, except parameters and buffers."""

    optimizer: dict[str, Any]
    """The `state_dict` of the optimizer, without sharded tensors."""
    scheduler: dict[str, Any] | None
    """The `state_dict` of the scheduler; None without one."""
    scaler: dict[str, Any] | None
    """The `state_dict` of the loss scaler; None unless the precision is fp16."""
    average: dict[str, Tensor] | None
    """The moving average of the parameters by name; None without one."""
    random: tuple[RandomState, ...] = ()
    """The random state of each rank after its last step."""
    data_random: RandomState
    """The random state before the next batch is read."""
    epoch_random: RandomState
    """The random state at the start of the epoch, where a DataLoader draws the order of its samples."""

    def run_document(self) -> dict[str, Any]:
        """The content of `run.json`."""
        return to_json_document(RunFile(**{each.name: getattr(self, each.name) for each in fields(RunFile)}))

    def state_document(self) -> dict[str, Any]:
        """The content of `state.pt`: dicts, lists, numbers and tensors, which load without running code."""
        return {
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "average": self.average,
            "random": [each.to_save() for each in self.random],
            "data_random": self.data_random.to_save(),
            "epoch_random": self.epoch_random.to_save(),
        }

    @classmethod
    def from_documents(cls, run_json: bytes, state: object, *, where: str) -> Self:
        """Decode and check a checkpoint from the documents that `run_document` and `state_document` returned.

        `state` is the content of `state.pt`, loaded by `torch.load`; `where` names the save in errors. Raises
        FileFormatError, which names the file and the field, if a type or range is wrong.
        """
        run = decode_json(run_json, RunFile, where=f"{where}run.json")
        return cls(
            **{each.name: getattr(run, each.name) for each in fields(run)},
            **_checked_state(state, where=f"{where}state.pt"),
        )


def _checked_state(document: object, *, where: str) -> dict[str, Any]:
    """Decode the content of `state.pt` by field of a checkpoint."""
    if not isinstance(document, dict) or document.keys() != _STATE.keys():
        found = sorted(map(str, document)) if isinstance(document, dict) else type(document).__name__
        raise FileFormatError(f"{where}: expected {sorted(_STATE)}, got {found}.")
    return {name: decode(document[name], where=f"{where}: field `{name}`") for name, decode in _STATE.items()}


_Word = Annotated[int, Meta(ge=0, lt=2**32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generators:
    """The states of Python's and NumPy's generator, both MT19937."""

    python: tuple[Literal[3], Annotated[list[_Word], Meta(min_length=625, max_length=625)], float | None]
    numpy: tuple[
        Literal["MT19937"],
        Annotated[list[_Word], Meta(min_length=624, max_length=624)],
        Annotated[int, Meta(ge=0, le=624)],  # NumPy reads beyond its numbers rather than check it
        Literal[0, 1],
        float,
    ]


def _random_state(value: Any, *, where: str) -> RandomState:
    """Decode a random state, and try it on separate generators of this Python, NumPy and torch."""
    if not isinstance(value, dict) or value.keys() != {"python", "numpy", "host", "cuda"}:
        raise FileFormatError(f"{where}: expected the states of `python`, `numpy`, `host` and `cuda`.")
    from_json_document({name: value[name] for name in ("python", "numpy")}, _Generators, where=where)

    try:
        torch.Generator().set_state(value["host"])
        state = RandomState.from_save(value)
        random.Random().setstate(state.python)
        if state.cuda is not None and (state.cuda.dtype != torch.uint8 or not state.cuda.is_cpu):
            raise TypeError("`cuda` is not a tensor of bytes")
        return state
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise FileFormatError(f"{where}: {type(error).__name__}: {reason}") from error


def _random_states(value: Any, *, where: str) -> tuple[RandomState, ...]:
    if not isinstance(value, list) or not value:
        raise FileFormatError(f"{where}: expected the random numbers of each rank.")
    of_rank = where.removesuffix("`")
    return tuple(_random_state(each, where=f"{of_rank}[{rank}]`") for rank, each in enumerate(value))


def _optimizer_state(value: Any, *, where: str) -> dict[str, Any]:
    """Check a `state_dict`: the state of each parameter by its number, and groups of these numbers."""
    found = _named(value, where=where)
    states, groups = (found or {}).get("state"), (found or {}).get("param_groups")
    if found is None or not isinstance(states, dict) or not isinstance(groups, list):
        raise FileFormatError(f"{where}: expected a `state_dict` with `state` and `param_groups`.")
    for number, state in states.items():
        if not isinstance(number, int) or not isinstance(state, dict):
            raise FileFormatError(f"{where}: `state` of {number!r}: expected a dict by the parameter's number.")
    for index, group in enumerate(groups):
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
            raise FileFormatError(
                f"{where}: `param_groups[{index}]`: expected a dict with numbers in `params`."
            )
    return found


def _named(value: Any, *, where: str) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise FileFormatError(f"{where}: expected a dict by names, got {type(value).__name__}.")
    return value


def _tensors(value: Any, *, where: str) -> dict[str, Tensor] | None:
    found = _named(value, where=where)
    if found is not None and not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise FileFormatError(f"{where}: expected tensors.")
    return found


_STATE: Mapping[str, Callable[..., Any]] = {
    "optimizer": _optimizer_state,
    "scheduler": _named,
    "scaler": _named,
    "average": _tensors,
    "random": _random_states,
    "data_random": _random_state,
    "epoch_random": _random_state,
}
"""The fields of `state.pt`, and what checks each."""


def check_parts(
    state: Checkpoint, optimizer: Optimizer, scheduler: LRScheduler | None, scaler: GradScaler | None
) -> None:
    """Check that this run's optimizer, schedule and loss scaler can load a checkpoint; else raise ResumeError.

    Their `load_state_dict` accepts almost anything, and state that does not fit would raise or broadcast within
    an update.
    """
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
        from_json_document(named, _ScalerState, where="the saved state of the loss scaler")
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
