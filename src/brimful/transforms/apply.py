"""A plan's unit actions → an `nn.Module`, in place and undoable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import nn

from brimful.errors import UnknownNameError, UsageError
from brimful.settings import (
    Action,
    ChunkedLoss,
    Settings,
    Span,
    UnitAction,
    has_input_ops,
    module_part,
    with_input_ops,
)
from brimful.torch_utils.module_names import plain_modules, resolved, unwrapped
from brimful.transforms.chunked_loss import DeferringLinear
from brimful.transforms.compiled import CompiledCall, CompiledModules, compiled_calls
from brimful.transforms.input_ops import FollowedForward, InputOps
from brimful.transforms.offload import OffloadSchedule, ScheduledUnit
from brimful.transforms.recompute import CarryOut, RecomputedRegion, UnitForward, UnitRuns
from brimful.transforms.segments import Link, links

_CHECKPOINTING_SWITCHES = ("gradient_checkpointing", "grad_checkpointing")
"""Attributes that switch on checkpointing in transformers (5.23) and diffusers (0.42), and in timm (1.0)."""

_StandIn = UnitForward | UnitRuns | DeferringLinear | FollowedForward | CompiledCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Unit actions in force on a model until `remove`."""

    model: nn.Module
    units: tuple[str, ...]
    """The units that are not kept."""
    _patched: tuple[tuple[nn.Module, _StandIn], ...] = field(repr=False)
    _switched_off: list[tuple[nn.Module, str]] = field(repr=False)

    def remove(self) -> None:
        """Restore the forward and checkpointing of every module; calling it again does nothing."""
        while self._switched_off:
            setattr(*self._switched_off.pop(), True)
        for module, stand_in in self._patched:
            if module.__dict__.get("forward") is stand_in:
                del module.__dict__["forward"]
                if stand_in.forward != module.forward:  # the instance had a forward of its own before
                    module.forward = stand_in.forward


def apply_units(model: nn.Module, settings: Settings, compiled: CompiledModules | None = None) -> Applied:
    """Put the unit actions of `settings` in force on `model`, and compile what they compile.

    Parameters, buffers, `state_dict` keys, classes and hooks stay as they are. Hooks of a unit fire once per
    forward, as before; those of modules inside it fire again when it is recomputed. Offloading takes the saved
    tensors that are on the device of the unit's arguments; see `offload.py`.

    Args:
        model: The model the settings were planned for, by itself or wrapped, by `torch.compile` for instance.
        settings: Their `units` name modules by path, or runs of a Sequential's children.
        compiled: Compiles modules; None compiles them by Inductor for the device that they are on.

    Returns:
        What `remove` undoes.

    Raises:
        UnknownNameError: A unit is not in the model, which then stays as it was.
        UsageError: The model has actions in force already, two units overlap as runs, a unit cannot be
            offloaded, or nothing can be compiled; it stays as it was.
    """
    modules = plain_modules(model)
    settings = _by_plain_names(settings, modules)
    stand_ins: list[tuple[nn.Module, _StandIn]] = []
    runs: dict[str, list[tuple[int, int, CarryOut]]] = defaultdict(list)
    schedule = OffloadSchedule() if settings.offloaded else None
    input_ops = InputOps()
    for unit, link in zip(settings.units, links(settings.units, input_ops.derived), strict=True):
        if unit.action is Action.KEEP and schedule is None:
            continue
        span = Span.parse(unit.fqn)
        module = _find(modules, unit.fqn, module_part(unit.fqn) if span is None else span.parent)
        carry_out = _way(unit, link, schedule)
        if span is None:
            stand_ins.append((module, UnitForward(module, carry_out)))
        else:
            runs[span.parent].append((*_positions(module, unit.fqn, span), carry_out))
    for path, positions in runs.items():
        sequential = unwrapped(modules[path])
        assert isinstance(sequential, nn.Sequential)
        _check_apart(path, positions)
        stand_ins.append((sequential, UnitRuns(sequential, positions)))
    if any(has_input_ops(fqn) for fqn in settings.recomputed):
        stand_ins.append((modules[""], FollowedForward(modules[""], input_ops)))
    if settings.chunked_loss is not None:
        stand_ins.append(_deferring(modules, settings.chunked_loss))
    if len({id(module) for module, _stand_in in stand_ins}) < len(stand_ins):
        raise UsageError("a unit is named twice, or a Sequential and also a run of its children.")
    _check_offloaded(settings.units, modules)
    stand_ins += compiled_calls(settings, modules, compiled)
    for module, stand_in in stand_ins:
        module.forward = stand_in
    switches = [] if settings.own_checkpointing else list(_switches_on(model))
    for module, name in switches:
        setattr(module, name, False)
    return Applied(
        model=model,
        units=settings.changed,
        _patched=tuple(stand_ins),
        _switched_off=switches,
    )


def _switches_on(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules that checkpoint what is inside them, each with the name of the attribute that switches it on."""
    for module in model.modules():
        yield from ((module, name) for name in _CHECKPOINTING_SWITCHES if getattr(module, name, None) is True)


def _by_plain_names(settings: Settings, modules: dict[str, nn.Module]) -> Settings:
    """Settings whose names of units and layers have no wrappers in them."""

    def plain(fqn: str) -> str:
        if has_input_ops(fqn):
            return with_input_ops(plain(module_part(fqn)))
        span = Span.parse(fqn)
        if span is None:
            return resolved(fqn, modules)
        return str(Span(parent=resolved(span.parent, modules), first=span.first, last=span.last))

    chunked = settings.chunked_loss
    return replace(
        settings,
        units=tuple(replace(unit, fqn=plain(unit.fqn)) for unit in settings.units),
        chunked_loss=None if chunked is None else replace(chunked, layer=plain(chunked.layer)),
    )


def _way(unit: UnitAction, link: Link, schedule: OffloadSchedule | None) -> CarryOut:
    """How a unit's forward runs; with a `schedule`, a kept unit too schedules the copies of other units."""

    def carry_out(function: Callable[..., Any], modules: Sequence[nn.Module]) -> Callable[..., Any]:
        if unit.action in (Action.RECOMPUTE, Action.SAVE, Action.NEST):
            function = RecomputedRegion(function, modules, unit, link)
        if schedule is None:
            return function
        return ScheduledUnit(function, modules, schedule, unit)

    return carry_out


def _check_offloaded(units: Sequence[UnitAction], modules: dict[str, nn.Module]) -> None:
    """Raise `UsageError` if no unit follows an offloaded one, or if it contains another or is inside of one.

    Copies to and from the host overlap with the next unit, so there must be one beside the offloaded one.
    """
    if units and units[-1].action is Action.OFFLOAD:
        raise UsageError(
            f"unit {units[-1].fqn!r} is offloaded and the last one: what it saved is needed again before a "
            "copy could come and go. Keep or recompute it."
        )
    paths = {unit.fqn: _paths(unit.fqn, modules) for unit in units}
    for fqn in (unit.fqn for unit in units if unit.action is Action.OFFLOAD):
        for other in paths.keys() - {fqn}:
            if any(_contains(a, b) for a in paths[other] for b in paths[fqn]):
                raise UsageError(
                    f"unit {fqn!r} is offloaded, and inside of {other!r} or around it. Offload the one or the "
                    "other, or neither."
                )


def _paths(fqn: str, modules: dict[str, nn.Module]) -> list[str]:
    """Paths of the modules that make up a unit."""
    span = Span.parse(fqn)
    if span is None:
        return [module_part(fqn)]
    names = list(unwrapped(modules[span.parent])._modules)
    start, stop = _positions(modules[span.parent], fqn, span)
    return [".".join(part for part in (span.parent, name) if part) for name in names[start:stop]]


def _contains(a: str, b: str) -> bool:
    """Whether the module at one of two different paths is inside of the other."""
    outer, inner = sorted((a, b), key=len)
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _deferring(modules: dict[str, nn.Module], chunked: ChunkedLoss) -> tuple[nn.Module, DeferringLinear]:
    """The layer whose logits are computed in chunks, and the replacement of its forward."""
    layer = unwrapped(modules[chunked.layer]) if chunked.layer in modules else None
    if layer is None:
        hint = "The plan was made for another model."
        raise UnknownNameError("layer", chunked.layer, filter(None, modules), hint)
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:
        raise UsageError(
            f"the loss cannot be computed in chunks: {chunked.layer!r} is not a plain nn.Linear but "
            f"{type(layer).__name__}. Plan again for this model, or omit chunked_loss."
        )
    return layer, DeferringLinear(layer, chunked.chunks)


def _find(modules: dict[str, nn.Module], fqn: str, path: str) -> nn.Module:
    """The module whose forward a unit replaces."""
    if path not in modules:
        hint = "The plan was made for another model."
        for wrapper in ("module", "_orig_mod"):
            if f"{wrapper}.{path}" in modules:
                hint = f"This model is a wrapper: apply the plan to its `.{wrapper}`."
        raise UnknownNameError("unit", fqn, filter(None, modules), hint)
    module = modules[path]
    if any(isinstance(each.__dict__.get("forward"), _StandIn) for each in (module, unwrapped(module))):
        raise UsageError(f"unit {fqn!r} is recomputed already, or offloaded; remove the plan in force first.")
    return module


def _positions(module: nn.Module, fqn: str, span: Span) -> tuple[int, int]:
    """Position of a run's first child, and the position after its last."""
    module = unwrapped(module)
    if type(module).forward is not nn.Sequential.forward or "forward" in module.__dict__:
        raise UsageError(f"unit {fqn!r} is a run of children, but {span.parent!r} is not a plain Sequential.")
    names = list(module._modules)
    if not {span.first, span.last} <= set(names) or names.index(span.first) > names.index(span.last):
        known = [str(Span(parent=span.parent, first=name, last=name)) for name in names]
        raise UnknownNameError("unit", fqn, known, "The plan was made for another model.")
    return names.index(span.first), names.index(span.last) + 1


def _check_apart(path: str, runs: list[tuple[int, int, CarryOut]]) -> None:
    ordered = sorted(run[:2] for run in runs)
    if any(before[1] > after[0] for before, after in pairwise(ordered)):
        raise UsageError(f"two runs of the children of {path!r} overlap.")
