"""A plan's unit actions → an `nn.Module`, in place and undoable."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from brimful.applying.recompute import RecomputedForward
from brimful.errors import UnknownNameError, UsageError
from brimful.settings import Action, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Unit actions in force on a model until `remove`."""

    model: nn.Module
    units: tuple[str, ...]
    """Paths of the units that are recomputed."""

    def remove(self) -> None:
        """Give every unit its own forward back; calling it again does nothing."""
        for fqn in self.units:
            unit = self.model.get_submodule(fqn)
            if isinstance(unit.__dict__.get("forward"), RecomputedForward):
                original = unit.__dict__.pop("forward").forward
                if original != unit.forward:  # the instance had a forward of its own before
                    unit.forward = original


def apply_units(model: nn.Module, settings: Settings) -> Applied:
    """Put the unit actions of `settings` in force on `model`.

    Parameters, buffers, `state_dict` keys, classes and hooks stay as they are.

    Args:
        model: The model the settings were planned for.
        settings: Their `units` name modules by path.

    Returns:
        What `remove` undoes.

    Raises:
        UnknownNameError: A unit is not in the model, which then stays as it was.
        UsageError: The model has actions in force already.
    """
    modules = dict(model.named_modules())
    recomputed = [unit.fqn for unit in settings.units if unit.action is Action.RECOMPUTE]
    for fqn in recomputed:
        if fqn not in modules:
            raise UnknownNameError("unit", fqn, modules, "The plan was made for another model.")
        if isinstance(modules[fqn].__dict__.get("forward"), RecomputedForward):
            raise UsageError(f"unit {fqn!r} is recomputed already; remove the plan in force first.")
    for fqn in recomputed:
        unit = modules[fqn]
        unit.forward = RecomputedForward(unit, unit.forward)
    return Applied(model=model, units=tuple(recomputed))
