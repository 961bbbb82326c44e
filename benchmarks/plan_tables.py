"""Tables of the planner's predicted figures: beside a lower bound, and the simplest beside the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from brimful.quantities import format_bytes

Load = Callable[[str], dict[str, Any]]
Stamp = Callable[[dict[str, Any]], str]


def bound_lines(load: Load, stamp: Stamp) -> Iterator[str]:
    """Plans beside a lower bound of all schedules that recompute."""
    result = load("plan_bound")
    summary = result["summary"]["bound"]
    yield (
        f"*{result['device']}, predicted. Plans are {summary['median_plan_above']:.1%} above the bound in the "
        f"median of {result['summary']['cases']} budgets, at most {summary['largest_plan_above']:.1%}, and at "
        f"most 1 % above in {summary['within_1_percent']}. Solver: at most {result['limit_seconds']:.0f} s "
        f"for a bound. {stamp(result)}*"
    )
    yield ""
    yield "| model | ops | budget | plan | bound | plan above | above, same allocated bytes | solver's gap |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for row in result["rows"]:
        bound, same = row["bound"], row["bound_in_allocated_bytes_of_plan"]
        above = min(bound["plan_above"], same["plan_above"])  # in less memory no schedule is faster
        gap = "–" if bound["solver_gap"] is None else f"{abs(bound['solver_gap']):.1%}"
        yield (
            f"| {row['model']}, {row['precision']}, {row['batch_size']} | {row['ops']} "
            f"| {row['budget_fraction']:.0%} | {row['plan']['overhead']:+.1%} | {bound['overhead']:+.1%} "
            f"| {bound['plan_above']:.1%} | {above:.1%} | {gap} |"
        )


def simplest_lines(load: Load, stamp: Stamp) -> Iterator[str]:
    """The simplest plan, and the simplest safe one, beside the fastest."""
    result = load("plan_simplest")
    summary = result["summary"]
    notes = "".join(f" {note}." for note in result["notes"])
    yield (
        f"*{result['device']}, predicted; host memory: {format_bytes(result['host_bytes'])}.{notes} "
        f"{stamp(result)}*"
    )
    yield ""
    yield "| plan | another than the fastest | median cost | largest cost | mean budget left in addition |"
    yield "|---|--:|--:|--:|--:|"
    names = {"simplest": "simplest", "simplest_and_safe": "simplest, exceeds the budget in at most 1 %"}
    for way, label in names.items():
        found = summary[way]
        yield (
            f"| {label} | {found['changed']} of {found['plans']} | {found['median_cost']:+.1%} "
            f"| {found['largest_cost']:+.1%} | {found['mean_headroom_gained']:+.1%} |"
        )
    yield ""
    yield "| model | budget | fastest | simplest | simplest and safe |"
    yield "|---|--:|---|---|---|"
    for row in result["rows"]:
        cells = " | ".join(_beside_fastest(row[way], row["fastest"]) for way in ("fastest", *names))
        yield f"| {row['model']} | {row['budget_fraction']:.0%} | {cells} |"


def _beside_fastest(plan: dict[str, Any] | None, fastest: dict[str, Any] | None) -> str:
    """A plan's complexity, its time over the fastest, and its probability of exceeding the budget."""
    if plan is None or fastest is None:
        return "–"
    more = plan["step_seconds"] / fastest["step_seconds"] - 1
    cost = "" if plan["settings"] == fastest["settings"] else f", {more:+.1%}"
    return f"{plan['complexity']}{cost}, risk {plan['exceedance_probability']:.1%}"
