"""Tables of `docs/benchmarks.md` on answers: those once silently wrong, and those for public scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from brimful.quantities import format_bytes
from gpu_tables import Load, Stamp


def _verdicts(found: dict[str, int]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(found.items())) or "–"


def silent_error_lines(load: Load, stamp: Stamp) -> Iterator[str]:
    """Programs by kind, on the code before and on the present one."""
    result, before = load("silent_errors"), load("silent_errors_before")
    total, earlier = (Counter(row["verdict"] for row in each["rows"]) for each in (result, before))
    yield (
        f"*{total.total()} programs: {_verdicts(total)}. Of {earlier.total()} of them at commit "
        f"{before['src_commit'][:9]}: {_verdicts(earlier)}. {stamp(result)}*"
    )
    yield ""
    yield "| kind | programs | earlier commit | now |"
    yield "|---|--:|---|---|"
    for kind, found in result["kinds"].items():
        was = _verdicts(before["kinds"].get(kind, {}))
        yield f"| {kind} | {sum(found.values())} | {was} | {_verdicts(found)} |"


def public_script_lines(load: Load, stamp: Stamp) -> Iterator[str]:
    """Public training scripts: the estimate, and the plan in little more than the least feasible budget."""
    result = load("public_scripts")
    summary = result["summary"]
    yield (
        f"*{summary['scripts']} scripts of {summary['repositories']} repositories: "
        f"{_verdicts(summary['verdicts'])}. {summary['estimates_within_half_a_percent']} of "
        f"{summary['estimates']} estimates are within 0.5 %, the median is "
        f"{summary['median_error_fraction']:.3%} off; {summary['plans_within_budget']} of {summary['plans']} "
        f"plans keep their budget. {stamp(result)}*"
    )
    yield ""
    yield "| script | verdict | peak | error | budget | of it | planning |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for row in result["rows"]:
        link = f"https://github.com/{row['repository']}/blob/{row['commit']}/{row['file']}"
        yield f"| [{row['name']}]({link}) | {' | '.join((row['verdict'], *_script_figures(row)))} |"


def _script_figures(row: dict[str, Any]) -> Iterator[str]:
    true_bytes, plan = row["true_bytes"], row["plan"]
    yield from ("–", "–") if true_bytes is None else (format_bytes(true_bytes), f"{row['error_fraction']:+.2%}")
    if plan is None:
        yield from "–––"
    else:
        of_budget = plan["true_bytes"] / plan["budget_bytes"]
        yield from (format_bytes(plan["budget_bytes"]), f"{of_budget:.1%}", f"{plan['planning_seconds']:.1f} s")
