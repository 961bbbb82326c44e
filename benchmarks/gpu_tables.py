"""The tables of what one GPU did, in docs/benchmarks.md, for `tables.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

Load = Callable[[str], dict[str, Any]]
Stamp = Callable[[dict[str, Any]], str]

QUANTITIES = {
    "peak allocated": "peak_allocated_bytes",
    "peak reserved": "peak_reserved_bytes",
    "with the CUDA context": "peak_device_bytes",
}
WAYS = ("ours", "recompute everything", "every second block", "torchtitan selective", "attention only", "plain")


def step_lines(load: Load, stamp: Stamp) -> Iterator[str]:
    """Memory and time of the recorded steps, as predicted before they were measured and by the present code."""
    record, memory, times = load("gpu_record"), load("gpu_predicted"), load("gpu_times")
    steps = record["configurations"]
    yield f"*{len(steps)} steps on one {record['machine']['gpu']}. {stamp(record)}*"
    yield ""
    yield "| predicted | before the measurement: median, largest error | by the present code |"
    yield "|---|--:|--:|"
    for what, key in QUANTITIES.items():
        then, now = memory["summary"]["before"][key], memory["summary"]["now"][key]
        yield f"| {what} | {_errors(then)} | {_errors(now)} |"
    covered = [memory["summary"][when]["predicted_device_interval_bytes"]["in"] for when in ("before", "now")]
    yield f"| steps within the interval of memory | {covered[0]} | {covered[1]} |"
    before = [abs(step["error_fractions"]["step_seconds"]) for step in steps]
    yield (
        f"| time | {_time_errors(before)} | {_time_errors(_of(times, 'uncalibrated'))}; "
        f"calibrated {_time_errors(_of(times, 'calibrated'))} |"
    )
    by_now = [sum(row[kind]["is_covered"] for row in times["rows"]) for kind in ("uncalibrated", "calibrated")]
    yield f"| steps within the interval of time | – | {by_now[0]}; calibrated {by_now[1]} |"


def h100_accuracy_lines(load: Load) -> Iterator[str]:
    """The same steps in the README: as predicted before they were measured, and by the present code."""
    steps, memory, times = load("gpu_record")["configurations"], load("gpu_predicted"), load("gpu_times")
    before, now = memory["summary"]["before"], memory["summary"]["now"]
    allocated, reserved = ("peak_allocated_bytes", "peak_reserved_bytes")
    yield (
        f"| peak memory | steps on one H100, by us: allocated; reserved | {len(steps)} "
        f"| {_median(before[allocated])}; {_median(before[reserved])} "
        f"| at most {_largest(before[allocated])}; {_largest(before[reserved])}; by the present code, which "
        f"learned from them, {_largest(now[allocated])}; {_largest(now[reserved])} |"
    )
    taken = statistics.median(abs(step["error_fractions"]["step_seconds"]) for step in steps)
    ours, calibrated = (statistics.median(_of(times, kind)) for kind in ("uncalibrated", "calibrated"))
    yield (
        f"| step time | the same steps | {len(steps)} | {taken:.0%} | by the present code {ours:.1%}, "
        f"calibrated {calibrated:.1%} |"
    )


def _median(found: dict[str, float]) -> str:
    return f"{found['median_error_fraction']:.1%}"


def _largest(found: dict[str, float]) -> str:
    return f"{found['largest_error_fraction']:.0%}"


def _errors(found: dict[str, float]) -> str:
    return f"{found['median_error_fraction']:.2%}, {found['largest_error_fraction']:.1%}"


def _time_errors(errors: list[float]) -> str:
    return f"{statistics.median(errors):.1%}, {max(errors):.0%}"


def _of(times: dict[str, Any], kind: str) -> list[float]:
    return [abs(row[kind]["error_fraction"]) for row in times["rows"]]


def mechanism_lines(load: Load, stamp: Stamp) -> Iterator[str]:
    """What was certified, and the memory that each mechanism took beside its prediction of that day."""
    result = load("gpu_mechanisms")
    found = result["summary"]
    yield (
        f"*{found['certificates_that_hold']} of {found['mechanisms']} certificates hold; "
        f"{found['bitwise_comparisons_of_recomputation']} of {found['comparisons_of_recomputation']} "
        "comparisons of recomputation and offload are bit-identical. Memory ran out at "
        f"{found['out_of_memory_points']} operations of a step, one at a time: {found['survived_bitwise']} "
        "times the run ended with the same "
        f"losses and weights, bit for bit. {stamp(result)}*"
    )
    yield ""
    yield "| model | mechanism | peak, measured | largest difference of a loss in six steps |"
    yield "|---|---|--:|--:|"
    for row in result["rows"]:
        if "mechanism" in row and "measured_peak_allocated_bytes" in row:
            size = row["measured_peak_allocated_bytes"] / 2**30
            difference = row["largest_relative_difference_of_losses"]
            yield (
                f"| {row['part']} | {row['mechanism']} | {size:.2f} GiB "
                f"| {f'{difference:.1e}' if difference else 'none'} |"
            )


def plan_lines(load: Load, stamp: Stamp) -> Iterator[str]:
    """Plans beside ways by hand, each in the memory of a smaller GPU."""
    result = load("gpu_plan")
    found = result["summary"]
    yield (
        f"*{found['ours_ran']} of {found['cases']} plans ran within their budget, "
        f"{found['ours_fastest_or_within_5_percent']} were the fastest or within 5 % of it. Not measured for "
        f"lack of time: {', '.join(each.partition(':')[0] for each in result['skipped'])}. {stamp(result)}*"
    )
    yield ""
    yield "| model, budget | " + " | ".join(WAYS) + " |"
    yield "|---|" + "--:|" * len(WAYS)
    for row in result["rows"]:
        cells = " | ".join(_way(row["ways"].get(way)) for way in WAYS)
        yield f"| {row['model']}, {row['budget_bytes'] / 2**30:.0f} GiB | {cells} |"


def _way(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    if "measured_step_seconds" in found:
        size = found["measured_peak_reserved_bytes"] / 2**30
        return f"{found['measured_step_seconds'] * 1e3:.0f} ms, {size:.1f} GiB"
    return "out of memory" if "out_of_memory" in found else "no setting"
