"""A plan's unit actions → an `nn.Module`, in place and undoable."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from brimful.applying.recompute import RecomputedForward, RecomputedRuns
from brimful.errors import UnknownNameError, UsageError
from brimful.settings import Settings, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Unit actions in force on a model until `remove`."""

    model: nn.Module
    units: tuple[str, ...]
    """The units that are recomputed."""

    def remove(self) -> None:
        """Give every module its own forward back; calling it again does nothing."""
        for path in {_patched_path(fqn) for fqn in self.units}:
            module = self.model.get_submodule(path)
            stand_in = module.__dict__.get("forward")
            if isinstance(stand_in, _STAND_INS):
                del module.__dict__["forward"]
                if stand_in.forward != module.forward:  # the instance had a forward of its own before
                    module.forward = stand_in.forward


def apply_units(model: nn.Module, settings: Settings) -> Applied:
    """Put the unit actions of `settings` in force on `model`.

    Parameters, buffers, `state_dict` keys, classes and hooks stay as they are.

    Args:
        model: The model the settings were planned for.
        settings: Their `units` name modules by path, or runs of a Sequential's children.

    Returns:
        What `remove` undoes.

    Raises:
        UnknownNameError: A unit is not in the model, which then stays as it was.
        UsageError: The model has actions in force already.
    """
    modules = dict(model.named_modules())
    runs: dict[str, list[Span]] = defaultdict(list)
    for fqn in settings.recomputed:
        _check_unit(modules, fqn)
        span = Span.parse(fqn)
        if span is not None:
            runs[span.parent].append(span)
    for fqn in settings.recomputed:
        if Span.parse(fqn) is None:
            modules[fqn].forward = RecomputedForward(modules[fqn], modules[fqn].forward)
    for path, spans in runs.items():
        sequential = modules[path]
        assert isinstance(sequential, nn.Sequential)
        sequential.forward = RecomputedRuns(  # type: ignore[method-assign]
            sequential, sequential.forward, [(span.first, span.last) for span in spans]
        )
    return Applied(model=model, units=settings.recomputed)


def _check_unit(modules: dict[str, nn.Module], fqn: str) -> None:
    path = _patched_path(fqn)
    if path not in modules:
        raise UnknownNameError("unit", fqn, modules, "The plan was made for another model.")
    module, span = modules[path], Span.parse(fqn)
    if isinstance(module.__dict__.get("forward"), _STAND_INS):
        raise UsageError(f"unit {fqn!r} is recomputed already; remove the plan in force first.")
    if span is not None:
        names = [name for name, _child in module.named_children()]
        if not isinstance(module, nn.Sequential) or not {span.first, span.last} <= set(names):
            raise UnknownNameError("unit", fqn, names, "The plan was made for another model.")


def _patched_path(fqn: str) -> str:
    """Path of the module whose forward a unit replaces."""
    span = Span.parse(fqn)
    return fqn if span is None else span.parent


_STAND_INS = (RecomputedForward, RecomputedRuns)
