"""What differs between two plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import groupby
from typing import Any

from brimful.codec import to_json_document
from brimful.planner import Plan
from brimful.report.layout import Listing, Remark, Report
from brimful.report.plans import format_probability
from brimful.report.unit_names import folded
from brimful.settings import Action, Settings, UnitAction
from brimful.utils.quantities import format_bytes, format_rate, format_seconds

Difference = tuple[str, str, str]
"""What differs, in the first plan and in the second, for a reader."""


def differences_report(first: Plan, second: Plan, names: tuple[str, str]) -> Report:
    """The differences of two plans as a table; `names` are those of the plans."""
    rows = tuple(_differences(first, second))
    heading = f"{first.job}: {names[0]} and {names[1]}"
    if not rows:
        same = not differences_document(first, second)
        found = "The plans are the same." if same else "The plans differ only in what --json lists."
        return Report(heading=heading, parts=(Remark("", found),))
    whats, firsts, _ = zip(*rows, strict=True)
    widths = max(map(len, whats)) + 2, max(map(len, (names[0], *firsts))) + 2
    line = f"  {{:<{widths[0]}}}{{:<{widths[1]}}}{{}}"
    return Report(heading=heading, parts=(Listing(line=line, heading=("", *names), rows=rows),))


def differences_document(first: Plan, second: Plan) -> dict[str, Any]:
    """The fields of the plans' documents that differ, each with both values."""
    of_first, of_second = first.to_json(), second.to_json()
    different = {key for key in of_first | of_second if of_first.get(key) != of_second.get(key)}
    return {key: [of_first.get(key), of_second.get(key)] for key in [*of_first, *of_second] if key in different}


def _differences(first: Plan, second: Plan) -> Iterator[Difference]:
    shown: dict[str, Callable[[Plan], str]] = {
        "job": lambda plan: plan.job,
        "device": lambda plan: plan.device,
        "budget": lambda plan: format_bytes(plan.budget_bytes),
        "predicted peak": lambda plan: format_bytes(plan.predicted_peak_device_bytes),
        "predicted step": lambda plan: format_seconds(plan.predicted_step_seconds),
        "speed": lambda plan: format_rate(plan.predicted_samples_per_second),
        "host memory": lambda plan: format_bytes(plan.predicted_host_bytes),
        "peak at": lambda plan: plan.peak_at,
        "over it with probability": lambda plan: _chance(plan.predicted_exceedance_probability),
    }
    for what, text in shown.items():
        if text(first) != text(second):
            yield what, text(first), text(second)
    yield from _of_settings(first.settings, second.settings)
    of_models = (dict(each.source.options) if each.source else {} for each in (first, second))
    yield from _of_options("model's", *of_models)
    yield from _of_options("option", to_json_document(first.asked), to_json_document(second.asked))


def _of_options(whose: str, first: dict[str, Any], second: dict[str, Any]) -> Iterator[Difference]:
    for key in first | second:
        if first.get(key) != second.get(key):
            yield f"{whose} {key}", str(first.get(key)), str(second.get(key))


def _chance(probability: float | None) -> str:
    return "–" if probability is None else format_probability(probability)


def _of_settings(first: Settings, second: Settings) -> Iterator[Difference]:
    for each in fields(Settings):
        values = getattr(first, each.name), getattr(second, each.name)
        if each.name != "units" and values[0] != values[1]:
            yield each.name, str(values[0]), str(values[1])
    by_unit = [{unit.fqn: unit for unit in settings.units} for settings in (first, second)]
    differing: dict[str, tuple[str, str] | None] = {}
    for unit in by_unit[0] | by_unit[1]:
        before, after = (units.get(unit, UnitAction(fqn=unit, action=Action.KEEP)) for units in by_unit)
        differing[unit] = (_of_unit(before), _of_unit(after)) if before != after else None
    for actions, alike in groupby(differing, key=lambda unit: differing[unit]):
        if actions is not None:
            yield folded(alike), *actions


def _of_unit(unit: UnitAction) -> str:
    if unit.most_offloaded_bytes is not None:
        return f"{unit.action}, at most {format_bytes(unit.most_offloaded_bytes)}"
    return f"{unit.action}, {len(unit.saved)} ops" if unit.saved else str(unit.action)
